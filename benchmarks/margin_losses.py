"""The losses `anchored` and `adversarial`: what a step of each costs, and how far they ask for the same.

    python -m benchmarks.margin_losses

A step is the loss of 128 random images and its gradient for the weights, in finetune's precision, for the ViT of 2
blocks after a convolution (``cifar_vit_stem``) with random weights; the losses take turns, and the least processor
time of each counts. Beside it stands the cosine between the two losses' gradients for the weights of the bundled
checkpoint, on its images. Results and environment go to benchmarks/results/margin_losses.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import lipcert
from benchmarks._cifar import labels_of
from benchmarks._env import environment
from lipcert.inputs.data import open_images
from lipcert.training import adversarial_loss, anchored_loss, twice_differentiable

RESULT = Path(__file__).parent / "results" / "margin_losses.json"
EPS = {"9/255": 9 / 255, "36/255": 36 / 255, "72/255": 72 / 255}
Loss = Callable[[lipcert.Model, Tensor, Tensor], Tensor]


def losses(eps: float) -> dict[str, Loss]:
    def half(model: lipcert.Model, images: Tensor, labels: Tensor) -> Tensor:
        def logits(pixels: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(pixels).float()

        return adversarial_loss(logits, images, labels, eps)[0]

    return {
        "ce": lambda model, images, labels: F.cross_entropy(model(images), labels),
        "adversarial": lambda model, images, labels: adversarial_loss(model, images, labels, eps)[0],
        "adversarial, bfloat16": half,
        "anchored": lambda model, images, labels: anchored_loss(model, images, labels, eps)[0],
    }


def slope(model: lipcert.Model, loss: Loss, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of a loss for all weights, as a vector."""
    weights = [p for p in model.parameters() if p.requires_grad]
    with twice_differentiable():
        found = torch.autograd.grad(loss(model, images, labels), weights)
    return torch.cat([part.flatten() for part in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = lipcert.convert(lipcert.load("cifar_vit_stem", pretrained=False), attention="keep", norm="smooth")
    images, labels = torch.rand(128, 3, 32, 32), torch.randint(10, (128,))
    seconds: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, loss in losses(EPS["36/255"]).items():
            began = time.process_time()
            slope(model, loss, images, labels)
            seconds.setdefault(name, []).append(time.process_time() - began)
    bundled = lipcert.load()
    batch = next(open_images(None, bundled).batches(120))
    cosines = {}
    for typed, eps in EPS.items():
        one, other = (
            slope(bundled, losses(eps)[name], batch.images, labels_of(batch)) for name in ("anchored", "adversarial")
        )
        cosines[typed] = float(F.cosine_similarity(one, other, dim=0))
    result = {
        "images": len(images),
        "cpu_seconds_a_step": {name: round(min(found), 4) for name, found in seconds.items()},
        "cosine_of_gradients": cosines,
        "environment": environment(),
    }
    print(json.dumps(result, indent=1))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
