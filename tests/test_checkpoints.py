"""The certified checkpoints that come with lipcert: their table, their files, and what they certify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run

import lipcert
from lipcert.inputs.artifact import read_metadata
from lipcert.inputs.checkpoints import ASSETS, Checkpoint, checkpoints, path_of
from lipcert.inputs.data import open_images

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
LARGEST = 5_000_000  # bytes
EACH = pytest.mark.parametrize("row", checkpoints(), ids=lambda row: row.name)


def test_there_are_some() -> None:
    assert path_of("digits-vit") == ASSETS / "digits_vit.safetensors"
    assert path_of("digits") is None
    assert len({row.name for row in checkpoints()}) == len(checkpoints())


@EACH
def test_a_row_belongs_to_its_file(row: Checkpoint) -> None:
    assert row.path.stat().st_size < LARGEST
    content = read_metadata(row.path)
    assert content["source"]["name"] == row.architecture
    assert content["weights_hash"] in row.card.read_text()
    model = lipcert.load(row.name)
    assert sum(p.numel() for p in model.parameters()) == row.parameters
    attacked = row.clean if row.attacked is None else row.attacked
    assert row.certified <= attacked + 0.05  # of fewer images
    assert attacked <= row.clean + 0.05
    assert row.command.startswith(f"lipcert certify {row.name} ")
    assert row.trained


def test_the_command_lists_them() -> None:
    listed = json.loads(run("models", "--json").stdout)
    assert [one["name"] for one in listed] == [row.name for row in checkpoints()]
    assert all(Path(one["path"]).is_file() and Path(one["card"]).is_file() for one in listed)
    one = run("models", "digits-vit")
    assert "92.5 %" in one.stdout
    assert "make_digits_vit" in one.stderr


@pytest.mark.slow
@EACH
def test_a_row_prints_again_on_100_images(row: Checkpoint) -> None:
    words = row.command.split()
    data = None
    if "--data" in words:
        data = str(DATA / words[words.index("--data") + 1])
        if not Path(data).exists():
            pytest.skip(f"there is no {data}")
    model = lipcert.load(row.name)
    batch = next(open_images(data, model, limit=100).batches(100))
    result = lipcert.certify(model, batch.images, batch.labels, eps=row.eps, method=row.method)
    assert result.correct is not None
    assert result.certified_accuracy is not None
    clean = float(result.correct.double().mean())
    print(f"{row.name}: clean {clean:.3f}, certified {result.certified_accuracy:.3f} of 100 images")
    # The row is of the same 100 images, of 20 more, or of all test images: four standard deviations of a share of 100.
    spread = {100: 0.02, 120: 0.1}.get(row.images, 0.2)
    assert abs(clean - row.clean) < spread
    assert abs(result.certified_accuracy - row.certified) < spread


def test_the_readme_names_the_best_on_cifar10() -> None:
    rows = (row for row in checkpoints() if row.data.startswith("CIFAR-10, all"))
    best = max(rows, key=lambda row: row.certified)
    text = " ".join((Path(__file__).parent.parent / "README.md").read_text().split())
    assert (
        f"`{best.name}`, the best of them, certifies {100 * best.certified:.1f} % of {best.images:,} test images"
        in text
    )


@pytest.mark.parametrize("name", ["cifar10-vit", "digits-vit"])
def test_staged_certification_has_the_time_for_all_norms(name):
    """With products in their place it certifies fewer images of ``cifar10-vit``."""
    certifier = lipcert.certifier.Certifier(lipcert.load(name), 36 / 255)
    assert "anchored" in certifier.methods
    assert "anchored" not in certifier.notes or "exact norms for" not in certifier.notes["anchored"]
