"""Output: tables on a terminal, plain lines in a pipe, JSON for programs, and progress bars."""

import contextlib
import importlib
import json
import math
import os
import shlex
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

# Set by --quiet: only results and errors are printed.
quiet = False

_DIGITS = 3


def say(line: str) -> None:
    """Prints a line on standard error, unless --quiet is set."""
    if not quiet:
        complain(line)


def complain(line: str) -> None:
    """Prints a line on standard error even with --quiet; on a terminal it is wrapped between words."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        line = "\n".join(textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)) or line
    print(line, file=sys.stderr, flush=True)


def annotate(level: str, line: str) -> None:
    """Prints a workflow command of GitHub on standard error: ``error``, ``warning`` or ``notice``, and a line."""
    for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        line = line.replace(sign, code)
    complain(f"::{level} title=lipcert::{line}")


def print_json(record: Any) -> None:
    """Prints a value as JSON."""
    print(json.dumps(record, indent=2, allow_nan=False))


def command(*words: object) -> str:
    """A quoted command line of these words; capitals are placeholders for the user."""
    return " ".join(["lipcert", *(shlex.quote(str(word)) for word in words)])


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Prints names and values, one pair per line, separated by tabs in a pipe."""
    print_table((), facts)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str] = ()) -> None:
    """Prints a table on a terminal, and lines with tabs in a pipe, after a line of column names if there are any.

    Args:
        columns: the column names; empty for a table without a head.
        rows: the cells of each row.
        optional: columns that are left out on a narrow terminal, in this order.
    """
    if not sys.stdout.isatty():
        for row in [columns, *rows] if columns else rows:
            print("\t".join(row))
        return
    whole = [columns, *rows]
    width = shutil.get_terminal_size().columns
    without = [optional[:n] for n in range(len(optional) + 1)]
    left_out = next((names for names in without if _width(_without(whole, names)) <= width), optional)
    columns, *rows = _without(whole, left_out)
    if left_out:
        say(f"note: this terminal is too narrow for {', '.join(left_out)}; --json has them")
    from rich import box  # takes as long as all else
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=bool(columns), pad_edge=False)
    for i in range(len(rows[0]) if rows else len(columns)):
        table.add_column(columns[i] if columns else "", overflow="fold", style="bold" if i == 0 and not columns else "")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _without(table: Sequence[Sequence[str]], names: Sequence[str]) -> list[list[str]]:
    """A table, its head first, without some of its columns."""
    kept = [i for i in range(len(table[-1])) if not table[0] or table[0][i] not in names]
    return [[row[i] for i in kept] if row else [] for row in table]


def _width(table: Sequence[Sequence[str]]) -> int:
    """How wide a table is where no cell is broken: a space at each end, three between columns."""
    return sum(max(map(len, column)) + 3 for column in zip(*(row for row in table if row), strict=True)) - 1


Update = Callable[..., None]


def _bars() -> Any:
    """rich's bars, which disappear at the end; the time left is by the mean speed, since images finish in blocks."""
    from rich import progress as of  # takes as long as all else
    from rich.console import Console

    columns = (of.SpinnerColumn(), of.TextColumn("{task.description}"), of.BarColumn(bar_width=10))
    times = (of.TaskProgressColumn(), of.TimeElapsedColumn(), of.TimeRemainingColumn())
    console = Console(stderr=True)
    return of.Progress(*columns, *times, console=console, transient=True, speed_estimate_period=math.inf)


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Update]:
    """Shows a progress bar on standard error during the block, if that is a terminal and not that of a notebook.

    Yields:
        A function of the amount done, the total or None if unknown, and a new name of the task if it has changed.
    """
    # A notebook provides a terminal, but would keep every state of a bar.
    if quiet or not sys.stderr.isatty() or "JPY_PARENT_PID" in os.environ:
        yield lambda done, total=None, what=None: None
        return
    with _bars() as shown:
        task = shown.add_task(what, total=total)

        def update(done: float, total: float | None = None, what: str | None = None) -> None:
            known = shown.tasks[0]
            if known.completed and total != known.total:  # another count, with a speed of its own
                shown.reset(task, total=total, description=what or known.description)
            shown.update(task, completed=done, total=total, description=what or known.description)

        yield update


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Shows a spinner on standard error during the block, if that is a terminal."""
    with progress(what):
        yield


def start() -> None:
    """Imports torch and timm, which takes seconds; a command calls it after its options are checked."""
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    with busy("importing torch"):
        importlib.import_module("lipcert.inputs.loading")


def upper(log10: float) -> str:
    """A bound for display, rounded up: three digits, or a power of ten from 10^4 on."""
    if log10 == -math.inf:
        return "0"
    if log10 == math.inf:
        return "infinite"
    if log10 >= 4:
        return f"10^{math.ceil(log10 * 10) / 10:.1f}"
    # 1e-12 covers the rounding errors of the logarithm and of the power.
    return _three_digits(10**log10 * (1 + 1e-12), ROUND_CEILING)


def lower(value: float) -> str:
    """A radius for display, rounded down to three digits."""
    return "0" if value == 0 else _three_digits(value, ROUND_FLOOR)


def share(part: int, whole: int) -> str:
    """A count with its total and percentage."""
    return f"{part} of {whole} ({100 * part / whole:.1f} %)"


def percent(part: float | None) -> str:
    """A fraction as percentage; a dash if it is unknown."""
    return "-" if part is None else f"{100 * part:.1f} %"


def _three_digits(value: float, rounding: str) -> str:
    rounded = Context(prec=_DIGITS, rounding=rounding).create_decimal(Decimal(value))
    return f"{rounded:f}" if 1e-3 <= value < 1e4 else f"{rounded:.2e}"
