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
from typing import Any

import torch
from torch import Tensor

from lipcert.certifier._linearised import LinearisedMethod
from lipcert.certifier._search import search
from lipcert.certifier.anchored.margin import change, spreads
from lipcert.certifier.anchored.network import Network
from lipcert.certifier.anchored.norms import NormFinder, NormOptions, NormProgress, Norms
from lipcert.certifier.anchored.plan import NormPlan, layerwise_pairs
from lipcert.certifier.anchored.walk import Deviations, Linearization
from lipcert.model import Model
from lipcert.norms import Ledger
from lipcert.numerics import SAFETY


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
        return self.linearization.walk(eps, layerwise=True)

    def radius(self, predicted: Tensor, margins: Tensor, limit: int | None = None) -> Tensor:
        """Certified radii, float64, shape (N,), rounded down, to 1 % or better."""
        at = self.linearization
        spread = spreads(at, predicted)
        slope = math.sqrt(2) * torch.as_tensor(at.gain(at.network.source, at.network.stages[0].start))
        for stage in at.network.stages:
            slope = slope * at.gain(stage.start, stage.end)
        guess = torch.nan_to_num(margins, posinf=math.inf).amin(1).clamp_min(0) / slope

        def remaining(eps: Tensor) -> Tensor:
            bounds = margins - change(at, self.deviations(eps), spread)
            return bounds.nan_to_num(nan=-math.inf, posinf=math.inf).amin(1)

        return search(remaining, guess) * (1 - SAFETY)
