"""``benchmarks.gpu``, tried on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import PARTS


@pytest.mark.slow
def test_every_part_runs_at_a_small_size(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.gpu", "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    subprocess.run([sys.executable, *command], cwd=Path(__file__).parents[1], check=True)
    found = {part: json.loads((tmp_path / f"{part}.json").read_text())["result"] for part in PARTS}
    assert found["devices"]["failed"] == found["kernels"]["false"] == []
    assert max(found["radii"].values()) <= 1e-9
    assert found["training"]["far"]["trainings"][0]["said"][0]["epoch"] == 1
    assert all(row["ratio"] > 0 for row in found["throughput"].values())
