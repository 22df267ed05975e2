"""The question of Jacobians: how large is that of an operation at computed values, and how exact a product with it?

An answer is a pair of bounds for an operation as a function of the operand at one place, at nominal values of N images,
each of shape (N,) or one number for all: A ≥ ‖|J|‖, the norm of the absolute values of the Jacobian's entries, and κ
with ‖Ĵv − Jv‖ ≤ κ‖v‖ for products computed in float64, forwards and backwards. Where the entries of a product are
sums of n terms with a few roundings each, κ = γ_n A. A ≥ ‖J‖ bounds norms of Jacobians, and with them certificates.

Operations that are affine in what depends on the image need no answer: see
:mod:`lipcert.certifier.anchored.rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lipcert._numerics import SMALLEST_NORMAL, UNIT
from lipcert.bounds._remainder import per_image
from lipcert.graph import Node, run

Bounds = tuple[Tensor | float, Tensor | float]

# Roundings in a kernel beside its sums: products, scales, library functions. And the entries of a window.
_ROUNDINGS = 16
WINDOW = 512


def gamma(terms: float) -> float:
    """More than γ_n for n = ``terms`` and the roundings beside them."""
    return 4 * (terms + _ROUNDINGS) * UNIT


def lengths(value: Tensor) -> Tensor:
    """ℓ2 norms of an image's entries, from above, shape (N,); infinite entries are left out, as masks are exact."""
    flat = per_image(value.to(torch.float64))
    flat = torch.where(flat.isinf(), 0.0, flat).abs()
    largest = flat.amax(1, keepdim=True).clamp_min(SMALLEST_NORMAL) if flat.shape[1] else flat.new_ones(len(flat), 1)
    return (flat / largest).norm(dim=1) * largest[:, 0] * (1 + 1e-9)


def column_sums(node: Node, place: int, values: Mapping[Node, Tensor]) -> Tensor:
    """The sums of the Jacobian's columns, shape (N, entries of the operand)."""
    operand = node.operands[place]
    distinct = list(dict.fromkeys(node.operands))
    source = values[operand].detach().requires_grad_()

    def one(*operands: Tensor) -> Any:
        return run((node,), dict(zip(distinct, operands, strict=True)))[node]

    with torch.enable_grad():
        result: Tensor = torch.vmap(one)(*(source if o is operand else values[o] for o in distinct))
        (slope,) = torch.autograd.grad(result.sum(), source, allow_unused=True) if result.requires_grad else (None,)
    return per_image(torch.zeros_like(source) if slope is None else slope)


def of_entries(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """f(x_i), entry by entry: J is diagonal, and its entries are the sums of its columns."""
    gain = column_sums(node, place, values).abs().amax(1)
    return gain, gamma(0) * gain


def saturating(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """Entry by entry with slopes near 1 at most, which are computed as sums and products of such numbers."""
    gain = column_sums(node, place, values).abs().amax(1)
    return gain, gamma(0) * (gain + 1)


def selecting(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """A row of J picks an entry, or shares 1 among equal ones: rows sum to 1 at most, and ‖J‖² ≤ the largest column."""
    columns = column_sums(node, place, values)
    gain = columns.abs().amax(1).sqrt()
    return gain, gamma(WINDOW + columns.shape[1] / max(1, per_image(values[node]).shape[1])) * gain


def bilinear(gain: Tensor, terms: float) -> Bounds:
    """A product of two values whose entries are sums of so many terms."""
    return gain, gamma(terms) * gain


def normalising(tokens: Tensor, centred: bool, least: float, scale: float, weight: Tensor | None) -> Bounds:
    """Normalisations and projections of tokens, scale · weight ∘ c/s, c the token, centred or not, s² = ‖c‖² + least².

    |J| is at most the sum of the absolute values of its terms, 3 max|weight| scale/s. What rounding does to c and s
    relative to s grows with the length of the token against s, and enters J twice as a factor, up to 8 in all.

    Args:
        tokens: shape (N, ..., entries).
        centred: whether the mean is taken off first.
        least: see above.
        scale: see above.
        weight: None for 1.
    """
    length = tokens.norm(dim=-1)
    rest = (tokens - tokens.mean(-1, keepdim=True)).norm(dim=-1) if centred else length
    # Rounding may have made the centred token as long as this.
    rest = (rest - gamma(4 * tokens.shape[-1]) * length).clamp_min(0)
    short = 1 / torch.sqrt(rest.square() + least**2) if least else 1 / rest
    largest = 1.0 if weight is None else weight.detach().abs().max().item()
    gain = 3 * scale * largest * per_image(short)
    worse = gain * (1 + 8 * per_image((length * short).square() if centred else torch.ones_like(short)))
    return gain.amax(1), gamma(8 * tokens.shape[-1]) * worse.amax(1)


def copies(node: Node, operand: Node) -> float:
    """√m for an operand whose entries a broadcast repeats m times."""
    return math.sqrt(max(1.0, math.prod(node.shape) / max(1, math.prod(operand.shape))))
