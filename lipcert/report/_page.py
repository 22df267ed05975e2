"""Converts a document to one self-contained HTML page, which is also complete without scripts."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup

from lipcert.report._markdown import MARK, Document, slug
from lipcert.report._words import TEMPLATES

TEMPLATES.policies["json.dumps_kwargs"] = {"allow_nan": False}


def to_html(document: Document) -> str:
    """One page that contains its styles, pictures and scripts and loads nothing else."""
    reader = MarkdownIt("commonmark").enable("table")
    tokens = reader.parse(document.text.replace(MARK, ""))
    repeats: Counter[str] = Counter()
    tables, head, column = 0, [], 0
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            # The children contain the text without the backslashes of Markdown.
            name = slug("".join(child.content for child in tokens[i + 1].children or ()))
            token.attrSet("id", f"{name}-{repeats[name]}" if repeats[name] else name)
            repeats[name] += 1
        if token.type == "tr_open":
            column = 0
        if token.type == "th_open":
            head.append(tokens[i + 1].content)
        if token.type == "td_open":  # phones show a row as a list of names and values
            token.attrSet("data-name", head[column])
            column += 1
        if token.type == "table_open":
            head = []
            token.meta["kind"] = ("scroll ranking" if tokens[i + 4].content else "figures") if not tables else "scroll"
            tables += 1
    reader.add_render_rule("image", lambda *arguments: _picture(document, *arguments))
    reader.add_render_rule("table_open", lambda _, stream, i, *__: f'<div class="{stream[i].meta["kind"]}"><table>\n')
    reader.add_render_rule("table_close", lambda *_: "</table></div>\n")
    body = re.sub(
        r"<p>(<figure.*?</figure>)</p>", r"\1", reader.renderer.render(tokens, reader.options, {}), flags=re.S
    )
    body = body.replace(" %", "\u00a0%")
    page = TEMPLATES.get_template("report.html")
    return page.render(mark=Markup(MARK), title=document.title, body=Markup(body), curves=document.curves) + "\n"


def _picture(
    document: Document, renderer: RendererHTML, tokens: Sequence[Token], i: int, options: Any, env: Any
) -> str:
    name = str(tokens[i].attrs["src"])
    description = html.escape(renderer.renderInlineAsText(tokens[i].children, options, env))
    label = f'<svg role="img" aria-label="{description}"'
    stem = name.removesuffix(".svg")
    # Ids of different pictures on one page must not collide. Black and white become the page's colours.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{stem}-", document.pictures[name].replace("<svg", label, 1))
    svg = svg.replace("#000000", "currentColor").replace("#ffffff", "var(--page)")
    return f'<figure id="{stem}">\n{svg}\n</figure>'
