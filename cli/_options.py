"""Options that several commands share, and the model they name."""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import typer

from lipcert._preprocessing import in_words, preprocessing, remarks
from lipcert._settings import settings_of
from lipcert.data import Images
from lipcert.errors import InputError, first_line
from lipcert.loading import BUNDLED, load, resolve
from lipcert.model import Model
from lipcert.smoothing import Denoised

from ._parse import parse_model_args
from ._print import busy, say

MODEL_HELP = (
    "A timm name, an hf-hub: id, or a path; without it the newest lipcert artifact in this folder, "
    "or, where there is none, the bundled checkpoint."
)


def complete_model(incomplete: str) -> list[str]:
    """What a shell offers for MODEL: names of timm's, and files."""
    return [*timm.list_models(f"{incomplete}*"), *(str(path) for path in Path().glob(f"{incomplete}*.safetensors"))]


ModelName = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False, autocompletion=complete_model),
]
ModelNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False, autocompletion=complete_model),
]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Weights for the timm name: .safetensors, or a PyTorch file.", show_default=False)
]
NoPretrained = Annotated[bool, typer.Option("--no-pretrained", help="Take random weights and download nothing.")]
ModelArgs = Annotated[
    str | None,
    typer.Option(help='timm model arguments, such as "img_size=32 patch_size=4 num_classes=10".', show_default=False),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output, whatever file it is.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="A folder or .tar of images (class folders give labels), or torch/NAME, hfds/NAME, wds/FOLDER [:SPLIT].",
        show_default=False,
    ),
]


Denoiser = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME",
        help="Send images through a denoiser first: a function or class of a Python module of yours that makes one.",
        show_default=False,
    ),
]


def load_model(
    model: str | None,
    checkpoint: Path | None,
    no_pretrained: bool,
    model_args: str | None,
    features: bool = False,
    denoiser: str | None = None,
) -> Model:
    """The model that a command works on; says which one it is where the user named none."""
    arguments = parse_model_args(model_args)
    source = resolve(model)
    if model is None:
        which = "the bundled checkpoint" if source == BUNDLED else f"{source}, the newest artifact in this folder"
        say(f"model: {which}")
    torch.manual_seed(0)  # so that random weights are the same in every run
    with busy(f"loading {source}"):
        loaded = load(source, pretrained=not no_pretrained, checkpoint=checkpoint, features=features, **arguments)
    return loaded if denoiser is None else Denoised(loaded, _made(denoiser), denoiser)


def _made(text: str) -> torch.nn.Module:
    """The module that ``MODULE:NAME`` makes; the code is the user's own."""
    place, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        made = getattr(importlib.import_module(place), name)()
    except Exception as error:  # whatever the code of a user raises
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"--denoiser takes MODULE:NAME such as mine:denoiser; {text} failed with {reason}") from error
    if not isinstance(made, torch.nn.Module):
        raise InputError(f"--denoiser {text} makes a {type(made).__name__}, and must make a torch.nn.Module")
    return made


def options_of(kind: type, name: str = "settings") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each field of settings that has a help text, in place of one parameter.

    What the command gets for that parameter makes the settings: it takes the fields that are no options.
    """
    own = [one for one in fields(kind) if "help" in one.metadata]

    def parameter(named: str, typed: Any, default: Any, text: str) -> inspect.Parameter:
        shown = typer.Option(help=text, show_default=default is not None)
        default = inspect.Parameter.empty if default is MISSING else default
        annotation = Annotated[typed, shown]
        return inspect.Parameter(named, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    options = [parameter(one.name, one.metadata["typed"], one.default, one.metadata["help"]) for one in own]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            chosen = {one.name: given.pop(one.name) for one in own}
            command(**{name: functools.partial(settings_of, kind, **chosen)}, **given)

        signature = inspect.signature(command)
        others = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != name]
        run.__signature__ = signature.replace(parameters=[*options, *others])  # type: ignore[attr-defined]
        return run

    return decorated


def show_preprocessing(images: Images, model: Model) -> None:
    """Says in one line what happens to images before the network gets them, and what a user should know of it."""
    known = preprocessing(model, files=not images.stored)
    size = images.first_size()
    say(f"images: {f'{size[1]}×{size[0]} → ' if size else ''}{in_words(known)}")
    if size is not None:
        for remark in remarks(known, *size):
            say(f"note: {remark}")
