"""Entries of the leaderboard, filled from a result file that was verified (``leaderboard/schema.json``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lipcert.errors import InputError
from lipcert.inputs.files import replacing
from lipcert.results._reading import Run

# What the author of an entry writes; the rest follows from the run.
_BY_HAND = {"network": "", "data": "", "extra_data": None, "training": "", "source": {"text": ""}}


def read_entry(path: Path, run: Run) -> dict[str, Any]:
    """The entry as it is, or an empty one.

    Raises:
        InputError: the file is no JSON object, or the run says nothing of the accuracy on a data set.
    """
    if not (run.labelled and run.complete) or run.inside:
        raise InputError(f"an entry needs a finished run over labelled images with perturbed pixels, unlike {run.path}")
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else _BY_HAND
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as an entry of the leaderboard: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is no JSON object, so it is no entry of the leaderboard; give one of its files")
    return dict(found)


def write_entry(path: Path, entry: Mapping[str, Any], run: Run, recomputed: int, parameters: int) -> None:
    """Writes the entry with the shares of a run, in percent, and what is known of its certificates.

    Args:
        path: the file, which is replaced; a folder that is missing is made.
        entry: from :func:`read_entry`.
        run: the run, verified.
        recomputed: how many of its rows were recomputed and confirmed.
        parameters: those of the network and of its denoiser.
    """
    total, known = len(run), entry.get("certificate") or {}
    words = [f"{name}: {word}" for name, word in run.words.items() if word]
    attack = {run.eps_typed: _percent(run.withstood, total)} if run.accuracy_under_attack is not None else None
    filled = {
        **_BY_HAND,
        **{name: value for name, value in entry.items() if name != "attacked"},
        "clean": _percent(run.correct, total),
        "certified": {typed: _percent(run.certified_at(eps), total) for eps, typed in run.every_eps},
        "certificate": {
            "kind": known.get("kind") or (run.holds_for if run.smoothed else ", ".join(run.methods)),
            "guarantee": run.rigor,
            "assumptions": ", ".join(words),
        },
        "images": total,
        "parameters": parameters,
        **({"attacked": attack} if attack else {}),
        "verified": {
            "command": str(run.summary.get("command")),
            "lipcert": str(run.summary.get("lipcert")),
            "weights": run.weights_hash,
            "rows": total,
            "recomputed": recomputed,
        },
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json.dumps(filled, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _percent(part: int, total: int) -> float:
    return round(100 * part / total, 2)
