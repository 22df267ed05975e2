"""Preprocessing: said in one line, kept in the summary, changed by options, and no surprise to whoever reads ε."""

from pathlib import Path

import pytest
import torch
from commands import read_summary, run
from PIL import Image

import lipcert
from lipcert.errors import InputError
from lipcert.inputs.data import open_images
from lipcert.inputs.preprocessing import Preprocessing, in_words, preprocessing, remarks
from lipcert.report import model_card, read_runs

KNOWN = {
    "input_size": [3, 224, 192], "mean": [0.5, 0.4, 0.5], "std": [0.25] * 3,
    "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center",
}  # fmt: skip


@pytest.fixture
def images():
    """Four images of 12 × 16 pixels without classes."""
    Path("images").mkdir()
    generator = torch.Generator().manual_seed(0)
    for i in range(4):
        pixels = (255 * torch.rand(12, 16, 3, generator=generator)).byte().numpy()
        Image.fromarray(pixels).save(f"images/{i}.png")


def test_words():
    assert in_words(KNOWN) == "resize to cover 248×213, crop 224×192, bicubic; mean 0.5, 0.4, 0.5; std 0.25"
    square = {**KNOWN, "input_size": [3, 224, 224]}
    assert in_words(square).startswith("resize to 248 on the shorter side, crop 224×224, bicubic; ")
    assert in_words({**square, "crop_mode": "border"}).startswith("resize into 248×248, crop or pad to 224×224, ")
    assert in_words({**square, "crop_mode": "squash"}).startswith("resize to 248×248, crop 224×224, bicubic; ")
    assert in_words({**KNOWN, "crop_pct": 1.0, "crop_mode": "squash"}).startswith("resize to 224×192, bicubic; ")
    assert in_words({**KNOWN, "crop_pct": None}).startswith("224×192, as stored; mean")
    for damaged in ({}, {**KNOWN, "mean": 3}, {**KNOWN, "crop_pct": 0}, {**KNOWN, "input_size": "x"}):
        assert in_words(damaged) == "not stated"


def test_remarks():
    square = {**KNOWN, "input_size": [3, 224, 224], "crop_pct": 1.0}
    assert [*remarks(square, [(224, 224)])] == []
    assert [*remarks(square, [(448, 448)])] == []
    assert [*remarks(square, [])] == []
    assert next(remarks(square, [(32, 32)])).startswith("the images are enlarged")
    assert [*remarks(square, [(448, 224)])] == ["centre crop discards 50 % of the pixels"]
    mixed = ["25 % of the images are enlarged: ε and radii are measured on the resized images"]
    mixed += ["centre crop discards 0 to 50 % of the pixels"]
    assert [*remarks(square, [(448, 224), (448, 224), (448, 448), (32, 32)])] == mixed
    assert "discards 18 %" in [*remarks({**square, "crop_pct": 0.9}, [(500, 500)])][0]
    assert [*remarks({**square, "crop_mode": "squash"}, [(448, 224)])] == []
    assert "discards 18 %" in [*remarks({**square, "crop_mode": "squash", "crop_pct": 0.9}, [(500, 500)])][0]
    assert [*remarks({**square, "crop_mode": "border"}, [(448, 112)])] == []
    assert [*remarks({**square, "crop_pct": None}, [(3, 3)])] == []


@pytest.mark.parametrize(("mode", "crop"), [("center", 0.8), ("center", 1.0), ("squash", 0.8), ("border", 0.9)])
def test_what_is_told_is_what_timm_does(images, mode, crop):
    model = lipcert.load(None)
    model.data_config |= {"crop_pct": crop, "crop_mode": mode, "interpolation": "bilinear"}
    data = open_images("images", model)
    steps = {type(step).__name__: step for step in data.transform.steps.transforms}
    told = in_words(preprocessing(model, files=True))
    resize = next(step for name, step in steps.items() if name.startswith("Resize"))
    if isinstance(resize.size, int):
        assert told.startswith(f"resize to {resize.size} on the shorter side, crop 8×8")
        assert min(resize(Image.new("RGB", (16, 12))).size) == resize.size
    else:
        words = {"squash": "to", "border": "into"}[mode]
        assert told.startswith(f"resize {words} {resize.size[0]}×{resize.size[1]}")
    assert data.sizes(3) == [(16, 12)] * 3


def test_the_summary_the_report_and_the_card_say_it(images):
    changes = ["--crop-pct", "0.5", "--mean", "0.25", "--std", "0.5,0.5,0.5"]
    command = ["certify", "bundled", "--eps", "1e-6", "--method", "gloro", "--data", "images", "--out", "r.jsonl"]
    told = run(*command, *changes).stderr
    words = "resize to 16 on the shorter side, crop 8×8, bicubic; mean 0.25; std 0.5"
    assert f"images: 12×16 → {words}\n" in told
    assert "note: the images are enlarged: ε and radii are measured on the resized images" in told
    assert "note: centre crop discards" in told
    known = read_summary()["preprocessing"]
    assert (known["mean"], known["std"]) == ([0.25] * 3, [0.5] * 3)
    assert (known["crop_pct"], known["interpolation"], known["input_size"]) == (0.5, "bicubic", [3, 8, 8])
    assert "4 of 4" in run("verify", "bundled", "r.jsonl").stdout  # the same preprocessing is taken from the summary
    assert "other model, preprocessing" in run(*command, code=2).stderr
    runs = read_runs(["r.jsonl"])
    assert runs[0].preprocessing == words
    assert words in str(model_card(runs))
    run("report", "r.jsonl", "--markdown", "r.md")
    assert words in Path("r.md").read_text()


def test_images_of_several_sizes_are_told_by_their_sides(images):
    Image.new("RGB", (10, 20)).save("images/4.png")
    told = run("certify", "bundled", "--eps", "1e-6", "--method", "gloro", "--data", "images", "--no-out").stderr
    assert "images: 12 to 20 × 10 to 16 → resize to 8 on the shorter side, crop 8×8" in told


def test_an_input_size_that_the_network_takes(images):
    model = lipcert.load("resnet10t", pretrained=False, num_classes=3, input_size=(3, 32, 32))
    Preprocessing(input_size="48,64").apply(model)
    assert model.input_size == (3, 48, 64)
    assert open_images("images", model)[0][0].shape == (3, 48, 64)
    with pytest.raises(InputError, match="does not take images of shape"):
        Preprocessing(input_size="16").apply(lipcert.load(None))


WRONG = [
    {"mean": "a"}, {"mean": ""}, {"mean": "nan"}, {"std": "0"}, {"std": "0.1,-1,1"}, {"crop_pct": 0}, {"crop_pct": 1.1},
    {"input_size": "0"}, {"input_size": "1,2,3"}, {"input_size": "8.5"}, {"interpolation": "random"},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_cannot_be_done_is_refused(wrong):
    with pytest.raises(InputError) as refused:
        Preprocessing(**wrong)
    assert next(iter(wrong)) in str(refused.value)
    with pytest.raises(InputError, match="3 channels"):
        Preprocessing(mean="0.1,0.2").apply(lipcert.load(None))
    (name, value) = next(iter(wrong.items()))
    result = run("certify", "--eps", "1", f"--{name.replace('_', '-')}={value}", code=2)
    assert result.stderr.count("\n") == 1


def test_a_decimal_comma_is_told_as_such():
    with pytest.raises(InputError, match=r"mean 0, 5 is for .*: decimals have a point, 0\.5"):
        Preprocessing(mean="0,5")
    with pytest.raises(InputError, match=r"divide by 255, mean 0\.5,0\.5,0\.5"):
        Preprocessing(mean="127.5,127.5,127.5")
