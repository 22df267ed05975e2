"""The answer for a batch of images."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    predicted: Tensor
    margin: Tensor
    radius: Tensor
    certified: Tensor
    method: tuple[str, ...]
    rigor: tuple[str, ...]
    labels: Tensor | None
    eps: float

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

    @staticmethod
    def join(parts: list[Certificates]) -> Certificates:
        """The certificates of several batches, in order."""
        first = parts[0]
        labels = [part.labels for part in parts if part.labels is not None]
        return Certificates(
            torch.cat([p.predicted for p in parts]),
            torch.cat([p.margin for p in parts]),
            torch.cat([p.radius for p in parts]),
            torch.cat([p.certified for p in parts]),
            tuple(name for p in parts for name in p.method),
            tuple(word for p in parts for word in p.rigor),
            torch.cat(labels) if len(labels) == len(parts) else None,
            first.eps,
        )
