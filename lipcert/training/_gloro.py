"""GloRo's margins for training: the certified global bound, and how it goes along with the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipcert.bounds import analyze
from lipcert.certifier._margins import MarginBounds
from lipcert.errors import InputError
from lipcert.model import Model
from lipcert.norms import gram_norm
from lipcert.training._matrices import Matrix, matrices

_STEP = 1e-3
_LARGEST = 1e30


@dataclass
class _Term:
    """One factor (‖W‖/‖W⁰‖)^a of the bound."""

    matrix: Matrix
    start: Tensor
    exponent: float


class TrainingBound:
    """K_yj as functions of the weights, near those that the model has now.

    If the last operation is a Linear on features, K_yj = ‖w_y − w_j‖ K, K being the features' constant; else √2 K with
    that of the logits. K is the certified bound at the present weights; for weights nearby it is taken for

        K(W) ≈ K(W⁰) ∏_l (‖W_l‖ / ‖W_l⁰‖)^{a_l},    a_l = ∂ log K / ∂ log ‖W_l‖ at W⁰,

    where a_l comes from the certified bound with W_l scaled up by 0.1 %, and ‖·‖ is differentiable (Gram iteration). So
    the direction in which K falls is that of the composition of all rules, skip connections and attention included.
    It is an estimate: build it anew as the weights move. That costs one global analysis for each matrix.

    Args:
        model: the model.

    Raises:
        UnsupportedOperation: operations without a rule.
        InputError: the bound is above 1e30, so that no loss with it is of use.
    """

    def __init__(self, model: Model):
        bounds = MarginBounds(analyze(model))
        self.head = _head(model, bounds.weight)
        self.start = self._features(model)
        if not 0 < self.start <= _LARGEST:
            raise InputError(
                f"the global bound is {self.start:.3g}, of no use in a loss; "
                "convert the model first, or take the loss 'anchored'"
            )
        self.terms = [self._term(model, m) for m in matrices(model) if m.module is not self.head]

    def features(self) -> Tensor:
        """K at the present weights, with gradient."""
        logarithm: Tensor | float = math.log(self.start)
        for term in self.terms:
            if term.exponent:
                now = gram_norm(term.matrix.value()).amax()
                logarithm = logarithm + term.exponent * (now / term.start).log()
        return torch.as_tensor(logarithm).exp()

    def margins(self, classes: Tensor, count: int) -> Tensor:
        """K_yj with gradient, shape (N, count), for classes y of shape (N,); 0 where j = y."""
        own = nn.functional.one_hot(classes, count).bool()
        features = self.features().to(classes.device)
        if self.head is None:
            return features * ~own
        weight = self.head.weight
        squares = weight.square().sum(1)
        distances = squares[classes, None] + squares - 2 * weight[classes] @ weight.mT
        return features * distances.clamp_min(1e-12 * squares.max().item()).sqrt() * ~own

    def _features(self, model: Model) -> float:
        return MarginBounds(analyze(model), rows=self.head is not None).features

    def _term(self, model: Model, matrix: Matrix) -> _Term:
        with torch.no_grad():
            value = matrix.value()
            before = value.clone()
            start = gram_norm(value).amax()
            try:
                value.mul_(1 + _STEP)
                exponent = math.log(self._features(model) / self.start) / math.log1p(_STEP)
            finally:
                value.copy_(before)
        return _Term(matrix, start, exponent if start > 0 else 0.0)


def _head(model: Model, weight: Tensor | None) -> nn.Linear | None:
    """The module whose weight the last operation is, or None where it is more than one module's weight."""
    if weight is None:
        return None
    layers = (m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.shape == weight.shape)
    return next((m for m in layers if torch.equal(m.weight.double(), weight.double().to(m.weight.device))), None)
