"""Nodes and graphs."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lipcert.numerics import RealArithmetic, leaves, mapped


@dataclass(eq=False)
class Node:
    """One operation of the captured network.

    Attributes:
        op: canonical name, function, or the class of a module that is kept whole.
        function: the callable that a replay runs.
        args: positional arguments; values that depend on the image are Nodes.
        kwargs: keyword arguments, likewise.
        path: dotted path of the module in which it runs.
        shape: shape of its result for a batch of one image; () where the result is a tuple.
        dtype: the result's type in the capture; None where the result is a tuple.
    """

    op: Any
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    path: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The operation's name for messages."""
        return self.op if isinstance(self.op, str) else getattr(self.op, "__name__", str(self.op))

    @property
    def single(self) -> bool:
        """Whether the result is one tensor, possibly a scalar, and not a tuple."""
        return bool(self.shape) or self.dtype is not None

    @property
    def entries(self) -> int:
        """The number of entries of the result, if it is one tensor."""
        return math.prod(self.shape)

    @cached_property
    def operands(self) -> tuple[Node, ...]:
        """The nodes that this node reads, in argument order."""
        return tuple(leaf for leaf in leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Node))

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors and arrays among the arguments."""
        return tensors_in((self.args, dict(self.kwargs)))

    def arguments(self, of: Callable[[Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with ``of(operand)`` in place of every operand."""
        args, kwargs = mapped(lambda leaf: of(leaf) if isinstance(leaf, Node) else leaf, (self.args, dict(self.kwargs)))
        return args, kwargs

    def __repr__(self) -> str:
        return f"<{self.name} {self.shape} at {self.path or '(model)'}>"


def applied(node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An operation on tensors.

    A module that is kept whole runs in real arithmetic if it was captured in float64. Single operations were already
    recorded in real arithmetic.
    """
    exact = isinstance(node.function, nn.Module) and torch.float64 in {getattr(x, "dtype", None) for x in args}
    with RealArithmetic() if exact else nullcontext():
        return node.function(*args, **kwargs)


# What an operation does with its arguments.
Operate = Callable[[Node, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Graph:
    """A captured network: its nodes in execution order, from ``input`` to ``output``.

    ``forms`` names the fused operations that replace several recorded ones. ``computed`` maps, where the capture was
    asked for it, the ``id`` of a constant tensor to the operation that computed it.
    """

    input: Node
    output: Node
    nodes: tuple[Node, ...] = field(repr=False)
    forms: tuple[str, ...] = ()
    computed: Mapping[int, Node] = field(default_factory=dict, repr=False)

    def replay(self, images: Tensor) -> Tensor:
        """The output at images of shape (N, C, H, W), with the N of the capture. Differentiable."""
        return evaluate(self.nodes, {self.input: images}, [self.output])[self.output]

    def values(self, images: Tensor, nodes: Iterable[Node] | None = None) -> dict[Node, Tensor]:
        """The values of nodes with one result, by default all of them, at N images of shape (N, 1, C, H, W)."""
        asked = [node for node in (self.nodes if nodes is None else nodes) if node.single]
        return evaluate_each(self.nodes, {self.input: images}, asked)

    def forward(
        self,
        source: Node,
        value: Tensor,
        targets: Sequence[Node],
        values: Mapping[Node, Tensor],
        path: Sequence[Node] | None = None,
        on: Operate = applied,
    ) -> list[Tensor]:
        """The targets for N values of ``source``; nodes independent of it keep their nominal values."""
        path = self.between(source, targets) if path is None else path
        inside = {source, *path}
        outside = (operand for node in path for operand in node.operands if operand not in inside)
        found = evaluate_each(path, {source: value, **{node: values[node] for node in outside}}, targets, on=on)
        return [found[target] for target in targets]

    @cached_property
    def position(self) -> dict[Node, int]:
        """The place of each node in the order."""
        return {node: index for index, node in enumerate(self.nodes)}

    @cached_property
    def _reads(self) -> dict[Node, int]:
        """The bit set of the nodes that a node depends on, itself included."""
        reads: dict[Node, int] = {}
        for index, node in enumerate(self.nodes):
            reads[node] = functools.reduce(operator.or_, (reads.get(u, 0) for u in node.operands), 1 << index)
        return reads

    @cached_property
    def _feeds(self) -> dict[Node, int]:
        """The bit set of the other nodes that depend on a node."""
        feeds = dict.fromkeys(self.nodes, 0)
        for node in reversed(self.nodes):
            for operand in {*node.operands} & feeds.keys():
                feeds[operand] |= feeds[node] | 1 << self.position[node]
        return feeds

    def depends(self, node: Node, source: Node) -> bool:
        """Whether ``node`` is ``source`` or is computed from it."""
        return bool(self._reads.get(node, 0) >> self.position[source] & 1)

    def between(self, source: Node, targets: Iterable[Node]) -> list[Node]:
        """The operations on the paths from ``source`` to ``targets``, in order, without ``source``."""
        ancestors = functools.reduce(operator.or_, (self._reads.get(target, 0) for target in targets), 0)
        # The lowest bit first, so that bit i meets node i; zip stops at the highest bit that is set.
        bits = reversed(f"{ancestors & self._feeds[source]:b}")
        return [node for node, bit in zip(self.nodes, bits, strict=False) if bit == "1"]


def evaluate(
    nodes: Sequence[Node],
    values: dict[Node, Any],
    targets: Collection[Node] = (),
    on: Operate = applied,
) -> dict[Node, Any]:
    """Evaluates nodes in order; adds their values to ``values``, which has those of the other nodes that they read.

    Args:
        nodes: the nodes.
        values: the known values; nodes among them are not evaluated again.
        targets: if there are any, all other values are dropped once they have been read for the last time.
        on: what an operation does with its arguments: by default that on tensors.
    """
    last = {read: node for node in nodes for read in (node, *node.operands)} if targets else {}
    read_last_by: dict[Node, list[Node]] = {}
    for read in last.keys() - targets:
        read_last_by.setdefault(last[read], []).append(read)
    for node in nodes:
        if node not in values:
            values[node] = on(node, *node.arguments(values.__getitem__))
        for read in read_last_by.get(node, ()):
            values.pop(read, None)
    return values


def evaluate_each(
    nodes: Sequence[Node],
    given: Mapping[Node, Tensor],
    targets: Sequence[Node],
    added: Mapping[Node, Tensor] = MappingProxyType({}),
    on: Operate = applied,
) -> dict[Node, Tensor]:
    """:func:`evaluate` for N images, each alone under ``torch.vmap``; values have the shape (N, *node.shape).

    So images cannot influence each other, whatever the network does with its batch axis. ``added`` has numbers that
    are added to the values of some nodes, ``on`` is that of :func:`evaluate`.
    """

    def one(start: tuple[Tensor, ...], extra: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        more = dict(zip(added, extra, strict=True))

        def moved(node: Node, value: Any) -> Any:
            return value + more[node] if node in more else value

        values = {node: moved(node, value) for node, value in zip(given, start, strict=True)}
        evaluate(nodes, values, targets, lambda node, args, kwargs: moved(node, on(node, args, kwargs)))
        return tuple(values[target] for target in targets)

    return dict(zip(targets, torch.vmap(one)(tuple(given.values()), tuple(added.values())), strict=True))


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors and arrays in arguments, those that limit slices included."""
    for leaf in leaves(tree):
        if isinstance(leaf, (Tensor, np.ndarray)):
            yield torch.as_tensor(leaf)


# Appends an operation to the network: (op, function, arguments, named arguments, shape) ↦ its node.
Emit = Callable[..., Node]


def rewritten(
    graph: Graph, substitute: Callable[[Node, Emit, Callable[[Node], Node]], Node | None]
) -> tuple[Graph, Callable[[Node], Node]]:
    """The network with some operations replaced, and the map from its nodes to those that stand for them.

    Args:
        graph: the network.
        substitute: (node, emit, map) ↦ the last operation of what replaces the node; None keeps it.
    """
    nodes: list[Node] = []
    stands_for: dict[Node, Node] = {}

    def replacement(node: Node) -> Node:
        return stands_for.get(node, node)

    for node in graph.nodes:

        def emit(
            op: Any, function: Any, args: Sequence[Any], kwargs: Any = None, shape: Any = None, like: Node = node
        ) -> Node:
            shape = like.shape if shape is None else tuple(shape)
            nodes.append(Node(op, function, tuple(args), kwargs or {}, like.path, shape, like.dtype))
            return nodes[-1]

        instead = substitute(node, emit, replacement)
        if instead is None:
            instead = node
            if any(operand in stands_for for operand in node.operands):
                args, kwargs = node.arguments(replacement)
                instead = replace(node, args=args, kwargs=kwargs)
            nodes.append(instead)
        if instead is not node:
            stands_for[node] = instead
    return Graph(graph.input, replacement(graph.output), tuple(nodes)), replacement
