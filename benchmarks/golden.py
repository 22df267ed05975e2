"""Radii of the campaign's first networks, to the last bit: a change of structure leaves them as they are.

    python -m benchmarks.golden --write golden.jsonl
    python -m benchmarks.golden --compare golden.jsonl
    python -m benchmarks.golden --compare golden.jsonl --smaller 0.001

The first command goes on after the networks that are in the file; the second prints each difference and ends with exit
code 1 if there is any. With ``--smaller`` only radii count that are smaller by more than this share, for changes of the
bounds themselves. All use one thread, since sums depend on the order in which they are taken.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks._networks import draw
from benchmarks.campaign import certify


def radii(seed: int, count: int) -> dict[str, list[str]]:
    """Radii of a network's images in hexadecimal, by "method dtype"; methods that refuse the network are left out."""
    case = draw(seed, count)
    case.model.requires_grad_(False)
    with torch.no_grad():
        classes = case.model(case.images).argmax(1)
    return {" ".join(key): [x.hex() for x in found.tolist()] for key, found in certify(case, classes).items()}


def differ(before: list[str] | None, now: list[str] | None, share: float | None) -> bool:
    """Whether radii differ, or with ``share`` whether one is smaller by more than this share."""
    if share is None or before is None or now is None:
        return before != now
    pairs = zip(map(float.fromhex, before), map(float.fromhex, now), strict=True)
    return any(new < old * (1 - share) for old, new in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="record the radii in this file")
    parser.add_argument("--compare", type=Path, help="compare the radii with those in this file")
    parser.add_argument("--smaller", type=float, help="report only radii smaller by more than this share")
    parser.add_argument("--networks", type=int, default=500)
    parser.add_argument("--images", type=int, default=2, help="images per network")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.write:
        done = len(args.write.read_text().splitlines()) if args.write.exists() else 0
        with args.write.open("a") as file:
            for seed in range(done, args.networks):
                file.write(json.dumps({"seed": seed, "images": args.images, "radii": radii(seed, args.images)}) + "\n")
                file.flush()
        return 0
    if not args.compare:
        parser.error("give --write FILE or --compare FILE")
    different = 0
    for row in map(json.loads, args.compare.read_text().splitlines()[: args.networks]):
        now = radii(row["seed"], row["images"])
        for key in sorted({*now, *row["radii"]}):
            if differ(row["radii"].get(key), now.get(key), args.smaller):
                different += 1
                print(f"network {row['seed']}, {key}: {row['radii'].get(key)} before, {now.get(key)} now", flush=True)
    print(f"{different} differences")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
