"""Norms of Jacobians are at least those of the dense Jacobians, whichever way they are computed."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modules import seeded
from torch import nn

import lipcert
from lipcert.bounds import margins
from lipcert.certifier import Anchored
from lipcert.norms import factor, verified_norms


def test_what_is_not_finite_has_no_norm():
    matrices = seeded(4, 60, 80)
    matrices[0, 3, 4], matrices[1, 0, 0], matrices[2] = math.nan, math.inf, 0.0
    found = verified_norms(matrices)
    assert found[:2].isinf().all()
    assert found[2] == 0
    assert found[3].isfinite()


class Sorted(nn.Module):
    """Smoothed pairs behind patches and behind a matrix, for an image and its mirror image: blocks of 2 × 2."""

    def __init__(self):
        super().__init__()
        self.patches, self.first, self.last = nn.Conv2d(2, 6, 4, stride=4), nn.Linear(24, 8), nn.Linear(8, 3)
        self.pairs, self.more = lipcert.surgery.SmoothMaxMin(0.3), lipcert.surgery.SmoothMaxMin(0.3, -1)

    def forward(self, x):
        x = self.pairs(self.patches(torch.cat((x, x.flip(-1))))).flatten(1)
        return self.last(self.more(self.first(x))).unflatten(0, (2, -1)).mean(0)


class Halves(nn.Module):
    """Patches and a perceptron for an image and its mirror image, averaged: Jacobians of two blocks each."""

    def __init__(self, normalised=False):
        super().__init__()
        self.patches = nn.Conv2d(2, 6, 4, stride=4)
        self.first, self.last = nn.Linear(24, 8), nn.Linear(8, 3)
        self.norm = lipcert.surgery.SmoothProject(24, radius=2.0) if normalised else nn.Identity()

    def forward(self, x):
        x = torch.cat((x, x.flip(-1)))
        x = self.norm(nn.functional.silu(self.patches(x)).flatten(1))
        x = self.last(nn.functional.gelu(self.first(x)))
        return x.unflatten(0, (2, -1)).mean(0)


class Stem(nn.Module):
    """Overlapping convolutions, an activation and patches, then tokens: each reads a window of 6 × 6 pixels."""

    def __init__(self, stride=4):
        super().__init__()
        self.first, self.patches = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 6, 4, stride=stride)
        self.norm, self.mix = lipcert.surgery.SmoothProject(6, radius=2.0), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.patches(nn.functional.gelu(self.first(x))).flatten(2).transpose(1, 2)
        x = x + nn.functional.silu(self.mix(self.norm(x)))
        return self.head(x.mean(1))


class Narrow(nn.Module):
    """A value that is read by patches alone, unless ``more`` reads it too, and has more entries than these."""

    def __init__(self, width=6, more=None):
        super().__init__()
        self.more = more or (lambda x: 0.0)
        self.first, self.patches = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, width, 4, stride=4)
        self.mix, self.head = nn.Linear(4 * width, 12), nn.Linear(12, 3)

    def forward(self, x):
        x = self.first(x)
        one = self.more(x)
        x = nn.functional.silu(self.patches(x)).flatten(1)
        return self.head(nn.functional.gelu(self.mix(x)) + one)


def vit(depth=1):
    model = lipcert.load(
        "vit_tiny_patch16_224", pretrained=False, mean=(0.5,), std=(0.5,), input_size=(1, 4, 8), img_size=(4, 8),
        in_chans=1, patch_size=4, embed_dim=8, depth=depth, num_heads=2, mlp_ratio=2.0, num_classes=3,
        class_token=False, global_pool="avg",
    )  # fmt: skip
    return lipcert.convert(model, norm="smooth")


BUILT = {
    "halves": lambda: lipcert.load(Halves(), mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)),
    "projected": lambda: lipcert.load(Halves(True), mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)),
    "sorted": lambda: lipcert.load(Sorted(), mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)),
    "stem": lambda: lipcert.load(Stem(), mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)),
    "vit": vit,
    "two stages": lambda: vit(2),
    "narrow": lambda: lipcert.load(Narrow(), mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)),
}
BUILT |= {
    f"read by {how} too": lambda read=read: lipcert.load(
        Narrow(more=lambda x: 30 * read(x).flatten(1)[:, :12]), mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)
    )
    for how, read in {
        "chunk": lambda x: x.chunk(2, 1)[0],
        "rows": lambda x: x[:, :, 0],
        "unbind": lambda x: x.unbind(1)[0],
    }.items()
}
# The value that is perturbed, where that is not the image.
AT = dict.fromkeys(["narrow", *(name for name in BUILT if name.startswith("read"))], "first")


def built(name):
    torch.manual_seed(0)
    return BUILT[name]().double()


def jacobian(at, a, b, number):
    """G(a → b) at one image, by rows."""
    value = at.values[a][number : number + 1]
    rest = {node: known[number : number + 1] for node, known in at.values.items()}
    found = torch.autograd.functional.jacobian(
        lambda v: at.network.graph.forward(a, v, [b], rest)[0], value, vectorize=True
    )
    return found.reshape(b.entries, a.entries)


@pytest.mark.parametrize("name", BUILT)
def test_every_norm_is_above_that_of_the_dense_jacobian(name):
    model = built(name)
    images = torch.rand(2, *model.input_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    method = Anchored(model, at=AT.get(name))
    assert (method.finder.jacobians.narrow is not None) == (name == "narrow")
    at = method(images).linearization
    norms = at.norms
    for a, b in method.plan.pairs:
        for number in range(2):
            dense = jacobian(at, a, b, number)
            exact = torch.linalg.matrix_norm(dense, 2)
            assert exact <= norms.pairs[a, b].norm[number] * (1 + 1e-14)
            if norms.pairs[a, b].largest is not None and method.plan.blocks[b][0] == 1:
                assert bool((dense.norm(dim=1) <= norms.pairs[a, b].largest[number] * (1 + 1e-12) + 1e-14).all())
            direction = seeded(a.entries, seed=number)
            assert (dense @ direction).norm() <= norms.pairs[a, b].norm[number] * direction.norm()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", BUILT)
def test_no_attack_gets_inside(name):
    model = built(name)
    images = torch.rand(3, *model.input_size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        predicted, gaps = margins(model(images))
    found = Anchored(model)(images)
    radius = found.radius(predicted, gaps)
    assert bool((radius > 0).all())
    for sign in (1.0, -1.0):
        moved = images.clone()
        for _ in range(8):
            moved.requires_grad_()
            logits = model(moved)
            rest = torch.where(torch.nn.functional.one_hot(predicted, 3).bool(), -math.inf, logits).amax(1)
            margin = logits.gather(1, predicted[:, None])[:, 0] - rest
            assert bool((margin > 0).all())
            (slope,) = torch.autograd.grad(margin.sum(), moved)
            step = slope / slope.flatten(1).norm(dim=1)[:, None, None, None]
            moved = (images - sign * radius[:, None, None, None] * step).detach()


@pytest.mark.parametrize(
    "other",
    [
        dict(stride=3), dict(padding=1), dict(stride=1), dict(dilation=2), dict(out_channels=100),
    ],
)  # fmt: skip
def test_only_narrow_patches_that_are_disjoint_stand_for_what_they_read(other):
    net = Narrow()
    net.patches = nn.Conv2d(**{**dict(in_channels=5, out_channels=6, kernel_size=4, stride=4), **other})
    net.mix = nn.LazyLinear(12)
    net(torch.zeros(1, 2, 8, 8))
    model = lipcert.load(net, mean=(0.5,) * 2, std=(0.5,) * 2, input_size=(2, 8, 8)).double()
    assert Anchored(model, at="first").finder.jacobians.narrow is None


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 5), st.integers(-290, 300), st.integers(0, 10**6))
def test_a_factor_is_at_least_the_matrix_in_every_direction(rows, columns, rank, scale, seed):
    left, right = seeded(rows, max(rank, 1), seed=seed), seeded(max(rank, 1), columns, seed=seed + 1)
    matrix = (left @ right if rank else left @ right * 0) * 10.0**scale
    lower = factor(matrix)
    assert (lower is None) == (rank == 0)
    if lower is not None:
        exact, below = ([[Fraction(x) for x in row] for row in m.tolist()] for m in (matrix, lower))
        for direction in seeded(5, rows, seed=seed + 2).tolist():
            v = [Fraction(x) for x in direction]
            sizes = [
                sum(sum(x * y for x, y in zip(v, c, strict=True)) ** 2 for c in zip(*m, strict=True))
                for m in (exact, below)
            ]
            assert sizes[0] <= sizes[1]
        assert torch.linalg.matrix_norm(lower / 10.0**scale, 2) <= (1 + 1e-6) * torch.linalg.matrix_norm(
            matrix / 10.0**scale, 2
        )


@pytest.mark.parametrize("place", [0, 1])
def test_a_convolution_of_zeros_in_the_stem(place):
    """The certificate is that without it."""
    model = built("stem")
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    nn.init.zeros_(convolutions[place].weight)
    method = Anchored(model)
    images = torch.rand(2, 2, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    radius = method(images).radius(*margins(model(images)))
    assert bool((radius > 1e10).all()) == (place == 0)  # the logits are constant
