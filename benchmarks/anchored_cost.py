"""How the cost of the anchored certificate grows with depth and with tokens.

Untrained vision transformers of width 128 with dot-product attention after smooth projections, weight matrices of norm
1, random images. CPU seconds once, mostly for the choice of norms, and per image after it, and the process's peak
memory. The exponents are slopes of least-squares lines through the logarithms of the seconds per image.

    python -m benchmarks.anchored_cost --images 2
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import time
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

import lipcert
from benchmarks._cifar import first_order_limit
from benchmarks._env import environment
from lipcert.bounds import margins
from lipcert.certifier import Anchored
from lipcert.training import NormHold, hold_projections

DEPTHS, TOKENS = (3, 6, 12), (16, 64, 196)


def network(depth: int, tokens: int) -> lipcert.Model:
    side = math.isqrt(tokens)
    torch.manual_seed(0)
    model = lipcert.load(
        "vit_tiny_patch16_224", pretrained=False, mean=(0.5,) * 3, std=(0.25,) * 3, input_size=(3, 8 * side, 8 * side),
        img_size=8 * side, patch_size=8, embed_dim=128, depth=depth, num_heads=4, mlp_ratio=2.0, class_token=False,
        global_pool="avg", final_norm=False, num_classes=10,
    )  # fmt: skip
    lipcert.convert(model, attention="keep", norm="smooth")
    hold_projections(model, 8.0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
    NormHold(model, {"*": 1.0, "*.q": 0.35, "*.k": 0.35})
    return model.double()


def measure(depth: int, tokens: int, images: int) -> dict[str, float]:
    """Runs in a process of its own, so that the peak memory is that of this network."""
    torch.set_num_threads(1)
    model = network(depth, tokens)
    pixels = torch.rand(1 + images, *model.input_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    method = Anchored(model)
    with torch.no_grad():
        predicted, gaps = margins(model(pixels))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, radii = [], []
    for one in range(1 + images):
        before, some = time.process_time(), slice(one, one + 1)
        radii.append(method(pixels[some]).radius(predicted[some], gaps[some]))
        seconds.append(time.process_time() - before)
    radius, each = torch.cat(radii), fmean(seconds[1:])
    return {
        "depth": depth,
        "tokens": tokens,
        "norms": method.count,
        "cpu_seconds_once": seconds[0] - each,
        "cpu_seconds_an_image": each,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "mib_before": memory / 1024,
        "median_radius": radius.median().item(),
        "median_share_of_limit": (radius / first_order_limit(model, pixels, predicted)).median().item(),
    }


def exponent(rows: list[dict[str, float]], of: str) -> float:
    x, y = (torch.tensor([row[key] for row in rows]).log() for key in (of, "cpu_seconds_an_image"))
    return (((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2)
    args = parser.parse_args()
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for depth, tokens in dict.fromkeys([(d, TOKENS[0]) for d in DEPTHS] + [(DEPTHS[0], t) for t in TOKENS]):
            rows.append(pool.apply(measure, (depth, tokens, args.images)))
            print(json.dumps(rows[-1]), flush=True)
    summary = {
        "images": args.images,
        "rows": rows,
        "exponent_of_depth": exponent([row for row in rows if row["tokens"] == TOKENS[0]], "depth"),
        "exponent_of_tokens": exponent([row for row in rows if row["depth"] == DEPTHS[0]], "tokens"),
        "environment": environment(),
    }
    print(json.dumps(summary, indent=1))
    path = Path(__file__).parent / "results" / "anchored_cost.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
