"""Products of two values other than ``mul`` and ``matmul``: the remainder is the product of their deviations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from lipcert.bounds._registry import NoAnswer
from lipcert.bounds._remainder import Against, arguments, per_image, remainder
from lipcert.bounds.rules.contraction import roles
from lipcert.graph import Node


class Product:
    """f(x, y) linear in each: R = f(δx, δy), with ‖f(x, y)‖ ≤ K‖x‖‖y‖; against g at most ‖g‖ of that."""

    factor = 1.0

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return self.factor * rho[0] * rho[1]

    def against(self, direction: Tensor) -> Against:
        size = per_image(direction).norm(dim=1) * self.factor
        return lambda rho: size * rho[0] * rho[1]


@remainder("einsum")
class Contraction(Product):
    """A batch of matrix products (lipcert.bounds.rules.contraction): ‖X Y‖_F ≤ ‖X‖_F‖Y‖_F in each, K = 1."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        equation = node.args[0]
        if len(operands) != 2 or not isinstance(equation, str):
            raise NoAnswer("other than two tensors")
        roles(equation)


@remainder("conv1d", "conv2d", "conv3d")
class DynamicConvolution(Product):
    """w ∗ x with both from the image: K = √taps, proved in lipcert.bounds.rules.linear."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        given = arguments(node, "input", "weight", "bias")
        x, weight = given.get("input"), given.get("weight")
        if not isinstance(x, Node) or not isinstance(weight, Node):
            raise NoAnswer("a bias that depends on the image, and not both the input and the weight")
        self.factor = math.sqrt(math.prod(weight.shape[2:]))
