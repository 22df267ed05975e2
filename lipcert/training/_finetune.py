"""The training loop."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from lipcert._processes import Processes
from lipcert.artifact import weights_hash
from lipcert.bounds import check_weights
from lipcert.errors import InputError
from lipcert.loading import number_of_classes
from lipcert.model import Model
from lipcert.training import _checkpoint
from lipcert.training._gloro import TrainingBound
from lipcert.training._losses import anchored_loss, emma_loss, trades_loss, twice_differentiable
from lipcert.training._matrices import MaxNorm, NormHold, held_at, matrices
from lipcert.training._muon import Muon

Loss = Literal["anchored", "ce", "trades", "emma"]
Amp = Literal["bfloat16"]
OPTIMIZERS = ("adamw", "muon")
LOSSES: tuple[Loss, ...] = ("anchored", "ce", "trades", "emma")

_WEIGHT_DECAY = 1e-4
_WARMUP = 0.1
_CLIP = 3.0
_LARGEST = 1e30
_COOLING = 0.8  # share of a run over which the temperature changes
_STEPS = 10_000  # of the learning rate's schedule, whatever the number of updates


@dataclass(frozen=True)
class Epoch:
    """How an epoch went.

    Attributes:
        number: 1 for the first.
        epochs: how many there are.
        loss: its mean over the images, as they were seen.
        accuracy: share of them that were right at that moment.
        eps: the ε of its last update.
        seconds: time it took.
    """

    number: int
    epochs: int
    loss: float
    accuracy: float
    eps: float
    seconds: float


def finetune(
    model: Model,
    loader: Iterable[tuple[Tensor, Tensor]],
    eps: float = 36 / 255,
    *,
    loss: Loss = "anchored",
    epochs: int = 10,
    lr: float = 3e-4,
    temperature: float | tuple[float, float] = 1.0,
    max_norm: MaxNorm | None = None,
    optimizer: str = "adamw",
    ema: float | None = None,
    amp: Amp | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    origin: Mapping[str, str | float | None] | None = None,
    progress: Callable[[Epoch], None] | None = None,
) -> Model:
    """Trains a model, in place, for larger certified radii.

    The learning rate has a cosine schedule after a short warm-up. The network stays in evaluation mode throughout:
    dropout is off and the statistics of batch normalisation are fixed, so what is trained is the function that is
    certified.

    * ``"anchored"``: :func:`lipcert.training.anchored_loss`, for the anchored certificate; ε rises over the first
      third.
    * ``"ce"``: cross-entropy, which knows nothing of ε.
    * ``"trades"``: :func:`lipcert.training.trades_loss`, for the GloRo certificate; ε rises likewise.
    * ``"emma"``: :func:`lipcert.training.emma_loss`, for the GloRo certificate; ε rises from a tenth of its value to
      three times its value over the first half, as in the CIFAR-10 configuration of the authors' code
      (hukkai/liresnet).

    The last two use :class:`lipcert.training.TrainingBound`, made anew each epoch at the cost of one global analysis
    for each weight matrix.

    With torch.distributed initialised, each process gives its own share of every batch, which may be empty, and all
    train the same weights: the gradient is that of the mean over the images of all. The first process writes the
    checkpoint.

    Args:
        model: its weights are float32 or float64. On any error it holds the weights of the last finished epoch.
        loader: batches of images in [0, 1], shape (N, C, H, W), and their classes, shape (N,); such as a DataLoader or
            a list, since every epoch goes through it.
        eps: ε in ℓ2 on pixels.
        loss: one of the above.
        epochs: how often the loader is gone through.
        lr: the largest learning rate.
        temperature: divides the logits in the loss. Models of small norms have small margins and want a small one, 0.1
            to 0.25. Two numbers are the first and the last one; it goes from one to the other over four fifths of the
            run.
        max_norm: hold each weight matrix, and the scales of projections, at this spectral norm, or at different ones
            by patterns of their paths, see :class:`lipcert.training.NormHold`.
        optimizer: ``"adamw"`` or ``"muon"``, see :class:`lipcert.training.Muon`, which takes fewer epochs where norms
            are held, with a learning rate of 0.01 or so.
        ema: decay of the moving average of the weights, which the model then gets at the end; such as 0.999.
        amp: ``"bfloat16"`` runs the network's matrix products in this type; weights, losses and bounds stay as they
            are. Not with ``"anchored"``, whose second derivatives would be lost in it.
        checkpoint: a file that is written after each epoch, and from which the same call goes on where it was stopped;
            the state of torch's random generator is set to what it was then.
        origin: what the loader was made from, by name, such as the data set and the size of its batches. A checkpoint
            remembers it and is refused where it is another.
        progress: called after each epoch.

    Returns:
        The model, in evaluation mode, with one more step in its recipe.

    Raises:
        InputError: arguments, images or labels that cannot be used, a foreign checkpoint, a loss that is not finite,
            or another process that failed.
        UnsupportedOperation: with ``"trades"`` and ``"emma"``, operations without a rule.
    """
    check_settings(model, eps, loss, epochs, lr, temperature, max_norm, optimizer, ema, amp)
    path = None if checkpoint is None else Path(checkpoint)
    settings: dict[str, Any] = {
        "loss": loss, "eps": eps, "epochs": epochs, "lr": lr,
        "temperature": list(temperature) if isinstance(temperature, tuple) else temperature,
        "max_norm": dict(max_norm) if isinstance(max_norm, Mapping) else max_norm,
        "optimizer": optimizer, "ema": ema, "amp": amp,
    }  # fmt: skip
    mark = {**settings, "model": weights_hash(model), **(origin or {})}
    processes = Processes.connected()
    if any(other != mark for other in processes.gather(mark)):
        raise InputError("the processes of this run were given different models or settings")
    state = None
    with processes.together():
        if path is not None and processes.first:
            state = _checkpoint.read(path, mark)
    state = processes.gather(state)[0]
    model.eval()
    good = _copy(model.state_dict())
    try:
        run = _Run(model, loader, processes, **settings)
        if state is not None:
            run.restore(state)
            good = _copy(model.state_dict())
        while run.finished < epochs:
            done = run.epoch()
            good = _copy(model.state_dict())
            with processes.together():
                if path is not None and processes.first:
                    _checkpoint.write(path, mark, run.state())
            if progress is not None:
                progress(done)
    except BaseException:
        model.load_state_dict(good)
        raise
    run.optimizer.zero_grad()
    if run.average is not None:
        model.load_state_dict(run.average.module.state_dict())
    model.recipe.append({"step": "finetune", **settings})
    return model


@dataclass(frozen=True)
class _Seen:
    """Of one batch: the sum of the losses, how many images were right, and how many there were."""

    loss: float
    right: int
    images: int


class _Run:
    """What changes while a model is trained."""

    def __init__(
        self,
        model: Model,
        loader: Iterable[tuple[Tensor, Tensor]],
        processes: Processes,
        loss: Loss,
        eps: float,
        epochs: int,
        lr: float,
        temperature: float | list[float],
        max_norm: MaxNorm | None,
        optimizer: str,
        ema: float | None,
        amp: Amp | None,
    ):
        self.model = model
        self.loader = loader
        self.processes = processes
        self.loss = loss
        self.eps = eps
        self.epochs = epochs
        self.temperatures = temperature if isinstance(temperature, list) else [temperature, temperature]
        self.amp = amp
        self.classes = number_of_classes(model)
        self.hold = None if max_norm is None else NormHold(model, max_norm)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.AdamW
        if optimizer == "muon":
            self.optimizer = Muon(self.parameters, list(matrices(model)), lr)
        else:
            self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, weight_decay=_WEIGHT_DECAY)
        self.schedule = CosineLRScheduler(
            self.optimizer, _STEPS, warmup_t=int(_WARMUP * _STEPS), warmup_lr_init=lr / 25, lr_min=lr / 1e4
        )
        self.average = None if ema is None else ModelEmaV3(model, decay=ema, use_warmup=True)
        lengths = processes.gather(_length(loader))
        self.batches = None if None in lengths else max(lengths)
        self.finished = 0
        self.updates = 0

    def epoch(self) -> Epoch:
        """Goes through the loader once."""
        started = time.perf_counter()
        bound = TrainingBound(self.model) if self.loss in ("trades", "emma") else None
        source = self._checked()
        loss, right, images, batches = 0.0, 0, 0, 0
        last_eps = 0.0
        while True:
            within = min(batches / self.batches, 1.0) if self.batches else 0.5  # where that is not known, the middle
            done = (self.finished + within) / self.epochs
            eps = self.eps * _ramp(self.loss, done)
            first, last = self.temperatures
            self.temperature = first * (last / first) ** min(done / _COOLING, 1.0)
            self.schedule.step(int(done * _STEPS))
            seen = self._gradient(source, eps, bound)
            if seen is None:
                break
            batches += 1
            if seen.images:
                self._update()
                loss, right, images, last_eps = loss + seen.loss, right + seen.right, images + seen.images, eps
        if not images:
            raise InputError(
                f"the loader gave no images in epoch {self.finished + 1}; "
                "pass one that can be gone through several times, such as a DataLoader"
            )
        if not all(bool(torch.isfinite(p).all()) for p in self.parameters):
            raise self._diverged("a weight is not finite")
        self.batches = batches
        self.finished += 1
        return Epoch(self.finished, self.epochs, loss / images, right / images, last_eps, time.perf_counter() - started)

    def _gradient(
        self, source: Iterator[tuple[Tensor, Tensor]], eps: float, bound: TrainingBound | None
    ) -> _Seen | None:
        """Puts the gradient for the next batch into the parameters; None where no process has another batch."""
        self.optimizer.zero_grad()
        seen: _Seen | None = None
        with self.processes.together(), twice_differentiable():
            batch = next(source, None)
            if batch is not None:
                seen = self._backward(*batch, eps, bound)
        if self.processes.count > 1:
            seen = self._joined(seen)
        if seen is not None and not math.isfinite(seen.loss):
            raise self._diverged(f"the loss is {seen.loss}")
        return seen

    def _backward(self, images: Tensor, labels: Tensor, eps: float, bound: TrainingBound | None) -> _Seen:
        if not len(labels):
            return _Seen(0.0, 0, 0)
        loss, logits = self._forward(images, labels, eps, bound)
        try:
            loss.backward()
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            reason = str(error).splitlines()[0]
            raise InputError(f"the network cannot be differentiated twice ({reason}); use another loss") from error
        return _Seen(loss.item() * len(labels), int((logits.argmax(1) == labels).sum()), len(labels))

    def _joined(self, own: _Seen | None) -> _Seen | None:
        """What all processes have seen, with the gradient of the mean over all their images in the parameters."""
        share = own.images if own else 0
        found = self.processes.gather((own, [p.grad is not None for p in self.parameters]))
        batches = [seen for seen, _ in found if seen is not None]
        if not batches:
            return None
        images = sum(seen.images for seen in batches)
        if images:
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            whole = self.processes.add_up(torch.cat([part.flatten() for part in parts]) * (share / images))
            used = [any(users) for users in zip(*(users for _, users in found), strict=True)]
            for p, part, use in zip(self.parameters, whole.split([p.numel() for p in parts]), used, strict=True):
                p.grad = part.view_as(p) if use else None
        return _Seen(sum(seen.loss for seen in batches), sum(seen.right for seen in batches), images)

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, _CLIP)
        self.optimizer.step()
        if self.hold is not None:
            self.hold()
        self.updates += 1
        if self.average is not None:
            self.average.update(self.model, step=self.updates)

    def _forward(
        self, images: Tensor, labels: Tensor, eps: float, bound: TrainingBound | None
    ) -> tuple[Tensor, Tensor]:
        if self.loss == "anchored":
            return anchored_loss(self.model, images, labels, eps, self.temperature)
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=self.amp is not None):
            logits = self.model(images)
        logits = logits.to(self.model.dtype)
        scaled = logits / self.temperature
        if bound is None:
            return F.cross_entropy(scaled, labels), logits
        # f/T has the constants K/T
        if self.loss == "emma":
            constants = bound.margins(labels, self.classes) / self.temperature
            return emma_loss(scaled, labels, constants, eps), logits
        constants = bound.margins(logits.argmax(1), self.classes) / self.temperature
        return trades_loss(scaled, labels, constants, eps), logits

    def _diverged(self, what: str) -> InputError:
        return InputError(
            f"{what} in epoch {self.finished + 1}; what the epochs before it reached is kept, "
            "take a smaller learning rate"
        )

    def _checked(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.loader:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(b, Tensor) for b in batch):
                raise InputError("the loader must give pairs of tensors, images and their labels")
            images, labels = batch
            self.model.check_images(images)
            if labels.shape != images.shape[:1] or labels.is_floating_point():
                raise InputError(
                    f"labels must be whole numbers of shape ({len(images)},), "
                    f"got {labels.dtype} of {tuple(labels.shape)}"
                )
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
                raise InputError(
                    f"labels must be from 0 to {self.classes - 1}, got {int(labels.min())} to {int(labels.max())}"
                )
            yield images.to(self.model.device, self.model.dtype), labels.to(self.model.device).long()

    def state(self) -> dict[str, Any]:
        """All that an interrupted run needs to go on."""
        return {
            "weights": self.model.state_dict(),
            "average": None if self.average is None else self.average.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "vectors": [] if self.hold is None else self.hold.vectors,
            "random": torch.get_rng_state(),
            "finished": self.finished,
            "updates": self.updates,
            "batches": self.batches,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes back to what :meth:`state` said, in a run set up in the same way."""
        self.model.load_state_dict(state["weights"])
        if self.average is not None:
            self.average.module.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.hold is not None:
            for vector, saved in zip(self.hold.vectors, state["vectors"], strict=True):
                vector.copy_(saved)
        torch.set_rng_state(state["random"])
        self.finished, self.updates, self.batches = state["finished"], state["updates"], state["batches"]


def _length(loader: Iterable[object]) -> int | None:
    """Batches in an epoch; None where the loader does not say."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # of a stream
        return None


def _ramp(loss: Loss, done: float) -> float:
    """The factor of ε when the share ``done`` of the run is over."""
    return 0.1 + 2.9 * min(1.0, 2 * done) if loss == "emma" else min(1.0, 3 * done)


def _copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def check_settings(
    model: Model,
    eps: float,
    loss: str,
    epochs: int,
    lr: float,
    temperature: float | tuple[float, float],
    max_norm: MaxNorm | None,
    optimizer: str,
    ema: float | None,
    amp: str | None,
) -> None:
    """Refuses what :func:`finetune` cannot train with.

    Raises:
        InputError: saying which argument, or what about the model.
    """
    if not isinstance(model, Model):
        raise InputError("finetune takes a lipcert.Model; make one with lipcert.load")
    if loss not in LOSSES:
        raise InputError(f"there is no loss {loss!r}; choose one of {', '.join(LOSSES)}")
    if epochs < 1:
        raise InputError(f"epochs must be at least 1, got {epochs}")
    temperatures = temperature if isinstance(temperature, (tuple, list)) else (temperature, temperature)
    if len(temperatures) != 2:
        raise InputError(f"temperature is one number, or the first and the last one, got {temperature}")
    norms = max_norm.values() if isinstance(max_norm, Mapping) else [] if max_norm is None else [max_norm]
    positive = {"eps": [eps], "lr": [lr], "temperature": temperatures, "max_norm": norms}
    for name, values in positive.items():
        for value in values:
            if not 0 < value < _LARGEST:
                raise InputError(f"{name} must be a positive number below {_LARGEST:g}, got {value}")
    if max_norm is not None:
        held_at(model, max_norm)
    if optimizer not in OPTIMIZERS:
        raise InputError(f"there is no optimizer {optimizer!r}; choose {' or '.join(OPTIMIZERS)}")
    if ema is not None and not 0 < ema < 1:
        raise InputError(f"ema is a decay between 0 and 1, such as 0.999, got {ema}")
    if amp not in (None, "bfloat16"):
        raise InputError(f"amp is bfloat16 or left out, got {amp!r}")
    if amp is not None and loss == "anchored":
        raise InputError("the loss anchored needs second derivatives, which bfloat16 loses; leave amp out")
    if model.dtype not in (torch.float32, torch.float64):
        raise InputError(f"the weights are {model.dtype}; train them in float32: model.float()")
    check_weights(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("all parameters are frozen (requires_grad is False), so there is nothing to train")
