"""Builds the document of a report from runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lipcert.report import _figures
from lipcert.report._curves import families, span
from lipcert.report._images import examples
from lipcert.report._markdown import MARK, Document, Markdown, bold, code, escaped, heading, items, link, picture, table
from lipcert.report._words import about, above, known, listed, promises, radius, right, share, wilson
from lipcert.results import Run, Tally
from lipcert.settings import version

Eps = Sequence[tuple[float, str]]

OVERVIEW = (
    "radius: the median of the images predicted right; none for runs that stop at the verdict for ε. δ: probability "
    "that one radius is too large, over lipcert's own random draws; 0 is deterministic. Certificates that hold for "
    "smoothed(σ) are not about the network itself; right is there the share whose most drawn class is right."
)
_EXTREMES = 5
_MODULES = 12
_STEPS = 9  # rows of the table in place of the curve


def radii_of_interest(runs: Sequence[Run], named: Eps = ()) -> list[tuple[float, str]]:
    """The ε at which tables show results: ``named``, or by default those of the runs.

    Args:
        runs: at least one.
        named: values with the text that the user wrote.

    Returns:
        Values and texts, ascending, each value once.
    """
    asked = dict(named or [(run.eps, run.eps_typed) for run in runs])
    return sorted(asked.items())


def title(runs: Sequence[Run]) -> str:
    """A heading for the runs."""
    return f"Certificates of {runs[0].name}" if len(runs) == 1 else f"Certificates of {len(runs)} results"


def remarks(runs: Sequence[Run]) -> list[str]:
    """Remarks that a reader needs before comparing or quoting results, one line each."""
    found = [note for run in runs for note in run.notes]
    if len({run.eps for run in runs}) > 1:
        asked = ", ".join(f"{run.name} {run.eps_typed}" for run in runs)
        found.append(f"the runs asked for different ε ({asked}); the curves compare at every ε all the same")
    if len({(_data_name(run.summary), frozenset(row["index"] for row in run.rows)) for run in runs}) > 1:
        found.append("the runs are about different images, so that differences are not due to the models alone")
    if len({run.labelled for run in runs}) > 1:
        found.append("some runs have no labels: their shares count every certified image, right or wrong")
    if len({run.smoothed for run in runs}) > 1:
        found.append(
            "some certificates are about the network and some about a smoothed classifier, another function: compare, "
            "and do not add them up"
        )
    if any(run.smoothed and not run.noise.get("all_samples") for run in runs):
        found.append(
            "draws for a smoothed classifier end as soon as the verdict at the ε asked for is known: above it, more "
            "may be certifiable with --all-samples"
        )
    staged = [run for run in runs if run.staged]
    if staged:
        found.append(
            "staged certification stops at the verdict for the ε asked for: at any other ε, above or below it, more "
            "may be certifiable with --method anchored, and its median radius says nothing"
        )
    return found


def overview(runs: Sequence[Run], eps: Eps) -> tuple[list[str], list[list[str]]]:
    """Column names, and a row for each ε and run; for each ε the runs are sorted by certified share, largest first.

    δ is 0 if all radii are deterministic. After the runs there is a row for the best σ of each family.
    """
    attacked, labelled = any(run.attacked for run in runs), any(run.labelled for run in runs)
    smoothed = any(run.smoothed for run in runs)

    def row(name: str, run: Run, value: float, typed: str, median: str) -> list[str]:
        return [
            name,
            _percent(run.certified_at(value), run),
            _interval(run.certified_at(value), run),
            typed,
            *([_percent(run.correct, run) if run.labelled else "–"] if labelled else []),
            *([_percent(run.surviving_at(value), run) if run.attacked else "–"] if attacked else []),
            median,
            f"{run.delta:g}",
            str(len(run)),
            *([run.holds_for] if smoothed else []),
            run.network,
        ]

    columns = ["results", "certified", "95 %", "ε", *(["right" if smoothed else "clean"] if labelled else [])]
    columns += [
        *(["unbroken"] if attacked else []),
        "radius",
        "δ",
        "images",
        *(["holds for"] if smoothed else []),
        "model",
    ]
    rows = []
    for value, typed in eps:
        for run in sorted(runs, key=lambda run: -run.certified_at(value) / len(run)):
            rows.append(row(run.name, run, value, typed, _median(run) or "–"))
        for family in families(runs):
            rows.append(row("best σ", max(family, key=lambda run: run.certified_at(value)), value, typed, "–"))
    return columns, rows


def shares(run: Run, eps: Eps) -> list[tuple[str, int, bool]]:
    """The shares of one run: name, number of images, and whether the share is an estimate."""
    found = [(right(run), run.correct, False)] if run.labelled else []
    for value, typed in eps:
        found.append((f"{known(run)} at {typed}", run.certified_at(value), False))
        if run.attacked:
            what = f"accuracy under {run.attack_name}" if run.labelled else above(run)
            found.append((f"{what} at {typed}", run.surviving_at(value), True))
    return found


def facts(run: Run, eps: Eps) -> list[tuple[str, str]]:
    """The results of one run: (name, value) pairs."""
    found = [("images", str(len(run)))]
    for what, part, estimate in shares(run, eps):
        found.append((what, share(part, len(run)) + (", an estimate" if estimate else "")))
    return found + _others(run)


def record(run: Run, eps: Eps) -> dict[str, Any]:
    """The results of one run for JSON: counts, shares, and the shares' Wilson 95 % intervals."""

    def counted(part: int) -> dict[str, Any]:
        return {"images": part, "share": part / len(run), "interval": list(wilson(part, len(run)))}

    at = [
        {
            "eps": value,
            "eps_typed": typed,
            "certified": counted(run.certified_at(value)),
            **({"unbroken": counted(run.surviving_at(value))} if run.attacked else {}),
        }
        for value, typed in eps
    ]
    return {
        "results": str(run.path),
        "model": run.network,
        "weights_hash": run.weights_hash,
        "images": len(run),
        **({"correct": counted(run.correct)} if run.labelled else {}),
        "at": at,
        "median_radius": None if run.stopped else run.median_radius,
        "delta": run.delta,
        "holds_for": run.holds_for,
        "notes": run.notes,
    }


def _median(run: Run) -> str | None:
    """The median radius; None for runs that stop at the verdict, and where no image is predicted right."""
    return None if run.stopped or run.median_radius is None else radius(run.median_radius)


def _others(run: Run) -> list[tuple[str, str]]:
    """The results that are not shares of the images."""
    found = []
    if median := _median(run):
        found.append((f"median radius{' of those right' if run.labelled else ''}", median))
    found += [("rigor", run.rigor), ("holds for", about(run))]
    found += [("rounding", run.rounding)] if run.rounding else []
    if run.smoothed:
        found += [("abstained", share(run.abstained, len(run))), ("noisy images", f"{run.samples:,}")]
    decided = run.methods.most_common()
    return [*found, ("decided by", ", ".join(f"{name} {count}" for name, count in decided))]


def report(runs: Sequence[Run], named: Eps = (), *, figures: bool = True, images: bool = False) -> Document:
    """The whole report, most important parts first.

    Args:
        runs: at least one; several are compared.
        named: ε at which tables show results; by default those of the runs.
        figures: whether to draw with matplotlib; otherwise the curve is a table.
        images: whether to show available images next to their radii.
    """
    eps = radii_of_interest(runs, named)
    several = len(runs) > 1
    found = Document(title(runs), "")
    parts = [heading(1, found.title)]
    if several:
        columns, rows = overview(runs, eps)
        shown = [[link(name) if name != "best σ" else name, bold(part), *rest] for name, part, *rest in rows]
        parts += [table(columns, shown), OVERVIEW]
    else:
        parts += [_tiles(runs[0], eps), table(("", ""), [("images", str(len(runs[0]))), *_others(runs[0])], False)]
        parts.append(escaped(sentence(runs[0], eps)))
    notes = remarks(runs)
    parts += [items(notes)] if notes else []
    parts.append(heading(2, "Certified share over ε"))
    if figures:
        found.pictures["curve.svg"], found.curves = _figures.curve(runs)
        found.pictures["radii.svg"] = _figures.histogram(runs)
        parts += [picture("curve.svg", _described(runs, eps)), escaped(_caption(runs))]
        parts += [heading(2, "Certified radii"), picture("radii.svg", _radii_caption(runs)), _radii_caption(runs)]
    else:
        parts.append(_curve_as_table(runs))
    for i, run in enumerate(runs, start=1):
        parts += [heading(2, run.name), escaped(sentence(run, eps))] if several else []
        parts += _details(run, eps, 3 if several else 2, str(i if several else ""), found.pictures, figures, images)
    parts += [heading(2, "What these figures promise"), items(promises(runs)), MARK]
    found.text = "\n\n".join(parts) + "\n"
    return found


def _curve_as_table(runs: Sequence[Run]) -> str:
    """Certified shares at a few ε, which are rounded before the images are counted."""
    start, end, _ = span(runs)
    eps = [f"{value:.3g}" for value in np.linspace(start, end, _STEPS)]
    rows = [[text, *(_percent(run.certified_at(float(text)), run) for run in runs)] for text in eps]
    return table(("ε", *(run.name for run in runs)), rows)


def _tiles(run: Run, eps: Eps) -> str:
    """The shares with their intervals, in large type."""
    cells = []
    for what, part, estimate in shares(run, eps):
        counted = f"{part} of {len(run)}, 95 %: {_interval(part, run)}{', an estimate' if estimate else ''}"
        cells.append((what, bold(_percent(part, run)), counted))
    return table(("", "", ""), cells, numbers=False)


def sentence(run: Run, eps: Eps) -> str:
    """The result of one run as a self-contained text."""
    value, typed = next(((value, typed) for value, typed in eps if value == run.eps), eps[0])
    part = f"{100 * run.certified_at(value) / len(run):.1f} % of {len(run)} images"
    if run.smoothed:
        return f"{run.name}: {part} {_of_smoothed(run, typed)}"
    what = "are predicted right, and no" if run.labelled else "keep their prediction: no"
    changes = "changes that" if run.labelled else "changes it"
    text = f"{run.name}: {part} {what} ℓ2 perturbation of the pixels up to ε = {typed} {changes} ({run.rigor})."
    if run.attacked:
        text += (
            f" {run.attack} left {100 * run.surviving_at(value) / len(run):.1f} % standing there, which is an estimate "
            "from above; the truth lies between."
        )
    elif run.labelled:
        text += f" {100 * run.correct / len(run):.1f} % are predicted right at all; the truth lies between."
    return text


def _of_smoothed(run: Run, typed: str) -> str:
    what = "are predicted right by the smoothed classifier" if run.labelled else "keep the smoothed classifier's answer"
    text = f"{what}, and no ℓ2 perturbation of the pixels up to ε = {typed} changes that ({run.rigor}). "
    text += "This classifier answers with the class that the network gives most often under Gaussian noise of σ = "
    text += f"{run.noise.get('sigma', 0.0):g}; nothing is certified about the network itself."
    if run.labelled:
        text += f" For {100 * run.correct / len(run):.1f} % the class drawn most is right, an estimate from above."
    return text


def modules(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The modules with the largest gains, as paths and log10 gains, largest first; empty if the summary has none."""
    sums: dict[str, float] = {}
    for layer in (summary.get("bound") or {}).get("layers", ()):
        gain = layer.get("log10_gain", layer.get("gain"))
        if gain is not None and gain > 0:
            name = str(layer["path"]).removeprefix("net.") or "(model)"
            sums[name] = sums.get(name, 0.0) + gain
    return sorted(sums.items(), key=lambda item: item[1], reverse=True)[:_MODULES]


def _details(
    run: Run, eps: Eps, level: int, number: str, pictures: dict[str, str | bytes], figures: bool, images: bool
) -> list[str]:
    """The parts about one run; the names of its pictures end with ``number``."""
    parts = [heading(level, "Largest and smallest radii"), _extremes(run, number, pictures, images)]
    parts += [heading(level, "Which method decided"), _methods(run, eps)]
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
    return [*parts, heading(level, "How it was made"), *_made(run)]


def _methods(run: Run, eps: Eps) -> str:
    rows = []
    for name, count in run.methods.most_common():
        own = [row for row in run.rows if row["method"] == name]
        counted = [sum(row.get("correct", True) and row["radius"] > value for row in own) for value, _ in eps]
        tally = Tally(own)
        words = ["deterministic"] if "deterministic" in tally.rigors else []
        words += [f"probabilistic, δ ≤ {tally.delta:g}"] if tally.delta else []
        rows.append([name, str(count), *map(str, counted), listed(words)])
    return table(["method", "images", *(f"certified at {typed}" for _, typed in eps), "rigor"], rows)


def _extremes(run: Run, number: str, pictures: dict[str, str | bytes], images: bool) -> str:
    """The correctly predicted images with the largest and the smallest radii."""
    rows = sorted((row for row in run.rows if row.get("correct", True)), key=lambda row: -row["radius"])
    shown = rows if len(rows) <= 2 * _EXTREMES else [*rows[:_EXTREMES], *rows[-_EXTREMES:]]
    at_hand = examples(run, {row["index"] for row in shown}) if images else {}
    attacked = any(one.attacked for one in at_hand.values())
    columns = ["image", *(["as certified"] if at_hand else []), *(["attacked"] if attacked else [])]
    cells = []
    for row in shown:
        name, one = str(row["index"]), at_hand.get(row["index"])
        cell = [f"{name}, {row['file']}" if row.get("file") else name]
        for kind, content in (("image", one and one.image), ("attacked", one and one.attacked)):
            if not {"image": at_hand, "attacked": attacked}[kind]:
                continue
            file = f"{kind}{number}-{name}.png"
            if content and one:
                pictures[file] = content
                words = f"image {name}" if kind == "image" else f"attacked: class {one.predicted} at {one.distance:.3g}"
            cell.append(Markdown(picture(file, words) + (f" {words}" if kind == "attacked" else "")) if content else "")
        margin = row.get("margin")
        cell += [str(row["predicted"]), "–" if margin is None else f"{margin:.3g}", radius(row["radius"])]
        cells.append([*cell, str(row["method"])])
    return table([*columns, "predicted", "margin", "radius", "method"], cells)


def _noise(run: Run) -> str:
    text = ", ".join(f"{key} {value}" for key, value in run.noise.items())
    choice = run.summary.get("sigma_choice")
    return f"{text}; sigma was chosen on {choice['images']} other images" if choice else text


def _made(run: Run) -> list[str]:
    summary = run.summary
    data, bound = summary.get("data", {}), summary.get("bound") or {}
    rows = [
        ("model", run.architecture),
        *run.steps,
        ("weights, SHA-256", run.weights_hash or "–"),
        ("images", f"{len(run)} of {data.get('images') or 'a stream'}, {_data_name(summary)}"),
        ("preprocessing", run.preprocessing),
        ("method", str(summary.get("method", "–"))),
        ("holds for", about(run)),
        *([("noise", _noise(run))] if run.smoothed else []),
        *([("global Lipschitz bound", _global(bound))] if bound else []),
        *([("attack", run.attack)] if run.attacked else []),
        ("seconds", f"{run.seconds:.1f}"),
        ("lipcert", f"{summary.get('lipcert', '–')}; this report: {version()}"),
        *((str(key), _in_words(value)) for key, value in summary.get("environment", {}).items()),
    ]
    command = summary.get("command")
    made = code(command if isinstance(command, str) else shlex.join(command)) if command else ""
    return [table(("", ""), rows, numbers=False), *([made] if made else [])]


def _in_words(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def _global(bound: Mapping[str, Any]) -> str:
    log10 = bound.get("log10")
    return "infinite" if log10 is None else f"10^{log10 + 0.005:.2f}, {bound.get('rigor')}"


def _data_name(summary: Mapping[str, Any]) -> str:
    return str(summary.get("data", {}).get("spec", "–"))


def _percent(part: int, run: Run) -> str:
    return f"{100 * part / len(run):.1f} %"


def _interval(part: int, run: Run) -> str:
    low, high = wilson(part, len(run))
    return f"{100 * low:.1f}–{100 * high:.1f} %"


def _described(runs: Sequence[Run], eps: Eps) -> str:
    """A description of the curve for screen readers."""
    found = [f"{run.name} {_percent(run.certified_at(value), run)} at {typed}" for run in runs for value, typed in eps]
    return f"Certified share over ε: {', '.join(found)}"


def _caption(runs: Sequence[Run]) -> str:
    solid = listed(sorted({known(run) for run in runs}))
    text = f"Solid: {solid}, the share of the images with a radius larger than ε."
    if any(run.attacked for run in runs):
        text += " Dashed: the share that an attack left standing, an estimate from above."
    if any(run.labelled for run in runs):
        text += f" Dotted: {listed(sorted({right(run) for run in runs if run.labelled}))}."
    if families(runs):
        text += " Grey: the best σ at each ε, which are several classifiers."
    if any(run.stopped for run in runs):
        text += " Hatched: above the ε asked for, where runs that stop at the verdict did not look further."
    return f"{text} The truth lies between the solid line and the others."


def _radii_caption(runs: Sequence[Run]) -> str:
    return f"Certified radii{' of the images predicted right' if runs[0].labelled else ''}. Dots: the ε asked for."
