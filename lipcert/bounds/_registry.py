"""The rule table: one entry for each operation, and how users add their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lipcert.graph import canonical


@dataclass(frozen=True)
class Call:
    """The operation a rule is asked about, beside its operands.

    Attributes:
        shape: shape of the result for a batch of one image.
        path: dotted path of the module in which it runs.
    """

    shape: tuple[int, ...]
    path: str


Answer = Callable[..., Any]


class NoAnswer(Exception):
    """Raised by a rule for arguments that it does not cover; collected with the operations that have no rule."""


class Rule:
    """What is known of one operation.

    The rule itself answers the global question: it is called with a :class:`Call` and then with the operation's own
    arguments, those that depend on the image as :class:`~lipcert.bounds.Value`, and returns the result's ``Value``.
    """

    def __init__(self, key: Any, answer: Answer, source: str):
        self.key = key
        self.answer = answer
        self.source = source
        self.signature = inspect.signature(answer)

    def __call__(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        return self.answer(call, *args, **kwargs)


RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Answer], Answer]:
    """Registers the rule of one or several operations.

    Args:
        targets: functions of torch (``torch.nn.functional.gelu``; every spelling of an operation shares one rule),
            canonical names (``"gelu"``), functions of your own that answer ``torch.overrides``, or subclasses of
            ``nn.Module``, which are then kept whole: the rule is called with the module before its inputs.

    Returns:
        A decorator for ``answer(call, *args, **kwargs) -> Value``. The docstring of ``answer`` names its source or
        carries the proof. A later rule for the same operation replaces the earlier one.

    Example:
        >>> import torch, lipcert
        >>> @lipcert.bounds.rule(torch.nn.functional.logsigmoid)
        ... def logsigmoid(call, x):
        ...     "d/dx log σ(x) = 1 − σ(x) lies in (0, 1)."
        ...     return x.bounded(x.lip)
    """

    def register(answer: Answer) -> Answer:
        for target in targets:
            key = key_of(target)
            if isinstance(key, type):
                _METHODS[key] = _methods(key)
            RULES[key] = Rule(key, answer, (answer.__doc__ or "").strip())
        return answer

    return register


def key_of(target: Any) -> Any:
    """The key under which the rule of an operation or a module class is kept."""
    if isinstance(target, str) or (isinstance(target, type) and issubclass(target, nn.Module)):
        return target
    return canonical(target)


def rule_for(op: Any) -> Rule | None:
    """The rule of an operation or of a module class."""
    return RULES.get(op)


def kept_whole(module: nn.Module, table: Container[Any] = RULES.keys()) -> bool:
    """Whether a table's entry for the module's own class speaks for what it does.

    A subclass may compute something else. So may an instance with hooks, with an attribute in place of a method, or
    with a part of another class than the one that the class's ``PARTS`` name: that one is captured operation by
    operation. A part with a name of its own is none of the class's.
    """
    cls = type(module)
    if cls not in table or any(_altered(part) for part in module.modules()) or _METHODS.get(cls) != _methods(cls):
        return False
    parts = getattr(cls, "PARTS", None)
    if parts is None:  # a class of the user's own, whose rule says what it does with its parts
        return True
    return all(
        type(part) in parts.get(name, ()) or parts.get(name) == (nn.Module,) for name, part in module.named_children()
    )


def _altered(module: nn.Module) -> bool:
    """Whether an instance does something else than its class says."""
    hooks = any(value for name, value in vars(module).items() if name.endswith("_hooks") and "state_dict" not in name)
    hidden = any(inspect.isroutine(getattr(type(module), name, None)) for name in vars(module))
    return hooks or hidden or getattr(module, "_compiled_call_impl", None) is not None or _hooked_globally()


def _hooked_globally() -> bool:
    """Whether hooks are set that run for every module of the process."""
    found = vars(torch.nn.modules.module)
    return any(value for name, value in found.items() if name.startswith("_global_") and name.endswith("_hooks"))


# The methods that module classes had when their rules were registered.
_METHODS: dict[type, dict[str, Any]] = {}


def _methods(cls: type) -> dict[str, Any]:
    """What the class and its bases define, down to ``nn.Module``."""
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return {name: value for base in reversed(own) for name, value in vars(base).items() if callable(value)}
