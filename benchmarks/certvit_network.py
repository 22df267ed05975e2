"""Compares the CertViT engines on all layers of a trained vision transformer, and says what a large one takes.

    python -m benchmarks.certvit_network --model trained.safetensors --data ../shared/data/cifar10/train.tar

``benchmarks.cifar_pipeline`` leaves such a model in its work folder: an ordinary timm ViT, trained without any hold on
its norms. Every engine starts from it, with the same images and the same relative output error; what an engine reaches
stands beside what it was asked for, and the default runs once more at what the faithful engine reaches. Accuracy and
top classes are those of the held-out fifth of the images.

With ``--cost NAME`` and no model: the processor seconds and the memory that a timm model of random weights takes. With
``--trade NAME [--checkpoint FILE]``: Σ log10 of the norms and accuracy of the default and of clipping at several
errors, from which both can be compared at equal accuracy.

Results and environment go to benchmarks/results/certvit_network.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import lipcert
from benchmarks._env import environment
from lipcert.certvit import ConstraintReport, NetworkFigures
from lipcert.inputs.data import open_images

ERROR = 1e-2
ENGINES = (("spectral", "exact"), ("l1", "exact"), ("l1", "faithful"))
ERRORS = (0.005, 0.01, 0.02, 0.04)
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


def cost(name: str, data: str, count: int, workers: int) -> dict[str, Any]:
    """Processor seconds and memory of all layers of a timm model with random weights."""
    torch.manual_seed(0)
    model = lipcert.load(name, pretrained=False)
    images = [batch.images for batch in open_images(data, model, limit=count).batches(BATCH)]
    started = time.perf_counter()
    report = lipcert.constrain(model, images, ERROR, workers=workers).constraint
    assert report is not None
    found = {
        "model": name, "images": count, "workers": workers, "layers": len(report.layers),
        "cpu_seconds": sum(os.times()[:4]), "seconds": time.perf_counter() - started,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "peak_gib_of_a_worker": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20,
        "largest_gap": max(layer.gap or 0.0 for layer in report.layers),
        "log10_norms": {"before": report.before.log10_norms, "after": report.after.log10_norms}
        | {baseline: network.log10_norms for baseline, network in report.baselines.items()},
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    return found


def trade(name: str, checkpoint: str | None, data: str, count: int) -> dict[str, Any]:
    """Norms and accuracy of the default and of clipping at several errors; half of the images are held out."""
    rows = []
    for error in ERRORS:
        model = lipcert.load(name, checkpoint=checkpoint)
        batches = [(batch.images, batch.labels) for batch in open_images(data, model, limit=count).batches(BATCH)]
        half = len(batches) // 2
        report = lipcert.constrain(model, batches[:half], error, held_out=batches[half:]).constraint
        assert report is not None
        kinds = {"before": report.before, "spectral": report.after, "clip": report.baselines["clip"]}
        rows.append({"error": error, **{kind: figures(network) for kind, network in kinds.items()}})
        print(json.dumps(rows[-1]), flush=True)
    return {"model": name, "images": count, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="an artifact: compare the engines on it")
    what.add_argument("--cost", help="a timm name: say what the default engine takes")
    what.add_argument("--trade", help="a timm name: compare the default with clipping at several errors")
    parser.add_argument("--checkpoint", help="weights for --trade")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if args.model:
        result["engines"] = engines(args.model, args.data, args.images)
    elif args.trade:
        result["trade"] = trade(args.trade, args.checkpoint, args.data, args.images)
    else:
        result["cost"] = cost(args.cost, args.data, args.images, args.workers)
    result["environment"] = environment()
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
