"""The base of all certificates of a network: the network as methods see it, and the class of a method."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lipcert import roundoff
from lipcert.bounds import Analysis, MarginBounds
from lipcert.certifier._triage import too_loose
from lipcert.model import Model
from lipcert.norms import Budget, Ledger
from lipcert.settings import FACTS, CertifySettings, MethodFacts

# Memory for one image, in multiples of the results of its forward pass: float64 passes, and bounds on their rounding.
_COPIES = 6

# A radius below this fraction of ε is not worth an examination of rounding.
NEGLIGIBLE = 1e-9

# Called with (norms computed, norms in total).
NormsDone = Callable[[float, float], None]


@dataclass(frozen=True)
class Subject:
    """A network with its analysis and the settings: everything that methods share.

    Attributes:
        model: the model in float64, with the weights of the deployed one.
        analysis: its global analysis.
        settings: ε, the type of the deployed forward pass, and the other settings.
        roundoff: bounds on the rounding errors of the deployed forward pass; None for real arithmetic.
        bounded: whether the rounding of every operation in float64 has a bound, forwards and backwards.
        flops: floating-point operations of one forward pass.
        bytes: size of all results of one forward pass in float64.
    """

    model: Model
    analysis: Analysis
    settings: CertifySettings
    roundoff: roundoff.Roundoff | None
    bounded: Callable[[], bool]
    flops: float
    bytes: float

    @cached_property
    def margins(self) -> MarginBounds:
        """Lipschitz constants of the margins, with the rows of the head."""
        return MarginBounds(self.analysis)

    @cached_property
    def too_loose(self) -> str:
        """Why, by experience, only the global bound is worth computing; empty if that is not the case."""
        return too_loose(self.model, self.analysis.bound().log10, self.settings.eps)

    @property
    def operations(self) -> int:
        """The number of operations of the network."""
        return len(self.analysis.graph.nodes)


def forward_pass(model: Model, analysis: Analysis) -> tuple[float, float]:
    """Floating-point operations of one forward pass, and the bytes of all its results."""
    image = torch.zeros(1, *model.input_size, dtype=torch.float64, device=model.device)
    size = sum(8 * math.prod(node.shape) for node in analysis.graph.nodes)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    return float(counter.get_total_flops()), float(size)


def duration(seconds: float) -> str:
    """A time estimate as text, in seconds, minutes or hours."""
    if seconds < 100:
        return "< 0.1 s" if seconds < 0.1 else f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


class Method(ABC):
    """A certificate of a network: the constructor prepares it once, :meth:`radius` certifies batches of images.

    A subclass sets :attr:`name`, the key of its entry in ``lipcert.settings.FACTS``, and implements :meth:`radii`.
    Its constructor checks the network, and raises :class:`~lipcert.errors.UnsupportedOperation` for operations without
    a rule.

    Attributes:
        name: the name in commands and rows.
        work: an estimate of the floating-point operations for one image.
        rate: floating-point operations a second, about what one core reaches in this method's operations.
        note: a remark on how the method treats this network; may be empty.
        proves: whether the method itself accounts for rounding in the computed margins, with proof. It then gets the
            margins as they were computed.
        deployed: whether its radii hold for the deployed forward pass without :mod:`lipcert.roundoff`.
    """

    name: ClassVar[str]
    rate: ClassVar[float] = 1e10
    work: float = 0.0
    note: str = ""
    proves: bool = False
    deployed: bool = False

    def __init__(self, subject: Subject, budget: Budget):
        self.subject, self.budget = subject, budget

    @property
    def seconds(self) -> float:
        """An estimate of the seconds of one core for one image."""
        return self.work / self.rate

    @property
    def memory(self) -> float:
        """An estimate of the bytes for one image of a batch."""
        return _COPIES * self.subject.bytes

    @property
    def facts(self) -> MethodFacts:
        return FACTS[self.name]

    @classmethod
    def adds(cls, subject: Subject) -> bool:
        """Whether it may certify more of a network than cheaper methods; if not, staged certification leaves it out."""
        return True

    @abstractmethod
    def radii(self, images: Tensor, predicted: Tensor, ledger: Ledger, progress: NormsDone) -> roundoff.Radii:
        """Everything that does not depend on the margins, such as norms at the images."""

    def radius(
        self, images: Tensor, predicted: Tensor, margins: Tensor, ledger: Ledger, progress: NormsDone = lambda *_: None
    ) -> Tensor:
        """Certified radii, float64, shape (N,), rounding of the deployed forward pass included; see :meth:`radii`."""
        radii = self.radii(images, predicted, ledger, progress)
        if self.subject.roundoff is None or self.deployed:
            return radii(margins, 0)
        return self.subject.roundoff.deployed(radii, images, predicted, margins, NEGLIGIBLE * self.subject.settings.eps)
