"""Lower confidence bounds on the probability of an event that was counted, proved in decimals with directed rounding.

Both bounds are the smallest p that a test of "the probability is p" does not reject. What the tests compare with α
grows with p below the observed share, so every p that is rejected with upward rounding lies below the exact bound:
bisection may stop anywhere, and no error analysis of a quantile function is asked for. SciPy's quantiles come without
such a proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import MAX_EMAX, MIN_EMIN, ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import lru_cache

UP = Context(prec=28, rounding=ROUND_CEILING, Emax=MAX_EMAX, Emin=MIN_EMIN)
DOWN = Context(prec=28, rounding=ROUND_FLOOR, Emax=MAX_EMAX, Emin=MIN_EMIN)

_ONE = Decimal(1)
# What follows a term so much smaller than the sum is bounded by a geometric series.
_SMALL = Decimal("1e-18")


def clopper_pearson(successes: int, samples: int, alpha: float, start: float = 0.0) -> float:
    """A lower bound on p from n independent draws of which k were a success; too large with probability at most α.

    It is the p at which n draws have k or more successes with probability α, rounded down. A larger p is claimed only
    if P_p(X ≥ k) ≤ α; the bound is a non-decreasing function of k, so it exceeds the true p only if k lies in an upper
    tail of that probability.

    Source: Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial",
    Biometrika 1934; one-sided, as in Cohen, Rosenfeld and Kolter, "Certified adversarial robustness via randomized
    smoothing", ICML 2019.

    Args:
        successes: k, from 0 to n.
        samples: n, at least 1.
        alpha: α in (0, 1).
        start: a p that is known to lie below the bound; the bracket begins there.

    Returns:
        The bound, in [0, 1).
    """
    return _largest(lambda p: tail(successes, samples, p) <= alpha, successes, samples, start)


def robbins(successes: int, samples: int, alpha: float, start: float = 0.0) -> float:
    """A lower bound on p that holds at every number of draws at once; ever too large with probability at most α.

    So draws may stop for any reason, and the bound of that moment stands.

    Proof. Let B_t(p) = C(t, S_t) p^S_t (1 − p)^(t − S_t) be the probability of the number of successes among t draws,
    and M_t = 1/((t + 1) B_t(p)). Since ∫₀¹ q^S (1 − q)^(t−S) dq = 1/((t + 1) C(t, S)), M_t is the likelihood of the
    draws with q uniform on [0, 1], over that with p: a mixture of likelihood ratios, hence a martingale of mean 1 where
    p is the truth, and positive. By Ville's inequality P(M_t ≥ 1/α for some t) ≤ α. So with probability at least 1 − α
    the truth is never among those p that (t + 1) B_t(p) ≤ α rejects. Below S_t/t, B_t grows with p: if one p < S_t/t is
    rejected, so is everything below it, and the truth lies above.

    Source: Robbins, "Statistical methods related to the law of the iterated logarithm", Annals of Mathematical
    Statistics 1970; Ville 1939.

    Args:
        successes: S_t.
        samples: t, at least 1.
        alpha: α in (0, 1).
        start: a p that is known to lie below the bound; the bracket begins there.

    Returns:
        The bound, in [0, 1).
    """
    return _largest(lambda p: rejects(successes, samples, p, alpha), successes, samples, start)


def rejects(successes: int, samples: int, p: float, alpha: float) -> bool:
    """Whether the confidence sequence of :func:`robbins` has left p out, below or above it; False where unsure."""
    return UP.multiply(Decimal(samples + 1), probability(successes, samples, p)) <= Decimal(alpha)


def probability(successes: int, samples: int, p: float) -> Decimal:
    """P(X = k) for n draws with probability p each, rounded up."""
    hits = _power(UP.plus(Decimal(p)), successes)
    misses = _power(UP.subtract(_ONE, Decimal(p)), samples - successes)
    return UP.multiply(UP.multiply(_choose(samples, successes), hits), misses)


def tail(successes: int, samples: int, p: float) -> Decimal:
    """P(X ≥ k) for n draws with probability p each, rounded up; 1 where k is not above the mean.

    P(X = k + i) is P(X = k) times the product of (n − k − j)/(k + j + 1) · p/(1 − p) over j < i. Those factors fall
    with j and are below 1 for k ≥ n p, so that after any term the rest is at most term · r/(1 − r), r the next factor.
    """
    if not p:
        return _ONE if not successes else Decimal(0)
    if successes <= samples * p:
        return _ONE
    odds = UP.divide(UP.plus(Decimal(p)), DOWN.subtract(_ONE, Decimal(p)))
    total = term = _ONE
    for above in range(successes, samples):
        ratio = UP.divide(UP.multiply(odds, Decimal(samples - above)), Decimal(above + 1))
        if term < _SMALL * total and ratio < _ONE:
            total = UP.add(total, UP.divide(UP.multiply(term, ratio), DOWN.subtract(_ONE, ratio)))
            break
        term = UP.multiply(term, ratio)
        total = UP.add(total, term)
    return min(_ONE, UP.multiply(total, probability(successes, samples, p)))


def _largest(rejected: Callable[[float], bool], successes: int, samples: int, start: float) -> float:
    """The largest p below the observed share that is rejected, rounded down; ``start`` where none above it is."""
    low, high = start, successes / samples
    while low < (middle := (low + high) / 2) < high:
        if rejected(middle):
            low = middle
        else:
            high = middle
    return low


@lru_cache(maxsize=8)
def _choose(n: int, k: int) -> Decimal:
    return UP.create_decimal(math.comb(n, k))


def _power(base: Decimal, exponent: int) -> Decimal:
    """A power of a positive number by squaring, rounded up."""
    result = _ONE
    for bit in bin(exponent)[2:]:
        result = UP.multiply(result, result)
        if bit == "1":
            result = UP.multiply(result, base)
    return result
