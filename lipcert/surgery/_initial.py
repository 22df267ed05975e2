"""Reads queries, keys and values from timm's attention, and computes initial weights of the new modules from them.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.surgery._attention import L2Attention
from lipcert.surgery._projections import SmoothProject, _Projection

_COVARIANCE_RIDGE = 1e-3
_VALUE_RIDGE = 1e-2
_PROBES = 256


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


@dataclass(frozen=True)
class Heads:
    """The linear maps of dot-product attention with logits q_i·k_j/√d, head by head, in float64."""

    queries: Tensor  # (heads, dim, d)
    keys: Tensor
    values: Tensor  # (heads, dim, d_v)
    value_bias: Tensor | None  # (heads·d_v,)


def heads_of(module: nn.Module, packing: str, tokens: Tensor | None) -> Heads:
    """Reads the maps of a module.

    If queries and keys are normalised, by a module or for cosine attention, each channel of each head is multiplied by
    the factor that best approximates the normalisation on the tokens, in mean square.
    """
    maps = _maps(module, packing)
    weights = [weight.detach().double() for weight, _ in maps]
    biases = [None if bias is None else bias.detach().double() for _, bias in maps]
    for index, normalise in enumerate(_normalisations(module)):
        if normalise is not None:
            weights[index] = weights[index] * _gain(weights[index], biases[index], normalise, tokens).unsqueeze(-1)
    queries, keys, values = (weight.mT for weight in weights)
    return Heads(queries, keys, values, None if biases[2] is None else biases[2].flatten())


def sizes_of(module: nn.Module, packing: str) -> tuple[int, int, int, int, bool]:
    """(heads, dim, d, d_v, whether the values have a bias)."""
    (queries, _), _, (values, bias) = _maps(module, packing)
    heads, width, dim = queries.shape
    return heads, dim, width, values.shape[1], bias is not None


def _maps(module: Any, packing: str) -> list[tuple[Tensor, Tensor | None]]:
    """Weights (heads, d, dim) and biases (heads, d) of queries, keys and values.

    The packing names the layers; the letters q, k and v in a name are what it maps to. Rows are ordered by kind, head,
    channel; in a joint layer of a module with ``head_first``, or with the packing "by head", by head, kind, channel.
    """
    heads = getattr(module, "num_heads", None) or module.heads
    by_head = packing == "by head" or getattr(module, "head_first", False)
    names = ["qkv"] if by_head else packing.split(", ")
    if names == ["qkv"] and module.qkv is None:
        names = ["q_proj", "k_proj", "v_proj"]
    found: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name in names:
        layer, kinds = getattr(module, name), [letter for letter in name if letter in "qkv"]

        def split(rows: Tensor, kinds: list[str] = kinds) -> Sequence[Tensor]:
            if not by_head:
                return rows.unflatten(0, (len(kinds), heads, -1)).unbind()
            width = getattr(module, "key_dim", None) or module.dim_head
            rows = rows.unflatten(0, (heads, -1))
            return rows.split([width, width, rows.shape[1] - 2 * width], 1)  # the values may be wider

        biases: Sequence[Tensor | None]
        if layer.bias is not None:
            biases = split(layer.bias)
        else:
            separate = [getattr(module, f"{kind}_bias", None) for kind in kinds]
            biases = [None if bias is None else bias.unflatten(0, (heads, -1)) for bias in separate]
        found.update(zip(kinds, zip(split(layer.weight.flatten(1)), biases, strict=True), strict=True))
    return [found[kind] for kind in "qkv"]


def _gain(weight: Tensor, bias: Tensor | None, normalise: Callable[[Tensor], Tensor], tokens: Tensor | None) -> Tensor:
    """⟨n, z⟩/⟨z, z⟩ for every channel z of every head and its normalised form n, shape (heads, d)."""
    dim = weight.shape[-1]
    if tokens is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(_PROBES, dim, generator=generator, dtype=torch.float64)
    z = torch.einsum("td,hcd->thc", tokens.reshape(-1, dim).to(weight), weight)
    if bias is not None:
        z = z + bias
    return (normalise(z) * z).sum(0) / z.square().sum(0).clamp(min=torch.finfo(torch.float64).tiny)


def _normalisations(module: Any) -> list[Callable[[Tensor], Tensor] | None]:
    """The normalisations of queries and of keys, as functions of float64 tensors (tokens, heads, d), or None."""
    scale = getattr(module, "logit_scale", None)
    if isinstance(scale, Tensor):  # cosine attention has logits s·cos(q, k); here they are divided by √d afterwards

        def cosine(z: Tensor) -> Tensor:
            # The limit is log 100, as in Swin v2. Queries and keys get √s each, and d^¼ for the later division by √d.
            factor = scale.detach().double().clamp(max=4.6051701859880918).exp().reshape(-1, 1).to(z.device)
            return F.normalize(z, dim=-1) * (factor.sqrt() * z.shape[-1] ** 0.25)

        return [cosine, cosine]
    norms: list[Callable[[Tensor], Tensor] | None] = []
    for name in ("q_norm", "k_norm"):
        norm = getattr(module, name, None)
        norms.append(None if norm is None or isinstance(norm, nn.Identity) else _in_double(norm))
    return norms


def _in_double(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    dtype = next((p.dtype for p in norm.parameters()), torch.float32)
    return lambda z: norm(z.to(dtype)).double()
