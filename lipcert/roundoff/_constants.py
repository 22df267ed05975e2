"""Rounding errors, in the deployed format, of constants that a network computes from its weights.

The captured graph holds such a constant as a float64 tensor. Its error in the deployed network can be bounded only if
the computation is known. Each case here identifies the tensor by comparing it with the module's computation, entry by
entry.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lipcert.numerics import OWN_ROUNDING, Format
from lipcert.surgery import L2Attention


def computed_error(constant: Tensor, path: str, model: nn.Module, fmt: Format) -> Tensor | None:
    """Upper bounds on the absolute error of a constant in the deployed network, entry by entry."""
    module, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    for value, error in (*_mixing(module, fmt), *_positions(module, parent, fmt)):
        if value.numel() == constant.numel() and torch.equal(value.reshape(constant.shape), constant):
            return error.expand(value.shape).reshape(constant.shape) * OWN_ROUNDING
    return None


def _mixing(module: nn.Module, fmt: Format) -> Iterator[tuple[Tensor, Tensor]]:
    """M = s·Q·Vᵀ of L2 attention: sums of D products of cast weights, then a product with s.

    With Q̂ = Q + ΔQ and V̂ = V + ΔV, |Q̂V̂ᵀ − QVᵀ| ≤ |ΔQ||V|ᵀ + |Q||ΔV|ᵀ + |ΔQ||ΔV|ᵀ. The computed product adds the
    error of :meth:`Format.sum`. The product with ŝ = s + Δs errs by |e|ŝ + |M/s||Δs| and two roundings.
    """
    if not isinstance(module, L2Attention):
        return
    queries, values = (module._by_head(weight.detach()) for weight in (module.q.weight, module.v_weight))
    cast_queries, cast_values = fmt.cast(queries), fmt.cast(values)
    size = queries.abs() @ values.abs().mT
    cast = cast_queries @ values.abs().mT + (queries.abs() + cast_queries) @ cast_values.mT
    error = fmt.sum(size + cast, module.dim) + cast
    away = fmt.cast(module.scale).item()
    scale = module.scale + away
    yield module.mixing().detach(), error * scale + size * away + fmt.rounded((size + error) * scale, 2)


def _positions(module: nn.Module, parent: nn.Module, fmt: Format) -> Iterator[tuple[Tensor, Tensor]]:
    """Relative position biases, gathered from a table, alone and with the mask of shifted windows added."""
    table, index = (getattr(module, f"relative_position_{name}", None) for name in ("bias_table", "index"))
    if not isinstance(table, Tensor) or not isinstance(index, Tensor) or index.dim() != 2:
        return
    bias = table.detach()[index].permute(2, 0, 1)
    yield bias, fmt.cast(bias)
    mask = getattr(parent, "attn_mask", None)
    if isinstance(mask, Tensor) and mask.dim() == 3 and mask.shape[1:] == bias.shape[1:]:
        masks = mask.detach()[:, None]
        cast = fmt.cast(bias) + fmt.cast(masks)
        yield bias + masks, cast + fmt.rounded(bias.abs() + masks.abs() + cast)
