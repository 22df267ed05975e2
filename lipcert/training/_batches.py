"""Batches of a labelled data set for training: shuffled, cropped and flipped by timm, in [0, 1]."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import timm.data
import torch
from torch import Tensor
from torchvision.transforms import Compose, Normalize

from lipcert.data import Images
from lipcert.errors import InputError
from lipcert.model import Model

_CROP = (0.75, 1.0)


class Batches:
    """All images of a data set, once each time it is gone through.

    A data set with random access is shuffled anew each time; a stream comes in its own order.

    Args:
        images: the data set.
        model: its ``input_size`` is the size of the crops.
        size: images a batch; the last one may be smaller.
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
        self.augmentation = _augmentation(model) if augment else None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        random.seed(int(torch.randint(2**31, ()).item()))  # of timm's crops, so that one seed decides all
        for images, labels in self._plain():
            if self.augmentation is not None:
                images = torch.stack([self.augmentation(image) for image in images]).clamp(0, 1)
            yield images, labels
            if self.seen is not None:
                self.seen(len(labels))

    def _plain(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.images.order is None:
            for batch in self.images.batches(self.size):
                assert batch.labels is not None
                yield batch.images, batch.labels
            return
        for positions in torch.randperm(len(self.images)).split(self.size):
            items = [self.images[int(i)] for i in positions]
            yield torch.stack([image for image, _ in items]), torch.tensor([label for _, label in items])


def _augmentation(model: Model) -> Compose:
    """timm's training transform without the normalisation, which is a part of the model."""
    channels, height, width = model.input_size
    steps = timm.data.create_transform(
        (channels, height, width), is_training=True, scale=_CROP, color_jitter=0.0, hflip=0.5
    )
    return Compose([step for step in steps.transforms if not isinstance(step, Normalize)])
