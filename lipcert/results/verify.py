"""Whether the rows of a result file stand: they are computed again from the model and the images."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lipcert.artifact import weights_hash
from lipcert.certifier import METHODS, Certifier
from lipcert.certifier._certifier import LINEARISED
from lipcert.data import Images
from lipcert.errors import InputError
from lipcert.model import Model
from lipcert.results._reading import Run
from lipcert.results._rows import contradiction, delta, rows

# Rounding differs between machines and with the images of a batch; it changes a radius by far less than this.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Verdict:
    """What came of one row.

    Attributes:
        index: of the image in the data set.
        objection: why the row does not stand; None if it does.
    """

    index: int
    objection: str | None


def check_model(run: Run, model: Model) -> None:
    """Refuses a model that the rows are not about.

    Raises:
        InputError: the weights or the surgery differ.
    """
    claimed = run.summary["model"]
    if claimed.get("weights_hash") != weights_hash(model):
        raise InputError(f"{run.path} holds rows about other weights; give the model that was certified")
    if claimed.get("recipe") != json.loads(json.dumps(model.recipe)):
        raise InputError(f"{run.path} holds rows about other surgery; give the model that was certified")


def sample(run: Run, count: int | None) -> list[Mapping[str, Any]]:
    """So many rows, chosen at random but the same in every call; all of them for None."""
    if count is None or count >= len(run):
        return list(run.rows)
    return [run.rows[i] for i in sorted(random.Random(0).sample(range(len(run)), count))]


def miscounted(run: Run) -> str | None:
    """What the summary counts otherwise than the rows; None if it agrees with them."""
    own, claimed = run.counts(), run.summary.get("counts")
    for name in ("images", "certified", "correct", "certified_correct"):
        stated = claimed.get(name) if isinstance(claimed, dict) else None
        if own.get(name) != stated:
            return f"the summary counts {stated} {name.replace('_', ' and ')}, the rows {own.get(name)}"
    return None


def verify(
    run: Run,
    model: Model,
    images: Images,
    count: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Iterator[Verdict]:
    """Computes rows again. One stands if its claims follow: no larger radius, no certificate that is not found again.

    Attacks are not run again: what they found is no certificate.

    Args:
        run: from :func:`lipcert.results.read_run`.
        model: the model that was certified.
        images: the whole data set that was certified.
        count: how many rows, chosen at random; None for all.
        progress: called with (rows computed, rows in all).

    Yields:
        A verdict a row.

    Raises:
        InputError: another model, ε or method than can be used, or an image that is not there.
    """
    check_model(run, model)
    wanted = {row["index"]: row for row in sample(run, count)}
    kind = {key: run.summary[key] for key in ("dtype", "rigor", "at")}
    passes = run.summary.get("passes")
    certifier = Certifier(model, run.summary["eps"], run.summary["method"], passes=passes, **kind)
    order = range(images.total) if images.total is not None else None
    missing = [] if order is None else [index for index in wanted if index not in order]
    if missing:
        raise InputError(f"{run.path} has a row for image {missing[0]}, and the data has {images.total} images")
    skip = _AllBut(frozenset(wanted))
    others: dict[str, Certifier] = {}
    done = 0
    for batch in images.batches(certifier.together, skip=skip):
        for i, found in enumerate(rows(batch, certifier.run(batch.images, batch.labels), 0.0)):
            claimed = wanted[found["index"]]
            method = claimed["method"]
            if method != found["method"] and method in METHODS:  # an attack had made the stronger ones needless
                if method not in others:
                    counted = passes if method in LINEARISED else None
                    others[method] = Certifier(model, certifier.eps, method, passes=counted, **kind)
                one = batch.split(i)[1].split(1)[0]
                (found,) = rows(one, others[method].run(one.images, one.labels), 0.0)
            done += 1
            yield Verdict(found["index"], _objection(claimed, found, certifier.eps))
        if progress is not None:
            progress(done, len(wanted))
    if done < len(wanted):
        raise InputError(f"{run.path} has {len(wanted)} rows to verify, and the data has images for {done} of them")


class _AllBut(frozenset[int]):
    """Everything but some numbers, for ``in``."""

    def __contains__(self, index: object) -> bool:
        return not super().__contains__(index)


def _objection(claimed: Mapping[str, Any], found: Mapping[str, Any], eps: float) -> str | None:
    for name in ("label", "predicted"):
        if name in claimed and claimed[name] != found.get(name):
            return f"{name} {claimed[name]} is claimed and {found.get(name)} found"
    if "correct" in claimed and claimed["correct"] is not (claimed["predicted"] == claimed.get("label")):
        return "the row contradicts itself about being correct"
    if reason := contradiction(claimed, eps):
        return reason
    if not _close(claimed.get("margin"), found["margin"]):
        return f"margin {claimed.get('margin')} is claimed and {found['margin']} found"
    if claimed["radius"] > found["radius"] * (1 + TOLERANCE):
        return f"radius {claimed['radius']:.9g} is claimed and only {found['radius']:.9g} found"
    if claimed["radius"] > 0 and not (delta(claimed["rigor"]) or 0.0) >= (delta(found["rigor"]) or 0.0):
        return f"{claimed['rigor']} is claimed and {found['rigor']} found"
    return None


def _close(claimed: Any, found: float | None) -> bool:
    if claimed is None or found is None:
        return claimed is found
    return math.isclose(claimed, found, rel_tol=1e-6, abs_tol=1e-9)
