"""What to do next: the one place where a command, from its outcome, decides what it suggests."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lipcert.settings import LOOSE

from ._print import command

# The decimal logarithm of a global bound up to which certificates are worth a try. From LOOSE on training for margins
# makes no progress either, because its loss is a multiple of the bound.
TIGHT = 6.0
_COLOURS = 3


@dataclass(frozen=True)
class Status:
    """The state of the work when a command ends.

    Attributes:
        model: the words that name the model in another command, with its options.
        channels: channels of its images.
        eps: ε as text.
        log10: decimal logarithm of the global bound; None without one.
        data: ``--data`` as the user typed it; None without.
        lists: the files that give its images their labels, as words: ``--classes`` and ``--labels``.
        trained: whether the model has been trained for certificates.
        denoised: whether a denoiser stands in front of the model.
        images: how many images were certified; 0 before.
        certified: how many of them were certified at ε.
        rows: the result file; None if there is none.
    """

    model: Sequence[str]
    channels: int = _COLOURS
    eps: str = "36/255"
    log10: float | None = None
    data: str | None = None
    lists: Sequence[str] = ()
    trained: bool = False
    denoised: bool = False
    images: int = 0
    certified: int = 0
    rows: Path | None = None


def advise(status: Status) -> str:
    """The next command, which runs as it is apart from names in capitals, and its reason if that is not obvious."""
    data = ["--data", status.data or "IMAGES", *status.lists]
    loose = status.log10 is not None and status.log10 > LOOSE
    if status.certified or (status.images and not loose):
        if status.rows is None:
            return f"the same with --out r.jsonl, then {command('report', 'r.jsonl', '--html', 'r.html')}"
        target = status.rows / "report.html" if status.rows.is_dir() else status.rows.with_suffix(".html")
        return command("report", status.rows, "--html", target)
    if loose:
        reason = "certifies the smoothed classifier: the bounds of the network itself are too loose"
        front = ["--denoiser", "natural"] if status.channels == _COLOURS and not status.denoised else []
        sampled = ["--method", "smoothing", "--sigma", "auto", "--limit", "100"]
        return f"{command('certify', *status.model, *data, '--eps', status.eps, *sampled, *front)}, which {reason}"
    if status.log10 is not None and status.log10 > TIGHT and not status.trained:
        train = ["--data", status.data or "TRAIN", *status.lists, "--eps", status.eps]
        return f"{command('finetune', *status.model, *train)}, which trains for the margins that certificates need"
    bundled = list(status.model) == ["bundled"] and status.data is None
    return command("certify", *status.model, *([] if bundled else data), "--eps", status.eps)
