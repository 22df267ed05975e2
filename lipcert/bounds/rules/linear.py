"""Matrices and convolutions. Their norms come from lipcert.norms; a scale in front is folded in first."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lipcert._estimate import held
from lipcert._upper import Upper
from lipcert.bounds._registry import Call, NoAnswer, in_one_operand, rule
from lipcert.bounds._value import Conv, Dense, Scale, Value, largest, largest_row_norm, largest_row_sum, vector_norm
from lipcert.bounds.rules.pooling import per_axis
from lipcert.norms import conv_transpose_norm


@rule("linear", linear=in_one_operand)
def dense(call: Call, x: Value, weight: Any, bias: Tensor | None = None) -> Value:
    """x ↦ Wx + b along the last axis: constant ‖W‖₂; an entry is at most ‖w_o‖₁ max|x|, and at most ‖w_o‖₂ ‖x‖₂."""
    if isinstance(weight, Value):
        raise NoAnswer("the weight depends on the image")
    if weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        raise NoAnswer("a weight that is no matrix, or a bias that is no vector")
    shift = largest(bias) if bias is not None else Upper(0)
    magnitude = min(largest_row_sum(weight) * x.magnitude, largest_row_norm(weight) * x.row_norm(-1)) + shift
    inner, matrix, offset, error = x, Dense(weight), None, Upper(0)
    if isinstance(x.map, Scale) and x.base is not None and (folded := matrix.after(x.map)) is not None:
        inner, matrix = x.base, folded
        if x.offset is not None:
            offset, error = constant_part(held(weight), x.offset.to(weight.device), x.offset_error)
    else:
        offset = weight.new_zeros(weight.shape[0]).double()
    if offset is not None and bias is not None:
        offset = offset + held(bias).double()
        error = error + (vector_norm(offset) + vector_norm(bias)) * 2.0**-52
    return Value(call.shape, magnitude=magnitude, base=inner, map=matrix, offset=offset, offset_error=error)


def constant_part(weight: Tensor, offset: Tensor, error: Upper) -> tuple[Tensor, Upper]:
    """W·offset, and a bound on the norm of what rounding, and the offset's own error, left out of it.

    Inner products of length n are off by at most (n + 1) 2⁻⁵³ |W||offset|, whatever the order of their sums.
    """
    exact = weight.double()
    rounding = vector_norm(exact.abs() @ offset.abs()) * ((weight.shape[1] + 4) * 2.0**-52)
    return exact @ offset, rounding + error * vector_norm(weight)


@rule("conv1d", "conv2d", "conv3d", linear=in_one_operand)
def conv(
    call: Call,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    """x ↦ w ∗ x + b: constant by lipcert.norms.conv_norm; an entry is at most ‖w_o‖₁ max|x|."""
    dims = len(weight.shape) - 2
    if len(x.shape) != dims + 2:
        raise NoAnswer("an input without batch axis")
    if isinstance(weight, Value) or isinstance(bias, Value) or not isinstance(x, Value):
        return _conv_by_values(call, x, weight, bias)
    dilation = per_axis(dilation, dims)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        sides = tuple((total // 2, total - total // 2) for total in totals)
    elif padding == "valid":
        sides = ((0, 0),) * dims
    else:
        sides = tuple((p, p) for p in per_axis(padding, dims))
    geometry = {"stride": per_axis(stride, dims), "padding": sides, "dilation": dilation, "groups": groups}
    magnitude = largest_row_sum(weight) * x.magnitude + (largest(bias) if bias is not None else 0)
    inner, operator = x, Conv(weight, x.shape[2:], geometry)
    if isinstance(x.map, Scale) and x.base is not None and (folded := operator.after(x.map)) is not None:
        inner, operator = x.base, folded
    return Value(call.shape, magnitude=magnitude, base=inner, map=operator)


def _conv_by_values(call: Call, x: Any, weight: Any, bias: Any) -> Value:
    """w ∗ x with a weight that depends on the image: δ(w ∗ x) = w' ∗ δx + δw ∗ x, linear in each.

    With T taps w ∗ x = Σ_t S_t w_t x, S_t of norm ≤ 1 (shift, stride, padding), w_t a matrix at every position, so
    ‖w ∗ x‖ ≤ Σ_t ‖w_t‖‖x‖ ≤ √T ‖w‖_F ‖x‖_F. A bias is repeated at every position, and for every input of a batch.
    """
    x, weight = (v if isinstance(v, Value) else Value.constant(v) for v in (x, weight))
    taps = Upper(math.prod(weight.shape[2:])).sqrt()
    lip = taps * (weight.total_norm() * x.lip + x.total_norm() * weight.lip)
    magnitude = weight.magnitude * x.magnitude * math.prod(weight.shape[1:])
    if bias is not None:
        added = bias if isinstance(bias, Value) else Value.constant(bias)
        lip = lip + added.lip * Upper(math.prod(call.shape) // max(1, math.prod(added.shape))).sqrt()
        magnitude = magnitude + added.magnitude
    return Value(call.shape, lip, magnitude=magnitude)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", linear=in_one_operand)
def conv_transpose(
    call: Call,
    x: Value,
    weight: Any,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Value:
    """The adjoint of a convolution, of equal norm; an entry sums at most every weight into its channel."""
    if isinstance(weight, Value):
        raise NoAnswer("the weight depends on the image")
    dims = weight.dim() - 2
    if len(x.shape) != dims + 2:
        raise NoAnswer("an input without batch axis")
    norm = conv_transpose_norm(
        weight,
        x.shape[2:],
        stride=per_axis(stride, dims),
        padding=per_axis(padding, dims),
        output_padding=per_axis(output_padding, dims),
        dilation=per_axis(dilation, dims),
        groups=groups,
    )
    per_output = (
        held(weight).reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).reshape(groups * weight.shape[1], -1)
    )
    magnitude = largest_row_sum(per_output) * x.magnitude + (largest(bias) if bias is not None else 0)
    return Value(call.shape, x.lip * norm, magnitude=magnitude)
