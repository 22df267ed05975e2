"""How far values move: one walk through the stages of a network that is linearised at images.

A value u of a stage moves by at most what arrives from the source or from the stage's start, to first order, and the
remainders of the operations before it in the stage, each times the norm of the Jacobian from there. All rules increase
with the deviations of their operands, so the walk goes through the operations in their order. Rounding errors of a
deployed network are a hook of the same walk (:class:`Rounding`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipcert._numerics import at_most
from lipcert.bounds import Remainder
from lipcert.certifier.anchored.network import Network, Stage
from lipcert.certifier.anchored.norms import LARGEST, NORM, NormFinder, NormProgress, Seminorm, SeminormKind
from lipcert.certifier.anchored.plan import NormPlan
from lipcert.graph import Node
from lipcert.norms import Ledger

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class FormNorms:
    """Norms with a linear map M of one operand u of an operation.

    Attributes:
        operand: u.
        norms: upper bounds on ‖M G(a → u)‖ by a, each of shape (N,); 0 for any other a.
    """

    operand: Node
    norms: Mapping[Node, Tensor]


# The forms of operations v, in their order.
Curvature = Mapping[Node, Sequence[FormNorms]]

NO_CURVATURE: Curvature = MappingProxyType({})
# Of how far a value moves, what rounding may hide of how far its tokens move along themselves.
_ALONG = 1e-12


class Rounding:
    """What rounding errors add to a walk: nothing, in real arithmetic. :mod:`.deployed` adds those of a format."""

    def nodes(self, stage: Stage) -> Sequence[Node]:
        """The operations of a stage that the walk visits."""
        return stage.nonlinear

    def before(self, stage: Stage) -> Tensor | None:
        """The errors of the linear operations in front of the first stage, where it starts, shape (N,)."""
        return None

    def enter(self, stage: Stage, moved: Tensor) -> None:
        """Is told how far the start of a stage deviates, before its operations are visited."""

    def carried(self, u: Node) -> Tensor | None:
        """The errors that a value carries along the linear way to it, shape (N,)."""
        return None

    def put(self, v: Node) -> Tensor | None:
        """The errors that arise at the output of a nonlinear operation, shape (N,)."""
        return None

    def linear(self, node: Node) -> None:
        """Is told of a linear operation, if :meth:`nodes` has any."""

    def nonlinear(self, node: Node, rho: Sequence[Tensor]) -> None:
        """Is told of a nonlinear operation: how far its operands deviate, and what else :class:`Deviations` says."""

    def of_head(self) -> Tensor | None:
        """What a linear head rounds itself, for a margin, shape (N, 1)."""
        return None

    def lost(self, rivals: Tensor, predicted: Tensor) -> Tensor | None:
        """What rounding takes of the margins f_y − f_j to first order, shape (N,)."""
        return None

    def only(self, index: Tensor, at: Linearization) -> Rounding:
        """The same for some of the images, given by their numbers, and the linearisation at these."""
        return self


@dataclass(frozen=True)
class StageDeviation:
    """What a stage makes of a deviation: at its start, remainders at its end, and in all at its end, shape (N,)."""

    stage: Stage
    start: Tensor
    remainder: Tensor
    end: Tensor


@dataclass(frozen=True)
class Deviations:
    """How far values can move.

    Attributes:
        operands: ρ for the operands of every nonlinear operation, each of shape (N,); where a rule asks for single
            entries or blocks of them, the bound on these comes after it, and where it asks for tokens along
            themselves, the bound on all together and that on one of them.
        logits: ρ for the logits, shape (N,).
        features: ρ for the features that a linear head makes the logits of, shape (N,); None without such a head.
        weighed: for operations with forms M, bounds on each ‖Mδ‖ for the deviation δ of its operand, shape (N,).
        stages: the same for every stage.
    """

    operands: dict[Node, list[Tensor]]
    logits: Tensor
    features: Tensor | None
    weighed: dict[Node, list[Tensor]] = field(default_factory=dict)
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
        rounding: what rounding errors add.
        weighing: number of the radius that curvature is weighed for.

    Args:
        finder: the network, and its norms.
        images: pixels in [0, 1], shape (N, C, H, W).
        progress: called with (norms taken, norms in all).
        widths: of the secants, each of shape (N, 1); 0 by default.
        ledger: of the images, a new one by default.
    """

    def __init__(
        self,
        finder: NormFinder,
        images: Tensor,
        progress: NormProgress | None = None,
        widths: Mapping[Node, Tensor] | None = None,
        ledger: Ledger | None = None,
    ):
        self.finder = finder
        ledger = finder.ledger(len(images)) if ledger is None else ledger
        model = self.network.model
        self.images = images.to(model.device, model.dtype)[:, None]
        with torch.no_grad():
            self.values = self.network.values(self.images, widths)
        self.norms = finder(self.values, ledger, progress)
        self.remainders: dict[Node, Remainder] = self.network.remainders(self.values)
        self.logits = self.values[self.network.graph.output].reshape(len(images), -1)
        self.rounding = Rounding()
        self.weighing = 0

    @property
    def network(self) -> Network:
        return self.finder.network

    @property
    def plan(self) -> NormPlan:
        return self.finder.plan

    def only(self, index: Tensor) -> Self:
        """The same for some of the images, given by their numbers."""
        part = copy.copy(self)
        part.images, part.logits = self.images[index], self.logits[index]
        part.values = {node: value[index] for node, value in self.values.items()}
        part.norms = self.norms.only(index)
        part.remainders = self.network.remainders(part.values)
        part.rounding = self.rounding.only(index, part)
        return part

    def gain(self, a: Node, u: Node, seminorm: Seminorm = NORM) -> Tensor | float:
        """‖M G(a → u)‖ from above, for the M of a seminorm; 0 where u does not depend on a."""
        kind, v, _ = seminorm
        if a is u:
            if kind is not SeminormKind.COLUMNS:
                return 1.0
            assert v is not None
            return self.norms.columns[v, self.plan.ahead[v]].amax().sqrt()
        if (a, u) in self.plan.unconnected:
            return 0.0
        if kind is SeminormKind.LARGEST and (a, u) in self.norms.peaks:
            return self.norms.peaks[a, u]
        if v is None:
            return self.norms.gains[a, u]
        if kind is SeminormKind.COLUMNS:
            return self.norms.weighted[a, v]
        return self.norms.along[a, v][:, (SeminormKind.ALONG, SeminormKind.TOKEN).index(kind)]

    def walk(self, eps: Tensor, curvature: Curvature = NO_CURVATURE, *, layerwise: bool = False) -> Deviations:
        """How far values can move for perturbations of norm at most eps, shape (N,).

        Each stage starts from the smaller of two: what the linear way from the source and the remainders before it add
        up to there, and what the stage before it passes on, ‖J_k‖ ρ_k + r_k. The second is the bound of
        :mod:`lipcert.certifier._lofast`, and all rules increase with ρ: so no ρ here is above the one there.

        Args:
            eps: ε, shape (N,).
            curvature: norms with the forms M of operations for which ‖Mδ‖ is asked.
            layerwise: start each stage from what the stage before it passes on alone.
        """
        network, zero = self.network, torch.zeros_like(eps)
        before = self.rounding.before(network.stages[0])
        at_cuts: dict[Node, Tensor] = {}  # remainders before a cut, added up there
        found: list[StageDeviation] = []
        operands: dict[Node, list[Tensor]] = {}
        weighed: dict[Node, list[Tensor]] = {}
        passed_on = eps * self.gain(network.source, network.stages[0].start)
        passed_on = passed_on if before is None else passed_on + before
        for stage in network.stages:
            if layerwise:
                walk = _StageWalk(self, stage, passed_on, None, curvature)
            else:
                sums = (self.gain(cut, stage.start) * error for cut, error in at_cuts.items())
                arrived = at_most(sum(sums, zero)) if before is None or found else before
                at_start = torch.minimum(self.gain(network.source, stage.start) * eps + arrived, passed_on)
                walk = _StageWalk(self, stage, at_start, (eps, arrived), curvature)
            self.rounding.enter(stage, walk.at_start)
            walk.visit(operands, weighed)
            remainder = at_cuts[stage.end] = at_most(walk.errors(stage.end, NORM))
            passed_on = at_most(walk.linear(stage.end, NORM) + remainder)
            if before is not None and not found:
                at_cuts[stage.end] = at_most(remainder + self.gain(stage.start, stage.end) * before)
            found.append(StageDeviation(stage, walk.at_start, remainder, passed_on))
        head = network.head
        features = None if head is None else at_most(walk.linear(head[0], NORM) + walk.errors(head[0], NORM))
        return Deviations(operands, passed_on, features, weighed, found)


class _StageWalk:
    """The part of a walk inside one stage.

    Args:
        at: the linearisation.
        stage: the stage.
        at_start: how far its start deviates, shape (N,).
        source: how far the source deviates, and the remainders before the stage, where it starts; None to leave out
            what this says.
        curvature: as for :meth:`Linearization.walk`.
    """

    def __init__(
        self,
        at: Linearization,
        stage: Stage,
        at_start: Tensor,
        source: tuple[Tensor, Tensor] | None,
        curvature: Curvature,
    ):
        self.at, self.stage, self.at_start, self.source, self.curvature = at, stage, at_start, source, curvature
        self.zero = torch.zeros_like(at_start)
        self.effects: list[tuple[Node, Callable[[Node, Seminorm], Tensor]]] = []

    def gain(self, a: Node, u: Node, seminorm: Seminorm) -> Tensor | float:
        """:meth:`Linearization.gain`, with the norms for the weights of curvature."""
        if seminorm.kind is SeminormKind.CURVATURE:
            assert seminorm.of is not None
            return self.curvature[seminorm.of][seminorm.form].norms.get(a, 0.0)
        return self.at.gain(a, u, seminorm)

    def linear(self, u: Node, seminorm: Seminorm) -> Tensor:
        """Deviation of a value, to first order in what is inside the stage."""
        from_start = self.gain(self.stage.start, u, seminorm)
        if self.source is None:
            return from_start * self.at_start
        eps, arrived = self.source
        from_source = at_most(self.gain(self.at.network.source, u, seminorm) * eps + from_start * arrived)
        return torch.minimum(from_source, at_most(from_start * self.at_start))

    def errors(self, u: Node, seminorm: Seminorm) -> Tensor:
        """How far the remainders that arise inside the stage so far, and rounding errors, move a value."""
        # Errors up to the stage's start are among those that arrived there.
        own = None if u is self.stage.start else self.at.rounding.carried(u)
        found = self.zero if own is None else own * self.gain(u, u, seminorm)
        for v, effect in self.effects:
            put = self.at.rounding.put(v)
            error = effect(u, seminorm)
            found = found + (error if put is None else error + self.gain(v, u, seminorm) * put)
        return found

    def moved(self, u: Node, seminorm: Seminorm) -> Tensor:
        """Deviation of a value, with how much rounding in float64 has moved the nominal one: :mod:`.rounding`."""
        noise = self.at.norms.rounded.noise[u] * self.gain(u, u, seminorm)
        return at_most(self.linear(u, seminorm) + self.errors(u, seminorm) + noise)

    def visit(self, operands: dict[Node, list[Tensor]], weighed: dict[Node, list[Tensor]]) -> None:
        """Goes through the operations, and adds the ρ of their operands, and what is asked with forms."""
        for v in self.at.rounding.nodes(self.stage):
            if v not in self.at.remainders:
                self.at.rounding.linear(v)
                continue
            rho = operands[v] = self.reach(v)
            if v in self.curvature:
                weighed[v] = [
                    self.moved(known.operand, Seminorm(SeminormKind.CURVATURE, v, number))
                    for number, known in enumerate(self.curvature[v])
                ]
            self.at.rounding.nonlinear(v, rho)
            self.effects.append((v, self.effect(v, rho)))

    def reach(self, v: Node) -> list[Tensor]:
        """ρ for the operands of a nonlinear operation, and after it what its rule asks for beside.

        The same sums with the largest row of each Jacobian in place of its norm bound single entries: entry i of u
        deviates by at most Σ ‖row i of G(a → u)‖ · (what arises at a). So it is with blocks of rows and of entries, and
        with the rows of D G(a → u) for what tokens move along themselves.
        """
        operands, plan = self.at.network.operands(v), self.at.plan
        rho = [self.moved(u, NORM) for u in operands]
        if plan.blockwise(v):
            rho.append(torch.minimum(rho[0], self.moved(operands[0], LARGEST)))
        if v in plan.tokens:
            for kind in (SeminormKind.ALONG, SeminormKind.TOKEN):
                along = self.moved(operands[0], Seminorm(kind, v))
                rho.append(torch.minimum(rho[-1], along + _ALONG * rho[0]))
        return rho

    def effect(self, v: Node, rho: list[Tensor]) -> Callable[[Node, Seminorm], Tensor]:
        """How much the remainder of v moves values after it, each of shape (N,).

        That is ‖G‖ ‖R‖ for G = G(v → u), or Σ w_i |R_i| where the norms w of G's columns are known and that is smaller;
        a single entry, or a block, moves no more than all together.

        Args:
            v: the operation.
            rho: how far its operands deviate.
        """
        at, rule, columns = self.at, self.at.remainders[v], self.at.norms.columns
        norm = at_most(rule.norm(rho))
        unknown = torch.full_like(norm, math.inf)
        ahead = at.plan.ahead.get(v)
        known = (v, ahead) in columns
        size = self.moved(at.network.operands(v)[0], Seminorm(SeminormKind.COLUMNS, v)) if known else unknown
        summed: dict[Node, Tensor] = {}

        def moves(u: Node, seminorm: Seminorm) -> Tensor:
            bound = at_most(self.gain(v, u, seminorm) * norm)
            if (v, u) not in columns or seminorm.kind not in (SeminormKind.NORM, SeminormKind.LARGEST):
                return bound
            if u not in summed:
                weights = columns[v, u].expand(len(norm), -1)
                summed[u] = at_most(rule.total(weights, rho, size if u is ahead else unknown))
            return torch.minimum(bound, summed[u])

        return moves
