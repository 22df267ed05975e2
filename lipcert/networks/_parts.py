"""Parts that the architectures share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.surgery import ClippedMaxMin, ClippedReLU, MaxMin, SmoothMaxMin

ACTIVATIONS = ("relu", "clipped-relu", "maxmin", "clipped-maxmin")


class NormalizedLinear(nn.Linear):
    """f_j = ⟨w_j/‖w_j‖, x⟩ + b_j: a head whose rows have norm 1, so that all logits have the same Lipschitz constant.

    Source: last layer normalization of Singla, Singla and Feizi, "Improved deterministic l2 robustness on CIFAR-10 and
    CIFAR-100", ICLR 2022 (arXiv 2108.04062), section 5.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight), self.bias)


def activation(
    name: str, channels: int, dim: int = 1, beta: float = 0.0, sides: tuple[int, ...] | None = None
) -> nn.Module:
    """An activation module for values with this number of channels in dimension ``dim``.

    With ``beta`` it is :class:`lipcert.surgery.SmoothMaxMin` in place of MaxMin. With ``sides``, the sides of its
    images, () after a dense layer, every unit has thresholds of its own; else all units of the layer share them.
    """
    if name not in ACTIVATIONS:
        raise InputError(f"there is no activation {name!r}; choose one of {', '.join(ACTIVATIONS)}")
    if "maxmin" in name and channels % 2:
        raise InputError(f"{name} pairs channels, and {channels} is odd")
    if beta and name != "maxmin":
        raise InputError(f"beta smooths the activation maxmin, not {name}")
    if beta:
        return SmoothMaxMin(beta, dim)
    if name == "relu":
        return nn.ReLU()
    if name == "maxmin":
        return MaxMin(dim)
    if name == "clipped-relu":
        return ClippedReLU(1.0 if sides is None else torch.ones(channels, *sides))
    ones = torch.ones(()) if sides is None else torch.ones(channels // 2, *sides)
    return ClippedMaxMin(ones, -ones, dim)


def configuration(size: int) -> dict[str, Any]:
    """timm's default configuration for square images of this size, without pretrained weights.

    All channels are divided by the same number, because the smallest divisor determines the Lipschitz constant.
    """
    return {
        "num_classes": 200 if size == 64 else 1000 if size == 224 else 10,
        "input_size": (3, size, size),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.25, 0.25, 0.25),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "fixed_input_size": True,
        "first_conv": None,
        "classifier": "head",
    }


def register(
    module: str, network: Callable[..., nn.Module], *named: tuple[str, str, Mapping[str, Any], dict[str, Any]]
) -> None:
    """Registers architectures with timm: name, description, arguments of the network, and timm's configuration."""
    default_cfgs = generate_default_cfgs({name: configuration for name, _, _, configuration in named})
    sys.modules[module].__dict__["default_cfgs"] = default_cfgs
    for name, about, arguments, _ in named:

        def entry(
            pretrained: bool = False, *, _name: str = name, _given: Mapping[str, Any] = arguments, **kwargs: Any
        ) -> Any:
            return build_model_with_cfg(network, _name, pretrained, **{**_given, **kwargs})

        entry.__name__ = entry.__qualname__ = name
        entry.__module__, entry.__doc__ = module, about
        register_model(entry)


def classify(network: Any, x: Tensor, mirror: bool) -> Tensor:
    """Logits by the methods of timm's models; ``mirror`` averages the features of an image and of its mirror image.

    The average of two K-Lipschitz functions is K-Lipschitz, and mirroring is an isometry, so the Lipschitz constant
    stays. Margins grow in the mean, if mirrored images were in the training data. A forward pass takes twice as long.
    Both images go through the network as one batch, so that the values of both at a layer are one value: a cut.
    ``forward_features`` returns the features of the image alone, so that with ``mirror`` the logits are not
    ``forward_head`` of them.
    """
    if mirror:
        x = torch.stack((x, x.flip(-1))).flatten(0, 1)
    features = network.forward_head(network.forward_features(x), pre_logits=True)
    if mirror:
        features = features.unflatten(0, (2, -1)).mean(0)
    logits: Tensor = network.head(features)
    return logits


class Classifier(nn.Module):
    """A feature extractor and a head, with the methods of timm's models.

    Subclasses set ``num_features``, ``head`` and ``mirror`` and define ``forward_features``, which returns features of
    shape (N, num_features). A head that is added to a network without one is of the class ``linear``.
    """

    num_classes: int
    num_features: int
    mirror = False
    linear: type[nn.Linear] = nn.Linear
    head: nn.Module

    def forward_features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return classify(self, x, self.mirror)

    @torch.jit.ignore  # type: ignore[untyped-decorator]
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        linear = isinstance(self.head, nn.Linear)
        kind, bias = type(self.head) if linear else self.linear, not linear or self.head.bias is not None
        self.head = kind(self.num_features, num_classes, bias) if num_classes else nn.Identity()
