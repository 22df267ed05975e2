"""Our radii beside the verdicts of auto_LiRPA (pip install auto_LiRPA), on small networks.

    python -m benchmarks.lirpa_verdicts

For every image: the largest radius that a method of lipcert certifies; the largest at which auto_LiRPA's backward
bounds in ℓ2 verify the prediction, by bisection, as they are (CROWN) and with optimised slopes (α-CROWN); and how far
the nearest change is: the exact distance for ReLU networks (:mod:`benchmarks._exact`), else the nearest that an attack
found. No radius may exceed it. auto_LiRPA does not know the box of the pixels, so its distance may be larger, never
ours.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lipcert
from benchmarks._env import environment
from benchmarks._exact import nearest_change
from benchmarks.campaign import closest
from lipcert.certifier import Certifier

_METHODS = ("gloro", "local", "anchored")
_THEIRS = {"CROWN": "backward", "α-CROWN": "CROWN-Optimized"}
_IMAGES = 4
_NETWORKS = 8
_STEPS = 12
# auto_LiRPA computes in float32 and does not count its rounding.
_ROUNDING = 1e-4


def network(kind: str, seed: int) -> lipcert.Model:
    """A small network with random weights, in float64."""
    torch.manual_seed(seed)
    size = (1, 2, 3) if kind == "relu" else (1, 4, 4)
    pixels = math.prod(size)
    if kind == "conv":
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * pixels, 3)]
    else:
        activation = nn.ReLU if kind == "relu" else nn.GELU
        layers = [nn.Flatten(), nn.Linear(pixels, 6), activation(), nn.Linear(6, 3)]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=1.5 / math.sqrt(layer.in_features))
    return lipcert.load(nn.Sequential(*layers), mean=(0.4,), std=(0.3,), input_size=size).double().requires_grad_(False)


def verified_radius(model: lipcert.Model, image: Tensor, most: float, method: str) -> float:
    """The largest radius up to ``most`` at which auto_LiRPA's lower bounds on all margins are positive."""
    from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm
    from auto_LiRPA.operators.gelu import GELU

    std, mean = float(model.std.flatten()[0]), float(model.mean.flatten()[0])
    layers: Any = model.net.float()
    net = nn.Sequential(*(GELU() if isinstance(layer, nn.GELU) else layer for layer in layers))
    scaled = ((image - mean) / std).float()[None]
    try:
        bounded = BoundedModule(net, scaled, bound_opts={"conv_mode": "matrix"}, device="cpu")
        with torch.no_grad():
            predicted = int(net(scaled).argmax())
            rivals = [j for j in range(net(scaled).shape[1]) if j != predicted]
        rows = torch.zeros(1, len(rivals), len(rivals) + 1)
        rows[0, :, predicted] = 1
        rows[0, range(len(rivals)), rivals] = -1

        def holds(radius: float) -> bool:
            ball = BoundedTensor(scaled, PerturbationLpNorm(norm=2, eps=radius / std))
            lower = bounded.compute_bounds(x=(ball,), C=rows, method=method, bound_upper=False)[0]
            return bool((lower > 0).all())

        low, high = 0.0, most
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low
    finally:
        model.double()


def compare(kind: str, seed: int) -> list[dict[str, Any]]:
    """Ours, theirs and the truth for the images of one network."""
    model = network(kind, seed)
    images = torch.rand(_IMAGES, *model.input_size, dtype=torch.float64)
    radius = torch.stack([Certifier(model, 0.05, method).run(images).radius for method in _METHODS]).amax(0)
    classes = model(images).argmax(1)
    if kind == "relu":
        distance = [nearest_change(model, image)[0] for image in images]
    else:
        found = closest(model, images, classes, radius)
        distance = (found - images).flatten(1).norm(dim=1).nan_to_num(nan=math.inf).tolist()
    rows = []
    for image, own, far in zip(images, radius.tolist(), distance, strict=True):
        most = 2 * far if math.isfinite(far) else 4 * own
        theirs = {name: verified_radius(model, image, most, method) for name, method in _THEIRS.items()}
        rows.append({"kind": kind, "seed": seed, "lipcert": own, **theirs, "far": far})
    return rows


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Contradictions, and how much of the distance each certifies, by kind of network."""
    table = {}
    for kind in sorted({row["kind"] for row in rows}):
        known = [row for row in rows if row["kind"] == kind and math.isfinite(row["far"])]
        shares = {who: sorted(row[who] / row["far"] for row in known) for who in ("lipcert", *_THEIRS)}
        table[kind] = {"images": len(known), **{who: round(x[len(x) // 2], 4) for who, x in shares.items() if x}}
    inside = [row for row in rows if row["lipcert"] > row["far"] * (1 + 1e-7)]
    contradicted = [row for row in rows if any(row[who] > row["far"] * (1 + _ROUNDING) for who in _THEIRS)]
    return {
        "images": len(rows),
        "ours_beyond_a_change": inside,
        "theirs_beyond_a_change": contradicted,
        "median_share_of_the_distance": table,
    }


def main() -> None:
    try:
        from auto_LiRPA import __version__ as theirs
    except ImportError:
        sys.exit("this comparison needs auto_LiRPA: pip install auto_LiRPA")
    torch.set_num_threads(1)
    rows = [row for kind in ("relu", "gelu", "conv") for seed in range(_NETWORKS) for row in compare(kind, seed)]
    summary = {**summarise(rows), "auto_LiRPA": theirs, "environment": environment()}
    path = Path(__file__).parent / "results" / "lirpa_verdicts.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
