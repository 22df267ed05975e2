"""The anchored certificate after a cut: its parts are bounds, and no attack breaks what they certify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import Function, Residual
from torch import Tensor, nn
from truth import holds_or_refused

import lipcert
from lipcert.bounds import margins
from lipcert.certifier import Certifier
from lipcert.certifier.anchored import Anchored, PrefixedAnchored, anchored, cut_of
from lipcert.certifier.anchored.margin import RivalMargin
from lipcert.certifier.anchored.network import prepared, recorded
from lipcert.certifier.anchored.prefix import constant_up_to, smooth_cut
from lipcert.errors import InputError
from lipcert.graph import evaluate
from lipcert.model import Model
from lipcert.roundoff import REAL, Roundoff
from lipcert.surgery import L2Attention, MaxMin, SmoothMaxMin, SmoothProject
from lipcert.training import cut_loss

SIZE = (1, 4, 4)


def scaled(net: nn.Module, scale: float) -> nn.Module:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    return net.eval()


def model(net: nn.Module, scale: float = 1.0) -> Model:
    return Model(scaled(net, scale), mean=(0.5,), std=(0.5,), input_size=SIZE).double()


class Twice(nn.Module):
    """One module runs twice, once on the image and once on what follows; a path names both values."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.first = nn.Linear(16, 16), nn.ReLU()
        self.last, self.head = nn.GELU(), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(self.shared(x.flatten(1)))
        return self.head(self.last(self.shared(4 * inner)))


class Around(nn.Module):
    """The image passes the last kink by, so that only the logits are a cut behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(self.last(self.first(x).relu()).tanh() + x)


class Averaged(nn.Module):
    """An image and its mirror image as one batch, and the mean of their features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), MaxMin(), nn.Flatten(), nn.Linear(64, 8))
        self.smooth, self.head = SmoothMaxMin(0.5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = self.smooth(self.body(torch.stack((x, x.flip(-1))).flatten(0, 1)))
        return self.head(both.unflatten(0, (2, -1)).mean(0))


class Whole(nn.Module):
    """The function of ``Mixed``, which has a global rule: it is captured whole for one question only."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * self.inside(x).abs()


class Mixed(nn.Module):
    """A module with a rule of its own, whose part also runs alone behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.head = Whole(), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.whole.inside(self.whole(x.flatten(1))).sigmoid())


def flat(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *layers)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "relu, gelu": lambda: flat(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 3)),
    "maxmin": lambda: flat(nn.Linear(16, 12), MaxMin(), nn.Linear(12, 8), SmoothMaxMin(0.3), nn.Linear(8, 3)),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), MaxMin(), nn.Conv2d(4, 4, 2, 2), SmoothMaxMin(0.2), nn.Flatten(),
        nn.Linear(16, 8), SmoothMaxMin(0.05), nn.Linear(8, 3),
    ),
    "pooling": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), SmoothProject(12, 1.0), nn.Linear(12, 3)
    ),
    "kink behind": lambda: flat(nn.Linear(16, 12), MaxMin(), nn.Linear(12, 16), MaxMin(), nn.Linear(16, 3)),
    "leaky kink behind": lambda: flat(
        nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 3)
    ),
    "twice": Twice,
    "around": Around,
    "averaged": Averaged,
    "batch norm": lambda: flat(
        nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 3)
    ),
}  # fmt: skip


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_radii_hold(name: str) -> None:
    torch.manual_seed(sum(map(ord, name)))
    methods = ("anchored", "staged") if name in ("convolutions", "kink behind", "around") else ("anchored",)
    found = holds_or_refused(scaled(NETWORKS[name](), 1.5), SIZE, methods=methods, starts=4)
    for radius in found.values():
        assert isinstance(radius, Tensor)
        assert bool((radius > 0).any())


def test_a_module_that_is_captured_whole_for_one_question_only() -> None:
    """K is that of the value at the cut itself, also where its module is part of another with a rule."""

    @lipcert.bounds.rule(Whole)
    def whole(call: object, module: Whole, x: lipcert.bounds.Value) -> lipcert.bounds.Value:
        norm = torch.linalg.matrix_norm(module.inside.weight.detach(), 2).item() * (1 + 1e-9)
        return lipcert.bounds.Value(x.shape, x.lip * (0.1 * norm))

    try:
        torch.manual_seed(3)
        holds_or_refused(scaled(Mixed(), 3.0), SIZE, methods=("anchored", "staged"), starts=8)
    finally:
        del lipcert.bounds.RULES[Whole]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_constant_is_at_least_every_quotient_and_jacobian(name: str) -> None:
    net = model(NETWORKS[name]())
    graph = prepared(recorded(net), net, forms=False)
    cut = smooth_cut(graph)
    if cut is None:
        assert name == "around"
        return
    constant = constant_up_to(graph, cut, net)

    def value(x: Tensor) -> Tensor:
        return evaluate(graph.nodes, {graph.input: x.reshape(1, *SIZE)})[cut].flatten()

    for scale in (1e-4, 0.1, 1.0):
        x = torch.rand(SIZE, dtype=torch.float64)
        y = (x + scale * torch.randn_like(x)).clamp(0, 1)
        assert (value(x) - value(y)).norm() <= constant * (x - y).norm() * (1 + 1e-12)
        jacobian = torch.autograd.functional.jacobian(value, x, vectorize=True).reshape(-1, x.numel())
        assert torch.linalg.matrix_norm(jacobian, 2) <= constant * (1 + 1e-12)


def test_the_rounding_error_of_a_value() -> None:
    """The bound covers the difference from the same value with sums in another order, and is tiny."""
    net = model(NETWORKS["convolutions"]())
    graph = prepared(recorded(net), net, forms=False)
    cut = smooth_cut(graph)
    assert cut is not None
    images = torch.rand(5, *SIZE, dtype=torch.float64)
    before = type(graph)(graph.input, cut, graph.nodes[: graph.nodes.index(cut) + 1])
    error = Roundoff(net, REAL, before).values(images)
    first, x = net.net[0], (images - 0.5) / 0.5
    windows = torch.nn.functional.unfold(x, 3, padding=1).flip(1)
    weight = first.weight.flatten(1).flip(1)
    other = MaxMin()((weight @ windows + first.bias[:, None]).reshape(5, 4, 4, 4))
    computed = torch.cat([evaluate(graph.nodes, {graph.input: image[None]})[cut] for image in images])
    assert bool(((other - computed).flatten(1).norm(dim=1) <= error).all())
    assert bool((error < 1e-12).all())
    assert bool((error > 0).all())


def test_where_the_cut_lies() -> None:
    smooth = flat(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3))
    assert cut_of(model(smooth)) is None
    assert isinstance(anchored(model(smooth)), Anchored)
    straight = flat(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    assert cut_of(model(straight)) is None
    assert cut_of(model(Around())) is None
    kinked = cut_of(model(NETWORKS["kink behind"]()))
    assert kinked is not None
    assert kinked.path == "net.2"
    found = cut_of(model(NETWORKS["convolutions"]()))
    assert found is not None
    assert found.path == "net.1"
    assert found.shape == (1, 4, 4, 4)


def test_a_loose_constant_is_not_used() -> None:
    """Deep smooth layers before the last kink: their slopes are far below the product of their norms."""
    assert isinstance(anchored(model(NETWORKS["maxmin"]())), PrefixedAnchored)
    deep = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.GELU())]
    net = model(flat(*deep, nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)), scale=2.0)
    assert cut_of(net) is not None
    assert isinstance(anchored(net), Anchored)


@pytest.mark.parametrize("place", [1, 3, 5])
@pytest.mark.parametrize("classes", [1, 3])
def test_networks_whose_margin_has_no_gradient(classes: int, place: int) -> None:
    """One class has no runner-up, and ``detach`` hides the path from autograd: no traceback, and no false radius."""
    layers = [nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, classes)]
    layers.insert(place, Function(torch.detach))
    found = holds_or_refused(flat(*layers), SIZE, methods=("anchored", "staged"))
    assert "defect" not in str(found)


def test_maxima_of_two_values_before_the_cut() -> None:
    class Larger(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, 1)
            return torch.cat((torch.max(a, b), torch.min(a, b)), 1)

    torch.manual_seed(0)
    net = flat(nn.Linear(16, 12), Larger(), nn.Linear(12, 8), SmoothMaxMin(0.3), nn.Linear(8, 3))
    assert isinstance(anchored(model(net)), PrefixedAnchored)


def a_batch_for(net: Model, count: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [(torch.rand(count, *net.input_size, dtype=net.dtype), torch.arange(count) % 3)]


@pytest.mark.parametrize("only", [None, "head.*"])
@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("loss", ["cut", "cut-annealed"])
def test_training_for_it(loss: str, mirror: bool, only: str | None) -> None:
    sizes = {"depth": 1, "width": 8, "num_features": 16, "num_classes": 3}
    net = lipcert.load("liresnet_l6w64", pretrained=False, **sizes, beta=2.0, mirror=mirror)
    before = {name: value.clone() for name, value in net.net.state_dict().items()}
    losses: list[float] = []
    given = a_batch_for(net)
    settings: dict[str, Any] = {"loss": loss, "epochs": 6, "lr": 1e-3, "ramp": (1, 1, 0), "only": only}
    lipcert.finetune(net, given, **settings, progress=lambda e: losses.append(e.loss))
    moved = {name for name, value in net.net.state_dict().items() if not torch.equal(value, before[name])}
    assert losses[-1] < losses[0]
    assert moved
    assert only is None or all(name.startswith("head") for name in moved)


def test_the_loss_adds_what_the_certificate_takes() -> None:
    """For two classes and a linear end, the logit of the other class grows by ε K‖∇_c m‖."""
    body, end = nn.Linear(4, 4), nn.Linear(4, 2)
    net = nn.Sequential(body, end)
    x, labels = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 0])
    loss, logits = cut_loss(net, body, x, labels, torch.tensor(3.0), 1e-6)
    slope = (end.weight[0] - end.weight[1]).norm()
    margin = logits.gather(1, labels[:, None])[:, 0] - logits.gather(1, 1 - labels[:, None])[:, 0]
    reach = torch.where(margin > 0, torch.minimum(margin.detach().clamp_min(0), 3e-6 * slope), 0.0)
    torch.testing.assert_close(loss, torch.nn.functional.softplus(reach - margin).mean())


@pytest.mark.parametrize("net", [lambda: flat(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3)), Around])
def test_networks_without_a_cut_are_refused_in_training(net: Callable[[], nn.Module]) -> None:
    with pytest.raises(InputError, match="after a cut"):
        lipcert.finetune(model(net()), [(torch.rand(2, *SIZE).double(), torch.tensor([0, 1]))], loss="cut", epochs=1)


def test_it_is_ahead_of_gloro_and_not_behind_the_whole_network_linearised() -> None:
    net = model(NETWORKS["convolutions"](), scale=2.0)
    images = torch.rand(16, *SIZE, dtype=torch.float64)
    predicted, gaps = margins(net(images))
    found = anchored(net)
    assert isinstance(found, PrefixedAnchored)
    both = found(images).radius(predicted, gaps)
    whole = Anchored(net)(images).radius(predicted, gaps)
    gloro = lipcert.certify(net, images, eps=0.01, method="gloro").radius
    assert bool((both >= whole * (1 - 1e-3)).all())
    assert (both / gloro).median() > 1.02


def test_one_kink_behind_the_cut_takes_almost_nothing() -> None:
    """With one kink behind it, radii are near the first-order limit m/(K‖∇_c m‖), and that limit is above GloRo's."""
    sizes = {"depth": 2, "width": 8, "num_features": 64, "num_classes": 4, "img_size": 16}
    net = lipcert.load("liresnet_l6w64", pretrained=False, **sizes).double()
    images = torch.rand(12, *net.input_size, dtype=torch.float64)
    predicted, gaps = margins(net(images))
    found = anchored(net, eps=0.1, costly=False)
    assert isinstance(found, PrefixedAnchored)
    assert found.whole is None or found.whole.work <= 3e10
    at = found.after(images)
    rivals = gaps.argmin(1)
    first = RivalMargin(at.linearization, rivals, predicted, gaps)
    limit = first.margin / first.slope
    share = first.radius_with_forms(first.radius(), 0) / limit
    assert bool((share > 0.75).all())
    assert share.median() > 0.95
    gloro = lipcert.certify(net, images, eps=0.01, method="gloro").radius
    assert (limit / found.constant / gloro).median() > 1.05


def test_what_it_says_and_proves() -> None:
    net = model(NETWORKS["convolutions"]())
    images = torch.rand(16, *SIZE)
    eps = 1.02 * lipcert.certify(net, images, eps=0.05, method="gloro").radius.median().item()
    certifier = Certifier(net, eps)
    assert certifier.notes["anchored"].startswith("the layers up to 1 are bounded by their Lipschitz constant, ")
    result = certifier.run(images)
    mine = [place for place, method in enumerate(result.method) if method == "anchored"]
    assert mine
    assert all(result.radius[place] > eps for place in mine)


def test_a_verdict_does_not_depend_on_the_batch() -> None:
    net = model(NETWORKS["convolutions"]())
    images = torch.rand(6, *SIZE)
    together = lipcert.certify(net, images, eps=0.05)
    for place in range(6):
        alone = lipcert.certify(net, images[place : place + 1], eps=0.05)
        assert alone.method[0] == together.method[place]
        torch.testing.assert_close(alone.radius[0], together.radius[place], rtol=1e-9, atol=0)


def test_deterministic_norms_are_deterministic_here_too() -> None:
    net = model(NETWORKS["maxmin"]())
    result = lipcert.certify(net, torch.rand(4, *SIZE), eps=0.05, method="anchored", rigor="deterministic")
    assert set(result.rigor) == {"deterministic"}
    assert bool((result.radius > 0).all())


@given(seed=st.integers(0, 10**6), beta=st.floats(0.01, 3.0), scale=st.floats(0.3, 4.0))
@settings(max_examples=3)
def test_random_networks(seed: int, beta: float, scale: float) -> None:
    torch.manual_seed(seed)
    net = flat(nn.Linear(16, 8), MaxMin(), nn.Linear(8, 6), SmoothMaxMin(beta), nn.Linear(6, 3))
    holds_or_refused(scaled(net, scale), SIZE, methods=("anchored",), starts=4)


class Attended(nn.Module):
    """L2 attention, which has a constant as a module only, before MaxMin; the last MaxMin lies after the cut."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.calls = calls
        self.first, self.attn, self.bend = nn.Linear(4, 8), L2Attention(8, 2), MaxMin(-1)
        self.attn.proj.weight.data.mul_(0.1)
        self.last = flat(nn.Linear(32, 16), MaxMin(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x[:, 0])
        x = self.bend(x + self.attn(x))
        for _ in range(1, self.calls):
            x = self.bend(3 * x)
        return self.last(x)


def test_modules_that_have_a_constant_as_a_whole_only() -> None:
    """K is that of the module at the cut; not if the module runs twice, since the cut may be either output."""
    net = model(Attended(), scale=1.5)
    found = anchored(net, eps=0.1)
    assert isinstance(found, PrefixedAnchored)
    assert found.cut.path == "net.bend"
    body = nn.Sequential(net.net.first, Residual(net.net.attn), net.net.bend)
    x = torch.rand(50, 4, 4, dtype=torch.float64)
    y = x + 1e-3 * torch.randn_like(x)
    ratio = (body(2 * x - 1) - body(2 * y - 1)).flatten(1).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
    assert bool((ratio <= found.constant).all())
    holds_or_refused(scaled(Attended(), 1.5), SIZE, methods=("anchored", "staged"), starts=8)
    twice = model(Attended(calls=2), scale=1.5)
    graph = prepared(recorded(twice), twice, forms=False)
    cut = smooth_cut(graph)
    assert cut is not None
    assert constant_up_to(graph, cut, twice) > 100 * found.constant


def test_several_eps_leave_out_no_method() -> None:
    """What one ε has certified, several ε certify too: the shipped network needs ``anchored`` for nearly all of it."""
    net = lipcert.load("cifar10-liresnet-smooth")
    one, several = (Certifier(net, eps, "staged") for eps in ("36/255", "36/255,72/255"))
    assert list(one.methods) == list(several.methods) == ["global", "gloro", "anchored"]
