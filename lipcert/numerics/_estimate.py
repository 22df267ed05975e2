"""Differentiable estimates of bounds, for training: the same rules, with estimated norms in place of verified ones.

Inside :func:`estimating` the rules of :mod:`lipcert.bounds` compute with :class:`Estimated` numbers. Every operation on
an :class:`Upper <lipcert.numerics.Upper>` is then also an operation on a torch scalar. A norm is ⟨u, W v⟩ with u and v
from subspace iteration, so autograd differentiates the result with respect to the weights. Such norms approach the true
ones from below. So nothing computed here is a bound, and :class:`lipcert.bounds.Bound` does not accept it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.numerics._upper import INFINITE, Number, Upper

_FIRST_STEPS = 30  # steps of subspace iteration from random vectors
_SLOPE = 1e-3

Result = TypeVar("Result")


class Estimated(Upper):
    """An estimate with a gradient, in place of an upper bound. It can be too small."""

    __slots__ = ("tensor",)
    tensor: Tensor

    def __init__(self, tensor: Tensor | Estimated):
        if isinstance(tensor, Estimated):
            return
        self.tensor = tensor.double()
        self._value = Decimal(self.tensor.detach().item())

    def __add__(self, other: Number) -> Upper:
        return self._with(other, lambda a, b: a + b)

    def __mul__(self, other: Number) -> Upper:
        return Upper(0) if other == 0 else self._with(other, lambda a, b: a * b)

    __radd__ = __add__
    __rmul__ = __mul__

    def __truediv__(self, divisor: float | int) -> Upper:
        return Estimated(self.tensor / float(divisor))

    def __pow__(self, exponent: int) -> Upper:
        return Estimated(self.tensor**exponent)

    def sqrt(self) -> Upper:
        return Estimated(self.tensor.sqrt()) if self > 0 else self

    def _with(self, other: Number, operation: Callable[[Tensor, Tensor | float], Tensor]) -> Upper:
        other = Upper(other)
        if not other.finite:
            return INFINITE
        return Estimated(operation(self.tensor, other.tensor if isinstance(other, Estimated) else float(other)))


class Estimator:
    """Norms by subspace iteration. Each norm starts from the vectors of its previous call.

    Training makes the largest singular values nearly equal, and then a single vector cannot follow the changing
    weights. After 60 updates of a LiResNet with 6 blocks, the product of its norms was 2.3 times too small with one
    vector and one step per update, and 1.3 times with four vectors and two steps.

    Attributes:
        vectors: the vectors of each norm, in the order of the calls; shape (width, *shape of one).
    """

    def __init__(self, dtype: torch.dtype = torch.float32, steps: int = 2, width: int = 4):
        self.dtype = dtype
        self.steps = steps
        self.width = width
        self.vectors: list[Tensor] = []
        self.place = 0
        self.generator = torch.Generator().manual_seed(0)

    def norm(self, apply: Callable[[Tensor, Tensor], Tensor], weight: Tensor, shape: Sequence[int]) -> Upper:
        """The maximum over maps A of ⟨u, A v⟩, with v the best vector of the subspace and u = A v/‖A v‖."""
        weight = weight.to(self.dtype)
        fixed = weight.detach()
        width = min(self.width, math.prod(shape[1:]))
        warm = self.place < len(self.vectors) and self.vectors[self.place].shape == (width, *shape)
        if warm:
            v = self.vectors[self.place]
        else:
            v = _orthonormal(torch.randn(width, *shape, generator=self.generator).to(fixed))
        for _ in range(self.steps if warm else max(self.steps, _FIRST_STEPS)):
            with torch.enable_grad():
                start = v.detach().requires_grad_()
                result = apply(start, fixed)
                (back,) = torch.autograd.grad(result, start, result.detach())  # Aᵀ A v
            best, image = _best(v, result.detach())
            v = _orthonormal(back)
        self.vectors[self.place : self.place + 1] = [v]
        self.place += 1
        u = F.normalize(image.flatten(1), dim=1)
        return Estimated((u * apply(best[None], weight)[0].flatten(1)).sum(1).amax())


def _orthonormal(vectors: Tensor) -> Tensor:
    """An orthonormal basis of the span of the vectors, for each map; shape (width, maps, ...)."""
    columns = vectors.flatten(2).permute(1, 2, 0)
    return torch.linalg.qr(columns).Q.permute(2, 0, 1).reshape(vectors.shape)


def _best(vectors: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """The unit vector in the span of orthonormal vectors with the longest image, and that image; shape (maps, ...)."""
    flat = images.flatten(2).transpose(0, 1)
    weights = torch.linalg.eigh(flat @ flat.mT).eigenvectors[..., -1]  # (maps, width)

    def combined(parts: Tensor) -> Tensor:
        return torch.einsum("mw,wm...->m...", weights, parts)

    return combined(vectors), combined(images)


_ACTIVE: ContextVar[Estimator | None] = ContextVar("estimator", default=None)


@contextmanager
def estimating(estimator: Estimator) -> Iterator[None]:
    """A context in which the rules compute differentiable estimates instead of bounds."""
    token = _ACTIVE.set(estimator)
    estimator.place = 0
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def detached(tensor: Tensor) -> Tensor:
    """The tensor; detached unless :func:`estimating` is active."""
    return tensor.detach() if _ACTIVE.get() is None else tensor


def estimated(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Upper | None:
    """function(tensor) if :func:`estimating` is active and the tensor requires gradients; otherwise None."""
    return Estimated(function(tensor)) if _ACTIVE.get() is not None and tensor.requires_grad else None


def as_tensor(numbers: Sequence[Upper]) -> Tensor:
    """The numbers as a float64 tensor, shape (len(numbers),); estimates keep their gradients."""
    return torch.stack([n.tensor if isinstance(n, Estimated) else torch.tensor(float(n)).double() for n in numbers])


def or_estimated(estimate: Callable[..., Upper]) -> Callable[[Callable[..., Upper]], Callable[..., Upper]]:
    """A decorator for norms of weights that calls ``estimate(estimator, weight, ...)`` instead in training."""

    def decorate(exact: Callable[..., Upper]) -> Callable[..., Upper]:
        @functools.wraps(exact)
        def norm(weight: Tensor, *args: Any, **kwargs: Any) -> Upper:
            estimator = _ACTIVE.get()
            if estimator is not None and weight.requires_grad:
                return estimate(estimator, weight, *args, **kwargs)
            with torch.no_grad():
                return exact(weight, *args, **kwargs)

        return norm

    return decorate


def with_slope(function: Callable[[float], Upper], number: Upper) -> Upper:
    """function(number); for an estimate, with a gradient computed from a difference quotient."""
    value = function(float(number))
    if not isinstance(number, Estimated) or not value.finite or not number > 0:
        return value
    ahead = function(float(number) * (1 + _SLOPE))
    if not ahead.finite or not value > 0 or value == ahead:
        return value
    # The slope of log f over log x: value · (x/x₀)^exponent has the value and the derivative of f at x₀.
    exponent = (math.log(float(ahead)) - math.log(float(value))) / math.log1p(_SLOPE)
    return Estimated(float(value) * (number.tensor / float(number)) ** exponent)
