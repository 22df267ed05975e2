"""Softmax and dot-product attention, which are finite where queries, keys and values are bounded."""

from __future__ import annotations

import math
from typing import Any

from lipcert._upper import Upper
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import Value


@rule("softmax")
def softmax(call: Call, x: Value, dim: int | None = None, *args: object, **kwargs: object) -> Value:
    """The Jacobian is diag(p) − ppᵀ ⪯ ½.

    vᵀ(diag(p) − ppᵀ)v is the variance of v under p, at most (max v − min v)²/4 ≤ ½‖v‖², by Popoviciu's inequality and
    (a − b)² ≤ 2(a² + b²).
    """
    if dim is None:
        raise NoAnswer("softmax without a dimension")
    last = dim % len(x.shape) == len(x.shape) - 1
    result = Value(x.shape, x.lip / 2, magnitude=1, rows=(dim, 1), stochastic=last, floor=0.0)
    result.mass = 1.0 if last else 0.0
    return result


@rule("scaled_dot_product_attention")
def attention(
    call: Call,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """O = softmax(s q kᵀ + mask) v on vectors with ‖q_i‖ ≤ t_q, ‖k_j‖ ≤ t_k, ‖v_j‖ ≤ t_v, n queries.

    δO_i = Σ_j P_ij δv_j + Cov_{P_i}(δA_ij, v_j) with δA_ij = s(δq_i·k_j + q_i·δk_j). The covariance is at most
    std(δA_i) t_v, and std(δq_i·k) ≤ ‖δq_i‖ t_k while std(q_i·δk) ≤ √½ t_q ‖δk‖_F, because diag(p) − ppᵀ ⪯ ½. P is
    row-stochastic, so ‖P‖₂ ≤ √n. Over all rows and heads:

        ‖δO‖ ≤ √n ‖δv‖ + s t_v (t_k ‖δq‖ + √(n/2) t_q ‖δk‖).

    A bias that depends on the image adds Cov_{P_i}(δM_i, v), at most √½ t_v ‖δM_i‖. Where entries are broadcast, or a
    group of queries shares its keys and values (``enable_gqa``), every one is used m times, which gives √m.
    The bounds t hold on the whole image box, which is convex, so the derivative bound holds along every segment.
    """
    if dropout_p:
        raise NoAnswer("dropout, which is random here in evaluation mode too")
    q, k, v = (x if isinstance(x, Value) else Value.constant(x) for x in (query, key, value))
    batch = math.prod(call.shape[:-2])
    spread = [Upper(batch // max(1, math.prod(x.shape[:-2]))).sqrt() for x in (q, k, v)]
    n = q.shape[-2]
    s = abs(scale) if scale is not None else Upper(1) / math.nextafter(math.sqrt(q.shape[-1]), 0)
    t_q, t_k, t_v = q.row_norm(-1), k.row_norm(-1), v.row_norm(-1)
    through_scores = t_k * q.lip * spread[0] + (Upper(n) / 2).sqrt() * t_q * k.lip * spread[1]
    lip = Upper(n).sqrt() * v.lip * spread[2] + t_v * s * through_scores
    if isinstance(attn_mask, Value):
        scores = batch * n * k.shape[-2]
        copies = Upper(scores // max(1, math.prod(attn_mask.shape))).sqrt()
        lip = lip + t_v * (Upper(1) / 2).sqrt() * attn_mask.lip * copies
    return Value(call.shape, lip, magnitude=v.magnitude, rows=(-1, t_v), floor=v.lowest)
