"""Searches for the largest valid radius, shared by all methods.

Every radius that a search returns has been tried and is valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_ACCURACY = 1.01
# The logarithm of the accuracy of ``search`` and ``search_least``.
_WIDTH = 1e-4
# ``search_least`` tries so many ε at most, the first of them with probes alone, and these first ones as predicted. The
# first for all functions is larger than predicted by _ABOVE, so that most are positive there and settled. Before two
# values tell, the loss per unit of ε is taken to grow with this power of ε.
_TRIALS, _PROBED, _PREDICTED = 80, 2, 8
_ABOVE, _POWER = 2e-3, 1.5


def search(margin: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
    """The largest ε, to 0.01 %, with margin(ε) > 0, for a non-increasing function; 0 if 1e-12 · guess is too large.

    Between an ε that holds and one that does not, log ε is found by inverse quadratic interpolation, and by halving
    where that is not safe (Chandrupatla, Advances in Engineering Software 28, 1997).
    """
    low, high = torch.zeros_like(guess), torch.full_like(guess, math.inf)
    at_low = at_high = torch.zeros_like(guess)
    trial = guess
    for step in range(8):
        value = margin(trial)
        unset = (low == 0) | torch.isinf(high)
        holds = value > 0
        low, at_low = torch.where(unset & holds, trial, low), torch.where(unset & holds, value, at_low)
        high, at_high = torch.where(unset & ~holds, trial, high), torch.where(unset & ~holds, value, at_high)
        if not bool(((low == 0) | torch.isinf(high)).any()):
            break
        smaller = guess * max(0.5 ** (2**step), 1e-12)
        trial = torch.where(torch.isinf(high), 2 * low, torch.where(low == 0, smaller, low))
    # The root is between a and b; a was tried last, and c before.
    a, at_a, b, at_b, share = low, at_low, high, at_high, torch.full_like(low, 0.5)
    for _ in range(44):  # results do not depend on the batch
        width = (b.log() - a.log()).abs()
        wide = torch.isfinite(width) & (width > _WIDTH)  # converged images do not change
        if not bool(wide.any()):
            break
        trial = torch.where(wide, a * (b / a) ** share, low)
        value = margin(trial)
        holds = value > 0
        same = holds == (a == low)
        c, at_c = torch.where(same, a, b), torch.where(same, at_a, at_b)
        b, at_b = torch.where(wide & ~same, a, b), torch.where(wide & ~same, at_a, at_b)
        a, at_a = torch.where(wide, trial, a), torch.where(wide, value, at_a)
        low = torch.where(wide & holds, trial, low)
        share = _interpolated(a.log(), b.log(), c.log(), at_a, at_b, at_c)
    return low


def _interpolated(a: Tensor, b: Tensor, c: Tensor, at_a: Tensor, at_b: Tensor, at_c: Tensor) -> Tensor:
    """The place of the root between a and b, as a share of the distance from a to b: Chandrupatla's rule."""
    place, height = (a - b) / (c - b), (at_a - at_b) / (at_c - at_b)
    share = at_a / (at_b - at_a) * at_c / (at_b - at_c)
    share = share + (c - a) / (b - a) * at_a / (at_c - at_a) * at_b / (at_c - at_b)
    share = torch.where((height**2 < place) & ((1 - height) ** 2 < 1 - place) & share.isfinite(), share, 0.5)
    least = (0.4 * _WIDTH / (b - a).abs()).clamp_max(0.5)
    return torch.minimum(torch.maximum(share, least), 1 - least)


def search_least(
    values: Callable[[Tensor, Tensor, Tensor], Tensor],
    whole: Tensor,
    steepness: Tensor,
    guess: Tensor,
    upto: Tensor,
    probes: Tensor,
) -> Tensor:
    """The largest ε, to about 0.01 % and at most ``upto``, at which several non-increasing functions are positive.

    A function that is positive at one ε is so at every smaller one, and is not evaluated there. What a function has
    lost at ε is nearly aε + bε^(1+p), with its steepness a, and b and p from its last two values. This predicts where
    it vanishes. The next ε is the least prediction of an image; later ones halve what is open, in case predictions are
    poor.
    """
    known = _Evaluations(whole[:, None], steepness)
    trial = torch.minimum(guess, upto)
    finished = ~((trial > 0) & trial.isfinite())
    for step in range(_TRIALS):
        asked = probes if step < _PROBED else torch.ones_like(probes)
        place = (~finished[:, None] & asked & (known.low < trial[:, None])).nonzero().unbind(1)
        images, functions = place
        if not len(images):
            if step < _PROBED:
                continue
            break
        eps = trial[images]
        known.add(place, eps, values(eps, images, functions))
        root, beyond, middle = known.predicted(step)
        holds, fails = known.low.amin(1), known.high.amin(1)
        finished |= torch.minimum(beyond, fails) <= holds * (1 + _WIDTH)
        finished |= (holds >= upto) | (fails <= 1e-12 * guess)
        root = middle if step > _PREDICTED and step % 2 else root
        root = root * (1 + _ABOVE if step + 1 == _PROBED else 1 - _WIDTH / 4)
        tried = known.least(known.low)
        trial = torch.maximum(root, tried * (1 + _WIDTH / 2))
        trial = torch.minimum(trial, torch.where(tried > 0, 16 * tried, math.inf)).clamp_max(upto)
    return known.low.amin(1)


class _Evaluations:
    """The values of several non-increasing functions at N images, as far as they were evaluated.

    Attributes:
        low: the largest ε at which each was positive, shape (N, functions); 0 for none.
        high: the smallest ε at which it was not; ∞ for none.
    """

    def __init__(self, whole: Tensor, steepness: Tensor):
        self.whole, self.steepness = whole, steepness
        self.low, self.high = torch.zeros_like(steepness), torch.full_like(steepness, math.inf)
        # The last two ε and the values there.
        self.before = self.last = self.low
        self.at_before = self.at_last = whole.expand_as(self.low)

    def add(self, place: tuple[Tensor, ...], eps: Tensor, value: Tensor) -> None:
        """Takes the values of some functions at some images, (image, function) in ``place``."""
        holds = value > 0
        self.low = self.low.index_put(place, torch.where(holds, eps, self.low[place]))
        self.high = self.high.index_put(place, torch.where(holds, self.high[place], eps))
        self.before = self.before.index_put(place, self.last[place])
        self.at_before = self.at_before.index_put(place, self.at_last[place])
        self.last, self.at_last = self.last.index_put(place, eps), self.at_last.index_put(place, value)

    def least(self, eps: Tensor) -> Tensor:
        """The smallest over the functions that were evaluated, shape (N,)."""
        return torch.where(self.last > 0, eps, math.inf).amin(1)

    def predicted(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the functions that were evaluated the least ε at which one may vanish, each of shape (N,).

        One prediction is from a loss aε + bε^(1+p), or the middle of the open interval where that lies outside it; one
        from a linear loss, which is larger; and one is the middle.
        """
        low, high = self.low, self.high
        root, beyond = _vanishing(self.whole, self.steepness, self.before, self.at_before, self.last, self.at_last)
        middle = torch.where(low > 0, (low * high).sqrt(), high * 0.5 ** (step + 1))
        # A function that grows too fast for a prediction has it outside of what is open, or far below.
        far = torch.where(high.isfinite(), high / 8, 0.0)
        usable = (root >= torch.maximum(low * (1 - _WIDTH), far)) & (root <= high)
        root = torch.where(usable, root.clamp_min(low), middle)
        beyond = torch.maximum(root, beyond.clamp(low, high))
        return self.least(root), self.least(beyond), self.least(middle)


def _vanishing(
    whole: Tensor, steepness: Tensor, before: Tensor, at_before: Tensor, last: Tensor, at_last: Tensor
) -> tuple[Tensor, Tensor]:
    """Where functions vanish, from values at two ε: with a loss aε + bε^(1+p), and with one that is linear."""
    more_before, more = ((whole - at) / eps - steepness for at, eps in ((at_before, before), (at_last, last)))
    power = ((more / more_before).log() / (last / before).log()).nan_to_num(nan=_POWER).clamp(0.5, 1e3)
    a, b, log = steepness * last / whole, more.clamp_min(0) * last / whole, torch.zeros_like(more)
    for _ in range(3):  # a t + b t^(1+p) = 1 for t = ε/last, by Newton's method for log t
        linear, bent = a * log.exp(), b * ((1 + power) * log).exp()
        log = log - (linear + bent).log() * (linear + bent) / (linear + (1 + power) * bent)
    chord = (last - before) / (at_before - at_last)
    return last * log.exp(), torch.where(chord > 0, last + at_last * chord, math.inf)


def search_each(margins: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
    """The largest ε with margins(ε) > 0 for many non-increasing functions, shape (N, functions).

    One evaluation at an ε gives the values of all functions. The accuracy is 0.1 % for the smallest result of each
    image, 2 % up to four times that, and 20 % beyond. The result is 0 if 1e-12 of the smallest positive guess is too
    large.
    """
    smallest = torch.where(guess > 0, guess, math.inf).amin(1, keepdim=True)
    low = torch.where(smallest < math.inf, 1e-12 * smallest, 0.0).expand_as(guess)
    high = guess.amax(1, keepdim=True).expand_as(guess)
    good = margins(low[:, 0]) > 0
    for _ in range(8):
        holds = good & (margins(high.amax(1)) > 0)
        if not bool(holds.any()):
            break
        low, high = torch.where(holds, high, low), torch.where(holds, 2 * high, high)
    for _ in range(64 * guess.shape[1]):
        minimum = torch.where(good, low, math.inf).amin(1, keepdim=True)
        near = torch.where(low <= 4 * minimum, 1.02, 1.2)
        wide = torch.where(good, high / (low * torch.where(low <= minimum, 1.001, near)), 0.0)
        widest, place = wide.max(1, keepdim=True)
        if not bool((widest > 1).any()):
            break
        eps = (low.gather(1, place) * high.gather(1, place)).sqrt()
        holds = margins(eps[:, 0]) > 0
        # Converged images do not change, so results do not depend on the batch.
        low = torch.where((widest > 1) & holds, torch.maximum(low, eps), low)
        high = torch.where((widest > 1) & ~holds, torch.minimum(high, eps), high)
    return torch.where(good, low, 0.0)


def search_open(holds: Callable[[Tensor, Tensor, int], Tensor], low: Tensor, active: Tensor, steps: int) -> Tensor:
    """The largest ε, to 1 %, for costly functions, which are called only for images that can still gain."""
    low, active = low.clone(), active.clone()
    start = torch.where(low > 0, low, 1e-12)
    high = torch.full_like(low, math.inf)
    for step in range(steps):
        base = torch.maximum(low, start)
        trial = torch.where(torch.isfinite(high), (base * high).sqrt(), base * 2)
        if step == 0:  # if no larger radius is valid, this is the only call
            trial = base * _ACCURACY
        index = torch.nonzero(active & (trial > low) & (trial < high)).flatten()
        if not len(index):
            break
        good = holds(index, trial[index], step)
        low[index] = torch.where(good, trial[index], low[index])
        high[index] = torch.where(good, high[index], trial[index])
        active &= (high > _ACCURACY * torch.maximum(low, start)) & (low < 1e12)
    return low
