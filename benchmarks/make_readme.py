"""The README of this folder: what each script measures, and where its result lies.

python -m benchmarks.make_readme
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
HEAD = """# Benchmarks

Made by `python -m benchmarks.make_readme` from the scripts and their results; a test compares. Each script says in its
first lines how it is run, and `--help` what it takes. `docs/measurements.md` has the figures.

| `python -m benchmarks.` | what it does | results |
| --- | --- | --- |
"""
TAIL = """
## The papers' tables

`python -m benchmarks.papers --paper certvit|lofast|liresnet|local-lip --table N [--scale small|full]`, and `--list` for
all of them. `small` takes minutes a row and is no reproduction; its rows say how many images they took. Rows on
CIFAR-10 take `--data cifar10=FOLDER`, others their data sets in the same way. The figures are on the page of
measurements, beside the papers'.

| paper | table | what it shows | here |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The README as Markdown."""
    from benchmarks.papers.tables import TABLES

    modules = [path for path in sorted(FOLDER.glob("*.py")) if not path.name.startswith("_")]
    rows = [_row(path) for path in [*modules, FOLDER / "papers" / "__main__.py"]]
    known = json.loads((FOLDER / "results" / "papers.json").read_text())
    papers = []
    for table in TABLES:
        stored = {scale: known.get(f"{table.paper}, {table.number}, {scale}") for scale in ("small", "full")}
        made = ", ".join(f"{scale}{_share(one['rows'], table.rows)}" for scale, one in stored.items() if one)
        data = ", ".join(dict.fromkeys(str(row.data) for row in table.rows if row.recipe is not None))
        here = made or f"needs {table.needs or data}"
        papers.append(f"| {table.paper} | {table.number} | {table.title} | {here} |\n")
    return HEAD + "".join(rows) + TAIL + "".join(papers)


def _share(made: Sequence[Mapping[str, Any]], rows: Sequence[Any]) -> str:
    """How many of the rows that have commands were trained, and what others need; nothing without such rows."""
    asked = {row.name: row.data for row in rows if row.recipe is not None}
    trained = [row["name"] for row in made if "data" in row and row.get("name") in asked]
    if not asked or not trained:
        return ""
    lacking = dict.fromkeys(str(data) for data in asked.values() if data not in {asked[name] for name in trained})
    needs = f"; others need {', '.join(lacking)}" if lacking else ""
    return f", {len(trained)} of {len(asked)} rows{needs}"


def _row(path: Path) -> str:
    text = path.read_text()
    first = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    name = "papers" if path.name == "__main__.py" else path.stem
    made = {found for found in re.findall(r'results" / "(\w+\.json)"|results/(\w+\.json)', text) for found in found}
    results = ", ".join(f"`{one}`" for one in sorted(made) if one and (FOLDER / "results" / one).exists())
    return f"| `{name}` | {first} | {results} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(FOLDER.parent)}")
