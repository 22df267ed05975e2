"""The norms of a plan, taken at images: upper bounds that hold together, and what they were charged with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lipcert._numerics import UNIT
from lipcert._settings import RIGORS
from lipcert.bounds import Form
from lipcert.certifier.anchored.chains import Link
from lipcert.certifier.anchored.jacobians import Jacobians, rows_of
from lipcert.certifier.anchored.network import Network
from lipcert.certifier.anchored.plan import NormPlan, Pair
from lipcert.certifier.anchored.rounding import Rounded, rounded
from lipcert.errors import InputError
from lipcert.graph import Node
from lipcert.norms import Draw, Ledger, part_of

NormProgress = Callable[[int, int], None]


class SeminormKind(Enum):
    """What of a deviation δ is bounded: ‖Mδ‖, or the largest of some parts of Mδ, for a matrix M."""

    NORM = auto()  # ‖δ‖
    LARGEST = auto()  # the largest norm of one of its entries, or blocks of entries
    COLUMNS = auto()  # ‖√w ∘ δ‖, w the norms of the columns of the linear way after an operation
    CURVATURE = auto()  # ‖Mδ‖, M of a form of the curvature of an operation against a margin
    ALONG = auto()  # the norm over all tokens t of ⟨unit_t, δ_t⟩
    TOKEN = auto()  # the largest |⟨unit_t, δ_t⟩|


class Seminorm(NamedTuple):
    """A kind of seminorm, and the operation whose weights, forms or tokens make M, with the number of the form."""

    kind: SeminormKind
    of: Node | None = None
    form: int = 0


NORM, LARGEST = Seminorm(SeminormKind.NORM), Seminorm(SeminormKind.LARGEST)


@dataclass(frozen=True)
class NormOptions:
    """How norms of Jacobians are found.

    Attributes:
        delta: failure probability for each image, over the certifier's own random start vectors.
        tolerance: how far norms may be above what Lanczos has seen, relative.
        seed: of the start vectors.
        passes: find no more norms than so many forward passes allow, roughly, and let products of norms do for the
            others; None for all norms. Those inside a stage come first.
        rigor: ``"probabilistic"``, or ``"deterministic"`` to write every Jacobian out, for networks that are small
            enough for that.

    Raises:
        InputError: an unknown rigor.
    """

    delta: float = 1e-9
    tolerance: float = 0.05
    seed: int = 0
    passes: float | None = None
    rigor: str = "probabilistic"

    def __post_init__(self) -> None:
        if self.rigor not in RIGORS:
            raise InputError(f"unknown rigor {self.rigor!r}; choose {' or '.join(RIGORS)}")
        if self.deterministic:
            object.__setattr__(self, "delta", 0.0)

    @property
    def deterministic(self) -> bool:
        return self.rigor == "deterministic"


@dataclass
class Norms:
    """Upper bounds that hold together, each of shape (N,).

    Attributes:
        ledger: of the images, and what the bounds were charged with.
        gains: ‖G(a → b)‖, by (a, b).
        peaks: the largest norm of a row of G(a → b), or of a block of rows, for operands b whose rules ask for that.
        columns: the norms of the columns of G(v → u), by (v, u), each of shape (1, entries of v).
        weighted: ‖diag(√w) G(a → b)‖, by (a, v): b is the operand of v, and w are the norms of columns after v.
        along: how far tokens of b move along themselves, all together and one of them, by (a, v): shape (N, 2).
        slack: what rounding can have taken of a norm as found, by (a, b), before it was added.
        rounded: what rounding does beside.
    """

    ledger: Ledger
    gains: dict[Pair, Tensor] = field(default_factory=dict)
    peaks: dict[Pair, Tensor] = field(default_factory=dict)
    columns: Mapping[Pair, Tensor] = field(default_factory=dict)
    weighted: dict[Pair, Tensor] = field(default_factory=dict)
    along: dict[Pair, Tensor] = field(default_factory=dict)
    slack: dict[Pair, Tensor] = field(default_factory=dict)
    rounded: Rounded = field(init=False)

    @property
    def count(self) -> int:
        """How many have been found."""
        return len(self.gains) + len(self.peaks) + len(self.weighted) + len(self.along)

    def raised(self, norm: Tensor, a: Node, b: Node, form: Form) -> Tensor:
        """‖M G(a → b)‖ as found, with what rounding can have taken of it, shape (N,).

        What products with G are off by, M makes at most ‖M‖ times as long. Those with M are off by γ size ‖Gv‖, γ for
        sums of no more terms than a deviation, or what M is made of, has entries; the factor between an error and what
        it does to a norm is that of :mod:`.rounding`.
        """
        terms = max(b.entries, *(tensor[0].numel() for tensor in form.tensors))
        own = 4 * (terms + 16) * UNIT * (16 + 4 * math.sqrt(max(a.entries, b.entries)))
        lost = form.norm * self.slack[a, b] + form.size * own * self.gains[a, b]
        return torch.minimum(norm + lost, form.norm * self.gains[a, b])

    def only(self, index: Tensor) -> Norms:
        """The same for some of the images, given by their numbers."""

        def some(known: Mapping[Pair, Tensor]) -> dict[Pair, Tensor]:
            return {pair: norm[index] for pair, norm in known.items()}

        part = Norms(self.ledger.only(index), some(self.gains), some(self.peaks), self.columns)
        part.weighted, part.along, part.slack = some(self.weighted), some(self.along), some(self.slack)
        part.rounded = self.rounded.only(index)
        return part


class NormFinder:
    """Takes the norms of a plan at images. A norm that is the same for all images is taken once.

    Attributes:
        delta: what the norms may spend of the failure probability.
        columns: the norms of columns, which belong to the network, once they are known.

    Args:
        network: the network.
        plan: the norms.
        options: how they are found.
        share: of the failure probability, what may be spent here.
        spare: how many norms may be asked for beside those of the plan.

    Raises:
        InputError: deterministic norms of Jacobians that are too large.
    """

    def __init__(self, network: Network, plan: NormPlan, options: NormOptions, *, share: float = 1.0, spare: int = 0):
        self.network, self.plan, self.options = network, plan, options
        self.delta = options.delta * share
        self.columns: dict[Pair, Tensor] = {}
        self._share = part_of(self.delta, plan.count + spare)
        self._constants: dict[tuple[str, Node, Node], float] = {}
        self._link_constants: dict[Link, float] = {}
        self._raised: set[Pair] = set()  # columns that hold with rounding
        self.jacobians = Jacobians(
            network, tolerance=options.tolerance, deterministic=options.deterministic, seed=options.seed
        )
        if options.deterministic:
            self.jacobians.check_sizes([*plan.pairs, *((link.operand, link.node) for link in plan.links)])

    def ledger(self, images: int) -> Ledger:
        """A new ledger for so many images."""
        return Ledger(self.options.delta, images, self.options.seed)

    def __call__(self, values: dict[Node, Tensor], ledger: Ledger, progress: NormProgress | None = None) -> Norms:
        """Upper bounds at nominal values, which fail together with what ``ledger`` charges.

        ``progress`` is called with (norms taken, norms in all).
        """
        plan, found = self.plan, Norms(ledger, columns=self.columns)
        alone = {node: value[:1] for node, value in values.items()}
        in_all = len(plan.pairs) + len(plan.peaks) + len(plan.weighted) + len(plan.along)

        def report() -> None:
            if progress is not None:
                progress(found.count, in_all)

        for v, u in plan.columns:
            draw = self._draw(ledger, "columns", v, u, known=self.jacobians.writes_out_columns(u))
            if (v, u) not in self.columns:
                self.columns[v, u] = self.jacobians.columns(v, u, alone, draw)
        for a, b in plan.pairs:
            draw = self._draw(ledger, "norm", a, b, known=self.jacobians.writes_out(a, b.entries))
            norm = partial(self.jacobians.norm, a, b, draw=draw)
            found.gains[a, b] = self._still(("norm", a, b), b, values, norm)
            report()
        for a, b in plan.peaks:
            found.peaks[a, b] = torch.minimum(self._largest_row(a, b, values, ledger), found.gains[a, b])
            report()
        links = {link: self._link(link, number, values, ledger) for number, link in enumerate(plan.links)}
        found.rounded, found.slack, found.gains = rounded(
            self.network.local, values, found.gains, links, self.network.rules, plan.chained
        )
        for pair, bound in found.peaks.items():
            found.peaks[pair] = torch.minimum(bound + found.slack[pair], found.gains[pair])
        for pair in self.columns.keys() - self._raised:
            self.columns[pair] = self.columns[pair] + found.slack[pair][0]
            self._raised.add(pair)
        for a, v in plan.weighted:
            found.weighted[a, v] = self._weighted(a, v, values, found)
            report()
        units = {v: self.network.remainder(v, values).units for v in plan.tokens}
        for a, v in plan.along:
            size = self.jacobians.along(a, v.operands[0], values, units[v], plan.tokens[v])
            found.along[a, v] = size + found.slack[a, self.network.operands(v)[0]][:, None]
            report()
        return found

    def _still(
        self,
        key: tuple[str, Node, Node],
        b: Node,
        values: dict[Node, Tensor],
        norm: Callable[[dict[Node, Tensor]], Tensor],
    ) -> Tensor:
        """A norm of G(a → b), which is taken for all images at once where the way is linear."""
        a = key[1]
        if not self.network.linear_way(a, b):
            return norm(values)
        if key not in self._constants:
            self._constants[key] = norm({node: value[:1] for node, value in values.items()}).item()
        return values[a].new_full((len(values[a]),), self._constants[key])

    def _largest_row(self, a: Node, b: Node, values: dict[Node, Tensor], ledger: Ledger) -> Tensor:
        draw = self._draw(ledger, "peak", a, b, known=self.jacobians.writes_out_rows(a, b))
        block, arranged = self.plan.blocks[b]
        target = b if block == 1 else arranged
        norm = partial(self.jacobians.largest_row, a, target, draw=draw, block=block)
        return self._still(("peak", a, b), b, values, norm)

    def _weighted(self, a: Node, v: Node, values: dict[Node, Tensor], found: Norms) -> Tensor:
        u = v.operands[0]
        draw = self._draw(found.ledger, "columns weighed", a, u, v, known=self.jacobians.writes_out(a, u.entries))
        scale = self.columns[v, self.plan.ahead[v]].sqrt().reshape(1, *v.shape)

        def form(images: int) -> Form:
            return Form.weights(scale.expand(images, *v.shape))

        def norm(known: dict[Node, Tensor]) -> Tensor:
            return self.jacobians.norm(a, u, known, draw, form=form(len(known[a])))

        bound = self._still(("weighted", a, v), u, values, norm)
        return found.raised(bound, a, self.network.operands(v)[0], form(len(values[a])))

    def _link(self, link: Link, number: int, values: dict[Node, Tensor], ledger: Ledger) -> Tensor:
        """Upper bounds on the norm of one operation's Jacobian, shape (N,)."""
        a, b = link.operand, link.node
        draw = self._draw(ledger, "link", a, b, number, known=self.jacobians.writes_out(a, b.entries))
        if self.network.rules.keys() & link.path:
            return self.jacobians.norm(a, b, values, draw, path=link.path)
        if link not in self._link_constants:
            alone = {node: value[:1] for node, value in values.items()}
            self._link_constants[link] = self.jacobians.norm(a, b, alone, draw, path=link.path).item()
        return values[a].new_full((len(values[a]),), self._link_constants[link])

    def formed(self, a: Node, b: Node, values: dict[Node, Tensor], form: Form, ledger: Ledger) -> Tensor:
        """Upper bounds on ‖M G(a → b)‖, shape (N,), with M of a form.

        The form may depend on all norms so far, so ``ledger`` is a part that none of these has drawn from.
        """
        draw = self._draw(ledger, "norm", a, b, known=self.jacobians.writes_out(a, rows_of(b, values, form)))
        return self.jacobians.norm(a, b, values, draw, form=form)

    def _draw(self, ledger: Ledger, kind: str, a: Node, b: Node, *more: Node | int, known: bool) -> Draw | None:
        """Start vectors for something about G(a → b); None where that is ``known`` from its entries, or empty.

        The key is made of the places of the operations in the network: whatever else is asked for, and in which order,
        a norm has the same vectors.
        """
        if known or not a.entries * b.entries:
            return None
        place = self.network.replay.position
        numbers = [item if isinstance(item, int) else place[item] for item in (a, b, *more)]
        return ledger.draw(kind, *numbers, delta=self._share)
