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

Curvature is where most of a margin goes. Where a rule knows a linear map M of the deviation δ of v's operand u with
−⟨∇_v m_j, R_v⟩ ≤ ‖Mδ‖² plus terms of third order (:class:`lipcert.bounds.Contracted`), or the like for products,

    ‖Mδ‖ ≤ ‖M G(x → u)‖ ε + Σ_v ‖M G(v → u)‖ r_v(ρ),

which is several times less than ‖M‖ ρ_u: M contracts the second derivative with the gradient, and few deviations that
G lets through lie in the directions that both see. For smooth entrywise functions M is diagonal and knows which entries
the gradient weighs; for projections and normalisations it is the positive part of the second derivative of ⟨∇_v m_j, ·⟩
token by token; for softmax the covariance under the actual weights; for products one factor is contracted with the
gradient. It takes norms for one rival class j, so it is done for the classes that allow the least, one after the other.
Forms that hold up to some ε give a radius up to there.

Nothing here needs the Jacobians: any linear map may stand for that of an operation, R_v being what it leaves out. At
kinks, slopes between those on the two sides leave less (:mod:`lipcert.bounds._secants`). How far they should
lie apart follows from the radius that the Jacobians give; the larger of the two radii counts, each with half of δ.

The norms of G are probabilistic Lanczos bounds (lipcert.norms._lanczos) that share the failure probability δ of an
image (lipcert.norms._ledger). Sums and products here are of non-negative float64 numbers, for which the certificate is
reduced by a relative 1e-6. Rounding of nominal values, of gradients and of products with Jacobians has terms of its
own, as cancellation makes it as large as what is computed: :mod:`lipcert.certifier.anchored.rounding`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lipcert._numerics import SAFETY
from lipcert.certifier._search import search_each
from lipcert.certifier.anchored.margin import FURTHER, RivalMargin, change, spreads
from lipcert.certifier.anchored.network import Network
from lipcert.certifier.anchored.norms import NORM, NormFinder, NormOptions, NormProgress, Norms
from lipcert.certifier.anchored.plan import NormPlan, anchored_pairs
from lipcert.certifier.anchored.secants import with_secants
from lipcert.certifier.anchored.walk import NO_CURVATURE, Curvature, Deviations, Linearization
from lipcert.model import Model
from lipcert.norms import Ledger

# For how many rival classes curvature is weighed.
ROUNDS = 4
# Entries of the values that rival classes looked at together have for themselves, 256 MiB.
_ENTRIES = 2**25
# Radii come out larger with secants, whose widths are therefore so much more than values move within the one without.
_WIDENED = 1.5


class Anchored:
    """The anchored certificate of one model.

    Attributes:
        finder: the norms of the network linearised with its Jacobians.
        secant: those of the network with secants at kinks (lipcert.bounds._secants), with half of ``delta``;
            None where the network has none.
        kinks: the operations with another derivative there, and the nodes for the widths.

    Args:
        model: the model, in float64.
        at: what is perturbed: None for the pixels, the path of a module for its output, or the index of a stage for its
            start. ε is measured there; what the network reads past that value stays as it is.
        **options: see :class:`~lipcert.certifier.anchored.NormOptions`.

    Raises:
        InputError: ``at`` names no value of the network; an unknown rigor, or one that needs Jacobians too large.
        UnsupportedOperation: names the operations after ``at`` that have no remainder rule.
    """

    def __init__(self, model: Model, *, at: str | int | None = None, **options: Any):
        given = NormOptions(**options)
        network = Network(model, at=at)
        graph, self.kinks = with_secants(network.graph)
        share = 0.5 if self.kinks else 1.0
        self.finder = _finder(network, given, share)
        self.secant: NormFinder | None = None
        if self.kinks:
            widths = tuple(self.kinks.values())
            self.secant = _finder(Network(model, at=at, graph=graph, widths=widths), given, share)

    @property
    def network(self) -> Network:
        return self.finder.network

    @property
    def plan(self) -> NormPlan:
        """The norms of the network linearised with its Jacobians."""
        return self.finder.plan

    @property
    def _finders(self) -> list[NormFinder]:
        return [self.finder] if self.secant is None else [self.finder, self.secant]

    @property
    def count(self) -> int:
        """How many norms an image takes."""
        return sum(finder.plan.count for finder in self._finders)

    @property
    def work(self) -> float:
        """Floating-point operations that the norms of an image take, roughly."""
        return sum(work_with_curvature(finder.plan) for finder in self._finders)

    def __call__(self, images: Tensor, progress: NormProgress | None = None, ledger: Ledger | None = None) -> Anchor:
        """Linearises the network at images, shape (N, C, H, W), and takes the norms; the rest is arithmetic in ε."""
        return Anchor(self, Linearization(self.finder, images, progress, ledger=ledger))


def _finder(network: Network, options: NormOptions, share: float) -> NormFinder:
    plan = NormPlan(network, anchored_pairs(network), options.passes)
    return NormFinder(network, plan, options, share=share, spare=ROUNDS * weighable(network))


def weighable(network: Network) -> int:
    """How many norms with forms one rival class can take, of which a rule has one."""
    return sum(2 + place for stage in network.stages for place in range(len(stage.nonlinear)))


def rounds(plan: NormPlan) -> int:
    """For how many rival classes curvature is weighed: one where passes are counted, as it takes as many again."""
    return ROUNDS if plan.whole else 1


def work_with_curvature(plan: NormPlan, weighings: int = 1) -> float:
    """Floating-point operations that the norms of an image take, with those that weigh curvature so many times."""
    bent = {u for v, rule in plan.network.rules.items() if rule.contracts for u in plan.network.operands(v)}
    weighed = weighings * rounds(plan) * sum(plan.work_of(a, b) for a, b in plan.pairs if b in bent)
    return plan.work + weighed


class Anchor:
    """The network linearised at N images: bounds for any ε.

    Args:
        method: the certificate of the model.
        linearization: the network linearised with its Jacobians.
    """

    def __init__(self, method: Anchored, linearization: Linearization):
        self.method, self.linearization = method, linearization

    @property
    def norms(self) -> Norms:
        return self.linearization.norms

    def deviations(self, eps: Tensor, curvature: Curvature = NO_CURVATURE) -> Deviations:
        """How far values can move for perturbations of norm at most eps, shape (N,)."""
        return self.linearization.walk(eps, curvature)

    def radius(self, predicted: Tensor, margins: Tensor, limit: int | None = None) -> Tensor:
        """Certified radii, float64, shape (N,), rounded down, to 1 % or better.

        Args:
            predicted: classes y, shape (N,).
            margins: f_y − f_j, +inf at j = y, shape (N, classes).
            limit: how many rivals to look at in their own direction at most; the others are held to the cheap bound.

        Raises:
            LedgerError: called again, with start vectors that the first radius has used; linearise the images again.
        """
        best, here = linearized_radius(self.linearization, predicted, margins, limit), self.linearization
        if self.method.secant is None:
            return best
        moved = here.walk(best).operands
        still = [torch.zeros_like(best)]  # in front of what is perturbed
        # Widths follow from the norms here, so the norms there take start vectors that none here has taken.
        ledger = here.norms.ledger.part("secant")
        widths = {leaf: _WIDENED * moved.get(v, still)[-1][:, None] for v, leaf in self.method.kinks.items()}
        secant = Linearization(self.method.secant, here.images[:, 0], widths=widths, ledger=ledger)
        return torch.maximum(best, linearized_radius(secant, predicted, margins, limit))

    def least_margin(self, eps: Tensor, predicted: Tensor, margins: Tensor) -> Tensor:
        """Lower bounds on the smallest f_y − f_j within eps, each of shape (N,); arguments as for :meth:`radius`."""
        rivals = margins.argsort(1)[:, :-1].unbind(1)
        return torch.stack([RivalMargin(self.linearization, j, predicted, margins).left(eps) for j in rivals]).amin(0)


def linearized_radius(at: Linearization, predicted: Tensor, margins: Tensor, limit: int | None = None) -> Tensor:
    """Radii of one linearisation, as :meth:`Anchor.radius`.

    Rival classes are taken in the order of what the deviation of the logits allows them, and left out once that alone
    clears them: it costs no backward pass.
    """
    allowed = _cheap(at, predicted, margins)
    order = allowed.argsort(1)[:, :limit]
    best = torch.full_like(allowed[:, 0], math.inf)
    most = max(1, _ENTRIES // sum(value.numel() for value in at.values.values()))
    together = 1
    while order.shape[1]:
        rivals, order = order[:, :together], order[:, together:]
        floor = allowed.gather(1, rivals)
        if bool((floor[:, 0] >= FURTHER * best).all()):
            break
        # Rivals that are looked at together count as images.
        images = torch.arange(len(best), device=best.device).repeat_interleave(rivals.shape[1])
        many = at if rivals.shape[1] == 1 else at.only(images)
        toward = RivalMargin(many, rivals.flatten(), predicted[images], margins[images])
        # What is least now does not get further than that when it is weighed.
        exact = toward.radius(FURTHER * best[images]).reshape(rivals.shape)
        exact = torch.maximum(exact, floor)
        allowed.scatter_(1, rivals, exact)
        best = torch.minimum(best, exact.amin(1))
        together = min(2 * together, most)
    best = _weigh(at, allowed, predicted, margins).amin(1)
    return torch.where(torch.isfinite(best), best, 0.0) * (1 - SAFETY)


def _cheap(at: Linearization, predicted: Tensor, margins: Tensor) -> Tensor:
    """Radii from how far the logits and the features move at all, shape (N, classes)."""
    spread = spreads(at, predicted)
    slope = torch.as_tensor(at.gain(at.network.source, at.network.graph.output, NORM), dtype=torch.float64)
    rivals = torch.isfinite(margins)
    least = torch.where(rivals, margins, math.inf).amin(1, keepdim=True)
    finite = torch.where(rivals, margins, least).clamp_min(0)

    def left(eps: Tensor) -> Tensor:
        return finite - change(at, at.walk(eps), spread)

    return torch.where(rivals, search_each(left, finite / slope.reshape(-1, 1)), math.inf)


def _weigh(at: Linearization, allowed: Tensor, predicted: Tensor, margins: Tensor) -> Tensor:
    """The radii that the rival classes allow, shape (N, classes), with curvature weighed for the least of them."""
    allowed = allowed.clone()
    done = torch.zeros_like(allowed, dtype=torch.bool)
    for round in range(rounds(at.plan)):
        rivals = allowed.argmin(1, keepdim=True)
        least = allowed.gather(1, rivals)[:, 0]
        left = (~done.gather(1, rivals)[:, 0] & torch.isfinite(least)).nonzero()[:, 0]
        if not len(left):
            break
        one = RivalMargin(at.only(left), rivals[left, 0], predicted[left], margins[left])
        done[left, rivals[left, 0]] = True
        allowed[left, rivals[left, 0]] = one.weighed(least[left], round)
    return allowed
