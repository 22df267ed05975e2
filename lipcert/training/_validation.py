"""The results of an epoch, a log of them, and validation that keeps the best weights."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open

from lipcert.certifier import Certifier, first_order_limit
from lipcert.errors import InputError
from lipcert.inputs.data import Batch
from lipcert.model import Model
from lipcert.settings import GLOBAL, FinetuneSettings
from lipcert.training._recipe import denoised


class Validation:
    """Held-out images, and the weights of the epoch with the best score on them.

    It measures ``clean``, the accuracy, or for the loss noise ``noisy``, the accuracy under the noise of training;
    ``certified``, the accuracy certified by gloro at ε, for the losses with the global bound; and for the other losses
    but ce, ``limit``: the share of images that are correctly classified and whose first-order limit is above ε, which
    estimates the anchored certificate from above. The last one is the score; where epochs are equal in it, as while
    nothing is certified, the first one counts.

    Args:
        model: the model in training.
        batch: images with labels.
        asked: the settings of the training.
        file: the best weights so far, which an interrupted run finds again.
    """

    def __init__(self, model: Model, batch: Batch, asked: FinetuneSettings, file: Path):
        if batch.labels is None:
            raise InputError("validation needs images with labels")
        self.model, self.asked, self.file, self.labels = model, asked, file, batch.labels
        self.smoothed = denoised(model, asked)
        noise = torch.randn(batch.images.shape, generator=torch.Generator().manual_seed(0)) * (asked.sigma or 0.0)
        self.images = batch.images + noise
        self.best, self.epoch = [-1.0], 0
        if file.exists():
            with safe_open(file, "pt") as content:
                recorded = content.metadata()
            self.best, self.epoch = json.loads(recorded["score"]), int(recorded["epoch"])

    def __call__(self, epoch: int, first: bool) -> dict[str, float]:
        """Measures the model after an epoch; the first process writes the weights if they are the best so far."""
        pixels = self.images.to(self.model.device, self.model.dtype)
        with torch.no_grad():
            predicted = torch.cat([self.smoothed(part).argmax(1).cpu() for part in pixels.split(64)])
        correct = predicted == self.labels
        figures = {"noisy" if self.asked.loss == "noise" else "clean": correct}
        if self.asked.loss in GLOBAL:
            figures["certified"] = correct & Certifier(self.model, self.asked.eps, "gloro").run(self.images).certified
        elif self.asked.loss not in ("noise", "ce"):
            limits = [
                first_order_limit(self.model, part, classes)
                for part, classes in zip(pixels.split(64), predicted.split(64), strict=True)
            ]
            figures["limit"] = correct & (torch.cat(limits) > self.asked.eps)
        shares = {name: right.double().mean().item() for name, right in figures.items()}
        ranks = [*shares.values()][::-1]
        if ranks > self.best:
            self.best, self.epoch = ranks, epoch
            if first:
                state = {name: value.contiguous() for name, value in self.model.state_dict().items()}
                safetensors.torch.save_file(state, self.file, {"score": json.dumps(self.best), "epoch": str(epoch)})
        return shares

    def restore(self) -> None:
        """Gives the model the best weights."""
        self.model.load_state_dict(safetensors.torch.load_file(self.file))


class Log:
    """The figures of every epoch, as a CSV file or, for a path without ``.csv``, as a TensorBoard folder.

    Raises:
        InputError: TensorBoard is not installed, or the path cannot be written.
    """

    def __init__(self, path: Path):
        self.path, self.board = path, None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".csv":
                path.open("a").close()
        except OSError as error:
            raise InputError(f"the log {path} cannot be written ({error.strerror}); give another path") from error
        if path.suffix != ".csv":
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                reason = f"the log {path} needs TensorBoard: pip install tensorboard, or name a .csv file"
                raise InputError(reason) from error
            self.board = SummaryWriter(str(path))

    def __call__(self, epoch: Epoch, figures: dict[str, float]) -> None:
        """Adds an epoch."""
        row: dict[str, Any] = {**asdict(epoch), **figures}
        if self.board is not None:
            for name, value in row.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, epoch.number)
            self.board.flush()
            return
        before: list[dict[str, Any]] = []
        if epoch.number > 1 and self.path.exists():
            with self.path.open(newline="") as file:
                before = [row for row in csv.DictReader(file) if int(row.get("number") or epoch.number) < epoch.number]
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys([*(before[0] if before else ()), *row]))
            writer.writeheader()
            writer.writerows([*before, row])


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch.

    Attributes:
        number: 1 for the first epoch.
        epochs: the number of epochs.
        loss: the mean loss of the images, with the weights at the time of each.
        accuracy: the fraction of images that were predicted correctly, with the weights at the time of each.
        eps: the ε of the last update.
        seconds: the duration of the epoch.
        bound: the certified Lipschitz constant of the features before the head (or √2 times that of the logits) after
            the last update; None for losses without the global bound.
        estimate: the estimate of this constant in the loss, which is not a bound.
        fitted: whether the head was fitted to this number of noisy draws of each image, in place of training.
    """

    number: int
    epochs: int
    loss: float
    accuracy: float
    eps: float
    seconds: float
    bound: float | None = None
    estimate: float | None = None
    fitted: bool = False
