"""Whether the rows of a result file stand: they are computed again from the model and the images."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipcert._rows import DAMAGED, RIGOR, check_kinds
from lipcert.artifact import weights_hash
from lipcert.certifier import METHODS, Certifier
from lipcert.certifier._certifier import LINEARISED
from lipcert.data import Images
from lipcert.errors import InputError
from lipcert.model import Model
from lipcert.results import Tally, rows, summary_path

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


@dataclass(frozen=True)
class Claims:
    """A result file and its summary, as they were read.

    Attributes:
        path: the file.
        summary: what the run was about.
        rows: its rows, in the order of the file.
    """

    path: Path
    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @staticmethod
    def read(path: Path) -> Claims:
        """Reads a result file, and the summary beside it.

        Raises:
            InputError: one of them is missing or damaged, or there are no rows.
        """
        try:
            summary = json.loads(summary_path(path).read_text(encoding="utf-8"))
            found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for row in found:
                check_kinds(row)
            Tally(found)
            known = [summary[key] for key in ("eps", "method", "dtype", "rigor", "at", "model", "data")]
            if not found or not all(isinstance(part, dict) for part in known[5:]):
                raise ValueError("there are no rows" if not found else "the summary is damaged")
            if len({row["index"] for row in found}) < len(found):
                raise ValueError("there are two rows for one image")
        except (OSError, *DAMAGED) as error:
            raise InputError(f"{path} is no result file with its summary beside it: {error}") from error
        return Claims(path, summary, found)

    def check_model(self, model: Model) -> None:
        """Refuses a model that the rows are not about.

        Raises:
            InputError: the weights or the surgery differ.
        """
        claimed = self.summary["model"]
        if claimed.get("weights_hash") != weights_hash(model):
            raise InputError(f"{self.path} holds rows about other weights; give the model that was certified")
        if claimed.get("recipe") != json.loads(json.dumps(model.recipe)):
            raise InputError(f"{self.path} holds rows about other surgery; give the model that was certified")

    def sample(self, count: int | None) -> list[Mapping[str, Any]]:
        """So many rows, chosen at random but the same in every call; all of them for None."""
        if count is None or count >= len(self.rows):
            return list(self.rows)
        return [self.rows[i] for i in sorted(random.Random(0).sample(range(len(self.rows)), count))]

    def miscounted(self) -> str | None:
        """What the summary counts otherwise than the rows; None if it agrees with them."""
        own, claimed = Tally(self.rows).counts(), self.summary.get("counts")
        for name in ("images", "certified", "correct", "certified_correct"):
            stated = claimed.get(name) if isinstance(claimed, dict) else None
            if own.get(name) != stated:
                return f"the summary counts {stated} {name.replace('_', ' and ')}, the rows {own.get(name)}"
        return None


def verify(
    claims: Claims,
    model: Model,
    images: Images,
    count: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Iterator[Verdict]:
    """Computes rows again. One stands if its claims follow: no larger radius, no certificate that is not found again.

    Attacks are not run again: what they found is no certificate.

    Args:
        claims: from :meth:`Claims.read`.
        model: the model that was certified.
        images: the whole data set that was certified.
        count: how many rows, chosen at random; None for all.
        progress: called with (rows computed, rows in all).

    Yields:
        A verdict a row.

    Raises:
        InputError: another model, ε or method than can be used, or an image that is not there.
    """
    claims.check_model(model)
    wanted = {row["index"]: row for row in claims.sample(count)}
    kind = {key: claims.summary[key] for key in ("dtype", "rigor", "at")}
    passes = claims.summary.get("passes")
    certifier = Certifier(model, claims.summary["eps"], claims.summary["method"], passes=passes, **kind)
    order = range(images.total) if images.total is not None else None
    missing = [] if order is None else [index for index in wanted if index not in order]
    if missing:
        raise InputError(f"{claims.path} has a row for image {missing[0]}, and the data has {images.total} images")
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
        raise InputError(f"{claims.path} has {len(wanted)} rows to verify, and the data has images for {done} of them")


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
    if claimed["certified"] is not (claimed["radius"] > eps):
        return "the row contradicts itself about being certified"
    if not _close(claimed.get("margin"), found["margin"]):
        return f"margin {claimed.get('margin')} is claimed and {found['margin']} found"
    if claimed["radius"] > found["radius"] * (1 + TOLERANCE):
        return f"radius {claimed['radius']:.9g} is claimed and only {found['radius']:.9g} found"
    if claimed["radius"] > 0 and not _delta(claimed["rigor"]) >= _delta(found["rigor"]):
        return f"{claimed['rigor']} is claimed and {found['rigor']} found"
    return None


def _close(claimed: Any, found: float | None) -> bool:
    if claimed is None or found is None:
        return claimed is found
    return math.isclose(claimed, found, rel_tol=1e-6, abs_tol=1e-9)


def _delta(rigor: Any) -> float:
    """The failure probability that a rigor allows; NaN for what is none."""
    form = RIGOR.fullmatch(str(rigor))
    return math.nan if form is None else float(form["delta"] or 0)
