"""Attacks: the ball and the box hold, what is found is real, and a false certificate does not go unnoticed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lipcert
from lipcert.attacks import ATTACKS, PGD, Adversarial, AutoAttack, attack_named, pgd, project, smallest
from lipcert.attacks._found import check, lead
from lipcert.certifier import Certifier
from lipcert.errors import BrokenCertificate, InputError
from lipcert.settings import CertifySettings


def linear_model(weight, bias=None, size=(1, 2, 2)) -> lipcert.Model:
    """Logits W x + b of the pixels."""
    weight = torch.as_tensor(weight, dtype=torch.float64)
    layer = nn.Linear(weight.shape[1], weight.shape[0]).double()
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(torch.zeros(len(weight)) if bias is None else torch.as_tensor(bias))
    net = nn.Sequential(nn.Flatten(), layer)
    return lipcert.load(net, mean=(0,), std=(1,), input_size=size).double()


def curved_model() -> lipcert.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4))
    return lipcert.load(net, mean=(0.5,) * 3, std=(0.25,) * 3, input_size=(3, 2, 2)).double()


def some_images(count, size=(3, 2, 2), seed=0):
    return torch.rand(count, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), eps=st.sampled_from([1e-9, 0.03, 0.4, 1.0, 5.0]), scale=st.sampled_from([1e-3, 1, 30])
)
def test_the_projection_is_the_nearest_point(seed, eps, scale):
    """Optimality on a convex set: ⟨δ − d, e − d⟩ ≤ 0 for every other point e of it."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(3, 1, 2, 3, generator=generator, dtype=torch.float64)
    images[0] = images[0].round()
    delta = scale * torch.randn(3, 1, 2, 3, generator=generator, dtype=torch.float64)
    delta[1, 0, 0] = 0.0
    sizes = torch.full((3,), eps, dtype=torch.float64)
    found = project(delta, images, sizes)
    assert (found.flatten(1).norm(dim=1) <= eps * (1 + 1e-14)).all()
    assert (images + found >= -1e-15).all()
    assert (images + found <= 1 + 1e-15).all()
    assert torch.allclose(project(found, images, sizes), found, rtol=1e-12, atol=1e-15)
    for _ in range(20):
        other = torch.rand(delta.shape, generator=generator, dtype=torch.float64) - images
        norm = other.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        other = other * (eps / norm).clamp_max(1)
        slack = 1e-9 * scale * eps
        assert (((delta - found) * (other - found)).flatten(1).sum(1) <= slack).all()


def test_the_attack_finds_the_distance_of_a_plane():
    """f_0 − f_1 = ⟨w, x⟩ + b: the nearest image of the other class is (⟨w, x⟩ + b)/‖w‖ away, inside the box."""
    model = linear_model([[1.0, 2.0, -1.0, 0.5], [0.0, 0.0, 0.0, 0.0]], [0.3, 0.0])
    image = torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64)
    exact = (0.5 * 2.5 + 0.3) / math.sqrt(6.25)
    assert not pgd(model, image, eps=0.999 * exact).broken.any()
    found = pgd(model, image, eps=1.001 * exact)
    assert found.broken.all()
    nearest = smallest(PGD(), model, image, torch.tensor([0]), found, 1.001 * exact)
    assert exact < nearest.distance.item() <= 1.001 * exact * (1 + 1e-9)


def test_the_distance_is_found_from_far_and_from_near():
    model = linear_model([[1.0, 2.0, -1.0, 0.5], [0.0, 0.0, 0.0, 0.0]], [0.3, 0.0])
    image = torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64)
    exact = (0.5 * 2.5 + 0.3) / math.sqrt(6.25)
    for eps in (exact / 5, exact * 1.6):
        found = pgd(model, image, eps=eps)
        nearest = smallest(PGD(), model, image, torch.tensor([0]), found, eps)
        assert exact < nearest.distance.item() < 1.25 * exact
        assert (model(nearest.images).argmax(1) == 1).all()


def test_the_box_is_part_of_the_attack():
    """Only a pixel that is black already would have to fall: nothing can be done, whatever ε."""
    model = linear_model([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], [0.1, 0.0])
    image = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    found = pgd(model, image, eps=10.0)
    assert not found.broken.any()
    assert torch.equal(found.images, image)
    assert math.isinf(found.distance.item())


def test_what_is_found_is_real():
    model, images = curved_model(), some_images(40)
    labels = model(images).argmax(1)
    found = pgd(model, images, eps=0.3)
    assert 3 < found.broken.sum() < 40
    assert ((found.images >= 0) & (found.images <= 1)).all()
    apart = (found.images - images).flatten(1).norm(dim=1)
    assert (apart <= 0.3 * (1 + 1e-12)).all()
    assert torch.equal(model(found.images).argmax(1) != labels, found.broken)
    assert torch.allclose(apart[found.broken], found.distance[found.broken])
    assert (apart[found.broken] <= found.distance[found.broken]).all()
    assert torch.equal(found.images[~found.broken], images[~found.broken])


def test_restarts_find_more_and_never_less():
    """The gradient at the images is 0, so the first run goes nowhere; a random start finds a slope."""

    class Plateau(nn.Module):
        def forward(self, x):
            other = 5 * (x.flatten(1)[:, 0] - 0.6).relu()
            return torch.stack([torch.full_like(other, 0.1), other], 1)

    images = some_images(60, (1, 2, 2))
    images[:, 0, 0, 0] = 0.5
    found = [pgd(Plateau(), images, eps=0.4, restarts=restarts).broken for restarts in (1, 8)]
    assert not found[0].any()
    assert found[1].all()


def test_the_attack_is_the_same_in_every_call_and_batch():
    model, images = curved_model(), some_images(9)
    torch.manual_seed(1)
    first = pgd(model, images, eps=0.3, seed=3)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(pgd(model, images, eps=0.3, seed=3).images, first.images)
    assert torch.equal(torch.get_rng_state(), state)
    alone = pgd(model, images[4:5], eps=0.3, seed=3)
    assert torch.allclose(alone.distance, first.distance[4:5])


def test_logits_that_do_not_depend_on_the_pixels_are_not_broken():
    class Constant(nn.Module):
        def __init__(self, trained):
            super().__init__()
            self.logits = nn.Parameter(torch.arange(3.0).double(), requires_grad=trained)

        def forward(self, x):
            return self.logits + 0 * x.detach().flatten(1)[:, :3]

    for trained in (True, False):
        assert not pgd(Constant(trained), some_images(2), eps=1.0).broken.any()


def test_a_tie_is_no_success():
    model = linear_model([[0.0] * 4, [0.0] * 4])
    found = pgd(model, torch.full((2, 1, 2, 2), 0.5).double(), torch.tensor([0, 1]), eps=1.0)
    assert not found.broken.any()
    assert (lead(torch.tensor([[1.0, 1.0]]), torch.tensor([0])) == 0).all()


def test_proposals_are_checked():
    model, images = curved_model(), some_images(8)
    labels = model(images).argmax(1)
    real = pgd(model, images, eps=0.6)
    eps = torch.full((8,), 0.6, dtype=torch.float64)
    assert torch.equal(check(model, images, labels, real.images, eps).broken, real.broken)
    assert not check(model, images, labels, real.images, eps * 1e-3).broken.any()
    assert not check(model, images, labels, real.images + 2, eps * 100).broken.any()


@pytest.mark.parametrize(("ways", "word"), [({"eps": 0}, "eps"), ({"steps": 0}, "step"), ({"restarts": 0}, "restart")])
def test_settings_that_cannot_be_used(ways, word):
    with pytest.raises(InputError, match=word):
        pgd(curved_model(), some_images(1), **{"eps": 0.1, **ways})


def test_attacks_by_name():
    assert attack_named("pgd") == PGD()
    described = CertifySettings(0.1, attack=PGD(steps=7)).described()
    assert described["attack"] == {
        "name": "pgd-l2",
        "version": "1",
        "settings": {"steps": 7, "restarts": 3, "seed": 0},
    }
    with pytest.raises(InputError, match="pgd, pgd-100, autoattack"):
        attack_named("banana")
    assert set(ATTACKS) == {"pgd", "pgd-100", "autoattack"}


def test_certify_with_an_attack_bounds_radii_from_both_sides():
    model, images = curved_model(), some_images(12)
    plain = lipcert.certify(model, images, eps=0.1)
    result = lipcert.certify(model, images, eps=0.1, attack="pgd")
    assert plain.attacked is None
    assert plain.attack_distance is None
    assert 0 < result.attacked.sum() < 12
    assert torch.equal(result.attacked, result.attack_distance <= 0.1)
    assert (result.radius <= result.attack_distance).all()
    assert not (result.attacked & result.certified).any()
    whole = ~result.attacked
    torch.testing.assert_close(result.radius[whole], plain.radius[whole], rtol=1e-12, atol=0)  # in smaller batches
    assert (result.radius <= plain.radius * (1 + 1e-12)).all()
    assert (result.radius > 0).all()


def test_staged_certification_leaves_broken_images_to_the_cheap_methods(monkeypatch):
    model, images = curved_model(), some_images(12)
    certifier = Certifier(model, 0.1, attack="pgd")
    seen = []
    strong = certifier.methods["anchored"]
    monkeypatch.setattr(strong, "radii", lambda x, *rest: seen.append(len(x)) or type(strong).radii(strong, x, *rest))
    result = certifier.run(images)
    cheap = Certifier(model, 0.1, "gloro").run(images)
    open_ = ~result.attacked & (cheap.radius <= 0.1) & (result.limit > 0.1)
    assert open_.any()
    assert seen == [int(open_.sum())]
    assert all(name == "gloro" for name, attacked in zip(result.method, result.attacked, strict=True) if attacked)


class Lying(Certifier):
    """Certifies a hundred times the radius."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        (method,) = self.methods.values()
        honest = method.radius
        method.radius = lambda *given: 100 * honest(*given)


@pytest.mark.parametrize("eps", [1e-3, 0.5])
def test_a_false_certificate_stops_the_run(eps):
    """Also where the attack at ε itself does not reach it."""
    model, images = curved_model(), some_images(6)
    Certifier(model, eps, "gloro", attack="pgd").run(images)
    with pytest.raises(BrokenCertificate, match="defect of lipcert") as caught:
        Lying(model, eps, "gloro", attack="pgd").run(images)
    assert caught.value.distance < caught.value.radius
    assert caught.value.method == "gloro"
    assert 0 <= caught.value.position < 6


class Proposing:
    """An attack that proposes far too much."""

    name, version, settings = "proposing", "1", {}

    def __call__(self, model, images, labels, eps):
        return Adversarial.none(images)


def test_an_attack_of_the_users_own():
    model, images = curved_model(), some_images(4)
    result = lipcert.certify(model, images, eps=0.1, attack=Proposing())
    assert (result.radius <= result.attack_distance).all()


def test_autoattack_names_what_is_missing(monkeypatch):
    def missing(name):
        raise __import__("importlib.metadata").metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(InputError, match=r"lipcert\[attack\]"):
        AutoAttack()


def test_autoattack():
    pytest.importorskip("art")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 4))
    model = lipcert.load(net, mean=(0.5,), std=(0.25,), input_size=(1, 8, 8)).double()
    images = some_images(6, (1, 8, 8))
    labels = model(images).argmax(1)
    attack = AutoAttack(steps=10, queries=10)
    found = attack(model, images, labels, 0.4)
    assert found.broken.any()
    assert torch.equal(attack(model, images, labels, 0.4).distance, found.distance)
    assert (found.distance[found.broken] <= 0.4 * (1 + 1e-9)).all()
    assert (model(found.images).argmax(1) != labels)[found.broken].all()
    assert attack.version.startswith("adversarial-robustness-toolbox ")


def test_the_papers_pgd_takes_100_steps_of_a_quarter() -> None:
    """On a linear network each step but the last lies on the sphere, and the first at ε/4."""
    attack = attack_named("pgd-100")
    assert attack.settings == {"steps": 100, "restarts": 1, "seed": 0, "step": 0.25}
    seen = []
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))

    def watched(images: torch.Tensor) -> torch.Tensor:
        seen.append(images.detach().clone())
        return net(images)

    image = torch.full((1, 1, 2, 2), 0.5)
    label = net(image).argmax(1)
    with torch.no_grad():
        net[1].bias[label] += 100.0
    attack(watched, image, label, eps=0.2)
    moved = [float((point - image).norm()) for point in seen]
    assert moved[:4] == pytest.approx([0, 0.05, 0.1, 0.15], abs=1e-6)
    assert moved[5:] == pytest.approx([0.2] * 96, rel=1e-4)
    with pytest.raises(InputError, match="positive multiple of eps"):
        PGD(step=0.0)
