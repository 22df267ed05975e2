"""Remainders of piecewise linear operations: bounds that several rules share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._remainder import (
    ROUNDED,
    Against,
    Remainder,
    each_entry,
    largest_share,
    per_image,
    remainder,
)
from lipcert.graph import Node
from lipcert.numerics import at_most, l2_norm, over, power_of_two, sum_squares, times

# More than the rounding error of a difference, relative to what is subtracted from.
_NOISE = 1e-14
# The grid of multipliers in units of the largest weight: 2^(i/_FINE) for |i| ≤ _SPAN.
_FINE, _SPAN, _STEPS = 4, 256, 6


class PiecewiseLinear(Remainder):
    """Piecewise linear functions with a breakpoint at distance k_i from entry i: |R_i| ≤ s·(|δ_i| − k_i)₊.

    Norm: (|δ_i| − k_i)₊² ≤ (1 − k_i/p_i)₊² δ_i² if |δ_i| ≤ p_i, and :func:`largest_share` bounds the sum.
    Against g, |⟨g, R⟩| ≤ s Σ |g_i| (|δ_i| − k_i)₊, see :func:`beyond`.

    A convex function lies above its linearisation, because the slope is a subgradient, at breakpoints too. So R_i ≥ 0,
    and only entries with g_i < 0 count; for a concave function only those with g_i > 0.

    Attributes:
        slope: s, the change of the slope at a breakpoint.
        convexity: 1 for convex functions, −1 for concave ones, 0 otherwise.
        spread: Σ δ_i² ≤ spread² ρ² for the deviations δ_i in the bounds above.
    """

    nonsmooth = True
    slope = 1.0
    convexity = 0
    spread = 1.0

    def __init__(self, distance: Tensor):
        self.distance = per_image(distance)

    def uncertain(self, noise: Tensor) -> Tensor:
        """Whether an entry is as near to its breakpoint as twice the errors, but not at it.

        At a breakpoint the bounds hold for the slopes of both sides, so another evaluation may lie on either side.
        """
        limit = 2 * self.spread * noise[:, None]
        return ((self.distance > 0) & (self.distance <= limit)).any(1)

    def _reach(self, rho: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Bounds on ‖δ‖, shape (N,), and on all |δ_i|, shape (N, entries) or (N, 1)."""
        total = self.spread * rho[0]
        return total, each_entry(rho) if self.entrywise else total[:, None]

    def _against(self, direction: Tensor) -> Tensor:
        """The weights of the entries, shape (N, entries)."""
        g = self.slope * per_image(direction)
        return (-self.convexity * g).clamp_min(0) if self.convexity else g.abs()

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        total, most = self._reach(rho)
        crossing = (1 - over(self.distance, most)).clamp_min(0)
        share = largest_share(crossing.square(), torch.ones_like(total), over(most, total[:, None]))
        return self.slope * times(share.sqrt(), total)

    def against(self, direction: Tensor) -> Against:
        weight = self._against(direction)
        return lambda rho: beyond(weight, self.distance, *self._reach(rho))


class PiecewiseLinearEntries(PiecewiseLinear):
    """Functions of single entries; ``breakpoints(node)`` are numbers or tensors. Total: as against −w."""

    entrywise = True
    breakpoints: Callable[[Node], Iterable[Any]] = staticmethod(lambda node: (0.0,))

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        z = operands[0]
        distance = torch.full_like(z, math.inf)
        for point in self.breakpoints(node):
            distance = torch.minimum(distance, (z - torch.as_tensor(point, dtype=torch.float64)).abs())
        super().__init__(distance)

    def total(self, weight: Tensor, rho: Sequence[Tensor], size: Tensor | None = None) -> Tensor:
        return beyond(self.slope * weight, self.distance, *self._reach(rho))


def piecewise(
    *targets: Any, breakpoints: Callable[[Node], Iterable[Any]], slope: float = 1.0, convexity: int = 0
) -> None:
    """Registers piecewise linear functions of single entries."""
    facts = {"__doc__": PiecewiseLinearEntries.__doc__, "breakpoints": staticmethod(breakpoints), "slope": slope}
    remainder(*targets)(type("PiecewiseLinearEntries", (PiecewiseLinearEntries,), facts | {"convexity": convexity}))


def beyond(weight: Tensor, distance: Tensor, rho: Tensor, most: Tensor) -> Tensor:
    """An upper bound on Σ w_i (τ_i − k_i)₊ over 0 ≤ τ_i ≤ most_i with Σ τ_i² ≤ ρ², shape (N,).

    For every λ ≥ 0 the sum is at most λ ρ² + Σ_i max_τ (w_i (τ − k_i)₊ − λ τ²), by Lagrangian duality. The maximum is 0
    or taken at τ = min(w_i/(2λ), most_i). The sum is convex in λ. It is minimised over the λ of a fixed grid, 0, and
    the λ from which on all maxima are 0, so that the bound is non-decreasing in ρ and ``most``.
    """
    reaches = (distance < most) & ~(weight <= 0)
    used = reaches.any(0)
    if not bool(used.any()):
        return torch.zeros_like(rho)
    weight, distance = torch.where(reaches, weight, 0.0)[:, used], distance[:, used].abs()  # 0 in place of −0
    most = most.expand(len(reaches), reaches.shape[1])[:, used]
    reached = at_most(weight * (most - distance).clamp_min(0)).sum(1)
    # In units of max w and of a power of two near ρ no square leaves float64's range, and the grid of λ is the same.
    scale, unit = weight.amax(1), power_of_two(rho)
    weight = torch.where(scale[:, None] > 0, weight / scale[:, None], 0.0)
    length = torch.where(rho.isfinite(), rho, 1.0) / unit
    most = torch.minimum(most / unit[:, None], length[:, None])
    distance = (distance / unit[:, None]).clamp_max(2.0)

    def value(place: Tensor) -> tuple[Tensor, Tensor]:
        """The bound for the λ at a place of the grid, and its derivative by λ."""
        multiplier = torch.exp2(place / _FINE)[:, None]
        tau = torch.minimum(weight / (2 * multiplier), most)
        # τ − k may cancel; the last term is more than its rounding error.
        gained = weight * (tau - distance) - multiplier * tau.square() + _NOISE * weight * tau
        absorbed = sum_squares(torch.where(gained > 0, tau, 0.0), 1)
        return multiplier[:, 0] * length.square() + gained.clamp_min(0).sum(1), length.square() - absorbed

    # The derivative is not negative from λ = ‖w‖/(2ρ) on.
    high = (_FINE * torch.log2(over(l2_norm(weight, 1), 2 * length))).clamp(-_SPAN, _SPAN).ceil()
    low = high - 2**_STEPS
    with torch.no_grad():
        for _ in range(_STEPS):
            middle = (low + high) / 2
            rising = value(middle)[1] >= 0
            # Convex in λ: where the derivative is not negative, the minimum lies at or below the middle.
            low, high = torch.where(rising, low, middle), torch.where(rising, middle, high)
    # From the largest (τ − k)/τ² · w on, every maximum is 0.
    steepest = torch.where(
        most < 2 * distance, over((most - distance).clamp_min(0), most.square()), over(0.25, distance)
    )
    alone = times(weight, steepest).amax(1) * length.square()
    best = torch.minimum(torch.minimum(value(low)[0], value(high)[0]), at_most(alone))
    best = times(times(best, scale), unit).where(rho.isfinite(), torch.full_like(rho, math.inf))
    return at_most(torch.minimum(best, reached) * (1 + ROUNDED))
