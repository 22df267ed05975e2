"""Operations that move entries around: reshape, permute, select, concatenate, pad, roll, expand.

Each is x ↦ (x with its entries in other places). Where no entry is used twice the map has norm 1; where one is used
m times, √m, and that is exact. Counting is done by running the operation itself on the numbers 0, 1, 2, ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert._upper import Upper, root_sum_squares
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import Scale, Value


@rule("identity", "dropout", "Identity")
def identity(call: Call, x: Value, *args: Any, training: bool = False, **kwargs: Any) -> Value:
    """Casts, copies and memory layout change nothing in real arithmetic; dropout does nothing in evaluation mode."""
    return x


@rule("reshape")
def reshape(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
    """A bijection of the entries. Rows survive where their axis is kept, split or merged with others."""
    if call.shape == x.shape:
        return x
    if isinstance(x.map, Scale) and x.base is not None:
        scale = _reshape_scale(x.map.scale, x.shape, call.shape)
        if scale is not None:
            inner = reshape(call, x.base)
            keep_offset = x.offset if call.shape[-1] == x.shape[-1] else None
            return Value(
                call.shape,
                magnitude=x.magnitude,
                base=inner,
                map=Scale(scale),
                offset=keep_offset,
                offset_error=x.offset_error,
            )
    rows = None
    if x.rows is not None:
        target = _follow_axis(x.shape, call.shape, x.rows[0])
        if target is not None:
            rows = (target[0], x.rows[1] * Upper(target[1]).sqrt())
    return Value(
        call.shape, x.lip, magnitude=x.magnitude, rows=rows, stochastic=x.stochastic and call.shape[-1] == x.shape[-1]
    )


def _reshape_scale(scale: Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> Tensor | None:
    if scale.numel() == scale.shape[-1] and old[-1] == new[-1]:
        return scale.reshape(*[1] * (len(new) - 1), -1)
    return scale.expand(old).reshape(new)


def _follow_axis(old: tuple[int, ...], new: tuple[int, ...], axis: int) -> tuple[int, int] | None:
    """Where rows along ``axis`` are after a reshape: (new axis, how many old rows a new one is made of at most).

    Dimensions are grouped from the left into the smallest blocks of equal product. In its block, an axis that is split
    gives shorter rows on the last of the new axes; axes merged into one give rows made of several.
    """
    i = j = 0
    while i < len(old) and j < len(new):
        start_i, start_j, a, b = i, j, old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        if start_i <= axis < i:
            if i - start_i == 1:
                return j - 1, 1
            if j - start_j == 1:
                return start_j, a // max(1, old[axis])
            return None
    return (len(new) - 1, 1) if new and old[axis] == 1 else None


@rule("permute", "movedim")
def permute(call: Call, x: Value, *dims: Any, **kwargs: Any) -> Value:
    """A bijection of the entries; an axis keeps its rows."""
    return _moved(call, x, torch.empty(x.shape, device="meta").permute, *dims, **kwargs)


@rule("transpose")
def transpose(call: Call, x: Value, *dims: Any, **kwargs: Any) -> Value:
    """A bijection of the entries; an axis keeps its rows."""
    if not dims and not kwargs:
        dims = (-2, -1)
    return _moved(call, x, torch.empty(x.shape, device="meta").transpose, *dims, **kwargs)


def _moved(call: Call, x: Value, move: Any, *args: Any, **kwargs: Any) -> Value:
    if x.rows is None:
        return x.like(call.shape, x.lip)
    strides = move(*args, **kwargs).stride()
    # A contiguous tensor's strides name its axes, except where sizes of 1 repeat a stride: then the size decides.
    size, stride = x.shape[x.rows[0]], torch.empty(x.shape, device="meta").stride(x.rows[0])
    places = [axis for axis in range(len(call.shape)) if strides[axis] == stride and call.shape[axis] == size]
    return x.like(call.shape, x.lip, places[0] if len(places) == 1 else None)


def _selection(operation: Any) -> Any:
    def answer(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
        """Picks entries: norm 1, or √m where an entry is picked m times, counted by running the selection."""
        if any(isinstance(a, Value) for a in _leaves((args, kwargs))) or not isinstance(x, Value):
            raise NoAnswer("the positions depend on the image")
        if _basic(args):
            uses = 1
        else:
            numbers = torch.arange(math.prod(x.shape)).reshape(x.shape)
            picked = operation(numbers, *_to_cpu(args), **_to_cpu(kwargs)).reshape(-1)
            uses = int(torch.bincount(picked).max()) if picked.numel() else 1
        last = x.rows is not None and x.rows[0] == len(x.shape) - 1 and _keeps_last_axis(operation, args, len(x.shape))
        return x.like(call.shape, x.lip * Upper(uses).sqrt(), len(call.shape) - 1 if last else None)

    return answer


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for item in tree for leaf in _leaves(item)] if isinstance(tree, (tuple, list)) else [tree]


def _to_cpu(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.cpu()
    if isinstance(tree, (tuple, list)):
        return type(tree)(_to_cpu(item) for item in tree)
    return {k: _to_cpu(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def _basic(args: tuple[Any, ...]) -> bool:
    """Whether an index is made of integers, slices, None and ``...`` alone, so that no entry is picked twice."""
    return all(isinstance(leaf, (int, slice, type(None), type(Ellipsis))) for leaf in _leaves(args))


def _keeps_last_axis(operation: Any, args: tuple[Any, ...], dims: int) -> bool:
    if operation is torch.roll:
        return True
    if operation is not _getitem or not args:
        return False
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    simple = all(isinstance(i, (int, slice)) for i in index)
    return simple and len(index) < dims


def _getitem(tensor: Tensor, *index: Any) -> Tensor:
    """``tensor[index]``, and ``Tensor.select(dim, index)`` and ``narrow(dim, start, length)`` as they are called."""
    if len(index) == 2:
        return tensor.select(*index)
    if len(index) == 3:
        return tensor.narrow(*index)
    return tensor[index[0]]


for _key, _operation in (
    ("getitem", _getitem),
    ("index_select", torch.index_select),
    ("flip", torch.flip),
    ("roll", torch.roll),
):
    rule(_key)(_selection(_operation))


@rule("unbind", "split", "chunk", "tensor_split", "split_with_sizes")
def pieces(call: Call, x: Value, *args: Any, **kwargs: Any) -> _Pieces:
    """Disjoint parts of the entries; each has at most the constant of the whole."""
    return _Pieces(x)


class _Pieces:
    """The parts of a value whose shapes the rule ``part`` learns one by one."""

    def __init__(self, whole: Value):
        self.whole = whole


@rule("part")
def piece(call: Call, parts: Any, index: int) -> Value:
    """One result of an operation that has several."""
    if not isinstance(parts, _Pieces):
        return parts[index]
    x = parts.whole
    if x.rows is None:
        return x.like(call.shape, x.lip)
    removed = len(x.shape) - len(call.shape)  # unbind removes an axis, and only its first one is told apart here
    axis = x.rows[0]
    kept_last = axis == len(x.shape) - 1 and (not removed or call.shape[-1] == x.shape[-1])
    same_axis = not removed and call.shape[axis] <= x.shape[axis]
    return x.like(call.shape, x.lip, len(call.shape) - 1 if kept_last else axis if same_axis else None)


@rule("cat", "stack")
def cat(call: Call, tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Value:
    """Puts values side by side: ‖(a, b)‖² = ‖a‖² + ‖b‖². Constants do not move."""
    parts = [t if isinstance(t, Value) else Value.constant(t) for t in tensors]
    lip = root_sum_squares(*(p.lip for p in parts))
    magnitude = max((p.magnitude for p in parts), default=Upper(0))
    dims = len(call.shape)
    rows = None
    if all(len(p.shape) == dims for p in parts):
        if dim % dims == dims - 1:
            rows = (-1, root_sum_squares(*(p.row_norm(-1) for p in parts)))
        else:
            rows = (-1, max(p.row_norm(-1) for p in parts))
    return Value(call.shape, lip, magnitude=magnitude, rows=rows)


@rule("expand", "repeat", "tile", "repeat_interleave")
def expand(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Repeats every entry equally often, m times: norm √m."""
    copies = math.prod(call.shape) // max(1, math.prod(x.shape))
    keeps_rows = x.rows is not None and x.rows[0] == len(x.shape) - 1 and call.shape[-1] == x.shape[-1]
    return x.like(call.shape, x.lip * Upper(copies).sqrt(), len(call.shape) - 1 if keeps_rows else None)


@rule("pad", "constant_pad_nd")
def pad(call: Call, x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Value:
    """Constant padding adds entries that do not move: norm 1. The other modes repeat entries: √m, counted."""
    if mode == "constant":
        same_last = x.rows is not None and x.rows[0] == len(x.shape) - 1 and (pad[0] == pad[1] == 0) and not value
        padded = x.like(call.shape, x.lip, len(call.shape) - 1 if same_last else None)
        if value:
            padded.magnitude = max(padded.magnitude, Upper(abs(value)))
        return padded
    numbers = torch.arange(math.prod(x.shape), dtype=torch.float64).reshape(x.shape)
    uses = int(torch.bincount(torch.nn.functional.pad(numbers, list(pad), mode).long().reshape(-1)).max())
    return x.like(call.shape, x.lip * Upper(uses).sqrt())
