"""Data sets by name, as timm and torchvision have them, and the folders of TinyImageNet."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import timm.data
import torch
import torchvision.datasets
from timm.data.dataset_factory import _TORCH_BASIC_DS

from lipcert.errors import InputError, first_line
from lipcert.inputs.timm_networks import is_network_error

# Kinds of data sets that timm opens by name, and the package that each needs besides timm's own.
KINDS = {"torch": None, "hfds": "datasets", "hfids": "datasets", "tfds": "tensorflow_datasets", "wds": "webdataset"}
_TEST = ("validation", "valid", "val", "test", "eval")


def _svhn(root: str, split: str) -> Any:
    if importlib.util.find_spec("scipy") is None:
        raise InputError("torch/svhn needs the package scipy: pip install scipy")
    return torchvision.datasets.SVHN(root, "test" if split in _TEST else split, download=True)


# What torchvision has and timm does not open.
_MORE: dict[str, Callable[[str, str], Any]] = {"svhn": _svhn}


def open_named(kind: str, spec: str) -> Any:
    """Opens a data set whose name starts with one of ``KINDS``.

    Those of torchvision lie in the folder ``datasets`` of torch.hub and are downloaded where they are missing.

    Args:
        kind: the part before the slash, in lower case.
        spec: such as ``"torch/svhn:train"``.

    Raises:
        InputError: one that is not there, cannot be downloaded, or needs a package.
    """
    package = KINDS[kind]
    if package is not None and importlib.util.find_spec(package) is None:
        raise InputError(f"{kind}/ data sets need the package {package}: pip install {package.replace('_', '-')}")
    name, _, split = spec.partition(":")
    options: dict[str, Any] = {"split": split or "validation"}
    more = None
    if kind == "torch":
        options |= {"root": os.path.join(torch.hub.get_dir(), "datasets"), "download": True}
        Path(options["root"]).mkdir(parents=True, exist_ok=True)
        more = _MORE.get(name.partition("/")[2].lower())
    if kind == "wds":
        name, options["root"] = "wds/", name.partition("/")[2]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # downloads report on standard output
            if more is not None:
                return more(options["root"], options["split"])
            return timm.data.create_dataset(name, **options)
    except InputError:
        raise
    except Exception as error:
        if kind == "torch" and "Unknown torchvision dataset" in str(error):
            known = ", ".join(sorted((*_TORCH_BASIC_DS, *_MORE)))
            raise InputError(f"there is no data set {name}; torch/ has {known} and what else timm opens") from error
        where = f", or put its files into {options['root']}" if kind == "torch" else ""
        reason = reason_of(error)
        raise InputError(f"cannot open {spec}: {reason}{where}; a split is named as in {kind}/NAME:SPLIT") from error


def reason_of(error: Exception) -> str:
    """What an error says, or that the network is not there."""
    # torchvision tells of the mirrors it tried in a text alone.
    if is_network_error(error) or "urlopen error" in str(error):
        return "no network, or its server is unreachable; download it where there is one, or give a folder of images"
    return first_line(error)


class TinyImageNet:
    """One split of TinyImageNet as it is unpacked: ``train/CLASS/images/*``, or ``val/images/*`` with a list of labels.

    A class has the position of its name in the sorted ``wnids.txt``.

    Args:
        folder: ``train`` or ``val``.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.reader = self
        names = sorted((folder.parent / "wnids.txt").read_text().split())
        self.class_to_idx = {name: index for index, name in enumerate(names)}
        listed = folder / "val_annotations.txt"
        if listed.is_file():
            entries = [line.split("\t")[:2] for line in listed.read_text().splitlines() if line.strip()]
            found = [(folder / "images" / file, name) for file, name in entries]
        else:
            found = [(path, path.parts[-3]) for path in folder.glob("*/images/*") if path.is_file()]
        unknown = sorted({name for _, name in found} - set(names))
        if unknown:
            raise InputError(f"{folder} has images of the class {unknown[0]}, which wnids.txt beside it does not list")
        self.samples = sorted((path, self.class_to_idx[name]) for path, name in found)

    @staticmethod
    def of(folder: Path) -> TinyImageNet | None:
        """The data set in a folder, or None where that is none."""
        folder = folder.resolve()
        known = folder.name in ("train", "val") and (folder.parent / "wnids.txt").is_file()
        return TinyImageNet(folder) if known else None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        path, label = self.samples[index]
        return path.open("rb"), label

    def filename(self, index: int) -> str:
        """Name of an image's file in the folder."""
        return str(self.samples[index][0].relative_to(self.folder))
