"""What a report says: from runs to blocks."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lipcert._version import version
from lipcert.report import _figures
from lipcert.report._curves import families
from lipcert.report._document import Block, Code, Figure, Heading, Items, Table, Text
from lipcert.report._text import text_plot
from lipcert.report._words import about, above, known, listed, promises, radius, right, share
from lipcert.results import Run

Eps = Sequence[tuple[float, str]]

OVERVIEW = (
    "radius: the median of the images predicted right; staged runs have none. δ: probability that one radius is too "
    "large, over lipcert's own random draws; 0 is deterministic. Certificates that hold for smoothed(σ) are not about "
    "the network itself."
)
_EXTREMES = 5
_MODULES = 12


def radii_of_interest(runs: Sequence[Run], named: Eps = ()) -> list[tuple[float, str]]:
    """The ε at which tables give figures: those named, else those that the runs were certified for.

    Args:
        runs: at least one.
        named: values with the text the user wrote.

    Returns:
        Values and texts, ascending, each value once.
    """
    asked = dict(named or [(run.eps, run.eps_typed) for run in runs])
    return sorted(asked.items())


def title(runs: Sequence[Run]) -> str:
    """A heading for the runs."""
    return f"Certificates of {runs[0].name}" if len(runs) == 1 else f"Certificates of {len(runs)} results"


def remarks(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before comparing or quoting figures, one line each."""
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
            "draws for a smoothed classifier end as soon as the verdict at the ε asked for is known: more may be "
            "certifiable above it with --all-samples"
        )
    staged = [run for run in runs if run.staged]
    if staged:
        found.append(
            "staged certification stops at the first radius beyond the ε asked for: above it, more may be certifiable, "
            "and its median radius says nothing"
        )
    if any(run.attacked for run in staged):
        found.append(
            "staged certification spends only cheap methods on images that the attack broke within the ε asked for: "
            "below it, more may be certifiable"
        )
    return found


def overview(runs: Sequence[Run], eps: Eps) -> Table:
    """One row for each run and ε: shares, median radius, and δ, which is 0 where all radii are deterministic."""
    attacked, labelled = any(run.attacked for run in runs), any(run.labelled for run in runs)
    smoothed = any(run.smoothed for run in runs)
    columns = [
        "results",
        *(["holds for"] if smoothed else []),
        "images",
        *(["clean"] if labelled else []),
        "ε",
        "certified",
    ]
    columns += [*(["unbroken"] if attacked else []), "radius", "δ"]
    rows = []
    for run in runs:
        clean = _percent(run.correct, run) if run.labelled else "–"
        for value, typed in eps:
            row = [
                run.name,
                *([run.holds_for] if smoothed else []),
                str(len(run)),
                *([clean] if labelled else []),
                typed,
                _percent(run.certified_at(value), run),
            ]
            if attacked:
                row.append(_percent(run.surviving_at(value), run) if run.attacked else "–")
            rows.append([*row, "–" if run.staged else radius(run.median_radius or 0.0), f"{run.delta:g}"])
    for family in families(runs):
        for value, typed in eps:
            best = max(family, key=lambda run: run.certified_at(value))
            row = ["best σ", best.holds_for, str(len(best)), *(["–"] if labelled else []), typed]
            row += [_percent(best.certified_at(value), best), *(["–"] if attacked else []), "–", f"{best.delta:g}"]
            rows.append(row)
    return Table(columns, rows)


def facts(run: Run, eps: Eps) -> list[tuple[str, str]]:
    """The figures of one run by name."""
    found = [("images", str(len(run)))]
    if run.labelled:
        found.append((right(run), share(run.correct, len(run))))
    for value, typed in eps:
        found.append((f"{known(run)} at {typed}", share(run.certified_at(value), len(run))))
        if run.attacked:
            what = f"accuracy under {run.attack_name}" if run.labelled else above(run)
            found.append((f"{what} at {typed}", f"{share(run.surviving_at(value), len(run))}, an estimate"))
    if not run.staged:
        found.append((f"median radius{' of those right' if run.labelled else ''}", radius(run.median_radius or 0.0)))
    found += [("rigor", run.rigor), ("holds for", about(run))]
    if run.smoothed:
        found += [("abstained", share(run.abstained, len(run))), ("noisy images", f"{run.samples:,}")]
    decided = run.methods.most_common()
    return [*found, ("decided by", ", ".join(f"{name} {count}" for name, count in decided))]


def report(runs: Sequence[Run], named: Eps = (), *, figures: bool = True) -> list[Block]:
    """The whole report.

    Args:
        runs: at least one; several are compared.
        named: ε at which tables give figures; by default those of the runs.
        figures: whether to draw with matplotlib; otherwise the curve is drawn in characters.

    Returns:
        Blocks, from the most to the least important.
    """
    eps = radii_of_interest(runs, named)
    several = len(runs) > 1
    blocks: list[Block] = [Heading(1, title(runs)), *(Text(sentence(run, eps)) for run in runs)]
    if several:
        blocks += [overview(runs, eps), Text(OVERVIEW)]
    else:
        blocks.append(Table(("", ""), facts(runs[0], eps), numbers=False))
    notes = remarks(runs)
    blocks += [Items(notes)] if notes else []
    blocks.append(Heading(2, "Certified share over ε"))
    if figures:
        blocks.append(Figure("curve", _figures.curve(runs), _caption(runs)))
        blocks += [Heading(2, "Certified radii"), Figure("radii", _figures.histogram(runs), _radii_caption(runs))]
    else:
        blocks.append(Code(text_plot(runs)))
    for i, run in enumerate(runs, start=1):
        blocks += [Heading(2, run.name)] if several else []
        blocks += _details(run, eps, 3 if several else 2, f"budget{i if several else ''}" if figures else None)
    return [*blocks, Heading(2, "What these figures promise"), Items(promises(runs))]


def sentence(run: Run, eps: Eps) -> str:
    """The result of one run in words that stand alone."""
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
    """The modules that stretch most, as paths and log10 of their gains, largest first; none if the summary has none."""
    sums: dict[str, float] = {}
    for layer in (summary.get("bound") or {}).get("layers", ()):
        if layer["gain"] is not None and layer["gain"] > 0:
            name = str(layer["path"]).removeprefix("net.") or "(model)"
            sums[name] = sums.get(name, 0.0) + layer["gain"]
    return sorted(sums.items(), key=lambda item: item[1], reverse=True)[:_MODULES]


def _details(run: Run, eps: Eps, level: int, figure: str | None) -> list[Block]:
    """The parts about one run; the budget as a figure of that name, or as a table."""
    blocks: list[Block] = [Heading(level, "Which method decided"), _methods(run, eps)]
    budget = modules(run.summary)
    if budget:
        blocks.append(Heading(level, "Lipschitz budget by module"))
        caption = "log10 of how much each module can stretch a perturbation, the largest first."
        if figure:
            blocks.append(Figure(figure, _figures.budget(budget), caption))
        else:
            blocks += [Text(caption), Table(("module", "log10 of gain"), [(n, f"{g:.2f}") for n, g in budget])]
    blocks += [Heading(level, "Largest and smallest radii"), _extremes(run)]
    return [*blocks, Heading(level, "How it was made"), *_made(run)]


def _methods(run: Run, eps: Eps) -> Table:
    rows = []
    for name, count in run.methods.most_common():
        own = [row for row in run.rows if row["method"] == name]
        counted = [sum(row.get("correct", True) and row["radius"] > value for row in own) for value, _ in eps]
        words = Counter(str(row["rigor"]) for row in own)
        rows.append([name, str(count), *map(str, counted), listed(sorted(words))])
    return Table(["method", "images", *(f"certified at {typed}" for _, typed in eps), "rigor"], rows)


def _extremes(run: Run) -> Table:
    """The images with the largest and the smallest radii among those predicted right."""
    rows = sorted((row for row in run.rows if row.get("correct", True)), key=lambda row: -row["radius"])
    shown = rows if len(rows) <= 2 * _EXTREMES else [*rows[:_EXTREMES], *rows[-_EXTREMES:]]
    columns = ["image", "predicted", "margin", "radius", "method"]
    cells = []
    for row in shown:
        margin = row.get("margin")
        cells.append(
            [
                str(row["index"]),
                str(row["predicted"]),
                "–" if margin is None else f"{margin:.3g}",
                radius(row["radius"]),
                str(row["method"]),
            ]
        )
    return Table(columns, cells)


def _made(run: Run) -> list[Block]:
    summary = run.summary
    data, bound = summary.get("data", {}), summary.get("bound") or {}
    rows = [
        ("model", run.architecture),
        ("weights, SHA-256", run.weights_hash or "–"),
        ("images", f"{len(run)} of {data.get('images') or 'a stream'}, {_data_name(summary)}"),
        ("preprocessing", run.preprocessing),
        ("method", str(summary.get("method", "–"))),
        ("holds for", about(run)),
        *([("noise", ", ".join(f"{key} {value}" for key, value in run.noise.items()))] if run.smoothed else []),
        *([("global Lipschitz bound", _global(bound))] if bound else []),
        *([("attack", run.attack)] if run.attacked else []),
        ("seconds", f"{run.seconds:.1f}"),
        ("lipcert", f"{summary.get('lipcert', '–')}; this report: {version()}"),
        *((str(key), str(value)) for key, value in summary.get("environment", {}).items()),
    ]
    blocks: list[Block] = [Table(("", ""), rows, numbers=False)]
    command = summary.get("command")
    if command:
        blocks.append(Code(command if isinstance(command, str) else shlex.join(command)))
    return blocks


def _global(bound: Mapping[str, Any]) -> str:
    log10 = bound.get("log10")
    return "infinite" if log10 is None else f"10^{log10 + 0.005:.2f}, {bound.get('rigor')}"


def _data_name(summary: Mapping[str, Any]) -> str:
    return str(summary.get("data", {}).get("spec", "–"))


def _percent(part: int, run: Run) -> str:
    return f"{100 * part / len(run):.1f} %"


def _caption(runs: Sequence[Run]) -> str:
    solid = listed(sorted({known(run) for run in runs}))
    text = f"Solid: {solid}, the share of the images with a radius larger than ε."
    if any(run.attacked for run in runs):
        text += " Dashed: the share that an attack left standing, an estimate from above."
    if any(run.labelled for run in runs):
        text += f" Dotted: {listed(sorted({right(run) for run in runs if run.labelled}))}."
    if families(runs):
        text += " Grey: the best σ at each ε, which are several classifiers."
    if any(run.staged for run in runs):
        text += " Hatched: above the ε asked for, where staged certification did not look further."
    return f"{text} The truth lies between the solid line and the others."


def _radii_caption(runs: Sequence[Run]) -> str:
    return f"Certified radii{' of the images predicted right' if runs[0].labelled else ''}."
