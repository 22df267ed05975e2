"""Statistics over rows."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from lipcert.norms import Rigor
from lipcert.numerics import EVIDENCE, WORDS


def wilson(part: int, whole: int) -> tuple[float, float]:
    """Wilson's 95 % score interval (Wilson 1927) for a proportion estimated by ``part`` of ``whole``.

    Its centre is (p + z²/2n) / (1 + z²/n) and its half-width z √(p(1−p)/n + z²/4n²) / (1 + z²/n), for p = part/whole,
    n = whole and z = 1.96. It contains the proportions that a test with the normal approximation does not reject; all
    of them for n = 0.
    """
    if not whole:
        return 0.0, 1.0
    p, z = part / whole, 1.959963984540054
    centre, scale = p + z * z / (2 * whole), 1 + z * z / whole
    width = z * math.sqrt(p * (1 - p) / whole + z * z / (4 * whole**2))
    return max(0.0, min(p, (centre - width) / scale)), min(1.0, max(p, (centre + width) / scale))


def interval(part: int, whole: int) -> str:
    """:func:`wilson` as text: ``8.7–32.0 %``."""
    low, high = wilson(part, whole)
    return f"{100 * low:.1f}–{100 * high:.1f} %"


def share(part: int, whole: int, sampled: bool = True) -> str:
    """A count with its percentage and, for a sample, 95 % interval: ``7 of 40 (17.5 %, 95 % CI 8.7–32.0 %)``."""
    if not whole:
        return "0 of 0"
    return f"{part} of {whole} ({100 * part / whole:.1f} %{f', 95 % CI {interval(part, whole)}' if sampled else ''})"


class Tally:
    """Counts and shares over rows, one mapping per image."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        self.rows = list(rows)
        self.pace: float | None = None  # seconds that the next image may take; None if not known
        self.left = 0  # images of the next block, if the run stopped before it for want of time
        self.seconds: float | None = None  # that the run took by the clock, over all its starts; None if not known

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: Mapping[str, Any]) -> None:
        """Counts one more row."""
        self.rows.append(row)

    @property
    def labelled(self) -> bool:
        """Whether the true classes are known."""
        return any("correct" in row for row in self.rows)

    @property
    def correct(self) -> int:
        """The number of correctly predicted images; 0 without labels."""
        return sum(row.get("correct", False) for row in self.rows)

    @property
    def certified(self) -> int:
        """The number of images certified at the ε of the run, whether or not the prediction is correct."""
        return sum(row["certified"] for row in self.rows)

    @property
    def certified_correct(self) -> int:
        """The number of images that are correct and certified at the ε of the run; 0 without labels."""
        return sum(row["certified"] and row.get("correct", False) for row in self.rows)

    def certified_at(self, eps: float) -> int:
        """The number of images with a radius larger than ``eps``, correct ones if labels are known."""
        return sum(row.get("correct", True) and row["radius"] > eps for row in self.rows)

    @property
    def attacked(self) -> bool:
        """Whether any image was attacked."""
        return any(row.get("attacked") is not None for row in self.rows)

    @property
    def broken(self) -> int:
        """The number of predictions that an attack changed within the ε of the run."""
        return sum(row.get("attacked") is True for row in self.rows)

    @property
    def withstood(self) -> int:
        """The number of correct images that no attack broke within the ε of the run; 0 without labels."""
        return sum(row.get("attacked") is False and row.get("correct", False) for row in self.rows)

    @property
    def accuracy(self) -> float | None:
        """Share of correctly predicted images; None without labels."""
        return self.correct / len(self) if self.labelled else None

    @property
    def certified_accuracy(self) -> float | None:
        """Share of images that are correct and certified at ε; None without labels."""
        return self.certified_correct / len(self) if self.labelled else None

    @property
    def accuracy_under_attack(self) -> float | None:
        """Share of correct images that no attack broke within ε; None without labels, or if not all were attacked."""
        every = all(row.get("attacked") is not None for row in self.rows)
        return self.withstood / len(self) if self.labelled and every else None

    @property
    def median_radius(self) -> float | None:
        """Lower median of the radii of correct images, or of all images without labels; None without images."""
        radii = [row["radius"] for row in self.rows if row.get("correct", True)]
        return statistics.median_low(radii) if radii else None

    @property
    def cpu_seconds(self) -> float:
        """Computing time of all images, in all processes and threads."""
        return float(sum(row.get("seconds", 0.0) for row in self.rows))

    @property
    def methods(self) -> Counter[str]:
        """The number of images whose radius each method gave."""
        return Counter(row["method"] for row in self.rows)

    @property
    def evidence(self) -> dict[str, dict[str, int]]:
        """Of how many images norms, rounding and sampling are ``proved``, ``checked`` or ``assumed``."""
        return {name: dict(Counter(row[name] for row in self.rows if row.get(name))) for name in EVIDENCE}

    @property
    def words(self) -> dict[str, str | None]:
        """The weakest word of :attr:`evidence` for each."""
        return {name: max(found, key=WORDS.index, default=None) for name, found in self.evidence.items()}

    @property
    def weakest(self) -> Rigor:
        """The guarantee of the radius with the largest failure probability."""
        found = (Rigor.parse(text) for text in {row["rigor"] for row in self.rows})
        return max((rigor for rigor in found if rigor), key=lambda rigor: rigor.delta, default=Rigor(0.0))

    @property
    def delta(self) -> float:
        """The largest failure probability of one radius; 0 if all are deterministic."""
        return self.weakest.delta

    @property
    def samples(self) -> int:
        """The number of noise draws over all images, both for estimation and for selecting a class; 0 without noise."""
        return sum(row.get("samples", 0) + row.get("selected", 0) for row in self.rows)

    @property
    def abstained(self) -> int:
        """The number of images for which the smoothed classifier abstained."""
        return sum(row.get("abstained", False) for row in self.rows)

    def counts(self) -> dict[str, Any]:
        """The counts for the summary; those about labels only if there are labels."""
        counts: dict[str, Any] = {"images": len(self), "certified": self.certified}
        if self.labelled:
            counts |= {
                "correct": self.correct,
                "certified_correct": self.certified_correct,
                "accuracy": self.accuracy,
                "certified_accuracy": self.certified_accuracy,
            }
        if self.attacked:
            counts["attacked"] = self.broken
        if self.accuracy_under_attack is not None:
            counts["accuracy_under_attack"] = self.accuracy_under_attack
        if self.samples:
            counts |= {"abstained": self.abstained, "samples": self.samples}
        return counts | {
            "median_radius": self.median_radius,
            "methods": dict(self.methods),
            **self.evidence,
            "cpu_seconds": self.cpu_seconds,
        }
