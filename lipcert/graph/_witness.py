"""Checks that a captured graph is what the module does with ordinary tensors.

``capture`` runs a network's code once, on a value that is not a tensor: it refuses code that reads the image's values
out, and records every operation that depends on them. Here the module runs on ordinary tensors, for several images. A
network is refused if its code

- gives other results than the captured operations, as code that treats the two kinds of value differently does, or
  reads values of the image where it knows that it has a tensor;
- gives another result for an image that comes again, or where gradients or inference mode are enabled;
- draws random numbers, keeps values of an image, or changes its own parameters, buffers or attributes;
- runs other operations, or computes with other numbers, in another floating-point type;
- computes constants from its parameters in which large numbers cancel, so that they are not those of real arithmetic.

These checks find accidents, not code that hides what it does.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lipcert.errors import InputError, LipcertError, UnsupportedCode, first_line, shortened
from lipcert.graph._graph import Graph, Node
from lipcert.graph._operations import COPY, EPS_OF_TYPE
from lipcert.numerics import RealArithmetic, is_out_of_memory, leaves, watched, without_cudnn

# Constants that a network computes from its weights are computed again with relative errors of about NOISE in every
# operation, 1024 times those of float64. They may move by MOVED of their largest entry, so rounding moves them by
# about 2⁻³⁸.
NOISE, MOVED = 2.0**-43, 2.0**-28
_GIVING = frozenset(("numpy", "tolist", "__array__", "__dlpack__"))
# These read only the shape and type of a tensor.
FORMED_LIKE = frozenset(
    ("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "empty_like", "full_like")
)


class Pausable:
    """A mode that can be paused."""

    paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block ``paused`` is true."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


class Derived(Pausable, TorchDispatchMode):
    """Marks the memory of some tensors, and of what kernels compute from it inside the ``with`` block.

    Attributes:
        computes: whether a kernel computed something from it.
        reads: the kernels that gave numbers of it to Python, or results of a shape that depends on them.
        stale: whether a kernel read the memory ``earlier``, which is that of another run.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor], noise: float = 0.0, earlier: Collection[StorageWeakRef] = ()):
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = {StorageWeakRef(x.untyped_storage()) for x in tensors if x.layout == torch.strided}
        self.memory, self.noise, self.computes = set(self.given), noise, False
        self.reads: set[str] = set()
        self.earlier, self.stale = earlier, False
        self.generator = torch.Generator().manual_seed(0)

    def __contains__(self, tensor: Any) -> bool:
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        return dense and StorageWeakRef(tensor.untyped_storage()) in self.memory

    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = list(leaves((args, kwargs or {})))
        outcome = kernel(*args, **(kwargs or {}))
        name = getattr(kernel, "__name__", "").split(".")[0]
        if self.paused or name in FORMED_LIKE:
            return outcome
        dense = [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
        self.stale |= any(StorageWeakRef(leaf.untyped_storage()) in self.earlier for leaf in dense)
        if not any(leaf in self for leaf in given):
            return outcome
        tags = getattr(kernel, "tags", ())
        masks = [leaf for leaf in dense if leaf.dtype in (torch.bool, torch.uint8)]
        shaping = masks if name in ("index", "masked_select") else dense
        shaped = torch.Tag.dynamic_output_shape in tags and any(leaf in self for leaf in shaping)
        if torch.Tag.data_dependent_output in tags or shaped:
            self.reads.add(name)
        before = {StorageWeakRef(x.untyped_storage()) for x in given if isinstance(x, Tensor)}

        def marked(leaf: Any) -> Any:
            """The same tensor; with noise if the kernel computed it, and it is no view of an operand."""
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
                return leaf
            in_place = any(leaf is operand for operand in given)
            if in_place or StorageWeakRef(leaf.untyped_storage()) not in before:
                self.computes = True
                if self.noise and leaf.is_floating_point() and StorageWeakRef(leaf.untyped_storage()) not in self.given:
                    drawn = torch.randn(leaf.shape, generator=self.generator, dtype=leaf.dtype)
                    noisy = leaf * (1 + self.noise * drawn.to(leaf.device))
                    leaf = leaf.copy_(noisy) if in_place else noisy
            self.memory.add(StorageWeakRef(leaf.untyped_storage()))
            return leaf

        return tree_map(marked, outcome)


@contextmanager
def without_fused_kernels() -> Iterator[None]:
    """Disables cuDNN and fused attention, which round differently."""
    with without_cudnn(), sdpa_kernel(SDPBackend.MATH):
        yield


def examples(image: Tensor) -> list[Tensor]:
    """The image itself, an image of zeros, an image of ones, and a smooth gradient."""
    height, width = image.shape[-2:] if image.dim() > 1 else (1, 1)
    rows, columns = (torch.linspace(0, 1, n, dtype=image.dtype, device=image.device) for n in (height, width))
    smooth = ((rows[:, None] + columns) / 2).expand(image.shape).clone() if image.dim() > 1 else image / 2
    return [image, torch.zeros_like(image), torch.ones_like(image), smooth]


@torch.no_grad()
def first_run(module: nn.Module, image: Tensor) -> Any:
    """Runs a module, possibly for the first time, on an image of shape (1, C, H, W); returns its result."""
    storing, runs = [], [Derived([])]
    for _ in range(2):
        pixels = image.clone()
        with Derived([pixels], earlier=runs[-1].memory) as derived:
            result = module(pixels)
        runs.append(derived)
        parts = [(path, name, value) for path, part in module.named_modules() for name, value in vars(part).items()]
        storing.append(
            {f"{path}.{name}".strip(".") for path, name, value in parts if any(x in derived for x in leaves(value))}
        )
    stale = storing[0] - storing[1] or ({""} if runs[2].stale or runs[1].reads - runs[2].reads else set())
    if stale:
        raise UnsupportedCode([("values of an image that are kept for the next one", place) for place in stale])
    return result


class _Reads(TorchFunctionMode):
    """Records the functions that give entries of tensors marked by ``derived`` to other code."""

    def __init__(self, derived: Derived):
        super().__init__()
        self.derived = derived

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (name := getattr(function, "__name__", "")) in _GIVING and args[0] in self.derived:
            self.derived.reads.add(name.strip("_"))
        return function(*args, **(kwargs or {}))


class Examined(NamedTuple):
    """Images, each of shape (1, C, H, W), a network's results, and the kernels that read values out of an image."""

    images: list[Tensor]
    results: list[Tensor]
    reads: frozenset[str] = frozenset()

    def refuse_reads(self) -> None:
        """Refuses a network that reads values; its capture, which knows the place, comes first."""
        if self.reads:
            raise UnsupportedCode([(f"{name}, which reads values of the image", "") for name in sorted(self.reads)])


_EXAMINED: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Examined]] = weakref.WeakKeyDictionary()


def examine(module: nn.Module, image: Tensor, real: bool = False) -> Examined:
    """Runs and checks a module on several images, in the type of ``image``; cached while the module is unchanged."""
    made_of = _state(module), image.shape, image.dtype, image.device, real
    cached, examined = _EXAMINED.get(module, (None, None))
    if examined is None or cached != made_of or not _stands(module, examined, real):
        examined = _examined(module, image, real)
        _EXAMINED[module] = made_of, examined
    return examined


@torch.no_grad()
def _stands(module: nn.Module, examined: Examined, real: bool) -> bool:
    """Whether a module still gives the first result: writes to ``.data`` leave no trace."""
    with RealArithmetic() if real else nullcontext(), without_fused_kernels():
        return same_logits(_run(module, examined.images[0]), examined.results[0], tolerance(examined.results[0]))


@torch.no_grad()
def _examined(module: nn.Module, image: Tensor, real: bool) -> Examined:
    images, drawn, problems = examples(image), [], []

    def run(image: Tensor) -> Any:
        result, drew = watched(lambda: _run(module, image))
        drawn.append(drew)
        return result

    with RealArithmetic() if real else nullcontext(), without_fused_kernels():
        results = [run(images[0])]
        if not isinstance(results[0], Tensor):
            raise InputError(f"the model must return one tensor of logits, it returns {type(results[0]).__name__}")
        try:
            results += [run(each) for each in images[1:]]
        except InputError as error:
            raise UnsupportedCode([(f"code that fails for some images ({error})", "")]) from error
        state = _state(module)
        again = run(image)
        alike = same_logits(results[0], again, 0.0 if image.device.type == "cpu" else tolerance(again))
        if not alike:  # so that a difference tells nothing of gradients
            problems.append("forward code that gives two results for one image")
        several = _together(results)
        derived = Derived([image])  # code may take another way with the value that records operations
        for mode, gradients in ((torch.enable_grad(), True), (torch.inference_mode(), False)):
            try:
                with mode, derived, _Reads(derived):
                    result = run(image.clone().requires_grad_() * 1 if gradients else image)
            except InputError:  # it does not run there
                continue
            if alike and not same_logits(result.detach(), results[0], tolerance(results[0]), several):
                problems.append("forward code that depends on whether gradients are enabled")
                if image.dtype.itemsize == 2:  # and kernels that add in another order differ by more
                    problems[-1] += f", or kernels of torch for {str(image.dtype)[6:]} that do, and not for float32"
    after = _state(module)
    changed = [name.strip() for name in state | after if state.get(name) != after.get(name)]
    if changed:
        problems.append(f"forward code that changes its module: {shortened(changed[0])}")
    if any(draws.anew for draws in drawn) or len({*drawn}) > 1:
        problems.append("forward code that draws random numbers")
    if problems:
        raise UnsupportedCode([(problem, "") for problem in problems])
    return Examined(images, results, frozenset(derived.reads))


def _run(network: Callable[[Tensor], Any], image: Tensor) -> Any:
    """The result for a copy of an image."""
    try:
        return network(image.clone())
    except (LipcertError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        what = f"in {str(image.dtype)[6:]} on images of shape {tuple(image.shape)}"
        raise InputError(f"the model does not run {what}: {reason_of_failure(network, image, error)}") from error


def reason_of_failure(network: Callable[[Tensor], Any], image: Tensor, error: Exception) -> str:
    """The reason for an error of a network, after the path and class of the innermost module that fails."""
    reason = first_line(error).rstrip(".")
    paths = {part: path for path, part in network.named_modules()} if isinstance(network, nn.Module) else {}
    running: list[nn.Module] = []

    def ended(*_: object) -> None:
        running.pop()

    hooks = [
        register_module_forward_pre_hook(lambda part, _: running.append(part)),
        register_module_forward_hook(ended),
    ]
    with suppress(Exception):
        network(image.clone())
    for hook in hooks:
        hook.remove()
    if not running:
        return reason
    where = f"{paths.get(running[-1]) or 'the network'} ({type(running[-1]).__name__})"
    if any(re.search(r"quant|\.qat\.|bitsandbytes", type(part).__module__) for part in running):
        return f"{where} quantises, for which there are no bounds; give the network before quantisation"
    return f"{where} fails: {reason}"


def confirm(module: nn.Module, graph: Graph, image: Tensor, real: bool = False) -> None:
    """Checks a captured module and its graph on one more image."""
    with RealArithmetic() if real else nullcontext(), without_fused_kernels(), torch.no_grad():
        compared(graph, Examined([image], [_run(module, image)]))


def compared(graph: Graph, examined: Examined) -> None:
    """Refuses a module whose results are not those of its graph."""
    examined.refuse_reads()
    several = _together(examined.results)
    for image, result in zip(examined.images, examined.results, strict=True):
        if not same_logits(_run(graph.replay, image), result, tolerance(result), several):
            raise UnsupportedCode([("forward code that behaves differently when it is captured", "")])


def _together(results: Sequence[Tensor]) -> Tensor | None:
    """The logits of several images, shape (M, classes); None where results are no logits."""
    same = len({result.shape for result in results}) == 1
    return torch.cat([*results]) if same and results[0].dim() == 2 else None


def same_operations(graph: Graph, other: Graph, when: str, tolerance: float | None = None) -> None:
    """Refuses a network that runs other operations, casts aside, or on other values or numbers, in another capture.

    Numbers may differ by a relative ``tolerance``, and tensors by as much of their largest entry; by default, as where
    the two captures differ in their types, by the rounding of float32 and of the coarser type.
    """
    ours, theirs = ([node for node in one.nodes if node.op != COPY] for one in (graph, other))
    stands_for = {graph.input: other.input}
    for node, its in zip_longest(ours, theirs):
        if node is None or its is None:
            problem = f"{(node or its).name} {when} or not"
        elif node.op != its.op:
            problem = f"{its.name} in place of {node.name} {when}"
        elif node.shape != its.shape:
            problem = f"{its.name} with size {its.shape} in place of {node.shape} {when}"
        elif difference := _difference(node, its, stands_for, tolerance):
            problem = f"{its.name} with {difference} {when}"
        else:
            stands_for[node] = its
            continue
        raise UnsupportedCode([(problem, (its or node).path)])
    if stands_for[_uncast(graph.output)] is not _uncast(other.output):
        raise UnsupportedCode([(f"the result of {_uncast(other.output).name} returned {when}", other.output.path)])


def _uncast(node: Node) -> Node:
    """The value of which a node is a copy or a cast."""
    while node.op == COPY:
        node = node.operands[0]
    return node


def _difference(node: Node, other: Node, stands_for: Mapping[Node, Node], tolerance: float | None) -> str:
    """What differs in the arguments of one operation in two captures; empty if nothing does.

    ``stands_for`` has what stands for the values before it in the other capture.
    """
    eps = node.args[3] if len(node.args) > 3 else node.kwargs.get("eps")
    if node.op in EPS_OF_TYPE and eps is None and node.dtype != other.dtype:
        return "an eps that is the machine epsilon of its type"
    arguments = [
        [x for x in leaves((each.args, *each.kwargs.items())) if not isinstance(x, (torch.dtype, torch.device))]
        for each in (node, other)
    ]
    for mine, its in zip_longest(*arguments):
        if isinstance(mine, Node) or isinstance(its, Node):
            if not (isinstance(mine, Node) and isinstance(its, Node) and stands_for[_uncast(mine)] is _uncast(its)):
                return "another operand"
        elif isinstance(mine, (Tensor, np.ndarray)) and isinstance(its, (Tensor, np.ndarray)):
            if not close(torch.as_tensor(its), torch.as_tensor(mine), tolerance):
                return "constants that change"
        elif isinstance(mine, float) and isinstance(its, float):
            allowed = torch.finfo(torch.float32).eps if tolerance is None else tolerance
            if not (abs(mine - its) <= allowed * abs(mine) or repr(mine) == repr(its)):
                return f"{its} in place of {mine}"
        elif type(mine) is not type(its) or mine != its:
            return f"{its} in place of {mine}"
    return ""


def _state(module: nn.Module) -> dict[str, Any]:
    """The numbers, texts, generators of NumPy and hooks in a module, and the versions of its parameters and buffers."""
    state: dict[str, Any] = {}

    def seen(leaf: Any) -> Any:
        plain = isinstance(leaf, (bool, int, float, complex, str, type(None)))
        return repr(leaf) if plain else str(getattr(getattr(leaf, "bit_generator", None), "state", type(leaf)))

    for path, part in module.named_modules():
        state[f"{path}.type"] = type(part)
        state |= {f"{path}.{k}".strip("."): [*map(seen, leaves(v))] for k, v in vars(part).items() if k != "_modules"}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        state[f"{name} "] = id(tensor), write_count(tensor)
    return state


def write_count(tensor: Tensor) -> int:
    """The number of in-place writes to the tensor; 0 for inference tensors, which cannot be written to."""
    return 0 if tensor.is_inference() else tensor._version


def close(one: Tensor, two: Tensor, tolerance: float | None = None) -> bool:
    """Equality up to ``tolerance`` times the largest entry; by default 256 roundings, or 8 of 16 bits."""
    if one.shape != two.shape or one.is_floating_point() != two.is_floating_point():
        return False
    if not one.is_floating_point():
        return torch.equal(one, two.to(one.dtype))
    if tolerance is None:
        eps = max(torch.finfo(one.dtype).eps, torch.finfo(two.dtype).eps)
        tolerance = (256 if eps < 1e-4 else 8) * eps
    one, two = one.double(), two.double()
    equal = (one == two) | (one.isnan() & two.isnan())
    finite = two[two.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    return bool((equal | ((one - two).abs() <= tolerance * scale)).all())


def same_logits(one: Tensor, two: Tensor, tolerance: float, among: Tensor | None = None) -> bool:
    """:func:`close`, and no difference is hidden by logits of masked classes or by a part that logits share.

    The distance of a logit from the largest one of its image may change by the ``tolerance`` times the least of three
    numbers: 16 times the larger of the two largest logits, 16 times the range of all logits, and the larger of this
    distance and its range ``among`` the logits of several images; and by 16 roundings of both logits, or four of a
    type of 16 bits.
    """
    if not close(one, two, tolerance):
        return False
    finite = two[two.isfinite()]
    if two.dim() != 2 or two.shape[1] < 2 or not len(finite) or not two.is_floating_point():
        return True
    eps = max(torch.finfo(one.dtype).eps, torch.finfo(two.dtype).eps)
    one, two, spread = one.double(), two.double(), float(finite.max()) - float(finite.min())
    best, classes = two.nan_to_num(nan=-math.inf).topk(2, 1)
    largest = classes[:, :1]

    def distances(logits: Tensor) -> Tensor:
        return logits.gather(1, largest) - logits

    scale = 16 * best.abs().amax(1, keepdim=True).clamp_max(spread).expand_as(two)
    if among is not None and len(among) > 1:
        each = among.double()[:, largest[:, 0]].mT[..., None] - among.double()  # of every image, from each largest one
        scale = scale.minimum(torch.maximum(each.amax(1) - each.amin(1), distances(two).abs()).nan_to_num(nan=math.inf))
    roundings = (16 if eps < 1e-4 else 4) * eps * (two.abs() + two.gather(1, largest).abs())
    equal = (one == two) | (one.isnan() & two.isnan())
    changed = (distances(one) - distances(two)).abs()
    return bool((equal | (changed <= tolerance * scale + roundings)).all())


def tolerance(result: Tensor) -> float:
    """The tolerance between a network's results, relative to the largest entry: the order of sums may change."""
    return {torch.float64: 1e-10, torch.float32: 1e-4}.get(result.dtype, 1e-3)
