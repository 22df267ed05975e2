"""Searches for the largest valid radius, shared by all methods.

Every radius that a search returns has been tried and is valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_ACCURACY = 1.01


def search(left: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
    """The largest ε, to 0.1 %, with left(ε) > 0, for a non-increasing function; 0 if 1e-12 · guess is too large.

    Args:
        left: function of ε, shape (N,); called about 30 times.
        guess: an ε near which ``left`` becomes negative, shape (N,).
    """
    low, high = guess * 1e-12, guess.clone()
    good = left(low) > 0
    for _ in range(8):
        holds = good & (left(high) > 0)
        if not bool(holds.any()):
            break
        low, high = torch.where(holds, high, low), torch.where(holds, 2 * high, high)
    for _ in range(44):
        wide = high > low * 1.001  # converged images do not change, so results do not depend on the batch
        if not bool(wide.any()):
            break
        middle = (low * high).sqrt()
        holds = left(middle) > 0
        low, high = torch.where(wide & holds, middle, low), torch.where(wide & ~holds, middle, high)
    return torch.where(good, low, 0.0)


def search_each(left: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
    """The largest ε with left(ε) > 0 for many non-increasing functions, shape (N, functions).

    One evaluation at an ε gives the values of all functions. The accuracy is 0.1 % for the smallest result of each
    image, 2 % up to four times that, and 20 % beyond. The result is 0 if 1e-12 of the smallest positive guess is too
    large.

    Args:
        left: function of ε, shape (N,), with values of shape (N, functions).
        guess: ε near which they become negative, shape (N, functions).
    """
    smallest = torch.where(guess > 0, guess, math.inf).amin(1, keepdim=True)
    low = torch.where(smallest < math.inf, 1e-12 * smallest, 0.0).expand_as(guess)
    high = guess.amax(1, keepdim=True).expand_as(guess)
    good = left(low[:, 0]) > 0
    for _ in range(8):
        holds = good & (left(high.amax(1)) > 0)
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
        holds = left(eps[:, 0]) > 0
        # Converged images do not change, so results do not depend on the batch.
        low = torch.where((widest > 1) & holds, torch.maximum(low, eps), low)
        high = torch.where((widest > 1) & ~holds, torch.minimum(high, eps), high)
    return torch.where(good, low, 0.0)


def search_open(
    holds: Callable[[Tensor, Tensor, int], Tensor], low: Tensor, wanted: Tensor, steps: int, first: float | None = None
) -> Tensor:
    """The largest ε, to 1 %, for costly functions, which are called only for images that can still gain.

    Args:
        holds: function of the indices of images, shape (n,), an ε for each, shape (n,), and the number of the step;
            returns where ε is valid, shape (n,). The steps of an image do not depend on the other images.
        low: valid radii, shape (N,), on the CPU.
        wanted: the images to search, a mask of shape (N,).
        steps: maximum number of calls of ``holds``.
        first: an ε that is tried first for all images.
    """
    low, wanted = low.clone(), wanted.clone()
    start = torch.where(low > 0, low, 1e-12)
    high = torch.full_like(low, math.inf)
    asked = [] if first is None else [torch.full_like(low, first)]
    for step in range(steps):
        base = torch.maximum(low, start)
        if step < len(asked):
            trial = asked[step]
        elif step == len(asked):  # if no larger radius is valid, this is the only call
            trial = base * _ACCURACY
        else:
            trial = torch.where(torch.isfinite(high), (base * high).sqrt(), base * 2)
        index = torch.nonzero(wanted & (trial > low) & (trial < high)).flatten()
        if not len(index):
            if step > len(asked):
                break
            continue
        good = holds(index, trial[index], step)
        low[index] = torch.where(good, trial[index], low[index])
        high[index] = torch.where(good, high[index], trial[index])
        wanted &= (high > _ACCURACY * torch.maximum(low, start)) & (low < 1e12)
    return low
