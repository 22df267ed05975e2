"""The layers of the package, read from its import statements: draws docs/architecture.svg.

python -m benchmarks.architecture
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"

# From top to bottom, with the place of each unit from left to right. A unit may import what stands in a lower layer, or
# to its right in its own layer. A package is a unit.
LAYERS: dict[str, dict[str, float]] = {
    "command line": {"cli": 1, "lipcert": 3},
    "result files": {"report": 0, "results": 1},
    "improvements": {"training": 2.5, "certvit": 3.5},
    "certificates": {"certifier": 0.9, "smoothing": 4.5},
    "analysis": {"roundoff": 0, "bounds": 1},
    "models, settings": {"inputs": 1.3, "networks": 2.4, "settings": 3.5, "attacks": 5.5},
    "structure": {"surgery": 1, "graph": 2, "norms": 2.95, "denoisers": 3.9, "model": 4.8},
    "numerics": {"numerics": 2.3},
}
# Modules directly below ``lipcert``, by the unit that they belong to.
MODULES = {"__main__": "cli", "assets": "inputs", "errors": "numerics"}


class Import(NamedTuple):
    """One name that a module takes from another: ``from target import name``; the name is empty for whole modules."""

    module: str
    target: str
    name: str


@cache
def sources() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    found = {}
    for folder, package in (("lipcert", "lipcert"), ("cli", "lipcert.cli")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    """All imports of the package's own modules by each other, those inside functions included."""
    return tuple(found for module, path in sources().items() for found in _imports_of(module, path))


def _imports_of(module: str, path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, "") for alias in node.names if alias.name in sources())
        elif isinstance(node, ast.ImportFrom):
            source = _source(module, node)
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                if whole in sources():
                    yield Import(module, whole, "")
                elif source in sources():
                    yield Import(module, source, alias.name)


def _source(module: str, node: ast.ImportFrom) -> str:
    """The module after ``from``, by its whole name."""
    depth = node.level - (sources()[module].name == "__init__.py")
    package = module.split(".")[: -depth or None] if node.level else []
    return ".".join([*package, *filter(None, [node.module])])


def unit(module: str) -> str:
    """The unit that a module belongs to: its package, or what :data:`MODULES` says of a single file."""
    name = module.removeprefix("lipcert.").split(".")[0]
    return MODULES.get(name, name)


def arrows() -> set[tuple[str, str]]:
    """Pairs of different units of which the first imports from the second."""
    pairs = {(unit(found.module), unit(found.target)) for found in imports()}
    return {(above, below) for above, below in pairs if above != below}


def private(found: Import) -> str:
    """The private module, or private name, of another package that an import reaches into; empty if there is none."""
    parts = found.target.split(".")
    for i, part in enumerate(parts):
        owner = ".".join(parts[:i])
        if part.startswith("_") and not f"{found.module}.".startswith(f"{owner}."):
            return found.target
    package = found.target if sources()[found.target].name == "__init__.py" else ".".join(parts[:-1])
    outside = not f"{found.module}.".startswith(f"{package}.")
    return f"{found.target}.{found.name}" if found.name.startswith("_") and outside else ""


def rank(name: str) -> tuple[int, float]:
    """Layer and place in the layer; what imports stands before what is imported."""
    return next((i, row[name]) for i, row in enumerate(LAYERS.values()) if name in row)


def _drawn(pairs: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without arrows that a longer path of arrows implies, and without those that point up."""
    down = {(above, below) for above, below in pairs if rank(above) < rank(below)}
    reach: dict[str, set[str]] = {}
    for above in sorted({name for row in LAYERS.values() for name in row}, key=rank, reverse=True):
        direct = {below for start, below in down if start == above}
        reach[above] = direct.union(*(reach[below] for below in direct))
    through = {pair for pair in down if any((pair[0], mid) in down and pair[1] in reach[mid] for mid in reach)}
    return sorted(down - through, key=lambda pair: (rank(pair[0]), rank(pair[1])))


_WIDTH, _ROW, _BOX = 860, 76, (94, 32)


def _centre(name: str) -> tuple[float, float]:
    row, column = rank(name)
    return 208 + 106 * column, 34 + _ROW * row


def picture() -> str:
    """The layers as SVG. Arrows that follow from others are left out."""
    height = _ROW * len(LAYERS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif"'
        ' font-size="14" role="img">',
        "<title>Packages of lipcert and what they import</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for row, title in enumerate(LAYERS):
        top = 34 + _ROW * row
        lines.append(f'<rect x="8" y="{top - 24}" width="{_WIDTH - 16}" height="48" rx="6" fill="#f1f3f7"/>')
        lines.append(f'<text x="18" y="{top + 5}" fill="#667">{escape(title)}</text>')
    wide, tall = _BOX
    for above, below in _drawn(arrows()):
        (x1, y1), (x2, y2) = _centre(above), _centre(below)
        if y1 == y2:
            line = f"M{x1:.0f} {y1 + tall / 2:.0f} Q{(x1 + x2) / 2:.0f} {y1 + 50} {x2:.0f} {y2 + tall / 2:.0f}"
        else:
            line = f"M{x1:.0f} {y1 + tall / 2:.0f} L{x2:.0f} {y2 - tall / 2:.0f}"
        lines.append(f'<path d="{line}" fill="none" stroke="#667" marker-end="url(#tip)"/>')
    for row_names in LAYERS.values():
        for name in row_names:
            x, y = _centre(name)
            lines.append(
                f'<rect x="{x - wide / 2:.0f}" y="{y - tall / 2:.0f}" width="{wide}" height="{tall}" rx="5"'
                ' fill="#fff" stroke="#334"/>'
            )
            lines.append(f'<text x="{x:.0f}" y="{y + 5}" text-anchor="middle" fill="#112">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(f"wrote {PICTURE.relative_to(ROOT)}")
