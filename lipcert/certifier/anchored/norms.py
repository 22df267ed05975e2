"""Computes the norms of a plan at images: upper bounds that hold simultaneously, and their failure probability.

:meth:`NormFinder.__call__` takes three steps, each of which needs all of the one before: the norms as they are
computed, bounds on their rounding errors (:mod:`lipcert.roundoff`), and the norms raised by these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipcert.bounds import Form
from lipcert.certifier.anchored.jacobians import LONG, PROBES, Jacobians, explicit_error, rows_of
from lipcert.certifier.anchored.network import Network
from lipcert.certifier.anchored.plan import NormPlan
from lipcert.errors import InputError
from lipcert.graph import Node
from lipcert.inputs.artifact import seed_of
from lipcert.norms import Budget, Draw, Ledger
from lipcert.numerics import UNIT
from lipcert.roundoff import Link, Pair, RoundingBounds, bound_rounding
from lipcert.settings import RIGORS

# The norms of the columns of M G, for one rival class at a time, are computed for at most this many rows.
FORM_ROWS = 1024
NormProgress = Callable[[int, int], None]
# Products with Jacobians of more rows, from one value, are taken separately.
_ROWS = 2**19
# The tolerance of norms that are the same for all images and computed once, relative to the usual tolerance.
_CONSTANT = 0.02


@dataclass(frozen=True)
class NormOptions:
    """How norms of Jacobians are computed.

    Attributes:
        delta: the failure probability for each image, over the certifier's own random start vectors.
        tolerance: the largest relative distance of a norm from the lower bound of Lanczos.
        probes: the number of products that bound norms of rows.
        seed: the seed of the start vectors.
        rigor: ``"probabilistic"``, or ``"deterministic"`` to compute every Jacobian in full, for small networks.

    Raises:
        InputError: an unknown rigor.
    """

    delta: float = 1e-9
    tolerance: float = 0.05
    probes: int = PROBES
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


@dataclass(frozen=True)
class PairNorms:
    """Upper bounds for one Jacobian G(a → b) at N images, rounding included.

    Attributes:
        norm: ‖G‖, shape (N,).
        slack: a bound S on the rounding error of a product with G and a unit vector, shape (N,).
        largest: the largest norm of a row of G, or of a block of rows, shape (N,); None unless rules use it.
        rows: the norms of all rows, shape (N, entries), by the operand of which b is the root, in the order of that.
        columns: the norms of the columns, the same for all images, shape (1, entries of a); None unless rules use them.
        weighted: ‖diag(√w) G‖, shape (N,), by the operation whose operand is b: w are the norms of the columns from
            there to the value ahead of it in the plan.
    """

    norm: Tensor
    slack: Tensor
    largest: Tensor | None
    rows: dict[Node, Tensor]
    columns: Tensor | None
    weighted: dict[Node, Tensor] = field(default_factory=dict)

    def only(self, index: Tensor) -> PairNorms:
        """The bounds for the images with the given indices."""
        rows, weighted = ({node: bound[index] for node, bound in t.items()} for t in (self.rows, self.weighted))
        largest = None if self.largest is None else self.largest[index]
        return PairNorms(self.norm[index], self.slack[index], largest, rows, self.columns, weighted)


@dataclass
class Norms:
    """Upper bounds that hold simultaneously at N images.

    Attributes:
        ledger: the ledger of the images, with the failure probability spent on the bounds.
        rounded: bounds on rounding errors.
        pairs: the bounds for every pair (a, b) of the plan.
    """

    ledger: Ledger
    rounded: RoundingBounds
    pairs: Mapping[Pair, PairNorms]

    def only(self, index: Tensor) -> Norms:
        """The norms for the images with the given indices."""
        pairs = {pair: norms.only(index) for pair, norms in self.pairs.items()}
        return Norms(self.ledger.only(index), self.rounded.only(index), pairs)

    def error(self, a: Node, b: Node, form: Form) -> Tensor:
        """A bound on the rounding error of a product with M G(a → b) and a unit vector, shape (N,).

        M multiplies the error of a product with G by at most ‖M‖. A product with M has an error of at most γ size ‖Gv‖,
        with γ for sums of at most as many terms as a deviation, or a tensor of the form, has entries.
        """
        terms = max(b.entries, *(tensor[0].numel() for tensor in form.tensors))
        known = self.pairs[a, b]
        return form.norm * known.slack + form.size * 4 * (terms + 16) * UNIT * known.norm


class NormFinder:
    """Computes the norms of a plan at images. A norm that is the same for all images is computed once.

    Attributes:
        budget: the failure probability that the norms may spend.
    """

    def __init__(self, network: Network, plan: NormPlan, options: NormOptions, *, spare: int = 0):
        """``spare`` is the largest number of norms that may be asked for beyond the plan's."""
        self.network, self.plan, self.options, self.budget = network, plan, options, options.budget
        self._charge = self.budget.split(plan.count + spare).delta
        self._constants: dict[tuple[str, Node, Node], Tensor] = {}
        self.jacobians = Jacobians(
            network,
            tolerance=options.tolerance,
            probes=options.probes,
            deterministic=options.deterministic,
            seed=options.seed,
            delta=self._charge,
        )
        # Row norms from one value take the same random vectors, but for those that need none, or one image.
        together: dict[tuple[Node, Node | int], list[Node]] = {}
        rows = Counter[Node]()
        for a, b in plan.computed_peaks:
            alone = self.jacobians.explicit_rows(a, b) or network.affine_path(a, b)
            together.setdefault((a, b if alone else rows[a] // _ROWS), []).append(b)
            rows[a] += b.entries
        self._together = [(a, targets) for (a, _), targets in together.items()]
        if options.deterministic:
            self.jacobians.check_sizes([*plan.pairs, *((link.operand, link.node) for link in plan.links)])

    def ledger(self, images: int, budget: Budget | None = None) -> Ledger:
        """A new ledger for this number of images, with the failure probability of the options, or another one."""
        return (budget or self.options.budget).ledger(images, seed_of(self.network.model, self.options.seed))

    def __call__(self, values: dict[Node, Tensor], ledger: Ledger, progress: NormProgress | None = None) -> Norms:
        """Upper bounds at nominal values; the probability that one of them fails is charged to ``ledger``.

        ``progress`` is called with (norms computed, norms in total).
        """
        plan, report = self.plan, progress or (lambda *_: None)
        total = len(plan.computed) + len(plan.computed_peaks)
        gains: dict[Pair, Tensor] = {}
        for a, b in plan.computed:
            gains[a, b] = self._norm(a, b, values, ledger)
            report(len(gains), total)
        rows: dict[Pair, Tensor] = {}
        for a, targets in self._together:
            rows |= zip([(a, b) for b in targets], self._row_norms(a, targets, values, ledger), strict=True)
            report(len(gains) + len(rows), total)
        columns = {(v, u): self._column_norms(v, u, values, ledger) for v, u in plan.columns}
        links = {link: self._link_norm(link, number, values, ledger) for number, link in enumerate(plan.links)}

        network = self.network
        cuts = [stage.start for stage in network.stages]
        others = [pair for pair in plan.pairs if pair not in gains]  # products bound their norms
        factor = self.jacobians.error_factor
        bounds = bound_rounding(network.local, values, gains, links, network.rules, cuts, others, factor)
        rounding, slack, raised = bounds

        def known(a: Node, b: Node) -> PairNorms:
            lost = explicit_error(a.entries, b.entries) * slack[a, b]
            largest, each = None, {}
            if (a, b) in rows:
                sizes = torch.minimum(rows[a, b] + lost[:, None], raised[a, b][:, None])
                operands = [v.operands[0] for v in plan.each if self.network.operands(v)[0] is b]
                largest, each = sizes.amax(1), {z: sizes[:, self.network.order(z)] for z in operands}
            # Neither these norms nor what rounding does to an affine path depends on the image.
            across = columns[a, b][:1] + lost[:1, None] if (a, b) in columns else None
            return PairNorms(raised[a, b], slack[a, b], largest, each, across)

        norms = Norms(ledger, rounding, {pair: known(*pair) for pair in plan.pairs})
        for a, v in plan.weighted:
            norms.pairs[a, self.network.operands(v)[0]].weighted[v] = self._weighted(a, v, values, norms)
        return norms

    def _once(
        self,
        key: tuple[str, Node, Node],
        same: bool,
        values: dict[Node, Tensor],
        compute: Callable[[Jacobians, dict[Node, Tensor]], Tensor],
    ) -> Tensor:
        """``compute`` applied to the values, one row per image; to one image only if the result is the same for all."""
        if not same:
            return compute(self.jacobians, values)
        if key not in self._constants:
            alone = {node: value[:1] for node, value in values.items()}
            self._constants[key] = compute(self.jacobians.within(self.options.tolerance * _CONSTANT), alone)
        constant = self._constants[key]
        return constant.expand(len(values[key[1]]), *constant.shape[1:])

    def _norm(self, a: Node, b: Node, values: dict[Node, Tensor], ledger: Ledger) -> Tensor:
        """‖G(a → b)‖ as computed, shape (N,)."""
        draw = self._draw(ledger, "norm", a, b, explicit=self.jacobians.explicit(a, b.entries))
        same = self.network.affine_path(a, b)
        return self._once(("norm", a, b), same, values, lambda by, part: by.norm(a, b, part, draw))

    def _row_norms(
        self, a: Node, targets: Sequence[Node], values: dict[Node, Tensor], ledger: Ledger
    ) -> Sequence[Tensor]:
        """The norms of the rows of G(a → b), or of blocks of rows, as computed, each of shape (N, blocks)."""
        first, counts, arranged = targets[0], list[int](), list[tuple[Node, int]]()
        for b in targets:
            block, place = self.plan.blocks[b]
            arranged.append((b if block == 1 else place, block))
            counts.append(max(1, b.entries // block))
        explicit, same = self.jacobians.explicit_rows(a, first), self.network.affine_path(a, first)
        draw = self._draw(ledger, "peak", a, *targets, explicit=explicit, charges=len(targets))
        key = "peak", a, first
        return self._once(key, same, values, lambda by, part: by.rows(a, arranged, part, draw)).split(counts, 1)

    def _column_norms(self, a: Node, b: Node, values: dict[Node, Tensor], ledger: Ledger) -> Tensor:
        """The norms of the columns of G(a → b) for an affine path, as computed, shape (N, entries of a)."""
        explicit = self.jacobians.deterministic or b.entries <= LONG
        draw = self._draw(ledger, "columns", a, b, explicit=explicit)
        return self._once(("columns", a, b), True, values, lambda by, part: by.columns(a, b, part, draw))

    def _link_norm(self, link: Link, number: int, values: dict[Node, Tensor], ledger: Ledger) -> Tensor:
        """The norm of one operation's Jacobian as computed, shape (N,)."""
        a, b = link.operand, link.node
        draw = self._draw(ledger, "link", a, b, number, explicit=self.jacobians.explicit(a, b.entries))
        same = not self.network.rules.keys() & link.path
        return self._once(("link", a, b), same, values, lambda by, part: by.norm(a, b, part, draw, path=link.path))

    def _weighted(self, a: Node, v: Node, values: dict[Node, Tensor], norms: Norms) -> Tensor:
        """One of the weighted norms, shape (N,)."""
        b, by = v.operands[0], self.jacobians
        columns = norms.pairs[v, self.plan.ahead[v]].columns
        assert columns is not None
        scale = columns.sqrt().reshape(1, *v.shape)
        if self.plan.covers(a, v):
            return scale.amax() * norms.pairs[a, self.network.operands(v)[0]].norm
        draw = self._draw(norms.ledger, "weighted", a, b, v, explicit=by.explicit(a, b.entries))

        def form(values: dict[Node, Tensor]) -> Form:
            return Form.weights(scale.expand(len(values[a]), *v.shape))

        same = self.network.affine_path(a, b)
        key = "weighted", a, v
        norm = self._once(key, same, values, lambda by, part: by.norm(a, b, part, draw, form=form(part)))
        return self._raised(norm, a, b, form(values), b.entries, norms)

    def formed(self, a: Node, b: Node, values: dict[Node, Tensor], form: Form, norms: Norms, ledger: Ledger) -> Tensor:
        """Upper bounds on ‖M G(a → b)‖, shape (N,), for the M of a form.

        The form may depend on all norms computed so far, so none of them may have drawn from this part of the ledger.
        """
        by, rows = self.jacobians, rows_of(b, values, form)
        draw = self._draw(ledger, "norm", a, b, explicit=by.explicit(a, rows))
        norm = by.norm(a, b, values, draw, form=form)
        return self._raised(norm, a, b, form, rows, norms)

    def _raised(self, norm: Tensor, a: Node, b: Node, form: Form, rows: int, norms: Norms) -> Tensor:
        """‖M G(a → b)‖ as computed, with the ``rows`` of M G, plus a bound on its rounding error, shape (N,)."""
        by, u = self.jacobians, self.network.root(b)
        return torch.minimum(
            norm + by.error_factor(a, rows) * norms.error(a, u, form), form.norm * norms.pairs[a, u].norm
        )

    def formed_columns(self, a: Node, b: Node, values: dict[Node, Tensor], form: Form, norms: Norms) -> Tensor | None:
        """Upper bounds on the norms of the columns of M G(a → b), shape (N, entries of a), for the M of a form.

        None if the path from a to b is not affine, or if M G has many rows: these norms take no random vectors.
        """
        by, rows = self.jacobians, rows_of(b, values, form)
        if rows > FORM_ROWS or not self.network.affine_path(a, b):
            return None
        sizes = by.columns(a, b, values, None, form)
        return sizes + (explicit_error(a.entries, rows) * norms.error(a, self.network.root(b), form))[:, None]

    def _draw(
        self, ledger: Ledger, kind: str, a: Node, b: Node, *more: Node | int, explicit: bool, charges: int = 1
    ) -> Draw | None:
        """Start vectors for a bound on G(a → b); None if it is computed ``explicit``, or G is empty.

        The key consists of the positions of the operations in the network, those of all norms that share the vectors,
        each of which is charged. So a norm has the same vectors whichever norms were requested before.
        """
        if explicit or not a.entries * b.entries:
            return None
        place = self.network.graph.position
        numbers = [item if isinstance(item, int) else place[item] for item in (a, b, *more)]
        return ledger.draw(kind, *numbers, delta=charges * self._charge)
