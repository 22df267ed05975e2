"""The weight matrices of a network, one by one, and how they are held at a norm while it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert._finetune_settings import MaxNorm
from lipcert.errors import InputError
from lipcert.surgery import L2Attention, LayerProject, SmoothProject


class Matrix:
    """A weight, or one of the three parts of an attention's joint ``qkv`` weight, as matrices.

    Args:
        path: of the module in the model, for people; ``blocks.0.attn.q`` for a part of ``blocks.0.attn.qkv``.
        module: what holds the parameter.
        name: the parameter's name there.
        part: which of ``parts`` equal parts of the rows.
        parts: how many there are.
    """

    def __init__(self, path: str, module: nn.Module, name: str, part: int = 0, parts: int = 1):
        self.path = path
        self.module = module
        self.name = name
        self.part = part
        self.parts = parts
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
        return self.part_of(self.parameter)

    @property
    def parameter(self) -> nn.Parameter:
        """What the matrix is, or is a part of."""
        parameter: nn.Parameter = getattr(self.module, self.name)
        return parameter

    def part_of(self, whole: Tensor) -> Tensor:
        """The entries of a tensor like the parameter that belong to the matrix, shape (groups, rows, columns)."""
        if not whole.is_contiguous():  # channels last; the order of the columns is the same for all tensors like it
            whole = whole.movedim(1, -1)
        rows = whole.view(len(whole), -1).chunk(self.parts)[self.part]
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
            norms = result.reshape(self.groups, -1).norm(dim=1)
            (ahead,) = torch.autograd.grad(norms.sum(), image)  # of each group, Wᵀ Wv / ‖Wv‖
        ahead = ahead.reshape(self.groups, -1)
        return F.normalize(ahead, dim=1).view_as(vector), ahead.norm(dim=1)[:, None, None]


def matrices(model: nn.Module) -> Iterator[Matrix]:
    """The matrices of all linear maps, convolutions and L2 attentions, in the order of the modules."""
    for path, module in _named(model):
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            joint = path.rpartition(".")[2] == "qkv" and module.weight.shape[0] % 3 == 0
            if joint:
                yield from (Matrix(path[:-3] + "qkv"[part], module, "weight", part, 3) for part in range(3))
            else:
                yield Matrix(path, module, "weight")
        elif isinstance(module, L2Attention):
            yield Matrix(f"{path}.v", module, "v_weight")


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by their path in the timm model."""
    yield from ((path.removeprefix("net."), module) for path, module in model.named_modules())


class NormHold:
    """Holds the matrices of a network at a spectral norm; queries, keys and values each on their own.

    The scales of projections are held at ±norm likewise: they are diagonal matrices.

    The norms may differ by the paths of the modules, such as ``{"*": 1.4, "*.fc1": 1.2, "*.q": 0.3, "*.k": 0.3}``: of
    several patterns that match, the last one counts, and what none matches is free. A joint ``attn.qkv`` is
    ``attn.q``, ``attn.k`` and ``attn.v``. Attention that is far from one-hot has a small second derivative, and that
    of the scores is the product of the norms of queries and keys; and certificates see matrices in front of an
    activation squared. Both are worth holding lower.

    The norms are estimated by power iteration with a vector kept from call to call, one step a call, so they are held
    up to the error of that estimate.

    Args:
        model: the network.
        norm: the largest norm allowed, or several by patterns as in :mod:`fnmatch`.

    Raises:
        InputError: a pattern that matches no matrix and no projection, or a matrix that is parametrised.
    """

    def __init__(self, model: nn.Module, norm: MaxNorm = 1.0):
        held, self.scales = held_at(model, norm)
        self.matrices = [matrix for matrix, _ in held]
        self.norms = [largest for _, largest in held]
        generator = torch.Generator().manual_seed(0)
        self.vectors = [matrix.start(generator) for matrix in self.matrices]
        for _ in range(20):
            self()

    @torch.no_grad()
    def __call__(self) -> None:
        """One step of power iteration for each matrix; those found too large are divided by their excess."""
        for scale, norm in self.scales:
            scale.clamp_(-norm, norm)
        for index, (matrix, norm) in enumerate(zip(self.matrices, self.norms, strict=True)):
            vector, found = matrix.power(self.vectors[index])
            if bool((found > 0).all()):  # a matrix of zeros leads nowhere
                self.vectors[index] = vector
            matrix.value().div_((found / norm).clamp_min(1.0))


def held_at(model: nn.Module, norm: MaxNorm) -> tuple[list[tuple[Matrix, float]], list[tuple[nn.Parameter, float]]]:
    """The matrices and the scales of projections that are held, each with its largest norm, see :class:`NormHold`."""
    wanted = norm if isinstance(norm, Mapping) else {"*": norm}
    missed = set(wanted) - {"*"}
    held: list[tuple[Matrix, float]] = []
    scales: list[tuple[nn.Parameter, float]] = []
    every = list(matrices(model))

    def norms_at(path: str) -> list[float]:
        matching = [pattern for pattern in wanted if fnmatchcase(path, pattern)]
        missed.difference_update(matching)
        return [wanted[pattern] for pattern in matching[-1:]]

    for matrix in every:
        for largest in norms_at(matrix.path):
            if matrix.name not in matrix.module._parameters:
                raise InputError(
                    f"{matrix.path} computes its weight from others (a parametrisation), so max_norm cannot hold it; "
                    "leave it out by a pattern, or remove the parametrisation"
                )
            held.append((matrix, largest))
    for path, module in projections(model):
        scales += [(module.weight, largest) for largest in norms_at(path)]
    if missed:
        paths = ", ".join(matrix.path for matrix in every[:8])
        raise InputError(f"max_norm has {min(missed)!r}, and no layer of the network matches it; there are {paths} …")
    return held, scales


def projections(model: nn.Module) -> Iterator[tuple[str, SmoothProject | LayerProject]]:
    """The projections that stand in place of LayerNorm, by their paths."""
    for path, module in _named(model):
        if isinstance(module, (SmoothProject, LayerProject)):
            yield path, module


def hold_projections(model: nn.Module, radius: float) -> None:
    """Gives all projections one radius and a scale of 1 that is not trained, for training from random weights."""
    for _, module in projections(model):
        module.radius.fill_(radius)
        module.weight.data.fill_(1.0)
        module.weight.requires_grad_(False)
