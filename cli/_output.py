"""The output file of a command that writes a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipcert.errors import InputError

if TYPE_CHECKING:
    from lipcert.model import Model


def check_out(
    path: Path,
    inputs: list[Path],
    model: "Model",
    step: str,
    force: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Checks that the output replaces no input, and, unless forced, only a result of the same step and settings."""
    from lipcert.inputs.artifact import check_free

    if any(source.exists() and path.exists() and path.samefile(source) for source in inputs):
        raise InputError(f"{path} is a file of the model itself; give another --out")
    check_free(path, model, force, step, settings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path.parent}: {error.strerror or error}") from error
