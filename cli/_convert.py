"""``lipcert convert``: surgery on a model, written to an artifact."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from lipcert.artifact import save
from lipcert.bounds import Bound, lipschitz
from lipcert.data import open_images
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.model import Model
from lipcert.surgery import ConversionReport
from lipcert.surgery import convert as convert_model

from ._options import Checkpoint, Data, ModelArgs, NoPretrained, load_model, one_line_errors
from ._output import check_out, default_name
from ._print import busy, print_facts, progress, say, upper

IMAGES = 32
_CHOICES = {"attention": ("l2", "keep"), "norm": ("keep", "project", "smooth")}


@one_line_errors
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A timm name, an hf-hub: id, or a path.")],
    attention: Annotated[
        str, typer.Option(help="l2: attention by distance, which is Lipschitz; keep: as it is.")
    ] = "l2",
    norm: Annotated[
        str, typer.Option(help="project or smooth: projections in place of LayerNorm; keep: as it is.")
    ] = "keep",
    data: Data = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the converted model goes: <name>.lipcert.safetensors.", show_default=False),
    ] = None,
    checkpoint: Checkpoint = None,
    no_pretrained: NoPretrained = False,
    model_args: ModelArgs = None,
) -> None:
    """Swap modules for Lipschitz ones, in closed form from the weights, and write the model to one file."""
    ways: dict[str, Any] = {"attention": attention, "norm": norm}
    for name, value in ways.items():
        if value not in _CHOICES[name]:
            raise InputError(f"--{name} takes {' or '.join(_CHOICES[name])}, got {value!r}")
    loaded = load_model(model, checkpoint, no_pretrained, model_args)
    path = out or default_name(loaded.source.get("name", model))
    check_out(path, [Path(model), *([checkpoint] if checkpoint else [])])
    images = None
    if data is not None:
        images = next(open_images(data, loaded, limit=IMAGES).batches(IMAGES)).images

    before = _bound(loaded, "bounding the network before")
    with busy("swapping modules"):
        convert_model(loaded, **ways, images=images)
    after = _bound(loaded, "bounding the network after")
    report = cast(ConversionReport, loaded.conversion)
    with busy(f"writing {path}"):
        save(loaded, path, facts=_facts(after, report))

    swapped = Counter(f"{module.was} → {module.now}" for module in report.swapped)
    kept: dict[str, list[str]] = {}
    for module in report.kept:
        kept.setdefault(f"{module.was}: {module.reason}", []).append(module.path)
    moved = f"{100 * report.logits_moved:.1f} % (median), {100 * report.logits_moved_most:.1f} % at most,"
    seen = f"{report.images} {'random images' if report.random else f'images of {data}'}"
    print_facts(
        [
            ("model", model),
            ("parameters", f"{report.parameters_before:,} → {report.parameters_after:,}"),
            *(("swapped", f"{count} {what}") for what, count in swapped.most_common()),
            *(
                ("left", f"{len(paths)} {what} ({paths[0]}{', …' if paths[1:] else ''})")
                for what, paths in kept.items()
            ),
            ("logits moved", f"{moved} on {seen}"),
            ("top class kept", f"{100 * report.agreement:.1f} %"),
            ("Lipschitz bound", f"{_bound_text(before)} → {_bound_text(after)}"),
            ("written", str(path)),
        ]
    )


def _bound(model: Model, what: str) -> Bound | None:
    """The bound, or None where an operation has no rule: surgery may go on without it."""
    try:
        with progress(what) as update:
            return lipschitz(model, progress=update)
    except UnsupportedOperation as error:
        say(f"note: {what}: {error}")
        return None


def _bound_text(bound: Bound | None) -> str:
    return "none" if bound is None else upper(bound.log10)


def _facts(bound: Bound | None, report: ConversionReport) -> dict[str, object]:
    facts: dict[str, object] = {
        "logits_moved": report.logits_moved,
        "images": report.images,
        "random_images": report.random,
    }
    if bound is not None and bound.finite:
        facts |= {"log10_bound": bound.log10, "rigor": bound.rigor}
    return facts
