"""Searches for the largest valid radius, shared by all methods.

Every radius that a search returns has been tried and is valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_ACCURACY = 1.01
# The logarithm of the accuracy of ``search``.
_WIDTH = 1e-4


def search(margin: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
    """The largest ε, to 0.01 %, with margin(ε) > 0, for a non-increasing function; 0 if 1e-12 · guess is too large.

    Between an ε that holds and one that does not, log ε is found by inverse quadratic interpolation, and by halving
    where that is not safe (Chandrupatla, Advances in Engineering Software 28, 1997).

    Args:
        margin: function of ε, shape (N,); called about 10 times.
        guess: an ε near which ``margin`` becomes negative, shape (N,).
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
    """The place of the root between a and b, as a share of the way from a to b: Chandrupatla's rule."""
    place, height = (a - b) / (c - b), (at_a - at_b) / (at_c - at_b)
    share = at_a / (at_b - at_a) * at_c / (at_b - at_c)
    share = share + (c - a) / (b - a) * at_a / (at_c - at_a) * at_b / (at_c - at_b)
    share = torch.where((height**2 < place) & ((1 - height) ** 2 < 1 - place) & share.isfinite(), share, 0.5)
    least = (0.4 * _WIDTH / (b - a).abs()).clamp_max(0.5)
    return torch.minimum(torch.maximum(share, least), 1 - least)


def search_least(every: Callable[[Tensor], Tensor], one: Callable[[Tensor, Tensor], Tensor], guess: Tensor) -> Tensor:
    """The largest ε, to 0.01 %, at which several functions are positive; as :func:`search` for the least of them.

    Only the function that seems to be the least is searched. All are tried where it ends; if another is not positive
    there, that one is searched next.

    Args:
        every: all functions, of shape (N, functions), of ε, shape (N,).
        one: for each image one of them, shape (N,): of ε and the index of the function.
        guess: an ε near which the least becomes negative, shape (N,).
    """
    radius, values = guess, every(guess)
    failing = torch.ones_like(guess, dtype=torch.bool)
    for _ in range(values.shape[1]):
        which = values.nan_to_num(nan=-math.inf).argmin(1)
        again = search(lambda eps, which=which: one(eps, which), radius)  # type: ignore[misc]
        radius = torch.where(failing, again, radius)  # per image: results do not depend on the batch
        values = every(radius)
        failing = ~(values > 0).all(1) & (radius > 0)
        if not bool(failing.any()):
            return radius
    return torch.where(failing, 0.0, radius)


def search_each(margins: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
    """The largest ε with margins(ε) > 0 for many non-increasing functions, shape (N, functions).

    One evaluation at an ε gives the values of all functions. The accuracy is 0.1 % for the smallest result of each
    image, 2 % up to four times that, and 20 % beyond. The result is 0 if 1e-12 of the smallest positive guess is too
    large.

    Args:
        margins: function of ε, shape (N,), with values of shape (N, functions).
        guess: ε near which they become negative, shape (N, functions).
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


def search_open(
    holds: Callable[[Tensor, Tensor, int], Tensor], low: Tensor, active: Tensor, steps: int, first: float | None = None
) -> Tensor:
    """The largest ε, to 1 %, for costly functions, which are called only for images that can still gain.

    Args:
        holds: function of the indices of images, shape (n,), an ε for each, shape (n,), and the number of the step;
            returns where ε is valid, shape (n,). The steps of an image do not depend on the other images.
        low: valid radii, shape (N,), on the CPU.
        active: the images to search, a mask of shape (N,).
        steps: maximum number of calls of ``holds``.
        first: an ε that is tried first for all images.
    """
    low, active = low.clone(), active.clone()
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
        index = torch.nonzero(active & (trial > low) & (trial < high)).flatten()
        if not len(index):
            if step > len(asked):
                break
            continue
        good = holds(index, trial[index], step)
        low[index] = torch.where(good, trial[index], low[index])
        high[index] = torch.where(good, high[index], trial[index])
        active &= (high > _ACCURACY * torch.maximum(low, start)) & (low < 1e12)
    return low
