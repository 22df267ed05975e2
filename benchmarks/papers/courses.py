"""What a network is after each epoch of its training: figures 2, 3, 6 and 7 of Local-Lip, and figure 2b of LiResNet.

BCP, with which Local-Lip compares, is not here; the loss of GloRo takes its place. Local bounds and shares of varying
units are estimates, as in the losses. Images are not moved or mirrored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import lipcert
from benchmarks.papers import trained
from benchmarks.papers.recipes import NO_DATA, Given, Table
from lipcert.inputs.data import open_images
from lipcert.training import LocalBound

Look = Callable[[lipcert.Model, Tensor, Tensor], dict[str, Any]]
_EPS = 36 / 255
_IMAGES, _BATCH, _EPOCHS, _LOOKED = 1000, 32, 3, 32  # at the scale small
_FULL = 50_000, 256, 200, 1000
_LOSSES = {"standard": ("ce", "relu"), "GloRo": ("gloro", "relu"), "Local-Lip-B": ("local-b", "clipped-relu")}
_SHOWN = {
    "figure 2": ("log10 bound", "local bound", "cross-entropy", "at the worst logits"),
    "figure 3": ("varying",),
    "figure 6": ("varying",),
    "figure 7": ("log10 of layers", "log10 bound", "local bound"),
}


def local_lip(table: Table, given: Given) -> Iterator[dict[str, Any]]:
    """Local-Lip's figures: 6C2F by three losses; figure 3 has the last epoch alone."""
    if given.data is None:
        yield {"needs": NO_DATA}
        return
    yield {**_numbers(given, "test"), "in place of BCP": "GloRo"}
    for name, (loss, act) in _LOSSES.items():
        if table.number == "figure 2" and loss == "ce":
            continue
        course = _epochs("lip_convnet_6c2f", {"act_layer": act}, {"loss": loss, "lr": 1e-3}, given, "test", _bounds)
        for one in course[-1:] if table.number == "figure 3" else course:
            yield {"name": f"{name}, epoch {one['epoch']}", **{key: one[key] for key in _SHOWN[table.number]}}


def threats(table: Table, given: Given) -> Iterator[dict[str, Any]]:
    """LiResNet's figure 2b: how many training images have another runner-up class than after the epoch before."""
    if given.data is not None:
        size = {"width": 16, "num_features": 128} if given.small else {}
        settings = {"loss": "trades", "optimizer": "muon", "lr": 1e-2, "ramp": (0.1, 2.0, 0.5)}
        yield _numbers(given, "train")
        course = _epochs("liresnet_l12w256", size, settings, given, "train", _second)
        for before, one in zip(course, course[1:], strict=False):
            changed = sum(a != b for a, b in zip(before["second"], one["second"], strict=True)) / len(one["second"])
            yield {"name": f"CIFAR-10, epoch {one['epoch']}", "runner-up changed": changed, "accuracy": one["accuracy"]}
    yield {"needs": f"{'' if given.data else NO_DATA + '; '}CIFAR-100 and Tiny-ImageNet for the other curves"}


def _numbers(given: Given, split: str) -> dict[str, int]:
    images, batch, epochs, looked = (_IMAGES, _BATCH, _EPOCHS, _LOOKED) if given.small else _FULL
    looked = images if split == "train" else looked
    return {"training images": images, "batch": batch, "epochs": epochs, f"{split} images looked at": looked}


def _epochs(
    name: str, arguments: dict[str, Any], settings: dict[str, Any], given: Given, split: str, look: Look
) -> list[dict[str, Any]]:
    """A training by :func:`lipcert.finetune`, and what ``look`` finds on images of a split after each epoch."""
    images, size, epochs, looked = _numbers(given, split).values()
    asked = {**arguments, **settings, "numbers": [images, size, epochs, looked]}
    note = trained.Kept(given.kept).figures([[name]], asked)
    if not note.exists():
        torch.manual_seed(0)
        model = lipcert.load(name, pretrained=False, **arguments)
        sources = dict(zip(("train", "test"), trained.splits("cifar10", {"cifar10": str(given.data)}), strict=True))
        batches = [(b.images, b.labels) for b in open_images(sources["train"], model, limit=images).batches(size)]
        seen = next(open_images(sources[split], model, limit=looked).batches(looked))
        assert seen.labels is not None
        shown, labels, found = seen.images, seen.labels, []

        def after(epoch: Any) -> None:
            with torch.no_grad():
                found.append({"epoch": epoch.number, "accuracy": epoch.accuracy, **look(model, shown, labels)})

        lipcert.finetune(model, batches, _EPS, epochs=epochs, progress=after, **settings)  # type: ignore[arg-type]
        note.write_text(json.dumps(found))
    course: list[dict[str, Any]] = json.loads(note.read_text())
    return course


def _bounds(model: lipcert.Model, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Global and local bounds, the cross-entropy, and the share of units of each layer that vary in the balls."""
    bound, local = lipcert.lipschitz(model), LocalBound(model)
    _, near = local.measured(images, _EPS)
    logits, worst, _ = local.worst(images, labels, _EPS, None)
    moving = local._walk(images, _EPS)[3]
    return {
        "log10 bound": bound.log10, "local bound": near, "cross-entropy": float(cross_entropy(logits, labels)),
        "at the worst logits": float(cross_entropy(worst, labels)),
        "varying": [round(float(units.mean()), 4) for units in moving],
        "log10 of layers": [round(layer.log10_gain, 4) for layer in bound.layers if _matrix(layer)],
    }  # fmt: skip


def _matrix(layer: Any) -> bool:
    return any(kind in layer.operation for kind in ("conv2d", "linear"))


def _second(model: lipcert.Model, images: Tensor, labels: Tensor) -> dict[str, Any]:
    return {"second": model(images).topk(2).indices[:, 1].tolist()}
