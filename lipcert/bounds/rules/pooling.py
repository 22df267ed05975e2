"""Pooling and other averages: linear maps with non-negative weights, and maxima."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert._upper import Upper
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import Value


def schur_norm(operation: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Upper:
    """Upper bound on the norm of a linear map A with entries ≥ 0: √(max row sum · max column sum).

    Schur's test. The row sums are A·1, the column sums Aᵀ·1 by autograd. Sums of n ≤ 2³⁰ non-negative float64 numbers
    are exact to a relative 2⁻²², which is added.
    """
    ones = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        rows = operation(ones)
        (columns,) = torch.autograd.grad(rows.sum(), ones)
    if not bool((rows >= 0).all()) or not bool((columns >= 0).all()):
        raise NoAnswer("weights of both signs")
    # Roundings of sums of non-negative terms: each of the n additions is off by at most 2⁻⁵³ relative.
    slack = 1 + ones.numel() * 2.0**-51
    return (Upper(rows.max().item()) * slack * (Upper(columns.max().item()) * slack)).sqrt()


def _averaging(operation: Callable[..., Tensor]) -> Callable[..., Value]:
    def answer(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
        """An average with weights ≥ 0: Schur's test on one channel. Entries do not grow."""
        spatial = x.shape[1:] if len(x.shape) == len(call.shape) else x.shape
        norm = schur_norm(lambda ones: operation(ones, *args, **kwargs), (1, 1, *spatial[1:]))
        rows_axis = x.rows[0] if x.rows is not None and x.rows[0] == 1 else None
        return x.like(call.shape, x.lip * norm, rows_axis)

    return answer


for _operation in (
    F.avg_pool1d,
    F.avg_pool2d,
    F.avg_pool3d,
    F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d,
):
    rule(_operation)(_averaging(_operation))


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(
    call: Call,
    x: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    *args: Any,
    **kwargs: Any,
) -> Value:
    """|max a − max b| ≤ max|a − b| ≤ ‖a − b‖ per window, and an entry lies in m windows at most: √m.

    Along one axis an entry at p lies in the windows o with o·s + d·t = p for 0 ≤ t < k: at most ⌈k gcd(s, d)/s⌉ of them.
    """
    dims = len(call.shape) - 2
    kernel, step, gap = (_each(v, dims) for v in (kernel_size, stride or kernel_size, dilation))
    windows = math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in zip(kernel, step, gap, strict=True))
    return Value(call.shape, x.lip * Upper(windows).sqrt(), magnitude=x.magnitude)


@rule("adaptive_max_pool1d", "adaptive_max_pool2d")
def adaptive_max_pool(call: Call, x: Value, output_size: Any, *args: Any, **kwargs: Any) -> Value:
    """As max pooling. With n ≥ m, window i ends at ⌈(i+1)n/m⌉ ≤ ⌊(i+2)n/m⌋, where window i + 2 starts: 2 an axis at most."""
    if any(n < m for n, m in zip(x.shape[2:], call.shape[2:], strict=True)):
        raise NoAnswer("more results than entries")
    shared = math.prod(1 if n % m == 0 else 2 for n, m in zip(x.shape[2:], call.shape[2:], strict=True))
    return Value(call.shape, x.lip * Upper(shared).sqrt(), magnitude=x.magnitude)


@rule("amax", "amin")
def extreme(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
    """|max a − max b| ≤ ‖a − b‖; different results share no entry."""
    return Value(call.shape, x.lip, magnitude=x.magnitude)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value if len(value) == dims else value * dims)
