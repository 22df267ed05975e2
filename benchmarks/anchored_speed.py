"""What an anchored verdict costs with this code and with other code: CPU seconds of one thread, side by side.

    python -m benchmarks.anchored_speed --data ../shared/data/cifar10/test.tar --other ../before --images 8

Each network's certifier is prepared once, certifies one batch, which fills what is kept for a network, and is then
timed on further images of the fixed shuffle. The two pieces of code take turns in processes of their own, network by
network, so that other work on the machine slows both. The figures are CPU seconds of one thread: for the preparation
and the first batch together, and for an image after that. Rows say how many certificates took random vectors. Radii of
the two are compared. Results and environment go to benchmarks/results/anchored_speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "anchored_speed.json"
NETWORKS = ("digits", "cifar10-liresnet-smooth", "cifar10-vit")
EPS = 36 / 255


def measure(name: str, data: str | None, images: int) -> dict[str, Any]:
    """Runs in a process of its own, with the lipcert that is first on its path."""
    import torch

    import lipcert
    from lipcert.certifier import Certifier
    from lipcert.inputs.data import open_images

    torch.set_num_threads(1)
    bundled = Path(lipcert.__file__).parent / "assets" / "digits_vit.safetensors"
    model = lipcert.load(bundled if name == "digits" else name)
    taken = next(iter(open_images(None if name == "digits" else data, model, limit=2 * images).batches(2 * images)))
    before = time.process_time()
    certifier = Certifier(model, EPS, "staged")
    certifier.run(taken.images[:images])
    once = time.process_time() - before
    before = time.process_time()
    result = certifier.run(taken.images[images:])
    each = (time.process_time() - before) / images
    return {
        "cpu_seconds_once": once - images * each,
        "cpu_seconds_an_image": each,
        "radii": result.radius.tolist(),
        "certified": int(result.certified.sum()),
        "random": sum(text != "deterministic" for text in result.rigor),
    }


def apart(name: str, data: str, images: int, code: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", name, "--data", data, "--images", str(images)]
    environment = {**os.environ, "PYTHONPATH": str(code.resolve()), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="CIFAR-10's test images: test.tar")
    parser.add_argument("--other", type=Path, help="a folder with other code, such as a checkout of an earlier commit")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.data, args.images)))
        return
    from benchmarks._env import environment

    sides = {"this code": Path(__file__).parent.parent}
    if args.other:
        sides["other code"] = args.other
    networks: dict[str, Any] = {}
    for name in args.networks:
        rows = {side: apart(name, args.data, args.images, code) for side, code in sides.items()}
        radii = [row.pop("radii") for row in rows.values()]
        networks[name] = rows
        if args.other:
            smaller = [1 - new / old for new, old in zip(*radii, strict=True) if old > 0 and new < old]
            networks[name]["largest relative loss of a radius"] = max(smaller, default=0.0)
        print(name, json.dumps(networks[name]), flush=True)
    result = {"eps": EPS, "images": args.images, "networks": networks, "environment": environment() | {"threads": 1}}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
