"""Makes and checks the rows of a result file."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lipcert.norms import Rigor
from lipcert.numerics import EVIDENCE, WORDS
from lipcert.settings import DETERMINISTIC, NAMES, SINGLE, SMOOTHING, STAGED

if TYPE_CHECKING:
    from lipcert.certifier import Certificates
    from lipcert.inputs.data import Batch


_CLASSES = 32  # whose logits on the example images a summary keeps, at most

# The errors that reading and checking a damaged file can raise.
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def rows(
    batch: Batch, certificates: Certificates, seconds: float, hashes: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """The rows of one batch; ``hashes`` of its images, where they are known."""
    count, hashes = len(batch.indices), batch.hashes if hashes is None else hashes
    result = []
    for i, index in enumerate(batch.indices):
        predicted, margin = int(certificates.predicted[i]), float(certificates.margin[i])
        file = batch.files[i] if batch.files else None
        row: dict[str, Any] = {"index": index, "file": file, "image": hashes[i]}
        if batch.labels is not None:
            row["label"] = int(batch.labels[i])
        row["predicted"] = predicted
        if certificates.correct is not None:
            row["correct"] = bool(certificates.correct[i])
        row["margin"] = margin if math.isfinite(margin) else None
        row["radius"] = min(float(certificates.radius[i]), sys.float_info.max)
        row["certified"] = bool(certificates.certified[i])
        row["method"] = certificates.method[i]
        row["rigor"] = certificates.rigor[i]
        row["attacked"] = None if certificates.attacked is None else bool(certificates.attacked[i])
        distance = math.inf if certificates.attack_distance is None else float(certificates.attack_distance[i])
        row["attack_distance"] = distance if math.isfinite(distance) else None
        row["seconds"] = seconds / count
        result.append(row | certificates.entries(i))
    return result


def check(row: Mapping[str, Any]) -> None:
    """Refuses a row whose entries have a wrong type or range."""
    whole = [row["index"], row["predicted"], *([row["label"]] if "label" in row else [])]
    if not all(type(number) is int and 0 <= number < 2**63 for number in whole):
        raise ValueError("index, prediction or label is not a whole number")
    if not (isinstance(row["method"], str) and row["method"].isprintable()):
        raise ValueError("its method is not a name")
    if not (isinstance(row["rigor"], str) and row["rigor"].isprintable()):
        raise ValueError("its rigor is not text")
    radius, distance = row["radius"], row.get("attack_distance")
    if not (math.isfinite(radius) and radius >= 0):
        raise ValueError(f"the radius is {radius}")
    if not (distance is None or distance >= 0):
        raise ValueError(f"the distance of an attack is {distance}")
    if not math.isfinite(row.get("seconds", 0)) or not math.isfinite(row.get("margin") or 0):
        raise ValueError("its time or margin is not a number")
    if not all(row.get(name) in (None, *WORDS) for name in EVIDENCE):
        raise ValueError(f"its {', '.join(EVIDENCE)} are neither {' nor '.join(WORDS)}")
    drawn = [row.get(name, 0) for name in ("count", "samples", "selected", "seed")]
    if not all(type(number) is int and 0 <= number < 2**64 for number in drawn):
        raise ValueError("its draws are not whole numbers")
    flags = [row["certified"], row.get("correct", True), row.get("attacked") or False, row.get("abstained", False)]
    if not all(isinstance(flag, bool) for flag in flags):
        raise ValueError("certified, correct, attacked or abstained is neither true nor false")


def contradiction(row: Mapping[str, Any], eps: float, method: object) -> str | None:
    """Why a row cannot be true for any model. In particular, only a bound may be called certified."""
    radius, row_method, distance = row["radius"], row["method"], row.get("attack_distance")
    if row["certified"] is not (radius > eps):
        return f"the radius {radius:g} and certified = {row['certified']} contradict each other at {eps:g}"
    right = row["predicted"] == row.get("label") and not row.get("abstained", False)
    if "label" in row and row.get("correct") is not right:
        return f"correct = {row.get('correct')}, label {row['label']} and prediction {row['predicted']} contradict"
    if row_method == SMOOTHING == method:
        return _contradiction_of_draws(row)
    if row_method not in (SINGLE if method == STAGED else {*NAMES} & {method}):
        return f"its method is {row_method!r}, which a run of method {method!r} does not use"
    if "holds_for" in row:
        return f"it holds for {row['holds_for']!r}, but method {row_method} certifies the network itself"
    if Rigor.parse(row["rigor"]) is None or (row_method in DETERMINISTIC and row["rigor"] != "deterministic"):
        return f"its rigor is {row['rigor']!r}, which method {row_method} does not give"
    if distance is not None and row.get("attacked") is not (distance <= eps) and not math.isclose(distance, eps):
        return f"attacked = {row.get('attacked')} and a distance of {distance:g} contradict each other at {eps:g}"
    if broken_at(row, eps) < radius:
        return (
            f"image {row['index']} is certified to {radius:g} and an attack broke it at {broken_at(row, eps):g}: "
            "one of them is wrong, please report it"
        )
    return None


def _contradiction_of_draws(row: Mapping[str, Any]) -> str | None:
    """Like :func:`contradiction`, for a row of a smoothed classifier."""
    if not re.fullmatch(r"smoothed\([\d.e+-]+( at [\w.]+)?\)", str(row.get("holds_for"))):
        return f"it holds for {row.get('holds_for')!r}, but method {SMOOTHING} certifies a smoothed classifier"
    if not (rigor := Rigor.parse(row["rigor"])) or not rigor.delta:
        return f"its rigor is {row['rigor']!r}, but draws of noise make a certificate probabilistic"
    if row.get("abstained") is not (row["radius"] == 0):
        return f"abstained = {row.get('abstained')} and the radius {row['radius']:g} contradict each other"
    if not 0 <= row.get("count", -1) <= row.get("samples", -1):
        return f"it counts {row.get('count')} of {row.get('samples')} draws"
    return None


def broken_at(row: Mapping[str, Any], eps: float) -> float:
    """Distance of the nearest image with another prediction that an attack found; ε if no distance was recorded."""
    distance = row.get("attack_distance")
    if distance is not None:
        return float(distance)
    return eps if row.get("attacked") else math.inf


def thinned(logits: Any) -> list[list[Any]]:
    """Logits of a few classes, which tell networks apart, with six digits; None for infinite ones."""
    some = [one[:: -(-len(one) // _CLASSES) or 1] for one in logits or ()]
    return [[float(f"{z:.6g}") if z is not None and math.isfinite(z) else None for z in one] for one in some]


def same_examples(claimed: Any, actual: Any, tolerance: float = 0.02) -> bool:
    """Whether logits on the example images are those of one network, up to a share of the largest; fits bfloat16.

    What all logits of an image share decides no prediction, and is taken off, lest it widen the tolerance.
    """
    claimed, actual = ([_centred(one) for one in thinned(each)] for each in (claimed, actual))
    numbers = [abs(z) for one in actual for z in one if z is not None]
    return same(claimed, actual, 0.0, tolerance * max(numbers, default=0.0))


def _centred(logits: list[Any]) -> list[Any]:
    """The logits of an image minus their mean; a single one as it is."""
    finite = [z for z in logits if z is not None]
    mean = math.fsum(finite) / len(finite) if len(finite) > 1 else 0.0
    return [None if z is None else z - mean for z in logits]


def same(claimed: Any, actual: Any, relative: float = 1e-9, absolute: float = 0.0) -> bool:
    """Whether two JSON values are equal, numbers up to a tolerance."""
    if isinstance(claimed, dict) and isinstance(actual, dict):
        return claimed.keys() == actual.keys() and all(same(claimed[k], actual[k], relative, absolute) for k in actual)
    if isinstance(claimed, list) and isinstance(actual, list):
        pairs = zip(claimed, actual, strict=False)
        return len(claimed) == len(actual) and all(same(a, b, relative, absolute) for a, b in pairs)
    if {type(claimed), type(actual)} <= {int, float}:
        return math.isclose(claimed, actual, rel_tol=relative, abs_tol=absolute)
    return type(claimed) is type(actual) and bool(claimed == actual)
