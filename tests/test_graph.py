"""Capturing: the recorded operations are the network, on every image, or there is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import einops
import pytest
import timm
import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import seeded
from torch import Tensor, nn

import lipcert
from lipcert.bounds import analyze, explicit_maxima
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph import Graph, Node, _forms, canonical, capture, needed

SIZE = (1, 3, 4, 4)


def image(seed: int = 0, size: tuple[int, ...] = SIZE) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed))


def same_on_other_images(module: nn.Module, graph: Graph, size: tuple[int, ...]) -> None:
    """Replays agree with the module up to float32 rounding, on images it was not captured with, twice."""
    for seed in (1, 2, 1):
        other = image(seed, size) * 3 - 1
        with torch.no_grad():
            torch.testing.assert_close(graph.replay(other), module(other), rtol=1e-4, atol=1e-5)


def check_order(graph: Graph) -> None:
    """Every node comes after what it reads, and only once."""
    seen: set[Node] = set()
    for node in graph.nodes:
        assert set(node.operands) <= seen
        assert node not in seen
        seen.add(node)
    assert graph.output in seen


MODELS = [
    ("test_vit", {}),
    ("test_vit2", {}),
    ("test_resnet", {}),
    ("test_convnext", {}),
    ("test_efficientnet", {}),
    ("test_nfnet", {}),
    ("test_mambaout", {}),
    (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "window_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)},
    ),
    ("gmixer_12_224", {"img_size": 64}),
    ("mvitv2_tiny", {"img_size": 64}),
    ("densenet121", {"block_config": (2, 2), "growth_rate": 4}),
    ("mobilenetv3_small_050", {}),
    ("regnetx_002", {}),
]


def build(name: str, arguments: dict[str, Any]) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=5, **arguments).eval()
    side = arguments.get("img_size", 160 if name.startswith("test_vit") else 64)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)) and module.weight is not None:
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
    return model, (1, 3, side, side)


@pytest.mark.parametrize(("name", "arguments"), MODELS, ids=[name for name, _ in MODELS])
def test_replays_real_models(name: str, arguments: dict[str, Any]) -> None:
    model, size = build(name, arguments)
    graph = capture(model, image(0, size))
    check_order(graph)
    same_on_other_images(model, graph, size)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_models_with_whole_modules(name: str) -> None:
    model, size = build(name, {})
    whole_names = {"Attention", "Block", "BasicBlock", "ConvNeXtBlock", "LayerNorm2d", "Linear", "Conv2d"}
    graph = capture(model, image(0, size), whole=lambda module: type(module).__name__ in whole_names)
    assert whole_names & {node.name for node in graph.nodes}
    check_order(graph)
    same_on_other_images(model, graph, size)


class Module(nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Outer(nn.Module):
    def __init__(self, *parts: nn.Module):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def keep(*classes: type[nn.Module]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)


def test_a_whole_module_that_returns_its_input() -> None:
    model = Outer(Module(torch.relu), nn.Identity(), nn.Identity(), Module(lambda x: 2 * x))
    graph = capture(model, image(), whole=keep(nn.Identity))
    same_on_other_images(model, graph, SIZE)


def test_whole_modules_in_whole_modules_share_values() -> None:
    model = Outer(Outer(nn.ReLU(), Outer(nn.Identity(), nn.Sigmoid())), Module(lambda x: x + x))
    for whole in (keep(Outer), keep(Outer, nn.Identity), keep(nn.Sigmoid), lambda module: True):
        graph = capture(model, image(), whole=whole)
        same_on_other_images(model, graph, SIZE)


def test_a_whole_module_must_not_know_more_than_its_inputs() -> None:
    class Reader(nn.Module):
        context: Any

        def forward(self, x: Any) -> Any:
            return x + self.context

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader()

        def forward(self, x: Any) -> Any:
            self.reader.context = 100 * x
            return self.reader(x.relu())

    with pytest.raises(UnsupportedOperation, match="not its inputs"):
        capture(Owner().eval(), image(), whole=keep(Reader))
    same_on_other_images(Owner().eval(), capture(Owner().eval(), image()), SIZE)


def test_a_whole_module_must_not_write_into_its_input() -> None:
    model = Outer(Module(lambda x: x * 1), nn.ReLU(inplace=True))
    with pytest.raises(UnsupportedOperation, match="writing into its input"):
        capture(model, image(), whole=keep(nn.ReLU))
    same_on_other_images(model, capture(model, image()), SIZE)


# In-place operations.


def twice(x: Tensor) -> Tensor:
    y = x * 1
    z = y
    z += 3
    y *= 2
    y -= 1
    y /= 4
    y **= 3
    return y + z


def through_functions(x: Tensor) -> Tensor:
    y = x - 0.5
    F.relu(y, inplace=True)
    F.leaky_relu(y, 0.3, True)
    F.hardtanh(y, -0.1, 0.4, True)
    y.add_(1).mul_(y)
    torch.relu_(y)
    F.silu(y, True)
    return y


def rewritten_after_a_view(x: Tensor) -> Tensor:
    y = x.flatten(1)
    y = y.add_(1)
    return y.reshape(x.shape)


@pytest.mark.parametrize("forward", [twice, through_functions, rewritten_after_a_view])
def test_in_place_operations_replay(forward: Callable[[Tensor], Tensor]) -> None:
    module = Module(lambda x: forward(x * 1))
    graph = capture(module, image())
    same_on_other_images(module, graph, SIZE)


def test_in_place_on_the_image_itself_leaves_the_callers_alone() -> None:
    module = Module(lambda x: x.sub_(0.5).div_(0.25).relu_())
    mine = image()
    before = mine.clone()
    graph = capture(module, mine)
    assert torch.equal(mine, before)
    other = image(1)
    torch.testing.assert_close(graph.replay(other.clone()), module(other.clone()))


def hidden_view(x: Any) -> Any:
    """Nothing shows on ordinary images: the relu is dead there."""
    y = x * 1
    y[:, 0].add_(F.relu(x.mean() - 2) * 1000)
    return y


def view_read_later(x: Any) -> Any:
    y = x * 1
    view = y.flatten(1)
    y.add_(0.0)
    return view


def view_of_a_view(x: Any) -> Any:
    y = x * 1
    view = y.reshape(1, -1)[:, :4]
    other = y.reshape(1, -1)
    view.mul_(1.0)
    return other


def dropout_is_an_alias(x: Any) -> Any:
    y = x * 1
    z = F.dropout(y, 0.5, False)
    z.mul_(1.0)
    return y


@pytest.mark.parametrize("forward", [hidden_view, view_read_later, view_of_a_view, dropout_is_an_alias])
def test_writes_through_views_are_refused(forward: Callable[[Any], Any]) -> None:
    """Even where the captured result equals the network's on this image."""
    with pytest.raises(UnsupportedOperation, match="in place through a view"):
        capture(Module(forward), image())


def test_a_constant_that_is_written_to_later() -> None:
    def forward(x: Any) -> Any:
        scale = torch.ones(3, 1, 1)
        y = x * scale
        scale.zero_()
        return y

    with pytest.raises(UnsupportedOperation, match="written to later"):
        capture(Module(forward), image())


def test_writing_the_image_into_a_constant() -> None:
    def assigned(x: Any) -> Any:
        out = torch.zeros(1, 3, 4, 4)
        out[:] = x
        return out

    def added(x: Any) -> Any:
        out = torch.zeros(1, 3, 4, 4)
        out += x
        return out

    for forward in (assigned, added, lambda x: torch.add(x, 1, out=torch.empty(1, 3, 4, 4))):
        with pytest.raises(UnsupportedOperation):
            capture(Module(forward), image())


# What must not leave the graph unseen.

LEAKS: list[Callable[[Any], Any]] = [
    lambda x: x * x.sum().item(),
    lambda x: x * sum(x.flatten().tolist()),
    lambda x: x * float(x.mean()),
    lambda x: x * int(x.mean()),
    lambda x: x * (2 if torch.equal(x, x) else 1),
    lambda x: x * (2 if torch.is_nonzero(x.sum()) else 1),
    lambda x: x if x.mean() > 0 else -x,
    lambda x: x * (2 if torch.allclose(x, x) else 1),
    lambda x: x + (x * 1j).imag,
    lambda x: x + torch.from_numpy(x.numpy()),
    lambda x: [x, 2 * x][bool(x.sum() > 0)],
]


@pytest.mark.parametrize("forward", LEAKS, ids=range(len(LEAKS)))
def test_values_do_not_leak_into_python(forward: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedOperation):
        capture(Module(forward), image())


def test_questions_about_the_form_are_answered() -> None:
    def forward(x: Any) -> Any:
        n, c, h, w = x.shape
        assert (x.size(1), x.dim(), x.ndim, x.numel(), len(x)) == (c, 4, 4, n * c * h * w, n)
        assert x.is_floating_point()
        assert x.dtype == torch.float32
        assert x.type() == "torch.FloatTensor"
        mask = torch.zeros_like(x[:, 0])
        return x + x.new_ones(1) + mask + torch.ones(1, dtype=torch.float64).to(x) + torch.ones(1).type_as(x)

    module = Module(forward)
    graph = capture(module, image())
    same_on_other_images(module, graph, SIZE)


TABLE = torch.rand(4, 4, generator=torch.Generator().manual_seed(5))
EVEN = torch.tensor([True, False, True, False])
# Forward code with casts, and the same on real numbers.
CASTS: list[tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = [
    (lambda x: x.float() / 3, lambda x: x / 3),
    (lambda x: x.half().exp(), lambda x: x.exp()),
    (lambda x: x.bfloat16().to(x.dtype), lambda x: x),
    (lambda x: x.to(torch.float32).tanh().to(x.dtype), lambda x: x.tanh()),
    (lambda x: x.to("cpu", torch.float16, copy=True) + x.to(dtype=torch.bfloat16), lambda x: 2 * x),
    (lambda x: x.type(torch.float32) * x.type(dtype=torch.float16), lambda x: x * x),
    (lambda x: x.type("torch.FloatTensor") + x.type(torch.HalfTensor), lambda x: 2 * x),
    (lambda x: x.exp().to(TABLE) @ TABLE, lambda x: x.exp() @ TABLE.double()),
    (lambda x: torch.matmul(x.type_as(TABLE), TABLE), lambda x: x @ TABLE.double()),
    (lambda x: x.sin().type_as(x.float()), lambda x: x.sin()),
    (lambda x: x.softmax(-1, torch.float32), lambda x: x.softmax(-1)),
    (lambda x: F.softmax(x, dim=-1, dtype=torch.float32), lambda x: x.softmax(-1)),
    (lambda x: torch.sum(x, dim=1, dtype=torch.float32) - x.mean(1, dtype=torch.half), lambda x: x.sum(1) - x.mean(1)),
    (lambda x: x.cumsum(1, dtype=torch.float32), lambda x: x.cumsum(1)),
    (lambda x: x.float() @ (EVEN.float() / 3), lambda x: x @ (EVEN.double() / 3)),
    (lambda x: torch.stack([x.float(), TABLE.expand(x.shape)]), lambda x: torch.stack([x, TABLE.expand(x.shape)])),
    (lambda x: x.half().mul_(2) + x, lambda x: 3 * x),
]


@pytest.mark.parametrize(("forward", "real"), CASTS, ids=range(len(CASTS)))
def test_casts_are_the_identity_in_float64(forward: Callable[[Any], Any], real: Callable[[Tensor], Tensor]) -> None:
    graph = capture(Module(forward), image().double())
    assert all(node.dtype == torch.float64 for node in graph.nodes)
    other = image(1).double()
    torch.testing.assert_close(graph.replay(other), real(other), rtol=1e-14, atol=1e-14)
    replayed, truth = (torch.autograd.functional.jacobian(f, other) for f in (graph.replay, real))
    torch.testing.assert_close(replayed, truth, rtol=1e-13, atol=1e-13)


def test_casts_to_integers_and_other_readings_of_the_bits_stay() -> None:
    whole = capture(Module(lambda x: x.to(torch.int32) + x.long() + x.type(torch.ShortTensor)), image().double())
    assert {node.dtype for node in whole.nodes[1:]} == {torch.int16, torch.int32, torch.int64}
    bits = capture(Module(lambda x: x.view(torch.float32)), image().double())
    assert bits.output.dtype == torch.float32
    assert bits.output.shape == (1, 3, 4, 8)


def test_a_cast_does_not_depend_on_the_value_whose_type_it_takes() -> None:
    graph = capture(Module(lambda x: x.exp().type_as(x.sin())), image())
    assert [operand.op for operand in graph.output.operands] == ["exp"]


def test_constants_in_float32_are_written_where_they_are() -> None:
    def forward(x: Any) -> Any:
        wide, table = torch.ones(4, dtype=torch.float64), torch.zeros(3, 4)
        table[0] = wide
        table[1].add_(wide)
        torch.add(wide, TABLE[0], out=table[2])
        return x.float()[0] @ table.mT

    other = image(1).double()
    truth = other[0] @ torch.stack([torch.ones(4), torch.ones(4), 1 + TABLE[0]]).mT.double()
    torch.testing.assert_close(capture(Module(forward), image().double()).replay(other), truth, rtol=0, atol=1e-6)


class Narrow(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x.float() / 3).to(x.dtype)


def test_a_whole_module_is_replayed_without_its_casts() -> None:
    graph = capture(Outer(Narrow()), image().double(), whole=keep(Narrow))
    assert graph.output.op is Narrow
    other = image(1).double() / 7
    torch.testing.assert_close(graph.replay(other), other / 3, rtol=1e-15, atol=0)
    torch.testing.assert_close(graph.forward(graph.input, other[None], [graph.output], {})[0], other[None] / 3)


def test_results_with_none_keep_their_parts() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()

    def forward(x: Any) -> Any:
        y = x.flatten(1, 2)
        return y + attention(y, y, y, need_weights=False)[0]

    module = Module(forward)
    same_on_other_images(module, capture(module, image()), SIZE)


def test_training_mode_is_refused() -> None:
    for path, part in (("parts.1", nn.Dropout()), ("parts.1", nn.BatchNorm2d(3))):
        model = Outer(nn.ReLU(), part)
        model.parts[1].train()
        with pytest.raises(InputError, match=f"{path} is in training mode"):
            capture(model, image())
    with pytest.raises(InputError, match="training mode"):
        capture(nn.ReLU().train(), image())


def test_what_is_no_classifier() -> None:
    with pytest.raises(InputError, match="one tensor"):
        capture(Module(lambda x: (x, x)), image())
    with pytest.raises(InputError, match="does not depend on the image"):
        capture(Module(lambda x: torch.zeros(1, 3)), image())


def test_unsupported_operations_come_in_one_error_with_their_paths() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Module(torch.exp)
            self.second = Module(torch.sinh)

        def forward(self, x: Any) -> Any:
            return self.first(x) + self.second(x) + self.second(2 * x)

    model = Outer(Stage(), nn.ReLU())
    with pytest.raises(UnsupportedOperation) as caught:
        analyze(model, SIZE[1:])
    assert set(caught.value.operations) == {("exp", "parts.0.first"), ("sinh", "parts.0.second")}
    message = str(caught.value)
    assert "exp at parts.0.first" in message
    assert "sinh at parts.0.second" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("spellings", "name"),
    [
        ((torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__), "add"),
        ((torch.sub, torch.subtract, Tensor.__isub__), "sub"),
        ((torch.div, torch.true_divide, Tensor.__truediv__, Tensor.__itruediv__), "div"),
        ((torch.relu, torch.relu_, F.relu, Tensor.relu), "relu"),
        ((Tensor.view, torch.reshape, torch.flatten, torch.squeeze), "reshape"),
        ((torch.matmul, Tensor.__matmul__, torch.bmm), "matmul"),
        ((F.softmax, torch.softmax, Tensor.softmax), "softmax"),
        ((F.max_pool2d, torch.max_pool2d), "max_pool2d"),
        ((Tensor.__pow__, torch.pow, Tensor.pow_, Tensor.__ipow__), "pow"),
    ],
)
def test_spellings(spellings: tuple[Any, ...], name: str) -> None:
    assert {canonical(spelling) for spelling in spellings} == {name}


def test_functions_from_elsewhere_are_their_own_names() -> None:
    def relu(x: Any) -> Any:
        return x

    assert canonical(relu) is relu
    assert canonical(torch.ops.aten.relu) is torch.ops.aten.relu
    made: dict[str, Any] = {}
    exec("def relu(x): return 100 * x", {}, made)
    assert canonical(made["relu"]) is made["relu"]


def test_capturing_leaves_modules_as_they_were() -> None:
    before = nn.Module._call_impl
    with pytest.raises(UnsupportedOperation):
        capture(Module(lambda x: x * x.sum().item()), image())
    assert nn.Module._call_impl is before


def test_detaching_does_not_hide_a_derivative() -> None:
    """The replay is what certificates differentiate; a detached value still moves with the image."""
    weight = torch.randn(3, 12, dtype=torch.float64)

    class Detached(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.flatten(1)
            return F.linear(h.detach() + 2 * h.data + 3 * h.clone().detach_(), weight)

    images = torch.rand(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    graph = capture(Detached().eval(), images.detach())
    (gradient,) = torch.autograd.grad(graph.replay(images)[0, 1], images)
    assert torch.allclose(gradient.flatten(), 6 * weight[1])


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_recurrent_layer_is_replayed_step_by_step(both: bool, first: bool) -> None:
    layer = nn.LSTM(4, 3, 2, batch_first=first, bidirectional=both).eval()
    model = Module(lambda x: torch.cat([part.flatten() for part in (lambda h, s: (h, *s))(*layer(x[0]))]))
    same_on_other_images(model, capture(model, image()), SIZE)


def test_functions_that_are_replayed_by_others_are_the_same_functions() -> None:
    points = image() * 9 - 4
    for inplace in (False, True):
        graph = capture(Module(lambda x, inplace=inplace: F.hardsigmoid(x, inplace)), points)
        torch.testing.assert_close(graph.replay(points), F.hardsigmoid(points))


@given(st.data())
@settings(max_examples=60)
def test_convolutions_and_their_derivatives_are_those_of_torch(data: st.DataObject) -> None:
    """Replayed in float64, one vector at a time and many at once, whether or not patches fit into memory."""
    two = st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 3)) | st.tuples(st.integers(1, 3))
    kernel = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    how = {"stride": data.draw(two), "padding": data.draw(two), "dilation": data.draw(two)}
    groups = data.draw(st.sampled_from([1, 1, 1, 2]))
    weight = seeded(4, 2 // groups, *kernel)
    bias = seeded(4, seed=1) if data.draw(st.booleans()) else None
    limit = data.draw(st.sampled_from([0, _forms._PATCHES]))

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, weight, bias, groups=groups, **how)

    size = (1, 2, 7, 8)
    images = seeded(*size, seed=2)
    with patch.object(_forms, "_PATCHES", limit):
        graph = capture(Module().eval(), images)
        x = seeded(3, *size, seed=3).requires_grad_()
        (node,) = (node for node in graph.nodes if node.op == "conv2d")
        (result,) = graph.forward(graph.input, x, [node], {})
    truth = F.conv2d(x.flatten(0, 1), weight, bias, groups=groups, **how)[:, None]
    torch.testing.assert_close(result, truth)
    up = torch.zeros_like(result, requires_grad=True)
    v, u = seeded(5, *x.shape, seed=4), seeded(5, *result.shape, seed=5)
    pulled = [torch.autograd.grad(y, x, up, create_graph=True)[0] for y in (result, truth)]
    for many in (False, True):
        keep: Any = {"retain_graph": True, "is_grads_batched": many}
        forth, back = (v, u) if many else (v[0], u[0])
        torch.testing.assert_close(*(torch.autograd.grad(g, up, forth, **keep)[0] for g in pulled))
        torch.testing.assert_close(*(torch.autograd.grad(y, x, back, **keep)[0] for y in (result, truth)))


def test_views_of_results_that_lie_otherwise_in_memory() -> None:
    """Results of convolutions do in a replay; the network itself may ask for this layout."""

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.conv2d(x, seeded(4, 3, 3, 3), None, 1, 1)
            return y.view(1, 2, 2, -1).transpose(1, 2).reshape(1, -1) * y.view(1, -1) + y.view_as(y).flatten(1)

    images = seeded(*SIZE)
    graph = capture(Module().eval(), images)
    (result,) = graph.forward(graph.input, torch.stack([images, 2 * images]), [graph.output], {})
    torch.testing.assert_close(result[0], Module()(images))
    torch.testing.assert_close(result[1], Module()(2 * images))


def test_named_results_keep_their_names() -> None:
    model = Module(lambda x: x.max(dim=1).values)
    same_on_other_images(model, capture(model, image()), SIZE)


def test_the_operations_between_two_values_are_those_on_the_ways_from_one_to_the_other() -> None:
    def forward(x: Tensor) -> Tensor:
        a, b = x.exp(), x.sin()
        c = a * b + x.cos()
        return c.tanh() + a.sigmoid() * c

    graph = needed(capture(Module(forward), image()))

    def ways(node: Node, source: Node) -> list[set[Node]]:
        """The nodes of every way from the source to a node, that node included."""
        if node is source:
            return [set()]
        return [way | {node} for operand in node.operands for way in ways(operand, source)]

    for source in graph.nodes:
        for target in graph.nodes:
            found = ways(target, source)
            assert graph.depends(target, source) == bool(found)
            expected = set().union(*found)
            assert graph.between(source, [target]) == [node for node in graph.nodes if node in expected]
        behind = [node for node in graph.nodes if node is not source and ways(node, source)]
        assert graph.between(source, graph.nodes) == behind


@pytest.mark.parametrize(
    ("function", "relus"),
    [
        (lambda x: torch.cat((torch.maximum(*x.chunk(2, 1)), torch.minimum(*x.chunk(2, 1))), 1), 2),
        (lambda x: torch.cat((x[:, :4].max(x[:, 4:]), x[:, 4:].min(x[:, :4])), 1), 1),
        (lambda x: torch.cat((x[:, 4:] + (x[:, :4] - x[:, 4:]).relu(), x[:, 4:].min(x[:, :4])), 1), 1),
        (lambda x: x[:, :4].max(x[:, 4:]) * (x[:, 4:] - x[:, :4]).relu(), 2),
        (lambda x: torch.maximum(x, 2 * x).min(x), 2),
        (lambda x: torch.maximum(x, x), 0),
        (lambda x: torch.maximum(x, x[:, :1]), 0),
        (lambda x: x[:, 1:5].max(x[:, 0:4]) + x[:, 1:5:1].min(x[:, 4:8]), 2),
    ],
)
def test_maxima_written_out(function, relus):
    """The same values; one relu for all operations on the same two values."""

    graph = needed(capture(Module(function), torch.rand(1, 8)))
    found = needed(explicit_maxima(graph))
    for seed in range(3):
        x = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
        torch.testing.assert_close(found.replay(x), graph.replay(x))
    assert sum(node.op == "relu" for node in found.nodes) == relus


def test_a_replay_keeps_no_value_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the image, which is read at the end, a chain of layers holds the operand of the next one."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))

        def forward(self, x: Tensor) -> Tensor:
            h = x
            for layer in self.layers:
                h = layer(h)
                h.sin()  # nothing reads it
            return h + x

    torch.manual_seed(0)
    net, image, held = Chain().double().eval(), torch.rand(1, 4, dtype=torch.float64), []
    graph, arguments = capture(net, image), Node.arguments
    monkeypatch.setattr(Node, "arguments", lambda node, of: (held.append(len(of.__self__)), arguments(node, of))[1])
    assert torch.equal(graph.replay(image), net(image))
    assert max(held) == 2
    assert torch.equal(graph.replay(2 * image), net(2 * image))


class Einops(nn.Module):
    """Attention in the functions and layers of einops."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4)
        self.embed, self.mixed, self.head = nn.Linear(16, 8), nn.Linear(8, 24), nn.Linear(8, 3)
        self.token = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(self.patches(x))
        tokens, _ = einops.pack([einops.repeat(self.token, "1 1 d -> b 1 d", b=len(x)), tokens], "b * d")
        q, k, v = einops.rearrange(self.mixed(tokens), "b n (three h d) -> three b h n d", three=3, h=2)
        mixed = einops.einsum((q @ k.mT).softmax(-1), v, "b h i j, b h j d -> b i h d")
        return self.head(einops.reduce(mixed, "b n h d -> b (h d)", "mean"))


def test_functions_of_einops_are_recorded() -> None:
    torch.manual_seed(0)
    module, size = Einops().eval(), (1, 1, 8, 8)
    same_on_other_images(module, capture(module, image(size=size)), size)
    model = lipcert.load(module, mean=(0.5,), std=(0.5,), input_size=size[1:])
    assert bool((lipcert.certify(model, image(size=size), eps="1/255", method="anchored").radius > 0).all())
