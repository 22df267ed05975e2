"""Searches for the largest radius that holds; every method looks for its radius with one of these.

Whatever a search does, each radius that it returns has been tried and holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_ACCURACY = 1.01


def search(left: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
    """The largest ε, to 0.1 %, with left(ε) > 0, for a non-increasing function; 0 where 1e-12 · guess is too large.

    Args:
        left: function of ε, shape (N,), that is called some 30 times.
        guess: an ε near which left turns negative, shape (N,).
    """
    low, high = guess * 1e-12, guess.clone()
    good = left(low) > 0
    for _ in range(8):
        holds = good & (left(high) > 0)
        if not bool(holds.any()):
            break
        low, high = torch.where(holds, high, low), torch.where(holds, 2 * high, high)
    for _ in range(44):
        wide = high > low * 1.001  # the others stay as they are, whoever else is searched for
        if not bool(wide.any()):
            break
        middle = (low * high).sqrt()
        holds = left(middle) > 0
        low, high = torch.where(wide & holds, middle, low), torch.where(wide & ~holds, middle, high)
    return torch.where(good, low, 0.0)


def search_each(left: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
    """The largest ε with left(ε) > 0 for many non-increasing functions, shape (N, functions).

    All functions are known at an ε once one of them is. To 0.1 % for the least of each image, to 2 % within four times
    it, and to 20 % further away. 0 where 1e-12 of the smallest positive guess is too large.

    Args:
        left: function of ε, shape (N,), with values of shape (N, functions).
        guess: ε near which they turn negative, shape (N, functions).
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
        least = torch.where(good, low, math.inf).amin(1, keepdim=True)
        near = torch.where(low <= 4 * least, 1.02, 1.2)
        wide = torch.where(good, high / (low * torch.where(low <= least, 1.001, near)), 0.0)
        if not bool((wide > 1).any()):
            break
        widest = wide.argmax(1, keepdim=True)
        eps = (low.gather(1, widest) * high.gather(1, widest)).sqrt()
        holds = left(eps[:, 0]) > 0
        low = torch.where(holds, torch.maximum(low, eps), low)
        high = torch.where(holds, high, torch.minimum(high, eps))
    return torch.where(good, low, 0.0)


def search_open(
    holds: Callable[[Tensor, Tensor, int], Tensor], low: Tensor, wanted: Tensor, steps: int, first: float | None = None
) -> Tensor:
    """The largest ε, to 1 %, for functions that are costly, each of which is asked only as long as that can pay.

    Args:
        holds: function of the numbers of images, shape (n,), an ε for each, shape (n,), and the number of the step,
            whose result says where ε holds, shape (n,). An image meets the same steps whatever others are beside it.
        low: radii that hold, shape (N,), on the CPU.
        wanted: for which images to look further, shape (N,).
        steps: how often ``holds`` may be called.
        first: an ε that is tried by itself for all images.
    """
    low, wanted = low.clone(), wanted.clone()
    start = torch.where(low > 0, low, 1e-12)
    high = torch.full_like(low, math.inf)
    asked = [] if first is None else [torch.full_like(low, first)]
    for step in range(steps):
        base = torch.maximum(low, start)
        if step < len(asked):
            trial = asked[step]
        elif step == len(asked):  # where nothing helps, this is the only call
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
