"""Nested arguments of operations: tuples, lists and dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists, values of dictionaries, and slices."""
    if isinstance(tree, slice):
        tree = (tree.start, tree.stop, tree.step)
    elif isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        yield tree
        return
    for item in tree:
        yield from leaves(item)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with ``function(leaf)`` in place of every leaf; slices are leaves here."""
    if isinstance(tree, (tuple, list)):
        items = [mapped(function, item) for item in tree]
        if isinstance(tree, list):
            return items
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, dict):
        return {key: mapped(function, item) for key, item in tree.items()}
    return function(tree)
