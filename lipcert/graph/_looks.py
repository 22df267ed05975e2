"""The record of one run of a network, and how two runs are compared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lipcert.errors import UnsupportedCode

# Kernels that change no value. Which of them run depends on types and memory layout.
_MOVING = frozenset(
    ("_to_copy", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous", "_unsafe_view", "view")
)  # fmt: skip


@dataclass
class Step:
    """A kernel call with an argument that depends on the image.

    Attributes:
        name: the kernel's name, without overload and without the trailing underscore of in-place kernels.
        form: sizes of its tensors, and its numeric arguments; without types.
        constants: operands that do not depend on the image; copied unless they lie in a parameter or buffer.
        path: dotted path of the module.
        types: floating-point types of its operands and results that depend on the image.
    """

    name: str
    form: tuple[Any, ...]
    constants: list[Tensor]
    path: str
    types: frozenset[torch.dtype] = frozenset()


@dataclass
class Look:
    """One run of a network on one image.

    Attributes:
        image: the input, shape (1, C, H, W).
        steps: the kernel calls with an argument that depends on the image, in order.
        result: the network's output.
        problems: (description, module path) pairs.
        held: the module attributes that hold tensors that depend on the image.
        computes: whether the code computes constants from parameters and buffers.
    """

    image: Tensor
    steps: list[Step] = field(default_factory=list)
    result: Any = None
    problems: list[tuple[str, str]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    computes: bool = False


def only_in(dtypes: Collection[torch.dtype], look: Look) -> None:
    """Refuses a network that computes in other floating-point types than these."""
    for step in look.steps:
        for used in step.types.difference(dtypes):
            named = " and ".join(sorted(str(dtype)[6:] for dtype in dtypes))
            raise UnsupportedCode([(f"{step.name} in {str(used)[6:]} in a network in {named}", step.path)])


def across_types(first: Look, other: Look) -> None:
    """Compares the runs of one network in two floating-point types.

    Casts, copies and views may differ. Everything else must be equal, numbers and tensors up to the rounding of the
    types.
    """
    problems = differences(first, other, "in another floating-point type", types=True)
    if problems:
        raise UnsupportedCode(problems)


def differences(
    first: Look, other: Look, when: str, types: bool = False, tolerance: float = 0.0
) -> list[tuple[str, str]]:
    """The first difference between the steps of two runs, as (description, module path); empty if there is none."""
    ours, theirs = first.steps, other.steps
    allowed = tolerance or (torch.finfo(torch.float32).eps if types else 0.0)
    if types:
        ours, theirs = ([step for step in steps if step.name not in _MOVING] for steps in (ours, theirs))
    for step, counterpart in zip(ours, theirs, strict=False):
        if step.name != counterpart.name:
            return [(f"{counterpart.name} in place of {step.name} {when}", counterpart.path)]
        if step.form != counterpart.form and not (allowed and _alike(step.form, counterpart.form, allowed)):
            return [(f"{step.name} with {_first_difference(counterpart.form, step.form)} {when}", counterpart.path)]
        if len(step.constants) != len(counterpart.constants):
            return [(f"{step.name} of other tensors {when}", counterpart.path)]
        for mine, its in zip(step.constants, counterpart.constants, strict=True):
            if _same_memory(mine, its):
                continue
            if not (close(mine, its, tolerance or None) if allowed else same(mine, its)):
                return [(f"{step.name} with constants that change {when}", counterpart.path)]
    if len(ours) != len(theirs):
        step = (ours if len(ours) > len(theirs) else theirs)[min(len(ours), len(theirs))]
        return [(f"{step.name} {when} or not", step.path)]
    return []


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """The memory of a dense tensor, storage first: tensors that live at the same time and agree in this are equal."""
    if tensor.layout != torch.strided:
        return ()
    place = tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or bool(memory_of(a) and memory_of(a) == memory_of(b))


def _alike(form_a: tuple[Any, ...], form_b: tuple[Any, ...], unit: float) -> bool:
    """Whether two forms differ at most by a relative error in their numbers."""
    numbers = [(*form[0], *form[1]) for form in (form_a, form_b)]
    return len(numbers[0]) == len(numbers[1]) and all(
        a == b or (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= unit * abs(b))
        for a, b in zip(*numbers, strict=True)
    )


def _first_difference(form_a: tuple[Any, ...], form_b: tuple[Any, ...]) -> str:
    """A description of the first difference between two forms."""
    for mine, its in zip((*form_a[0], *form_a[1]), (*form_b[0], *form_b[1]), strict=False):
        if mine != its:
            return f"{'size ' if isinstance(mine, tuple) else ''}{mine} in place of {its}"
    return "other arguments"


def same(one: Any, two: Any) -> bool:
    """Whether two results are equal bit for bit; on a GPU, where the order of sums varies, up to rounding."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return type(one) is type(two)
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if one.device.type != "cpu" and one.is_floating_point():
        return close(one, two, kernel_tolerance(one))
    if torch.equal(one, two):  # the other comparison takes NaN for equal
        return True
    equal = one == two
    return bool((equal | (one.isnan() & two.isnan()) if one.is_floating_point() else equal).all())


def close(one: Tensor, two: Tensor, tolerance: float | None = None) -> bool:
    """Equality up to ``tolerance`` times the largest entry; the default is 256 roundings of the coarser type."""
    if one.shape != two.shape or one.is_floating_point() != two.is_floating_point():
        return False
    if not one.is_floating_point():
        return torch.equal(one, two.to(one.dtype))
    if tolerance is None:
        tolerance = 256 * max(torch.finfo(one.dtype).eps, torch.finfo(two.dtype).eps)
    one, two = one.double(), two.double()
    if torch.equal(one, two):
        return True
    equal = (one == two) | (one.isnan() & two.isnan())
    finite = two[two.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    return bool((equal | ((one - two).abs() <= tolerance * scale)).all())


def kernel_tolerance(result: Tensor) -> float:
    """The tolerance between kernels for the same operation, relative to the largest entry.

    Deep networks with random weights differ by 1e-4 in float32. What float64 sees is held to 1e-10.
    """
    return 1e-3 if not result.is_floating_point() or torch.finfo(result.dtype).bits < 64 else 1e-10
