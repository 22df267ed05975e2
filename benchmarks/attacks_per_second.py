"""lipcert's PGD beside that of torchattacks: predictions changed within ε, and the processor seconds it takes.

    pip install '.[bench]'
    python -m benchmarks.attacks_per_second --data cifar10/test.tar

Both attack the same correctly classified images of the checkpoints that come with lipcert, in ℓ2, with the same number
of steps and restarts. An example counts if lipcert's own check accepts it: inside [0, 1], at a distance of at most ε,
and of another class. A restart of torchattacks, which has none in its ℓ2 PGD, attacks the images that are unbroken.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lipcert
from benchmarks._env import environment
from lipcert.inputs.checkpoints import checkpoints
from lipcert.inputs.data import open_images

RESULT = Path(__file__).parent / "results" / "attacks_per_second.json"
STEPS, RESTARTS = 40, 3
EPS = (36 / 255, 0.5)
Broken = Callable[[Tensor, Tensor, float], Tensor]


def ours(model: lipcert.Model) -> Broken:
    """lipcert's PGD."""
    return lambda images, labels, eps: lipcert.attacks.PGD(STEPS, RESTARTS)(model, images, labels, eps).broken


def theirs(model: lipcert.Model, norm_of_step: float) -> Broken:
    """torchattacks' PGDL2 with steps of ``norm_of_step`` times ε."""
    import torchattacks

    def attack(images: Tensor, labels: Tensor, eps: float) -> Tensor:
        method = torchattacks.PGDL2(model, eps=eps, alpha=norm_of_step * eps, steps=STEPS, random_start=True)
        broken = torch.zeros(len(images), dtype=torch.bool)
        for restart in range(RESTARTS):
            torch.manual_seed(restart)
            robust = (~broken).nonzero()[:, 0]
            if len(robust):
                clean, classes = images[robust], labels[robust]
                broken[robust] = valid(model, clean, method(clean, classes), classes, eps)
        return broken

    return attack


def valid(model: lipcert.Model, images: Tensor, examples: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Whether the examples lie in [0, 1], within ε up to float32 rounding, and have another class."""
    near = (examples - images).double().flatten(1).norm(dim=1) <= eps * (1 + 1e-5)
    inside = (examples.flatten(1).amin(1) >= 0) & (examples.flatten(1).amax(1) <= 1)
    with torch.no_grad():
        return near & inside & (model(examples).argmax(1) != labels)


def measure(attack: Broken, images: Tensor, labels: Tensor, eps: float) -> dict[str, Any]:
    """Changed predictions and processor seconds of an attack."""
    started = time.process_time()
    broken = int(attack(images, labels, eps).sum())
    seconds = time.process_time() - started
    return {"changed": broken, "seconds": round(seconds, 2), "per second": round(broken / seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="CIFAR-10's test images, as lipcert certify takes them")
    parser.add_argument("--images", type=int, default=64, help="images of each network")
    parser.add_argument("--names", nargs="+", default=["digits-vit", "cifar10-vit", "cifar10-liresnet-smooth"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for checkpoint in checkpoints():
        if checkpoint.name not in args.names:
            continue
        model = lipcert.load(checkpoint.name)
        data = open_images(None if checkpoint.name == "digits-vit" else args.data, model, limit=args.images)
        batch = next(data.batches(args.images))
        with torch.no_grad():
            correct = model(batch.images).argmax(1) == batch.labels
        assert batch.labels is not None
        images, labels = batch.images[correct], batch.labels[correct]
        attacks = {"lipcert": ours(model)}
        attacks |= {f"torchattacks, step {size:g} ε": theirs(model, size) for size in (0.2, 0.5)}
        for eps in EPS:
            for name, attack in attacks.items():
                row = {"network": checkpoint.name, "eps": eps, "images": len(images), "attack": name}
                rows.append({**row, **measure(attack, images, labels, eps)})
                print(json.dumps(rows[-1]), flush=True)
    record = {"environment": environment(), "steps": STEPS, "restarts": RESTARTS, "rows": rows}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
