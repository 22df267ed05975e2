"""What the methods that linearise the network at the image, ``anchored`` and ``lofast``, share."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

from torch import Tensor

from lipcert import roundoff
from lipcert.certifier._method import Method, NormsDone, Subject
from lipcert.certifier.anchored.method import work_of_a_rival
from lipcert.norms import Budget, Ledger

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
