"""Real networks as they are: what ``lipcert certify`` certifies of them, and at what cost.

    python -m benchmarks.networks --real ../real --cifar ../shared/data/cifar10 --work networks [--only dinov2]

Three pretrained networks are smoothed behind the denoiser ``natural``, with σ chosen for each ε on other images; the
Lipschitz bound of a LiResNet certifies it, by contrast. Accuracy is that of the network without noise, and that of the
smoothed classifier with the draws of the certificate; abstentions are wrong. ``--real`` is a folder with
lite0.safetensors, vit.safetensors, cnn.safetensors of a MobileNetV2, imagenet.tar, and images/val; ``--cifar`` one with
test.tar. Runs continue from the rows in ``--work``. Each network's result is kept in benchmarks/results/networks.json
with the environment it ran in.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import lipcert
from benchmarks._cifar import labels_of
from benchmarks._env import environment
from lipcert.inputs.data import open_images

RESULT = Path(__file__).parent / "results" / "networks.json"
EPS = ("36/255", "0.5")


@dataclass(frozen=True)
class Network:
    """A network of lipcert's, or one with a checkpoint, which is smoothed."""

    title: str
    name: str
    data: str
    checkpoint: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


NETWORKS = {
    "lite0": Network("EfficientNet-Lite0", "tf_efficientnet_lite0", "imagenet.tar", "lite0.safetensors"),
    "dinov2": Network(
        "DINOv2 ViT-S/14",
        "vit_small_patch14_dinov2",
        "images/val",
        "vit.safetensors",
        {"img_size": 224, "num_classes": 4},
    ),
    "mobilenetv2": Network(
        "MobileNetV2",
        "mobilenetv2_100",
        "images/val",
        "cnn.safetensors",
        {"num_classes": 4, "pad_type": "same", "bn_eps": 1e-3, "mean": 0.5, "std": 0.5},
    ),
    "liresnet": Network("LiResNet", "cifar10-liresnet", "test.tar"),
}


def measured(key: str, targets: Sequence[str], folder: Path, work: Path, limit: int) -> dict[str, Any]:
    """The accuracies of a network, and what the command certifies at each ε."""
    network, runs = NETWORKS[key], {}
    for eps in targets:
        out = work / f"{key}-{eps.replace('/', '-')}.jsonl"
        command = [network.name, "--data", str(folder / network.data), "--eps", eps, "--limit", str(limit)]
        if network.checkpoint:
            command += ["--checkpoint", str(folder / network.checkpoint), "--method", "smoothing", "--sigma", "auto"]
            command += ["--denoiser", "natural"]
            for name, value in network.arguments.items():
                command += [f"--{name}", str(value)] if name in ("mean", "std") else ["--model-args", f"{name}={value}"]
        subprocess.run([sys.executable, "-m", "lipcert", "certify", *command, "--out", str(out)], check=True)
        summary = json.loads(out.with_suffix(".summary.json").read_text())
        counts, images = summary["counts"], summary["counts"]["images"]
        runs[eps] = {
            "sigma": summary["sigma"] if network.checkpoint else None,
            "right": counts["correct"],
            "certified": counts["certified_correct"],
            "draws": counts["samples"] / images if network.checkpoint else None,
            "cpu_seconds": counts["cpu_seconds"] / images,
        }
    checkpoint = folder / network.checkpoint if network.checkpoint else None
    model: Any = lipcert.load(network.name, checkpoint=checkpoint, **network.arguments)
    data = open_images(folder / network.data, model, limit=limit)
    right = sum(int((model(batch.images).argmax(1) == labels_of(batch)).sum()) for batch in data.batches(10))
    return {"images": len(data), "clean": right, "eps": runs, "environment": environment()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", type=Path, required=True, help="folder with checkpoints and their data")
    parser.add_argument("--cifar", type=Path, required=True, help="folder with test.tar")
    parser.add_argument("--work", type=Path, required=True, help="folder for rows, from which runs continue")
    parser.add_argument("--only", nargs="*", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--eps", nargs="*", default=EPS)
    parser.add_argument("--limit", type=int, default=200, help="images of each network")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for key in args.only:
        with torch.no_grad():
            folder = args.real if NETWORKS[key].checkpoint else args.cifar
            result = measured(key, args.eps, folder.resolve(), args.work, args.limit)
        print(key, json.dumps(result, indent=2), flush=True)
        kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}  # runs beside this one write others
        result["eps"] = {**kept.get(key, result)["eps"], **result["eps"]}
        RESULT.write_text(json.dumps(kept | {key: result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
