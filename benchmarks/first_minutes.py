"""Seconds that a new user waits: for help, for TAB, for a refusal, for the import, and from there to a model card.

python -m benchmarks.first_minutes
python -m benchmarks.first_minutes --images 40 --write

Each figure is the least of several runs in a process of its own, elapsed and on the processor, in an empty folder.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._env import environment
from lipcert.cli._commands import COMMANDS

RESULTS = Path(__file__).parent / "results" / "first_minutes.json"
_COMPLETE = {"_LIPCERT_COMPLETE": "complete_bash", "COMP_WORDS": "lipcert certify vit_tiny_patch16", "COMP_CWORD": "2"}


def seconds(command: list[str], folder: str, runs: int, more: dict[str, str] | None = None) -> list[float]:
    """Elapsed and processor seconds of a command, each the least of several runs."""
    found = []
    for _ in range(runs):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, cwd=folder, capture_output=True, env={**os.environ, **(more or {})})
        elapsed, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append((elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return [round(min(values), 3) for values in zip(*found, strict=True)]


def main() -> int:
    """Prints the seconds, and writes them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--images", type=int, default=0, help="go from certify to a card with so many images; 0 does not"
    )
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    lipcert = [sys.executable, "-m", "lipcert"]
    measured: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        measured["python itself"] = seconds([sys.executable, "-c", "pass"], folder, args.runs)
        measured["import lipcert"] = seconds([sys.executable, "-c", "import lipcert"], folder, args.runs)
        for name in COMMANDS:
            measured[f"lipcert {name} --help"] = seconds([*lipcert, name, "--help"], folder, args.runs)
        measured["lipcert certify, without --eps"] = seconds([*lipcert, "certify"], folder, args.runs)
        measured["TAB after a model's first letters"] = seconds(lipcert, folder, args.runs, _COMPLETE)
        if args.images:
            rows = ["--limit", str(args.images), "--out", "digits.jsonl"]
            for command in (["certify", "--eps", "36/255", *rows], ["report", "digits.jsonl", "--card", "README.md"]):
                measured[f"lipcert {' '.join(command)}"] = seconds([*lipcert, *command], folder, 1)
    for name, (elapsed, processor) in measured.items():
        print(f"{elapsed:7.2f} s elapsed {processor:7.2f} s processor  {name}")
    if args.write:
        record = {"environment": environment(), "columns": ["elapsed", "processor"], "seconds": measured}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
