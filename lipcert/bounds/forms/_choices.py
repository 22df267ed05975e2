"""Choices by a comparison: ``where(x > t, f(x), g(x))`` for linear f and g that agree at t is an activation.

The comparison alone is not continuous, so without that agreement, which is checked exactly, there is no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds.forms._facts import Polynomial, number_of
from lipcert.bounds.forms._patterns import Match
from lipcert.graph import Emit, Node

COMPARED = {"gt": 1, "ge": 1, "lt": -1, "le": -1, "greater": 1, "greater_equal": 1, "less": -1, "less_equal": -1}
# A line (constant, slope).
Line = tuple[Fraction, Fraction]


def chosen(node: Node, facts: Mapping[Node, Sequence[Any]]) -> Iterator[Match]:
    """``where``, ``masked_fill`` and products with a mask, whose mask compares x with a number."""
    parts = parts_of_choice(node)
    if parts is None or node.dtype is None or not node.dtype.is_floating_point:
        return
    mask, true, false, between = parts
    x, threshold = mask.args[0], number_of(mask.args[1]) if len(mask.args) == 2 and not mask.kwargs else None
    if not isinstance(x, Node) or threshold is None or x.shape != node.shape or x.dtype != node.dtype:
        return
    above, below = (true, false) if COMPARED[str(mask.op)] > 0 else (false, true)
    lines = [_line(branch, x, facts) for branch in (above, below)]
    if lines[0] is None or lines[1] is None:
        return
    (high, up, ups), (low, down, downs) = lines[0], lines[1]
    if high + up * threshold != low + down * threshold:
        return
    activation = _activation((high, up), (low, down), threshold)
    if activation is not None:
        name, function, arguments, sign = activation

        def build(emit: Emit, reads: Sequence[Node]) -> Node:
            operand = emit("neg", torch.neg, (reads[0],), {}, node.shape) if sign < 0 else reads[0]
            result = emit(name, function, (operand, *arguments), {}, node.shape)
            return emit("neg", torch.neg, (result,), {}, node.shape) if sign < 0 else result

        yield Match(name, node, (x,), frozenset({mask, *between, *ups, *downs} - {x}), build)


def _activation(
    high: Line, low: Line, threshold: Fraction
) -> tuple[str, Callable[..., Any], tuple[float | None, ...], int] | None:
    """Name, function, arguments and sign s of the activation s·φ(s·x) with these lines above and below t."""
    if low[1] == 0 and high[1] == 1 and high[0] == 0:
        return ("relu", F.relu, (), 1) if threshold == 0 else ("clamp", torch.clamp, (float(threshold),), 1)
    if high[1] == 0 and low[1] == 1 and low[0] == 0:
        return ("relu", F.relu, (), -1) if threshold == 0 else ("clamp", torch.clamp, (None, float(threshold)), 1)
    if threshold or high[0] or low[0]:
        return None
    if high[1] == 1:
        return "leaky_relu", F.leaky_relu, (float(low[1]),), 1
    return ("leaky_relu", F.leaky_relu, (float(high[1]),), -1) if low[1] == 1 else None


def _line(
    branch: Any, x: Node, facts: Mapping[Node, Sequence[Any]]
) -> tuple[Fraction, Fraction, frozenset[Node]] | None:
    """(constant, slope, operations between) of a branch that is a linear function of x, or a constant."""
    if branch is x:
        return Fraction(0), Fraction(1), frozenset()
    if isinstance(branch, Node):
        for fact in facts.get(branch, ()):
            if isinstance(fact, Polynomial) and fact.x is x and branch.shape == x.shape and not any(fact.c[2:]):
                return fact.c[0], fact.c[1] if len(fact.c) > 1 else Fraction(0), fact.through | {branch}
        return None
    if isinstance(branch, Tensor) and branch.numel() > 1 and bool((branch == branch.flatten()[0]).all()):
        branch = branch.flatten()[0]
    constant = number_of(branch)
    return None if constant is None else (constant, Fraction(0), frozenset())


def parts_of_choice(node: Node) -> tuple[Node, Any, Any, tuple[Node, ...]] | None:
    """(comparison, value where it holds, value elsewhere, operations between)."""
    if node.kwargs or not all(isinstance(argument, (Node, Tensor, int, float)) for argument in node.args):
        return None
    if node.op == "where" and len(node.args) == 3:
        mask, true, false = node.args
        # Tensor.where(condition, other) names its own value first.
        if isinstance(true, Node) and true.op in COMPARED:
            mask, true = true, mask
    elif node.op == "masked_fill" and len(node.args) == 3:
        false, mask, true = node.args
    elif node.op == "mul" and len(node.args) == 2:
        mask, true = node.args if _mask(node.args[0])[0] is not None else node.args[::-1]
        false = 0
    else:
        return None
    comparison, between = _mask(mask)
    return None if comparison is None else (comparison, true, false, between)


def _mask(value: Any) -> tuple[Node | None, tuple[Node, ...]]:
    """The comparison behind a mask, and the casts between."""
    between: list[Node] = []
    while isinstance(value, Node) and value.op == "identity" and value.args:
        between.append(value)
        value = value.args[0]
    comparison = value if isinstance(value, Node) and value.op in COMPARED and value.args else None
    return comparison, tuple(between)
