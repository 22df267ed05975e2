"""Gaussian noise as a function of (seed, image, draw), independent of batch, shard and device.

The bits are those of Philox 4×64 with 10 rounds, the counter-based generator of Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011, in NumPy's implementation, whose bit streams are fixed, or on a
GPU the same in torch's operations. The key is (seed, image), and the counter encodes draw and pixel. The Box–Muller
transform maps two integers to two normal numbers.

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
# Philox: the factors of a round, and what it adds to the key.
_FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_ADDED = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_LOW = 2**32 - 1


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
    first = draws.start * steps
    # Counters above 2⁶³ would need a second word on a GPU.
    words = _words if noise.is_cuda and draws.stop * steps < 2**63 else _numpy_words
    for part in noise.split(max(1, _AT_ONCE["cuda" if noise.is_cuda else "cpu"] // numbers)):
        drawn = words((seed, image), first, len(part) * steps, noise.device)
        first += len(part) * steps
        # Each word of 64 bits is two signed integers of 32, the low half first on every machine.
        part.copy_(_box_muller(drawn.view(torch.int32).view(len(part), 2, -1)).flatten(1)[:, :numbers])
    return noise.view(len(draws), *shape)


def _numpy_words(key: tuple[int, int], first: int, count: int, device: torch.device) -> Tensor:
    """The words of ``count`` steps after the counter ``first``, int64, shape (4 · count,)."""
    # The counter has 256 bits in words of 64, the lowest first.
    counter = np.array([first % 2**64, first // 2**64, 0, 0], dtype=np.uint64)
    words = Philox(key=np.array(key, dtype=np.uint64), counter=counter).random_raw(4 * count)
    return torch.from_numpy(words.astype("<u8", copy=False).view("<i8")).to(device)


def _words(key: tuple[int, int], first: int, count: int, device: torch.device) -> Tensor:
    """The words of Philox on any device, for counters below 2⁶³. Products of int64 are those of the bits modulo 2⁶⁴."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    a, b, c, d = torch.arange(first + 1, first + 1 + count, device=device), zero, zero, zero
    for number in range(10):
        one, two = (_signed(part + number * added) for part, added in zip(key, _ADDED, strict=True))
        high_a, high_c = (_high(x, factor) for x, factor in zip((a, c), _FACTORS, strict=True))
        low_a, low_c = (x * _signed(factor) for x, factor in zip((a, c), _FACTORS, strict=True))
        a, b, c, d = high_c ^ b ^ one, low_c, high_a ^ d ^ two, low_a
    return torch.stack([a, b, c, d], -1).flatten()


def _high(x: Tensor, factor: int) -> Tensor:
    """The upper 64 bits of the product of two unsigned numbers of 64 bits."""
    low, high = x & _LOW, (x >> 32) & _LOW
    middle = high * (factor & _LOW) + ((low * (factor & _LOW)) >> 32 & _LOW)
    other = low * (factor >> 32) + (middle & _LOW)
    return high * (factor >> 32) + ((middle >> 32) & _LOW) + ((other >> 32) & _LOW)


def _signed(bits: int) -> int:
    """The int64 with these bits, modulo 2⁶⁴."""
    return (bits + 2**63) % 2**64 - 2**63


def _box_muller(integers: Tensor) -> Tensor:
    """Two normal numbers from each pair of 32-bit integers, shape (N, 2, M); one gives the radius, one the angle."""
    first, second = integers.float().unbind(1)
    # (|i| + ½)/2³¹ lies between 2⁻³² and 1; in float32 the steps near 0, where the tails come from, stay as fine.
    radius = first.abs_().add_(0.5).mul_(2.0**-31).log_().mul_(-2).clamp_(min=0).sqrt_()
    angle = second.mul_(math.pi * 2.0**-31)
    # cos(x − π/2) = sin x; torch's cosine is the faster of the two
    return torch.stack([radius * angle.cos(), radius * angle.sub_(math.pi / 2).cos_()], 1)
