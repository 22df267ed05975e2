"""Normalisations over groups, by root mean square, and onto the unit sphere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import NoAnswer, remainder
from lipcert.bounds._remainder import Radial, RadialKink, per_image
from lipcert.graph import Node


class ByGroup:
    """For :class:`Radial`: its tokens are groups of channels with all their positions, and the weight is by channel."""

    groups: int
    weight: Tensor | None

    def split(self, tensor: Tensor) -> Tensor:
        """(N, batch, channels, ...) as (N, batch · groups, entries)."""
        return tensor.reshape(len(tensor), tensor.shape[1] * self.groups, -1)

    def _sizes(self, direction: Tensor) -> Tensor:
        if self.weight is not None:
            direction = direction * self.weight.double().reshape(-1, *[1] * (direction.dim() - 3))
        return self.split(direction).norm(dim=-1)


@remainder("group_norm")
class GroupNorm(ByGroup, Radial):
    """LayerNorm of every group. See :class:`Radial`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        given = arguments(node)
        self.groups = given["num_groups"]
        eps = given.get("eps", 1e-5)
        if not eps > 0:
            raise NoAnswer("eps = 0")
        h = self.split(operands[0])
        size = h.shape[-1]
        radius = math.sqrt(size * eps)
        length = (h - h.mean(-1, keepdim=True)).norm(dim=-1)
        super().__init__(length, radius, math.sqrt(size) / radius, given.get("weight"), 2)


@remainder("rms_norm")
class RootMeanSquare(Radial):
    """√d h/√(‖h‖² + d·eps), as LayerNorm without centring. See :class:`Radial`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        given = arguments(node)
        if len(given["normalized_shape"]) != 1:
            raise NoAnswer("several normalised dimensions")
        size, eps = given["normalized_shape"][0], given.get("eps")
        if eps is None:
            eps = torch.finfo(operands[0].dtype).eps
        if not eps > 0:
            raise NoAnswer("eps = 0")
        radius = math.sqrt(size * eps)
        length = per_image(operands[0].norm(dim=-1))
        super().__init__(length, radius, math.sqrt(size) / radius, given.get("weight"), -1)


@remainder("normalize")
class Normalized(RadialKink):
    """h/max(‖h‖, eps) is 1/eps times the projection onto the ball of radius eps. See :class:`RadialKink`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        given = arguments(node)
        dim, eps = given.get("dim", 1), given.get("eps", 1e-12)
        if given.get("p", 2.0) != 2.0 or not isinstance(dim, int) or not eps > 0:
            raise NoAnswer("p is not 2, several dimensions, or eps = 0")
        axis = dim % len(node.shape) + 1
        super().__init__(per_image(operands[0].norm(dim=axis)), eps, None, axis, gain=1 / eps)
