"""Bounds on norms of Jacobians by sums and products of known norms.

A certificate may need the Jacobians G(a → b) between all n² pairs of nonlinear operations. Each norm takes about a
hundred passes, so some pairs are bounded here instead. With λ_uo ≥ ‖∂u/∂o‖ for the operands o of an operation u, the
chain rule gives

    ‖G(a → u)‖ ≤ Σ_o λ_uo ‖G(a → o)‖,

or the root of the sum of squares if u concatenates its operands. If every path from the perturbed value to u passes
through b, and a does not come after b, then G(a → u) = G(b → u) G(a → b), so that

    ‖G(a → u)‖ ≤ ‖G(b → u)‖ ‖G(a → b)‖

for each such b with a known norm. One pass in the order of the network takes the smallest of these bounds for every u.

Every path from a to u passes through b, for this reason: prepend to it a path from the perturbed value to a. The whole
path passes through b. Its first part ends at a and contains no operation after a in the order, so b is in the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.bounds import Tag, tagged
from lipcert.graph import Graph, Node
from lipcert.numerics import root_sum, times

Pair = tuple[Node, Node]


@dataclass(frozen=True)
class Link:
    """One operation as a function of one of its operands.

    Attributes:
        operand: the operand.
        node: the operation.
        path: the operation, preceded by those whose results are not single tensors, such as tuples.
    """

    operand: Node
    node: Node
    path: tuple[Node, ...]

    @property
    def isometric(self) -> bool:
        """Whether the kind of the operation implies ‖∂node/∂operand‖ ≤ 1."""
        node = self.node
        if len(self.path) > 1:
            return tagged(self.path[0], Tag.SPLITS) and tagged(node, Tag.PART)
        once = node.operands.count(self.operand) == 1
        if tagged(node, Tag.REARRANGES, Tag.JOINS, Tag.NEGATES):
            return once
        same = self.operand.shape == node.shape and not node.kwargs.get("alpha")
        return tagged(node, Tag.ADDS) and once and same and len(node.args) == 2

    @property
    def moves(self) -> bool:
        """Whether the operation only rearranges the entries of this operand, which is exact."""
        return self.isometric and not tagged(self.node, Tag.ADDS)


class Chains:
    """The links of a network after one value.

    Attributes:
        links: for every operation after ``source``, the operation as a function of each of its operands.
    """

    def __init__(self, graph: Graph, source: Node):
        self.graph, self.source = graph, source
        self.links: dict[Node, list[Link]] = {}
        self._passed: dict[Node, int] = {source: 1 << graph.position[source]}  # bit set of the nodes on every path
        for node in graph.between(source, [graph.output]):
            if not node.single:
                continue
            path, operands = _reads(node)
            self.links[node] = [Link(operand, node, path) for operand in operands if operand in self._passed]
            passed = -1
            for link in self.links[node]:
                passed &= self._passed[link.operand]
            self._passed[node] = passed | 1 << graph.position[node]

    @property
    def unknown(self) -> list[Link]:
        """The links whose norm must be computed."""
        return [link for links in self.links.values() for link in links if not link.isometric]

    def on_every_path(self, b: Node, node: Node) -> bool:
        """Whether every path from the source to ``node`` passes through b."""
        return bool(self._passed[node] >> self.graph.position[b] & 1)

    def table(
        self,
        starts: list[Node],
        norms: Mapping[Pair, Tensor],
        links: Mapping[Link, Tensor],
    ) -> dict[Node, Tensor]:
        """Upper bounds on ‖G(a → b)‖ for starts a and all values b, each of shape (starts, N), from known norms."""
        place = {a: row for row, a in enumerate(starts)}
        into: dict[Node, list[tuple[Node, Tensor]]] = {}
        for (b, node), norm in norms.items():
            into.setdefault(node, []).append((b, norm))
        position = self.graph.position
        like = next(iter((norms or links).values()))
        order = torch.tensor([position[a] for a in starts], device=like.device)
        nothing = like.new_zeros(len(starts), len(like))
        bounds: dict[Node, Tensor] = {}
        for node in (self.source, *self.links):
            bound = self._sum(node, bounds, links, nothing)
            for b, norm in into.get(node, ()):
                if self.on_every_path(b, node):
                    before = (order <= position[b])[:, None]
                    bound = torch.where(before, torch.minimum(bound, times(norm, bounds[b])), bound)
                if b in place:
                    bound = bound.clone()
                    bound[place[b]] = torch.minimum(bound[place[b]], norm)
            if node in place:
                bound = bound.clone()
                bound[place[node]] = 1.0
            bounds[node] = bound
        return bounds

    def _sum(self, node: Node, bounds: Mapping[Node, Tensor], norms: Mapping[Link, Tensor], nothing: Tensor) -> Tensor:
        terms = [
            bounds[link.operand] if link.isometric else times(norms[link], bounds[link.operand])
            for link in self.links.get(node, ())
        ]
        if len(terms) > 1 and tagged(node, Tag.JOINS):
            return root_sum(*terms)
        return sum(terms, nothing)


def _reads(node: Node) -> tuple[tuple[Node, ...], list[Node]]:
    """The operations from the values that ``node`` reads to ``node`` itself, and these values."""
    path: list[Node] = [node]
    operands: list[Node] = []
    for operand in dict.fromkeys(node.operands):
        if operand.single:
            operands.append(operand)
        else:
            before, sources = _reads(operand)
            path, operands = [*(n for n in before if n not in path), *path], [*operands, *sources]
    return tuple(path), list(dict.fromkeys(operands))
