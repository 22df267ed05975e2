"""Operations that are taken for linear: their derivative is exactly what they do to a difference.

Numbers are small integers in float64, and constants dyadic fractions, so that f(x + v) − f(x) and autograd's J v are
exact and must be the same, entry by entry, at any x.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from modules import Function
from rule_attacks import answers

from lipcert.bounds import RULES, NoAnswer, Tag, remainder_of
from lipcert.graph import Graph, capture, needed

SIZE = (4, 3, 6)


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def parts(pieces, pick=-1):
    return lambda x: pieces(x)[pick]


def assigned(index, value):
    def forward(x):
        y = x * 2
        y[index] = value(x)
        return y

    return forward


W, K = whole(5, 6), whole(4, 2, 2, 3)
MASK = torch.tensor([True, False, True, True, False, False])

# For each operation: functions of an image of shape (1, 4, 3, 6), odd arguments among them.
CASES = {
    "identity": [
        lambda x: x.clone(),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.detach(),
        lambda x: x.to(torch.float64, copy=True),
        lambda x: x.expand(2, -1, -1, -1).clone(),
    ],
    "dropout": [lambda x: F.dropout(x, 0.5, False), lambda x: F.dropout2d(x, 0.9, training=False, inplace=True)],
    "reshape": [
        lambda x: x.reshape(-1, 1, 9),
        lambda x: x.expand(3, 4, 3, 6).reshape(6, 36),
        lambda x: x.flatten(1, -2),
        lambda x: x[:, :1].squeeze(1),
        lambda x: x[..., :0].reshape(0, 4),
        lambda x: x.unflatten(-1, (2, -1)),
        lambda x: x.mT.reshape(-1),
        lambda x: x.unsqueeze(-5),
        lambda x: x.view(-1),
        lambda x: x.sum().reshape(1, 1),
    ],
    "permute": [
        lambda x: x.permute(0, -1, 1, 2),
        lambda x: x.permute((3, 2, 1, 0)),
        lambda x: x.expand(2, 4, 3, 6).T,
        lambda x: x.movedim(-1, 1),
        lambda x: x.movedim((1, -1), (-1, 0)),
        lambda x: x.transpose(-1, -3),
        lambda x: x.mT,
        lambda x: x[0, 0].t(),
        lambda x: x.swapaxes(axis0=1, axis1=2),
        lambda x: x.expand(2, 4, 3, 6).transpose(0, 1),
        lambda x: x[..., :0].transpose(1, 3),
    ],
    "getitem": [
        lambda x: x[:, [0, 0, -1]],
        lambda x: x[..., MASK],
        lambda x: x[:, 1:1],
        lambda x: x[0, None, -1, ::2],
        lambda x: x[:, torch.tensor([[1, 1], [3, 1]]), :, [[0, -1]]],
        lambda x: x.select(-1, -2),
        lambda x: x[True],
        lambda x: x.narrow(1, -3, 2),
        lambda x: x.expand(3, 4, 3, 6)[[0, 0, 2]],
        lambda x: x[torch.tensor([[0, 0]])],
    ],
    "index_select": [
        lambda x: x.index_select(-1, torch.tensor([5, 5, 0])),
        lambda x: torch.index_select(x, 1, torch.tensor([], dtype=torch.int64)),
    ],
    "flip": [lambda x: x.flip(-1, 1), lambda x: x.flip([]), lambda x: x.expand(2, 4, 3, 6).flip(0)],
    "roll": [
        lambda x: x.roll(-2),
        lambda x: x.roll((1, -5), (-1, -1)),
        lambda x: x.roll(3, ()),
        lambda x: x[..., :0].roll(1, 3),
    ],
    "unbind": [parts(lambda x: x.unbind(-2)), parts(lambda x: x.expand(2, 4, 3, 6).unbind())],
    "split": [parts(lambda x: x.split(4, -1)), parts(lambda x: torch.split(x, [0, 1, 5], 3), 0)],
    "chunk": [parts(lambda x: x.chunk(4, -1)), parts(lambda x: x.chunk(9, 1), 1)],
    "part": [parts(lambda x: x.unbind(1), 0)],
    "cat": [
        lambda x: torch.cat((x, x, whole(1, 2, 3, 6)), 1),
        lambda x: torch.cat((x[..., :0], x), -1),
        lambda x: torch.cat((torch.zeros(0).double(), x)),
        lambda x: torch.cat([x.expand(2, 4, 3, 6), x], axis=0),
    ],
    "stack": [lambda x: torch.stack((x, whole(*x.shape), x), -1), lambda x: torch.stack([x.sum() * 2, x.sum()])],
    "expand": [
        lambda x: x.expand(3, -1, -1, -1),
        lambda x: x[:, :1].expand(2, 5, 3, 6),
        lambda x: x.sum().expand(2, 0, 3),
    ],
    "repeat": [
        lambda x: x.repeat(2, 1, 3, 1),
        lambda x: x.repeat(0, 1, 1, 1),
        lambda x: x.expand(2, 4, 3, 6).repeat(1, 1, 1, 2),
    ],
    "tile": [lambda x: x.tile(2), lambda x: x.tile((1, 2, 1, 1, 1))],
    "repeat_interleave": [
        lambda x: x.repeat_interleave(3, -1),
        lambda x: x.repeat_interleave(torch.tensor([2, 0, 1]), -2),
        lambda x: x.repeat_interleave(2),
    ],
    "pad": [
        lambda x: F.pad(x, (6, 0, 0, 0), "circular"),
        lambda x: F.pad(x, (3, 3, 3, 3), "replicate"),
        lambda x: F.pad(x, []),
        lambda x: F.pad(x, (-6, 0)),
    ],
    "add": [
        lambda x: x + 3,
        lambda x: torch.add(x, x, alpha=-2),
        lambda x: x[..., :1] + x.mT[..., :1, :3].mT,
        lambda x: whole(2, 1, 3, 6) + x,
        lambda x: x.expand(2, 4, 3, 6) + x,
        lambda x: torch.add(other=x, input=x[:, :1]),
    ],
    "sub": [
        lambda x: 1 - x,
        lambda x: torch.sub(x, x[:, -1:], alpha=3),
        lambda x: x - x.mT.mT.flip(3),
        lambda x: x.sub(whole(6), alpha=-2),
    ],
    "neg": [lambda x: -x, lambda x: -x[..., :0]],
    "mean": [
        lambda x: x[..., :4].mean(-1),
        lambda x: x[:, :2, :, :4].mean((1, -1), keepdim=True),
        lambda x: x[..., :2].mean(axis=3, keepdims=True),
        lambda x: x[:, :, :2, :4].mean(),
        lambda x: x.expand(2, 4, 3, 6).mean(0),
        lambda x: x.mean(()) * 72,
    ],
    "sum": [
        lambda x: x.sum(-2),
        lambda x: x.sum(()),
        lambda x: x[..., :0].sum(-1),
        lambda x: x.expand(2, 4, 3, 6).sum((0, 1), True),
    ],
    "avg_pool1d": [lambda x: F.avg_pool1d(x[0], 2, 1, 1), lambda x: F.avg_pool1d(x[0], (4,), 3, 2, True, True)],
    "avg_pool2d": [
        lambda x: F.avg_pool2d(x, 2, 1, 1, True, True),
        lambda x: F.avg_pool2d(x, (1, 2), (2, 3), 0, True, False, -4),
        lambda x: F.avg_pool2d(x, (2,), divisor_override=1),
        lambda x: F.avg_pool2d(x[..., :2], 2, 2, ceil_mode=True, count_include_pad=False),
    ],
    "adaptive_avg_pool2d": [
        lambda x: F.adaptive_avg_pool2d(x, (None, 3)),
        lambda x: F.adaptive_avg_pool2d(x[:, :, :2, :4], 1),
    ],
    "batch_norm": [
        lambda x: F.batch_norm(
            x, whole(4), torch.tensor([1.0, 4, 16, 64]).double(), whole(4, seed=1), None, False, 0.1, 0.0
        ),
        lambda x: F.batch_norm(x[:, :, 0, 0], whole(4), torch.full((4,), 0.25).double(), eps=0.0),
    ],
    "interpolate": [
        lambda x: F.interpolate(x, (3, 12), mode="bilinear"),
        lambda x: F.interpolate(x[..., :2], (3, 5), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x[:, :, :1], (2, 7), mode="nearest-exact"),
    ],
    "unfold": [lambda x: F.unfold(x, 2, 2, 1, 1), lambda x: F.unfold(x, (1, 3), stride=(1, 5))],
    "fold": [lambda x: F.fold(x.reshape(1, 4, 18), (4, 7), 2), lambda x: F.fold(x.reshape(1, 12, 6), (3, 3), (1, 2))],
    "unfold_axis": [
        lambda x: x.unfold(-1, 3, 1),
        lambda x: x.unfold(1, 2, 3),
        lambda x: x.expand(2, 4, 3, 6).unfold(0, 2, 1),
    ],
    "setitem": [
        assigned((slice(None), [0, -1]), lambda x: x[:, 1:3]),
        assigned((..., MASK), lambda x: x[..., :3]),
        assigned(0, lambda x: x[0, :1]),
        assigned((slice(None), slice(1, 1)), lambda x: x[:, :0]),
        assigned((0, [1, 2], [0, -1]), lambda x: x[0, 0, :2]),
        assigned(..., lambda x: 3.0),
        assigned((slice(None), [0, 0]), lambda x: x[:, 1:3]),
        assigned((0, [1, -3], [2, 2]), lambda x: x[0, 0, :2]),
        assigned((torch.tensor([0, 0]),), lambda x: x.expand(2, 4, 3, 6)),
    ],
    "mul": [
        lambda x: x * whole(2, 1, 1, 6),
        lambda x: 3 * x,
        lambda x: x * True,
        lambda x: x[..., :0] * 2,
        lambda x: torch.mul(other=whole(6), input=x),
    ],
    "div": [
        lambda x: x / 4,
        lambda x: x / torch.tensor([[2.0], [-4.0], [0.5]]).double(),
        lambda x: torch.div(other=8, input=x),
    ],
    "matmul": [
        lambda x: x @ W.mT,
        lambda x: whole(2, 1, 5, 3) @ x,
        lambda x: x.expand(2, 4, 3, 6) @ whole(2, 4, 6, 1),
        lambda x: torch.bmm(x[0], mat2=whole(4, 6, 2)),
        lambda x: x[:, :, :0] @ W.mT,
    ],
    "linear": [
        lambda x: F.linear(x, W, whole(5)),
        lambda x: F.linear(whole(2, 6), x[0, 0]),
        lambda x: F.linear(x[:, :0], W),
    ],
    "conv1d": [
        lambda x: F.conv1d(x[0], whole(2, 3, 2), None, 2, 1, 2),
        lambda x: F.conv1d(whole(1, 3, 5), x[0, :, :, :2]),
    ],
    "conv2d": [
        lambda x: F.conv2d(x, K, whole(4), (1, 2), "valid", 1, 2),
        lambda x: F.conv2d(x, whole(4, 1, 2, 2), padding="same", groups=4),
        lambda x: F.conv2d(whole(1, 4, 5, 6), x),
        lambda x: F.conv2d(x.expand(2, 4, 3, 6), whole(1, 4, 1, 1), dilation=3),
    ],
    "conv3d": [lambda x: F.conv3d(x[None], whole(2, 1, 2, 3, 1), None, 1, (1, 0, 2))],
    "conv_transpose2d": [
        lambda x: F.conv_transpose2d(x, whole(4, 1, 2, 3), None, 2, 1, 1, 2, 1),
        lambda x: F.conv_transpose2d(x, whole(4, 2, 2, 2), dilation=2),
    ],
}


def captured(forward) -> Graph:
    return needed(capture(Function(forward).eval(), whole(1, *SIZE)))


def test_every_operation_has_its_cases():
    """A new linear operation without one fails here."""
    assert set(CASES) == {op for op in answers("linear") if isinstance(op, str)}


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, cases in CASES.items() for i in range(len(cases))])
def test_derivative_is_the_difference(name, number):
    """By the same replay that certificates differentiate; where the operation is refused there is nothing to hold."""
    graph = captured(CASES[name][number])
    nodes = [node for node in graph.nodes if node.op == name]
    assert nodes, f"the case is none of {name}: {[node.op for node in graph.nodes]}"
    try:
        if any(remainder_of(node) is not None for node in graph.nodes[1:]):
            pytest.fail("an operation among them is not taken for linear")
    except NoAnswer as reason:
        if "without entries" in str(reason):
            return  # values of size 0 are refused before any rule
        assert name == "setitem" and "twice" in str(reason), reason  # noqa: PT017, PT018
        return
    x, v = whole(2, 1, *SIZE, seed=1), whole(2, 1, *SIZE, seed=2)
    values = {graph.input: x}

    def function(at: torch.Tensor) -> torch.Tensor:
        return graph.forward(graph.input, at, [graph.output], values)[0]

    moved = function(x + v) - function(x)
    _, slope = torch.autograd.functional.jvp(function, x, v)
    assert moved.shape == (2, *graph.output.shape)
    torch.testing.assert_close(slope, moved, rtol=0, atol=exactness(name))
    # What rearranges does not change the length of a difference.
    if Tag.REARRANGES in RULES[name].tags and len(nodes) == 1 and len(graph.nodes) == 2:
        assert math.isclose(moved.norm().item(), v.norm().item(), rel_tol=1e-12)
    direct = CASES[name][number](x[0] + v[0]) - CASES[name][number](x[0])
    torch.testing.assert_close(direct, moved[0], rtol=0, atol=exactness(name))


def exactness(name: str) -> float:
    """0, but where torch divides by numbers that are no powers of 2."""
    return 1e-12 if name in ("mean", "interpolate") or "avg_pool" in name else 0.0


@pytest.mark.parametrize("index", [0, 1, 2])
def test_repeated_positions_are_what_the_contract_is_for(index):
    """Of two writes to one place torch keeps one, and autograd counts both: without the refusal the contract breaks."""
    forward = CASES["setitem"][-3:][index]
    graph = captured(forward)
    x, v = whole(1, 1, *SIZE, seed=1), whole(1, 1, *SIZE, seed=2)

    def function(at: torch.Tensor) -> torch.Tensor:
        return graph.forward(graph.input, at, [graph.output], {graph.input: x})[0]

    _, slope = torch.autograd.functional.jvp(function, x, v)
    assert not torch.equal(slope, function(x + v) - function(x))
    (node,) = (node for node in graph.nodes if node.op == "setitem")
    with pytest.raises(NoAnswer, match="twice"):
        remainder_of(node)
