"""Figures of the papers over the epochs of a training."""

import pytest
from commands import write_images

import lipcert
from benchmarks.papers import courses
from benchmarks.papers.recipes import Given
from benchmarks.papers.tables import find


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Ten classes of noise, 32×32, and a training of two epochs."""
    for split in ("train", "test"):
        write_images(tmp_path / "data" / split, 20, 32, "0123456789")
    for name, value in {"_IMAGES": 20, "_BATCH": 10, "_EPOCHS": 2, "_LOOKED": 4}.items():
        monkeypatch.setattr(courses, name, value)
    return Given(True, str(tmp_path / "data"), tmp_path)


@pytest.mark.slow
def test_local_lips_figures_share_their_trainings(given, monkeypatch):
    numbers, *bounds = courses.local_lip(find("local-lip", "figure 7"), given)
    assert (numbers["training images"], numbers["epochs"]) == (20, 2)
    assert [row["name"] for row in bounds[:2]] == ["standard, epoch 1", "standard, epoch 2"]
    assert len(bounds) == 6
    for row in bounds:
        assert len(row["log10 of layers"]) == 8
        assert row["log10 bound"] == pytest.approx(sum(row["log10 of layers"]), abs=0.4)  # and the normalisation
        assert row["local bound"] <= 10 ** row["log10 bound"]
    assert bounds[0]["log10 bound"] != bounds[1]["log10 bound"]

    def again(*arguments, **settings):
        raise AssertionError("trained again")

    monkeypatch.setattr(lipcert, "finetune", again)
    _, *losses = courses.local_lip(find("local-lip", "figure 2"), given)
    assert [row["name"] for row in losses[::2]] == ["GloRo, epoch 1", "Local-Lip-B, epoch 1"]
    assert all(row["at the worst logits"] >= row["cross-entropy"] for row in losses)
    during = {row.get("name"): row for row in courses.local_lip(find("local-lip", "figure 6"), given)}
    _, *last = courses.local_lip(find("local-lip", "figure 3"), given)
    assert [row["name"] for row in last] == [f"{name}, epoch 2" for name in ("standard", "GloRo", "Local-Lip-B")]
    for row in last:
        assert during[row["name"]] == row
        assert len(row["varying"]) == 7
        assert all(0 < share <= 1 for share in row["varying"])


def test_runners_up_are_compared_with_the_epoch_before(given, monkeypatch):
    table = find("liresnet", "figure 2")
    course = [{"epoch": k, "accuracy": 0.5, "second": second} for k, second in enumerate([[1, 2, 3], [1, 2, 4]], 1)]
    monkeypatch.setattr(courses, "_epochs", lambda *arguments: course)
    _, changed, needs = courses.threats(table, given)
    assert changed["runner-up changed"] == pytest.approx(1 / 3)
    assert "Tiny-ImageNet" in needs["needs"]
    monkeypatch.undo()
    (needs,) = courses.threats(table, Given(True))
    assert "cifar10=FOLDER" in needs["needs"]


def test_the_runner_up_is_the_second_largest_logit():
    model = lipcert.load("liresnet_l12w256", pretrained=False, depth=1, width=4, num_features=8)
    images = courses.torch.rand(3, 3, 32, 32)
    logits = model(images)
    for second, row in zip(courses._second(model, images, images)["second"], logits, strict=True):
        assert (row > row[second]).sum() == 1
