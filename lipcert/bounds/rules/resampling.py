"""Interpolation, which is a linear map along each axis, and windows of entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds._registry import COUNTED, Call, NoAnswer, Schur, rounding, rule
from lipcert.bounds._rounding import Operand, exact, zeros
from lipcert.bounds._value import Value, largest_row_sum
from lipcert.bounds.rules.pooling import schur_norms
from lipcert.graph import Node
from lipcert.norms import dense_norm
from lipcert.numerics import Format, Upper


def _taps(node: Node, operand: Node) -> float:
    """Along an axis from n entries to m, at most 8 max(1, n/m) neighbours give an entry, and 8 max(1, m/n) get one."""
    axes = zip(operand.shape[2:], node.shape[2:], strict=True)
    return math.prod(8 * max(n / m, m / n) for n, m in axes)


# Bicubic weights have both signs, and the sum of their absolute values is below 1.6 along each axis.
@rule(F.interpolate, linear=True, schur=Schur(terms=_taps, signs=4.0))
def interpolate(
    call: Call,
    x: Value,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Value:
    """One matrix per axis, so the norm is the product of their norms, ‖A ⊗ B‖ = ‖A‖‖B‖.

    Applying the operation to unit vectors along one axis, with size 1 on the other axes, gives the matrix of that axis:
    every mode is the identity on an axis of size 1. The weights are computed from positions up to n and m, with errors
    of at most 2⁻⁵⁰(n + m).
    """
    dims = len(x.shape) - 2
    norm, sums, positive = Upper(1), Upper(1), True
    for axis in range(dims):
        n, m = x.shape[2 + axis], call.shape[2 + axis]
        ones = [1] * dims
        target = None if size is None else [m if d == axis else 1 for d in range(dims)]
        factors = None
        if scale_factor is not None:
            factor = scale_factor if isinstance(scale_factor, (int, float)) else scale_factor[axis]
            factors = [float(factor) if d == axis else 1.0 for d in range(dims)]
        ones[axis] = n
        units = torch.eye(n, dtype=torch.float64).reshape(n, 1, *ones)
        rows = F.interpolate(units, target, factors, mode, align_corners, recompute_scale_factor, antialias=antialias)
        # Row i holds the result for unit vector i.
        matrix = rows.reshape(n, m).mT
        error = Upper(n * m).sqrt() * ((n + m) * 2.0**-50)
        norm = norm * (dense_norm(matrix) + error)
        sums = sums * (largest_row_sum(matrix) + Upper(n) * ((n + m) * 2.0**-50))
        positive = positive and bool((matrix >= 0).all())
    rows_bound = (1, x.rows[1] * sums) if x.rows is not None and x.rows[0] == 1 else None
    floor = 0.0 if positive and x.lowest >= 0 else -math.inf
    return Value(call.shape, x.lip * norm, magnitude=x.magnitude * sums, rows=rows_bound, floor=floor)


# Sums of the absolute weights of an axis, and of their derivatives in the position; bicubic weights have a = −3/4.
_WEIGHTS = {"linear": (1.0, 2.0), "bilinear": (1.0, 2.0), "trilinear": (1.0, 2.0), "bicubic": (1.6, 5.0)}
_NEIGHBOURS = {"linear": 2, "bilinear": 4, "trilinear": 8, "bicubic": 16}


@rounding("interpolate")
def interpolation_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Sums of neighbours with weights in the format, at positions that are computed in the arithmetic of sums.

    A position is t = s(i + ½) − ½ or s·i, at most n, from a ratio s that is rounded: it errs by less than
    δ = 8(n + 1)u. The interpolant is continuous in t, with a slope of at most D max|x| for D = Σ|w'|, also where t
    crosses a neighbour; so along an axis it moves by at most Dδ max|x|, and the other axes multiply that by Σ|w| each.
    A weight, the products and the sums of at most T neighbours err by γ of T + 16 roundings to the format, relative to
    the product of Σ|w|. Nearest neighbours are exact where each position in float32 is off every whole number by
    more than its error, or is computed exactly.
    """
    names = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    args = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    mode, x = args.get("mode", "nearest"), operands[0]
    sizes = list(zip(x.nominal.shape[3:], node.shape[2:], strict=True))
    if mode in ("nearest", "nearest-exact"):
        factors = None if args.get("recompute_scale_factor") else args.get("scale_factor")
        for axis, (n, m) in enumerate(sizes):
            factor = factors[axis] if isinstance(factors, (tuple, list)) else factors
            _check_nearest(n, m, n / m if factor is None else 1 / factor, mode)
        return zeros(node, operands)
    if mode not in _WEIGHTS or args.get("antialias"):
        raise NoAnswer(f"the mode {mode}" + (" with antialias" if args.get("antialias") else ""))
    total, slope = _WEIGHTS[mode]
    dims = len(sizes)
    most = x.most.amax(tuple(range(3, x.most.dim())), keepdim=True).expand(len(x.nominal), *node.shape)
    off = sum(slope * 8 * (n + 1) * fmt.sum_unit for n, _ in sizes) * total ** (dims - 1)
    count = _NEIGHBOURS[mode] + 16
    size = total**dims * most
    return fmt.safe(fmt.gamma(count) * size + off * most + 4 * count * fmt.smallest, size)


def _check_nearest(n: int, m: int, scale: float, mode: str) -> None:
    """Checks that m nearest neighbours of n are the same ones in float32."""
    exact = scale * 1024 == int(scale * 1024) and max(n, m) < 2**12
    if n == m or (m == 2 * n and mode == "nearest") or exact:
        return
    shift = 0.5 if mode == "nearest-exact" else 0.0
    positions = [(i + shift) * scale for i in range(m)]
    if any(abs(p - round(p)) <= (n + 1) * 2.0**-21 for p in positions if p):
        raise NoAnswer("nearest neighbours that depend on rounding")


@rule(F.unfold, linear=True, schur=COUNTED)
def patches(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Copies entries into overlapping windows, padded with zeros: √m, if at most m windows share an entry."""

    def windows(channel: Tensor) -> Tensor:
        return F.unfold(channel, *args, **kwargs)

    _, norm = schur_norms(windows, (1, 1, *x.shape[-2:]))
    return Value(call.shape, x.lip * norm, magnitude=x.magnitude, floor=min(0.0, x.lowest))


@rule(F.fold, linear=True, schur=COUNTED)
def overlapped(
    call: Call,
    x: Value,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Value:
    """Adds up overlapping windows, the adjoint of ``unfold``: weights 0 and 1, and Schur's test on one channel."""
    taps = kernel_size**2 if isinstance(kernel_size, int) else math.prod(kernel_size)

    def added(windows: Tensor) -> Tensor:
        return F.fold(windows, output_size, kernel_size, dilation, padding, stride)

    sums, norm = schur_norms(added, (1, taps, x.shape[-1]))
    return Value(call.shape, x.lip * norm, magnitude=x.magnitude * sums, floor=0.0 if x.lowest >= 0 else -math.inf)


@rounding("fold")
def overlapped_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Sums of one entry for each tap at most, added in the format itself, as torch does on a CPU."""
    (x,) = operands
    size = node.function(x.most.flatten(0, 1), *node.args[1:], **node.kwargs).unflatten(0, (len(x.nominal), -1))
    return replace(fmt, sums=fmt.dtype).sum(size, x.nominal.shape[-2] // max(1, node.shape[1]))


@rule(torch.Tensor.unfold, linear=True, schur=COUNTED)
def windows_along(call: Call, x: Value, dimension: int, size: int, step: int) -> Value:
    """Windows along one axis: an entry lies in at most ⌈size/step⌉ of them."""
    return x.like(call.shape, x.lip * Upper(-(-size // step)).sqrt())


rounding("unfold", "unfold_axis")(exact)
