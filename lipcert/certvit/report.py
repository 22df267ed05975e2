"""The figures of a run of :func:`lipcert.constrain`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """The figures of a solved layer.

    Attributes:
        norm_before: an upper bound on the ℓ2 norm of the layer; for a convolution, on inputs of its size.
        norm_after: the same with the new weight.
        error_asked: the allowed relative output error, ‖(W − W_pre) X‖_F / ‖W_pre X‖_F over the rows X of all images.
        error_reached: that of the new weight on the calibration images; None for a layer that failed.
        sparsity: the fraction of entries that are exactly zero.
        iterations: iterations of the solver; 0 for closed forms.
        gap: an upper bound on the relative distance to the smallest possible norm; None if unknown.
        seconds: the time of the solver.
        rank: the dimension of the span of the inputs, the smallest among the groups of a convolution;
            0 where it is not computed.
        status: "converged"; "as clip" or "as rescale" (the smallest norm is that of this baseline); "iteration limit";
            "zero weight" (the outputs to keep are zero, nothing to lower); "rounding" (the allowed error is too small
            for the dtype of the weight, and W_pre is kept); or "failed" for an unchanged layer.
    """

    norm_before: float
    norm_after: float
    error_asked: float
    error_reached: float | None
    sparsity: float
    iterations: int = 0
    gap: float | None = None
    seconds: float = 0.0
    rank: int = 0
    status: str


@dataclass(frozen=True, kw_only=True)
class LayerConstraint(LayerFigures):
    """The figures of one layer of a network.

    Attributes:
        path: the module path in the network.
        baselines: measure → ``norm_after`` with the weight of this baseline at the same error.
        error_held_out: the error on the held-out images; None without any, or if the outputs are zero on them.
        rows: the number of calibration inputs of the layer, such as tokens or patches.
        width: the number of entries of an input.
        shortfalls: remarks, one line each, with the path of the layer.
    """

    path: str
    baselines: Mapping[str, float]
    error_held_out: float | None = None
    rows: int
    width: int
    shortfalls: tuple[str, ...] = ()


@dataclass(frozen=True)
class NetworkFigures:
    """The whole network with one set of weights.

    Attributes:
        log10_norms: Σ log10 of the norms of the layers in the report, without layers whose weight is zero.
        log10_bound: log10 of the global Lipschitz bound; None for a baseline, or if an operation has no rule.
        accuracy: the fraction of correctly classified held-out images; None without labels or held-out images.
        agreement: the fraction of held-out images with the same top class as before; None without held-out images.
    """

    log10_norms: float
    log10_bound: float | None
    accuracy: float | None
    agreement: float | None


@dataclass(frozen=True)
class ConstraintReport:
    """The results of :func:`lipcert.constrain`.

    Attributes:
        measure: the minimised measure.
        engine: "exact", or "faithful" for the block-iterative algorithm of the paper.
        error: the relative output error allowed in each layer; the largest of all layers if ``eta`` was given.
        images: the number of calibration images.
        held_out: the number of other images, on which errors, accuracy and agreement are measured.
        layers: one entry per layer, in the order of the network.
        before: the network before the run.
        after: the network after the run.
        baselines: measure → the network with every layer constrained by this baseline at the same error.
        untouched: the weights that were not constrained, with the reason.
        notes: remarks on the whole network.
        seconds: the wall-clock time of the run.
        eta: the mean squared error of an output row that was allowed in place of ``error``; None if ``error`` was.
    """

    measure: str
    engine: str
    error: float
    images: int
    held_out: int
    layers: tuple[LayerConstraint, ...]
    before: NetworkFigures
    after: NetworkFigures
    baselines: Mapping[str, NetworkFigures]
    untouched: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    seconds: float
    eta: float | None = None

    @property
    def method(self) -> str:
        """The measure, and the engine if it is not the exact one."""
        return self.measure if self.engine == "exact" else f"{self.measure}, {self.engine} (block-iterative)"

    @property
    def allowed(self) -> str:
        """The allowed error, in words; with η the relative errors of the layers that follow from it."""
        if self.eta is None:
            return f"a relative error of {self.error:g}"
        least = min((layer.error_asked for layer in self.layers), default=self.error)
        return f"a mean squared error of {self.eta:g} a row (η), relative errors of {least:.3g} to {self.error:.3g}"

    @property
    def failed(self) -> tuple[LayerConstraint, ...]:
        """The layers that could not be solved and are unchanged."""
        return tuple(layer for layer in self.layers if layer.status == "failed")

    @property
    def remarks(self) -> tuple[str, ...]:
        """All remarks, one line each."""
        return (*self.notes, *(line for layer in self.layers for line in layer.shortfalls))


def log10_norms(norms: Mapping[str, float]) -> float:
    """Σ log10 of the norms, without those that are zero."""
    return math.fsum(math.log10(norm) for norm in norms.values() if norm > 0)
