"""Tables as text of at most 100 columns, and how the order of the methods here compares with the paper's."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import ceil, floor, log, sqrt
from typing import Any

from benchmarks.papers.recipes import IMAGES, RECIPES, TRAININGS, Row, Scale, Table

WIDTH = 100
_SHORT = {
    "certified": "cert.", "parameters in millions": "", "parameters": "", "seconds an epoch": "s/epoch",
    "training flops 1e13": "", "global bound": "global", "local bound": "local", "clean, deviation": "±",
    "pgd, deviation": "±", "certified, deviation": "±",
}  # fmt: skip
_HERE = ("clean", "pgd", "gloro", "local", "anchored", "bound", "no bound", "zeros", "s/epoch", "const.")
NO_BOUND = "log10 of the paper's Lip, no bound"
_GROUPS = ("as in the paper", "too close to say", "the other way round")
_ENOUGH = 100  # images for a comparison
_LARGER = 0.02  # a difference of log10 bounds that counts
_NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tinyimagenet": "TinyImageNet"}


def text(table: Table, scale: Scale, rows: Sequence[Mapping[str, Any]], order: Mapping[str, Any] | None) -> str:
    """The rows, one line each; those that need a data set, or an explanation, below."""
    if table.measure is not None:
        texts = ["; ".join(_parts(row)) for row in rows]
        return "\n".join(wrapped(line) for line in [*texts, *([table.note] if table.note else [])])
    ran = [row for row in rows if isinstance(row.get("here"), dict)] if not _needs(rows) else []
    lines: list[str] = []
    if ran:
        lines += [wrapped(scaled(table, scale)), "", *_columns(table, ran)]
    others: dict[str, list[str]] = {}
    for row in rows:
        if row not in ran:
            figures = ", ".join(f"{name} {figure(value)}" for name, value in row.get("paper", {}).items() if value)
            why = f"needs {row['needs']}" if "needs" in row else row["here"]
            others.setdefault(why, []).append(f"{row.get('name', table.title)}" + (f": {figures}" if figures else ""))
    for why, names in others.items():
        lines += ["", wrapped(why), *(wrapped(name, "  ") for name in names)]
    if order is not None:
        lines += ["", wrapped(said(order))]
    if table.note:
        lines += ["", wrapped(table.note)]
    return "\n".join(lines)


def _columns(table: Table, ran: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows that ran, under two lines of headings; the paper's FLOPs and sizes are in the file alone."""
    cells = [_here(row) for row in ran]
    timed = table.ordered != "certified"
    shown = [key for key in _HERE if any(key in each for each in cells) and (timed or key != "s/epoch")]
    columns = [column for column in table.columns if _SHORT.get(column) != ""]
    one = len({row["data"] for row in ran}) == 1
    names = [short(row) if one else str(row["name"]) for row in ran]
    ours = [shown, *([each.get(key, "–") for key in shown] for each in cells)]
    theirs = [
        [_SHORT.get(column, column) for column in columns],
        *([figure(row["paper"][column]) for column in columns] for row in ran),
    ]
    wide = max(map(len, names))
    left, right = _aligned(ours, 2), _aligned(theirs, 2)
    if wide + len(left[0]) + len(right[0]) + 2 > WIDTH:
        left, right = _aligned(ours, 1), _aligned(theirs, 1)
    heading = f"{'':{wide}}{'here':>{len(left[0])}} |{' the paper':>{len(right[0])}}"
    lines = (f"{name:{wide}}{a} |{b}" for name, a, b in zip(["", *names], left, right, strict=True))
    return [heading, *lines]


def _aligned(lines: Sequence[Sequence[str]], gap: int) -> list[str]:
    wide = [max(map(len, column)) + gap for column in zip(*lines, strict=True)]
    return ["".join(f"{cell:>{n}}" for cell, n in zip(line, wide, strict=True)) for line in lines]


def compared(table: Table, scale: Scale, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How rows that differ in one thing stand here and in the paper: pairs, in groups, with both differences.

    A network that stands in two rows counts once. Each pair has the row that is better in the paper, the other one, and
    by how much it is better here and in the paper (points of certified shares, seconds). Shares within two standard
    errors of the test images are too close to say; most images are the same for both, so that this errs towards saying
    nothing. How much one training differs from the next is not in these errors. None where no row has enough
    images, as in a trial.
    """
    timed = table.ordered != "certified"
    ran = [row for row in rows if "data" in row and (timed or _shares(row))]
    if table.ordered not in table.columns or not ran:
        return None
    listed = {row.name: row for row in table.rows}
    single: list[Mapping[str, Any]] = []
    for row in ran:
        if all(_apart(listed[row["name"]], listed[one["name"]]) for one in single):
            single.append(row)
    groups: dict[str, list[list[Any]]] = {name: [] for name in _GROUPS}
    for one, two in combinations(single, 2):
        p, q = (row["paper"][table.ordered] for row in (one, two))
        if None in (p, q) or p == q or _apart(listed[one["name"]], listed[two["name"]]) != 1:
            continue
        better, worse = (one, two) if (p > q) is not timed else (two, one)
        (a, n), (b, m) = _values(better, worse, timed)
        here = b - a if timed else 100 * (a - b)
        near = not timed and abs(a - b) <= 2 * sqrt(a * (1 - a) / n + b * (1 - b) / m)
        group = _GROUPS[1] if near else _GROUPS[0] if here > 0 else _GROUPS[2]
        groups[group].append([short(better), short(worse), round(here, 2), round(abs(p - q), 2)])
        if group == _GROUPS[2] and not timed:
            groups[group][-1].append(_reason(better["here"], worse["here"]))
    training = {TRAININGS[r.training][str(r.data)] for r in table.rows if r.training and r.data == ran[0]["data"]}
    return {
        "by": table.ordered, **groups,
        "trained": sorted({(row["epochs"], row["images"]) for row in ran}) if scale.images else [],
        "epochs of the paper": sorted({t.epochs for t in training}), "images of the paper": IMAGES[str(ran[0]["data"])],
    }  # fmt: skip


def _reason(better: Mapping[str, Any], worse: Mapping[str, Any]) -> str:
    """Why what is better in the paper is not so here: certified shares come from accuracy, margins and bounds."""
    first, second = (100 * here["clean"] for here in (better, worse))
    if first < second - 1:
        return f"has learned less here: {first:.1f} % clean, the other {second:.1f} %"
    near = all("local bound, estimated" in here for here in (better, worse))
    log10 = [log(here["local bound, estimated"], 10) if near else here["log10 bound"] for here in (better, worse)]
    mine, other = (f"{10**value:.3g}" if near else bounded(value) for value in log10)
    images = " near images" if near else ""
    if log10[0] > log10[1] + _LARGER:
        return f"has a larger bound here{images}: {mine}, the other {other}"
    return (
        f"has smaller margins here: {first:.1f} % clean and a bound of {mine}{images}, the other {second:.1f} % "
        f"and {other}"
    )


def _apart(one: Row, two: Row) -> int:
    """In how many things two rows differ; the bounded activations belong to the losses of Local-Lip."""
    things: list[dict[str, Any]] = []
    for row in (one, two):
        given = dict(part.split("=") for part in row.model_args.split())
        act = "maxmin" if "maxmin" in given.pop("act_layer", "") else "relu"
        things.append({"data": row.data, "recipe": row.recipe, "model": row.model, "act": act, **given})
        things[-1] |= {} if row.sparsity is None else {"sparsity": row.sparsity}
    first, second = things
    return sum(first.get(key) != second.get(key) for key in {*first, *second})


def said(order: Mapping[str, Any]) -> str:
    """The comparison in words."""
    groups = [order[name] for name in _GROUPS]
    total, by = sum(map(len, groups)), "certified share" if order["by"] == "certified" else order["by"]
    if not total:
        return "No two rows were run that differ in one thing, so that nothing is said about the order."
    parts = []
    for name, pairs in zip(_GROUPS, groups, strict=True):
        named = "; ".join(
            f"{a} ahead of {b} by {paper:.3g} in the paper, by {here:.3g} here{''.join(f'; {a} {one}' for one in why)}"
            for a, b, here, paper, *why in pairs
        )
        shown = named and name != _GROUPS[0]
        parts.append(f"{len(pairs)} {name}" + (f" ({named})" if shown else ""))
    whole = "the paper's" if len(groups[0]) == total else "not the paper's" if groups[2] else "open in part"
    pairs = "pair" if total == 1 else f"{total} pairs"
    words = f"By {by}, the order of the {pairs} of rows that differ in one thing is {whole}: {', '.join(parts)}."
    return f"{words} {how_long(order)}".strip()


def how_long(order: Mapping[str, Any]) -> str:
    """How long networks were trained here and in the paper; empty at full scale."""
    if not order["trained"]:
        return ""
    by_count: dict[int, list[str]] = {}
    for passes, images in order["trained"]:
        by_count.setdefault(images, []).append(str(passes))
    here = " or ".join(f"{' or '.join(passes)} epochs of {images:,} images" for images, passes in by_count.items())
    epochs = " or ".join(str(number) for number in order["epochs of the paper"])
    words = f"Each network was trained once, for {here}; the paper's for {epochs} of {order['images of the paper']:,}"
    late = " What learns slowly is behind in so short a training." if order[_GROUPS[2]] else ""
    return f"{words}.{late}"


def _needs(rows: Sequence[Mapping[str, Any]]) -> bool:
    return not any("here" in row for row in rows)


def scaled(table: Table, scale: Scale) -> str:
    """What the figures of a table were measured on, in words."""
    asked = [row for row in table.rows if row.recipe is not None and row.model is not None]
    used = {method for row in asked for method in RECIPES[str(row.recipe)].methods}
    methods = ", ".join(f"{count:,} by {method}" for method, count in scale.tested.items() if method in used)
    words = f"Test images: {methods}; {scale.attacked:,} attacked by PGD. Shares in %."
    if scale.images is None:
        return words
    starts = {start for named in (scale.longer, scale.optimizers, scale.sizes) for start in named}
    trained: dict[str, str] = {}
    for row in asked:
        model = str(row.model)
        images, batch, epochs = scale.passes(model)
        parts = [f"{images:,} training images", f"{epochs} epochs", f"batches of {batch}"]
        parts += [update.removeprefix("--optimizer ") for update in [scale.updates(model)] if update]
        fitting = [start for start in scale.sizes if model.startswith(start)]
        sizes = scale.sizes[max(fitting, key=len)] if fitting else {}
        parts += [" ".join(f"{key}={value}" for key, value in sizes.items())] if sizes else []
        parts += [f"widths divided by {scale.thinner}"] if "width=" in row.model_args and scale.thinner > 1 else []
        trained.setdefault(max((s for s in starts if model.startswith(s)), key=len, default=""), ", ".join(parts))
    alone = len(trained) == 1
    groups = "; ".join(parts if alone else f"{start or 'others'}: {parts}" for start, parts in trained.items())
    return f"{groups}. {words}"


def short(row: Mapping[str, Any]) -> str:
    return str(row["name"]).removeprefix(f"{_NAMES.get(row['data'], '')}, ")


def _here(row: Mapping[str, Any]) -> dict[str, str]:
    found = row["here"]
    cells = {"clean": f"{100 * found['clean']:.1f}", "pgd": f"{100 * found['pgd']:.1f}"}
    cells |= {method: f"{100 * each['certified']:.1f}" for method, each in found["certified"].items()}
    cells["bound"] = bounded(found["log10 bound"])
    cells["s/epoch"] = f"{found['seconds an epoch']:.1f}"
    if found.get("sparsity"):
        cells["zeros"] = f"{100 * found['sparsity']:.0f}"
    if NO_BOUND in found:
        cells["no bound"] = figure(10 ** found[NO_BOUND])
    if "constant units" in found:
        cells["const."] = f"{100 * found['constant units']:.1f}"
    return cells


def _shares(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The certified shares of a row that are of enough images."""
    return [each for each in row["here"]["certified"].values() if each["images"] >= _ENOUGH]


def _values(one: Mapping[str, Any], two: Mapping[str, Any], timed: bool) -> list[tuple[float, int]]:
    """The figures of two rows that are compared, each with its images.

    A share is that of the best certificate, on the same images if both rows have one there. These are few if ``local``
    certifies more than ``gloro`` for one of the rows; certificates of less than :data:`_ENOUGH` images are left out.
    """
    if timed:
        return [(row["here"]["seconds an epoch"], 0) for row in (one, two)]
    shares = [_shares(one), _shares(two)]
    better = [each for each in (*shares[0], *shares[1]) if each["certified"] > each.get("gloro on these", -1)]
    count = min(each["images"] for each in better)
    found = []
    for known in shares:
        same = [each for each in known if each["images"] == count] or known
        best = max(same, key=lambda each: float(each["certified"]))
        found.append((best["certified"], best["images"]))
    return found


def figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if abs(value) < 1e4 else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


def bounded(log10: float) -> str:
    """A bound, rounded up to as many digits as :func:`figure` shows."""
    if log10 == -math.inf:  # all weights of a layer are zero
        return "0"
    unit = 10.0 ** (floor(log10) - (2 if log10 < 4 else 1))
    return figure(ceil(10**log10 / unit) * unit)


def _parts(row: Mapping[str, Any]) -> Iterable[str]:
    for key, value in row.items():
        if isinstance(value, float):
            yield f"{key} {value:.4g}"
        elif isinstance(value, Mapping):
            yield f"{key}: {', '.join(_parts(value))}"
        else:
            yield str(value) if key == "name" else f"{key} {json.dumps(value, ensure_ascii=False)}"


def wrapped(line: str, indent: str = "") -> str:
    """A line in lines of at most 100 columns."""
    return textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ", break_long_words=False)
