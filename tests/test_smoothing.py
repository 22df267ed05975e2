"""Randomized smoothing: its bounds against exact arithmetic, its noise, its coverage, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import read_rows, read_summary, refused, run, timeless
from modules import Function
from scipy import stats
from torch import Tensor, nn

import lipcert
from benchmarks.draws import simulated
from lipcert.errors import InputError, LipcertError
from lipcert.inputs.artifact import buffers_hash, weights_hash
from lipcert.inputs.data import open_images
from lipcert.results import read_run
from lipcert.results.progress import certify_in_memory
from lipcert.smoothing import (
    Denoised,
    Smoothing,
    _choice,
    _noise,
    choose_sigma,
    clopper_pearson,
    from_lattice,
    noise,
    quantile,
    radius,
    robbins,
    to_lattice,
)
from lipcert.smoothing._binomial import posterior_above, probability, rejects, tail
from lipcert.smoothing._lattice import cells
from lipcert.smoothing._normal import cdf, needed
from lipcert.smoothing._votes import Plan
from lipcert.training import noise_loss

EPS = 36 / 255


def exact_probability(k: int, n: int, p: float) -> Fraction:
    return math.comb(n, k) * Fraction(p) ** k * (1 - Fraction(p)) ** (n - k)


@pytest.mark.parametrize(("k", "n", "p"), [(0, 5, 0.3), (5, 5, 0.3), (9, 10, 0.5), (70, 100, 0.6), (60, 100, 0.6)])
def test_binomial_probabilities_are_rounded_up_from_exact_ones(k: int, n: int, p: float) -> None:
    point = exact_probability(k, n, p)
    assert 0 <= Fraction(probability(k, n, p)) - point <= point / 10**24
    upper = sum(exact_probability(i, n, p) for i in range(k, n + 1))
    if k > n * p:
        assert 0 <= Fraction(tail(k, n, p)) - upper <= upper / 10**16


@pytest.mark.parametrize("n", [10, 37, 1000, 100_000])
@pytest.mark.parametrize("alpha", [1e-9, 1e-3, 0.2])
def test_clopper_pearson_is_the_exact_bound_from_below(n: int, alpha: float) -> None:
    for k in sorted({1, n // 2, n // 2 + 1, (9 * n) // 10, n - 1, n}):
        exact = float(stats.beta.ppf(alpha, k, n - k + 1))
        assert exact - 2e-13 <= clopper_pearson(k, n, alpha) <= exact * (1 + 1e-12)
    assert clopper_pearson(0, n, alpha) == 0


@pytest.mark.parametrize(("k", "n", "alpha"), [(8, 10, 0.05), (55, 60, 1e-3), (60, 60, 1e-3), (3, 60, 0.3)])
def test_what_is_claimed_satisfies_the_inequality_exactly(k: int, n: int, alpha: float) -> None:
    fixed, always = clopper_pearson(k, n, alpha), robbins(k, n, alpha)
    assert sum(exact_probability(i, n, fixed) for i in range(k, n + 1)) <= Fraction(alpha)

    def odds(p: float) -> Fraction:
        """1/M_n(p), exactly."""
        below = sum(exact_probability(i, n + 1, p) for i in range(k + 1))
        return (n + 1) * (1 - Fraction(p)) * exact_probability(k, n, p) / below

    assert odds(always) <= Fraction(alpha)
    assert odds(math.nextafter(always, 1)) > Fraction(alpha) * (1 - Fraction(1, 10**12))
    assert 0 < always < fixed < k / n or k == n


@pytest.mark.parametrize("p", [0.5, 0.71386, 0.9])
def test_the_confidence_sequence_covers_at_all_times_at_once(p: float) -> None:
    """The probability that it ever exceeds the truth, exactly: by going through all counts of 250 draws."""
    alpha, horizon = 0.2, 250
    alive, wrong = {0: 1.0}, 0.0
    for t in range(1, horizon + 1):
        after: dict[int, float] = {}
        for count, weight in alive.items():
            after[count] = after.get(count, 0.0) + weight * (1 - p)
            after[count + 1] = after.get(count + 1, 0.0) + weight * p
        alive = {}
        for count, weight in after.items():
            if count > t * p and rejects(count, t, p, alpha):
                wrong += weight
            else:
                alive[count] = weight
    assert 0.001 < wrong <= alpha
    assert sum(alive.values()) + wrong == pytest.approx(1)


@pytest.mark.parametrize("alpha", [1e-3, 0.3, 0.7])
def test_what_is_below_a_rejected_probability_is_rejected(alpha: float) -> None:
    for t in (1, 2, 7, 40, 300):
        for s in sorted({0, 1, t // 2, (9 * t) // 10, t}):
            found = [rejects(s, t, p, alpha) for p in np.linspace(0, 1, 101).tolist()]
            assert found == sorted(found, reverse=True)


def test_the_share_above_a_probability_is_that_of_a_uniform_prior() -> None:
    for count, draws, p in ((0, 16, 0.9), (16, 16, 0.9), (3, 8, 0.78), (700, 1000, 0.78), (790, 1000, 0.78)):
        exact = stats.beta.sf(p, count + 1, draws - count + 1)
        assert posterior_above(count, draws, p) == pytest.approx(exact, rel=1e-9)


def false_ones(images: int, plan: Plan, share: float) -> int:
    """How many of simulated images are certified, where the class has this share of all draws."""
    random, shares = np.random.default_rng(0), np.array([share, 1 - share])
    votes = (simulated(plan, shares, random) for _ in range(images))
    return sum(one.chosen == 0 and plan.radius(one.count, one.samples) > plan.eps for one in votes)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("futility", "alpha"), [(0.05, 1e-3), (0.0, 1e-3), (0.0, 0.05)])
@pytest.mark.parametrize(
    ("eps", "images"), [(EPS, 800), (0.5, 800), pytest.param(EPS, 200_000, marks=pytest.mark.slow)]
)
def test_images_at_the_true_radius_are_certified_no_more_often_than_promised(
    eps: float, images: int, futility: float, alpha: float
) -> None:
    """The true radius is a hair smaller than ε, so every certificate is false."""
    sigma = 0.72 * eps
    plan = Plan(eps, sigma, 400, alpha, all_samples=False, futility=futility)
    false = false_ones(images, plan, stats.norm.cdf(eps / sigma) - 1e-9)
    print(f"eps {eps:g}, futility {futility}, alpha {alpha}: {false} of {images} false, ", end="")
    interval = stats.binomtest(false, images).proportion_ci(0.99)
    print(f"99 % interval {interval.low:.2e} to {interval.high:.2e}")
    assert interval.low <= alpha


def test_draws_end_where_no_certificate_can_come_of_them() -> None:
    plan = Plan(EPS, 0.18, 1000, 1e-3, all_samples=False, futility=0.05)
    assert not plan.ends(8, 8)
    assert plan.ends(3, 8), "a share above the threshold is improbable"
    assert not replace(plan, futility=0.0).ends(3, 8)
    few = replace(plan, samples=40, futility=0.0)
    assert few.ends(30, 38), "all of the draws that remain would not do"
    assert not few.certifies(40, 40) or not few.ends(8, 8)
    assert plan.ends(60, 60)
    assert plan.certifies(60, 60)
    assert plan.ends(800, 1000)


def test_the_normal_distribution_is_rounded_in_the_safe_direction() -> None:
    with mpmath.workdps(40):
        for z in (0.0, 1e-8, 0.3, 0.5647, 1.0, 3.7, 6.5, 8.9):
            above = mpmath.mpf(str(cdf(z))) - mpmath.ncdf(z)
            assert 0 <= above < 1e-24
        for p in (0.5000001, 0.6, 0.75, 0.9772, 0.99993, 1 - 1e-12):
            exact = mpmath.findroot(lambda x, p=p: mpmath.ncdf(x) - mpmath.mpf(p), stats.norm.ppf(p))
            assert -1e-14 <= (mpmath.mpf(quantile(p)) - exact) / exact <= 0
            assert mpmath.mpf(radius(p, 0.25)) <= exact / 4
    assert quantile(0.5) == quantile(0.1) == radius(0.4, 1.0) == 0
    assert cdf(1e9) == 1


@pytest.mark.parametrize("eps", [1e-9, EPS, 0.5, 1.0])
def test_the_probability_that_is_needed_is_enough_and_nearly_the_smallest(eps: float) -> None:
    p = needed(eps, 0.25)
    assert radius(p, 0.25) > eps
    assert radius(p - 1e-14, 0.25) <= eps
    assert needed(5.0, 0.25) == 1


def test_noise_is_a_function_of_seed_image_and_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = partial(noise, shape=(3, 5, 7), sigma=0.25)
    whole = drawn(3, 7, range(20))
    with monkeypatch.context() as patch:
        patch.setitem(_noise._AT_ONCE, "cpu", 3 * 105)  # another number at once, as on a GPU
        assert torch.equal(drawn(3, 7, range(20)), whole)
    assert torch.equal(torch.cat([drawn(3, 7, range(4)), drawn(3, 7, range(4, 20))]), whole)
    assert torch.equal(drawn(3, 7, range(11, 12)), whole[11:12])
    others = [drawn(4, 7, range(20)), drawn(3, 8, range(20)), whole.roll(1, 0)]
    assert all(abs(torch.corrcoef(torch.stack([whole.flatten(), x.flatten()]))[0, 1]) < 0.1 for x in others)
    # What was certified once is computed again from the same noise by every later version.
    assert whole[0, 0, 0, :4].tolist() == [3314, 22031, -18099, -18235]


@pytest.mark.parametrize("first", [0, 2**32 - 3, 2**40 + 5, 2**63 - 60])
@pytest.mark.parametrize("key", [(0, 0), (3, 7), (2**64 - 1, 2**63 + 12345)])
def test_a_gpu_draws_the_bits_of_numpy(key: tuple[int, int], first: int) -> None:
    expected = _noise._numpy_words(key, first, 50, torch.device("cpu"))
    assert torch.equal(_noise._words(key, first, 50, torch.device("cpu")), expected)


@pytest.mark.parametrize("sigma", [1e-6, 0.001, 0.12, 0.25, 1.0])
def test_the_table_of_the_noise_is_that_of_the_normal_distribution(sigma: float) -> None:
    table = cells(sigma, torch.device("cpu"))
    borders = table.borders[:-1].tolist()
    assert borders == sorted(borders)
    assert table.error == (len(borders) + 2) * 2.0**-62
    with mpmath.workdps(40):
        unit = mpmath.mpf(sigma) * 65280 * mpmath.sqrt(2)
        assert (len(borders) + 0.5) / (sigma * 65280) > 9
        for j in {*range(0, len(borders), max(1, len(borders) // 500)), *range(max(0, len(borders) - 5), len(borders))}:
            assert abs(mpmath.erf((j + mpmath.mpf(0.5)) / unit) * 2**63 - borders[j]) < 2
    uniform = torch.cat([table.borders, table.borders[:-1] - 1, torch.randint(0, 2**63 - 1, (5000,))])
    assert torch.equal(table.sizes(uniform), torch.bucketize(uniform, table.borders[:-1], right=True).int())


@pytest.mark.parametrize("sigma", [3e-5, 2e-4, 0.25])
def test_counts_of_noise_are_those_of_the_exact_distribution(sigma: float) -> None:
    """χ² over cells, or groups of cells, of the lattice; p-values of independent images are uniform."""
    values = []
    for image in range(20):
        drawn = noise(1, image, range(40), (1, 32, 32), sigma).flatten().numpy()
        width = max(1, round(0.2 * sigma * 65280))
        ends = width * np.arange(-15, 16) + 0.5
        shares = np.diff(stats.norm.cdf(np.array([-np.inf, *ends, np.inf]), scale=sigma * 65280))
        counts = np.histogram(drawn, np.array([-(2**31), *ends, 2**31]))[0]
        kept = shares * len(drawn) > 5
        some = [*counts[kept], counts[~kept].sum()], [*shares[kept] * len(drawn), shares[~kept].sum() * len(drawn)]
        some = [np.array(one)[np.array(some[1]) > 0] for one in some]
        values.append(stats.chisquare(some[0], some[1] * (some[0].sum() / some[1].sum())).pvalue)
    assert stats.kstest(values, "uniform").pvalue > 0.001
    assert min(values) > 1e-4


def test_images_and_the_lattice() -> None:
    eight = torch.arange(256).view(1, 1, 16, 16) / 255
    points, distances = to_lattice(torch.cat([eight, (eight.double() + 2e-8).float().clamp(max=1), eight * 0.999]))
    assert torch.equal(points[0].flatten(), 256 * torch.arange(256, dtype=torch.int32))
    assert torch.equal(points[0], points[1])
    assert distances[:2].tolist() == [0, 0]
    moved = (eight * 0.999).double() - points[2].double() / 65280
    assert abs(float(moved.norm() - distances[2])) < 1e-6
    assert distances[2] <= 16 / 65280 / 2 + 1e-12
    assert torch.equal(from_lattice(points[0]), eight[0])
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert torch.equal(from_lattice(points[0], dtype).float(), eight[0].to(dtype).float())


def test_an_image_off_the_lattice_has_a_smaller_radius() -> None:
    on = at_distances(torch.tensor([0.5]))
    off = on.clone()
    off[0, 0, 1, 1] = 0.4 / 65280  # which the network does not look at
    settings: dict[str, Any] = {"sigma": 0.25, "samples": 500, "all_samples": True}
    one, other = (Smoothing(wrapped(HalfSpace()), EPS, **settings).run(images) for images in (on, off))
    assert one.count == other.count
    on_distance = float(one.distance)
    assert float(other.distance) == pytest.approx(math.hypot(on_distance, 0.4 / 65280), rel=1e-6)
    assert float(one.radius + one.distance - other.distance - other.radius) == pytest.approx(0, abs=1e-12)
    assert other.entries(0)["distance"] == float(other.distance)


def bits(look: Callable[[Tensor, float], Tensor]) -> nn.Module:
    """A network of class 0 where it sees what only the noise around one image, black, can look like."""

    class Bits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen = look(x, 2.0**-7).flatten(1).any(1).to(x.dtype)
            return torch.stack([seen, 1 - seen], 1)

    return Bits()


READERS = {
    # Sums near 0 of a pixel s and noise are multiples of the last place of s; those with a pixel 0 are not.
    "last place": lambda x, s: (x.abs() < s / 4) & (torch.remainder(x / (s * 2.0**-24), 1) != 0),
    "parity": lambda x, s: (x.abs() < s / 4) & (torch.remainder(x / (s * 2.0**-25), 2) == 1),
    "rounded back": lambda x, s: (x.abs() < s / 4) & ((x - s) + s != x),
    "mantissa": lambda x, s: (x.abs() < s / 16) & (x.float().view(torch.int32) % 8 != 0),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_network_reads_the_image_from_the_bits_of_the_noise(name: str, dtype: torch.dtype) -> None:
    """Two images nearer to each other than a certified radius, whose smoothed classes differed with float32 noise."""
    side = 32
    images = torch.stack([torch.zeros(3, side, side), torch.full((3, side, side), 2.0**-7)])
    model = wrapped(bits(READERS[name]), (3, side, side)).to(dtype)
    found = Smoothing(model, 0.3, sigma=0.25, samples=1000, all_samples=True).run(images)
    apart = float((images[0] - images[1]).norm())
    assert found.distance.max() == 0
    assert found.predicted[0] == found.predicted[1] or found.radius.max() <= apart


class HalfSpace(nn.Module):
    """Class 0 where ⟨w, x⟩ > 0, ‖w‖ = 1. So is the smoothed classifier; p = Φ(⟨w, x⟩/σ), and the radius is ⟨w, x⟩."""

    w: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.tensor([0.6, 0.0, -0.8, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        margin = x.flatten(1) @ self.w[:, None]
        return torch.cat([margin, -margin], 1)


def wrapped(net: nn.Module, size: tuple[int, int, int] = (1, 2, 2)) -> lipcert.Model:
    return lipcert.load(net, mean=(0.0,), std=(1.0,), input_size=size)


def at_distances(distances: Tensor) -> Tensor:
    """Images of the box with so large ⟨w, x⟩, at most 0.6, shape (N, 1, 2, 2)."""
    images = torch.zeros(len(distances), 1, 2, 2)
    images[:, 0, 0, 0] = distances / 0.6
    return images


@pytest.mark.parametrize("all_samples", [True, False], ids=["fixed", "sequence"])
def test_false_radii_are_no_more_than_alpha(all_samples: bool) -> None:
    """400 classifiers whose radius is known and near ε; radii beyond the truth are no more than α = 0.1 explains."""
    distances = torch.linspace(0.6 * EPS, 1.4 * EPS, 400)
    smoothing = Smoothing(wrapped(HalfSpace()), EPS, sigma=0.25, samples=600, alpha=0.1, all_samples=all_samples)
    found = smoothing.run(at_distances(distances))
    truth = at_distances(distances)[:, 0, 0, 0].double() * 0.6
    false = int((found.radius > truth).sum())
    assert stats.binomtest(false, 400, 0.1, alternative="greater").pvalue > 0.01
    assert not all_samples or false > 20, "the bound of Clopper and Pearson is exact, and this would not test it"
    assert found.certified.double().mean() > 0.2
    assert (found.samples == 600).all() == all_samples


def test_draws_end_as_soon_as_the_verdict_is_known() -> None:
    far, near, wrong = 0.5, EPS, 0.05
    images = at_distances(torch.tensor([far, near, wrong]))
    found = Smoothing(wrapped(HalfSpace()), EPS, sigma=0.25, samples=2000).run(images)
    assert found.certified.tolist() == [True, False, False]
    assert found.samples[0] < 100
    assert 1000 < found.samples[1] < 2000, "the draws that remained could not certify it"
    assert found.samples[2] < 700
    assert found.radius[0] > EPS >= found.radius[1] > 0
    assert found.rigor == ("probabilistic(0.001)",) * 3
    whole = Smoothing(wrapped(HalfSpace()), EPS, sigma=0.25, samples=2000, all_samples=True)
    assert whole.run(images[:1]).radius[0] > found.radius[0]


def test_counts_are_those_of_the_image_alone() -> None:
    """Neither the batch of draws, nor the other images, nor their order changes a count."""
    model = lipcert.load(None)
    images = torch.rand(5, *model.input_size, generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {"sigma": 0.25, "samples": 400, "seed": 5}
    whole = Smoothing(model, EPS, **settings).run(images, indices=[3, 1, 8, 0, 2])
    for size in (1, 7):
        again = Smoothing(model, EPS, batch=size, **settings).run(images[2:4], indices=[8, 0])
        for name in ("predicted", "count", "samples", "selected", "radius"):
            assert torch.equal(getattr(again, name), getattr(whole, name)[2:4]), name
    other = Smoothing(model, EPS, **settings | {"seed": 6, "all_samples": True}).run(images)
    same = Smoothing(model, EPS, **settings | {"all_samples": True}).run(images)
    assert not torch.equal(other.count, same.count)


def test_a_draw_without_a_class_counts_for_none() -> None:
    class Broken(HalfSpace):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(x.flatten(1)[:, 3:] > 0.2, math.nan)

    settings: dict[str, Any] = {"sigma": 0.25, "samples": 3000, "all_samples": True}
    image = at_distances(torch.tensor([0.59]))
    sound, broken = (Smoothing(wrapped(net()), EPS, **settings).run(image) for net in (HalfSpace, Broken))
    assert broken.count[0] / 3000 == pytest.approx(stats.norm.cdf(0.8) * stats.norm.cdf(0.59 / 0.25), abs=0.03)
    assert broken.radius[0] < sound.radius[0]


@pytest.mark.parametrize(("dtype", "remedy"), [("float16", "; take bfloat16 or float32"), ("float32", "$")])
def test_draws_that_give_nan_are_told(dtype: str, remedy: str) -> None:
    class Large(HalfSpace):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x) * 1e4 * torch.finfo(x.dtype).max
            return logits - logits

    with pytest.warns(UserWarning, match=rf"100% of \d+ draws give NaN in {dtype}{remedy}"):
        found = Smoothing(wrapped(Large()), EPS, sigma=0.25, samples=50, dtype=dtype).run(
            at_distances(torch.tensor([0.59]))
        )
    assert bool(found.abstained.all())


def test_half_precision_is_the_classifier_that_is_smoothed() -> None:
    model = lipcert.load(None)
    found = Smoothing(model, EPS, sigma=0.25, samples=50, dtype="bfloat16").run(torch.rand(1, *model.input_size))
    assert found.dtype == "bfloat16"
    of_weights = lipcert.certify(model, torch.rand(1, *model.input_size), eps=EPS, method="smoothing", sigma=0.25)
    assert of_weights.dtype == of_weights.about["dtype"] == "real"  # as the summary and the reports say
    assert found.holds_for == "smoothed(0.25)"
    assert model.dtype == torch.float32


def test_convolutions_run_channels_last_unless_the_network_needs_others() -> None:
    formats: list[bool] = []

    class Seen(nn.Module):
        def __init__(self, flatten: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.conv, self.flatten = nn.Conv2d(3, 4, 3), flatten

        def forward(self, x: Tensor) -> Tensor:
            both = (x, self.conv.weight)
            formats.append(all(one.is_contiguous(memory_format=torch.channels_last) for one in both))
            return self.flatten(self.conv(x)).sum(2)

    def counts(flatten: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[bool]]:
        torch.manual_seed(0)
        model = lipcert.load(Seen(flatten), mean=(0.0,) * 3, std=(1.0,) * 3, input_size=(3, 6, 6))
        smoothing = Smoothing(model, EPS, sigma=0.25, samples=100, all_samples=True)
        formats.clear()
        return smoothing.run(torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))).count, [*formats]

    last, seen = counts(lambda x: x.flatten(2))
    assert seen
    assert all(seen)
    for other in (
        lambda x: x.view(len(x), -1).view(*x.shape[:2], -1),
        lambda x: x.as_strided((len(x), 4, 16), (64, 16, 1)),
        lambda x: 1e3 + 0.1 * x.as_strided((len(x), 4, 16), (64, 16, 1)),  # whose logits are close together
    ):
        plain, never = counts(other)
        assert never
        assert not any(never)
    assert torch.equal(last, plain)


def test_images_none_at_all() -> None:
    assert len(Smoothing(wrapped(HalfSpace()), EPS, sigma=1.0).run(torch.zeros(0, 1, 2, 2))) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma": None}, "needs a positive sigma"),
        ({"sigma": 0.0}, "needs a positive sigma"),
        ({"sigma": -1.0}, "needs a positive sigma"),
        ({"sigma": math.nan}, "needs a positive sigma"),
        ({"alpha": 0.0}, "alpha must be a failure probability below 0.5"),
        ({"alpha": 0.999}, "such as 0.001, not a confidence"),
        ({"alpha": 1.0}, "alpha must be a failure probability below 0.5"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"samples": 9}, "too few for any radius"),
        ({"samples": 9, "all_samples": True}, "too few for any radius"),
        ({"eps": 2.0, "sigma": 0.25}, "reach radii of"),
        ({"eps": 0.0}, "eps must be a positive number"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"batch": 0}, "number of draws at once"),
        ({"dtype": "int8"}, "there is no dtype"),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        Smoothing(wrapped(HalfSpace()), **{"eps": EPS, "sigma": 0.5, **settings})
    assert "\n" not in str(error.value)


def test_networks_that_are_no_function_of_one_image() -> None:
    class Noisy(HalfSpace):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5, training=True))

    class Mixing(HalfSpace):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0, keepdim=True))

    class Counting(HalfSpace):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) + torch.tensor([self.calls, 0.0])

    class Scaling(HalfSpace):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / x.abs().amax()

    class Slightly(HalfSpace):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1e-4 * x.mean()

    class Sharing(HalfSpace):
        """A batch is mixed, which is small beside a part that two of three logits have in common."""

        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x.float() + 2 * x.float().mean(0, keepdim=True))
            common = 1e4 + 1e3 * x.float().mean((1, 2, 3))[:, None]
            return torch.cat([logits + common, 0 * common], 1)

    class Graded(HalfSpace):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 if torch.is_grad_enabled() else -1)

    class Locked(HalfSpace):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    class Noted(HalfSpace):
        def __init__(self) -> None:
            super().__init__()
            self.noted: dict[str, Tensor] = {}
            self.register_forward_pre_hook(lambda _, images: self.noted.update(last=images[0]))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.noted["last"])

    refused = (
        (Noted(), "refer to the network itself"),
        (Noisy(), "draws random"),
        (Counting(), "changes its module: net.calls at .*remove counters"),
        (Graded(), "whether gradients"),
        (Locked(), "cannot be copied"),
    )
    for net, message in (*refused, *((net, "on the batch") for net in (Mixing(), Scaling(), Slightly(), Sharing()))):
        with pytest.raises(LipcertError, match=message):
            Smoothing(wrapped(net), EPS, sigma=0.5)


class Routed(HalfSpace):
    """Experts by the brightest row, each of which takes so many images of a batch and drops the others."""

    def forward(self, x: Tensor) -> Tensor:
        which = x.mean((1, 3)).argmax(1)
        place = F.one_hot(which, x.shape[2]).cumsum(0).gather(1, which[:, None])
        kept = place <= max(2, len(x) // 2)
        return torch.cat([0.5 * kept, 0.5 - kept.float()], 1)


def test_a_batch_that_mixes_its_images_later_is_seen_too() -> None:
    """The draws of the first images are spread over the experts, and none is dropped."""
    images = torch.full((64, 3, 4, 4), 0.5)
    images[32:, :, 2] = 1.0
    smoothing = Smoothing(wrapped(Routed(), (3, 4, 4)), EPS, sigma=0.1, batch=64, all_samples=True)
    smoothing.run(images[:32])
    with pytest.raises(LipcertError, match="on the batch"):
        smoothing.run(images[32:])


class InType(nn.Module):
    """Code that names its own type, or computes in float32 whatever its weights are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.linear = dtype, nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight.to(self.dtype)
        return F.linear(F.normalize(x.flatten(1).to(self.dtype)), F.normalize(weight))


class Halved(InType):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1).to(self.dtype))


@pytest.mark.parametrize("net", [InType(torch.float32), Halved(torch.bfloat16).bfloat16()])
def test_code_that_names_its_type_is_smoothed(net: nn.Module) -> None:
    model = lipcert.load(net.eval(), mean=(0.0,) * 3, std=(1.0,) * 3, input_size=(3, 4, 4))
    assert Smoothing(model, EPS, sigma=0.25).classes == 10


@pytest.mark.parametrize("labels", [torch.tensor([0]), torch.tensor([0, 2]), torch.tensor([0.0, 1.0])])
def test_labels_that_do_not_fit(labels: Tensor) -> None:
    with pytest.raises(InputError, match="labels must be"):
        Smoothing(wrapped(HalfSpace()), EPS, sigma=0.5).run(torch.zeros(2, 1, 2, 2), labels)


certify = partial(run, "certify", "--eps", "36/255", "--method", "smoothing")
VERIFY = ("verify", "bundled", "r.jsonl", "--all")
SMALL = ("--sigma", "0.25", "--samples", "200")


def test_rows_say_what_is_certified() -> None:
    out = certify(*SMALL, "--limit", "6", "--out", "r.jsonl").stdout
    assert "not the network itself" in out
    assert "saved" in out
    for row in read_rows():
        assert row["holds_for"] == "smoothed(0.25)"
        assert row["rigor"] == "probabilistic(0.001)"
        assert row["method"] == "smoothing"
        assert 0 <= row["count"] <= row["samples"] <= 200
        assert row["abstained"] is (row["radius"] == 0)
    summary = read_summary()
    noise = {"sigma": 0.25, "samples": 200, "alpha": 1e-3, "all_samples": False, "seed": 0}
    assert {key: summary[key] for key in noise} == noise
    assert summary["bound"] is None
    run(*VERIFY)


def test_radii_of_draws_that_end_early_have_no_median() -> None:
    """They end just above ε, whatever the model."""
    early = certify(*SMALL, "--limit", "6", "--out", "early.jsonl").stdout
    whole = certify(*SMALL, "--limit", "6", "--all-samples", "--out", "whole.jsonl").stdout
    assert ["median radius" in early, "median radius" in whole] == [False, True]
    shown = run("report", "early.jsonl", "whole.jsonl", "--json").stdout
    medians = {Path(one["results"]).name: one["median_radius"] for one in json.loads(shown)}
    assert medians["early.jsonl"] is None
    assert medians["whole.jsonl"] > EPS
    shown = run("report", "early.jsonl", "--markdown", "r.md").stdout
    assert "--all-samples may certify larger radii" in shown + Path("r.md").read_text()


def test_shards_limits_and_resumption_give_the_same_rows() -> None:
    whole = Path("whole.jsonl")
    certify(*SMALL, "--limit", "70", "--out", whole)
    for part in ("1/2", "2/2"):
        certify(*SMALL, "--limit", "70", "--out", "r.jsonl", "--shard", part)
    certify(*SMALL, "--limit", "70", "--out", "r.jsonl")
    assert timeless() == timeless(whole)
    # One that was stopped after three rows and a half.
    lines = whole.read_text().splitlines(keepends=True)
    whole.write_text("".join(lines[:3]) + lines[3][:20])
    said = certify(*SMALL, "--limit", "70", "--out", whole).stderr
    assert "after 3 images" in said or "behind 3 images" in said
    assert timeless(whole) == timeless()
    certify(*SMALL, "--limit", "70", "--out", whole, seed=1, code=2)


@pytest.fixture(scope="module")
def true_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows that verify confirms."""
    folder = tmp_path_factory.mktemp("true")
    certify(*SMALL, "--all-samples", "--limit", "2", "--out", folder / "r.jsonl")
    run("verify", "bundled", folder / "r.jsonl", "--all")
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"count": 199},
        {"radius": 0.6, "certified": True},
        {"samples": 100},
        {"seed": 4},
        {"holds_for": "smoothed(0.5)"},
        {"rigor": "deterministic"},
        {"abstained": True},
        {"rigor": "probabilistic(1e-06)"},
    ],
)
def test_a_row_that_claims_more_than_its_draws_does_not_stand(change: dict[str, Any], true_rows: Path) -> None:
    shutil.copytree(true_rows, ".", dirs_exist_ok=True)
    rows = read_rows()
    rows[0] |= change
    Path("r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert json.loads(run(*VERIFY, "--json", code=1).stdout)["refuted"] == 1


def test_reports_keep_both_kinds_apart() -> None:
    done = certify("--sigma", "0.12,0.25", "--samples", "200", "--limit", "8", "--out", "s.jsonl")
    assert "next: lipcert report s.sigma-0.12.jsonl s.sigma-0.25.jsonl --html s.html" in done.stderr
    assert "\tunder noise\t" in done.stdout
    assert "clean" not in done.stdout
    run("certify", "--eps", "36/255", "--method", "gloro", "--limit", "8", "--out", "g.jsonl")
    files = ("g.jsonl", "s.sigma-0.12.jsonl", "s.sigma-0.25.jsonl")
    assert "they are not comparable" in run("report", *files, "--markdown", "r.md", "--card", "c.md").stderr
    for name in ("r.md", "c.md"):
        text = Path(name).read_text()
        assert "nothing is certified about the network itself" in text
        assert "never add up their certificates" in text
    assert "holds_for: smoothed(0.25)" in Path("c.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs a positive sigma"),
        (("--sigma", "0"), "needs a positive sigma"),
        (("--sigma", "0.1,x"), "needs a positive sigma"),
        (("--sigma", "aut"), "needs a positive sigma, such as 0.25, or auto, got aut"),
        (("--sigma", "auto", "--limit", "120"), "needs images outside the run"),
        (("--sigma", "auto", "--limit", "117"), "at least 8, and there are 3; certify fewer with --limit"),
        (
            ("--sigma", "0.25", "--denoiser", "dtc"),
            "there is no denoiser 'dtc'; did you mean dct? There are dct, natural",
        ),
        (("--sigma", "0.25", "--alpha", "1.5"), "alpha must be a failure probability below 0.5"),
        (("--sigma", "0.25", "--samples", "8"), "too few for any radius"),
        (("--sigma", "0.25", "--attack"), "is not for method smoothing"),
        (("--sigma", "0.25", "--method", "gloro"), "--method is given 2 times"),
    ],
)
def test_commands_that_cannot_be_run(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*certify.args, *arguments, besides=("model: ", "images: "))


def test_training_under_noise_asks_for_no_eps() -> None:
    said = run("finetune", "bundled", "--data", "no", "--loss", "noise", "--sigma", "0.25", code=2).stderr
    assert "no" in said.splitlines()[-1]
    assert "eps" not in said


def test_the_loss_under_noise() -> None:
    model = wrapped(HalfSpace())
    images, labels = at_distances(torch.tensor([0.1, 0.3])), torch.tensor([0, 1])
    loss, logits = noise_loss(model, images, labels, 1e-9)
    torch.testing.assert_close(loss, F.cross_entropy(model(images), labels), rtol=0, atol=1e-6)
    torch.testing.assert_close(logits, model(images), rtol=0, atol=1e-6)
    torch.manual_seed(0)
    first = model(torch.cat([images, images]) + 0.5 * torch.randn(4, 1, 2, 2))
    torch.manual_seed(0)
    loss, logits = noise_loss(model, images, labels, 0.5, consistency=10.0)
    p = first.softmax(1).view(2, 2, 2)
    mean = p.mean(0)
    divergence = sum(F.kl_div(part.log(), mean, reduction="batchmean") for part in p) / 2
    entropy = -(mean * mean.log()).sum(1).mean()
    expected = F.cross_entropy(first, labels.repeat(2)) + 10 * divergence + 0.5 * entropy
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits, first[:2])


def test_training_under_noise_makes_certificates_of_the_smoothed_classifier() -> None:
    """Two classes that differ in brightness: a network of random weights learns them under noise."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))
    model = wrapped(net, (1, 4, 4))
    labels = torch.arange(64) % 2
    images = (0.3 + 0.4 * labels.view(-1, 1, 1, 1) + 0.1 * torch.rand(64, 1, 4, 4)).clamp(0, 1)
    lipcert.finetune(model, [(images, labels)] * 4, loss="noise", sigma=0.5, consistency=1.0, epochs=10, lr=0.03)
    assert model.recipe[-1]["sigma"] == 0.5
    found = lipcert.certify(model, images[:8], labels[:8], eps=0.3, method="smoothing", sigma=0.5, samples=2000)
    assert found.certified_accuracy == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "noise"}, "the loss noise needs sigma"),
        ({"loss": "noise", "sigma": -1.0}, "sigma must be a positive number"),
        ({"loss": "ce", "sigma": 0.25}, "the loss ce has no use for sigma"),
        ({"loss": "ce", "consistency": 1.0}, "consistency is for the loss noise"),
        ({"loss": "noise", "sigma": 0.25, "consistency": -1.0}, "consistency must be a number"),
    ],
)
def test_training_that_cannot_be_done(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lipcert.finetune(lipcert.load(None), [], **settings)


DENOISER = """
import torch
class Box(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.share = torch.nn.Parameter(torch.tensor(0.5))
    def forward(self, x):
        return self.share * x.clamp(0, 1) + (1 - self.share) * x
def number():
    return 3
def small():
    return torch.nn.AvgPool2d(2)
"""


def test_a_denoiser_in_front() -> None:
    Path("own_denoiser.py").write_text(DENOISER)
    certify(*SMALL, "--limit", "4", "--denoiser", "own_denoiser:Box", "--out", "r.jsonl")
    run(*VERIFY, "--denoiser", "own_denoiser:Box")
    run(*VERIFY, code=2)
    for name, message in (
        ("number", "must return a torch.nn.Module, got int"),
        ("small", "both must be the same"),
        ("none", "AttributeError"),
    ):
        assert message in certify(*SMALL, "--denoiser", f"own_denoiser:{name}", code=2).stderr


def test_another_denoiser_is_another_model(tmp_path: Path) -> None:
    """Rows of one are not gone on with under the other; a file, which runs no code, cannot hold a denoiser."""

    class Scale(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor))
            self.register_buffer("shift", torch.tensor(1 - factor), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * x + self.shift

    plain = lipcert.load(None)
    one, other = (Denoised(lipcert.load(None), Scale(factor)) for factor in (0.5, 0.6))
    assert len({weights_hash(model) for model in (plain, one, other)}) == 3
    assert len({buffers_hash(model) for model in (plain, one, other)}) == 3
    with pytest.raises(InputError, match="the denoiser is code of your own"):
        lipcert.save(one, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_denoised_network_is_what_is_smoothed() -> None:
    images = torch.rand(2, *lipcert.load(None).input_size)
    model = lipcert.load(None).double()
    torch.testing.assert_close(Denoised(model, Function(lambda x: x / 2))(images.double()), model(images.double() / 2))


def test_draws_are_added_to_those_of_undecided_images() -> None:
    """Those that a smaller --samples left open go on from there, and verify confirms the rows."""
    eight = partial(certify, "--sigma", "0.25", "--limit", "8", "bundled")
    eight("--samples", "40", "--out", "r.jsonl")
    first = read_rows()
    before = {row["index"]: row["samples"] for row in first if not row["certified"]}
    assert before
    assert max(before.values()) <= 40
    eight("--samples", "400", "--out", "r.jsonl")
    eight("--samples", "400", "--out", "whole.jsonl")
    after = read_run(Path("r.jsonl")).rows
    assert sorted(row["index"] for row in after) == sorted(row["index"] for row in first)
    more = {row["index"]: row["samples"] for row in after if row["index"] in before}
    assert all(more[index] >= before[index] for index in before)
    assert more != before
    exact = [{**row, "seconds": 0} for row in sorted(after, key=lambda row: row["index"])]
    whole = sorted(read_run(Path("whole.jsonl")).rows, key=lambda row: row["index"])
    undecided = [row for row in exact if row["index"] in before]
    assert undecided == [{**row, "seconds": 0} for row in whole if row["index"] in before]
    assert read_run(Path("whole.jsonl")).certified == read_run(Path("r.jsonl")).certified
    run(*VERIFY)


def test_a_time_budget_keeps_what_is_done() -> None:
    within = partial(certify, "--sigma", "0.25", "--limit", "40", "bundled", "--out", "r.jsonl", "--time-budget")
    done = within("0.001s")
    assert "the time ended before the last image" in done.stdout
    assert "; the run did not finish" in done.stdout
    assert re.search(
        r"time: stopped after 1 of 40 images, as the next may take up to \S+ s each; .*--samples", done.stderr
    )
    assert read_summary()["complete"] is False
    within("1h")
    assert read_summary()["complete"] is True
    run(*VERIFY)
    assert "takes a duration" in within("soon", code=2).stderr


def test_a_time_budget_leaves_every_image_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images with a row have the row of a run without a budget; none begins whose draws might not end in time."""
    model = lipcert.load(None)
    smoothing = Smoothing(model, 0.25, sigma=0.25, samples=400, batch=32)
    images = open_images(None, model, limit=40)
    now = 0.0
    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: now)
    drawn: list[int] = []
    classes_of = smoothing._classes

    def slow(requests: Any) -> Any:
        nonlocal now
        drawn.append(sum(len(draws) for _, _, draws in requests))
        now += drawn[-1]
        return classes_of(requests)

    monkeypatch.setattr(smoothing, "_classes", slow)
    some = certify_in_memory(smoothing, images, deadline=3000.0).rows
    assert now <= 3000
    assert 1 < len(some) < 40
    assert now > 3000 - 500, "not even one more image was sure to end"
    whole = certify_in_memory(smoothing, images).rows
    assert [{**row, "seconds": 0} for row in some] == [{**row, "seconds": 0} for row in whole[: len(some)]]


@pytest.mark.parametrize(("peak", "tried"), [(0.0, 4), (0.36, 3), (0.43, 3), (0.52, 4), (1.0, 6)])
def test_sigma_auto_tries_at_most_six_values(monkeypatch, peak: float, tried: int) -> None:
    """As the command announces."""
    monkeypatch.setattr(_choice, "_share", lambda smoothing, *_: 1 - abs(smoothing.settings.sigma - peak))
    choice = choose_sigma(wrapped(HalfSpace()), torch.rand(8, 1, 2, 2), eps=0.5)
    assert len(choice.shares) == tried


def test_sigma_auto_leaves_out_what_cannot_reach_eps() -> None:
    images, labels = torch.rand(8, 1, 2, 2), torch.zeros(8, dtype=torch.int64)
    model = wrapped(HalfSpace())
    choice = choose_sigma(model, images, labels, 0.5, samples=60)
    assert all(Smoothing(model, 0.5, sigma=sigma, samples=60).plan.reaches for sigma in choice.shares)
    with pytest.raises(InputError, match="reach radii of"):
        Smoothing(model, 0.5, sigma=0.43, samples=60)
    with pytest.raises(InputError, match="take more samples"):
        choose_sigma(model, images, labels, 0.5, samples=14)
