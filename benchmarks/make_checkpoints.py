"""Puts certified checkpoints into the package: weights, rows of ``lipcert models --certified``, and model cards.

    python -m benchmarks.make_checkpoints digits-vit --work digits
    python -m benchmarks.make_checkpoints cifar10-liresnet --data ../shared/data/cifar10 --work liresnet \
        --model liresnet/rounded.safetensors
    python -m benchmarks.make_checkpoints cifar10-liresnet-smooth --data ../shared/data/cifar10 --work cut \
        --model cut/liresnet-rounded.safetensors
    python -m benchmarks.make_checkpoints cifar10-hybrid --data ../shared/data/cifar10 --work cut \
        --model cut/hybrid-rounded.safetensors
    python -m benchmarks.make_checkpoints cifar10-hybrid-l2 --data ../shared/data/cifar10 --work cut \
        --model cut/hybrid_l2-rounded.safetensors
    python -m benchmarks.make_checkpoints cifar10-vit --data ../shared/data/cifar10 --work vit \
        --model both/anchored.safetensors

The models on CIFAR-10 are those of ``benchmarks.liresnet_cifar`` and ``benchmarks.liresnet_cut``, rounded to float16,
and of ``benchmarks.both_kinds``.
Certifies images and attacks some of them, by the commands that a user types; they are printed, and go on where they
were stopped. Writes lipcert/assets/certified.json, and beside it the files that its rows name.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import lipcert
from lipcert.inputs.checkpoints import ASSETS, TABLE, Checkpoint, checkpoints
from lipcert.norms import Rigor

KINDS: dict[str, dict[str, Any]] = {
    "digits-vit": {
        "file": "digits_vit.safetensors", "method": "staged", "attacked_images": 120,
        "data": "scikit-learn's digits, the 120 images that come with lipcert",
        "trained": ("python -m benchmarks.make_digits_vit",),
    },
    "cifar10-liresnet": {
        "file": "cifar10_liresnet.safetensors", "method": "gloro", "attacked_images": 40,
        "test": "test.tar",
        "data": "CIFAR-10, all 10,000 test images, lightly compressed JPEG files",
        "trained": ("python -m benchmarks.liresnet_cifar --data cifar10 --work liresnet",),
    },
    "cifar10-liresnet-smooth": {
        "file": "cifar10_liresnet_smooth.safetensors", "method": "staged", "attacked_images": 40, "limit": 1000,
        "test": "test.tar",
        "data": "CIFAR-10, 1,000 test images of a fixed shuffle, lightly compressed JPEG files",
        "trained": ("python -m benchmarks.liresnet_cut --data cifar10 --work cut",),
    },
    "cifar10-hybrid": {
        "file": "cifar10_hybrid.safetensors", "method": "staged", "attacked_images": 40, "limit": 1000,
        "test": "test.tar",
        "data": "CIFAR-10, 1,000 test images of a fixed shuffle, lightly compressed JPEG files",
        "trained": ("python -m benchmarks.liresnet_cut --data cifar10 --work cut --attention dot",),
    },
    "cifar10-hybrid-l2": {
        "file": "cifar10_hybrid_l2.safetensors", "method": "gloro", "attacked_images": 40,
        "test": "test.tar",
        "data": "CIFAR-10, all 10,000 test images, lightly compressed JPEG files",
        "trained": ("python -m benchmarks.liresnet_cut --data cifar10 --work cut --attention l2",),
    },
    "cifar10-vit": {
        "file": "cifar10_vit.safetensors", "method": "staged", "attacked_images": 40, "limit": 1000,
        "test": "test.tar",
        "data": "CIFAR-10, 1,000 test images of a fixed shuffle, lightly compressed JPEG files",
        "trained": ("python -m benchmarks.both_kinds --data cifar10 --work both",),
    },
}  # fmt: skip
EPS = "36/255"


def run(*words: str) -> None:
    """A lipcert command, printed."""
    print("lipcert", *words, flush=True)
    subprocess.run([sys.executable, "-m", "lipcert", *words], check=True)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if "radius" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=KINDS)
    parser.add_argument("--data", type=Path, help="folder with test.tar")
    parser.add_argument("--work", type=Path, required=True, help="folder for rows")
    parser.add_argument("--model", type=Path, help="the trained model; by default the one in the package")
    args = parser.parse_args()
    kind = dict(KINDS[args.name])
    file, test, limit = ASSETS / kind["file"], kind.pop("test", None), kind.pop("limit", None)
    args.work.mkdir(exist_ok=True)
    if args.model is not None:
        shutil.copy(args.model, file)
    model = lipcert.load(file)
    data = () if test is None else ("--data", str(args.data / test))
    rows, attacked, card = (args.work / f"{args.name}{end}" for end in (".jsonl", ".attacked.jsonl", ".md"))
    common = ("certify", str(file), *data, "--eps", EPS)
    first = () if limit is None else ("--limit", str(limit))
    run(*common, "--method", kind["method"], *first, "--out", str(rows))
    attack = ("--method", "global", "--attack", "--limit", str(kind["attacked_images"]))
    run(*common, *attack, "--out", str(attacked))  # global, since an attack is the same beside any certificate
    found, hit = rows_of(rows), rows_of(attacked)
    right = [row for row in found if row["predicted"] == row["label"]]
    method = () if kind["method"] == "staged" else ("--method", kind["method"])
    row = {
        "name": args.name,
        "architecture": model.source["name"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "images": len(found),
        "eps": EPS,
        "clean": len(right) / len(found),
        "certified": sum(bool(row["certified"]) for row in right) / len(found),
        "attacked": sum(r["predicted"] == r["label"] and not r["attacked"] for r in hit) / len(hit),
        "rigor": max((row["rigor"] for row in found), key=lambda text: (Rigor.parse(text) or Rigor(0.0)).delta),
        "seconds": float(f"{fmean(row['seconds'] for row in found):.2g}"),
        "command": " ".join(
            [
                "lipcert certify",
                args.name,
                *(("--data", f"cifar10/{test}") if test else ()),
                "--eps",
                EPS,
                *method,
                *first,
            ]
        ),
        **kind,
    }
    table = [*(one for one in checkpoints() if one.name != args.name), Checkpoint(**row)]
    TABLE.write_text(json.dumps([asdict(one) for one in sorted(table, key=lambda one: one.name)], indent=1) + "\n")
    run("report", str(rows), "--card", str(card), "--license", "apache-2.0")
    shutil.copy(card, ASSETS)
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
