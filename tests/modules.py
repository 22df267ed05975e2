"""Networks, the modules and numbers that they are built of, and what refusals say, for tests of many files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import lipcert
from lipcert.errors import InputError


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


def orthogonal_vit(
    norm: str = "smooth", attention: str = "keep", *, img_size: int = 16, seed: int = 0, **sizes: Any
) -> lipcert.Model:
    """A converted ViT in float64, away from timm's start, which is near zero, so that its layers bend."""
    torch.manual_seed(seed)
    sizes = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 4, **sizes}
    net = timm.create_model("vit_tiny_patch16_224", img_size=img_size, **sizes)
    for parameter in net.parameters():
        if parameter.dim() == 2:
            nn.init.orthogonal_(parameter)
    model = lipcert.load(net.eval(), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, img_size, img_size))
    return lipcert.convert(model, attention=attention, norm=norm).double()


@contextlib.contextmanager
def refusal(*parts: str, kind: type[Exception] = InputError) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block ends in an error whose message is one line with these parts."""
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
