"""Normalisations: by fixed statistics (linear), and by the value's own (bounded, with slope at most 1/√eps)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert._estimate import held
from lipcert._upper import INFINITE, Upper
from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import COMPOSED, Scale, Value, largest
from lipcert.bounds.rules.arithmetic import _shifted, _times
from lipcert.graph import Node


def _by_fixed_statistics(node: Node) -> bool:
    if arguments(node).get("training", False):
        raise NoAnswer("normalises by the image's own statistics")
    return True


@rule("batch_norm", linear=_by_fixed_statistics)
def batch_norm(
    call: Call,
    x: Value,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Value:
    """In evaluation mode a scale γ/√(var + eps) per channel, folded into the convolution before it."""
    if training or running_mean is None or running_var is None:
        raise NoAnswer("batch statistics: one image's result would depend on the others")
    variance = running_var.detach().double() + eps
    if not bool((variance >= 0).all()):
        raise NoAnswer("a negative variance")
    scale = variance.rsqrt()
    if weight is not None:
        scale = scale * held(weight).double()
    moved = running_mean.detach().double() * scale
    shift = moved.abs()
    if bias is not None:  # the two may cancel, which leaves their roundings
        shift = (held(bias).double() - moved).abs() + (held(bias).double().abs() + shift) * 2.0**-49
    channels = (1, -1, *[1] * (len(x.shape) - 2))
    return _shifted(call, _times(call, x, scale.reshape(channels)), shift.reshape(channels) * COMPOSED)


def _standardized(x: Value, shape: tuple[int, ...], size: int, eps: float | None, axis: int | None) -> Value:
    """x̂ = (x − μ)/s with s² = ‖x − μ‖²/size + eps, or without μ, over groups of ``size`` entries.

    The Jacobian is (1/s)(C − x̂x̂ᵀ/size) with C a projection that keeps x̂, and ‖x̂‖² ≤ size: symmetric, between 0 and C,
    so its norm is at most 1/s ≤ 1/√eps. Without eps it has no finite constant.
    """
    if eps is not None and not eps >= 0:
        raise NoAnswer(f"eps = {eps:g}")
    lip = x.lip * (Upper(1) / eps).sqrt() if eps else INFINITE if x.lip > 0 else Upper(0)
    root = Upper(size).sqrt()
    unbounded = "" if eps else "eps is 0, so that its slope is unbounded where a group is constant"
    return Value(shape, lip, magnitude=root, rows=(axis, root) if axis is not None else None, unbounded=unbounded)


def _affine(base: Value, weight: Tensor | None, bias: Tensor | None, axis: int, dims: int = 1) -> Value:
    """γ ∘ base + β, with γ and β along ``axis`` (and the ones after it, ``dims`` in all)."""
    if weight is None and bias is None:
        return base
    form = [1] * len(base.shape)
    axis = axis % len(base.shape)
    form[axis : axis + dims] = base.shape[axis : axis + dims]
    magnitude = base.magnitude * (largest(weight) * COMPOSED if weight is not None else 1)
    if bias is not None:
        magnitude = magnitude + largest(bias)
    scale = torch.ones(form, dtype=torch.float64) if weight is None else held(weight).double().reshape(form)
    last = dims == 1 and axis == len(base.shape) - 1
    offset = None
    if last:
        offset = scale.new_zeros(base.shape[-1]) if bias is None else held(bias).double()
    return Value(base.shape, magnitude=magnitude, base=base, map=Scale(scale), offset=offset)


@rule("layer_norm")
def layer_norm(
    call: Call,
    x: Value,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Value:
    """γ ∘ (x − μ)/√(σ² + eps) + β: slope at most 1/√eps, ‖x̂‖ ≤ √d; γ is folded into the matrix that follows."""
    dims = len(normalized_shape)
    base = _standardized(x, call.shape, math.prod(normalized_shape), eps, -1 if dims == 1 else None)
    return _affine(base, weight, bias, -dims, dims)


@rule("rms_norm")
def rms_norm(
    call: Call, x: Value, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Value:
    """γ ∘ x/√(mean x² + eps); without eps torch takes the machine epsilon of the input's type."""
    dims = len(normalized_shape)
    smallest = 2.0**-52 if eps is None else eps  # the smaller epsilon gives the larger, safe constant
    base = _standardized(x, call.shape, math.prod(normalized_shape), smallest, -1 if dims == 1 else None)
    return _affine(base, weight, None, -dims, dims)


@rule("group_norm")
def group_norm(
    call: Call, x: Value, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Value:
    """LayerNorm over the channels of a group and all positions, with γ and β per channel."""
    base = _standardized(x, call.shape, math.prod(x.shape[1:]) // num_groups, eps, None)
    return _affine(base, weight, bias, 1)


@rule("normalize")
def normalize(call: Call, x: Value, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Value:
    """x/max(‖x‖, eps): slope at most 1/eps, as it is x/eps inside the ball and a projection onto a sphere outside."""
    if p != 2.0:
        raise NoAnswer(f"p = {p:g}")
    if not isinstance(dim, int):
        raise NoAnswer("several dimensions")
    if not eps > 0:
        return Value(call.shape, INFINITE, rows=(dim, 1), unbounded="eps is 0, so that its slope is unbounded near 0")
    return Value(call.shape, x.lip * (Upper(1) / eps), rows=(dim, 1))
