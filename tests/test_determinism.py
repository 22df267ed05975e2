"""The same command gives the same rows; threads and batches change radii by rounding alone, and no verdict."""

import pytest
import torch
from commands import run, timeless
from torch import nn

import lipcert
from lipcert.certifier import METHODS, Certifier
from lipcert.inputs.data import open_images
from lipcert.inputs.loading import load

STRONG = ("staged", "local", "lofast", "anchored")


@pytest.mark.parametrize("method", ["gloro", pytest.param("anchored", marks=pytest.mark.slow)])
def test_the_same_command_gives_the_same_rows(method, short_attack):
    limit = "2" if method == "gloro" else "1"
    for name in ("one", "two"):
        torch.manual_seed(len(name) + ord(name[0]))  # the command sets its own
        command = ["certify", "--eps", "36/255", "--limit", limit, "--method", method, "--attack"]
        run(*command, "--out", f"{name}.jsonl")
    assert timeless("one.jsonl") == timeless("two.jsonl")
    assert len(timeless("one.jsonl")) == int(limit)


def small(activation: nn.Module) -> lipcert.Model:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), activation, nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Flatten(),
        nn.Linear(128, 4),
    ]  # fmt: skip
    return lipcert.load(nn.Sequential(*layers), mean=(0.5,) * 3, std=(0.25,) * 3, input_size=(3, 6, 6)).double()


def images_of(model: lipcert.Model, count: int) -> torch.Tensor:
    return torch.rand(count, *model.input_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def threads():
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["gloro", "local", "lofast", "anchored"])
def test_radii_on_another_number_of_threads(threads, method):
    model = small(nn.ReLU())
    images, found = images_of(model, 2), []
    for count in (1, 2):
        threads(count)
        found.append(Certifier(model, 0.01, method).run(images))
    assert (found[0].radius > 0).all()
    torch.testing.assert_close(found[1].radius, found[0].radius, rtol=1e-6, atol=0)
    assert torch.equal(found[1].predicted, found[0].predicted)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "activation", [pytest.param(nn.ReLU(), marks=pytest.mark.slow), nn.GELU()], ids=["relu", "gelu"]
)
@pytest.mark.parametrize("method", METHODS)
def test_flags_do_not_depend_on_the_batch(method, activation):
    """At an ε between the radii, so that both verdicts occur; one by one, and with others beside them."""
    model = small(activation)
    images = images_of(model, 5)
    largest = "anchored" if method == "staged" else method  # what staged gives to an image that it leaves open
    radius = Certifier(model, 1e3, largest).run(images).radius.sort().values
    eps = (radius[2] * radius[3]).sqrt().item()
    certifier = Certifier(model, eps, method)
    whole = certifier.run(images)
    assert 0 < whole.certified.sum() < 5
    order = [3, 0, 1, 2, 4]
    for parts in ([[i] for i in range(5)], [order]):
        for part in parts:
            found = certifier.run(images[part])
            assert torch.equal(found.certified, whole.certified[part])
            assert torch.equal(found.predicted, whole.predicted[part])
            assert found.method == tuple(whole.method[i] for i in part)
            torch.testing.assert_close(found.radius, whole.radius[part], rtol=1e-6, atol=0)


def test_start_vectors_do_not_depend_on_the_batch(monkeypatch):
    """With norms of all operators from random start vectors, image by image."""
    monkeypatch.setattr("lipcert.bounds._masked.DENSE_SIDE", 0)
    monkeypatch.setattr("lipcert.bounds._masked._CHUNK", 1)
    certifier = Certifier(small(nn.ReLU()), 0.01, "local")
    images = images_of(certifier.model, 2)
    whole = certifier.run(images)
    assert whole.rigor[0].startswith("probabilistic")
    for part in ([0], [1]):
        torch.testing.assert_close(certifier.run(images[part]).radius, whole.radius[part], rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", STRONG)
def test_the_bundled_model(threads, method):
    """Threads and batches on a real network."""
    model = load(None)
    batch = next(open_images(None, model, limit=4).batches(4))
    images = batch.images.double()
    certifier = Certifier(model, 36 / 255, method)
    whole = certifier.run(images)
    alone = [certifier.run(image[None]) for image in images]
    threads(2)
    again = Certifier(model, 36 / 255, method).run(images)
    for other in (lipcert.certifier.Certificates.join(alone), again):
        torch.testing.assert_close(other.radius, whole.radius, rtol=1e-6, atol=0)
        assert torch.equal(other.certified, whole.certified)
