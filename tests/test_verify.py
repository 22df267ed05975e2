"""Verification: true rows stand, and no claim that is larger than the truth does."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lipcert.artifact import save
from lipcert.cli import app
from lipcert.data import open_images
from lipcert.errors import InputError
from lipcert.loading import load
from lipcert.results import Tally, read_run
from lipcert.results.verify import check_model, sample, verify

EPS = "1e-6"


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """Results of the bundled model, some rows of which an attack has cut short."""
    folder = tmp_path_factory.mktemp("certified")
    settings = ["certify", "--eps", EPS, "--method", "gloro", "--limit", "12"]
    run(*settings, "--out", folder / "r.jsonl")
    return [json.loads(line) for line in (folder / "r.jsonl").read_text().splitlines()], json.loads(
        (folder / "r.summary.json").read_text()
    )


@pytest.fixture
def results(certified, tmp_path, monkeypatch):
    """A copy of them to change, and a function that verifies it."""
    monkeypatch.chdir(tmp_path)
    rows, summary = json.loads(json.dumps(certified))

    def write():
        Path("r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("r.summary.json").write_text(json.dumps(summary))

    def verified(*arguments, code=0):
        write()
        return run("verify", "bundled", "r.jsonl", "--all", *arguments, code=code)

    write()
    return rows, summary, verified


def test_true_rows_stand(results):
    rows, summary, verified = results
    assert 0 < summary["counts"]["certified"] <= 12
    result = verified()
    assert result.stdout == "rows\t12\nstand\t12 of 12 computed again\n"
    assert json.loads(verified("--json").stdout) == {"verified": 12, "rows": 12, "fallen": 0, "objections": []}
    assert run("verify", "bundled", "r.jsonl", "--sample", "5").stdout == "rows\t12\nstand\t5 of 5 computed again\n"


def test_rows_with_products_of_norms_are_computed_as_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["certify", "--eps", EPS, "--limit", "2", "--out", "r.jsonl"]
    run(*settings, "--method", "lofast", "--passes", "0")
    assert json.loads(Path("r.summary.json").read_text())["passes"] == 0
    assert "2 of 2 computed again" in run("verify", "bundled", "r.jsonl").stdout
    assert "other passes" in run(*settings, "--method", "lofast", code=2).stderr
    assert "gloro takes no norms" in run(*settings[:-2], "--method", "gloro", "--passes", "9", code=2).stderr
    # A staged run whose rows other methods decided.
    run(*settings[:-1], "s.jsonl", "--passes", "0")
    assert "2 of 2 computed again" in run("verify", "bundled", "s.jsonl").stdout


def test_smaller_claims_stand(results):
    rows, _, verified = results
    assert max(row["radius"] for row in rows) > 2e-6
    row = max(rows, key=lambda row: row["radius"])
    row["radius"] *= 0.9
    row["seconds"] = 1e9
    verified()


CHANGES = [
    ("radius", lambda row: row["radius"] * 1.001, "is claimed and only"),
    ("predicted", lambda row: (row["predicted"] + 1) % 10, "predicted"),
    ("label", lambda row: (row["label"] + 1) % 10, "label"),
    ("margin", lambda row: row["margin"] * 1.01, "margin"),
    ("margin", lambda row: None, "margin"),
    ("correct", lambda row: not row["correct"], "contradicts itself about being correct"),
    ("certified", lambda row: not row["certified"], "contradict each other"),
    ("rigor", lambda row: "estimate", "which is no certificate"),
]


@pytest.mark.parametrize(("name", "change", "word"), CHANGES)
def test_false_rows_fall(results, name, change, word):
    rows, _, verified = results
    rows[3][name] = change(rows[3])
    result = verified(code=1)
    assert result.stdout.endswith("stand\t11 of 12 computed again\n")
    line = next(line for line in result.stderr.splitlines() if f"image {rows[3]['index']}:" in line)
    assert word in line


def test_counts_that_are_not_those_of_the_rows(results):
    _, summary, verified = results
    summary["counts"]["certified"] += 1
    assert "counts" in verified(code=1).stderr


def test_rows_that_an_attack_cut_short_stand(results, tmp_path):
    """As where an attack has left them to gloro: anchored would find more, with a failure probability."""
    rows, summary, _ = results
    summary |= {"method": "staged", "eps": 0.1}
    rows[:] = [{**rows[0], "certified": False, "attacked": True}]
    Path("r.jsonl").write_text(json.dumps(rows[0]) + "\n")
    Path("r.summary.json").write_text(json.dumps({**summary, "counts": Tally(rows).counts()}))
    assert "stand\t1 of 1" in run("verify", "bundled", "r.jsonl").stdout


def test_rows_about_other_models_are_refused(results):
    torch.manual_seed(0)
    other = load("vit_tiny_patch16_224", pretrained=False, img_size=8, patch_size=4, depth=1, num_classes=10)
    save(other, "other.safetensors")
    result = run("verify", "other.safetensors", "r.jsonl", code=2)
    assert result.stdout == ""
    assert result.stderr == "lipcert: r.jsonl holds rows about other weights; give the model that was certified\n"


DAMAGES = {
    "rows": "row 1 of r.jsonl is no result",
    "summary": "r.summary.json is no summary of results",
    "no summary": "r.jsonl has no summary r.summary.json beside it",
    "empty": "r.jsonl holds no rows",
    "twice": "r.jsonl mixes rows",
    "no file": "there is no file r.jsonl",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_none(results, damage):
    rows = Path("r.jsonl").read_text()
    if damage.startswith("no "):
        Path("r.summary.json" if damage == "no summary" else "r.jsonl").unlink()
    elif damage == "summary":
        Path("r.summary.json").write_text("{}")
    else:
        first = rows.splitlines(keepends=True)[0]
        Path("r.jsonl").write_text({"rows": "x" + rows, "empty": "", "twice": rows + first}[damage])
    result = run("verify", "bundled", "r.jsonl", code=2)
    assert result.stderr.startswith(f"lipcert: {DAMAGES[damage]}")
    assert result.stderr.count("\n") == 1


def test_images_that_are_not_there(results):
    rows, _, verified = results
    rows[0]["index"] = 10**6
    assert "image 1000000" in verified(code=2).stderr
    assert "at least 1" in run("verify", "bundled", "r.jsonl", "--sample", "0", code=2).stderr


def test_from_python(results):
    model = load(None)
    results = read_run(Path("r.jsonl"))
    verdicts = list(verify(results, model, open_images(None, model), count=3))
    assert [verdict.objection for verdict in verdicts] == [None] * 3
    assert {verdict.index for verdict in verdicts} == {row["index"] for row in sample(results, 3)}
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    with pytest.raises(InputError, match="other weights"):
        check_model(results, model)
