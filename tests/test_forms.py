"""Operations that a network writes out are known as the operations they amount to, and nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from timm.layers.fast_norm import rms_norm2d
from torch import Tensor, nn

from lipcert.attacks import PGD
from lipcert.bounds import analyze, canonical_forms
from lipcert.certifier import Certifier
from lipcert.certifier._lofast import LoFAST
from lipcert.errors import UnsupportedOperation
from lipcert.graph import capture, examples, needed
from lipcert.model import Model
from lipcert.surgery import LayerProject, MaxMin, RmsLayerProject, RmsSmoothProject, SmoothProject

D, R = 8, 1.3
Map = Callable[[Tensor], Tensor]


class Written(nn.Module):
    """A function as a module."""

    def __init__(self, function: Map):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def network(part: nn.Module | Map, channels_first: bool = False) -> Model:
    """Two tokens of 8 entries through a matrix, the part, and a head."""
    torch.manual_seed(0)
    first, head = nn.Linear(6, D), nn.Linear(2 * D, 3)
    with torch.no_grad():
        first.weight.mul_(2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = first, head
            self.part = part if isinstance(part, nn.Module) else Written(part)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.flatten(1).reshape(-1, 2, 6))
            x = x.transpose(1, 2) if channels_first else x
            return self.head(self.part(x).flatten(1))

    return Model(Net(), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 2, 2)).double().eval()


def found(model: Model) -> tuple[str, ...]:
    """The forms that the analysis recognised, without their places."""
    return tuple(form.split(" at ")[0] for form in analyze(model).graph.forms)


def erf_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


def soft(x: Tensor) -> Tensor:
    x = torch.exp(x - x.max(-1, keepdim=True).values)
    return x / x.sum(-1, keepdim=True)


def attention(x: Tensor) -> Tensor:
    q, k, v = x, x.flip(-1), x.roll(1, -1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(D) + torch.arange(4.0).reshape(2, 2).to(x)
    return soft(scores) @ v


def fused_attention(x: Tensor) -> Tensor:
    q, k, v = x, x.flip(-1), x.roll(1, -1)
    return F.scaled_dot_product_attention(q, k, v, torch.arange(4.0).reshape(2, 2).to(x))


def square_sum(x: Tensor, dim: int = -1) -> Tensor:
    return x.pow(2).sum(dim, keepdim=True)


def standard(x: Tensor) -> Tensor:
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    return (x - u) / torch.sqrt(s + 1e-2)


def max_min(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    above = torch.relu(a - b)
    return torch.cat((b + above, a - above), -1)


FORMS: dict[str, tuple[str, Map, nn.Module | Map]] = {
    "smooth": ("rms_norm", lambda x: x / torch.sqrt(1 + square_sum(x)), RmsSmoothProject(D, 1.0, bias=False)),
    "smooth, radius": (
        "rms_norm",
        lambda x: x * torch.rsqrt(1 + square_sum(x / R)),
        RmsSmoothProject(D, R, bias=False),
    ),
    "smooth, by its norm": (
        "rms_norm",
        lambda x: R * x / (x.norm(dim=-1, keepdim=True) ** 2 + R * R).sqrt(),
        RmsSmoothProject(D, R, bias=False),
    ),
    "smooth, inverted": (
        "rms_norm",
        lambda x: x.mul((x * x).sum(-1).unsqueeze(-1).div(R**2).add(1).pow(-0.5)),
        RmsSmoothProject(D, R, bias=False),
    ),
    "smooth, centred": (
        "layer_norm",
        lambda x: (x - x.mean(-1, keepdim=True)) / (1 + square_sum(x - x.mean(-1, keepdim=True)) / R**2) ** 0.5,
        SmoothProject(D, R, bias=False),
    ),
    "rms": (
        "rms_norm",
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.01),
        lambda x: F.rms_norm(x, (D,), None, 0.01),
    ),
    "layer": ("layer_norm", standard, lambda x: F.layer_norm(x, (D,), None, None, 0.01)),
    "layer, var": (
        "layer_norm",
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 0.01).sqrt(),
        lambda x: F.layer_norm(x, (D,), None, None, 0.01),
    ),
    "layer, moments": (
        "layer_norm",
        lambda x: (x - x.mean(-1, True)) * torch.rsqrt((x * x).mean(-1, True) - x.mean(-1, True).square() + 0.01),
        lambda x: F.layer_norm(x, (D,), None, None, 0.01),
    ),
    "normalize": (
        "normalize",
        lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(0.3),
        lambda x: F.normalize(x, dim=-1, eps=0.3),
    ),
    "projection": (
        "normalize",
        lambda x: x * (R / square_sum(x).clamp(min=R * R).sqrt()),
        RmsLayerProject(D, R, bias=False),
    ),
    "softmax": ("softmax", soft, lambda x: x.softmax(-1)),
    "softmax, plain": ("softmax", lambda x: x.exp() * (1 / x.exp().sum(-1, True)), lambda x: x.softmax(-1)),
    "gelu": ("gelu", erf_gelu, nn.GELU()),
    "gelu, tanh": ("gelu", tanh_gelu, nn.GELU("tanh")),
    "silu": ("silu", lambda x: x * torch.sigmoid(x), nn.SiLU()),
    "silu, exp": ("silu", lambda x: x / (1 + torch.exp(-x)), nn.SiLU()),
    "max_min": ("MaxMin", max_min, MaxMin(-1)),
    "max_min, sliced": (
        "MaxMin",
        lambda x: torch.cat((torch.maximum(x[..., :4], x[..., 4:]), torch.minimum(x[..., 4:], x[..., :4])), -1),
        MaxMin(-1),
    ),
}
CHANNELS_FIRST: dict[str, tuple[str, Map, nn.Module | Map]] = {
    "rms, timm's own for images": (
        "rms_norm",
        lambda x: rms_norm2d(x[..., None], [D], None, 0.01)[..., 0],
        lambda x: F.rms_norm(x.transpose(1, 2), (D,), None, 0.01).transpose(1, 2),
    ),
    "normalisation to another length": (
        "normalize",
        lambda x: x / torch.maximum(x.norm(dim=1, keepdim=True), torch.tensor(R).to(x)) * R,
        lambda x: F.normalize(x, dim=1, eps=torch.tensor(R).item()) * R,
    ),
    "all entries": (
        "layer_norm",
        lambda x: (x - x.mean((1, 2), keepdim=True)) / (x.var((1, 2), correction=0, keepdim=True) + 0.01).sqrt(),
        lambda x: F.group_norm(x, 1, eps=0.01),
    ),
}
METHODS = ("gloro", "local", "lofast", "anchored")


def images(count: int = 2) -> Tensor:
    return torch.rand(count, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def doubled(part: nn.Module | Map) -> nn.Module | Map:
    """Modules hold their numbers in float64, as the functions do."""
    if isinstance(part, (LayerProject, SmoothProject)):
        part = part.double()
        part.radius = torch.tensor(R if float(part.radius) != 1 else 1.0, dtype=torch.float64)
    return part


@pytest.mark.parametrize("channels_first", [False, True])
def test_written_out_is_as_good_as_named(channels_first: bool) -> None:
    """The same radii to 1 % with every method, of a form's other spellings by one; an attack finds nothing inside."""
    forms = set()
    for spelling, (name, written, named) in (CHANNELS_FIRST if channels_first else FORMS).items():
        one, other = network(written, channels_first), network(doubled(named), channels_first)
        torch.testing.assert_close(one(images()), other(images()), rtol=1e-6, atol=1e-6)
        assert found(one)[-1] == name, spelling
        best = torch.zeros(2, dtype=torch.float64)
        methods = ("anchored",) if name in forms else METHODS
        forms.add(name)
        for method in methods:
            radius = Certifier(one, 0.01, method).run(images()).radius
            expected = Certifier(other, 0.01, method).run(images()).radius
            assert (radius >= 0.99 * expected).all(), (spelling, method, radius, expected)
            assert (expected >= 0.99 * radius).all() or name == "RmsLayerProject", (spelling, method, radius, expected)
            best = torch.maximum(best, radius)
        assert (best > 0).all(), spelling
        attacked = PGD(steps=20, restarts=1)(one, images(), one(images()).argmax(1), best)
        assert not attacked.broken.any(), (spelling, best, attacked.distance)


def test_attention_written_out_is_as_good_as_fused() -> None:
    one, other = network(attention), network(fused_attention)
    assert found(one) == ("softmax", "softmax", "scaled_dot_product_attention")
    for method in METHODS:
        radius, expected = (Certifier(model, 0.01, method).run(images()).radius for model in (one, other))
        torch.testing.assert_close(radius, expected, rtol=0.01, atol=0)


def used_twice(x: Tensor) -> Tensor:
    norm = torch.sqrt(1 + square_sum(x))
    return x / norm + norm


def two_sources(x: Tensor) -> Tensor:
    return x.flip(-1) / torch.sqrt(1 + square_sum(x))


NEAR_MISSES: dict[str, Map] = {
    "another axis": lambda x: x / torch.sqrt(1 + square_sum(x, 1)).mean(-1, keepdim=True),
    "eps outside the root": lambda x: x / (square_sum(x).clamp_min(0.01).sqrt() + 0.1),
    "no eps": lambda x: x / (square_sum(x) + 0.0).clamp_min(0.01),
    "uncentred over its deviation": lambda x: x / (x.var(-1, keepdim=True) + 0.1).sqrt(),
    "centred over its length": lambda x: (x - x.mean(-1, True)) / (1 + square_sum(x)).sqrt(),
    "the mean of another axis": lambda x: (x - x.mean(1, True)) / (x.var(-1, keepdim=True) + 0.1).sqrt(),
    "the root is used elsewhere": used_twice,
    "of another value": two_sources,
    "the cube root": lambda x: x / (1 + square_sum(x)) ** (1 / 3),
    "minus": lambda x: -x / torch.sqrt(1 + square_sum(x)) if False else x * (1 + square_sum(x)).pow(-1.0),
    "a weight before the product": lambda x: (x * torch.arange(1.0, 9.0).to(x)) / torch.sqrt(1 + square_sum(x)),
    "a norm of order 1": lambda x: x / (1 + x.abs().sum(-1, keepdim=True)),
    "erf of another constant": lambda x: 0.5 * x * (1 + torch.erf(x / 1.4142)),
    "tanh of other constants": lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    "another slope": lambda x: x * torch.sigmoid(1.702 * x),
    "a gate of another value": lambda x: x * torch.sigmoid(x.flip(-1)),
    "the smaller first": lambda x: torch.cat((torch.minimum(*x.chunk(2, -1)), torch.maximum(*x.chunk(2, -1))), -1),
    "halves of other sizes": lambda x: torch.cat((torch.maximum(x[..., 1:5], x[..., 4:]), x[..., :4]), -1),
    "neither a nor b": lambda x: x + torch.relu(x - x.flip(-1)),
}


@pytest.mark.parametrize("spelling", NEAR_MISSES)
def test_near_misses_stay_as_they_are(spelling: str) -> None:
    assert not found(network(NEAR_MISSES[spelling])), spelling


def test_softmax_over_the_sum_along_another_axis_has_no_rule() -> None:
    with pytest.raises(UnsupportedOperation, match="exp"):
        analyze(network(lambda x: x.exp() / x.exp().sum(1, keepdim=True).mean(-1, keepdim=True)))


def test_a_shift_that_is_not_constant_along_the_axis_stays() -> None:
    def shifted(x: Tensor) -> Tensor:
        return (x - x.amax(1, keepdim=True)).softmax(-1)

    assert not found(network(shifted))


def test_a_detached_factor_counts_in_full() -> None:
    """It moves with the image, whatever autograd makes of it."""
    detached = network(lambda x: x / torch.sqrt(1 + square_sum(x)).detach())
    plain = network(lambda x: x / torch.sqrt(1 + square_sum(x)))
    radii = [Certifier(model, 0.01, "anchored").run(images()).radius for model in (detached, plain)]
    torch.testing.assert_close(*radii, rtol=0, atol=0)


def test_a_network_that_answers_otherwise_on_one_image_is_left_alone() -> None:
    """The replay decides: where exponentials overflow, the written softmax has another value than the named one."""
    graph = needed(capture(network(lambda x: x.exp() / x.exp().sum(-1, keepdim=True)), images()[:1]))
    assert canonical_forms(graph, "remainder", examples(images()[:1])).forms == ("softmax at net.part",)
    assert not canonical_forms(graph, "remainder", [images()[:1], images()[:1] * 1e4]).forms


def test_places_inside_a_form_stay() -> None:
    """What ``at`` names is the value of the network as it is written."""

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = 3 * x
            return x - x.mean(-1, keepdim=True)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            return x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt()

    model = network(Outer())
    assert LoFAST(model, at="part.inner").network.source.op == "sub"
    assert "sub" not in [node.op for node in LoFAST(model).network.graph.nodes if node.path == "net.part.inner"]


def test_rounding_bounds_are_those_of_the_network_as_written() -> None:
    """With a dtype, what rounds is every operation that the network runs."""
    written = Certifier(network(FORMS["rms"][1]), 0.01, "anchored", dtype="float32").run(images())
    real = Certifier(network(FORMS["rms"][1]), 0.01, "anchored").run(images())
    assert (written.radius <= real.radius).all()
    ops = [node.op for node in needed(capture(network(FORMS["rms"][1]), images()[:1])).nodes]
    assert "rms_norm" not in ops


def test_margins_are_the_smaller_of_both_evaluations() -> None:
    """Large means cancel in a variance by moments: what that costs the written network is taken off."""

    def moments(x: Tensor) -> Tensor:
        x = x + 1e6
        mean = x.mean(-1, True)
        return (x - mean) * torch.rsqrt((x * x).mean(-1, True) - mean * mean + 10.0)

    model = network(moments)
    certifier = Certifier(model, 0.01, "gloro")
    result = certifier.run(images())
    exact = network(lambda x: F.layer_norm(x, (D,), None, None, 10.0))
    logits = exact(images())
    top = logits.topk(2).values
    if found(model):
        bounds = certifier.subject.margins.of(result.predicted)
        allowed = (top[:, 0] - top[:, 1]) / bounds.amax(1)
        assert (result.radius <= allowed * (1 + 1e-3)).all() or (result.radius == 0).all()
