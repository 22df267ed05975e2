"""Reads the arguments of torch operations by name, for all rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from lipcert.bounds._registry import NoAnswer
from lipcert.graph import SIGNATURES, SYNONYMS, Node, evaluate_each

Known = TypeVar("Known")


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operation by name; operations without a signature take one, their operand."""
    positional, allowed = SIGNATURES.get(str(node.op), (("input",), frozenset({"input"})))
    by_name = dict(zip(positional, node.args, strict=False))
    if len(node.args) > len(positional):
        raise NoAnswer(f"{len(node.args)} positional arguments")
    for name, argument in named(node.kwargs).items():
        if name in by_name or name not in allowed:
            raise NoAnswer(f"the argument {name}")
        by_name[name] = argument
    return by_name


def named(kwargs: Any) -> dict[str, Any]:
    """Keyword arguments under their canonical names."""
    renamed = {SYNONYMS.get(name, name): argument for name, argument in kwargs.items()}
    if len(renamed) != len(kwargs):
        raise NoAnswer("two names for one argument")
    return renamed


def axis_of(node: Node) -> int:
    """The axis along which an operation runs, its ``dim``, in values with the images in front."""
    dim = arguments(node).get("dim")
    if not isinstance(dim, int):
        raise NoAnswer("not along one dimension")
    return dim % max(1, len(node.operands[0].shape)) + 1


def by_operand(node: Node, entries: Sequence[Known]) -> Callable[[Node], Known]:
    """A function from operand to its entry of ``entries``, which is in the order of ``node.operands``.

    Call it once for each argument, in any order. For an operand that is passed twice, each call returns one of its
    entries.
    """
    remaining = list(zip(node.operands, entries, strict=True))
    return lambda operand: remaining.pop([u for u, _ in remaining].index(operand))[1]


def replayed(node: Node, *tensors: Tensor) -> Tensor:
    """Evaluates the operation at other values of its operands, image by image."""
    return evaluate_each((node,), dict(zip(dict.fromkeys(node.operands), tensors, strict=True)), (node,))[node]


def per_axis(value: Any, dims: int) -> tuple[int, ...]:
    """A window argument as one number per axis."""
    return (value,) * dims if isinstance(value, int) else tuple(value if len(value) == dims else value * dims)
