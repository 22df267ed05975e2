"""The ways from a network to certificates, each in an empty folder by the commands of its how-to: times and results.

    python -m benchmarks.paths --real ../real --cifar ../shared/data/cifar10 --work paths
    python -m benchmarks.paths --only c --cifar ../shared/data/cifar10 --work paths

a: a pretrained CNN as it is (EfficientNet-Lite0, ImageNet weights); b: a pretrained ViT as it is, and with its head
fitted under noise (DINOv2 ViT-S, four classes); c: a small ViT on CIFAR-10 from random weights; d: a LiResNet there.

``--real`` is a folder with lite0.safetensors, imagenet.tar (1,000 classes), and vit.safetensors with images/train and
images/val. Paths whose files are missing are left out. A path ends with ``report`` and a card. The table and the
environment go to benchmarks/results/paths.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._env import environment

RESULT = Path(__file__).parent / "results" / "paths.json"
VIT = (
    "embed_dim=128 depth=2 num_heads=4 mlp_ratio=2 img_size=32 class_token=False global_pool=avg final_norm=False "
    "num_classes=10"
)
DINO = "vit_small_patch14_dinov2 --checkpoint {real}/vit.safetensors --model-args 'img_size=224 num_classes=4'"
NOISE = "--method smoothing --denoiser natural --samples 300"
PATHS: dict[str, tuple[str, ...]] = {
    "a": (
        "certify tf_efficientnet_lite0 --checkpoint {real}/lite0.safetensors --data {real}/imagenet.tar --eps 36/255 "
        f"{NOISE} --sigma 0.12 --limit 60 --out rows.jsonl",
    ),
    "b": (f"certify {DINO} --data {{real}}/images/val --eps 36/255 {NOISE} --sigma 0.25 --limit 60 --out rows.jsonl",),
    "b, head": (
        f"finetune {DINO} --data {{real}}/images/train --recipe noise --eps 0.5 --only head --denoiser natural "
        "--out head.safetensors",
        f"certify head.safetensors --data {{real}}/images/val --eps 0.5 {NOISE} --sigma 0.5 --limit 60 "
        "--out rows.jsonl",
    ),
    "c": (
        f"convert cifar_vit_stem --no-pretrained --model-args '{VIT}' --norm smooth --out vit.safetensors",
        "finetune vit.safetensors --data {cifar}/train.tar --eps 36/255 --epochs 9 --out tuned.safetensors",
        "certify tuned.safetensors --data {cifar}/test.tar --eps 36/255 --limit 500 --out rows.jsonl",
    ),
    "d": (
        "finetune liresnet_l6w64 --no-pretrained --model-args num_classes=10 --data {cifar}/train.tar --eps 36/255 "
        "--epochs 4 --out tuned.safetensors",
        "certify tuned.safetensors --data {cifar}/test.tar --eps 36/255 --method gloro --limit 1000 --out rows.jsonl",
    ),
    "e": ("--import odd certify odd:Odd --eps 36/255 --method smoothing --sigma 0.25 --samples 200 --out rows.jsonl",),
}


def run(path: str, places: dict[str, str], work: Path) -> dict[str, Any]:
    """Runs the commands of a path in a new folder."""
    folder = work / path.replace(", ", "-")
    folder.mkdir(parents=True)
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    commands = [*PATHS[path], "report rows.jsonl --html rows.html --card card.md"]
    for command in commands:
        words = shlex.split(command.format(**places))
        print(shlex.join(["lipcert", *words]), flush=True)
        subprocess.run([sys.executable, "-m", "lipcert", *words], cwd=folder, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return {
        "path": path,
        "images": len(rows),
        "correct": sum(bool(row["correct"]) for row in rows),
        "certified": sum(bool(row["certified"] and row["correct"]) for row in rows),
        "minutes": (time.perf_counter() - started) / 60,
        "cpu_minutes": (used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime) / 60,
        "commands": [f"lipcert {command}" for command in commands],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", type=Path, help="folder with the pretrained checkpoints")
    parser.add_argument("--cifar", type=Path, help="folder with train.tar and test.tar")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder")
    parser.add_argument("--only", nargs="*", choices=PATHS, default=[*PATHS])
    args = parser.parse_args()
    places = {name: str(getattr(args, name).resolve()) for name in ("real", "cifar") if getattr(args, name)}
    possible = [
        path
        for path in args.only
        if all(f"{{{n}}}" not in "".join(PATHS[path]) or n in places for n in ("real", "cifar"))
    ]
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {"paths": []}
    for path in possible:
        row = run(path, places, args.work)
        rows = [*(one for one in known["paths"] if one["path"] != path), row]
        known = {"paths": sorted(rows, key=lambda one: one["path"]), "environment": environment()}
        RESULT.write_text(json.dumps(known, indent=1) + "\n")
        print(f"{path}: {row['certified']} of {row['images']} certified, {row['cpu_minutes']:.1f} CPU minutes")


if __name__ == "__main__":
    main()
