"""Counts the draws of one image and decides when to stop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lipcert.smoothing._binomial import clopper_pearson, posterior_above, rejects, robbins
from lipcert.smoothing._normal import needed, radius

# The maximum number of draws that select a class, as in the experiments of Cohen, Rosenfeld and Kolter.
SELECTION = 100
# The number of draws to the first look; each later look comes after a tenth of the draws counted so far.
_STEP, _TENTH = 8, 10
# A class that leads by this many votes is selected without further draws. The guarantee does not depend on this: the
# bound uses only later draws, whatever class was selected.
_LEAD = 8


@dataclass(frozen=True)
class Plan:
    """The sampling plan for every image: which draws there are, and when to stop.

    Draws are numbered. The first ones select a class; the others are counted. The times of the checks depend only on
    the counts of this image, so the verdict does not depend on batching.

    Attributes:
        eps: ε in ℓ2 on pixels.
        sigma: standard deviation of the noise at each pixel.
        samples: maximum number of counted draws.
        alpha: α, the largest probability with which a radius is too large.
        all_samples: whether to count all samples, for the largest radius; otherwise only as many as the verdict at ε
            needs.
        futility: drawing ends once the posterior probability of exceeding the threshold, after the draws so far and
            from a uniform prior, is below this.
        error: the largest difference of a probability under the drawn noise and under normal noise.
        distance: of the image from the lattice, in ℓ2.
        threshold: a probability with which a class is certified at ε; 1 if there is none.
    """

    eps: float
    sigma: float
    samples: int
    alpha: float
    all_samples: bool
    futility: float = 0.0
    error: float = 0.0
    distance: float = 0.0
    threshold: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", needed(self.eps, self.sigma, self.error, self.distance))

    def at(self, distance: float) -> Plan:
        """The plan for an image that is so far from the lattice."""
        return replace(self, distance=distance) if distance else self

    @property
    def reaches(self) -> bool:
        """Whether an image is certified at ε if all draws agree."""
        return self.radius(self.samples, self.samples) > self.eps

    def radius(self, count: int, samples: int) -> float:
        """The radius of a class with ``count`` of ``samples`` draws; with ``all_samples``, 0 for an incomplete number.

        The bound is Clopper and Pearson's if the number of draws is fixed in advance, otherwise the confidence
        sequence.
        """
        if self.all_samples:
            bound = clopper_pearson(count, samples, self.alpha) if samples == self.samples else 0.0
        elif samples:
            start = self.threshold if self.certifies(count, samples) else 0.0
            bound = robbins(count, samples, self.alpha, start)
        else:
            bound = 0.0
        return radius(bound, self.sigma, self.error, self.distance)

    def certifies(self, count: int, samples: int) -> bool:
        """Whether the confidence sequence excludes the threshold."""
        return rejects(count, samples, self.threshold, self.alpha)

    def ends(self, count: int, samples: int) -> bool:
        """Whether drawing ends: the class is certified at ε, or that is out of reach.

        It is out of reach if the draws that remain cannot certify it, even if they are all of the class, or if that
        is improbable. No guarantee depends on it: the bound holds wherever drawing stops.
        """
        if self.certifies(count, samples) or samples >= self.samples:
            return True
        best = count + self.samples - samples
        return not self.certifies(best, self.samples) or posterior_above(count, samples, self.threshold) < self.futility


class Votes:
    """The draws of one image so far.

    Attributes:
        plan: the sampling plan.
        requested: the next draws; empty if the verdict is known.
        chosen: the selected class; -1 before the selection.
        predicted: the class that is counted: the selected one, unless another one is claimed.
        count: number of draws of that class after the selection.
        samples: number of draws after the selection.
        selected: number of draws for the selection.
    """

    def __init__(
        self,
        plan: Plan,
        classes: int,
        claimed: tuple[int, int] | None = None,
    ):
        """Starts without draws; ``claimed`` fixes the class and the number of samples to count again."""
        self.plan = plan
        self.chosen = self.predicted = -1
        self.count = self.samples = self.selected = 0
        self._won = np.zeros(classes, dtype=np.int64)
        self.requested = range(SELECTION if plan.all_samples else min(_STEP, SELECTION))
        self._claimed = claimed

    def take(self, classes: NDArray[np.int64]) -> None:
        """Counts the requested draws, given the class of each; -1 means no class."""
        if self.predicted < 0:
            self._select(classes)
        else:
            self._count(classes)

    def _select(self, classes: NDArray[np.int64]) -> None:
        plan = self.plan
        self.selected = last = self.requested.stop
        self._won += np.bincount(classes[classes >= 0], minlength=len(self._won))
        # The 0 stands for a runner-up where there is one class only.
        second, first = np.sort([0, *self._won])[-2:]
        if last < SELECTION and first - second < _LEAD:
            self.requested = range(last, min(last + _STEP, SELECTION))
            return
        self.chosen = self.predicted = int(self._won.argmax())
        if self._claimed is None:
            self._want(plan.samples if plan.all_samples else _STEP)
        else:
            self.predicted, samples = self._claimed
            self._want(samples)

    def _count(self, classes: NDArray[np.int64]) -> None:
        self.samples += len(self.requested)
        self.count += int((classes == self.predicted).sum())
        fixed = self._claimed is not None or self.plan.all_samples
        self._want(0 if fixed or self.plan.ends(self.count, self.samples) else max(1, self.samples // _TENTH))

    def _want(self, more: int) -> None:
        """Requests ``more`` samples, up to the maximum; they are numbered after the draws for the selection."""
        start = SELECTION + self.samples
        self.requested = range(start, min(start + more, SELECTION + self.plan.samples))
