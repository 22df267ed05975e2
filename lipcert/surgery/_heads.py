"""Reads queries, keys and values from the attention modules of timm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PROBES = 256


@dataclass(frozen=True)
class Heads:
    """The linear maps of dot-product attention with logits q_i·k_j/√d, head by head, in float64.

    Attributes:
        queries, keys: shape (heads, dim, d).
        values: shape (heads, dim, d_v).
        value_bias: shape (heads·d_v,), or None.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    value_bias: Tensor | None


@dataclass(frozen=True)
class _Maps:
    """The weights in the module's orientation, with outputs as rows: (heads, d, dim), and their biases (heads, d)."""

    weights: list[Tensor]
    biases: list[Tensor | None]


def heads_of(module: nn.Module, packing: str, tokens: Tensor | None) -> Heads:
    """Reads the maps of a module.

    If queries and keys are normalised, by a module or for cosine attention, each channel of each head is multiplied by
    the factor that best approximates the normalisation on the tokens, in mean square.
    """
    maps = PACKINGS[packing](module)
    weights = [weight.detach().double() for weight in maps.weights]
    biases = [None if bias is None else bias.detach().double() for bias in maps.biases]
    for index, normalise in enumerate(_normalisations(module)):
        if normalise is not None:
            weights[index] = weights[index] * _gain(weights[index], biases[index], normalise, tokens).unsqueeze(-1)
    queries, keys, values = (weight.mT for weight in weights)
    return Heads(queries, keys, values, None if biases[2] is None else biases[2].flatten())


def sizes_of(module: nn.Module, packing: str) -> tuple[int, int, int, int, bool]:
    """(heads, dim, d, d_v, whether the values have a bias)."""
    maps = PACKINGS[packing](module)
    heads, width, dim = maps.weights[0].shape
    return heads, dim, width, maps.weights[2].shape[1], maps.biases[2] is not None


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


def _flat(layer: Any) -> Tensor:
    """The weight of a linear layer or a 1×1 convolution, as a matrix (out, in)."""
    return layer.weight.flatten(1)


def _kinds_first(module: Any) -> _Maps:
    """One fused map, with rows ordered by (query, key, value), head, channel."""
    heads = getattr(module, "num_heads", None) or module.heads
    weights = list(_flat(module.qkv).unflatten(0, (3, heads, -1)))
    if module.qkv.bias is not None:
        return _Maps(weights, list(module.qkv.bias.unflatten(0, (3, heads, -1))))
    separate = [getattr(module, f"{name}_bias", None) for name in "qkv"]
    return _Maps(weights, [None if bias is None else bias.unflatten(0, (heads, -1)) for bias in separate])


def _heads_first(module: Any) -> _Maps:
    """One fused map, with rows ordered by head, (query, key, value), channel; the values may be wider."""
    heads = module.num_heads
    width = getattr(module, "key_dim", None) or module.dim_head
    weight = _flat(module.qkv).unflatten(0, (heads, -1))
    widths = [width, width, weight.shape[1] - 2 * width]
    bias = module.qkv.bias
    biases = [None] * 3 if bias is None else list(bias.unflatten(0, (heads, -1)).split(widths, 1))
    return _Maps(list(weight.split(widths, 1)), biases)


def _either_first(module: Any) -> _Maps:
    """MaxViT's modules, which have an attribute for the order."""
    return _heads_first(module) if module.head_first else _kinds_first(module)


def _separate(*names: str) -> Callable[[Any], _Maps]:
    """Three separate maps."""

    def read(module: Any) -> _Maps:
        layers = [getattr(module, name) for name in names]
        weights = [_flat(layer).unflatten(0, (module.num_heads, -1)) for layer in layers]
        biases = [None if layer.bias is None else layer.bias.unflatten(0, (module.num_heads, -1)) for layer in layers]
        return _Maps(weights, biases)

    return read


def _fused_or_not(module: Any) -> _Maps:
    """The rotary modules, with one fused map or three separate ones."""
    return _kinds_first(module) if module.qkv is not None else _separate("q_proj", "k_proj", "v_proj")(module)


def _two_and_one(pair: str, single: str, value_in_pair: bool) -> Callable[[Any], _Maps]:
    """One fused map for two of the three, with rows ordered by kind, head, channel, and one map for the third."""

    def read(module: Any) -> _Maps:
        heads = module.num_heads
        two, third = getattr(module, pair), getattr(module, single)
        weights = list(_flat(two).unflatten(0, (2, heads, -1)))
        biases = [None, None] if two.bias is None else list(two.bias.unflatten(0, (2, heads, -1)))
        alone = _flat(third).unflatten(0, (heads, -1))
        alone_bias = None if third.bias is None else third.bias.unflatten(0, (heads, -1))
        if value_in_pair:
            return _Maps([alone, *weights], [alone_bias, *biases])
        return _Maps([*weights, alone], [*biases, alone_bias])

    return read


PACKINGS: dict[str, Callable[[Any], _Maps]] = {
    "kinds first": _kinds_first,
    "heads first": _heads_first,
    "either first": _either_first,
    "q, k, v": _separate("q", "k", "v"),
    "wq, wk, wv": _separate("wq", "wk", "wv"),
    "fused or not": _fused_or_not,
    "qk, v": _two_and_one("qk", "v", value_in_pair=False),
    "q, kv": _two_and_one("kv", "q", value_in_pair=True),
}
