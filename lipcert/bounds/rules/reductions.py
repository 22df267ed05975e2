"""Sums, means, variances and norms over some axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._arguments import arguments, replayed
from lipcert.bounds._box import nonnegative
from lipcert.bounds._jacobian import Bounds, evenly, gamma, lengths
from lipcert.bounds._registry import COUNTED, Call, NoAnswer, Schur, Tag, box, jacobian, rounding, rule, tag
from lipcert.bounds._remainder import Against, Remainder, per_image, remainder, worst
from lipcert.bounds._rounding import Operand
from lipcert.bounds._value import Origin, Value, rounded_down
from lipcert.graph import Node
from lipcert.numerics import EXTRA, Format, Number, Upper, l2_norm, over

_MEAN = Schur(terms=evenly(lambda node: node.operands[0].entries / max(1, node.entries)))


@rule("mean", linear=True, schur=_MEAN, tags=Tag.SUMS | Tag.WIDENS)
@rule("sum", linear=True, schur=COUNTED, tags=Tag.SUMS | Tag.WIDENS | Tag.WHOLE)
def summed(call: Call, x: Value, *args: object, **kwargs: object) -> Value:
    """A sum of n entries has norm √n, a mean √n / n; the results share no entry."""
    mean = call.op == "mean"
    count = math.prod(x.shape) // max(1, math.prod(call.shape))
    root = Upper(count).sqrt()
    factor: Number = root / count if mean else root
    rows = None
    if x.last_rows is not None and call.shape and call.shape[-1] == x.shape[-1] > 1:
        rows = (-1, x.last_rows * (1 if mean else count))
    result = Value(call.shape, x.lip * factor, magnitude=x.magnitude * (1 if mean else count), rows=rows)
    dims = reduced(x, *args, **kwargs)
    least = x.lowest * (1 if mean else count)
    if not mean and dims == (len(x.shape) - 1,):
        least = max(least, x.mass)
    result.floor = rounded_down(least)
    if call.shape == with_keepdim(x, dims):
        if x.origin is not None and x.origin.kind == "square":
            result.origin = Origin("energy", x.origin.source, dims, count if mean else 1)
        elif mean:
            result.origin = Origin("mean", x, dims, count)
    return result


def reduced(x: Value, dim: Any = None, *args: object, **kwargs: object) -> tuple[int, ...]:
    """The dimensions over which an operation reduces."""
    dims: Sequence[int] = range(len(x.shape)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(sorted(d % len(x.shape) for d in dims)) or tuple(range(len(x.shape)))


def with_keepdim(x: Value, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The shape after a reduction that keeps the dimensions with size 1."""
    return tuple(1 if d in dims else size for d, size in enumerate(x.shape))


box("mean", "sum")(nonnegative)
tag(Tag.WHOLE, "cumsum")


@rounding("sum", "mean")
def sum_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:meth:`Format.sum` of n terms. A sum may be rounded in parts, one for each thread.

    A mean is computed in the arithmetic inside an operation, and the sum may be rounded before it is divided by n.
    """
    x = operands[0]
    count = math.prod(x.nominal.shape[1:]) // max(1, math.prod(node.shape))
    size = replayed(node, x.most)
    total = size * (count if node.op == "mean" else 1)
    near = None
    if node.op == "mean":
        near = replayed(node, x.nominal).abs() + (x.rho / math.sqrt(max(1, count))).reshape(-1, *[1] * len(node.shape))
    return fmt.safe(fmt.sum(size, count, near), total)


@rule("var")
def variance(call: Call, x: Value, dim: Any = None, *args: Any, **kwargs: Any) -> Value:
    """‖x − μ‖²/d of each group of n entries, d = n or n − 1: at most n/d max|x|², slope at most 2‖x − μ‖/d."""
    if isinstance(dim, bool):
        raise NoAnswer("arguments in an old form")
    dims = reduced(x, dim)
    options = dict(zip(("unbiased", "keepdim"), args, strict=False)) | kwargs
    size = math.prod(x.shape[d] for d in dims)
    correction = options.get("correction", 1 if options.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    divisor = size - int(correction)
    if divisor < 1 or correction != int(correction):
        raise NoAnswer(f"the variance of {size} entries with correction {correction:g}")
    length = Upper(size).sqrt() * x.magnitude
    result = Value(call.shape, x.lip * length * 2 / divisor, magnitude=length * length / divisor, floor=0.0)
    if call.shape == with_keepdim(x, dims):
        result.origin = Origin("energy", x, dims, divisor, centred=True)
    return result


def _divisor(node: Node) -> float:
    """d of a captured variance."""
    args = arguments(node)
    shape = node.operands[0].shape
    size = math.prod(shape[d] for d in reduced(Value(shape, 0), args.get("dim")))
    correction = args.get("correction", 1 if args.get("unbiased", True) else 0)
    divisor = size - float(1 if correction is None else correction)
    if isinstance(args.get("dim"), bool) or not divisor > 0:
        raise NoAnswer(f"the variance of {size} entries, or arguments in an old form")
    return divisor


@remainder("var")
class Variance(Remainder):
    """‖C h‖²/d, with C the centring, is quadratic: R = ‖C Δ‖²/d per group, so ‖R‖ ≤ ρ²/d and |⟨g, R⟩| ≤ max|g| ρ²/d."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        self.divisor = _divisor(node)

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return rho[0] ** 2 / self.divisor

    def against(self, direction: Tensor) -> Against:
        largest = per_image(direction).abs().amax(1) / self.divisor
        return lambda rho: largest * rho[0] ** 2


@jacobian("var")
def variance_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """2(x − mean)/d for each group, whose absolute values are at most those of its two terms."""
    x = values[node.operands[0]]
    count = x[0].numel() / max(1, math.prod(node.shape))
    gain = 4 * lengths(x) / _divisor(node)
    return gain, gamma(4 * count) * gain


@rule("norm")
def length(call: Call, x: Value, p: Any = "fro", dim: Any = None, *args: Any, **kwargs: Any) -> Value:
    """ℓp norms for p ≥ 2: |‖a‖_p − ‖b‖_p| ≤ ‖a − b‖_p ≤ ‖a − b‖₂, and the groups share no entry."""
    if not (p in ("fro", None) or (isinstance(p, (int, float)) and p >= 2)):
        raise NoAnswer(f"p = {p}")
    dims = reduced(x, dim)
    size = math.prod(x.shape[d] for d in dims)
    largest = x.row_norm(dims[0]) if len(dims) == 1 else Upper(size).sqrt() * x.magnitude
    return Value(call.shape, x.lip, magnitude=largest, floor=0.0)


@remainder("norm")
class Length(Remainder):
    """‖h‖ has the second derivative (I − ĥĥᵀ)/‖h‖: R ≤ ½ρ²/(n − ρ) for n = ‖h‖ > ρ. As slopes are ≤ 1, R ≤ 2ρ too.

    Over groups Σ_t |g_t| R_t ≤ max(|g_t| c_t) ρ² with c_t = ½/(n_t − ρ), and ≤ 2‖g‖ρ.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        args = arguments(node)
        if args.get("p", "fro") not in ("fro", 2, None):
            raise NoAnswer("p is not 2")
        self.length = per_image(result)

    def _curvature(self, rho: Tensor) -> Tensor:
        return over(0.5, self.length - rho[:, None])

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return torch.minimum(self._curvature(rho[0]).amax(1) * rho[0] ** 2, 2 * rho[0])

    def against(self, direction: Tensor) -> Against:
        weight = per_image(direction).abs()
        size = l2_norm(weight, 1)

        def bound(rho: Sequence[Tensor]) -> Tensor:
            return torch.minimum(worst(self._curvature(rho[0]), weight) * rho[0] ** 2, 2 * size * rho[0])

        return bound


@jacobian("norm")
def length_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """A row of J is x/‖x‖, and the rows share no column."""
    return 1.0, gamma(2 * values[node.operands[0]][0].numel() / max(1, math.prod(node.shape)))


@rounding("norm")
def length_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """‖x‖ over some axes: the relative errors of the sum of squares and of the root, and the root of the underflow.

    Norms of parts, or their squares, may be rounded to the format before they are combined.
    """
    args = arguments(node)
    if args.get("p", 2) not in ("fro", 2, None):
        raise NoAnswer("another norm than ‖·‖₂")
    x = operands[0]
    count = math.prod(x.nominal.shape[1:]) // max(1, math.prod(node.shape)) + EXTRA
    size = replayed(node, x.most)
    size = torch.minimum(size, replayed(node, x.nominal) + x.rho.reshape(-1, *[1] * (size.dim() - 1)))
    error = size * (fmt.sum_gamma(count) + fmt.library) + math.sqrt(4 * count * fmt.smallest)
    return fmt.safe(error + fmt.rounded(size + error, 3), size.square())
