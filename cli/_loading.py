"""Loads the model of a command, chooses its output file, reports preprocessing, connects the processes of torchrun."""

import contextlib
import functools
import importlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import torch

from lipcert.errors import InputError, LoadError, first_line
from lipcert.inputs.artifact import check_free
from lipcert.inputs.data import Images
from lipcert.inputs.loading import load, number_of_classes
from lipcert.inputs.preprocessing import in_words, preprocessing, remarks
from lipcert.inputs.processes import Processes
from lipcert.inputs.sources import Source, is_artifact
from lipcert.inputs.timm_networks import is_configured
from lipcert.model import Model
from lipcert.numerics import keep_freed
from lipcert.smoothing import Denoised

from ._advice import Status, random_weights
from ._options import ModelOptions, Weights
from ._parse import parse_model_args
from ._print import busy, say, typed, words_of

_SAMPLED = 64  # images whose sizes are read


def load_model(
    source: Source,
    asked: ModelOptions,
    *,
    features: bool = False,
    denoiser: str | None = None,
    new_head: bool = False,
    of_several: bool = False,
) -> Model:
    """The model of a command on its device; reports which one it is if the user named none."""
    keep_freed()
    arguments = parse_model_args(asked.model_args)
    if not (source.file and is_artifact(source.name)):
        stated = asked.stated(arguments.get("in_chans", 3))
        if source.file or is_configured(source.name):  # whose channels are not known yet
            stated.pop("input_size", None)
        arguments |= stated
    if source.chosen:
        say(f"model: {source.label}{source.reason}; name a model to use another")
    torch.manual_seed(0)  # so that random weights are the same in every run
    with busy(f"loading {source.word}"):
        try:
            loaded = load(
                source,
                pretrained=not asked.no_pretrained,
                checkpoint=asked.checkpoint,
                features=features,
                new_head=new_head,
                **arguments,
            )
        except LoadError as error:
            if not str(error).startswith("cannot download"):
                raise
            reason = str(error).partition(";")[0]
            remedy = "certify it alone, with a file of its weights as --checkpoint FILE"
            if not of_several:
                remedy = f"with a file of its weights: {typed('--checkpoint', 'FILE')}"
            raise LoadError(f"{reason}; {remedy}") from error
    if not (asked.no_pretrained or new_head) and untrained(loaded.net, asked):
        say(f"note: the weights are {random_weights(model_options(source, asked))}")
    if denoiser is not None:
        loaded = Denoised(loaded, _denoiser_of(denoiser) if ":" in denoiser else denoiser, denoiser)
    asked.apply(loaded)
    move_to(loaded, asked.device)
    return loaded


def untrained(net: torch.nn.Module, weights: Weights) -> bool:
    """Whether weights are random: by the options, or because every normalisation has constant gains and biases."""
    if weights.no_pretrained and weights.checkpoint is None:
        return True
    norms = [part for part in net.modules() if re.search("Norm|Project$", type(part).__name__)]
    vectors = [p for part in norms for p in part.parameters(recurse=False) if p.dim() == 1 and len(p) > 1]
    return bool(vectors) and all(bool((vector == vector[0]).all()) for vector in vectors)


def model_options(source: Source, asked: ModelOptions, denoiser: str | None = None) -> list[str]:
    """The words that name the same model again in another command: its name, and the options that were given."""
    words = [source.word]
    for one in fields(asked):
        value = getattr(asked, one.name)
        if value != one.default:
            text = ",".join(f"{x:.9g}" for x in value) if isinstance(value, tuple) else str(value)
            words += [f"--{one.name.replace('_', '-')}", *([] if value is True else [text])]
    return words + words_of({"denoiser": denoiser})


def _denoiser_of(text: str) -> torch.nn.Module:
    """The module returned by the user's function or class ``MODULE:NAME``."""
    place, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = getattr(importlib.import_module(place), name)()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"--denoiser takes MODULE:NAME such as mine:denoiser; {text} failed with {reason}") from error
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"--denoiser {text} must return a torch.nn.Module, got {type(module).__name__}")
    return module


def seconds_a_draw(model: Model, denoiser: str | None = None) -> float:
    """The time of a forward pass for one image, from a batch of four."""
    images = torch.full((4, *model.input_size), 0.5, dtype=model.dtype, device=model.device)
    forward = model if denoiser is None else Denoised(model, denoiser)
    with torch.no_grad():
        forward(images)
        started = time.perf_counter()
        float(forward(images).sum())  # which waits for a GPU
    return (time.perf_counter() - started) / len(images)


def status_of(model: Model, words: Sequence[str], **more: Any) -> Status:
    """The state of the work on a model, which these words name in another command."""
    more["classes"] = functools.partial(number_of_classes, model)
    return Status(words, model.input_size[0], draw=functools.partial(seconds_a_draw, model), **more)


def move_to(model: Model, device: str) -> None:
    """Moves the model to a device; ``auto`` is a GPU if there is one, and each process of torchrun has its own."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        if name == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        model.to(torch.device(name))
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError if it was built without CUDA
        raise InputError(f"there is no device {name!r} here; give --device cpu, or leave it out") from error


def output(
    out: Path | None,
    stem: str,
    source: Source,
    weights: Sequence[Path],
    model: Model,
    step: str,
    force: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """The file to write: ``out``, or one that is named ``stem``, with a number where that holds something else.

    It replaces no input, and, unless forced, only a result of the same step and settings.

    Raises:
        InputError: ``out`` is not free, or its folder cannot be made.
    """
    names = (f"{stem}{'' if number == 1 else f'.{number}'}.lipcert.safetensors" for number in count(1))
    for path in [out] if out else map(Path, names):
        try:
            if any(file.exists() and path.exists() and path.samefile(file) for file in (Path(source.name), *weights)):
                raise InputError(f"{path} is a file of the model itself; give another --out")
            check_free(path, model, force, step, settings)
            break
        except InputError:
            if out or not path.is_file():
                raise
            say(f"note: {path} has other content and is not overwritten")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path.parent}: {error.strerror or error}") from error
    if not any(os.access(place, os.W_OK) for place in (path.parent, path)):
        raise InputError(f"cannot write {path}: permission denied; give --out in another folder")
    return path


def show_data(images: Images) -> None:
    """Prints what was inferred about a data set: its split, the origin of its labels, and what is left out."""
    if images.split is not None:
        say(f"data: split {images.split} of {images.spec}")
    if images.labels_by is not None and images.labelled:
        say(f"labels: {images.labels_by}")
    for note in (*([] if images.note is None else [images.note]), *images.notes):
        say(f"note: {note}")


def show_preprocessing(images: Images, model: Model) -> None:
    """Prints what was inferred about the images, and their preprocessing in one line with remarks on it."""
    sizes = images.sizes(_SAMPLED)
    show_data(images)
    config = preprocessing(model, files=not images.stored)
    ends = [sorted({*side}) for side in zip(*sizes, strict=True)][::-1]  # heights, and widths
    size = ("×" if len({*sizes}) < 2 else " × ").join(_range(side) for side in ends) + (" → " if ends else "")
    say(f"images: {size}{in_words(config)}")
    for remark in remarks(config, sizes):
        say(f"note: {remark}{f' ({len(sizes)} images sampled)' if len({*sizes}) > 1 else ''}")


def _range(numbers: Sequence[int]) -> str:
    """The least and the most of ascending numbers, or the one that there is."""
    return " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))


@contextlib.contextmanager
def torchrun() -> Iterator[Processes]:
    """The processes of this run, usually one, connected during the block; only the first one prints."""
    processes = Processes.of_torchrun()
    if processes.count > 1 and processes.first:
        say(f"torchrun: waiting for {processes.count - 1} more processes; to run alone, unset TORCHELASTIC_RUN_ID")
    processes.connect()
    with contextlib.ExitStack() as stack:
        stack.callback(processes.close)
        if not processes.first:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield processes
