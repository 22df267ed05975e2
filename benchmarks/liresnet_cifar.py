"""A LiResNet trained on CIFAR-10 by ``finetune --loss emma`` and certified by ``certify --method gloro``.

    python -m benchmarks.liresnet_cifar --data ../shared/data/cifar10 --work liresnet

Trains from random weights, then on with half the learning rate and the largest ε throughout, and at last with a small
rate and images that are flipped but not moved. The result averages an image and its mirror image (``mirror=True``), its
weights are rounded to float16, and test images are certified at 36/255, deterministically. The commands are those that
a user types; they are printed. All leave their files in the work folder and go on from there.
What each epoch said, the certified accuracy at several ε, the environment and the commands go to
benchmarks/results/liresnet_cifar.json; ``benchmarks.make_checkpoints`` puts the rounded model into the package.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import lipcert
from benchmarks._env import environment
from benchmarks.command import shown as shown_command

RESULT = Path(__file__).parent / "results" / "liresnet_cifar.json"
RADII = {"18/255": 18 / 255, "36/255": 36 / 255, "72/255": 72 / 255, "108/255": 108 / 255}
EPOCH = re.compile(
    r"epoch (\d+) of \d+: loss ([\d.]+), accuracy ([\d.]+), Lipschitz bound ([\d.]+) certified, ([\d.]+) estimated"
    r" in training, ([\d.]+) s"
)


def run(command: list[str], log: Path) -> None:
    """A command of :mod:`benchmarks.command`, printed; its messages are added to a file."""
    print(shown_command(command), flush=True)
    with log.open("a") as messages:
        done = subprocess.run([sys.executable, "-m", "benchmarks.command", *command], stderr=messages, check=False)
    if done.returncode:
        raise SystemExit(f"lipcert {command[0]} failed; see {log}")


def rounded(model: lipcert.Model) -> lipcert.Model:
    """The model with ``mirror=True`` and weights rounded to float16, in float32 again; it is certified as it is."""
    source = model.source
    mirrored = lipcert.load(source["name"], pretrained=False, **{**source["arguments"], "mirror": True})
    mirrored.net.load_state_dict(model.net.state_dict())
    mirrored.half().float()
    mirrored.recipe.extend([*model.recipe, {"step": "mirror"}, {"step": "round", "to": "float16"}])
    return mirrored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tar and test.tar")
    parser.add_argument("--work", type=Path, required=True, help="folder for the model and the rows")
    parser.add_argument("--width", type=int, default=64, help="channels of the residual blocks")
    parser.add_argument("--epochs", type=int, nargs=3, default=(30, 36, 7), help="of the three runs of finetune")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--limit", type=int, help="certify that many test images of a fixed shuffle, and not all")
    parser.add_argument("--note", help="a line for the result file")
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    trained = [args.work / f"{name}.safetensors" for name in ("first", "second", "liresnet")]
    model, rows, log = (args.work / name for name in ("rounded.safetensors", "cifar10-liresnet.jsonl", "log.txt"))
    common = [
        "--data", str(args.data / "train.tar"), "--eps", "36/255", "--loss", "emma", "--batch-size",
        str(args.batch_size), "--optimizer", "muon", "--amp", "bfloat16", "--channels-last",
    ]  # fmt: skip
    settings = [
        ("liresnet_l6w64", "--no-pretrained", "--model-args", f"width={args.width}", "--crop", "shift", "--lr", "1e-2"),
        (str(trained[0]), "--crop", "shift", "--lr", "5e-3", "--ramp", "2,2,0.5"),
        (str(trained[1]), "--crop", "flip", "--lr", "4e-4", "--ramp", "2,2,0.5"),
    ]
    trainings = [
        ["finetune", *given, *common, "--epochs", str(epochs), "--out", str(out)]
        for given, epochs, out in zip(settings, args.epochs, trained, strict=True)
    ]
    certify = [
        "certify", str(model), "--data", str(args.data / "test.tar"), "--eps", "36/255", "--method", "gloro",
        *(("--limit", str(args.limit)) if args.limit else ()), "--out", str(rows),
    ]  # fmt: skip
    if not model.exists():
        for train, out in zip(trainings, trained, strict=True):
            if not out.exists():
                run(train, log)
        lipcert.save(rounded(lipcert.load(trained[-1])), model)
    run(certify, log)
    names = ("epoch", "loss", "accuracy", "certified_bound", "estimated_bound", "seconds")
    epochs = [dict(zip(names, map(float, found), strict=True)) for found in EPOCH.findall(log.read_text())]
    verdicts = [json.loads(line) for line in rows.read_text().splitlines()]
    verdicts = [row for row in verdicts if "radius" in row]
    correct = [row for row in verdicts if row["predicted"] == row["label"]]

    def shown(command: list[str]) -> str:
        return shown_command(command).replace(f"{args.work}/", "").replace(f"{args.data}/", "")

    result = {
        "data": "CIFAR-10, lightly compressed JPEG files",
        **({"note": args.note} if args.note else {}),
        "commands": [*map(shown, trainings), shown(certify)],
        "images": len(verdicts),
        "clean": len(correct) / len(verdicts),
        "certified": {name: sum(row["radius"] > eps for row in correct) / len(verdicts) for name, eps in RADII.items()},
        "certified_by_the_command": sum(bool(row["certified"]) for row in correct) / len(verdicts),
        "rigor": sorted({row["rigor"] for row in verdicts}),
        "epochs": epochs,
        "environment": environment(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("images", "clean", "certified", "rigor")}))


if __name__ == "__main__":
    main()
