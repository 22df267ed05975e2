"""Activations with parameters, thresholds, sorting, and log-softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._box import State, Walk, extended, gap, monotone
from lipcert.bounds._jacobian import Bounds, gamma, of_entries, selecting
from lipcert.bounds._kinks import Kinked, KinkedEntries
from lipcert.bounds._registry import Call, NoAnswer, box, jacobian, rounding, rule
from lipcert.bounds._remainder import Against, per_image, remainder
from lipcert.bounds._rounding import Operand, exact
from lipcert.bounds._value import Value, largest
from lipcert.bounds.rules.activation import entrywise_box
from lipcert.bounds.rules.attention import _HIDDEN, LogSumExp
from lipcert.graph import Node
from lipcert.numerics import EXTRA, Format, Upper, l2_norm


def _slopes(node: Node, dims: int) -> Tensor:
    """The slopes for negative entries, to broadcast with a value of this number of dimensions, its batch included."""
    weight = arguments(node)["weight"]
    if not isinstance(weight, Tensor):
        raise NoAnswer("slopes that depend on the image")
    weight = weight.detach().double()
    return weight.reshape(-1, *[1] * (dims - 2)) if weight.numel() > 1 and dims > 1 else weight.reshape(())


@rule("prelu")
def parametric_relu(call: Call, x: Value, weight: Tensor) -> Value:
    """Slopes 1 for positive entries and w, one for each channel, for negative ones: at most max(1, max|w|)."""
    slope = max(largest(weight), largest(torch.ones(())))
    rows = None if x.rows is None else (x.rows[0], x.rows[1] * slope)
    floor = 0.0 if not bool((weight > 0).any()) else -math.inf
    return Value(x.shape, x.lip * slope, magnitude=x.magnitude * slope, rows=rows, floor=floor)


@box("prelu", inactive=True)
def parametric_relu_box(walk: Walk, node: Node, x: State) -> State:
    """The slope of one side if the interval lies on that side, else the larger one; monotone for slopes ≥ 0."""
    slope = _slopes(node, x.value.dim() - 1).to(x.value.device).expand_as(x.value)
    if bool((slope < 0).any()):
        return entrywise_box(walk, node, x)
    low, high = x.low, x.high
    up, down = gap(walk.replay(node, high), walk.value(node)), gap(walk.value(node), walk.replay(node, low))
    weight = torch.where(high <= 0, slope, torch.where(low >= 0, 1.0, slope.clamp_min(1)))
    error = torch.maximum(low.abs(), high.abs()) * slope * 2.0**-51
    way = extended(x, weight, local=True)
    return walk.result(node, up, down, way=way, rounding=torch.where(x.reach > 0, error, 0.0))


@remainder("prelu")
class ParametricRelu(KinkedEntries):
    """The kink is at distance |z|, and the slope changes by 1 − w there: at most by the largest |1 − w| of a channel.

    Convex if all w ≤ 1, concave if all w ≥ 1.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        slope = _slopes(node, operands[0].dim() - 1)
        super().__init__(operands[0].abs())
        self.slope = float(largest(1 - slope)) * (1 + 2.0**-50)
        self.bends = 1 if bool((slope <= 1).all()) else -1 if bool((slope >= 1).all()) else 0


@rounding("prelu")
def parametric_relu_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """One product with the slope, which is rounded to the format itself."""
    x = operands[0]
    dims = x.nominal.dim() - 1
    slope = _slopes(node, dims)
    cast = fmt.cast(arguments(node)["weight"])
    cast = cast.reshape(-1, *[1] * (dims - 2)) if cast.numel() > 1 and dims > 1 else cast.reshape(())
    return fmt.rounded(x.most * slope.abs(), 3) + x.most * cast


@rule(F.softshrink)
def soft_shrink(call: Call, x: Value, lambd: float = 0.5) -> Value:
    """x minus its projection onto [−λ, λ]: slopes 0 and 1, |φ(x)| ≤ |x|."""
    if not lambd >= 0:
        raise NoAnswer(f"lambd = {lambd:g}")
    return x.bounded(x.lip)


@remainder(F.softshrink)
class SoftShrink(KinkedEntries):
    """The slope changes by 1 at ±λ; up to the nearer kink it does not change."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__((operands[0].abs() - float(arguments(node).get("lambd", 0.5))).abs())


@rounding(F.softshrink)
def soft_shrink_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """One difference with λ, which is rounded to the format itself."""
    return fmt.rounded(operands[0].most) + fmt.cast(float(arguments(node).get("lambd", 0.5))).item()


box(F.softshrink)(entrywise_box)
jacobian("prelu", F.softshrink, absolute=0.0)(of_entries)


def _sorted_along(node: Node) -> int:
    args: dict[str, Any] = arguments(node)
    return int(args.get("dim", -1)) % max(1, len(node.shape))


@rule("sort")
def sort(call: Call, x: Value, dim: int = -1, descending: bool = False, stable: bool | None = None) -> Value:
    """‖sort a − sort b‖ ≤ ‖a − b‖, because Σ a_i b_π(i) is largest if both are in order (rearrangement inequality).

    The source for networks is Anil, Lucas and Grosse, "Sorting out Lipschitz function approximation", ICML 2019.
    """
    axis = dim % max(1, len(x.shape))
    return x.like(call.shape, x.lip, axis if x.rows is not None and x.rows[0] == axis else None)


@box("sort")
def sort_box(walk: Walk, node: Node, x: State) -> State:
    """The k-th smallest entry does not decrease if any entry increases, so its bounds are its values at the ends."""
    up, down, _, _ = monotone(walk, node, x)
    return walk.result(node, up, down, (x,))


@remainder("sort")
class Sort(Kinked):
    """J is the permutation π that sorts h, and R = sort(v) − v for v = π(h + δ).

    Let s = πh, e = πδ, and let k_j be the distance of s_j to the nearer of its neighbours. If sort(v)_j > v_j, then v_i
    ≥ sort(v)_j for some i before j: otherwise v_1, …, v_j would be j entries below the j-th smallest. So
    R_j ≤ v_i − v_j ≤ |e_i| + |e_j| − k_j, and likewise −R_j ≤ |e_i| + |e_j| − k_j for some i after j if sort(v)_j <
    v_j. Hence |R_j| ≤ (√2‖e‖ − k_j)₊, with the e of the group of n entries that j belongs to, and the squares of these
    deviations sum to 2nρ². Also ‖R‖ ≤ ‖sort(v) − sort(s)‖ + ‖v − s‖ ≤ 2ρ. This holds for each π that sorts h, so for
    ties as well.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        axis = _sorted_along(node) + 1
        steps = result.diff(dim=axis).abs()
        edge = torch.full_like(result.narrow(axis, 0, min(1, result.shape[axis])), math.inf)
        super().__init__(torch.minimum(torch.cat([edge, steps], axis), torch.cat([steps, edge], axis)))
        self.spread = math.sqrt(2 * result.shape[axis])

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return torch.minimum(super().norm(rho), 2 * rho[0])

    def against(self, direction: Tensor) -> Against:
        kinked, size = super().against(direction), l2_norm(per_image(direction), 1)
        return lambda rho: torch.minimum(kinked(rho), 2 * size * rho[0])


jacobian("sort", absolute=0.0)(selecting)
rounding("sort")(exact)


@rule("log_softmax")
def log_softmax(call: Call, x: Value, dim: int | None = None, *args: object, **kwargs: object) -> Value:
    """J = I − 1pᵀ with p = softmax(x) is a projection along 1, as pᵀ1 = 1, so ‖J‖ = √n ‖p‖ ≤ √n; 0 for n = 1.

    I − 1pᵀ and 1pᵀ are complementary projections, which have the same norm if neither is 0 (Szyld, "The many proofs of
    an identity on the norm of oblique projections", Numer. Algorithms 42, 2006). An entry is at most 2 max|x| + log n.
    """
    if dim is None:
        raise NoAnswer("log_softmax without a dimension")
    n = x.shape[dim]
    if n == 0:
        return Value(call.shape, 0, magnitude=0)
    size = x.magnitude * 2 + Upper(math.log(n)) * (1 + 2.0**-50)
    return Value(call.shape, x.lip * Upper(n).sqrt() if n > 1 else 0, magnitude=size)


@remainder("log_softmax")
class LogSoftmax(LogSumExp):
    """R = −R′ for every entry of a row, with the remainder 0 ≤ R′ ≤ ½κ‖w‖² of log Σ exp x; see :class:`LogSumExp`.

    So ‖R‖ ≤ √n ½ max(κ) ρ², and −⟨g, R⟩ = Σ_rows (Σ g) R′ counts rows with Σ g > 0 only.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(node, operands, result)
        self.axis = int(arguments(node)["dim"]) % len(node.shape) + 1
        self.root = math.sqrt(result.shape[self.axis])

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return super().norm(rho) * self.root

    def against(self, direction: Tensor) -> Against:
        rounded = direction.abs().sum(self.axis) * _HIDDEN
        return super().against(-(direction.sum(self.axis) + rounded))


@jacobian("log_softmax")
def log_softmax_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """|I − 1pᵀ| has norm at most 1 + √n‖p‖ ≤ 1 + √n. p = exp(result), see :func:`.attention.logsumexp_jacobian`."""
    n = node.shape[arguments(node)["dim"]]
    sizes = per_image(values[node]).abs().amax(1) + per_image(values[node.operands[0]]).abs().amax(1)
    return 1 + math.sqrt(n), 4 * gamma(2 * n) * (1 + math.sqrt(n)) * (1 + sizes)


@rounding("log_softmax")
def log_softmax_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """x_i − m − log Σ_j exp(x_j − m), with m the largest entry, or the largest so far.

    As for softmax, the sum has a relative error of at most e^ℓ(1 + γ_(n + EXTRA)) − 1, ℓ = 8u max|x| + 9(n + 1)u; it is
    at least 1, so its logarithm, at most log n, has that absolute error and that of the function. Three roundings of
    results of at most 2 max|x| + log n follow.
    """
    args = arguments(node)
    if args.get("dim") is None:
        raise NoAnswer("log_softmax without dim")
    axis = args["dim"] % len(node.shape) + 1
    x = operands[0]
    size = x.most.amax(axis, keepdim=True)
    length = x.nominal.shape[axis]
    loss = 8 * fmt.sum_unit * size + 9 * (length + 1) * fmt.sum_unit
    relative = torch.expm1((loss + fmt.sum_gamma(length + EXTRA)).clamp_max(700.0)) + 4 * length * fmt.smallest
    logarithm = torch.full_like(size, math.log(length) + 1)
    error = 2 * relative + loss + fmt.function(logarithm) + fmt.rounded(2 * size + logarithm, 4)
    return fmt.safe(error, size).expand_as(x.nominal)
