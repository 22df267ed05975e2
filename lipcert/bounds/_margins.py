"""The global and the GloRo certificate: margins divided by global Lipschitz constants."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipcert.bounds._global import Analysis
from lipcert.bounds._scales import SMALLEST_SCALE
from lipcert.norms import COMPOSED, Operator
from lipcert.numerics import l2_norm, times

# Margins and quotients are computed in float64 with a few roundings each. This factor lowers a radius by more than they
# can raise it.
ROUND_DOWN = 1 - 2.0**-48


class MarginBounds:
    """Lipschitz constants K_yj of the margins f_y − f_j as functions of the pixels.

    If the last operation is a matrix applied to features h with constant K₋₁, then f_y − f_j = ⟨w_y − w_j, h⟩ + const
    has constant ‖w_y − w_j‖ K₋₁ (Leino, Wang, Fredrikson, "Globally-robust neural networks", ICML 2021, section 3).
    Otherwise, and for the global certificate, f_y − f_j = ⟨e_y − e_j, f⟩ gives √2 K, as in proposition 1 of Havens et
    al., ICML 2024.
    """

    def __init__(self, analysis: Analysis, rows: bool = True):
        output = analysis.output
        self.classes = output.shape[-1]
        self.weight: Tensor | None = None
        last = output.map
        if rows and isinstance(last, Operator) and last.geometry is None and output.base and not last.identity:
            self.weight = last.folded().double()
            self.composed = last.composed
            self.constant = output.base.lip * COMPOSED
        else:
            # √2, rounded up: sqrt rounds to nearest.
            self.constant = output.lip * math.nextafter(math.sqrt(2), 2)
        self.features = float(self.constant)
        self._cache: dict[int, Tensor] = {}

    def of(self, predicted: Tensor) -> Tensor:
        """Upper bounds on K_yj for the predicted classes y."""
        classes, place = predicted.cpu().unique(return_inverse=True)
        for y in {*classes.tolist()} - self._cache.keys():
            self._cache[y] = self._row(y)
        none = torch.zeros(0, self.classes, dtype=torch.float64)
        return torch.cat([none, *(self._cache[y][None] for y in classes.tolist())])[place]

    def of_logits(self) -> Tensor:
        """Upper bounds on the Lipschitz constants of the logits, float64, shape (classes,)."""
        if self.weight is None:
            return torch.full((self.classes,), self.features, dtype=torch.float64)
        # ‖w_j‖ is the distance to a row of zeros.
        extended = torch.cat([self.weight, torch.zeros_like(self.weight[:1])])
        lengths = row_distances(extended, self.classes, self.composed)[: self.classes]
        return times(lengths, torch.full_like(lengths, self.features)).cpu()

    def _row(self, y: int) -> Tensor:
        if self.weight is None:
            row = torch.full((self.classes,), self.features, dtype=torch.float64)
        else:
            distances = row_distances(self.weight, y, self.composed)
            # 0 · ∞ = 0: two classes with equal rows have a constant margin.
            row = times(distances, torch.full_like(distances, self.features))
        row[y] = 0.0
        return row.cpu()


def row_distances(weight: Tensor, y: int, composed: bool = False) -> Tensor:
    """Upper bounds on ‖w_y − w_j‖ for all rows j of a float64 matrix, shape (rows,).

    Rows that were folded with a scale contain rounding errors, so a difference may err by ``COMPOSED`` − 1 relative to
    its terms.
    """
    norm = l2_norm(weight - weight[y], 1) * (1 + 2.0**-51)
    if not composed:
        return norm
    sizes = l2_norm(weight, 1)
    return norm + (sizes + sizes[y]) * (COMPOSED - 1)


def margins(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The predicted classes, shape (N,), and the margins f_y − f_j, float64, shape (N, classes), with +inf for j = y.

    NaN logits give NaN margins, which are never certified. Smaller margins than 1e-60 count as 0, since what they may
    lose by underflow is not bounded (:mod:`lipcert.bounds._scales`).
    """
    logits = logits.double()
    predicted = logits.argmax(dim=1)
    margin = logits.gather(1, predicted[:, None]) - logits
    margin = torch.where(margin < SMALLEST_SCALE, 0.0, margin).scatter_(1, predicted[:, None], math.inf)
    return predicted, torch.where(torch.isnan(logits).any(1, keepdim=True), torch.nan, margin)


def radii(margin: Tensor, constants: Tensor) -> Tensor:
    """min_j (f_y − f_j)/K_yj, rounded down; 0 for ties and NaN, inf if all constants are 0.

    The network is ε-locally robust (Hu et al. 2023, definition 1) for every ε below it.
    """
    ratios = torch.where(torch.isinf(constants), 0.0, margin / constants)
    ratios = torch.where(constants == 0, torch.inf, ratios)
    ratios = torch.where(margin > 0, ratios, 0.0)  # also 0 for NaN margins
    return ratios.amin(dim=1) * ROUND_DOWN
