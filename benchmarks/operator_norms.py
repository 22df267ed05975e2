"""Rigorous norms against torch's singular values, on the weight matrices of vit_base_patch16_224 with random weights.

Run as ``python -m benchmarks.operator_norms``; writes ``benchmarks/results/operator_norms.json``. The two are timed in
turn, and the best of ``REPEATS`` runs counts. The weights are float32, so torch's figure is one in float32 arithmetic,
while the bound holds for the exact weights. ``loose`` is relative to the singular value in float64.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch

from benchmarks._env import environment
from lipcert.norms import dense_norm

MODEL = "vit_base_patch16_224"
REPEATS = 3
RESULT = Path(__file__).parent / "results" / "operator_norms.json"


def main() -> None:
    torch.manual_seed(0)
    model = timm.create_model(MODEL)
    matrices: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for parameter in model.parameters():
        if parameter.dim() in (2, 4):
            matrix = parameter.detach().flatten(1)
            matrices.setdefault(tuple(matrix.shape), []).append(matrix)
    rows = [measure(group) for group in matrices.values()]
    print(f"{'shape':>12} {'count':>5} {'dense_norm':>11} {'matrix_norm':>12} {'faster':>7} {'loose':>8}")
    for row in rows:
        shape = "x".join(map(str, row["shape"]))
        print(
            f"{shape:>12} {row['count']:>5} {row['dense_norm_s']:>9.3f} s {row['matrix_norm_s']:>10.3f} s "
            f"{row['matrix_norm_s'] / row['dense_norm_s']:>6.1f}x {row['loose']:>8.1e}"
        )
    totals = {key: sum(row["count"] * row[key] for row in rows) for key in ("dense_norm_s", "matrix_norm_s")}
    print(f"whole model: {totals['dense_norm_s']:.2f} s against {totals['matrix_norm_s']:.2f} s")
    record = {"model": MODEL, "environment": environment(), "repeats": REPEATS, "matrices": rows, "whole_model": totals}
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


def measure(matrices: list[torch.Tensor]) -> dict[str, Any]:
    """Times the first matrix of a shape, and checks that the bound holds."""
    weight = matrices[0]
    ours, theirs = [], []
    for _ in range(REPEATS):
        ours.append(seconds(lambda: dense_norm(weight)))
        theirs.append(seconds(lambda: torch.linalg.matrix_norm(weight, 2)))
    exact = float(torch.linalg.matrix_norm(weight.double(), 2))
    bound = float(dense_norm(weight))
    assert bound >= exact * (1 - 1e-13)
    return {
        "shape": list(weight.shape),
        "count": len(matrices),
        "dense_norm_s": min(ours),
        "matrix_norm_s": min(theirs),
        "loose": bound / exact - 1,
    }


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
