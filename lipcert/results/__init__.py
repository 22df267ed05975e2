"""Result files: one JSON row per image, written as soon as it is known, and a summary beside them.

``r.jsonl`` holds the rows and ``r.summary.json`` states the run that they belong to. Everything about these files is
here: rows and what a row must be, statistics over rows, reading and writing files (this module), going through a data
set (:mod:`lipcert.results.progress`), the description of a run (:mod:`lipcert.results.description`) and computing rows
again (:mod:`lipcert.results.verify`).
"""

from lipcert.results._certify import Result, SmoothedResult, certify
from lipcert.results._files import ResultFile, shard_path, shards_of, summary
from lipcert.results._reading import Run, read_rows, read_run, read_runs, summary_path
from lipcert.results._rows import rows
from lipcert.results._statistics import Tally

__all__ = [
    "Result",
    "ResultFile",
    "Run",
    "SmoothedResult",
    "Tally",
    "certify",
    "read_rows",
    "read_run",
    "read_runs",
    "rows",
    "shard_path",
    "shards_of",
    "summary",
    "summary_path",
]
