"""Batches of images and labels that come from Python."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.model import Model, check_labels

EVERY = 5  # every fifth image is held out, unless held-out images are given
_BATCH = 32

Loader = Tensor | tuple[Tensor, Tensor] | Iterable[Any]


def batches(loader: Loader, model: Model, classes: int | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Checked images and their labels, int64 on the CPU, or None, from a tensor, a pair, or an iterable of such.

    Raises:
        InputError: a batch is something else, or its images or labels are not valid.
    """
    pair = isinstance(loader, (tuple, list)) and len(loader) == 2 and all(isinstance(x, Tensor) for x in loader)
    if isinstance(loader, Tensor) or pair and loader[1].dim() < 2:  # type: ignore[index]
        images, labels = _pair(loader, classes)
        starts = range(0, len(images), _BATCH)
        loader = [[x[start : start + _BATCH] for x in (images, labels) if x is not None] for start in starts]
    elif not isinstance(loader, Iterable):
        raise InputError(f"images come as a tensor, a list of batches or a DataLoader, got a {type(loader).__name__}")
    for batch in loader:
        images, labels = _pair(batch, classes)
        model.check_images(images)
        yield images, None if labels is None else labels.cpu().long()


def _pair(batch: Any, classes: int | None) -> tuple[Tensor, Tensor | None]:
    """A batch without labels, or with them."""
    pair = (batch, None) if isinstance(batch, Tensor) else batch
    if not isinstance(pair, (tuple, list)) or not 1 <= len(pair) <= 2 or not isinstance(pair[0], Tensor):
        raise InputError(f"a batch is an image tensor, or a pair of images and labels, got a {type(batch).__name__}")
    labels = pair[1] if len(pair) == 2 else None
    return pair[0], None if labels is None else check_labels(labels, len(pair[0]), classes)


@dataclass
class Share:
    """The images of a loader, or those that are held out of it, or the others; iterated several times.

    Attributes:
        count: number of images of the last complete pass.
        left_out: number of images of the loader that belong to the other share.
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
            raise InputError(
                "the images are read more than once, and this iterator gives them only once; "
                "pass a tensor, a list of batches or a DataLoader"
            )

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
