"""The rounding question: how far is an operation of the deployed network from the same one in real arithmetic?

Both are taken on the same operands. A rule gets the node, its operands as :class:`Operand` (what is known of the
deployed values), and the format, and returns an upper bound on |f̂(â) − f(â)|, entry by entry, of shape (N,
*node.shape); ∞ where it has no answer. What is assumed of the machine is written at the head of
:mod:`lipcert.roundoff`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipcert._format import OWN_ROUNDING, Format
from lipcert._numerics import at_most
from lipcert.bounds._arguments import by_operand
from lipcert.bounds._registry import NoAnswer, answer_of
from lipcert.graph import Node


@dataclass(frozen=True)
class Operand:
    """A value of the deployed network, around the nominal one.

    Attributes:
        nominal: the value at the image in real arithmetic, shape (N, ...).
        rho: how far the deployed value can be from it in ℓ2, shape (N,).
        limit: a bound on its absolute entries that holds as well, shape (N,).
    """

    nominal: Tensor
    rho: Tensor
    limit: Tensor

    def over(self, numbers: Tensor) -> Tensor:
        """Numbers of shape (N,), to broadcast with the value."""
        return numbers.reshape(-1, *[1] * (self.nominal.dim() - 1))

    @property
    def size(self) -> Tensor:
        """Nominal absolute entries."""
        return self.nominal.abs()

    @property
    def most(self) -> Tensor:
        """Bounds on the absolute entries: none moves by more than ρ."""
        return torch.minimum(self.size + self.over(self.rho), self.over(self.limit))


def local_error(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Upper bound on the rounding error of one operation, shape (N, *node.shape).

    Args:
        node: the operation.
        operands: what is known of the deployed operands, in the order of ``node.operands``.
        fmt: the deployed format.

    Raises:
        NoAnswer: there is no rule, or it does not cover the arguments.
    """
    rule = answer_of(node.op, "rounding")
    try:
        error = rule(node, operands, fmt) * OWN_ROUNDING
    except KeyError as missing:
        raise NoAnswer(f"no argument {missing}") from None
    return at_most(error)


def zeros(node: Node, operands: Sequence[Operand]) -> Tensor:
    return operands[0].nominal.new_zeros(len(operands[0].nominal), *node.shape)


def aligned(tensor: Tensor, node: Node, images: bool) -> Tensor:
    """A tensor that broadcasts with (N, *node.shape) as the operation broadcasts it."""
    lead = tensor.shape[:1] if images else (1,)
    shape = tensor.shape[1:] if images else tensor.shape
    return tensor.reshape(*lead, *[1] * (len(node.shape) - len(shape)), *shape)


def each_of(node: Node, operands: Sequence[Operand], fmt: Format, *given: Any) -> list[tuple[Tensor, Tensor]]:
    """For the arguments of an elementwise operation: bounds on the absolute entries, and |cast error| of constants."""
    known = by_operand(node, operands)
    found = []
    for argument in given:
        if isinstance(argument, Node):
            size = aligned(known(argument).most, node, images=True)
            found.append((size, torch.zeros_like(size)))
        else:
            constant = torch.as_tensor(argument, dtype=torch.float64, device=operands[0].nominal.device).detach()
            found.append((aligned(constant.abs(), node, False), aligned(fmt.cast(constant), node, False)))
    return found


def exact(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """No rounding. Numbers below the normal range may be flushed to zero, which the operation that made them counts."""
    return zeros(node, operands)
