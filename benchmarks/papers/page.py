"""The sections of the page of measurements that come from the four papers' tables and figures."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks._page import percent, section, table
from benchmarks.papers.shown import NO_BOUND, bounded, figure, how_long
from benchmarks.papers.tables import TABLES

Known = Mapping[str, Any]
_ESTIMATE = "local bound, estimated"
_LOCAL = """Constant units and the local bound are means over 100 test images in balls of radius ε; the local bound
comes from power iteration and is no certificate."""
_FEWER = """Methods that cost more were tried on fewer images, the first ones; of these, `local` certifies all that
`gloro` does."""
_LISTED = {f"{one.paper}, {one.number}": one for one in TABLES}
_INTRODUCTION = """## The papers' tables

The next sections have tables of CertViT, LoFAST, LiResNet and Local-Lip, each made by a command such as `python -m
benchmarks.papers --paper certvit --table 1 --data cifar10=FOLDER`. At scale `small` a row takes minutes of a core: it
shows that the commands work and which way methods differ, and reproduces no figure. Parameters, sparsity, training
FLOPs, CPU seconds and the commands of each row are in `benchmarks/results/papers.json`.
"""


def of_papers(known: Known) -> list[str]:
    """All sections.

    Args:
        known: the file ``benchmarks/results/papers.json``.
    """
    parts = [_INTRODUCTION, *trained(known), behind(known), *_vits(known), _attention(known), *_more_of_lofast(known)]
    return [*parts, *_courses(known), _constants(known)]


def trained(known: Known) -> list[str]:
    """A section for each table whose networks were trained here."""
    sections = []
    for name, listed in _LISTED.items():
        for scale in ("small", "full"):
            stored = known.get(f"{name}, {scale}", {})
            ran = [row for row in stored.get("rows", ()) if isinstance(row.get("here"), dict)]
            if not ran or "conditions" not in stored:
                continue
            timed = "seconds an epoch" in ran[0]["paper"]
            columns, rows = _seconds(ran) if timed else _shares(ran)
            notes = [_FEWER] if any(name.startswith("local,") for name in columns) else []
            notes += [_LOCAL] if _ESTIMATE in columns else []
            notes += [text for text in (listed.note, stored.get("remark")) if text]
            notes += [f"{row['name']}: {row['remark']}" for row in ran if "remark" in row]
            said = [_filled(" ".join([f"{listed.title}.", stored["conditions"], *notes])), *_missing(stored["rows"])]
            paper, _, number = name.partition(", ")
            heading = f"Table {number} of {paper}, at scale {scale}"
            sections.append(section(heading, columns, rows, "\n".join([*said, *_order(stored.get("order"))])))
    return sections


def _missing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why rows have no figures."""
    why: dict[str, list[str]] = {}
    for row in rows:
        if isinstance(row.get("here"), str):
            why.setdefault(row["here"].partition(":")[0], []).append(row["name"])
    parts = [
        f"{len(names)} quoted alone, as lipcert has no such method or network"
        if reason == "quoted"
        else f"{reason}: {'; '.join(names)}" if reason == "not run"
        else f"{len(names)} that {'need' if len(names) > 1 else 'needs'} {reason.removeprefix('needs ')}"
        for reason, names in why.items()
    ]  # fmt: skip
    return [_filled(f"Other rows: {', '.join(parts)}.")] if parts else []


def _order(order: Mapping[str, Any] | None) -> list[str]:
    """How rows stand to each other here and in the paper, with a table of those that stand otherwise."""
    if order is None:
        return []
    same, near, other = (order[name] for name in ("as in the paper", "too close to say", "the other way round"))
    total = len(same) + len(near) + len(other)
    if not total:
        return ["No two of these rows differ in one thing alone.\n"]
    timed = order["by"] != "certified"
    counted = {"as in the paper": same, "too close to say": near, "the other way round": other}
    parts = ", ".join(f"{len(pairs)} {what}" for what, pairs in counted.items() if pairs)
    words = f"Pairs of rows that differ in one thing, by {'CPU seconds' if timed else 'certified share'}: {parts}"
    words += "; too close is within two standard errors of the test images" if near else ""
    rows = [[a, b, f"{paper:g}", f"{here:g}", "too close to say"] for a, b, here, paper in near]
    rows += [[a, b, f"{paper:g}", f"{here:g}", f"{a} {' '.join(why)}"] for a, b, here, paper, *why in other]
    unit = "s" if timed else "points"
    columns = ["ahead in the paper", "of", f"by, in the paper, {unit}", f"by, here, {unit}", "why not here"]
    return [_filled(f"{words}. {how_long(order)}"), *(["\n".join(table(columns, rows)) + "\n"] if rows else [])]


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 110) + "\n"


def _shares(ran: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    counts = {method: one["images"] for row in ran for method, one in row["here"]["certified"].items()}
    constant = ["constant units", _ESTIMATE] if any(_ESTIMATE in row["here"] for row in ran) else []
    zeros = ["zeros"] if any(row["here"].get("sparsity") for row in ran) else []
    lip = ["the paper's Lip, no bound"] if any(NO_BOUND in row["here"] for row in ran) else []
    theirs = [name for name in ("clean", "pgd", "certified") if name in ran[0]["paper"]]
    rows = []
    for row in ran:
        here, sure = row["here"], row["here"]["certified"]
        shares = [here["clean"], here["pgd"], *(sure[m]["certified"] if m in sure else None for m in counts)]
        local = [percent(here.get("constant units")), f"{here[_ESTIMATE]:.3g}" if _ESTIMATE in here else "–"]
        quoted = [f"{row['paper'][name]} %" if row["paper"][name] is not None else "–" for name in theirs]
        quoted += [figure(row["paper"]["bound"])] if "bound" in row["paper"] else []
        rows.append(
            [
                row["name"],
                *map(percent, shares),
                bounded(here["log10 bound"]),
                *([figure(10 ** here[NO_BOUND]) if NO_BOUND in here else "–"] if lip else []),
                *([percent(here.get("sparsity"))] if zeros else []),
                *(local if constant else []),
                *quoted,
            ]
        )
    certified = [f"{method}, {count} images" for method, count in counts.items()]
    pgd = f"under PGD, {ran[0]['here']['attacked']} images"
    names = [
        f"the paper's {name.replace('pgd', 'PGD')}"
        for name in (*theirs, *(["bound"] if "bound" in ran[0]["paper"] else []))
    ]
    return ["network", "clean", pgd, *certified, "bound", *lip, *zeros, *constant, *names], rows


def _seconds(ran: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    paper = [row["paper"]["seconds an epoch"] for row in ran]
    epochs = [f"{row['here']['seconds an epoch']:.1f}" for row in ran]
    rows = [
        [row["name"], here, f"{there:g}" if there else "–"] for row, here, there in zip(ran, epochs, paper, strict=True)
    ]
    return ["network", "CPU seconds an epoch here", "the paper's seconds, of all images"], rows


def behind(known: Known) -> str:
    """Equation 10 of CertViT, with what both sets leave of the norms at the same accuracy."""
    networks: dict[str, list[Any]] = {}
    for row in known["certvit, equation 10, small"]["rows"]:
        if isinstance(row.get("outputs"), Mapping):
            networks.setdefault(row["name"], []).append(row)
    rows, levels = [], []
    for name, found in networks.items():
        first = found[0]["outputs"]
        rows.append([name, "–", "as trained", f"{first['before']:.2f}", percent(first["accuracy before"]), "–"])
        for kept in ("outputs", "activations"):
            for row in found:
                one = row[kept]
                shares = [percent(one[key]) for key in ("accuracy", "top class kept")]
                rows.append([name, row["error"], kept, f"{one['sum of log10 norms']:.2f}", *shares])
        trained = first["accuracy before"]
        for key, what, start, level in (
            ("accuracy", "accuracy", trained, trained - 0.01), ("accuracy", "accuracy", trained, trained - 0.03),
            ("top class kept", "same class", 1.0, 0.9), ("top class kept", "same class", 1.0, 0.8),
        ):  # fmt: skip
            curves = [
                [(start, first["before"]), *((row[kept][key], row[kept]["sum of log10 norms"]) for row in found)]
                for kept in ("outputs", "activations")
            ]
            if all(min(share for share, _ in curve) <= level for curve in curves):
                plain, aware = (_at(curve, level) for curve in curves)
                ratio = f"{10 ** (aware - plain):.2f}"
                levels.append([name, f"{what} {percent(level)}", f"{plain:.2f}", f"{aware:.2f}", ratio])
    images = next(iter(networks.values()))[0].get("images", 200)
    text = f"""The constraint set of CertViT's equation 10 bounds the error of each layer's outputs, or of what its
ReLU leaves of them. The networks learned from 4,000 training images and were constrained on {images:,};
accuracy is that on 1,000 test images, without fine-tuning; its standard error is 1.6 points. The second table has
Σ log₁₀ ‖W‖ at the same accuracy, and where as many images keep their class, interpolated between tolerances. Its last
column is the product of all norms with activations kept over that with outputs kept."""
    columns = ["network", "tolerance", "kept", "Σ log₁₀ ‖W‖", "accuracy", "same class as before"]
    compared = table(["network", "at", "outputs kept", "activations kept", "ratio of products"], levels)
    text = "\n".join([_filled(text), *compared]) + "\n"
    return section("Layers constrained with and without their ReLU", columns, rows, text)


def _attention(known: Known) -> str:
    stored, ratios = known["lofast, 3, small"]["rows"], known["lofast, figure 4, small"]["rows"]
    ours = "lipcert, attention, and the residual added"
    bounds = (ours, "LoFAST, Theorem 1", "LoFAST with ξ", "LoFAST, equation 12", "SpecFormer")
    quoted = ("attack", "LoFAST, Theorem 1", "SpecFormer")
    rows = [
        [row["eps"], f"{row['attack']:.3g}", *(bounded(math.log10(row[name])) for name in bounds),
         *(f"{row['paper'][name]:g}" for name in quoted)]
        for row in stored
    ]  # fmt: skip
    same = sum(sorted(quoted, key=row.get) == sorted(quoted, key=row["paper"].get) for row in stored)
    between = sum(row["attack"] <= row[ours] <= row["LoFAST, Theorem 1"] for row in stored)
    times = [row["Theorem 1 over lipcert"] for row in ratios]
    text = f"""The largest change of one residual attention of 8 heads in a ball of radius ε, table 3 of LoFAST, here
with orthogonal weights. Attack, Theorem 1 and SpecFormer stand in the paper's order at {same} of {len(stored)} ε.
lipcert's bound lies between attack and Theorem 1 at {between}. Without the residual branch, for {len(times)} pairs of
token norm and ε (figure 4), Theorem 1 is {min(times):.1f} to {max(times):.0f} times lipcert's bound.
"""
    here = ["lipcert", "Theorem 1", "with ξ", "equation 12", "SpecFormer"]
    columns = ["ε", "attack", *here, *(f"the paper's {name.removeprefix('LoFAST, ')}" for name in quoted)]
    return section("One attention, by the formulas of the papers", columns, rows, text)


def _vits(known: Known) -> list[str]:
    """LoFAST's tables 1 and 2 and its figure 2, of those that were run."""
    eps = ("0.02", "0.05", "0.1")
    made = {name: known[key]["rows"] for name in ("1", "2", "figure 2") if (key := f"lofast, {name}, small") in known}
    sections = []
    if one := made.get("1"):
        kinds = {"pgd": "attack", "certified": "certified", "estimate": "estimate"}
        rows = [
            [row["name"] + ", PGD" * (key == "pgd"), kind, *map(percent, row[key].values()), _time(row), _quoted(row)]
            for row in one for key, kind in kinds.items() if key in row
        ]  # fmt: skip
        clean = ", ".join(
            f"{row['name']}, {row['parameters']:,} parameters, {percent(row['clean'])}" for row in one if "clean" in row
        )
        text = f"""Shares of {one[0]["images"]} test images of CIFAR-10; clean: {clean}.
CPU seconds are those of an image that is predicted right. CROWN and Theorem 1 as published do not count their
rounding, so that what they decide is an estimate. The paper's figures are for width 128: shares in % at the three ε,
and seconds.
"""
        columns = ["network and verifier", "kind", *(f"at {e}" for e in eps), "CPU s", "the paper's"]
        sections.append(section("LoFAST beside CROWN, at scale small", columns, rows, text))
    if two := [row for row in made.get("2", ()) if "kind" in row]:
        figures = [f"{kind}{value}" for value in eps[:2] for kind in ("verified at ", "cpu seconds an image, ")]
        rows = [
            [
                row["name"],
                *(_time(row, key) if "cpu" in key else percent(row[key]) for key in figures),
                _quoted(row),
            ]
            for row in two
        ]
        text = f"""The ViT of 3 layers, {two[0]["images"]} images. What the verifiers say together is an estimate.
The paper's figures: share in % and seconds, at 0.02 and 0.05.
"""
        sections.append(
            section("LoFAST before CROWN, at scale small", ["verifiers", *figures, "the paper's"], rows, text)
        )
    if shapes := made.get("figure 2"):
        rows = [
            [row["name"], *map(percent, (row["clean"], *row["pgd"].values(), *row["certified"].values()))]
            for row in shapes
        ]
        given = re.findall(r"--(limit|epochs) (\S+)", " ".join(shapes[0]["commands"]))
        how = " ".join(f"--{name} {value}" for name, value in given)
        text = f"""Trained by `finetune {how}`; {shapes[0]["images"]} test images of CIFAR-10 each, of which one is
{100 / shapes[0]["images"]:.1f} points. The norm is the limit on the matrices of attention. {_shape_order(shapes)}"""
        columns = ["ViT", "clean", *(f"{kind} {value}" for kind in ("PGD", "`lofast`") for value in eps)]
        sections.append(section("LoFAST's figure 2, at scale small", columns, rows, _filled(text)))
    return sections


def _shape_order(shapes: Sequence[Mapping[str, Any]]) -> str:
    """How certified shares depend on layers and norms, beside what LoFAST's section 5.2 says."""
    share = {tuple(re.findall(r"[0-9.]+", row["name"])): row["certified"]["0.1"] for row in shapes}
    deep = [value >= share[("6", *key[1:])] for key, value in share.items() if key[0] == "3"]
    loose = [value >= share[(*key[:2], "0.75")] for key, value in share.items() if key[2] == "0.25"]
    return (
        f"At ε = 0.1, 3 layers certify at least as many as 6 in {sum(deep)} of {len(deep)} pairs, and norm 0.25 at "
        f"least as many as norm 0.75 in {sum(loose)} of {len(loose)}. In the paper, layers and norms loosen the bound "
        "as well, and strict norms cost clean accuracy."
    )


def _time(row: Mapping[str, Any], key: str = "cpu seconds an image") -> str:
    return f"{row[key]:.2g}" if key in row else "–"


def _quoted(row: Mapping[str, Any]) -> str:
    return ", ".join("–" if value is None else f"{value:g}" for value in row.get("paper", {}).values()) or "–"


def _at(curve: Sequence[tuple[float, float]], level: float) -> float:
    """The least value at which a curve of (accuracy, value) reaches an accuracy, in straight lines between points."""
    found = []
    for (a, p), (b, q) in pairwise(curve):
        if min(a, b) <= level <= max(a, b):
            found.append(min(p, q) if a == b else p + (q - p) * (level - a) / (b - a))
    return min(found)


def _more_of_lofast(known: Known) -> list[str]:
    """Its figures 1, 3 and 4."""
    parts = known["lofast, figure 1, small"]["rows"]
    first = [[_figure(name, value) for name, value in row.items()] for row in parts]
    text = """Δ₂ of Theorem 1 is the product of the change of the softmax, Δ₂₁, and of the values, Δ₂₂. One head, tokens
of norm 1; ‖M‖ is exact, and ξ bounds it."""
    moved: dict[str, list[str]] = {}
    for row in known["lofast, figure 3, small"]["rows"]:
        moved.setdefault(row["moved"], []).append(bounded(math.log10(row["bound, mean"])))
    sizes = dict.fromkeys(row["by"] for row in known["lofast, figure 3, small"]["rows"])
    norms = known["lofast, figure 4, small"]["rows"]
    columns = [name for name in norms[0] if name != "eps"]
    last = [[f"{row['eps']:g}", *(_figure(name, row[name]) for name in columns)] for row in norms]
    return [
        section("LoFAST's figure 1: parts of Theorem 1", [*parts[0]], first, _filled(text)),
        section(
            "LoFAST's figure 3: the bound when a weight or the input moves",
            ["moved", *(f"by {size:g}" for size in sizes)],
            [[f"W^{name[1].upper()}" if name != "x" else "input", *bounds] for name, bounds in moved.items()],
            _filled("Theorem 1 at ε = 0.1; the mean over two random directions of the Frobenius norm that is stated."),
        ),
        section(
            "LoFAST's figure 4: one attention without its residual branch", ["ε", *columns], last,
            _filled("Largest change of the output in a ball of radius ε: what an attack finds, and bounds."),
        ),
    ]  # fmt: skip


def _figure(name: str, value: float) -> str:
    """Bounds are rounded up."""
    return f"{value:.3g}" if name in ("eps", "token norm") or "attack" in name else bounded(math.log10(value))


def _courses(known: Known) -> list[str]:
    """Networks over the epochs of a training: figures 2, 3, 6 and 7 of Local-Lip, and 2b of LiResNet."""
    by_name: dict[str, dict[str, Any]] = {}
    for number in ("figure 6", "figure 7", "figure 2"):
        for row in known[f"local-lip, {number}, small"]["rows"]:
            if "name" in row:
                by_name.setdefault(row["name"], {}).update(row)
    said = known["local-lip, figure 2, small"]["rows"][0]
    rows = [
        [
            name, bounded(row["log10 bound"]), f"{row['local bound']:.3g}",
            *(f"{row[key]:.2f}" if key in row else "–" for key in ("cross-entropy", "at the worst logits")),
            ", ".join(f"{100 * share:.0f}" for share in row["varying"]),
            ", ".join(map(bounded, row["log10 of layers"])),
        ]
        for name, row in by_name.items()
    ]  # fmt: skip
    text = f"""Figures 2, 3, 6 and 7 of Local-Lip: 6C2F on {said["training images"]:,} training images of CIFAR-10, ε =
36/255, with GloRo in place of BCP. Local bounds, losses and units that vary in the balls are means over
{said["test images looked at"]} test images, and estimates. Layers stand in the order of the network."""
    columns = ["loss, epoch", "global bound", "local bound", "cross-entropy", "at the worst logits"]
    sections = [
        section(
            "Bounds and losses during training",
            [*columns, "varying units by layer, %", "norms of layers"], rows, _filled(text),
        )
    ]  # fmt: skip
    stored = known["liresnet, figure 2, small"]["rows"]
    rows = [
        [row["name"], percent(row["runner-up changed"]), percent(row["accuracy"])]
        for row in stored
        if "runner-up changed" in row
    ]
    text = f"""Figure 2b of LiResNet: how many of {stored[0]["train images looked at"]:,} training images have another
runner-up class than after the epoch before. A LiResNet of 12 blocks of width 16, loss `trades`."""
    columns = ["data, epoch", "runner-up changed", "accuracy on these images"]
    return [*sections, section("Threatening classes that change", columns, rows, _filled(text))]


def _constants(known: Known) -> str:
    """Tables 2, 4, 5 and 6 and figure 2 of CertViT."""
    rows = [
        [f"`{row['name']}`", *(f"{row[kind]:.2f}" for kind in ("dot-product", "L2")),
         *(f"{x:g}" for x in row["paper"][:2]),
         *(f"{row['flops 1e16'][kind]:.3g}" for kind in ("adapting", "constraining")),
         *(f"{x:g}" for x in row["paper"][2:])]
        for row in known["certvit, 2, small"]["rows"]
    ]  # fmt: skip
    sizes = [row for number in "456" for row in known[f"certvit, {number}, small"]["rows"]]
    same = sum(row["here"] == row["paper"] for row in sizes)
    (gelu,) = known["certvit, figure 2, small"]["rows"]
    text = f"""Parameters in millions, table 2 of CertViT. {same} of the {len(sizes)} networks of its tables 4 to 6 have
the sizes that are printed there. FLOPs of adapting are three forward passes for each image of ImageNet and epoch of
table 10; those of constraining are one pass, and the products of the faithful engine; how the paper counts is not said.
The largest slope of GELU is {gelu["slope found"]:.4f} on a grid, lipcert counts {gelu["lipcert"]:.6f}; figure 2 has
{gelu["paper"][0]}, which is no bound. `python -m benchmarks.papers --paper certvit --table 9` prints hyper-parameters,
and so for tables 7, 8 and 10 and table 3 of Local-Lip."""
    columns = ["network", "dot-product", "L2", "the paper's dot-product", "its L2"]
    columns += [f"{whose}FLOPs of {what}, 10¹⁶" for whose in ("", "its ") for what in ("adapting", "constraining")]
    return section("Attention that is Lipschitz has fewer parameters", columns, rows, _filled(text))
