"""Progress bars on a terminal: the current task, its progress, its speed and the time left."""

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from ._print import pace


def bars() -> Progress:
    """A context for progress bars, which disappear at its end."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), Bar(bar_width=10), Pace())  # fits into 80 columns
    return Progress(*columns, console=Console(stderr=True), transient=True)


class Bar(BarColumn):
    """A bar if the total is known; otherwise only the spinner."""

    def render(self, task: Task) -> object:  # type: ignore[override]
        return Text() if task.total is None and not task.completed else super().render(task)


class Pace(ProgressColumn):
    """The progress, the speed and the time left."""

    def render(self, task: Task) -> Text:
        return Text(pace(task.completed, task.total, task.elapsed or 0.0))
