"""Image files in folders and ``.tar`` archives: which of them are data, which split they are, and their classes.

The class of an image is the first folder of its path, as torchvision's ``ImageFolder`` has it: ``class/part/x.png`` is
of the class ``class``. Folders are numbered in timm's natural order (2 before 10), or as a list says.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from timm.data import ImageNetInfo
from timm.utils.misc import natural_key

from lipcert.errors import InputError, shortened
from lipcert.inputs.lists import ClassList, LabelList, printable

Purpose = Literal["train", "certify"]

# What Pillow decodes of the formats that are read, by the names that such files have.
SUFFIXES = frozenset(
    (".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".webp", ".tif", ".tiff", ".bmp", ".dib", ".gif",
     ".ppm", ".pgm", ".pbm", ".pnm")
)  # fmt: skip
# What lies beside images and is none, so that nobody misses it.
_TEXTS = frozenset(
    (".txt", ".md", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".html", ".pdf", ".mat", ".db", ".ini",
     ".log", ".lock", ".rst")
)  # fmt: skip
# The words for each split, in the order in which certificates and training look for one.
_WORDS = {
    "train": ("train", "training", "trainset", "tr"),
    "val": ("val", "valid", "validation", "dev", "eval", "valset", "holdout"),
    "test": ("test", "testing", "testset"),
}
WANTED = {"train": ("train",), "certify": ("val", "test", "train")}
# Folders that hold all images of a data set, and are no class.
_CONTAINERS = frozenset(("images", "image", "imgs", "img", "jpegimages", "data", "dataset", "pictures", "photos"))
_WNID = re.compile(r"n\d{8}")
_SHOWN = 4


@dataclass
class Files:
    """Files below a root.

    Attributes:
        spec: what the user called the root.
        opened: opens a file by its path.
        images: paths of images, as parts.
        folders: paths of all folders.
        others: how many other files there are, by suffix.
        archive: whether they are in an archive, of which only the whole can be given.
    """

    spec: str
    opened: Callable[[tuple[str, ...]], BinaryIO]
    images: list[tuple[str, ...]] = field(default_factory=list)
    folders: set[tuple[str, ...]] = field(default_factory=set)
    others: Counter[str] = field(default_factory=Counter)
    archive: bool = False

    def add(self, parts: tuple[str, ...]) -> None:
        """Adds a file, unless it is hidden."""
        if is_hidden(parts):
            return
        self.folders |= {parts[:depth] for depth in range(1, len(parts))}
        suffix = os.path.splitext(parts[-1])[1].lower()
        if suffix in SUFFIXES:
            self.images.append(parts)
        elif suffix not in _TEXTS:
            self.others[suffix or "no suffix"] += 1

    def below(self, place: tuple[str, ...]) -> Files:
        """The files in one of the folders."""
        depth = len(place)

        def inside(paths: Collection[tuple[str, ...]]) -> list[tuple[str, ...]]:
            return [parts[depth:] for parts in paths if parts[:depth] == place and len(parts) > depth]

        return replace(
            self,
            spec="/".join((self.spec.rstrip("/"), *place)),
            opened=lambda parts: self.opened((*place, *parts)),
            images=inside(self.images),
            folders={*inside(self.folders)},
        )

    def tops(self) -> list[str]:
        """The folders directly below the root."""
        return sorted({parts[0] for parts in self.folders if len(parts) == 1}, key=natural_key)


def is_hidden(parts: Sequence[str]) -> bool:
    """Whether a path is that of hidden files, among them those that macOS leaves in archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def in_folder(folder: Path, spec: str) -> Files:
    """The files of a folder; links are followed."""
    files = Files(spec, lambda parts: folder.joinpath(*parts).open("rb"))

    def walk(place: Path, parts: tuple[str, ...], above: tuple[Path, ...]) -> None:
        parents = (*above, place.resolve())
        try:
            entries = sorted(os.scandir(place), key=lambda entry: entry.name)
        except OSError as error:
            raise InputError(f"cannot read {place}: {error.strerror or error}") from error
        for entry in entries:
            path, below = Path(entry.path), (*parts, entry.name)
            if is_hidden((entry.name,)):
                continue
            if entry.is_dir():
                target = path.resolve() if entry.is_symlink() else None
                if target is not None and any(parent.is_relative_to(target) for parent in parents):
                    raise InputError(f"{path} is a link to a folder that it is in; remove it")
                files.folders.add(below)
                walk(path, below, parents)
            elif entry.is_file():
                files.add(below)
            elif os.path.exists(path):  # reading a pipe would wait for ever
                raise InputError(f"{path} is neither a file nor a folder; remove it")
            else:
                files.others["broken link"] += 1

    walk(folder, (), ())
    return files


def whole_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of an archive, which must end with a block of zeros: tarfile does not miss what is cut off."""
    yield from archive
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("its end is cut off")


def in_tar(path: Path, spec: str) -> Files:
    """The files of an uncompressed archive, and of archives in it, whose names are folders."""
    archive = tarfile.open(path, "r:")  # noqa: SIM115  read as long as the data set is in use
    members: dict[tuple[str, ...], tuple[tarfile.TarFile, tarfile.TarInfo]] = {}

    def opened(parts: tuple[str, ...]) -> BinaryIO:
        holder, member = members[parts]
        file: Any = holder.extractfile(member)
        return file

    files = Files(spec, opened, archive=True)

    def read(holder: tarfile.TarFile, above: tuple[str, ...]) -> None:
        for member in whole_members(holder):
            parts = (*above, *(part for part in member.name.split("/") if part not in ("", ".")))
            if is_hidden(parts) or not parts or ".." in parts:
                continue
            if member.isdir():
                files.folders |= {parts[:depth] for depth in range(1, len(parts) + 1)}
            elif member.issym():
                files.others["link"] += 1
            elif member.isfile() and parts[-1].lower().endswith(".tar"):
                place = (*parts[:-1], parts[-1][:-4])
                files.folders.add(place)
                read(tarfile.open(fileobj=holder.extractfile(member), mode="r:"), place)  # noqa: SIM115
            elif member.isfile() or member.islnk():
                members[parts] = (holder, member)
                files.add(parts)

    read(archive, ())
    files.images = list(dict.fromkeys(files.images))
    return files


class ImageFiles:
    """The images of one split, with their labels; as timm's ``ImageDataset`` with its reader.

    Attributes:
        split: the name of the split that was chosen; None where the root is no root of splits.
        trained: the class folders of its training images, among which those of the split are numbered.
        classes: how many classes the labels are of; None where there are no labels.
        class_names: the names of classes by number, as far as folders give them.
        labels_by: in words, where labels come from; None where there are none.
        mapped: whether a list gives the labels, so that their number need not be that of the model's classes.
        notes: what was inferred or left out.
    """

    def __init__(
        self,
        files: Files,
        purpose: Purpose,
        split: str | None,
        count: int,
        classes: ClassList | None,
        labels: LabelList | None,
    ):
        self.reader = self
        self.notes: list[str] = []
        self.root = files.spec
        self.split, files, self.trained = _split_of(files, purpose, split)
        files = self._unwrapped(files)
        self.files = files
        self.samples = sorted(files.images, key=lambda parts: natural_key("/".join(parts)))
        self.mapped = False
        self.classes: int | None = None
        self.class_names: dict[int, str] = {}
        self.labels_by: str | None = None
        self.targets: Sequence[int] | None = None
        if files.others:
            named = ", ".join(f"{number} {suffix}" for suffix, number in sorted(files.others.items()))
            self.notes.append(f"{files.others.total()} files of other formats are left out: {named}")
        if not self.samples:
            return
        if labels is not None:
            self._label_by_list(labels, classes, count)
        else:
            self._label_by_folder(count, classes)

    def _unwrapped(self, files: Files) -> Files:
        """Goes into a single folder that holds all images and is no class."""
        while (inner := _only_folder(files)) is not None:
            top, flat = files.tops()[0], any(len(parts) == 1 for parts in inner.images)
            stem = os.path.splitext(os.path.basename(files.spec.rstrip("/")))[0]
            wrapper = files.archive or top.lower() in _CONTAINERS or top == stem or bool(_split_name(top))
            if flat or not (wrapper or all(map(_WNID.fullmatch, inner.tops()))):
                break
            files = inner
        while inner is not None and (deeper := _only_folder(inner)) is not None:
            inner = deeper
        if inner is not None and len(inner.tops()) > 1:
            self.notes.append(
                f"all images lie in one folder, {files.tops()[0]}, which gives no labels; if the folders of "
                f"{inner.spec} are the classes, give that"
            )
        return files

    def _label_by_folder(self, count: int, classes: ClassList | None) -> None:
        names = self.files.tops()
        if {*names} < self.trained:
            names = sorted(self.trained, key=natural_key)
        beside = [parts for parts in self.samples if len(parts) == 1]
        if beside and len(beside) < len(self.samples):
            raise InputError(f"{self.files.spec} has images both in class folders and beside them; move them apart")
        if beside or (len(names) == 1 and classes is None):
            if classes is not None:
                raise InputError(f"{self.files.spec} has no class folders, whose names {classes.path} could number")
            if not self.notes:
                what = "no class folders" if beside else f"one folder, {names[0]}"
                self.notes.append(f"{what}, and so no labels; --labels FILE gives them")
            return
        empty = [name for name in names if not any(parts[0] == name for parts in self.samples)]
        if classes is not None:
            numbers = classes.numbers([name for name in names if name not in empty], count)
            self.labels_by, self.mapped = f"folders, numbered by {classes.path}", True
        elif len(names) != count and (positions := _wnids(names, count)) is not None:
            numbers = positions
            self.labels_by, self.mapped = "folders, which are WordNet ids, numbered as in ImageNet-1k", True
        else:
            numbers = {name: number for number, name in enumerate(names)}
            listing = ", ".join(map(shortened, names[:_SHOWN])) + (", …" if len(names) > _SHOWN else "")
            self.labels_by = f"{len(names)} folders in natural order: {printable(listing)}"
            self.classes = len(names)
            if names != sorted(names):
                first = next((a, b) for a, b in zip(names, sorted(names), strict=True) if a != b)
                self.notes.append(
                    f"labels number the folders in timm's natural order, where {printable(first[0])} comes before "
                    f"{printable(first[1])}; torchvision sorts them the other way, and if the model learned that, "
                    "give a list: --classes FILE"
                )
            if empty:
                self.notes.append(f"{', '.join(map(printable, empty[:_SHOWN]))}: no images, but counted as a class")
        self.targets = [numbers[parts[0]] for parts in self.samples]
        self.class_names = {number: printable(name) for name, number in numbers.items()}

    def _label_by_list(self, labels: LabelList, classes: ClassList | None, count: int) -> None:
        listed = labels.of(["/".join(parts) for parts in self.samples])
        if {*listed} == {"-1"}:
            self.notes.append(f"the labels in {labels.path} are hidden (-1): they are left out")
            return
        self.targets, self.classes = labels.numbered(listed, classes, count)
        order = "" if self.classes is None else ", its names in natural order"
        self.labels_by, self.mapped = f"{labels.path}{order}", self.classes is None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        return self.files.opened(self.samples[index]), -1 if self.targets is None else self.targets[index]

    def filename(self, index: int) -> str:
        """Name of an image's file, relative to its split."""
        return "/".join(self.samples[index])


def _wnids(names: Sequence[str], count: int) -> dict[str, int] | None:
    """The numbers of ImageNet-1k of folders that are its WordNet ids, for a model of 1000 classes; None otherwise."""
    if count != 1000 or not names or not all(map(_WNID.fullmatch, names)):
        return None
    positions = {str(wnid): number for number, wnid in enumerate(ImageNetInfo("imagenet-1k").label_names())}
    return {name: positions[name] for name in names} if {*names} <= positions.keys() else None


def _only_folder(files: Files) -> Files | None:
    """The files in the one folder that all images are in; None where there are several, or images beside them."""
    tops = files.tops()
    return files.below((tops[0],)) if len(tops) == 1 and all(len(parts) > 1 for parts in files.images) else None


def _split_name(folder: str) -> str | None:
    """The split that a folder's name means: train, val or test; None for another name."""
    name = re.sub(r"[\W_]+", "_", folder.lower()).strip("_")
    bare = re.sub(r"_?(set|data|images|imgs|split|folder)$", "", name)
    return next((split for split, words in _WORDS.items() if name in words or bare in words), None)


def _loosely(folder: str) -> str | None:
    """The split whose word is a part of the name, as in ``seg_train`` or ``val2017``."""
    parts = {part for part in re.split(r"[^a-z]+", folder.lower()) if part}
    splits = [split for split, words in _WORDS.items() if parts & {*words}]
    return splits[0] if len(splits) == 1 else None


def split_in(name: str) -> str | None:
    """The split that a name is or tells of."""
    return _split_name(name) or _loosely(name)


def splits_of(files: Files) -> dict[str, str]:
    """The folder of each split, where the root is a root of splits; {} otherwise.

    It is one if all of its folders with images have names of splits, or if those that have share class names.
    """
    tops = [name for name in files.tops() if any(parts[0] == name for parts in files.images)]
    exact = {name: split for name in tops if (split := _split_name(name))}
    if len(exact) < len(tops):
        loose = {name: split for name in tops if (split := _loosely(name))}
        whole = len(loose) == len(tops) > 1 and len({*loose.values()}) == len(tops)
        if whole and all(_classes(files, name) for name in tops):
            exact = loose
    if not exact or any(len(parts) == 1 for parts in files.images):
        return {}
    others = [name for name in tops if name not in exact]
    inner = {name: _classes(files, name) for name in exact}
    if others:
        inside = set().union(*inner.values())
        if inside & {*others}:
            split = next(iter(exact))
            raise InputError(
                f"{files.spec} has class folders and a split, {split}, with the same classes; give the folder of one "
                "split, such as " + f"{files.spec.rstrip('/')}/{split}"
            )
        shared = len(exact) > 1 and any(a & b for a in inner.values() for b in inner.values() if a is not b)
        if not shared:
            return {}
    folders: dict[str, str] = {}
    for name, split in exact.items():
        if split in folders:
            raise InputError(
                f"{files.spec} has two folders for one split, {folders[split]} and {name}; give one of them"
            )
        folders[split] = name
    return folders


def _classes(files: Files, top: str) -> set[str]:
    return {parts[1] for parts in files.folders if len(parts) == 2 and parts[0] == top}


def _split_of(files: Files, purpose: Purpose, split: str | None) -> tuple[str | None, Files, set[str]]:
    """The chosen split's folder, the files in it, and the classes of the training images.

    The purpose decides on the split where the user does not.
    """
    whole = files
    while (
        not (folders := splits_of(whole)) and len(whole.tops()) == 1 and all(len(parts) > 1 for parts in whole.images)
    ):
        whole = whole.below((whole.tops()[0],))
    if not folders:
        if split is not None:
            raise InputError(f"{files.spec} has no folders for splits, and {split} is asked for")
        return None, files, set()
    have = ", ".join(folders.values())
    candidates: Sequence[str] = WANTED[purpose]
    if split is not None:
        named = {folder: key for key, folder in folders.items()}
        candidates = (named.get(split) or _split_name(split) or split,)
    chosen = next((folders[one] for one in candidates if one in folders), None)
    if chosen is None:
        lacks = f"no split {split}" if split is not None else "no training images"
        raise InputError(
            f"{files.spec} has {lacks}, only {have}; name one: {files.spec}:{next(iter(folders.values()))}"
        )
    return chosen, whole.below((chosen,)), _classes(whole, folders["train"]) if "train" in folders else set()
