"""The global bound for training: the rules of the certificate, differentiable with respect to the parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipcert.bounds import Analysis, MarginBounds, Value, analyze, analyze_for_training
from lipcert.errors import InputError
from lipcert.model import Model
from lipcert.numerics import Estimator, Upper, as_tensor, estimating

_LARGEST = 1e30


class TrainingBound:
    """K_yj as functions of the parameters.

    If the last operation is a matrix W on features, K_yj = ‖w_y − w_j‖ K with the constant K of the features; otherwise
    K_yj = √2 K with that of the logits. :meth:`step` captures the network again and applies the rules of the
    certificate. So the operators are those of the certificate: convolutions with stride and padding, I + W as one
    operator, folded scales, and weights that the forward code computes. Their norms are ⟨u, W v⟩ after a
    few more steps of subspace iteration. The result is an estimate, usually below the certified bound.

    Args:
        model: the model.
        rows: uses the rows of the head; False gives √2 K for every pair of classes.
        up_to: the path of a module: K is that of its output, for :func:`lipcert.training.cut_loss`.
        steps: of subspace iteration, in each :meth:`step`.

    Attributes:
        certified: the certified K of the last call of :meth:`certify`.

    Raises:
        UnsupportedOperation: operations without a rule.
        InputError: the bound is infinite or above 1e30, so that a loss cannot use it.
    """

    def __init__(self, model: Model, rows: bool = True, up_to: str | None = None, steps: int = 2):
        self.model = model
        self.rows = rows
        self.up_to = up_to
        self.estimator = Estimator(model.dtype, steps)
        self.image = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0))
        self.certified = self.certify()
        if not 0 < self.certified <= _LARGEST:
            obstacles = self.analysis.obstacles()[:1]
            why = "".join(f" ({name} at {path or 'the model'}: {reason})" for name, path, reason in obstacles)
            raise InputError(
                f"the global bound is {self.certified:.3g}, too large to train on{why}; "
                "limit the norms of the layers with max_norm=1, or take the loss 'adversarial'"
            )
        self.step()

    def certify(self) -> float:
        """The certified K with the current weights."""
        self.analysis = analyze(self.model)
        if self.up_to is not None:
            self.certified = float(self._constant(self.analysis))
        else:
            self.certified = MarginBounds(self.analysis, self.rows).features
        return self.certified

    def _constant(self, analysis: Analysis) -> Upper:
        """K of the output of the module ``up_to``."""
        inside = (f"net.{self.up_to}", f"net.{self.up_to}.")
        nodes = [node for node in analysis.graph.nodes if node.path == inside[0] or node.path.startswith(inside[1])]
        value: Value = analysis.values[nodes[-1]]
        return value.lip

    def step(self) -> Tensor:
        """An estimate of K with the current weights, with gradient; call it once after each update."""
        image = self.image.to(self.model.device, self.model.dtype)
        with torch.enable_grad(), estimating(self.estimator):
            analysis = analyze_for_training(self.model, image)
            if self.up_to is not None:
                self.features = as_tensor([self._constant(analysis)])[0]
                return self.features
            bounds = MarginBounds(analysis, self.rows)
            self.features = as_tensor([bounds.constant])[0]
        self.weight = bounds.weight
        return self.features

    def margins(self, classes: Tensor, count: int) -> Tensor:
        """K_yj with gradient, shape (N, count), for the classes y, shape (N,); 0 where j = y."""
        same_class = nn.functional.one_hot(classes, count).bool()
        features = self.features.to(classes.device)
        if self.weight is None:
            return features * ~same_class
        weight = self.weight
        squares = weight.square().sum(1)
        distances = squares[classes, None] + squares - 2 * weight[classes] @ weight.mT
        return features * distances.clamp_min(1e-12 * squares.max().item()).sqrt() * ~same_class
