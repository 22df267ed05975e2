"""Compares the CertViT engines on all layers of a trained vision transformer, and says what a large one takes.

    python -m benchmarks.certvit_network --model trained.safetensors --data ../shared/data/cifar10/train.tar

``benchmarks.cifar_pipeline`` leaves such a model in its work folder: an ordinary timm ViT, trained without any hold on
its norms. Every engine starts from it, with the same images and the same relative output error; what an engine reaches
stands beside what it was asked for, and the default runs once more at what the faithful engine reaches. Accuracy and
top classes are those of the held-out fifth of the images.

With ``--cost NAME`` and no model: the time that a timm model of random weights takes with 512 images, extrapolated from
one layer of each shape, four images and ten iterations to the number of iterations that such layers need: 15 in
benchmarks/results/certvit_solvers.json. Seconds are those of a core, and not of the clock.

Results and environment go to benchmarks/results/certvit_network.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lipcert
from benchmarks._env import environment
from lipcert.certvit import ConstraintReport, NetworkFigures, collect, constrain_matrix
from lipcert.inputs.data import open_images

ERROR = 1e-2
ENGINES = (("spectral", "exact"), ("l1", "exact"), ("l1", "faithful"))
ITERATIONS = 15
BATCH = 40
RESULT = Path(__file__).parent / "results" / "certvit_network.json"


def engines(path: str, data: str, count: int) -> dict[str, Any]:
    """All engines on one trained model."""
    model = lipcert.load(path)
    images = [(batch.images, batch.labels) for batch in open_images(data, model, limit=count).batches(BATCH)]
    rows: dict[str, Any] = {}

    def run(name: str, error: float, measure: str, engine: str) -> ConstraintReport:
        started = time.process_time()
        report = lipcert.constrain(lipcert.load(path), images, error, measure=measure, engine=engine).constraint
        assert report is not None
        rows[name] = {**figures(report.after), **errors(report), "cpu_seconds": time.process_time() - started}
        print(f"{name}: {rows[name]['cpu_seconds']:.0f} s", flush=True)
        return report

    for measure, engine in ENGINES:
        report = run(f"{measure}, {engine}", ERROR, measure, engine)
    rows = {"before": figures(report.before), **{n: figures(f) for n, f in report.baselines.items()}, **rows}
    at_its_error = rows["l1, faithful"]["error_reached_median"]
    run("spectral at the faithful engine's error", at_its_error, "spectral", "exact")
    for name, row in rows.items():
        row["decades"] = row["log10_norms"] - rows["before"]["log10_norms"]
        print(f"{name:40} {row['decades']:+.2f} decades  accuracy {row['accuracy']:.3f}  kept {row['kept']:.3f}")
    gain = rows["l1, faithful"]["decades"] - rows["spectral, exact"]["decades"]
    print(f"the default lowers the norms {gain:.2f} decades further than the faithful engine")
    return {
        "model": Path(path).stem, "layers": len(report.layers), "images": count, "error": ERROR,
        "engines": rows, "decades_further_than_faithful": gain,
    }  # fmt: skip


def figures(network: NetworkFigures) -> dict[str, Any]:
    return {"log10_norms": network.log10_norms, "accuracy": network.accuracy, "kept": network.agreement}


def errors(report: ConstraintReport) -> dict[str, Any]:
    """Of the layers: the errors reached on calibration and on held-out images."""
    reached = [layer.error_reached for layer in report.layers if layer.error_reached is not None]
    held_out = [layer.error_held_out for layer in report.layers if layer.error_held_out is not None]
    return {
        "error_reached_median": statistics.median(reached),
        "error_reached_most": max(reached),
        "error_held_out_median": statistics.median(held_out),
        "failed": len(report.failed),
    }


def cost(name: str, data: str, count: int = 512) -> dict[str, Any]:
    """Seconds of a core for all layers, from one layer of each shape and four images."""
    torch.manual_seed(0)
    model = lipcert.load(name, pretrained=False)
    images = next(open_images(data, model, limit=4).batches(4)).images
    layers = {p: m for p, m in model.net.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    shapes = Counter(tuple(layer.weight.flatten(1).shape) for layer in layers.values())
    with torch.no_grad():
        model(images)
        started = time.process_time()
        model(images)
    forward = (time.process_time() - started) / len(images)
    rows = {}
    for shape, number in shapes.items():
        path, layer = next((p, m) for p, m in layers.items() if tuple(m.weight.flatten(1).shape) == shape)
        started = time.process_time()
        moments = collect(model, [images], {path: layer})[path]
        collecting = max(0.0, (time.process_time() - started) / len(images) - forward)
        taken = []
        for iterations in (5, 10):
            started = time.process_time()
            constrain_matrix(layer.weight, moments, ERROR, tolerance=0.0, iterations=iterations)
            taken.append(time.process_time() - started)
        solving = taken[1] + (ITERATIONS - 10) / 5 * (taken[1] - taken[0])
        rows["×".join(map(str, shape))] = {
            "layers": number,
            "seconds_an_image": collecting,
            "seconds_solving": solving,
        }
        print(f"{shape}: {number} layers, {collecting:.2f} s per image, {solving:.1f} s to solve", flush=True)
    collecting = count * (forward + sum(row["layers"] * row["seconds_an_image"] for row in rows.values()))
    solving = sum(row["layers"] * row["seconds_solving"] for row in rows.values())
    minutes = (collecting + solving) / 60
    print(f"{name}, {count} images: {minutes:.0f} minutes of a core, {minutes / 2:.0f} on two")
    return {
        "model": name, "images": count, "seconds_forward_an_image": forward, "shapes": rows,
        "minutes_of_a_core_collecting": collecting / 60, "minutes_of_a_core_solving": solving / 60,
        "note": "extrapolated from one layer of each shape, 4 images and 10 of 15 iterations",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="an artifact: compare the engines on it")
    what.add_argument("--cost", help="a timm name: say what the default engine takes")
    parser.add_argument("--images", type=int, default=1000)
    args = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if args.model:
        result["engines"] = engines(args.model, args.data, args.images)
    else:
        result["cost"] = cost(args.cost, args.data)
    result["environment"] = environment()
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
