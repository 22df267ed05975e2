"""What splitting perturbations along the margin's gradient does to anchored radii, and what it costs.

    python -m benchmarks.anchored_rays --model digits-vit --images 12
    python -m benchmarks.anchored_rays --model cifar10-liresnet-smooth --data ../shared/data/cifar10/test.tar

Full radii of the same images, with rays and without, in the same run and from the same norms; radii of a network that
is cut are those behind its cut, divided by the Lipschitz constant of the layers before it. The limit is
min_j m_j/‖∇m_j‖ at the place where the certificate starts. Rows of other models stay.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

import lipcert
from benchmarks._env import environment
from lipcert.bounds import margins
from lipcert.certifier.anchored import Behind, anchored
from lipcert.certifier.anchored import margin as margin_module
from lipcert.certifier.anchored.gradients import margin_gradients
from lipcert.certifier.anchored.walk import Linearization
from lipcert.inputs.data import open_images

RESULT = Path(__file__).parent / "results" / "anchored_rays.json"


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
    parser.add_argument("--data", help="by default the images that come with lipcert")
    parser.add_argument("--images", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = lipcert.load(args.model)
    batch = next(open_images(args.data, model, limit=args.images).batches(args.images))
    pixels = batch.images.double()
    model.double()
    method = anchored(model)
    scale = 1.0
    if isinstance(method, Behind):
        method.whole, scale = None, method.constant
    rows = []
    for image in pixels.split(1):
        with torch.no_grad():
            predicted, gaps = margins(model(image))
        row: dict[str, float] = {}
        for name, entries in (("without", 0), ("with", margin_module._ENTRIES)):
            started = time.process_time()
            with patch.object(margin_module, "_ENTRIES", entries):
                anchor = method(image)
                row[f"radius {name}"] = anchor.radius(predicted, gaps).item()
            row[f"cpu seconds {name}"] = time.process_time() - started
        at = (anchor if not hasattr(anchor, "anchor") else anchor.anchor).linearization
        row["limit"] = limit(at, predicted, gaps) / scale
        rows.append(row)
        print(json.dumps(row), flush=True)

    def middle(first: str, second: str) -> float:
        return median(row[first] / row[second] for row in rows)

    found = {
        "images": len(rows),
        "radius with over without, median": middle("radius with", "radius without"),
        "radius without over limit, median": middle("radius without", "limit"),
        "radius with over limit, median": middle("radius with", "limit"),
        "cpu seconds with over without, median": middle("cpu seconds with", "cpu seconds without"),
        "rows": rows,
        "environment": environment(),
    }
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**known, args.model: found}, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key not in ("rows", "environment")}))


if __name__ == "__main__":
    main()
