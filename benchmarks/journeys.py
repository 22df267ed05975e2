"""Journeys: what a new user types with default names, with every command that is advised, timed.

Of a network: convert and what it advises, then inspect, constrain, finetune, certify, verify and report by hand, each
on the newest artifact in an empty folder. ``--network vit_base`` is ``vit_base_patch16_224 --no-pretrained``; the
others need ``--weights``, a folder with ``lite0.safetensors``, ``vit.safetensors`` or ``cnn.safetensors`` for timm's
tf_efficientnet_lite0, vit_small_patch14_dinov2 (4 classes) or mobilenetv2_100 (4 classes), and ``--data``, a folder
or .tar with images of their classes. The time and the last line of each command go to
``benchmarks/results/journeys.json``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from pathlib import Path

from benchmarks._advised import Journey, in_a_process
from benchmarks._env import environment

RESULTS = Path(__file__).parent / "results" / "journeys.json"
NETWORKS = {
    "vit_base": ["vit_base_patch16_224", "--no-pretrained"],
    "lite0": ["tf_efficientnet_lite0", "--checkpoint", "lite0.safetensors"],
    "dino": [
        *("vit_small_patch14_dinov2", "--checkpoint", "vit.safetensors"),
        *("--model-args", "img_size=224 num_classes=4"),
    ],
    "mobilenetv2": [
        *("mobilenetv2_100", "--checkpoint", "cnn.safetensors", "--mean", "0.5", "--std", "0.5"),
        *("--model-args", "num_classes=4 pad_type=same bn_eps=1e-3"),
    ],
}
# What is advised runs with few images, as a first trial would.
SIZES = {
    "certify": {"--limit": "4", "--samples": "100"},
    "constrain": {"--limit": "20"},
    "finetune": {"--epochs": "1", "--limit": "16", "--batch-size": "4"},
}


def travel(network: str, weights: Path | None, data: Path | None, folder: Path) -> Journey:
    """All commands for a network, in a folder."""
    words = [str(weights / word) if weights and word.endswith(".safetensors") else word for word in NETWORKS[network]]
    images = str(data) if data else "IMAGES"
    names = {**dict.fromkeys(("TRAIN", "TEST", "IMAGES"), images), "ARTIFACT": words[0]}
    journey = Journey(folder, in_a_process, names, SIZES, follow=False)
    for command in _commands(words, data):
        if command[0] == "verify":
            model = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns).name
            rows = max(folder.glob("*.certified*.jsonl"), key=lambda path: path.stat().st_mtime_ns).name
            journey.go("verify", model, rows)
            journey.go("report", rows, "--html", "page.html", "--card", "README.md")
        else:
            journey.follow = command[0] == "convert" and data is not None  # advice needs images
            journey.go(*command)
        print(f"{network}: {shlex.join(command)[:80]}: {journey.steps[-1].end}", flush=True)
    return journey


def _commands(words: list[str], data: Path | None) -> list[list[str]]:
    images = ["--data", str(data)] if data else []
    trained = [["finetune", *images, "--eps", "36/255"]] if data else []  # which needs labels
    certified = [["certify", *images, "--eps", "36/255", "--time-budget", "10m"], ["verify"]]
    return [["convert", *words], ["inspect"], ["constrain", *images], *trained, *certified]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="*", choices=NETWORKS, default=["vit_base"])
    parser.add_argument("--weights", type=Path, help="folder with the files of weights")
    parser.add_argument("--data", type=Path, help="images of the classes of the network")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for network in args.network:
        with tempfile.TemporaryDirectory() as folder:
            weights, data = (path and path.resolve() for path in (args.weights, args.data))
            journey = travel(network, weights, data, Path(folder))
        found[network] = {
            "environment": environment(),
            "steps": [
                {
                    "command": " ".join(Path(w).name if Path(w).is_absolute() else w for w in step.words),
                    "seconds": round(step.seconds, 1),
                    "end": step.end.replace("\t", " "),
                }
                for step in journey.steps
            ],
        }
        args.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
