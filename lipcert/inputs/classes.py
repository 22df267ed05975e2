"""Numbers of classes: by the names that a model knows, by a list, or by the order of folders."""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from timm.data import ImageNetInfo, infer_imagenet_subset

from lipcert.errors import InputError, first_line, shortened
from lipcert.inputs.files import File, listing, printable
from lipcert.inputs.formats import told

# How surely a column is that of files, how many it has, its number, the entry of each file, and all labels.
_Column = tuple[tuple[bool, int], int, int, dict[str, str], dict[str, str]]
# Folders that hold all images of a data set, and are no class.
CONTAINERS = frozenset(("images", "image", "imgs", "img", "data", "dataset"))
# Names of columns, in which case, spaces and signs do not count: of files, of numbers of rows, and of labels.
_FILE_COLUMN = re.compile("(?:image|img|photo|picture|file|path)(?:file|path|name|id)?s?")
_ROW_COLUMNS = ("", "index", "unnamed0")
_LABEL_COLUMNS = ("label", "labels", "classid", "class", "target", "category")
_SEVERAL = re.compile("[;|]")  # between the labels of one file
_MISSING = ("-1", "na", "n/a", "nan", "none", "null", "?")  # in place of the number of a class
_DIGITS = re.compile("[0-9]+")
_NUMBER = re.compile(r"-?\d+(\.\d*)?|-?\.\d+")
# The end of a path from the last folder on that has a name of its own.
_OWN = re.compile(rf"[^/]*(?:/(?:{'|'.join(CONTAINERS)}))*$", re.IGNORECASE)
_WNID = re.compile(r"n\d{8}")


def composed(name: str) -> str:
    """A name as text whose accents are composed: those of file systems and lists may be decomposed."""
    return unicodedata.normalize("NFC", printable(name))


def number_by_name(names: Sequence[str], classes: Sequence[str], spec: str, whose: str) -> dict[str, int]:
    """The number of each name among ``whose`` classes; composed and decomposed accents are the same name."""
    known = {composed(name): number for number, name in enumerate(classes)}
    if unknown := [name for name in names if composed(name) not in known]:
        known_ones = f"{whose}: {listing(unknown)}; known are {listing(classes)}"
        raise InputError(f"{spec} has classes that are none of {known_ones}; rename or number them with --classes FILE")
    numbers = {name: known[composed(name)] for name in names}
    twice = [name for name, number in numbers.items() if Counter(numbers.values())[number] > 1]
    if twice:
        raise InputError(f"{spec} has two folders for one class: {listing(twice)}; merge them")
    return numbers


def names_of(loader: object, count: int) -> tuple[str, ...]:
    """The class names of a loader of training images; () where it has none."""
    images = getattr(loader, "images", None) or getattr(loader, "dataset", None)
    return recorded_names(getattr(images, "class_names", None) or getattr(images, "classes", None), count)


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


def read_classes(path: File, names: Sequence[str], count: int) -> dict[str, int]:
    """The numbers of some classes by a list, JSON or YAML.

    A list has one name per line, in the order of the numbers, as timm's class maps; or a name and its number. What
    begins and ends with brackets, as a printed dict, is read as JSON is.
    """
    text = _text(Path(path))
    mapping = False
    ends = text.strip()[:1] + text.strip()[-1:]
    if Path(path).suffix.lower() in (".json", ".yaml", ".yml") or ends in ("[]", "{}"):
        pairs, mapping = _of_markup(text, path)
    else:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if are_wordnet_ids([line.split()[0] for line in lines]):  # with what they mean after them
            lines = [line.split()[0] for line in lines]
        numbered = [re.fullmatch(r"(\d+)[\s,;:]+(\S.*)|(.*[^\s,;:])[\s,;:]+(\d+)", line) for line in lines]
        if all(numbered) and not {*map(composed, names)} & {*map(composed, lines)}:
            pairs = [(m[2] or m[3], int(m[1] or m[4])) for m in numbered if m is not None]
            turned = {(str(number), int(name)) for name, number in pairs if _DIGITS.fullmatch(name)}
            if turned != {*pairs} and {name for name, _ in turned} == {name for name, _ in pairs}:
                raise InputError(f"{path} has two numbers on each line; give names alone, in the order of the classes")
        else:
            pairs = [(name, number) for number, name in enumerate(lines)]
    if not mapping and len(pairs) != count:
        raise InputError(f"{path} names {len(pairs)} classes, and the model has {count}; give each one entry alone")
    every = [number for _, number in pairs]
    for name, number in pairs:
        if not 0 <= number < count:
            from_one = (min(every), max(every)) == (1, count)
            remedy = "it counts from 1, and classes count from 0: subtract 1" if from_one else "correct it"
            given = f"{shortened(name)} the number {number}"
            raise InputError(f"{path} gives {given}, which is not 0 to {count - 1}; {remedy}")
    numbers = {composed(name): number for name, number in pairs}
    if missing := [name for name in names if composed(name) not in numbers]:
        raise InputError(
            f"{path} does not name {listing(missing)} ({len(missing)} of {len(names)} classes), but "
            f"{listing([*numbers])}; add them, or write both alike"
        )
    found = {composed(name) for name in names}
    earlier: dict[str | int, tuple[str, int]] = {}  # what is said of a name, and of a number
    for name, number in pairs:
        for key in (composed(name),) if mapping else (composed(name), number):
            other = earlier.setdefault(key, (name, number))
            if other != (name, number) and (type(key) is int or key in found):  # ImageNet has two classes crane
                both = f"{shortened(other[0])} the number {other[1]} and {shortened(name)} the number {number}"
                raise InputError(f"{path} gives {both}; give each class its own name and number")
    return {name: numbers[composed(name)] for name in names}


def _of_markup(text: str, path: File) -> tuple[list[tuple[str, int]], bool]:
    """Names and numbers of a list, or of a mapping in either direction, in JSON, YAML or Python; whether it is one."""
    try:
        try:
            content = json.loads(text, object_pairs_hook=_once)
        except json.JSONDecodeError:
            content = yaml.load(text, yaml.BaseLoader)
        for key in ("id2label", "label2id", "names"):  # of a hub's model, and of Ultralytics
            if isinstance(content, dict) and isinstance(content.get(key), (dict, list)):
                content = content[key]
        return _pairs(content), isinstance(content, dict)
    except (AttributeError, IndexError, RecursionError, ValueError, yaml.YAMLError) as error:
        remedy = "give a JSON list of names, or an object of names and their numbers"
        raise InputError(f"{path} is no list of classes ({first_line(error)}); {remedy}") from error


def _pairs(content: Any) -> list[tuple[str, int]]:
    if isinstance(content, (list, tuple)):
        return [(str(name), number) for number, name in enumerate(content)]
    content = {str(key): value for key, value in content.items()}
    if all(type(value) is int for value in content.values()) or not any(map(_DIGITS.fullmatch, content)):
        return [(name, int(str(value))) for name, value in content.items()]
    several = ((key, value[::-1] if isinstance(value, list) else [value]) for key, value in content.items())
    return [(str(name), int(key)) for key, names in several for name in names]  # the first name last, as the one kept


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

    def __init__(self, path: File):
        self.path = Path(path)
        text = _text(self.path)
        if text.lstrip().startswith(("{", "[")):
            raise InputError(f"{path} is JSON; write the labels as CSV, with columns filename and label")
        if said := re.match(r"sep=(.)\r?\n", text):  # by Excel
            text = text[said.end() :]
        sign = said[1] if said else next((sign for sign in "\t;," if sign in text.lstrip().partition("\n")[0]), " ")
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text), delimiter=sign) if any(row)]
        self.head = [cell.lower() for cell in rows[0]] if rows else []
        self.plain = [re.sub(r"[\W_]", "", cell) for cell in self.head]
        found = [number for name in _LABEL_COLUMNS for number, other in enumerate(self.plain) if other == name]
        self.described = str(path)
        if found and len(found) < len(self.head):
            rows = rows[1:]
            if len(found) > 1:
                others = listing([f"{self.head[number]} (column {number + 1})" for number in found[1:]])
                self.described += f", by its column {found[0] + 1}, {self.head[found[0]]}, and not by {others}"
        elif rows and all(len(row) > 1 and re.search(r"\.\w+$", row[-2]) for row in rows):
            rows, found = [[sign.join(row[:-1]), row[-1]] for row in rows], [1]  # names may hold the sign
            self.head = self.plain = rows[0]
        else:
            needed = "its first line names columns, and it needs one of file names, filename, and one of labels, label"
            raise InputError(f"{path} begins with {listing(self.head) or 'nothing'}; {needed}")
        if long := next((row for row in rows if any(row[len(self.head) :])), None):
            cells = f"{len(self.head)} columns, and a line has {len(long)} cells: {shortened(sign.join(long))}"
            raise InputError(f"{path} names {cells}; name them all, or quote the cells that hold spaces or commas")
        self.columns = [number for number in range(len(self.head)) if number not in found]
        self.label, self.rows = found[0], [row for row in rows if len(row) > found[0]]
        every = dict.fromkeys(part for row in self.rows for part in _SEVERAL.split(row[self.label]))
        self.every = [label for label in every if label]

    def of(self, names: Sequence[str], *roots: str) -> list[str]:
        """The labels of files below a folder, by the column whose cells are their paths or the ends of these.

        The folder has several ``roots`` where a link leads to it.
        """
        by_root = (sorted(self._column(one, names, root) for one in self.columns) for root in dict.fromkeys(roots))
        *others, (surely, matched, column, found, labels) = max(by_root, key=lambda columns: columns[-1][:2])
        for surely_too, many, other, also, differently in others:
            contradict = any(labels[found[name]] != differently[also[name]] for name in found.keys() & also.keys())
            if surely_too == surely and 2 * many > matched and contradict:
                both = f"{self.head[other]} and {self.head[column]}"
                raise InputError(f"{self.path}: both {both} may be the names of the files; call one of them filename")
        keys: dict[str, str] = {}
        missing = []
        for name in names:
            key = found.get(name)
            if key is None or not labels[key]:
                missing.append(name)
            elif _SEVERAL.search(labels[key]):
                several = f"several labels for {shortened(key)}: {shortened(labels[key])}"
                raise InputError(f"{self.path} has {several}; keep one")
            elif keys.setdefault(key, name) != name:
                files = f"{shortened(keys[key])} and {shortened(name)}"
                raise InputError(f"{self.path} has one label, of {shortened(key)}, for {files}; give it their paths")
        if missing:
            one = printable(missing[0])
            remedy = "add them" if keys else f"it has those of {listing([*labels])}: write paths or names of the files"
            which = f"{len(missing)} of {len(names)} images, such as {one}"
            raise InputError(f"{self.path} has no label for {which}; {remedy}")
        return [labels[key] for key in keys]

    def _column(self, number: int, names: Sequence[str], root: str) -> _Column:
        """What a column holds of the files below a root.

        An entry is the end of a file's path, with or without a suffix. An absolute path that begins elsewhere, as on
        another machine, has to lead through a folder that is called like the root.
        """
        elsewhere = re.compile(rf"(?:~|\w+:|/).*/{re.escape(re.findall(_OWN, root)[0])}/")
        labels: dict[str, str] = {}
        for row in self.rows:
            if len(row) > number:
                path = re.sub(r"^(\.\./)+", "", posixpath.normpath(composed(row[number].replace("\\", "/"))))
                path = path.replace(".tar/", "/")
                there = None if path.startswith(f"{root}/") else elsewhere.match(path)
                if there and not os.path.exists(path):
                    path = f"{root}/{path[there.end() :]}"
                labels[path] = ";".join(dict.fromkeys((labels.get(path, row[self.label]), row[self.label])))
        times = Counter(os.path.splitext(path)[0] for path in labels)
        entries = {stem: path for path in labels if times[stem := os.path.splitext(path)[0]] == 1}
        entries |= {path: path for path in labels}
        found: dict[str, str] = {}
        for name in names:
            parts = f"{root}/{composed(name)}".split("/")
            ends = ("/".join(parts[start:]) for start in range(len(parts)))
            key = next((one for end in ends for one in (end, os.path.splitext(end)[0]) if one in entries), None)
            if key is not None:
                found[name] = entries[key]
        whole = any(f"{root}/{composed(name)}".endswith(key) for name, key in found.items())
        known = 4 * bool(_FILE_COLUMN.fullmatch(self.plain[number])) + 2 * (self.plain[number] not in _ROW_COLUMNS)
        known += self.plain[number] in ("id", "name")
        return (whole, known), len(found), number, found, labels

    def numbers(self, labels: Sequence[str], count: int, names: Sequence[str]) -> list[int] | None:
        """The class numbers of labels that are numbers; None for names, which all may be among ``names``.

        Whether labels are numbers, and where they start, follows from all labels of the list, also those of other
        files.
        """
        every = [*labels, *(label for label in self.every if label.lower() not in _MISSING)]
        values = {label: float(label) for label in every if _NUMBER.fullmatch(label)}
        if not values:
            return None
        known = {float(name) if _NUMBER.fullmatch(name) else composed(name): n for n, name in enumerate(names)}
        named = {label: known.get(values.get(label, composed(label))) for label in every}  # 01 is 1 is 1.0
        other = next((label for label in every if label not in values), None)
        beyond = next((label for label, value in values.items() if value not in range(count)), None)
        differs = next((label for label, value in values.items() if named[label] != value), None)
        are_names, problem = None not in named.values(), None
        if other is not None:
            both = f"{next(iter(values))} and {shortened(other)}"
            problem = f"has numbers and other labels, such as {both}; give numbers alone, or names alone"
        elif min(values.values()) == 1 and max(values.values()) == count:
            problem = f"counts the {count} classes from 1, and labels count from 0; subtract 1"
        elif beyond is not None:
            problem = f"has the label {beyond}, which is not 0 to {count - 1}; correct it, or give names"
        elif are_names and differs is not None:
            both, are_names = f"the name of class {named[differs]} and the number of another", False
            remedy = "say which by --classes FILE, with the labels one per line in the order of the classes"
            problem = f"has the label {differs}, {both}; {remedy}"
        if problem is not None and not are_names:
            raise InputError(f"{self.path} {problem}")
        return None if problem is not None else [int(values[label]) for label in labels]


def _text(path: Path) -> str:
    try:
        if known := told(path, path):
            raise InputError(known)
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8: save it as such"
        raise InputError(f"cannot read {path}: {reason}") from error
