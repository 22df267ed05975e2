"""Verdicts at one ε: those of full radii, for each image alone."""

import functools
import math

import pytest
import torch
from modules import orthogonal_vit
from torch import nn

import lipcert
from benchmarks._cifar import first_order_limit
from lipcert.bounds import margins
from lipcert.certifier import Anchored, Certificates, Certifier
from lipcert.certifier.anchored import method as method_module
from lipcert.certifier.anchored.margin import RivalMargin
from lipcert.certifier.anchored.ray import SECTORS

vit = functools.partial(orthogonal_vit, mlp_ratio=2.0, class_token=False, global_pool="avg")


def convolutions():
    torch.manual_seed(1)
    layers = (nn.Conv2d(3, 4, 3, 2, 1), nn.GELU(), nn.Conv2d(4, 4, 3, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(64, 4))
    return lipcert.load(nn.Sequential(*layers).eval(), mean=(0.5,) * 3, std=(0.3,) * 3, input_size=(3, 16, 16)).double()


def pixels(count, seed=0):
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attacked(model, images, predicted, radius):
    """The smallest margin that gradient descent finds within the radius, shape (N,)."""
    size = lambda delta: delta.flatten(1).norm(dim=1)[:, None, None, None]  # noqa: E731
    delta, least = pixels(len(images), seed=5) - 0.5, torch.full_like(radius, math.inf)
    for _ in range(20):
        delta = (delta / size(delta) * radius[:, None, None, None]).detach().requires_grad_()
        logits = model(images + delta)
        rest = logits.scatter(1, predicted[:, None], -math.inf).amax(1)
        margin = logits.gather(1, predicted[:, None])[:, 0] - rest
        least = torch.minimum(least, margin.detach())
        (gradient,) = torch.autograd.grad(margin.sum(), delta)
        delta = -gradient
    return least


def test_norms_that_are_the_same_for_all_images_are_tight():
    """They are computed once, so a convolution before the first activation counts with its norm, and not 5 % more."""
    exact, found = (Anchored(convolutions(), rigor=rigor)(pixels(1)) for rigor in ("deterministic", "probabilistic"))
    norms = [next(iter(anchor.norms.pairs.values())).norm.item() for anchor in (exact, found)]
    assert norms[0] * (1 - 1e-9) <= norms[1] <= norms[0] * 1.002


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setattr(method_module, "FULL", 0.0)


def test_a_verdict_is_that_of_the_full_radius(eager):
    """Radii are no larger."""
    model, images = vit(), pixels(3, seed=7)
    predicted, gaps = margins(model(images))
    full = Anchored(model)(images).radius(predicted, gaps)
    low, high = 0.2 * full.min().item(), first_order_limit(model, images, predicted).max().item() * 1.01
    for eps in (low, full.sort().values[1].item() * 0.999, high):
        radius = Anchored(model, eps=eps)(images).radius(predicted, gaps)
        assert bool(((radius > eps) == (full > eps)).all())
        assert bool((radius <= full * 1.03).all())
        assert bool((attacked(model, images, predicted, 0.999 * radius) > 0).all())


def test_fine_norms_follow_where_coarse_ones_certify_nothing(eager, monkeypatch):
    """Both are charged; where coarse ones certify an image, or are far from it, there are no fine ones."""
    monkeypatch.setitem(method_module._COARSE, "tolerance", 2.0)
    model, images = vit(), pixels(3, seed=7)
    predicted, gaps = margins(model(images))
    full, coarse = (
        Anchored(model, **options)(images).radius(predicted, gaps) for options in ({}, method_module._COARSE)
    )
    easy = Anchored(model, eps=0.5 * coarse.min().item())(images)
    assert bool((easy.radius(predicted, gaps) > 0.5 * coarse.min()).all())
    far = Anchored(model, eps=4 * full.max().item())(images)
    assert not bool((far.radius(predicted, gaps) > full).any())
    assert torch.equal(far.norms.ledger.spent, easy.norms.ledger.spent)
    for i in range(3):
        between, some = (coarse[i] * full[i]).sqrt().item(), slice(i, i + 1)
        assert coarse[i] * 1.01 < between < full[i] * 0.99
        for spent, eps in ((1.4, between), (1.9, 1.002 * full[i].item())):  # by smaller sectors, too
            one = Anchored(model, eps=eps)(images[some])
            radius = one.radius(predicted[some], gaps[some])
            assert radius > eps
            assert spent * easy.norms.ledger.spent[i] < one.norms.ledger.spent.item() <= 1e-9
            assert bool((attacked(model, images[some], predicted[some], 0.999 * radius) > 0).all())


def test_forms_are_left_out_where_they_do_not_reach(eager, monkeypatch):
    model, images = vit(), pixels(3, seed=7)[1:2]
    with torch.no_grad():
        for weight in (parameter for parameter in model.parameters() if parameter.dim() > 1):
            weight *= 4  # the limit falls less than the radius
    predicted, gaps = margins(model(images))
    radius = Anchored(model)(images).radius(predicted, gaps)
    weighings, weighed = [], RivalMargin.radius_with_forms

    def counted(*args):
        weighings.append(args)
        return weighed(*args)

    monkeypatch.setattr(RivalMargin, "radius_with_forms", counted)
    for share, formed in ((1.2, True), (2.5, False)):
        eps = share * radius.item()
        assert eps < first_order_limit(model, images, predicted).item()
        weighings.clear()
        verdict = Anchored(model, eps=eps)(images).radius(predicted, gaps)
        assert 0.5 * radius < verdict <= 1.03 * radius
        assert bool(weighings) == formed


def test_a_verdict_is_that_of_the_image_alone(eager):
    model, images = vit(), pixels(2, seed=7)
    predicted, gaps = margins(model(images))
    eps = Anchored(model)(images).radius(predicted, gaps).max().item() * 0.99  # one is certified, and one is not
    together = Anchored(model, eps=eps)(images).radius(predicted, gaps)
    method = Anchored(model, eps=eps)
    for i in (1, 0):
        alone = method(images[i : i + 1]).radius(predicted[i : i + 1], gaps[i : i + 1])
        torch.testing.assert_close(alone, together[i : i + 1], rtol=1e-9, atol=0)


def test_rivals_are_examined_in_the_same_groups_in_every_batch(monkeypatch):
    """The rivals of an image are examined as if it were alone, as many pairs at once as memory allows."""
    model, images = vit(), pixels(3, seed=7)
    predicted, gaps = margins(model(images))
    method = Anchored(model)
    at = method(images).linearization
    entries = SECTORS * at.entries + sum(value[0].numel() for value in at.values.values())
    monkeypatch.setattr(method_module, "_ENTRIES", 2 * entries)
    cheap = method_module._cheap
    monkeypatch.setattr(method_module, "_cheap", lambda *args: 1e-3 * cheap(*args))  # all rivals might be the least
    groups = []

    class Recorded(RivalMargin):
        def __init__(self, at, rivals, predicted, margins):
            super().__init__(at, rivals, predicted, margins)
            groups.append([(at.images[i].sum().item(), rivals[i].item()) for i in range(len(rivals))])

        def radius_with_forms(self, least, round):
            groups.pop()  # contracted forms, for one rival of each image
            return least

    def examined(part):
        groups.clear()
        radius = method(images[part]).radius(predicted[part], gaps[part])
        assert max(map(len, groups)) == 2
        own = [[[j for x, j in group if x == image.sum()] for group in groups] for image in images[part]]
        return radius, [[group for group in parts if group] for parts in own]

    monkeypatch.setattr(method_module, "RivalMargin", Recorded)
    radius, together = examined(slice(None))
    for i in range(3):
        alone, (own,) = examined(slice(i, i + 1))
        assert [len(group) for group in own] == [1, 2]
        assert together[i] == own
        torch.testing.assert_close(alone, radius[i : i + 1], rtol=1e-9, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("real", marks=pytest.mark.slow), "float32"])
def test_a_run_in_parts_gives_what_one_run_gives(eager, dtype):
    """What is left of a stopped run, and each shard, go to a process of their own: with a certifier of their own."""
    model, images = vit(), pixels(3, seed=7)
    predicted, gaps = margins(model(images))
    eps = Anchored(model)(images).radius(predicted, gaps).median().item() * 0.99  # some are certified, and some not
    whole = Certifier(model, eps, dtype=dtype).run(images)
    parts = Certificates.join(
        [Certifier(model, eps, dtype=dtype).run(images[part]) for part in (slice(2), slice(2, 3))]
    )
    assert dtype != "real" or 0 < int(whole.certified.sum()) < 3
    assert torch.equal(parts.certified, whole.certified)
    assert (parts.method, parts.rigor) == (whole.method, whole.rigor)
    torch.testing.assert_close(parts.radius, whole.radius, rtol=1e-9, atol=0)


def test_a_verdict_of_a_network_with_few_norms_is_the_full_radius():
    model, images = vit(), pixels(1)
    predicted, gaps = margins(model(images))
    full, verdict = (Anchored(model, eps=eps)(images) for eps in (None, 1e-9))
    assert torch.equal(full.radius(predicted, gaps), verdict.radius(predicted, gaps))
