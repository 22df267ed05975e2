"""Imports point down, and reach into no other package's private modules."""

import re

import layering


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
