"""The checks of a network's code on every architecture of timm: none may refuse one that is what it seems.

    python -m benchmarks.second_look --rows second_look.jsonl [--largest 400] [--shorten 50] [--seconds 3000]

Each architecture is built with random weights and ten classes, at 64 pixels where it can be, and goes through what a
certifier checks before it asks any rule: the capture, the second look on real tensors, images in batches, unused
operations, and the comparison of types. Bounds are not computed. With ``--shorten``, larger architectures are built
with fewer blocks where timm has an argument for that: the code is the same, and their rows say so. The rows go on after
those that are in the file, smallest architectures first, and are summed up in benchmarks/results/second_look.json.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import time
from pathlib import Path
from typing import Any
from unittest import mock

import timm
import torch

import lipcert
from benchmarks._env import environment
from lipcert.bounds import _global, analyze
from lipcert.certifier._certifier import _check_types
from lipcert.errors import LipcertError
from lipcert.inputs import zoo

_SIZES = (64, 96, 128, 192, None)
_FEWER: tuple[dict[str, Any], ...] = (
    {"depth": 2}, {"depths": (1, 1, 2, 1)}, {"depths": (1, 1, 1)}, {"depths": (1, 1, 1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
)  # fmt: skip


def fewer_blocks(name: str, whole: float) -> dict[str, Any]:
    """Arguments of timm with which an architecture has fewer parameters than ``whole``; none if there are none."""
    for arguments in _FEWER:
        try:
            with torch.device("meta"):
                model = timm.create_model(name, **arguments)
        except Exception:  # timm's own, of many kinds
            continue
        if sum(p.numel() for p in model.parameters()) < whole:
            return arguments
    return {}


def _built(name: str, fewer: dict[str, Any]) -> tuple[lipcert.Model, int]:
    """The architecture at the smallest image that it takes, and how many pixels wide that is."""
    for size in _SIZES:
        for arguments in ({"img_size": size}, {}) if size else ({},):
            given: dict[str, Any] = {**fewer, **({"input_size": (3, size, size), **arguments} if size else {})}
            try:
                model = lipcert.load(name, pretrained=False, num_classes=10, **given)
                with torch.no_grad():
                    model(torch.rand(1, *model.input_size))
            except LipcertError:
                if size is None:
                    raise
            except Exception:  # timm's own, of many kinds, for sizes that an architecture does not take
                if size is None:
                    raise
            else:
                return model, model.input_size[-1]
    raise AssertionError(name)


def look(name: str, fewer: dict[str, Any]) -> dict[str, Any]:
    """What the checks say of an architecture, built with these arguments of timm.

    Returns:
        ``name``, ``size`` in pixels, the arguments as ``fewer`` if there are any, CPU seconds of one ``forward`` pass
        and of the checks (``seconds``), and ``refused``: why, or None.
    """
    torch.manual_seed(0)
    model, size = _built(name, fewer)
    row: dict[str, Any] = {"name": name, "size": size, **({"fewer": fewer} if fewer else {})}
    started = time.process_time()
    with torch.no_grad():
        model(torch.rand(1, *model.input_size))
    row["forward"] = round(time.process_time() - started, 4)
    started = time.process_time()
    try:
        copied = copy.deepcopy(model).requires_grad_(False)
        copied.real = True
        copied = copied.double()
        with mock.patch.object(_global, "global_values", return_value={}):
            analyze(copied)
        _check_types(model, copied, None)
        row["refused"] = None
    except LipcertError as error:
        row["refused"] = str(error)
    row["seconds"] = round(time.process_time() - started, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=Path("second_look.jsonl"))
    parser.add_argument(
        "--largest", type=float, default=math.inf, help="millions of parameters; larger ones are left out"
    )
    parser.add_argument(
        "--shorten", type=float, default=math.inf, help="millions of parameters; larger ones get fewer blocks"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="CPU seconds of this chunk")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows.exists() else []
    done = {row["name"] for row in rows}
    sizes = {name: each.parameters for name, each in zoo.architectures().items()}
    left = sorted((n for n in timm.list_models() if n not in done), key=lambda n: sizes.get(n, math.inf))
    large = {name: size for name in left if (size := sizes.get(name, math.inf)) > args.shorten * 1e6}
    fewer = {name: fewer_blocks(name, size) for name, size in large.items()}
    with args.rows.open("a") as file:
        for name in sorted(left, key=lambda n: not fewer.get(n)):
            if time.process_time() > args.seconds:
                break
            if not fewer.get(name) and sizes.get(name, 0) > args.largest * 1e6:
                continue
            try:
                row = look(name, fewer.get(name, {}))
            except Exception as error:
                row = {"name": name, "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if row.get("refused") or "error" in row:
                print(name, row.get("refused") or row["error"], flush=True)
            gc.collect()
    passed = [row for row in rows if "seconds" in row and row["refused"] is None]
    summary = {
        "architectures": len(timm.list_models()),
        "tried": len(rows),
        "passed": len(passed),
        "with fewer blocks": sum("fewer" in row for row in passed),
        "refused": {row["name"]: row["refused"] for row in rows if row.get("refused")},
        "errors": {row["name"]: row["error"] for row in rows if "error" in row},
        "seconds": round(sum(row["seconds"] for row in passed), 1),
        "environment": environment(),
    }
    path = Path(__file__).parent / "results" / "second_look.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{summary['tried']} of {summary['architectures']} tried, {summary['passed']} passed")


if __name__ == "__main__":
    main()
