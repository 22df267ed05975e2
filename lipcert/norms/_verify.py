"""Upper bounds on the largest eigenvalue of Gram matrices, with every rounding error included.

Theorem. Let M be a matrix, G a Hermitian matrix, L any matrix, t ≥ 0 and R = t·I − G − L·Lᴴ. Then

    ‖M‖² ≤ t + ‖R‖_F + ‖M·Mᴴ − G‖_F.

Proof. t·I − G = L·Lᴴ + R has no eigenvalue below −‖R‖_F because L·Lᴴ is positive semidefinite, so
λ_max(G) ≤ t + ‖R‖_F; and ‖M‖² = λ_max(M·Mᴴ) ≤ λ_max(G) + ‖M·Mᴴ − G‖ (Weyl). ∎

Here G is the computed Gram matrix and L a computed Cholesky factor of t·I − G, which exists as soon as t is a little
above λ_max(G). The theorem assumes nothing about the origin of t and L: the estimate of λ_max(G) may be wrong and the
factorisation unstable. Then ‖R‖_F is large or NaN, and a larger t is tried. (Rump, "Verification of positive
definiteness", BIT 46, 2006, bounds ‖R‖ beforehand by γ_{n+2}/(1 − γ_{n+2})·tr(t·I − G) for the textbook algorithm. Here
R is computed, so any algorithm may be used; the blocked one below gives R as a by-product.)

Rounding, u = 2⁻⁵³. An inner product of length k, summed in any order, blocked, with or without FMA, errs by at most
γ_k·|a|ᵀ|b| (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 3.1), in complex arithmetic by at
most 6√2·γ_{k+4}·|a|ᵀ|b|, which covers the form with three multiplications too. For k·u < 0.01 both are below
``dot_error(k)``·|a|ᵀ|b| with

    dot_error(k) = 16·(k + 8)·u,

and ‖ |A|·|B| ‖_F ≤ ‖A‖_F·‖B‖_F.

- G is the Hermitian matrix with the computed lower triangle and the real part of the computed diagonal.
- The panel of columns J starts as P = fl(t·I − G − L·Lᴴ), the product over the columns before J. The columns J of L are
  computed from it, and D = fl(P − L·L_Jᴴ) remains. Exact R and computed D differ by the errors of the two products,
  below dot_error(n)·|L||L|ᵀ together; by the diagonal of t·I − G, u·t an entry; and by the differences, u·|P| + u·|D|,
  where
  |P| ≤ (1 + 2u)·(|D| + 1.01·|L||L|ᵀ). The constant 16 covers all of it:
  ‖R‖_F ≤ 1.001·(√2·‖D‖_F + dot_error(n)·(‖L‖_F² + t)), where √2 accounts for the upper triangle, which is not computed.
- ‖·‖_F² is the square of a computed 2-norm over N real numbers: the exact value is below (1 + 2·(N + 32)·u) times the
  computed one, whatever the order of the sum. In the small terms the factor 1.001 covers it.

Callers scale so that the largest entry of the weight is in [1, 2). The largest norm is then at least 1. Underflow, at
most 2⁻¹⁰²² per operation, is far below the terms above for every matrix whose norm is not negligible compared with the
largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lipcert import numerics
from lipcert.norms._estimate import estimate_largest
from lipcert.norms._scale import normalise
from lipcert.numerics import INFLATE, UNIT, Upper

CHUNK_BYTES = {"cuda": 2**28, "cpu": 2**26}
_SLACK = 1e-5
_ATTEMPTS = 8


def largest_norm(grams: Iterable[Tensor], error: float, threshold: float = 0.0, limit: float = math.inf) -> Upper:
    """An upper bound on the largest ‖M‖ among matrices M whose Gram matrices M·Mᴴ are given with an error.

    ∞, which is a bound, as soon as the estimate of an eigenvalue exceeds ``limit``: then another bound is smaller.
    """
    threshold, largest = threshold * (1 + _SLACK), 0.0
    for gram in grams:
        bounds, threshold = _bound_eigenvalues(gram, threshold, limit)
        largest = max(largest, float(bounds.max()))
        if threshold > limit:
            return Upper(math.inf)
    return (Upper(largest) + error).sqrt()


def chunk_length(bytes_each: int, device: torch.device) -> int:
    """The number of matrices that fit in ``CHUNK_BYTES``, at least 1."""
    return max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"]) // bytes_each)


def dot_error(length: int) -> float:
    """The error of a real or complex inner product, relative to |a|ᵀ|b|."""
    return 16 * (length + 8) * UNIT


def sum_squares(matrices: Tensor) -> Tensor:
    """‖·‖_F² of each matrix, shape (B, n, m) → (B,), with rounding as described above."""
    parts = torch.view_as_real(matrices.resolve_conj()) if matrices.is_complex() else matrices
    return numerics.sum_squares(parts, tuple(range(1, parts.dim())))


def _bound_eigenvalues(gram: Tensor, threshold: float, limit: float) -> tuple[Tensor, float]:
    """Upper bounds on the largest eigenvalues, tight only for the largest one so far.

    Only the maximum is needed, so a matrix known to lie below the threshold needs no further work. The threshold rises
    to the estimates of the other matrices and is passed on to the next chunk.
    """
    size = gram.shape[-1]
    bounds = sum_squares(gram).sqrt() * (1 + 2 * (2 * size**2 + 32) * UNIT)
    if size == 1:
        return bounds, max(threshold, float(bounds.max()))
    unsettled = torch.nonzero(bounds > threshold).flatten()
    gram = _select(gram, unsettled)
    for attempt in range(_ATTEMPTS):
        if not len(unsettled) or threshold > limit:
            break
        if attempt > 0 or threshold == 0:
            raised = estimate_largest(gram) * (1 + _SLACK)
            if raised <= threshold or attempt == _ATTEMPTS - 1:
                raised = float(torch.linalg.eigvalsh(gram).max()) * (1 + _SLACK)
            threshold = max(threshold, raised)
        bounds[unsettled] = torch.minimum(bounds[unsettled], _verify(gram, threshold))
        failed = torch.nonzero(bounds[unsettled] > threshold * (1 + _SLACK)).flatten()
        unsettled, gram = unsettled[failed], _select(gram, failed)
    return bounds, threshold


def _verify(gram: Tensor, threshold: float) -> Tensor:
    """Upper bounds on λ_max by the theorem above."""
    size = gram.shape[-1]
    width = max(16, size // 16)
    left = -gram  # whose lower triangle becomes D
    left.diagonal(dim1=-2, dim2=-1).add_(threshold)
    factor = torch.zeros_like(left)
    unit = torch.eye(width, dtype=gram.dtype, device=gram.device)
    for start in range(0, size, width):
        stop = min(start + width, size)
        panel = left[:, start:, start:stop]
        if start > 0:
            panel = panel - factor[:, start:, :start] @ factor[:, start:stop, :start].mH
            left[:, :start, start:stop] = 0.0
        corner = torch.linalg.cholesky_ex(panel[:, : stop - start])[0].tril()
        inverse = torch.linalg.solve_triangular(corner, unit[: stop - start, : stop - start], upper=False)
        column = factor[:, start:, start:stop]
        column[:, : stop - start] = corner
        column[:, stop - start :] = panel[:, stop - start :] @ inverse.mH
        left[:, start:, start:stop] = panel - column @ corner.mH
    rounding = dot_error(size) * (sum_squares(factor) + threshold)
    bound = (threshold + 1.001 * ((2 * sum_squares(left)).sqrt() + rounding)) * (1 + 4 * UNIT)
    return torch.where(bound.isfinite(), bound, torch.inf)


def verified_norms(matrices: Tensor) -> Tensor:
    """Upper bounds on the spectral norm of each matrix, rounding included.

    Let G be the computed Gram matrix and t just above an estimate of its largest eigenvalue. Then
    ‖M‖² ≤ t·b + ‖MMᵀ − G‖_F, where b bounds the largest eigenvalue of G/t by a Cholesky factor and its residual (see
    the module docstring). So the bound does not rely on the estimate. Dividing by t moves G/t by at most u‖G/t‖_F. If
    the factorisation fails, the bound is ‖M‖_F.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mT
    if not matrices.numel():
        return matrices.new_zeros(len(matrices))
    together = chunk_length(32 * matrices.shape[-1] * matrices.shape[-2], matrices.device)
    return torch.cat([_verified(part) for part in matrices.split(together)])


def _verified(matrices: Tensor) -> Tensor:
    largest = matrices.abs().amax((1, 2))
    finite = largest.isfinite()
    scale = torch.exp2(torch.frexp(torch.where(finite, largest, 1.0)).exponent.double())
    matrices = torch.where(finite[:, None, None], matrices, 0.0) / scale[:, None, None]
    squares = sum_squares(matrices) * INFLATE
    gram = matrices @ matrices.mT
    threshold = (torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0) * (1 + 1e-10)).clamp_min(2.0**-100)
    relative = gram / threshold[:, None, None]
    bound = threshold * (_verify(relative, 1.0) + UNIT * sum_squares(relative).sqrt() * INFLATE)
    rounding = 1.001 * dot_error(matrices.shape[-1]) * squares
    bounds = torch.minimum(bound + rounding, squares).sqrt() * scale * (1 + 2.0**-48)
    return torch.where(finite & ~bounds.isnan(), bounds, torch.inf)


def factor(matrix: Tensor) -> Tensor | None:
    """A square L with M·Mᵀ ⪯ L·Lᵀ and ‖L‖ ≤ (1 + 1e-6)‖M‖ for a matrix M; None where rounding does not allow one.

    Let G be the computed Gram matrix, L a computed Cholesky factor of H = fl(G + s·I), and R = H − L·Lᵀ. Then
    L·Lᵀ − M·Mᵀ = s·I + (H − G − s·I) − R − (M·Mᵀ − G) is positive semidefinite if s is at least the sum of the norms of
    the last three terms, which is bounded here: by u‖H‖_F, by the computed R and the rounding of L·Lᵀ and of the
    difference, and by dot_error(m)‖M‖_F². Then ‖L‖² ≤ ‖M‖² + 2s, and ‖M‖² ≥ ‖M‖_F²/n for n rows.
    Entries of L that underflow when it is scaled back move L·Lᵀ by less than what 1.001 leaves above 2⁻¹⁰⁰⁰.
    """
    (rows, columns), (scaled, scale) = matrix.shape, normalise(matrix)
    if scale < 2.0**-1000:
        return None
    squares, unit = sum_squares(scaled[None])[0], torch.eye(rows, dtype=torch.float64, device=matrix.device)
    gram = scaled @ scaled.mT
    shift = 8 * dot_error(columns) * squares
    shifted = gram + shift * unit
    lower = torch.linalg.cholesky_ex(shifted)[0].tril()
    sizes = sum_squares(torch.stack((shifted - lower @ lower.mT, shifted, lower)))
    lost = sizes[0].sqrt() + dot_error(rows) * (sizes[1].sqrt() + sizes[2]) + dot_error(columns) * squares
    if not (1.001 * lost <= shift and 2 * rows * shift <= 1e-6 * squares):  # NaN is not small
        return None
    return lower * scale


def _select(matrices: Tensor, indices: Tensor) -> Tensor:
    return matrices if len(indices) == len(matrices) else matrices[indices]
