"""Denoisers that are told the standard deviation of the noise."""

from __future__ import annotations

from torch import nn

from lipcert.errors import InputError


class Told(nn.Module):
    """A denoiser that works for one σ at a time.

    σ is no part of its state: method smoothing tells it the σ of the run, which stands in the settings of the result.
    """

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self._sigma: float | None = None

    def tell(self, sigma: float) -> None:
        """Sets the standard deviation of the noise, in pixels in [0, 1]."""
        self._sigma = sigma

    @property
    def sigma(self) -> float:
        """σ, the standard deviation of the noise.

        Raises:
            InputError: it was not told.
        """
        if self._sigma is None:
            raise InputError(f"the denoiser {self.name} needs noise of a known sigma: use it with method smoothing")
        return self._sigma
