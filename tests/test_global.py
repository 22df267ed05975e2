"""The global bound on whole architectures, against the largest Jacobian that gradient ascent finds in the image box."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from modules import Function
from timm.models.convnext import ConvNeXt
from timm.models.deit import VisionTransformerDistilled
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipcert.bounds import Bound, Value, analyze, check_weights, lipschitz
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph import evaluate
from lipcert.inputs.loading import load
from lipcert.model import Model

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2, "num_classes": 4}
SWIN = {
    "img_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": (2, 2),
    "num_heads": (1, 2),
    "window_size": 4,
    "num_classes": 4,
}
NARROW = {"layers": (1, 1, 1, 1), "channels": (4, 4, 8, 8), "num_classes": 4, "stem_width": 4}

FAMILIES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit": (lambda: VisionTransformer(**VIT), 16),
    "vit with options": (lambda: VisionTransformer(**VIT, qk_norm=True, init_values=0.1, global_pool="avg"), 16),
    "deit": (lambda: VisionTransformerDistilled(**VIT), 16),
    "swin": (lambda: SwinTransformer(**SWIN), 16),
    "resnet": (lambda: ResNet(BasicBlock, **NARROW), 32),
    "resnet with options": (lambda: ResNet(Bottleneck, **NARROW, stem_type="deep", avg_down=True), 32),
    "convnext": (lambda: ConvNeXt(depths=(1, 1, 1, 1), dims=(4, 8, 8, 8), num_classes=4), 32),
    "mixer": (lambda: MlpMixer(img_size=16, patch_size=8, embed_dim=12, num_blocks=2, num_classes=4), 16),
}
REAL = ["test_vit", "test_vit2", "test_vit3", "test_resnet", "test_convnext", "test_convnext2"]
STATES = ["initial", "every branch open", "three times the weights"]


def prepared(net: nn.Module, side: int, state: str) -> Model:
    """The network in float64 behind the normalisation of ImageNet.

    Zero-initialised branches, heads and statistics would hide errors in what stands behind them.
    """
    generator = torch.Generator().manual_seed(5)

    def uniform(tensor: Tensor, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)

    with torch.no_grad():
        for module in net.modules():
            if state != "initial" and isinstance(module, nn.BatchNorm2d):
                module.running_mean.copy_(uniform(module.running_mean, -1, 1))
                module.running_var.copy_(uniform(module.running_var, 0.05, 2))
        for name, parameter in net.named_parameters():
            if state == "initial":
                continue
            if parameter.dim() <= 1:  # biases, scales of norms and of branches
                parameter.copy_(uniform(parameter, -1.5, 1.5))
            elif not parameter.any() or "head" in name:
                parameter.copy_(uniform(parameter, -1, 1))
            if state == "three times the weights":
                parameter.mul_(3)
    return Model(
        net.double(), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), input_size=(3, side, side)
    ).double()


def check_movements(model: Model, images: int = 3) -> Bound:
    """How far every value inside the network moves along directions in the pixels, by forward differentiation."""
    analysis = analyze(model)
    nodes = [n for n in analysis.graph.nodes if isinstance(analysis.values[n], Value)]
    generator = torch.Generator().manual_seed(7)

    def inside(image: Tensor) -> tuple[Tensor, ...]:
        values = evaluate(analysis.graph.nodes, {analysis.graph.input: image})
        return tuple(values[node] for node in nodes)

    for index in range(images):
        image = torch.rand(1, *model.input_size, generator=generator, dtype=torch.float64)
        image = image.round() if index == 1 else image
        direction = torch.randn(image.shape, generator=generator, dtype=torch.float64)
        direction = direction.mean((2, 3), keepdim=True).expand_as(image) if index == 2 else direction
        with sdpa_kernel(SDPBackend.MATH):
            values, movements = torch.func.jvp(inside, (image,), (direction / direction.norm(),))
        for node, value, movement in zip(nodes, values, movements, strict=True):
            known = analysis.values[node]
            assert movement.norm() <= float(known.lip) * (1 + 1e-9), node
            assert value.abs().max() <= float(known.magnitude) * (1 + 1e-9), node
            for axis in range(1, value.dim()):
                assert value.norm(dim=axis).max() <= float(known.row_norm(axis)) * (1 + 1e-9), (node, axis)
    return analysis.bound()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bound_holds(family: str, state: str, steepest: Any) -> None:
    build, side = FAMILIES[family]
    torch.manual_seed(0)
    model = prepared(build(), side, state)
    bound = check_movements(model)
    assert bound.rigor == "deterministic"
    assert bound.finite
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        image = torch.rand(1, *model.input_size, generator=generator, dtype=torch.float64)
        assert steepest(model, image, 4) <= bound.value


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", REAL)
def test_bound_holds_for_timms_small_models(name: str, state: str, steepest: Any) -> None:
    model = prepared(timm.create_model(name, pretrained=False, num_classes=4), 160, state)
    bound = check_movements(model)
    image = torch.rand(1, *model.input_size, dtype=torch.float64)
    assert steepest(model, image, 6) <= bound.value


def test_normalisation_is_part_of_the_network() -> None:
    head = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    model = Model(head, mean=(0.5, 0.5, 0.5), std=(0.2, 0.1, 0.4), input_size=(3, 2, 2))
    scale = (1 / model.std.double()).expand(3, 2, 2).flatten()
    exact = torch.linalg.matrix_norm(head[1].weight.detach().double() * scale, 2).item()
    assert exact <= lipschitz(model).value <= exact * (1 + 1e-4)


def test_a_linear_network_is_known_exactly() -> None:
    """The residual folds; what is left is one matrix."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            return x + self.mix(x)

    block = Block().eval()
    weight = torch.eye(12).double() + block.mix.weight.detach().double()
    exact = torch.linalg.matrix_norm(weight, 2).item()
    assert exact <= lipschitz(block, (3, 2, 2)).value <= exact * (1 + 1e-4)


def test_the_budget_adds_up() -> None:
    """Where the network is a chain, the gains of the lines multiply to the bound."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.GELU())
    bound = lipschitz(Model(net, mean=(0, 0, 0), std=(0.5, 0.5, 0.5), input_size=(3, 8, 8)))
    assert sum(line.log10_gain for line in bound.layers) == pytest.approx(bound.log10)
    assert bound.layers[-1].log10_reach == pytest.approx(bound.log10)
    assert [line.path for line in bound.layers] == ["net.1", "net.4", "net.5"]
    assert bound.log10 == pytest.approx(math.log10(bound.value))


def test_a_bound_beyond_float64_is_infinite_but_known() -> None:
    layers = [nn.Linear(12, 12, bias=False) for _ in range(10)]
    for layer in layers:
        nn.init.constant_(layer.weight, 1e37 / 12)
    bound = lipschitz(nn.Sequential(nn.Flatten(), *layers).eval(), (3, 2, 2))
    assert math.isinf(bound.value)
    assert bound.finite
    assert bound.log10 == pytest.approx(370, abs=1e-3)


def test_constant_networks() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    nn.init.zeros_(net[1].weight)
    assert lipschitz(net, (3, 2, 2)).value == 0.0
    assert lipschitz(net, (3, 2, 2)).log10 == -math.inf


def test_the_bound_does_not_depend_on_the_weights_type() -> None:
    """float32 weights are exact float64 numbers, so both give the same bound up to rounding."""
    build, side = FAMILIES["vit"]
    model = prepared(build(), side, "every branch open").float()
    twin = copy.deepcopy(model).double()
    assert lipschitz(model).log10 == pytest.approx(lipschitz(twin).log10, abs=1e-6)


def test_images_of_a_batch_must_stay_apart() -> None:
    for mixing in (lambda x: (x - x.mean(0)).flatten(1), lambda x: x.reshape(1, 12)):
        with pytest.raises(InputError, match="mixes the images"):
            lipschitz(Model(Function(mixing), mean=(0, 0, 0), std=(1, 1, 1), input_size=(3, 2, 2)))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_that_are_not_numbers(wrong: float) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).eval()
    check_weights(net)
    for name, tensor in [*net.named_parameters(), ("1.running_var", net[1].running_var)]:
        keep = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[0] = wrong
        with pytest.raises(InputError, match=name):
            lipschitz(net, (3, 4, 4))
        with torch.no_grad():
            tensor.copy_(keep)


def test_buffers_may_hold_infinities_but_not_nan() -> None:
    class Masked(nn.Module):
        mask: Tensor

        def __init__(self, entry: float) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, entry, 0.0, 0.0]), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.mask).softmax(-1).flatten(1)

    assert lipschitz(Masked(-math.inf).eval(), (3, 2, 4)).finite
    with pytest.raises(InputError, match="mask holds NaN"):
        lipschitz(Masked(math.nan).eval(), (3, 2, 4))


def test_limits_may_be_infinite() -> None:
    class Limited(nn.Module):
        low: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.tensor(-math.inf))

        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(x, self.low, -self.low).flatten(1) * 2

    model = load(Limited().eval(), mean=(0, 0, 0), std=(1, 1, 1), input_size=(3, 2, 4))
    assert 2 <= lipschitz(model).value <= 2 * (1 + 1e-6)


def float64_bytes() -> int:
    """Memory of all float64 tensors that are alive."""
    alive = [item for item in gc.get_objects() if type(item) is Tensor and item.dtype == torch.float64]
    storages = [tensor.untyped_storage() for tensor in alive]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class Residual(nn.Module):
    """x + γ ∘ (down(relu(up(norm(x))))) on tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.up(self.norm(x)).relu())


class Stacked(nn.Module):
    """Convolutions with batch norm, then residual blocks on tokens."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Conv2d(c, 48, 3), nn.BatchNorm2d(48), nn.ReLU()) for c in (3, 48, 48)]
        self.convolutions, self.blocks = nn.Sequential(*parts), nn.Sequential(*[Residual(48) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.convolutions(x).flatten(2).mT).mean(1)


def test_maps_are_multiplied_out_only_while_their_norm_is_computed() -> None:
    """No float64 copy of a weight stays alive, folded with its neighbours or not."""
    net = Stacked().eval()
    weights = 8 * sum(parameter.numel() for parameter in net.parameters())
    seen: list[int] = []
    gc.freeze()  # what is alive already is not counted, nor looked through at every step
    try:
        analysis = analyze(net, (3, 10, 10), lambda *step: seen.append(float64_bytes()))
        seen.append(float64_bytes())
    finally:
        gc.unfreeze()
    assert analysis.output.lip.finite
    assert len(seen) > 20
    assert 0 < max(seen) < weights / 10


def test_input_size_is_needed_without_a_model() -> None:
    with pytest.raises(InputError, match="input_size"):
        lipschitz(nn.Flatten().eval())


def test_progress_is_reported() -> None:
    seen: list[tuple[int, int, str]] = []
    lipschitz(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval(), (3, 2, 2), lambda *step: seen.append(step))
    bounded = [(done, total) for done, total, text in seen if text == "bounding the network"]
    assert [done for done, _ in bounded] == list(range(1, bounded[0][1]))
    assert seen[0] == (0, 1, "reading the network")


def test_missing_rules_are_collected_over_the_whole_network() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 3, 1), Function(torch.atan), Function(torch.asinh))
            self.other = Function(torch.erfinv)

        def forward(self, x: Tensor) -> Tensor:
            return (self.body(x) + self.other(x)).flatten(1)

    with pytest.raises(UnsupportedOperation) as caught:
        lipschitz(Odd().eval(), (3, 4, 4))
    assert ("atan", "body.1") in caught.value.operations
    assert ("erfinv", "other") in caught.value.operations


def test_the_budget_names_what_stretches_and_nothing_else() -> None:
    """Splitting queries from keys and dropping nothing out stretches nothing, however far the value has come."""
    net = timm.create_model("test_vit", pretrained=False).eval()
    model = Model(net, mean=(0.5,) * 3, std=(0.5,) * 3, input_size=net.pretrained_cfg["input_size"])
    layers = lipschitz(model).layers
    assert {line.operation for line in layers} >= {"linear", "layer_norm", "layer_norm + linear"}
    assert not {line.operation for line in layers} & {"part", "unbind", "dropout", "input"}
    lines = [line for line in layers if "linear" in line.operation and "qkv" in line.path]
    weights = dict(model.named_modules())
    for line in lines:
        norm = torch.linalg.matrix_norm(weights[line.path].weight.double(), 2)  # LayerNorm's weights are ones
        assert abs(line.log10_gain - norm.log10().item()) < 1e-4
    steepest = max(line.log10_gain for line in layers if line.operation == "layer_norm")
    assert abs(steepest - 3) < 1e-6  # 1/√eps with eps = 1e-6: what makes the bound of an unmodified ViT vacuous
