"""GitHub-flavoured Markdown: the format in which a report is built before it becomes a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Every file of a report contains this mark. Files without it are never overwritten.
MARK = "<!-- written by lipcert report -->"


@dataclass
class Document:
    """Text with pictures: SVG files by name, and the numbers of ``curve.svg``, for JSON, if there is this picture."""

    title: str
    text: str
    pictures: dict[str, str] = field(default_factory=dict)
    curves: dict[str, Any] | None = None


class Markdown(str):
    """Text that is already Markdown and must not be escaped."""


def escaped(text: str) -> str:
    """Escapes text for Markdown: file and class names may contain any character."""
    if isinstance(text, Markdown):
        return text
    return "".join(f"\\{c}" if c in r"\`*_[]<>|#" else c for c in " ".join(text.split()))


def heading(level: int, text: str) -> str:
    """A heading of level 1 to 3."""
    return f"{'#' * level} {escaped(text)}"


def bold(text: str) -> Markdown:
    """Bold text."""
    return Markdown(f"**{escaped(text)}**")


def link(text: str) -> Markdown:
    """A link to the heading with this text."""
    return Markdown(f"[{escaped(text)}](#{slug(text)})")


def picture(name: str, description: str) -> Markdown:
    """A picture of a document, with a description."""
    return Markdown(f"![{escaped(description)}](<{name}>)")


def items(texts: Sequence[str]) -> str:
    """A list."""
    return "\n".join(f"- {escaped(text)}" for text in texts)


def code(text: str) -> str:
    """A code block: a command, or a plot in characters."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """A table; with ``numbers``, all columns after the first are right-aligned."""
    rule = [":--", *(["--:" if numbers else ":--"] * (len(columns) - 1))]
    lines = [[escaped(cell) for cell in row] for row in (columns, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def slug(text: str) -> str:
    """The link target of a heading, as on GitHub."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
