"""LoFAST's tables of whole networks."""

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


@pytest.mark.slow
def test_rows_are_kept_and_below_the_attack(data, tmp_path, monkeypatch):
    monkeypatch.setattr(vits, "_vit", lambda layers, small: vits.Vit(layers, 1, 0.5, 8, 16, 20, 40))
    monkeypatch.setattr(vits, "_LAYERS", (1,))
    given = Given(True, data, tmp_path)
    net, *others, rest = vits.layers(find("lofast", "1"), given)
    assert "full" in rest["needs"]
    assert net["clean"] > 0.3
    assert data not in json.dumps([net, *others])
    assert others[1]["certified"]["0.02"] > 0
    for row in others:
        assert all(net["pgd"][eps] >= row["certified"][eps] for eps in vits.EPS)

    def again(*arguments, **given):
        raise AssertionError("trained or certified again")

    monkeypatch.setattr(trained, "run", again)
    monkeypatch.setattr(lipcert, "certify", again)
    assert [net, *others, rest] == list(vits.layers(find("lofast", "1"), given))


def test_what_pgd_changed_cannot_be_certified(data, tmp_path, monkeypatch):
    network = vits.Trained(vits.Vit(1, 1, 0.5, 8, 16, 20, 40), data, tmp_path, 20)
    assert len(network.images) > 0
    everything = {eps: [True] * len(network.images) for eps in vits.EPS}
    monkeypatch.setattr(network, "_attacked", lambda: {eps: [False] * len(network.images) for eps in vits.EPS})
    monkeypatch.setattr(network, "_radii", lambda method: everything)
    with pytest.raises(AssertionError, match="PGD changed what lofast held"):
        network.verdicts("lofast")


def test_without_images_the_tables_say_so():
    for number in ("1", "figure 2"):
        assert "cifar10=FOLDER" in next(papers.table(find("lofast", number), "small", {}))["needs"]
