"""The layers of the package, and what its import statements say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

# From top to bottom, and within a row from left to right: a unit may import what stands below it, or behind it in its
# row. A package is a unit.
LAYERS = (
    ("cli", "lipcert"),
    ("report", "results"),
    ("training", "certvit"),
    ("certifier", "smoothing"),
    ("roundoff", "bounds"),
    ("inputs", "networks", "settings", "attacks"),
    ("surgery", "graph", "norms", "denoisers", "model"),
    ("numerics",),
)
# Modules directly below ``lipcert``, by the unit that they belong to.
MODULES = {"__main__": "cli", "assets": "inputs", "errors": "numerics", "workers": "numerics"}


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


def rank(name: str) -> tuple[int, int]:
    """Layer and place in the layer; what imports stands before what is imported."""
    return next((i, row.index(name)) for i, row in enumerate(LAYERS) if name in row)
