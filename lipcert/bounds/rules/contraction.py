"""Sums of products over named axes: ``einsum`` as the matrix product that it is."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import Dense, Value
from lipcert.bounds.rules.arithmetic import matmul


def roles(equation: str) -> tuple[str, str, str, str]:
    """Axes of a product of two tensors: those in both and the result, left alone, right alone, summed over.

    Raises:
        NoAnswer: not two tensors, an axis that occurs twice in one of them, is left out, or is summed in one alone.
    """
    left, _, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or "." in equation or "->" not in equation:
        raise NoAnswer(f"einsum {equation}")
    a, b = terms
    if any(len(set(term)) != len(term) for term in (a, b, output)):
        raise NoAnswer(f"einsum {equation}")
    both = [axis for axis in a if axis in b]
    batch = "".join(axis for axis in both if axis in output)
    rows = "".join(axis for axis in a if axis not in b)
    columns = "".join(axis for axis in b if axis not in a)
    if set(rows + columns) - set(output):
        raise NoAnswer(f"einsum {equation}")
    return batch, rows, columns, "".join(axis for axis in both if axis not in output)


@rule("einsum")
def einsum(call: Call, equation: str, *tensors: Any) -> Value:
    """Axes in both tensors and the result are a batch, those in both alone are summed over: a batch of products X Y.

    Its norm is that of ``matmul``; moving axes is a bijection of the entries.
    """
    operands = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    batch, rows, columns, summed = roles(equation)
    a, b = equation.replace(" ", "").partition("->")[0].split(",")
    x, y = operands
    sizes = dict(zip(a + b, (*x.shape, *y.shape), strict=True))

    def size(axes: str) -> int:
        return math.prod(sizes[axis] for axis in axes)

    left = _arranged(x, a, (batch, rows, summed), sizes)
    right = _arranged(y, b, (batch, summed, columns), sizes)
    product = Call((size(batch), size(rows), size(columns)), call.path)
    if isinstance(left, Tensor):
        norm = Dense(left).norm
        return Value(call.shape, right.lip * norm, magnitude=right.row_norm(-2) * norm)
    result = matmul(product, left, right)
    return Value(call.shape, result.lip, magnitude=result.magnitude, floor=result.lowest)


def _arranged(x: Any, names: str, groups: tuple[str, str, str], sizes: dict[str, int]) -> Any:
    """A tensor or value with its axes merged into three groups; rows along an axis that is a group by itself stay."""
    shape = tuple(math.prod(sizes[axis] for axis in group) for group in groups)
    if not isinstance(x, Value):
        order = [names.index(axis) for group in groups for axis in group]
        return x.detach().permute(order).reshape(shape)
    rows = None
    if x.rows is not None and names[x.rows[0]] in groups:
        rows = (groups.index(names[x.rows[0]]), x.rows[1])
    return Value(shape, x.lip, magnitude=x.magnitude, rows=rows, floor=x.lowest)
