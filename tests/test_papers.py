"""The papers' tables as data, the commands that make them, and the README of the benchmarks."""

import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from click import Context
from commands import write_images
from PIL import Image
from typer.main import get_command

import lipcert
from benchmarks import command as with_python
from benchmarks.papers import __main__ as papers
from benchmarks.papers import measures, shown, stand_ins, trained
from benchmarks.papers.recipes import RECIPES, SCALES, TRAININGS, Given, Row, Scale, Table, differences, values_of
from benchmarks.papers.tables import LISTED, TABLES, find
from benchmarks.papers.tables_certvit import pretrained
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
    every = [pretrained("tf_efficientnet_lite0", "lite0.safetensors"), *(row for table in TABLES for row in table.rows)]
    row = [row for row in every if row.recipe == name][-1]
    steps = trained.commands(row, SCALES[scale], "my folder/train.tar")
    assert all(step[step.index("--data") + 1] == "my folder/train.tar" for step in steps)
    assert any("--limit" in part for step in steps if step[0] == "finetune" for part in step) is (scale != "full")
    assert len(steps) == len(RECIPES[name].steps)
    assert [step[0] for step in steps if "--checkpoint" in step] == [steps[0][0]] * (row.checkpoint is not None)
    assert ("--no-pretrained" in steps[0]) is not RECIPES[name].pretrained
    for command, *options in (with_python.split(step)[0] for step in steps):
        one = known.get_command(Context(known), command)
        context = one.make_context(command, list(options), resilient_parsing=False)
        assert context.params["model"] in ("MODEL", row.model)


def test_full_scale_takes_the_numbers_of_the_papers_tables():
    rows = {(table.paper, table.number, row.name): row for table in TABLES for row in table.rows}
    stated = {
        ("certvit", "1", "MNIST, CertViT 4C3F"): {
            "batch": 512,
            "epochs": 100,
            "updates": "--optimizer adam --lr 0.001 --schedule multistep --warmup 0 --power-iterations 2 --crop none",
        },
        ("certvit", "1", "CIFAR-10, GloRo 4C3F"): {"batch": 512, "epochs": 800, "ramp": "0,1.133,0.5"},
        ("certvit", "1", "CIFAR-10, CertViT 6C2F"): {
            "beta": 0.1,
            "eta": 0.01,
            "relaxation": 1.2,
            "iterations": 5,
            "projections": 2,
            "parts": 16,
        },
        ("certvit", "1", "CIFAR-10, Local-Lip 6C2F"): {"batch": 256, "epochs": 300, "ramp": "0,1.099,0.6667"},
        ("certvit", "3", "vit_base_patch8_224"): {"batch": 128, "epochs": 70, "eta": 0.01},
        ("liresnet", "1", "ImageNet, LiResNet L12W588"): {"batch": 1024, "epochs": 400},
        ("liresnet", "1", "CIFAR-10, LiResNet L12W512"): {
            "updates": "--optimizer nadam --lr 0.001 --schedule cosine --warmup 0.025 --power-iterations 2 "
            "--crop shift",
            "strong": "--randaugment rand-m9-n2",
        },
        ("local-lip", "2", "CIFAR-10, Local-Lip-B 6C2F"): {"batch": 256, "epochs": 800, "ramp": "0,1.099,0.5"},
        ("local-lip", "6", "λ_sparse 0.03"): {
            "batch": 128,
            "updates": "--optimizer adam --lr 0.00025 --schedule exponential --warmup 0 --power-iterations 1 "
            "--decay-from 0.6 --last-lr 5e-07 --crop shift",
            "sparsity": 0.03,
            "upper": 0.1,
        },
    }
    for key, expected in stated.items():
        found = values_of(rows[key], SCALES["full"], "D")
        assert {name: found[name] for name in expected} == expected, key
    for row in rows.values():
        assert row.training is None or row.data in TRAININGS[row.training], row.name


def test_rows_that_cannot_be_run_say_what_they_need(tmp_path, monkeypatch, capsys):
    def no_command(arguments):
        raise AssertionError(arguments)

    monkeypatch.setattr(trained, "run", no_command)
    rows = {row["name"]: row for row in papers.table(find("certvit", "1"), "small", {})}
    assert "needs the data set mnist" in rows["MNIST, Standard 4C3F"]["here"]
    assert " --data torch/mnist:train " in rows["MNIST, Standard 4C3F"]["commands"][0]
    assert rows["MNIST, BCP 4C3F"]["here"].startswith("quoted")
    assert rows["CIFAR-10, CertViT ViT"]["paper"]["certified"] == 33.1
    (needs, first, *_) = papers.table(find("certvit", "3"), "full", {})
    assert "ImageNet" in needs["needs"]
    assert first["commands"][0].startswith("lipcert convert vit_tiny_patch16_224 ")
    assert "Treebank" in next(papers.table(find("lofast", "figure 5"), "small", {}))["needs"]
    with pytest.raises(SystemExit, match="no table 99 of certvit here; there are 1, 2"):
        find("certvit", "99")


SMALL = Scale(8, {"gloro": 4, "local": 2}, 2, 4, 1, 4, optimizers={"": "adamw --lr 1e-3"}, data=())


@pytest.fixture
def images(tmp_path):
    """Four classes of images of 8×8, in folders."""
    for split in ("train", "test"):
        write_images(tmp_path / "data" / split, 8, 8, "abcd")
    return {"cifar10": str(tmp_path / "data")}


def small(name, recipe, paper):
    size = "act_layer=relu img_size=8 num_classes=4"
    return Row(name, paper, "cifar10", "lip_convnet_4c3f", recipe, "0.01", size, "Local-Lip, table 3")


def test_a_trained_row_runs_its_commands_once(images, tmp_path, monkeypatch):
    """Two tables share the network of a row; the second trains nothing and says the same."""
    table = Table("local-lip", "2", "title", rows=(small("one", "gloro", (1.0, 2.0, 3.0)),))
    kept = trained.Kept(tmp_path)
    first = trained.row(table.rows[0], table, SMALL, images, kept)
    here = first["here"]
    assert here["certified"]["gloro"]["images"] == 4
    assert 0 <= here["certified"]["gloro"]["certified"] <= here["clean"] <= 1
    assert here["certified"]["local"]["gloro on these"] <= here["certified"]["local"]["certified"] <= 1
    assert 0 <= here["constant units"] <= 1
    assert here["parameters"] > 0 < here["seconds an epoch"]
    assert first["commands"][0].startswith("python -m benchmarks.command finetune lip_convnet_4c3f --no-pretrained ")
    left = trained.row(table.rows[0], table, SMALL, images, kept, wanted=False)
    assert left["here"] == "not run"
    assert left["commands"][0].startswith("python -m benchmarks.command finetune ")
    assert all(str(tmp_path) not in command for one in (first, left) for command in one["commands"])
    monkeypatch.setattr(trained, "run", lambda arguments: pytest.fail(f"trained again: {arguments}"))
    assert trained.row(table.rows[0], table, SMALL, images, kept) == first


def test_a_command_that_fails_is_a_row_that_says_why(images, tmp_path):
    table = Table("local-lip", "2", "title", rows=(small("one", "local-b", (1.0, 2.0, 3.0)),))
    wrong = dataclasses.replace(SMALL, optimizers={"": "adamw --lr -1"})
    found = trained.row(table.rows[0], table, wrong, images, trained.Kept(tmp_path))
    assert "lr must be a positive number" in found["here"]
    assert "lipcert: lr must be" in shown.text(table, wrong, [found], None)


def test_a_single_row_is_added_to_those_that_are_stored(tmp_path, monkeypatch, capsys):
    def row(one, of, scale, folders, kept, *, wanted=True):
        return (
            made(one.name, {"clean": 1.0, "certified": 0.5}, 0.5)
            if wanted
            else {"name": one.name, "paper": {}, "here": "not run"}
        )

    monkeypatch.setattr(trained, "row", row)
    out = tmp_path / "papers.json"
    for name in ("ConvNet EMMA", "LiResNet EMMA"):
        given = ["papers", "--paper", "liresnet", "--table", "3", "--row", f"CIFAR-10, {name}", "--out", str(out)]
        monkeypatch.setattr("sys.argv", given)
        papers.main()
    stored = json.loads(out.read_text())["liresnet, 3, small"]
    assert [one["name"] for one in stored["rows"]] == [one.name for one in find("liresnet", "3").rows]
    assert [one["name"] for one in stored["rows"] if "data" in one] == [
        "CIFAR-10, ConvNet EMMA",
        "CIFAR-10, LiResNet EMMA",
    ]
    assert "\nnot run\n  CIFAR-10, ConvNet TRADES" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*given[:6], "no such row"])
    with pytest.raises(SystemExit):
        papers.main()
    assert "the rows are CIFAR-10, ConvNet TRADES;" in capsys.readouterr().err


def made(name, paper, share, data="cifar10", seconds=1.0):
    """A row as trained.row gives it."""
    shares = {"gloro": {"certified": share, "images": 500}, "local": {"certified": share, "images": 40}}
    here = {
        "clean": 0.5, "pgd": 0.4, "attacked": 32, "certified": shares, "log10 bound": 9.6, "seconds an epoch": seconds,
        "constant units": 0.25, "local bound, estimated": 2.5,
    }  # fmt: skip
    return {"name": name, "paper": paper, "data": data, "images": 8, "epochs": 1, "here": here}


def test_methods_are_compared_with_the_papers_order():
    recipes = {"a": "standard", "b": "gloro", "c": "local-g", "d": "certvit"}
    listed = [small(name, recipe, (1.0,)) for name, recipe in recipes.items()]
    listed.append(dataclasses.replace(listed[1], name="two things", model="lip_convnet_6c2f", recipe="local-b"))
    table = Table("local-lip", "2", "t", ("certified",), tuple(listed))
    values, shares = (10.0, 20.0, 30.0, None, 0.0), (0.10, 0.90, 0.50, 0.3, 0.95)
    rows = [made(one.name, {"certified": v}, s) for one, v, s in zip(listed, values, shares, strict=True)]
    order = shown.compared(table, SMALL, rows)
    why = "has smaller margins here: 50.0 % clean and a bound of 2.5 near images, the other 50.0 % and 2.5"
    assert order["as in the paper"] == [["b", "a", 80.0, 10.0], ["c", "a", 40.0, 20.0]]
    assert (order["the other way round"], order["too close to say"]) == ([["c", "b", -40.0, 10.0, why]], [])
    assert shown.said(order).startswith(
        "By certified share, the order of the 3 pairs of rows that differ in one thing is not the paper's: "
        "2 as in the paper, 0 too close to say, 1 the other way round (c ahead of b by 10 in the paper, by -40 here"
        f"; c {why}). Each network was trained once, for 1 epochs of 8 images; the paper's for "
    )
    assert "of the pair of rows that differ in one thing is the paper's: 1 as" in shown.said(
        shown.compared(table, SMALL, rows[:2])
    )
    close = [made("a", {"certified": 10.0}, 0.50), made("b", {"certified": 20.0}, 0.52)]
    near = shown.compared(table, SMALL, close)
    assert near["too close to say"] == [["b", "a", 2.0, 10.0]]
    trial = [made(n, {"certified": p}, 0.5) for n, p in (("a", 1.0), ("b", 2.0))]
    for row in trial:
        row["here"]["certified"]["gloro"]["images"] = 4
    assert shown.compared(table, SCALES["trial"], trial) is None
    assert "is open in part: 0 as" in shown.said(near)
    assert "No two rows were run" in shown.said(shown.compared(table, SMALL, rows[3:]))
    close[0]["here"]["certified"]["anchored"] = {"certified": 0.0, "images": 8}
    assert shown.compared(table, SMALL, close)["too close to say"] == [["b", "a", 2.0, 10.0]]
    again = dataclasses.replace(table, rows=(*listed, dataclasses.replace(listed[0], name="a again")))
    twice = [*rows[:2], made("a again", {"certified": 10.0}, 0.10)]
    assert shown.compared(again, SMALL, twice)["as in the paper"] == [["b", "a", 80.0, 10.0]]
    timed = Table("local-lip", "7", "t", ("seconds an epoch",), table.rows, ordered="seconds an epoch")
    fast = [made(n, {"seconds an epoch": p}, 0.5, seconds=s) for n, p, s in (("a", 1.0, 2.0), ("b", 9.0, 3.0))]
    assert shown.compared(timed, SMALL, fast)["as in the paper"] == [["a", "b", 1.0, 8.0]]


@pytest.mark.parametrize(
    ("clean", "log10", "local", "expected"),
    [
        (0.3, (1.0, 0.0), (9.0, 1.0), "has learned less here: 30.0 % clean, the other 50.0 %"),
        (0.5, (0.0, 1.0), (9.0, 1.0), "has a larger bound here near images: 9, the other 1"),
        (0.5, (2.0, 1.0), None, "has a larger bound here: 100, the other 10"),
        (0.5, (1.0, 1.0), None, "has smaller margins here: 50.0 % clean and a bound of 10, the other 50.0 % and 10"),
    ],
)
def test_a_reason_is_what_certified_shares_come_from(clean, log10, local, expected):
    rows = [made(name, {"certified": 1.0}, 0.5)["here"] for name in "ab"]
    for here, bound, near in zip(rows, log10, local or (None, None), strict=True):
        here |= {"log10 bound": bound, "local bound, estimated": near}
        if local is None:
            del here["local bound, estimated"]
    rows[0]["clean"] = clean
    assert shown._reason(*rows) == expected


def test_shares_are_compared_on_the_same_images_if_local_says_more():
    def row(gloro, local, of_gloro):
        shares = {"gloro": {"certified": gloro, "images": 2000}}
        shares["local"] = {"certified": local, "images": 200, "gloro on these": of_gloro}
        return {"here": {"certified": shares}}

    plain, other, helped = row(0.2, 0.15, 0.15), row(0.3, 0.25, 0.25), row(0.0, 0.16, 0.0)
    assert shown._values(plain, other, False) == [(0.2, 2000), (0.3, 2000)]
    assert shown._values(plain, helped, False) == [(0.15, 200), (0.16, 200)]
    del other["here"]["certified"]["local"]
    assert shown._values(other, helped, False) == [(0.3, 2000), (0.16, 200)]


def test_trained_tables_fit_into_100_columns():
    for table in TABLES:
        ran = [row for row in table.rows if row.recipe and table.measure is None and row.data == "cifar10"]
        quoted = [row for row in table.rows if table.measure is None and row not in ran]
        rows = [made(row.name, dict(zip(table.columns, row.paper, strict=True)), 0.123) for row in ran]
        if rows and rows[-1]["name"].endswith("ViT"):
            rows[-1]["here"]["certified"]["anchored"] = {"certified": 0.5, "images": 8}
        rows += [{"name": row.name, "paper": {}, "here": "quoted: no such method or network"} for row in quoted]
        text = shown.text(table, SCALES["small"], rows, shown.compared(table, SCALES["small"], rows))
        assert max(map(len, text.splitlines()), default=0) <= shown.WIDTH, table.title
        assert all(row.name.split(", ")[-1] in text for row in ran)


def test_a_folder_that_is_not_there_is_refused(monkeypatch, capsys):
    given = ["papers", "--paper", "local-lip", "--table", "2", "--data", "cifar10=/no/such"]
    monkeypatch.setattr("sys.argv", given)
    with pytest.raises(SystemExit) as ended:
        papers.main()
    assert ended.value.code == 2
    assert "a folder with train.tar and test.tar" in capsys.readouterr().err


def test_hyper_parameters_and_parameters_are_those_of_the_package(monkeypatch, tmp_path, capsys):
    out = tmp_path / "papers.json"
    monkeypatch.setattr("sys.argv", ["papers", "--paper", "certvit", "--table", "9", "--out", str(out)])
    papers.main()
    rows = json.loads(out.read_text())["certvit, 9, small"]["rows"]
    assert [row["name"] for row in rows] == ["mnist", "cifar10", "cifar100", "tinyimagenet"]
    assert rows[0]["relaxation"] == 1.1
    assert len(find("certvit", "10").settings) == 14
    (first, *_) = measures.parameters(find("certvit", "2"), Given(True))
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
    for row in measures.architectures(find("certvit", number), Given(True)):
        assert row["here"] == row["paper"], row["name"]


def test_no_slope_of_gelu_passes_its_constant_but_the_papers():
    (row,) = measures.gelu(find("certvit", "figure 2"), Given(True))
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


def test_the_papers_lip_is_below_the_bound_and_said_to_be_none():
    """By hand for one block of L2 attention; other networks have none."""
    model = lipcert.load("certvit_mnist", pretrained=False, depth=1, embed_dim=16)
    assert trained.printed_lip(model) == {}
    lipcert.convert(model, attention="l2", norm="smooth")
    net = model.net
    plain = [net.patch_embed.proj, net.blocks[0].mlp.fc1, net.blocks[0].mlp.fc2, net.head]
    norms = [float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2)) for layer in plain]
    attention = net.blocks[0].attn.lipschitz((16, 16)).value
    ((name, log10),) = trained.printed_lip(model).items()
    assert name == shown.NO_BOUND
    assert 10**log10 == pytest.approx(1.12 * attention * np.prod(norms), rel=1e-5)
    assert log10 < lipcert.lipschitz(model).log10


@pytest.mark.parametrize("name", sorted(stand_ins.SHAPES))
def test_stand_ins_have_the_shape_of_their_data_sets(name, tmp_path, monkeypatch):
    side, channels, classes = stand_ins.SHAPES[name]
    monkeypatch.setitem(stand_ins.SHAPES, name, (side, channels, 3))
    folder = stand_ins.stand_in(name, tmp_path)
    assert classes == {"cifar100": 100, "tinyimagenet": 200, "imagenet": 1000}.get(name, 10)
    train, test = trained.splits(name, {name: str(folder)})
    for split in (train, test):
        files = sorted(Path(split).rglob("*.png"))
        assert len(files) == 3
        with Image.open(files[0]) as image:
            assert (image.size, image.mode) == ((side, side), "L" if channels == 1 else "RGB")


def test_full_scale_says_in_what_it_differs():
    lines = differences(find("certvit", "1").rows)
    assert len(lines) == 5
    assert any("single" in line for line in lines)
    assert any("one vector of each layer" in line for line in differences(find("local-lip", "2").rows))
    assert not any("RandAugment" in line for line in differences(find("local-lip", "2").rows))


def test_data_sets_that_no_name_opens_are_asked_for_by_folder():
    """TinyImageNet; the printed command has a folder in the place of its name."""
    for scale in ("small", "full"):
        row = next(row for row in papers.table(find("local-lip", "6"), scale, {}))
        assert row["here"] == "needs the data set tinyimagenet: --data tinyimagenet=FOLDER"
        assert "--data FOLDER/train " in row["commands"][0]
