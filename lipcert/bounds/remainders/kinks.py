"""Piecewise linear functions: hard activations, limits, and extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import NoAnswer, remainder
from lipcert.bounds._remainder import Against, Kinked, Smooth, per_image
from lipcert.bounds.rules.pooling import covered, per_axis
from lipcert.graph import Node


@remainder(F.hardtanh, F.relu6, "clamp")
class Clamp(Kinked):
    """min(max(z, low), high): slope 0 or 1, constant up to the nearer limit, so :class:`Kinked` with that distance."""

    entrywise = True

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        z = operands[0]
        low, high = _limits(node)
        distance = torch.full_like(z, math.inf)
        for limit in (low, high):
            if limit is not None:
                distance = torch.minimum(distance, (z - torch.as_tensor(limit, dtype=torch.float64)).abs())
        super().__init__(distance)


def _limits(node: Node) -> tuple[Any, Any]:
    if node.op == "relu6":
        return 0.0, 6.0
    if node.op == "hardtanh":
        given = arguments(node)
        return given.get("min_val", -1.0), given.get("max_val", 1.0)
    given = arguments(node)
    if len(node.operands) > 1 or node.shape != node.operands[0].shape:
        raise NoAnswer("limits that depend on the image, or are larger than the value")
    return given.get("min"), given.get("max")


@remainder("abs")
class Absolute(Kinked):
    """|z|: the slope changes by 2 at 0."""

    slope = 2.0
    bends = 1
    entrywise = True

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(operands[0].abs())


# torch computes hardswish and its derivative with ⅙ and ½ in float32 in places: off by less than 1e-8.
_FLOAT32 = 1e-8


@remainder("hardsigmoid")
class HardSigmoid(Kinked):
    """Slope ⅙ on [−3, 3] and 0 outside: it changes by at most ⅙, from the nearer kink on."""

    slope = 1 / 6
    entrywise = True

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__((operands[0].abs() - 3).abs())


@remainder("hardswish")
class HardSwish(Smooth):
    """z·min(max(z + 3, 0), 6)/6: second derivative ⅓ on (−3, 3), 0 outside; at ±3 the slope jumps by ½.

    R = ∫ (φ'(z + s) − φ'(z)) ds over the way. The smooth part of φ' changes by at most s/3, and the jumps by ½ for each
    kink passed, both of which are at least the nearer one's distance k away: |R| ≤ ½·⅓ δ² + (|δ| − k)₊.
    """

    curvature = 1 / 3

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(node, operands, result)
        self.kinks = Kinked((operands[0].abs() - 3).abs())

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        slack = _FLOAT32 * (1 + self.z.abs().amax(1) + rho[0]) * rho[0]
        return super().norm(rho) + self.kinks.norm(rho) + slack

    def against(self, direction: Tensor) -> Against:
        curved, kinked = super().against(direction), self.kinks.against(direction)
        size = per_image(direction).norm(dim=1) * _FLOAT32
        largest = self.z.abs().amax(1)
        return lambda rho: curved(rho) + kinked(rho) + size * (1 + largest + rho[0]) * rho[0]

    def quadratic(self, direction: Tensor, rho: Sequence[Tensor]) -> Tensor | None:
        return None  # the kinks are not of this form

    def total(self, weight: Tensor, rho: Sequence[Tensor], size: Tensor) -> Tensor:
        slack = weight.norm(dim=1) * _FLOAT32 * (1 + self.z.abs().amax(1) + rho[0]) * rho[0]
        return super().total(weight, rho, size) + self.kinks.against(weight)(rho) + slack


@remainder("amax", "amin")
class Extreme(Kinked):
    """The largest entry of each group: with gap k to the second, |R| ≤ (|δ_j| + |δ_top| − k)₊ ≤ (√2‖δ_group‖ − k)₊.

    Autograd shares a tie evenly; then k = 0, and |δ_j − Σ w_i δ_i| ≤ √2‖δ_group‖ for weights w.
    """

    spread = math.sqrt(2)

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        given = arguments(node)
        if not node.shape:
            raise NoAnswer("the largest or smallest of all entries")
        dim = given.get("dim")
        shape = node.operands[0].shape
        dims = range(len(shape)) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
        inside = sorted({d % len(shape) + 1 for d in dims})
        outside = [d for d in range(len(shape) + 1) if d not in inside]
        groups = operands[0].permute(*outside, *inside).flatten(len(outside))
        ordered = groups.sort(dim=-1).values
        if ordered.shape[-1] == 1:
            gap = torch.full_like(ordered[..., 0], math.inf)
        elif node.op == "amin":
            gap = ordered[..., 1] - ordered[..., 0]
        else:
            gap = ordered[..., -1] - ordered[..., -2]
        self.bends = -1 if node.op == "amin" else 1
        super().__init__(gap)


class _Windows(Kinked):
    """max over windows: with gap k between the largest and the second entry, |R| ≤ (|δ_j| + |δ_top| − k)₊ for some j.

    |δ_j| + |δ_top| ≤ √2 ‖δ_window‖, and an entry lies in m windows at most, so Σ (√2 ‖δ_window‖)² ≤ 2 m ρ².

    Args:
        x: shape (..., *sizes).
        windows: for every axis the positions that each window covers on it, shape (windows, entries); those outside of
            the axis are padding.
    """

    def __init__(self, x: Tensor, windows: Sequence[Tensor]):
        images, dims = len(x), len(windows)
        x = x.reshape(-1, *x.shape[-dims:])
        shared = 1
        for axis, places in reversed(list(enumerate(windows, 1))):
            size = x.shape[axis]
            places = torch.where((places >= 0) & (places < size), places, size)
            shared *= int(places.flatten().bincount(minlength=size + 1)[:size].max())
            padding = x.new_full((*x.shape[:axis], 1, *x.shape[axis + 1 :]), -math.inf)
            x = torch.cat([x, padding], axis).index_select(axis, places.flatten().to(x.device))
            x = x.unflatten(axis, places.shape)
        entries = x.permute(0, *range(1, 2 * dims, 2), *range(2, 2 * dims + 1, 2)).flatten(dims + 1)
        top = torch.nn.functional.pad(entries, (0, 1), value=-math.inf).topk(2).values
        super().__init__((top[..., 0] - top[..., 1]).reshape(images, -1))
        self.spread = math.sqrt(2 * shared)


@remainder("max_pool1d", "max_pool2d", "max_pool3d")
class MaxPool(_Windows):
    """With the windows of :func:`lipcert.bounds.rules.pooling.covered`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        given = arguments(node)
        dims = int(str(node.op)[-2])
        kernel, stride, padding, dilation = (
            per_axis(value, dims)
            for value in (
                given["kernel_size"],
                given.get("stride") or given["kernel_size"],
                given.get("padding", 0),
                given.get("dilation", 1),
            )
        )
        super().__init__(operands[0], covered(result.shape[-dims:], kernel, stride, padding, dilation))


@remainder("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
class AdaptiveMaxPool(_Windows):
    """Window i of an axis of n entries covers those from ⌊in/m⌋ on and before ⌈(i + 1)n/m⌉."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        dims = int(str(node.op)[-2])
        windows = []
        for n, m in zip(operands[0].shape[-dims:], result.shape[-dims:], strict=True):
            first, behind = torch.arange(m) * n // m, -(-(torch.arange(m) + 1) * n // m)
            places = first[:, None] + torch.arange(int((behind - first).max()))
            windows.append(torch.where(places < behind[:, None], places, n))
        super().__init__(operands[0], windows)


@remainder("max", "min", "maximum", "minimum")
class Larger(Kinked):
    """max(a, b) entry by entry: R ≤ (|δa − δb| − |a − b|)₊, and |δa − δb| ≤ √2 ‖(δa, δb)‖; b may be constant."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        given = arguments(node)
        pair = [given.get("input"), given.get("other")]
        values = iter(operands)
        sides = [next(values) if isinstance(item, Node) else torch.as_tensor(item).detach().double() for item in pair]
        if any(operand.shape != node.shape for operand in node.operands):
            raise NoAnswer("an operand that is repeated")
        self.spread = math.sqrt(len(node.operands))
        self.bends = 1 if node.op in ("max", "maximum") else -1
        super().__init__((sides[0] - sides[1]).abs())

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return super().norm([_together(rho)])

    def against(self, direction: Tensor) -> Against:
        kinked = super().against(direction)
        return lambda rho: kinked([_together(rho)])


def _together(rho: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rho)).norm(dim=0)
