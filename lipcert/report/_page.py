"""Converts a document to one self-contained HTML page, which is also complete without scripts."""

from __future__ import annotations

import base64
import html
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from lipcert.report._markdown import MARK, Document, slug

_STYLE = """
:root { color-scheme: light dark; --page: light-dark(#fff, #14171c); --text: light-dark(#1a1a1a, #e3e6ea);
  --soft: light-dark(#555, #a3abb5); --line: light-dark(#d9dce0, #353b44); --field: light-dark(#f4f6f8, #1d2229);
  --accent: light-dark(#0061a1, #6fb7ee); }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 52rem;
  margin: 0 auto; padding: 1rem 1.2rem 4rem; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.25rem; margin-top: 2.6rem; }
h3 { font-size: 1.05rem; margin-top: 1.8rem; } a { color: var(--accent); }
.scroll { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: middle; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line); }
th:empty { display: none; } th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
td[style], th[style] { font-variant-numeric: tabular-nums; } td[style*=right] { white-space: nowrap; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort] button::after { content: " ↓"; } th[aria-sort=ascending] button::after { content: " ↑"; }
td:first-child { min-width: 6.5rem; } td img { display: block; width: 4.5rem; image-rendering: pixelated; }
td[style*=right] img { margin-left: auto; }
.figures thead { display: none; }
.figures tbody { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; }
.figures table, .figures tr, .figures td { display: block; padding: 0; border: 0; }
.figures tr { background: var(--field); border-radius: .5rem; padding: .7rem .9rem; }
.figures strong { font-size: 2.1rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.figures td + td + td { color: var(--soft); } .ranking strong { font-size: 1.15rem; }
.ranking { width: fit-content; min-width: 100%; max-width: calc(100vw - 2.4rem); position: relative; left: 50%;
  transform: translateX(-50%); } .ranking table { font-size: .85rem; width: 100%; }
.ranking :is(td, th) { padding-right: .7rem; }
.ranking :is(td, th):last-child { text-align: left !important; white-space: normal; overflow-wrap: anywhere; }
.ranking td:last-child { min-width: 9.5rem; }
figure { margin: 1.2rem 0; max-width: 36rem; }
figure svg { width: 100%; height: auto; display: block; fill: currentColor; }
figure + p { color: var(--soft); font-size: .9rem; max-width: 36rem; }
figure input { width: 100%; margin: .4rem 0; accent-color: var(--accent); } figure output { font-size: .9rem; }
figure svg:has(+ input) { cursor: crosshair; touch-action: pan-y; }
pre { overflow-x: auto; background: var(--field); padding: .7rem; border-radius: .4rem; font-size: .85rem; }
@media (max-width: 32rem) { th, td { padding-right: .7rem; } table { font-size: .85rem; }
  .ranking td:first-child { overflow-wrap: anywhere; }
  .figures tbody { grid-template-columns: 1fr 1fr; gap: .5rem; } .figures strong { font-size: 1.6rem; } }
@media print { body { max-width: none; } figure, tr { break-inside: avoid; } figure input { display: none; } }
"""

# A click on a column sorts the table: numbers by value, texts alphabetically, with non-numbers last.
_SORT = """
for (const head of document.querySelectorAll("thead")) for (const [i, th] of [...head.rows[0].cells].entries()) {
  if (!th.textContent) continue;
  const button = document.createElement("button");
  button.append(...th.childNodes); th.append(button);
  button.onclick = () => {
    const up = th.getAttribute("aria-sort") === "descending", body = head.parentNode.tBodies[0];
    for (const other of head.rows[0].cells) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[i].textContent, number = text => text === "unbounded" ? Infinity
      : text.split("/").map(parseFloat).reduce((part, whole) => part / whole);
    const sign = up ? -1 : 1, compare = (a, b) => isNaN(number(a)) || isNaN(number(b))
      ? isNaN(number(a)) - isNaN(number(b)) || sign * b.localeCompare(a) : sign * (number(b) - number(a));
    body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
  };
}
"""

# A slider, or the pointer over the picture, shows every curve's share at one ε.
_CURVE = """
const data = JSON.parse(document.getElementById("curves").textContent);
const svg = document.querySelector("#curve svg"), [left, right, top, bottom] = data.axes;
const line = document.createElementNS(svg.namespaceURI, "line"), out = document.createElement("output");
const slider = Object.assign(document.createElement("input"), {type: "range", min: 0, max: 1, step: "any"});
slider.setAttribute("aria-label", "ε"); line.setAttribute("stroke", "currentColor");
line.setAttribute("y1", top); line.setAttribute("y2", bottom); svg.append(line); svg.after(slider, out);
const at = part => data.logarithmic ? data.start * (data.end / data.start) ** part
  : data.start + part * (data.end - data.start);
const percent = (values, eps, run) => (100 * values.filter(value => value > eps).length / run.images).toFixed(1) + " %";
function show() {
  const part = slider.valueAsNumber, eps = Math.abs(part - home) < 2e-3 ? asked : at(part);
  const x = left + part * (right - left);
  line.setAttribute("x1", x); line.setAttribute("x2", x);
  out.replaceChildren(...data.runs.map(run => Object.assign(document.createElement("div"), {textContent:
    `ε = ${eps.toPrecision(3)}: ${run.name}, certified ${percent(run.radii, eps, run)}`
    + (run.stopped && eps > run.eps ? ", not looked further" : "")
    + (run.broken ? `, not broken ${(100 * (run.right - run.broken.filter(d => d <= eps).length) / run.images)
      .toFixed(1)} %` : "")})));
}
svg.onpointermove = svg.onpointerdown = event => {
  const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
  slider.value = (x - left) / (right - left); show();
};
const asked = data.runs[0].eps;
const home = data.logarithmic ? Math.log(asked / data.start) / Math.log(data.end / data.start)
  : (asked - data.start) / (data.end - data.start);
slider.value = home; slider.oninput = show; show();
"""


def to_html(document: Document) -> str:
    """One page that contains its styles, pictures and scripts and loads nothing else.

    Args:
        document: markdown-it converts its Markdown to the body.
    """
    reader = MarkdownIt("commonmark").enable("table")
    tokens = reader.parse(document.text.replace(MARK, ""))
    seen: Counter[str] = Counter()
    tables = 0
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            # The children contain the text without the backslashes of Markdown.
            name = slug("".join(child.content for child in tokens[i + 1].children or ()))
            token.attrSet("id", f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
        if token.type == "table_open":
            token.meta["kind"] = ("scroll ranking" if tokens[i + 4].content else "figures") if not tables else "scroll"
            tables += 1
    reader.add_render_rule("image", lambda *given: _picture(document, *given))
    reader.add_render_rule("table_open", lambda _, shown, i, *__: f'<div class="{shown[i].meta["kind"]}"><table>\n')
    reader.add_render_rule("table_close", lambda *_: "</table></div>\n")
    body = re.sub(
        r"<p>(<figure.*?</figure>)</p>", r"\1", reader.renderer.render(tokens, reader.options, {}), flags=re.S
    )
    body = body.replace(" %", "\u00a0%")
    scripts = f"<script>{{{_SORT}}}</script>"
    if document.curves is not None:
        numbers = json.dumps(document.curves, allow_nan=False).replace("<", "\\u003c")
        scripts = (
            f'<script type="application/json" id="curves">{numbers}</script>\n<script>{{{_CURVE}}}</script>{scripts}'
        )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{MARK}\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(document.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}{scripts}\n"
        "</body>\n</html>\n"
    )


def _picture(
    document: Document, renderer: RendererHTML, tokens: Sequence[Token], i: int, options: Any, env: Any
) -> str:
    name = str(tokens[i].attrs["src"])
    description = html.escape(renderer.renderInlineAsText(tokens[i].children, options, env))
    content = document.pictures[name]
    if isinstance(content, bytes):
        return f'<img alt="{description}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
    label = f'<svg role="img" aria-label="{description}"'
    stem = name.removesuffix(".svg")
    # Ids of different pictures on one page must not collide. Black and white become the page's colours.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{stem}-", content.replace("<svg", label, 1))
    svg = svg.replace("#000000", "currentColor").replace("#ffffff", "var(--page)")
    return f'<figure id="{stem}">\n{svg}\n</figure>'
