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

    def value(self) -> Tensor:
        """A view of the parameter, shape (groups, rows, columns).

        A kernel is flattened. Its norm is that of the convolution where patches do not overlap, and within a factor
        √(patches that share a pixel) of it elsewhere.
        """
        parameter: Tensor = getattr(self.module, self.name)
        rows = parameter.view(len(parameter), -1).chunk(self.parts)[self.part]
        return rows.view(self.groups, -1, rows.shape[1])


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
        self.vectors = []
        for matrix in self.matrices:
            groups, _, columns = matrix.value().shape
            vector = torch.randn(groups, columns, 1, generator=generator)
            self.vectors.append(F.normalize(vector, dim=1).to(matrix.value()))
        for _ in range(20):
            self()

    @torch.no_grad()
    def __call__(self) -> None:
        """One step of power iteration for each matrix; those found too large are divided by their excess."""
        for scale in self.scales:
            scale.clamp_(-self.norm, self.norm)
        for matrix, vector, norm in zip(self.matrices, self.vectors, self.norms, strict=True):
            value = matrix.value()
            vector.copy_(F.normalize(value.mT @ F.normalize(value @ vector, dim=1), dim=1))
            norms = (value @ vector).norm(dim=1, keepdim=True)
            value.div_((norms / norm).clamp_min(1.0))


def projections(model: nn.Module) -> Iterator[SmoothProject | LayerProject]:
    """The projections that stand in place of LayerNorm."""
    yield from (module for module in model.modules() if isinstance(module, (SmoothProject, LayerProject)))


def hold_projections(model: nn.Module, radius: float) -> None:
    """Gives all projections one radius and a scale of 1 that is not trained, for training from random weights."""
    for module in projections(model):
        module.radius.fill_(radius)
        module.weight.data.fill_(1.0)
        module.weight.requires_grad_(False)
