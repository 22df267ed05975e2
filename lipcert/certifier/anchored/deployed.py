"""The anchored certificate of the deployed network, with its rounding errors treated as remainders.

Every operation w of the deployed network differs from its linearisation at the image by R_w(Δ) + e_w: the remainder at
the deviation Δ of its deployed operands from the nominal ones, and its own rounding error. So the identity of
docs/note.md holds for the deployed network with e_w added, linear operations included:

    deployed value u deviates from the nominal one by   G(x → u) δ + Σ_v G(v → u) R_v + Σ_w G(w → u) e_w,
    deployed margin m̂_j(x + δ) = m_j + ⟨∇_x m_j, δ⟩ + Σ_v ⟨∇_v m_j, R_v⟩ + Σ_w ⟨∇_w m_j, e_w⟩,

with ‖δ‖ ≤ ε and |⟨∇_w m_j, e_w⟩| ≤ Σ_i |∇_w m_j|_i |e_w|_i. The first-order part contains no product of norms along
the depth.

Norms of G are known only for nonlinear v and at cuts. The errors of linear operations are therefore propagated with the
norms of single operations, λ_w = Σ L λ_operand + ‖e_w‖, up to the next nonlinear v or cut. At v they count as an error
‖J_v‖ λ_operand at its output; at a cut they are added to the earlier remainders.

The bounds on e_w depend on how far the operands of w move within ε, and so on the rounding errors before w. These are
therefore assumed, and compared with what follows from the assumption. If it holds for every operation, it is proved by
induction over the operations in order: if all errors before w are as assumed, the bounds on the deviations of its
operands hold, and so does that on e_w. Rounding errors are bounded once, for the largest ε. The bounds hold for all
smaller ε, because all of them increase with the deviations.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lipcert.certifier.anchored.deviations import (
    EXACT,
    NO_CURVATURE,
    Curvature,
    DeployedErrors,
    Deviations,
    Linearization,
)
from lipcert.certifier.anchored.method import ROUNDS, form_norms_of_a_rival, linearized_radius, work_with_curvature
from lipcert.certifier.anchored.network import Network, an_image, prepared, whole_modules
from lipcert.certifier.anchored.norms import NormFinder, NormOptions, NormProgress, Norms
from lipcert.certifier.anchored.plan import NormPlan, anchored_pairs
from lipcert.errors import UnsupportedOperation
from lipcert.model import Model
from lipcert.norms import Ledger
from lipcert.numerics import SAFETY, at_most, times
from lipcert.roundoff import Format, Gains, Link, Operand, deployed_graph, error_norm, passes

# The radii at which rounding errors are bounded, relative to the radius in real arithmetic.
_SHARES = (1.0, 0.7, 0.4, 0.2)
_WEIGHINGS = 1 + len(_SHARES)
# The largest number of assumptions on rounding errors.
_ATTEMPTS = 12


class DeployedAnchored:
    """The anchored certificate of ``model.to(dtype)(images.to(dtype))``, for the model in float64 with these weights.

    Attributes:
        ranges: rounding errors of the operations.
        rounding: the operations that round.

    Raises:
        InputError: no such format.
        UnsupportedOperation: operations without a remainder rule, or without a rounding rule.
    """

    def __init__(self, model: Model, dtype: str | torch.dtype | Format, **options: Any):
        self.format = Format.of(dtype)
        settings = NormOptions(**options)
        graph, self.format, refused = deployed_graph(model, self.format, an_image(model), whole_modules)
        graph = prepared(graph, model, forms=False, deployed=True)
        self.network = Network(model, graph=graph, deployed=True, merged=True)
        self.plan = NormPlan(self.network, anchored_pairs(self.network))
        spare = _WEIGHINGS * ROUNDS * form_norms_of_a_rival(self.network)
        self.finder = NormFinder(self.network, self.plan, settings, spare=spare)
        self.ranges = Gains(self.network.graph, model, self.format, refused)
        self.rounding = [node for node in self.network.graph.nodes[1:] if not passes(node)]
        several = [node for node in self.rounding if not all(value.single for value in (node, *node.operands))]
        if several:
            raise UnsupportedOperation([(node.name, node.path) for node in several], "rounding")

    @property
    def work(self) -> float:
        """An estimate of the floating-point operations for the norms of an image."""
        return work_with_curvature(self.plan, _WEIGHINGS)

    def __call__(
        self, images: Tensor, progress: NormProgress | None = None, ledger: Ledger | None = None
    ) -> DeployedAnchor:
        """Linearises the network at images, shape (N, C, H, W)."""
        return DeployedAnchor(self, Linearization(self.finder, images, progress, ledger=ledger))


class DeployedAnchor:
    """The network linearised at N images: radii for its deployed form."""

    def __init__(self, method: DeployedAnchored, linearization: Linearization):
        self.method, self.linearization = method, linearization

    @property
    def norms(self) -> Norms:
        return self.linearization.norms

    def radius(self, predicted: Tensor, margins: Tensor, limit: int | None = None) -> Tensor:
        """Certified radii for the deployed network; arguments as for :meth:`lipcert.certifier.anchored.Anchor.radius`.

        Rounding errors are bounded for the radius in real arithmetic, and a radius computed with them is valid up to
        that radius. If it is much smaller, smaller balls are tried, in which rounding errors are smaller too.
        """
        at = self.linearization
        at.deployed, at.searches = EXACT, 0
        real = linearized_radius(at, predicted, margins, limit)
        best = torch.zeros_like(real)
        for share in _SHARES:
            improvable = best < share * real
            if not bool(improvable.any()):
                break
            self.measure(share * real)
            at.searches += 1  # the rounding errors depend on the norms so far
            within = torch.minimum(linearized_radius(at, predicted, margins, limit), share * real)
            best = torch.where(improvable, torch.maximum(best, within), best)
        entry = self.method.format.entry(at.images, real)
        return torch.where(best > entry, (best - entry) * (1 - SAFETY), 0.0)

    def measure(self, eps: Tensor) -> None:
        """Sets the rounding errors to bounds for perturbations of norm at most eps, shape (N,).

        None are assumed at first, and then twice those that were found; where no assumption holds, they are ∞.
        """
        at = self.linearization
        at.deployed = EXACT
        found = self._found(eps)
        at.deployed = replace(found, collected=2 * found.collected)
        for attempt in range(_ATTEMPTS):
            found, assumed = self._found(eps), at.deployed.collected
            holds = (found.collected <= assumed).all(1, keepdim=True)
            if bool(holds.all()):
                break
            larger = 2 * found.collected if attempt < _ATTEMPTS - 2 else torch.full_like(assumed, math.inf)
            at.deployed = replace(found, collected=torch.where(holds, assumed, larger))
        at.deployed = found

    def _found(self, eps: Tensor) -> DeployedErrors:
        """The rounding errors within eps, if those before each operation are no larger than the assumed ones."""
        at = self.linearization
        network, rounded, bounds = at.network, at.norms.rounded, at.propagate(eps)
        starts = {deviation.stage.start: deviation.start for deviation in bounds.stages}
        unlimited, zero = torch.full_like(eps, math.inf), torch.zeros_like(eps)
        moved, collected, local = {network.source: eps}, {network.source: zero}, {}
        for node, links in network.chains.links.items():
            for u, bound in zip(node.operands, bounds.operands.get(node, ()), strict=False):
                moved[u] = torch.minimum(moved[u], bound)
            error = zero
            if not passes(node):
                operands = [Operand(at.values[u], moved[u], unlimited) for u in node.operands]
                local[node] = self.method.ranges.error(node, operands)
                error = error_norm(local[node])
            before = [zero if u in starts or u in network.rules else collected[u] for u in (x.operand for x in links)]
            gains = [self.gains[link] for link in links]
            collected[node] = at_most(sum(map(times, gains, before), error))
            reach = sum(map(times, gains, (moved[link.operand] for link in links)), error + rounded.errors[node])
            reach = reach + bounds.remainders.get(node, zero)
            most = starts[node] + rounded.noise[node] if node in starts else unlimited
            moved[node] = torch.minimum(at_most(reach * (1 + SAFETY)), most)
        place = {node: number for number, node in enumerate(collected)}
        return DeployedErrors(local, torch.stack(list(collected.values()), 1) * (1 + SAFETY), place)

    @cached_property
    def gains(self) -> dict[Link, Tensor]:
        """Norms of the Jacobians of single operations: at the images, or over the image box where they are smaller."""
        at = self.linearization
        found = at.network.local(at.values).gains
        return {
            link: gain.clamp_max(self.method.ranges.of(link.node).get(link.operand, math.inf))
            for link, gain in found.items()
        }

    def deviations(self, eps: Tensor, curvature: Curvature = NO_CURVATURE) -> Deviations:
        """Bounds on the deviations of deployed values for perturbations of norm at most eps, after :meth:`measure`."""
        return self.linearization.propagate(eps, curvature)
