"""The training loop."""

from __future__ import annotations

import difflib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import astuple
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from timm.optim import Lookahead
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from lipcert.bounds import check_weights
from lipcert.certifier.anchored import cut_of
from lipcert.errors import InputError, LipcertError
from lipcert.inputs.artifact import check_rebuilds, weights_hash
from lipcert.inputs.batches import batches
from lipcert.inputs.classes import names_of
from lipcert.inputs.loading import number_of_classes
from lipcert.inputs.processes import Processes
from lipcert.model import Model, check_eps, checked, outside_inference_mode
from lipcert.settings import LOSSES, FinetuneSettings, takes
from lipcert.surgery import Orthogonal
from lipcert.training import _checkpoint
from lipcert.training._bound import TrainingBound
from lipcert.training._head import classifier, fit_head
from lipcert.training._local import LocalBound
from lipcert.training._losses import BY_NAME, teacher_loss, twice_differentiable
from lipcert.training._matrices import NormLimits, matrices, norm_limits
from lipcert.training._muon import Muon
from lipcert.training._recipe import denoised, settings_for
from lipcert.training._validation import Epoch

_WEIGHT_DECAY = 1e-4
_CLIP = 3.0
_DIVERGED = 1e6  # no weight of a network that learns is as large
_COOLING = 0.8  # the fraction of a run during which the temperature changes
_TIMES_MARGIN = (2.0, 0.2)  # the temperature auto over the median margin before training, at first and at last
_COUNTED = ("finished", "updates", "batches", "margin", "start")  # what a state holds of a run as it is
_PAUSE = 120.0  # seconds between checkpoints within an epoch


@takes(FinetuneSettings)
@outside_inference_mode
def finetune(
    model: Model | nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    eps: float = 36 / 255,
    *,
    recipe: str | None = None,
    teacher: Model | nn.Module | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    origin: Mapping[str, Any] | None = None,
    progress: Callable[[Epoch], bool | None] | None = None,
    until: float = math.inf,
    **settings: Any,
) -> Model:
    """Trains a model, in place, for larger certified radii.

    The learning rate follows a schedule after a short warm-up. The network stays in evaluation mode: dropout is off and
    the statistics of batch normalisation are fixed, so the trained function is the certified one. The losses are those
    of :mod:`lipcert.training`: :func:`lipcert.training.adversarial_loss` for ``"adversarial"`` and so on. ``"lmt"`` is
    ``"fixed"`` with one constant, ``"local-b"`` and ``"local-g"`` are :func:`lipcert.training.local_loss`, ``"ce"`` is
    the cross-entropy; it and ``"noise"`` do not use ε.

    The losses for GloRo and the global certificate use :class:`lipcert.training.TrainingBound`, an estimate with the
    current weights. After each epoch the bound is certified.

    With torch.distributed initialised, each process passes its own share of every batch, which may be empty. All
    processes train the same weights: the gradient is that of the mean loss over the images of all processes. The first
    process writes the checkpoint.

    Args:
        model: from :func:`lipcert.load`, or a module built by timm, with float32 or float64 weights. After an error it
            has the weights of the last complete epoch.
        loader: batches of images in [0, 1], shape (N, C, H, W), and their classes, shape (N,). Every epoch iterates
            over it, so it must be reusable, such as a DataLoader or a list.
        eps: ε in ℓ2 on pixels.
        recipe: ``"vit"``, ``"liresnet"``, ``"noise"`` or ``"cnn"``: settings for a kind of network, in place of the
            defaults (:data:`lipcert.settings.RECIPES`).
        teacher: a model of the same classes, whose predictions the model learns, too: ``teacher_weight`` times
            :func:`lipcert.training.teacher_loss` is added to the loss, for the model's logits as they are in it (noisy
            with ``"noise"``, and divided by the temperature). The teacher gets the images without noise, resized if its
            input has another size. The recipe records the hash of its weights.
        checkpoint: a file that is written after each epoch. The same call resumes from it after an interruption, with
            the state of torch's random generator at that time.
        origin: a description of the loader, such as the data set and the batch size, as values for JSON. The recipe
            records it, and a checkpoint with another description is refused.
        progress: called after each epoch, and again for the last finished epoch when a run resumes. Where it returns
            true after an epoch, training ends.
        until: the time, as ``time.time()``, after which training stops, by when the model has the weights of that time.
            With a checkpoint the same call continues. Batches of several processes differ in time, and so they stop
            after an epoch.
        **settings: the other fields of :class:`lipcert.training.FinetuneSettings`.

    Returns:
        The model, in evaluation mode, with one more step in its recipe.

    Raises:
        InputError: arguments, images or labels are not valid, the checkpoint belongs to another run, a loss is not
            finite, or another process failed.
        UnsupportedOperation: the loss uses the global bound, and operations have no rule.
    """
    model = checked(model)
    asked = settings_for(model, recipe, {"eps": eps, **settings})
    teacher = None if teacher is None else checked(teacher).eval()
    check_trainable(model, asked, teacher)
    model.class_names = names_of(loader, number_of_classes(model)) or model.class_names
    if model.presumed and model.source:
        try:
            check_rebuilds(model)
        except InputError as error:
            warnings.warn(f"the trained model cannot be saved as it is: {error}", stacklevel=2)
    path = None if checkpoint is None else Path(checkpoint)
    taught = {} if teacher is None else {"teacher": weights_hash(teacher)}
    mark = {**asked.described(), "model": weights_hash(model), "teacher": None, **taught, **(origin or {})}
    processes = Processes.connected()
    if any(other != mark for other in processes.gather(mark)):
        raise InputError("the processes of this run were given different models or settings; start them with the same")
    state = None
    with processes.together():
        if path is not None and processes.first:
            state = _checkpoint.read(path, mark)
    state = processes.gather(state)[0]
    model.eval()
    good = _copy(model.state_dict())
    frozen = _others(model, asked.only)
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        run = _Run(model, loader, processes, asked, teacher)
        if state is not None:
            run.restore(state)
            good = _copy(model.state_dict())
        seed = torch.initial_seed()  # the seed of the first start, which the state contains
        if run.last is not None and progress is not None:
            progress(run.last)  # an interruption may have come before it was reported

        def save() -> None:
            with processes.together():
                if path is not None and processes.first:
                    _checkpoint.write(path, mark, run.state())

        head = classifier(model)
        fitted = None
        alone = processes.count == 1 and head is not None and {*head.parameters()} == {*run.parameters}
        if asked.loss == "noise" and head is not None and alone:
            fitted = fit_head(head, run.checked, run.logits, run.noisy, asked.epochs)
        if fitted is not None and progress is not None:
            progress(fitted)
        while fitted is None and run.finished < asked.epochs:
            done = run.epoch(save, until) if processes.count == 1 else run.epoch()
            good = _copy(model.state_dict())
            save()
            ends = done is not None and progress is not None and progress(done)
            if any(processes.gather(ends or time.time() > until)):
                break
    except BaseException:
        model.load_state_dict(good)
        raise
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    run.optimizer.zero_grad()
    if run.average is not None:
        model.load_state_dict(run.average.module.state_dict())
    model.recipe.append({"step": "finetune", **asked.described(), "seed": seed, **taught, **(origin or {})})
    if fitted is not None:
        model.recipe[-1]["fitted"] = "head"
    elif run.finished < asked.epochs:
        model.recipe[-1]["stopped_after"] = run.finished
    return model


def check_trainable(model: Model, asked: FinetuneSettings, teacher: Model | None = None) -> None:
    """Checks that :func:`finetune` can train the model with these settings, and with this teacher."""
    check_eps(asked.eps, model)
    if asked.max_norm is not None:
        norm_limits(model, asked.max_norm)
    if model.dtype not in (torch.float32, torch.float64):
        raise InputError(f"the weights are {model.dtype}; train them in float32: model.float()")
    check_weights(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            "all parameters are frozen (requires_grad is False), so there is nothing to train; set it to True for some"
        )
    _others(model, asked.only)
    if teacher is None:
        return
    if teacher is model:
        raise InputError("the teacher is the model itself, which training changes; load it a second time")
    if teacher.input_size[0] != model.input_size[0]:
        raise InputError(
            f"the teacher takes images of {teacher.input_size[0]} channels and the model of {model.input_size[0]}"
        )
    of_teacher, of_model = number_of_classes(teacher), number_of_classes(model)
    if of_teacher != of_model:
        raise InputError(
            f"the teacher has {of_teacher} classes and the model {of_model}; "
            "fine-tune the teacher to these classes first"
        )


def _others(model: Model, only: str | None) -> list[nn.Parameter]:
    """The trainable parameters that ``only`` excludes."""
    if only is None:
        return []
    named = {name: parameter for name, parameter in model.net.named_parameters() if parameter.requires_grad}
    selected: set[nn.Parameter] = set()
    for pattern in (part.strip() for part in only.split(",")):
        own = {*getattr(classifier(model), "parameters", list)()} if pattern == "head" else set()
        matching = {
            parameter
            for name, parameter in named.items()
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") or parameter in own
        }
        if not matching:
            modules = [*dict.fromkeys(name.rpartition(".")[0] for name in named)]
            near = difflib.get_close_matches(pattern, modules, 4, 0.3) or modules[:4]
            raise InputError(
                f"only has {pattern!r}, and no parameter or module matches it; there are {', '.join(near)}; "
                "head is the classifier, whatever its name"
            )
        selected |= matching
    return [p for p in model.parameters() if p.requires_grad and p not in selected]


class _Sums(NamedTuple):
    """The sum of the losses of an update, and its numbers of correct predictions, images and batches."""

    loss: float
    right: int
    images: int
    batches: int = 1

    @staticmethod
    def of(parts: Iterable[_Sums]) -> _Sums:
        """The sums of all parts; zeros without any."""
        return _Sums(*map(sum, zip(*parts, (0.0, 0, 0, 0), strict=True)))


class _Run:
    """The state of a training run."""

    def __init__(
        self,
        model: Model,
        loader: Iterable[tuple[Tensor, Tensor]],
        processes: Processes,
        asked: FinetuneSettings,
        teacher: Model | None = None,
    ):
        self.model = model
        self.loader = loader
        self.processes = processes
        self.asked = asked
        self.teacher = teacher
        self.margin: float | None = None  # the median of the first update's images, for the temperature auto
        self.smoothed = denoised(model, asked)
        self.sums, self.start = _Sums(0.0, 0, 0, 0), torch.get_rng_state()
        self.last: Epoch | None = None
        self.classes = number_of_classes(model)
        if asked.channels_last:
            model.to(memory_format=torch.channels_last)
        weights = {matrix.parameter for matrix in matrices(model)} if asked.keep_zeros else set()
        self.zeros = [(p, p == 0) for p in weights if bool((p == 0).any())]
        self.orthogonal = [module for module in model.modules() if isinstance(module, Orthogonal)]
        self.limit_norms = None if asked.max_norm is None else NormLimits(model, asked.max_norm)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = self._optimizer()
        self.average = None if asked.ema is None else ModelEmaV3(model, decay=asked.ema, use_warmup=True)
        kind, steps = LOSSES[asked.loss].bound, asked.power_iterations
        cut = _cut(model) if kind == "cut" else None
        self.cut = None if cut is None else model.net.get_submodule(cut)
        used = kind in ("pairs", "constant", "cut")
        self.bound = TrainingBound(model, kind != "constant", cut, steps) if used else None
        self.local = LocalBound(model, steps, random=asked.vectors == "random") if kind == "local" else None
        self.mixture = 0.0
        lengths = processes.gather(_length(loader))
        self.batches = None if None in lengths else max(lengths)
        self.finished = 0
        self.updates = 0

    def _optimizer(self) -> torch.optim.Optimizer:
        lr = self.asked.lr
        if self.asked.optimizer == "muon":
            dtype = torch.bfloat16 if self.asked.amp else None
            return Muon(self.parameters, list(matrices(self.model)), lr, dtype=dtype)
        if self.asked.optimizer == "nadam":
            return Lookahead(torch.optim.NAdam(self.parameters, lr=lr))
        decay = 0.0 if self.asked.optimizer == "adam" else _WEIGHT_DECAY
        return torch.optim.AdamW(self.parameters, lr=lr, weight_decay=decay)

    def epoch(self, save: Callable[[], None] = lambda: None, until: float = math.inf) -> Epoch | None:
        """Trains on the batches that a restored state leaves of an epoch; None if the time is up before its end."""
        started = saved = time.perf_counter()
        restored, now = self.sums.batches, torch.get_rng_state()
        if restored:
            torch.set_rng_state(self.start)  # the loader draws the same order
        self.start = torch.get_rng_state()
        source = self.checked()
        if restored:
            for _ in islice(source, restored):
                pass
            torch.set_rng_state(now)
        last_eps = 0.0
        while True:
            within = min(self.sums.batches / self.batches, 1.0) if self.batches else 0.5  # the middle, if unknown
            self.done = (self.finished + within) / self.asked.epochs
            eps = self.asked.eps_at(self.done)
            self.mixture = self.asked.mixture_at(self.done)
            for group in self.optimizer.param_groups:
                group["lr"] = self.asked.lr_at(self.done)
            sums = self._gradient(source, eps)
            if sums is None:
                break
            self.sums = _Sums.of([self.sums, sums])
            if sums.images:
                self._update()
                last_eps = eps
            if time.time() > until:
                return None
            if time.perf_counter() - saved > _PAUSE:
                save()
                saved = time.perf_counter()
        loss, right, images, batches = self.sums
        if not images:
            raise InputError(
                f"the loader gave no images in epoch {self.finished + 1}; "
                "pass one that can be iterated several times, such as a DataLoader"
            )
        if not all(bool(torch.isfinite(p).all()) for p in self.parameters):
            raise self._diverged("a weight is not finite")
        self.batches, self.sums = batches, _Sums(0.0, 0, 0, 0)
        self.finished += 1
        bound, estimate = (
            (self._within_bounds(self.bound.certify), self.bound.features.item()) if self.bound else (None, None)
        )
        seconds = time.perf_counter() - started
        accuracy = right / images
        epochs = self.asked.epochs
        self.last = Epoch(self.finished, epochs, loss / images, accuracy, last_eps, seconds, bound, estimate)
        return self.last

    @property
    def temperature(self) -> float:
        """The temperature of the next update."""
        asked = self.asked.temperature
        if isinstance(asked, str):
            first, last = (times * cast(float, self.margin) for times in _TIMES_MARGIN)
        else:
            first, last = asked if isinstance(asked, (tuple, list)) else (asked, asked)
        return first * (last / first) ** min(self.done / _COOLING, 1.0)

    @torch.no_grad()
    def _margins(self, images: Tensor) -> list[float]:
        """The margins of a batch, within the limits on norms."""
        if self.limit_norms is not None:
            self.limit_norms()
        best = self.logits(images).topk(2, 1).values
        return (best[:, 0] - best[:, 1]).tolist()

    def _gradient(self, source: Iterator[tuple[Tensor, Tensor]], eps: float) -> _Sums | None:
        """Computes the gradient for the next update; None if no process has another batch."""
        self.optimizer.zero_grad()
        unknown = self.margin is None and isinstance(self.asked.temperature, str)
        with self.processes.together():
            batches = list(islice(source, self.asked.accumulate))
            margins = [margin for images, _ in batches if unknown and len(images) for margin in self._margins(images)]
        if unknown and (margins := sum(self.processes.gather(margins), [])):
            self.margin = max(torch.tensor(margins).median().item(), 1e-30)
        with self.processes.together(), twice_differentiable():
            if self.bound is not None:
                # Even without images, so that all processes have the same estimates.
                self._within_bounds(self.bound.step)
            total = max(sum(len(labels) for _, labels in batches), 1)
            parts = [self._backward(images, labels, eps, len(labels) / total) for images, labels in batches]
        sums = _Sums.of(parts) if parts else None
        if self.processes.count > 1:
            sums = self._joined(sums)
        if sums is not None and not math.isfinite(sums.loss):
            raise self._diverged(f"the loss is {sums.loss}")
        return sums

    def _backward(self, images: Tensor, labels: Tensor, eps: float, share: float) -> _Sums:
        if not len(labels):
            return _Sums(0.0, 0, 0)
        loss, logits = BY_NAME[self.asked.loss](self, images, labels, eps)
        if self.teacher is not None:
            student = logits if logits.requires_grad else self.logits(images)
            soft = teacher_loss(student / self.temperature, self._taught(images))
            loss = loss + self.asked.teacher_weight * soft
        try:
            (loss * share).backward(retain_graph=share < 1)  # the batches share the graph of the bound
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            reason = str(error).splitlines()[0]
            raise InputError(f"the network cannot be differentiated twice ({reason}); use another loss") from error
        return _Sums(loss.item() * len(labels), int((logits.argmax(1) == labels).sum()), len(labels))

    def _joined(self, of_process: _Sums | None) -> _Sums | None:
        """Sums the numbers of all processes, and sets the gradients to those of the mean loss over all images."""
        share = of_process.images if of_process else 0
        gathered = self.processes.gather((of_process, [p.grad is not None for p in self.parameters]))
        batches = [sums for sums, _ in gathered if sums is not None]
        if not batches:
            return None
        images = sum(sums.images for sums in batches)
        if images:
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            whole = self.processes.add_up(torch.cat([part.flatten() for part in parts]) * (share / images))
            used = [any(users) for users in zip(*(users for _, users in gathered), strict=True)]
            for p, part, use in zip(self.parameters, whole.split([p.numel() for p in parts]), used, strict=True):
                p.grad = part.view_as(p) if use else None
        return _Sums.of(batches)._replace(batches=max(sums.batches for sums in batches))

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, _CLIP)
        self.optimizer.step()
        for module in self.orthogonal:
            module.retract()
        if self.limit_norms is not None:
            self.limit_norms()
        with torch.no_grad():
            for parameter, zeros in self.zeros:
                parameter.masked_fill_(zeros, 0.0)
        self.updates += 1
        if self.average is not None:
            self.average.update(self.model, step=self.updates)

    def logits(self, images: Tensor) -> Tensor:
        """The logits of images, shape (N, classes)."""
        return self._logits_of(self.model, images)

    def denoised(self, images: Tensor) -> Tensor:
        """The logits of denoised images, or of the images if there is no denoiser."""
        return self._logits_of(self.smoothed, images)

    def noisy(self, images: Tensor) -> Tensor:
        """The same of images with noise."""
        return self.denoised(images + cast(float, self.asked.sigma) * torch.randn_like(images))

    def _logits_of(self, model: Model, images: Tensor) -> Tensor:
        if self.asked.channels_last:
            images = images.to(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=self.asked.amp is not None):
            logits: Tensor = model(images)
        return logits.to(self.model.dtype)

    @torch.no_grad()
    def _taught(self, images: Tensor) -> Tensor:
        """The teacher's logits of images of the model's size."""
        teacher = cast(Model, self.teacher)
        size = teacher.input_size[1:]
        if images.shape[2:] != size:
            images = F.interpolate(images, size, mode="bicubic", antialias=True).clamp(0, 1)
        return self._logits_of(teacher, images.to(teacher.device, teacher.dtype)).to(images.device)

    def _within_bounds(self, function: Callable[[], Any]) -> Any:
        """The result of a function of the bound, which fails in many ways for weights that have diverged."""
        try:
            return function()
        except LipcertError as error:
            if all(bool(p.abs().amax() < _DIVERGED) for p in self.parameters if p.numel()):
                raise
            raise self._diverged("the weights have left all bounds") from error

    def _diverged(self, what: str) -> InputError:
        return InputError(
            f"{what} in epoch {self.finished + 1}; the weights of the epoch before it are kept; "
            "use a smaller learning rate"
        )

    def checked(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the loader, which are checked, on the model's device."""
        for images, labels in batches(self.loader, self.model, self.classes):
            if labels is None:
                raise InputError("the loader must give pairs of tensors, images and their labels")
            yield images.to(self.model.device, self.model.dtype), labels.to(self.model.device)

    def state(self) -> dict[str, Any]:
        """The state from which an interrupted run can resume."""
        return {
            "weights": self.model.state_dict(),
            "average": None if self.average is None else self.average.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "vectors": [] if self.limit_norms is None else self.limit_norms.vectors,
            "bound": [] if self.bound is None else self.bound.estimator.vectors,
            "local": {} if self.local is None else self.local.vectors,
            "random": torch.get_rng_state(),
            **{name: getattr(self, name) for name in _COUNTED},
            "sums": tuple(self.sums),
            "last": None if self.last is None else astuple(self.last),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state of :meth:`state`, in a run with the same settings."""
        self.model.load_state_dict(state["weights"])
        if self.average is not None:
            self.average.module.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.limit_norms is not None:
            for vector, saved in zip(self.limit_norms.vectors, state["vectors"], strict=True):
                vector.copy_(saved)
        if self.bound is not None:
            self.bound.estimator.vectors = [vector.to(self.model.device) for vector in state["bound"]]
        if self.local is not None:
            self.local.vectors = {place: v.to(self.model.device) for place, v in state["local"].items()}
        torch.set_rng_state(state["random"])
        for name in _COUNTED:
            setattr(self, name, state[name])
        self.sums = _Sums(*state["sums"])
        self.last = None if state["last"] is None else Epoch(*state["last"])


def _cut(model: Model) -> str:
    """The module whose output is the value after which the anchored certificate starts."""
    cut = cut_of(model)
    if cut is None:
        raise InputError(
            "the loss cut is for networks that anchored certifies after a cut: a value after which all "
            "activations but the last are smooth, such as liresnet_l6w64; take the loss adversarial, or emma"
        )
    path = cut.path.removeprefix("net").removeprefix(".")
    if not path:
        raise InputError(
            f"the loss cut needs the output of a module, and the value to cut at is that of {cut.name} in "
            "the network's own forward code; make this activation a module"
        )
    return path


def _length(loader: Iterable[object]) -> int | None:
    """The number of batches per epoch; None if the loader does not know it."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a stream
        return None


def _copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}
