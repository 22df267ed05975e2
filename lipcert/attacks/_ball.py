"""The perturbations of an attack: the intersection of an l2 ball with the box of images."""

from __future__ import annotations

import torch
from torch import Tensor


def project(delta: Tensor, images: Tensor, eps: Tensor) -> Tensor:
    """Projects perturbations onto those of norm at most ε that keep every image in [0, 1].

    With l = −x ≤ 0 ≤ u = 1 − x, the minimiser of ‖d − δ‖ over ‖d‖ ≤ ε, l ≤ d ≤ u is d = clip(tδ, l, u) for a t in
    [0, 1]. This is stationarity of the Lagrangian in every entry, with t = 1/(1 + λ) and λ ≥ 0 the multiplier of the
    ball. The norm of d does not decrease in t. Between two values of t at which entries reach the box, its square is
    a + t²b. So t follows from the sorted values without iteration.
    """
    z, x = delta.flatten(1), images.flatten(1)
    low, high = -x, 1 - x
    clipped = torch.clamp(z, low, high)
    # The t at which an entry reaches the box; 1 if it stays inside.
    limit = torch.where(clipped == z, 1.0, clipped / torch.where(z == 0, 1.0, z))
    limit, order = limit.sort(dim=1)
    at_box, free = clipped.square().gather(1, order), z.square().gather(1, order)
    # a and b of the docstring for t just below each limit: entries before it are at the box, the others still free.
    before = at_box.cumsum(1) - at_box
    after = free.flip(1).cumsum(1).flip(1)
    reached = before + limit.square() * after >= eps.square()[:, None]
    first = reached.int().argmax(1, keepdim=True)
    remaining = (eps.square()[:, None] - before.gather(1, first)).clamp_min(0)
    t = (remaining / after.gather(1, first).clamp_min(torch.finfo(z.dtype).tiny)).sqrt().clamp_max(1)
    inside = torch.where(reached.any(1, keepdim=True), torch.clamp(t * z, low, high), clipped)
    norm = inside.norm(dim=1)
    shrink = torch.where(norm > eps, eps / norm.clamp_min(torch.finfo(z.dtype).tiny), 1.0)
    return (inside * shrink[:, None]).reshape(delta.shape)
