"""The attention and activation modules of lipcert.surgery, each of which computes its own constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._box import Propagation, State, clip, extended, monotone
from lipcert.bounds._registry import Call, NoAnswer, box, rounding, rule
from lipcert.bounds._rounding import Operand, exact
from lipcert.bounds._value import Value, largest
from lipcert.bounds.rules.activation import clips
from lipcert.graph import Node
from lipcert.numerics import INFINITE, Format, Upper
from lipcert.surgery import (
    ClippedMaxMin,
    ClippedReLU,
    L2Attention,
    L2RotaryAttention,
    L2SetAttention,
    L2WindowAttention,
    MaxMin,
    SmoothMaxMin,
)


@rule(L2Attention)
def distance_attention(call: Call, module: L2Attention, x: Value, *args: Any, **kwargs: Any) -> Value:
    """The constant of the module, given the bound on the norms of the tokens if any; proof in lipcert.surgery."""
    bound = module.lipschitz(x.shape[-2:], token_norm=_finite(x.row_norm(-1)))
    return Value(call.shape, x.lip * bound.value)


@rule(L2WindowAttention)
def window_attention(call: Call, module: L2WindowAttention, x: Value, mask: Any = None) -> Value:
    """As above for each window, with its bias and mask; the windows share no entry."""
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
    """The constant of the module, with the bound on the norms of the tokens if there is one; sets share no entry.

    The proof is in lipcert.surgery. Windows are padded and cropped by whole tokens, as ``size`` says. GCViT passes its
    global queries as ``size`` to every block; local attention does not read them.
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
    """The constant of L2 attention times the square of the largest rotation norm; proof in lipcert.surgery."""
    norm = _finite(x.row_norm(-1))
    bound = module.lipschitz(x.shape[-2:], token_norm=norm, rope=rope)
    rows = None if norm is None else (-1, module.result_norm(norm, rope))
    return Value(call.shape, x.lip * bound.value, rows=rows)


def _finite(norm: Upper) -> Upper | None:
    return norm if norm.finite else None


@rule(ClippedReLU)
def clipped_relu(call: Call, module: ClippedReLU, x: Value) -> Value:
    """min(max(x, 0), θ): constant 1. Entries do not grow, unless θ is negative: then the result is θ."""
    floor = largest(module.threshold.clamp(max=0))
    bounded = x.bounded(x.lip * module.lipschitz(x.shape[1:]).value)
    return bounded if floor == 0 else Value(call.shape, bounded.lip, magnitude=max(bounded.magnitude, floor))


box(ClippedReLU, inactive=True)(clip)


def _thresholds(node: Node) -> tuple[float, Tensor]:
    module: Any = node.function
    return 0.0, module.threshold


clips(ClippedReLU, limits=_thresholds)


@rule(MaxMin, ClippedMaxMin)
def max_min(call: Call, module: MaxMin | ClippedMaxMin, x: Value) -> Value:
    """Sorts pairs: constant 1, as proved in lipcert.surgery. MaxMin without clipping does not enlarge entries."""
    size = x.magnitude if isinstance(module, MaxMin) else INFINITE
    return Value(call.shape, x.lip * module.lipschitz(x.shape[1:]).value, magnitude=size)


@rule(SmoothMaxMin)
def smooth_max_min(call: Call, module: SmoothMaxMin, x: Value) -> Value:
    """Constant 1, as proved in lipcert.surgery. 0 ≤ s(t) − max(t, 0) ≤ β log 2, so entries grow by at most that."""
    size = x.magnitude + math.log(2) * (1 + 1e-12) * abs(module.beta)
    return Value(call.shape, x.lip * module.lipschitz(x.shape[1:]).value, magnitude=size)


@box(MaxMin, ClippedMaxMin, inactive=True)
def max_min_box(propagation: Propagation, node: Node, x: State) -> State:
    """Pairs (a, b) ↦ (max, min), which are non-decreasing in both.

    If the boxes determine the order of a pair, the operation is a permutation, and an entry whose result is constant
    has weight 0. Otherwise both entries have weight 0 if both results are constant.
    """
    module: Any = node.function
    dim = module.dim + 1 if module.dim >= 0 else module.dim
    up, down, low, high = monotone(propagation, node, x)
    top, bottom = (high > low).double().chunk(2, dim)
    (low_a, low_b), (high_a, high_b) = x.low.chunk(2, dim), x.high.chunk(2, dim)
    either = torch.maximum(top, bottom)
    first = torch.where(low_a >= high_b, top, torch.where(low_b >= high_a, bottom, either))
    second = torch.where(low_a >= high_b, bottom, torch.where(low_b >= high_a, top, either))
    factors = extended(x, torch.cat((first, second), dim), local=True)
    return propagation.result(node, up, down, factors=factors, open=False)


rounding(MaxMin)(exact)


@rounding(ClippedMaxMin)
def clipped_max_min_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Comparisons are exact, but the thresholds are rounded to the deployed format."""
    module: Any = node.function
    axis = module.dim % len(node.shape)
    half = [n // 2 if i == axis else n for i, n in enumerate(node.shape)]
    limits = [fmt.cast(limit).expand(half) for limit in (module.upper, module.lower)]
    return torch.cat(limits, axis).expand(len(operands[0].nominal), *node.shape)
