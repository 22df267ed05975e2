"""A lattice of images, and Gaussian noise rounded to it, drawn without rounding errors.

Floating-point noise breaks the theorem that smoothing rests on: the bits of pixel + noise can tell a network which
image it was given (Voráček and Hein, "Sound randomized smoothing in floating-point arithmetic", ICLR 2023). So pixels
and noise are integers here, in steps of s = 1/(255 · 2⁸). Images of 8 bits lie on this lattice.

What is certified. Let r round each pixel to the nearest multiple of s, and h = f ∘ r for the network f, a function of
integers: f reads the floating-point number nearest to each multiple. The smoothed classifier is g(x) = the class that
h gives most often at x + n, n normal with standard deviation σ. The theorem of Cohen, Rosenfeld and Kolter holds for
any measurable h, in real arithmetic. For x on the lattice r(x + n) = x + r(n), so draws need r(n) alone. An image off
the lattice is rounded first; its radius is smaller by its distance to the rounded image, at most s √d/2.

How r(n) is drawn. The size of an entry of r(n) is at most j steps with probability F_j = 2 Φ((j + ½) s/σ) − 1. A table
holds T_j = 2⁶³ F_j, rounded. Of 64 random bits one is the sign, and 63 are an integer u; the size is the number of j
with T_j ≤ u. It is at most j for exactly T_j of the 2⁶³ values of u.

What remains. Let e = 2⁻⁶² bound the errors of T_j/2⁶³, and let the table have c borders, up to 9 σ. If the exact
inversion is given the same uniform number, sizes differ with probability at most c e + P(|n| > 9 σ) ≤ (c + 2) 2⁻⁶², as
the latter is below 2⁻⁶¹. So the probability of any set of images of d pixels changes by at most d (c + 2) 2⁻⁶², which
is subtracted from the lower bound on the probability of a class. Assumed, and not proved: the 64 bits are random
(:mod:`lipcert.smoothing._noise`), and the network is one function of its input, whatever the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lipcert.numerics import l2_norm
from lipcert.smoothing._binomial import UP
from lipcert.smoothing._normal import LARGEST, cdf, density

# Steps of the lattice between black and white.
STEPS = 255 * 2**8
# What float32 makes of a multiple of 1/255 differs from it by less; such pixels stand for the multiple.
_REPRESENTED = 2.0**-24
_BITS = 63
# Upper bits of u by which the table is entered.
_ENTRIES = 18
# Anchors of the table for each standard deviation, and the degree of the Taylor polynomials between them.
_ANCHORS, _DEGREE = 64, 8


def to_lattice(images: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest points of the lattice, and how far away they are.

    Args:
        images: pixels in [0, 1], shape (N, C, H, W).

    Returns:
        The points in steps, int32, shape (N, C, H, W); and their ℓ2 distances in pixels, rounded up, float64, shape
        (N,). A pixel that is a multiple of the step up to its representation in float32 adds nothing to the distance.
    """
    pixels = images.double()
    points = (pixels * STEPS).round_()
    gaps = (points / STEPS).sub_(pixels).abs_()
    # Both numbers are below 1, so this covers the rounding of the quotient and of the difference.
    gaps = torch.where(gaps <= _REPRESENTED, 0.0, gaps + 2.0**-53)
    return points.to(torch.int32), l2_norm(gaps, (1, 2, 3))


def from_lattice(points: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The pixels of points of the lattice: the number of float32, or of float64, that is nearest, cast to ``dtype``."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    steps = torch.tensor(STEPS, dtype=wide, device=points.device)  # a tensor: by a number, a GPU multiplies
    return (points.to(wide) / steps).to(dtype)


@dataclass(frozen=True)
class Cells:
    """The distribution of noise on the lattice as a table of integers.

    Attributes:
        borders: T_j, ascending, and 2⁶³ − 1 at the end; int64.
        entries: the number of T_j that are at most i · 2⁴⁵, for i from 0 to 2¹⁸ − 1; int32.
        error: (c + 2) 2⁻⁶², the error of the distribution of one entry, in total variation.
    """

    borders: Tensor
    entries: Tensor
    error: float

    def sizes(self, uniform: Tensor) -> Tensor:
        """The number of T_j that are at most u, int32, for integers u from 0 to 2⁶³ − 1, shape (N,)."""
        sizes = self.entries.index_select(0, uniform >> (_BITS - _ENTRIES))
        sizes += uniform >= self.borders.index_select(0, sizes)
        far = (uniform >= self.borders.index_select(0, sizes)).nonzero().squeeze(1)
        sizes[far] = torch.bucketize(uniform[far], self.borders[:-1], right=True, out_int32=True)
        return sizes


@lru_cache(maxsize=8)
def cells(sigma: float, device: torch.device) -> Cells:
    """The table for noise of standard deviation σ, in pixels."""
    with localcontext(UP):
        parts = np.concatenate([np.zeros(0, np.uint64), *_borders(Decimal(sigma) * STEPS)])
    table = np.maximum.accumulate(np.minimum(parts, 2**_BITS - 1)).astype(np.int64)
    borders = torch.from_numpy(table).to(device)
    starts = torch.arange(2**_ENTRIES, device=device) << (_BITS - _ENTRIES)
    entries = torch.bucketize(starts, borders, right=True, out_int32=True)
    last = torch.tensor([2**_BITS - 1], device=device)
    return Cells(torch.cat([borders, last]), entries, (len(table) + 2) * 2.0**-62)


def _borders(sigma: Decimal) -> Iterator[np.ndarray]:
    """T_j up to 9 standard deviations of σ steps, in blocks, uint64; errors are below 2, that is, below 2⁻⁶² of 2⁶³.

    In the middle of each block, at z, Φ and the density φ are known to 24 digits. Around it, for |h| ≤ 2⁻⁷,
    F(z + h) − F(z) = 2 φ(z) Σ_k (−1)^(k−1) He_(k−1)(z) hᵏ/k!. As |He_k| φ ≤ 0.44 √k! (Cramér's inequality), the terms
    above degree 8 are below 2⁻⁷³. The linear term is a multiple of an integer and a fraction; all others together are
    below 2⁻¹⁵, so float64 computes them to 2⁻⁶⁶. Rounding to integers adds at most 1 and ½.
    """
    count = int(sigma * LARGEST - Decimal("0.5")) + 1 if sigma * LARGEST >= Decimal("0.5") else 0
    block = max(1, int(sigma) // _ANCHORS)
    scale = Decimal(2**_BITS)
    for start in range(0, count, block):
        middle = start + block // 2
        z = (middle + Decimal("0.5")) / sigma
        slope = 2 * scale * density(z)
        linear = slope / sigma
        steps = np.arange(start, min(start + block, count)) - middle
        h, hermite = steps / float(sigma), [Decimal(1), z]
        for k in range(2, _DEGREE):
            hermite.append(z * hermite[-1] - (k - 1) * hermite[-2])
        rest = np.zeros(len(h))
        for k in range(_DEGREE, 1, -1):
            rest = rest * h + float((-1) ** (k - 1) * slope * hermite[k - 1] / math.factorial(k))
        moved = steps * int(linear) + np.rint(steps * float(linear % 1) + rest * h * h).astype(np.int64)
        yield np.uint64(int(scale * (2 * cdf(z) - 1))) + moved.astype(np.uint64)
