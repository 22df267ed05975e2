"""Image files in folders and ``.tar`` archives: which of them are data, which split they are, and their classes.

The class of an image is the first folder of its path, as torchvision's ``ImageFolder`` has it: ``class/part/x.png`` is
of the class ``class``.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from lipcert.errors import InputError, counted
from lipcert.inputs.classes import (
    CONTAINERS,
    LabelList,
    are_wordnet_ids,
    composed,
    imagenet_names,
    natural,
    number_by_name,
    read_classes,
)
from lipcert.inputs.files import File, listing, printable

Purpose = Literal["train", "certify", "calibrate", "predict"]

# What Pillow decodes of the formats that are read, by the names that such files have.
SUFFIXES = frozenset(
    (".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".webp", ".tif", ".tiff", ".bmp", ".dib", ".gif",
     ".ppm", ".pgm", ".pbm", ".pnm")
)  # fmt: skip
# What lies beside images and is none, so that nobody misses it.
_TEXTS = frozenset((".txt", ".md", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".html", ".pdf", ".db"))
_WORDS = {"train": "train(?:ing)?|tr", "val": "val(?:id(?:ation)?)?|dev|eval|holdout", "test": "test(?:ing)?"}
_SPLITS = {split: rf"(?:{words})[\W_]?(?:set|data|images|\d{{4}})?" for split, words in _WORDS.items()}
# The splits that a purpose takes, in this order.
WANTED = {"train": ("train",), "certify": ("val", "test", "train"), "calibrate": ("train",), "predict": ()}
_UNLABELLED = frozenset(("calibrate", "predict"))
# Folders of macOS, Windows, Linux and disk stations, of copies and of what was deleted.
_OF_SYSTEMS = frozenset(
    ("__MACOSX", "System Volume Information", "$RECYCLE.BIN", "lost+found", "@eaDir", "#recycle", "#snapshot")
)


@dataclass
class Files:
    """Files below a root by their paths with slashes; ``others`` counts all but images and texts, by suffix."""

    spec: str
    opened: Callable[[str], BinaryIO]
    images: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)
    others: Counter[str] = field(default_factory=Counter)
    archive: bool = False

    def add(self, path: str, regular: bool = True) -> None:
        """Adds a file."""
        suffix = os.path.splitext(path)[1].lower()
        if not regular:
            self.others["link or special file"] += 1
        elif suffix in SUFFIXES:
            self.images.append(path)
        else:
            self.rest.append(path)
            if suffix not in _TEXTS:
                self.others[suffix or "no suffix"] += 1

    def below(self, top: str) -> Files:
        """The files in one of the folders."""
        start = f"{top}/"
        inside = ([path.removeprefix(start) for path in paths if path.startswith(start)]
                  for paths in (self.images, self.rest, self.folders))  # fmt: skip
        images, rest, folders = inside
        spec = f"{self.spec.rstrip('/')}/{top}"
        return Files(spec, lambda path: self.opened(start + path), images, rest, {*folders}, self.others, self.archive)

    def tops(self) -> list[str]:
        """The folders directly below the root, in natural order."""
        return natural([path for path in self.folders if "/" not in path])

    def without_images(self) -> set[str]:
        """The folders directly below the root that hold files, but no images."""
        rest, images = ({path.partition("/")[0] for path in paths} for paths in (self.rest, self.images))
        return rest - images

    def parts(self) -> Counter[str]:
        """The names of the folders in the first folders, and in how many of these each is."""
        return Counter(path.partition("/")[2] for path in sorted(self.folders) if path.count("/") == 1)

    def wrapper(self) -> str | None:
        """The one folder that all images are in; None where there are several, or images beside it."""
        tops = self.tops()
        return tops[0] if len(tops) == 1 and all("/" in path for path in self.images) else None


def _is_hidden(name: str) -> bool:
    """Whether a file is hidden, or a folder is of an operating system or a disk station."""
    return name.startswith(".") or name in _OF_SYSTEMS


def _is_around(link: str, place: str) -> bool:
    return Path(os.path.realpath(place)).is_relative_to(os.path.realpath(link))


def in_folder(folder: Path, spec: str) -> Files:
    """The files of a folder; links are followed."""
    files = Files(spec, lambda path: (folder / path).open("rb"))
    waiting = [(os.fspath(folder), "")]
    while waiting:
        place, start = waiting.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if _is_hidden(entry.name):
                        continue
                    if entry.is_symlink() and entry.is_dir() and _is_around(entry.path, place):
                        files.others["link to a folder around it"] += 1
                    elif entry.is_dir():
                        files.folders.add(start + entry.name)
                        waiting.append((entry.path, f"{start}{entry.name}/"))
                    else:
                        files.add(start + entry.name, entry.is_file())
        except OSError as error:  # among them the fortieth link in a path, of one that leads back
            raise InputError(f"cannot read {place[:300]}: {error.strerror or error}") from error
    return files


def in_tar(path: Path, spec: str) -> Files:
    """The files of an uncompressed archive; TarError if it is cut off, compressed, or a member is not whole."""
    archive = tarfile.open(path, "r:")  # noqa: SIM115  read as long as the data set is in use
    members: dict[str, tarfile.TarInfo] = {}

    def opened(name: str) -> BinaryIO:
        file: Any = archive.extractfile(members[name])
        return file

    files = Files(spec, opened, archive=True)
    for member in archive:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if not parts or any(map(_is_hidden, parts)):
            if ".." in parts:
                files.others["path out of the archive"] += 1
            continue
        files.folders |= {"/".join(parts[:depth]) for depth in range(1, len(parts) + member.isdir())}
        if not member.isdir():
            if (name := "/".join(parts)) not in members:
                files.add(name, member.isfile() or member.islnk())
            members[name] = member  # of two the later one, as tar unpacks them
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile does not miss what is cut off
        raise tarfile.ReadError("its end is cut off")
    if any(archive.fileobj.read(2 * tarfile.RECORDSIZE)):
        raise InputError(f"{spec}: another archive follows its end; join them by tar -A, or unpack both")
    return files


@dataclass
class ImageFiles:
    """The images of one split, with their labels; as timm's ``ImageDataset`` with its reader.

    ``classes`` is how many classes the labels are numbered among; None where they are the model's, or there are none.
    """

    files: Files
    purpose: Purpose
    split: str | None
    count: int
    known: Sequence[str]
    numbered_by: InitVar[File | None]
    labels: InitVar[LabelList | None]
    classes: int | None = None
    labels_by: str | None = None
    targets: Sequence[int] | None = None

    def __post_init__(self, numbered_by: File | None, labels: LabelList | None) -> None:
        self.reader, self.notes, self.class_names = self, list[str](), dict[int, str]()
        self.split, files, trained = _split_of(self.files, self.purpose, self.split)
        self.files = files if self.purpose in _UNLABELLED else _unwrapped(files)
        self.numbered, self.trained = trained or self.files, trained.tops() if trained else []
        self.samples = natural(self.files.images)
        if labels is not None:
            self._label_by_list(labels, numbered_by)
        elif self.samples and self.purpose not in _UNLABELLED:
            self._label_by_folder(numbered_by)
        if others := self.files.others:
            named = ", ".join(f"{number} {suffix}" for suffix, number in sorted(others.items()))
            self.notes.append(f"{counted(sum(others.values()), 'file')} of other formats left out: {named}")

    def _label_by_folder(self, classes: File | None) -> None:
        names, inner = self.files.tops(), self.files
        while (top := inner.wrapper()) is not None:
            inner = inner.below(top)
        if inner is not self.files and len(inner.tops()) > 1:
            one = f"all images lie in one folder, {printable(names[0])}, which gives no labels"
            self.notes.append(f"{one}; if the folders of {inner.spec} are the classes, give that")
        beside = sum("/" not in path for path in self.samples)
        if 0 < beside < len(self.samples):
            one = printable(next(path for path in self.samples if "/" not in path))
            several = f"{beside} of {len(self.samples)} images outside them ({one})"
            raise InputError(f"{self.files.spec} has class folders, and {several}; move these into one, or elsewhere")
        named = (self.known or self.trained) and names[0].lower() not in CONTAINERS if names else False
        if beside or (len(names) == 1 and classes is None and not named):
            if classes is not None:
                raise InputError(f"{self.files.spec} has no class folders for {classes}; leave --classes out")
            if not self.notes:
                what = "no class folders" if beside else f"one folder, {printable(names[0])}"
                self.notes.append(f"{what}, and so no labels; --labels FILE gives them")
            return
        tops = [path.partition("/")[0] for path in self.samples]
        numbers = self._numbers(names, {*tops}, classes)
        self.targets = [numbers[top] for top in tops]
        everywhere = [part for part, times in self.files.parts().items() if times == len(names) > 1]
        if len(everywhere) > 1:
            self.notes.append(
                f"labels follow the first folders, {listing(names)}, of which each has the folders "
                f"{listing(everywhere)}; if those are the classes, give one of the first; if splits, move them above"
            )

    def _numbers(self, names: list[str], used: set[str], classes: File | None) -> dict[str, int]:
        """The number of each class: by a list, by the names that the model knows, as in training, or in order."""
        spec, ids = self.files.spec, imagenet_names(self.count)
        known = {*map(composed, self.known)}
        others = bool(known) and self.purpose == "train" and known.isdisjoint(map(composed, names))
        if others and classes is None:
            self.notes.append(f"the model's classes were {listing(self.known)}: it is trained for others")
        if classes is not None:
            numbers = read_classes(classes, [name for name in names if name in used], self.count)
            self.labels_by = f"names, numbered by {classes}"
        elif self.known and not others:
            numbers = number_by_name([name for name in names if name in used], self.known, spec, "the model's classes")
            self.labels_by = "names of the model's classes"
        elif are_wordnet_ids(names) and {*names} <= {*ids} and len(ids) == self.count:
            numbers = number_by_name(names, ids, spec, "those of ImageNet")
            self.labels_by = "WordNet ids, numbered as in timm's lists of ImageNet"
        else:
            every = self.trained or names
            without = self.numbered.without_images()
            if unclear := [name for name in every if name in without]:  # refused by torchvision's ImageFolder, too
                one = f"{spec} has a folder {printable(unclear[0])} with files, but no images: is it a class?"
                raise InputError(f"{one} give the folder of the classes, or empty this one, or --classes FILE")
            numbers = number_by_name(names, every, spec, "those of the training images (train)")
            self.labels_by, self.classes = f"{len(every)} names in natural order: {listing(every)}", len(every)
            for first, second in zip(every, sorted(every), strict=True):
                if first != second:
                    self.notes.append(
                        f"labels number the names in timm's natural order, where {printable(first)} comes before "
                        f"{printable(second)}; torchvision sorts them the other way, and if the model learned that, "
                        "give a list: --classes FILE"
                    )
                    break
            filled = {numbers[name] for name in names if name in used or self.trained}
            if empty := [name for number, name in enumerate(every) if number not in filled]:
                self.notes.append(f"{listing(empty)}: no images, but counted as a class")
            self.class_names = {number: printable(name) for number, name in enumerate(every)}
            return numbers
        self.class_names = {number: printable(name) for name, number in numbers.items()}
        return numbers

    def _label_by_list(self, labels: LabelList, classes: File | None) -> None:
        spec = self.files.spec
        places = [Path(place(spec)) for place in (os.path.abspath, os.path.realpath)]
        roots = [place.parent if self.samples == [place.name] else place for place in places]  # of one image
        listed = labels.of(self.samples, *(composed(re.sub(r"\.tar$", "", root.as_posix())) for root in roots))
        if {*listed} == {"-1"}:
            self.notes.append(f"the labels in {labels.path} are hidden (-1): they are left out")
            return
        if classes is None and (numbers := labels.numbers(listed, self.count, self.known or self.trained)) is not None:
            self.targets, self.labels_by = numbers, labels.described
            return
        named = self._numbers(natural(labels.every), {*listed}, classes)
        self.targets, self.labels_by = [named[label] for label in listed], f"{labels.described}, {self.labels_by}"

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        return self.files.opened(self.samples[index]), -1 if self.targets is None else self.targets[index]

    def filename(self, index: int) -> str:
        """Name of an image's file, relative to its split."""
        return self.samples[index]


def _unwrapped(files: Files) -> Files:
    """Goes into single folders that hold all images and are no class."""
    while (top := files.wrapper()) is not None:
        inner = files.below(top)
        stem = os.path.splitext(os.path.basename(files.spec.rstrip("/")))[0]
        wraps = files.archive or top.lower() in CONTAINERS or top == stem or are_wordnet_ids(inner.tops())
        if not wraps or any("/" not in path for path in inner.images):
            break
        files = inner
    return files


def split_in(folder: str, whole: bool = False) -> str | None:
    """The split that a folder's name is, or that a word in it means, as in ``seg_train`` or ``val2017``."""
    name = folder.lower()
    if whole:
        return next((split for split, words in _SPLITS.items() if re.fullmatch(words, name)), None)
    found = [split for split, words in _SPLITS.items() if re.search(rf"(?<![a-z])(?:{words})(?![a-z])", name)]
    return found[0] if len(found) == 1 else None


def _splits_of(files: Files) -> dict[str, str]:
    """The folder of each split, if all folders with images are named like splits, or those that are share classes."""
    used = {path.partition("/")[0] if "/" in path else "" for path in files.images}
    tops = [name for name in files.tops() if name in used]
    inner = {name: {*map(composed, _unwrapped(files.below(name)).tops())} for name in tops if split_in(name)}
    if not inner or "" in used:
        return {}
    if len(inner) < len(tops) or not all(split_in(name, whole=True) or inner[name] for name in tops):
        whole = [name for name in inner if split_in(name, whole=True)]
        if any(inner[name] & {*map(composed, tops)} for name in whole):
            split = whole[0]
            both = f"class folders and a split, {split}, with the same classes"
            raise InputError(f"{files.spec} has {both}; give one split, such as {files.spec.rstrip('/')}/{split}")
        beside = {path.partition("/")[2] for path in files.folders if path.partition("/")[0] not in inner}
        for some, parts in ((whole, {""}), ([*inner], beside)):  # parts of classes, too, may have the same names
            if any(inner[a] & inner[b] - parts for a in some for b in some if split_in(a) != split_in(b)):
                inner = {name: inner[name] for name in some}
                break
        else:
            return {}
    folders: dict[str, str] = {}
    for name in inner:
        if (other := folders.setdefault(str(split_in(name)), name)) != name:
            raise InputError(f"{files.spec} has two folders for one split, {other} and {name}; give one of them")
    return folders


def _split_of(files: Files, purpose: Purpose, split: str | None) -> tuple[str | None, Files, Files | None]:
    """The split's folder, by the purpose if the user names none, its files, and those of the training split."""
    if split is None and not WANTED[purpose]:
        return None, files, None
    whole = files
    while not (folders := _splits_of(whole)) and (top := whole.wrapper()) is not None:
        whole = whole.below(top)
    if not folders:
        if split is not None:
            raise InputError(f"{files.spec} has no folders for splits, and {split} is asked for; leave it out")
        return None, files, None
    wanted: Sequence[str] = WANTED[purpose]
    if split is not None:
        wanted = ({folder: key for key, folder in folders.items()}.get(split) or split_in(split) or split,)
    chosen = next((folders[one] for one in wanted if one in folders), None)
    if chosen is None:
        lacks = f"no split {split}" if split is not None else "no training images"
        have, one = ", ".join(folders.values()), next(iter(folders.values()))
        raise InputError(f"{files.spec} has {lacks}, only {have}; name one: {files.spec}:{one}")
    return chosen, whole.below(chosen), _unwrapped(whole.below(folders["train"])) if "train" in folders else None
