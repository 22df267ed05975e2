"""Options that several commands share, and what their texts mean."""

import ast
import math
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import typer

from lipcert.errors import InputError
from lipcert.loading import BUNDLED, load, resolve
from lipcert.model import Model

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
Data = Annotated[
    str | None,
    typer.Option(
        help="A folder or .tar of images (class folders give labels), or torch/NAME, hfds/NAME, wds/FOLDER [:SPLIT].",
        show_default=False,
    ),
]


def parse_eps(text: str) -> float:
    """The smallest float64 that is not below the number written, which may be a fraction such as 36/255.

    Raises:
        InputError: if it is not a positive number.
    """
    error = InputError(f"--eps must be a positive number, got {text!r}; for example 36/255, 0.5 or 1e-3")
    parts = text.split("/")
    try:
        # As floats first: an exact 1e-999999999 would have a billion digits.
        if len(parts) > 2 or not all(0 < float(part) < math.inf for part in parts):
            raise error
        numerator, denominator = Fraction(parts[0]), Fraction(parts[1] if len(parts) == 2 else 1)
        exact = numerator / denominator
        nearest = float(exact)
    except (ValueError, OverflowError):
        raise error from None
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)


def parse_shard(text: str) -> tuple[int, int]:
    """Which part, from 0, of how many: ``2/5`` is (1, 5).

    Raises:
        InputError: if it is no such pair.
    """
    part, slash, parts = text.partition("/")
    if slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts):
        return int(part) - 1, int(parts)
    raise InputError(f"--shard takes a part and the number of parts, such as 2/5, got {text!r}")


def read_names(path: Path) -> list[str]:
    """The models that a text file names, a line each; empty lines and those that start with # are passed over.

    Raises:
        InputError: if there is no such file, or it names none.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the models from {path}: {error}") from error
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise InputError(f"{path} names no model; give one a line")
    return names


def parse_model_args(text: str | None) -> dict[str, Any]:
    """``KEY=VALUE`` pairs; values are Python literals where they read as such, else text.

    Raises:
        InputError: if a part is no such pair.
    """
    arguments: dict[str, Any] = {}
    for pair in (text or "").split():
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"--model-args takes KEY=VALUE pairs with spaces between, got {pair!r}")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key] = value
    return arguments


def load_model(
    model: str | None,
    checkpoint: Path | None,
    no_pretrained: bool,
    model_args: str | None,
    features: bool = False,
) -> Model:
    """The model that a command works on; says which one it is where the user named none."""
    arguments = parse_model_args(model_args)
    source = resolve(model)
    if model is None:
        which = "the bundled checkpoint" if source == BUNDLED else f"{source}, the newest artifact in this folder"
        say(f"model: {which}")
    torch.manual_seed(0)  # so that random weights are the same in every run
    with busy(f"loading {source}"):
        return load(source, pretrained=not no_pretrained, checkpoint=checkpoint, features=features, **arguments)
