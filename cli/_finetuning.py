"""Runs ``lipcert finetune``, after its options are checked."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor

from lipcert.errors import InputError, Interrupted, LoadError, counted
from lipcert.inputs.artifact import save, weights_hash
from lipcert.inputs.data import Batch, Images, open_images
from lipcert.inputs.files import reserve
from lipcert.inputs.processes import Processes
from lipcert.model import Model
from lipcert.results import share
from lipcert.settings import RECIPES, FinetuneSettings, eps_text
from lipcert.smoothing import from_lattice, noise
from lipcert.training import (
    Augmentation,
    Batches,
    Epoch,
    Mixed,
    Validation,
    check_trainable,
    denoised,
    recipe_for,
    settings_for,
)
from lipcert.training import finetune as train

from ._advice import TEN_MINUTES, Advice, advise
from ._finetune import Plan, TrainingImages
from ._loading import load_model, output, show_preprocessing, status_of, torchrun
from ._options import ModelOptions
from ._print import busy, command, print_facts, print_json, progress, say, words_of

_EVALUATED = 64
_SHOWN = 2000  # the number of images on which accuracy is measured, in at most as many seconds
_SECONDS = 10.0
_HELD_OUT = 50, 500  # the least and the most images that are held out by default


def _augmentation(of: TrainingImages) -> Augmentation:
    return Augmentation(of.crop, of.randaugment, of.cutout) if of.augment else Augmentation("none")


def _batches(of: TrainingImages, images: Images, model: Model, count: Callable[[int], None]) -> Batches | Mixed:
    """The batches of an epoch; ``count`` is called with the number of images after each batch."""
    others = 0 if of.mix is None else round(of.batch_size * (of.mix_ratio or 0.0))
    first = Batches(images, model, of.batch_size - others, _augmentation(of), count)
    if of.mix is None:
        return first
    return Mixed(first, Batches(open_images(of.mix, model, purpose="train"), model, others, _augmentation(of)))


def run(plan: Plan) -> None:
    """Trains the model and writes it to a file."""
    _augmentation(TrainingImages(**plan.images))  # checks its settings before the model is read
    with torchrun() as processes, ExitStack() as stack:
        Training(plan, processes, stack)()


class Training:
    """One run of the command: the model, its images, the files that it writes, and its messages."""

    def __init__(self, plan: Plan, processes: Processes, stack: ExitStack):
        self.plan, self.processes = plan, processes
        self.model = load_model(plan.source, plan.of_model, new_head=True)
        self.recipe, self.reason = plan.recipe, "asked for"
        if plan.recipe is None and not {"loss", "sigma"} & plan.given.keys():
            self.recipe, self.reason = recipe_for(self.model)
        self.asked = settings_for(self.model, self.recipe, plan.given)
        self.of = TrainingImages(**{**(RECIPES[self.recipe].images if self.recipe else {}), **plan.images})
        teacher, of_model = plan.teacher, plan.of_model
        try:
            self.teacher = None if teacher is None else load_model(teacher, ModelOptions(device=of_model.device))
        except LoadError as error:  # whose remedy would be for options of the teacher
            reason = str(error).partition(";")[0]
            raise LoadError(f"{reason}; --teacher takes a timm name, or a file that lipcert convert wrote") from error
        hashed = None if self.teacher is None else weights_hash(self.teacher)
        described = {**self.asked.described(), **asdict(self.of), "teacher": hashed}
        self.path = output(
            plan.out, f"{plan.source.stem}.finetuned", plan.source, of_model.files, self.model, "finetune", plan.force,
            described,
        )  # fmt: skip
        self.unfinished, self.best = (
            self.path.with_name(f"{self.path.name}.{kind}") for kind in ("checkpoint", "best")
        )
        if processes.first:
            reserve(self.unfinished, stack)
        check_trainable(self.model, self.asked, self.teacher)
        self.images = self._open(self.of.limit)
        self.fits_head = (self.asked.loss, self.asked.only) == ("noise", "head")
        self.validation = self._validation()
        self.measured: list[str] = []  # what the held-out images were measured by
        self.least: list[float] = []  # the first share of them by the last of these
        self.ended = ""  # why training ended before its time
        self.done, self.total = 0, len(self.images) * self.asked.epochs

    def _open(self, limit: int | None) -> Images:
        return open_images(self.of.data, self.model, limit=limit, purpose="train", classes=self.plan.classes)

    def _validation(self) -> Validation | None:
        """Holds out images and measures the network on them, if there are any."""
        count, tenth = self.plan.validate or 0, len(self.images) // 10
        if self.plan.validate is None and self.asked.ema is None and not self.fits_head and tenth >= _HELD_OUT[0]:
            count = min(tenth, _HELD_OUT[1])
        if not count:
            return None
        if len(self.images) <= count:
            raise InputError(f"--validate {count} leaves no images for training; give fewer")
        self.images = self._open(len(self.images) - count)
        if not self.unfinished.exists():  # weights of another training
            self.best.unlink(missing_ok=True)
        return Validation(self.model, cast(Batch, self.images.others(count)), self.asked, self.best)

    def __call__(self) -> None:
        """Trains the network and writes it; prints the result."""
        epochs = self.asked.epochs
        begin, first = counted(epochs, "epoch"), f"epoch 1 of {epochs}"
        if self.fits_head:
            begin, first = "the head is fitted", "fitting the head to noisy images"
        sample = self._open(min(self.of.limit or _SHOWN, _SHOWN))
        sample.shuffle()  # folders are sorted by class, and the time may end early
        with progress(f"measuring accuracy before {begin}", self.total) as self.update:
            batches = _batches(self.of, self.images, self.model, self._count)
            self.before = self._accuracy(sample, _SECONDS)
            self.update(0, self.total, first)
            self._train(batches)
        stopped = self.model.recipe[-1].get("stopped_after")
        if self.ended:
            say(f"note: {self.ended}")
        elif stopped is not None:
            say(f"time: stopped after {stopped} whole epochs of {epochs}; rerun the command to continue")
        if self.validation is not None and self.validation.epoch:
            self.validation.restore()
        with progress("measuring accuracy") as self.update:
            sample.limit = self.before[1]  # the same images
            sample.shuffle()
            after = self._accuracy(sample)
        facts: dict[str, Any] = {"loss": self.asked.loss, "eps": self.asked.eps, "epochs": epochs}
        facts |= {"images": len(self.images), **({} if self.images.split is None else {"split": self.images.split})}
        if self.processes.first:
            with busy(f"writing {self.path}"):
                save(self.model, self.path, facts=facts, force=self.plan.force)
            if stopped is None or self.ended:
                self._forget()
        if self.plan.as_json:
            accuracy = {"before": self.before[0] / self.before[1], "after": after[0] / after[1]}
            what = "accuracy_under_noise" if self.asked.sigma else "clean_accuracy"
            print_json({"written": str(self.path), **facts, f"{what}_on_training_images": accuracy})
        else:
            self._print(after)

    def _train(self, batches: Batches | Mixed) -> None:
        held_out = {} if self.validation is None else {"validate": len(self.validation.labels)}
        try:
            train(
                self.model,
                batches,
                teacher=self.teacher,
                origin={**asdict(self.of), "image_list": self.images.digest, **held_out},
                checkpoint=self.unfinished,
                progress=self._finished,
                until=self.plan.until,
                **vars(self.asked),
            )
        except KeyboardInterrupt as error:
            left = self.unfinished
            outcome = f"rerun to continue from {left}" if left.exists() else "no epoch was finished"
            raise Interrupted(f"interrupted; {outcome}") from error

    def _forget(self) -> None:
        """Removes the files of an unfinished training."""
        for file in (self.unfinished, self.best):
            file.unlink(missing_ok=True)

    def _count(self, more: int) -> None:
        """Counts the images of a batch; at the first, training has begun, so all settings are valid."""
        if not self.done:
            if self.recipe:
                unused = {"lr"} if self.fits_head else set()
                chosen = _chosen(self.recipe, self.asked, {*self.plan.given, *unused})
                say(f"recipe: {self.recipe} ({self.reason}); {chosen}")
            show_preprocessing(self.images, self.model)
        self.done += more
        self.update(self.done, self.total)

    def _finished(self, epoch: Epoch) -> bool:
        """Measures and prints an epoch; returns whether training ends, as nothing shows that the network learns."""
        self.done = self.done or epoch.number * len(self.images)  # resumed
        figures = {}
        if self.validation is not None:
            self.update(self.done, self.total, f"validating epoch {epoch.number}")
            figures = self.validation(epoch.number, self.processes.first)
        self.measured[:] = figures
        _say_epoch(epoch, figures)
        self.least = self.least or [*figures.values()][-1:]
        rises = len(figures) > 1 and [*figures.values()][-1:] > self.least
        before = self.before[0] / self.before[1]
        self.ended = _check_learning(epoch, figures, rises, self.validation, len(self.images), before)
        following = f"epoch {min(epoch.number + 1, epoch.epochs)} of {epoch.epochs}, loss {epoch.loss:.4f}"
        self.update(self.done, self.total, following)
        return bool(self.ended)

    def _accuracy(self, images: Images, seconds: float = math.inf) -> tuple[int, int]:
        """The numbers of correct predictions, as the loss sees images, and of images; stops after so many seconds."""
        processes, asked, model = self.processes, self.asked, self.model
        part = slice(processes.rank, None, processes.count)
        right = processed = 0
        forward, started = denoised(model, asked), time.monotonic()
        with processes.together(), torch.no_grad():
            for batch in images.batches(_EVALUATED * processes.count):
                pixels = batch.images[part]
                if asked.sigma is not None and len(pixels):
                    drawn = [noise(0, index, range(1), pixels.shape[1:], asked.sigma) for index in batch.indices[part]]
                    pixels = pixels + from_lattice(torch.cat(drawn))
                predicted = forward(pixels.to(model.device, model.dtype)).argmax(1).cpu()
                right += int((predicted == cast(Tensor, batch.labels)[part]).sum())
                processed += len(batch)
                self.update(processed, len(images), "measuring accuracy")
                if any(processes.gather(time.monotonic() - started > seconds)):
                    break
        return sum(processes.gather(right)), processed

    def _print(self, after: tuple[int, int]) -> None:
        plan, asked, images, validation = self.plan, self.asked, self.images, self.validation
        names = words_of({"classes": plan.classes})  # the test images have the same classes, but other labels
        status = status_of(
            self.model, [str(self.path)], eps=eps_text(asked.eps), data="TEST", lists=names, trained=True
        )
        suggestion = advise(status)
        if asked.sigma:
            noisy = ["--method", "smoothing", "--sigma", f"{asked.sigma:g}", *words_of({"denoiser": asked.denoiser})]
            words = ("certify", self.path, "--data", "TEST", *names, "--eps", eps_text(asked.eps), *noisy, *TEN_MINUTES)
            suggestion = Advice(command(*words))
        what = f"accuracy under noise of sigma = {asked.sigma:g}" if asked.sigma else "clean accuracy"
        what += f", with the denoiser {asked.denoiser}" if asked.denoiser else ""
        on, best_epoch = "training" if validation is None else "training and held-out", []
        if validation is not None and validation.epoch:
            by = f" ({_MEASURED[self.measured[-1]]})" if self.measured else ""
            best_epoch = [("best epoch", f"{validation.epoch}, {validation.best[0]:.1%} of held-out images{by}")]
        split = f", split {images.split}" if images.split else ""
        print_facts(
            [
                ("model", plan.source.word),
                ("images", f"{len(images)} of {self.of.data}{split}"),
                (f"{what}, before", share(*self.before)),
                (f"{what}, after", f"{share(*after, sampled=False)}, on {on} images"),
                *best_epoch,
                ("written", str(self.path)),
                ("certified", "not yet: run certify"),
                *suggestion.facts,
            ]
        )


def _chosen(recipe: str, asked: FinetuneSettings, without: Collection[str]) -> str:
    """The settings that a recipe adds, ``without`` given or unused ones."""
    words = []
    for name in [*RECIPES[recipe].settings, *(["sigma"] if asked.sigma else [])]:
        value = getattr(asked, name)
        if name in without or value is None:
            continue
        if isinstance(value, tuple):
            value = "(" + ", ".join(f"{number:.3g}" for number in value) + ")"
        words.append(f"{name}={value}")
    return ", ".join(words)


def _check_learning(
    epoch: Epoch, figures: Mapping[str, float], rises: bool, validation: Validation | None, images: int, before: float
) -> str:
    """Warns where a network is no better than the largest class on held-out images, by two standard errors.

    Returns why training ends where, after half of the epochs, it is no better on the training images either, nor better
    on the held-out ones than it was ``before``, and where no certified share of these ``rises``; otherwise nothing.
    """
    accuracy = figures.get("clean", figures.get("noisy"))
    if validation is None or accuracy is None or not max(2, epoch.epochs / 3) <= epoch.number < epoch.epochs:
        return ""
    count = len(validation.labels)
    if count < _HELD_OUT[0]:
        return ""
    largest = validation.labels.bincount().max().item() / count

    def is_better(share: float, than: float, of: int) -> bool:
        return share > than + 2 * math.sqrt(than * (1 - than) / of)

    if is_better(accuracy, largest, count):
        return ""
    seen = (
        f"after {epoch.number} of {epoch.epochs} epochs {accuracy:.1%} of {count} held-out images are classified "
        f"correctly, and the largest class has {largest:.1%}"
    )
    learns = rises or is_better(epoch.accuracy, largest, images) or is_better(accuracy, before, count)
    if learns or epoch.number < epoch.epochs / 2:
        say(f"note: {seen}; it may be too early to tell whether the network learns")
        return ""
    return (
        f"training ended: {seen}; of the training images {epoch.accuracy:.1%} are. Neither is above that class by two "
        "standard errors: try a smaller --lr or --eps, or another --recipe"
    )


# What held-out images are measured by.
_MEASURED = {"clean": "clean", "noisy": "under noise", "limit": "first-order limit above eps", "certified": "certified"}


def _say_epoch(epoch: Epoch, figures: Mapping[str, float]) -> None:
    what = f"epoch {epoch.number} of {epoch.epochs}"
    if epoch.fitted:
        what = f"head fitted to each image and {counted(epoch.number, 'noisy draw')} of it"
    line = f"{what}: loss {epoch.loss:.4f}, accuracy in training {epoch.accuracy:.1%}"
    if epoch.bound is not None:
        line += f", Lipschitz bound of the features {epoch.bound:.4g} (certified; {epoch.estimate:.4g} in the loss)"
    held = ", ".join(f"{_MEASURED[name]} {value:.1%}" for name, value in figures.items())
    line += f"; held-out images: {held}" if held else ""
    say(f"{line}; {epoch.seconds:.0f} s")
