"""``lipcert.report(...)``: shows results in Python and notebooks, and writes report files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lipcert.report._build import facts, overview, radii_of_interest, report
from lipcert.report._page import to_html
from lipcert.report._write import write
from lipcert.results import Result, Run, read_runs


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
