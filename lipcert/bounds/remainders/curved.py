"""Quotients, powers, roots, variances and lengths: curvature that depends on how near to 0 a value may come.

Where a deviation may reach 0 the answer is +inf: nothing is known there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import NoAnswer, remainder
from lipcert.bounds._remainder import Against, Smooth, per_image
from lipcert.bounds._value import Value
from lipcert.bounds.rules.arithmetic import reduced
from lipcert.graph import Node


@remainder("div")
class Quotient:
    """a/b: with deviations α, β and q = a/b exactly R = β(qβ − α)/(b(b + β)), as multiplying out shows.

    With c_i = 1/(|b_i|(|b_i| − ρ_b)): ‖R‖ ≤ ρ_b (max c ρ_a + max(c|q|) ρ_b), and against g with |g_i|c_i in place of
    c_i. An operand that is broadcast m times deviates by √m as much. Where a is constant, α = 0.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        given = arguments(node)
        below = given.get("other")
        if not isinstance(below, Node):
            raise NoAnswer("a constant denominator")
        entries = math.prod(node.shape)
        # Where the quotient's operands stand in the order of node.operands.
        self.above = node.operands.index(given["input"]) if isinstance(given["input"], Node) else None
        self.below = node.operands.index(below)
        self.copies = [math.sqrt(entries / max(1, math.prod(operand.shape))) for operand in node.operands]
        axes = (len(node.shape) - len(below.shape)) * (1,)
        b = operands[self.below].reshape(len(result), *axes, *below.shape).expand_as(result)
        self.b, self.q = per_image(b).abs(), per_image(result).abs()

    def _weights(self, rho: Tensor) -> Tensor:
        return 1 / (self.b * (self.b - rho[:, None]).clamp_min(0))

    def _moved(self, rho: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """ρ_a and ρ_b, copies counted."""
        below = rho[self.below] * self.copies[self.below]
        return torch.zeros_like(below) if self.above is None else rho[self.above] * self.copies[self.above], below

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        above, below = self._moved(rho)
        weights = self._weights(rho[self.below])
        return _known(below * (weights.amax(1) * above + _worst(weights, self.q) * below))

    def against(self, direction: Tensor) -> Against:
        size = per_image(direction).abs()

        def bound(rho: Sequence[Tensor]) -> Tensor:
            above, below = self._moved(rho)
            weights = self._weights(rho[self.below])
            return _known(below * (_worst(weights, size) * above + _worst(weights, size * self.q) * below))

        return bound


def _known(bound: Tensor) -> Tensor:
    """+inf in place of 0 · ∞."""
    return bound.nan_to_num(nan=math.inf, posinf=math.inf)


def _worst(weights: Tensor, factors: Tensor) -> Tensor:
    """max(weights · factors), +inf where a weight is."""
    return _known(weights * factors).amax(1)


@remainder("pow", "sqrt", "rsqrt")
class Power(Smooth):
    """xᵖ has second derivative p(p − 1)xᵖ⁻²: over |t − z| ≤ ρ largest at |z| + ρ for p ≥ 2, at z − ρ > 0 for p < 2."""

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

    def _local(self, rho: Sequence[Tensor]) -> Tensor:
        p = self.exponent
        if p in (0, 1):
            return torch.zeros_like(self.z)
        furthest = self.z.abs() + rho[-1][:, None] if p >= 2 else (self.z - rho[-1][:, None]).clamp_min(0)
        return abs(p * (p - 1)) * furthest ** (p - 2)

    def against(self, direction: Tensor) -> Against:
        weight = per_image(direction).abs()
        return lambda rho: _worst(self._local(rho), weight) / 2 * rho[0] ** 2


@remainder("var")
class Variance:
    """‖C h‖²/d is quadratic: R = ‖C Δ‖²/d for each group, so ‖R‖ ≤ ρ²/d, and against g at most max|g| ρ²/d."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        given = arguments(node)
        shape = node.operands[0].shape
        size = math.prod(shape[d] for d in reduced(Value(shape, 0), given.get("dim")))
        correction = given.get("correction", 1 if given.get("unbiased", True) else 0)
        self.divisor = size - float(1 if correction is None else correction)
        if isinstance(given.get("dim"), bool) or not self.divisor > 0:
            raise NoAnswer(f"the variance of {size} entries, or arguments in an old form")

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return rho[0] ** 2 / self.divisor

    def against(self, direction: Tensor) -> Against:
        largest = per_image(direction).abs().amax(1) / self.divisor
        return lambda rho: largest * rho[0] ** 2


@remainder("norm", "linalg_vector_norm")
class Length:
    """‖h‖ has second derivative (I − ĥĥᵀ)/‖h‖: R ≤ ½ρ²/(n − ρ) for n = ‖h‖ > ρ; and always R ≤ 2ρ, slopes being ≤ 1.

    Over groups Σ_t |g_t| R_t ≤ max(|g_t| c_t) ρ² with c_t the first factor, and ≤ 2‖g‖ρ.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        given = arguments(node)
        if given.get("ord", given.get("p", "fro")) not in ("fro", 2, None):
            raise NoAnswer("p is not 2")
        self.length = per_image(result)

    def _curvature(self, rho: Tensor) -> Tensor:
        return 0.5 / (self.length - rho[:, None]).clamp_min(0)

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return torch.minimum(self._curvature(rho[0]).amax(1) * rho[0] ** 2, 2 * rho[0])

    def against(self, direction: Tensor) -> Against:
        weight = per_image(direction).abs()
        whole = weight.norm(dim=1)

        def bound(rho: Sequence[Tensor]) -> Tensor:
            return torch.minimum(_worst(self._curvature(rho[0]), weight) * rho[0] ** 2, 2 * whole * rho[0])

        return bound
