"""The weight matrices of a network, one by one, and how they are held at a norm while it is trained."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.surgery import L2Attention, LayerProject, SmoothProject


class Matrix:
    """A weight, or one of the three parts of an attention's joint ``qkv`` weight, as matrices.

    Args:
        module: what holds the parameter.
        name: the parameter's name there.
        part: which of ``parts`` equal parts of the rows.
        parts: how many there are.
    """

    def __init__(self, module: nn.Module, name: str, part: int = 0, parts: int = 1):
        self.module = module
        self.name = name
        self.part = part
        self.parts = parts
        self.scores = parts == 3 and part < 2  # queries and keys
        self.groups = module.groups if isinstance(module, nn.Conv2d) else 1
        # A convolution whose patches overlap.
        self.overlapping: nn.Conv2d | None = None
        if isinstance(module, nn.Conv2d) and any(k > s for k, s in zip(module.kernel_size, module.stride, strict=True)):
            self.overlapping = module

    def value(self) -> Tensor:
        """A view of the parameter, shape (groups, rows, columns).

        A kernel is flattened. Its norm is that of the convolution where patches do not overlap, and within a factor
        √(patches that share a pixel) of it elsewhere.
        """
        parameter: Tensor = getattr(self.module, self.name)
        rows = parameter.view(len(parameter), -1).chunk(self.parts)[self.part]
        return rows.view(self.groups, -1, rows.shape[1])

    def start(self, generator: torch.Generator) -> Tensor:
        """A random vector to start a power iteration from; an image of a few kernels where patches overlap."""
        value, conv = self.value(), self.overlapping
        shape: tuple[int, ...] = (self.groups, value.shape[2], 1)
        if conv is not None:
            shape = (1, conv.in_channels, *(4 * side for side in conv.kernel_size))
        return torch.randn(shape, generator=generator).to(value)

    def power(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """One step of power iteration with WᵀW: the unit vector that it leads to, and the norm found.

        The norm is that of each group's matrix or, where patches overlap, convolution; shape (groups, 1, 1).
        """
        conv = self.overlapping
        if conv is None:
            value = self.value()
            vector = F.normalize(value.mT @ F.normalize(value @ vector, dim=1), dim=1)
            return vector, (value @ vector).norm(dim=1, keepdim=True)
        with torch.enable_grad():
            image = vector.detach().requires_grad_()
            result = F.conv2d(image, conv.weight.detach(), None, conv.stride, conv.padding, conv.dilation, conv.groups)
            norms = result.view(self.groups, -1).norm(dim=1)
            (ahead,) = torch.autograd.grad(norms.sum(), image)  # of each group, Wᵀ Wv / ‖Wv‖
        ahead = ahead.view(self.groups, -1)
        return F.normalize(ahead, dim=1).view_as(vector), ahead.norm(dim=1)[:, None, None]


def matrices(model: nn.Module) -> Iterator[Matrix]:
    """The matrices of all linear maps, convolutions and L2 attentions, in the order of the modules."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            joint = path.rpartition(".")[2] == "qkv" and module.weight.shape[0] % 3 == 0
            parts = 3 if joint else 1
            yield from (Matrix(module, "weight", part, parts) for part in range(parts))
        elif isinstance(module, L2Attention):
            yield Matrix(module, "v_weight")


class NormHold:
    """Holds the matrices of a network at spectral norm ≤ ``norm``; queries, keys and values each on their own.

    The scales of projections are held at ±``norm`` likewise: they are diagonal matrices.

    Attention that is far from one-hot has a small second derivative, and that of the scores is the product of the norms
    of queries and keys: ``scores`` holds these two lower.

    The norms are estimated by power iteration with a vector kept from call to call, one step a call, so they are held
    up to the error of that estimate.

    Args:
        model: the network.
        norm: the largest norm allowed.
        scores: the same for queries and keys.
    """

    def __init__(self, model: nn.Module, norm: float = 1.0, scores: float | None = None):
        self.matrices = list(matrices(model))
        self.norm = norm
        self.scales = [module.weight for module in projections(model)]
        self.norms = [norm if scores is None or not m.scores else scores for m in self.matrices]
        generator = torch.Generator().manual_seed(0)
        self.vectors = [matrix.start(generator) for matrix in self.matrices]
        for _ in range(20):
            self()

    @torch.no_grad()
    def __call__(self) -> None:
        """One step of power iteration for each matrix; those found too large are divided by their excess."""
        for scale in self.scales:
            scale.clamp_(-self.norm, self.norm)
        for index, (matrix, norm) in enumerate(zip(self.matrices, self.norms, strict=True)):
            vector, found = matrix.power(self.vectors[index])
            if bool((found > 0).all()):  # a matrix of zeros leads nowhere
                self.vectors[index] = vector
            matrix.value().div_((found / norm).clamp_min(1.0))


def projections(model: nn.Module) -> Iterator[SmoothProject | LayerProject]:
    """The projections that stand in place of LayerNorm."""
    yield from (module for module in model.modules() if isinstance(module, (SmoothProject, LayerProject)))


def hold_projections(model: nn.Module, radius: float) -> None:
    """Gives all projections one radius and a scale of 1 that is not trained, for training from random weights."""
    for module in projections(model):
        module.radius.fill_(radius)
        module.weight.data.fill_(1.0)
        module.weight.requires_grad_(False)
