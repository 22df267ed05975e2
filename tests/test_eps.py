"""Several ε in one run, bounds on logits, and what a new user gives that is not quite right."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from commands import read_summary, run
from PIL import Image
from torch import nn

import lipcert
from lipcert.certifier import Certifier
from lipcert.errors import InputError
from lipcert.inputs.data import open_images
from lipcert.report import facts, read_runs
from lipcert.settings import CertifySettings
from lipcert.training import Log


@pytest.fixture(scope="module")
def small():
    """A network with random weights, images and its predictions."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.GELU(), nn.Linear(16, 3))
    model = lipcert.load(net, mean=(0.5,) * 3, std=(0.25,) * 3, input_size=(3, 4, 4))
    images = torch.rand(12, 3, 4, 4)
    return model, images, model(images).argmax(1)


def test_radii_of_a_run_with_several_eps_answer_for_each(small):
    model, images, labels = small
    largest = lipcert.certify(model, images, labels, eps=1.0, method="anchored").radius
    both = lipcert.certify(model, images, labels, eps=["1e-3", largest.max().item() / 2])
    # Verdicts at the second ε are those of full radii, which a run for the first alone need not have.
    threshold = largest.max().item() / 2
    assert both.certified_accuracy_at(threshold) == (largest > threshold).double().mean().item()
    assert 0 < both.certified_accuracy_at(threshold) < both.certified_accuracy == 1
    assert both.certified_accuracy_at("1e-3") == both.certified_accuracy
    assert both.certified_accuracy_at(torch.tensor(threshold)) == both.certified_accuracy_at(threshold)
    for wrong in ("a third", "1/0", math.nan, -1):
        with pytest.raises(InputError, match="eps must be a number"):
            both.certified_accuracy_at(wrong)
    metric = lipcert.CertifiedAccuracy(["1e-3", threshold])
    for part in (slice(0, 5), slice(5, 12)):
        metric.update(lipcert.certify(model, images[part], labels[part], eps=["1e-3", threshold]))
    assert metric.compute().tolist() == pytest.approx([1.0, both.certified_accuracy_at(threshold)])
    metric.reset()
    with pytest.raises(InputError, match="no images"):
        metric.compute()
    with pytest.raises(InputError, match="needs labels"):
        metric.update(lipcert.certify(model, images, eps=0.1))


@pytest.mark.parametrize(
    ("eps", "expected"),
    [
        ("0.5, 36/255", [36 / 255, 0.5]),
        (["36/255", 0.5, "0.5"], [36 / 255, 0.5]),
        ((0.3,), [0.3]),
        (np.array([0.5, 0.25]), [0.25, 0.5]),
        (torch.tensor([0.5, 0.25]), [0.25, 0.5]),
    ],
)
def test_eps_may_be_several(eps, expected):
    settings = CertifySettings(eps)
    assert [value for value, _ in settings.every_eps] == pytest.approx(expected, rel=1e-15)
    assert settings.eps == settings.every_eps[0][0]
    assert CertifySettings(settings.eps, further_eps=list(settings.further_eps)) == settings
    assert CertifySettings(eps, "smoothing", sigma=0.5).all_samples is (len(expected) > 1)


def test_each_eps_of_a_run_is_reported():
    command = ["--method", "gloro", "--limit", "9", "--out", "r.jsonl"]
    result = run("certify", "--eps", "36/255", "--eps", "1e-6,0.5", *command)
    (found,) = read_runs(["r.jsonl"])
    for typed in ("1e-6", "36/255", "0.5"):
        name = f"certified accuracy at {typed}"
        assert f"{name}\t{dict(facts(found, found.every_eps))[name]}" in result.stdout
    assert "1e-6\t0 of 9" not in result.stdout
    assert read_summary()["further_eps"] == ["36/255", "0.5"]
    assert "with another eps" in run("certify", "--eps", "1e-6", *command, code=2).stderr
    run("verify", "bundled", "r.jsonl")


def test_a_float_eps_can_be_reported(small):
    model, images, labels = small
    result = lipcert.certify(model, images, labels, eps=36 / 255, method="gloro")
    assert "certified accuracy at 36/255" in str(lipcert.report(result))


def test_logits_stay_within_their_bounds(small):
    """Against gradient ascent and descent on each logit."""
    model, images, _ = small
    eps = 0.3
    certifier = Certifier(model, eps, "gloro")
    low, high = certifier.logit_bounds(images)
    double, pixels = model.double(), images.double()
    reached = torch.zeros(3)
    for j in range(3):
        for sign, bound in ((1, high), (-1, low)):
            delta = torch.zeros_like(pixels)
            for _ in range(20):
                point = (pixels + delta).clamp(0, 1).requires_grad_()
                (slope,) = torch.autograd.grad(sign * double(point)[:, j].sum(), point)
                delta = delta + 0.1 * slope / slope.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
                delta *= (eps / delta.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).clamp(max=1)
            logits = double((pixels + delta).clamp(0, 1))[:, j]
            assert bool((sign * logits <= sign * bound[:, j]).all())
            start = double(pixels)[:, j]
            reached[j] = max(reached[j], ((logits - start) / (bound[:, j] - start)).max())
    model.float()
    assert float(reached.min()) > 0.2  # the bounds are of use
    assert bool((certifier.logit_bounds(images, "3/5")[1] > high).all())
    for wrong in (-0.3, float("nan"), 0):
        with pytest.raises(InputError, match="eps must be a positive number"):
            certifier.logit_bounds(images, wrong)


@pytest.mark.parametrize(
    ("images", "hint"),
    [
        (torch.rand(3, 4, 4), r"images\[None\]"),
        (torch.rand(2, 4, 4, 3), "permute"),
        (255 * torch.rand(2, 3, 4, 4), "divide pixels from 0 to 255 by 255"),
        (torch.rand(2, 3, 4, 4) - 1, "before normalisation"),
        ([Image.new("RGB", (4, 4))], "to_tensor"),
    ],
    ids=["one image", "channels last", "0 to 255", "normalised", "PIL"],
)
def test_images_of_a_wrong_kind_get_a_hint(small, images, hint):
    with pytest.raises(InputError, match=hint):
        lipcert.certify(small[0], images, eps=0.1)


def test_a_bare_timm_network_is_told_its_normalisation():
    net = lipcert.load("test_efficientnet", pretrained=False, num_classes=3).net
    with pytest.warns(UserWarning, match=r"mean 0.485, 0.456, 0.406 and std .* are used"):
        lipcert.certify(net, torch.rand(1, 3, 160, 160), eps=0.1, method="global")
    with pytest.raises(InputError, match=r"\.to\('cuda'\)"):
        lipcert.load("resnet10t", pretrained=False, device="cuda")


@pytest.mark.parametrize("option", ["--num-classes", "--num_classes"])
def test_words_of_timm_are_known(option):
    given = run("certify", "resnet18", option, "3", "--eps", "0.1", code=2)
    assert "give --model-args num_classes=N" in given.stderr


def test_finetune_keeps_the_best_epoch():
    """The weights are those of the epoch of the best accuracy that is printed."""
    generator = torch.Generator().manual_seed(0)
    for i in range(24):
        path = Path("train") / "abc"[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = (80 * torch.rand(8, 8, 3, generator=generator) + 60 * (i % 3)).byte().numpy()
        Image.fromarray(pixels).save(path)
    command = ["finetune", "resnet10t", "--no-pretrained", "--model-args", "num_classes=3", "--input-size", "32"]
    command += ["--data", "train", "--loss", "ce", "--epochs", "3", "--lr", "1e-2", "--batch-size", "6"]
    # Weights of another training, whose checkpoint is gone, are not taken for the best of this one.
    safetensors.torch.save_file({"x": torch.zeros(1)}, "m.safetensors.best", {"score": "2.0", "epoch": "7"})
    result = run(*command, "--validate", "9", "--out", "m.safetensors")
    found = [float(one) for one in re.findall(r"held-out images: clean ([\d.]+)%", result.stderr)]
    assert len(found) == 3
    best = max(found)
    assert f"best epoch\t{1 + found.index(best)}, {best}% of held-out images" in result.stdout
    assert not list(Path().glob("*.best"))
    model = lipcert.load("m.safetensors")
    held = open_images("train", model, limit=15, purpose="train").others(9)
    accuracy = (model(held.images).argmax(1) == held.labels).double().mean().item()
    assert f"{accuracy:.1%}" == f"{best}%"
    assert "leaves no images" in run(*command, "--validate", "24", "--out", "n.safetensors", code=2).stderr
    Path("folder.csv").mkdir()
    for log in ("m.safetensors/log.csv", "folder.csv"):
        with pytest.raises(InputError, match="cannot be written"):
            Log(Path(log))
