"""Functions applied entry by entry: one line each in the table below.

An entrywise φ with |φ'| ≤ L has constant L in ℓ2, since the Jacobian is diagonal. The constants are suprema of |φ'|
rounded up; the tests check them against the derivatives in 50 digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from lipcert._upper import INFINITE, Upper
from lipcert.bounds._registry import Call, rule
from lipcert.bounds._value import Value


@dataclass(frozen=True)
class Activation:
    """What a rule needs to know of φ.

    Attributes:
        lipschitz: sup |φ'|, rounded up.
        largest: sup |φ|, inf where there is none.
        shrinks: |φ(x)| ≤ |x| for every x.
    """

    lipschitz: float
    largest: float = float("inf")
    shrinks: bool = True


ACTIVATIONS: dict[Any, Activation] = {
    F.relu: Activation(1.0),
    F.relu6: Activation(1.0, largest=6.0),
    F.silu: Activation(1.099840),
    F.mish: Activation(1.088500),
    F.sigmoid: Activation(0.25, largest=1.0, shrinks=False),
    F.tanh: Activation(1.0, largest=1.0),
    F.hardsigmoid: Activation(0.16666666666666669, largest=1.0, shrinks=False),
    F.hardswish: Activation(1.5),
    F.softsign: Activation(1.0, largest=1.0),
    F.logsigmoid: Activation(1.0, shrinks=False),
    "abs": Activation(1.0),
    "neg": Activation(1.0),
}


def _apply(x: Value, phi: Activation) -> Value:
    lip = x.lip * phi.lipschitz
    if phi.shrinks:
        return x.bounded(lip, phi.largest)
    return Value(x.shape, lip, magnitude=phi.largest)


for _function, _phi in ACTIVATIONS.items():

    @rule(_function)
    def entrywise(call: Call, x: Value, *args: Any, _phi: Activation = _phi, **kwargs: Any) -> Value:
        """sup |φ'| of the table."""
        return _apply(x, _phi)


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
def elu(call: Call, x: Value, alpha: float = 1.0, *args: Any, **kwargs: Any) -> Value:
    """Slopes 1 for x > 0 and α eˣ ≤ α for x < 0; |φ(x)| ≤ max(1, α) |x|."""
    slope = max(1.0, abs(alpha))
    return Value(x.shape, x.lip * slope, magnitude=x.magnitude * slope)


@rule(F.softplus)
def softplus(call: Call, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """The slope is a sigmoid; 0 ≤ φ(x) ≤ |x| + log 2 / β. At torch's threshold the function jumps by less than 1e-8."""
    if threshold < 20:
        return Value(x.shape, INFINITE)
    return Value(x.shape, x.lip, magnitude=x.magnitude + Upper(0.6931471805599454) / beta)


@rule(F.hardtanh, "clamp")
def hardtanh(call: Call, x: Value, min_val: Any = None, max_val: Any = None, *args: Any, **kwargs: Any) -> Value:
    """Clipping to an interval is a projection: constant 1."""
    low = kwargs.get("min", min_val)
    high = kwargs.get("max", max_val)
    if low is None and high is None:  # hardtanh(x); clamp always names a limit
        low, high = -1.0, 1.0
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return Value(x.shape, x.lip, magnitude=max(abs(low), abs(high)))
    return Value(x.shape, x.lip)
