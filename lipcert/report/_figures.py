"""Figures as SVG, by matplotlib: Okabe-Ito colours, line styles, and labels at the curves; legible without colour."""

from __future__ import annotations

import functools
import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import numpy as np

from lipcert.report._curves import Array, attack_curve, certified_curve, families, span, steps
from lipcert.report._words import above, known, right
from lipcert.results import Run

# Okabe and Ito 2008, distinct for every kind of colour vision; black, which is for text, and the light yellow left out.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = "osD^vPX*"
_STYLE: dict[Any, Any] = {
    "axes.labelsize": 10,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "svg.fonttype": "path",
    "svg.hashsalt": "lipcert",
    "text.parse_math": False,
}
_WIDTH = 6.0
_DOTS: dict[str, Any] = {"color": "0.35", "linewidth": 0.8, "linestyle": (0, (1, 2))}

P = ParamSpec("P")


def available() -> bool:
    """Whether matplotlib, the extra ``plot``, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def _svg(draw: Callable[P, Any]) -> Callable[P, str]:
    """Draws in the style of the reports and returns the figure as an ``<svg>`` element."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
        from matplotlib import style

        with style.context(["default", _STYLE]):
            file = io.StringIO()
            draw(*args, **kwargs).savefig(file, format="svg", metadata=dict.fromkeys(_METADATA))
        text = file.getvalue()
        return re.sub(r' (?:width|height)="[\d.]+pt"', "", text[text.index("<svg") :], count=2)

    return drawn


_METADATA = ("Creator", "Date", "Format", "Type")


def _figure(height: float, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, sharex=True, squeeze=False)[:, 0]


@_svg
def curve(runs: Sequence[Run]) -> Any:
    """Shares of images over ε: certified (solid), left standing by an attack (dashed), predicted right (dotted).

    Args:
        runs: at least one; for a single one what lies between is shaded.

    Returns:
        The figure.
    """
    start, end, logarithmic = span(runs)
    figure, (axes,) = _figure(3.7)
    _scale(axes, start, end, logarithmic)
    axes.set(ylim=(0, 110), yticks=range(0, 101, 20), xlabel="ε, ℓ2 on pixels in [0, 1]", ylabel="share of images in %")
    grid = np.geomspace(start, end, 200) if logarithmic else np.linspace(start, end, 200)
    labels: list[tuple[str, str, Array]] = []
    for i, run in enumerate(runs):
        colour = _COLOURS[i % len(_COLOURS)]
        eps = steps(np.concatenate([run.radii, run.broken_at]), start, end)
        lower, upper = 100 * certified_curve(run, eps), 100 * attack_curve(run, eps)
        clean = 100 * float(run.right.mean())
        marks: dict[str, Any] = {}
        if len(runs) == 1:
            axes.fill_between(eps, lower, upper, step="post", color="0.92", linewidth=0)
        else:
            marks = {"marker": _MARKERS[i % len(_MARKERS)], "markevery": (i / 8 / len(runs), 0.125), "markersize": 5}
        axes.axhline(clean, color=colour, linestyle=":", linewidth=1.4)
        if run.attacked:
            axes.step(eps, upper, where="post", color=colour, linestyle="--", linewidth=1.6)
        axes.step(eps, lower, where="post", color=colour, linewidth=2.2, **marks)
        name = f"{run.name}, {run.holds_for}" if run.smoothed else run.name
        labels.append((known(run) if len(runs) == 1 else name, colour, 100 * certified_curve(run, grid)))
        if len(runs) == 1:
            if run.attacked:
                labels.append((above(run), colour, 100 * attack_curve(run, grid)))
            labels.append((right(run) if run.labelled else "all images", colour, np.full_like(grid, clean)))
    for family in families(runs):
        eps = steps(np.concatenate([run.radii for run in family]), start, end)
        best = np.max([100 * certified_curve(run, eps) for run in family], axis=0)
        axes.step(eps, best, where="post", color="0.5", linewidth=5, alpha=0.4, zorder=0)
    beyond = [run.eps for run in runs if run.staged]
    if beyond and min(beyond) < end:
        axes.axvspan(min(beyond), end, color="0.5", alpha=0.12, hatch="//", linewidth=0, zorder=0)
    for value, typed in sorted({run.eps: run.eps_typed for run in runs}.items()):
        axes.axvline(value, **_DOTS)
        axes.text(value, 1.01, f"ε = {typed}", transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    _place(axes, labels)
    return figure


@_svg
def histogram(runs: Sequence[Run]) -> Any:
    """Certified radii of the images predicted right, one panel a run, on one axis; dots at the ε asked for.

    Args:
        runs: at least one.

    Returns:
        The figure.
    """
    start, end, logarithmic = span(runs)
    figure, panels = _figure(1.0 + 1.3 * len(runs), rows=len(runs))
    bins = np.geomspace(start, end, 31) if logarithmic else np.linspace(start, end, 31)
    for i, (run, axes) in enumerate(zip(runs, panels, strict=True)):
        _scale(axes, start, end, logarithmic)
        axes.set_ylabel("images")
        radii = np.clip(run.radii[run.right], start, end)
        axes.hist(radii, bins=bins, color=_COLOURS[i % len(_COLOURS)], edgecolor="white", linewidth=0.6)
        axes.axvline(run.eps, **_DOTS)
        axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
        axes.set_title(f"{run.name}, ε = {run.eps_typed} at the dots", fontsize=10, loc="left")
    panels[-1].set_xlabel("certified radius" + (", those below the axis in its first bar" if logarithmic else ""))
    return figure


@_svg
def budget(modules: Sequence[tuple[str, float]]) -> Any:
    """Bars: by how many powers of ten each module can stretch a perturbation.

    Args:
        modules: paths and log10 of gains, largest first.

    Returns:
        The figure.
    """
    figure, (axes,) = _figure(0.8 + 0.24 * len(modules))
    places = range(len(modules))
    axes.barh(places, [gain for _, gain in modules], color=_COLOURS[0], height=0.7)
    axes.set_yticks(places, [name for name, _ in modules])
    axes.invert_yaxis()
    axes.set_xlabel("powers of ten by which a perturbation can grow")
    return figure


def _scale(axes: Any, start: float, end: float, logarithmic: bool) -> None:
    axes.set(xscale="log" if logarithmic else "linear", xlim=(start, end))
    if logarithmic:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")


def _place(axes: Any, labels: Sequence[tuple[str, str, Array]]) -> None:
    """Writes each label beside its curve where it covers least of the curves and of the labels before.

    Args:
        axes: where to write, with its limits set.
        labels: text, colour, and the curve's heights in percent at equal steps over the axis.
    """
    low, high = axes.get_ylim()
    curves = [(heights - low) / (high - low) for _, _, heights in labels]
    x = np.linspace(0, 1, len(curves[0]))
    # A curve also covers the drop between two of its heights.
    dense = np.concatenate([np.linspace(h[:-1], h[1:], 12) for h in curves], axis=1)
    places = np.tile(x[:-1], len(curves))
    taken: list[tuple[float, float, float, float]] = []
    for (text, colour, _), heights in zip(labels, curves, strict=True):
        width, height = 0.0165 * len(text), 0.06
        best, cost = (0.0, 0.0), np.inf
        for i in range(0, len(x), 4):
            for dx, dy in ((0.012, 0.008), (0.012, -0.07), (-width - 0.012, -0.07), (-width - 0.012, 0.008)):
                left, bottom = x[i] + dx, heights[i] + dy
                inside = (places > left - 0.01) & (places < left + width + 0.01)
                covered = ((dense > bottom) & (dense < bottom + height) & inside).sum()
                met = sum(
                    left < x0 + w and x0 < left + width and bottom < y0 + h and y0 < bottom + height
                    for x0, y0, w, h in taken
                )
                # A reader takes a label to belong to the curve nearest to the end from which it starts.
                end = left if dx > 0 else left + width
                near = min(max(round(end * (len(x) - 1)), 0), len(x) - 1)
                gaps = [abs(other[near] - bottom - height / 2) for other in curves]
                strange = abs(heights[near] - bottom - height / 2) > min(gaps)
                outside = max(0.0, left + width - 1, -left) + max(0.0, bottom + height - 1, -bottom)
                far = 40 * abs(heights[i] - 0.5) + 10 * abs(x[i] - 0.5)
                here = 10 * covered + 500 * (met + strange) + 5000 * outside + far
                if here < cost:
                    best, cost = (left, bottom), here
        taken.append((*best, width, height))
        axes.text(*best, text, transform=axes.transAxes, color=colour, va="bottom", fontsize=9.5, weight="bold")
