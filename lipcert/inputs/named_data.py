"""Data sets by name, as timm and torchvision have them, and the folders of TinyImageNet."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import timm.data
import torch
import torchvision.datasets
from PIL import Image
from timm.data.dataset_factory import _TORCH_BASIC_DS

from lipcert.errors import InputError, first_line
from lipcert.inputs.folders import SUFFIXES, WANTED, Purpose, is_hidden, split_in, whole_members
from lipcert.inputs.timm_networks import is_network_error

# Kinds of data sets that timm opens by name, and the package that each needs besides timm's own.
KINDS = {"torch": None, "hfds": "datasets", "hfids": "datasets", "tfds": "tensorflow_datasets", "wds": "webdataset"}
_SPLITS = {
    "train": ("train", "training"),
    "certify": ("validation", "val", "valid", "dev", "test", "train"),
}
_IMAGES = ("image", "img", "images", "jpg", "png", "pixel_values")
_LABELS = ("label", "labels", "fine_label", "target", "cls", "class", "category", "label_id")
_TEST = ("validation", "valid", "val", "test", "eval")


def _svhn(root: str, split: str) -> Any:
    if importlib.util.find_spec("scipy") is None:
        raise InputError("torch/svhn needs the package scipy: pip install scipy")
    return torchvision.datasets.SVHN(root, "test" if split in _TEST else split, download=True)


# What torchvision has and timm does not open.
_MORE: dict[str, Callable[[str, str], Any]] = {"svhn": _svhn}


def names_of_torch() -> list[str]:
    """The names after ``torch/`` that are known to open, sorted."""
    return sorted((*_TORCH_BASIC_DS, *_MORE))


def open_named(kind: str, spec: str, purpose: Purpose = "certify") -> Any:
    """Opens a data set whose name starts with one of ``KINDS``.

    Those of torchvision lie in the folder ``datasets`` of torch.hub and are downloaded where they are missing.
    """
    name, _, split = spec.partition(":")
    folder = name.partition("/")[2]
    if (
        kind == "wds"
        and os.path.isdir(folder)
        and not any(os.path.exists(os.path.join(folder, info)) for info in ("_info.json", "info.json"))
    ):
        return Shards(Path(folder), split, purpose)
    package = KINDS[kind]
    if package is not None and importlib.util.find_spec(package) is None:
        missing = f"there is no folder {folder}; others than folders" if kind == "wds" else f"{kind}/ data sets"
        raise InputError(f"{missing} need the package {package}: pip install {package.replace('_', '-')}")
    default = _SPLITS[purpose]
    options: dict[str, Any] = {"split": split or default[0]}
    more = None
    if kind == "torch":
        options |= {"root": os.path.join(torch.hub.get_dir(), "datasets"), "download": True}
        Path(options["root"]).mkdir(parents=True, exist_ok=True)
        more = _MORE.get(folder.lower())
    if kind == "wds":
        name, options["root"] = "wds/", folder
    try:
        with contextlib.redirect_stdout(sys.stderr):  # downloads report on standard output
            if kind in ("hfds", "hfids"):
                return _of_the_hub(folder, (split,) if split else default, streaming=kind == "hfids")
            opened = more(options["root"], options["split"]) if more else timm.data.create_dataset(name, **options)
    except InputError:
        raise
    except Exception as error:
        if kind == "torch" and "Unknown torchvision dataset" in str(error):
            names = ", ".join(names_of_torch())
            raise InputError(f"there is no data set {name}; torch/ has {names} and what else timm opens") from error
        where = f", or put its files into {options['root']}" if kind == "torch" else ""
        reason = reason_of(error)
        raise InputError(f"cannot open {spec}: {reason}{where}; a split is named as in {kind}/NAME:SPLIT") from error
    if not split:
        with contextlib.suppress(AttributeError, TypeError):
            opened.split = options["split"]
    return opened


def _of_the_hub(name: str, splits: Sequence[str], *, streaming: bool) -> Any:
    """A data set of the hub, from the first of these splits that it has.

    The image column is the first of images; the label column is one of ``_LABELS``, or the only one of class labels.
    """
    import datasets

    error: Exception | None = None
    for split in splits:
        try:
            dataset = datasets.load_dataset(name, split=split, streaming=streaming)
        except (KeyError, ValueError) as problem:  # what it says of a split that there is not
            error = error or problem
            if "split" not in str(problem).lower():
                raise
            continue
        features = getattr(dataset, "features", None) or {}
        image = next((key for key, kind in features.items() if type(kind).__name__ == "Image"), None)
        image = image or next((key for key in _IMAGES if key in features), "image")
        classes = [key for key, kind in features.items() if type(kind).__name__ == "ClassLabel"]
        label = next((key for key in _LABELS if key in features), classes[0] if len(classes) == 1 else None)
        if image not in features and features:
            raise InputError(f"{name} has no column of images, only {', '.join(features)}")
        chosen = split if len(splits) > 1 else None
        kind = HubStream if streaming else HubImages
        return kind(dataset, image, label, chosen)
    assert error is not None
    raise error


class _Hub:
    """What :class:`HubImages` and :class:`HubStream` know of a data set of the hub."""

    def __init__(self, dataset: Any, image: str, label: str | None, split: str | None):
        self.dataset, self.image, self.label, self.split = dataset, image, label, split
        self.notes: list[str] = []
        features = getattr(dataset, "features", None) or {}
        self.names = getattr(features.get(label), "names", None)
        if label is None:
            self.notes.append(f"no column of labels among {', '.join(features)}")
        elif label != "label" or image != "image":
            self.notes.append(f"images are in the column {image}, labels in {label}")
        if self.names:
            self.class_to_idx = {name: index for index, name in enumerate(self.names)}

    def pair(self, item: Any) -> tuple[Any, Any]:
        """(image, label) of a row."""
        label = None if self.label is None else item[self.label]
        if isinstance(label, str) and self.names and label in self.names:
            label = self.names.index(label)
        return item[self.image], label


class HubImages(_Hub):
    """A data set of the hub with random access."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.pair(self.dataset[index])


class Stream:
    """A data set that can only be gone through, as (image, label)."""

    split: str | None = None

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        raise NotImplementedError

    def __len__(self) -> int:
        return 0  # not known


class HubStream(_Hub, Stream):
    """A data set of the hub that is downloaded as it is read."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(self.pair, self.dataset)


class Shards(Stream):
    """A WebDataset without a list of its shards: the ``.tar`` files of a folder, with ``NAME.jpg`` and ``NAME.cls``."""

    def __init__(self, folder: Path, split: str, purpose: Purpose):
        files = sorted(path for path in folder.rglob("*.tar") if not is_hidden(path.relative_to(folder).parts))
        self.folder = folder
        self.notes: list[str] = []
        kinds = {path: split_in(path.relative_to(folder).as_posix()[:-4]) for path in files}
        splits = [split_in(split) or split] if split else [one for one in WANTED[purpose] if one in kinds.values()][:1]
        if split and splits[0] not in kinds.values():
            files = [path for path in files if split in path.relative_to(folder).as_posix()]
            if not files:
                raise InputError(f"{folder} has no shards of the split {split}")
        elif splits:
            files = [path for path in files if kinds[path] == splits[0]]
        elif purpose == "train" and any(kinds.values()):
            raise InputError(f"{folder} has no shards of training images; name a split: wds/{folder}:SPLIT")
        self.split = splits[0] if splits and not split else None
        self.files = files

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for path in self.files:
            with tarfile.open(path, "r:") as archive:
                sample: dict[str, Any] = {}
                before = None
                for member in whole_members(archive):
                    if not member.isfile() or is_hidden(member.name.removeprefix("./").split("/")):
                        continue
                    place, _, base = member.name.rpartition("/")
                    stem, _, kind = base.partition(".")
                    if (place, stem) != before:
                        yield from self._of(sample, path)
                        sample, before = {}, (place, stem)
                    file = archive.extractfile(member)
                    sample[kind.lower()] = b"" if file is None else file.read()
                yield from self._of(sample, path)

    def _of(self, sample: dict[str, Any], path: Path) -> Iterator[tuple[Any, Any]]:
        kinds = [kind for kind in sample if f".{kind.rpartition('.')[2]}" in SUFFIXES]
        kinds = [kind for kind in kinds if "." not in kind] or kinds
        if not kinds:
            return
        if len(kinds) > 1:
            raise InputError(f"{path} has samples of several images, {' and '.join(kinds[:2])}; keep one of them")
        image = sample[kinds[0]]
        label: Any = None
        written = next((sample[key] for key in ("cls", "cls.txt", "label", "label.txt") if key in sample), None)
        if written is not None:
            text = written.decode(errors="replace").strip()
            label = int(text.partition(".")[0]) if re.fullmatch(r"-?\d+(\.0*)?", text) else text
        elif "json" in sample:
            fields = json.loads(sample["json"])
            label = next((fields[key] for key in _LABELS if isinstance(fields, dict) and key in fields), None)
        try:
            opened = Image.open(io.BytesIO(image))
            opened.load()
        except Exception as error:
            raise InputError(f"cannot read an image of {path}: {first_line(error)}; repair or remove it") from error
        yield opened, label


def reason_of(error: Exception) -> str:
    """What an error says, or that the network is not there."""
    # torchvision tells of the mirrors it tried in a text alone.
    if is_network_error(error) or "urlopen error" in str(error):
        return "no network, or its server is unreachable; download it where there is one, or give a folder of images"
    return first_line(error)


class TinyImageNet:
    """One split of TinyImageNet as it is unpacked: ``train/CLASS/images/*``, or ``val/images/*`` with a list of labels.

    A class has the position of its name in the sorted ``wnids.txt``.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.reader = self
        self.split: str | None = None
        names = sorted((folder.parent / "wnids.txt").read_text().split())
        self.class_to_idx = {name: index for index, name in enumerate(names)}
        listed = folder / "val_annotations.txt"
        if listed.is_file():
            entries = [line.split("\t")[:2] for line in listed.read_text().splitlines() if line.strip()]
            labelled = [(folder / "images" / file, name) for file, name in entries]
        else:
            labelled = [(path, path.parts[-3]) for path in folder.glob("*/images/*") if path.is_file()]
        unknown = sorted({name for _, name in labelled} - set(names))
        if unknown:
            raise InputError(f"{folder} has images of the class {unknown[0]}, which wnids.txt beside it does not list")
        self.samples = sorted((path, self.class_to_idx[name]) for path, name in labelled)

    @staticmethod
    def of(folder: Path, purpose: Purpose = "certify", split: str | None = None) -> TinyImageNet | None:
        """The data set in a folder, which may be that of all splits, or None where that is none."""
        folder = folder.resolve()
        if (folder / "wnids.txt").is_file() and (folder / "train").is_dir():
            chosen = TinyImageNet.of(folder / (split or ("train" if purpose == "train" else "val")))
            if chosen is not None:
                chosen.split = chosen.folder.name
            return chosen
        is_split = folder.name in ("train", "val") and (folder.parent / "wnids.txt").is_file()
        return TinyImageNet(folder) if is_split else None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        path, label = self.samples[index]
        return path.open("rb"), label

    def filename(self, index: int) -> str:
        """Name of an image's file in the folder."""
        return str(self.samples[index][0].relative_to(self.folder))
