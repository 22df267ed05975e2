"""Pooling and other averages: linear maps with non-negative weights, and maxima."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert._upper import Upper, root_sum_squares
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import Value


def schur_norms(operation: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> tuple[Upper, Upper]:
    """The largest row sum of a linear map A with entries ≥ 0, and a bound on ‖A‖: √(max row sum · max column sum).

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
    largest_row, largest_column = (Upper(sums.max().item()) * slack for sums in (rows, columns))
    return largest_row, (largest_row * largest_column).sqrt()


def _averaging(operation: Callable[..., Tensor], dims: int) -> Callable[..., Value]:
    def answer(call: Call, x: Value, *args: object, **kwargs: object) -> Value:
        """Weights ≥ 0: Schur's test on one channel. Entries and rows over channels grow by the largest row sum."""
        shape = (1, 1, *x.shape[-dims:])
        rows_norm, norm = schur_norms(lambda ones: operation(ones, *args, **kwargs), shape)
        rows = None
        if x.rows is not None and x.rows[0] == len(x.shape) - dims - 1:
            rows = (x.rows[0], x.rows[1] * rows_norm)
        floor = 0.0 if x.lowest >= 0 else -math.inf
        return Value(call.shape, x.lip * norm, magnitude=x.magnitude * rows_norm, rows=rows, floor=floor)

    return answer


for _dims, _operation in (
    (1, F.avg_pool1d),
    (2, F.avg_pool2d),
    (3, F.avg_pool3d),
    (1, F.adaptive_avg_pool1d),
    (2, F.adaptive_avg_pool2d),
    (3, F.adaptive_avg_pool3d),
):
    rule(_operation, linear=True)(_averaging(_operation, _dims))


def _maximum(dims: int) -> Callable[..., Value]:
    def answer(
        call: Call,
        x: Value,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Value:
        """|max a − max b| ≤ max|a − b| ≤ ‖a − b‖ per window, and an entry lies in m windows at most: √m.

        Along one axis an entry at p lies in the windows o with o·s + d·t = p for 0 ≤ t < k: at most ⌈k gcd(s, d)/s⌉.
        """
        if return_indices:
            raise NoAnswer("indices of the maxima")
        kernel, step, around, gap = (per_axis(v, dims) for v in (kernel_size, stride or kernel_size, padding, dilation))
        places = covered(call.shape[-dims:], kernel, step, around, gap)
        if any(not bool(((p >= 0) & (p < n)).any(1).all()) for p, n in zip(places, x.shape[-dims:], strict=True)):
            raise NoAnswer("a window of padding alone, whose largest entry is −∞")
        windows = math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in zip(kernel, step, gap, strict=True))
        return Value(call.shape, x.lip * Upper(windows).sqrt(), magnitude=x.magnitude, floor=x.lowest)

    return answer


def covered(
    results: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[Tensor]:
    """The positions that each window covers, for every axis: o·s + t·d − p with 0 ≤ t < k, shape (windows, entries)."""
    axes = zip(results, kernel, stride, padding, dilation, strict=True)
    return [torch.arange(m)[:, None] * s + torch.arange(k) * d - p for m, k, s, p, d in axes]


def _adaptive_maximum(dims: int) -> Callable[..., Value]:
    def answer(call: Call, x: Value, output_size: object, return_indices: bool = False) -> Value:
        """As max pooling. Window i ends at ⌈(i+1)n/m⌉ ≤ ⌊(i+2)n/m⌋, where window i + 2 starts, if n ≥ m: 2 an axis."""
        if len(call.shape) != len(x.shape):
            raise NoAnswer("indices of the maxima")
        sizes = list(zip(x.shape[-dims:], call.shape[-dims:], strict=True))
        if return_indices or any(n < m for n, m in sizes):
            raise NoAnswer("more results than entries, or their indices")
        shared = math.prod(1 if n % m == 0 else 2 for n, m in sizes)
        return Value(call.shape, x.lip * Upper(shared).sqrt(), magnitude=x.magnitude, floor=x.lowest)

    return answer


for _dims in (1, 2, 3):
    rule(f"max_pool{_dims}d")(_maximum(_dims))
    rule(f"adaptive_max_pool{_dims}d")(_adaptive_maximum(_dims))


@rule("amax", "amin")
def extreme(call: Call, x: Value, *args: object, **kwargs: object) -> Value:
    """|max a − max b| ≤ ‖a − b‖; different results share no entry."""
    return Value(call.shape, x.lip, magnitude=x.magnitude, floor=x.lowest)


def _larger(pick: Callable[..., float]) -> Callable[..., Value]:
    def answer(call: Call, x: Any, other: Any) -> Value:
        """Of two values |δ max(x, y)| ≤ max(|δx|, |δy|), entry by entry."""
        pair = (x, other)
        values = [v if isinstance(v, Value) else Value.constant(torch.as_tensor(v, dtype=torch.float64)) for v in pair]
        copies = [Upper(math.prod(call.shape) // max(1, math.prod(v.shape))).sqrt() for v in values]
        lip = root_sum_squares(*(v.lip * m for v, m in zip(values, copies, strict=True)))
        floor = pick(v.lowest if isinstance(v, Value) else _lowest(v) for v in pair)
        return Value(call.shape, lip, magnitude=max(v.magnitude for v in values), floor=floor)

    return answer


rule("max", "maximum")(_larger(max))
rule("min", "minimum")(_larger(min))


def _lowest(constant: Any) -> float:
    return torch.as_tensor(constant, dtype=torch.float64).min().item()


def per_axis(value: Any, dims: int) -> tuple[int, ...]:
    """An argument of a window as one number for each axis."""
    return (value,) * dims if isinstance(value, int) else tuple(value if len(value) == dims else value * dims)
