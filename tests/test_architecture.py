"""Imports point down, and reach into no other package's private modules; operations are named in one place."""

import ast
import re

import layering

from lipcert.bounds import RULES
from lipcert.graph import SIGNATURES


def test_every_unit_has_a_layer() -> None:
    units = {layering.unit(module) for module in layering.sources()}
    assert units == {name for row in layering.LAYERS for name in row}, "see LAYERS and MODULES"


def test_imports_point_down() -> None:
    upward = {pair for pair in layering.arrows() if layering.rank(pair[0]) > layering.rank(pair[1])}
    assert not upward


def test_private_modules_are_private() -> None:
    reached = {(each.module, private) for each in layering.imports() if (private := layering.private(each))}
    assert not reached, "imports of another package's private modules; import the name from the package"


def test_the_reader_of_imports_sees_what_it_should() -> None:
    seen = set(layering.imports())
    assert layering.Import("lipcert.cli", "lipcert.cli._errors", "one_line_errors") in seen, "relative imports"
    inside = layering.Import("lipcert.graph._capture", "lipcert.graph._graph", "Node")
    assert inside in seen
    assert not layering.private(inside)
    assert layering.private(inside._replace(module="lipcert.norms._dense")) == "lipcert.graph._graph"
    assert layering.private(layering.Import("lipcert.norms._dense", "lipcert.model", "_read")) == ""
    assert layering.private(layering.Import("lipcert.norms._dense", "lipcert.certvit.solve", "_x"))


def test_every_package_is_installed() -> None:
    root = layering.ROOT
    listed = re.search(r"^packages = \[(.*?)\]", (root / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    folders = {
        file.parent.relative_to(root).as_posix().replace("/", ".") for file in root.glob("lipcert/**/__init__.py")
    }
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == folders | {"lipcert.cli"}


OPERATIONS = {name for name in (*RULES, *SIGNATURES) if isinstance(name, str)}
# What a capture, which stands below the rules, knows of torch: names and arguments, and functions in other forms.
TABLES = {"lipcert.graph._operations", "lipcert.graph._forms"}
# The same words for something else: methods of Python's operators, a question to a rule, the kind of a random draw.
OTHERWISE = {
    "lipcert.graph._capture": {"add", "sub", "mul", "pow", "matmul", "getitem", "neg", "abs"},
    "lipcert.bounds._registry": {"linear"},
    "lipcert.certifier.anchored.norms": {"norm"},
}


def named(code: str) -> set[str]:
    """The operations that a string in the code names."""
    return {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)} & OPERATIONS


def test_operations_in_code_are_found() -> None:
    assert named('if node.op in ("relu", "tanh") or emit("add", f, (x,)):\n    "A relu."') == {"relu", "tanh", "add"}


def test_only_rules_name_operations() -> None:
    """Others ask the registry by tag. Code that handles operations is in these two packages or imports their types."""
    types = {"Call", "Graph", "Node", "RULES", "tagged"}
    handling = {found.module for found in layering.imports() if found.name in types}
    handling |= {module for module in layering.sources() if layering.unit(module) in ("graph", "bounds")}
    found = {}
    for module in handling - TABLES:
        if not module.startswith("lipcert.bounds.rules."):
            found[module] = named(layering.sources()[module].read_text())
    assert {module: names for module, names in found.items() if names} == OTHERWISE, "declare a Tag with the rule"
