"""Standard streams that are closed, full, or that lack characters: rows are written, and the exit code tells."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lipcert.cli  # noqa: F401  registers the handler

CERTIFY = [
    sys.executable,
    "-m",
    "lipcert",
    "certify",
    "bundled",
    "--eps",
    "36/255",
    "--method",
    "gloro",
    "--limit",
    "4",
]


@pytest.mark.thinned(3)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
@pytest.mark.parametrize(
    ("redirection", "code"), [(">&- 2>&-", 0), (">/dev/full 2>/dev/full", 2), ("2>/dev/full <&-", 0)]
)
def test_streams_that_take_nothing(tmp_path, redirection, code):
    line = f'"$@" {redirection}'
    words = ["bash", "-c", line, "bash", *CERTIFY, "--out", "r.jsonl"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (code, "")
    rows = [json.loads(row) for row in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [sorted(row) for row in rows] == [sorted(rows[0])] * 4


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("cp1252", marks=pytest.mark.slow)])
def test_outputs_without_greek(tmp_path, encoding):
    name = os.fsdecode(b"r\xe4.jsonl")  # and a name that is not UTF-8
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    subprocess.run([*CERTIFY, "--out", name], cwd=tmp_path, env=environment, check=True, capture_output=True)
    words = [sys.executable, "-m", "lipcert", "report", name, name, "--html", "a.html", "--card", "c.md"]
    result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr
    assert "95 % CI" in result.stdout.decode(encoding)
    assert "r\\xe4" in (tmp_path / "a.html").read_text(encoding="utf-8")


@given(st.text(st.characters(exclude_categories=())), st.sampled_from(["ascii", "cp1252", "cp437", "koi8-r", "utf-8"]))
def test_every_text_can_be_printed(text, encoding):
    """In every encoding; characters that it has stay."""
    printed = text.encode(encoding, "lipcert.plain").decode(encoding)
    kept = "".join(c for c in text if c.encode(encoding, "ignore"))
    rest = iter(printed)
    assert all(c in rest for c in kept)
