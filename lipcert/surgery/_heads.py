"""Reads queries, keys and values from the attention modules of timm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PROBES = 256


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
