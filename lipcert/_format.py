"""Floating-point formats, and how much one operation can round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipcert._numerics import at_most
from lipcert.errors import InputError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# The bounds themselves are float64 sums and products of non-negative numbers: this is more than their rounding.
OWN_ROUNDING = 1 + 1e-6
# Roundings on the way of a term besides those of the sum: product, bias, scale, a change of format.
EXTRA = 8
# Sums kept in float32 may be truncated where tensor cores align their terms; four times u covers that.
_FLOAT32_SUMS = 2.0**-22


@dataclass(frozen=True)
class Format:
    """Binary floating point with rounding to nearest: fl(a ∘ b) = (a ∘ b)(1 + δ) + η', |δ| ≤ unit, |η'| ≤ smallest.

    Attributes:
        dtype: float32, float16 or bfloat16: what every operation returns.
        sums: in what the sums inside an operation are kept: float32, or ``dtype`` itself.
        computed: constants that a network computes from its weights, by address and shape, with bounds on their errors.
    """

    dtype: torch.dtype
    sums: torch.dtype = torch.float32
    computed: Mapping[tuple[int, torch.Size], tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, dtype: str | torch.dtype | Format) -> Format:
        """The format of a name in ``DTYPES`` or of a dtype.

        Raises:
            InputError: there are no bounds for it.
        """
        if isinstance(dtype, Format):
            return dtype
        found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if found not in DTYPES.values():
            raise InputError(f"no rounding bounds for dtype {dtype}; choose one of {', '.join(DTYPES)}")
        assert isinstance(found, torch.dtype)
        return cls(found)

    @property
    def unit(self) -> float:
        """u, half the distance from 1 to the next number."""
        return torch.finfo(self.dtype).eps / 2

    @property
    def smallest(self) -> float:
        """What an underflow can cost: numbers below the normal range may be flushed to zero.

        Of float16, whose normal range ends at 6e-5, only numbers below the subnormal range are.
        """
        info = torch.finfo(self.dtype)
        return info.smallest_normal * info.eps if self.dtype == torch.float16 else info.smallest_normal

    @property
    def largest(self) -> float:
        """The largest number that counts as safe from overflow: a quarter of the format's."""
        return torch.finfo(self.dtype).max / 4

    @property
    def sum_unit(self) -> float:
        """The u of the arithmetic inside an operation."""
        return self.unit if self.sums == self.dtype else _FLOAT32_SUMS

    @property
    def library(self) -> float:
        """Relative error of a library's functions: 4 ulp of the arithmetic inside, and the rounding to the format."""
        return 8 * self.sum_unit + self.unit

    def gamma(self, roundings: int) -> float:
        """γ_n for n roundings to the format."""
        return _gamma(roundings, self.unit)

    def sum_gamma(self, roundings: int) -> float:
        """γ_n for n roundings inside an operation."""
        return _gamma(roundings, self.sum_unit)

    def sum(self, size: Tensor, terms: int, result: Tensor) -> Tensor:
        """Bounds on the error of sums of so many products, in any order and with or without fused multiplication.

        n products, n − 1 additions and ``EXTRA`` roundings: γ_(n + EXTRA) Σ|terms|, and two roundings of the result to
        the format, as a bias may be added behind the first; each step may underflow. No partial sum exceeds 2 Σ|terms|.

        Args:
            size: bounds on Σ|terms|.
            terms: n.
            result: bounds on the absolute exact sums, where better ones than ``size`` are known.
        """
        count = terms + EXTRA
        result = torch.minimum(at_most(result), size)
        error = self.sum_gamma(count) * size + self.gamma(2) * result + 4 * count * self.smallest
        return self.safe(error, size)

    def rounded(self, size: Tensor, roundings: int = 1) -> Tensor:
        """Bounds on the error of results of absolute value ≤ ``size`` behind so many roundings to the format."""
        return self.safe(self.gamma(roundings) * size + 4 * self.smallest, size)

    def function(self, size: Tensor) -> Tensor:
        """Bounds on the error of a library's function whose error is relative to ``size``."""
        return self.safe(self.library * size + 4 * self.smallest, size)

    def safe(self, error: Tensor, size: Tensor) -> Tensor:
        """The error, ∞ where intermediate results of this size could overflow, or where it is not a number."""
        return at_most(torch.where(size <= self.largest, error, math.inf))

    def cast(self, constant: Tensor | float) -> Tensor:
        """|fl(c) − c| for constants, entry by entry; ∞ where c is too large for the format.

        What is ``computed`` by the network has bounds of its own. Entries that the format does not hold may have been
        rounded through float32, which adds 2⁻²³|c|.
        """
        exact = torch.as_tensor(constant, dtype=torch.float64).detach()
        if address(exact) in self.computed:
            return self.computed[address(exact)][1]
        held = exact.to(self.dtype).double()
        error = torch.where(held == exact, 0.0, (held - exact).abs() + 2.0**-23 * exact.abs() + 2.0**-149)
        flushed = (exact != 0) & (exact.abs() < torch.finfo(self.dtype).smallest_normal)
        return at_most(torch.where(flushed, error + self.smallest, error))

    def entry(self, images: Tensor, radius: Tensor) -> Tensor:
        """How far rounding its pixels can move an image of [0, 1] within ``radius`` of the given ones, shape (N,)."""
        pixels = images.reshape(len(images), -1)
        root = math.sqrt(pixels.shape[1])
        norm = (pixels.norm(dim=1) + radius).clamp_max(root)
        return (norm * self.unit + root * self.smallest) * OWN_ROUNDING


def address(constant: Tensor) -> tuple[int, torch.Size]:
    """What tells a tensor apart from all others that are in memory."""
    return constant.data_ptr(), constant.shape


def _gamma(n: int, unit: float) -> float:
    """γ_n = nu/(1 − nu), which bounds the relative error of n roundings in a row; ∞ where nu ≥ ½.

    Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., lemma 3.1.
    """
    return n * unit / (1 - n * unit) if n * unit < 0.5 else math.inf
