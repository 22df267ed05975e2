"""The projections of lipcert.surgery that replace normalisations: onto a ball, and smooth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._jacobian import Bounds, normalising, normalising_norm
from lipcert.bounds._kinks import RadialKink
from lipcert.bounds._registry import Call, jacobian, rounding, rule
from lipcert.bounds._remainder import Radial, remainder
from lipcert.bounds._rounding import Operand, size_and_cast
from lipcert.bounds._value import Value
from lipcert.bounds.rules.normalization import (
    ByGroup,
    Centred,
    by_group,
    inverse_root_error,
    normalised_rounding,
)
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


def _axis(module: Any) -> int:
    """The axis of the channels of a tensor that has the image axis in front."""
    return 2 if module.channels_first else -1


@remainder(SmoothProject, RmsSmoothProject)
class SmoothProjection(Radial):
    """u = h/√(1 + ‖h‖²/R²): see :class:`Radial`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        weight, axis = module.weight.detach(), _axis(module)
        super().__init__(operands[0], float(module.radius), 1.0, weight, axis, centred=module.centred)


@remainder(LayerProject, RmsLayerProject)
class LayerProjection(RadialKink):
    """u = h·min(1, R/‖h‖): see :class:`RadialKink`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        weight, axis = module.weight.detach(), _axis(module)
        super().__init__(operands[0], float(module.radius), weight, axis, centred=module.centred)


@remainder(GroupSmoothProject)
class GroupSmoothProjection(ByGroup, Radial):
    """As above, with groups of channels as tokens."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        self.groups = module.groups
        super().__init__(operands[0], float(module.radius), 1.0, module.weight.detach(), 2, centred=True)


@remainder(GroupLayerProject)
class GroupLayerProjection(ByGroup, RadialKink):
    """As above, with groups of channels as tokens."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        module: Any = node.function
        self.groups = module.groups
        super().__init__(operands[0], float(module.radius), module.weight.detach(), 2, centred=True)


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
    module: Any = node.function
    grouped = isinstance(module, (GroupSmoothProject, GroupLayerProject))
    axis = 2 if module.channels_first else -1
    x = operands[0]
    if grouped:
        shape = (*x.nominal.shape[:2], module.groups, -1)
        tokens, most, rho = x.nominal.reshape(shape), x.most.reshape(shape), x.rho.reshape(-1, 1, 1, 1)
    else:
        tokens, most, rho = x.nominal.movedim(axis, -1), x.most.movedim(axis, -1), x.over(x.rho)
    d, radius = tokens.shape[-1], float(module.radius)
    centred = Centred.of(tokens, rho, most, d, fmt) if module.centred else Centred.without(tokens, rho, most)
    away = l2_norm(centred.error, -1, keepdim=True) / radius
    gamma = fmt.sum_gamma(d + EXTRA) + fmt.gamma(6)
    off = 2 * away + away.square() + gamma * (1 + away).square()
    off = off + 6 * fmt.cast(radius).item() / radius + 4 * (d + EXTRA) * fmt.smallest * (1 + 1 / radius**2)
    t = inverse_root_error(off, fmt)
    ratio = centred.low / radius
    if isinstance(module, SmoothProject):
        factor = (1 + ratio.square()).rsqrt()
    else:
        factor = ratio.clamp_min(1).reciprocal()
    peak = (centred.high + l2_norm(centred.error, -1, keepdim=True)).square() * max(1.0, 1 / radius**2)
    peak = torch.maximum(peak, torch.full_like(peak, max(radius**2, radius**-2)))
    arranged = partial(by_group, node.shape, module.groups) if grouped else torch.flatten
    affine = [size_and_cast(part, fmt, arranged) for part in (module.weight, module.bias)]
    none, whole = torch.zeros_like(factor), centred.size + centred.error
    error = normalised_rounding(whole, none, centred.size, centred.error, factor, t, affine, fmt, radius, roundings=3)
    error = fmt.safe(error, peak.expand_as(error))
    return error.reshape(x.nominal.shape) if grouped else error.movedim(-1, axis)


def _tokens(node: Node, values: Mapping[Node, Tensor]) -> tuple[Tensor, bool, float, float, Tensor]:
    """The tokens of a projection, and how they are normalised: the arguments of :func:`normalising`."""
    module: Any = node.function
    x, radius = values[node.operands[0]], float(module.radius)
    if isinstance(module, (GroupLayerProject, GroupSmoothProject)):
        x = x.reshape(*x.shape[:2], module.groups, -1)
    elif module.channels_first:
        x = x.movedim(2, -1)
    return x, module.centred, radius, radius, module.weight


@jacobian(LayerProject, RmsLayerProject, GroupLayerProject)
def projection_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """Tokens, or groups of channels, divided by their length and multiplied by at most the radius."""
    return normalising(*_tokens(node, values))


def smooth_projection_norm(node: Node, place: int, values: Mapping[Node, Tensor]) -> Tensor | float:
    """A smooth projection is R c/√(‖c‖² + R²)."""
    return normalising_norm(*_tokens(node, values))


jacobian(SmoothProject, RmsSmoothProject, GroupSmoothProject, norm=smooth_projection_norm)(projection_jacobian)
