"""``lipcert constrain``: lowers the norms of the layers of a model, and writes it to an artifact."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lipcert.errors import Interrupted
from lipcert.inputs.sources import Source
from lipcert.settings import ConstrainSettings

from ._advice import CHANGED, Status, advise
from ._options import AsJson, Classes, Data, Force, Labels, Limit, ModelName, ModelOptions, options_of, out
from ._parse import parse_duration
from ._print import busy, near, percent, print_facts, print_json, print_table, progress, say, start, upper, words_of

if TYPE_CHECKING:
    from torch import Tensor

    from lipcert.certvit import ConstraintReport, LayerConstraint, NetworkFigures
    from lipcert.inputs.data import Images
    from lipcert.inputs.processes import Processes


@options_of(settings=ConstrainSettings, source=ModelOptions)
def constrain(
    settings: Callable[..., ConstrainSettings],
    source: Callable[..., ModelOptions],
    model: ModelName = None,
    data: Data = None,
    classes: Classes = None,
    labels: Labels = None,
    limit: Limit = None,
    time_budget: Annotated[
        str | None,
        typer.Option(help="Start no further layer after this time, such as 10m; the remaining layers stay unchanged."),
    ] = None,
    out: out("Output file: <name>.constrained.lipcert.safetensors.") = None,  # type: ignore[valid-type]
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Lower the norms of the layers and preserve their outputs on images. Every fifth image is held out."""
    asked, of_model, origin = settings(), source(), Source.of(model)
    until = time.time() + parse_duration(time_budget)
    start(*of_model.files, classes, labels, data=data)
    from lipcert.certvit import constrain as constrain_model
    from lipcert.inputs.artifact import save
    from lipcert.inputs.batches import EVERY
    from lipcert.inputs.data import open_images

    from ._loading import load_model, model_options, output, show_preprocessing, status_of, torchrun, untrained

    batch = 8 * EVERY  # so that the held-out images do not depend on the number of processes
    with torchrun() as processes:
        loaded = load_model(origin, of_model)
        given = {"data": data or "bundled", "limit": limit, "batch_size": batch}
        same = {**asked.described(), **given}
        path = output(out, f"{origin.stem}.constrained", origin, of_model.files, loaded, "constrain", force, same)
        images = open_images(data, loaded, limit=limit, purpose="train", classes=classes, labels=labels)
        show_preprocessing(images, loaded)

        batches = _Batches(images, processes, batch)
        try:
            with progress("calibration images") as update:

                def show(what: str, done: float, total: float | None) -> None:
                    update(done, total, what)

                constrain_model(loaded, batches, origin=given, progress=show, until=until, **vars(asked))
        except KeyboardInterrupt as stop:
            raise Interrupted("interrupted; nothing was written") from stop
        report = cast("ConstraintReport", loaded.constraint)
        if processes.first:
            with busy(f"writing {path}"):
                save(loaded, path, facts=_facts(report), force=force)
        if as_json:
            layers = [
                {name: x for name, x in vars(layer).items() if not isinstance(x, float) or math.isfinite(x)}
                for layer in report.layers
            ]
            print_json({"written": str(path), **_facts(report), "layers": layers, "seconds": report.seconds})
        else:
            agreement = report.after.agreement
            words = model_options(origin, of_model) if agreement is not None and agreement < 1 - CHANGED else []
            train = "TRAIN" if data is None or labels is not None else data
            known: dict[str, Any] = {"log10": report.after.log10_bound, "data": "TEST", "train": train}
            known |= {"lists": words_of({"classes": classes}), "random": untrained(loaded.net, of_model)}
            status = status_of(loaded, [str(path)], **known, original=words)
            _print_report(report, origin.word, path, status)


@dataclass(frozen=True)
class _Batches:
    """The batches of this process, which can be iterated several times."""

    images: "Images"
    processes: "Processes"
    size: int

    def __iter__(self) -> "Iterator[tuple[Tensor, Tensor] | Tensor]":
        for batch in islice(self.images.batches(self.size), self.processes.rank, None, self.processes.count):
            yield batch.images if batch.labels is None else (batch.images, batch.labels)


def _print_report(report: "ConstraintReport", source: str, path: Path, status: Status) -> None:
    for remark in report.remarks:
        say(f"note: {remark}")
    rows = [[cell(layer) for cell in _COLUMNS.values()] for layer in report.layers]
    print_table([*_COLUMNS], rows, optional=_LESS)
    print_table(
        ("network", "Σ log10 norms", "Lipschitz bound", "accuracy", "same top class"),
        [
            _network_row("before", report.before),
            *(_network_row(f"baseline {name}", figures) for name, figures in report.baselines.items()),
            _network_row(f"after, {report.method}", report.after),
        ],
    )
    solved = len(report.layers) - len(report.failed)
    print_facts(
        [
            ("model", source),
            ("layers", f"{solved} of {len(report.layers)} constrained to {report.allowed}"),
            *(("untouched", f"{name}: {reason}") for name, reason in report.untouched),
            ("images", f"{report.images}, and {report.held_out} held out for accuracy and agreement"),
            ("seconds", f"{report.seconds:.1f}"),
            ("written", str(path)),
            *advise(status).facts,
        ]
    )


def _norm(norm: float) -> str:
    return near(math.log10(norm) if norm > 0 else -math.inf)


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.3g}"


# The norms after rescaling and clipping are shown for comparison.
_COLUMNS: "dict[str, Callable[[LayerConstraint], str]]" = {
    "layer": lambda layer: layer.path,
    "before": lambda layer: _norm(layer.norm_before),
    "if rescaled": lambda layer: _norm(layer.baselines["rescale"]),
    "if clipped": lambda layer: _norm(layer.baselines["clip"]),
    "after": lambda layer: _norm(layer.norm_after),
    "error": lambda layer: _error(layer.error_reached),
    "held out": lambda layer: _error(layer.error_held_out),
    "zeros": lambda layer: f"{100 * layer.sparsity:.1f} %",
    "steps": lambda layer: str(layer.iterations),
    "s": lambda layer: f"{layer.seconds:.2f}",
    "status": lambda layer: layer.status,
}
_LESS = ("s", "steps", "zeros", "if rescaled", "if clipped", "error")


def _network_row(name: str, figures: "NetworkFigures") -> tuple[str, ...]:
    return (
        name,
        f"{figures.log10_norms:.3f}",
        "-" if figures.log10_bound is None else upper(figures.log10_bound),
        percent(figures.accuracy),
        percent(figures.agreement),
    )


def _facts(report: "ConstraintReport") -> dict[str, object]:
    bound = report.after.log10_bound
    facts: dict[str, object] = {
        "constraint": {
            "measure": report.measure,
            "engine": report.engine,
            "error": report.error,
            **({} if report.eta is None else {"eta": report.eta}),
            "layers": len(report.layers) - len(report.failed),
            "images": report.images,
            "held_out": report.held_out,
            "log10_norms": [report.before.log10_norms, report.after.log10_norms],
            "accuracy": [report.before.accuracy, report.after.accuracy],
        }
    }
    if bound is not None and math.isfinite(bound):
        facts |= {"log10_bound": bound, "rigor": "deterministic"}
    return facts
