"""The file from which an interrupted fine-tuning resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lipcert.errors import InputError, first_line
from lipcert.inputs.files import replacing


def write(path: Path, settings: dict[str, Any], state: dict[str, Any]) -> None:
    """Writes the checkpoint; replaces an existing file atomically."""
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            torch.save({"lipcert_finetune": settings, **state}, file)
    except (OSError, RuntimeError) as error:
        # After that of a full disk, torch raises an error of its own, of positions in the file.
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise InputError(f"cannot write the checkpoint {path}: {first_line(reason)}") from error


def read(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The state that :func:`write` stored for the same settings; None without a file. No code in it is run."""
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        before = dict(content.pop("lipcert_finetune"))
    except Exception as error:
        raise InputError(
            f"{path} is no checkpoint of a fine-tuning, or is damaged; move it away, or write to another file"
        ) from error
    other = [name for name, value in settings.items() if before.get(name) != value]
    if other:
        raise InputError(
            f"{path} is of a run with another {', '.join(other)}; "
            "repeat that run to resume it, or remove the file to start over"
        )
    return dict(content)
