"""Result files: one JSON row per image, written as soon as it is computed, and a summary of the run.

``r.jsonl`` holds the rows, ``r.summary.json`` the summary. This package makes, checks, reads and writes rows and
computes statistics over them. It also certifies whole data sets (:mod:`lipcert.results.progress`), describes runs
(:mod:`lipcert.results.description`) and recomputes rows (:mod:`lipcert.results.verify`).
"""

from lipcert.results._certify import GIVEN_IN_PYTHON, Result, SmoothedResult, certifier_for, certify
from lipcert.results._files import ResultFile, free_file, shard_path, shards_of, summary
from lipcert.results._metric import CertifiedAccuracy
from lipcert.results._reading import Run, read_rows, read_run, read_runs, sigma_choice_of, summary_path
from lipcert.results._rows import rows, same_examples
from lipcert.results._statistics import Tally, interval, share, wilson

__all__ = ["Result", "SmoothedResult"]
