"""``lipcert certify``: a certificate for every image of a data set, for one model or several."""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
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
Out = out(
    "File of rows, one JSON line per image; rerun to continue. Default: MODEL.certified.jsonl. A folder for several "
    "models."
)


@dataclass(frozen=True)
class Plan:
    """The options of the command besides those of settings and of models, and what follows from all of them."""

    data: Data = None
    classes: Classes = None
    labels: Labels = None
    attack: Annotated[bool, typer.Option("--attack", help="Also attack with PGD.")] = False
    limit: Limit = None
    shard: Annotated[str | None, typer.Option(help="Certify one of several parts of the images: 2/5. Needs --out.")] = (
        None
    )
    # Not in the help: the default is wrong only where other processes will need the memory that is free now.
    memory: Annotated[
        str | None, typer.Option(help="Memory for a batch, such as 8GB; by default half of what is free.", hidden=True)
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Processes that share the images; by default one per core for costly methods on a CPU, else 0.",
        ),
    ] = None
    time_budget: TimeBudget = None
    out: Out = None  # type: ignore[valid-type]
    no_out: Annotated[bool, typer.Option("--no-out", help="Write no rows.", rich_help_panel=OUTPUT)] = False
    fail_under: Annotated[
        float | None,
        typer.Option(
            help="Exit code 1 if the certified accuracy at the smallest eps is below this fraction.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    as_json: AsJson = False
    denoiser: Denoiser = None
    settings: Sequence[CertifySettings] = ()
    source: ModelOptions = field(default_factory=ModelOptions)
    sources: Sequence[Source] = ()
    until: float = math.inf  # by the monotonic clock
    ahead: Sequence[ProcessPoolExecutor] = ()  # workers that have started
    keep: bool = False  # whether rows go to a file that is named after the model
    part: int = 0
    parts: int = 1


@options_of(settings=CertifySettings, source=ModelOptions, plan=Plan)
def certify(
    settings: partial[CertifySettings],
    source: Callable[..., ModelOptions],
    plan: Callable[..., Plan],
    models: ModelNames = None,
) -> None:
    """Certify images: no l2 perturbation of pixels within [0, 1] below the certified radius changes the prediction."""
    sigma = settings.keywords.get("sigma")
    asked = [settings(sigma=one) for one in ([None] if sigma is None else dict.fromkeys(sigma.split(",")))]
    of_model, of_run, largest = source(), plan(), asked[0].largest_eps
    if asked[0].at is None and largest >= _STEPS:
        raise InputError(
            f"--eps {largest:g} is beyond all certificates: pixels are in [0, 1], so {largest:g} steps of "
            f"an 8-bit pixel are written {largest:g}/255"
        )
    if of_run.fail_under is not None and not 0 <= of_run.fail_under <= 1:
        raise InputError(f"--fail-under must be a fraction from 0 to 1, such as 0.3, got {of_run.fail_under:g}")
    if of_run.no_out and of_run.out is not None:
        raise InputError("--out and --no-out contradict each other; give one of them")
    part, parts = (0, 1) if of_run.shard is None else parse_shard(of_run.shard)
    until = time.monotonic() + parse_duration(of_run.time_budget)
    if of_run.memory is not None:
        parse_memory(of_run.memory)
    names: Sequence[str | None] = models or [None]
    if len(names) > 1 and of_model.checkpoint is not None:
        raise InputError(
            f"--checkpoint is for one model, got {', '.join(map(str, names))}; separate several numbers of an "
            "option by commas, and give several images as a folder"
        )
    sources = [Source.of(name) for name in names]
    if sources[0].chosen and sources[0].shipped and of_run.data:
        raise InputError(
            f"no model is named, and this folder holds no artifact: name the model for the images of "
            f"{of_run.data}, or {BUNDLED}"
        )
    if of_run.out is not None and len(names) == 1:
        check_rows(of_run.out)
    with workers_ahead(int(_shares(asked[0], of_run.limit, of_run.workers))) as ahead:
        start(*of_model.files, of_run.classes, of_run.labels, data=of_run.data)
        from . import _certifying

        attack = "pgd" if of_run.attack else None
        asked = [settings(attack=attack, sigma=one.sigma) for one in asked]
        more: dict[str, Any] = {"settings": asked, "source": of_model, "sources": sources, "until": until}
        _certifying.run(replace(of_run, **more, ahead=ahead, part=part, parts=parts))


def _shares(settings: CertifySettings, limit: int | None, workers: int | None) -> bool:
    """Whether a second process will probably share the images: torch does not say yet whether there is a GPU."""
    costly = settings.method == STAGED or settings.method in LINEARISED
    several = workers > 1 if workers is not None else default_workers() > 1
    return costly and several and (limit is None or limit >= _MANY) and "WORLD_SIZE" not in os.environ
