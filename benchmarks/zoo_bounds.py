"""Which families of timm have bounds: the smallest architecture of each file, in real arithmetic and in each format.

    python -m benchmarks.zoo_bounds [NAME ...] [--again] [--dtypes real,float32,float16,bfloat16]

Weights are random. In real arithmetic a network has a certificate by ``global`` at the size of its images if its
Lipschitz constant is finite. A format works, for images as small as the architecture takes, if every operation has a
rounding rule and every constant that the network computes has a bound; how large the bounds are is not looked at. Rows
are written one by one to ``benchmarks/results/zoo_bounds.json``, and a run goes on with what is missing; ``--again``
computes all anew, names only theirs. What has a bound in the file and none now is named, stays in the file, and ends
the run with exit code 1: the table must not get smaller.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import lipcert
from lipcert.errors import LipcertError, first_line
from lipcert.roundoff import DTYPES, Roundoff

TABLE = Path(__file__).parent / "results" / "zoo_bounds.json"
FORMATS = ("real", *DTYPES)
SIZES = (32, 64, 96, 128, 160, 192, 224, 256)


def load(name: str) -> lipcert.Model:
    """The architecture at the smallest size that it takes, in float64."""
    sizes: list[dict[str, Any]] = [given for n in SIZES for given in ({"img_size": n}, {"input_size": (3, n, n)})]
    for arguments in (*sizes, {}):
        torch.manual_seed(0)
        try:
            return lipcert.load(name, pretrained=False, num_classes=10, **arguments).double()
        except LipcertError:
            if not arguments:
                raise
    raise AssertionError(name)


def answer(name: str, dtype: str) -> str:
    """Why a format has no bounds; "" if it has."""
    try:
        if dtype == "real":
            torch.manual_seed(0)
            bound = lipcert.lipschitz(lipcert.load(name, pretrained=False, num_classes=10).double())
            return "" if math.isfinite(bound.log10) else "the global bound is infinite"
        model = load(name)
        model.real = True
        Roundoff(model, dtype)
    except LipcertError as error:
        return first_line(error).partition("; add one with")[0]
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--dtypes", default=",".join(FORMATS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, dict[str, str]] = json.loads(TABLE.read_text())
    anew, lost = options.names or options.again, []
    for name in options.names or list(rows):
        row = rows.setdefault(name, {})
        for dtype in options.dtypes.split(","):
            if not anew and dtype in row:
                continue
            reason = answer(name, dtype)
            if reason and row.get(dtype) == "":
                lost.append(f"{name} had bounds in {dtype} and has none: {reason}")
            else:
                row[dtype] = reason
            TABLE.write_text(json.dumps(dict(sorted(rows.items())), indent=1, ensure_ascii=False) + "\n")
    for name, row in sorted(rows.items(), key=lambda item: item[1].get("family", "")):
        print(row.get("family", "?"), name, *(f"{d}: {row.get(d, 'not tried') or 'yes'}" for d in FORMATS), sep="  ")
    for dtype in FORMATS:
        asked = [row[dtype] for row in rows.values() if dtype in row]
        print(f"{dtype}: bounds for {asked.count('')} of {len(asked)}")
    print(*lost, sep="\n")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
