"""Emulates real arithmetic in float64: casts between floating-point types become the identity.

Forward code contains casts, such as attention sums in float32, or a result cast back to the type of the weights. In
real arithmetic these casts are the identity. A network evaluated in float64 in place of real numbers must ignore them.
Otherwise some of its values would be float32, while its certificates assume float64. Casts to integers remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lipcert.numerics._trees import leaves, mapped

_NAMED_AFTER_TYPES = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}
_SAME_BITS = ("view", "view.dtype", "view_copy", "view_copy.dtype")  # with a type, these do not cast

FunctionCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class RealArithmetic(TorchFunctionMode):
    """A context in which torch operations have no floating-point type but float64: see :func:`in_real_arithmetic`."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and function not in _NAMED_AFTER_TYPES:
            return function(*args)  # as most calls: they read a property, and can neither cast nor mix types
        function, args, kwargs = in_real_arithmetic(function, args, kwargs or {})
        return function(*args, **kwargs)


def in_real_arithmetic(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> FunctionCall:
    """Rewrites a call on tensors for real arithmetic: every floating-point type that it names becomes float64.

    Devices, memory formats and copies do not change. As in a network in float32, ``x.float()`` is x itself and
    ``x.half()`` a copy. Tensors that a network creates, such as ``torch.arange(9, dtype=torch.float32)``, are constants
    like its weights and keep their type. If float64 meets a narrower type, as in a product with such a constant, the
    narrower operand is widened.
    """
    function, args, kwargs = spelled_out(function, args, kwargs)
    met = set(_types((args, kwargs)))
    named = [argument for argument in (*args, *kwargs.values()) if _floating(argument)]
    if met and named and getattr(function, "__name__", "") not in _SAME_BITS:
        if function is Tensor.to and torch.finfo(named[0]).bits < 32:
            kwargs = kwargs | {"copy": True}
        args = tuple(torch.float64 if _floating(argument) else argument for argument in args)
        kwargs = {key: torch.float64 if _floating(argument) else argument for key, argument in kwargs.items()}
    if torch.float64 in met and any(map(_floating, met - {torch.float64})) and not _writes(function, kwargs):
        args, kwargs = _widened(args), _widened(kwargs)
    return function, args, kwargs


def spelled_out(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> FunctionCall:
    """Writes every cast in a call as ``x.to`` with an explicit type."""
    if function in _NAMED_AFTER_TYPES:
        return Tensor.to, (*args, _NAMED_AFTER_TYPES[function]), kwargs
    if function is Tensor.type_as or function is Tensor.to:
        remaining = dict(kwargs)
        target: Any = args[1] if len(args) > 1 else remaining.pop("other", None)
        if isinstance(getattr(target, "dtype", None), torch.dtype):
            return Tensor.to, (args[0], target.device, target.dtype, *args[2:]), remaining
    if function is Tensor.type and len(args) > 1 and not isinstance(args[1], torch.dtype):
        return Tensor.to, (args[0], *_place_and_type(args[1]), *args[2:]), kwargs
    if function is Tensor.type and len(args) + len(kwargs) > 1:
        return Tensor.to, args, kwargs
    return function, args, kwargs


def _floating(argument: Any) -> bool:
    return isinstance(argument, torch.dtype) and argument.is_floating_point


def _place_and_type(tensor_class: Any) -> tuple[str, torch.dtype]:
    """Device and type of a tensor class such as ``torch.cuda.FloatTensor``, or of its name."""
    name = tensor_class if isinstance(tensor_class, str) else f"{tensor_class.__module__}.{tensor_class.__name__}"
    _, *place, kind = name.split(".")
    return (place or ["cpu"])[0], getattr(torch, kind).dtype


def _writes(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call writes its result into an argument, which must then stay the same object."""
    name = getattr(function, "__name__", "")
    in_place = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return in_place or kwargs.get("out") is not None


def _types(tree: Any) -> Iterator[torch.dtype]:
    return (leaf.dtype for leaf in leaves(tree) if isinstance(getattr(leaf, "dtype", None), torch.dtype))


def _widened(tree: Any) -> Any:
    def widened(leaf: Any) -> Any:
        kind = getattr(leaf, "dtype", None)
        return leaf.double() if _floating(kind) and kind != torch.float64 else leaf

    return mapped(widened, tree)
