"""Linear maps that begin with a padding, so that the convolution after it is bounded together with it."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from lipcert.bounds._value import Conv, _folded, _with_roundings
from lipcert.norms import Border, padded_conv_norm
from lipcert.numerics import Upper


class Padded:
    """A padding that repeats entries."""

    def __init__(self, border: Border):
        self.border = border

    @cached_property
    def norm(self) -> Upper:
        return Upper(self.border.uses()).sqrt()

    def scaled(self, scale: Tensor) -> None:
        """No scale is folded into it."""

    def plus_identity(self) -> None:
        """It has no square form."""


class PaddedConv:
    """A convolution without padding of its own, after a padding that repeats entries; ``rows`` as in :class:`Conv`."""

    def __init__(self, conv: Conv, border: Border):
        self.conv, self.border = conv, border

    @cached_property
    def norm(self) -> Upper:
        conv, geometry = self.conv, self.conv.geometry
        weight = _folded(conv.weight, conv.rows, conv.columns)
        norm = padded_conv_norm(
            weight, self.border, stride=geometry["stride"], dilation=geometry["dilation"], groups=geometry["groups"]
        )
        if conv.rows is None and conv.columns is None:
            return norm
        # The rounding of the weight is a convolution too, after the same padding.
        return norm + _with_roundings(Upper(0), weight, True) * Upper(self.border.uses()).sqrt()

    def scaled(self, scale: Tensor) -> PaddedConv | None:
        conv = self.conv.scaled(scale)
        return None if conv is None else PaddedConv(conv, self.border)

    def plus_identity(self) -> None:
        """The identity is not one of its taps."""
