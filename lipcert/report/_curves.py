"""Numbers behind the figures: shares of images over ε, exact at every ε, and the range of ε worth showing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lipcert.results import Run

Array = NDArray[np.float64]

# No image is as wide as this: a radius beyond it stands for "all of the box".
UNBOUNDED = 1e5
# From this ratio of large to small radii on, ε is shown on a logarithmic scale.
WIDE = 100.0


def share_above(values: Array, counted: NDArray[np.bool_], eps: Array) -> Array:
    """Share of all images that are counted and whose value is larger than ε, strictly.

    Args:
        values: one number an image, shape (N,).
        counted: which images count, shape (N,); the others stay in the denominator.
        eps: where to evaluate, shape (K,).

    Returns:
        Shares in [0, 1], shape (K,).
    """
    above = np.sort(values[counted])
    return (len(above) - np.searchsorted(above, eps, side="right")) / len(values)


def certified_curve(run: Run, eps: Array) -> Array:
    """Share of images predicted right with a radius larger than ε, shape (K,): at most the truth."""
    return share_above(run.radii, run.right, eps)


def attack_curve(run: Run, eps: Array) -> Array:
    """Share of images predicted right and not broken within ε, shape (K,): at least the truth."""
    return share_above(run.broken_at, run.right, eps)


def steps(values: Array, start: float, end: float) -> Array:
    """Where a curve over ε changes between two ends, the ends included, ascending."""
    inside = np.unique(values[(values > start) & (values < end)])
    return np.concatenate([[start], inside, [end]])


def families(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs about one network smoothed by noise of different σ, on the same images, in groups of two or more."""
    found: dict[object, list[Run]] = {}
    for run in runs:
        if run.smoothed:
            key = (run.weights_hash, str(run.summary.get("data")), frozenset(row["index"] for row in run.rows))
            found.setdefault(key, []).append(run)
    return [group for group in found.values() if len({run.holds_for for run in group}) > 1]


def span(runs: Sequence[Run]) -> tuple[float, float, bool]:
    """The range of ε to show, and whether on a logarithmic scale.

    Returns:
        The smallest ε, 0 on a linear scale; the largest; whether the scale is logarithmic.
    """
    radii = np.concatenate([run.radii[run.right] for run in runs])
    radii = radii[(radii > 0) & (radii < UNBOUNDED)]
    asked = [run.eps for run in runs]
    end = 1.08 * max([*asked, *radii.tolist()])
    if not len(radii):
        return 0.0, end, False
    low, high = np.quantile(radii, [0.05, 0.95])
    if max(high, *asked) / low < WIDE:
        return 0.0, end, False
    return 10.0 ** math.floor(math.log10(low)), end, True
