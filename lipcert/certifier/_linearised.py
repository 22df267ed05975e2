"""The method ``anchored``, and code that it shares with ``lofast``, which linearises the network too."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

from torch import Tensor

from lipcert import roundoff
from lipcert.certifier._method import Method, NormsDone, Subject
from lipcert.certifier.anchored.deployed import DeployedAnchored
from lipcert.certifier.anchored.method import Anchored, work_of_a_rival
from lipcert.certifier.anchored.prefix import PrefixedAnchored, anchored
from lipcert.norms import Budget, Ledger
from lipcert.settings import STAGED

# At least so many rival classes are examined.
_RIVALS = 8
# What the first radius toward each class takes, without gradients of its own, in floating-point operations.
_OF_A_CLASS = 3e6


class LinearisedMethod(Method):
    """A method that linearises the network at the image.

    Attributes:
        rivals: the largest number of rival classes that are examined with gradients of their own, as many as a limit
            of floating-point operations for an image allows; None for all.
    """

    # Norms are counted one by one. Most of them share matrices that are written out once for a batch.
    rate = 2.5 * Method.rate

    def __init__(self, subject: Subject, budget: Budget, limit: float = math.inf):
        super().__init__(subject, budget)
        self.engine = self.linearise()
        of_a_rival = work_of_a_rival(self.engine.plan)
        self.rivals = None if limit == math.inf else max(_RIVALS, int(limit / of_a_rival))
        self.work = max(self.engine.work, _RIVALS * of_a_rival) + _OF_A_CLASS * subject.analysis.output.shape[-1]
        self.proves = subject.roundoff is None and subject.bounded()

    @abstractmethod
    def linearise(self) -> Any:
        """The certificate of the network."""

    def radii(self, images: Tensor, predicted: Tensor, ledger: Ledger, progress: NormsDone) -> roundoff.Radii:
        at = self.engine(images, progress, ledger)
        classes = predicted.to(images.device)
        return lambda margins, call: at.radius(classes, margins.to(images.device), self.rivals).to(margins.device)


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
