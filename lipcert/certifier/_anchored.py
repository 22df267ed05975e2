"""The anchored certificate: one linearisation of the whole network at the image, and what every nonlinearity adds to
it.

Let the operations v of the network be linearised at the image x. For a perturbation δ, operation v leaves its
linearisation by a remainder R_v, and everything behind it sees that as an error put in at its output. With G(a → b) the
Jacobian at x of the value b with respect to the value a, for every δ exactly

    value u deviates by       G(x → u) δ + Σ_v G(v → u) R_v,
    margin m_j changes by     ⟨∇_x m_j, δ⟩ + Σ_v ⟨∇_v m_j, R_v⟩,

by induction over the operations in their order: each is its linear part plus R_v, and G composes linear parts.
Therefore, if ‖δ‖ ≤ ε, with r_v ≥ ‖R_v‖ and d_v ≥ |⟨∇_v m_j, R_v⟩| from the remainder rules (lipcert.bounds._remainder),

    ρ_u = ‖G(x → u)‖ ε + Σ_v ‖G(v → u)‖ r_v(ρ),
    m_j(x + δ) ≥ m_j − ‖∇_x m_j‖ ε − Σ_v d_v(ρ),

evaluated in the order of the network, so that every ρ is known before it is used. No norm is multiplied along the depth
for the first-order part: as ε → 0 the radius tends to min_j m_j/‖∇_x m_j‖.

Stages keep the number of norms small. If c is a value through which everything later depends on the image (a cut), then
G(v → u) = G(c → u) G(v → c) for v before and u behind it, and the remainders before c are added up at c.

Nothing here needs the Jacobians: any linear map may stand for that of an operation, R_v being what it leaves out. At
kinks, slopes between those on the two sides leave less (:mod:`lipcert.bounds.remainders.secants`). How far they should
lie apart follows from the radius that the Jacobians give; the larger of the two radii counts, each with half of δ.

The norms of G are probabilistic Lanczos bounds (lipcert.norms._lanczos) that share the failure probability δ of an
image. Sums and products here are of non-negative float64 numbers; gradients and margins are reduced by a relative 1e-6
for the rounding of the nominal forward and backward pass in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._remainder import Against, per_image
from lipcert.certifier._linearized import SAFETY, Deviations, Gain, Linearization, Linearized, Progress, at_most, search
from lipcert.certifier._lofast import Layers
from lipcert.certifier._secants import with_secants
from lipcert.graph import Node
from lipcert.graph._graph import run
from lipcert.model import Model

# Radii come out larger with secants, whose widths are therefore so much more than values move within the one without.
_WIDENED = 1.5


class Anchored(Linearized):
    """The anchored certificate of one model; arguments as for :class:`~lipcert.certifier._linearized.Linearized`.

    Attributes:
        secant: the same with secants at kinks (lipcert.bounds.remainders.secants); None where the network has none.
            Half of ``delta`` belongs to it.
        kinks: the operations with another derivative in ``secant``, and the nodes for the widths there.
    """

    takes_secants = True

    def __init__(self, model: Model, *, delta: float = 1e-9, **arguments: Any):
        super().__init__(model, delta=delta, **arguments)
        self.secant: Anchored | None = None
        self.kinks: dict[Node, Node] = {}
        if self.takes_secants and not self.widths:
            graph, self.kinks = with_secants(self.graph)
        if self.kinks:
            self.delta /= 2
            # Widths follow from the norms here, so the norms there need start vectors that none here has taken.
            arguments |= {"seed": self.seed + 2 * len(self.pairs), "graph": graph, "widths": tuple(self.kinks.values())}
            self.secant = Anchored(model, delta=delta / 2, **arguments)

    @property
    def count(self) -> int:
        return super().count + (self.secant.count if self.secant is not None else 0)

    def _wanted(self) -> Iterator[tuple[Node, Node]]:
        for index, stage in enumerate(self.stages):
            yield self.source, stage.start
            for position, v in enumerate(stage.nonlinear):
                for u in self.operands(v):
                    yield self.source, u
                    yield stage.start, u
                later = [u for w in stage.nonlinear[position + 1 :] for u in self.operands(w)]
                for u in (*later, stage.end):
                    yield v, u
            yield self.source, stage.end
            yield stage.start, stage.end
            for later_stage in self.stages[index + 1 :]:
                yield stage.end, later_stage.start
        last = self.stages[-1]
        for output in self.outputs:
            for a in (self.source, last.start, *last.nonlinear):
                yield a, output

    def __call__(self, images: Tensor, progress: Progress | None = None) -> Anchor:
        """Linearises the network at images, shape (N, C, H, W), and takes the norms; the rest is arithmetic in ε."""
        return Anchor(self, *self.linearize(images, progress))


class Anchor(Linearization):
    """The network linearised at N images: bounds for any ε."""

    method: Anchored

    def layers(self) -> Layers:
        """The layer-by-layer bounds from the same norms, never tighter than these."""
        return Layers(self.method, self.images, self.values, self.norms, self.remainders)

    def deviations(self, eps: Tensor) -> Deviations:
        """How far values can move for perturbations of norm at most eps, shape (N,).

        Each stage starts from the smaller of two: what the linear way from the source and the remainders before it add
        up to there, and what the stage before it passes on, ‖J_k‖ ρ_k + r_k. The second is the bound of
        :mod:`lipcert.certifier._lofast`, and all rules increase with ρ: so no ρ here is above the one there.
        """
        source, stages = self.method.source, self.method.stages
        at_cuts: dict[Node, Tensor] = {}  # remainders before a cut, added up there
        operands: dict[Node, list[Tensor]] = {}
        passed_on = eps * self.gain(source, stages[0].start)
        for stage in stages:
            zero = torch.zeros_like(eps)
            arrived = at_most(sum((self.gain(cut, stage.start) * error for cut, error in at_cuts.items()), zero))
            at_start = torch.minimum(self.gain(source, stage.start) * eps + arrived, passed_on)
            linear = partial(self._linear, stage.start, eps, arrived, at_start)
            errors = self.inside(stage, linear, operands)
            at_cuts[stage.end] = at_most(errors(stage.end))
            passed_on = at_most(linear(stage.end, self.gain) + at_cuts[stage.end])
        features = (
            at_most(linear(self.method.head[0], self.gain) + errors(self.method.head[0])) if self.method.head else None
        )
        return Deviations(operands, passed_on, features)

    def _linear(self, start: Node, eps: Tensor, arrived: Tensor, at_start: Tensor, u: Node, gain: Gain) -> Tensor:
        """Deviation of u behind ``start``, to first order in what is inside the stage."""
        from_start = gain(start, u)
        from_source = at_most(gain(self.method.source, u) * eps + from_start * arrived)
        return torch.minimum(from_source, at_most(from_start * at_start))

    def gradients(self, rivals: Tensor, predicted: Tensor) -> tuple[Tensor, dict[Node, Tensor]]:
        """∇m at the source, shape (N, entries), and at the result of every nonlinear operation, for the margins f_y −
        f_j.

        Args:
            rivals: the classes j, shape (N,).
            predicted: the classes y, shape (N,).
        """
        graph, source, nodes = self.method.graph, self.method.source, list(self.remainders)
        widths = self.method.widths

        def one(image: Tensor, start: Tensor, *rest: Tensor) -> Tensor:
            known: dict[Node, Tensor] = {graph.input: image, source: start, **dict(zip(widths, rest, strict=False))}
            extra = dict(zip(nodes, rest[len(widths) :], strict=True))
            for node in graph.nodes:
                run((node,), known)
                if node in extra:
                    known[node] = known[node] + extra[node]
            return known[graph.output]

        start = self.values[source].detach().requires_grad_()
        added = [torch.zeros_like(self.values[node], requires_grad=True) for node in nodes]
        with torch.enable_grad():
            given = [self.values[node] for node in widths]
            logits = torch.vmap(one)(self.images, start, *given, *added).reshape(len(start), -1)
            margin = logits.gather(1, predicted[:, None]) - logits.gather(1, rivals[:, None])
            found = torch.autograd.grad(margin.sum(), [start, *added])
        return per_image(found[0]), dict(zip(nodes, found[1:], strict=True))

    def radius(self, predicted: Tensor, gaps: Tensor, limit: int | None = None) -> Tensor:
        """Certified radii, float64, shape (N,), rounded down, to 1 % or better.

        Rival classes are taken in the order of what the deviation of the logits allows them, and left out once that
        alone clears them: it costs no backward pass.

        Args:
            predicted: classes y, shape (N,).
            gaps: f_y − f_j, +inf at j = y, shape (N, classes).
            limit: how many rivals to look at in their own direction at most; the others are held to the cheap bound.
        """
        best = self._radius(predicted, gaps, limit)
        secant = self.method.secant
        if secant is None:
            return best
        moved = self.deviations(best).operands
        still = [torch.zeros_like(best)]  # in front of what is perturbed
        widths = {leaf: _WIDENED * moved.get(v, still)[-1][:, None] for v, leaf in self.method.kinks.items()}
        other = Anchor(secant, *secant.linearize(self.images[:, 0], widths=widths))
        return torch.maximum(best, other._radius(predicted, gaps, limit))

    def _radius(self, predicted: Tensor, gaps: Tensor, limit: int | None) -> Tensor:
        cheap = self._cheap(predicted, gaps)
        order = cheap.argsort(1)
        best = torch.full_like(cheap[:, 0], math.inf)
        for rank in range(cheap.shape[1]):
            rivals = order[:, rank]
            floor = cheap.gather(1, rivals[:, None])[:, 0]
            if rank == limit:
                return torch.minimum(best, floor) * (1 - SAFETY)
            if bool((floor >= best).all()):
                break
            exact = self._toward(rivals, predicted, gaps.gather(1, rivals[:, None])[:, 0])
            best = torch.minimum(best, torch.maximum(exact, floor))
        return torch.where(torch.isfinite(best), best, 0.0) * (1 - SAFETY)

    def _cheap(self, predicted: Tensor, gaps: Tensor) -> Tensor:
        """Radii from how far the logits and the features move at all, shape (N, classes)."""
        spreads = self.spreads(predicted)
        slope = torch.as_tensor(self.gain(self.method.source, self.method.graph.output), dtype=torch.float64)
        allowed = []
        for j, gap in enumerate(gaps.unbind(1)):
            guess = torch.where(torch.isfinite(gap), gap, 0.0).clamp_min(0) / slope
            row = None if spreads is None else spreads[:, j : j + 1]
            radius = search(partial(self._left, gap, row), guess)
            allowed.append(torch.where(torch.isfinite(gap), radius, math.inf))
        return torch.stack(allowed, 1)

    def _left(self, gap: Tensor, spreads: Tensor | None, eps: Tensor) -> Tensor:
        return gap - self.moved(self.deviations(eps), spreads)[:, 0]

    def _toward(self, rivals: Tensor, predicted: Tensor, gap: Tensor) -> Tensor:
        """Radius against one rival class for each image, by its own gradients."""
        left, slope = self._within(rivals, predicted, gap)
        return search(left, gap / slope)

    def _within(self, rivals: Tensor, predicted: Tensor, gap: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """ε ↦ what is left of the margin over one rival class within ε at least; and ‖∇m‖, shape (N,)."""
        at_pixels, at_nodes = self.gradients(rivals, predicted)
        slope = (at_pixels.norm(dim=1) * (1 + SAFETY)).clamp_min(1e-140)  # smaller squares may underflow
        against: dict[Node, Against] = {v: self.remainders[v].against(g) for v, g in at_nodes.items()}

        def left(eps: Tensor) -> Tensor:
            found = self.deviations(eps).operands
            return gap - slope * eps - sum(against[v](rho) for v, rho in found.items()) * (1 + SAFETY)

        return left, slope

    def least_margin(self, eps: Tensor, predicted: Tensor, gaps: Tensor) -> Tensor:
        """Lower bounds on the smallest f_y − f_j within eps, each of shape (N,); gaps as for :meth:`radius`."""
        left = []
        for rivals in gaps.argsort(1)[:, :-1].unbind(1):
            left.append(self._within(rivals, predicted, gaps.gather(1, rivals[:, None])[:, 0])[0](eps))
        return torch.stack(left).amin(0)

    def first_order_limit(self, predicted: Tensor, gaps: Tensor) -> Tensor:
        """min_j m_j/‖∇_x m_j‖, shape (N,): what the radius tends to for small ε. An estimate, not a certificate."""
        ratios = []
        for rank in range(gaps.shape[1] - 1):
            rivals = gaps.argsort(1)[:, rank]
            gradient, _ = self.gradients(rivals, predicted)
            ratios.append(gaps.gather(1, rivals[:, None])[:, 0] / gradient.norm(dim=1))
        return torch.stack(ratios, 1).amin(1)
