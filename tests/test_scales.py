"""Bounds hold at any scale: norms in numerics against exact arithmetic, and networks whose squares leave float64."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from truth import Forward, holds_or_refused

import lipcert
from lipcert.bounds import _global
from lipcert.certifier import METHODS
from lipcert.errors import InputError
from lipcert.norms import _operator, _scale
from lipcert.numerics import computed_l2_norm, l2_norm, over, root_of_squares, sum_squares, times, unit_vectors

EXPONENTS = (-1060, -600, -520, -300, 0, 300, 480, 520, 1000)


def numbers(*shape: int, exponent: int = 0) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return drawn * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_norms_are_upper_bounds_at_every_scale(exponent):
    rows = numbers(5, 40, exponent=exponent)
    rows[0], rows[1, 1:] = 0.0, rows[1, 1:] * 2.0**-400
    for row, bound, near in zip(rows, l2_norm(rows, 1), computed_l2_norm(rows, 1), strict=True):
        exact = sum(Fraction(entry) ** 2 for entry in row.tolist())
        assert Fraction(bound.item()) ** 2 >= exact
        assert (exact == 0) == (bound == 0)
        if exact and exponent > -1000:
            assert abs(Fraction(near.item()) ** 2 / exact - 1) < 56 * 2.0**-52
            assert Fraction(bound.item()) ** 2 <= exact * (1 + 130 * Fraction(2) ** -53)
    assert torch.equal(l2_norm(rows, 1, keepdim=True)[:, 0], l2_norm(rows, 1))
    assert bool((sum_squares(rows, 1)[1:] > 0).all())
    if exponent > -1000:
        torch.testing.assert_close(l2_norm(unit_vectors(rows), 1)[1:], torch.ones(4).double())


def test_norms_without_entries_or_of_numbers_that_are_not_finite():
    assert l2_norm(torch.zeros(3, 0), 1).tolist() == [0, 0, 0]
    assert l2_norm(torch.zeros(0, 3), 1).shape == (0,)
    assert l2_norm(torch.tensor([math.nan, 1.0])) == math.inf
    assert l2_norm(torch.tensor([[math.inf, 1.0], [0.0, 0.0]]), 1).tolist() == [math.inf, 0]
    assert l2_norm(torch.full((2, 3, 4), 1e-200, dtype=torch.float64), (1, 2)).tolist() == pytest.approx(
        [12**0.5 * 1e-200] * 2
    )


def test_products_and_quotients_round_up_and_vanish_for_zeros_alone():
    first = torch.tensor([0.0, 1e-200, 3.0, math.inf, math.nan, math.nan], dtype=torch.float64)
    second = torch.tensor([math.inf, 1e-200, 7.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    product = times(first, second)
    assert product[0] == 0
    assert 0 < product[1] < 1e-300
    assert 21 <= product[2] < 21.001
    assert product[3:].tolist() == [math.inf, 0, math.inf]
    quotient = over(
        torch.tensor([0.0, 1.0, 1e-300, 1.0, 1.0], dtype=torch.float64),
        torch.tensor([0.0, 0.0, 1e100, 3.0, -1.0], dtype=torch.float64),
    )
    assert quotient[0] == 0
    assert 0 < quotient[2] < 1e-300
    assert Fraction(quotient[3].item()) >= Fraction(1, 3)
    assert quotient[[1, 4]].tolist() == [math.inf, math.inf]


@pytest.mark.parametrize("exponent", [-500, 0, 500])
def test_roots_of_products_of_squares(exponent):
    rows, entries = numbers(2, 6), numbers(6, 5, exponent=exponent)
    rows[0, 3:], entries[:3, 0], entries[:, 4] = 0.0, 0.0, 0.0  # row 0 and column 0 share no entry
    entries[:, 1] *= 2.0**-450  # below the largest by more than the root of what float64 holds
    found = root_of_squares(torch.matmul, rows, entries) * (1 + 1e-12)
    for i, row in enumerate(rows.tolist()):
        for j, column in enumerate(entries.mT.tolist()):
            exact = sum((Fraction(a) * Fraction(b)) ** 2 for a, b in zip(row, column, strict=True))
            assert Fraction(found[i, j].item()) ** 2 >= exact
            assert (found[i, j] == 0) == (exact == 0)


def scaled(power: int, sign: int, operation) -> Forward:
    """Logits of ordinary size behind values that are 2^power times as large, and a difference that changes sign."""
    return Forward(
        lambda x: torch.cat(
            [sign * operation(x.flatten(1) * 2.0**power) * 2.0**-power, x[:, 0, 0, :1] * 0 + sign * 0.2], 1
        )
    )


def behind(power: int, activation) -> nn.Module:
    """A layer, times 2^power, and the layer after it, times 2^−power."""
    first, last = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
    first.weight.data, first.bias.data = numbers(6, 4) * 2.0**power, torch.zeros(6).double()
    last.weight.data, last.bias.data = numbers(3, 6).flip(1) * 2.0**-power, torch.zeros(3).double()
    return nn.Sequential(nn.Flatten(), first, activation, last)


# The value that underflows is as large as the constant beside it.
UNSEEN = {
    "a fourth power": lambda z: (z * 2.0**-300) ** 4 * 2.0**600 * 2.0**600,
    "a product": lambda z: (z * 2.0**-560) * (z * 2.0**-560) * 2.0**560 * 2.0**560,
    "leaky_relu": lambda z: -F.leaky_relu(z * -(2.0**600), 2.0**-1000) * 2.0**400,
    "sum of squares": lambda z: ((z * 2.0**-550) ** 2).sum(1, keepdim=True) * 2.0**550 * 2.0**550,
}
DIRECTIONS = {
    "largest of pairs": lambda z: torch.maximum(z[:, :1], z[:, 1:2]),
    "absolute value": lambda z: z[:, :1].abs(),
    "norm": lambda z: z.norm(dim=1, keepdim=True),
}


@pytest.fixture
def unlimited(monkeypatch):
    """Bounds without the check of scales, which refuses these networks: the arithmetic has to hold as well."""
    monkeypatch.setattr(_global, "check_scales", lambda *_: None)


@pytest.mark.parametrize("name", UNSEEN)
def test_values_that_underflow_take_their_margin(name, unlimited):
    def forward(x):
        z = x.flatten(1)[:, :1]
        return torch.cat([z * 0 + 0.1, UNSEEN[name](z)], 1)

    image = torch.full((1, 1, 1, 2), 0.75).double()
    model = lipcert.load(Forward(forward).double(), mean=(0.0,), std=(1.0,), input_size=(1, 1, 2))
    for method in METHODS:
        found = lipcert.certify(model, image, eps=1e-3, method=method)
        assert found.radius.item() == 0 or found.predicted.item() == 1


@pytest.mark.thinned(4)
@pytest.mark.parametrize("power", [-550, -400, 400, 500])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Hardtanh(-(2.0**600), 2.0**600)])
def test_layers_at_other_scales(power, activation, unlimited):
    images = torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    holds_or_refused(behind(power, activation), (1, 2, 2), images=images)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", DIRECTIONS)
def test_directions_that_underflow(name, sign, unlimited):
    images = torch.tensor([[[[0.6, 0.55], [0.61, 0.56]]], [[[0.2, 0.15], [0.1, 0.1]]]]).double()
    holds_or_refused(scaled(560, sign, DIRECTIONS[name]), (1, 2, 2), images=images)


@pytest.mark.parametrize("power", [-250, 250])
def test_numbers_out_of_range_are_refused_in_one_line(power):
    for network in (behind(power, nn.ReLU()), scaled(power, 1, DIRECTIONS["norm"])):
        model = lipcert.load(network.double(), mean=(0.0,), std=(1.0,), input_size=(1, 2, 2))
        with pytest.raises(InputError, match=r"a constant of about 1e-?7\d; bounds are proved .* 1e-60 and 1e60"):
            lipcert.certify(model, torch.rand(1, 1, 2, 2), eps=0.1)


def test_values_out_of_range_are_refused_where_no_constant_is():
    def forward(x):
        z = x.flatten(1)
        for _ in range(3):
            z = z * 2.0**-100
        for _ in range(3):
            z = z * 2.0**100
        return z

    model = lipcert.load(Forward(forward).double(), mean=(0.0,), std=(1.0,), input_size=(1, 2, 2))
    with pytest.raises(InputError, match="mul at .* has a value of about 1e-60"):
        lipcert.certify(model, torch.rand(1, 1, 2, 2), eps=0.1)


def test_the_check_computes_no_norm_that_the_bound_leaves_out(monkeypatch):
    """Batch norm is folded into the convolution, whose own norm nobody reads."""
    monkeypatch.setattr(_scale, "_KEPT", 0)
    asked, honest = [], _operator.zero_padded_norm

    def counted(*args):
        asked.append(1)
        return honest(*args)

    monkeypatch.setattr(_operator, "zero_padded_norm", counted)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    lipcert.lipschitz(network.eval(), (3, 4, 4))
    assert len(asked) == 1


def test_a_small_constant_is_refused_where_no_value_shows_it():
    def forward(x):
        z = x.flatten(1)
        for _ in range(3):
            z = z * 2.0**-100 + 1
        return z

    model = lipcert.load(Forward(forward).double(), mean=(0.0,), std=(1.0,), input_size=(1, 2, 2))
    with pytest.raises(InputError, match=r"a Lipschitz constant of about 1e-90; bounds are proved"):
        lipcert.certify(model, torch.rand(1, 1, 2, 2), eps=0.1)


def with_positions(smallest: float, how: str) -> Forward:
    """A network with a softmax of positions, of which one entry is ``smallest``, as in ConViT."""
    scores = torch.full((4, 4), math.log(smallest)).double().fill_diagonal_(0.0)

    def forward(x, weight):
        z = F.linear(x.flatten(2), weight)
        positions = scores.softmax(-1)
        mixed = positions @ z if how == "mixes tokens" else (z @ z.mT).softmax(-1) + positions
        if how == "scales tokens":
            mixed = z * positions
        return mixed.flatten(1)[:, :3] * torch.tensor([1.0, 0.5, 0.2]).double()

    return Forward(forward, weight=numbers(4, 4))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("smallest", [1e-80, 1e-158, 1e-300])
@pytest.mark.parametrize("how", ["mixes tokens", "scales tokens", "is added to scores"])
def test_entries_far_below_the_largest_of_their_tensor(smallest, how):
    found = holds_or_refused(with_positions(smallest, how), (4, 2, 2))
    for method in ("global", "gloro", "anchored"):
        assert not isinstance(found[method], str), found[method]
        assert (found[method] > 0).any()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("bend", [lambda z: z, torch.tanh, torch.relu])
@pytest.mark.parametrize(("small", "times"), [(1e-40, 3), (1e-80, 2), (1e-158, 1), (1e-158, 3)])
def test_what_enlarges_small_entries_has_no_radius(bend, small, times):
    """The channel of the small entries alone is read, after as many large factors as bring it back."""

    def forward(x, scale):
        z = bend(x.flatten(1)[:, :2] - torch.tensor([0.0, 0.3]).double())
        for _ in range(times):
            z = z @ scale
        z, power = z[:, 1:], -times * math.log10(small)
        for _ in range(round(power / 50)):
            z = z * 10 ** (power / round(power / 50))
        return torch.cat([5 * z, 0 * x[:, 0, 0, :1] + 0.3], 1)

    images = torch.tensor([[[[0.5, 0.3]]], [[[0.2, 0.29]]], [[[0.5, 0.35]]], [[[0.1, 0.9]]]]).double()
    net = Forward(forward, scale=torch.diag(torch.tensor([1.0, small]).double()))
    holds_or_refused(net, (1, 1, 2), images=images)


def test_convit_has_certificates():
    """The softmax of its positions has an entry of about 1e-158 beside 1."""
    model = lipcert.load("convit_tiny", pretrained=False, num_classes=3, img_size=32, embed_dim=12, num_heads=2)
    positions = model.net.blocks[0].attn.pos_proj.weight
    positions.data.mul_(180 / positions.detach().abs().max())
    assert math.isfinite(lipcert.lipschitz(model.double()).log10)
