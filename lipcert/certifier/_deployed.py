"""The anchored certificate of the deployed network: rounding errors are remainders of a kind.

Every operation w of the deployed network leaves its linearisation at the image by R_w(Δ) + e_w: the remainder at the
deviation Δ of its deployed operands from the nominal ones, and its own rounding error. So the identity of
:mod:`lipcert.certifier._anchored` holds for the deployed network with e_w added, linear operations included:

    deployed value u deviates from the nominal one by   G(x → u) δ + Σ_v G(v → u) R_v + Σ_w G(w → u) e_w,
    deployed margin m̂_j(x + δ) = m_j + ⟨∇_x m_j, δ⟩ + Σ_v ⟨∇_v m_j, R_v⟩ + Σ_w ⟨∇_w m_j, e_w⟩,

with ‖δ‖ ≤ ε and |⟨∇_w m_j, e_w⟩| ≤ Σ_i |∇_w m_j|_i |e_w|_i. To first order, no norm is multiplied along the depth.

Norms of G are known for the nonlinear v and at the cuts alone. The errors of linear operations are therefore carried
along their linear ways by the operations' own norms, λ_w = Σ L λ_operand + ‖e_w‖, until they reach a nonlinear v, where
they count as an error ‖J_v‖ λ_operand put in at its output, or a cut, where they are added to the remainders before it.

Rounding errors are measured once, for the largest ε, and hold for all smaller ones, since every bound increases with ρ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipcert._numerics import SAFETY, at_most
from lipcert.bounds import arguments, per_image
from lipcert.certifier._anchored import Anchor, Anchored, Toward
from lipcert.certifier._linearized import (
    NOT_WEIGHED,
    Deviations,
    Gain,
    Progress,
    Stage,
    Weighed,
)
from lipcert.graph import Node, run
from lipcert.model import Model
from lipcert.norms import Ledger, verified_norms
from lipcert.roundoff import Format, Gains, Operand, length, local_error, passes

if TYPE_CHECKING:
    from typing_extensions import Self

# Of the radius in real arithmetic: where rounding errors are measured.
_SHARES = (1.0, 0.7, 0.4, 0.2)


class DeployedAnchored(Anchored):
    """The anchored certificate of ``model.to(dtype)(images.to(dtype))``.

    Args:
        model: the model in float64, with the weights of the artifact.
        dtype: "float32", "float16", "bfloat16", the dtype, or a :class:`Format`.
        **arguments: as for :class:`~lipcert.certifier._linearized.Linearized`, without ``at``.

    Raises:
        InputError: no such format.
        UnsupportedOperation: operations without a remainder rule, or without a rounding rule.
    """

    takes_secants = False
    casts = True
    weighings = 1 + len(_SHARES)

    def __init__(self, model: Model, dtype: str | torch.dtype | Format, **arguments: Any):
        self.format = Format.of(dtype)
        super().__init__(model, **arguments)
        self.ranges = Gains(self.graph, model, self.format)

    def __call__(
        self, images: Tensor, progress: Progress | None = None, ledger: Ledger | None = None
    ) -> DeployedAnchor:
        """Linearises the network at images, shape (N, C, H, W)."""
        return DeployedAnchor(self, *self.linearize(images, progress, ledger=ledger))


@dataclass
class Roundings:
    """Rounding errors of the deployed network around N images.

    Attributes:
        local: bounds on |e| of every operation, entry by entry.
        carried: λ of every value, shape (N,): the errors of the linear operations before it, back to the last nonlinear
            operation or cut.
        put: what arises at the output of every nonlinear operation, shape (N,): its own ‖e‖ and its operands' λ.
    """

    local: dict[Node, Tensor] = field(default_factory=dict)
    carried: dict[Node, Tensor] = field(default_factory=dict)
    put: dict[Node, Tensor] = field(default_factory=dict)


class DeployedAnchor(Anchor):
    """The network linearised at N images: radii for its deployed form.

    Attributes:
        roundings: rounding errors, once they have been measured; without them all bounds are for real arithmetic.
    """

    method: DeployedAnchored
    roundings: Roundings | None = None

    def radius(self, predicted: Tensor, gaps: Tensor, limit: int | None = None) -> Tensor:
        """Certified radii for the deployed network, as :meth:`Anchor.radius`.

        Rounding errors are measured at the radius in real arithmetic, and a radius found with them is valid up to
        there. Where it comes out much smaller, smaller balls are tried, in which values move less.
        """
        self.roundings, self.weighing = None, 0
        real = super().radius(predicted, gaps, limit)
        best = torch.zeros_like(real)
        for share in _SHARES:
            left = best < share * real
            if not bool(left.any()):
                break
            self.measure(share * real)
            self.weighing += 1  # what is measured depends on the norms so far
            found = torch.minimum(super().radius(predicted, gaps, limit), share * real)
            best = torch.where(left, torch.maximum(best, found), best)
        entry = self.method.format.entry(self.images, real)
        return torch.where(best > entry, (best - entry) * (1 - SAFETY), 0.0)

    def measure(self, eps: Tensor) -> None:
        """Sets ``roundings`` to what holds for perturbations of norm at most eps, shape (N,)."""
        self.roundings = Roundings()
        self._walk(eps, _Measuring(self, eps, self.roundings))

    def only(self, index: Tensor) -> Self:
        part = super().only(index)
        if self.roundings is not None:
            known = (self.roundings.local, self.roundings.carried, self.roundings.put)
            part.roundings = Roundings(*({node: value[index] for node, value in found.items()} for found in known))
        return part

    def deviations(self, eps: Tensor, gains: Weighed = NOT_WEIGHED) -> Deviations:
        """How far deployed values can move for perturbations of norm at most eps, once errors have been measured."""
        return super().deviations(eps, gains) if self.roundings is None else self._walk(eps, None, gains)

    def moved(self, found: Deviations, spreads: Tensor | None) -> Tensor:
        """As :meth:`Linearization.moved`, and what the head itself rounds, with what copies its result."""
        change = super().moved(found, spreads)
        if self.roundings is None or self.method.head is None:
            return change
        node, local = self.method.graph.output, self.roundings.local
        head = per_image(local[node]).amax(1, keepdim=True)
        while node.op != "linear":
            node = node.operands[0]
            head = head + per_image(local[node]).amax(1, keepdim=True)
        return change + 2 * head * (1 + SAFETY)

    def lost(self, rivals: Tensor, predicted: Tensor) -> Tensor:
        """Σ_w Σ_i |∇_w m_j|_i |e_w|_i for the margins f_y − f_j, shape (N,): what rounding takes to first order."""
        assert self.roundings is not None
        local, graph = self.roundings.local, self.method.graph

        def one(image: Tensor, *added: Tensor) -> Tensor:
            known: dict[Node, Any] = {graph.input: image}
            extra = dict(zip(local, added, strict=True))
            for node in graph.nodes:
                run((node,), known)
                if node in extra:
                    known[node] = known[node] + extra[node]
            return known[graph.output]

        added = [torch.zeros_like(self.values[node], requires_grad=True) for node in local]
        with torch.enable_grad():
            logits = torch.vmap(one)(self.images, *added).reshape(len(self.images), -1)
            margin = logits.gather(1, predicted[:, None]) - logits.gather(1, rivals[:, None])
            slopes = torch.autograd.grad(margin.sum(), added)
        weighed = [
            per_image(torch.where(slope == 0, 0.0, slope.abs() * error)).sum(1)
            for slope, error in zip(slopes, local.values(), strict=True)
        ]
        return at_most(torch.stack(weighed).sum(0) * (1 + SAFETY))

    def _toward(self, rivals: Tensor, predicted: Tensor, gaps: Tensor) -> Toward:
        toward = super()._toward(rivals, predicted, gaps)
        if self.roundings is not None:
            toward.gap = (toward.gap - self.lost(rivals, predicted)).clamp_min(0)
        return toward

    def _walk(self, eps: Tensor, measuring: _Measuring | None, gains: Weighed = NOT_WEIGHED) -> Deviations:
        """:meth:`Anchor.deviations` with rounding errors, which are measured on the way if that is asked."""
        assert self.roundings is not None
        source, stages, zero = self.method.source, self.method.stages, torch.zeros_like(eps)
        start = stages[0].start
        if measuring is not None:
            measuring.prefix(self.method.replay.between(source, [start]))
        before = self.roundings.carried[start]  # errors of the linear operations in front of all stages
        passed_on = eps * self.gain(source, start) + before
        at_cuts: dict[Node, Tensor] = {}
        operands: dict[Node, list[Tensor]] = {}
        weighed: dict[Node, Tensor] = {}
        for stage in stages:
            arrived = at_most(sum((self.gain(cut, stage.start) * e for cut, e in at_cuts.items()), zero))
            if stage is stages[0]:
                arrived = before
            at_start = torch.minimum(self.gain(source, stage.start) * eps + arrived, passed_on)
            linear = partial(self._linear, stage.start, eps, arrived, at_start)
            if measuring is not None:
                measuring.start(stage, at_start)
            errors, sizes = self._through(stage, linear, operands, measuring, gains)
            weighed |= sizes
            at_cuts[stage.end] = at_most(errors(stage.end))
            passed_on = at_most(linear(stage.end, self.gain) + at_cuts[stage.end])
            if stage is stages[0]:
                at_cuts[stage.end] = at_most(at_cuts[stage.end] + self.gain(start, stage.end) * before)
        head = self.method.head
        features = at_most(linear(head[0], self.gain) + errors(head[0])) if head is not None else None
        return Deviations(operands, passed_on, features, weighed)

    def _through(
        self,
        stage: Stage,
        linear: Callable[[Node, Gain], Tensor],
        operands: dict[Node, list[Tensor]],
        measuring: _Measuring | None,
        gains: Weighed,
    ) -> tuple[Callable[[Node], Tensor], dict[Node, Tensor]]:
        """Goes through a stage as :meth:`Linearization.inside`; the result includes rounding errors."""
        assert self.roundings is not None
        carried, put = self.roundings.carried, self.roundings.put
        added: list[tuple[Node, Callable[[Node, Gain], Tensor]]] = []
        weighed: dict[Node, Tensor] = {}

        def errors(u: Node, gain: Gain) -> Tensor:
            # What is behind a stage's start has λ = 0 there: the errors up to it are among those that arrived.
            own = carried[u] * gain(u, u) if u is not stage.start else torch.zeros_like(carried[u])
            return sum((effect(u, gain) + gain(w, u) * put[w] for w, effect in added), own)

        def moved(u: Node, gain: Gain) -> Tensor:
            return at_most(linear(u, gain) + errors(u, gain) + self.noise(u, gain))

        nodes = stage.nonlinear if measuring is None else self.method.replay.between(stage.start, [stage.end])
        for v in nodes:
            if v not in self.remainders:
                assert measuring is not None
                measuring.linear(v)
                continue
            operands[v] = self.reach(v, moved)
            if v in gains:
                weighed[v] = moved(self.method.operands(v)[0], gains[v])
            if measuring is not None:
                norms = operands[v][: len(v.operands)]
                measuring.nonlinear(v, norms, at_most(self.remainders[v].norm(operands[v])))
            added.append((v, self.effect(v, operands[v], moved)))
        return lambda u: errors(u, self.gain), weighed


class _Measuring:
    """Fills :class:`Roundings` in the order of the network.

    Args:
        anchor: the linearised network.
        eps: size of the perturbations, shape (N,).
        roundings: what is filled.

    Attributes:
        moved: ρ of every value, shape (N,): how far the deployed value is from the nominal one.
    """

    def __init__(self, anchor: DeployedAnchor, eps: Tensor, roundings: Roundings):
        self.anchor, self.found = anchor, roundings
        self.zero = torch.zeros_like(eps)
        self.stage_start: Node | None = None
        self.moved: dict[Node, Tensor] = {anchor.method.source: eps}
        self.found.carried[anchor.method.source] = self.zero

    def prefix(self, nodes: Sequence[Node]) -> None:
        """Goes over the linear operations in front of the first stage."""
        for node in nodes:
            self.linear(node)

    def start(self, stage: Stage, moved: Tensor) -> None:
        """Begins a stage: the errors so far are counted at its start."""
        self.stage_start = stage.start
        self.moved[stage.start] = torch.minimum(self.moved[stage.start], moved)

    def linear(self, node: Node) -> None:
        """A linear operation hands on what its operands carry, and adds its own error."""
        gains, error = self._gains(node), self._error(node)
        self.found.carried[node] = self._sum(gains, self._carried) + error
        self.moved[node] = self._sum(gains, self.moved.__getitem__) + error

    def nonlinear(self, node: Node, rho: Sequence[Tensor], remainder: Tensor) -> None:
        """A nonlinear operation collects what its operands carry."""
        for u, bound in zip(node.operands, rho, strict=True):
            self.moved[u] = torch.minimum(self.moved[u], bound)
        gains, error = self._gains(node), self._error(node)
        self.found.put[node] = error + self._sum(gains, self._carried)
        self.found.carried[node] = self.zero
        self.moved[node] = at_most(self._sum(gains, self.moved.__getitem__) + remainder + error)

    def _carried(self, node: Node) -> Tensor:
        return self.zero if node is self.stage_start else self.found.carried[node]

    def _sum(self, gains: dict[Node, Any], known: Callable[[Node], Tensor]) -> Tensor:
        return at_most(sum((gain * known(u) for u, gain in gains.items()), self.zero))

    def _gains(self, node: Node) -> dict[Node, Any]:
        """Norms of the operation's Jacobian at the nominal point, by operand.

        Those of the ranges hold everywhere; better ones are ‖Y‖₂ and ‖X‖₂ for XY, and max|γ|/s for LayerNorm.
        """
        gains: dict[Node, Any] = dict(self.anchor.method.ranges.of(node))
        if node.op == "layer_norm":
            (x,) = gains
            gains[x] = torch.minimum(self._standardising(node, self.anchor.values[x]), self.zero + gains[x])
        if node.op == "matmul" and len(gains) == 2:
            batch = math.prod(node.shape[:-2])
            x, y = gains
            # An operand whose matrices are broadcast m times deviates by √m as much.
            used = [math.sqrt(batch / math.prod(u.shape[:-2])) for u in (x, y)]
            gains = {x: self._largest(y) * used[0], y: self._largest(x) * used[1]}
        return gains

    def _standardising(self, node: Node, x: Tensor) -> Tensor:
        """max|γ| over the smallest √(‖x_t − μ‖²/d + eps) of an image's tokens."""
        given = arguments(node)
        tokens = x.flatten(-len(given["normalized_shape"]))
        variance = (tokens - tokens.mean(-1, keepdim=True)).square().mean(-1) + given.get("eps", 1e-5)
        weight = given.get("weight")
        largest = 1.0 if weight is None else weight.detach().abs().max().item()
        return per_image(variance).amin(1).rsqrt() * largest * (1 + SAFETY)

    def _largest(self, node: Node) -> Tensor:
        """The largest spectral norm among the matrices of an image."""
        matrices = self.anchor.values[node]
        return verified_norms(matrices.reshape(-1, *matrices.shape[-2:])).reshape(len(matrices), -1).amax(1)

    def _error(self, node: Node) -> Tensor:
        """‖e‖ of the operation."""
        if passes(node):
            return self.zero
        unlimited = torch.full_like(self.zero, math.inf)
        operands = [Operand(self.anchor.values[u], self.moved[u], unlimited) for u in node.operands]
        self.found.local[node] = local_error(node, operands, self.anchor.method.ranges.format)
        return length(self.found.local[node])
