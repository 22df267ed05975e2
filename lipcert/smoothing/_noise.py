"""Gaussian noise on the lattice as a function of (seed, image, draw), independent of batch, shard and device.

The bits are those of Philox 4×64 with 10 rounds, the counter-based generator of Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011, in NumPy's implementation, whose bit streams are fixed, or on a
GPU the same in torch's operations. The key is (seed, image), and the counter encodes draw and pixel. A word of 64 bits
gives the noise of one pixel (:mod:`lipcert.smoothing._lattice`), by arithmetic on integers alone.

Assumption: the bits are random, that is, no network tells them from independent fair ones. This is a fact about Philox
that cannot be proved; it passes all known tests of randomness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.random import Philox
from torch import Tensor

from lipcert.smoothing._lattice import cells

# The number of pixels computed at once: they fit into a processor's cache, or make good use of a GPU.
_AT_ONCE = {"cpu": 2**16, "cuda": 2**23}
# A step of the counter gives four words of 64 bits, for as many pixels.
_PER_STEP = 4
# Philox: the factors of a round, and what it adds to the key.
_FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_ADDED = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_LOW = 2**32 - 1


def noise(
    seed: int, image: int, draws: range, shape: Sequence[int], sigma: float, device: torch.device | str = "cpu"
) -> Tensor:
    """The noise of consecutive draws for one image, rounded to the lattice.

    Args:
        seed: seed of the run, from 0 to 2⁶⁴ − 1.
        image: index of the image in its data set, likewise.
        draws: consecutive indices of draws, ≥ 0.
        shape: shape of one draw, such as (C, H, W).
        sigma: standard deviation in pixels, below 8.
        device: device of the result.

    Returns:
        The noise in steps of the lattice, int32, shape (len(draws), *shape).
    """
    numbers = math.prod(shape)
    result = torch.empty(len(draws), numbers, dtype=torch.int32, device=device)
    table = cells(sigma, result.device)
    steps = -(-numbers // _PER_STEP)
    first = draws.start * steps
    # Counters above 2⁶³ would need a second word on a GPU.
    words = _words if result.is_cuda and draws.stop * steps < 2**63 else _numpy_words
    for part in result.split(max(1, _AT_ONCE["cuda" if result.is_cuda else "cpu"] // numbers)):
        drawn = words((seed, image), first, len(part) * steps, result.device)
        first += len(part) * steps
        # The lowest bit is the sign, 0 or -1: (size xor sign) - sign.
        sign = (drawn & 1).neg_().to(torch.int32)
        sizes = table.sizes((drawn >> 1) & (2**63 - 1)).bitwise_xor_(sign).sub_(sign)
        part.copy_(sizes.view(len(part), -1)[:, :numbers])
    return result.view(len(draws), *shape)


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
