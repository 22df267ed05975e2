"""``lipcert finetune``: trains a model for larger certified radii and writes it to an artifact."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lipcert.errors import InputError
from lipcert.inputs.preprocessing import Preprocessing
from lipcert.settings import RECIPES, FinetuneSettings, recipe_settings, settings_of

from ._commands import OUTPUT
from ._errors import one_line_errors
from ._options import (
    AsJson,
    Classes,
    Device,
    Force,
    LabelledData,
    Labels,
    Limit,
    ModelName,
    TimeBudget,
    Weights,
    choice,
    options_of,
    out,
)
from ._parse import parse_duration
from ._print import start

_IMAGES = "Options of the training images"


@options_of(FinetuneSettings)
@options_of(Preprocessing, "pixels")
@options_of(Weights, "weights")
@one_line_errors
def finetune(
    settings: functools.partial[FinetuneSettings],
    pixels: Callable[..., Preprocessing],
    weights: Callable[..., Weights],
    data: LabelledData,
    model: ModelName = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Defaults for a kind of network: vit, after convert --norm smooth; liresnet, for gloro; noise, for "
            "smoothing; cnn, for local. By default the one that suits the network, unless --loss is given.",
            show_default=False,
            **choice(tuple(RECIPES)),
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="Distil from this model: an artifact of the same classes, or a timm name.",
            show_default=False,
        ),
    ] = None,
    classes: Classes = None,
    labels: Labels = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per batch; 64, or that of the recipe.")] = None,
    limit: Limit = None,
    device: Device = "auto",
    time_budget: TimeBudget = None,
    augment: Annotated[
        bool,
        typer.Option(help="Crop the images at random and flip them horizontally.", rich_help_panel=_IMAGES),
    ] = True,
    crop: Annotated[
        str | None,
        typer.Option(
            help="shift: by up to an eighth of the side; flip: flips only; resized, or that of the recipe.",
            rich_help_panel=_IMAGES,
            show_default=False,
            **choice(("resized", "shift", "flip", "none")),
        ),
    ] = None,
    randaugment: Annotated[
        str | None,
        typer.Option(help="timm's RandAugment, such as rand-m9-n2.", show_default=False, rich_help_panel=_IMAGES),
    ] = None,
    cutout: Annotated[
        float, typer.Option(help="Blacken a rectangle in this fraction of the images.", rich_help_panel=_IMAGES)
    ] = 0.0,
    mix: Annotated[
        str | None,
        typer.Option(help="A second data set, such as generated images.", show_default=False, rich_help_panel=_IMAGES),
    ] = None,
    mix_ratio: Annotated[float, typer.Option(help="Fraction of --mix in a batch.", rich_help_panel=_IMAGES)] = 0.5,
    validate: Annotated[
        int | None,
        typer.Option(
            help="Hold out this many training images and keep the epoch that is best on them; by default a tenth, at "
            "most 500, and none with --ema or --validate 0.",
            show_default=False,
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Write the figures of each epoch to a .csv file or a TensorBoard folder.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    out: out("Output file: <name>.finetuned.lipcert.safetensors.") = None,  # type: ignore[valid-type]
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a model for larger certified radii; rerun the command to continue after an interruption."""
    asked_pixels, asked_weights = pixels(), weights()
    given = settings.keywords
    if recipe is None:
        settings()
    else:
        settings_of(FinetuneSettings, **recipe_settings(recipe, given))
    if batch_size is not None and batch_size < 1:
        raise InputError(f"--batch-size must be at least 1 image, got {batch_size}")
    if not 0 < mix_ratio < 1:
        raise InputError(f"--mix-ratio must be between 0 and 1, got {mix_ratio}")
    if validate and (validate < 0 or given.get("ema") is not None):
        raise InputError("--validate takes a number of images, and no --ema: it keeps the weights of one epoch")
    until = time.time() + parse_duration(time_budget)
    start(model, teacher, *asked_weights.files, classes, labels, data=data)
    from . import _finetuning

    _finetuning.run(
        given,
        recipe,
        asked_pixels,
        model,
        teacher,
        {
            "data": data,
            "limit": limit,
            "augment": augment,
            "randaugment": randaugment,
            "cutout": cutout,
            "mix": mix,
            "mix_ratio": mix_ratio if mix else None,
            **{key: value for key, value in (("batch_size", batch_size), ("crop", crop)) if value is not None},
        },
        lists={"classes": classes, "labels": labels},
        validate=validate,
        until=until,
        log=log,
        out=out,
        force=force,
        as_json=as_json,
        weights=asked_weights,
        device=device,
    )
