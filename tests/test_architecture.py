"""Imports point down, and reach into no other package's private modules."""

import re

from benchmarks import architecture


def test_every_unit_has_a_layer() -> None:
    units = {architecture.unit(module) for module in architecture.sources()}
    assert units == {name for row in architecture.LAYERS.values() for name in row}, "see LAYERS and MODULES"


def test_imports_point_down() -> None:
    upward = {pair for pair in architecture.arrows() if architecture.rank(pair[0]) > architecture.rank(pair[1])}
    assert not upward


def test_private_modules_are_private() -> None:
    reached = {(each.module, private) for each in architecture.imports() if (private := architecture.private(each))}
    assert not reached, "imports of another package's private modules; import the name from the package"


def test_the_reader_of_imports_sees_what_it_should() -> None:
    seen = set(architecture.imports())
    assert architecture.Import("lipcert.cli", "lipcert.cli._errors", "one_line_errors") in seen, "relative imports"
    inside = architecture.Import("lipcert.graph._capture", "lipcert.graph._graph", "Node")
    assert inside in seen
    assert not architecture.private(inside)
    assert architecture.private(inside._replace(module="lipcert.norms._dense")) == "lipcert.graph._graph"
    assert architecture.private(architecture.Import("lipcert.norms._dense", "lipcert.model", "_read")) == ""
    assert architecture.private(architecture.Import("lipcert.norms._dense", "lipcert.certvit.solve", "_x"))


def test_the_picture_is_what_the_imports_say() -> None:
    assert architecture.PICTURE.read_text() == architecture.picture(), "run python -m benchmarks.architecture"


def test_every_package_is_installed() -> None:
    root = architecture.PICTURE.parents[1]
    listed = re.search(r"^packages = \[(.*?)\]", (root / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    folders = {
        file.parent.relative_to(root).as_posix().replace("/", ".") for file in root.glob("lipcert/**/__init__.py")
    }
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == folders | {"lipcert.cli"}
