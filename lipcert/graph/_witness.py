"""Checks that a captured graph is what the module does with ordinary tensors.

``capture`` runs a network's code on a value that is not a tensor, and code can treat that value differently from a
tensor. Here the module runs on ordinary tensors, for several images. A ``TorchDispatchMode`` records every kernel that
torch calls and the memory that depends on the image. A network is refused if its code

- reads values that depend on the image out of a tensor (as a number, a list, an array, a size or an error);
- behaves differently with gradients enabled or in inference mode;
- draws random numbers, gives two results for one image, uses values that it kept from an earlier image, or changes its
  own parameters, buffers or attributes;
- runs other steps for other images or in another floating-point type: other kernels, other sizes, other numbers, or
  other tensors that do not depend on the image;
- computes constants from its parameters in which large numbers cancel, so that they are not those of real arithmetic.

The remaining networks are straight-line code: they run the same kernels on the same constants for every image that was
tried. :func:`lipcert.graph.capture` then compares the captured graph with the module on the same images.

These checks are for code that does such a thing by accident, not for code that hides it. Assumptions on the network's
code: it does not inspect or disable torch's dispatcher; it does not read process memory, the time, files or the call
stack; it does not read values in another thread, or depend on a count of earlier runs.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lipcert.errors import LipcertError, UnsupportedCode, first_line
from lipcert.graph._graph import Graph
from lipcert.graph._looks import Look, Step, close, differences, kernel_tolerance, same
from lipcert.graph._passes import passed
from lipcert.numerics import RealArithmetic, is_out_of_memory, leaves, matmul_precision, random_states, without_cudnn

# Kernels whose result depends on values, in addition to those that torch tags as data dependent.
# Some have a tagged overload; torch does not tag the overloads that write to ``out``.
_READING = frozenset(
    ("is_nonzero", "_assert_async", "_linalg_check_errors", "_to_sparse", "to_sparse", "_nnz",
     "nonzero", "_unique2", "unique_consecutive", "unique_dim", "masked_select", "bincount")
)  # fmt: skip
# Batch normalisation updates its running statistics in training mode. Most of the schemas do not say that it writes.
_STATISTICS = ("running_mean", "running_var")
_KEEPING_STATISTICS = ("_native_batch_norm_legit_no_training.default", "_batch_norm_no_update.default")
# Functions of tensors that read values without calling a kernel, or hide the kernel from the modes:
# ``torch.tensor([x])`` calls ``x.__float__()`` with its kernel hidden.
_READING_MEMORY = frozenset(
    ("item", "__bool__", "__int__", "__long__", "__index__", "__float__", "__complex__",
     "numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage",
     "__repr__", "__str__", "__format__", "__reduce_ex__", "_is_view", "_base")
)  # fmt: skip
# Functions that read tensors out of a list argument, also hidden from the modes.
_READING_LISTS = frozenset(("tensor", "as_tensor", "asarray", "new_tensor", "new"))
# Constants that a network computes from its weights are computed again with relative errors of about _NOISE in every
# operation, 1024 times those of float64. They may move by _MOVED of their largest entry, so rounding moves them by
# about 2⁻³⁸.
_NOISE, _MOVED = 2.0**-43, 2.0**-28
# Functions that torch computes in float32 for narrower types. Their rounding rules hold for that as well.
_WIDENING = (F.rms_norm, torch.rms_norm, F.batch_norm, torch.batch_norm, F.scaled_dot_product_attention)


class _Dependent:
    """The memory that depends on the image of this run, or on those of earlier runs."""

    def __init__(self, before: _Dependent | None = None) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        earlier: dict[int, StorageWeakRef] = {} if before is None else before._before | before._storages
        self._before: dict[int, StorageWeakRef] = {
            place: storage for place, storage in earlier.items() if not storage.expired()
        }

    def add(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def __contains__(self, tensor: Tensor) -> bool:
        return self.is_new(tensor) or tensor.untyped_storage()._cdata in self._before

    def is_new(self, tensor: Tensor) -> bool:
        """Whether the memory depends on the image of this run."""
        return tensor.layout != torch.strided or tensor.untyped_storage()._cdata in self._storages


# What depended on images in a module's last look. Code may have kept some of it, in the module or elsewhere.
_DEPENDENT: weakref.WeakKeyDictionary[nn.Module, _Dependent] = weakref.WeakKeyDictionary()


class _Kernels(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, look: Look, module: nn.Module, dependent: _Dependent, stack: list[str], noise: float):
        super().__init__()  # type: ignore[no-untyped-call]
        self.look, self.noise = look, noise
        self.weights = _Dependent()
        for tensor in (*module.parameters(), *module.buffers()):
            self.weights.add(tensor)
        self.generator = torch.Generator().manual_seed(0)
        held = (tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.layout == torch.strided)
        self.held = {tensor.untyped_storage()._cdata for tensor in held}
        self.dependent = dependent
        self.stack = stack
        self.precision = matmul_precision()
        self.widening = False

    def problem(self, description: str) -> None:
        self.look.problems.append((description, (self.stack or [""])[-1]))

    def recorded(self, constant: Tensor) -> Tensor:
        """An alias of the constant if it lies in a parameter or buffer, which nothing may write to; else a copy."""
        return constant.detach() if self.is_held(constant) else constant.clone()

    def computed(self, outcome: Any, arguments: list[Tensor], written: list[Tensor]) -> Any:
        """The result of a kernel on weights alone, marked as such, and with noise unless it is a view."""
        before = {tensor.untyped_storage()._cdata for tensor in arguments if tensor.layout == torch.strided}

        def marked(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
                return leaf
            overwritten = _in(leaf, written)
            if overwritten or leaf.untyped_storage()._cdata not in before:
                self.look.computes = True
                if self.noise and leaf.is_floating_point() and not self.is_held(leaf):
                    drawn = torch.randn(leaf.shape, generator=self.generator, dtype=leaf.dtype)
                    noisy = leaf * (1 + self.noise * drawn.to(leaf.device))
                    leaf = leaf.copy_(noisy) if overwritten else noisy
            self.weights.add(leaf)
            return leaf

        return tree_map(marked, outcome)

    def is_held(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self.held

    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(kernel, torch._ops.OpOverload):  # such as torch.cond, whose arguments are functions
            self.problem(f"{kernel}, which is not an operation on tensors")
            return kernel(*args, **kwargs)
        name = kernel.__name__.split(".")[0]
        given = list(leaves((args, kwargs)))
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        touched = [tensor for tensor in tensors if tensor in self.dependent]
        if not all(map(self.dependent.is_new, touched)):
            self.problem(f"{name} of values that are kept from an earlier image")
        if touched and _reads(kernel, name, args, touched):
            self.problem(f"{name}, which reads values that depend on the image")
        if matmul_precision() != self.precision:
            self.problem("code that changes the precision of float32 products")
        step = Step(name.rstrip("_"), (), [], (self.stack or [""])[-1])
        if touched:
            step.constants = [self.recorded(tensor) for tensor in tensors if tensor not in self.dependent]
        chance = random_states() if touched and torch.Tag.nondeterministic_seeded in kernel.tags else None
        try:
            outcome = kernel(*args, **kwargs)
        except Exception:
            if touched:
                self.problem(f"{name}, which raises an error for some values")
            raise
        if chance is not None and chance != random_states():
            self.problem(f"{name}, which draws random numbers")
        written = [leaf for leaf in leaves(_written(kernel, args, kwargs)) if isinstance(leaf, Tensor)]
        if any(self.is_held(tensor) for tensor in written):
            self.problem(f"{name}, which writes to a parameter or buffer")
        if touched:
            results = [leaf for leaf in leaves(outcome) if isinstance(leaf, Tensor)]
            if any(tensor.layout != torch.strided for tensor in results):
                self.problem(f"{name}, whose result is not a dense tensor")
            for tensor in (*results, *written):
                self.dependent.add(tensor)
            sizes = tuple(tuple(t.shape) if t.layout == torch.strided else () for t in (*tensors, *results))
            if not self.widening:
                step.types = frozenset(t.dtype for t in (*touched, *results, *written) if t.is_floating_point())
            step.form = (sizes, tuple(_number(leaf) for leaf in given if _counts(leaf)))
            self.look.steps.append(step)
        elif any(tensor.layout == torch.strided and tensor in self.weights for tensor in tensors):
            return self.computed(outcome, tensors, written)
        return outcome


class _Functions(TorchFunctionMode):
    """Detects functions that read memory without a kernel."""

    def __init__(self, kernels: _Kernels):
        super().__init__()
        self.kernels = kernels

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        dependent = self.kernels.dependent
        if name in _READING_MEMORY and args and isinstance(args[0], Tensor) and args[0] in dependent:
            self.kernels.problem(f"Tensor.{name}, which reads values that depend on the image")
        lists = [argument for argument in args if isinstance(argument, (list, tuple))] if name in _READING_LISTS else []
        if any(isinstance(leaf, Tensor) and leaf in dependent for leaf in tree_leaves(lists)):
            self.kernels.problem(f"{name} of a list, which reads values that depend on the image")
        self.kernels.widening = function in _WIDENING
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.kernels.widening = False


def _reads(kernel: Any, name: str, args: tuple[Any, ...], touched: list[Tensor]) -> bool:
    if name == "index":  # tagged because a mask's number of True entries is a size; integer indices have fixed sizes
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] if _in(i, touched))
    tagged = torch.Tag.data_dependent_output in kernel.tags or torch.Tag.dynamic_output_shape in kernel.tags
    return tagged or name in _READING


def _in(tensor: Any, tensors: list[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


@functools.cache
def _parameters(kernel: Any) -> dict[str, bool]:
    """A kernel's parameters, and whether its schema says that it writes to them; {} if it writes to none."""
    parameters = kernel._schema.arguments
    if not kernel._schema.is_mutable and not any(parameter.name in _STATISTICS for parameter in parameters):
        return {}
    return {p.name: p.alias_info is not None and p.alias_info.is_write for p in parameters}


def _written(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a kernel writes to."""
    parameters = _parameters(kernel)
    if not parameters:
        return []
    values = {name: kwargs.get(name) for name in parameters} | dict(zip(parameters, args, strict=False))
    updated = _STATISTICS if values.get("training", kernel.__name__ not in _KEEPING_STATISTICS) else ()
    return [values[name] for name, writes in parameters.items() if writes or name in updated]


def write_count(tensor: Tensor) -> int:
    """The number of in-place writes to the tensor; 0 for inference tensors, which cannot be written to."""
    return 0 if tensor.is_inference() else tensor._version


def _counts(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (bool, int, float, complex, str))


def _number(leaf: Any) -> Any:
    return "nan" if isinstance(leaf, float) and leaf != leaf else leaf


@contextmanager
def _path_of_calls(module: nn.Module) -> Iterator[list[str]]:
    """The paths of the modules that are running, the innermost last, while the ``with`` block runs the network."""
    stack, paths = [""], {child: path for path, child in module.named_modules()}

    def entered(original: Callable[..., Any], child: nn.Module, args: Any, kwargs: Any) -> Any:
        stack.append(paths.get(child, stack[-1]))
        try:
            return original(child, *args, **kwargs)
        finally:
            stack.pop()

    with module_calls(entered):
        yield stack


def look(module: nn.Module, image: Tensor, stack: list[str], noise: float = 0.0) -> Look:
    """Runs the module on a copy of one image, shape (1, C, H, W), and records the kernels.

    With ``noise``, constants that it computes from its weights get relative errors of about that size.
    """
    pixels = image.clone()
    with watched(module, pixels, stack, noise) as kernels, _Functions(kernels):
        kernels.look.result = module(pixels)
    passed()
    kernels.look.held = {place for place, tensor in _tensors_held(module) if kernels.dependent.is_new(tensor)}
    return kernels.look


@contextmanager
def watched(module: nn.Module, pixels: Tensor, stack: list[str], noise: float = 0.0) -> Iterator[_Kernels]:
    """Records, inside the ``with`` block, the kernel calls with an argument that depends on ``pixels``."""
    dependent = _DEPENDENT[module] = _Dependent(_DEPENDENT.get(module))
    dependent.add(pixels)
    kernels = _Kernels(Look(pixels.clone()), module, dependent, stack, noise)
    with torch.no_grad(), _one_kernel_for_all_types(), kernels:
        yield kernels


@contextmanager
def without_fused_kernels() -> Iterator[None]:
    """Disables cuDNN and fused attention, which round differently from the kernels of a look."""
    with without_cudnn(), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def _one_kernel_for_all_types() -> Iterator[None]:
    """Disables oneDNN as well: like the fused kernels it has separate ones for some types."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with without_fused_kernels():
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def module_calls(call: Callable[[Callable[..., Any], nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Replaces every module call inside the ``with`` block by ``call(original, module, args, kwargs)``."""
    original = nn.Module._call_impl  # another __call__ would take milliseconds: each subclass gets a new slot

    def patched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(original, module, args, kwargs)

    nn.Module._call_impl = patched  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module._call_impl = original  # type: ignore[method-assign]


def examples(image: Tensor) -> list[Tensor]:
    """The image itself, an image of zeros, an image of ones, and a smooth gradient."""
    height, width = image.shape[-2:] if image.dim() > 1 else (1, 1)
    rows, columns = (torch.linspace(0, 1, n, dtype=image.dtype, device=image.device) for n in (height, width))
    smooth = ((rows[:, None] + columns) / 2).expand(image.shape).clone() if image.dim() > 1 else image / 2
    return [image, torch.zeros_like(image), torch.ones_like(image), smooth]


def first_run(module: nn.Module, image: Tensor) -> Any:
    """Runs a module, possibly for the first time, on an image of shape (1, C, H, W); returns its result."""
    with _path_of_calls(module) as stack:
        record = look(module, image, stack)
        stale = record.held - look(module, image, stack).held if record.held else ()
    if stale:
        raise UnsupportedCode([("values of an image that are kept for the next one", place) for place in stale])
    return record.result


_EXAMINED: weakref.WeakKeyDictionary[nn.Module, tuple[Any, list[Look]]] = weakref.WeakKeyDictionary()


def examine(module: nn.Module, image: Tensor, real: bool = False) -> list[Look]:
    """Runs and checks a module on several images, in the type of ``image``; cached while the module is unchanged."""
    made_of = _state(module), image.shape, image.dtype, image.device, real
    cached, looks = _EXAMINED.get(module, (None, []))
    if cached != made_of:
        looks = _examined(module, image, RealArithmetic() if real else nullcontext())
        _EXAMINED[module] = made_of, looks
    return looks


def _examined(module: nn.Module, image: Tensor, arithmetic: AbstractContextManager[Any]) -> list[Look]:
    chance = random_states()
    try:
        with arithmetic, frozen(module), _path_of_calls(module) as stack:
            first, *further = [look(module, example, stack) for example in examples(image)]
            state = _state(module)
            again = look(module, image, stack)
            disturbed = look(module, image, stack, _NOISE) if first.computes and image.dtype == torch.float64 else None
        with arithmetic, frozen(module), without_fused_kernels(), torch.no_grad():
            plain, repeated = module(image.clone()), module(image.clone())
    except LipcertError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise UnsupportedCode([(f"code that fails for some {str(image.dtype)[6:]} images ({why})", "")]) from error
    problems = list(dict.fromkeys(problem for record in (first, *further, again) for problem in record.problems))
    for record in (*further, again):
        problems += differences(first, record, "for another image")
    if disturbed is not None:
        when = "if rounding errors are larger; large numbers may cancel where the constants are computed"
        problems += differences(first, disturbed, when, tolerance=_MOVED)
    if not isinstance(plain, Tensor) or not close(first.result, plain, kernel_tolerance(plain)):
        problems.append(("forward code that behaves differently while it is recorded", ""))
    if not same(first.result, again.result) or not same(plain, repeated):
        problems.append(("forward code that gives two results for one image", ""))
    for place in first.held - again.held:
        problems.append(("values of an image that are kept for the next one", place))
    if state != _state(module):
        problems.append(("forward code that changes its module", ""))
    if chance != random_states():
        problems.append(("forward code that draws random numbers", ""))
    if problems:
        raise UnsupportedCode(problems[:8])
    with arithmetic, without_fused_kernels():
        independent = _same_with_gradients(module, image, plain)
    if not independent:
        raise UnsupportedCode([("forward code that depends on whether gradients are enabled", "")])
    for record in further:
        record.steps = []  # equal to those of the first
    return [first, *further]


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient: ``torch.matmul`` chooses its kernels by that."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _same_with_gradients(module: nn.Module, image: Tensor, plain: Tensor) -> bool:
    """Whether the result is the same with gradients enabled and in inference mode, if the module runs there."""
    for mode, gradients in ((torch.enable_grad(), True), (torch.inference_mode(), False)):
        try:
            with mode:
                result = module(image.clone().requires_grad_() * 1 if gradients else image.clone())
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            continue
        if not close(result.detach(), plain, kernel_tolerance(plain)):
            return False
    return True


def confirm(module: nn.Module, graph: Graph, image: Tensor, real: bool = False) -> None:
    """Checks an examined module and its graph on one more image."""
    first, *_ = examine(module, image, real)
    with RealArithmetic() if real else nullcontext(), _path_of_calls(module) as stack:
        record = look(module, image, stack)
        problems = record.problems + differences(first, record, "for another image")
        with without_fused_kernels():
            replayed = graph.replay(image)
        if not close(replayed, record.result, kernel_tolerance(record.result)):
            problems.append(("forward code that behaves differently when it is captured", ""))
    if problems:
        raise UnsupportedCode(problems)


def as_captured(first: Look, captured: Look) -> None:
    """Compares the kernels of an ordinary run with those of the capture, on the same image."""
    problems = differences(captured, first, "for a tensor but not when it is captured", types=True)
    if problems:
        raise UnsupportedCode(problems)


def _tensors_held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All (attribute path, tensor) pairs that the module's parts hold."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name != "_modules" and not _is_empty(value):
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor):
                        yield f"{path}.{name}".strip("."), leaf


def _state(module: nn.Module) -> dict[str, Any]:
    """The module's state: its numbers and texts, the versions of its parameters and buffers, its numbers of hooks."""
    state: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name != "_modules":
                leaves = [] if _is_empty(value) else [_number(leaf) for leaf in tree_leaves(value) if _counts(leaf)]
                state[f"{path}.{name}"] = leaves[:1000]
        state[path] = type(part), *(len(hooks) for hooks in _hooks(part))
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            state[f"{path}.{name}"] = (id(tensor), write_count(tensor))
    return state


def _is_empty(value: Any) -> bool:
    """Whether it is a dictionary without entries, as most attributes of a module are: its hooks."""
    return type(value) in (dict, OrderedDict) and not value


def _hooks(module: nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name.endswith("_hooks")]
