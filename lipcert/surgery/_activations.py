"""1-Lipschitz activations with constant pieces.

Clipped activations are constant for large inputs. So more units are constant near a given image, and the local bounds
drop their rows and columns. Source: Huang, Zhang, Shi, Kolter and Anandkumar, "Training Certifiably Robust Neural
Networks with Efficient Local Lipschitz Bounds", NeurIPS 2021 (arXiv 2111.01395), sections 4.1 and 4.2; MaxMin: Anil,
Lucas and Grosse, "Sorting Out Lipschitz Function Approximation", ICML 2019.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.numerics import Bound


class _Activation(nn.Module):
    """An activation with the constant 1, for the reason that its class gives."""

    PARTS: ClassVar[dict[str, tuple[type[nn.Module], ...]]] = {}
    why: ClassVar[str]
    dim: int

    def lipschitz(self, input_shape: tuple[int, ...]) -> Bound:
        """The bound 1, for a sample of this shape.

        Raises:
            InputError: if its channels do not pair up, or broadcasting a threshold would enlarge the sample: copying
                entries is not 1-Lipschitz.
        """
        self._check(tuple(input_shape))
        return Bound.deterministic(1.0, self.why, f"lipcert.surgery.{type(self).__name__}")

    def _check(self, shape: tuple[int, ...]) -> None:
        _half(shape, self.dim)


class ClippedReLU(_Activation):
    """ReLUθ(x) = min(max(x, 0), θ), with a learnable threshold θ (Huang et al. 2021, arXiv 2111.01395, equation 8).

    It is 1-Lipschitz as a composition of x ↦ max(x, 0) and x ↦ min(x, θ), both 1-Lipschitz entry by entry for any θ.

    Args:
        threshold: θ; one number, or a tensor that broadcasts over a sample, such as (C, 1, 1) for one per channel.
    """

    why = "1-Lipschitz entry by entry"

    def __init__(self, threshold: float | Tensor = 1.0):
        super().__init__()
        self.threshold = _threshold(threshold, "threshold")

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(x.clamp(min=0), self.threshold)

    def _check(self, shape: tuple[int, ...]) -> None:
        _check_broadcast(self.threshold, shape)


class MaxMin(_Activation):
    """Pairs the two halves (a, b) of the channels and returns (max(a, b), min(a, b)), in the shape of the input.

    It is 1-Lipschitz: sorting is continuous and, on each of finitely many pieces, a permutation, which is orthogonal.

    Args:
        dim: the channel dimension, counted with the batch: 1 for (N, C, H, W), -1 for (N, tokens, C).
    """

    why = "a permutation at every point"

    def __init__(self, dim: int = 1):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(_sorted(*x.chunk(2, self.dim)), self.dim)


class SmoothMaxMin(_Activation):
    """:class:`MaxMin` with a softplus s(t) = β log(1 + exp(t/β)) in place of the ReLU: (b + s(a − b), a − s(a − b)).

    It is 1-Lipschitz: with σ = s'(a − b) in (0, 1) its Jacobian maps (δa, δb) to σ(δa, δb) + (1 − σ)(δb, δa), a mean of
    two isometries. It tends to MaxMin as β tends to 0. It is smooth, so that ``anchored`` can linearise it.

    Args:
        beta: β > 0, the width of the transition between the two orders, in units of the input.
        dim: the channel dimension, counted with the batch: 1 for (N, C, H, W), -1 for (N, tokens, C).

    Raises:
        InputError: ``beta`` is not a positive, finite number.
    """

    why = "a mean of two permutations at every point"

    def __init__(self, beta: float = 0.2, dim: int = 1):
        super().__init__()
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 < beta < math.inf:
            raise InputError(f"beta must be a positive, finite number, got {beta!r}")
        self.beta, self.dim = float(beta), dim

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, self.dim)
        above = F.logsigmoid((b - a) / self.beta) * -self.beta
        return torch.cat((b + above, a - above), self.dim)

    def extra_repr(self) -> str:
        return f"beta={self.beta:g}, dim={self.dim}"


class ClippedMaxMin(_Activation):
    """Clipped :class:`MaxMin`: min(max(a, b), upper) and max(min(a, b), lower), with learnable thresholds.

    It is 1-Lipschitz, because MaxMin, x ↦ min(x, upper) and x ↦ max(x, lower) are.

    Args:
        upper: threshold of the maxima; one number, or a tensor that broadcasts over half a sample.
        lower: threshold of the minima, likewise.
        dim: the channel dimension, counted with the batch: 1 for (N, C, H, W), -1 for (N, tokens, C).
    """

    why = "a permutation at every point, then clipping"

    def __init__(self, upper: float | Tensor = 1.0, lower: float | Tensor = -1.0, dim: int = 1):
        super().__init__()
        self.dim = dim
        self.upper = _threshold(upper, "upper")
        self.lower = _threshold(lower, "lower")

    def forward(self, x: Tensor) -> Tensor:
        high, low = _sorted(*x.chunk(2, self.dim))
        return torch.cat((torch.minimum(high, self.upper), torch.maximum(low, self.lower)), self.dim)

    def _check(self, shape: tuple[int, ...]) -> None:
        half = _half(shape, self.dim)
        _check_broadcast(self.upper, half)
        _check_broadcast(self.lower, half)


# The replacements of ReLU, by the argument ``convert(activation=...)``.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "clipped-relu": ClippedReLU,
    "maxmin": MaxMin,
    "clipped-maxmin": ClippedMaxMin,
}


@torch.no_grad()
def calibrate_activation(module: nn.Module, x: Tensor, first: bool) -> None:
    """Sets the thresholds so that they clip nothing in this input and, unless ``first``, in the earlier ones."""
    if isinstance(module, ClippedReLU):
        largest = x.max() if bool(x.max() > 0) else torch.ones_like(module.threshold)
        module.threshold.copy_(largest if first else torch.maximum(largest, module.threshold))
        return
    if x.dim() not in (2, 4) or x.shape[1] % 2:
        raise InputError(
            f"MaxMin pairs channels in dimension 1, but a ReLU of this network gets values of shape {tuple(x.shape)}; "
            "choose clipped-relu"
        )
    if isinstance(module, ClippedMaxMin):
        high, low = (part(*x.chunk(2, 1)) for part in (torch.maximum, torch.minimum))
        module.upper.copy_(high.max() if first else torch.maximum(high.max(), module.upper))
        module.lower.copy_(low.min() if first else torch.minimum(low.min(), module.lower))


def _sorted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """max(a, b) and min(a, b).

    With gradients they are computed as b + (a − b)₊ and a − (a − b)₊. The backward pass takes a fifth of the time, and
    the values differ by rounding. Certified and deployed networks do not use this branch.
    """
    if torch.is_grad_enabled() and a.requires_grad:
        above = torch.relu(a - b)
        return b + above, a - above
    return torch.maximum(a, b), torch.minimum(a, b)


def _threshold(value: float | Tensor, name: str) -> nn.Parameter:
    threshold = torch.as_tensor(value, dtype=torch.get_default_dtype()).detach().clone()
    if not threshold.is_meta and bool(threshold.isnan().any()):
        raise InputError(f"{name} must be a number, got NaN")
    return nn.Parameter(threshold)


def _check_broadcast(threshold: Tensor, shape: tuple[int, ...]) -> None:
    sizes = tuple(threshold.shape)
    fits = len(sizes) <= len(shape) and all(a in (1, b) for a, b in zip(reversed(sizes), reversed(shape), strict=False))
    if not fits:
        raise InputError(f"a threshold of shape {sizes} does not broadcast over a sample of shape {tuple(shape)}")


def _half(input_shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    axis = dim - 1 if dim > 0 else len(input_shape) + dim
    if dim == 0 or not 0 <= axis < len(input_shape) or input_shape[axis] % 2:
        raise InputError(
            f"MaxMin needs an even number of channels in dimension {dim}, got a sample of {tuple(input_shape)}"
        )
    return tuple(n // 2 if i == axis else n for i, n in enumerate(input_shape))
