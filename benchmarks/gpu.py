"""A quarter of an hour of a GPU: tests and kernels, radii against the CPU's, throughput, and a training.

    python -m benchmarks.gpu --data ../shared/data/cifar10 --out gpu
    python -m benchmarks.gpu --tiny --device cpu --out gpu

Parts, each in a process of its own, which is stopped at its limit of time:

- ``devices``, ``kernels``, ``radii``, side by side: the tests of devices, rounding rules against kernels
  (``benchmarks.fuzz --kernels``), and radii beside those of the CPU.
- ``throughput``: images a second of ``gloro``, ``staged`` and smoothing, each beside forward passes of the same network
  in the same format and batches.
- ``training``: ``benchmarks.train_liresnet --recipe far``.

Each part writes its result to the folder ``--out`` and is not run again where that exists; the trained artifact goes
there, too. ``--tiny`` tries everything at a small size, without ``--data`` on random images.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import lipcert
from benchmarks._cifar import EPS, read
from benchmarks._env import environment
from lipcert.certifier import Certifier
from lipcert.denoisers import Denoised
from lipcert.smoothing import Smoothing

LIMITS: dict[str, float] = {"devices": 110, "kernels": 110, "radii": 110, "throughput": 150, "training": 480}  # seconds
TOGETHER = ("devices", "kernels", "radii")


def pace(work: Callable[[], object], device: str, images: int) -> float:
    """Images a second, the second time."""
    for _ in range(2):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return images / seconds


def devices(args: argparse.Namespace) -> dict[str, Any]:
    """Outcome of the tests of devices."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/test_devices.py",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
    ]
    done = subprocess.run(
        [*command, *(["-k", "refuses"] if args.tiny else [])], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    return {"outcome": lines[-1], "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))]}


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Summary of rounding rules against kernels."""
    count, workers = (20, 1) if args.tiny else (args.kernels, 8)
    files = [args.out / name for name in ("kernels.jsonl", "fuzz.json")]
    command = [sys.executable, "-m", "benchmarks.fuzz", "--rows", str(files[0]), "--results", str(files[1])]
    for kind in ("programs", "arguments", "scales"):
        command += [f"--{kind}", "0"]
    try:
        subprocess.run(
            [*command, "--kernels", str(count), "--workers", str(workers)],
            check=True,
            timeout=None if args.tiny else LIMITS["kernels"] - 20,
        )
    except subprocess.TimeoutExpired:
        print("kernels: stopped at the limit of time", flush=True)
    rows = [json.loads(line) for line in files[0].read_text().splitlines() if line.endswith("}")]
    found: dict[str, Any] = {"false": [row for row in rows if row["outcome"] == "false"]}
    for device in sorted({row["device"] for row in rows}):
        held = [row for row in rows if row["device"] == device]
        found[device] = {
            outcome: sum(row["outcome"] == outcome for row in held) for outcome in ("held", "false", "refused")
        }
        found[device]["largest share"] = max(row["share"] for row in held)
    return found


def radii(args: argparse.Namespace) -> dict[str, Any]:
    """The largest relative difference of radii from those of the CPU."""
    found = {}
    cases: list[tuple[str, Any]] = [
        ("digits-vit", "gloro"),
        ("digits-vit", "lofast"),
        ("cifar10-liresnet", "local"),
        ("cifar10-vit", "anchored"),
    ]
    for name, method in cases[:1] if args.tiny else cases:
        model = lipcert.load(name)
        images = torch.rand(2, *model.input_size, generator=torch.Generator().manual_seed(0))
        here = lipcert.certify(model, images, eps=EPS, method=method).radius
        there = lipcert.certify(model.to(args.device), images.to(args.device), eps=EPS, method=method).radius
        found[f"{name}, {method}"] = ((there - here).abs() / here.clamp_min(1e-300)).max().item()
    return found


def _ways(certifier: Certifier, model: lipcert.Model) -> dict[str, Callable[[Tensor], object]]:
    """The certificate, and the forward pass in two formats."""
    return {"certificate": certifier.run, "float64": lambda x: certifier.model(x.double()), "float32": model}


def _each(function: Callable[[Tensor], object], parts: Sequence[Tensor]) -> None:
    for part in parts:
        function(part)


@torch.no_grad()
def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Images a second of certificates and of forward passes."""
    device, found = args.device, {}
    count = 16 if args.tiny else 10_000
    images = (read(args.data, "test")[0][:count].float() / 255 if args.data else torch.rand(count, 3, 32, 32)).to(
        device
    )
    networks = [("digits-vit", "gloro", count)] if args.tiny else [
        ("cifar10-liresnet", "gloro", count), ("cifar10-liresnet-w128", "staged", 32),
    ]  # fmt: skip
    for name, method, some in networks:
        model = lipcert.load(name).to(device)
        pixels = (
            images[:some] if model.input_size == (3, 32, 32) else torch.rand(some, *model.input_size, device=device)
        )
        started = time.perf_counter()
        certifier = Certifier(model, EPS, method)
        certifier.run(pixels[:1])
        row: dict[str, Any] = {"start-up, s": time.perf_counter() - started, "batch": certifier.together}
        parts = pixels.split(certifier.together)
        for way, work in _ways(certifier, model).items():
            row[way] = pace(partial(_each, work, parts), device, some)
        row["ratio"] = row["certificate"] / row["float64"]
        found[f"{name}, {method}"] = row
        print(json.dumps(found), flush=True)
    sizes: dict[str, Any] = {"img_size": 32, "depth": 1} if args.tiny else {}
    for denoiser in (None, "natural"):
        bare = lipcert.load("vit_small_patch16_224", pretrained=False, **sizes).to(device)
        smoothing = Smoothing(
            bare if denoiser is None else Denoised(bare, denoiser), EPS, sigma=0.25,
            samples=100 if args.tiny else 4000, all_samples=True, dtype="float32" if args.tiny else "bfloat16",
        )  # fmt: skip
        pixels = torch.rand(2, *bare.input_size, device=device)
        votes = smoothing.run(pixels)
        draws = int((votes.samples + votes.selected).sum())
        noisy = torch.rand(smoothing.batch, *bare.input_size, device=device)
        passes = -(-draws // smoothing.batch)
        found[f"smoothing, denoiser {denoiser}"] = row = {"draws": draws, "batch": smoothing.batch}
        row["certificate"] = pace(partial(smoothing.run, pixels), device, draws)
        row["forward"] = pace(partial(_each, smoothing._logits, [noisy] * passes), device, passes * smoothing.batch)
        row["ratio"] = row["certificate"] / row["forward"]
        print(json.dumps(found), flush=True)
    return found


def training(args: argparse.Namespace) -> dict[str, Any]:
    """What the epochs of the recipe said."""
    artifact, result = args.out / "far.safetensors", args.out / "train_liresnet.json"
    command = [sys.executable, "-m", "benchmarks.train_liresnet", "--recipe", "far", "--device", args.device]
    command += ["--data", str(args.data or _random_images(args.out)), "--out", str(artifact), "--result", str(result)]
    limit = ["--epochs", "1", "--images", "512"] if args.tiny else ["--minutes", str(LIMITS["training"] / 60 - 2)]
    subprocess.run([*command, *limit], check=True)
    return dict(json.loads(result.read_text()))


def _random_images(folder: Path) -> Path:
    """A folder with a train.tar of random images in ten classes."""
    with tarfile.open(folder / "train.tar", "w") as file:
        for number in range(520):
            data = io.BytesIO()
            pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(data, "PNG")
            entry = tarfile.TarInfo(f"{number % 10}/{number}.png")
            entry.size = data.tell()
            data.seek(0)
            file.addfile(entry, data)
    return folder


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    part.__name__: part for part in (devices, kernels, radii, throughput, training)
}


def run(parts: tuple[str, ...], out: Path, tiny: bool) -> None:
    """Runs parts side by side, each in a process that is stopped at its limit."""
    started, running = time.monotonic(), {}
    for part in parts:
        if not (out / f"{part}.json").exists():
            running[part] = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--part", part])
    for part, process in running.items():
        try:
            process.wait(None if tiny else max(1.0, LIMITS[part] - time.monotonic() + started))
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{part}: stopped at the limit of {LIMITS[part]} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10's train.tar and test.tar")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kernels", type=int, default=6_000, help="how many kernels")
    parser.add_argument("--training-seconds", type=float, default=LIMITS["training"], help="limit of that part")
    parser.add_argument("--tiny", action="store_true", help="try every part at a small size")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    LIMITS["training"] = args.training_seconds
    if args.part:
        started = time.perf_counter()
        result = PARTS[args.part](args)
        result = {"seconds": round(time.perf_counter() - started, 1), "result": result, "environment": environment()}
        (args.out / f"{args.part}.json").write_text(json.dumps(result, indent=1) + "\n")
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU; try --tiny --device cpu")
    for parts in (TOGETHER, ("throughput",), ("training",)):
        run(tuple(part for part in parts if part in args.parts), args.out, args.tiny)
    for part in args.parts:
        file = args.out / f"{part}.json"
        print(f"{part}:", file.read_text() if file.exists() else "no result")


if __name__ == "__main__":
    main()
