"""Ways to a false certificate, by mechanism: each network is refused, or its radii hold against its own code."""

import contextlib
import functools
import math
import os
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from truth import Forward, holds_or_refused

import lipcert
from lipcert.bounds import Operand, kept_whole, local_error
from lipcert.certifier import METHODS, Certifier
from lipcert.errors import LipcertError, UnsupportedOperation
from lipcert.graph import Graph, alterations, capture, check_torch
from lipcert.numerics import Upper
from lipcert.roundoff import Format
from lipcert.surgery import L2Attention, L2SetAttention, L2WindowAttention, LipLinear, SmoothProject

LINEAR = ("lofast", "anchored", "staged")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


# The rows of the last matrix belong to the classes in their order, for one vector of features.


def by_token(x, w):
    return F.linear(x.tanh().reshape(-1, 4), w).reshape(-1, 4)


# Rows 0 and 1 are nearly the same. Behind a change of places they are no longer the classes 0 and 1, of which 0 leads
# by little; class 2 is far behind.
ALIKE = torch.stack([torch.zeros(6), torch.full((6,), 0.01), torch.ones(6)]).double()


def placed(place):
    centre = F.linear(torch.full((6,), 0.5).double().tanh(), ALIKE)
    order = place(torch.arange(3)[None])[0]
    bias = torch.empty(3).double().index_copy(0, order, torch.tensor([0.5, 0.0, -90.0]).double() - centre[order])
    return lambda x, w: place(F.linear(x.tanh().flatten(1), w, bias))


HEADS = {
    "one token per class": (by_token, (4, 2, 2), random(1, 4)),
    "rolled": (placed(lambda z: z.roll(1, 1)), (1, 2, 3), ALIKE),
    "flipped": (placed(lambda z: z.flip(1)), (1, 2, 3), ALIKE),
    "rolled twice and shaped": (placed(lambda z: z.unflatten(1, (3, 1)).roll(1, 1).flatten(1)), (1, 2, 3), ALIKE),
    "moved through another shape": (placed(lambda z: z.reshape(-1, 1, 3).flip(-1)[:, 0]), (1, 2, 3), ALIKE),
    "tokens side by side": (lambda x, w: F.linear(x.tanh().flatten(2), w).flatten(1), (2, 2, 2), random(3, 4)),
    "turned": (
        lambda x, w: F.linear(x.tanh().flatten(2), w).transpose(1, 2).reshape(-1, 6),
        (2, 2, 2),
        random(3, 4),
    ),
    "two groups of classes, moved": (
        lambda x, w: F.linear(x.tanh().flatten(1), w).unflatten(1, (2, 3)).movedim(1, 2).reshape(-1, 6),
        (1, 2, 3),
        random(6, 6),
    ),
    "weights that are one vector": (lambda x, w: F.linear(x.tanh().flatten(2), w), (3, 2, 2), random(4)),
    "a bias for every token": (
        lambda x, w: F.linear(F.linear(x.tanh().flatten(2), w, random(4, 4)), w).mean(1),
        (4, 2, 2),
        random(4, 4),
    ),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", HEADS)
def test_head(name):
    forward, size, weight = HEADS[name]
    holds_or_refused(Forward(forward, w=weight), size, methods=("gloro", *LINEAR))


def test_head_with_every_class_predicted():
    """The row of a class that a matrix does not have was an IndexError."""
    weight = random(1, 4)
    images = torch.zeros(4, 4, 2, 2).double()
    for i in range(4):
        images[i, i] = weight.sign().reshape(2, 2).clamp_min(0)
    found = holds_or_refused(Forward(by_token, w=weight), (4, 2, 2), methods=LINEAR, images=images)
    assert all((radius > 0).all() for radius in found.values())


def test_head_of_one_vector_counts():
    """An ordinary head's rows are still used: they cost less than √2 times its norm."""
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.1], [5.0, 3.0]])
    net = Forward(lambda x, w: F.linear(x.tanh().flatten(1), w, torch.tensor([1.0, 0.0, -9.0]).double()), w=weight)
    found = holds_or_refused(net, (1, 1, 2), methods=("lofast",))
    radius = found["lofast"]
    assert not isinstance(radius, str), radius
    assert radius[2] > 1  # at 0, where √2 ‖W‖ for every class gives at most 0.12


# L2 attention under masks: where tokens are bounded, a mask may raise the constant.


def window_attention(mask, table=3.0, heads=1):
    attention = L2WindowAttention(4, heads, window_size=(2, 2), head_dim=2, value_bias=False, proj_bias=False)
    with torch.no_grad():
        attention.relative_position_bias_table.copy_(table * random(9, heads))
        for weight in (attention.q.weight, attention.v_weight, attention.proj.weight):
            weight.copy_(random(*weight.shape))
    return attention, mask


def attending(arrange, mask):
    attention, mask = window_attention(mask)
    project = SmoothProject(4, radius=0.5)

    def forward(x, attention, project, head):
        tokens = project(4 * x.flatten(2).mT)
        tokens = arrange(attention, tokens, mask)
        return F.linear(tokens.flatten(1), head)

    return Forward(forward, attention=attention, project=project, head=random(3, 16))


BLOCK = torch.tensor([[0, 0, -100, -100], [0, 0, -100, -100], [-100, -100, 0, 0], [-100, -100, 0, 0]])[None].double()
LONELY = torch.full((1, 4, 4), -torch.inf).double().diagonal_scatter(torch.zeros(1, 4).double(), dim1=1, dim2=2)


@pytest.mark.parametrize("mask", [BLOCK, LONELY, torch.cat([0 * BLOCK, BLOCK]), torch.tril(BLOCK + 50).clamp(max=0)])
def test_masks(mask):
    """For tokens within a norm the constant with the mask covers the true one, which may be above that without it."""
    attention, _ = window_attention(mask)
    attention = attention.double()
    norm = Upper(0.5)
    claimed = attention.lipschitz((4, 4), token_norm=norm, mask=mask).value
    met = 0.0
    for seed in range(40):
        tokens = torch.randn(len(mask), 4, 4, generator=torch.Generator().manual_seed(seed)).double()
        tokens = 0.5 * tokens / tokens.norm(dim=-1, keepdim=True) * (seed % 4) / 3
        slopes = torch.autograd.functional.jacobian(lambda t: attention(t, mask), tokens)
        met = max(met, torch.linalg.matrix_norm(slopes.reshape(tokens.numel(), -1), 2).item())
    assert met <= claimed * (1 + 1e-9)


def test_a_mask_that_raises_the_constant():
    """Four tokens that look at their two neighbours average; with one of them masked, two look at the third alone."""
    mask = torch.zeros(2, 4, 4).double()
    mask[1, 3, :3] = mask[1, :3, 3] = -100
    attention = L2WindowAttention(4, 1, window_size=(2, 2), value_bias=False, proj_bias=False).double()
    with torch.no_grad():
        attention.relative_position_bias_table.zero_()[[1, 3, 5, 7]] = 5  # up, left, right and down
        for weight in (attention.q.weight, attention.v_weight, attention.proj.weight):
            weight.copy_(torch.eye(4))
    near = {"token_norm": Upper(1e-3)}
    slopes = torch.autograd.functional.jacobian(lambda t: attention(t, mask), torch.zeros(2, 4, 4).double())
    met = torch.linalg.matrix_norm(slopes.reshape(32, 32), 2).item()
    assert met > 1.3 * attention.lipschitz((4, 4), **near).value  # what was claimed with the mask too
    assert met <= attention.lipschitz((4, 4), **near, mask=mask).value
    sets = L2SetAttention(4, 1, value_bias=False, proj_bias=False).double()
    sets.load_state_dict({k: v for k, v in attention.state_dict().items() if "relative" not in k})
    assert met <= sets.lipschitz((4, 4), **near, mask=mask, shared=attention.position_bias()[None]).value


@pytest.mark.parametrize("mask", [BLOCK, LONELY])
def test_masks_in_a_network(mask):
    net = attending(lambda attention, tokens, mask: attention(tokens, mask), mask)
    holds_or_refused(net, (4, 2, 2), methods=("global", "gloro", "local"))


@pytest.mark.parametrize("mask", [BLOCK, LONELY])
def test_masks_of_sets(mask):
    attention = L2SetAttention(4, 1, head_dim=2, value_bias=False, proj_bias=False).double()
    with torch.no_grad():
        for weight in (attention.q.weight, attention.v_weight, attention.proj.weight):
            weight.copy_(random(*weight.shape))
    claimed = attention.lipschitz((4, 4), token_norm=Upper(0.5), mask=mask).value
    tokens = 0.01 * random(1, 4, 4)
    slopes = torch.autograd.functional.jacobian(lambda t: attention(t, mask=mask), tokens)
    assert torch.linalg.matrix_norm(slopes.reshape(16, 16), 2) <= claimed * (1 + 1e-9)


# Arguments under the wrong name or in the wrong place.


def deep(pool, factor=1.0):
    """Logits that differ by less than float32 rounds, behind a pooling of large numbers."""

    def forward(x, w):
        pooled = pool(factor * x).flatten(1)
        return F.linear(torch.cat([pooled, -pooled], 1), w)

    return forward


ARGUMENTS = {
    "adaptive average pooling": (deep(lambda x: F.adaptive_avg_pool2d(x, 2)), (1, 12, 12), random(3, 8)),
    "adaptive average pooling, one axis": (
        deep(lambda x: F.adaptive_avg_pool1d(x.flatten(2), 2)),
        (1, 12, 12),
        random(3, 4),
    ),
    "average pooling, a kernel of one number": (deep(lambda x: F.avg_pool2d(x, (4,))), (1, 12, 12), random(3, 18)),
    "a negative divisor": (deep(lambda x: F.avg_pool2d(x, 4, divisor_override=-3)), (1, 8, 8), random(3, 8)),
    "ceil_mode and padding": (
        deep(lambda x: F.avg_pool2d(x, 4, 3, 1, True, False)),
        (1, 8, 8),
        random(3, 18),
    ),
    "batch_norm of torch itself": (
        lambda x, w: F.linear(
            torch.batch_norm(x, w[0, :1], w[0, 1:2], w[0, 2:3], w[0, 3:4].abs(), False, 0.1, 1e-5, False).flatten(1), w
        ),
        (1, 2, 2),
        random(3, 4),
    ),
    "a quotient by names": (
        lambda x, w: F.linear(torch.div(other=x.flatten(1) + 1, input=1.0), w),
        (1, 2, 2),
        random(3, 4),
    ),
    "a quotient of two values by names": (
        lambda x, w: F.linear(torch.div(other=x.flatten(1) + 1, input=8 * x.flatten(1)), w),
        (1, 2, 2),
        random(3, 4),
    ),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", ["real", "float32"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name, dtype):
    forward, size, weight = ARGUMENTS[name]
    methods = ("gloro", "anchored") if dtype == "float32" else METHODS
    holds_or_refused(Forward(forward, w=weight), size, methods=methods, dtype=dtype)


def test_pooling_in_float32():
    """Sums of 576 pixels round by more than those of 4 do, and the deployed class is then another one."""
    size = 48

    def forward(x, w):
        return F.linear(F.adaptive_avg_pool2d(x, 2).flatten(1), w, torch.tensor([0.0, -1e-9], dtype=w.dtype))

    net = Forward(forward, w=torch.tensor([[1.0, -1, 1, -1], [1.0, -1, 1, -1]]) * 1e3)
    holds_or_refused(net, (1, size, size), methods=("gloro",), dtype="float32")
    pool = F.adaptive_avg_pool2d
    node = next(n for n in capture(Forward(lambda x: pool(x, 2)).double().eval(), random(1, 1, size, size)).nodes[1:])
    images = 1 + random(4, 1, 1, size, size).abs()
    zero = torch.zeros(4).double()
    bound = local_error(node, [Operand(images, zero, zero + math.inf)], Format.of("float32"))
    least = (size // 2) ** 2 * 2.0**-24 * images.min()
    assert (bound > least).all(), "fewer terms than the window has"


# Sums over named axes, with axes of size 1 in one tensor alone.


def over(equation, cut):
    def forward(x, w):
        a, b = cut(3 * x)
        return F.linear(torch.einsum(equation, a, b).flatten(1), w)

    return forward


def halves(x):
    return x[:, :1, :1], x[:, 1:]


EINSUMS = {
    "multi-query": (over("bhid,bhjd->bhij", lambda x: (x[:, :3, None, :2], x[:, :1])), (3, 2, 2), random(3, 12)),
    "rows of size 1": (over("bchw,bchw->bchw", lambda x: (x[:, :1], x)), (3, 2, 2), random(3, 12)),
    "a summed axis of size 1": (over("bchw,bcij->bhwij", lambda x: (x[:, :1], x)), (3, 2, 2), random(3, 16)),
    "a summed axis of size 1 on the right": (
        over("bcp,bcq->bpq", lambda x: (x.flatten(2), x.flatten(2)[:, :1])),
        (4, 2, 2),
        random(3, 16),
    ),
    "a constant of size 1": (over("bcp,cq->bpq", lambda x: (x.flatten(2), random(1, 3))), (4, 2, 2), random(3, 12)),
    "a value of size 1 and a constant": (
        over("bcp,dcq->bdpq", lambda x: (x.flatten(2)[:, :1], random(2, 4, 3))),
        (4, 2, 2),
        random(3, 24),
    ),
    "both ways": (over("bhid,bhjd->bhij", lambda x: (x[:, :1], x[:, :, :1])), (3, 2, 2), random(3, 6)),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_einsum(name):
    forward, size, weight = EINSUMS[name]
    holds_or_refused(Forward(forward, w=weight), size, methods=("global", "gloro", "local", "anchored"))


@pytest.mark.parametrize(
    ("equation", "shape", "cut"),
    [
        ("bhid,bhjd->bhij", (1, 4, 1, 2), lambda x: x[:, :1]),
        ("bcij,bcjk->bcik", (1, 3, 1, 1), lambda x: x),
        ("cp,bcp->bc", (3, 4), lambda x: x[:, :, 0, :1]),
        ("bdc,bcp->bdp", (1, 2, 5), lambda x: x[:, :1].flatten(2)),
    ],
)
def test_einsum_repeats_an_axis_of_size_1(equation, shape, cut, check_contract):
    check_contract(lambda x: torch.einsum(equation, torch.ones(shape).double(), cut(x)), (3, 2, 2), ascent=0)


# Positions that are written to twice.


def assigned(index, value=lambda x: torch.stack([x[:, 0], x[:, 1]], 1)):
    def forward(x, w):
        x = x.flatten(1)
        y = 0.1 * x
        y[index] = value(x.tanh())
        return F.linear(y, w)

    return forward


ASSIGNMENTS = {
    "[0, 0]": assigned((slice(None), [0, 0])),
    "a tensor": assigned((slice(None), torch.tensor([2, 2]))),
    "from behind": assigned((slice(None), [1, -3])),
    "pairs": assigned(([0, 0, 0], [1, 2, 1]), lambda x: x[0, :3]),
    "one value, broadcast": assigned((slice(None), [3, 3]), lambda x: x[:, :1]),
    "no repetition": assigned((slice(None), [0, 2])),
    "index_put": lambda x, w: F.linear(
        x.flatten(1).tanh().index_put((torch.tensor([0, 0]), torch.tensor([1, 1])), x.flatten(1)[0, :2]), w
    ),
    "scatter": lambda x, w: F.linear(x.flatten(1).tanh().scatter(1, torch.tensor([[0, 0]]), x.flatten(1)[:, :2]), w),
    "index_copy": lambda x, w: F.linear(
        x.flatten(1).tanh().index_copy(1, torch.tensor([0, 0]), x.flatten(1)[:, :2]), w
    ),
    "masked_scatter": lambda x, w: F.linear(
        x.flatten(1).tanh().masked_scatter(torch.tensor([[True, False, True, False]]), x.flatten(1)[:, :2]), w
    ),
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_assignment(name):
    found = holds_or_refused(
        Forward(ASSIGNMENTS[name], w=random(3, 4)), (1, 2, 2), methods=("global", "local", "anchored")
    )
    if name == "no repetition":
        assert not any(isinstance(radius, str) for radius in found.values()), found


# Windows of padding, and other odd windows.


WINDOWS = {
    "padding alone": lambda x: F.max_pool2d(x, 2, 2, 1, dilation=4),
    "padding alone on one axis": lambda x: F.max_pool2d(x, (2, 1), (2, 1), (1, 0), dilation=(4, 1)),
    "padding alone, ceil_mode": lambda x: F.max_pool2d(x, 3, 2, 1, 2, True),
    "negative entries": lambda x: F.max_pool2d(x - 5, 3, 2, 1),
    "overlapping": lambda x: F.max_pool2d(x, 2, 1, 1, 2),
    "average without the padding": lambda x: F.avg_pool2d(x, 3, 1, 1, False, False),
    "average, ceil_mode": lambda x: F.avg_pool2d(x, 2, 2, 1, True, True),
    "average by another number": lambda x: F.avg_pool2d(x, 2, 1, 0, False, True, 1),
    "average by a negative number": lambda x: F.avg_pool2d(x, 2, divisor_override=-1),
    "adaptive": lambda x: F.adaptive_max_pool2d(x, (2, 1)),
    "padding that is −∞": lambda x: F.pad(x, (1, 1), value=-math.inf).amax(3).exp(),
    "no padding at all": lambda x: F.pad(x, []),
    "cropped": lambda x: F.pad(x, (-1, 0, 1, -1), value=3.0),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name):
    def forward(x, w):
        y = WINDOWS[name](x).flatten(1)
        # Products with another value make use of its largest entry.
        gated = (y.clamp(-9, 9) * x.flatten(1)[:, :1]).nan_to_num() if "−∞" in name else y * x.flatten(1)[:, :1]
        return F.linear(gated, w[:, : gated.shape[1]])

    holds_or_refused(Forward(forward, w=random(3, 40)), (1, 3, 3), methods=("global", "gloro", "local", "anchored"))


# Odd arguments: what the rules say of sizes, rows and constants holds, or they refuse.


class TwoByTwo(nn.Module):
    """A cell of a recurrent network, called by its own function."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 3)

    def forward(self, x):
        return self.cell(x.flatten(1))[0]


def rows(x):
    """Rows of norm 1 along the last axis, whatever the image."""
    return F.normalize(x, dim=-1, eps=0.1)


ODD = {
    "variance, a fractional correction": lambda x: 3 * x.var(3, correction=1.9).flatten(1),
    "variance, axis": lambda x: 3 * x.var(axis=3).flatten(1),
    "variance, positional": lambda x: 3 * torch.var(x, 3, True, True).flatten(1),
    "variance of more": lambda x: 3 * torch.var(x, (2, -1), correction=3).flatten(1),
    "largest, axis": lambda x: 3 * x.amax(axis=1).flatten(1),
    "largest of two axes": lambda x: 3 * torch.amax(x, (-1, 1), keepdims=True).flatten(1),
    "smallest, dim by name": lambda x: 3 * torch.min(x, dim=-1, keepdim=True).values.flatten(1),
    "sum, axis": lambda x: torch.sum(x, axis=-1, keepdims=True).flatten(1),
    "cat, axis": lambda x: torch.cat((x, 2 * x), axis=-1).flatten(1),
    "softmax, axis": lambda x: torch.softmax(9 * x, axis=3).flatten(1),
    "rolled as one row": lambda x: (rows(x).roll(1, ()) @ x.mT).flatten(1),
    "rolled, dims by name": lambda x: (rows(x).roll(1, dims=[]) @ x.mT).flatten(1),
    "rolled, no dims": lambda x: (torch.roll(rows(x), 1, None) @ x.mT).flatten(1),
    "rolled back": lambda x: (rows(x).roll((1, -1), (2, 3)) @ x.mT).flatten(1),
    "repeated along rows": lambda x: (rows(x).repeat_interleave(torch.tensor([3, 0, 0]), -1) @ x.mT).flatten(1),
    "repeated as one row": lambda x: (rows(x).repeat_interleave(2) * x.flatten().repeat(2))[None],
    "repeated across": lambda x: (rows(x).repeat_interleave(torch.tensor([2, 0, 1]), 2) @ x.mT).flatten(1),
    "no rows": lambda x: torch.cat([x.flatten(1), x[:, :, :0].flatten(1)], 1),
    "nothing, reshaped": lambda x: torch.cat([x.flatten(1), x[..., :0].reshape(1, 0)], 1),
    "cropped to nothing and padded": lambda x: F.pad(x, (0, -3)).sum(3).flatten(1) + x[..., 0].flatten(1),
    "a vector for a weight": lambda x: (
        F.linear(x, torch.ones(3).double()) @ x.flatten(1)[:, :3, None][:, None, :, 0].mT
    ),
    "a matrix for a bias": lambda x: F.linear(x[:, 0], torch.eye(3).double(), random(3, 3)).flatten(1),
    "a bias for every input": lambda x: F.conv2d(x.reshape(4, 1, 3, 3), random(2, 1, 3, 3), 9 * x[0, 0, 0, :2]).reshape(
        1, -1
    ),
    "kernels from the image": lambda x: F.conv2d(
        x.reshape(2, 2, 3, 3), bias=x[0, 1, 0, :2], weight=x[:, 0, :2, :2].reshape(2, 1, 2, 1), groups=2
    ).reshape(1, -1),
    "eps below 0": lambda x: F.layer_norm(x, (3,), eps=-1e-3).flatten(1),
    "eps of 0": lambda x: F.group_norm(x, 2, eps=0.0).flatten(1),
    "one entry a group": lambda x: F.layer_norm(x[..., None], (1,)).flatten(1),
    "limits in the wrong order": lambda x: x.clamp(0.7, 0.2).flatten(1) + x.clamp(max=0.5, min=-1).flatten(1),
    "limits above": lambda x: (x.clamp(min=2.0) * x).flatten(1),
    "hardtanh far away": lambda x: (F.hardtanh(x, 3.0, 4.0) * x).flatten(1),
    "threshold from behind": lambda x: F.leaky_relu(x - 0.5, -2.0).flatten(1),
    "steep": lambda x: F.leaky_relu(x - 0.5, negative_slope=7.0).flatten(1),
    "alpha": lambda x: torch.add(x, x.tanh(), alpha=-5).flatten(1),
    "alpha of 0": lambda x: torch.sub(x, x * 1e100, alpha=0).flatten(1),
    "alpha of a constant": lambda x: torch.sub(torch.ones(3).double(), x, alpha=4).flatten(1),
    "rsub with alpha": lambda x: torch.rsub(x, x.tanh(), alpha=3).flatten(1),
    "addcmul": lambda x: torch.addcmul(torch.zeros(2, 1, 1, 1).double(), x, x, value=-3).flatten(1)[:1],
    "products that broadcast": lambda x: (x[..., :1] * x[..., None, :, 0]).flatten(1),
    "a power that is a tensor": lambda x: (x + 1).pow(torch.tensor([[[[[3.0]]]]])).flatten(1),
    "a negative power": lambda x: (x + 0.5).pow(-2).flatten(1),
    "a root": lambda x: (x + 0.01).sqrt().flatten(1) + (x + 0.01).rsqrt().flatten(1),
    "an integer constant": lambda x: (x * torch.tensor([[3], [-2], [1]])).flatten(1),
    "signs that broadcast": lambda x: (x.flatten(1)[:, :, None] * torch.tensor([1, -1])).flatten(1).tanh(),
    "a negative variance": lambda x: F.batch_norm(
        x, torch.zeros(4).double(), torch.tensor([-0.999e-5, 0.0, 1.0, -0.5e-5]).double(), random(4) * 1e-3
    ).flatten(1),
    "variance with few degrees of freedom": lambda x: x.flatten(1).var(1, keepdim=True, correction=34),
    "a boolean constant": lambda x: (
        (x * torch.tensor([True, False, True])).flatten(1) - torch.ones(1, dtype=torch.bool).double()
    ),
    "an infinite constant": lambda x: (
        torch.minimum(x, torch.tensor([math.inf, 0.5, -math.inf]).double()).flatten(1).clamp(-9, 9)
    ),
    "unfolded with gaps": lambda x: x.unfold(3, 2, 1).unfold(2, 1, 2).flatten(1),
    "windows added up": lambda x: F.fold(F.unfold(x, 2, 1, 1, 1), (3, 3), 2, 1, 1, 1).flatten(1),
    "bigger, by bicubic": lambda x: F.interpolate(x, scale_factor=(1.7, 0.5), mode="bicubic").flatten(1),
    "bigger, by its corners": lambda x: F.interpolate(x, (5, 1), mode="bilinear", align_corners=True).flatten(1),
    "smaller, recomputed": lambda x: F.interpolate(
        x, scale_factor=0.6, mode="bilinear", recompute_scale_factor=True
    ).flatten(1),
    "nearest-exact": lambda x: F.interpolate(x, 7, mode="nearest-exact").flatten(1),
    "reflected": lambda x: F.pad(x, (2, 1, 0, 2), "reflect").flatten(1),
    "in a circle": lambda x: F.pad(x, (3, 0, 0, 1), "circular").flatten(1),
    "the last of a split": lambda x: torch.split(x, 2, dim=-1)[-1].flatten(1) * 5,
    "selected by name": lambda x: x.select(dim=1, index=-1).flatten(1) + x.narrow(dim=1, start=0, length=1).flatten(1),
    "the same entry again": lambda x: x.flatten(1)[:, (0,) * 16],
    "the same entries again": lambda x: x.flatten(1)[..., ((5, 5), (5, 5))].flatten(1),
    "swapped by name": lambda x: (torch.swapaxes(rows(x), axis0=2, axis1=3) @ x).flatten(1),
    "turned": lambda x: (rows(x).permute(0, 3, 2, 1) @ x.permute(0, 3, 1, 2)).flatten(1),
    "dropout that drops": lambda x: F.dropout(x, 1.0, True).flatten(1),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, True).flatten(1),
    "complex": lambda x: (x * 1j).real.flatten(1) + x.flatten(1),
    "other bits": lambda x: x.view(torch.float32).flatten(1),
    "whole numbers": lambda x: (9 * x).to(torch.int32).double().flatten(1),
    "a sum in whole numbers": lambda x: (9 * x).sum(1, dtype=torch.int64).double().flatten(1),
    "torch.foreach": lambda x: torch._foreach_add([x, x], 1.0)[0].flatten(1),
    "no dimensions": lambda x: x.flatten(1) * x.mean() + x.sum().tanh(),
    "no dimensions, twice": lambda x: (x.mean() * x[0, 0, 0, 0]) * x.flatten(1),
    "one number": lambda x: x.flatten(1) / (1 + x.square().sum()),
    "a mean of everything": lambda x: F.layer_norm(x.flatten(1) + x.amax(), (36,)),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ODD)
def test_odd_arguments(name, check_contract):
    def logits(x):
        found = torch.cat([ODD[name](image).reshape(1, -1) for image in x.split(1)])
        return F.linear(found, torch.randn(3, found.shape[1], generator=torch.Generator().manual_seed(4)).double())

    with contextlib.suppress(LipcertError):
        check_contract(ODD[name], (4, 3, 3), ascent=2)
    holds_or_refused(logits, (4, 3, 3), methods=("local", "anchored"))


@pytest.mark.parametrize("dtype", ["real", "float32"])
def test_a_cell(dtype):
    """torch.lstm_cell has other arguments than what is left in the cells of torch.lstm."""
    found = holds_or_refused(TwoByTwo(), (1, 2, 2), dtype=dtype)
    assert all("lstm_cell" in line for line in found.values())


class AtKinks(nn.Module):
    """A ReLU whose inputs are 0 at one image, up to rounding errors."""

    def __init__(self, image, seed):
        super().__init__()
        torch.manual_seed(seed)
        matrix = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))[0]
        self.a, self.h, self.k = nn.Linear(16, 16), nn.Linear(16, 3), nn.Linear(16, 3, bias=False)
        with torch.no_grad():
            self.a.weight.copy_(matrix)
            self.a.bias.copy_(-(matrix @ image.flatten()))
            self.h.weight.zero_()
            self.k.weight.zero_()
            self.h.weight[1:, :4] = self.k.weight[2, :4] = 1.0
            self.h.bias.copy_(torch.tensor([0.0, -0.26, -0.4]))

    def forward(self, x):
        z = self.a(x.flatten(1))
        return self.h(z.relu()) + self.k(z)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rigor", ["probabilistic", "deterministic"])
def test_values_next_to_kinks_by_rounding(seed, rigor):
    """Sums in another order, as in a batch of another size, may lie on the other side of a kink: 0.1 is the truth."""
    torch.manual_seed(7)
    images = 0.35 + 0.3 * torch.rand(2, 1, 4, 4, dtype=torch.float64)
    model = lipcert.load(AtKinks(images[0], seed).double(), mean=(0.0,), std=(1.0,), input_size=(1, 4, 4)).double()
    towards = model.net.a.weight[:4].sum(0).reshape(1, 1, 4, 4)
    for distance, changed in ((0.0999, False), (0.1001, True)):
        assert bool(model(images[:1] + distance * towards / towards.norm()).argmax(1) != 0) == changed
    for together in (images, images[:1], images[[0, 1, 1, 0, 1]]):
        radius = lipcert.certify(model, together, eps=0.12, method="anchored", rigor=rigor).radius
        assert radius[0] <= 0.1


class TokensToImage(nn.Module):
    """Batch normalisation of tokens that become an image, whose channels come last in memory."""

    def __init__(self):
        super().__init__()
        self.patches, self.mix, self.norm = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 8), nn.BatchNorm2d(8)
        self.head = nn.Linear(72, 4)
        self.norm.weight.data.uniform_(0.2, 5)
        self.norm.running_var.uniform_(0.2, 5)

    def forward(self, x):
        x = self.patches(x)
        moved = self.mix(x.flatten(2).mT).mT.reshape(x.shape)
        return self.head(self.norm(moved).tanh().flatten(1))


def test_channels_that_come_last_in_memory():
    """torch's derivative of batch normalisation is wrong there, under vmap and for a single image."""
    torch.manual_seed(2)
    network = TokensToImage()
    images = torch.rand(4, 3, 6, 6, dtype=torch.float64)
    for index in range(2):
        found = holds_or_refused(network, (3, 6, 6), methods=LINEAR, images=images[[index]])
        assert all(isinstance(radius, torch.Tensor) and radius > 0 for radius in found.values())
    holds_or_refused(network, (3, 6, 6), methods=LINEAR, images=images)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("forwards", [False, True])
def test_derivatives_that_torch_gets_wrong_are_refused(count, forwards, monkeypatch):
    """For one image or for two, as gradients or as products with the Jacobian only."""
    replay = Graph.forward

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, result):
            return result.clone()

        @staticmethod
        def backward(ctx, back):
            return Pulled.apply(back) if forwards else 1.01 * back

    class Pulled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, back):
            return back.clone()

        @staticmethod
        def backward(ctx, forth):
            return 1.01 * forth

    def wrong(self, source, value, *rest):
        found = replay(self, source, value, *rest)
        return [Wrong.apply(result) if len(value) == count else result for result in found]

    model = lipcert.load(TokensToImage().eval(), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 6, 6))
    assert not Certifier(model, 0.1, "staged").skipped
    monkeypatch.setattr(Graph, "forward", wrong)
    with pytest.raises(UnsupportedOperation, match="vmap"):
        Certifier(model, 0.1, "anchored")
    assert "vmap" in Certifier(model, 0.1, "staged").skipped["anchored"]


class Common(nn.Module):
    """Two logits that share a large part, of an image or not, which would hide what is added to one of them."""

    def __init__(self, part, added):
        super().__init__()
        self.head, self.part, self.added = nn.Linear(192, 2), part, added

    def forward(self, x):
        x = x.flatten(1)
        logits = self.head(x) + self.part(x.mean(1, keepdim=True)) + torch.stack([self.added(x), -self.added(x)], 1)
        return torch.cat([logits, 0 * logits[:, :1]], 1)


@pytest.mark.parametrize("part", [lambda m: 1 + 0 * m, lambda m: 1 + m])
@pytest.mark.parametrize(
    ("size", "added", "message"),
    [
        (1e10, lambda x: 0.5 * torch.is_grad_enabled() + 0 * x[:, 0], "gradients are enabled"),
        (1e10, lambda x: 0.1 * x.mean() + 0 * x[:, 0], "mixes the images"),
        (1e5, lambda x: (0 * x + torch.tensor([3.0 * (x.dtype == torch.float32)] + [1e6] * 191))[:, 0], "in float32"),
    ],
)
def test_a_part_that_logits_share_hides_no_difference(part, size, added, message):
    torch.manual_seed(0)
    net = Common(lambda mean: size * part(mean), added).eval()
    model = lipcert.load(net, mean=(0.0,) * 3, std=(1.0,) * 3, input_size=(3, 8, 8))
    with pytest.raises(LipcertError, match=message):
        lipcert.certify(model, torch.rand(3, 3, 8, 8), eps=0.01, method="gloro")


def test_what_libraries_replace_beside_the_functions_of_networks_is_no_obstacle(monkeypatch):
    """Lightning replaces torch.compile, and ultralytics torch.load and torch.save."""
    for name in ("compile", "load", "save"):
        monkeypatch.setattr(torch, name, lambda *args, **kwargs: None)
    assert lipcert.lipschitz(lipcert.load()).log10 > 0


@pytest.mark.parametrize("scale", [1e-58, 1e-20, 300.0])
def test_saturated_networks_are_not_refused_for_their_rounding_errors(scale):
    """Their derivatives underflow, or consist of rounding errors."""
    for seed in range(3):
        torch.manual_seed(seed)
        layers = [nn.Flatten(), nn.Linear(192, 4), Scaled(scale), nn.Softmax(-1) if scale > 1 else nn.GELU()]
        model = lipcert.load(nn.Sequential(*layers).eval(), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 8, 8))
        Certifier(model, 0.1, "anchored")


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


# Another function for some batches only: for six images or more, from place 4 on, and where no image is black.
BATCHES = {
    "size": lambda x, w: F.linear(x.flatten(1), w) * (1 - 2 * (len(x) >= 6)),
    "place": lambda x, w: F.linear(x.flatten(1), w) + 9 * torch.eye(3)[0] * (torch.arange(len(x)) > 3)[:, None],
    "content": lambda x, w: F.linear((x + 30 * torch.relu(x.amax(0) - x) * torch.relu(x.amin(0) - 0.05)).flatten(1), w),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("method", ["gloro", "staged", "smoothing"])
def test_networks_that_depend_on_the_batch_are_refused(name, method):
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    model = lipcert.load(Forward(BATCHES[name], w=weight).eval(), mean=(0,) * 3, std=(1,) * 3, input_size=(3, 2, 2))
    images = 0.1 + 0.8 * torch.rand(8, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    settings = {"sigma": 0.25, "samples": 1000} if method == "smoothing" else {}
    with pytest.raises(LipcertError, match="batch"):
        lipcert.certify(model, images, eps=0.01, method=method, **settings)


@pytest.mark.parametrize("name", ["size", "place"])
def test_certificates_are_those_of_each_image_alone(name):
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    model = lipcert.load(Forward(BATCHES[name], w=weight).eval(), mean=(0,) * 3, std=(1,) * 3, input_size=(3, 2, 2))
    images = 0.1 + 0.8 * torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    certifier = Certifier(model, 0.01, "gloro")
    lower, upper = certifier.logit_bounds(images.repeat(2, 1, 1, 1))
    alone = torch.cat([model(image[None]) for image in images]).repeat(2, 1)
    assert ((lower < alone) & (alone < upper)).all()
    assert torch.equal(certifier.run(images).predicted, alone[:4].argmax(1))
    with pytest.raises(LipcertError, match="batch"):
        certifier.run(images.repeat(2, 1, 1, 1))


# What a hook multiplies by, in a network whose certifier exists already.
FACTORS = {
    "number": (lambda: {"by": 1.0}, lambda held: held.update(by=50.0)),
    "tensor": (lambda: {"by": torch.tensor(1.0).double()}, lambda held: held["by"].fill_(50.0)),
    "another tensor": (lambda: {"by": torch.tensor(1.0)}, lambda held: held.update(by=torch.tensor(50.0))),
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("method", ["gloro", "staged"])
def test_logits_and_bounds_are_of_one_network(name, method):
    make, change = FACTORS[name]
    held = make()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    net[1].register_forward_hook(lambda module, inputs, output: output * held["by"])
    certifier = Certifier(lipcert.load(net, mean=(0,) * 3, std=(1,) * 3, input_size=(3, 2, 2)), 0.01, method)
    images = torch.rand(2, 3, 2, 2)
    certifier.run(images)
    change(held)
    for ask in (certifier.run, certifier.logit_bounds):
        with pytest.raises(LipcertError, match="has changed since its certifier was made"):
            ask(images)


# Nothing to see at the first image, where the hook multiplies zeros; it reads the numbers of an array or of a slice.
PLACES = {
    "number": (lambda: {"by": 1.0}, lambda held: held.update(by=50.0), lambda held, z: z * held["by"]),
    "slice": (
        lambda: torch.tensor([0, 4]),
        lambda held: held.add_(4),
        lambda held, z: F.pad(z[:, held[0] : held[1]], (0, 12)),
    ),
    "array": (lambda: np.arange(4), lambda held: held.__iadd__(4), lambda held, z: F.pad(z[:, held], (0, 12))),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_change_that_the_first_image_does_not_show(name):
    make, change, read = PLACES[name]
    held = make()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16, bias=False), nn.ReLU(), nn.Linear(16, 3)).double()
    net[1].register_forward_hook(lambda module, inputs, output: read(held, output))
    certifier = Certifier(lipcert.load(net, mean=(0,) * 3, std=(1,) * 3, input_size=(3, 2, 2)), 0.01, "gloro")
    images = torch.cat([torch.zeros(1, 3, 2, 2), torch.rand(1, 3, 2, 2)]).double()
    before = certifier.run(images).radius
    change(held)
    if name == "number":
        assert torch.equal(certifier.run(images).radius, before)
    else:
        with pytest.raises(LipcertError, match="has changed since its certifier was made"):
            certifier.run(images)


# torch may add a bias to a product that it has rounded, and multiply a normalisation out. Both cancel here.


class Offset(nn.Module):
    """Two logits, 2q and 1, where q is the contrast of the image: W(1, q 2⁻ᵏ) + b is q 2⁻ᵏ, but fl(1 + q 2⁻ᵏ) is 1."""

    def __init__(self, turn, bits):
        super().__init__()
        self.turn, self.small = turn, 2.0**-bits
        self.layer = nn.Linear(2, 1)
        self.one = nn.Parameter(torch.ones(1, 1, 1, 2))
        with torch.no_grad():
            self.layer.weight.fill_(1.0)
            self.layer.bias.fill_(-1.0)

    def forward(self, x):
        contrast = F.relu(x[:, :, :1] - x[:, :, 1:] - 0.5)
        image = torch.cat([self.one.expand(len(x), 1, 1, 2), contrast * self.small], 1)
        z = self.layer(self.turn(image)) * (2 / self.small)
        return torch.cat([z.flatten(1).sum(1, keepdim=True), self.one[:, 0, 0, :1].expand(len(x), 1)], 1)


TURNS = {
    "tokens of an embedding": lambda x: x.flatten(2).transpose(1, 2),
    "channels last": lambda x: x.permute(0, 2, 3, 1),
    "moved and folded": lambda x: x.movedim(1, -1).flatten(1, 2),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 9), ("float16", 12)])
def test_a_bias_that_cancels_a_rounded_product(turn, dtype, bits):
    net = Offset(TURNS[turn], bits).eval()
    model = lipcert.load(net, mean=(0.0,), std=(1.0,), input_size=(1, 2, 2))
    image = torch.tensor([[[[1.0, 1.0], [0.0, 0.0]]]])
    with torch.no_grad():
        seen = model.to(getattr(torch, dtype))(image.to(getattr(torch, dtype))).argmax(1)
    model.float()
    for method in ("gloro", "lofast", "anchored"):
        found = lipcert.certify(model, image, eps=1e-3, method=method, dtype=dtype)
        assert found.radius.item() == 0 or found.predicted == seen, method


class Cancelled(nn.Module):
    """A normalisation of small numbers, whose weight and bias are near 1 in all channels."""

    def __init__(self, norm, seed):
        super().__init__()
        self.norm, draw = norm, torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.norm.weight.copy_(1 + torch.rand(norm.weight.shape, generator=draw))
            self.norm.bias.copy_(1 + 2e-7 * torch.rand(norm.bias.shape, generator=draw))

    def forward(self, x):
        channels = len(self.norm.weight)
        return self.norm(x.reshape(len(x), channels, -1) * 2.0**-20).flatten(1)[:, [0, -1]]


NORMS = {
    "group": lambda: (nn.GroupNorm(1, 2, eps=1.0), 2),
    "groups": lambda: (nn.GroupNorm(2, 4, eps=1.0), 4),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_normalisation_that_is_multiplied_out(name, seed):
    norm, entries = NORMS[name]()
    model = lipcert.load(Cancelled(norm, seed).eval(), mean=(0.0,), std=(1.0,), input_size=(1, 1, entries))
    images = torch.rand(100_000, 1, 1, entries, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        exact = model.double()(images.double())
        seen = model.float()(images)
    flipped = seen.argmax(1) != exact.argmax(1)
    assert flipped.any()
    image = images[(flipped * (exact[:, 0] - exact[:, 1]).abs()).argmax()][None]
    with torch.no_grad():
        alone = model(image).argmax(1)
    for method in ("anchored", "gloro"):
        found = lipcert.certify(model, image, eps=1e-9, method=method, dtype="float32", rigor="deterministic")
        assert found.radius.item() == 0 or found.predicted == alone, method


# torch converts a tensor without axes to the type of the others.


def _put(x, number):
    x = x + 0
    x[:] = number
    return x


WIDER = {
    "clamp": lambda x, number: x.clamp(min=number),
    "assignment": _put,
    "sum": lambda x, number: x * 2.0**-30 + number,
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", WIDER)
def test_numbers_of_a_wider_type_are_rounded(name, dtype):
    """Logits t and w, where w is t rounded, and larger: the deployed network has a tie."""
    kind = getattr(torch, dtype)

    def forward(x, limit):
        z = WIDER[name](x[:, 0, 0, :1] * 2.0**-10, torch.tensor(0.3, dtype=torch.float64))
        return torch.cat([z, limit.expand(len(x), 1)], 1)

    net = Forward(forward, limit=torch.full((1, 1), 0.3, dtype=torch.float64).to(kind).double())
    model = lipcert.load(net.double().eval(), mean=(0.0,), std=(1.0,), input_size=(1, 1, 2))
    image = torch.full((1, 1, 1, 2), 0.5).double()
    with torch.no_grad():
        seen = model.to(kind)(image.to(kind)).argmax(1)
    model.double()
    for method in ("gloro", "anchored"):
        found = lipcert.certify(model, image, eps=1e-9, method=method, dtype=dtype)
        assert found.radius.item() == 0 or found.predicted == seen, method


# Values in float32 that are cast back: at an image of zeros all casts err, by nearly half a unit, against the leader.


def _softmax_of_cast(x, weight, bias, *, size):
    first, second = x.flatten(1).float().split(1, 1)
    scores = torch.cat([first + (size + 2.499), second + (size + 0.501)], 1).to(x.dtype)
    return F.linear(scores.softmax(-1), weight, bias)


def _head_of_cast(x, weight, bias, *, size):
    first, second = x.flatten(1).float().split(1, 1)
    features = torch.cat([first.tanh() / 50 + (1 + 0.45 / size), 0 * second + (1 - 0.22 / size)], 1)
    return F.linear(features.repeat_interleave(32, 1).to(x.dtype), weight, bias)


CASTS = {
    "before a softmax": (_softmax_of_cast, torch.tensor([[1.0, 0.0], [0.0, 0.0]]), 0.75),
    "before a head": (_head_of_cast, torch.tensor([[1.0, -1.0], [0.0, 0.0]]).repeat_interleave(32, 1), 2.0**-10),
}


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize(("dtype", "size"), [("float16", 1024), ("bfloat16", 128)])
def test_a_cast_rounds_what_the_next_operation_reads(name, dtype, size):
    forward, weight, least = CASTS[name]
    net = Forward(functools.partial(forward, size=size), weight=weight, bias=torch.tensor([0.0, least]))
    model = lipcert.load(net.eval(), mean=(0.0,), std=(1.0,), input_size=(1, 1, 2))
    image = torch.zeros(1, 1, 1, 2)
    with torch.no_grad():
        seen = model.to(getattr(torch, dtype))(image.to(getattr(torch, dtype))).argmax(1)
    found = lipcert.certify(model.float(), image, eps=1e-3, method="anchored", dtype=dtype)
    assert found.radius.item() == 0 or found.predicted == seen


# Code that is not that of a module's class: rules for whole modules, and lofast-paper, are about the source.


class Attending(nn.Module):
    """L2 attention that knows its constant, in front of a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.attn, self.head = L2Attention(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attn(x.flatten(2).mT).mean(1))


class Louder(torch.Tensor):
    """A weight that a library scales where it is used."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        made = super().__torch_function__(function, types, args, kwargs or {})
        return 30 * made.as_subclass(torch.Tensor) if function is F.linear else made

    def __deepcopy__(self, memo):
        return nn.Parameter(self.detach().clone().as_subclass(Louder))


class LouderLinear(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        return 30 * made if function is F.linear else made


linear, calls = nn.Linear.forward, nn.Module._call_impl
CODE = {
    "forward of a part's class": lambda m, net: m.setattr(nn.Linear, "forward", lambda z, x: 30 * linear(z, x)),
    "a class of the part itself": lambda m, net: m.setattr(
        LipLinear, "forward", lambda z, x: 30 * linear(z, x), raising=False
    ),
    "a weight that is computed": lambda m, net: m.setattr(
        LipLinear, "weight", property(lambda z: 30 * z._parameters["weight"]), raising=False
    ),
    "a method": lambda m, net: m.setattr(L2Attention, "mixing", lambda z, w=L2Attention.mixing: 30 * w(z)),
    "the call of every module": lambda m, net: m.setattr(
        nn.Module, "_call_impl", lambda z, *a, **k: (30 if isinstance(z, LipLinear) else 1) * calls(z, *a, **k)
    ),
    "an attribute of the part": lambda m, net: setattr(net.attn.q, "forward", lambda x: 30 * linear(net.attn.q, x)),
    "a tensor of another class": lambda m, net: setattr(
        net.attn.proj, "weight", nn.Parameter(net.attn.proj.weight.detach().as_subclass(Louder))
    ),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CODE)
def test_code_of_parts_is_seen(name, monkeypatch):
    net = Attending()
    assert kept_whole(net.attn)
    CODE[name](monkeypatch, net)
    assert not kept_whole(net.attn)
    assert next(alterations(net.attn), None)
    if name not in ("an attribute of the part", "a tensor of another class"):
        holds_or_refused(net, (4, 2, 2), methods=("gloro", "local"))
    monkeypatch.undo()
    assert kept_whole(Attending().attn)


def test_a_weight_of_another_class_than_torchs_is_refused():
    """Its norm is that of its numbers, and the layer multiplies by 30 times as much."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3, bias=False)).double().eval()
    net[1].weight = nn.Parameter(random(3, 12).as_subclass(Louder))
    model = lipcert.load(net, mean=(0.0,) * 3, std=(1.0,) * 3, input_size=(3, 2, 2))
    with pytest.raises(UnsupportedOperation, match="linear with a tensor of class Louder"):
        lipcert.lipschitz(model)


class Louder30(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias=None):
        return 30 * (x @ weight.mT)


def from_file(path):
    """A linear layer that multiplies by 30, as if defined in a file."""
    names = {}
    exec(compile("def linear(x, weight, bias=None): return 30 * (x @ weight.mT)", path, "exec"), names)
    return names["linear"]


# What is called like a function: torchao and lipcert_x are other packages than torch and lipcert.
OF_FILE = from_file("x.py")
CALLED = (
    functools.partial(OF_FILE), functools.lru_cache(OF_FILE), types.MethodType(lambda _self, *x: OF_FILE(*x), 1),
    Louder30.apply, *(from_file(one.__file__.replace(f"{os.sep}__init__", f"{end}{os.sep}ops"))
                      for one, end in ((torch, "ao"), (lipcert, "_x"))),
)  # fmt: skip


def test_functions_of_torch_that_were_replaced_are_refused(monkeypatch):
    model = lipcert.load(Attending().eval(), mean=(0.0,) * 4, std=(1.0,) * 4, input_size=(4, 2, 2))
    own = F.linear
    for place, name in ((F, "linear"), (torch.Tensor, "softmax"), (torch, "matmul"), (torch.Tensor, "__matmul__")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda *given: 30 * own(*given))
            with pytest.raises(LipcertError, match=rf"{name} is replaced by a function of .*{__name__}\.py"):
                lipcert.lipschitz(model)
    for one in CALLED:
        with monkeypatch.context() as patch:
            patch.setattr(F, "linear", one)
            with pytest.raises(LipcertError, match="linear is replaced by a function of "):
                lipcert.lipschitz(model)
    # What has been found to be torch's own before may get other code, or a class that can be called.
    seen = type("Seen", (), {})()
    monkeypatch.setattr(torch, "seen", seen, raising=False)
    assert math.isfinite(lipcert.lipschitz(model).log10)
    with monkeypatch.context() as patch:
        patch.setattr(vars(torch.Tensor)["__torch_function__"].__func__, "__code__", (lambda *given: 30).__code__)
        with pytest.raises(LipcertError, match="__torch_function__ is replaced by a function of "):
            check_torch()
    with monkeypatch.context() as patch:
        patch.setattr(type(seen), "__call__", lambda self, *given: 30 * own(*given), raising=False)
        patch.setattr(torch, "tanh", seen)
        with pytest.raises(LipcertError, match="is replaced by a function of "):
            lipcert.lipschitz(model)
    for key in ("CPU", "AutogradCPU", "CompositeExplicitAutograd"):
        kernels = torch.library.Library("aten", "IMPL")
        kernels.impl("special_i1", lambda x: 30 * x, key)  # hardly anything else uses it
        with pytest.raises(LipcertError, match=f"aten/special_i1/{key} is replaced by a kernel"):
            lipcert.lipschitz(model)
        kernels._destroy()
    with LouderLinear(), pytest.raises(LipcertError, match="LouderLinear changes what torch's functions compute"):
        lipcert.lipschitz(model)
    assert math.isfinite(lipcert.lipschitz(model).log10)


PAPER = {
    "img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1, "mlp_ratio": 2, "class_token": False,
    "global_pool": "avg", "final_norm": False, "qkv_bias": False, "num_classes": 3,
}  # fmt: skip


def paper(seed=0):
    torch.manual_seed(seed)
    model = lipcert.load("vit_tiny_patch16_224", pretrained=False, mean=(0.5,) * 3, std=(0.4,) * 3, **PAPER)
    return lipcert.convert(model, attention="keep", norm="lofast")


def scaled_by(scale, fused):
    def change(attention):
        attention.scale, attention.fused_attn = scale, fused

    return change


# What the attention of a vision transformer has beside its weights, whether it reads it or not.
ATTRIBUTES = {
    "a scale that fused attention does not read": scaled_by(1 / 8, True),
    "a scale that is read": scaled_by(3.0, False),
    "a negative scale": scaled_by(-0.5, False),
    "two heads in place of one": lambda attention: vars(attention).update(num_heads=2, head_dim=4),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_attention(name, alike):
    """Where the tokens of an image are all alike, the weights of attention do not show in its result."""
    model = paper()
    net, attention = model.net, model.net.blocks[0].attn
    ATTRIBUTES[name](attention)
    with torch.no_grad():
        attention.qkv.weight.mul_(9)
        net.pos_embed.mul_(0.0 if alike else 9.0)
    found = holds_or_refused(model.net.double(), (3, 8, 8), methods=("lofast-paper",))["lofast-paper"]
    assert isinstance(found, torch.Tensor), found
    assert (found > 0).any()


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "softmax"])
def test_what_is_read_of_a_network_must_give_its_results(name, monkeypatch):
    """Functions that timm's code takes from elsewhere are no code of its classes."""
    model = paper()
    model.net.blocks[0].attn.fused_attn = name != "softmax"
    model.net.pos_embed.data.zero_()
    images = torch.full((1, 3, 8, 8), 0.5)
    assert lipcert.certify(model, images, eps=0.01, method="lofast-paper").radius[0] > 0
    if name == "softmax":
        monkeypatch.setattr("timm.layers.attention.maybe_add_mask", lambda scores, mask: 4 * scores)
    else:
        wider = SimpleNamespace(scaled_dot_product_attention=lambda q, k, v, **_: (q @ k.mT).softmax(-1) @ v)
        monkeypatch.setattr("timm.layers.attention.F", wider)
    with pytest.raises(LipcertError, match=r"of net\.blocks\.0, which returns another result than these give"):
        lipcert.certify(model, images, eps=0.01, method="lofast-paper")


def test_embedding_and_head_must_be_those_that_are_read(monkeypatch):
    for place in ("head", "patch_embed"):
        model = paper()
        with monkeypatch.context() as patch:
            if place == "head":
                patch.setattr("timm.models.vision_transformer.global_pool_nlc", lambda x, **_: 2 * x.mean(1))
            else:
                model.net.patch_embed.dynamic_img_pad = True
                patch.setattr("timm.layers.patch_embed.F", SimpleNamespace(pad=lambda x, by: 2 * x))
            with pytest.raises(LipcertError, match=f"net.{place}, which returns another result"):
                lipcert.certify(model, torch.rand(1, 3, 8, 8), eps=0.01, method="lofast-paper")
