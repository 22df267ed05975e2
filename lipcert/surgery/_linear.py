"""Linear maps with bounds on their norms; weights, state-dict keys and arithmetic are those of torch's own modules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lipcert.errors import InputError
from lipcert.norms import conv_norm, dense_norm, gram_norm
from lipcert.numerics import Bound

# Iterations of Orthogonal.retract after an update, which is small: each squares the distance from the manifold.
_STEPS = 2


class LipLinear(nn.Linear):
    """``nn.Linear`` with its Lipschitz constant. Same parameters, same state-dict keys, same output."""

    def lipschitz(self, input_shape: tuple[int, ...]) -> Bound:
        """An upper bound on the spectral norm of the weight.

        Args:
            input_shape: shape of one sample, (..., in_features).

        Returns:
            The bound, for the ℓ2 norm over the whole sample; rows are mapped independently.

        Raises:
            InputError: if the last dimension is not ``in_features``.
        """
        if not input_shape or input_shape[-1] != self.in_features:
            raise InputError(f"LipLinear takes (..., {self.in_features}), got {tuple(input_shape)}")
        return Bound.deterministic(dense_norm(self.weight), "spectral norm", "lipcert.norms.dense_norm")

    def norm(self) -> Tensor:
        """A norm for training: differentiable, in the weight's dtype, by Gram iteration. Not for certificates."""
        return gram_norm(self.weight)


class LipConv2d(nn.Conv2d):
    """``nn.Conv2d`` with its Lipschitz constant, for zero padding. Same parameters, state-dict keys and output."""

    def lipschitz(self, input_shape: tuple[int, ...]) -> Bound:
        """An upper bound on the norm of the convolution on images of one size.

        Args:
            input_shape: (in_channels, height, width).

        Returns:
            The bound, by :func:`lipcert.norms.conv_norm`.

        Raises:
            InputError: if the shape does not fit, or the padding mode is not zeros; other modes repeat pixels, which
                raises the norm.
        """
        if len(input_shape) != 3 or input_shape[0] != self.in_channels:
            raise InputError(f"LipConv2d takes ({self.in_channels}, height, width), got {tuple(input_shape)}")
        if self.padding_mode != "zeros":
            raise InputError(f"LipConv2d has a bound for zero padding only, not for padding_mode={self.padding_mode!r}")
        bound = conv_norm(
            self.weight,
            tuple(input_shape[1:]),
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )
        return Bound.deterministic(bound, "norm of the convolution", "lipcert.norms.conv_norm")

    def norm(self) -> Tensor:
        """An upper bound on the norm for training: differentiable, in the weight's dtype. Not for certificates.

        The convolution extracts patches and multiplies each by the flattened weight. A pixel lies in at most ∏
        ⌈k·gcd(s, δ)/s⌉ patches (kernel k, stride s, dilation δ; the offsets j with p − δj divisible by s are s/gcd(s,
        δ) apart). So the norm of extracting patches is at most the square root of that number; for patch embeddings
        (k = s, δ = 1) it is exact.
        """
        overlap = math.prod(
            math.ceil(k * math.gcd(s, d) / s)
            for k, s, d in zip(self.kernel_size, self.stride, self.dilation, strict=True)
        )
        groups = self.weight.flatten(1).unflatten(0, (self.groups, -1))
        return math.sqrt(overlap) * gram_norm(groups).amax()


class Orthogonal(nn.Conv2d):
    """A convolution with a 1×1 kernel whose matrix, or its transpose, has orthonormal columns."""

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True):
        super().__init__(in_channels, out_channels, 1, bias=bias)
        nn.init.orthogonal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @torch.no_grad()
    def retract(self) -> None:
        """Returns to the manifold after an update: W ← W (3I − WᵀW)/2, which tends to the nearest such matrix.

        Source: Björck and Bowie, "An iterative algorithm for computing the best estimate of an orthogonal matrix", SIAM
        Journal on Numerical Analysis 8, 1971.
        """
        weight = self.weight.flatten(1)
        wide = weight.shape[0] < weight.shape[1]
        matrix = weight.mT if wide else weight
        for _ in range(_STEPS):
            matrix = 1.5 * matrix - 0.5 * matrix @ (matrix.mT @ matrix)
        self.weight.copy_((matrix.mT if wide else matrix).view_as(self.weight))
