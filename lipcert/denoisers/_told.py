"""Denoisers that are told the standard deviation of the noise."""

from __future__ import annotations

from typing import ClassVar

from torch import nn


class Told(nn.Module):
    """A denoiser that works for one σ at a time.

    σ is no part of its state: method smoothing tells its own copy the σ of the run, which stands in the settings of the
    result.

    Attributes:
        sigma: standard deviation of the noise, in pixels in [0, 1].
    """

    name: ClassVar[str]
    sigma = 0.25
