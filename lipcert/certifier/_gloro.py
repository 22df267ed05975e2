"""The method ``gloro``: a Lipschitz constant for each pair of classes.

Source: Leino, Wang and Fredrikson, "Globally-Robust Neural Networks", ICML 2021 (arXiv 2102.08452).
"""

from __future__ import annotations

from lipcert.certifier._global import Global
from lipcert.certifier._method import Subject
from lipcert.norms import Budget


class GloRo(Global):
    """K up to the features, and ‖w_y − w_j‖ of the head exactly: radius = min_j (f_y − f_j)/(‖w_y − w_j‖ K)."""

    name = "gloro"

    def __init__(self, subject: Subject, budget: Budget):
        super().__init__(subject, budget)
        self.constants = subject.margins
