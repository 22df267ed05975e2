"""A short soundness campaign, and radii against the exact nearest change of small networks."""

import math

import pytest
import torch
from torch import nn

import lipcert
from benchmarks import campaign
from benchmarks._exact import affine_distances, nearest_change
from benchmarks._networks import FAMILIES, SLOW, draw
from lipcert.certifier import METHODS, Anchored, Certifier
from lipcert.certifier.anchored.deviations import Linearization

IMAGES = 6


@pytest.mark.thinned(3)
@pytest.mark.parametrize("family", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAMILIES])
def test_no_attack_succeeds_inside_a_radius(family):
    row = campaign.examine(1000 + len(family), IMAGES, family)
    assert row["violations"] == []
    counted = sum(map(len, row["ratios"].values()))
    # Of timm's networks one image is certified, for which global bounds may be 0, and local ones are not.
    assert counted >= (len(set(METHODS) - {"global", "gloro"}) if family in SLOW else 2 * IMAGES)


@pytest.mark.parametrize("seed", range(0, 40, 8))
def test_norms_are_above_what_is_met_in_random_networks(seed):
    """Power iteration never sees a Jacobian stretch more than its norm allows."""
    pixels = (case := draw(seed, 2)).images.double()
    one = Anchored(case.model.double(), tolerance=0.5).finder
    found = Linearization(one, pixels)
    place = one.network.graph.position
    for a, b in sorted(one.plan.pairs, key=lambda pair: (place[pair[0]], place[pair[1]]))[::7]:
        forth, back = one.jacobians.operator(a, b, found.values, several=False)
        moved = torch.randn(2, math.prod(a.shape), dtype=torch.float64)
        for _ in range(8):
            moved = moved / moved.norm(dim=1, keepdim=True).clamp_min(1e-300)
            image = forth(moved)
            assert bool((image.norm(dim=1) <= found.norms.pairs[a, b].norm * (1 + 1e-9)).all()), (a, b)
            moved = back(image)


def test_radii_that_are_too_large_are_seen(monkeypatch):
    """What the campaign can find: true radii made ten times as large, in real arithmetic and deployed."""
    honest = campaign.certify
    monkeypatch.setattr(campaign, "certify", lambda *given: {key: 10 * r for key, r in honest(*given).items()})
    row = campaign.examine(3, 12, "mlp")
    summary = campaign.summarise([row])
    keys = {violation["key"] for violation in summary["violations"]}
    assert {"gloro real", "gloro float32", "local real"} <= keys
    assert summary["by_method"]["gloro real"]["closest"] < 1


def test_a_network_that_every_method_refuses_has_no_trials(monkeypatch):
    monkeypatch.setattr(campaign, "certify", lambda *given: {})
    row = campaign.examine(3, 4, "mlp")
    assert row["ratios"] == {}
    assert row["violations"] == []


def relu(seed: int, sizes: list[int], size=(1, 2, 2), slope: float = 0.0) -> lipcert.Model:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (before, after) in enumerate(zip([math.prod(size), *sizes], sizes, strict=False)):
        layers += [nn.Linear(before, after)]
        if number < len(sizes) - 1:
            layers += [nn.LeakyReLU(slope) if slope else nn.ReLU()]
    model = lipcert.load(nn.Sequential(*layers), mean=(0.4,) * size[0], std=(0.3,) * size[0], input_size=size)
    with torch.no_grad():
        for layer in model.net[1::2]:  # steep, so that predictions change within the box
            layer.weight.mul_(3)
            layer.bias.add_(-0.1)
    return model.double().requires_grad_(False)


NETWORKS = [
    pytest.param(relu(0, [5, 3]), id="one hidden layer"),
    pytest.param(relu(3, [4, 3, 3]), id="two hidden layers"),
    pytest.param(relu(2, [5, 2], slope=0.2), id="leaky"),
    pytest.param(relu(3, [4, 4], size=(2, 1, 2)), id="two channels"),
]


@pytest.mark.parametrize("model", NETWORKS)
def test_all_methods_stay_below_the_exact_distance(model):
    """By enumeration of all activation patterns; the nearest change is also shown to be one."""
    images = torch.rand(5, *model.input_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact, changes = zip(*(nearest_change(model, image) for image in images), strict=True)
    distance = torch.tensor(exact, dtype=torch.float64)
    classes = model(images).argmax(1)
    assert torch.isfinite(distance).any()
    for image, change, own, far in zip(images, changes, classes, exact, strict=True):
        if math.isfinite(far):
            logits = model(change[None])[0]
            others = torch.cat([logits[:own], logits[own + 1 :]])
            assert abs(logits[own] - others.max()) < 1e-7
            assert abs((change - image).norm().item() - far) < 1e-9
            directions = torch.randn(200, *image.shape, dtype=torch.float64)
            near = directions / directions.flatten(1).norm(dim=1).view(-1, 1, 1, 1) * far * (1 - 1e-9)
            inside = image + near
            inside = inside[((inside >= 0) & (inside <= 1)).flatten(1).all(1)]
            assert (model(inside).argmax(1) == own).all()
    found = {method: Certifier(model, 0.05, method).run(images).radius for method in METHODS}
    for method, radius in found.items():
        assert (radius <= distance * (1 + 1e-7) + 1e-10).all(), method
    assert (found["local"] > 0.2 * distance.clamp_max(1)).any()


def test_enumeration_agrees_with_the_closed_form_of_an_affine_network():
    model = relu(5, [3])
    images = 0.4 + 0.2 * torch.rand(20, 1, 2, 2, dtype=torch.float64)
    closed = affine_distances(model, images)
    near = closed < 0.35  # so that the nearest tie is in the box
    assert near.sum() >= 5
    found = torch.tensor([nearest_change(model, image)[0] for image in images[near]], dtype=torch.float64)
    torch.testing.assert_close(found, closed[near], rtol=1e-9, atol=0)
    radius = Certifier(model, 0.1, "gloro").run(images).radius
    torch.testing.assert_close(radius, closed, rtol=1e-9, atol=0)


def test_a_case_is_drawn_again_from_its_seed():
    one, other = draw(17, 8), draw(17, 8)
    assert (one.family, one.spoilt) == (other.family, other.spoilt)
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.model(one.images), other.model(other.images))
    assert one.images.min() >= 0
    assert one.images.max() <= 1
