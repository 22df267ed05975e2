"""Whether modules compute what the source of their classes says: the check before anything trusts a module.

Rules for whole modules, and certificates that read weights and attributes, are proofs about source code. They hold for
an object only if this code is what runs. Libraries that scale, quantise or adapt weights replace it: on a class, on an
object, by a hook, or in torch itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import _lru_cache_wrapper
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lipcert.errors import InputError

# With a separator at the end: torchao is another package than torch.
_TORCH, _OURS = (os.path.join(os.path.dirname(str(one.__file__)), "") for one in (torch, sys.modules["lipcert"]))
_NAMESPACES: tuple[ModuleType | type, ...] = (torch, Tensor, F, torch.linalg, torch.special)
_BESIDE = {"compile", "load", "manual_seed", "save", "seed"}  # which libraries replace, and no network calls
_PLAIN = (Tensor, nn.Parameter)
# Keys under which a CPU looks for a kernel, before and after those of its own.
_KEYS = {"CPU", "Autograd", "AutogradCPU", "ADInplaceOrView", "BackendSelect"}
_KEYS |= {"CompositeImplicitAutograd", "CompositeExplicitAutograd"}
# Packages whose classes make the functions of torch that are not Python's; of these classes, what runs any function.
_CALLED, _ANY = {"builtins", "torch", "typing"}, (MethodType, torch.jit.ScriptFunction)

# Values in torch's namespaces that were found to be torch's own, by identity, with the function and its code.
_KNOWN: dict[int, tuple[Any, FunctionType | None, Any]] = {}


def alterations(module: nn.Module, registered: Mapping[str, Any] | None = None) -> Iterator[tuple[str, str]]:
    """Why a module may compute something else than the source of its class, with the paths of its parts.

    Looks at the module and all its parts: hooks, attributes that hide a method, parametrisations and other tensors than
    plain ones, hooks for all modules, and the functions that their classes and the bases of these define, those of
    ``nn.Module`` included. A function must come from the file of its class and bear its name.

    Args:
        module: the module.
        registered: methods of the module's own class that are known, wherever they were defined.
    """
    if any(value for name, value in vars(nn.modules.module).items() if name.startswith("_global_") and _runs(name)):
        yield "a hook for all modules", ""
    seen: dict[type, str] = {nn.Module: _replaced(nn.Module, ())}
    for path, part in module.named_modules():
        cls = type(part)
        if any(value for name, value in vars(part).items() if _runs(name)):
            yield "a hook", path
        hidden = [name for name in vars(part) if _is_code(getattr(cls, name, None))]
        if hidden or getattr(part, "_compiled_call_impl", None) is not None:
            yield f"{(*hidden, 'a compiled function')[0]} in place of the method of {cls.__name__}", path
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and type(tensor) not in _PLAIN:
                yield f"a tensor of class {type(tensor).__name__}", path
        for base in cls.__mro__[:-1]:
            known = (registered or {}).values() if part is module else ()
            if base not in seen:
                seen[base] = _replaced(base, known)
            if seen[base]:
                yield f"{base.__name__} with {seen[base]} replaced", path


def check_torch() -> None:
    """Refuses a process in which something replaces the functions of torch, with which all bounds are computed."""
    for space in _NAMESPACES:
        for name, value in vars(space).items():
            own = name.startswith("_") and not name.startswith("__")  # such as what torch imports for itself
            if own or _is_known(value) or (space is torch and name in _BESIDE):
                continue
            function = _function(value)
            source = "" if function is None else function.__code__.co_filename
            if (function is not None or _calls_python(value)) and not source.startswith((_TORCH, _OURS)):
                raise InputError(
                    f"{space.__name__}.{name} is replaced by a function of {source or repr(value)}, so bounds "
                    "that torch computes may not hold; undo that, or leave out the code that does it"
                )
            if function is not None or (callable(value) and _is_native(value)):
                _KNOWN[id(value)] = value, function, function and function.__code__
    for name in getattr(torch.library, "_impls", ()):  # torch itself registers some for other devices and transforms
        if name.startswith("aten/") and name.rpartition("/")[2] in _KEYS:
            raise InputError(f"{name} is replaced by a kernel in Python, so no bound is known to hold; undo that")
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if not isinstance(mode, DeviceContext) and not type(mode).__module__.startswith("lipcert."):
            raise InputError(f"{type(mode).__name__} changes what torch's functions compute; leave its with block")


def _is_known(value: Any) -> bool:
    """Whether a value was found to be torch's own, and runs the same code still."""
    known, function, code = _KNOWN.get(id(value), (None, None, None))
    return known is not None and known is value and (function is None or function.__code__ is code)


def is_plain(tensor: Tensor) -> bool:
    """Whether torch's own code computes with a tensor, and not that of a subclass."""
    return type(tensor) in _PLAIN


def _runs(name: str) -> bool:
    """Whether an attribute of this name holds hooks that run in a forward or backward pass."""
    return name.endswith("_hooks") and not any(word in name for word in ("state_dict", "registration"))


def _replaced(cls: type, known: Collection[Any]) -> str:
    """The first function in a class that is not of the class's source; empty if there is none."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    for name, value in vars(cls).items():
        function = _function(value)
        if any(value is one for one in known):
            continue
        if function is None:
            if name in ("forward", "__call__", "_call_impl"):
                return name
            continue
        source = function.__code__.co_filename
        elsewhere = file is not None and source != file and not source.startswith((_TORCH, _OURS))
        named = function.__qualname__.startswith(f"{cls.__qualname__}.") or cls is nn.Module
        if elsewhere or not named:
            return name
    return ""


def _function(value: Any) -> FunctionType | None:
    """The Python function that a class attribute runs, if any."""
    value = getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value
    value = value.fget if isinstance(value, property) else value
    value = value.__wrapped__ if isinstance(value, _lru_cache_wrapper) else value
    if isinstance(value, FunctionType) and value.__code__.co_filename.startswith(_OURS):
        value = getattr(value, "__wrapped__", value)  # a capture wraps the call of modules
    return value if isinstance(value, FunctionType) else None


def _calls_python(value: Any) -> bool:
    """Whether calling a value may run any code: a partial, a bound method, the ``apply`` of an autograd Function."""
    bound = isinstance(getattr(value, "__self__", None), type)
    return callable(value) and not isinstance(value, type) and (bound or not _is_native(value))


def _is_native(value: Any) -> bool:
    """Whether a value is of a class of torch or Python that runs no function of a user."""
    return type(value).__module__.partition(".")[0] in _CALLED and not isinstance(value, _ANY)


def _is_code(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)
