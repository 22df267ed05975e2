"""Batches of a labelled data set for training: shuffled, cropped and flipped by timm, in [0, 1]."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from math import prod
from typing import cast

import timm.data
import torch
from torch import Tensor
from torchvision.transforms import Compose, Normalize

from lipcert._processes import Processes
from lipcert.data import Images
from lipcert.errors import InputError
from lipcert.model import Model

_CROP = (0.75, 1.0)
# A data set whose pixels take no more bytes is decoded once and kept.
_KEPT = 2**30


class Batches:
    """All images of a data set, once each time it is gone through.

    A data set with random access is shuffled anew each time; a stream comes in its own order. With torch.distributed
    initialised, each process gets its share of every batch. One number from torch's random generator decides the order
    and all crops, so the images are the same however many processes there are.

    ``len()`` is the number of batches.

    Args:
        images: the data set.
        model: its ``input_size`` is the size of the crops.
        size: images a batch, over all processes; the last one may be smaller.
        augment: crop at random, to at least three quarters of the area, and flip from left to right.
        seen: called after each batch that has been used, with its number of images.

    Raises:
        InputError: if there are no labels, or no images a batch.
    """

    def __init__(
        self, images: Images, model: Model, size: int, augment: bool = True, seen: Callable[[int], None] | None = None
    ):
        if not images.labelled:
            raise InputError(images.note or f"{images.spec} has no labels, and fine-tuning needs them")
        if size < 1:
            raise InputError(f"a batch has at least 1 image, got {size}")
        self.images = images
        self.size = size
        self.seen = seen
        self.none = torch.empty(0, *model.input_size)
        self.augmentation = _augmentation(model) if augment else None
        self.kept: dict[int, tuple[Tensor, int]] = {}
        self.keeps = images.order is not None and len(images.order) * prod(model.input_size) <= _KEPT

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        processes = Processes.connected()
        seed = processes.gather(int(torch.randint(2**31, ()).item()))[0]
        for count, places, images, labels in self._plain(seed, slice(processes.rank, None, processes.count)):
            if self.augmentation is not None and places:
                with _own_randomness():
                    images = torch.stack([self._augmented(*item, seed) for item in zip(images, places, strict=True)])
            yield images, labels
            if self.seen is not None:
                self.seen(count)

    def _plain(self, seed: int, part: slice) -> Iterator[tuple[int, list[int], Tensor, Tensor]]:
        """How many images a batch has, and of a part of it where they are, the images and the labels."""
        if self.images.order is None:
            for batch in self.images.batches(self.size):
                assert batch.labels is not None
                yield len(batch), list(batch.indices[part]), batch.images[part], batch.labels[part]
            return
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed))
        for positions in order.split(self.size):
            places = positions[part].tolist()
            items = [self._item(place) for place in places]
            images = torch.stack([image for image, _ in items]) if items else self.none
            yield len(positions), places, images, torch.tensor([label for _, label in items], dtype=torch.int64)

    def _item(self, place: int) -> tuple[Tensor, int]:
        """An image and its label; one of 8 bits is decoded once where all of them fit into memory."""
        if place in self.kept:
            pixels, label = self.kept[place]
            return pixels.float() / 255, label
        image, found = self.images[place]
        label = cast(int, found)
        if self.keeps:
            pixels = (image * 255).round().to(torch.uint8)
            if torch.equal(pixels.float() / 255, image):
                self.kept[place] = pixels, label
        return image, label

    def _augmented(self, image: Tensor, place: int, seed: int) -> Tensor:
        random.seed(seed << 32 | place)  # timm's crops take Python's generator, torchvision's flips torch's
        torch.default_generator.manual_seed(random.getrandbits(63))
        assert self.augmentation is not None
        return torch.as_tensor(self.augmentation(image)).clamp(0, 1)


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Leaves the random generators as they are, whatever is drawn meanwhile."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)


def _augmentation(model: Model) -> Compose:
    """timm's training transform without the normalisation, which is a part of the model."""
    channels, height, width = model.input_size
    steps = timm.data.create_transform(
        (channels, height, width), is_training=True, scale=_CROP, color_jitter=0.0, hflip=0.5
    )
    return Compose([step for step in steps.transforms if not isinstance(step, Normalize)])
