"""The answer for a batch of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Certificates:
    """One certificate for each of N images.

    "Not certified" is a value, never an exception: radius 0, ``certified`` False.

    Attributes:
        predicted: class of the largest logit, int64, shape (N,).
        margin: largest logit less the second largest, float64, shape (N,).
        radius: no perturbation of the pixels with ℓ2 norm smaller than this changes ``predicted``; float64, shape (N,),
            rounded down.
        certified: whether ``radius`` is larger than the ε that was asked for; bool, shape (N,).
        method: which certificate decided, N names.
        rigor: ``deterministic`` or ``probabilistic(δ)``, N words.
        labels: the true classes, int64, shape (N,), or None.
        eps: the ε that was asked for, in ℓ2 on pixels in [0, 1].
        attacked: whether an attack changed the prediction within ε; bool, shape (N,), or None without an attack.
        attack_distance: ℓ2 distance of the nearest perturbed image that an attack found, inside or outside ε, inf where
            it found none; float64, shape (N,), or None without an attack. The true radius lies between ``radius`` and
            this.
        dtype: what the certificates hold for: ``real`` arithmetic, or the format of the deployed forward pass.
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

    def __len__(self) -> int:
        return len(self.method)

    @property
    def correct(self) -> Tensor | None:
        """Whether the prediction is the label; bool, shape (N,); None without labels."""
        return None if self.labels is None else self.predicted == self.labels

    @property
    def certified_accuracy(self) -> float | None:
        """Share of the images that are predicted right and certified; None without labels."""
        return None if self.correct is None else (self.correct & self.certified).double().mean().item()

    def entries(self, i: int) -> dict[str, Any]:
        """What the row of image i states beyond the rows of all certificates."""
        return {}

    @classmethod
    def join(cls, parts: Sequence[Certificates]) -> Certificates:
        """The certificates of several batches, in order; what not all of them know is None."""

        def joined(values: list[Any]) -> Any:
            if any(value is None for value in values):
                return None
            if isinstance(values[0], Tensor):
                return torch.cat(values)
            return sum(values, ()) if isinstance(values[0], tuple) else values[0]

        names = [one.name for one in fields(parts[0])]
        return type(parts[0])(**{name: joined([getattr(part, name) for part in parts]) for name in names})
