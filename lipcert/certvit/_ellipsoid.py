"""The constraint of CertViT as a set of matrices, and the exact projection onto it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ellipsoid:
    """{V : tr((V − centre) S (V − centre)ᵀ) ≤ radius²} with S = Q diag(λ) Qᵀ; centre is (O, M), Q is ``basis``, (M, M).

    Without ``basis``, matrices are given in this basis, as V Q. Inside an iteration the matrices may be float32.
    """

    centre: Tensor
    eigenvalues: Tensor
    basis: Tensor | None
    radius: float

    def to(self, dtype: torch.dtype) -> Ellipsoid:
        """A copy with its matrices in this dtype."""
        basis = None if self.basis is None else self.basis.to(dtype)
        return Ellipsoid(self.centre.to(dtype), self.eigenvalues.to(dtype), basis, self.radius)

    def project(self, point: Tensor) -> Tensor:
        """The nearest member in the Frobenius norm.

        With D = V − centre and a multiplier μ ≥ 0 the nearest member is centre + D (I + μ S)⁻¹. If V is a member, μ =
        0; otherwise μ solves Σ_j λ_j c_j / (1 + μ λ_j)² = radius² with c_j = ‖(D Q)_j‖², see :func:`multiplier`. A
        final scaling towards the centre removes the rounding error of μ, so the constraint is violated by at most a few
        units in the last place.
        """
        change = self._into(point - self.centre)
        mu = multiplier(change.square().sum(dim=0), self.eigenvalues, self.radius)
        if mu == 0:
            return point
        change = change / (1 + mu * self.eigenvalues)
        length = math.sqrt(float(change.square().sum(dim=0) @ self.eigenvalues))
        if length > self.radius:
            change = change * (self.radius / length)
        return self.centre + self._out_of(change)

    def normal(self, point: Tensor) -> tuple[Tensor, float]:
        """An outward direction Y and the largest ⟨Y, V⟩ over all members V.

        With D = point − centre and Y = D S the maximum is ⟨Y, centre⟩ + radius √tr(Y S⁻¹ Yᵀ). The root equals
        √tr(D S Dᵀ), so no inverse is needed, and S may be singular.
        """
        change = self._into(point - self.centre)
        weighted = change * self.eigenvalues
        length = math.sqrt(max(0.0, float((change * weighted).sum())))
        outward = self._out_of(weighted)
        return outward, float((outward * self.centre).sum()) + self.radius * length

    def _into(self, matrix: Tensor) -> Tensor:
        return matrix if self.basis is None else matrix @ self.basis

    def _out_of(self, matrix: Tensor) -> Tensor:
        return matrix if self.basis is None else matrix @ self.basis.mT


def multiplier(squares: Tensor, eigenvalues: Tensor, radius: float) -> float:
    """The root μ ≥ 0 of Σ_j λ_j c_j / (1 + μ λ_j)² = r², or 0 if the left side is at most r² at μ = 0.

    Newton's method solves φ(μ)^(−1/2) = 1/r, with φ the left side, as for trust regions (Moré and Sorensen 1983,
    "Computing a trust region step"). φ^(−1/2) is a weighted p-mean, p = −2, of the affine functions 1/λ_j + μ with the
    weights c_j / λ_j. For p ≤ 1 such means are concave (the reverse Minkowski inequality), and this one increases. The
    tangent of a concave function lies above it. So Newton's steps from μ = 0, left of the root, are positive and never
    pass the root: the iteration is monotone and needs no bracket. It ends when a step is below rounding errors.
    """
    squares, eigenvalues = squares.double().cpu(), eigenvalues.double().cpu()
    energies = squares * eigenvalues
    if float(energies.sum()) <= radius * radius:
        return 0.0
    mu = 0.0
    for _ in range(200):
        shrink = 1 + mu * eigenvalues
        terms = energies / shrink.square()
        value = float(terms.sum())
        slope = 2 * float((terms * eigenvalues / shrink).sum())
        step = 2 * value * (math.sqrt(value) / radius - 1) / slope
        mu += step
        if step <= 1e-15 * mu:
            break
    return mu


def eigenbasis(second: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending and at least 0, and eigenvectors of a moment matrix (M, M)."""
    eigenvalues, basis = torch.linalg.eigh(second)
    return eigenvalues.clamp_min(0), basis
