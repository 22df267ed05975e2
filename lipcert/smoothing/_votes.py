"""How one image's draws are counted, and when they are enough."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lipcert.smoothing._binomial import clopper_pearson, rejects, robbins
from lipcert.smoothing._normal import needed

# Draws between two looks at the first votes; later a quarter of those counted so far.
_STEP = 16
# A class that leads by so many votes is selected without further draws. This costs no guarantee: the bound is on the
# draws that follow, whichever class it is about.
_LEAD = 8


@dataclass(frozen=True)
class Plan:
    """What is asked of every image: which draws there are, and when to stop.

    Draws are numbered: the first ``selection`` select a class, the others are counted. Which of them are looked at
    together is a function of the counts of this image alone, so the verdict does not depend on how draws are batched.

    Attributes:
        eps: ε in ℓ2 on pixels.
        sigma: standard deviation of the noise at each pixel.
        samples: the most draws that are counted.
        alpha: α, the probability at most with which a radius is too large.
        selection: the most draws that select a class.
        all_samples: whether to count all samples, for the largest radius; else only as many as the verdict at ε takes.
        threshold: a probability with which a class is certified at ε; 1 where none is enough.
    """

    eps: float
    sigma: float
    samples: int
    alpha: float
    selection: int
    all_samples: bool
    threshold: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", needed(self.eps, self.sigma))

    def lower_bound(self, count: int, samples: int, start: float = 0.0) -> float:
        """What the probability of a class is at least that won ``count`` of ``samples`` draws.

        By Clopper and Pearson for a number of draws fixed beforehand, else by the confidence sequence.
        """
        if not samples:
            return 0.0
        bound = clopper_pearson if self.all_samples else robbins
        return bound(count, samples, self.alpha, start)


class Votes:
    """The draws of one image so far.

    Attributes:
        plan: what is asked.
        wanted: the draws that are wanted next; empty when the verdict is known.
        predicted: the class that was selected; -1 before.
        count: how often it was drawn since.
        samples: how many draws were made since.
        selected: how many draws selected it.
        certified: whether its probability is above the plan's threshold.
    """

    def __init__(self, plan: Plan, classes: int):
        self.plan = plan
        self.predicted = -1
        self.count = self.samples = self.selected = 0
        self.certified = False
        self._won = np.zeros(classes, dtype=np.int64)
        self.wanted = range(plan.selection if plan.all_samples else min(_STEP, plan.selection))

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
        if last < plan.selection and first - second < _LEAD:
            self.wanted = range(last, min(last + _STEP, plan.selection))
            return
        self.predicted = int(self._won.argmax())
        self._want(plan.samples if plan.all_samples else _STEP)

    def _count(self, classes: NDArray[np.int64]) -> None:
        plan = self.plan
        self.samples += len(self.wanted)
        self.count += int((classes == self.predicted).sum())
        decided = False
        if not plan.all_samples and plan.threshold < 1:
            decided = rejects(self.count, self.samples, plan.threshold, plan.alpha)
            self.certified = decided and self.count > self.samples * plan.threshold
        self._want(0 if decided else max(_STEP, self.samples // 4))

    def _want(self, more: int) -> None:
        """Asks for so many more samples, as far as there are any; they are numbered after the draws that select."""
        start = self.plan.selection + self.samples
        self.wanted = range(start, min(start + more, self.plan.selection + self.plan.samples))

    @property
    def lower_bound(self) -> float:
        """What the probability of the selected class is at least."""
        return self.plan.lower_bound(self.count, self.samples, self.plan.threshold if self.certified else 0.0)
