"""The whole way on CIFAR-10 by the commands: train a timm ViT, convert, constrain, fine-tune, certify; one row.

    python -m benchmarks.cifar_pipeline --data ../shared/data/cifar10 --work pipeline
    python -m benchmarks.cifar_pipeline --data ../shared/data/cifar10 --work pipeline4 --network table4 --epochs 60 60

Starts from random weights and ends with certificates, through the same commands that a user types; they are printed.
``stem`` is the network of :mod:`lipcert.networks.stem_vit`, one convolution and then 2 blocks on 16 tokens, which two
cores can train; ``table4`` is the architecture of table 4 of the CertViT paper (arXiv 2302.10287): patches of 4, 6
blocks, width 192, MLP ratio 3. Neither has a normalisation in front of the head, which certificates pay for.
Dot-product attention stays, LayerNorm becomes a smooth projection, and fine-tuning is for the anchored certificate.

Each step leaves its file in the work folder and is not repeated; an interrupted training goes on after its last epoch.
The row comes from ``benchmarks.certified_accuracy``; ``lipcert certify`` takes the first images of the same shuffle,
and must say the same of them. The paper's row is no mark to be measured by: what it calls certified rests on a product
that leaves out operations, so it is no bound. Results and environment go to benchmarks/results/cifar_pipeline.json.
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

import torch
from torch.utils.flop_counter import FlopCounterMode

import lipcert
from benchmarks import certified_accuracy
from benchmarks._cifar import EPS, clean
from benchmarks._env import environment
from lipcert.inputs.data import open_images

NETWORKS = {
    "stem": ("cifar_vit_stem", "embed_dim=128 depth=2 num_heads=4 mlp_ratio=2"),
    "table4": ("vit_tiny_patch16_224", "patch_size=4 embed_dim=192 depth=6 num_heads=3 mlp_ratio=3 fc_norm=False"),
}
COMMON = "img_size=32 class_token=False global_pool=avg final_norm=False num_classes=10"
NORMS = ("1", "*.norm?=0.5", "*.fc1=0.8", "patch_embed*=1.5", "*.q=0.3", "*.k=0.3")
PAPER = {"clean": 0.751, "pgd": 0.427, "certified": 0.331}
RESULT = Path(__file__).parent / "results" / "cifar_pipeline.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tar and test.tar")
    parser.add_argument("--work", type=Path, required=True, help="folder for the models in between")
    parser.add_argument("--network", choices=NETWORKS, default="stem")
    parser.add_argument("--epochs", type=int, nargs=2, default=(4, 8), help="of training, and of fine-tuning")
    parser.add_argument("--images", type=int, default=1000, help="test images that are attacked and certified")
    parser.add_argument("--commanded", type=int, default=16, help="how many of them by lipcert certify as well")
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    train, test = args.data / "train.tar", args.data / "test.tar"
    name, arguments = NETWORKS[args.network]
    epochs = [str(number) for number in args.epochs]
    steps = Steps(args.work)

    muon = ["--optimizer", "muon", "--batch-size", "128", "--data", train]
    fresh = ["--no-pretrained", "--model-args", f"{arguments} {COMMON}"]
    steps("trained", "finetune", name, *fresh, *muon, "--loss", "ce", "--eps", "36/255", "--epochs", epochs[0],
          "--lr", "0.005")  # fmt: skip
    steps("converted", "convert", steps.last, "--attention", "keep", "--norm", "smooth", "--data", train)
    steps("constrained", "constrain", steps.last, "--data", train, "--limit", "1000", "--error", "0.02")
    norms = [part for norm in NORMS for part in ("--max-norm", norm)]
    steps("finetuned", "finetune", steps.last, *muon, *norms, "--eps", "0.2", "--epochs", epochs[1], "--lr", "0.01",
          "--temperature", "0.2,0.02")  # fmt: skip
    started = time.time()
    summary = certified_accuracy.measure(str(steps.last), str(test), args.images, args.work / "verdicts.jsonl")
    steps.note("certified_accuracy", started)
    agreement = steps.agreement(test, min(args.commanded, args.images))

    models = {path.stem: lipcert.load(path) for path in steps.made}
    row = {**summary, "gflops_an_image": flops(models["finetuned"]) / 1e9, "minutes": sum(steps.minutes().values())}
    result: dict[str, Any] = {
        "arguments": {key: value for key, value in vars(args).items() if key not in ("data", "work")},
        "eps": EPS,
        "row": row,
        "paper": {**PAPER, "note": "not comparable: its bound leaves out operations and is none"},
        "clean_all_test_images": {step: clean(model, open_images(test, model)) for step, model in models.items()},
        "log10_bound": {step: lipcert.lipschitz(model).log10 for step, model in models.items()},
        "certify_command": agreement,
        "minutes": steps.minutes(),
        "commands": steps.commands(),
        "environment": environment(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print("model        clean    PGD  certified  log10 bound  GFLOPs  minutes")
    print(
        f"lipcert     {row['clean']:6.1%} {row['pgd']:6.1%}  {row['certified']['36/255']:9.1%}  "
        f"{result['log10_bound']['finetuned']:11.2f}  {row['gflops_an_image']:6.3f}  {row['minutes']:7.1f}"
        f"   ({row['images']} images; {args.network})"
    )
    print(
        f"the paper's {PAPER['clean']:6.1%} {PAPER['pgd']:6.1%}  {PAPER['certified']:9.1%}"
        "   (not comparable: its bound is none)"
    )


class Steps:
    """Commands one after the other, each of which leaves a model in the work folder.

    Attributes:
        work: the folder; ``steps.json`` there keeps the commands and how long they took.
        made: the models, in order.
    """

    def __init__(self, work: Path):
        self.work = work
        self.made: list[Path] = []
        self.notes = work / "steps.json"

    @property
    def last(self) -> Path:
        return self.made[-1]

    def __call__(self, step: str, *arguments: str | Path) -> None:
        path = self.work / f"{step}.safetensors"
        if not path.exists():
            self.timed(step, *arguments, "--out", path)
        self.made.append(path)

    def timed(self, step: str, *arguments: str | Path) -> None:
        """Runs a command and notes what it was and how long it took."""
        started, cpu = time.time(), cpu_seconds()
        self.note(step, started, self.run(*arguments), cpu)

    def run(self, *arguments: str | Path) -> str:
        typed = ["lipcert", *map(str, arguments)]
        print(shlex.join(typed), flush=True)
        subprocess.run([sys.executable, "-m", *typed], check=True)
        return shlex.join(arg.rpartition("/")[2] if Path(arg).exists() else arg for arg in typed)

    def note(self, step: str, started: float, command: str | None = None, cpu: float | None = None) -> None:
        """Adds what has passed since ``started``, and since ``cpu`` on the processor, to the minutes of a step."""
        known = json.loads(self.notes.read_text()) if self.notes.exists() else {}
        before = known.get(step, {})
        note = {"minutes": before.get("minutes", 0.0) + (time.time() - started) / 60, "command": command}
        if cpu is not None:
            note["cpu_minutes"] = before.get("cpu_minutes", 0.0) + (cpu_seconds() - cpu) / 60
        self.notes.write_text(json.dumps({**known, step: note}))

    def minutes(self, kind: str = "minutes") -> dict[str, float]:
        return {step: note[kind] for step, note in json.loads(self.notes.read_text()).items() if kind in note}

    def commands(self) -> list[str]:
        return [note["command"] for note in json.loads(self.notes.read_text()).values() if note["command"]]

    def agreement(self, test: Path, count: int) -> dict[str, Any]:
        """What ``lipcert certify`` says of the first images, beside the verdicts."""
        rows = self.work / "certified.jsonl"
        wanted = ("--data", test, "--limit", str(count), "--method", "anchored", "--eps", "36/255", "--out", rows)
        self.timed("certify", "certify", self.last, *wanted)
        said = [json.loads(line) for line in rows.read_text().splitlines()]
        known = certified_accuracy.known_rows(self.work / "verdicts.jsonl")
        agree = sum((known[row["index"]]["radius"] > EPS) == (row["certified"] and row["correct"]) for row in said)
        certified = sum(row["certified"] and row["correct"] for row in said)
        return {"images": len(said), "certified": certified / len(said), "agreeing": agree}


def cpu_seconds() -> float:
    """Time on a processor of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def flops(model: lipcert.Model) -> int:
    """Of one forward pass on one image; a multiplication and an addition count as two."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.full((1, *model.input_size), 0.5))
    return counter.get_total_flops()


if __name__ == "__main__":
    main()
