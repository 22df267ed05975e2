"""Seconds and memory of each method on an image of full size: vit_tiny_patch16_224, random weights, after ``convert``.

    python -m benchmarks.methods_224 --methods global gloro local lofast anchored staged --passes 500 --classes 10

All norms that the anchored certificate can use are 20,000 forward passes here, hours on a core. ``--passes`` is what
lofast and anchored may spend on an image. What is computed once for a network is counted apart, by an image before
those that are measured. With random weights none of 1,000 classes is far from the others, and anchored takes a gradient
for each. Rows of methods that are not asked for stay.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Literal

import torch

import lipcert
from benchmarks._env import environment
from lipcert.certifier import METHODS, Certifier

NAME = "vit_tiny_patch16_224"


def measure(
    method: str, attention: Literal["l2", "keep"], images: int, classes: int, passes: float | None
) -> dict[str, object]:
    """Runs in a process of its own, so that the peak memory is that of this method."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = lipcert.load(NAME, pretrained=False, num_classes=classes)
    lipcert.convert(model, attention=attention, norm="smooth")
    pixels = torch.rand(images + 1, *model.input_size, generator=torch.Generator().manual_seed(1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    started = time.process_time()
    passes = passes if method in ("lofast", "anchored") else None
    certifier = Certifier(model, 36 / 255, method, passes=passes)
    certifier.run(pixels[:1])
    ready = time.process_time()
    result = certifier.run(pixels[1:])
    each = (time.process_time() - ready) / images
    return {
        "method": method,
        "attention": attention,
        "classes": classes,
        "passes": passes,
        "cpu_seconds_once": max(0.0, ready - started - each),
        "cpu_seconds_an_image": each,
        "mib_before": before,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "largest_radius": result.radius.max().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["global", "gloro", "lofast"])
    parser.add_argument("--attention", choices=["l2", "keep"], nargs="+", default=["l2", "keep"])
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--passes", type=float, help="of an image, on norms of Jacobians; all norms by default")
    args = parser.parse_args()
    path = Path(__file__).parent / "results" / "methods_224.json"
    rows = {
        (row["method"], row["attention"], row["classes"], row["passes"]): row
        for row in (json.loads(path.read_text())["rows"] if path.exists() else [])
    }
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for attention in args.attention:
            for method in args.methods:
                row = pool.apply(measure, (method, attention, args.images, args.classes, args.passes))
                rows[method, attention, args.classes, row["passes"]] = row
                print(json.dumps(row), flush=True)
                found = {"model": NAME, "images": args.images, "rows": list(rows.values())}
                path.write_text(json.dumps({**found, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
