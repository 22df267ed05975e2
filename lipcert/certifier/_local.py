"""The local certificate: margins compared with Lipschitz constants on the ball around the image."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipcert import roundoff
from lipcert.bounds import (
    ROUND_DOWN,
    RULES,
    Analysis,
    Boxes,
    Core,
    MarginBounds,
    Nominal,
    Propagation,
    State,
    analyze,
    per_image,
    radii,
)
from lipcert.certifier._method import Method, NormsDone, Subject
from lipcert.certifier._search import search_open
from lipcert.errors import InputError
from lipcert.inputs.artifact import seed_of
from lipcert.model import Model
from lipcert.norms import Budget, Ledger
from lipcert.numerics import INFLATE, l2_norm, times

_EVALUATIONS = 64
_SMALLEST = 1e-100  # on a ball of radius 0 every constant would be 0


class Local:
    """Local-Lip: local Lipschitz constants from boxes, without the units that are constant on the ball.

    Source: Huang, Zhang, Shi, Kolter and Anandkumar, "Training Certifiably Robust Neural Networks with Efficient Local
    Lipschitz Bounds", NeurIPS 2021 (arXiv 2111.01395). :mod:`lipcert.bounds._box` describes and proves the bounds.
    Operations without boxes count with their global constants, so the result is never worse than the global one (their
    theorem 1).

    Attributes:
        delta: failure probability of each image, over the random start vectors of the norms of large operators; 0 if
            every norm is deterministic.
    """

    def __init__(self, model: Model, *, analysis: Analysis | None = None, delta: float = 1e-9, calls: int = 1):
        if model.dtype != torch.float64:
            raise InputError(f"local bounds are computed in float64, the model is in {model.dtype}; use model.double()")
        self.model = model
        self.calls = calls
        self.analysis = analyze(model) if analysis is None else analysis
        if len(self.analysis.output.shape) != 2:
            raise InputError(
                f"the model must return logits (N, classes), it returns shape {self.analysis.output.shape}"
            )
        self.boxes = Boxes(self.analysis)
        self.everywhere = MarginBounds(self.analysis)
        self.delta = delta if any(not core.exact for core in self.boxes.cores.values()) else 0.0

    @torch.no_grad()
    def bound(self, images: Tensor, eps: Tensor) -> Tensor:
        """Lipschitz constants of the logits on the balls of radius ``eps`` around the images."""
        return self._propagate(self._nominal(images), eps).output.constant

    @torch.no_grad()
    def constants(self, images: Tensor, predicted: Tensor, eps: Tensor) -> Tensor:
        """Lipschitz constants K_yj of the margins f_y − f_j on the balls of radius ``eps``.

        If the last operation is a matrix applied to a value with constant K, this is ‖(w_y − w_j)·diag(m)‖·K with m the
        mask of the units that move. Otherwise it is √2 times the constant of the logits.
        """
        propagation = self._propagate(self._nominal(images), eps)
        return self._margin_constants(propagation, predicted.to(self.model.device)).cpu()

    @torch.no_grad()
    def radius(
        self,
        images: Tensor,
        predicted: Tensor,
        margins: Tensor,
        ledger: Ledger | None = None,
        call: int = 0,
    ) -> Tensor:
        """Certified radii, rounded down, to 1 %.

        A radius r is certified if for every j the margin f_y − f_j exceeds K_yj·r, or the largest increase of f_j − f_y
        in the boxes, with constants and boxes for the ball of radius r. The search starts from the radius of the global
        constants. Any radius that passes this test is certified, independently of the search.
        """
        low = radii(margins.cpu(), self.everywhere.of(predicted.cpu()))
        active = (margins > 0).all(1).cpu() & torch.isfinite(low)
        nominal = self._nominal(images)
        ledger = (self._ledger(len(images)) if ledger is None else ledger).part("walk", call)
        margins, predicted = margins.to(self.model.device, torch.float64), predicted.to(self.model.device)

        def holds(index: Tensor, trial: Tensor, step: int) -> Tensor:
            return self._passes(nominal, index, trial, predicted, margins, ledger.part(step))

        return search_open(holds, low, active, _EVALUATIONS) * ROUND_DOWN

    def _passes(
        self,
        nominal: Nominal,
        index: Tensor,
        eps: Tensor,
        predicted: Tensor,
        margins: Tensor,
        ledger: Ledger,
    ) -> Tensor:
        """Whether the margins of the images at ``index`` stay positive on balls of radius ``eps``, both of shape (n,).

        Each propagation has its own part of the ledger, because its radius depends on earlier ones. The parts are
        numbered by the steps of the search, which do not depend on the other images.
        """
        where = index.to(self.model.device)
        propagation = self._propagate(nominal.select(where), eps, ledger.only(index))
        classes, margin = predicted[where], margins[where]
        reach = self._margin_constants(propagation, classes) * propagation.eps[:, None]
        reach = torch.minimum(reach, self._margin_boxes(propagation, classes))
        errors = per_image(propagation.nominal.errors[self.boxes.graph.output])
        margin = margin - (errors + errors.gather(1, classes[:, None])) * INFLATE
        others = torch.ones_like(margin, dtype=torch.bool).scatter_(1, classes[:, None], False)
        return ((margin > reach * INFLATE) | ~others).all(1).cpu()

    def _nominal(self, images: Tensor) -> Nominal:
        return self.boxes.nominal(images.to(self.model.device, torch.float64))

    def _ledger(self, images: int) -> Ledger:
        return Budget(self.delta).ledger(images, seed_of(self.model))

    def _propagate(self, nominal: Nominal, eps: Tensor, ledger: Ledger | None = None) -> Propagation:
        # A propagation computes at most one norm per operation, and a radius needs at most _EVALUATIONS of them.
        charge = Budget(self.delta).split(self.calls * _EVALUATIONS * len(self.boxes.graph.nodes)).delta
        ledger = self._ledger(len(eps)) if ledger is None else ledger
        eps = eps.to(self.model.device, torch.float64).clamp_min(_SMALLEST)
        return Propagation(self.boxes, nominal, eps, ledger if self.delta else None, charge)

    def _head(self, propagation: Propagation) -> tuple[Core, State, Tensor] | None:
        """The last matrix, its operand, and the weights of its columns; None if no matrix computes the logits."""
        factors = propagation.output.factors
        if factors is None or factors.core is None or propagation.boxes.graph.output not in propagation.boxes.cores:
            return None
        core, base = factors.core, factors.base
        return (core, base, per_image(factors.inner * base.moving)) if len(core.input_shape) == 2 else None

    def _differences(self, core: Core, predicted: Tensor) -> Tensor:
        """w_j − w_y, shape (N, classes, features)."""
        return core.weight - core.weight[predicted][:, None]

    def _margin_constants(self, propagation: Propagation, predicted: Tensor) -> Tensor:
        head = self._head(propagation)
        classes = self.boxes.graph.output.shape[-1]
        constants = (propagation.output.constant * (math.sqrt(2) * INFLATE))[:, None].expand(-1, classes)
        if head is not None:
            core, base, weights = head
            rows = l2_norm(self._differences(core, predicted) * weights[:, None], 2)
            rows = times(rows, base.constant[:, None]) * INFLATE
            constants = torch.minimum(constants, rows)
        constants = torch.minimum(constants, self.everywhere.of(predicted.cpu()).to(constants.device))
        return constants.scatter(1, predicted[:, None], 0.0)

    def _margin_boxes(self, propagation: Propagation, predicted: Tensor) -> Tensor:
        """The largest increase of f_j − f_y in the boxes, shape (N, classes)."""
        if self._head(propagation) is None:
            up, down = per_image(propagation.output.up), per_image(propagation.output.down)
            return (up + down.gather(1, predicted[:, None])) * INFLATE
        core = propagation.boxes.cores[propagation.boxes.graph.output]
        features = propagation.states[self.boxes.graph.output.operands[0]]
        rows = self._differences(core, predicted)
        up, down = per_image(features.up)[:, :, None], per_image(features.down)[:, :, None]
        rise = (rows.clamp_min(0) @ up + (-rows).clamp_min(0) @ down).squeeze(2)
        return rise.nan_to_num(nan=math.inf) * INFLATE


class LocalMethod(Method):
    """:class:`Local` as a method of :class:`~lipcert.certifier.Certifier`."""

    name = "local"

    def __init__(self, subject: Subject, budget: Budget):
        super().__init__(subject, budget)
        # A search tries at most _EVALUATIONS radii; bounds of an operation cost about four forward passes of it.
        self.work = 4 * _EVALUATIONS * subject.operations * subject.flops
        calls = 1 if subject.roundoff is None else 2
        self.local = Local(subject.model, analysis=subject.analysis, delta=budget.delta, calls=calls)

    def radii(self, images: Tensor, predicted: Tensor, ledger: Ledger, progress: NormsDone) -> roundoff.Radii:
        return lambda margins, call: self.local.radius(images, predicted, margins, ledger=ledger, call=call)

    @classmethod
    def adds(cls, subject: Subject) -> bool:
        """Whether the network has units that can be constant on a ball; otherwise local bounds equal global ones."""
        rules = (RULES.get(node.op) for node in subject.analysis.graph.nodes)
        return any(rule is not None and rule.inactive for rule in rules)
