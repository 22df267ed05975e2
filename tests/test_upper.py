"""Upper bounds as numbers, against exact rational arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipcert.numerics import INFINITE, Upper, root_sum_squares

TIGHT = Fraction(1, 10**20)
numbers = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
chains = st.lists(st.tuples(st.sampled_from("+*/r"), positive), min_size=1, max_size=12)


def exact(upper: Upper) -> Fraction:
    return Fraction(upper._value)


def just_above(upper: Upper, truth: Fraction) -> None:
    assert truth <= exact(upper) <= truth * (1 + TIGHT)


@given(numbers, numbers)
def test_sum_and_product(a: float, b: float) -> None:
    x, y = Fraction(a), Fraction(b)
    just_above(Upper(a) + b, exact(Upper(a)) + exact(Upper(b)))
    just_above(Upper(a) + Upper(b), x + y)
    just_above(a + Upper(b), x + y)
    just_above(Upper(a) * b, x * y)
    just_above(a * Upper(b), x * y)


@given(numbers, positive)
def test_quotient(a: float, b: float) -> None:
    just_above(Upper(a) / b, Fraction(a) / Fraction(b))


@given(numbers)
def test_square_root(a: float) -> None:
    root = exact(Upper(a).sqrt())
    assert root**2 >= Fraction(a)
    assert root**2 <= Fraction(a) * (1 + TIGHT)


@given(numbers, st.integers(0, 6))
def test_power(a: float, n: int) -> None:
    just_above(Upper(a) ** n, Fraction(a) ** n)


@given(numbers)
def test_of_a_float_and_back(a: float) -> None:
    assert Fraction(a) <= exact(Upper(a)) <= Fraction(a) * (1 + TIGHT)
    back = float(Upper(a))
    assert a <= back <= math.nextafter(a, math.inf)


@given(positive, chains)
def test_to_a_float_is_the_next_one(start: float, chain: list[tuple[str, float]]) -> None:
    upper = Upper(start)
    for operation, operand in chain:
        upper = {"+": upper + operand, "*": upper * operand, "/": upper / operand, "r": upper.sqrt()}[operation]
    number, truth = float(upper), exact(upper)
    if math.isinf(number):
        assert truth > Fraction(math.nextafter(math.inf, 0))
    else:
        assert Fraction(number) >= truth
        assert number == 0 or Fraction(math.nextafter(number, 0)) < truth


@given(positive, chains)
def test_chains_stay_above_and_tight(start: float, chain: list[tuple[str, float]]) -> None:
    """Without roots, which are not rational, the exact value of a chain is known."""
    upper, truth = Upper(start), Fraction(start)
    for operation, operand in chain:
        if operation == "r":
            continue
        upper = {"+": upper + operand, "*": upper * operand, "/": upper / operand}[operation]
        other = Fraction(operand)
        truth = {"+": truth + other, "*": truth * other, "/": truth / other}[operation]
    just_above(upper, truth)


@given(st.lists(numbers, max_size=6))
def test_root_sum_squares(parts: list[float]) -> None:
    truth = sum((Fraction(part) ** 2 for part in parts), Fraction(0))
    assert truth <= exact(root_sum_squares(*parts)) ** 2 <= truth * (1 + TIGHT)


@given(numbers, numbers)
def test_order(a: float, b: float) -> None:
    assert (Upper(a) < Upper(b)) == (exact(Upper(a)) < exact(Upper(b)))
    assert (Upper(a) <= b) == (Upper(b) >= a)
    assert (Upper(a) > b) == (Upper(b) < a)
    assert max(Upper(a), Upper(b)) >= min(Upper(a), Upper(b))
    assert Upper(a) == Upper(a)
    assert hash(Upper(a)) == hash(Upper(a))


def test_a_number_of_many_digits_is_rounded_up() -> None:
    third = Decimal("0." + "3" * 60)
    assert exact(Upper(third)) > Fraction(third)
    assert exact(Upper(2**200 + 1)) >= 2**200 + 1


def test_no_overflow_and_no_underflow() -> None:
    huge = Upper(1.0)
    for _ in range(5000):
        huge = huge * 2.0**1000
    assert huge.finite
    assert math.isinf(float(huge))
    assert huge.log10 == pytest.approx(5e6 * math.log10(2))
    tiny = Upper(1.0)
    for _ in range(5000):
        tiny = tiny * 2.0**-1000
    assert tiny > 0
    assert float(tiny) == 5e-324
    assert float(huge * tiny) == pytest.approx(1, abs=1e-15)
    assert float(huge * tiny) >= 1


def test_infinity_and_zero() -> None:
    assert not INFINITE.finite
    assert float(INFINITE) == math.inf
    assert not (INFINITE + 1).finite
    assert not (INFINITE * 2).finite
    assert not (INFINITE / 3).finite
    assert INFINITE.sqrt() == INFINITE
    assert INFINITE.log10 == math.inf
    assert INFINITE * 0 == 0, "what is constant stays constant"
    assert Upper(0) * INFINITE == 0
    assert Upper(0).sqrt() == 0
    assert Upper(0).log10 == -math.inf
    assert float(Upper(0)) == 0.0
    assert Upper(math.inf) == INFINITE


@pytest.mark.parametrize("wrong", [-1.0, -5e-324, math.nan, -math.inf, Decimal("NaN")])
def test_what_is_no_bound(wrong: float) -> None:
    with pytest.raises(ValueError, match="upper bound must be"):
        Upper(wrong)
    with pytest.raises(ValueError, match="upper bound must be"):
        Upper(1) + wrong


@pytest.mark.parametrize("divisor", [0.0, -2.0])
def test_division_by_what_is_not_positive(divisor: float) -> None:
    with pytest.raises(ValueError, match="divided by a positive number"):
        Upper(1) / divisor
