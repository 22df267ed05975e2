"""Powers, roots and lengths: finite where the range of the value keeps their slope bounded."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lipcert._upper import INFINITE, Upper
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import Origin, Value, rounded_down
from lipcert.bounds.rules.arithmetic import _copies, kept, reduced

_ROUNDED = 1 + 2.0**-40  # a few operations in float64, powers included


@rule("pow")
def power(call: Call, x: Any, exponent: Any) -> Value:
    """|d xᵖ| = |p| |x|^(p−1): for p ≥ 1 largest where |x| is, for p < 1 where x is smallest, and only for x > 0."""
    if not isinstance(x, Value) or isinstance(exponent, Value):
        raise NoAnswer("the exponent must be one number")
    if isinstance(exponent, Tensor) and exponent.numel() != 1:
        raise NoAnswer("the exponent must be one number")
    p = float(exponent)
    if p == 2:
        return _with_copies(call, x, square(call, x))
    whole = p == int(p) if math.isfinite(p) else False
    if not math.isfinite(p) or p == 0 or (not whole and not x.lowest >= 0) or (p < 0 and x.lowest < 0):
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
    """At least baseᵖ for p ≥ 0: exact for whole p, else (max(base, 1))^⌈p⌉."""
    return base ** int(exponent) if exponent == int(exponent) else max(base, Upper(1)) ** math.ceil(exponent)


def _with_copies(call: Call, x: Value, result: Value) -> Value:
    """The result for an exponent that is a tensor of one entry and more dimensions than x."""
    if call.shape == x.shape:
        return result
    return Value(call.shape, result.lip * _copies(call, x), magnitude=result.magnitude, floor=0.0)


@rule("square")
def square(call: Call, x: Value) -> Value:
    """|d x²| = 2|x|; its root |x| has slope 1, which sums, means and roots behind it make use of."""
    result = Value(x.shape, x.lip * x.magnitude * 2, magnitude=x.magnitude * x.magnitude, floor=0.0)
    result.origin = Origin("square", x)
    return result


def _of_root(energy: Origin) -> Upper:
    """The constant of √(‖x‖²/n + eps), the length of the vector (x/√n, √eps): that of x by 1/√n."""
    return energy.source.lip * (Upper(1) / energy.count).sqrt()


@rule("sqrt")
def square_root(call: Call, x: Value) -> Value:
    """Slope 1/(2√x) for x > 0; where x is a mean of squares, its root is a length: see ``_of_root``."""
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
    result.origin = _through(energy, "root")
    return result


@rule("rsqrt")
def inverse_root(call: Call, x: Value) -> Value:
    """1/√x for x ≥ m > 0: slope at most 1/(2 m √m). Where √x has constant K, also K/m: |1/a − 1/b| = |a − b|/(ab)."""
    if not x.lowest > 0:
        return Value(call.shape, INFINITE, unbounded="its slope is unbounded near 0")
    least = rounded_down(x.lowest).item()
    inverse = (Upper(1) / least).sqrt()
    lip = x.lip * inverse / least / 2
    energy = x.origin if x.origin is not None and x.origin.kind == "energy" else None
    if energy is not None:
        lip = min(lip, _of_root(energy) / least)
    result = Value(call.shape, lip, magnitude=inverse, floor=0.0)
    result.origin = _through(energy, "inverse")
    return result


def _through(energy: Origin | None, kind: str) -> Origin | None:
    if energy is None:
        return None
    return Origin(kind, energy.source, energy.dims, energy.count, energy.eps, energy.centred)


@rule("var")
def variance(call: Call, x: Value, dim: Any = None, *args: Any, **kwargs: Any) -> Value:
    """‖x − μ‖²/d of each group of n entries, d = n or n − 1: at most n/d max|x|², slope at most 2‖x − μ‖/d."""
    if isinstance(dim, bool):
        raise NoAnswer("arguments in an old form")
    dims = reduced(x, dim)
    given = dict(zip(("unbiased", "keepdim"), args, strict=False)) | kwargs
    size = math.prod(x.shape[d] for d in dims)
    correction = given.get("correction", 1 if given.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    divisor = size - int(correction)
    if divisor < 1 or correction != int(correction):
        raise NoAnswer(f"the variance of {size} entries with correction {correction:g}")
    length = Upper(size).sqrt() * x.magnitude
    result = Value(call.shape, x.lip * length * 2 / divisor, magnitude=length * length / divisor, floor=0.0)
    if call.shape == kept(x, dims):
        result.origin = Origin("energy", x, dims, divisor, centred=True)
    return result


@rule("norm", "linalg_vector_norm")
def length(call: Call, x: Value, p: Any = "fro", dim: Any = None, *args: Any, **kwargs: Any) -> Value:
    """ℓ2 norms: |‖a‖ − ‖b‖| ≤ ‖a − b‖, and groups share no entry."""
    p = kwargs.get("ord", p)
    if p not in ("fro", 2, None):
        raise NoAnswer(f"p = {p}")
    dims = reduced(x, dim)
    size = math.prod(x.shape[d] for d in dims)
    largest = x.row_norm(dims[0]) if len(dims) == 1 else Upper(size).sqrt() * x.magnitude
    return Value(call.shape, x.lip, magnitude=largest, floor=0.0)
