"""``constrain`` with its layers in one process and in several: seconds and speed-up.

    python -m benchmarks.parallel_layers --processes 0 1 2 --repeats 3

Square layers of the width of a ViT-B with random weights and correlated inputs, solved by
``lipcert.certvit.solve_layers``, as ``lipcert constrain --workers`` does. 0 is this process with one thread; workers
share the cores as threads, and their start counts. Every repeat goes through all numbers of processes in turn, so that
a busy machine slows all of them; the speed-up is the median over repeats of the seconds of the first number over those
of each. On a machine that does other work only the processor seconds say something: those of this process and its
workers together, which a perfect division leaves as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from benchmarks._env import environment
from lipcert.certvit import Failure, Moments, Task, solve_layers

OPTIONS = {"error": 0.05, "measures": ("spectral",)}
RESULTS = Path(__file__).parent / "results" / "parallel_layers.json"


def tasks(count: int, width: int, rows: int) -> list[Task]:
    """Square layers of this width, each with inputs whose standard deviations fall as 1/√k."""
    made = []
    for k in range(count):
        generator = torch.Generator().manual_seed(k)
        inputs = torch.randn(rows, width, generator=generator, dtype=torch.float64) * torch.arange(1, width + 1) ** -0.5
        weight = torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5
        made.append(Task(f"layer {k}", weight, Moments.from_rows(inputs), OPTIONS))
    return made


def processor_seconds() -> float:
    """Of this process and of its workers that have ended."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    todo = tasks(args.layers, args.width, args.rows)
    seconds: dict[int, list[float]] = {count: [] for count in args.processes}
    processor: dict[int, list[float]] = {count: [] for count in args.processes}
    norms: set[tuple[float, ...]] = set()
    for _ in range(args.repeats):
        for count in args.processes:
            started, used = time.perf_counter(), processor_seconds()
            outcomes = solve_layers(todo, workers=count)
            seconds[count].append(time.perf_counter() - started)
            processor[count].append(processor_seconds() - used)
            solved = [outcome for outcome in outcomes.values() if not isinstance(outcome, Failure)]
            assert len(solved) == len(todo), outcomes
            norms.add(tuple(round(solutions["spectral"].norm_after, 4) for solutions in solved))
            print(f"{count} processes: {seconds[count][-1]:.1f} s, {processor[count][-1]:.1f} CPU s", flush=True)
    assert len(norms) == 1, "the solutions differ"
    first = seconds[args.processes[0]]
    rows = [
        {
            "processes": count,
            "seconds": statistics.median(taken),
            "CPU seconds": statistics.median(processor[count]),
            "speed-up": statistics.median(a / b for a, b in zip(first, taken, strict=True)),
        }
        for count, taken in seconds.items()
    ]
    settings = {"layers": args.layers, "width": args.width, "rows": args.rows, "repeats": args.repeats}
    text = {"environment": {**environment(), "cores": os.cpu_count()}, **settings, "rows": rows}
    args.out.write_text(json.dumps(text, indent=1) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
