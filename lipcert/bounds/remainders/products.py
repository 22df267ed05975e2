"""Products of two values other than ``mul`` and ``matmul``: the remainder is the product of their deviations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import NoAnswer, remainder
from lipcert.bounds._remainder import Against, per_image
from lipcert.bounds.rules.contraction import repeats
from lipcert.graph import Node


class Product:
    """f(x, y) linear in each: R = f(δx, δy), with ‖f(x, y)‖ ≤ K‖x‖‖y‖; against g at most ‖g‖ of that.

    ``factors`` are the numbers of x and y among the operands.
    """

    factor = 1.0
    factors = (0, 1)

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        x, y = self.factors
        return self.factor * rho[x] * rho[y]

    def against(self, direction: Tensor) -> Against:
        size = per_image(direction).norm(dim=1)
        return lambda rho: size * self.norm(rho)


@remainder("einsum")
class Contraction(Product):
    """A batch of matrix products (lipcert.bounds.rules.contraction): ‖X Y‖_F ≤ ‖X‖_F‖Y‖_F in each.

    K = 1, times √m for an operand that is repeated m times along axes where it has size 1.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        equation = node.args[0]
        if len(operands) != 2 or not isinstance(equation, str):
            raise NoAnswer("other than two tensors")
        self.factor = math.sqrt(math.prod(repeats(equation, node.operands)))


@remainder("conv1d", "conv2d", "conv3d")
class DynamicConvolution(Product):
    """w ∗ x with both from the image: K = √taps, proved in lipcert.bounds.rules.linear."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        given = arguments(node)
        x, weight = given.get("input"), given.get("weight")
        if not isinstance(x, Node) or not isinstance(weight, Node):
            raise NoAnswer("a bias that depends on the image, and not both the input and the weight")
        self.factor = math.sqrt(math.prod(weight.shape[2:]))
        self.factors = (node.operands.index(x), node.operands.index(weight))
