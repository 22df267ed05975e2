"""The settings of :func:`lipcert.constrain`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any

from lipcert.errors import InputError
from lipcert.settings._fields import one_of, option, plain

MEASURE_NAMES = ("spectral", "l1", "nuclear", "clip", "rescale")
ENGINES = ("exact", "faithful")
KEPT = ("outputs", "activations")
POINTS = ("projected", "sparse")
_FAITHFUL = "Options of the engine faithful"


@dataclass(frozen=True)
class ConstrainSettings:
    """The settings of constrained layers; the constructor checks them.

    Attributes:
        error: relative output error of each layer, above 0 and below 1.
        measure: ``"spectral"``, ``"l1"``, ``"nuclear"``, or one of the baselines ``"clip"`` and ``"rescale"``, which
            are always reported for comparison.
        keep: ``"outputs"`` of each layer, or ``"activations"``. With activations, a layer followed by a ReLU only has
            to keep the outputs of the ReLU. This leaves inactive units free and gives lower norms, see
            :mod:`lipcert.certvit.relu`. The bound on the error is the same.
        eta: η of the paper, which replaces ``error``: the squared error of a layer's output for one row, such as a
            token or a patch, averaged over rows.
        iterations: maximum number of Douglas–Rachford iterations. None means 150, or 2 in the engine ``"faithful"``.
            The exact engine takes up to twice as many for a layer whose activations are kept.
        beta: β of the engine ``"faithful"``: the share of weights that the threshold of the first step sets to zero;
            None means 0.1. The authors' scripts interpret the β of their tables in this way. The paper's text uses β as
            the threshold itself, but 0.1 is larger than most weights of a transformer.
        relaxation: λ of the engine ``"faithful"``; None means 1.2.
        projection_epochs: passes over the mini-batches for one projection in the engine ``"faithful"``; None means 100,
            as in the authors' scripts.
        point: the sequence that the engine ``"faithful"`` returns: ``"projected"``, which nearly meets the error, or
            ``"sparse"``, the thresholded one, which has zeros but exceeds the error more, as in the authors' scripts.
        engine: ``"exact"``, or ``"faithful"`` for the block-iterative algorithm of the paper, which is included for
            comparison. It supports the measure ``"l1"`` only and may exceed ``error``, see
            :func:`lipcert.certvit.constrain_blockwise`. The images are split into 4 mini-batches.
        layers: module paths in ``model.net``, as a sequence or separated by commas; None constrains all supported
            layers.
        workers: processes that solve layers; 0 solves in this process. Worker processes need ``if __name__ ==
            "__main__"``.
        devices: devices for solving; layer k is solved on ``devices[k % len(devices)]``.
        resume_dir: folder for finished layers, from which an interrupted run continues.
        max_bytes: memory limit for the moments of one pass over the images, and again for those that wait for a
            worker. Layers whose moments do not fit together need further passes.

    Raises:
        InputError: a value is not valid.
    """

    error: float = option("Relative output error of each layer, above 0 and below 1.", 1e-2, float)
    _: KW_ONLY
    measure: str = option(
        "What to lower; clip and rescale are baselines, which are reported in any case.",
        MEASURE_NAMES[0],
        choices=MEASURE_NAMES,
    )
    engine: str = option(
        "faithful: the paper's block-iterative algorithm for l1, to compare with.", ENGINES[0], choices=ENGINES
    )
    keep: str = option(
        "activations: where a ReLU follows a layer, only what it makes of the outputs has to stay.",
        KEPT[0],
        choices=KEPT,
    )
    eta: float | None = option(
        "In place of --error: mean squared error of an output row, as in the CertViT paper.", None, float | None
    )
    iterations: int | None = option("Limit of Douglas-Rachford: 150, or 2 for faithful.", None, int | None)
    beta: float | None = option("Share of weights below the threshold; 0.1.", None, float | None, group=_FAITHFUL)
    relaxation: float | None = option("Lambda, in (0, 2); 1.2.", None, float | None, group=_FAITHFUL)
    projection_epochs: int | None = option(
        "Passes over the mini-batches for a projection; 100.", None, int | None, group=_FAITHFUL
    )
    point: str = option(
        "sparse: the thresholded weights, which miss the error more.", POINTS[0], choices=POINTS, group=_FAITHFUL
    )
    layers: Iterable[str] | str | None = option(
        "Only these layers: module paths, separated by commas.", None, str | None
    )
    workers: int = option("Processes that solve layers in parallel; 0: this process alone.", 0, int)
    resume_dir: str | os.PathLike[str] | None = option(
        "Keep finished layers in this folder; a stopped run continues there.", None, Path | None
    )
    devices: Sequence[str] = ("cpu",)
    max_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        plain(self)
        one_of("measure", self.measure, MEASURE_NAMES)
        one_of("engine", self.engine, ENGINES)
        if self.engine == "faithful" and self.measure != "l1":
            raise InputError(
                f"the faithful engine lowers l1 and not {self.measure}; choose the measure l1 or the engine exact"
            )
        one_of("keep", self.keep, KEPT)
        one_of("point", self.point, POINTS)
        self._check_numbers()
        if not 0 < self.error < 1:
            raise InputError(f"the relative output error must be above 0 and below 1, got {self.error}")
        if self.workers < 0:
            raise InputError(f"workers must be 0, for none besides this process, or more, got {self.workers}")
        if self.layers is not None:
            names = self.layers.split(",") if isinstance(self.layers, str) else self.layers
            object.__setattr__(self, "layers", tuple(name.strip() for name in names))

    def _check_numbers(self) -> None:
        """Checks the numbers, and that options of the engine faithful are for it."""
        faithful = ("beta", "relaxation", "projection_epochs")
        if self.engine != "faithful":
            names = [name for name in faithful if getattr(self, name) is not None]
            if names or self.point != POINTS[0]:
                raise InputError(f"{', '.join(names) or 'point'}: for the engine faithful only")
        for name, low, high in (("eta", 0, math.inf), ("beta", 0, 1), ("relaxation", 0, 2)):
            value = getattr(self, name)
            if value is not None and not low < value < high:
                raise InputError(f"{name} must be above {low} and below {high}, got {value}")
        for name in ("iterations", "projection_epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")

    def solver_options(self) -> dict[str, Any]:
        """The given options of the engine's solver, besides error and measure."""
        named: dict[str, Any] = {"iterations": self.iterations}
        if self.engine == "faithful":
            named |= {"quantile": self.beta, "relaxation": self.relaxation, "eta": self.eta, "point": self.point}
            named |= {"projection_epochs": self.projection_epochs}
        return {name: value for name, value in named.items() if value is not None}

    def described(self) -> dict[str, Any]:
        """The settings of the layers for a recipe, without those at their defaults."""
        always = {"measure": self.measure, "engine": self.engine, "error": self.error}
        names = ("keep", "eta", "iterations", "beta", "relaxation", "projection_epochs", "point")
        ever = {one.name: one.default for one in fields(self)}
        return always | {name: getattr(self, name) for name in names if getattr(self, name) != ever[name]}
