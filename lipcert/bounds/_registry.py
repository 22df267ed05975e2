"""The registry: one rule for each operation, with its answers to all questions, and how users add their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from lipcert.graph import Node, canonical

Answer = TypeVar("Answer", bound=Callable[..., Any])


@dataclass(frozen=True)
class Call:
    """The operation a rule is asked about, beside its operands.

    Attributes:
        shape: shape of the result for a batch of one image.
        path: dotted path of the module in which it runs.
    """

    shape: tuple[int, ...]
    path: str


class NoAnswer(Exception):
    """Raised by a rule for arguments that it does not cover; collected with the operations that have no rule."""


@dataclass(frozen=True)
class Rule:
    """All that is known of one operation: its answers to the questions that certificates ask.

    Each answer is registered by the decorator of its question, next to the others in one file of
    ``lipcert.bounds.rules``; None where there is no answer. A later answer replaces the earlier one.

    Attributes:
        key: canonical name, function or module class; see :func:`key_of`.
        lipschitz: how far the result can move over all images. ``lipschitz(call, *args, **kwargs) -> Value`` is called
            with a :class:`Call` and the operation's own arguments, those that depend on the image as
            :class:`~lipcert.bounds.Value`. Registered by :func:`rule`.
        box: how far each entry can move in a ball around an image. ``box(walk, node, *operands) -> State``, the
            operands as :class:`~lipcert.bounds.State`. Registered by :func:`box`; without one, every entry is taken to
            move as far as the Lipschitz constant allows.
        linear: whether a call of the operation is affine in what depends on the image, so that it has no remainder.
            ``linear(node) -> bool`` raises :class:`NoAnswer` for forms that are refused. Registered by :func:`rule`.
        remainder: how far the operation is from its linearisation: a class as :class:`~lipcert.bounds.Remainder`.
            Registered by :func:`remainder`.
        secant: other slopes at kinks, with which it may be linearised. Registered by :func:`secant`.
        jacobian: how large the Jacobian is at computed values in float64. Registered by :func:`jacobian`; without one,
            the norm of the operation is found by itself, where the operation has a remainder.
        rounding: the rounding errors of the deployed operation, shape (N, *node.shape).
            ``rounding(node, operands, fmt) -> Tensor``, operands as :class:`~lipcert.bounds.Operand`. Registered by
            :func:`rounding`.
    """

    key: Any
    lipschitz: Callable[..., Any] | None = None
    box: Callable[..., Any] | None = None
    linear: Callable[[Node], bool] | None = None
    remainder: type[Any] | None = None
    secant: Secant | None = None
    jacobian: Jacobian | None = None
    rounding: Callable[..., Any] | None = None
    # The methods that a module class had when each answer was registered.
    methods: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Secant:
    """How an operation is linearised with secants.

    Attributes:
        function: the operation with the slope of the secant for its derivative: takes its operand, the width, and the
            rest of the arguments. It has a remainder of its own, whose second operand is the width, shape (N, 1).
        rest: the arguments behind the operand and the width.
    """

    function: Callable[..., Any]
    rest: Callable[[Node], tuple[Any, ...]] = lambda node: ()


@dataclass(frozen=True)
class Jacobian:
    """How large the Jacobian of an operation is at computed values: see :mod:`lipcert.bounds._jacobian`.

    Attributes:
        bounds: ``bounds(node, place, values)``, the pair (A, κ) for the operand at one place.
        absolute: of operations that round their result by γ₀(‖result‖ + absolute · ‖operand‖) at most; None where that
            follows from κ.
    """

    bounds: Callable[..., Any]
    absolute: float | None


RULES: dict[Any, Rule] = {}


def rule(*targets: Any, linear: bool | Callable[[Node], bool] | None = None) -> Callable[[Answer], Answer]:
    """Registers the Lipschitz constants of one or several operations: the short form of a rule.

    Args:
        targets: functions of torch (``torch.nn.functional.gelu``; every spelling of an operation shares one rule),
            canonical names (``"gelu"``), functions of your own that answer ``torch.overrides``, or subclasses of
            ``nn.Module``, which are then kept whole: the rule is called with the module before its inputs.
        linear: whether the operation is affine in what depends on the image; a function of the captured operation
            where that depends on its arguments. It then needs no remainder. None leaves what an earlier rule said.

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
        affine = {} if linear is None else {"linear": linear if callable(linear) else _always if linear else None}
        _register("lipschitz", targets, answer, **affine)
        return answer

    return register


def box(*targets: Any) -> Callable[[Answer], Answer]:
    """Registers how far each entry of an operation's result can move in a ball; targets as for :func:`rule`."""
    return partial(_registered, "box", targets)


def remainder(*targets: Any) -> Callable[[Answer], Answer]:
    """Registers how far operations are from their linearisations; targets as for :func:`rule`."""
    return partial(_registered, "remainder", targets)


def secant(*targets: Any, rest: Callable[[Node], tuple[Any, ...]] = lambda node: ()) -> Callable[[Answer], Answer]:
    """Registers an operation with the slope of a secant, whose remainder is a class under ``@remainder`` of its own."""

    def register(function: Answer) -> Answer:
        _register("secant", targets, Secant(function, rest))
        return function

    return register


def jacobian(*targets: Any, absolute: float | None = None) -> Callable[[Answer], Answer]:
    """Registers bounds on Jacobians at computed values; see :class:`Jacobian`."""

    def register(bounds: Answer) -> Answer:
        _register("jacobian", targets, Jacobian(bounds, absolute))
        return bounds

    return register


def rounding(*targets: Any) -> Callable[[Answer], Answer]:
    """Registers bounds on the rounding errors of operations; targets as for :func:`rule`."""
    return partial(_registered, "rounding", targets)


def _always(node: Node) -> bool:
    return True


def in_one_operand(node: Node) -> bool:
    """For products: affine as long as one operand alone depends on the image."""
    return len(node.operands) == 1


def _registered(question: str, targets: tuple[Any, ...], answer: Answer) -> Answer:
    _register(question, targets, answer)
    return answer


def _register(question: str, targets: tuple[Any, ...], answer: Any, **flags: Any) -> None:
    for target in targets:
        key = key_of(target)
        known = RULES.get(key, Rule(key))
        methods = known.methods | {question: _methods(key)} if isinstance(key, type) else known.methods
        RULES[key] = replace(known, **{question: answer}, **flags, methods=methods)


def answers(question: str) -> dict[Any, Any]:
    """The answers to one question, by operation."""
    return {key: found for key, rule in RULES.items() if (found := getattr(rule, question)) is not None}


def coverage() -> str:
    """What is answered of each operation, as a Markdown table: one row an operation, sorted by family and name."""
    rows = []
    for key, rule in RULES.items():
        if rule.lipschitz is None:  # the operations that stand for others where those are linearised with secants
            continue
        package, _, family = rule.lipschitz.__module__.rpartition(".")
        family = family if package == "lipcert.bounds.rules" else "(your own)"
        name = key if isinstance(key, str) else key.__name__
        left_out = "linear" if rule.linear is not None and rule.remainder is None else ""
        left_out = left_out or ("with secants" if rule.secant else "yes" if rule.remainder else "")
        left_out = f"{left_out}, or linear" if rule.linear is not None and rule.remainder is not None else left_out
        rows.append(
            (
                family,
                name,
                "yes" if rule.box else "",
                left_out,
                "yes" if rule.jacobian else "",
                "yes" if rule.rounding else "",
            )
        )
    lines = [("family", "operation", "box", "remainder", "Jacobian", "rounding"), ("---",) * 6, *sorted(rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def answer_of(op: Any, question: str) -> Any:
    """The answer of an operation's rule to a question.

    Raises:
        NoAnswer: there is none.
    """
    found = getattr(RULES.get(op), question, None)
    if found is None:
        raise NoAnswer
    return found


def refusal(node: Node, reason: NoAnswer) -> tuple[str, str]:
    """An operation that a rule does not cover, with the reason and its place: for ``UnsupportedOperation``."""
    return f"{node.name} ({reason})" if str(reason) else node.name, node.path


def rule_for(op: Any) -> Rule | None:
    """The rule of an operation or of a module class."""
    return RULES.get(op)


def key_of(target: Any) -> Any:
    """The key under which the rule of an operation or a module class is kept."""
    if isinstance(target, str) or (isinstance(target, type) and issubclass(target, nn.Module)):
        return target
    return canonical(target)


def kept_whole(module: nn.Module, question: str = "lipschitz") -> bool:
    """Whether the answer to a question for the module's own class speaks for what it does.

    A subclass may compute something else. So may an instance with hooks, with an attribute in place of a method, or
    with a part of another class than the one that the class's ``PARTS`` name: that one is captured operation by
    operation. A part with a name of its own is none of the class's.
    """
    cls = type(module)
    registered = RULES[cls].methods.get(question) if cls in RULES else None
    if registered is None or any(_altered(part) for part in module.modules()) or registered != _methods(cls):
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


def _methods(cls: type) -> dict[str, Any]:
    """What the class and its bases define, down to ``nn.Module``."""
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return {name: value for base in reversed(own) for name, value in vars(base).items() if callable(value)}
