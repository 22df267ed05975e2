"""Operations that rearrange entries: reshape, permute, select, concatenate, pad, roll, expand.

If no entry is used twice, the map has norm 1. If an entry is used at most m times, the norm is √m exactly. Uses are
counted by running the operation on the numbers 0, 1, 2, ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._arguments import arguments, replayed
from lipcert.bounds._box import Propagation, State, nonnegative, unknown
from lipcert.bounds._registry import COUNTED, Call, NoAnswer, Tag, box, rounding, rule, tag, tagged
from lipcert.bounds._rounding import Operand, exact, zeros
from lipcert.bounds._value import Scale, Value, lowest
from lipcert.graph import Node
from lipcert.numerics import Format, Upper, leaves, mapped, root_sum_squares


@rule("identity", linear=True, schur=COUNTED, tags=Tag.COPIES)
def identity(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Casts between real types, copies and changes of the memory layout are the identity in real arithmetic."""
    return x


@box("identity", "dropout")
def same_box(propagation: Propagation, node: Node, x: State, *templates: State) -> State:
    """The operand itself."""
    return propagation.result(node, x.up, x.down, (x,), factors=x.factors, constant=lambda: x.constant)


@rounding("identity")
def identity_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """A copy, or a change of format that rounds at most once."""
    return fmt.rounded(operands[0].most)


def _outside_training(node: Node) -> bool:
    args = arguments(node)
    if args.get("training", True) and args.get("p", 0.5):
        raise NoAnswer("it is random, training=True")
    return True


@rule("dropout", linear=_outside_training, schur=COUNTED, tags=Tag.KEEPS)
def dropout(call: Call, x: Value, p: float = 0.5, training: bool = True, inplace: bool = False) -> Value:
    """The identity outside training."""
    if training and p:
        raise NoAnswer("it is random, training=True")
    return x


def _same_numbers(node: Node) -> bool:
    if any(isinstance(argument, torch.dtype) for argument in (*node.args, *node.kwargs.values())):
        raise NoAnswer("another reading of the same bits")
    return True


@rule("reshape", linear=_same_numbers, schur=COUNTED, tags=Tag.KEEPS)
def reshape(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
    """A bijection of the entries. The bound on rows is kept if their axis is kept, split or merged with others."""
    if any(isinstance(argument, torch.dtype) for argument in (*args, *kwargs.values())):
        raise NoAnswer("another reading of the same bits")
    if call.shape == x.shape:
        return x
    if isinstance(x.map, Scale) and x.base is not None:
        along_last = x.map.scale.numel() == x.map.scale.shape[-1] and x.shape[-1] == call.shape[-1]
        form = (*[1] * (len(call.shape) - 1), -1) if along_last else call.shape
        scale = Scale((x.map.scale if along_last else x.map.scale.expand(x.shape)).reshape(form))
        offset = x.offset if call.shape[-1] == x.shape[-1] else None
        inner, error = reshape(call, x.base), x.offset_error
        moved = Value(call.shape, magnitude=x.magnitude, base=inner, map=scale, offset=offset, offset_error=error)
        return _arranged(moved, x)
    rows = None
    if x.rows is not None:
        target = _follow_axis(x.shape, call.shape, x.rows[0])
        if target is not None:
            rows = (target[0], x.rows[1] * Upper(target[1]).sqrt())
    stochastic = x.stochastic and call.shape[-1:] == x.shape[-1:]
    return _arranged(Value(call.shape, x.lip, magnitude=x.magnitude, rows=rows, stochastic=stochastic), x)


def _arranged(result: Value, x: Value) -> Value:
    """Copies the bounds on entries that are valid after a reshape: those that do not depend on the position."""
    same_last = result.shape[-1:] == x.shape[-1:]
    result.floor = x.floor if same_last else torch.tensor(x.lowest, dtype=torch.float64)
    result.mass = x.mass if same_last else -math.inf
    result.arranged = x
    return result


def _follow_axis(old: tuple[int, ...], new: tuple[int, ...], axis: int) -> tuple[int, int] | None:
    """The axis of rows after a reshape, and the largest number of old rows in a new one; None if rows are lost.

    Dimensions are grouped from the left into the smallest blocks of equal product. If the axis is split within its
    block, the last of the new axes holds shorter rows. If axes are merged into one, a new row consists of several.
    """
    if 0 in old:
        return None
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
    return None


@rule("permute", linear=True, schur=COUNTED, tags=Tag.REARRANGES)
def moved(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
    """A bijection of the entries; rows move with their axis."""
    if x.rows is None:
        return x.like(call.shape, x.lip)
    strides = torch.empty(x.shape, device="meta").permute(*args, **kwargs).stride()
    # The strides of a contiguous tensor identify its axes. Axes of size 1 may repeat a stride; then the size decides.
    size, stride = x.shape[x.rows[0]], torch.empty(x.shape, device="meta").stride(x.rows[0])
    places = [axis for axis in range(len(call.shape)) if strides[axis] == stride and call.shape[axis] == size]
    return x.like(call.shape, x.lip, places[0] if len(places) == 1 else None)


def _to_cpu(tree: Any) -> Any:
    return mapped(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, tree)


def _to_meta(leaf: Any) -> Any:
    """An index for a tensor on the meta device."""
    if isinstance(leaf, Tensor) and leaf.dtype == torch.bool:
        raise NoAnswer("positions given by a mask")
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _keeps_rows(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether every row along the last axis of the result consists of entries of one row."""
    if operation is Tensor.roll:
        dims = kwargs.get("dims", args[1] if len(args) > 1 else None)
        return isinstance(dims, int) or bool(dims)  # without dims it rolls the flattened tensor
    if operation is not _getitem or kwargs:
        return False
    if len(args) > 1:  # select(dim, index) and narrow(dim, start, length)
        return len(args) == 3 or args[0] % len(shape) != len(shape) - 1
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    return all(isinstance(i, (int, slice)) for i in index) and len(index) < len(shape)


def _getitem(tensor: Tensor, *index: Any, **named: Any) -> Tensor:
    """``tensor[index]``, and ``Tensor.select(dim, index)`` and ``narrow(dim, start, length)`` as they are called."""
    if named:
        return (tensor.narrow if "start" in named or len(index) + len(named) == 3 else tensor.select)(*index, **named)
    if len(index) == 2:
        return tensor.select(*index)
    if len(index) == 3:
        return tensor.narrow(*index)
    return tensor[index[0]]


_SELECTIONS: dict[str, Any] = {
    "getitem": _getitem, "index_select": Tensor.index_select, "flip": Tensor.flip, "roll": Tensor.roll,
}  # fmt: skip


@rule("getitem", "index_select", linear=True, schur=COUNTED, tags=Tag.MOVES)
@rule("flip", "roll", linear=True, schur=COUNTED, tags=Tag.REARRANGES)
def selected(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Selects entries: norm √m if an entry is selected at most m times, counted by running the selection."""
    operation = _SELECTIONS[call.op]
    if any(isinstance(a, Value) for a in leaves((args, kwargs))):
        raise NoAnswer("the positions depend on the image")
    numbers = torch.arange(math.prod(x.shape)).reshape(x.shape)
    picked = operation(numbers, *_to_cpu(args), **_to_cpu(kwargs)).reshape(-1)
    uses = int(torch.bincount(picked).max()) if picked.numel() else 1
    last = x.last_rows is not None and _keeps_rows(operation, args, kwargs, x.shape)
    result = x.like(call.shape, x.lip * Upper(uses).sqrt(), len(call.shape) - 1 if last else None)
    if x.floor.numel() > 1:  # one bound for each position on the last axis
        picked_floors = operation(x.floor.expand(x.shape), *_to_cpu(args), **_to_cpu(kwargs))
        if picked_floors.numel():
            result.floor = picked_floors.amin()
    return result


@rule("split", "chunk", linear=True, schur=COUNTED, tags=Tag.SPLITS)
def pieces(call: Call, x: Value, *args: object, **kwargs: object) -> _Pieces:
    """Disjoint parts of the entries; the constant of each part is at most that of the whole."""
    return _Pieces(x, None)


@rule("unbind", linear=True, schur=COUNTED, tags=Tag.SPLITS)
def unbind(call: Call, x: Value, dim: int = 0) -> _Pieces:
    """As above; the parts do not have the axis ``dim``."""
    return _Pieces(x, dim % len(x.shape))


class _Pieces:
    """The parts of a value, before the rule ``part`` selects one, and the axis that they do not have."""

    def __init__(self, whole: Value, removed: int | None):
        self.whole = whole
        self.removed = removed


@rule("part", linear=True, schur=COUNTED, tags=Tag.PART)
def piece(call: Call, parts: Any, index: int) -> Value:
    """One result of an operation with several results."""
    if not isinstance(parts, _Pieces):
        return parts[index]
    x, removed = parts.whole, parts.removed
    if x.rows is None or removed == x.rows[0]:
        return x.like(call.shape, x.lip)
    axis = x.rows[0]
    return x.like(call.shape, x.lip, axis - 1 if removed is not None and removed < axis else axis)


@box("part")
def part_box(propagation: Propagation, node: Node, *operands: State) -> State:
    """One part of a value that was split."""
    split = node.args[0]
    source = split.args[0] if isinstance(split, Node) and split.args else None
    if not (
        isinstance(split, Node) and tagged(split, Tag.SPLITS) and source in propagation.states and len(operands) == 1
    ):
        return unknown(propagation, node, *operands)
    pick = Node(
        "part", lambda x, *a, **k: split.function(x, *a, **k)[node.args[1]], split.args, split.kwargs, node.path
    )
    up, down = replayed(pick, operands[0].up), replayed(pick, operands[0].down)
    return propagation.result(node, up, down, operands)


@rule("cat", "stack", linear=True, schur=COUNTED, tags=Tag.JOINS)
def cat(call: Call, tensors: Sequence[Any], dim: int = 0) -> Value:
    """Concatenates values: ‖(a, b)‖² = ‖a‖² + ‖b‖². Constants have constant 0."""
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
    smallest = min((lowest(t) for t in tensors if math.prod(t.shape)), default=0.0)
    return Value(call.shape, lip, magnitude=magnitude, rows=rows, floor=smallest)


@rounding("cat", "stack")
def cat_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Entries are exact, but constants among them are rounded to the deployed format."""
    args = arguments(node)
    axis = args.get("dim", 0)
    device = operands[0].nominal.device
    parts = [
        torch.zeros(t.shape, dtype=torch.float64, device=device) if isinstance(t, Node) else fmt.cast(t)
        for t in args["tensors"]
    ]
    joined = torch.cat(parts, axis) if node.op == "cat" else torch.stack(parts, axis)
    return joined.expand(len(operands[0].nominal), *node.shape)


def _assigned_once(node: Node) -> bool:
    check_assigned_once(node.operands[0].shape, arguments(node)["index"])
    return True


def check_assigned_once(shape: tuple[int, ...], index: Any) -> None:
    """Checks that an assignment assigns no position twice: torch does not define which of the values is kept."""
    # Indexing the entries' numbers with the same index gives the positions that are assigned.
    places = torch.arange(math.prod(shape)).reshape(shape)[mapped(_constant, index)].flatten()
    if len(places) != len(places.unique()):
        raise NoAnswer("positions that are assigned twice")


def _constant(leaf: Any) -> Any:
    """Part of an index that does not depend on the image, on the CPU."""
    if not isinstance(leaf, (Tensor, int, slice, type(None), type(Ellipsis))):
        raise NoAnswer("the positions depend on the image")
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


@rule("setitem", linear=_assigned_once, schur=COUNTED, tags=Tag.MOVES)
def assigned(call: Call, x: Value, index: Any, value: Any) -> Value:
    """Replaces entries of x by those of ``value``, each used at most m times: ‖δ‖² ≤ ‖δx‖² + m‖δvalue‖².

    No position is assigned twice.
    """
    check_assigned_once(x.shape, index)
    if not isinstance(value, Value):
        value = Value.constant(torch.as_tensor(value, dtype=torch.float64))
    # On the meta device indexing computes the shape only.
    places = torch.empty(x.shape, device="meta")[mapped(_to_meta, index)].numel()
    copies = Upper(-(-places // max(1, math.prod(value.shape)))).sqrt()
    floor = min(x.lowest, value.lowest)
    magnitude = max(x.magnitude, value.magnitude)
    return Value(call.shape, root_sum_squares(x.lip, value.lip * copies), magnitude=magnitude, floor=floor)


@rounding("setitem")
def assigned_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Entries are exact, but a constant among them is rounded to the deployed format."""
    args, error = arguments(node), zeros(node, operands)[0]
    if not isinstance(args["value"], Node):
        error[args["index"]] = fmt.cast(args["value"])
    return error.expand(len(operands[0].nominal), *node.shape)


@rule("expand", "repeat", "tile", linear=True, schur=COUNTED, tags=Tag.MOVES)
def expand(call: Call, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Repeats every entry m times: norm √m."""
    result = _repeated(call, x, math.prod(call.shape) // max(1, math.prod(x.shape)))
    aligned = len(call.shape) == len(x.shape)
    if aligned and all(old in (1, new) for old, new in zip(x.shape, call.shape, strict=True)):
        result.origin = x.origin if x.origin is not None and x.origin.kind in ("root", "inverse") else None
    return result


@rule("repeat_interleave", linear=True, schur=COUNTED, tags=Tag.MOVES)
def repeat_interleave(call: Call, x: Value, repeats: int | Tensor, dim: int | None = None, **kwargs: object) -> Value:
    """Repeats entries m times, where m may depend on the position: norm √(max m).

    Rows along the last axis are kept if another axis is repeated.
    """
    counts = torch.as_tensor(repeats)
    result = _repeated(call, x, int(counts.max()) if counts.numel() else 1)
    if dim is None or dim % len(x.shape) == len(x.shape) - 1:
        result.rows = None
    return result


def _repeated(call: Call, x: Value, copies: int) -> Value:
    keeps_rows = x.last_rows is not None and call.shape[-1] == x.shape[-1]
    return x.like(call.shape, x.lip * Upper(copies).sqrt(), len(call.shape) - 1 if keeps_rows else None)


@rule("pad", linear=True, schur=COUNTED, tags=Tag.MOVES)
def padded(call: Call, x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Value:
    """Constant padding adds constant entries: norm 1. The other modes repeat entries: norm √m, with m counted."""
    if mode == "constant":
        same_last = x.last_rows is not None and tuple(pad[:2]) in ((), (0, 0)) and not value
        result = x.like(call.shape, x.lip, len(call.shape) - 1 if same_last else None)
        filling = float(value or 0.0)
        result.magnitude = max(result.magnitude, Upper(abs(filling)))
        result.floor = torch.tensor(min(x.lowest, filling), dtype=torch.float64)
        if len(pad) == 2:
            along = x.floor.expand(x.shape[-1])[None, None]
            result.floor = torch.nn.functional.pad(along, list(pad), value=filling)[0, 0]
        return result
    numbers = torch.arange(math.prod(x.shape), dtype=torch.float64).reshape(x.shape)
    uses = int(torch.bincount(torch.nn.functional.pad(numbers, list(pad), mode).long().reshape(-1)).max())
    return x.like(call.shape, x.lip * Upper(uses).sqrt())


@rounding("pad")
def pad_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Entries are exact, but the constant is rounded to the deployed format."""
    args = arguments(node)
    return zeros(node, operands) + fmt.cast(float(args.get("value") or 0.0)).item()


box(
    "reshape", "permute", "getitem", "index_select", "flip", "roll", "cat", "stack", "pad",
    "expand", "repeat", "tile", "repeat_interleave",
)(nonnegative)  # fmt: skip


rounding(
    "reshape", "permute", "getitem", "index_select", "flip", "roll", "expand", "repeat",
    "tile", "repeat_interleave", "dropout",
)(exact)  # fmt: skip

tag(Tag.MOVES, "meshgrid")
