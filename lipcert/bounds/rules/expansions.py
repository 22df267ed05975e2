"""Replaces operations by several others, by identities over the real numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lipcert.graph import Emit, Graph, Node, rewritten


def explicit_attention(graph: Graph, device: torch.device | None = None) -> Graph:
    """Replaces fused attention by matrix products and a softmax.

    ``device`` is the device of the network, for causal masks; the CPU by default.
    """

    def substitute(node: Node, emit: Emit, new: Callable[[Node], Node]) -> Node | None:
        if node.op != "scaled_dot_product_attention":
            return None
        args, kwargs = node.arguments(new)
        return _as_products(node, emit, device, *args, **kwargs)

    return rewritten(graph, substitute)[0]


def explicit_maxima(graph: Graph) -> Graph:
    """Replaces max(a, b) by b + relu(a − b) and min(a, b) by a − relu(a − b), over the real numbers.

    Operations on the same two values share the relu, also where a network has such a relu itself, so that their
    remainders are not counted one by one.
    """
    relus: dict[tuple[Hashable, Hashable], tuple[Node, Node, Node]] = {}

    def substitute(node: Node, emit: Emit, new: Callable[[Node], Node]) -> Node | None:
        pair = _difference(node)
        if pair is None and not _compares(node):
            return None
        first, second = node.operands if pair is None else pair
        key = _part(first), _part(second)
        if pair is None and key[::-1] in relus:
            key = key[::-1]
        if key not in relus:
            a, b = new(first), new(second)
            difference = emit("sub", operator.sub, (a, b)) if pair is None else new(node.operands[0])
            relus[key] = a, b, emit("relu", torch.relu, (difference,))
        a, b, more = relus[key]
        if pair is not None:
            return more
        larger = node.op in ("max", "maximum")
        return emit("add", operator.add, (b, more)) if larger else emit("sub", operator.sub, (a, more))

    return rewritten(graph, substitute)[0]


def _compares(node: Node) -> bool:
    """Whether this is the larger or smaller of two values, entry by entry."""
    return (
        node.op in ("max", "maximum", "min", "minimum")
        and len(set(node.operands)) == 2
        and all(x.shape == node.shape and x.dtype == node.dtype for x in node.operands)
    )


def _part(node: Node) -> Hashable:
    """Equal for two nodes that are the same slice of one value."""
    if node.op != "getitem" or len(node.args) != 2 or not isinstance(node.args[0], Node):
        return node
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    ends = [(item.start, item.stop, item.step) if isinstance(item, slice) else (item,) for item in index]
    if not all(end is None or end is Ellipsis or type(end) is int for item in ends for end in item):
        return node
    return node.args[0], *ends


def _difference(node: Node) -> tuple[Node, Node] | None:
    """(a, b) if this is relu(a − b) for two values of its shape."""
    if node.op != "relu" or len(node.operands) != 1 or node.operands[0].op != "sub":
        return None
    sub = node.operands[0]
    pair = tuple(sub.args)
    if sub.kwargs or len(pair) != 2 or not all(isinstance(x, Node) and x.shape == node.shape for x in pair):
        return None
    return pair if all(x.dtype == node.dtype for x in (sub, *pair)) else None


def _as_products(
    node: Node,
    emit: Emit,
    device: torch.device | None,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Node:
    if enable_gqa:  # a group of queries shares its keys and values
        key, value = (_repeated(x, query.shape[-3] // x.shape[-3], emit) for x in (key, value))
    width = query.shape[-1]
    scores = (*node.shape[:-1], key.shape[-2])
    factor = 1 / math.sqrt(width) if scale is None else scale
    turned = (*key.shape[:-2], key.shape[-1], key.shape[-2])
    order = (*range(len(turned) - 2), -1, -2)
    keys = key.mT if isinstance(key, Tensor) else emit("permute", torch.permute, (key, order), shape=turned)
    product = emit("matmul", torch.matmul, (query, keys), shape=scores)
    logits = emit("mul", operator.mul, (product, factor), shape=scores)
    if is_causal:
        attn_mask = torch.ones(scores[-2:], dtype=torch.bool, device=device).tril()
    if isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.bool:
        zeros = torch.zeros(attn_mask.shape, dtype=torch.float64, device=attn_mask.device)
        attn_mask = zeros.masked_fill(~attn_mask, -math.inf)
    hidden = None
    if isinstance(attn_mask, Tensor):
        hidden = (attn_mask == -math.inf).all(-1, keepdim=True)
        # A mask without values (meta) is only read for the table of coverage.
        hidden = hidden if hidden.device.type != "meta" and bool(hidden.any()) else None
    if hidden is not None:  # a row of −∞ alone would be NaN after the softmax; its result is set to 0 below
        attn_mask = attn_mask.masked_fill(hidden, 0.0)
    if attn_mask is not None:
        logits = emit("add", operator.add, (logits, attn_mask), shape=scores)
    weights = emit("softmax", torch.softmax, (logits, -1), shape=scores)
    if hidden is not None:  # the result of a query that sees no key is 0
        weights = emit("mul", operator.mul, (weights, (~hidden).to(attn_mask.dtype)), shape=scores)
    return emit("matmul", torch.matmul, (weights, value))


def _repeated(x: Any, times: int, emit: Emit) -> Any:
    """Repeats every key or value head for its group of queries."""
    if times == 1:
        return x
    if isinstance(x, Tensor):
        return x.repeat_interleave(times, -3)
    shape = (*x.shape[:-3], x.shape[-3] * times, *x.shape[-2:])
    return emit("repeat_interleave", torch.repeat_interleave, (x, times, -3), shape=shape)
