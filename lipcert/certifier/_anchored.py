"""The anchored certificate: one linearisation of the network at the image, and what nonlinearities add to it.

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

The errors Σ_v ‖G(v → u)‖ r_v feed on themselves: they are part of the ρ that the next remainders grow with, and so they
set how far a radius can reach. Where the way from a smooth activation v to u is linear, its remainder moves u by
‖Σ_i (column i of G(v → u)) R_i‖ ≤ Σ_i w_i |R_i| with w_i the norms of the columns, and with |R_i| ≤ ½ c δ_i² that is at
most ½ c ‖√w ∘ δ‖², by the same sums as below for ‖s ∘ δ‖ with s = √w. Both are far below ‖G(v → u)‖ · ½ c max|δ_i| ‖δ‖,
as few columns are near the norm of a trained matrix. Columns belong to the network, and are taken once.

Curvature is where most of a margin goes. Where a rule knows weights w with −⟨∇_v m_j, R_v⟩ ≤ Σ_i w_i δ_i² for the
deviation δ of v's operand u (smooth entrywise functions), d_v = ‖s ∘ δ‖² with s = √w, and

    ‖s ∘ δ‖ ≤ ‖diag(s) G(x → u)‖ ε + Σ_v ‖diag(s) G(v → u)‖ r_v(ρ),

which is several times less than max w · ρ_u², for the weights of few entries are large and most rows of G are not seen
by them. It takes norms for one rival class j, so it is done for the classes that allow the least, one after the other.
Weights that hold up to some ε give a radius up to there.

Nothing here needs the Jacobians: any linear map may stand for that of an operation, R_v being what it leaves out. At
kinks, slopes between those on the two sides leave less (:mod:`lipcert.bounds._secants`). How far they should
lie apart follows from the radius that the Jacobians give; the larger of the two radii counts, each with half of δ.

The norms of G are probabilistic Lanczos bounds (lipcert.norms._lanczos) that share the failure probability δ of an
image (lipcert.norms._ledger). Sums and products here are of non-negative float64 numbers, for which the certificate is
reduced by a relative 1e-6. Rounding of nominal values, of gradients and of products with Jacobians has terms of its
own, as cancellation makes it as large as what is computed: :mod:`lipcert.certifier._rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipcert._numerics import SAFETY, at_most
from lipcert.bounds import Against, per_image, quadratic
from lipcert.certifier._linearized import (
    NOT_WEIGHED,
    Deviations,
    Gain,
    Linearization,
    Linearized,
    Progress,
    Weighed,
    search,
    search_each,
)
from lipcert.certifier._lofast import Layers
from lipcert.certifier._secants import with_secants
from lipcert.graph import Node, run
from lipcert.model import Model
from lipcert.norms import Ledger

# For how many rival classes curvature is weighed, how far beyond the radius without it, and from which share of the
# margin on.
ROUNDS = 4
_FURTHER = 2.0
_WORTH = 0.01
# Entries of the values that rival classes looked at together have for themselves, 256 MiB.
_ENTRIES = 2**25
# Radii come out larger with secants, whose widths are therefore so much more than values move within the one without.
_WIDENED = 1.5


class Anchored(Linearized):
    """The anchored certificate of one model; arguments as for :class:`~lipcert.certifier._linearized.Linearized`.

    Attributes:
        secant: the same with secants at kinks (lipcert.bounds._secants); None where the network has none.
            Half of ``delta`` belongs to it.
        kinks: the operations with another derivative in ``secant``, and the nodes for the widths there.
        weighable: how many norms with weights one rival class can take.
    """

    takes_secants = True
    weighings = 1  # how often a radius weighs curvature

    def __init__(self, model: Model, *, delta: float = 1e-9, **arguments: Any):
        super().__init__(model, delta=delta, **arguments)
        self.weighable = sum(2 + place for stage in self.stages for place in range(len(stage.nonlinear)))
        self.spare = self.weighings * ROUNDS * self.weighable
        self.secant: Anchored | None = None
        self.kinks: dict[Node, Node] = {}
        if self.takes_secants and not self.widths:
            graph, self.kinks = with_secants(self.graph)
        if self.kinks:
            self.delta /= 2
            arguments |= {"graph": graph, "widths": tuple(self.kinks.values())}
            self.secant = Anchored(model, delta=delta / 2, **arguments)

    @property
    def count(self) -> int:
        return super().count + (self.secant.count if self.secant is not None else 0)

    @property
    def work(self) -> float:
        bent = {self.operands(v)[0] for v, rule in self.rules.items() if hasattr(rule, "quadratic")}
        weighed = self.weighings * self.rounds * sum(self._work(a, b) for a, b in self.pairs if b in bent)
        return super().work + weighed + (self.secant.work if self.secant is not None else 0)

    @property
    def rounds(self) -> int:
        """For how many rival classes curvature is weighed: one where passes are counted, as it takes as many again."""
        return ROUNDS if self.chains is None else 1

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

    def __call__(self, images: Tensor, progress: Progress | None = None, ledger: Ledger | None = None) -> Anchor:
        """Linearises the network at images, shape (N, C, H, W), and takes the norms; the rest is arithmetic in ε."""
        return Anchor(self, *self.linearize(images, progress, ledger=ledger))


class Anchor(Linearization):
    """The network linearised at N images: bounds for any ε."""

    method: Anchored
    weighing = 0  # number of the radius that curvature is weighed for

    def layers(self) -> Layers:
        """The layer-by-layer bounds from the same norms, never tighter than these."""
        return Layers(self.method, self.images, self.values, self.norms, self.remainders)

    def deviations(self, eps: Tensor, gains: Weighed = NOT_WEIGHED) -> Deviations:
        """How far values can move for perturbations of norm at most eps, shape (N,).

        Each stage starts from the smaller of two: what the linear way from the source and the remainders before it add
        up to there, and what the stage before it passes on, ‖J_k‖ ρ_k + r_k. The second is the bound of
        :mod:`lipcert.certifier._lofast`, and all rules increase with ρ: so no ρ here is above the one there.
        """
        source, stages = self.method.source, self.method.stages
        at_cuts: dict[Node, Tensor] = {}  # remainders before a cut, added up there
        operands: dict[Node, list[Tensor]] = {}
        weighed: dict[Node, Tensor] = {}
        passed_on = eps * self.gain(source, stages[0].start)
        for stage in stages:
            zero = torch.zeros_like(eps)
            arrived = at_most(sum((self.gain(cut, stage.start) * error for cut, error in at_cuts.items()), zero))
            at_start = torch.minimum(self.gain(source, stage.start) * eps + arrived, passed_on)
            linear = partial(self._linear, stage.start, eps, arrived, at_start)
            errors, sizes = self.inside(stage, linear, operands, gains)
            weighed |= sizes
            at_cuts[stage.end] = at_most(errors(stage.end))
            passed_on = at_most(linear(stage.end, self.gain) + at_cuts[stage.end])
        features = (
            at_most(linear(self.method.head[0], self.gain) + errors(self.method.head[0])) if self.method.head else None
        )
        return Deviations(operands, passed_on, features, weighed)

    def _linear(self, start: Node, eps: Tensor, arrived: Tensor, at_start: Tensor, u: Node, gain: Gain) -> Tensor:
        """Deviation of u behind ``start``, to first order in what is inside the stage."""
        from_start = gain(start, u)
        from_source = at_most(gain(self.method.source, u) * eps + from_start * arrived)
        return torch.minimum(from_source, at_most(from_start * at_start))

    def gradients(self, rivals: Tensor, predicted: Tensor) -> tuple[Tensor, dict[Node, Tensor]]:
        """∇m at the source, shape (N, entries), and at the results of all operations behind it, for margins f_y − f_j.

        Args:
            rivals: the classes j, shape (N,).
            predicted: the classes y, shape (N,).
        """
        graph, source, nodes = self.method.graph, self.method.source, list(self.method.local.chains.links)
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

        Raises:
            LedgerError: called again, with start vectors that the first radius has used; linearise the images again.
        """
        best = self._radius(predicted, gaps, limit)
        secant = self.method.secant
        if secant is None:
            return best
        moved = self.deviations(best).operands
        still = [torch.zeros_like(best)]  # in front of what is perturbed
        # Widths follow from the norms here, so the norms there take start vectors that none here has taken.
        ledger = self.norms.ledger.part("secant")
        widths = {leaf: _WIDENED * moved.get(v, still)[-1][:, None] for v, leaf in self.method.kinks.items()}
        other = Anchor(secant, *secant.linearize(self.images[:, 0], widths=widths, ledger=ledger))
        return torch.maximum(best, other._radius(predicted, gaps, limit))

    def _radius(self, predicted: Tensor, gaps: Tensor, limit: int | None) -> Tensor:
        allowed = self._cheap(predicted, gaps)
        order = allowed.argsort(1)[:, :limit]
        best = torch.full_like(allowed[:, 0], math.inf)
        together = 1
        while order.shape[1]:
            rivals, order = order[:, :together], order[:, together:]
            floor = allowed.gather(1, rivals)
            if bool((floor[:, 0] >= _FURTHER * best).all()):
                break
            images = torch.arange(len(best), device=best.device).repeat_interleave(rivals.shape[1])
            many = self if rivals.shape[1] == 1 else self.only(images)
            toward = many._toward(rivals.flatten(), predicted[images], gaps[images])
            # What is least now does not get further than that when it is weighed.
            exact = toward.radius(_FURTHER * best[images]).reshape(rivals.shape)
            exact = torch.maximum(exact, floor)
            allowed.scatter_(1, rivals, exact)
            best = torch.minimum(best, exact.amin(1))
            together = min(2 * together, self._rivals_together)
        best = self._weigh(allowed, predicted, gaps).amin(1)
        return torch.where(torch.isfinite(best), best, 0.0) * (1 - SAFETY)

    @property
    def _rivals_together(self) -> int:
        """How many rival classes to look at at once, as if they were images."""
        return max(1, _ENTRIES // sum(value.numel() for value in self.values.values()))

    def _weigh(self, allowed: Tensor, predicted: Tensor, gaps: Tensor) -> Tensor:
        """The radii that the rival classes allow, shape (N, classes), with curvature weighed for the least of them."""
        allowed = allowed.clone()
        done = torch.zeros_like(allowed, dtype=torch.bool)
        for round in range(self.method.rounds):
            rivals = allowed.argmin(1, keepdim=True)
            least = allowed.gather(1, rivals)[:, 0]
            left = (~done.gather(1, rivals)[:, 0] & torch.isfinite(least)).nonzero()[:, 0]
            if not len(left):
                break
            one = self.only(left)._toward(rivals[left, 0], predicted[left], gaps[left])
            done[left, rivals[left, 0]] = True
            allowed[left, rivals[left, 0]] = one.weighed(least[left], round)
        return allowed

    def _cheap(self, predicted: Tensor, gaps: Tensor) -> Tensor:
        """Radii from how far the logits and the features move at all, shape (N, classes)."""
        spreads = self.spreads(predicted)
        slope = torch.as_tensor(self.gain(self.method.source, self.method.graph.output), dtype=torch.float64)
        rivals = torch.isfinite(gaps)
        least = torch.where(rivals, gaps, math.inf).amin(1, keepdim=True)
        finite = torch.where(rivals, gaps, least).clamp_min(0)

        def left(eps: Tensor) -> Tensor:
            return finite - self.moved(self.deviations(eps), spreads)

        return torch.where(rivals, search_each(left, finite / slope.reshape(-1, 1)), math.inf)

    def _toward(self, rivals: Tensor, predicted: Tensor, gaps: Tensor) -> Toward:
        """The margins over one rival class for each image."""
        return Toward(self, rivals, predicted, gaps.gather(1, rivals[:, None])[:, 0])

    def gains(self, weights: dict[Node, Tensor], round: int) -> Weighed:
        """Norms with weights √w, for operations with weights w of the shape of their operand."""
        source, method = self.method.source, self.method
        ledger = self.norms.ledger.part("weighed", self.weighing, round)
        found: dict[Node, Gain] = {}
        for stage in method.stages:
            for place, v in enumerate(stage.nonlinear):
                if v in weights:
                    scale = weights[v].sqrt()
                    (u,) = method.operands(v)
                    norms = {u: per_image(scale).amax(1)}
                    for a in (source, stage.start, *stage.nonlinear[:place]):
                        if a in norms or (a, u) in method.unconnected:
                            continue
                        if (a, u) in method.chained:
                            norms[a] = norms[u] * self.gain(a, u)
                        else:
                            part = ledger.part(method.replay.position[v])
                            norm = method.weighed_norm(a, v.operands[0], self.values, scale, part)
                            norms[a] = self.norms.raised(norm, a, u, scale)
                    found[v] = partial(_known, norms)
        return found

    def least_margin(self, eps: Tensor, predicted: Tensor, gaps: Tensor) -> Tensor:
        """Lower bounds on the smallest f_y − f_j within eps, each of shape (N,); gaps as for :meth:`radius`."""
        left = []
        for rivals in gaps.argsort(1)[:, :-1].unbind(1):
            left.append(self._toward(rivals, predicted, gaps).left(eps))
        return torch.stack(left).amin(0)


def _known(norms: dict[Node, Tensor], a: Node, u: Node) -> Tensor | float:
    return norms.get(a, 0.0)


class Toward:
    """The margins f_y − f_j over one rival class j for each image, from their own gradients.

    Args:
        anchor: the network linearised at N images.
        rivals: the classes j, shape (N,).
        predicted: the classes y, shape (N,).
        gap: f_y − f_j at the images, shape (N,).
    """

    def __init__(self, anchor: Anchor, rivals: Tensor, predicted: Tensor, gap: Tensor):
        self.anchor = anchor
        at_pixels, at_nodes = anchor.gradients(rivals, predicted)
        self.at_nodes = {v: at_nodes[v] for v in anchor.remainders}
        rounding = anchor.norms.rounded
        assert rounding is not None
        self.place = rounding.starts
        lost, self.rounding = rounding.taken(at_nodes)
        self.gap = (gap - lost * (1 + SAFETY)).clamp_min(0)
        self.slope = (at_pixels.norm(dim=1) * (1 + SAFETY)).clamp_min(1e-140)  # smaller squares may underflow
        self.against: dict[Node, Against] = {v: anchor.remainders[v].against(g) for v, g in self.at_nodes.items()}

    def left(self, eps: Tensor, gains: Weighed = NOT_WEIGHED) -> Tensor:
        """What is left of the margin within ε at least, shape (N,)."""
        found = self.anchor.deviations(eps, gains)
        taken = torch.zeros_like(eps)
        rest = self.rounding[:, 0] * eps  # what rounding hides of the gradients
        for v, rho in found.operands.items():
            bound = self.against[v](rho)
            rest = rest + self.rounding[:, self.place[v]] * at_most(self.anchor.remainders[v].norm(rho))
            taken = taken + (torch.minimum(bound, found.weighed[v].square()) if v in found.weighed else bound)
        return self.gap - self.slope * eps - at_most(taken + rest) * (1 + SAFETY)

    def radius(self, enough: Tensor | None = None) -> Tensor:
        """Radii without weights, shape (N,); ``enough`` where they are that or more, which saves the search."""
        guess = self.gap / self.slope
        known = torch.zeros_like(guess, dtype=torch.bool) if enough is None else torch.isfinite(enough)
        if enough is None or not bool(known.any()):
            return search(self.left, guess)
        known &= self.left(torch.where(known, enough, guess)) > 0
        return enough if bool(known.all()) else torch.where(known, enough, search(self.left, guess))

    def weighed(self, least: Tensor, round: int) -> Tensor:
        """Radii with curvature weighed, shape (N,).

        Args:
            least: radii that hold, shape (N,).
            round: how many rival classes were weighed before.
        """
        upto = _FURTHER * least
        moved = self.anchor.deviations(upto).operands
        weights = {}
        for v, g in self.at_nodes.items():
            found = quadratic(self.anchor.remainders[v], g, moved[v])
            # For each image by itself, so that a radius does not depend on the others.
            worth = self.against[v](moved[v]) > _WORTH * self.gap
            if found is not None and bool(worth.any()):
                weights[v] = torch.where(worth.reshape(-1, *[1] * (found.dim() - 1)), found, math.inf)
        if not weights:
            return least
        gains = self.anchor.gains(weights, round)
        return torch.maximum(search(lambda eps: torch.where(eps <= upto, self.left(eps, gains), -1.0), least), least)
