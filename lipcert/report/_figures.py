"""SVG figures drawn with matplotlib, legible without colour and on dark pages."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from lipcert.report._words import UNBOUNDED, lower_bound, right, upper_bound
from lipcert.results import Run

# The palette of Okabe and Ito (2008), distinct for all kinds of colour vision, without black and light yellow.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = "osD^vPX*"
_STYLE: dict[Any, Any] = {
    "axes.labelsize": 11.5,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "lipcert",
    "text.parse_math": False,
}
_WIDTH = 5.2
_LONGEST = 40
_DOTS: dict[str, Any] = {"color": "0.5", "linewidth": 0.8, "linestyle": (0, (1, 2))}

# If at least a quarter of the radii are smaller than the large ones by this factor, ε is shown on a logarithmic scale.
WIDE = 100.0
# A logarithmic scale starts at most this factor below the smaller of ε and the large radii, down to a power of ten.
_DECADES = 1e3

Array = NDArray[np.float64]
P = ParamSpec("P")


def available() -> bool:
    """Whether matplotlib, the extra ``plot``, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def _exists(module: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(module) is not None
    return False


def _svg(draw: Callable[P, Any]) -> Callable[P, str]:
    """Draws in the style of the reports and returns the figure as an ``<svg>`` element."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
        backend = os.environ.get("MPLBACKEND", "")
        if backend.startswith("module://") and not _exists(backend[len("module://") :]):
            del os.environ["MPLBACKEND"]  # of a notebook in another environment; matplotlib would not be imported
        from matplotlib import style

        with style.context(["default", _STYLE]):
            file = io.StringIO()
            draw(*args, **kwargs).savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
        text = file.getvalue()
        return re.sub(r' (?:width|height)="[\d.]+pt"', "", text[text.index("<svg") :], count=2)

    return drawn


_METADATA = ("Creator", "Date", "Format", "Type")


def _figure(height: float, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, sharex=True, squeeze=False)[:, 0]


def curve(runs: Sequence[Run]) -> tuple[str, dict[str, Any]]:
    """Shares of images over ε: certified (solid), not broken by an attack (dashed), correct (dotted)."""
    start, end, logarithmic = span(runs)
    drawn: list[Any] = []
    numbers = [
        {
            "name": f"{run.name}, {run.holds_for}" if run.smoothed else run.name,
            "images": len(run),
            "right": int(run.right.sum()),
            "eps": run.eps,
            "reach": run.every_eps[-1][0],
            "stopped": run.stopped,
            "radii": sorted(run.radii[run.right].tolist()),
            "broken": sorted(run.broken_at[run.right & np.isfinite(run.broken_at)].tolist()) if run.attacked else None,
        }
        for run in runs
    ]
    svg = _draw_curve(runs, start, end, logarithmic, drawn)
    (_, height), box = 72 * drawn[0].figure.get_size_inches(), drawn[0].get_position()
    places = [72 * _WIDTH * box.x0, 72 * _WIDTH * box.x1, height * (1 - box.y1), height * (1 - box.y0)]
    return svg, {"start": start, "end": end, "logarithmic": logarithmic, "axes": places, "runs": numbers}


@_svg
def _draw_curve(runs: Sequence[Run], start: float, end: float, logarithmic: bool, drawn: list[Any]) -> Any:
    """The picture; adds its axes to ``drawn``."""
    figure, (axes,) = _figure(3.6 + 0.2 * len(runs))
    _scale(axes, start, end, logarithmic)
    # Runs may be about perturbations of different values.
    measured = ", ".join(dict.fromkeys(run.perturbed if run.inside else "pixels in [0, 1]" for run in runs))
    axes.set(ylim=(0, 100), yticks=range(0, 101, 20), xlabel=f"ε, ℓ2 on {measured}", ylabel="share of images in %")
    axes.grid(axis="y", color="0.5", alpha=0.25, linewidth=0.8)
    for i, run in enumerate(runs):
        colour = _COLOURS[i % len(_COLOURS)]
        changes = np.unique(np.concatenate([run.radii, run.broken_at]))
        eps = np.array([start, *changes[(changes > start) & (changes < end)], end])
        lower, upper = (100 * share_above(values, run.right, eps) for values in (run.radii, run.broken_at))
        one = len(runs) == 1
        name = f"{_short(run)}, {run.holds_for}" if run.smoothed else _short(run)
        marks: dict[str, Any] = {"color": colour, "clip_on": False}
        if one:
            axes.fill_between(eps, lower, upper, step="post", color=colour, alpha=0.12, linewidth=0)
        what = (right(run) if run.labelled else "all images") if one else None
        axes.axhline(100 * float(run.right.mean()), color=colour, linestyle=":", linewidth=1.5, label=what)
        if run.attacked:
            label = upper_bound(run) if one else None
            axes.step(eps, upper, where="post", linestyle="--", linewidth=1.7, label=label, **marks)
        # Symbols distinguish the curves without colour. They are drawn only where the certified share is positive.
        above_zero = np.flatnonzero(lower > 0)
        some = above_zero[np.linspace(0, len(above_zero) - 1, 7)[:-1].astype(int)] if len(above_zero) else above_zero
        symbols = {} if one else {"marker": _MARKERS[i % len(_MARKERS)], "markevery": some.tolist(), "markersize": 6}
        label = lower_bound(run) if one else name
        axes.step(eps, lower, where="post", linewidth=2.4, label=label, **symbols, **marks)
    beyond = [run.every_eps[-1][0] for run in runs if run.stopped]
    if beyond and min(beyond) < end:
        axes.axvspan(min(beyond), end, facecolor="none", edgecolor="0.5", alpha=0.35, hatch="//", linewidth=0, zorder=0)
    for i, (value, typed) in enumerate(sorted({target for run in runs for target in run.every_eps})):
        axes.axvline(value, **_DOTS)
        name, height = f"ε = {typed}", 1.01 + 0.06 * (i % 2)  # side by side they could overlap
        axes.text(value, height, name, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    wide = len(runs) > 3 or any(len(run.name) > 20 for run in runs)
    figure.legend(loc="outside lower left", ncols=1 if wide or len(runs) == 1 else 2, frameon=False)
    drawn.append(axes)
    return figure


@_svg
def histogram(runs: Sequence[Run]) -> Any:
    """Histograms of the certified radii of correct images, one panel per run, with dots at the ε of the run."""
    start, end, logarithmic = span(runs)
    figure, panels = _figure(1.0 + 1.3 * len(runs), rows=len(runs))
    bins = np.geomspace(start, end, 31) if logarithmic else np.linspace(start, end, 31)
    for i, (run, axes) in enumerate(zip(runs, panels, strict=True)):
        _scale(axes, start, end, logarithmic)
        axes.set_ylabel("images")
        radii = np.clip(run.radii[run.right], start, end)
        axes.hist(radii, bins=bins, color=_COLOURS[i % len(_COLOURS)], linewidth=0, rwidth=0.92)
        for eps, _ in run.every_eps:
            axes.axvline(eps, **_DOTS)
        axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
        axes.set_title(_short(run), fontsize=11, loc="left")
    panels[-1].set_xlabel("certified radius" + (", those below the axis in its first bar" if logarithmic else ""))
    return figure


@_svg
def budget(modules: Sequence[tuple[str, float]]) -> Any:
    """Bars of the modules' log10 gains, the powers of ten by which each can enlarge a perturbation."""
    figure, (axes,) = _figure(0.8 + 0.24 * len(modules))
    places = range(len(modules))
    axes.barh(places, [gain for _, gain in modules], color=_COLOURS[0], height=0.7)
    axes.set_yticks(places, [name for name, _ in modules])
    axes.invert_yaxis()
    axes.set_xlabel("log10 of gain")
    return figure


def _short(run: Run) -> str:
    """The name of a run, cut to the width of a figure."""
    return run.name if len(run.name) <= _LONGEST else f"{run.name[: _LONGEST - 1]}…"


def _scale(axes: Any, start: float, end: float, logarithmic: bool) -> None:
    axes.set(xscale="log" if logarithmic else "linear", xlim=(start, end))
    if logarithmic:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")


def share_above(values: Array, counted: NDArray[np.bool_], eps: Array) -> Array:
    """Share of images that are counted and have a value strictly larger than ε, among all images."""
    above = np.sort(values[counted])
    return (len(above) - np.searchsorted(above, eps, side="right")) / len(values)


def span(runs: Sequence[Run]) -> tuple[float, float, bool]:
    """The range of ε to show, and the kind of scale."""
    radii = np.concatenate([run.radii[run.right] for run in runs])
    radii = radii[(radii > 0) & (radii < UNBOUNDED)]
    targets = [eps for run in runs for eps, _ in run.every_eps]
    end = 1.08 * max([*targets, *radii.tolist()])
    if not len(radii):
        return 0.0, end, False
    low, quarter, high = np.quantile(radii, [0.05, 0.25, 0.95])
    if max(high, *targets) / quarter < WIDE:
        return 0.0, end, False
    # A few tiny radii must not press what happens around ε against the right edge.
    return 10.0 ** math.floor(math.log10(max(low, min(high, *targets) / _DECADES))), end, True
