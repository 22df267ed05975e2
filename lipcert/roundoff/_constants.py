"""Rounding errors, in the deployed format, of constants that a network computes from its weights.

The captured graph holds such a constant as a float64 tensor. Its error in the deployed network can be bounded only if
the computation is known. The network runs once more, on one image, and a bound on |ĉ − c|, entry by entry, goes with
every tensor c that it computes from weights alone; ĉ is what the deployed network computes from cast weights. Kernels
that only move entries move the bounds with them; each arithmetic kernel below has a rule (running error analysis:
Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.3). The bound of any other kernel is ∞.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from lipcert._format import OWN_ROUNDING, REAL, Format
from lipcert._numerics import at_most
from lipcert._real import RealArithmetic

_MOVES = frozenset(
    ("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "select", "slice", "unsqueeze",
     "squeeze", "cat", "stack", "index", "index_select", "gather", "clone", "alias", "detach", "flip", "roll",
     "repeat", "split", "split_with_sizes", "unbind", "diagonal")
)  # fmt: skip
_FILLS = frozenset(("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones"))


class Approximate(NamedTuple):
    """A value c in float64, and a bound on |ĉ − c|, of one shape."""

    value: Tensor
    error: Tensor

    @property
    def most(self) -> Tensor:
        """Bounds on |ĉ|."""
        return self.value.abs() + self.error


Rule = Callable[..., Tensor]


def _sum(fmt: Format, a: Approximate, b: Approximate, alpha: float = 1) -> Tensor:
    if alpha != 1:
        return a.most.new_tensor(math.inf)
    off = a.error + b.error
    return off + fmt.rounded((a.value.abs() + b.value.abs() + off) * OWN_ROUNDING)


def _product(fmt: Format, a: Approximate, b: Approximate) -> Tensor:
    off = a.error * b.value.abs() + a.most * b.error
    return off + fmt.rounded((a.value * b.value).abs() + off)


def _quotient(fmt: Format, a: Approximate, b: Approximate) -> Tensor:
    """|(a + α)/(b + β) − a/b| ≤ (|α| + |a/b||β|)/(|b| − |β|)."""
    least, whole = b.value.abs() - b.error, (a.value / b.value).abs()
    off = torch.where(least > 0, (a.error + whole * b.error) / least, math.inf)
    return off + fmt.rounded(whole + off)


def _matrix_product(fmt: Format, a: Approximate, b: Approximate) -> Tensor:
    """|(A + α)(B + β) − AB| ≤ |α||B| + (|A| + |α|)|β|, and the rounding of sums of n products."""
    off = a.error @ b.value.abs() + a.most @ b.error
    size = a.value.abs() @ b.value.abs() + off
    return off + fmt.sum(size, a.value.shape[-1], size)


def _total(fmt: Format, a: Approximate, dim: Any = None, keepdim: bool = False) -> Tensor:
    def added(x: Tensor) -> Tensor:
        return x.sum(tuple(range(x.dim())) if dim is None else dim, keepdim)

    off, size = added(a.error), added(a.most)
    return off + fmt.sum(size, a.value.numel() // max(size.numel(), 1), size)


def _norm(fmt: Format, a: Approximate, order: float = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    """| ‖a + α‖ − ‖a‖ | ≤ ‖α‖; and with a sum of squares s that errs by e, |√(s + e) − √s| ≤ min(√|e|, |e|/√s)."""
    if order != 2:
        return a.error.new_tensor(math.inf)

    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, 2, dim, keepdim)

    off = norm(a.error) * OWN_ROUNDING
    size, least = norm(a.value) * OWN_ROUNDING + off, norm(a.value) / OWN_ROUNDING - off
    error = fmt.sum(size.square(), a.value.numel() // max(size.numel(), 1), size.square())
    root = torch.where(least > 0, torch.minimum(error / least, error.sqrt()), error.sqrt())
    return off + root + fmt.function(size + root)


def _root(fmt: Format, a: Approximate) -> Tensor:
    """|√(a + α) − √a| ≤ |α|/√a if |α| ≤ a."""
    off = torch.where(a.error <= a.value, torch.where(a.error > 0, a.error / a.value.sqrt(), 0.0), math.inf)
    return off + fmt.function(a.value.sqrt() + off)


def _inverse_root(fmt: Format, a: Approximate) -> Tensor:
    """|1/√(a + α) − 1/√a| ≤ |α|/(a √(a − |α|)) if |α| < a."""
    off = torch.where(a.error < a.value, a.error / (a.value * (a.value - a.error).sqrt()), math.inf)
    return off + fmt.function(a.value.rsqrt() + off)


def _exponential(fmt: Format, a: Approximate) -> Tensor:
    off = a.value.exp() * a.error.expm1()
    return off + fmt.function(a.value.exp() + off)


def _tanh(fmt: Format, a: Approximate) -> Tensor:
    return a.error + fmt.function(torch.ones_like(a.value))


def _power(fmt: Format, a: Approximate, exponent: Any) -> Tensor:
    if isinstance(exponent, Approximate) or exponent not in (1, 2):
        return a.error.new_tensor(math.inf)
    return a.error if exponent == 1 else _product(fmt, a, a)


def _kept(fmt: Format, a: Approximate, *_: Any) -> Tensor:
    return a.error


def _larger(fmt: Format, a: Approximate, b: Approximate) -> Tensor:
    return torch.maximum(a.error, b.error)


_RULES: dict[str, Rule] = {
    "add": _sum, "sub": _sum, "mul": _product, "div": _quotient, "mm": _matrix_product, "bmm": _matrix_product,
    "sum": _total, "linalg_vector_norm": _norm, "sqrt": _root, "rsqrt": _inverse_root, "exp": _exponential,
    "tanh": _tanh, "pow": _power, "neg": _kept, "abs": _kept, "relu": _kept, "maximum": _larger, "minimum": _larger,
    "clamp_min": _larger, "clamp_max": _larger,
}  # fmt: skip
# Rules for which a number counts as a tensor.
_OF_NUMBERS = frozenset(("add", "sub", "mul", "div", "clamp_min", "clamp_max"))


class ConstantErrors(TorchDispatchMode):
    """Bounds on the rounding errors of all tensors that a network computes from its weights.

    Args:
        model: the network in float64.
        image: an example of shape (1, C, H, W).
        fmt: the deployed format.
    """

    def __init__(self, model: nn.Module, image: Tensor, fmt: Format):
        super().__init__()  # type: ignore[no-untyped-call]
        self.format = fmt
        image = image.clone()
        self._moving: Any = WeakTensorKeyDictionary()  # depends on the image
        self._moving[image] = True
        self._errors: Any = WeakTensorKeyDictionary()
        self._found: dict[int, list[Tensor]] = {}
        for weight in (*model.parameters(), *model.buffers()):
            if weight.is_floating_point():
                self._errors[weight] = fmt.cast(weight)
        with torch.no_grad(), RealArithmetic() if fmt == REAL else nullcontext(), self:
            model(image)

    def of(self, constant: Tensor) -> Tensor | None:
        """Upper bounds on the error of a captured constant, entry by entry; None if its computation is not known.

        Tensors are told apart by their values: the bound is the largest of all tensors with the values of the constant.
        """
        alike = [
            made
            for made in self._found.get(constant.numel(), ())
            if torch.equal(made.reshape(constant.shape), constant)
        ]
        if not alike:
            return None
        error = torch.stack([self._errors[made].reshape(constant.shape) for made in alike]).amax(0)
        return at_most(error * OWN_ROUNDING) if error.isfinite().all() else None

    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        outcome = kernel(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if _floating(leaf)]
        made = [leaf for leaf in tree_leaves(outcome) if _floating(leaf)]
        moving = any(tensor in self._moving for tensor in given)
        if kernel._schema.is_mutable:
            self._overwritten([*given, *made], moving)
        elif moving:
            for tensor in made:
                self._moving[tensor] = True
        else:
            for tensor, error in zip(made, self._bounds(kernel, args, kwargs, made), strict=True):
                self._errors[tensor] = error
                self._found.setdefault(tensor.numel(), []).append(tensor)
        return outcome

    def _overwritten(self, tensors: list[Tensor], moving: bool) -> None:
        """Nothing is known any more of memory that a kernel may have written to."""
        places = {tensor.untyped_storage()._cdata for tensor in tensors}
        for tensor in [*self._errors.keys(), *tensors]:
            if tensor.untyped_storage()._cdata in places:
                self._errors[tensor] = torch.full_like(tensor, math.inf, dtype=torch.float64)
                if moving:
                    self._moving[tensor] = True

    def _bounds(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> list[Tensor]:
        name = kernel.__name__.split(".")[0]
        unknown = [torch.full_like(tensor, math.inf, dtype=torch.float64) for tensor in made]
        if any(tensor.dtype != torch.float64 for tensor in made):
            return unknown
        if name in _FILLS:
            return [self.format.cast(tensor) for tensor in made]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if _floating(leaf)]
        if not given or any(tensor not in self._errors for tensor in given):
            return unknown
        if name in _MOVES:
            moved = kernel(*tree_map(self._error, args), **tree_map(self._error, kwargs))
            return [leaf for leaf in tree_leaves(moved) if _floating(leaf)]
        if name not in _RULES or len(made) != 1:
            return unknown
        args = tuple(self._approximate(leaf, name in _OF_NUMBERS) for leaf in args)
        try:
            error = _RULES[name](self.format, *args, **kwargs)
        except TypeError:  # arguments that the rule does not have
            return unknown
        return [torch.where(error.isnan(), math.inf, error).expand(made[0].shape)]

    def _error(self, leaf: Any) -> Any:
        return self._errors[leaf].expand(leaf.shape).contiguous() if _floating(leaf) else leaf

    def _approximate(self, leaf: Any, numbers: bool) -> Any:
        if _floating(leaf):
            return Approximate(leaf.detach(), self._errors[leaf].expand(leaf.shape))
        if numbers and isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            number = torch.tensor(float(leaf), dtype=torch.float64)
            return Approximate(number, self.format.cast(number))
        return leaf


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
