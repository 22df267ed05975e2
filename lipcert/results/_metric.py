"""Certified accuracy over batches: a metric of torchmetrics where that is installed, with its interface elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.numerics import Certificates
from lipcert.settings import CertifySettings

try:
    from torchmetrics import Metric
except ImportError:

    class Metric:  # type: ignore[no-redef]
        """The part of ``torchmetrics.Metric`` that is used."""

        def __init__(self) -> None:
            self._defaults: dict[str, Tensor] = {}

        def add_state(self, name: str, default: Tensor, dist_reduce_fx: str) -> None:
            """Registers a sum."""
            self._defaults[name] = default
            setattr(self, name, default.clone())

        def reset(self) -> None:
            """Forgets all images."""
            for name, default in self._defaults.items():
                setattr(self, name, default.clone())


class CertifiedAccuracy(Metric):  # type: ignore[misc,unused-ignore]
    """The share of images that are correctly classified with a certified radius larger than ε.

    >>> metric = lipcert.CertifiedAccuracy("36/255,0.5")
    >>> for images, labels in loader:
    ...     metric.update(lipcert.certify(model, images, labels, eps="36/255,0.5"))
    >>> metric.compute()

    Where torchmetrics is installed, it is a torchmetrics metric, and counts over all processes.

    Args:
        eps: ε in ℓ2 on pixels in [0, 1], or several.
        **options: those of ``torchmetrics.Metric``.
    """

    certified: Tensor
    total: Tensor

    def __init__(self, eps: float | str | Sequence[float | str], **options: Any):
        super().__init__(**options)
        self.eps = [value for value, _ in CertifySettings(cast(Any, eps)).every_eps]
        self.add_state("certified", torch.zeros(len(self.eps), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, certificates: Certificates) -> None:
        """Counts the images of a result of :func:`lipcert.certify`.

        Raises:
            InputError: it has no labels.
        """
        if certificates.correct is None:
            raise InputError("certified accuracy needs labels: lipcert.certify(model, images, labels, eps=...)")
        above = certificates.radius[:, None] > certificates.radius.new_tensor(self.eps)
        self.certified += (above & certificates.correct[:, None]).sum(0).to(self.certified.device)
        self.total += len(certificates)

    def compute(self) -> Tensor:
        """The certified accuracy, float64: a scalar, or of shape (K,) for K > 1 values of ε, in ascending order.

        Raises:
            InputError: there are no images.
        """
        if not self.total:
            raise InputError("certified accuracy of no images; call update first")
        return (self.certified.double() / self.total).squeeze()
