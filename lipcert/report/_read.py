"""Result files as :class:`Run`: rows and summary, checked before anything is drawn or claimed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lipcert._rows import DAMAGED, RIGOR, broken_at, check
from lipcert.errors import InputError


@dataclass(frozen=True, eq=False)
class Run:
    """The results of one model on one set of images.

    Attributes:
        path: the file with the rows.
        name: what tables and figures call the run: the file's name, with its folder where two files share it.
        summary: what ``certify`` wrote beside the rows.
        rows: one mapping an image.
        notes: remarks on what is missing, one line each.
    """

    path: Path
    name: str
    summary: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def eps(self) -> float:
        """The ε that was asked for, in ℓ2 on pixels in [0, 1]."""
        return float(self.summary["eps"])

    @property
    def eps_typed(self) -> str:
        """ε as the user wrote it."""
        return str(self.summary.get("eps_typed", f"{self.eps:.6g}"))

    @property
    def labelled(self) -> bool:
        """Whether the true classes are known."""
        return "correct" in self.rows[0]

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each prediction is the label, shape (N,); True everywhere without labels."""
        return np.array([row.get("correct", True) for row in self.rows], dtype=bool)

    @property
    def radii(self) -> NDArray[np.float64]:
        """Certified radii, shape (N,)."""
        return np.array([row["radius"] for row in self.rows], dtype=float)

    @property
    def attacked(self) -> bool:
        """Whether any image was attacked."""
        return any(row.get("attacked") is not None for row in self.rows)

    @property
    def broken_at(self) -> NDArray[np.float64]:
        """Distance at which an attack changed the prediction, shape (N,); ∞ where none did or none was tried."""
        return np.array([broken_at(row, self.eps) for row in self.rows])

    @property
    def correct(self) -> int:
        """How many images are predicted right; all of them without labels."""
        return int(self.right.sum())

    def certified(self, eps: float) -> int:
        """How many images are predicted right with a radius larger than ``eps``; a lower bound on the robust ones."""
        return int((self.right & (self.radii > eps)).sum())

    def surviving(self, eps: float) -> int:
        """How many images are predicted right and not broken within ``eps``; an upper bound on the robust ones."""
        return int((self.right & (self.broken_at > eps)).sum())

    @property
    def median_radius(self) -> float:
        """Median radius of the images predicted right, or of all without labels, rounded down; 0 if there are none."""
        radii = np.sort(self.radii[self.right])
        return float(radii[(len(radii) - 1) // 2]) if len(radii) else 0.0

    @property
    def delta(self) -> float:
        """The largest failure probability of one radius; 0 where all are deterministic."""
        return max(_delta(row["rigor"]) for row in self.rows)

    @property
    def rigor(self) -> str:
        """``deterministic``, or ``probabilistic`` with the largest δ of a row."""
        return f"probabilistic, δ ≤ {self.delta:g} an image" if self.delta else "deterministic"

    @property
    def weights_hash(self) -> str:
        """SHA-256 of the weights."""
        return str(self.summary["model"].get("weights_hash", ""))

    @property
    def architecture(self) -> str:
        """timm's name of the network and the surgery done to it."""
        model = self.summary["model"]
        source = model.get("source", {})
        parts = [(str(source.get("name", "a module")), source.get("arguments", {}))]
        parts += [(str(step.get("step")), {k: v for k, v in step.items() if k != "step"}) for step in model["recipe"]]
        return " → ".join(f"{name}({', '.join(_pairs(known))})" for name, known in parts)

    @property
    def attack_name(self) -> str:
        """The attack's name."""
        known = self.summary.get("attack")
        return str(known.get("name", "attack") if isinstance(known, Mapping) else known or "attack")

    @property
    def attack(self) -> str:
        """The attack by name, version and settings, as far as the summary says."""
        known = self.summary.get("attack")
        if not isinstance(known, Mapping):
            return self.attack_name
        settings = known.get("settings") or {}
        return ", ".join([f"{self.attack_name} {known.get('version', '')}".rstrip(), *_pairs(settings)])


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Reads result files.

    Args:
        paths: ``.jsonl`` files that ``certify --out`` wrote, each with its summary beside it, or folders of such files.

    Returns:
        The runs in the order given, a folder's sorted by name.

    Raises:
        InputError: a file that is missing, empty, damaged, or that contradicts itself.
    """
    files = list(dict.fromkeys(file for path in paths for file in _files(Path(path))))
    runs = [_read(file) for file in files]
    shared = {run.name for run in runs if sum(run.name == other.name for other in runs) > 1}
    return [replace(run, name=run.path.with_suffix("").as_posix()) if run.name in shared else run for run in runs]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.jsonl"))
    if not found:
        raise InputError(f"the folder {path} holds no results; lipcert certify --out {path / 'r.jsonl'} writes some")
    return found


def _read(path: Path) -> Run:
    summary = _read_summary(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    whole = content[: content.rfind(b"\n") + 1]
    notes = []
    if len(whole) < len(content):
        notes.append(f"{path}: the last row is half-written and left out")
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            check(row, summary["eps"])
        except DAMAGED as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise InputError(f"row {number} of {path} is no result ({reason}); certify the images again") from error
        rows.append(row)
    if not rows:
        raise InputError(f"{path} holds no rows; let lipcert certify finish at least one image")
    if len({"correct" in row for row in rows}) > 1 or len({row["index"] for row in rows}) < len(rows):
        raise InputError(f"{path} mixes rows that do not belong together; certify the images again")
    if not summary.get("complete", True):
        notes.append(f"{path}: the run did not finish; these are its first {len(rows)} images")
    return Run(path, path.stem, summary, tuple(rows), tuple(notes))


def _read_summary(path: Path) -> Mapping[str, Any]:
    beside = path.with_suffix(".summary.json")
    if not path.is_file():
        raise InputError(f"there is no file {path}; lipcert certify --out {path} writes it")
    try:
        summary = json.loads(beside.read_text(encoding="utf-8"))
        if not (math.isfinite(summary["eps"]) and summary["eps"] > 0 and isinstance(summary["model"], dict)):
            raise ValueError("no ε or no model")
    except OSError as error:
        raise InputError(f"{path} needs its summary {beside.name} beside it; copy both files") from error
    except DAMAGED as error:
        raise InputError(f"{beside} is no summary of results; copy it again, or certify again") from error
    return dict(summary)


def _pairs(known: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in known.items()]


def _delta(rigor: str) -> float:
    found = RIGOR.fullmatch(rigor)
    return float(found["delta"] or 0) if found else 0.0
