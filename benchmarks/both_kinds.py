"""``cifar10-vit``, and smoothing beside anchored: one ViT on CIFAR-10, trained for each in turn.

    python -m benchmarks.both_kinds --data ../shared/data/cifar10 --work both

A network of :mod:`lipcert.networks.stem_vit`, one convolution and then 2 blocks on 16 tokens, is trained from random
weights under noise of σ = 0.25, for smoothing; it is then converted, constrained and fine-tuned for the anchored
certificate, by commands, which are printed. Both are certified on the same test images; a row
counts at ε if its class is right and its radius is above ε. Smoothing certifies the smoothed classifier, with failure
probability 1e-3 per image, anchored the network itself.

Each step leaves its file in the work folder and is not repeated; an interrupted training goes on after its last epoch.
Seconds are those of a processor, since other work may run beside, and include the start of a command, some eight.
Results and environment go to benchmarks/results/both_kinds.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._cifar import EPS
from benchmarks._env import environment
from benchmarks.command import shown

NETWORK = (
    "embed_dim=128 depth=2 num_heads=4 mlp_ratio=2 img_size=32 class_token=False global_pool=avg final_norm=False "
    "num_classes=10"
)
NORMS = ("1", "*.norm?=0.5", "*.fc1=0.8", "patch_embed*=1.5", "*.q=0.3", "*.k=0.3")
RESULT = Path(__file__).parent / "results" / "both_kinds.json"
RADII = {"36/255": EPS, "0.25": 0.25, "0.5": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tar and test.tar")
    parser.add_argument("--work", type=Path, required=True, help="folder for the models in between")
    parser.add_argument("--epochs", nargs=2, default=("4", "3"), help="under noise, and for anchored")
    parser.add_argument("--images", default="64", help="test images that are certified")
    parser.add_argument("--samples", default="2000", help="draws of the noise for an image")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    train, test = args.data / "train.tar", args.data / "test.tar"
    commands: dict[str, str] = {}
    notes = args.work / "minutes.json"
    minutes: dict[str, float] = json.loads(notes.read_text()) if notes.exists() else {}

    def step(name: str, command: str, *words: str | Path, ending: str = "safetensors") -> Path:
        """One command, which leaves a file of this name; what it takes of a processor is noted."""
        path = args.work / f"{name}.{ending}"
        typed = [command, *map(str, words), "--out", str(path)]
        commands[name] = shown([word.rpartition("/")[2] if Path(word).exists() else word for word in typed])
        if not path.exists() or ending == "jsonl":
            print(shown(typed), flush=True)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-m", "benchmarks.command", *typed], check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            minutes[name] = minutes.get(name, 0.0) + spent / 60
            notes.write_text(json.dumps(minutes))
        return path

    muon = ("--optimizer", "muon", "--batch-size", "128", "--data", train)
    noisy = step("noisy", "finetune", "cifar_vit_stem", "--no-pretrained", "--model-args", NETWORK, *muon,
                 "--loss", "noise", "--sigma", "0.25", "--eps", "36/255", "--epochs", args.epochs[0],
                 "--lr", "0.005")  # fmt: skip
    converted = step("converted", "convert", noisy, "--attention", "keep", "--norm", "smooth", "--data", train)
    constrained = step("constrained", "constrain", converted, "--data", train, "--limit", "1000", "--error", "0.02")
    norms = [part for norm in NORMS for part in ("--max-norm", norm)]
    anchored = step("anchored", "finetune", constrained, *muon, *norms, "--eps", "0.2", "--epochs", args.epochs[1],
                    "--lr", "0.01", "--temperature", "0.2,0.02")  # fmt: skip

    found = {}
    images = ("--data", test, "--limit", args.images, "--eps", "36/255")
    for name, model, words in (
        ("smoothing", noisy, ("smoothing", "--sigma", "0.25", "--all-samples", "--samples", args.samples)),
        ("anchored", anchored, ("anchored",)),
    ):
        path = step(f"{name}-rows", "certify", model, *images, "--method", *words, ending="jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found[name] = {
            "images": len(rows),
            "holds for": rows[0].get("holds_for", "the network"),
            "right": statistics.fmean(row["correct"] for row in rows),
            "certified": {
                eps: statistics.fmean(row["correct"] and row["radius"] > size for row in rows)
                for eps, size in RADII.items()
            },
            "cpu seconds an image": 60 * minutes[f"{name}-rows"] / len(rows),
        }
    result: dict[str, Any] = {
        "arguments": {"epochs": args.epochs, "images": args.images, "samples": args.samples},
        "certificates": found,
        "training, cpu minutes": {
            "noisy": minutes["noisy"],
            "anchored, beyond noisy": sum(minutes[step] for step in ("converted", "constrained", "anchored")),
        },
        "commands": [*commands.values()],
        "environment": environment(),
    }
    print(json.dumps(found, indent=1))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
