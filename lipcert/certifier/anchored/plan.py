"""Which norms of Jacobians a certificate computes, in which order, and at what cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import Tensor

from lipcert.bounds import Tag, tagged
from lipcert.certifier.anchored.jacobians import FEW, GRAMS, PROBES
from lipcert.certifier.anchored.network import Network
from lipcert.graph import Node
from lipcert.roundoff import Pair

# The usual number of products for Lanczos, and what it takes besides, in floating-point operations.
_PASSES, _SEARCH = 100, 1e8
# The overhead of calling an operation, in floating-point operations: about 30 microseconds on a core.
_CALL = 3e5


def layerwise_pairs(network: Network) -> Iterator[Pair]:
    """The pairs (a, b) from the source to the first stage and within stages: all that LoFAST needs."""
    yield network.source, network.stages[0].start
    for stage in network.stages:
        ends = [stage.end, *(network.outputs if stage is network.stages[-1] else [])]
        for position, v in enumerate(stage.nonlinear):
            for u in network.operands(v):
                yield stage.start, u
            for u in (*(u for w in stage.nonlinear[position + 1 :] for u in network.operands(w)), *ends):
                yield v, u
        for u in ends:
            yield stage.start, u


def anchored_pairs(network: Network) -> Iterator[Pair]:
    """The pairs (a, b) that the anchored certificate needs: from the source, within stages, and between cuts."""
    source, last = network.source, network.stages[-1]
    for index, stage in enumerate(network.stages):
        yield source, stage.start
        for position, v in enumerate(stage.nonlinear):
            for u in network.operands(v):
                yield source, u
                yield stage.start, u
            later = [u for w in stage.nonlinear[position + 1 :] for u in network.operands(w)]
            for u in (*later, stage.end):
                yield v, u
        yield source, stage.end
        yield stage.start, stage.end
        for later_stage in network.stages[index + 1 :]:
            yield stage.end, later_stage.start
    for output in network.outputs:
        for a in (source, last.start, *last.nonlinear):
            yield a, output


class NormPlan:
    """The norms that are computed for every image.

    Attributes:
        pairs: the pairs (a, b) whose ‖G(a → b)‖ is bounded.
        peaks: the pairs (a, b) whose rule uses the largest norm of a row of G(a → b), or of a block of rows.
        unconnected: the requested pairs (a, b) for which b does not depend on a.
        computed: the pairs whose ‖G(a → b)‖ is computed, not covered.
        computed_peaks: the peaks that are computed, not covered.
        links: single operations whose norms are computed, because they have no bounds.
        covered: the pairs (c, b) that products bound, because the pairs (x, b) say more: c is the start of the first
            stage, so no remainder arrives there, and ‖G(x → b)‖ ≤ ‖G(c → b)‖ ‖G(x → c)‖.
        columns: the pairs (v, u) with an affine path from an operation v to u, for which the norms of the columns of
            G(v → u) are computed, because the rule of v uses them.
        ahead: the first such u for a smooth v, no output of the network; the norms w of these columns weight the
            deviation of the operand of v.
        weighted: the pairs (a, v) for which ‖diag(√w) G(a → u)‖ is bounded, with u the operand of v.
        each: the operations whose rules take bounds on the deviations of all entries.
        blocks: for values whose entries or blocks of entries are bounded separately: the largest block, and the operand
            in which its entries are consecutive.
    """

    def __init__(self, network: Network, requested: Iterable[Pair]):
        self.network = network
        self._costs = {node: _work([node]) for node in network.graph.nodes}
        self.pairs: list[Pair] = []
        self.unconnected: set[Pair] = set()
        for a, b in dict.fromkeys(requested):
            if a is not b and network.graph.depends(b, a):
                self.pairs.append((a, b))
            elif a is not b:
                self.unconnected.add((a, b))
        self.covered = frozenset() if network.deployed else self._covered()
        self.blocks = self._blocks()
        self.peaks = [(a, b) for a, b in self.pairs if b in self.blocks]
        self.each = [v for v in network.rules if self._summed(v) and self.blockwise(v) and self._single(v)]
        self.columns = [(v, u) for v, u in self.pairs if self._summed(v) and network.affine_path(v, u)]
        smooth = [(v, u) for v, u in self.columns if not network.rules[v].nonsmooth]
        self.ahead = {v: u for v, u in reversed(smooth) if u not in network.outputs}
        self.weighted = [(a, v) for v in self.ahead for a, b in self.pairs if b is network.operands(v)[0]]
        self.computed = [pair for pair in self.pairs if pair not in self.covered]
        self.computed_peaks = [pair for pair in self.peaks if pair not in self.covered]
        self.links = [link for link in network.chains.unknown if not network.local.bounded(link)]

    @property
    def count(self) -> int:
        """The number of norms per image that may need random start vectors."""
        return len(self.pairs) + len(self.peaks) + len(self.columns) + len(self.weighted) + len(self.links)

    @property
    def work(self) -> float:
        """An estimate of the floating-point operations for the norms of an image; affine paths are left out."""
        norms = [(a, b, False) for a, b in self.computed]
        norms += [(a, v.operands[0], False) for a, v in self.weighted if not self.covers(a, v)]
        norms += [(a, b, True) for a, b in self.computed_peaks]
        own = (one for one in norms if not self.network.affine_path(*one[:2]))
        return sum(self.work_of(a, b, peak=peak) for a, b, peak in own) + self.work_of_links

    def work_of(self, a: Node, b: Node, *, peak: bool = False) -> float:
        """Work of one norm, or with ``peak`` for the largest norm of a row."""
        one_pass = sum(self._costs[node] for node in self.network.graph.between(a, [b]))
        few = min(a.entries, b.entries)
        passes = min(few, PROBES) if peak else few if few <= FEW else _PASSES
        return passes * one_pass + _SEARCH

    @property
    def work_of_links(self) -> float:
        """Work of the norms of single operations; those of affine ones hold for all images."""
        rules = self.network.rules.keys()
        return sum(_PASSES * _work(link.path) + _SEARCH for link in self.links if rules & link.path)

    def _covered(self) -> frozenset[Pair]:
        network, c = self.network, self.network.stages[0].start
        others = frozenset(b for a, b in self.pairs if a is network.source and not network.affine_path(c, b))
        return frozenset((a, b) for a, b in self.pairs if a is c and b in others and c is not network.source)

    def covers(self, a: Node, v: Node) -> bool:
        """Whether the pair of a and the operand of v is covered."""
        return (a, self.network.operands(v)[0]) in self.covered

    def block(self, v: Node) -> int:
        """The number of entries in a block of the operand whose deviation is bounded separately; 0 for none."""
        block = self.network.rules[v].block(v)
        return block if block == 1 or v.entries * block <= GRAMS else 0

    def _blocks(self) -> dict[Node, tuple[int, Node]]:
        blocks: dict[Node, tuple[int, Node]] = {}
        for v in self.network.rules:
            block = self.block(v)
            if block:
                (u,) = self.network.operands(v)
                blocks[u] = max(blocks.get(u, (0, u)), (block, v.operands[0]), key=lambda entry: entry[0])
        return blocks

    def blockwise(self, v: Node) -> bool:
        """Whether the rule of a nonlinear operation gets a bound on the deviation of a single entry or block."""
        block = self.block(v)
        return block == 1 or (block > 1 and self.blocks[self.network.operands(v)[0]] == (block, v.operands[0]))

    def _single(self, v: Node) -> bool:
        """Whether every block of the operand is an entry."""
        return self.blocks[self.network.operands(v)[0]][0] == 1

    def _summed(self, v: Node) -> bool:
        return v in self.network.rules and self.network.rules[v].sums


def _work(path: Iterable[Node]) -> float:
    """An estimate of the floating-point operations that these operations take for one image, calls included."""
    return sum(_work_of(node) + _CALL for node in path)


def _work_of(node: Node) -> float:
    entries = math.prod(node.shape)
    weights = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, Tensor) and arg.dim() > 1]
    if tagged(node, Tag.CONTRACTS):
        inner = math.prod(weights[0].shape[1:]) if weights else (node.operands[0].shape or (1,))[-1]
        return 2.0 * entries * inner
    return 10.0 * entries
