"""Writes result files: rows as they are computed, the summary, and the files of shards.

A stopped run continues after its last complete row. A file of another run is not changed. A row identifies its image
by content, not by path: data may move, and images may be removed, without loss of the other rows. If
several processes or machines share the work, each writes its own file, such as ``r.shard-1-of-2.jsonl``, until the rows
are merged.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lipcert.errors import InputError, counted
from lipcert.inputs.data import Images
from lipcert.inputs.files import check_name, lock, occupied, replacing
from lipcert.results._reading import read_earlier, summary_path
from lipcert.results._statistics import Tally

_FEW = 8  # rows that say whether a file is about the same images


def summary(description: Mapping[str, Any], tally: Tally, *, complete: bool) -> dict[str, Any]:
    """The summary of a run: its description, its counts, its wall seconds, and whether it is complete.

    ``rigor`` is that of the rows, and ``rigor_asked`` that of the settings.
    """
    rigor = {"rigor": tally.weakest, "rigor_asked": description.get("rigor")}
    return {**description, **rigor, "counts": tally.counts(), "seconds": tally.seconds, "complete": complete}


def shard_path(path: Path, part: int, parts: int) -> Path:
    """The file of one of several processes or machines: ``r.shard-1-of-2.jsonl`` for ``r.jsonl``."""
    return path if parts == 1 else path.with_name(f"{path.stem}.shard-{part + 1}-of-{parts}{path.suffix}")


def shards_of(path: Path) -> list[Path]:
    """The shard files in the folder of a result file."""
    form = re.compile(re.escape(path.stem) + r"\.shard-\d+-of-\d+" + re.escape(path.suffix))
    return sorted(other for other in path.parent.glob("*") if form.fullmatch(other.name))


def free_file(names: Iterable[Path], description: Mapping[str, Any], images: Images) -> Path:
    """The first of these files that is new, or that holds rows of the same run, or of a part of it."""
    for path in names:
        try:
            earlier = read_earlier(path, description)
            if earlier is None:
                return path
            _standing(earlier.rows, earlier.summary, images, path, few=True)
            part = {row["index"] for row in earlier.rows} <= set(images.order)  # and not larger, or in another order
        except InputError:
            part = False
        images.leave_out(())  # the file that is chosen says anew what was removed since
        if part:
            return path
    raise InputError("no name for a file of rows is free; give one with --out")


class ResultFile:
    """A result file that no other process writes meanwhile; a context manager. ``done`` are the indices with a row."""

    def __init__(self, path: str | os.PathLike[str], description: Mapping[str, Any], images: Images | None = None):
        """Opens a new file, or an earlier one of the same run, without its incomplete last row."""
        self.path = Path(path)
        check_name(self.path)
        self.summary_path = summary_path(self.path)
        self.description = dict(description)
        self.unfinished = False  # whether the file is of an earlier, larger run that was stopped
        self._file = -1
        self._size: int | None = None  # of the file, where it cannot be locked
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
            earlier = read_earlier(self.path, self.description)
            rows = [] if earlier is None else earlier.rows
            if earlier is not None and images is not None:
                rows = _standing(rows, earlier.summary, images, self.path)
                self.description["data"] = {**self.description["data"], "images": images.total}
                self.description["data"] |= {"removed": images.removed} if images.removed else {}
            lines = self.path.read_bytes().splitlines(keepends=True)
            if len(lines) != len(rows) or any(not line.endswith(b"\n") for line in lines[-1:]):
                with replacing(self.path) as partial:
                    partial.write_bytes(b"".join(map(_line, rows)))
                self._open()
            if earlier is not None and "limit" in self.description:  # keep rows of an earlier, larger run
                limits: list[Any] = [summary.get("limit") for summary in (earlier.summary, self.description)]
                widest = None if None in limits else max(limits)
                self.unfinished = widest != self.description["limit"] and not earlier.summary.get("complete")
                self.description["limit"] = widest
            if earlier is not None and "samples" in self.description:
                self.description["samples"] = max(self.description["samples"], earlier.summary["samples"])
            self.tally = Tally(rows)
            self.done = {row["index"] for row in self.tally.rows}
            self._write_summary(complete=False)
            self.before = 0.0 if earlier is None else earlier.seconds  # wall seconds; not known of a killed run
            self._started = time.monotonic()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                remedy = "give a file in another folder"
                raise InputError(f"cannot write {self.path}: {error.strerror or error}; {remedy}") from error
            raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.before is not None:
            self.tally.seconds = self.before + time.monotonic() - self._started
        try:
            self._write_summary(complete=kind is None and not self.unfinished)
        except InputError:
            if kind is None:  # otherwise the first error says what is wrong
                raise
        finally:
            self._close()

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row, which another process can read at once."""
        self._check_alone()
        rest = line = _line(row)
        if row["index"] in self.done:  # more draws of an image
            place = next(i for i, other in enumerate(self.tally.rows) if other["index"] == row["index"])
            rest = line = line if row["samples"] > self.tally.rows.pop(place)["samples"] else b""
        try:
            while rest := rest[os.write(self._file, rest) :]:  # a disk that is full says so at the second call
                pass
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror or error}; it keeps {counted(len(self.tally), 'row')}, and "
                "the same command continues from there"
            ) from error
        self.tally.add(row)
        self.done.add(row["index"])
        if self._size is not None:
            first, self._size = self._size == 0, self._size + len(line)
            if first:  # another process may have written its summary before this row
                self._write_summary(complete=False)

    def absorb(
        self, rows: Sequence[Mapping[str, Any]], order: Sequence[int] | None, seconds: float | None = None
    ) -> None:
        """Appends rows of shards, in the order of the run, which took so many wall seconds, if that is known."""
        earlier = {row["index"]: row for row in self.tally.rows}
        for row in rows:
            for name, what in (("image", "another image"), ("label", "another label of image")):
                if earlier.get(row["index"], row).get(name) != row.get(name):
                    raise InputError(f"{self.path} holds {what} {row['index']}; give another file")
        new = {row["index"]: row for row in rows if row["index"] not in self.done}
        self.before = seconds if new else self.before
        for index in sorted(new) if order is None else [index for index in order if index in new]:
            self.append(new[index])

    def _open(self) -> None:
        """Opens the file for this process alone; without locks, checks for writes of other processes."""
        self._close()
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        self._size = None if lock(self._file, self.path) else os.fstat(self._file).st_size

    def _check_alone(self) -> None:
        if self._size is not None and os.fstat(self._file).st_size != self._size:
            raise occupied(self.path)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write_summary(self, *, complete: bool) -> None:
        self._check_alone()
        content = summary(self.description, self.tally, complete=complete)
        try:
            with replacing(self.summary_path) as partial:
                partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write {self.summary_path}: {error.strerror or error}; the rows before stay valid"
            ) from error


def _line(row: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(row, allow_nan=False)}\n".encode()


def check_images(rows: Sequence[Mapping[str, Any]], images: Images, path: Path) -> list[int]:
    """The indices of rows about images that have changed since, or that the data does not have."""
    expected = {row["index"]: row for row in rows}
    for batch in images.singly(expected.keys()) if expected else ():
        row = expected[batch.indices[0]]
        if row.get("image") != batch.hashes[0]:
            continue
        if row.get("label") != (None if batch.labels is None else int(batch.labels[0])):
            name = batch.files[0] if batch.files and batch.files[0] else batch.indices[0]
            raise InputError(f"{path} holds another label of image {name} than the data has now; give another --out")
        del expected[batch.indices[0]]
    return [*expected]


def _standing(
    rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], images: Images, path: Path, few: bool = False
) -> list[Mapping[str, Any]]:
    """The rows of an earlier start about images of this run; the numbers of removed ones stay free."""
    choice = summary.get("sigma_choice") or {}
    chosen_on = zip(choice.get("indices", ()), choice.get("files", ()), strict=False)
    named = [*rows, *({"index": index, "file": file} for index, file in chosen_on)]
    images.leave_out(_removed(named, summary.get("data") or {}, images))
    looked_at = rows[:_FEW] if few else rows
    gone = {*check_images(looked_at, images, path)}
    if 2 * len(gone) > len(looked_at):
        images.leave_out(())
        raise InputError(
            f"{path} holds rows about other images than the data has now ({len(gone)}); give another --out"
        )
    if gone and not few:
        files = sorted(str(row.get("file") or row["index"]) for row in rows if row["index"] in gone)
        warnings.warn(
            f"{path}: removed or changed since: {len(gone)} of {len(rows)} images ({', '.join(files[:3])}"
            f"{', …' if files[3:] else ''}); their rows are dropped, the others stand",
            stacklevel=2,
        )
    return [row for row in rows if row["index"] not in gone]


def _removed(rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any], images: Images) -> list[int]:
    """The numbers of the images that the data set had before and that are gone."""
    before, total = data.get("images"), images.total
    if type(before) is not int or not 0 < before - total < before or images.file(0) is None:
        return []
    places = {images.file(place): place for place in range(total)}
    gone = {row["index"] for row in rows if row.get("file") not in places}
    # Named files have moved so far; another may have had any number between those of its neighbours.
    ends = [(row["index"], row["index"] - places[row["file"]]) for row in rows if row["index"] not in gone]
    removed: list[int] = []
    last = -1
    for index, shift in [*sorted(ends), (before, before - total)]:
        between = sorted(range(last + 1, index), key=lambda number: number not in gone)
        if not 0 <= shift - len(removed) <= len(between):
            return []  # the data set has new images, too
        removed += between[: shift - len(removed)]
        last = index
    return removed
