"""The geometry of a convolution: the only code that reads strides, paddings and dilations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.errors import InputError

Size = int | tuple[int, ...]
Padding = int | str | tuple[int, ...] | tuple[tuple[int, int], ...]

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True)
class Geometry:
    """Stride, (left, right) padding and dilation of each dimension.

    Attributes:
        groups: as in ``torch.nn.functional.conv2d``.
        mode: the entries of the padding: ``"zeros"``, ``"circular"``, ``"reflect"`` or ``"replicate"``.
    """

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    mode: str = "zeros"

    @classmethod
    def of(
        cls,
        kernel: tuple[int, ...],
        stride: Size = 1,
        padding: Padding = 0,
        dilation: Size = 1,
        groups: int = 1,
        mode: str = "zeros",
    ) -> Geometry:
        """The geometry that torch's arguments describe, for a kernel of these sides."""
        strides, dilations = (
            per_dimension(stride, len(kernel), "stride"),
            per_dimension(dilation, len(kernel), "dilation"),
        )
        return cls(strides, _pads(padding, kernel, strides, dilations), dilations, groups, mode)

    @classmethod
    def of_module(cls, conv: nn.Conv2d) -> Geometry:
        """The geometry of a module."""
        padding: Any = conv.padding
        return cls.of(conv.kernel_size, conv.stride, padding, conv.dilation, conv.groups, conv.padding_mode)

    def pad(self, images: Tensor) -> Tensor:
        """Images (N, C, *size) with the padding around them."""
        border = [side for pair in reversed(self.padding) for side in pair]
        return F.pad(images, border, "constant" if self.mode == "zeros" else self.mode) if any(border) else images

    def padded(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """The size after padding."""
        return tuple(n + left + right for n, (left, right) in zip(size, self.padding, strict=True))

    def uses(self, size: tuple[int, ...]) -> int:
        """How often the padding uses an entry at most: its square root is the norm of the padding."""
        if self.mode == "zeros":
            return 1
        numbers = torch.arange(math.prod(size), dtype=torch.float64).reshape(1, 1, *size)
        return int(torch.bincount(self.pad(numbers).flatten().long()).max())

    def apply(self, images: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The convolution of images, shape (N, C, *size)."""
        function, padding = _CONVOLUTIONS[len(self.padding) - 1], tuple(left for left, _ in self.padding)
        if self.mode != "zeros" or any(left != right for left, right in self.padding):
            images, padding = self.pad(images), (0,) * len(padding)
        return function(images, weight, bias, self.stride, padding, self.dilation, self.groups)


def per_dimension(value: Size, dimensions: int, name: str, smallest: int = 1) -> tuple[int, ...]:
    """One number for each dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    values = values * dimensions if len(values) == 1 else values
    if len(values) != dimensions or not all(isinstance(v, int) and v >= smallest for v in values):
        raise InputError(f"{name} must be one number ≥ {smallest}, or {dimensions} of them, got {value}")
    return values


def _pads(
    padding: Padding, kernel: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """(left, right) in each dimension; ``"same"`` puts an odd remainder on the right, as torch does."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        if max(strides) > 1:
            raise InputError('padding "same" needs stride 1; give the padding as numbers')
        totals = [dilation * (size - 1) for dilation, size in zip(dilations, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    paddings = [padding] if isinstance(padding, (int, str)) else list(padding)
    paddings = paddings * len(kernel) if len(paddings) == 1 else paddings
    pairs = tuple((*pair,) for pair in ((p, p) if isinstance(p, int) else p for p in paddings) if _is_pair(pair))
    if len(paddings) != len(kernel) or len(pairs) != len(paddings):
        raise InputError(
            f'padding must be numbers ≥ 0, one (left, right) pair per dimension, "same" or "valid", got {padding}'
        )
    return pairs


def _is_pair(pair: object) -> TypeGuard[tuple[int, int]]:
    return isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(p, int) and p >= 0 for p in pair)
