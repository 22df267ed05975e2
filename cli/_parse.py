"""Parses the texts of options."""

import ast
import math
import re
from typing import Any

from lipcert.errors import InputError


def parse_shard(text: str) -> tuple[int, int]:
    """The index of the part, from 0, and the number of parts: ``2/5`` is (1, 5)."""
    part, slash, parts = text.partition("/")
    if slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts):
        return int(part) - 1, int(parts)
    raise InputError(f"--shard takes a part and the number of parts, such as 2/5 (they count from 1), got {text!r}")


def parse_duration(text: str | None) -> float:
    """Seconds: ``90``, ``90s``, ``10m`` or ``1.5h``; ∞ for None."""
    if text is None:
        return math.inf
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InputError(f"--time-budget takes a duration, such as 10m, 90s or 1h, got {text!r}")
    return seconds


_WORDS = {"true": True, "false": False, "none": None, "null": None}  # in any case
_NO_MODEL_ARGS = ("source", "pretrained", "checkpoint", "features", "new_head")  # of lipcert.load


def parse_model_args(text: str | None) -> dict[str, Any]:
    """``KEY=VALUE`` pairs; a value is a Python literal if it can be read as one, else text."""
    arguments: dict[str, Any] = {}
    for pair in (text or "").split():
        key, equals, value = pair.removesuffix(",").partition("=")
        if not equals or not key.isidentifier() or re.search(r",\w+=", value):
            raise InputError(f"--model-args takes KEY=VALUE pairs separated by spaces, got {pair!r}")
        if key in _NO_MODEL_ARGS:
            raise InputError(
                f"--model-args is for arguments of the timm model; {key} is none of them: lipcert has an option for it"
            )
        try:
            read = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            read = _WORDS.get(value.lower(), value)
        if arguments.setdefault(key, read) != read:
            raise InputError(f"--model-args gives {key} twice, {arguments[key]!r} and {read!r}; give it once")
    return arguments
