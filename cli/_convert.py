"""``lipcert convert``: surgery on a model, written to an artifact."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lipcert.errors import UnsupportedOperation
from lipcert.inputs.sources import Source
from lipcert.settings import check, option

from ._advice import CHANGED, advise
from ._options import AsJson, Force, ModelOptions, options_of, out
from ._print import busy, print_facts, print_json, progress, say, start, upper

if TYPE_CHECKING:
    from torch import Tensor

    from lipcert.bounds import Bound
    from lipcert.model import Model
    from lipcert.surgery import ConversionReport

IMAGES = 64


@dataclass(frozen=True)
class Choices:
    """The replacements."""

    attention: str = option("l2: L2 attention, which is globally Lipschitz.", "l2", choices=("l2", "keep"))
    norm: str = option(
        "Replace LayerNorm by projections; lofast: of radius 1 before attention; retrain it.",
        "keep",
        choices=("keep", "project", "smooth", "lofast"),
    )
    activation: str = option(
        "Replacement for ReLU.", "keep", choices=("keep", "clipped-relu", "maxmin", "clipped-maxmin")
    )

    def __post_init__(self) -> None:
        check(self)


@options_of(choices=Choices, source=ModelOptions)
def convert(
    choices: Callable[..., Choices],
    source: Callable[..., ModelOptions],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A timm name, an hf-hub: id, a path, or bundled.")],
    data: Annotated[
        str | None,
        typer.Option(help=f"Calibrate on the first {IMAGES} of these images; any kind that certify --data takes."),
    ] = None,
    out: out("Output file: <name>.lipcert.safetensors.") = None,  # type: ignore[valid-type]
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Replace modules by Lipschitz ones and write an artifact; the images of --data calibrate the new modules."""
    chosen: dict[str, Any] = vars(choices())
    asked, named = source(), Source.of(model)
    start(*asked.files, data=data)
    from lipcert.inputs.artifact import save
    from lipcert.inputs.data import open_images
    from lipcert.surgery import convert as convert_model

    from ._loading import load_model, model_options, output, show_preprocessing, status_of, untrained

    loaded = load_model(named, asked)
    path = output(out, loaded.source.get("name", named.stem), named, asked.files, loaded, "convert", force)
    images, origin, total = None, {}, math.inf
    if data is not None:
        opened = open_images(data, loaded, limit=IMAGES, purpose="calibrate")
        show_preprocessing(opened, loaded)
        images = next(opened.batches(IMAGES)).images
        origin, total = {"data": data}, opened.total

    before = _bound(loaded, "bounding the original network")
    largest = None if images is None else _largest(loaded, images)
    with busy("replacing modules"):
        convert_model(loaded, **chosen, images=images, origin=origin)
    after = _bound(loaded, "bounding the converted network")
    report = cast("ConversionReport", loaded.conversion)
    with busy(f"writing {path}"):
        save(loaded, path, facts=_facts(after, report), force=force)

    if as_json:
        swaps = [asdict(module) for module in report.swapped]
        agreement = None if report.random else report.agreement
        print_json({"written": str(path), **_facts(after, report), "agreement": agreement, "swapped": swaps})
        return
    log10 = math.inf if after is None else after.log10
    words = model_options(named, asked) if report.logits_moved > CHANGED else []
    random = untrained(loaded.net, asked)
    status = status_of(loaded, [str(path)], log10=log10, data=data, total=total, original=words, random=random)
    swapped = Counter(f"{module.was} → {module.now}" for module in report.swapped)
    unchanged: dict[str, list[str]] = {}
    for module in report.kept:
        unchanged.setdefault(f"{module.was}: {module.reason}", []).append(module.path)
    moved = f"{100 * report.logits_moved:.1f} % (median), {100 * report.logits_moved_most:.1f} % at most,"
    of = "random images; calibrate and measure on yours: --data" if report.random else f"images of {data}"
    print_facts(
        [
            ("model", model),
            ("parameters", f"{report.parameters_before:,} → {report.parameters_after:,}"),
            *(("replaced", f"{count} {what}") for what, count in swapped.most_common()),
            *(
                ("unchanged", f"{len(paths)} {what} ({paths[0]}{', …' if paths[1:] else ''})")
                for what, paths in unchanged.items()
            ),
            ("change of logits", f"{moved} on {report.images} {of}"),
            *(
                []
                if largest is None
                else [("same top class", f"{100 * report.agreement:.1f} % of the images; {largest}")]
            ),
            ("Lipschitz bound", f"{_bound_text(before)} → {_bound_text(after)}"),
            ("written", str(path)),
            *advise(status).facts,
        ]
    )


def _largest(model: "Model", images: "Tensor") -> str:
    """The share of the class that the network predicts most often, with which agreement is to be compared."""
    import torch

    with torch.no_grad():
        predicted = model(images.to(model.device, model.dtype)).argmax(1)
    return f"the most frequent class before had {100 * int(predicted.bincount().max()) / len(predicted):.1f} %"


def _bound(model: "Model", what: str) -> "Bound | None":
    """The Lipschitz bound; None if an operation has no rule, which does not stop the conversion."""
    from lipcert.bounds import lipschitz

    try:
        with progress(what) as update:
            return lipschitz(model, progress=update)
    except UnsupportedOperation as error:
        say(f"note: {what}: {error}")
        return None


def _bound_text(bound: "Bound | None") -> str:
    return "none" if bound is None else upper(bound.log10)


def _facts(bound: "Bound | None", report: "ConversionReport") -> dict[str, object]:
    facts: dict[str, object] = {
        "logits_moved": report.logits_moved,
        "images": report.images,
        "random_images": report.random,
    }
    if bound is not None and math.isfinite(bound.log10):  # −∞ where the head is zero, as before training
        facts |= {"log10_bound": bound.log10, "rigor": bound.rigor}
    return facts
