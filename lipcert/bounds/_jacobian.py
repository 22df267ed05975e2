"""Bounds on the Jacobian of an operation at computed values and on the rounding error of products with it.

The operation is a function of one operand, at the nominal values of N images. The answer is a pair (A, κ), each of
shape (N,) or one number for all images: A ≥ ‖|J|‖, where |J| holds the absolute values of the Jacobian's entries, and κ
with ‖Ĵv − Jv‖ ≤ κ‖v‖ for products Ĵv computed in float64, forwards and backwards. If the entries of a product are sums
of n terms with a few roundings each, κ = γ_n A. A ≥ ‖J‖ bounds the norm of the Jacobian, which certificates use. Where
A is much larger than ‖J‖, a rule may know a smaller bound, or the norm itself.

For an operation that is affine in the operand, the pair is the same for all images. It follows from Schur's test
(:func:`schur_bounds`) and what its rule says of its matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._registry import RULES, Jacobian, NoAnswer, Schur
from lipcert.bounds._remainder import per_image, remainder_of
from lipcert.graph import Node, evaluate_each
from lipcert.numerics import UNIT, l2_norm, mapped

Bounds = tuple[Tensor | float, Tensor | float]

# The number of roundings in a kernel besides its sums (products, scales, library functions), and the largest number of
# entries in a window of pooling with maxima.
_ROUNDINGS = 16
WINDOW = 512


def gamma(terms: float) -> float:
    """An upper bound on γ_n for n = ``terms`` plus ``_ROUNDINGS``."""
    return 4 * (terms + _ROUNDINGS) * UNIT


def lengths(value: Tensor) -> Tensor:
    """Upper bounds on the ℓ2 norm per image, shape (N,); infinite entries, as in masks, are exact and left out."""
    flat = per_image(value.to(torch.float64))
    return l2_norm(torch.where(flat.isinf(), 0.0, flat), 1) * (1 + 1e-9)


def column_sums(node: Node, place: int, values: Mapping[Node, Tensor]) -> Tensor:
    """The sums of the Jacobian's columns, shape (N, entries of the operand)."""
    operand = node.operands[place]
    source = values[operand].detach().requires_grad_()
    with torch.enable_grad():
        given = {o: source if o is operand else values[o] for o in node.operands}
        result = evaluate_each((node,), given, (node,))[node]
        (slope,) = torch.autograd.grad(result.sum(), source, allow_unused=True) if result.requires_grad else (None,)
    return per_image(torch.zeros_like(source) if slope is None else slope)


def of_entries(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """For elementwise f(x_i): J is diagonal, and its entries are its column sums."""
    gain = column_sums(node, place, values).abs().amax(1)
    return gain, gamma(0) * gain


def saturating(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """For elementwise operations with slopes of about 1 at most, computed from sums and products of such numbers."""
    gain = column_sums(node, place, values).abs().amax(1)
    return gain, gamma(0) * (gain + 1)


def selecting(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """For operations that select entries: rows of J sum to at most 1, so ‖J‖² is at most the largest column sum."""
    columns = column_sums(node, place, values)
    gain = columns.abs().amax(1).sqrt()
    return gain, gamma(WINDOW + columns.shape[1] / max(1, per_image(values[node]).shape[1])) * gain


def bilinear(gain: Tensor, terms: float) -> Bounds:
    """For a product of two values whose entries are sums of ``terms`` terms."""
    return gain, gamma(terms) * gain


def jacobian_of(node: Node) -> Jacobian | Schur | None:
    """The bounds on its Jacobian that an operation's rule knows, in the form in which it is called."""
    rule = RULES.get(node.op)
    try:
        affine = remainder_of(node) is None
    except NoAnswer:
        return None
    if rule is None or (affine and callable(node.op)):  # a user's own: constants may not be among its arguments
        return None
    if affine:
        return rule.schur
    return rule.jacobian if rule.jacobian is not None and rule.jacobian.covers(node) else None


def schur_bounds(schur: Schur, node: Node, place: int, values: Mapping[Node, Tensor]) -> tuple[float, float]:
    """(A, κ) for an affine operation as a function of the operand with index ``place``.

    ‖|J|‖² is at most the largest row sum times the largest column sum of |J| (Schur's test). The row sums are |J|·1 and
    the column sums |J|ᵀ·1, from a product with |J| each, so that J is never written out. κ = γ_n A for n terms.
    """
    operand = node.operands[place]
    rows, columns = absolute_products(schur, node, place, values, None)
    if not rows.numel() or not columns.numel():
        return 0.0, 0.0
    row, column = rows.abs().max().item(), columns.abs().max().item()
    gain = schur.signs * math.sqrt(column) * math.sqrt(row) * (1 + 1e-9)
    return gain, gamma(row + column if schur.terms is None else schur.terms(node, operand)) * gain


def absolute_products(
    schur: Schur, node: Node, place: int, values: Mapping[Node, Tensor], vector: Tensor | None
) -> tuple[Tensor, Tensor]:
    """|J|·vector and |J|ᵀ·1 for an affine operation, up to :attr:`Schur.signs`; ``vector`` ≥ 0, None for 1.

    ∞ in place of both if the result depends on the operand in a way that autograd does not see.
    """
    operand = node.operands[place]
    value = torch.zeros_like(values[operand][0]).requires_grad_()
    places = iter(range(len(node.operands)))

    def absolute(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return value if next(places) == place else torch.zeros_like(values[leaf][0])
        if not isinstance(leaf, Tensor) or not schur.magnitudes or leaf.dtype == torch.bool:
            return leaf
        return leaf.abs() if leaf.is_floating_point() else leaf.double().abs()

    args, kwargs = mapped(absolute, (node.args, dict(node.kwargs)))
    with torch.enable_grad():
        result = node.function(*args, **kwargs)
        nothing = torch.zeros_like(result), torch.zeros_like(value)
        if not result.requires_grad or not result.numel():  # it reads only a shape or type, or is empty
            return nothing
        weight = torch.ones_like(result, requires_grad=True)
        (columns,) = torch.autograd.grad(result, value, weight, create_graph=True, allow_unused=True)
        if columns is None or not columns.requires_grad:  # for autograd the result does not depend on the operand
            unseen = columns is not None and bool(columns.any())
            return (nothing[0] + math.inf, nothing[1] + math.inf) if unseen else nothing
        along = torch.ones_like(columns) if vector is None else vector
        (rows,) = torch.autograd.grad(columns, weight, along, allow_unused=True)
    return nothing[0] if rows is None else rows.detach(), columns.detach()


def evenly(terms: Callable[[Node], float]) -> Callable[[Node, Node], float]:
    """For matrices whose rows have at most ``terms(node)`` entries that are not 0, and whose columns are all alike.

    A matrix with m rows of at most n such entries has at most m n of them, so m n/k in each of k like columns.
    """
    return lambda node, operand: max(1.0, terms(node)) * (1 + max(1, node.entries) / max(1, operand.entries))


def copies(node: Node, operand: Node) -> float:
    """√m for an operand whose entries are repeated m times by broadcasting."""
    return math.sqrt(max(1.0, math.prod(node.shape) / max(1, math.prod(operand.shape))))
