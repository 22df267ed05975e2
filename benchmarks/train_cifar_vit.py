"""Trains the small CIFAR-10 vision transformers that the certificates are measured on.

A timm ViT (32×32 images, smooth or kinked layer projection in place of LayerNorm, dot-product attention kept) whose
weight matrices are held at a spectral norm. The loss is the cross-entropy of logits to which ε‖∇(f_y − f_j)‖, j the
runner-up, is added for every wrong class: it asks for the margin that the first-order certificate needs. Queries and
keys are held lower, which keeps attention smooth, and so is what curvature sees squared: the matrices in front of GELU
(``--curved``) and the embedding (``--conv``). The head reads the mean of the tokens as it is: after all other
remainders, a projection of its own would cost the certificate most.

``--stem 96`` takes ``cifar_vit_stem`` of :mod:`lipcert.networks.stem_vit`, with convolutions of that many channels each
in front, with which the network learns several times faster.

    python -m benchmarks.train_cifar_vit --data ../shared/data/cifar10 --out cifar_vit.safetensors --depth 3 --epochs 12

Larger norms learn faster and certify worse. The networks ``smooth3`` and ``kinked3`` of the measurements, without a
stem, were made in three and in two runs:

    python -m benchmarks.train_cifar_vit --data D --out a.safetensors \
        --epochs 9 --hold 1.4 --curved 1.4 --conv 1.4 --eps 0.2 --temperature 0.2 0.1
    python -m benchmarks.train_cifar_vit --data D --out b.safetensors \
        --start a.safetensors --epochs 3 --hold 1.25 --scores 0.3 --eps 0.25 --temperature 0.1 0.07
    python -m benchmarks.train_cifar_vit --data D --out smooth3.safetensors \
        --start b.safetensors --epochs 7 --hold 1.3 --curved 1.1 --conv 1.1 --scores 0.3 --eps 0.22 \
        --temperature 0.06 0.035

    python -m benchmarks.train_cifar_vit --data D --out c.safetensors --norm project \
        --epochs 9 --hold 1.4 --curved 1.4 --conv 1.4 --eps 0.2 --temperature 0.2 0.1
    python -m benchmarks.train_cifar_vit --data D --out kinked3.safetensors \
        --start c.safetensors --epochs 6 --hold 1.3 --curved 1.1 --conv 1.1 --scores 0.3 --eps 0.22 \
        --temperature 0.08 0.035

The checkpoint is a lipcert artifact; ``lipcert certify cifar_vit.safetensors --data .../test.tar`` reads it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import create_dataset
from torch import Tensor, nn

import lipcert
from lipcert.training import NormHold, anchored_loss, hold_projections, twice_differentiable

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def read(folder: str, split: str) -> tuple[Tensor, Tensor]:
    """All images of ``split``.tar as uint8 (N, 3, 32, 32), and their classes."""
    dataset = create_dataset("", root=str(Path(folder) / f"{split}.tar"))
    images = np.stack([np.asarray(image.convert("RGB")) for image, _ in dataset])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.tensor([label for _, label in dataset])


def augmented(images: Tensor) -> Tensor:
    """Random horizontal flips and shifts of up to four pixels, one shift a batch."""
    flip = torch.rand(len(images)) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(-1), images)
    dy, dx = torch.randint(0, 9, (2,)).tolist()
    return F.pad(images, (4, 4, 4, 4))[:, :, dy : dy + 32, dx : dx + 32]


def fresh(args: argparse.Namespace) -> lipcert.Model:
    """The converted network with orthogonal weights."""
    arguments: dict[str, Any] = dict(
        img_size=32, patch_size=args.patch >> len(args.stem), embed_dim=args.width, depth=args.depth,
        num_heads=args.heads, mlp_ratio=2.0,
        class_token=False, global_pool="avg", final_norm=False, num_classes=10,
    )  # fmt: skip
    name = "vit_tiny_patch16_224"
    if args.stem:
        name, arguments = "cifar_vit_stem", {**arguments, "stem": args.stem}
    model = lipcert.load(name, pretrained=False, mean=MEAN, std=STD, input_size=(3, 32, 32), **arguments)
    lipcert.convert(model, attention="keep", norm=args.norm)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
        elif isinstance(module, nn.Conv2d) and args.stem:
            nn.init.orthogonal_(module.weight)
            module.weight.data *= 10.0  # the hold takes what is too much
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with train.tar and test.tar")
    parser.add_argument("--out", required=True)
    parser.add_argument("--start", help="the checkpoint to go on from; random weights by default")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--patch", type=int, default=8, help="pixels of a token's side")
    parser.add_argument("--stem", type=int, nargs="*", default=[], help="channels of convolutions in front")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--eps", type=float, default=0.15)
    parser.add_argument("--radius", type=float, default=8.0)
    parser.add_argument("--hold", type=float, default=1.0, help="norm of the matrices")
    parser.add_argument("--curved", type=float, default=1.0, help="of those in front of GELU")
    parser.add_argument("--conv", type=float, default=1.0, help="of the convolutions, stem and embedding")
    parser.add_argument("--scores", type=float, default=0.35, help="norm of the matrices of queries and keys")
    parser.add_argument("--norm", choices=["smooth", "project"], default="smooth")
    parser.add_argument(
        "--temperature", type=float, nargs=2, default=(0.25, 0.25), help="divides the logits in the loss: from, to"
    )
    args = parser.parse_args()
    torch.manual_seed(0)

    model = lipcert.load(args.start) if args.start else fresh(args)
    hold_projections(model, args.radius)
    held = {"*": args.hold, "patch_embed*": args.conv, "*.fc1": min(args.curved, args.hold)}
    hold = NormHold(model, {**held, "*.q": args.scores, "*.k": args.scores})

    train, train_labels = read(args.data, "train")
    test, test_labels = read(args.data, "test")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=1e-4)
    steps = args.epochs * (len(train) // args.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps, pct_start=0.1)
    started = time.time()
    step = 0
    for epoch in range(args.epochs):
        order, right, seen = torch.randperm(len(train)), 0, 0
        for batch in order.split(args.batch)[: len(train) // args.batch]:
            images = augmented(train[batch]).float() / 255
            share = step / steps
            eps = args.eps * (1.0 if args.start else min(1.0, share / 0.4))
            first, last = args.temperature
            temperature = first * (last / first) ** min(1.0, share / 0.8)
            optimizer.zero_grad()
            with twice_differentiable():
                loss, logits = anchored_loss(model, images, train_labels[batch], eps, temperature)
                loss.backward()
            nn.utils.clip_grad_norm_(parameters, 3.0)
            optimizer.step()
            schedule.step()
            hold()
            step += 1
            right += int((logits.argmax(1) == train_labels[batch]).sum())
            seen += len(batch)
        with torch.no_grad():
            outputs = torch.cat([model(part.float() / 255) for part in test.split(1000)])
        accuracy = (outputs.argmax(1) == test_labels).double().mean().item()
        print(
            f"epoch {epoch + 1}: train {right / seen:.3f}, test {accuracy:.4f}, {time.time() - started:.0f} s",
            flush=True,
        )
        lipcert.save(model, args.out, facts={"epochs": epoch + 1, "test_accuracy": accuracy})


if __name__ == "__main__":
    main()
