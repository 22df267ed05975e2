"""The weight matrices of a network, and constraints on their norms during training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.norms import Geometry
from lipcert.settings import MaxNorm
from lipcert.surgery import L2Attention, LayerProject, SmoothProject


class Matrix:
    """A weight as matrices, or one of the three parts of the joint ``qkv`` weight of an attention."""

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

        A kernel is flattened. Its norm is that of the convolution if patches do not overlap. Otherwise they differ by a
        factor of at most √(number of patches that share a pixel).
        """
        return self.part_of(self.parameter)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter of which the matrix is a view."""
        parameter: nn.Parameter = getattr(self.module, self.name)
        return parameter

    def part_of(self, whole: Tensor) -> Tensor:
        """The entries of the matrix in a tensor of the shape of the parameter; shape (groups, rows, columns)."""
        if not whole.is_contiguous():  # channels last: the order of the columns is the same in all these tensors
            whole = whole.movedim(1, -1)
        rows = whole.view(len(whole), -1).chunk(self.parts)[self.part]
        return rows.view(self.groups, -1, rows.shape[1])

    def start(self, generator: torch.Generator) -> Tensor:
        """A random start vector for a power iteration; an image of a few kernel sizes if patches overlap."""
        value, conv = self.value(), self.overlapping
        shape: tuple[int, ...] = (self.groups, value.shape[2], 1)
        if conv is not None:
            shape = (1, conv.in_channels, *(4 * side for side in conv.kernel_size))
        return torch.randn(shape, generator=generator).to(value)

    def power(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """One step of power iteration with WᵀW."""
        conv = self.overlapping
        if conv is None:
            value = self.value()
            vector = F.normalize(value.mT @ F.normalize(value @ vector, dim=1), dim=1)
            return vector, (value @ vector).norm(dim=1, keepdim=True)
        with torch.enable_grad():
            image = vector.detach().requires_grad_()
            result = Geometry.of_module(conv).apply(image, conv.weight.detach())
            norms = result.reshape(self.groups, -1).norm(dim=1)
            (ahead,) = torch.autograd.grad(norms.sum(), image)  # Wᵀ Wv / ‖Wv‖ for each group
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


class NormLimits:
    """Limits the spectral norms of the matrices of a network; queries, keys and values are separate matrices.

    The scales of projections, which are diagonal matrices, are clipped to ±norm.

    The limits may depend on the paths of the modules, such as ``{"*": 1.4, "*.fc1": 1.2, "*.q": 0.3, "*.k": 0.3}``. If
    several patterns match, the last one counts; a matrix that no pattern matches is free. A joint ``attn.qkv`` has the
    paths ``attn.q``, ``attn.k`` and ``attn.v``. Smaller limits are worthwhile for queries and keys, since the second
    derivative of the scores is the product of their norms, and for matrices before an activation, whose norms enter a
    certificate squared.

    The norms are estimated by power iteration, one step per call, with vectors kept between calls. So the limits hold
    up to the error of that estimate.
    """

    def __init__(self, model: nn.Module, norm: MaxNorm = 1.0):
        limited, self.scales = norm_limits(model, norm)
        self.matrices = [matrix for matrix, _ in limited]
        self.norms = [largest for _, largest in limited]
        generator = torch.Generator().manual_seed(0)
        self.vectors = [matrix.start(generator) for matrix in self.matrices]
        for _ in range(20):
            self()

    @torch.no_grad()
    def __call__(self) -> None:
        """Makes one step of power iteration for each matrix, and scales matrices above their limits down to them."""
        for scale, norm in self.scales:
            scale.clamp_(-norm, norm)
        for index, (matrix, norm) in enumerate(zip(self.matrices, self.norms, strict=True)):
            vector, norms = matrix.power(self.vectors[index])
            if bool((norms > 0).all()):  # the vector of a matrix of zeros would become zero
                self.vectors[index] = vector
            matrix.value().div_((norms / norm).clamp_min(1.0))


def norm_limits(model: nn.Module, norm: MaxNorm) -> tuple[list[tuple[Matrix, float]], list[tuple[nn.Parameter, float]]]:
    """The matrices and the scales of projections with a limit, each with this limit; see :class:`NormLimits`."""
    limits = norm if isinstance(norm, Mapping) else {"*": norm}
    missed = set(limits) - {"*"}
    limited: list[tuple[Matrix, float]] = []
    scales: list[tuple[nn.Parameter, float]] = []
    every = list(matrices(model))

    def norms_at(path: str) -> list[float]:
        matching = [pattern for pattern in limits if fnmatchcase(path, pattern)]
        missed.difference_update(matching)
        return [limits[pattern] for pattern in matching[-1:]]

    for matrix in every:
        for largest in norms_at(matrix.path):
            if matrix.name not in matrix.module._parameters:
                raise InputError(
                    f"{matrix.path} computes its weight from others (a parametrisation), so max_norm cannot limit it; "
                    "leave it out by a pattern, or remove the parametrisation"
                )
            limited.append((matrix, largest))
    for path, module in projections(model):
        scales += [(module.weight, largest) for largest in norms_at(path)]
    if missed:
        paths = ", ".join(matrix.path for matrix in every[:8])
        raise InputError(f"max_norm has {min(missed)!r}, and no layer of the network matches it; there are {paths} …")
    return limited, scales


def projections(model: nn.Module) -> Iterator[tuple[str, SmoothProject | LayerProject]]:
    """The paths and modules of the projections that replace LayerNorm."""
    for path, module in _named(model):
        if isinstance(module, (SmoothProject, LayerProject)):
            yield path, module
