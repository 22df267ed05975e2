"""One layer of dot-product attention: how far a perturbation of its tokens moves it, proved and rounded up.

For the tables of LoFAST alone: Havens, Araujo, Zhang, Hu, "Fine-grained local sensitivity analysis of standard
dot-product self-attention", ICML 2024. The constants are derived here and differ from those of the paper
(:mod:`benchmarks.papers.lofast`): they stand for its equations 10 to 28, and bound its equation 7. The certificate of a
whole network is :mod:`lipcert.certifier._lofast`.

Tokens X ∈ ℝ^(n×D), heads l with Q_l = X W_l^Q + b, K_l and V_l likewise, scores S_l = s Q_l
K_lᵀ, P_l = softmax(S_l) row by row, Attn(X) = concat_l(P_l V_l) W^O. For a perturbation Δ

    δS_l = S_l'[Δ] + s Δ A_l Δᵀ,    A_l = W_l^Q (W_l^K)ᵀ,    S_l'[Δ] = s (Δ W_l^Q K_lᵀ + Q_l (W_l^K)ᵀ Δᵀ).

Without biases the second term is X W_l^Q (W_l^K)ᵀ Δᵀ = (Δ W_l^K (W_l^Q)ᵀ Xᵀ)ᵀ: the matrix is W^K (W^Q)ᵀ if Δ is to its
left, and W^Q (W^K)ᵀ if Δᵀ is to its right. The two are transposes of each other. Both forms are right; a mixture of
them is not. Exactly,

    Attn(X + Δ) − Attn(X) = J Δ + Σ_l R_l W_l^O,
    R_l = P_l'[s Δ A_l Δᵀ] V_l + (P_l(S + δS) − P_l − P_l'[δS]) V_l + δP_l Δ W_l^V.

ζ(X) = ‖J‖ is the norm of the exact Jacobian. Rows of δP_l and of both softmax terms sum to zero, so V_l may be replaced
by its centred form C_l = (I − 11ᵀ/n) V_l. Softmax p has the Jacobian diag(p) − ppᵀ, of norm at most κ = min(½, max p),
and second derivatives of norm at most √(2/27) and at most κ √(1 + max p)
(:class:`lipcert.bounds.rules.attention.Softmax`). So with ‖δS_l‖_F ≤ σ_l = M_l ε + s ‖A_l‖ ε² for ‖Δ‖_F ≤ ε and
M_l ≥ ‖S_l'‖, M_l = s (‖W_l^Q K_lᵀ‖ + ‖W_l^K Q_lᵀ‖),

    ‖R_l‖_F ≤ ‖C_l‖ (κ₀ s ‖A_l‖ ε² + ½ c σ_l²) + κ σ_l ‖W_l^V‖ ε,    ‖R‖_F ≤ ‖W^O‖ (Σ_l ‖R_l‖_F²)^½.

- δ₂⁽¹⁾: worst-case softmax, κ₀ = κ = ½ and c = √(2/27). The tokens enter through M_l(X).
- δ₂⁽²⁾: softmax at the actual weights. Inside the ball an entry of P_l grows by at most e^(√2 σ_l), because a row of
  δS_l differs between two entries by at most √2 of its norm: with ξ_l(X) = max P_l at X and ξ = min(1, ξ_l e^(√2 σ_l))
  over the ball, κ₀ = min(½, ξ_l), κ = min(½, ξ), c = κ √(1 + ξ). For nearly uniform attention ξ_l is near 1/n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.bounds import gamma
from lipcert.errors import InputError

# torch's singular values have errors of about 1e-14 of the largest, and a bound here has a few dozen roundings.
_ROUNDING = 1 + 1e-9
_CANCELLED = 1e-12


@dataclass(frozen=True)
class AttentionSensitivity:
    """‖Attn(X + Δ) − Attn(X)‖_F ≤ ζ ‖Δ‖_F + min(δ₂⁽¹⁾, δ₂⁽²⁾) ‖Δ‖_F² for all ‖Δ‖_F ≤ ε, for N inputs X.

    Attributes:
        eps: ε, in the units of X.
        zeta: ζ(X), the norm of the Jacobian, shape (N,).
        delta2: δ₂⁽¹⁾ and δ₂⁽²⁾ for this ε, each of shape (N,).
        change: upper bounds on ‖Attn(X + Δ) − Attn(X)‖_F over ‖Δ‖_F ≤ ε, shape (N,): the right side at ‖Δ‖_F = ε, or
            :func:`naive_change` if that is smaller, because it grows more slowly with ε.
    """

    eps: float
    zeta: Tensor
    delta2: tuple[Tensor, Tensor]
    change: Tensor


@dataclass(frozen=True)
class AttentionLayer:
    """Dot-product self-attention on rows: x ↦ concat_l softmax(s (x W_l^Q + b)(x W_l^K + b)ᵀ)(x W_l^V + b) W^O.

    Equations 1 to 5 of Havens et al. 2024, with biases.

    Attributes:
        wq, wk, wv: weights, shape (D, heads·d), head l in columns l·d to (l + 1)·d.
        wo: W^O, shape (heads·d, any); None for the identity. Its bias has no effect on differences.
        heads: number of heads.
        bq, bk, bv: biases, shape (heads·d,), or None.
        scale: s; 1/√d by default.
    """

    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor | None = None
    heads: int = 1
    bq: Tensor | None = None
    bk: Tensor | None = None
    bv: Tensor | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        width = self.wq.shape[1]
        if self.wk.shape != self.wq.shape or width % self.heads or self.wv.shape[1] % self.heads:
            raise InputError(
                f"wq and wk need one shape (D, {self.heads}·d) and wv (D, {self.heads}·d_v), "
                f"got {tuple(self.wq.shape)}, {tuple(self.wk.shape)}, {tuple(self.wv.shape)}"
            )

    @property
    def s(self) -> float:
        return self.scale if self.scale is not None else (self.wq.shape[1] // self.heads) ** -0.5

    def split(self, weight: Tensor) -> Tensor:
        """Reshapes (D, heads·d) to (heads, D, d)."""
        return weight.double().reshape(weight.shape[0], self.heads, -1).movedim(1, 0)

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Projects (..., n, D) to (..., heads, n, d)."""
        y = x @ weight.double() + (0.0 if bias is None else bias.double())
        return y.unflatten(-1, (self.heads, -1)).movedim(-2, -3)

    def weights(self, x: Tensor) -> Tensor:
        """P, shape (..., heads, n, n)."""
        scores = self.s * self.project(x, self.wq, self.bq) @ self.project(x, self.wk, self.bk).mT
        return scores.softmax(-1)

    def __call__(self, x: Tensor) -> Tensor:
        """The layer on float64 tokens x of shape (..., n, D)."""
        mixed = (self.weights(x) @ self.project(x, self.wv, self.bv)).movedim(-3, -2).flatten(-2)
        return mixed if self.wo is None else mixed @ self.wo.double()


def attention_sensitivity(x: Tensor, layer: AttentionLayer, eps: float) -> AttentionSensitivity:
    """Bounds the change of attention for perturbations of its tokens by at most ε; formulas in the module docstring.

    The Jacobian is computed in full, which takes 8 (n D)² bytes per input.

    Args:
        x: tokens, shape (N, n, D).
        layer: the attention layer.
        eps: ε, in the units of x.

    Raises:
        InputError: ε is not a positive finite number.
    """
    if not 0 < eps < math.inf:
        raise InputError(f"eps must be a positive number, got {eps}")
    x = x.double()
    size = x[0].numel()
    jacobian = torch.func.vmap(torch.func.jacrev(layer))(x).reshape(len(x), -1, size)
    zeta = (_top(jacobian) + math.sqrt(size) * _product_error(x, layer)) * _ROUNDING
    q, k, v = (layer.project(x, w, b) for w, b in ((layer.wq, layer.bq), (layer.wk, layer.bk), (layer.wv, layer.bv)))
    wq, wk, wv = layer.split(layer.wq), layer.split(layer.wk), layer.split(layer.wv)
    bent = layer.s * _product_norm(wq, wk)
    m = layer.s * (_product_norm(wq, k) + _product_norm(wk, q))
    sigma = m * eps + bent * eps**2
    centred = _top(v - v.mean(-2, keepdim=True)) + _CANCELLED * torch.linalg.matrix_norm(v)
    largest = layer.weights(x).flatten(-2).amax(-1) * _ROUNDING

    def combine(first: Tensor | float, over: Tensor | float, curvature: Tensor | float) -> Tensor:
        heads = centred * (first * bent * eps**2 + curvature * sigma**2 / 2) + over * sigma * _top(wv) * eps
        outward = 1.0 if layer.wo is None else _top(layer.wo.double())
        return outward * heads.norm(dim=-1) / eps**2 * _ROUNDING

    grown = (largest * torch.exp((math.sqrt(2) * sigma).clamp_max(700.0))).clamp_max(1.0)
    xi = grown.clamp_max(0.5)
    worst = math.sqrt(2 / 27)
    forms = combine(0.5, 0.5, worst), combine(largest.clamp_max(0.5), xi, (xi * (1 + grown).sqrt()).clamp_max(worst))
    change = (zeta * eps + torch.minimum(*forms) * eps**2) * _ROUNDING
    return AttentionSensitivity(eps, zeta, forms, torch.minimum(change, naive_change(x, layer, eps)))


def naive_change(x: Tensor, layer: AttentionLayer, eps: float) -> Tensor:
    """A valid but loose baseline for the change of attention, from the triangle inequality and products of norms.

    The change is P(X + Δ) Δ W^V + (P(X + Δ) − P(X)) V, with ‖P‖ ≤ √n, because entries are at most 1 and rows sum to 1,
    and ‖P(X + Δ) − P(X)‖_F ≤ ½ s (‖Q‖ ‖W^K‖ ε + ‖W^Q‖ ‖K‖ ε + ‖W^Q‖ ‖W^K‖ ε²).

    Returns:
        Upper bounds on ‖Attn(X + Δ) − Attn(X)‖_F over ‖Δ‖_F ≤ ε, shape (N,).
    """
    q, k, v, wq, wk, wv, outward = _plain_norms(x.double(), layer)
    weights = layer.s / 2 * (q * wk * eps + wq * k * eps + wq * wk * eps**2)
    return outward * (math.sqrt(x.shape[-2]) * wv * eps + weights * v).norm(dim=-1) * _ROUNDING


def ball_change(x: Tensor, layer: AttentionLayer, eps: float) -> Tensor:
    """A valid baseline: ε times a Lipschitz constant on the ball of radius ε from norms of weights and tokens.

    Hu et al., "SpecFormer", ECCV 2024 (arXiv 2402.03317), penalise a local Lipschitz constant of this kind. At every
    point Y of the ball ‖J(Y) Δ‖ ≤ ‖P‖ ‖W^V‖ ‖Δ‖ + ½ s (‖W^Q‖ ‖K(Y)‖ + ‖Q(Y)‖ ‖W^K‖) ‖V(Y)‖ ‖Δ‖, where ‖P‖ ≤ √n and
    ‖Q(Y)‖ ≤ ‖Q(X)‖ + ‖W^Q‖ ε. It is derived here and differs from that paper's formula.

    Returns:
        Upper bounds on ‖Attn(X + Δ) − Attn(X)‖_F over ‖Δ‖_F ≤ ε, shape (N,).
    """
    q, k, v, wq, wk, wv, outward = _plain_norms(x.double(), layer)
    q, k, v = q + wq * eps, k + wk * eps, v + wv * eps
    slope = math.sqrt(x.shape[-2]) * wv + layer.s / 2 * (wq * k + q * wk) * v
    return outward * slope.norm(dim=-1) * eps * _ROUNDING


def _plain_norms(x: Tensor, layer: AttentionLayer) -> tuple[Tensor, ...]:
    """‖Q_l‖, ‖K_l‖, ‖V_l‖, of shape (N, heads), ‖W_l^Q‖, ‖W_l^K‖, ‖W_l^V‖, of shape (heads,), and ‖W^O‖."""
    given = (layer.wq, layer.bq), (layer.wk, layer.bk), (layer.wv, layer.bv)
    values = [_top(layer.project(x, w, b)) for w, b in given]
    outward = torch.ones(()).double() if layer.wo is None else _top(layer.wo.double())
    return (*values, *(_top(layer.split(w)) for w, _ in given), outward)


def _top(matrices: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrices, 2) * _ROUNDING


def _product_norm(first: Tensor, second: Tensor) -> Tensor:
    """An upper bound on ‖F Sᵀ‖₂; the error of the computed product is far below 1e-12 ‖F‖_F ‖S‖_F."""
    frobenius = torch.linalg.matrix_norm(first) * torch.linalg.matrix_norm(second)
    return _top(first @ second.mT) + _CANCELLED * frobenius


def _product_error(x: Tensor, layer: AttentionLayer) -> Tensor:
    """A bound on the rounding errors of products of the Jacobian, or of its transpose, with unit vectors, shape (N,).

    The Jacobian maps Δ to P Δ W^V + dP V, dP_i = (diag(P_i) − P_i P_iᵀ) s(Δ_i W^Q Kᵀ + Q_i (Δ W^K)ᵀ), and both times
    W^O. With q_i = ‖x_i‖‖W^Q‖_F + ‖b^Q‖, which bounds the terms of the query of token i, and k, v likewise, the norm of
    all terms is at most

        A = ‖W^O‖_F ‖(√n ‖W_l^V‖_F + 2s(‖W_l^Q‖_F ‖k_l‖ + ‖W_l^K‖_F ‖q_l‖)‖v_l‖)_l‖.

    A score has an error of at most 3γ σ with σ = s max q max k, so an entry of P has a relative error of at most
    6γ σ + 2γ. P enters at most twice, and there are at most six more sums. Hence the error is at most 16γ(1 + σ)A.
    """
    tokens, (count, width) = x.norm(dim=-1)[:, None], x.shape[1:]

    def sizes(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        norm = layer.split(weight).flatten(1).norm(dim=1)
        shift = 0.0 if bias is None else bias.double().reshape(layer.heads, -1).norm(dim=1)[:, None]
        return norm, tokens * norm[:, None] + shift

    (wq, q), (wk, k), (wv, v) = (
        sizes(w, b) for w, b in ((layer.wq, layer.bq), (layer.wk, layer.bk), (layer.wv, layer.bv))
    )
    heads = math.sqrt(count) * wv + 2 * layer.s * (wq * k.norm(dim=-1) + wk * q.norm(dim=-1)) * v.norm(dim=-1)
    score = layer.s * (q.amax(-1) * k.amax(-1)).amax(-1)
    outward = 1.0 if layer.wo is None else layer.wo.double().norm()
    terms = count + width + layer.wq.shape[1] + layer.wv.shape[1]
    return 16 * gamma(terms) * (1 + score) * outward * heads.norm(dim=-1)
