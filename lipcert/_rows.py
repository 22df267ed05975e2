"""What a row of a result file must be, for everything that reads one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

RIGOR = re.compile(r"deterministic|probabilistic\((?P<delta>\d+(\.\d+)?(e[+-]?\d+)?)\)")

# What reading and checking rows and summaries of a damaged file can raise.
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def check_kinds(row: Mapping[str, Any]) -> None:
    """Refuses a row whose entries are not of their kinds, whatever they say.

    Raises:
        ValueError: with the reason; others of ``DAMAGED`` where something is missing or of another kind.
    """
    whole = [row["index"], row["predicted"], *([row["label"]] if "label" in row else [])]
    if not all(type(number) is int and 0 <= number < 2**63 for number in whole):
        raise ValueError("index, prediction or label is no whole number")
    if not (isinstance(row["method"], str) and row["method"].isprintable()):
        raise ValueError("its method is no name")
    radius = row["radius"]
    if not (math.isfinite(radius) and radius >= 0):
        raise ValueError(f"the radius is {radius}")
    if not math.isfinite(row.get("seconds", 0)):
        raise ValueError("its time is no number")
    if not isinstance(row.get("correct", True), bool):
        raise ValueError("correct is neither true nor false")


def check(row: Mapping[str, Any], eps: float) -> None:
    """Refuses a row that is not what it says: above all nothing but a bound may be called certified.

    Args:
        row: one row.
        eps: the ε that was asked for.

    Raises:
        ValueError: with the reason; others of ``DAMAGED`` where something is missing or of another kind.
    """
    check_kinds(row)
    radius = row["radius"]
    if row["certified"] is not (radius > eps):
        raise ValueError(f"the radius {radius:g} and certified = {row['certified']} contradict each other at {eps:g}")
    if not RIGOR.fullmatch(row["rigor"]):
        raise ValueError(f"its rigor is {row['rigor']!r}, which is no certificate")
    distance = broken_at(row, eps)
    if distance < radius:
        raise ValueError(
            f"image {row['index']} is certified to {radius:g} and an attack broke it at {distance:g}: "
            "one of them is wrong, please report it"
        )


def broken_at(row: Mapping[str, Any], eps: float) -> float:
    """Distance of the nearest image with another prediction that an attack found; ε where only that is known."""
    distance = row.get("attack_distance")
    if distance is not None:
        return float(distance)
    return eps if row.get("attacked") else math.inf
