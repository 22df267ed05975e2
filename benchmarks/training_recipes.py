"""What each part of a recipe does to certified accuracy per core hour: one thing changed at a time.

    python -m benchmarks.training_recipes --data ../shared/data/cifar10
    python -m benchmarks.training_recipes --data ../shared/data/cifar10 --network hybrid --images 8192

Trains a narrow LiResNet, or a narrow hybrid with L2 attention, on a part of CIFAR-10's training images, from the same
random weights and with the same batches, and certifies other training images by GloRo at 36/255. A recipe is a base
with settings changed, of the training or of the network. Results and environment go to
benchmarks/results/training_recipes.json, or to benchmarks/results/hybrid_recipes.json, after each run; what is there
already is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import lipcert
from benchmarks._cifar import EPS, labels_of
from benchmarks._env import environment
from lipcert.bounds import MarginBounds, analyze
from lipcert.errors import InputError
from lipcert.inputs.data import Images, open_images
from lipcert.training import Augmentation, Batches

RESULTS = Path(__file__).parent / "results"
FILES = {"liresnet": "training_recipes.json", "hybrid": "hybrid_recipes.json"}
NETWORKS: dict[str, dict[str, Any]] = {
    "liresnet": {"name": "liresnet_l6w64", "width": 16, "depth": 4, "neck": 32},
    "hybrid": {"name": "liresnet_vit_l2", "width": 16, "embed_dim": 64},
}
COMMON: dict[str, Any] = {"amp": "bfloat16", "channels_last": True}
BASES: dict[str, dict[str, Any]] = {
    "nadam": {"loss": "emma", "optimizer": "nadam", "lr": 1e-3, "batch_size": 256},
    "muon": {"loss": "emma", "optimizer": "muon", "lr": 1e-2, "batch_size": 256},
}
_ALL = {"start": 0.1, "radius": 8.0, "neck": 128}
HYBRIDS: list[dict[str, Any]] = [
    {}, {"network": {"start": 0.1}}, {"network": {"start": 0.1, "radius": 8.0}},
    {"network": {"start": 0.1, "neck": 128}}, {"network": _ALL}, {"network": {**_ALL, "depth": 1}},
    {"network": _ALL, "lr": 2e-2},
]  # fmt: skip
CHANGES: dict[str, list[dict[str, Any]]] = {
    "nadam": [{}, {"lr": 3e-3}, {"optimizer": "adamw"}],
    "muon": [
        {}, {"lr": 3e-3}, {"temperature": 0.25}, {"ramp": (0.1, 1.5, 0.5)}, {"loss": "gloro"}, {"batch_size": 128},
        {"crop": "none"}, {"crop": "flip"}, {"ema": 0.99}, {"lr": 3e-2}, {"loss": "fixed"}, {"loss": "trades"},
    ],
}  # fmt: skip


def built(network: dict[str, Any]) -> lipcert.Model:
    arguments = {key: value for key, value in network.items() if key != "name"}
    return lipcert.load(network["name"], pretrained=False, **arguments)


def trained(
    network: dict[str, Any], images: Images, held_out: Images, kept: dict[int, Any], epochs: int, asked: dict[str, Any]
) -> dict[str, Any]:
    """The accuracy that a recipe reaches on the images held out, and the core seconds of its training."""
    settings = {**COMMON, **asked}
    size = settings.pop("batch_size")
    torch.manual_seed(0)
    model = built({**network, **settings.pop("network", {})})
    batches = Batches(images, model, size, Augmentation(settings.pop("crop", "shift")))
    batches.cache = kept
    started = time.process_time()
    lipcert.finetune(model, batches, EPS, epochs=epochs, progress=lambda e: print(e, flush=True), **settings)
    seconds = time.process_time() - started
    batch = next(held_out.batches(len(held_out)))
    result = lipcert.certify(model, batch.images, batch.labels, eps=EPS, method="gloro")
    return {
        "clean": float((result.predicted == labels_of(batch)).double().mean()),
        "certified": result.certified_accuracy,
        "bound": MarginBounds(analyze(model)).features,
        "core_seconds": round(seconds, 1),
    }


def split(data: Path, model: lipcert.Model, images: int, held_out: int) -> tuple[Images, Images, dict[int, Any]]:
    """Training images, other training images to compare by, and the first ones decoded."""
    first, second = (open_images(str(data / "train.tar"), model, limit=images + held_out) for _ in range(2))
    assert first.order is not None
    first.order, second.order = first.order[:images], first.order[images:]
    whole = Batches(first, model, 1024, False)
    for _ in whole:
        pass
    return first, second, whole.cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tar")
    parser.add_argument("--network", choices=NETWORKS, default="liresnet")
    parser.add_argument("--images", type=int, default=16384)
    parser.add_argument("--held-out", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--bases", default="muon,nadam")
    args = parser.parse_args()
    network, path = NETWORKS[args.network], RESULTS / FILES[args.network]
    changes = CHANGES if args.network == "liresnet" else {"muon": HYBRIDS}
    about = {
        "network": network,
        "common": {**COMMON, "images": args.images, "epochs": args.epochs, "crop": "shift", "eps": "36/255"},
        "held_out": args.held_out,
    }
    known = json.loads(path.read_text()) if path.exists() else {}
    runs = known["runs"] if {key: known.get(key) for key in about} == about else []
    torch.set_num_threads(1)
    wanted = [
        (base, json.loads(json.dumps(change)))
        for base in args.bases.split(",")
        if base in changes
        for change in changes[base]
    ]
    wanted = [one for one in wanted if not any((run["base"], run["changed"]) == one for run in runs)]
    data = split(args.data, built(network), args.images, args.held_out) if wanted else None
    for base, change in wanted:
        assert data is not None
        try:
            found = trained(network, *data, args.epochs, {**BASES[base], **change})
        except InputError as error:
            found = {"error": str(error)}
        runs.append({"base": base, "changed": change, **found})
        print(json.dumps(runs[-1]), flush=True)
        path.write_text(json.dumps({**about, "bases": BASES, "runs": runs, "environment": environment()}, indent=1))


if __name__ == "__main__":
    main()
