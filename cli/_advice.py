"""What to do next: the one place where a command, from what it knows at its end, decides what it suggests."""

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
class Known:
    """What a command knows when it ends.

    Attributes:
        model: the words that name the model in another command, with its options.
        channels: channels of its images.
        eps: ε as text.
        log10: decimal logarithm of the global bound; None if there is none, or it is not known.
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


def advise(known: Known) -> str:
    """The next command, which runs as it is apart from names in capitals, and its reason if that is not obvious."""
    data = ["--data", known.data or "IMAGES", *known.lists]
    loose = known.log10 is not None and known.log10 > LOOSE
    if known.certified or (known.images and not loose):
        if known.rows is None:
            return f"the same with --out r.jsonl, then {command('report', 'r.jsonl', '--html', 'r.html')}"
        target = known.rows / "report.html" if known.rows.is_dir() else known.rows.with_suffix(".html")
        return command("report", known.rows, "--html", target)
    if loose:
        reason = "certifies the smoothed classifier, since this network's own bounds are too loose"
        front = ["--denoiser", "natural"] if known.channels == _COLOURS and not known.denoised else []
        sampled = ["--method", "smoothing", "--sigma", "auto", "--limit", "100"]
        return f"{command('certify', *known.model, *data, '--eps', known.eps, *sampled, *front)}, which {reason}"
    if known.log10 is not None and known.log10 > TIGHT and not known.trained:
        train = ["--data", known.data or "TRAIN", *known.lists, "--eps", known.eps]
        return f"{command('finetune', *known.model, *train)}, which trains for the margins that certificates need"
    bundled = list(known.model) == ["bundled"] and known.data is None
    return command("certify", *known.model, *([] if bundled else data), "--eps", known.eps)
