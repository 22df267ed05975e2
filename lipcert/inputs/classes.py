"""Numbers of classes: by the names that a model knows, by a list, or by the order of folders."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset

from lipcert.errors import InputError, first_line, shortened
from lipcert.inputs.files import listing, printable
from lipcert.inputs.formats import told

# Names of columns, in which case, spaces and signs do not count.
_FILE_COLUMNS = ("filename", "file", "path", "filepath", "image", "imageid", "img", "id", "name")
_LABEL_COLUMNS = ("label", "labels", "classid", "class", "target", "category")
_DIGITS = re.compile("[0-9]+")
_WNID = re.compile(r"n\d{8}")


def composed(name: str) -> str:
    """A name as text whose accents are composed: those of file systems and lists may be decomposed."""
    return unicodedata.normalize("NFC", printable(name))


def number_by_name(names: Sequence[str], classes: Sequence[str], spec: str, whose: str) -> dict[str, int]:
    """The number of each name among ``whose`` classes; composed and decomposed accents are the same name."""
    known = {composed(name): number for number, name in enumerate(classes)}
    found = {name: known.get(composed(name)) for name in names}
    unknown = [name for name, number in found.items() if number is None]
    if unknown:
        raise InputError(
            f"{spec} has classes that are none of {whose}: {listing(unknown)}; those are {listing(classes)}; rename "
            "them, or number them with --classes FILE"
        )
    numbers = {name: number for name, number in found.items() if number is not None}
    twice = [name for name, number in numbers.items() if Counter(numbers.values())[number] > 1]
    if twice:
        raise InputError(f"{spec} has two folders for one class: {listing(twice)}; merge them")
    return numbers


def names_of(loader: object, count: int) -> tuple[str, ...]:
    """The names of the classes that a loader of training images goes by; () where it has none."""
    images = getattr(loader, "images", None) or getattr(loader, "dataset", None)
    numbered = getattr(images, "class_names", None) or dict(enumerate(getattr(images, "classes", None) or ()))
    return tuple(str(numbered[i]) for i in range(count)) if {*numbered} == {*range(count)} else ()


def imagenet_names(count: int) -> Sequence[str]:
    """The WordNet ids of timm's classes by number, where a model has as many as one of the sets of ImageNet."""
    subset = infer_imagenet_subset({"num_classes": count})
    return () if subset is None else [str(name) for name in ImageNetInfo(subset).label_names()]


def are_wordnet_ids(names: Sequence[str]) -> bool:
    """Whether all names are WordNet ids, such as n01440764."""
    return bool(names) and all(_WNID.fullmatch(name) for name in names)


def natural(names: Sequence[str]) -> list[str]:
    """Names in timm's order, in which 2 comes before 10: that of its ``natural_key``, in a fraction of the time."""

    def number(digits: re.Match[str]) -> str:
        significant = digits[0].lstrip("0")
        return f"\0{len(significant):03}{significant}\0"  # longer numbers are larger; no name holds \0

    return sorted(sorted(names), key=lambda name: _DIGITS.sub(number, name.lower()))


def read_classes(path: str | os.PathLike[str], names: Sequence[str], count: int) -> dict[str, int]:
    """The numbers of some classes by a list, or JSON.

    A list has one name per line, in the order of the numbers, as timm's class maps; or a name and its number.
    """
    text = _text(Path(path))
    mapping = Path(path).suffix.lower() == ".json" and not text.lstrip().startswith("[")
    if Path(path).suffix.lower() == ".json":
        pairs = _of_json(text, path)
        lines = [name for name, _ in pairs]
    else:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if are_wordnet_ids([line.split()[0] for line in lines]):  # with what they mean after them
            lines = [line.split()[0] for line in lines]
        numbered = [re.fullmatch(r"(\d+)[\s,;:]+(\S.*)|(.*\S)[\s,;:]+(\d+)", line) for line in lines]
        if all(numbered) and not {*map(composed, names)} & {*map(composed, lines)}:
            pairs = [(m[2] or m[3], int(m[1] or m[4])) for m in numbered if m is not None]
            turned = [(str(number), int(name)) for name, number in pairs if _DIGITS.fullmatch(name)]
            if {name for name, _ in pairs} == {name for name, _ in turned} and {*turned} != {*pairs}:
                raise InputError(
                    f"{path} has two numbers on each line, either of which may be the name of a class; give the names "
                    "alone, in the order of the classes"
                )
        else:
            pairs = [(name, number) for number, name in enumerate(lines)]
    if not mapping and not len({*lines}) == len(lines) == count:
        raise InputError(
            f"{path} names {len({*lines})} classes in {len(lines)} entries, and the model has {count}; give each one "
            "entry, and write nothing else"
        )
    wrong = next(((name, number) for name, number in pairs if not 0 <= number < count), None)
    if wrong is not None:
        from_one = {min(number for _, number in pairs), max(number for _, number in pairs)} == {1, count}
        raise InputError(
            f"{path} gives {shortened(wrong[0])} the number {wrong[1]}, which is not 0 to {count - 1}; "
            + ("it counts from 1, and classes count from 0: subtract 1" if from_one else "correct it")
        )
    numbers = {composed(name): number for name, number in pairs}
    missing = [name for name in names if composed(name) not in numbers]
    if missing:
        raise InputError(
            f"{path} does not name {listing(missing)} ({len(missing)} of {len(names)} classes), but "
            f"{listing([*numbers])}; add them, or write them as the folders are called"
        )
    found = {name: numbers[composed(name)] for name in names}
    sharing: dict[str | int, list[tuple[str, int]]] = {}  # what is said of a name, and of a number
    for pair in pairs:
        sharing.setdefault(composed(pair[0]), []).append(pair)
        if not mapping:  # in which several names may be of one class
            sharing.setdefault(pair[1], []).append(pair)
    for name, number in found.items():
        same = {*sharing[composed(name)], *sharing.get(number, ())}
        if len(same) > 1:
            first = sorted(same, key=pairs.index)[:2]
            both = " and ".join(f"{shortened(other)} the number {n}" for other, n in first)
            raise InputError(f"{path} gives {both}; give each class its own name and number")
    return found


def _of_json(text: str, path: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """Names and numbers of a JSON list, or of an object in either direction, as the ``id2label`` of a hub's model."""
    try:
        content = json.loads(text, object_pairs_hook=_once)
        for key in ("id2label", "label2id"):
            if isinstance(content, dict) and isinstance(content.get(key), dict):
                content = content[key]
        return _pairs(content)
    except (AttributeError, IndexError, ValueError) as error:
        raise InputError(
            f"{path} is no list of classes ({first_line(error)}); give a JSON list of names, or an object of names and "
            "their numbers"
        ) from error


def _pairs(content: Any) -> list[tuple[str, int]]:
    if isinstance(content, (list, tuple)):
        return [(str(name), number) for number, name in enumerate(content)]
    content = {str(key): value for key, value in content.items()}
    if all(type(value) is int for value in content.values()) or not any(map(_DIGITS.fullmatch, content)):
        return [(name, int(str(value))) for name, value in content.items()]
    return [(str(value[0] if isinstance(value, list) else value), int(key)) for key, value in content.items()]


def recorded_names(content: Any, count: int) -> tuple[str, ...]:
    """The names of ``count`` classes by a list of texts, or a mapping in either direction; () where it has no such."""
    with suppress(AttributeError, IndexError, TypeError, ValueError):
        names = {number: name for name, number in _pairs(content)}
        of_texts = isinstance(content, Mapping) or all(isinstance(name, str) for name in content)
        if of_texts and {*names} == {*range(count)} and len({*map(composed, names.values())}) == len(content):
            return tuple(names[number] for number in range(count))
    return ()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which json.loads would keep the last of two equal names."""
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


class LabelList:
    """The label of each file, as text: CSV with columns of file names and of labels, or these two without a head."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        text = _text(self.path)
        if text.lstrip().startswith(("{", "[")):
            raise InputError(f"{path} is JSON; write the labels as CSV, with columns filename and label")
        if said := re.match(r"sep=(.)\r?\n", text):  # by Excel
            text = text[said.end() :]
        sign = said[1] if said else next((sign for sign in "\t;," if sign in text.lstrip().partition("\n")[0]), " ")
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text), delimiter=sign) if any(row)]
        head = [cell.lower() for cell in rows[0]] if rows else []
        plain = [re.sub(r"[\W_]", "", cell) for cell in head]
        file = next((plain.index(name) for name in _FILE_COLUMNS if name in plain), None)
        found = [number for name in _LABEL_COLUMNS for number, other in enumerate(plain) if other == name]
        label = found[0] if found else None
        self.described = str(path)
        if file is not None and label is not None:
            rows = rows[1:]
            if len(found) > 1:
                others = listing([f"{head[number]} (column {number + 1})" for number in found[1:]])
                self.described += f", by its column {label + 1}, {head[label]}, and not by {others}"
        elif rows and all(len(row) == 2 and os.path.splitext(row[0])[1] for row in rows):
            file, label = 0, 1
        else:
            raise InputError(
                f"{path} has the columns {listing(head) or 'none'}; it needs one of file names, called filename, and "
                "one of labels, called label"
            )
        self.labels: dict[str, str] = {}
        for row in rows:
            if len(row) > max(file, label):
                name = composed(row[file].replace("\\", "/").removeprefix("./"))
                self.labels[name] = ";".join(dict.fromkeys((self.labels.get(name, row[label]), row[label])))
        self.keys = {name: name for name in self.labels}
        for part in (0, 1):  # without its suffix, then without its folders
            short = {name: (os.path.splitext(name)[0], os.path.basename(name))[part] for name in self.keys}
            counts = Counter(short.values())
            alone = {name for name in self.keys if counts[short[name]] == 1 and short[name] not in self.keys}
            self.keys |= {short[name]: self.keys[name] for name in alone}

    def of(self, names: Sequence[str]) -> list[str]:
        """The labels of files, by the path below the folder or by the name alone, with or without its suffix."""
        keys: dict[str, str] = {}
        missing = []
        for name in names:
            path = composed(name)
            base = os.path.basename(path)
            tries = (path, os.path.splitext(path)[0], base, os.path.splitext(base)[0])
            key = next((self.keys[one] for one in tries if one in self.keys), None)
            if key is None or not self.labels[key]:
                missing.append(name)
            elif re.search("[;|]", self.labels[key]):
                raise InputError(
                    f"{self.path} has several labels for {shortened(key)}: {shortened(self.labels[key])}; keep one"
                )
            elif keys.setdefault(key, name) != name:
                files = f"{shortened(keys[key])} and {shortened(name)}"
                raise InputError(f"{self.path} has one label, of {shortened(key)}, for {files}; give it their paths")
        if missing:
            one = printable(missing[0])
            remedy = "add them" if keys else f"it has those of {listing([*self.labels])}: write the names of the files"
            raise InputError(
                f"{self.path} has no label for {len(missing)} of {len(names)} images, such as {one}; {remedy}"
            )
        return [self.labels[key] for key in keys]

    def numbers(self, labels: Sequence[str], count: int) -> list[int] | None:
        """The class numbers of labels that are numbers; None for names."""
        numbers = [int(float(label)) for label in labels if re.fullmatch(r"-?\d+(\.0*)?", label)]
        if not numbers:
            if any(re.fullmatch(r"-?\d*\.\d+", label) for label in labels):
                raise InputError(
                    f"{self.path} has the label {labels[0]}, which is no class; give numbers from 0, or names"
                )
            return None
        if len(numbers) < len(labels):
            other = next(label for label in labels if not re.fullmatch(r"-?\d+(\.0*)?", label))
            raise InputError(
                f"{self.path} has numbers and other labels, such as {numbers[0]} and {shortened(other)}; give numbers "
                "alone, or names alone"
            )
        if min(numbers) == 1 and max(numbers) == count:
            raise InputError(f"{self.path} counts the {count} classes from 1, and labels count from 0; subtract 1")
        beyond = next((number for number in numbers if not 0 <= number < count), None)
        if beyond is not None:
            raise InputError(
                f"{self.path} has the label {beyond}, which is not 0 to {count - 1}; correct it, or give names"
            )
        return numbers


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if known := told(file, path):
                raise InputError(known)
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8: save it as such"
        raise InputError(f"cannot read {path}: {reason}") from error
