"""A vision transformer on the results of convolutions, like timm's hybrids but without normalisation in between.

Nonlinear operations in early layers cost the anchored certificate little, and with convolutions in front a small
network learns several times faster. Tokens are averaged, and there is no normalisation before the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from lipcert.networks._parts import configuration, register

_CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616), "interpolation": "bicubic"}
_SIZES = {
    "img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 2, "num_heads": 4, "mlp_ratio": 2,
    "class_token": False, "global_pool": "avg", "final_norm": False,
}  # fmt: skip


def _stem_vit(stem: Sequence[int] = (96,), **arguments: Any) -> VisionTransformer:
    """timm's vision transformer; ``stem`` are the channels of the convolutions, each of half the sides of the last."""
    layers: list[nn.Module] = []
    for before, channels in zip((arguments.get("in_chans", 3), *stem), stem, strict=False):
        layers += [nn.Conv2d(before, channels, 5, 2, 2), nn.GELU()]
    embed = partial(HybridEmbed, backbone=nn.Sequential(*layers))
    return VisionTransformer(embed_layer=embed, **arguments)


register(
    __name__,
    _stem_vit,
    (
        "cifar_vit_stem",
        "A convolution of 96 channels, then 2 blocks of width 128 on 16 tokens, for images of 32×32.",
        _SIZES,
        {**configuration(32), **_CIFAR, "first_conv": "patch_embed.backbone.0"},
    ),
)
