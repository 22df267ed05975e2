"""Global bounds over timm's zoo: how large, or which operation prevents one and why.

    python -m benchmarks.zoo [--set smallest|signatures|all] [--most 100] [--seconds 600]

``smallest`` is the smallest architecture of every registry file, ``signatures`` one architecture for every distinct set
of operations (both in ``zoo_sets.json``). Weights are timm's initial ones with seed 0, but parameters that start at
zero are drawn from N(0, 0.02²): a branch that is multiplied by zero would hide what is in it. Architectures without a
classifier get one of 1000 classes.

``converted_log10`` is the bound after ``lipcert.convert(model, attention="l2", norm="smooth")`` on four random images.

Every architecture also has its largest Jacobian norm met: ``attained`` is the largest ‖Jᵀu‖ over unit vectors u and a
few images, by alternating u = Jv (a difference quotient) and v = Jᵀu, in float32. It must not exceed the bound.

Rows are written one by one, and a run goes on with what is missing in them; ``--again`` measures everything anew.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import lipcert
from benchmarks._env import environment
from lipcert.bounds import NoAnswer, analyze, kept_whole, remainder_of
from lipcert.errors import LipcertError, UnsupportedOperation
from lipcert.graph import Node, capture, explicit_attention, needed
from lipcert.graph._graph import run

SETS = Path(__file__).parent / "zoo_sets.json"
RESULTS = Path(__file__).parent / "results" / "zoo.json"


def names_of(which: str) -> list[str]:
    """The architectures of a set, in a fixed order."""
    known = json.loads(SETS.read_text())
    return known[which] if which in known else timm.list_models()


def family(name: str) -> str:
    """The file of timm's registry that an architecture is defined in."""
    return timm.models.model_entrypoint(name).__module__.rpartition(".")[2]


@torch.no_grad()
def open_branches(model: nn.Module) -> None:
    """Draws parameters that start at zero, so that no branch is multiplied by zero."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.numel() and not parameter.any():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def load(name: str) -> lipcert.Model:
    """The architecture with reproducible weights."""
    torch.manual_seed(0)
    headless = timm.get_pretrained_cfg_value(name, "num_classes") == 0
    arguments: dict[str, Any] = {"num_classes": 1000} if headless else {}
    model = lipcert.load(name, pretrained=False, **arguments)
    open_branches(model)
    return model


def bound(model: lipcert.Model) -> dict[str, Any]:
    """log10 of the global bound, or the operations that prevent one."""
    try:
        analysis = analyze(model)
    except UnsupportedOperation as error:
        return {"finite": False, "log10": None, "reason": _listed(error.operations)}
    except LipcertError as error:
        return {"finite": False, "log10": None, "reason": str(error)}
    lip = analysis.output.lip
    obstacles = [(f"{operation} ({reason})", path) for operation, path, reason in analysis.obstacles()]
    return {"finite": lip.finite, "log10": lip.log10 if lip.finite else None, "reason": _listed(obstacles) or None}


def converted(model: lipcert.Model) -> dict[str, Any]:
    """log10 of the global bound after surgery, or why there is none."""
    try:
        lipcert.convert(model, attention="l2", norm="smooth")
    except LipcertError as error:
        return {"converted_log10": None, "converted_reason": str(error)}
    after = bound(model)
    return {"converted_log10": after["log10"], "converted_reason": after["reason"]}


def _listed(operations: Any) -> str:
    places: dict[str, list[str]] = {}
    for operation, path in operations:
        places.setdefault(operation, []).append(path.removeprefix("net.") or "(model)")
    return "; ".join(
        f"{op} at {paths[0]}" + f" and {len(paths) - 1} more" * (len(paths) > 1) for op, paths in places.items()
    )


def anchored(model: lipcert.Model) -> dict[str, Any]:
    """Whether every operation has a remainder rule, as the anchored certificate needs."""
    images = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    missing = []
    try:
        graph = needed(explicit_attention(capture(model, images, whole=lambda module: kept_whole(module, "remainder"))))
        last_read = {operand: node for node in graph.nodes for operand in node.operands}
        values: dict[Node, Any] = {graph.input: images}
        for node in graph.nodes[1:]:
            with torch.no_grad():
                run((node,), values)
            try:
                rule = remainder_of(node)
                if rule is not None:
                    rule(node, [values[operand][None] for operand in node.operands], values[node][None])
            except NoAnswer as reason:
                missing.append((f"{node.name} ({reason})", node.path))
            for operand in node.operands:  # attention matrices of all layers do not fit into memory together
                if last_read[operand] is node:
                    values.pop(operand, None)
    except LipcertError as error:
        return {"anchored": False, "anchored_reason": str(error)}
    return {"anchored": not missing, "anchored_reason": _listed(missing) or None}


def attained(model: lipcert.Model, images: int = 2, steps: int = 3) -> float:
    """log10 of the largest Jacobian norm met, from below."""
    generator = torch.Generator().manual_seed(0)
    best = 0.0
    for _ in range(images):
        image = torch.rand(1, *model.input_size, generator=generator).to(model.dtype)
        direction: Tensor | None = None
        for _ in range(steps):
            point = image.clone().requires_grad_()
            logits = model(point)
            if direction is None:
                direction = torch.randn(logits.shape, generator=generator).to(model.dtype)
            direction = direction / direction.norm().clamp_min(1e-30)
            (pulled,) = torch.autograd.grad((logits * direction).sum(), point)
            norm = pulled.norm().item()
            best = max(best, norm)
            if not 0 < norm < math.inf:
                break
            step = 1e-2 * pulled / norm
            with torch.no_grad():
                direction = model(image + step) - logits
                image = (image + 10 * step).clamp(0, 1)
            if not direction.norm() > 0:
                break
    return math.log10(best) if best > 0 else -math.inf


def measure(name: str) -> dict[str, Any]:
    """One row of the table."""
    started = time.perf_counter()
    row: dict[str, Any] = {"name": name, "file": family(name)}
    try:
        model = load(name)
    except LipcertError as error:
        nothing = {"parameters": None, "finite": False, "log10": None, "reason": str(error)}
        return {**row, **nothing, "anchored": False, "anchored_reason": str(error)}
    row["parameters"] = sum(p.numel() for p in model.parameters())
    row |= bound(model)
    row["seconds"] = round(time.perf_counter() - started, 2)
    row |= anchored(model)
    low = attained(model)
    row["attained_log10"] = low if math.isfinite(low) else None
    return row | converted(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("smallest", "signatures", "all"), default="smallest")
    parser.add_argument("--most", type=float, default=math.inf, help="leave out models of more million parameters")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further model after so long")
    parser.add_argument("--again", action="store_true", help="measure anew what is in the table")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = rows_of(arguments.out)
    started = time.perf_counter()
    for name in names_of(arguments.set):
        row = {} if arguments.again else rows.get(name, {})
        done = row.get("anchored") is not None and "converted_reason" in row
        if done or time.perf_counter() - started > arguments.seconds:
            continue
        if math.isfinite(arguments.most) and size_of(name) > arguments.most * 1e6:
            continue
        if not row:
            row = measure(name)
        elif row.get("anchored") is None:  # bounded before, and its remainder rules not looked at since they changed
            row |= anchored(load(name))
        if "converted_reason" not in row:
            row |= converted(load(name))
        rows[name] = row
        print(json.dumps(rows[name]), flush=True)
        write(arguments.out, list(rows.values()))


def size_of(name: str) -> int:
    """Parameters of an architecture, built without memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in timm.create_model(name).parameters())


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """The rows measured so far, by name; none where there is no file yet."""
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["name"]: row for row in known}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replaces the file at once, so that an interrupted run leaves a whole one."""
    partial = path.with_suffix(".part")
    table = {"timm": timm.__version__, "rows": rows, "environment": environment()}
    partial.write_text(json.dumps(table, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    main()
