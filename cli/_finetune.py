"""``lipcert finetune``: trains a model for larger certified radii and writes it to an artifact."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lipcert.errors import InputError
from lipcert.inputs.sources import Source
from lipcert.settings import COUNT, INSIDE, RECIPES, FinetuneSettings, check, option, recipe_settings, settings_of

from ._options import LIMIT, AsJson, Classes, Force, ModelName, ModelOptions, TimeBudget, choice, options_of, out
from ._parse import parse_duration
from ._print import start

_python = functools.partial(option, python=True)
_RECIPES = "; ".join(f"{name}, {recipe.kind}" for name, recipe in RECIPES.items())


@dataclass(frozen=True)
class TrainingImages:
    """The training images; a checkpoint and the recipe record these settings."""

    data: str = option("A folder or .tar with class folders, or torch/NAME or hfds/NAME [:SPLIT].")
    limit: int | None = option(LIMIT, None, int | None)
    batch_size: int = option("Images per batch; a recipe has its own.", 64, range=COUNT)
    augment: bool = _python("Crop the images at random and flip them horizontally.", True)
    crop: str = option(
        "resized: random crops; shift: by up to an eighth of the side; flip: flips only; a recipe has its own.",
        "resized",
        choices=("resized", "shift", "flip", "none"),
    )
    randaugment: str | None = _python("timm's RandAugment, such as rand-m9-n2.", None)
    cutout: float = _python("Blacken a rectangle in this fraction of the images.", 0.0)
    mix: str | None = _python("A second data set, such as generated images in an ``.npz``.", None)
    mix_ratio: float | None = _python("Fraction of ``mix`` in a batch.", 0.5, range=INSIDE)

    def __post_init__(self) -> None:
        check(self)
        if self.mix is None:
            object.__setattr__(self, "mix_ratio", None)


@dataclass(frozen=True)
class Plan:
    """The checked options of the command, which stops at ``until``; ``given`` and ``images`` hold only typed ones."""

    source: Source
    of_model: ModelOptions
    teacher: Source | None
    given: Mapping[str, Any]
    recipe: str | None
    images: Mapping[str, Any]
    classes: Path | None
    validate: int | None
    until: float
    out: Path | None
    force: bool
    as_json: bool


@options_of(settings=FinetuneSettings, source=ModelOptions, images=TrainingImages)
def finetune(
    settings: functools.partial[FinetuneSettings],
    source: Callable[..., ModelOptions],
    images: functools.partial[TrainingImages],
    model: ModelName = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"Defaults for a kind of network: {_RECIPES}. By default the one that suits the network, unless "
            "--loss is given.",
            **choice(tuple(RECIPES)),
        ),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Distil from this model: an artifact with the same classes, or a timm name.")
    ] = None,
    classes: Classes = None,
    time_budget: TimeBudget = None,
    validate: Annotated[
        int | None,
        typer.Option(
            help="Hold out this many training images and keep the best epoch on them; by default a tenth, at most "
            "500, or none if there are fewer than 500 images; 0: none."
        ),
    ] = None,
    out: out("Output file: <name>.finetuned.lipcert.safetensors.") = None,  # type: ignore[valid-type]
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a model for larger certified radii; rerun the command to continue after an interruption."""
    of_model, of_images, given = source(), images(), settings.keywords
    if recipe is None:
        settings()
    else:
        settings_of(FinetuneSettings, **recipe_settings(recipe, given))
    if validate and (validate < 0 or given.get("ema") is not None):
        raise InputError("--validate takes a number of images, and no ema: it keeps the weights of one epoch")
    until = time.time() + parse_duration(time_budget)
    named, of_teacher = Source.of(model), None if teacher is None else Source.of(teacher)
    start(*of_model.files, classes, data=of_images.data)
    from . import _finetuning

    _finetuning.run(
        Plan(named, of_model, of_teacher, given, recipe, images.keywords, classes, validate, until, out, force, as_json)
    )
