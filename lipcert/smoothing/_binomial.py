"""Lower confidence bounds on a binomial probability, rigorous through decimals with directed rounding.

Both bounds are the smallest p that a test of "the probability is p" does not reject. The statistic that the tests
compare with α increases with p below the observed share. So every p that is rejected with upward rounding lies below
the exact bound. Bisection may stop anywhere, and no error analysis of a quantile function is needed. SciPy's quantiles
come without such a proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from decimal import MAX_EMAX, MIN_EMIN, ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import lru_cache

UP = Context(prec=28, rounding=ROUND_CEILING, Emax=MAX_EMAX, Emin=MIN_EMIN)
DOWN = Context(prec=28, rounding=ROUND_FLOOR, Emax=MAX_EMAX, Emin=MIN_EMIN)

_ONE = Decimal(1)
# After a term this small relative to the sum, a geometric series bounds the rest.
_SMALL = Decimal("1e-25")


def clopper_pearson(successes: int, samples: int, alpha: float) -> float:
    """A lower bound on p from n independent draws with k successes; too large with probability at most α.

    It is the p at which n draws have k or more successes with probability α, rounded down. The bound exceeds a p only
    if P_p(X ≥ k) ≤ α. It is non-decreasing in k, so it exceeds the true p only if k lies in an upper tail of
    probability at most α.

    Source: Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial",
    Biometrika 1934; one-sided, as in Cohen, Rosenfeld and Kolter, "Certified adversarial robustness via randomized
    smoothing", ICML 2019.

    Args:
        successes: k, from 0 to n.
        samples: n, at least 1.
        alpha: α in (0, 1).

    Returns:
        The bound, in [0, 1).
    """
    return _largest(lambda p: tail(successes, samples, p) <= alpha, successes, samples)


def robbins(successes: int, samples: int, alpha: float, start: float = 0.0) -> float:
    """A lower bound on p that holds for all numbers of draws simultaneously, except with probability at most α.

    So drawing may stop at any time for any reason, and the bound at that time is valid.

    Proof. With S of t draws, let f(q) = q^S (1 − q)^(t−S), and M_t(p) = ∫ₚ¹ f(q) dq / ((1 − p) f(p)): the likelihood of
    the draws with q uniform on [p, 1], divided by that with p. For q ≥ p ≥ p′ a draw X multiplies the ratio of q and p
    by (q/p)^X ((1−q)/(1−p))^(1−X), whose mean p′ q/p + (1−p′)(1−q)/(1−p) increases with p′ and is 1 for p′ = p. So
    M_t(p) is a supermartingale of mean at most 1 for every true probability p′ ≤ p, and by Ville's inequality
    P(M_t(p) ≥ 1/α for some t) ≤ α. Say that p is rejected where M_t(p) ≥ 1/α.

    If p is rejected, every smaller p is. For p ≥ S/t, f decreases beyond p, so M_t(p) ≤ 1, and p is not rejected. For
    p < S/t, (1 − p) d log M_t/dp = 1 − 1/M_t − (S − t p)/p. Here 1 − 1/M_t ≤ log M_t ≤ t KL(S/t, p), since no q gives
    a larger ratio than S/t does, and KL(S/t, p) ≤ (S/t − p)²/(p (1 − p)) ≤ (S/t − p)/p, since S/t ≤ 1. So the
    derivative is at most 0. Hence a bound above the true probability p′ means that p′ itself was rejected, at some t,
    which has probability at most α.

    Source: Robbins, "Statistical methods related to the law of the iterated logarithm", Annals of Mathematical
    Statistics 1970, whose mixture is over all of [0, 1]; Ville 1939.

    Args:
        successes: S_t.
        samples: t, at least 1.
        alpha: α in (0, 1).
        start: a p that is known to lie below the bound; the bracket begins there.

    Returns:
        The bound, in [0, 1).
    """
    return _largest(lambda p: rejects(successes, samples, p, alpha), successes, samples, start)


@lru_cache(maxsize=4096)
def rejects(successes: int, samples: int, p: float, alpha: float) -> bool:
    """Whether the confidence sequence of :func:`robbins` excludes p and all below; False if undecided by rounding.

    M_t(p) ≥ 1/α is (t + 1)(1 − p) P(X_t = S) ≤ α P(X_(t+1) ≤ S), X_n the successes of n draws with probability p: the
    integral is a beta function times the probability of a beta variable, which is that of X_(t+1).
    """
    if successes <= samples * p:
        return False
    point = UP.multiply(probability(successes, samples, p), UP.subtract(_ONE, Decimal(p)))
    below = DOWN.subtract(_ONE, tail(successes + 1, samples + 1, p))
    return UP.multiply(Decimal(samples + 1), point) <= DOWN.multiply(Decimal(alpha), below)


def posterior_above(successes: int, samples: int, p: float) -> float:
    """The posterior probability that a probability with a uniform prior is above p, after S of t draws; not a bound.

    It is that of at most S successes in t + 1 draws with probability p.
    """
    if successes + 1 > (samples + 1) * p:
        return 1 - float(tail(successes + 1, samples + 1, p))
    return float(tail(samples + 1 - successes, samples + 1, 1 - p))


def probability(successes: int, samples: int, p: float) -> Decimal:
    """P(X = k) for n draws with probability p each, rounded up."""
    hits = _power(UP.plus(Decimal(p)), successes)
    misses = _power(UP.subtract(_ONE, Decimal(p)), samples - successes)
    return UP.multiply(UP.multiply(_choose(samples, successes), hits), misses)


def tail(successes: int, samples: int, p: float) -> Decimal:
    """P(X ≥ k) for n draws with probability p each, rounded up; 1 if k is at most the mean.

    P(X = k + i) is P(X = k) times the product of (n − k − j)/(k + j + 1) · p/(1 − p) over j < i. These factors decrease
    in j and are below 1 for k ≥ n p.
    """
    if not p:
        return _ONE if not successes else Decimal(0)
    if successes <= samples * p:
        return _ONE
    odds = UP.divide(UP.plus(Decimal(p)), DOWN.subtract(_ONE, Decimal(p)))
    factors = (
        UP.divide(UP.multiply(odds, Decimal(samples - above)), Decimal(above + 1))
        for above in range(successes, samples)
    )
    return min(_ONE, UP.multiply(series(_ONE, factors), probability(successes, samples, p)))


def series(first: Decimal, factors: Iterable[Decimal]) -> Decimal:
    """The sum of a term and its products with the first, the first two, … of decreasing factors, rounded up.

    Once the next factor r is below 1, the rest after a term is at most term · r/(1 − r).
    """
    total = term = first
    for factor in factors:
        if term <= _SMALL * total and factor < _ONE:
            return UP.add(total, UP.divide(UP.multiply(term, factor), DOWN.subtract(_ONE, factor)))
        term = UP.multiply(term, factor)
        total = UP.add(total, term)
    return total


def _largest(rejected: Callable[[float], bool], successes: int, samples: int, start: float = 0.0) -> float:
    """The largest rejected p below the observed share, rounded down; ``start`` if no larger one is rejected."""
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
