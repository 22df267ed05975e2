"""The images of a run: checked, and divided into calibration and held-out images."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.model import Model

EVERY = 5  # every fifth image is held out, unless held-out images are given
_BATCH = 32
_ONE_STEP = 1 / 255  # images with less contrast count as one colour

Loader = Tensor | tuple[Tensor, Tensor] | Iterable[Any]
Share = Literal["all", "calibration", "held-out"]


@dataclass
class _Order:
    """Checks that every pass over a loader gives the same images in the same order."""

    checksum: int | None = None

    def check(self, checksum: int) -> None:
        if self.checksum not in (None, checksum):
            raise InputError(
                "the loader gives other images, or another order, in each pass, so none can be held out; "
                "turn shuffling and augmentation off, or pass held_out= with other images"
            )
        self.checksum = checksum


class CalibrationImages:
    """The images of a loader, or its calibration or held-out images; it can be iterated several times.

    Iterating yields batches of images on the device and in the dtype of the model.

    Attributes:
        count: the number of images of the last complete pass.
        left_out: the number of images of the loader that belong to the other share.
    """

    def __init__(self, model: Model, loader: Loader, share: Share, *, varied: bool, order: _Order):
        if not isinstance(loader, Iterable):
            raise InputError(
                f"images come as a tensor, a list of batches or a DataLoader, got a {type(loader).__name__}"
            )
        if isinstance(loader, Iterator):
            raise InputError(
                "the images are read more than once, and this iterator gives them only once; "
                "pass a tensor, a list of batches or a DataLoader"
            )
        self.model = model
        self.loader = loader
        self.share = share
        self.varied = varied
        self.order = order
        self.count = self.left_out = 0

    def __iter__(self) -> Iterator[Tensor]:
        for images, _ in self.pairs():
            yield images

    def pairs(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches of images and their labels, int64 on the CPU, or None without labels."""
        position = count = checksum = 0
        varied = not self.varied
        for images, labels in _batches(self.loader):
            self.model.check_images(images)
            places = torch.arange(position, position + len(images)) % EVERY == EVERY - 1
            position += len(images)
            if self.share != "all":
                checksum = zlib.crc32(_bytes(images), checksum)
                in_share = places if self.share == "held-out" else ~places
                images, labels = images[in_share.to(images.device)], None if labels is None else labels[in_share]
            if not len(images):
                continue
            count += len(images)
            varied = varied or bool((images.amax((2, 3)) - images.amin((2, 3)) > _ONE_STEP).any())
            yield images.to(self.model.device, self.model.dtype), labels
        if self.share != "all":
            self.order.check(checksum)
        if count and not varied:
            raise InputError(
                "every calibration image has only one colour, so the activations are not representative; "
                "pass images like those that the network was trained on"
            )
        self.count, self.left_out = count, position - count


def part(model: Model, loader: Loader, held_out: Loader | None) -> tuple[CalibrationImages, CalibrationImages]:
    """The calibration images and the held-out images: the given ones, or every fifth of the loader."""
    order = _Order()
    shares: tuple[Share, Share] = ("calibration", "held-out") if held_out is None else ("all", "all")
    return (
        CalibrationImages(model, loader, shares[0], varied=True, order=order),
        CalibrationImages(model, loader if held_out is None else held_out, shares[1], varied=False, order=order),
    )


def _batches(loader: Loader) -> Iterator[tuple[Tensor, Tensor | None]]:
    if not isinstance(loader, Tensor) and not _is_pair(loader):
        yield from map(_pair, loader)
        return
    images, labels = _pair(loader)
    for start in range(0, len(images), _BATCH):
        part = slice(start, start + _BATCH)
        yield images[part], None if labels is None else labels[part]


def _is_pair(loader: object) -> bool:
    """Whether this is a pair of images and labels, rather than two batches of images."""
    tensors = isinstance(loader, (tuple, list)) and all(isinstance(item, Tensor) for item in loader)
    return tensors and len(loader) == 2 and loader[1].dim() < 2  # type: ignore[arg-type, index]


def _pair(batch: object) -> tuple[Tensor, Tensor | None]:
    if isinstance(batch, Tensor):
        return batch, None
    if not isinstance(batch, (tuple, list)) or not 1 <= len(batch) <= 2 or not isinstance(batch[0], Tensor):
        raise InputError(f"a batch is an image tensor, or a pair of images and labels, got a {type(batch).__name__}")
    images, labels = batch[0], batch[1] if len(batch) == 2 else None
    if labels is None:
        return images, None
    if not isinstance(labels, Tensor) or labels.shape != images.shape[:1] or labels.is_floating_point():
        kind = f"{labels.dtype}, shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"labels must be whole numbers, one for each of the {len(images)} images, got {kind}")
    return images, labels.cpu().long()


def _bytes(images: Tensor) -> memoryview:
    return images.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
