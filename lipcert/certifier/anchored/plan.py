"""Which norms of Jacobians a certificate takes, in which order, and at what cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lipcert.certifier.anchored.chains import work
from lipcert.certifier.anchored.jacobians import GRAMS, passes_for, writes_rows
from lipcert.certifier.anchored.network import Network
from lipcert.graph import Node

Pair = tuple[Node, Node]

# Passes that the norm of a single operation takes, as a rule, and what a norm takes beside its passes, in
# floating-point operations.
_PASSES = 100
_SEARCH = 1e8


def layerwise_pairs(network: Network) -> Iterator[Pair]:
    """The (a, b) that lead from the source to the first stage, and inside stages: all that lofast needs."""
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
    """Those that anchored needs: from the source to everything, inside stages, and between cuts."""
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
    """The norms that every image takes.

    Attributes:
        pairs: the (a, b) whose ‖G(a → b)‖ is found by itself.
        peaks: the (a, b) for which the largest norm of a row of G(a → b), or of a block of rows, is found too.
        unconnected: the (a, b) that were wanted and where b does not depend on a.
        chained: those for which products of norms have to do (:mod:`.chains`): with ``passes`` alone.
        links: single operations whose norms are found: those that make these products, and those without bounds.
        columns: the (v, u) with a linear way from a smooth operation v to u, for the norms of the columns of G(v → u).
        ahead: for a smooth operation v the first such u, whose columns the deviation of v is weighed with.
        weighted: the (a, v) for ‖diag(√w) G(a → u)‖, with u the operand of v and w the norms of those columns.
        tokens: the operations whose rule asks how far tokens of the operand move along themselves, with their entries.
        along: the (a, v) for G(a → u) along the tokens of the operand u of v.
        blocks: the largest blocks by the value that they are entries of, with the operand that has them in that order.

    Args:
        network: the network.
        wanted: the (a, b) whose ‖G(a → b)‖ the certificate needs; pairs that are 1 or 0 among them are left out.
        passes: find no more norms than so many forward passes allow, roughly, and let products of norms do for the
            others; None for all norms.
    """

    def __init__(self, network: Network, wanted: Iterable[Pair], passes: float | None = None):
        self.network = network
        self.whole = passes is None
        self._costs = {node: work([node]) for node in network.graph.nodes}
        self.pairs: list[Pair] = []
        self.unconnected: set[Pair] = set()
        for a, b in dict.fromkeys(wanted):
            if a is not b and network.replay.depends(b, a):
                self.pairs.append((a, b))
            elif a is not b:
                self.unconnected.add((a, b))
        self.blocks = self._blocks()
        self.peaks = [(a, b) for a, b in self.pairs if b in self.blocks]
        self.chained: frozenset[Pair] = frozenset()
        self.links = [link for link in network.chains.unknown if passes is not None or not network.local.bounded(link)]
        if passes is not None:
            self._spend(passes)
        summed = {v for v, rule in network.rules.items() if rule.sums and self.whole}
        self.columns = [(v, u) for v, u in self.pairs if v in summed and network.linear_way(v, u)]
        self.ahead = {v: u for v, u in reversed(self.columns) if u not in network.outputs}
        self.weighted = [(a, v) for v in self.ahead for a, b in self.pairs if b is network.operands(v)[0]]
        self.tokens = {v: size for v in network.rules if self.whole and (size := self._token(v))}
        self.along = [(a, v) for v in self.tokens for a, b in self.pairs if b is network.operands(v)[0]]

    @property
    def count(self) -> int:
        """How many norms an image takes that can be random."""
        return len(self.pairs) + len(self.peaks) + len(self.columns) + len(self.weighted) + len(self.links)

    @property
    def work(self) -> float:
        """Floating-point operations that the norms of an image take, roughly."""
        return (
            sum(self.work_of(a, b) for a, b in self.pairs)
            + sum(self.work_of(a, b, peak=True) for a, b in self.peaks)
            + sum(self.work_of(a, v.operands[0]) for a, v in self.weighted)
            + sum(self.rows(v) * self._way(a, v.operands[0]) for a, v in self.along)
            + self._work_of_links
        )

    @property
    def work_of_a_pass(self) -> float:
        """The same for one forward pass."""
        return sum(self._costs.values())

    def work_of(self, a: Node, b: Node, *, peak: bool = False) -> float:
        """The same for one norm, or for the largest norm of a row."""
        return passes_for(a, b, peak) * self._way(a, b) + _SEARCH

    @property
    def _work_of_links(self) -> float:
        return sum(_PASSES * work(link.path) + _SEARCH for link in self.links)

    def _way(self, a: Node, b: Node) -> float:
        """The same for all operations between two values once."""
        return sum(self._costs[node] for node in self.network.replay.between(a, [b]))

    def _spend(self, passes: float) -> None:
        """Leaves the norms to be found that so many passes allow: a part of one order, however many they are.

        Every method of layers takes the norms inside stages first, and all methods in the same order. So what a method
        with more pairs finds within a number of passes contains what one with fewer finds.
        """
        network = self.network
        inside = frozenset(layerwise_pairs(network))
        starts = {stage.start for stage in network.stages}
        ends = {stage.end for stage in network.stages}

        def rank(pair: Pair) -> int:
            a, b = pair
            if pair in inside:
                return 0 if network.linear_way(a, b) else 1 if a in starts else 2
            return 5 if a in ends and b in starts else 4  # ways between cuts are products all the same

        place = network.replay.position
        order = [(rank(pair), self.work_of(*pair), place[pair[0]], place[pair[1]], False) for pair in self.pairs]
        order += [
            (3 if (a, b) in inside else 6, self.work_of(a, b, peak=True), place[a], place[b], True)
            for a, b in self.peaks
        ]
        left = passes * self.work_of_a_pass - self._work_of_links
        found: dict[bool, list[Pair]] = {False: [], True: []}
        for _, cost, start, end, peak in sorted(order):
            left -= cost
            if left < 0:
                break
            found[peak].append((network.graph.nodes[start], network.graph.nodes[end]))
        self.chained = frozenset(self.pairs) - set(found[False])
        self.pairs, self.peaks = found[False], found[True]

    def block(self, v: Node) -> int:
        """Of how many entries of its operand the rule asks how far they can move; 0 if of all."""
        block = self.network.rules[v].block(v)
        return block if block == 1 or v.entries * block <= GRAMS else 0

    def _blocks(self) -> dict[Node, tuple[int, Node]]:
        found: dict[Node, tuple[int, Node]] = {}
        for v in self.network.rules:
            block = self.block(v)
            if block:
                (u,) = self.network.operands(v)
                found[u] = max(found.get(u, (0, u)), (block, v.operands[0]), key=lambda known: known[0])
        return found

    def blockwise(self, v: Node) -> bool:
        """Whether the rule of a nonlinear operation is told how far an entry, or a block of them, can move."""
        block = self.block(v)
        return block == 1 or (block > 1 and self.blocks[self.network.operands(v)[0]] == (block, v.operands[0]))

    def _token(self, v: Node) -> int:
        """Entries of a token of the operand, if the rule asks how far tokens move along themselves; 0 if not."""
        size = self.network.rules[v].token(v)
        return size if size and writes_rows(v.operands[0].entries / size) else 0

    def rows(self, v: Node) -> int:
        """How many tokens the operand has."""
        return v.operands[0].entries // self.tokens[v]
