"""Secants at kinks: an operation with a kink, linearised with a slope between those of the two sides.

The anchored certificate holds for any linear maps A_v in place of the Jacobians: f(h + Δ) = f(h) + A Δ + R defines R.
The Jacobian uses the slope of one side of a kink. For max(z, 0) at z = 0 it gives |R| ≤ |δ|; the slope ½ gives ½|δ|.
For |δ| ≤ w the best slope at z is that of the secant from z − w to z + w, or the derivative if the kink is further away
than w. Linear relaxations of ReLU that depend on the range of z use the same observation (Zhang et al. 2018, CROWN).
Every width w ≥ 0 gives a valid R for every δ; w = 0 gives the Jacobian.

**One entry.** Let k = |z| and η = (w − k)₊/(2w). The secant slope is 1 − η if z > 0 and η if z < 0. So
R(δ) = max(z + δ, 0) − max(z, 0) − slope · δ has the slope ±η up to the kink and ∓(1 − η) beyond it. For |δ| ≤ p

    |R| ≤ κ(p)|δ|,   κ(p) = max(η, 1 − η − k/p),        |R| ≤ κ(p)p.

R is negative at most as far as the kink, where it is −ηk: −R ≤ η min(|δ|, k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipcert.numerics import l2_norm


def eta(distance: Tensor, width: Tensor) -> Tensor:
    """η for entries at distances k from their kinks."""
    return torch.where(width > 0, (width - distance).clamp_min(0) / (2 * width), 0.0)


class Bend:
    """κ of the module docstring for entries at distances k, shape (N, entries), and widths (N, 1)."""

    def __init__(self, distance: Tensor, width: Tensor):
        self.k, self.far = distance, eta(distance, width)

    def slope(self, p: Tensor) -> Tensor:
        """κ(p), shape (N, entries), for p of that shape or (N, 1)."""
        return torch.maximum(self.far, 1 - self.far - torch.where(p > 0, self.k / p, 0.0))

    def norm(self, rho: Tensor, p: Tensor) -> Tensor:
        """Bound on ‖R‖ for ‖δ‖ ≤ ρ, shape (N,), and |δ_i| ≤ p."""
        slope = self.slope(p)
        return torch.minimum(slope.amax(1) * rho, l2_norm(slope * p, 1))

    def against(self, g: Tensor, rho: Tensor, p: Tensor) -> Tensor:
        """Bound on −Σ g_i R_i."""
        above, below = (-g).clamp_min(0) * self.slope(p), g.clamp_min(0) * self.far
        rising = torch.minimum(l2_norm(above, 1) * rho, (above * p).sum(1))
        falling = (below * torch.minimum(p, self.k)).sum(1)
        return torch.minimum(l2_norm(above + below, 1) * rho, rising + falling)
