"""The certificates of a batch of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lipcert.errors import InputError

# Of what a certificate rests on, a row says one of these words, the strongest first; None where it does not rest on it.
EVIDENCE, WORDS = ("norms", "rounding", "sampling"), ("proved", "checked", "assumed")


@dataclass(frozen=True)
class Certificates:
    """One certificate for each of N images.

    "Not certified" is a value, never an exception: radius 0, ``certified`` False.

    Attributes:
        predicted: class of the largest logit, int64, shape (N,).
        margin: largest logit minus the second largest, float64, shape (N,).
        radius: no perturbation of ℓ2 norm smaller than this that leaves the pixels in [0, 1] changes ``predicted``;
            float64, shape (N,),
            rounded down.
        certified: whether ``radius`` is larger than ε; bool, shape (N,).
        method: the method that gave the radius, N names.
        rigor: ``deterministic`` or ``probabilistic(δ)``, N words.
        labels: the true classes, int64, shape (N,), or None.
        eps: the requested ε, in ℓ2 on pixels in [0, 1].
        attacked: whether an attack changed the prediction within ε; bool, shape (N,), or None without an attack.
        attack_distance: ℓ2 distance of the nearest adversarial example that an attack found, inside or outside ε; inf
            if it found none; float64, shape (N,), or None without an attack. The true radius lies between ``radius``
            and this distance.
        dtype: the arithmetic for which the certificates hold: ``real``, or the format of the deployed forward pass; of
            a smoothed classifier the format that was asked for its network, ``real`` for that of the weights.
        rounding: whether the effect of rounding in float64 is bounded by proof, ``proved``, or with noise, ``checked``;
            N words, or empty where it does not apply.
        limit: first-order limits of the radii, float64, shape (N,), of staged certification: linearised methods and
            Lipschitz constants certify no more (:mod:`lipcert.certifier._triage`). None for other methods.
        reason: why an image is not certified, N words, of staged certification: ``misclassified``, ``attacked``,
            ``first-order limit``, ``skipped: …`` with methods that would take too long, or ``bounds too loose``; empty
            for certified images.
    """

    predicted: Tensor
    margin: Tensor
    radius: Tensor
    certified: Tensor
    method: tuple[str, ...]
    rigor: tuple[str, ...]
    labels: Tensor | None
    eps: float
    attacked: Tensor | None = None
    attack_distance: Tensor | None = None
    dtype: str = "real"
    rounding: tuple[str, ...] = ()
    limit: Tensor | None = None
    reason: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.method)

    @property
    def correct(self) -> Tensor | None:
        """Whether the prediction is the label; bool, shape (N,); None without labels."""
        return None if self.labels is None else self.predicted == self.labels

    @property
    def certified_accuracy(self) -> float | None:
        """Share of images that are correct and certified; None without labels."""
        return None if self.correct is None else (self.correct & self.certified).double().mean().item()

    def certified_accuracy_at(self, eps: float | str) -> float | None:
        """Share of images that are correct and have a radius larger than ``eps``; None without labels.

        ``eps`` is a number, or a text such as "36/255". A lower bound on the robust accuracy at any ε. Staged
        certification and smoothing stop at the verdict for the ε of the run, and compute larger radii for several:
        ``lipcert.certify(..., eps="36/255,0.5")``.

        Raises:
            InputError: ``eps`` is not a number ≥ 0.
        """
        try:
            # Rounded to nearest: a radius, which is a float64, that is larger is larger than ε itself.
            value = float(Fraction(eps) if isinstance(eps, str) else eps)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError):
            value = math.nan
        if not value >= 0:
            raise InputError(f"eps must be a number, at least 0, got {eps!r}; for example 36/255, 0.5 or 1e-3")
        return None if self.correct is None else (self.correct & (self.radius > value)).double().mean().item()

    def entries(self, i: int) -> dict[str, Any]:
        """Additional entries of the row of image i."""
        sampling = None if self.rigor[i] == "deterministic" else "assumed"
        words = ("proved", self.rounding[i], sampling) if self.rounding else ()
        entries: dict[str, Any] = dict(zip(EVIDENCE, words, strict=False))
        if self.limit is not None:
            entries["limit"] = self.limit[i].item() if math.isfinite(self.limit[i].item()) else None
        if self.reason:
            entries["reason"] = self.reason[i]
        return entries

    @classmethod
    def join(cls, parts: Sequence[Certificates]) -> Certificates:
        """The certificates of several batches, in order; an attribute that is None in one of them is None."""

        def joined(values: list[Any]) -> Any:
            if any(value is None for value in values):
                return None
            if isinstance(values[0], Tensor):
                return torch.cat(values)
            return sum(values, ()) if isinstance(values[0], tuple) else values[0]

        names = [one.name for one in fields(parts[0])]
        return type(parts[0])(**{name: joined([getattr(part, name) for part in parts]) for name in names})
