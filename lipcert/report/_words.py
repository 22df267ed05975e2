"""How reports say things: radii rounded down, and what each number is."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_FLOOR, Context, Decimal

from lipcert.report._curves import UNBOUNDED
from lipcert.results import Run

PROMISES = (
    "A certified radius r says: every image in [0, 1] whose ℓ2 distance to the given one is smaller than r gets the "
    "same prediction. Distances are measured on pixels, before normalisation.",
    "It holds for a forward pass in the dtype named here, rounding included; real means real arithmetic, and then "
    "rounding in a deployment is not covered.",
    "deterministic: it holds with certainty. probabilistic, δ: lipcert's own random start vectors make it fail with "
    "probability at most δ an image.",
    "It does not say that the prediction is right, nor anything about changes that are not small in ℓ2.",
    "Figures from an attack are estimates from above: an image that an attack did not break may still be fragile.",
)


def radius(value: float) -> str:
    """A radius in three digits, rounded down."""
    if value >= UNBOUNDED:
        return "unbounded"
    if value == 0:
        return "0"
    cut = Context(prec=3, rounding=ROUND_FLOOR).create_decimal(Decimal(value))
    return f"{cut:f}" if 1e-3 <= value < 1e4 else f"{cut:.2e}"


def share(part: int, whole: int) -> str:
    """A count with its percentage."""
    return f"{part} of {whole} ({100 * part / whole:.1f} %)"


def known(run: Run) -> str:
    """What the lower curve of a run shows."""
    return "certified accuracy" if run.labelled else "certified share (no labels)"


def above(run: Run) -> str:
    """What the upper curve of a run shows."""
    return "not broken by the attack" if run.attacked else "clean accuracy" if run.labelled else "all images"


def listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, or ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
