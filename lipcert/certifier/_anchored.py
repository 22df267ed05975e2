"""The method ``anchored`` as a method of the certifier."""

from __future__ import annotations

import math
from typing import Any

from lipcert.certifier._linearised import LinearisedMethod
from lipcert.certifier._method import Subject
from lipcert.certifier.anchored.deployed import DeployedAnchored
from lipcert.certifier.anchored.method import Anchored
from lipcert.certifier.anchored.prefix import PrefixedAnchored, anchored
from lipcert.norms import Budget
from lipcert.settings import STAGED


class AnchoredMethod(LinearisedMethod):
    """:mod:`lipcert.certifier.anchored`: of the whole network, after a cut, or both; or of the deployed network."""

    name = "anchored"

    def __init__(self, subject: Subject, budget: Budget, limit: float = math.inf):
        super().__init__(subject, budget, limit)
        self.deployed = isinstance(self.engine, DeployedAnchored)
        if isinstance(self.engine, PrefixedAnchored):
            self.note = self.engine.described
            alone = self.engine.whole is None or self.proves
            self.proves = subject.roundoff is None and self.engine.proves and alone

    def linearise(self) -> Anchored | PrefixedAnchored | DeployedAnchored:
        settings, model = self.subject.settings, self.subject.model
        options: dict[str, Any] = {"delta": self.budget.delta, "rigor": settings.rigor}
        if self.subject.roundoff is not None:
            return DeployedAnchored(model, settings.dtype, **options)
        staged = settings.method == STAGED
        eps = settings.eps if staged and not settings.further_eps else None  # for one ε a verdict is enough
        if settings.at is not None:
            return Anchored(model, at=settings.at, eps=eps, **options)
        return anchored(model, eps=eps, costly=not staged, **options)
