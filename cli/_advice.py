"""The only place that decides, from the outcome of a command, which command it suggests next."""

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from lipcert.errors import counted
from lipcert.inputs.sources import BUNDLED
from lipcert.settings import LOOSE

from ._print import command, typed

# The decimal logarithm of a global bound up to which certificates are worth a try. From LOOSE on training for margins
# makes no progress either, because its loss is a multiple of the bound.
TIGHT = 6.0
_COLOURS = 3
# Images that smoothing is advised for: the first of these numbers whose draws, so many of an image on average, take at
# most so many seconds. Half as much again is for the choice of sigma, and half of the images, within what it uses.
_LIMITS, _DRAWS, _SECONDS, _LEAST, _MOST = (100, 50, 20, 10), 150, 400.0, 8, 48
# From this share of changed logits or classes on, a step of surgery has made another function of a network.
CHANGED = 0.01
TEN_MINUTES = ("--time-budget", "10m")


@dataclass(frozen=True)
class Status:
    """The state of the work when a command ends."""

    model: Sequence[str]  # the words that name it in another command, with its options
    channels: int = _COLOURS
    eps: str = "36/255"
    log10: float | None = None  # of the global bound
    data: str | None = None  # images to certify
    total: float = math.inf  # their number
    train: str = "TRAIN"  # images to train on: not those that measure a network
    lists: Sequence[str] = ()  # the words of --classes and --labels
    trained: bool = False
    random: bool = False  # whether nobody has trained the weights
    original: Sequence[str] = ()  # the words of the model that this one was made from, if they differ as functions
    denoised: bool = False
    images: int = 0
    finished: bool = False  # whether the results are worth a report, however loose the bound is
    rows: Path | None = None
    classes: Callable[[], int] = lambda: 2  # their number
    draw: Callable[[str | None], float] = lambda denoiser: 0.0  # its seconds, with a denoiser of this name


class Advice(NamedTuple):
    """The next command, and its reason where it is not obvious; it runs once names in capitals are replaced.

    Without a command, the reason says what is missing.
    """

    command: str
    reason: str = ""
    others: tuple["Advice", ...] = ()

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The lines of a command's result."""
        if not self.command:
            return [("weights", self.reason)]
        others = [("or", text) if name == "next" else (name, text) for one in self.others for name, text in one.facts]
        return [("next", self.command), *([("because", self.reason)] if self.reason else []), *others]


def random_weights(words: Sequence[str]) -> str:
    """Advice for a model, named by these words, whose weights are random or look so."""
    if "--checkpoint" in words:
        return "untrained, although they come from a file: train them (lipcert finetune), or give another --checkpoint"
    if os.path.isfile(words[0]):
        return "random: train them (lipcert finetune), or start from a model with trained weights"
    return "random: train them (lipcert finetune), or give trained weights with --checkpoint FILE"


def advise(status: Status) -> Advice:
    """The command to run next."""
    data = ["--data", status.data or "IMAGES", *status.lists]
    train = ["--data", status.train, *([] if "--labels" in status.lists else status.lists), "--eps", status.eps]
    model = status.model
    loose = status.log10 is not None and status.log10 > LOOSE
    if status.finished or (status.images and not loose):
        if status.rows is None:
            rows = os.path.join("" if os.access(".", os.W_OK) else tempfile.gettempdir(), "rows.jsonl")
            return Advice(typed("--out", rows), "this writes rows for lipcert report and lipcert verify")
        target = status.rows / "report.html" if status.rows.is_dir() else status.rows.with_suffix(".html")
        return Advice(command("report", status.rows, "--html", target))
    if status.random:
        return Advice("", random_weights(status.model))
    if status.original:
        # A file may hold a converted network, whose accuracy may be lost.
        known = len(status.original) == 1 and not os.path.isfile(status.original[0])
        taught = ["--teacher", *status.original] if known else []
        smoothed = replace(status, model=status.original, original=(), log10=math.inf)
        return Advice(
            command("finetune", *model, *train, *taught),
            "the new network is another function: train it before certifying it",
            (advise(smoothed)._replace(others=()),) if loose else (),
        )
    if loose:
        front = ["--denoiser", "natural"] if status.channels == _COLOURS and not status.denoised else []
        each = _DRAWS * status.draw(front[1] if front else None)
        limit = next((some for some in _LIMITS if some * each <= _SECONDS), _LIMITS[-1])
        sigma = "auto" if status.total > _LEAST else "0.25"
        left_out = max(_LEAST, min(status.total // 2, _MOST)) if sigma == "auto" else 0
        limit = int(min(limit, status.total - left_out))
        minutes = min(10, max(1, math.ceil(1.5 * limit * each / 60)))
        reason = "the bounds of the network itself are too loose; this certifies the smoothed classifier, in about "
        reason += f"{counted(minutes, 'minute')} here; rerun to continue"
        sampled = ["--method", "smoothing", "--sigma", sigma, "--limit", str(limit), *TEN_MINUTES]
        head = command("finetune", *model, *train, "--recipe", "noise", "--only", "head", *front)
        new = ["liresnet_l6w64", "--no-pretrained", "--model-args", f"num_classes={status.classes()}", *train]
        plain = model[:-2] if status.denoised else model  # of which --denoiser is the end
        teacher, made = plain[0], ""
        if len(plain) > 1:  # --teacher takes no options
            teacher, made = "ARTIFACT", f"; {command('convert', *plain, '--attention', 'keep')} writes ARTIFACT"
        others = (
            Advice(head, "a head fitted to noisy images, in minutes, keeps more accuracy at a larger sigma"),
            Advice(
                command("finetune", *new, "--recipe", "liresnet", "--teacher", teacher),
                "training a Lipschitz network with this one as teacher takes hours, and each certificate milliseconds"
                + made,
            ),
        )
        return Advice(command("certify", *status.model, *data, "--eps", status.eps, *sampled, *front), reason, others)
    if status.log10 is not None and status.log10 > TIGHT and not status.trained:
        return Advice(command("finetune", *model, *train), "certificates need large margins; this trains for them")
    bundled = list(status.model) == [BUNDLED] and status.data is None
    what = [] if bundled else [*data, *TEN_MINUTES]
    return Advice(command("certify", *status.model, "--eps", status.eps, *what))
