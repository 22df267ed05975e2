"""Nodes and graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
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


@dataclass(frozen=True)
class Graph:
    """A captured network: its nodes in execution order, from ``input`` to ``output``.

    ``forms`` names the fused operations that replace several recorded ones. ``computed`` has, where the capture was
    asked for it, the operation that computed a constant, by the tensor's ``id``.
    """

    input: Node
    output: Node
    nodes: tuple[Node, ...] = field(repr=False)
    forms: tuple[str, ...] = ()
    computed: Mapping[int, Node] = field(default_factory=dict, repr=False)

    def replay(self, images: torch.Tensor) -> torch.Tensor:
        """Runs the captured operations on images of shape (N, C, H, W), with the N of the capture. Differentiable."""
        values = {self.input: images}
        for node in self.nodes:
            run((node,), values)
            for read in self._last_read_by.get(node, ()):
                del values[read]
        return values[self.output]

    @cached_property
    def _last_read_by(self) -> dict[Node, list[Node]]:
        """The nodes, apart from the output, whose value no node after this one reads."""
        last = {read: node for node in self.nodes for read in (node, *node.operands)}
        reads: dict[Node, list[Node]] = {}
        for read, node in last.items():
            if read is not self.output:
                reads.setdefault(node, []).append(read)
        return reads


def run(nodes: Sequence[Node], values: dict[Node, Any]) -> dict[Node, Any]:
    """Evaluates ``nodes`` in order, given the values of the nodes they read; returns all values.

    Modules that are kept whole run in real arithmetic if they were captured in float64. Single operations were already
    recorded in real arithmetic.
    """
    for node in nodes:
        if node not in values:
            args, kwargs = node.arguments(values.__getitem__)
            exact = isinstance(node.function, nn.Module) and torch.float64 in {getattr(x, "dtype", None) for x in args}
            with RealArithmetic() if exact else nullcontext():
                values[node] = node.function(*args, **kwargs)
    return values


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors and arrays in arguments, those that limit slices included."""
    for leaf in leaves(tree):
        if isinstance(leaf, (Tensor, np.ndarray)):
            yield torch.as_tensor(leaf)


# Appends an operation to the network: (op, function, arguments, named arguments, shape) ↦ its node.
Emit = Callable[..., Node]


def rewritten(
    graph: Graph, written: Callable[[Node, Emit, Callable[[Node], Node]], Node | None]
) -> tuple[Graph, Callable[[Node], Node]]:
    """The network with some operations replaced, and the map from its nodes to those that stand for them.

    Args:
        graph: the network.
        written: (node, emit, map) ↦ the last operation of what replaces the node; None keeps it.
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

        instead = written(node, emit, replacement)
        if instead is None:
            instead = node
            if any(operand in stands_for for operand in node.operands):
                args, kwargs = node.arguments(replacement)
                instead = replace(node, args=args, kwargs=kwargs)
            nodes.append(instead)
        if instead is not node:
            stands_for[node] = instead
    return Graph(graph.input, replacement(graph.output), tuple(nodes)), replacement
