"""The hyper-parameters of tables 9 and 10 of CertViT, by data set or network."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """Hyper-parameters of Gupta and Verma 2023 (arXiv 2302.10287), tables 9 and 10.

    Attributes:
        batch_size: images per step.
        epochs: epochs of training from scratch with L2 attention (table 9), or of fine-tuning with it (table 10).
        iterations: iterations of Douglas–Rachford, "CertViT epochs".
        projection_epochs: "proj_C epochs".
        eta: η.
        beta: β.
        relaxation: λ.
    """

    batch_size: int
    epochs: int
    iterations: int
    projection_epochs: int
    eta: float
    beta: float
    relaxation: float


PRESETS = {
    # table 9
    "mnist": Preset(512, 100, 5, 2, 1e-2, 0.1, 1.1),
    "cifar10": Preset(512, 200, 5, 2, 1e-2, 0.1, 1.2),
    "cifar100": Preset(512, 200, 5, 2, 1e-2, 0.1, 1.2),
    "tinyimagenet": Preset(512, 200, 5, 2, 1e-2, 0.2, 1.2),
    # table 10
    "vit_tiny_patch16": Preset(2048, 50, 5, 2, 1e-2, 0.1, 1.2),
    "vit_small_patch16": Preset(2048, 50, 5, 2, 1e-2, 0.1, 1.2),
    "vit_small_patch32": Preset(1024, 70, 5, 2, 1e-2, 0.1, 1.2),
    "vit_base_patch8": Preset(128, 70, 6, 2, 1e-2, 0.2, 1.3),
    "vit_base_patch16": Preset(256, 50, 5, 2, 1e-2, 0.2, 1.2),
    "vit_base_patch32": Preset(256, 50, 6, 2, 1e-2, 0.2, 1.3),
    "vit_large_patch16": Preset(256, 70, 6, 2, 1e-2, 0.2, 1.3),
    "deit_tiny": Preset(2048, 50, 5, 2, 1e-2, 0.1, 1.2),
    "deit_small": Preset(2048, 70, 6, 2, 1e-2, 0.2, 1.2),
    "deit_base": Preset(256, 70, 6, 2, 1e-2, 0.2, 1.3),
    "swin_tiny": Preset(1024, 40, 5, 2, 1e-2, 0.1, 1.2),
    "swin_small": Preset(512, 50, 6, 2, 1e-2, 0.2, 1.2),
    "swin_base": Preset(256, 50, 6, 3, 1e-2, 0.25, 1.3),
    "swin_large": Preset(128, 70, 7, 3, 1e-2, 0.25, 1.3),
}
