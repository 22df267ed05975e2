"""Writes reports to files, never over one that is not a report, and shows them in Python and notebooks."""

from __future__ import annotations

import csv as tables
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lipcert.errors import InputError
from lipcert.inputs.files import replacing
from lipcert.report import _figures
from lipcert.report._artifact import artifact_of, by_model, title
from lipcert.report._build import Eps, facts, lines, overview, radii_of_interest, report
from lipcert.report._card import model_card
from lipcert.report._markdown import MARK
from lipcert.report._page import to_html
from lipcert.results import Result, Run, read_runs

# Every file of a report contains one of these.
SIGN = b"written by lipcert report"
_SIGNS = (SIGN, b"results,model,eps,", b"results,certified,")
_MARKDOWN = (".md", ".markdown")
_KINDS = {"html": (".html", ".htm"), "markdown": _MARKDOWN, "card": _MARKDOWN, "csv": (".csv",)}


def write(
    runs: Sequence[Run],
    *,
    html: str | os.PathLike[str] | None = None,
    markdown: str | os.PathLike[str] | None = None,
    card: str | os.PathLike[str] | None = None,
    csv: str | os.PathLike[str] | None = None,
    eps: Eps = (),
    license: str | None = None,
    base_model: str | None = None,
) -> list[Path]:
    """Writes the requested report files.

    Args:
        runs: from :func:`lipcert.report.read_runs`.
        html: path of a self-contained page.
        markdown: path of the same report as Markdown; its figures are written to the same folder, as SVG.
        card: path of the model card. Several models get separate files, ``<card>-<name>.md``.
        csv: path of a table with a line for each of ``eps`` and each run.
        eps: values, with the text that the user wrote, at which tables show results; by default those of the runs.
        license: the model's licence for its card: an identifier that hubs know, such as ``apache-2.0``.
        base_model: hub id of the original model, for the card.

    Returns:
        The written files.

    Raises:
        InputError: a path holds a file that is not a report, or cannot be written.
    """
    asked = {"html": html, "markdown": markdown, "card": card, "csv": csv}
    paths = {kind: Path(path) for kind, path in asked.items() if path is not None}
    for kind, path in paths.items():
        _check(path, kind)
    if len(set(paths.values())) < len(paths):
        raise InputError("two of the reports would go to one file; give each its own name")
    content: dict[Path, str] = {}
    if "html" in paths or "markdown" in paths:
        document = report(runs, eps, figures=_figures.available())
        if "html" in paths:
            content[paths["html"]] = to_html(document)
        if "markdown" in paths:
            path = paths["markdown"]
            prefix = f"{path.stem}-"
            content[path] = document.text.replace("](<", f"](<{prefix}")
            for name, picture in document.pictures.items():
                content[path.with_name(prefix + name)] = f"{picture}\n{MARK}\n"
    if "card" in paths:
        for path, of_one in cards(paths["card"], runs).items():
            content[path] = f"{model_card(of_one, eps, license=license, base_model=base_model)}\n"
    if "csv" in paths:
        rows = lines(runs, radii_of_interest(runs, eps))
        buffer = io.StringIO()
        writer = tables.DictWriter(buffer, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        content[paths["csv"]] = buffer.getvalue()
    for path in content:
        _check_free(path)
    for path, text in content.items():
        try:
            with replacing(path) as partial:
                partial.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    return list(content)


def cards(path: Path, runs: Sequence[Run]) -> dict[Path, list[Run]]:
    """The card file of each model, with the model's runs."""
    models = by_model(runs)
    if len(models) == 1:
        return {path: list(runs)}
    names = [re.sub(r"[^\w.-]+", "-", same_model[0].name) for same_model in models]
    return {
        path.with_name(f"{path.stem}-{name}{path.suffix}"): same_model
        for name, same_model in zip(names, models, strict=True)
    }


def publishing(card: Path, runs: Sequence[Run]) -> list[str]:
    """The commands of huggingface_hub, which handles login and token, that publish each model with its card."""
    lines = ["hf auth login"]
    for path, runs_of_one in cards(card, runs).items():
        model = artifact_of(runs_of_one[0])
        repository = f"YOU/{re.sub(r'[^A-Za-z0-9._-]+', '-', title(runs_of_one[0]))}"
        for file, name in ((model, None), (path, "README.md")):
            if file is not None:
                lines.append(shlex.join(["hf", "upload", repository, str(file), name or file.name]))
    return lines


def _check(path: Path, kind: str) -> None:
    if path.suffix.lower() not in _KINDS[kind]:
        raise InputError(f"--{kind} writes a {_KINDS[kind][0]} file, got {path}")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write {path.name} to; make it first")
    _check_free(path)


def _check_free(path: Path) -> None:
    try:
        occupied = path.exists() and not any(sign in path.read_bytes() for sign in _SIGNS)
    except OSError:
        occupied = True
    if occupied:
        raise InputError(f"{path} exists and was not written by lipcert report; give another name, or move it away")


class Shown:
    """A report on runs that prints as text and that notebooks show as a page, and the files that were written."""

    def __init__(self, runs: Sequence[Run], written: Sequence[Path]):
        self.runs = runs
        self.written = [*written]

    def __repr__(self) -> str:
        at = radii_of_interest(self.runs, [])
        if len(self.runs) == 1:
            lines = [f"{name}: {value}" for name, value in facts(self.runs[0], at)]
        else:
            columns, rows = overview(self.runs, at)
            lines = ["\t".join(row) for row in [columns, *rows]]
        return "\n".join([*lines, *(f"written: {path}" for path in self.written)])

    def _repr_html_(self) -> str:
        """The page in a frame: its styles are about whole pages, and a notebook is another one."""
        style = "width: 100%; height: 45em; border: 0"
        return f'<iframe title="report" style="{style}" srcdoc="{escape(to_html(report(self.runs)))}"></iframe>'


def show(*results: Result | str | os.PathLike[str] | Sequence[Any], **files: Any) -> Shown:
    """Reports on results of :func:`lipcert.certify`, result files, and folders of them.

    Args:
        *results: one or several, or lists of them.
        **files: files to write, as for :func:`lipcert.report.write`: ``html``, ``markdown``, ``card``, ...

    Returns:
        The report; Python prints it as text, and notebooks show it as a page.

    Raises:
        InputError: a result file cannot be read, or a file cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        listed: Iterator[Any] = (each for one in results for each in (one if isinstance(one, (list, tuple)) else [one]))
        for number, result in enumerate(listed, 1):
            if isinstance(result, Result):
                paths.append(result.save(Path(folder) / f"result-{number}.jsonl"))
            else:
                paths.append(Path(result))
        runs = read_runs(paths)
        return Shown(runs, write(runs, **files) if files else [])
