"""The global bound of a ViT-B against the norms of its matrices by SVD; GloRo against the plain forward pass.

    python -m benchmarks.global_bound

Time and memory of ``lipcert.lipschitz`` beside ``torch.linalg.matrix_norm(W, 2)`` over all weight matrices, in one
process. Memory is the growth of the peak resident set while the bound is computed, against the weights in float64.
GloRo certification is timed against ``model(images)`` in the same float64, pair by pair.
"""

from __future__ import annotations

import copy
import json
import resource
import statistics
import time
from pathlib import Path

import torch

import lipcert
from benchmarks._env import environment
from lipcert.certifier import Certifier

RESULTS = Path(__file__).parent / "results" / "global_bound.json"


def peak() -> int:
    """Largest resident set so far, in bytes (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    torch.manual_seed(0)
    model = lipcert.load("vit_base_patch16_224", pretrained=False)
    with torch.no_grad():
        model(torch.rand(1, 3, 224, 224))  # so that buffers of the first forward pass are not counted below
    before, started = peak(), time.perf_counter()
    bound = lipcert.lipschitz(model)
    seconds = time.perf_counter() - started
    grown = peak() - before
    matrices = [p.detach().flatten(1) for p in model.parameters() if p.dim() in (2, 4)]
    started = time.perf_counter()
    for matrix in matrices:
        torch.linalg.matrix_norm(matrix, 2)
    svd_seconds = time.perf_counter() - started
    weights = sum(p.numel() for p in model.parameters()) * 8

    small = lipcert.load("vit_tiny_patch16_224", pretrained=False)
    certifier = Certifier(small, 36 / 255, "gloro")
    plain = copy.deepcopy(small).double()
    images = torch.rand(32, 3, 224, 224)
    ratios = []
    for _ in range(7):
        started = time.perf_counter()
        with torch.no_grad():
            plain(images.double())
        middle = time.perf_counter()
        certifier.run(images)
        ratios.append((time.perf_counter() - middle) / (middle - started))
    summary = {
        "bound_log10": bound.log10,
        "bound_seconds": seconds,
        "matrix_norm_seconds": svd_seconds,
        "matrices": len(matrices),
        "peak_growth_over_float64_weights": grown / weights,
        "gloro_over_forward": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "environment": environment(),
    }
    print(json.dumps(summary, indent=1))
    RESULTS.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
