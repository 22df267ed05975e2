"""Facts about groups of entries that may be empty, hidden by a mask, or one: each is a bound, or refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from truth import Forward, holds_or_refused

import lipcert
from lipcert.bounds import analyze, margins
from lipcert.certifier import METHODS, Certifier
from lipcert.certifier._local import Local
from lipcert.certifier.anchored import Anchored, PrefixedAnchored, anchored
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.inputs.artifact import seed_of, weights_hash
from lipcert.norms import Ledger
from lipcert.smoothing import Smoothing


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).double()


# Groups without entries: what a rule says of a group (a sum of 1, a smallest entry) is false of nothing.

EMPTY = {
    "the sum of a softmax": lambda t: F.softmax(t[:, :, :0], -1).sum(-1, keepdim=True),
    "attention written out": lambda t: F.softmax(t @ t[:, :0].mT, -1) @ (1 + t[:, :0]),
    "fused attention": lambda t: F.scaled_dot_product_attention(t, t[:, :0], 1 + t[:, :0]),
    "fused attention to constants": lambda t: F.scaled_dot_product_attention(
        t, torch.ones(1, 0, 2).double(), torch.ones(1, 0, 2).double()
    ),
    "a product over nothing": lambda t: t[:, :, :0] @ torch.ones(0, 2).double(),
    "a layer without inputs": lambda t: F.linear(t[:, :, :0], torch.ones(2, 0).double(), torch.ones(2).double()),
    "einsum over nothing": lambda t: torch.einsum("bni,bmi->bnm", t[:, :, :0], t[:, :2, :0]),
    "a norm of nothing": lambda t: t[:, :, :0].norm(dim=-1, keepdim=True),
    "a sum of nothing": lambda t: (1 + t)[:, :, :0].sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", EMPTY)
def test_operations_on_nothing_are_refused(name):
    def forward(x):
        root = 100 * (EMPTY[name](1e-6 * x.flatten(2).mT) + 1e-4 * x.flatten(2).mT).sqrt()
        return torch.cat([root[:, 3, :1], 0.448 - root[:, 3, :1]], 1)

    found = holds_or_refused(forward, (2, 2, 2))
    assert all("a value without entries" in line for line in found.values()), found


def test_the_direct_interface_refuses_nothing_too():
    net = Forward(lambda x: EMPTY["the sum of a softmax"](x.flatten(2).mT)[:, :, 0] + x.flatten(1)).double()
    model = lipcert.load(net, mean=(0.0,), std=(1.0,), input_size=(1, 2, 2)).double()
    with pytest.raises(UnsupportedOperation, match="a value without entries"):
        Anchored(model)


def test_what_is_cut_off_without_entries_may_be_put_together_again():
    def forward(x, w):
        tokens = x.flatten(2).mT
        tokens = torch.cat([tokens[:, :0], tokens[:, :0].roll(1, 1), 2 * tokens], 1)
        return F.linear(F.softmax(tokens, -1).flatten(1), w)

    found = holds_or_refused(Forward(forward, w=random(3, 8)), (2, 2, 2), methods=("gloro", "anchored"), starts=1)
    assert all((radius > 0).any() for radius in found.values())


# Queries that a mask hides from every key: torch gives 0 for them, which is no mean of values.

SEEN = torch.ones(4, 4, dtype=torch.bool)
HIDING = {
    "a row, by booleans": SEEN.index_fill(0, torch.tensor([3]), False),
    "a row, by minus infinity": torch.zeros(4, 4).double().index_fill(0, torch.tensor([3]), -math.inf),
    "every row": torch.zeros_like(SEEN),
    "a row, by one column": torch.tensor([[True], [True], [True], [False]]),
    "a row of one head": torch.stack([SEEN, SEEN.index_fill(0, torch.tensor([3]), False)]),
}


def attention(t, mask):
    values = 1 + 1e-6 * t
    if mask.dim() == 3:
        t, values = torch.stack([t, t], 1), torch.stack([values, values], 1)
        return F.scaled_dot_product_attention(t, t, values, attn_mask=mask)[:, -1]
    return F.scaled_dot_product_attention(t, t, values, attn_mask=mask)


@pytest.mark.parametrize("name", HIDING)
def test_queries_that_see_no_key(name, network):
    """Behind the hidden query is √(t + 0.01), with slope 5 at t = 0; a mean of values above 1 would flatten it."""

    def forward(x):
        t = x.flatten(2).mT
        return 100 * (attention(1e-3 * t, HIDING[name]) + 1e-4 * (t + 0.01)).sqrt()[:, 3, :1]

    net = network(forward)
    claimed = float(analyze(net, (2, 2, 2)).output.lip)
    image = torch.zeros(1, 2, 2, 2).double().requires_grad_()
    (slope,) = torch.autograd.grad(net(image).sum(), image)
    assert 4.9 < slope.norm() <= claimed < math.inf


@pytest.mark.parametrize("name", HIDING)
def test_networks_with_hidden_queries_are_certified(name):
    def forward(x, w):
        t = x.flatten(2).mT
        return F.linear((attention(t, HIDING[name]) + t).flatten(1), w)

    found = holds_or_refused(Forward(forward, w=random(3, 8)), (2, 2, 2), methods=("gloro", "anchored"), starts=1)
    assert all(not isinstance(radius, str) and (radius > 0).any() for radius in found.values()), found


def test_a_mask_that_hides_no_query_leaves_a_mean(network):
    """Also a causal one: the first query sees the first key."""
    for given in ({"attn_mask": SEEN.tril()}, {"is_causal": True}, {}):
        net = network(lambda x, given=given: F.scaled_dot_product_attention(x, x, 1 + x, **given))
        assert analyze(net, (1, 4, 4)).output.lowest >= 1 - 1e-9
    net = network(lambda x: F.scaled_dot_product_attention(x, x, 1 + x, attn_mask=HIDING["every row"]))
    assert analyze(net, (1, 4, 4)).output.lowest <= 0


# One logit has a class: its sign.


class OneLogit(nn.Module):
    """⟨w, x⟩ + b, whose sign changes at the distance |⟨w, x⟩ + b|/‖w‖."""

    def __init__(self, last=None):
        super().__init__()
        self.head = nn.Linear(12, 1)
        self.last = last or nn.Identity()
        with torch.no_grad():
            self.head.weight.copy_(random(1, 12))
            self.head.bias.copy_(0.1 - self.head.weight.sum(1) / 2)

    def forward(self, x):
        return self.last(self.head(x.flatten(1)))


def loaded(net, size=(3, 2, 2)):
    return lipcert.load(net, mean=(0.0,) * size[0], std=(1.0,) * size[0], input_size=size)


IMAGES = torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("method", METHODS)
def test_one_logit_is_certified_as_its_sign(method):
    net = OneLogit()
    model = loaded(net).double()
    logit = net(IMAGES)[:, 0].detach()
    distance = logit.abs() / net.head.weight.norm().item()
    certifier = Certifier(model, 0.01, method)
    result = certifier.run(IMAGES)
    assert result.predicted.tolist() == (logit > 0).long().tolist()
    assert {0, 1} == set(result.predicted.tolist())
    torch.testing.assert_close(model(IMAGES), torch.stack([torch.zeros(4).double(), logit], 1))
    assert (result.radius <= distance).all()
    if method in ("gloro", "local", "lofast", "anchored"):
        assert (result.radius >= 0.99 * distance).all()
    assert "two logits [0, z]" in certifier.notes["labels"]


def test_one_logit_in_a_curved_network_holds():
    def forward(x, w, v):
        return F.linear(F.gelu(F.linear(x.flatten(1), w)), v)

    found = holds_or_refused(Forward(forward, w=random(6, 12), v=random(1, 6)), (3, 2, 2))
    assert all(not isinstance(radius, str) and (radius > 0).any() for radius in found.values()), found
    assert all(radius.isfinite().all() for radius in found.values() if not isinstance(radius, str))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_logit_in_a_deployed_type_holds(dtype):
    found = holds_or_refused(OneLogit(), (3, 2, 2), methods=("gloro", "anchored"), dtype=dtype)
    assert all(not isinstance(radius, str) and radius.isfinite().all() for radius in found.values()), found


def test_one_logit_is_smoothed_by_its_sign():
    model = loaded(OneLogit())
    smoothing = Smoothing(model, 0.01, sigma=0.25, samples=1000, all_samples=True)
    result = smoothing.run(IMAGES.float())
    distance = (model(IMAGES.float())[:, 1].abs() / model.net.head.weight.norm()).double()
    known = result.radius > 0
    assert known.any()
    assert (result.predicted == (model(IMAGES.float())[:, 1] > 0).long())[known].all()
    assert (result.radius <= distance + 1e-6)[known].all()
    assert "two logits [0, z]" in smoothing.notes["labels"]


def test_one_logit_stands_in_the_summary(tmp_path):
    result = lipcert.certify(loaded(OneLogit()), IMAGES.float(), torch.tensor([0, 1, 0, 1]), eps=0.01, method="gloro")
    assert "labels 0 and 1" in result.about["model"]["logits"]
    plain = lipcert.certify(loaded(nn.Sequential(nn.Flatten(), nn.Linear(12, 2))), IMAGES.float(), eps=0.01)
    assert "logits" not in plain.about["model"]
    with pytest.raises(InputError, match="labels must be from 0 to 1"):
        lipcert.certify(loaded(OneLogit()), IMAGES.float(), torch.tensor([0, 1, 2, 1]), eps=0.01)


class Labels(nn.Module):
    def __init__(self, last, outputs=3):
        super().__init__()
        self.head, self.last = nn.Linear(12, outputs), last

    def forward(self, x):
        return self.last(self.head(x.flatten(1)))


INDEPENDENT = {
    "sigmoids": (Labels(torch.sigmoid), "labels of which several may hold"),
    "sigmoids, moved": (Labels(lambda z: z.sigmoid()[:, None].flatten(1).clamp(0, 1)), "it ends in sigmoid"),
    "log-sigmoids": (Labels(F.logsigmoid), "labels of which several may hold"),
    "one probability": (OneLogit(nn.Sigmoid()), "the network's one output is a probability"),
    "one mean of probabilities": (OneLogit(lambda z: (z.sigmoid() + (z / 2).sigmoid()) / 2), "computed by sigmoid"),
    "one hard sigmoid": (OneLogit(nn.Hardsigmoid()), "the network's one output is a probability"),
}


@pytest.mark.parametrize("method", ["gloro", "smoothing"])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_labels_that_do_not_exclude_each_other_are_refused(name, method):
    net, line = INDEPENDENT[name]
    noise = {"sigma": 0.25} if method == "smoothing" else {}
    with pytest.raises(InputError, match=line):
        lipcert.certify(loaded(net), IMAGES.float(), eps=0.01, method=method, **noise)


def test_one_output_that_is_never_negative_is_refused():
    with pytest.raises(InputError, match="never below 0"):
        lipcert.certify(loaded(OneLogit(lambda z: 9 * F.relu(z))), IMAGES.float(), eps=0.01, method="gloro")


def test_a_configuration_may_name_independent_labels():
    net = Labels(nn.Identity())
    lipcert.certify(loaded(net), IMAGES.float(), eps=0.01, method="gloro")
    net.config = {"problem_type": "multi_label_classification"}
    with pytest.raises(InputError, match="its config names the problem type"):
        lipcert.certify(loaded(net), IMAGES.float(), eps=0.01, method="gloro")


# The direct interface of the anchored certificate.


@pytest.mark.parametrize("exponent", [2.5, 3.3, 1.5, -0.5])
def test_powers_that_are_not_whole_end_at_zero(exponent):
    """(x − 0.05)ᵖ is no number within 0.05 of a pixel of 0.1."""

    def forward(x, w):
        return F.linear((x.flatten(1) - 0.05) ** exponent, w)

    model = loaded(Forward(forward, w=0.01 * random(2, 12)).double())
    image = torch.full((1, 3, 2, 2), 0.1).double()
    predicted, margin = margins(model(image))
    assert float(anchored(model)(image).radius(predicted, 1e6 * margin)) <= 0.05


def test_whole_powers_need_no_sign():
    model = loaded(Forward(lambda x, w: F.linear((x.flatten(1) - 0.05) ** 3.0, w), w=random(2, 12)).double())
    predicted, margin = margins(model(torch.zeros(1, 3, 2, 2).double()))
    assert float(anchored(model)(torch.zeros(1, 3, 2, 2).double()).radius(predicted, 1e3 * margin)) > 0.05


@pytest.mark.parametrize("delta", [1e-9, 1e-3, 0.3])
def test_the_certificate_behind_a_cut_needs_no_ledger(delta):
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 40), nn.GELU(), nn.Linear(40, 3)
    model = lipcert.load(nn.Sequential(*layers), mean=(0.0,), std=(1.0,), input_size=(1, 6, 6)).double()
    method = anchored(model, delta=delta)
    assert isinstance(method, PrefixedAnchored)
    assert method.whole is not None
    images = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    predicted, margin = margins(model(images))
    found = method(images)
    assert (found.radius(predicted, margin) > 0).all()
    assert (found.ledger.spent <= delta).all()


# Start vectors are drawn from the weights.


def test_another_weight_gives_other_start_vectors():
    one, other, same = loaded(OneLogit()), loaded(OneLogit()), loaded(OneLogit())
    with torch.no_grad():
        other.net.head.weight[0, 0] = torch.nextafter(other.net.head.weight[0, 0], torch.tensor(9.0))
    first, second, third = (Ledger(0.5, seed=seed_of(m)).draw("norm", 1, 2, delta=0.1) for m in (one, other, same))
    assert not torch.equal(first.normal(1, 8), second.normal(1, 8))
    assert torch.equal(first.normal(1, 8), third.normal(1, 8))
    assert weights_hash(one) in seed_of(one)[1]


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e13])
def test_whether_rounding_is_proved_does_not_depend_on_the_scale_of_the_logits(scale):
    net = OneLogit()
    with torch.no_grad():
        net.head.weight.mul_(scale)
        net.head.bias.mul_(scale)
    assert Certifier(loaded(net.double()), 0.01, "gloro").run(IMAGES).rounding == ("proved",) * 4


# Weights in formats for storage.


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_formats_of_eight_bits_are_refused_in_a_line(dtype):
    with pytest.raises(lipcert.errors.LipcertError, match=r"call \.float\(\) on the network first"):
        loaded(OneLogit().to(dtype))
    cast = loaded(OneLogit(Forward(lambda z: z.to(dtype).to(z.dtype))))
    with pytest.raises(lipcert.errors.LipcertError, match="a cast to float8"):
        lipcert.certify(cast, IMAGES.float(), eps=0.01, dtype="float32")
    assert len(lipcert.certify(loaded(OneLogit().to(dtype).float()), IMAGES.float(), eps=0.01, dtype="float32")) == 4


# Local constants are not rounded to float32.


@pytest.mark.parametrize("slope", [0.01, 0.7, 1.9])
def test_the_local_constant_of_a_leaky_relu_is_its_slope(slope):
    """These slopes are smaller in float32, by up to 6e-8 of themselves."""
    model = loaded(Forward(lambda x: F.leaky_relu(x.flatten(1) - 0.5, slope))).double()
    for pixel in (0.1, 0.5):  # every entry on one side, and every entry at its kink
        image = torch.full((1, 3, 2, 2), pixel).double()
        assert Local(model).bound(image, torch.tensor([0.05]).double()) >= (slope if pixel < 0.5 else max(1.0, slope))
