"""Facts about values of a network, and how operations transform them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lipcert.graph import Node

HALF = Fraction(1, 2)
# Relative tolerance for √½ and √(2/π): slightly more than their rounding error.
ROUNDED = Fraction(1, 2**50)


@dataclass(frozen=True)
class Polynomial:
    """Elementwise Σ c_k xᵏ. In all facts, ``through`` holds the operations between x and the value."""

    x: Node
    c: tuple[Fraction, ...]
    through: frozenset[Node] = frozenset()

    def scaled(self, factor: Fraction) -> Polynomial:
        return replace(self, c=tuple(factor * c for c in self.c))

    def shifted(self, by: Fraction) -> Polynomial:
        return replace(self, c=(self.c[0] + by, *self.c[1:]))

    def power(self, exponent: Fraction) -> Polynomial | None:
        if exponent not in (2, 3) or (len(self.c) - 1) * exponent > 3:
            return None
        result = self
        for _ in range(int(exponent) - 1):
            result = replace(self, c=times(result.c, self.c))
        return result

    def only(self, degree: int) -> Fraction | None:
        """The coefficient of this degree, if it is positive and all others are 0; otherwise None."""
        others = [c for k, c in enumerate(self.c) if k != degree]
        return self.c[degree] if len(self.c) > degree and self.c[degree] > 0 and not any(others) else None


@dataclass(frozen=True)
class Mean:
    """factor · (mean of x over axes); ``keepdim`` says whether the axes remain with size 1."""

    x: Node
    axes: tuple[int, ...]
    factor: Fraction
    keepdim: bool
    through: frozenset[Node] = frozenset()

    def scaled(self, factor: Fraction) -> Mean:
        return replace(self, factor=factor * self.factor)


@dataclass(frozen=True)
class MinusMean:
    """factor · (x minus its mean over axes)."""

    x: Node
    axes: tuple[int, ...]
    factor: Fraction
    through: frozenset[Node] = frozenset()

    def scaled(self, factor: Fraction) -> MinusMean:
        return replace(self, factor=factor * self.factor)


@dataclass(frozen=True)
class Energy:
    """k · max(αS + β, low)^e with k, α > 0, β ≥ 0; S as in the package docstring. ``keepdim`` as for :class:`Mean`."""

    x: Node
    axes: tuple[int, ...]
    centred: bool
    keepdim: bool
    alpha: Fraction
    beta: Fraction = Fraction(0)
    low: Fraction | None = None
    k: Fraction = Fraction(1)
    e: Fraction = Fraction(1)
    through: frozenset[Node] = frozenset()

    def scaled(self, factor: Fraction) -> Energy | None:
        if factor <= 0:
            return None
        if self.e != 1:
            return replace(self, k=factor * self.k)
        low = None if self.low is None else factor * self.low
        return replace(self, alpha=factor * self.alpha, beta=factor * self.beta, low=low)

    def shifted(self, by: Fraction) -> Energy | None:
        fits = self.e == 1 and self.low is None and self.beta + by >= 0
        return replace(self, beta=self.beta + by) if fits else None

    def power(self, exponent: Fraction) -> Energy | None:
        """(y^a)^b = y^(ab) for y ≥ 0, if the resulting exponent is ±½ or ±1."""
        e = self.e * exponent
        if abs(e) not in (HALF, 1) or (self.k != 1 and exponent.denominator != 1):
            return None
        powered = replace(self, k=self.k**exponent.numerator if self.k != 1 else self.k, e=e)
        return replace(powered, k=Fraction(1)).scaled(powered.k) if e == 1 else powered

    def at_least(self, bound: Fraction) -> Energy | None:
        """max(k y^e, bound) = k max(y, (bound/k)^(1/e))^e for e > 0."""
        if self.low is not None or self.e <= 0 or bound <= 0:
            return None
        return replace(self, low=(bound / self.k) ** (1 / self.e).numerator)


@dataclass(frozen=True)
class Function:
    """Elementwise a + b·g(Σ c_k xᵏ)."""

    g: str
    x: Node
    c: tuple[Fraction, ...]
    a: Fraction = Fraction(0)
    b: Fraction = Fraction(1)
    through: frozenset[Node] = frozenset()

    def scaled(self, factor: Fraction) -> Function:
        return replace(self, a=factor * self.a, b=factor * self.b)

    def shifted(self, by: Fraction) -> Function:
        return replace(self, a=self.a + by)

    def power(self, exponent: Fraction) -> Function | None:
        """1/(1 + exp(−p)) = sigmoid(p)."""
        if exponent != -1 or self.g != "exp" or self.a != self.b or not self.a:
            return None
        return replace(self, g="sigmoid", c=tuple(-c for c in self.c), a=Fraction(0), b=1 / self.a)


@dataclass(frozen=True)
class ScaledActivation:
    """factor · activation(x), for the activation called ``name``."""

    name: str
    x: Node
    factor: Fraction
    through: frozenset[Node] = frozenset()

    def scaled(self, factor: Fraction) -> ScaledActivation:
        return replace(self, factor=factor * self.factor)


@dataclass(frozen=True)
class Total:
    """(Σ exp(z) over an axis)^e, with x the node exp(z)."""

    x: Node
    axes: tuple[int, ...]
    keepdim: bool
    e: int = 1
    through: frozenset[Node] = frozenset()

    def power(self, exponent: Fraction) -> Total | None:
        return replace(self, e=-self.e) if exponent == -1 else None


Fact = Polynomial | Mean | MinusMean | Energy | Function | ScaledActivation | Total


def times(p: tuple[Fraction, ...], q: tuple[Fraction, ...]) -> tuple[Fraction, ...]:
    product = [Fraction(0)] * (len(p) + len(q) - 1)
    for i, a in enumerate(p):
        for j, b in enumerate(q):
            product[i + j] += a * b
    return tuple(product)


def number_of(constant: Any) -> Fraction | None:
    """The value of a constant with a single finite entry; None for everything else."""
    if isinstance(constant, Tensor):
        if constant.numel() != 1 or constant.is_meta or not constant.is_floating_point():
            return None
        constant = constant.item()
    if isinstance(constant, bool) or not isinstance(constant, (int, float)) or not math.isfinite(constant):
        return None
    return Fraction(constant)


def rounded_down(number: Fraction) -> float:
    """A float64 number close to this one and at most equal to it."""
    near = float(number)
    return near if Fraction(near) <= number else math.nextafter(near, -math.inf)


def root_down(number: Fraction) -> float:
    return math.nextafter(math.sqrt(rounded_down(number)), 0.0)


def root_up(number: Fraction) -> float:
    return 1.0 if number == 1 else math.nextafter(math.sqrt(-rounded_down(-number)), math.inf)


def filled(number: float, entries: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant vector, rounded up to the type."""
    vector = torch.full((entries,), number, dtype=dtype, device=device)
    return vector if vector[0].item() >= number else torch.nextafter(vector, torch.full_like(vector, math.inf))
