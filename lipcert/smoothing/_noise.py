"""Gaussian noise as a function of (seed, image, draw), independent of batch, shard and device.

The bits are those of Philox 4×64 with 10 rounds, the counter-based generator of Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011, in NumPy's implementation, whose bit streams are fixed. The key
is (seed, image), and the counter encodes draw and pixel. The Box–Muller transform maps two integers to two normal
numbers.

Assumption. A bound of :mod:`lipcert.smoothing` counts how often a network gives a class, and its failure probability
refers to independent, exactly normal noise. Here the noise is pseudo-random. The transform is computed in float32, so
each number has a relative error of a few parts in 10⁷, and none is larger than 6.7, which an exact one exceeds with
probability 2e-11. The sum of pixel and noise is rounded to float32. We assume that none of this changes a class's
probability by more than the slack of the bound. This assumption is common to all floating-point sampling; it is not
proved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.random import Philox
from torch import Tensor

# The number of normal numbers computed at once: they fit into a processor's cache, or make good use of a GPU.
_AT_ONCE = {"cpu": 2**17, "cuda": 2**23}
# A step of the counter gives four words of 64 bits, which become eight normal numbers.
_PER_STEP = 8


def normal(seed: int, image: int, draws: range, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """The noise of consecutive draws for one image.

    Args:
        seed: seed of the run, from 0 to 2⁶⁴ − 1.
        image: index of the image in its data set, likewise.
        draws: consecutive indices of draws, ≥ 0.
        shape: shape of one draw, such as (C, H, W).
        device: device of the result.

    Returns:
        Standard normal numbers, float32, shape (len(draws), *shape).
    """
    numbers = math.prod(shape)
    noise = torch.empty(len(draws), numbers, device=device)
    steps = -(-numbers // _PER_STEP)
    key = np.array([seed, image], dtype=np.uint64)
    counter = draws.start * steps
    # The counter has 256 bits in words of 64, the lowest first.
    bits = Philox(key=key, counter=np.array([counter % 2**64, counter // 2**64, 0, 0], dtype=np.uint64))
    for part in noise.split(max(1, _AT_ONCE.get(noise.device.type, _AT_ONCE["cpu"]) // numbers)):
        words = bits.random_raw(len(part) * steps * 4)
        # Each word of 64 bits is two signed integers of 32, the low half first on every machine.
        integers = torch.from_numpy(words.astype("<u8", copy=False).view("<i4"))
        if noise.is_cuda:  # pinned memory lets the copy run while the next bits are drawn
            integers = integers.pin_memory()
        integers = integers.to(device, non_blocking=True)
        part.copy_(_box_muller(integers.view(len(part), 2, -1)).flatten(1)[:, :numbers])
    return noise.view(len(draws), *shape)


def _box_muller(integers: Tensor) -> Tensor:
    """Two normal numbers from each pair of 32-bit integers, shape (N, 2, M); one gives the radius, one the angle."""
    first, second = integers.float().unbind(1)
    # (|i| + ½)/2³¹ lies between 2⁻³² and 1; in float32 the steps near 0, where the tails come from, stay as fine.
    radius = first.abs_().add_(0.5).mul_(2.0**-31).log_().mul_(-2).clamp_(min=0).sqrt_()
    angle = second.mul_(math.pi * 2.0**-31)
    # cos(x − π/2) = sin x; torch's cosine is the faster of the two
    return torch.stack([radius * angle.cos(), radius * angle.sub_(math.pi / 2).cos_()], 1)
