"""Modules of lipcert.surgery, kept whole: each knows its own constant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert._upper import INFINITE, Upper
from lipcert.bounds._registry import Call, NoAnswer, remainder, rule
from lipcert.bounds._remainder import Against, Kinked, Radial, RadialKink, per_image
from lipcert.bounds._value import Value, largest
from lipcert.bounds.remainders.radial import ByGroup
from lipcert.bounds.remainders.secants import SecantProjection
from lipcert.graph import Node
from lipcert.surgery import (
    ClippedMaxMin,
    ClippedReLU,
    GroupLayerProject,
    GroupSmoothProject,
    L2Attention,
    L2RotaryAttention,
    L2SetAttention,
    L2WindowAttention,
    LayerProject,
    MaxMin,
    RmsLayerProject,
    RmsSmoothProject,
    SmoothProject,
)


@rule(LayerProject, SmoothProject, RmsLayerProject, RmsSmoothProject, GroupLayerProject, GroupSmoothProject)
def projection(call: Call, module: LayerProject | SmoothProject, x: Value) -> Value:
    """Proof in lipcert.surgery: constant max|weight|, and every vector of channels of the result has a bounded norm."""
    lip = x.lip * module.lipschitz(x.shape[1:]).value
    return Value(call.shape, lip, rows=(1 if module.channels_first else -1, module.token_norm()))


@rule(L2Attention)
def distance_attention(call: Call, module: L2Attention, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Proof in lipcert.surgery, with the bound on the tokens' norms where there is one."""
    bound = module.lipschitz(x.shape[-2:], token_norm=_finite(x.row_norm(-1)))
    return Value(call.shape, x.lip * bound.value)


@rule(L2WindowAttention)
def window_attention(call: Call, module: L2WindowAttention, x: Value, mask: Any = None) -> Value:
    """As above for each window, with its bias and mask; windows share no entry."""
    bound = module.lipschitz(x.shape[-2:], token_norm=_finite(x.row_norm(-1)), mask=mask)
    return Value(call.shape, x.lip * bound.value)


@rule(L2SetAttention)
def set_attention(
    call: Call,
    module: L2SetAttention,
    x: Value,
    size: Any = None,
    *,
    mask: Tensor | None = None,
    shared_rel_pos: Tensor | None = None,
    shared_rel_pos_bias: Tensor | None = None,
) -> Value:
    """Proof in lipcert.surgery, with the bound on the tokens' norms where there is one; sets share no entry.

    Padding and cropping windows add and leave out whole tokens. ``size`` says how; GCViT gives every block its global
    queries there, which local attention does not read.
    """
    axis = 1 if module.arrangement == "channels" else -1
    norm = _finite(x.row_norm(axis))
    shared = shared_rel_pos if shared_rel_pos_bias is None else shared_rel_pos_bias
    if shared_rel_pos is not None and shared_rel_pos_bias is not None:
        raise NoAnswer("two shared biases")
    bound = module.lipschitz(x.shape[1:], token_norm=norm, mask=mask, shared=shared)
    rows = None if norm is None else (axis, module.result_norm(norm))
    return Value(call.shape, x.lip * bound.value, rows=rows)


@rule(L2RotaryAttention)
def rotary_attention(
    call: Call,
    module: L2RotaryAttention,
    x: Value,
    rope: Tensor | None = None,
    attn_mask: None = None,
    is_causal: bool = False,
) -> Value:
    """Proof in lipcert.surgery: the constant of attention by distance times the square of the largest turn."""
    norm = _finite(x.row_norm(-1))
    bound = module.lipschitz(x.shape[-2:], token_norm=norm, rope=rope)
    rows = None if norm is None else (-1, module.result_norm(norm, rope))
    return Value(call.shape, x.lip * bound.value, rows=rows)


def _finite(norm: Upper) -> Upper | None:
    return norm if norm.finite else None


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


def _lengths(module: Any, h: Tensor) -> tuple[Tensor, int]:
    """‖h_t‖, centred where the module centres, for every token, and the axis of the channels behind the image axis."""
    axis = 2 if module.channels_first else -1
    return per_image((h - h.mean(axis, keepdim=True) if module.centred else h).norm(dim=axis)), axis


@remainder(SmoothProject, RmsSmoothProject)
class SmoothProjection(Radial):
    """u = h/√(1 + ‖h‖²/R²): the form of :class:`Radial` itself."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        length, axis = _lengths(module, operands[0])
        super().__init__(length, float(module.radius), 1.0, module.weight.detach(), axis)


@remainder(LayerProject, RmsLayerProject)
class LayerProjection(RadialKink):
    """u = h·min(1, R/‖h‖): :class:`RadialKink`, or a secant of width 0."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        length, axis = _lengths(module, operands[0])
        super().__init__(length, float(module.radius), module.weight.detach(), axis)
        self.secant = SecantProjection(node, [operands[0], torch.zeros_like(length[:, :1])], result)
        self.units = self.secant.units

    token = SecantProjection.token

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        plain = super().norm(rho)
        return plain if len(rho) == 1 else torch.minimum(plain, self.secant.norm(rho))

    def against(self, direction: Tensor) -> Against:
        plain, secant = super().against(direction), self.secant.against(direction)
        return lambda rho: plain(rho) if len(rho) == 1 else torch.minimum(plain(rho), secant(rho))


@remainder(GroupSmoothProject)
class GroupSmoothProjection(ByGroup, Radial):
    """As above with the groups for tokens."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        self.groups = module.groups
        rows = self.split(operands[0])
        length = (rows - rows.mean(-1, keepdim=True)).norm(dim=-1)
        super().__init__(length, float(module.radius), 1.0, module.weight.detach(), 2)


@remainder(GroupLayerProject)
class GroupLayerProjection(ByGroup, RadialKink):
    """As above with the groups for tokens."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        self.groups = module.groups
        rows = self.split(operands[0])
        length = (rows - rows.mean(-1, keepdim=True)).norm(dim=-1)
        super().__init__(length, float(module.radius), module.weight.detach(), 2)


@remainder(ClippedReLU)
class Clipping(Kinked):
    """Slope 1 between kinks at 0 and θ and 0 outside: |R_i| ≤ (|δ_i| − distance to the nearer kink)₊."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        z = operands[0]
        super().__init__(torch.minimum(z.abs(), (z - module.threshold.double()).abs()))
