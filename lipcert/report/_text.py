"""Plots the curve in characters, for terminals and for reports without matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np

from lipcert.report._curves import Array, attack_curve, certified_curve, span
from lipcert.report._words import known
from lipcert.results import Run

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MARGIN = 6
CERTIFIED, OPEN = "#", "."


def text_plot(runs: Sequence[Run], width: int = 78, height: int = 15) -> str:
    """The certified share over ε, with one character per column.

    A single run is drawn as an area, with dots from the certified share up to its upper bound: clean accuracy, or the
    share that an attack did not break. Several runs are drawn as lines of letters.

    Args:
        runs: at least one.
        width: characters per line.
        height: lines between 0 and 100 %.

    Returns:
        Lines of ASCII and ε, with axes and a key.
    """
    start, end, logarithmic = span(runs)
    columns = width - _MARGIN - 1
    eps = np.geomspace(start, end, columns) if logarithmic else np.linspace(start, end, columns)
    grid = [[" "] * columns for _ in range(height)]
    if len(runs) == 1:
        upper, lower = attack_curve(runs[0], eps), certified_curve(runs[0], eps)
        for x in range(columns):
            for y in range(height):
                level = (y + 0.5) / height
                grid[y][x] = CERTIFIED if level < lower[x] else OPEN if level < upper[x] else " "
    else:
        for letter, run in reversed(list(zip(cycle(_LETTERS), runs, strict=False))):
            for x, value in enumerate(certified_curve(run, eps)):
                grid[min(int(value * height), height - 1)][x] = letter
    lines = []
    for y in reversed(range(height)):
        label = "100 %" if y == height - 1 else "50 %" if y == height // 2 else ""
        lines.append(f"{label:>{_MARGIN - 1}} |{''.join(grid[y])}".rstrip())
    lines.append(f"{'0 %':>{_MARGIN - 1}} +{'-' * columns}")
    return "\n".join([*lines, *_axis(runs, eps), *_key(runs)])


def _axis(runs: Sequence[Run], eps: Array) -> list[str]:
    """Numbers under the axis, and carets under the ε of each run, those side by side in one line that leave room."""
    ticks = [" "] * len(eps)
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = round(part * (len(eps) - 1))
        text = f"{eps[x]:.2g}"
        left = min(x, len(eps) - len(text))
        ticks[left : left + len(text)] = text
    marks: list[list[str]] = []
    asked = {run.eps: run.eps_typed for run in runs}
    for value, typed in asked.items():
        x = min(int(np.searchsorted(eps, value)), len(eps) - 1)
        text = f"^ ε = {typed}"
        left = x if x + len(text) <= len(eps) else x - len(text) + 1
        around = slice(max(0, left - 1), left + len(text) + 1)
        line = next((line for line in marks if not "".join(line[around]).strip()), None)
        if line is None:
            marks.append(line := [" "] * len(eps))
        line[left : left + len(text)] = text if left == x else f"ε = {typed} ^"
    indent = " " * (_MARGIN + 1)
    return [indent + "".join(line).rstrip() for line in (ticks, *marks)]


def _key(runs: Sequence[Run]) -> list[str]:
    if len(runs) > 1:
        return [f"{letter} {run.name}: {known(run)}" for letter, run in zip(cycle(_LETTERS), runs, strict=False)]
    above = "not broken by the attack" if runs[0].attacked else "predicted right" if runs[0].labelled else "all images"
    return [f"{CERTIFIED} {known(runs[0])}   {OPEN} {above}; the truth lies between"]
