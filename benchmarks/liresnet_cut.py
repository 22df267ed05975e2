"""The LiResNet of liresnet_cifar with smooth activations at its end, trained for the certificate behind its blocks.

    python -m benchmarks.liresnet_cut --data ../shared/data/cifar10 --work cut --limit 1000

Takes ``cifar10-liresnet``, smooths the activations of its neck (``beta=4``), and trains it with ``finetune --loss cut``
on images that are moved, then on images that are flipped only. The result averages an image and its mirror image, and
its weights are rounded to float16. ``certify`` decides each image by gloro, or else by anchored behind the blocks. The
commands are printed. All leave their files in the work folder and go on from there. What each epoch said, the certified
accuracy, the environment and the commands go to benchmarks/results/liresnet_cut.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections import Counter
from pathlib import Path

import lipcert
from benchmarks._env import environment
from benchmarks.liresnet_cifar import EPOCH, rounded, run

RESULT = Path(__file__).parent / "results" / "liresnet_cut.json"
BETA = 4.0
EPS = "36/255"


def start() -> lipcert.Model:
    """``cifar10-liresnet`` with ``beta``, without mirror images."""
    known = lipcert.load("cifar10-liresnet")
    arguments = {key: value for key, value in known.source["arguments"].items() if key != "mirror"}
    model = lipcert.load(known.source["name"], pretrained=False, **arguments, beta=BETA)
    model.net.load_state_dict(known.net.state_dict())
    model.recipe.extend([*known.recipe, {"step": "smooth", "beta": BETA}])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tar and test.tar")
    parser.add_argument("--work", type=Path, required=True, help="folder for the model and the rows")
    parser.add_argument("--epochs", type=int, nargs=2, default=(14, 4), help="of the two runs of finetune")
    parser.add_argument("--limit", type=int, help="certify that many test images of a fixed shuffle, and not all")
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    first, moved, flipped, model = (
        args.work / f"{name}.safetensors" for name in ("start", "moved", "flipped", "rounded")
    )
    rows, log = args.work / "cifar10-liresnet-cut.jsonl", args.work / "log.txt"
    common = [
        "--data", str(args.data / "train.tar"), "--eps", EPS, "--loss", "cut", "--batch-size", "256", "--optimizer",
        "muon", "--amp", "bfloat16", "--channels-last", "--ramp", "2,2,0.5",
    ]  # fmt: skip
    trainings = [
        ["finetune", str(first), *common, "--crop", "shift", "--lr", "2e-3", "--epochs", str(args.epochs[0])],
        ["finetune", str(moved), *common, "--crop", "flip", "--lr", "4e-4", "--epochs", str(args.epochs[1])],
    ]
    trainings = [[*train, "--out", str(out)] for train, out in zip(trainings, (moved, flipped), strict=True)]
    limit = ["--limit", str(args.limit)] if args.limit else []
    certify = ["certify", str(model), "--data", str(args.data / "test.tar"), "--eps", EPS, *limit, "--out", str(rows)]
    if not first.exists():
        lipcert.save(start(), first)
    if not model.exists():
        for train in trainings:
            if not Path(train[-1]).exists():
                run(train, log)
        lipcert.save(rounded(lipcert.load(flipped)), model)
    run(certify, log)
    fields = ("epoch", "loss", "accuracy", "certified_bound", "estimated_bound", "seconds")
    verdicts = [json.loads(line) for line in rows.read_text().splitlines()]
    verdicts = [row for row in verdicts if "radius" in row]
    correct = [row for row in verdicts if row["predicted"] == row["label"]]
    sure = [row for row in correct if row["certified"]]

    def shown(command: list[str]) -> str:
        return shlex.join(["lipcert", *command]).replace(f"{args.work}/", "").replace(f"{args.data}/", "")

    result = {
        "data": "CIFAR-10, lightly compressed JPEG files",
        "commands": [*map(shown, trainings), shown(certify)],
        "images": len(verdicts),
        "clean": len(correct) / len(verdicts),
        "certified": {EPS: len(sure) / len(verdicts)},
        "decided_by": dict(Counter(row["method"] for row in sure)),
        "seconds an image": sum(row["seconds"] for row in verdicts) / len(verdicts),
        "epochs": [dict(zip(fields, map(float, found), strict=True)) for found in EPOCH.findall(log.read_text())],
        "environment": environment(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("images", "clean", "certified", "decided_by", "seconds an image")}))


if __name__ == "__main__":
    main()
