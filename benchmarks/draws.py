"""Noise draws an image: lipcert's test of a share against that of the code published with randomized smoothing.

    python -m benchmarks.draws [--images 500] [--samples 1000] [--seed 0]

Simulated images, without a network: the share of the leading class is drawn from a beta distribution that resembles
the shares of a denoised network, and the rest is split among nine classes, most of it to one. Each row has the mean
number of draws of an image, those that select the class included, the share that is certified at ε, the mean radius of
all images, 0 where none is certified, and the seconds of processor time that the test itself takes for an image.

- ``lipcert``: stops at the verdict for ε; ``no futility`` goes on where a certificate is improbable.
- ``lipcert --all-samples``: all draws, and the bound of Clopper and Pearson.
- ``published``: Cohen, Rosenfeld and Kolter, ICML 2019, as their ``certify.py`` does it: n₀ = 100 draws select a class,
  n more are counted, and the bound is that of Clopper and Pearson.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lipcert.settings import parse_eps
from lipcert.smoothing._votes import Plan, Votes

RUNS = (("36/255", 0.18), ("0.5", 0.36))
CLASSES, ALPHA = 10, 1e-3
# Of the share of the leading class; and what part of the rest the second class has.
SHAPE, SECOND = (1.2, 0.35), 0.6
PUBLISHED = (1_000, 10_000)


def shares_of(images: int, random: np.random.Generator) -> NDArray[np.float64]:
    """The probabilities of the classes of simulated images, shape (images, classes); class 0 is the right one."""
    first = random.beta(*SHAPE, size=images)
    rest = np.full(CLASSES - 1, (1 - SECOND) / (CLASSES - 2))
    rest[0] = SECOND
    return np.concatenate([first[:, None], (1 - first)[:, None] * rest], 1)


def simulated(plan: Plan, shares: NDArray[np.float64], random: np.random.Generator) -> Votes:
    """The votes of one image whose classes have these probabilities."""
    votes = Votes(plan, len(shares))
    ends = shares.cumsum()
    while votes.requested:
        drawn = np.searchsorted(ends, random.random(len(votes.requested)), side="right")
        votes.take(drawn.clip(max=len(shares) - 1))
    return votes


def measured(plan: Plan, shares: NDArray[np.float64], seed: int) -> dict[str, Any]:
    """The means over simulated images."""
    random, started = np.random.default_rng(seed), time.process_time()
    draws = certified = radii = 0.0
    for one in shares:
        votes = simulated(plan, one, random)
        radius = plan.radius(votes.count, votes.samples)
        draws += votes.selected + votes.samples
        right = votes.chosen == 0
        certified += right and radius > plan.eps
        radii += radius if right else 0.0
    seconds = time.process_time() - started
    totals = {"draws": draws, "certified": certified, "radius": radii, "seconds": seconds}
    return {name: total / len(shares) for name, total in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--samples", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shares = shares_of(args.images, np.random.default_rng(args.seed))
    print("| ε | σ | test | draws an image | certified | mean radius | s an image |")
    print("| --- " * 7 + "|")
    for eps, sigma in RUNS:
        ours = Plan(parse_eps(eps), sigma, args.samples, ALPHA, all_samples=False, futility=0.05)
        plans = {
            "lipcert": ours,
            "lipcert, no futility": replace(ours, futility=0.0),
            "lipcert --all-samples": replace(ours, all_samples=True),
            **{f"published, n = {n:,}": replace(ours, samples=n, all_samples=True) for n in PUBLISHED},
        }
        for name, plan in plans.items():
            found = measured(plan, shares, args.seed)
            print(
                f"| {eps} | {sigma} | {name} | {found['draws']:,.1f} | {100 * found['certified']:.1f} % | "
                f"{found['radius']:.3f} | {found['seconds']:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
