"""Progress bars on a terminal: the current task, its progress, its speed and the time left."""

import math
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text


def bars() -> Progress:
    """A context for progress bars, which disappear at its end."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), Bar(bar_width=10), Pace())  # fits into 80 columns
    return Progress(*columns, console=Console(stderr=True), transient=True)


class Bar(BarColumn):
    """A bar if the total is known; otherwise only the spinner."""

    def render(self, task: Task) -> object:  # type: ignore[override]
        return Text() if task.total is None and not task.completed else super().render(task)


class Pace(ProgressColumn):
    """The progress, the speed and the time left; the time since the start if the speed or the total is unknown.

    The speed is the mean since the start, because images are finished in blocks.
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
