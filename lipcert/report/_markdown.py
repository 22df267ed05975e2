"""GitHub-flavoured Markdown: the form in which a report is built, and from which its page is made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Stands in every file that a report wrote, so that no other file is ever written over.
MARK = "<!-- written by lipcert report -->"


@dataclass
class Document:
    """Text with pictures.

    Attributes:
        title: of the window.
        text: Markdown, in which a picture is a link to ``<name>``.
        pictures: names with their content: text of an SVG file, or bytes of a PNG file.
        curves: numbers behind the picture ``curve.svg``, as JSON takes them; None where there is no such picture.
    """

    title: str
    text: str
    pictures: dict[str, str | bytes] = field(default_factory=dict)
    curves: dict[str, Any] | None = None


class Markdown(str):
    """Text that is Markdown already: tables do not escape it."""


def escaped(text: str) -> str:
    """Text that Markdown takes as it is: file and class names may hold any character."""
    if isinstance(text, Markdown):
        return text
    return "".join(f"\\{c}" if c in r"\`*_[]<>|#" else c for c in " ".join(text.split()))


def heading(level: int, text: str) -> str:
    """A heading of level 1 to 3."""
    return f"{'#' * level} {escaped(text)}"


def bold(text: str) -> Markdown:
    """A figure that stands out."""
    return Markdown(f"**{escaped(text)}**")


def link(text: str) -> Markdown:
    """A link to the heading of that text."""
    return Markdown(f"[{escaped(text)}](#{slug(text)})")


def picture(name: str, description: str) -> Markdown:
    """A picture of a document, with what it shows in words."""
    return Markdown(f"![{escaped(description)}](<{name}>)")


def items(texts: Sequence[str]) -> str:
    """A list."""
    return "\n".join(f"- {escaped(text)}" for text in texts)


def code(text: str) -> str:
    """Lines as they are: a command, or a plot in characters."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """Rows under column names; columns after the first are set to the right where ``numbers`` says so."""
    rule = [":--", *(["--:" if numbers else ":--"] * (len(columns) - 1))]
    lines = [[escaped(cell) for cell in row] for row in (columns, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def slug(text: str) -> str:
    """The name that a heading gets as the target of links, as on GitHub."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
