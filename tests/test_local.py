"""The local certificate: its golden example, norms between masks, boxes, constants and radii against the truth."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import Function, Residual
from torch import Tensor, nn

from lipcert import Model
from lipcert.bounds import MarginBounds, analyze, margins, per_image, radii
from lipcert.bounds._box import Propagation
from lipcert.bounds._masked import core_of
from lipcert.certifier import Local
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph import capture, evaluate
from lipcert.norms import Ledger, verified_norms
from lipcert.surgery import ClippedMaxMin, ClippedReLU, LayerProject, MaxMin

few = settings(max_examples=40, derandomize=True)
SIZE = (1, 8, 8)


def model(*layers: nn.Module, size: tuple[int, int, int] = SIZE, mean: float = 0.5, std: float = 0.5) -> Model:
    channels = size[0]
    return Model(nn.Sequential(*layers), mean=[mean] * channels, std=[std] * channels, input_size=size).double().eval()


def linear(weight: list[list[float]], bias: list[float] | None = None) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None)
    layer.weight.data = torch.tensor(weight)
    if bias is not None:
        layer.bias.data = torch.tensor(bias)
    return layer


def pieces(x: Tensor) -> Tensor:
    """Cuts, differences of two values, a constant side, and a matrix product."""
    first, second = (-F.relu(x)).chunk(2, -1)
    difference = (
        torch.sub(first, F.hardtanh(second, -0.1, 0.2), alpha=2)
        @ torch.linspace(-1, 1, first.shape[-1])[:, None].double()
    )
    joined = torch.cat([F.pad(first, (1, 1), value=0.7), second - first.mean(-1, keepdim=True), difference], -1)
    return joined[..., : x.shape[-1]]


class Attention(nn.Module):
    """One head of dot-product attention on tokens of bounded norm."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)


def statistics(layer: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """Batch norm with statistics, and a negative factor, that do something."""
    nn.init.uniform_(layer.running_mean, -0.5, 0.5)
    nn.init.uniform_(layer.running_var, 0.2, 2.0)
    nn.init.uniform_(layer.weight, -1.5, 1.5)
    nn.init.uniform_(layer.bias, -0.5, 0.5)
    return layer


def mlp(activation: Callable[[], nn.Module]) -> Model:
    layers = [nn.Flatten(), nn.Linear(64, 32), activation(), nn.Linear(32, 24), activation(), nn.Linear(24, 10)]
    return model(*layers)


def conv_net(activation: Callable[[], nn.Module], pool: nn.Module) -> Model:
    return model(
        nn.Conv2d(1, 6, 3, padding=1),
        statistics(nn.BatchNorm2d(6)),
        activation(),
        pool,
        nn.Conv2d(6, 8, 3, padding=1, groups=2),
        activation(),
        Residual(nn.Conv2d(8, 8, 3, padding=1), activation()),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def tokens() -> Model:
    width = 16
    return model(
        nn.Conv2d(1, width, 4, stride=4),
        Function(lambda x: x.flatten(2).transpose(1, 2)),
        Residual(nn.LayerNorm(width), Attention(width)),
        Residual(LayerProject(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.ReLU()),
        Function(lambda x: x.mean(1)),
        nn.Linear(width, 10),
    )


PRELU = torch.linspace(-0.5, 1.5, 8, dtype=torch.float64)
NETWORKS: dict[str, Callable[[], Model]] = {
    "mlp relu": lambda: mlp(nn.ReLU),
    "mlp leaky": lambda: mlp(lambda: nn.LeakyReLU(0.1)),
    "mlp steep": lambda: mlp(lambda: nn.LeakyReLU(1.7)),
    "mlp falling": lambda: mlp(lambda: nn.LeakyReLU(-0.3)),
    "mlp prelu": lambda: mlp(lambda: nn.PReLU(1, 0.3)),
    "conv prelu": lambda: conv_net(lambda: Function(lambda x: F.prelu(x, PRELU[: x.shape[1]])), nn.AvgPool2d(2, 2)),
    "mlp clipped": lambda: mlp(lambda: ClippedReLU(0.4)),
    "mlp maxmin": lambda: mlp(lambda: MaxMin(-1)),
    "mlp clipped maxmin": lambda: mlp(lambda: ClippedMaxMin(0.1, -0.1, -1)),
    "mlp silu": lambda: mlp(nn.SiLU),
    "mlp hardtanh": lambda: mlp(lambda: nn.Hardtanh(-0.2, 0.3)),
    "mlp clamp": lambda: mlp(lambda: Function(lambda x: 0.3 - 2 * x.clamp(max=0.1))),
    "mlp negated": lambda: mlp(lambda: Function(lambda x: -F.relu(x))),
    "mlp turned": lambda: mlp(lambda: Function(lambda x: -0.7 * x.clamp(min=-0.1))),
    "mlp pieces": lambda: mlp(lambda: Function(pieces)),
    "conv relu": lambda: conv_net(nn.ReLU, nn.MaxPool2d(2)),
    "conv overlapping": lambda: conv_net(nn.ReLU, nn.MaxPool2d(3, 2, 1)),
    "conv ceil": lambda: conv_net(nn.ReLU, nn.MaxPool2d(3, 2, ceil_mode=True)),
    "conv clipped": lambda: conv_net(lambda: ClippedReLU(0.3), nn.AvgPool2d(2)),
    "conv maxmin": lambda: conv_net(lambda: ClippedMaxMin(0.1, 0.0), nn.AdaptiveMaxPool2d(4)),
    "tokens": tokens,
}


@pytest.fixture(name="net", params=NETWORKS)
def _net(request: pytest.FixtureRequest) -> Model:
    return NETWORKS[request.param]()


def points(net: Model, image: Tensor, radius: float, seed: int = 0) -> Tensor:
    """Points of the ball around one image, (M, C, H, W): random directions, corners of the cube in it, gradients."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(12, *image.shape, generator=generator, dtype=torch.float64)
    single = torch.zeros(6, image.numel(), dtype=torch.float64)
    single[range(6), torch.randperm(image.numel(), generator=generator)[:6]] = 1.0
    x = image[None].clone().requires_grad_()
    logits = net(x)
    slopes = [torch.autograd.grad(logits[0, j], x, retain_graph=True)[0] for j in range(logits.shape[1])]
    steps = torch.cat([random, random.sign(), single.reshape(6, *image.shape), *slopes, *(-s for s in slopes)])
    lengths = per_image(steps).norm(dim=1).clamp_min(1e-300).reshape(-1, 1, 1, 1)
    return image + torch.cat([steps / lengths * radius * (1 - 1e-12), 0.4 * radius * steps / lengths])


def test_the_toy_example_of_the_paper_gives_one_against_nine_root_three() -> None:
    """Appendix A.1: only the third unit of both hidden layers moves, and what remains of the three matrices is 1.

    The paper gives the masks and both constants; weights and input are a reconstruction that fits them.
    """
    scales = [[3.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 1.0]]
    toy = model(
        nn.Flatten(),
        linear(scales),
        nn.ReLU(),
        linear(scales),
        nn.ReLU(),
        linear([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]),
        size=(1, 1, 3),
        std=1,
    )
    local = Local(toy)
    image = torch.tensor([[[[0.0, 0.0, 1.0]]]], dtype=torch.float64)
    assert 1 <= local.bound(image, torch.tensor([0.1])).item() <= 1 + 1e-7
    assert 1 <= local.bound(image, torch.tensor([0.49])).item() <= 1 + 1e-7
    assert 9 * math.sqrt(3) <= local.bound(image, torch.tensor([0.51])).item() <= 9 * math.sqrt(3) * (1 + 3e-5)
    assert local.analysis.bound().value == local.bound(image, torch.tensor([10.0])).item()
    assert local.delta == 0


def test_units_between_clips_and_only_they_count() -> None:
    """ReLUθ of (x₁, 5x₂) at x₂ = 0.9 is (x₁, θ): what remains is 2x₁."""
    net = model(
        nn.Flatten(),
        linear([[1.0, 0.0], [0.0, 5.0]]),
        ClippedReLU(1.0),
        linear([[0.0, 0.0], [2.0, 3.0]]),
        size=(1, 1, 2),
        mean=0,
        std=1,
    )
    image = torch.tensor([[[[0.5, 0.9]]]], dtype=torch.float64)
    found = Local(net).bound(image.expand(2, -1, -1, -1), torch.tensor([0.1, 0.75]))
    assert 2 <= found[0] <= 2 * (1 + 1e-7)
    assert found[1] >= math.hypot(2, 15)


def test_clipped_maxmin_removes_the_row_of_the_larger_entry_where_the_maximum_is_clipped() -> None:
    """(4a, b) with 4a > b and max clipped: only b moves, with weight 1."""
    net = model(
        nn.Flatten(),
        linear([[4.0, 0.0], [0.0, 1.0]]),
        ClippedMaxMin(1.0, -1.0, -1),
        linear([[1.0, 1.0]]),
        size=(1, 1, 2),
        mean=0,
        std=1,
    )
    image = torch.tensor([[[[0.9, 0.5]]]], dtype=torch.float64)
    found = Local(net).bound(image.expand(2, -1, -1, -1), torch.tensor([0.1, 10.0]))
    assert 1 <= found[0] <= math.sqrt(2) * (1 + 1e-7)
    assert found[1] >= math.sqrt(17)


def test_entries_that_cannot_be_the_largest_of_their_window_do_not_count() -> None:
    """Max pooling of (10a, b) at a = 0.05, b = 0.9: b is the largest for perturbations below 0.03."""
    net = model(
        Function(lambda x: x * torch.tensor([10.0, 1.0])),
        nn.MaxPool2d((1, 2)),
        nn.Flatten(),
        linear([[1.0], [0.0]]),
        size=(1, 1, 2),
        mean=0,
        std=1,
    )
    image = torch.tensor([[[[0.05, 0.9]]]], dtype=torch.float64)
    found = Local(net).bound(image.expand(2, -1, -1, -1), torch.tensor([0.03, 0.3]))
    assert 1 <= found[0] <= 1 + 1e-7
    assert found[1] >= 10


def test_a_scale_that_is_folded_into_the_next_matrix_is_not_counted_where_the_mask_removed_it() -> None:
    """diag(0.1, 1)·diag(10, 1) = I: with the first unit constant the second still passes with weight 1."""
    scale = torch.tensor([10.0, 1.0], dtype=torch.float64)
    net = model(
        nn.Flatten(),
        ClippedReLU(0.2),
        Function(lambda x: (x * scale).reshape(-1, 1, 2)),
        linear([[0.1, 0.0], [0.0, 1.0]]),
        nn.Flatten(),
        size=(1, 1, 2),
        mean=0,
        std=1,
    )
    image = torch.tensor([[[[0.9, 0.1]]]], dtype=torch.float64)
    found = Local(net).bound(image, torch.tensor([0.05])).item()
    assert found >= 1


@few
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**31), st.sampled_from([1e-150, 1e-3, 1.0, 1e150]))
def test_verified_norms_are_close_upper_bounds(rows: int, columns: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(5, rows, columns, generator=generator, dtype=torch.float64)
    matrices[1, 0] = 0
    matrices[2] = torch.eye(rows, columns) * 3  # clustered singular values
    matrices[3] = 0
    found = verified_norms(matrices * scale) / scale
    exact = torch.linalg.matrix_norm(matrices, 2)
    assert (found >= exact * (1 - 1e-14)).all()
    assert (found <= exact * (1 + 1e-8)).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1),
        lambda: nn.Conv2d(4, 4, (3, 2), padding="same", groups=2, dilation=2),
        lambda: nn.Conv1d(2, 3, 3),
        lambda: nn.Linear(7, 5),
    ],
)
def test_every_form_of_a_masked_norm_bounds_the_dense_truth(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make().double().eval()
    sizes = {nn.Conv2d: (1, layer.weight.shape[1] * getattr(layer, "groups", 1), 6, 5), nn.Conv1d: (1, 2, 9)}
    example = torch.rand(sizes.get(type(layer), (1, 3, 7)), dtype=torch.float64)
    graph = capture(layer, example)
    core = core_of(graph.output)
    assert core is not None
    dense = torch.autograd.functional.jacobian(layer, example, vectorize=True).reshape(-1, example.numel())
    outer = torch.rand(4, *graph.output.shape).double().round() * 2
    inner = torch.rand(4, *example.shape).double().round()
    inner[3] = 0
    exact = torch.stack(
        [
            torch.linalg.matrix_norm(a[:, None] * dense * b, 2)
            for a, b in zip(per_image(outer), per_image(inner), strict=True)
        ]
    )
    verified = core.norms(outer, inner, None)
    assert core.exact
    assert ((verified >= exact * (1 - 1e-14)) & (verified <= exact * (1 + 1e-7))).all()
    assert torch.allclose(per_image(core.row_norms(inner))[0], (dense * per_image(inner)[0]).norm(dim=1))
    monkeypatch.setattr("lipcert.bounds._masked.DENSE_SIDE", 0)
    assert not core.exact
    schur = core.norms(outer, inner, None)
    lanczos = core.norms(outer, inner, Ledger(1e-9, 4).draw("norm", delta=1e-9))
    assert (schur >= exact * (1 - 1e-14)).all()
    assert ((lanczos >= exact * (1 - 1e-14)) & (lanczos <= exact * 1.05)).all()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("radius", [1e-3, 0.05, 0.5])
def test_boxes_and_constants_hold_at_points_of_the_ball(net: Model, radius: float) -> None:
    """Every operation of the network, not the logits alone; images of a batch have balls of their own."""
    local = Local(net)
    images = torch.rand(3, *SIZE, dtype=torch.float64)
    eps = radius * torch.tensor([1.0, 0.3, 2.0], dtype=torch.float64)
    with torch.no_grad():
        propagation = Propagation(local.boxes, local._nominal(images), eps)
    for n in range(len(images)):
        samples = points(net, images[n], eps[n].item())
        with torch.no_grad():
            reached = [evaluate(local.boxes.graph.nodes, {local.boxes.graph.input: sample[None]}) for sample in samples]
        for node, state in propagation.states.items():
            values = torch.stack([known[node] for known in reached])
            assert (values <= state.value[n] + state.up[n]).all(), node
            assert (values >= state.value[n] - state.down[n]).all(), node
            moved = (values[1:] - values[:-1]).flatten(1).norm(dim=1)
            length = (samples[1:] - samples[:-1]).flatten(1).norm(dim=1)
            assert (moved <= state.constant[n] * length * (1 + 1e-9) + 1e-12).all(), node


@pytest.mark.thinned(3)
def test_local_constants_bound_jacobians_and_grow_to_the_global_bound(net: Model) -> None:
    local = Local(net)
    everywhere = local.analysis.bound().value
    images = torch.rand(2, *SIZE, dtype=torch.float64)
    last = torch.zeros(2, dtype=torch.float64)
    for radius in (0.0, 1e-4, 1e-2, 0.1, 1.0, 30.0):
        found = local.bound(images, torch.full((2,), radius))
        assert (found <= everywhere).all()
        assert (found >= last * (1 - 1e-7)).all()
        last = found
        for n in range(2):
            point = points(net, images[n], max(radius, 1e-9))[12:13]
            jacobian = torch.autograd.functional.jacobian(net, point, vectorize=True).reshape(10, -1)
            assert torch.linalg.matrix_norm(jacobian, 2) <= found[n]
        predicted = net(images).argmax(1)
        constants = local.constants(images, predicted, torch.full((2,), radius))
        assert (constants <= MarginBounds(local.analysis).of(predicted)).all()
    assert last[0] >= 0.7 * everywhere  # norms of padded convolutions are exact here, and bounds there


@pytest.mark.parametrize("name", ["mlp relu", "mlp clipped", "conv relu"])
def test_local_constants_are_below_the_global_one_where_units_are_constant(name: str) -> None:
    net = NETWORKS[name]()
    images = torch.rand(4, *SIZE, dtype=torch.float64)
    local = Local(net)
    assert (local.bound(images, torch.full((4,), 1e-3)) < 0.9 * local.analysis.bound().value).all()


@pytest.mark.thinned(3)
def test_radii_are_never_below_those_of_gloro_and_stand_at_what_they_say(net: Model) -> None:
    local = Local(net)
    images = torch.rand(5, *SIZE, dtype=torch.float64)
    with torch.no_grad():
        predicted, gaps = margins(net(images))
    found = local.radius(images, predicted, gaps)
    gloro = radii(gaps, MarginBounds(local.analysis).of(predicted))
    assert (found >= gloro * (1 - 1e-6)).all()
    better = found > gloro * 1.02
    constants = local.constants(images, predicted, found)
    with torch.no_grad():
        boxes = Propagation(local.boxes, local._nominal(images), found)
        rise = local._margin_boxes(boxes, predicted)
    reach = torch.minimum(constants * found[:, None], rise)
    assert ((gaps >= reach * (1 - 1e-9)).all(1) | ~better).all()
    beyond = found * 1.02
    with torch.no_grad():
        reach = local._margin_boxes(Propagation(local.boxes, local._nominal(images), beyond), predicted)
    reach = torch.minimum(local.constants(images, predicted, beyond) * beyond[:, None], reach)
    assert (gaps <= reach).any(1).all()


def test_ties_and_nan_are_not_certified() -> None:
    net = NETWORKS["mlp relu"]()
    local = Local(net)
    images = torch.rand(2, *SIZE, dtype=torch.float64)
    gaps = torch.full((2, 10), 1.0, dtype=torch.float64)
    gaps[:, 3] = math.inf
    gaps[0, 5], gaps[1, 6] = 0.0, math.nan
    assert (local.radius(images, torch.tensor([3, 3]), gaps) == 0).all()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["mlp relu", "mlp clipped maxmin", "conv relu", "tokens"])
def test_an_image_has_the_same_radius_alone_and_in_a_batch(name: str) -> None:
    net = NETWORKS[name]()
    local = Local(net)
    assert local.delta == 0
    images = torch.rand(4, *SIZE, dtype=torch.float64)
    with torch.no_grad():
        predicted, gaps = margins(net(images))
    together = local.radius(images, predicted, gaps)
    alone = torch.cat([local.radius(images[n : n + 1], predicted[n : n + 1], gaps[n : n + 1]) for n in range(4)])
    assert torch.allclose(together, alone, rtol=1e-6, atol=0)
    eps = torch.tensor([0.01, 0.02, 0.05, 0.1])
    bounds = torch.cat([local.bound(images[n : n + 1], eps[n : n + 1]) for n in range(4)])
    assert torch.allclose(local.bound(images, eps), bounds, rtol=1e-9, atol=0)


def test_large_operators_are_probabilistic_unless_that_is_forbidden() -> None:
    net = model(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )
    images = torch.rand(2, *SIZE, dtype=torch.float64)
    local, strict = Local(net), Local(net, delta=0)
    assert local.delta == 1e-9
    assert strict.delta == 0
    eps = torch.full((2,), 0.01)
    exact = torch.stack(
        [
            torch.linalg.matrix_norm(
                torch.autograd.functional.jacobian(net, image[None], vectorize=True).reshape(10, -1), 2
            )
            for image in images
        ]
    )
    loose, tight = strict.bound(images, eps), local.bound(images, eps)
    assert (tight >= exact).all()
    assert (tight < 0.95 * local.analysis.bound().value).all()
    assert (loose >= exact).all()
    assert (loose <= local.analysis.bound().value).all()
    assert torch.equal(tight, local.bound(images, eps))


@pytest.fixture(name="digits", scope="module")
def _digits() -> tuple[Tensor, Tensor]:
    datasets = pytest.importorskip("sklearn.datasets")
    found = datasets.load_digits()
    return torch.tensor(found.images)[:, None] / 16, torch.tensor(found.target)


def trained(net: Model, images: Tensor, labels: Tensor) -> Model:
    """A few seconds of training, with decay so that the constants stay moderate."""
    net.train()
    optimiser = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0.1)
    for _ in range(12):
        for batch in torch.randperm(len(images)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimiser.step()
    return net.eval()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "name",
    ["mlp relu", "mlp clipped", "mlp clipped maxmin", "mlp leaky", "conv relu", "conv overlapping", "conv clipped"],
)
def test_no_attack_succeeds_inside_the_radius_of_a_trained_network(
    name: str, digits: tuple[Tensor, Tensor], attack: Callable[..., bool]
) -> None:
    images, labels = digits
    net = trained(NETWORKS[name](), images[:1200], labels[:1200])
    local = Local(net)
    images, labels = images[1200:1212], labels[1200:1212]
    with torch.no_grad():
        logits = net(images)
        predicted, gaps = margins(logits)
    assert (predicted == labels).double().mean() > 0.6
    found = local.radius(images, predicted, gaps)
    gloro = radii(gaps, MarginBounds(local.analysis).of(predicted))
    assert (found / gloro).median() > 1.02
    assert not attack(net, images, found, steps=15)
    for n in range(len(images)):
        assert (net(points(net, images[n], found[n].item())).argmax(1) == predicted[n]).all()


def test_all_operations_without_a_rule_are_named() -> None:
    net = model(nn.Flatten(), Function(lambda x: torch.erfc(x) + torch.lgamma(x)), nn.Linear(64, 8))
    with pytest.raises(UnsupportedOperation) as caught:
        Local(net)
    assert [operation for operation, _ in caught.value.operations] == ["erfc", "lgamma"]


def test_a_model_in_single_precision_is_refused() -> None:
    with pytest.raises(InputError, match="float64"):
        Local(NETWORKS["mlp relu"]().float())


def test_constants_stand_in_the_order_of_the_classes():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5)).double().eval()
    bounds = MarginBounds(analyze(net, (3, 2, 2)))
    classes = torch.tensor([3, 0, 3, 4, 1])
    assert torch.equal(bounds.of(classes), torch.stack([bounds.of(y[None])[0] for y in classes]))
    assert bounds.of(classes[:0]).shape == (0, 5)
