"""Radii of the anchored certificate, of the layer-by-layer bound and of the first-order limit, on the same images.

    python -m benchmarks.anchored_radii --model cifar10-vit --data ../shared/data/cifar10/test.tar

An attack (projected gradient on the margin inside the ball) says how much of the margin is lost between bound and
truth. Rows of other models stay.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from torch import Tensor

import lipcert
from benchmarks._cifar import first_order_limit, labels_of
from benchmarks._env import environment
from lipcert.bounds import margins
from lipcert.certifier import Anchored, LoFAST
from lipcert.inputs.data import open_images

RESULT = Path(__file__).parent / "results" / "anchored_radii.json"
EPS = {"0.02": 0.02, "0.05": 0.05, "0.1": 0.1, "36/255": 36 / 255}


def attacked(model: lipcert.Model, images: Tensor, predicted: Tensor, eps: float, steps: int = 50) -> Tensor:
    """The smallest margin that projected gradient descent finds within eps, shape (N,)."""
    delta = torch.zeros_like(images)
    best = torch.full((len(images),), torch.inf, dtype=images.dtype)
    for step in range(steps):
        delta.requires_grad_()
        logits = model(images + delta)
        own = logits.gather(1, predicted[:, None])
        margin = (own - logits.scatter(1, predicted[:, None], -torch.inf)).amin(1)
        (gradient,) = torch.autograd.grad(margin.sum(), delta)
        best = torch.minimum(best, margin.detach())
        unit = gradient / gradient.flatten(1).norm(dim=1).clamp_min(1e-300)[:, None, None, None]
        delta = delta.detach() - eps * (1.0 if step == 0 else 0.2) * unit
        delta = delta * (eps / delta.flatten(1).norm(dim=1).clamp_min(eps))[:, None, None, None]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--batch", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = lipcert.load(args.model).double()
    data = open_images(args.data, model, limit=args.images)
    method, layers = Anchored(model), LoFAST(model)
    found: dict[str, list[Tensor]] = {
        name: [] for name in ("right", "anchored", "lofast", "limit", "margin", "bound", "attacked")
    }
    started = time.process_time()
    seconds = 0.0
    for batch in data.batches(args.batch):
        images = batch.images.double()
        with torch.no_grad():
            predicted, gaps = margins(model(images))
        before = time.process_time()
        anchor = method(images)
        found["anchored"].append(anchor.radius(predicted, gaps))
        seconds += time.process_time() - before
        found["lofast"].append(layers(images).radius(predicted, gaps))
        found["limit"].append(first_order_limit(model, images, predicted))
        found["right"].append(torch.eq(predicted, labels_of(batch)))
        found["margin"].append(gaps.amin(1))
        found["attacked"].append(attacked(model, images, predicted, 0.05))
        found["bound"].append(anchor.least_margin(torch.full((len(images),), 0.05).double(), predicted, gaps))
        print(f"{sum(map(len, found['right']))} images, {time.process_time() - started:.0f} s", flush=True)
    all_of = {name: torch.cat(parts) for name, parts in found.items()}
    right = all_of["right"]
    rows = {}
    for name in ("lofast", "anchored", "limit"):
        radius = all_of[name]
        rows[name] = {
            "median_radius_of_those_right": radius[right].median().item(),
            **{f"at_{key}": ((radius > eps) & right).double().mean().item() for key, eps in EPS.items()},
        }
    ratio = (all_of["anchored"] / all_of["limit"])[right].median().item()
    lost = ((all_of["attacked"] - all_of["bound"]) / all_of["margin"])[right].median().item()
    summary = {
        "images": len(right),
        "clean": right.double().mean().item(),
        "certificates": rows,
        "anchored_over_limit_median": ratio,
        "anchored_over_lofast_median": (all_of["anchored"] / all_of["lofast"])[right].median().item(),
        "margin_median": all_of["margin"].median().item(),
        "attacked_margin_at_0.05_median": all_of["attacked"].median().item(),
        "bound_on_margin_at_0.05_median": all_of["bound"].median().item(),
        "lost_between_bound_and_attack_at_0.05_of_margin_median": lost,
        "broken_inside_radius": int(((all_of["attacked"] <= 0) & (all_of["anchored"] > 0.05)).sum()),
        "norms": method.count,
        "cpu_seconds_an_image": seconds / len(right),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "environment": environment(),
    }
    print(json.dumps(summary, indent=1))
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**known, Path(args.model).stem: summary}, indent=1) + "\n")


if __name__ == "__main__":
    main()
