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

Rounding errors are bounded once, for the largest ε. The bounds hold for all smaller ε, because all of them increase
with ρ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds import normalising_norm, per_image
from lipcert.certifier.anchored.gradients import margin_gradients
from lipcert.certifier.anchored.method import ROUNDS, linearized_radius, weighable, work_with_curvature
from lipcert.certifier.anchored.network import Network, Stage, an_image, prepared, whole_modules
from lipcert.certifier.anchored.norms import NormFinder, NormOptions, NormProgress, Norms
from lipcert.certifier.anchored.plan import NormPlan, anchored_pairs
from lipcert.certifier.anchored.walk import NO_CURVATURE, Curvature, Deviations, Linearization, Rounding
from lipcert.graph import Node
from lipcert.model import Model
from lipcert.norms import Ledger, verified_norms
from lipcert.numerics import SAFETY, at_most
from lipcert.roundoff import Format, Gains, Operand, deployed_graph, error_norm, passes

# The radii at which rounding errors are bounded, relative to the radius in real arithmetic.
_SHARES = (1.0, 0.7, 0.4, 0.2)
_WEIGHINGS = 1 + len(_SHARES)


class DeployedAnchored:
    """The anchored certificate of ``model.to(dtype)(images.to(dtype))``, for the model in float64 with these weights.

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
        spare = _WEIGHINGS * ROUNDS * weighable(self.network)
        self.finder = NormFinder(self.network, self.plan, settings, spare=spare)
        self.ranges = Gains(self.network.graph, model, self.format, refused)

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
        at.rounding, at.weighing = Rounding(), 0
        real = linearized_radius(at, predicted, margins, limit)
        best = torch.zeros_like(real)
        for share in _SHARES:
            improvable = best < share * real
            if not bool(improvable.any()):
                break
            self.measure(share * real)
            at.weighing += 1  # the rounding errors depend on the norms so far
            within = torch.minimum(linearized_radius(at, predicted, margins, limit), share * real)
            best = torch.where(improvable, torch.maximum(best, within), best)
        entry = self.method.format.entry(at.images, real)
        return torch.where(best > entry, (best - entry) * (1 - SAFETY), 0.0)

    def measure(self, eps: Tensor) -> None:
        """Sets the rounding errors to bounds for perturbations of norm at most eps, shape (N,)."""
        at = self.linearization
        measured = MeasuredRounding(at)
        at.rounding = _Measuring(at, eps, self.method.ranges, measured)
        try:
            at.walk(eps)
        finally:
            at.rounding = measured

    def deviations(self, eps: Tensor, curvature: Curvature = NO_CURVATURE) -> Deviations:
        """Bounds on the deviations of deployed values for perturbations of norm at most eps, after :meth:`measure`."""
        return self.linearization.walk(eps, curvature)


class MeasuredRounding(Rounding):
    """Bounds on the rounding errors of the deployed network in balls around N images.

    Attributes:
        local: bounds on the entries of |e| of every operation.
        collected: λ of every value, shape (N,): the errors of the linear operations since the last nonlinear operation
            or cut.
        arising: the error at the output of every nonlinear operation, shape (N,): its own ‖e‖ and its operands' λ.
    """

    def __init__(self, at: Linearization):
        self.at = at
        self.local: dict[Node, Tensor] = {}
        self.collected: dict[Node, Tensor] = {}
        self.arising: dict[Node, Tensor] = {}

    def before(self, stage: Stage) -> Tensor | None:
        return self.collected[stage.start]

    def carried(self, u: Node) -> Tensor | None:
        return self.collected[u]

    def put(self, v: Node) -> Tensor | None:
        return self.arising[v]

    def of_head(self) -> Tensor | None:
        if self.at.network.head is None:
            return None
        node = self.at.network.graph.output
        head = per_image(self.local[node]).amax(1, keepdim=True)
        while node.op != "linear":  # operations that copy the result of the head round too
            node = node.operands[0]
            head = head + per_image(self.local[node]).amax(1, keepdim=True)
        return head

    def lost(self, rivals: Tensor, predicted: Tensor, linear: Mapping[Node, Tensor]) -> Tensor | None:
        """Σ_w Σ_i |∇_w m|_i |e_w|_i for the margins m = f_y − f_j − Σ_u ⟨b_u, u⟩, shape (N,)."""
        _, slopes = margin_gradients(self.at.network, self.at.values, list(self.local), rivals, predicted, linear)
        weighed = [
            per_image(torch.where(slopes[node] == 0, 0.0, slopes[node].abs() * error)).sum(1)
            for node, error in self.local.items()
        ]
        return at_most(torch.stack(weighed).sum(0) * (1 + SAFETY))

    def only(self, index: Tensor, at: Linearization) -> MeasuredRounding:
        part = MeasuredRounding(at)
        part.local, part.collected, part.arising = (
            {node: value[index] for node, value in table.items()}
            for table in (self.local, self.collected, self.arising)
        )
        return part


class _Measuring(Rounding):
    """Bounds the rounding errors during a walk through the network.

    Attributes:
        moved: ρ of every value, shape (N,): the distance of the deployed value from the nominal one.
    """

    def __init__(self, at: Linearization, eps: Tensor, ranges: Gains, measured: MeasuredRounding):
        self.at, self.ranges, self.measured = at, ranges, measured
        self.zero = torch.zeros_like(eps)
        self.stage_start: Node | None = None
        self.moved: dict[Node, Tensor] = {at.network.source: eps}
        self.measured.collected[at.network.source] = self.zero

    def nodes(self, stage: Stage) -> Sequence[Node]:
        return self.at.network.replay.between(stage.start, [stage.end])

    def before(self, stage: Stage) -> Tensor | None:
        for node in self.at.network.replay.between(self.at.network.source, [stage.start]):
            self.linear(node)
        return self.measured.before(stage)

    def carried(self, u: Node) -> Tensor | None:
        return self.measured.carried(u)

    def put(self, v: Node) -> Tensor | None:
        return self.measured.put(v)

    def enter(self, stage: Stage, moved: Tensor) -> None:
        """The errors so far are counted at the start of the stage."""
        self.stage_start = stage.start
        self.moved[stage.start] = torch.minimum(self.moved[stage.start], moved)

    def linear(self, node: Node) -> None:
        """A linear operation propagates the errors of its operands, and adds its own."""
        gains, error = self._gains(node), self._error(node)
        self.measured.collected[node] = self._sum(gains, self._collected) + error
        self.moved[node] = self._sum(gains, self.moved.__getitem__) + error

    def nonlinear(self, node: Node, rho: Sequence[Tensor]) -> None:
        """A nonlinear operation adds up the errors of its operands and its own."""
        for u, bound in zip(node.operands, rho, strict=False):
            self.moved[u] = torch.minimum(self.moved[u], bound)
        remainder = at_most(self.at.remainders[node].norm(rho))
        gains, error = self._gains(node), self._error(node)
        self.measured.arising[node] = error + self._sum(gains, self._collected)
        self.measured.collected[node] = self.zero
        self.moved[node] = at_most(self._sum(gains, self.moved.__getitem__) + remainder + error)

    def _collected(self, node: Node) -> Tensor:
        return self.zero if node is self.stage_start else self.measured.collected[node]

    def _sum(self, gains: dict[Node, Any], bounds: Callable[[Node], Tensor]) -> Tensor:
        return at_most(sum((gain * bounds(u) for u, gain in gains.items()), self.zero))

    def _gains(self, node: Node) -> dict[Node, Any]:
        """Norms of the Jacobian at the nominal point: ‖Y‖ and ‖X‖ for XY, max|γ|/s for LayerNorm; else over ranges."""
        gains: dict[Node, Any] = dict(self.ranges.of(node))
        if node.op == "layer_norm":
            (x,) = gains
            gains[x] = torch.minimum(normalising_norm(node, 0, self.at.values) + self.zero, self.zero + gains[x])
        if node.op == "matmul" and len(gains) == 2:
            batch = math.prod(node.shape[:-2])
            x, y = gains
            # An operand whose matrices are broadcast m times deviates by √m as much.
            used = [math.sqrt(batch / math.prod(u.shape[:-2])) for u in (x, y)]
            gains = {x: self._largest(y) * used[0], y: self._largest(x) * used[1]}
        return gains

    def _largest(self, node: Node) -> Tensor:
        """The largest spectral norm among the matrices of an image, shape (N,)."""
        matrices = self.at.values[node]
        return verified_norms(matrices.reshape(-1, *matrices.shape[-2:])).reshape(len(matrices), -1).amax(1)

    def _error(self, node: Node) -> Tensor:
        """A bound on ‖e‖ of the operation, shape (N,)."""
        if passes(node):
            return self.zero
        unlimited = torch.full_like(self.zero, math.inf)
        operands = [Operand(self.at.values[u], self.moved[u], unlimited) for u in node.operands]
        self.measured.local[node] = self.ranges.error(node, operands)
        return error_norm(self.measured.local[node])
