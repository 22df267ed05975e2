"""The standard normal distribution with directed rounding, and radii of smoothed classifiers."""

from __future__ import annotations

import math
from decimal import Decimal
from itertools import count
from statistics import NormalDist

from lipcert.smoothing._binomial import DOWN, UP, series

_ONE, _HALF = Decimal(1), Decimal("0.5")
# π from below: 1/√(2π) is then rounded up.
_PI = Decimal("3.141592653589793238462643383")
# No float64 lies between Φ of this and 1.
LARGEST = 9
_STEP = 2.0**-50


def cdf(z: float | Decimal) -> Decimal:
    """Φ(z) for z ≥ 0, rounded up.

    Φ(z) = ½ + φ(z) (z + z³/3 + z⁵/15 + …). All terms are positive; successive terms are multiplied by z²/3, z²/5, ….
    The decimal exponential is rounded to nearest, so the next larger number bounds it. A few hundred roundings of
    positive numbers to 28 digits, and the bound on the rest of the series, leave a relative error below 1e-24.
    """
    exact = Decimal(z)
    if exact < 0:
        raise ValueError(f"z must be at least 0, got {z}")
    if exact > LARGEST:
        return _ONE
    square = UP.multiply(exact, exact)
    total = series(UP.plus(exact), (UP.divide(square, Decimal(divisor)) for divisor in count(3, 2)))
    return min(_ONE, UP.add(_HALF, UP.multiply(density(exact), total)))


def density(z: Decimal) -> Decimal:
    """φ(z), rounded up; its relative error is below 1e-25 for z ≤ 9."""
    exponent = DOWN.multiply(DOWN.multiply(z, z), _HALF).copy_negate()
    return UP.divide(UP.next_plus(exponent.exp(UP)), DOWN.sqrt(DOWN.multiply(Decimal(2), _PI)))


def quantile(p: float) -> float:
    """Φ⁻¹(p), rounded down; 0 for p ≤ ½.

    The standard library's value is only a first guess. It is lowered until Φ of it, rounded up, is at most p.
    """
    if not p > 0.5:
        return 0.0
    guess, step = NormalDist().inv_cdf(p), _STEP
    while cdf(guess) > Decimal(p):
        guess = max(0.0, guess * (1 - step))
        step *= 2
    return guess


def radius(p: float, sigma: float, error: float = 0.0, distance: float = 0.0) -> float:
    """The radius σ Φ⁻¹(p) within which a class of probability at least p under noise stays the likeliest, rounded
    down.

    Source: Cohen, Rosenfeld and Kolter, ICML 2019, theorem 1 with the other classes together at most 1 − p. The class
        is the smoothed classifier's for every image whose ℓ2 distance is smaller than this.

    Args:
        p: a lower bound on the probability of the class under the noise that was drawn.
        sigma: σ.
        error: the largest difference of that probability from the one under normal noise.
        distance: of the image from the one to which noise was added, in ℓ2.
    """
    exact = DOWN.subtract(Decimal(p), Decimal(error))
    lower = float(exact)
    lower = lower if Decimal(lower) <= exact else math.nextafter(lower, 0.0)
    reached = DOWN.subtract(DOWN.multiply(Decimal(quantile(lower)), Decimal(sigma)), Decimal(distance))
    nearest = max(0.0, float(reached))
    return nearest if Decimal(nearest) <= reached else math.nextafter(nearest, 0.0)


def needed(eps: float, sigma: float, error: float = 0.0, distance: float = 0.0) -> float:
    """A p with ``radius(p, …) > eps``, within a few roundings of the smallest; 1 if there is none."""
    p = min(1.0, float(cdf(UP.divide(UP.add(Decimal(eps), Decimal(distance)), Decimal(sigma)))) + error)
    step = 2.0**-52
    while p < 1 and not radius(p, sigma, error, distance) > eps:
        p, step = min(1.0, p + step), 2 * step
    return p
