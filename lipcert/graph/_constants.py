"""How a network computes the constants of its operations: tensors that do not depend on the image."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipcert.graph._forms import parts_of
from lipcert.graph._graph import Node
from lipcert.graph._operations import PART, canonical, placed
from lipcert.graph._witness import Pausable, write_count
from lipcert.numerics import leaves, mapped, spelled_out

# A constant that is not computed from others, such as ``torch.arange(9)``; its only argument is its value.
MADE = "a new tensor"
# The same, made by something that is not recorded.
UNKNOWN = "a tensor of unknown origin"


def out_of_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an in-place operation to run on a copy of its first argument, so that a replay can run repeatedly."""

    def replayed(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = first.clone()
        returned = function(copy, *args, **kwargs)
        return returned if isinstance(returned, Tensor) else copy

    return replayed


class Constants(Pausable, TorchFunctionMode):
    """Records the operations between tensors that do not depend on the image.

    Args:
        module: the network. Views of its parameters and buffers are weights, not constants that are computed.
        tracks: whether arguments contain a value that depends on the image.
        path: the path of the module that is running.
    """

    def __init__(self, module: nn.Module, tracks: Callable[[Any], bool], path: Callable[[], str]):
        super().__init__()
        self.tracks, self.path = tracks, path
        self.weights = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        self.made: dict[int, tuple[Tensor, int, Node]] = {}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or self.tracks((args, kwargs)):
            return function(*args, **kwargs)
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        first = [leaf for leaf in args[:1] if isinstance(leaf, Tensor)]
        writes = list(map(write_count, first))
        call = spelled_out(function, *self.sources((args, kwargs)))
        outcome = function(*args, **kwargs)
        in_place = list(map(write_count, first)) != writes
        made = NotImplemented
        if not in_place and isinstance(outcome, Tensor) and (parts := parts_of(canonical(function))) is not None:
            with self:
                made = parts(*args, **kwargs)
        if made is not NotImplemented:
            self.same(outcome, made)
        elif in_place:
            self.remember(*call, first[0], in_place=True)
        elif not any(outcome is tensor for tensor in given):
            self.remember(*call, outcome)
        return outcome

    def remember(
        self, function: Callable[..., Any], args: Any, kwargs: Any, outcome: Any, in_place: bool = False
    ) -> None:
        """Notes what computed the tensors of an outcome, or of its first argument if it was written ``in_place``.

        Other tensors that were written to, as through a view, are of unknown origin.
        """
        several = isinstance(outcome, (tuple, list))
        results = list(outcome) if several else [outcome]
        if not any(isinstance(result, Tensor) and self.is_new(result) for result in results):
            return
        op = canonical(function)
        if op == "rpow":
            function, op, args = torch.pow, canonical(torch.pow), args[::-1]
        args, kwargs = placed(function, op, args, kwargs, lambda value: isinstance(value, (Node, Tensor)))
        node = Node(op, out_of_place(function) if in_place else function, args, kwargs, self.path())
        fresh = not node.operands and not any(isinstance(leaf, Tensor) for leaf in leaves((args, kwargs)))
        for index, result in enumerate(results):
            if not isinstance(result, Tensor) or not self.is_new(result):
                continue
            shape, dtype = tuple(result.shape), result.dtype
            if fresh:
                made = Node(MADE, function, (self.copy(result),), {}, node.path, shape, dtype=dtype)
            elif several:
                made = Node(PART, operator.getitem, (node, index), {}, node.path, shape, dtype=dtype)
            else:
                node.shape, node.dtype, made = shape, dtype, node
            self.made[id(result)] = result, write_count(result), made

    def copy(self, tensor: Tensor) -> Tensor:
        """The numbers that a tensor has now; the network may write to it later."""
        with self.pause():
            return tensor.clone()

    def same(self, tensor: Tensor, other: Tensor) -> None:
        """Notes that a tensor holds the numbers of another, in a wider type."""
        if self.is_new(other):
            self.made[id(tensor)] = tensor, write_count(tensor), self.source(other)

    def is_new(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in self.weights

    def sources(self, tree: Any) -> Any:
        """Arguments with the nodes of computed tensors in their place."""
        return mapped(lambda leaf: self.source(leaf) if isinstance(leaf, Tensor) and self.is_new(leaf) else leaf, tree)

    def source(self, tensor: Tensor) -> Node:
        """The operation that computed a tensor."""
        _, writes, node = self.made.get(id(tensor), (None, -1, None))
        if node is None or writes != write_count(tensor):
            shape, dtype = tuple(tensor.shape), tensor.dtype
            return Node(UNKNOWN, torch.clone, (self.copy(tensor),), {}, self.path(), shape, dtype)
        return node


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """Inside the block the dictionaries of tensors that modules fill while they run are empty."""
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for part in module.modules():
        for name, value in vars(part).items():
            own = not name.startswith("_") and type(value) is dict and value
            if own and all(isinstance(item, Tensor) for item in value.values()):
                kept.append((value, dict(value)))
                value.clear()
    try:
        yield
    finally:
        for cache, entries in kept:
            cache.clear()
            cache.update(entries)
