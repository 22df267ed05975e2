"""Radii of the campaign's first networks, to the last bit: a change of structure leaves them as they are.

    python -m benchmarks.golden --write golden.jsonl
    python -m benchmarks.golden --compare golden.jsonl
    python -m benchmarks.golden --compare golden.jsonl --tolerance 1e-3
    python -m benchmarks.golden --large --write large.jsonl

The first command goes on after the networks that are in the file; the others print each difference and end with exit
code 1 if there is any larger than the tolerance, 0 by default. All use one thread, since sums depend on the order in
which they are taken. With ``--large`` the networks are three ViTs whose norms take more than 1e11 operations an image,
one image each.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import lipcert
from benchmarks._networks import draw
from benchmarks.campaign import certify
from lipcert.certifier import Certifier


def radii(seed: int, count: int) -> dict[str, list[str]]:
    """Radii of a network's images in hexadecimal, by "method dtype"; methods that refuse the network are left out."""
    case = draw(seed, count)
    case.model.requires_grad_(False)
    with torch.no_grad():
        classes = case.model(case.images).argmax(1)
    return {" ".join(key): [x.hex() for x in found.tolist()] for key, found in certify(case, classes).items()}


def large(number: int) -> dict[str, list[str]]:
    """Radii of a ViT of three blocks with projections of radius 1; the last has a convolutional stem."""
    torch.manual_seed(number)
    net: Any = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=128, depth=3, num_heads=4, num_classes=10,
        mlp_ratio=(2.0, 3.0, 2.0)[number], class_token=False, global_pool="avg",
    )  # fmt: skip
    if number == 2:
        net.patch_embed.proj = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.Conv2d(16, 128, 2, 2))
    for weight in (part for part in net.parameters() if part.dim() == 2):
        nn.init.orthogonal_(weight)
    model = lipcert.load(net.eval(), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 32, 32))
    lipcert.convert(model, attention="keep", norm="smooth")
    for module in model.modules():
        if isinstance(module, lipcert.surgery.SmoothProject):
            module.radius.fill_(1.0)
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(number))
    return {
        f"{name} real": [float(Certifier(model, 0.01, name).run(image).radius).hex()] for name in ("lofast", "anchored")
    }


def distance(before: list[str] | None, now: list[str] | None, smaller: bool = False) -> float:
    """The largest relative difference of radii, or of those that became smaller; ∞ where one of the two has none."""
    if before is None or now is None or len(before) != len(now):
        return 0.0 if before == now else math.inf
    pairs = [(float.fromhex(old), float.fromhex(new)) for old, new in zip(before, now, strict=True)]
    return max(
        (abs(old - new) / max(old, new) for old, new in pairs if new < old or (old < new and not smaller)), default=0.0
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="record the radii in this file")
    parser.add_argument("--compare", type=Path, help="compare the radii with those in this file")
    parser.add_argument("--tolerance", type=float, default=0.0, help="the largest relative difference of two radii")
    parser.add_argument("--smaller", action="store_true", help="radii may grow; only smaller ones are differences")
    parser.add_argument("--networks", type=int, default=500)
    parser.add_argument("--large", action="store_true", help="three large networks in place of the campaign's")
    parser.add_argument("--images", type=int, default=2, help="images per network")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = (lambda seed, count: large(seed)) if args.large else radii
    networks, images = (3, 1) if args.large else (args.networks, args.images)
    if args.write:
        done = len(args.write.read_text().splitlines()) if args.write.exists() else 0
        with args.write.open("a") as file:
            for seed in range(done, networks):
                file.write(json.dumps({"seed": seed, "images": images, "radii": found(seed, images)}) + "\n")
                file.flush()
        return 0
    if not args.compare:
        parser.error("give --write FILE or --compare FILE")
    different, largest = 0, 0.0
    for row in map(json.loads, args.compare.read_text().splitlines()[:networks]):
        now = found(row["seed"], row["images"])
        for key in sorted({*now, *row["radii"]}):
            apart = distance(row["radii"].get(key), now.get(key), args.smaller)
            largest = max(largest, apart if apart < math.inf else 0.0)
            if apart > args.tolerance:
                different += 1
                print(f"network {row['seed']}, {key}: {row['radii'].get(key)} before, {now.get(key)} now", flush=True)
    print(f"{different} differences; the largest relative one of two radii is {largest:.3g}")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
