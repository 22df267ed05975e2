"""Convolutions. Their norms come from lipcert.norms; a preceding scale is multiplied into the weights first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._box import operator
from lipcert.bounds._jacobian import Bounds, bilinear, lengths
from lipcert.bounds._registry import (
    Call,
    NoAnswer,
    Schur,
    Tag,
    box,
    in_one_operand,
    in_two_operands,
    jacobian,
    rounding,
    rule,
)
from lipcert.bounds._remainder import Bilinear, remainder
from lipcert.bounds._rounding import Operand
from lipcert.bounds._value import Scale, Value, largest, largest_row_sum
from lipcert.bounds.rules.linear import constant_arguments, matrix_rounding
from lipcert.graph import Node
from lipcert.norms import Geometry, Operator, conv_transpose_norm
from lipcert.numerics import Format, Upper, detached


def _products(node: Node, operand: Node) -> float:
    """Terms of a sum over channels and positions of the kernel; without the image as input, over its positions too."""
    args = arguments(node)
    weight = args["weight"]
    across = 0 if operand is args["input"] else node.entries / max(1, node.shape[1])
    return sum(weight.shape[:2]) * math.prod(weight.shape[2:]) + across


_KERNEL = Schur(magnitudes=True, terms=_products)


@rule("conv1d", "conv2d", "conv3d", linear=in_one_operand, schur=_KERNEL, tags=Tag.CONVOLVES)
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
    """x ↦ w ∗ x + b: the constant is lipcert.norms.conv_norm; an entry is at most ‖w_o‖₁ max|x| + |b_o|."""
    dims = len(weight.shape) - 2
    if len(x.shape) != dims + 2:
        raise NoAnswer("an input without batch axis")
    if isinstance(weight, Value) or isinstance(bias, Value) or not isinstance(x, Value):
        return _conv_by_values(call, x, weight, bias)
    geometry = Geometry.of(tuple(weight.shape[2:]), stride, padding, dilation, groups)
    magnitude = largest_row_sum(weight) * x.magnitude + (largest(bias) if bias is not None else 0)
    inner, operator = x, Operator(weight, geometry, x.shape[2:])
    if isinstance(x.map, Scale) and x.base is not None:
        folded = operator.after(x.map.along(1))
        inner, operator = (x, operator) if folded is None else (x.base, folded)
    return Value(call.shape, magnitude=magnitude, base=inner, map=operator)


def _conv_by_values(call: Call, x: Any, weight: Any, bias: Any) -> Value:
    """w ∗ x with a weight that depends on the image: δ(w ∗ x) = w' ∗ δx + δw ∗ x, bilinear.

    For a kernel with T positions w ∗ x = Σ_t S_t w_t x, where S_t has norm ≤ 1 (shift, stride, padding) and w_t is the
    same matrix at every pixel. So ‖w ∗ x‖ ≤ Σ_t ‖w_t‖‖x‖ ≤ √T ‖w‖_F ‖x‖_F. A bias is repeated at every pixel, and for
    every input of a batch.
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


box("conv1d", "conv2d", "conv3d")(operator)


@remainder("conv1d", "conv2d", "conv3d")
class DynamicConvolution(Bilinear):
    """w ∗ x with both depending on the image: K = √T, as in :func:`_conv_by_values`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        args = arguments(node)
        x, weight = args.get("input"), args.get("weight")
        if not isinstance(x, Node) or not isinstance(weight, Node):
            raise NoAnswer("a bias that depends on the image, and not both the input and the weight")
        self.factor = math.sqrt(math.prod(weight.shape[2:]))
        self.factors = (node.operands.index(x), node.operands.index(weight))


@jacobian("conv1d", "conv2d", "conv3d", covers=in_two_operands)
def convolution_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """The norm of the other operand times √T; each pair of entries is multiplied at most once per kernel position."""
    operand, other = node.operands[place], node.operands[1 - place]
    gain = lengths(values[other]) * math.sqrt(math.prod(node.operands[1].shape[2:]))
    return bilinear(gain, sum(operand.shape) + sum(node.shape) + math.prod(operand.shape[1:]))


@rounding("conv1d", "conv2d", "conv3d")
def conv_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`matrix_rounding`, sums over a kernel and its input channels, without Winograd or FFT transforms."""
    args = constant_arguments(node)
    geometry: dict[str, Any] = {k: args[k] for k in ("stride", "padding", "dilation", "groups") if k in args}
    return _convolution_rounding(node, operands[0], args, geometry, fmt, args["weight"].flatten(1).shape[1])


@rule("conv_transpose2d", linear=in_one_operand, schur=_KERNEL, tags=Tag.CONTRACTS)
def conv_transpose(
    call: Call,
    x: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Value:
    """The adjoint of a convolution, with the same norm; an entry is a sum over at most all weights of its channel."""
    dims = weight.dim() - 2
    if len(x.shape) != dims + 2:
        raise NoAnswer("an input without batch axis")
    geometry = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    norm = conv_transpose_norm(weight, x.shape[2:], groups=groups, **geometry)
    # A transposed weight is (inputs, outputs per group, …); here one row holds all weights of one output channel.
    per_output = (
        detached(weight).reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).reshape(groups * weight.shape[1], -1)
    )
    magnitude = largest_row_sum(per_output) * x.magnitude + (largest(bias) if bias is not None else 0)
    return Value(call.shape, x.lip * norm, magnitude=magnitude)


@rounding("conv_transpose2d")
def conv_transpose_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`matrix_rounding`; an entry is a sum over the input channels of its group and at most the whole kernel.

    Kernels add up overlapping results in the format itself, so no wider accumulator is assumed.
    """
    fmt = replace(fmt, sums=fmt.dtype)
    args = constant_arguments(node)
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    geometry: dict[str, Any] = {k: args[k] for k in names if k in args}
    weight = args["weight"]
    terms = weight.shape[0] // int(args.get("groups", 1)) * math.prod(weight.shape[2:])
    return _convolution_rounding(node, operands[0], args, geometry, fmt, terms)


def _convolution_rounding(
    node: Node, x: Operand, args: dict[str, Any], geometry: dict[str, Any], fmt: Format, terms: int
) -> Tensor:
    transposed = "transpose" in str(node.op)
    function = getattr(F, str(node.op))
    dims = args["weight"].dim() - 2
    if x.nominal.dim() != dims + 3:
        raise NoAnswer("an input without batch axis")

    def apply(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return function(value.flatten(0, 1), weight, bias, **geometry).unflatten(0, value.shape[:2])

    def rows(weight: Tensor, norm: Callable[..., Tensor]) -> Tensor:
        if transposed:
            groups = int(geometry.get("groups", 1))
            weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        return norm(weight.flatten(1), 1).reshape(-1, *[1] * dims)

    return matrix_rounding(node, x, args["weight"], args.get("bias"), terms, apply, rows, fmt)
