"""The methods of ``certify``, described for help, result files and coverage, without torch.

To add a method, add an entry here and the class that computes it, a :class:`lipcert.certifier.Method`; or register both
by :func:`lipcert.certifier.certificate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# For type checkers: the methods below, and staged.
MethodName = Literal["staged", "global", "gloro", "local", "lofast", "anchored", "lofast-paper", "smoothing"]


@dataclass(frozen=True)
class MethodFacts:
    """Properties of a method that do not depend on a network."""

    name: str
    about: str  # what it bounds, for help texts and the documentation
    smoothed: bool = False  # whether it certifies the smoothed classifier in place of the network itself
    published: bool = False  # whether it is kept as published, for comparison, for the networks of its paper alone
    deterministic: bool = False  # whether it draws no random start vectors
    linearised: bool = False  # whether it linearises the network at the image, and so needs remainder rules
    staged: bool = True  # whether staged certification uses it


# From the cheapest to the strongest. Staged certification omits lofast, because anchored includes it.
FACTS = {
    facts.name: facts
    for facts in (
        MethodFacts("global", "one Lipschitz constant", deterministic=True),
        MethodFacts("gloro", "a Lipschitz constant for each pair of classes (Leino et al. 2021)", deterministic=True),
        MethodFacts("local", "Lipschitz constants on the ball around the image (Huang et al. 2021)"),
        MethodFacts("lofast", "local Jacobian norms by layer (Havens et al. 2024)", linearised=True, staged=False),
        MethodFacts(
            "lofast-paper",
            "Theorem 1 of that paper as published, for ViTs with projections",
            published=True,
            deterministic=True,
            staged=False,
        ),
        MethodFacts("anchored", "one linearisation of the whole network, with bounded remainders", linearised=True),
        MethodFacts("smoothing", "the smoothed classifier, sampled (Cohen et al. 2019)", smoothed=True, staged=False),
    )
}
# Decimal logarithms of K/‖∇m‖, the global bound over a slope that the network has, beyond which no method has
# certified an ε of use, and these ε.
LOOSE = 12.0
_UNREACHED = ((20.0, 1e-3), (LOOSE, 0.1))
STAGED, SMOOTHING = "staged", "smoothing"
# Names of methods: all, those of bounds on the network, these without staged, and of some kinds. They grow in place.
NAMES: list[str] = []
METHODS: list[str] = []
SINGLE: list[str] = []
LINEARISED: list[str] = []
DETERMINISTIC: list[str] = []


def add_method(*added: MethodFacts) -> None:
    """Makes methods known to settings, commands and rows; one with the name of another replaces it."""
    FACTS.update({facts.name: facts for facts in added})
    published = [name for name, facts in FACTS.items() if facts.published]
    SINGLE[:] = [name for name, facts in FACTS.items() if not facts.smoothed and not facts.published]
    METHODS[:] = [STAGED, *SINGLE]
    NAMES[:] = [*METHODS, *published, SMOOTHING]
    LINEARISED[:] = [name for name, facts in FACTS.items() if facts.linearised]
    DETERMINISTIC[:] = [name for name, facts in FACTS.items() if facts.deterministic]


add_method()


def unreached(looseness: float) -> float:
    """The ε from which on no method but smoothing has certified networks as loose, by experience; ∞ without any."""
    return next((eps for least, eps in _UNREACHED if looseness > least), math.inf)
