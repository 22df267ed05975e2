"""A network linearised at images: its stages, the norms of its Jacobians, and what the margins make of a deviation.

What the certificates *lofast* and *anchored* have in common. They differ in which norms they take and how they add up
the remainders.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipcert._numerics import SAFETY, at_most
from lipcert._settings import RIGORS
from lipcert.bounds import (
    NoAnswer,
    Remainder,
    arguments,
    canonical_forms,
    kept_whole,
    per_image,
    refusal,
    remainder_of,
    row_distances,
    total,
)
from lipcert.certifier._chains import Chains, Link, work
from lipcert.certifier._rounding import Local, Rounded, rounded
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph import REARRANGING, Graph, Node, Replay, capture, cuts, examples, explicit_attention, needed, run
from lipcert.model import Model
from lipcert.norms import (
    Draw,
    Ledger,
    explicit_norm,
    explicit_row_norm,
    explicit_row_norms,
    explicit_rows,
    lanczos_norm,
    longest_row,
    part_of,
    row_norm,
    row_norms,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Progress = Callable[[int, int], None]
Gain = Callable[[Node, Node], Tensor | float]
Product = Callable[[Tensor], Tensor]
# For an operation v with weights s on its operand u: upper bounds on ‖diag(s) G(a → u)‖ as a function of (a, u).
Weighed = Mapping[Node, Gain]

NOT_WEIGHED: Weighed = MappingProxyType({})
# A Jacobian with so few rows or columns is written out: that takes fewer products than Lanczos.
_FEW = 64
# The norms of so few rows, or of rows with so few entries, are written out: it takes fewer products than to estimate.
_PROBES = 256
# Columns with so few entries are written out; of longer ones the norms are bounded by so many products, once for all
# images.
_LONG = 4096
_COLUMN_PROBES = 512
# Passes that a norm takes, as a rule, and what it takes beside them, in floating-point operations.
_PASSES = 100
_SEARCH = 1e8
# Entries of the Gram matrices of blocks of rows, for an image; beyond, blocks are not told from the whole.
_GRAMS = 2**25
# Of how far a value moves, what rounding may hide of how far its tokens move along themselves.
_ALONG = 1e-12
# Operations whose result is their operand, entry by entry in the same places.
_UNMOVED = frozenset(("identity", "dropout", "reshape"))
# Entries of the Jacobians that are written out at once, 1 GiB.
_MOST = 2**27


@dataclass
class Stage:
    """The nonlinear operations between two cuts: values through which everything later depends on the image."""

    start: Node
    end: Node
    nonlinear: list[Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Where in the model the stage ends, for people."""
        return self.end.path.removeprefix("net.").removeprefix("net") or "(model)"


@dataclass(frozen=True)
class Deviations:
    """How far values can move.

    Attributes:
        operands: ρ for the operands of every nonlinear operation, each of shape (N,); where a rule asks for single
            entries or blocks of them, the bound on these comes behind it, and where it asks for tokens along
            themselves, the bound on all together and that on one of them.
        logits: ρ for the logits, shape (N,).
        features: ρ for the features that a linear head makes the logits of, shape (N,); None without such a head.
        weighed: for operations with weights s, bounds on ‖s ∘ δ‖ for the deviation δ of their operand, shape (N,).
    """

    operands: dict[Node, list[Tensor]]
    logits: Tensor
    features: Tensor | None
    weighed: dict[Node, Tensor] = field(default_factory=dict)


class Linearized:
    """A captured network, cut into stages.

    Attributes:
        spare: how many norms may be asked for beside those of all pairs; ``delta`` covers them too.
        delta: what these norms may spend of the failure probability.
        budget: what an image may spend in all, other linearisations of the network included.
        pairs: the (a, b) whose ‖G(a → b)‖ is found by itself.
        chained: those for which products of norms have to do (:mod:`lipcert.certifier._chains`): with ``passes`` alone.
        work: floating-point operations that the norms of an image take, roughly.
        linear: the (v, u) with a linear way from a smooth operation v to u.
        columns: the norms of the columns of G(v → u) for these, each of shape (1, entries of v), once they are known.
        ahead: for a smooth operation v the first such u, whose columns its deviation is weighed with.
        tokens: for the operations whose rule asks how far tokens of the operand move along themselves, their entries.
        along: the (a, v) of G(a → u) for the operands u of these.
        casts: whether casts inside the network are recorded, and not left out as in real arithmetic.

    Args:
        model: the model, in float64.
        at: what is perturbed: None for the pixels, the path of a module for its output, or the index of a stage for its
            start. ε is measured there; what the network reads past that value stays as it is.
        delta: failure probability for each image, over the certifier's own random start vectors.
        tolerance: how far the norms of Jacobians may be above what Lanczos has seen.
        seed: of the start vectors.
        passes: find no more norms than so many forward passes allow, roughly, and let products of norms do for the
            others; None for all norms. Those inside a stage come first.
        rigor: ``"probabilistic"``, or ``"deterministic"`` to write every Jacobian out, for networks that are small
            enough for that.
        graph: the network, if it is not to be captured from the model.
        widths: nodes that ``graph`` reads and that are not part of it: see :func:`.with_secants`.

    Raises:
        InputError: ``at`` names no value of the network; an unknown rigor, or one that needs Jacobians too large.
        UnsupportedOperation: names the operations behind ``at`` that have no remainder rule.
    """

    spare = 0
    casts = False

    def __init__(
        self,
        model: Model,
        *,
        at: str | int | None = None,
        delta: float = 1e-9,
        tolerance: float = 0.05,
        seed: int = 0,
        passes: float | None = None,
        rigor: str = "probabilistic",
        graph: Graph | None = None,
        widths: tuple[Node, ...] = (),
    ):
        if rigor not in RIGORS:
            raise InputError(f"unknown rigor {rigor!r}; choose {' or '.join(RIGORS)}")
        self.model = model
        self.deterministic = rigor == "deterministic"
        self.budget = self.delta = 0.0 if self.deterministic else delta
        self.tolerance = tolerance
        self.seed = seed
        example = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0)).to(
            model.device, model.dtype
        )
        self.widths = widths
        if graph is None:
            whole = lambda module: kept_whole(module, "remainder")  # noqa: E731
            graph = capture(model, example, whole, casts=self.casts)
            if not self.casts and at is None:  # which may name a value inside a form
                graph = canonical_forms(graph, "remainder", examples(example))
            graph = explicit_attention(graph, model.device)
        self.replay = Replay(needed(graph))
        self.graph = self.replay.graph
        self._costs = {node: work([node]) for node in self.graph.nodes}
        self.source = self.graph.input
        self._choose(at, example)
        self.head = self._head()
        self.constants: dict[tuple[Node, Node, bool], float] = {}
        self.link_constants: dict[Link, float] = {}
        self.weighed_constants: dict[tuple[Node, Node], float] = {}
        self.pairs: list[tuple[Node, Node]] = []
        self.unconnected: set[tuple[Node, Node]] = set()
        for a, b in dict.fromkeys(self._wanted()):
            if a is b:
                continue
            if self.replay.depends(b, a):
                self.pairs.append((a, b))
            else:
                self.unconnected.add((a, b))
        self.blocks = self._blocks()
        self.peaks = [(a, b) for a, b in self.pairs if b in self.blocks]
        self.chained: frozenset[tuple[Node, Node]] = frozenset()
        self.chains: Chains | None = None
        self.links: list[Link] = []
        if passes is not None:
            self._spend(passes)
        summed = {v for v, rule in self.rules.items() if hasattr(rule, "total") and passes is None}
        self.linear = [(v, u) for v, u in self.pairs if v in summed and self._linear_way(v, u)]
        self.columns: dict[tuple[Node, Node], Tensor] = {}
        self._raised: set[tuple[Node, Node]] = set()  # columns that hold with rounding
        self.ahead = {v: u for v, u in reversed(self.linear) if u not in self.outputs}
        self.scaled = [(a, v) for v in self.ahead for a, b in self.pairs if b is self.operands(v)[0]]
        self.local = Local(self.chains or Chains(self.replay, self.source))
        self.tokens = {v: size for v in self.rules if passes is None and (size := self._token(v))}
        self.along = [(a, v) for v in self.tokens for a, b in self.pairs if b is self.operands(v)[0]]
        if self.deterministic:
            self._check_sizes()

    @property
    def count(self) -> int:
        """How many norms an image takes."""
        return self._own

    @property
    def _own(self) -> int:
        return len(self.pairs) + len(self.peaks) + len(self.linear) + len(self.scaled) + len(self.links)

    @property
    def work(self) -> float:
        """Floating-point operations that the norms of an image take, roughly."""
        return (
            sum(self._work(a, b) for a, b in self.pairs)
            + sum(self._work(a, b, peak=True) for a, b in self.peaks)
            + sum(self._work(a, v.operands[0]) for a, v in self.scaled)
            + sum(self._rows(v) * self._way(a, v.operands[0]) for a, v in self.along)
            + self._work_of_links
        )

    @property
    def work_of_a_pass(self) -> float:
        """The same for one forward pass."""
        return sum(self._costs.values())

    @property
    def _work_of_links(self) -> float:
        return sum(_PASSES * work(link.path) + _SEARCH for link in self.links)

    def _work(self, a: Node, b: Node, *, peak: bool = False) -> float:
        """The same for one norm, or for the largest norm of a row."""
        few = min(math.prod(a.shape), math.prod(b.shape), _PROBES)
        passes = few if peak or few <= _FEW else _PASSES
        return passes * self._way(a, b) + _SEARCH

    def _way(self, a: Node, b: Node) -> float:
        """The same for all operations between two values once."""
        return sum(self._costs[node] for node in self.replay.between(a, [b]))

    def _spend(self, passes: float) -> None:
        """Leaves the norms to be found that so many passes allow: a part of one order, however many they are.

        Every method of layers takes the norms inside stages first, and all methods in the same order. So what a method
        with more pairs finds within a number of passes contains what one with fewer finds.
        """
        self.chains = Chains(self.replay, self.source)
        self.links = self.chains.unknown
        inside = frozenset(self._layerwise())
        starts = {stage.start for stage in self.stages}
        ends = {stage.end for stage in self.stages}

        def rank(pair: tuple[Node, Node]) -> int:
            a, b = pair
            if pair in inside:
                return 0 if self._linear_way(a, b) else 1 if a in starts else 2
            return 5 if a in ends and b in starts else 4  # ways between cuts are products all the same

        place = self.replay.position
        order = [(rank(pair), self._work(*pair), place[pair[0]], place[pair[1]], False) for pair in self.pairs]
        order += [
            (3 if (a, b) in inside else 6, self._work(a, b, peak=True), place[a], place[b], True) for a, b in self.peaks
        ]
        left = passes * self.work_of_a_pass - self._work_of_links
        found: dict[bool, list[tuple[Node, Node]]] = {False: [], True: []}
        for _, cost, start, end, peak in sorted(order):
            left -= cost
            if left < 0:
                break
            found[peak].append((self.graph.nodes[start], self.graph.nodes[end]))
        self.chained = frozenset(self.pairs) - set(found[False])
        self.pairs, self.peaks = found[False], found[True]

    def _block(self, v: Node) -> int:
        """Of how many entries of its operand the rule asks how far they can move; 0 if of all."""
        rule = self.rules[v]
        if getattr(rule, "entrywise", False):
            return 1
        block = rule.block(v) if hasattr(rule, "block") else 0
        return block if math.prod(v.shape) * block <= _GRAMS else 0

    def _blocks(self) -> dict[Node, tuple[int, Node]]:
        """The largest blocks by the value that they are entries of, with the operand that has them in that order."""
        found: dict[Node, tuple[int, Node]] = {}
        for v in self.rules:
            block = self._block(v)
            if block:
                (u,) = self.operands(v)
                found[u] = max(found.get(u, (0, u)), (block, v.operands[0]), key=lambda known: known[0])
        return found

    def _token(self, v: Node) -> int:
        """Entries of a token of the operand, if the rule asks how far tokens move along themselves; 0 if not."""
        rule = self.rules[v]
        size = rule.token(v) if hasattr(rule, "token") else 0
        return size if size and math.prod(v.operands[0].shape) <= _PROBES * size else 0

    def _rows(self, v: Node) -> int:
        """How many tokens that are."""
        return math.prod(v.operands[0].shape) // self.tokens[v]

    def blockwise(self, v: Node) -> bool:
        """Whether the rule of a nonlinear operation is told how far an entry, or a block of them, can move."""
        block = self._block(v)
        return block == 1 or (block > 1 and self.blocks[self.operands(v)[0]] == (block, v.operands[0]))

    def _check_sizes(self) -> None:
        pairs = [*self.pairs, *((link.operand, link.node) for link in self.links)]
        a, b = max(pairs, key=lambda pair: math.prod(pair[0].shape) * math.prod(pair[1].shape))
        rows, columns = math.prod(b.shape), math.prod(a.shape)
        if rows * columns > _MOST:
            raise InputError(
                f"deterministic norms write Jacobians out, and one of this network has {rows} x {columns} entries; "
                "use rigor='probabilistic'"
            )

    def _wanted(self) -> Iterator[tuple[Node, Node]]:
        """The (a, b) whose ‖G(a → b)‖ the certificate needs; pairs that are 1 or 0 among them are left out later."""
        raise NotImplementedError

    def _layerwise(self) -> Iterator[tuple[Node, Node]]:
        """Those that lead from the source to the first stage, and inside stages."""
        yield self.source, self.stages[0].start
        for stage in self.stages:
            ends = [stage.end, *(self.outputs if stage is self.stages[-1] else [])]
            for position, v in enumerate(stage.nonlinear):
                for u in self.operands(v):
                    yield stage.start, u
                for u in (*(u for w in stage.nonlinear[position + 1 :] for u in self.operands(w)), *ends):
                    yield v, u
            for u in ends:
                yield stage.start, u

    def _choose(self, at: str | int | None, example: Tensor) -> None:
        """Sets ``source``, and the rules and stages behind it."""
        if isinstance(at, str):
            self.source = self._output_of(at)
        self.rules = self._rules(example)
        self.stages = self._stages()
        if isinstance(at, int):
            if not 0 <= at < len(self.stages):
                raise InputError(f"there is no stage {at}; the network has the stages 0 to {len(self.stages) - 1}")
            self.source = self.stages[at].start
            self.stages = self.stages[at:]
            self.rules = {v: self.rules[v] for stage in self.stages for v in stage.nonlinear}

    def _output_of(self, path: str) -> Node:
        """The value that the module at ``path`` computes last."""
        places = {node: node.path.removeprefix("net.") for node in self.graph.nodes if node.single}
        wanted = path.removeprefix("net.")
        inside = [node for node, place in places.items() if f"{place}.".startswith(f"{wanted}.")]
        if not inside:
            known = dict.fromkeys(".".join(place.split(".")[:2]) for place in places.values())
            listed = ", ".join(place for place in known if place not in ("", "net"))
            raise InputError(f"no operation of the network belongs to at={path!r}; it has {listed}")
        return inside[-1]

    def _rules(self, example: Tensor) -> dict[Node, type[Remainder]]:
        values = self.values(example[:, None])
        rules: dict[Node, type[Remainder]] = {}
        missing = []
        for node in self.replay.between(self.source, [self.graph.output]):
            try:
                found = remainder_of(node)
                if found is not None:
                    found(node, [values[operand] for operand in node.operands], values[node])
            except NoAnswer as reason:
                missing.append(refusal(node, reason))
                continue
            if found is not None:
                rules[node] = found
        if missing:
            raise UnsupportedOperation(missing, "remainder")
        return rules

    def _stages(self) -> list[Stage]:
        """Stages between those cuts behind the source that have a nonlinear operation between them.

        A cut stands for its root: that is one too, as nothing else that lives reads it.
        """
        marks = set(cuts(self.graph))
        stages = [Stage(self.source, self.source)]
        last = self.source
        for node in self.graph.nodes[self.replay.position[self.source] + 1 :]:
            if node in self.rules:
                if stages[-1].nonlinear and last is not stages[-1].start and self._behind(stages[-1], last):
                    stages[-1].end = last
                    stages.append(Stage(last, last))
                elif not stages[-1].nonlinear:
                    stages[-1].start = last
                stages[-1].nonlinear.append(node)
            if node in marks:
                last = self.root(node)
        stages[-1].end = self.graph.output
        return stages

    def _behind(self, stage: Stage, cut: Node) -> bool:
        return self.replay.position[cut] >= self.replay.position[stage.nonlinear[-1]]

    def _head(self) -> tuple[Node, Tensor] | None:
        """Features h and weight W if the logits are W h + b, for one vector h and with the classes in W's order.

        What moves entries about behind the matrix may give a row to another class, so nothing but identities may.
        """
        node = self.graph.output
        while node.op in _UNMOVED and node is not self.source and node.operands[0].shape == node.shape:
            node = node.operands[0]
        if node.op != "linear" or len(node.operands) != 1 or node is self.source:
            return None
        given = arguments(node)
        features, weight = given["input"], given["weight"]
        if not isinstance(weight, Tensor) or not isinstance(features, Node) or weight.dim() != 2:
            return None
        if node.shape != (1, len(weight)) or features.shape != (1, weight.shape[1]):
            return None
        return self.root(features), weight.detach().double()

    @property
    def outputs(self) -> list[Node]:
        """The logits, and the features before a linear head."""
        return [self.graph.output, *([self.head[0]] if self.head is not None else [])]

    def operands(self, node: Node) -> list[Node]:
        return [self.root(operand) for operand in node.operands if operand not in self.widths]

    def root(self, node: Node) -> Node:
        """The value whose entries these are, in another arrangement."""
        while node.op in REARRANGING and len(node.operands) == 1 and node is not self.source:
            node = node.operands[0]
        return node

    def _linear_way(self, a: Node, b: Node) -> bool:
        return not any(node in self.rules for node in self.replay.between(a, [b]))

    def values(self, images: Tensor, widths: Mapping[Node, Tensor] | None = None) -> dict[Node, Tensor]:
        """Nominal values of all nodes with one result, each of shape (N, *node.shape).

        Args:
            images: shape (N, 1, C, H, W).
            widths: of the secants, each of shape (N, 1); 0 by default.
        """
        single = [node for node in self.graph.nodes if node.single and node is not self.graph.input]
        given = {node: images.new_zeros(len(images), 1) for node in self.widths} if widths is None else dict(widths)

        def one(image: Tensor, *width: Tensor) -> tuple[Tensor, ...]:
            known = run(self.graph.nodes, {self.graph.input: image, **dict(zip(given, width, strict=True))})
            return tuple(known[node] for node in single)

        found = torch.vmap(one)(images, *given.values())
        return {self.graph.input: images, **given, **dict(zip(single, found, strict=True))}

    def linearize(
        self,
        images: Tensor,
        progress: Progress | None = None,
        widths: Mapping[Node, Tensor] | None = None,
        ledger: Ledger | None = None,
    ) -> tuple[Tensor, dict[Node, Tensor], Norms, dict[Node, Remainder]]:
        """What :class:`Linearization` is made of, for images of shape (N, C, H, W); widths as for :meth:`values`.

        ``progress`` is called with (norms taken, norms in all). ``ledger`` is that of the images, a new one by default.
        """
        ledger = Ledger(self.budget, len(images), self.seed) if ledger is None else ledger
        images = images.to(self.model.device, self.model.dtype)[:, None]
        with torch.no_grad():
            values = self.values(images, widths)
        norms = self.norms(values, ledger, progress)
        return images, values, norms, self.remainders(values)

    def remainders(self, values: dict[Node, Tensor]) -> dict[Node, Remainder]:
        """The remainder rules at nominal points."""
        return {v: self._rule(v, values) for v in self.rules}

    def _rule(self, v: Node, values: dict[Node, Tensor]) -> Remainder:
        return self.rules[v](v, [values[operand] for operand in v.operands], values[v])

    def norms(self, values: dict[Node, Tensor], ledger: Ledger, progress: Progress | None = None) -> Norms:
        """Upper bounds on ‖G(a → b)‖, shape (N,), for all pairs, which fail together with what ``ledger`` charges.

        A norm that is the same for all images is taken once, and charged to each.
        """
        found, images = Norms(ledger), len(ledger.spent)
        alone = {node: value[:1] for node, value in values.items()}
        for a, b in self.linear:
            draw = self._draw(ledger, "columns", a, b)
            if (a, b) not in self.columns:
                self.columns[a, b] = self._columns(a, b, alone, draw)
        in_all = self._own + len(self.along) - len(self.linear) - len(self.links)
        for peak, pairs in ((False, self.pairs), (True, self.peaks)):
            for a, b in pairs:
                draw = self._draw(ledger, "peak" if peak else "norm", a, b)
                constant = self.constants.get((a, b, peak))
                if constant is None and self._linear_way(a, b):
                    constant = self.constants[a, b, peak] = self._norm(a, b, alone, draw, peak=peak).item()
                if constant is None:
                    together = self._together(a, b, images)
                    if peak:
                        together = max(1, min(together, _GRAMS // (math.prod(b.shape) * self.blocks[b][0])))
                    parts = _parts(values, images, together)
                    bound = torch.cat([self._norm(a, b, part, draw, peak=peak) for _, part in parts])
                else:
                    bound = values[a].new_full((images,), constant)
                if peak:
                    bound = torch.minimum(bound, found.gains[a, b])
                (found.peaks if peak else found.gains)[a, b] = bound
                if progress is not None:
                    progress(len(found.gains) + len(found.peaks), in_all)
        links = {link: self._link(link, number, values, ledger) for number, link in enumerate(self.links)}
        found.rounded, found.slack, found.gains = rounded(
            self.local, values, found.gains, links, self.rules, self.chained
        )
        for pair, bound in found.peaks.items():
            found.peaks[pair] = torch.minimum(bound + found.slack[pair], found.gains[pair])
        for pair in self.columns.keys() - self._raised:
            self.columns[pair] = self.columns[pair] + found.slack[pair][0]
            self._raised.add(pair)
        for a, v in self.scaled:
            draw = self._draw(ledger, "columns weighed", a, v.operands[0], v)
            scale = self.columns[v, self.ahead[v]].sqrt().reshape(1, *v.shape)
            if self._linear_way(a, v.operands[0]):
                if (a, v) not in self.weighed_constants:
                    self.weighed_constants[a, v] = self._scaled(a, v.operands[0], alone, scale, draw).item()
                found.weighed[a, v] = values[a].new_full((images,), self.weighed_constants[a, v])
            else:
                scale = scale.expand(images, *v.shape)
                found.weighed[a, v] = self._scaled(a, v.operands[0], values, scale, draw)
            found.weighed[a, v] = found.raised(found.weighed[a, v], a, self.operands(v)[0], scale)
            if progress is not None:
                progress(len(found.gains) + len(found.peaks) + len(found.weighed), in_all)
        rules: dict[Node, Any] = {v: self._rule(v, values) for v in self.tokens}
        for a, v in self.along:
            found.along[a, v] = self._along(a, v, values, rules[v].units)
            found.along[a, v] = found.along[a, v] + found.slack[a, self.operands(v)[0]][:, None]
            if progress is not None:
                progress(sum(map(len, (found.gains, found.peaks, found.weighed, found.along))), in_all)
        return found

    def _along(self, a: Node, v: Node, values: dict[Node, Tensor], units: Tensor) -> Tensor:
        """Upper bounds on ‖D G(a → u)‖ and on the norms of its rows, shape (N, 2), for the operand u of v.

        Row t of D is the unit vector of token t of u in the entries of that token. So D has norm 1 at most. What is
        left of G after D may be small against G, and products are off by some 1e-14 ‖G‖: see :data:`_ALONG`.
        """
        rows, images = self._rows(v), len(units)
        together = max(1, min(images, _MOST // (rows * math.prod(a.shape))))
        found = []
        for i, part in _parts(values, images, together):
            scale = units[i : i + together]
            _, adjoint = self._products(a, v.operands[0], part, several=True, scale=scale, token=self.tokens[v])
            found.append(torch.stack(explicit_rows(adjoint, len(scale), rows, device=scale.device), 1))
        return torch.cat(found)

    def _link(self, link: Link, number: int, values: dict[Node, Tensor], ledger: Ledger) -> Tensor:
        """Upper bounds on the norm of one operation's Jacobian, shape (N,)."""
        a, b, images = link.operand, link.node, len(ledger.spent)
        draw = self._draw(ledger, "link", a, b, number)
        if self.rules.keys() & link.path:
            together = self._together(a, b, images)
            parts = _parts(values, images, together)
            return torch.cat([self._norm(a, b, part, draw, path=link.path) for _, part in parts])
        if link not in self.link_constants:
            alone = {node: value[:1] for node, value in values.items()}
            self.link_constants[link] = self._norm(a, b, alone, draw, path=link.path).item()
        return values[a].new_full((images,), self.link_constants[link])

    def _explicit(self, a: Node, b: Node) -> bool:
        return self.deterministic or min(math.prod(a.shape), math.prod(b.shape)) <= _FEW

    def _together(self, a: Node, b: Node, images: int) -> int:
        """How many images to take the norm for at once."""
        entries = max(1, math.prod(a.shape) * math.prod(b.shape))
        return max(1, min(images, _MOST // entries)) if self._explicit(a, b) else max(1, images)

    def weighed_norm(self, a: Node, b: Node, values: dict[Node, Tensor], scale: Tensor, ledger: Ledger) -> Tensor:
        """Upper bounds on ‖diag(scale) G(a → b)‖, shape (N,), for a scale of shape (N, *b.shape).

        The scale may depend on all norms so far, so ``ledger`` is a part that none of these has drawn from. Where the
        scale is not finite nothing is charged, as nothing comes of it.
        """
        draw = self._draw(ledger.only(per_image(scale).isfinite().all(1).nonzero()[:, 0]), "norm", a, b)
        return self._scaled(a, b, values, scale, draw)

    def _scaled(self, a: Node, b: Node, values: dict[Node, Tensor], scale: Tensor, draw: Draw | None) -> Tensor:
        """Upper bounds on ‖diag(scale) G(a → b)‖, shape (N,)."""
        images = len(scale)
        together = self._together(a, b, images)
        parts = [
            self._norm(a, b, part, draw, scale=scale[i : i + together]) for i, part in _parts(values, images, together)
        ]
        return torch.cat(parts)

    def _columns(self, a: Node, b: Node, values: dict[Node, Tensor], draw: Draw | None) -> Tensor:
        """Upper bounds on the norms of the columns of G(a → b), shape (1, entries of a), for a linear way."""
        _, adjoint = self._products(a, b, values, several=True)
        rows = math.prod(b.shape)
        if draw is None:
            return explicit_row_norms(adjoint, 1, rows, device=values[b].device)
        return row_norms(adjoint, 1, rows, draw=draw, probes=_COLUMN_PROBES, device=values[b].device)

    def _draw(self, ledger: Ledger, kind: str, a: Node, b: Node, *more: Node | int) -> Draw | None:
        """Start vectors for something about G(a → b); None where that is written out, or empty.

        The key is made of the places of the operations in the network: whatever else is asked for, and in which order,
        a norm has the same vectors.
        """
        rows, columns = math.prod(b.shape), math.prod(a.shape)
        written = {"peak": min(rows, columns) <= _PROBES, "columns": rows <= _LONG}
        if not rows * columns or self.deterministic or written.get(kind, self._explicit(a, b)):
            return None
        place = self.replay.position
        numbers = [item if isinstance(item, int) else place[item] for item in (a, b, *more)]
        return ledger.draw(kind, *numbers, delta=part_of(self.delta, self._own + self.spare))

    def _products(
        self,
        a: Node,
        b: Node,
        values: dict[Node, Tensor],
        *,
        several: bool,
        scale: Tensor | None = None,
        path: Sequence[Node] | None = None,
        token: int = 1,
    ) -> tuple[Product, Product]:
        """v ↦ Gv and u ↦ Gᵀu for G = diag(scale) G(a → b), by autograd; for several vectors at once if that is said.

        With ``token``, so many rows of G that lie one behind the other are added up.

        Where nothing of a arrives at b, as when all of it is overwritten, Gᵀw is no function of w for autograd. G must
        be 0 then, which is checked on a random w, as a derivative that was cut off would look the same.

        Raises:
            UnsupportedOperation: the derivative of an operation on the way cannot be differentiated.
        """
        source = values[a].detach().requires_grad_()
        with torch.enable_grad():
            (target,) = self.replay(a, source, [b], values, path)
            target = target if scale is None else target * scale
            target = target if token == 1 else target.reshape(len(target), -1, token).sum(2)
            weight = torch.zeros_like(target, requires_grad=True)
            (pulled,) = torch.autograd.grad(target, source, weight, create_graph=True)
        if not pulled.requires_grad:
            chance = torch.randn(target.shape, generator=torch.Generator().manual_seed(self.seed), dtype=target.dtype)
            if torch.autograd.grad(target, source, chance.to(target), retain_graph=True)[0].any():
                raise UnsupportedOperation([(f"{b.name} behind a derivative that cannot be differentiated", b.path)])

        def adjoint(u: Tensor) -> Tensor:
            u = u.reshape(*u.shape[:-1], *target.shape[1:])
            (result,) = torch.autograd.grad(target, source, u, retain_graph=True, is_grads_batched=several)
            return result.reshape(*result.shape[: u.dim() - target.dim() + 1], -1)

        def product(v: Tensor) -> Tensor:
            v = v.reshape(*v.shape[:-1], *source.shape[1:])
            if not pulled.requires_grad:
                return v.new_zeros(*v.shape[: v.dim() - source.dim() + 1], target[0].numel())
            (result,) = torch.autograd.grad(pulled, weight, v, retain_graph=True, is_grads_batched=several)
            return result.reshape(*result.shape[: v.dim() - source.dim() + 1], -1)

        return product, adjoint

    def _norm(
        self,
        a: Node,
        b: Node,
        values: dict[Node, Tensor],
        draw: Draw | None,
        *,
        peak: bool = False,
        scale: Tensor | None = None,
        path: Sequence[Node] | None = None,
    ) -> Tensor:
        """Upper bounds on ‖G(a → b)‖, or on the norms of its rows, shape (N,), from products by autograd.

        With a ``path``, G is the Jacobian along these operations alone. Without a ``draw`` it is written out.
        """
        count, device = len(values[a]), values[a].device
        rows, columns = math.prod(b.shape), math.prod(a.shape)
        if not rows * columns:  # such as the tokens of a class where there are none
            return torch.zeros(count, dtype=torch.float64, device=device)
        explicit = draw is None
        block, arranged = self.blocks[b] if peak else (1, b)
        target = b if block == 1 else arranged
        product, adjoint = self._products(a, target, values, several=peak or explicit, scale=scale, path=path)
        if peak and rows <= _PROBES:
            return longest_row(adjoint, count, rows, block=block, device=device)
        if peak and draw is None:
            return explicit_row_norm(product, count, columns, block=block, device=device)
        if peak and draw is not None:
            return row_norm(product, count, columns, draw=draw, block=block, device=device)
        forth, back, size = (product, adjoint, columns) if columns <= rows else (adjoint, product, rows)
        if draw is None:
            return explicit_norm(forth, count, size, device=device)
        return lanczos_norm(forth, back, count, size, draw=draw, tolerance=self.tolerance, device=device)


def _parts(values: dict[Node, Tensor], images: int, together: int) -> Iterator[tuple[int, dict[Node, Tensor]]]:
    """The values of so many images at a time, each with the number of its first one."""
    for i in range(0, images, together):
        yield i, {node: value[i : i + together] for node, value in values.items()}


@dataclass
class Norms:
    """Upper bounds that hold together, each of shape (N,).

    Attributes:
        ledger: of the images, and what the bounds were charged with.
        gains: ‖G(a → b)‖, by (a, b).
        peaks: the largest norm of a row of G(a → b), or of a block of rows, for operands b whose rules ask for that.
        weighed: ‖diag(√w) G(a → b)‖, by (a, v): b is the operand of v, and w are the norms of columns behind v.
        along: how far tokens of b move along themselves, all together and one of them, by (a, v): shape (N, 2).
        slack: what rounding can have taken of a norm as found, by (a, b), before it was added.
        rounded: what rounding does beside.
    """

    ledger: Ledger
    gains: dict[tuple[Node, Node], Tensor] = field(default_factory=dict)
    peaks: dict[tuple[Node, Node], Tensor] = field(default_factory=dict)
    weighed: dict[tuple[Node, Node], Tensor] = field(default_factory=dict)
    along: dict[tuple[Node, Node], Tensor] = field(default_factory=dict)
    slack: dict[tuple[Node, Node], Tensor] = field(default_factory=dict)
    rounded: Rounded | None = None

    def raised(self, norm: Tensor, a: Node, b: Node, scale: Tensor) -> Tensor:
        """‖diag(scale) G(a → b)‖ as found, with what rounding can have taken of it, shape (N,)."""
        largest = per_image(scale).amax(1)
        return torch.minimum(norm + largest * self.slack[a, b], largest * self.gains[a, b])

    def only(self, index: Tensor) -> Norms:
        """The same for some of the images, given by their numbers."""
        assert self.rounded is not None
        known = (self.gains, self.peaks, self.weighed, self.along, self.slack)
        gains, peaks, weighed, along, slack = ({pair: norm[index] for pair, norm in part.items()} for part in known)
        return Norms(self.ledger.only(index), gains, peaks, weighed, along, slack, self.rounded.only(index))


class Linearization:
    """A network linearised at N images: bounds for any ε.

    Args:
        method: the network and its pairs.
        images: pixels in [0, 1], shape (N, 1, C, H, W).
        values: nominal values, each of shape (N, *node.shape).
        norms: of the Jacobians between the pairs.
        remainders: the remainder rules at the nominal points.

    Attributes:
        logits: nominal logits, shape (N, classes).
    """

    def __init__(
        self,
        method: Linearized,
        images: Tensor,
        values: dict[Node, Tensor],
        norms: Norms,
        remainders: dict[Node, Remainder],
    ):
        self.method = method
        self.images = images
        self.values = values
        self.norms = norms
        self.remainders = remainders
        self.logits = values[method.graph.output].reshape(len(images), -1)

    def only(self, index: Tensor) -> Self:
        """The same for some of the images, given by their numbers."""
        part = copy.copy(self)
        part.images, part.logits = self.images[index], self.logits[index]
        part.values = {node: value[index] for node, value in self.values.items()}
        part.norms = self.norms.only(index)
        part.remainders = self.method.remainders(part.values)
        return part

    def gain(self, a: Node, b: Node) -> Tensor | float:
        """‖G(a → b)‖ from above: 1 for a value itself, 0 where b does not depend on a."""
        if a is b:
            return 1.0
        return 0.0 if (a, b) in self.method.unconnected else self.norms.gains[a, b]

    def peak(self, a: Node, b: Node) -> Tensor | float:
        """The largest norm of a row of G(a → b), or of a block of rows, from above."""
        return self.norms.peaks[a, b] if (a, b) in self.norms.peaks else self.gain(a, b)

    def weighed_gain(self, v: Node, a: Node, u: Node) -> Tensor | float:
        """‖diag(√w) G(a → u)‖ from above, for the operand u of v and the norms w of the columns behind v."""
        if a is u:
            return self.method.columns[v, self.method.ahead[v]].amax().sqrt()
        return 0.0 if (a, u) in self.method.unconnected else self.norms.weighed[a, v]

    def along_gain(self, v: Node, which: int, a: Node, u: Node) -> Tensor | float:
        """‖D G(a → u)‖ from above for the operand u of v, or the largest row's norm: see :meth:`Linearized._along`."""
        if a is u:
            return 1.0
        return 0.0 if (a, u) in self.method.unconnected else self.norms.along[a, v][:, which]

    def deviations(self, eps: Tensor) -> Deviations:
        """How far values can move for perturbations of norm at most eps, shape (N,)."""
        raise NotImplementedError

    def noise(self, u: Node, gain: Gain) -> Tensor:
        """How much more a value deviates as rounding has moved the nominal values: :mod:`._rounding`."""
        assert self.norms.rounded is not None
        return self.norms.rounded.noise[u] * gain(u, u)

    def reach(self, v: Node, moved: Callable[[Node, Gain], Tensor]) -> list[Tensor]:
        """ρ for the operands of a nonlinear operation, and behind it what its rule asks for beside.

        The same sums with the largest row of each Jacobian in place of its norm bound single entries: entry i of u
        deviates by at most Σ ‖row i of G(a → u)‖ · (what arises at a). So it is with blocks of rows and of entries, and
        with the rows of D G(a → u) for what tokens move along themselves.

        Args:
            v: the operation.
            moved: upper bounds on the deviation of any value before it, for any gain.
        """
        rho = [moved(u, self.gain) for u in self.method.operands(v)]
        if self.method.blockwise(v):
            rho.append(torch.minimum(rho[0], moved(self.method.operands(v)[0], self.peak)))
        if v in self.method.tokens:
            for which in (0, 1):
                along = moved(self.method.operands(v)[0], partial(self.along_gain, v, which))
                rho.append(torch.minimum(rho[-1], along + _ALONG * rho[0]))
        return rho

    def inside(
        self,
        stage: Stage,
        linear: Callable[[Node, Gain], Tensor],
        operands: dict[Node, list[Tensor]],
        gains: Weighed = NOT_WEIGHED,
    ) -> tuple[Callable[[Node], Tensor], dict[Node, Tensor]]:
        """Goes through a stage, and adds the ρ of its nonlinear operations' operands to ``operands``.

        Args:
            stage: the stage.
            linear: upper bounds on the deviation of a value in the stage without the remainders that arise inside it,
                by ``gain`` or by ``peak``.
            operands: receives ρ, and behind it what rules ask for beside: see :meth:`reach`.
            gains: of the operations with weights.

        Returns:
            How much those remainders move a value at the stage's end, and bounds on ‖s ∘ δ‖ for the operands with
            weights s: these are the same sums too.
        """
        added: list[Callable[[Node, Gain], Tensor]] = []
        weighed: dict[Node, Tensor] = {}

        def errors(u: Node, gain: Gain) -> Tensor:
            return sum((error(u, gain) for error in added), self.logits.new_zeros(len(self.images)))

        def moved(u: Node, gain: Gain) -> Tensor:
            return at_most(linear(u, gain) + errors(u, gain) + self.noise(u, gain))

        for v in stage.nonlinear:
            operands[v] = self.reach(v, moved)
            if v in gains:
                weighed[v] = moved(self.method.operands(v)[0], gains[v])
            added.append(self.effect(v, operands[v], moved))
        return lambda u: errors(u, self.gain), weighed

    def effect(
        self, v: Node, rho: list[Tensor], moved: Callable[[Node, Gain], Tensor]
    ) -> Callable[[Node, Gain], Tensor]:
        """How much the remainder of v moves values behind it, each of shape (N,), as a function of (u, gain).

        That is ‖G‖ ‖R‖ for G = G(v → u), or Σ w_i |R_i| where the norms w of G's columns are known and that is smaller;
        a single entry, or a block, moves no more than all together.

        Args:
            v: the operation.
            rho: how far its operands deviate.
            moved: the same for any value and gain: with √w it bounds ‖√w ∘ δ‖.
        """
        rule, method = self.remainders[v], self.method
        norm = at_most(rule.norm(rho))
        unknown = torch.full_like(norm, math.inf)
        counted = (v, method.ahead.get(v)) in method.columns
        size = moved(method.operands(v)[0], partial(self.weighed_gain, v)) if counted else unknown
        summed: dict[Node, Tensor] = {}

        def at(u: Node, gain: Gain) -> Tensor:
            bound = at_most(gain(v, u) * norm)
            if (v, u) not in method.columns or gain not in (self.gain, self.peak):
                return bound
            if u not in summed:
                columns = method.columns[v, u].expand(len(norm), -1)
                summed[u] = total(rule, columns, rho, size if u is method.ahead.get(v) else unknown)
            return torch.minimum(bound, summed[u])

        return at

    def spreads(self, predicted: Tensor) -> Tensor | None:
        """‖w_y − w_j‖ for a linear head with rows w, from above, shape (N, classes); None without one."""
        if self.method.head is None:
            return None
        weight = self.method.head[1]
        return torch.stack([row_distances(weight, y) for y in predicted.tolist()])

    def moved(self, found: Deviations, spreads: Tensor | None) -> Tensor:
        """Upper bounds on the change of f_y − f_j, of shape (N, 1) or (N, classes).

        f_y − f_j = ⟨e_y − e_j, f⟩ changes by at most √2 ρ of the logits, and ⟨w_y − w_j, h⟩ + const by ‖w_y − w_j‖ ρ of
        the features (Leino, Wang, Fredrikson, ICML 2021, section 3).
        """
        rounding, output = self.norms.rounded, self.method.graph.output
        assert rounding is not None
        change = math.sqrt(2) * (found.logits + rounding.noise[output])[:, None]
        if found.features is not None and spreads is not None and self.method.head is not None:
            features = found.features + rounding.noise[self.method.head[0]]
            head = math.sqrt(2) * rounding.errors[self.method.root(output)]
            change = torch.minimum(change, spreads * features[:, None] + head[:, None])
        return at_most(change) * (1 + SAFETY)


def search(left: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
    """The largest ε, to 0.1 %, with left(ε) > 0, for a non-increasing function; 0 where 1e-12 · guess is too large.

    Args:
        left: function of ε, shape (N,), that is called some 30 times.
        guess: an ε near which left turns negative, shape (N,).
    """
    low, high = guess * 1e-12, guess.clone()
    good = left(low) > 0
    for _ in range(8):
        holds = good & (left(high) > 0)
        if not bool(holds.any()):
            break
        low, high = torch.where(holds, high, low), torch.where(holds, 2 * high, high)
    for _ in range(44):
        wide = high > low * 1.001  # the others stay as they are, whoever else is searched for
        if not bool(wide.any()):
            break
        middle = (low * high).sqrt()
        holds = left(middle) > 0
        low, high = torch.where(wide & holds, middle, low), torch.where(wide & ~holds, middle, high)
    return torch.where(good, low, 0.0)


def search_each(left: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
    """The largest ε with left(ε) > 0 for many non-increasing functions, shape (N, functions).

    All functions are known at an ε once one of them is. To 0.1 % for the least of each image, to 2 % within four times
    it, and to 20 % further away. 0 where 1e-12 of the smallest positive guess is too large.

    Args:
        left: function of ε, shape (N,), with values of shape (N, functions).
        guess: ε near which they turn negative, shape (N, functions).
    """
    smallest = torch.where(guess > 0, guess, math.inf).amin(1, keepdim=True)
    low = torch.where(smallest < math.inf, 1e-12 * smallest, 0.0).expand_as(guess)
    high = guess.amax(1, keepdim=True).expand_as(guess)
    good = left(low[:, 0]) > 0
    for _ in range(8):
        holds = good & (left(high.amax(1)) > 0)
        if not bool(holds.any()):
            break
        low, high = torch.where(holds, high, low), torch.where(holds, 2 * high, high)
    for _ in range(64 * guess.shape[1]):
        least = torch.where(good, low, math.inf).amin(1, keepdim=True)
        near = torch.where(low <= 4 * least, 1.02, 1.2)
        wide = torch.where(good, high / (low * torch.where(low <= least, 1.001, near)), 0.0)
        if not bool((wide > 1).any()):
            break
        widest = wide.argmax(1, keepdim=True)
        eps = (low.gather(1, widest) * high.gather(1, widest)).sqrt()
        holds = left(eps[:, 0]) > 0
        low = torch.where(holds, torch.maximum(low, eps), low)
        high = torch.where(holds, high, torch.minimum(high, eps))
    return torch.where(good, low, 0.0)
