"""Reports on result files: tables, figures, one HTML page, Markdown, and a model card.

``read_runs`` checks what ``lipcert certify --out`` wrote; ``write`` turns it into files.
"""

from lipcert.report._build import OVERVIEW, facts, overview, radii_of_interest, record, remarks, report
from lipcert.report._card import model_card, model_info
from lipcert.report._figures import available
from lipcert.report._markdown import Document
from lipcert.report._page import to_html
from lipcert.report._text import text_plot
from lipcert.report._write import publishing, write
from lipcert.results import Run, read_runs

__all__ = [
    "OVERVIEW",
    "Document",
    "Run",
    "available",
    "facts",
    "model_card",
    "model_info",
    "overview",
    "publishing",
    "radii_of_interest",
    "read_runs",
    "record",
    "remarks",
    "report",
    "text_plot",
    "to_html",
    "write",
]
