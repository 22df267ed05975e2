"""Floating-point formats, and bounds on the rounding errors of single operations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.numerics._l2 import l2_norm
from lipcert.numerics._slack import at_most

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# The bounds are float64 sums and products of non-negative numbers. This factor covers their own rounding.
OWN_ROUNDING = 1 + 1e-6
# Roundings of a term besides those of the sum: product, bias, scale, a change of format.
EXTRA = 8
# Tensor cores may truncate float32 sums when they align terms; four times u covers that.
_FLOAT32_SUMS = 2.0**-22


class ConstantErrors:
    """Bounds on the absolute errors of constants in the deployed network, entry by entry, by the tensor's address."""

    def __init__(self) -> None:
        self._known: dict[Address, tuple[Tensor, Tensor]] = {}
        self.asked: set[Address] = set()

    def put(self, constant: Tensor, error: Tensor) -> None:
        """Notes a bound; the largest counts."""
        _, before = self._known.get(address(constant), (constant, error))
        self._known[address(constant)] = constant, torch.maximum(error, before.reshape(error.shape))

    def error_of(self, constant: Tensor) -> Tensor | None:
        """The bound that was noted for a constant; None for none."""
        if address(constant) not in self._known:
            return None
        self.asked.add(address(constant))
        return self._known[address(constant)][1].reshape(constant.shape)

    def unread(self, constants: Iterable[Tensor]) -> bool:
        """Whether no rule has asked for the error of one of these constants yet, and it is not 0."""
        known = [(address(x), self._known[address(x)][1]) for x in constants if address(x) in self._known]
        return any(place not in self.asked and bool(error.any()) for place, error in known)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._known.values())


@dataclass(frozen=True)
class Format:
    """Binary floating point with rounding to nearest: fl(a ∘ b) = (a ∘ b)(1 + δ) + η', |δ| ≤ unit, |η'| ≤ smallest.

    Attributes:
        dtype: float32, float16 or bfloat16, or float64 in ``REAL``: the type of every result.
        sums: the type of sums inside an operation: float32, or ``dtype`` itself.
        computed: constants that a network computes from its weights, with bounds on their errors.
    """

    dtype: torch.dtype
    sums: torch.dtype = torch.float32
    computed: ConstantErrors = field(default_factory=ConstantErrors, compare=False)

    @classmethod
    def of(cls, dtype: str | torch.dtype | Format) -> Format:
        """The format with a name of ``DTYPES``, or of a dtype."""
        if isinstance(dtype, Format):
            return dtype
        resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if resolved not in DTYPES.values():
            raise InputError(f"no rounding bounds for dtype {dtype}; choose one of {', '.join(DTYPES)}")
        assert isinstance(resolved, torch.dtype)
        return cls(resolved)

    def of_type(self, dtype: torch.dtype | None) -> Format:
        """The format of results of another type in the same network; None for this one."""
        if dtype is None or dtype == self.dtype:
            return self
        return replace(self, dtype=dtype, sums=dtype if self.sums == self.dtype else self.sums)

    @property
    def unit(self) -> float:
        """The unit roundoff u: half the distance from 1 to the next number."""
        return torch.finfo(self.dtype).eps / 2

    @property
    def smallest(self) -> float:
        """The largest error of an underflow: numbers below the normal range may be flushed to zero.

        In float16, whose normal range ends at 6e-5, only numbers below the subnormal range are flushed.
        """
        info = torch.finfo(self.dtype)
        return info.smallest_normal * info.eps if self.dtype == torch.float16 else info.smallest_normal

    @property
    def largest(self) -> float:
        """The largest number that counts as safe from overflow: a quarter of the format's maximum."""
        return torch.finfo(self.dtype).max / 4

    @property
    def sum_unit(self) -> float:
        """The unit roundoff of the arithmetic inside an operation."""
        return self.unit if self.sums == self.dtype else _FLOAT32_SUMS

    @property
    def library(self) -> float:
        """Relative error of library functions: 4 ulp of the internal arithmetic plus the rounding to the format."""
        return 8 * self.sum_unit + self.unit

    def gamma(self, roundings: int) -> float:
        """γ_n for n roundings to the format."""
        return _gamma(roundings, self.unit)

    def sum_gamma(self, roundings: int) -> float:
        """γ_n for n roundings inside an operation."""
        return _gamma(roundings, self.sum_unit)

    def sum(self, size: Tensor, terms: int, stored: Tensor | None = None) -> Tensor:
        """Bounds on the error of sums of n products with Σ|terms| ≤ ``size``, however a kernel computes them.

        The order is free, with or without fused multiplication: n products, n − 1 additions and ``EXTRA`` roundings
        give e = γ_(n + EXTRA) Σ|terms|. Each step may underflow. No partial sum exceeds 2 Σ|terms|. If a kernel may
        also round factors or parts of the sum to the format, which may cancel, three such roundings of each term add
        at most γ₃(Σ|terms| + e). If it rounds known intermediate results only, of absolute value ≤ ``stored`` in exact
        arithmetic, such as a product and its sum with a bias, or a sum and its quotient, two such roundings add at most
        γ₂(stored + e).
        """
        inside = self.sum_gamma(terms + EXTRA) * size
        if stored is None:
            outside = self.gamma(3) * (size + inside)
        else:
            outside = self.gamma(2) * (torch.minimum(at_most(stored), size) + inside)
        return self.safe(inside + outside + 4 * (terms + EXTRA) * self.smallest, size)

    def rounded(self, size: Tensor, roundings: int = 1) -> Tensor:
        """Bounds on the error of results of absolute value ≤ ``size`` after this number of roundings to the format."""
        return self.safe(self.gamma(roundings) * size + 4 * self.smallest, size)

    def function(self, size: Tensor) -> Tensor:
        """Bounds on the error of a library function whose error is relative to ``size``."""
        return self.safe(self.library * size + 4 * self.smallest, size)

    def safe(self, error: Tensor, size: Tensor) -> Tensor:
        """The error; ∞ if it is NaN, or if intermediate results of this size could overflow."""
        return at_most(torch.where(size <= self.largest, error, math.inf))

    def cast(self, constant: Tensor | float) -> Tensor:
        """|fl(c) − c| for constants, entry by entry; ∞ if c is too large for the format.

        Constants in ``computed`` have their own bounds. Entries that the format cannot represent may have been rounded
        through float32, which adds 2⁻²³|c|.
        """
        exact = torch.as_tensor(constant, dtype=torch.float64).detach()
        if (known := self.computed.error_of(exact)) is not None:
            return known
        rounded = exact.to(self.dtype).double()
        error = torch.where(rounded == exact, 0.0, (rounded - exact).abs() + 2.0**-23 * exact.abs() + 2.0**-149)
        flushed = (exact != 0) & (exact.abs() < torch.finfo(self.dtype).smallest_normal)
        return at_most(torch.where(flushed, error + self.smallest, error))

    def entry(self, images: Tensor, radius: Tensor) -> Tensor:
        """The ℓ2 distance by which rounding the pixels can move an image in [0, 1] within ``radius``, shape (N,)."""
        pixels = images.reshape(len(images), -1)
        root = math.sqrt(pixels.shape[1])
        norm = (l2_norm(pixels, 1) + radius).clamp_max(root)
        return (norm * self.unit + root * self.smallest) * OWN_ROUNDING


# The arithmetic of the certifier itself; the network in it is the one in real arithmetic, without casts.
REAL = Format(torch.float64, torch.float64)


Address = tuple[int, int, tuple[tuple[int, ...], ...]]


def address(constant: Tensor) -> Address:
    """Identifies a tensor among all tensors in memory, up to the shape if it is contiguous."""
    form = () if constant.is_contiguous() else (tuple(constant.shape), constant.stride())
    return constant.data_ptr(), constant.numel(), form


def _gamma(n: int, unit: float) -> float:
    """γ_n = nu/(1 − nu), which bounds the relative error of n successive roundings; ∞ if nu ≥ ½.

    Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., lemma 3.1.
    """
    return n * unit / (1 - n * unit) if n * unit < 0.5 else math.inf
