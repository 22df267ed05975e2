"""Sums of products over named axes: ``einsum`` as the matrix product that it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lipcert._estimate import held
from lipcert.bounds._registry import Call, NoAnswer, in_one_operand, rule
from lipcert.bounds._value import Dense, Value
from lipcert.bounds.rules.arithmetic import matmul
from lipcert.bounds.rules.structure import expand


def terms(equation: str) -> tuple[str, str]:
    """The axes of the two tensors of a product.

    Raises:
        NoAnswer: not two tensors, or axes that are not named.
    """
    left, _, output = equation.replace(" ", "").partition("->")
    both = left.split(",")
    if len(both) != 2 or "." in equation or "->" not in equation:
        raise NoAnswer(f"einsum {equation}")
    if any(len(set(term)) != len(term) for term in (*both, output)):
        raise NoAnswer(f"einsum {equation}")
    return both[0], both[1]


def sizes(equation: str, operands: Sequence[Any]) -> dict[str, int]:
    """The sizes of the axes of a product of two tensors, or of values or nodes with a shape.

    An axis of size 1 of one of them is repeated where the other one is longer, as torch does.

    Raises:
        NoAnswer: as :func:`roles`.
    """
    roles(equation)
    found: dict[str, int] = {}
    for term, operand in zip(terms(equation), operands, strict=True):
        for axis, size in zip(term, operand.shape, strict=True):
            if found.get(axis, 1) == 1:
                found[axis] = size
            elif size not in (1, found[axis]):
                raise NoAnswer(f"einsum {equation}")
    return found


def repeats(equation: str, operands: Sequence[Any]) -> list[int]:
    """How many times each of two operands is repeated along axes where it has size 1 and the other one has more.

    Raises:
        NoAnswer: as :func:`roles`.
    """
    wide = sizes(equation, operands)
    both = zip(terms(equation), operands, strict=True)
    return [math.prod(wide[axis] // max(1, x.shape[i]) for i, axis in enumerate(term)) for term, x in both]


def roles(equation: str) -> tuple[str, str, str, str]:
    """Axes of a product of two tensors: those in both and the result, left alone, right alone, summed over.

    Raises:
        NoAnswer: not two tensors, an axis that occurs twice in one of them, is left out, or is summed in one alone.
    """
    a, b = terms(equation)
    output = equation.replace(" ", "").partition("->")[2]
    both = [axis for axis in a if axis in b]
    batch = "".join(axis for axis in both if axis in output)
    rows = "".join(axis for axis in a if axis not in b)
    columns = "".join(axis for axis in b if axis not in a)
    if set(rows + columns) - set(output):
        raise NoAnswer(f"einsum {equation}")
    return batch, rows, columns, "".join(axis for axis in both if axis not in output)


@rule("einsum", linear=in_one_operand)
def einsum(call: Call, equation: str, *tensors: Any) -> Value:
    """Axes in both tensors and the result are a batch, those in both alone are summed over: a batch of products X Y.

    Its norm is that of ``matmul``; moving axes is a bijection of the entries. An axis of size 1 in one tensor and n in
    the other is repeated n times first, which has norm √n.
    """
    operands = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    if not isinstance(equation, str):
        raise NoAnswer("einsum with axes that are not letters")
    batch, rows, columns, summed = roles(equation)
    a, b = terms(equation)
    wide = sizes(equation, operands)
    x, y = (_widened(call, t, term, wide) for t, term in zip(operands, (a, b), strict=True))

    def size(axes: str) -> int:
        return math.prod(wide[axis] for axis in axes)

    left = _arranged(x, a, (batch, rows, summed), wide)
    right = _arranged(y, b, (batch, summed, columns), wide)
    product = Call((size(batch), size(rows), size(columns)), call.path)
    if isinstance(left, Tensor):
        norm = Dense(left).norm
        return Value(call.shape, right.lip * norm, magnitude=right.row_norm(-2) * norm)
    result = matmul(product, left, right)
    return Value(call.shape, result.lip, magnitude=result.magnitude, floor=result.lowest)


def _widened(call: Call, x: Any, names: str, wide: dict[str, int]) -> Any:
    """A tensor or value with its axes of size 1 repeated to the product's sizes."""
    shape = tuple(wide[axis] for axis in names)
    if shape == tuple(x.shape):
        return x
    return expand(Call(shape, call.path), x) if isinstance(x, Value) else x.expand(shape)


def _arranged(x: Any, names: str, groups: tuple[str, str, str], sizes: dict[str, int]) -> Any:
    """A tensor or value with its axes merged into three groups; rows along an axis that is a group by itself stay."""
    shape = tuple(math.prod(sizes[axis] for axis in group) for group in groups)
    if not isinstance(x, Value):
        order = [names.index(axis) for group in groups for axis in group]
        return held(x).permute(order).reshape(shape)
    rows = None
    if x.rows is not None and names[x.rows[0]] in groups:
        rows = (groups.index(names[x.rows[0]]), x.rows[1])
    return Value(shape, x.lip, magnitude=x.magnitude, rows=rows, floor=x.lowest)
