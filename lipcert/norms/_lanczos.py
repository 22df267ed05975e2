"""Norms of linear maps that are given by their products with vectors: one map per image, batched over images."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipcert.norms.budget import Draw
from lipcert.numerics import INFLATE, computed_l2_norm, l2_norm, unit_vectors

Product = Callable[[Tensor], Tensor]

# The root search cuts its bracket into _SECTIONS parts, _NARROWED times.
_SECTIONS, _NARROWED = 64, 5
_STEPS = 48
# Remainders of a smaller relative size consist of rounding errors: they count as part of f_j.
_NOISE = 2.0**-46
# JᵀJ may underflow for maps of a smaller norm.
SMALLEST = 1e-140
# The smallest t. Errors of products are multiplied by about 4√k/t, and a larger t takes more start vectors.
_SMALLEST_PART = 2.0**-19


def lanczos_error(steps: int = _STEPS, part: float = _SMALLEST_PART) -> float:
    """The error of :func:`lanczos_norm`, in units of a bound S on the error of a product with a unit vector.

    ``part`` is the t of :func:`start_vectors`, by default the smallest.

    f_j contains the error of A v_j, at most 2‖J‖S + S². So ‖J‖² ≤ β² + c(2‖J‖S + S²) with c = 2√k/t for k steps, and
    ‖J‖ ≤ β + (2c + √c)S. One more S makes β plus this error a bound on the norm of the computed product.
    """
    c = 2 * math.sqrt(steps) / part
    return (2 * c + math.sqrt(c) + 1) * (1 + 1e-6)


def lanczos_norm(
    product: Product,
    adjoint: Product,
    images: int,
    size: int,
    *,
    draw: Draw,
    tolerance: float = 0.05,
    steps: int = _STEPS,
    together: bool = False,
    device: torch.device | None = None,
) -> Tensor:
    """Upper bounds on ‖J_n‖₂ for a batch of linear maps, each with failure probability at most ``draw.delta``.

    All maps start from the same random vectors, and each stops at its first bound within the tolerance. So the result
    for one map does not depend on the others in its batch. ``draw.delta`` is a probability for each map, not for all
    together. It is valid for maps that do not depend on the vectors.

    Let A = JᵀJ, λ its largest eigenvalue and u a unit eigenvector. Lanczos on A from v_1 computes vectors v_j and
    numbers α_j, β_j with A v_j = β_{j−1} v_{j−1} + α_j v_j + β_j v_{j+1} − f_j, where f_j is due to rounding. Let T be
    the tridiagonal matrix of k steps, θ its largest eigenvalue, p_k(μ) = det(μ − T)/∏β_j, and F the matrix of the f_j.
    The scalar products of these equations with u give, for λ > θ and whether or not the v_j are orthogonal,

        ⟨u, v_1⟩ = ⟨u, v_{k+1}⟩ / p_k(λ) − ⟨Fᵀu, (λ − T)⁻¹ e_1⟩,  so  |⟨u, v_1⟩| ≤ ‖v_{k+1}‖ / p_k(λ) + ‖F‖ / (λ − θ).

    To the right of θ, p_k increases. So |⟨u, v_1⟩| ≥ t implies that λ is at most the larger of θ + 2‖F‖/t and the root
    of p_k = 2‖v_{k+1}‖/t. Without rounding the root of p_k = 1/t is the bound of van Dorsselaer, Hochstenbach and van
    der Vorst (2000), "Computing probabilistic bounds for extreme eigenvalues of symmetric matrices with the Lanczos
    method". It adapts to the spectrum, whereas that of Kuczyński and Woźniakowski (1992) assumes the worst spectrum.

    Probability: nothing but |⟨u, v_1⟩| ≥ t is required of v_1, and u does not depend on v_1; rounding errors may. A
    coordinate of a uniform unit vector in n ≥ 3 dimensions has a density of at most √(n/2π), so it is below t with
    probability at most t √(2n/π). This also holds for n ≤ 2 and t ≤ ½. A single vector would need a tiny t, and
    rounding errors are divided by t. So there are q independent vectors with probability δ^(1/q) each, with the
    smallest q for which t ≥ 2⁻¹⁹. The largest of their q bounds fails only if all of them fail.

    Rounding: f_j is the residual of its equation, which is measured, plus the error of the computed A v_j. The caller
    adds the latter: :func:`lanczos_error` times a bound on the errors of ``product`` and ``adjoint`` for unit vectors.
    A map whose square underflows float64 counts as 1e-140, and a map with products that are not finite as ∞.
    Off-diagonal entries are raised to 1e-12 of the largest Ritz value, and the result by 1e-9.

    Args:
        product: v ↦ J v, from (images, size) to (images, *), float64.
        adjoint: u ↦ Jᵀ u, back to (images, size).
        images: number of maps N.
        size: dimension n of the space that ``product`` takes.
        draw: the start vectors and their failure probability for each image, from a :class:`~lipcert.norms.Ledger`.
            They are drawn on the CPU, so they are the same on every device.
        tolerance: stop when every bound is within this relative distance of the root of the largest Ritz value.
        steps: largest number of steps for each start vector. Stopping early or late changes the tightness of the
            bound, never its validity.
        together: the q start vectors of all maps at once: products take q · images vectors, of which vector k is for
            map k mod images, with the q of :func:`start_vectors`.
        device: the device of the vectors; the CPU by default.

    Returns:
        float64, shape (N,), on that device.
    """
    count, part = start_vectors(draw.delta, size)
    bound = ritz = torch.zeros(images, dtype=torch.float64, device=device)
    starts = torch.nn.functional.normalize(draw.normal(count, size), dim=1).to(device)
    for first in starts.split(count if together else 1):
        first = first[:, None].expand(-1, images, size).reshape(-1, size)
        bound, ritz = _raised(product, adjoint, first, part, min(steps, size), tolerance, bound, ritz)
    return torch.where(bound > 0, (bound.sqrt() * (1 + 1e-9)).clamp_min(SMALLEST), 0.0)


def start_vectors(delta: float, size: int) -> tuple[int, float]:
    """The number q of start vectors, and the t that each of them falls below with probability at most δ^(1/q)."""
    part, count = 0.0, 0
    while part < _SMALLEST_PART:
        count += 1
        part = min(0.5, delta ** (1 / count) * math.sqrt(math.pi / (2 * size)) * (1 - 1e-9))
    return count, part


def _raised(
    product: Product,
    adjoint: Product,
    start: Tensor,
    part: float,
    steps: int,
    tolerance: float,
    bound: Tensor,
    ritz: Tensor,
) -> tuple[Tensor, Tensor]:
    """The bounds on λ and the largest Ritz values of N maps, raised to those from more start vectors, some for each."""
    maps, images = len(bound), len(start)
    bound, ritz = (one.repeat(images // maps) for one in (bound, ritz))

    def largest(some: Tensor) -> Tensor:
        return some.reshape(-1, maps).amax(0)

    diagonal, off_diagonal = list[Tensor](), list[Tensor]()
    basis = start.new_empty(images, steps + 1, start.shape[1])
    basis[:, 0] = start
    upper, top, residual = torch.full_like(bound, math.inf), ritz, torch.zeros_like(bound)
    settled = torch.zeros(images, dtype=torch.bool, device=start.device)
    zero, broken = settled, settled
    for step in range(1, steps + 1):
        current = basis[:, step - 1]
        forth = product(current)
        if step == 1:
            zero = (forth == 0).reshape(images, -1).all(1)
        image = adjoint(forth)
        broken = broken | ~torch.isfinite(image).all(1)
        image = torch.where(broken[:, None], 0.0, image)
        diagonal.append((image * current).sum(1))
        # Two passes are enough: the second removes the rounding error of the first.
        previous, orthogonal = basis[:, :step], image[:, None]
        for _ in range(2):
            orthogonal = orthogonal - (orthogonal @ previous.mT) @ previous
        orthogonal = orthogonal[:, 0]
        size, length = (computed_l2_norm(part, 1) for part in (image, orthogonal))
        off_diagonal.append(torch.where(length > _NOISE * size, length, 0.0))
        basis[:, step] = torch.where(off_diagonal[-1][:, None] > 0, unit_vectors(orthogonal), 0.0)
        terms = [(diagonal[-1], current), (off_diagonal[-1], basis[:, step])]
        if step > 1:
            terms.append((off_diagonal[-2], basis[:, step - 2]))
        rounding = size
        for factor, vector in terms:
            image = image - factor[:, None] * vector
            rounding = rounding + factor.abs()
        residual = residual + (l2_norm(image, 1) + 2.0**-50 * rounding).square()
        if step % 2 == 0 or step == steps:
            value, now = _reach(torch.stack(diagonal, 1), torch.stack(off_diagonal, 1), math.log(2 * INFLATE / part))
            now = torch.maximum(now, value + 2 * INFLATE / part * residual.sqrt())
            upper = torch.where(settled, upper, torch.minimum(upper, now))
            done = ~largest(~settled).repeat(images // maps)
            top = torch.where(done, top, torch.maximum(top, largest(value).repeat(images // maps)))
            settled = settled | (upper <= (1 + tolerance) ** 2 * top)
            settled = settled | (
                upper <= torch.maximum(bound, largest(torch.where(settled, upper, 0.0)).repeat(images // maps))
            )
            if bool(settled.all()):
                break
    upper = torch.where(zero, 0.0, upper.clamp_min(SMALLEST**2))  # 0 for a random vector: the map is 0 almost surely
    return largest(torch.maximum(bound, torch.where(broken, math.inf, upper))), largest(top)


def _reach(diagonal: Tensor, off_diagonal: Tensor, log_reach: float) -> tuple[Tensor, Tensor]:
    """The largest Ritz values, and the λ to their right with log p_k(λ) = log_reach; both of shape (N,)."""
    tridiagonal = torch.diag_embed(diagonal)
    if diagonal.shape[1] > 1:
        off = off_diagonal[:, :-1]
        tridiagonal = tridiagonal + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    theta = torch.linalg.eigvalsh(tridiagonal)
    top = theta[:, -1]
    scale = torch.maximum(top, off_diagonal.amax(1)).clamp_min(1e-300)
    log_off_diagonal = torch.log((off_diagonal / scale[:, None]).clamp_min(1e-12)).sum(1)
    distances = (top[:, None] - theta) / scale[:, None]
    low, high = torch.zeros_like(top), torch.ones_like(top)
    steps = torch.linspace(0, 1, _SECTIONS + 1, dtype=top.dtype, device=top.device)

    def too_low(excess: Tensor) -> Tensor:
        return torch.log(excess[:, :, None] + distances[:, None]).sum(2) - log_off_diagonal[:, None] < log_reach

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
    return top, top + scale * (high + 1e-11)  # the computed Ritz values are accurate to 1e-13 scale
