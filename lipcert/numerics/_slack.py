"""Rounding slacks and helpers for bounds in float64 tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The unit roundoff of float64.
UNIT = 2.0**-53
# The smallest normal number, which bounds the error of an underflow, flushed to zero or not.
SMALLEST_NORMAL = 2.0**-1022
# Sums of n < 4e6 products of non-negative float64 numbers have a relative error of at most (n + 8) 2⁻⁵³ < 1e-9.
INFLATE = 1 + 1e-9
# More than the rounding error of a sum of two vectors, relative to the norms of both.
ROUNDED_SUM = 1e-13
# More than the rounding errors of angles of [0, π/2], their sines and cosines.
ROUNDED_ANGLE = 1e-12
# Relative slack for a bound computed by thousands of sums and products of non-negative float64 numbers. Each rounds by
# 2⁻⁵³, so 1e-6 covers 10⁹ successive roundings.
SAFETY = 1e-6


def at_most(bound: Tensor) -> Tensor:
    """The bound with ∞ in place of NaN. Among non-negative numbers NaN comes from 0 · ∞ and means no bound."""
    return torch.nan_to_num(bound, nan=math.inf, posinf=math.inf)
