"""The ledger of δ: vectors that are met once, and certificates that fail no more often than they say."""

import itertools
import math
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import orthogonal_vit
from torch import nn

import lipcert
from lipcert.bounds import _masked, margins
from lipcert.certifier import Anchored, Certifier
from lipcert.certifier.anchored import jacobians, plan
from lipcert.errors import LedgerError
from lipcert.norms import Budget, Ledger, Rigor, lanczos_norm
from lipcert.settings import RIGORS


def delta_of(text: str) -> float:
    rigor = Rigor.parse(text)
    assert rigor is not None
    return rigor.delta


def convolutions():
    """Its second convolution is too large to be written out."""
    torch.manual_seed(1)
    layers = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten())
    net = nn.Sequential(*layers, nn.Linear(512, 3))
    return lipcert.load(net.eval(), mean=(0.2,), std=(0.5,), input_size=(1, 8, 8)).double()


def kinked():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 70), nn.GELU(), nn.Linear(70, 3))
    return lipcert.load(net.eval(), mean=(0.5,), std=(0.5,), input_size=(1, 8, 10)).double()


def pixels(model, count=1):
    return torch.rand(count, *model.input_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.fixture(name="met")
def _met(monkeypatch):
    """The start vectors of all norms, and what was charged for them."""
    vectors, charges = [], []

    def watched(norm):
        def found(product, *arguments, draw, **given):
            first = [True]

            def seen(v):
                if first:
                    first.clear()
                    vectors.append(tuple(v.flatten(0, -2)[0].tolist()))
                return product(v)

            charges.append(draw.delta)
            return norm(seen, *arguments, draw=draw, **given)

        return found

    for module, names in ((jacobians, ("lanczos_norm", "row_norms")), (_masked, ("lanczos_norm",))):
        for name in names:
            monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return vectors, charges


CASES = {
    "anchored": (orthogonal_vit, "anchored", "real"),
    "lofast": (orthogonal_vit, "lofast", "real"),
    "kinks": (lambda: orthogonal_vit("project"), "anchored", "real"),
    "anchored, float32": (orthogonal_vit, "anchored", "float32"),
    "lofast, float32": (orthogonal_vit, "lofast", "float32"),
    "local": (convolutions, "local", "real"),
    "local, float32": (convolutions, "local", "float32"),
    "staged": (convolutions, "staged", "real"),
    "staged, float32": (convolutions, "staged", "float32"),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", CASES)
def test_no_two_norms_of_a_certificate_share_a_vector(case, met, no_triage):
    """And the row states what all of them were charged, within δ."""
    build, method, dtype = CASES[case]
    model = build()
    certifier = Certifier(model, 10.0, method, dtype=dtype)  # no stage suffices
    found = certifier.run(pixels(model))
    vectors, charges = met
    assert len(charges) > 1
    assert max(Counter(vectors).values()) == 1
    assert sum(charges) <= delta_of(found.rigor[0]) <= min(1.011 * sum(charges), 1e-9)


@pytest.mark.parametrize(
    ("build", "method"), [(orthogonal_vit, "anchored"), (kinked, "anchored"), (convolutions, "local")]
)
def test_every_image_states_its_own(build, method):
    """Whatever images are beside it, and whatever was asked for before."""
    model = build()
    images = pixels(model, 2)
    together = Certifier(model, 0.1, method).run(images)
    certifier = Certifier(model, 0.1, method)
    alone = [certifier.run(image[None]) for image in images.flip(0)][::-1]
    assert together.rigor == tuple(one.rigor[0] for one in alone)
    # A search ends within 0.01 %, and products of another batch round in another way.
    torch.testing.assert_close(together.radius, torch.cat([one.radius for one in alone]), rtol=1e-4, atol=0)
    assert all(0 < delta_of(word) <= 1e-9 for word in together.rigor)


def test_what_is_written_out_costs_nothing(met):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 3))
    model = lipcert.load(net.eval(), mean=(0.5,), std=(0.5,), input_size=(1, 8, 10)).double()
    strict, usual = (Certifier(model, 10.0, "anchored", rigor=r).run(pixels(model)).rigor for r in RIGORS[::-1])
    assert strict == ("deterministic",)
    assert delta_of(usual[0]) > 0
    small = nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    model = lipcert.load(small, mean=(0.5,), std=(0.5,), input_size=(1, 3, 3)).double()
    met[1].clear()
    assert Certifier(model, 10.0, "anchored").run(pixels(model)).rigor == ("deterministic",)
    assert not met[1]


def test_all_stages_that_were_run_are_stated(no_triage):
    """An image that local leaves open has met the vectors of both; one that global decides, none."""
    model, image = convolutions(), pixels(convolutions())
    local, staged = (Certifier(model, 10.0, method, delta=0.01).run(image) for method in ("local", "staged"))
    assert 0 < delta_of(local.rigor[0]) / 2 * 0.99 < delta_of(staged.rigor[0]) <= 0.01
    assert Certifier(model, 1e-9).run(image).rigor == ("deterministic",)


def test_a_key_is_given_once_for_an_image():
    ledger = Ledger(0.5, images=3)
    first = ledger.only(torch.tensor([0, 2])).draw("norm", 1, 2, delta=0.1)
    assert torch.equal(first.normal(2, 3), first.normal(2, 3))
    again = ledger.only(torch.tensor([1])).draw("norm", 1, 2, delta=0.1)
    assert again == first  # another image: the same vectors
    with pytest.raises(LedgerError, match=r"'norm', 1, 2.* twice"):
        ledger.draw("norm", 1, 2, delta=0.1)
    with pytest.raises(LedgerError, match="twice"):
        ledger.only(torch.tensor([1, 1])).draw("other", delta=0.0)
    assert ledger.part("norm").draw(1, 3, delta=0.1) != first
    with pytest.raises(LedgerError, match="above"):
        ledger.draw("too much", delta=0.31)
    assert ledger.spent.tolist() == pytest.approx([0.2, 0.2, 0.2])
    with pytest.raises(LedgerError, match="above"):
        Ledger(0.0).draw("random", delta=1e-300)


def test_a_second_radius_needs_a_second_linearisation():
    model = orthogonal_vit()
    image = pixels(model)
    predicted, gaps = margins(model(image).detach())
    method = Anchored(model)
    anchor = method(image)
    radius = anchor.radius(predicted, gaps)
    with pytest.raises(LedgerError, match="twice"):
        anchor.radius(predicted, gaps)
    assert torch.equal(method(image).radius(predicted, gaps), radius)


def test_vectors_differ_in_every_bit_of_the_key():
    """torch's own generator gives one stream for seeds that are 2³² apart."""
    same = [torch.randn(4, generator=torch.Generator().manual_seed(seed)) for seed in (7, 7 + 2**32)]
    assert torch.equal(*same)
    keys = [(7,), (7 + 2**32,), (7, 0), ("7",), ("7", 0), ("7,0",), (0, 7), (-7,)]
    vectors = {tuple(Ledger(1.0, seed=seed).draw(*key, delta=0.1).normal(1, 4)[0].tolist()) for key in keys
               for seed in (0, 2**32, 2**64)}  # fmt: skip
    assert len(vectors) == 3 * len(keys)


@given(
    st.floats(1e-290, 0.5),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_whatever_is_requested_is_within_the_budget(delta, methods, chance):
    """Any methods, variants, pairs and rounds, and any part of their norms: charged at most δ, and as the row says."""
    ledger, charges = Budget(delta).ledger(2), [[], []]
    for name, (variants, pairs, rounds) in enumerate(methods):
        of_norm = Budget(delta).split(len(methods)).split(variants).split(pairs * (1 + rounds))
        norms = [(v, pair, number) for v in range(variants) for pair in range(pairs) for number in range(1 + rounds)]
        everything = chance.random() < 0.5
        for key in norms:
            images = [image for image in (0, 1) if everything or chance.random() < 0.7]
            ledger.only(torch.tensor(images, dtype=torch.long)).part(name).draw("norm", *key, delta=of_norm.delta)
            for image in images:
                charges[image].append(of_norm.delta)
    for spent, charged in zip(ledger.spent.tolist(), charges, strict=True):
        assert spent == pytest.approx(math.fsum(charged), rel=1e-12, abs=0)
        assert spent <= delta
        assert spent <= Rigor(spent, delta).delta <= min(1.011 * spent, delta)


@settings(max_examples=5)
@given(
    st.sampled_from(("local", "lofast", "anchored", "staged")),
    st.sampled_from((kinked, convolutions)),
    st.sampled_from((1e-12, 1e-9, 1e-3)),
    st.sampled_from((1e-3, 10.0)),
)
def test_rows_state_the_charges_of_any_run(method, build, delta, eps):
    charges = [[], []]
    draw = Ledger.draw

    def watched(ledger, *key, delta):
        for image in ledger._rows.tolist():
            charges[image].append(delta)
        return draw(ledger, *key, delta=delta)

    model = build()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Ledger, "draw", watched)
        certifier = Certifier(model, eps, method, delta=delta)
        found = certifier.run(pixels(model, 2))
    for word, charged in zip(found.rigor, charges, strict=True):
        stated = delta_of(word)
        assert math.fsum(charged) <= delta
        # A deterministic radius may be the largest although vectors were drawn for another.
        assert stated == 0 or math.fsum(charged) <= stated <= min(1.011 * math.fsum(charged), delta)


@given(st.floats(1e-300, 0.5), st.integers(1, 10**6), st.floats(1e-6, 1.0))
def test_what_is_stated_is_what_was_spent_rounded_up(delta, count, share):
    spent = share * delta
    word = Rigor(spent, delta)
    assert spent <= delta_of(word) <= min(1.011 * spent, delta) or delta < 1e-290
    assert word.delta == delta_of(word) == Rigor.parse(str(word)).delta
    assert Budget(delta).split(count).delta * count <= delta
    assert Rigor(0.0, delta) == "deterministic"
    copied = pickle.loads(pickle.dumps(word))  # certificates pass between processes
    assert (copied, copied.delta) == (word, word.delta)


def test_parts_can_all_be_spent():
    budget = Budget(1e-9)
    ledger = budget.ledger(1)
    for number in range(1000):
        ledger.draw(number, delta=budget.split(1000).delta)
    assert Rigor(ledger.spent.item(), 1e-9) == "probabilistic(1e-09)"


def hidden(size, place):
    """A diagonal operator whose norm, 1.5, is seen along one entry alone."""
    values = torch.ones(size, dtype=torch.float64)
    values[place] = 1.5
    return values


def bound(values, draw):
    return lanczos_norm(lambda v: v * values, lambda u: u * values, 1, len(values), draw=draw, steps=1).item()


def test_certificates_fail_no_more_often_than_the_ledger_says():
    """Also where the second operator hides from the first one's vector, as weights that follow from it might."""
    size, trials = 30, 600
    failed = shared = 0
    for seed in range(trials):
        ledger = Ledger(0.2, seed=seed)
        draw = ledger.draw("norm", delta=0.1)
        first = bound(hidden(size, 0), draw)
        weakest = int(draw.normal(1, size).abs().argmin())
        second = bound(hidden(size, weakest), ledger.draw("weighed", delta=0.1))
        failed += first < 1.5 or second < 1.5
        assert ledger.spent.item() == pytest.approx(0.2)
        shared += bound(hidden(size, weakest), draw) < 1.5
    chance = 4 * (0.2 * 0.8 * trials) ** 0.5
    assert 0 < failed <= 0.2 * trials + chance
    assert shared > 0.5 * trials  # with one vector for both


def test_norms_of_a_network_fail_no_more_often_than_the_ledger_says(monkeypatch):
    """All Jacobian norms of an image together, with a δ of one in five and few steps of Lanczos."""
    for module, name in itertools.product((jacobians, plan), ("FEW", "PROBES")):
        monkeypatch.setattr(module, name, 0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    model = lipcert.load(net.eval(), mean=(0.5,), std=(0.5,), input_size=(1, 3, 3)).double()
    image, trials, failed, exact = pixels(model), 40, 0, []
    for seed in range(trials):
        anchor = Anchored(model, delta=0.2, seed=seed, tolerance=1e6)(image)
        found = {pair: norms.norm for pair, norms in anchor.norms.pairs.items()}
        exact = exact or [norm_of(anchor, a, b) for a, b in found]
        failed += any(mine.item() < theirs for mine, theirs in zip(found.values(), exact, strict=True))
        assert 0 < anchor.norms.ledger.spent.item() <= 0.2
    assert failed <= 0.2 * trials


def norm_of(anchor, a, b):
    """The norm of G(a → b), less what its computation may be off by."""
    forward, values = anchor.method.network.graph.forward, anchor.linearization.values
    jacobian = torch.autograd.functional.jacobian(lambda x: forward(a, x, [b], values)[0], values[a], vectorize=True)
    return torch.linalg.matrix_norm(jacobian.reshape(math.prod(b.shape), -1), 2).item() * (1 - 1e-12)
