"""Second moments of given rows, as :func:`lipcert.certvit.stream` collects them from images."""

from __future__ import annotations

import torch
from torch import Tensor

from lipcert.certvit import Moments


def from_rows(rows: Tensor, name: str = "layer") -> Moments:
    """The moments of the rows of a (T, M) matrix, or of a (G, T, M) stack of them."""
    stack = rows if rows.dim() == 3 else rows[None]
    moments = Moments(name, stack.new_zeros(stack.shape[0], stack.shape[2], stack.shape[2], dtype=torch.float64))
    moments.add(stack)
    return moments
