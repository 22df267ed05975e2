"""Slacks and helpers of bounds that are float64 tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The unit roundoff of float64.
UNIT = 2.0**-53
# The smallest normal number: what an underflow can cost an entry, flushed to zero or not.
SMALLEST_NORMAL = 2.0**-1022
# Sums of n < 4e6 products of non-negative float64 numbers are off by at most (n + 8) 2⁻⁵³ relative, below 1e-9.
INFLATE = 1 + 1e-9
# Relative allowance for a bound made of some thousand sums and products of non-negative float64 numbers. Each of them
# rounds by 2⁻⁵³, so 1e-6 covers 10⁹ roundings in a row.
SAFETY = 1e-6


def at_most(bound: Tensor) -> Tensor:
    """An upper bound with ∞ in place of NaN, which among non-negative numbers is 0 · ∞: nothing is known any more."""
    return torch.nan_to_num(bound, nan=math.inf, posinf=math.inf)
