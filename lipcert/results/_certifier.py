"""Selects the certifier of a method."""

from __future__ import annotations

from lipcert.bounds import Progress
from lipcert.certifier import Certifier
from lipcert.model import Model, check_eps
from lipcert.settings import SMOOTHING, CertifySettings
from lipcert.smoothing import Smoothing


def certifier_for(
    model: Model,
    settings: CertifySettings,
    *,
    progress: Progress | None = None,
    batch: int | None = None,
    memory: float | str | None = None,
) -> Certifier | Smoothing:
    """The certifier for the network itself or for its smoothed classifier, depending on the method."""
    if settings.at is None:
        check_eps(settings.largest_eps, model)
    if settings.method != SMOOTHING:
        return Certifier(model, settings, progress=progress, memory=memory)
    return Smoothing(model, settings, batch=batch, memory=memory)
