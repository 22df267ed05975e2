"""How one image's draws are counted, and when they are enough."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lipcert.smoothing._binomial import clopper_pearson, rejects, robbins
from lipcert.smoothing._normal import needed, radius

# The most draws that select a class, as in the experiments of Cohen, Rosenfeld and Kolter.
SELECTION = 100
# Draws between two looks at the first votes; later a quarter of those counted so far.
_STEP = 16
# A class that leads by so many votes is selected without further draws. This costs no guarantee: the bound is on the
# draws that follow, whichever class it is about.
_LEAD = 8


@dataclass(frozen=True)
class Plan:
    """What is asked of every image: which draws there are, and when to stop.

    Draws are numbered: the first ones select a class, the others are counted. Which of them are looked at
    together is a function of the counts of this image alone, so the verdict does not depend on how draws are batched.

    Attributes:
        eps: ε in ℓ2 on pixels.
        sigma: standard deviation of the noise at each pixel.
        samples: the most draws that are counted.
        alpha: α, the probability at most with which a radius is too large.
        all_samples: whether to count all samples, for the largest radius; else only as many as the verdict at ε takes.
        stretch: a Lipschitz constant of what comes before the noise.
        threshold: a probability with which a class is certified at ε; 1 where none is enough.
    """

    eps: float
    sigma: float
    samples: int
    alpha: float
    all_samples: bool
    stretch: float = 1.0
    threshold: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", needed(self.eps, self.sigma, self.stretch))

    def radius(self, count: int, samples: int) -> float:
        """The radius that a class has which won ``count`` of ``samples`` draws; 0 for fewer draws than are asked for.

        By Clopper and Pearson where the number of draws is fixed beforehand, else by the confidence sequence.
        """
        if self.all_samples:
            bound = clopper_pearson(count, samples, self.alpha) if samples == self.samples else 0.0
        elif samples:
            start = self.threshold if self.decides(count, samples) and count > samples * self.threshold else 0.0
            bound = robbins(count, samples, self.alpha, start)
        else:
            bound = 0.0
        return radius(bound, self.sigma, self.stretch)

    def decides(self, count: int, samples: int) -> bool:
        """Whether the confidence sequence has left out the threshold, so that the verdict at ε is known."""
        return rejects(count, samples, self.threshold, self.alpha)


class Votes:
    """The draws of one image so far.

    Attributes:
        plan: what is asked.
        wanted: the draws that are wanted next; empty when the verdict is known.
        predicted: the class that was selected; -1 before.
        count: how often it was drawn since.
        samples: how many draws were made since.
        selected: how many draws selected it.
    """

    def __init__(self, plan: Plan, classes: int, claimed: tuple[int, int] | None = None):
        """Nothing is drawn yet; what is ``claimed`` of the class and the number of samples is to be counted again."""
        self.plan = plan
        self.predicted = -1
        self.count = self.samples = self.selected = 0
        self._won = np.zeros(classes, dtype=np.int64)
        self.wanted = range(SELECTION if plan.all_samples else min(_STEP, SELECTION))
        self._claimed = claimed is not None
        if claimed is not None:
            self.predicted, samples = claimed
            self._want(samples)

    def take(self, classes: NDArray[np.int64]) -> None:
        """Counts the draws that were wanted, given the class of each; -1 is none."""
        if self.predicted < 0:
            self._select(classes)
        else:
            self._count(classes)

    def _select(self, classes: NDArray[np.int64]) -> None:
        plan = self.plan
        self.selected = last = self.wanted.stop
        self._won += np.bincount(classes[classes >= 0], minlength=len(self._won))
        second, first = np.sort([0, *self._won])[-2:]
        if last < SELECTION and first - second < _LEAD:
            self.wanted = range(last, min(last + _STEP, SELECTION))
            return
        self.predicted = int(self._won.argmax())
        self._want(plan.samples if plan.all_samples else _STEP)

    def _count(self, classes: NDArray[np.int64]) -> None:
        plan = self.plan
        self.samples += len(self.wanted)
        self.count += int((classes == self.predicted).sum())
        decided = self._claimed or plan.all_samples or plan.decides(self.count, self.samples)
        self._want(0 if decided else max(_STEP, self.samples // 4))

    def _want(self, more: int) -> None:
        """Asks for so many more samples, as far as there are any; they are numbered after the draws that select."""
        start = SELECTION + self.samples
        self.wanted = range(start, min(start + more, SELECTION + self.plan.samples))
