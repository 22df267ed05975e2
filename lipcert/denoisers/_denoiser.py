"""Denoisers for noise of a known standard deviation."""

from __future__ import annotations

from typing import ClassVar

from torch import nn


class Denoiser(nn.Module):
    """A denoiser that works for one σ at a time.

    σ is no part of its state: method smoothing sets the σ of the run on its own copy, and the settings of the result
    record it.

    Attributes:
        sigma: standard deviation of the noise, in pixels in [0, 1].
    """

    name: ClassVar[str]
    sigma = 0.25
