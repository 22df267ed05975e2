"""Trains the last layers of ``cifar10-liresnet-108`` again, for the certificate after a cut, on one CPU core.

    python -m benchmarks.liresnet_end --model far.safetensors --data ../shared/data/cifar10 --out end.safetensors

The layers up to the first activation of the neck stay as ``benchmarks.train_liresnet --recipe far`` has made them.
Their output for all training images and their mirror images is computed once, and kept beside the result. The dense
layer and the head behind them are trained on it: the loss is cross-entropy after every wrong class is given ε times a
slope more, at most until it has won. The slope is K‖∇_c m‖, where c is that output, K the Lipschitz constant of the
layers before it, and m the margin to the runner-up. ε grows from 0.3 to 0.85 in the first half of the training. The
weights are averaged over the steps, and rounded to float16.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lipcert
from benchmarks._cifar import read
from benchmarks.train_liresnet import STD, Norms

BATCH, AVERAGED = 500, 0.998
RAMP = (0.3, 0.85)


@torch.no_grad()
def features(net: Any, images: Tensor) -> Tensor:
    """Output of the neck's first activation for images and mirror images, (N, 2, F) in float16."""
    found = []
    for part in images.split(200):
        x = part.float().div(255)
        both = torch.stack((x, x.flip(-1)), 1).flatten(0, 1)
        c = net.neck[1](net.neck[0](net.blocks(net.stem((both - 0.5) / STD))))
        found.append(c.flatten(1).unflatten(0, (-1, 2)).half())
    return torch.cat(found)


def logits_of(net: Any, c: Tensor) -> Tensor:
    """Logits of the network, which averages an image and its mirror image."""
    logits: Tensor = net.head(net.neck[3:](c.flatten(0, 1)).unflatten(0, (-1, 2)).mean(1))
    return logits


def train(net: Any, c: Tensor, labels: Tensor, epochs: int, lr: float = 1e-3) -> None:
    """Trains the dense layer and the head on features of shape (N, 2, F)."""
    norms = Norms(net, torch.device("cpu"))
    with torch.no_grad():
        before = float(norms.constant(60) * torch.linalg.matrix_norm(net.neck[0].weight.flatten(1), 2))
    trained = [*net.neck[3].parameters(), *net.head.parameters()]
    average = [p.detach().clone() for p in trained]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.01)
    steps, step = epochs * (len(c) // BATCH), 0
    for epoch in range(epochs):
        sums = torch.zeros(2)
        for places in torch.randperm(len(c)).split(BATCH):
            done = step / steps
            eps = RAMP[0] + (RAMP[1] - RAMP[0]) * min(1.0, 2 * done)
            optimizer.param_groups[0]["lr"] = lr * min(1.0, 20 * done) * (1 + math.cos(math.pi * done)) / 2
            values, y = c[places].float().requires_grad_(), labels[places]
            logits, is_label = logits_of(net, values), F.one_hot(y, 10).bool()
            margins = logits.gather(1, y[:, None]) - logits
            runner = logits.detach().masked_fill(is_label, -math.inf).argmax(1, keepdim=True)
            (gradient,) = torch.autograd.grad(margins.gather(1, runner).sum(), values, create_graph=True)
            # An image and its mirror image move by the same distance, so both together by √2 times that.
            slope = before * (2 * gradient.square().sum((1, 2))).clamp_min(1e-20).sqrt()[:, None]
            reach = eps * slope * ~is_label
            moved = logits + (margins / reach.clamp_min(1e-30)).clamp(0, 1).detach() * reach
            optimizer.zero_grad()
            F.cross_entropy(moved, y).backward()
            optimizer.step()
            step += 1
            with torch.no_grad():
                for mean, p in zip(average, trained, strict=True):
                    mean.lerp_(p, max(1 - AVERAGED, 1 / (step + 1)))
                sure = ((margins > 72 / 255 * slope) | is_label).all(1)
                sums += torch.stack([(logits.argmax(1) == y).float().mean(), sure.float().mean()])
        right, sure = (sums / (len(c) // BATCH)).tolist()
        print(f"epoch {epoch + 1}: {right:.4f} right, {sure:.4f} certified to first order at 72/255", flush=True)
    with torch.no_grad():
        for mean, p in zip(average, trained, strict=True):
            p.copy_(mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="the network of train_liresnet --recipe far")
    parser.add_argument("--data", required=True, help="folder with train.tar")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = lipcert.load(args.model)
    images, labels = read(args.data, "train")
    kept = args.out.with_suffix(".features.pt")
    if not kept.exists():
        torch.save(features(model.net, images), kept)
    train(model.net, torch.load(kept), labels, args.epochs)
    model.half().float()
    model.recipe.extend([{"step": "train", "with": "benchmarks.liresnet_end"}, {"step": "round", "to": "float16"}])
    lipcert.save(model, args.out)


if __name__ == "__main__":
    main()
