"""Compares the CertViT engines on synthetic layers, and shows that the solve does not depend on the number of images.

    python -m benchmarks.certvit_solvers [--quick]

Linux only. Layers have the shapes of a small vision transformer. Their inputs have covariance eigenvalues that fall as
j^(-1.5) and a mean; their weights have a few large singular values over a bulk, as trained ones do, but in directions
that know nothing of the data. Results and environment go to benchmarks/results/certvit_solvers.json.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._env import environment
from lipcert.certvit import Moments, Solution, collect, constrain_blockwise, constrain_matrix
from lipcert.certvit._ellipsoid import Ellipsoid, eigenbasis
from lipcert.certvit._measures import soft_threshold

ERROR = 1e-2
TOKENS = 12_800
BATCH = 256
LAYERS = {"qkv": (576, 192), "proj": (192, 192), "fc1": (768, 192), "fc2": (192, 768)}


class Inputs:
    """Rows with a decaying spectrum, made anew from the seed each time they are gone through."""

    def __init__(self, width: int, tokens: int):
        self.tokens = tokens
        generator = torch.Generator().manual_seed(1)
        basis = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
        self.mixing = (torch.arange(1, width + 1) ** -0.75)[:, None] * basis.mT
        self.mean = 0.3 * basis[:, 0]

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(2)
        for start in range(0, self.tokens, BATCH):
            count = min(BATCH, self.tokens - start)
            yield torch.randn(count, len(self.mean), generator=generator) @ self.mixing + self.mean


def layer(outputs: int, width: int) -> nn.Linear:
    """A bias-free layer whose singular values are a random matrix's, times 1 + 3 j^(-0.7)."""
    generator = torch.Generator().manual_seed(3)
    weight = 0.03 * torch.randn(outputs, width, dtype=torch.float64, generator=generator)
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    values = values * (1 + 3 * torch.arange(1, len(values) + 1) ** -0.7)
    module = nn.Linear(width, outputs, bias=False)
    module.weight.data = ((left * values) @ right).float()
    return module


def row(solution: Solution) -> dict[str, Any]:
    """What the table shows of a solution; violation is error reached / error asked − 1, and at least 0."""
    return {
        "norm_ratio": solution.norm_after / solution.norm_before,
        "error_reached": solution.error_reached,
        "violation": max(0.0, solution.error_reached / solution.error_asked - 1),
        "seconds": solution.seconds,
        "iterations": solution.iterations,
        "gap": solution.gap,
        "status": solution.status,
    }


def engines(name: str, tokens: int, epochs: int) -> dict[str, dict[str, Any]]:
    """All engines on one layer."""
    module = layer(*LAYERS[name])
    inputs = Inputs(module.in_features, tokens)
    weight = module.weight.detach()
    moments = collect(module, inputs, {name: module})[name]
    measures = ("spectral", "l1", "nuclear", "clip", "rescale")
    found = {measure: row(constrain_matrix(weight, moments, ERROR, measure)) for measure in measures}
    faithful = constrain_blockwise(weight, list(inputs), ERROR, projection_epochs=epochs)
    found["l1 faithful"] = row(faithful)
    if faithful.error_reached < 1:
        found["spectral at its error"] = row(constrain_matrix(weight, moments, faithful.error_reached))
    return found


def projections(name: str, tokens: int, epochs: int) -> dict[str, dict[str, float]]:
    """One projection of the first point that the faithful engine projects, both ways."""
    module = layer(*LAYERS[name])
    inputs = list(Inputs(module.in_features, tokens))
    pre = module.weight.detach().double()
    second = Moments.from_rows(torch.cat(inputs)).second[0]
    radius = ERROR * math.sqrt(float(((pre @ second) * pre).sum()))
    beta = float(pre.abs().quantile(0.1))
    start = 2 * soft_threshold(pre, beta) - pre

    def reached(point: Tensor) -> float:
        change = point - pre
        return max(0.0, math.sqrt(float(((change @ second) * change).sum())) / radius - 1)

    started = time.perf_counter()
    exact = Ellipsoid(pre, *eigenbasis(second), radius).project(start)
    found = {"exact": {"seconds": time.perf_counter() - started, "violation": reached(exact)}}
    for count in (2, epochs):
        solution = constrain_blockwise(
            pre, inputs, ERROR, beta=beta, iterations=1, projection_epochs=count, projection_tolerance=0
        )
        distance = float((solution.weight - exact).norm() / (start - exact).norm())
        found[f"block-iterative, {count} epochs"] = {
            "seconds": solution.seconds,
            "violation": reached(solution.weight),
            "distance_to_exact": distance,
        }
    return found


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _measured(tokens: int, pipe: Any) -> None:
    """In a process of its own, so that the peak memory is this run's."""
    torch.set_num_threads(1)
    module = layer(*LAYERS["fc2"])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    idle = _peak_mib()
    started = time.perf_counter()
    moments = collect(module, Inputs(module.in_features, tokens), {"fc2": module})["fc2"]
    collected = time.perf_counter() - started
    solution = constrain_matrix(module.weight, moments, ERROR)
    pipe.send(
        {
            "tokens": tokens,
            "collect_seconds": collected,
            "solve_seconds": solution.seconds,
            "extra_peak_mib": _peak_mib() - idle,
        }
    )


def growth(counts: list[int]) -> list[dict[str, float]]:
    """Time and memory above the idle process for growing numbers of tokens."""
    context = multiprocessing.get_context("spawn")
    found = []
    for tokens in counts:
        here, there = context.Pipe()
        process = context.Process(target=_measured, args=(tokens, there))
        process.start()
        found.append(here.recv())
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens, 5 epochs, nothing written")
    quick = parser.parse_args().quick
    tokens, epochs = (TOKENS // 10, 5) if quick else (TOKENS, 100)
    result: dict[str, Any] = {"error": ERROR, "tokens": tokens, "batch": BATCH, "epochs": epochs, "layers": {}}
    for name, shape in LAYERS.items():
        rows = engines(name, tokens, epochs if name == "fc2" else min(epochs, 10))
        result["layers"][name] = {"shape": shape, "engines": rows}
        for engine, facts in rows.items():
            print(
                f"{name:5} {shape[0]:4}×{shape[1]:<4} {engine:21} norm × {facts['norm_ratio']:.4f}  "
                f"violation {facts['violation']:.1e}  {facts['seconds']:8.3f} s  {facts['status']}"
            )
    result["log10_ratio_sum"] = {
        engine: sum(math.log10(found["engines"][engine]["norm_ratio"]) for found in result["layers"].values())
        for engine in result["layers"]["fc2"]["engines"]
        if all(engine in found["engines"] for found in result["layers"].values())
    }
    result["projection_fc2"] = projections("fc2", tokens, epochs)
    result["growth_fc2"] = growth([tokens // 10, tokens, 10 * tokens])
    result["environment"] = environment()
    print(json.dumps({key: result[key] for key in ("log10_ratio_sum", "projection_fc2", "growth_fc2")}, indent=1))
    if not quick:
        target = Path(__file__).parent / "results" / "certvit_solvers.json"
        target.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")


if __name__ == "__main__":
    main()
