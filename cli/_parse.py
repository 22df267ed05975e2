"""What the texts of options mean."""

import ast
from pathlib import Path
from typing import Any

from lipcert.errors import InputError


def parse_shard(text: str) -> tuple[int, int]:
    """Which part, from 0, of how many: ``2/5`` is (1, 5).

    Raises:
        InputError: if it is no such pair.
    """
    part, slash, parts = text.partition("/")
    if slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts):
        return int(part) - 1, int(parts)
    raise InputError(f"--shard takes a part and the number of parts, such as 2/5, got {text!r}")


def read_names(path: Path) -> list[str]:
    """The models that a text file names, a line each; empty lines and those that start with # are passed over.

    Raises:
        InputError: if there is no such file, or it names none.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the models from {path}: {error}") from error
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise InputError(f"{path} names no model; give one a line")
    return names


def parse_model_args(text: str | None) -> dict[str, Any]:
    """``KEY=VALUE`` pairs; values are Python literals where they read as such, else text.

    Raises:
        InputError: if a part is no such pair.
    """
    arguments: dict[str, Any] = {}
    for pair in (text or "").split():
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"--model-args takes KEY=VALUE pairs with spaces between, got {pair!r}")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key] = value
    return arguments
