"""The certifier for a method, and certifying a batch of images with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lipcert._certificates import Certificates
from lipcert._settings import SMOOTHING, CertifySettings, settings_of, takes
from lipcert.certifier._certifier import Certifier
from lipcert.errors import InputError
from lipcert.model import Model

if TYPE_CHECKING:
    from lipcert.smoothing import Smoothing


def certifier_for(
    model: Model,
    settings: CertifySettings,
    *,
    progress: Callable[[int, int], None] | None = None,
    batch: int | None = None,
) -> Certifier | Smoothing:
    """The certifier of a method: of the network itself, or of its smoothed classifier.

    Args:
        model: the model; it is not changed.
        settings: what is asked.
        progress: called with (operations done, operations in all) while a network is bounded.
        batch: how many draws of noise go through the network at once; None for what suits the device.

    Raises:
        InputError: what :class:`Certifier` or :class:`lipcert.smoothing.Smoothing` cannot use.
        UnsupportedOperation: the model has operations without a rule, which smoothing does not need.
    """
    if settings.method != SMOOTHING:
        return Certifier(model, settings, progress=progress)
    from lipcert.smoothing import Smoothing  # which builds on the certificates here

    return Smoothing(model, settings, batch=batch)


@takes(CertifySettings)
def certify(
    model: Model,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    batch_size: int | None = None,
    **settings: Any,
) -> Certificates:
    """Certifies images: which predictions does no ℓ2 perturbation of the pixels up to ε change?

    Method ``"smoothing"`` takes any network and answers for another function, its smoothed classifier.

    Args:
        model: from :func:`lipcert.load`.
        images: pixels in [0, 1], shape (N, C, H, W).
        labels: true classes, shape (N,), or None.
        batch_size: how many images run at once, or draws of noise; None for what time and memory suggest.
        **settings: the fields of :class:`lipcert.certifier.CertifySettings`: ``eps``, which is required, ``method``,
            ``dtype``, ``rigor``, ``at``, ``passes``, ``delta``, ``attack``, and ``sigma``, ``samples``, ``alpha``,
            ``all_samples``, ``seed`` for smoothing. An attack bounds the radii from above.

    Returns:
        :class:`Certificates` with ``predicted``, ``radius``, ``certified``, ``margin``, ``method``, ``rigor``, each of
        length N, and with an attack also ``attacked`` and ``attack_distance``; with smoothing
        :class:`lipcert.smoothing.SmoothedCertificates`.

    Raises:
        InputError: images, labels or settings that cannot be used.
        BrokenCertificate: the attack changed a prediction inside its certified radius: a defect of lipcert.
        UnsupportedOperation: the model has operations without a rule.
    """
    if isinstance(model, nn.Module) and not isinstance(model, Model):
        raise InputError(
            "model is a plain module; wrap it first: lipcert.load(module, mean=..., std=..., input_size=...)"
        )
    certifier = certifier_for(model, settings_of(CertifySettings, **settings), batch=batch_size)
    if not isinstance(certifier, Certifier):
        return certifier.run(images, labels)
    size = batch_size or certifier.together
    starts = range(0, max(1, len(images)), size)
    parts = [certifier.run(images[i : i + size], None if labels is None else labels[i : i + size]) for i in starts]
    return Certificates.join(parts)
