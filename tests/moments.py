"""Second moments of given rows, as :func:`lipcert.certvit.stream` collects them, and the layer that they constrain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lipcert.certvit import Moments, Solution, constrain_layer


def from_rows(rows: Tensor, name: str = "layer") -> Moments:
    """The moments of the rows of a (T, M) matrix, or of a (G, T, M) stack of them."""
    stack = rows if rows.dim() == 3 else rows[None]
    moments = Moments(name, stack.new_zeros(stack.shape[0], stack.shape[2], stack.shape[2], dtype=torch.float64))
    moments.add(stack)
    return moments


def constrain_matrix(
    weight: Tensor, moments: Moments, error: float = 1e-2, measure: str = "spectral", **options: Any
) -> Solution:
    """The solution for one measure."""
    return constrain_layer(weight, moments, error, (measure,), **options)[measure]
