"""Batches of images and labels that come from Python."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.model import Model, check_dense, check_labels

EVERY = 5  # every fifth image is held out, unless held-out images are given
_BATCH = 32

Loader = Tensor | tuple[Tensor, Tensor] | Iterable[Any]


def batches(loader: Loader, model: Model, classes: int | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Checked images and their labels, int64 on the CPU, or None, from a tensor, a pair, or an iterable of such."""
    arrays = (Tensor, np.ndarray)
    pair = isinstance(loader, (tuple, list)) and len(loader) == 2 and all(isinstance(x, arrays) for x in loader)
    if isinstance(loader, arrays) or pair and loader[1].ndim < 2:  # type: ignore[index]
        images, labels = pair_of(loader)
        starts = range(0, len(images), _BATCH)
        loader = [[x[start : start + _BATCH] for x in (images, labels) if x is not None] for start in starts]
    elif not isinstance(loader, Iterable):
        raise InputError(f"images come as a tensor, a list of batches or a DataLoader, got a {type(loader).__name__}")
    for batch in loader:
        images, labels = pair_of(batch)
        images = model.check_images(images)
        yield images, None if labels is None else check_labels(labels, len(images), classes).cpu()


def pair_of(batch: Any) -> tuple[Tensor, Tensor | None]:
    """The images of a batch that comes from Python, and its labels, int64, or None."""
    images, labels = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)
    images = images[0] if isinstance(images, (tuple, list)) and len(images) == 1 else images
    images = _native(images) if isinstance(images, np.ndarray) else images
    if not isinstance(images, Tensor):
        kind, hint = _kind(images)
        ways = "tensors (N, C, H, W), pairs of images and labels, or a DataLoader"
        raise InputError(f"images are {kind}; give {ways}{hint}")
    check_dense(images, "images")
    images = images.clone() if images.is_inference() else images
    if labels is None:
        return images, None
    try:
        given = labels.to_list() if hasattr(labels, "to_list") else labels  # of pandas, whose numbers are an index
        classes = torch.as_tensor(_native(given) if isinstance(given, np.ndarray) else given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"labels must be whole numbers, got a {type(labels).__name__}") from error
    if classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool:
        raise InputError(f"labels must be whole numbers, got {classes.dtype}")
    check_dense(classes, "labels")
    return images, classes.long().clone().reshape(classes.shape or (1,))


def _native(array: np.ndarray) -> Tensor:
    """The array as a tensor: torch takes neither negative strides nor another byte order."""
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError as error:
        raise InputError(f"an array is of {array.dtype}, which torch does not have; convert it by astype") from error


def _kind(images: Any) -> tuple[str, str]:
    """The kind of an object that does not hold images, and how to convert it if that is possible."""
    if hasattr(images, "getexif"):
        return "a PIL image", "; convert it by torchvision.transforms.functional.to_tensor"
    if isinstance(images, (str, os.PathLike)):
        return "a path", "; open it by lipcert.inputs.data.open_images(path, model).batches(32)"
    if isinstance(images, Mapping) and len(images) > 1:
        first, second = list(images)[:2]
        return "a dict", f"; give pairs of its entries: [(b[{first!r}], b[{second!r}]) for b in loader]"
    return f"of type {type(images).__name__}", ""


@dataclass
class Share:
    """The images of a loader, or those that are held out of it, or the others; iterated several times.

    After a complete pass ``count`` is the number of its images, and ``left_out`` that of the other share.
    """

    model: Model
    loader: Loader
    held_out: bool | None
    classes: int
    checksums: set[int] = field(default_factory=set)
    count: int = 0
    left_out: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.loader, Iterator):
            remedy = "pass a tensor, a list of batches or a DataLoader"
            raise InputError(f"the images are read more than once, and this iterator gives them only once; {remedy}")

    def __iter__(self) -> Iterator[Tensor]:
        for images, _ in self.pairs():
            yield images

    def pairs(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches of images on the device and in the dtype of the model, and their labels or None."""
        position = count = checksum = 0
        for images, labels in batches(self.loader, self.model, self.classes):
            places = torch.arange(position, position + len(images)) % EVERY == EVERY - 1
            position += len(images)
            if self.held_out is not None:
                content = images.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                checksum = zlib.crc32(content, checksum)
                mine = places if self.held_out else ~places
                images, labels = images[mine.to(images.device)], None if labels is None else labels[mine]
            if len(images):
                count += len(images)
                yield images.to(self.model.device, self.model.dtype), labels
        self.checksums.add(checksum)
        if len(self.checksums) > 1:
            raise InputError(
                "the loader gives other images, or another order, in each pass, so none can be held out; "
                "turn shuffling and augmentation off, or pass held_out= with other images"
            )
        self.count, self.left_out = count, position - count


def shares(model: Model, loader: Loader, held_out: Loader | None, classes: int) -> tuple[Share, Share]:
    """The calibration images and the held-out images: the given ones, or every fifth of the loader."""
    if held_out is not None:
        return Share(model, loader, None, classes), Share(model, held_out, None, classes)
    first = Share(model, loader, False, classes)
    return first, Share(model, loader, True, classes, first.checksums)
