"""The answer for a batch of images."""

from __future__ import annotations

from dataclasses import dataclass
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

    @staticmethod
    def join(parts: list[Certificates]) -> Certificates:
        """The certificates of several batches, in order."""
        first = parts[0]

        def optional(tensors: list[Tensor | None]) -> Tensor | None:
            known = [tensor for tensor in tensors if tensor is not None]
            return torch.cat(known) if len(known) == len(parts) else None

        return Certificates(
            torch.cat([p.predicted for p in parts]),
            torch.cat([p.margin for p in parts]),
            torch.cat([p.radius for p in parts]),
            torch.cat([p.certified for p in parts]),
            tuple(name for p in parts for name in p.method),
            tuple(word for p in parts for word in p.rigor),
            optional([p.labels for p in parts]),
            first.eps,
            optional([p.attacked for p in parts]),
            optional([p.attack_distance for p in parts]),
            first.dtype,
        )
