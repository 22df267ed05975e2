"""The output file of a command that writes a model."""

import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipcert.errors import InputError
from lipcert.inputs.sources import Source

from ._print import say

if TYPE_CHECKING:
    from lipcert.model import Model


def output(
    out: Path | None,
    stem: str,
    source: Source,
    weights: Sequence[Path],
    model: "Model",
    step: str,
    force: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """The file to write: ``out``, or one that is named ``stem``, with a number where that holds something else.

    It replaces no input, and, unless forced, only a result of the same step and settings.

    Raises:
        InputError: ``out`` is not free, or its folder cannot be made.
    """
    from lipcert.inputs.artifact import check_free

    names = (f"{stem}{'' if number == 1 else f'.{number}'}.lipcert.safetensors" for number in count(1))
    for path in [out] if out else map(Path, names):
        try:
            if any(file.exists() and path.exists() and path.samefile(file) for file in (Path(source.name), *weights)):
                raise InputError(f"{path} is a file of the model itself; give another --out")
            check_free(path, model, force, step, settings)
            break
        except InputError:
            if out or not path.is_file():
                raise
            say(f"note: {path} has other content and is not overwritten")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path.parent}: {error.strerror or error}") from error
    if not any(os.access(place, os.W_OK) for place in (path.parent, path)):
        raise InputError(f"cannot write {path}: permission denied; give --out in another folder")
    return path
