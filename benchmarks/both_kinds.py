"""Both kinds of certificate on CIFAR-10 in one run: smoothing and anchored, each on a network trained for it.

    python -m benchmarks.both_kinds --data ../shared/data/cifar10 --work both

One ViT (the network ``stem`` of ``benchmarks.cifar_pipeline``) is trained under noise of σ = 0.25, for smoothing; that
network is then converted, constrained and fine-tuned for the anchored certificate. Both are certified on the same test
images by ``lipcert certify``; a row counts at ε if its class is right and its radius is above ε. The two certify
different functions: smoothing the smoothed classifier, with failure probability 1e-3 per image, anchored the network
itself. The training is short: the numbers compare the two kinds at this scale, and are no record of either.

Each step leaves its file in the work folder and is not repeated. Seconds are those of a processor, since other work may
run beside, and include the start of a command, some eight. Results and environment go to
benchmarks/results/both_kinds.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks._cifar import EPS
from benchmarks._env import environment
from benchmarks.cifar_pipeline import COMMON, NETWORKS, NORMS, Steps

RESULT = Path(__file__).parent / "results" / "both_kinds.json"
RADII = {"36/255": EPS, "0.25": 0.25, "0.5": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tar and test.tar")
    parser.add_argument("--work", type=Path, required=True, help="folder for the models in between")
    parser.add_argument("--epochs", type=int, nargs=2, default=(4, 3), help="under noise, and for anchored")
    parser.add_argument("--limit", type=int, default=50_000, help="training images for anchored")
    parser.add_argument("--images", type=int, default=64, help="test images that are certified")
    parser.add_argument("--samples", type=int, default=2000, help="draws of the noise for an image")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    train, test = args.data / "train.tar", args.data / "test.tar"
    name, arguments = NETWORKS["stem"]
    epochs = [str(number) for number in args.epochs]
    steps = Steps(args.work)

    muon = ["--optimizer", "muon", "--batch-size", "128", "--data", train]
    fresh = ["--no-pretrained", "--model-args", f"{arguments} {COMMON}"]
    steps("noisy", "finetune", name, *fresh, *muon, "--loss", "noise", "--sigma", "0.25", "--eps", "36/255",
          "--epochs", epochs[0], "--lr", "0.005")  # fmt: skip
    noisy = steps.last
    steps("converted", "convert", steps.last, "--attention", "keep", "--norm", "smooth", "--data", train)
    steps("constrained", "constrain", steps.last, "--data", train, "--limit", "1000", "--error", "0.02")
    norms = [part for norm in NORMS for part in ("--max-norm", norm)]
    steps("anchored", "finetune", steps.last, *muon, "--limit", str(args.limit), *norms, "--eps", "0.2",
          "--epochs", epochs[1], "--lr", "0.01", "--temperature", "0.2,0.02")  # fmt: skip

    images = ["--data", test, "--limit", str(args.images), "--eps", "36/255"]
    smoothing = ["--method", "smoothing", "--sigma", "0.25"]
    found = {
        "smoothing": certified(steps, "smoothing", noisy, *images, *smoothing, "--all-samples", "--samples",
                               str(args.samples)),
        "smoothing, verdict at 36/255 only": certified(steps, "verdicts", noisy, *images, *smoothing),
        "anchored": certified(steps, "certified", steps.last, *images, "--method", "anchored"),
    }  # fmt: skip
    minutes = steps.minutes("cpu_minutes")
    result: dict[str, Any] = {
        "arguments": {key: value for key, value in vars(args).items() if key not in ("data", "work")},
        "certificates": found,
        "training, cpu minutes": {
            "noisy": minutes["noisy"],
            "anchored, beyond noisy": sum(minutes[step] for step in ("converted", "constrained", "anchored")),
        },
        "commands": steps.commands(),
        "environment": environment(),
    }
    print(json.dumps(found, indent=1))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def certified(steps: Steps, step: str, model: Path, *arguments: str | Path) -> dict[str, Any]:
    """What ``lipcert certify`` finds; draws end early unless all are asked for, and radii then say nothing beyond ε."""
    path = steps.work / f"{step}.jsonl"
    steps.timed(step, "certify", model, *arguments, "--out", path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    decided = {"36/255": EPS} if step == "verdicts" else RADII
    return {
        "images": len(rows),
        "holds for": rows[0].get("holds_for", "the network"),
        "right": sum(row["correct"] for row in rows) / len(rows),
        "certified": {
            eps: sum(row["correct"] and row["radius"] > size for row in rows) / len(rows)
            for eps, size in decided.items()
        },
        "median draws": statistics.median(row["samples"] for row in rows) if "samples" in rows[0] else None,
        "cpu seconds an image": 60 * steps.minutes("cpu_minutes")[step] / len(rows),
    }


if __name__ == "__main__":
    main()
