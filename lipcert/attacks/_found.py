"""What an attack found, checked by evaluating the model and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Distances are float64 norms of exact differences; this raises them above what rounding can take off.
_ROUND_UP = 1 + 1e-12


@dataclass(frozen=True)
class Adversarial:
    """One perturbed image for each of N images, where there is one.

    Attributes:
        images: the perturbed images, shape (N, C, H, W); the image itself where none was found.
        distance: ℓ2 distance to the image, rounded up, float64, shape (N,); inf where none was found.
    """

    images: Tensor
    distance: Tensor

    @property
    def broken(self) -> Tensor:
        """Whether the prediction was changed; bool, shape (N,)."""
        return torch.isfinite(self.distance)

    @staticmethod
    def none(images: Tensor) -> Adversarial:
        """Nothing found yet."""
        return Adversarial(images, images.new_full((len(images),), math.inf, dtype=torch.float64))

    def with_closer(self, where: Tensor, images: Tensor, distance: Tensor) -> Adversarial:
        """These, with those in their place that are closer.

        Args:
            where: positions of the images that were looked at, shape (n,).
            images: perturbed images, shape (n, C, H, W).
            distance: their distances, inf where they change nothing, shape (n,).
        """
        closer = distance < self.distance[where]
        place = where[closer]
        return Adversarial(
            self.images.index_put((place,), images[closer]), self.distance.index_put((place,), distance[closer])
        )


def lead(logits: Tensor, labels: Tensor) -> Tensor:
    """max_{j ≠ y} f_j − f_y, shape (N,): above 0 where the class is not y any more; a tie changes nothing."""
    own = logits.gather(1, labels[:, None])[:, 0]
    return logits.scatter(1, labels[:, None], -math.inf).amax(1) - own


def distances(images: Tensor, perturbed: Tensor, leads: Tensor) -> Tensor:
    """ℓ2 distances, rounded up, float64, shape (N,); inf where the lead of another class is not above 0."""
    apart = (perturbed.double() - images.double()).flatten(1).norm(dim=1) * _ROUND_UP
    return torch.where(leads > 0, apart, math.inf)


@torch.no_grad()
def check(model: nn.Module, images: Tensor, labels: Tensor, perturbed: Tensor, eps: Tensor) -> Adversarial:
    """What of proposed images holds: inside the ball and the box, and predicted as another class.

    Args:
        model: images in [0, 1] to logits.
        images: shape (N, C, H, W).
        labels: classes to move away from, shape (N,).
        perturbed: proposed images, shape (N, C, H, W), in the model's dtype.
        eps: largest distance that counts, shape (N,).
    """
    distance = distances(images, perturbed, lead(model(perturbed), labels))
    inside = (perturbed >= 0).flatten(1).all(1) & (perturbed <= 1).flatten(1).all(1) & (distance <= eps * _ROUND_UP**2)
    every = torch.arange(len(images), device=images.device)
    return Adversarial.none(images).with_closer(every, perturbed, torch.where(inside, distance, math.inf))
