"""Norms of linear maps that are given by their products with vectors: one map per image, batched over images."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipcert.norms._ledger import Draw

Product = Callable[[Tensor], Tensor]

# The root search cuts its bracket into _SECTIONS parts, _NARROWED times.
_SECTIONS, _NARROWED = 64, 5
# JᵀJ may underflow for maps of a smaller norm.
SMALLEST = 1e-140


def lanczos_norm(
    product: Product,
    adjoint: Product,
    images: int,
    size: int,
    *,
    draw: Draw,
    tolerance: float = 0.05,
    steps: int = 48,
    device: torch.device | None = None,
) -> Tensor:
    """Upper bounds on ‖J_n‖₂ for a batch of linear maps, each with failure probability at most ``draw.delta``.

    All maps start from the same random vector, and each keeps its first bound within the tolerance. So the result for
    one map does not depend on the others in its batch. ``draw.delta`` is a probability for each map, not for all
    together. It is valid for maps that do not depend on the vector.

    Lanczos on A = JᵀJ from a uniformly random unit vector v gives, after k steps, a unit vector p_k(A)v with
    p_k(λ) = ∏(λ − θ_i)/∏β_j, θ_i the Ritz values and β_j the off-diagonal entries of the tridiagonal matrix. Its part
    along the top eigenvector is γ p_k(λ₁) with γ that of v, so p_k(λ₁) ≤ 1/|γ|. A coordinate of a uniform unit vector
    in n dimensions has a density of at most √(n/2π) for n ≥ 3, so |γ| ≥ t except with probability t √(2n/π); n ≤ 2
    satisfies this too. To the right of the largest Ritz value p_k increases, so the λ with p_k(λ) = 1/t bounds λ₁. The
    bound adapts to the spectrum, whereas that of Kuczyński and Woźniakowski (1992) assumes the worst spectrum. Source:
    van Dorsselaer, Hochstenbach, van der Vorst (2000), "Computing probabilistic bounds for extreme eigenvalues of
    symmetric matrices with the Lanczos method".

    Rounding: with full reorthogonalisation in float64 the computed tridiagonal matrix is that of A + E with ‖E‖ of
    about 1e-14 ‖A‖. Products count as exact; the caller accounts for their error (lipcert.certifier.anchored.rounding).
    A map whose square underflows float64 counts as 1e-140, and a map with products that are not finite as ∞.
    Off-diagonal entries are raised to 1e-12 of the largest Ritz value, and the result by 1e-9.

    Args:
        product: v ↦ J v, from (images, size) to (images, *), float64.
        adjoint: u ↦ Jᵀ u, back to (images, size).
        images: number of maps N.
        size: dimension n of the space that ``product`` takes.
        draw: the start vector and its failure probability for each image, from a :class:`~lipcert.norms.Ledger`. It is
            drawn on the CPU, so it is the same on every device.
        tolerance: stop when every bound is within this relative distance of the root of the largest Ritz value.
        steps: largest number of steps. Stopping early or late changes the tightness of the bound, never its validity.
        device: the device of the vectors; the CPU by default.

    Returns:
        float64, shape (N,), on that device.
    """
    start = draw.normal(1, size)
    basis = [(start / start.norm()).to(device).expand(images, size)]
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    log_reach = -math.log(draw.delta / math.sqrt(2 * size / math.pi))
    bound = torch.full((images,), math.inf, dtype=torch.float64, device=device)
    settled = torch.zeros(images, dtype=torch.bool, device=device)
    broken = torch.zeros(images, dtype=torch.bool, device=device)
    zero = torch.zeros(images, dtype=torch.bool, device=device)
    last = min(steps, size)
    for step in range(1, last + 1):
        current = basis[-1]
        forth = product(current)
        if step == 1:
            zero = (forth == 0).reshape(images, -1).all(1)
        image = adjoint(forth)
        broken |= ~torch.isfinite(image).all(1)
        image = torch.where(broken[:, None], 0.0, image)
        diagonal.append((image * current).sum(1))
        # Two passes are enough: the second removes the rounding error of the first.
        stacked = torch.stack(basis, 1)
        for _ in range(2):
            image = image - torch.einsum("nkd,nk->nd", stacked, torch.einsum("nkd,nd->nk", stacked, image))
        length = image.norm(dim=1)
        beside.append(length)
        basis.append(torch.where(length[:, None] > 0, image / length.clamp_min(1e-300)[:, None], 0.0))
        if step % 4 == 0 or step == last:
            ritz, now = _reach(torch.stack(diagonal, 1), torch.stack(beside, 1), log_reach)
            bound = torch.where(settled, bound, now)
            settled |= bound <= (1 + tolerance) ** 2 * ritz
            if bool(settled.all()):
                break
    bound = (bound.clamp_min(0).sqrt() * (1 + 1e-9)).clamp_min(SMALLEST)
    bound = torch.where(zero, 0.0, bound)  # a map that sends a random vector to 0 is 0 almost surely
    return torch.where(broken, math.inf, bound)


def _reach(diagonal: Tensor, beside: Tensor, log_reach: float) -> tuple[Tensor, Tensor]:
    """The largest Ritz values, and the λ to their right with log p_k(λ) = log_reach; both of shape (N,)."""
    tridiagonal = torch.diag_embed(diagonal)
    if diagonal.shape[1] > 1:
        off = beside[:, :-1]
        tridiagonal = tridiagonal + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    theta = torch.linalg.eigvalsh(tridiagonal)
    top = theta[:, -1].clamp_min(0)
    scale = top.clamp_min(1e-300)
    log_beside = torch.log(torch.maximum(beside, 1e-12 * scale[:, None]) / scale[:, None]).sum(1)
    low, high = torch.zeros_like(top), torch.ones_like(top)
    steps = torch.linspace(0, 1, _SECTIONS + 1, dtype=top.dtype, device=top.device)

    def too_low(excess: Tensor) -> Tensor:
        distance = (1 + excess)[:, :, None] - (theta / scale[:, None])[:, None]
        return torch.log(distance).sum(2) - log_beside[:, None] < log_reach

    while bool((rising := too_low(high[:, None])[:, 0]).any()):
        low = torch.where(rising, high, low)
        high = torch.where(rising, high * 2, high)
    for _ in range(_NARROWED):
        points = low[:, None] + (high - low)[:, None] * steps
        points[:, -1] = high
        enough = ~too_low(points[:, 1:])
        enough[:, -1] = True  # established above; a batched evaluation may round differently
        first = enough.long().argmax(1, keepdim=True)
        low, high = points.gather(1, first)[:, 0], points.gather(1, first + 1)[:, 0]
    return top, torch.where(top > 0, scale * (1 + high), 0.0)
