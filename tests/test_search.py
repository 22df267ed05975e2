"""Searches for the largest valid radius."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipcert.certifier._search import search, search_each, search_least


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHAPES = {
    "linear": lambda eps, root: root - eps,
    "cubic": lambda eps, root: 1 - (eps / root) ** 3,
    "steep": lambda eps, root: 1 - (eps / root) ** 40,
    "step": lambda eps, root: torch.where(eps <= root, 1.0, -1.0),
    "cut off": lambda eps, root: torch.where(eps <= root, 3 * root - eps, -1.0),
    "infinite": lambda eps, root: torch.where(eps <= root, root, -math.inf),
    "nan": lambda eps, root: torch.where(eps <= root, root - eps / 2, math.nan),
    "flat": lambda eps, root: (root - eps).sign() * (root - eps).abs() ** 5,
}


@given(st.lists(st.floats(-11.0, 2.0), min_size=1, max_size=4), st.sampled_from(sorted(SHAPES)))
def test_a_search_ends_below_the_root_and_near_it(places, shape):
    """From guesses up to 11 orders of magnitude away; every result has been tried."""
    root = 10.0 ** torch.tensor(places, dtype=torch.float64)
    tried = []

    def left(eps):
        tried.append(eps)
        return SHAPES[shape](eps, root)

    found = search(left, torch.ones_like(root))
    held = torch.stack(tried)
    assert bool(((held == found) & (torch.stack([SHAPES[shape](eps, root) for eps in tried]) > 0)).any(0).all())
    assert bool((found <= root).all())
    assert bool((found >= root / 1.0002).all())
    alone = [
        search(lambda eps, r=root[i : i + 1]: SHAPES[shape](eps, r), torch.ones(1).double()) for i in range(len(root))
    ]
    assert torch.equal(found, torch.cat(alone))


def test_a_search_takes_few_evaluations():
    calls = 0

    def left(eps):
        nonlocal calls
        calls += 1
        return 1 - eps - eps**2 - 5 * eps**3

    search(left, torch.ones(1, dtype=torch.float64))
    assert calls <= 10


def test_a_search_says_0_where_nothing_holds():
    never = lambda eps: torch.full_like(eps, -1.0)  # noqa: E731
    assert search(never, torch.tensor([1.0, 0.0])).tolist() == [0, 0]
    least = search_least(lambda eps: never(eps)[:, None], lambda eps, which: never(eps), torch.ones(2))
    assert least.tolist() == [0, 0]


def test_far_above_its_guess_a_search_ends_at_a_radius_that_holds():
    found = search(lambda eps: torch.ones_like(eps), torch.ones(1, dtype=torch.float64))
    assert 100 <= found.item() < math.inf


@given(st.integers(0, 10**6))
def test_the_least_of_many_functions_decides(seed):
    """Whatever function seems the least where the search begins."""
    roots, bends = seeded(3, 7, seed=seed).abs() + 0.05, 4 * seeded(3, 7, seed=seed + 1).abs()

    def every(eps):
        return (roots - eps[:, None]) * (1 + bends * eps[:, None])

    def one(eps, which):
        return every(eps).gather(1, which[:, None])[:, 0]

    guess = torch.ones(3, dtype=torch.float64)
    found, least = search_least(every, one, guess), roots.amin(1)
    assert bool((every(found) > 0).all())
    assert bool((found >= least / 1.0002).all())

    def alone(i):
        part = roots[i : i + 1], bends[i : i + 1]
        values = lambda eps: (part[0] - eps[:, None]) * (1 + part[1] * eps[:, None])  # noqa: E731
        return search_least(values, lambda eps, which: values(eps).gather(1, which[:, None])[:, 0], guess[:1])

    assert torch.equal(found, torch.cat([alone(i) for i in range(3)]))


def test_radii_of_a_search_do_not_depend_on_the_other_images():
    gaps = seeded(4, 5).abs() * 10.0 ** torch.arange(-2, 2)[:, None]

    def found(some):
        return search_each(lambda eps: some - (2 * eps + eps.square())[:, None], some / 2)

    assert torch.equal(found(gaps), torch.cat([found(gaps[i : i + 1]) for i in range(4)]))


@pytest.mark.parametrize("classes", [1, 9, 300])
def test_many_radii_from_one_search(classes):
    """As from a search each, within what is promised, and with far fewer evaluations."""
    gaps = seeded(3, classes).abs() * 10.0 ** torch.arange(-2, 1)[:, None]
    gaps[1, 0] = 0.0
    calls = 0

    def left(eps):
        nonlocal calls
        calls += 1
        return gaps - torch.where(eps > 3, math.inf, 2 * eps + eps.square())[:, None]

    found = search_each(left, gaps / 2)
    alone = torch.stack([search(lambda eps, j=j: left(eps)[:, j], gaps[:, j] / 2) for j in range(classes)], 1)
    calls = 0
    search_each(left, gaps / 2)
    assert calls < 120 + classes
    assert ((gaps - 2 * found - found**2 > 0) | (found == 0)).all()
    assert ((found > 0) == (gaps > 0)).all()
    least = torch.where(gaps > 0, alone, math.inf).amin(1, keepdim=True)
    assert (found <= alone * 1.0011).all()
    assert (found >= alone / 1.21).all()
    assert (found >= torch.where(alone < 3 * least, alone / 1.021, 0)).all()
    assert (found >= torch.where(alone <= least, alone / 1.0021, 0)).all()
