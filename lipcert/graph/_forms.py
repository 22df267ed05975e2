"""The table of functions of torch that are recorded as others, and of those that a replay computes in another way.

A function that is recorded as the operations it consists of is bounded by their rules. The network still runs torch's
own kernel, whose result is kept; only the recorded nodes are those of the parts. Each identity below holds in real
arithmetic, and the parts round at least as often as the kernel, so that their bounds on rounding hold for it too.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.errors import UnsupportedCode

# The code of these functions of torch is itself made of functions that can be recorded.
_WRITTEN_IN_PYTHON = (F.multi_head_attention_forward,)
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """Blocks of r × r positions become channels (c, r, r)."""
    *lead, channels, height, width = x.shape
    r = downscale_factor
    moved = x.reshape(-1, channels, height // r, r, width // r, r).permute(0, 1, 3, 5, 2, 4)
    return moved.reshape(*lead, channels * r * r, height // r, width // r)


def _transpose(x: Tensor, *dims: int) -> Tensor:
    """``transpose`` and ``swapaxes``; ``t`` and ``mT`` name no axes."""
    order = list(range(x.dim()))
    if len(order) > 1:
        first, second = dims or (-2, -1)
        order[first], order[second] = order[second], order[first]
    return x.permute(order)


def _move_axes(x: Tensor, source: Any, destination: Any) -> Tensor:
    pairs = [(source, destination)] if isinstance(source, int) else zip(source, destination, strict=True)
    placed = {there % x.dim(): here % x.dim() for here, there in pairs}
    others = iter([axis for axis in range(x.dim()) if axis not in placed.values()])
    return x.permute([placed[axis] if axis in placed else next(others) for axis in range(x.dim())])


def _norm_of_constant(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """With the statistics of a constant, a batch of one, such as a weight: a group of the norm for each channel.

    The statistics of an image would be those of its batch.
    """
    own = training and running_mean is None and running_var is None and isinstance(x, Tensor) and len(x) == 1
    return F.group_norm(x, x.shape[1], weight, bias, eps) if own else NotImplemented


def _rsub(x: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    return (x.neg() if alpha == 1 else x * -alpha) + other


def _addcmul(x: Tensor, first: Tensor, second: Tensor, *, value: float = 1) -> Any:
    """With a factor, kernels multiply in orders that underflow and overflow differently."""
    return x + first * second if value == 1 else NotImplemented


def _einsum(equation: str, *tensors: Any) -> Any:
    """A batch of matrix products: axes in both factors are batch axes if the result has them, else summed over.

    An axis of size 1 in one factor is repeated if it is longer in the other, as in torch.
    """
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return NotImplemented
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    distinct = all(len(set(term)) == len(term) for term in (*terms, output))
    if len(terms) != 2 or not distinct or not set(terms[0]) ^ set(terms[1]) <= set(output):
        return NotImplemented
    factors = list(zip(terms, tensors[0] if len(tensors) == 1 else tensors, strict=True))
    if isinstance(factors[0][1], Tensor):  # rules know more of a constant on the right
        factors.reverse()
    (a, x), (b, y) = factors
    batch, summed = ([axis for axis in a if axis in b and (axis in output) is kept] for kept in (True, False))
    for axis in summed:  # torch sums such an axis first, which may overflow
        if x.shape[a.index(axis)] != y.shape[b.index(axis)]:
            x, y = (z.sum(names.index(axis), keepdim=True) for z, names in ((x, a), (y, b)))
    sizes: dict[str, int] = {}
    for axis, size in (*zip(a, x.shape, strict=True), *zip(b, y.shape, strict=True)):
        sizes[axis] = size if sizes.get(axis, 1) == 1 else sizes[axis]
    rows, columns = [axis for axis in a if axis not in b], [axis for axis in b if axis not in a]

    def arranged(x: Any, names: str, *groups: list[str]) -> Any:
        shape, order = [sizes[axis] for axis in names], [names.index(axis) for group in groups for axis in group]
        x = x if list(x.shape) == shape else x.expand(shape)
        x = x if order == sorted(order) else x.permute(order)
        merged = [math.prod(sizes[axis] for axis in group) for group in groups]
        return x.reshape(merged if batch else merged[1:])

    product = arranged(x, a, batch, rows, summed) @ arranged(y, b, batch, summed, columns)
    named = [*batch, *rows, *columns]
    product = product.reshape([sizes[axis] for axis in named])
    order = [named.index(axis) for axis in output]
    return product if order == sorted(order) else product.permute(order)


# Each gives NotImplemented where the function is recorded as one operation.
_PARTS: dict[str, Callable[..., Any]] = {
    "rsub": _rsub,
    "addcmul": _addcmul,
    "einsum": _einsum,
    "batch_norm": _norm_of_constant,
    "pixel_unshuffle": _pixel_unshuffle,
    "transpose": _transpose,
    "movedim": _move_axes,
}


def code_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """torch's Python code of a function, without the dispatch to ``__torch_function__``: its calls are recorded."""
    return _opened(function) if function in _WRITTEN_IN_PYTHON else None


@functools.cache
def _opened(function: Any) -> Callable[..., Any]:
    passing = dict.fromkeys(_CHECKS, lambda *args: False)
    opened = types.FunctionType(
        function.__code__, {**function.__globals__, **passing}, function.__name__, function.__defaults__
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def parts_of(op: Any) -> Callable[..., Any] | None:
    """The function as a composition of other operations; None if there is none."""
    return _PARTS.get(op) if isinstance(op, str) else None


# The largest number of entries of an image's patches, 2 MiB; products with Jacobians take many images at once.
_PATCHES = 2**18


def _view(x: Tensor, *shape: Any, **named: Any) -> Tensor:
    """``view`` of values in any memory layout. A view as another type stays as it is."""
    return x.view(*shape, **named) if named or isinstance(shape[0], torch.dtype) else x.reshape(*shape)


def _hard_sigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    """``hardsigmoid`` without torch's derivative, which uses ⅙ in float32 and is not differentiable itself."""
    return F.hardtanh(x + 3, 0.0, 6.0) / 6


def _fixed_norm(
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
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
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
            patches = F.unfold(images, kernel, gaps, pads, steps)
            return F.linear(patches.mT.contiguous(), rows, bias).mT.unflatten(-1, size)
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
    directions, count = 2 if bidirectional else 1, 4 if biased else 2
    if len(weights) != directions * count * layers:
        raise UnsupportedCode([("lstm with projections (proj_size)", "")])
    steps = x.unbind(1 if batch_first else 0)
    last_h, last_c = [], []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            parts = weights[index * count : (index + 1) * count]
            h, c = state[0][index], state[1][index]
            hidden = []
            for step in steps[::-1] if direction else steps:
                gates = F.linear(step, parts[0], *parts[2:3])
                gates = gates + F.linear(h, parts[1], *parts[3:4])
                i, f, g, o = gates.chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                hidden.append(h)
            outputs.append(hidden[::-1] if direction else hidden)
            last_h.append(h)
            last_c.append(c)
        steps = tuple(torch.cat(together, -1) for together in zip(*outputs, strict=True))
    return torch.stack((steps, last_h, last_c)[result], 1 if batch_first and result == 0 else 0)


# Replacements, in a replay, for operations that torch differentiates slowly, falsely, or not twice, or that only some
# memory layouts allow; a function is replaced in that spelling alone.
REPLAYED_AS: dict[Any, Callable[..., Any]] = {
    "hardsigmoid": _hard_sigmoid, "batch_norm": _fixed_norm, "conv2d": _convolution,
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
