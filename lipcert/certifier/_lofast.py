"""LoFAST: the local sensitivity of dot-product attention, layer by layer.

Source: Havens, Araujo, Zhang, Hu, "Fine-grained local sensitivity analysis of standard dot-product self-attention",
ICML 2024. Its Theorem 1 bounds the effect of one attention layer by the norm of its Jacobian and a second-order term.
Here both are derived for any operation, so the constants differ from those of the paper, and have other letters. The
theorem as published is the method ``lofast-paper``.

A network (equation 9 of the paper) is split into stages at values through which everything later depends on the image.
In a ViT these are the embedding and both residual additions of every block, so J_k is the Jacobian of the residual
block itself. Then

    ρ_{k+1} = ‖J_k‖ ρ_k + r_k(ρ_k),

where J_k is the exact Jacobian of the stage at the image and r_k the sum of the stage's remainders, each times the norm
of the Jacobian from its operation to the stage's end. Every operation in a stage deviates by at most the norm of the
Jacobian from the stage's start times ρ_k, plus the remainders before it. The proof is that of the anchored certificate
(docs/note.md) within one stage. The first-order constants of the stages multiply; the
anchored certificate avoids this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds import per_image
from lipcert.certifier._linearised import LinearisedMethod
from lipcert.certifier._search import search
from lipcert.certifier.anchored.deviations import Deviations, Linearization
from lipcert.certifier.anchored.jacobians import FEW, explicit_error, perturbed
from lipcert.certifier.anchored.margin import change, head_distances
from lipcert.certifier.anchored.network import Network
from lipcert.certifier.anchored.norms import NormFinder, NormOptions, NormProgress, Norms
from lipcert.certifier.anchored.plan import NormPlan, layerwise_pairs
from lipcert.graph import Node
from lipcert.model import Model
from lipcert.norms import Ledger
from lipcert.numerics import SAFETY, at_most, l2_norm


class LoFAST:
    """The layer-by-layer certificate of one model; arguments as for :class:`~lipcert.certifier.Anchored`."""

    def __init__(self, model: Model, *, at: str | int | None = None, **options: Any):
        settings = NormOptions(**options)
        self.network = Network(model, at=at)
        self.plan = NormPlan(self.network, layerwise_pairs(self.network))
        self.finder = NormFinder(self.network, self.plan, settings)

    @property
    def work(self) -> float:
        """The approximate number of floating-point operations for the norms of an image."""
        return self.plan.work

    def __call__(self, images: Tensor, progress: NormProgress | None = None, ledger: Ledger | None = None) -> Layers:
        """Linearises every stage at images, shape (N, C, H, W), and computes the norms; the rest is arithmetic in ε."""
        return Layers(Linearization(self.finder, images, progress, ledger=ledger))


class LoFASTMethod(LinearisedMethod):
    """:class:`LoFAST` as a method of :class:`~lipcert.certifier.Certifier`."""

    name = "lofast"

    def linearise(self) -> LoFAST:
        settings = self.subject.settings
        options = {"delta": self.budget.delta, "rigor": settings.rigor}
        return LoFAST(self.subject.model, at=settings.at, **options)


class Layers:
    """The stages of a network linearised at N images: bounds for any ε."""

    def __init__(self, linearization: Linearization):
        self.linearization = linearization

    @property
    def norms(self) -> Norms:
        return self.linearization.norms

    def deviations(self, eps: Tensor) -> Deviations:
        """Bounds on the deviations of all values for perturbations of norm at most eps, shape (N,)."""
        return self.linearization.propagate(eps, layerwise=True)

    def radius(self, predicted: Tensor, margins: Tensor, limit: int | None = None) -> Tensor:
        """Certified radii, float64, shape (N,), rounded down, to 1 % or better."""
        at = self.linearization
        distances, rows = head_distances(at, predicted), logit_differences(at, predicted)
        slope = math.sqrt(2) * torch.as_tensor(at.gain(at.network.source, at.network.stages[0].start))
        for stage in at.network.stages:
            slope = slope * at.gain(stage.start, stage.end)
        guess = torch.nan_to_num(margins, posinf=math.inf).amin(1).clamp_min(0) / slope

        def remaining(eps: Tensor) -> Tensor:
            deviations = self.deviations(eps)
            bounds = margins - change(at, deviations, distances)
            if rows:
                bounds = torch.maximum(bounds, margins - change_by_rows(at, deviations, rows))
            return bounds.nan_to_num(nan=-math.inf, posinf=math.inf).amin(1)

        return search(remaining, guess) * (1 - SAFETY)


def logit_differences(at: Linearization, predicted: Tensor) -> dict[Node, Tensor]:
    """Upper bounds on ‖(e_y − e_j)ᵀ G(a → logits)‖, shape (N, classes), for the start and operations of the last stage.

    Empty for networks with many classes.
    """
    network, last = at.network, at.network.stages[-1]
    starts, output = [last.start, *last.nonlinear], network.graph.output
    if output.entries > FEW or output in starts:
        return {}
    reached, added = perturbed(at.values, starts, network.graph.between(last.start, [output]), [output])
    if not reached[output].requires_grad:
        return {}
    bounds: dict[Node, list[Tensor]] = {a: [] for a in starts}
    with torch.enable_grad():
        logits = reached[output].flatten(1)
        differences = (logits.gather(1, predicted[:, None]) - logits).unbind(1)
    for difference in differences:
        one = torch.ones_like(difference)
        slopes = torch.autograd.grad(difference, list(added.values()), one, retain_graph=True, allow_unused=True)
        for a, slope in zip(starts, slopes, strict=True):
            largest = torch.as_tensor(math.sqrt(2) * at.gain(a, output)).expand(len(predicted))
            if slope is not None:  # else autograd finds no path
                known = at.norms.pairs.get((a, output))
                lost = 0.0 if known is None else explicit_error(a.entries, output.entries) * known.slack
                largest = l2_norm(per_image(slope), 1) * (1 + SAFETY) + math.sqrt(2) * lost
            bounds[a].append(at_most(largest))
    return {a: torch.stack(some, 1) for a, some in bounds.items()}


def change_by_rows(at: Linearization, deviations: Deviations, rows: Mapping[Node, Tensor]) -> Tensor:
    """Upper bounds on the change of f_y − f_j, shape (N, classes): each error of the last stage with its own norm."""
    last, noise = deviations.stages[-1], at.norms.rounded.noise[at.network.graph.output]
    moved = at_most(rows[last.stage.start] * last.start[:, None]) + math.sqrt(2) * noise[:, None]
    for v in last.stage.nonlinear:
        moved = moved + at_most(rows[v] * deviations.remainders[v][:, None])
    return at_most(moved) * (1 + SAFETY)
