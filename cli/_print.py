"""Output: tables on a terminal, plain lines in a pipe, JSON for programs, and progress bars."""

import contextlib
import importlib
import json
import math
import os
import shlex
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from decimal import ROUND_CEILING, ROUND_HALF_EVEN
from pathlib import Path
from typing import Any

from lipcert.errors import InputError, first_line
from lipcert.inputs.files import check_there, is_named_data, place_of
from lipcert.settings import shown

# Set by --quiet: only results and errors are printed.
quiet = False
imported: list[str] = []  # by --import, which further commands need too


def say(line: str) -> None:
    """Prints a line on standard error, unless --quiet is set."""
    if not quiet:
        complain(line)


def complain(line: str) -> None:
    """Prints a line on standard error even with --quiet; it is not wrapped, so that it can be copied."""
    print(line, file=sys.stderr, flush=True)


def print_json(record: Any) -> None:
    """Prints a value as JSON."""
    print(json.dumps(record, indent=2, allow_nan=False))


def command(*words: object) -> str:
    """A quoted command line of these words, after the modules that were imported; capitals are placeholders."""
    imports = [word for name in imported for word in ("--import", name)]
    return " ".join(["lipcert", *(shlex.quote(str(word)) for word in (*imports, *words))])


def typed(*words: str) -> str:
    """The command line of this process, and further words, which end ``--no-out``."""
    before = sys.argv[1:] if not words else [word for word in sys.argv[1:] if word != "--no-out"]
    return shlex.join(["lipcert", *before, *words])


def words_of(options: Mapping[str, object]) -> list[str]:
    """The words of the options that have a value, such as ``--limit 8`` for ``{"limit": 8, "labels": None}``."""
    return [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Prints names and values, one pair per line, separated by tabs in a pipe.

    Advice is printed below the table, where only the terminal breaks its line, so that it can be pasted, and not with
    --quiet.
    """
    first = next((place for place, (name, _) in enumerate(facts) if name == "next"), len(facts))
    print_table((), facts[:first])
    between = ": " if sys.stdout.isatty() else "\t"
    for name, value in () if quiet else facts[first:]:
        print(f"{name}{between}{value}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str] = ()) -> None:
    """Prints a table on a terminal, and lines with tabs in a pipe, after a line of column names if there are any."""
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
        say(f"note: terminal too narrow for {', '.join(left_out)}; see --json")
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
    places = [i for i in range(len(table[-1])) if not table[0] or table[0][i] not in names]
    return [[row[i] for i in places] if row else [] for row in table]


def _width(table: Sequence[Sequence[str]]) -> int:
    """The width of a table without broken cells: a space at each end, three between columns."""
    return sum(max(map(len, column)) + 3 for column in zip(*(row for row in table if row), strict=True)) - 1


Update = Callable[..., None]


# Steps before a time left is shown; standard errors on both sides of it; steps as long as the longest that are added
# to the variance, since the longest of all may be still to come.
_STEPS, _WIDE, _LONGEST = 10, 3.0, 3


class _Pace:
    """The progress of work, and an interval for its end that shrinks."""

    def __init__(self, what: str, total: float | None):
        self.what, self.total = what, total
        self._begin()

    def _begin(self) -> None:
        self.started = self._last = time.monotonic()
        self.done = self._squares = self._most = 0.0
        self._steps, self._ends = 0, (-math.inf, math.inf)

    def update(self, done: float, total: float | None, what: str | None) -> bool:
        """Records progress; returns whether another count began, which has a speed of its own."""
        if again := bool(self.done) and (total != self.total or done < self.done):
            self._begin()
        self.what, self.total = what or self.what, total
        if (step := done - self.done) > 0:
            now = time.monotonic()
            square = (now - self._last) ** 2 / step
            self._squares, self._most = self._squares + square, max(self._most, square)
            self.done, self._last, self._steps = done, now, self._steps + 1
            if total is not None and self._steps >= _STEPS:
                self._estimate_end(max(0.0, total - done), now - self.started)
        return again

    def _estimate_end(self, rest: float, elapsed: float) -> None:
        """Narrows the interval of the end by the mean time of a unit and its variation from step to step."""
        each = elapsed / self.done
        variance = max(0.0, self._squares + _LONGEST * self._most - elapsed * each) / (self._steps - 1)
        error = _WIDE * math.sqrt(variance * rest * (1 + rest / self.done))
        middle = self._last + rest * each
        low, high = max(middle - error, self._ends[0]), min(middle + error, self._ends[1])
        self._ends = (low, high) if low <= high else (middle - error, middle + error)

    @property
    def left(self) -> str:
        """The time left, from the least to the most; empty while it is not known."""
        low, high = (math.ceil(end - time.monotonic()) if math.isfinite(end) else 0 for end in self._ends)
        if high < 1:
            return ""
        least = f"{timedelta(seconds=low)} to " if low > 0 else "up to "
        return f"{'' if low == high else least}{timedelta(seconds=high)} left"

    def __str__(self) -> str:
        """The progress, the mean speed, and the time left, or the time since the start while that is unknown."""
        elapsed, of = time.monotonic() - self.started, "" if self.total is None else f"/{self.total:g}"
        parts = [f"{math.floor(10 * self.done) / 10:g}{of}"] if self.done or of else []
        if self.done and elapsed and not self.left:  # which is a range, and says more
            speed = self.done / elapsed
            parts.append(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each")
        return ", ".join([*parts, self.left or f"{timedelta(seconds=int(elapsed))} so far"])


def _bars() -> Any:
    """rich's bars, which disappear at the end."""
    from rich import progress as of  # takes as long as all else
    from rich.console import Console

    columns = (of.SpinnerColumn(), of.TextColumn("{task.description}"), of.BarColumn(bar_width=10))
    times = (of.TaskProgressColumn(), of.TimeElapsedColumn(), of.TextColumn("{task.fields[pace].left}"))
    console = Console(stderr=True, soft_wrap=True)  # lines above the bars are broken by the terminal alone
    return of.Progress(*columns, *times, console=console, transient=True)


@contextlib.contextmanager
def progress(what: str, total: float | None = None) -> Iterator[Update]:
    """Shows progress on standard error during the block: a bar on a terminal, now and then a line elsewhere."""
    if quiet:
        yield lambda done, total=None, what=None: None
        return
    # A notebook provides a terminal, but would keep every state of a bar.
    if not sys.stderr.isatty() or "JPY_PARENT_PID" in os.environ:
        with _lines(what, total) as update:
            yield update
        return
    pace = _Pace(what, total)
    with _bars() as bars:
        task = bars.add_task(what, total=total, pace=pace)

        def update(done: float, total: float | None = None, what: str | None = None) -> None:
            if pace.update(done, total, what):
                bars.reset(task)
            bars.update(task, completed=done, total=total, description=pace.what)

        yield update


_FIRST_PAUSE, _LAST_PAUSE = 5.0, 60.0  # seconds between lines of progress, which double from the one to the other
_next_line = [1e9, _FIRST_PAUSE]  # when the next is due, and the pause before it; start() sets it


@contextlib.contextmanager
def _lines(what: str, total: float | None) -> Iterator[Update]:
    """Prints a line of progress when one is due; a thread prints it, as the block may report nothing for minutes."""
    pace, ended = _Pace(what, total), threading.Event()

    def update(done: float, total: float | None = None, what: str | None = None) -> None:
        pace.update(done, total, what)

    def watch() -> None:
        while not ended.wait(max(0.0, _next_line[0] - time.monotonic())):
            _next_line[1] = min(2 * _next_line[1], _LAST_PAUSE)
            _next_line[0] = time.monotonic() + _next_line[1]
            say(f"{pace.what}: {pace}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield update
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Shows a message on standard error during the block."""
    with progress(what):
        yield


def in_bytes(count: float) -> str:
    """A number of bytes."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{max(1.0, count / 1e6):.0f} MB"


def start(*files: Path | None, data: str | list[str] | None = None) -> None:
    """Checks that files and images are there, then imports torch and timm, which takes seconds."""
    check_there(*files)
    for spec in [data] if isinstance(data, str) else data or ():
        if not is_named_data(spec):
            place_of(spec)
    _next_line[:] = time.monotonic() + _FIRST_PAUSE, _FIRST_PAUSE
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    # Of torch's and numpy's own, about speed and about numbers that the certificates judge themselves.
    for text in ("There is a performance drop", "divide by zero", "invalid value", "overflow encountered"):
        warnings.filterwarnings("ignore", text)
    with busy("importing torch"):
        try:
            importlib.import_module("lipcert.inputs.loading")
        except (KeyError, ValueError) as error:  # of a variable that torch, timm or the hub reads
            text = str(error)
            names = [name for name, value in os.environ.items() if f"{name}=" in text or f"'{value or name}'" in text]
            remedy = f"correct or unset {', '.join(names) or 'the variables of the environment that they read'}"
            raise InputError(f"cannot import torch and timm: {first_line(error)}; {remedy}") from error


def upper(log10: float) -> str:
    """A bound for display, rounded up."""
    # 1e-12 covers the rounding errors of the logarithm and of the power.
    return _digits(log10, math.ceil, 1 + 1e-12, ROUND_CEILING)


def near(log10: float) -> str:
    """A number that is not a bound, rounded to nearest for display."""
    return _digits(log10, round, 1.0, ROUND_HALF_EVEN)


def _digits(log10: float, whole: Callable[[float], int], slack: float, rounding: str) -> str:
    """Three digits, or a power of ten from 10^4 on."""
    if log10 == -math.inf:
        return "0"
    if log10 == math.inf:
        return "infinite"
    if log10 >= 4:
        return f"10^{whole(log10 * 10) / 10:.1f}"
    return shown(10**log10 * slack, rounding)


def percent(part: float | None) -> str:
    """A fraction as percentage; a dash if it is unknown."""
    return "-" if part is None else f"{100 * part:.1f} %"
