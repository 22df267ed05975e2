"""The settings of :func:`lipcert.constrain`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Any

from lipcert.errors import InputError
from lipcert.settings._fields import COUNT, INSIDE, POSITIVE, Range, check, documented, option

MEASURE_NAMES = ("spectral", "l1", "nuclear", "clip", "rescale")
ENGINES = ("exact", "faithful")
POINTS = ("projected", "sparse")
_python = partial(option, python=True)


@documented
@dataclass(frozen=True)
class ConstrainSettings:
    """The settings of constrained layers; the constructor checks them.

    The engine ``"faithful"`` is the block-iterative algorithm of the paper, included for comparison: it supports the
    measure ``"l1"`` only and may exceed ``error``, see :func:`lipcert.certvit.constrain_blockwise`. The authors'
    scripts read the β of the paper's tables as ``quantile``; as a threshold, 0.1 is larger than most weights of these
    networks. ``eta`` is averaged over the rows of a layer's output, such as tokens or patches.

    Attributes:
        max_bytes: memory limit for the moments of one pass over the images, and again for those that wait for a
            worker. Layers whose moments do not fit together need further passes.

    Raises:
        InputError: a value is not valid.
    """

    error: float = option("Relative output error of each layer, above 0 and below 1.", 1e-2, range=INSIDE)
    _: KW_ONLY
    measure: str | None = option(
        "The norm to lower, by default spectral; clip and rescale are baselines, which are always reported.",
        None,
        choices=MEASURE_NAMES,
    )
    engine: str = _python(
        "faithful: the block-iterative algorithm of the CertViT paper, for l1.", ENGINES[0], choices=ENGINES
    )
    eta: float | None = _python(
        "In place of ``error``: mean squared error of an output row, as in the CertViT paper.",
        None,
        float | None,
        range=POSITIVE,
    )
    iterations: int | None = option(
        "Maximum number of Douglas-Rachford iterations; by default 150.", None, int | None, range=COUNT
    )
    beta: float | None = _python("Threshold of the proximal step.", None, float | None, range=POSITIVE)
    quantile: float | None = _python(
        "In place of ``beta``: fraction of weights below the threshold; 0.1.", None, float | None, range=INSIDE
    )
    mini_batches: int | None = _python(
        "Number of mini-batches, each with its own constraint; 4.", None, int | None, range=COUNT
    )
    relaxation: float | None = _python(
        "Lambda, in (0, 2); 1.2.", None, float | None, range=Range("above 0 and below 2", 0, 2)
    )
    projection_epochs: int | None = _python(
        "Passes over the mini-batches for a projection; 100.", None, int | None, range=COUNT
    )
    point: str = _python("sparse: the thresholded weights, with a larger error.", POINTS[0], choices=POINTS)
    layers: Iterable[str] | str | None = option("Only these layers: module paths, separated by commas.", None)
    workers: int = option(
        "Processes that solve layers in parallel; 0: none.", 0, range=Range("0 or more", 0, included=True, whole=True)
    )
    max_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        check(self)
        if self.engine == "faithful" and self.lowered != "l1":
            raise InputError(
                f"the faithful engine lowers l1 and not {self.lowered}; choose the measure l1 or the engine exact"
            )
        faithful = ("beta", "quantile", "relaxation", "projection_epochs", "mini_batches")
        named = [name for name in faithful if getattr(self, name) is not None]
        if self.engine != "faithful" and (named or self.point != POINTS[0]):
            raise InputError(f"{', '.join(named) or 'point'}: for the engine faithful only")
        if self.beta is not None and self.quantile is not None:
            raise InputError("beta is the threshold, and quantile the share of weights below it; give one of them")
        if self.layers is not None:
            names = self.layers.split(",") if isinstance(self.layers, str) else self.layers
            object.__setattr__(self, "layers", tuple(name.strip() for name in names))

    @property
    def lowered(self) -> str:
        """The measure: that of the engine, if none was given."""
        return self.measure or ("l1" if self.engine == "faithful" else MEASURE_NAMES[0])

    def solver_options(self) -> dict[str, Any]:
        """The given options of the engine's solver, besides error and measure."""
        named: dict[str, Any] = {"iterations": self.iterations}
        if self.engine == "faithful":
            names = ("beta", "quantile", "relaxation", "eta", "point", "projection_epochs")
            named |= {name: getattr(self, name) for name in names}
        return {name: value for name, value in named.items() if value is not None}

    def described(self) -> dict[str, Any]:
        """The settings of the layers for a recipe, without those at their defaults."""
        always = {"measure": self.lowered, "engine": self.engine, "error": self.error}
        names = ("eta", "iterations", "beta", "quantile", "relaxation", "projection_epochs", "mini_batches", "point")
        ever = {one.name: one.default for one in fields(self)}
        return always | {name: getattr(self, name) for name in names if getattr(self, name) != ever[name]}
