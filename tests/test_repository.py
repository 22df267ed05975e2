"""What is said in two files of the repository is the same in both, and arithmetic has one place."""

import ast
import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # from Python 3.11

ROOT = Path(__file__).parent.parent


def test_the_citation_names_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_hooks_and_workflow_run_what_ci_runs() -> None:
    checks = (ROOT / ".ci" / "run").read_text()
    hooks = re.findall(r"entry: (.+?)(?: --site-dir \S+)?\n", (ROOT / ".pre-commit-config.yaml").read_text())
    assert len(hooks) == 4
    assert not [hook for hook in hooks if f"\n{hook}" not in checks]
    assert "run: bash .ci/run\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_the_oldest_versions_are_those_of_the_project() -> None:
    """The matrix tests torch, timm and typer at their lower bounds; the others have theirs from these three."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = re.findall(r"^(\w+)==([\d.]+?)(?:\.\*)?$", (ROOT / ".ci" / "oldest.txt").read_text(), re.MULTILINE)
    assert {name for name, _ in pinned} == {"torch", "timm", "typer"}
    assert {f"{name}>={version}" for name, version in pinned} <= {*required}


# Packages and modules that certify nothing, checks of rules, and the values of networks themselves.
FREE = ("attacks", "bounds/testing", "certvit", "graph", "inputs", "networks", "surgery", "training")
ESTIMATES = ("norms/_estimate", "norms/_gram")


def unscaled(tree: ast.AST) -> list[int]:
    """The lines that compute a norm or a sum of squares of tensors, or divide by a clamped number."""

    def method(node: ast.AST) -> str:
        return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""

    def squares(node: ast.AST) -> bool:
        power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and ast.unparse(node.right) == "2"
        return power or method(node) == "square" or (method(node) == "pow" and ast.unparse(node.args[-1]) == "2")

    lines = []
    for node in ast.walk(tree):
        name = method(node)
        if name:
            keywords = {keyword.arg for keyword in node.keywords}
            owner = ast.unparse(node.func.value)
            plain = not node.args or isinstance(node.args[0], ast.Constant)
            bad = name == "norm" and (plain or bool(keywords & {"p", "dim", "keepdim"}) or owner == "torch")
            bad |= name.endswith("norm") and owner.endswith("linalg")
            bad |= name in ("sum", "mean") and squares(node.func.value)
        else:
            division = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
            bad = division and method(node.right) in ("clamp", "clamp_min")
        if bad:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "line",
    [
        "x.norm()", "x.norm(2, 1)", "x.norm(dim=1)", "torch.norm(x, 2)", "x.square().sum(1)", "x.pow(2).sum()",
        "(x**2).mean()", "torch.linalg.vector_norm(x)", "torch.linalg.norm(x)", "linalg.matrix_norm(x, 2)",
        "x / y.clamp_min(1e-9)",
    ],
)  # fmt: skip
def test_unscaled_arithmetic_is_found(line: str) -> None:
    assert unscaled(ast.parse(line))


def test_code_that_certifies_takes_norms_and_quotients_from_one_place() -> None:
    found = []
    for path in sorted((ROOT / "lipcert").rglob("*.py")):
        name = path.relative_to(ROOT / "lipcert").with_suffix("").as_posix()
        if name != "numerics/_l2" and not name.startswith(FREE + ESTIMATES):
            found += [f"{name}:{line}" for line in unscaled(ast.parse(path.read_text()))]
    assert not found, "use l2_norm, sum_squares, over or unit_vectors of lipcert.numerics"
