"""Plain convolutional networks of the literature on certified training: 4C3F, 6C2F and 8C2F.

Source: Huang, Zhang, Shi, Kolter and Anandkumar, "Training certifiably robust neural networks with efficient local
Lipschitz bounds", NeurIPS 2021 (arXiv 2111.01395), appendix C.1.
"""

from __future__ import annotations

from math import prod

from timm.layers import to_2tuple
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.networks._parts import Classifier, activation, configuration, register

Convolution = tuple[int, int, int, int]  # channels, kernel, stride, padding


class LipConvNet(Classifier):
    """Convolutions and dense layers, each followed by an activation, and a linear head."""

    def __init__(
        self,
        convolutions: tuple[Convolution, ...],
        dense: tuple[int, ...] = (512,),
        act_layer: str = "clipped-relu",
        thresholds: str = "neuron",
        bias: bool = True,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int | tuple[int, int] = 32,
    ):
        super().__init__()
        if thresholds not in ("neuron", "layer"):
            raise InputError(f"there are no thresholds {thresholds!r}; choose one of neuron, layer")
        self.num_classes, self.num_features = num_classes, dense[-1]
        per_unit = thresholds == "neuron"
        layers: list[nn.Module] = []
        sides: tuple[int, ...] = to_2tuple(img_size)
        channels = in_chans
        for out, kernel, stride, padding in convolutions:
            sides = tuple((side + 2 * padding - kernel) // stride + 1 for side in sides)
            if min(sides) < 1:
                raise InputError(f"the images are too small for the convolutions: img_size={img_size}")
            layers += [nn.Conv2d(channels, out, kernel, stride, padding, bias=bias)]
            layers += [activation(act_layer, out, sides=sides if per_unit else None)]
            channels = out
        layers.append(nn.Flatten())
        inputs = channels * prod(sides)
        for out in dense:
            layers += [nn.Linear(inputs, out, bias), activation(act_layer, out, sides=() if per_unit else None)]
            inputs = out
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, num_classes, bias) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        return self.features(x)


_4C = ((32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 4, 2, 1))
_6C = ((32, 3, 1, 1), (32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 3, 1, 1), (64, 4, 2, 1))
_8C = (
    *((64, 3, 1, 1), (64, 3, 1, 1), (64, 4, 2, 0), (128, 3, 1, 1)),
    *((128, 3, 1, 1), (128, 4, 2, 0), (256, 3, 1, 1), (256, 4, 2, 0)),
)

register(
    __name__,
    LipConvNet,
    ("lip_convnet_4c3f", "4C3F for images of 32×32.", {"convolutions": _4C, "dense": (512, 512)}, configuration(32)),
    ("lip_convnet_6c2f", "6C2F for images of 32×32.", {"convolutions": _6C}, configuration(32)),
    (
        "lip_convnet_8c2f",
        "8C2F for images of 64×64.",
        {"convolutions": _8C, "dense": (256,), "img_size": 64, "num_classes": 200},
        configuration(64),
    ),
)
