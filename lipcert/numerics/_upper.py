"""Upper bounds as numbers: non-negative, rounded up by every operation, without overflow.

A product of layer norms over a deep network easily exceeds 1e308, and a float64 product may round down. Decimals with
directed rounding solve both problems: 25 digits, a huge range of exponents, every result rounded towards +infinity.
There are only a few such scalars per operation of a network, so speed does not matter.
"""

from __future__ import annotations

import math
from decimal import MAX_EMAX, MIN_EMIN, ROUND_CEILING, Context, Decimal
from typing import Any, Union

_UP = Context(prec=25, rounding=ROUND_CEILING, Emax=MAX_EMAX, Emin=MIN_EMIN)

Number = Union["Upper", float, int]


class Upper:
    """A number x ≥ 0 (or +inf) that stands for "at most x".

    ``+``, ``*``, ``max`` and :meth:`sqrt` round up, so an expression of upper bounds is an upper bound. The divisor of
    a division must be an exact positive number. Floats and ints count with their exact values.
    """

    __slots__ = ("_value",)
    _value: Decimal

    def __new__(cls, value: Any = 0) -> Upper:
        return value if isinstance(value, Upper) else super().__new__(cls)

    def __init__(self, value: Number | Decimal):
        if isinstance(value, Upper):
            return
        exact = value if isinstance(value, Decimal) else Decimal(value)
        if exact.is_nan() or exact < 0:
            raise ValueError(f"an upper bound must be a number ≥ 0, got {value}")
        self._value = _UP.plus(exact)

    def __add__(self, other: Number) -> Upper:
        return Upper(_UP.add(self._value, Upper(other)._value))

    def __mul__(self, other: Number) -> Upper:
        a, b = self._value, Upper(other)._value
        if not a or not b:  # 0 · ∞ = 0: a constant map stays constant
            return Upper(0)
        return Upper(_UP.multiply(a, b))

    def __truediv__(self, divisor: float | int) -> Upper:
        exact = Decimal(divisor)
        if not exact > 0:
            raise ValueError(f"an upper bound can be divided by a positive number only, got {divisor}")
        return Upper(_UP.divide(self._value, exact))

    __radd__ = __add__
    __rmul__ = __mul__

    def __pow__(self, exponent: int) -> Upper:
        result = Upper(1)
        for _ in range(exponent):
            result = result * self
        return result

    def sqrt(self) -> Upper:
        """The square root, rounded up (decimal's sqrt rounds to nearest, so the next larger number is taken)."""
        if not self._value or self._value.is_infinite():
            return self
        return Upper(_UP.next_plus(self._value.sqrt(_UP)))

    @property
    def finite(self) -> bool:
        return self._value.is_finite()

    @property
    def log10(self) -> float:
        """Decimal logarithm for display, to float64 accuracy; -inf for 0."""
        if not self._value:
            return -math.inf
        if self._value.is_infinite():
            return math.inf
        return float(self._value.log10(Context(prec=25, Emax=MAX_EMAX, Emin=MIN_EMIN)))

    def __float__(self) -> float:
        """The smallest float64 that is not below the bound; +inf if there is none."""
        if self._value.is_infinite():
            return math.inf
        nearest = float(self._value)
        return nearest if math.isinf(nearest) or Decimal(nearest) >= self._value else math.nextafter(nearest, math.inf)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Upper, int, float)) and self._value == Upper(other)._value

    def __lt__(self, other: Number) -> bool:
        return self._value < Upper(other)._value

    def __le__(self, other: Number) -> bool:
        return self._value <= Upper(other)._value

    def __gt__(self, other: Number) -> bool:
        return self._value > Upper(other)._value

    def __ge__(self, other: Number) -> bool:
        return self._value >= Upper(other)._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"Upper({self._value:.6g})"


INFINITE = Upper(Decimal("Infinity"))


def root_sum_squares(*parts: Number) -> Upper:
    """√(Σ x²), rounded up: the norm of several stacked blocks."""
    total = Upper(0)
    for part in parts:
        total = total + Upper(part) * part
    return total.sqrt()
