"""Kinks by secants: an operation with a kink, linearised with a slope between those on its two sides.

The anchored certificate holds for any linear maps A_v in place of the Jacobians: f(h + Δ) = f(h) + A Δ + R defines R.
Of a kink near h the Jacobian knows one side only. For max(z, 0) at z = 0 it leaves |R| ≤ |δ|; slope ½ leaves ½|δ|. For
|δ| ≤ w the best slope at z is that of the secant from z − w to z + w, clipped where the kink is further away than w.
Linear relaxations of ReLU that depend on the range of z (Zhang et al. 2018, CROWN) rest on the same observation. Any w
≥ 0 gives a valid R, for any δ; w = 0 gives the Jacobian.

**One entry.** Let k = |z| and η = (w − k)₊/(2w): the slope is 1 − η on the side where z lies and η on the other. So
R(δ) = max(z + δ, 0) − max(z, 0) − slope · δ has slopes ±η until the kink and ∓(1 − η) behind it. For |δ| ≤ p

    |R| ≤ κ(p)|δ|,   κ(p) = max(η, 1 − η − k/p),        |R| ≤ κ(p)p,

and R falls until the kink alone, where it is −ηk: −R ≤ η min(|δ|, k).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import remainder, secant
from lipcert.bounds._remainder import Against, per_image
from lipcert.graph import Node
from lipcert.surgery import LayerProject, RmsLayerProject

_TINY = 1e-300
_ROUNDED = 1e-15  # more than the difference of two numbers up to 1 loses in float64


@secant("relu")
def secant_relu(z: Tensor, width: Tensor) -> Tensor:
    """max(z, 0) with the slope (1 + z/w)/2 for |z| < w."""
    far = _far(z.abs(), width)
    slope = torch.where(z > 0, 1 - far, far).detach()
    return torch.relu(z).detach() + slope * (z - z.detach())


def _negative_slope(node: Node) -> tuple[float]:
    return (float(arguments(node).get("negative_slope", 0.01)),)


@secant("leaky_relu", rest=_negative_slope)
def secant_leaky_relu(z: Tensor, width: Tensor, negative_slope: float) -> Tensor:
    """negative_slope · z + (1 − negative_slope) max(z, 0), likewise."""
    return negative_slope * z + (1 - negative_slope) * secant_relu(z, width)


@secant(LayerProject, RmsLayerProject, rest=lambda node: (node.function,))
def secant_project(x: Tensor, width: Tensor, module: Any) -> Tensor:
    """A projection onto a ball; along h with the slope of min(n, R) at n = ‖h‖, taken as above."""
    rows = module.rows(x)
    h = rows - rows.mean(-1, keepdim=True) if module.centred else rows
    square = h.detach().square().sum(-1, keepdim=True)
    length = square.clamp_min(_TINY).sqrt()
    far = _far((module.radius - length).abs(), width)
    across = module.radius / torch.maximum(length, module.radius)
    along = torch.where(length < module.radius, 1 - far, far)
    unit = h.detach() / length
    turned = unit * (unit * (h - h.detach())).sum(-1, keepdim=True)
    out = (across * h + (along - across) * turned) * module.weight
    if module.bias is not None:
        out = out + module.bias
    return out.movedim(-1, 1) if module.channels_first else out


def _far(distance: Tensor, width: Tensor) -> Tensor:
    """η for entries at distances k from their kinks."""
    return (width - distance).clamp_min(0) / (2 * width).clamp_min(_TINY)


class Bend:
    """κ of the head of this file for entries at distances k, shape (N, entries), and widths (N, 1)."""

    def __init__(self, distance: Tensor, width: Tensor):
        self.k, self.far = distance, _far(distance, width)

    def slope(self, p: Tensor) -> Tensor:
        """κ(p), shape (N, entries), for p of that shape or (N, 1)."""
        return torch.maximum(self.far, 1 - self.far - self.k / p.clamp_min(_TINY))

    def norm(self, rho: Tensor, p: Tensor) -> Tensor:
        """Bound on ‖R‖ for ‖δ‖ ≤ ρ, shape (N,), and |δ_i| ≤ p."""
        slope = self.slope(p)
        return torch.minimum(slope.amax(1) * rho, (slope * p).norm(dim=1))

    def against(self, g: Tensor, rho: Tensor, p: Tensor) -> Tensor:
        """Bound on −Σ g_i R_i."""
        above, below = (-g).clamp_min(0) * self.slope(p), g.clamp_min(0) * self.far
        rising = torch.minimum(above.norm(dim=1) * rho, (above * p).sum(1))
        falling = (below * torch.minimum(p, self.k)).sum(1)
        return torch.minimum((above + below).norm(dim=1) * rho, rising + falling)


@remainder(secant_relu)
class SecantRelu:
    """Entry by entry; the slope changes by 1."""

    entrywise = True
    jump = 1.0

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        z, width = operands
        self.bend = Bend(per_image(z).abs(), per_image(width))

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return abs(self.jump) * self.bend.norm(rho[0], rho[-1][:, None])

    def against(self, direction: Tensor) -> Against:
        g = self.jump * per_image(direction)
        return lambda rho: self.bend.against(g, rho[0], rho[-1][:, None])


@remainder(secant_leaky_relu)
class SecantLeakyRelu(SecantRelu):
    """The slope changes by 1 − negative_slope."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(node, operands, result)
        self.jump = 1 - node.args[2]


@remainder(secant_project)
class SecantProjection:
    """weight ∘ u(h) with u(h) = min(‖h‖, R) ĥ: slope s of the secant along h, and min(n, R)/n across, n = ‖h‖.

    For one token let a = ⟨ĥ, Δ⟩, b the length of the rest of Δ, n' = ‖h + Δ‖ = n + e, μ = min(n, R), μ' = min(n', R).
    As ĥ' = ((n + a)ĥ + Δ_⊥)/n', R has the part μ'(n + a)/n' − μ − s a along ĥ and (μ'/n' − μ/n)Δ_⊥ across it. Let q =
    n' − (n + a) = b²/(n' + n + a) ≥ 0, so e = a + q. The first part is g + q(s − μ'/n') with g = μ' − μ − s e, the
    remainder of one entry at R − n that moves by |e| ≤ ρ_t; and s and μ'/n' lie in [0, 1]. min(1, R/n) has slopes of at
    most 1/R, so the second is at most b|e|/R. With D = min(R, n − ρ) > 0: q ≤ b²/(2D), and ‖(b²/(2D), b|a|/D)‖ ≤
    ρ_t²/(√3 D), largest at b² = ⅔ρ_t². Together, with g along ĥ,

        ‖R_t‖ ≤ |g| + c_t ρ_t²,    c_t = 1/(√3 D) + ρ/(2D²).

    A token with n + ρ ≤ R and n ≤ R − w has R = 0. One with n − ρ ≥ R and n ≥ R + w stays outside, where u = Rĥ has
    second derivatives of at most (2/√3)R/(n − ρ)² (:class:`~lipcert.bounds._remainder.Radial`): g = 0, c_t = R/(√3 (n −
    ρ)²). And always ‖R_t‖ ≤ 2ρ_t, for u and its linearisation have constant 1.

    Tokens together: ‖(|g_t|)_t‖ as for entries, Σ ρ_t⁴ ≤ ρ⁴; and against a direction d with parts d_t, g counts with
    ⟨d_t, ĥ_t⟩, the rest with ‖d_t‖. As min(n, R) = n − max(n − R, 0), g is −1 times the remainder of max(·, 0). Where
    it is known how far tokens move along themselves, :class:`Crossing` may be less.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        self.module = module = _module(node)
        self.radius = float(module.radius)
        h = self._rows(operands[0])
        if module.centred:
            h = h - h.mean(-1, keepdim=True)
        self.length = h.norm(dim=-1)
        self.unit = h / self.length[..., None].clamp_min(_TINY)
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
        low = (self.length - rho).clamp_min(_TINY)
        least = low.clamp_max(self.radius)
        near = 1 / (math.sqrt(3) * least) + rho / (2 * least.square()).clamp_min(_TINY)
        beyond = self.radius / (math.sqrt(3) * low.square()).clamp_min(_TINY)
        inside = (self.length + rho <= self.radius) & (self.length + self.width <= self.radius)
        outside = (low >= self.radius) & (self.length - self.width >= self.radius)
        return torch.where(inside, 0.0, torch.where(outside, beyond, near))

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        moved = rho[0]
        bent = self.bend.norm(moved, moved[:, None]) + self._curvature(moved).amax(1) * moved.square()
        bound = torch.minimum(bent, 2 * moved)
        if len(rho) > 1:
            bound = torch.minimum(bound, Crossing(self.length, self.radius, self.bend, rho).norm())
        return self.weight.abs().max() * bound

    def against(self, direction: Tensor) -> Against:
        d = self._rows(direction) * self.weight
        along = (d * self.unit).sum(-1)
        size = d.norm(dim=-1)

        def bound(rho: Sequence[Tensor]) -> Tensor:
            moved = rho[0]
            curved = (size * self._curvature(moved)).amax(1) * moved.square()
            bent = self.bend.against(-along, moved, moved[:, None]) + curved
            found = torch.minimum(bent, 2 * size.norm(dim=1) * moved)
            if len(rho) > 1:
                crossing = Crossing(self.length, self.radius, self.bend, rho)
                found = torch.minimum(found, crossing.against(size, along))
            return found

        return bound


class Crossing:
    """What :class:`SecantProjection` leaves where ‖(a_t)_t‖ ≤ α and |a_t| ≤ p: kinks are crossed by far fewer tokens.

    With m = n − p > 0: n' ≥ n + a ≥ m, so q ≤ b²/(2m) and |e| ≤ min(p + ρ²/(2m), ρ). Over the tokens of any set ‖e‖ is
    at most η = min(α + max ρ²/(2m), ρ), because ‖q‖₂ ≤ Σ q_t and Σ b_t² ≤ ρ². For g only tokens with κ > 0 at their e
    count.

    The second term, q(s − μ'/n'), lies between −q(min(1, R/(n − e)) − s)₊ and q(s − min(1, R/(n + e)))₊ for the largest
    e, and sums over tokens Σ q_t w_t are at most max(w/(2m)) ρ². The part across is at most Φ b|e|, with Φ = R/max(R,
    n − e)² where the token can be outside and 0 elsewhere. Its sum Σ ‖d_t‖Φ b|e| is at most min(max(‖d_t‖Φ) η,
    ‖(‖d_t‖Φe)_t‖) ρ, with η over tokens with Φ > 0; in norm it is at most max(Φ e) ρ, orthogonal to the rest.

    Args:
        n: lengths of the tokens, shape (N, tokens).
        radius: R.
        bend: of the kinks at R, with the slopes.
        rho: ρ, α and p, each of shape (N,).
    """

    def __init__(self, n: Tensor, radius: float, bend: Bend, rho: Sequence[Tensor]):
        self.rho, self.along, peak = rho
        self.bend = bend
        rest = n * (1 - 1e-12) - peak[:, None]
        self.turned = torch.where(rest > 0, self.rho[:, None] ** 2 / (2 * rest), math.inf)
        self.moved = torch.minimum(peak[:, None] + self.turned, self.rho[:, None])
        low, high = (n - self.moved).clamp_min(_TINY), n + self.moved
        slope = torch.where(n < radius, 1 - bend.far, bend.far)
        inside = (high <= radius) & (bend.far <= 0)
        self.above = torch.where(inside, 0.0, ((radius / low).clamp_max(1) - slope).clamp_min(0) + _ROUNDED)
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
        """Bound on ‖R‖ without the module's weight; ∞ where nothing is known."""
        along = self.bend.norm(self.crossing, self.moved) + self._straightened(torch.maximum(self.above, self.below))
        return torch.hypot(along, (self.aside * self.moved).amax(1) * self.rho)

    def against(self, size: Tensor, along: Tensor) -> Tensor:
        """Bound on −Σ ⟨d_t, R_t⟩ for parts of these norms, and these components along the tokens, each (N, tokens)."""
        straightened = self._straightened(along.clamp_min(0) * self.above + (-along).clamp_min(0) * self.below)
        across = size * self.aside
        aside = torch.minimum(across.amax(1) * self.outside, (across * self.moved).norm(dim=1)) * self.rho
        return self.bend.against(-along, self.crossing, self.moved) + straightened + aside


def _module(node: Node) -> Any:
    """The projection, of a secant or by itself."""
    return node.function if isinstance(node.function, nn.Module) else node.args[2]
