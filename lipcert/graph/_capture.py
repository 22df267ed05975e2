"""Captures a network by running it on a value that records the operations applied to it."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lipcert.errors import InputError, LipcertError, UnsupportedCode, first_line
from lipcert.graph._constants import Constants, out_of_place, without_caches
from lipcert.graph._forms import APART, REPLAYED_AS, code_of, parts_of
from lipcert.graph._graph import Graph, Node, tensors_in
from lipcert.graph._intact import check_torch, is_plain
from lipcert.graph._operations import COPY, PART, PIECE, canonical, placed
from lipcert.graph._witness import (
    FORMED_LIKE,
    MOVED,
    NOISE,
    Derived,
    compared,
    examine,
    same_operations,
    without_fused_kernels,
    write_count,
)
from lipcert.numerics import (
    RealArithmetic,
    in_real_arithmetic,
    is_out_of_memory,
    leaves,
    mapped,
    matmul_precision,
    spelled_out,
)

# Queries of shape, layout or type. The nominal tensor answers them; the result does not depend on the image.
_FORM = frozenset(
    ("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size", "is_floating_point",
     "is_complex", "get_device", "storage_offset", "result_type", *FORMED_LIKE)
)  # fmt: skip
_IN_PLACE_OPERATORS = frozenset(
    ("__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
     "__setitem__")
)  # fmt: skip
_PROPERTIES_THAT_ARE_OPERATIONS = frozenset(["T", "mT", "H", "mH", "real", "data"])
# These operations read only the shape or type of their second argument. If only that argument depends on the image, the
# result does not.
_TEMPLATES = frozenset(["expand_as", "view_as", "reshape_as", "type_as", "to"])


class Tracked:
    """A value that depends on the image: its nominal tensor and its node. Deliberately not a ``Tensor``.

    ``overwritten_by`` names an in-place operation that wrote to this value's memory through another value. The network
    would see that change; the recorded operations do not. Reading such a value is refused.
    """

    def __init__(self, tensor: Tensor, node: Node, recorder: _Recorder):
        self.tensor = tensor
        self.node = node
        self.recorder = recorder
        self.overwritten_by = ""
        recorder.live[id(self)] = self

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = next(_tracked_in((args, kwargs))).recorder
        return recorder.call(function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "T":
            return self.recorder.call(torch.Tensor.permute, (self, *reversed(range(self.tensor.dim()))), {})
        if name in _PROPERTIES_THAT_ARE_OPERATIONS and not (name == "real" and self.tensor.is_complex()):
            return self.recorder.call(_property(name), (self,), {})
        attribute = getattr(self.tensor, name)
        if isinstance(attribute, Tensor):
            raise self.recorder.refusal(f".{name}")
        if not callable(attribute):
            return attribute
        method = getattr(torch.Tensor, name)
        return lambda *args, **kwargs: self.recorder.call(method, (self, *args), kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tensor", "node", "recorder", "overwritten_by"):
            raise self.recorder.refusal(f"assignment to .{name} of a tensor")
        object.__setattr__(self, name, value)

    def __copy__(self) -> Any:
        return self.recorder.call(torch.clone, (self,), {})

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()

    def __format__(self, form: str) -> str:
        raise self.recorder.refusal("formatting the image's values as text")

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.recorder.call(torch.unbind, (self, 0), {}))

    def __bool__(self) -> bool:
        raise self.recorder.refusal("control flow that depends on the image")

    def __index__(self) -> Any:
        raise self.recorder.refusal("a Python number taken from the image")

    __float__ = __int__ = __index__

    def __setitem__(self, index: Any, value: Any) -> None:
        self.recorder.call(torch.Tensor.__setitem__, (self, index, value), {})


def _binary(name: str, reflected: bool) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: Tracked, other: Any) -> Any:
        return self.recorder.call(function, (other, self) if reflected else (self, other), {})

    return method


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *operands: self.recorder.call(function, (self, *operands), {})


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    setattr(Tracked, f"__{_name}__", _binary(_name, reflected=False))
    setattr(Tracked, f"__r{_name}__", _binary(_name, reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "getitem", "floordiv", "mod"):
    setattr(Tracked, f"__{_name}__", _binary(_name, reflected=False))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Tracked, f"__i{_name}__", _calling(getattr(torch.Tensor, f"__i{_name}__")))
for _name, _as in (("neg", torch.neg), ("abs", torch.abs), ("pos", torch.positive), ("invert", torch.bitwise_not)):
    setattr(Tracked, f"__{_name}__", _calling(_as))
Tracked.__hash__ = object.__hash__  # type: ignore[method-assign]


def _property(name: str) -> Callable[[Tensor], Tensor]:
    def read(tensor: Tensor) -> Tensor:
        return getattr(tensor, name)

    read.__name__ = "detach" if name in ("data", "real") else name
    read.__module__ = "torch"
    return read


def _tracked_in(tree: Any) -> Iterator[Tracked]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tracked))


def _tracks(tree: Any) -> bool:
    return any(True for _ in _tracked_in(tree))


def _share_memory(first: Tensor, second: Tensor) -> bool:
    """Whether a write to one tensor may change the other. On the meta device all addresses are 0 and are ignored."""
    a, b = first.untyped_storage(), second.untyped_storage()
    return a._cdata == b._cdata or a.data_ptr() == b.data_ptr() != 0


def _tensors(tree: Any) -> Any:
    """The tree with nominal tensors in place of tracked values."""
    return mapped(lambda leaf: leaf.tensor if isinstance(leaf, Tracked) else leaf, tree)


def _nodes(tree: Any) -> Any:
    """The tree with nodes in place of tracked values."""
    return mapped(lambda leaf: leaf.node if isinstance(leaf, Tracked) else leaf, tree)


class _Recorder:
    """Records the nodes and the module that is currently running."""

    def __init__(
        self, module: nn.Module, images: Tensor, whole: Callable[[nn.Module], bool], real: bool, constants: bool = False
    ):
        self.whole = whole
        self.paths = {child: path for path, child in module.named_modules()}
        self.real = real
        self.start = Node("input", lambda: None, (), {}, "", tuple(images.shape), dtype=images.dtype)
        self.nodes: list[Node] = []
        self.stack: list[str] = []
        self.failed: str | None = None  # the path of the module that raised an error
        self.live: weakref.WeakValueDictionary[int, Tracked] = weakref.WeakValueDictionary()
        self.constants: list[tuple[Tensor, int, str, str]] = []
        self.computed = Constants(module, _tracks, lambda: self.path) if constants else None
        self.derived: Derived | None = None
        self.problems: list[tuple[str, str]] = []
        self.precision = matmul_precision()
        if (einops := sys.modules.get("einops._backends")) is not None:  # it finds a backend by type
            getattr(einops, "_type2backend", {})[Tracked] = einops.get_backend(images)

    @property
    def path(self) -> str:
        return self.stack[-1] if self.stack else ""

    def refusal(self, problem: str) -> UnsupportedCode:
        """The error of a problem at the current place; the network is refused even if its code catches it."""
        self.problems.append((problem, self.path))
        return UnsupportedCode(self.problems[-1:])

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs ``function`` on the nominal values and records it."""
        if (code := code_of(function)) is not None:
            with self.computed or nullcontext():
                return code(*args, **kwargs)
        function, args, kwargs = spelled_out(function, args, kwargs)
        if self.real:
            given = list(tensors_in((args, kwargs)))
            function, args, kwargs = in_real_arithmetic(function, args, kwargs)
            for tensor, widened in zip(given, tensors_in((args, kwargs)), strict=True):
                if self.computed is not None and tensor is not widened:
                    self.computed.same(widened, tensor)
        op = canonical(function)
        if op != PIECE and any(isinstance(leaf, np.ndarray) for leaf in leaves((args, kwargs))):
            raise self.refusal("a NumPy array among the operands")
        args, kwargs = placed(function, op, args, kwargs, _tracks)
        name = getattr(function, "__name__", "")
        if name in _TEMPLATES and args and isinstance(args[0], Tensor):
            outcome = function(*_tensors(args), **kwargs)
            if self.computed is not None:
                functions: dict[str, Callable[..., Any]] = {"to": Tensor.to, "expand_as": Tensor.expand}
                instead = functions.get(name, Tensor.reshape)
                rest = args[1:] if name == "to" else (tuple(outcome.shape),)
                self.computed.remember(instead, (self.computed.sources(args[0]), *rest), kwargs, outcome)
            return outcome
        form = name in _FORM and not _tracks((args[1:], kwargs))
        if not form:
            self.check_current((args, kwargs))
        target: Tracked | None = None
        if _writes_in_place(function, name, args, kwargs):
            if not args or not isinstance(args[0], Tracked):
                raise self.refusal(f"{name} into a tensor that does not depend on the image")
            target = args[0]
            for value in self.live.values():
                if value is not target and _share_memory(value.tensor, target.tensor):
                    value.overwritten_by = name
            target.tensor = target.tensor.clone()
        elif kwargs.get("out") is not None:
            raise self.refusal(f"{name}(out=...)")
        if (other := next((x for x in tensors_in((args, kwargs)) if not is_plain(x)), None)) is not None:
            raise self.refusal(f"{name} with a tensor of class {type(other).__name__}")
        self.constants += [(tensor, write_count(tensor), name, self.path) for tensor in tensors_in((args, kwargs))]
        nominal_args, nominal_kwargs = _tensors((args, kwargs))
        operands = [value for value in _tracked_in((args, kwargs)) if value is not target]
        versions = [write_count(value.tensor) for value in operands]
        if matmul_precision() != self.precision:
            raise self.refusal("code that changes the precision of float32 products")
        marks, constants = (x.pause() if x else nullcontext() for x in (self.derived, self.computed))
        with torch.no_grad(), marks, constants:
            outcome = function(*nominal_args, **nominal_kwargs)
        if versions != [write_count(value.tensor) for value in operands]:
            raise self.refusal(f"{name} writing into its operand")
        if form:
            if self.computed is not None:
                self.computed.remember(function, (), {}, outcome)
            return outcome
        if target is None and (parts := parts_of(op)) is not None:
            composed = self.composed(parts, args, kwargs, outcome)
            if composed is not NotImplemented:
                return composed
        node_args, node_kwargs = _nodes((args, kwargs))
        function = REPLAYED_AS.get(op, REPLAYED_AS.get(function, function))
        if target is not None:
            if target.tensor.shape != target.node.shape:
                raise self.refusal(f"{name}, which changes a tensor's shape in place")
            function = out_of_place(function)
            node_kwargs.pop("inplace", None)
            outcome = target.tensor
        if op == COPY and name in ("contiguous", "clone"):  # vmap supports only the default memory layout
            node_args, node_kwargs = node_args[:1], {}
        if name in ("detach", "detach_"):  # replays are differentiated, and a detached value still depends on the image
            function = torch.clone
        apart = APART.get(op, ())
        if apart and isinstance(outcome, tuple):
            nodes = [Node(*part, node_args, node_kwargs, self.path) for part in apart]
            return type(outcome)([self.wrap(part, node) for part, node in zip(outcome, nodes, strict=True)])
        if apart and len(node_args) + len(node_kwargs) == 1:  # the largest or smallest of all entries
            op, function = apart[0]
        wrapped = self.wrap(outcome, Node(op, function, node_args, node_kwargs, self.path))
        if target is not None:
            target.node = wrapped.node
            return target
        return wrapped

    def composed(
        self, parts: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Tensor
    ) -> Any:
        """Records a function as its parts; ``outcome`` is the function's own result, which the network reads on."""
        with self.computed or nullcontext():
            result = parts(*args, **kwargs)
        if result is NotImplemented:
            return result
        if result.tensor.shape != outcome.shape:
            raise self.refusal(f"arguments of {getattr(parts, '__name__', 'a function')}")
        result.tensor = outcome
        return result

    def run(self, module: nn.Module, images: Tensor) -> Any:
        """Runs the module on a tracked value. The module may write to ``images``."""
        try:
            caches = nullcontext() if self.computed is None else without_caches(module)
            with _module_calls(self.call_module), caches, self.computed or nullcontext():
                return module(Tracked(images, self.start, self))
        except LipcertError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            problem = f"code that accepts only tensors ({type(error).__name__}: {first_line(error)[:200]})"
            if "Expected a value of type 'Tensor" in problem:
                problem = (
                    "a function of torch.jit.script (call the one that it was made of), which hides its operations"
                )
            raise UnsupportedCode([(problem, self.failed or "")]) from error

    def check_current(self, tree: Any) -> None:
        """Refuses values whose memory was changed through another value."""
        for value in _tracked_in(tree):
            if value.overwritten_by:
                raise self.refusal(f"reading a value that {value.overwritten_by} changed in place through a view")

    def wrap(self, outcome: Any, node: Node) -> Any:
        """Wraps the result of an operation in tracked values."""
        if isinstance(outcome, Tensor):
            if outcome.is_floating_point() and outcome.dtype.itemsize == 1:
                raise self.refusal(f"a cast to {str(outcome.dtype)[6:]}")
            node.shape, node.dtype = tuple(outcome.shape), outcome.dtype
            self.nodes.append(node)
            return Tracked(outcome, node, self)
        if isinstance(outcome, (tuple, list)) and all(part is None or isinstance(part, Tensor) for part in outcome):
            self.nodes.append(node)
            parts: list[Tracked | None] = [None] * len(outcome)
            for index, part in enumerate(outcome):
                if part is not None:
                    pick = Node(PART, operator.getitem, (node, index), {}, self.path, tuple(part.shape), part.dtype)
                    self.nodes.append(pick)
                    parts[index] = Tracked(part, pick, self)
            return type(outcome)(parts)
        if isinstance(outcome, (str, torch.dtype, torch.device)):
            return outcome
        raise self.refusal(f"{node.name} that converts the image's values to {type(outcome).__name__}")

    def call_module(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a module's forward code; records the module as one node if ``whole`` asks for it."""
        self.stack.append(self.paths.get(module, self.path))
        outer = self.nodes
        keep = self.whole(module) and _tracks((args, kwargs))
        try:
            if not keep:
                return forward(module, *args, **kwargs)
            args, kwargs = placed(module.forward, type(module), args, kwargs, _tracks)
            self.check_current((args, kwargs))
            inputs = list(_tracked_in((args, kwargs)))
            node_args, node_kwargs = _nodes((args, kwargs))
            self.nodes = []
            outcome = forward(module, *args, **kwargs)
            if not isinstance(outcome, Tracked):
                raise self.refusal(f"{type(module).__name__} with several outputs")
            shape, dtype = tuple(outcome.tensor.shape), outcome.tensor.dtype
            node = Node(type(module), module, (*node_args,), node_kwargs, self.path, shape, dtype)
            readable = {*node.operands, *self.nodes}
            if not {outcome.node, *(operand for part in self.nodes for operand in part.operands)} <= readable:
                raise self.refusal(f"{node.name} reading values that are not its inputs")
            if any(value.node not in node.operands for value in inputs):
                raise self.refusal(f"{node.name} writing into its input")
            outer.append(node)
            return Tracked(outcome.tensor, node, self)
        except Exception:
            self.failed = self.path if self.failed is None else self.failed
            raise
        finally:
            self.nodes = outer
            self.stack.pop()

    def graph(self, outcome: Any) -> Graph:
        """The recorded graph from the image to the module's output."""
        if self.problems:
            raise UnsupportedCode(self.problems[:8])
        if not isinstance(outcome, Tracked):
            raise InputError("the model's output does not depend on the image; check its forward code")
        self.check_current(outcome)
        for constant, version, name, path in self.constants:
            if write_count(constant) != version:
                raise UnsupportedCode([(f"{name} with a tensor that is written to later", path)])
        computed = {}
        if self.computed is not None:
            for constant, *_ in self.constants:
                if self.computed.is_new(constant):
                    computed[id(constant)] = self.computed.source(constant)
        return Graph(self.start, outcome.node, (self.start, *self.nodes), computed=computed)


@contextmanager
def _module_calls(call: Callable[[Callable[..., Any], nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Replaces every module call inside the ``with`` block by ``call(original, module, args, kwargs)``."""
    original = nn.Module._call_impl  # another __call__ would take milliseconds: each subclass gets a new slot

    @functools.wraps(original)
    def patched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(original, module, args, kwargs)

    nn.Module._call_impl = patched  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module._call_impl = original  # type: ignore[method-assign]


def _writes_in_place(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        return True
    if inspect.isbuiltin(function) or inspect.ismethoddescriptor(function):  # none takes inplace by place
        return bool(kwargs.get("inplace"))
    try:
        return bool(inspect.signature(function).bind(*args, **kwargs).arguments.get("inplace"))
    except (TypeError, ValueError):
        return bool(kwargs.get("inplace"))


def capture(
    module: nn.Module,
    images: Tensor,
    whole: Callable[[nn.Module], bool] = lambda module: False,
    *,
    constants: bool = False,
    gradients: bool = False,
) -> Graph:
    """Captures the operations that ``module`` applies to ``images``.

    In float64 the graph is the network in real arithmetic, where casts between floating-point types are the identity:
    see :func:`lipcert.numerics.in_real_arithmetic`. With ``constants``, ``computed`` of the graph has what computes
    its constants.
    """
    check_torch()
    for path, child in module.named_modules():
        if child.training:
            raise InputError(f"{path or 'the model'} is in training mode; call model.eval() first")
    real = images.dtype == torch.float64 or getattr(module, "real", False) is True
    if gradients:
        recorder = _Recorder(module, images, whole, real, constants)
        with torch.enable_grad():
            return recorder.graph(recorder.run(module, images))

    def captured(noise: float = 0.0) -> tuple[Graph, bool]:
        recorder = _Recorder(module, images, whole, real, constants and not noise)
        with Derived((*module.parameters(), *module.buffers()), noise) as derived:
            recorder.derived = derived
            return recorder.graph(recorder.run(module, images.clone())), derived.computes

    with torch.no_grad(), RealArithmetic() if real else nullcontext():
        examined = examine(module, images, real)
        graph, computes = captured()
        with without_fused_kernels():
            compared(graph, examined)
        if computes and images.dtype == torch.float64:
            when = "if rounding errors are larger; large numbers may cancel where the constants are computed"
            same_operations(graph, captured(NOISE)[0], when, MOVED)
    return graph


def unchecked(
    module: nn.Module, images: Tensor, whole: Callable[[nn.Module], bool], *, constants: bool = False
) -> Graph:
    """Captures as :func:`capture` without any check: for types and shapes, never for bounds.

    Casts are included, except of a module that computes in real arithmetic.
    """
    recorder = _Recorder(module, images, whole, getattr(module, "real", False) is True, constants)
    with torch.no_grad():
        return recorder.graph(recorder.run(module, images.clone()))
