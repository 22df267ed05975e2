"""Trains the denoiser ``natural``: first for small errors, then for the decision of a classifier behind it.

    python -m benchmarks.train_denoiser train --data val.tar --classifier lite0.safetensors --state denoiser.pt
    python -m benchmarks.train_denoiser ship --state denoiser.pt

The images are those of the fixed shuffle after the first 300: with ``certify --limit 200`` on the same data, the first
200 are certified, and the next 100 choose. They must be 1,000 images in class folders with a short side of 256. Crops
are taken at three scales, half of them mirrored, each colour's brightness changed by a power.

1. Mean squared error, divided by σ, on crops of 128 pixels; σ from 0.1 to 1.
2. The stability objective of Salman et al. ("Denoised smoothing", NeurIPS 2020) on crops of 224 pixels: cross-entropy
   of the classifier's output behind the denoiser with its output for the image without noise; plus the error of step 1;
   σ from 0.1 to 0.6.

σ is uniform in its logarithm. Everything runs on one device, in bfloat16 with weights in float32. The stages end with
their ``--minutes``: of the GPU, or of the processor, of which one thread is used. The learning rate falls with them
like half a cosine. A moving average of the weights is judged regularly on the images for choosing; that of the smallest
cross-entropy in stage 2 is shipped. The state is written as often, and a stopped run goes on from there.

The shipped weights were trained twice: on one core, in 3,200 and 600 steps of 16 crops, and from there with ``--start``
and ``--minutes 0.4 1.6`` on an H100 that trained other networks beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
CERTIFIED, CHOOSING = 200, 100
SCALES, LARGEST = (0.875, 1.0, 1.25), 320
# By stage.
CROPS, RATES, CLIP, SIGMAS = (128, 224), (1e-3, 2e-4), (0.1, 5.0), ((0.1, 1.0), (0.1, 0.6))
WARM_UP, SLOWEST, PSNR_WEIGHT = 200, 3e-3, 30.0
SHIPPED = Path(__file__).parents[1] / "lipcert" / "assets" / "natural_denoiser.safetensors"
JUDGED, DRAWS = (0.12, 0.18, 0.25, 0.43), 4


class Photos:
    """Images of a data set on a device, at three scales."""

    def __init__(self, data: str, numbers: list[int], device: torch.device):
        source = timm.data.create_dataset("", root=data, cache_tarinfo=False)
        scaled = []
        for number in numbers:
            image = torch.from_numpy(np.array(source[number][0].convert("RGB"))).to(device).permute(2, 0, 1).float()
            for scale in SCALES:
                sides = [round(scale * side) for side in image.shape[1:]]
                if min(sides) < CROPS[1]:
                    continue
                resized = F.interpolate(image[None], sides, mode="bicubic", antialias=scale < 1)[0]
                top, left = (max(0, (side - LARGEST) // 2) for side in sides)
                resized = resized[:, top : top + LARGEST, left : left + LARGEST]
                scaled.append(resized.round().clamp(0, 255).byte().permute(1, 2, 0))
        self.sides = torch.tensor([one.shape[:2] for one in scaled], device=device)
        self.pixels = torch.zeros(len(scaled), LARGEST, LARGEST, 3, dtype=torch.uint8, device=device)
        for place, one in zip(self.pixels, scaled, strict=True):
            place[: one.shape[0], : one.shape[1]] = one

    def crops(self, size: int, count: int, generator: torch.Generator) -> Tensor:
        """Random crops, float32 in [0, 1], shape (count, 3, size, size), channels last."""
        on: dict[str, Any] = {"generator": generator, "device": self.pixels.device}
        which = torch.randint(len(self.pixels), (count,), **on)
        corner = (torch.rand(count, 2, **on) * (self.sides[which] - size + 1)).long()
        along = torch.arange(size, device=self.pixels.device)
        rows = corner[:, :1] + along
        columns = corner[:, 1:] + torch.where(torch.rand(count, 1, **on) < 0.5, along, along.flip(0))
        cut = self.pixels[which[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        powers = torch.empty(count, 3, 1, 1, device=self.pixels.device).uniform_(-0.2, 0.2, generator=generator).exp()
        return (cut.float() / 255).pow(powers)


class Classifier(nn.Module):
    """EfficientNet-Lite0 on pixels in [0, 1]."""

    def __init__(self, weights: str):
        super().__init__()
        self.net = timm.create_model(NAME)
        self.net.load_state_dict(safetensors.torch.load_file(weights))
        self.eval().requires_grad_(False).to(torch.bfloat16).to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
        return self.net((pixels - 0.5) / 0.5).float()


def denoise(net: nn.Module, noisy: Tensor, sigma: Tensor) -> Tensor:
    """Noisy images without the network's estimate of the noise, float32."""
    with torch.autocast(noisy.device.type, torch.bfloat16):
        noise = net(noisy.contiguous(memory_format=torch.channels_last), sigma)
    return noisy - noise.float()


def step(net: NaturalNet, stage: int, photos: Photos, classifier: Classifier, number: int, count: int) -> Tensor:
    """The loss of one step; its crops and noise depend on the stage and the number of the step alone."""
    device = photos.pixels.device
    generator = torch.Generator(device).manual_seed(10**7 * stage + number)
    clean = photos.crops(CROPS[stage], count, generator)
    low, high = map(math.log, SIGMAS[stage])
    sigma = torch.empty(count, device=device).uniform_(low, high, generator=generator).exp()
    noise = torch.randn(clean.shape, generator=generator, device=device)
    denoised = denoise(net, clean + sigma.view(-1, 1, 1, 1) * noise, sigma)
    error = ((denoised - clean).square().mean((1, 2, 3)) / sigma).mean()
    if stage == 0:
        return error
    with torch.no_grad():
        wanted = classifier(clean).softmax(1)
    return F.cross_entropy(classifier(denoised), wanted) + PSNR_WEIGHT * error


@torch.no_grad()
def judged(net: nn.Module, classifier: Classifier, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Scores on the images for choosing, by σ: PSNR, how often the classifier is right, and its cross-entropy."""
    scores = {}
    for sigma in JUDGED:
        generator = torch.Generator(images.device).manual_seed(0)
        errors, right, entropies = [], [], []
        for _ in range(DRAWS):
            for clean, label in zip(images.split(20), labels.split(20), strict=True):
                noise = torch.randn(clean.shape, generator=generator, device=clean.device)
                denoised = denoise(net, clean + sigma * noise, torch.tensor([sigma], device=clean.device))
                errors.append((denoised.clamp(0, 1) - clean).square().mean((1, 2, 3)))
                logits, wanted = classifier(denoised), classifier(clean).softmax(1)
                right.append(logits.argmax(1) == label)
                entropies.append(F.cross_entropy(logits, wanted, reduction="none"))
        scores[f"PSNR at {sigma}"] = float(-10 * torch.cat(errors).log10().mean())
        scores[f"right at {sigma}"] = float(torch.cat(right).float().mean())
        scores[f"cross-entropy at {sigma}"] = float(torch.cat(entropies).mean())
    return scores


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), betas=(0.9, 0.99), weight_decay=1e-4, fused=True)


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    device = torch.device(args.device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    held_out = set(order_of(1000, CERTIFIED + CHOOSING))
    photos = Photos(args.data, [i for i in range(1000) if i not in held_out], device)
    chosen = open_images(args.data, lipcert.load(NAME, pretrained=False), limit=CERTIFIED).others(CHOOSING)
    assert chosen is not None
    judges = chosen.images.to(device), labels_of(chosen).to(device)
    classifier = Classifier(args.classifier).to(device)
    torch.manual_seed(0)
    net, average = (NaturalNet().to(device).to(memory_format=torch.channels_last) for _ in range(2))
    if args.start:
        net.load_state_dict(safetensors.torch.load_file(args.start))
    optimizer = optimizer_of(net)
    state: dict[str, Any] = {"stage": 0, "number": 0, "seconds": 0.0, "steps": [], "least": math.inf, "best": {}}
    if args.state.exists():
        state = torch.load(args.state, map_location=device, weights_only=True)
        net.load_state_dict(state.pop("net"))
        average.load_state_dict(state.pop("average"))
        optimizer.load_state_dict(state.pop("optimizer"))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    state["trained"] = {"minutes": args.minutes, "batch": args.batch, "device": gpu or "one core"}
    losses = torch.zeros(2, device=device)

    def report(stage: int) -> None:
        loss, count = losses.tolist()
        losses.zero_()
        scores = judged(average, classifier, *judges)
        entropy = sum(score for name, score in scores.items() if name.startswith("cross-entropy")) / len(JUDGED)
        if stage == 1 and entropy < state["least"]:
            state["least"] = entropy
            state["best"] = {name: value.clone() for name, value in average.state_dict().items()}
        place = {name: state[name] for name in ("stage", "number", "seconds")}
        print(json.dumps({**place, "loss": loss / max(1, count), **scores}), flush=True)
        weights = {"net": net.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, **weights}, f"{args.state}.part")
        os.replace(f"{args.state}.part", args.state)

    while state["stage"] < 2:
        stage, begun, before = state["stage"], clock(), state["seconds"]
        reported = before
        while (done := state["seconds"] / (60 * args.minutes[stage])) < 1:
            number = state["number"]
            for group in optimizer.param_groups:
                group["lr"] = RATES[stage] * min(1.0, (number + 1) / WARM_UP) * (1 + math.cos(math.pi * done)) / 2
            loss = step(net, stage, photos, classifier, number, args.batch[stage])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), CLIP[stage])
            optimizer.step()
            with torch.no_grad():
                losses += torch.stack([loss, torch.ones_like(loss)])
                for kept, weight in zip(average.parameters(), net.parameters(), strict=True):
                    kept.lerp_(weight, max(SLOWEST, 1 / (number + 1)))
            state |= {"number": number + 1, "seconds": before + clock() - begun}
            if state["seconds"] - reported > args.every:
                report(stage)
                reported = state["seconds"]
        state |= {"stage": stage + 1, "number": 0, "seconds": 0.0, "steps": [*state["steps"], state["number"]]}
        optimizer = optimizer_of(net)  # the moments of the other loss are of another size
        report(stage)


def ship(args: argparse.Namespace) -> None:
    state = torch.load(args.state, map_location="cpu", weights_only=True)
    weights = {name: value.half().contiguous() for name, value in (state["best"] or state["average"]).items()}
    about = {name: json.dumps(value) for name, value in {**state["trained"], "steps": state["steps"]}.items()}
    safetensors.torch.save_file(weights, SHIPPED, {"made by": "python -m benchmarks.train_denoiser", **about})
    print(f"{SHIPPED.name}: {SHIPPED.stat().st_size} bytes, {about}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("train", "ship"))
    parser.add_argument("--data", help="1,000 images in class folders, or a .tar of them")
    parser.add_argument("--classifier", help="weights of tf_efficientnet_lite0")
    parser.add_argument("--state", type=Path, required=True, help="where the state of training is kept")
    parser.add_argument("--start", help="weights to start from, such as those that are shipped")
    parser.add_argument("--device", default="cpu", help="where everything runs")
    parser.add_argument("--minutes", type=float, nargs=2, default=(0.8, 1.7), help="of the two stages")
    parser.add_argument("--batch", type=int, nargs=2, default=(128, 64), help="crops of a step, in the two stages")
    parser.add_argument("--every", type=float, default=600.0, help="seconds between written and judged states")
    args = parser.parse_args()
    {"train": train, "ship": ship}[args.action](args)


if __name__ == "__main__":
    main()
