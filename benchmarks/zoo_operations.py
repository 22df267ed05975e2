"""Which operations the architectures of timm and lipcert call, and what of lipcert none of them needs.

    python -m benchmarks.zoo_operations [--work build/zoo] [--match 'vit_*,swin_*']

Every architecture is built and captured on the meta device, without weights: which functions of torch it calls on
values that depend on the image and on constants, with which operands, and of which classes its modules are. This does
not depend on the rules, takes about a second each, and is kept in the work folder, so that an interrupted run goes on
where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import timm
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lipcert.networks  # noqa: F401  (adds its architectures to timm's registry)
from lipcert.bounds import RULES, kept_whole
from lipcert.graph import SIGNATURES, Graph, Node, _capture, _forms, canonical, unchecked
from lipcert.numerics import leaves

STRUCTURES = "structures.jsonl"


class _WithoutInitialisation(TorchFunctionMode):
    """Leaves out what writes numbers into tensors that hold none."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            return args[0] if args else (kwargs or {})["tensor"]
        return function(*args, **(kwargs or {}))


def build(name: str) -> nn.Module:
    """The architecture on the meta device: shapes and no numbers."""
    with torch.device("meta"), _WithoutInitialisation():
        return timm.create_model(name).eval()


def form(net: nn.Module) -> str:
    """What decides which operations a network uses: its modules' classes, and their settings without sizes.

    Two architectures of one family with the same form differ in width, depth and resolution alone.
    """

    def rough(value: Any) -> Any:
        if isinstance(value, (bool, str, type(None))):
            return value
        if isinstance(value, (int, float)):
            return min(float(value), 2.0) if value in (0, 1) else "n"
        short = isinstance(value, (tuple, list)) and len(value) <= 4
        return tuple(map(rough, value)) if short else type(value).__name__

    def settings(module: nn.Module) -> list[Any]:
        own = [(key, rough(value)) for key, value in sorted(vars(module).items()) if not key.startswith("_")]
        parts = [(key, type(part).__name__) for key, part in sorted(module._modules.items()) if not key.isdigit()]
        parameters = [(key, part is None) for key, part in sorted(module._parameters.items())]
        return [_class(module), own, parts, parameters]

    found = sorted({repr(settings(module)) for module in net.modules()})
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def _class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def structure(net: nn.Module, whole: Callable[[nn.Module], bool] = kept_whole) -> Graph:
    """The operations of a model on the meta device, which has shapes but no values; never for bounds."""
    size: Any = net.default_cfg
    with torch.device("meta"):
        return unchecked(net, torch.empty(1, *size["input_size"]), whole)


class _Calls(TorchFunctionMode):
    """The functions that are called on values that depend on the image (``tracked``), and on constants alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tracked: set[str] = set()
        self.constants: set[str] = set()
        self._inside = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {type(leaf) for leaf in leaves((args, kwargs or {}))}
        if not self._inside and given & {Tensor, nn.Parameter} and _capture.Tracked not in given:
            self.constants.add(self._name(function))
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _name(function: Any) -> str:
        op, bare = canonical(function), getattr(function, "__name__", str(function)).strip("_")
        return str(bare if not isinstance(op, str) or op == bare else f"{bare} ({op})")

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside the block, captures add the functions that the network itself calls, not those of their parts."""
        original = _capture._Recorder.call

        def call(recorder: Any, function: Any, args: Any, kwargs: Any) -> Any:
            outermost, self._inside = not self._inside, True
            if outermost:
                self.tracked.add(self._name(function))
            try:
                return original(recorder, function, args, kwargs)
            finally:
                self._inside = not outermost

        with mock.patch.object(_capture._Recorder, "call", call), self:
            yield


def describe(name: str, known: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """One architecture: its size, its operations with their operands, and the classes of its modules.

    Args:
        name: of the architecture.
        known: rows by family and form, of which those of the same form are not captured again.
    """
    net = build(name)
    row: dict[str, Any] = {
        "name": name,
        "family": timm.models.model_entrypoint(name).__module__.rpartition(".")[2],
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "classes": sorted({_class(module) for module in net.modules()}),
    }
    row["form"] = form(net)
    if (row["family"], row["form"]) in known:
        same = known[row["family"], row["form"]]
        return {**row, **{key: same[key] for key in ("logits", "operations", "calls", "error") if key in same}}
    calls = _Calls()
    try:
        with calls.recorded():
            graph = structure(net)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    else:
        row["logits"] = len(graph.output.shape) == 2
        row["operations"] = sorted({_signature(node) for node in graph.nodes})
        row["calls"] = [sorted(calls.tracked), sorted(calls.constants)]
    return row


def _signature(node: Node) -> str:
    """An operation with what its operands are: x for values that depend on the image, p for tensors, else literals."""

    def kind(item: Any) -> str:
        if isinstance(item, Node):
            return "x"
        if isinstance(item, Tensor):
            return "p" if item.dtype.is_floating_point else str(item.dtype).removeprefix("torch.")
        if isinstance(item, (tuple, list)):
            kinds = [kind(part) for part in item]
            return f"({','.join(kinds if set(kinds) != {'n'} else ['n'])})"
        if isinstance(item, bool) or item is None or isinstance(item, str):
            return str(item)
        return "n" if isinstance(item, (int, float)) else type(item).__name__

    given = [kind(item) for item in node.args] + [f"{key}={kind(item)}" for key, item in sorted(node.kwargs.items())]
    return f"{node.name}({','.join(given)})"


def describe_all(names: list[str], work: Path) -> dict[str, dict[str, Any]]:
    """Rows for all architectures, from the work folder where it has them."""
    path = work / STRUCTURES
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {}
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of an interrupted run
                row = json.loads(line)
                rows[row["name"]] = row
    with path.open("a") as file:
        for done, name in enumerate(names):
            if name in rows:
                continue
            started = time.perf_counter()
            rows[name] = describe(name, {(row["family"], row["form"]): row for row in rows.values()})
            file.write(json.dumps(rows[name]) + "\n")
            file.flush()
            print(f"{done + 1}/{len(names)} {name} {time.perf_counter() - started:.1f} s", flush=True)
            if done % 20 == 0:
                gc.collect()
    return {name: rows[name] for name in names}


def operations(rows: dict[str, dict[str, Any]]) -> str:
    """A table of what the architectures call, and what of lipcert none of them needs."""
    counts = [Counter(name for row in rows.values() for name in row.get("calls", ((), ()))[i]) for i in (0, 1)]
    recorded = Counter(op for row in rows.values() for op in {s.split("(")[0] for s in row.get("operations", ())})
    lines = [f"{len(rows)} architectures", "", "| function | of the image | of constants |", "| --- | --- | --- |"]
    lines += [f"| {name} | {counts[0][name]} | {counts[1][name]} |" for name in sorted({*counts[0], *counts[1]})]
    called = {word.strip("()") for name in counts[0] for word in name.split()} | {*recorded}
    for what, known in (
        ("rules", [key for key in RULES if isinstance(key, str)]),
        ("compositions", _forms._PARTS),
        ("signatures", SIGNATURES),
    ):
        lines += ["", f"{what} that none needs: {', '.join(sorted(key for key in known if key not in called))}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/zoo"))
    parser.add_argument("--match", default="*", help="architectures, such as 'vit_*,swin_*'; the others are left out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(operations(describe_all(timm.list_models(options.match.split(",")), options.work)))


if __name__ == "__main__":
    main()
