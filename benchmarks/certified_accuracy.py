"""Certified accuracy of a CIFAR-10 network at several ε, beside clean and attacked accuracy on the same images.

    python -m benchmarks.certified_accuracy --model cifar10-vit --data ../shared/data/cifar10/test.tar

Takes all test images, or the first of the fixed shuffle. An image counts as certified if it is classified correctly and
the method certifies it; the first ε is 36/255. No certificate is tried where the image is misclassified, or where the
first-order limit min m/‖∇m‖ is not above 36/255. Projected gradient ascent (100 steps of ε/4) attacks the images that
are classified correctly and not certified at 36/255: no attack changes the others. With ``--autoattack N``, AutoAttack
attacks those of the first N images that are still undecided (pip install 'lipcert[attack]').

Rows are written a batch at a time, and a run goes on with the images that are missing; rows of more than one method or
list of ε are kept apart. The results of a network and the environment go to benchmarks/results/certified_accuracy.json,
which keeps those of others. Where a result on more images is known, only the certified curve and AutoAttack are added.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import lipcert
from benchmarks._cifar import EPS, first_order_limit, labels_of, pgd
from benchmarks._env import environment
from lipcert.attacks import AutoAttack
from lipcert.bounds import margins
from lipcert.certifier import Certifier
from lipcert.inputs.data import Batch, open_images
from lipcert.settings import parse_eps

RESULT = Path(__file__).parent / "results" / "certified_accuracy.json"
BATCH, ATTACKED, AUTOATTACKED = 24, 256, 64  # images in a task
CURVE = "36/255,48/255,60/255,72/255,108/255"

_made: dict[tuple[str, str, str], tuple[lipcert.Model, lipcert.Model, Certifier]] = {}


def verdicts(
    path: str, method: str, eps: str, images: torch.Tensor, labels: torch.Tensor, places: list[int]
) -> list[dict[str, Any]]:
    """What is known of some images; runs in a process of its own."""
    torch.set_num_threads(1)
    if (path, method, eps) not in _made:
        model = lipcert.load(path)
        certifier = Certifier(model, eps, method)
        certifier.run(images[:1])  # what is computed once for a network does not count as the time of an image
        _made[path, method, eps] = model, lipcert.load(path).double(), certifier
    model, exact, certifier = _made[path, method, eps]
    with torch.no_grad():
        predicted, _ = margins(exact(images.double()))
    right = predicted == labels
    rows = [
        {"image": place, "method": method, "eps": eps, "right": bool(r), "survived": None, "limit": None, "radius": 0.0,
         "rigor": None, "seconds": 0.0}
        for place, r in zip(places, right, strict=True)
    ]  # fmt: skip
    chosen = right.nonzero()[:, 0]
    if len(chosen):
        limits = first_order_limit(exact, images[chosen].double(), predicted[chosen])
        for index, limit in zip(chosen.tolist(), limits.tolist(), strict=True):
            rows[index]["limit"] = limit
        chosen = chosen[limits > EPS]
    if len(chosen):
        started = time.process_time()
        result = certifier.run(images[chosen])
        seconds = (time.process_time() - started) / len(chosen)
        for index, radius, rigor in zip(chosen.tolist(), result.radius.tolist(), result.rigor, strict=True):
            rows[index] |= {"radius": radius, "rigor": rigor, "seconds": seconds}
    return rows


def attacked(path: str, images: torch.Tensor, labels: torch.Tensor, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of some images after an attack; runs in a process of its own."""
    torch.set_num_threads(1)
    survived = pgd(lipcert.load(path), images, labels).tolist()
    return [row | {"survived": right} for row, right in zip(rows, survived, strict=True)]


def autoattacked(
    path: str, images: torch.Tensor, labels: torch.Tensor, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of some images after AutoAttack; runs in a process of its own."""
    torch.set_num_threads(1)
    broken = AutoAttack()(lipcert.load(path), images, labels, EPS).broken.tolist()
    return [row | {"autoattack": not one} for row, one in zip(rows, broken, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--method", default="staged")
    parser.add_argument("--eps", default=CURVE, help="several, with 36/255 first; one alone takes less time")
    parser.add_argument("--autoattack", type=int, default=0, help="how many images AutoAttack attacks where PGD fails")
    parser.add_argument("--rows", type=Path, default=Path("certified_accuracy.jsonl"))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    result = measure(
        args.model, args.data, args.images, args.rows, args.processes, args.method, args.eps, args.autoattack
    )
    print(json.dumps(result, indent=1))
    keep(Path(args.model).stem, result)


def keep(name: str, result: dict[str, Any], curve: bool = False) -> None:
    """Writes the result of a network, or adds its curve to a known result; leaves those of others."""
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    before = known.get(name, result)
    if curve:
        result = before | {"curve": result}
    elif before["images"] > result["images"]:
        more = {"autoattack": result["autoattack"]} if "autoattack" in result else {}
        if len(result["certified"]) > 1:
            more["curve"] = {key: result[key] for key in ("images", "clean", "certified")}
        result = before | more
    elif before["clean"] == result["clean"]:  # of the same network
        result = {key: before[key] for key in ("autoattack", "curve") if key in before} | result
    RESULT.write_text(json.dumps({**known, name: result}, indent=1) + "\n")


def measure(
    path: str,
    data: str,
    images: int,
    rows_at: Path,
    processes: int = 2,
    method: str = "staged",
    eps: str = CURVE,
    autoattack: int = 0,
) -> dict[str, Any]:
    """The summary of a model's first ``images`` images of the fixed shuffle; rows that are written are not repeated."""
    model = lipcert.load(path)
    order = set(open_images(data, model, limit=images).order)
    known = {
        index: row
        for index, row in known_rows(rows_at).items()
        if (row["method"], row["eps"]) == (method, eps) and index in order
    }
    rows_at.touch()
    with (
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
        rows_at.open("a", encoding="utf-8") as file,
    ):
        if rows_at.read_text()[-1:] not in ("", "\n"):
            file.write("\n")

        def run(tasks: list[Future[list[dict[str, Any]]]]) -> None:
            for finished in as_completed(tasks):
                rows = finished.result()
                known.update({row["image"]: row for row in rows})
                file.write("".join(json.dumps(row) + "\n" for row in rows))
                file.flush()
                print(json.dumps(summarized(list(known.values()), eps)), flush=True)

        def batches(size: int, open_: Callable[[int], bool], limit: int = images) -> Iterator[tuple[Batch, list[int]]]:
            for batch in open_images(data, model, limit=limit).batches(size):
                yield batch, [place for place, index in enumerate(batch.indices) if open_(index)]

        def attack(
            how: Callable[..., list[dict[str, Any]]], size: int, open_: Callable[[dict[str, Any]], bool], limit: int
        ) -> None:
            tasks = []
            for batch, some in batches(size, lambda index: open_(known[index]), limit):
                if some:
                    rows = [known[batch.indices[place]] for place in some]
                    tasks.append(pool.submit(how, path, batch.images[some], labels_of(batch)[some], rows))
            run(tasks)

        tasks = []
        for batch, some in batches(BATCH, lambda index: index not in known):
            if some:
                places = [batch.indices[place] for place in some]
                tasks.append(
                    pool.submit(verdicts, path, method, eps, batch.images[some], labels_of(batch)[some], places)
                )
        run(tasks)
        attack(attacked, ATTACKED, attackable, images)
        first = list(open_images(data, model, limit=autoattack).order or ()) if autoattack else []
        if first:
            attack(autoattacked, AUTOATTACKED, undecided, autoattack)
    return {
        "method": method,
        "parameters": sum(p.numel() for p in model.parameters()),
        **summarized(list(known.values()), eps),
        **({"autoattack": of_autoattack([known[index] for index in first])} if first else {}),
        "environment": environment(),
    }


def attackable(row: dict[str, Any]) -> bool:
    return row["right"] and row["radius"] <= EPS and row["survived"] is None


def undecided(row: dict[str, Any]) -> bool:
    return row["right"] and row["radius"] <= EPS and row["survived"] and row.get("autoattack") is None


def of_autoattack(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many images AutoAttack was for, and the shares that PGD leaves correctly classified, and both attacks."""
    remaining = [row for row in rows if row["right"] and row["survived"] is not False]
    right = sum(row.get("autoattack") is not False for row in remaining)
    return {"images": len(rows), "pgd": len(remaining) / len(rows), "accuracy": right / len(rows)}


def known_rows(path: Path) -> dict[int, dict[str, Any]]:
    """The rows written by image; a killed run may have cut one off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}\n")]
    return {row["image"]: row for row in rows}


def summarized(rows: list[dict[str, Any]], eps: str) -> dict[str, Any]:
    timed = [row["seconds"] for row in rows if row["seconds"]]

    def share_above(radius: float) -> float:
        return sum(row["radius"] > radius for row in rows) / len(rows)

    return {
        "images": len(rows),
        "clean": sum(row["right"] for row in rows) / len(rows),
        "pgd": sum(row["right"] and row["survived"] is not False for row in rows) / len(rows),
        "limit": sum((row["limit"] or 0) > EPS for row in rows) / len(rows),
        "certified": {text: share_above(parse_eps(text)) for text in eps.split(",")},
        "rigor": sorted({row["rigor"] for row in rows if row["radius"] > EPS}),
        "cpu_seconds_a_verdict": sum(timed) / max(1, len(timed)),
    }


if __name__ == "__main__":
    main()
