"""The projections of lipcert.surgery that replace normalisations: onto a ball, and smooth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._registry import Call, rounding, rule
from lipcert.bounds._rounding import Operand
from lipcert.bounds._tokens import Tokens, along, normalises, of_groups, tokens_of
from lipcert.bounds._value import Value
from lipcert.bounds.rules.normalization import Centred, affine, arranged, inverse_root_error, normalised_rounding
from lipcert.graph import Node
from lipcert.numerics import EXTRA, Format, l2_norm
from lipcert.surgery import (
    GroupLayerProject,
    GroupSmoothProject,
    LayerProject,
    RmsLayerProject,
    RmsSmoothProject,
    SmoothProject,
)


@rule(LayerProject, SmoothProject, RmsLayerProject, RmsSmoothProject, GroupLayerProject, GroupSmoothProject)
def projection(call: Call, module: LayerProject | SmoothProject, x: Value) -> Value:
    """Constant max|weight|, and a bound on the norms of the vectors of channels; proof in lipcert.surgery."""
    lip = x.lip * module.lipschitz(x.shape[1:]).value
    return Value(call.shape, lip, rows=(1 if module.channels_first else -1, module.token_norm()))


@normalises(SmoothProject, RmsSmoothProject, GroupSmoothProject)
@normalises(LayerProject, RmsLayerProject, GroupLayerProject, nonsmooth=True)
def projection_tokens(node: Node) -> Tokens:
    """The vectors of channels, or groups of channels with all positions, onto the ball of the radius."""
    module: Any = node.function
    grouped = isinstance(module, (GroupSmoothProject, GroupLayerProject))
    axis = 2 if module.channels_first else -1
    arrangement = of_groups(node.shape, module.groups) if grouped else along(axis)
    radius = float(module.radius)
    nonsmooth = isinstance(module, LayerProject)
    return Tokens(*arrangement, module.centred, radius, radius, module.weight, module.bias, nonsmooth)


@rounding(SmoothProject, LayerProject, RmsSmoothProject, RmsLayerProject, GroupSmoothProject, GroupLayerProject)
def projection_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """weight ∘ c·f + bias for centred tokens c, f = 1/√(1 + ‖c‖²/R²) or R/√max(‖c‖², R²) = 1/√max(‖c‖²/R², 1).

    Tokens are the vectors of channels. For the replacement of GroupNorm they are all entries of a group of channels,
    for that of RMSNorm they are not centred.

    Let ĉ have an error of norm b, and let Q = ‖c‖²/R². The error of Q̂ is at most (2‖c‖b + b²)/R² + γ‖ĉ‖²/R², with γ
    for a sum of d squares and 6 roundings to the format. Relative to max(Q, 1) it is at most 2b/R + b²/R² + γ(1 +
    b/R)², because ‖c‖/R ≤ max(1, Q). The relative cast error of the radius enters Q twice, and in LayerProject f once
    more, with another product. Then :func:`inverse_root_error` applies, and :func:`normalised_rounding` to the products
    with f and the weight and the sum with the bias, each of which the module rounds once.
    """
    tokens = tokens_of(node)
    rows, most, rho = arranged(tokens, operands[0])
    d, radius = rows.shape[-1], tokens.radius
    centred = Centred.of(rows, rho, most, d, fmt) if tokens.centred else Centred.without(rows, rho, most)
    away = l2_norm(centred.error, -1, keepdim=True) / radius
    gamma = fmt.sum_gamma(d + EXTRA) + fmt.gamma(6)
    off = 2 * away + away.square() + gamma * (1 + away).square()
    off = off + 6 * fmt.cast(radius).item() / radius + 4 * (d + EXTRA) * fmt.smallest * (1 + 1 / radius**2)
    t = inverse_root_error(off, fmt)
    ratio = centred.low / radius
    if isinstance(node.function, SmoothProject):
        factor = (1 + ratio.square()).rsqrt()
    else:
        factor = ratio.clamp_min(1).reciprocal()
    peak = (centred.high + l2_norm(centred.error, -1, keepdim=True)).square() * max(1.0, 1 / radius**2)
    peak = torch.maximum(peak, torch.full_like(peak, max(radius**2, radius**-2)))
    error = normalised_rounding(
        centred.size + centred.error, torch.zeros_like(factor), centred.size, centred.error,
        factor, t, affine(tokens, fmt), fmt, radius, roundings=3,
    )  # fmt: skip
    return tokens.back(fmt.safe(error, peak.expand_as(error)))
