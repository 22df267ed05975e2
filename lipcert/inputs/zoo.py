"""lipcert's coverage of timm's architectures, read from a table that is part of the package.

``benchmarks/make_zoo_table.py`` computes the table: it builds every architecture of timm without weights, captures it,
and checks its operations against the rules.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lipcert.settings import LINEARISED, SINGLE

TABLE = Path(__file__).parents[1] / "assets" / "zoo.json"
# By benchmarks/zoo_rounding.py, of the smallest architecture of every file: why a format has no bounds, or "".
ROUNDING = TABLE.with_name("rounding.json")


@dataclass(frozen=True)
class Architecture:
    """One architecture of timm."""

    name: str
    family: str  # the timm file that registers it
    parameters: int
    reason: str  # the operations that make the global bound infinite, and their places; "" if it is finite
    linearised_reason: str  # the operations without a remainder rule, which LoFAST and the anchored method need
    logits: bool  # whether the network, as timm builds it, gives one vector per image
    attention: tuple[tuple[str, str], ...]  # (class, its replacement by convert(attention="l2"))
    norms: tuple[tuple[str, str], ...]  # (class, its replacement by convert(norm="smooth"))
    kept: tuple[tuple[str, str], ...]  # (class, the reason why convert keeps it)

    @property
    def covered(self) -> bool:
        """Whether there is a finite global bound from pixels to logits."""
        return not self.reason

    @property
    def certificates(self) -> tuple[str, ...]:
        """The methods of ``lipcert.certify`` that work on the unchanged architecture."""
        if not self.covered or not self.logits:
            return ()
        return tuple(name for name in SINGLE if not (self.linearised_reason and name in LINEARISED))


@lru_cache(maxsize=1)
def architectures() -> dict[str, Architecture]:
    """The architectures in the table by name."""
    content = json.loads(TABLE.read_text())
    texts: list[str] = content["texts"]

    def pairs(indices: list[list[int]]) -> tuple[tuple[str, str], ...]:
        return tuple((texts[a], texts[b]) for a, b in indices)

    def row(line: list[Any]) -> Architecture:
        name, family, parameters, logits, reason, linearised, attention, norms, kept = line
        columns = name, texts[family], parameters, texts[reason], texts[linearised], bool(logits)
        return Architecture(*columns, pairs(attention), pairs(norms), pairs(kept))

    return {line[0]: row(line) for line in content["rows"]}


@lru_cache(maxsize=1)
def roundings() -> dict[str, tuple[str, dict[str, str]]]:
    """By file of timm: its smallest architecture, and for each format why there are no bounds on rounding, or ""."""
    rows: dict[str, dict[str, str]] = json.loads(ROUNDING.read_text())
    return {row.pop("family"): (name, row) for name, row in rows.items()}
