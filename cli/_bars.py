"""Bars on a terminal: what is being done, how far it is, how fast it goes and how long the rest takes."""

import math
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text


def bars() -> Progress:
    """An empty set of bars, to be used as a context; they are gone when it ends."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), Bar(bar_width=10), Pace())  # fits into 80 columns
    return Progress(*columns, console=Console(stderr=True), transient=True)


class Bar(BarColumn):
    """A bar where the total is known; without one the turning sign says enough."""

    def render(self, task: Task) -> object:  # type: ignore[override]
        return Text() if task.total is None and not task.completed else super().render(task)


class Pace(ProgressColumn):
    """What is done of how much; how many a second, or seconds each, and how long the rest takes.

    The speed is that since the start, for images come in blocks. Where nothing is done yet, or the total is not known,
    the time since the start stands in place of the rest.
    """

    def render(self, task: Task) -> Text:
        of = "" if task.total is None else f"/{task.total:g}"
        parts = [f"{math.floor(10 * task.completed) / 10:g}{of}"] if task.completed or of else []
        elapsed = task.elapsed or 0.0
        if task.completed and elapsed:
            speed = task.completed / elapsed
            parts.append(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each")
            if task.remaining is not None:
                parts.append(f"{timedelta(seconds=math.ceil(task.remaining / speed))} left")
                return Text(", ".join(parts))
        return Text(", ".join([*parts, str(timedelta(seconds=int(elapsed)))]))
