"""What :func:`lipcert.constrain` did, in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerConstraint:
    """One layer.

    Attributes:
        path: module path in the network.
        norm_before: upper bound of the layer's ℓ2 norm; of a convolution on images of the size it gets.
        norm_after: the same with the new weight.
        baselines: measure → the same with the weight that this baseline gives at the same error.
        error_asked: relative output error allowed, ‖(W − W_pre) X‖_F / ‖W_pre X‖_F over the rows X of all images.
        error_reached: the same with the weight as it is now in the network, on the calibration images; None for a
            layer that failed.
        error_held_out: the same on the held-out images; None without any, or where the outputs are zero on them.
        sparsity: share of entries that are exactly zero.
        iterations: of the solver; 0 for closed forms.
        gap: relative distance to the best norm possible at most; None where it is not known.
        seconds: of the solver.
        rows: calibration inputs that the layer saw, such as tokens or patches.
        width: entries of an input.
        rank: dimensions that these inputs span, the fewest among the groups of a convolution.
        status: "converged", "iteration limit", "zero weight", "rounding", or "failed" for a layer left as it was.
        shortfalls: whatever else there is to say, one line each, with the layer's path.
        behind: "relu" where the errors are those that the ReLU behind the layer tells; else None.
    """

    path: str
    norm_before: float
    norm_after: float
    baselines: Mapping[str, float]
    error_asked: float
    error_reached: float | None
    error_held_out: float | None
    sparsity: float
    iterations: int
    gap: float | None
    seconds: float
    rows: int
    width: int
    rank: int
    status: str
    shortfalls: tuple[str, ...]
    behind: str | None = None


@dataclass(frozen=True)
class NetworkFigures:
    """The whole network with one set of weights.

    Attributes:
        log10_norms: Σ log10 of the norms of the layers in the report, without layers whose weight is zero.
        log10_bound: log10 of the global Lipschitz bound; None for a baseline, or where an operation has no rule.
        accuracy: share of the held-out images that are classified right; None without labels or held-out images.
        agreement: share of them whose top class is that of the network before; None without held-out images.
    """

    log10_norms: float
    log10_bound: float | None
    accuracy: float | None
    agreement: float | None


@dataclass(frozen=True)
class ConstraintReport:
    """What :func:`lipcert.constrain` did.

    Attributes:
        measure: what was minimised in each layer.
        engine: "exact", or "faithful" for the block-iterative algorithm of the paper.
        error: relative output error allowed in each layer.
        images: calibration images.
        held_out: images that took no part, on which errors, accuracy and agreement are measured.
        layers: one entry a layer, in the order of the network.
        before: the network as it was.
        after: the network as it is.
        baselines: measure → the network with every layer constrained by this baseline at the same error.
        untouched: weights that were left out of the run, and why.
        notes: what there is to say about the whole network.
        seconds: wall-clock time of everything.
        keep: "outputs", or "activations" where that is what stays of layers with a ReLU behind them.
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
    keep: str = "outputs"

    @property
    def method(self) -> str:
        """The measure, and the engine where it is not the exact one."""
        return self.measure if self.engine == "exact" else f"{self.measure}, {self.engine} (block-iterative)"

    @property
    def failed(self) -> tuple[LayerConstraint, ...]:
        """The layers that could not be solved and were left as they were."""
        return tuple(layer for layer in self.layers if layer.status == "failed")

    @property
    def remarks(self) -> tuple[str, ...]:
        """All that should be read before the numbers are trusted, one line each."""
        return (*self.notes, *(line for layer in self.layers for line in layer.shortfalls))


def log10_norms(norms: Mapping[str, float]) -> float:
    """Σ log10 over the layers, without those that are zero."""
    return math.fsum(math.log10(norm) for norm in norms.values() if norm > 0)
