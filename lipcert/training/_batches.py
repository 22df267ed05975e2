"""Batches of a labelled data set for training: pixels in [0, 1], shuffled, cropped and flipped by timm."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from math import prod
from typing import Any, cast

import timm.data
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import Compose, Normalize, ToPILImage

from lipcert.errors import InputError
from lipcert.inputs.data import Images
from lipcert.inputs.processes import Processes
from lipcert.model import Model

_CROP = (0.75, 1.0)
# A data set with at most this many bytes of pixels is decoded once and kept in memory.
_CACHED_BYTES = 2**30


class Batches:
    """All images of a data set once per iteration, shuffled; ``len()`` is the number of batches.

    With torch.distributed initialised, each process gets its share of every batch. One number from torch's random
    generator determines the order and all crops, so the images do not depend on the number of processes.
    """

    def __init__(
        self,
        images: Images,
        model: Model,
        size: int,
        augment: bool | Augmentation = True,
        seen: Callable[[int], None] | None = None,
    ):
        if not images.labelled:
            note = images.note or f"{images.spec} has no labels, and fine-tuning needs them"
            if images.other_classes and model.source:
                again = f"converting {model.source['name']} again with " if model.recipe else ""
                note += f", and {again}--model-args num_classes={images.other_classes} makes a head for them"
            raise InputError(note)
        if size < 1:
            raise InputError(f"a batch needs at least 1 image, got {size}")
        self.images = images
        self.size = size
        self.seen = seen
        self.none = torch.empty(0, *model.input_size)
        chosen = Augmentation() if augment is True else augment or Augmentation("none")
        self.augmentation = chosen.transform(model)
        self.most = {"shift": min(model.input_size[1:]) // 8, "flip": 0}.get(chosen.crop)
        self.cache: dict[int, tuple[Tensor, int]] = {}
        self.caches = len(images) * prod(model.input_size) <= _CACHED_BYTES

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        processes = Processes.connected()
        seed = processes.gather(int(torch.randint(2**31, ()).item()))[0]
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed))
        for positions in order.split(self.size):
            places = positions[processes.rank :: processes.count].tolist()
            items = [self._item(place) for place in places]
            images = torch.stack([image for image, _ in items]) if items else self.none
            if self.most is not None and places:
                images = _shifted(images, torch.tensor(places), self.most, seed)
            if self.augmentation is not None and places:
                with _restoring_randomness():
                    images = torch.stack([self._augmented(*item, seed) for item in zip(images, places, strict=True)])
            yield images, torch.tensor([label for _, label in items], dtype=torch.int64)
            if self.seen is not None:
                self.seen(len(positions))

    def _item(self, place: int) -> tuple[Tensor, int]:
        """An image and its label; 8-bit images are decoded once if the data set fits into memory."""
        if place in self.cache:
            pixels, label = self.cache[place]
            return pixels.float() / 255, label
        image, class_of_item = self.images[place]
        label = cast(int, class_of_item)
        if self.caches:
            pixels = (image * 255).round().to(torch.uint8)
            if torch.equal(pixels.float() / 255, image):
                self.cache[place] = pixels, label
        return image, label

    def _augmented(self, image: Tensor, place: int, seed: int) -> Tensor:
        random.seed(seed << 32 | place)  # timm's crops use Python's generator, torchvision's flips torch's
        torch.default_generator.manual_seed(random.getrandbits(63))
        assert self.augmentation is not None
        return torch.as_tensor(self.augmentation(image)).clamp(0, 1)


class Mixed:
    """Batches of a data set, once per iteration, each joined with one of a second data set, which is repeated."""

    def __init__(self, main: Batches, other: Batches):
        if not len(other.images):
            raise InputError(f"{other.images.spec} has no images to mix in; give others, or leave it out")
        self.main = main
        self.other = other
        self.images = main.images

    def __len__(self) -> int:
        return len(self.main)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        others = chain.from_iterable(iter(self.other) for _ in count())
        for (images, labels), (more, theirs) in zip(self.main, others, strict=False):
            yield torch.cat([images, more]), torch.cat([labels, theirs])


@contextlib.contextmanager
def _restoring_randomness() -> Iterator[None]:
    """Restores the state of the random generators afterwards."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)


def _shifted(images: Tensor, places: Tensor, most: int, seed: int) -> Tensor:
    """Shifts images by up to ``most`` pixels in each direction, over black, and mirrors half of them."""
    drawn = torch.rand(int(places.max()) + 1, 3, generator=torch.Generator().manual_seed(seed))[places]
    down, right = (drawn[:, :2] * (2 * most + 1)).long().unbind(1)
    height, width = images.shape[2:]
    rows = down[:, None] + torch.arange(height)
    columns = torch.arange(width).expand(len(images), -1)
    columns = torch.where(drawn[:, 2:] < 0.5, columns, width - 1 - columns) + right[:, None]
    padded = F.pad(images, (most,) * 4)
    n, c = torch.arange(len(images))[:, None, None, None], torch.arange(images.shape[1])[None, :, None, None]
    return padded[n, c, rows[:, None, :, None], columns[:, None, None, :]]


@dataclass(frozen=True)
class Augmentation:
    """The random changes of training images.

    Attributes:
        crop: ``"resized"``: timm's random crop to at least three quarters of the area, and a flip; ``"shift"``: a shift
            by up to an eighth of the side, filled with black, and a flip; ``"flip"``: the flip alone; ``"none"``.
        randaugment: the policy of timm's RandAugment, such as ``"rand-m9-n2"``.
        cutout: the share of the images in which timm's random erasing blackens a rectangle.

    Raises:
        InputError: a value is not valid.
    """

    crop: str = "resized"
    randaugment: str | None = None
    cutout: float = 0.0

    def __post_init__(self) -> None:
        if self.crop not in ("resized", "shift", "flip", "none"):
            raise InputError(f"there is no crop {self.crop!r}; choose resized, shift, flip or none")
        if not 0 <= self.cutout <= 1:
            raise InputError(f"cutout is a share of the images from 0 to 1, got {self.cutout}")
        if self.randaugment is not None and not self.randaugment.startswith("rand-"):
            raise InputError(f"randaugment is a policy of timm such as rand-m9-n2, got {self.randaugment!r}")

    def transform(self, model: Model) -> Compose | None:
        """The changes of one image, without the shift and without the normalisation, which is part of the model."""
        if self.crop != "resized" and not self.randaugment and not self.cutout:
            return None
        channels, height, width = model.input_size
        resized: dict[str, Any] = {"scale": _CROP, "hflip": 0.5}
        crop = resized if self.crop == "resized" else {"train_crop_mode": "rkrc", "hflip": 0.0}
        steps = timm.data.create_transform(
            (channels, height, width), is_training=True, color_jitter=0.0, auto_augment=self.randaugment,
            re_prob=self.cutout, re_mode="const", mean=(0.5,) * channels, **crop,
        )  # fmt: skip
        main = [ToPILImage()] if self.randaugment else []
        return Compose([*main, *(step for step in steps.transforms if not isinstance(step, Normalize))])
