"""The tables and figures of the four papers as data: what they report, with which settings, and what they need here."""

from __future__ import annotations

from benchmarks.papers import tables_certvit, tables_liresnet, tables_local_lip, tables_lofast
from benchmarks.papers.recipes import Table

TABLES = (*tables_certvit.TABLES, *tables_lofast.TABLES, *tables_liresnet.TABLES, *tables_local_lip.TABLES)
LISTED = ("certvit", "lofast", "liresnet", "local-lip")


def find(paper: str, number: str) -> Table:
    """The table.

    Raises:
        SystemExit: there is none; says which there are.
    """
    of_paper = [table for table in TABLES if table.paper == paper]
    for table in of_paper:
        if table.number == number:
            return table
    raise SystemExit(f"no table {number} of {paper} here; there are {', '.join(t.number for t in of_paper)}")
