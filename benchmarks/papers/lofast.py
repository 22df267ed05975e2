"""LoFAST as its paper writes it, beside the constants of :mod:`benchmarks.papers.attention`: for comparison alone.

Havens, Araujo, Zhang and Hu, "Fine-grained local sensitivity analysis of standard dot-product self-attention", ICML
2024. Its model is F(X) = H X + Σ_l P_l(X) X W_l^V W_l^O (equation 6), without biases, H = I for a residual block and
H = 0 without. Theorem 1: for ‖X' − X‖_F ≤ ε

    ‖F(X') − F(X)‖_F ≤ ζ(X) ε + δ₂⁽¹⁾(X, ε) ≤ ζ(X) ε + δ₂⁽²⁾(X, ε).

**Why it holds.** With Γ = X' − X and W_l = W_l^V W_l^O,

    F(X') − F(X) = H Γ + Σ_l P_l(X) Γ W_l + Σ_l (P_l(X') − P_l(X)) X' W_l.

The first two terms (equation 10) are linear in Γ at frozen P, of norm ζ (Lemma 1, equations 13 to 15). For the third
(equations 11, 16 and 17), softmax is 1-Lipschitz by rows (½ in fact), so ‖P_l(X') − P_l(X)‖_F (equation 19) is at most
the change of the scores s X A_l Xᵀ, A_l = W_l^Q (W_l^K)ᵀ, s = 1/√(d/h): s (‖M_l‖ ε + ‖A_l‖ ε²) by equations 20 to 24
and Lemma 2; and ‖X' W_l‖ ≤ ‖X W_l‖ + ‖W_l‖ ε (equation 18).

**Misprints.** Equation 15 writes H ⊗ I_n where vec((HΓ)ᵀ) = (H ⊗ I_d) vec(Γᵀ). The second term of equation 25 has
W^K (W^Q)ᵀ, appendix B.4 has W^Q (W^K)ᵀ: the score of tokens i and j changes by Γ_iᵀ A x_j + x_iᵀ A Γ_j, so that B.4 is
right. With equation 25 as it is printed the theorem does not hold; :func:`scores` has it for showing that.

Sums here are rounded like any float64 sum, and nothing is rounded up: no value of this module is a certificate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.papers.attention import AttentionLayer

_LARGEST = 4096  # columns of a matrix that is written out


@dataclass(frozen=True)
class Theorem:
    """What Theorem 1 says of one input.

    Attributes:
        zeta: ζ(X), equation 15.
        naive: ‖H‖ + Σ_l ‖W_l^V W_l^O‖ ‖P_l(X)‖, equation 12.
        first: δ₂⁽¹⁾(X, ε), equation 27, with ‖M_l(X)‖.
        second: δ₂⁽²⁾(X, ε), equation 28, with ξ_l(X).
        eps: ε.
    """

    zeta: float
    naive: float
    first: float
    second: float
    eps: float

    @property
    def change(self) -> float:
        """ζ(X) ε + δ₂⁽¹⁾(X, ε)."""
        return self.zeta * self.eps + self.first

    @property
    def loose(self) -> float:
        """ζ(X) ε + δ₂⁽²⁾(X, ε)."""
        return self.zeta * self.eps + self.second

    @property
    def by_norms(self) -> float:
        """Equation 12 in place of ζ: the naive bound of figure 1."""
        return self.naive * self.eps + self.second


def theorem_1(x: Tensor, layer: AttentionLayer, eps: float, *, residual: bool = True) -> Theorem:
    """The bounds of Theorem 1.

    Args:
        x: X, shape (n, d).
        layer: without biases.
        eps: ε, in the units of X.
        residual: H = I; else H = 0.
    """
    x, (forms, mixed) = x.double(), _heads(layer)
    weights = layer.weights(x)
    identity = torch.eye(len(x) if residual else 0, dtype=torch.float64)
    s = layer.s
    first = second = 0.0
    naive = 1.0 if residual else 0.0
    for form, mix, p in zip(forms, mixed, weights, strict=True):
        outward = _norm(x @ mix) + eps * _norm(mix)
        first += s * eps * (scores(x, form) + eps * _norm(form)) * outward
        second += s * eps * (xi(x, form) + eps * _norm(form)) * outward
        naive += _norm(mix) * _norm(p)
    return Theorem(_zeta(weights, mixed, len(identity) > 0), naive, first, second, eps)


def _heads(layer: AttentionLayer) -> tuple[Tensor, Tensor]:
    """A_l = W_l^Q (W_l^K)ᵀ and W_l^V W_l^O, each of shape (heads, d, d)."""
    assert not any(bias is not None for bias in (layer.bq, layer.bk, layer.bv)), "the paper's model has no biases"
    queries, keys, values = (layer.split(w) for w in (layer.wq, layer.wk, layer.wv))
    width = values.shape[0] * values.shape[2]
    wo = torch.eye(width, dtype=torch.float64) if layer.wo is None else layer.wo.double()
    return queries @ keys.mT, values @ wo.unflatten(0, (layer.heads, -1))


def _zeta(weights: Tensor, mixed: Tensor, residual: bool) -> float:
    """‖H ⊗ I_d + Σ_l P_l ⊗ (W_l^V W_l^O)ᵀ‖, from the matrix itself."""
    size = weights.shape[-1] * mixed.shape[-1]
    assert size <= _LARGEST, f"a matrix of {size} columns is too large to write out"
    whole = sum((torch.kron(p, mix.mT.contiguous()) for p, mix in zip(weights, mixed, strict=True)), torch.zeros(()))
    return _norm(whole + torch.eye(size, dtype=torch.float64) if residual else whole)


def scores(x: Tensor, form: Tensor, *, as_printed: bool = False) -> float:
    """‖M_l(X)‖ of Lemma 2: the largest ‖Γ A Xᵀ + X A Γᵀ‖_F over ‖Γ‖_F ≤ 1.

    Args:
        x: X, shape (n, d).
        form: A = W^Q (W^K)ᵀ, shape (d, d).
        as_printed: with the second term of equation 25 as it is printed.
    """
    n, d = x.shape
    assert n * d <= _LARGEST, f"a matrix of {n * d} columns is too large to write out"
    identity = torch.eye(n, dtype=torch.float64)
    first = torch.kron(identity, x @ form.mT)
    second = torch.zeros(n, n, n, d, dtype=torch.float64)  # row (i, j), column of token j: x_iᵀ A
    second[:, range(n), range(n)] = (x @ (form.mT if as_printed else form))[:, None]
    return _norm(first + second.reshape(n * n, n * d))


def xi(x: Tensor, form: Tensor) -> float:
    """ξ_l(X) = ‖A Xᵀ‖ + ‖X A‖, equation 26."""
    return _norm(form @ x.mT) + _norm(x @ form)


def specformer(x: Tensor, layer: AttentionLayer, eps: float) -> float:
    """ε times the local Lipschitz constant of SpecFormer: N (N + 1) (‖X‖_F + ε)² (‖W^V‖ ‖W^Q‖ ‖W^K‖ + ‖W^V‖).

    Hu et al., "SpecFormer: guarding vision transformer robustness via maximum singular value penalization", ECCV 2024
    (arXiv 2402.03317), Theorem 4.3, for one attention of whole weight matrices; N tokens. It has no W^O, which is the
    identity there. Quoted for comparison and not proved here; :func:`benchmarks.papers.attention.ball_change` is a
    bound of that kind with a proof.
    """
    n = x.shape[-2]
    query, key, value = (_norm(w.double()) for w in (layer.wq, layer.wk, layer.wv))
    return eps * n * (n + 1) * (float(x.double().norm()) + eps) ** 2 * value * (query * key + 1)


def attack(
    x: Tensor, layer: AttentionLayer, eps: float, *, residual: bool = True, steps: int = 100, seed: int = 0
) -> float:
    """The largest ‖F(X') − F(X)‖_F that projected gradient ascent finds on ‖X' − X‖_F = ε: equation 8 from below."""

    def model(tokens: Tensor) -> Tensor:
        return layer(tokens) + (tokens if residual else 0.0)

    x = x.double()
    base, best = model(x), 0.0
    delta = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for _ in range(steps):
        delta = (eps * delta / delta.norm()).requires_grad_()
        change = (model(x + delta) - base).norm()
        best = max(best, float(change.detach()))
        (delta,) = torch.autograd.grad(change, delta)
    return best


def trained_like(dim: int, heads: int, norm: float, seed: int = 0) -> AttentionLayer:
    """Orthogonal weights, W^V and W^O times ``norm``: the paper constrains these two to a fraction of 1."""
    generator = torch.Generator().manual_seed(seed)
    wq, wk, wv, wo = (
        torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0] for _ in range(4)
    )
    return AttentionLayer(wq, wk, norm * wv, norm * wo, heads=heads, scale=1 / math.sqrt(dim / heads))


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))
