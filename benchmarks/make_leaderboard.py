"""The page of the leaderboard and its pictures, from the files in ``leaderboard``.

    python -m benchmarks.make_leaderboard

An entry is a JSON file as ``leaderboard/schema.json`` describes it. CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks._page import table
from benchmarks.make_measurements import ROOT
from lipcert.results import interval
from lipcert.settings import parse_eps

FILES = ROOT / "leaderboard"
PAGE = ROOT / "docs" / "leaderboard.md"
TEST_IMAGES = {"CIFAR-10": 10_000, "CIFAR-100": 10_000, "Tiny-ImageNet": 10_000, "ImageNet": 50_000}
HEAD = """# Leaderboard: certified accuracy, ℓ2

Certified accuracy at ε is the share of test images that are classified correctly and whose class no perturbation of ℓ2
norm up to ε changes, with pixels in [0, 1]. Each line is a file in `leaderboard/`, from which
`benchmarks/make_leaderboard.py` makes this page; `CONTRIBUTING.md` says how to add one. The figures are those of the
source. Where the column *verified* has an entry, lipcert certified the images, and rows were recomputed from the
weights. If only a sample of the test images was certified, the 95 % confidence interval (Wilson) is given.
"""
FOOT = """## What the columns mean

- *global*: a Lipschitz constant of the whole network; *local*: one that is valid near the image; *1-Lipschitz*: layers
  with constant 1 by construction. All three are valid for every perturbation up to ε.
- *anchored*: the certificate that [its own page](anchored.md) explains. *After a Lipschitz prefix*: the certificate
  covers the layers after a cut, and its radius is divided by the Lipschitz constant of the layers before the cut. These
  networks were trained for 36/255. Their radii are limited to the range in which the layers after the cut are nearly
  linear.
- *smoothed*: randomized smoothing. The certificate is about the class that the network predicts most often under
  noise, not about the network itself, and fails with a small probability per image.
- *no bound*: these figures are not based on a bound. For vision transformers CertViT's product leaves out some
  operations, and for linear layers its code takes a ratio of sums, which can be smaller than the norm.
- *linear relaxation*, *intervals*, *verification*: bounds on the values of each layer near the image; for
  *verification*, a complete verifier refines them.
- Table 1 of Hu et al. 2023 and table 2 of Huang et al. 2021 also report networks of earlier papers; their figures are
  those of the table.
- "Prach et al. 2024, logs": the last epoch of the training logs of the authors' code at 01e3f2a, for "1-Lipschitz
  Layers Compared" (arXiv 2311.16833); for each layer the size, XS, S or M, that certifies most test images at 36/255.
- *attacked*: accuracy under the attack of the source at the first ε.
- Certificates of other libraries ignore round-off. Their global and local constants, and the layers of CPL, use
  power iteration, whose result is below the norm until it has converged. Each file states the assumptions of its
  certificate.

## Commands

These commands print the shares of lipcert's networks, with CIFAR-10's test images as a tar file or a folder:
"""
_KINDS = "Certificates of the network itself", "Smoothed classifiers", "Published as certified, but no bound"
_TYPES: dict[str, Any] = {
    "object": dict,
    "string": str,
    "boolean": bool,
    "number": (int, float),
    "integer": int,
    "null": type(None),
}


def problems(value: Any, schema: Mapping[str, Any], where: str = "the entry") -> Iterator[str]:
    """What in a value a JSON Schema does not allow, for the keywords that ``leaderboard/schema.json`` uses."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    fits = [kind for kind in kinds if isinstance(value, _TYPES[kind]) and (kind == "boolean" or value is not True)]
    if (kinds and not fits) or value not in schema.get("enum", [value]):
        yield f"{where} is {value!r}, not {' or '.join(kinds) or ', '.join(schema['enum'])}"
        return
    if isinstance(value, (int, float)) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{where} is {value}, out of range"
    if isinstance(value, str) and (
        len(value) < schema.get("minLength", 0) or not re.search(schema.get("pattern", ""), value)
    ):
        yield f"{where} is {value!r}, which is empty or of another form"
    if not isinstance(value, dict):
        return
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    yield from (f"{where} lacks {name}" for name in schema.get("required", ()) if name not in value)
    if len(value) < schema.get("minProperties", 0):
        yield f"{where} is empty"
    for name, inner in value.items():
        if name in known or others:
            yield from problems(inner, known.get(name, others if isinstance(others, dict) else {}), name)
        else:
            yield f"{where} has {name}, which no entry has"


def read() -> dict[str, dict[str, Any]]:
    """The entries by the paths of their files.

    Raises:
        SystemExit: one is not what the schema allows; says what.
    """
    schema, entries = json.loads((FILES / "schema.json").read_text()), {}
    for file in sorted(FILES.glob("*/*.json")):
        entry = entries[file.relative_to(FILES).as_posix()] = json.loads(file.read_text())
        for problem in problems(entry, schema):
            raise SystemExit(f"{file}: {problem}")
    return entries


def page(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The page as Markdown, the highest certified accuracy first in each table."""
    lines = [HEAD]
    for data in TEST_IMAGES:
        lines += [f"## {data}", "", f"![Clean and certified accuracy on {data}]({picture_of(data)})", ""]
        for title, of_kind in parts(entry for entry in entries.values() if entry["data"] == data):
            lines += [f"### {title}", "", *_table(of_kind), ""]
    commands = sorted({entry["source"]["command"] for entry in entries.values() if "command" in entry["source"]})
    return "\n".join((*lines, FOOT, *(f"    {command}" for command in commands), ""))


def parts(entries: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """The entries of a data set that are comparable, with the title of their table."""
    entries = list(entries)
    for kind in _KINDS:
        for extra in (False, True):
            some = [e for e in entries if extra is e["extra_data"] and kind == _kind(e)]
            if some:
                yield f"{kind}, {'with' if extra else 'without'} extra data", some


def _kind(entry: Mapping[str, Any]) -> str:
    certificate = entry["certificate"]
    if certificate["guarantee"] == "none":
        return _KINDS[2]
    return _KINDS[str(certificate["kind"]).startswith("smoothed")]


def _table(entries: list[Mapping[str, Any]]) -> list[str]:
    every = sorted({eps for entry in entries for eps in entry["certified"]}, key=parse_eps)
    first = max(every, key=lambda eps: sum(eps in entry["certified"] for entry in entries))
    names = ("network", *every, "clean", "attacked", "certificate", "parameters", "images", "verified", "training")
    rows = []
    for entry in sorted(entries, key=lambda entry: -entry["certified"].get(first, 0)):
        total, shares, source = TEST_IMAGES[entry["data"]], entry["certified"], entry["source"]
        images, count = entry["images"] or total, entry["parameters"]
        kind, guarantee = entry["certificate"]["kind"], entry["certificate"]["guarantee"]
        shown = [_percent(shares.get(eps)) for eps in every]
        shown[every.index(first)] = f"**{shown[every.index(first)]}**"
        cited = f"[{source['text']}]({source['url']})" if "url" in source else source["text"]
        rows.append(
            (
                f"{entry['network']} ({cited})",
                *shown,
                _percent(entry["clean"]),
                _percent(entry.get("attacked", {}).get(first)),
                kind if guarantee == "none" else f"{kind}, {guarantee}",
                "–" if count is None else f"{count / 1e6:.3g} M",
                f"{images:,} ({interval(round(shares[first] / 100 * images), images)})" if images < total else "all",
                f"{entry['verified']['recomputed']} rows" if "verified" in entry else "–",
                entry["training"] or "–",
            )
        )
    return table(names, rows)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share + 1e-9:.1f} %"  # 63.15, which binary fractions miss, is 63.2


def picture_of(data: str) -> str:
    """The picture of a data set, from the page."""
    return f"pictures/leaderboard-{data.lower()}.svg"


def points(entries: Mapping[str, Mapping[str, Any]], data: str) -> dict[str, list[tuple[float, float]]]:
    """Clean and certified accuracy at 36/255 of the certificates that state both, by the titles of their tables."""
    known = [entry for entry in entries.values() if entry["data"] == data and entry["clean"] is not None]
    known = [entry for entry in known if "36/255" in entry["certified"] and entry["certificate"]["guarantee"] != "none"]
    return {title: sorted((e["clean"], e["certified"]["36/255"]) for e in some) for title, some in parts(known)}


def picture(entries: Mapping[str, Mapping[str, Any]], data: str) -> str:
    """Certified over clean accuracy on a data set, an SVG file."""
    from matplotlib import style
    from matplotlib.figure import Figure

    shown = points(entries, data)
    with style.context(["default", {"svg.hashsalt": "lipcert", "svg.fonttype": "path", "font.size": 10}]):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for marker, (title, some) in zip("osD^", shown.items(), strict=False):
            axes.plot(*zip(*some, strict=True), linestyle="", marker=marker, alpha=0.7, label=title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlabel="accuracy in %", ylabel="certified at 36/255 in %", title=data)
        axes.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    return f"{text[text.index('<svg') :]}<!-- {json.dumps(shown)} -->\n"


def main() -> None:
    entries = read()
    PAGE.write_text(page(entries))
    for data in TEST_IMAGES:
        (PAGE.parent / picture_of(data)).write_text(picture(entries, data))
    print(f"wrote {PAGE.relative_to(ROOT)} from {len(entries)} files")


if __name__ == "__main__":
    main()
