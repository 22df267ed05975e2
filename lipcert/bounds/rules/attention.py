"""Softmax and dot-product attention, whose constants are finite if queries, keys and values are bounded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._arguments import axis_of
from lipcert.bounds._jacobian import Bounds, gamma
from lipcert.bounds._registry import Call, NoAnswer, Tag, jacobian, rounding, rule
from lipcert.bounds._remainder import Against, Contracted, Form, Remainder, largest_share, per_image, remainder
from lipcert.bounds._rounding import Operand
from lipcert.bounds._value import Value
from lipcert.graph import Node
from lipcert.numerics import EXTRA, Format, Upper, l2_norm, over, sum_squares


@rule("softmax", tags=Tag.WIDENS)
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


# Far above the rounding error in float64 of an entry of c, relative to the largest, and of an entry of p.
_HIDDEN = 1e-11
_SOFTMAX_CURVATURE = 0.272166  # √(2/27), rounded up
_SPREAD = 0.192451  # √3/9, rounded up
_SPREAD_FURTHER = 0.707107  # 1/√2, rounded up


def _odds(p: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Terms of p = softmax(a) by which :func:`_grown` bounds the entries of softmax(a + w), each of shape (N, rows).

    Entry j of softmax(a + w) is p_j e^(w_j)/(p_j e^(w_j) + Σ_{i≠j} p_i e^(w_i)). With q_i = p_i/(1 − p_j), Jensen's
    inequality gives Σ_{i≠j} p_i e^(w_i) ≥ (1 − p_j) e^(Σ q_i w_i). So the entry is at most p_j/(p_j + (1 − p_j)e^(−t))
    with t = w_j − Σ q_i w_i ≤ √(1 + Σ q_i²) ‖w‖, which increases in p_j and in t. The largest p_j and the largest
    Σ q_i² ≤ 1 of a row count.
    """
    largest = per_image(p.amax(dim)) * (1 + _HIDDEN)
    others = (sum_squares(p, dim, keepdim=True) - p.square() + _HIDDEN).clamp_min(0)
    steep = (1 + per_image(over(others, (1 - p).square()).amax(dim)).clamp_max(1.0)).sqrt()
    return over(largest, 1 - largest), steep


def _grown(r: Tensor, odds: Tensor, steep: Tensor) -> Tensor:
    """Upper bounds on the entries of softmax(a + w) for ‖w‖ ≤ r, shape (N, rows), as explained at :func:`_odds`."""
    # exp(700) is finite in float64; the largest entry of a row is at least 1/n, so the quotient is 1 there.
    more = odds * torch.exp((steep * r[:, None]).clamp_max(700.0))
    return (more / (1 + more) * (1 + _HIDDEN)).nan_to_num(nan=1.0).clamp_max(1.0)


@remainder("softmax")
class Softmax(Remainder):
    """Rows p = softmax(a) under a deviation w: the second derivative along w is p_j(X_j² − V).

    Here X = w − E_p[w] and V = Var_p(w). V ≤ κ‖w‖² with κ = min(½, max_j p_j), because diag(p) − ppᵀ ⪯ max p and ⪯ ½.
    :func:`_grown` bounds the entries of p on the segment to a + w, which gives the κ over the ball.

    Norm: the entries of p_j(X_j² − V) sum to zero, lie in [−p_j V, (1 − 2p_j)₊V] because p_j X_j² ≤ (1 − p_j)V
    (Cauchy–Schwarz on p_j X_j = −Σ_{i≠j} p_i X_i), and their negative part sums to at most V: the sum of squares is at
    most V²(1 + max p). So ‖R_row‖ ≤ ½ κ √(1 + max p) ‖w‖², and over rows ‖R‖ ≤ ½ max(κ √(1 + max p)) ρ².

    The second derivative of a row is at most √(2/27): the form (c, v, w) ↦ E_p[(c − E c)(v − E v)(w − E w)] is
    symmetric, so its norm is that of its cubic form E_p[X³] (Banach, Studia Math. 7, 1938). X has mean 0 and lies in
    some [−a, b] with a + b ≤ √2‖w‖. So E[X³] is at most the value at 0 of the smallest concave function above t³ on
    [−a, b]. As t³ is concave left of 0 and convex right of it, the graph of that function at 0 is a chord from b to a
    point of [−a, 0). The chord belongs to a distribution on two points whose distance is at most L = √2‖w‖, and its
    third moment is at most L³ max_q q(1 − q)(1 − 2q) = L³ √3/18 = √(2/27)‖w‖³. The same holds for −X.

    Against c: let r = max c − min c. Σ_j c_j p_j (X_j² − V) = E_p[(c − E c) X²] is at most r V in absolute value. It is
    also at most (√3/9) r ‖w‖². To see this, scale X to a range of length 1 and c to |c| ≤ 1, r = 2. For given means of
    c and of W = X + const ∈ [0, 1] the expectation is linear in the joint distribution of c and W. Where the
    distribution of c given W is not on ±1, moving it there keeps both means and the expectation. Given c = 1 the
    expectation is convex in W, and largest for W ∈ {0, 1}; given c = −1 it is concave, and largest for a single W = ω.
    Let c = 1 have the probability α and W the mean m there, at least ½ without loss of generality, and let d = m − ω.
    Then E_p[(c − E c) X²] = 2α(1 − α)(m(1 − m) + (1 − 2α)d²). For α ≥ ½ that is at most 2α(1 − α)/4 ≤ ⅛. For α ≤ ½ it
    is largest for d = m, where the bracket is m − 2αm²: for α ≥ ¼ at most 1/(8α), which gives (1 − α)/4 ≤ 3/16; for
    α ≤ ¼ at most 1 − 2α, which gives 2α(1 − α)(1 − 2α) ≤ √3/9. Undoing the scale, with a range of X of at most √2‖w‖,
    multiplies by r/2 and by 2‖w‖². The same holds for −c.

    If no row deviates by more than t ≤ ρ, ‖R‖² ≤ Σ_rows (½ max(…) ‖w‖²)² ≤ (½ max(…) t ρ)². Against c, the ‖w‖² of the
    rows are at most t² each and ρ² together.

    Contracted: at the nominal p, −½ E[(c − E c) X²] ≤ ½ E[(E c − c)₊ X²] = ‖Mw‖², (Mw)_j = √(½ p_j (E c − c_j)₊) X_j.
    The third derivative of Σ_j c_j softmax_j along w is the joint cumulant E[C X³] − 3 E[C X] V, C = c − E c. With r =
    max c − min c, |C| ≤ r, |X| ≤ √2‖w‖ and |E[C X]| ≤ ½ r √V (Popoviciu), it is at most r V (√2‖w‖ + (3/2)√V), and V ≤
    κ‖w‖². It is also E[(c − const)(Y − E Y)] with Y = X³ − 3VX, so at most ½ r times the standard deviation of Y, which
    is at most half of the range of Y (Popoviciu). Let X lie in [−a, b] with a + b = ℓ ≤ √2‖w‖, so that V ≤ ab (Bhatia
    and Davis) and √V ≤ ℓ/2. Y decreases between −√V and √V, by at most 4V^(3/2) ≤ ℓ³/2. It increases elsewhere: from −a
    to −√V by a³ − 3Va + 2V^(3/2) ≤ a³ for √V ≤ a, and from √V to b by at most b³. Its range is the largest of these, or
    Y(b) − Y(−a) ≤ a³ + b³: at most ℓ³. So the third derivative is at most r‖w‖³/√2. By Taylor's theorem the rest is at
    most a sixth of the smaller bound, r min(κ(√2 + (3/2)√κ), 1/√2)‖w‖³/6 for a row, with the κ over the ball.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        self.dim = axis_of(node)
        self.p, self.odds = result, _odds(result, self.dim)

    @classmethod
    def block(cls, node: Node) -> int:
        """The length of a row, if its entries are consecutive."""
        return node.shape[-1] if axis_of(node) == len(node.shape) else 0

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        grown = _grown(rho[-1], *self.odds)
        curvature = (grown * (1 + grown).sqrt()).amax(1).clamp_max(_SOFTMAX_CURVATURE)
        return curvature / 2 * rho[0] * rho[-1]

    def against(self, direction: Tensor) -> Against:
        spread = per_image(direction.amax(self.dim) - direction.amin(self.dim))

        def bound(rho: Sequence[Tensor]) -> Tensor:
            weight = spread * _grown(rho[-1], *self.odds).clamp_max(_SPREAD) / 2
            return largest_share(weight, rho[0], rho[-1][:, None])

        return bound

    def contracted(self, direction: Tensor, rho: Sequence[Tensor], likely: Tensor | None = None) -> Contracted:
        p, dim = self.p, self.dim
        below = (p * direction).sum(dim, keepdim=True) - direction
        hidden = _HIDDEN * direction.abs().amax(dim, keepdim=True)
        root = (p * (below + hidden).clamp_min(0) / 2 * (1 + _HIDDEN)).sqrt()
        spread = per_image(direction.amax(dim) - direction.amin(dim))

        def apply(deviation: Tensor, p: Tensor, root: Tensor) -> Tensor:
            return root * (deviation - (p * deviation).sum(dim, keepdim=True))

        def bound(
            rho: Sequence[Tensor], sizes: Sequence[Tensor], spread: Tensor, odds: Tensor, steep: Tensor
        ) -> Tensor:
            kappa = _grown(rho[-1], odds, steep).clamp_max(0.5)
            third = (
                spread * (kappa * (math.sqrt(2) + 1.5 * kappa.sqrt())).clamp_max(_SPREAD_FURTHER) / 6 * rho[-1][:, None]
            )
            return sizes[0].square() + largest_share(third, rho[0], rho[-1][:, None])

        spectral = (
            per_image((below + hidden).clamp_min(0).amax(dim)) * per_image(p.amax(dim)).clamp_max(0.5) / 2
        ).sqrt()
        size = 2 * per_image(l2_norm(root, dim)).amax(1)
        norm = torch.minimum(spectral.amax(1) * (1 + _HIDDEN), size)
        form = Form(apply, (p, root), norm, size)
        return Contracted((form,), bound, (spread, *self.odds))


def softmax_norm(node: Node, place: int, values: Mapping[Node, Tensor]) -> Tensor:
    """The largest eigenvalue of diag(p) − ppᵀ if all entries of p but the largest were as large as the second.

    A larger diagonal makes no eigenvalue smaller (Weyl), so with p₁ ≥ p₂ ≥ … the norm is at most that of
    diag(p₁, p₂, p₂, …) − ppᵀ. This matrix maps the span of e₁ and q = (0, p₂, p₃, …) to itself, where it is
    [[p₁(1 − p₁), −p₁‖q‖], [−p₁‖q‖, p₂ − ‖q‖²]] in an orthonormal basis, and is p₂ on the orthogonal complement. The
    entries of p have relative errors below 1e-10.
    """
    p = values[node].movedim(axis_of(node), -1)
    if p.shape[-1] < 2:
        return p.new_zeros(len(p), dtype=torch.float64)
    largest, place_of = p.max(-1, keepdim=True)
    others = p.scatter(-1, place_of, 0.0)
    first, second, square = largest[..., 0], others.amax(-1), sum_squares(others, -1)
    a, d, b = first * others.sum(-1), (second - square).clamp_min(0), first * square.sqrt()
    norm = torch.maximum((a + d) / 2 + torch.hypot((a - d) / 2, b), second)
    return per_image(norm).amax(1).clamp_max(0.5) * (1 + 1e-9)


@jacobian("softmax", norm=softmax_norm)
def softmax_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """|diag(p) − ppᵀ| has row and column sums 2p_i(1 − p_i) ≤ ½."""
    return 0.5, 2 * gamma(2 * node.shape[axis_of(node) - 1])


@rounding("softmax")
def softmax_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """exp(a_i − m)/Σ_j exp(a_j − m), with m the largest entry, or the largest so far in online softmax.

    The exponent has an error of at most 4u(|a_i| + max|a_j|), whether it is a difference or, for exp2, a fused product.
    Online softmax splits the exponential into at most n factors, one with an error of 20 ulp, the others with 4 ulp. So
    exp(a_i − m) has a relative error of at most e^ℓ − 1 with ℓ = 8u max|a| + 9(n + 4)u, the sum of n positive terms
    one of e^ℓ(1 + γ_n) − 1, and p_i one of e^(2ℓ + 2γ_(2n + EXTRA) + γ_2) − 1. Here u and the first γ are those inside
    an operation, the second is that of the format: one unit is for P, which may be cast before it multiplies the
    values, and one, in float16 and bfloat16, for exponentials with an error of 2⁻¹³, as 2 · 2⁻¹³ = 2⁻¹². If a row
    deviates by w, p_i grows by a factor of at most exp(max w − min w) ≤ exp(√2 ρ). Masked entries, −∞, are exactly 0.
    """
    axis, x = axis_of(node), operands[0]
    masked = x.nominal == -math.inf
    length = x.nominal.shape[axis]
    size = torch.where(masked, 0.0, x.most).amax(axis, keepdim=True)
    loss = 8 * fmt.sum_unit * size + 9 * (length + 4) * fmt.sum_unit
    relative = torch.expm1((2 * loss + 2 * fmt.sum_gamma(2 * length + EXTRA) + fmt.gamma(2)).clamp_max(700.0))
    grown = torch.softmax(x.nominal, axis) * torch.exp((math.sqrt(2) * x.over(x.rho)).clamp_max(700.0))
    error = grown.clamp_max(1.0) * relative + 4 * (length + EXTRA) * fmt.smallest
    return torch.where(masked, 0.0, fmt.safe(error, size.expand(error.shape)))


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

    A bias that depends on the image adds Cov_{P_i}(δM_i, v), at most √½ t_v ‖δM_i‖. If entries are broadcast, or
    queries share their keys and values (``enable_gqa``), every entry is used m times, which gives a factor √m. The
    bounds t hold on the whole image box, which is convex, so the derivative bound holds along every segment.

    The result of a query that the mask hides from every key is 0, so P is stochastic but for rows of zeros. Such a row
    moves with nothing, and is no mean of values: the entries of O are at least the smaller of 0 and the least value.
    """
    if dropout_p:
        raise NoAnswer("dropout, which is random here in evaluation mode too")
    if is_causal and scale is not None and not scale > 0:  # −∞ of the mask times it is NaN in some kernels
        raise NoAnswer("a causal mask and a scale that is not positive")
    q, k, v = (x if isinstance(x, Value) else Value.constant(x) for x in (query, key, value))
    batch = math.prod(call.shape[:-2])
    spread = [Upper(batch // max(1, math.prod(x.shape[:-2]))).sqrt() for x in (q, k, v)]
    n = q.shape[-2]
    s = abs(scale) if scale is not None else Upper(1) / math.nextafter(math.sqrt(q.shape[-1]), 0)
    t_q, t_k, t_v = q.row_norm(-1), k.row_norm(-1), v.row_norm(-1)
    by_scores = t_k * q.lip * spread[0] + (Upper(n) / 2).sqrt() * t_q * k.lip * spread[1]
    lip = Upper(n).sqrt() * v.lip * spread[2] + t_v * s * by_scores
    if isinstance(attn_mask, Value):
        scores = batch * n * k.shape[-2]
        copies = Upper(scores // max(1, math.prod(attn_mask.shape))).sqrt()
        lip = lip + t_v * (Upper(1) / 2).sqrt() * attn_mask.lip * copies
    floor = min(v.lowest, 0.0) if _may_hide_rows(attn_mask) else v.lowest
    return Value(call.shape, lip, magnitude=v.magnitude, rows=(-1, t_v), floor=floor)


def _may_hide_rows(mask: Any) -> bool:
    """Whether a mask may hide every key from a query. A causal mask does not: the first key is always seen."""
    if mask is None:
        return False
    if isinstance(mask, Value):
        return not mask.magnitude.finite
    visible = mask if mask.dtype == torch.bool else mask > -math.inf
    return not bool(visible.any(-1).all())
