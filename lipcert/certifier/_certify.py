"""The certifier for a method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipcert._settings import SMOOTHING, CertifySettings
from lipcert.bounds import Progress
from lipcert.certifier._certifier import Certifier
from lipcert.model import Model

if TYPE_CHECKING:
    from lipcert.smoothing import Smoothing


def certifier_for(
    model: Model,
    settings: CertifySettings,
    *,
    progress: Progress | None = None,
    batch: int | None = None,
) -> Certifier | Smoothing:
    """The certifier of a method: of the network itself, or of its smoothed classifier.

    Args:
        model: the model; it is not changed.
        settings: what is asked.
        progress: as for :func:`lipcert.lipschitz`, while a network is read and bounded.
        batch: how many draws of noise go through the network at once; None for what suits the device.

    Raises:
        InputError: what :class:`Certifier` or :class:`lipcert.smoothing.Smoothing` cannot use.
        UnsupportedOperation: the model has operations without a rule, which smoothing does not need.
    """
    if settings.method != SMOOTHING:
        return Certifier(model, settings, progress=progress)
    from lipcert.smoothing import Smoothing  # which builds on the certificates here

    return Smoothing(model, settings, batch=batch)
