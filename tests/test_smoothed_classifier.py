"""The smoothed classifier as a module: predictions, abstention, files, the command ``predict``, and reports."""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from commands import read_rows, read_summary, run, write_images
from PIL import Image
from scipy import stats
from torch import Tensor, nn

import lipcert
from lipcert.errors import InputError
from lipcert.inputs.artifact import weights_hash
from lipcert.inputs.preprocessing import preprocessing
from lipcert.report import model_card, read_runs
from lipcert.results import read_run
from lipcert.smoothing import Denoised

SIGMA = 0.25


class Threshold(nn.Module):
    """Class 1 where the first pixel is above ½."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        above = (x.flatten(1)[:, :1] - 0.5) * self.weight
        return torch.cat([-above, above], 1)


def threshold() -> lipcert.Model:
    return lipcert.load(Threshold(), mean=(0.0,), std=(1.0,), input_size=(1, 1, 2))


def of_shares(*shares: float) -> Tensor:
    """Images that have these shares of class 1 under the noise, but for the rounding to 8 bits."""
    first = torch.tensor([0.5 + SIGMA * stats.norm.ppf(share) for share in shares], dtype=torch.float32)
    images = torch.full((len(shares), 1, 1, 2), 0.5)
    images[:, 0, 0, 0] = (first * 255).round() / 255
    return images


def small() -> lipcert.Model:
    torch.manual_seed(0)
    return lipcert.load("test_resnet", pretrained=False, num_classes=4, input_size=(3, 16, 16))


def test_predictions_abstain_where_two_classes_are_nearly_as_frequent() -> None:
    smoothed = lipcert.SmoothedClassifier(threshold(), SIGMA, seed=1)
    images = of_shares(0.97, 0.03, 0.53)
    assert smoothed.predict(images).tolist() == [1, 0, -1]
    shares = smoothed(images, samples=4000)
    assert shares.shape == (3, 2)
    torch.testing.assert_close(shares[:, 1], torch.tensor([0.97, 0.03, 0.53]).double(), rtol=0, atol=0.04)
    found = smoothed.certify(images, torch.tensor([1, 1, 1]))
    assert found.predicted[:2].tolist() == [1, 0]
    assert found.abstained.tolist() == [False, False, True]
    assert found.correct is not None
    assert found.correct.tolist() == [True, False, False]
    assert 0 < found.radius[0] <= float(images[0, 0, 0, 0]) - 0.5
    assert smoothed.predict(images[:0]).shape == (0,)


def test_wrong_predictions_are_no_more_than_alpha() -> None:
    """The two classes are as frequent, so that every prediction is wrong with probability ½ at least."""
    smoothed = lipcert.SmoothedClassifier(threshold(), SIGMA, seed=2)
    images = torch.full((1000, 1, 1, 2), 0.5)
    predicted = smoothed.predict(images, samples=60, alpha=0.1)
    assert stats.binomtest(int((predicted >= 0).sum()), 1000, 0.1, alternative="greater").pvalue > 0.01
    assert (predicted >= 0).any()


def test_noise_is_fresh_in_every_call_unless_there_is_a_seed() -> None:
    images = of_shares(*[0.6] * 20)
    fresh, fixed = (lipcert.SmoothedClassifier(threshold(), SIGMA, seed=seed) for seed in (None, 3))
    assert not torch.equal(fresh(images), fresh(images))
    assert torch.equal(fixed(images), fixed(images))


def test_images_and_labels_may_be_arrays_as_in_certify() -> None:
    images, smoothed = of_shares(0.97, 0.03), lipcert.SmoothedClassifier(threshold(), SIGMA, seed=1)
    assert torch.equal(smoothed(images.numpy()), smoothed(images))
    assert smoothed.predict(images.double().numpy()).tolist() == [1, 0]
    assert smoothed.certify(images.numpy(), [1, 1]).labels.tolist() == [1, 1]


def test_the_network_runs_in_its_type_under_autocast() -> None:
    class Typed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            product = super().forward(x.flatten(1))
            return product * 0 + torch.tensor([0.5, product.dtype == torch.bfloat16])

    model = lipcert.load(Typed(2, 2), mean=(0.0,), std=(1.0,), input_size=(1, 1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert lipcert.SmoothedClassifier(model, SIGMA).predict(of_shares(0.5)) == 0


def test_it_follows_the_weights_of_its_model() -> None:
    model = threshold()
    smoothed = lipcert.SmoothedClassifier(model, SIGMA, seed=4)
    before = smoothed(of_shares(0.97))
    with torch.no_grad():
        model.net.weight.mul_(-1)
    assert torch.equal(smoothed(of_shares(0.97)), before.flip(1))
    model.net.weight.data.mul_(-1)  # which torch does not count as a change
    assert torch.equal(smoothed(of_shares(0.97)), before)
    assert model.sigma is None
    assert lipcert.lipschitz(smoothed).value == lipcert.lipschitz(model).value


class Tenfold(nn.Module):
    """A module of a user's, with the names of a smoothed classifier."""

    sigma = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.network = Threshold()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(10 * x - 7)


def test_a_module_with_the_names_of_a_smoothed_classifier_is_none() -> None:
    image = of_shares(0.97)
    options: dict[str, Any] = {"mean": (0.0,), "std": (1.0,), "input_size": (1, 1, 2)}
    found: Any = lipcert.certify(Tenfold().eval(), image, eps=0.01, method="gloro", **options)
    assert found.radius.item() <= image[0, 0, 0, 0] - 0.75  # which the other class has


def test_a_denoiser_is_given_again_to_a_file_that_holds_the_noise(tmp_path: Path) -> None:
    lipcert.save(lipcert.SmoothedClassifier(small(), 0.3), tmp_path / "smoothed.safetensors")
    Image.new("RGB", (16, 16)).save(tmp_path / "black.png")
    words = (str(tmp_path / "smoothed.safetensors"), str(tmp_path / "black.png"), "--denoiser", "dct")
    run("predict", *words)
    said = run("inspect", words[0], code=2).stderr
    what = "is a smoothed classifier, σ = 0.3, whose certificates are probabilistic: it has no Lipschitz bound; "
    assert f"{what}lipcert certify {words[0]} --data IMAGES" in said


@pytest.mark.parametrize("denoiser", [None, "natural"])
def test_a_file_holds_the_noise_and_the_denoiser(denoiser: str | None, tmp_path: Path) -> None:
    images = torch.rand(2, 3, 16, 16)
    smoothed = lipcert.SmoothedClassifier(small(), 0.3, denoiser, seed=0)
    path = tmp_path / "smoothed.safetensors"
    lipcert.save(smoothed, path)
    again: Any = lipcert.load(path)
    assert isinstance(again, lipcert.SmoothedClassifier)
    assert again.sigma == 0.3
    front = f", denoiser {denoiser}" if denoiser else ""
    assert f"σ = 0.3{front}, whose certificates" in run("inspect", path, code=2).stderr
    again.seed = 0
    assert torch.equal(again(images), smoothed(images))
    found: Any = lipcert.certify(again, images, eps=0.1, samples=60)
    assert found.about["samples"] == 60
    assert found.method == ("smoothing",) * 2
    assert found.sigma == 0.3
    if denoiser is None:
        assert lipcert.certify(again, images, eps=0.1, method="global").method == ("global",) * 2


def test_settings_that_cannot_be_used() -> None:
    for sigma in (0.0, -1.0, 9.0, float("nan")):
        with pytest.raises(InputError, match="sigma"):
            lipcert.SmoothedClassifier(threshold(), sigma)
    for wrong in (None, "auto"):
        with pytest.raises(InputError, match="sigma"):
            lipcert.SmoothedClassifier(threshold(), wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="seed must be"):
        lipcert.SmoothedClassifier(threshold(), SIGMA, seed=-1)
    smoothed = lipcert.SmoothedClassifier(threshold(), SIGMA)
    for samples in (0, 20.0):
        with pytest.raises(InputError, match="samples must be at least 1, a whole number"):
            smoothed(of_shares(0.9), samples=samples)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a PIL image; .* convert it by"):
        smoothed.predict(Image.new("L", (28, 28)))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="images must be a tensor, got a list"):
        smoothed.network.check_images([0.5])  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="sigma"):  # what is saved and drawn has one σ
        smoothed.sigma = 0.5
    with pytest.raises(InputError, match="sigma is 0.25 here"):
        smoothed.certify(of_shares(0.9), sigma=0.3)
    with pytest.raises(InputError, match="10 draws are too few to predict"):
        smoothed.predict(of_shares(0.9), samples=10)
    with pytest.raises(InputError, match="images must have shape"):
        smoothed.predict(torch.rand(2, 3, 4, 4))
    with pytest.raises(InputError, match="denoiser"):
        lipcert.SmoothedClassifier(threshold(), SIGMA, "naturel")


def test_the_commands_take_a_file_without_a_sigma(tmp_path: Path) -> None:
    from torchvision.utils import save_image

    lipcert.save(lipcert.SmoothedClassifier(lipcert.load("digits-vit"), 0.2), "smoothed.safetensors")
    (tmp_path / "images").mkdir()
    for i in range(2):
        save_image(torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(i)), tmp_path / f"images/{i}.png")
    rows = json.loads(run("predict", "smoothed.safetensors", "images", "--json").stdout)
    assert [Path(row["file"]).name for row in rows] == ["0.png", "1.png"]
    assert all((row["class"] is None) is (row["radius"] == 0) for row in rows)
    assert all(0 <= row["share"] <= 1 for row in rows)
    done = run("predict", "smoothed.safetensors", "images/0.png", "--samples", "100")
    assert re.search(r"0\.png\s+(\d|abstains)", done.stdout)
    assert "σ = 0.2" in done.stderr
    several = ("predict", "smoothed.safetensors", "images/1.png", "images", "--samples", "30", "--json")
    assert [row["file"] for row in json.loads(run(*several).stdout)] == ["images/1.png", "images/0.png", "images/1.png"]
    assert len(json.loads(run(*several, "--limit", "2").stdout)) == 2
    (tmp_path / "images/1.png").rename("1\t.png")
    assert "\n1\\x09.png" in run(*several[:2], "1\t.png", "images/0.png", "--samples", "30").stdout
    assert "there is no image" in run("predict", "smoothed.safetensors", "images", "none.png", code=2).stderr
    certify = ("certify", "smoothed.safetensors", "--eps", "0.1", "--limit", "3")
    done = run(*certify, "--json")
    assert json.loads(done.stdout)["sigma"] == 0.2
    assert "smoothed classifier, σ = 0.2" in done.stderr
    run(*certify, "--method", "smoothing")
    few = json.loads(run(*certify, "--samples", "60", "--sigma", "0.3", "--json").stdout)
    assert (few["method"], few["samples"], few["sigma"]) == ("smoothing", 60, 0.3)
    assert "smoothed.safetensors, its network without noise" in run(*certify, "--method", "gloro").stdout
    wrong = run("certify", "digits-vit", *certify[2:], "--samples", "60", code=2)
    assert "--samples is for method smoothing only" in wrong.stderr
    assert "give the noise with --sigma" in run("predict", "digits-vit", "images", code=2).stderr


@pytest.mark.parametrize("names", [(), ("cat", "dog")])
def test_folders_say_nothing_about_the_images_to_predict(names: tuple[str, ...], tmp_path: Path) -> None:
    """Two folders by date are not the names of two classes, no split is left out, and every image has one line."""
    torch.manual_seed(0)
    model = lipcert.load("test_resnet", pretrained=False, num_classes=2, input_size=(3, 16, 16))
    model.class_names = names
    lipcert.save(lipcert.SmoothedClassifier(model, 0.2), "smoothed.safetensors")
    files = ["2024/a.png", "2025/b.png", "train/c\n.png", "val/d.png", "e.png"]
    for file in files:
        (tmp_path / "images" / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "images" / file)
    (tmp_path / "images/f.heic").touch()
    done = run("predict", "smoothed.safetensors", "images", "--samples", "30")
    lines = [line.split("\t") for line in done.stdout.splitlines()[1:]]
    assert {line[0] for line in lines} == {*files} - {"train/c\n.png"} | {"train/c\\x0a.png"}
    assert {line[1] for line in lines} <= {*(names or "01"), "abstains"}
    assert "1 file of other formats left out" in done.stderr


def test_an_image_on_which_it_abstains_is_not_correct(tmp_path: Path) -> None:
    """Every label has probability 0.48 of two classes, and selecting draws favour it for some."""
    images, labels = of_shares(*[0.48] * 60), torch.ones(60, dtype=torch.long)
    found: Any = lipcert.certify(threshold(), images, labels, eps=0.1, method="smoothing", sigma=SIGMA, samples=200)
    assert found.abstained.all()
    assert (found.predicted == 1).any()
    assert not any(row["correct"] for row in found)
    saved = read_run(found.save(tmp_path / "r.jsonl"))
    assert saved.accuracy == 0
    saved.refuse_false_rows()


OTHER_PIXELS = ("--mean", "0.4", "--std", "0.25", "--input-size", "16", "--crop-pct", "0.5")
CERTIFIED = {
    "a name": ("test_resnet", "--checkpoint", "w.pt", "--model-args", "num_classes=3", *OTHER_PIXELS),
    "an artifact": ("net.safetensors",),
    "an artifact behind a denoiser": ("net.safetensors", "--denoiser", "dct"),
    "an artifact with other preprocessing": ("net.safetensors", *OTHER_PIXELS),
    "the newest artifact": (),
}


@pytest.mark.parametrize("model", CERTIFIED)
def test_the_code_of_a_card_loads_what_was_certified(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = timm.create_model("test_resnet", num_classes=3)
    torch.save(net.state_dict(), "w.pt")
    size = {"input_size": (3, 24, 24)}
    lipcert.save(lipcert.load("test_resnet", checkpoint="w.pt", num_classes=3, **size), "net.safetensors")
    write_images("path/to/images", 4, 32)
    words = ("--method", "smoothing", "--sigma", "0.2", "--eps", "0.1", "--samples", "50", "--data", "path/to/images")
    command = ("certify", *CERTIFIED[model], *words, "--out", "r.jsonl")
    monkeypatch.setattr(sys, "argv", ["lipcert", *command])
    run(*command)
    published = run("report", "r.jsonl", "--card", "card.md").stderr
    lipcert.save(lipcert.load("digits-vit"), "newer.safetensors")
    card = Path("card.md").read_text()
    use, again = re.findall(r"## (?:Use it|Reproduce)\n\n((?:    .*\n| *\n)+)", card)
    names: dict[str, Any] = {}
    shape = read_summary()["preprocessing"]["input_size"]
    exec(textwrap.dedent(use).replace("WEIGHTS", "w.pt"), {"images": torch.rand(1, *shape)}, names)
    assert names["classes"].shape == (1,)
    assert weights_hash(names["smoothed"].network) == read_summary()["model"]["weights_hash"]
    assert preprocessing(names["model"], files=True) == read_summary()["preprocessing"]
    assert ("net.safetensors" in published) is (model != "a name")
    if model == "a name":
        assert shlex.split(again)[2:] == [*CERTIFIED[model], *words, "--out", "r.jsonl"]
    else:
        exec(textwrap.dedent(again), names)
        assert names["result"].about["model"] == read_summary()["model"]
        assert {one["image"] for one in names["result"]} == {one["image"] for one in read_rows()}


def test_a_card_without_the_file_says_what_is_missing() -> None:
    model = lipcert.load("digits-vit")
    behind = Denoised(model, torch.nn.Identity())
    lipcert.certify(behind, torch.rand(1, 3, 8, 8), eps=0.1, method="smoothing", sigma=0.2, samples=50).save("r.jsonl")
    code = str(model_card(read_runs(["r.jsonl"])))
    assert "lipcert.load('ARTIFACT')" in code
    assert "denoiser=DENOISER)" in code


def test_images_on_which_sigma_was_chosen_stay_out_of_every_later_run() -> None:
    certify = ("certify", "bundled", "--method", "smoothing", "--sigma", "auto", "--eps", "0.25", "--samples", "200")
    chosen_on: set[int] = set()
    for limit, expected in ((6, 6), (30, 30), (120, None)):
        run(*certify, "--limit", limit, "--out", "r.jsonl")
        summary = read_summary()
        chosen_on = chosen_on or {*summary["sigma_choice"]["indices"]}
        assert {*summary["sigma_choice"]["indices"]} == chosen_on
        indices = {row["index"] for row in read_rows()}
        assert not indices & chosen_on
        assert len(indices) == (expected or 120 - len(chosen_on))
    run("verify", "bundled", "r.jsonl")
