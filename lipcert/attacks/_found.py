"""Perturbations within an l2 ball and the box of images, and what attacks find, checked by evaluating the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Distances are float64 norms of exact differences. This factor makes them upper bounds despite rounding.
_ROUND_UP = 1 + 1e-12


@dataclass(frozen=True)
class Adversarial:
    """The nearest adversarial example found for each of N images.

    Attributes:
        images: the perturbed images, shape (N, C, H, W); the original image if none was found.
        distance: ℓ2 distance to the original, rounded up, float64, shape (N,); inf if none was found.
    """

    images: Tensor
    distance: Tensor

    @property
    def broken(self) -> Tensor:
        """Whether the prediction was changed; bool, shape (N,)."""
        return torch.isfinite(self.distance)

    @staticmethod
    def none(images: Tensor) -> Adversarial:
        """No adversarial examples."""
        return Adversarial(images, images.new_full((len(images),), math.inf, dtype=torch.float64))

    def with_closer(self, where: Tensor, images: Tensor, distance: Tensor) -> Adversarial:
        """Replaces each example by the candidate of its image, at the positions ``where``, if that is closer."""
        closer = distance < self.distance[where]
        place = where[closer]
        return Adversarial(
            self.images.index_put((place,), images[closer]), self.distance.index_put((place,), distance[closer])
        )


def lead(logits: Tensor, labels: Tensor) -> Tensor:
    """max_{j ≠ y} f_j − f_y, shape (N,): positive if the predicted class is not y; a tie does not count."""
    target = logits.gather(1, labels[:, None])[:, 0]
    return logits.scatter(1, labels[:, None], -math.inf).amax(1) - target


def distances(images: Tensor, perturbed: Tensor, leads: Tensor) -> Tensor:
    """ℓ2 distances, rounded up, float64, shape (N,); inf if no other class has a positive lead."""
    distance = (perturbed.double() - images.double()).flatten(1).norm(dim=1) * _ROUND_UP
    return torch.where(leads > 0, distance, math.inf)


@torch.no_grad()
def check(model: nn.Module, images: Tensor, labels: Tensor, perturbed: Tensor, eps: Tensor) -> Adversarial:
    """Keeps the candidates that lie inside the ball and the box and are predicted as another class."""
    distance = distances(images, perturbed, lead(model(perturbed), labels))
    inside = (perturbed >= 0).flatten(1).all(1) & (perturbed <= 1).flatten(1).all(1) & (distance <= eps * _ROUND_UP**2)
    every = torch.arange(len(images), device=images.device)
    return Adversarial.none(images).with_closer(every, perturbed, torch.where(inside, distance, math.inf))


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
