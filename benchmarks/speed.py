"""What certificates cost beside bare forward passes, and what commands take: ratios measured side by side.

    python -m benchmarks.speed --data ../shared/data/cifar10/test.tar --vit ../real/dino
    python -m benchmarks.speed --data ../shared/data/cifar10/test.tar --only gloro smoothing

``gloro`` is timed in turn with the forward pass in float64 and in float32, smoothing with those of network and denoiser
in one format, and ``lipcert.lipschitz`` for two networks; all on one thread. Commands run in processes of their own, in
empty folders; those for a DINOv2 ViT-S need ``--vit``, a folder with vit.safetensors and images/val. ``--only`` keeps
the other rows of an earlier run. Times are CPU seconds; of commands also seconds by the clock, to the first row and to
the end, which mean something on idle cores, as do their ratios for one and two workers. CPU seconds to the first row
are those of the command's own process, on Linux. The table is printed, and goes with the environment and the load of
the machine to benchmarks/results/speed.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lipcert
from benchmarks._env import environment
from lipcert.certifier import Certifier
from lipcert.denoisers import Denoised
from lipcert.inputs.data import open_images
from lipcert.smoothing import SELECTION, Smoothing

RESULT = Path(__file__).parent / "results" / "speed.json"
NETWORK, EPS, BATCH, SAMPLES = "cifar10-liresnet", "36/255", 64, 500
BOUNDED = ("resnet18", "vit_base_patch16_224")
VIT = (
    "certify vit_small_patch14_dinov2 --model-args 'img_size=224 num_classes=4' --checkpoint {vit}/vit.safetensors "
    "--data {vit}/images/val --eps 0.1"
)
COMMANDS = {
    "gloro, 1,000 images": f"certify {NETWORK} --data {{data}} --eps {EPS} --method gloro --limit 1000",
    "first": f"certify --eps {EPS}",
    "first, one worker": f"certify --eps {EPS} --workers 1",
    "digits, one worker": f"certify --eps {EPS} --limit 120 --workers 1",
    "digits, two workers": f"certify --eps {EPS} --limit 120 --workers 2",
    "cifar10-vit, one worker": f"certify cifar10-vit --data {{data}} --eps {EPS} --limit 30 --workers 1",
    "cifar10-vit, two workers": f"certify cifar10-vit --data {{data}} --eps {EPS} --limit 30 --workers 2",
    "w128, staged, 100 images": f"certify cifar10-liresnet-w128 --data {{data}} --eps {EPS} --limit 100",
    "DINOv2 ViT-S, 4 images": f"{VIT} --limit 4",
    "DINOv2 ViT-S, gloro, float32, 2 images": f"{VIT} --limit 2 --method gloro --dtype float32",
}


@torch.no_grad()
def in_turn(work: Sequence[Callable[[], object]], images: int, rounds: int) -> list[float]:
    """CPU milliseconds an image of each kind of work, the least of several rounds."""
    least = [math.inf] * len(work)
    for _ in range(rounds):
        for place, one in enumerate(work):
            started = time.process_time()
            one()
            least[place] = min(least[place], 1000 * (time.process_time() - started) / images)
    return least


def gloro(data: str, images: int, rounds: int) -> dict[str, float]:
    """The certificate beside both forward passes, and what comes before the first image."""
    model = lipcert.load(NETWORK)
    pixels = next(iter(open_images(data, model, limit=images).batches(images))).images
    started = time.process_time()
    certifier = Certifier(model, EPS, "gloro")
    certifier.run(pixels[:1])
    found = {"start-up, s": time.process_time() - started}
    double = pixels.double()
    work: list[Callable[[], object]] = [
        lambda: [certifier.run(part) for part in pixels.split(certifier.together)],
        lambda: [certifier.model(part) for part in double.split(BATCH)],
        lambda: [model(part) for part in pixels.split(BATCH)],
    ]
    radii, slow, fast = in_turn(work, len(pixels), rounds)
    found |= {"gloro, ms an image": radii, "forward pass, float64, ms": slow, "forward pass, float32, ms": fast}
    return found | {"gloro over float64": radii / slow, "gloro over float32": radii / fast}


def smoothing(data: str, rounds: int) -> dict[str, float]:
    """Draws beside forward passes of network and denoiser in the same format and batches."""
    found = {}
    for kind in ("float32", "bfloat16"):
        model = Denoised(lipcert.load(NETWORK), "natural")
        pixels = next(iter(open_images(data, model, limit=1).batches(1))).images
        certifier = Smoothing(model, EPS, sigma=0.25, samples=SAMPLES, all_samples=True, dtype=kind)
        network, size = certifier.model, certifier.batch
        noisy = torch.rand(size, *model.input_size).to(network.dtype, memory_format=certifier.format)
        certifier.run(pixels)  # which looks at each size of a batch once
        draws, passes = in_turn([partial(certifier.run, pixels), partial(network, noisy)], 1, rounds)
        found[f"smoothing over forward passes, {kind}"] = draws / (SELECTION + SAMPLES) / (passes / size)
    return found


def bound(name: str) -> dict[str, float]:
    """The Lipschitz bound of a timm network with random weights."""
    model = lipcert.load(name, pretrained=False)
    started = time.process_time()
    lipcert.lipschitz(model)
    return {"CPU s": time.process_time() - started}


def seconds(command: str) -> dict[str, float]:
    """Seconds of a command to its first row and to its end, and CPU seconds.

    Raises:
        CalledProcessError: the command fails.
    """
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    row = computed = math.nan
    words = [sys.executable, "-m", "lipcert", *shlex.split(command), "--out", "rows.jsonl"]
    with tempfile.TemporaryDirectory() as folder:
        rows, errors = Path(folder) / "rows.jsonl", Path(folder) / "errors"
        with errors.open("wb") as file, subprocess.Popen(words, cwd=folder, stdout=file, stderr=file) as running:
            while running.poll() is None:
                time.sleep(0.05)
                if math.isnan(row) and rows.exists() and rows.stat().st_size:
                    row = time.perf_counter() - started
                    fields = Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()
                    computed = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if running.returncode:
            raise subprocess.CalledProcessError(running.returncode, words, stderr=errors.read_text())
    elapsed, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"first row, s": row, "first row, CPU s": computed, "elapsed, s": elapsed, "CPU s": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-10's test images: test.tar")
    parser.add_argument("--vit", type=Path, help="a folder with vit.safetensors and images/val")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=["gloro", "smoothing", *BOUNDED, *COMMANDS], help="by default all")
    args = parser.parse_args()
    table: dict[str, Any] = json.loads(RESULT.read_text()) if args.only and RESULT.exists() else {}
    asked = args.only or [
        "gloro",
        "smoothing",
        *BOUNDED,
        *(c for c in COMMANDS if args.vit or "{vit}" not in COMMANDS[c]),
    ]
    places = {"data": args.data.resolve(), "vit": args.vit and args.vit.resolve()}
    threads = torch.get_num_threads()
    for name in asked:
        load = os.getloadavg()[0]
        if name in COMMANDS:
            found = seconds(COMMANDS[name].format(**places))
        else:
            torch.set_num_threads(1)
            data = str(places["data"])
            kinds = {
                "gloro": partial(gloro, data, args.images, args.rounds),
                "smoothing": partial(smoothing, data, args.rounds),
            }
            found = kinds[name]() if name in kinds else bound(name)
        table[name] = {what: round(value, 3) for what, value in found.items()} | {"load before": round(load, 1)}
        if name.endswith("two workers") and (one := table.get(name.replace("two workers", "one worker"))):
            table[name]["times as fast as one"] = round(one["elapsed, s"] / table[name]["elapsed, s"], 2)
        print(f"{name}: {table[name]}", flush=True)
        torch.set_num_threads(threads)
        RESULT.write_text(json.dumps(table | {"environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
