"""The rules of the modules here that stand for timm's less common attention and normalisation, kept whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lipcert._upper import Upper
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import Value
from lipcert.surgery._arranged import L2RotaryAttention, L2SetAttention
from lipcert.surgery._projections import (
    GroupLayerProject,
    GroupSmoothProject,
    RmsLayerProject,
    RmsSmoothProject,
    _Projection,
)


@rule(RmsLayerProject, RmsSmoothProject, GroupLayerProject, GroupSmoothProject)
def projection(call: Call, module: _Projection, x: Value) -> Value:
    """Proof in lipcert.surgery: constant max|weight|, and every vector of channels of the result has a bounded norm."""
    lip = x.lip * module.lipschitz(x.shape[1:]).value
    return Value(call.shape, lip, rows=(1 if module.channels_first else -1, module.token_norm()))


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
