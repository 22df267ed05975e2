"""Images for a model: read by timm, cut to the model's input size, left in [0, 1], in a fixed order.

The normalisation that timm's pipelines end with is left out here: it is stage 0 of the certified network.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import importlib.util
import os
import random
import sys
import tarfile
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
from torchvision.datasets import SVHN
from torchvision.transforms import Compose, Normalize

from lipcert.errors import InputError, first_line, shortened
from lipcert.inputs.classes import LabelList, composed, number_by_name
from lipcert.inputs.files import KINDS, File, is_named_data, listing, place_of, printable
from lipcert.inputs.folders import SUFFIXES, Files, ImageFiles, Purpose, in_folder, in_tar
from lipcert.inputs.formats import told
from lipcert.inputs.loading import number_of_classes
from lipcert.inputs.preprocessing import RESIZING, preprocessing
from lipcert.inputs.timm_networks import is_network_error
from lipcert.model import Model, checked

BUNDLED = Path(__file__).parents[1] / "assets" / "digits.safetensors"

_MODES = {1: "L", 3: "RGB"}

# Formats that are decoded, whatever a file's name says. Pillow hands others, such as EPS, to programs of the system.
_FORMATS = ("BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
_KINDS = f"({', '.join(sorted(SUFFIXES))})"
# Resizing the shorter side of a longer strip to the model's input would take gigabytes.
_LONGEST = 1000
# The share of the resized image that is cut out; a tiny one asks for a resized image of gigabytes.
_LEAST_CROP = 0.1
# How many images are drawn to try a model without images of one's own; they have no meaningful labels.
SAMPLES = 8


@dataclass(frozen=True)
class Batch:
    """Consecutive images."""

    indices: tuple[int, ...]  # position of each image in the whole data set
    images: Tensor  # (N, C, H, W), float32 in [0, 1]
    labels: Tensor | None  # (N,), int64; None where the data set has none
    files: tuple[str | None, ...] = ()  # names relative to the data set; None for an image without, () where none has

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def hashes(self) -> list[str]:
        """The :func:`image_hash` of each image."""
        return [image_hash(image) for image in self.images]

    def split(self, count: int) -> tuple[Batch, Batch]:
        """The first ``count`` images, and the rest, which may be none."""
        return self._part(slice(None, count)), self._part(slice(count, None))

    def _part(self, of: slice) -> Batch:
        labels = None if self.labels is None else self.labels[of]
        return Batch(self.indices[of], self.images[of], labels, self.files[of])


def image_hash(image: Tensor) -> str:
    """Identifies an image: 32 hexadecimal digits of the SHA-256 of its shape and float32 pixels."""
    pixels = image.detach().cpu().float().contiguous().numpy().astype("<f4", copy=False)
    return hashlib.sha256(f"{pixels.shape}\n".encode() + pixels.tobytes()).hexdigest()[:32]


class Images(Dataset[tuple[Tensor, "int | None"]]):
    """The images of a data set that a run looks at, ready for the model.

    ``images[i]`` is the i-th of them, as ((C, H, W) float32 in [0, 1], label or None); ``batches`` goes through all.
    """

    stored = False  # whether they are stored as the network takes them, and not resized from files

    def __init__(self, spec: str | None, *, total: int, limit: int | None):
        self.spec = spec  # what the user called the data set; None for the bundled images
        self.limit = limit  # how many images the run looks at; None for all
        self.labelled = True  # whether the labels are known and belong to the model's classes
        self.note: str | None = None  # why labels were left out, in one line
        self.other_classes: int | None = None  # how many classes the data set has, if the model has another number
        self.notes: list[str] = []  # what was inferred about the images or left out, a line each
        self.split: str | None = None  # the split that was chosen; None where the user named it, or there is only one
        self.labels_by: str | None = None  # in words, what labels follow from; None for the data set itself
        self.lists: dict[str, str] = {}  # the files ``classes`` and ``labels`` that were given
        self.class_names: dict[int, str] = {}  # by number, as far as the data set or the model has them
        self.total = total  # images in the whole data set, with those of ``removed``
        self.kept_out: Collection[int] = ()  # positions of images that no run takes, see :meth:`keep_out`
        self.removed: list[int] = []  # positions of images that the data set had before, see :meth:`leave_out`
        self.shuffled = limit is not None and limit < total  # whether the order is that of runs, see :meth:`shuffle`
        self.order: Sequence[int] = ()  # positions in the whole data set
        self.leave_out(())

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> tuple[Tensor, int | None]:
        return self._read(self.order[i])

    def others(self, count: int) -> Batch | None:
        """Up to ``count`` images that the run leaves out: the last ones of its shuffle; None if there are none."""
        if self.limit is None or self.limit >= self.total:
            return None
        indices = [i for i in _shuffled(self.total)[self.limit :] if i not in self.removed][-count:]
        return self._batch(tuple(indices)) if indices else None

    def may_be_others(self, indices: Sequence[int]) -> bool:
        """Whether :meth:`others` gives these images for some limit and count: the last ones of the shuffle."""
        named, gone = {*indices}, {*self.removed} - {*indices}
        order = [i for i in _shuffled(self.total) if i not in gone]
        return named == {*order[-len(named) :]} and len(named) < len(order)

    def shuffle(self) -> None:
        """Puts the images in the order of a run, so that the images of a stopped run are a random sample."""
        self.shuffled = True
        self.leave_out(self.removed)

    def keep_out(self, chosen_on: Collection[int]) -> None:
        """Excludes the images at these positions, on which a choice was made; others take their places."""
        self.kept_out = frozenset(chosen_on)
        self.shuffle()

    def leave_out(self, removed: Sequence[int]) -> None:
        """Keeps the original numbering, on which noise and shuffle depend, although these images are gone."""
        self.total += len(removed) - len(self.removed)
        self.removed = sorted(removed)
        order = order_of(self.total, self.limit, self.kept_out) if self.shuffled else range(self.total)
        self.order = [index for index in order if index not in self.removed]

    def singly(self, wanted: Collection[int]) -> Iterator[Batch]:
        """These images one by one, whatever the limit; those that the data set does not have are left out."""
        for index in sorted({*wanted} - {*self.removed}):
            if index < self.total:
                yield self._batch((index,))

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
        """All images in order, or those of some indices, in batches of these sizes; the last one may be smaller."""
        wanted = (index for index in self.order if only is None or index in only)
        for count in repeat(size) if isinstance(size, int) else size:
            if not (indices := tuple(islice(wanted, count))):
                return
            yield self._batch(indices)

    def _batch(self, indices: tuple[int, ...]) -> Batch:
        """The images at these positions."""
        images, labels = zip(*map(self._read, indices), strict=True)
        files = tuple(map(self.file, indices))
        return Batch(indices, torch.stack(images), torch.tensor(labels) if self.labelled else None, files)

    def _read(self, index: int) -> tuple[Tensor, int | None]:
        raise NotImplementedError

    def _compare_classes(self, what: str, number: int, classes: int) -> None:
        """Labels are positions among the data set's classes: among more or fewer they would mean other classes."""
        if number != classes:
            self.labelled, self.other_classes = False, number
            self.note = f"{what} {number} classes and the model has {classes}: the labels are left out"


def open_images(
    spec: File | None,
    model: Model,
    *,
    limit: int | None = None,
    purpose: Purpose = "certify",
    classes: File | None = None,
    labels: File | None = None,
) -> Images:
    """Opens images and their labels for one model.

    Args:
        spec: a folder or ``.tar`` of images, whose first folders are classes, see :mod:`lipcert.inputs.folders`; or
            one image; or an ``.npz`` with the arrays ``image``, (N, H, W, C) or (N, H, W) of 8 bits, and ``label``; or
            a data set by name, ``torch/NAME`` such as ``torch/mnist``, ``torch/cifar10``, ``torch/cifar100`` or
            ``torch/svhn``, or ``hfds/NAME``, as timm reads them; or None for the bundled images, or, for a model of
            another input size, sample images without labels. Of several splits ``:SPLIT`` after it names one.
        model: its ``input_size`` and ``data_config`` say how images are resized and cropped. Classes are matched by
            name to its ``class_names``, where it has them.
        limit: the largest number of images: the first of a fixed shuffle, because folders are sorted by class.
        purpose: decides the split where none is named: to train, the training images; to certify, those for
            validation, else those for testing, else those for training; to calibrate, the training images, and to
            predict, all, both without labels.
        classes: a file that numbers the class folders or the names in ``labels``: one name per line, with or without
            its number, or JSON, or YAML.
        labels: a CSV file with the label of each file.

    Returns:
        The images, in an order that is the same in every run.

    Raises:
        InputError: a missing path, no images, a damaged file, an unavailable data set, or classes that are not
            the model's.
    """
    if limit is not None and limit < 1:
        raise InputError(f"the limit must be at least 1 image, got {limit}")
    spec, model = None if spec is None else os.fspath(spec), checked(model)
    if (is_named_data(spec) or _has_arrays(spec)) and (classes or labels):
        raise InputError("--classes and --labels are for folders and .tar files; this data set has its own")
    images = _StoredImages(model, limit) if spec is None else _ReadImages(spec, model, limit, purpose, classes, labels)
    given = {"classes": classes, "labels": labels}
    images.lists = {key: os.path.abspath(path) for key, path in given.items() if path is not None}
    if not images.class_names:
        images.class_names = {number: printable(name) for number, name in enumerate(model.class_names)}
    return images


class _Transform:
    """From a decoded image to the model's pixels: timm's evaluation transform without the normalisation."""

    def __init__(self, model: Model):
        channels, height, width = model.input_size
        if channels not in _MODES:
            raise InputError(f"the model takes {channels} channels, and files of images have 1 or 3; pass tensors")
        self.mode = _MODES[channels]
        config = preprocessing(model, files=True)
        options = {key: config[key] for key in RESIZING}
        mean = tuple(config["mean"])
        try:
            if not options["crop_pct"] >= _LEAST_CROP:
                raise ValueError(f"crop_pct is below {_LEAST_CROP}")
            steps = timm.data.create_transform((channels, height, width), is_training=False, mean=mean, **options)
        except Exception as error:
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise InputError(f"timm cannot resize images as configured ({given}): {first_line(error)}") from error
        self.steps = Compose([step for step in steps.transforms if not isinstance(step, Normalize)])

    def __call__(self, image: Image.Image) -> Tensor:
        if max(image.size) > _LONGEST * min(image.size):
            raise ValueError(f"it has {image.size[0]} × {image.size[1]} pixels, a strip of which a crop keeps little")
        pixels: Tensor = self.steps(_eight_bits(image).convert(self.mode))
        return pixels


def _eight_bits(image: Image.Image) -> Image.Image:
    """The image with grey values of 16 bits scaled to 8, where Pillow would cut them off at 255."""
    tags = getattr(image, "tag_v2", {})  # of a TIFF, in which Pillow leaves such values as they are stored
    if image.mode.startswith("I;16") and (tags.get(258, (16,))[0] < 16 or tags.get(262) == 0):
        raise ValueError("its grey values have 12 bits, or 0 for white; save it with 16 bits and 0 for black")
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
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
            remedy = "install lipcert again, or give images with --data"
            raise InputError(f"the bundled images cannot be read ({first_line(error)}); {remedy}") from error
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
        place = self._place(index)
        label = int(self.targets[place]) if self.labelled and self.targets is not None else None
        return self.images[place].float() / 255, label


def sample_images(channels: int, height: int, width: int, count: int = SAMPLES) -> Tensor:
    """Images with the spectrum of natural ones: noise whose amplitude falls with frequency, and a few flat shapes."""
    generator = torch.Generator().manual_seed(0)
    frequency = torch.fft.fftfreq(height)[:, None].square() + torch.fft.rfftfreq(width)[None].square()
    amplitude = (frequency + 1 / max(height, width) ** 2).rsqrt()
    noise = torch.randn(count, 1 + channels, height, width, generator=generator)
    noise = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(height, width))
    noise = noise / noise.std(dim=(2, 3), keepdim=True)
    images = noise[:, :1] + 0.4 * noise[:, 1:]
    rows, columns = torch.arange(height)[:, None] / height, torch.arange(width)[None] / width
    for image in images:
        for _ in range(4):
            y, x, size, angle, *colour = torch.rand(4 + channels, generator=generator).tolist()
            u = (rows - y) * (1 + angle) + (columns - x) * angle
            v = (columns - x) * (1 + angle) - (rows - y) * angle
            inside = torch.maximum(u.abs(), v.abs()) < 0.05 + 0.2 * size
            image[:, inside] = 0.5 * image[:, inside] + 2 * torch.tensor(colour)[:, None] - 1
    return (127.5 + 60 * images).clamp(0, 255).to(torch.uint8)


class _ReadImages(Images):
    """Files of images, or a data set of timm or torchvision."""

    def __init__(
        self, spec: str, model: Model, limit: int | None, purpose: Purpose, lists: File | None, labels: File | None
    ):
        self.classes = classes = number_of_classes(model)
        known = model.class_names if len(model.class_names) == classes else ()
        self.transform = _Transform(model)
        if is_named_data(spec):
            self.source = source = open_named(spec, purpose)
        elif _has_arrays(spec):
            self.source = source = _Arrays(spec)
        else:
            path, place, split = place_of(spec)
            label_list = None if labels is None else LabelList(labels)
            self.source = source = ImageFiles(_files_of(path, place), purpose, split, classes, known, lists, label_list)
        self.reader = getattr(source, "reader", None)
        self.numbers: dict[int, int] | None = None  # of classes of the data set among those that the model knows
        if not len(source):
            raise InputError(f"{spec} holds no images; name another split, or other data")
        super().__init__(spec, total=len(source), limit=limit)
        self.split = getattr(source, "split", None)
        if isinstance(source, ImageFiles):
            self.labels_by, self.notes = source.labels_by, source.notes
            self.labelled, self.class_names = source.targets is not None, source.class_names
            if source.classes is not None:
                self._compare_classes(f"{spec} has", source.classes, classes)
                self.note = f"{self.note}; --classes FILE numbers them" if self.note else None
            return
        label = self._decode(0)[1]
        names = getattr(self.reader or source, "class_to_idx", None) or {}
        self.class_names = {number: str(name) for name, number in names.items()}
        if names and known and {*map(composed, map(str, names))} & {*map(composed, known)}:
            numbers = number_by_name([*map(str, names)], known, spec, "the model's classes")
            self.numbers = {number: numbers[str(name)] for name, number in names.items()}
        elif names:
            self._compare_classes(f"{spec} has", len({*names.values()}), classes)
        if isinstance(label, float):
            raise InputError(f"{spec} has the label {label}, which is no class; give data with class numbers")
        elif not _is_label(label):
            self.labelled = False
            self.note = self.note or f"the labels of {spec} are no class numbers ({shortened(str(label))}): left out"

    @property
    def digest(self) -> str | None:
        if self.file(0) is None:
            return None
        names = [self.source.filename(index) for index in range(len(self.source))]
        return hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()

    def file(self, index: int) -> str | None:
        # Other readers have no names, or read the whole image to tell one.
        return printable(self.source.filename(self._place(index))) if hasattr(self.reader, "samples") else None

    def _read(self, index: int) -> tuple[Tensor, int | None]:
        image, label = self._decode(index)
        if not self.labelled:
            return image, None
        if self.numbers is not None and _is_label(label):
            label = self.numbers.get(int(label), -1)
        if not _is_label(label) or int(label) >= self.classes:
            remedy = (
                "number the classes with --classes FILE"
                if isinstance(self.source, ImageFiles)
                else "give a model of these classes"
            )
            raise InputError(
                f"the image {self._name(index)} has the label {label}, and the model has the classes 0 to "
                f"{self.classes - 1}; correct it, or {remedy}"
            )
        return image, int(label)

    def _decode(self, index: int) -> tuple[Tensor, Any]:
        # timm's own ImageDataset would replace an unreadable image by the next one, with that one's label.
        try:
            if self.reader is None:
                image, label = self.source[self._place(index)]
                return self.transform(image), label
            file, label = self.reader[self._place(index)][:2]
            with file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about metadata, palettes with transparency, and large images
                with _opened(file) as image:
                    return self.transform(image), label
        except Exception as error:
            reason = first_line(error)
            remedy = "resize it" if isinstance(error, Image.DecompressionBombError) else "repair or remove it"
            if isinstance(error, UnidentifiedImageError) and self.reader is not None:  # its text is a Python object
                reason = "it is damaged, or no image of a known format"
                with self.reader[self._place(index)][0] as file:
                    if known := told(file, self._name(index)):
                        raise InputError(known) from error
            remedy = "" if ";" in reason else f"; {remedy}"
            raise InputError(f"cannot read the image {self._name(index)}: {reason}{remedy}") from error

    def sizes(self, count: int) -> list[tuple[int, int]]:
        sizes: list[tuple[int, int]] = []
        turned = several = 0
        if self.reader is None:
            return sizes
        for index in self.order[:: max(1, len(self) // count)][:count]:
            with contextlib.suppress(Exception), warnings.catch_warnings():  # decoding it says what is wrong with it
                warnings.simplefilter("ignore")
                file = self.reader[self._place(index)][0]
                with file, _opened(file) as image:
                    sizes.append(image.size)
                    turned += image.format != "TIFF" and image.getexif().get(274, 1) != 1  # Pillow turns those of TIFF
                    several += image.format != "MPO" and getattr(image, "n_frames", 1) > 1  # a camera's has previews
        of_pages = "several pages or frames, of which the first is used"
        for number, what in ((turned, "an EXIF orientation, unused as in timm"), (several, of_pages)):
            note = f"{number} of {len(sizes)} sampled images have {what}"
            if number and note not in self.notes:
                self.notes.append(note)
        return sizes

    def _name(self, index: int) -> str:
        if hasattr(self.source, "filename"):
            with contextlib.suppress(Exception):
                name = printable(self.source.filename(self._place(index)))
                return name if os.path.basename(str(self.spec)) == name else f"{name} of {self.spec}"
        return f"number {index} of {self.spec}"


def _has_arrays(spec: str | None) -> bool:
    """Whether images and labels are the arrays of one file."""
    return spec is not None and spec.lower().endswith(".npz") and os.path.isfile(spec)


class _Arrays:
    """The images and labels of an ``.npz``."""

    def __init__(self, spec: str):
        try:
            with np.load(spec) as arrays:
                self.images, self.labels = arrays["image"], arrays["label"]
            if self.images.dtype != np.uint8 or self.images.ndim not in (3, 4) or self.labels.size != len(self):
                raise ValueError(
                    f"image is {self.images.dtype} of shape {self.images.shape}, label {self.labels.shape}"
                )
        except Exception as error:  # zipfile, zlib and NumPy have their own
            needed = "it needs the arrays image, (N, H, W, C) of uint8, and label, (N,)"
            raise InputError(f"{spec} cannot be read ({first_line(error)}); {needed}") from error

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        image = self.images[index]
        return Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image), self.labels.item(index)


def _opened(file: Any) -> Image.Image:
    """An image of one of the formats that are decoded."""
    Image.init()  # all formats: in a new process none is loaded yet
    return Image.open(file, formats=[name for name in _FORMATS if name in Image.OPEN])


def _files_of(path: Path, spec: str) -> Files:
    """The images of a folder, an archive, or a file that is one."""
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return Files(spec, lambda name: path.open("rb"), [path.name])
    if not path.is_dir() and path.suffix.lower() != ".tar":
        raise InputError(
            told(path, path) or f"{spec} is neither a folder or .tar of images nor an image {_KINDS}; give one of them"
        )
    try:
        files = in_folder(path, spec) if path.is_dir() else in_tar(path, spec)
    except (tarfile.TarError, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        if path.is_file() and (known := told(path, path)):
            raise InputError(known) from error
        damage = f"is no uncompressed tar file, or is damaged: {first_line(error)}"
        raise InputError(f"{spec} {damage}; copy it again, or unpack it") from error
    if not files.images:
        others = f", but other files: {listing(sorted(files.others))}" if files.others else ""
        remedy = "give a folder of images, or torch/NAME or hfds/NAME; arrays are given to lipcert.certify in Python"
        packed = "unpack the archives in it, or " if files.others.keys() & {".tar", ".gz", ".zip", ".tgz"} else ""
        raise InputError(f"{spec} holds no images {_KINDS}{others}; {packed}{remedy}")
    return files


def open_named(spec: str, purpose: Purpose = "certify") -> Any:
    """Opens a data set by name, such as ``torch/svhn:train``; downloads those of torchvision to torch.hub's folder."""
    name, _, split = spec.partition(":")
    kind = name.partition("/")[0].lower()
    package = "scipy" if name.lower() == "torch/svhn" else KINDS[kind]
    if package is not None and importlib.util.find_spec(package) is None:
        raise InputError(f"{name} needs the package {package}: pip install {package}")
    chosen, where = split or ("train" if purpose in ("train", "calibrate") else "validation"), ""
    options: dict[str, Any] = {"split": chosen}
    if kind == "torch":
        options |= {"root": os.path.join(torch.hub.get_dir(), "datasets"), "download": True}
        Path(options["root"]).mkdir(parents=True, exist_ok=True)
        where = f"put its files into {options['root']}; "
    try:
        with contextlib.redirect_stdout(sys.stderr):  # downloads report on standard output
            if name.lower() == "torch/svhn":  # timm does not open it
                options["split"] = "train" if chosen == "train" else "test"
                opened: Any = SVHN(**options)
            else:
                opened = timm.data.create_dataset(name, **options)
    except Exception as error:
        # torchvision tells of the mirrors it tried in a text alone.
        offline = is_network_error(error) or "urlopen error" in str(error)
        reason = "no network, or its server is unreachable" if offline else first_line(error)
        where = f"connect, or {where}" if offline and where else "" if "Unknown" in reason else where
        raise InputError(f"cannot open {spec}: {reason}; {where}a split is named as in {name}:SPLIT") from error
    if not split:
        with contextlib.suppress(AttributeError, TypeError):
            opened.split = chosen
    return opened


def order_of(count: int, limit: int | None, kept_out: Collection[int] = ()) -> list[int]:
    """Positions in a data set of ``count`` images in the order of a run: of a fixed shuffle, without some."""
    return [index for index in _shuffled(count) if index not in kept_out][:limit]


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
