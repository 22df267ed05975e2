"""Finds the stages of a captured network and replays parts of it on batches of images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipcert.graph._graph import Emit, Graph, Node, rewritten, run


def needed(graph: Graph) -> Graph:
    """The graph restricted to operations that the output depends on."""
    alive = {graph.output}
    for node in reversed(graph.nodes):
        if node in alive:
            alive.update(node.operands)
    return Graph(graph.input, graph.output, tuple(node for node in graph.nodes if node in alive))


def segment(graph: Graph, first: Node, last: Node) -> Graph:
    """The network from one cut to another: ``first`` is its input."""

    def written(node: Node, emit: Emit, new: Callable[[Node], Node]) -> Node | None:
        return emit("input", lambda: None, ()) if node is first else None

    between = graph.nodes[graph.nodes.index(first) : graph.nodes.index(last) + 1]
    part, new = rewritten(Graph(first, last, between), written)
    return needed(Graph(new(first), part.output, part.nodes))


def cuts(graph: Graph) -> list[Node]:
    """The cut nodes, in order: every path from an earlier node to a later one passes through them.

    The output is the last. Operands outside the graph, whose values are given with the image, do not count.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    reaches = dict(position)  # the last node that reads each node
    for node in graph.nodes:
        for operand in node.operands:
            if operand in reaches:
                reaches[operand] = max(reaches[operand], position[node])
    cut_nodes, open_until = [], 0
    for index, node in enumerate(graph.nodes):
        # All nodes before this one have been read for the last time.
        if open_until <= index and node.single:
            cut_nodes.append(node)
        open_until = max(open_until, reaches[node])
    return cut_nodes


def evaluate(
    graph: Graph,
    images: Tensor,
    nodes: Iterable[Node] | None = None,
    added: Mapping[Node, Tensor] = MappingProxyType({}),
) -> dict[Node, Tensor]:
    """Values of a captured network at N images, each evaluated alone under ``torch.vmap``.

    So images cannot influence each other, whatever the network does with its batch axis.

    Args:
        graph: the network, captured with one image.
        images: shape (N, 1, C, H, W).
        nodes: the nodes whose values are returned; by default all with one result.
        added: numbers that are added to the results of some nodes, each of shape (N, *node.shape).
    """
    asked = [node for node in (graph.nodes if nodes is None else nodes) if node.single and node is not graph.input]

    def one(image: Tensor, extra: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values: dict[Node, Any] = {graph.input: image}
        changes = dict(zip(added, extra, strict=True))
        for node in graph.nodes if changes else ():
            run((node,), values)
            if node in changes:
                values[node] = values[node] + changes[node]
        run(graph.nodes, values)
        return tuple(values[node] for node in asked)

    results = torch.vmap(one)(images, tuple(added.values()))
    return {graph.input: images, **dict(zip(asked, results, strict=True))}


def run_each(nodes: Sequence[Node], given: Mapping[Node, Tensor], targets: Sequence[Node]) -> list[Tensor]:
    """The values of ``targets`` at N images, each alone under ``torch.vmap``, from those of other nodes."""

    def one(*values: Tensor) -> tuple[Tensor, ...]:
        computed = run(nodes, dict(zip(given, values, strict=True)))
        return tuple(computed[target] for target in targets)

    return list(torch.vmap(one)(*given.values()))


# The largest number of entries of one value in a call: on a CPU it stays in the cache, on a GPU it fills all cores.
_ENTRIES_OF_A_CALL = {"cpu": 2**18, "cuda": 2**25}


def logits(graph: Graph, images: Tensor) -> Tensor:
    """The output at N images of shape (N, C, H, W), each evaluated alone, in calls of a size that suits the device."""
    largest = max((node.entries for node in graph.nodes), default=1)
    size = max(1, _ENTRIES_OF_A_CALL.get(images.device.type, 2**18) // max(1, largest))
    if not len(images):
        return images.new_zeros(0, *graph.output.shape[1:])
    with sdpa_kernel(SDPBackend.MATH):  # torch.vmap would loop over the images for others
        return torch.cat([torch.vmap(graph.replay)(part[:, None]) for part in images.split(size)])[:, 0]


class Replay:
    """Evaluates a captured graph on N images at once, each independently.

    The graph was captured with one image and runs under ``torch.vmap``. Every value has shape (N, *shape of a batch of
    one), whatever the network does with its batch axis.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self._reads: dict[Node, int] = {}  # bit set of the nodes that a node depends on, itself included
        self._feeds = {node: 0 for node in graph.nodes}  # bit set of the other nodes that depend on it
        for index, node in enumerate(graph.nodes):
            self._reads[node] = 1 << index
            for operand in node.operands:
                self._reads[node] |= self._reads.get(operand, 0)
        for index in reversed(range(len(graph.nodes))):
            node = graph.nodes[index]
            for operand in {*node.operands} & self._feeds.keys():
                self._feeds[operand] |= self._feeds[node] | 1 << index

    def depends(self, node: Node, source: Node) -> bool:
        """Whether ``node`` is ``source`` or is computed from it."""
        return bool(self._reads.get(node, 0) >> self.position[source] & 1)

    def between(self, source: Node, targets: Iterable[Node]) -> list[Node]:
        """The operations on the paths from ``source`` to ``targets``, in order, without ``source``."""
        ancestors = 0
        for target in targets:
            ancestors |= self._reads.get(target, 0)
        # The lowest bit first, so that bit i meets node i; zip stops at the highest bit that is set.
        bits = reversed(f"{ancestors & self._feeds[source]:b}")
        return [node for node, bit in zip(self.graph.nodes, bits, strict=False) if bit == "1"]

    def __call__(
        self,
        source: Node,
        value: Tensor,
        targets: Sequence[Node],
        values: dict[Node, Tensor],
        path: Sequence[Node] | None = None,
    ) -> list[Tensor]:
        """Evaluates the targets for a value of ``source``; nodes independent of it keep their nominal values."""
        path = self.between(source, targets) if path is None else path
        inside = {source, *path}
        outside = (operand for node in path for operand in node.operands if operand not in inside)
        return run_each(path, {source: value, **{node: values[node] for node in outside}}, targets)
