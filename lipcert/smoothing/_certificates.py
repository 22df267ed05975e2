"""The certificates of the smoothed classifier for a batch of images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lipcert.numerics import EVIDENCE, Certificates


@dataclass(frozen=True)
class SmoothedCertificates(Certificates):
    """Certificates of a network's smoothed classifier.

    They hold for g(x) = the class that the network gives most often at x + N(0, σ²I), and say nothing about the
    network's own prediction at x. ``predicted`` is the class selected by the draws. ``margin`` is NaN, because g has no
    logits. If ``abstained``, the draws do not prove that the class is the most frequent one; the radius is 0.

    Attributes:
        sigma: σ, the standard deviation of the noise at each pixel.
        alpha: α, the largest probability with which each radius is too large.
        seed: seed of the noise.
        count: number of draws of the predicted class, int64, shape (N,).
        samples: number of counted draws, int64, shape (N,).
        selected: number of further draws that selected the class, int64, shape (N,).
        distance: ℓ2 distance of the image from the lattice of :mod:`lipcert.smoothing._lattice`, by which its radius
            is smaller; float64, shape (N,).
    """

    sigma: float = 0.0
    alpha: float = 0.0
    seed: int = 0
    count: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    samples: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    selected: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    distance: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    @property
    def correct(self) -> Tensor | None:
        """Whether the prediction is the label, where the classifier does not abstain; bool, shape (N,), or None."""
        right = super().correct
        return None if right is None else right & ~self.abstained

    @property
    def abstained(self) -> Tensor:
        """Whether the draws do not determine the most frequent class; bool, shape (N,)."""
        return self.radius == 0

    @property
    def holds_for(self) -> str:
        """The certified function, such as ``smoothed(0.25)``."""
        return f"smoothed({self.sigma:g})"

    def entries(self, i: int) -> dict[str, Any]:
        """Additional entries of the row of image i."""
        return {
            **dict(zip(EVIDENCE, (None, "checked", "assumed"), strict=True)),
            "holds_for": self.holds_for,
            "abstained": bool(self.abstained[i]),
            "count": int(self.count[i]),
            "samples": int(self.samples[i]),
            "selected": int(self.selected[i]),
            "seed": self.seed,
            **({"distance": distance} if (distance := float(self.distance[i])) else {}),
        }
