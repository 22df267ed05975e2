"""lipcert's coverage of timm's architectures, read from a table that is part of the package.

``benchmarks/make_zoo_table.py`` computes the table: it builds every architecture of timm without weights, captures it,
and checks its operations against the rules.
"""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lipcert.settings import LINEARISED, SINGLE

TABLE = Path(__file__).parents[1] / "assets" / "zoo.json"


@dataclass(frozen=True)
class Architecture:
    """One architecture of the installed timm.

    Attributes:
        name: the name for ``lipcert.load``.
        family: the timm file that registers it.
        checked: whether the table contains it; if not, the following attributes are unknown.
        parameters: number of parameters.
        reason: the operations that make the global bound infinite, and their places; "" if it is finite.
        log10: decimal logarithm of the global bound with random weights, if measured.
        linearised_reason: the operations without a remainder rule, which LoFAST and the anchored method need; "" if
            there are none.
        logits: whether the network, as timm builds it, gives one vector per image.
        attention: (class, its replacement by ``convert(attention="l2")``).
        norms: (class, its replacement by ``convert(norm="smooth")``).
        kept: (class, the reason why ``convert`` keeps it).
    """

    name: str
    family: str
    checked: bool = False
    parameters: int | None = None
    reason: str = ""
    log10: float | None = None
    linearised_reason: str = ""
    logits: bool = True
    attention: tuple[tuple[str, str], ...] = ()
    norms: tuple[tuple[str, str], ...] = ()
    kept: tuple[tuple[str, str], ...] = ()

    @property
    def covered(self) -> bool:
        """Whether there is a finite global bound from pixels to logits."""
        return self.checked and not self.reason

    @property
    def certificates(self) -> tuple[str, ...]:
        """The methods of ``lipcert.certify`` that work on the unchanged architecture."""
        if not self.covered or not self.logits:
            return ()
        return tuple(name for name in SINGLE if not (self.linearised_reason and name in LINEARISED))


def architectures(pattern: str | None = None, family: str | None = None) -> list[Architecture]:
    """The architectures of the installed timm, by name."""
    import timm  # takes seconds, too long for the completion of names

    import lipcert.networks  # noqa: F401  (adds its architectures to timm's registry)

    table, registered, selected = _table(), timm.list_models(), []
    for name in [pattern] if pattern in registered else registered:
        if pattern is not None and not matches(name, pattern):
            continue
        one = table.get(name) or Architecture(name, _family(name))
        if family is None or one.family == family:
            selected.append(one)
    return selected


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means a name: a part of it, or the whole of it with ``*``, ``?`` and ``[...]``."""
    return fnmatch.fnmatchcase(name, pattern) or pattern in name


def names() -> tuple[str, ...]:
    """The names of the architectures in the table, without importing timm."""
    return tuple(_table())


def families() -> tuple[str, ...]:
    """The timm files that register them, sorted."""
    return tuple(sorted({one.family for one in _table().values()}))


def _family(name: str) -> str:
    import timm

    return timm.models.model_entrypoint(name).__module__.rpartition(".")[2]


@lru_cache(maxsize=1)
def _table() -> dict[str, Architecture]:
    if not TABLE.is_file():
        return {}
    content = json.loads(TABLE.read_text())
    texts: list[str] = content["texts"]

    def pairs(indices: list[list[int]]) -> tuple[tuple[str, str], ...]:
        return tuple((texts[a], texts[b]) for a, b in indices)

    def row(line: list[Any]) -> Architecture:
        name, family, parameters, logits, log10, reason, linearised, attention, norms, kept = line
        columns = name, texts[family], True, parameters, texts[reason], log10, texts[linearised], bool(logits)
        return Architecture(*columns, pairs(attention), pairs(norms), pairs(kept))

    return {line[0]: row(line) for line in content["rows"]}
