"""Padding that repeats entries, bounded together with the convolution after it, and choices by a comparison."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipcert
from lipcert.errors import LipcertError
from lipcert.norms import Geometry, _padded, conv_norm


def drawn(number: int):
    """A convolution, its geometry and a border before it, in one or two dimensions; None where they do not fit."""
    draw = torch.Generator().manual_seed(number)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    dims, groups = whole(1, 3), whole(1, 3)
    sizes, kernel, stride, dilation = ([whole(*ends) for _ in range(dims)] for ends in ((3, 8), (1, 5), (1, 4), (1, 3)))
    mode = ("circular", "reflect", "replicate")[number % 3]
    pads = tuple((whole(0, n), whole(0, n)) for n in sizes)
    geometry = Geometry(tuple(stride), pads, tuple(dilation), groups, mode)
    if any(n < d * (k - 1) + 1 for n, d, k in zip(geometry.padded(tuple(sizes)), dilation, kernel, strict=True)):
        return None
    weight = torch.randn(3 * groups, 2, *kernel, generator=draw, dtype=torch.float64)
    return weight, tuple(sizes), geometry


def matrix_of(weight, sizes, geometry):
    inputs = weight.shape[1] * geometry.groups * math.prod(sizes)
    units = torch.eye(inputs, dtype=torch.float64).reshape(inputs, -1, *sizes)
    convolution = (F.conv1d, F.conv2d)[len(sizes) - 1]
    padded = F.pad(units, [side for pair in reversed(geometry.padding) for side in pair], geometry.mode)
    return convolution(padded, weight, None, geometry.stride, 0, geometry.dilation, geometry.groups).flatten(1)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("number", range(60))
def test_norms_are_bounds_and_those_of_whole_circles_are_exact(number, dense, monkeypatch):
    case = drawn(number)
    if case is None:
        return
    weight, sizes, geometry = case
    monkeypatch.setattr(_padded, "_DENSE_SIDE", 512 if dense else 0)
    matrix = matrix_of(weight, sizes, geometry)
    truth = float(torch.linalg.matrix_norm(matrix, 2))
    found = float(conv_norm(weight, sizes, **vars(geometry)))
    assert found >= truth
    whole = all(n % s == 0 for n, s in zip(sizes, geometry.stride, strict=True))
    circle = geometry.mode == "circular" and whole and matrix.shape[1] == weight.shape[0] * math.prod(
        n // s for n, s in zip(sizes, geometry.stride, strict=True)
    )  # fmt: skip
    if circle or (dense and len(matrix) <= 512 and weight.shape[0] * math.prod(geometry.padded(sizes)) <= 2048):
        assert found <= truth * (1 + 1e-4)


def orthogonal(mode: str) -> nn.Conv2d:
    """A convolution that shifts each channel and then turns the channels: orthogonal on a torus."""
    conv = nn.Conv2d(12, 12, 3, padding=1, padding_mode=mode, bias=False)
    turn = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(1)))[0]
    with torch.no_grad():
        conv.weight.zero_()
        for i in range(12):
            conv.weight[:, i, i % 3, i // 3 % 3] = turn[:, i]
    return conv


def test_orthogonal_circular_convolutions_keep_the_constant_1():
    head = nn.Linear(12 * 64, 3, bias=False)
    nn.init.orthogonal_(head.weight)
    net = nn.Sequential(nn.PixelUnshuffle(2), *(orthogonal("circular") for _ in range(6)), nn.Flatten(), head)
    model = lipcert.load(net, mean=(0,) * 3, std=(1,) * 3, input_size=(3, 16, 16))
    assert 1 <= lipcert.lipschitz(model).value < 1.001
    scaled = nn.Sequential(orthogonal("circular"), nn.BatchNorm2d(12), nn.Flatten(), nn.Linear(12 * 64, 3)).eval()
    scaled[1].running_var.fill_(4.0)
    nn.init.orthogonal_(scaled[3].weight)
    model = lipcert.load(
        nn.Sequential(nn.PixelUnshuffle(2), *scaled), mean=(0,) * 3, std=(1,) * 3, input_size=(3, 16, 16)
    )
    assert lipcert.lipschitz(model).value == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_borders_that_hold_little_weight_cost_little(mode):
    weight = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    weight[..., 1, 1] = torch.eye(2)
    weight[..., 0, 0] = 0.01 * torch.eye(2)
    assert Geometry.of((3, 3), padding=1, mode=mode).uses((40, 40)) == 4
    assert float(conv_norm(weight, (40, 40), padding=1, mode=mode)) < 1.04  # and not 2.02


LINES = {
    "leaky": (lambda x: torch.where(x > 0, x, 0.1 * x), 1.0),
    "leaky, steep": (lambda x: torch.where(x >= 0, x, 3 * x), 3.0),
    "leaky, turned": (lambda x: torch.where(x < 0, x, 0.1 * x), 1.0),
    "method": (lambda x: x.where(x > 0, 0.3 * x), 1.0),
    "absolute": (lambda x: torch.where(x > 0, x, -x), 1.0),
    "relu": (lambda x: torch.where(x <= 0, torch.zeros_like(x), x), 1.0),
    "mask": (lambda x: x * (x > 0), 1.0),
    "cast mask": (lambda x: x * (x > 0).float(), 1.0),
    "filled": (lambda x: x.masked_fill(x < 0, 0.0), 1.0),
    "from below": (lambda x: torch.where(x > 0.25, x, 0.25), 1.0),
    "from above": (lambda x: torch.where(x > 0.25, torch.full_like(x, 0.25), x), 1.0),
}


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def network(function):
    net = nn.Sequential(nn.Flatten(), Function(function), nn.Linear(12, 2))
    nn.init.orthogonal_(net[2].weight)
    return lipcert.load(net, mean=(0.5,) * 3, std=(1,) * 3, input_size=(3, 2, 2))


@pytest.mark.parametrize("name", LINES)
def test_choices_between_lines_that_meet_are_activations(name):
    function, slope = LINES[name]
    model = network(function)
    assert lipcert.lipschitz(model).value == pytest.approx(slope, rel=1e-4)
    images = torch.rand(3, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    assert (lipcert.certify(model, images, eps=0.01, method="anchored").radius >= 0).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0.1, x, 0.2 * x),
        lambda x: torch.where(x > 0, x, 1.0),
        lambda x: torch.where(x > 0, x, 0.1 - 0.1 * x),
        lambda x: (x > 0) * 1.0 + x,
        lambda x: x * (x > 0.1),
        lambda x: torch.where(x.flip(1) > 0, x, 0.1 * x),
        lambda x: torch.where(x > x.mean(1, keepdim=True), x, 0.1 * x),
    ],
)
def test_choices_that_jump_are_refused(function):
    with pytest.raises(LipcertError, match="gt"):
        lipcert.lipschitz(network(function))


class Householder(nn.Module):
    """The activation of SOC and deel-torchlip, in their spellings and in wrong ones."""

    def __init__(self, spelling="where", shape=(6, 1, 1)):
        super().__init__()
        self.spelling = spelling
        self.angle = nn.Parameter(torch.linspace(-3, 3, 6).reshape(shape))

    def forward(self, z):
        spelling, angle = self.spelling, self.angle
        x, y = z.split(z.shape[1] // 2, 1) if "slices" not in spelling else (z[:, :6], z[:, 6:])
        s = x * torch.sin(angle / 2) - y * torch.cos(angle / 2)
        turned = 1.001 * angle if spelling == "another angle" else angle
        a, b = x * torch.cos(turned) + y * torch.sin(angle), x * torch.sin(angle) - y * torch.cos(angle)
        limit = 0.1 if spelling == "another limit" else 0
        if spelling == "products":
            return torch.cat([x * (s <= 0) + a * (s > 0), y * (s <= 0) + b * (s > 0)], dim=1)
        if spelling == "both masks hold at 0":
            return torch.cat([x * (s <= 0) + a * (s >= 0), y * (s <= 0) + b * (s >= 0)], dim=1)
        if spelling == "two selectors":
            return torch.cat([torch.where(s <= 0, x, a), torch.where(x - y <= 0, y, b)], dim=1)
        if spelling == "halves swapped":
            return torch.cat([torch.where(s <= 0, y, b), torch.where(s <= 0, x, a)], dim=1)
        return torch.cat([torch.where(s > limit, a, x), torch.where(s <= limit, y, b)], dim=1)


def with_householder(spelling, dims=4):
    activation = Householder(spelling, (6, 1, 1) if dims == 4 else (6,))
    parts = [nn.PixelUnshuffle(2), activation] if dims == 4 else [nn.PixelUnshuffle(2), nn.Flatten(), activation]
    net = nn.Sequential(*parts, nn.Flatten(), nn.Linear(12, 3))
    nn.init.orthogonal_(net[-1].weight)
    return lipcert.load(net, mean=(0.5,) * 3, std=(1,) * 3, input_size=(3, 2, 2))


@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize("spelling", ["where", "slices", "products"])
def test_householder_activations_keep_distances(spelling, dims):
    model = with_householder(spelling, dims).double()
    assert lipcert.lipschitz(model).value == pytest.approx(1, rel=1e-4)
    assert lipcert.lipschitz(with_householder(spelling, dims)).value == pytest.approx(1, rel=1e-4)
    images = torch.rand(200, 3, 2, 2, generator=torch.Generator().manual_seed(0)).double()
    moved = images + 0.2 * torch.randn(200, 3, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    change = (model(moved) - model(images)).norm(dim=1)
    assert (change <= (moved - images).flatten(1).norm(dim=1) * (1 + 1e-9)).all()
    certificates = lipcert.certify(model, images[:4], eps=0.01, method="anchored", attack="pgd")
    assert (certificates.radius > 0).all()


@pytest.mark.parametrize(
    "spelling", ["another angle", "another limit", "both masks hold at 0", "two selectors", "halves swapped"]
)
def test_reflections_that_jump_are_refused(spelling):
    with pytest.raises(LipcertError, match=r"\b(le|gt|ge)\b"):
        lipcert.lipschitz(with_householder(spelling))
