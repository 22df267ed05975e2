"""LiResNet: residual blocks whose branch is linear, so that x + Wx is bounded as one operator.

Source: Hu, Zou, Wang, Leino and Fredrikson, "Unlocking deterministic robustness certification on ImageNet", NeurIPS
2023 (arXiv 2301.12549), section 3 and appendix B.2. The convolution of the neck has W channels, which agrees with the
parameter counts of the paper (its text says 2W). An activation follows the dense layer of the neck, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.networks._parts import Classifier, NormalizedLinear, activation, configuration, register


class LinearResidual(nn.Module):
    """x + β ∘ Conv(x)/√L, with a factor β for each channel and L the number of blocks."""

    def __init__(self, channels: int, blocks: int, kernel_size: int = 3):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2)
        self.beta = nn.Parameter(torch.ones(channels))
        self.scale = blocks**-0.5

    def forward(self, x: Tensor) -> Tensor:
        # The factor scales the weights, because a product with the result would change its type under bfloat16.
        factor = self.beta * self.scale
        weight = self.conv.weight * factor.view(-1, 1, 1, 1)
        return x + F.conv2d(x, weight, self.conv.bias * factor, padding=self.conv.padding)


class Residual(nn.Module):
    """x + β ∘ Conv(act(Conv(x))): the conventional block of appendix D, with β = 0 at first."""

    def __init__(self, channels: int, act_layer: str):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.act = activation(act_layer, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bias = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.second.weight * self.beta.view(-1, 1, 1, 1)
        return x + F.conv2d(self.act(self.first(x)), weight, self.bias * self.beta, padding=1)


def _isometry(channels: int) -> nn.Conv2d:
    """A convolution that starts as a random orthogonal matrix at the centre of its kernel, and so keeps all norms.

    With torch's default weights a deep chain shrinks the differences of images and hardly its Lipschitz bound; training
    with EMMA then makes all logits equal. The start is the delta-orthogonal one of Xiao et al., "Dynamical isometry and
    a mean field theory of CNNs", ICML 2018 (arXiv 1806.05393), section 2.4.
    """
    conv = nn.Conv2d(channels, channels, 3, padding=1)
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[:, :, 1, 1] = nn.init.orthogonal_(torch.empty(channels, channels))
    return conv


BLOCKS: dict[str, Callable[[int, int, str], nn.Module]] = {
    "linear": lambda width, depth, act_layer: LinearResidual(width, depth),
    "residual": lambda width, depth, act_layer: Residual(width, act_layer),
    "conv": lambda width, depth, act_layer: _isometry(width),
}


def stem_and_blocks(
    in_chans: int, width: int, depth: int, stem: tuple[int, int, int], act_layer: str, block: str = "linear"
) -> tuple[nn.Sequential, nn.Sequential]:
    """The stem, a convolution with (kernel, stride, padding), and the blocks, each with an activation."""
    kernel, stride, padding = stem
    first = nn.Sequential(nn.Conv2d(in_chans, width, kernel, stride, padding), activation(act_layer, width))
    blocks = [(BLOCKS[block](width, depth, act_layer), activation(act_layer, width)) for _ in range(depth)]
    return first, nn.Sequential(*(module for block in blocks for module in block))


class LiResNet(Classifier):
    """Stem, linear residual blocks, neck and normalised head."""

    linear = NormalizedLinear

    def __init__(
        self,
        depth: int = 6,
        width: int = 128,
        neck: int | None = None,
        num_features: int = 2048,
        stem: tuple[int, int, int] = (5, 2, 2),
        act_layer: str = "maxmin",
        block: str = "linear",
        beta: float = 0.0,
        mirror: bool = False,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int | tuple[int, int] = 32,
    ):
        super().__init__()
        kernel, stride, padding = stem
        sides = [(side + 2 * padding - kernel) // stride + 1 for side in to_2tuple(img_size)]
        if depth < 1 or min(sides) < 4:
            raise InputError(
                f"LiResNet needs at least 1 block and 4×4 positions, got depth={depth}, img_size={img_size}"
            )
        if block not in BLOCKS:
            raise InputError(f"there is no block {block!r}; choose one of {', '.join(BLOCKS)}")
        self.num_classes, self.num_features, self.mirror = num_classes, num_features, mirror
        self.stem, self.blocks = stem_and_blocks(in_chans, width, depth, stem, act_layer, block)
        neck = neck or width
        self.neck = nn.Sequential(
            nn.Conv2d(width, neck, 4, 4),
            activation(act_layer, neck, beta=beta),
            nn.Flatten(),
            nn.Linear(neck * (sides[0] // 4) * (sides[1] // 4), num_features),
            activation(act_layer, num_features, beta=beta),
        )
        self.head = self.linear(num_features, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        return self.neck(self.blocks(self.stem(x)))


register(
    __name__,
    LiResNet,
    (
        "liresnet_l6w64",
        "A small LiResNet for images of 32×32: 1.4 million parameters.",
        {"depth": 6, "width": 64, "neck": 128, "num_features": 512},
        configuration(32),
    ),
    ("liresnet_l6w128", "The paper's L6W128.", {"depth": 6, "width": 128}, configuration(32)),
    ("liresnet_l12w256", "The paper's L12 with 256 channels.", {"depth": 12, "width": 256}, configuration(32)),
    ("liresnet_l12w512", "The paper's L12W512.", {"depth": 12, "width": 512}, configuration(32)),
    (
        "liresnet_l12w512_64",
        "The paper's L12W512 for images of 64×64.",
        {"depth": 12, "width": 512, "stem": (7, 4, 3), "img_size": 64, "num_classes": 200},
        configuration(64),
    ),
    (
        "liresnet_l12w588_224",
        "The paper's L12W588 for images of 224×224.",
        {"depth": 12, "width": 588, "num_features": 4096, "stem": (14, 14, 0), "img_size": 224, "num_classes": 1000},
        configuration(224),
    ),
)
