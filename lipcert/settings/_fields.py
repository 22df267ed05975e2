"""Fields of settings: help texts, defaults and checks, from which commands and calls are made."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from decimal import ROUND_FLOOR, Context, Decimal
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from lipcert.errors import InputError

LARGEST = 1e30
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])


class Range(NamedTuple):
    """The numbers from ``low`` to below ``high``, without ``low`` unless it is included, and how a message says so."""

    words: str
    low: float
    high: float = math.inf
    included: bool = False
    whole: bool = False

    def holds(self, value: Any) -> bool:
        """Whether a value is one of the numbers."""
        kind: Any = int if self.whole else Real
        if not isinstance(value, kind) or isinstance(value, bool):
            return False
        return self.low < value < self.high or (self.included and value == self.low)


POSITIVE = Range(f"a positive number below {LARGEST:g}", 0, LARGEST)
INSIDE = Range("a fraction above 0 and below 1, not a percentage", 0, 1)
FAILURE = Range("a failure probability below 0.5, such as 0.001, not a confidence", 0, 0.5)
SHARE = Range("a fraction of the run, from 0 to below 1", 0, 1, True)
WEIGHT = Range(f"a number from 0 to {LARGEST:g}", 0, LARGEST, True)
COUNT = Range("at least 1, a whole number", 1, 2**40, True, whole=True)


def option(
    help: str,
    default: Any = dataclasses.MISSING,
    typed: Any = None,
    *,
    range: Range | None = None,
    choices: Sequence[str] = (),
    group: str | None = None,
    given: Any = None,
    python: bool | Sequence[str] = False,
) -> Any:
    """A field that is also an option of the command, of the type of its default, or a text.

    With ``python`` it, or its choices of these names, are for calls from Python only.
    """
    shown = default if given is None else given
    kind = typed or (type(shown) if isinstance(shown, (bool, int, float)) else str if shown is not None else str | None)
    about = {"help": help, "typed": kind, "choices": choices, "group": group, "given": given, "python": python}
    return field(default=default, metadata={**about, "range": range})


def documented(kind: type[S]) -> type[S]:
    """A decorator that puts the help of each field into the docstring of settings."""
    known: Any = kind
    helps = "".join(f"        {one.name}: {one.metadata['help']}\n" for one in fields(known) if "help" in one.metadata)
    text, attributes, rest = str(kind.__doc__).partition("    Attributes:\n")
    if not attributes:
        text, raises, rest = text.partition("    Raises:\n")
        rest = f"\n{raises}{rest}"
    kind.__doc__ = f"{text}    Attributes:\n{helps}{rest}"
    return kind


def shown(value: float, rounding: str = ROUND_FLOOR) -> str:
    """A number with three digits, rounded down or in another way of ``decimal``."""
    if value == 0:
        return "0"
    rounded = Context(prec=3, rounding=rounding).create_decimal(Decimal(value))
    return f"{rounded:f}" if 1e-3 <= value < 1e4 else f"{rounded:.2e}"


def parse_memory(memory: object) -> float:
    """Bytes: a positive number, or a text such as ``"8GB"`` or ``"500 MiB"``."""
    size = 0.0
    if isinstance(memory, str):
        form = re.fullmatch(
            r"(?P<number>\d+(\.\d+)?(e\d+)?)\s*(?P<power>[KMGT]?)(?P<binary>i?)B?", memory.strip(), re.I | re.A
        )
        if form is not None:
            power = " KMGT".index(form["power"].upper() or " ")
            size = float(form["number"]) * float(1024 if form["binary"] else 1000) ** power
    elif isinstance(memory, Real) and not isinstance(memory, bool):
        size = float(memory)
    if 1 <= size < math.inf:
        return size
    raise InputError(f"memory must be a number of bytes, got {memory!r}; for example 8GB or 500MB")


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuses a value that is not one of the choices, and suggests a similar one."""
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, 1)
        hint = f"did you mean {close[0]}? There are" if close else f"the {name} is one of"
        raise InputError(f"there is no {name} {value!r}; {hint} {', '.join(choices)}")


def settings_of(kind: Callable[..., S], *arguments: Any, **options: Any) -> S:
    """Creates settings; reports unknown or missing arguments in one line."""
    signature = inspect.signature(kind)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        close = [name for wrong in options for name in difflib.get_close_matches(wrong, signature.parameters, 1)]
        suggestions = [name for name in close if name not in options]
        hint = (
            f"did you mean {suggestions[0]}?" if suggestions else f"the arguments are {', '.join(signature.parameters)}"
        )
        raise InputError(f"{error}; {hint}") from error
    return kind(*arguments, **options)


def takes(kind: type) -> Callable[[F], F]:
    """A decorator that adds the fields of settings to the signature of a function, for help and editors."""

    def shown(function: F) -> F:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            p.replace(kind=p.KEYWORD_ONLY)
            for p in inspect.signature(kind).parameters.values()
            if p.name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*parameters, *more])  # type: ignore[attr-defined]
        return function

    return shown


def check(settings: Any) -> None:
    """Refuses values that are not among the choices or in the range of their field.

    Numbers of NumPy and torch, which JSON cannot represent, become Python numbers.
    """
    for one in fields(settings):
        value, choices, within = getattr(settings, one.name), one.metadata.get("choices"), one.metadata.get("range")
        if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
            value = value.item()
            object.__setattr__(settings, one.name, value)
        if value is None and one.default is None:
            continue
        if choices:
            one_of(one.name, value, choices)
        if within is not None and not within.holds(value):
            raise InputError(f"{one.name} must be {within.words}, got {value!r}")
