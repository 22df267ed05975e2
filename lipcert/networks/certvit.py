"""The small vision transformers that CertViT trains from scratch, as timm builds them.

Source: Gupta and Verma, "CertViT: certified robustness of pre-trained vision transformers" (arXiv 2302.10287), table 4.
Tokens are averaged, and there is no normalisation before the head, which would enlarge the Lipschitz constant.
"""

from __future__ import annotations

from typing import Any

from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer

from lipcert.networks._parts import build, configuration

_COMMON = {"class_token": False, "global_pool": "avg", "final_norm": False, "fc_norm": False}

default_cfgs = generate_default_cfgs(
    {
        "certvit_mnist": {**configuration(28), "input_size": (1, 28, 28), "first_conv": "patch_embed.proj"},
        "certvit_cifar10": {**configuration(32), "first_conv": "patch_embed.proj"},
        "certvit_cifar100": {**configuration(32), "num_classes": 100, "first_conv": "patch_embed.proj"},
        "certvit_tinyimagenet": {**configuration(64), "first_conv": "patch_embed.proj"},
    }
)


@register_model
def certvit_mnist(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Patches of 7, 6 blocks of width 128, for grey images of 28×28."""
    architecture = {
        "img_size": 28,
        "in_chans": 1,
        "patch_size": 7,
        "embed_dim": 128,
        "depth": 6,
        "num_heads": 4,
        "mlp_ratio": 4,
    }
    return build(VisionTransformer, "certvit_mnist", pretrained, kwargs, **architecture, **_COMMON)


@register_model
def certvit_cifar10(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Patches of 4, 6 blocks of width 192, for images of 32×32."""
    architecture = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 6, "num_heads": 3, "mlp_ratio": 3}
    return build(VisionTransformer, "certvit_cifar10", pretrained, kwargs, **architecture, **_COMMON)


@register_model
def certvit_cifar100(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Patches of 4, 12 blocks of width 192, for images of 32×32."""
    architecture = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 12, "num_heads": 3, "mlp_ratio": 3}
    return build(VisionTransformer, "certvit_cifar100", pretrained, kwargs, **architecture, **_COMMON)


@register_model
def certvit_tinyimagenet(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Patches of 4, 12 blocks of width 384, for images of 64×64."""
    architecture = {"img_size": 64, "patch_size": 4, "embed_dim": 384, "depth": 12, "num_heads": 6, "mlp_ratio": 3}
    return build(VisionTransformer, "certvit_tinyimagenet", pretrained, kwargs, **architecture, **_COMMON)
