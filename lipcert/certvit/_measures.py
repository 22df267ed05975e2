"""The measures of a matrix that can be minimised: the value, dual norm and proximal operator of each.

Singular values come from the eigenvalues of the smaller Gram matrix, which is several times faster than an SVD. In
float64 their absolute error is about 1e-8 ‖W‖₂ for values near zero and 1e-16 ‖W‖₂ for the largest, in float32 3e-4 and
1e-7; only large values matter here. Certified norms are computed in lipcert.norms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = 1e-30  # in place of zeros that divide, in float32 too


@dataclass(frozen=True)
class Spectrum:
    """Singular values of W, (K,) descending, and the singular vectors of W's shorter side, (K, K)."""

    values: Tensor
    vectors: Tensor
    left: bool

    @classmethod
    def of(cls, matrix: Tensor) -> Spectrum:
        """The spectrum of an (O, M) matrix, K = min(O, M)."""
        left = matrix.shape[0] <= matrix.shape[1]
        squares, vectors = torch.linalg.eigh(_gram(matrix))
        return cls(squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1), left)

    def shrunk(self, matrix: Tensor, fractions: Tensor) -> Tensor:
        """W − Σ_i f_i σ_i u_i v_iᵀ for fractions f, (K,), which changes σ_i to (1 − f_i) σ_i."""
        used = fractions != 0
        vectors = self.vectors[:, used]
        scaled = vectors * fractions[used]
        return matrix - (scaled @ (vectors.mT @ matrix) if self.left else (matrix @ scaled) @ vectors.mT)

    def right(self, matrix: Tensor) -> Tensor:
        """σ_i v_iᵀ as rows, (K, M)."""
        return self.vectors.mT @ matrix if self.left else self.values[:, None] * self.vectors.mT


def _gram(matrix: Tensor) -> Tensor:
    return matrix @ matrix.mT if matrix.shape[0] <= matrix.shape[1] else matrix.mT @ matrix


def _singular_values(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(_gram(matrix)).flip(0).clamp_min(0).sqrt()


def spectral_norm(matrix: Tensor) -> float:
    """‖W‖₂ to about 1e-15 relative; an estimate, not a bound."""
    return float(_singular_values(matrix)[0])


def nuclear_norm(matrix: Tensor) -> float:
    """Σ_i σ_i."""
    return float(_singular_values(matrix).sum())


def clip_level(values: Tensor, mass: float) -> float:
    """The level s ≥ 0 with Σ_i (σ_i − s)₊ = mass, for σ descending; 0 when Σ_i σ_i ≤ mass.

    If k values lie above s, then s = (Σ_{i ≤ k} σ_i − mass) / k; k is the last number for which σ_k exceeds this.
    """
    counts = torch.arange(1, len(values) + 1, device=values.device, dtype=values.dtype)
    levels = (values.cumsum(0) - mass) / counts
    above = int((values > levels).sum())
    return max(0.0, float(levels[above - 1]))


def clip_spectrum(matrix: Tensor, spectrum: Spectrum, level: float) -> Tensor:
    """W with its singular values above ``level`` lowered to it."""
    return spectrum.shrunk(matrix, (1 - level / spectrum.values.clamp_min(_TINY)).clamp_min(0))


def _prox_spectral(matrix: Tensor, step: float) -> Tensor:
    """W minus its projection onto the nuclear-norm ball of radius ``step`` (Moreau), which clips singular values."""
    spectrum = Spectrum.of(matrix)
    return clip_spectrum(matrix, spectrum, clip_level(spectrum.values, step))


def _prox_nuclear(matrix: Tensor, step: float) -> Tensor:
    """W with its singular values lowered by ``step``, but not below 0."""
    spectrum = Spectrum.of(matrix)
    return spectrum.shrunk(matrix, (step / spectrum.values.clamp_min(_TINY)).clamp_max(1))


def soft_threshold(matrix: Tensor, step: float) -> Tensor:
    """Moves every entry towards 0 by ``step``, but not past 0: the proximal operator of step · ‖·‖₁."""
    return matrix.sign() * (matrix.abs() - step).clamp_min(0)


@dataclass(frozen=True)
class Measure:
    """A norm of matrices."""

    value: Callable[[Tensor], float]  # W → ‖W‖
    dual: Callable[[Tensor], float]  # Y → the largest ⟨Y, W⟩ over ‖W‖ ≤ 1
    prox: Callable[[Tensor, float], Tensor]  # (W, step) → argmin_V step · ‖V‖ + ½ ‖V − W‖_F²
    step: Callable[[Tensor], float]  # W_pre → the step of Douglas–Rachford, which changes its speed, not its limit
    rotates: bool  # whether ‖W Q‖ = ‖W‖ for orthogonal Q, so that the solver may use the eigenbasis of the moments
    balances: bool = False  # whether the step may start large and fall


MEASURES = {
    "spectral": Measure(spectral_norm, nuclear_norm, _prox_spectral, spectral_norm, rotates=True, balances=True),
    "nuclear": Measure(
        nuclear_norm, spectral_norm, _prox_nuclear, lambda w: float(_singular_values(w).mean()), rotates=True
    ),
    "l1": Measure(
        lambda w: float(w.abs().sum()),
        lambda w: float(w.abs().max()),
        soft_threshold,
        lambda w: float(w.abs().mean()),
        rotates=False,
    ),
}
