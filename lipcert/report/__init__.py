"""Reports on result files: tables, figures, one HTML page, Markdown, and a model card.

``read_runs`` checks what ``lipcert certify --out`` wrote; ``write`` turns it into files. ``lipcert.report(result)`` is
:func:`show`.
"""

import sys
from types import ModuleType
from typing import Any

from lipcert.report._build import OVERVIEW, facts, overview, radii_of_interest, record, remarks, report
from lipcert.report._card import model_card
from lipcert.report._figures import available
from lipcert.report._markdown import Document
from lipcert.report._page import to_html
from lipcert.report._words import other_order, seconds
from lipcert.report._write import Shown, publishing, show, write
from lipcert.results import Run, read_runs

__all__ = ["Run", "model_card", "read_runs", "show", "write"]


class _Callable(ModuleType):
    """The type of this module, which makes it callable: ``lipcert.report(result)``."""

    def __call__(self, *results: Any, **files: Any) -> Shown:
        return show(*results, **files)


sys.modules[__name__].__class__ = _Callable
