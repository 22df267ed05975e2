"""Tables as text of at most 100 columns, and how the order of the methods here compares with the paper's."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import ceil, floor, sqrt
from typing import Any

from benchmarks.papers.recipes import IMAGES, RECIPES, TRAININGS, Row, Scale, Table

WIDTH = 100
_SHORT = {
    "certified": "cert.", "parameters in millions": "", "parameters": "", "seconds an epoch": "s/epoch",
    "training flops 1e13": "", "global bound": "global", "local bound": "local", "clean, deviation": "±",
    "pgd, deviation": "±", "certified, deviation": "±",
}  # fmt: skip
_HERE = ("clean", "pgd", "gloro", "local", "anchored", "bound", "s/epoch", "const.")
_GROUPS = ("as in the paper", "too close to say", "the other way round")
_ENOUGH = 100  # images for a comparison
_NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tinyimagenet": "TinyImageNet"}


def text(table: Table, scale: Scale, rows: Sequence[Mapping[str, Any]], order: Mapping[str, Any] | None) -> str:
    """The rows, one line each; those that need a data set, or an explanation, below."""
    if table.measure is not None:
        return "\n".join(wrapped("; ".join(_parts(row))) for row in rows)
    ran = [row for row in rows if isinstance(row.get("here"), dict)] if not _needs(rows) else []
    lines: list[str] = []
    if ran:
        lines += [wrapped(scaled(table, scale)), "", *_columns(table, ran)]
    others: dict[str, list[str]] = {}
    for row in rows:
        if row not in ran:
            figures = ", ".join(f"{name} {_number(value)}" for name, value in row.get("paper", {}).items() if value)
            why = f"needs {row['needs']}" if "needs" in row else row["here"]
            others.setdefault(why, []).append(f"{row.get('name', table.title)}" + (f": {figures}" if figures else ""))
    for why, names in others.items():
        lines += ["", wrapped(why), *(wrapped(name, "  ") for name in names)]
    if order is not None:
        lines += ["", wrapped(said(order))]
    return "\n".join(lines)


def _columns(table: Table, ran: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows that ran, under two lines of headings; the paper's FLOPs and sizes are in the file alone."""
    cells = [_here(row) for row in ran]
    shown = [key for key in _HERE if any(key in each for each in cells)]
    columns = [column for column in table.columns if _SHORT.get(column) != ""]
    one = len({row["data"] for row in ran}) == 1
    names = [short(row) if one else str(row["name"]) for row in ran]
    ours = [shown, *([each.get(key, "–") for key in shown] for each in cells)]
    theirs = [
        [_SHORT.get(column, column) for column in columns],
        *([_number(row["paper"][column]) for column in columns] for row in ran),
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
    errors of the test images are too close to say; the images are the same for both, so that this errs towards saying
    nothing. How much one training differs from the next is not in these errors.
    """
    ran = [row for row in rows if "data" in row]
    if table.ordered not in table.columns or not ran:
        return None
    listed = {row.name: row for row in table.rows}
    single: list[Mapping[str, Any]] = []
    for row in ran:
        if all(_apart(listed[row["name"]], listed[one["name"]]) for one in single):
            single.append(row)
    timed = table.ordered != "certified"
    groups: dict[str, list[list[Any]]] = {name: [] for name in _GROUPS}
    for one, two in combinations(single, 2):
        p, q = (row["paper"][table.ordered] for row in (one, two))
        if None in (p, q) or p == q or _apart(listed[one["name"]], listed[two["name"]]) != 1:
            continue
        better, worse = (one, two) if (p > q) is not timed else (two, one)
        (a, n), (b, m) = (_value(row, timed) for row in (better, worse))
        here = b - a if timed else 100 * (a - b)
        near = not timed and abs(a - b) <= 2 * sqrt(a * (1 - a) / n + b * (1 - b) / m)
        group = _GROUPS[1] if near else _GROUPS[0] if here > 0 else _GROUPS[2]
        groups[group].append([short(better), short(worse), round(here, 2), round(abs(p - q), 2)])
        if group == _GROUPS[2] and not timed:
            groups[group][-1].append(
                "; the one has {} clean and a bound of {}, the other {} and {}".format(
                    *(figure for row in (better, worse) for figure in _outside(row["here"]))
                )
            )
    training = {TRAININGS[r.training][str(r.data)] for r in table.rows if r.training and r.data == ran[0]["data"]}
    return {
        "by": table.ordered, **groups,
        "trained": sorted({(row["epochs"], row["images"]) for row in ran}) if scale.images else [],
        "epochs of the paper": sorted({t.epochs for t in training}), "images of the paper": IMAGES[str(ran[0]["data"])],
    }  # fmt: skip


def _outside(here: Mapping[str, Any]) -> tuple[str, str]:
    """What a certified share is made of: accuracy and bound, the local one where it was measured."""
    local = here.get("local bound, estimated")
    bound = bounded(here["log10 bound"])
    return f"{100 * here['clean']:.1f} %", f"{bound}, near images {local:.3g}" if local is not None else bound


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
            f"{a} ahead of {b} by {paper:.3g} in the paper, by {here:.3g} here{''.join(why)}"
            for a, b, here, paper, *why in pairs
        )
        shown = named and name != _GROUPS[0]
        parts.append(f"{len(pairs)} {name}" + (f" ({named})" if shown else ""))
    whole = "the paper's" if len(groups[0]) == total else "not the paper's" if groups[2] else "open in part"
    pairs = "pair" if total == 1 else f"{total} pairs"
    words = f"By {by}, the order of the {pairs} of rows that differ in one thing is {whole}: {', '.join(parts)}"
    epochs = " or ".join(str(number) for number in order["epochs of the paper"])
    if order["trained"]:
        trained = " or ".join(f"{passes} epochs of {images:,} images" for passes, images in order["trained"])
        words += (
            f". Each network was trained once, for {trained}; the paper's for {epochs} of "
            f"{order['images of the paper']:,}"
        )
    return f"{words}."


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
        parts += [
            " ".join(f"{k}={v}" for k, v in made.items()) for n, made in scale.sizes.items() if model.startswith(n)
        ]
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
    if "constant units" in found:
        cells["const."] = f"{100 * found['constant units']:.1f}"
    return cells


def _value(row: Mapping[str, Any], timed: bool) -> tuple[float, int]:
    """The figure that is compared, and its images.

    This is the best certificate on the images that all were tried on; certificates of few images are left out.
    """
    if timed:
        return row["here"]["seconds an epoch"], 0
    shares = row["here"]["certified"]
    counts = [each["images"] for each in shares.values()]
    fewest = min((count for count in counts if count >= _ENOUGH), default=max(counts))
    return max(each["certified"] for each in shares.values() if each["images"] == fewest), fewest


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if abs(value) < 1e4 else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


def bounded(log10: float) -> str:
    """A bound, rounded up to as many digits as :func:`_number` shows."""
    unit = 10.0 ** (floor(log10) - (2 if log10 < 4 else 1))
    return _number(ceil(10**log10 / unit) * unit)


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
