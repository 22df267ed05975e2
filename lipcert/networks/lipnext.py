"""LipNeXt: orthogonal matrices and shifts of channels in place of convolutions, so that every layer is 1-Lipschitz.

Source: Hu, Hu and Fredrikson, "LipNeXt: Scaling up Lipschitz-based certified robustness to billion-parameter models",
ICLR 2026 (arXiv 2601.18513): orthogonal matrices that are trained on their manifold, spatial shifts, the activation
β-abs and ℓ2 pooling. What is not fixed by that, such as the order within a block, the share of channels that is shifted
and the sizes, is chosen here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.networks._parts import Classifier, NormalizedLinear, configuration, register
from lipcert.surgery import Orthogonal


class Shift(nn.Module):
    """Moves a share of the channels by one position in each of the four directions, around the edge of the image.

    It is a permutation of the entries, and computed as one, so that its norm is 1.
    """

    order: Tensor

    def __init__(self, channels: int, sides: tuple[int, ...], share: float = 1 / 8):
        super().__init__()
        places = torch.arange(channels * sides[0] * sides[1]).view(channels, *sides)
        moved, count = places.clone(), int(channels * share)
        for number, (step, axis) in enumerate(((1, 1), (-1, 1), (1, 2), (-1, 2))):
            some = slice(number * count, (number + 1) * count)
            moved[some] = places[some].roll(step, axis)
        self.register_buffer("order", moved.flatten(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).index_select(1, self.order).view_as(x)


class Block(nn.Module):
    """|·|_β(M Rᵀ S R (x + p) + b) with orthogonal matrices R and M, a shift S and a bias p for each position.

    The activation β-abs takes absolute values of a share β of the channels.
    """

    slopes: Tensor

    def __init__(self, channels: int, sides: tuple[int, ...], beta: float):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(channels, *sides))
        self.rotation = Orthogonal(channels, channels, bias=False)
        self.shift = Shift(channels, sides)
        self.mixing = Orthogonal(channels, channels)
        folded = torch.arange(channels) < round(beta * channels)
        self.register_buffer("slopes", torch.where(folded, -1.0, 1.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shift(self.rotation(x + self.position))
        x = F.conv2d(x, self.rotation.weight.transpose(0, 1))
        return F.prelu(self.mixing(x), self.slopes)


class LipNeXt(Classifier):
    """Patches, blocks, ℓ2 pooling and a normalised head."""

    linear = NormalizedLinear

    def __init__(
        self,
        depth: int = 8,
        width: int = 128,
        patch: int = 2,
        beta: float = 0.75,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int | tuple[int, int] = 32,
    ):
        super().__init__()
        sides = to_2tuple(img_size)
        if any(side % patch for side in sides) or not 0 <= beta <= 1:
            sizes = f"patch={patch}, img_size={img_size}, beta={beta}"
            raise InputError(f"LipNeXt needs patches that cover the image and a β in [0, 1], got {sizes}")
        self.num_classes, self.num_features = num_classes, width
        sides = tuple(side // patch for side in sides)
        self.stem = nn.Sequential(nn.PixelUnshuffle(patch), Orthogonal(in_chans * patch**2, width))
        self.blocks = nn.Sequential(*(Block(width, sides, beta) for _ in range(depth)))
        self.head = self.linear(width, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x)).flatten(2).norm(dim=2)


register(
    __name__,
    LipNeXt,
    ("lipnext_l8w128", "A small LipNeXt for images of 32×32.", {"depth": 8, "width": 128}, configuration(32)),
    ("lipnext_l12w256", "A larger one.", {"depth": 12, "width": 256}, configuration(32)),
)
