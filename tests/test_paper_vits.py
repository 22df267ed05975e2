"""LoFAST's tables of whole networks: rows that are made in two environments."""

import json

import numpy as np
import pytest
from PIL import Image

import lipcert
from benchmarks.papers import __main__ as papers
from benchmarks.papers import trained, vits
from benchmarks.papers.recipes import Given
from benchmarks.papers.tables import find


@pytest.fixture
def data(tmp_path):
    """Ten classes of plain colours, 32×32."""
    for split in ("train", "test"):
        for number in range(20):
            folder = tmp_path / "data" / split / f"class {number % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            colour = np.random.default_rng(number % 10).integers(0, 256, 3)
            Image.fromarray(np.full((32, 32, 3), colour, dtype=np.uint8)).save(folder / f"{number}.png")
    return str(tmp_path / "data")


class Crown:
    """In place of auto_LiRPA; says that every image holds."""

    version = "0.0"

    def __init__(self, model):
        self.model = model

    def __call__(self, image, label, eps):
        return 1.0


@pytest.mark.slow
def test_rows_of_crown_are_added_by_a_second_run(data, tmp_path, monkeypatch):
    def absent(model):
        raise ImportError("No module named 'auto_LiRPA' (unknown location)")

    monkeypatch.setattr(vits, "_vit", lambda layers, small: vits.Vit(layers, 1, 0.5, 8, 16, 20, 40))
    monkeypatch.setattr(vits, "_LAYERS", (1,))
    monkeypatch.setattr(vits, "Crown", absent)
    given = Given(True, data, tmp_path)
    net, crown, *others, rest = vits.beside_crown(find("lofast", "1"), given)
    assert "full" in rest["needs"]
    assert crown["needs"].startswith("auto_LiRPA")
    assert "location" not in crown["needs"]
    assert next(vits.before_crown(find("lofast", "2"), given))["needs"] == crown["needs"]
    assert net["clean"] > 0.3
    assert data not in json.dumps([net, crown, *others])
    assert ["certified" in row for row in others] == [True, True, True]
    assert others[1]["certified"]["0.02"] > 0
    for row in others:
        shares = row["certified"]
        assert all(net["pgd"][eps] >= shares[eps] for eps in vits.EPS)

    def again(*arguments, **given):
        raise AssertionError("trained or certified again")

    monkeypatch.setattr(trained, "run", again)
    monkeypatch.setattr(lipcert, "certify", again)
    asked = []

    class OneInTwo(Crown):
        def __call__(self, image, label, eps):
            asked.append(eps)
            return float(len(asked) // len(vits.EPS) % 2)

    monkeypatch.setattr(vits, "Crown", OneInTwo)
    known = list(vits.beside_crown(find("lofast", "1"), given))
    assert known[2:] == [*others, rest]
    assert known[1]["auto_LiRPA"] == "0.0"
    assert "certified" not in known[1]
    (alone, both, own, svhn) = vits.before_crown(find("lofast", "2"), given)
    assert len(asked) == 3 * round(net["clean"] * net["images"])
    assert both["verified at 0.02"] >= max(alone["verified at 0.02"], others[0]["certified"]["0.02"])
    assert own["verified at 0.02"] >= max(alone["verified at 0.02"], others[1]["certified"]["0.02"])
    assert alone["kind"] == both["kind"] == own["kind"] == "estimate"
    assert set(svhn["paper"]) == {"SVHN, CROWN", "SVHN, CROWN and LoFAST"}


def test_what_pgd_changed_cannot_be_held(data, tmp_path, monkeypatch):
    network = vits.Trained(vits.Vit(1, 1, 0.5, 8, 16, 20, 40), data, tmp_path, 20)
    assert len(network.images) > 0
    monkeypatch.setattr(network, "_attacked", lambda: {eps: [False] * len(network.images) for eps in vits.EPS})
    monkeypatch.setattr(vits, "Crown", Crown)
    with pytest.raises(AssertionError, match="PGD changed what CROWN held"):
        network.verdicts("CROWN")


def test_without_images_the_tables_say_so():
    for number in ("1", "2", "figure 2"):
        assert "cifar10=FOLDER" in next(papers.table(find("lofast", number), "small", {}))["needs"]
