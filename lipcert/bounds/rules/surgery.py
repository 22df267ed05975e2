"""Modules of lipcert.surgery, kept whole: each knows its own constant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert._upper import INFINITE
from lipcert.bounds._registry import Call, rule
from lipcert.bounds._remainder import Kinked, Radial, RadialKink, per_image, remainder
from lipcert.bounds._value import Value, largest
from lipcert.graph import Node
from lipcert.surgery import (
    ClippedMaxMin,
    ClippedReLU,
    L2Attention,
    L2WindowAttention,
    LayerProject,
    MaxMin,
    SmoothProject,
)


@rule(LayerProject, SmoothProject)
def projection(call: Call, module: LayerProject | SmoothProject, x: Value) -> Value:
    """Proof in lipcert.surgery: constant max|weight|, and every token of the result has a bounded norm."""
    lip = x.lip * module.lipschitz(x.shape[1:]).value
    return Value(call.shape, lip, rows=(1 if module.channels_first else -1, module.token_norm()))


@rule(L2Attention)
def distance_attention(call: Call, module: L2Attention, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Proof in lipcert.surgery, with the bound on the tokens' norms where there is one."""
    norm = x.row_norm(-1)
    bound = module.lipschitz(x.shape[-2:], token_norm=norm if norm.finite else None)
    return Value(call.shape, x.lip * bound.value)


@rule(L2WindowAttention)
def window_attention(call: Call, module: L2WindowAttention, x: Value, mask: Any = None) -> Value:
    """As above for each window, with its bias and mask; windows share no entry."""
    norm = x.row_norm(-1)
    bound = module.lipschitz(x.shape[-2:], token_norm=norm if norm.finite else None, mask=mask)
    return Value(call.shape, x.lip * bound.value)


@rule(ClippedReLU)
def clipped_relu(call: Call, module: ClippedReLU, x: Value) -> Value:
    """min(max(x, 0), θ): constant 1; entries do not grow, unless θ is negative: then the result is θ itself."""
    floor = largest(module.threshold.clamp(max=0))
    bounded = x.bounded(x.lip * module.lipschitz(x.shape[1:]).value)
    return bounded if floor == 0 else Value(call.shape, bounded.lip, magnitude=max(bounded.magnitude, floor))


@rule(MaxMin, ClippedMaxMin)
def max_min(call: Call, module: MaxMin | ClippedMaxMin, x: Value) -> Value:
    """Sorts pairs: constant 1 by lipcert.surgery."""
    return Value(call.shape, x.lip * module.lipschitz(x.shape[1:]).value, magnitude=INFINITE)


def _centred_length(module: Any, h: Tensor) -> tuple[Tensor, int]:
    """‖h_t − mean‖ for every token, shape (N, tokens), and the axis of the channels behind the image axis."""
    axis = 2 if module.channels_first else -1
    return per_image((h - h.mean(axis, keepdim=True)).norm(dim=axis)), axis


@remainder(SmoothProject)
class SmoothProjection(Radial):
    """u = h/√(1 + ‖h‖²/R²): the form of :class:`Radial` itself."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        length, axis = _centred_length(module, operands[0])
        super().__init__(length, float(module.radius), 1.0, module.weight.detach(), axis)


@remainder(LayerProject)
class LayerProjection(RadialKink):
    """u = h·min(1, R/‖h‖): :class:`RadialKink`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        length, axis = _centred_length(module, operands[0])
        super().__init__(length, float(module.radius), module.weight.detach(), axis)


@remainder(ClippedReLU)
class Clipping(Kinked):
    """Slope 1 between kinks at 0 and θ and 0 outside: |R_i| ≤ (|δ_i| − distance to the nearer kink)₊."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        z = operands[0]
        super().__init__(torch.minimum(z.abs(), (z - module.threshold.double()).abs()))
