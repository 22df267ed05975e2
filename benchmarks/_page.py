"""Parts of the pages that scripts write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def section(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], text: str) -> str:
    return "\n".join([f"## {title}\n", *table(columns, rows), *(["", text] if text else [""])])


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in [columns, ["---"] * len(columns), *rows]]


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
