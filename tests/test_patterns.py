"""Operations that a network writes out are known as the operations they amount to, and nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import Function
from timm.layers.fast_norm import rms_norm2d
from torch import Tensor, nn

from lipcert.attacks import PGD
from lipcert.bounds import analyze, canonical_forms
from lipcert.certifier import Certifier
from lipcert.certifier._lofast import LoFAST
from lipcert.errors import UnsupportedOperation
from lipcert.graph import capture, examples, needed
from lipcert.model import Model
from lipcert.surgery import LayerProject, RmsLayerProject, RmsSmoothProject, SmoothProject

D, R = 8, 1.3
Map = Callable[[Tensor], Tensor]


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
            self.part = part if isinstance(part, nn.Module) else Function(part)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.flatten(1).reshape(-1, 2, 6))
            x = x.transpose(1, 2) if channels_first else x
            return self.head(self.part(x).flatten(1))

    return Model(Net(), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 2, 2)).double().eval()


def found(model: Model) -> tuple[str, ...]:
    """The forms that the analysis recognised, without their places."""
    return tuple(form.split(" at ")[0] for form in analyze(model).graph.forms)


def attention(x: Tensor) -> Tensor:
    q, k, v = x, x.flip(-1), x.roll(1, -1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(D) + torch.arange(4.0).reshape(2, 2).to(x)
    return scores.softmax(-1) @ v


def fused_attention(x: Tensor) -> Tensor:
    q, k, v = x, x.flip(-1), x.roll(1, -1)
    return F.scaled_dot_product_attention(q, k, v, torch.arange(4.0).reshape(2, 2).to(x))


def square_sum(x: Tensor, dim: int = -1) -> Tensor:
    return x.pow(2).sum(dim, keepdim=True)


def convnext(x: Tensor) -> Tensor:
    """LayerNorm over channels, as in the code of the ConvNeXt paper."""
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    return (x - u) / torch.sqrt(s + 0.01)


class Radius:
    """What the projections read."""

    radius = torch.tensor(R, dtype=torch.float64)


RADIUS: Any = Radius()
FORMS: dict[str, tuple[str, Map, nn.Module | Map]] = {
    "smooth": ("rms_norm", lambda x: x / torch.sqrt(1 + square_sum(x)), RmsSmoothProject(D, 1.0, bias=False)),
    "smooth, radius": (
        "rms_norm",
        lambda x: x * torch.rsqrt(1 + square_sum(x / R)),
        RmsSmoothProject(D, R, bias=False),
    ),
    "smooth, centred": (
        "layer_norm",
        lambda x: SmoothProject.project(RADIUS, x - x.mean(-1, keepdim=True)),
        SmoothProject(D, R, bias=False),
    ),
    "rms": (
        "rms_norm",
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.01),
        lambda x: F.rms_norm(x, (D,), None, 0.01),
    ),
    "projection": (
        "normalize",
        lambda x: LayerProject.project(RADIUS, x),
        RmsLayerProject(D, R, bias=False),
    ),
}
CHANNELS_FIRST: dict[str, tuple[str, Map, nn.Module | Map]] = {
    "rms, timm's own for images": (
        "rms_norm",
        lambda x: rms_norm2d(x[..., None], [D], None, 0.01)[..., 0],
        lambda x: F.rms_norm(x.transpose(1, 2), (D,), None, 0.01).transpose(1, 2),
    ),
    "layer, ConvNeXt's own": (
        "layer_norm",
        convnext,
        lambda x: F.layer_norm(x.transpose(1, 2), (D,), None, None, 0.01).transpose(1, 2),
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
            assert (expected >= 0.99 * radius).all(), (spelling, method, radius, expected)
            best = torch.maximum(best, radius)
        assert (best > 0).all(), spelling
        attacked = PGD(steps=20, restarts=1)(one, images(), one(images()).argmax(1), best)
        assert not attacked.broken.any(), (spelling, best, attacked.distance)


def test_attention_written_out_is_as_good_as_fused() -> None:
    one, other = network(attention), network(fused_attention)
    assert found(one) == ("scaled_dot_product_attention",)
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
    "a radius per entry": lambda x: x / torch.sqrt(1 + square_sum(x / torch.arange(1.0, 9.0).to(x))),
    "a mean over both axes": lambda x: (x - x.mean((1, 2), True)) * torch.rsqrt(1 + square_sum(x)),
    "a third power": lambda x: x / torch.sqrt(1 + x.pow(3).sum(-1, keepdim=True).square()),
    "a weighted root": lambda x: x * (torch.arange(1.0, 9.0).to(x) * torch.rsqrt(1 + square_sum(x))),
    "keys of other rows": lambda x: (x @ x.flip(-1).mT).softmax(-2) @ x,
    "a negative scale": lambda x: (x @ x.flip(-1).mT * -1.0).softmax(-1) @ x,
    "weights that are read elsewhere": lambda x: (w := (x @ x.mT).softmax(-1)) @ x + w.sum((1, 2), True),
}


@pytest.mark.parametrize("spelling", NEAR_MISSES)
def test_near_misses_stay_as_they_are(spelling: str) -> None:
    assert not found(network(NEAR_MISSES[spelling])), spelling


def test_functions_written_out_of_exponentials_have_no_rule() -> None:
    with pytest.raises(UnsupportedOperation, match="erf"):
        analyze(network(lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))))


def test_a_detached_factor_counts_in_full() -> None:
    """It moves with the image, whatever autograd makes of it."""
    detached = network(lambda x: x / (1 + square_sum(x)).detach())
    plain = network(lambda x: x / (1 + square_sum(x)))
    radii = [Certifier(model, 0.01, "anchored").run(images()).radius for model in (detached, plain)]
    torch.testing.assert_close(*radii, rtol=1e-9, atol=0)


def test_a_network_that_answers_otherwise_on_one_image_is_left_alone() -> None:
    """The replay decides: where squares overflow, the written normalisation has another value than the named one."""
    graph = needed(capture(network(FORMS["smooth, centred"][1]), images()[:1]))
    assert canonical_forms(graph, "remainder", examples(images()[:1])).forms == ("layer_norm at net.part",)
    assert not canonical_forms(graph, "remainder", [images()[:1], images()[:1] * 1e200]).forms


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
