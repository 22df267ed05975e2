"""The 14 architectures of the CertViT paper with random weights, before and after surgery.

    python -m benchmarks.paper_models --data ../shared/data/imagenet-sample/val.tar --images 20

Parameters, global bound and seconds of ``convert`` with attention="l2", norm="smooth", then GloRo certificates on
images of the data set. Random weights say how far surgery brings the bound down and what it costs, not what is
certified.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import lipcert
from benchmarks._env import environment
from lipcert.certifier import Certifier
from lipcert.inputs.data import open_images

MODELS = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_large_patch16_224",
    "vit_small_patch32_224",
    "vit_base_patch32_224",
    "vit_base_patch8_224",
    "deit_tiny_patch16_224",
    "deit_small_patch16_224",
    "deit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "swin_small_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "swin_large_patch4_window7_224",
)
RESULTS = Path(__file__).parent / "results" / "paper_models.json"


def measure(name: str, data: str, count: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = lipcert.load(name, pretrained=False)
    images = open_images(data, model, limit=count)
    pixels = torch.cat([batch.images for batch in images.batches(count)])
    started = time.perf_counter()
    before = lipcert.lipschitz(model)
    bounded = time.perf_counter()
    lipcert.convert(model, attention="l2", norm="smooth", images=pixels[:4])
    converted = time.perf_counter()
    certifier = Certifier(model, 36 / 255, "gloro")
    after = time.perf_counter()
    result = certifier.run(pixels)
    done = time.perf_counter()
    assert model.conversion is not None
    return {
        "model": name,
        "parameters_before": model.conversion.parameters_before,
        "parameters_after": model.conversion.parameters_after,
        "log10_bound_before": before.log10,
        "log10_bound_after": certifier.bound.log10,
        "seconds_bound_before": bounded - started,
        "seconds_convert": converted - bounded,
        "seconds_bound_after": after - converted,
        "seconds_certify": done - after,
        "images": len(result),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=MODELS)
    args = parser.parse_args()
    rows = []
    print("model  parameters before  after  log10 bound before  after  s bound before  convert  bound after  certify")
    for name in args.models:
        row = measure(name, args.data, args.images)
        rows.append(row)
        print("  ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
        RESULTS.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
