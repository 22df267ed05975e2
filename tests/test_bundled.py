"""The bundled checkpoint and images: they do what the README says, and no attack succeeds inside a certified radius."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lipcert
from lipcert.certifier import Certificates
from lipcert.inputs.checkpoints import ASSETS
from lipcert.inputs.data import Batch, open_images
from lipcert.inputs.sources import BUNDLED
from lipcert.model import Model
from lipcert.norms import Rigor

EPS = 36 / 255


def bundled(count: int) -> tuple[Model, Batch]:
    model = lipcert.load(BUNDLED)
    return model, next(iter(open_images(None, model, limit=count).batches(count)))


@pytest.fixture(scope="module")
def certified() -> tuple[Model, Batch, Certificates]:
    model, batch = bundled(12)
    return model, batch, lipcert.certify(model, batch.images, batch.labels, eps=EPS)


def test_files_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in ASSETS.glob("*.safetensors")}
    assert sizes
    assert max(sizes.values()) < 5_000_000, sizes


def test_clean_and_certified_accuracy(certified: tuple[Model, Batch, Certificates]) -> None:
    _, _, result = certified
    assert result.correct is not None
    assert result.correct.double().mean() >= 0.9
    assert result.certified_accuracy is not None
    assert result.certified_accuracy >= 0.6
    assert torch.equal(result.certified, result.radius > EPS)
    stated = [Rigor.parse(rigor) for rigor in result.rigor]
    assert all(rigor is not None and rigor.delta <= 1e-9 for rigor in stated)


def test_a_certificate_does_not_depend_on_the_batch(certified: tuple[Model, Batch, Certificates]) -> None:
    model, batch, result = certified
    alone = lipcert.certify(model, batch.images[3:5], eps=EPS, batch_size=1)
    assert torch.allclose(alone.radius, result.radius[3:5], rtol=1e-6, atol=0)


def test_no_attack_succeeds_inside_a_radius(
    certified: tuple[Model, Batch, Certificates], attack: Callable[..., bool]
) -> None:
    model, batch, result = certified
    exact = lipcert.load(BUNDLED).double()
    assert not attack(exact, batch.images.double(), result.radius, steps=20)


def test_the_attack_does_succeed_outside(
    certified: tuple[Model, Batch, Certificates], attack: Callable[..., bool]
) -> None:
    """An attack that never succeeds would prove nothing."""
    _, batch, result = certified
    exact = lipcert.load(BUNDLED).double()
    for image, radius in list(zip(batch.images.double(), result.radius.tolist(), strict=True))[:4]:
        assert attack(exact, image[None], 20 * radius, steps=40)


@pytest.mark.slow
def test_the_figures_of_the_readme() -> None:
    model, batch = bundled(120)
    result = lipcert.certify(model, batch.images, batch.labels, eps=EPS)
    assert result.correct is not None
    assert (int(result.correct.sum()), int((result.correct & result.certified).sum())) == (115, 111)
