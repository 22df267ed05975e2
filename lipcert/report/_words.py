"""Texts of reports: radii rounded down, and explanations of the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_FLOOR, Context, Decimal

from lipcert.report._curves import UNBOUNDED
from lipcert.results import Run

_RADIUS = (
    "A certified radius r says: every image in [0, 1] whose ℓ2 distance to the given one is smaller than r gets the "
    "same prediction. Distances are measured on pixels, before normalisation."
)
_NETWORK = (
    "It holds for a forward pass in the dtype named here, rounding included; real means real arithmetic, and then "
    "rounding in a deployment is not covered.",
    "deterministic: it holds with certainty. probabilistic, δ: lipcert's own random start vectors make it fail with "
    "probability at most δ per image.",
)
_SMOOTHED = (
    "smoothed(σ): what is certified is another function than the network, the smoothed classifier. It answers with the "
    "class that the network gives most often when Gaussian noise of standard deviation σ is added to the pixels. "
    "Nothing is certified about the network without noise.",
    "To use the smoothed classifier is to draw many noisy images for each answer, and to abstain where none of the "
    "classes wins clearly. The network is sampled in the dtype named here, or else in that of its weights.",
    "probabilistic, δ, of a smoothed classifier: over the draws of the noise a radius is too large with probability at "
    "most δ per image. The draws are pseudo-random and rounded; that this changes nothing is assumed, not proved.",
)
_COMMON = (
    "Shares are exact for these images. Intervals (Wilson, 95 %) say what other images of the same kind may give.",
    "It does not say that the prediction is right, nor anything about changes that are not small in ℓ2.",
    "Figures from an attack are estimates from above: an image that an attack did not break may still be fragile.",
)


def promises(runs: Sequence[Run]) -> list[str]:
    """What the results of the runs guarantee and what they do not, one paragraph each."""
    kinds = {run.smoothed for run in runs}
    found = [_RADIUS, *(_NETWORK if False in kinds else ()), *(_SMOOTHED if True in kinds else ())]
    if len(kinds) > 1:
        found.append(
            "Certificates of a network and of a smoothed classifier are about two functions: never add them up."
        )
    return [*found, *_COMMON]


def right(run: Run) -> str:
    """The name of the accuracy of a run."""
    return "most drawn class is right" if run.smoothed else "clean accuracy"


def about(run: Run) -> str:
    """The function that the certificates are about."""
    dtype = str(run.summary.get("dtype", "unknown"))
    if run.smoothed:
        network = "the network" if dtype == "real" else f"the network in {dtype}"
        return f"{run.holds_for}: {network} under noise, not the network itself"
    return "the network in real arithmetic" if dtype == "real" else f"the network in {dtype}"


def radius(value: float) -> str:
    """A radius with three digits, rounded down."""
    if value >= UNBOUNDED:
        return "unbounded"
    if value == 0:
        return "0"
    cut = Context(prec=3, rounding=ROUND_FLOOR).create_decimal(Decimal(value))
    return f"{cut:f}" if 1e-3 <= value < 1e4 else f"{cut:.2e}"


def share(part: int, whole: int) -> str:
    """A count with its percentage and 95 % confidence interval: ``7 of 40 (17.5 %, 95 %: 8.7–32.0 %)``."""
    low, high = wilson(part, whole)
    return f"{part} of {whole} ({100 * part / whole:.1f} %, 95 %: {100 * low:.1f}–{100 * high:.1f} %)"


def wilson(part: int, whole: int) -> tuple[float, float]:
    """Wilson's 95 % score interval (Wilson 1927) for a proportion estimated by ``part`` of ``whole``.

    Its centre is (p + z²/2n) / (1 + z²/n) and its half-width z √(p(1−p)/n + z²/4n²) / (1 + z²/n), for p = part/whole,
    n = whole and z = 1.96. It contains the proportions that a test with the normal approximation does not reject.
    """
    p, z = part / whole, 1.959963984540054
    centre, scale = p + z * z / (2 * whole), 1 + z * z / whole
    width = z * math.sqrt(p * (1 - p) / whole + z * z / (4 * whole**2))
    return max(0.0, min(p, (centre - width) / scale)), min(1.0, max(p, (centre + width) / scale))


def known(run: Run) -> str:
    """The name of the lower curve of a run."""
    what = "certified accuracy" if run.labelled else "certified share (no labels)"
    return f"{what}, {run.holds_for}" if run.smoothed else what


def above(run: Run) -> str:
    """The name of the upper curve of a run."""
    return "not broken by the attack" if run.attacked else right(run) if run.labelled else "all images"


def listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, or ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
