"""Refuses networks whose numbers leave the range in which all bounds are proved.

The scale of a tensor is its largest entry, and that of a map its Lipschitz constant. Squares and products of three
numbers within 2^±200, about 1e±60, stay in float64's normal range, and what products of more of them lose by underflow
is below 2⁻¹⁰²², far below a margin of such numbers. Every number of float32 lies inside.

Entries far below the largest one of their tensor, such as 1e-158 next to 1 in a softmax of positions, have no scale of
their own. Proof that bounds hold whatever they are:

- Norms of the tensor, or of its rows, are computed from entries divided by the largest one of the tensor, or of the row
  (:mod:`lipcert.numerics._l2`, :func:`lipcert.norms._scale.normalise`). What underflows there is below n 2⁻¹⁰²² where
  the largest entry is 1, less than the slack for rounding.
- In values, and in products with Jacobians, a term with such an entry may underflow, and then loses at most 2⁻¹⁰²².
  This counts as an error of the operation: rounding rules add 4 (n + 8) 2⁻¹⁰²² to the error of every entry
  (:meth:`lipcert.numerics.Format.sum`), and the ledger of ``anchored`` and the check by noise more than that to the
  norm of every result and of every product with a unit vector (``lipcert.roundoff.UNDERFLOW``). All multiply it by
  bounds on the norms of the operations after it, or propagate it through them. A network that enlarges such entries
  until they can be seen enlarges these errors as much, and its radius is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.bounds._value import Value
from lipcert.errors import InputError
from lipcert.graph import Graph, Node, evaluate
from lipcert.numerics import Upper

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-200, 2.0**200
# These limit or mask values, and no bound is computed from them.
_LIMITS = (torch.finfo(torch.float64).max, torch.finfo(torch.float64).tiny)


@torch.no_grad()
def check_scales(graph: Graph, values: Mapping[Node, Any], image: Tensor) -> None:
    """Checks the largest entries of constants and of values at an image, and that no Lipschitz constant is too small.

    Masks may be infinite, and large Lipschitz constants are usual in deep networks. A value that differs at two images
    shows that its Lipschitz constant is not too small; the norms of the other linear maps alone are computed for this
    check.

    Args:
        graph: the network.
        values: its global analysis.
        image: shape (1, C, H, W).

    Raises:
        InputError: one of them is not 0 and leaves the range; names the operation.
    """
    nominal, other = (evaluate(graph.nodes, {graph.input: x}) for x in (image, 1 - image))
    for node in graph.nodes:
        for constant in _constants(node):
            _check(constant, node, "a constant")
        if isinstance(nominal[node], Tensor) and nominal[node].is_floating_point() and nominal[node].numel():
            size = nominal[node].double().abs()
            _check(torch.where(size < _LIMITS[0], size, 0.0).amax(), node, "a value")
        value = values[node]
        if not isinstance(value, Value) or _moved(nominal[node], other[node]) > SMALLEST_SCALE * image[0].numel():
            continue
        if Upper(0) < value.lip < SMALLEST_SCALE:
            raise InputError(_refusal(node, "a Lipschitz constant", value.lip.log10))


def _moved(first: Any, second: Any) -> float:
    """The largest difference between two values; 0 where it is not known."""
    known = isinstance(first, Tensor) and first.numel() > 0
    return float((first.double() - second.double()).abs().max()) if known else 0.0


def _constants(node: Node) -> Iterator[Tensor]:
    module = [*node.function.parameters(), *node.function.buffers()] if isinstance(node.function, nn.Module) else []
    for tensor in (*module, *node.tensors):
        if tensor.dtype == torch.float64 and tensor.numel():
            yield tensor
    for number in (*node.args, *node.kwargs.values()):
        if isinstance(number, float):
            yield torch.tensor(number, dtype=torch.float64)


def _check(tensor: Tensor, node: Node, what: str) -> None:
    size = tensor.detach().abs()
    ignored = (size == 0) | ~size.isfinite() | (size == _LIMITS[0]) | (size == _LIMITS[1])
    most = torch.where(ignored, 0.0, size).amax().item()
    if most and not SMALLEST_SCALE <= most <= LARGEST_SCALE:
        raise InputError(_refusal(node, what, math.log10(most)))


def _refusal(node: Node, what: str, log10: float) -> str:
    return (
        f"{node.name} at {node.path or 'the model'} has {what} of about 1e{log10:.0f}; "
        "bounds are proved for numbers between 1e-60 and 1e60, so scale the weights"
    )
