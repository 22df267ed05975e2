"""The commands as a user runs them: output, files, exit codes, and one line for everything that goes wrong."""

import contextlib
import copy
import importlib
import io
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import textwrap
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from commands import facts, read_rows, read_summary, refused, run, timeless, write_images
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import lipcert
from lipcert import workers
from lipcert.bounds import Bound, LayerBound
from lipcert.certifier import METHODS, Certifier, _certifier
from lipcert.cli import _inspect, _parse, _print
from lipcert.cli._commands import _joined
from lipcert.errors import InputError
from lipcert.inputs.artifact import load_artifact, read_metadata, save
from lipcert.inputs.data import open_images, order_of
from lipcert.inputs.files import lock
from lipcert.inputs.loading import load
from lipcert.results._parallel import _registering
from lipcert.settings import parse_eps
from lipcert.settings import shown as rounded

TINY = {"img_size": 32, "patch_size": 16, "num_classes": 3, "depth": 1, "embed_dim": 24}
ARGUMENTS = " ".join(f"{key}={value}" for key, value in TINY.items())
GLORO = ["--method", "gloro"]
BY_NAME = ["vit_tiny_patch16_224", "--no-pretrained", "--model-args", ARGUMENTS]


@pytest.fixture
def folder(tmp_path):
    """The working folder, with seven images of three classes in the folder images."""
    write_images("images", 7, 32)
    return tmp_path


@pytest.fixture
def artifact(folder):
    torch.manual_seed(0)
    save(load("vit_tiny_patch16_224", pretrained=False, **TINY), folder / "model.safetensors")
    return folder / "model.safetensors"


def test_help_and_version():
    text = run("--help").stdout
    assert "--install-completion" in text
    for command in ("convert", "inspect", "constrain", "finetune", "certify", "report", "verify"):
        assert command in text
        shown = run(command, "--help").stdout
        assert re.search(rf"\n  Examples:\n(    .*\n)*    lipcert {command}", shown), shown
        assert "\b" not in shown
    assert re.fullmatch(r"lipcert \S+\n", run("--version").stdout)
    assert run("-V").stdout == run("--version").stdout
    assert "no such command 'certfy'. Did you mean 'certify'" in run("certfy", code=2).stderr
    assert "no such command 'quux'" in run("quux", code=2).stderr


def test_help_waits_for_neither_torch_nor_timm(tmp_path):
    script = """
        import contextlib, sys
        from lipcert.cli import app
        from lipcert.cli._commands import COMMANDS
        for arguments in (["--help"], ["--version"], *([name, "-h"] for name in COMMANDS), ["certify"], ["verify"]):
            with contextlib.suppress(SystemExit):
                app(arguments)
        assert not {"torch", "timm"} & {*sys.modules}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd=tmp_path)


def test_files_of_the_folder_replace_no_module_of_python(tmp_path):
    for name in ("random", "torch"):
        (tmp_path / f"{name}.py").write_text("")
    command = [sys.executable, "-m", "lipcert", "inspect", "digits-vit", "-q"]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})


@pytest.mark.slow
def test_every_package_can_be_imported_first(tmp_path):
    script = """
        import importlib, pathlib, pkgutil, sys, torch, timm
        import lipcert
        here = [str(pathlib.Path(lipcert.__file__).parent)]  # without the folder of cli in a checkout
        packages = [part.name for part in pkgutil.iter_modules(here, "lipcert.") if part.ispkg] + ["lipcert.cli"]
        assert len(packages) > 10
        for name in [*packages, "lipcert.inputs.loading", "lipcert.inputs.data", "lipcert.results.progress"]:
            for loaded in [part for part in sys.modules if part.partition(".")[0] == "lipcert"]:
                del sys.modules[loaded]
            importlib.import_module(name)
        for name in lipcert.__all__:
            assert getattr(lipcert, name) is not None
        assert {*lipcert.__all__} <= {*dir(lipcert)}
        assert importlib.import_module("lipcert.bounds.testing").check_rule
        assert not hasattr(lipcert, "no_such_name")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd=tmp_path)


@pytest.mark.parametrize(("text", "exact"), [("36/255", Fraction(36, 255)), ("0.5", Fraction(1, 2)), ("1e-3", None)])
def test_eps(text, exact):
    eps = parse_eps(text)
    exact = exact or Fraction(1, 1000)
    assert Fraction(eps) >= exact
    assert Fraction(math.nextafter(eps, 0)) < exact


@given(st.integers(1, 10**30), st.integers(1, 10**30))
def test_eps_is_the_next_float_above(numerator, denominator):
    eps = parse_eps(f"{numerator}/{denominator}")
    assert Fraction(math.nextafter(eps, 0)) < Fraction(numerator, denominator) <= Fraction(eps)


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "0", "1/0", "banana", "", "1/2/3", "-1/2", "1e999", "1e-999"])
def test_what_is_no_eps(folder, text):
    assert text in refused("certify", "--eps", text, *BY_NAME)


def test_model_arguments():
    text = "img_size=32, act_layer=gelu, mean=(0.5,) flag=True name=a=b off=false global_pool=NONE sizes=32,16,"
    expected = {"img_size": 32, "act_layer": "gelu", "mean": (0.5,), "flag": True, "name": "a=b"}
    expected |= {"off": False, "global_pool": None, "sizes": (32, 16)}
    assert _parse.parse_model_args(text) == expected
    assert _parse.parse_model_args(None) == {}
    for bad in ("img_size", "=3", "a-b=3", "img_size= 3", "features=128", "pretrained=True", "new_head=True"):
        with pytest.raises(InputError):
            _parse.parse_model_args(bad)


def test_torch_that_cannot_be_imported(folder, monkeypatch):
    def start(*_, **__):
        raise ImportError("libtorch.so: failed to map segment from shared object")

    monkeypatch.setattr(importlib.import_module("lipcert.cli._certify"), "start", start)
    assert "failed to map segment from shared object; raise the memory limit" in refused("certify", "--eps", "0.1")


@pytest.mark.parametrize(
    ("name", "text"), [("TIMM_X", "invalid literal for int(): 'foo'"), ("TORCH_X", 'Invalid foo; try TORCH_X="help"')]
)
def test_a_variable_of_the_environment_that_ends_an_import_is_named(name, text, monkeypatch):
    def fail(_):
        raise ValueError(text)

    monkeypatch.setenv(name, "foo")
    monkeypatch.setattr(_print, "importlib", SimpleNamespace(import_module=fail))
    with pytest.raises(InputError, match=f"^cannot import torch and timm: .*; correct or unset {name}$"):
        _print.start()


def test_certify_prints_and_writes(artifact):
    result = run("certify", "--data", "images", "--eps", "36/255", "--out", "r.jsonl", *GLORO)
    assert "model.safetensors, the newest artifact" in result.stderr
    found = read_rows()
    assert [row["index"] for row in found] == order_of(7, None)  # a run that is stopped has seen a random sample
    found.sort(key=lambda row: row["index"])
    expected = Certifier(load_artifact(artifact), 36 / 255, "gloro")
    images = torch.stack([torch.from_numpy(np.array(Image.open(p))) for p in sorted(Path("images").glob("*/*.png"))])
    certificates = expected.run(images.permute(0, 3, 1, 2) / 255)
    assert [row["index"] for row in found] == list(range(7))
    assert [row["label"] for row in found] == [0, 0, 0, 1, 1, 2, 2]
    assert [row["predicted"] for row in found] == certificates.predicted.tolist()
    torch.testing.assert_close(torch.tensor([row["radius"] for row in found]).double(), certificates.radius)
    assert {row["rigor"] for row in found} == {"deterministic"}

    printed = facts(result.stdout)
    correct = sum(row["correct"] for row in found)
    assert printed["images"] == "7"
    assert printed["clean accuracy"].startswith(f"{correct} of 7 ")
    assert printed["certified accuracy at 36/255"].startswith("0 of 7 ")
    assert printed["rigor"] == "deterministic"
    assert printed["rows"] == "r.jsonl"
    assert not re.search("[─│┃╭\x1b]", result.output)

    summary = read_summary()
    assert summary["model"]["source"]["name"] == "vit_tiny_patch16_224"
    assert summary["model"]["weights_hash"] == read_metadata(artifact)["weights_hash"]
    assert (summary["eps_typed"], summary["eps"]) == ("36/255", parse_eps("36/255"))
    assert summary["counts"]["images"] == 7
    assert summary["counts"]["correct"] == correct
    assert summary["bound"]["rigor"] == "deterministic"
    assert summary["environment"]["torch"] == torch.__version__
    assert summary["complete"] is True


def test_certify_without_labels(artifact):
    for path in list(Path("images").glob("*/*.png")):
        path.rename(path.parent.parent / path.name)
    printed = facts(run("certify", "--data", "images", "--eps", "0.1", "--out", "r.jsonl", *GLORO).stdout)
    assert not any("accuracy" in name for name in printed)
    assert printed["certified share of unlabelled images at 0.1"].startswith("0 of 7 ")
    assert "median radius" in printed
    assert all("label" not in row and "correct" not in row for row in read_rows())
    message = refused("certify", "--data", "images", "--eps", "0.1", "--fail-under", "0", "model.safetensors")
    assert "needs labels" in message


def test_labels_of_other_classes_are_noted(folder):
    save(load("vit_tiny_patch16_224", pretrained=False, **{**TINY, "num_classes": 5}), "five.safetensors")
    result = run("certify", "--data", "images", "--eps", "0.1", *GLORO)
    assert "note: images has 3 classes and the model has 5: the labels are left out" in result.stderr
    assert "accuracy" not in result.stdout


def test_a_stopped_run_goes_on(artifact, monkeypatch):
    command = ["certify", "model.safetensors", "--data", "images", "--eps", "36/255", "--out", "r.jsonl"]
    command += GLORO
    monkeypatch.setitem(_certifier._TOGETHER, "cpu", 2)
    run(*command)
    whole = timeless()
    Path("r.jsonl").unlink()

    certify, seen = Certifier.run, []

    def stops_after_four(self, images, labels=None):
        if 4 <= len(seen) < 7:
            raise KeyboardInterrupt
        seen.extend(images)
        return certify(self, images, labels)

    monkeypatch.setattr(Certifier, "run", stops_after_four)
    message = run(*command, code=130).stderr
    kept = Path("r.jsonl").read_text().splitlines(keepends=True)
    assert len(kept) == len(seen)
    assert message.endswith(
        f"\nlipcert: interrupted after {len(kept)} images; "
        f"r.jsonl keeps {len(kept)} rows, and the same command continues from there\n"
    )
    assert read_summary()["complete"] is False
    Path("r.jsonl").write_text("".join(kept[:3]) + kept[3][:20])

    seen[:] = [None] * 7  # no more interruptions
    result = run(*command)
    assert len(seen) == 7 + 4  # the third block again, of which a row was cut off
    assert "continuing after 3 images" in result.stderr
    assert Path("r.jsonl").read_text().startswith("".join(kept[:3]))
    assert timeless() == whole
    assert facts(result.stdout)["images"] == "7"
    assert run(*command).stdout == result.stdout
    assert len(seen) == 7 + 4


def test_random_weights_are_the_same_in_every_run(folder):
    command = ["certify", *BY_NAME, "--data", "images", "--eps", "0.1", "--out", "r.jsonl", *GLORO]
    run(*command, "--limit", "2")
    assert "continuing after 2 images" in run(*command).stderr


def test_a_limit_below_the_rows_that_are_there_keeps_them(folder):
    command = ["certify", "--data", "images", "--eps", "0.1", "--out", "r.jsonl", *BY_NAME, *GLORO]
    run(*command, "--limit", "3")
    before = Path("r.jsonl").read_bytes()
    run(*command, "--limit", "2")
    assert Path("r.jsonl").read_bytes() == before


def test_a_smaller_run_does_not_mix_with_the_rows_of_a_larger_one(folder):
    command = ["certify", "--data", "images", "--eps", "0.1", *BY_NAME, *GLORO]
    larger = facts(run(*command, "--limit", "3").stdout)
    smaller = facts(run(*command, "--limit", "2").stdout)
    assert smaller["images"] == "2"
    assert smaller["rows"] != larger["rows"]
    assert facts(run(*command, "--limit", "4").stdout)["rows"] == larger["rows"]
    count = len(read_rows(facts(run(*command).stdout)["rows"]))
    Path(smaller["rows"]).unlink()
    min(Path("images").rglob("*.png")).unlink()
    fresh = read_rows(facts(run(*command, "--limit", str(count - 2)).stdout)["rows"])
    assert len(fresh) == count - 2
    assert max(row["index"] for row in fresh) < count - 1  # numbered without the image that is gone
    assert facts(run(*command).stdout)["images"] == str(count - 1)  # the larger run goes on without it


def test_certificates_left_out_are_noted(artifact, monkeypatch):
    prepare = Certifier.__init__

    def leaves_one_out(self, *arguments, **options):
        prepare(self, *arguments, **options)
        self.skipped["anchored"] = "it would take long"

    monkeypatch.setattr(Certifier, "__init__", leaves_one_out)
    result = run("certify", "--data", "images", "--eps", "0.1", *GLORO)
    assert "note: anchored skipped: it would take long; force with --method\n" in result.stderr


def test_interrupted_elsewhere(artifact, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("lipcert.cli._loading.load", interrupted)
    assert refused("inspect", "model.safetensors", code=130) == "lipcert: interrupted"


def test_results_of_another_run_are_left_alone(artifact):
    command = ["certify", "model.safetensors", "--data", "images", "--out", "r.jsonl", "--eps"]
    run(*command, "0.1", *GLORO, "--limit", "3")
    before = Path("r.jsonl").read_bytes()
    assert "with another eps; its radii answer for any ε: lipcert report r.jsonl --eps 0.2;" in refused(
        *command, "0.2", *GLORO
    )
    assert "other method" in refused(*command, "0.1", "--method", "global")
    assert Path("r.jsonl").read_bytes() == before
    run(*command, "0.1", *GLORO)
    assert Path("r.jsonl").read_bytes().startswith(before)
    assert sorted(row["index"] for row in read_rows()) == list(range(7))
    Path("r.summary.json").unlink()
    assert "r.jsonl has no summary r.summary.json, as results have; copy it," in refused(*command, "0.1", *GLORO)


def test_a_file_that_is_being_written_is_refused_first(folder, monkeypatch):
    monkeypatch.setattr("lipcert.cli._certify.start", lambda *_, **__: pytest.fail("torch is imported"))
    handle = os.open("r.jsonl", os.O_CREAT | os.O_WRONLY)
    assert lock(handle, Path("r.jsonl"))
    assert "another process is writing r.jsonl" in refused("certify", "--eps", 1, "--out", "r.jsonl")
    os.close(handle)


def test_results_name_the_model_and_its_file_and_not_why_it_was_chosen(folder):
    for number in range(2):
        net = load("vit_tiny_patch16_224", pretrained=False, **TINY).net
        torch.save(net.state_dict(), f"w{number}.pth")
        command = ["certify", *BY_NAME[:1], "--model-args", ARGUMENTS, "--checkpoint", f"w{number}.pth", "--eps", "1"]
        result = run(*command, "--data", "images", "--limit", "1", *GLORO, "--out", f"{number}.jsonl")
        assert facts(result.stdout)["model"].startswith(f"vit_tiny_patch16_224, weights w{number}.pth")
    Path("empty").mkdir()
    os.chdir("empty")
    command = ["certify", "--eps", "1", "--limit", "2", *GLORO, "--out", "r.jsonl"]
    assert "bundled: this folder holds no artifact; name a model" in run(*command).stderr
    summary = read_summary()
    assert summary["name"] == "digits-vit, bundled"
    Path("r.summary.json").write_text(json.dumps({**summary, "name": "as an earlier version wrote it"}))
    assert facts(run(*command).stdout)["model"] == "digits-vit, bundled"


def test_paths_with_blanks_outside_quotes(folder):
    Path("My Drive/a b").mkdir(parents=True)
    Path("My Drive/r.jsonl").touch()
    for words, path in (
        (["certify", "--eps", "0.1", "--data", "My", "Drive/a b"], "My Drive/a b"),
        (["certify", "--eps", "0.1", "--data=My", "Drive/a", "b"], "My Drive/a"),
        (["certify", "test_vit", "--eps", "0.1", "--out", "My", "Drive/new.jsonl"], "My Drive/new.jsonl"),
        (["report", str(Path("My").resolve()), "Drive/r.jsonl"], "My Drive/r.jsonl"),
    ):
        assert "a path with a blank stands in quotes: '" in (told := refused(*words))
        assert f"{path}'" in told
    Path("My").touch()
    assert "in quotes: 'My Drive/r.jsonl'" in refused("report", "My", "Drive/r.jsonl")
    Path("Drive").mkdir()  # and both are names
    Path("Drive/r.jsonl").touch()
    assert "in quotes" not in run("report", "My", "Drive/r.jsonl", code=2).stderr


def test_names_that_a_script_left_empty_or_made_too_long(folder):
    for option in ("--data", "--labels", "--checkpoint", "--out"):
        assert f"{option} has an empty value" in refused("certify", "--eps", "0.1", option, "")
        for following in (["--eps", "0.1"], ["--eps=0.1"], ["-q", "--eps", "0.1"]):
            told = refused("certify", "test_vit", option, *following)
            assert f"{option} has no value before {following[0][:5]}, as of a variable that is not set" in told
    assert "--model-args has no value before --eps" in refused("certify", "test_vit", "--model-args", "--eps", "0.1")
    assert "--eps has no value before --limit" in refused("certify", "test_vit", "--eps", "--limit", "3")
    assert "--data has no value before --epochs" in refused("finetune", "digits-vit", "--data", "--epochs", "1")
    assert "give a shorter one" in refused("certify", "digits-vit", "--eps", "0.1", "--out", "x" * 245 + ".jsonl")
    words = ("convert", "test_vit", "--no-pretrained", "--out")
    for name in ("k.pt", "k.onnx"):
        assert "call it k.safetensors" in refused(*words, name, besides=("note: ", "converting"))
    assert not [*folder.glob("[xk]*")]


def test_a_working_folder_that_was_deleted(tmp_path):
    code = "import os, sys; os.rmdir(os.getcwd()); from lipcert.cli import main; sys.argv[1:] = ['models']; main()"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, "lipcert: the working folder was deleted; change to another one\n")


def test_free_memory_in_a_container_counts_what_the_kernel_can_drop(monkeypatch):
    files = {"max": "8000000000\n", "current": "7900000000\n", "stat": "anon 5\ninactive_file 6000000000\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: files[path.name.removeprefix("memory.")])
    assert workers._left_in_container() == 6_100_000_000


def test_percentages_are_fractions():
    for share in ("30", "-0.1", "nan"):
        told = refused("certify", "--eps", 1, "--fail-under", share)
        assert f"must be a fraction from 0 to 1, such as 0.3, got {float(share):g}" in told
    assert "must be a fraction above 0 and below 1, not a percentage, got 2.0" in refused("constrain", "--error", 2)


def test_fail_under(folder, monkeypatch):
    """A network that says class 0 whatever it sees: right on 3 of 7 images, with any radius."""
    model = load("vit_tiny_patch16_224", pretrained=False, **TINY)
    with torch.no_grad():
        model.net.head.weight.zero_()
        model.net.head.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
    save(model, "constant.safetensors")
    command = ["certify", "--data", "images", "--eps", "1", "--out", "r.jsonl", *GLORO, "--fail-under"]
    result = run(*command, "0.5", code=1)
    assert facts(result.stdout)["certified accuracy at 1"] == "3 of 7 (42.9 %, 95 % CI 15.8–75.0 %)"
    assert result.stderr.endswith("lipcert: the certified accuracy at 1 is 0.4286, below 0.5\n")
    run(*command, "0.42")
    assert all(row["certified"] and row["radius"] == sys.float_info.max for row in read_rows())


@pytest.mark.parametrize("ways", [[], ["--attention", "keep"], ["--norm", "project"]])
def test_convert(folder, ways):
    result = run("convert", *BY_NAME, *ways, "--data", "images")
    printed = facts(result.stdout)
    path = Path("vit_tiny_patch16_224.lipcert.safetensors")
    assert printed["written"] == str(path)
    model = load_artifact(path)
    count = sum(p.numel() for p in model.parameters())
    assert printed["parameters"].endswith(f" → {count:,}")
    swapped = result.stdout.count("replaced\t")
    assert swapped == {"--norm": 4, "--attention": 2}.get(ways[0] if ways else "", 3)
    assert "on 7 images of images" in printed["change of logits"]
    assert re.fullmatch(r"\S+ → \S+", printed["Lipschitz bound"])
    assert model.recipe[0]["attention"] == ("keep" if "--attention" in ways else "l2")
    recorded = read_metadata(path)["facts"]
    assert recorded["rigor"] == "deterministic"
    assert recorded["log10_bound"] == pytest.approx(lipcert.bounds.lipschitz(model).log10)


@pytest.mark.parametrize(("norm", "changed"), [("keep", False), ("smooth", True)])
def test_convert_advises_by_what_the_logits_did_and_not_to_train_on_the_images(folder, norm, changed):
    model = load("vit_tiny_patch16_224", pretrained=False, **TINY)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    save(model, "m.safetensors")
    classes = model(next(open_images("images", model).batches(7)).images).argmax(1)
    out = run("convert", "m.safetensors", "--attention", "keep", "--norm", norm, "--data", "images").stdout
    assert f"the most frequent class before had {100 * int(classes.bincount().max()) / 7:.1f} %" in out
    assert out.startswith("model\tm.safetensors")
    assert ("0.0 % (median)" in out) == (not changed)
    assert ("another function" in out) == changed
    assert "TRAIN" in out
    assert not re.search("lipcert finetune.*--data images", out)


def test_convert_with_random_images_says_so(folder):
    printed = facts(run("convert", *BY_NAME).stdout)
    assert printed["change of logits"].endswith("random images; calibrate and measure on yours: --data")
    assert "same top class" not in printed


def test_convert_reads_a_checkpoint_and_leaves_it(folder):
    torch.manual_seed(1)
    net = load("vit_tiny_patch16_224", pretrained=False, **TINY).net
    torch.save(net.state_dict(), "w.pth")
    before = Path("w.pth").read_bytes()
    command = ["convert", "vit_tiny_patch16_224", "--checkpoint", "w.pth", "--model-args", ARGUMENTS]
    run(*command, "--attention", "keep", "--out", "a.safetensors")
    model = load_artifact("a.safetensors")
    assert all(torch.equal(value, model.net.state_dict()[name]) for name, value in net.state_dict().items())
    assert "file of the model itself" in refused(*command, "--out", "w.pth")
    assert Path("w.pth").read_bytes() == before


def test_convert_writes_a_network_whose_bound_is_zero(folder):
    net = load("vit_tiny_patch16_224", pretrained=False, **TINY).net
    torch.nn.init.zeros_(net.head.weight)
    torch.save(net.state_dict(), "w.pth")
    command = ["convert", "vit_tiny_patch16_224", "--checkpoint", "w.pth", "--model-args", ARGUMENTS]
    assert "log10_bound" not in json.loads(run(*command, "--json").stdout)


def test_convert_overwrites_artifacts_only(artifact):
    Path("notes.safetensors").write_text("mine")
    assert "not a lipcert artifact" in refused("convert", *BY_NAME, "--out", "notes.safetensors")
    assert Path("notes.safetensors").read_text() == "mine"
    assert "folder is none; call it folder.safetensors" in refused("convert", *BY_NAME, "--out", "folder/")
    assert "file of the model itself" in refused("convert", "model.safetensors", "--out", "model.safetensors")
    below = refused("convert", *BY_NAME, "--out", Path("notes.safetensors", "a.safetensors"))
    assert "cannot make the folder notes.safetensors" in below
    run("convert", *BY_NAME, "--out", "new/folder/a.safetensors")
    assert read_metadata("new/folder/a.safetensors")["recipe"][0]["data"] == "random"
    before = Path("model.safetensors").read_bytes()
    other = ["convert", "test_vit", "--no-pretrained", "--out", "model.safetensors"]
    assert "holds vit_tiny_patch16_224, not test_vit" in refused(*other)
    assert Path("model.safetensors").read_bytes() == before
    run(*other, "--force")
    assert read_metadata("model.safetensors")["source"]["name"] == "test_vit"
    run("convert", *BY_NAME)
    run("convert", *BY_NAME, "--attention", "keep")
    assert read_metadata("vit_tiny_patch16_224.lipcert.safetensors")["recipe"][0]["attention"] == "keep"


def test_a_folder_in_which_nothing_can_be_written_is_told_before_the_work(artifact, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode, **_: not mode & os.W_OK)  # the superuser may write anywhere
    for command in (["convert"], ["constrain", "--data", "images"], ["finetune", "--data", "images"]):
        assert "permission denied; give --out in another folder" in refused(*command, "model.safetensors")
    done = run("certify", "model.safetensors", "--data", "images", "--eps", "1e-6", "--limit", "1", *GLORO)
    assert "rows are not kept" in done.stderr
    assert re.search(r"next\t.* --out /\S+/rows\.jsonl\n", done.stdout)


def test_convert_refuses_unknown_ways(folder):
    assert "is one of l2, keep" in refused("convert", *BY_NAME, "--attention", "dot")
    assert "is one of keep, project, smooth" in refused("convert", *BY_NAME, "--norm", "layer")


def test_a_converted_model_is_inspected_and_certified(folder):
    run("convert", *BY_NAME, "--data", "images", "--norm", "project", "--out", "a.safetensors")
    shown = facts(run("inspect").stdout)
    assert "Lipschitz bound" in shown
    assert shown["weights"].startswith("random: ")
    assert "next" not in shown
    assert "certified accuracy" in run("certify", "--data", "images", "--eps", "0.1", "--limit", "2", *GLORO).stdout


def test_inspect(artifact):
    result = run("inspect", "model.safetensors", "--all")
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert lines[0] == ["module", "operation", "gain", "share"]
    table = [line for line in lines[1:] if len(line) == 4]
    bound = lipcert.bounds.lipschitz(load_artifact(artifact))
    assert len(table) == len(bound.layers)
    worst = max(bound.layers, key=lambda layer: layer.log10_gain)
    assert table[0][:2] == [worst.path.removeprefix("net."), worst.operation]
    assert not any(path.startswith("net.") for path, *_ in table)
    assert facts(result.stdout)["Lipschitz bound"] == f"{_print.upper(bound.log10)}, deterministic"
    assert facts(result.stdout)["verdict"].startswith("too large for methods global and gloro")
    assert "anchored" in facts(result.stdout)["verdict"]
    record = json.loads(run("inspect", "model.safetensors", "--json").stdout)
    assert sum(layer["log10_gain"] for layer in record["layers"]) == pytest.approx(record["log10_bound"])


def test_inspect_shows_the_worst_twenty():
    arguments = ARGUMENTS.replace("depth=1", "depth=3")
    for words, count in (([], 20), (["--all"], 34)):
        shown = run("inspect", *BY_NAME[:-1], arguments, *words).stdout.splitlines()
        assert len([line for line in shown if line.count("\t") == 3]) == 1 + count


def layers(**gains: float) -> tuple[LayerBound, ...]:
    return tuple(LayerBound(f"net.{path}", "linear", gain, 0.0, "test") for path, gain in gains.items())


def test_verdict_names_what_makes_the_bound_vacuous():
    bound = Bound(1e12, "deterministic", "test", layers=layers(a=1.0, b=6.0, c=2.0, d=4.0, e=-1.0))
    assert _inspect.verdict(bound) == (
        "too large for methods global and gloro: a margin of 10 logits gives a radius of 7.07e-12; "
        "largest gains: b, d, 76.9 % of the sum of log10 gains; "
        "methods anchored and staged bound the network locally instead"
    )
    huge = Bound(math.inf, "deterministic", "test", log10=4000.5, layers=layers(a=4000.5))
    assert "a radius of 10^-4000;" in _inspect.verdict(huge)
    usable = Bound(10.0, "deterministic", "test", layers=layers(a=1.0))
    assert _inspect.verdict(usable).startswith(
        "by methods global and gloro, a margin of 10 logits gives a radius of 0.707"
    )
    nothing = Bound(math.inf, "deterministic", "test", log10=math.inf)
    assert "gives a radius of 0;" in _inspect.verdict(nothing)
    constant = Bound(0.0, "deterministic", "test", log10=-math.inf)
    assert _inspect.verdict(constant) == (
        "the bound is 0: with these weights the network gives every image the same logits"
    )


@given(st.floats(-12, 3.99))
def test_bounds_are_shown_rounded_up(log10):
    shown = Fraction(_print.upper(log10))
    assert shown >= Fraction(10**log10)
    assert shown <= Fraction(10**log10) * Fraction(102, 100)


@given(st.floats(-12, 3.99))
def test_gains_are_shown_rounded_to_the_nearest(log10):
    assert float(_print.near(log10)) == pytest.approx(10**log10, rel=5.01e-3)
    assert _print.near(3 + 1e-12) == "1000"  # and not 1010, to which a bound would be rounded up


@given(st.floats(4, 1e5))
def test_large_bounds_are_shown_as_powers_rounded_up(log10):
    shown = _print.upper(log10)
    assert shown.startswith("10^")
    assert log10 <= float(shown[3:]) <= log10 + 0.1001


@given(st.floats(1e-300, 1e300))
def test_radii_are_shown_rounded_down(radius):
    shown = Fraction(rounded(radius))
    assert Fraction(radius) * Fraction(98, 100) <= shown <= Fraction(radius)


def test_special_numbers_are_shown():
    assert (_print.upper(-math.inf), _print.upper(math.inf), rounded(0.0)) == ("0", "infinite", "0")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_tables_on_a_terminal_and_in_a_pipe(monkeypatch, capsys):
    table = (("module", "gain"), [("blocks.0", "1.5"), ("head [b]", "2")])
    _print.print_table(*table)
    assert capsys.readouterr().out == "module\tgain\nblocks.0\t1.5\nhead [b]\t2\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    _print.print_table(*table)
    text = terminal.getvalue()
    assert "─" in text
    assert "head [b]" in text
    assert "\t" not in text


def test_a_command_is_not_broken_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    command = "lipcert certify vit_tiny_patch16_224 --checkpoint w.safetensors --eps 36/255"
    _print.print_facts([("model", 9 * "long "), ("next", command), ("because", "it runs")])
    assert f"next: {command}\nbecause: it runs\n" in terminal.getvalue()


def test_tables_leave_columns_out_rather_than_break_names(monkeypatch, capsys):
    columns, rows = ("layer", "steps", "norm"), [("blocks.0.attn.qkv", "25", "1.5"), ("blocks.0.attn.proj", "30", "2")]
    for width, shown, said in ((35, True, ""), (34, False, "terminal too narrow for steps")):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "stdout", terminal := Terminal())
        _print.print_table(columns, rows, optional=("steps", "norm"))
        head, _, *lines = [line for line in terminal.getvalue().splitlines() if line.strip()]
        assert ("steps" in head) == shown
        assert "norm" in head
        assert [line.split()[0] for line in lines] == [row[0] for row in rows]
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("above_a_bar", [False, True])
def test_only_the_terminal_breaks_the_line_of_a_message(monkeypatch, above_a_bar):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    line = "next: lipcert certify a-very-long-name-of-a-file.safetensors --data a-long-name-of-a-folder --eps 36/255"
    with _print.progress("certifying", 100) if above_a_bar else contextlib.nullcontext():
        _print.say(line)
        print(line, file=sys.stderr)  # as a warning
    assert terminal.getvalue().count(line) == 2


def test_bars_are_for_terminals_only(monkeypatch, capsys):
    with _print.progress("working", 3) as update:
        update(1, 3)
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with _print.progress("working") as update:
        update(1, 3)
        update(2, 3)
    assert "working" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("JPY_PARENT_PID", "1")  # a notebook's
    with _print.progress("working") as update:
        update(1, 3)
    assert not terminal.getvalue()


@pytest.mark.parametrize("command", [["inspect"], ["certify", "--eps", "0.1"], ["convert"]])
def test_models_that_cannot_be_had(artifact, command):
    Path("damaged.pth").write_bytes(b"damaged")
    assert "did you mean" in refused(*command, "vit_tiny_patch16_225")
    assert "did you mean vit_tiny_patch16_224" in refused(*command, "VIT_TINY_PATCH16_224")
    assert "b.png is an image, and stands where a model is named" in refused(*command, "b.png")
    assert "there is no file" in refused(*command, "none.safetensors")
    assert "damaged" in refused(*command, "damaged.pth")
    assert "--no-pretrained" in refused(*command, "model.safetensors", "--no-pretrained")
    assert "--checkpoint" in refused(*command, "model.safetensors", "--checkpoint", "damaged.pth")
    assert "num_classes" in refused(*command, "model.safetensors", "--model-args", "num_classes=3")
    assert "KEY=VALUE" in refused(*command, "test_vit", "--model-args", "banana")
    assert "num_classes twice" in refused(*command, "test_vit", "--model-args", "num_classes=3", "num_classes=4")
    assert "damaged.pth" in refused(*command, "test_vit", "--checkpoint", "damaged.pth")


def test_data_and_methods_that_cannot_be_used(artifact):
    command = ["certify", "model.safetensors", "--eps", "0.1"]
    assert "there is no image, folder" in refused(*command, "--data", "none")
    assert ", ".join(METHODS) in refused(*command, "--data", "images", "--method", "banana")
    assert "at least 1" in refused(*command, "--data", "images", "--limit", "0")
    assert "cannot write" in refused(*command, "--data", "images", "--out", "images/a/00.png/r.jsonl")
    assert "cannot hold the rows" in refused(*command, "--data", "images", "--out", "model.safetensors")
    Path("images/a/00.png").write_bytes(b"damaged")
    assert "00.png" in run(*command, "--data", "images", code=2).stderr.splitlines()[-1]


def test_usage_errors_have_exit_code_2(folder):
    for arguments in (["certify"], ["banana"], ["certify", "--eps"], ["convert"], ["certify", "--limit", "x"]):
        assert refused(*arguments).endswith("--help says more")
    assert "l2 radius on pixels" in refused("certify")
    assert "the arguments are MODEL RESULTS" in refused("verify", "r.jsonl")
    assert re.search("^Usage: lipcert", run(code=2).output)


def test_some_bundled_images_are_certified_without_a_limit(folder):
    command = ["certify", "bundled", "--eps", "36/255", "--method", "gloro"]
    result = run(*command)
    assert result.stderr.startswith("images: 20 of 120 bundled images; --limit 120 for all\n")
    assert facts(result.stdout)["images"] == "20 of 120 bundled images; --limit 120 for all"
    whole = run(*command, "--limit", "120")
    assert facts(whole.stdout)["images"] == "120"
    assert "bundled images" not in whole.stderr


def test_json_is_all_that_is_printed(folder):
    command = ["certify", "--eps", "36/255", "--limit", "5", "--method", "gloro"]
    result = run(*command, "--json", "--out", "r.jsonl")
    printed = json.loads(result.stdout)
    assert printed.pop("facts")
    written = read_summary()
    assert printed | {"example_logits": written["example_logits"]} == written
    assert printed["counts"]["images"] == 5
    assert printed["preparation_seconds"] > 0
    assert printed["command"].split()[0] == "lipcert"
    assert len(printed["bound"]["layers"]) == len(lipcert.lipschitz(load(None)).layers)
    assert json.loads(run(*command, "--json", "--fail-under", "0.5", code=1).stdout)["counts"]["images"] == 5


def test_certify_with_an_attack(folder, short_attack):
    result = run("certify", "--eps", "0.8", "--limit", "6", "--method", "gloro", "--attack", "--out", "r.jsonl")
    found = read_rows()
    withstood = sum(row["correct"] and not row["attacked"] for row in found)
    assert withstood < sum(row["correct"] for row in found)
    assert facts(result.stdout)["accuracy under pgd-l2 at 0.8"].startswith(f"{withstood} of 6 ")
    assert all(row["radius"] <= row["attack_distance"] for row in found)
    summary = read_summary()
    assert summary["attack"] == {"name": "pgd-l2", "version": "1", "settings": short_attack.settings}
    assert summary["counts"]["accuracy_under_attack"] == withstood / 6
    assert summary["counts"]["attacked"] == sum(row["attacked"] for row in found)


def test_many_models(artifact):
    torch.manual_seed(1)
    save(load("vit_tiny_patch16_224", pretrained=False, **TINY), "second.lipcert.safetensors")
    names = ["model.safetensors", "second.lipcert.safetensors"]
    result = run("certify", *names, "--data", "images", "--eps", "0.1", "--out", "results", *GLORO)
    table = [line.split("\t") for line in result.stdout.splitlines()]
    assert table[0][:5] == ["model", "certified", "95 % CI", "ε", "clean"]
    assert table[0][-2:] == ["Lipschitz bound", "seconds"]
    assert all(re.fullmatch(r"10\^\S+, deterministic", row[-2]) and float(row[-1]) > 0 for row in table[1:])
    assert sorted(row[0].partition(",")[0] for row in table[1:]) == names  # of random weights, as it says
    assert sorted(path.name for path in Path("results").iterdir()) == [
        "model.jsonl", "model.summary.json", "second.jsonl", "second.summary.json",
    ]  # fmt: skip
    run("certify", "second.lipcert.safetensors", "--data", "images", "--eps", "0.1", "--out", "one.jsonl", *GLORO)
    assert timeless("results/second.jsonl") == timeless("one.jsonl")

    Path("damaged.safetensors").write_bytes(b"damaged")
    command = ["certify", "model.safetensors", "damaged.safetensors", "--data", "images", "--eps", "0.1", *GLORO]
    command += ["--out", "results"]
    assert "there is no file" in refused(*command, "none.safetensors")  # before the first of them runs
    assert "timm has no model" in refused(*command, "resnet8")
    assert "timm has no weights called" in refused(*command, "resnet18.foo")
    result = run(*command, "--json", code=2)
    printed = json.loads(result.stdout)
    assert [summary["counts"]["images"] for summary in printed["models"]] == [7]
    assert printed["failed"][0]["model"] == "damaged.safetensors"
    assert "lipcert: damaged.safetensors: " in result.stderr
    assert "continuing after 7 images" in result.stderr


def test_many_models_with_the_same_file_name(artifact):
    Path("other").mkdir()
    save(load("vit_tiny_patch16_224", pretrained=False, **TINY), "other/model.safetensors")
    names = ["model.safetensors", "other/model.safetensors"]
    message = run("certify", *names, "--data", "images", "--eps", "0.1", "--out", "results", *GLORO, code=2).stderr
    assert "results/model.jsonl" in message


def test_many_models_that_cannot_be_certified(artifact):
    command = ["certify", "--data", "images", "--eps", "0.1", *GLORO]
    Path("zoo.txt").touch()
    told = refused(*command, "resnet18", "--mean", "0.5", "0.4", "0.3", "--checkpoint", "w.pth")
    assert "for one model, got resnet18, 0.4, 0.3; separate several numbers of an option by commas" in told
    for dashes in ("–", "—", "–-"):
        assert "begins with a long dash; type --limit;" in refused(*command, "resnet18", f"{dashes}limit", "3")
    for blank in (" ", "\t", "\r"):  # behind the backslash at the end of a line
        assert "an argument is blank; a backslash continues" in refused(*command, "resnet18", blank)
        assert "an argument is blank" in refused("report", "r.jsonl", blank)
    assert "must be a folder" in refused(*command, "resnet18", "resnet34", "--out", "zoo.txt")
    assert "there is no file a.pth" in refused(*command, "a.pth", "b.pth")


def test_one_of_many_models_that_cannot_be_downloaded(artifact, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = run("certify", "model.safetensors", "resnet18", "--data", "images", "--eps", "0.1", *GLORO, code=2).stderr
    assert "the model hub is unreachable; certify it alone, with a file of its weights as --checkpoint FILE\n" in told


@pytest.mark.parametrize("given", [["--out=~/new/r.jsonl"], ["--out", "~/new/r.jsonl"]])
def test_a_home_folder_that_the_shell_leaves(artifact, monkeypatch, given):
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    run("certify", "model.safetensors", "--data", "images", "--eps", "0.1", "--limit", "1", *GLORO, *given)
    assert Path("home/new/r.jsonl").is_file()
    assert not Path("~").exists()


def test_colours_are_left_out_where_they_are_not_wanted(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with _print.progress("working") as update:
        update(1, 3)
    assert "working" in terminal.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.getvalue())


def test_lines_tell_the_progress_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(_print, "_FIRST_PAUSE", 0.01)
    _print.start()
    with _print.progress("solving", 1000) as update:
        for done in range(1, 21):
            update(done, 1000)
            time.sleep(0.01)
        while "solving: 20/1000" not in (said := capsys.readouterr().err):
            pass
        assert re.search(r"solving: 20/1000, [^,]*0:\d\d:\d\d left", said)
    monkeypatch.setattr(_print, "quiet", True)
    with _print.progress("silent") as update:
        update(1)
    assert capsys.readouterr().err == ""


def _ends(monkeypatch, spent, total):
    """The least and the most time left, in seconds, after each unit of work."""
    now = 0.0
    monkeypatch.setattr(_print.time, "monotonic", lambda: now)
    pace = _print._Pace("solving", total)
    found = []
    for done, seconds in enumerate(spent, 1):
        now += seconds
        pace.update(done, total, None)
        texts = re.findall(r"\d+:\d\d:\d\d", pace.left)
        times = [60 * (60 * int(h) + int(m)) + int(s) for h, m, s in (text.split(":") for text in texts)]
        found.append((now, *((0, *times) if "up to" in pace.left else (*times, *times))[:2]))
    return found


def test_the_time_left_is_an_interval_that_shrinks(monkeypatch):
    even = _ends(monkeypatch, [2.0] * 60, 100)
    assert [len(found) for found in even[:10]] == [1] * 9 + [3], "a few steps are no speed"
    assert 60 < even[-1][1] <= 80 <= even[-1][2] < 100
    inside, wider, all_of = 0, 0, 0
    for seed in range(40):
        generator = random.Random(seed)  # draws of an image: few for most, all for some
        spent = [generator.choice([16.0, 16.0, 20.0, 24.0, 40.0, 100.0, 400.0, 1100.0]) for _ in range(100)]
        found = [entry for entry in _ends(monkeypatch, spent, 100)[:-1] if len(entry) == 3]
        inside += sum(now + least - 1 <= sum(spent) <= now + most for now, least, most in found)
        ends = [now + most for now, _, most in found]
        wider += sum(later > earlier + 1 for earlier, later in itertools.pairwise(ends))
        all_of += len(found)
    assert inside >= 0.85 * all_of
    assert wider <= 0.01 * all_of


def test_another_count_has_a_speed_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    shown = _print._bars()
    monkeypatch.setattr(_print, "_bars", lambda: shown)
    with _print.progress("reading") as update:
        update(20, 24)
        (task,) = shown.tasks
        started = task.start_time
        update(21, 24)
        assert task.start_time == started
        update(1, 1026, "bounding")
        assert task.start_time > started
        assert (task.completed, task.total, task.description) == (1, 1026, "bounding")


def test_models_and_rules_of_your_own(tmp_path, monkeypatch):
    """--import brings in a module of the user's folder: a registered architecture, and a rule for its operation."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, known in list(vars(timm.models._registry).items()):  # so that other tests find it as it was
        if not name.startswith("__") and isinstance(known, dict | set):
            monkeypatch.setattr(timm.models._registry, name, copy.copy(known))
    (tmp_path / "my_zoo.py").write_text(
        "import torch, lipcert\n"
        "from timm.models import register_model\n"
        "class Halved(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.special.i0e(x) / 2\n"
        "@lipcert.bounds.rule(Halved)\n"
        "def halved(call, module: Halved, x: lipcert.bounds.Value):\n"
        "    return x.bounded(x.lip / 2)\n"
        "@register_model\n"
        "def my_net(pretrained=False, **kwargs):\n"
        "    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4), Halved())\n"
        "    net.pretrained_cfg = dict(input_size=(3, 8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)\n"
        "    return net\n"
    )
    assert "timm has no model 'my_net'" in run("inspect", "my_net", "--no-pretrained", code=2).output
    shown = run("--import", "my_zoo", "inspect", "my_net", "--no-pretrained").output
    assert "Halved" in shown
    assert "my_zoo" in _registering()  # which workers import too
    failed = run("--import", "my_zo", "inspect", "my_net", code=2).output
    assert "--import my_zo failed with ModuleNotFoundError" in failed
    assert len(failed.strip().splitlines()) == 1


@given(pairs=st.lists(st.sampled_from(["abc=1", "d_e=(2,3)", "f=x"]), min_size=1, unique=True), data=st.data())
def test_pairs_of_model_args_are_one_option_however_they_are_written(pairs, data):
    args, expected = [], ["m.safetensors", "--data", "x=1"]
    for i, pair in enumerate(pairs):
        alone = i == 0 or data.draw(st.booleans())
        together = alone and data.draw(st.booleans())
        args += [f"--model-args={pair}"] if together else ["--model-args", pair] if alone else [pair]
    typed = [*expected, *args] if data.draw(st.booleans()) else [*args, *expected]
    assert _joined(typed) == ["--model-args", " ".join(pairs), *expected]


@pytest.mark.parametrize(
    "twice",
    [["--data", "a", "--data", "b"], ["--sigma", "0.1", "--sigma=0.2"], ["-o", "r.jsonl", "--out", "s.jsonl"]],
)
def test_an_option_given_twice_is_refused(folder, twice):
    assert "is given 2 times, and takes one value" in refused("certify", "--eps", "0.1", *twice)


def test_a_number_of_steps_is_no_eps(folder):
    for model in ([], ["none_of_timm"]):  # before the model is looked for
        assert "written 36/255" in refused("certify", *model, "--eps", "36")


def test_options_that_combine(folder):
    result = run("certify", "-q", "-q", "--eps", "0.25", "--eps", "0.5", "--limit", "2", "--no-out", *GLORO)
    assert {"certified accuracy at 0.25", "certified accuracy at 0.5"} <= facts(result.stdout).keys()
    assert "is given 2 times" in refused("finetune", "--data", "images", "--only", "head", "--only", "blocks.0")
