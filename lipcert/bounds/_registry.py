"""The registry of rules: one for each operation, with its bounds for every certificate; users can add their own."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from lipcert.graph import Node, alterations, canonical

Answer = TypeVar("Answer", bound=Callable[..., Any])


@dataclass(frozen=True)
class Call:
    """The operation for which a rule is called, without its operands.

    Attributes:
        shape: shape of the result for a batch of one image.
        path: dotted path of the module in which it runs.
        op: its key in the registry.
    """

    shape: tuple[int, ...]
    path: str
    op: Any


class NoAnswer(Exception):
    """Raised by a rule for arguments that it does not cover; reported together with operations that have no rule."""


class Tag(enum.Flag):
    """Properties of operations, by which other code selects operations without naming them; see :func:`tagged`."""

    MOVES = 1 << 0  # every entry of the result is one of the operands or of the constants
    REARRANGES = 1 << 1 | MOVES  # every entry of the one operand once
    KEEPS = 1 << 2 | REARRANGES  # in the same order
    COPIES = 1 << 3 | KEEPS  # a cast, a copy or another layout
    SPLITS = 1 << 4 | MOVES  # a tuple of disjoint parts
    PART = 1 << 5 | MOVES  # one result of an operation with several
    JOINS = 1 << 6 | MOVES  # operands side by side
    NEGATES = 1 << 7
    ADDS = 1 << 8  # x ± αy
    SUBTRACTS = 1 << 9 | ADDS  # x − αy
    SCALES = 1 << 10  # xy, x/y
    SUMS = 1 << 11  # sums or means of groups of entries
    CONTRACTS = 1 << 12  # every entry is a sum of products with entries of a second factor
    MATRIX_PRODUCT = 1 << 13 | CONTRACTS  # the matrix product of ``input`` and ``other``
    DENSE = 1 << 14 | CONTRACTS  # Wx + b along the last axis, with the arguments ``input``, ``weight`` and ``bias``
    CONVOLVES = 1 << 15 | CONTRACTS  # the same along as many axes as a kernel has
    RECTIFIES = 1 << 16  # max(x, 0)
    POSITIONS = 1 << 17  # positions of entries; harmless where they are not read
    SINGULAR = 1 << 18  # the last positional argument has to stay away from 0
    # What bounds the errors of constants that a network computes: see lipcert.roundoff.
    ENTRYWISE = 1 << 19  # the Lipschitz constant, for each entry by itself
    MONOTONE = 1 << 20  # the results at both ends of the interval of an entry
    MONOTONE_IN_SECOND = 1 << 21  # the same for the second argument, if the first is a constant
    WHOLE = 1 << 22  # whole numbers give whole numbers, exactly, if no sum on the way is larger than 1/u
    WIDENS = 1 << 23  # the result may have a wider type, to which torch converts the operand first


@dataclass(frozen=True)
class Rule:
    """The bounds on one operation, one attribute for each question that certificates ask.

    The decorator of a question registers the answer. The answers for one operation stand together in one file of
    ``lipcert.bounds.rules``. A missing answer is None. A later answer replaces an earlier one.

    Attributes:
        key: canonical name, function or module class; see :func:`key_of`.
        lipschitz: the Lipschitz constant of the result over all images. ``lipschitz(call, *args, **kwargs) -> Value``
            is called with a :class:`Call` and the operation's own arguments; those that depend on the image are
            :class:`~lipcert.bounds.Value` objects. Registered by :func:`rule`.
        box: the range of each entry in a ball around an image. ``box(propagation, node, *operands) -> State``,
            as :class:`~lipcert.bounds.State`. Registered by :func:`box`. Without one, every entry is assumed to move as
            far as the Lipschitz constant allows.
        inactive: whether the box finds units that are constant in the ball, which local constants leave out.
        linear: whether a call of the operation is affine in its image-dependent operands, so that it has no remainder.
            ``linear(node) -> bool`` raises :class:`NoAnswer` for forms that are refused. Registered by :func:`rule`.
        schur: bounds on the matrix of such a call. Registered by :func:`rule`. Without one, its norm is computed.
        remainder: the distance of the operation from its linearisation: a subclass of
            :class:`~lipcert.bounds.Remainder`. Registered by :func:`~lipcert.bounds.remainder`.
        jacobian: bounds on the Jacobian at values computed in float64. Registered by :func:`jacobian`. Without one, the
            norm of an operation with a remainder is computed separately.
        rounding: the rounding errors of the deployed operation, shape (N, *node.shape). ``rounding(node, operands, fmt)
            -> Tensor``, with operands as :class:`~lipcert.bounds.Operand`. Registered by :func:`rounding`.
        tags: further properties of the operation. Registered by :func:`rule` or :func:`tag`.
    """

    key: Any
    lipschitz: Callable[..., Any] | None = None
    box: Callable[..., Any] | None = None
    inactive: bool = False
    linear: Callable[[Node], bool] | None = None
    schur: Schur | None = None
    remainder: type[Any] | None = None
    jacobian: Jacobian | None = None
    rounding: Callable[..., Any] | None = None
    tags: Tag = Tag(0)
    # The methods of a module class at the time each answer was registered.
    methods: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Jacobian:
    """Bounds on the Jacobian of an operation at computed values; see :mod:`lipcert.bounds._jacobian`.

    Attributes:
        bounds: ``bounds(node, place, values)``, the pair (A, κ) for the operand with index ``place``.
        norm: ``norm(node, place, values)``, a bound on ‖J‖ that is smaller than A and takes longer; None where A is the
            norm or none is known.
        absolute: the rounding error of the result is at most γ₀(‖result‖ + absolute · ‖operand‖); None if κ implies a
            bound.
        covers: whether the bounds hold for a captured operation, by its operands.
    """

    bounds: Callable[..., Any]
    absolute: float | None
    covers: Callable[[Node], bool]
    norm: Callable[..., Any] | None


@dataclass(frozen=True)
class Schur:
    """How Schur's test bounds the matrix J of an operation that is affine in one operand; see :func:`.schur_bounds`.

    Attributes:
        magnitudes: whether |J| is the operation with the absolute values of its floating-point constants. If not, the
            constants are offsets, places, or factors of a single entry each, and the entries of J in a row, and in a
            column, have one sign, so that nothing cancels in their sum.
        terms: ``terms(node, operand)``, the largest number of terms in the sum that gives an entry of J v or Jᵀu. None
            if the entries of J are 0, 1 and −1: then the sums of its rows and columns are these numbers.
        signs: the absolute values of a row or column of J sum to at most this multiple of what the test finds.
    """

    magnitudes: bool = False
    terms: Callable[[Node, Node], float] | None = None
    signs: float = 1.0


COUNTED = Schur()

RULES: dict[Any, Rule] = {}


def rule(
    *targets: Any,
    linear: bool | Callable[[Node], bool] | None = None,
    schur: Schur | None = None,
    tags: Tag | None = None,
) -> Callable[[Answer], Answer]:
    """Registers the Lipschitz constants of one or several operations.

    Args:
        targets: functions of torch (such as ``torch.nn.functional.gelu``; all names of an operation share one rule),
            canonical names (``"gelu"``), your own functions that support ``torch.overrides``, or subclasses of
            ``nn.Module``. Such modules are kept whole: the rule is called with the module before its inputs.
        linear: whether the operation is affine in its image-dependent operands, so that it needs no remainder. Pass a
            function of the captured operation if that depends on the arguments. None keeps the value of an earlier
            rule.
        schur: for ``linear`` operations, how their matrix is bounded. The norm of others is computed.
        tags: further properties of the operations. None keeps the tags of an earlier rule.

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

    flags: dict[str, Any] = {name: x for name, x in (("schur", schur), ("tags", tags)) if x is not None}
    if linear is not None:
        flags["linear"] = linear if callable(linear) else _always if linear else None
    return partial(registered, "lipschitz", targets, **flags)


def box(*targets: Any, inactive: bool = False) -> Callable[[Answer], Answer]:
    """Registers the range of each entry of an operation's result in a ball; targets as for :func:`rule`.

    Args:
        targets: the operations.
        inactive: whether units may be found that are constant in the ball.
    """
    return partial(registered, "box", targets, inactive=inactive)


def jacobian(
    *targets: Any,
    absolute: float | None = None,
    covers: Callable[[Node], bool] | None = None,
    norm: Callable[..., Any] | None = None,
) -> Callable[[Answer], Answer]:
    """Registers bounds on Jacobians at computed values; see :class:`Jacobian`."""

    def register(bounds: Answer) -> Answer:
        known: Any = Jacobian(bounds, absolute, covers or _always, norm)
        registered("jacobian", targets, known)
        return bounds

    return register


def rounding(*targets: Any) -> Callable[[Answer], Answer]:
    """Registers bounds on the rounding errors of operations; targets as for :func:`rule`."""
    return partial(registered, "rounding", targets)


def tag(tags: Tag, *targets: Any) -> None:
    """Registers the tags of operations without a rule of their own; targets as for :func:`rule`."""
    registered("tags", targets, tags)


def tagged(node: Node, *tags: Tag) -> bool:
    """Whether an operation has one of these tags."""
    return node.op in RULES and any(tag in RULES[node.op].tags for tag in tags)


def _always(node: Node) -> bool:
    return True


def in_two_operands(node: Node) -> bool:
    """For products of two values, without constants that a third operand could scale."""
    return len(node.operands) == 2


def in_one_operand(node: Node) -> bool:
    """For products: affine if only one operand depends on the image."""
    return len(node.operands) == 1


def registered(question: str, targets: tuple[Any, ...], answer: Any, **flags: Any) -> Any:
    """Registers the answer to a question for all targets, and returns it."""
    changes: dict[str, Any] = {question: answer, **flags}
    for key in map(key_of, targets):
        rule = RULES.get(key, Rule(key))
        methods = rule.methods | {question: _methods(key)} if isinstance(key, type) else rule.methods
        RULES[key] = replace(rule, **changes, methods=methods)
    return answer


def coverage() -> str:
    """A Markdown table of the answers for each operation, one row per operation, sorted by family and name."""
    rows = []
    for key, rule in RULES.items():
        if rule.lipschitz is None:  # only for constants that a network computes
            continue
        package, _, family = rule.lipschitz.__module__.rpartition(".")
        family = family if package == "lipcert.bounds.rules" else "(your own)"
        name = key if isinstance(key, str) else key.__name__
        left_out = ["yes"] * (rule.remainder is not None) + ["linear"] * (rule.linear is not None)
        others = ["yes" if answer else "" for answer in (rule.jacobian, rule.rounding)]
        rows.append((family, name, "yes" if rule.box else "", ", or ".join(left_out), *others))
    lines = [("family", "operation", "box", "remainder", "Jacobian", "rounding"), ("---",) * 6, *sorted(rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def answer_of(op: Any, question: str) -> Any:
    """The answer of an operation's rule to a question."""
    answer = getattr(RULES.get(op), question, None)
    if answer is None:
        raise NoAnswer
    return answer


def check_entries(node: Node) -> None:
    """Refuses operations on empty tensors, so that no rule meets an empty group of entries.

    A sum over no entries is 0, a largest entry −∞, a softmax over no entries sums to 0, and attention to no keys is 0:
    facts that hold for all other groups (a floor, a mass, a mean) fail there. Empty tensors may only be split off,
    moved and concatenated.
    """
    if tagged(node, Tag.MOVES):
        return
    sizes = [node.entries, *(operand.entries for operand in node.operands if operand.single)]
    if 0 in sizes or not all(tensor.numel() for tensor in node.tensors):
        raise NoAnswer("a value without entries")


def refusal(node: Node, reason: NoAnswer) -> tuple[str, str]:
    """An operation that no rule covers, with the reason, and its module path: for ``UnsupportedOperation``."""
    return f"{node.name} ({reason})" if str(reason) else node.name, node.path


def key_of(target: Any) -> Any:
    """The key of an operation or a module class in the registry."""
    if isinstance(target, str) or (isinstance(target, type) and issubclass(target, nn.Module)):
        return target
    return canonical(target)


def kept_whole(module: nn.Module, question: str = "lipschitz") -> bool:
    """Whether the answer registered for the module's class is valid for this instance.

    A subclass may compute something else. So may an instance whose code or parts, or whose classes, are not as they
    were when the answer was registered (:func:`lipcert.graph.alterations`), or with a submodule whose name or class is
    not listed in the class's ``PARTS``. Such a module is captured operation by operation.
    """
    cls = type(module)
    registered = RULES[cls].methods.get(question) if cls in RULES else None
    if registered is None or registered != _methods(cls) or next(alterations(module, registered), None):
        return False
    parts = getattr(cls, "PARTS", None)
    if parts is None:  # a user's class, whose rule must account for its submodules
        return True
    return all(
        type(part) in parts.get(name, ()) or parts.get(name) == (nn.Module,) for name, part in module.named_children()
    )


def _methods(cls: type) -> dict[str, Any]:
    """The methods that the class and its bases below ``nn.Module`` define."""
    classes = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return {name: value for base in reversed(classes) for name, value in vars(base).items() if callable(value)}
