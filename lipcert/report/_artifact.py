"""The file and the name of a run's model."""

from __future__ import annotations

import shlex
from pathlib import Path

from lipcert.inputs.checkpoints import checkpoints
from lipcert.results import Run


def artifact_of(run: Run) -> Path | None:
    """The file with the run's weights: a local artifact named in its command, or one of lipcert's; otherwise None."""
    from lipcert.inputs.artifact import is_artifact, read_metadata  # they import torch

    for path in (*(Path(word) for word in command_of(run) if is_artifact(word)), *shipped()):
        if read_metadata(path)["weights_hash"] == run.weights_hash:
            return path
    return None


def command_of(run: Run) -> list[str]:
    """The command of a run."""
    command = run.summary.get("command") or ""
    return shlex.split(command) if isinstance(command, str) else command


def shipped() -> dict[Path, str]:
    """The files of the checkpoints that come with lipcert, and their names."""
    return {one.path: one.name for one in checkpoints()}


def title(run: Run) -> str:
    """A name for the model of a run: the name or the file of its artifact, or the run's network."""
    path = artifact_of(run)
    if path is None:
        return run.network
    return shipped().get(path) or path.name.removesuffix(".safetensors").removesuffix(".lipcert")
