"""Sums, products and quotients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._box import Propagation, State, scaled, unknown
from lipcert.bounds._jacobian import Bounds, bilinear, copies, evenly
from lipcert.bounds._registry import (
    Call,
    NoAnswer,
    Schur,
    Tag,
    box,
    in_one_operand,
    in_two_operands,
    jacobian,
    rounding,
    rule,
)
from lipcert.bounds._remainder import Against, Bilinear, Remainder, per_image, remainder, worst
from lipcert.bounds._rounding import Operand, aligned, each_of, zeros
from lipcert.bounds._value import Origin, Scale, Value, largest, rounded_down
from lipcert.graph import Node
from lipcert.norms import COMPOSED
from lipcert.numerics import INFINITE, INFLATE, Format, Upper, at_most, detached

# Each entry of the result is a multiple of one entry of the operand, plus a constant: by a number, or by a constant.
_ENTRYWISE = Schur(terms=evenly(lambda node: 1))
_FACTORS = Schur(magnitudes=True, terms=evenly(lambda node: 1))


def _copies(call: Call, x: Value) -> Upper:
    """√m for broadcasting that uses every entry m times."""
    return Upper(math.prod(call.shape) // max(1, math.prod(x.shape))).sqrt()


def _size(constant: Any) -> Upper:
    return largest(torch.as_tensor(constant, dtype=torch.float64))


def _broadcast(constant: Any, x: Value) -> Tensor:
    """The constant as float64 with as many dimensions as x."""
    tensor = detached(torch.as_tensor(constant, dtype=torch.float64))
    return tensor.reshape((1,) * (len(x.shape) - tensor.dim()) + tuple(tensor.shape))


@rule("add", linear=True, schur=_ENTRYWISE, tags=Tag.ADDS | Tag.WHOLE)
def add(call: Call, x: Any, y: Any, *, alpha: float = 1) -> Value:
    """‖δ(x + αy)‖ ≤ ‖δx‖ + |α|‖δy‖; x + Wx becomes (I + W)x."""
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


@rule("sub", linear=True, schur=_ENTRYWISE, tags=Tag.SUBTRACTS | Tag.WHOLE)
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
    """Lower bounds on x + αy, by position on the last axis; -inf if one of the terms has no lower bound."""
    total = _floor(x, 1.0) + _floor(y, alpha)
    smallest = total.nan_to_num(nan=-math.inf, posinf=-math.inf)
    # Two numbers of opposite sign may cancel, so the rounding error is relative to their absolute values.
    slack = (_floor(x, 1.0).abs() + _floor(y, alpha).abs()) * 2.0**-45
    return torch.where(smallest.isfinite(), smallest - slack, smallest)


def _floor(x: Any, factor: float) -> Tensor:
    """A lower bound on factor·x: one number, or one for each position on the last axis."""
    if isinstance(x, Value):
        if factor > 0:
            return x.floor * factor
        return torch.tensor(-float(x.magnitude * abs(factor)), dtype=torch.float64)
    scaled = torch.as_tensor(x, dtype=torch.float64).detach() * factor
    return (scaled if scaled.dim() == 0 or not scaled.numel() else scaled.reshape(-1, scaled.shape[-1]).amin(0)).cpu()


def _same_rows(call: Call, *operands: Any) -> bool:
    """Whether the last axis of all operands is as long as that of the result, so that sums along it can be added."""
    forms = [x.shape for x in operands if isinstance(x, (Value, Tensor))]
    return len(forms) == len(operands) and all(form and form[-1] == call.shape[-1] for form in forms)


def _mass(x: Any, factor: float) -> float:
    """A lower bound on the sums of factor·x along the last axis."""
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


def _sum(call: Call, x: Value, y: Value, alpha: float) -> Value:
    magnitude = x.magnitude + y.magnitude * abs(alpha)
    if x.shape == y.shape and alpha == 1:
        for straight, branch in ((x, y), (y, x)):
            folded = branch.map.plus_identity() if branch.map is not None and branch.base is straight else None
            if folded is not None:
                return Value(call.shape, magnitude=magnitude, base=straight, map=folded)
    rows = None
    if x.shape == y.shape and (x.rows is not None or y.rows is not None):
        axis = (x.rows or y.rows)[0]  # type: ignore[index]
        rows = (axis, x.row_norm(axis) + y.row_norm(axis) * abs(alpha))
    lip = x.lip * _copies(call, x) + y.lip * _copies(call, y) * abs(alpha)
    return Value(call.shape, lip, magnitude=magnitude, rows=rows)


def _shifted(call: Call, x: Value, constant: Any, alpha: float = 1) -> Value:
    """x ± α · constant. A value that is not broadcast keeps its map; the offset changes and is dropped."""
    magnitude = x.magnitude + _size(constant) * abs(alpha)
    rows = None
    if x.last_rows is not None and isinstance(constant, Tensor) and constant.dim():
        offset = Value.constant(constant)
        if offset.shape[-1] == x.shape[-1] == call.shape[-1]:
            rows = (-1, x.last_rows + offset.row_norm(-1) * abs(alpha))
    if call.shape != x.shape:
        return Value(call.shape, x.lip * _copies(call, x), magnitude=magnitude, rows=rows)
    if x.base is not None:
        return Value(call.shape, magnitude=magnitude, rows=rows, base=x.base, map=x.map)
    return Value(call.shape, x.lip, magnitude=magnitude, rows=rows)


@box("add", "sub")
def sum_box(propagation: Propagation, node: Node, *operands: State) -> State:
    """x ± αy. For two values ‖δ(x ± αy)‖ ≤ K_x + |α| K_y, or the constant of the folded map; a constant only shifts."""
    args = arguments(node)
    alpha = float(args.get("alpha", 1))
    first, second = args.get("input"), args.get("other")
    signed = ((first, 1.0), (second, alpha if node.op == "add" else -alpha))
    moving = [(x, sign) for x, sign in signed if isinstance(x, Node)]
    if not moving:
        return unknown(propagation, node, *operands)
    states = [(propagation.states[x], sign) for x, sign in moving]
    rounding = propagation.rounded(node)
    if len(states) == 1:
        x, sign = states[0]
        if tuple(x.value.shape[1:]) != node.shape:
            return unknown(propagation, node, *operands)
        rounding = rounding + x.value.abs() * 2.0**-48
        state = scaled(propagation, node, x, x.value.new_full((1,) * x.value.dim(), sign))
        return propagation.result(node, state.up, state.down, factors=state.factors, rounding=rounding)
    up: Tensor | float = 0.0
    down: Tensor | float = 0.0
    constants: list[tuple[State, float]] = []
    for x, sign in states:
        size = abs(sign)
        increase, decrease = (x.up, x.down) if sign >= 0 else (x.down, x.up)
        # Broadcasting aligns axes from the right, so axes of size 1 go between the image axis and the others.
        form = (len(x.value), *[1] * (len(node.shape) + 1 - x.value.dim()), *x.value.shape[1:])
        up, down = up + increase.reshape(form) * size, down + decrease.reshape(form) * size
        rounding = rounding + x.value.abs().reshape(form) * size * 2.0**-48
        copies = math.prod(node.shape) / max(1, math.prod(x.value.shape[1:]))
        constants.append((x, size * math.sqrt(copies) * INFLATE))
    assert isinstance(up, Tensor)
    assert isinstance(down, Tensor)

    def constant() -> Tensor:
        return torch.stack([x.constant * size for x, size in constants]).sum(0) * INFLATE

    up, down = (up + rounding) * INFLATE, (down + rounding) * INFLATE
    return propagation.result(node, up, down, operands, constant=constant)


@rounding("add", "sub")
def add_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """x ± αy: one rounding of the sum; with α its cast, and roundings of αy. Adding −∞, as masks do, is exact."""
    args = arguments(node)
    alpha = abs(float(args.get("alpha", 1)))
    cast = fmt.cast(alpha).item()
    (x, dx), (y, dy) = each_of(node, operands, fmt, args["input"], args["other"])
    masked = torch.zeros_like(zeros(node, operands), dtype=torch.bool)
    for constant in (args["input"], args["other"]):
        if isinstance(constant, Tensor):
            masked = masked | aligned(constant == -math.inf, node, images=False).to(masked.device)
    error = fmt.rounded(x + dx + (alpha + cast) * (y + dy), 1 if alpha == 1 else 4) + dx + alpha * dy + cast * (y + dy)
    return torch.where(masked, 0.0, error.expand(masked.shape))


@rule("mul", linear=in_one_operand, schur=_FACTORS, tags=Tag.SCALES | Tag.WHOLE)
def mul(call: Call, x: Any, y: Any) -> Value:
    """A product with a constant is linear. For two values ‖δ(xy)‖ ≤ max|y| ‖δx‖ + max|x| ‖δy‖.

    δ(xy) = y' δx + x δy with y' the perturbed y, which lies in the same range.
    """
    if isinstance(x, Value) and isinstance(y, Value):
        for factor, other in ((x, y), (y, x)):
            if (normalised := standardised(call, factor, other, "inverse")) is not None:
                return normalised
        lip = y.magnitude * x.lip * _copies(call, x) + x.magnitude * y.lip * _copies(call, y)
        rows = None
        for factor, other in ((x, y), (y, x)):
            if factor.rows is not None and factor.shape == call.shape:
                rows = (factor.rows[0], factor.rows[1] * other.magnitude)
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
    """x/√(‖x‖²/n + eps) for x itself or x minus its mean, where y is that root or its inverse; None otherwise.

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
    """x · constant, as a linear map if possible."""
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


@remainder("mul")
class Gate(Bilinear):
    """x ∘ y: R = δx ∘ δy, ‖R‖ ≤ ‖δx‖‖δy‖. Broadcasting an operand m times makes its deviation √m times as large."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        entries = math.prod(node.shape)
        first, second = node.operands
        self.factor = math.sqrt(entries / math.prod(first.shape)) * math.sqrt(entries / math.prod(second.shape))

    def against(self, direction: Tensor) -> Against:
        largest = per_image(direction).abs().amax(1) * self.factor
        return lambda rho: largest * rho[0] * rho[1]


@jacobian("mul", covers=in_two_operands)
def mul_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """The largest entry of the other factor, times √m if this factor is broadcast m times."""
    operand, other = node.operands[place], node.operands[1 - place]
    gain = per_image(values[other]).abs().amax(1) * copies(node, operand)
    return bilinear(gain, sum(operand.shape) + sum(node.shape))


def _constant_denominator(node: Node) -> bool:
    args = arguments(node)
    if args.get("rounding_mode"):
        raise NoAnswer("rounds")
    return len(node.operands) == 1 and isinstance(args["input"], Node)


@rule("div", linear=_constant_denominator, schur=_FACTORS, tags=Tag.SCALES | Tag.SINGULAR)
def div(call: Call, x: Any, y: Any, *, rounding_mode: str | None = None) -> Value:
    """Division by a constant is a multiplication. For a value y ≥ m > 0, ‖δ(x/y)‖ ≤ ‖δx‖/m + max|x| ‖δy‖/m².

    δ(x/y) = δx/y' − x δy/(y y'), with y' the perturbed y.
    """
    if rounding_mode is not None:
        raise NoAnswer("rounding is not continuous")
    if not isinstance(y, Value):
        inverse = 1.0 / detached(torch.as_tensor(y, dtype=torch.float64))
        if not torch.isfinite(inverse).all():
            raise NoAnswer("division by zero")
        return mul(call, x, inverse)
    if not isinstance(x, Value):
        x = Value.constant(torch.as_tensor(x, dtype=torch.float64))
    for quotient in (standardised(call, x, y, "root"), _over_mean(call, x, y)):
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
    """x/(mean x + eps) for entries x ≥ 0, where y is that denominator; None otherwise.

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


@remainder("div")
class Quotient(Remainder):
    """a/b: with deviations α, β and q = a/b, R = β(qβ − α)/(b(b + β)) exactly.

    With c_i = 1/(|b_i|(|b_i| − ρ_b)): ‖R‖ ≤ ρ_b (max c ρ_a + max(c|q|) ρ_b), and against g with |g_i|c_i in place of
    c_i. The deviation of an operand that is broadcast m times is √m times as large. If a is constant, α = 0.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        args = arguments(node)
        below = args.get("other")
        if not isinstance(below, Node):
            raise NoAnswer("a constant denominator")
        entries = math.prod(node.shape)
        # The indices of a and b in node.operands.
        self.above = node.operands.index(args["input"]) if isinstance(args["input"], Node) else None
        self.below = node.operands.index(below)
        self.copies = [math.sqrt(entries / max(1, math.prod(operand.shape))) for operand in node.operands]
        axes = (len(node.shape) - len(below.shape)) * (1,)
        b = operands[self.below].reshape(len(result), *axes, *below.shape).expand_as(result)
        self.b, self.q = per_image(b).abs(), per_image(result).abs()

    def _weights(self, rho: Tensor) -> Tensor:
        return 1 / (self.b * (self.b - rho[:, None]).clamp_min(0))

    def _moved(self, rho: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """ρ_a and ρ_b after broadcasting."""
        below = rho[self.below] * self.copies[self.below]
        return torch.zeros_like(below) if self.above is None else rho[self.above] * self.copies[self.above], below

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        above, below = self._moved(rho)
        weights = self._weights(rho[self.below])
        return at_most(below * (weights.amax(1) * above + worst(weights, self.q) * below))

    def against(self, direction: Tensor) -> Against:
        size = per_image(direction).abs()

        def bound(rho: Sequence[Tensor]) -> Tensor:
            above, below = self._moved(rho)
            weights = self._weights(rho[self.below])
            return at_most(below * (worst(weights, size) * above + worst(weights, size * self.q) * below))

        return bound


@jacobian("div", covers=in_two_operands)
def div_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """1/y with respect to the numerator, and (x/y)/y with respect to the denominator."""
    gain = copies(node, node.operands[place]) / per_image(values[node.operands[1]]).abs().amin(1)
    return bilinear(gain if place == 0 else gain * per_image(values[node]).abs().amax(1), 0)


def _constant_factor(node: Node, x: State, constant: Any) -> Tensor | None:
    """A constant operand with as many dimensions as the value; None if it broadcasts the value."""
    factor = torch.as_tensor(constant, dtype=torch.float64, device=x.value.device).detach()
    if node.shape != tuple(x.value.shape[1:]) or factor.dim() > len(node.shape):
        return None
    return factor.reshape((1,) * (x.value.dim() - factor.dim()) + tuple(factor.shape))


@box("mul", "div")
def times_box(propagation: Propagation, node: Node, *operands: State) -> State:
    """Products and quotients with a constant scale the deviations."""
    args = arguments(node)
    first, second = args["input"], args["other"]
    if len(operands) != 1 or len(node.operands) != 1 or (node.op == "div" and isinstance(second, Node)):
        return unknown(propagation, node, *operands)
    factor = _constant_factor(node, operands[0], second if isinstance(first, Node) else first)
    if factor is None:
        return unknown(propagation, node, *operands)
    return scaled(propagation, node, operands[0], 1 / factor if node.op == "div" else factor)


@rounding("mul", "div")
def times_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """x·y and x/y, where either may be constant; a quotient may be computed as a product with 1/y.

    |ŷ| ≥ |y| − ρ for a denominator that depends on the image.
    """
    args = arguments(node)
    if node.op == "mul":
        (x, dx), (y, dy) = each_of(node, operands, fmt, args["input"], args["other"])
        return fmt.rounded(x * y, 2) + (x * dy + dx * y + dx * dy) * (1 + 4 * fmt.unit) + zeros(node, operands)
    if args.get("rounding_mode"):
        raise NoAnswer("a quotient that is rounded to a whole number")
    (x, dx), (c, dc) = each_of(node, operands, fmt, args["input"], args["other"])
    x = x + dx
    low = c - dc
    if isinstance(args["other"], Node):
        denominator = operands[node.operands.index(args["other"])]
        low = aligned((denominator.size - denominator.over(denominator.rho)).clamp_min(0), node, images=True)
    quotient = torch.where(low > 0, x / low, math.inf)
    # 1/c may be rounded separately, and may fall below the normal range.
    inverse = x * (4 * fmt.smallest)
    cast = (quotient * torch.where(c > 0, dc / c, 0.0) + torch.where(low > 0, dx / low, 0.0)) * (1 + 4 * fmt.unit)
    error = fmt.rounded(quotient, 4) + cast + inverse + zeros(node, operands)
    return fmt.safe(error, torch.where(low > 0, 1 / low, math.inf).expand(error.shape))
