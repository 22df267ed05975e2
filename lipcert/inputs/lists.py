"""Lists of classes and of labels, as people write them: text, CSV and JSON."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm.utils.misc import natural_key

from lipcert.errors import InputError, shortened

_FILE_COLUMNS = (
    "filename", "file_name", "file", "filepath", "path", "image_path", "image", "image_id", "image_name", "img", "id",
    "name",
)  # fmt: skip
_LABEL_COLUMNS = (
    "label", "labels", "class_id", "class_idx", "class_index", "label_id", "class", "target", "category", "index", "y",
)  # fmt: skip


class ClassList:
    """The number of each class: a name a line, in order, or a name and its number; or JSON."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        text = _text(self.path)
        self.positions = False
        pairs = self._of_json(text) if self.path.suffix.lower() == ".json" else self._of_lines(text)
        self.names = dict(pairs)
        twice = len(self.names) < len(pairs)
        if twice or not self.names:
            what = "names a class twice" if twice else "names no classes"
            raise InputError(f"{self.path} {what}; it takes a name a line, or a name and its number")

    def _of_json(self, text: str) -> list[tuple[str, int]]:
        try:
            content = json.loads(text)
        except ValueError as error:
            raise InputError(f"{self.path} is no JSON file: {error}") from error
        if isinstance(content, dict) and isinstance(
            content.get("id2label"), dict
        ):  # the configuration of a hub's model
            content = content["id2label"]
        if isinstance(content, list) and all(isinstance(name, str) for name in content):
            self.positions = True
            return [(name, number) for number, name in enumerate(content)]
        pairs: list[tuple[str, int]] = []
        for key, value in content.items() if isinstance(content, dict) else ():
            if _whole(value) is not None and not _is_number(key):
                pairs.append((key, int(value)))
            elif _is_number(key) and isinstance(value, (str, list)) and value:
                pairs.append((value if isinstance(value, str) else str(value[0]), int(key)))
            else:
                pairs = []
                break
        if not pairs:
            raise InputError(
                f"{self.path} is no list of classes; it takes names with their numbers, or numbers with names"
            )
        return pairs

    def _of_lines(self, text: str) -> list[tuple[str, int]]:
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        fields = [
            [part.strip() for part in re.split(r"[,;\t]" if re.search(r"[,;\t]", line) else r"\s+", line)]
            for line in lines
        ]
        if (
            fields
            and len(fields[0]) > 1
            and not any(map(_is_number, fields[0]))
            and all(any(map(_is_number, (row[0], row[-1]))) for row in fields[1:])
            and len(fields) > 1
        ):
            fields = fields[1:]  # a head
        if fields and all(len(row) > 1 and _is_number(row[-1]) and not _is_number(row[0]) for row in fields):
            return [(row[0], int(row[-1])) for row in fields]
        if fields and all(len(row) > 1 and _is_number(row[0]) for row in fields):
            return [(row[1], int(row[0])) for row in fields]
        self.positions = True
        if fields and all(re.fullmatch(r"n\d{8}", row[0]) for row in fields):  # with what they mean after them
            return [(row[0], number) for number, row in enumerate(fields)]
        return [(line, number) for number, line in enumerate(lines)]

    def numbers(self, names: Sequence[str], count: int) -> dict[str, int]:
        """The numbers of some classes of a model."""
        if self.positions and len(self.names) != count:
            raise InputError(
                f"{self.path} names {len(self.names)} classes and the model has {count}; name all in their order, or "
                "write a number after each name"
            )
        missing = [name for name in names if name not in self.names]
        if missing:
            raise InputError(
                f"{self.path} does not name {shortened(missing[0])} ({len(missing)} of {len(names)} classes)"
            )
        beyond = next((name for name in names if not 0 <= self.names[name] < count), None)
        if beyond is not None:
            number = self.names[beyond]
            raise InputError(
                f"{self.path} gives {shortened(beyond)} the number {number}, and the model has the classes 0 to "
                f"{count - 1}"
            )
        return {name: self.names[name] for name in names}


class LabelList:
    """The label of each file: CSV with a column of file names and one of labels, with or without a head; or JSON.

    JSON is an object of file names and labels, or a list of rows; ``.jsonl`` has a row a line.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        text = _text(self.path)
        rows = self._of_json(text) if self.path.suffix.lower() in (".json", ".jsonl") else _cells(text)
        head = [cell.lower() for cell in rows[0]] if rows else []
        file = next((head.index(name) for name in _FILE_COLUMNS if name in head), None)
        label = next((head.index(name) for name in _LABEL_COLUMNS if name in head), None)
        if file is not None and label is not None:
            rows = rows[1:]
        elif rows and all(len(row) == 2 for row in rows) and not (file is None) ^ (label is None):
            named = [
                sum(bool(re.search(r"\.[A-Za-z]{3,4}$", cell)) for cell in column) for column in zip(*rows, strict=True)
            ]
            file, label = (1, 0) if named[1] > named[0] else (0, 1)
        else:
            raise InputError(
                f"{self.path} needs a column with file names, such as filename, and one with labels, such as label"
            )
        self.labels: dict[str, str] = {}
        for row in rows:
            if len(row) <= max(file, label):
                raise InputError(f"{self.path} has a line with {len(row)} columns: {shortened(','.join(row))}")
            name = row[file].replace("\\", "/").removeprefix("./")
            if self.labels.setdefault(name, row[label]) != row[label]:
                raise InputError(f"{self.path} has two labels for {shortened(name)}")
        self.stems = {os.path.splitext(name)[0]: name for name in self.labels}
        bases = {os.path.basename(name): name for name in self.labels}
        self.bases = bases if len(bases) == len(self.labels) else {}

    def _of_json(self, text: str) -> list[list[str]]:
        """Rows of cells, the first of them the head."""
        try:
            lines = self.path.suffix.lower() == ".jsonl"
            content = [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
        except ValueError as error:
            raise InputError(f"{self.path} is no JSON file: {error}") from error
        if isinstance(content, dict):
            content = [{"filename": name, "label": label} for name, label in content.items()]
        if not content or not all(isinstance(row, dict) and row.keys() == content[0].keys() for row in content):
            raise InputError(f"{self.path} is no list of labels; it takes file names with their labels, or rows")
        return [[*content[0]], *([str(cell) for cell in row.values()] for row in content)]

    def of(self, names: Sequence[str]) -> list[str]:
        """The labels of files, by the path below the folder, without its suffix, or by the name alone."""
        keys: dict[str, str] = {}
        missing = []
        for name in names:
            key = self._key(name)
            if key is None or not self.labels[key]:
                missing.append(name)
            elif keys.setdefault(key, name) != name:
                files = f"{shortened(keys[key])} and {shortened(name)}"
                raise InputError(f"{self.path} has one label, of {shortened(key)}, for {files}; give it their paths")
        if missing:
            one = printable(missing[0])
            raise InputError(f"{self.path} has no label for {len(missing)} of {len(names)} images, such as {one}")
        return [self.labels[key] for key in keys]

    def _key(self, name: str) -> str | None:
        stem, base = os.path.splitext(name)[0], os.path.basename(name)
        for key, table in ((name, self.labels), (stem, self.stems), (base, self.labels), (base, self.bases)):
            if key in table:
                return key if table is self.labels else table[key]
        return self.stems.get(os.path.basename(stem))

    def numbered(self, labels: Sequence[str], classes: ClassList | None, count: int) -> tuple[list[int], int | None]:
        """The class numbers, and how many classes names are of; None where the list gives numbers."""
        numbers = [number for label in labels if (number := _whole(label)) is not None]
        if classes is not None:
            positions = classes.numbers(sorted({*labels}), count)
            return [positions[label] for label in labels], None
        if len(numbers) == len(labels):
            if numbers and min(numbers) == 1 and max(numbers) == count:
                raise InputError(f"{self.path} counts the {count} classes from 1, and labels count from 0; subtract 1")
            beyond = next((number for number in numbers if not 0 <= number < count), None)
            if beyond is not None:
                raise InputError(f"{self.path} has the label {beyond}, and the model has the classes 0 to {count - 1}")
            return numbers, None
        name = next(label for label in labels if _whole(label) is None)
        if re.fullmatch(r"-?\d*\.\d+", name):
            raise InputError(f"{self.path} has the label {name}, which is no class")
        if numbers:
            raise InputError(
                f"{self.path} has numbers and names for labels, such as {numbers[0]} and {shortened(name)}; give "
                "numbers alone, or number the names with --classes FILE"
            )
        names = sorted({*self.labels.values()} - {""}, key=natural_key)
        positions = {name: number for number, name in enumerate(names)}
        return [positions[label] for label in labels], len(names)


def printable(name: str) -> str:
    """A file's name as text that every output can hold; bytes that are no UTF-8 are written as ``\\xe9``."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _cells(text: str) -> list[list[str]]:
    delimiter = next((sign for sign in ("\t", ";", ",") if sign in text), " ")
    return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines(), delimiter=delimiter) if any(row)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise InputError(f"cannot read {path}: {reason}") from error


def _whole(value: Any) -> int | None:
    """A whole number, also one written as 3.0; None for everything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if not isinstance(value, bool) and number.is_integer() else None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+", text) is not None
