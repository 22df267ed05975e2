"""EMMA with the true gradient of the bound against EMMA with that of the flattened kernels, on one network.

    python -m benchmarks.training_bound --data ../shared/data/cifar10 --seeds 3

Trains a small LiResNet on a part of CIFAR-10 with the same settings, starts and batches, by two optimizers, and
certifies test images by GloRo. ``flattened`` takes the certified bound once an epoch and lets it change as
∏ ‖W_l‖^a_l with the weights, ‖W_l‖ the norm of the flattened kernel and a_l the slope of the bound along it. Further,
CPU seconds per update of each loss; ``--updates`` measures these alone, once more. Results and environment go to
benchmarks/results/training_bound.json, after each run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import lipcert
from benchmarks._cifar import EPS
from benchmarks._env import environment
from lipcert.bounds import MarginBounds, analyze
from lipcert.inputs.data import open_images
from lipcert.norms import gram_norm
from lipcert.training import Augmentation, Batches, TrainingBound
from lipcert.training._matrices import matrices

RESULT = Path(__file__).parent / "results" / "training_bound.json"
NETWORK: dict[str, Any] = {"width": 16, "depth": 4, "neck": 32, "num_features": 128}
SETTINGS: dict[str, Any] = {"channels_last": True}
RATES = {"nadam": 2e-3, "muon": 1e-2}
KINDS = ("true", "flattened")
TIMED = {"liresnet_l6w64": ("ce", "emma"), "lip_convnet_6c2f": ("ce", "emma", "local-b", "local-g")}
_BATCH, _TIMED_BATCH = 64, 256
_STEP = 1e-3


class Flattened(TrainingBound):
    """The bound as a product of powers of the norms of flattened kernels, made anew each epoch."""

    def certify(self) -> float:
        found = super().certify()
        self.start = found
        self.terms = []
        for matrix in [m for m in matrices(self.model) if m.path != "head"]:
            with torch.no_grad():
                before = matrix.value().clone()
                matrix.value().mul_(1 + _STEP)
                slope = math.log(MarginBounds(analyze(self.model)).features / found) / math.log1p(_STEP)
                norm = gram_norm(matrix.value()).amax() / (1 + _STEP)
                matrix.value().copy_(before)
            self.terms.append((matrix, norm, slope))
        return found

    def step(self) -> Tensor:
        with torch.no_grad():
            super().step()  # for the head's rows
        self.weight = torch.nn.functional.normalize(self.model.net.head.weight)  # type: ignore[union-attr, arg-type]
        logs = [slope * (gram_norm(m.value()).amax() / norm).log() for m, norm, slope in self.terms]
        self.features = self.start * torch.stack(logs).sum().exp()
        return self.features


def network(seed: int) -> lipcert.Model:
    torch.manual_seed(seed)
    return lipcert.load("liresnet_l6w64", pretrained=False, **NETWORK)


def compared(args: argparse.Namespace, optimizer: str, kind: str, seed: int) -> dict[str, Any]:
    model = network(seed)
    images = open_images(str(args.data / "train.tar"), model, limit=args.images)
    batches = Batches(images, model, _BATCH, Augmentation("shift"))
    started = time.process_time()
    with mock.patch("lipcert.training._finetune.TrainingBound", Flattened if kind == "flattened" else TrainingBound):
        lipcert.finetune(
            model, batches, EPS, loss="emma", epochs=args.epochs, optimizer=optimizer, lr=RATES[optimizer], **SETTINGS
        )
    seconds = time.process_time() - started
    batch = next(open_images(str(args.data / "test.tar"), model, limit=args.tested).batches(args.tested))
    assert batch.labels is not None
    result = lipcert.certify(model, batch.images, batch.labels, eps=EPS, method="gloro")
    clean = float((result.predicted == batch.labels).double().mean())
    return {
        "optimizer": optimizer, "gradient": kind, "seed": seed, "clean": clean, "certified": result.certified_accuracy,
        "bound": MarginBounds(analyze(model)).features, "cpu_seconds": seconds,
    }  # fmt: skip


def cpu_seconds(loss: str, name: str, batch: int) -> float:
    """Of an update, from runs of 2 and of 6 updates."""
    torch.manual_seed(0)
    one = (torch.rand(batch, 3, 32, 32), torch.randint(10, (batch,)))
    spent = []
    for count in (2, 6):
        model = lipcert.load(name, pretrained=False)
        started = time.process_time()
        lipcert.finetune(model, [one] * count, EPS, loss=loss, epochs=1)
        spent.append(time.process_time() - started)
    return (spent[1] - spent[0]) / 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with train.tar and test.tar")
    parser.add_argument("--updates", action="store_true", help="only CPU seconds per update, once more")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--tested", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    if args.data is None and not args.updates:
        parser.error("--data is needed, except with --updates")
    about = {
        "network": {"name": "liresnet_l6w64", **NETWORK},
        "settings": {
            **SETTINGS,
            "lr": RATES,
            "images": args.images,
            "epochs": args.epochs,
            "batch_size": _BATCH,
            "crop": "shift",
        },
        "tested": args.tested,
    }
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    same = {key: known.get(key) for key in about} == about
    runs, updates = (known["runs"], known["cpu_seconds_per_update"]) if same else ([], {})

    def write() -> None:
        result = {**about, "runs": runs, "summary": summary(runs), "cpu_seconds_per_update": updates}
        RESULT.write_text(json.dumps({**result, "environment": environment()}, indent=1) + "\n")

    done = {(run["optimizer"], run["gradient"], run["seed"]) for run in runs}
    for one in product(RATES, KINDS, range(args.seeds)):
        if one not in done and not args.updates:
            runs.append(compared(args, *one))
            print(json.dumps(runs[-1]), flush=True)
            write()
    for name, losses in TIMED.items():
        if args.updates or set(updates.get(name, {})) != set(losses):
            updates[name] = {loss: cpu_seconds(loss, name, _TIMED_BATCH) for loss in losses}
            write()
        plain = updates[name]["ce"]
        ratios = ", ".join(f"{loss} {seconds / plain:.2f}" for loss, seconds in updates[name].items())
        print(f"{name}: CPU seconds of an update over those of plain cross-entropy: {ratios}")
    for name, means in summary(runs).items():
        print(f"{name}: clean {means['clean']:.1%}, certified {means['certified']:.1%}, bound {means['bound']:.3g}")


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over seeds, by optimizer and gradient."""
    found: dict[str, dict[str, float]] = {}
    for optimizer, kind in product(RATES, KINDS):
        own = [run for run in runs if (run["optimizer"], run["gradient"]) == (optimizer, kind)]
        if own:
            means = {key: sum(run[key] for run in own) / len(own) for key in ("clean", "certified", "bound")}
            found[f"{optimizer}, {kind}"] = means
    return found


if __name__ == "__main__":
    main()
