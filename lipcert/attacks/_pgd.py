"""Projected gradient ascent in pixel space, within an l2 ball and the box [0, 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lipcert.attacks._found import Adversarial, distances, lead, project
from lipcert.errors import InputError


@dataclass(frozen=True)
class PGD:
    """Projected gradient ascent on the lead of another class (Madry et al. 2018, arXiv 1706.06083), with restarts.

    The first run starts at the image and maximises the lead of the strongest other class. Run r starts at a random
    perturbation and targets the r-th strongest class at the image (Gowal et al. 2019, arXiv 1910.09338). Steps follow
    the normalised gradient; their length falls from 2ε to 0, or is ``step`` times ε throughout. The result for an image
    does not depend on the others in its batch.

    Args:
        steps: gradient steps per run.
        restarts: number of runs.
        seed: seed of the random starts.
        step: length of every step over ε; None for lengths that fall.
    """

    name: ClassVar[str] = "pgd-l2"
    version: ClassVar[str] = "1"

    steps: int = 40
    restarts: int = 3
    seed: int = 0
    step: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.restarts < 1:
            raise InputError(f"an attack needs at least 1 step and 1 restart, got {self.steps} and {self.restarts}")
        if self.step is not None and not self.step > 0:
            raise InputError(f"the step of an attack is a positive multiple of eps, got {self.step}")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that, with name and version, identify a run of the attack."""
        fixed = {} if self.step is None else {"step": self.step}
        return {"steps": self.steps, "restarts": self.restarts, "seed": self.seed, **fixed}

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float | Tensor) -> Adversarial:
        """Attacks images (N, C, H, W) in the model's dtype: looks for other classes than the labels within ε."""
        sizes = torch.as_tensor(eps, dtype=images.dtype, device=images.device).expand(len(images))
        best = Adversarial.none(images)
        for restart in range(self.restarts):
            open_ = (~best.broken).nonzero()[:, 0]
            if not len(open_):
                break
            best = best.with_closer(open_, *self._run(model, images[open_], labels[open_], sizes[open_], restart))
        return best

    def _run(
        self, model: nn.Module, images: Tensor, labels: Tensor, eps: Tensor, restart: int
    ) -> tuple[Tensor, Tensor]:
        """The nearest adversarial examples along one run, and their distances."""
        every = torch.arange(len(images), device=images.device)
        best = Adversarial.none(images)
        size = eps.view(-1, 1, 1, 1)
        delta, rivals = torch.zeros_like(images), None
        if restart:
            generator = torch.Generator().manual_seed(self.seed + restart)
            start = torch.randn(1, *images.shape[1:], generator=generator, dtype=torch.float64, device="cpu").to(images)
            delta = project(size * start / start.norm(), images, eps)
            with torch.no_grad():
                rival_logits = model(images).scatter(1, labels[:, None], -math.inf)
            # Restart r climbs towards the class whose logit is the r-th largest of the others.
            rivals = rival_logits.argsort(1, descending=True)[:, min(restart, rival_logits.shape[1] - 1) - 1, None]
        for step in range(self.steps + 1):
            point = (images + delta).clamp(0, 1).detach().requires_grad_()
            with torch.enable_grad():
                logits = model(point)
                leads = lead(logits, labels)
                goal = leads if rivals is None else (logits.gather(1, rivals) - logits.gather(1, labels[:, None]))[:, 0]
                slope = None
                if step < self.steps and goal.requires_grad:  # None, too, where logits do not depend on the pixels
                    (slope,) = torch.autograd.grad(goal.sum(), point, allow_unused=True)
            best = best.with_closer(every, point.detach(), distances(images, point.detach(), leads.detach()))
            if slope is None or bool(best.broken.all()):
                break
            length = slope.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            direction = torch.where(length > 0, slope / length.clamp_min(torch.finfo(slope.dtype).tiny), 0.0)
            over_eps = 2 * (1 - step / self.steps) if self.step is None else self.step
            delta = project(delta + over_eps * size * direction, images, eps)
        return best.images, best.distance


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    eps: float,
    steps: int = 40,
    restarts: int = 3,
    seed: int = 0,
) -> Adversarial:
    """Searches for perturbations of ℓ2 norm at most ε, inside [0, 1], that change the class.

    Args:
        model: maps images in [0, 1] to logits, such as a :class:`lipcert.Model`.
        images: shape (N, C, H, W).
        labels: classes to change, shape (N,); None for the model's own predictions.
        eps: ε in ℓ2 on pixels in [0, 1].
        steps: gradient steps per run.
        restarts: number of runs, each from another point.
        seed: seed of the random starts; the same seed gives the same result.

    Returns:
        The perturbed images and their distances.

    Raises:
        InputError: ε is not a positive number, or there is less than 1 step or restart.
    """
    if not 0 < eps < math.inf:
        raise InputError(f"eps must be a positive number, got {eps}; for example eps=36/255")
    if labels is None:
        with torch.no_grad():
            labels = model(images).argmax(1)
    return PGD(steps, restarts, seed)(model, images, labels, eps)


def smallest(
    attack: PGD, model: nn.Module, images: Tensor, labels: Tensor, found: Adversarial, eps: float
) -> Adversarial:
    """Searches for closer adversarial examples: radii double until a run succeeds, and then close in on the nearest."""
    single = replace(attack, restarts=1)
    every = torch.arange(len(images), device=images.device)
    failed = torch.where(found.broken, 0.0, eps)
    for _ in range(6):
        trial = torch.where(failed > 0, (failed * found.distance).sqrt(), 0.7 * found.distance)
        trial = torch.where(found.broken, trial, 2 * failed)
        closer = single(model, images, labels, trial)
        failed = torch.where(closer.broken, failed, trial)
        found = found.with_closer(every, closer.images, closer.distance)
    return found
