"""What fine-tuning can do for a pretrained network: EfficientNet-Lite0 on CIFAR-10 at 64 pixels, by the commands.

    python -m benchmarks.from_pretrained --checkpoint lite0.safetensors --data ../shared/data/cifar10 --work pretrained

Routes, each from the same ImageNet weights:

* ``noise``: fine-tuned under noise, certified by smoothing.
* ``smooth``: ReLU6 replaced by GELU, fine-tuned by ``adversarial``, certified by ``staged``, which tries the methods.
* ``student``: a LiResNet of width 16 at 32 pixels, taught by the network of ``noise``, certified by ``gloro``; and the
  same training without a teacher.

A radius is measured on what the network gets. The 64×64 pixels are an enlarged image of 32×32, on which a smooth
perturbation has half the norm, so the student's ε is the harder one.

Each step leaves its file in the work folder and is not repeated; an interrupted training goes on after its last epoch.
Results and environment go to benchmarks/results/from_pretrained.json, route by route.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import lipcert
from benchmarks._cifar import EPS
from benchmarks._env import environment
from benchmarks.cifar_pipeline import Steps
from lipcert.results import read_run

RESULT = Path(__file__).parent / "results" / "from_pretrained.json"
SIGMA = "0.25"
RADII = {"36/255": EPS, "0.25": 0.25}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="ImageNet weights of tf_efficientnet_lite0")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tar and test.tar")
    parser.add_argument("--work", type=Path, required=True, help="folder for the models in between")
    parser.add_argument("--only", choices=ROUTES, nargs="+", default=[*ROUTES])
    parser.add_argument("--images", type=int, default=10_000, help="training images")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--test", type=int, default=500, help="test images that are certified")
    parser.add_argument("--samples", type=int, default=400, help="draws per image for smoothing")
    args = parser.parse_args()
    args.checkpoint, args.data = args.checkpoint.resolve(), args.data.resolve()
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in args.only:
        (args.work / name).mkdir(parents=True, exist_ok=True)
        steps = Steps(args.work / name)
        found = ROUTES[name](steps, args)
        asked = {key: getattr(args, key) for key in ("images", "epochs", "test", "samples")}
        core = {key: round(value, 2) for key, value in steps.minutes("cpu_minutes").items()}
        known[name] = {"settings": asked, **found, "core_minutes": core, "commands": steps.commands()}
        known["environment"] = environment()
        RESULT.write_text(json.dumps(known, indent=1) + "\n")
        print(json.dumps({name: known[name]}, indent=1))


def lite(args: argparse.Namespace, arguments: str) -> list[str | Path]:
    """The pretrained network at 64 pixels, and its training images. Convolutions by channel are slow in bfloat16."""
    return [
        "tf_efficientnet_lite0", "--checkpoint", args.checkpoint, "--input-size", "64", "--crop-pct", "1",
        "--model-args", arguments, "--channels-last", "--crop", "flip", "--data", args.data / "train.tar",
        "--limit", str(args.images), "--epochs", str(args.epochs), "--batch-size", "64",
    ]  # fmt: skip


def noise(steps: Steps, args: argparse.Namespace) -> dict[str, Any]:
    """Under noise, certified by smoothing."""
    steps("noise", "finetune", *lite(args, "num_classes=10"), "--loss", "noise", "--sigma", SIGMA)
    smoothing = ("--method", "smoothing", "--sigma", SIGMA, "--samples", str(args.samples), "--all-samples")
    return certified(steps, args, "noise", *smoothing)


def smooth(steps: Steps, args: argparse.Namespace) -> dict[str, Any]:
    """With smooth activations, certified by the staged certificate."""
    network = lite(args, "num_classes=10 act_layer=gelu")
    steps("smooth", "finetune", *network, "--loss", "adversarial", "--eps", "36/255")
    norms = [part for part in lipcert.load(steps.last).net.modules() if isinstance(part, nn.BatchNorm2d)]
    scales = [(norm.weight / (cast(Tensor, norm.running_var) + norm.eps).sqrt()).abs().max() for norm in norms]
    found = {"log10_bound": bound(steps, "smooth"), "batch_norms": len(norms)}
    found["log10_largest_scales"] = float(torch.stack(scales).log10().sum())
    return {**found, **certified(steps, args, "smooth")}


def student(steps: Steps, args: argparse.Namespace) -> dict[str, Any]:
    """A LiResNet, with and without the teacher of ``noise``."""
    teacher = args.work / "noise" / "noise.safetensors"
    if not teacher.exists():
        raise SystemExit("the student's teacher is the network of noise: run --only noise first")
    fresh = [
        "liresnet_l6w64", "--no-pretrained", "--model-args", "num_classes=10 width=16", "--data",
        args.data / "train.tar", "--limit", str(args.images), "--loss", "emma", "--eps", "36/255", "--optimizer",
        "muon", "--lr", "0.01", "--epochs", str(args.epochs), "--batch-size", "128", "--crop", "flip", "--amp",
        "bfloat16",
    ]  # fmt: skip
    found = {}
    for name, more in (("alone", []), ("taught", ["--teacher", teacher])):
        steps(name, "finetune", *fresh, *more)
        found[name] = {"log10_bound": bound(steps, name), **certified(steps, args, name, "--method", "gloro")}
    return found


def bound(steps: Steps, step: str) -> float:
    """The decimal logarithm of the global bound of a step's model."""
    return lipcert.lipschitz(lipcert.load(steps.work / f"{step}.safetensors")).log10


def certified(steps: Steps, args: argparse.Namespace, step: str, *how: str) -> dict[str, Any]:
    """Shares of the test images that are right, and right with a certified radius above each ε, by ``certify``."""
    rows = steps.work / f"{step}.jsonl"
    wanted = ["--data", args.data / "test.tar", "--limit", str(args.test), "--eps", "36/255", *how, "--out", rows]
    steps.timed(f"certify {step}", "certify", steps.work / f"{step}.safetensors", *wanted)
    run = read_run(rows)
    return {
        "images": len(run),
        "right": int(run.right.sum()) / len(run),
        "certified": {text: run.certified_at(eps) / len(run) for text, eps in RADII.items()},
    }


ROUTES: dict[str, Callable[[Steps, argparse.Namespace], dict[str, Any]]] = {
    "noise": noise,
    "smooth": smooth,
    "student": student,
}

if __name__ == "__main__":
    main()
