"""Seconds that a new user waits: for help, for TAB, for a refusal, for the import, and from pip to a published card.

    python -m benchmarks.first_minutes waits
    python -m benchmarks.first_minutes card --images 120

- ``waits``: each the least of several runs in a process of its own, in an empty folder.
- ``card``: the four commands of ``docs/how-to/publish.md`` once, in an environment in which the packages that lipcert
  needs are installed and lipcert is not: how long the download of torch takes is not part of it. ``hf upload`` copies
  into a folder in place of a hub.

Seconds are elapsed and on the processor. Each part is kept in benchmarks/results/first_minutes.json with the
environment it ran in.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks._env import environment
from lipcert.cli._commands import COMMANDS

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "first_minutes.json"
Seconds = dict[str, list[float]]


def seconds(command: Sequence[str], folder: str, runs: int = 1, more: dict[str, str] | None = None) -> list[float]:
    """Elapsed and processor seconds of a command, each the least of several runs."""
    found = []
    for _ in range(runs):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, cwd=folder, capture_output=True, env={**os.environ, **(more or {})})
        elapsed, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append((elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return [round(min(values), 3) for values in zip(*found, strict=True)]


def waits(folder: str, args: argparse.Namespace) -> Seconds:
    """Before anything is computed."""
    lipcert = [sys.executable, "-m", "lipcert"]
    found = {
        "python itself": seconds([sys.executable, "-c", "pass"], folder, args.runs),
        "import lipcert": seconds([sys.executable, "-c", "import lipcert"], folder, args.runs),
    }
    for name in COMMANDS:
        found[f"lipcert {name} --help"] = seconds([*lipcert, name, "--help"], folder, args.runs)
    found["lipcert certify, without --eps"] = seconds([*lipcert, "certify"], folder, args.runs)
    return found


def card(folder: str, args: argparse.Namespace) -> Seconds:
    """From pip to a published card."""
    place = Path(folder)
    venv.create(place / "env", with_pip=False)
    (site,) = (place / "env").glob("lib/*/site-packages")
    needed = [path for path in sys.path if (Path(path) / "timm").is_dir()]
    (site / "packages.pth").write_text("\n".join(needed) + "\n")
    python, lipcert = str(place / "env" / "bin" / "python"), str(place / "env" / "bin" / "lipcert")
    commands = {
        "pip install": f"{python} -m pip install --no-deps --no-build-isolation {_source(place)}".split(),
        "lipcert certify": f"{lipcert} certify --eps 36/255 --limit {args.images} --out digits.jsonl".split(),
        "lipcert report": f"{lipcert} report digits.jsonl --card README.md".split(),
    }
    found = {}
    for name, command in commands.items():
        found[name] = seconds(command, folder)
        print(name, found[name], flush=True)
    said = subprocess.run(commands["lipcert report"], cwd=folder, capture_output=True, text=True, check=True).stderr
    (place / "hub").mkdir()
    started = time.perf_counter()
    for line in said.splitlines():
        if line.strip().startswith("hf upload"):
            shutil.copy(place / shlex.split(line)[-2], place / "hub")
    found["hf upload"] = [round(time.perf_counter() - started, 3)] * 2
    assert (place / "hub" / "README.md").exists()
    return {**found, "all four": [round(sum(values), 3) for values in zip(*found.values(), strict=True)]}


def _source(place: Path) -> Path:
    """A copy of the source, in which pip may build."""
    skipped = shutil.ignore_patterns(".*", "tests", "docs", "build", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, place / "source", ignore=skipped))


PARTS = {"waits": waits, "card": card}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--runs", type=int, default=5, help="of the part waits")
    parser.add_argument("--images", type=int, default=120, help="of the part card; the bundled model brings 120")
    args = parser.parse_args()
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for part in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[part](folder, args)
        images = {"images": args.images} if part == "card" else {}
        kept[part] = {**images, "columns": ["elapsed", "processor"], "seconds": found, "environment": environment()}
        for name, (elapsed, processor) in found.items():
            print(f"{elapsed:7.2f} s elapsed {processor:7.2f} s processor  {name}")
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
