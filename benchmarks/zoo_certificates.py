"""Every method on the smallest architecture of every registry file: one certificate each, and an attack inside.

    python -m benchmarks.zoo_certificates [NAME ...] [--passes 500] [--seconds-each 300] [--gib 8]

Depth and widths are the architecture's own, with 10 classes and at the smallest image it takes. Weights are timm's
initial ones with seed 0, zeros drawn anew as in ``benchmarks.zoo``. All is in float64, on one random image. A row has

- ``log10``: of the global bound, and ``attained_log10``: of the largest Jacobian norm met by ascent;
- ``methods``: for each method ``radius``, ``rigor``, or ``error``; CPU ``seconds``; how many ``norms`` of Jacobians,
  and for how many others ``products`` of norms did, as ``--passes`` counts;
- ``out_of_time``: the limit in CPU seconds, if it came before all was done, and then the last method has no radius;
- ``attack``: nearest change of class that projected gradient ascent found, and its ratio to the largest radius of any
  method; ``inside``: ascent with restarts within the anchored radius;
- ``gib``: the limit of memory (rows from before it was kept have none);
- ``broken``: what is false: an attack inside a radius, or a slope above the global bound. It must be empty.

Random weights have radii down to 1e-300 by global constants. Such a row shows that a method runs and gives a number
above 0, and nothing about its truth: perturbations below 1e-16 of a pixel are lost in float64. Rows say so by
``resolved`` false. The anchored radii, and the nearest change, are where an attack means something.

Each architecture runs in a process of its own with a limit on CPU time and memory; what it had found by then is kept.
Rows are written one by one, and a run goes on with what is missing or ran out of less time than there is now.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lipcert
from benchmarks.zoo import attained, family, names_of, open_branches, rows_of, write
from lipcert.attacks import PGD, smallest
from lipcert.bounds import margins, radii
from lipcert.certifier import METHODS, Anchored, Certifier, Local, LoFAST, MarginBounds
from lipcert.errors import LipcertError
from lipcert.inputs.zoo import architectures

RESULTS = Path(__file__).parent / "results" / "zoo_certificates.json"
SIZES = (32, 64, 96, 128, 160, 192, 224, 256)
CLASSES = 10
DELTA = 1e-9
RESOLVED = 1e-13
STEPS = 12

Stage = Callable[[Tensor, Tensor, Tensor], Tensor]
Prepare = Callable[[], tuple[Stage, float, int, int]]


def load(name: str) -> lipcert.Model:
    """The architecture at the smallest size that it takes, in float64."""
    sizes: list[dict[str, Any]] = [given for n in SIZES for given in ({"img_size": n}, {"input_size": (3, n, n)})]
    for arguments in (*sizes, {}):
        torch.manual_seed(0)
        try:
            model = lipcert.load(name, pretrained=False, num_classes=CLASSES, **arguments)
        except LipcertError:
            if not arguments:
                raise
            continue
        open_branches(model)
        break
    return model.double()


def stages(certifier: Certifier, passes: float) -> dict[str, Prepare]:
    """How each method is made ready, from one analysis; with its δ, and how many norms of Jacobians and products."""
    model, analysis = certifier.model, certifier.analysis

    def of_the_bound(rows: bool) -> tuple[Stage, float, int, int]:
        bounds = MarginBounds(analysis, rows)
        return lambda images, predicted, gaps: radii(gaps, bounds.of(predicted)), 0.0, 0, 0

    def local() -> tuple[Stage, float, int, int]:
        made = Local(model, analysis=analysis, delta=DELTA)
        return made.radius, made.delta, 0, 0

    def linearised(method: type[Anchored] | type[LoFAST]) -> tuple[Stage, float, int, int]:
        made = method(model, delta=DELTA, passes=passes)
        run: Stage = lambda images, predicted, gaps: made(images).radius(predicted, gaps)  # noqa: E731
        return run, DELTA, made.count, len(made.plan.chained)

    return {
        "global": lambda: of_the_bound(rows=False),
        "gloro": lambda: of_the_bound(rows=True),
        "local": local,
        "lofast": lambda: linearised(LoFAST),
        "anchored": lambda: linearised(Anchored),
    }


def measure(name: str, passes: float, tell: Callable[[dict[str, Any]], None]) -> None:
    """One row; ``tell`` is given all that is known after each step."""
    model = load(name)
    image = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0)).double()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    claimed = architectures()[name].certificates
    row: dict[str, Any] = {"parameters": parameters, "input_size": model.input_size, "claimed": claimed}
    row |= {"passes": passes, "broken": []}
    tell(row)
    started = time.process_time()
    certifier = Certifier(model, 1e-3, "gloro")
    model = certifier.model
    row["log10"] = certifier.analysis.output.lip.log10
    row["bound_seconds"] = round(time.process_time() - started, 2)
    low = attained(model)
    row["attained_log10"] = low if math.isfinite(low) else None
    if low > row["log10"]:
        row["broken"].append("a slope above the global bound")
    tell(row)
    with torch.no_grad():
        predicted, gaps = margins(model(image))
    row["margin"] = gaps.amin().item()
    row["attack"] = nearest(model, image, predicted)
    tell(row)
    row["methods"] = {}
    for method, prepare in stages(certifier, passes).items():
        started = time.process_time()
        entry: dict[str, Any] = {}
        row["methods"][method] = entry
        try:
            with torch.no_grad():
                stage, delta, entry["norms"], entry["products"] = prepare()
                tell(row)
                radius = stage(image, predicted, gaps).item()
        except (LipcertError, RuntimeError, MemoryError) as error:
            entry["error"] = str(error).splitlines()[0]
        else:
            rigor = f"probabilistic({delta:g})" if delta else "deterministic"
            entry |= {"radius": radius, "rigor": rigor, "resolved": radius > RESOLVED}
            if row["attack"] is not None and row["attack"] < radius:
                row["broken"].append(f"{method}: an attack at {row['attack']:g} inside {radius:g}")
        entry["seconds"] = round(time.process_time() - started, 2)
        tell(row)
    radius = row["methods"]["anchored"].get("radius", 0.0)
    if radius > 0:
        row["inside"] = PGD(STEPS)(model, image, predicted, radius).broken.item()
        if row["inside"]:
            row["broken"].append("anchored: projected gradient ascent")
    largest = max(entry.get("radius", 0.0) for entry in row["methods"].values())
    row["ratio"] = row["attack"] / largest if row["attack"] is not None and largest > 0 else None
    row["done"] = True
    tell(row)


def nearest(model: lipcert.Model, image: Tensor, predicted: Tensor) -> float | None:
    """Distance of the nearest change of class that is found, starting from where the slopes promise one."""
    point = image.clone().requires_grad_()
    with torch.enable_grad():
        logits = model(point)[0]
        gaps = logits[predicted] - logits
        slopes = [torch.autograd.grad(gap, point, retain_graph=True)[0].norm() for gap in gaps]
    promised = [(gap / slope).item() for gap, slope in zip(gaps, slopes, strict=True) if gap > 0 and slope > 0]
    if not promised:
        return None
    eps = min(2 * min(promised), math.sqrt(image.numel()))
    ascent = PGD(STEPS, restarts=1)
    found = smallest(ascent, model, image, predicted, ascent(model, image, predicted, eps), eps, rounds=5)
    return found.distance.item() if found.broken.item() else None


def apart(name: str, passes: float, seconds: int, gib: float) -> dict[str, Any]:
    """One row, from a process with limits."""
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(name, passes, seconds, gib, send))
    process.start()
    send.close()
    row: dict[str, Any] = {}
    while True:
        try:
            row |= receive.recv()
        except EOFError:
            break
    process.join()
    if process.exitcode == -signal.SIGXCPU:
        row["out_of_time"] = seconds
    elif not row.pop("done", False):
        row["error"] = f"ended with {process.exitcode}"
    return {"name": name, "file": family(name), "gib": gib, **_as_json(row)}


def _as_json(value: Any) -> Any:
    """Numbers that JSON does not have as words."""
    if isinstance(value, dict):
        return {key: _as_json(one) for key, one in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _child(name: str, passes: float, seconds: int, gib: float, send: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30),) * 2)
    try:
        measure(name, passes, send.send)
    except Exception as error:
        send.send({"error": f"{type(error).__name__}: {error}", "done": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures to measure anew; by default all that are missing")
    parser.add_argument("--passes", type=float, default=500, help="spend so many on norms of Jacobians, a method")
    parser.add_argument("--seconds-each", type=int, default=300, help="CPU seconds for one architecture")
    parser.add_argument("--gib", type=float, default=8, help="memory for one architecture")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further architecture after so long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = rows_of(arguments.out)
    started = time.perf_counter()
    for name in arguments.names or names_of("smallest"):
        given = rows.get(name, {"out_of_time": 0}).get("out_of_time", math.inf)
        if time.perf_counter() - started > arguments.seconds:
            break
        if arguments.names or given < arguments.seconds_each:
            rows[name] = apart(name, arguments.passes, arguments.seconds_each, arguments.gib)
            print(json.dumps(rows[name]), flush=True)
            write(arguments.out, list(rows.values()))
    single = METHODS[1:]
    done = [row for row in rows.values() if all("radius" in row.get("methods", {}).get(name, {}) for name in single)]
    seconds = [row["methods"]["anchored"]["seconds"] for row in done] or [0]
    print(
        f"{len(done)} of {len(rows)} rows with a radius by every method; anchored took {min(seconds)} to "
        f"{max(seconds)} CPU seconds; {sum(len(row['broken']) for row in rows.values())} broken"
    )


if __name__ == "__main__":
    main()
