"""Five ways from a network to a card: runs the commands of their how-to pages, each section in an empty folder.

    python -m benchmarks.paths --real ../real --cifar ../shared/data/cifar10 --work paths
    python -m benchmarks.paths --only a-small-vit --cifar ../shared/data/cifar10 --work paths

    python -m benchmarks.paths --networks --real ../real --cifar ../shared/data/cifar10 --limit 200

With ``--networks`` it prints a table of real networks instead: three that are smoothed behind the denoiser ``natural``,
with σ chosen on other images for each ε, and a LiResNet, whose own Lipschitz bound certifies it. Accuracy is without
noise, and of ``SmoothedClassifier.predict`` with the σ of 36/255, abstentions wrong; seconds are of the processor.

``--real`` is a folder with lite0.safetensors, imagenet.tar (1,000 classes), vit.safetensors, cnn.safetensors of a
MobileNetV2, and images/train and images/val; ``--cifar`` one with train.tar and test.tar. Pages whose files are missing
are left out. A page's module is written beside the links to its files. Each page gets a line with the time and the
result of each of its sections.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import lipcert
from lipcert.inputs.data import open_images
from lipcert.results import certifier_for, share
from lipcert.settings import CertifySettings, parse_eps
from lipcert.smoothing import CHOOSING, SmoothedClassifier, choose_sigma

PAGES = Path(__file__).parents[1] / "docs/how-to"
WAYS = ("a-pretrained-cnn", "a-pretrained-vit", "a-small-vit", "a-liresnet", "a-module-of-your-own")
LINKED = {
    "real": ("lite0.safetensors", "imagenet.tar", "vit.safetensors", "cnn.safetensors", "images"),
    "cifar": ("cifar10",),
}
# The line that a run adds to a section, or replaces.
RESULT = "`python -m benchmarks.paths` took {:.0f} CPU minutes: {} of {} images are certified and classified correctly."


def run(commands: list[str], module: tuple[str, str] | None, files: dict[str, Path], folder: Path) -> str:
    """Runs the commands of a section in a new folder; returns the section's line."""
    folder.mkdir(parents=True)
    for name, target in files.items():
        if any(name in command for command in commands):
            (folder / name).symlink_to(target)
    if module is not None:
        (folder / module[0]).write_text(module[1])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for command in commands:
        print("lipcert", command, flush=True)
        subprocess.run([sys.executable, "-m", "lipcert", *shlex.split(command)], cwd=folder, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes = (used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime) / 60
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return RESULT.format(minutes, sum(row["certified"] and row["correct"] for row in rows), len(rows))


@dataclass(frozen=True)
class Network:
    """A real network: one of lipcert's, or one with a checkpoint in the folder ``--real``, which is smoothed."""

    title: str
    name: str
    data: str
    checkpoint: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


OF_THE_VIT: dict[str, Any] = {"img_size": 224, "num_classes": 4}
OF_MOBILENET: dict[str, Any] = {"num_classes": 4, "pad_type": "same", "bn_eps": 1e-3, "mean": 0.5, "std": 0.5}
NETWORKS = (
    Network("EfficientNet-Lite0", "tf_efficientnet_lite0", "imagenet.tar", "lite0.safetensors"),
    Network("DINOv2 ViT-S/14", "vit_small_patch14_dinov2", "images/val", "vit.safetensors", OF_THE_VIT),
    Network("MobileNetV2", "mobilenetv2_100", "images/val", "cnn.safetensors", OF_MOBILENET),
    Network("LiResNet", "cifar10-liresnet", "cifar10/test.tar"),
)
EPS = ("36/255", "0.5")


def row(network: Network, files: Mapping[str, Path], limit: int) -> list[str]:
    """The cells of a network's row."""
    checkpoint = network.checkpoint and files["images"].parent / network.checkpoint
    model: Any = lipcert.load(network.name, checkpoint=checkpoint or None, **network.arguments)
    folder, *rest = network.data.split("/")
    images = open_images(files[folder].joinpath(*rest), model, limit=limit)
    batches: list[Any] = list(images.batches(32))
    right = sum(int((model(batch.images).argmax(1) == batch.labels).sum()) for batch in batches)
    cells = [network.title, f"{100 * right / len(images):.1f} %", "–"]
    for eps in EPS:
        sigma = None
        if checkpoint:
            smoothed = SmoothedClassifier(model, 0.25, "natural").network
            others: Any = images.others(CHOOSING)
            sigma = choose_sigma(smoothed, others.images, others.labels, eps, indices=others.indices).sigma
            if eps == EPS[0]:
                predict = SmoothedClassifier(smoothed, sigma, seed=0).predict
                hits = sum(int((predict(batch.images) == batch.labels).sum()) for batch in batches)
                cells[2] = f"{100 * hits / len(images):.1f} %"
        started = time.process_time()
        settings = CertifySettings(parse_eps(eps), "smoothing" if checkpoint else "gloro", sigma=sigma)
        certifier: Any = certifier_for(smoothed if checkpoint else model, settings)
        found = [certifier.run_batch(batch) for batch in images.batches(certifier.together)]
        seconds = (time.process_time() - started) / len(images)
        certified = sum(int((one.certified & one.correct).sum()) for one in found)
        drawn = sum(int((one.samples + one.selected).sum()) for one in found) if checkpoint else 0
        cells += [f"{sigma:g}" if sigma else "–", share(certified, len(images))]
        cells += [f"{drawn / len(images):.0f}" if drawn else "–", f"{seconds:.2f}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", type=Path, help="folder with the pretrained checkpoints")
    parser.add_argument("--cifar", type=Path, help="folder with train.tar and test.tar")
    parser.add_argument("--work", type=Path, help="an empty folder")
    parser.add_argument("--only", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--networks", action="store_true", help="print the table of real networks instead")
    parser.add_argument("--limit", type=int, default=200, help="images of each network of the table")
    args = parser.parse_args()
    files = {name: (args.real / name).resolve() for name in LINKED["real"] if args.real}
    files |= {"cifar10": args.cifar.resolve()} if args.cifar else {}
    if args.networks:
        columns = ["network", "clean", "`predict`"]
        for eps in EPS:
            columns += [f"σ at {eps}", f"certified at {eps}", "draws", "CPU s an image"]
        print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)
        for network in NETWORKS:
            if network.data.split("/")[0] in files:
                with torch.no_grad():
                    print(f"| {' | '.join(row(network, files, args.limit))} |", flush=True)
        return
    missing = [name for names in LINKED.values() for name in names if name not in files]
    for name in args.only:
        page = PAGES / f"{name}.md"
        found = re.search(r"^`(\w+\.py)` is\n\n```python\n(.*?)^```$", page.read_text(), re.M | re.S)
        first, *sections = re.split(r"(?=^## )", page.read_text(), flags=re.M)
        for number, section in enumerate(sections):
            commands = re.findall(r"^    lipcert (.*)$", section, re.M)
            if any(file in command for file in missing for command in commands):
                continue
            line = run(commands, found and (found[1], found[2]), files, args.work / f"{name}-{number}")
            print(line, flush=True)
            old = re.compile(r"\n`python -m benchmarks\.paths`.*\n")
            sections[number] = f"{old.sub('', section).rstrip()}\n\n{line}\n" + "\n" * (number + 1 < len(sections))
            page.write_text(first + "".join(sections))


if __name__ == "__main__":
    main()
