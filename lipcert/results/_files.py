"""Writing result files: rows as they are found, the summary beside them, and files of shards.

A run that was stopped goes on after the last whole row; a file of another run is left alone. Where several processes or
machines share the work, each has a file of its own, ``r.shard-1-of-2.jsonl``, until the rows are put together.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lipcert.errors import InputError
from lipcert.results._reading import read_earlier, summary_path
from lipcert.results._statistics import Tally


def summary(description: Mapping[str, Any], tally: Tally, *, complete: bool) -> dict[str, Any]:
    """What stands beside the rows: what the run is about, its counts, and whether it came to its end."""
    return {**description, "counts": tally.counts(), "complete": complete}


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
            path: where the rows go; folders that are missing are made.
            description: from :func:`lipcert.results.description.describe`.

        Raises:
            InputError: if the file holds something else, or cannot be written.
        """
        self.path = Path(path)
        self.summary_path = summary_path(self.path)
        self.description = dict(description)
        if self.path == self.summary_path or (os.path.exists(self.path) and not os.path.isfile(self.path)):
            raise InputError(f"{self.path} cannot hold the rows; give a file such as results.jsonl")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            earlier = read_earlier(self.path, self.description)
            if earlier is not None and earlier.size < self.path.stat().st_size:
                os.truncate(self.path, earlier.size)
            if earlier is not None and "limit" in self.description:  # rows of an earlier start with more images stay
                limits: list[Any] = [summary.get("limit") for summary in (earlier.summary, self.description)]
                self.description["limit"] = None if None in limits else max(limits)
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
