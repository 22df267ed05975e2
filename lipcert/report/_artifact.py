"""The file and the name of a run's model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from lipcert.denoisers import Denoised
from lipcert.errors import LipcertError
from lipcert.graph import identity_of_code
from lipcert.inputs.artifact import read_metadata, weights_hash
from lipcert.inputs.checkpoints import checkpoints
from lipcert.inputs.loading import load
from lipcert.inputs.preprocessing import RESIZING, Preprocessing
from lipcert.inputs.sources import is_artifact
from lipcert.results import Run, same_examples


@lru_cache(maxsize=16)  # a report asks several times, and the network is loaded
def artifact_of(run: Run) -> Path | None:
    """The file of the run's model: a local artifact named in its command, or one of lipcert's; otherwise None."""
    for path in (*(Path(word) for word in command_of(run) if is_artifact(word)), *shipped()):
        with suppress(LipcertError):  # as of a file that was written anew since, or of a denoiser of the user's
            if read_metadata(path)["source"] == run.summary["model"].get("source") and _is_of(run, path):
                return path
    return None


def _is_of(run: Run, path: Path) -> bool:
    """Whether a file's model, with the run's additions, has its weights and logits; other code may run the weights."""
    denoiser, pixels = added(run, path)
    model = load(path)
    Preprocessing(**pixels).apply(model)
    model = model if denoiser is None else Denoised(model, denoiser)
    return weights_hash(model) == run.weights_hash and _same(run.example_logits, identity_of_code(model)[1])


def added(run: Run, path: Path) -> tuple[str | None, dict[str, Any]]:
    """What a run added to a file's model: its denoiser, and the preprocessing that differs from the file's."""
    content = read_metadata(path)
    before, now = {**RESIZING, **content["data_config"], **content}, run.summary.get("preprocessing") or {}
    stored, asked = (vars(Preprocessing.of_summary(entries)) for entries in (before, now))
    pixels = {name: value for name, value in asked.items() if value not in (None, stored[name])}
    return None if any(step["step"] == "denoise" for step in content["recipe"]) else run.denoiser, pixels


def _same(logits: Any, others: Any) -> bool:
    return logits is None or others is None or same_examples(logits, others, 1e-3)


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
