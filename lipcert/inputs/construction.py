"""Builds a network from a file's description without storage, and compares it with the file before allocation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._pytree import tree_leaves

# Limits on the sum of a network's integer arguments (widths, depths) and on its largest float (ratios). With larger
# ones timm would build lists of that length before the first weight.
_WHOLE = 2**21
_RATIO = 1000.0
# The largest number of modules and parameters per tensor of the file.
_PARTS = 100
_FEW_TENSORS = 100
# Limits for buffers that files omit, such as position tables and window masks: entries, and entries per weight.
_BUFFERS = 2**27
_BUFFERS_A_WEIGHT = 64


def check_described(
    build: Callable[[], nn.Module], arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Builds a network without storage and compares it with the tensors of a file.

    The work is bounded by the size of the file: construction stops as soon as the network has many more parts than the
    file has tensors.
    """
    numbers = [value for value in tree_leaves(dict(arguments)) if isinstance(value, (int, float))]
    whole = sum(abs(number) for number in numbers if isinstance(number, int))
    if whole > _WHOLE or not all(abs(number) <= _RATIO for number in numbers if isinstance(number, float)):
        raise ValueError("its arguments ask for a network of absurd size")
    with _limited(_PARTS * (len(shapes) + _FEW_TENSORS)), torch.device("meta"):
        net = build()
    built = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    if built != shapes:
        name = next(name for name in (*built, *shapes) if built.get(name) != shapes.get(name))
        raise ValueError(f"{name} is {shapes.get(name, 'missing')} in the file and {built.get(name, 'missing')} in it")
    weights = sum(value.numel() for value in net.parameters())
    if sum(value.numel() for value in net.buffers()) > _BUFFERS + _BUFFERS_A_WEIGHT * weights:
        raise ValueError("its tables are far larger than its weights")


@contextlib.contextmanager
def _limited(parts: int) -> Iterator[None]:
    """Raises a ValueError when a network under construction has more modules and parameters than ``parts``."""
    registered = 0

    def count(_module: nn.Module, _name: str, _value: object) -> None:
        nonlocal registered
        registered += 1
        if registered > parts:
            raise ValueError("its arguments describe a larger network than its weights fill")

    with register_module_module_registration_hook(count), register_module_parameter_registration_hook(count):
        yield
