"""Result files: one JSON row an image, written as soon as it is known, and beside them a summary.

``r.jsonl`` holds the rows and ``r.summary.json`` what they belong to. A run that was stopped goes on behind the last
whole row; a file of another model, ε, method, attack, data set or version is left alone. Where several processes or
machines share the work, each has a file of its own, ``r.shard-1-of-2.jsonl``, until the rows are put together.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import timm
import torch

from lipcert._rows import DAMAGED, check
from lipcert._version import version
from lipcert.artifact import weights_hash
from lipcert.attacks import identity
from lipcert.errors import InputError
from lipcert.model import Model

if TYPE_CHECKING:
    from lipcert.certifier import Certificates, Certifier
    from lipcert.data import Batch, Images

# The parts of a summary that must agree before rows of two runs may stand in one file.
_IDENTITY = ("model", "eps", "method", "attack", "dtype", "rigor", "at", "passes", "data", "lipcert")


def describe(
    model: Model, images: Images, certifier: Certifier, typed: str, command: str | None = None
) -> dict[str, Any]:
    """What a run is about: the part of its summary that is known before the first image.

    Args:
        model: the model that is certified.
        images: the images it is certified on.
        certifier: made for the model.
        typed: ε as the user wrote it, such as ``36/255``.
        command: what was typed to start the run.

    Returns:
        Values that JSON can hold.
    """
    spec, bound = images.spec, certifier.bound
    return {
        "model": {"source": model.source, "recipe": model.recipe, "weights_hash": weights_hash(model)},
        "eps": certifier.eps,
        "method": certifier.method,
        "attack": identity(certifier.attack),
        "dtype": certifier.dtype,
        "rigor": certifier.rigor,
        "at": certifier.at,
        "passes": certifier.passes,
        "data": {
            "spec": "bundled" if spec is None else os.path.abspath(spec) if os.path.exists(spec) else spec,
            "images": images.total,
            "labelled": images.labelled,
        },
        "lipcert": version(),
        "eps_typed": typed,
        "command": command,
        "bound": {
            "value": bound.value if math.isfinite(bound.value) else None,
            "log10": bound.log10 if math.isfinite(bound.log10) else None,
            "rigor": bound.rigor,
            "delta": bound.delta,
            "method": bound.method,
            "layers": [
                {"path": x.path, "operation": x.operation, "gain": x.gain if math.isfinite(x.gain) else None}
                for x in bound.layers
            ],
        },
        "environment": {
            "torch": torch.__version__,
            "timm": timm.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": str(model.device),
        },
    }


def rows(batch: Batch, certificates: Certificates, seconds: float) -> list[dict[str, Any]]:
    """The rows of one batch.

    Args:
        batch: the images that were certified.
        certificates: what was found about them.
        seconds: time that the batch took; every row gets an equal part.

    Returns:
        One dict an image: ``index, label, predicted, correct, margin, radius, certified, method, rigor, attacked,
        attack_distance, seconds``, without ``label`` and ``correct`` where labels are not known. ``attacked`` says
        whether an attack changed the prediction within ε, ``attack_distance`` how near it did at all; both are None
        without an attack, the second also where none was found. An infinite radius becomes the largest float64.
    """
    count = len(batch.indices)
    found = []
    for i, index in enumerate(batch.indices):
        predicted, margin = int(certificates.predicted[i]), float(certificates.margin[i])
        row: dict[str, Any] = {"index": index}
        if batch.labels is not None:
            row["label"] = int(batch.labels[i])
        row["predicted"] = predicted
        if batch.labels is not None:
            row["correct"] = predicted == row["label"]
        row["margin"] = margin if math.isfinite(margin) else None
        row["radius"] = min(float(certificates.radius[i]), sys.float_info.max)
        row["certified"] = bool(certificates.certified[i])
        row["method"] = _at(certificates.method, i)
        row["rigor"] = _at(certificates.rigor, i)
        row["attacked"] = None if certificates.attacked is None else bool(certificates.attacked[i])
        distance = math.inf if certificates.attack_distance is None else float(certificates.attack_distance[i])
        row["attack_distance"] = distance if math.isfinite(distance) else None
        row["seconds"] = seconds / count
        found.append(row)
    return found


class Tally:
    """Counts over rows."""

    def __init__(self, rows: Sequence[Mapping[str, Any]] = ()):
        self.images = 0
        self.labelled = 0
        self.correct = 0
        self.certified = 0
        self.certified_correct = 0
        self.looked_for = 0
        self.attacked = 0
        self.withstood = 0
        self.seconds = 0.0
        self.methods: Counter[str] = Counter()
        self.rigors: Counter[str] = Counter()
        self._radii: list[float] = []
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Counts one row."""
        self.images += 1
        self.labelled += "correct" in row
        self.correct += row.get("correct", False)
        self.certified += row["certified"]
        self.certified_correct += row["certified"] and row.get("correct", False)
        attacked = row.get("attacked")
        self.looked_for += attacked is not None
        self.attacked += attacked is True
        self.withstood += attacked is False and row.get("correct", False)
        self.seconds += row["seconds"]
        self.methods[row["method"]] += 1
        self.rigors[row["rigor"]] += 1
        if row.get("correct", True):
            self._radii.append(row["radius"])

    @property
    def accuracy(self) -> float | None:
        """Share of images that are predicted right; None without labels."""
        return self.correct / self.images if self.labelled else None

    @property
    def certified_accuracy(self) -> float | None:
        """Share of images that are predicted right and certified at ε; None without labels."""
        return self.certified_correct / self.images if self.labelled else None

    @property
    def accuracy_under_attack(self) -> float | None:
        """Share of images that are predicted right and that no attack broke within ε; None without labels or attack.

        The share that nothing can break lies between the certified accuracy and this.
        """
        return self.withstood / self.images if self.labelled and self.looked_for == self.images else None

    @property
    def median_radius(self) -> float | None:
        """Median radius of the images predicted right, or of all where labels are not known; None without images."""
        return statistics.median_low(self._radii) if self._radii else None

    def counts(self) -> dict[str, Any]:
        """The counts as the summary holds them, those about labels only where there are labels."""
        counts: dict[str, Any] = {"images": self.images, "certified": self.certified}
        if self.labelled:
            counts |= {
                "correct": self.correct,
                "certified_correct": self.certified_correct,
                "accuracy": self.accuracy,
                "certified_accuracy": self.certified_accuracy,
            }
        if self.looked_for:
            counts["attacked"] = self.attacked
        if self.accuracy_under_attack is not None:
            counts["accuracy_under_attack"] = self.accuracy_under_attack
        return counts | {"median_radius": self.median_radius, "methods": dict(self.methods), "seconds": self.seconds}


def summary(description: Mapping[str, Any], tally: Tally, *, complete: bool) -> dict[str, Any]:
    """What stands beside the rows: what the run is about, its counts, and whether it came to its end."""
    return {**description, "counts": tally.counts(), "complete": complete}


def summary_path(path: Path) -> Path:
    """Where the summary of a result file is."""
    return path.with_suffix(".summary.json")


def shard_path(path: Path, part: int, parts: int) -> Path:
    """Where one of several processes or machines writes its rows: ``r.shard-1-of-2.jsonl`` for ``r.jsonl``.

    Args:
        path: where all rows go in the end.
        part: from 0 to ``parts`` − 1.
        parts: how many there are; for 1 it is ``path`` itself.
    """
    return path if parts == 1 else path.with_name(f"{path.stem}.shard-{part + 1}-of-{parts}{path.suffix}")


def shards_of(path: Path) -> list[Path]:
    """The files that shards of a run have left beside its result file."""
    form = re.compile(re.escape(path.stem) + r"\.shard-\d+-of-\d+" + re.escape(path.suffix))
    return sorted(other for other in path.parent.glob("*") if form.fullmatch(other.name))


def read_rows(path: Path, description: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The whole rows of a file; none where there is no file.

    Args:
        path: where the rows are.
        description: of the run that they must belong to.

    Raises:
        InputError: if they belong to another run, or are damaged.
    """
    return _rows_of(path, description)[0]


class ResultFile:
    """A result file that is being written; use it as a context manager.

    Attributes:
        path: the rows.
        summary_path: the summary beside them.
        tally: counts over all rows, also those that an earlier run wrote.
        done: indices of the images that have a row.
    """

    def __init__(self, path: str | os.PathLike[str], description: Mapping[str, Any]):
        """Opens a new file, or one to go on with, whose half-written last row is cut off.

        Args:
            path: where the rows go.
            description: from :func:`describe`.

        Raises:
            InputError: if the file holds something else, or cannot be written.
        """
        self.path = Path(path)
        self.summary_path = summary_path(self.path)
        self.description = dict(description)
        if self.path == self.summary_path or (os.path.exists(self.path) and not os.path.isfile(self.path)):
            raise InputError(f"{self.path} cannot hold the rows; give a file such as results.jsonl")
        try:
            found, whole = _rows_of(self.path, self.description)
            if self.path.exists() and whole < self.path.stat().st_size:
                os.truncate(self.path, whole)
            self.tally = Tally(found)
            self.done = {row["index"] for row in found}
            self._file: IO[str] = self.path.open("a", encoding="utf-8")
            self._write_summary(complete=False)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        self._write_summary(complete=kind is None)

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row and hands it to the system at once.

        Raises:
            InputError: if the disk does not take it.
        """
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"cannot write {self.path}: {reason}; the rows before stay valid") from error
        self.tally.add(row)
        self.done.add(row["index"])

    def absorb(self, rows: Sequence[Mapping[str, Any]], order: Sequence[int] | None) -> None:
        """Appends rows that shards of the run have written, in the order of the data set.

        Args:
            rows: the rows; those of images that have one are left out.
            order: positions in the whole data set, in the order of the run; None for those of a stream.
        """
        new = {row["index"]: row for row in rows if row["index"] not in self.done}
        for index in sorted(new) if order is None else [index for index in order if index in new]:
            self.append(new[index])

    def _write_summary(self, *, complete: bool) -> None:
        content = summary(self.description, self.tally, complete=complete)
        partial = self.summary_path.with_name(f".{self.summary_path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(partial, self.summary_path)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"cannot write {self.summary_path}: {reason}; the rows before stay valid") from error
        finally:
            partial.unlink(missing_ok=True)


def _at(value: str | Sequence[str], i: int) -> str:
    return value if isinstance(value, str) else value[i]


def _rows_of(path: Path, description: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The whole rows of a file, and how many bytes they take; a row half written at the end is left out."""
    content = path.read_bytes() if os.path.exists(path) else b""
    if not content:
        return [], 0
    try:
        earlier = json.loads(summary_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        earlier = {}
    # Through JSON and back, as the earlier description went: tuples are lists there.
    own = json.loads(json.dumps(dict(description)))
    different = [key for key in _IDENTITY if not isinstance(earlier, dict) or earlier.get(key) != own.get(key)]
    if different:
        raise InputError(
            f"{path} holds results of another run (other {', '.join(different)}); "
            "give another --out, or delete the file"
        )
    whole = content[: content.rfind(b"\n") + 1]
    try:
        found = [json.loads(line) for line in whole.splitlines()]
        for row in found:
            check(row, own["eps"])
        Tally(found)
        distinct = len({row["index"] for row in found}) == len(found)
    except DAMAGED as error:
        raise InputError(f"{path} is damaged; give another --out, or delete the file") from error
    if not distinct:
        raise InputError(f"{path} has two rows for one image; give another --out, or delete the file")
    return found, len(whole)
