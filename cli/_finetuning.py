"""Runs ``lipcert finetune``, after its options are checked."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lipcert.errors import InputError, Interrupted
from lipcert.inputs.artifact import save
from lipcert.inputs.data import Batch, Images, open_images
from lipcert.inputs.processes import Processes
from lipcert.inputs.sources import Source
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
from ._finetune import TrainingImages
from ._loading import load_model, show_preprocessing, status_of, torchrun
from ._options import ModelOptions
from ._output import output
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


def run(
    given: Mapping[str, Any],
    recipe: str | None,
    of_model: ModelOptions,
    source: Source,
    teacher: Source | None,
    images_given: Mapping[str, Any],
    *,
    lists: Mapping[str, Any],
    validate: int | None,
    until: float,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Trains the model and writes it to a file."""
    _augmentation(TrainingImages(**images_given))  # checks its settings before the model is read
    with torchrun() as processes:
        loaded = load_model(source, of_model, new_head=True)
        reason = "asked for"
        if recipe is None and "loss" not in given and "sigma" not in given:
            recipe, reason = recipe_for(loaded)
        asked = settings_for(loaded, recipe, given)
        of = TrainingImages(**{**(RECIPES[recipe].images if recipe else {}), **images_given})
        files, described = of_model.files, asked.described()
        path = output(out, f"{source.stem}.finetuned", source, files, loaded, "finetune", force, described)
        unfinished, best = (path.with_name(f"{path.name}.{kind}") for kind in ("checkpoint", "best"))
        taught = None if teacher is None else load_model(teacher, ModelOptions(device=of_model.device))
        check_trainable(loaded, asked, taught)
        images = open_images(of.data, loaded, limit=of.limit, purpose="train", **lists)
        validation = None
        measured: list[str] = []
        fitted = (asked.loss, asked.only) == ("noise", "head")
        if validate is None and asked.ema is None and not fitted:
            tenth = len(images) // 10
            validate = min(tenth, _HELD_OUT[1]) if tenth >= _HELD_OUT[0] else 0
        if validate:
            if len(images) <= validate:
                raise InputError(f"--validate {validate} leaves no images for training; give fewer")
            images = open_images(of.data, loaded, limit=len(images) - validate, purpose="train", **lists)
            if not unfinished.exists():  # weights that another training left behind
                best.unlink(missing_ok=True)
            validation = Validation(loaded, cast(Batch, images.others(validate)), asked, best)

        total = len(images) * asked.epochs
        epochs = "the head is fitted" if fitted else f"{asked.epochs} epochs"
        with progress(f"measuring accuracy before {epochs}", total) as update:
            processed = 0

            def count_up(more: int) -> None:
                nonlocal processed
                if not processed:  # training has begun, so all settings are valid
                    if recipe:
                        say(f"recipe: {recipe} ({reason}); {_chosen(recipe, asked, given)}")
                    show_preprocessing(images, loaded)
                processed += more
                update(processed, total)

            def finished(epoch: Epoch) -> None:
                nonlocal processed
                if not processed:  # resumed
                    processed = epoch.number * len(images)
                if validation is not None:
                    update(processed, total, f"validating epoch {epoch.number}")
                figures = {} if validation is None else validation(epoch.number, processes.first)
                measured[:] = figures
                _say_epoch(epoch, figures)
                try:
                    _check_learning(epoch, figures, validation, len(images), before[0] / before[1])
                except InputError:  # what is left must not stand in the way of another try
                    for file in (unfinished, best):
                        file.unlink(missing_ok=True)
                    raise
                update(
                    processed,
                    total,
                    f"epoch {min(epoch.number + 1, epoch.epochs)} of {epoch.epochs}, loss {epoch.loss:.4f}",
                )

            batches = _batches(of, images, loaded, count_up)
            sample = open_images(of.data, loaded, limit=min(of.limit or _SHOWN, _SHOWN), purpose="train", **lists)
            before = _accuracy(loaded, sample, processes, asked, update)
            update(0, total, "fitting the head to noisy images" if fitted else f"epoch 1 of {asked.epochs}")
            try:
                train(
                    loaded,
                    batches,
                    teacher=taught,
                    origin={**asdict(of), **({"validate": validate} if validate else {})},
                    checkpoint=unfinished,
                    progress=finished,
                    until=until,
                    **vars(asked),
                )
            except KeyboardInterrupt as error:
                outcome = f"rerun to continue from {unfinished}" if unfinished.exists() else "no epoch was finished"
                raise Interrupted(f"interrupted; {outcome}") from error
        stopped = loaded.recipe[-1].get("stopped_after")
        if stopped is not None:
            say(f"time: stopped after {stopped} of {asked.epochs} epochs; the same command continues")
        if validation is not None and validation.epoch:
            validation.restore()
        with progress("measuring accuracy") as update:
            after = _accuracy(loaded, sample, processes, asked, update)
        count = len(images)
        facts: dict[str, Any] = {"loss": asked.loss, "eps": asked.eps, "epochs": asked.epochs, "images": count}
        facts |= {} if images.split is None else {"split": images.split}
        if processes.first:
            with busy(f"writing {path}"):
                save(loaded, path, facts=facts, force=force)
            if stopped is None:
                unfinished.unlink(missing_ok=True)
                best.unlink(missing_ok=True)
        if as_json:
            accuracy = {"before": before[0] / before[1], "after": after[0] / after[1]}
            what = "accuracy_under_noise" if asked.sigma else "clean_accuracy"
            print_json({"written": str(path), **facts, f"{what}_on_training_images": accuracy})
            return
        names = words_of({"classes": lists["classes"]})  # the test images have the same classes, but other labels
        status = status_of(loaded, [str(path)], eps=eps_text(asked.eps), data="TEST", lists=names, trained=True)
        suggestion = advise(status)
        if asked.sigma:
            noise = ["--method", "smoothing", "--sigma", f"{asked.sigma:g}", *words_of({"denoiser": asked.denoiser})]
            words = ("certify", path, "--data", "TEST", *names, "--eps", eps_text(asked.eps), *noise, *TEN_MINUTES)
            suggestion = Advice(command(*words))
        what = f"accuracy under noise of sigma = {asked.sigma:g}" if asked.sigma else "clean accuracy"
        what += f", behind {asked.denoiser}" if asked.denoiser else ""
        on, best_epoch = "training" if validation is None else "training and held-out", []
        if validation is not None and validation.epoch:
            what_of = f"; {_MEASURED[measured[-1]]}" if measured else ""
            best_epoch = [("best epoch", f"{validation.epoch}, {validation.best[0]:.1%} of held-out images{what_of}")]
        print_facts(
            [
                ("model", source.word),
                ("images", f"{count} of {of.data}" + (f", split {images.split}" if images.split else "")),
                (f"{what}, before", share(*before)),
                (f"{what}, after", f"{share(*after)}, on {on} images"),
                *best_epoch,
                ("written", str(path)),
                ("certified", "not yet: run certify"),
                *suggestion.facts,
            ]
        )


def _accuracy(
    model: Model, images: Images, processes: Processes, asked: FinetuneSettings, update: Callable[..., None]
) -> tuple[int, int]:
    """The numbers of correct predictions, as the loss sees images, and of images; stops after some seconds."""
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
            update(processed, len(images), "measuring accuracy")
            if any(processes.gather(time.monotonic() - started > _SECONDS)):
                break
    return sum(processes.gather(right)), processed


def _chosen(recipe: str, asked: FinetuneSettings, given: Mapping[str, Any]) -> str:
    """The settings that a recipe adds to those that were given."""
    words = []
    for name in [*RECIPES[recipe].settings, *(["sigma"] if asked.sigma else [])]:
        value = getattr(asked, name)
        if name in given or value is None:
            continue
        if isinstance(value, tuple):
            value = "(" + ", ".join(f"{number:.3g}" for number in value) + ")"
        words.append(f"{name}={value}")
    return ", ".join(words)


def _check_learning(
    epoch: Epoch, figures: Mapping[str, float], validation: Validation | None, trained_on: int, before: float
) -> None:
    """Warns where a network is no better than the largest class on held-out images, by two standard errors.

    Ends the training where, after half of the epochs, it is no better on the training images either, nor better on the
    held-out ones than it was ``before``.
    """
    accuracy = figures.get("clean", figures.get("noisy"))
    if validation is None or accuracy is None or not max(2, epoch.epochs / 3) <= epoch.number < epoch.epochs:
        return
    count = len(validation.labels)
    if count < _HELD_OUT[0]:
        return
    largest = validation.labels.bincount().max().item() / count

    def is_better(share: float, than: float, of: int) -> bool:
        return share > than + 2 * math.sqrt(than * (1 - than) / of)

    if is_better(accuracy, largest, count):
        return
    seen = (
        f"after {epoch.number} of {epoch.epochs} epochs {accuracy:.1%} of {count} held-out images are classified "
        f"correctly, and the largest class has {largest:.1%}"
    )
    learns = is_better(epoch.accuracy, largest, trained_on) or is_better(accuracy, before, count)
    if learns or epoch.number < epoch.epochs / 2:
        say(f"note: {seen}; it may be too early to tell whether the network learns")
        return
    raise InputError(
        f"{seen}, and {epoch.accuracy:.1%} of the training images: the network has learnt nothing. Try a smaller --lr "
        "or --eps, or another --recipe"
    )


# What held-out images are measured by.
_MEASURED = {"clean": "clean", "noisy": "under noise", "limit": "first-order limit above eps", "certified": "certified"}


def _say_epoch(epoch: Epoch, figures: Mapping[str, float]) -> None:
    line = f"epoch {epoch.number} of {epoch.epochs}: loss {epoch.loss:.4f}, accuracy in training {epoch.accuracy:.1%}"
    if epoch.bound is not None:
        line += f", Lipschitz bound of the features {epoch.bound:.4g} (certified; {epoch.estimate:.4g} in the loss)"
    held = ", ".join(f"{_MEASURED[name]} {value:.1%}" for name, value in figures.items())
    line += f"; held-out images: {held}" if held else ""
    say(f"{line}; {epoch.seconds:.0f} s")
