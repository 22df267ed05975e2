"""Trains the denoiser ``natural``: first for small errors, then for the decision of a classifier behind it.

    python -m benchmarks.train_denoiser train --data val.tar --classifier lite0.safetensors --state denoiser.pt
    python -m benchmarks.train_denoiser ship --state denoiser.pt

The images are those of the fixed shuffle after the first 300: with ``certify --limit 200`` on the same data, the first
200 are certified, and the next 100 choose. They must be 1,000 images in class folders with a short side of 256.

1. Mean squared error, divided by σ, on crops of 96 pixels.
2. The stability objective of Salman et al. ("Denoised smoothing", NeurIPS 2020) on crops of 160 pixels: cross-entropy
   of the classifier's output behind the denoiser with its output for the image without noise; plus the error of step 1.

σ is drawn from 0.1 to 1, uniform in its logarithm. One thread, in bfloat16 with weights in float32. The learning rate
is constant until the last fifth of each stage, so a stage may be made longer or shorter on the way: give ``--steps``
again. The state is written once a minute, and a stopped run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipcert
from benchmarks._cifar import labels_of
from lipcert.denoisers import NaturalNet
from lipcert.inputs.data import open_images, order_of

NAME = "tf_efficientnet_lite0"
HELD_OUT, CHOOSING = 300, slice(200, 300)
CROPS, BATCH, RATES = (96, 160), (16, 16), (1e-3, 1e-4)
PSNR_WEIGHT = 100.0
SHIPPED = Path(__file__).parents[1] / "lipcert" / "assets" / "natural_denoiser.safetensors"
SIGMAS = (0.12, 0.25, 0.5)


def images_of(data: str, numbers: list[int]) -> list[Tensor]:
    """Images by their position in the data set, as they are stored: uint8, shape (3, H, W)."""
    source = timm.data.create_dataset("", root=data, cache_tarinfo=False)
    pixels = (torch.from_numpy(np.array(source[i][0].convert("RGB"))) for i in numbers)
    return [one.permute(2, 0, 1).contiguous() for one in pixels]


def crops(images: list[Tensor], size: int, count: int, generator: torch.Generator) -> Tensor:
    """Random crops, half of them mirrored; float32 in [0, 1], shape (count, 3, size, size)."""
    cut = []
    for _ in range(count):
        image = images[int(torch.randint(len(images), (), generator=generator))]
        top, left = (int(torch.randint(side - size + 1, (), generator=generator)) for side in image.shape[1:])
        part = image[:, top : top + size, left : left + size]
        cut.append(part.flip(2) if torch.rand((), generator=generator) < 0.5 else part)
    return torch.stack(cut).float() / 255


class Classifier(nn.Module):
    """EfficientNet-Lite0 on pixels in [0, 1]."""

    def __init__(self, weights: str):
        super().__init__()
        self.net = timm.create_model(NAME)
        self.net.load_state_dict(safetensors.torch.load_file(weights))
        self.eval().requires_grad_(False).to(torch.bfloat16).to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        return self.net((images.to(torch.bfloat16) - 0.5) / 0.5).float()


def step(net: NaturalNet, stage: int, images: list[Tensor], classifier: Classifier, number: int) -> Tensor:
    """The loss of one step; its crops and noise depend on the stage and the number of the step alone."""
    generator = torch.Generator().manual_seed(10**7 * stage + number)
    clean = crops(images, CROPS[stage], BATCH[stage], generator)
    sigma = torch.exp(torch.empty(len(clean)).uniform_(math.log(0.1), 0.0, generator=generator))
    level = sigma.view(-1, 1, 1, 1)
    noisy = clean + level * torch.randn(clean.shape, generator=generator)
    last = torch.channels_last
    with torch.autocast("cpu", torch.bfloat16):
        noise = net(noisy.contiguous(memory_format=last), sigma)
    denoised = noisy - noise.float()
    error = ((denoised - clean).square().mean((1, 2, 3)) / sigma).mean()
    if stage == 0:
        return error
    with torch.no_grad():
        wanted = classifier(clean.contiguous(memory_format=last)).softmax(1)
    logits = classifier(denoised.contiguous(memory_format=last))
    return F.cross_entropy(logits, wanted) + PSNR_WEIGHT * error


def rate(stage: int, number: int, steps: int) -> float:
    """The learning rate: rises in the first 200 steps, falls to nothing in the last fifth."""
    return RATES[stage] * min(1.0, (number + 1) / 200, max(steps - number, 0) / (0.2 * steps))


@torch.no_grad()
def judged(net: NaturalNet, data: str, classifier: Classifier) -> dict[str, float]:
    """PSNR, and how often the classifier is right behind the denoiser, on the images for choosing; one draw each."""
    chosen = open_images(data, lipcert.load(NAME, pretrained=False), limit=HELD_OUT)
    batch = next(chosen.batches(HELD_OUT)).split(CHOOSING.start)[1]
    clean, labels, found = batch.images, labels_of(batch), {}
    for sigma in SIGMAS:
        noise = sigma * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
        right, errors = 0, []
        for part, truth, label in zip((clean + noise).split(20), clean.split(20), labels.split(20), strict=True):
            part = part.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16):
                denoised = part - net(part, torch.tensor([sigma])).float()
            errors += (denoised.clamp(0, 1) - truth).square().mean((1, 2, 3)).tolist()
            right += int((classifier(denoised).argmax(1) == label).sum())
        found[f"right at {sigma}"] = right / len(clean)
        found[f"PSNR at {sigma}"] = sum(-10 * math.log10(error) for error in errors) / len(errors)
    return found


def made(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), betas=(0.9, 0.99), weight_decay=1e-4)


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    order = set(order_of(1000, HELD_OUT))
    images = images_of(args.data, [i for i in range(1000) if i not in order])
    images = [one for one in images if min(one.shape[1:]) >= CROPS[1]]
    classifier = Classifier(args.classifier)
    torch.manual_seed(0)
    net = NaturalNet().to(memory_format=torch.channels_last)
    optimizer = made(net)
    state: dict[str, Any] = {"stage": 0, "number": 0, "seconds": 0.0}
    if args.state.exists():
        state = torch.load(args.state, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    seconds, started = state["seconds"], time.process_time()
    written, total, seen = time.monotonic(), 0.0, 0

    def write(stage: int, number: int) -> None:
        used = seconds + time.process_time() - started
        kept = {"stage": stage, "number": number, "seconds": used, "net": net.state_dict()}
        torch.save({**kept, "optimizer": optimizer.state_dict()}, f"{args.state}.part")
        os.replace(f"{args.state}.part", args.state)

    for stage in range(state["stage"], 2):
        for number in range(state["number"] if stage == state["stage"] else 0, 10**9):
            steps = args.steps[stage]
            if number >= steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = rate(stage, number, steps)
            loss = step(net, stage, images, classifier, number)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), (0.1, 5.0)[stage])
            optimizer.step()
            total, seen = total + loss.item(), seen + 1
            if time.monotonic() - written > 60:
                minutes = (seconds + time.process_time() - started) / 60
                now = time.strftime("%H:%M:%S")
                print(f"{now} stage {stage} step {number} loss {total / seen:.5f} {minutes:.1f} core min", flush=True)
                write(stage, number + 1)
                written, total, seen = time.monotonic(), 0.0, 0
            if number % args.judge == args.judge - 1:
                print(json.dumps(judged(net, args.data, classifier)), flush=True)
        optimizer = made(net)  # the moments of the other loss are of another size
        write(stage + 1, 0)
        shutil.copy(args.state, args.state.with_suffix(f".after-{stage}.pt"))
        print(f"after stage {stage}:", json.dumps(judged(net, args.data, classifier)), flush=True)


def ship(args: argparse.Namespace) -> None:
    state = torch.load(args.state, weights_only=True)
    weights = {name: value.half().contiguous() for name, value in state["net"].items()}
    about = {"core minutes": f"{state['seconds'] / 60:.0f}", "made by": "python -m benchmarks.train_denoiser"}
    safetensors.torch.save_file(weights, SHIPPED, about)
    print(f"{SHIPPED.name}: {SHIPPED.stat().st_size} bytes, {about}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("train", "ship"))
    parser.add_argument("--data", help="1,000 images in class folders, or a .tar of them")
    parser.add_argument("--classifier", help="weights of tf_efficientnet_lite0")
    parser.add_argument("--state", type=Path, required=True, help="where the state of training is kept")
    parser.add_argument("--steps", type=int, nargs=2, default=(3_200, 600), help="steps of the two stages")
    parser.add_argument("--judge", type=int, default=500, help="steps between looks at the images for choosing")
    args = parser.parse_args()
    {"train": train, "ship": ship}[args.action](args)


if __name__ == "__main__":
    main()
