"""Initial weights of the new modules, computed from the old modules and their inputs.

**L2 attention.** Its logits depend only on differences of tokens, and terms that are constant along a row of logits
cancel in the softmax. So with centred tokens ξ its logits are 2τ ξ_i W Wᵀ ξ_jᵀ − τ‖ξ_j W‖², compared with τ ξ_i Q Kᵀ
ξ_jᵀ before. The first term approximates the old logits best, in mean square over independent tokens of covariance Σ, if
W Wᵀ is the positive semidefinite matrix of rank d nearest to the symmetric part: with Σ = C·Cᵀ,

    Cᵀ W Wᵀ C ≈ ¼ Cᵀ(Q Kᵀ + K Qᵀ)C,

solved by the largest positive eigenvalues (Eckart–Young for the Frobenius norm restricted to semidefinite matrices),
a problem of size 2d after a QR factorisation of Cᵀ[Q, K]. The second term, the antisymmetric part and terms linear in
the keys have no counterpart. Values: M is the ridge regression of ξ·V_old on ξ·W, and the bias makes the means agree.

**Projections.** The radius is the median norm N of the tokens, centred if the normalisation centres. The weight is γ
times the factor that gives a token of norm N the same length after the projection as after the normalisation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lipcert.surgery._attention import L2Attention
from lipcert.surgery._heads import Heads
from lipcert.surgery._projections import SmoothProject, _Projection

_COVARIANCE_RIDGE = 1e-3
_VALUE_RIDGE = 1e-2


@torch.no_grad()
def initialise_attention(new: L2Attention, old: Heads, tokens: Tensor | None = None) -> None:
    """Sets ``q`` and the values of ``new``."""
    heads, width, dim = new.num_heads, new.head_dim, new.dim
    queries, keys, values = old.queries, old.keys, old.values
    mean, root = _moments(tokens, queries, dim)
    basis, triangle = torch.linalg.qr(root.T @ torch.cat((queries, keys), -1))
    q_part, k_part = triangle.split(width, -1)
    # This is Cᵀ Q Kᵀ C in an orthonormal basis of the columns of Cᵀ[Q, K].
    form = q_part @ k_part.transpose(-1, -2)
    eigenvalues, vectors = torch.linalg.eigh((form + form.transpose(-1, -2)) / 4)
    top = min(width, eigenvalues.shape[-1])
    # eigh sorts upwards; negative eigenvalues have no counterpart in W Wᵀ.
    strength = eigenvalues[:, -top:].clamp(min=0)
    whitened = torch.zeros(heads, dim, width).to(queries)
    whitened[..., :top] = basis @ vectors[..., -top:] * strength.sqrt().unsqueeze(1)
    projection = torch.linalg.solve_triangular(root.T, whitened, upper=True)
    gram = whitened.transpose(-1, -2) @ whitened
    ridge = _VALUE_RIDGE * gram.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=torch.finfo(torch.float64).tiny)
    gram = gram + ridge[:, None, None] * torch.eye(width).to(gram)
    mixing = torch.linalg.solve(gram, whitened.transpose(-1, -2) @ (root.T @ values))
    square = torch.linalg.pinv(projection.transpose(-1, -2) @ projection, hermitian=True)
    solved = projection @ (square @ mixing) / new.scale
    new.q.weight.copy_(projection.transpose(-1, -2).flatten(0, 1))
    new.v_weight.copy_(solved.transpose(-1, -2).flatten(0, 1))
    if new.v_bias is not None:
        bias = 0.0 if old.value_bias is None else old.value_bias
        new.v_bias.copy_(bias + (mean @ (values - projection @ mixing)).flatten())


def _moments(tokens: Tensor | None, like: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The mean of the tokens and the Cholesky factor of their covariance, regularised by a small ridge."""
    identity = torch.eye(dim).to(like)
    if tokens is None:
        return like.new_zeros(dim), identity
    flat = tokens.reshape(-1, dim).to(like)
    mean = flat.mean(0)
    covariance = (flat - mean).T @ (flat - mean) / len(flat)
    level = covariance.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    return mean, torch.linalg.cholesky(covariance + _COVARIANCE_RIDGE * level * identity)


@torch.no_grad()
def calibrate_projection(new: _Projection, norm: Any, tokens: Tensor) -> None:
    """Sets ``radius``, ``weight`` and ``bias`` of ``new``."""
    tokens = new.rows(tokens).double()
    if new.centred:
        tokens = tokens - tokens.mean(-1, keepdim=True)
    # For None, torch's RMSNorm uses float32's epsilon.
    size, eps = tokens.shape[-1], torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    typical = torch.linalg.vector_norm(tokens, dim=-1).median()
    radius = typical.clamp(min=(size * eps) ** 0.5)
    gain = (typical.square() / size + eps).rsqrt()
    if isinstance(new, SmoothProject):
        gain = gain * (1 + (typical / radius).square()).sqrt()
    new.radius.copy_(radius)
    new.weight.copy_(gain if norm.weight is None else gain * norm.weight)
