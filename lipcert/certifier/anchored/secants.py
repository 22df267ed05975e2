"""Replaces operations with kinks by variants whose derivative is the slope of a secant of a given width."""

from __future__ import annotations

from lipcert.bounds import rule_for
from lipcert.graph import Graph, Node, map_nodes


def with_secants(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """The same network, with the same values, but with secant slopes as derivatives at kinks."""
    stands_for: dict[Node, Node] = {}
    widths: dict[Node, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        args, kwargs = map_nodes(lambda n: stands_for.get(n, n), (node.args, dict(node.kwargs)))
        new = node
        rule = rule_for(node.op)
        if rule is not None and (secant := rule.secant) is not None and len(node.operands) == 1:
            widths[node] = Node("width", secant.function, (), {}, node.path, (1,))
            (x,) = node.operands
            arguments = (stands_for.get(x, x), widths[node], *secant.rest(node))
            new = Node(secant.function, secant.function, arguments, {}, node.path, node.shape, dtype=node.dtype)
        elif any(operand in stands_for for operand in node.operands):
            new = Node(node.op, node.function, args, kwargs, node.path, node.shape, node.inner, node.result, node.dtype)
        if new is not node:
            stands_for[node] = new
        nodes.append(new)
    return Graph(graph.input, stands_for.get(graph.output, graph.output), tuple(nodes)), widths
