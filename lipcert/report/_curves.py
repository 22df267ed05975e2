"""The numbers of the figures: exact shares of images as functions of ε, and the range of ε to show."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lipcert.results import Run

Array = NDArray[np.float64]

# Larger than the diameter of every image box: a radius beyond it means that the whole box is certified.
UNBOUNDED = 1e5
# If at least a quarter of the radii are smaller than the large ones by this factor, ε is shown on a logarithmic scale.
WIDE = 100.0
# A logarithmic scale starts at most this factor below the smaller of ε and the large radii, down to a power of ten.
_DECADES = 1e3


def share_above(values: Array, counted: NDArray[np.bool_], eps: Array) -> Array:
    """Share of images that are counted and have a value strictly larger than ε, among all images."""
    above = np.sort(values[counted])
    return (len(above) - np.searchsorted(above, eps, side="right")) / len(values)


def span(runs: Sequence[Run]) -> tuple[float, float, bool]:
    """The range of ε to show, and the kind of scale."""
    radii = np.concatenate([run.radii[run.right] for run in runs])
    radii = radii[(radii > 0) & (radii < UNBOUNDED)]
    targets = [eps for run in runs for eps, _ in run.every_eps]
    end = 1.08 * max([*targets, *radii.tolist()])
    if not len(radii):
        return 0.0, end, False
    low, quarter, high = np.quantile(radii, [0.05, 0.25, 0.95])
    if max(high, *targets) / quarter < WIDE:
        return 0.0, end, False
    # A few tiny radii must not press what happens around ε against the right edge.
    return 10.0 ** math.floor(math.log10(max(low, min(high, *targets) / _DECADES))), end, True
