"""Norms of linear maps that are given by their products with vectors, computed from explicit matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lipcert.norms._dense import dense_norm
from lipcert.norms._lanczos import SMALLEST, Product
from lipcert.norms._verify import verified_norms
from lipcert.norms.budget import Draw
from lipcert.numerics import l2_norm, root_sum

# The number of vectors in one product. On a CPU, sums over vectors take fewer for several images: they stay in a cache.
_TOGETHER, _FEWEST = 64, 8
# Eigenvalues of Gram matrices up to this size are computed, those of larger ones estimated by Lanczos.
_SMALL = 256


def explicit_norm(product: Product, images: int, size: int, *, device: torch.device | None = None) -> Tensor:
    """Deterministic upper bounds on ‖J_n‖₂ for a batch of linear maps.

    The maps are applied to the unit vectors, and the norms of the resulting matrices are bounded: small ones together
    by :mod:`lipcert.norms._verify`, others by :mod:`lipcert.norms._dense`, which takes no decomposition. The cost is
    ``size`` products and memory for all matrices.

    Rounding: products count as exact; the caller accounts for their error (lipcert.roundoff). The
    result is raised by 1e-9. A map whose square underflows float64 counts as 1e-140, and a map that is not finite as ∞.
    """
    unit = torch.eye(size, dtype=torch.float64, device=device)[:, None].expand(size, images, size)
    columns = torch.cat([product(part).flatten(2) for part in unit.split(_TOGETHER)])
    if min(columns.shape[::2]) <= _SMALL:
        norms = verified_norms(columns.movedim(1, 0)) * (1 + 1e-9)
        return torch.where(columns.any(2).any(0), norms.clamp_min(SMALLEST), 0.0)
    return torch.tensor([_norm(matrix) for matrix in columns.unbind(1)], dtype=torch.float64, device=device)


def _norm(matrix: Tensor) -> float:
    if not bool(torch.isfinite(matrix).all()):
        return math.inf
    if not bool(matrix.any()):
        return 0.0
    return max(float(dense_norm(matrix)) * (1 + 1e-9), SMALLEST)


def explicit_row_norms(
    product: Product, images: int, size: int, *, block: int = 1, device: torch.device | None = None
) -> Tensor:
    """Deterministic upper bounds on the norms of the rows of each J_n, shape (N, rows / block), rounding as above.

    With ``block`` > 1, bounds on the spectral norms of the blocks of rows 0 to block − 1, block to 2 block − 1, ….
    """
    unit = torch.eye(size, dtype=torch.float64, device=device)
    return _block_norms(lambda part: [product(part)], unit, images, [block]) * (1 + 1e-9)


def row_norms_by_adjoint(
    adjoint: Product, images: int, size: int, *, block: int = 1, device: torch.device | None = None
) -> Tensor:
    """Like :func:`explicit_row_norms`, from Jᵀ: row i of J_n is J_nᵀ e_i, so the cost is one product per row."""
    norms = [torch.zeros(images, 0, dtype=torch.float64, device=device)]
    for part in torch.eye(size, dtype=torch.float64, device=device).split(max(1, _TOGETHER // block) * block):
        rows = adjoint(part[:, None].expand(-1, images, -1)).flatten(2)
        if block > 1:
            blocks = rows.unflatten(0, (-1, block)).movedim(1, 2)
            norms.append(_top(blocks @ blocks.mT).clamp_min(SMALLEST**2).sqrt().T)
        else:
            norms.append(l2_norm(rows, 2).T)
    return torch.cat(norms, 1) * (1 + 1e-9)


def row_norms(
    products: Callable[[Tensor], Sequence[Tensor]],
    images: int,
    size: int,
    blocks: Sequence[int] = (1,),
    *,
    draw: Draw,
    probes: int = 256,
    device: torch.device | None = None,
) -> Tensor:
    """Upper bounds on the norms of the rows of one or several J_n, or of blocks of rows, shape (N, all blocks).

    All hold together except with probability at most ``draw.delta``. ``products`` takes a vector to its products with
    each of the J_n, in which blocks have these numbers of rows.

    For Gaussian vectors g_1 … g_k the entry i of J g_t has variance ‖row i‖², so Σ_t (J g_t)_i² is ‖row i‖² times a χ²
    variable with k degrees of freedom, which is below c·k, c < 1, with probability at most (c e^(1 − c))^(k/2)
    (Chernoff's bound). Over the m rows of all J_n, none of which depends on the vectors: all ‖row i‖² ≤ Σ_t (J g_t)_i²
    / (c k), except with probability m (c e^(1 − c))^(k/2). Bisection finds the c for which that is δ; c is rounded
    down. Rounding errors are divided by √c, so for a δ so small that c is at most 1/8 there are twice as many vectors.

    With a block > 1 the results bound the spectral norms of blocks B of so many rows of J. Let u be the unit vector
    with ‖Bᵀu‖ = ‖B‖. Then Σ_t (uᵀ B g_t)² is ‖B‖² times the same χ² variable, because u depends on B alone, and it is
    at most the largest eigenvalue of Σ_t (B g_t)(B g_t)ᵀ. So that eigenvalue replaces Σ_t (J g_t)_i².
    """
    norms = _block_norms(products, draw.normal(probes, size).to(device), images, blocks)
    target = 2 / probes * math.log(draw.delta / norms.shape[1])
    low, high = math.exp(target - 1), 1.0  # log c + 1 − c ≤ target at c = low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.log(middle) + 1 - middle < target else (low, middle)
    if low <= 1 / 8:  # this depends on no vector
        return row_norms(products, images, size, blocks, draw=draw, probes=2 * probes, device=device)
    return norms / math.sqrt(low * (1 - 1e-9) * probes) * (1 + 1e-9)


def _block_norms(
    products: Callable[[Tensor], Sequence[Tensor]], vectors: Tensor, images: int, blocks: Sequence[int]
) -> Tensor:
    """Roots of bounds on the largest eigenvalues of Σ_t (B_n v_t)(B_n v_t)ᵀ for blocks B of rows, (N, all blocks)."""
    totals: list[Tensor] = []
    for part in vectors.split(_TOGETHER if vectors.is_cuda else max(_TOGETHER // images, _FEWEST)):
        moved = products(part[:, None].expand(-1, images, -1))
        sums = [_sums(each.flatten(2), block) for each, block in zip(moved, blocks, strict=True)]
        if totals:
            both = zip(totals, sums, blocks, strict=True)
            sums = [root_sum(a, b) if block == 1 else a + b for a, b, block in both]
        totals = sums
    norms = [
        total if block == 1 else _top(total).clamp_min(SMALLEST**2).sqrt()
        for total, block in zip(totals, blocks, strict=True)
    ]
    return torch.cat(norms, 1)


def _sums(moved: Tensor, block: int) -> Tensor:
    """The norms over t of (J_n v_t)_i, shape (N, rows), or the Gram matrices of blocks of rows."""
    if block == 1:
        return l2_norm(moved, 0)
    rows = moved.unflatten(2, (-1, block))
    return torch.einsum("tnbi,tnbj->nbij", rows, rows)


def _top(gram: Tensor) -> Tensor:
    """Upper bounds on the largest eigenvalues of Gram matrices; ∞ for matrices that are not finite.

    The errors of the eigenvalue solver and of the sums in the matrices are about 1e-13 of the trace; 1e-10 covers them.
    """
    finite = gram.isfinite().flatten(-2).all(-1)
    safe = torch.where(finite[..., None, None], gram, 0.0)
    trace = safe.diagonal(dim1=-2, dim2=-1).sum(-1)
    largest = torch.linalg.eigvalsh(safe)[..., -1].clamp_min(0) + 1e-10 * trace
    return torch.where(finite & ~largest.isnan(), largest, math.inf)
