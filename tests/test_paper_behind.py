"""Equation 10 of CertViT with the ReLU behind the layer: the distance, the smallest norm, the ReLUs of a network."""

import math

import pytest
import torch
from torch import nn

import lipcert
from benchmarks.papers import behind
from benchmarks.papers.behind import Relu, constrain_behind, constrain_network, relus
from lipcert.certvit import Moments, constrain_matrix, solve
from lipcert.certvit._measures import MEASURES

WIDTH = 24


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(active, rows=400, outputs=WIDTH, seed=0):
    """A weight, rows, and the ReLU behind with a bias that lets through this share of the entries of every unit."""
    x = normal(rows, WIDTH, seed=seed) * torch.arange(1, WIDTH + 1) ** -0.5
    weight = normal(outputs, WIDTH, seed=seed + 1) / WIDTH**0.5
    bias = -(x @ weight.mT).quantile(1 - active, dim=0)
    return weight, x, Relu(torch.ones(outputs).double(), bias)


def moved(weight, pre, x, bias):
    """Σ_t d²_∂f(y_t)(W x_t − y_t) entry by entry, from the definition: the nearest t in ∂f(y) to W x + b − y."""
    squared = 0.0
    for new, old in zip((x @ weight.mT + bias).flatten().tolist(), (x @ pre.mT + bias).flatten().tolist(), strict=True):
        y = max(old, 0.0)
        z = new - y
        nearest = 0.0 if y > 0 else min(z, 0.0)  # the subdifferential is {0}, or (−∞, 0]
        squared += (z - nearest) ** 2
    return squared


def test_the_distance_is_that_of_the_paper():
    weight, x, relu = layer(0.3, rows=60)
    for seed in range(3):
        changed = weight + 0.2 * normal(*weight.shape, seed=10 + seed)
        found = relu.differences(x @ changed.mT, x @ weight.mT).square().sum()
        assert float(found) == pytest.approx(moved(changed, weight, x, relu.offset), rel=1e-12)
        assert found <= ((changed - weight) @ x.mT).square().sum()  # the plain set is a part of this one


@pytest.mark.parametrize("measure", sorted(MEASURES))
@pytest.mark.parametrize("active", [0.04, 0.5, 1.0])
def test_norms_behind_a_relu_are_lower_and_the_constraint_holds(measure, active):
    weight, x, relu = layer(active)
    moments, error = Moments.from_rows(x), 0.1
    plain = constrain_matrix(weight, moments, error, measure)
    kept = constrain_behind(weight, x, relu, error, measure)
    allowed = error**2 * float((x @ weight.mT).square().sum())
    assert moved(kept.weight, weight, x, relu.offset) <= allowed * (1 + 1e-9)
    assert kept.error_reached <= error * (1 + 1e-9)
    value = MEASURES[measure].value
    if active < 1:
        assert value(kept.weight) < 0.97 * value(plain.weight)
        # what ReLU tells apart, the plain constraint would have refused
        assert moments.energy(kept.weight - weight) > error**2 * moments.energy(weight)
    else:
        assert value(kept.weight) == pytest.approx(value(plain.weight), rel=0.02)


@pytest.mark.parametrize("active", [0.04, 0.3])
def test_no_member_of_the_set_has_a_lower_norm_than_the_gap_says(active):
    weight, x, relu = layer(active)
    solution = constrain_behind(weight, x, relu, 0.1)
    allowed = 0.01 * float((x @ weight.mT).square().sum())
    least = torch.linalg.matrix_norm(solution.weight, 2) * (1 - solution.gap)
    assert solution.gap < 0.005
    # An attack: gradient descent on the norm of another parametrisation, pulled back into the set.
    point = solution.weight.clone().requires_grad_()
    optimizer = torch.optim.Adam([point], lr=3e-3)
    for _ in range(400):
        optimizer.zero_grad()
        away = relu.differences(x @ point.mT, x @ weight.mT).square().sum()
        (torch.linalg.matrix_norm(point, 2) + 10 * (away / allowed - 1).clamp_min(0)).backward()
        optimizer.step()
        low, high = 0.0, 1.0
        for _ in range(30):  # towards W_pre, until it is a member
            middle = (low + high) / 2
            tried = point.detach() + middle * (weight - point.detach())
            inside = relu.differences(x @ tried.mT, x @ weight.mT).square().sum() <= allowed
            low, high = (low, middle) if inside else (middle, high)
        member = point.detach() + high * (weight - point.detach())
        assert torch.linalg.matrix_norm(member, 2) >= least


def test_few_rows_of_a_wide_layer_take_few_columns(monkeypatch):
    """As in a dense layer behind many pixels: 12 images, 300 inputs."""
    x, weight = normal(12, 300), normal(8, 300, seed=1) / 300**0.5
    relu = Relu(torch.ones(8).double(), -(x @ weight.mT).quantile(0.7, dim=0))
    sizes, plain = [], solve.eigenbasis
    monkeypatch.setattr(solve, "eigenbasis", lambda second: sizes.append(len(second)) or plain(second))
    short = constrain_behind(weight, x, relu, 0.1)
    assert sizes == [20]
    monkeypatch.setattr(behind, "_spanned", lambda problem: (problem, None))
    whole = constrain_behind(weight, x, relu, 0.1)
    assert sizes == [20, 300]
    assert short.norm_after == pytest.approx(whole.norm_after, rel=1e-3)
    assert short.norm_after < 0.9 * short.norm_before
    away = relu.differences(x @ short.weight.mT, x @ weight.mT).square().sum()
    assert away <= 0.01 * (x @ weight.mT).square().sum() * (1 + 1e-9)


@pytest.mark.parametrize("measure", sorted(MEASURES))
@pytest.mark.parametrize("iterations", [1, 7, 60])
def test_the_limit_of_iterations_holds_for_all_ellipsoids_together(measure, iterations):
    weight, x, relu = layer(0.3)
    found = constrain_behind(weight, x, relu, 0.1, measure, iterations=iterations)
    assert 1 <= found.iterations <= 2 * iterations
    assert found.error_reached <= 0.1 * (1 + 1e-9)
    value = MEASURES[measure].value
    assert value(found.weight) < value(weight)


@pytest.mark.parametrize("measure", sorted(MEASURES))
def test_units_that_are_never_active_may_become_zero(measure):
    x, weight = normal(50, 8), normal(6, 8, seed=1)
    offset = torch.full((6,), -100.0).double()
    found = constrain_behind(weight, x, Relu(torch.ones(6).double(), offset), 0.1, measure)
    assert found.error_reached == 0
    assert found.norm_after < 1e-6
    assert math.isfinite(found.gap)


def wrap(net, size=8):
    return lipcert.load(net, mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, size, size))


def convolutions():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.ReLU(),
        nn.Conv2d(8, 8, 1), nn.GELU(), nn.Flatten(), nn.Linear(72, 20), nn.Dropout(), nn.ReLU(), nn.Linear(20, 3),
    )  # fmt: skip
    with torch.no_grad():
        net[1].running_mean.normal_()
        net[1].running_var.uniform_(0.5, 2)
        net[1].weight.copy_(torch.tensor([1.0, -1, 0.5, -2, 0, 1, 1, 1]))
        net[1].bias.normal_()
    return wrap(net)


def pictures(count=25, size=8, seed=1):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def test_relus_are_found_through_batch_normalisation():
    model = convolutions().eval()
    modules = {path: m for path, m in model.net.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    found = relus(model, modules)
    assert set(found) == {"0", "3", "8"}
    conv, normalisation = model.net[0], model.net[1]
    z = torch.randn(2, 8, 5, 5)
    sees = normalisation(z + conv.bias[:, None, None])
    scale, offset = (value.float()[:, None, None] for value in (found["0"].scale, found["0"].offset))
    assert torch.allclose(scale * z + offset, sees, atol=1e-5)
    assert torch.equal(found["8"].offset, modules["8"].bias.double())
    with torch.no_grad():  # what ReLU makes of a member's outputs is what it made of the old ones
        before = torch.randn(50, 8).double()
        free = before - torch.rand(50, 8).double() * found["0"].scale.sign()
        off = found["0"].scale * before + found["0"].offset <= 0
        after = torch.where(off, free, before)
        assert not found["0"].differences(after, before)[:, [0, 1, 2, 3, 5, 6, 7]].any()
        assert not found["0"].differences(before + 5, before)[:, 4].any()  # a scale of 0: any output will do


class Branches(nn.Module):
    """The outputs of ``read`` are read twice, those of ``called`` come from two calls."""

    def __init__(self):
        super().__init__()
        self.read, self.called, self.head = nn.Linear(192, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x):
        first = self.read(x.flatten(1))
        return self.head(self.called(self.called(first.relu()).relu()).relu() + first)


def test_a_relu_that_does_not_hide_the_outputs_does_not_count():
    torch.manual_seed(0)
    model = wrap(Branches()).eval()
    assert relus(model, {name: getattr(model.net, name) for name in ("read", "called", "head")}) == {}
    assert constrain_network(model, [pictures()], 0.1) == ({}, {})


def test_a_network_keeps_what_its_relus_make_of_the_outputs():
    model = convolutions().eval()
    weights, behind_them = constrain_network(model, pictures(60).split(20), 0.1)
    assert set(weights) == set(behind_them) == {"0", "8"}  # 3 has groups
    images = pictures(60)
    with torch.no_grad():
        old = model.net[0](2 * images - 1)
        model.net[0].weight.copy_(weights["0"])
        new = model.net[0](2 * images - 1)
        sees = [model.net[1](z) for z in (old, new)]
        scale = (model.net[1].weight / (model.net[1].running_var + 1e-5).sqrt())[:, None, None]
        away = torch.where(sees[0] > 0, new - old, sees[1].clamp_min(0) / scale)
        away[:, 4] = 0
        energy = (old - model.net[0].bias[:, None, None]).square().sum()
    plain = convolutions()
    lipcert.constrain(plain, images, 0.1, layers="0")
    assert float((away.square().sum() / energy).sqrt()) <= 0.1 * (1 + 1e-6)  # 3,840 rows: all of them
    norms = [torch.linalg.matrix_norm(m.flatten(1), 2) for m in (weights["0"], plain.net[0].weight.detach())]
    assert norms[0] < 0.97 * norms[1]
