"""Searches for the largest valid radius."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import seeded

from lipcert.certifier._search import search, search_each, search_least

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
    never = lambda eps, *_: torch.full_like(eps, -1.0)  # noqa: E731
    guess, once = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert search(never, guess).tolist() == [0, 0]
    probes = torch.tensor([False, True, False])
    assert search_least(never, once, torch.ones(2, 3).double(), guess, math.inf * once, probes).tolist() == [0, 0]


def test_far_above_its_guess_a_search_ends_at_a_radius_that_holds():
    found = search(lambda eps: torch.ones_like(eps), torch.ones(1, dtype=torch.float64))
    assert 100 <= found.item() < math.inf


@pytest.mark.parametrize("first", [0.02, 0.8, 30.0])
@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_the_least_of_many_functions_decides(first, seed):
    """Wherever the search begins, whichever functions are probes, and where predictions are far off or NaN."""
    roots, powers = seeded(4, 7, seed=seed).abs() + 0.05, 1 + 3 * seeded(4, 7, seed=seed + 1).abs()
    upto, probes = torch.full((4,), math.inf, dtype=torch.float64), torch.arange(7) % 3 == seed % 3
    upto[3] = roots[3].amin() / 2

    def margins(eps, images, functions):
        root = roots[images, functions]
        smooth = 1 - (eps / root) ** powers[images, functions]
        value = torch.where(functions == 2, torch.where(eps < root, 1.0, math.nan), smooth)
        return torch.where(functions == 4, torch.where(eps > 1.5 * root, -math.inf, smooth), value)

    def found(some):
        def those(eps, images, functions):
            asked.append((eps, images))
            return margins(eps, some[images], functions)

        asked = []
        once = torch.ones(len(some), dtype=torch.float64)
        radius = search_least(those, once, 0.3 / roots[some], first * once, upto[some], probes)
        assert all(bool((eps <= upto[some][images]).all()) for eps, images in asked)
        return radius

    least, everyone = torch.minimum(roots.amin(1), upto), torch.arange(4)
    radius = found(everyone)
    assert bool((radius <= least).all())
    assert bool((radius >= least / 1.0003).all())
    alone = torch.cat([found(everyone[i : i + 1]) for i in everyone])
    torch.testing.assert_close(radius, alone, rtol=1e-12, atol=0)


def test_few_evaluations_settle_many_functions():
    """Most functions are evaluated once, or twice if they are probes."""
    rows = 0
    places = torch.linspace(1, 3, 15, dtype=torch.float64)

    def margins(eps, images, functions):
        nonlocal rows
        rows += len(eps)
        return 1 - eps / 3 - (eps / places[functions]).pow(2.2)

    once = torch.ones(1, dtype=torch.float64)
    search_least(margins, once, once[:, None].expand(1, 15) / 3, 1.5 * once, 9 * once, torch.arange(15) % 5 == 2)
    assert rows <= 30


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
