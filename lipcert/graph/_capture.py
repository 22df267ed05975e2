"""Capturing a network by running it on a value that records what is done to it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph._graph import Graph, Node, canonical

# Questions about a tensor's form, answered from the nominal value: they make no value that depends on the image.
_FORM = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "is_contiguous",
        "element_size",
        "is_floating_point",
        "is_complex",
        "get_device",
        "storage_offset",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "result_type",
    ]
)
_IN_PLACE_OPERATORS = frozenset(["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"])
# These change the memory layout or the graph of gradients and not the value; the trailing underscore is not in place.
_PROPERTIES_THAT_ARE_OPERATIONS = frozenset(["T", "mT", "H", "mH", "real", "data"])


class Tracked:
    """A value that depends on the image: its nominal tensor and the node that made it. Deliberately not a ``Tensor``."""

    def __init__(self, tensor: Tensor, node: Node, recorder: _Recorder):
        self.tensor = tensor
        self.node = node
        self.recorder = recorder

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = next(_tracked_in((args, kwargs))).recorder
        return recorder.call(function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _PROPERTIES_THAT_ARE_OPERATIONS:
            return self.recorder.call(_property(name), (self,), {})
        attribute = getattr(self.tensor, name)
        if not callable(attribute):
            return attribute
        method = getattr(torch.Tensor, name)
        return lambda *args, **kwargs: self.recorder.call(method, (self, *args), kwargs)

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.recorder.call(torch.unbind, (self, 0), {}))

    def __bool__(self) -> bool:
        raise UnsupportedOperation([("control flow that depends on the image", self.recorder.path)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.recorder.call(torch.Tensor.__setitem__, (self, index, value), {})


def _binary(name: str, reflected: bool) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: Tracked, other: Any) -> Any:
        return self.recorder.call(function, (other, self) if reflected else (self, other), {})

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    setattr(Tracked, f"__{_name}__", _binary(_name, reflected=False))
    setattr(Tracked, f"__r{_name}__", _binary(_name, reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "getitem", "floordiv", "mod"):
    setattr(Tracked, f"__{_name}__", _binary(_name, reflected=False))
for _name in ("add", "sub", "mul", "truediv"):
    setattr(
        Tracked,
        f"__i{_name}__",
        lambda self, other, _f=getattr(torch.Tensor, f"__i{_name}__"): self.recorder.call(_f, (self, other), {}),
    )
for _name in ("neg", "abs"):
    setattr(Tracked, f"__{_name}__", lambda self, _f=getattr(torch, _name): self.recorder.call(_f, (self,), {}))
Tracked.__hash__ = object.__hash__  # type: ignore[method-assign]


def _property(name: str) -> Callable[[Tensor], Tensor]:
    def read(tensor: Tensor) -> Tensor:
        return getattr(tensor, name)

    read.__name__ = "detach" if name in ("data", "real") else name
    read.__module__ = "torch"
    return read


def _tracked_in(tree: Any) -> Iterator[Tracked]:
    if isinstance(tree, Tracked):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tracked_in(item)
    elif isinstance(tree, dict):
        yield from _tracked_in(list(tree.values()))


def _map_tracked(function: Callable[[Tracked], Any], tree: Any) -> Any:
    if isinstance(tree, Tracked):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        mapped = [_map_tracked(function, item) for item in tree]
        return mapped if isinstance(tree, list) else tuple(mapped)
    if isinstance(tree, dict):
        return {key: _map_tracked(function, item) for key, item in tree.items()}
    return tree


class _Recorder:
    """The nodes so far, and where in the model the forward code is."""

    def __init__(self, whole: Callable[[nn.Module], bool], paths: dict[nn.Module, str]):
        self.whole = whole
        self.paths = paths
        self.nodes: list[Node] = []
        self.stack: list[str] = []

    @property
    def path(self) -> str:
        return self.stack[-1] if self.stack else ""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs ``function`` on the nominal values and records it."""
        name = getattr(function, "__name__", "")
        target: Tracked | None = None
        if name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace"):
            if not args or not isinstance(args[0], Tracked):
                raise UnsupportedOperation([(f"{name} into a tensor that does not depend on the image", self.path)])
            # Written to a copy: a view of the old value that the forward code reads later would differ from the
            # network's own result, and `capture` compares the two.
            target = args[0]
            target.tensor = target.tensor.clone()
        elif kwargs.get("out") is not None:
            raise UnsupportedOperation([(f"{name}(out=...)", self.path)])
        nominal_args, nominal_kwargs = _map_tracked(lambda value: value.tensor, (args, kwargs))
        outcome = function(*nominal_args, **nominal_kwargs)
        if name in _FORM:
            return outcome
        node_args, node_kwargs = _map_tracked(lambda value: value.node, (args, kwargs))
        if target is not None:
            function = _out_of_place(function)
            node_kwargs.pop("inplace", None)
            outcome = target.tensor
        node = Node(canonical(function), function, node_args, node_kwargs, self.path)
        wrapped = self.wrap(outcome, node)
        if target is not None:
            target.node = node
            return target
        return wrapped

    def wrap(self, outcome: Any, node: Node) -> Any:
        """The recorded counterpart of an operation's outcome; numbers and shapes pass through unrecorded."""
        if isinstance(outcome, Tensor):
            node.shape = tuple(outcome.shape)
            self.nodes.append(node)
            return Tracked(outcome, node, self)
        if isinstance(outcome, (tuple, list)) and outcome and all(isinstance(part, Tensor) for part in outcome):
            self.nodes.append(node)
            parts = []
            for index, part in enumerate(outcome):
                pick = Node("part", operator.getitem, (node, index), {}, self.path, tuple(part.shape))
                self.nodes.append(pick)
                parts.append(Tracked(part, pick, self))
            return tuple(parts)
        return outcome

    def call_module(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a module's own forward code, keeping the module whole where the caller asked for that."""
        self.stack.append(self.paths.get(module, self.path))
        outer = self.nodes
        keep = self.whole(module) and any(True for _ in _tracked_in((args, kwargs)))
        try:
            if not keep:
                return forward(module, *args, **kwargs)
            node_args, node_kwargs = _map_tracked(lambda value: value.node, (args, kwargs))
            self.nodes = []
            outcome = forward(module, *args, **kwargs)
            if not isinstance(outcome, Tracked):
                raise UnsupportedOperation([(f"{type(module).__name__} with several outputs", self.path)])
            node = Node(
                type(module),
                module,
                (*node_args,),
                node_kwargs,
                self.path,
                tuple(outcome.tensor.shape),
                inner=tuple(self.nodes),
                result=outcome.node,
            )
            outer.append(node)
            return Tracked(outcome.tensor, node, self)
        finally:
            self.nodes = outer
            self.stack.pop()


def _out_of_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same operation, leaving its first argument as it is, so that a replay can run twice."""

    def replayed(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = first.clone()
        returned = function(copy, *args, **kwargs)
        return returned if isinstance(returned, Tensor) else copy

    replayed.__name__ = getattr(function, "__name__", "in_place")
    replayed.__module__ = "torch" if isinstance(canonical(function), str) else getattr(function, "__module__", "")
    return replayed


@contextmanager
def _module_calls_go_to(recorder: _Recorder) -> Iterator[None]:
    original = nn.Module.__call__

    def patched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(original, module, args, kwargs)

    nn.Module.__call__ = patched  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def capture(module: nn.Module, images: Tensor, whole: Callable[[nn.Module], bool] = lambda module: False) -> Graph:
    """Captures what ``module`` does with ``images``.

    Args:
        module: the network, in evaluation mode.
        images: example input, shape (1, C, H, W). Its values matter only in that the captured result must equal
            the network's own on them; random ones make a difference visible.
        whole: modules for which this returns True become one node each, with their operations in ``node.inner``.

    Returns:
        The graph from the images to the module's output.

    Raises:
        InputError: the module is in training mode, or returns something other than one tensor.
        UnsupportedOperation: forward code that branches on the image's values, or writes through views in a way
            that would make the captured network differ from the module.
    """
    if module.training:
        raise InputError("the model is in training mode; call model.eval() first")
    recorder = _Recorder(whole, {child: path for path, child in module.named_modules()})
    start = Node("input", lambda: None, (), {}, "", tuple(images.shape))
    with torch.no_grad():
        truth = module(images)
        if not isinstance(truth, Tensor):
            raise InputError(f"the model must return one tensor of logits, it returns {type(truth).__name__}")
        with _module_calls_go_to(recorder):
            outcome = module(Tracked(images.clone(), start, recorder))
    if not isinstance(outcome, Tracked):
        raise InputError("the model's output does not depend on the image")
    if outcome.tensor.shape != truth.shape or not torch.equal(outcome.tensor, truth):
        gap = (outcome.tensor - truth).abs().max().item() if outcome.tensor.shape == truth.shape else float("inf")
        if not gap <= 1e-4 * (1 + truth.abs().max().item()):
            raise UnsupportedOperation([(f"in-place writes through views (captured output differs by {gap:.3g})", "")])
    return Graph(start, outcome.node, (start, *recorder.nodes))
