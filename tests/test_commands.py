"""The first day with lipcert: from the installed package to a published card, from the first key to the last figure."""

import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import huggingface_hub
import torch
from commands import run, write_images
from PIL import Image

import lipcert
from lipcert.certvit._measures import MEASURES
from lipcert.cli import _print
from lipcert.cli._commands import COMMANDS
from lipcert.inputs.artifact import read_metadata
from lipcert.results import read_run
from lipcert.settings import MEASURE_NAMES

HUB = """
    import pathlib, shutil, sys
    command, repository, source, target = sys.argv[1:]
    assert command == "upload" and "/" in repository
    shutil.copy(source, pathlib.Path("hub") / target)
"""


def test_from_install_to_a_published_card_in_four_commands(tmp_path) -> None:
    """pip install lipcert, certify, report, and what report prints; ``hf`` is one that copies into a folder."""
    certified = run("certify", "--eps", "36/255", "--limit", 4, "--method", "gloro", "--out", "digits.jsonl")
    assert "next\tlipcert report digits.jsonl --html digits.html" in certified.stdout
    shown = run("report", "digits.jsonl", "--card", "README.md")
    uploads = [shlex.split(line) for line in shown.stderr.splitlines() if line.strip().startswith("hf upload")]
    page = (Path(__file__).parents[1] / "docs/how-to/publish.md").read_text()
    assert [words[-1] for words in uploads] == re.findall(r"^  hf upload .* (\S+)$", page, re.M)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hf.py").write_text(textwrap.dedent(HUB))
    for _, *arguments in uploads:
        subprocess.run([sys.executable, "hf.py", *arguments], check=True, cwd=tmp_path)
    card = huggingface_hub.ModelCard.load(tmp_path / "hub" / "README.md")
    assert card.data.library_name
    (weights,) = (tmp_path / "hub").glob("*.safetensors")
    assert read_metadata(weights)["weights_hash"] == read_run(Path("digits.jsonl")).weights_hash


def test_help_has_headings_choices_and_short_names() -> None:
    shown = run("certify", "-h").stdout
    places = [
        shown.index(f"\n{heading}:\n") for heading in ("Options", "Options of method smoothing", "Model", "Output")
    ]
    assert places == sorted(places)
    assert "--method [staged|global|" in shown
    assert "-o, --out" in shown
    assert "-q, --quiet" in shown
    for command in COMMANDS:
        text = run(command, "-h").stdout
        assert "-q, --quiet" in text
        assert "--json" in text
        assert "<list" not in text
    assert "by default the newest" not in run("predict", "-h").stdout  # which takes a model and images


def test_quiet_leaves_results_and_errors(monkeypatch) -> None:
    result = run("certify", "--eps", "0.1", "--limit", 2, "--method", "gloro", "-q")
    assert result.stderr == ""
    assert "certified accuracy" in result.stdout
    assert "\nnext\t" not in result.stdout
    assert run("certify", "--eps", "-1", "--quiet", code=2).stderr.startswith("lipcert: eps must be")
    assert not _print.quiet
    assert "model: digits-vit, bundled" in run("inspect").stderr


def test_every_step_is_recorded() -> None:
    made = [
        "--no-pretrained",
        "--model-args",
        "img_size=16 patch_size=8 num_classes=3 depth=1 embed_dim=24 num_heads=2",
    ]
    write_images("images", 6, 16)
    run("convert", "test_vit", *made, "--data", "images", "-o", "a.safetensors")
    lowered = run("constrain", "a.safetensors", "--data", "images", "--error", 0.1, "-o", "b.safetensors", "--json")
    assert json.loads(lowered.stdout)["written"] == "b.safetensors"
    tuned = ["--epochs", 1, "--batch-size", 3, "--loss", "ce", "-o", "c.safetensors"]
    result = run("finetune", "b.safetensors", "--data", "images", "--eps", "36/255", *tuned)
    assert "next\tlipcert certify c.safetensors --eps 36/255 --data TEST" in result.stdout
    convert, constrain, finetune = read_metadata("c.safetensors")["recipe"]
    assert (convert["step"], convert["data"], convert["images"]) == ("convert", "images", 6)
    assert (constrain["step"], constrain["data"], constrain["error"]) == ("constrain", "images", 0.1)
    assert constrain["batch_size"]
    assert (finetune["step"], finetune["data"], finetune["batch_size"], finetune["seed"]) == (
        "finetune",
        "images",
        3,
        0,
    )
    run("certify", "c.safetensors", "--data", "images", "--eps", 0.1, "--method", "gloro", "-o", "r.jsonl")
    steps = re.findall(r"→ (\w+)", read_run(Path("r.jsonl")).architecture)
    assert steps == ["convert", "constrain", "finetune"]
    named = dict(read_run(Path("r.jsonl")).steps)["constrain"]
    assert f"layers={constrain['layers'][0]} … {constrain['layers'][-1]} ({len(constrain['layers'])})" in named


def test_a_certifier_says_which_method_runs_and_how_far_it_is() -> None:
    small = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "num_heads": 2, "depth": 1, "num_classes": 3}
    model = lipcert.load("vit_tiny_patch16_224", pretrained=False, **small)
    certifier = lipcert.certifier.Certifier(model, 0.1, "anchored")
    seen: list[tuple[str, float]] = []
    certifier.watch = lambda stage, done: seen.append((stage, done))
    certifier.run(torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(0)))
    assert {stage for stage, _ in seen} == {"anchored"}
    shares = [done for _, done in seen]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1
    assert len(shares) > 10


def test_the_first_command_of_a_process_says_how_images_are_resized(tmp_path) -> None:
    Image.new("RGB", (40, 32)).save("one.png")
    command = [
        sys.executable,
        "-m",
        "lipcert",
        "certify",
        "bundled",
        "--data",
        "one.png",
        "--eps",
        "1",
        "--method",
        "gloro",
    ]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr
    assert "images: 32×40 → resize to 8 on the shorter side, crop" in shown, shown
    assert "centre crop discards" in shown


def test_measures_are_those_that_the_command_offers() -> None:
    assert {*MEASURES, "clip", "rescale"} == {*MEASURE_NAMES}
