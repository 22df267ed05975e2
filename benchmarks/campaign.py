"""Attacks on our own certificates: random networks, all methods and dtypes, every radius attacked in several ways.

    python -m benchmarks.campaign --radii 100000 --rows campaign.jsonl

writes a line a network to the rows, goes on after those that are there, and sums up in benchmarks/results. A trial is
one radius above 0: a network, an image, a method and a dtype. A violation is an image of [0, 1] nearer than the radius
that the network, in real arithmetic or in that dtype, predicts as another class.

Within each radius: one step towards every rival, the top singular vectors of the Jacobian, random directions, and
projected gradient ascent with restarts; for affine and small ReLU networks the exact nearest change, by enumeration.
In a type of its own, the ascent follows the network's gradients in that type as well as in float64.
Beyond: the way to the nearest image of another class, the same ascent at growing radii and again at shrinking ones, and
bisection. These say how far the radius is from the truth; only where a network predicts one class do they find nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._env import environment
from benchmarks._exact import affine_distances, nearest_change
from benchmarks._networks import SLOW, Case, draw
from lipcert.attacks._found import lead, project
from lipcert.certifier import METHODS, Certifier
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.model import Model
from lipcert.roundoff import DTYPES

REAL = "real"
_CHEAP = ("global", "gloro")
_STRONG = ("local", "lofast", "anchored", "staged")
# Networks of timm take longer, and have fewer images.
_SHARE_OF_TIMM = 16
_DIRECTIONS = 3
_STEPS = 12
_BEYOND = (1.02, 1.2, 1.6, 2.5, 5.0, 20.0)
# Distances are float64 norms: this is more than their rounding.
_ROUND_UP = 1 + 1e-12
# Evaluated in float64, a lead up to so much of the largest logit may be rounding.
_NOISE = 1e-12
_EXACT_IMAGES = 12
# Threads of torch, by turns: sums are taken in another order.
_THREADS = (1, 2, 4)
_REFINEMENTS = 4

Key = tuple[str, str]


def certify(case: Case, classes: Tensor) -> dict[Key, Tensor]:
    """Radii by method and dtype, shape (N,); 0 where a method certifies nothing.

    In real arithmetic by all methods; in float32 and in float16 or bfloat16 by global, gloro and two of the others. A
    method without a rule for an operation of the network is left out.

    Args:
        case: the network and its images.
        classes: what the network predicts, shape (N,). Radii of other predictions, of rounded weights, are left out.
    """
    eps = (1e-3, 0.03, 0.3)[case.seed % 3]
    small = ("float16", "bfloat16")[case.seed % 2]
    keys = [(method, REAL) for method in METHODS]
    for number, dtype in enumerate(("float32", small)):
        turn = case.seed + 2 * number
        keys += [(method, dtype) for method in (*_CHEAP, _STRONG[turn % 4], _STRONG[(turn + 1) % 4])]
    found = {}
    for method, dtype in keys:
        with contextlib.suppress(UnsupportedOperation, InputError):
            certificates = Certifier(case.model, eps, method, dtype=dtype).run(case.images)
            found[method, dtype] = torch.where(certificates.predicted == classes, certificates.radius.double(), 0.0)
    return found


class Judge:
    """Says how far another class leads, in real arithmetic or as the network is deployed.

    Args:
        model: in float64.
        dtype: ``real`` or one of ``DTYPES``.
    """

    def __init__(self, model: Model, dtype: str):
        self.dtype = DTYPES.get(dtype, torch.float64)
        self.exact = dtype == REAL
        self.model = model if self.exact else copy.deepcopy(model).to(self.dtype)

    def logits(self, images: Tensor) -> Tensor:
        """What the network gives as it is deployed, in float64 and for gradients of images in float64."""
        return self.model(images.to(self.dtype)).double()

    @torch.no_grad()
    def broken(self, images: Tensor, classes: Tensor) -> Tensor:
        """Whether images are predicted as another class beyond doubt, shape (P,); deployed, a tie is enough."""
        logits = self.logits(images)
        ahead = lead(logits, classes)
        return ahead > _NOISE * logits.abs().amax(1) if self.exact else ~(ahead < 0)


def attack(
    model: Callable[[Tensor], Tensor], images: Tensor, classes: Tensor, radius: Tensor, seed: int = 0
) -> Iterator[Tensor]:
    """Perturbed images within ``radius``, by one attack after the other.

    Args:
        model: takes images in float64.
        images: shape (P, C, H, W).
        classes: what they are predicted as, shape (P,).
        radius: shape (P,).
        seed: of the random directions.

    Yields:
        Perturbed images in [0, 1], shape (P, C, H, W).
    """
    generator = torch.Generator().manual_seed(seed)
    inside = radius * (1 - 2e-12)
    slopes = _jacobians(model, images)

    def go(direction: Tensor) -> Tensor:
        flat = direction.flatten(1)
        unit = flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-300)
        return (images + project((inside[:, None] * unit).reshape(images.shape), images, inside)).clamp(0, 1)

    own = slopes.gather(1, classes[:, None, None].expand(-1, 1, slopes.shape[2]))
    for rival in range(slopes.shape[1]):
        yield go(slopes[:, rival] - own[:, 0])
    top = torch.linalg.svd(slopes.nan_to_num(), full_matrices=False).Vh
    for number in range(min(2, top.shape[1])):
        yield go(top[:, number])
        yield go(-top[:, number])
    for _ in range(_DIRECTIONS):
        yield go(torch.randn(images.shape, generator=generator, dtype=torch.float64))
    for start in (torch.zeros_like(images), torch.randn(images.shape, generator=generator, dtype=torch.float64)):
        yield from _ascend(model, images, classes, inside, start)


def _ascend(
    model: Callable[[Tensor], Tensor], images: Tensor, classes: Tensor, radius: Tensor, start: Tensor
) -> Iterator[Tensor]:
    """Projected gradient ascent on the lead of another class."""
    size = radius[:, None, None, None]
    delta = project(size * start / start.flatten(1).norm(dim=1).clamp_min(1e-300)[:, None, None, None], images, radius)
    for step in range(_STEPS):
        point = (images + delta).clamp(0, 1).requires_grad_()
        (slope,) = torch.autograd.grad(lead(model(point), classes).sum(), point)
        length = slope.flatten(1).norm(dim=1)[:, None, None, None]
        unit = torch.where(length > 0, slope / length.clamp_min(1e-300), 0.0)
        delta = project(delta + 2 * (1 - step / _STEPS) * size * unit, images, radius)
        yield (images + delta).clamp(0, 1)


def _jacobians(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Gradients of all logits, shape (P, classes, pixels)."""
    point = images.clone().requires_grad_()
    logits = model(point)
    columns = range(logits.shape[1])
    slopes = [torch.autograd.grad(logits[:, j].sum(), point, retain_graph=True)[0] for j in columns]
    return torch.stack([slope.flatten(1) for slope in slopes], 1)


def closest(model: Model, images: Tensor, classes: Tensor, radius: Tensor) -> Tensor:
    """The nearest images of another class that could be found, shape (N, C, H, W); NaN where there are none.

    Args:
        model: in float64.
        images: shape (N, C, H, W).
        classes: what they are predicted as, shape (N,).
        radius: where to begin, shape (N,).
    """
    judge = Judge(model, REAL)
    best, target = _another(images, classes)
    best, target = _nearer(judge, images, classes, best, target)

    def ascend(size: Tensor, wanted: Tensor) -> None:
        for point in _ascend(model, images[wanted], classes[wanted], size[wanted], torch.zeros_like(images[wanted])):
            distance = _apart(point, images[wanted])
            hit = judge.broken(point, classes[wanted]) & (distance < best[wanted])
            best[wanted[hit]], target[wanted[hit]] = distance[hit], point[hit]

    done = torch.zeros_like(classes, dtype=torch.bool)
    for factor in _BEYOND:
        wanted = (~done & (factor * radius < best)).nonzero()[:, 0]
        before = best.clone()
        if len(wanted):
            ascend(factor * radius, wanted)
        done |= best < before
    for _ in range(_REFINEMENTS):
        best, target = _nearer(judge, images, classes, best, target)
        wanted = torch.isfinite(best).nonzero()[:, 0]
        if len(wanted):
            ascend(0.9 * best, wanted)
    return _nearer(judge, images, classes, best, target)[1]


def _another(images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Distance and pixels of the nearest image that is predicted as another class; ∞ and NaN where there is none."""
    apart = torch.cdist(images.flatten(1), images.flatten(1)) * _ROUND_UP
    best, which = torch.where(classes[:, None] == classes, math.inf, apart).min(1)
    return best, torch.where(torch.isfinite(best)[:, None, None, None], images[which], math.nan)


def _nearer(judge: Judge, images: Tensor, classes: Tensor, best: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Bisects the ways from images to targets of another class; smaller distances, and where they were found."""
    way = target - images
    low, high = torch.zeros_like(best), torch.ones_like(best)
    for _ in range(25):
        middle = (low + high) / 2
        point = images + middle[:, None, None, None] * way
        distance = _apart(point, images)
        hit = judge.broken(point, classes) & (distance < best)
        best = torch.where(hit, distance, best)
        low, high = torch.where(hit, low, middle), torch.where(hit, middle, high)
        target = torch.where(hit[:, None, None, None], point, target)
    return best, target


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Distances, rounded up, shape (N,)."""
    return (one - other).flatten(1).norm(dim=1) * _ROUND_UP


def examine(seed: int, count: int, family: str | None = None) -> dict[str, Any]:
    """Draws a network, certifies its images and attacks every radius.

    Returns:
        ``seed``, ``images``, ``family``, ``spoilt``, ``threads``, ``ratios`` (attack distance / radius of every trial
        by "method dtype"; None where no attack succeeded at any distance), ``exact`` (the same for exact distances)
        and ``violations``.
    """
    case = draw(seed, count, family)
    if case.family in SLOW:
        case = replace(case, images=case.images[::_SHARE_OF_TIMM])
    case.model.requires_grad_(False)
    with torch.no_grad():
        classes = case.model(case.images).argmax(1)
    found = certify(case, classes)
    known = {"seed": seed, "images": len(case.images), "family": case.family, "spoilt": case.spoilt}
    known["threads"] = torch.get_num_threads()
    row: dict[str, Any] = {**known, "ratios": {}, "exact": {}}
    violations = []
    exact = _exact(case)
    diameter = math.sqrt(case.images[0].numel())
    real = [found[key] for key in found if key[1] == REAL] or [torch.zeros_like(exact)]  # all methods may refuse
    largest = torch.stack(real).amax(0).clamp(1e-12, diameter)
    target = closest(case.model, case.images, classes, largest)
    beyond = (case.images + 1.01 * (target - case.images)).clamp(0, 1)
    nowhere = torch.full_like(largest, math.inf)
    for dtype in (REAL, *DTYPES):
        keys = [key for key in found if key[1] == dtype]
        if not keys:
            continue
        judge = Judge(case.model, dtype)
        radius = torch.cat([found[key] for key in keys])
        where = torch.arange(len(case.images)).repeat(len(keys))
        distance = _attacked(case, classes, radius.clamp_max(diameter), where, judge, seed)
        best = distance.reshape(len(keys), -1).amin(0)
        for end in (target, beyond):
            best = torch.minimum(best, _nearer(judge, case.images, classes, nowhere, end)[0])
        for key in keys:
            trial = found[key] > 0
            name = " ".join(key)
            row["ratios"][name] = _ratios(best, found[key], trial)
            if dtype == REAL:
                row["exact"][name] = [x for x in _ratios(exact, found[key], trial & torch.isfinite(exact)) if x]
            wrong = trial & ((best < found[key]) | ((exact * (1 + 1e-7) + 1e-10 < found[key]) & (dtype == REAL)))
            violations += [
                {"image": i, "key": name, "radius": found[key][i].item(), "distance": min(best[i], exact[i]).item()}
                for i in wrong.nonzero()[:, 0].tolist()
            ]
    return {**row, "violations": violations}


def _attacked(case: Case, classes: Tensor, radius: Tensor, where: Tensor, judge: Judge, seed: int) -> Tensor:
    """Distances of what attacks within the radii find, shape (P,)."""
    best = torch.full_like(radius, math.inf)
    open_ = (radius > 0).nonzero()[:, 0]
    images, own = case.images[where[open_]], classes[where[open_]]
    if len(open_):
        ways = attack(case.model, images, own, radius[open_], seed)
        if judge.dtype == torch.float32:
            ways = itertools.chain(ways, attack(judge.logits, images, own, radius[open_], seed + 1))
        for point in ways:
            distance = torch.where(judge.broken(point, own), _apart(point, images), math.inf)
            best[open_] = torch.minimum(best[open_], distance)
    return best


def _exact(case: Case) -> Tensor:
    """Exact distances to the nearest change where they are known, shape (N,); ∞ elsewhere."""
    distance = torch.full((len(case.images),), math.inf, dtype=torch.float64)
    if case.family == "linear":
        return affine_distances(case.model, case.images)
    if case.family == "relu":
        for i in torch.linspace(0, len(distance) - 1, _EXACT_IMAGES).long().tolist():
            distance[i] = nearest_change(case.model, case.images[i])[0]
    return distance


def _ratios(distance: Tensor, radius: Tensor, trial: Tensor) -> list[float | None]:
    ratio = (distance / radius)[trial].tolist()
    return [float(f"{x:.5g}") if math.isfinite(x) else None for x in ratio]


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of all rows, and how close attacks came, by method and dtype."""
    return {
        "networks": len(rows),
        "trials": sum(len(ratios) for row in rows for ratios in row["ratios"].values()),
        "violations": [{"seed": row["seed"], **violation} for row in rows for violation in row["violations"]],
        "by_method": _closeness(rows, "ratios"),
        "by_method_exact": _closeness(rows, "exact"),
        "networks_by_family": _counts(rows, "family"),
        "networks_by_what_was_spoilt": _counts(rows, "spoilt"),
        "networks_by_threads": _counts(rows, "threads"),
    }


def _closeness(rows: Sequence[Mapping[str, Any]], which: str) -> dict[str, Any]:
    names = sorted({name for row in rows for name, ratios in row[which].items() if ratios})
    table = {}
    for name in names:
        ratios = [x for row in rows for x in row[which].get(name, ())]
        reached = [x for x in ratios if x is not None]
        table[name] = {
            "trials": len(ratios),
            "reached": len(reached),
            "closest": min(reached, default=None),
            "median": statistics.median(reached) if reached else None,
        }
    return table


def _counts(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, int]:
    names = [str(row[key]) for row in rows]
    return {name: names.count(name) for name in sorted(set(names))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--radii", type=int, default=100_000, help="go on until so many radii are attacked")
    parser.add_argument("--images", type=int, default=160, help="images per network")
    parser.add_argument("--seconds", type=float, default=math.inf, help="CPU seconds of this chunk")
    parser.add_argument("--rows", type=Path, default=Path("campaign.jsonl"))
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows.exists() else []
    trials = sum(len(ratios) for row in rows for ratios in row["ratios"].values())
    seeds = (seed for seed in itertools.count() if seed not in {row["seed"] for row in rows})
    with args.rows.open("a") as file:
        while trials < args.radii and time.process_time() < args.seconds:
            started = time.process_time()
            seed = next(seeds)
            torch.set_num_threads(_THREADS[seed % len(_THREADS)])
            row = examine(seed, args.images)
            row["seconds"] = time.process_time() - started
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            trials += sum(map(len, row["ratios"].values()))
            wrong = f"VIOLATIONS {row['violations']}" if row["violations"] else ""
            print(
                f"{row['seed']} {row['family']}, {row['spoilt']}: {trials} {row['seconds']:.1f} s {wrong}", flush=True
            )
    summary = {**summarise(rows), "seconds": sum(row["seconds"] for row in rows), "environment": environment()}
    path = Path(__file__).parent / "results" / "campaign.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{summary['trials']} trials, {len(summary['violations'])} violations")
    for name, line in summary["by_method"].items():
        print(f"{name:20} {line}")


if __name__ == "__main__":
    main()
