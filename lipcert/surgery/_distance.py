"""The Lipschitz constant of L2 attention, with its proof.

**The map.** Tokens y_1 … y_N ∈ ℝ^d, τ > 0 (1/√d), additive bias b:

    g_i = Σ_k P_ik y_k,    P_ik = exp(−t_ik + b_ik) / Σ_l exp(−t_il + b_il),    t_ik = τ‖y_i − y_k‖².

We derive an L with ‖∂g/∂y‖₂ ≤ L at every y. Let β_ik = exp(b_ik − b_ii) for k ≠ i (all 1 without bias, 0 under a mask
of −∞) and B_i = Σ_{k≠i} β_ik. Then P_ik = β_ik e^{−t_ik} / (1 + Σ_{l≠i} β_il e^{−t_il}), and P_ii is the same with
numerator 1.

**The derivative.** Let u_ik = y_k − y_i, v_ik = y_k − g_i and Cov_i = Σ_k P_ik v_ik v_ikᵀ. With
dt_ik = −2τ u_ik·(dy_i − dy_k),

    dg_i = 2τ Cov_i dy_i + Σ_k P_ik (dy_k − 2τ v_ik (u_ik·dy_k)).

Let s_i = Σ_k P_ik t_ik. Then τ·Cov_i ⪯ τ Σ_k P_ik u_ik u_ikᵀ, whose trace is s_i. So the first term, a block diagonal
map, has norm at most 2·max_i s_i.

**The second term.** Let w be the unit vector along row i of the second term, r_i the length of that row, and θ > 0. By
the Cauchy–Schwarz inequality, applied twice,

    r_i ≤ Σ_k P_ik ‖dy_k‖ (1 + 2τ|w·v_ik|‖u_ik‖)
        ≤ √(Σ_k P_ik (1 + 2θτ(w·v_ik)²)) · √(Σ_k P_ik (1 + (2/θ) t_ik) ‖dy_k‖²)
        ≤ √(1 + 2θ s_i) · √(Σ_k P_ik (1 + (2/θ) t_ik) ‖dy_k‖²),

hence Σ_i r_i² ≤ ‖dy‖² · max_k Σ_i z_ik² with z_ik² = (1 + 2θ s_i)·P_ik(1 + (2/θ) t_ik). In total

    L = 2c + √(max_k Σ_i z̄_ik²)    with c ≥ s_i and z̄_ik ≥ z_ik for all tokens.

**Suprema of weighted averages.** The remaining bounds c and z̄_ik follow from suprema of the form

    E = (a₀ + Σ_{l≠i} β_l e^{−t_l} h_l(t_l)) / (1 + Σ_{l≠i} β_l e^{−t_l}),    h_l(t) = w_l t + a_l,    0 ≤ t_l ≤ T,

where T is ∞ or a bound on all t. E ≤ V holds if and only if a₀ + Σ β_l e^{−t_l}(h_l(t_l) − V) ≤ V, so it suffices that

    a₀ + Σ_l β_l ψ(w_l, a_l, V) ≤ V,    ψ(w, a, V) = max_{0≤t≤T} (wt + a − V)e^{−t},

and the maximum is at t = 1 + (V − a)/w, clipped to [0, T]. The left side is convex and decreasing in V.

- c: a₀ = 0 and h(t) = t, that is B ψ(1, 0, c) ≤ c. For T = ∞ this reads c e^{c+1} ≥ B, so without bias c is the
  φ⁻¹(N − 1) of Kim et al.
- z_ik for k ≠ i, through √(XY) ≤ (X/ν + νY)/2 with any ν > 0: 2z_ik − 1/ν ≤ E with h_k(t) = (2θ/ν + 2ν/θ)t + ν and
  h_l(t) = (2θ/ν)t for the others.
- z_ii likewise, as t_ii = 0: 2z_ii − 1/ν ≤ E with a₀ = ν and h_l(t) = (2θ/ν)t.

ψ for k is at least ψ for the others, so the left sides increase with β_ik. They increase with B_i if ψ of the others is
positive, and decrease if it is negative. So lower and upper bounds on B_i, and β_ik rounded up to one of a few levels,
suffice. β_ik = 0 gives z_ik = 0. Every θ and ν is valid; a grid search finds good ones.

**Comparison with the literature.** The bound of Kim, Papamakarios and Mnih, "The Lipschitz Constant of Self-Attention",
ICML 2021 (arXiv 2006.04710), Theorem 3.2, is √N(4c + 1). L is smaller by a factor of 6.4 at N = 197 and grows as
√(N log N), not as √N log N.

**Rounding.** V is computed in float64, verified in decimals of 40 digits, and raised until the inequality holds with a
slack of 1e-30 relative to the numbers in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from lipcert.numerics import INFINITE, Upper

_LEVELS = 16
_NEWTON_STEPS = 8
_LARGEST = 1e100
_THETAS = 1.4 ** torch.arange(-8, 9, dtype=torch.float64, device="cpu")[:, None, None]
_NUS = 1.3 ** torch.arange(-4, 25, dtype=torch.float64, device="cpu")[None, :, None]
_SLOPES = 2 * _THETAS / _NUS
_PEAKS = _SLOPES + 2 * _NUS / _THETAS
_EXACT = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN)
_SPARE = Decimal("1e-30")
_STEP = Decimal("1e-12")


def attention_gain(weights: Tensor, low: float, high: float, reach: float = math.inf) -> Upper:
    """The L of the module docstring: a bound on the norm of the Jacobian of L2 attention."""
    if not high <= _LARGEST:
        return INFINITE
    if high == 0:
        return Upper(1)
    average = _Average(low, high, reach)
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    share = average.bound(one * math.log1p(high) / 2, zero, one, zero, one, zero)[0]
    levels, counts = _levels(weights)
    # A last level of weight 0 represents z_ii: every column contains it once, and its constant a₀ is ν.
    levels, counts = torch.cat((levels, zero)), pad(counts, (0, 1), value=1.0)
    diagonal = levels == 0
    start = _SLOPES * float(share)
    values = (average.approach(start, levels, _PEAKS, _NUS, _SLOPES, _NUS * diagonal) + 1 / _NUS) / 2
    best = values.min(1)
    theta = int((best.values.square() @ counts.T).amax(1).argmin())
    picks = best.indices[theta]
    nu, slope = _NUS[0, picks, 0], _SLOPES[theta, picks, 0]
    bounds = average.bound(start[theta, picks, 0], levels, _PEAKS[theta, picks, 0], nu, slope, nu * diagonal)
    squares = [float(((bound + Upper(1) / n) / 2) ** 2) for bound, n in zip(bounds, nu.tolist(), strict=True)]
    worst = float((counts @ torch.tensor(squares, dtype=torch.float64)).max())
    return share * 2 + (Upper(worst) * (1 + 1e-9)).sqrt()


@dataclass(frozen=True)
class _Average:
    """The suprema of weighted averages in the module docstring, for low ≤ B ≤ high and 0 ≤ t ≤ reach.

    The arguments of its methods are, in this order: the level β_k, w_k and a_k of token k, the slope w_l of all others,
    and the constant a₀.
    """

    low: float
    high: float
    reach: float

    def approach(self, start: Tensor, *arguments: Tensor) -> Tensor:
        """An approximate V, by Newton's method on the condition; all arguments broadcast."""
        value = start
        for _ in range(_NEWTON_STEPS):
            lhs, steepness = self._condition(value, *arguments)
            # Newton's step for lhs(V) − V = 0, whose derivative is −(1 + steepness).
            value = value + (lhs - value) / (1 + steepness)
        return value

    def bound(self, start: Tensor, *arguments: Tensor) -> list[Upper]:
        """A V that verifiably meets the condition, for each entry of the arguments of shape (n,)."""
        bounds = []
        rows = zip(*(part.tolist() for part in (self.approach(start, *arguments), *arguments)), strict=True)
        with localcontext(_EXACT):
            for row in rows:
                value, *numbers = (Decimal(number) for number in row)
                value, step = max(value, Decimal(0)), _STEP
                while not self._holds(value, *numbers):
                    value += step * max(value, _STEP)
                    step *= 2
                bounds.append(Upper(value))
        return bounds

    def _condition(
        self, value: Tensor, level: Tensor, peak: Tensor, a: Tensor, slope: Tensor, constant: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The left side of the condition on V, and its rate of decrease in V, in float64."""

        def psi(w: Tensor, a: Tensor | float) -> tuple[Tensor, Tensor]:
            t = (1 + (value - a) / w).clamp(0, self.reach)
            decay = (-t).exp()
            return (w * t + a - value) * decay, decay

        (peak_term, peak_decay), (slope_term, decay) = psi(peak, a), psi(slope, 0.0)
        count = torch.where(slope_term > 0, self.high - level, (self.low - level).clamp(min=0))
        return constant + level * peak_term.clamp(min=0) + count * slope_term, level * peak_decay * (
            peak_term > 0
        ) + count * decay

    def _holds(
        self, value: Decimal, level: Decimal, peak: Decimal, a: Decimal, slope: Decimal, constant: Decimal
    ) -> bool:
        """Whether the left side of the condition is at most V, by more than the rounding error of 40 digits."""

        def psi(w: Decimal, a: Decimal) -> tuple[Decimal, Decimal]:
            """ψ, and the magnitude of the numbers that are subtracted in it."""
            t = min(max(1 + (value - a) / w, Decimal(0)), Decimal(self.reach))
            decay = (-t).exp()
            return (w * t + a - value) * decay, (w * t + a + value) * decay

        (peak_term, peak_size), (slope_term, slope_size) = psi(peak, a), psi(slope, Decimal(0))
        count = Decimal(self.high) - level if slope_term > 0 else max(Decimal(self.low) - level, Decimal(0))
        lhs = constant + level * max(peak_term, Decimal(0)) + count * slope_term
        return lhs + _SPARE * (constant + level * peak_size + count * slope_size) <= value


def _levels(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Groups positive weights into at most ``_LEVELS`` levels, each rounded up."""
    weights = weights.double()
    largest = float(weights.max())
    smallest = max(float(weights[weights > 0].min()), largest * 1e-9)
    steps = _LEVELS if smallest < largest else 1
    levels = torch.logspace(math.log10(smallest), math.log10(largest), steps, dtype=torch.float64)
    levels[-1] = largest
    counts = one_hot(torch.searchsorted(levels, weights), len(levels)) * (weights > 0).unsqueeze(-1)
    return levels, counts.sum(0).double()
