"""Memory that loading a model and bounding it takes, beside its weights.

    python -m benchmarks.bound_memory [NAME ...]

Each architecture runs in a process of its own: timm's initial weights, then the global bound. ``peak`` is the largest
resident memory of the process less what it was after the imports, and ``ratio`` that over the float32 weights. Rows of
architectures that are not named stay as they are.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import lipcert
from benchmarks._env import environment
from benchmarks.zoo import rows_of

RESULTS = Path(__file__).parent / "results" / "bound_memory.json"
NAMES = ("vit_base_patch16_224", "convnext_base", "vit_large_patch16_224", "eva_giant_patch14_224")


def peak() -> int:
    """Bytes of the largest resident memory so far; Linux counts in kilobytes, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(name: str) -> dict[str, Any]:
    """One row, in this process."""
    torch.set_num_threads(1)
    before, started = peak(), time.perf_counter()
    model = lipcert.load(name, pretrained=False, num_classes=1000)
    loaded = peak() - before
    bound = lipcert.lipschitz(model)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {
        "name": name,
        "weights_bytes": weights,
        "peak_bytes": peak() - before,
        "ratio_loaded": round(loaded / weights, 3),
        "ratio": round((peak() - before) / weights, 3),
        "log10": bound.log10,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--here", action="store_true", help="measure one in this process and print its row")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(*arguments.names)))
        return
    rows = rows_of(arguments.out)
    for name in arguments.names:
        command = [sys.executable, "-m", "benchmarks.bound_memory", "--here", name]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows[name] = json.loads(answer.splitlines()[-1])
        print(json.dumps(rows[name]), flush=True)
        table = {"rows": list(rows.values()), "environment": environment()}
        arguments.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
