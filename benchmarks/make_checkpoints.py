"""Puts certified checkpoints into the package: weights, rows of ``lipcert models``, and model cards.

    python -m benchmarks.make_checkpoints digits-vit --work digits
    python -m benchmarks.make_checkpoints cifar10-liresnet --data ../shared/data/cifar10 --work liresnet \
        --model liresnet/rounded.safetensors
    python -m benchmarks.make_checkpoints cifar10-liresnet-smooth --data ../shared/data/cifar10 --work cut \
        --model cut/liresnet-rounded.safetensors
    python -m benchmarks.make_checkpoints cifar10-liresnet-w128 --data ../shared/data/cifar10 --work w128 \
        --model liresnet-w128.safetensors
    python -m benchmarks.make_checkpoints cifar10-liresnet-108 --data ../shared/data/cifar10 --work far \
        --model end.safetensors
    python -m benchmarks.make_checkpoints cifar10-hybrid-l2 --data ../shared/data/cifar10 --work cut \
        --model cut/hybrid_l2-rounded.safetensors
    python -m benchmarks.make_checkpoints cifar10-vit --data ../shared/data/cifar10 --work vit \
        --model paths/a-small-vit-0/tuned.safetensors

The models on CIFAR-10 are those of ``benchmarks.liresnet_cifar``, ``benchmarks.liresnet_cut``,
``benchmarks.train_liresnet`` and ``benchmarks.liresnet_end``, rounded to float16, and of ``benchmarks.paths``. A
card shows up to 1,000 images at several ε, by a command that a user types, which is printed. Shares are those of
``benchmarks.certified_accuracy``, PGD on the same images included; where these are of one ε, the certified curve is
that of the card. Where an attack on all images takes too long, a part of them is attacked, and the other shares are
those of the card. All of it goes on where it was stopped. Writes lipcert/assets/certified.json, and beside it the files
that its rows name.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import lipcert
from benchmarks import certified_accuracy
from lipcert.inputs.checkpoints import ASSETS, TABLE, Checkpoint, checkpoints, path_of
from lipcert.norms import Rigor
from lipcert.report import read_runs

EPS, ALL = "36/255", 10_000
KINDS: dict[str, dict[str, Any]] = {
    "digits-vit": {"file": "digits_vit.safetensors", "trained": ("python -m benchmarks.make_digits_vit",)},
    "cifar10-liresnet": {
        "file": "cifar10_liresnet.safetensors", "method": "gloro",
        "trained": ("python -m benchmarks.liresnet_cifar --data cifar10 --work liresnet",),
    },
    "cifar10-liresnet-smooth": {
        "file": "cifar10_liresnet_smooth.safetensors", "curve": EPS, "card": 500,
        "trained": ("python -m benchmarks.liresnet_cut --data cifar10 --work cut",),
    },
    "cifar10-liresnet-w128": {
        "file": "cifar10_liresnet_w128.safetensors", "card": 500,
        "trained": ("python -m benchmarks.train_liresnet --data cifar10 --out liresnet-w128.safetensors",),
    },
    "cifar10-liresnet-108": {
        "file": "cifar10_liresnet_108.safetensors", "attacked": 500,
        "trained": (
            "python -m benchmarks.train_liresnet --recipe far --data cifar10 --out far.safetensors",
            "python -m benchmarks.liresnet_end --model far.safetensors --data cifar10 --out end.safetensors",
        ),
    },
    "cifar10-hybrid-l2": {
        "file": "cifar10_hybrid_l2.safetensors", "method": "gloro",
        "trained": ("python -m benchmarks.liresnet_cut --data cifar10 --work cut --attention l2",),
    },
    "cifar10-vit": {
        "file": "cifar10_vit.safetensors", "curve": EPS, "card": 300,
        "trained": ("python -m benchmarks.paths --only a-small-vit --cifar cifar10 --work paths",),
    },
}  # fmt: skip


def run(*words: str) -> None:
    """A lipcert command, printed."""
    print("lipcert", *words, flush=True)
    subprocess.run([sys.executable, "-m", "lipcert", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=KINDS)
    parser.add_argument("--data", type=Path, help="folder with test.tar")
    parser.add_argument("--work", type=Path, required=True, help="folder for rows")
    parser.add_argument("--model", type=Path, help="the trained model; by default the one in the package")
    args = parser.parse_args()
    kind = {"method": "staged", **KINDS[args.name]}
    file, curve = ASSETS / kind["file"], kind.pop("curve", certified_accuracy.CURVE)
    attacked = kind.pop("attacked", ALL)
    on_card = str(kind.pop("card", 1000))
    args.work.mkdir(exist_ok=True)
    if args.model is not None:
        shutil.copy(args.model, file)
    model = lipcert.load(file)
    method = () if kind["method"] == "staged" else ("--method", kind["method"])
    if args.name == "digits-vit":
        command = ["certify", args.name, "--limit", "120"]
        data = "scikit-learn's digits, the 120 images that come with lipcert"
        shown: tuple[str, ...] = ("--attack",)
    else:
        test = args.data / "test.tar"
        command, shown = ["certify", args.name, "--data", str(test)], () if attacked < ALL else ("--limit", on_card)
        data = f"CIFAR-10, all {ALL:,} test images, lightly compressed JPEG files"
    row = {
        "name": args.name,
        "architecture": model.source["name"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "eps": EPS,
        "data": data,
        "command": " ".join(["lipcert", *command, "--eps", EPS, *method]).replace(f"{args.data}/", "cifar10/"),
        **kind,
    }
    if path_of(args.name) is None:  # commands know it by its name
        put({**row, **dict.fromkeys(("images", "clean", "certified", "attacked", "attacked_images", "seconds"), 0)})
    rows, card = (args.work / f"{args.name}{end}" for end in (".jsonl", ".md"))
    several = EPS if args.name == "digits-vit" else certified_accuracy.CURVE
    run(*command, "--eps", several, *method, *shown, "--out", str(rows))  # the later --limit counts
    run("report", str(rows), "--card", str(card), "--license", "apache-2.0")
    shutil.copy(card, ASSETS)
    measured = (
        digits(rows)
        if args.name == "digits-vit"
        else cifar(args.name, certified_accuracy.measure(
            str(file), str(test), attacked, args.work / f"{args.name}.verdicts.jsonl", method=kind["method"], eps=curve
        ))
    )  # fmt: skip
    if curve == EPS or (args.name != "digits-vit" and attacked < ALL):
        whole = of_card(rows)
        certified_accuracy.keep(args.name, whole, curve=True)
        if attacked < ALL:
            measured |= {key: whole[key] for key in ("images", "clean")} | {"certified": whole["certified"][EPS]}
    put({**row, **measured})
    print(json.dumps({**row, **measured}, indent=1))


def put(row: dict[str, Any]) -> None:
    """Writes the table with this row."""
    table = [*(one for one in checkpoints() if one.name != row["name"]), Checkpoint(**{"rigor": "", **row})]
    TABLE.write_text(json.dumps([asdict(one) for one in sorted(table, key=lambda one: one.name)], indent=1) + "\n")


def digits(path: Path) -> dict[str, Any]:
    """What the rows of an attacked run say."""
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if "radius" in row]
    right = [row for row in rows if row["predicted"] == row["label"]]
    return {
        "images": len(rows),
        "clean": len(right) / len(rows),
        "certified": sum(bool(row["certified"]) for row in right) / len(rows),
        "attacked": sum(not row["attacked"] for row in right) / len(rows),
        "attacked_images": len(rows),
        "rigor": weakest(row["rigor"] for row in rows),
        "seconds": float(f"{fmean(row['seconds'] for row in rows):.2g}"),
    }


def of_card(path: Path) -> dict[str, Any]:
    """The certified curve of the rows of a card."""
    (run,) = read_runs([path])
    certified = {typed: run.certified_at(eps) / len(run) for eps, typed in run.every_eps}
    return {"images": len(run), "clean": run.correct / len(run), "certified": certified}


def cifar(name: str, summary: dict[str, Any]) -> dict[str, Any]:
    """What a summary of ``benchmarks.certified_accuracy`` says; it is kept there too."""
    certified_accuracy.keep(name, summary)
    return {
        "images": summary["images"],
        "clean": summary["clean"],
        "certified": summary["certified"][EPS],
        "attacked": summary["pgd"],
        "attacked_images": summary["images"],
        "rigor": weakest(summary["rigor"]),
        "seconds": float(f"{summary['cpu_seconds_a_verdict']:.2g}"),
    }


def weakest(rigors: Iterable[str]) -> str:
    """The rigor with the largest failure probability."""
    return max(rigors, key=lambda text: (Rigor.parse(text) or Rigor(0.0)).delta)


if __name__ == "__main__":
    main()
