"""The smoothed classifier as a module, for deployment."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from functools import wraps
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from lipcert.denoisers import Denoised
from lipcert.errors import InputError
from lipcert.inputs.batches import pair_of
from lipcert.inputs.loading import load as load_model
from lipcert.model import Model, alone, checked
from lipcert.settings import SMOOTHING, CertifySettings, settings_of
from lipcert.smoothing._binomial import tail
from lipcert.smoothing._certificates import SmoothedCertificates
from lipcert.smoothing._smoothing import Smoothing

# An ε below every radius that is not 0.
_ANY = 1e-12
_ABSTAINS = -1
Pixels = Tensor | np.ndarray


class SmoothedClassifier(nn.Module):
    """g(x) = the class that a network gives most often at x + N(0, σ²I), as in method ``"smoothing"``.

    g cannot be computed, only sampled: :meth:`predict` returns g(x), abstains, or errs with probability at most α, and
    :meth:`certify` also bounds how far g is the same. ``forward`` returns shares of votes, without a guarantee. Images
    and noise lie on the lattice of :mod:`lipcert.smoothing._lattice`, so both are about the same g. An image off the
    lattice, as an attack makes it, is rounded first, which moves it by less than 8e-6 √d for d pixels: :meth:`certify`
    subtracts that from its radius, while :meth:`predict` answers for the rounded image.

    Calls draw fresh noise unless ``seed`` is given. A seed that whoever chooses the images knows voids the guarantee.

    Source: Cohen, Rosenfeld and Kolter, "Certified adversarial robustness via randomized smoothing", ICML 2019.

    Attributes:
        network: the network and its denoiser, a :class:`lipcert.Model`; it shares the weights of ``model``.
        seed: seed of the noise, or None.

    Args:
        model: a model from :func:`lipcert.load`.
        sigma: σ, above 0 and below 8.
        denoiser: a module, or the name of one (``"dct"``, ``"natural"``), through which noisy images go first.
        seed: seed of the noise; None for fresh noise in every call.

    Raises:
        InputError: σ or the denoiser is not valid.
    """

    @alone
    def __init__(
        self,
        model: Model | nn.Module,
        sigma: float,
        denoiser: nn.Module | str | None = None,
        *,
        seed: int | None = None,
    ):
        super().__init__()
        asked = settings_of(CertifySettings, _ANY, SMOOTHING, sigma=sigma, seed=seed or 0)
        if not isinstance(asked.sigma, float):
            raise InputError(f"sigma must be a number above 0, got {sigma}; lipcert.smoothing.choose_sigma chooses one")
        network = checked(model)
        self.network = copy.copy(network) if denoiser is None else Denoised(network, denoiser)
        self.network.sigma = asked.sigma
        self.seed = seed

    @property
    def sigma(self) -> float:
        """σ, the standard deviation of the noise at each pixel in [0, 1]; another σ is another classifier."""
        return cast(float, self.network.sigma)

    def extra_repr(self) -> str:
        """σ."""
        return f"sigma={self.sigma:g}"

    @alone
    @torch.no_grad()
    def forward(self, images: Pixels, samples: int = 100) -> Tensor:
        """The share of draws of each class.

        Args:
            images: pixels in [0, 1], shape (N, C, H, W).
            samples: number of noise draws for each image.

        Returns:
            float64, shape (N, classes). A draw whose logits hold NaN counts for no class.

        Raises:
            InputError: images or samples are not valid.
        """
        settings_of(CertifySettings, _ANY, SMOOTHING, sigma=self.sigma, samples=samples)
        return self._votes(images, samples)[0].double() / samples

    @alone
    @torch.no_grad()
    def predict(self, images: Pixels, samples: int = 100, alpha: float = 1e-3) -> Tensor:
        """The class of each image, or −1 where the smoothed classifier abstains.

        It abstains unless a two-sided binomial test at level α rejects that the two most frequent classes of the draws
        are equally probable. A class that is not g(x), for x rounded to the lattice, is returned with probability at
        most α (Cohen et al., proposition 2, after Hung and Fithian 2019); by that of the lattice's table, d (c + 2)
        2⁻⁶² a draw, the level is smaller.

        Args:
            images: pixels in [0, 1], shape (N, C, H, W).
            samples: number of noise draws for each image.
            alpha: α, for each image.

        Returns:
            int64, shape (N,).

        Raises:
            InputError: images or numbers are not valid, or the draws are too few for any prediction at this α.
        """
        settings_of(CertifySettings, _ANY, SMOOTHING, sigma=self.sigma, samples=samples, alpha=alpha)
        votes, error = self._votes(images, samples)
        level = alpha - samples * error
        if 2 * tail(samples, samples, 0.5) > level:
            raise InputError(f"{samples} draws are too few to predict anything at alpha {alpha:g}; take more samples")
        padded = torch.cat([votes, torch.zeros(len(votes), 1, dtype=torch.int64)], 1)  # a second one of one class
        (first, second), classes = padded.topk(2).values.T, padded.argmax(1)
        sure = [2 * tail(a, a + b, 0.5) <= level for a, b in zip(first.tolist(), second.tolist(), strict=True)]
        return torch.where(torch.tensor(sure, dtype=torch.bool), classes, _ABSTAINS)

    def certify(
        self,
        images: Pixels,
        labels: Pixels | Sequence[int] | None = None,
        eps: float | str | None = None,
        **settings: Any,
    ) -> SmoothedCertificates:
        """Certificates of images, whose ``radius`` is 0 where the classifier abstains.

        Args:
            images: pixels in [0, 1], shape (N, C, H, W).
            labels: true classes, shape (N,), or None.
            eps: draws stop as soon as the verdict at this ε is known; None for all draws, and the largest radii.
            **settings: ``samples``, ``alpha``, ``futility``, ``dtype``, as for :func:`lipcert.certify`.

        Raises:
            InputError: images, labels or settings are not valid.
        """
        if "sigma" in settings:
            raise InputError(f"sigma is {self.sigma:g} here; make a SmoothedClassifier for another one")
        if eps is None:
            settings = {"all_samples": True, **settings}
        seed = {"seed": self._fresh(), **settings}
        asked = settings_of(CertifySettings, _ANY if eps is None else eps, SMOOTHING, sigma=self.sigma, **seed)
        return Smoothing(self.network, asked).run(*pair_of((images, labels)))

    def _fresh(self) -> int:
        return secrets.randbits(64) if self.seed is None else self.seed

    def _votes(self, images: Pixels, samples: int) -> tuple[Tensor, float]:
        """Draws by class, int64, shape (N, classes); and the error of the distribution of a draw."""
        asked = settings_of(CertifySettings, _ANY, SMOOTHING, sigma=self.sigma, all_samples=True)
        smoothing = Smoothing(self.network, asked)
        images = self.network.check_images(pair_of((images, None))[0])
        smoothing.seed = self._fresh()
        drawn = smoothing.classes_of(images, range(len(images)), range(samples))
        votes = torch.zeros(len(images), smoothing.classes, dtype=torch.int64)
        for row, classes in zip(votes, drawn, strict=True):
            row += torch.bincount(classes[classes >= 0], minlength=len(row))
        return votes, smoothing.plan.error


@wraps(load_model)
def load(*args: Any, **options: Any) -> Model | SmoothedClassifier:
    """:func:`lipcert.inputs.loading.load`, which returns a smoothed classifier for a file that holds one."""
    model = load_model(*args, **options)
    return model if model.sigma is None else SmoothedClassifier(model, model.sigma)
