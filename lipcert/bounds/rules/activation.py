"""Functions applied entry by entry; most are one line in the table below, which holds all facts about them.

An entrywise φ with |φ'| ≤ L has constant L in ℓ2, since the Jacobian is diagonal. The constants are suprema of |φ'| and
|φ''| rounded up; the tests check those of every line against derivatives, and attack its bounds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds._arguments import arguments, replayed
from lipcert.bounds._box import EVALUATION, Propagation, State, clip, extended, gap, over, ratio, unknown
from lipcert.bounds._jacobian import of_entries, saturating
from lipcert.bounds._piecewise import PiecewiseLinear, PiecewiseLinearEntries, piecewise
from lipcert.bounds._registry import COUNTED, Call, NoAnswer, Tag, box, jacobian, rounding, rule, tag
from lipcert.bounds._remainder import (
    Against,
    Contracted,
    Form,
    Remainder,
    Smooth,
    each_entry,
    per_image,
    remainder,
    smooth,
)
from lipcert.bounds._rounding import Operand, aligned, exact, zeros
from lipcert.bounds._value import Value, largest
from lipcert.graph import Node
from lipcert.numerics import INFLATE, Format, Upper, at_most, l2_norm

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Activation:
    """The facts about φ that the rules use.

    Attributes:
        lipschitz: sup |φ'|, rounded up.
        largest: sup |φ|, possibly inf.
        shrinks: |φ(x)| ≤ |x| for every x.
        floor: 0 if inf φ = 0, else -inf.
        curvature: sup |φ''|, rounded up, for φ with a Lipschitz derivative; None leaves the remainder to a rule below.
        downward: sup −φ'', rounded up, if it is smaller.
        error: the error of torch's result, given |x| and the format, as assumed at the head of lipcert.roundoff,
            apart from underflow; None leaves the rounding to a rule below.
    """

    lipschitz: float
    largest: float = float("inf")
    shrinks: bool = True
    floor: float = -math.inf
    curvature: float | None = None
    downward: float = math.inf
    error: Callable[[Tensor, Format], Tensor] | None = None


# Far more than rounding in float64 takes of a difference of log-sigmoids, and the step below which it is not used.
_ROUGH, _SMALLEST_STEP = 1e-12, 1e-4

_larger, _smaller = max, min  # for rules whose arguments have these names


def _of_operand(x: Tensor, fmt: Format) -> Tensor:
    """For x·½(1 + erf) and x/(1 + e⁻ˣ): the second factor is at most 1, and its error is absolute."""
    return fmt.function(x)


def _of_one(x: Tensor, fmt: Format) -> Tensor:
    return fmt.function(torch.ones_like(x))


ACTIVATIONS: dict[Any, Activation] = {
    F.relu: Activation(1.0, floor=0.0),
    F.silu: Activation(1.099840, curvature=0.5, downward=0.036915, error=_of_operand),
    F.sigmoid: Activation(0.25, 1.0, shrinks=False, floor=0.0, curvature=0.096226, error=_of_one),
    F.tanh: Activation(1.0, 1.0, curvature=0.769801, error=lambda x, fmt: fmt.function(x.clamp_max(1))),
    F.hardsigmoid: Activation(0.16666666666666669, 1.0, shrinks=False, floor=0.0, error=_of_one),
    F.hardswish: Activation(1.5, error=_of_operand),
    F.logsigmoid: Activation(1.0, shrinks=False, error=lambda x, fmt: fmt.function(x + 1)),
    torch.sin: Activation(1.0, 1.0, curvature=1.0, error=_of_one),
    torch.cos: Activation(1.0, 1.0, shrinks=False, curvature=1.0, error=_of_one),
    "abs": Activation(1.0, floor=0.0),
}


def _apply(x: Value, phi: Activation) -> Value:
    lip = x.lip * phi.lipschitz
    result = x.bounded(lip, phi.largest) if phi.shrinks else Value(x.shape, lip, magnitude=phi.largest)
    result.floor = torch.tensor(phi.floor, dtype=torch.float64)
    return result


def entrywise_box(propagation: Propagation, node: Node, x: State) -> State:
    """|φ'| ≤ L: every entry deviates by at most L times the deviation of its operand."""
    gain = ratio(propagation.boxes.values[node].lip, x.lip)
    if not math.isfinite(gain):
        return unknown(propagation, node, x)
    reach = x.reach * gain * INFLATE
    rounding = per_image(propagation.value(node).abs()).amax(1) * EVALUATION
    factors = extended(x, torch.full_like(x.value, gain))
    return propagation.result(node, reach, reach, factors=factors, rounding=over(rounding, reach).expand_as(reach))


def _rounds(*targets: Any, error: Callable[[Tensor, Format], Tensor]) -> None:
    """Registers the error of a function of single entries."""

    def answer(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
        """That of the table, plus an underflow."""
        x = operands[0].most
        return fmt.safe(error(x, fmt), x)

    rounding(*targets)(answer)


for _function, _phi in ACTIVATIONS.items():

    @rule(_function)
    def entrywise(call: Call, x: Value, *args: object, _phi: Activation = _phi, **kwargs: object) -> Value:
        """sup |φ'| of the table."""
        return _apply(x, _phi)

    box(_function)(entrywise_box)  # those of piecewise linear functions follow below
    if _phi.curvature is not None:
        smooth(_function, curvature=_phi.curvature, downward=_phi.downward)
        jacobian(_function, absolute=1.0)(saturating)
    if _phi.error is not None:
        _rounds(_function, error=_phi.error)

tag(Tag.RECTIFIES | Tag.MONOTONE, F.relu)
tag(Tag.MONOTONE, F.sigmoid, F.tanh)
tag(Tag.ENTRYWISE, F.silu, torch.sin, torch.cos)
box("gelu")(entrywise_box)
_rounds("gelu", error=_of_operand)


@rule("neg", linear=True, schur=COUNTED, tags=Tag.NEGATES | Tag.WHOLE)
def negated(call: Call, x: Value) -> Value:
    """An isometry."""
    return _apply(x, Activation(1.0))


@rule(F.gelu, tags=Tag.ENTRYWISE)
def gelu(call: Call, x: Value, approximate: str = "none") -> Value:
    """sup |φ'| is 1.1289042 for x Φ(x) and 1.1289929 for its tanh form; |φ(x)| ≤ |x|.

    Gupta and Verma 2023 (arXiv 2302.10287), equations 14 to 16, take 1.12, which is below it.
    """
    return _apply(x, Activation(1.128905 if approximate == "none" else 1.128994))


@remainder("gelu")
class Gelu(Smooth):
    """φ''(t) = (2 − t²)·N(t) with the normal density N; that of the tanh form differs by at most 0.0032.

    The tests check both. |φ''| decreases on [0, √2] from 0.79789 to 0, has another maximum 2 N(2) < 0.107982 at t = 2,
    and decreases after it.
    """

    curvature = 0.797885
    downward = 0.107982

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(node, operands, result)
        self.slack = 0.0 if arguments(node).get("approximate", "none") == "none" else 0.0032

    @staticmethod
    def _second(t: Tensor) -> Tensor:
        square = t * t
        return (2 - square) * torch.exp(square / -2) * (1 / math.sqrt(2 * math.pi))

    def envelope(self, distance: Tensor) -> Tensor:
        value = self._second(distance)
        return torch.where(distance < 2, value.clamp_min(self.downward), -value) + self.slack

    def _signed(self, rho: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """φ'' is positive only on (−√2, √2)."""
        near = (self.size - each_entry(rho)).clamp_min(0)
        value = self._second(near)
        reaches = self.size + each_entry(rho) > math.sqrt(2)
        downward = torch.where(reaches, torch.where(near < 2, self.downward, -value), 0.0)
        return value.clamp_min(0) + self.slack, downward + self.slack


@remainder(F.logsigmoid)
class LogSigmoid(Smooth):
    """φ'' = −f with the density f(t) = 1/(4 cosh²(t/2)): even, decreasing in |t|, with the integral F, a sigmoid.

    φ is concave, so −R_i ≥ 0. For deviations larger than the width of the curved region, ½ sup f δ_i² is far too large.
    With a = |z_i|, −R_i is largest if δ_i moves z_i towards 0, because f is larger there. Then it is B(t) = ∫₀ᵗ (t − v)
    f(v − a) dv for t = |δ_i|. So −R_i ≤ κ_i δ_i² with κ_i = sup q(t) over t ≤ p, q(t) = B(t)/t².

    q increases up to some t* and decreases after it: t³q' = ∫₀ᵗ (t − v) v f'(v − a) dv has the second derivative
    t f'(t − a), which is positive below a and negative above. The integral and its derivative vanish at 0, so the
    derivative changes its sign at most once, from + to −, and then so does the integral. Also
    t³q' = t(F(t − a) − F(−a)) − 2B(t) = ∫₀ᵗ (2v − t) f(v − a) dv, which is at most 0 for t ≥ 2a, because then
    f(v − a) ≥ f(t − v − a) for v ≤ t/2. So a ≤ t* ≤ 2a, and κ_i = q(min(p, t*)). B cancels for small t, where ½ sup f
    is smaller. κ_i takes the place of ½ sup |φ''| in the bounds of :class:`Smooth`.
    """

    curvature = 0.25

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(node, operands, result)
        self.a, self.whole, self.slope = self.size, F.logsigmoid(self.size), torch.sigmoid(-self.size)
        low, high = self.a, 2 * self.a
        for _ in range(40):
            middle = (low + high) / 2
            rises = middle * (torch.sigmoid(middle - self.a) - self.slope) > 2 * self._lost(middle)
            low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
        self.highest = high

    def only(self, index: Tensor) -> Self:
        part = copy.copy(self)
        part._latest = None
        for name in ("z", "size", "a", "whole", "slope", "highest"):
            setattr(part, name, getattr(self, name)[index])
        return part

    def _lost(self, t: Tensor) -> Tensor:
        """B(t)."""
        return self.whole - F.logsigmoid(self.a - t) - self.slope * t

    def envelope(self, distance: Tensor) -> Tensor:
        return 0.25 / torch.cosh(distance / 2).square()

    def second(self, reach: Tensor) -> Tensor:
        t = torch.minimum(reach, self.highest).clamp_min(_SMALLEST_STEP)
        exact = (self._lost(t) * (1 + _ROUGH) + _ROUGH * (1 + t)) / t.square()
        return torch.minimum(super().second(reach), 2 * exact)

    def _signed(self, rho: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        local = self._local(rho)
        return torch.zeros_like(local), local


@box("neg")
def negated_box(propagation: Propagation, node: Node, x: State) -> State:
    """The upper and the lower deviation are exchanged."""
    return propagation.result(node, x.down, x.up, factors=extended(x, torch.ones_like(x.value)))


box("relu", inactive=True)(clip)
rounding("neg", "abs", "relu")(exact)
jacobian("relu", "leaky_relu", "prelu", "abs", absolute=0.0)(of_entries)
jacobian("gelu", "hardsigmoid", "hardswish", F.logsigmoid, absolute=1.0)(saturating)


# The width of a secant is at least this share of the largest deviation of the entry. Nearer to its breakpoint than this
# share, an entry has none.
_WIDTH, _NEAR = 0.08, 1e-3
# More than the rounding error of the terms of a secant.
_ROUNDED = 1e-13


@remainder("relu")
class Rectifier(PiecewiseLinearEntries):
    """max(z, 0): the breakpoint is at distance k = |z|, and the slope changes by 1 there.

    Contracted: let w = |g| for an entry with g < 0 that reaches 0 within ρ, else 0. With s = 1 for z > 0 and
    s = −1 otherwise, −g R = w (u)₊ for u = −sδ − k. As (u)₊ ≤ (u + r)²/(4r) for every r > 0, because the difference is
    (u − r)²/(4r) for u ≥ 0,

        −g R ≤ w δ²/(4r) − w s δ (r − k)/(2r) + w (r − k)²/(4r).

    The linear term is that of a secant. The bound is exact at |u| = r, so r is |u| at the likely deviation. It must not
    be much smaller than other values of |u|. Entries with g > 0 have no secant, because they lose nothing.

    The sign of z must be that with which gradients are computed. Close to 0 it is not known, because z may be summed in
    another order there. For such entries R ≤ |δ| with either slope, so −g R ≤ w δ²/(2r) + w r/2.
    """

    convexity = 1

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(node, operands, result)
        self.side = torch.where(per_image(operands[0]) > 0, 1.0, -1.0)

    def contracted(self, direction: Tensor, rho: Sequence[Tensor], likely: Tensor | None = None) -> Contracted | None:
        most = self._reach(rho)[1]
        weight = torch.where(self.distance < most, self._against(direction), 0.0)
        beyond = self.distance if likely is None else self.distance + self.side * per_image(likely)
        width = (beyond.square() + (_WIDTH * most).square()).sqrt().clamp(1e-140, 1e140)
        near = self.distance <= _NEAR * most
        excess = torch.where(near, 0.0, width - self.distance)
        linear = -weight * self.side * excess / (2 * width)
        rounded = _ROUNDED * at_most(weight * (most + self.distance + width))
        constant = torch.where(near, weight * width / 2, weight * excess.square() / (4 * width)) + rounded
        constant = constant.sum(1)
        form = Form.weights((weight / torch.where(near, 2, 4) / width).sqrt().reshape(direction.shape))

        def bound(rho: Sequence[Tensor], sizes: Sequence[Tensor], constant: Tensor) -> Tensor:
            return sizes[0].square() + constant

        return Contracted((form,), bound, (constant,), linear.reshape(direction.shape))


def _slopes(node: Node, dims: int) -> tuple[Any, Tensor]:
    """The slopes for negative entries, as they are given, and to broadcast with a value of this many dimensions."""
    args = arguments(node)
    given = args["weight"] if node.op == "prelu" else args.get("negative_slope", 0.01)
    if isinstance(given, Node):
        raise NoAnswer("slopes that depend on the image")
    slope = torch.as_tensor(given, dtype=torch.float64).detach()
    return given, slope.reshape(-1, *[1] * (dims - 2)) if slope.numel() > 1 and dims > 1 else slope.reshape(())


@rule("leaky_relu", "prelu")
def leaky_relu(call: Call, x: Value, weight: Tensor | float = 0.01, inplace: bool = False) -> Value:
    """Slopes 1 for positive entries and w, one or one for each channel, for negative ones: at most max(1, max|w|)."""
    weight = torch.as_tensor(weight, dtype=torch.float64)
    slope = _larger(largest(weight), largest(torch.ones(())))
    rows = None if x.rows is None else (x.rows[0], x.rows[1] * slope)
    floor = 0.0 if not bool((weight > 0).any()) else -math.inf
    return Value(x.shape, x.lip * slope, magnitude=x.magnitude * slope, rows=rows, floor=floor)


@box("leaky_relu", "prelu", inactive=True)
def leaky_relu_box(propagation: Propagation, node: Node, x: State) -> State:
    """The slope of one side if the interval lies on that side, else the larger one; monotone for slopes ≥ 0."""
    slope = _slopes(node, x.value.dim() - 1)[1].to(x.value.device).expand_as(x.value)
    if bool((slope < 0).any()):
        return entrywise_box(propagation, node, x)
    low, high = x.low, x.high
    up, down = gap(replayed(node, high), propagation.value(node)), gap(propagation.value(node), replayed(node, low))
    weight = torch.where(high <= 0, slope, torch.where(low >= 0, 1.0, slope.clamp_min(1)))
    error = torch.maximum(low.abs(), high.abs()) * slope * 2.0**-51
    factors = extended(x, weight, local=True)
    return propagation.result(node, up, down, factors=factors, rounding=torch.where(x.reach > 0, error, 0.0))


@remainder("leaky_relu", "prelu")
class LeakyRectifier(Rectifier):
    """As ReLU, but the slope changes by 1 − w: at most by the largest |1 − w| of a channel.

    Convex if all w ≤ 1, concave if all w ≥ 1.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(node, operands, result)
        slope = _slopes(node, operands[0].dim() - 1)[1]
        self.slope = float(largest(1 - slope)) * (1 + 2.0**-50)
        self.convexity = 1 if bool((slope <= 1).all()) else -1 if bool((slope >= 1).all()) else 0


@rounding("leaky_relu", "prelu")
def leaky_relu_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """One product with the slope, which is rounded to the format itself."""
    x = operands[0]
    given, slope = _slopes(node, x.nominal.dim() - 1)
    return fmt.rounded(x.most * slope.abs(), 3) + x.most * fmt.cast(given).reshape(slope.shape)


piecewise("abs", breakpoints=lambda node: (0.0,), slope=2.0, convexity=1)
# Torch computes parts of hardsigmoid, hardswish and their derivatives with ⅙ and ½ in float32: an error below 1e-8.
_FLOAT32 = 1e-8


@remainder("hardsigmoid")
class HardSigmoid(PiecewiseLinearEntries):
    """Slope ⅙ on [−3, 3] and 0 outside. The computed slope is off by up to 1e-8."""

    slope = 1 / 6
    breakpoints = staticmethod(lambda node: (-3.0, 3.0))

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return super().norm(rho) + _FLOAT32 * rho[0]

    def against(self, direction: Tensor) -> Against:
        piecewise, size = super().against(direction), _FLOAT32 * l2_norm(per_image(direction), 1)
        return lambda rho: piecewise(rho) + size * rho[0]

    def total(self, weight: Tensor, rho: Sequence[Tensor], size: Tensor | None = None) -> Tensor:
        return super().total(weight, rho, size) + _FLOAT32 * l2_norm(weight, 1) * rho[0]


@remainder("hardswish")
class HardSwish(Smooth):
    """z·min(max(z + 3, 0), 6)/6: second derivative ⅓ on (−3, 3), 0 outside; at ±3 the slope jumps by ½.

    R = ∫ (φ'(z + s) − φ'(z)) ds over s from 0 to δ. The smooth part of φ' changes by at most |s|/3. It jumps by ½ at
    each of the two breakpoints, whose distances are at least that of the nearer one, k: |R| ≤ ½·⅓ δ² + (|δ| − k)₊.
    """

    curvature = 1 / 3
    contracted = Remainder.contracted  # breakpoints have no such form

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(node, operands, result)
        self.breakpoints = PiecewiseLinear((operands[0].abs() - 3).abs())

    def uncertain(self, noise: Tensor) -> Tensor:
        return self.breakpoints.uncertain(noise)

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        slack = _FLOAT32 * (1 + self.z.abs().amax(1) + rho[0]) * rho[0]
        return super().norm(rho) + self.breakpoints.norm(rho) + slack

    def against(self, direction: Tensor) -> Against:
        curved, piecewise = super().against(direction), self.breakpoints.against(direction)
        size = l2_norm(per_image(direction), 1) * _FLOAT32
        largest = self.z.abs().amax(1)
        return lambda rho: curved(rho) + piecewise(rho) + size * (1 + largest + rho[0]) * rho[0]

    def total(self, weight: Tensor, rho: Sequence[Tensor], size: Tensor | None = None) -> Tensor:
        slack = l2_norm(weight, 1) * _FLOAT32 * (1 + self.z.abs().amax(1) + rho[0]) * rho[0]
        return super().total(weight, rho, size) + self.breakpoints.against(weight)(rho) + slack


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
    # min(max(x, low), high) ≥ min(max(inf x, inf low), inf high)
    bottom = x.lowest if low is None else _larger(x.lowest, low.min().item())
    bottom = bottom if high is None else _smaller(bottom, high.min().item())
    return Value(x.shape, x.lip, magnitude=size, floor=bottom)


@box("clamp", inactive=True)
def clamp_box(propagation: Propagation, node: Node, x: State, *others: State) -> State:
    """Constant limits clip as a ReLU does; for other limits the Lipschitz constant is used."""
    if others or node.shape != tuple(x.value.shape[1:]):
        return unknown(propagation, node, x, *others)
    return clip(propagation, node, x)


def clips(*targets: Any, limits: Callable[[Node], Sequence[Any]]) -> None:
    """Registers functions that clip to limits, which are numbers, constants or None: the slope is 0 or 1."""

    def given(node: Node) -> list[Any]:
        return [limit for limit in limits(node) if limit is not None]

    def limit_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
        """Comparisons are exact, but the limits are rounded to the deployed format."""
        error = zeros(node, operands)
        for limit in given(node):
            error = torch.maximum(error, aligned(fmt.cast(limit), node, images=False).to(error.device))
        return error

    piecewise(*targets, breakpoints=given)
    jacobian(*targets, absolute=0.0)(of_entries)
    rounding(*targets)(limit_rounding)


def _clamped(node: Node) -> Sequence[Any]:
    if len(node.operands) > 1 or node.shape != node.operands[0].shape:
        raise NoAnswer("limits that depend on the image, or are larger than the value")
    return [arguments(node).get(name) for name in ("min", "max")]


box("hardtanh", inactive=True)(clip)
clips("hardtanh", limits=lambda node: (arguments(node).get("min_val", -1.0), arguments(node).get("max_val", 1.0)))
clips("clamp", limits=_clamped)
