"""Functions applied entry by entry: one line each in the table below.

An entrywise φ with |φ'| ≤ L has constant L in ℓ2, since the Jacobian is diagonal. The constants are suprema of |φ'|
rounded up; the tests check them against the derivatives in 50 digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert._upper import INFINITE, Upper
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import Origin, Value, largest


@dataclass(frozen=True)
class Activation:
    """What a rule needs to know of φ.

    Attributes:
        lipschitz: sup |φ'|, rounded up.
        largest: sup |φ|, inf where there is none.
        shrinks: |φ(x)| ≤ |x| for every x.
        floor: inf φ where that is 0, else -inf.
    """

    lipschitz: float
    largest: float = float("inf")
    shrinks: bool = True
    floor: float = -math.inf


_larger, _smaller = max, min  # where arguments of a rule have these names

ACTIVATIONS: dict[Any, Activation] = {
    F.relu: Activation(1.0, floor=0.0),
    F.relu6: Activation(1.0, largest=6.0, floor=0.0),
    F.silu: Activation(1.099840),
    F.mish: Activation(1.088500),
    F.sigmoid: Activation(0.25, largest=1.0, shrinks=False, floor=0.0),
    F.tanh: Activation(1.0, largest=1.0),
    F.hardsigmoid: Activation(0.16666666666666669, largest=1.0, shrinks=False, floor=0.0),
    F.hardswish: Activation(1.5),
    F.softsign: Activation(1.0, largest=1.0),
    F.logsigmoid: Activation(1.0, shrinks=False),
    "abs": Activation(1.0, floor=0.0),
    "neg": Activation(1.0),
}


def _apply(x: Value, phi: Activation) -> Value:
    lip = x.lip * phi.lipschitz
    result = x.bounded(lip, phi.largest) if phi.shrinks else Value(x.shape, lip, magnitude=phi.largest)
    result.floor = torch.tensor(phi.floor, dtype=torch.float64)
    return result


for _function, _phi in ACTIVATIONS.items():

    @rule(_function, linear=True if _function == "neg" else None)
    def entrywise(call: Call, x: Value, *args: object, _phi: Activation = _phi, **kwargs: object) -> Value:
        """sup |φ'| of the table."""
        return _apply(x, _phi)


@rule(F.sigmoid)
def sigmoid(call: Call, x: Value) -> Value:
    """sup |φ'| of the table; a quotient by its sum has a constant of its own."""
    result = _apply(x, ACTIVATIONS[F.sigmoid])
    result.origin = Origin("sigmoid", x)
    return result


@rule(F.gelu)
def gelu(call: Call, x: Value, approximate: str = "none") -> Value:
    """sup |φ'| is 1.1289042 for x Φ(x) and 1.1289929 for its tanh form; |φ(x)| ≤ |x|."""
    return _apply(x, Activation(1.128905 if approximate == "none" else 1.128994))


@rule(F.leaky_relu)
def leaky_relu(call: Call, x: Value, negative_slope: float = 0.01, inplace: bool = False) -> Value:
    """Slopes 1 and ``negative_slope``."""
    slope = max(1.0, abs(negative_slope))
    return Value(x.shape, x.lip * slope, magnitude=x.magnitude * slope)


@rule(F.elu)
def elu(call: Call, x: Value, alpha: float = 1.0, inplace: bool = False) -> Value:
    """Slopes 1 for x > 0 and α eˣ ≤ α for x < 0; |φ(x)| ≤ max(1, α) |x|."""
    slope = max(1.0, abs(alpha))
    return Value(x.shape, x.lip * slope, magnitude=x.magnitude * slope)


@rule(F.softplus)
def softplus(call: Call, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """The slope is a sigmoid; 0 ≤ φ(x) ≤ |x| + log 2 / β.

    Where βx passes torch's threshold t, its function jumps by log(1 + e⁻ᵗ)/β, at most 2.1e-9 for t ≥ 20 and β ≥ 1
    which counts as rounding; larger jumps have no constant.
    """
    if threshold < 20 or beta < 1:
        return Value(x.shape, INFINITE, unbounded=f"torch's softplus jumps at its threshold {threshold:g}")
    return Value(x.shape, x.lip, magnitude=x.magnitude + Upper(0.6931471805599454) / beta, floor=0.0)


@rule(F.hardtanh)
def hardtanh(call: Call, x: Value, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Value:
    """Clipping to an interval is a projection: constant 1."""
    return Value(x.shape, x.lip, magnitude=max(abs(min_val), abs(max_val)), floor=min(min_val, max_val))


@rule("clamp")
def clamp(call: Call, x: Value, min: Any = None, max: Any = None) -> Value:
    """max(x, low) and min(x, high) have constant 1; where a limit is a tensor, its form must not make x repeat.

    A result that is a limit is nearer to 0 than x, unless the lower limit is above 0 or the upper one below it.
    """
    limits = [limit for limit in (min, max) if limit is not None]
    if any(isinstance(limit, Value) for limit in limits):
        raise NoAnswer("the limits depend on the image")
    if call.shape != x.shape:
        raise NoAnswer("limits of a larger shape than the value")
    low, high = (None if limit is None else torch.as_tensor(limit, dtype=torch.float64) for limit in (min, max))
    above = largest(low.clamp(min=0)) if low is not None else Upper(0)
    below = largest(high.clamp(max=0)) if high is not None else Upper(0)
    size = _larger(x.magnitude, above, below)
    if low is not None and high is not None:
        size = _smaller(size, _larger(largest(low), largest(high)))
    return Value(x.shape, x.lip, magnitude=size, floor=_smallest_of_clamped(x, low, high))


def _smallest_of_clamped(x: Value, low: Tensor | None, high: Tensor | None) -> float:
    """min(max(x, low), high) ≥ min(max(inf x, inf low), inf high)."""
    bottom = x.lowest if low is None else _larger(x.lowest, low.min().item())
    return bottom if high is None else _smaller(bottom, high.min().item())
