"""Tubes around a ray: no perturbation at the cut breaks their bounds, and radii are near the first-order limit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from truth import holds_or_refused

import lipcert
from lipcert.bounds import margins
from lipcert.certifier.anchored import Behind, anchored
from lipcert.certifier.anchored.behind import cut_behind_kinks
from lipcert.certifier.anchored.network import prepared, recorded
from lipcert.certifier.anchored.tube import Tubes
from lipcert.errors import UnsupportedOperation
from lipcert.graph import Node, run
from lipcert.model import Model
from lipcert.surgery import MaxMin

SIZE = (1, 4, 4)


class Mirrored(nn.Module):
    """An image and its mirror image as one batch, and the mean of their features."""

    def __init__(self) -> None:
        super().__init__()
        first = (nn.Conv2d(1, 4, 3, padding=1), MaxMin(), nn.Conv2d(4, 8, 2, 2), MaxMin(), nn.Flatten())
        self.body, self.head = nn.Sequential(*first, nn.Linear(32, 8), MaxMin()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = self.body(torch.stack((x, x.flip(-1))).flatten(0, 1))
        return self.head(both.unflatten(0, (2, -1)).mean(0))


class Around(nn.Module):
    """Linear paths around both of the last ReLUs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = x + 0.5 * layer(x).relu()
        return self.head(x)


def chain(*widths: int, bend: Callable[[], nn.Module] = MaxMin) -> nn.Sequential:
    layers = [layer for a, b in zip((16, *widths[:-1]), widths, strict=True) for layer in (nn.Linear(a, b), bend())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "maxmin": lambda: chain(16, 12, 8),
    "relu": lambda: chain(12, 16, 10, bend=nn.ReLU),
    "four": lambda: chain(12, 12, 12, 12),
    "mirrored": Mirrored,
    "around": Around,
}


def model(net: nn.Module, scale: float = 1.0) -> Model:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    return Model(net.eval(), mean=(0.5,), std=(0.5,), input_size=SIZE).double()


def tubes_of(net: Model) -> Tubes:
    graph = prepared(recorded(net), net, forms=False)
    cut = cut_behind_kinks(graph, kinks=2)
    assert cut is not None
    return Tubes(net, graph, cut)


def lowest(tubes: Tubes, values: dict, y: int, j: int, radius: float, starts: int = 4) -> float:
    """The smallest f_y − f_j that gradient descent finds within a radius of the value at the cut."""
    network = tubes.network
    path = network.replay.between(network.source, [network.graph.output])
    centre = values[network.source][0]

    def margin(delta: Tensor) -> Tensor:
        logits = run(path, {network.source: centre + delta})[network.graph.output].flatten()
        return logits[y] - logits[j]

    least = margin(torch.zeros_like(centre)).item()
    for start in range(starts):
        delta = 1e-9 * torch.randn_like(centre) if start == 0 else torch.randn_like(centre)
        for step in range(24):
            delta = (delta * radius / delta.norm()).requires_grad_() if start or step else delta.requires_grad_()
            with torch.enable_grad():
                value = margin(delta)
                (slope,) = torch.autograd.grad(value, delta)
            least = min(least, value.item())
            delta = delta.detach() - (radius if step < 12 else 0.2 * radius) * slope / slope.norm().clamp_min(1e-100)
    return least


def attack(net: Model, images: Tensor) -> list[float]:
    """Checks the bounds at several radii; returns the radii, as shares of the first-order limit."""
    tubes, shares = tubes_of(net), []
    for image in images.split(1):
        predicted, gaps = margins(net(image))
        for toward in tubes._rivals(image, predicted, gaps):
            radius = toward.radius(float("inf"))
            y, j, values = int(predicted), int(toward.classes[0]), toward.values
            assert radius <= toward.limit
            shares.append(radius / toward.limit)
            for share in (0.5, 1.0):
                if share * toward.upto > 0:
                    bound = toward.bound(share * toward.upto)
                    assert bound <= lowest(tubes, values, y, j, share * toward.upto) + 1e-12
    return shares


@pytest.mark.parametrize("name", NETWORKS)
def test_bounds_hold_at_the_cut(name: str) -> None:
    torch.manual_seed(sum(map(ord, name)))
    shares = attack(model(NETWORKS[name](), 1.5), torch.rand(2, *SIZE, dtype=torch.float64))
    assert min(shares) > 0.3


@pytest.mark.parametrize("name", ["maxmin", "mirrored"])
def test_radii_hold_at_the_pixels(name: str) -> None:
    torch.manual_seed(sum(map(ord, name)))
    net = model(NETWORKS[name](), 1.5)
    found = anchored(net)
    assert isinstance(found, Behind)
    assert found.tubes is not None
    holds_or_refused(net.net, SIZE, methods=("anchored",), starts=2)


@given(seed=st.integers(0, 10**6), scale=st.floats(0.2, 5.0), width=st.integers(1, 6), relu=st.booleans())
@settings(max_examples=6, deadline=None)
def test_random_networks(seed: int, scale: float, width: int, relu: bool) -> None:
    torch.manual_seed(seed)
    net = chain(8, 2 * width, 2 * width, bend=nn.ReLU if relu else MaxMin)
    attack(model(net, scale), torch.rand(1, *SIZE, dtype=torch.float64))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("tied", [1, 2])
def test_images_on_kinks(tied: int, sign: float) -> None:
    """Equal rows tie exactly, and zeros, of either sign, lie on the kink of a ReLU: any slope may come behind them."""
    for bend in (MaxMin, nn.ReLU):
        torch.manual_seed(tied)
        net = chain(8, 8, 8, bend=bend)
        layer = net[1 + 2 * tied]
        with torch.no_grad():
            if bend is MaxMin:
                layer.weight[4:] = layer.weight[:4]
                layer.bias[4:] = layer.bias[:4]
                layer.weight[5] += 0.3  # equal at an image only
                layer.bias[5] -= 0.0
            else:
                layer.weight[:4] = 0.0
                layer.bias[:4] = sign * 0.0
        attack(model(net, 1.5), torch.rand(1, *SIZE, dtype=torch.float64))


def test_the_point_where_a_unit_is_on_its_kink_but_not_constant() -> None:
    torch.manual_seed(0)
    net = model(chain(8, 8, 8, bend=nn.ReLU), 1.5)
    image = torch.rand(1, *SIZE, dtype=torch.float64)
    with torch.no_grad():
        for place in (3, 5):  # the pre-activations of the image become the biases
            net.net[place].bias.sub_(net.net[: place + 1]((image - 0.5) / 0.5)[0])
    tubes = tubes_of(net)
    predicted, gaps = margins(net(image))
    for toward in tubes._rivals(image, predicted, gaps):
        radius = toward.radius(float("inf"))
        if radius > 0:
            found = lowest(tubes, toward.values, int(predicted), int(toward.classes[0]), radius, starts=12)
            assert found >= -1e-12


def test_radii_are_near_the_limit_and_above_those_of_a_later_cut() -> None:
    torch.manual_seed(0)
    sizes = {"depth": 1, "width": 8, "num_features": 32, "num_classes": 3, "img_size": 8}
    net = lipcert.load("liresnet_l6w64", pretrained=False, **sizes).double()
    images = torch.rand(4, *net.input_size, dtype=torch.float64)
    predicted, gaps = margins(net(images))
    found = anchored(net, eps=None)
    assert isinstance(found, Behind)
    assert found.tubes is not None
    tubes, found.whole = found.tubes[0], None
    for place in range(4):
        some = slice(place, place + 1)
        radius = tubes.radius(images[some], predicted[some], gaps[some], None)
        assert radius > 0.5 * tubes.limit(images[some], predicted[some], gaps[some])
    both = found(images).radius(predicted, gaps)
    found.tubes = None
    assert (both / found(images).radius(predicted, gaps)).median() > 1.01


def test_a_verdict_is_that_of_the_full_radius() -> None:
    torch.manual_seed(1)
    net = model(chain(16, 12, 8), 1.5)
    tubes = tubes_of(net)
    for image in torch.rand(4, *SIZE, dtype=torch.float64).split(1):
        predicted, gaps = margins(net(image))
        full = tubes.radius(image, predicted, gaps, None)
        assert tubes.radius(image, predicted, gaps, 0.8 * full) >= 0.8 * full * (1 - 1e-5)
        assert tubes.radius(image, predicted, gaps, 2 * tubes.limit(image, predicted, gaps)) == 0


def test_what_it_does_not_take() -> None:
    smooth = model(nn.Sequential(*chain(12, 12, 8, bend=nn.ReLU)[:-1], nn.GELU(), nn.Linear(8, 3)))
    graph = prepared(recorded(smooth), smooth, forms=False)
    with pytest.raises(UnsupportedOperation):
        Tubes(smooth, graph, graph.input)
    leaky = model(chain(12, 12, 8, bend=nn.LeakyReLU))
    graph = prepared(recorded(leaky), leaky, forms=False)
    with pytest.raises(UnsupportedOperation):
        Tubes(leaky, graph, graph.input)


def test_radii_are_infinite_where_the_image_does_not_count() -> None:
    layers = chain(12, 8, 8, bend=nn.ReLU)
    nn.init.zeros_(layers[1].weight)
    net = model(layers)
    method = anchored(net)
    assert isinstance(method, Behind)
    assert method.tubes is not None
    images = torch.rand(2, *SIZE, dtype=torch.float64)
    assert method(images).radius(*margins(net(images))).tolist() == [math.inf] * 2


def test_where_the_cut_lies() -> None:
    three, two = (model(chain(*widths)) for widths in ((16, 12, 8), (16, 12)))
    graph = prepared(recorded(three), three, forms=False)
    cut, later = cut_behind_kinks(graph, kinks=2), cut_behind_kinks(graph)
    assert cut is not None
    assert later is not None
    assert (cut.path, later.path) == ("net.2", "net.4")
    assert cut_behind_kinks(prepared(recorded(two), two, forms=False), kinks=2) is None


@pytest.mark.parametrize("name", NETWORKS)
def test_constants_and_factors_bound_jacobians(name: str) -> None:
    """L_v is at least ‖∂a_v/∂c‖, with equality for a matrix and MaxMin; G Gᵀ ⪯ L Lᵀ for the factor L of G = ∂z/∂a_v."""
    torch.manual_seed(0)
    tubes = tubes_of(model(NETWORKS[name](), 1.5))
    network, ratios = tubes.network, []
    values = network.values(torch.rand(3, 1, *SIZE, dtype=torch.float64))
    for v, layer in tubes.layers.items():
        z = v.operands[0]

        def jacobian(first: Node, last: Node, place: int) -> Tensor:
            path = network.replay.between(first, [last])

            def value(x: Tensor) -> Tensor:
                return run(path, {first: x.reshape(values[first][0].shape)})[last].flatten()

            return torch.autograd.functional.jacobian(value, values[first][place].flatten(), vectorize=True)

        for place in range(3):
            if layer.start is not network.source:
                norm = torch.linalg.matrix_norm(jacobian(network.source, layer.start, place), 2).item()
                assert norm <= layer.lipschitz * (1 + 1e-12)
                ratios.append(norm / layer.lipschitz)
            linear, factor = jacobian(layer.start, z, place), layer.factor.dense()[0]
            least = torch.linalg.eigvalsh(factor @ factor.T - linear @ linear.T)[0]
            assert least > -1e-9
            torch.testing.assert_close(factor.norm(), linear.norm(), rtol=1e-6, atol=0)
            assert layer.error < 1e-6
    assert max(ratios) > (0.999 if "max" in name else 0.3)
