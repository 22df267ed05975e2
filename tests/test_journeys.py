"""What people type: from an empty folder, default names throughout, and every command that is advised on the way.

``pytest tests/test_journeys.py`` runs from any folder, with the lipcert that is installed.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

sys.path.append(str(Path(__file__).parent.parent))

from benchmarks._advised import Journey, here, in_a_process

NAME = "vit_tiny_patch16_224"
ARTIFACT = f"{NAME}.lipcert.safetensors"
ARGUMENTS = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 3}
SMALL = ["--model-args", *(f"{key}={value}" for key, value in ARGUMENTS.items())]
SIZES = {
    "certify": {"--limit": "2", "--samples": "200"},
    "constrain": {"--limit": "6"},
    "finetune": {"--epochs": "1", "--limit": "6", "--batch-size": "3"},
}


@pytest.fixture
def journey(tmp_path):
    """A folder with images of three classes and, for the architecture, weights that somebody has trained."""
    random = np.random.default_rng(0)
    for i in range(12):
        path = tmp_path / "images" / "abc"[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    net = timm.create_model(NAME, **ARGUMENTS)
    for parameter in net.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    torch.save(net.state_dict(), tmp_path / "mine.pth")
    names = {"TRAIN": "images", "TEST": "images", "IMAGES": "images", "ARTIFACT": ARTIFACT}
    return Journey(tmp_path, here, names, SIZES)


def test_default_names_throughout(journey):
    """Each command continues with the newest artifact in the folder."""
    (journey.folder / "old.lipcert.safetensors").touch()  # beside an older file that is none
    journey.go("convert", NAME, "--checkpoint", "mine.pth", *SMALL)
    assert (journey.folder / ARTIFACT).is_file()
    assert [step.words[0] for step in journey.steps] == ["convert", "finetune", "certify", "report"]
    journey.follow = False
    for command in (["inspect"], ["constrain", "--data", "images"], ["finetune", "--data", "images", "--eps", "0.1"]):
        journey.go(*command)
    journey.go("certify", "--data", "images", "--eps", "36/255")
    (model,) = (path for path in journey.folder.glob("*.safetensors") if "constrained.finetuned" in path.name)
    rows = model.name.replace(".lipcert.safetensors", ".certified.jsonl")
    journey.go("verify", model.name, rows)
    journey.go("report", rows, "--html", "page.html", "--card", "README.md")
    assert (journey.folder / "README.md").is_file()


def test_a_network_with_a_loose_bound(journey):
    """It is smoothed, or trained behind noise, or distilled, and every way ends in a report."""
    weights = torch.load(journey.folder / "mine.pth")
    torch.save({key: 1e3 * value if value.dim() > 1 else value for key, value in weights.items()}, "mine.pth")
    journey.follow = False
    journey.go("convert", NAME, "--checkpoint", "mine.pth", *SMALL, "--attention", "keep")  # as advised for a teacher
    journey.follow, journey.sizes = True, {**SIZES, "certify": {"--samples": "200"}}  # the images advised for twelve
    journey.go("certify", NAME, "--checkpoint", "mine.pth", *SMALL, "--data", "images", "--eps", "36/255")
    journey.sizes = SIZES
    for command in ("convert", "inspect"):
        journey.go(command, NAME, "--checkpoint", "mine.pth", *SMALL)
    typed = {" ".join(step.words) for step in journey.steps}
    for way in ("certify vit", "--denoiser natural", "--recipe noise --only head", "finetune liresnet_l6w64", "report"):
        assert any(way in words for words in typed), (way, typed)


@pytest.mark.parametrize("model", [ARTIFACT, f"./{ARTIFACT}", f"other/{ARTIFACT}"])
def test_a_file_however_it_is_written(journey, model):
    journey.follow = False
    (journey.folder / "other").mkdir()
    journey.go("convert", NAME, "--no-pretrained", *SMALL, *(["--out", model] if "other" in model else []))
    journey.go("inspect", model)
    journey.go("constrain", model, "--data", "images", "--error", "0.1")
    journey.go("finetune", model, "--data", "images", "--eps", "0.1", "--loss", "ce")
    journey.go("certify", model, "--data", "images", "--eps", "36/255", "--method", "gloro")
    journey.go("verify", model, f"{NAME}.certified.jsonl")


@pytest.mark.parametrize("name", [NAME, f"{NAME}.augreg_in21k"])
def test_a_timm_name(journey, name):
    journey.follow = False
    words = (name, "--checkpoint", "mine.pth", *SMALL)
    journey.go("inspect", *words)
    journey.go("convert", *words)
    journey.go("certify", *words, "--data", "images", "--eps", "36/255", "--method", "gloro")
    journey.go("certify", "--data", "images", "--eps", "36/255", "--method", "gloro")
    assert {path.name for path in journey.folder.glob(f"{name}.*")} == {
        f"{name}.lipcert.safetensors",
        *(f"{name}.certified{more}{end}" for more in ("", ".gloro.eps-36_255") for end in (".jsonl", ".summary.json")),
    }


def test_the_first_page(journey):
    """What the README begins with, in a process of its own, and what it advises."""
    journey.run, journey.names = in_a_process, {}
    (journey.folder / "mine.pth").unlink()
    step = journey.go("certify", "--eps", "36/255")
    assert "digits-vit" in step.out
    assert (journey.folder / "digits-vit.certified.html").is_file()
