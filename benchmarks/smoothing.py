"""Randomized smoothing: coverage with known probabilities, samples saved, radii beside locuslab/smoothing, throughput.

    python -m benchmarks.smoothing coverage bundled soft vit layout
    python -m benchmarks.smoothing locuslab --core core.py   # code/core.py of github.com/locuslab/smoothing
    python -m benchmarks.smoothing cifar --model noisy.safetensors --data test.tar

- ``coverage``: 2,000 half-spaces, whose smoothed classifier and its radius are known, at distances of 0.6 to 1.4 ε. How
  many of the radii are larger than the truth, for a fixed number of samples and for the confidence sequence.
- ``bundled``: the bundled network at ε = 36/255: the samples that verdicts take, and certified accuracy, with
  several σ.
- ``soft``: the same network and draws, counted as votes, and as soft outputs with their variance taken as known, which
  is the most that a Lipschitz constant can say of it (Delattre et al. 2024).
- ``vit``: vit_tiny_patch16_224 with random weights at 224 pixels: noisy images per second and images certified per
  minute, in float32 and bfloat16, with 64 samples per image at most: what easy verdicts of a trained network take.
- ``layout``: noisy images per processor second of networks with random weights, in both memory formats.
- ``locuslab``: class and radius of ``Smooth.certify`` there, given the same draws of the same network, and its bound
  for counts of 100,000 draws.
- ``cifar``: a network that ``lipcert finetune --loss noise --sigma 0.25`` trained: certified accuracy at several ε, and
  the samples that a verdict at 36/255 takes.

Each part is kept in benchmarks/results/smoothing.json with the environment it ran in.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lipcert
from benchmarks._cifar import EPS, labels_of
from benchmarks._env import environment
from lipcert.inputs.data import Batch, open_images
from lipcert.smoothing import SELECTION, SmoothedCertificates, Smoothing, clopper_pearson, normal, radius

RESULT = Path(__file__).parent / "results" / "smoothing.json"
SIGMA, ALPHA, SAMPLES = 0.25, 1e-3, 100_000


class HalfSpace(nn.Module):
    """Class 0 where 0.6 x₀ − 0.8 x₂ > 0: the smoothed classifier is the same, and its radius is that number."""

    w: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.tensor([0.6, 0.0, -0.8, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        margin = x.flatten(1) @ self.w
        return torch.stack([margin, -margin], 1)


def coverage(args: argparse.Namespace) -> dict[str, Any]:
    """How many of 2,000 radii are false."""
    model = lipcert.load(HalfSpace(), mean=(0.0,), std=(1.0,), input_size=(1, 2, 2))
    images = torch.zeros(2000, 1, 2, 2)
    images[:, 0, 0, 0] = torch.linspace(0.6 * EPS, 1.4 * EPS, 2000) / 0.6
    truth = 0.6 * images[:, 0, 0, 0].double()
    found: dict[str, Any] = {}
    for alpha in (0.05, ALPHA):
        for name, whole, samples in (("fixed", True, 1000), ("sequence", False, 10_000)):
            settings: dict[str, Any] = {"sigma": SIGMA, "samples": samples, "alpha": alpha, "all_samples": whole}
            certificates = Smoothing(model, EPS, seed=1, **settings).run(images)
            false = int((certificates.radius > truth).sum())
            found[f"{name}, alpha {alpha:g}"] = {
                "false radii": false,
                "share": false / 2000,
                "false verdicts": int((certificates.certified & (truth <= EPS)).sum()),
                "decided": int((certificates.samples < samples).sum()) if not whole else None,
                "median samples": int(certificates.samples.median()),
            }
    return found


def bundled(args: argparse.Namespace) -> dict[str, Any]:
    """Samples and certified accuracy of the bundled network, by the sequence."""
    model = lipcert.load(None)
    (batch,) = open_images(None, model).batches(1000)
    found = {f"sigma {sigma}": _verdicts(model, batch, sigma, 20_000) for sigma in (0.12, 0.25)}
    return found


def soft(args: argparse.Namespace) -> dict[str, Any]:
    """Radii of votes by Clopper and Pearson, and of mean probabilities by Bernstein's inequality; same draws."""
    model, samples = lipcert.load(None), 1000
    (batch,) = open_images(None, model).batches(1000)
    labels, known = labels_of(batch), math.log(1 / ALPHA)
    radii: dict[str, list[float]] = {}
    for index, image, label in zip(batch.indices, batch.images, labels.tolist(), strict=True):
        with torch.no_grad():
            logits = model(image + SIGMA * normal(0, index, range(samples), image.shape)).double()
        votes = int((logits.argmax(1) == label).sum())
        radii.setdefault("votes", []).append(radius(clopper_pearson(votes, samples, ALPHA), SIGMA))
        for temperature in (1.0, 0.3, 0.1):
            values = (logits / temperature).softmax(1)[:, label]
            low = values.mean() - (2 * values.var() * known / samples) ** 0.5 - known / (3 * samples)
            radii.setdefault(f"soft, temperature {temperature:g}", []).append(radius(max(float(low), 0.0), SIGMA))
    return {
        "images": len(batch),
        "samples": samples,
        "Lipschitz constant below which it can say more than that probabilities vary by at most 1/4": 0.5 / SIGMA,
        "Lipschitz bound of the network": lipcert.lipschitz(model).value,
        **{
            name: {
                "certified accuracy at 36/255": sum(one > EPS for one in found) / len(found),
                "mean radius": statistics.mean(found),
            }
            for name, found in radii.items()
        },
    }


def vit(args: argparse.Namespace) -> dict[str, Any]:
    """Throughput at 224 pixels."""
    torch.manual_seed(0)
    model = lipcert.load("vit_tiny_patch16_224", pretrained=False)
    images = torch.rand(args.images, *model.input_size, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"sigma": SIGMA, "samples": 64}
    return {dtype: _pace(Smoothing(model, EPS, dtype=dtype, **settings), images) for dtype in ("float32", "bfloat16")}


def layout(args: argparse.Namespace) -> dict[str, Any]:
    """Pace with both memory formats, in turns, of two convolutional networks and a ViT; the best of three."""
    found: dict[str, Any] = {}
    for name, size in (("resnet18", 224), ("resnet18", 32), ("convnext_atto", 224), ("vit_tiny_patch16_224", 224)):
        torch.manual_seed(0)
        model = lipcert.load(name, pretrained=False, input_size=(3, size, size))
        image = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0))
        draws = range(8 if size == 224 else 256)
        for dtype in ("float32", "bfloat16"):
            settings: dict[str, Any] = {"sigma": SIGMA, "samples": 64, "dtype": dtype}
            both = [Smoothing(model, EPS, **settings) for _ in range(2)]
            both[0].format = torch.contiguous_format
            both[0].model.to(memory_format=torch.contiguous_format)
            paces: list[list[float]] = [[], []]
            for _ in range(4):
                for smoothing, known in zip(both, paces, strict=True):
                    started = time.process_time()
                    smoothing._classes([(image[0], 0, draws)])
                    known.append(len(draws) / (time.process_time() - started))
            plain, last = (max(known[1:]) for known in paces)
            found[f"{name} at {size}, {dtype}"] = {"plain": plain, "channels_last": last, "gain": last / plain}
    return found


def cifar(args: argparse.Namespace) -> dict[str, Any]:
    """Certified accuracy of a network trained under noise, with all samples, and what a verdict alone takes."""
    model = lipcert.load(args.model)
    (batch,) = open_images(args.data, model, limit=args.images).batches(args.images)
    started = time.perf_counter()
    smoothing = Smoothing(model, EPS, sigma=SIGMA, samples=args.samples, all_samples=True)
    found = smoothing.run_batch(batch)
    seconds = time.perf_counter() - started
    right = found.predicted == labels_of(batch)
    return {
        "images": len(batch),
        "sigma": SIGMA,
        "samples": args.samples,
        "most drawn class is right": right.double().mean().item(),
        "certified": {f"{eps:.4g}": (right & (found.radius > eps)).double().mean().item() for eps in (EPS, 0.25, 0.5)},
        "seconds an image": seconds / len(batch),
        "verdict at 36/255": _verdicts(model, batch, SIGMA, SAMPLES),
    }


def locuslab(args: argparse.Namespace) -> dict[str, Any]:
    """The same draws to both programs: how often class, abstention or radius differ."""
    core = _core(args.core)
    model = lipcert.load(None)
    (batch,) = open_images(None, model).batches(1000)
    smoothing = Smoothing(model, EPS, sigma=SIGMA, samples=1000, alpha=ALPHA, all_samples=True)
    own = smoothing.run_batch(batch)
    differ, largest = 0, 0.0
    for i, index in enumerate(batch.indices):
        classes = _classes(smoothing, batch.images[i], index)
        theirs = core.Smooth(smoothing.model, smoothing.classes, SIGMA)
        parts = iter((classes[:SELECTION], classes[SELECTION:]))
        theirs._sample_noise = lambda x, num, size, parts=parts: torch.bincount(next(parts), minlength=10).numpy()
        predicted, radius = theirs.certify(batch.images[i], SELECTION, 1000, ALPHA, 1000)
        differ += (int(own.predicted[i]) if own.radius[i] > 0 else -1) != predicted
        largest = max(largest, abs(float(own.radius[i]) - float(radius)))
    bounds = core.Smooth(nn.Identity(), 2, SIGMA)
    counts = [SAMPLES // 2 + SAMPLES // 4000 * i for i in range(2001)]
    gap = max(
        abs(bounds._lower_confidence_bound(k, SAMPLES, ALPHA) - clopper_pearson(k, SAMPLES, ALPHA)) for k in counts
    )
    return {
        "images": len(batch),
        "samples": 1000,
        "classes or abstentions that differ": int(differ),
        "abstentions": int(own.abstained.sum()),
        "largest difference of radii": largest,
        "counts of 100,000 draws": len(counts),
        "largest difference of bounds": gap,
    }


def _classes(smoothing: Smoothing, image: Tensor, index: int) -> Tensor:
    """The class of every draw of an image, shape (SELECTION + samples,)."""
    noise = normal(0, index, range(SELECTION + smoothing.plan.samples), image.shape)
    with torch.no_grad():
        return torch.cat([smoothing.model(part).argmax(1) for part in (image + SIGMA * noise).split(256)])


def _core(path: Path | None) -> Any:
    """Their module; what it imports and ``certify`` does not use may be missing in newer versions of SciPy."""
    if path is None:
        raise SystemExit("--core names code/core.py of a checkout of github.com/locuslab/smoothing")
    import scipy.stats

    if not hasattr(scipy.stats, "binom_test"):
        scipy.stats.binom_test = None
    spec = importlib.util.spec_from_file_location("core", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _verdicts(model: lipcert.Model, batch: Batch, sigma: float, samples: int, **more: Any) -> dict[str, Any]:
    smoothing = Smoothing(model, EPS, sigma=sigma, samples=samples, alpha=ALPHA, **more)
    started = time.perf_counter()
    found: SmoothedCertificates = smoothing.run_batch(batch)
    seconds = time.perf_counter() - started
    return {
        "images": len(batch),
        "samples at most": samples,
        "certified accuracy at 36/255": found.certified_accuracy,
        "abstained": int(found.abstained.sum()),
        "median samples": statistics.median(found.samples.tolist()),
        "share of samples drawn": float((found.samples + found.selected).sum()) / (len(batch) * (samples + SELECTION)),
        "undecided": int((found.samples == samples).sum()),
        "seconds an image": seconds / len(batch),
    }


def _pace(smoothing: Smoothing, images: Tensor) -> dict[str, Any]:
    smoothing.run(images[:1])
    started = time.perf_counter()
    found = smoothing.run(images)
    seconds = time.perf_counter() - started
    drawn = int((found.samples + found.selected).sum())
    return {
        "images": len(images),
        "certified": int(found.certified.sum()),
        "median samples": statistics.median(found.samples.tolist()),
        "noisy images a second": drawn / seconds,
        "images a minute": 60 * len(images) / seconds,
    }


PARTS = {
    "coverage": coverage,
    "bundled": bundled,
    "soft": soft,
    "vit": vit,
    "layout": layout,
    "locuslab": locuslab,
    "cifar": cifar,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--core", type=Path, help="code/core.py of a checkout of locuslab/smoothing")
    parser.add_argument("--model", help="a network trained under noise of σ = 0.25")
    parser.add_argument("--data", help="images of CIFAR-10's test set")
    parser.add_argument("--images", type=int, default=20, help="images of the parts vit and cifar")
    parser.add_argument("--samples", type=int, default=2000, help="samples of the part cifar")
    args = parser.parse_args()
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for part in args.parts:
        started = time.perf_counter()
        found = PARTS[part](args)
        kept[part] = {"result": found, "seconds": time.perf_counter() - started, "environment": environment()}
        print(part, json.dumps(found, indent=2))
        RESULT.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
