"""What is said in two files of the repository is the same in both."""

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
