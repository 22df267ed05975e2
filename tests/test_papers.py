"""The papers' tables as data, the commands that make them, and the README of the benchmarks."""

import inspect
import json

import pytest
import timm
import torch
from click import Context
from typer.main import get_command

import lipcert
from benchmarks import make_readme
from benchmarks.papers import __main__ as papers
from benchmarks.papers import measures
from benchmarks.papers.tables import LISTED, RECIPES, SCALES, TABLES, find
from lipcert.cli import app

assert lipcert.networks  # registers the papers' architectures


def test_every_row_has_a_network_a_recipe_and_its_figures():
    assert {table.paper for table in TABLES} == set(LISTED)
    assert len({(table.paper, table.number) for table in TABLES}) == len(TABLES)
    for table in TABLES:
        assert bool(table.rows) or table.measure or table.needs
        assert table.measure is None or inspect.isfunction(getattr(measures, table.measure))
        for row in table.rows:
            assert len(row.paper) == len(table.columns), row.name
            assert row.recipe is None or row.recipe in RECIPES
            assert row.model is None or timm.is_model(row.model), row.model


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_commands_of_a_recipe_are_understood(name):
    commands = get_command(app)
    values = {"train": "D", "eps": "0.1", "batch": 8, "epochs": 1, "images": 8, "calibration": 8, "preset": "cifar10"}
    for step in RECIPES[name].steps:
        command, *options = (part.format(**values) for part in step.split())
        known = commands.get_command(Context(commands), command)
        context = known.make_context(command, ["MODEL", *options], resilient_parsing=False)
        assert context.params["model"] == "MODEL"


def test_rows_that_cannot_be_run_say_what_they_need(tmp_path, monkeypatch, capsys):
    def no_command(arguments):
        raise AssertionError(arguments)

    monkeypatch.setattr(papers, "_run", no_command)
    rows = {row["name"]: row for row in papers.table(find("certvit", "1"), "small", {}, None)}
    assert "needs the data set mnist" in rows["MNIST, Standard 4C3F"]["here"]
    assert rows["MNIST, BCP 4C3F"]["here"].startswith("quoted")
    assert rows["CIFAR-10, CertViT ViT"]["paper"]["certified"] == 33.1
    assert "Treebank" in papers.table(find("lofast", "figure 5"), "small", {})[0]["needs"]
    with pytest.raises(SystemExit, match="no table 99 of certvit here; there are 1, 2"):
        find("certvit", "99")


def test_hyper_parameters_and_parameters_are_those_of_the_package(monkeypatch, tmp_path, capsys):
    out = tmp_path / "papers.json"
    monkeypatch.setattr("sys.argv", ["papers", "--paper", "certvit", "--table", "9", "--out", str(out)])
    papers.main()
    rows = json.loads(out.read_text())["certvit, 9, small"]["rows"]
    assert [row["name"] for row in rows] == ["mnist", "cifar10", "cifar100", "tinyimagenet"]
    assert rows[0]["relaxation"] == 1.1
    assert len(find("certvit", "10").settings) == 14
    (first, *_) = measures.parameters(find("certvit", "2"), True, None)
    assert first["dot-product"] == pytest.approx(5.717416)  # timm's count for ViT-Ti/16
    assert first["L2"] < first["dot-product"]


@pytest.mark.parametrize(
    ("name", "images"),
    [
        ("MNIST, CertViT 4C3F", (1, 28, 28)),
        ("MNIST, CertViT ViT", (1, 28, 28)),
        ("TinyImageNet, GloRo 8C2F", (3, 64, 64)),
        ("CIFAR-100, Standard ViT", (3, 32, 32)),
    ],
)
def test_networks_fit_their_data_sets(name, images):
    (row,) = (row for row in find("certvit", "1").rows if row.name == name)
    arguments = dict(part.split("=") for part in row.model_args.split())
    given = {key: int(value) if value.isdigit() else value for key, value in arguments.items()}
    model = lipcert.load(row.model, pretrained=False, **given)
    assert model.input_size == images
    classes = {"mnist": 10, "cifar100": 100, "tinyimagenet": 200}[row.data]
    assert model(torch.rand(1, *images)).shape == (1, classes)


def test_every_scale_names_epochs_for_every_paper():
    assert all(set(scale.epochs) == set(LISTED) for scale in SCALES.values())


def test_committed_figures_keep_their_order():
    """No attack passes a bound, and Theorem 1 lies between lipcert's bound and the naive one."""
    known = json.loads(papers.RESULT.read_text())
    for row in known["lofast, 3, small"]["rows"]:
        theorem, attack = row["LoFAST, Theorem 1"], row["attack"]
        ours = row["lipcert, attention, and the residual added"]
        assert attack <= ours <= theorem <= row["LoFAST with ξ"] <= row["LoFAST, equation 12"] <= row["SpecFormer"]
    for row in known["lofast, figure 4, small"]["rows"]:
        assert row["attack"] <= row["lipcert"] <= row["LoFAST, Theorem 1"] <= row["LoFAST with ξ"]


def test_the_readme_is_what_the_scripts_say():
    assert make_readme.PAGE.read_text() == make_readme.page(), "run python -m benchmarks.make_readme"
