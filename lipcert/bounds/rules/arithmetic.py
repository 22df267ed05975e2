"""Sums, products, quotients and means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipcert._estimate import held
from lipcert._upper import INFINITE, Number, Upper
from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import Call, NoAnswer, in_one_operand, rule
from lipcert.bounds._value import COMPOSED, Dense, Origin, Scale, Value, largest, rounded_down
from lipcert.bounds.rules.linear import dense
from lipcert.graph import Node


def _copies(call: Call, x: Value) -> Upper:
    """√m for broadcasting, which uses every entry m times."""
    return Upper(math.prod(call.shape) // max(1, math.prod(x.shape))).sqrt()


def _size(constant: Any) -> Upper:
    return largest(torch.as_tensor(constant, dtype=torch.float64))


def _broadcast(constant: Any, x: Value) -> Tensor:
    """The constant as float64 with as many dimensions as x."""
    tensor = held(torch.as_tensor(constant, dtype=torch.float64))
    return tensor.reshape((1,) * (len(x.shape) - tensor.dim()) + tuple(tensor.shape))


@rule("add", linear=True)
def add(call: Call, x: Any, y: Any, *, alpha: float = 1) -> Value:
    """‖δ(x + αy)‖ ≤ ‖δx‖ + |α|‖δy‖; x + Wx is folded into (I + W)x."""
    if isinstance(x, Value) and isinstance(y, Value):
        result = _sum(call, x, y, alpha)
    elif isinstance(x, Value):
        result = _shifted(call, x, y, alpha)
        result.origin = _with_eps(x.origin, y, alpha)
    else:
        result = _shifted(call, _times(call, y, alpha) if alpha != 1 else y, x)
        result.origin = _with_eps(y.origin, x, 1) if alpha == 1 else None
    result.floor = _floor_of_sum(x, y, alpha)
    result.mass = _mass(x, 1) + _mass(y, alpha) if _same_rows(call, x, y) else -math.inf
    return result


@rule("sub", linear=True)
def sub(call: Call, x: Any, y: Any, *, alpha: float = 1) -> Value:
    """‖δ(x − αy)‖ ≤ ‖δx‖ + |α|‖δy‖; x minus its own mean is an orthogonal projection of x."""
    if isinstance(x, Value) and isinstance(y, Value):
        result = _sum(call, x, y, -alpha)
        mean = y.origin
        if mean is not None and mean.kind == "mean" and mean.source is x and not mean.eps and alpha == 1:
            result = Value(call.shape, x.lip, magnitude=result.magnitude)
            result.origin = Origin("centred", x, mean.dims)
    elif isinstance(x, Value):
        result = _shifted(call, x, y, alpha)
    else:
        result = _shifted(call, _times(call, y, -alpha), x)
    result.floor = _floor_of_sum(x, y, -alpha)
    return result


def _floor_of_sum(x: Any, y: Any, alpha: float) -> Tensor:
    """Lower bounds on x + αy, by place on the last axis; -inf where one of them may fall without limit."""
    total = _floor(x, 1.0) + _floor(y, alpha)
    smallest = total.nan_to_num(nan=-math.inf, posinf=-math.inf)
    # The sum of two numbers of opposite sign may cancel, which leaves their roundings.
    slack = (_floor(x, 1.0).abs() + _floor(y, alpha).abs()) * 2.0**-45
    return torch.where(smallest.isfinite(), smallest - slack, smallest)


def _floor(x: Any, factor: float) -> Tensor:
    """Lower bound on factor·x, one number or one for each place on the last axis."""
    if isinstance(x, Value):
        if factor > 0:
            return x.floor * factor
        return torch.tensor(-float(x.magnitude * abs(factor)), dtype=torch.float64)
    scaled = torch.as_tensor(x, dtype=torch.float64).detach() * factor
    return (scaled if scaled.dim() == 0 or not scaled.numel() else scaled.reshape(-1, scaled.shape[-1]).amin(0)).cpu()


def _same_rows(call: Call, *operands: Any) -> bool:
    """Whether all operands have rows as long as the result's, so that sums along the last axis add up."""
    forms = [x.shape for x in operands if isinstance(x, (Value, Tensor))]
    return len(forms) == len(operands) and all(form and form[-1] == call.shape[-1] for form in forms)


def _mass(x: Any, factor: float) -> float:
    """Lower bound on the sums of factor·x along the last axis."""
    if not isinstance(x, Value):
        sums = (x.detach().double() * factor).sum(-1)
        size = (x.detach().double() * factor).abs().sum(-1)
        return float((sums - size * (x.shape[-1] * 2.0**-50)).min())
    if not factor >= 0:
        return -math.inf
    return rounded_down(max(x.mass, x.lowest * x.shape[-1]) * factor).item() if factor else 0.0


def _with_eps(origin: Origin | None, constant: Any, alpha: float) -> Origin | None:
    """The origin of an energy or a mean after a number was added."""
    if origin is None or origin.kind not in ("energy", "mean") or origin.eps or alpha != 1:
        return None
    if not isinstance(constant, (int, float)) or not constant >= 0:
        return None
    return replace(origin, eps=float(constant))


@rule("rsub", linear=True)
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


@rule("mul", linear=in_one_operand)
def mul(call: Call, x: Any, y: Any) -> Value:
    """By a constant: linear. Two values (a gate): δ(xy) = y δx + x δy, so ‖δ(xy)‖ ≤ max|y| ‖δx‖ + max|x| ‖δy‖.

    For finite differences δ(xy) = y' δx + x δy with y' the perturbed y, which lies in the same range.
    """
    if isinstance(x, Value) and isinstance(y, Value):
        for one, other in ((x, y), (y, x)):
            if (normalised := standardised(call, one, other, "inverse")) is not None:
                return normalised
        lip = y.magnitude * x.lip * _copies(call, x) + x.magnitude * y.lip * _copies(call, y)
        rows = None
        for one, other in ((x, y), (y, x)):
            if one.rows is not None and one.shape == call.shape:
                rows = (one.rows[0], one.rows[1] * other.magnitude)
        result = Value(call.shape, lip, magnitude=x.magnitude * y.magnitude, rows=rows)
        if x is y:
            result.origin = Origin("square", x)
            result.floor = torch.zeros((), dtype=torch.float64)
        elif x.lowest >= 0 and y.lowest >= 0:
            result.floor = rounded_down(x.lowest * y.lowest)
        return result
    value, constant = (x, y) if isinstance(x, Value) else (y, x)
    result = _times(call, value, constant)
    smallest = torch.as_tensor(constant, dtype=torch.float64).min().item()
    if smallest >= 0:
        result.floor = torch.where(value.floor >= 0, rounded_down(value.floor * smallest), -math.inf)
        if value.lowest >= 0 and value.shape[-1:] == call.shape[-1:] and value.mass > 0:
            result.mass = rounded_down(value.mass * smallest).item()
    return result


def standardised(call: Call, x: Value, y: Value, kind: str) -> Value | None:
    """x/√(‖x‖²/n + eps), where y is that root or its inverse, for x itself or x minus its mean; None for anything else.

    With s the root and x̂ = x/s the Jacobian is (1/s)(C − x̂x̂ᵀ/n), C the projection that centres or the identity, and
    ‖x̂‖² ≤ n: symmetric and between 0 and C/s, so its norm is at most 1/s ≤ 1/√eps. Groups share no entry.
    """
    energy = y.origin
    if energy is None or energy.kind != kind or not energy.eps > 0 or call.shape != x.shape:
        return None
    centred = x.origin is not None and x.origin.kind == "centred" and x.origin.dims == energy.dims
    source = x.origin.source if centred and energy.centred and x.origin is not None else x
    if energy.source is not source or (energy.centred and source is x):
        return None
    root = Upper(energy.count).sqrt()
    rows = (energy.dims[0], root) if len(energy.dims) == 1 else None
    return Value(call.shape, source.lip * (Upper(1) / energy.eps).sqrt(), magnitude=root, rows=rows)


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


def _constant_denominator(node: Node) -> bool:
    given = arguments(node)
    if given.get("rounding_mode"):
        raise NoAnswer("rounds")
    return len(node.operands) == 1 and isinstance(given["input"], Node)


@rule("div", linear=_constant_denominator)
def div(call: Call, x: Any, y: Any, *, rounding_mode: str | None = None) -> Value:
    """By a constant: a multiplication. By a value ≥ m > 0: δ(x/y) = δx/y' − x δy/(y y'), with y' the perturbed y.

    So ‖δ(x/y)‖ ≤ ‖δx‖/m + max|x| ‖δy‖/m².
    """
    if rounding_mode is not None:
        raise NoAnswer("rounding is not continuous")
    if not isinstance(y, Value):
        inverse = 1.0 / held(torch.as_tensor(y, dtype=torch.float64))
        if not torch.isfinite(inverse).all():
            raise NoAnswer("division by zero")
        return mul(call, x, inverse)
    if not isinstance(x, Value):
        x = Value.constant(torch.as_tensor(x, dtype=torch.float64))
    for quotient in (standardised(call, x, y, "root"), _over_mean(call, x, y), _over_total(call, x, y)):
        if quotient is not None:
            return quotient
    least = y.lowest
    if not least > 0:
        return Value(call.shape, INFINITE, unbounded="it divides by a value that may come arbitrarily close to 0")
    lip = x.lip * _copies(call, x) / least + x.magnitude * y.lip * _copies(call, y) / least / least
    rows = (x.rows[0], x.rows[1] / least) if x.rows is not None and x.shape == call.shape else None
    result = Value(call.shape, lip, magnitude=x.magnitude / least, rows=rows)
    result.floor = torch.tensor(0.0 if x.lowest >= 0 else -math.inf, dtype=torch.float64)
    return result


def _over_mean(call: Call, x: Value, y: Value) -> Value | None:
    """x/(mean x + eps) for entries x ≥ 0, where y is that denominator; None for anything else.

    With n entries in a group, S their sum and t = S + n·eps the result is f = n x/t, with Jacobian (n/t)(I − x 1ᵀ/t).
    As ‖x‖ ≤ S ≤ t, its norm is at most (n/t)(1 + √n) ≤ (1 + √n)/eps; and 0 ≤ f ≤ n.
    """
    mean = y.origin
    if mean is None or mean.kind != "mean" or mean.source is not x or not mean.eps > 0:
        return None
    if not x.lowest >= 0 or call.shape != x.shape:
        return None
    lip = x.lip * (Upper(mean.count).sqrt() + 1) / mean.eps
    return Value(call.shape, lip, magnitude=mean.count, floor=0.0)


def _over_total(call: Call, x: Value, y: Value) -> Value | None:
    """σ(z)/Σσ(z) over groups, σ the sigmoid and y that sum; None for anything else.

    As σ' = σ(1 − σ), with q the result its Jacobian is (diag(q) − qqᵀ)·diag(1 − σ(z)); the first factor is that of a
    softmax with the result q, of norm at most ½, and the second has norm at most 1.
    """
    total, sigmoid = y.origin, x.origin
    if total is None or sigmoid is None or total.kind != "total" or total.source is not x or call.shape != x.shape:
        return None
    return Value(call.shape, sigmoid.source.lip / 2, magnitude=1, floor=0.0)


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
        result = Value(call.shape, x.lip * factor, magnitude=x.magnitude * (1 if mean else count), rows=rows)
        dims = reduced(x, *args, **kwargs)
        least = x.lowest * (1 if mean else count)
        if not mean and dims == (len(x.shape) - 1,):
            least = max(least, x.mass)
        result.floor = rounded_down(least)
        if call.shape == kept(x, dims):
            kind = x.origin.kind if x.origin is not None else ""
            if kind == "square" and x.origin is not None:
                result.origin = Origin("energy", x.origin.source, dims, count if mean else 1)
            elif mean:
                result.origin = Origin("mean", x, dims, count)
            elif kind == "sigmoid":
                result.origin = Origin("total", x, dims)
        return result

    return answer


def reduced(x: Value, dim: Any = None, *args: object, **kwargs: object) -> tuple[int, ...]:
    """The dimensions over which an operation reduces."""
    dims: Sequence[int] = range(len(x.shape)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(sorted(d % len(x.shape) for d in dims)) or tuple(range(len(x.shape)))


def kept(x: Value, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The shape after a reduction that keeps the dimensions with size 1."""
    return tuple(1 if d in dims else size for d, size in enumerate(x.shape))


rule("mean", linear=True)(_reduction(mean=True))
rule("sum", linear=True)(_reduction(mean=False))


@rule("addcmul", linear=in_one_operand)
def addcmul(call: Call, x: Any, first: Any, second: Any, *, value: float = 1) -> Value:
    """x + value · first · second."""
    shapes = [tuple(t.shape) if isinstance(t, (Value, Tensor)) else () for t in (first, second)]
    inner = Call(tuple(torch.broadcast_shapes(*shapes)), call.path)
    if isinstance(first, Value) or isinstance(second, Value):
        return add(call, x, mul(inner, first, second), alpha=value)
    return add(call, x, torch.as_tensor(first) * second, alpha=value)


@rule("matmul", linear=in_one_operand)
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
        return Value(call.shape, lip, magnitude=y.magnitude, rows=(-1, y.row_norm(-1)), floor=y.lowest)
    result = Value(call.shape, lip, magnitude=entry, rows=(-1, x.row_norm(-1) * y.matrix_norm()))
    if x.lowest >= 0:  # a column of the product is made of one column of y
        result.floor = torch.where(y.floor >= 0, 0.0, -math.inf).double()
    return result


def _copies_matmul(call: Call, x: Value) -> Upper:
    return Upper(math.prod(call.shape[:-2]) // max(1, math.prod(x.shape[:-2]))).sqrt()


def _matrix_times(call: Call, weight: Tensor, y: Value) -> Value:
    """W Y for a constant W: every column is multiplied by W."""
    if weight.dim() < 2 or len(y.shape) < 2:
        raise NoAnswer("vectors")
    norm = Dense(weight.reshape(-1, *weight.shape[-2:])).norm
    return Value(call.shape, y.lip * norm * _copies_matmul(call, y), magnitude=y.row_norm(-2) * norm)
