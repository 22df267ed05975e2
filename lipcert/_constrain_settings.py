"""What can be asked of :func:`lipcert.constrain`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from lipcert._settings import one_of, option, plain
from lipcert.errors import InputError

METHODS = ("spectral", "l1", "nuclear", "clip", "rescale")
ENGINES = ("exact", "faithful")


@dataclass(frozen=True)
class ConstrainSettings:
    """What is asked of constrained layers; checked when it is made.

    Attributes:
        error: relative output error of each layer, above 0 and below 1.
        measure: ``"spectral"``, ``"l1"``, ``"nuclear"``, or one of the baselines ``"clip"`` and ``"rescale"``, which
            are reported beside the others in any case.
        engine: ``"exact"``, or ``"faithful"`` for the block-iterative algorithm of the paper, which knows the measure
            ``"l1"`` only, may miss ``error``, and is there to be compared: see
            :func:`lipcert.certvit.constrain_blockwise`. The images are dealt out to 4 mini-batches.
        layers: module paths in ``model.net``, or a text of them with commas between; None takes all that can be
            constrained.
        workers: processes that solve layers; 0 solves in this one. More need ``if __name__ == "__main__"``.
        devices: where to solve; worker k takes ``devices[k % len(devices)]``.
        resume_dir: folder for finished layers, from which an interrupted run goes on.
        max_bytes: limit for the moments held at a time, once for calibration and once for held-out images; layers whose
            moments do not fit together take another pass over the images each.

    Raises:
        InputError: a value that cannot be used.
    """

    error: float = option("Relative output error of each layer, above 0 and below 1.", 1e-2, float)
    _: KW_ONLY
    measure: str = option(
        "What to lower; clip and rescale are baselines, which are reported in any case.", METHODS[0], choices=METHODS
    )
    engine: str = option(
        "faithful: the paper's block-iterative algorithm for l1, to compare with.", ENGINES[0], choices=ENGINES
    )
    layers: Iterable[str] | str | None = option(
        "Only these layers, by their paths with commas between.", None, str | None
    )
    workers: int = option("Processes that solve layers side by side; 0: none besides this.", 0, int)
    resume_dir: str | os.PathLike[str] | None = option(
        "Keep finished layers in this folder; a stopped run goes on there.", None, Path | None
    )
    devices: Sequence[str] = ("cpu",)
    max_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        plain(self)
        one_of("measure", self.measure, METHODS)
        one_of("engine", self.engine, ENGINES)
        if self.engine == "faithful" and self.measure != "l1":
            raise InputError(
                f"the faithful engine lowers l1 and not {self.measure}; choose the measure l1 or the engine exact"
            )
        if not 0 < self.error < 1:
            raise InputError(f"the relative output error must be above 0 and below 1, got {self.error}")
        if self.workers < 0:
            raise InputError(f"workers must be 0, for none besides this process, or more, got {self.workers}")
        if self.layers is not None:
            names = self.layers.split(",") if isinstance(self.layers, str) else self.layers
            object.__setattr__(self, "layers", tuple(name.strip() for name in names))
