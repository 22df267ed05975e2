"""What a certificate behind a cut adds to GloRo's on networks whose last activations have kinks.

    python -m benchmarks.kinked_cut --model cifar10-liresnet --data ../shared/data/cifar10/test.tar --images 1000

Counts the images of a fixed shuffle that are classified right and certified at 36/255: by gloro, by staged in the same
run, and to first order: m/‖∇m‖ at the pixels, and m/(K‖∇_c m‖) behind the cut, which only what the last layer before
the cut does to the gradient can pass. Seconds are those of staged for the images that gloro leaves open. Rows of other
models stay.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor

import lipcert
from benchmarks._cifar import EPS, first_order_limit, labels_of
from benchmarks._env import environment
from lipcert.certifier import Certifier
from lipcert.certifier.anchored import Behind, anchored
from lipcert.certifier.anchored.gradients import margin_gradients
from lipcert.certifier.anchored.walk import Linearization
from lipcert.inputs.data import open_images

RESULT = Path(__file__).parent / "results" / "kinked_cut.json"


def limit(at: Linearization, predicted: Tensor, gaps: Tensor) -> float:
    """The first-order limit of one image."""
    found = math.inf
    for rival in gaps.isfinite().nonzero()[:, 1]:
        slope, _ = margin_gradients(at.network, at.values, [], rival[None], predicted)
        found = min(found, (gaps[0, rival] / slope.norm()).item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = lipcert.load(args.model).double()
    gloro, staged = Certifier(model, EPS, "gloro"), Certifier(model, EPS, "staged")
    method = anchored(model, eps=EPS, costly=False)
    if not isinstance(method, Behind):
        raise SystemExit(f"anchored does not start behind a cut of {args.model}; choose a network whose K is small")
    count = dict.fromkeys(("clean", "gloro", "staged", "limit behind the cut", "limit"), 0)
    seconds: list[float] = []
    for batch in open_images(args.data, model, limit=args.images).batches(50):
        images, labels = batch.images.double(), labels_of(batch)
        by_gloro = gloro.run(images)
        right = by_gloro.predicted == labels
        sure = by_gloro.radius > EPS
        within = first_order_limit(model, images, by_gloro.predicted) > EPS
        count["clean"] += int(right.sum())
        count["gloro"] += int((right & sure).sum())
        count["limit"] += int((right & within).sum())
        for image in images[~sure & right].split(1):
            started = time.process_time()
            found = staged.run(image)
            seconds.append(time.process_time() - started)
            count["staged"] += bool(found.radius.item() > EPS)
            at = method.behind(image).linearization
            logits = at.logits
            own = logits.gather(1, found.predicted[:, None]) - logits
            gaps = own.scatter(1, found.predicted[:, None], torch.inf)
            count["limit behind the cut"] += limit(at, found.predicted, gaps) / method.constant > EPS
        count["staged"] += int((right & sure).sum())
        count["limit behind the cut"] += int((right & sure).sum())
        print(json.dumps(count), flush=True)
    result = {
        "images": args.images,
        "K": method.constant,
        **count,
        "cpu seconds of an image that gloro leaves open, mean": sum(seconds) / max(1, len(seconds)),
        "cpu seconds of an image that gloro leaves open, largest": max(seconds, default=0.0),
        "environment": environment(),
    }
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**known, args.model: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
