"""Runs ``lipcert certify``, after its options are checked."""

import math
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import typer

from lipcert.attacks import PGD, Attack, AutoAttack
from lipcert.certifier import RATE, Certifier, certifier_for, triage
from lipcert.denoisers import check_noise
from lipcert.errors import InputError, Interrupted, LipcertError
from lipcert.inputs.data import Images, open_images
from lipcert.inputs.preprocessing import Preprocessing
from lipcert.inputs.processes import Processes
from lipcert.model import Model
from lipcert.numerics import check_environment
from lipcert.results import Tally, shard_path, sigma_choice_of, summary, summary_path
from lipcert.results.description import describe
from lipcert.results.progress import certify_in_memory, certify_to_file
from lipcert.settings import AUTO, STAGED, CertifySettings
from lipcert.smoothing import CHOOSING, SELECTION, choose_sigma

from ._advice import Known, advise
from ._loading import load_model, model_options, show_preprocessing
from ._output import default_name
from ._print import (
    annotate,
    busy,
    command,
    complain,
    lower,
    percent,
    print_facts,
    print_json,
    print_table,
    progress,
    say,
    share,
    upper,
    words_of,
)
from ._torchrun import torchrun


def attack_of(attack: bool, autoattack: bool) -> Attack | None:
    """The attack that the two options select."""
    return AutoAttack() if autoattack else PGD() if attack else None


def run(
    asked: Sequence[CertifySettings],
    pixels: Preprocessing,
    names: list[str],
    *,
    several_models: bool,
    shard: tuple[int, int] | None,
    out: Path | None,
    data: str | None,
    lists: Mapping[str, Any],
    limit: int | None,
    device: str,
    fail_under: float | None,
    as_json: bool,
    annotations: str | None,
    loading: Mapping[str, Any],
) -> None:
    """Certifies the images for every model and every σ, prints the results, and sets the exit code."""
    processes = Processes.of_torchrun()
    part, parts = shard or (processes.rank, processes.count)
    if shard and processes.count > 1:
        raise InputError("--shard and torchrun both divide the images; use only one of them")
    if parts > 1 and out is None:
        raise InputError("parts of a run need --out, the file in which their rows are combined")
    several = several_models or len(asked) > 1
    plan = _Plan(
        asked, pixels, partial(load_model, **loading), data, lists, limit, part, parts, shard is not None, fail_under
    )
    with torchrun():
        if several_models:
            outcomes, failed = _certify_all(plan, names, out, processes)
        else:
            outcomes, failed = _certify_one(plan, names[0] if names else None, out, processes), []

        if as_json:
            found = [outcome.summary for outcome in outcomes]
            print_json({"models": found, "failed": failed} if several else found[0])
        elif several:
            _print_comparison(outcomes, plan, out)
        else:
            _print_outcome(outcomes[0], plan, out)
        below = _judge(outcomes, plan, annotations) if processes.first else False
    if failed:
        raise typer.Exit(2)
    if below:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Plan:
    """The settings of the command for every model."""

    settings: Sequence[CertifySettings]
    pixels: Preprocessing
    load: partial[Model]
    data: str | None
    lists: Mapping[str, Any]
    limit: int | None
    part: int
    parts: int
    sharded: bool
    fail_under: float | None

    @property
    def eps(self) -> str:
        """ε as the user typed it."""
        return self.settings[0].eps_typed


@dataclass(frozen=True)
class _Outcome:
    """The results of one model."""

    name: str
    tally: Tally
    summary: dict[str, Any]
    log10_bound: float | None
    path: Path | None
    words: Sequence[str] = ()
    channels: int = 3

    @property
    def median_radius(self) -> float | None:
        """The median radius; None if searches stop as soon as the verdict at ε is known."""
        stopped = self.summary["method"] == "staged" or (self.tally.samples and not self.summary["all_samples"])
        return None if stopped else self.tally.median_radius

    @property
    def certified(self) -> float:
        """The fraction of images that are certified, and predicted correctly if labels are known."""
        accuracy = self.tally.certified_accuracy
        return self.tally.certified / max(len(self.tally), 1) if accuracy is None else accuracy


def _certify_all(
    plan: _Plan, names: list[str], out: Path | None, processes: Processes
) -> tuple[list[_Outcome], list[dict[str, str]]]:
    """Certifies the models one after the other; reports models that cannot be certified and continues."""
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--out must be a folder for several models, and {out} cannot be created: {error}"
            ) from error
    outcomes: list[_Outcome] = []
    failed: list[dict[str, str]] = []
    for name in names:
        path = None if out is None else out / default_name(name).with_suffix("").with_suffix(".jsonl").name
        try:
            outcomes += _certify_one(plan, name, path, processes)
        except Interrupted:
            raise
        except LipcertError as error:
            if processes.count > 1:  # the other processes would wait for this one
                raise
            complain(f"lipcert: {name}: {error}")
            failed.append({"model": name, "error": str(error)})
    if not outcomes:
        raise InputError(f"none of {len(names)} models could be certified")
    return outcomes, failed


def _certify_one(plan: _Plan, name: str | None, out: Path | None, processes: Processes) -> list[_Outcome]:
    """Certifies one model; for several σ once each, with files such as ``r.sigma-0.25.jsonl`` for ``r.jsonl``."""
    check_environment(
        torch.device("cpu")
    )  # another rounding mode, for instance, would make the model's file look damaged
    loaded = plan.load(name)
    plan.pixels.apply(loaded)
    images = open_images(plan.data, loaded, limit=plan.limit, **plan.lists)
    if plan.fail_under is not None and not images.labelled:
        raise InputError("--fail-under needs labels, and these images have no labels for the classes of the model")
    outcomes = []
    for asked in plan.settings:
        choice = _sigma_choice(loaded, asked, images, out, processes) if asked.sigma == AUTO else None
        settings = asked if choice is None else replace(asked, eps=cast(Any, asked.eps_typed), sigma=choice["sigma"])
        label, path = name or str(loaded.source.get("name", "the model")), out
        if len(plan.settings) > 1:
            label += f", sigma {settings.sigma:g}"
            path = out and out.with_name(f"{out.stem}.sigma-{settings.sigma:g}{out.suffix}")
        outcome = _certify_with(settings, choice, plan, loaded, images, label, path, processes)
        words = model_options(name, **plan.load.keywords, pixels=plan.pixels)
        outcomes.append(replace(outcome, words=words, channels=loaded.input_size[0]))
    return outcomes


def _sigma_choice(
    loaded: Model, asked: CertifySettings, images: Images, out: Path | None, processes: Processes
) -> dict[str, Any]:
    """σ for ``--sigma auto``, and what speaks for it: on images that the run leaves out, or as it was chosen before."""
    if out is not None and (known := sigma_choice_of(out)) is not None:
        return known
    others = images.others(CHOOSING)
    if others is None:
        raise InputError(
            "--sigma auto is chosen on images that are not certified, and there are none here: certify a part of the "
            "images with --limit, or give --sigma a number"
        )
    with progress("choosing sigma") as update:
        choice = choose_sigma(
            loaded,
            others.images,
            others.labels,
            asked,
            indices=others.indices,
            progress=lambda line: update(0, None, f"choosing sigma: {line}"),
        )
    found: dict[str, Any] = asdict(choice)
    found["shares"] = {f"{sigma:g}": share for sigma, share in choice.shares.items()}
    found = processes.gather(found)[0]
    tried = ", ".join(f"{sigma} {100 * share:.0f} %" for sigma, share in found["shares"].items())
    of = "" if choice.labelled else " (without labels: the class drawn most)"
    say(
        f"sigma: {choice.sigma:g}, chosen on {choice.images} other images than those that are certified, by the share "
        f"that looks certified there{of}: {tried}"
    )
    return found


def _certify_with(
    settings: CertifySettings,
    choice: dict[str, Any] | None,
    plan: _Plan,
    loaded: Model,
    images: Images,
    label: str,
    out: Path | None,
    processes: Processes,
) -> _Outcome:
    if settings.method == STAGED and settings.at is None:
        check_noise(loaded)
        _triage(loaded, settings, images)
    with progress("reading the network") as update:
        certifier = certifier_for(loaded, settings, progress=update)
    for stage, reason in certifier.notes.items():
        say(f"note: {stage}: {reason}")
    description = describe(loaded, images, certifier, shlex.join(["lipcert", *sys.argv[1:]]))
    if choice is not None:
        description["sigma_choice"] = choice

    def started(rows: int) -> None:
        if isinstance(certifier, Certifier):
            _show_methods(certifier)
        show_preprocessing(images, loaded)
        if rows:
            say(f"{out}: continuing after {rows} images")

    with progress("certifying", images.length) as update:
        done, total = 0, images.length

        def counted(rows: int, of: int | None) -> None:
            nonlocal done, total
            done, total = rows, of
            update(done, total)

        certifier.watch = lambda stage, within: update(done, total, f"certifying: {stage}")
        if out is None:
            started(0)
            tally = certify_in_memory(certifier, images, counted)
        else:
            tally = certify_to_file(
                certifier,
                images,
                description,
                out,
                part=plan.part,
                parts=plan.parts,
                processes=processes,
                started=started,
                progress=counted,
            )
    path = out if out is None or processes.count > 1 else shard_path(out, plan.part, plan.parts)
    bound = None if certifier.bound is None else certifier.bound.log10
    return _Outcome(label, tally, summary(description, tally, complete=True), bound, path)


def _triage(model: Model, settings: CertifySettings, images: Images) -> None:
    """Prints, seconds after the start, what can be hoped for: accuracy, first-order limits and a short attack."""
    parameters = sum(p.numel() for p in model.parameters())
    size = "×".join(str(side) for side in model.input_size[1:])
    say(f"network: {parameters / 1e6:.1f} M parameters, {size} pixels; certifying at {settings.eps_typed}")
    with busy("first images"):
        found = triage(model, images, settings.eps)
    if found is None:
        return
    right = "" if found.correct is None else f"{found.correct} correctly classified; "
    low, high = (lower(limit) if math.isfinite(limit) else "none" for limit in (found.limits[0], found.limits[-1]))
    reach = f"{low} to {high}, above {settings.eps_typed} for {found.reachable}"
    limits = f"first-order limit {reach}" if low != "none" else "no gradient, so no first-order limit"
    say(f"first {found.images} images: {right}{limits}; PGD of {found.steps} steps changes {found.broken}")


def _show_methods(certifier: Certifier) -> None:
    """Prints the estimated time of each method, and why others are skipped."""
    if certifier.method == STAGED:
        costs = [f"{name} {_duration(method.work / RATE)}" for name, method in certifier.methods.items()]
        say(f"methods, at most per image: {', '.join(costs)}")
    reasons: dict[str, list[str]] = {}
    for name, reason in certifier.skipped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        say(f"note: {', '.join(names)} skipped: {reason}; force one with --method")


def _duration(seconds: float) -> str:
    return "< 0.1 s" if seconds < 0.1 else f"{seconds:.2g} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _print_outcome(outcome: _Outcome, plan: _Plan, out: Path | None) -> None:
    tally = outcome.tally
    facts = [("images", str(len(tally)))]
    if tally.labelled:
        what = "most drawn class is right" if tally.samples else "clean accuracy"
        facts.append((what, share(tally.correct, len(tally))))
        if tally.accuracy_under_attack is not None and (attack := outcome.summary["attack"]):
            facts.append((f"accuracy under {attack['name']}", share(tally.withstood, len(tally))))
        facts.append((f"certified accuracy at {plan.eps}", share(tally.certified_correct, len(tally))))
    elif len(tally):
        if tally.attacked:
            facts.append((f"attacked at {plan.eps}", share(tally.broken, len(tally))))
        facts.append((f"certified at {plan.eps}", share(tally.certified, len(tally))))
    if outcome.median_radius is not None:
        facts.append((f"median radius{' of those right' if tally.labelled else ''}", lower(outcome.median_radius)))
    if outcome.log10_bound is not None:
        facts.append(("Lipschitz bound", upper(outcome.log10_bound)))
    rigors = ["deterministic"] if "deterministic" in tally.rigors else []
    rigors += [f"probabilistic, δ ≤ {tally.delta:g} per image"] if tally.delta else []
    facts.append(("rigor", ", ".join(rigors)))
    settings = plan.settings[0]
    if settings.noise:
        facts += _facts_of_draws(tally, settings, outcome.summary)
    else:
        facts.append(("holds for", "real arithmetic" if settings.dtype == "real" else settings.dtype))
        facts += [("rounding", tally.rounding)] if tally.rounding else []
    facts.append(("method", ", ".join(f"{name} ({count} images)" for name, count in tally.methods.most_common())))
    facts.append(("seconds", f"{tally.seconds:.1f} ({tally.seconds / max(len(tally), 1):.3g} per image)"))
    if outcome.path is not None:
        facts += [("rows", str(outcome.path)), ("summary", str(summary_path(outcome.path)))]
    facts += _why_not(tally, plan.eps)
    facts.append(("next", _next(plan, out, [outcome])))
    print_facts(facts)


def _why_not(tally: Tally, eps: str) -> list[tuple[str, str]]:
    """How many images have no certificate, by reason; empty unless certification was staged."""
    reasons = Counter(row["reason"] for row in tally.rows if row.get("reason"))
    words = {
        "first-order limit": f"margin over gradient norm is at most {eps}, so no bound of lipcert reaches it",
        "attacked": f"an attack changes the prediction within {eps}",
        "bounds too loose": "no method's bound is tight enough",
    }
    return [("not certified", f"{count}: {words.get(reason, reason)}") for reason, count in reasons.most_common()]


def _next(plan: _Plan, out: Path | None, outcomes: Sequence[_Outcome]) -> str:
    """A suggestion for the next command."""
    if plan.sharded and plan.part + 1 < plan.parts:
        return f"the same with --shard {plan.part + 2}/{plan.parts}; without --shard it puts the rows together"
    if plan.sharded and plan.parts > 1:
        return "the same without --shard, which puts the rows together"
    if len(outcomes) > 1 and out is not None and not out.is_dir():
        return command("report", *(outcome.path for outcome in outcomes), "--html", out.with_suffix(".html"))
    first, several = outcomes[0], len(outcomes) > 1
    known = Known(
        first.words,
        first.channels,
        plan.eps,
        first.log10_bound,
        plan.data,
        words_of(plan.lists),
        denoised="--denoiser" in first.words,
        images=len(first.tally),
        certified=1 if several or plan.settings[0].noise else first.tally.certified,
        rows=out,
    )
    return advise(known)


def _facts_of_draws(tally: Tally, settings: CertifySettings, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts about a smoothed classifier: the noise, abstentions and samples."""
    place = "" if settings.smooth_at is None else f" at {settings.smooth_at}"
    dtype = "" if settings.dtype == "real" else f" in {settings.dtype}"
    noise = f"noise of sigma = {summary['sigma']:g}{place}"
    facts = [("holds for", f"the network{dtype} smoothed by {noise}, not the network itself")]
    if tally.samples:
        facts.append(("abstained", share(tally.abstained, len(tally))))
        most = len(tally) * (settings.samples + SELECTION)
        saved = f"{tally.samples:,} of {most:,}: {100 * (1 - tally.samples / most):.1f} % saved"
        facts.append(("noisy images", f"{saved}; {tally.samples / max(tally.seconds, 1e-9):,.0f} a second"))
    return facts


def _print_comparison(outcomes: Sequence[_Outcome], plan: _Plan, out: Path | None) -> None:
    """Prints one line per model, with the largest certified fraction first."""
    attacked = any(outcome.tally.attacked for outcome in outcomes)
    right = "right" if plan.settings[0].noise else "clean"  # the class drawn most is not the network's own
    columns = ["model", "images", right, *(["attacked"] if attacked else []), f"certified at {plan.eps}"]
    columns += ["median radius", "Lipschitz bound", "seconds"]
    rows = []
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.certified):
        tally = outcome.tally
        radius = outcome.median_radius
        rows.append(
            [
                outcome.name,
                str(len(tally)),
                percent(tally.accuracy),
                *([percent(tally.accuracy_under_attack)] if attacked else []),
                percent(outcome.certified),
                "-" if radius is None else lower(radius),
                "-" if outcome.log10_bound is None else upper(outcome.log10_bound),
                f"{tally.seconds:.1f}",
            ]
        )
    print_table(columns, rows, optional=("seconds", "Lipschitz bound"))
    say(f"next: {_next(plan, out, outcomes)}")


def _judge(outcomes: Sequence[_Outcome], plan: _Plan, annotations: str | None) -> bool:
    """Says which models are below what was asked for; whether there are any."""
    below = False
    for outcome in outcomes:
        reached = outcome.tally.certified_accuracy
        what = "the certified accuracy" if len(outcomes) == 1 else f"{outcome.name}: the certified accuracy"
        if reached is None:
            continue
        if plan.fail_under is not None and reached < plan.fail_under:
            below = True
            line = f"{what} at {plan.eps} is {reached:.4g}, below {plan.fail_under:g}"
            complain(f"lipcert: {line}")
            if annotations is not None:
                annotate("error", line)
        elif annotations is not None:
            annotate("notice", f"{what} at {plan.eps} is {reached:.4g}")
    return below
