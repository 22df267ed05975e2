"""The largest spectral norm among given float64 matrices, from above, every rounding error included.

Theorem. Let M be a matrix, G any Hermitian matrix, L any matrix, t ≥ 0 and R = t·I − G − L·Lᴴ. Then

    ‖M‖² ≤ t + ‖R‖_F + ‖M·Mᴴ − G‖_F.

Proof. t·I − G = L·Lᴴ + R has no eigenvalue below −‖R‖_F because L·Lᴴ is positive semidefinite, so λ_max(G) ≤ t + ‖R‖_F;
and ‖M‖² = λ_max(M·Mᴴ) ≤ λ_max(G) + ‖M·Mᴴ − G‖ (Weyl). ∎

Here G is the computed Gram matrix and L the computed Cholesky factor of t·I − G, which exists as soon as t is a little
above λ_max(G). Nothing is assumed about how t and L were found, so the estimate behind t may be wrong and the
factorisation unstable: then ‖R‖_F is large or not a number, and a larger t is tried. (Rump, "Verification of positive
definiteness", BIT 46, 2006, bounds ‖R‖ beforehand by γ_{n+2}·tr(t·I − G) for the textbook algorithm; computing R
makes no assumption about the library's algorithm and costs no more than the factorisation itself.)

Rounding. u = 2⁻⁵³. An inner product of length k, summed in any order, blocked, with or without FMA, has an error of at most
γ_k·|a|ᵀ|b| (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 3.1); in complex arithmetic of at
most 6√2·γ_{k+4}·|a|ᵀ|b|, and this covers the three-multiplication form too. Both are below ``_dot_error(k)``·|a|ᵀ|b| with

    _dot_error(k) = 16·(k + 8)·u          (for k·u < 0.01)

and since ‖ |A|·|B| ‖_F ≤ ‖A‖_F·‖B‖_F:

- Gram matrix of an n × m matrix: ‖M·Mᴴ − G‖_F ≤ _dot_error(m)·‖M‖_F². G means the Hermitian matrix with the lower triangle
  that was computed and the real part of its diagonal.
- D = fl(t·I − G − L·Lᴴ): one rounding, relative, for the diagonal of t·I − G, one for the difference, and the product; so
  ‖R‖_F ≤ (1 + 2u)·√2·‖D‖_F + _dot_error(n)·(‖L‖_F² + t), where √2 stands for the upper triangle, which is not computed.
- These terms are below 1e-6 of the result, and 1.001 times the computed term covers the roundings made in computing it.
- ‖M‖_F² is the square of a computed 2-norm over N entries: the exact value is below (1 + 2·(N + 32)·u) times the computed
  one, which allows for γ_N in the sum, a complex modulus to within 8u, and a root that is squared again.

Callers scale so that the largest entry is at least 1. Then the result is at least 1, underflow (at most 2⁻¹⁰²² an operation)
is far below the terms above for every matrix that matters, and matrices so small that it is not have norms below 1 anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lipcert._upper import Upper
from lipcert.norms._estimate import estimate_largest

UNIT = 2.0**-53
_SLACK = 1e-5
_ATTEMPTS = 8
_PANEL = 128


def largest_norm(blocks: Iterable[Tensor]) -> Upper:
    """An upper bound on the largest spectral norm among all matrices of all blocks.

    Args:
        blocks: tensors of shape (B, n, m), float64 or complex128, taken as exact; the largest entry of all of them has
            modulus at least 1, or all are zero. Each is dropped before the next is asked for.

    Returns:
        The bound: ``_SLACK``/2 relative above the estimate that was verified, the Frobenius norm where none was.
    """
    threshold = largest = 0.0
    for matrices in blocks:
        squares, threshold = _bound_squares(matrices, threshold)
        largest = max(largest, float(squares.max()))
    return Upper(largest).sqrt()


def _bound_squares(matrices: Tensor, threshold: float) -> tuple[Tensor, float]:
    """Upper bounds on the squared norms of ``matrices``, sharp only where they exceed every one before.

    A matrix known to lie below the threshold needs no further work, since only the maximum is wanted. The threshold grows
    with the estimates of those that do not, and is handed on to the next block.

    Args:
        matrices: shape (B, n, m).
        threshold: a number that the squared norms of earlier matrices came close to; 0 at the start.

    Returns:
        Bounds of shape (B,), and the new threshold.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mH
    rows, columns = matrices.shape[-2:]
    bounds = _sum_squares(matrices) * (1 + 2 * (rows * columns + 32) * UNIT)
    if rows == 1:
        return bounds, max(threshold, float(bounds.max()))
    unsettled = torch.nonzero(bounds > threshold).flatten()
    if not len(unsettled):
        return bounds, threshold
    error = 1.001 * _dot_error(columns) * bounds[unsettled]
    gram = _gram(_select(matrices, unsettled))
    for attempt in range(_ATTEMPTS):
        if attempt > 0 or threshold == 0:
            raised = estimate_largest(gram) * (1 + _SLACK)
            if raised <= threshold or attempt == _ATTEMPTS - 1:
                raised = float(torch.linalg.eigvalsh(gram).max()) * (1 + _SLACK)
            threshold = max(threshold, raised)
        verified = _verify(gram, threshold) + error
        bounds[unsettled] = torch.minimum(bounds[unsettled], verified * (1 + 4 * UNIT))
        rest = torch.nonzero(bounds[unsettled] > threshold * (1 + _SLACK)).flatten()
        if not len(rest):
            break
        unsettled, error, gram = unsettled[rest], error[rest], _select(gram, rest)
    return bounds, threshold


def _verify(gram: Tensor, threshold: float) -> Tensor:
    """Upper bounds on λ_max of the Hermitian matrices given by the lower triangles of ``gram``: +inf where none was found.

    Args:
        gram: shape (B, n, n).
        threshold: t of the theorem above.

    Returns:
        t + ‖R‖_F, rounded up, of shape (B,).
    """
    size = gram.shape[-1]
    shifted = -gram
    shifted.diagonal(dim1=-2, dim2=-1).add_(threshold)
    factor = torch.zeros_like(shifted)
    residual = torch.zeros(len(gram), dtype=torch.float64, device=gram.device)
    for start in range(0, size, _PANEL):
        stop = min(start + _PANEL, size)
        panel = shifted[:, start:, start:stop]
        if start > 0:
            panel = panel - factor[:, start:, :start] @ factor[:, start:stop, :start].mH
        corner = torch.linalg.cholesky_ex(panel[:, : stop - start])[0].tril()
        below = torch.linalg.solve_triangular(corner.mH, panel[:, stop - start :], upper=True, left=False)
        column = torch.cat([corner, below], dim=1)
        residual += _sum_squares(panel - column @ corner.mH)
        factor[:, start:, start:stop] = column
    rounding = _dot_error(size) * (_sum_squares(factor) + threshold)
    bound = (threshold + 1.001 * ((2 * residual).sqrt() + rounding)) * (1 + 4 * UNIT)
    return torch.where(bound.isfinite(), bound, torch.inf)


def _gram(matrices: Tensor) -> Tensor:
    """M·Mᴴ for matrices (B, n, m), one half copied from the other."""
    size = matrices.shape[-2]
    if size <= _PANEL:
        return matrices @ matrices.mH
    gram = matrices.new_empty(len(matrices), size, size)
    for start in range(0, size, _PANEL):
        stop = min(start + _PANEL, size)
        gram[:, start:stop, start:] = matrices[:, start:stop] @ matrices[:, start:].mH
        gram[:, stop:, start:stop] = gram[:, start:stop, stop:].mH
    return gram


def _dot_error(length: int) -> float:
    return 16 * (length + 8) * UNIT


def _sum_squares(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1)).square()


def _select(matrices: Tensor, indices: Tensor) -> Tensor:
    return matrices if len(indices) == len(matrices) else matrices[indices]
