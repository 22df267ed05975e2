"""``lipcert certify``: a certificate for every image of a data set, for one model or several."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lipcert.errors import InputError
from lipcert.inputs.files import check_rows
from lipcert.inputs.sources import BUNDLED, Source
from lipcert.settings import LINEARISED, STAGED, CertifySettings, parse_memory
from lipcert.workers import default_workers, workers_ahead

from ._commands import OUTPUT
from ._options import (
    AsJson,
    Classes,
    Data,
    Denoiser,
    Labels,
    Limit,
    ModelNames,
    ModelOptions,
    TimeBudget,
    options_of,
    out,
)
from ._parse import parse_duration, parse_shard
from ._print import start

# From this ε on a number of 8-bit steps is meant, seen before the size of the images is known.
_STEPS = 8
# Images for which a second process pays.
_MANY = 20


@options_of(settings=CertifySettings, source=ModelOptions)
def certify(
    settings: partial[CertifySettings],
    source: Callable[..., ModelOptions],
    models: ModelNames = None,
    data: Data = None,
    classes: Classes = None,
    labels: Labels = None,
    attack: Annotated[bool, typer.Option("--attack", help="Also attack with PGD.")] = False,
    limit: Limit = None,
    shard: Annotated[
        str | None, typer.Option(help="Certify one of several parts of the images: 2/5. Needs --out.")
    ] = None,
    # Not in the help: the default is wrong only where other processes will need the memory that is free now.
    memory: Annotated[
        str | None, typer.Option(help="Memory for a batch, such as 8GB; by default half of what is free.", hidden=True)
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Processes that share the images; by default one per core for costly methods on a CPU, else 0.",
        ),
    ] = None,
    time_budget: TimeBudget = None,
    out: out(  # type: ignore[valid-type]
        "File of rows, one JSON line per image; rerun to continue. Default: MODEL.certified.jsonl. A folder for "
        "several models."
    ) = None,
    no_out: Annotated[bool, typer.Option("--no-out", help="Write no rows.", rich_help_panel=OUTPUT)] = False,
    fail_under: Annotated[
        float | None,
        typer.Option(
            help="Exit code 1 if the certified accuracy at the smallest eps is below this fraction.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
    denoiser: Denoiser = None,
) -> None:
    """Certify images: no l2 perturbation of pixels within [0, 1] below the certified radius changes the prediction."""
    sigma = settings.keywords.get("sigma")
    asked = [settings(sigma=one) for one in ([None] if sigma is None else dict.fromkeys(sigma.split(",")))]
    asked_source, largest = source(), asked[0].largest_eps
    if asked[0].at is None and largest >= _STEPS:
        raise InputError(
            f"--eps {largest:g} is beyond all certificates: pixels are in [0, 1], so {largest:g} steps of "
            f"an 8-bit pixel are written {largest:g}/255"
        )
    if fail_under is not None and not 0 <= fail_under <= 1:
        raise InputError(f"--fail-under must be a fraction from 0 to 1, such as 0.3, got {fail_under:g}")
    if no_out and out is not None:
        raise InputError("--out and --no-out contradict each other; give one of them")
    part = None if shard is None else parse_shard(shard)
    until = time.monotonic() + parse_duration(time_budget)
    size = None if memory is None else parse_memory(memory)
    names: Sequence[str | None] = models or [None]
    several_models = len(names) > 1
    if several_models and asked_source.checkpoint is not None:
        raise InputError(
            f"--checkpoint is for one model, got {', '.join(map(str, names))}; separate several numbers of an "
            "option by commas, and give several images as a folder"
        )
    sources = [Source.of(name) for name in names]
    if sources[0].chosen and sources[0].shipped and data:
        raise InputError(
            f"no model is named, and this folder holds no artifact: name the model for the images of "
            f"{data}, or {BUNDLED}"
        )
    if out is not None and not several_models:
        check_rows(out)
    with workers_ahead(int(_shares(asked[0], limit, workers))) as ahead:
        start(*asked_source.files, classes, labels, data=data)
        from . import _certifying

        _certifying.run(
            Plan(
                settings=[settings(attack="pgd" if attack else None, sigma=one.sigma) for one in asked],
                sources=sources,
                several_models=several_models,
                source=asked_source,
                denoiser=denoiser,
                data=data,
                lists={"classes": classes, "labels": labels},
                limit=limit,
                shard=part,
                memory=size,
                workers=workers,
                until=until,
                out=out,
                keep=not no_out,
                fail_under=fail_under,
                as_json=as_json,
                ahead=ahead,
            )
        )


def _shares(settings: CertifySettings, limit: int | None, workers: int | None) -> bool:
    """Whether a second process will probably share the images: torch does not say yet whether there is a GPU."""
    costly = settings.method == STAGED or settings.method in LINEARISED
    several = workers > 1 if workers is not None else default_workers() > 1
    return costly and several and (limit is None or limit >= _MANY) and "WORLD_SIZE" not in os.environ


@dataclass(frozen=True)
class Plan:
    """The checked options of the command; it stops at ``until``, by the monotonic clock."""

    settings: Sequence[CertifySettings]
    sources: Sequence[Source]
    several_models: bool
    source: ModelOptions
    denoiser: str | None
    data: str | None
    lists: Mapping[str, Any]
    limit: int | None
    shard: tuple[int, int] | None
    memory: float | None
    workers: int | None
    until: float
    out: Path | None
    keep: bool  # whether rows go to a file that is named after the model
    fail_under: float | None
    as_json: bool
    ahead: Sequence[ProcessPoolExecutor]  # workers that have started
    part: int = 0
    parts: int = 1
