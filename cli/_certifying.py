"""Runs ``lipcert certify``, after its options are checked."""

import contextlib
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
import typer

from lipcert.certifier import Certifier, Method, duration, triage
from lipcert.denoisers import Denoised, check_noise
from lipcert.errors import InputError, Interrupted, LipcertError, counted
from lipcert.inputs.artifact import weights_hash
from lipcert.inputs.checkpoints import checkpoints
from lipcert.inputs.data import Images, open_images
from lipcert.inputs.processes import Processes
from lipcert.inputs.sources import Source
from lipcert.inputs.timm_networks import is_configured
from lipcert.model import Model
from lipcert.numerics import as_assumed, check_environment
from lipcert.report import OVERVIEW, facts, other_order, overview, record, seconds
from lipcert.results import Run, certifier_for, free_file, shard_path, sigma_choice_of, summary, summary_path
from lipcert.results.description import describe
from lipcert.results.progress import certify_in_memory, certify_to_file
from lipcert.settings import AUTO, LOOSE, SMOOTHING, STAGED, CertifySettings, shown
from lipcert.smoothing import CHOOSING, DRAWS, LEAST, SELECTION, choose_sigma

from ._advice import Advice, Status, advise
from ._certify import Plan
from ._loading import load_model, model_options, seconds_a_draw, show_preprocessing, status_of, torchrun, untrained
from ._print import (
    busy,
    command,
    complain,
    in_bytes,
    percent,
    print_facts,
    print_json,
    print_table,
    progress,
    say,
    typed,
    upper,
    words_of,
)

# Forward passes in float64 that every certificate takes: margins, and a bound on their rounding errors.
_PASSES = 2
# Bundled images that are certified without --limit.
_BUNDLED = 20


def run(plan: Plan) -> None:
    """Certifies the images for every model and every σ, prints the results, and sets the exit code."""
    processes = Processes.of_torchrun()
    part, parts = (plan.part, plan.parts) if plan.shard else (processes.rank, processes.count)
    if plan.shard and processes.count > 1:
        raise InputError("--shard and torchrun both divide the images; use only one of them")
    if parts > 1 and plan.out is None:
        raise InputError("parts of a run need --out, the file in which their rows are combined")
    workers = plan.workers if processes.count == 1 else 0
    keep = not plan.no_out and plan.out is None and parts == 1
    plan = replace(plan, workers=workers, keep=keep, part=part, parts=parts)
    with torchrun():
        if len(plan.sources) > 1:
            outcomes, failed = _certify_all(plan, processes)
        else:
            outcomes, failed = _certify_one(plan, plan.sources[0], plan.out, processes), []

        several = len(plan.sources) > 1 or len(plan.settings) > 1
        if plan.as_json:
            runs = [outcome.run for outcome in outcomes]
            summaries = [{**run.summary, "facts": record(run, run.every_eps)} for run in runs]
            for one in summaries:
                one.pop("example_logits", None)  # which only verification needs
            print_json({"models": summaries, "failed": failed} if several else summaries[0])
        elif several:
            _print_comparison(outcomes, plan)
        else:
            _print_outcome(outcomes[0], plan)
        below = _judge(outcomes, plan) if processes.first else False
    if failed:
        raise typer.Exit(2)
    if below:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Outcome:
    """The results of one model."""

    name: str
    run: Run
    path: Path | None
    status: Status


def _certify_all(plan: Plan, processes: Processes) -> tuple[list[_Outcome], list[dict[str, str]]]:
    """Certifies the models one after the other; reports models that cannot be certified and continues."""
    out = plan.out
    for source in plan.sources:  # before the first of them runs
        if not source.file:
            is_configured(source.name)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--out must be a folder for several models, and {out} cannot be created: {error}"
            ) from error
    outcomes: list[_Outcome] = []
    failed: list[dict[str, str]] = []
    for source in plan.sources:
        path = None if out is None else out / f"{source.stem}.jsonl"
        try:
            outcomes += _certify_one(plan, source, path, processes)
        except Interrupted:
            raise
        except LipcertError as error:
            if processes.count > 1:  # the other processes would wait for this one
                raise
            complain(f"lipcert: {source.word}: {error}")
            failed.append({"model": source.word, "error": str(error)})
    if not outcomes:
        raise InputError(f"none of {len(plan.sources)} models could be certified; the lines above say why")
    return outcomes, failed


def _certify_one(plan: Plan, source: Source, out: Path | None, processes: Processes) -> list[_Outcome]:
    """Certifies one model; for several σ once each, with files such as ``r.sigma-0.25.jsonl`` for ``r.jsonl``."""
    # Before loading: in another rounding mode the model's file would look damaged.
    check_environment(torch.device("cpu"))
    weights = plan.source.checkpoint
    label = source.label + (f", weights {weights.name or weights.absolute().name}" if weights else "")
    loaded = load_model(source, plan.source, denoiser=plan.denoiser, of_several=len(plan.sources) > 1)
    random = untrained(loaded.net, plan.source)
    if random:
        label += ", random weights: nothing to certify"
    limit = _BUNDLED if plan.data is None and plan.limit is None else plan.limit
    images = open_images(plan.data, loaded, limit=limit, classes=plan.classes, labels=plan.labels)
    images.shuffle()
    if plan.limit is None and len(images) < images.total:
        say(f"images: {_some(len(images), images.total)}")
    if plan.fail_under is not None and not images.labelled:
        raise InputError("--fail-under needs labels, and these images have no labels for the classes of the model")
    stem = f"{source.stem}.certified"
    words = model_options(source, plan.source, plan.denoiser)
    status = status_of(
        loaded,
        words,
        eps=plan.settings[0].eps_typed,
        data=plan.data,
        total=math.inf if plan.data is None else images.total,
        lists=words_of({"classes": plan.classes, "labels": plan.labels}),
        denoised="--denoiser" in words,
        random=random,
    )
    outcomes = []
    if loaded.sigma is not None:
        say(f"model: a smoothed classifier, σ = {loaded.sigma:g}")
        if plan.settings[0].method not in (STAGED, SMOOTHING):
            label += ", its network without noise"
    for asked in [one.smoothed(loaded.sigma) for one in plan.settings]:
        earlier = [out] if out else sorted(Path().glob(f"{stem}*.jsonl")) if plan.keep else []
        choice = _sigma_choice(loaded, asked, images, earlier, processes, plan.until) if asked.sigma == AUTO else None
        settings = asked if choice is None else replace(asked, eps=cast(Any, asked.eps_typed), sigma=choice["sigma"])
        path = out
        if len(plan.settings) > 1:
            path = out and out.with_name(f"{out.stem}.sigma-{settings.sigma:g}{out.suffix}")
        with as_assumed(loaded.device, settings.rounded_as):
            outcome = _certify_with(settings, choice, plan, loaded, images, label, path or stem, processes, status)
        if len(plan.settings) > 1:
            outcome = replace(outcome, name=f"{label}, smoothed({settings.sigma:g})")
        outcomes.append(outcome)
    return outcomes


def _some(count: int, total: int) -> str:
    return f"{count} of {total} bundled images; --limit {total} for all"


def _sigma_choice(
    loaded: Model, asked: CertifySettings, images: Images, files: Sequence[Path], processes: Processes, until: float
) -> dict[str, Any]:
    """σ for ``--sigma auto`` with its record: chosen on images outside the run, or as the earlier run chose it."""
    for path in files:
        with contextlib.suppress(InputError):  # of which reading the rows says more
            if (earlier := sigma_choice_of(path, asked, weights_hash(loaded))) is not None:
                images.keep_out(earlier.get("indices", []))
                say(f"sigma: {earlier['sigma']:g}, as chosen for {path} on images outside its runs")
                return earlier
    # A third of the time is for the choice, and a third of that for one σ.
    end = time.monotonic() + (until - time.monotonic()) / 3
    affordable = min((end - time.monotonic()) / 3 / DRAWS / seconds_a_draw(loaded), CHOOSING)
    others = images.others(max(LEAST, int(affordable)))
    if others is None:
        raise InputError(
            f"--sigma auto needs images outside the run, and there are {images.total} in all: set a smaller --limit, "
            "or give --sigma a number"
        )
    count = len(others.images)
    if count >= LEAST:
        _show_network(loaded, asked)
        each = duration(count * DRAWS * seconds_a_draw(loaded))
        on = counted(count, "image")
        say(f"sigma: choosing it on {on} outside the run, up to {each} for each of at most 6 values")
    try:
        with progress("choosing sigma") as update:
            choice = choose_sigma(
                loaded,
                others.images,
                others.labels,
                asked,
                indices=others.indices,
                deadline=end,
                progress=lambda line: update(0, None, f"choosing sigma: {line}"),
            )
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted while choosing sigma; nothing is kept; --sigma NUMBER skips this") from error
    entry: dict[str, Any] = asdict(choice)
    entry["shares"] = {f"{sigma:g}": share for sigma, share in choice.shares.items()}
    entry["indices"], entry["files"] = list(others.indices), list(others.files)
    entry = processes.gather(entry)[0]
    candidates = ", ".join(f"{sigma} {100 * share:.0f} %" for sigma, share in entry["shares"].items())
    labels = "" if choice.labelled else ", without labels"
    say(
        f"sigma: {choice.sigma:g}, chosen on {counted(choice.images, 'image')} outside the run{labels}; "
        f"estimated certified share by sigma: {candidates}"
    )
    return entry


def _certify_with(
    settings: CertifySettings,
    choice: dict[str, Any] | None,
    plan: Plan,
    loaded: Model,
    images: Images,
    label: str,
    out: Path | str,
    processes: Processes,
    status: Status,
) -> _Outcome:
    """Certifies the images; ``out`` is the file for rows, or the start of the names of files to choose one from."""
    if settings.method == STAGED and settings.at is None:
        check_noise(loaded)
        _triage(loaded, settings, images)
    before = time.perf_counter()
    with progress("reading the network") as update:
        certifier = certifier_for(loaded, settings, progress=update, memory=plan.memory)
    preparation = round(time.perf_counter() - before, 3)
    for method, reason in certifier.notes.items():
        say(f"note: {method}: {reason}")
    status = replace(status, log10=None if certifier.bound is None else certifier.bound.log10)
    chosen = [source.word for source in plan.sources if source.chosen]  # another file may be the newest tomorrow
    description = {
        **describe(loaded, images, certifier, typed(*chosen)),
        "name": label,
        "preparation_seconds": preparation,
    }
    if choice is not None:
        description["sigma_choice"] = choice
    file = out if isinstance(out, Path) else None
    if isinstance(out, str) and _keeps(plan):
        file = free_file(_names(out, settings), description, images)

    def started(rows: int) -> None:
        if isinstance(certifier, Certifier):
            _show_methods(certifier)
            staged = settings.method == STAGED and settings.at is None
            loose = staged and status.log10 is not None and status.log10 > LOOSE
            if loose and len(images) > _BUNDLED:
                say(f"note: bounds this loose certify nothing of use; instead: {advise(status).command}")
        else:
            most = duration((settings.samples + SELECTION) * seconds_a_draw(certifier.model))
            say(f"estimated per image: {SMOOTHING} up to {most}; draws at once: at most {certifier.batch}")
        show_preprocessing(images, loaded)
        if rows:
            say(f"{file}: continuing after {counted(rows, 'image')}")

    with progress("certifying", len(images)) as update:
        done = 0
        total: int | None = len(images)

        def update_count(rows: int, of: int | None) -> None:
            nonlocal done, total
            done, total = rows, of
            update(done, total)

        certifier.watch = lambda method, within: update(done, total, f"certifying: {method}")
        if file is None:
            started(0)
            tally = certify_in_memory(certifier, images, update_count, plan.workers, plan.until, plan.ahead)
        else:
            tally = certify_to_file(
                certifier,
                images,
                description,
                file,
                part=plan.part,
                parts=plan.parts,
                processes=processes,
                started=started,
                progress=update_count,
                workers=plan.workers,
                deadline=plan.until,
                ahead=plan.ahead,
            )
    if plan.parts == 1 and tally.left:
        pace = tally.pace or 0.0
        following = f"the next may take up to {duration(pace)} each".replace("up to <", "<")
        if not settings.noise:
            following = f"the next {tally.left}, certified together, may take about {duration(pace * tally.left)}"
        more = "a larger --time-budget" + (", or fewer --samples," if settings.noise else "")
        again = "rerun the command to continue; " if file is not None else ""
        begun = f"time: stopped after {len(tally)} of {len(images)} images, as {following}"
        say(f"{begun}; {again}{more} reaches more")
    pairs = [(row["label"], row["predicted"]) for row in tally.rows if row.get("label") is not None]
    if (line := other_order(pairs, images.class_names)) is not None:
        say(f"note: {line}")
    path = file if file is None or processes.count > 1 else shard_path(file, plan.part, plan.parts)
    run = Run(
        path or Path("results"),
        summary(description, tally, complete=plan.parts > 1 or len(tally) >= len(images)),
        tally.rows,
    )
    status = replace(
        status,
        images=len(run),
        finished=bool(run.certified or settings.noise or settings.at is not None),
        rows=plan.out if plan.out is not None and plan.out.is_dir() else path,
    )
    return _Outcome(label, run, path, status)


def _keeps(plan: Plan) -> bool:
    """Whether rows go to a file in the working folder; reports a folder that cannot be written to."""
    if plan.keep and not (writable := os.access(".", os.W_OK)):
        say("note: no file can be written in this folder, so rows are not kept; --out FILE keeps them")
    return plan.keep and writable


def _names(stem: str, settings: CertifySettings) -> Iterator[Path]:
    """Files for the rows of a run without --out: named after the model, then also after its settings."""
    yield Path(f"{stem}.jsonl")
    noise = "" if settings.sigma is None else f".sigma-{settings.sigma:g}"
    targets = ",".join(text for _, text in settings.every_eps)
    stem += f".{settings.method}{noise}.eps-{targets}".replace("/", "_")
    yield Path(f"{stem}.jsonl")
    yield from (Path(f"{stem}.{number}.jsonl") for number in count(2))


def _show_network(model: Model, settings: CertifySettings) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    size = "×".join(str(side) for side in model.input_size[1:])
    targets = ", ".join(text for _, text in settings.every_eps)
    denoised = " with the denoiser" if isinstance(model, Denoised) else ""
    say(f"network: {parameters / 1e6:.1f} M parameters{denoised}, {size} pixels; certifying at ε = {targets}")


def _triage(model: Model, settings: CertifySettings, images: Images) -> None:
    """Prints accuracy and first-order limits of the first images, seconds after the start."""
    _show_network(model, settings)
    with busy("first images"):
        first = triage(model, images, settings.eps)
    if first is None:
        return
    correct = "" if first.correct is None else f"{first.correct} correctly classified; "
    low, high = (shown(limit) if math.isfinite(limit) else "none" for limit in (first.limits[0], first.limits[-1]))
    limits = f"first-order limits {low} to {high}, {first.reachable} above {settings.eps_typed}"
    limits = limits if low != "none" else "no gradient, so no first-order limit"
    images_seen = "first image" if first.images == 1 else f"first {first.images} images"
    say(f"{images_seen}: {correct}{limits}")


def _show_methods(certifier: Certifier) -> None:
    """Prints the estimated time and memory of each method, and why others are skipped."""
    passes = _PASSES * certifier.subject.flops / Method.rate
    costs = [
        f"{name} {'up to ' if method.work else ''}{duration(passes + method.seconds)}, {in_bytes(method.memory)}"
        for name, method in certifier.methods.items()
    ]
    costs = [cost.replace("up to <", "<") for cost in costs]
    say(f"estimated per image, alone in its batch: {'; '.join(costs)}; images at once: at most {certifier.together}")
    reasons: dict[str, list[str]] = {}
    for name, reason in certifier.skipped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        say(f"note: {', '.join(names)} skipped: {reason}; force with --method")


def _print_outcome(outcome: _Outcome, plan: Plan) -> None:
    run = outcome.run
    rows = facts(run, run.every_eps)
    if plan.data is None and plan.limit is None and len(run) < (total := run.summary["data"]["images"]):
        rows[1] = ("images", _some(len(run), total))
    known = next((one for one in checkpoints() if one.name == outcome.name.partition(",")[0]), None)
    if known is not None and known.eps == run.eps_typed and run.labelled and known.method == plan.settings[0].method:
        here = f"here {run.share(run.certified_at(run.eps))}"
        rows.append(("published", f"{percent(known.certified)} of {known.images:,} ({known.data}); {here}"))
    if outcome.status.log10 is not None:
        rows.append(("Lipschitz bound", upper(outcome.status.log10)))
    rows.append(("seconds", seconds(run)))
    if run.samples:
        most = len(run) * (plan.settings[0].samples + SELECTION)
        rows.append(("early stopping", f"saved {100 * (1 - run.samples / most):.1f} % of {most:,} draws"))
    if outcome.path is not None:
        rows += [("rows", str(outcome.path)), ("summary", str(summary_path(outcome.path)))]
    rows += _why_not(run, run.eps_typed)
    print_facts([*rows, *_next(plan, [outcome]).facts])


def _why_not(run: Run, eps: str) -> list[tuple[str, str]]:
    """The number of images without a certificate, by reason; empty unless certification was staged."""
    reasons = Counter(row["reason"] for row in run.rows if row.get("reason"))
    undecided = f"no certificate at {eps}"
    if run.attacked:
        undecided = f"neither a certificate nor an adversarial example within {eps}"
    words = {
        "first-order limit": f"first-order limit (margin over gradient norm) ≤ {eps}: out of reach of these methods",
        "misclassified": "misclassified, so only the global methods were tried",
        "attacked": f"adversarial example found within {eps}",
        "bounds too loose": undecided,
    }

    wrong = sum(row["certified"] and not row["correct"] for row in run.rows) if run.labelled and reasons else 0
    rows = [("certified, misclassified", str(wrong))] if wrong else []
    for reason, number in reasons.most_common():
        text = words.get(reason) or f"{undecided} ({reason.replace('skipped:', 'not tried:')})"
        rows.append(("not certified", f"{number}: {text}"))
    return rows


def _next(plan: Plan, outcomes: Sequence[_Outcome]) -> Advice:
    """A suggestion for the next command."""
    out = plan.out
    whole = re.sub(r" --shard[ =]\S+", "", typed())
    if plan.shard and plan.part + 1 < plan.parts:
        return Advice(f"{whole} --shard {plan.part + 2}/{plan.parts}", "without --shard it merges the rows")
    if plan.shard and plan.parts > 1:
        return Advice(whole, "it merges the rows")
    if len(outcomes) > 1 and outcomes[0].path is not None and (out is None or not out.is_dir()):
        page = "report.html" if out is None else out.with_suffix(".html")
        return Advice(command("report", *(outcome.path for outcome in outcomes), "--html", page))
    first = outcomes[0]
    if first.path is not None and not first.run.complete:
        return Advice(typed(), "the time ended before the last image")
    return advise(first.status if len(outcomes) == 1 else replace(first.status, finished=True))


def _print_comparison(outcomes: Sequence[_Outcome], plan: Plan) -> None:
    """Prints the table of ``lipcert report``, by models instead of files."""
    columns, rows = overview([outcome.run for outcome in outcomes], plan.settings[0].every_eps, costs=True)
    rows = [[row[-1], *row[1:-1]] for row in rows]
    print_table(["model", *columns[1:-1]], rows, optional=("seconds", "Lipschitz bound", "δ", "95 % CI"))
    say(OVERVIEW)
    for what, text in _next(plan, outcomes).facts:
        say(f"{what}: {text}")


def _judge(outcomes: Sequence[_Outcome], plan: Plan) -> bool:
    """Reports the models below --fail-under; returns whether there are any."""
    below = False
    for outcome in outcomes:
        reached = outcome.run.certified_accuracy
        what = "the certified accuracy" if len(outcomes) == 1 else f"{outcome.name}: the certified accuracy"
        if reached is None:
            continue
        if plan.fail_under is not None and reached < plan.fail_under:
            below = True
            complain(f"lipcert: {what} at {outcome.run.eps_typed} is {reached:.4g}, below {plan.fail_under:g}")
    return below
