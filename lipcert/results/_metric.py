"""Certified accuracy over batches, with the interface of a metric of torchmetrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.numerics import Certificates
from lipcert.settings import CertifySettings


class CertifiedAccuracy:
    """The share of images that are correctly classified with a certified radius larger than ε.

    >>> metric = lipcert.CertifiedAccuracy("36/255,0.5")
    >>> for images, labels in loader:
    ...     metric.update(lipcert.certify(model, images, labels, eps="36/255,0.5"))
    >>> metric.compute()

    Args:
        eps: ε in ℓ2 on pixels in [0, 1], or several.
    """

    def __init__(self, eps: float | str | Sequence[float | str]):
        self.eps = torch.tensor([value for value, _ in CertifySettings(cast(Any, eps)).every_eps], dtype=torch.float64)
        self.reset()

    def reset(self) -> None:
        """Forgets all images."""
        self.certified, self.total = torch.zeros(len(self.eps), dtype=torch.int64), 0

    def update(self, certificates: Certificates) -> None:
        """Counts the images of a result of :func:`lipcert.certify`.

        Raises:
            InputError: it has no labels.
        """
        if certificates.correct is None:
            raise InputError("certified accuracy needs labels: lipcert.certify(model, images, labels, eps=...)")
        above = certificates.radius[:, None] > self.eps
        self.certified += (above & certificates.correct[:, None]).sum(0)
        self.total += len(certificates)

    def compute(self) -> Tensor:
        """The certified accuracy, float64: a scalar, or of shape (K,) for K > 1 values of ε, in ascending order.

        Raises:
            InputError: there are no images.
        """
        if not self.total:
            raise InputError("certified accuracy of no images; call update first")
        return (self.certified / self.total).double().squeeze()
