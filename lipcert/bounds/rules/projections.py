"""The projections of lipcert.surgery that replace normalisations: onto a ball, and smooth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.bounds._jacobian import Bounds, normalising, normalising_norm
from lipcert.bounds._kinks import RadialKink
from lipcert.bounds._registry import Call, jacobian, rounding, rule, secant
from lipcert.bounds._remainder import Against, Radial, Remainder, per_image, remainder
from lipcert.bounds._rounding import Operand, size_and_cast
from lipcert.bounds._secants import Bend, eta
from lipcert.bounds._value import Value
from lipcert.bounds.rules.normalization import (
    ByGroup,
    Centred,
    by_group,
    inverse_root_error,
    normalised_rounding,
)
from lipcert.graph import Node
from lipcert.numerics import EXTRA, Format, computed_l2_norm, l2_norm, over, unit_vectors
from lipcert.surgery import (
    GroupLayerProject,
    GroupSmoothProject,
    LayerProject,
    RmsLayerProject,
    RmsSmoothProject,
    SmoothProject,
)

_SHORT = 1e-150  # the least length of a token in the secants of projections
_ROUNDED = 1e-15  # above the rounding error of the difference of two numbers up to 1


@rule(LayerProject, SmoothProject, RmsLayerProject, RmsSmoothProject, GroupLayerProject, GroupSmoothProject)
def projection(call: Call, module: LayerProject | SmoothProject, x: Value) -> Value:
    """Constant max|weight|, and a bound on the norms of the vectors of channels; proof in lipcert.surgery."""
    lip = x.lip * module.lipschitz(x.shape[1:]).value
    return Value(call.shape, lip, rows=(1 if module.channels_first else -1, module.token_norm()))


@secant(LayerProject, RmsLayerProject, rest=lambda node: (node.function,))
def secant_project(x: Tensor, width: Tensor, module: Any) -> Tensor:
    """A projection onto a ball, with a secant slope of min(n, R) at n = ‖h‖ as the derivative along h."""
    rows = module.rows(x)
    h = rows - rows.mean(-1, keepdim=True) if module.centred else rows
    length = torch.hypot(torch.linalg.vector_norm(h.detach(), dim=-1, keepdim=True), h.new_tensor(_SHORT))
    far = eta((module.radius - length).abs(), width)
    across = module.radius / torch.maximum(length, module.radius)
    along = torch.where(length < module.radius, 1 - far, far)
    unit = h.detach() / length
    turned = unit * (unit * (h - h.detach())).sum(-1, keepdim=True)
    out = (across * h + (along - across) * turned) * module.weight
    if module.bias is not None:
        out = out + module.bias
    return out.movedim(-1, 1) if module.channels_first else out


@remainder(secant_project)
class SecantProjection(Remainder):
    """weight ∘ u(h) with u(h) = min(‖h‖, R) ĥ, linearised with the secant slope s along ĥ and min(n, R)/n across it.

    Here n = ‖h‖ and ĥ = h/n. For one token let a = ⟨ĥ, Δ⟩, Δ_⊥ the component of Δ orthogonal to ĥ, b its length,
    n' = ‖h + Δ‖ = n + e, μ = min(n, R) and μ' = min(n', R). As h + Δ = (n + a)ĥ + Δ_⊥, the remainder has the component
    μ'(n + a)/n' − μ − s a along ĥ and (μ'/n' − μ/n)Δ_⊥ across it. Let q = n' − (n + a) = b²/(n' + n + a) ≥ 0, so
    e = a + q. The first component is g + q(s − μ'/n') with g = μ' − μ − s e, the remainder of one entry at R − n that
    deviates by |e| ≤ ρ_t; and s and μ'/n' lie in [0, 1]. min(1, R/n) has slopes of at most 1/R, so the second component
    is at most b|e|/R. With D = min(R, n − ρ) > 0: q ≤ b²/(2D), and ‖(b²/(2D), b|a|/D)‖ ≤ ρ_t²/(√3 D), with equality at
    b² = ⅔ρ_t². Together,

        ‖R_t‖ ≤ |g| + c_t ρ_t²,    c_t = 1/(√3 D) + ρ/(2D²).

    A token with n + ρ ≤ R and n ≤ R − w, w the width of the secant, has R = 0. A token with n − ρ ≥ R and n ≥ R + w
    stays outside the ball, where u = Rĥ has second derivatives of at most (2/√3)R/(n − ρ)², as in
    :class:`~lipcert.bounds._kinks.RadialKink`: g = 0 and c_t = R/(√3 (n − ρ)²). In every case ‖R_t‖ ≤ 2ρ_t, because
    u and its linearisation have constant 1.

    For all tokens, ‖(|g_t|)_t‖ is bounded as for entries, and Σ ρ_t⁴ ≤ ρ⁴. Against a direction with the parts d_t, g
    counts with ⟨d_t, ĥ_t⟩ and the rest with ‖d_t‖. As min(n, R) = n − max(n − R, 0), g is −1 times the remainder of
    max(·, 0). With bounds on the deviations of tokens along ĥ_t, :class:`Crossing` may be smaller.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        self.module = module = _module(node)
        self.radius = float(module.radius)
        h = self._rows(operands[0])
        if module.centred:
            h = h - h.mean(-1, keepdim=True)
        self.length = computed_l2_norm(h, -1)
        self.unit = unit_vectors(h)
        self.units = self.unit.reshape(operands[0].shape)
        self.width = per_image(operands[1])
        self.weight = module.weight.detach().double()
        self.bend = Bend((self.length - self.radius).abs(), self.width)

    @classmethod
    def token(cls, node: Node) -> int:
        return 0 if _module(node).channels_first else node.shape[-1]

    def _rows(self, tensor: Tensor) -> Tensor:
        """(N, tokens, channels)."""
        moved = tensor.movedim(2, -1) if self.module.channels_first else tensor
        return moved.reshape(len(tensor), -1, moved.shape[-1])

    def _curvature(self, rho: Tensor) -> Tensor:
        """c_t, shape (N, tokens)."""
        rho = rho[:, None]
        low = (self.length - rho).clamp_min(0)
        least = low.clamp_max(self.radius)
        near = over(1 / math.sqrt(3), least) + over(rho, 2 * least.square())
        beyond = over(self.radius / math.sqrt(3), low.square())
        inside = (self.length + rho <= self.radius) & (self.length + self.width <= self.radius)
        outside = (low >= self.radius) & (self.length - self.width >= self.radius)
        return torch.where(inside, 0.0, torch.where(outside, beyond, near))

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        moved = rho[0]
        kink_and_curvature = self.bend.norm(moved, moved[:, None]) + self._curvature(moved).amax(1) * moved.square()
        bound = torch.minimum(kink_and_curvature, 2 * moved)
        if len(rho) > 1:
            bound = torch.minimum(bound, Crossing(self.length, self.radius, self.bend, rho).norm())
        return self.weight.abs().max() * bound

    def against(self, direction: Tensor) -> Against:
        d = self._rows(direction) * self.weight
        along = (d * self.unit).sum(-1)
        size = l2_norm(d, -1)

        def bound(rho: Sequence[Tensor]) -> Tensor:
            moved = rho[0]
            curved = (size * self._curvature(moved)).amax(1) * moved.square()
            kink_and_curvature = self.bend.against(-along, moved, moved[:, None]) + curved
            least = torch.minimum(kink_and_curvature, 2 * l2_norm(size, 1) * moved)
            if len(rho) > 1:
                crossing = Crossing(self.length, self.radius, self.bend, rho)
                least = torch.minimum(least, crossing.against(size, along))
            return least

        return bound


class Crossing:
    """The remainder of :class:`SecantProjection` if ‖(a_t)_t‖ ≤ α and |a_t| ≤ p, so that fewer tokens cross the kink.

    Notation as there. Let m = n − p > 0. Then n' ≥ n + a ≥ m, so q ≤ b²/(2m) and |e| ≤ min(p + ρ²/(2m), ρ). Over any
    set of tokens ‖e‖ is at most η = min(α + max ρ²/(2m), ρ), because ‖q‖₂ ≤ Σ q_t and Σ b_t² ≤ ρ². Only tokens with κ >
    0 at their largest |e| contribute to g.

    The term q(s − μ'/n') lies between −q(min(1, R/(n − e)) − s)₊ and q(s − min(1, R/(n + e)))₊ for the largest e, and
    sums over tokens Σ q_t w_t are at most max(w/(2m)) ρ². The component across ĥ is at most Φ b|e|, with
    Φ = R/max(R, n − e)² if the token can be outside the ball, and 0 otherwise. The sum Σ ‖d_t‖Φ b|e| is at most
    min(max(‖d_t‖Φ) η, ‖(‖d_t‖Φe)_t‖) ρ, with η over the tokens with Φ > 0. In norm the component is at most max(Φ e) ρ,
    and it is orthogonal to the rest.
    """

    def __init__(self, n: Tensor, radius: float, bend: Bend, rho: Sequence[Tensor]):
        self.rho, self.along, peak = rho
        self.bend = bend
        least_length = n * (1 - 1e-12) - peak[:, None]
        self.turned = torch.where(least_length > 0, self.rho[:, None] ** 2 / (2 * least_length), math.inf)
        self.moved = torch.minimum(peak[:, None] + self.turned, self.rho[:, None])
        low, high = (n - self.moved).clamp_min(0), n + self.moved
        slope = torch.where(n < radius, 1 - bend.far, bend.far)
        inside = (high <= radius) & (bend.far <= 0)
        self.above = torch.where(inside, 0.0, (over(radius, low).clamp_max(1) - slope).clamp_min(0) + _ROUNDED)
        self.below = torch.where(inside, 0.0, (slope - (radius / high).clamp_max(1)).clamp_min(0) + _ROUNDED)
        self.aside = torch.where(high <= radius, 0.0, radius / low.clamp_min(radius).square())
        self.crossing = self._together(bend.slope(self.moved) > 0)
        self.outside = self._together(self.aside > 0)

    def _together(self, chosen: Tensor) -> Tensor:
        """η over the chosen tokens."""
        return torch.minimum(self.along + torch.where(chosen, self.turned, 0.0).amax(1), self.rho)

    def _straightened(self, weight: Tensor) -> Tensor:
        return torch.where(weight > 0, weight * self.turned, 0.0).amax(1)

    def norm(self) -> Tensor:
        """A bound on ‖R‖ without the weight of the module, shape (N,); ∞ if unknown."""
        along = self.bend.norm(self.crossing, self.moved) + self._straightened(torch.maximum(self.above, self.below))
        return torch.hypot(along, (self.aside * self.moved).amax(1) * self.rho)

    def against(self, size: Tensor, along: Tensor) -> Tensor:
        """A bound on −Σ ⟨d_t, R_t⟩, given ‖d_t‖ and ⟨d_t, ĥ_t⟩, each of shape (N, tokens)."""
        straightened = self._straightened(along.clamp_min(0) * self.above + (-along).clamp_min(0) * self.below)
        across = size * self.aside
        aside = torch.minimum(across.amax(1) * self.outside, l2_norm(across * self.moved, 1)) * self.rho
        return self.bend.against(-along, self.crossing, self.moved) + straightened + aside


def _module(node: Node) -> Any:
    """The projection module of a captured projection, or of its variant with secants."""
    return node.function if isinstance(node.function, nn.Module) else node.args[2]


def _axis(module: Any) -> int:
    """The axis of the channels of a tensor that has the image axis in front."""
    return 2 if module.channels_first else -1


@remainder(SmoothProject, RmsSmoothProject)
class SmoothProjection(Radial):
    """u = h/√(1 + ‖h‖²/R²): see :class:`Radial`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        weight, axis = module.weight.detach(), _axis(module)
        super().__init__(operands[0], float(module.radius), 1.0, weight, axis, centred=module.centred)


@remainder(LayerProject, RmsLayerProject)
class LayerProjection(RadialKink):
    """u = h·min(1, R/‖h‖): the smaller bound of :class:`RadialKink` and of a secant of width 0."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        weight, axis = module.weight.detach(), _axis(module)
        super().__init__(operands[0], float(module.radius), weight, axis, centred=module.centred)
        self.secant = SecantProjection(node, [operands[0], torch.zeros_like(self.length[:, :1])], result)
        self.units = self.secant.units

    token = SecantProjection.token

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        plain = super().norm(rho)
        return plain if len(rho) == 1 else torch.minimum(plain, self.secant.norm(rho))

    def against(self, direction: Tensor) -> Against:
        plain, secant = super().against(direction), self.secant.against(direction)
        return lambda rho: plain(rho) if len(rho) == 1 else torch.minimum(plain(rho), secant(rho))


@remainder(GroupSmoothProject)
class GroupSmoothProjection(ByGroup, Radial):
    """As above, with groups of channels as tokens."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        self.groups = module.groups
        super().__init__(operands[0], float(module.radius), 1.0, module.weight.detach(), 2, centred=True)


@remainder(GroupLayerProject)
class GroupLayerProjection(ByGroup, RadialKink):
    """As above, with groups of channels as tokens."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        self.groups = module.groups
        super().__init__(operands[0], float(module.radius), module.weight.detach(), 2, centred=True)


@rounding(SmoothProject, LayerProject, RmsSmoothProject, RmsLayerProject, GroupSmoothProject, GroupLayerProject)
def projection_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """weight ∘ c·f + bias for centred tokens c, f = 1/√(1 + ‖c‖²/R²) or R/√max(‖c‖², R²) = 1/√max(‖c‖²/R², 1).

    Tokens are the vectors of channels. For the replacement of GroupNorm they are all entries of a group of channels,
    for that of RMSNorm they are not centred.

    Let ĉ have an error of norm b, and let Q = ‖c‖²/R². The error of Q̂ is at most (2‖c‖b + b²)/R² + γ‖ĉ‖²/R², with γ
    for a sum of d squares and 6 roundings to the format. Relative to max(Q, 1) it is at most 2b/R + b²/R² + γ(1 +
    b/R)², because ‖c‖/R ≤ max(1, Q). The relative cast error of the radius enters Q twice, and in LayerProject f once
    more, with another product. Then :func:`inverse_root_error` applies, and :func:`normalised_rounding` to the products
    with f and the weight and the sum with the bias, each of which the module rounds once.
    """
    module: Any = node.function
    grouped = isinstance(module, (GroupSmoothProject, GroupLayerProject))
    axis = 2 if module.channels_first else -1
    x = operands[0]
    if grouped:
        shape = (*x.nominal.shape[:2], module.groups, -1)
        tokens, most, rho = x.nominal.reshape(shape), x.most.reshape(shape), x.rho.reshape(-1, 1, 1, 1)
    else:
        tokens, most, rho = x.nominal.movedim(axis, -1), x.most.movedim(axis, -1), x.over(x.rho)
    d, radius = tokens.shape[-1], float(module.radius)
    centred = Centred.of(tokens, rho, most, d, fmt) if module.centred else Centred.without(tokens, rho, most)
    away = l2_norm(centred.error, -1, keepdim=True) / radius
    gamma = fmt.sum_gamma(d + EXTRA) + fmt.gamma(6)
    off = 2 * away + away.square() + gamma * (1 + away).square()
    off = off + 6 * fmt.cast(radius).item() / radius + 4 * (d + EXTRA) * fmt.smallest * (1 + 1 / radius**2)
    t = inverse_root_error(off, fmt)
    ratio = centred.low / radius
    if isinstance(module, SmoothProject):
        factor = (1 + ratio.square()).rsqrt()
    else:
        factor = ratio.clamp_min(1).reciprocal()
    peak = (centred.high + l2_norm(centred.error, -1, keepdim=True)).square() * max(1.0, 1 / radius**2)
    peak = torch.maximum(peak, torch.full_like(peak, max(radius**2, radius**-2)))
    arranged = partial(by_group, node.shape, module.groups) if grouped else torch.flatten
    affine = [size_and_cast(part, fmt, arranged) for part in (module.weight, module.bias)]
    none, whole = torch.zeros_like(factor), centred.size + centred.error
    error = normalised_rounding(whole, none, centred.size, centred.error, factor, t, affine, fmt, radius, roundings=3)
    error = fmt.safe(error, peak.expand_as(error))
    return error.reshape(x.nominal.shape) if grouped else error.movedim(-1, axis)


def _tokens(node: Node, values: Mapping[Node, Tensor]) -> tuple[Tensor, bool, float, float, Tensor]:
    """The tokens of a projection or its secants, and how they are normalised: the arguments of :func:`normalising`."""
    module: Any = node.args[2] if node.name == "secant_project" else node.function
    x, radius = values[node.operands[0]], float(module.radius)
    if isinstance(module, (GroupLayerProject, GroupSmoothProject)):
        x = x.reshape(*x.shape[:2], module.groups, -1)
    elif module.channels_first:
        x = x.movedim(2, -1)
    return x, module.centred, radius, radius, module.weight


@jacobian(LayerProject, RmsLayerProject, GroupLayerProject, secant_project)
def projection_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """Tokens, or groups of channels, divided by their length and multiplied by at most the radius."""
    return normalising(*_tokens(node, values))


def smooth_projection_norm(node: Node, place: int, values: Mapping[Node, Tensor]) -> Tensor | float:
    """A smooth projection is R c/√(‖c‖² + R²)."""
    return normalising_norm(*_tokens(node, values))


jacobian(SmoothProject, RmsSmoothProject, GroupSmoothProject, norm=smooth_projection_norm)(projection_jacobian)
