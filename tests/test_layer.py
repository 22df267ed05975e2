"""The last layer with kinks before a cut: no perturbation makes a functional fall further than its bound says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from truth import holds_or_refused

from lipcert.bounds import margins
from lipcert.certifier.anchored import PrefixedAnchored
from lipcert.certifier.anchored.layer import Layer, LayerAt
from lipcert.certifier.anchored.margin import RivalMargin
from lipcert.certifier.anchored.network import prepared, recorded
from lipcert.certifier.anchored.norms import NormOptions
from lipcert.certifier.anchored.prefix import constant_up_to, smooth_cut
from lipcert.graph import evaluate
from lipcert.model import Model
from lipcert.surgery import MaxMin, SmoothMaxMin

SIZE = (1, 4, 4)


class Block(nn.Module):
    """A residual layer whose last operation has kinks; with ``cut`` autograd does not see its branch."""

    def __init__(self, bend: Callable[[], nn.Module] = MaxMin, cut: bool = False) -> None:
        super().__init__()
        self.conv, self.bend, self.cut = nn.Conv2d(4, 4, 3, padding=1), bend(), cut

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv(x)
        return self.bend(x + (branch.detach() if self.cut else branch))


class Mirrored(nn.Module):
    """An image and its mirror image as one batch, and the mean of their features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), MaxMin(), Block(), tail()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = self.body(torch.stack((x, x.flip(-1))).flatten(0, 1))
        return self.head(both.unflatten(0, (2, -1)).mean(0))


class Bent(nn.Module):
    """ReLU of a function of a value, beside that value."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((torch.relu(self.of(x)), x), 1)


def tail(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 4, 2, 2), nn.Flatten(), nn.Linear(16, 8), SmoothMaxMin(0.5), *more)


def blocks(*several: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), MaxMin(), *several, tail(nn.Linear(8, 3)))


def dense(*widths: int, bend: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [layer for a, b in zip((16, *widths[:-1]), widths, strict=True) for layer in (nn.Linear(a, b), bend())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], 8), nn.GELU(), nn.Linear(8, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: dense(12, 10),
    "maxmin": lambda: dense(12, 8, 12, bend=MaxMin),
    "few": lambda: dense(2, 6),
    "residual": lambda: blocks(Block()),
    "two blocks": lambda: blocks(Block(), Block(nn.ReLU)),
    "hidden": lambda: blocks(Block(), Block(cut=True)),
    "mirrored": Mirrored,
}


def model(net: nn.Module, scale: float = 1.0) -> Model:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    return Model(net.eval(), mean=(0.5,), std=(0.5,), input_size=SIZE).double()


def behind_its_cut(net: Model, eps: float | None = None) -> PrefixedAnchored:
    graph = prepared(recorded(net), net, forms=False)
    cut = smooth_cut(graph)  # also where its constant is too loose to be used
    assert cut is not None
    return PrefixedAnchored(net, graph, cut, constant_up_to(graph, cut, net), budget=NormOptions().budget, eps=eps)


def behind(net: Model, eps: float | None = None) -> tuple[PrefixedAnchored, Layer]:
    method = behind_its_cut(net, eps)
    assert method.layer is not None
    return method, method.layer


def at(method: PrefixedAnchored, images: Tensor) -> LayerAt:
    assert method.layer is not None
    return method.layer.at(method.evaluated(images))


def falls(layer: Layer, image: Tensor, g: Tensor, radius: float, starts: int = 6) -> float:
    """The largest −⟨g, c(b̂ + δ) − ĉ⟩ that gradient ascent finds in the ball that the bound is about."""
    network, rho = layer.network, layer.scale * radius
    path = network.graph.between(network.source, [network.graph.output])
    values = network.values(image[None])
    centre, end = values[network.source][0], values[network.graph.output][0]
    most = 0.0
    for start in range(starts):
        delta = torch.randn_like(centre) * (1e-9 if start == 0 else 1.0)
        for step in range(40):
            if start or step:
                delta = delta * rho / delta.norm().clamp_min(1e-300)
            delta = delta.detach().requires_grad_()
            with torch.enable_grad():
                moved = evaluate(path, {network.source: centre + delta})
                value = -(g.view_as(end) * (moved[network.graph.output] - end)).sum()
                (slope,) = torch.autograd.grad(value, delta)
            most = max(most, value.item())
            delta = delta.detach() + rho * slope / slope.norm().clamp_min(1e-100)
    return most


def attacked(net: Model, image: Tensor, several: int = 3) -> list[float]:
    """Checks the bounds for random functionals and at several radii; returns what is attained of them."""
    method, layer = behind(net)
    shares = []
    for _ in range(several):
        g = torch.randn(1, layer.network.graph.output.entries, dtype=torch.float64)
        for margin in (0.1, 10.0):  # it decides κ, and any κ gives a bound
            decrease = at(method, image).decrease(g, g.norm(dim=1), torch.tensor([margin], dtype=torch.float64))
            for radius in (1e-3, 0.1, 1.0, 10.0):
                bound = decrease(torch.tensor([radius], dtype=torch.float64)).item()
                reached = falls(layer, image, g[0], radius)
                assert reached <= bound
                shares.append(reached / bound)
    return shares


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_falls_further(name: str) -> None:
    torch.manual_seed(sum(map(ord, name)))
    shares = attacked(model(NETWORKS[name](), 1.5), torch.rand(1, *SIZE, dtype=torch.float64))
    assert max(shares) > 0.95  # a bound that is 5 % smaller would not hold


@given(seed=st.integers(0, 10**6), scale=st.floats(0.1, 10.0), name=st.sampled_from(sorted(NETWORKS)))
@settings(max_examples=6)
def test_random_networks(seed: int, scale: float, name: str) -> None:
    torch.manual_seed(seed)
    attacked(model(NETWORKS[name](), scale), torch.rand(1, *SIZE, dtype=torch.float64), several=1)


def test_every_direction_in_a_plane() -> None:
    """b has two entries, so that the exact fall is the largest on a fine grid of the disc, and all weights count."""
    net = model(NETWORKS["few"](), 2.0)
    method, layer = behind(net)
    network = layer.network
    angles = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)
    disc = (
        torch.stack((angles.cos(), angles.sin()), 1)[:, None] * torch.linspace(0, 1, 41, dtype=torch.float64)[:, None]
    )
    ratios = []
    for image in torch.rand(12, 1, *SIZE, dtype=torch.float64):
        values = network.values(image[None])
        centre, end = values[network.source][0], values[network.graph.output][0]
        g = torch.randn(1, end.numel(), dtype=torch.float64)
        decrease = at(method, image).decrease(g, g.norm(dim=1), torch.ones(1, dtype=torch.float64))
        for radius in (0.05, 0.5, 3.0):
            points = centre.flatten() + layer.scale * radius * disc.reshape(-1, 2)
            points = points.reshape(len(points), *centre.shape)
            (moved,) = network.graph.forward(network.source, points, [network.graph.output], {})
            exact = -((moved - end).reshape(len(points), -1) @ g[0]).min().item()
            bound = decrease(torch.tensor([radius], dtype=torch.float64)).item()
            assert exact <= bound
            ratios.append(bound / exact)
    assert torch.tensor(ratios).median() < 2


@pytest.mark.parametrize("name", ["residual", "mirrored", "hidden"])
def test_it_holds_at_the_pixels(name: str) -> None:
    """From images in the pixel ball, with the constants of the layers before b; and radii hold under attack."""
    torch.manual_seed(sum(map(ord, name)))
    net = model(NETWORKS[name](), 1.5)
    method, layer = behind(net)
    image = torch.rand(1, *SIZE, dtype=torch.float64)
    network, eps = layer.network, 0.3
    (end,) = (network.values(image[None])[network.graph.output],)
    g = torch.randn(1, end.numel(), dtype=torch.float64)
    decrease = at(method, image).decrease(g, g.norm(dim=1), torch.ones(1, dtype=torch.float64))
    bound = decrease(torch.tensor([eps * method.constant], dtype=torch.float64)).item()
    for _ in range(400):
        step = torch.randn_like(image)
        near = (image + eps * step / step.norm()).clamp(0, 1)
        assert -(g * (network.values(near[None])[network.graph.output] - end).reshape(1, -1)).sum().item() <= bound
    holds_or_refused(net.net, SIZE, methods=("anchored",), starts=2)


@pytest.mark.parametrize("name", NETWORKS)
def test_radii_grow(name: str) -> None:
    torch.manual_seed(sum(map(ord, name)) + 1)
    net = model(NETWORKS[name](), 1.5)
    method, _ = behind(net)
    images = torch.rand(4, *SIZE, dtype=torch.float64)
    predicted, gaps = margins(net(images))
    with_layer = method(images).radius(predicted, gaps)
    method.layer = None
    without = method(images).radius(predicted, gaps)
    assert bool((with_layer >= without * (1 - 1e-3)).all())
    assert bool((with_layer > 1.005 * without).any())


def test_bounds_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(3)
    net = model(NETWORKS["residual"](), 1.5)
    method, layer = behind(net)
    images = torch.rand(3, *SIZE, dtype=torch.float64)
    g = torch.randn(3, layer.network.graph.output.entries, dtype=torch.float64)
    radius, one = torch.full((3,), 0.2, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    together = at(method, images).decrease(g, g.norm(dim=1), one)
    alone = [at(method, images[i : i + 1]).decrease(g[i : i + 1], g[i : i + 1].norm(dim=1), one[:1]) for i in range(3)]
    expected = torch.cat([decrease(radius[:1]) for decrease in alone])
    assert torch.allclose(together(radius), expected, rtol=1e-9)
    assert torch.equal(together.only(torch.tensor([2]))(radius[:1]), together(radius)[2:])
    whole = at(method, images)
    for places in ([2], [0, 2], [1, 0]):
        some = torch.tensor(places)
        decrease = whole.only(some).decrease(g[some], g[some].norm(dim=1), one[some])
        assert torch.allclose(decrease(radius[some]), expected[some], rtol=1e-9)


def test_for_a_verdict_only_margins_that_need_it_are_bounded() -> None:
    torch.manual_seed(4)
    net = model(NETWORKS["residual"](), 1.5)
    method, layer = behind(net, eps=0.1)
    assert layer.radius < math.inf
    image = torch.rand(1, *SIZE, dtype=torch.float64)
    predicted, gaps = margins(net(image))
    linearized = method(image).anchor.linearization
    rival = gaps.argmin(1)
    toward = RivalMargin(linearized, rival, predicted, gaps)
    assert toward.decrease is not None
    for factor, known in ((1.5, True), (3.0, False)):
        margin = factor * toward.slope * layer.radius
        decrease = at(method, image).decrease(torch.randn(1, 64, dtype=torch.float64), toward.slope, margin)
        assert bool(decrease(margin.new_tensor([layer.radius])).isfinite()) == known


@pytest.mark.parametrize("bend", [nn.Hardtanh, nn.LeakyReLU])
def test_layers_of_another_form_are_left_out(bend: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    assert behind_its_cut(model(blocks(Block(), Block(bend)))).layer is None


DIFFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: torch.sub(*x.chunk(2, 1)),
    "a multiple": lambda x: torch.sub(*x.chunk(2, 1), alpha=10),
    "broadcast": lambda x: torch.sub(*x.split([1, 3], 1)),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_norms_of_differences_of_pieces(name: str) -> None:
    """They are at most √2 for two halves alone."""
    torch.manual_seed(6)
    channels = 4 + DIFFERENCES[name](torch.zeros(1, 4, 1, 1)).shape[1]
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), Bent(DIFFERENCES[name]))
    end = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.Flatten(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 3))
    net = model(nn.Sequential(body, end), 1.5)
    _, layer = behind(net)
    jacobian = torch.autograd.functional.jacobian(
        DIFFERENCES[name], torch.zeros(1, *layer.network.source.shape[1:]).double()
    )
    exact = torch.linalg.matrix_norm(jacobian.flatten(4).flatten(0, 3), 2).item()
    assert layer.norm >= exact
    assert name != "halves" or layer.norm <= math.sqrt(2) * 1.001
    holds_or_refused(net.net, SIZE, methods=("anchored",), starts=2)


def test_nothing_is_bounded_where_the_image_does_not_count() -> None:
    net = blocks(Block())
    nn.init.zeros_(net[0].weight)
    method = behind_its_cut(model(net))
    assert method.constant == 0
    assert method.layer is None
    image = torch.rand(1, *SIZE, dtype=torch.float64)
    assert method(image).radius(*margins(net(image))).item() == math.inf


@pytest.mark.parametrize("side", [1, -1])
def test_slopes_and_operands_are_of_one_evaluation(side: int) -> None:
    """An operand an ulp from its kink has the other sign in another evaluation; the exact fall is that on a circle."""
    bent = Bent(lambda x: x[:, :1] + bent.shift)
    bent.shift = nn.Parameter(torch.zeros(()))
    net = model(nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.ReLU(), bent, nn.GELU(), nn.Linear(3, 3)))
    image = torch.full((1, *SIZE), 0.75, dtype=torch.float64)
    with torch.no_grad():
        net.net[1].weight.fill_(1 / 16)
        net.net[1].bias.fill_(4.0)
        bent.shift.copy_(-net.net[:3]((image - 0.5) / 0.5)[0, 0] * (1 - side * 2.0**-52))
    method, layer = behind(net)
    network, z = layer.network, layer.operand
    values = network.values(image[None])
    assert 0 < side * values[z].item() < 1e-14
    # On the side on which the ReLU is not linearised, the margin falls by 1.5 for each unit of the first entry.
    g = torch.tensor([[-1.0, 1.5 if side > 0 else -0.5, 0.05]], dtype=torch.float64)
    before = method.evaluated(image)
    before.values[z] = -before.values[z]
    decrease = layer.at(before).decrease(g, g.norm(dim=1), torch.ones(1, dtype=torch.float64))
    angles = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)
    for radius in (0.1, 1.0):
        circle = layer.scale * radius * torch.stack((angles.cos(), angles.sin()), 1)
        points = (values[network.source].reshape(1, 2) + circle)[:, None]
        (moved,) = network.graph.forward(network.source, points, [network.graph.output], {})
        exact = -((moved - values[network.graph.output]).reshape(len(points), -1) @ g[0]).min().item()
        assert 1.49 * layer.scale * radius < exact <= decrease(torch.tensor([radius], dtype=torch.float64)).item()
