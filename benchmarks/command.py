"""``lipcert`` with the settings that only Python has, for the tables of papers.

python -m benchmarks.command finetune MODEL --data train.tar --loss local-b --ramp 0,1.1,0.5
"""

from __future__ import annotations

import ast
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lipcert.cli import app
from lipcert.cli._finetune import TrainingImages
from lipcert.settings import ConstrainSettings, FinetuneSettings

PYTHON = {
    f"--{one.name.replace('_', '-')}": one
    for kind in (FinetuneSettings, ConstrainSettings, TrainingImages)
    for one in fields(kind)
    if one.metadata.get("python")
}


def split(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The arguments of the command, and the settings that it takes from Python."""
    typed: list[str] = []
    settings: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        one = PYTHON.get(word)
        if one is None:
            typed.append(word)
        elif one.metadata["typed"] is bool:
            settings[one.name] = True
        elif one.metadata["typed"] == list[str] | None:
            settings.setdefault(one.name, []).append(next(words))
        else:
            settings[one.name] = _value(next(words))
    return typed, settings


def shown(arguments: Sequence[str]) -> str:
    """The command line: of ``lipcert``, where there is no setting for Python among the arguments."""
    return shlex.join([*(["python", "-m", "benchmarks.command"] if split(arguments)[1] else ["lipcert"]), *arguments])


def _value(text: str) -> Any:
    """A number, several with commas between, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    typed, settings = split(sys.argv[1:])
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app(typed, obj=settings, prog_name="lipcert")
