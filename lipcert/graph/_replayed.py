"""Functions that replace torch's in a replay, and operations with several outputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert.errors import UnsupportedCode

# The largest number of entries of an image's patches, 2 MiB; products with Jacobians take many images at once.
_PATCHES = 2**18


def _view(x: Tensor, *shape: Any, **named: Any) -> Tensor:
    """``view`` of values in any memory layout. A view as another type stays as it is."""
    return x.view(*shape, **named) if named or isinstance(shape[0], torch.dtype) else x.reshape(*shape)


def _hard_sigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    """``hardsigmoid`` without torch's derivative, which uses ⅙ in float32 and is not differentiable itself."""
    return torch.nn.functional.hardtanh(x + 3, 0.0, 6.0) / 6


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``batch_norm`` with fixed statistics as a scale and a shift.

    torch's derivative of it is wrong under vmap for a single image whose channels come last in memory, as where tokens
    become an image again: the gradient is read in the other order (seen in torch 2.14 on a CPU).
    """
    if training or running_mean is None or running_var is None:
        return torch.nn.functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = (running_var + eps).rsqrt() if weight is None else weight * (running_var + eps).rsqrt()
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    channels = (-1, *[1] * (x.dim() - 2))
    return x * scale.reshape(channels) + shift.reshape(channels)


def _convolution(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """``conv2d`` in float64 as a product with all patches, if that takes little memory.

    torch computes it in this way on a CPU. But Jacobians are multiplied with vectors by a second derivative, and that
    of torch's convolutions takes twice as long: it includes a derivative by the weights, which is thrown away.
    """
    kernel, rows = weight.shape[2:], weight.flatten(1)
    twice = torch.is_grad_enabled() and images.dtype == torch.float64
    if twice and images.dim() == 4 and groups == 1 and not isinstance(padding, str):
        steps, pads, gaps = (
            (one, one) if isinstance(one, int) else (*one, *one)[:2] for one in (stride, padding, dilation)
        )
        sizes = zip(images.shape[2:], pads, gaps, kernel, steps, strict=True)
        size = [(side + 2 * pad - gap * (taps - 1) - 1) // step + 1 for side, pad, gap, taps, step in sizes]
        if rows.shape[1] * math.prod(size) <= _PATCHES:
            patches = torch.nn.functional.unfold(images, kernel, gaps, pads, steps)
            return torch.nn.functional.linear(patches.mT.contiguous(), rows, bias).mT.unflatten(-1, size)
    return torch.conv2d(images, weight, bias, stride, padding, dilation, groups)


def _lstm(
    result: int,
    x: Tensor,
    state: tuple[Tensor, Tensor],
    weights: list[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Tensor:
    """One output of ``lstm``, computed step by step. Unlike torch's own, it runs under ``vmap``."""
    ways, count = 2 if bidirectional else 1, 4 if biased else 2
    if len(weights) != ways * count * layers:
        raise UnsupportedCode([("lstm with projections (proj_size)", "")])
    steps = x.unbind(1 if batch_first else 0)
    last_h, last_c = [], []
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            index = layer * ways + way
            parts = weights[index * count : (index + 1) * count]
            h, c = state[0][index], state[1][index]
            hidden = []
            for step in steps[::-1] if way else steps:
                gates = torch.nn.functional.linear(step, parts[0], *parts[2:3])
                gates = gates + torch.nn.functional.linear(h, parts[1], *parts[3:4])
                i, f, g, o = gates.chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                hidden.append(h)
            outputs.append(hidden[::-1] if way else hidden)
            last_h.append(h)
            last_c.append(c)
        steps = tuple(torch.cat(together, -1) for together in zip(*outputs, strict=True))
    return torch.stack((steps, last_h, last_c)[result], 1 if batch_first and result == 0 else 0)


# Replacements, in a replay, for operations that torch differentiates slowly, falsely, or not twice, or that only some
# memory layouts allow; a function is replaced in that spelling alone.
REPLAYED_AS: dict[Any, Callable[..., Any]] = {
    "hardsigmoid": _hard_sigmoid, "batch_norm": _batch_norm, "conv2d": _convolution,
    torch.Tensor.view: _view, torch.Tensor.view_as: torch.Tensor.reshape_as,
}  # fmt: skip
# Operations with several outputs. Each output is recorded as an operation of its own.
APART: dict[Any, tuple[tuple[str, Callable[..., Any]], ...]] = {
    "max": (("amax", torch.amax), ("argmax", torch.argmax)),
    "min": (("amin", torch.amin), ("argmin", torch.argmin)),
    "lstm": tuple(
        (name, functools.partial(_lstm, i)) for i, name in enumerate(("lstm", "lstm_last_hidden", "lstm_last_cell"))
    ),
}
