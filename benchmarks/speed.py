"""What certificates cost beside bare forward passes, and what commands take: ratios measured side by side.

    python -m benchmarks.speed --data ../shared/data/cifar10/test.tar

``gloro`` is timed in turn with the forward pass in float64 and in float32, in batches of 64 and on one thread; the
commands run in processes of their own. Figures are CPU seconds, for commands also elapsed ones. The table is printed,
and goes with the environment to benchmarks/results/speed.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import lipcert
from benchmarks._env import environment
from lipcert.certifier import Certifier
from lipcert.inputs.data import open_images

RESULT = Path(__file__).parent / "results" / "speed.json"
NETWORK, EPS, BATCH = "cifar10-liresnet", "36/255", 64


def milliseconds(work: Callable[[], object], images: int) -> float:
    """CPU milliseconds for an image."""
    started = time.process_time()
    work()
    return 1000 * (time.process_time() - started) / images


@torch.no_grad()
def beside_forward_passes(data: str, images: int, rounds: int) -> dict[str, float]:
    """The certificate and both forward passes in turn, each the least of several rounds, and what comes before."""
    model = lipcert.load(NETWORK)
    pixels = next(iter(open_images(data, model, limit=images).batches(images))).images
    started = time.process_time()
    certifier = Certifier(model, EPS, "gloro")
    certifier.run(pixels[:1])
    start = time.process_time() - started
    precise, double = certifier.model, pixels.double()
    work: dict[str, Callable[[], object]] = {
        "gloro, radii": lambda: [certifier.run(part) for part in pixels.split(certifier.together)],
        "forward pass, float64": lambda: [precise(part) for part in double.split(BATCH)],
        "forward pass, float32": lambda: [model(part) for part in pixels.split(BATCH)],
    }
    least = {
        name: min(times)
        for name, times in zip(
            work,
            zip(*[[milliseconds(one, len(pixels)) for one in work.values()] for _ in range(rounds)], strict=True),
            strict=True,
        )
    }
    radii, slow, fast = least.values()
    found = {f"{name}, ms an image": value for name, value in least.items()}
    found |= {"gloro over float64": radii / slow, "gloro over float32": radii / fast, "start-up, s": start}
    return {name: round(value, 3) for name, value in found.items()}


def seconds(command: list[str]) -> list[float]:
    """Elapsed and CPU seconds of a command, in an empty folder.

    Raises:
        CalledProcessError: the command fails.
    """
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, check=True)
    elapsed, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return [round(elapsed, 1), round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="CIFAR-10's test images: test.tar")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commands", nargs="*", default=["gloro", "first", "one worker"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, float | list[float]] = dict(beside_forward_passes(args.data, args.images, args.rounds))
    data = str(Path(args.data).resolve())
    certify = ["lipcert", "certify", "--eps", EPS]
    commands = {
        "gloro": [*certify, NETWORK, "--data", data, "--method", "gloro", "--limit", "1000", "--out", "a.jsonl"],
        "first": certify,
        "one worker": [*certify, "--workers", "1"],
    }
    for name in args.commands:
        table[f"command {name}: elapsed, CPU s"] = seconds(commands[name])
    for name, value in table.items():
        print(f"{name}: {value}")
    RESULT.write_text(json.dumps({"environment": environment(), "images": args.images, **table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
