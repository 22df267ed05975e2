"""Small networks drawn at random from all operations, spoilt to be hard for a certifier, and hard images."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import EfficientNet
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

import lipcert
from lipcert.inputs.data import BUNDLED
from lipcert.surgery import (
    ClippedMaxMin,
    ClippedReLU,
    L2Attention,
    L2WindowAttention,
    LayerProject,
    MaxMin,
    SmoothProject,
)

Size = tuple[int, int, int]

ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    lambda: nn.GELU("tanh"),
    nn.SiLU,
    nn.SiLU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Hardtanh,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.LogSigmoid,
    MaxMin,
    lambda: ClippedMaxMin(0.6, -0.4),
    lambda: ClippedReLU(0.7),
)


@dataclass(frozen=True)
class Case:
    """What is certified and attacked.

    Attributes:
        seed: draws the same case again.
        family: the kind of network.
        spoilt: what was done to its weights.
        model: in float64.
        images: shape (N, C, H, W), float64 in [0, 1].
    """

    seed: int
    family: str
    spoilt: str
    model: lipcert.Model
    images: Tensor


class Gate(nn.Module):
    """a(x) ∘ φ(b(x)) on the last axis."""

    def __init__(self, width: int, activation: nn.Module):
        super().__init__()
        self.both = nn.Linear(width, 2 * width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.both(x).chunk(2, -1)
        return value * self.activation(gate)


class Squeeze(nn.Module):
    """Channels weighed by a sigmoid of their means."""

    def __init__(self, channels: int):
        super().__init__()
        self.weigh = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weigh(x.mean((2, 3), keepdim=True)).sigmoid()


class Residual(nn.Module):
    """x + γ ∘ branch(x)."""

    def __init__(self, branch: nn.Module, scale: float):
        super().__init__()
        self.branch = branch
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.branch(x)


class DotProduct(nn.Module):
    """Attention by scaled dot products on (N, tokens, width)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, width = x.shape
        parts = self.qkv(x).reshape(count, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0))
        return self.out(mixed.transpose(1, 2).reshape(count, tokens, width))


class Patches(nn.Module):
    """An image as tokens, (N, C, H, W) → (N, tokens, width)."""

    def __init__(self, channels: int, width: int, side: int):
        super().__init__()
        self.embed = nn.Conv2d(channels, width, side, stride=side)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    """The mean over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def draw(seed: int, count: int, family: str | None = None) -> Case:
    """One network and its images.

    Args:
        seed: of everything.
        count: images.
        family: one of ``FAMILIES``; by default the seed chooses.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    family = family or rng.choice(_SHARES)
    size = rng.choice(_SIZES[family])
    classes = rng.choice((2, 3, 3, 4, 5))
    net = FAMILIES[family](rng, size, classes).double().eval()
    model = _wrap(net, size, rng)
    if rng.random() < 0.5:
        _train(model, classes, rng)
    if rng.random() < 0.8:
        _balance(model)
    spoilt = "nothing" if rng.random() < 0.4 else rng.choice(list(_SPOIL))
    first = torch.rand(1, *model.input_size, dtype=torch.float64).mul(64).round() / 64
    if spoilt != "nothing":
        with torch.no_grad():
            _SPOIL[spoilt](model, first, rng)
    return Case(seed, family, spoilt, model, _images(model, first, count, rng))


def _wrap(net: nn.Module, size: Size, rng: random.Random) -> lipcert.Model:
    if isinstance(net, lipcert.Model):
        return net
    mean, std = rng.choice(((0.0, 1.0), (0.5, 0.5), (0.45, 0.22)))
    model = lipcert.load(net, mean=(mean,) * size[0], std=(std,) * size[0], input_size=size)
    return model.double()


def _linear(rng: random.Random, size: Size, classes: int) -> nn.Module:
    front: list[nn.Module] = []
    if rng.random() < 0.5:
        front = [nn.Conv2d(size[0], 4, 3, padding=1), nn.AvgPool2d(2)]
    return _with_head([*front, nn.Flatten()], size, classes)


def _relu(rng: random.Random, size: Size, classes: int) -> nn.Module:
    first, second = rng.choice(((5, 0), (6, 0), (4, 2)))
    slope = rng.choice((0.0, 0.2))
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(math.prod(size), first), _rectifier(slope)]
    if second:
        layers += [nn.Linear(first, second), _rectifier(slope)]
    return _with_head(layers, size, classes)


def _rectifier(slope: float) -> nn.Module:
    return nn.LeakyReLU(slope) if slope else nn.ReLU()


def _mlp(rng: random.Random, size: Size, classes: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(size)
    for _ in range(rng.randint(1, 3)):
        layers += [nn.Linear(width, width := rng.choice((4, 8, 12))), rng.choice(ACTIVATIONS)()]
    return _with_head(layers, size, classes)


def _deep(rng: random.Random, size: Size, classes: int) -> nn.Module:
    """At least ten layers, in residual blocks or one behind the other."""
    width, residual, activation = rng.choice((4, 6, 8)), rng.random() < 0.6, rng.choice(ACTIVATIONS)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(math.prod(size), width)]
    for _ in range(rng.randint(8, 12)):
        block = nn.Sequential(nn.Linear(width, width), activation())
        layers.append(Residual(block, rng.choice((1.0, 0.3))) if residual else block)
    return _with_head(layers, size, classes)


def _conv(rng: random.Random, size: Size, classes: int) -> nn.Module:
    width, groups = rng.choice((4, 6)), rng.choice((1, 1, 2))
    layers: list[nn.Module] = [nn.Conv2d(size[0], width, 3, stride=rng.choice((1, 2)), padding=1)]
    layers += [_channel_norm(width, rng), rng.choice(ACTIVATIONS)()]
    block = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=groups), rng.choice(ACTIVATIONS)())
    layers.append(rng.choice((block, Residual(block, 0.5), Squeeze(width), nn.Identity())))
    layers.append(rng.choice((nn.MaxPool2d(2), nn.MaxPool2d(2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1))))
    return _with_head([*layers, nn.Flatten()], size, classes)


def _channel_norm(channels: int, rng: random.Random) -> nn.Module:
    kind = rng.choice(("batch", "batch", "group", "none"))
    if kind == "none":
        return nn.Identity()
    norm = nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(2, channels)
    state = norm.state_dict()
    if kind == "batch":
        nn.init.uniform_(state["running_var"], 0.05, 2)
        nn.init.normal_(state["running_mean"], std=0.2)
    nn.init.uniform_(state["weight"], -1.5, 1.5)
    return norm


def _gates(rng: random.Random, size: Size, classes: int) -> nn.Module:
    width = rng.choice((4, 6))
    activation = rng.choice((nn.Sigmoid, nn.SiLU, nn.GELU, nn.Hardsigmoid))()
    front: list[nn.Module] = [nn.Flatten(), nn.Linear(math.prod(size), width), _token_norm(width, rng)]
    return _with_head([*front, Gate(width, activation)], size, classes)


def _tokens(rng: random.Random, size: Size, classes: int) -> nn.Module:
    width = rng.choice((4, 6, 8))
    mix: nn.Module = DotProduct(width, 2)
    kind = rng.choice(("dot", "l2", "window", "perceptron"))
    if kind == "l2":
        mix = L2Attention(width, 2)
    elif kind == "window":
        mix = L2WindowAttention(width, 2, window_size=(size[1] // 2, size[2] // 2))
        nn.init.normal_(mix.relative_position_bias_table)
    elif kind == "perceptron":
        mix = nn.Linear(width, width)
    branches = [nn.Sequential(_token_norm(width, rng), mix)]
    mlp = nn.Sequential(nn.Linear(width, 8), rng.choice((nn.GELU, nn.SiLU, nn.ReLU))(), nn.Linear(8, width))
    branches.append(nn.Sequential(_token_norm(width, rng), rng.choice((mlp, Gate(width, nn.SiLU())))))
    blocks = [Residual(branch, rng.choice((1.0, 0.3))) for branch in branches[: rng.randint(1, 2)]]
    return _with_head([Patches(size[0], width, 2), *blocks, _token_norm(width, rng), Mean()], size, classes)


def _token_norm(width: int, rng: random.Random) -> nn.Module:
    return rng.choice(
        (
            nn.LayerNorm(width, eps=1e-6),
            nn.LayerNorm(width, eps=0.1),
            nn.RMSNorm(width, eps=1e-3),
            LayerProject(width, 1.0),
            SmoothProject(width, 1.0),
        )
    )


def _timm(rng: random.Random, size: Size, classes: int, name: str | None = None) -> nn.Module:
    """A small form of a network of timm, as timm builds it or converted."""
    name = name or rng.choice(list(_TIMM))
    arguments = {key: rng.choice(values) for key, values in _TIMM[name].items()}
    if name in _BUILT:  # none of timm's names leaves its size open
        model = _wrap(_BUILT[name](num_classes=classes, **arguments).eval(), (3, 8, 8), rng)
    else:
        model = lipcert.load(name, pretrained=False, num_classes=classes, **arguments)
    head = _layers(model)[-1]
    if not head.weight.any():  # as timm leaves it
        nn.init.normal_(head.weight, std=0.5)
    if name not in ("resnet18", "efficientnet") and rng.random() < 0.6:
        lipcert.convert(model, attention=rng.choice(("l2", "keep")), norm=rng.choice(("keep", "project", "smooth")))
    return model


def _efficientnet(blocks: tuple[str, ...], num_classes: int) -> nn.Module:
    """Depthwise and inverted residual blocks, with squeezed channels as their strings say."""
    return EfficientNet(
        decode_arch_def([[block] for block in blocks]),
        num_classes=num_classes,
        stem_size=4,
        num_features=8,
        round_chs_fn=lambda channels: channels,
    )


_BUILT: dict[str, Callable[..., nn.Module]] = {"mixer": MlpMixer, "efficientnet": _efficientnet}
# Arguments for timm: every value is one of a list.
_TIMM: dict[str, dict[str, list[Any]]] = {
    "vit_tiny_patch16_224": {
        "img_size": [8], "patch_size": [4], "embed_dim": [8], "depth": [1, 2], "num_heads": [2], "mlp_ratio": [2],
        "global_pool": ["avg", "token"],
    },
    "swin_tiny_patch4_window7_224": {
        "img_size": [8], "patch_size": [2], "embed_dim": [8], "window_size": [2], "depths": [(2,)], "num_heads": [(2,)],
    },
    "mixer": {"img_size": [8], "patch_size": [4], "embed_dim": [8], "num_blocks": [1, 2]},
    "convnext_atto": {
        "input_size": [(3, 8, 8)], "patch_size": [1], "depths": [(1, 1, 1, 1)], "dims": [(4, 4, 8, 8)],
    },
    "efficientnet": {
        "blocks": [
            ("ds_r1_k3_s1_e1_c4",), ("ds_r1_k3_s1_e1_c4", "ir_r1_k3_s2_e2_c8_se0.25"), ("ir_r1_k3_s1_e2_c4",),
            ("er_r1_k3_s2_e2_c8_se0.25",), ("ds_r1_k3_s2_e1_c4_nre", "ir_r1_k3_s1_e2_c4_nsw"),
        ],
    },
    "resnet18": {
        "input_size": [(3, 8, 8)], "layers": [(1, 1, 1, 1)], "channels": [(4, 4, 8, 8)], "stem_type": ["deep"],
        "stem_width": [2],
    },
}  # fmt: skip


def _with_head(layers: list[nn.Module], size: Size, classes: int) -> nn.Module:
    body = nn.Sequential(*layers).eval()
    with torch.no_grad():
        features = body(torch.rand(1, *size)).shape[1]
    return nn.Sequential(*layers, nn.Linear(features, classes))


FAMILIES: dict[str, Callable[[random.Random, Size, int], nn.Module]] = {
    "linear": _linear,
    "relu": _relu,
    "mlp": _mlp,
    "deep": _deep,
    "conv": _conv,
    "gates": _gates,
    "tokens": _tokens,
    "timm": _timm,
    "convnext": partial(_timm, name="convnext_atto"),
    "mixer": partial(_timm, name="mixer"),
    "efficientnet": partial(_timm, name="efficientnet"),
}
# Families whose networks take longer, and have fewer images.
SLOW = ("timm", "convnext", "mixer", "efficientnet")
_SHARES = [
    "linear",
    "relu",
    *["mlp"] * 4,
    *["deep"] * 3,
    *["conv"] * 2,
    *["gates"] * 2,
    *["tokens"] * 4,
    *["timm"] * 2,
    *SLOW[1:],
]
_SMALL: list[Size] = [(1, 4, 4), (2, 4, 4), (3, 4, 4)]
_SIZES: dict[str, list[Size]] = dict.fromkeys(FAMILIES, _SMALL) | {
    "relu": [(1, 2, 2), (1, 2, 3), (2, 2, 2)],
    "conv": [(1, 4, 4), (3, 4, 4), (1, 6, 6)],
}


def _train(model: lipcert.Model, classes: int, rng: random.Random) -> None:
    """A few steps towards random labels or those of the digits, so that margins grow for the Lipschitz constant."""
    images = torch.rand(24, *model.input_size, dtype=torch.float64)
    labels = torch.randint(classes, (24,))
    if rng.random() < 0.5:
        images, labels = _digits(model, classes)
    optimiser = torch.optim.Adam(model.parameters(), 0.02, weight_decay=1e-3)
    for _ in range(rng.choice((5, 20))):
        optimiser.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimiser.step()
    model.requires_grad_(False)


def _digits(model: lipcert.Model, classes: int) -> tuple[Tensor, Tensor]:
    """Bundled images of the first classes, in the model's size and number of channels."""
    stored = safetensors.torch.load_file(BUNDLED)
    wanted = stored["labels"] < classes
    images = F.interpolate(stored["images"][wanted].double() / 255, model.input_size[1:])
    channels = torch.arange(model.input_size[0]) % 3
    return images[:, channels], stored["labels"][wanted]


@torch.no_grad()
def _balance(model: lipcert.Model) -> None:
    """Makes all classes equally likely on random images, so that there is a change to be found near most of them."""
    logits = model(torch.rand(64, *model.input_size, dtype=torch.float64))
    head = _layers(model)[-1]
    assert head.bias is not None
    if bool((logits.std(0) > 0).all()):
        head.bias -= logits.median(0).values


def _layers(model: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]


def _respectrum(change: Callable[[Tensor], Tensor]) -> Callable[[lipcert.Model, Tensor, random.Random], None]:
    """Gives one matrix of the network other singular values."""

    def spoil(model: lipcert.Model, first: Tensor, rng: random.Random) -> None:
        weight = rng.choice(_layers(model)).weight
        left, values, right = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        weight.copy_((left * change(values) @ right).reshape(weight.shape))

    return spoil


def _tie(model: lipcert.Model, first: Tensor, rng: random.Random) -> None:
    """Two classes that are always equal, or nearly so."""
    head = _layers(model)[-1]
    head.weight[1] = head.weight[0] + rng.choice((0.0, 1e-13, 1e-6)) * torch.randn_like(head.weight[0])
    assert head.bias is not None
    head.bias[1] = head.bias[0] - rng.choice((0.0, 1e-9))


def _kink(model: lipcert.Model, first: Tensor, rng: random.Random) -> None:
    """At the first image, the results of one layer are where activations have their kinks."""
    layer = rng.choice([layer for layer in _layers(model) if layer.bias is not None])
    seen: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _module, _inputs, result: seen.append(result))
    model(first)
    hook.remove()
    kink = rng.choice((0.0, 0.0, 0.0, 0.7, 1.0, 3.0, -3.0))
    result = seen[0].movedim(1, -1) if isinstance(layer, nn.Conv2d) else seen[0]
    assert layer.bias is not None
    layer.bias += kink - result.reshape(-1, len(layer.bias))[0]


def _flat_tokens(model: lipcert.Model, first: Tensor, rng: random.Random) -> None:
    """Channels that hardly differ after the first layer: tokens with almost no variance."""
    layer = _layers(model)[0]
    layer.weight.copy_(layer.weight[:1] * (1 + rng.choice((1e-2, 1e-6)) * torch.randn_like(layer.weight)))
    if layer.bias is not None:
        layer.bias.copy_(layer.bias[:1].expand_as(layer.bias))


def _scales(model: lipcert.Model, first: Tensor, rng: random.Random) -> None:
    """One matrix large and another small."""
    layers = _layers(model)
    for layer, factor in zip(rng.sample(layers, min(2, len(layers))), (100, 0.01), strict=False):
        layer.weight.mul_(factor)


_SPOIL: dict[str, Callable[[lipcert.Model, Tensor, random.Random], None]] = {
    "repeated singular values": _respectrum(lambda s: s[:1].expand_as(s)),
    "clustered singular values": _respectrum(lambda s: s[0] * (1 - 1e-9 * torch.arange(len(s)))),
    "rank one": _respectrum(lambda s: s * (torch.arange(len(s)) == 0)),
    "half zero": _respectrum(lambda s: s * (2 * torch.arange(len(s)) < len(s))),
    "zero": _respectrum(torch.zeros_like),
    "the smallest numbers": _respectrum(lambda s: s * 1e-55),
    "ties": _tie,
    "kinks": _kink,
    "tokens of little variance": _flat_tokens,
    "scales": _scales,
}


def _images(model: lipcert.Model, first: Tensor, count: int, rng: random.Random) -> Tensor:
    """Inside the box, on its edge, without any contrast, close to 0, digits, and close to where predictions change."""
    size = model.input_size

    def uniform(number: int) -> Tensor:
        return torch.rand(number, *size, dtype=torch.float64)

    part = max(1, count // 9)
    grey = uniform(part)[:, :1, :1, :1].expand(-1, *size)
    still = (grey + 1e-7 * torch.randn(part, *size, dtype=torch.float64)).clamp(0, 1)
    faces = (2 * uniform(part) - 0.5).clamp(0, 1)
    digits = _digits(model, 10)[0]
    digits = digits[torch.randperm(len(digits))[:part]]
    found = [first, uniform(part).round(), faces, still, grey, uniform(part) * 2.0**-20, digits]
    plain = uniform(max(2, count - sum(map(len, found))))
    found.append(plain)
    images = torch.cat(found)[:count]
    images[-part:] = _near_the_boundary(model, plain[:1].expand(part, -1, -1, -1), images[-part:], rng)
    return images


@torch.no_grad()
def _near_the_boundary(model: lipcert.Model, one: Tensor, other: Tensor, rng: random.Random) -> Tensor:
    """Points between images, at very different distances from where the prediction changes."""
    classes = model(one).argmax(1)
    low, high = torch.zeros(len(one), 1, 1, 1).double(), torch.ones(len(one), 1, 1, 1).double()
    for _ in range(40):
        middle = (low + high) / 2
        same = (model(one + middle * (other - one)).argmax(1) == classes)[:, None, None, None]
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    back = torch.tensor([10.0 ** -rng.randint(1, 9) for _ in one], dtype=torch.float64)[:, None, None, None]
    return (one + low * (1 - back) * (other - one)).clamp(0, 1)
