"""``lipcert verify``: recomputes certificates and compares them with a result file."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lipcert.errors import InputError, LipcertError
from lipcert.inputs.files import is_named_data, place_of
from lipcert.inputs.preprocessing import Preprocessing
from lipcert.inputs.sources import Source

from ._options import AsJson, Classes, Denoiser, Labels, ModelOptions, Weights, options_of
from ._print import command, complain, print_facts, print_json, progress, say, start, typed

SAMPLE = 16


@options_of(weights=Weights)
def verify(
    weights: Callable[..., Weights],
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model that was certified: a name, an id, a path, or bundled.")
    ],
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="The file that certify --out wrote.")],
    sample: Annotated[
        int | None, typer.Option(help=f"Number of rows to recompute, drawn at random: {SAMPLE} by default.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Recompute all rows.")] = False,
    data: Annotated[str | None, typer.Option(help="The images, if they have moved.")] = None,
    classes: Classes = None,
    labels: Labels = None,
    as_json: AsJson = False,
    denoiser: Denoiser = None,
    entry: Annotated[
        Path | None,
        typer.Option(
            help="Write the confirmed results to this entry of the leaderboard, a JSON file; see CONTRIBUTING."
        ),
    ] = None,
) -> None:
    """Recompute rows from the model and the images; exit code 1 if a row is not confirmed, or an image has none.

    The name, command, time and machine of the run are not checked.
    """
    if everything and sample is not None:
        raise InputError("--all and --sample contradict each other; give one of them")
    if sample is not None and sample < 1:
        raise InputError(f"--sample takes at least 1 row, got {sample}")
    if Path(model).suffix == ".jsonl" or results.suffix == ".safetensors":
        raise InputError(f"MODEL comes first, then RESULTS: lipcert verify {results} {model}")
    asked_weights, named = weights(), Source.of(model)
    start(results, *asked_weights.files, classes, labels, data=data)
    if entry is not None and entry.suffix != ".json":
        raise InputError(f"--entry takes a JSON file such as leaderboard/cifar-10/my-network.json, got {entry}")
    from lipcert.inputs.data import open_images
    from lipcert.numerics import as_assumed
    from lipcert.results import GIVEN_IN_PYTHON, read_run
    from lipcert.results.entry import read_entry, write_entry
    from lipcert.results.verify import attack_of, check_model
    from lipcert.results.verify import verify as verify_rows

    from ._loading import load_model, show_data

    run = read_run(results)
    earlier = run.summary["data"]
    if earlier.get("spec") == GIVEN_IN_PYTHON:
        raise InputError(f"{results} is about images given in Python; to have rows verified, certify files: --data")
    spec = data or str(earlier.get("spec"))
    if spec != "bundled" and not is_named_data(spec):
        try:
            place_of(spec)
        except InputError as error:
            raise InputError(f"the images are no longer at {spec}; say where: {typed('--data', 'IMAGES')}") from error
    written = None if entry is None else read_entry(entry, run)
    recorded = Preprocessing.of_summary(run.summary.get("preprocessing") or {})
    try:
        loaded = load_model(named, ModelOptions(**vars(asked_weights), **vars(recorded)), denoiser=denoiser)
    except LipcertError as error:
        raise InputError(f"{model} cannot be loaded as {run.network}, the network of {results}: {error}") from error
    check_model(run, loaded)
    settings = run.settings(attack_of(run))
    lists: dict[str, Any] = {"classes": classes or earlier.get("classes"), "labels": labels or earlier.get("labels")}
    images = open_images(None if spec == "bundled" else spec, loaded, **lists)
    show_data(images)

    if run.attacked and attack_of(run) is None:
        say(f"note: the results of {run.attack_name} are not recomputed; only pgd is")
    with as_assumed(loaded.device, settings.rounded_as), progress("verifying") as update:
        verdicts = list(verify_rows(run, loaded, images, None if everything else sample or SAMPLE, update))
    rows = [verdict for verdict in verdicts if verdict.index is not None]
    refuted = sum(row.objection is not None and not row.unsettled for row in rows)
    unsettled = sum(row.unsettled for row in rows)
    objections = [
        verdict.objection if verdict.index is None else f"image {verdict.index}: {verdict.objection}"
        for verdict in verdicts
        if verdict.objection
    ]
    if as_json:
        counts = {"verified": len(rows), "rows": len(run), "refuted": refuted, "unsettled": unsettled}
        print_json({**counts, "objections": objections})
    else:
        confirmed = f"{len(rows) - refuted - unsettled} of {len(rows)} recomputed"
        facts = [("rows", str(len(run))), ("confirmed", confirmed)]
        if unsettled:
            facts.append(("unsettled", f"{unsettled}: rounding on this machine gives another result"))
        if not objections:
            facts.append(("next", command("report", results, "--html", results.with_suffix(".html"))))
        print_facts(facts)
    for objection in objections:
        complain(f"lipcert: {objection}")
    if objections:
        raise typer.Exit(1)
    if entry is not None and written is not None:
        write_entry(entry, written, run, len(rows), sum(parameter.numel() for parameter in loaded.parameters()))
        say(f"wrote {entry}; fill in its empty fields by hand")
