"""The types of a deployed network's operations, and the rounding errors of the constants that it computes.

The network F in real arithmetic is captured in float64, without casts. The deployed network F̂ is captured in its own
format, casts included. Both run the same operations. Those of F̂ give the type of each result: a network in bfloat16 may
compute a part in float32. A result of another type than its operands is refused, except where the operation is a cast.

A constant that the network computes from its weights is the result of a small graph of its own, whose operations were
recorded. Let c be its value in F, and ĉ in F̂. For an operation w = f(x, y) of such a graph, with an error bound E_x on
|x̂ − x| and E_y on |ŷ − y|, entry by entry,

    |ŵ − w| ≤ |f̂(x̂, ŷ) − f(x̂, y)| + |f(x̂, y) − f(x, y)|.

The first term is the operation's rounding error for a constant y with the error E_y: the same rules bound it as in the
network itself. The second is at most |J|E_x if f(·, y) is linear with a matrix J whose absolute values are known; what
f changes by between x and x ± E_x if f is a monotone function of each entry; L E_x if f acts entry by entry with the
Lipschitz constant L; and otherwise in every entry at most L‖E_x‖. Weights and other constants err as they are cast.
The float64 values with which all of this is computed are themselves results of f̂, in float64; so the rounding errors in
float64 are added in the same way, and E bounds |ĉ − c*| + |c̃ − c*|, with c* in real arithmetic and c̃ in float64. The
captured c may have been computed in another order, or partly in float32; |c − c̃| is added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lipcert.bounds import (
    RULES,
    NoAnswer,
    Operand,
    Tag,
    Value,
    absolute_products,
    global_value,
    local_error,
    refusal,
    replayed,
    tagged,
)
from lipcert.errors import UnsupportedCode, first_line
from lipcert.graph import MADE, UNKNOWN, Graph, Node, capture, unchecked
from lipcert.model import Model, copy_of
from lipcert.numerics import OWN_ROUNDING, REAL, ConstantErrors, Format, RealArithmetic, at_most, mapped

# Functions whose results are the numbers of their arguments, or whole numbers.
_EXACTLY_MADE = frozenset(("zeros", "ones", "full", "tensor", "as_tensor", "eye", "zeros_like", "ones_like",
                           "full_like", "new_zeros", "new_ones", "new_full"))  # fmt: skip


@torch.no_grad()
def deployed_graph(
    model: Model, fmt: Format, image: Tensor, whole: Callable[[nn.Module], bool]
) -> tuple[Graph, Format, list[tuple[str, str]]]:
    """Captures a model in float64 and as it is deployed.

    Args:
        model: the model in float64.
        fmt: the format; in ``REAL`` both are the same.
        image: an example, float64, shape (1, C, H, W).
        whole: as for :func:`lipcert.graph.capture`.

    Returns:
        The network in real arithmetic, where each node's ``dtype`` is that of the deployed network; the format, with
        bounds on the errors of the constants that the network computes; and what has no bound, by operation and path.

    Raises:
        UnsupportedCode: the forward code does something else in the format.
    """
    if fmt == REAL:
        return capture(model, image, whole), fmt, []
    graph = capture(model, image, whole, constants=True)
    twin_model = copy_of(model).to(fmt.dtype)
    twin_model.real = False
    twin = unchecked(twin_model, image.to(fmt.dtype), whole, constants=True)
    if [(node.op, node.shape) for node in graph.nodes] != [(node.op, node.shape) for node in twin.nodes]:
        raise UnsupportedCode([(f"forward code that does something else in {str(fmt.dtype)[6:]}", "")])
    fmt, refused = replace(fmt, computed=ConstantErrors()), []
    errors = _Bounding(fmt, graph, twin)
    for node, other in zip(graph.nodes, twin.nodes, strict=True):
        try:
            pairs = [] if tagged(node, Tag.COPIES) else _pairs(node, other)
            common = _check_type(node, other.dtype, _kinds(its for _, its in pairs))
            for constant, its in pairs:
                if isinstance(constant, Tensor):
                    errors.add(constant, its, other.dtype, common)
        except NoAnswer as reason:
            refused.append(refusal(node, reason))
        node.dtype = other.dtype
    return graph, fmt, refused


def _check_type(node: Node, result: torch.dtype | None, kinds: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """The type in which an operation computes on operands of these types; None if it is not a floating-point type.

    Refuses results in another type, which a hidden cast must have rounded.
    """
    floating = [kind for kind in kinds if kind is not None and kind.is_floating_point]
    if not floating or tagged(node, Tag.COPIES):
        return None
    common = functools.reduce(torch.promote_types, floating)
    if result is None or not result.is_floating_point or result == common:
        return common
    if not tagged(node, Tag.WIDENS) or torch.promote_types(common, result) != result:
        raise NoAnswer(f"a result in {result} of operands in {common}")
    return common


def _pairs(node: Node, twin: Node) -> list[tuple[Any, Any]]:
    """The tensors and nodes among the arguments of an operation in the two captures, in order.

    Raises:
        NoAnswer: other arguments differ, so that the network computes a number from its weights.
    """
    arguments = [(x.args, tuple(x.kwargs.values())) for x in (node, twin)]
    return list(_matched(*arguments))


def _matched(tree: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, (Tensor, Node)) and isinstance(other, (Tensor, Node)):
        yield tree, other
    elif isinstance(tree, (tuple, list)) and isinstance(other, (tuple, list)) and len(tree) == len(other):
        for one, two in zip(tree, other, strict=True):
            yield from _matched(one, two)
    elif not isinstance(tree, torch.dtype) and tree != other and tree == tree:
        raise NoAnswer("an argument that the network computes")


class _Bounding:
    """Bounds on the errors of constants, which it enters into a format."""

    def __init__(self, fmt: Format, graph: Graph, twin: Graph):
        self.format, self.graph, self.twin = fmt, graph, twin
        self.known: dict[tuple[Any, Any], tuple[Tensor, Tensor]] = {}

    def add(self, constant: Tensor, its: Tensor, kind: torch.dtype | None, common: torch.dtype | None) -> None:
        """Bounds the error of one constant, ``its`` counterpart in the deployed network, in a result of type ``kind``.

        The operation computes in the type ``common``.

        Raises:
            NoAnswer: there is no bound.
        """
        source, its_source = self.graph.computed.get(id(constant), constant), self.twin.computed.get(id(its), its)
        known = self.format.computed.error_of(constant)
        if (
            source is constant
            and its_source is its
            and (its.dtype == kind or not its.is_floating_point())
            and known is None
        ):
            return  # the rules cast it
        value, error = self._operand(source, its_source, common)
        if not constant.is_floating_point():
            return
        if constant.dtype != torch.float64:
            raise NoAnswer(f"a constant in {constant.dtype}")
        error = at_most((error + _gap(constant, value)) * OWN_ROUNDING)
        if not bool((_gap(its.double(), constant) <= error).all()):
            raise NoAnswer("a constant that differs in the deployed network")
        self.format.computed.put(constant, error)

    def of(self, one: Node | Tensor, two: Node | Tensor) -> tuple[Tensor, Tensor]:
        """The value of a constant in float64, or as whole numbers, and the bound E on the errors of its entries.

        Args:
            one: the constant, or what computes it.
            two: the same in the deployed network, with other casts on the way.

        Raises:
            NoAnswer: there is no bound.
        """
        if (one, two) not in self.known:
            self.known[one, two] = self._of(one, two)
        return self.known[one, two]

    def _operand(self, one: Node | Tensor, two: Node | Tensor, common: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """:meth:`of` for an operand of an operation in another type.

        torch converts a tensor without axes to the type of the others, even to a narrower one.
        """
        value, error = self.of(one, two)
        kind = two.dtype
        if kind is None or common is None or not value.is_floating_point():
            return value, error
        if torch.promote_types(kind, common) == common:
            return value, error
        return value, error + self.format.of_type(common).rounded(value.abs() + error, 2)

    def _of(self, one: Node | Tensor, two: Node | Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(two, Node) and tagged(two, Tag.COPIES):
            source, kind = two.args[0], two.dtype
            assert kind is not None
            value, error = self.of(one, source)
            if kind.is_floating_point and torch.promote_types(source.dtype, kind) != kind:
                error = error + self.format.of_type(kind).rounded(value.abs() + error)
            return _of_kind(value, error, kind)
        if isinstance(one, Node) and tagged(one, Tag.COPIES):
            return self.of(one.args[0], two)
        if isinstance(one, Node) and isinstance(two, Node) and one.op == two.op:
            if tagged(one, Tag.PART):
                one, two = _one_part(one), _one_part(two)
            return self._made(one, two) if one.op in (MADE, UNKNOWN) else self._computed(one, two)
        if isinstance(one, Node) or isinstance(two, Node):
            raise NoAnswer("a constant that is computed in another way in the deployed network")
        return self._cast(one, two)

    def _cast(self, constant: Tensor, its: Tensor) -> tuple[Tensor, Tensor]:
        """A constant that is cast to the type of ``its``."""
        if not constant.is_floating_point():
            if not torch.equal(constant, its):
                raise NoAnswer("a constant that differs in the deployed network")
            return constant, torch.zeros(constant.shape)
        value = constant.detach().double()
        error = self.format.of_type(its.dtype).cast(value)
        if not bool((_gap(its.double(), value) <= error).all()):
            raise NoAnswer("a constant that differs in the deployed network")
        return value, error

    def _made(self, node: Node, twin: Node) -> tuple[Tensor, Tensor]:
        """A constant that is not computed from others. Ranges of numbers that are not whole are sums and products."""
        its = twin.args[0]
        value, error = self._cast(node.args[0], its)
        if node.op == UNKNOWN and value.is_floating_point():
            raise NoAnswer("a constant of unknown origin")
        unit = self.format.of_type(its.dtype).unit if value.is_floating_point() else 0
        if getattr(node.function, "__name__", "") not in _EXACTLY_MADE and not _whole(value, unit):
            error = error + 8 * (unit + REAL.unit) * value.abs().amax()
        return value, error

    def _computed(self, node: Node, twin: Node) -> tuple[Tensor, Tensor]:
        pairs = _pairs(node, twin)
        common = _check_type(node, twin.dtype, _kinds(two for _, two in pairs))
        known = [self._operand(one, two, common) for one, two in pairs]
        value = _evaluated(node, [x for x, _ in known])
        exact = not any(bool(error.any()) for _, error in known)
        if not value.is_floating_point():
            if not exact:
                raise NoAnswer(f"{node.name} of a value that is rounded")
            return value, torch.zeros(value.shape)
        fmt = self.format.of_type(twin.dtype)
        counts = tagged(node, Tag.WHOLE) or node.kwargs.get("rounding_mode")
        if (
            counts
            and exact
            and _of_whole_numbers(node)
            and all(_whole(x, fmt.unit) for x, _ in (*known, (value, None)))
        ):
            return value, torch.zeros_like(value)
        if tagged(node, Tag.MOVES):
            moved = _evaluated(node, [error if x.is_floating_point() else x for x, error in known])
            return value, at_most(moved.abs() * OWN_ROUNDING)
        reasons = []
        for place in (i for i, (x, _) in enumerate(known) if x.is_floating_point()):
            try:
                return value, self._ruled(node, place, known, fmt)
            except (NoAnswer, IndexError, RuntimeError, ValueError) as reason:  # torch, for an operand in another place
                reasons.append(f", {first_line(reason)}" if str(reason) else f", no rule for {node.name}")
        raise NoAnswer(f"a constant that the network computes{reasons[0] if reasons else ''}")

    def _ruled(self, node: Node, place: int, known: Sequence[tuple[Tensor, Tensor]], fmt: Format) -> Tensor:
        """The error as a function of one real argument, with the others as constants."""
        x, error = known[place]
        operand = Node("operand", torch.clone, (), {}, "", tuple(x.shape), dtype=torch.float64)
        computed = ConstantErrors()
        for i, (other, its_error) in enumerate(known):
            if i != place and other.is_floating_point():
                computed.put(other, its_error)
        args, kwargs = _filled(node, [operand if i == place else other for i, (other, _) in enumerate(known)])
        call = Node(node.op, node.function, args, kwargs, node.path, node.shape, dtype=torch.float64)
        reach = error.amax() * (math.sqrt(error.numel()) * OWN_ROUNDING)
        most = x.abs() + error
        operands = [Operand(x[None], reach[None], most.amax()[None])]
        local = local_error(call, operands, replace(fmt, computed=computed)) + local_error(call, operands, REAL)
        if computed.unread(constant for constant, _ in computed):
            raise NoAnswer("a constant with an error")
        if not bool(error.any()):
            return local[0]
        rule = RULES.get(node.op)
        schur = None if rule is None or rule.linear is None or not rule.linear(call) else rule.schur
        if schur is not None and schur.signs == 1:  # otherwise errors may cancel in their product with J
            carried = absolute_products(schur, call, 0, {operand: x[None]}, error)[0].abs()
        elif tagged(node, Tag.MONOTONE if isinstance(call.args and call.args[0], Node) else Tag.MONOTONE_IN_SECOND):
            ends = [replayed(call, (x + side)[None])[0] for side in (-error, 0 * error, error)]
            wide = torch.maximum((ends[0] - ends[1]).abs(), (ends[2] - ends[1]).abs())
            carried = wide + torch.stack(ends).abs().amax(0) * (32 * REAL.unit)
        else:
            widest = float(most.amax()) * OWN_ROUNDING
            box = Value(tuple(x.shape), 1, magnitude=widest, floor=float((x - error).amin()))
            args, kwargs = call.arguments(lambda _: box)
            lip = float(global_value(call, args, kwargs).lip)
            alone = tagged(node, Tag.ENTRYWISE) and x.shape == call.shape
            carried = lip * error if alone else torch.full_like(local[0], lip * float(reach))
        return at_most((carried + local[0]) * OWN_ROUNDING)


def _gap(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x == y, 0.0, (x - y).abs())


def _kinds(arguments: Iterable[Any]) -> list[torch.dtype | None]:
    """The types of operands; those of numbers do not count where there are others."""
    given = list(arguments)
    return [x.dtype for x in given if x.shape] or [x.dtype for x in given]


def _of_kind(value: Tensor, error: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """A value after a cast; to whole numbers only if it is exact."""
    if kind.is_floating_point:
        return value.double(), error.to(torch.float64)
    if bool(error.any()) or not bool((value == value.to(kind)).all()):
        raise NoAnswer(f"a cast to {kind} of a value that is rounded")
    return value.to(kind), torch.zeros(value.shape)


def _whole(x: Tensor, unit: float) -> bool:
    """Whether all entries are whole numbers, and the sum of any of them a number of the format."""
    return not x.is_floating_point() or (bool((x == x.round()).all()) and float(x.abs().sum()) * unit <= 1)


def _of_whole_numbers(node: Node) -> bool:
    """Whether no number among the arguments has a fraction."""
    return all(x == int(x) for x in tree_leaves((node.args, dict(node.kwargs))) if isinstance(x, float))


def _one_part(node: Node) -> Node:
    """One result of an operation with several, as an operation of its own."""
    several, index = node.args
    function = lambda *args, **kwargs: several.function(*args, **kwargs)[index]  # noqa: E731
    return Node(several.op, function, several.args, several.kwargs, node.path, node.shape, dtype=node.dtype)


def _evaluated(node: Node, values: Sequence[Tensor]) -> Tensor:
    """The result of an operation for other tensors and nodes among its arguments."""
    args, kwargs = _filled(node, values)
    with RealArithmetic():
        return node.function(*args, **kwargs)


def _filled(node: Node, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation with others in place of its tensors and nodes, in order."""
    remaining = iter(leaves)

    def filled(leaf: Any) -> Any:
        return next(remaining) if isinstance(leaf, (Node, Tensor)) else leaf

    args, kwargs = mapped(filled, (node.args, dict(node.kwargs)))
    return args, kwargs
