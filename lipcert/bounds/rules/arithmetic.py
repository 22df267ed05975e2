"""Sums, products, quotients, powers and means."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lipcert._upper import INFINITE, Number, Upper
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import COMPOSED, Dense, Scale, Value, largest
from lipcert.bounds.rules.linear import dense


def _copies(call: Call, x: Value) -> Upper:
    """√m for broadcasting, which uses every entry m times."""
    return Upper(math.prod(call.shape) // max(1, math.prod(x.shape))).sqrt()


def _size(constant: Any) -> Upper:
    return largest(torch.as_tensor(constant, dtype=torch.float64))


def _broadcast(constant: Any, x: Value) -> Tensor:
    """The constant as float64 with as many dimensions as x."""
    tensor = torch.as_tensor(constant, dtype=torch.float64).detach()
    return tensor.reshape((1,) * (len(x.shape) - tensor.dim()) + tuple(tensor.shape))


@rule("add")
def add(call: Call, x: Any, y: Any, *, alpha: float = 1) -> Value:
    """‖δ(x + αy)‖ ≤ ‖δx‖ + |α|‖δy‖; x + Wx is folded into (I + W)x."""
    if isinstance(x, Value) and isinstance(y, Value):
        return _sum(call, x, y, alpha)
    if not isinstance(x, Value):
        return _shifted(call, _times(call, y, alpha) if alpha != 1 else y, x)
    return _shifted(call, x, y, alpha)


@rule("sub")
def sub(call: Call, x: Any, y: Any, *, alpha: float = 1) -> Value:
    """‖δ(x − αy)‖ ≤ ‖δx‖ + |α|‖δy‖."""
    if isinstance(x, Value) and isinstance(y, Value):
        return _sum(call, x, y, -alpha)
    if not isinstance(x, Value):
        return _shifted(call, _times(call, y, -alpha), x)
    return _shifted(call, x, y, alpha)


@rule("rsub")
def rsub(call: Call, x: Value, y: Any, *, alpha: float = 1) -> Value:
    """y − αx."""
    return sub(call, y, x, alpha=alpha)


def _sum(call: Call, x: Value, y: Value, alpha: float) -> Value:
    magnitude = x.magnitude + y.magnitude * abs(alpha)
    if x.shape == y.shape and alpha == 1:
        for straight, branch in ((x, y), (y, x)):
            if (
                branch.base is straight
                and branch.map is not None
                and (folded := branch.map.plus_identity()) is not None
            ):
                return Value(call.shape, magnitude=magnitude, base=straight, map=folded)
    rows = None
    if x.shape == y.shape and (x.rows is not None or y.rows is not None):
        axis = (x.rows or y.rows)[0]  # type: ignore[index]
        rows = (axis, x.row_norm(axis) + y.row_norm(axis) * abs(alpha))
    lip = x.lip * _copies(call, x) + y.lip * _copies(call, y) * abs(alpha)
    return Value(call.shape, lip, magnitude=magnitude, rows=rows)


def _shifted(call: Call, x: Value, constant: Any, alpha: float = 1) -> Value:
    """x ± α · constant. The map of a value that is not broadcast stays; only its offset changes, and is forgotten."""
    magnitude = x.magnitude + _size(constant) * abs(alpha)
    rows = None
    if x.rows is not None and x.rows[0] == len(x.shape) - 1 and isinstance(constant, Tensor) and constant.dim():
        own = Value.constant(constant)
        if own.shape[-1] == x.shape[-1] == call.shape[-1]:
            rows = (-1, x.rows[1] + own.row_norm(-1) * abs(alpha))
    if call.shape != x.shape:
        return Value(call.shape, x.lip * _copies(call, x), magnitude=magnitude, rows=rows)
    if x.base is not None:
        return Value(call.shape, magnitude=magnitude, rows=rows, base=x.base, map=x.map)
    return Value(call.shape, x.lip, magnitude=magnitude, rows=rows)


@rule("mul")
def mul(call: Call, x: Any, y: Any) -> Value:
    """By a constant: linear. Two values (a gate): δ(xy) = y δx + x δy, so ‖δ(xy)‖ ≤ max|y| ‖δx‖ + max|x| ‖δy‖.

    For finite differences δ(xy) = y' δx + x δy with y' the perturbed y, which lies in the same range.
    """
    if isinstance(x, Value) and isinstance(y, Value):
        lip = y.magnitude * x.lip * _copies(call, x) + x.magnitude * y.lip * _copies(call, y)
        rows = None
        for one, other in ((x, y), (y, x)):
            if one.rows is not None and one.shape == call.shape:
                rows = (one.rows[0], one.rows[1] * other.magnitude)
        return Value(call.shape, lip, magnitude=x.magnitude * y.magnitude, rows=rows)
    return _times(call, x, y) if isinstance(x, Value) else _times(call, y, x)


def _times(call: Call, x: Value, constant: Any) -> Value:
    """x · constant, kept as a map where it can be."""
    size = _size(constant) * COMPOSED
    magnitude = x.magnitude * size
    rows = (x.rows[0], x.rows[1] * size) if x.rows is not None and call.shape == x.shape else None
    if call.shape != x.shape:
        return Value(call.shape, x.lip * size * _copies(call, x), magnitude=magnitude)
    scale = _broadcast(constant, x)
    if x.base is not None and x.map is not None and (folded := x.map.scaled(scale)) is not None:
        return Value(call.shape, magnitude=magnitude, rows=rows, base=x.base, map=folded)
    if scale.numel() == 1:
        return Value(call.shape, x.lip * size, magnitude=magnitude, rows=rows)
    return Value(call.shape, magnitude=magnitude, rows=rows, base=x, map=Scale(scale))


@rule("div")
def div(call: Call, x: Any, y: Any, *, rounding_mode: str | None = None) -> Value:
    """By a constant: a multiplication. By a value, which nothing keeps away from zero: no finite constant."""
    if rounding_mode is not None:
        raise NoAnswer("rounding is not continuous")
    if isinstance(y, Value):
        return Value(call.shape, INFINITE)
    inverse = 1.0 / torch.as_tensor(y, dtype=torch.float64).detach()
    if not torch.isfinite(inverse).all():
        raise NoAnswer("division by zero")
    return _times(call, x, inverse)


@rule("pow")
def power(call: Call, x: Any, exponent: Any) -> Value:
    """|d xᵖ| = p |x|^(p−1) for whole p ≥ 1, bounded where x is."""
    if (
        not isinstance(x, Value)
        or isinstance(exponent, Value)
        or isinstance(exponent, Tensor)
        and exponent.numel() != 1
    ):
        raise NoAnswer("the exponent must be one number")
    p = float(exponent)
    if not (math.isfinite(p) and p == int(p) and p >= 1):
        raise NoAnswer(f"exponent {p:g}")
    factor = x.magnitude ** (int(p) - 1) * int(p)
    return Value(call.shape, x.lip * factor * _copies(call, x), magnitude=x.magnitude ** int(p))


@rule("square")
def square(call: Call, x: Value) -> Value:
    """|d x²| = 2|x|."""
    return power(call, x, 2)


def _reduction(mean: bool) -> Any:
    def answer(call: Call, x: Value, *args: object, **kwargs: object) -> Value:
        """A sum of n entries has norm √n, a mean √n / n; different results share no entry."""
        count = math.prod(x.shape) // max(1, math.prod(call.shape))
        root = Upper(count).sqrt()
        factor: Number = root / count if mean else root
        same_last = (
            x.rows is not None and x.rows[0] == len(x.shape) - 1 and bool(call.shape) and call.shape[-1] == x.shape[-1]
        )
        rows = None
        if same_last and x.rows is not None and x.shape[-1] > 1:
            rows = (-1, x.rows[1] * (1 if mean else count))
        return Value(call.shape, x.lip * factor, magnitude=x.magnitude * (1 if mean else count), rows=rows)

    return answer


rule("mean")(_reduction(mean=True))
rule("sum")(_reduction(mean=False))


@rule("matmul")
def matmul(call: Call, x: Any, y: Any) -> Value:
    """δ(XY) = δX Y + X' δY, so ‖δ(XY)‖_F ≤ ‖δX‖_F ‖Y‖₂ + ‖X‖₂ ‖δY‖_F.

    Where X = softmax(A), a row of the first term is Σ_j P_ij (δA_ij − δĀ_i) v_j, the covariance under P of δA_i and v:
    at most std_P(δA_i) · max_j ‖v_j‖ ≤ √½ ‖δA_i‖ max_j ‖v_j‖, for diag(p) − ppᵀ ⪯ ½. With ‖δP‖ ≤ ½‖δA‖ as the
    constant of X, that is √2 max_j ‖v_j‖ times it, without the √n of ‖V‖₂.
    """
    if not isinstance(x, Value):
        return _matrix_times(call, x, y)
    if len(x.shape) < 2 or len(y.shape) < 2:
        raise NoAnswer("vectors")
    if not isinstance(y, Value):
        if y.dim() == 2:
            return dense(call, x, y.mT)
        return Value(call.shape, x.lip * Dense(y.reshape(-1, *y.shape[-2:])).norm * _copies_matmul(call, x))
    right = y.matrix_norm()
    if x.stochastic:
        right = min(right, y.row_norm(-1) * Upper(2).sqrt())
    lip = x.lip * right * _copies_matmul(call, x) + x.matrix_norm() * y.lip * _copies_matmul(call, y)
    entry = x.row_norm(-1) * y.row_norm(-2)
    if x.stochastic:
        return Value(call.shape, lip, magnitude=y.magnitude, rows=(-1, y.row_norm(-1)))
    return Value(call.shape, lip, magnitude=entry, rows=(-1, x.row_norm(-1) * y.matrix_norm()))


def _copies_matmul(call: Call, x: Value) -> Upper:
    return Upper(math.prod(call.shape[:-2]) // max(1, math.prod(x.shape[:-2]))).sqrt()


def _matrix_times(call: Call, weight: Tensor, y: Value) -> Value:
    """W Y for a constant W: every column is multiplied by W."""
    if weight.dim() < 2 or len(y.shape) < 2:
        raise NoAnswer("vectors")
    norm = Dense(weight.reshape(-1, *weight.shape[-2:])).norm
    return Value(call.shape, y.lip * norm * _copies_matmul(call, y), magnitude=y.row_norm(-2) * norm)
