"""The LiResNet of liresnet_cifar with a smooth end, or with attention there, trained for the certificate after a cut.

    python -m benchmarks.liresnet_cut --data ../shared/data/cifar10 --work cut --limit 1000
    python -m benchmarks.liresnet_cut --data ../shared/data/cifar10 --work cut --attention l2

Takes ``cifar10-liresnet``, smooths the activations of its neck (``beta=4``), and trains it with ``finetune --loss cut``
on images that are moved, then on images that are flipped only; then twice more in the same way, with rectangles
blackened in some of the moved images, and with averages of the weights. With ``--attention`` a hybrid is trained: the
16 values of 128 channels that the neck computes first are its tokens, and a block of attention follows, whose branches
are 0 at first. It starts from ``cifar10-liresnet`` and is trained with ``--loss emma``; without its branches, a few
predictions differ. The result averages an image and its mirror image, and its weights are rounded to float16.
``certify`` decides each image by gloro, or else by anchored after a cut.
The commands are printed. All leave their files in the work folder and go on from there. What each epoch said, the
certified accuracy, the environment and the commands go to liresnet_cut.json or hybrid_l2_cut.json in
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import lipcert
from benchmarks._env import environment
from benchmarks.command import shown as shown_command
from benchmarks.liresnet_cifar import EPOCH, rounded, run

RESULTS = Path(__file__).parent / "results"
BETA = 4.0
RADIUS = 8.0  # of the projections in front of attention; tokens have norms of some 45
EPS = "36/255"


def smoothed() -> lipcert.Model:
    """``cifar10-liresnet`` with ``beta``, without mirror images."""
    known = lipcert.load("cifar10-liresnet")
    arguments = {key: value for key, value in known.source["arguments"].items() if key != "mirror"}
    model = lipcert.load(known.source["name"], pretrained=False, **arguments, beta=BETA)
    model.net.load_state_dict(known.net.state_dict())
    model.recipe.extend([*known.recipe, {"step": "smooth", "beta": BETA}])
    return model


def with_attention(known: lipcert.Model) -> lipcert.Model:
    """A hybrid that computes what a LiResNet with a neck of 128 channels computes, until it is trained."""
    sizes = {"width": known.source["arguments"]["width"], "residual_depth": 6, "embed_dim": 128, "depth": 1}
    beta = known.source["arguments"].get("beta", 0.0)
    model = lipcert.load("liresnet_vit_l2", pretrained=False, **sizes, neck=512, beta=beta, radius=RADIUS)
    old, new = known.net.state_dict(), model.net.state_dict()
    new |= {f"patch_embed.{key}": value for key, value in old.items() if key.startswith(("stem", "blocks"))}
    for name in ("weight", "bias"):
        new[f"patch_embed.proj.{name}"], new[f"head.{name}"] = old[f"neck.0.{name}"], old[f"head.{name}"]
    dense = old["neck.3.weight"]
    new["neck.2.weight"] = dense.unflatten(1, (128, 16)).transpose(1, 2).flatten(1)
    new["neck.2.bias"] = old["neck.3.bias"]
    for key in new:
        if key == "pos_embed" or key.startswith(("blocks.0.attn.proj", "blocks.0.mlp.fc2")):
            new[key] = torch.zeros_like(new[key])
    model.net.load_state_dict(new)
    model.recipe.extend([*known.recipe, {"step": "attention", "radius": RADIUS}])
    return model


class Training(NamedTuple):
    """One ``finetune``: the name of its output, its images, largest learning rate, epochs and further options."""

    name: str
    crop: str
    lr: str
    epochs: int
    more: tuple[str, ...] = ()


class Plan(NamedTuple):
    """How a network is trained: what it starts from, its loss, and one training after the other."""

    name: str
    start: Callable[[], lipcert.Model]
    loss: str
    trainings: tuple[Training, ...]


PLANS = {
    None: Plan(
        "liresnet", smoothed, "cut",
        (
            Training("moved", "shift", "2e-3", 14),
            Training("flipped", "flip", "4e-4", 4),
            Training("blackened", "shift", "2e-3", 16, ("--cutout", "0.3", "--ema", "0.998")),
            Training("averaged", "flip", "4e-4", 3, ("--ema", "0.99")),
            Training("longer", "shift", "2e-3", 36, ("--cutout", "0.3", "--ema", "0.998")),
            Training("ended", "flip", "4e-4", 4, ("--ema", "0.99")),
        ),
    ),
    "l2": Plan(
        "hybrid_l2", lambda: with_attention(lipcert.load("cifar10-liresnet")), "emma",
        (Training("moved", "shift", "2e-3", 9), Training("flipped", "flip", "4e-4", 4)),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tar and test.tar")
    parser.add_argument("--work", type=Path, required=True, help="folder for the model and the rows")
    parser.add_argument("--attention", choices=("l2",), help="a hybrid with a block of attention of this kind")
    parser.add_argument("--limit", type=int, help="certify that many test images of a fixed shuffle, and not all")
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    plan = PLANS[args.attention]
    kind = plan.name
    names = ("start", *(training.name for training in plan.trainings), "rounded")
    start, *trained, model = (args.work / f"{kind}-{name}.safetensors" for name in names)
    rows, log = args.work / f"{kind}-cut.jsonl", args.work / f"{kind}.txt"
    common = [
        "--data", str(args.data / "train.tar"), "--eps", EPS, "--loss", plan.loss, "--batch-size", "256", "--optimizer",
        "muon", "--amp", "bfloat16", "--channels-last", "--ramp", "2,2,0.5",
    ]  # fmt: skip
    trainings = {}
    for given, out, one in zip([start, *trained], trained, plan.trainings, strict=False):
        images = ["--crop", one.crop, *one.more, "--lr", one.lr, "--epochs", str(one.epochs)]
        trainings[out] = ["finetune", str(given), *common, *images, "--out", str(out)]
    limit = ["--limit", str(args.limit)] if args.limit else []
    certify = ["certify", str(model), "--data", str(args.data / "test.tar"), "--eps", EPS, *limit, "--out", str(rows)]
    if not start.exists():
        lipcert.save(plan.start(), start)
    for out, training in trainings.items():
        if not out.exists():
            run(training, log)
    if not model.exists():
        lipcert.save(rounded(lipcert.load(trained[-1])), model)
    run(certify, log)
    fields = ("epoch", "loss", "accuracy", "certified_bound", "estimated_bound", "seconds")
    verdicts = [json.loads(line) for line in rows.read_text().splitlines()]
    verdicts = [row for row in verdicts if "radius" in row]
    correct = [row for row in verdicts if row["predicted"] == row["label"]]
    sure = [row for row in correct if row["certified"]]

    def shown(command: list[str]) -> str:
        return shown_command(command).replace(f"{args.work}/", "").replace(f"{args.data}/", "")

    result = {
        "data": "CIFAR-10, lightly compressed JPEG files",
        "commands": [*map(shown, trainings.values()), shown(certify)],
        "images": len(verdicts),
        "clean": len(correct) / len(verdicts),
        "certified": {EPS: len(sure) / len(verdicts)},
        "decided_by": dict(Counter(row["method"] for row in sure)),
        "rigor": sorted({row["rigor"].split("(")[0] for row in sure}),
        "seconds an image": sum(row["seconds"] for row in verdicts) / len(verdicts),
        "epochs": [dict(zip(fields, map(float, found), strict=True)) for found in EPOCH.findall(log.read_text())],
        "environment": environment(),
    }
    (RESULTS / f"{kind}_cut.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key not in ("commands", "epochs", "environment")}))


if __name__ == "__main__":
    main()
