"""Groups that are recognised from their last operations alone, and the description of a match."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds.forms._facts import number_of, rounded_down
from lipcert.graph import Emit, Node
from lipcert.surgery import MaxMin


@dataclass(frozen=True)
class Match:
    """A group of operations that implements a single operation.

    Attributes:
        name: the key of the single operation.
        node: the last operation of the group.
        reads: the operands of the single operation.
        inside: the other operations of the group.
        build: emits the single operation for the new nodes of ``reads``.
    """

    name: Any
    node: Node
    reads: tuple[Node, ...]
    inside: frozenset[Node]
    build: Callable[[Emit, Sequence[Node]], Node]


def single(
    name: Any, function: Any, shape: tuple[int, ...], *more: Any, **named: Any
) -> Callable[[Emit, Sequence[Node]], Node]:
    """Emits one operation, with further arguments after its operands."""
    return lambda emit, reads: emit(name, function, (*reads, *more), named, shape)


def arguments_by_name(node: Node) -> dict[str, Any]:
    """The arguments by name; only the operand of operations that move entries."""
    if node.op in ("reshape", "getitem", "expand", "identity"):
        return {"input": node.args[0] if node.args else None}
    return arguments(node)


def plain(node: Node) -> bool:
    """Whether an operation has one real result of the same type as its operands, and no value involved is a scalar."""
    real = node.single and node.dtype is not None and node.dtype.is_floating_point and isinstance(node.op, str)
    nodes = (node, *node.operands)
    return real and len(nodes) > 1 and all(x.dtype == node.dtype and x.single and x.shape for x in nodes)


def larger(node: Node) -> Iterator[Match]:
    """b + relu(a − b) and a − relu(a − b)."""
    args = arguments(node)
    x, y = args.get("input"), args.get("other")
    if args.get("alpha", 1) != 1 or not isinstance(x, Node) or not isinstance(y, Node):
        return
    for term, rectified in ((x, y), (y, x)) if node.op == "add" else ((x, y),):
        difference = _relu_of(rectified)
        if difference is None or difference.op != "sub" or difference.shape != node.shape or not plain(difference):
            continue
        between = arguments(difference)
        a, b = between.get("input"), between.get("other")
        if between.get("alpha", 1) != 1 or not isinstance(a, Node) or not isinstance(b, Node):
            continue
        if a.shape != node.shape or b.shape != node.shape or term is not (b if node.op == "add" else a):
            continue
        name, function = ("maximum", torch.maximum) if node.op == "add" else ("minimum", torch.minimum)
        yield Match(name, node, (a, b), frozenset((rectified, difference)), single(name, function, node.shape))


def _relu_of(node: Node) -> Node | None:
    if node.op == "relu":
        x = node.args[0] if node.args else node.kwargs.get("input")
    elif node.op == "clamp":
        args = arguments(node)
        x = args.get("input") if number_of(args.get("min")) == 0 and args.get("max") is None else None
    else:
        return None
    return x if isinstance(x, Node) and plain(node) else None


def max_min(node: Node) -> Iterator[Match]:
    """cat(max(a, b), min(a, b)) for the two halves a, b of a value."""
    args = arguments(node)
    parts, dim = args.get("tensors"), args.get("dim", 0)
    if not isinstance(parts, (tuple, list)) or len(parts) != 2 or not isinstance(dim, int):
        return
    high, low = parts
    named = ((high, ("max", "maximum")), (low, ("min", "minimum")))
    if not all(isinstance(part, Node) and part.op in names and len(part.operands) == 2 for part, names in named):
        return
    axis, sources = dim % len(node.shape), {*high.operands, *low.operands}
    halves = [{half for x in part.operands if (half := half_of(x, axis))} for part in parts]
    x = next((x for x, _ in halves[0]), node)
    if not axis or not halves[0] == halves[1] == {(x, 0), (x, 1)} or x.shape != node.shape:
        return
    yield Match(MaxMin, node, (x,), frozenset((high, low)) | sources, single(MaxMin, MaxMin(axis), node.shape))


def half_of(node: Node, axis: int) -> tuple[Node, int] | None:
    """(x, 0) if this is the first half of x along an axis, (x, 1) if it is the second; otherwise None."""
    if node.op == "part":
        cut, place = node.args
        if cut.op not in ("chunk", "split") or len(cut.args) < 2 or place not in (0, 1):
            return None
        x, number = cut.args[:2]
        dim, size = cut.args[2] if len(cut.args) > 2 else cut.kwargs.get("dim", 0), node.shape[axis]
        halves = (2,) if cut.op == "chunk" else (size, [size] * 2, (size,) * 2)
        if not isinstance(x, Node) or number not in halves or dim % len(x.shape) != axis or 2 * size != x.shape[axis]:
            return None
        return x, place
    if node.op != "getitem" or len(node.args) != 2 or not isinstance(node.args[0], Node):
        return None
    x, index = node.args[0], node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if Ellipsis in [item for item in index if not isinstance(item, (Tensor, Node))]:
        place = index.index(Ellipsis)
        index = (*index[:place], *[slice(None)] * (len(x.shape) - len(index) + 1), *index[place + 1 :])
    size, half = x.shape[axis], x.shape[axis] // 2
    full = [isinstance(item, slice) and (item == slice(None) or d == axis) for d, item in enumerate(index)]
    if size % 2 or not all(full) or len(index) <= axis:
        return None
    reached: object = range(size)[index[axis]]
    return next(((x, i) for i, part in enumerate((range(half), range(half, size))) if reached == part), None)


def unshifted(node: Node) -> Iterator[Match]:
    """softmax(x − c) = softmax(x) if c is constant along the axis."""
    args = arguments(node)
    z, dim = args.get("input"), args.get("dim")
    if not isinstance(z, Node) or z.op not in ("sub", "add") or not isinstance(dim, int) or z.dtype != node.dtype:
        return
    between = arguments(z)
    x, c = between.get("input"), between.get("other")
    shape = tuple(getattr(c, "shape", ()))
    from_end = len(node.shape) - dim % len(node.shape)  # index of the axis, counted from the end
    constant = len(shape) < from_end or shape[-from_end] == 1
    if isinstance(x, Node) and isinstance(c, Node) and x.shape == z.shape and x.dtype == z.dtype and constant:
        yield Match("softmax", node, (x,), frozenset((z,)), single("softmax", torch.softmax, node.shape, dim))


def attention(node: Node) -> Iterator[Match]:
    """softmax(s·q kᵀ + mask) v."""
    args = arguments(node)
    weights, value = args.get("input"), args.get("other")
    if not isinstance(weights, Node) or not isinstance(value, Node):
        return
    inside = {weights}
    if weights.op == "dropout" and isinstance(weights.args[0], Node):
        dropped = arguments(weights)
        if dropped.get("training", True) and dropped.get("p", 0.5):
            return
        weights = weights.args[0]
        inside.add(weights)
    if weights.op != "softmax":
        return
    of = arguments(weights)
    scores, dim = of.get("input"), of.get("dim")
    if not isinstance(scores, Node) or not isinstance(dim, int) or dim % len(weights.shape) != len(weights.shape) - 1:
        return
    mask: Any = None
    if scores.op == "add":
        inside.add(scores)
        shifted = arguments(scores)
        term, bias = shifted.get("input"), shifted.get("other")
        product = term if isinstance(term, Node) and term.op in ("mul", "div", "matmul") else None
        if product is None or shifted.get("alpha", 1) != 1 or not isinstance(bias, (Tensor, Node)):
            return
        mask, scores = bias, product
    scale = Fraction(1)
    if scores.op in ("mul", "div"):
        inside.add(scores)
        scaled = arguments(scores)
        number, product = number_of(scaled.get("other")), scaled.get("input")
        if not number or scaled.get("rounding_mode") is not None or not isinstance(product, Node):
            return
        scale, scores = number if scores.op == "mul" else 1 / number, product
    if scores.op != "matmul" or scores.shape != weights.shape or scale <= 0:
        return
    inside.add(scores)
    query, turned = arguments(scores)["input"], arguments(scores)["other"]
    if not isinstance(query, Node) or not isinstance(turned, Node) or (key := _turned(turned)) is None:
        return
    inside.add(turned)
    lead = node.shape[:-2]
    if len(node.shape) < 3 or any(x.shape[:-2] != lead for x in (query, key, value)):
        return
    if mask is not None and (len(mask.shape) > len(weights.shape) or not mask.dtype.is_floating_point):
        return
    reads = (query, key, value, *([mask] if isinstance(mask, Node) else []))

    def build(emit: Emit, reads: Sequence[Node]) -> Node:
        named = {"attn_mask": reads[3] if isinstance(mask, Node) else mask, "scale": -rounded_down(-scale)}
        return emit("scaled_dot_product_attention", _attend, tuple(reads[:3]), named, node.shape)

    yield Match("scaled_dot_product_attention", node, reads, frozenset(inside), build)


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Attention that runs under ``vmap``, unlike torch's fused kernel."""
    scores = query @ key.mT * scale
    return torch.softmax(scores if attn_mask is None else scores + attn_mask, -1) @ value


def _turned(node: Node) -> Node | None:
    """k, if this is kᵀ (the last two axes transposed); otherwise None."""
    dims, x = len(node.shape), node.args[0] if node.args else None
    if node.op != "permute" or not isinstance(x, Node) or node.kwargs:
        return None
    order = [d % dims for arg in node.args[1:] for d in (arg if isinstance(arg, (tuple, list)) else (arg,))]
    return x if order == [*range(dims - 2), dims - 1, dims - 2] else None
