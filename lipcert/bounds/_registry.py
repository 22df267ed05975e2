"""The rule table: one entry for each operation, and how users add their own."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

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

    A subclass may compute something else, and so may an instance with hooks or with a ``forward`` of its own.
    """
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) in table and not changed
