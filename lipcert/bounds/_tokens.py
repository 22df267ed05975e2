"""Normalisations and projections of tokens: one description, from which remainders and bounds on Jacobians follow.

A token is a group of n entries; c is the token, centred or not. The operation is

    weight ∘ scale · c/s + bias,    s = √(‖c‖² + R²), or s = max(‖c‖, R) if it is nonsmooth.

LayerNorm, RMSNorm and GroupNorm have R = √(n·eps) and scale √n; smooth projections onto the ball of radius R have
scale R; projections and ``normalize`` are nonsmooth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._jacobian import Bounds, gamma
from lipcert.bounds._piecewise import PiecewiseLinear
from lipcert.bounds._registry import NoAnswer, jacobian, key_of
from lipcert.bounds._remainder import ROUNDED, Against, Contracted, Form, Remainder, per_image, remainder
from lipcert.graph import Node
from lipcert.numerics import UNIT, computed_l2_norm, l2_norm, over, times, unit_vectors


@dataclass(frozen=True)
class Tokens:
    """How an operation normalises tokens; see the module docstring.

    Attributes:
        rows: (N, *shape) ↦ the tokens along the last axis, (N, ..., n).
        back: the inverse.
        arranged: arranges a constant of the channels to broadcast with the tokens.
        centred: whether c is the token minus its mean.
        radius, scale: R and the scale.
        weight, bias: as the operation holds them, or None.
        nonsmooth: whether s is the maximum.
    """

    rows: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]
    arranged: Callable[[Tensor], Tensor]
    centred: bool
    radius: float
    scale: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    nonsmooth: bool = False

    @property
    def largest(self) -> float:
        """max|weight|."""
        return 1.0 if self.weight is None else self.weight.detach().abs().max().item()

    def centre(self, rows: Tensor) -> Tensor:
        """c."""
        return rows - rows.mean(-1, keepdim=True) if self.centred else rows


Arrangement = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def along(axis: int) -> Arrangement:
    """Tokens along one axis of values with the image axis in front."""
    return lambda x: x.movedim(axis, -1), lambda x: x.movedim(-1, axis), torch.flatten


def over_last(shape: tuple[int, ...], dims: int) -> Arrangement:
    """Tokens over the last axes."""
    return lambda x: x.flatten(-dims), lambda x: x.reshape(len(x), *shape), torch.flatten


def of_groups(shape: tuple[int, ...], groups: int) -> Arrangement:
    """Groups of channels with all positions."""

    def arranged(constant: Tensor) -> Tensor:
        channels = constant.reshape(1, -1, *[1] * (len(shape) - 2))
        return channels.expand(1, *shape[1:]).reshape(groups, -1)

    return lambda x: x.reshape(len(x), shape[0], groups, -1), lambda x: x.reshape(len(x), *shape), arranged


_TOKENS: dict[Any, Callable[[Node], Tokens]] = {}


def tokens_of(node: Node) -> Tokens:
    """The description of a captured operation."""
    return _TOKENS[node.op](node)


def normalises(
    *targets: Any, nonsmooth: bool = False
) -> Callable[[Callable[[Node], Tokens]], Callable[[Node], Tokens]]:
    """Registers an operation as a normalisation, with the answers that follow: remainder and Jacobian."""

    def register(describe: Callable[[Node], Tokens]) -> Callable[[Node], Tokens]:
        _TOKENS.update(dict.fromkeys(map(key_of, targets), describe))
        remainder(*targets)(RadialProjection if nonsmooth else Radial)
        jacobian(*targets, norm=normalising_norm)(normalising)
        return describe

    return register


def normalising(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """|J| is at most the sum of the absolute values of its terms, of norm at most 3 max|weight| scale/s.

    The rounding errors of c and s relative to s grow with the token's norm divided by s. They enter J twice as a
    factor, up to 8 in total.
    """
    tokens = tokens_of(node)
    rows = tokens.rows(values[node.operands[0]])
    length = l2_norm(rows, -1)
    centred = computed_l2_norm(tokens.centre(rows), -1) if tokens.centred else length
    # The norm of the exact centred token is at least this.
    centred = (centred - gamma(4 * rows.shape[-1]) * length).clamp_min(0)
    least = torch.full_like(centred, tokens.radius)
    short = over(1.0, torch.maximum(centred, least) if tokens.nonsmooth else torch.hypot(centred, least))
    # J is scale/s times weight ∘ (I − 11ᵀ/n − ccᵀ/s²), without the last inside a ball: terms of norm at most 1 each.
    gain = 3 * tokens.scale * tokens.largest * per_image(short)
    worse = gain * (1 + 8 * per_image((length * short).square() if tokens.centred else torch.ones_like(short)))
    return gain.amax(1), gamma(8 * rows.shape[-1]) * worse.amax(1)


def normalising_norm(node: Node, place: int, values: Mapping[Node, Tensor]) -> Tensor | float:
    """J = (scale/s) diag(weight)(I − ccᵀ/s²)C, or (scale/s) diag(weight)C inside a ball; the projection C centres.

    ‖c‖ ≤ s, so ‖I − ccᵀ/s²‖ ≤ 1, and ‖J‖ ≤ max|weight| scale/s: a third of the bound on ‖|J|‖.
    """
    return normalising(node, place, values)[0] * ((1 + 1e-12) / 3)


class Radial(Remainder):
    """weight ∘ gain · u(h) with u(h) = h/√(1 + ‖h‖²/R²), on tokens h, centred or not: LayerNorm, SmoothProject.

    √d h/√(‖h‖² + d·eps) has this form with R = √(d·eps) and gain √d/R.

    Second derivative: let R = 1, n = ‖h‖, and let the unit vector v have the squared cosine a with h. Then D²u[v, v]
    has norm n w³ √((1 + qa)² + 4a(1 − a)) with w² = 1/(1 + n²) and q = 3w² − 1. The quadratic in a is largest at
    a = 1/(2 − q) if q ≤ 1, with the value 4/(2 − q), else at a = 1. So ‖D²u‖ = (2/√3)/(1 + n²) for n² ≥ ½ and
    3n(1 + n²)^(−5/2) for n² ≤ ½. It increases up to n = ½, where it is below 0.858651, and decreases after that. For a
    general R it is 1/R times its value at n = ‖h‖/R. The remainder of a token is at most ½ρ_t² times the largest value
    on the segment, on which ‖h‖ changes by at most ρ. Centring does not enlarge a deviation.

    Norm: Σ_t ‖R_t‖² ≤ (max_t ½c_t)² ρ⁴. Against g: Σ_t ‖g_t‖ ½c_t ρ_t² ≤ ½ max_t(‖g_t‖ c_t) ρ².

    Contracted, second order: let R = 1, and let a = weight ∘ g_t, centred if tokens are, have the component α along
    n̂ = h/‖h‖ and the component b ≥ 0 along a unit vector e orthogonal to n̂. The matrix of −⟨a, D²u⟩ is
    w³(h aᵀ + a hᵀ) + w³αn I − 3w⁵αn hhᵀ. On the plane of n̂ and e it is ((3αn w⁵, w³nb), (w³nb, w³αn)); on the
    orthogonal complement it is w³αn. Let λ be the larger eigenvalue of the 2 × 2 matrix, with the unit vector v, and
    μ = max(w³αn, 0). The matrix is at most μI + max(λ − μ, 0)vvᵀ, because the smaller eigenvalue is at most each
    diagonal entry, so at most μ. M is the square root of half of that.

    Contracted, third order: u is the gradient of ψ = √(1 + ‖h‖²), so D³u is the symmetric form D⁴ψ, whose norm is that
    of v ↦ D⁴ψ[v, v, v, v] (Banach, Studia Math. 7, 1938). On a line at distance √(c² − 1) from 0, at the position p,
    ψ = √(c² + p²) has the fourth derivative 3c²(4p² − c²)/(c² + p²)^(7/2), with c² + p² = 1 + n². With c² = ξ(1 + n²)
    that is 3ξ(4 − 5ξ)(1 + n²)^(−3/2), and |ξ(4 − 5ξ)| ≤ 1 for 0 ≤ ξ ≤ 1. So ‖D³u‖ ≤ 3(1 + n²)^(−3/2), and 1/R² times
    that for a general R. By Taylor's theorem the rest of −⟨g, R⟩ is at most Σ_t ‖a_t‖ sup ‖D³u‖ ρ_t³/6. If the computed
    h has an error η ≤ ρ, D²u has an error of at most sup ‖D³u‖ η.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        self.tokens = tokens_of(node)
        if not self.tokens.radius > 0:
            raise NoAnswer("eps = 0")
        self.radius, self.gain = self.tokens.radius, self.tokens.scale / self.tokens.radius
        self.scale = self.gain / self.radius
        self.weight: Tensor | None = None
        if self.tokens.weight is not None:
            shape = self.tokens.rows(operands[0]).shape[1:]
            self.weight = self.tokens.arranged(self.tokens.weight.detach().double()).expand(shape).flatten(0, -2)
        rows = self._rows(operands[0])
        self.n = self.tokens.centre(rows) / self.radius
        self.length = computed_l2_norm(self.n, -1)  # (N, tokens): n of every token
        self.hidden = 4 * (rows.shape[-1] + 16) * UNIT  # the relative rounding error of a centred token
        self.lost = self.hidden * l2_norm(rows, -1).amax(1)

    def _rows(self, tensor: Tensor) -> Tensor:
        """(N, tokens, entries)."""
        return self.tokens.rows(tensor).flatten(1, -2)

    def _curvature(self, rho: Tensor) -> Tensor:
        low = (self.length - rho[:, None] / self.radius).clamp_min(0)
        high = self.length + rho[:, None] / self.radius

        def at(n: Tensor) -> Tensor:
            return torch.where(n**2 >= 0.5, 2 / math.sqrt(3) / (1 + n**2), 3 * n * (1 + n**2) ** -2.5)

        worst = torch.where(low >= 0.5, at(low), torch.where(high <= 0.5, at(high), 0.858651))
        return worst * self.scale

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return self.tokens.largest * self._curvature(rho[0]).amax(1) / 2 * rho[0] ** 2

    def against(self, direction: Tensor) -> Against:
        size = l2_norm(self._against(direction), -1)
        return lambda rho: (size * self._curvature(rho[0])).amax(1) / 2 * rho[0] ** 2

    def _against(self, direction: Tensor) -> Tensor:
        """weight ∘ g_t for every token, shape (N, tokens, entries)."""
        rows = self._rows(direction)
        return rows if self.weight is None else rows * self.weight

    def contracted(self, direction: Tensor, rho: Sequence[Tensor], likely: Tensor | None = None) -> Contracted | None:
        whole = self._against(direction)
        a, lost = self.tokens.centre(whole), self.hidden * l2_norm(whole, -1, keepdim=True)
        slope = l2_norm(a, -1, keepdim=True) + lost
        n, length = self.n, self.length[..., None]
        w = (1 + length.square()).rsqrt()
        unit = unit_vectors(n)
        along = (a * unit).sum(-1, keepdim=True)
        across = a - along * unit
        aside = l2_norm(across, -1, keepdim=True)
        first, mixed, other = 3 * along * length * w**5, w**3 * length * aside, along * length * w**3
        half = (first - other) / 2
        root = torch.hypot(half, mixed)
        # The eigenvector of the larger eigenvalue, by a formula without cancellation.
        parallel = torch.where(half >= 0, half + root, mixed)
        perpendicular = torch.where(half >= 0, mixed, root - half)
        v = unit_vectors(parallel * unit + perpendicular * unit_vectors(across))
        base = other.clamp_min(0) + ROUNDED * slope * length * w**3 + lost  # ‖D²u‖ < 1
        top = torch.maximum((first + other) / 2 + root, base) * (1 + ROUNDED)
        base, top = ((self.scale / 2 * part).sqrt() for part in (base, top))

        def apply(deviation: Tensor, base: Tensor, more: Tensor, v: Tensor) -> Tensor:
            moved = self.tokens.centre(self._rows(deviation))
            return base * moved + more * v * (v * moved).sum(-1, keepdim=True)

        third = times(slope[..., 0], torch.full_like(slope[..., 0], 3 * self.scale / self.radius))

        def bound(
            rho: Sequence[Tensor], sizes: Sequence[Tensor], length: Tensor, third: Tensor, lost: Tensor
        ) -> Tensor:
            low = (length - rho[0][:, None] / self.radius).clamp_min(0)
            # w³ρ² would underflow for R below 1e-50.
            w = (1 + low.square()).rsqrt()
            steepest = (third * w * (w * rho[0][:, None]).square()).amax(1)
            return sizes[0].square() + steepest * (rho[0] / 6 + lost / 2)

        norm = per_image(top).amax(1)
        form = Form(apply, (base, top - base, v), norm, 2 * norm)
        return Contracted((form,), bound, (self.length, third, self.lost))


class RadialProjection(Radial):
    """weight ∘ gain · u(h) with u(h) = h·min(1, R/‖h‖), the projection onto a ball, nonsmooth on the sphere.

    J is I inside and (R/‖h‖)(I − ĥĥᵀ) outside. Both are symmetric and between 0 and I, so ‖J(h') − J(h)‖ ≤ 1 always.
    With k = |‖h‖ − R|, the first part of the segment h + sΔ, of length k, stays on one side. Inside, J does not change
    on it. Outside, J changes by at most c ≤ (2/√3) R/max(‖h‖ − ρ, R)² per unit of length, as in :class:`Radial` with
    1/‖h‖² in place of 1/(1 + ‖h‖²). Integrating ‖J(h + sΔ) − J(h)‖ ‖Δ‖ over the segment gives ‖R_t‖ ≤ ½ c ρ_t² +
    (ρ_t − k)₊. The first part is summed over tokens as in :class:`Radial`, the second as in :class:`PiecewiseLinear`.
    """

    contracted = Remainder.contracted  # where it is nonsmooth there is no quadratic form
    nonsmooth = True

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(node, operands, result)
        self.distance = (self.length - 1).abs() * self.radius  # from the sphere

    def uncertain(self, noise: Tensor) -> Tensor:
        return PiecewiseLinear(self.distance).uncertain(noise + self.lost)

    def _curvature(self, rho: Tensor) -> Tensor:
        low = (self.length - rho[:, None] / self.radius).clamp_min(1)
        return torch.where(self.length >= 1, 2 / math.sqrt(3) / low**2, 0.0) * self.scale

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return super().norm(rho) + self.tokens.largest * self.gain * PiecewiseLinear(self.distance).norm(rho)

    def against(self, direction: Tensor) -> Against:
        curved = super().against(direction)
        piecewise = PiecewiseLinear(self.distance).against(l2_norm(self._against(direction), -1))
        return lambda rho: curved(rho) + self.gain * piecewise(rho)
