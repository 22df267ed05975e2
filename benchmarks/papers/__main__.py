"""The tables and figures of the four papers, run through the package's own commands, beside what the papers report.

    python -m benchmarks.papers --list
    python -m benchmarks.papers --paper certvit --table 1 --scale small --data cifar10=../shared/data/cifar10

``full`` is the paper's setting, ``small`` takes minutes and says what it left out: its figures are no reproduction.
Data sets are those of torchvision by name; ``--data NAME=FOLDER`` names a folder with ``train.tar`` and ``test.tar`` or
with folders of these names. Rows of methods that lipcert does not have are quoted. Tables and environment go to
``benchmarks/results/papers.json``, or to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import lipcert
from benchmarks._env import environment
from benchmarks.papers import measures
from benchmarks.papers.recipes import IMAGES, RECIPES, SCALES, TRAININGS, Row, Scale, Table, values_of
from benchmarks.papers.tables import LISTED, TABLES, find
from lipcert._settings import Method

RESULT = Path(__file__).parent.parent / "results" / "papers.json"
_TRAINING = 3  # a step forward and backward, in passes forward


def table(found: Table, scale: str, folders: dict[str, str], only: str | None = None) -> list[dict[str, Any]]:
    """The rows of a table: what was found here, and the paper's figures."""
    if found.measure is not None:
        rows: list[dict[str, Any]] = getattr(measures, found.measure)(found, scale == "small", folders.get("cifar10"))
        return rows
    lacking: list[dict[str, Any]] = [{"needs": found.needs}] if found.needs else []
    with tempfile.TemporaryDirectory() as work:
        chosen = [one for one in found.rows if only in (None, one.name)]
        return lacking + [row(one, found, SCALES[scale], folders, Path(work)) for one in chosen]


def row(one: Row, of: Table, scale: Scale, folders: dict[str, str], work: Path) -> dict[str, Any]:
    """One line: the commands of its recipe, and what the last model reaches."""
    known: dict[str, Any] = {"name": one.name, "paper": dict(zip(of.columns, one.paper, strict=True))}
    if one.recipe is None or one.model is None:
        return {**known, "here": "quoted: lipcert has no such method or network"}
    recipe, (train, test) = RECIPES[one.recipe], _splits(str(one.data), folders)
    steps = commands(one, scale, train)
    if one.data not in folders and (of.needs or scale.data is not None):
        here = f"needs the data set {one.data}: --data {one.data}=FOLDER" + ("" if of.needs else ", or --scale full")
        return {**known, "here": here, "commands": [shlex.join(["lipcert", *step]) for step in steps]}
    print(one.name, flush=True)
    model, done, seconds = one.model, [], []
    try:
        for number, (command, _, *options) in enumerate(steps):
            out = work / f"{number}.lipcert.safetensors"
            arguments = [command, model, *options]
            done.append(shlex.join(["lipcert", *arguments]).replace(str(work), "WORK"))
            started = time.perf_counter()
            _run([*arguments, "--out", str(out), "--force"])
            seconds.append(time.perf_counter() - started)
            model = str(out)
        results = {name: _certified(model, test, one.eps, name, scale.tested) for name in recipe.methods}
    except subprocess.CalledProcessError as error:
        return {**known, "here": error.stderr.strip().splitlines()[-1], "commands": done}
    return {
        **known, "here": {**_facts(one, model, steps, scale, train), "certified": results},
        "source": sources(one), "commands": done, "seconds of each": seconds,
    }  # fmt: skip


def commands(one: Row, scale: Scale, train: str) -> list[list[str]]:
    """The arguments of each command; the model of all but the first is written MODEL."""
    assert one.recipe is not None
    assert one.model is not None
    recipe, values, made = RECIPES[one.recipe], values_of(one, scale, train), []
    for number, step in enumerate(recipe.steps):
        command, *parts = step.split()
        options = [part.format(**values) for part in parts if part != "{limit}" or scale.images]
        fresh = [] if recipe.pretrained or number else ["--no-pretrained"]
        fresh += [] if number or not one.model_args else ["--model-args", one.model_args]
        made.append([command, "MODEL" if number else one.model, *fresh, *options])
    return made


def sources(one: Row) -> str:
    """Equations and tables that the commands are from."""
    assert one.recipe is not None
    stated = TRAININGS[one.training][str(one.data)].source if one.training else "CertViT, table 10"
    return f"{RECIPES[one.recipe].source}; {stated}"


def _splits(data: str, folders: dict[str, str]) -> tuple[str, str]:
    if data not in folders:
        return f"torch/{data}:train", f"torch/{data}"
    folder = Path(folders[data])
    train, test = (folder / f"{name}.tar" for name in ("train", "test"))
    return (str(train), str(test)) if train.exists() else (str(folder / "train"), str(folder / "test"))


def _run(arguments: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lipcert", *arguments], check=True, capture_output=True, text=True
    )  # fmt: skip
    return done.stdout


def _certified(model: str, data: str, eps: str, method: Method, limit: int) -> dict[str, Any]:
    """Shares of the images: right, right under attack, certified; and the global bound."""
    loaded = lipcert.load(model)
    images = lipcert.data.open_images(data, loaded, limit=limit)
    (batch,) = images.batches(limit)
    assert batch.labels is not None
    result = lipcert.certify(loaded, batch.images, batch.labels, eps=eps, method=method)
    right = result.predicted == batch.labels
    attacked = lipcert.certify(loaded, batch.images[:32], batch.labels[:32], eps=eps, method="global", attack="pgd")
    assert attacked.attacked is not None
    stands = right[:32] & ~attacked.attacked
    return {
        "images": len(right), "clean": float(right.float().mean()),
        "pgd, of 32 images": float(stands.float().mean()),
        "certified": float((right & result.certified).float().mean()),
        "rigor": sorted(set(result.rigor)),
    }  # fmt: skip


def _facts(one: Row, model: str, steps: list[list[str]], scale: Scale, train: str) -> dict[str, Any]:
    loaded = lipcert.load(model)
    weights = [p for p in loaded.net.parameters() if p.dim() > 1]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        loaded(torch.zeros(1, *loaded.input_size, dtype=loaded.dtype))
    epochs = int(str(values_of(one, scale, train)["epochs"])) * sum(step[0] == "finetune" for step in steps)
    return {
        "parameters": sum(p.numel() for p in loaded.net.parameters()),
        "sparsity": sum(int((p == 0).sum()) for p in weights) / sum(p.numel() for p in weights),
        "log10 bound": lipcert.lipschitz(loaded).log10,
        "training flops": _TRAINING * counter.get_total_flops() * epochs * (scale.images or IMAGES[str(one.data)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="say which tables there are, and what they need")
    parser.add_argument("--paper", choices=LISTED)
    parser.add_argument("--table", help="such as 1 or 'figure 4'")
    parser.add_argument("--row", help="only this row")
    parser.add_argument("--scale", choices=tuple(SCALES), default="small")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.list or args.paper is None or args.table is None:
        for each in TABLES:
            print(f"{each.paper:10} {each.number:12} {each.title}" + (f"; needs {each.needs}" if each.needs else ""))
        return
    folders = dict(item.split("=", 1) for item in args.data)
    rows = table(find(args.paper, args.table), args.scale, folders, args.row)
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    known[f"{args.paper}, {args.table}, {args.scale}"] = {"environment": environment(), "rows": rows}
    args.out.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    for each_row in rows:
        print(json.dumps(each_row, ensure_ascii=False))


if __name__ == "__main__":
    main()
