"""Settings: made once, checked when made, and shown by the command, the library and the summary alike."""

import dataclasses
import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from commands import refused, run

import lipcert
from lipcert.attacks import PGD
from lipcert.certifier import Certifier
from lipcert.certvit import ConstrainSettings
from lipcert.cli import app
from lipcert.cli._commands import COMMANDS
from lipcert.cli._options import options_of
from lipcert.errors import InputError
from lipcert.inputs.data import open_images
from lipcert.results.description import describe
from lipcert.settings import CertifySettings, FinetuneSettings, option, parse_memory, settings_of
from lipcert.settings import _certify as _settings
from lipcert.smoothing import SELECTION

FIELDS = [one for one in dataclasses.fields(CertifySettings) if one.init]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8e9),
        ("8G", 8e9),
        ("1.5 GiB", 1.5 * 2**30),
        ("500mb", 5e8),
        ("64", 64),
        ("1e9", 1e9),
        (1e20, 1e20),
        (2**40, 2**40),
    ],
)
def test_sizes_of_memory(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "8X", "GB", "inf", "nan", "1e400", None, "8 G B", "8\u212aB", "\u0668GB", True, math.nan]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="number of bytes"):
        parse_memory(text)


@pytest.mark.parametrize("eps", ["36/255", 36 / 255, np.float32(36 / 255), np.float64(36 / 255), 1])
def test_eps_is_a_number_or_a_text(eps):
    settings = CertifySettings(eps)
    assert type(settings.eps) is float
    assert settings.eps == pytest.approx(_settings.parse_eps(settings.eps_typed))
    assert settings.eps_typed == "36/255" or not isinstance(eps, str)


WRONG = [
    {"eps": 0},
    {"eps": math.nan},
    {"eps": math.inf},
    {"eps": "36/0"},
    {"eps": None},
    {"method": "exact"},
    {"dtype": "int8"},
    {"rigor": "estimate"},
    {"delta": 0},
    {"sigma": 0.25, "method": "gloro"},
    {"delta": 0.95},
    {"delta": 1.0},
    {"delta": "1e-9"},
    {"at": "blocks.0", "dtype": "float32"},
    {"at": "blocks.0", "attack": "pgd"},
    {"attack": "none"},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_settings_check_themselves(wrong):
    with pytest.raises(InputError) as refused:
        settings_of(CertifySettings, **{"eps": 0.1, **wrong})
    assert next(iter(wrong)) in str(refused.value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CertifySettings(0.1).eps = 0.2


def test_a_misspelt_argument_is_named():
    images = torch.zeros(1, 3, 8, 8)
    with pytest.raises(InputError, match="'metod'; did you mean method"):
        lipcert.certify(None, images, eps=0.1, metod="gloro")
    with pytest.raises(InputError, match="missing a required argument: 'eps'"):
        lipcert.certify(None, images)


def test_every_field_is_in_the_command_the_library_and_the_summary():
    help_text = run("certify", "--help").output
    model = lipcert.load(None)
    certifier = Certifier(model, CertifySettings("36/255", "gloro", attack=PGD(steps=3)))
    summary = describe(model, open_images(None, model), certifier)
    for function in (lipcert.certify, Certifier):
        assert {one.name for one in FIELDS} <= {*inspect.signature(function).parameters}
    for one in FIELDS:
        assert one.name in summary
        if "help" in one.metadata:
            assert (f"--{one.name.replace('_', '-')} " in help_text) is not one.metadata["python"]
    assert summary["attack"]["settings"]["steps"] == 3
    assert (summary["eps_typed"], summary["method"], summary["delta"]) == ("36/255", "gloro", 1e-9)


def test_a_field_with_a_help_text_becomes_an_option():
    @dataclasses.dataclass(frozen=True)
    class Settings:
        size: str = option("How large.", "5")
        secret: int = 3
        shape: str = option("Of which shape.", "a", choices=("a", "b"), python=("b",))
        rate: float = option("How fast.", 1.0, python=True)

    seen = []

    @options_of(settings=Settings)
    def command(settings, path: Path = Path("x")) -> None:
        seen.append((settings(secret=4), path))

    assert [*inspect.signature(command).parameters] == ["size", "shape", "path", "context"]
    for source, size in (("COMMANDLINE", "7"), ("DEFAULT", "5")):
        context = SimpleNamespace(get_parameter_source=lambda _, name=source: SimpleNamespace(name=name), obj=None)
        command(size="7", shape="a", path=Path("y"), context=context)
        assert seen.pop() == (Settings(size, 4), Path("y"))
    context.obj = {"rate": 2.0, "shape": "b", "size": "9"}
    command(size="7", shape="a", path=Path("y"), context=context)
    assert seen.pop()[0] == Settings("5", 4, "b", 2.0)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_is_one_page(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = run(command, "--help").output.splitlines()
    assert len(lines) <= 100
    most = 33 if command == "certify" else 30
    assert sum(bool(re.match(r"  (-\w, )?--?\w", line)) for line in lines) <= most


@pytest.mark.parametrize("command", ["certify", "predict"])
def test_the_help_counts_the_draws_that_select_a_class(command):
    options = typer.main.get_command(app).get_command(None, command).params
    (about,) = (one.help for one in options if one.name == "samples")
    assert re.search(rf"besides (up to )?{SELECTION} that select the class", about)


@pytest.mark.parametrize("loss", ["fixed", "lmt", "local-b", "local-g"])
def test_losses_of_papers_are_for_python_alone(loss):
    assert "for calls from Python alone" in refused("finetune", "bundled", "--data", "x", "--loss", loss)
    assert FinetuneSettings(loss).loss == loss


def test_settings_of_constrain_check_themselves():
    assert ConstrainSettings(layers="a, b").layers == ("a", "b")
    assert ConstrainSettings(engine="faithful").lowered == "l1"
    other = {"engine": "faithful", "measure": "nuclear"}
    for wrong in ({"error": 1}, {"measure": "none"}, other, {"engine": "x"}, {"workers": -1}):
        with pytest.raises(InputError):
            settings_of(ConstrainSettings, **wrong)
    options = run("constrain", "--help").output
    for one in dataclasses.fields(ConstrainSettings):
        assert one.name in inspect.signature(lipcert.constrain).parameters
        is_option = "help" in one.metadata and not one.metadata["python"]
        assert (f"--{one.name.replace('_', '-')} " in options) is is_option
