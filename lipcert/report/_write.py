"""Reports as files, none of which replaces a file that is not a report."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lipcert.errors import InputError
from lipcert.report import _figures
from lipcert.report._build import Eps, report, title
from lipcert.report._card import model_card
from lipcert.report._document import MARK, Figure, to_html, to_markdown
from lipcert.results import Run

_KINDS = {"html": (".html", ".htm"), "markdown": (".md", ".markdown"), "card": (".md", ".markdown")}


def write(
    runs: Sequence[Run],
    *,
    html: str | os.PathLike[str] | None = None,
    markdown: str | os.PathLike[str] | None = None,
    card: str | os.PathLike[str] | None = None,
    eps: Eps = (),
) -> list[Path]:
    """Writes what is asked for.

    Args:
        runs: from :func:`lipcert.report.read_runs`.
        html: where one self-contained page goes.
        markdown: where the same as Markdown goes; its figures go beside it, as SVG.
        card: where the model card goes; of several models each gets a file of its own, ``<card>-<name>.md``.
        eps: values with the text the user wrote, at which tables give figures; by default those of the runs.

    Returns:
        The files written.

    Raises:
        InputError: a file that is no report, or cannot be written.
    """
    asked = {"html": html, "markdown": markdown, "card": card}
    paths = {kind: Path(path) for kind, path in asked.items() if path is not None}
    for kind, path in paths.items():
        _check(path, kind)
    if len(set(paths.values())) < len(paths):
        raise InputError("two of the reports would go to one file; give each its own name")
    content: dict[Path, str] = {}
    if "html" in paths or "markdown" in paths:
        blocks = report(runs, eps, figures=_figures.available())
        if "html" in paths:
            content[paths["html"]] = to_html(title(runs), blocks)
        if "markdown" in paths:
            path = paths["markdown"]
            prefix = f"{path.stem}-"
            content[path] = to_markdown(blocks, prefix)
            for block in blocks:
                if isinstance(block, Figure):
                    content[path.with_name(f"{prefix}{block.name}.svg")] = f"{block.svg}\n{MARK}\n"
    if "card" in paths:
        for path, of_one in _cards(paths["card"], runs).items():
            content[path] = f"{model_card(of_one, eps)}\n"
    for path in content:
        _check_free(path)
    for path, text in content.items():
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)
    return list(content)


def _cards(path: Path, runs: Sequence[Run]) -> dict[Path, list[Run]]:
    """A file for each model, and its results."""
    models: dict[str, list[Run]] = {}
    for run in runs:
        models.setdefault(run.weights_hash, []).append(run)
    if len(models) == 1:
        return {path: list(runs)}
    names = [re.sub(r"[^\w.-]+", "-", own[0].name) for own in models.values()]
    return {
        path.with_name(f"{path.stem}-{name}{path.suffix}"): own
        for name, own in zip(names, models.values(), strict=True)
    }


def _check(path: Path, kind: str) -> None:
    if path.suffix.lower() not in _KINDS[kind]:
        raise InputError(f"--{kind} writes a {_KINDS[kind][0]} file, got {path}")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write {path.name} to")
    _check_free(path)


def _check_free(path: Path) -> None:
    try:
        taken = path.exists() and MARK not in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        taken = True
    if taken:
        raise InputError(f"{path} exists and was not written by lipcert report; give another name, or move it away")
