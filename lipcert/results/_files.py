"""Writes result files: rows as they are computed, the summary, and the files of shards.

A stopped run continues after its last complete row. A file of another run is not changed. If several processes or
machines share the work, each writes its own file, such as ``r.shard-1-of-2.jsonl``, until the rows are merged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lipcert.errors import InputError
from lipcert.inputs.files import replacing
from lipcert.results._reading import read_earlier, refuse_folder, summary_path
from lipcert.results._statistics import Tally


def summary(description: Mapping[str, Any], tally: Tally, *, complete: bool) -> dict[str, Any]:
    """The summary of a run: its description, its counts, and whether it is complete."""
    return {**description, "counts": tally.counts(), "complete": complete}


def shard_path(path: Path, part: int, parts: int) -> Path:
    """The file of one of several processes or machines: ``r.shard-1-of-2.jsonl`` for ``r.jsonl``."""
    return path if parts == 1 else path.with_name(f"{path.stem}.shard-{part + 1}-of-{parts}{path.suffix}")


def shards_of(path: Path) -> list[Path]:
    """The shard files in the folder of a result file."""
    form = re.compile(re.escape(path.stem) + r"\.shard-\d+-of-\d+" + re.escape(path.suffix))
    return sorted(other for other in path.parent.glob("*") if form.fullmatch(other.name))


class ResultFile:
    """A result file that is being written; use it as a context manager.

    Attributes:
        path: the file of the rows.
        summary_path: the file of the summary.
        tally: counts over all rows, including those of an earlier run.
        done: indices of the images that have a row.
    """

    def __init__(self, path: str | os.PathLike[str], description: Mapping[str, Any]):
        """Opens a new file, or an earlier one of the same run, without its incomplete last row."""
        self.path = Path(path)
        refuse_folder(self.path)
        self.summary_path = summary_path(self.path)
        self.description = dict(description)
        self._unfinished = False  # whether the file is of an earlier, larger run that was stopped
        if self.path == self.summary_path or (os.path.exists(self.path) and not os.path.isfile(self.path)):
            raise InputError(f"{self.path} cannot hold the rows; give a file such as results.jsonl")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            earlier = read_earlier(self.path, self.description)
            if earlier is not None and earlier.size < self.path.stat().st_size:
                os.truncate(self.path, earlier.size)
            if earlier is not None and "limit" in self.description:  # keep rows of an earlier, larger run
                limits: list[Any] = [summary.get("limit") for summary in (earlier.summary, self.description)]
                widest = None if None in limits else max(limits)
                self._unfinished = widest != self.description["limit"] and not earlier.summary.get("complete")
                self.description["limit"] = widest
            self.tally = Tally(earlier.rows if earlier else ())
            self.done = {row["index"] for row in self.tally.rows}
            self._file: IO[str] = self.path.open("a", encoding="utf-8")
            self._write_summary(complete=False)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        self._write_summary(complete=kind is None and not self._unfinished)

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row and flushes it."""
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"cannot write {self.path}: {reason}; the rows before stay valid") from error
        self.tally.add(row)
        self.done.add(row["index"])

    def absorb(self, rows: Sequence[Mapping[str, Any]], order: Sequence[int] | None) -> None:
        """Appends rows of shards, in the order of the run."""
        labels = {row["index"]: row.get("label") for row in self.tally.rows}
        for row in rows:
            if labels.get(row["index"], row.get("label")) != row.get("label"):
                raise InputError(f"{self.path} holds another label of image {row['index']}; give another file")
        new = {row["index"]: row for row in rows if row["index"] not in self.done}
        for index in sorted(new) if order is None else [index for index in order if index in new]:
            self.append(new[index])

    def _write_summary(self, *, complete: bool) -> None:
        content = summary(self.description, self.tally, complete=complete)
        try:
            with replacing(self.summary_path) as partial:
                partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"cannot write {self.summary_path}: {reason}; the rows before stay valid") from error
