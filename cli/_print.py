"""What people and pipes see: tables and bars on a terminal, plain lines elsewhere."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

_DIGITS = 3


def say(line: str) -> None:
    """One line on standard error, as it is."""
    print(line, file=sys.stderr, flush=True)


def annotate(level: str, line: str) -> None:
    """A workflow command of GitHub's on standard error: ``error``, ``warning`` or ``notice``, and a line."""
    for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        line = line.replace(sign, code)
    say(f"::{level} title=lipcert::{line}")


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names and values, a line each; tabs between them in a pipe."""
    print_table((), facts)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; lines with tabs in a pipe, the first of them the column names if there are any."""
    if not sys.stdout.isatty():
        for row in [columns, *rows] if columns else rows:
            print("\t".join(row))
        return
    table = Table(box=box.SIMPLE_HEAD, show_header=bool(columns), pad_edge=False)
    for i in range(len(rows[0]) if rows else len(columns)):
        table.add_column(columns[i] if columns else "", overflow="fold", style="bold" if i == 0 and not columns else "")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


class _Pace(ProgressColumn):
    """How many a second, or seconds each, and how long the rest takes: since the start, for images come in blocks."""

    def render(self, task: Task) -> Text:
        if not task.completed or not task.elapsed:
            return Text()
        speed = task.completed / task.elapsed
        pace = f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each"
        if task.remaining is None:
            return Text(pace)
        return Text(f"{pace}, {timedelta(seconds=math.ceil(task.remaining / speed))} left")


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on standard error while the block runs, if that is a terminal.

    Yields:
        A function that takes how much is done and how much there is, None where that is not known.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _Pace(),
    )
    with _bars(*columns) as bars:
        task = bars.add_task(what, total=total)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """A turning sign on standard error while the block runs, if that is a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with _bars(*columns) as bars:
        bars.add_task(what, total=None)
        yield


@contextlib.contextmanager
def _bars(*columns: ProgressColumn) -> Iterator[Progress]:
    """Shown on standard error while the block runs, if that is a terminal. Bars that rich has started and does not show
    ended with an empty line before its version 14.3, so elsewhere they are not started."""
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    with bars if sys.stderr.isatty() else contextlib.nullcontext():
        yield bars


def upper(log10: float) -> str:
    """A bound for display, rounded up: three digits, or a power of ten where it is large."""
    if log10 == -math.inf:
        return "0"
    if log10 == math.inf:
        return "infinite"
    if log10 >= 4:
        return f"10^{math.ceil(log10 * 10) / 10:.1f}"
    # 1e-12 covers the rounding of the logarithm and of the power.
    return _three_digits(10**log10 * (1 + 1e-12), ROUND_CEILING)


def lower(value: float) -> str:
    """A radius for display, rounded down to three digits."""
    return "0" if value == 0 else _three_digits(value, ROUND_FLOOR)


def share(part: int, whole: int) -> str:
    """A count as count and percentage."""
    return f"{part} of {whole} ({100 * part / whole:.1f} %)"


def percent(part: float | None) -> str:
    """A share as percentage; a dash where it is not known."""
    return "-" if part is None else f"{100 * part:.1f} %"


def _three_digits(value: float, rounding: str) -> str:
    rounded = Context(prec=_DIGITS, rounding=rounding).create_decimal(Decimal(value))
    return f"{rounded:f}" if 1e-3 <= value < 1e4 else f"{rounded:.2e}"
