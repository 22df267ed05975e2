"""Networks that float64 cannot evaluate, as large numbers cancel. Certificates must not be noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import timm
import torch
from torch import Tensor, nn
from truth import gains_hold

import lipcert
from lipcert.bounds import Jacobian, Schur, margins, schur_bounds
from lipcert.bounds._registry import RULES, Rule
from lipcert.certifier import Anchored, Certifier
from lipcert.graph import Node, evaluate
from lipcert.roundoff import PathBounds
from lipcert.surgery import SmoothProject

A, B, C = 1 / 3, 0.7, 1 / 3 * 0.7  # C is not A·B: float64 rounds the product
SCALE = 2.0**60
PIXELS = (0.5, 0.25, 0.75, 0.3)
METHODS = ("global", "gloro", "local", "lofast", "anchored", "staged")


class Network(nn.Module):
    def __init__(self, margin: Callable[[Tensor], Tensor]):
        super().__init__()
        self.margin = margin
        self.marker = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        half = self.margin(x.flatten(1)).sum(1, keepdim=True)
        return torch.cat([half, -half], 1)


def model(margin: Callable[[Tensor], Tensor]) -> lipcert.Model:
    return lipcert.load(Network(margin), mean=(0.0,), std=(1.0,), input_size=(1, 2, 2)).double()


def image(pixels: tuple[float, ...] = PIXELS) -> Tensor:
    return torch.tensor(pixels, dtype=torch.float64).reshape(1, 1, 2, 2)


def lost(pixels: list[Fraction]) -> Fraction:
    """Σ(x·A·B − x·C)·SCALE, exactly."""
    return sum(pixels, Fraction()) * (Fraction(A) * Fraction(B) - Fraction(C)) * Fraction(SCALE)


def plain(pixels: list[Fraction]) -> Fraction:
    return sum(pixels, Fraction())


# What float64 computes, and half of the margin of class 0 in exact arithmetic. Activations between the linear maps are
# the identity on the numbers that they see, up to signs that stay.
HARMED = {
    "a product of two constants against their rounded product": (
        lambda x: 1e-3 + (x * A * B - x * C) * SCALE,
        lambda x: 4 * Fraction(1e-3) + lost(x),
    ),
    "large weights that cancel": (
        lambda x: 1e-3 + (x * (A * 1e18) * B - x * (A * 1e18 * B)) * 2.0**4,
        lambda x: 4 * Fraction(1e-3)
        + plain(x) * (Fraction(A * 1e18) * Fraction(B) - Fraction(A * 1e18 * B)) * Fraction(2) ** 4,
    ),
    "absorbed by a larger number": (
        lambda x: ((x * 1e-20 + 1.0) - 1.0) * 1e20 - 0.01,
        lambda x: plain(x) * Fraction(1e-20) * Fraction(1e20) - 4 * Fraction(0.01),
    ),
    "an offset that goes again": (
        lambda x: ((x + 1e18) - 1e18) - 0.01,
        lambda x: plain(x) - 4 * Fraction(0.01),
    ),
    "a dead ReLU": (
        lambda x: 1e-3 - torch.relu((x * C - x * A * B) * SCALE),
        lambda x: 4 * Fraction(1e-3) - max(Fraction(), -lost(x)),
    ),
    "nearly equal branches": (
        lambda x: 1e-3 + (nn.functional.leaky_relu(x * 3e19, 0.5) - torch.relu(x * 1e19 * 3.0)),
        lambda x: 4 * Fraction(1e-3) + plain(x) * (Fraction(3e19) - Fraction(1e19) * 3),
    ),
}  # fmt: skip


def flips(exact: Callable[[list[Fraction]], Fraction], x: Tensor, radius: float, predicted: int) -> bool:
    """Whether the exact network predicts the other class at the image or a corner of the ball within the box."""
    step = min(Fraction(radius) * Fraction(49, 100), Fraction(1))  # (±s, ±s, ±s, ±s) has norm 2s
    start = [Fraction(v) for v in x.flatten().tolist()]
    for sign in (0, 1, -1):
        moved = [min(max(v + sign * step, Fraction()), Fraction(1)) for v in start]
        margin = exact(moved)
        if (margin <= 0) if predicted == 0 else (margin >= 0):
            return True
    return False


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", HARMED)
def test_no_exact_network_flips_within_its_radius(name: str, method: str) -> None:
    computed, exact = HARMED[name]
    for rigor in ("probabilistic", "deterministic") if method in ("lofast", "anchored") else ("probabilistic",):
        certifier = Certifier(model(computed), 0.1, method, rigor=rigor)
        for pixels in (PIXELS, (0.9, 0.1, 0.35, 0.6)):
            found = certifier.run(image(pixels))
            if found.radius.item() > 0:
                assert not flips(exact, image(pixels), found.radius.item(), int(found.predicted.item()))


def test_the_exact_networks_are_those_that_are_computed() -> None:
    # Where nothing cancels, both must agree: the same formulas without the numbers that float64 cannot hold.
    computed = lambda x: ((x * 2.0**-3 + 1.0) - 1.0) * 2.0**3 - 0.25  # noqa: E731
    found = Certifier(model(computed), 0.1, "anchored").run(image())
    exact = lambda x: plain(x) - 4 * Fraction(0.25)  # noqa: E731
    assert found.radius.item() == pytest.approx(abs(float(exact([Fraction(v) for v in PIXELS]))) / 2, rel=1e-3)
    assert not flips(exact, image(), found.radius.item(), int(found.predicted.item()))
    assert flips(exact, image(), 1.05 * found.radius.item(), int(found.predicted.item()))
    assert flips(HARMED["an offset that goes again"][1], image(), 0.0, 1)


class Chain(nn.Module):
    """Linear layers whose products cancel, with a GELU at a point where it is nearly linear between them."""

    def __init__(self, depth: int, condition: float, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def orthogonal() -> Tensor:
            return torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]

        self.weights = nn.ParameterList()
        for place in range(depth):
            sizes = torch.logspace(0, -condition, 6, dtype=torch.float64)
            weight = orthogonal() @ torch.diag(sizes) @ orthogonal()
            before = self.weights[-1].detach() if place % 2 else weight
            self.weights.append(nn.Parameter(torch.linalg.inv(before) if place % 2 else weight))

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        for weight in self.weights:
            h = torch.relu(h @ weight.T + 8.0) - 8.0
        return torch.cat([h.sum(1, keepdim=True), h[:, :1]], 1)

    def exact(self) -> list[list[Fraction]]:
        """The Jacobian where every unit is on, by its rows, in exact arithmetic."""
        total = [[Fraction(int(i == j)) for j in range(6)] for i in range(6)]
        for weight in self.weights:
            rows = [[Fraction(v) for v in row] for row in weight.tolist()]
            total = [[sum((a * total[k][j] for k, a in enumerate(row)), Fraction()) for j in range(6)] for row in rows]
        return total


@pytest.mark.parametrize("condition", [2, 5, 7])
@pytest.mark.parametrize("seed", range(3))
def test_products_with_jacobians_are_off_by_no_more_than_is_said(condition: float, seed: int) -> None:
    network = Chain(4, condition, seed)
    wrapped = lipcert.load(network, mean=(0.0,), std=(1.0,), input_size=(1, 2, 3)).double()
    pixels = torch.rand(1, 1, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    method = Anchored(wrapped, rigor="deterministic")
    network_of = method.network
    values = network_of.values(pixels[:, None])
    local = network_of.local(values)
    ways = PathBounds(network_of.chains, local.gains, local.off, {}, {})
    before = network_of.graph.output.operands[0].operands[0]  # the last value of six entries
    place = ways.place[network_of.source], ways.place[before]
    said, largest = ways.off_by()[0][place].item(), ways.bounds[0][place].item()
    product, _ = method.finder.jacobians.operator(network_of.source, before, values, several=False)
    exact = network.exact()
    for column in range(6):
        unit = torch.zeros(1, 6, dtype=torch.float64)
        unit[0, column] = 1
        truth = [exact[i][column] for i in range(6)]
        off = sum((Fraction(v) - t) ** 2 for v, t in zip(product(unit)[0].tolist(), truth, strict=True))
        assert 0 < float(off) ** 0.5 <= said
        assert float(sum(t**2 for t in truth)) ** 0.5 <= largest


def test_the_noise_of_values_holds_against_exact_arithmetic() -> None:
    network = Chain(4, 6, 0)
    wrapped = lipcert.load(network, mean=(0.0,), std=(1.0,), input_size=(1, 2, 3)).double()
    pixels = torch.rand(1, 1, 2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    method = Anchored(wrapped, rigor="deterministic")
    found = method(pixels).linearization
    start = [Fraction(v) for v in pixels.flatten().tolist()]
    total = start
    for weight in network.weights:
        total = [sum((Fraction(a) * v for a, v in zip(row, total, strict=True)), Fraction()) for row in weight.tolist()]
    truth = [sum(total, Fraction()), total[0]]
    computed = found.values[method.network.graph.output].flatten().tolist()
    off = float(sum((Fraction(v) - t) ** 2 for v, t in zip(computed, truth, strict=True))) ** 0.5
    assert 0 < off <= found.norms.rounded.noise[method.network.graph.output].item() < 1e-3


@pytest.mark.parametrize("turned", [False, True])
def test_norms_that_a_rule_computes_from_turned_tokens_count_as_rounded(turned: bool) -> None:
    """A LayerNorm of 64 entries computes their mean: with an error of 64 terms, in whatever layout they come."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 2)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(2)
            return self.head(self.norm(tokens.mT if turned else tokens).mean(1))

    size = (64, 1, 4) if turned else (4, 8, 8)
    anchored = Anchored(lipcert.load(Tokens().eval(), mean=(0.5,), std=(0.25,), input_size=size).double())
    at = anchored(torch.rand(1, *size, dtype=torch.float64)).linearization
    (rule,) = at.network.rules
    ((rho,),) = at.propagate(torch.zeros(1, dtype=torch.float64)).operands.values()
    assert rho >= 4 * 8 * 64 * 2.0**-53 * at.values[rule.operands[0]].norm()


def test_rounding_costs_an_ordinary_network_nothing() -> None:
    arguments = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    vit = lipcert.load(
        timm.create_model("vit_tiny_patch16_224", **arguments), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 8, 8)
    ).double()
    lipcert.convert(vit, attention="keep", norm="smooth")
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    predicted, gaps = margins(vit(pixels).detach())
    certifier = Certifier(vit, 0.1, "gloro")
    left, proved = certifier.nominal.sound(pixels, predicted, gaps)
    assert proved.all()
    assert torch.allclose(left, gaps, rtol=1e-6, atol=0)
    assert (left <= gaps).all()
    norms = Anchored(vit)(pixels).norms
    for found in norms.pairs.values():
        assert bool((found.slack <= 1e-6 * found.norm).all())


class Kinked(nn.Module):
    """Linear maps with ReLU between, whose bias makes large numbers cancel."""

    def __init__(self, size: float, depth: int, generator: torch.Generator):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.head = nn.Linear(4, 2)
        for layer in (*self.layers, self.head):
            nn.init.normal_(layer.weight, std=0.3, generator=generator)
            nn.init.normal_(layer.bias, generator=generator)
        with torch.no_grad():
            for layer, sign in zip(self.layers, (1, -1) * depth, strict=False):
                layer.bias.add_(sign * size)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)

    def exact(self, pixels: list[float]) -> list[Fraction]:
        """The logits of the float64 weights, in exact arithmetic."""

        def affine(layer: nn.Linear, values: list[Fraction]) -> list[Fraction]:
            weight, bias = layer.weight.double().tolist(), layer.bias.double().tolist()
            rows = zip(weight, bias, strict=True)
            return [sum((Fraction(w) * v for w, v in zip(row, values, strict=True)), Fraction(b)) for row, b in rows]

        values = [Fraction(pixel) for pixel in pixels]
        for layer in self.layers:
            values = [max(value, Fraction()) for value in affine(layer, values)]
        return affine(self.head, values)


@pytest.mark.parametrize("size", [0.0, 1e4, 1e9, 1e12])
def test_what_rounding_takes_of_a_margin_is_proved(size: float) -> None:
    """Against exact arithmetic; and the check replaces a proof only where it takes a visible part of the margin."""
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        network = Kinked(size, 1 + seed % 3, generator)
        wrapped = lipcert.load(network, mean=(0.0,), std=(1.0,), input_size=(1, 2, 2)).double()
        certifier = Certifier(wrapped, 0.1, "gloro")
        pixels = torch.rand(4, 1, 2, 2, generator=generator, dtype=torch.float64)
        predicted, computed = margins(wrapped(pixels).detach())
        assert certifier.nominal.proof is not None
        lost = certifier.nominal.proof.margins(pixels, predicted, torch.zeros(4))
        left, proved = certifier.nominal.sound(pixels, predicted, computed)
        found = certifier.run(pixels)
        assert found.rounding == tuple("proved" if one else "checked" for one in proved.tolist())
        for i, image in enumerate(pixels.flatten(1).tolist()):
            y, other = int(predicted[i]), 1 - int(predicted[i])
            logits = network.exact(image)
            true = logits[y] - logits[other]
            assert abs(Fraction(computed[i, other].item()) - true) <= Fraction(lost[i, other].item())
            assert lost[i, other] <= 1e-13 * (1 + size) * 4 ** len(network.layers)
            assert proved[i] == (lost[i, other] <= 1e-3 * computed[i, other])
            assert not proved[i] or Fraction(left[i, other].item()) <= true
        assert size > 1e4 or proved.any()


def test_operations_without_a_rule_count_as_noisy_and_do_not_stop_the_check() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x.flatten(1)[:, None])[0][:, 0]

    wrapped = lipcert.load(Odd(), mean=(0.0,), std=(1.0,), input_size=(1, 2, 2)).double()
    found = Certifier(wrapped, 0.1, "anchored").run(image())
    assert 0 < found.radius.item() < 10


def test_single_operations_round_no_more_than_their_rules_say() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 4, generator=generator, dtype=torch.float64) * torch.tensor([1e8, 1.0, 1e-8, 1e3]).double()
    check = Certifier(model(lambda x: nn.functional.linear(x, weight)), 0.1, "global").nominal
    graph = check.graph
    (node,) = [node for node in graph.nodes if node.op == "linear"]
    for seed in range(20):
        pixels = torch.rand(1, 1, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        result = nn.functional.linear(pixels.flatten(1), weight)
        known: dict[Node, Tensor] = evaluate(graph.nodes, {graph.input: pixels})
        values = {n: value[None] for n, value in known.items() if n.shape}
        said = check.local.errors(values)[node].item()
        exact = [
            sum((Fraction(a) * Fraction(v) for a, v in zip(row, pixels.flatten().tolist(), strict=True)), Fraction())
            for row in weight.tolist()
        ]
        off = float(sum((Fraction(v) - t) ** 2 for v, t in zip(result[0].tolist(), exact, strict=True))) ** 0.5
        assert off <= said < 1e-3


SMOOTH = SmoothProject(4, 0.7, channels_first=True)
SIGNS = torch.tensor([1.0, -1.0], dtype=torch.float64)
SINGLE: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum, a summed axis of size 1": lambda x: torch.einsum("dn,nd->n", x.tanh().mT, x[:, :1]),
    "einsum, the other one": lambda x: torch.einsum("nd,nd->n", x[:, :1], x.tanh()),
    "einsum, both": lambda x: torch.einsum("bij,bij->b", x.reshape(-1, 2, 2)[:, :1], x.reshape(-1, 2, 2)[:, :, :1]),
    "einsum, a batch of size 1": lambda x: torch.einsum("bhi,bhj->bhij", x.reshape(-1, 2, 2), x.tanh()[:, None, :3]),
    "einsum, an outer product": lambda x: torch.einsum("bi,bj->bij", x, x.tanh()),
    "matmul, broadcast": lambda x: x.reshape(-1, 1, 2, 2) @ x.reshape(-1, 2, 2, 1),
    "mul, broadcast": lambda x: x.reshape(-1, 2, 2) * x.reshape(-1, 2, 2)[:, :1],
    "mul, both broadcast": lambda x: x[:, :, None] * x[:, None],
    "div, broadcast": lambda x: x.reshape(-1, 2, 2) / (1 + x.reshape(-1, 2, 2)[:, :1].square()),
    "div, a numerator broadcast": lambda x: x[:, :1] / (1 + x.square()),
    "conv1d, a kernel of the image": lambda x: nn.functional.conv1d(x[:, None], x.reshape(1, 1, 4)[..., :2]),
    "softmax": lambda x: (8 * x).softmax(1),
    "var": lambda x: x.var(1),
    "norm": lambda x: x.norm(dim=1),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (4,), torch.tensor([3.0, 1, 1, 0.1]).double()),
    "rms_norm": lambda x: nn.functional.rms_norm(x - 0.3, (4,), torch.tensor([3.0, 1, 1, 0.1]).double(), 1e-6),
    "normalize": lambda x: nn.functional.normalize(x - 0.3, dim=1),
    "gelu": lambda x: nn.functional.gelu(3 * x),
    "unbind": lambda x: torch.stack(x.tanh().unbind(1)[::-1], 1),
    "softmax of large numbers": lambda x: (300 * x).softmax(1),
    "softmax of two": lambda x: (2 * x.reshape(-1, 2, 2)).softmax(2),
    "softmax along another axis": lambda x: (3 * x.reshape(-1, 2, 2)).softmax(1),
    "softmax of one": lambda x: x[:, :, None].softmax(2),
    "group_norm": lambda x: nn.functional.group_norm(x, 1, torch.tensor([3.0, 1, 1, 0.1]).double()),
    "matmul": lambda x: x.reshape(-1, 2, 2) @ x.reshape(-1, 2, 2).tanh(),
    "matmul, squared": lambda x: x.reshape(-1, 2, 2) @ x.reshape(-1, 2, 2),
    "matmul with zeros": lambda x: x.reshape(-1, 2, 2) @ (0 * x.reshape(-1, 2, 2).tanh()),
    "smooth projection": SmoothProject(4, 0.7),
    "smooth projection of channels": lambda x: SMOOTH(x.reshape(-1, 4, 1, 1)),
    "mul, whole numbers of both signs": lambda x: x[:, :, None] * torch.tensor([1, -1]),
    "mul, the smallest int8": lambda x: x[:, :, None] * torch.tensor([1, -128, 127], dtype=torch.int8),
    "mul, true and false": lambda x: x[:, :, None] * torch.tensor([True, False, True]),
    "div, whole numbers of both signs": lambda x: x[:, :, None] / torch.tensor([1, -2]),
    "addcmul, both signs": lambda x: torch.addcmul(SIGNS, x[:, :, None], -3 * SIGNS),
    "einsum, both signs": lambda x: torch.einsum("ni,ij->nij", x, torch.stack([SIGNS] * 4)),
    "matmul, both signs": lambda x: x.reshape(-1, 2, 2) @ torch.stack([SIGNS, -SIGNS]),
    "conv1d, both signs": lambda x: nn.functional.conv1d(x[:, None], SIGNS.reshape(1, 1, 2), padding=1),
    "sub, its own mirror image": lambda x: torch.sub(x, x.flip(1), alpha=-2),
    "batch_norm, a negative variance": lambda x: nn.functional.batch_norm(
        x, torch.zeros(4).double(), torch.tensor([-0.999e-5, -0.5e-5, 1.0, 0.0]).double(), -torch.ones(4).double()
    ),
    "getitem, from the end": lambda x: x[:, torch.tensor([-1, 0, -1, -1])],
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 0, 3])),
    "avg_pool2d, a negative divisor": lambda x: nn.functional.avg_pool2d(
        x.reshape(-1, 1, 2, 2), 2, 1, 1, divisor_override=-2
    ),
    "interpolate, bicubic": lambda x: nn.functional.interpolate(x.reshape(-1, 1, 2, 2), (5, 3), mode="bicubic"),
    "pad, reflected": lambda x: nn.functional.pad(x.reshape(-1, 1, 2, 2), (1, 1, 1, 1), mode="reflect"),
    "var, a small divisor": lambda x: (x - 0.4).var(1, keepdim=True, correction=3),
    "var, of pairs": lambda x: x.reshape(-1, 2, 2).var(1, correction=0),
}
# How much larger than the norms of their Jacobians the bounds of these operations may be.
CLOSE = {
    "softmax": 1.2, "softmax of large numbers": 1.3, "layer_norm": 2.0, "rms_norm": 2.0, "group_norm": 2.0,
    "matmul, broadcast": 2.0, "matmul, squared": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("name", SINGLE)
def test_gains_of_single_operations_are_upper_bounds(name: str) -> None:
    method = Anchored(model(lambda x: SINGLE[name](x).reshape(len(x), -1)))
    for pixels in (PIXELS, (0.9, 0.1, 0.2, 0.6)):
        for link, (exact, gain) in gains_hold(method, image(pixels)).items():
            answer = method.network.local.answers[link.node]
            direct = isinstance(answer, Jacobian) and (answer.absolute is not None or answer.norm is not None)
            if direct and method.network.local.bounded(link):
                assert gain <= exact * (CLOSE.get(name, 1.0) + 1e-6), link.node


def test_every_affine_operation_says_how_its_matrix_is_bounded() -> None:
    assert {op for op, rule in RULES.items() if rule.linear is not None} == {op for op in RULES if RULES[op].schur}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


AFFINE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: nn.functional.linear(x.repeat(1, 100), _random(3, 400)),
    "linear, an image as weight": lambda x: nn.functional.linear(_random(90, 2), x.reshape(2, 2)),
    "matmul, broadcast": lambda x: _random(90, 2, 2) @ x.reshape(-1, 2, 2),
    "mul, broadcast": lambda x: x[:, None] * _random(200, 4),
    "einsum, two axes": lambda x: torch.einsum(
        "bcd,ecd->be", x.repeat(1, 100).reshape(-1, 20, 20), _random(400, 20, 20)
    ),
    "einsum, repeated": lambda x: torch.einsum("bi,ci->bci", x.reshape(-1, 1), _random(90, 4)),
    "conv2d": lambda x: nn.functional.conv2d(
        x.reshape(-1, 4, 1, 1).repeat(1, 25, 2, 2), _random(9, 100, 3, 3), padding=1
    ),
    "conv1d, an image as kernel": lambda x: nn.functional.conv1d(_random(1, 1, 300), x.reshape(1, 1, 4)),
    "mean": lambda x: x.repeat(1, 100).mean(1),
    "sum": lambda x: x.repeat(1, 100).sum(1),
    "an entry read many times": lambda x: x.repeat(1, 100)[:, torch.zeros(400, dtype=torch.long)],
    "an entry repeated many times": lambda x: x.repeat(1, 100).repeat_interleave(torch.tensor([300] + [1] * 399), 1),
    "pad, replicated": lambda x: nn.functional.pad(x.repeat(1, 100)[:, None], (300, 0), mode="replicate"),
    "avg_pool2d": lambda x: nn.functional.avg_pool2d(x.repeat(1, 36).reshape(-1, 1, 12, 12), 11, 1, 5),
    "interpolate": lambda x: nn.functional.interpolate(x.reshape(-1, 1, 2, 2), (30, 40), mode="bicubic"),
    "interpolate, antialiased": lambda x: nn.functional.interpolate(
        x.repeat(1, 100).reshape(-1, 1, 20, 20), (2, 30), mode="bicubic", antialias=True
    ),
    "unfold": lambda x: nn.functional.unfold(x.repeat(1, 36).reshape(-1, 1, 12, 12), 7),
    "fold": lambda x: nn.functional.fold(x.repeat(1, 9).reshape(-1, 9, 4), (4, 4), 3),
    "batch_norm": lambda x: nn.functional.batch_norm(x, _random(4), _random(4).square(), _random(4)),
}  # fmt: skip


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", AFFINE)
def test_sums_have_no_more_terms_than_counted(name: str) -> None:
    """Against the dense matrix: its norm, and the numbers of entries in its rows and columns."""
    network = Anchored(model(lambda x: AFFINE[name](x).reshape(1, -1))).network
    values, seen = network.values(image()[:, None]), 0
    for node, answer in network.local.answers.items():
        if not isinstance(answer, Schur):
            continue
        for place, operand in enumerate(node.operands):
            fixed = {other: values[other][0] for other in node.operands}

            def single(
                x: Tensor, node: Node = node, operand: Node = operand, fixed: dict[Node, Tensor] = fixed
            ) -> Tensor:
                return evaluate((node,), {**fixed, operand: x})[node]

            matrix = torch.autograd.functional.jacobian(single, fixed[operand], vectorize=True).reshape(
                node.entries, operand.entries
            )
            gain, kappa = schur_bounds(answer, node, place, values)
            terms = max((matrix != 0).sum(0).max().item(), (matrix != 0).sum(1).max().item())
            assert torch.linalg.matrix_norm(matrix.abs(), 2).item() <= gain * (1 + 1e-12)
            assert kappa >= terms * 2.0**-53 * gain
            seen += 1
    assert seen


@pytest.mark.parametrize("method", ["lofast", "anchored", "staged"])
def test_an_affine_operation_of_a_users_own(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cross product with (1, 1, 1) subtracts without a negative constant: with absolute values it would be 0."""
    ones = torch.ones(1, 3, dtype=torch.float64)
    monkeypatch.setitem(RULES, "linalg_cross", Rule("linalg_cross"))
    lipcert.bounds.rule(torch.linalg.cross, linear=True)(lambda call, x, y: x.bounded(x.lip * 2.0))
    net = model(lambda x: 0.5 - torch.linalg.cross(x[:, :3], ones.expand(len(x), 3)).square().sum(1, keepdim=True))
    radius = lipcert.certify(net, image(), eps=0.01, method=method).radius.item()
    assert 0.01 < radius < math.sqrt(1 / 6) - math.sqrt(1 / 8)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.marker = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(3 * x.reshape(-1, 2, 2))[0].flatten(1)


def test_norms_of_operations_without_bounds_are_found_and_charged() -> None:
    method = Anchored(lipcert.load(Recurrent(), mean=(0.0,), std=(1.0,), input_size=(1, 1, 4)).double())
    (lstm,) = method.finder.plan.links
    assert not method.network.local.bounded(lstm)
    values = method.network.values(image(PIXELS).reshape(1, 1, 1, 1, 4))
    assert method.network.local(values).gains[lstm].isinf()
    ledger = method.finder.ledger(1)
    norms = method.finder(values, ledger)
    assert norms.rounded.off[lstm] > 0
    exact, _ = gains_hold(method, image(PIXELS).reshape(1, 1, 1, 4))[lstm]
    found = method.network.local(values, {lstm: torch.tensor([exact])})
    assert exact < found.gains[lstm].item() < math.inf
