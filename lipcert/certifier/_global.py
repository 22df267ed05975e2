"""The methods ``global`` and ``gloro``: margins divided by Lipschitz constants that hold for all images."""

from __future__ import annotations

from torch import Tensor

from lipcert import roundoff
from lipcert.bounds import MarginBounds, radii
from lipcert.certifier._method import Method, NormsDone, Subject
from lipcert.norms import Budget, Ledger


class Global(Method):
    """One constant K for the map from pixels to logits: radius = min_j (f_y − f_j)/(√2 K)."""

    name = "global"

    def __init__(self, subject: Subject, budget: Budget):
        super().__init__(subject, budget)
        self.constants = MarginBounds(subject.analysis, rows=False)

    def radii(self, images: Tensor, predicted: Tensor, ledger: Ledger, progress: NormsDone) -> roundoff.Radii:
        return lambda margins, call: radii(margins, self.constants.of(predicted))


class GloRo(Global):
    """K up to the features, and ‖w_y − w_j‖ of the head exactly: radius = min_j (f_y − f_j)/(‖w_y − w_j‖ K).

    Source: Leino, Wang and Fredrikson, "Globally-Robust Neural Networks", ICML 2021 (arXiv 2102.08452).
    """

    name = "gloro"

    def __init__(self, subject: Subject, budget: Budget):
        super().__init__(subject, budget)
        self.constants = subject.margins
