"""Norms, products and quotients of float64 bounds at any scale: the only place that sums squares for a certificate.

A sum of squares in float64 is 0 for numbers below 1e-162, and infinite above 1e154. So tensors are scaled by powers of
two, which are exact, unless the plain norm shows that this is not needed. Other code that certifies neither sums
squares nor divides by a number that is kept away from 0 (tests/test_repository.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipcert.numerics._slack import SMALLEST_NORMAL, at_most

Axes = int | tuple[int, ...]

# Plain norms between these have all their squares in range: those that underflow are n numbers below 2⁻¹⁰²², relative
# to a sum of at least 2⁻⁸⁰⁰, and none overflows.
_LOW, _HIGH = 2.0**-400, 2.0**400


def computed_l2_norm(tensor: Tensor, dim: Axes | None = None, keepdim: bool = False) -> Tensor:
    """The ℓ2 norm over some axes, to nearest: for n entries its relative error is below (n + 16) 2⁻⁵³, at any scale.

    The sum of n squares errs by γ_n in any order, and its root by half of that; 16 covers the root, the scale, and
    underflow. Results below 2⁻¹⁰²² may be 0. NaN and infinite entries give NaN or ∞.

    Args:
        tensor: real, any floating-point type.
        dim: one axis or several; all by default.
        keepdim: whether the axes stay, with size 1.

    Returns:
        float64.
    """
    axes = tuple(range(tensor.dim())) if dim is None else (dim,) if isinstance(dim, int) else dim
    plain = torch.linalg.vector_norm(tensor, dim=axes, keepdim=keepdim, dtype=torch.float64)
    if not tensor.numel() or bool(((plain > _LOW) & (plain < _HIGH)).all()):
        return plain
    entries = tensor.double()
    largest = entries.detach().abs().amax(axes, keepdim=True)
    exponent = torch.frexp(torch.where(largest.isfinite(), largest, 1.0)).exponent.double()
    halves = torch.exp2((exponent / 2).floor()), torch.exp2(exponent - (exponent / 2).floor())
    scaled = torch.linalg.vector_norm(entries / halves[0] / halves[1], dim=axes, keepdim=True)
    result = scaled * halves[0] * halves[1]
    return result if keepdim else result.sum(axes)


def l2_norm(tensor: Tensor, dim: Axes | None = None, keepdim: bool = False) -> Tensor:
    """Upper bounds on the ℓ2 norm over some axes, float64: :func:`computed_l2_norm`, raised by more than its error.

    0 only where all entries are 0, and ∞ where the norm overflows or an entry is NaN.
    """
    norm = computed_l2_norm(tensor, dim, keepdim)
    raised = at_most(norm * (1 + (tensor.numel() / max(1, norm.numel()) + 20) * 2.0**-53))
    if not tensor.numel() or bool((raised >= SMALLEST_NORMAL).all()):
        return raised
    axes = tuple(range(tensor.dim())) if dim is None else dim
    some = (tensor != 0).sum(axes, keepdim) > 0
    return torch.where(some, raised.clamp_min(SMALLEST_NORMAL), raised)


def sum_squares(tensor: Tensor, dim: Axes | None = None, keepdim: bool = False) -> Tensor:
    """Upper bounds on the sum of squares over some axes, float64: 0 only where all entries are 0."""
    norm = l2_norm(tensor, dim, keepdim)
    return times(norm, norm)


def root_sum(*bounds: Tensor) -> Tensor:
    """√(Σ b²) for bounds b ≥ 0 of the same shape, rounded up."""
    return l2_norm(torch.stack(torch.broadcast_tensors(*bounds)), 0)


def root_of_squares(product: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
    """Upper bounds on √f(a², b²) for a bilinear f with terms a_i² b_j², such as a matrix product, up to rounding.

    With a and b divided by powers of two near their largest entries, f misses terms below 2⁻¹⁰²² by underflow, of which
    there are fewer than 2⁶². So where f ≥ 2⁻⁸⁰⁰ that is rounding; elsewhere it is replaced by 2⁻⁸⁰⁰, or 0 if all terms
    are. Sums are not rounded up: the caller knows their length.
    """
    scales = [power_of_two(tensor.detach().abs().amax()) for tensor in (first, second)]
    (a, b), (p, q) = (first / scales[0], second / scales[1]), scales
    squares = product(a.square(), b.square()).clamp_min(0)  # a kernel may compute convolutions by transforms
    small = squares < 2.0**-800
    if bool(small.any()):
        some = product((a != 0).to(a), (b != 0).to(b)) > 0.5
        squares = squares.masked_fill(small, 0.0).masked_fill(small & some, 2.0**-800)
    return at_most(squares).sqrt() * p * q


def power_of_two(largest: Tensor) -> Tensor:
    """The powers of two just above positive numbers, at least 2⁻¹⁰²²; 1 for 0, ∞ and NaN."""
    usable = largest.isfinite() & (largest > 0)
    return torch.exp2(torch.frexp(torch.where(usable, largest, 0.5)).exponent.double().clamp(-1022, 1023))


def times(first: Tensor, second: Tensor) -> Tensor:
    """Products of bounds ≥ 0, rounded up, with 0 · ∞ = 0: 0 only where a factor is 0, and ∞ for NaN."""
    product = at_most(first * second * (1 + 2.0**-51)).clamp_min(SMALLEST_NORMAL)
    return torch.where((first == 0) | (second == 0), 0.0, product)


def over(bound: Tensor | float, least: Tensor) -> Tensor:
    """Quotients of bounds ≥ 0 by lower bounds, rounded up: 0 only for 0; ∞ by numbers ≤ 0, and for NaN."""
    bound, positive = torch.as_tensor(bound, dtype=torch.float64, device=least.device), least > 0
    quotient = at_most(bound / torch.where(positive, least, 1.0) * (1 + 2.0**-51)).clamp_min(SMALLEST_NORMAL)
    return torch.where(bound == 0, 0.0, torch.where(positive, quotient, math.inf))


def unit_vectors(tensor: Tensor, dim: int = -1) -> Tensor:
    """The tensor divided by its computed length along an axis; 0 where that is below 2⁻¹⁰²²."""
    size = computed_l2_norm(tensor, dim, keepdim=True)
    return torch.where(size >= SMALLEST_NORMAL, tensor / size.clamp_min(SMALLEST_NORMAL), 0.0)
