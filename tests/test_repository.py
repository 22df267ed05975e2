"""What is said in two files of the repository is the same in both."""

import re
from pathlib import Path

import tomllib

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
