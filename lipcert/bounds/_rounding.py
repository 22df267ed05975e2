"""Bounds on the rounding error of an operation of the deployed network, for the same operands as in real arithmetic.

A rule holds for every way in which a kernel may compute the operation: sums in any order and in parts, a bias inside
the sum or after it, terms multiplied out or not, with or without fused multiplication, intermediate results in the
format or wider. So errors are relative to the sizes of the terms, which may cancel, and never to the result, unless the
operation has one rounding. What a rule assumes beyond that is in its docstring.

A rule gets the node, its operands as :class:`Operand` (bounds on the deployed values), and the format. It returns an
upper bound on the entries of |f̂(â) − f(â)|, shape (N, *node.shape); ∞ where there is none. :mod:`lipcert.roundoff`
lists the assumptions on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._arguments import by_operand
from lipcert.bounds._registry import NoAnswer, answer_of
from lipcert.graph import Node
from lipcert.numerics import OWN_ROUNDING, Format, at_most


@dataclass(frozen=True)
class Operand:
    """Bounds on a value of the deployed network.

    Attributes:
        nominal: the value at the image in real arithmetic, shape (N, ...).
        rho: a bound on the ℓ2 distance of the deployed value from it, shape (N,).
        limit: a bound on the absolute entries of the deployed value, shape (N,).
    """

    nominal: Tensor
    rho: Tensor
    limit: Tensor

    def over(self, numbers: Tensor) -> Tensor:
        """Reshapes numbers of shape (N,) to broadcast with the value."""
        return numbers.reshape(-1, *[1] * (self.nominal.dim() - 1))

    @property
    def size(self) -> Tensor:
        """The absolute nominal entries."""
        return self.nominal.abs()

    @property
    def most(self) -> Tensor:
        """Bounds on the absolute deployed entries; each deviates by at most ρ."""
        return torch.minimum(self.size + self.over(self.rho), self.over(self.limit))


def local_error(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Upper bound on the rounding error of one operation, shape (N, *node.shape)."""
    rule = answer_of(node.op, "rounding")
    try:
        error = rule(node, operands, fmt) * OWN_ROUNDING
    except KeyError as missing:
        raise NoAnswer(f"no argument {missing}") from None
    return at_most(error)


def zeros(node: Node, operands: Sequence[Operand]) -> Tensor:
    """Zeros of the shape of a rounding error, (N, *node.shape)."""
    return operands[0].nominal.new_zeros(len(operands[0].nominal), *node.shape)


def aligned(tensor: Tensor, node: Node, images: bool) -> Tensor:
    """A tensor that broadcasts with (N, *node.shape) as the operation broadcasts it."""
    lead = tensor.shape[:1] if images else (1,)
    shape = tensor.shape[1:] if images else tensor.shape
    return tensor.reshape(*lead, *[1] * (len(node.shape) - len(shape)), *shape)


def size_and_cast(
    constant: Tensor | None, fmt: Format, arranged: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor] | None:
    """|c| and |ĉ − c| of a constant, arranged to broadcast, or None. A copy of c would lose the errors in ``fmt``."""
    return None if constant is None else (arranged(constant.detach().double().abs()), arranged(fmt.cast(constant)))


def each_of(node: Node, operands: Sequence[Operand], fmt: Format, *terms: Any) -> list[tuple[Tensor, Tensor]]:
    """For each argument of an elementwise operation: bounds on its absolute entries, and its |cast error|."""
    operand_of = by_operand(node, operands)
    bounds = []
    for argument in terms:
        if isinstance(argument, Node):
            size = aligned(operand_of(argument).most, node, images=True)
            bounds.append((size, torch.zeros_like(size)))
        else:
            constant = torch.as_tensor(argument, dtype=torch.float64, device=operands[0].nominal.device).detach()
            bounds.append((aligned(constant.abs(), node, False), aligned(fmt.cast(constant), node, False)))
    return bounds


def exact(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """No rounding error. The operation that computes a subnormal number accounts for its flush to zero."""
    return zeros(node, operands)
