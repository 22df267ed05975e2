"""Derives facts about each value of a network, and finds the groups of operations that they identify."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F

from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import NoAnswer
from lipcert.bounds.forms._choices import chosen
from lipcert.bounds.forms._facts import (
    HALF,
    ROUNDED,
    Energy,
    Fact,
    Function,
    Mean,
    MinusMean,
    Polynomial,
    ScaledActivation,
    Total,
    filled,
    number_of,
    root_down,
    root_up,
    rounded_down,
    times,
)
from lipcert.bounds.forms._patterns import (
    Match,
    arguments_by_name,
    attention,
    larger,
    max_min,
    plain,
    single,
    unshifted,
)
from lipcert.bounds.forms._reflections import reflected
from lipcert.graph import Emit, Graph, Node

_FACTS = 6  # the largest number of facts kept for a value
_EXPONENTS = {"square": Fraction(2), "sqrt": HALF, "rsqrt": -HALF, "reciprocal": Fraction(-1)}


class Finder:
    """The facts about the values of one network, and the matches in it."""

    def __init__(self, graph: Graph, device: torch.device):
        self.graph, self.device = graph, device
        self.facts: dict[Node, list[Fact]] = {}

    def matches(self) -> Iterator[Match]:
        """All matches, in the order in which they should be tried."""
        for node in self.graph.nodes:
            facts: list[Fact] = [Polynomial(node, (Fraction(0), Fraction(1)))]
            for fact in self._learned(node) if plain(node) else ():
                facts.append(replace(fact, through=fact.through | {node}))
            self.facts[node] = facts[:_FACTS]
            if plain(node):
                yield from self._ending_at(node)
            if node.op in ("where", "masked_fill", "mul"):
                yield from chosen(node, self.facts)

    def _learned(self, node: Node) -> Iterator[Fact]:
        """The facts about the result of one operation; ``through`` does not contain the operation yet."""
        try:
            args = arguments_by_name(node)
        except NoAnswer:
            return
        op, x, y = node.op, args.get("input"), args.get("other")
        if op in ("add", "sub", "mul", "div"):
            yield from self._arithmetic(node, args)
        elif not isinstance(x, Node) or x not in self.facts:
            return
        elif op in ("identity", "reshape", "getitem", "expand"):
            yield from self._rearranged(node, x)
        elif op in ("sum", "mean", "var", "norm", "linalg_vector_norm"):
            yield from self._reduced(node, x, args)
        elif op == "neg":
            yield from self._transformed(x, "scaled", Fraction(-1))
        elif op in _EXPONENTS or op == "pow":
            exponent = _EXPONENTS.get(op) if op != "pow" else number_of(args.get("exponent"))
            if exponent is not None and x.shape == node.shape:
                yield from self._transformed(x, "power", exponent)
        elif op in ("clamp", "maximum", "max"):
            bound = number_of(y if op in ("maximum", "max") else args.get("min"))
            if bound is not None and args.get("max") is None and x.shape == node.shape:
                yield from self._transformed(x, "at_least", bound)
        elif op in ("exp", "erf", "tanh", "sigmoid"):
            for fact in self.facts[x]:
                if isinstance(fact, Polynomial):
                    yield Function(str(op), fact.x, fact.c, through=fact.through)

    def _transformed(self, node: Node, method: str, *args: Any) -> Iterator[Fact]:
        for fact in self.facts[node]:
            changed = getattr(fact, method)(*args) if hasattr(fact, method) else None
            if changed is not None:
                yield changed

    def _arithmetic(self, node: Node, args: dict[str, Any]) -> Iterator[Fact]:
        op, x, y = node.op, args.get("input"), args.get("other")
        alpha = number_of(args.get("alpha", 1))
        if alpha is None or args.get("rounding_mode") is not None:
            return
        sign = -alpha if op == "sub" else alpha
        a, b = number_of(x), number_of(y)
        if isinstance(x, Node) and b is not None and x.shape == node.shape:
            if op in ("add", "sub"):
                yield from self._transformed(x, "shifted", sign * b)
            elif op == "mul" or b:
                yield from self._transformed(x, "scaled", b if op == "mul" else 1 / b)
        elif isinstance(y, Node) and a is not None and y.shape == node.shape:
            for fact in self.facts[y]:
                changed: Any = fact
                if op == "div":
                    changed = fact.power(Fraction(-1)) if hasattr(fact, "power") else None
                changed = _scaled(changed, sign if op in ("add", "sub") else a)
                if op in ("add", "sub"):
                    changed = changed.shifted(a) if hasattr(changed, "shifted") else None
                if changed is not None:
                    yield changed
        elif isinstance(x, Node) and isinstance(y, Node):
            for first in self.facts[x]:
                for second in self.facts[y]:
                    joined = _joined(str(op), first, second, sign, x.shape == y.shape == node.shape)
                    if joined is None and op in ("add", "sub"):
                        joined = self._centred(first, second, sign) if x.shape == node.shape else None
                    if joined is not None:
                        through = first.through | second.through | joined.through | ({x, y} - {joined.x})
                        yield replace(joined, through=through)

    def _centred(self, first: Fact, second: Fact, sign: Fraction) -> Fact | None:
        """Recognises x − mean(x), and the variance mean(x²) − mean(x)²."""
        if isinstance(first, Polynomial) and isinstance(second, Mean) and second.keepdim and first.x is second.x:
            factor = first.only(1)
            if factor is not None and sign * second.factor == -factor:
                return MinusMean(first.x, second.axes, factor)
        if isinstance(first, Energy) and isinstance(second, Polynomial):
            square = second.only(2)
            plain = first.e == 1 and not (first.centred or first.beta or first.low)
            for mean in self.facts[second.x] if square is not None and plain else ():
                if isinstance(mean, Mean) and (mean.x, mean.axes, mean.keepdim) == (first.x, first.axes, first.keepdim):
                    count = math.prod(mean.x.shape[axis] for axis in mean.axes)
                    if -sign * (square or 0) * mean.factor**2 == first.alpha * count:
                        return replace(first, centred=True, through=mean.through | {second.x})
        return None

    def _rearranged(self, node: Node, x: Node) -> Iterator[Fact]:
        """Copies, and reductions whose axes are restored with size 1 or expanded."""
        if node.op == "identity":
            yield from (fact for fact in self.facts[x] if node.shape == x.shape and fact.x is not x)
            if node.shape == x.shape:
                yield Polynomial(x, (Fraction(0), Fraction(1)))
            return
        if node.op == "getitem" and not _adds_axes(node):
            return
        for fact in self.facts[x]:
            if isinstance(fact, (Mean, Energy, Total)):
                shape = _keepdim_shape(fact.x.shape, fact.axes)
                if node.op == "expand":
                    fits = len(node.shape) == len(shape) and all(
                        m == n or (d in fact.axes and m == fact.x.shape[d])
                        for d, (m, n) in enumerate(zip(node.shape, shape, strict=True))
                    )
                    if fact.keepdim and fits:
                        yield fact
                elif node.shape == shape:
                    yield replace(fact, keepdim=True)

    def _reduced(self, node: Node, x: Node, args: dict[str, Any]) -> Iterator[Fact]:
        dims = args.get("dim")
        dims = (dims,) if isinstance(dims, int) and not isinstance(dims, bool) else dims
        if not isinstance(dims, (tuple, list)) or not dims or args.get("dtype") or args.get("out") is not None:
            return
        axes = tuple(sorted({d % len(x.shape) for d in dims}))
        count = math.prod(x.shape[axis] for axis in axes)
        keepdim = bool(args.get("keepdim", False))
        if (
            0 in axes
            or not count
            or node.shape != (_keepdim_shape(x.shape, axes) if keepdim else _reduced_shape(x.shape, axes))
        ):
            return
        share = Fraction(1, count) if node.op == "mean" else Fraction(1)
        if node.op == "sum" and x.op == "exp" and len(axes) == 1:
            yield Total(x, axes, keepdim, through=frozenset((x,)))
        for fact in self.facts[x]:
            if not isinstance(fact, Polynomial):
                continue
            linear, square = fact.only(1), fact.only(2)
            if node.op in ("sum", "mean"):
                if linear is not None:
                    yield Mean(fact.x, axes, linear * share * count, keepdim, fact.through)
                if square is not None:
                    yield from self._energies(
                        Energy(fact.x, axes, False, keepdim, square * share, through=fact.through)
                    )
            elif node.op == "var" and linear is not None:
                correction = args.get("correction", 1 if args.get("unbiased", True) else 0)
                divisor = count - Fraction(1 if correction is None else correction)
                if divisor > 0:
                    yield Energy(fact.x, axes, True, keepdim, linear**2 / divisor, through=fact.through)
            elif node.op != "var" and linear is not None and len(axes) == 1 and _euclidean(node, args):
                energy = Energy(fact.x, axes, False, keepdim, linear**2, through=fact.through)
                yield from (replace(candidate, e=HALF) for candidate in self._energies(energy))

    def _energies(self, energy: Energy) -> Iterator[Energy]:
        """If x is another value minus its mean, the energy is also a centred energy of that value."""
        for fact in self.facts[energy.x]:
            if isinstance(fact, MinusMean) and fact.axes == energy.axes:
                through = energy.through | fact.through | {energy.x}
                alpha = energy.alpha * fact.factor**2
                yield replace(energy, x=fact.x, centred=True, alpha=alpha, through=through)
        yield energy

    def _ending_at(self, node: Node) -> Iterator[Match]:
        """The matches whose last operation is this one."""
        if node.op in ("mul", "div"):
            yield from self._normalised(node)
            yield from self._softmax(node)
            for fact in self.facts[node]:
                if isinstance(fact, ScaledActivation) and fact.factor == 1:
                    yield _activation(node, fact)
        if node.op in ("add", "sub"):
            yield from larger(node)
        if node.op == "cat":
            yield from max_min(node)
            yield from reflected(node, self.device)
        if node.op == "softmax":
            yield from unshifted(node)
        if node.op == "matmul":
            yield from attention(node)

    def _normalised(self, node: Node) -> Iterator[Match]:
        args = arguments(node)
        x, y = args.get("input"), args.get("other")
        if args.get("rounding_mode") is not None or not isinstance(x, Node) or not isinstance(y, Node):
            return
        pairs = [(x, y)] if node.op == "div" else [(x, y), (y, x)]
        quotients: list[tuple[bool, Match]] = []
        for above, below in pairs:
            for top in self.facts[above]:
                for bottom in self.facts[below]:
                    match = self._quotient(node, top, bottom)
                    if match is not None:
                        inside = top.through | bottom.through | ({above, below} - {top.x})
                        quotients.append((isinstance(top, MinusMean), replace(match, inside=frozenset(inside))))
        yield from (match for _, match in sorted(quotients, key=lambda pair: not pair[0]))

    def _quotient(self, node: Node, top: Fact, bottom: Fact) -> Match | None:
        """K x max(αS + β, low)^(−½)."""
        if not isinstance(bottom, Energy) or bottom.x is not top.x or not bottom.keepdim or node.shape != top.x.shape:
            return None
        if isinstance(top, MinusMean):
            factor = top.factor if top.axes == bottom.axes and bottom.centred else None
        else:
            factor = top.only(1) if isinstance(top, Polynomial) and not bottom.centred else None
        inverse = bottom.e == (-HALF if node.op == "mul" else HALF)
        if factor is None or factor <= 0 or not inverse:
            return None
        scale = factor * bottom.k if node.op == "mul" else factor / bottom.k
        if bottom.low is None:
            return self._standardised(node, bottom, scale) if bottom.beta > 0 else None
        return self._onto(node, bottom, scale) if not bottom.beta and not bottom.centred else None

    def _standardised(self, node: Node, energy: Energy, scale: Fraction) -> Match | None:
        entries = math.prod(energy.x.shape[axis] for axis in energy.axes)
        eps = rounded_down(energy.beta / (energy.alpha * entries))
        gain = root_up(scale**2 / (energy.alpha * entries))
        moves = _to_the_end(energy.x.shape, energy.axes)
        if moves is None or not eps > 0:
            return None
        name, function = ("layer_norm", F.layer_norm) if energy.centred else ("rms_norm", F.rms_norm)
        dtype, device = node.dtype or torch.float64, self.device

        def build(emit: Emit, reads: Sequence[Node]) -> Node:
            named: dict[str, Any] = {"eps": eps}
            if gain != 1:
                named["weight"] = filled(gain, entries, dtype, device)
            moved = _move(emit, reads[0], *moves[0]) if moves[0] else reads[0]
            normed = emit(name, function, (moved, (entries,)), named, moved.shape)
            return _move(emit, normed, *moves[1]) if moves[1] else normed

        return Match(name, node, (energy.x,), frozenset(), build)

    def _onto(self, node: Node, energy: Energy, scale: Fraction) -> Match | None:
        """f·x/max(‖x‖, R) along one axis."""
        if len(energy.axes) != 1 or energy.low is None:
            return None
        (axis,), shape = energy.axes, energy.x.shape
        factor, square = scale**2 / energy.alpha, energy.low / energy.alpha
        floor, gain = root_down(square), root_up(factor)

        def build(emit: Emit, reads: Sequence[Node]) -> Node:
            normed = emit("normalize", F.normalize, (reads[0], 2.0, axis, floor), {}, shape)
            return normed if gain == 1 else emit("mul", torch.mul, (normed, gain), {}, shape)

        return Match("normalize", node, (energy.x,), frozenset(), build) if floor > 0 else None

    def _softmax(self, node: Node) -> Iterator[Match]:
        args = arguments(node)
        x, y = args.get("input"), args.get("other")
        if args.get("rounding_mode") is not None:
            return
        for above, below in ((x, y), (y, x)) if node.op == "mul" else ((x, y),):
            if not isinstance(above, Node) or not isinstance(below, Node) or above.op != "exp" or not plain(above):
                continue
            for fact in self.facts[below]:
                if not isinstance(fact, Total) or not fact.keepdim or node.shape != above.shape:
                    continue
                if fact.x.operands == above.operands and fact.e == (-1 if node.op == "mul" else 1):
                    inside = frozenset((above, below)) | fact.through
                    build = single("softmax", torch.softmax, node.shape, *fact.axes)
                    yield Match("softmax", node, above.operands[:1], inside, build)


def _euclidean(node: Node, args: dict[str, Any]) -> bool:
    """Whether a norm is the ℓ2 norm."""
    return args.get("p" if node.op == "norm" else "ord", 2) in ("fro", 2, None)


def _keepdim_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if d in axes else n for d, n in enumerate(shape))


def _reduced_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for d, n in enumerate(shape) if d not in axes)


def _scaled(fact: Any, factor: Fraction) -> Any:
    if factor == 1:
        return fact
    return fact.scaled(factor) if hasattr(fact, "scaled") else None


def _adds_axes(node: Node) -> bool:
    """Whether an index selects all entries and only adds axes of size 1."""
    if len(node.args) != 2 or node.kwargs:
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    entire = [item is None or item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in index]
    return all(entire)


def _joined(op: str, first: Fact, second: Fact, sign: Fraction, same_shape: bool) -> Fact | None:
    """The fact about the sum, product or quotient of two facts about the same value x; None if there is none."""
    if first.x is not second.x or not same_shape:
        return None
    if isinstance(first, Polynomial) and isinstance(second, Polynomial):
        if op == "mul" and len(first.c) + len(second.c) <= 5:
            return Polynomial(first.x, times(first.c, second.c))
        if op in ("add", "sub"):
            length = max(len(first.c), len(second.c))
            padded = [(*fact.c, *[Fraction(0)] * (length - len(fact.c))) for fact in (first, second)]
            return Polynomial(first.x, tuple(a + sign * b for a, b in zip(*padded, strict=True)))
    if isinstance(second, Polynomial) and isinstance(first, Function) and op == "mul":
        first, second = second, first
    if isinstance(first, Polynomial) and isinstance(second, Function) and op in ("mul", "div"):
        linear = first.only(1)
        changed = second if op == "mul" else second.power(Fraction(-1))
        return None if linear is None or changed is None else _activated(first.x, linear, changed)
    return None


def _near(number: Fraction, target: float) -> bool:
    return abs(number - Fraction(target)) <= ROUNDED * Fraction(target)


def _activated(x: Node, linear: Fraction, function: Function) -> ScaledActivation | None:
    """The activation that linear·x·(a + b·g(p)) equals, if any."""
    c = (*function.c, *[Fraction(0)] * (4 - len(function.c)))
    even = function.a == function.b != 0 and c[0] == c[2] == 0
    if function.g == "sigmoid" and function.a == 0 and c[1] == 1 and not any((c[0], *c[2:])):
        return ScaledActivation("silu", x, linear * function.b)
    if function.g == "erf" and even and c[3] == 0 and _near(c[1], math.sqrt(0.5)):
        return ScaledActivation("gelu", x, 2 * linear * function.a)
    if function.g == "tanh" and even and _near(c[1], math.sqrt(2 / math.pi)) and _near(c[3] / c[1], 0.044715):
        return ScaledActivation("gelu_tanh", x, 2 * linear * function.a)
    return None


def _activation(node: Node, fact: ScaledActivation) -> Match:
    kwargs = {"approximate": "tanh"} if fact.name == "gelu_tanh" else {}
    name, function = ("silu", F.silu) if fact.name == "silu" else ("gelu", F.gelu)
    return Match(name, node, (fact.x,), fact.through - {node, fact.x}, single(name, function, node.shape, **kwargs))


def _to_the_end(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Any, Any] | None:
    """The operations that merge the axes into one last axis, and the inverse.

    Each is (operation, function, arguments, shape), or None if nothing has to be done. Returns None if no single
    operation does it.
    """
    dims = len(shape)
    if axes == (dims - 1,):
        return None, None
    if axes == tuple(range(axes[0], dims)):
        flat = (*shape[: axes[0]], math.prod(shape[axes[0] :]))
        return ("reshape", torch.reshape, (flat,), flat), ("reshape", torch.reshape, (shape,), shape)
    if len(axes) == 1:
        (axis,) = axes
        moved = (*shape[:axis], *shape[axis + 1 :], shape[axis])
        last, others = dims - 1, [d for d in range(dims) if d != axis]
        back = [*range(axis), last, *range(axis, last)]
        return ("permute", torch.permute, ((*others, axis),), moved), ("permute", torch.permute, (back,), shape)
    return None


def _move(emit: Emit, x: Node, op: str, function: Any, args: tuple[Any, ...], shape: tuple[int, ...]) -> Node:
    return emit(op, function, (x, *args), {}, shape)
