"""Which families of timm have bounds on rounding: the smallest architecture of each file, in each format.

    python -m benchmarks.zoo_rounding [NAME ...] [--dtypes float32,float16,bfloat16]

Weights are random, images as small as the architecture takes. A format works if every operation has a rounding rule and
every constant that the network computes has a bound; how large the bounds are is not looked at. Rows are written one by
one to ``lipcert/assets/rounding.json``, which ``lipcert models NAME`` reads, and a run goes on with what is missing.
The table of all rows is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

import torch

import lipcert
from lipcert.errors import LipcertError, first_line
from lipcert.inputs.zoo import ROUNDING, architectures
from lipcert.roundoff import DTYPES, Roundoff

SIZES = (32, 64, 96, 128, 160, 192, 224, 256)


def load(name: str) -> lipcert.Model:
    """The architecture at the smallest size that it takes, in float64."""
    sizes: list[dict[str, Any]] = [given for n in SIZES for given in ({"img_size": n}, {"input_size": (3, n, n)})]
    for arguments in sizes:
        torch.manual_seed(0)
        try:
            return lipcert.load(name, pretrained=False, num_classes=10, **arguments).double()
        except LipcertError:
            continue
    return lipcert.load(name, pretrained=False, num_classes=10).double()


def smallest() -> list[str]:
    """The smallest covered architecture of every file, in the order of their sizes."""
    first: dict[str, str] = {}
    for one in sorted(architectures().values(), key=lambda one: (one.parameters, one.name)):
        if one.covered and one.logits:
            first.setdefault(one.family, one.name)
    return list(first.values())


def answer(model: lipcert.Model, dtype: str) -> str:
    """Why a format has no bounds; "" if it has."""
    try:
        Roundoff(model, dtype)
    except LipcertError as error:
        return first_line(error).partition("; add one with")[0]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, dict[str, str]] = json.loads(ROUNDING.read_text()) if ROUNDING.exists() else {}
    for name in options.names or smallest():
        missing = [d for d in options.dtypes.split(",") if options.names or d not in rows.get(name, {})]
        if not missing:
            continue
        model = load(name)
        model.real = True
        for dtype in missing:
            rows.setdefault(name, {"family": architectures()[name].family})[dtype] = answer(model, dtype)
        ROUNDING.write_text(json.dumps(dict(sorted(rows.items())), indent=1, ensure_ascii=False) + "\n")
        print(name, rows[name], flush=True)
    print("| file of timm | smallest architecture |", " | ".join(DTYPES), "|\n|", "---|" * (2 + len(DTYPES)))
    for name, row in sorted(rows.items(), key=lambda item: item[1]["family"]):
        print("|", row["family"], "|", name, "|", " | ".join(row.get(d, "?") or "yes" for d in DTYPES), "|")
    for dtype in DTYPES:
        asked = [row[dtype] for row in rows.values() if dtype in row]
        print(f"{dtype}: bounds for {asked.count('')} of {len(asked)}")


if __name__ == "__main__":
    main()
