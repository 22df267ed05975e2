"""Clean and attacked accuracy on CIFAR-10, and how far first-order bounds can reach."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import create_dataset
from torch import Tensor

import lipcert
from lipcert.attacks._found import project
from lipcert.inputs.data import Batch, Images

EPS = 36 / 255
BATCH = 128


def labels_of(batch: Batch) -> Tensor:
    """The classes of images, shape (N,); these measurements need them."""
    if batch.labels is None:
        raise SystemExit("the images have no labels of the model's classes; give a folder with class folders")
    return batch.labels


def read(folder: str, split: str) -> tuple[Tensor, Tensor]:
    """All images of ``split``.tar as uint8 (N, 3, 32, 32), and their classes."""
    dataset = create_dataset("", root=str(Path(folder) / f"{split}.tar"))
    images = np.stack([np.asarray(image.convert("RGB")) for image, _ in dataset])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.tensor([label for _, label in dataset])


def clean(model: lipcert.Model, images: Images) -> float:
    """Share of the images that are classified right."""
    right = seen = 0
    with torch.no_grad():
        for batch in images.batches(BATCH):
            right += int((model(batch.images).argmax(1) == labels_of(batch)).sum())
            seen += len(batch)
    return right / seen


def pgd(model: lipcert.Model, images: Tensor, labels: Tensor, steps: int = 100) -> Tensor:
    """Which images are right after as many steps of ε/4 along the gradient of the cross-entropy, as in CertViT's."""
    sizes = torch.full((len(images),), EPS)
    start = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    delta = project(EPS * F.normalize(start.flatten(1)).view_as(images), images, sizes)
    right = torch.ones(len(images), dtype=torch.bool)
    for _ in range(steps + 1):
        delta.requires_grad_()
        logits = model(images + delta)
        right &= logits.argmax(1) == labels
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), delta)
        ahead = F.normalize(gradient.flatten(1)).view_as(images)
        delta = project(delta.detach() + EPS / 4 * ahead, images, sizes)
    return right


def first_order_limit(model: lipcert.Model, images: Tensor, predicted: Tensor) -> Tensor:
    """min_j (f_y − f_j)/‖∇(f_y − f_j)‖, shape (N,): what the anchored radius tends to for small ε. An estimate."""
    images = images.clone().requires_grad_()
    logits = model(images)
    found = torch.full((len(images),), math.inf, dtype=torch.float64)
    for j in range(logits.shape[1]):
        margin = logits.gather(1, predicted[:, None])[:, 0] - logits[:, j]
        (gradient,) = torch.autograd.grad(margin.sum(), images, retain_graph=True)
        ratio = margin.detach() / gradient.flatten(1).norm(dim=1).clamp_min(1e-300)
        found = torch.where(predicted == j, found, torch.minimum(found, ratio))
    return found
