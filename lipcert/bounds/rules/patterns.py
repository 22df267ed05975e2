"""Replaces groups of operations in a captured network by the one operation that they implement.

Rules bound attention and normalisations far better as single operations than as the products, sums and roots that
implement them. These groups are recognised, by identities over the real numbers:

* softmax(s·q kᵀ + mask) v, with or without the scale, the mask and a dropout: attention;
* K x (αS + β)^(−½) = c·x/√(S/n + eps) with S = Σ x² over one axis of n entries, eps = β/(αn), c² = K²/(αn): RMSNorm
  with the weight c, which is also the smooth projection of :mod:`lipcert.surgery`; and LayerNorm, if x is another value
  minus its mean over the axis;
* K x max(αS, low)^(−½) = f·x/max(‖x‖, R), R² = low/α, f² = K²/α: a normalisation, for f = R the projection onto a ball.

Constants are exact fractions. The constants of an operation (eps, R) are rounded down and its factors up, which can
only enlarge Lipschitz constants and ranges. Similar operations that are not equal are left as they are: eps outside the
root, a sum along another axis. A factor that is detached from the gradient counts in full, because it depends on the
image.

A group is replaced only if no other operation reads its intermediate values, if all of them have one floating-point
type, and if the network then gives the same result on several images. The identities hold for real numbers: bounds on
rounding in a deployed type use the original operations (:mod:`lipcert.roundoff`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import RULES, NoAnswer
from lipcert.graph import Emit, Graph, Node, close, needed, rewritten


@dataclass(frozen=True)
class Match:
    """A group of operations that implements a single operation.

    Attributes:
        name: the single operation.
        node: the last operation of the group.
        reads: the operands of the single operation.
        inside: the other operations of the group.
        build: emits the single operation for the new nodes of ``reads``.
    """

    name: str
    node: Node
    reads: tuple[Node, ...]
    inside: frozenset[Node]
    build: Callable[[Emit, Sequence[Node]], Node]


def canonical_forms(graph: Graph, question: str, images: Sequence[Tensor]) -> Graph:
    """The network with every recognised group of operations replaced by one; the same network if there is none."""
    graph = needed(graph)
    found, names = _matched(graph, question, images[0].device if images else torch.device("cpu"))
    tolerance = 1e-10 if graph.input.dtype == torch.float64 else 1e-4
    with torch.no_grad():
        if not names or not all(close(found.replay(image), graph.replay(image), tolerance) for image in images):
            return graph
    return replace(found, forms=names)


def _matched(graph: Graph, question: str, device: torch.device) -> tuple[Graph, tuple[str, ...]]:
    """Replaces the matches whose intermediate values are not read elsewhere; returns the graph and their names."""
    choices: dict[Node, list[Match]] = {}
    for match in (match for node in graph.nodes for match in _ending_at(node, device)):
        if getattr(RULES.get(match.name), question, None) is not None:
            choices.setdefault(match.node, []).append(match)
    while choices:
        replaced, new = rewritten(graph, partial(_built, choices))
        replaced = needed(replaced)
        remaining = set(replaced.nodes)
        open_ = [node for node, matches in choices.items() if any(new(part) in remaining for part in matches[0].inside)]
        if not open_:
            return replaced, tuple(f"{matches[0].name} at {node.path}" for node, matches in choices.items())
        for node in open_:
            choices[node].pop(0)
        choices = {node: matches for node, matches in choices.items() if matches}
    return graph, ()


def _built(choices: dict[Node, list[Match]], node: Node, emit: Emit, new: Callable[[Node], Node]) -> Node | None:
    """The single operation in place of a node's first match."""
    match = choices[node][0] if node in choices else None
    return None if match is None else match.build(emit, [new(read) for read in match.reads])


def _ending_at(node: Node, device: torch.device) -> Iterator[Match]:
    """The matches whose last operation is this one, in the order in which they are tried."""
    if node.op not in ("matmul", "mul", "div"):
        return
    try:
        found = list(_attention(node) if node.op == "matmul" else _normalised(node, device))
    except NoAnswer:  # arguments that no rule reads
        return
    yield from (match for match in found if all(map(_plain, {node, *match.inside})))


def _plain(node: Node) -> bool:
    """Whether an operation has one real result of the same type as its operands, and no value involved is a scalar."""
    real = node.single and node.dtype is not None and node.dtype.is_floating_point
    nodes = (node, *node.operands)
    return real and len(nodes) > 1 and all(x.dtype == node.dtype and x.single and x.shape for x in nodes)


def _normalised(node: Node, device: torch.device) -> Iterator[Match]:
    """K x (αS + β)^(−½) and K x max(αS, low)^(−½)."""
    args = arguments(node)
    one, two = args["input"], args["other"]
    if not isinstance(one, Node) or not isinstance(two, Node) or args.get("rounding_mode") is not None:
        return
    for x, below in ((one, two), (two, one)) if node.op == "mul" else ((one, two),):
        gain, inside = Fraction(1), {below}
        if node.op == "mul" and (scaled := _with_number(below, "mul")) is not None:
            below, gain = scaled
            inside.add(below)
        total = below.args[0] if below.args else None
        if below.op != ("rsqrt" if node.op == "mul" else "sqrt") or not isinstance(total, Node):
            continue
        added, limited = _with_number(total, "add"), _with_number(total, "maximum")
        energy, number = added or limited or (total, Fraction(0))
        measured = _energy(energy)
        if measured is None or not (gain > 0 and number > 0 and total.shape == energy.shape and node.shape == x.shape):
            continue
        squared, axis, alpha, between = measured
        inside |= {total, energy, *between}
        beta, square = number / alpha, gain**2 / alpha
        centred = _centred(x, axis)
        if added and centred is not None and centred == _centred(squared, axis):
            inner = frozenset({*inside, *centred[1:], x, squared})
            yield Match("layer_norm", node, centred[:1], inner, _norm(F.layer_norm, node, axis, beta, square, device))
        if added and x is squared:
            yield Match("rms_norm", node, (x,), frozenset(inside), _norm(F.rms_norm, node, axis, beta, square, device))
        if limited and x is squared:
            yield Match("normalize", node, (x,), frozenset(inside), _onto_ball(node, axis, beta, square))


def _with_number(node: Node, op: str) -> tuple[Node, Fraction] | None:
    """(x, c) if a node is the sum, product or maximum of a value x and a constant number c."""
    args = arguments(node) if node.op == op else {}
    for x, other in (("input", "other"), ("other", "input")):
        number = _number_of(args.get(other))
        if number is not None and isinstance(args[x], Node) and args.get("alpha", 1) == 1:
            return args[x], number
    return None


def _energy(node: Node) -> tuple[Node, int, Fraction, list[Node]] | None:
    """(x, axis, α, the operations between) if a node is α Σ x² over an axis, which it keeps with size 1."""
    axis = _reduced(node, "sum", "mean")
    square = node.args[0] if axis is not None else None
    if axis is None or not isinstance(square, Node):
        return None
    args = arguments(square) if square.op in ("square", "pow", "mul") else {}
    x, alpha, between = args.get("input"), Fraction(1), [square]
    twice = square.op == "square" or _number_of(args.get("exponent")) == 2 or (x is not None and args.get("other") is x)
    if not isinstance(x, Node) or not twice:
        return None
    radius = _number_of(arguments(x).get("other")) if x.op == "div" and not x.kwargs else None
    if radius and isinstance(x.args[0], Node):  # Σ (x/R)²
        between.append(x)
        x, alpha = x.args[0], 1 / radius**2
    if x.shape != square.shape:
        return None
    share = Fraction(1, x.shape[axis]) if node.op == "mean" else Fraction(1)
    return x, axis, alpha * share, between


def _reduced(node: Node, *ops: str) -> int | None:
    """The axis, not that of the batch, over which an operation reduces, keeping it with size 1."""
    args = arguments(node) if node.op in ops else {}
    dim, x = args.get("dim"), args.get("input")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(x, Node) or type(dim) is not int or args.get("keepdim") is not True or args.get("dtype"):
        return None
    axis = dim % len(x.shape)
    return axis if axis and x.shape[axis] else None


def _centred(node: Node, axis: int) -> tuple[Node, Node] | None:
    """(x, its mean over an axis) if a node is their difference."""
    args = arguments(node) if node.op == "sub" else {}
    x, mean = args.get("input"), args.get("other")
    if not isinstance(x, Node) or not isinstance(mean, Node) or args.get("alpha", 1) != 1 or x.shape != node.shape:
        return None
    return (x, mean) if _reduced(mean, "mean") == axis and mean.operands == (x,) else None


def _norm(
    function: Callable[..., Tensor], node: Node, axis: int, beta: Fraction, square: Fraction, device: torch.device
) -> Callable[[Emit, Sequence[Node]], Node]:
    """√square · x/√(S + β) along an axis as a normalisation, which torch has along the last one."""
    shape, entries = node.shape, node.shape[axis]
    named: dict[str, Any] = {"eps": _rounded_down(beta / entries)}
    if square != entries:
        named["weight"] = _filled(_root_up(square / entries), entries, node.dtype or torch.float64, device)
    order = [*(d for d in range(len(shape)) if d != axis), axis]
    moved, back = tuple(shape[d] for d in order), [order.index(d) for d in range(len(shape))]
    last = axis == len(shape) - 1

    def build(emit: Emit, reads: Sequence[Node]) -> Node:
        x = reads[0] if last else emit("permute", torch.permute, (reads[0], order), {}, moved)
        x = emit(function.__name__, function, (x, (entries,)), named, moved)
        return x if last else emit("permute", torch.permute, (x, back), {}, shape)

    return build


def _onto_ball(node: Node, axis: int, low: Fraction, square: Fraction) -> Callable[[Emit, Sequence[Node]], Node]:
    """√square · x/max(‖x‖, √low)."""

    def build(emit: Emit, reads: Sequence[Node]) -> Node:
        normed = emit("normalize", F.normalize, (reads[0], 2.0, axis, _root_down(low)), {}, node.shape)
        return normed if square == 1 else emit("mul", torch.mul, (normed, _root_up(square)), {}, node.shape)

    return build


def _attention(node: Node) -> Iterator[Match]:
    """softmax(s·q kᵀ + mask) v."""
    args = arguments(node)
    weights, value = args["input"], args["other"]
    if not isinstance(weights, Node) or not isinstance(value, Node):
        return
    inside = {weights}
    if weights.op == "dropout" and isinstance(weights.args[0], Node):
        dropped = arguments(weights)
        if dropped.get("training", True) and dropped.get("p", 0.5):
            return
        weights = weights.args[0]
        inside.add(weights)
    of = arguments(weights) if weights.op == "softmax" else {}
    scores, dim, mask, scale = of.get("input"), of.get("dim"), None, Fraction(1)
    if not isinstance(scores, Node) or not isinstance(dim, int) or dim % len(weights.shape) != len(weights.shape) - 1:
        return
    if scores.op == "add":
        inside.add(scores)
        shifted = arguments(scores)
        scores, mask = shifted["input"], shifted["other"]
        if not isinstance(scores, Node) or not isinstance(mask, (Tensor, Node)) or shifted.get("alpha", 1) != 1:
            return
        if len(mask.shape) > len(weights.shape) or mask.dtype is None or not mask.dtype.is_floating_point:
            return
    if scores.op in ("mul", "div"):
        inside.add(scores)
        scaled = arguments(scores)
        number, product = _number_of(scaled["other"]), scaled["input"]
        if not number or number < 0 or scaled.get("rounding_mode") is not None or not isinstance(product, Node):
            return
        scale, scores = number if scores.op == "mul" else 1 / number, product
    if scores.op != "matmul" or scores.shape != weights.shape:
        return
    query, turned = arguments(scores)["input"], arguments(scores)["other"]
    inside |= {scores, turned}
    if not isinstance(query, Node) or not isinstance(turned, Node) or (key := _turned(turned)) is None:
        return
    if len(node.shape) < 3 or any(x.shape[:-2] != node.shape[:-2] for x in (query, key, value)):
        return
    reads = (query, key, value, *([mask] if isinstance(mask, Node) else []))

    def build(emit: Emit, reads: Sequence[Node]) -> Node:
        named = {"attn_mask": reads[3] if isinstance(mask, Node) else mask, "scale": -_rounded_down(-scale)}
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


def _number_of(constant: Any) -> Fraction | None:
    """The value of a constant with a single finite entry; None for everything else."""
    if isinstance(constant, Tensor):
        if constant.numel() != 1 or constant.is_meta or not constant.is_floating_point():
            return None
        constant = constant.item()
    if isinstance(constant, bool) or not isinstance(constant, (int, float)) or not math.isfinite(constant):
        return None
    return Fraction(constant)


def _rounded_down(number: Fraction) -> float:
    """A float64 number close to this one and at most equal to it."""
    near = float(number)
    return near if Fraction(near) <= number else math.nextafter(near, -math.inf)


def _root_down(number: Fraction) -> float:
    return math.nextafter(math.sqrt(_rounded_down(number)), 0.0)


def _root_up(number: Fraction) -> float:
    return math.nextafter(math.sqrt(-_rounded_down(-number)), math.inf)


def _filled(number: float, entries: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant vector, rounded up to the type."""
    vector = torch.full((entries,), number, dtype=dtype, device=device)
    return vector if vector[0].item() >= number else torch.nextafter(vector, torch.full_like(vector, math.inf))
