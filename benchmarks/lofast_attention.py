"""What one dot-product attention layer does to a perturbation: bounds over the largest change that an attack finds.

Run as ``python -m benchmarks.lofast_attention``; writes ``benchmarks/results/lofast_attention.json``. The layers have
orthogonal weights (so every norm is 1), the inputs tokens of a given norm, as after a projection onto a ball. Each
ratio is the largest over ``INPUTS`` inputs of bound / attack, so 1 would be exact. ``naive`` and ``ball`` are the
baselines of ``lipcert.certifier._lofast``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._env import environment
from lipcert.certifier._lofast import AttentionLayer, attention_sensitivity, ball_change, naive_change

INPUTS, TOKENS, DIM, HEADS = 4, 16, 64, 4
STEPS, RESTARTS = 150, 1
RADII = (0.01, 0.05, 0.1, 0.5, 1.0)
TOKEN_NORMS = (0.5, 1.0, 2.0, 4.0)
RESULT = Path(__file__).parent / "results" / "lofast_attention.json"


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.linalg.qr(torch.randn(DIM, DIM, generator=generator).double())[0] for _ in range(4)]
    wq, wk, wv, wo = weights
    layer = AttentionLayer(wq, wk, wv, wo, heads=HEADS)
    directions = torch.randn(INPUTS, TOKENS, DIM, generator=generator).double()
    directions = directions / directions.norm(dim=-1, keepdim=True)
    rows = []
    print(f"{'token norm':>10} {'eps':>6} {'lofast':>8} {'naive':>8} {'ball':>8}")
    for norm in TOKEN_NORMS:
        for eps in RADII:
            row = measure(layer, norm * directions, eps, generator)
            rows.append({"token_norm": norm, "eps": eps, **row})
            print(f"{norm:>10} {eps:>6} {row['lofast']:>8.4f} {row['naive']:>8.3f} {row['ball']:>8.3f}")
    record = {
        "environment": environment(),
        "layer": {"tokens": TOKENS, "dim": DIM, "heads": HEADS, "weights": "orthogonal", "biases": False},
        "inputs": INPUTS,
        "attack": {"steps": STEPS, "restarts": RESTARTS},
        "ratios": rows,
    }
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


def measure(layer: AttentionLayer, x: Tensor, eps: float, generator: torch.Generator) -> dict[str, float]:
    """The ratios for one ε, and the seconds that the bound took for one input."""
    reached = attack(layer, x, eps, generator)
    start = time.perf_counter()
    ours = attention_sensitivity(x, layer, eps).change
    seconds = (time.perf_counter() - start) / len(x)
    bounds = {"lofast": ours, "naive": naive_change(x, layer, eps), "ball": ball_change(x, layer, eps)}
    ratios = {name: (bound / reached).max().item() for name, bound in bounds.items()}
    assert all(bool((bound >= reached).all()) for bound in bounds.values())
    return {**ratios, "seconds": seconds}


def attack(layer: AttentionLayer, x: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """The largest ‖Attn(X + Δ) − Attn(X)‖_F that projected gradient ascent finds on ‖Δ‖_F = ε, shape (N,)."""
    base, best = layer(x), torch.zeros(len(x), dtype=torch.float64)
    for _ in range(RESTARTS):
        delta = on_sphere(torch.randn(x.shape, generator=generator).double(), eps)
        for _ in range(STEPS):
            delta = delta.detach().requires_grad_()
            change = (layer(x + delta) - base).flatten(1).norm(dim=1)
            best = torch.maximum(best, change.detach())
            (gradient,) = torch.autograd.grad(change.sum(), delta)
            delta = on_sphere(gradient, eps)
    return best


def on_sphere(direction: Tensor, eps: float) -> Tensor:
    return eps * direction / direction.flatten(1).norm(dim=1)[:, None, None]


if __name__ == "__main__":
    main()
