"""What tests of commands share: running one, the images it is given, and reading what it printed and wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from lipcert.cli import app


def run(*arguments: object, code: int = 0, **settings: Any) -> Result:
    """What lipcert prints for these arguments, given ``settings`` that have no option; it must end with ``code``."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], obj=settings)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def refused(
    *arguments: object, code: int = 2, besides: tuple[str, ...] = ("note: the weights are ",), **settings: Any
) -> str:
    """The one line that a command which must fail prints, besides lines that begin in a way that is known."""
    result = run(*arguments, code=code, **settings)
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith(besides)]
    assert line.startswith("lipcert: ")
    return line


def facts(output: str) -> dict[str, str]:
    """Names and values of what was printed."""
    return dict(line.split("\t") for line in output.splitlines() if line.count("\t") == 1)


def read_rows(path: str | Path = "r.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def timeless(path: str | Path = "r.jsonl") -> list[dict[str, Any]]:
    """Rows without the time they took, which is all that may differ between two runs."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_rows(path)]


def read_summary(path: str | Path = "r.summary.json") -> dict[str, Any]:
    return json.loads(Path(path).read_text())


def write_images(folder: str | Path, count: int, size: int, classes: str = "abc") -> None:
    """Images of noise, dealt to the classes one by one."""
    generator = np.random.default_rng(0)
    for i in range(count):
        path = Path(folder) / classes[i % len(classes)] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(path)
