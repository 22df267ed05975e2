"""The ViT of ``benchmarks.both_kinds`` trained further, by the recipe that is best on images held out of it.

    python -m benchmarks.both_kinds --data ../shared/data/cifar10 --work both
    python -m benchmarks.vit_cifar --data ../shared/data/cifar10 --start both/anchored.safetensors --work vit

Settings are compared first: each is a base with one thing changed, trained for one pass over a few images, and judged
on 300 others, which the passes here do not use (the start was trained on all training images). The judgement is cheap:
the share of images classified right whose margin over the norm of its gradient is above 36/255, which the anchored
radius does not exceed to first order. Norms are limited as before, as they decide how much of that is certified.

The winner then trains on all other training images, by the command that a user types; weights are rounded to float16.
``benchmarks.make_checkpoints`` certifies the result. The comparison, the command and the environment go to
benchmarks/results/vit_cifar.json, after each setting; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import lipcert
from benchmarks._cifar import EPS, first_order_limit, labels_of
from benchmarks._env import environment
from benchmarks.cifar_pipeline import NORMS, Steps
from benchmarks.liresnet_cifar import rounded
from lipcert.data import Images, open_images
from lipcert.training import Augmentation, Batches

RESULT = Path(__file__).parent / "results" / "vit_cifar.json"
HELD_OUT = 300
WHOLE = 50_000
BASE: dict[str, Any] = {"loss": "anchored", "crop": "resized", "eps": 0.2, "temperature": 0.02, "lr": 5e-3}
CHANGES: list[dict[str, Any]] = [
    {}, {"crop": "shift"}, {"loss": "adversarial"}, {"eps": 0.15}, {"temperature": 0.04},
]  # fmt: skip
COMMON: dict[str, Any] = {"optimizer": "muon", "ramp": (1.0, 1.0, 0.0)}


def judged(model: lipcert.Model, images: Images) -> dict[str, float]:
    """Shares of the images that are right, and right with a first-order limit above ε."""
    batch = next(images.batches(len(images)))
    with torch.no_grad():
        predicted = model(batch.images).argmax(1)
    right = predicted == labels_of(batch)
    limits = first_order_limit(model, batch.images, predicted)
    return {"clean": float(right.double().mean()), "first_order": float((right & (limits > EPS)).double().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tar")
    parser.add_argument("--start", type=Path, required=True, help="the model that is trained further")
    parser.add_argument("--work", type=Path, required=True, help="folder for the models")
    parser.add_argument("--images", type=int, default=4096, help="that each setting is trained on")
    parser.add_argument("--epochs", type=int, default=2, help="of the winner")
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    train = str(args.data / "train.tar")
    norms = {pattern or "*": float(norm) for pattern, _, norm in (text.rpartition("=") for text in NORMS)}
    about = {"base": BASE, "images": args.images, "held_out": HELD_OUT}
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    runs: list[dict[str, Any]] = known["runs"] if {key: known.get(key) for key in about} == about else []

    def write(**more: Any) -> None:
        RESULT.write_text(json.dumps({**about, "runs": runs, **more, "environment": environment()}, indent=1) + "\n")

    start = lipcert.load(args.start)
    images, held_out = open_images(train, start), open_images(train, start)
    assert images.order is not None
    images.order, held_out.order = images.order[: args.images], images.order[WHOLE - HELD_OUT :]
    if not runs:
        runs.append({"changed": None, **judged(start, held_out), "core_seconds": 0.0})
    for change in CHANGES:
        if any(run["changed"] == change for run in runs):
            continue
        settings = {**COMMON, **BASE, **change, "max_norm": norms}
        torch.manual_seed(0)
        model = lipcert.load(args.start)
        batches = Batches(images, model, 128, Augmentation(settings.pop("crop")))
        began = time.process_time()
        lipcert.finetune(model, batches, epochs=1, **settings)
        seconds = time.process_time() - began
        runs.append({"changed": change, **judged(model, held_out), "core_seconds": round(seconds, 1)})
        print(json.dumps(runs[-1]), flush=True)
        write()
    best = max((run for run in runs if run["changed"] is not None), key=lambda run: run["first_order"])
    chosen = {**BASE, **best["changed"]}
    steps = Steps(args.work)
    steps("trained", "finetune", args.start, "--data", train, "--limit", str(WHOLE - HELD_OUT), "--batch-size", "128",
          "--optimizer", "muon", "--ramp", "1,1,0", "--epochs", str(args.epochs), "--loss", chosen["loss"],
          "--crop", chosen["crop"], "--eps", str(chosen["eps"]), "--temperature", str(chosen["temperature"]),
          "--lr", str(chosen["lr"]), *(part for norm in NORMS for part in ("--max-norm", norm)))  # fmt: skip
    model = lipcert.load(steps.last)
    lipcert.save(rounded(model), args.work / "rounded.safetensors")
    minutes = steps.minutes("cpu_minutes")["trained"]
    write(trained={**judged(model, held_out), "cpu_minutes": minutes, "command": steps.commands()[0]})


if __name__ == "__main__":
    main()
