"""Verdicts of staged certification beside those of CROWN, on the same images of CIFAR-10 and in one run.

They are the first of the fixed shuffle of the test set that are predicted right.

    python -m benchmarks.crown_radii --model cifar10-vit --data ../shared/data/cifar10/test.tar --verified 5

CROWN is auto_LiRPA's backward bound in ℓ2, in float32 as it comes, with its tighter relaxations of softmax (``lse``)
and of products (``middle``). Both are asked about every ε, in ascending order; CROWN until it cannot verify one.
Staged certification takes the images together, as ``certify`` does; CROWN takes gigabytes for each and gets one at a
time. Rows of other models stay. This needs ``pip install auto_LiRPA`` of 0.7 or later.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lipcert
from benchmarks._crown import Crown
from benchmarks._env import environment
from lipcert.certifier import Certifier
from lipcert.inputs.data import open_images

RESULT = Path(__file__).parent / "results" / "crown_radii.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--verified", type=int, default=10, help="how many images that are predicted right are taken")
    parser.add_argument("--eps", nargs="+", default=["36/255"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = sorted(float(Fraction(text)) for text in args.eps)
    model, exact = lipcert.load(args.model), lipcert.load(args.model).double()
    try:
        crown = Crown(model)
    except ImportError as error:
        raise SystemExit(f"this needs auto_LiRPA, and cannot import it: {error}") from error

    chosen: list[tuple[int, Tensor, int]] = []
    for batch in open_images(args.data, model, limit=10 * args.verified).batches(1):
        with torch.no_grad():
            logits = model(batch.images)
            assert torch.allclose(crown.network(batch.images), logits, 1e-4, 1e-4), "not the same network"
        predicted = int(logits.argmax())
        if batch.labels is not None and predicted == int(batch.labels):
            chosen.append((batch.indices[0], batch.images, predicted))
        if len(chosen) == args.verified:
            break
    images = torch.cat([image for _, image, _ in chosen]).double()
    rows: list[dict[str, Any]] = [{"image": index, "verdicts": []} for index, _, _ in chosen]
    for eps in sizes:
        certifier = Certifier(exact, eps)
        certifier.run(images[:1])  # what is done once for a network
        started = time.process_time()
        held = (certifier.run(images).radius > eps).tolist()
        seconds = (time.process_time() - started) / len(rows)
        for row, own, (_, image, predicted) in zip(rows, held, chosen, strict=True):
            verdict = {"eps": eps, "staged": own, "staged_seconds": seconds}
            if all(one.get("crown", 0) > 0 for one in row["verdicts"]):
                started = time.process_time()
                verdict["crown"] = crown(image, predicted, eps)
                verdict["crown_seconds"] = time.process_time() - started
            row["verdicts"].append(verdict)
            print(json.dumps({"image": row["image"], **verdict}), flush=True)
    table = []
    for k, eps in enumerate(sizes):
        verdicts = [row["verdicts"][k] for row in rows]
        asked = [one for one in verdicts if "crown" in one]
        theirs = [one.get("crown", 0) > 0 for one in verdicts]
        table.append(
            {
                "eps": eps,
                "staged": sum(one["staged"] for one in verdicts),
                "crown": sum(theirs),
                "crown alone": sum(t and not one["staged"] for one, t in zip(verdicts, theirs, strict=True)),
                "cpu seconds of a verdict of staged": sum(one["staged_seconds"] for one in verdicts) / len(verdicts),
                "cpu seconds of a verdict of crown": sum(one["crown_seconds"] for one in asked) / max(1, len(asked)),
                "verdicts of crown": len(asked),
            }
        )
    summary = {"images": len(rows), "eps": table, "auto_LiRPA": crown.version}
    print(json.dumps(summary, indent=1))
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    entry = {**summary, "peak_mib": peak, "rows": rows, "environment": environment()}
    RESULT.write_text(json.dumps({**known, Path(args.model).stem: entry}, indent=1) + "\n")


if __name__ == "__main__":
    main()
