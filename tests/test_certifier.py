"""Certificates: exact on linear networks, and never broken by an attack."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import Function
from torch import Tensor, nn

import lipcert
from lipcert import certify
from lipcert.bounds import margins, radii
from lipcert.certifier import METHODS, Certifier
from lipcert.certifier._certifier import _as_deployed
from lipcert.errors import InputError
from lipcert.inputs.artifact import seed_of
from lipcert.model import Model
from lipcert.norms import Budget, Rigor

STD, MEAN = (0.229, 0.05, 0.9), (0.485, 0.456, 0.406)


def linear(classes: int = 5, side: int = 3, seed: int = 0, scale: float = 1.0) -> Any:
    torch.manual_seed(seed)
    head = nn.Linear(3 * side * side, classes)
    with torch.no_grad():
        head.weight.mul_(scale)
    return Model(nn.Sequential(nn.Flatten(), head), mean=MEAN, std=STD, input_size=(3, side, side))


def rows_of(model: Any) -> Tensor:
    """The rows of a linear classifier, as functions of the pixels."""
    weight = model.net[1].weight.detach().double()
    return weight / model.std.double().expand(model.input_size).flatten()


def exact_radius(model: Any, images: Tensor) -> Tensor:
    """The distance to the nearest boundary, in float64."""
    rows = rows_of(model)
    logits = (images.double() - model.mean.double()).flatten(1) @ rows.T + model.net[1].bias.detach().double()
    predicted = logits.argmax(1)
    gaps = logits.gather(1, predicted[:, None]) - logits
    distances = gaps / (rows[predicted][:, None] - rows[None]).norm(dim=2)
    return distances.scatter(1, predicted[:, None], math.inf).amin(1)


@pytest.mark.parametrize("classes", [2, 5, 11])
def test_gloro_is_exact_on_a_linear_classifier(classes: int) -> None:
    model = linear(classes, seed=classes)
    images = torch.rand(40, 3, 3, 3)
    result = certify(model, images, eps=0.01, method="gloro")
    truth = exact_radius(model, images)
    torch.testing.assert_close(result.radius, truth, rtol=1e-9, atol=0)
    assert (result.radius <= truth * (1 + 1e-14)).all()
    assert torch.equal(result.certified, result.radius > 0.01)


def test_the_worst_direction_just_inside_the_radius() -> None:
    """On a linear network the boundary is where the certificate says, from both sides."""
    model = linear(4, seed=3)
    twin = Model(model.net.double(), mean=MEAN, std=STD, input_size=model.input_size).double()
    rows = rows_of(twin)
    images = torch.rand(60, 3, 3, 3, dtype=torch.float64)
    result = certify(twin, images, eps=1e-6, method="gloro")
    logits = twin(images)
    for i in range(len(images)):
        y = int(result.predicted[i])
        others = [j for j in range(4) if j != y]
        away = {j: rows[j] - rows[y] for j in others}
        j = min(others, key=lambda j: float((logits[i, y] - logits[i, j]) / away[j].norm()))
        step = (away[j] / away[j].norm()).reshape(3, 3, 3)
        radius = float(result.radius[i])
        assert int(twin((images[i] + radius * (1 - 1e-9) * step)[None]).argmax()) == y
        assert int(twin((images[i] + radius * (1 + 1e-9) * step)[None]).argmax()) == j


def test_global_is_below_gloro_and_staged_is_the_better() -> None:
    for seed in range(4):
        model = network(seed, 4, "mlp")
        images = torch.rand(10, *model.input_size)
        by = {
            method: certify(model, images, eps=1e-3, method=method).radius for method in ("global", "gloro", "staged")
        }
        assert (by["global"] <= by["gloro"] * (1 + 1e-9)).all()
        assert (by["staged"] >= by["global"]).all()


def network(seed: int, classes: int, kind: str) -> Any:
    """A small random network."""
    torch.manual_seed(seed)
    net: Any
    if kind == "mlp":
        net = nn.Sequential(
            nn.Flatten(), nn.Linear(27, 16), nn.ReLU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, classes)
        )
        side = 3
    elif kind == "conv":
        net = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 4, 2, bias=False),
            nn.SiLU(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(16, classes),
        )
        nn.init.uniform_(net[1].running_var, 0.05, 2)
        nn.init.uniform_(net[1].weight, -1.5, 1.5)
        side = 8
    else:
        net = nn.Sequential(
            nn.Flatten(2),
            nn.LayerNorm(9, eps=0.1),
            nn.Linear(9, 6),
            nn.Softmax(-1),
            nn.Flatten(),
            nn.Linear(18, classes),
        )
        nn.init.normal_(net[1].weight)
        side = 3
    return Model(net, mean=MEAN, std=STD, input_size=(3, side, side))


def trained(model: Any, steps: int = 60) -> Any:
    """Fitted to random labels of its own images, so that margins are large for its Lipschitz constant."""
    images = torch.rand(24, *model.input_size)
    labels = torch.arange(24) % 3
    optimiser = torch.optim.Adam(model.parameters(), 0.02, weight_decay=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimiser.step()
    return model.eval()


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "conv", "tokens"])
def test_no_attack_succeeds_inside_a_certified_radius(kind: str, fitted: bool, attack: Any) -> None:
    for seed in range(3):
        model = network(seed, 3, kind)
        model = (trained(model) if fitted else model).double()
        images = torch.rand(6, *model.input_size, dtype=torch.float64)
        result = certify(model, images, eps=1e-4, method="gloro")
        assert (result.radius > 0).all()
        assert not attack(model, images, result.radius * (1 - 1e-9), seed=seed)


def test_the_attack_is_able_to_succeed(attack: Any) -> None:
    """Five times the exact radius is enough for it on a linear network."""
    model = linear(3, seed=1).double()
    images = 0.25 + 0.5 * torch.rand(10, 3, 3, 3, dtype=torch.float64)
    found = [attack(model, x[None], 5 * r) for x, r in zip(images, exact_radius(model, images).tolist(), strict=True)]
    assert sum(found) >= 8


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 6), st.floats(-6, 6))
def test_random_linear_networks(seed: int, classes: int, exponent: float) -> None:
    model = linear(classes, side=2, seed=seed, scale=10.0**exponent)
    images = torch.rand(5, 3, 2, 2)
    radius = certify(model, images, eps=0.1, method="gloro").radius
    truth = exact_radius(model, images)
    assert (radius <= truth * (1 + 1e-12)).all()
    assert (radius >= truth * (1 - 1e-8) - 1e-15).all()


# Strictness.


def test_ties_are_not_certified() -> None:
    gaps = torch.tensor([[math.inf, 0.0, 1.0], [math.inf, 1.0, 2.0]], dtype=torch.float64)
    assert radii(gaps, torch.tensor([[0.0, 1.0, 1.0]] * 2).double())[0] == 0
    assert radii(gaps, torch.tensor([[0.0, 0.0, 0.0]] * 2).double()).tolist() == [0.0, math.inf]
    model = linear(3)
    with torch.no_grad():
        model.net[1].weight[1] = model.net[1].weight[0]
        model.net[1].bias[1] = model.net[1].bias[0]
        model.net[1].bias[2] = -1e3
    result = certify(model, torch.rand(5, 3, 3, 3), eps=1e-9)
    assert not result.certified.any()
    assert (result.radius == 0).all()


def test_equal_rows_cannot_change_order() -> None:
    """f_0 − f_1 is constant: only the third class limits the radius."""
    model = linear(3)
    with torch.no_grad():
        model.net[1].weight[1] = model.net[1].weight[0]
        model.net[1].bias.copy_(torch.tensor([1e-6, 0.0, -5.0]))
    images = torch.rand(8, 3, 3, 3)
    result = certify(model, images, eps=1e-3, method="gloro")
    assert (result.predicted == 0).any()
    keep = result.predicted == 0
    rows = rows_of(model)
    logits = model.double()(images.double())
    truth = (logits[:, 0] - logits[:, 2]) / (rows[0] - rows[2]).norm()
    torch.testing.assert_close(result.radius[keep], truth[keep].detach(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("row", [[math.nan, 1.0, 2.0], [math.nan] * 3, [1.0, math.nan, 0.0], [5.0, 1.0, math.nan]])
def test_nan_logits_are_never_certified(row: list[float]) -> None:
    predicted, gaps = margins(torch.tensor([row]))
    for constants in (torch.zeros(1, 3).double(), torch.ones(1, 3).double()):
        radius = radii(gaps, constants)
        assert not radius > 0
        assert not radius.isnan()


def test_a_constant_network_is_certified_everywhere() -> None:
    model = linear(3)
    with torch.no_grad():
        model.net[1].weight.zero_()
        model.net[1].bias.copy_(torch.tensor([0.0, 1.0, 0.5]))
    for method in ("global", "gloro", "staged"):
        result = certify(model, torch.rand(3, 3, 3, 3), eps=5.0, method=method)
        assert result.certified.all()
        assert (result.radius == math.inf).all()
        assert (result.predicted == 1).all()
    with torch.no_grad():
        model.net[1].bias.zero_()
    assert not certify(model, torch.rand(3, 3, 3, 3), eps=1e-9).certified.any(), "a constant tie is a tie"


def test_a_bound_that_is_infinite_certifies_nothing() -> None:
    model = Model(Function(lambda x: (1 / x).flatten(1)), mean=(0, 0, 0), std=(1, 1, 1), input_size=(3, 2, 2))
    images = 0.1 + 0.9 * torch.rand(4, 3, 2, 2)
    result = certify(model, images, eps=1e-9, method="gloro")
    assert not result.certified.any()
    assert (result.radius == 0).all()
    nearest = images.flatten(1).amin(1)  # 1/x is unbounded there, and smooth before
    assert bool((certify(model, images, eps=1e-9).radius < nearest).all())


def vit() -> Model:
    return lipcert.load(
        "vit_tiny_patch16_224", pretrained=False, img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2,
        num_classes=3, mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 8, 8),
    )  # fmt: skip


@pytest.mark.slow
def test_the_deployed_network_is_certified_for_less() -> None:
    model = vit()
    images = torch.rand(2, 3, 8, 8)
    both = ("real", "float32")
    real, deployed = (certify(model, images, eps=1e-3, dtype=dtype, method="anchored") for dtype in both)
    assert (real.dtype, deployed.dtype) == ("real", "float32")
    assert bool((deployed.radius < real.radius).all())
    assert bool((deployed.radius > 0).all())
    with pytest.raises(InputError, match="real, float32, float16, bfloat16"):
        certify(model, images, eps=1e-3, dtype="int8")


def test_deterministic_on_request() -> None:
    model = vit()
    images = torch.rand(2, 3, 8, 8)
    sampled, certain = (certify(model, images, eps=1e-3, rigor=rigor) for rigor in ("probabilistic", "deterministic"))
    assert certain.rigor == ("deterministic",) * 2
    assert all(rigor.startswith("probabilistic") for rigor in sampled.rigor)
    assert bool((certain.radius >= sampled.radius * 0.99).all())
    with pytest.raises(InputError, match="probabilistic, deterministic"):
        certify(model, images, eps=1e-3, rigor="sure")


def test_perturbed_inside() -> None:
    model = vit()
    images = torch.rand(2, 3, 8, 8)
    result = certify(model, images, eps=1e-3, at="patch_embed")
    assert result.method == ("anchored",) * 2
    assert bool((result.radius > 0).all())
    for other in ({"method": "gloro"}, {"dtype": "float32"}, {"attack": "pgd"}):
        with pytest.raises(InputError, match="at needs method"):
            certify(model, images, eps=1e-3, at="patch_embed", **other)
    with pytest.raises(InputError, match="belongs to at='head.7'"):
        certify(model, images, eps=1e-3, at="head.7")


def test_labels_and_accuracy() -> None:
    model = linear(3)
    images = torch.rand(6, 3, 3, 3)
    result = certify(model, images, eps=1e-6)
    assert result.correct is None
    assert result.certified_accuracy is None
    labels = result.predicted.clone()
    labels[:2] = (labels[:2] + 1) % 3
    result = certify(model, images, labels, eps=1e-6, batch_size=4)
    assert result.certified_accuracy == pytest.approx(4 / 6)
    assert len(result) == 6


def test_no_images() -> None:
    result = certify(linear(), torch.zeros(0, 3, 3, 3), eps=0.1)
    assert len(result) == 0
    assert result.radius.shape == (0,)


def test_images_that_are_none() -> None:
    model = linear()
    for wrong in (
        torch.rand(1, 3, 4, 4),
        torch.rand(3, 3, 3),
        2 * torch.ones(1, 3, 3, 3),
        torch.full((1, 3, 3, 3), math.nan),
    ):
        with pytest.raises(InputError):
            certify(model, wrong, eps=0.1)
    images = torch.rand(2, 3, 3, 3)
    with pytest.raises(InputError, match="images must be a dense tensor"):
        certify(model, images.to_sparse(), eps=0.1)
    with pytest.raises(InputError, match="labels must be a dense tensor"):
        certify(model, images, torch.tensor([1, 0]).to_sparse(), eps=0.1)
    with pytest.raises(InputError, match="divide 8-bit pixels"):
        certify(model, torch.ones(1, 3, 3, 3, dtype=torch.uint8), eps=0.1)
    with pytest.raises(InputError, match="labels"):
        certify(model, torch.rand(2, 3, 3, 3), torch.zeros(3), eps=0.1)
    with pytest.raises(InputError, match="there is no method .hope."):
        certify(model, torch.rand(2, 3, 3, 3), eps=0.1, method="hope")


def test_later_changes_do_not_reach_a_certifier() -> None:
    model = linear()
    images = torch.rand(3, 3, 3, 3)
    certifier = Certifier(model, 0.01, "gloro")
    before = certifier.run(images).radius
    with torch.no_grad():
        model.net[1].weight.mul_(100)
    assert torch.equal(certifier.run(images).radius, before)


@pytest.mark.parametrize("method", ["gloro", "lofast", "anchored"])
def test_a_tiny_head_makes_no_large_radius(method: str) -> None:
    """The exact radius is the same as with ordinary weights, below 10."""
    model = linear(3).double()
    with torch.no_grad():
        model.net[1].weight.mul_(1e-55)
        model.net[1].bias.zero_()
    images = torch.rand(4, 3, 3, 3, dtype=torch.float64)
    assert (certify(model, images, eps=1e-3, method=method).radius < 10).all()


class Casting(nn.Module):
    """Attention that casts as many networks do, or the same on real numbers."""

    def __init__(self, casts: bool):
        super().__init__()
        torch.manual_seed(0)
        self.casts = casts
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.flatten(1).unflatten(1, (3, 4))).chunk(3, -1)
        often = torch.tensor([True, False, True])
        if not self.casts:
            y = (q @ k.mT).softmax(-1) @ v
            return self.head(nn.functional.gelu((y * (often.double() / 3)[:, None]).sum(1)))
        weights = torch.softmax(q.float() @ k.to(torch.float32).mT, -1, dtype=torch.float32)
        y = (weights @ v.half().type_as(weights)).type("torch.FloatTensor") * (often.float() / 3)[:, None]
        return self.head(nn.functional.gelu(y.sum(1, dtype=torch.float32).bfloat16()).to(x.dtype))


def casting(casts: bool) -> Model:
    model = Model(Casting(casts), mean=(0.5,), std=(0.25,), input_size=(1, 3, 4))
    return model if casts else model.double()


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.rand(2, 1, 3, 4, generator=torch.Generator().manual_seed(3))


def test_certified_logits_are_those_of_real_arithmetic(pixels: Tensor) -> None:
    model, images = casting(True), pixels.double()
    certifier, truth = Certifier(model, 0.01, "gloro"), casting(False).double()(images).detach()
    torch.testing.assert_close(certifier.model(images), truth, rtol=0, atol=1e-12)
    assert (model.double()(images) - truth).abs().max() > 1e-6  # the model itself still casts


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", METHODS)
def test_casts_do_not_change_certificates(pixels: Tensor, method: str) -> None:
    with_casts, without = (certify(casting(casts), pixels, eps=0.01, method=method) for casts in (True, False))
    assert (with_casts.radius > 0).all()
    torch.testing.assert_close(with_casts.radius, without.radius, rtol=1e-6, atol=0)
    torch.testing.assert_close(with_casts.margin, without.margin, rtol=0, atol=1e-12)


def test_an_attack_sees_the_network_of_real_arithmetic(pixels: Tensor) -> None:
    """Its float16 values would break a gradient, and put the change of class elsewhere."""
    found = [certify(casting(casts), pixels, eps=3.0, method="gloro", attack="pgd") for casts in (True, False)]
    assert torch.isfinite(found[1].attack_distance).all()
    torch.testing.assert_close(found[0].attack_distance, found[1].attack_distance, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_casts_of_a_deployed_network_round(pixels: Tensor, dtype: str) -> None:
    """Each to its type: the bounds cover the deployed network, though it has a part in float16."""
    model, bound = _as_deployed(casting(True), dtype)
    assert bound is not None
    images = pixels.to(getattr(torch, dtype))
    with torch.no_grad():
        low = casting(True).to(images.dtype)(images).double()
    truth = model(images.double()).detach()
    _, gaps = margins(truth)
    seen = truth.gather(1, truth.argmax(1)[:, None]) - truth - (low.gather(1, truth.argmax(1)[:, None]) - low)
    lost = bound.margins(images.double(), truth.argmax(1), torch.zeros(2).double())
    assert (seen <= lost).all()
    assert seen.max() > 1e-5
    assert torch.isfinite(lost).all() or dtype != "float32"  # the others are too coarse for a bound here


@pytest.mark.slow
def test_linear_attention_that_casts() -> None:
    """EfficientViT has a product in float32 with a ReLU on either side."""
    sizes = {"widths": (4, 4, 4, 8, 8), "depths": (1, 1, 1, 1, 1), "head_dim": 4, "head_widths": (8, 8)}
    model = lipcert.load("efficientvit_b0", pretrained=False, num_classes=3, input_size=(3, 32, 32), **sizes)
    result = certify(model, torch.rand(1, 3, 32, 32), eps=1e-6, method="lofast")
    assert result.certified.all()


def near_kinks() -> Any:
    """Orthogonal matrices and absolute values, which keep lengths: a small constant, and kinks near every image."""

    torch.manual_seed(0)
    layers = [nn.Linear(12, 64, bias=False), *(nn.Linear(64, 64, bias=False) for _ in range(3))]
    for layer in layers:
        torch.nn.init.orthogonal_(layer.weight)
    behind = [part for layer in layers for part in (layer, Function(torch.abs))]
    net = nn.Sequential(nn.Flatten(), *behind, nn.Linear(64, 3))
    return Model(net, mean=(0.5,) * 3, std=(1.0,) * 3, input_size=(3, 2, 2)).double()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", ["real", "float32"])
@pytest.mark.parametrize("method", ["local", "lofast", "anchored"])
def test_no_method_returns_less_than_gloro(method: str, dtype: str) -> None:
    model, images = near_kinks(), torch.rand(6, 3, 2, 2)
    cheap = Certifier(model, 0.01, "gloro", dtype=dtype).run(images)
    strong = Certifier(model, 0.01, method, dtype=dtype).run(images)
    assert (cheap.radius > 0).all()
    assert (strong.radius >= cheap.radius).all()
    assert set(strong.method) == {method}


def test_gloro_stands_in_for_a_linearisation_that_knows_less() -> None:
    """The radius is the larger of the two; rigor stays that of the method."""
    model, images = near_kinks(), torch.rand(6, 3, 2, 2)
    both = Certifier(model, 0.01, "anchored")
    reported, cheap = both.run(images), Certifier(model, 0.01, "gloro").run(images)
    predicted, gaps = margins(both.model(images.double()))
    ledger = Budget(both.delta).ledger(len(images), seed_of(both.model)).part("anchored")
    alone = both.methods["anchored"].radius(images.double(), predicted, gaps, ledger)
    assert (alone < cheap.radius).any()
    torch.testing.assert_close(reported.radius, torch.maximum(alone, cheap.radius), rtol=1e-6, atol=0)
    assert reported.rigor == tuple(Rigor(spent, 1e-9) for spent in ledger.spent.tolist())


def test_gloro_says_nothing_of_perturbations_inside_the_network() -> None:
    inside = Certifier(near_kinks(), 0.01, "anchored", at="2")
    images = torch.rand(2, *inside.model.input_size, generator=torch.Generator().manual_seed(0))
    alone = inside.methods["anchored"].engine(images.double())
    predicted, gaps = margins(inside.model(images.double()))
    torch.testing.assert_close(inside.run(images).radius, alone.radius(predicted, gaps), rtol=1e-6, atol=0)


def test_images_in_another_layout_of_memory_are_the_same_images() -> None:
    """What flattens a view of them copies it; that is no other network."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model, images = Model(net, mean=MEAN, std=STD, input_size=(3, 2, 2)), torch.rand(2, 2, 2, 3).permute(0, 3, 1, 2)
    radii_ = [Certifier(model, 0.01, "gloro").run(given).radius for given in (images, images.contiguous())]
    torch.testing.assert_close(*radii_, rtol=0, atol=0)
