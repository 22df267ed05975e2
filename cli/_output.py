"""Where a command writes its model, and on which device it works."""

import os
from pathlib import Path

import torch

from lipcert.artifact import check_free
from lipcert.errors import InputError
from lipcert.loading import is_file
from lipcert.model import Model


def default_name(source: str, step: str = "") -> Path:
    """A file in the working folder, named after a model or its file and the step that was done."""
    name = Path(source).name if is_file(source) else source
    stem = name.removesuffix(".safetensors").removesuffix(".lipcert")
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem)
    return Path(f"{safe}{'.' + step if step else ''}.lipcert.safetensors")


def check_out(path: Path, inputs: list[Path], model: Model, force: bool = False) -> None:
    """Refuses to write over the model's own file, and, unless forced, over all but artifacts of its architecture.

    Raises:
        InputError: saying which, or that there is no such folder.
    """
    if any(source.exists() and path.exists() and path.samefile(source) for source in inputs):
        raise InputError(f"{path} is the model's own file, which stays as it is; give another --out")
    check_free(path, model.source.get("name"), force)
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write {path.name} to")


def move_to(model: Model, device: str | None) -> None:
    """Moves the model to the device named, or to a GPU if there is one; each process of torchrun has its own.

    Raises:
        InputError: there is no such device.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if name == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        model.to(torch.device(name))
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise InputError(f"there is no device {name} here; give --device cpu, or leave it out") from error
