"""The method ``anchored`` as a method of the certifier, and what it shares with ``lofast``."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any

from torch import Tensor

from lipcert import roundoff
from lipcert.certifier._method import Method, NormsDone, Subject
from lipcert.certifier.anchored import Anchored, Behind, DeployedAnchored, anchored, read
from lipcert.certifier.anchored.method import work_of_a_rival
from lipcert.errors import InputError
from lipcert.norms import Budget, Ledger
from lipcert.settings import STAGED

# At least so many rival classes are examined.
_RIVALS = 8


class LinearisedMethod(Method):
    """A method that linearises the network at the image.

    Staged certification with a limit of work computes only norms for ``instead`` operations if all need more than
    ``limit``; products of norms bound the others.

    Attributes:
        rivals: the largest number of rival classes that are examined with gradients of their own; None for all.
    """

    # Norms are counted one by one. Most of them share matrices that are written out once for a batch.
    rate = 2.5 * Method.rate

    def __init__(self, subject: Subject, budget: Budget, limit: float = float("inf"), instead: float = 0.0):
        super().__init__(subject, budget)
        passes = subject.settings.passes
        self.engine = self.linearise(passes)
        norms, of_a_rival = self.engine.count, work_of_a_rival(self.engine.plan)
        if passes is None and self.engine.work > limit:
            limit = instead
            self.engine = self.linearise(instead / self.engine.plan.work_of_a_pass)
            # A single operation may already need more.
            if max(self.engine.work, _RIVALS * of_a_rival) > 2 * instead:
                raise InputError("it would take very long for a network of this size")
        self.work = self.engine.work
        plan = self.engine.plan
        self.rivals = None if limit == float("inf") else max(_RIVALS, int(limit / of_a_rival))
        if plan.chained and passes is None:
            self.note = (
                f"exact norms for {len(plan.pairs)} of {norms} terms, as many as --time allows; the rest are looser; "
                f"request more with --time or --passes, or all with --method {self.name}"
            )
        self.proves = subject.roundoff is None and not plan.chained and subject.bounded()

    @property
    def memory(self) -> float:
        return super().memory + self.engine.plan.memory

    @abstractmethod
    def linearise(self, passes: float | None) -> Any:
        """The certificate of the network, with norms for at most this number of forward passes per image."""

    def radii(self, images: Tensor, predicted: Tensor, ledger: Ledger, progress: NormsDone) -> roundoff.Radii:
        at = self.engine(images, progress, ledger)
        classes = predicted.to(images.device)
        return lambda margins, call: at.radius(classes, margins.to(images.device), self.rivals).to(margins.device)


class AnchoredMethod(LinearisedMethod):
    """:mod:`lipcert.certifier.anchored`: of the whole network, behind a cut, or both; or of the deployed network."""

    name = "anchored"

    def __init__(self, subject: Subject, budget: Budget, limit: float = float("inf"), instead: float = 0.0):
        super().__init__(subject, budget, limit, instead)
        self.deployed = isinstance(self.engine, DeployedAnchored)
        if isinstance(self.engine, Behind):
            self.note = self.note or self.engine.described
            whole = self.engine.whole
            alone = whole is None or (not whole.plan.chained and self.proves)
            self.proves = subject.roundoff is None and self.engine.proves and alone

    @cached_property
    def _reading(self) -> Any:
        return read(self.subject.model)

    def linearise(self, passes: float | None) -> Anchored | Behind | DeployedAnchored:
        settings, model = self.subject.settings, self.subject.model
        options: dict[str, Any] = {"delta": self.budget.delta, "rigor": settings.rigor, "passes": passes}
        if self.subject.roundoff is not None:
            return DeployedAnchored(model, settings.dtype, **options)
        staged = settings.method == STAGED
        eps = settings.eps if staged and not settings.further_eps else None  # for one ε a verdict is enough
        if settings.at is not None:
            return Anchored(model, at=settings.at, eps=eps, **options)
        return anchored(model, eps=eps, costly=not staged, reading=self._reading, **options)
