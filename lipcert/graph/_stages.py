"""The stages of a captured network, and its logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipcert.graph._graph import Emit, Graph, Node, rewritten


def needed(graph: Graph) -> Graph:
    """The graph restricted to operations that the output depends on."""
    alive = {graph.output}
    for node in reversed(graph.nodes):
        if node in alive:
            alive.update(node.operands)
    return Graph(graph.input, graph.output, tuple(node for node in graph.nodes if node in alive))


def segment(graph: Graph, first: Node, last: Node) -> Graph:
    """The network from one cut to another: ``first`` is its input."""

    def substitute(node: Node, emit: Emit, new: Callable[[Node], Node]) -> Node | None:
        return emit("input", lambda: None, ()) if node is first else None

    between = graph.nodes[graph.nodes.index(first) : graph.nodes.index(last) + 1]
    part, new = rewritten(Graph(first, last, between), substitute)
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
