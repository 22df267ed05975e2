"""The papers' tables as data, the commands that make them, and the README of the benchmarks."""

import inspect
import json

import pytest
import timm
import torch
from click import Context
from typer.main import get_command

import lipcert
from benchmarks import make_readme, parallel_layers
from benchmarks.papers import __main__ as papers
from benchmarks.papers import measures
from benchmarks.papers.recipes import RECIPES, SCALES, TRAININGS, values_of
from benchmarks.papers.tables import LISTED, TABLES, find
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


@pytest.mark.parametrize("scale", sorted(SCALES))
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_commands_of_a_recipe_are_understood(name, scale):
    """Of the last row that has the recipe, whose training is not the commonest."""
    known = get_command(app)
    row = [row for table in TABLES for row in table.rows if row.recipe == name][-1]
    steps = papers.commands(row, SCALES[scale], "my folder/train.tar")
    assert all(step[step.index("--data") + 1] == "my folder/train.tar" for step in steps)
    assert any("--limit" in part for step in steps if step[0] == "finetune" for part in step) is (scale == "small")
    assert len(steps) == len(RECIPES[name].steps)
    assert ("--no-pretrained" in steps[0]) is not RECIPES[name].pretrained
    for command, *options in steps:
        one = known.get_command(Context(known), command)
        context = one.make_context(command, list(options), resilient_parsing=False)
        assert context.params["model"] in ("MODEL", row.model)


def test_full_scale_takes_the_numbers_of_the_papers_tables():
    rows = {(table.paper, table.number, row.name): row for table in TABLES for row in table.rows}
    stated = {
        ("certvit", "1", "MNIST, CertViT 4C3F"): {"batch": 512, "epochs": 100, "schedule": "multistep"},
        ("certvit", "1", "CIFAR-10, GloRo 4C3F"): {"batch": 512, "epochs": 800, "over": "1.133"},
        ("certvit", "1", "CIFAR-10, Local-Lip 6C2F"): {"batch": 256, "epochs": 300, "until": 0.667},
        ("certvit", "3", "vit_base_patch8_224"): {"batch": 128, "epochs": 70, "preset": "vit_base_patch8"},
        ("liresnet", "1", "ImageNet, LiResNet L12W588"): {"batch": 1024, "epochs": 400},
        ("local-lip", "2", "CIFAR-10, Local-Lip-B 6C2F"): {"batch": 256, "epochs": 800, "over": "1.099"},
        ("local-lip", "6", "λ_sparse 0.03"): {"batch": 128, "lr": 2.5e-4, "sparsity": 0.03},
    }
    for key, expected in stated.items():
        found = values_of(rows[key], SCALES["full"], "D")
        assert {name: found[name] for name in expected} == expected, key
    for row in rows.values():
        assert row.training is None or row.data in TRAININGS[row.training], row.name


def test_rows_that_cannot_be_run_say_what_they_need(tmp_path, monkeypatch, capsys):
    def no_command(arguments):
        raise AssertionError(arguments)

    monkeypatch.setattr(papers, "_run", no_command)
    rows = {row["name"]: row for row in papers.table(find("certvit", "1"), "small", {}, None)}
    assert "needs the data set mnist" in rows["MNIST, Standard 4C3F"]["here"]
    assert rows["MNIST, BCP 4C3F"]["here"].startswith("quoted")
    assert rows["CIFAR-10, CertViT ViT"]["paper"]["certified"] == 33.1
    (needs, first, *_) = papers.table(find("certvit", "3"), "full", {}, None)
    assert "ImageNet" in needs["needs"]
    assert first["commands"][0].startswith("lipcert convert vit_tiny_patch16_224 ")
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
        ("CIFAR-100, Standard 8C2F", (3, 32, 32)),
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


@pytest.mark.parametrize("number", ["4", "5", "6"])
def test_networks_have_the_sizes_of_the_papers_tables(number):
    for row in measures.architectures(find("certvit", number), True, None):
        assert row["here"] == row["paper"], row["name"]


def test_no_slope_of_gelu_passes_its_constant_but_the_papers():
    (row,) = measures.gelu(find("certvit", "figure 2"), True, None)
    assert row["paper"][0] < row["slope found"] <= row["lipcert"]


def test_committed_figures_keep_their_order():
    """No attack passes a bound, and Theorem 1 lies between lipcert's bound and the naive one."""
    known = json.loads(papers.RESULT.read_text())
    for row in known["lofast, 3, small"]["rows"]:
        theorem, attack = row["LoFAST, Theorem 1"], row["attack"]
        ours = row["lipcert, attention, and the residual added"]
        assert attack <= ours <= theorem <= row["LoFAST with ξ"] <= row["LoFAST, equation 12"] <= row["SpecFormer"]
    for row in known["lofast, figure 4, small"]["rows"]:
        assert row["attack"] <= row["lipcert"] <= row["LoFAST, Theorem 1"] <= row["LoFAST with ξ"]


def test_layers_are_solved_alike_and_timed(tmp_path, monkeypatch, capsys):
    out = tmp_path / "parallel.json"
    sizes = ["--layers", "2", "--width", "6", "--rows", "30", "--repeats", "2", "--processes", "0"]
    monkeypatch.setattr("sys.argv", ["parallel_layers", *sizes, "--out", str(out)])
    threads = torch.get_num_threads()
    try:
        parallel_layers.main()
    finally:
        torch.set_num_threads(threads)
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["processes"], row["speed-up"]) == (0, 1.0)
    assert row["seconds"] > 0


def test_the_readme_is_what_the_scripts_say():
    assert make_readme.PAGE.read_text() == make_readme.page(), "run python -m benchmarks.make_readme"
