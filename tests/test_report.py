"""Reports: what they say is what the rows hold, nothing uncertified is called certified, and files stand alone."""

import csv
import html
import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path

import commands
import numpy as np
import pytest
import torch
from commands import read_rows, read_summary
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st

import lipcert
from lipcert.errors import InputError
from lipcert.inputs.artifact import weights_hash
from lipcert.inputs.data import order_of
from lipcert.report import _build, _card, _figures, model_card, read_runs, remarks, to_html, write
from lipcert.report._figures import share_above, span
from lipcert.report._words import promises, radius
from lipcert.results import same_examples, wilson
from lipcert.results._rows import thinned

EPS = 0.1
ATTACK = {"name": "PGD-ℓ2", "version": "1.0", "settings": {"steps": 5, "restarts": 2}}
SUMMARY = {
    "model": {"source": {"name": "vit", "arguments": {"depth": 2}}, "recipe": [{"step": "convert", "norm": "smooth"}]},
    "eps": EPS,
    "eps_typed": "0.1",
    "method": "anchored",
    "dtype": "float64",
    "data": {"spec": "/home/someone/val", "images": 6, "labelled": True},
    "lipcert": "1",
    "bound": {
        "log10": 2.0,
        "rigor": "deterministic",
        "layers": [{"path": "net.head", "operation": "linear", "log10_gain": 1}],
    },
    "environment": {"torch": "2"},
    "command": "lipcert certify --out 'a b.jsonl'",
    "complete": True,
}
RADII = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)


def row(index: int, reach: float, **changes):
    known = {"index": index, "label": 1, "predicted": 1, "correct": True, "margin": 0.5, "radius": reach}
    known |= {"certified": reach > EPS, "method": "anchored", "rigor": "probabilistic(5e-10)", "seconds": 0.5}
    known |= {"label": 1 if changes.get("correct", True) else 2}
    return {**known, **changes}


def unlabelled(index: int, reach: float, **changes):
    return {key: value for key, value in row(index, reach, **changes).items() if key not in ("label", "correct")}


ROWS = [row(i, radius, correct=i != 4) for i, radius in enumerate(RADII)]
ATTACKED = [
    {**r, "attacked": r["index"] in (0, 1), "attack_distance": {0: 0.02, 1: 0.06, 3: 0.18}.get(r["index"])}
    for r in ROWS
]


@pytest.fixture
def results(tmp_path):
    """Writes result files into the working folder."""

    def make(rows=ROWS, name="r", tail="", **changes):
        path = tmp_path / f"{name}.jsonl"
        summary = {
            **SUMMARY,
            "model": {**SUMMARY["model"], "weights_hash": changes.pop("weights", "0" * 64)},
            **({"attack": ATTACK} if rows and rows[0].get("attacked") is not None else {}),
            **changes,
        }
        path.write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
        path.with_suffix(".summary.json").write_text(json.dumps(summary))
        return path

    return make


run = partial(commands.run, "report")
refused = partial(commands.refused, "report", besides=())


def test_counts_are_strict(results):
    (r,) = read_runs([results()])
    assert [r.certified_at(eps) for eps in (0, 0.05, 0.1, 0.15, 0.3)] == [4, 3, 2, 1, 0]
    assert r.correct == 5
    assert r.surviving_at(1.0) == 5
    assert r.median_radius == 0.1
    assert not r.attacked


def test_an_attack_bounds_from_above(results):
    (r,) = read_runs([results(ATTACKED, attack=ATTACK)])
    assert [r.surviving_at(eps) for eps in (0.01, 0.02, 0.1, 0.18, 1)] == [5, 4, 3, 2, 2]
    assert r.attack == "PGD-ℓ2 1.0 (steps=5, restarts=2)"
    rows = [{**a, "attack_distance": None} for a in ATTACKED]
    (r,) = read_runs([results(rows)])
    assert [r.surviving_at(eps) for eps in (0.099, 0.1)] == [5, 3]  # within ε is all that is known


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.booleans()), min_size=1, max_size=30),
    st.lists(st.floats(0, 2), min_size=1, max_size=8),
)
def test_curves_are_the_counts(images, eps):
    values, counted = np.array([v for v, _ in images]), np.array([c for _, c in images])
    shares = share_above(values, counted, np.array(eps))
    assert shares.tolist() == [sum(c and v > e for v, c in images) / len(images) for e in eps]


def test_the_certified_curve_stays_below_the_attack_and_the_clean_accuracy(results):
    (r,) = read_runs([results(ATTACKED, attack=ATTACK)])
    start, end, logarithmic = span([r])
    eps = np.linspace(start, end, 500)
    assert not logarithmic
    assert start == 0
    assert end > max(RADII)
    unbroken = share_above(r.broken_at, r.right, eps)
    assert (share_above(r.radii, r.right, eps) <= unbroken).all()
    assert (unbroken <= r.correct / len(r)).all()


def test_wide_ranges_are_logarithmic_and_unbounded_radii_left_aside(results):
    (wide,) = read_runs([results([row(0, 1e-6), row(1, 1e-6), row(2, 1e-2), row(3, sys.float_info.max)])])
    start, end, logarithmic = span([wide])
    assert logarithmic
    assert 0 < start <= 1e-6
    assert EPS < end < 1
    assert share_above(wide.radii, wide.right, np.array([end])) == [1 / 4]
    (nothing,) = read_runs([results([row(0, 0.0)])])
    assert span([nothing]) == (0.0, 1.08 * EPS, False)


def test_a_model_with_tiny_radii_does_not_press_the_others_against_the_edge(results):
    large = [row(i, 0.2) for i in range(8)]
    few = read_runs([results([*large, row(8, 1e-12), row(9, 1e-12)])])
    assert span(few)[0] == 0.0
    many = read_runs([results([*large, *(row(i, 1e-12) for i in range(8, 16))])])
    assert span(many)[0] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.17999, "0.179"), (0.1999, "0.199"), (5.709e-6, "5.70e-6"), (sys.float_info.max, "unbounded")],
)
def test_radii_are_rounded_down(value, text):
    assert radius(value) == text


def test_rigor_and_delta(results):
    rows = [row(0, 0.2, rigor="deterministic", method="gloro"), *ROWS[1:]]
    (r,) = read_runs([results(rows, method="staged")])
    assert r.rigor == "probabilistic, δ ≤ 5e-10 per image"
    assert "gloro (1 image)" in run(r.path).stdout
    (r,) = read_runs([results([row(0, 0.2, rigor="deterministic")])])
    assert r.rigor == "deterministic"
    assert r.delta == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rigor": "estimate"}, "does not give"),
        ({"rigor": "probabilistic(e)"}, "does not give"),
        ({"certified": False}, "contradict"),
        ({"radius": -1.0, "certified": False}, "radius is -1"),
        ({"radius": math.nan, "certified": False}, "radius is nan"),
        ({"radius": None}, "is no result"),
        ({"correct": "yes"}, "correct"),
        ({"attacked": False, "attack_distance": 0.15}, "please report it"),
        ({"attacked": True, "attack_distance": None}, "please report it"),
    ],
)
def test_rows_that_claim_too_much_are_refused(results, changes, reason):
    message = refused(results([row(0, 0.2), row(1, 0.2, **changes)]))
    assert reason in message
    assert "row 2 of" in message


def test_damaged_and_missing_files(results, tmp_path):
    assert "no rows" in refused(results([]))
    assert "no rows" in refused(results([], tail='{"index": 0'))
    assert "row 7" in refused(results(tail="{}\n"))
    assert "has no" in refused(results(tail="{}\n"))
    assert "row 7" in refused(results(tail="[1]\n"))
    assert "do not belong together" in refused(results([row(0, 0.2), row(0, 0.2)]))
    assert "do not belong together" in refused(results([row(0, 0.2), unlabelled(1, 0.2)]))
    assert "not a summary of results" in refused(results(eps=0))
    path = results()
    path.with_suffix(".summary.json").unlink()
    assert "r.summary.json in its folder" in refused(path)
    assert "there is no file" in refused("missing.jsonl")
    (tmp_path / "empty").mkdir()
    assert "holds no results" in refused("empty")


STRAY = {
    "another tool's log": lambda file: file.write_text('{"epoch": 1}\n'),
    "another tool's log and summary": lambda file: (
        file.write_text('{"epoch": 1}\n'),
        file.with_suffix(".summary.json").write_text('{"eps": 1}'),
    ),
    "empty": lambda file: file.touch(),
    "a folder": lambda file: file.mkdir(),
    "a broken link": lambda file: file.symlink_to("nowhere"),
    "bytes": lambda file: file.write_bytes(b"\x00\xff\x1f\x8b"),
    "a copy without its summary": lambda file: file.write_text((file.parent / "r.jsonl").read_text()),
    "a run that was killed before its first row": lambda file: (
        file.touch(),
        file.with_suffix(".summary.json").write_text((file.parent / "r.summary.json").read_text()),
    ),
}


@pytest.mark.parametrize("kind", STRAY)
def test_what_is_not_lipcerts_is_named_and_left_out(results, tmp_path, kind):
    (tmp_path / "all").mkdir()
    path = results(name="all/r")
    STRAY[kind](tmp_path / "all" / "stray.jsonl")
    with pytest.warns(UserWarning, match=r"left out, no rows .*: stray\.jsonl$"):
        assert [run.path.name for run in read_runs(["all"])] == [path.name]
    path.unlink()
    assert "holds no results, but no rows of lipcert certify with a summary: stray.jsonl" in refused("all")


@pytest.mark.parametrize("change", [{"radius": -1.0}, {"index": "x"}, {"predicted": None}])
def test_a_damaged_run_of_a_folder_is_named_and_left_out(results, tmp_path, change):
    (tmp_path / "all").mkdir()
    path = results(name="all/r")
    results([{**row(0, 0.2), **change}], name="all/bad")
    with pytest.warns(UserWarning, match=r"left out: row 1 of all/bad\.jsonl is no result"):
        assert [run.path.name for run in read_runs(["all"])] == [path.name]
    path.unlink()
    assert "row 1 of all/bad.jsonl is no result" in refused("all")


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_rows_is_said_to_be_one(results, indent):
    path = results()
    path.write_text(json.dumps([json.loads(line) for line in path.read_text().splitlines()], indent=indent))
    assert "is a JSON array, and rows are one object per line; write them so: jq -c" in refused(path)


def test_a_half_written_row_and_an_unfinished_run_are_noted(results):
    result = run(results(tail='{"index": 9', complete=False))
    assert "the last row is half-written" in result.stderr
    assert "did not finish; these are its first 6 images" in result.stderr
    assert "images\t6; the run did not finish" in result.stdout


@pytest.mark.skipif(not _figures.available(), reason="matplotlib is not installed")
def test_figures_need_no_backend_of_a_notebook(results, tmp_path):
    """Which Jupyter names in the environment of a command that runs in another one."""
    environ = {**os.environ, "MPLBACKEND": "module://backend_of_another_environment"}
    command = [sys.executable, "-m", "lipcert", "report", str(results()), "--html", "page.html"]
    subprocess.run(command, env=environ, check=True, capture_output=True)
    assert "<svg" in Path("page.html").read_text()


def test_a_last_row_whose_line_break_an_editor_took_is_a_row(results):
    path = results()
    path.write_bytes(path.read_bytes().rstrip())
    result = run(path)
    assert "half-written" not in result.stderr
    assert "images\t6" in result.stdout
    path.write_bytes(path.read_bytes() + b"\n" + b"[" * 100_000)  # deeper than a parser goes
    assert "half-written" in run(path).stderr


def test_an_interval_needs_a_random_sample(results):
    """The first images in the order of folders are those of a few classes, and say nothing about the others."""
    data = {"spec": "x", "images": 40, "labelled": True}
    for indices, sampled in ((order_of(40, None)[:6], True), (range(6), False)):
        path = results([{**ROWS[i], "index": index} for i, index in enumerate(indices)], complete=False, data=data)
        result = run(path, "--html", "r.html")
        page, (record,) = Path("r.html").read_text(), json.loads(run(path, "--json").stdout)
        assert [("CI" in result.stdout), ("CI 9.7" in page)] == [sampled, sampled]
        assert (record["at"][0]["certified"]["interval"] is not None) is sampled
        assert ("there are no intervals" in result.stderr) is not sampled


def test_one_run_on_the_command_line(results):
    out = run(results(ATTACKED, attack=ATTACK), "--eps", "0.05", "--eps", "1/10").stdout
    assert "clean accuracy\t5 of 6 (83.3 %, 95 % CI 43.6–97.0 %)" in out
    assert "certified accuracy at 0.05\t3 of 6 (50.0 %, 95 % CI 18.8–81.2 %)" in out
    assert "certified accuracy at 1/10\t2 of 6 (33.3 %, 95 % CI 9.7–70.0 %)" in out
    assert "accuracy under PGD-ℓ2 at 1/10\t3 of 6 (50.0 %, 95 % CI 18.8–81.2 %), upper bound" in out
    assert "nan" in refused(results(), "--eps", "nan")
    assert out == run(results(ATTACKED, attack=ATTACK), "--eps", "0.05,1/10").stdout
    assert "--license is for a model card; add --card" in refused(results(), "--license", "mit")


def test_staged_radii_are_not_compared(results):
    """They end just above ε, where the search stopped: no median, and the figure says where nobody looked."""
    (r,) = read_runs([results(method="staged", name="s")])
    (other,) = read_runs([results(name="a")])
    columns, rows = _build.overview([r, other], [(EPS, "0.1")])
    assert [row[columns.index("radius")] for row in rows] == ["–", "0.100"]
    assert not any("median" in name for name, _ in _build.facts(r, [(EPS, "0.1")]))
    assert any("median" in name for name, _ in _build.facts(other, [(EPS, "0.1")]))
    text = _build.report([r]).text
    assert "larger radii were not computed" in text
    assert "stops at the verdict for ε: for other ε, give several" in text
    if _figures.available():
        assert _figures.curve([r])[0].count("<pattern") > _figures.curve([other])[0].count("<pattern")


@given(st.integers(0, 50), st.integers(1, 50))
def test_wilson_intervals(part, whole):
    """Its ends are the shares at which the score test is just not rejected."""
    part = min(part, whole)
    low, high = wilson(part, whole)
    assert 0 <= low <= part / whole <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            score = (part / whole - end) / math.sqrt(end * (1 - end) / whole)
            assert abs(score) == pytest.approx(1.959963984540054) or score == pytest.approx(0, abs=1e-6)


def test_several_runs_are_compared(results, tmp_path):
    (tmp_path / "two").mkdir()
    results(name="two/a")
    results([unlabelled(i, r) for i, r in enumerate(RADII)], name="two/b", eps_typed="1/10")
    result = run("two")
    header, first, second, following = (line.split("\t") for line in result.stdout.splitlines())
    assert following == ["next", "lipcert report two --html report.html --card README.md"]
    (one, _) = json.loads(run("two", "--json").stdout)
    at = one["at"][0]
    assert (at["eps_typed"], at["certified"]["images"], at["certified"]["share"]) == ("1/10", 2, pytest.approx(1 / 3))
    assert at["certified"]["interval"] == [pytest.approx(0.097, abs=5e-4), pytest.approx(0.7, abs=5e-4)]
    assert dict(zip(header, first, strict=True)) == {
        "results": "b", "certified": "50.0 %", "95 % CI": "18.8–81.2 %", "ε": "1/10", "clean": "–", "radius": "0.100",
        "δ": "5e-10", "images": "6",
    }  # fmt: skip
    assert second[:5] == ["a", "33.3 %", "9.7–70.0 %", "1/10", "83.3 %"]
    assert "have no labels" in result.stderr


def test_runs_that_do_not_compare_are_noted(results):
    paths = [results(), results(ROWS[:3], name="b", eps=0.1), results(name="c", eps=0.12, eps_typed="0.12")]
    runs = read_runs([paths[0], paths[0]])
    assert len(runs) == 1
    assert remarks(runs) == []
    assert "different images: differences may be due to the images" in remarks(read_runs(paths[:2]))[0]
    assert "different ε (r 0.1, c 0.12)" in remarks(read_runs([paths[0], paths[2]]))[0]


def test_files_of_one_name_get_their_folder(results, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    results(name="a/r")
    results(name="b/r")
    assert [r.name for r in read_runs(["a/r.jsonl", "b/r.jsonl"])] == ["a/r", "b/r"]


def test_unlabelled_results_speak_of_shares_only(results):
    (r,) = read_runs([results([unlabelled(i, radius) for i, radius in enumerate(RADII)])])
    text = _build.report([r], figures=False).text + str(model_card([r]))
    assert "accuracy" not in text.replace("upper bound on the robust accuracy", "").replace("Accuracy under attack", "")
    assert "classified correctly" not in text
    assert "r: 3 of 6 images (50.0 %) are certified at ε = 0.1: no ℓ2 perturbation" in text
    assert "certified\\_share" in text or "certified_share" in text


def test_without_an_image_predicted_right_there_is_no_median(results):
    (run,) = read_runs([results(rows=[row(i, 0.2, correct=False) for i in range(3)])])
    assert not [name for name, _ in _build.facts(run, []) if "median" in name]
    columns, _ = _build.overview([run], [(EPS, "0.1")])
    assert "radius" not in columns  # no column without content


@pytest.mark.parametrize(
    ("predicted", "labels", "remarked"),
    [("1111", "1002", True), ("1111", "1111", False), ("1110", "1110", False), ("1101", "1002", False)],
)
def test_a_classifier_that_repeats_one_class_is_called_so(results, predicted, labels, remarked):
    pairs = [(int(one), int(label)) for one, label in zip(predicted, labels, strict=True)]
    rows = [row(i, 0.2, predicted=one, label=label, correct=one == label) for i, (one, label) in enumerate(pairs)]
    rows += [row(4, 0.0, predicted=1, label=0, correct=False, abstained=True)]
    (run,) = read_runs([results(rows=rows)])
    said = (
        "class 1 for 4 of 5 images; 1 are classified correctly, and the most frequent label alone would be right for 3"
    )
    assert [text for name, text in _build.facts(run, [(EPS, "0.1")]) if name == "predicted"] == [said] * remarked
    assert (said in str(model_card([run]))) is remarked


def test_steps_stand_one_by_one_without_what_is_off(results):
    recipe = [{"step": "convert", "seed": 0, "adaptation": False, "limit": None}, {"step": "finetune", "loss": "ce"}]
    recipe += [{"step": "finetune", "loss": "noise", "lr": 0.1, "optimizer": "adamw", "seed": 0, "fitted": "head"}]
    (run,) = read_runs([results(model={**SUMMARY["model"], "recipe": recipe, "weights_hash": "0" * 64})])
    assert run.architecture == "vit(depth=2) → convert → finetune → finetune"
    assert run.steps[:2] == [("convert", "seed=0"), ("finetune", "loss=ce")]
    assert run.steps[2] == ("finetune", "loss=noise, seed=0, fitted=head")  # no updates, so no optimizer
    for text in (str(model_card([run])), _build.report([run]).text):
        assert "| convert | seed=0 |" in text
        assert "| finetune | loss=ce |" in text


def test_names_are_escaped(results, tmp_path):
    name = "<b>&|_[x](y) $"
    (r,) = read_runs([results(name=name, command=None)])
    page = to_html(_build.report([r], figures=False))
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;|" in page
    markdown = _build.report([r], figures=False).text
    assert r"\<b\>&\|\_\[x\](y) $" in markdown


def test_the_page_stands_alone(results, tmp_path):
    pytest.importorskip("matplotlib")
    paths = [results(ATTACKED, attack=ATTACK), results(name="$b_{", eps=0.1, weights="1")]
    result = run(*paths, "--html", "r.html", "--markdown", "r.md")
    page = (tmp_path / "r.html").read_text()
    outside = [url for url in re.findall(r'https?://[^"<\s]+', page) if "www.w3.org" not in url]
    assert outside == []
    assert not re.search(r'<link|src="(?!data:)|url\((?!#)|href="(?!#)|@import|fetch|XMLHttp|import\(', page)
    assert all(
        alt
        for alt in re.findall(r'<img alt="([^"]*)"', page) + re.findall(r'<svg role="img" aria-label="([^"]*)', page)
    )
    assert page.count("<svg") == page.count("<svg role=") == 4
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        ElementTree.fromstring(svg)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    targets = set(re.findall(r'(?:url\(|href=")#([^")]+)', page))
    assert {"r"} <= targets <= set(ids)
    for part in ("δ ≤ 5e-10", "upper bound", "lipcert certify --out 'a b.jsonl'", "exact arithmetic", "torch"):
        assert part in html.unescape(page)
    markdown = (tmp_path / "r.md").read_text()
    figures = re.findall(r"\]\(<([^>]+\.svg)>\)", markdown)
    assert figures[:2] == ["r-curve.svg", "r-radii.svg"]
    for name in figures:
        ElementTree.parse(tmp_path / name)
        assert f"written\t{name}" in result.stdout
    run(*paths, "--html", "r.html", "--markdown", "r.md")  # its own files may be replaced


def test_the_numbers_on_the_page_are_those_of_the_rows(results):
    """Tiles and the data behind the slider; the axes are where the picture has them."""
    pytest.importorskip("matplotlib")
    page = to_html(_build.report(read_runs([results(ATTACKED, attack=ATTACK)])))
    tiles = re.findall(r"<td[^>]*>([^<]*)</td>\s*<td[^>]*><strong>([^<]*)</strong></td>\s*<td[^>]*>([^<]*)", page)
    assert [[html.unescape(cell).replace("\xa0", " ") for cell in tile] for tile in tiles] == [
        ["clean accuracy", "83.3 %", "5 of 6, 95 % CI 43.6–97.0 %"],
        ["accuracy under PGD-ℓ2 at 0.1", "50.0 %", "3 of 6, 95 % CI 18.8–81.2 %, upper bound"],
        ["certified accuracy at 0.1", "33.3 %", "2 of 6, 95 % CI 9.7–70.0 %"],
    ]
    data = json.loads(re.search(r'<script type="application/json" id="curves">(.*?)</script>', page)[1])
    right = [r for r in ATTACKED if r["correct"]]
    assert data["runs"] == [
        {
            "name": "r", "images": 6, "right": len(right), "eps": EPS, "reach": EPS, "stopped": False,
            "radii": sorted(r["radius"] for r in right),
            "broken": sorted(r["attack_distance"] for r in right if r["attack_distance"] is not None),
        }
    ]  # fmt: skip
    left, end, top, bottom = data["axes"]
    spines = re.findall(r"M ([\d.]+) ([\d.]+) \nL ([\d.]+) ([\d.]+) \n", page)
    assert [left, bottom, left, top] in [[pytest.approx(float(x), abs=0.2) for x in line] for line in spines]
    assert 0 < left < end < 420


def test_the_axis_ends_at_100_and_no_symbol_stands_on_zero(results):
    pytest.importorskip("matplotlib")
    runs = read_runs([results(), results([row(i, 0.0) for i in range(6)], name="none")])
    svg, data = _figures.curve(runs)
    symbols = re.findall(r'<use xlink:href="#m\w+" x="([\d.]+)" y="([\d.]+)" style="fill: #(?:0072b2|d55e00)', svg)
    _, _, top, bottom = data["axes"]
    heights = [float(y) for _, y in symbols if float(y) < bottom + 1]
    assert heights
    assert all(top - 1 <= y < bottom - 5 for y in heights)


def test_figures_are_the_same_every_time(results):
    pytest.importorskip("matplotlib")
    runs = read_runs([results()])
    assert _figures.curve(runs)[0] == _figures.curve(runs)[0]
    assert "<svg" in _figures.histogram(runs)
    assert _build.modules(runs[0].summary) == [("head", 1.0)]


def test_reports_without_matplotlib(results, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run(results(), "--html", "r.html", "--markdown", "r.md")
    assert "pip install 'lipcert[plot]'" in result.stderr
    assert "| 0.0405 | 66.7 % |" in (tmp_path / "r.md").read_text()
    assert "0.0405</td>" in (tmp_path / "r.html").read_text()
    assert not list(tmp_path.glob("*.svg"))


def test_no_foreign_file_is_written_over(results, tmp_path):
    path = results()
    (tmp_path / "README.md").write_text("# Mine, with lipcert report in it\n")
    assert "was not written by lipcert report" in refused(path, "--card", "README.md")
    assert (tmp_path / "README.md").read_text().startswith("# Mine")
    assert ".html file" in refused(path, "--html", path)
    assert "no folder" in refused(path, "--html", "away/r.html")
    assert "own name" in refused(path, "--card", "x.md", "--markdown", "x.md")
    (tmp_path / "x-curve.svg").write_text("<svg/>")
    if _figures.available():
        assert "x-curve.svg exists" in refused(path, "--markdown", "x.md")
        assert not (tmp_path / "x.md").exists()


def test_the_card_is_what_hubs_read(results, tmp_path):
    run(results(ATTACKED, name="model", attack=ATTACK), "--card", "README.md", "--eps", "0.05", "--eps", "1/10")
    card = ModelCard((tmp_path / "README.md").read_text())
    found = {result.metric_name: result for result in card.data.eval_results}
    assert card.data.model_name == "vit"  # no file with its weights
    assert found["Clean accuracy"].metric_value == pytest.approx(5 / 6, abs=1e-6)
    certified = found["Certified accuracy at ε = 1/10"]
    assert certified.metric_value == pytest.approx(2 / 6, abs=1e-6)
    assert certified.metric_args["rigor"] == "probabilistic"
    assert certified.metric_args["delta"] == 5e-10
    assert certified.metric_args["dtype"] == "float64"
    assert certified.metric_args["eps"] == EPS
    attacked = found["PGD-ℓ2 accuracy at ε = 1/10"]
    assert attacked.metric_value == pytest.approx(3 / 6, abs=1e-6)
    assert attacked.metric_args["rigor"] == "estimate"
    assert attacked.dataset_name == "val"
    assert "/home/someone" not in str(card)  # a card is published
    assert len(found) == 5


def test_metadata_is_of_finished_runs_and_says_what_it_is_a_sample_of(results):
    data = {"spec": "x", "images": 60, "labelled": True}
    (unfinished,) = read_runs([results(complete=False, data=data, name="a")])
    assert model_card([unfinished]).data.eval_results is None
    (sample,) = read_runs([results(data=data, limit=6, name="b")])
    (whole,) = read_runs([results(name="c")])
    names = [[one.metric_name for one in model_card([run]).data.eval_results] for run in (sample, whole)]
    assert names[0][1] == "Certified accuracy at ε = 0.1, 2 of 6 images of 60, 95 % CI 9.7–70.0 %"
    assert names[1] == ["Clean accuracy", "Certified accuracy at ε = 0.1"]


def test_what_is_only_checked_is_not_called_proved(results):
    """In the table, on the page, in the card with its metadata, in JSON and in CSV."""
    rows = [{**one, "norms": "proved", "rounding": "checked", "sampling": "assumed"} for one in ROWS]
    path = results([{**rows[0], "rounding": "proved"}, *rows[1:]])
    printed = run(path, "--html", "r.html", "--card", "c.md", "--csv", "r.csv").stdout
    assert (
        "proved\tnorms, round-off of 1 of 6 images\nchecked\tround-off of 5 of 6 images\nassumed\tsampling" in printed
    )
    assert "| checked | round-off of 5 of 6 images |" in Path("c.md").read_text()
    (record,) = json.loads(run(path, "--json").stdout)
    assert record["rounding"] == {"proved": 1, "checked": 5}
    (line,) = csv.DictReader(Path("r.csv").read_text().splitlines())
    for words in (line, ModelCard(Path("c.md").read_text()).data.eval_results[-1].metric_args):
        assert (words["norms"], words["rounding"], words["sampling"]) == ("proved", "checked", "assumed")
    assert "always true" not in Path("r.html").read_text() + Path("c.md").read_text()
    assert "round-off of 5 of 6 images" in Path("r.html").read_text()
    assert "neither proved nor checked" in refused(results([{**rows[0], "norms": "sure"}]))


def test_machine_output_holds_numbers(results):
    path = results(ATTACKED, preprocessing={"input_size": [3, 8, 8]})
    run(path, "--csv", "r.csv", "--eps", "0.05", "--eps", "1/10")
    content = Path("r.csv").read_text()
    assert content.isascii()
    lines = list(csv.DictReader(content.splitlines()))
    assert [float(line["certified_share"]) for line in lines] == pytest.approx([3 / 6, 2 / 6])
    assert [float(line["linf"]) for line in lines] == pytest.approx([0.05 / 192**0.5, 0.1 / 192**0.5], rel=1e-12)
    assert {line["model"] for line in lines} == {"vit"}
    columns = {"eps", "images", "correct_low", "unbroken_share", "median_radius", "rigor", "delta", "cpu_seconds"}
    assert columns <= lines[0].keys()
    assert "up to ε/√d = 0.00721" in run(path, "--linf").stdout
    assert "up to ε/√d" not in run(path).stdout
    other = results(name="other")
    assert "\t0.00721\t" in run(path, other, "--linf", "--csv", "r.csv").stdout
    both = list(csv.DictReader(Path("r.csv").read_text().splitlines()))
    assert [(line["results"], line["unbroken_images"]) for line in both] == [("r", "3"), ("other", "")]


def test_json_and_summary_say_what_the_table_says():
    command = ["certify", "digits-vit", "--method", "gloro", "--eps", "36/255,0.5", "--limit", "3", "--out", "r.jsonl"]
    started = time.monotonic()
    found = json.loads(commands.run(*command, "--json").stdout)
    elapsed = time.monotonic() - started
    rows = read_rows()
    summary = read_summary()
    assert {found["rigor"]} == {summary["rigor"]} == {one["rigor"] for one in rows} == {"deterministic"}
    assert found["rigor_asked"] == "probabilistic"
    assert found["facts"] == json.loads(run("r.jsonl", "--json").stdout)[0] | {"seconds": found["seconds"]}
    assert found["facts"]["model"] == dict(line.split("\t", 1) for line in run("r.jsonl").stdout.splitlines())["model"]
    assert 0 < found["seconds"] < elapsed
    assert found["counts"]["cpu_seconds"] == sum(one["seconds"] for one in rows)
    assert "example_logits" not in found
    assert len(json.dumps(summary["example_logits"])) < 4000
    (again,) = read_runs(["r.jsonl"])
    assert again.settings().rigor == "probabilistic"
    assert {(one["norms"], one["rounding"], one["sampling"]) for one in rows} == {("proved", "proved", None)}


def test_logits_of_many_classes_are_few_and_tell_networks_apart():
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).tolist()
    assert all(len(one) <= 32 for one in thinned(logits))
    assert thinned(thinned(logits)) == thinned(logits)
    assert same_examples(logits, thinned(logits))
    assert not same_examples([[1.1 * z for z in one] for one in logits], thinned(logits))
    shifted = [[z + 1000 for z in one] for one in logits]  # the shared part is no reason for a wide tolerance
    assert same_examples(shifted, logits)
    assert not same_examples(shifted, [[z + 1000 for z in one[::-1]] for one in logits])


def test_the_code_of_a_card_certifies_as_the_run_did(results, tmp_path):
    lipcert.save(lipcert.load(None), "mine.safetensors")
    (one,) = read_runs([results(time=2.5, dtype="float32")])
    code = _card._snippet(one, Path("mine.safetensors"))
    assert "lipcert.load('mine.safetensors')" in code
    assert f"limit={len(ROWS)}).batches({len(ROWS)})" in code
    assert ", dtype='float32', time=2.5)" in code


def test_a_card_without_an_artifact_shows_the_command(results, tmp_path):
    run(results(command="lipcert certify resnet10t --checkpoint /home/someone/w.pth --mean 0.5"), "--card", "README.md")
    code = (tmp_path / "README.md").read_text().partition("## Reproduce")[2]
    assert "lipcert certify resnet10t --checkpoint path/to/w.pth --mean 0.5" in code
    run(results(name="p", command="lipcert.certify"), "--card", "p.md")
    code = (tmp_path / "p.md").read_text().partition("## Reproduce")[2]
    assert "lipcert.load" not in code
    assert "lipcert.certify(model, images, labels, eps=" in code


def test_each_model_has_a_card(results, tmp_path):
    paths = [results(), results(name="b", weights="1"), results(ROWS[:2], name="c")]
    with pytest.raises(InputError, match="of different ones: r, b"):
        model_card(read_runs(paths[:2]))
    run(*paths, "--card", "card.md", "--html", "page.html")
    cards = {path.name: ModelCard(path.read_text()) for path in tmp_path.glob("*.md")}
    assert {name: card.data.model_name for name, card in cards.items()} == {"card-r.md": "vit", "card-b.md": "vit"}
    assert len(cards["card-r.md"].data.eval_results) == 4
    assert (tmp_path / "page.html").exists()
    assert len(model_card(read_runs([paths[0], paths[2]])).data.eval_results) == 4
    assert issubclass(InputError, ValueError)


def test_data_sets_by_name(results):
    card = model_card(read_runs([results(data={"spec": "hfds/owner/name:test", "images": 6})]))
    result = card.data.eval_results[0]
    assert (result.dataset_type, result.dataset_split) == ("owner/name", "test")
    assert card.data.datasets == ["owner/name"]


def test_the_card_names_licence_base_and_file(results, tmp_path):
    command = "lipcert certify mine.safetensors --out r.jsonl"
    model = lipcert.load(None)
    lipcert.save(model, "mine.safetensors")
    about = {"source": model.source, "recipe": model.recipe, "weights_hash": weights_hash(model)}
    path = results(command=command, model=about)
    out = run(path, "--card", "README.md", "--license", "MIT", "--base-model", "timm/vit").stderr
    card = ModelCard(Path("README.md").read_text())
    assert (card.data.license, card.data.base_model) == ("mit", "timm/vit")
    assert "lipcert.load('mine.safetensors')" in str(card)
    assert card.data.model_name == "mine"
    assert "hf upload YOU/mine mine.safetensors mine.safetensors\n" in out
    assert "hf upload YOU/mine README.md README.md\n" in out
    (unknown,) = read_runs([results(name="unknown", weights="1")])
    assert model_card([unknown]).data.license is None
    assert "not stated" in str(model_card([unknown]))


def test_write_returns_what_it_wrote(results, tmp_path):
    runs = read_runs([results()])
    assert write(runs, card=tmp_path / "c.md") == [tmp_path / "c.md"]
    assert not list(tmp_path.glob(".*partial"))
    table = tmp_path / "t.csv"
    assert write(runs, csv=table) == write(runs, csv=table) == [table]  # it replaces its own
    (line,) = csv.DictReader(table.read_text().splitlines())
    assert (line["results"], line["images"]) == (runs[0].name, str(len(runs[0])))
    table.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="was not written by lipcert report"):
        write(runs, csv=table)


def test_radii_inside_the_network_are_not_called_radii_of_pixels():
    arguments = ["digits-vit", "--eps", "36/255", "--limit", "2", "--method", "anchored"]
    printed = commands.run("certify", *arguments, "--at", "blocks.1", "--out", "r.jsonl")
    assert "perturbations of the output of blocks.1, not of the pixels" in printed.stdout
    assert printed.stdout.count("\nnext\tlipcert report r.jsonl --html r.html") == 1
    (one,) = read_runs(["r.jsonl"])
    assert "ℓ2 perturbation of the output of blocks.1 up to ε" in _build.sentence(one, one.every_eps)
    assert [text for text in promises([one]) if "Distances are measured on pixels" in text] == []
    drawn = []
    _figures._draw_curve([one], 0.01, 1.0, False, drawn)
    assert drawn[0].get_xlabel() == "ε, ℓ2 on the output of blocks.1"
    advised = run("r.jsonl").stdout
    assert shlex.split(advised.splitlines()[-1])[1:] == ["lipcert", "report", "r.jsonl", "--html", "report.html"]
    assert "a card is about perturbations of the pixels" in run("r.jsonl", "--card", "card.md", code=2).stderr
    assert not Path("card.md").exists()


def test_a_part_of_a_run_is_called_so(results):
    (run,) = read_runs([results(name="r.shard-1-of-4")])
    assert any("part 1 of 4 of a run" in note for note in run.notes)


def test_weights_that_other_code_runs_are_another_model(tmp_path):
    model = lipcert.load("digits-vit")
    images = torch.rand(2, *model.input_size)
    lipcert.certify(model, images, eps=0.1, method="gloro").save(tmp_path / "a.jsonl")
    model.net.global_pool = "max"
    lipcert.certify(model, images, eps=0.1, method="gloro").save(tmp_path / "b.jsonl")
    own, changed = read_runs([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert own.weights_hash == changed.weights_hash
    assert "# digits-vit" in str(model_card([own]))
    assert "digits" not in str(model_card([changed])).partition("# ")[2].splitlines()[0]
    with pytest.raises(InputError, match="different ones"):
        model_card([own, changed])
    with pytest.raises(InputError, match="computes something else"):
        lipcert.save(model, tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "changes",
    [{"data": "x"}, {"environment": [1]}, {"class_names": [1]}, {"bound": "x"}, {"further_eps": 5}, {"command": "a 'b"}]
    + [{"model": {"source": {}}}, {"model": {"recipe": [], "source": "x"}}, {"complete": "no"}],
)
def test_a_damaged_summary_is_refused_in_one_line(results, changes):
    path = results()
    beside = path.with_suffix(".summary.json")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), **changes}))
    assert "is not a summary of results" in refused(path)
