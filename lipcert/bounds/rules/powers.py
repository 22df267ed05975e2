"""Powers and roots, whose constants are finite if the slope is bounded on the range of the value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._jacobian import of_entries
from lipcert.bounds._registry import Call, NoAnswer, Tag, jacobian, rounding, rule, tag
from lipcert.bounds._remainder import Against, Smooth, per_image, remainder, smooth, worst
from lipcert.bounds._rounding import Operand
from lipcert.bounds._value import Origin, Value, rounded_down
from lipcert.bounds.rules.arithmetic import _copies
from lipcert.graph import Node
from lipcert.numerics import INFINITE, Format, Upper

_ROUNDED = 1 + 2.0**-40  # a few operations in float64, powers included


@rule("pow", tags=Tag.ENTRYWISE | Tag.MONOTONE_IN_SECOND)
def power(call: Call, x: Any, exponent: Any) -> Value:
    """The slope |p| |x|^(p−1) is largest at the largest |x| if p ≥ 1, else at the smallest x, which must be > 0."""
    if isinstance(exponent, Value) and not isinstance(x, Value):
        return _exponential(call, x, exponent)
    if not isinstance(x, Value) or isinstance(exponent, Value):
        raise NoAnswer("the exponent must be one number")
    if isinstance(exponent, Tensor) and exponent.numel() != 1:
        raise NoAnswer("the exponent must be one number")
    p = float(exponent)
    if p == 2:
        result = square(call, x)
        if call.shape == x.shape:
            return result
        return Value(call.shape, result.lip * _copies(call, x), magnitude=result.magnitude, floor=0.0)
    integer = p == int(p) if math.isfinite(p) else False
    if not math.isfinite(p) or p == 0 or (not integer and not x.lowest >= 0) or (p < 0 and x.lowest < 0):
        raise NoAnswer(f"exponent {p:g} of a value that may be negative")
    if p >= 1:
        factor = _power(x.magnitude, p - 1) * p
        floor = x.lowest**p if x.lowest > 0 else 0.0 if x.lowest == 0 or p % 2 == 0 else -math.inf
        magnitude = _power(x.magnitude, p)
    else:
        least = x.lowest
        if not least > 0:
            return Value(call.shape, INFINITE, unbounded="its slope is unbounded near 0")
        factor = Upper(abs(p) * least ** (p - 1)) * _ROUNDED
        magnitude = Upper(least**p) * _ROUNDED if p < 0 else max(Upper(1), x.magnitude)
        floor = least**p if p > 0 else 0.0
    return Value(call.shape, x.lip * factor * _copies(call, x), magnitude=magnitude, floor=_below(floor))


def _below(number: float) -> Tensor:
    """A lower bound on a computed power."""
    return rounded_down(number * (1 - 2.0**-40))


def _power(base: Upper, exponent: float) -> Upper:
    """An upper bound on baseᵖ for p ≥ 0: exact for whole p, else (max(base, 1))^⌈p⌉."""
    return base ** int(exponent) if exponent == int(exponent) else max(base, Upper(1)) ** math.ceil(exponent)


@rule("square", tags=Tag.ENTRYWISE)
def square(call: Call, x: Value) -> Value:
    """The slope is 2|x|. The origin is recorded for later sums, means and roots, which have better constants."""
    result = Value(x.shape, x.lip * x.magnitude * 2, magnitude=x.magnitude * x.magnitude, floor=0.0)
    result.origin = Origin("square", x)
    return result


smooth("square", curvature=2.0, downward=0.0)
jacobian("square", "pow", "sqrt", "rsqrt", absolute=0.0)(of_entries)


@rounding("square", "pow")
def power_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """xᵖ for whole p ≥ 1, computed by products or by a library function; for p = ½ the root.

    bˣ is a library function, for a base b that the format can represent.
    """
    p = 2.0 if node.op == "square" else arguments(node)["exponent"]
    if node.op == "pow" and isinstance(p, Node) and not isinstance(base := arguments(node)["input"], (Node, Tensor)):
        if fmt.cast(base).item():
            raise NoAnswer(f"the base {base:g} is no number of the format")
        return fmt.function(base ** (operands[0].most if base >= 1 else -operands[0].most) * _ROUNDED)
    if not isinstance(p, (Node, Tensor)) and p == 0.5:
        return root_rounding(node, operands, fmt)
    if isinstance(p, (Node, Tensor)) or not 1 <= p < math.inf or p != int(p):
        raise NoAnswer("the exponent is not a whole number ≥ 1")
    size = operands[0].most ** int(p)
    return fmt.rounded(size, int(p)) + fmt.function(size)


@rounding("sqrt")
def root_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """√x for x ≥ 0: an error of 4 ulp, and that of an x below the normal range that is taken for 0.

    Where x̂ may be negative, there is no bound.
    """
    x = operands[0]
    least = x.nominal - x.over(x.rho)
    tiny = torch.finfo(fmt.dtype).smallest_normal
    flushed = torch.where((least < tiny) & (x.most > 0), math.sqrt(tiny), 0.0)
    return torch.where(least >= 0, fmt.function(x.most.sqrt()) + flushed, math.inf)


def _exponential(call: Call, base: Any, x: Value) -> Value:
    """bˣ for a number b > 0: with B = max(b, 1/b) at most B^max|x|, and the slope is |ln b| bˣ."""
    if not isinstance(base, (int, float)) or not 0 < base < math.inf:
        raise NoAnswer("the base must be one positive number")
    largest = _power(Upper(base) if base >= 1 else Upper(1) / base, float(x.magnitude))
    return Value(call.shape, x.lip * largest * (abs(math.log(base)) * _ROUNDED), magnitude=largest, floor=0.0)


tag(Tag.MONOTONE, "exp")


@rounding("exp")
def exp_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """A library function, in constants that a network computes: it has no Lipschitz constant on all numbers."""
    x = operands[0]
    return fmt.function((x.nominal + x.over(x.rho)).exp() * _ROUNDED)


def _of_root(energy: Origin) -> Upper:
    """The constant of √(‖x‖²/n + eps), the length of the vector (x/√n, √eps): 1/√n times that of x."""
    return energy.source.lip * (Upper(1) / energy.count).sqrt()


@rule("sqrt", tags=Tag.MONOTONE | Tag.SINGULAR)
def square_root(call: Call, x: Value) -> Value:
    """The slope is 1/(2√x) for x > 0. If x is a mean of squares, its root is a length: see ``_of_root``."""
    if not x.lowest >= 0:
        raise NoAnswer("the root of a value that may be negative")
    energy = x.origin if x.origin is not None and x.origin.kind == "energy" else None
    candidates = [_of_root(energy)] if energy is not None else []
    if x.lowest > 0:
        candidates.append(x.lip * (Upper(1) / rounded_down(x.lowest).item()).sqrt() / 2)
    if not candidates:
        return Value(call.shape, INFINITE, unbounded="its slope is unbounded near 0")
    floor = _below(math.sqrt(x.lowest))
    result = Value(call.shape, min(candidates), magnitude=x.magnitude.sqrt(), floor=floor)
    result.origin = _as_root(energy, "root")
    return result


@rule("rsqrt", tags=Tag.MONOTONE | Tag.SINGULAR)
def inverse_root(call: Call, x: Value) -> Value:
    """1/√x for x ≥ m > 0: slope at most 1/(2 m √m). If √x has constant K, also K/m: |1/a − 1/b| = |a − b|/(ab)."""
    if not x.lowest > 0:
        return Value(call.shape, INFINITE, unbounded="its slope is unbounded near 0")
    least = rounded_down(x.lowest).item()
    inverse = (Upper(1) / least).sqrt()
    lip = x.lip * inverse / least / 2
    energy = x.origin if x.origin is not None and x.origin.kind == "energy" else None
    if energy is not None:
        lip = min(lip, _of_root(energy) / least)
    result = Value(call.shape, lip, magnitude=inverse, floor=0.0)
    result.origin = _as_root(energy, "inverse")
    return result


def _as_root(energy: Origin | None, kind: str) -> Origin | None:
    if energy is None:
        return None
    return Origin(kind, energy.source, energy.dims, energy.count, energy.eps, energy.centred)


@remainder("pow", "sqrt", "rsqrt")
class Power(Smooth):
    """The second derivative p(p − 1)xᵖ⁻² is largest on |x − z| ≤ ρ at |z| + ρ if p ≥ 2, and at z − ρ > 0 if p < 2.

    If p is not whole, xᵖ is no number for x < 0, so there is no bound unless z − ρ > 0.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(node, operands, result)
        if node.op == "pow":
            exponent = arguments(node).get("exponent")
            single = not isinstance(exponent, Tensor) or exponent.numel() == 1
            if len(node.operands) != 1 or not isinstance(node.args[0], Node) or exponent is None or not single:
                raise NoAnswer("the exponent must be one number")
            if node.shape != node.operands[0].shape:
                raise NoAnswer("an operand that is repeated")
            self.exponent = float(exponent)
        else:
            self.exponent = {"sqrt": 0.5, "rsqrt": -0.5}[str(node.op)]

    def second(self, reach: Tensor) -> Tensor:
        p = self.exponent
        if p in (0, 1):
            return torch.zeros_like(self.z)
        nearest = self.z - reach
        furthest = self.z.abs() + reach if p >= 2 else nearest.clamp_min(0)
        bound = abs(p * (p - 1)) * furthest ** (p - 2)
        return bound if p == int(p) else torch.where(nearest > 0, bound, math.inf)

    def against(self, direction: Tensor) -> Against:
        weight = per_image(direction).abs()
        return lambda rho: worst(self._local(rho), weight) / 2 * rho[0] ** 2


@rounding("rsqrt")
def inverse_root_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """1/√x for x in the normal range: an error of 4 ulp, and torch rounds the root to the format first."""
    x = operands[0]
    low = x.nominal - x.over(x.rho)
    normal = low >= torch.finfo(fmt.dtype).smallest_normal
    size = low.clamp_min(fmt.smallest).rsqrt()
    return torch.where(normal, fmt.function(size) + fmt.rounded(size, 2), math.inf)
