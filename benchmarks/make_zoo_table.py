"""What lipcert covers of timm's zoo: writes the table of ``lipcert models``.

    python -m benchmarks.make_zoo_table [--work build/zoo] [--resume]
    python -m benchmarks.make_zoo_table --match 'liresnet_*,lip_convnet_*' --keep
    python -m benchmarks.make_zoo_table --operations

First every architecture is built and captured on the meta device, without weights: which operations it uses, with
which operands, and of which classes its modules are. This does not depend on the rules, takes about a second each, and
is kept in the work folder, so that an interrupted run goes on where it stopped.

Then the rules are asked, once for each distinct structure, on its smallest architecture. Weights are stand-ins: one
number, repeated without memory. A rule that knows no answer for an operation, or has no finite constant for it, shows
this for any weights; how large a constant is depends on them, and is not looked at.

``--operations`` lists instead, from the captures, how many architectures call each function of torch, on values that
depend on the image and on constants, and the rules and entries that no architecture needs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import hashlib
import json
import math
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
from lipcert.bounds import RULES, NoAnswer, Value, _global, kept_whole, remainder_of
from lipcert.bounds.rules import linear
from lipcert.errors import UnsupportedOperation
from lipcert.graph import SIGNATURES, Graph, Node, _capture, _composed, canonical, explicit_attention, needed, outline
from lipcert.inputs.zoo import TABLE
from lipcert.norms import Operator
from lipcert.numerics import Upper, leaves
from lipcert.surgery._swap import plan

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
    """The operations of a model without weights."""
    size: Any = net.default_cfg
    return outline(net, size["input_size"], whole)


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


class _StandIns:
    """Replaces tensors without numbers by real ones that hold one number and take no memory."""

    def __call__(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self.tensor(item)
        if isinstance(item, nn.Module):
            return self.module(item)
        if isinstance(item, (tuple, list)):
            mapped = [self(part) for part in item]
            if isinstance(item, list):
                return mapped
            return type(item)(*mapped) if hasattr(item, "_fields") else tuple(mapped)
        if isinstance(item, dict):
            return {key: self(part) for key, part in item.items()}
        return torch.device("cpu") if isinstance(item, torch.device) else item

    def tensor(self, item: Tensor) -> Tensor:
        if item.device.type != "meta":
            return item
        number: Any = 0.01 if item.dtype.is_floating_point else item.dtype == torch.bool
        return torch.full((), number, dtype=item.dtype).expand(item.shape)

    def module(self, item: nn.Module) -> nn.Module:
        twin = copy.deepcopy(item)
        for part in twin.modules():
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[key] = nn.Parameter(self.tensor(parameter), requires_grad=False)
            for key, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[key] = self.tensor(buffer)
        return twin


def answers(name: str) -> dict[str, Any]:
    """What the rules say to one architecture, and what surgery does to it.

    Returns:
        ``reason``: why there is no finite global bound, or ""; ``anchored_reason``: why the certificates that linearise
        do not work, or ""; ``swapped``, ``kept``, ``norms``: what becomes of the classes of attention and norms.
    """
    net = build(name)
    edits, kept = plan(net, attention="l2", norm="smooth")
    pairs = {(edit.was.__name__, type(edit.new).__name__) for edit in edits if edit.new is not None}
    attention = sorted(pair for pair in pairs if pair[1].startswith("L2"))
    row: dict[str, Any] = {
        "swapped": attention,
        "norms": sorted(pair for pair in pairs if pair not in attention),
        "kept": sorted({(module.was, module.reason) for module in kept}),
    }
    graph = structure(net)
    row["anchored_reason"] = _remainder_reason(explicit_attention(structure(net, lambda module: False)))
    row["reason"] = _global_reason(needed(graph))
    return row


def _global_reason(graph: Graph) -> str:
    stand_ins = _StandIns()
    for node in graph.nodes:
        node.args, node.kwargs = stand_ins(node.args), stand_ins(node.kwargs)
        if isinstance(node.function, nn.Module):
            node.function = stand_ins(node.function)
    with _without_arithmetic():
        try:
            values = _global.global_values(graph)
        except UnsupportedOperation as error:
            return _listed(error.operations)
    if values[graph.output].lip.finite:
        return ""
    for node in graph.nodes:  # the first that makes something infinite of what is finite
        value = values[node]
        before = [values[operand] for operand in node.operands if isinstance(values[operand], Value)]
        if isinstance(value, Value) and not value.lip.finite and all(operand.lip.finite for operand in before):
            return f"{node.name} at {_place(node.path)} has no finite constant"
    return "no finite constant"


def _remainder_reason(graph: Graph) -> str:
    missing = []
    for node in needed(graph).nodes:
        try:
            if node is not graph.input:
                remainder_of(node)
        except NoAnswer as reason:
            missing.append((f"{node.name} ({reason})" if str(reason) != "no remainder rule" else node.name, node.path))
    return _listed(missing)


def _listed(missing: Any) -> str:
    """Operations, each with the first place where it is; empty if there are none."""
    first: dict[str, str] = {}
    for operation, path in missing:
        first.setdefault(operation, _place(path))
    return "; ".join(f"{operation} at {place}" for operation, place in sorted(first.items()))


def _place(path: str) -> str:
    """A module path without the numbers of blocks, which differ from architecture to architecture."""
    return ".".join("*" if part.isdigit() else part for part in path.split(".")) or "(model)"


def _without_arithmetic() -> contextlib.ExitStack:
    """Gives every linear map norm 1, and leaves out what else would read all of a matrix that stands for another."""
    one = property(lambda map: Upper(1))
    stack = contextlib.ExitStack()
    for target, name, cheap in (
        (Operator, "norm", one),
        (linear, "largest_row_sum", lambda weight: Upper(1)),
        (linear, "largest_row_norm", lambda weight: Upper(1)),
        (linear, "constant_part", lambda weight, offset, error: (torch.zeros(len(weight)).double(), error)),
    ):
        stack.enter_context(mock.patch.object(target, name, cheap))
    return stack


def answer_all(rows: dict[str, dict[str, Any]], work: Path, resume: bool, limit: float) -> dict[str, dict[str, Any]]:
    """Answers for the smallest architecture of every structure, under the key of :func:`structure_of`."""
    path, begun = work / "answers.jsonl", time.perf_counter()
    found: dict[str, dict[str, Any]] = {}
    if resume and path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if row.get("reason") == row.get("anchored_reason") == "":
                    found[row["structure"]] = row
    smallest: dict[str, dict[str, Any]] = {}
    for row in sorted(rows.values(), key=lambda row: (row["parameters"], row["name"])):
        smallest.setdefault(structure_of(row), row)
    count = Counter(map(structure_of, rows.values()))
    smallest = dict(sorted(smallest.items(), key=lambda item: -count[item[0]]))  # what most share comes first
    with path.open("w") as file:
        for row in found.values():
            file.write(json.dumps(row) + "\n")
        for done, (key, row) in enumerate(smallest.items()):
            if key in found:
                continue
            started = time.perf_counter()
            try:
                answer = answers(row["name"])
            except Exception as error:
                first = str(error).splitlines()[0] if str(error) else ""
                answer = {"error": f"{type(error).__name__}: {first}"}
            found[key] = {"structure": key, "name": row["name"], **answer}
            file.write(json.dumps(found[key]) + "\n")
            file.flush()
            print(f"{done + 1}/{len(smallest)} {row['name']} {time.perf_counter() - started:.1f} s", flush=True)
            if time.perf_counter() - begun > limit:
                break
    return found


def structure_of(row: dict[str, Any]) -> str:
    """What two architectures share if the rules say the same to both: operations with operands, and classes."""
    text = json.dumps([row["operations"], row["classes"]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def table(rows: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The shipped table: texts once, rows that point to them."""
    texts: dict[str, int] = {}

    def text(item: Any) -> int:
        return texts.setdefault(item, len(texts))

    lines = []
    for name in sorted(rows):
        row, answer = rows[name], found.get(structure_of(rows[name]), {"error": "not asked"})
        if "error" in answer:
            print(f"no answer for {name}: {answer['error']}")
            continue
        reason, anchored = answer["reason"], answer["anchored_reason"]
        lines.append(
            [
                name,
                text(row["family"]),
                row["parameters"],
                int(row["logits"]),
                text(reason),
                text(anchored),
                [[text(was), text(now)] for was, now in answer["swapped"]],
                [[text(was), text(now)] for was, now in answer["norms"]],
                [[text(was), text(why)] for was, why in answer["kept"]],
            ]
        )
    return {"timm": timm.__version__, "texts": list(texts), "rows": lines}


def with_others(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """A table with the rows of another one for the architectures that it does not have; those keep their texts."""
    other = json.loads(path.read_text())
    texts = {item: i for i, item in enumerate(other["texts"])}

    def again(index: int) -> int:
        return texts.setdefault(content["texts"][index], len(texts))

    rows = {row[0]: row for row in other["rows"]}
    for name, family, size, logits, *reasons, attention, norms, kept in content["rows"]:
        pairs = [[[again(a), again(b)] for a, b in found] for found in (attention, norms, kept)]
        rows[name] = [name, again(family), size, logits, *map(again, reasons), *pairs]
    return {**content, "texts": list(texts), "rows": [rows[name] for name in sorted(rows)]}


def write(content: dict[str, Any], path: Path) -> None:
    """JSON with a line for each architecture, so that a change shows as one."""
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in content["rows"])
    texts = ",\n".join(json.dumps(item, ensure_ascii=False) for item in content["texts"])
    path.write_text(f'{{"timm": "{content["timm"]}",\n"texts": [\n{texts}\n],\n"rows": [\n{rows}\n]}}\n')


def operations(rows: dict[str, dict[str, Any]]) -> str:
    """A table of what the architectures call, and what of lipcert none of them needs."""
    counts = [Counter(name for row in rows.values() for name in row.get("calls", ((), ()))[i]) for i in (0, 1)]
    recorded = Counter(op for row in rows.values() for op in {s.split("(")[0] for s in row.get("operations", ())})
    lines = [f"{len(rows)} architectures", "", "| function | of the image | of constants |", "| --- | --- | --- |"]
    lines += [f"| {name} | {counts[0][name]} | {counts[1][name]} |" for name in sorted({*counts[0], *counts[1]})]
    called = {word.strip("()") for name in counts[0] for word in name.split()} | {*recorded}
    for what, known in (
        ("rules", [key for key in RULES if isinstance(key, str)]),
        ("compositions", _composed._PARTS),
        ("signatures", SIGNATURES),
    ):
        lines += ["", f"{what} that none needs: {', '.join(sorted(key for key in known if key not in called))}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/zoo"))
    parser.add_argument("--match", default="*", help="architectures, such as 'vit_*,swin_*'; the others are left out")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the others in the table that is there")
    parser.add_argument("--resume", action="store_true", help="ask again only where an answer was missing")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds, after which the rest is left unasked")
    parser.add_argument("--operations", action="store_true", help="print which operations the architectures call")
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = describe_all(timm.list_models(options.match.split(",")), options.work)
    if options.operations:
        print(operations(rows))
        return
    content = table(rows, answer_all(rows, options.work, options.resume, options.limit))
    write(with_others(content, options.out) if options.keep else content, options.out)


if __name__ == "__main__":
    main()
