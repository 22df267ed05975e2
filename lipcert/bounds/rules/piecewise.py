"""Sorting and log-softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._arguments import arguments, axis_of
from lipcert.bounds._jacobian import Bounds, gamma, selecting
from lipcert.bounds._kinks import Kinked
from lipcert.bounds._registry import Call, NoAnswer, jacobian, rounding, rule
from lipcert.bounds._remainder import Against, per_image, remainder
from lipcert.bounds._rounding import Operand, exact
from lipcert.bounds._value import Value
from lipcert.bounds.rules.attention import _HIDDEN, LogSumExp
from lipcert.graph import Node
from lipcert.numerics import EXTRA, Format, Upper, l2_norm


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
        self.root = math.sqrt(result.shape[self.axis])

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return super().norm(rho) * self.root

    def against(self, direction: Tensor) -> Against:
        rounded = direction.abs().sum(self.axis) * _HIDDEN
        return super().against(-(direction.sum(self.axis) + rounded))


@jacobian("log_softmax")
def log_softmax_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """|I − 1pᵀ| has norm at most 1 + √n‖p‖ ≤ 1 + √n. p = exp(result), see :func:`.attention.logsumexp_jacobian`."""
    n = node.shape[axis_of(node) - 1]
    sizes = per_image(values[node]).abs().amax(1) + per_image(values[node.operands[0]]).abs().amax(1)
    return 1 + math.sqrt(n), 4 * gamma(2 * n) * (1 + math.sqrt(n)) * (1 + sizes)


@rounding("log_softmax")
def log_softmax_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """x_i − m − log Σ_j exp(x_j − m), with m the largest entry, or the largest so far.

    As for softmax, the sum has a relative error of at most e^ℓ(1 + γ_(n + EXTRA)) − 1, ℓ = 8u max|x| + 9(n + 1)u; it is
    at least 1, so its logarithm, at most log n, has that absolute error and that of the function. Three roundings of
    results of at most 2 max|x| + log n follow.
    """
    axis, x = axis_of(node), operands[0]
    size = x.most.amax(axis, keepdim=True)
    length = x.nominal.shape[axis]
    loss = 8 * fmt.sum_unit * size + 9 * (length + 1) * fmt.sum_unit
    relative = torch.expm1((loss + fmt.sum_gamma(length + EXTRA)).clamp_max(700.0)) + 4 * length * fmt.smallest
    logarithm = torch.full_like(size, math.log(length) + 1)
    error = 2 * relative + loss + fmt.function(logarithm) + fmt.rounded(2 * size + logarithm, 4)
    return fmt.safe(error, size).expand_as(x.nominal)
