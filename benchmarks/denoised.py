"""Denoised smoothing of EfficientNet-Lite0 as it is: certified accuracy behind each denoiser, and its cost.

    python -m benchmarks.denoised pace sigma dct natural natural-half --checkpoint LITE0 --data VAL.tar --rows FOLDER

The weights are ImageNet's, under timm's names; the data are 1,000 images in class folders, one a class. The first 200
of the fixed shuffle are certified, as by ``lipcert certify --limit 200``; the next 48 choose σ; the network of
``natural`` was trained on images after the first 300 (``benchmarks.train_denoiser``). All runs are in bfloat16, and
smooth the network in bfloat16.

- ``pace``: processor seconds of a draw, of a bare forward pass of denoiser and network in the same batch, of each of
  both, and of a ResNet-18 in float32 and bfloat16.
- ``sigma``: what ``--sigma auto`` finds for each of the runs, which take it from there.
- ``dct``, ``natural``: certified accuracy at 36/255; ``natural-half``: at 0.5. Rows are kept in the folder ``--rows``,
  from where a run with the same ``--samples`` goes on. A decision with more draws would be a second test of the same
  image, whose failure probability adds to that of the first.

Each part is kept in benchmarks/results/denoised.json with the environment it ran in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lipcert
from benchmarks._cifar import labels_of
from benchmarks._env import environment
from lipcert.denoisers import NAMES, Denoised
from lipcert.inputs.data import open_images
from lipcert.smoothing import CHOOSING, Smoothing, choose_sigma

RESULT = Path(__file__).parent / "results" / "denoised.json"
NAME, IMAGES, DTYPE = "tf_efficientnet_lite0", 200, "bfloat16"
# Denoiser and ε.
RUNS = {"dct": ("dct", "36/255"), "natural": ("natural", "36/255"), "natural-half": ("natural", "0.5")}


def network(args: argparse.Namespace) -> lipcert.Model:
    return lipcert.load(NAME, pretrained=False, checkpoint=args.checkpoint).to(args.device)


def results() -> dict[str, Any]:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def certified(args: argparse.Namespace, part: str) -> dict[str, Any]:
    """Certifies the images one after the other, and counts."""
    denoiser, eps = RUNS[part]
    model = Denoised(network(args), denoiser)
    images = open_images(args.data, model, limit=IMAGES)
    assert images.order is not None
    sigma = results()["sigma"]["result"][part]["sigma"]
    smoothing = Smoothing(model, eps, sigma=sigma, samples=args.samples, dtype=DTYPE)
    args.rows.mkdir(parents=True, exist_ok=True)
    file = args.rows / f"{part}.jsonl"
    written = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    known: dict[int, dict[str, Any]] = {row["index"]: row for row in written if row["samples at most"] == args.samples}
    for batch in images.batches(smoothing.together, {*images.order} - {*known}):
        found = smoothing.run_batch(batch)
        right = (found.predicted == labels_of(batch)).tolist()
        with file.open("a") as out:
            for i, index in enumerate(batch.indices):
                row = {"index": index, "right": right[i], "certified": bool(found.certified[i])}
                row |= {"samples": int(found.samples[i]), "drawn": int(found.samples[i] + found.selected[i])}
                known[index] = row | {"samples at most": args.samples, "device": args.device}
                out.write(json.dumps(known[index]) + "\n")
        print(f"{part}: {sum(row['right'] and row['certified'] for row in known.values())} of {len(known)}", flush=True)
    rows = list(known.values())
    return {
        "denoiser": denoiser,
        "eps": eps,
        "sigma": sigma,
        "alpha": smoothing.plan.alpha,
        "dtype": DTYPE,
        "samples at most": args.samples,
        "images": len(rows),
        "images of each device": Counter(row["device"] for row in rows),
        "most drawn class is right": sum(row["right"] for row in rows) / len(rows),
        "certified accuracy": sum(row["right"] and row["certified"] for row in rows) / len(rows),
        "undecided": sum(row["samples"] == args.samples for row in rows),
        "draws an image": statistics.mean(row["drawn"] for row in rows),
    }


def sigma(args: argparse.Namespace) -> dict[str, Any]:
    """σ by the images after those that are certified."""
    chosen = {}
    for part, (denoiser, eps) in RUNS.items():
        model = Denoised(network(args), denoiser)
        others = open_images(args.data, model, limit=IMAGES).others(CHOOSING)
        assert others is not None
        choice = choose_sigma(
            model, others.images, others.labels, eps, indices=others.indices, progress=print, dtype=DTYPE
        )
        shares = {f"{sigma:g}": share for sigma, share in choice.shares.items()}
        chosen[part] = {"sigma": choice.sigma, "images": choice.images, "shares": shares}
    return chosen


def pace(args: argparse.Namespace) -> dict[str, Any]:
    """Processor seconds of a draw and of what it is made of; the least of several turns."""
    found: dict[str, Any] = {}
    bare = network(args)
    for name in NAMES:
        smoothing = Smoothing(Denoised(bare, name), "36/255", sigma=0.12, dtype=DTYPE)
        image = torch.rand(bare.input_size, generator=torch.Generator().manual_seed(0))
        images = image.expand(smoothing.batch, *bare.input_size).to(torch.bfloat16, memory_format=torch.channels_last)
        whole = smoothing.model
        assert isinstance(whole, Denoised)
        draws = range(smoothing.batch)
        took = _turns(
            {
                "draw": partial(smoothing.classes_of, image[None], [0], draws),
                "forward pass of both": partial(whole, images),
                "denoiser": partial(whole.denoiser, images),
            },
            smoothing.batch,
        )
        found[name] = {**took, "forward passes over draws": took["forward pass of both"] / took["draw"]}
    for dtype in ("float32", DTYPE):
        net = lipcert.load("resnet18", pretrained=False, input_size=(3, 224, 224)).to(getattr(torch, dtype))
        images = torch.rand(16, 3, 224, 224).to(net.dtype, memory_format=torch.channels_last)
        net = net.to(memory_format=torch.channels_last)
        found |= _turns({f"resnet18 in {dtype}": partial(net, images)}, 16)
    return found


@torch.no_grad()
def _turns(runs: dict[str, Callable[[], Any]], count: int) -> dict[str, float]:
    """The least processor seconds of each, over ``count``, of eight turns."""
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(8):
        for name, run in runs.items():
            started = time.process_time()
            run()
            least[name] = min(least[name], (time.process_time() - started) / count)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=("pace", "sigma", *RUNS))
    parser.add_argument("--checkpoint", required=True, help="weights of tf_efficientnet_lite0")
    parser.add_argument("--data", required=True, help="1,000 images in class folders, or a .tar of them")
    parser.add_argument("--rows", type=Path, required=True, help="folder for the rows of stopped runs")
    parser.add_argument("--samples", type=int, default=2_000, help="the largest number of draws of an image")
    parser.add_argument("--device", default="cpu", help="where the network runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for part in args.parts:
        result = {"pace": pace, "sigma": sigma}[part](args) if part not in RUNS else certified(args, part)
        print(part, json.dumps(result, indent=2), flush=True)
        # Read again: runs beside this one write other parts.
        kept = results() | {part: {"result": result, "environment": environment()}}
        RESULT.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
