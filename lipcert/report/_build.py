"""Builds the document of a report from runs."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lipcert.errors import counted
from lipcert.report import _figures
from lipcert.report._artifact import by_model, title
from lipcert.report._figures import span
from lipcert.report._markdown import MARK, Document, bold, code, escaped, heading, items, link, picture, table
from lipcert.report._words import (
    about,
    class_name,
    evidence,
    listed,
    lower_bound,
    promises,
    radius,
    right,
    seconds,
    upper_bound,
)
from lipcert.results import Run, share, wilson
from lipcert.settings import shown, version

Eps = Sequence[tuple[float, str]]

OVERVIEW = (
    "radius: median over correctly classified images, or over all without labels; none for runs that stop at the "
    "verdict for ε. δ: the largest probability that the radius of an image is too large, over random draws of lipcert. "
    "Certificates valid for smoothed(σ) are not about the network itself, and neither is their accuracy."
)
_EXTREMES = 5
_MODULES = 12
_STEPS = 9  # rows of the table in place of the curve


def radii_of_interest(runs: Sequence[Run], named: Eps = ()) -> list[tuple[float, str]]:
    """The ε at which tables show results: ``named``, or by default those of the runs."""
    targets = dict(named or [target for run in runs for target in run.every_eps])
    return sorted(targets.items())


def remarks(runs: Sequence[Run]) -> list[str]:
    """Remarks that a reader needs before comparing or quoting results, one line each."""
    notes = [note for run in runs for note in run.notes]
    if len({run.eps for run in runs}) > 1:
        targets = ", ".join(f"{run.name} {run.eps_typed}" for run in runs)
        notes.append(f"runs with different ε ({targets}): runs that stop at the verdict may certify less at other ε")
    if len({(_data_name(run.summary), frozenset(row["index"] for row in run.rows)) for run in runs}) > 1:
        notes.append("runs on different images: differences may be due to the images")
    notes += [
        f"{run.name}: radii are ℓ2 distances of {run.perturbed}, and say nothing about perturbations of the pixels"
        for run in runs
        if run.inside
    ]
    if len({run.labelled for run in runs}) > 1:
        notes.append("some runs have no labels: their percentages count every certified image, correct or not")
    if len({run.smoothed for run in runs}) > 1:
        notes.append(
            "some certificates are about the network, some about a smoothed classifier: they are not comparable"
        )
    if any(run.smoothed and run.stopped for run in runs):
        notes.append("draws stop once the verdict at ε is known; --all-samples may certify larger radii")
    if any(run.staged and len(run.every_eps) == 1 for run in runs):
        notes.append(
            "staged certification stops at the verdict for ε: for other ε, give several (--eps 36/255,0.5), or "
            "--method anchored; the median radius is not meaningful"
        )
    return notes


def overview(
    runs: Sequence[Run], eps: Eps, *, in_linf: bool = False, costs: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Column names, and a row for each ε and run; for each ε the runs are sorted by certified share, largest first.

    With ``costs`` there are columns for global Lipschitz bounds and times too.
    """
    attacked, labelled = any(run.attacked for run in runs), any(run.labelled for run in runs)
    smoothed, medians = any(run.smoothed for run in runs), any(_median(run) for run in runs)
    clean = "under noise" if all(run.smoothed for run in runs) else "correct" if smoothed else "clean"
    bounds = costs and any(run.summary.get("bound") for run in runs)
    cells: list[tuple[bool, str, Callable[[Run, float, str], str]]] = [
        (True, "results", lambda run, value, typed: run.name),
        (True, "certified", lambda run, value, typed: _percent(run.certified_at(value), run)),
        (True, "95 % CI", lambda run, value, typed: run.interval(run.certified_at(value))),
        (True, "ε", lambda run, value, typed: typed),
        (in_linf, "ℓ∞, weak", lambda run, value, typed: shown(linf(run, value) or 0.0)),
        (labelled, clean, lambda run, *_: _percent(run.correct, run, run.labelled)),
        (attacked, "attacked", lambda run, value, typed: _percent(run.surviving_at(value), run, run.attacked)),
        (medians, "radius", lambda run, value, typed: _median(run) or "–"),
        (True, "δ", lambda run, value, typed: f"{run.delta:g}"),
        (True, "images", lambda run, value, typed: str(len(run))),
        (smoothed, "valid for", lambda run, value, typed: run.holds_for),
        (bounds, "Lipschitz bound", lambda run, *_: _global(run.summary.get("bound"))),
        (costs, "seconds", lambda run, *_: seconds(run).partition(" (")[0]),
        (True, "model", lambda run, value, typed: run.named),
    ]
    columns = {name: cell for asked, name, cell in cells if asked}
    rows = [
        [cell(run, value, typed) for cell in columns.values()]
        for value, typed in eps
        for run in sorted(runs, key=lambda run: -run.certified_at(value) / len(run))
    ]
    return [*columns], rows


def shares(run: Run, eps: Eps) -> list[tuple[str, int, bool]]:
    """The shares of one run: name, number of images, and whether the share comes from an attack."""
    entries = [(right(run), run.correct, False)] if run.labelled else []
    for value, typed in eps:
        if run.attacked:
            what = upper_bound(run) if run.labelled else f"not broken by {run.attack_name}"
            entries.append((f"{what} at {typed}", run.surviving_at(value), True))
        entries.append((f"{lower_bound(run)} at {typed}", run.certified_at(value), False))
    return entries


def linf(run: Run, radius: float) -> float | None:
    """The ℓ∞ ball inside the ℓ2 ball of this radius: r/√d for d values in an image, rounded down."""
    size = (run.summary.get("preprocessing") or {}).get("input_size")
    return radius / math.sqrt(math.prod(size)) * (1 - 1e-15) if size and not run.inside else None


def facts(run: Run, eps: Eps, *, in_linf: bool = False) -> list[tuple[str, str]]:
    """The results of one run: (name, value) pairs; for ℓ∞ too if that is asked for."""
    partly = "" if run.complete else "; the run did not finish"
    entries = [("model", run.named), ("images", f"{len(run)}{partly}")]
    for what, part, attacked in shares(run, eps):
        entries.append((what, run.share(part) + (", upper bound" if attacked else "")))
    entries += _others(run)
    for typed, ball in ((typed, linf(run, value)) for value, typed in eps if in_linf):
        if ball is not None:
            entries.append(
                (f"ℓ∞ at {typed}", f"the same for changes of each value by up to ε/√d = {shown(ball)}, which is weak")
            )
    return entries


def record(run: Run, eps: Eps) -> dict[str, Any]:
    """The results of one run for programs: what the tables say, as numbers; shares with Wilson's 95 % intervals."""

    def shared(part: int) -> dict[str, Any]:
        ends = list(wilson(part, len(run))) if run.sampled else None
        return {"images": part, "share": part / len(run) if len(run) else None, "interval": ends}

    at = [
        {
            "eps": value,
            "eps_typed": typed,
            "linf": linf(run, value),
            "certified": shared(run.certified_at(value)),
            **({"unbroken": shared(run.surviving_at(value))} if run.attacked else {}),
        }
        for value, typed in eps
    ]
    return {
        "results": str(run.path),
        "model": run.named,
        "network": run.network,
        "weights_hash": run.weights_hash,
        "perturbed": run.perturbed,
        "holds_for": run.holds_for,
        "dtype": run.summary.get("dtype"),
        "images": len(run),
        "complete": run.complete,
        **({"correct": shared(run.correct)} if run.labelled else {}),
        "at": at,
        "median_radius": None if run.stopped else run.median_radius,
        "rigor": run.weakest,
        "delta": run.delta,
        **run.evidence,
        "methods": dict(run.methods),
        **({"abstained": shared(run.abstained), "samples": run.samples} if run.smoothed else {}),
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "notes": run.notes,
    }


def lines(runs: Sequence[Run], eps: Eps) -> list[dict[str, Any]]:
    """A line for each ε and run, for CSV: the numbers of :func:`record`, with the names of nested ones joined."""

    def flat(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in entries.items():
            if name == "interval":
                yield from zip(("low", "high"), value or (None, None), strict=True)
            elif isinstance(value, Mapping):
                yield from ((f"{name}_{key}", one) for key, one in flat(value))
            else:
                yield name, value

    found = []
    for run in runs:
        one = record(run, eps) | {"results": run.name, **run.words}
        rest = {
            name: value for name, value in one.items() if name not in ("results", "model", "at", "methods", "notes")
        }
        for at in one["at"]:
            found.append(dict(flat({"results": one["results"], "model": one["model"], **at, **rest})))
    return found


def _median(run: Run) -> str | None:
    """The median radius; None for runs that stop at the verdict, and where no image is predicted right."""
    return None if run.stopped or run.median_radius is None else radius(run.median_radius)


def _constant(run: Run) -> list[tuple[str, str]]:
    """A remark on a classifier that repeats one class, and is no better than the most frequent label everywhere."""
    predicted = Counter(row["predicted"] for row in run.rows if not row.get("abstained"))
    labels = Counter(row["label"] for row in run.rows if row.get("label") is not None)
    if not predicted or not labels:
        return []
    [(repeated, count)], [(_, most)] = predicted.most_common(1), labels.most_common(1)
    if not run.correct <= most < count:
        return []
    text = f"class {class_name(run, repeated)} for {count} of {len(run)} images; {run.correct} are classified correctly"
    return [("predicted", f"{text}, and the most frequent label alone would be right for {most}")]


def _others(run: Run) -> list[tuple[str, str]]:
    """The results that are not shares of the images."""
    entries = _constant(run)
    if median := _median(run):
        entries.append((f"median radius{', correctly classified' if run.labelled else ''}", median))
    entries += [("rigor", run.rigor), ("valid for", about(run))]
    entries += evidence(run)
    entries += [("denoiser", f"{run.denoiser}, in front of the network")] if run.denoiser else []
    if run.smoothed:
        entries += [("abstained", run.share(run.abstained)), ("noisy images", f"{run.samples:,}")]
    methods = ", ".join(f"{name} ({counted(count, 'image')})" for name, count in run.methods.most_common())
    return [*entries, ("method", methods)]


def report(runs: Sequence[Run], named: Eps = (), *, figures: bool = True) -> Document:
    """The whole report, most important parts first; without ``figures``, which need matplotlib, curves are tables."""
    eps = radii_of_interest(runs, named)
    several = len(runs) > 1
    name = title(runs[0]) if len(by_model(runs)) == 1 else f"{len(runs)} results"
    document = Document(f"Certificates: {name}", "")
    parts = [heading(1, document.title)]
    if several:
        columns, rows = overview(runs, eps)
        linked = [[link(row[0]), bold(row[1]), *row[2:]] for row in rows]
        parts += [table(columns, linked), OVERVIEW]
    else:
        parts += [_tiles(runs[0], eps), table(("", ""), [*facts(runs[0], ())[:2], *_others(runs[0])], False)]
        parts.append(escaped(sentence(runs[0], eps)))
    notes = remarks(runs)
    parts += [items(notes)] if notes else []
    parts.append(
        heading(2, "Certified accuracy over ε" if all(run.labelled for run in runs) else "Certified share over ε")
    )
    if figures:
        document.pictures["curve.svg"], document.curves = _figures.curve(runs)
        document.pictures["radii.svg"] = _figures.histogram(runs)
        parts += [picture("curve.svg", _described(runs, eps)), escaped(_caption(runs))]
        parts += [heading(2, "Certified radii"), picture("radii.svg", _radii_caption(runs)), _radii_caption(runs)]
    else:
        parts.append(_curve_as_table(runs))
    for i, run in enumerate(runs, start=1):
        parts += [heading(2, run.name), escaped(sentence(run, eps))] if several else []
        parts += _details(run, eps, 3 if several else 2, str(i if several else ""), document.pictures, figures)
    parts += [heading(2, "What these figures mean"), items(promises(runs)), MARK]
    document.text = "\n\n".join(parts) + "\n"
    return document


def _curve_as_table(runs: Sequence[Run]) -> str:
    """Certified shares at a few ε, which are rounded before the images are counted."""
    start, end, _ = span(runs)
    eps = [f"{value:.3g}" for value in np.linspace(start, end, _STEPS)]
    rows = [[text, *(_percent(run.certified_at(float(text)), run) for run in runs)] for text in eps]
    return table(("ε", *(run.name for run in runs)), rows)


def _tiles(run: Run, eps: Eps) -> str:
    """The shares with their intervals, in large type."""
    cells = []
    for what, part, attacked in shares(run, eps):
        sampled = f", 95 % CI {run.interval(part)}" if run.sampled else ""
        counted = f"{part} of {len(run)}{sampled}{', upper bound' if attacked else ''}"
        cells.append((what, bold(_percent(part, run)), counted))
    return table(("", "", ""), cells, numbers=False)


def sentence(run: Run, eps: Eps) -> str:
    """The result of one run as a self-contained text."""
    value, typed = next(((value, typed) for value, typed in eps if value == run.eps), eps[0])
    count, certified = len(run), run.certified_at(value)
    images = counted(count, "image") if run.complete else f"the {count} images that a stopped run had processed"
    what = "classified correctly and certified" if run.labelled else "certified"
    by = "the smoothed classifier" if run.smoothed else "the network"
    text = f"{run.name}: {certified} of {images} ({100 * certified / count:.1f} %) are {what} at ε = {typed}: "
    within = "" if run.inside else " within [0, 1]"
    text += f"no ℓ2 perturbation of {run.perturbed}{within} up to ε changes the class that {by} predicts ({run.rigor})."
    if run.labelled:
        text += f" Without perturbation, {by} gives the right class for {share(run.correct, count, False)}"
        text += f", and abstains on {run.abstained}." if run.smoothed else "."
    if run.attacked:
        surviving = share(run.surviving_at(value), count, False)
        known = ", which is the robust share" if run.surviving_at(value) == certified else ""
        text += f" Under {run.attack}, {surviving} remain so{known or '; the robust share lies between the two'}."
    if run.smoothed:
        network = f"the network, with the denoiser {run.denoiser} in front," if run.denoiser else "the network"
        text += f" The smoothed classifier returns the class that {network} predicts most often under Gaussian noise "
        text += f"of σ = {run.noise.get('sigma', 0.0):g}; nothing is certified about the network itself."
    return text


def modules(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The modules with the largest gains, as paths and log10 gains, largest first; empty if the summary has none."""
    sums: dict[str, float] = {}
    for layer in (summary.get("bound") or {}).get("layers", ()):
        gain = layer.get("log10_gain")
        if gain is not None and gain > 0:
            name = str(layer["path"]).removeprefix("net.") or "(model)"
            sums[name] = sums.get(name, 0.0) + gain
    return sorted(sums.items(), key=lambda item: item[1], reverse=True)[:_MODULES]


def _details(run: Run, eps: Eps, level: int, number: str, pictures: dict[str, str], figures: bool) -> list[str]:
    """The parts about one run; the names of its pictures end with ``number``."""
    parts = _extremes(run, level)
    budget = modules(run.summary)
    if budget:
        caption = "log10 of each module's gain, the factor by which it can enlarge a perturbation; largest first."
        parts += [heading(level, "Lipschitz budget by module"), caption]
        if figures:
            pictures[f"budget{number}.svg"] = _figures.budget(budget)
            worst = ", ".join(f"{name} {gain:.2f}" for name, gain in budget[:3])
            parts.append(picture(f"budget{number}.svg", f"Bars of log10 gains, the largest: {worst}"))
        else:
            parts.append(table(("module", "log10 of gain"), [(n, f"{g:.2f}") for n, g in budget]))
    return [*parts, heading(level, "Settings"), *_settings(run)]


def _extremes(run: Run, level: int) -> list[str]:
    """The correctly classified images with the largest radii, and those with the smallest."""
    rows = sorted((row for row in run.rows if row.get("correct", True)), key=lambda row: -row["radius"])
    if len(rows) <= 2 * _EXTREMES:
        groups = {"Images": rows}
    else:
        groups = {"Largest radii": rows[:_EXTREMES], "Smallest radii": rows[: -_EXTREMES - 1 : -1]}
    return [part for name, some in groups.items() for part in (heading(level, name), _images_table(run, some))]


def _images_table(run: Run, rows: Sequence[Mapping[str, Any]]) -> str:
    """The images of some rows with prediction, margin and radius; only columns with content."""
    lines = [
        {
            "image": f"{row['index']}, {row['file']}" if row.get("file") else str(row["index"]),
            "predicted": class_name(run, row["predicted"]),
            "margin": "" if row.get("margin") is None else f"{row['margin']:.3g}",
            "radius": radius(row["radius"]),
            "method": str(row["method"]),
        }
        for row in rows
    ]
    columns = [name for name in (lines[0] if lines else ()) if any(line[name] for line in lines)]
    return table(columns, [[line[name] for name in columns] for line in lines])


def _noise(run: Run) -> str:
    text = ", ".join(f"{key} {value}" for key, value in run.noise.items())
    choice = run.summary.get("sigma_choice")
    return f"{text}; sigma was chosen on {counted(choice['images'], 'image')} kept out of the run" if choice else text


def _settings(run: Run) -> list[str]:
    summary, spec = run.summary, _data_name(run.summary)
    data, bound = summary.get("data", {}), summary.get("bound") or {}
    rows = [
        ("model", run.architecture),
        *run.steps,
        ("SHA-256 of the weights' tensors", run.weights_hash or "–"),
        ("images", f"{len(run)} of {data.get('images', '–')}, {os.path.basename(spec) or spec}"),
        ("preprocessing", run.preprocessing),
        ("method", str(summary.get("method", "–"))),
        ("valid for", about(run)),
        *([("noise", _noise(run))] if run.smoothed else []),
        *([("global Lipschitz bound", _global(bound))] if bound else []),
        *([("attack", run.attack)] if run.attacked else []),
        ("seconds", seconds(run)),
        ("lipcert", f"{summary.get('lipcert', '–')}; this report: {version()}"),
    ]
    listing = {"data": spec, **(summary.get("environment") or {}), "assumed": summary.get("assumptions") or []}
    folded = [(str(key), _listed(value)) for key, value in listing.items() if value]
    command = [code(summary["command"])] if summary.get("command") else []
    summed = "<details><summary>Command, machine and assumptions</summary>"
    return [table(("", ""), rows, False), summed, *command, table(("", ""), folded, False), "</details>"]


def _listed(value: Any) -> str:
    """A value of a summary in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _global(bound: Mapping[str, Any] | None) -> str:
    if not bound:
        return "–"
    log10 = bound.get("log10")
    return "infinite" if log10 is None else f"10^{log10 + 0.005:.2f}, {bound.get('rigor')}"


def _data_name(summary: Mapping[str, Any]) -> str:
    return str(summary.get("data", {}).get("spec", "–"))


def _percent(part: int, run: Run, known: bool = True) -> str:
    return f"{100 * part / len(run):.1f} %" if known else "–"


def _described(runs: Sequence[Run], eps: Eps) -> str:
    """A description of the curve for screen readers."""
    points = [f"{run.name} {_percent(run.certified_at(value), run)} at {typed}" for run in runs for value, typed in eps]
    return f"Certified share over ε: {', '.join(points)}"


def _caption(runs: Sequence[Run]) -> str:
    text = f"Solid: {listed(sorted({lower_bound(run) for run in runs}))}, the images with a radius larger than ε."
    if any(run.attacked for run in runs):
        text += " Dashed: accuracy under attack, an upper bound."
    if any(run.labelled for run in runs):
        text += f" Dotted: {listed(sorted({right(run) for run in runs if run.labelled}))}."
    if any(run.stopped for run in runs):
        text += " Hatched: above the largest ε of a run that stops at the verdict; larger radii were not computed."
    return f"{text} The robust share lies between the solid line and the others."


def _radii_caption(runs: Sequence[Run]) -> str:
    return f"Certified radii{' of correctly classified images' if runs[0].labelled else ''}. Dotted: the ε of the run."
