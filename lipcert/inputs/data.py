"""Images for a model: read by timm, cut to the model's input size, left in [0, 1], in a fixed order.

The normalisation that timm's pipelines end with is left out here: it is stage 0 of the certified network.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import os
import random
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import timm.data
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import Compose, Normalize

from lipcert.errors import InputError, first_line, shortened
from lipcert.inputs.folders import SUFFIXES, ImageFiles, Purpose, in_folder, in_tar
from lipcert.inputs.lists import ClassList, LabelList, printable
from lipcert.inputs.loading import number_of_classes
from lipcert.inputs.named_data import KINDS, Stream, TinyImageNet, names_of_torch, open_named, reason_of
from lipcert.inputs.preprocessing import RESIZING, preprocessing
from lipcert.inputs.samples import sample_images
from lipcert.model import Model

BUNDLED = Path(__file__).parents[1] / "assets" / "digits.safetensors"

_MODES = {1: "L", 3: "RGB"}

# Formats that are decoded, whatever a file's name says. Pillow hands others, such as EPS, to programs of the system.
_FORMATS = ("BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
# Resizing the shorter side of a longer strip to the model's input would take gigabytes.
_LONGEST = 1000
# Archives that are not read.
_PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".rar")
# The share of the resized image that is cut out; a tiny one asks for a resized image of gigabytes.
_LEAST_CROP = 0.1


@dataclass(frozen=True)
class Batch:
    """Consecutive images.

    Attributes:
        indices: position of each image in the whole data set.
        images: shape (N, C, H, W), float32 in [0, 1].
        labels: shape (N,), int64; None where the data set has none.
        files: name of each image's file, relative to the data set; None where it has none, () where none has.
    """

    indices: tuple[int, ...]
    images: Tensor
    labels: Tensor | None
    files: tuple[str | None, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def hashes(self) -> list[str]:
        """The :func:`image_hash` of each image."""
        return [image_hash(image) for image in self.images]

    def split(self, count: int) -> tuple[Batch, Batch]:
        """The first ``count`` images, and the rest, which may be none."""
        return self._part(slice(None, count)), self._part(slice(count, None))

    def _part(self, part: slice) -> Batch:
        labels = None if self.labels is None else self.labels[part]
        return Batch(self.indices[part], self.images[part], labels, self.files[part])


def image_hash(image: Tensor) -> str:
    """What tells an image from others: 32 hexadecimal digits of the SHA-256 of its shape and float32 pixels."""
    pixels = image.detach().cpu().float().contiguous().numpy().astype("<f4", copy=False)
    return hashlib.sha256(f"{pixels.shape}\n".encode() + pixels.tobytes()).hexdigest()[:32]


class Images(Dataset[tuple[Tensor, "int | None"]]):
    """The images of a data set that a run looks at, ready for the model.

    ``images[i]`` is the i-th of them, as ((C, H, W) float32 in [0, 1], label or None); ``batches`` goes through all.
    A data set that is a stream can only be gone through, and may not know its length.

    Attributes:
        spec: what the user called the data set; None for the bundled images.
        labelled: whether the labels are known and belong to the model's classes.
        note: one line on why labels were left out, or None.
        other_classes: how many classes the data set has, if the model has another number; else None.
        notes: what was inferred about the images or left out, a line each.
        split: the split that was chosen among several; None where the user named it, or there is only one.
        labels_by: in words, what labels follow from; None where that is the data set itself.
        lists: the files ``classes`` and ``labels`` that were given.
        class_names: names of classes by number, as far as the data set has them.
        order: positions in the whole data set, in the order of the run; None for a stream.
        total: images in the whole data set, with those of ``removed``; None for a stream.
        removed: positions of images that the data set had before, ascending, see :meth:`leave_out`.
        limit: how many images the run looks at; None for all.
        stored: whether the images are stored as the network takes them, and not resized from files.
    """

    stored = False

    def __init__(self, spec: str | None, *, total: int | None, limit: int | None):
        self.spec = spec
        self.limit = limit
        self.labelled = True
        self.note: str | None = None
        self.other_classes: int | None = None
        self.notes: list[str] = []
        self.split: str | None = None
        self.labels_by: str | None = None
        self.lists: dict[str, str] = {}
        self.class_names: dict[int, str] = {}
        self.total = total
        self.removed: list[int] = []
        self.order = None if total is None else order_of(total, limit)

    @property
    def length(self) -> int | None:
        """How many images there are; None for a stream that does not say."""
        return None if self.order is None else len(self.order)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{self.spec} is a stream and does not say how many images it holds")
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, int | None]:
        if self.order is None:
            raise TypeError(f"{self.spec} is a stream; go through it with batches()")
        return self._read(self.order[i])

    def others(self, count: int) -> Batch | None:
        """Up to ``count`` images that the run leaves out: the next ones of its shuffle; None if there are none."""
        if self.total is None or self.limit is None or self.limit >= self.total:
            return None
        indices = [i for i in _shuffled(self.total)[self.limit :] if i not in self.removed][:count]
        items = [self._read(index) for index in indices]
        labels = torch.tensor([label for _, label in items]) if self.labelled else None
        return Batch(tuple(indices), torch.stack([image for image, _ in items]), labels) if items else None

    def leave_out(self, removed: Sequence[int]) -> None:
        """Gives the images the positions that they had when the data set also had images at these positions."""
        assert self.total is not None
        self.total += len(removed) - len(self.removed)
        self.removed = sorted(removed)
        self.order = [index for index in order_of(self.total, self.limit) if index not in self.removed]

    def singly(self, wanted: Collection[int]) -> Iterator[Batch]:
        """These images one by one, whatever the limit; those that the data set does not have are left out."""
        if self.total is None:
            yield from self.batches(1, only=wanted)
            return
        for index in sorted({*wanted} - {*self.removed}):
            if index < self.total:
                image, label = self._read(index)
                labels = None if label is None else torch.tensor([label])
                yield Batch((index,), image[None], labels, (self.file(index),))

    def _place(self, index: int) -> int:
        """The place of an image among those that the data set has now."""
        return index - bisect.bisect_right(self.removed, index)

    @property
    def digest(self) -> str | None:
        """SHA-256 of the names of all files, or of the bundled images; None where names are not at hand.

        The content of each image that is certified stands in its row, as :func:`image_hash`.
        """
        return None

    def file(self, index: int) -> str | None:
        """Name of an image's file, relative to the data set; None where it has none."""
        return None

    def sizes(self, count: int) -> list[tuple[int, int]]:
        """Widths and heights of ``count`` images of the run before they are resized; [] if that needs decoding."""
        return []

    def batches(self, size: int | Iterable[int], only: Collection[int] | None = None) -> Iterator[Batch]:
        """All images in order, or some of them."""
        items = self._items(only)
        for count in repeat(size) if isinstance(size, int) else size:
            if not (chunk := list(islice(items, count))):
                return
            labels = torch.tensor([label for _, _, label in chunk]) if self.labelled else None
            indices, images = tuple(index for index, _, _ in chunk), torch.stack([image for _, image, _ in chunk])
            yield Batch(indices, images, labels, tuple(self.file(index) for index in indices))

    def _items(self, only: Collection[int] | None) -> Iterator[tuple[int, Tensor, int | None]]:
        assert self.order is not None
        for index in self.order:
            if only is None or index in only:
                yield index, *self._read(index)

    def _read(self, index: int) -> tuple[Tensor, int | None]:
        raise NotImplementedError

    def _look_at_label(self, label: Any) -> None:
        """Leaves labels out where the first of them is hidden, or no class at all."""
        if _is_label(label):
            return
        if isinstance(label, float):
            raise InputError(f"{self.spec} has the label {label}, which is no class; give data with class numbers")
        self.labelled = False
        if label is None:
            self.note = self.note or f"the images of {self.spec} have no labels"
            return
        hidden = not isinstance(label, (str, list, tuple, dict))
        reason = f"are hidden ({label})" if hidden else f"are no class numbers ({shortened(str(label))})"
        self.note = self.note or f"the labels of {self.spec} {reason}: they are left out"

    def _compare_classes(self, what: str, number: int, classes: int) -> None:
        """Labels are positions among the data set's classes: among more or fewer they would mean other classes."""
        if number != classes:
            self.labelled, self.other_classes = False, number
            self.note = f"{what} {number} classes and the model has {classes}: the labels are left out"


def open_images(
    spec: str | os.PathLike[str] | None,
    model: Model,
    *,
    limit: int | None = None,
    purpose: Purpose = "certify",
    classes: str | os.PathLike[str] | None = None,
    labels: str | os.PathLike[str] | None = None,
) -> Images:
    """Opens images and their labels for one model.

    Args:
        spec: a folder or ``.tar`` of images, whose first folders are classes, see :mod:`lipcert.inputs.folders`; or
            one image; or a data set by name, ``torch/NAME`` such as ``torch/mnist``, ``torch/cifar10``,
            ``torch/cifar100`` or ``torch/svhn``, ``hfds/NAME``, ``hfids/NAME``, ``tfds/NAME`` or ``wds/FOLDER``; or
            None for the bundled images, or, for a model of another input size, drawn ones without labels. With several
            splits ``:SPLIT`` after it names one.
        model: its ``input_size`` and ``data_config`` say how images are resized and cropped.
        limit: take so many images only: the first of a fixed shuffle, because folders are sorted by class; of a stream
            the first.
        purpose: decides the split where none is named: to train, the training images; to certify, those for
            validation, else those for testing, else those for training.
        classes: a file that numbers the class folders or the names in ``labels``, see :mod:`lipcert.inputs.lists`.
        labels: a file with the label of each file.

    Returns:
        The images, in an order that is the same in every run.

    Raises:
        InputError: a missing path, no images, a damaged file, a data set that cannot be had.
    """
    if limit is not None and limit < 1:
        raise InputError(f"the limit must be at least 1 image, got {limit}")
    listed = None if classes is None else ClassList(classes), None if labels is None else LabelList(labels)
    kind = "" if spec is None else os.fspath(spec).partition("/")[0].lower()
    named = spec is None or (kind in KINDS and "/" in os.fspath(spec))
    if named and any(listed):
        raise InputError("--classes and --labels are for folders and .tar files; this data set has its own")
    if spec is None:
        return _StoredImages(model, limit)
    spec = os.fspath(spec)
    if not spec.strip():
        raise InputError("the data set has an empty name; give a folder, or leave --data out for the bundled images")
    transform = _Transform(model)
    count = number_of_classes(model)
    source = open_named(kind, spec, purpose) if named else _open_path(spec, purpose, count, *listed)
    if isinstance(source, (timm.data.IterableImageDataset, Stream)):
        return _StreamImages(spec, source, transform, count, limit)
    images = _IndexedImages(spec, source, transform, count, limit)
    images.lists = {
        key: os.path.abspath(one.path) for key, one in zip(("classes", "labels"), listed, strict=True) if one
    }
    return images


class _Transform:
    """From a decoded image to the model's pixels: timm's evaluation transform without the normalisation."""

    def __init__(self, model: Model):
        channels, height, width = model.input_size
        if channels not in _MODES:
            raise InputError(
                f"the model takes images of {channels} channels, and image files have 1 or 3; pass tensors from Python"
            )
        self.mode = _MODES[channels]
        config = preprocessing(model, files=True)
        options = {key: config[key] for key in RESIZING}
        mean = tuple(config["mean"])
        try:
            if not options["crop_pct"] >= _LEAST_CROP:
                raise ValueError(f"crop_pct is below {_LEAST_CROP}")
            steps = timm.data.create_transform((channels, height, width), is_training=False, mean=mean, **options)
        except Exception as error:
            listing = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise InputError(
                f"timm cannot resize images as the model's configuration says ({listing}): {first_line(error)}"
            ) from error
        self.steps = Compose([step for step in steps.transforms if not isinstance(step, Normalize)])

    def __call__(self, image: Image.Image) -> Tensor:
        if max(image.size) > _LONGEST * min(image.size):
            raise ValueError(f"it has {image.size[0]} × {image.size[1]} pixels, a strip that would not stay one")
        pixels: Tensor = self.steps(_eight_bits(image).convert(self.mode))
        return pixels


def _eight_bits(image: Image.Image) -> Image.Image:
    """The image with grey values of 16 bits scaled to 8, where Pillow would cut them off at 255."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray(((np.asarray(image).astype(np.int64) * 255 + 32767) // 65535).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"grey values of mode {image.mode} have no known range; save it with 8 or 16 bits")
    return image


class _StoredImages(Images):
    """Images that need no files: those of the bundled checkpoint at its size, or drawn ones without labels."""

    stored = True

    def __init__(self, model: Model, limit: int | None):
        try:
            content = safetensors.torch.load_file(BUNDLED)
            self.images, targets = content["images"], content["labels"]
        except (OSError, safetensors.SafetensorError, KeyError) as error:
            reason = first_line(error)
            raise InputError(
                f"the bundled images cannot be read ({reason}); install lipcert again, or give images with --data"
            ) from error
        self.targets: Tensor | None = targets
        if tuple(self.images.shape[1:]) != model.input_size:
            self.images, self.targets = sample_images(*model.input_size), None
        super().__init__(None, total=len(self.images), limit=limit)
        if self.targets is None:
            self.labelled = False
            self.note = "no --data: lipcert drew sample images, without labels; results on them say little about yours"
        else:
            self._compare_classes("the bundled images have", int(targets.max()) + 1, number_of_classes(model))

    @property
    def digest(self) -> str | None:
        targets = b"" if self.targets is None else self.targets.numpy().tobytes()
        return hashlib.sha256(self.images.numpy().tobytes() + targets).hexdigest()

    def _read(self, index: int) -> tuple[Tensor, int | None]:
        label = int(self.targets[index]) if self.labelled and self.targets is not None else None
        return self.images[index].float() / 255, label


class _IndexedImages(Images):
    """A data set with random access: timm's ``ImageDataset`` or one of torchvision's."""

    def __init__(self, spec: str, source: Any, transform: _Transform, classes: int, limit: int | None):
        self.source = source
        self.transform = transform
        self.classes = classes
        if not len(source):
            raise InputError(f"{spec} holds no images")
        super().__init__(spec, total=len(source), limit=limit)
        self.split, self.labels_by = getattr(source, "split", None), getattr(source, "labels_by", None)
        self.notes += getattr(source, "notes", [])
        if isinstance(source, ImageFiles):
            self.labelled, self.class_names = source.targets is not None, source.class_names
            if source.classes is not None:
                self._compare_classes(f"{spec} has", source.classes, classes)
                self.note = f"{self.note}; --classes FILE numbers them" if self.note else None
            return
        if isinstance(source, _OneImage):
            self._decode(0)
            self.labelled = False
            return
        names = _class_names(source)
        if names:
            self.class_names = {number: str(name) for name, number in names.items()}
            self._compare_classes(f"{spec} has", len(names), classes)
        self._look_at_label(self._decode(0)[1])

    @property
    def digest(self) -> str | None:
        if self.file(0) is None:
            return None
        names = [Path(self.source.filename(index)).as_posix() for index in range(len(self.source))]
        return hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()

    def file(self, index: int) -> str | None:
        # Others than readers of files have no names, or read the whole image to tell one.
        named = hasattr(getattr(self.source, "reader", None), "samples")
        return printable(Path(self.source.filename(self._place(index))).as_posix()) if named else None

    def _read(self, index: int) -> tuple[Tensor, int | None]:
        image, label = self._decode(index)
        return image, _checked(label, self.classes, self._name(index)) if self.labelled else None

    def _decode(self, index: int) -> tuple[Tensor, Any]:
        # timm's own ImageDataset would replace an unreadable image by the next one, with that one's label.
        reader = getattr(self.source, "reader", None)
        try:
            if reader is None:
                image, label = self.source[self._place(index)]
                return self.transform(image), label
            file, label = reader[self._place(index)][:2]
            with file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about metadata, and palettes with transparency
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                Image.init()  # all formats, or those of this list that are not loaded yet would be an error
                with Image.open(file, formats=[name for name in _FORMATS if name in Image.OPEN]) as image:
                    return self.transform(image), label
        except Exception as error:
            foreign = isinstance(error, UnidentifiedImageError)  # its text is a Python object
            reason = "it is damaged, or no image of a known format" if foreign else first_line(error)
            raise InputError(f"cannot read the image {self._name(index)}: {reason}; repair or remove it") from error

    def sizes(self, count: int) -> list[tuple[int, int]]:
        reader, sizes = getattr(self.source, "reader", None), []
        order = self.order or ()
        if reader is None:
            return []
        Image.init()  # all formats: in a new process none is loaded yet, and the size would stay unknown
        for index in order[:: max(1, len(order) // count)][:count]:
            with contextlib.suppress(Exception), warnings.catch_warnings():  # decoding it says what is wrong with it
                warnings.simplefilter("ignore")
                file = reader[self._place(index)][0]
                with file, Image.open(file, formats=[name for name in _FORMATS if name in Image.OPEN]) as image:
                    sizes.append(image.size)
        return sizes

    def _name(self, index: int) -> str:
        if hasattr(self.source, "filename"):
            with contextlib.suppress(Exception):
                name = printable(self.source.filename(self._place(index)))
                return name if os.path.basename(str(self.spec)) == name else f"{name} of {self.spec}"
        return f"number {index} of {self.spec}"


class _StreamImages(Images):
    """A data set that can only be gone through, such as a WebDataset."""

    def __init__(self, spec: str, source: Any, transform: _Transform, classes: int, limit: int | None):
        self.source = source
        self.transform = transform
        self.classes = classes
        super().__init__(spec, total=None, limit=limit)
        first = next(self._raw(), None)
        if first is None:
            raise InputError(f"{spec} holds no images")
        self.split, self.notes = getattr(source, "split", None), list(getattr(source, "notes", []))
        self._look_at_label(first[1])

    @property
    def length(self) -> int | None:
        stated = len(self.source) or None
        return min(stated, self.limit) if stated and self.limit else self.limit or stated

    def _raw(self) -> Iterator[tuple[Any, Any]]:
        try:
            yield from islice(self.source, self.limit)
        except Exception as error:
            raise InputError(f"cannot read {self.spec}: {reason_of(error)}") from error

    def _items(self, only: Collection[int] | None) -> Iterator[tuple[int, Tensor, int | None]]:
        for index, (image, label) in enumerate(self._raw()):
            if only is None or index in only:
                where = f"number {index} of {self.spec}"
                yield index, self.transform(image), _checked(label, self.classes, where) if self.labelled else None


class _OneImage:
    """A single file, read as timm reads those of a folder, without a label."""

    def __init__(self, path: Path):
        self.path = path
        self.reader = self
        self.samples = [path]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.path.open("rb"), -1

    def filename(self, index: int) -> str:
        return self.path.name


def _open_path(spec: str, purpose: Purpose, count: int, classes: ClassList | None, labels: LabelList | None) -> Any:
    path, split = Path(spec), None
    if not os.path.exists(path):
        place, colon, name = spec.rpartition(":")
        if not (colon and os.path.exists(place)):
            meant = f"; torch/{spec} is a data set" if spec.lower() in names_of_torch() else ""
            kinds = ", ".join(f"{kind}/" for kind in KINDS)
            raise InputError(f"there is no folder or .tar file {spec}{meant}; data sets by name start with {kinds}")
        path, spec, split = Path(place), place, name
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return _OneImage(path)
    if path.is_file() and path.suffix.lower() != ".tar":
        unpack = "; unpack it" if any(path.name.lower().endswith(end) for end in _PACKED) else ""
        raise InputError(f"{spec} is neither an image nor a folder or a .tar of images{unpack}")
    if path.is_dir() and (tiny := TinyImageNet.of(path, purpose, split)) is not None:
        return tiny
    try:
        files = in_tar(path, spec) if path.is_file() else in_folder(path, spec)
    except InputError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise InputError(
            f"{spec} is no uncompressed tar file, or is damaged: {reason}; copy it again, or unpack it"
        ) from error
    if not files.images:
        archives = ", ".join(map(str, sorted(path.glob("*.tar"))[:3]))
        if archives:
            raise InputError(f"{spec} holds archives; give one of them: {archives}; or the shards as wds/{spec}")
        suffixes = ", ".join(sorted(SUFFIXES))
        others = f"; {files.others.total()} files of other formats" if files.others else ""
        raise InputError(f"{spec} holds no images ({suffixes}){others}")
    return ImageFiles(files, purpose, split, count, classes, labels)


def _class_names(source: Any) -> dict[str, int]:
    """The numbers of the classes by name, where the data set knows them all."""
    reader = getattr(source, "reader", source)
    for attribute in ("class_to_idx", "class_name_to_idx"):
        names = getattr(reader, attribute, None)
        if names:
            return dict(names)
    return {}


def order_of(count: int, limit: int | None) -> Sequence[int]:
    """Positions in a data set of ``count`` images in the order of a run: of a fixed shuffle where it has a limit."""
    if limit is None or limit >= count:
        return range(count)
    return _shuffled(count)[:limit]


def _shuffled(count: int) -> list[int]:
    order = list(range(count))
    random.Random(0).shuffle(order)
    return order


def _is_label(value: Any) -> bool:
    """Whether a target is a class number; timm and the hub's data sets write -1 where there is none."""
    try:
        return int(value) == value and value >= 0
    except (OverflowError, TypeError, ValueError, RuntimeError):
        return False


def _checked(label: Any, classes: int, where: str) -> int:
    if not _is_label(label) or int(label) >= classes:
        raise InputError(f"the image {where} has the label {label}, and the model has the classes 0 to {classes - 1}")
    return int(label)
