"""Modules and numbers that tests of many files build their networks of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Function(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(nn.Module):
    """x + branch(x)."""

    def __init__(self, *branch: nn.Module):
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, the same in every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scaled_to(directions: Tensor, length: Tensor | float) -> Tensor:
    """Directions of a batch, each scaled to its length."""
    norms = directions.flatten(1).norm(dim=1).clamp_min(1e-300)
    return directions * (length / norms).reshape(-1, *[1] * (directions.dim() - 1))
