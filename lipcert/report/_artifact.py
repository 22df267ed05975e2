"""The file and the name of a run's model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lipcert.inputs.checkpoints import checkpoints
from lipcert.results import Run, same_logits


def artifact_of(run: Run) -> Path | None:
    """The file of the run's model: a local artifact named in its command, or one of lipcert's; otherwise None."""
    from lipcert.inputs.artifact import is_artifact, read_metadata  # they import torch

    for path in (*(Path(word) for word in command_of(run) if is_artifact(word)), *shipped()):
        if read_metadata(path)["weights_hash"] == run.weights_hash and _same(run.example_logits, _logits_of(path)):
            return path
    return None


@cache
def _logits_of(path: Path) -> list[list[float]]:
    """The logits of a file's model on the example images: the weights may have been run by other code."""
    from lipcert.graph import identity_of_code
    from lipcert.inputs.loading import load

    return identity_of_code(load(path))[1]


def _same(logits: Any, others: Any) -> bool:
    return logits is None or others is None or same_logits(logits, others, 1e-3)


def by_model(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of each model: those with the same weights and the same logits on the example images."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if all(
                other.weights_hash == run.weights_hash and _same(other.example_logits, run.example_logits)
                for other in group
            ):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def command_of(run: Run) -> list[str]:
    """The command of a run."""
    return shlex.split(run.summary.get("command") or "")


def shipped() -> dict[Path, str]:
    """The files of the checkpoints that come with lipcert, and their names."""
    return {one.path: one.name for one in checkpoints()}


def title(run: Run) -> str:
    """A name for the model of a run: the name or the file of its artifact, or the run's network."""
    path = artifact_of(run)
    if path is None:
        return run.network
    return shipped().get(path) or path.name.removesuffix(".safetensors").removesuffix(".lipcert")
