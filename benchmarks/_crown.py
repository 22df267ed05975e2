"""The CIFAR-10 networks of this project in operations that auto_LiRPA bounds, and CROWN's verdicts on them.

Projections are written with square, square root, reciprocal and ReLU, MaxMin with ReLU between two matrices. auto_LiRPA
0.7 or later must be installed; this project does not need it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import lipcert
from lipcert.networks.liresnet import LinearResidual, LiResNet
from lipcert.surgery import LayerProject, MaxMin


def affine(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


class Projection(nn.Module):
    """A projection in place of LayerNorm, in operations that auto_LiRPA bounds."""

    def __init__(self, module: Any):
        super().__init__()
        self.kinked, self.centred = isinstance(module, LayerProject), module.centred
        self.radius = float(module.radius)
        bias = torch.zeros_like(module.weight) if module.bias is None else module.bias
        self.weight, self.bias = nn.Parameter(module.weight.detach()), nn.Parameter(bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        square = (x * x).sum(-1, keepdim=True)
        if self.kinked:
            ratio = (torch.relu(torch.sqrt(square) - self.radius) + self.radius) / self.radius
        else:
            ratio = torch.sqrt(square / self.radius**2 + 1.0)
        return x * torch.reciprocal(ratio) * self.weight + self.bias


class Block(nn.Module):
    """A transformer block with its attention written out, for a batch of one or more images."""

    def __init__(self, block: Any, tokens: int, gelu: type[nn.Module]):
        super().__init__()
        attention = block.attn
        self.tokens, self.heads = tokens, attention.num_heads
        self.norm1, self.norm2 = Projection(block.norm1), Projection(block.norm2)
        qkv = attention.qkv
        biases = (None,) * 3 if qkv.bias is None else qkv.bias.chunk(3)
        self.q, self.k, self.v = (affine(*part) for part in zip(qkv.weight.chunk(3), biases, strict=True))
        self.out = affine(attention.proj.weight, attention.proj.bias)
        self.fc1 = affine(block.mlp.fc1.weight, block.mlp.fc1.bias)
        self.fc2 = affine(block.mlp.fc2.weight, block.mlp.fc2.bias)
        self.act = gelu()

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.tokens, self.heads, x.shape[-1] // self.heads)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm1(x)
        q = self.split(self.q(tokens)).permute(0, 2, 1, 3)
        k = self.split(self.k(tokens)).permute(0, 2, 3, 1)
        v = self.split(self.v(tokens)).permute(0, 2, 1, 3)
        weights = torch.softmax(torch.matmul(q, k) * (1 / math.sqrt(q.shape[-1])), -1)
        mixed = torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(-1, self.tokens, x.shape[-1])
        x = x + self.out(mixed)
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class Pixels(nn.Module):
    """What the preprocessing of a model does to pixels in [0, 1]."""

    def __init__(self, model: lipcert.Model):
        super().__init__()
        mean, std = (torch.as_tensor(value).float().view(1, -1, 1, 1) for value in (model.mean, model.std))
        self.scale, self.shift = nn.Parameter(1 / std), nn.Parameter(-mean / std)

    def forward(self, images: Tensor) -> Tensor:
        return images * self.scale + self.shift


def convolution(conv: Any, weight: Tensor | None = None, bias: Tensor | None = None) -> nn.Conv2d:
    """A plain convolution like this one, with its own weight and bias or the given ones."""
    weight, bias = (conv.weight, conv.bias) if weight is None else (weight, bias)
    plain = nn.Conv2d(weight.shape[1], weight.shape[0], conv.kernel_size, conv.stride, conv.padding)
    plain.weight = nn.Parameter(weight.detach().clone())
    plain.bias = nn.Parameter(bias.detach().clone() if bias is not None else torch.zeros(weight.shape[0]))
    return plain


class Transformer(nn.Module):
    """A transformer of train_cifar_vit.py, with or without a stem, on pixels."""

    def __init__(self, model: lipcert.Model, gelu: type[nn.Module]):
        super().__init__()
        net: Any = model.net
        stem = list(getattr(net.patch_embed, "backbone", []))
        layers = [gelu() if isinstance(layer, nn.GELU) else convolution(layer) for layer in stem]
        self.embed = nn.Sequential(Pixels(model), *layers, convolution(net.patch_embed.proj))
        self.position = nn.Parameter(net.pos_embed.detach().float())
        self.tokens, self.width = self.position.shape[1:]
        self.blocks = nn.ModuleList([Block(block, self.tokens, gelu) for block in net.blocks])
        self.head = affine(net.head.weight, net.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).reshape(-1, self.width, self.tokens).permute(0, 2, 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Sorted(nn.Module):
    """MaxMin of two halves (a, b): (b + r, a − r) with r = relu(a − b)."""

    def __init__(self, channels: int, layer: type[nn.Module]):
        super().__init__()
        one = torch.eye(channels // 2)
        difference, signs = torch.cat((one, -one), 1), torch.cat((one, -one))
        swapped = torch.eye(channels).roll(channels // 2, 0)
        self.difference, self.signs, self.swapped = (self._layer(layer, m) for m in (difference, signs, swapped))

    @staticmethod
    def _layer(layer: type[nn.Module], matrix: Tensor) -> nn.Module:
        made: Any = layer(matrix.shape[1], matrix.shape[0], *((1,) if layer is nn.Conv2d else ()), bias=False)
        made.weight = nn.Parameter(matrix.reshape(made.weight.shape))
        return made

    def forward(self, x: Tensor) -> Tensor:
        return self.swapped(x) + self.signs(torch.relu(self.difference(x)))


class Residual(nn.Module):
    """A LiResNet with linear blocks and MaxMin, on pixels."""

    def __init__(self, model: lipcert.Model):
        super().__init__()
        net: Any = model.net
        layers: list[nn.Module] = [Pixels(model)]
        plain: type[nn.Module] = nn.Conv2d
        channels = 0
        for layer in (*net.stem, *net.blocks, *net.neck):
            if isinstance(layer, MaxMin):
                layers.append(Sorted(channels, plain))
            elif isinstance(layer, nn.Flatten):
                layers.append(nn.Flatten())
            elif isinstance(layer, LinearResidual):
                factor = layer.beta * layer.scale
                weight = layer.conv.weight * factor.view(-1, 1, 1, 1)
                middle = layer.conv.kernel_size[0] // 2
                weight = weight + nn.functional.pad(torch.eye(channels)[..., None, None], [middle] * 4)
                layers.append(convolution(layer.conv, weight, layer.conv.bias * factor))
            elif isinstance(layer, nn.Conv2d):
                layers.append(convolution(layer))
                channels = layer.out_channels
            else:
                layers.append(affine(layer.weight, layer.bias))
                channels, plain = layer.out_features, nn.Linear
        self.features, self.mirror = nn.Sequential(*layers), None
        if net.mirror:
            self.mirror = affine(torch.eye(model.input_size[-1]).flip(0), None)
        self.head = affine(nn.functional.normalize(net.head.weight), net.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images)
        if self.mirror is not None:
            features = (features + self.features(self.mirror(images))) * 0.5
        return self.head(features)


class Crown:
    """CROWN's lower bound on the margins of one image, in float32 as auto_LiRPA computes it: an estimate.

    Args:
        model: a transformer of train_cifar_vit.py or a LiResNet with linear blocks, or one like them.

    Raises:
        ImportError: auto_LiRPA is not installed, or cannot be imported beside this version of torch.
    """

    def __init__(self, model: lipcert.Model):
        from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm, __version__
        from auto_LiRPA.operators.gelu import GELU

        def ball(image: Tensor, eps: float) -> Any:
            return BoundedTensor(image, PerturbationLpNorm(norm=2, eps=eps))

        network = Residual(model) if isinstance(model.net, LiResNet) else Transformer(model, GELU)
        self.version, self.ball, self.network = __version__, ball, network.eval()
        options = {"softmax": "lse", "mul": {"middle": True}, "conv_mode": "matrix"}
        self.bounded = BoundedModule(self.network, torch.zeros(1, *model.input_size), bound_opts=options)

    def __call__(self, image: Tensor, label: int, eps: float) -> float:
        """The bound on the least f_label − f_j over the ball of radius ε around an image of shape (1, C, H, W)."""
        classes = self.network.head.out_features
        others = [j for j in range(classes) if j != label]
        wanted = torch.zeros(1, len(others), classes)
        wanted[0, :, label] = 1
        wanted[0, range(len(others)), others] = -1
        ball = (self.ball(image, eps),)
        with torch.no_grad():
            return float(self.bounded.compute_bounds(x=ball, C=wanted, method="backward", bound_upper=False)[0].min())
