"""A hybrid: linear residual blocks on the image, then attention among a few tokens.

The residual blocks are those of :mod:`lipcert.networks.liresnet`, the rest is timm's vision transformer with smooth
projections in place of LayerNorm. They bound every token, so dot-product attention has a Lipschitz constant. L2
attention (:class:`lipcert.surgery.L2Attention`) has one without a bound on the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.layers import to_2tuple
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.networks._parts import NormalizedLinear, activation, classify, configuration, register
from lipcert.networks.liresnet import stem_and_blocks
from lipcert.surgery import L2Attention, SmoothProject


class ResidualEmbed(nn.Module):
    """A stem, linear residual blocks, and a convolution with disjoint patches that produces the tokens."""

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        patch_size: int = 8,
        in_chans: int = 3,
        embed_dim: int = 128,
        bias: bool = True,
        depth: int = 4,
        width: int = 64,
        **_unused: Any,
    ):
        super().__init__()
        height, width_of_image = to_2tuple(img_size)
        self.grid_size = (height // patch_size, width_of_image // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.stem, self.blocks = stem_and_blocks(in_chans, width, depth, (5, 2, 2), "maxmin")
        self.proj = nn.Conv2d(width, embed_dim, patch_size // 2, patch_size // 2, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.blocks(self.stem(x))).flatten(2).transpose(1, 2)


class Hybrid(VisionTransformer):
    """timm's vision transformer on the tokens of :class:`ResidualEmbed`, with smooth projections as normalisations."""

    def __init__(
        self,
        attention: str = "l2",
        width: int = 64,
        residual_depth: int = 4,
        radius: float = 1.0,
        start: float = 1.0,
        neck: int = 0,
        beta: float = 0.0,
        mirror: bool = False,
        **kwargs: Any,
    ):
        if attention not in ("dot", "l2"):
            raise InputError(f"there is no attention {attention!r}; choose one of dot, l2")
        embed = partial(ResidualEmbed, width=width, depth=residual_depth)
        super().__init__(embed_layer=embed, norm_layer=partial(SmoothProject, radius=radius), **kwargs)
        blocks: Any = self.blocks
        for block in blocks:
            if attention == "l2":
                block.attn = L2Attention(self.embed_dim, kwargs["num_heads"])
            for last in (block.attn.proj, block.mlp.fc2):
                last.weight.data.mul_(start)
        self.width_of_neck, self.mirror = neck, mirror
        if neck:
            tokens = self.patch_embed.num_patches
            dense = nn.Linear(tokens * self.embed_dim, neck)
            self.neck = nn.Sequential(
                activation("maxmin", self.embed_dim, -1, beta), nn.Flatten(), dense, activation("maxmin", neck, 1, beta)
            )
            self.reset_classifier(self.num_classes)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise InputError("this network attends to all tokens: pass no attn_mask and is_causal=False")
        return classify(self, x, self.mirror)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if not self.width_of_neck:
            result: Tensor = super().forward_head(x, pre_logits)
            return result
        x = self.neck(x)
        return x if pre_logits else self.head(x)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        if self.width_of_neck and num_classes:
            self.head = NormalizedLinear(self.width_of_neck, num_classes)


_SIZES = {
    "img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 2, "num_heads": 4, "mlp_ratio": 2,
    "class_token": False, "global_pool": "avg", "final_norm": False, "fc_norm": False,
}  # fmt: skip
_CONFIGURATION = {**configuration(32), "first_conv": "patch_embed.stem.0"}
_ABOUT = "4 residual blocks of 64 channels, then 2 blocks of {} attention on 16 tokens of width 128."

register(
    __name__,
    Hybrid,
    ("liresnet_vit_dot", _ABOUT.format("dot-product"), {"attention": "dot", **_SIZES}, _CONFIGURATION),
    ("liresnet_vit_l2", _ABOUT.format("L2"), {"attention": "l2", **_SIZES}, _CONFIGURATION),
)
