"""Bars on a terminal: what is being done, how far it is, how fast it goes and how long the rest takes."""

import math
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


def bars() -> Progress:
    """An empty set of bars, to be used as a context; they are gone when it ends."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), Bar(bar_width=20), TimeElapsedColumn(), Pace())
    return Progress(*columns, console=Console(stderr=True), transient=True)


class Bar(BarColumn):
    """A bar where the total is known; without one the turning sign says enough."""

    def render(self, task: Task) -> object:  # type: ignore[override]
        return Text() if task.total is None and not task.completed else super().render(task)


class Pace(ProgressColumn):
    """What is done of how much; how many a second, or seconds each, and how long the rest takes.

    The speed is that since the start, for images come in blocks.
    """

    def render(self, task: Task) -> Text:
        if task.total is None and not task.completed:
            return Text()
        of = "" if task.total is None else f"/{task.total:g}"
        done = f"{math.floor(10 * task.completed) / 10:g}{of}"
        if not task.completed or not task.elapsed:
            return Text(done)
        speed = task.completed / task.elapsed
        pace = f"{done}, {speed:.1f}/s" if speed >= 1 else f"{done}, {1 / speed:.1f} s each"
        if task.remaining is None:
            return Text(pace)
        return Text(f"{pace}, {timedelta(seconds=math.ceil(task.remaining / speed))} left")
