"""A report as a list of blocks, and two ways to write it down: one HTML page, or Markdown with figures beside it."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Stands in every file that a report wrote, so that no other file is ever written over.
MARK = "<!-- written by lipcert report -->"


@dataclass(frozen=True)
class Heading:
    """A heading of level 1, 2 or 3."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list of paragraphs."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Lines as they are: a command, or a plot in characters."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of text under column names; columns after the first are set to the right where ``numbers`` says so."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: bool = True


@dataclass(frozen=True)
class Figure:
    """An ``<svg>`` element, with a name for a file of its own and a caption."""

    name: str
    svg: str
    caption: str


Block = Heading | Text | Items | Code | Table | Figure

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 46rem;
  margin: 0 auto; padding: 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
h3 { font-size: 1.05rem; margin-top: 1.6rem; }
figure { margin: 1.2rem 0; } figure svg { width: 100%; height: auto; } figcaption { font-size: .9rem; color: #444; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #ddd; }
.facts td { overflow-wrap: anywhere; } .facts td:first-child { min-width: 8rem; }
.numbers th:not(:first-child), .numbers td:not(:first-child) { text-align: right; white-space: nowrap; }
pre { overflow-x: auto; background: #f5f5f5; padding: .6rem; font-size: .85rem; }
@media (max-width: 30rem) {
  table { font-size: .8rem; } th, td { padding-right: .5rem; } .facts td:first-child { min-width: 6rem; }
}
@media print { body { max-width: none; } figure, tr { break-inside: avoid; } }
"""


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One page that needs nothing but itself: styles and figures are in it, and no scripts.

    Args:
        title: of the window.
        blocks: what stands on the page.

    Returns:
        An HTML document.
    """
    body = "\n".join(_html(block, f"b{number}-") for number, block in enumerate(blocks))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{MARK}\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def to_markdown(blocks: Sequence[Block], prefix: str = "") -> str:
    """GitHub-flavoured Markdown; figures are links to ``<prefix><name>.svg``.

    Args:
        blocks: what stands in the text.
        prefix: what the names of the figures' files start with.

    Returns:
        The text.
    """
    return "\n\n".join([*(_markdown(block, prefix) for block in blocks), MARK]) + "\n"


def _html(block: Block, prefix: str) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Items):
        return "<ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in block.texts) + "</ul>"
    if isinstance(block, Code):
        return f"<pre>{html.escape(block.text)}</pre>"
    if isinstance(block, Figure):
        label = f'<svg role="img" aria-label="{html.escape(block.caption)}"'
        # Names inside one figure must not meet those of another on the page.
        svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", block.svg.replace("<svg", label, 1))
        return f"<figure>\n{svg}\n<figcaption>{html.escape(block.caption)}</figcaption>\n</figure>"
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in block.columns)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>\n" for row in block.rows)
    kind = "numbers" if block.numbers else "facts"
    head = f"<thead><tr>{head}</tr></thead>\n" if any(block.columns) else ""
    return f'<div class="wide"><table class="{kind}">\n{head}<tbody>\n{rows}</tbody></table></div>'


def _markdown(block: Block, prefix: str) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_escaped(block.text)}"
    if isinstance(block, Text):
        return _escaped(block.text)
    if isinstance(block, Items):
        return "\n".join(f"- {_escaped(text)}" for text in block.texts)
    if isinstance(block, Code):
        return "\n".join(f"    {line}" for line in block.text.splitlines())
    if isinstance(block, Figure):
        caption = _escaped(block.caption)
        return f"![{caption}](<{prefix}{block.name}.svg>)\n\n{caption}"
    columns = len(block.columns)
    rule = [":--", *(["--:" if block.numbers else ":--"] * (columns - 1))]
    lines = [[_escaped(cell) for cell in row] for row in (block.columns, *block.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def _escaped(text: str) -> str:
    """Text that Markdown takes as it is: file and class names may hold any character."""
    return "".join(f"\\{c}" if c in r"\`*_[]<>|#" else c for c in " ".join(text.split()))
