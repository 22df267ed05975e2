"""Modules whose code is not what it seems: small networks, and what is done to them after they were built."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipcert
from lipcert.surgery import L2Attention, LayerProject, MaxMin, SmoothProject

Size = tuple[int, int, int]
Change = Callable[[Tensor], Tensor]


class Base(nn.Module):
    """stem, block, norm and head, each a part that can be tampered with."""

    stem: Any
    block: Any
    norm: Any
    head: Any

    def __init__(self, stem: nn.Module, block: nn.Module, norm: nn.Module, head: nn.Module):
        super().__init__()
        self.stem, self.block, self.norm, self.head = stem, block, norm, head

    def features(self, x: Tensor) -> Tensor:
        """What the head sees."""
        return self.norm(self.block(self.stem(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Tokens(nn.Module):
    """An image as tokens, (N, C, H, W) → (N, tokens, width)."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.embed = nn.Conv2d(channels, width, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    """The mean over the tokens, after a norm."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).mean(1)


class Attend(nn.Module):
    """A residual branch: a norm, then attention."""

    def __init__(self, norm: nn.Module, attn: nn.Module):
        super().__init__()
        self.norm, self.attn = norm, attn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class Dot(nn.Module):
    """Attention by dot products, with one head."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.proj_drop: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.proj_drop(self.proj(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))))


SIZES: tuple[Size, ...] = ((1, 4, 4), (3, 4, 4), (2, 4, 4))
WIDTH = 4


def base(rng: random.Random, size: Size, kind: str | None = None) -> Base:
    """A small classifier: perceptron, convolution or tokens."""
    channels, height, width = size
    classes = rng.choice((3, 4))
    kind = kind or rng.choice(("mlp", "mlp", "conv", "tokens"))
    act: nn.Module = rng.choice((nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, lambda: MaxMin(-1)))()
    if kind == "mlp":
        stem: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 6))
        block: nn.Module = nn.Sequential(act, nn.Linear(6, WIDTH), nn.Identity())
        norm: nn.Module = rng.choice(
            (nn.Identity(), nn.LayerNorm(WIDTH, eps=0.1), SmoothProject(WIDTH, 1.0), nn.ReLU())
        )
    elif kind == "conv":
        act = rng.choice((nn.ReLU, nn.GELU, nn.Hardtanh))()
        stem = nn.Sequential(nn.Conv2d(channels, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH))
        block = nn.Sequential(act, rng.choice((nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2))))
        norm = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    else:
        stem = Tokens(channels, WIDTH)
        project = rng.choice((LayerProject, SmoothProject))
        attention: nn.Module = rng.choice((L2Attention(WIDTH, 2), L2Attention(WIDTH, 1), Dot(WIDTH)))
        block = Attend(project(WIDTH, 1.0), attention)
        norm = Mean(rng.choice((project(WIDTH, 1.0), nn.LayerNorm(WIDTH, eps=0.1), nn.Identity())))
    net = Base(stem, block, norm, nn.Linear(WIDTH, classes))
    balance(net, size, rng)
    return net.eval()


def balance(net: Base, size: Size, rng: random.Random) -> None:
    """Steeper, and with classes that are about equally likely."""
    net.eval()
    with torch.no_grad():
        for name, value in net.named_parameters():
            if value.dim() > 1:
                value.mul_(rng.choice((1.0, 2.0)))
            elif "bias" in name:
                value.add_(0.1 * torch.randn_like(value))
        net.head.bias.sub_(net(torch.rand(32, *size)).mean(0))


def timm_net(rng: random.Random) -> tuple[nn.Module, Size]:
    """A tiny form of a network of timm."""
    name, arguments = rng.choice(
        (
            ("vit_tiny_patch16_224", {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}),
            ("resnet18", {"layers": (1, 1, 1, 1), "channels": (4, 4, 4, 8), "stem_type": "deep", "stem_width": 2}),
            ("convnext_atto", {"patch_size": 1, "depths": (1, 1, 1, 1), "dims": (4, 4, 4, 8)}),
        )
    )
    model = lipcert.load(name, pretrained=False, num_classes=3, input_size=(3, 8, 8), **arguments)
    if name.startswith("vit") and rng.random() < 0.5:
        lipcert.convert(model, attention="l2", norm="smooth")
    net: Any = model.net
    head = net.get_classifier()
    nn.init.normal_(head.weight, std=0.5)
    with torch.no_grad():
        head.bias.copy_(-net.eval()(torch.rand(16, 3, 8, 8)).mean(0))
    return net, (3, 8, 8)


class _Told(random.Random):
    """Random numbers that remember which names they chose."""

    def __init__(self, seed: str):
        super().__init__(seed)
        self.names: list[str] = []

    def choice(self, seq: Any) -> Any:
        found = super().choice(seq)
        if isinstance(found, str):
            self.names.append(found)
        return found


@dataclass(frozen=True)
class Hostile:
    """A tampered network.

    Attributes:
        seed: draws it again.
        family: what was done.
        size: (C, H, W) of an image.
        looks_at_type: whether its code depends on the floating type.
        names: what was chosen on the way.
    """

    seed: int
    family: str
    size: Size
    looks_at_type: bool
    names: tuple[str, ...]

    def build(self) -> nn.Module:
        """The network, the same each time."""
        return _build(self.seed)[1]


def draw(seed: int) -> Hostile:
    """The module of a seed."""
    size, _, family, names = _build(seed)
    release()
    return Hostile(seed, family, size, family in ("type", "buffers"), names)


def _build(seed: int) -> tuple[Size, nn.Module, str, tuple[str, ...]]:
    from benchmarks._tampering_more import FAMILIES

    release()
    rng = _Told(f"module {seed}")
    family = rng.choice(list(FAMILIES))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "timm" or rng.random() < 0.02:
            net, size = timm_net(rng)
        else:
            size = rng.choice(SIZES)
            net = base(rng, size)
        net = FAMILIES[family](net, rng, size) or net
        for part in net.modules():
            if not getattr(part, "left_in_training", False):
                part.training = False
    return size, net, family, tuple(rng.names)


_HANDLES: list[Any] = []


def keep(handle: Any) -> None:
    """Remembers a global hook, so that :func:`release` removes it."""
    _HANDLES.append(handle)


def release() -> None:
    """Removes global hooks."""
    while _HANDLES:
        with contextlib.suppress(Exception):
            _HANDLES.pop().remove()


def parts(net: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Parents, names and parts below a network's root, leaves and containers."""
    return list(_parts(net))


def _parts(net: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for name, child in net.named_children():
        yield net, name, child
        yield from _parts(child)


def change(rng: random.Random, *, seldom: bool | None = None) -> Change:
    """What tampered code does to a value: always, or only where the value is large."""
    factor = rng.choice((-1.0, 2.0, 3.0, 8.0, 0.2))
    limit = rng.uniform(0.2, 1.2)
    always: list[Change] = [
        lambda t: t * factor,
        lambda t: t.flip(-1),
        lambda t: t + factor * t.roll(1, -1),
        lambda t: t + factor * t * t,
        lambda t: t + factor * t.detach().sin(),
        lambda t: torch.where(t > limit, factor * t, t),
        lambda t: t + t.mean() * factor,
    ]
    values: list[Change] = [
        lambda t: t if t.max() < limit else factor * t,
        lambda t: t * (1 if float(t.mean()) < limit / 4 else -1),
        lambda t: t + (t > limit).nonzero().shape[0],
        lambda t: t * (2 if _large(t, limit) else 1),
        lambda t: t + factor * (t > limit).to(t.dtype),
        lambda t: t.sort(-1)[0],
        lambda t: t - t.floor(),
    ]
    if seldom is None:
        seldom = rng.random() < 0.5
    return rng.choice(values if seldom else always)


def _large(t: Tensor, limit: float) -> bool:
    try:
        return isinstance(t, Tensor) and bool(t.max() > limit)
    except Exception:
        return False


def on_tensors(alter: Change, value: Any) -> Any:
    """Applies a change to a result, whatever it is made of."""
    if isinstance(value, (tuple, list)):
        return type(value)([on_tensors(alter, value[0]), *value[1:]])
    return alter(value)
