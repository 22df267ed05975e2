"""A search for a network and its training with the certificate in the loop.

    python -m benchmarks.recipe_search --data ../shared/data/cifar10 --network hybrid

Draws recipes at random and trains them on a part of CIFAR-10's training images by ``emma``. One epoch of each, round 0,
measures how long it takes. In round 1 all are trained for about the same core seconds, so a narrow network gets more
epochs than a wide one. The better half by certified accuracy on other training images (GloRo, 36/255) is trained anew
for twice the core seconds, and so on (successive halving: Jamieson and Talwalkar, AISTATS 2016). No test image is used.
Results and environment go to benchmarks/results/recipe_search.json after each run; what is there already is not run
again.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch

from benchmarks._env import environment
from benchmarks.training_recipes import BASES, built, split, trained
from lipcert.errors import InputError

RESULT = Path(__file__).parent / "results" / "recipe_search.json"
# The values of each argument of the network and of the training that are drawn from.
SPACES: dict[str, dict[str, dict[str, list[Any]]]] = {
    "hybrid": {
        "network": {
            "name": ["liresnet_vit_l2"], "width": [16, 24, 32], "residual_depth": [2, 4, 6], "embed_dim": [64, 128],
            "patch_size": [8, 16], "depth": [1, 2], "radius": [1.0, 8.0, 64.0], "start": [0.01, 0.1],
            "neck": [128, 256],
        },
        "training": {"lr": [5e-3, 1e-2, 2e-2], "crop": ["shift", "flip"], "temperature": [0.5, 1.0]},
    },
    "liresnet": {
        "network": {
            "name": ["liresnet_l6w64"], "width": [16, 24, 32], "depth": [2, 4, 6], "neck": [32, 64, 128],
            "num_features": [128, 256, 512], "stem": [[5, 2, 2], [4, 2, 1], [5, 4, 2]],
        },
        "training": {"lr": [5e-3, 1e-2, 2e-2], "crop": ["shift", "flip"], "temperature": [0.5, 1.0]},
    },
    "lipnext": {
        "network": {
            "name": ["lipnext_l8w128"], "width": [32, 64, 96], "depth": [2, 4, 8], "patch": [2, 4],
            "beta": [0.5, 0.75, 1.0],
        },
        "training": {"lr": [5e-3, 1e-2, 2e-2], "crop": ["shift", "flip"], "temperature": [0.5, 1.0, 2.0]},
    },
}  # fmt: skip


def drawn(space: dict[str, dict[str, list[Any]]], count: int) -> list[dict[str, dict[str, Any]]]:
    """Different recipes, the same in every call."""
    source = random.Random(0)
    found: list[dict[str, dict[str, Any]]] = []
    while len(found) < count:
        one = {part: {key: source.choice(values) for key, values in named.items()} for part, named in space.items()}
        if one not in found:
            found.append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tar")
    parser.add_argument("--network", choices=SPACES, default="hybrid")
    parser.add_argument("--recipes", type=int, default=6, help="drawn in the first round")
    parser.add_argument("--seconds", type=float, default=24.0, help="core seconds of each in the first round")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--held-out", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = {key: value for key, value in vars(args).items() if key not in ("data", "network")}
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    mine = known.get(args.network, {})
    runs = mine["runs"] if mine.get("about") == about else []
    space = SPACES[args.network]
    data = split(
        args.data, built({key: values[0] for key, values in space["network"].items()}), args.images, args.held_out
    )

    def run(recipe: dict[str, dict[str, Any]], epochs: int) -> dict[str, Any]:
        asked = {**BASES["muon"], **recipe["training"]}
        try:
            return trained(recipe["network"], *data, epochs, asked)
        except InputError as error:
            return {"error": str(error), "certified": 0.0, "core_seconds": args.seconds}

    def result(recipe: dict[str, dict[str, Any]], turn: int, epochs: int) -> dict[str, Any]:
        for known_run in runs:
            if (known_run["recipe"], known_run["round"]) == (recipe, turn):
                return known_run
        runs.append({"recipe": recipe, "round": turn, "epochs": epochs, **run(recipe, epochs)})
        print(json.dumps(runs[-1]), flush=True)
        known[args.network] = {"about": about, "runs": runs, "environment": environment()}
        RESULT.write_text(json.dumps(known, indent=1) + "\n")
        return runs[-1]

    left = [(recipe, result(recipe, 0, 1)["core_seconds"]) for recipe in drawn(space, args.recipes)]
    turn = 1
    while len(left) > 1:
        budget = args.seconds * 2 ** (turn - 1)
        found = [(result(recipe, turn, max(1, round(budget / pace))), recipe, pace) for recipe, pace in left]
        found.sort(key=lambda one: -one[0]["certified"])
        left = [(recipe, pace) for _, recipe, pace in found[: len(found) // 2]]
        turn += 1
    best = max(runs, key=lambda one: one["certified"])
    print(f"best: {best['certified']:.1%} certified, {best['core_seconds']} core seconds: {json.dumps(best['recipe'])}")


if __name__ == "__main__":
    main()
