"""Chooses the standard deviation of the noise on images that are not certified."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.model import Model
from lipcert.settings import AUTO, SMOOTHING, CertifySettings, settings_of
from lipcert.smoothing._binomial import posterior_above
from lipcert.smoothing._smoothing import Smoothing, plan_of

# The images that are looked at, and fewer than which a choice would be a guess; draws of each.
CHOOSING, LEAST, DRAWS = 48, 8, 16
# σ in multiples of ε: a class is certified at ε where it has Φ(ε/σ) of the draws, from 0.98 to 0.69.
_RATIOS = (0.5, 0.6, 0.72, 0.86, 1.04, 1.25, 1.5, 2.0)
_FIRST = 3


@dataclass(frozen=True)
class SigmaChoice:
    """A standard deviation, and the estimates that led to it.

    Attributes:
        sigma: σ, the chosen one.
        shares: an estimate of the share of images that are certified at ε, by σ.
        images: number of images used for the estimates.
        labelled: whether only draws of the true class count; otherwise those of the class drawn most.
    """

    sigma: float
    shares: dict[float, float]
    images: int
    labelled: bool


def choose_sigma(
    model: Model,
    images: Tensor,
    labels: Tensor | None = None,
    eps: float | str | CertifySettings | None = None,
    *,
    indices: Sequence[int] | None = None,
    progress: Callable[[str], None] | None = None,
    deadline: float = math.inf,
    **settings: object,
) -> SigmaChoice:
    """Chooses σ for method smoothing, so that many images are certified at ε.

    Take other images than those that are certified afterwards: certificates hold with probability 1 − α each for a σ
    that does not depend on their draws, and a share of images is no estimate for others if σ was chosen for it.

    For each σ, the share is the mean over the images of the probability that the class has more than Φ(ε/σ) of all
    draws, after 16 draws, from a uniform prior. Starting from 0.86 ε, σ moves as long as the share grows; a σ
    with which ``samples`` draws reach no radius of ε is left out.

    Args:
        model: the model.
        images: pixels in [0, 1], shape (N, C, H, W), of at least 8 images; 48 give a usable estimate.
        labels: true classes, shape (N,), or None.
        eps: ε in ℓ2, or all settings.
        indices: positions of the images in their data set, which determine their noise; 0 to N − 1 by default.
        progress: called with a line for each σ.
        deadline: when to try no further σ, by the monotonic clock.
        **settings: other fields of :class:`lipcert.certifier.CertifySettings` for method smoothing.

    Raises:
        InputError: settings or images are not valid, or there are too few images.
    """
    if len(images) < LEAST:
        raise InputError(
            f"sigma auto is chosen on images that are not certified, at least {LEAST}, and there are {len(images)}; "
            "certify fewer with --limit, or give sigma a number"
        )
    request = eps
    if not isinstance(request, CertifySettings):
        request = settings_of(
            CertifySettings, *(() if eps is None else (eps,)), method=SMOOTHING, sigma=AUTO, **settings
        )
    numbers = range(len(images)) if indices is None else indices
    images = model.check_images(images)
    shares: dict[float, float] = {}

    candidates = [replace(request, sigma=float(f"{ratio * request.eps:.2g}")) for ratio in _RATIOS]

    def share(step: int) -> float:
        sigma = cast(float, candidates[step].sigma)
        if sigma not in shares:
            shares[sigma] = _share(Smoothing(model, candidates[step]), images, labels, numbers)
            if progress is not None:
                progress(f"sigma {sigma:g}: about {100 * shares[sigma]:.0f} % certified")
        return shares[sigma]

    last = len(candidates) - 1
    # All larger ones reach ε too. If none does, the certifier of the last one says what to change.
    least = next((step for step, settings in enumerate(candidates) if plan_of(model, settings).reaches), last)
    best = max(least, _FIRST)
    for step in (-1, 1):
        while least <= best + step <= last and time.monotonic() < deadline and share(best + step) > share(best):
            best += step
    share(best)
    return SigmaChoice(max(shares, key=lambda sigma: shares[sigma]), shares, len(images), labels is not None)


@torch.no_grad()
def _share(smoothing: Smoothing, images: Tensor, labels: Tensor | None, indices: Sequence[int]) -> float:
    """The estimated share of images whose class has more than the needed part of all draws."""
    draws = smoothing.classes_of(images, indices, range(DRAWS))
    counts = [
        int((classes == label).sum())
        if label is not None
        else int(torch.bincount(classes[classes >= 0], minlength=1).amax())
        for classes, label in zip(draws, [None] * len(images) if labels is None else labels.tolist(), strict=True)
    ]
    return sum(posterior_above(count, DRAWS, smoothing.plan.threshold) for count in counts) / len(counts)
