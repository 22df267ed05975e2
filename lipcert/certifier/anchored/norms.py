"""Computes the norms of a plan at images: upper bounds that hold simultaneously, and their failure probability."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipcert.bounds import Form
from lipcert.certifier.anchored.jacobians import Jacobians, rows_of
from lipcert.certifier.anchored.matrices import written_error
from lipcert.certifier.anchored.network import Network
from lipcert.certifier.anchored.plan import NormPlan
from lipcert.certifier.anchored.rounding import Entered, Rounded, rounded
from lipcert.certifier.anchored.written import Written
from lipcert.errors import InputError
from lipcert.graph import Node
from lipcert.inputs.artifact import seed_of
from lipcert.norms import SMALLEST, Budget, Draw, Ledger
from lipcert.numerics import UNIT, at_most, times
from lipcert.roundoff import Link, Pair
from lipcert.settings import RIGORS

NormProgress = Callable[[int, int], None]
# The tolerance of norms that are the same for all images and computed once, relative to the usual tolerance.
_CONSTANT = 0.02
# What identifies a norm: its kind, "norm", "peak" or "form", and its operations.
NormKey = tuple[str | Node | int, ...]


@dataclass(frozen=True)
class NormOptions:
    """How norms of Jacobians are computed.

    Attributes:
        delta: the failure probability for each image, over the certifier's own random start vectors.
        tolerance: the largest relative distance of a norm from the lower bound of Lanczos.
        seed: the seed of the start vectors.
        rigor: ``"probabilistic"``, or ``"deterministic"`` to compute every Jacobian in full, for small networks.

    Raises:
        InputError: an unknown rigor.
    """

    delta: float = 1e-9
    tolerance: float = 0.05
    seed: int = 0
    rigor: str = "probabilistic"

    def __post_init__(self) -> None:
        if self.rigor not in RIGORS:
            raise InputError(f"unknown rigor {self.rigor!r}; choose {' or '.join(RIGORS)}")
        if self.deterministic:
            object.__setattr__(self, "delta", 0.0)

    @property
    def budget(self) -> Budget:
        return Budget(self.delta)

    @property
    def deterministic(self) -> bool:
        return self.rigor == "deterministic"


@dataclass
class Norms:
    """Upper bounds that hold simultaneously, each of shape (N,), rounding included.

    Attributes:
        ledger: the ledger of the images, with the failure probability spent on the bounds.
        gains: ‖G(a → b)‖, by (a, b).
        peaks: the largest norm of a row of G(a → b), or of a block of rows, for operands b whose rules use it.
        shares: the norms of all rows of G(a → b), divided by the largest, shape (N, entries), by (a, v): b is the
            operand of v, and the rows are in the order in which v reads its entries.
        written: the Jacobians that are computed as matrices.
        slack: a bound S on the rounding error of a product with G(a → b) and a unit vector, by (a, b).
        rounded: bounds on the other rounding errors.
    """

    ledger: Ledger
    gains: dict[Pair, Tensor] = field(default_factory=dict)
    peaks: dict[Pair, Tensor] = field(default_factory=dict)
    shares: dict[Pair, Tensor] = field(default_factory=dict)
    slack: dict[Pair, Tensor] = field(default_factory=dict)
    written: Written = field(init=False)
    rounded: Rounded = field(init=False)

    @property
    def count(self) -> int:
        """The number of norms computed so far."""
        return len(self.gains) + len(self.peaks)

    def raised(self, norm: Tensor, a: Node, b: Node, form: Form, error_factor: float) -> Tensor:
        """‖M G(a → b)‖ as computed plus a bound on its rounding error, shape (N,)."""
        return torch.minimum(norm + error_factor * self.rounding(a, b, form), form.norm * self.gains[a, b])

    def rounding(self, a: Node, b: Node, form: Form) -> Tensor:
        """A bound on the rounding error of a product with M G(a → b) and a unit vector, shape (N,).

        M multiplies the error of a product with G by at most ‖M‖. A product with M has an error of at most
        γ size ‖Gv‖, with γ for sums of at most as many terms as a deviation, or a tensor of the form, has entries.
        """
        terms = max(b.entries, *(tensor[0].numel() for tensor in form.tensors))
        return form.norm * self.slack[a, b] + form.size * 4 * (terms + 16) * UNIT * self.gains[a, b]

    def only(self, index: Tensor) -> Norms:
        """The same for some of the images, given by their numbers."""

        def some(table: Mapping[Pair, Tensor]) -> dict[Pair, Tensor]:
            return {pair: norm[index] for pair, norm in table.items()}

        part = Norms(self.ledger.only(index), some(self.gains), some(self.peaks), some(self.shares))
        part.slack, part.rounded, part.written = some(self.slack), self.rounded.only(index), self.written.only(index)
        return part


class NormFinder:
    """Computes the norms of a plan at images. A norm that is the same for all images is computed once.

    Attributes:
        budget: the failure probability that the norms may spend.
        effort: tolerances of norms that differ from that of the options; ∞ leaves a norm to products (:mod:`.effort`).
            Norms that are the same for all images are always computed, within the tolerance of the options. None until
            they are chosen.
    """

    def __init__(self, network: Network, plan: NormPlan, options: NormOptions, *, variants: int = 1, spare: int = 0):
        self.network, self.plan, self.options = network, plan, options
        self.budget = options.budget if variants == 1 else options.budget.split(variants)
        self.effort: Mapping[NormKey, float] | None = None
        self._charge = self.budget.split(plan.count + spare).delta
        self._constants: dict[NormKey, Tensor] = {}
        self._link_constants: dict[Link, float] = {}
        self.jacobians = Jacobians(
            network,
            tolerance=options.tolerance,
            deterministic=options.deterministic,
            seed=options.seed,
            delta=self._charge,
        )
        if options.deterministic:
            self.jacobians.check_sizes([*plan.pairs, *((link.operand, link.node) for link in plan.links)])

    def ledger(self, images: int, budget: Budget | None = None) -> Ledger:
        """A new ledger for this number of images, with the failure probability of the options, or another one."""
        return (budget or self.options.budget).ledger(images, seed_of(self.network.model, self.options.seed))

    def __call__(self, values: dict[Node, Tensor], ledger: Ledger, progress: NormProgress | None = None) -> Norms:
        """Upper bounds at nominal values; the probability that one of them fails is charged to ``ledger``.

        ``progress`` is called with (norms computed, norms in total).
        """
        plan, norms, by = self.plan, Norms(ledger), self.jacobians
        wanted = [pair for pair in plan.pairs if self.wants("norm", *pair)]
        wanted += [pair for pair in plan.peaks if self.wants("peak", *pair)]
        norms.written = Written(by, values, wanted)
        kinds = {"norm": plan.pairs, "peak": plan.peaks}
        in_all = sum(self.wants(kind, *pair) for kind, pairs in kinds.items() for pair in pairs)
        done = itertools.count(1)

        def report() -> None:
            if progress is not None:
                progress(next(done), in_all)

        for a, b in plan.pairs:
            if self.wants("norm", a, b):
                norms.gains[a, b] = self._gain(a, b, values, norms)
                report()
        rows: dict[Pair, Tensor] = {}
        for a, b in plan.peaks:
            if self.wants("peak", a, b):
                rows[a, b] = self._rows(a, b, values, norms)
                norms.peaks[a, b] = rows[a, b].amax(1)
                report()
        links = {link: self._link(link, number, values, ledger) for number, link in enumerate(plan.links)}
        norms.rounded, norms.slack, norms.gains = rounded(
            self.network.local,
            values,
            norms.gains,
            links,
            self.network.rules,
            [pair for pair in plan.pairs if pair not in norms.gains],
            by.error_of,
            by.error_factor,
            through={pair: c for pair in plan.pairs if (c := by.through(*pair)) is not None},
            bends=by.bends(plan.pairs),
            entries=self._entries(norms, len(values[self.network.source])),
            cuts=[stage.start for stage in self.network.stages],
        )
        lost = {(a, b): written_error(a.entries, b.entries) * slack for (a, b), slack in norms.slack.items()}
        for pair, bound in norms.peaks.items():
            norms.peaks[pair] = torch.minimum(bound + lost[pair], norms.gains[pair])
        for v in plan.each:
            (u,) = self.network.operands(v)
            for (a, b), sizes in rows.items():
                if b is u:
                    share = (sizes + lost[a, b][:, None]) / norms.peaks[a, b][:, None].clamp_min(SMALLEST)
                    norms.shares[a, v] = self.network.arranged(u, v.operands[0], at_most(share).clamp_max(1))
        longest = {pair: norm for pair, norm in norms.peaks.items() if self.network.affine_path(*pair)}
        for a, b in plan.peaks:
            if (a, b) not in norms.peaks:
                last = {v: norm for (v, u), norm in longest.items() if u is b}
                norms.peaks[a, b] = torch.minimum(self.product(a, b, last, norms), norms.gains[a, b])
        return norms

    def _entries(self, norms: Norms, images: int) -> dict[Pair, Entered]:
        """The stored matrices in products for norms of Jacobians of the perturbed value, forms included."""
        by, source = self.jacobians, self.network.source
        entries = {}
        for a, b in self.plan.pairs:
            c = by.cut(b) if a is source and not by.writes(a, b) else None
            entry = None if c is None else norms.written.entry(a, b)
            if c is not None and entry is not None:
                error = entry.error().expand(images)
                entries[a, b] = c, by.bent_entry(c), error
        return entries

    def wants(self, kind: str, a: Node, b: Node, *more: int) -> bool:
        """Whether a norm is computed, rather than bounded by products."""
        if kind != "form" and (a, b) in self.plan.covered:
            return False
        if self.tolerance((kind, a, b, *more)) < math.inf and not (kind == "norm" and (a, b) in self.plan.loose):
            return True
        return kind != "form" and self.network.affine_path(a, b)

    def tolerance(self, key: NormKey) -> float:
        """The tolerance of a norm; ∞ for products."""
        return self.options.tolerance if self.effort is None else self.effort.get(key, self.options.tolerance)

    def product(self, a: Node, u: Node, last: Mapping[Node, Tensor], norms: Norms) -> Tensor:
        """The least ‖M G(v → u)‖ ‖G(a → v)‖, which bounds ‖M G(a → u)‖, shape (N,); ∞ without a suitable v.

        If every path from the perturbed value to u passes through v, and a comes before v, then
        G(a → u) = G(v → u) G(a → v); :class:`lipcert.roundoff.Chains` proves it.
        """
        network, best = self.network, torch.full_like(next(iter(norms.gains.values())), math.inf)
        for v, norm in last.items():
            if network.replay.position[a] < network.replay.position[v] and network.chains.on_every_path(v, u):
                best = torch.minimum(best, times(norm, norms.rounded.path(a, v)))
        return best

    def _compute(self, key: NormKey, norm: Callable[[Jacobians], Tensor]) -> Tensor:
        """A norm, within its tolerance."""
        return norm(self.jacobians.within(self.tolerance(key)))

    def _constant(
        self,
        key: NormKey,
        a: Node,
        b: Node,
        values: dict[Node, Tensor],
        norm: Callable[[Jacobians, dict[Node, Tensor]], Tensor],
    ) -> Tensor:
        """A norm of G(a → b), computed once for all images if the path is affine."""
        if not self.network.affine_path(a, b):
            return self._compute(key, lambda jacobians: norm(jacobians, values))
        if key not in self._constants:
            alone = {node: value[:1] for node, value in values.items()}
            tight = self.jacobians.within(self.jacobians.tolerance * _CONSTANT)
            self._constants[key] = norm(tight, alone)
        constant = self._constants[key]
        return constant.expand(len(values[a]), *constant.shape[1:])

    def _gain(self, a: Node, b: Node, values: dict[Node, Tensor], norms: Norms) -> Tensor:
        written = self.jacobians.writes(a, b)
        draw = self._draw(norms.ledger, "norm", a, b, from_entries=written or self.jacobians.writes_out(a, b.entries))

        def norm(by: Jacobians, nominal: dict[Node, Tensor]) -> Tensor:
            if written:
                return norms.written.factor(a, b).norm()
            return by.norm(a, b, nominal, draw, entry=norms.written.entry(a, b) if draw else None)

        return self._constant(("norm", a, b), a, b, values, norm)

    def _rows(self, a: Node, b: Node, values: dict[Node, Tensor], norms: Norms) -> Tensor:
        written = self.jacobians.writes(a, b)
        draw = self._draw(norms.ledger, "peak", a, b, from_entries=written or self.jacobians.writes_out_rows(a, b))
        block, arranged = self.plan.blocks[b]
        target = b if block == 1 else arranged

        def norm(by: Jacobians, nominal: dict[Node, Tensor]) -> Tensor:
            if not written:
                return by.rows(a, target, nominal, draw, block)
            matrix = norms.written.factor(a, target)
            return matrix.row_norms() if block == 1 else matrix.block_norms(block)

        return self._constant(("peak", a, b), a, b, values, norm)

    def _link(self, link: Link, number: int, values: dict[Node, Tensor], ledger: Ledger) -> Tensor:
        """Upper bounds on the norm of one operation's Jacobian, shape (N,)."""
        a, b = link.operand, link.node
        draw = self._draw(ledger, "link", a, b, number, from_entries=self.jacobians.writes_out(a, b.entries))
        if self.network.rules.keys() & link.path:
            return self.jacobians.norm(a, b, values, draw, path=link.path)
        if link not in self._link_constants:
            alone = {node: value[:1] for node, value in values.items()}
            self._link_constants[link] = self.jacobians.norm(a, b, alone, draw, path=link.path).item()
        return values[a].new_full((len(values[a]),), self._link_constants[link])

    def formed(
        self, a: Node, v: Node, number: int, values: dict[Node, Tensor], form: Form, norms: Norms, ledger: Ledger
    ) -> Tensor:
        """Upper bounds on ‖M G(a → b)‖, shape (N,): M is form ``number`` of v, and b the operand of the form.

        The form may depend on all norms computed so far, so none of them may have drawn from this part of the ledger.
        """
        b = v.operands[form.operand]
        rows = rows_of(b, values, form)
        written = self.jacobians.writes(a, b)
        draw = self._draw(ledger, "norm", a, b, from_entries=written or self.jacobians.writes_out(a, rows))

        def norm_with(by: Jacobians) -> Tensor:
            if written:
                return norms.written.factor(a, b).formed(form, b.shape).norm().expand(len(form.norm))
            return by.norm(a, b, values, draw, form=form, entry=norms.written.entry(a, b) if draw else None)

        factor = written_error(a.entries, max(rows, b.entries)) if written else self.jacobians.error_factor(a, rows)
        norm = self._compute(("form", a, v, number), norm_with)
        return norms.raised(norm, a, self.network.root(b), form, factor)

    def _draw(self, ledger: Ledger, kind: str, a: Node, b: Node, *more: Node | int, from_entries: bool) -> Draw | None:
        """Start vectors for a bound on G(a → b); None if it is computed ``from_entries``, or G is empty.

        The key consists of the positions of the operations in the network. So a norm has the same vectors whichever
        other norms are requested, and in whichever order.
        """
        if from_entries or not a.entries * b.entries:
            return None
        place = self.network.replay.position
        numbers = [item if isinstance(item, int) else place[item] for item in (a, b, *more)]
        return ledger.draw(kind, *numbers, delta=self._charge)
