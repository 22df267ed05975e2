"""Bounds the deviation of every value in one pass through the stages of a network linearised at images.

The deviation of a value u of a stage has two parts: the first-order part, from the source or from the start of the
stage, and the remainders of the earlier operations of the stage, each multiplied by the norm of the Jacobian from there
to u. All remainder bounds increase with the deviations of their operands, so the operations are visited in order.
The rounding errors of a deployed network are added to the remainders (:class:`DeployedErrors`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lipcert.bounds import Remainder
from lipcert.certifier.anchored.network import Stage
from lipcert.graph import Node
from lipcert.norms import Ledger
from lipcert.numerics import at_most, l2_norm

if TYPE_CHECKING:
    from typing_extensions import Self

    from lipcert.certifier.anchored.layer import LayerAt
    from lipcert.certifier.anchored.norms import NormFinder, NormProgress
    from lipcert.certifier.anchored.ray import Sector


class SeminormKind(Enum):
    """The seminorm of a deviation δ that is bounded: ‖Mδ‖ for a matrix M, or the largest norm of a part of Mδ."""

    NORM = auto()  # ‖δ‖
    LARGEST = auto()  # the largest norm of an entry, or of a block of entries
    COLUMNS = auto()  # ‖√w ∘ δ‖, w the norms of the columns of the affine path ahead of an operation
    CURVATURE = auto()  # ‖Mδ‖, M a form of the rule of an operation for a margin


class Seminorm(NamedTuple):
    """A kind of seminorm, and the operation whose weights or forms define M, with the index of the form."""

    kind: SeminormKind
    of: Node | None = None
    form: int = 0


# The number of pieces with fine norms.
_PIECES = 4

NORM, LARGEST = Seminorm(SeminormKind.NORM), Seminorm(SeminormKind.LARGEST)


@dataclass(frozen=True)
class FormNorms:
    """Norms with a linear map M of the deviation of one operand of an operation, a rearrangement of u.

    Attributes:
        operand: the operand.
        norms: upper bounds on ‖M G(a → u)‖ by a, each of shape (N,); 0 for any other a.
        along: upper bounds on ‖M G(x → u) p‖ for the p of a ray, shape (N,).
        columns: upper bounds on the norms of the columns of M G(a → u) by a, each of shape (N, entries of a), for some
            of the operations a from which the path to u is affine.
    """

    operand: Node
    norms: Mapping[Node, Tensor]
    along: Tensor
    columns: Mapping[Node, Tensor] = field(default_factory=dict)

    def only(self, index: Tensor) -> FormNorms:
        """The norms for the images with the given indices."""
        norms, columns = ({a: norm[index] for a, norm in table.items()} for table in (self.norms, self.columns))
        return FormNorms(self.operand, norms, self.along[index], columns)


# For operations v, the norms for each of their forms, in order.
Curvature = Mapping[Node, Sequence[FormNorms]]

NO_CURVATURE: Curvature = MappingProxyType({})


@dataclass(frozen=True)
class DeployedErrors:
    """Bounds on the rounding errors of a deployed network at N images.

    Attributes:
        local: bounds on the entries of |e| of every operation.
        collected: shape (N, values). At a nonlinear operation, the error at its output: its own, and that of its
            operands by linear operations. At any other value, the error by the linear operations since the last
            nonlinear operation or cut.
        place: the index of every value.
    """

    local: Mapping[Node, Tensor]
    collected: Tensor
    place: Mapping[Node, int]

    def only(self, index: Tensor, *, bounds_only: bool) -> DeployedErrors:
        """The errors for the images with the given indices; with ``bounds_only`` without ``local``."""
        local = {} if bounds_only else {node: error[index] for node, error in self.local.items()}
        return DeployedErrors(local, self.collected[index], self.place) if self.place else self

    def of(self, u: Node) -> Tensor | None:
        """What is collected at a value, shape (N,); None in real arithmetic."""
        return self.collected[:, self.place[u]] if u in self.place else None


EXACT = DeployedErrors({}, torch.empty(0, device="cpu"), {})


@dataclass(frozen=True)
class StageDeviation:
    """Bounds for a stage, each of shape (N,)."""

    stage: Stage
    start: Tensor  # the deviation of its start
    remainder: Tensor  # that of its end by its remainders
    end: Tensor  # that of its end


@dataclass(frozen=True)
class Deviations:
    """Upper bounds ρ on the deviations of values, each of shape (N,).

    Attributes:
        operands: for every nonlinear operation, the ρ of its operands, followed by the bounds on blocks that its rule
            uses; see :class:`lipcert.bounds.Remainder`.
    """

    operands: dict[Node, list[Tensor]]
    logits: Tensor
    features: Tensor | None  # what a linear head reads
    remainders: dict[Node, Tensor] = field(default_factory=dict)  # ‖R_v‖
    form_norms: dict[Node, list[Tensor]] = field(default_factory=dict)  # ‖Mδ‖ for the forms M of an operation
    stages: list[StageDeviation] = field(default_factory=list)


class Linearization:
    """A network linearised at N images: bounds for any ε.

    Attributes:
        finder: the network, and its norms.
        images: pixels in [0, 1], shape (N, 1, C, H, W).
        values: nominal values, each of shape (N, *node.shape).
        norms: of the Jacobians between the pairs of the plan.
        remainders: the remainder rules at the nominal points.
        logits: nominal logits, shape (N, classes).
        uncertain: the images at which rounding errors of the values may make a Jacobian jump, bool, shape (N,). Values
            are computed again for every product with Jacobians, and sums may be taken in another order then. So
            products near a breakpoint may belong to different Jacobians, and nothing is certified there.
        deployed: the rounding errors of a deployed network.
        searches: the number of earlier radius searches with contracted forms; it identifies the start vectors.
        layer: the last layer before the perturbed value; None if nothing is known of it.
        pieces: into how many pieces a sector is divided where the margin is not positive in all of it.
    """

    def __init__(
        self,
        finder: NormFinder,
        images: Tensor,
        progress: NormProgress | None = None,
        ledger: Ledger | None = None,
        layer: LayerAt | None = None,
        start: Tensor | None = None,
    ):
        """``start`` is the value of the source, where it is known; shape (N, *source.shape)."""
        self.finder, self.network, self.plan = finder, finder.network, finder.plan
        ledger = finder.ledger(len(images)) if ledger is None else ledger
        model = self.network.model
        self.images = images.to(model.device, model.dtype)[:, None]
        with torch.no_grad():
            self.values = self.network.values(self.images, start)
        self.norms = finder(self.values, ledger, progress)
        self.remainders: dict[Node, Remainder] = self.network.remainders(self.values)
        self.logits = self.values[self.network.graph.output].reshape(len(images), -1)
        self.uncertain = self._uncertain()
        self.deployed = EXACT
        self.searches, self.pieces = 0, 1
        self.layer = layer

    @property
    def entries(self) -> int:
        """The number of entries, per image, of the values that the remainder rules read."""
        read = dict.fromkeys(node for v in self.network.rules for node in (v, *v.operands))
        return sum(self.values[node][0].numel() for node in read)

    def only(self, index: Tensor, *, bounds_only: bool = False) -> Self:
        """The linearisation at the images with the given indices; with ``bounds_only`` without values."""
        part = copy.copy(self)
        part.logits, part.norms = self.logits[index], self.norms.only(index)
        part.remainders = self.network.remainders(self.values, self.remainders, index)
        part.images = self.images[:0] if bounds_only else self.images[index]
        part.values = {} if bounds_only else {node: value[index] for node, value in self.values.items()}
        part.uncertain = self.uncertain[index]
        part.deployed = self.deployed.only(index, bounds_only=bounds_only)
        part.layer = None if self.layer is None or bounds_only else self.layer.only(index)
        return part

    def again(self, finder: NormFinder, index: Tensor) -> Self:
        """The linearisation at the images with the given indices, with finer norms, by a finder of the same plan."""
        part = self.only(index)
        part.pieces = _PIECES
        part.finder, part.norms = finder, finder(part.values, part.norms.ledger.part("again"))
        part.uncertain = part._uncertain()
        return part

    def _uncertain(self) -> Tensor:
        """:attr:`uncertain`, for these norms."""
        found = torch.zeros(len(self.images), dtype=torch.bool, device=self.images.device)
        for v, rule in self.remainders.items():
            noise = torch.stack([self.norms.rounded.noise[u] for u in v.operands])
            found |= rule.uncertain(l2_norm(noise, 0))
        return found

    def gain(self, a: Node, u: Node, seminorm: Seminorm = NORM) -> Tensor | float:
        """An upper bound on ‖M G(a → u)‖, for the M of a seminorm; 0 if u does not depend on a."""
        kind, v, _ = seminorm
        if a is not u and (a, u) in self.plan.unconnected:
            return 0.0
        if kind is SeminormKind.COLUMNS:
            assert v is not None
            return self.weights(v).amax().sqrt() if a is u else self.norms.pairs[a, u].weighted[v]
        if a is u:
            return 1.0
        known = self.norms.pairs[a, u]
        return known.norm if kind is not SeminormKind.LARGEST or known.largest is None else known.largest

    def weights(self, v: Node) -> Tensor:
        """The norms of the columns from v to the value ahead of it in the plan, shape (1, entries)."""
        columns = self.norms.pairs[v, self.plan.ahead[v]].columns
        assert columns is not None
        return columns

    def propagate(
        self,
        eps: Tensor,
        curvature: Curvature = NO_CURVATURE,
        *,
        layerwise: bool = False,
        sector: Sector | None = None,
        outputs: bool = True,
    ) -> Deviations:
        """Bounds on the deviations of values for perturbations of norm at most ε.

        The deviation of the start of a stage is the smaller of two bounds: the first-order part from the source plus
        all earlier remainders, and the bound that the previous stage passes on, ‖J_k‖ ρ_k + r_k. The second is the
        bound of :mod:`lipcert.certifier._lofast`. All rules increase with ρ, so no ρ is larger than that of LoFAST.
        """
        network, zero = self.network, torch.zeros_like(eps)
        carried = self.deployed.of(network.stages[0].start)  # by the linear operations before the first stage
        before = zero if carried is None else carried
        at_cuts: dict[Node, Tensor] = {}  # the sum of the remainders before a cut, at the cut
        stages: list[StageDeviation] = []
        operands: dict[Node, list[Tensor]] = {}
        remainders: dict[Node, Tensor] = {}
        form_norms: dict[Node, list[Tensor]] = {}
        reach = _Reach(self, eps, sector)
        # The next start as the stage before bounds it. No remainder precedes the first start.
        passed_on = reach(network.stages[0].start, NORM, self.gain(network.source, network.stages[0].start)) + before
        for stage in network.stages:
            if layerwise:
                bounds = _StageBounds(self, stage, passed_on, None, curvature)
            else:
                sums = (self.gain(cut, stage.start) * error for cut, error in at_cuts.items())
                arrived = at_most(sum(sums, zero)) if stages else before
                direct = reach(stage.start, NORM, self.gain(network.source, stage.start))
                at_start = torch.minimum(direct + arrived, passed_on)
                bounds = _StageBounds(self, stage, at_start, (reach, arrived), curvature)
            bounds.visit(operands, form_norms)
            remainders |= bounds.remainders
            if stage is network.stages[-1] and not outputs:
                return Deviations(operands, torch.full_like(eps, math.inf), None, remainders, form_norms, stages)
            remainder = at_cuts[stage.end] = at_most(bounds.errors(stage.end, NORM))
            passed_on = at_most(bounds.linear(stage.end, NORM) + remainder)
            if not stages:  # later stages find the rounding before the first at its end
                at_cuts[stage.end] = at_most(remainder + self.gain(stage.start, stage.end) * before)
            stages.append(StageDeviation(stage, bounds.at_start, remainder, passed_on))
        features = None
        if network.head is not None:
            u = network.root(network.head[0])
            features = at_most(bounds.linear(u, NORM) + bounds.errors(u, NORM, network.head[0]))
        return Deviations(operands, passed_on, features, remainders, form_norms, stages)


class _Reach:
    """The deviations of values by perturbations of norm at most ε, to first order."""

    def __init__(self, at: Linearization, eps: Tensor, sector: Sector | None):
        self.at, self.eps, self.sector = at, eps, sector

    def __call__(self, u: Node, seminorm: Seminorm, gain: Tensor | float, along: Tensor | None = None) -> Tensor:
        """An upper bound on ‖M G(x → u) δ‖, shape (N,), for the M of a seminorm."""
        if self.sector is None or (self.at.network.source, u) in self.at.plan.unconnected:
            return gain * self.eps
        size = self.sector.ray.size(u, seminorm) if along is None else along
        return self.sector.moved(size, gain, self.eps)

    def each(self, u: Node, rows: Tensor) -> Tensor:
        """Bounds for all entries of an operand, shape (N, entries), from bounds on the norms of the rows."""
        if self.sector is None:
            return at_most(rows * self.eps[:, None])
        return self.sector.moved(self.sector.ray.entries(u).mT, rows.mT, self.eps).mT


class _StageBounds:
    """The bounds for the values of one stage."""

    def __init__(
        self,
        at: Linearization,
        stage: Stage,
        at_start: Tensor,
        source: tuple[_Reach, Tensor] | None,
        curvature: Curvature,
    ):
        self.at, self.stage, self.at_start, self.source, self.curvature = at, stage, at_start, source, curvature
        self.zero, self.unknown = torch.zeros_like(at_start), torch.full_like(at_start, math.inf)
        self.remainders: dict[Node, Tensor] = {}  # bounds on ‖R_v‖ so far, shape (N,)
        self.rho: dict[Node, list[Tensor]] = {}
        self.summed: dict[tuple[Node, Node], Tensor] = {}
        self.sizes: dict[Node, Tensor] = {}  # bounds on ‖√w ∘ δ‖ for the operand of v, shape (N,)

    def gain(self, a: Node, u: Node, seminorm: Seminorm) -> Tensor | float:
        """:meth:`Linearization.gain`, with the norms for the weights of curvature."""
        if seminorm.kind is SeminormKind.CURVATURE:
            assert seminorm.of is not None
            return self.curvature[seminorm.of][seminorm.form].norms.get(a, 0.0)
        return self.at.gain(a, u, seminorm)

    def linear(self, u: Node, seminorm: Seminorm) -> Tensor:
        """The deviation of a value without the remainders of the stage."""
        from_start = self.gain(self.stage.start, u, seminorm)
        if self.source is None:
            return from_start * self.at_start
        reach, arrived = self.source
        along = None
        if seminorm.kind is SeminormKind.CURVATURE:
            assert seminorm.of is not None
            along = self.curvature[seminorm.of][seminorm.form].along
        direct = reach(u, seminorm, self.gain(self.at.network.source, u, seminorm), along)
        from_source = at_most(direct + from_start * arrived)
        return torch.minimum(from_source, at_most(from_start * self.at_start))

    def errors(self, u: Node, seminorm: Seminorm, read: Node | None = None) -> Tensor:
        """The deviation of a value by the remainders of the stage so far, and by rounding errors.

        ``read`` is a rearrangement of u, with the rounding errors of casts on the way to it.
        """
        # Rounding errors before the start of the stage are part of its deviation. Others are known at u itself, so that
        # only the seminorm of the identity, gain(u, u), multiplies them.
        carried = self.carried(u if read is None else read)
        total = self.zero if carried is None else carried * self.gain(u, u, seminorm)
        for v, norm in self.remainders.items():
            gain, rounding = self.gain(v, u, seminorm), self.at.deployed.of(v)
            total = total + torch.minimum(at_most(gain * norm), self.by_columns(v, u, seminorm))
            total = total if rounding is None else total + gain * rounding
        return total

    def carried(self, u: Node) -> Tensor | None:
        """The rounding errors of the linear operations before u in this stage, at u, shape (N,); None for 0."""
        return None if u is self.stage.start or u in self.at.remainders else self.at.deployed.of(u)

    def by_columns(self, v: Node, u: Node, seminorm: Seminorm) -> Tensor:
        """Σ w_i |R_i| with the norms w of the columns of M G(v → u), shape (N,); ∞ where these are not known.

        It bounds ‖M G R‖ = ‖Σ_i (column i) R_i‖ for the remainder R of v. For M = 1 it bounds every entry and block of
        G R, too.
        """
        kind, of, number = seminorm
        if kind is SeminormKind.CURVATURE:
            assert of is not None
            weights = self.curvature[of][number].columns.get(v)
            return self.unknown if weights is None else self._total(v, weights, None)
        known = self.at.norms.pairs.get((v, u))
        if kind is SeminormKind.COLUMNS or known is None or known.columns is None:
            return self.unknown
        if (v, u) not in self.summed:
            weights = known.columns.expand(len(self.unknown), -1)
            ahead = self.at.plan.ahead.get(v) is u  # the weights of ``sizes`` are those up to there
            self.summed[v, u] = self._total(v, weights, self.sizes[v] if ahead else None)
        return self.summed[v, u]

    def _total(self, v: Node, weights: Tensor, size: Tensor | None) -> Tensor:
        return at_most(self.at.remainders[v].total(weights, self.rho[v], size))

    def moved(self, operand: Node, seminorm: Seminorm) -> Tensor:
        """The deviation of the operand of an operation, rounding errors included."""
        u = self.at.network.root(operand)
        noise = self.at.norms.rounded.noise[operand] * self.gain(u, u, seminorm)
        return at_most(self.linear(u, seminorm) + self.errors(u, seminorm, operand) + noise)

    def visit(self, operands: dict[Node, list[Tensor]], form_norms: dict[Node, list[Tensor]]) -> None:
        """Visits the operations in order, and stores the ρ of their operands and the bounds on forms."""
        for v in self.stage.nonlinear:
            rho = operands[v] = self.rho[v] = self.reach(v)
            if v in self.curvature:  # before the remainder of v itself is among the errors
                form_norms[v] = [
                    self.moved(sizes.operand, Seminorm(SeminormKind.CURVATURE, v, number))
                    for number, sizes in enumerate(self.curvature[v])
                ]
            if v in self.at.plan.ahead:
                self.sizes[v] = self.moved(v.operands[0], Seminorm(SeminormKind.COLUMNS, v))
            self.remainders[v] = at_most(self.at.remainders[v].norm(rho))

    def reach(self, v: Node) -> list[Tensor]:
        """The ρ of the operands of a nonlinear operation, followed by the bounds on blocks for its rule.

        Entry i of u deviates by at most Σ_a ‖row i of G(a → u)‖ · (error at a). So the same sums with the largest row
        norm of each Jacobian bound single entries. Blocks of rows bound blocks of entries in the same way.
        """
        plan = self.at.plan
        rho = [self.moved(operand, NORM) for operand in v.operands]
        if plan.blockwise(v):
            rho.append(torch.minimum(rho[0], self.moved(v.operands[0], LARGEST)))
        if v in plan.each:
            rho[-1] = self.each(v.operands[0], rho[-1])
        return rho

    def each(self, z: Node, most: Tensor) -> Tensor:
        """Bounds on the deviations of all entries of an operand, (N, entries); ``most`` bounds any of them, (N,)."""
        at, start, source = self.at, self.stage.start, self.at.network.source
        u, pairs = at.network.root(z), at.norms.pairs

        def known(a: Node) -> Tensor | None:
            return pairs[a, u].rows.get(z) if (a, u) in pairs else None

        def rows(a: Node) -> Tensor:
            found = known(a)
            return torch.as_tensor(self.gain(a, u, LARGEST)).to(most).reshape(-1, 1) if found is None else found

        if known(start) is None and known(source) is None:
            return most
        bounds = at_most(rows(start) * self.at_start[:, None])
        if self.source is not None:
            reach, arrived = self.source
            bounds = torch.minimum(bounds, at_most(reach.each(z, rows(source)) + rows(start) * arrived[:, None]))
        for w, norm in self.remainders.items():
            by_norm, rounding = at_most(rows(w) * norm[:, None]), at.deployed.of(w)
            bounds = bounds + torch.minimum(by_norm, self.by_columns(w, u, LARGEST)[:, None])
            bounds = bounds if rounding is None else bounds + rows(w) * rounding[:, None]
        noise, carried = at.norms.rounded.noise[z], self.carried(z)
        noise = noise if carried is None else noise + carried
        return torch.minimum(at_most(bounds + noise[:, None]), most[:, None])
