"""A check of your own rules: compares each of their answers with measurements.

>>> @lipcert.bounds.rule(my_operation)
... def answer(call, x):
...     "Why the constant holds."
...     return lipcert.bounds.Value(x.shape, 2 * x.lip)
>>> lipcert.bounds.testing.check_rule(my_operation, (3, 4))
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lipcert.bounds import Analysis, Boxes, NoAnswer, Operand, analyze, kept_whole, local_error, remainder_of
from lipcert.bounds._box import Propagation
from lipcert.bounds.rules.expansions import explicit_attention
from lipcert.errors import InputError
from lipcert.graph import Node, capture, evaluate, needed
from lipcert.numerics import DTYPES, Format

_RADII = (1e-2, 0.3, 1.0)
# (what is measured, measurements, their bounds, what float64 may be off by).
Measured = Iterator[tuple[str, Any, Any, Any]]


def check_rule(
    function: Callable[[Tensor], Tensor] | nn.Module, size: tuple[int, ...], *, points: int = 12, seed: int = 0
) -> dict[str, float]:
    """Compares the answers of the rules for a function of one tensor with measurements at points in [0, 1].

    The Lipschitz constant is compared with Jacobians and with quotients of nearby points, boxes with points in a ball,
    remainders and linearity with random deviations and with those of single entries, rounding errors with the operation
    in float32, float16 and bfloat16. Passing is not a proof: the proof is in the docstring of the rule.

    Args:
        function: a function or module of one tensor, for each entry of the batch by itself.
        size: shape of the tensor without the batch.
        points: number of points, drawn inside, at corners and on faces.
        seed: of the draws.

    Returns:
        The largest measurement as a share of its bound, for each of "lipschitz", "box", "remainder" and "rounding" that
        all operations answer.

    Raises:
        AssertionError: a measurement exceeds its bound; the message names the question.
        InputError: the rules give no finite constant.
    """
    module = _Applied(function).double().eval()
    analysis = analyze(module, size)
    if not analysis.output.lip.finite:
        raise InputError("the rules give no finite constant for this function; bound its input, as a sigmoid does")
    draw = torch.Generator().manual_seed(seed)
    inside = torch.rand(points, 1, *size, generator=draw, dtype=torch.float64)
    images = [(x, x.round(), (2 * x - 0.5).clamp(0, 1))[i % 3] for i, x in enumerate(inside)]
    questions = {
        "lipschitz": _slopes(module, images, draw, float(analysis.output.lip)),
        "box": _in_boxes(module, analysis, images, draw),
        "remainder": _remainders(module, images, draw),
        "rounding": _rounding(module, images),
    }
    shares = {}
    for question, measured in questions.items():
        try:
            shares[question] = max((_share(*one) for one in measured), default=0.0)
        except NoAnswer:
            continue
    return shares


def _share(what: str, attained: Any, limit: Any, slack: Any) -> float:
    attained, limit, slack = (torch.as_tensor(x, dtype=torch.float64) for x in (attained, limit, slack))
    above = ~((attained <= limit * (1 + 1e-9) + slack) | limit.isinf())
    if bool(above.any()):
        worst = (attained - limit).masked_fill(~above, -math.inf).argmax()
        pair = [float(x.expand_as(above).flatten()[worst]) for x in (attained, limit)]
        raise AssertionError(f"{what} is {pair[0]:.6g}, and the bound is {pair[1]:.6g}")
    return float(torch.where(limit > slack, attained / limit, 0.0).max()) if above.numel() else 0.0


class _Applied(nn.Module):
    """A function as a module, with a parameter that carries the dtype."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function
        self.marker = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _slopes(module: nn.Module, images: list[Tensor], draw: torch.Generator, bound: float) -> Measured:
    slack = 1e-6 * bound  # differences of numbers near 1 lose digits, and torch's hardsigmoid has a slope in float32
    for x in images:
        jacobian = torch.autograd.functional.jacobian(lambda at: module(at).flatten(), x)
        yield "the norm of a Jacobian", torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2), bound, slack
        near = (x + 0.1 * torch.randn(x.shape, generator=draw, dtype=torch.float64)).clamp(0, 1)
        with torch.no_grad():
            quotient = (module(x) - module(near)).norm() / (x - near).norm().clamp_min(1e-300)
        yield "a quotient of differences", quotient, bound, slack


@torch.no_grad()
def _in_boxes(module: nn.Module, analysis: Analysis, images: list[Tensor], draw: torch.Generator) -> Measured:
    boxes, at = Boxes(analysis), torch.stack(images)
    nominal = boxes.nominal(at[:, 0])
    for radius in _RADII:
        output = Propagation(boxes, nominal, torch.full((len(at),), radius, dtype=torch.float64)).output
        for _ in range(5):
            delta = torch.randn(at.shape, generator=draw, dtype=torch.float64)
            delta = radius * delta / delta.flatten(1).norm(dim=1).reshape(-1, *[1] * (delta.dim() - 1))
            moved = torch.stack([module((x + d).clamp(0, 1)) - module(x) for x, d in zip(at, delta, strict=True)])
            for side, limit in ((moved, output.up), (-moved, output.down)):
                yield "the box of an entry: its deviation", side, limit, 1e-12 * (1 + output.value.abs())


def _nodes(module: nn.Module, images: list[Tensor], question: str) -> Iterator[tuple[Node, Mapping[Node, Tensor]]]:
    """The operations that depend on the image, with the values at each image."""
    graph = capture(module, images[0], lambda part: kept_whole(part) and kept_whole(part, question))
    graph = needed(explicit_attention(graph, images[0].device))
    for image in images:
        values = evaluate(graph.nodes, {graph.input: image})
        yield from ((node, values) for node in graph.nodes[1:] if all(n.single for n in (node, *node.operands)))


@torch.no_grad()
def _remainders(module: nn.Module, images: list[Tensor], draw: torch.Generator) -> Measured:
    for node, values in _nodes(module, images, "remainder"):
        distinct = list(dict.fromkeys(node.operands))
        deltas, rho = _deviations([values[o] for o in distinct], draw)
        at = {o: values[o].expand(len(rho), *values[o].shape).clone() for o in (*distinct, node)}
        nominal = tuple(at[o] for o in distinct)

        def result(*operands: Tensor, node: Node = node, distinct: list[Node] = distinct) -> Tensor:
            return evaluate((node,), dict(zip(distinct, operands, strict=True)))[node]

        base, linear = torch.func.jvp(torch.vmap(result), nominal, deltas)[:2]
        moved = torch.vmap(result)(*(x + d for x, d in zip(nominal, deltas, strict=True)))
        rest = torch.where(moved == base, 0.0, moved - base) - linear  # masked entries are −∞
        size, sizes = _norms(rest), _norms(base.nan_to_num(neginf=0)) + _norms(linear)
        slack = 1e-12 * (1 + math.sqrt(node.entries) * sizes)
        rule = remainder_of(node)
        if rule is None:
            yield f"{node.name} is registered as linear; its remainder", size, 0.0, 1e3 * slack
            continue
        known, radii = rule(node, [at[o] for o in node.operands], at[node]), [rho] * len(node.operands)
        yield f"the remainder of {node.name}: its norm", size, known.norm(radii), slack
        what = f"the remainder of {node.name}: its part against a direction"
        yield what, size**2, known.against(-rest)(radii), slack


def _norms(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).norm(dim=1)


def _deviations(at: list[Tensor], draw: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
    """Deviations of all operands, random ones and both signs of single entries, and their norms."""
    deltas = []
    for x in at:
        drawn = torch.randn(5, x.numel(), generator=draw, dtype=torch.float64)
        entries = torch.arange(max(x.numel() for x in at))[:16] % x.numel()
        single = F.one_hot(entries, x.numel()).double()
        unit = torch.cat([F.normalize(drawn, dim=1), single, -single])
        deltas.append(torch.cat([radius * unit for radius in _RADII]).reshape(-1, *x.shape))
    return tuple(deltas), torch.tensor(_RADII, dtype=torch.float64).repeat_interleave(len(deltas[0]) // len(_RADII))


@torch.no_grad()
def _rounding(module: nn.Module, images: list[Tensor]) -> Measured:
    for node, values in _nodes(module, images, "rounding"):
        for dtype in DTYPES.values():
            nominal = [values[o] for o in node.operands]
            try:
                error, bound = _error(node, [value.to(dtype).double() for value in nominal], nominal, dtype)
            except NotImplementedError:  # torch has no such kernel on this device, so nothing is deployed
                continue
            yield f"the error of {node.name} in {dtype}", error, bound, 0.0


@torch.no_grad()
def _error(node: Node, exact: list[Tensor], nominal: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rounding errors of an operation in a format, on operands in the format, and their bounds by nominal ones."""
    away = [(near - value).norm()[None] * (1 + 1e-12) for near, value in zip(nominal, exact, strict=True)]
    operands = [
        Operand(near[None], rho, torch.full_like(rho, math.inf)) for near, rho in zip(nominal, away, strict=True)
    ]
    rounded, unrounded = _in(dtype, node, exact), _in(torch.float64, node, exact)
    error = (rounded - unrounded).abs().masked_fill(rounded == unrounded, 0.0)  # −∞ of a mask is exact: ∞ − ∞ is NaN
    return error, local_error(node, operands, Format.of(dtype))[0]


def _in(dtype: torch.dtype, node: Node, operands: list[Tensor]) -> Tensor:
    """An operation in a format, with its constants cast."""
    remaining = iter(operands)
    tree = node.arguments(lambda _: next(remaining))
    args, kwargs = tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)
    function = copy.deepcopy(node.function).to(dtype) if isinstance(node.function, nn.Module) else node.function
    result: Tensor = function(*args, **kwargs)
    return result.double()
