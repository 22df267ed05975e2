"""Random images in the shape of data sets that are not at hand, so that the commands of a table can be tried.

What is measured on them means nothing: ``--scale trial`` says so.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

# By name: side, channels and classes.
SHAPES = {
    "mnist": (28, 1, 10), "cifar10": (32, 3, 10), "svhn": (32, 3, 10), "cifar100": (32, 3, 100),
    "tinyimagenet": (64, 3, 200), "imagenet": (64, 3, 1000),
}  # fmt: skip


def stand_in(name: str, folder: Path) -> Path:
    """Writes one image of each class to ``train`` and to ``test``; returns the folder."""
    side, channels, classes = SHAPES[name]
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in range(classes):
            place = folder / name / split / f"{label:04}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (side, side, channels)[: 2 if channels == 1 else 3], dtype=np.uint8)
            Image.fromarray(pixels).save(place / "0.png")
    return folder / name
