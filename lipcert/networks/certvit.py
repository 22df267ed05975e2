"""The small vision transformers that CertViT trains from scratch, as timm builds them.

Source: Gupta and Verma, "CertViT: certified robustness of pre-trained vision transformers" (arXiv 2302.10287), table 4.
Tokens are averaged, and there is no normalisation before the head, which would enlarge the Lipschitz constant.
"""

from __future__ import annotations

from timm.models.vision_transformer import VisionTransformer

from lipcert.networks._parts import configuration, register

_COMMON = {"class_token": False, "global_pool": "avg", "final_norm": False, "fc_norm": False}
_MNIST = {**configuration(28), "input_size": (1, 28, 28), "first_conv": "patch_embed.proj"}
_CIFAR = {**configuration(32), "first_conv": "patch_embed.proj"}
_TINY_IMAGENET = {**configuration(64), "first_conv": "patch_embed.proj"}


def _sizes(size: int, patch: int, width: int, depth: int, heads: int, ratio: int) -> dict[str, object]:
    sizes = {"img_size": size, "patch_size": patch, "embed_dim": width, "depth": depth, "num_heads": heads}
    return {**sizes, "mlp_ratio": ratio, **_COMMON}


register(
    __name__,
    VisionTransformer,
    (
        "certvit_mnist",
        "Patches of 7, 6 blocks of width 128, for grey images of 28×28.",
        {"in_chans": 1, **_sizes(28, 7, 128, 6, 4, 4)},
        _MNIST,
    ),
    (
        "certvit_cifar10",
        "Patches of 4, 6 blocks of width 192, for images of 32×32.",
        _sizes(32, 4, 192, 6, 3, 3),
        _CIFAR,
    ),
    (
        "certvit_cifar100",
        "Patches of 4, 12 blocks of width 192, for images of 32×32.",
        _sizes(32, 4, 192, 12, 3, 3),
        {**_CIFAR, "num_classes": 100},
    ),
    (
        "certvit_tinyimagenet",
        "Patches of 4, 12 blocks of width 384, for images of 64×64.",
        _sizes(64, 4, 384, 12, 6, 3),
        _TINY_IMAGENET,
    ),
)
