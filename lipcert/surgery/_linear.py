"""Linear maps with bounds on their norms; weights, state-dict keys and arithmetic are those of torch's own modules."""

from __future__ import annotations

import torch
from torch import nn

from lipcert.errors import InputError
from lipcert.norms import Geometry, Operator, dense_norm
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


class LipConv2d(nn.Conv2d):
    """``nn.Conv2d`` with its Lipschitz constant. Same parameters, state-dict keys and output."""

    def lipschitz(self, input_shape: tuple[int, ...]) -> Bound:
        """An upper bound on the norm of the convolution on images of one size.

        Args:
            input_shape: (in_channels, height, width).

        Returns:
            The bound, by :func:`lipcert.norms.conv_norm`.

        Raises:
            InputError: if the shape does not fit.
        """
        if len(input_shape) != 3 or input_shape[0] != self.in_channels:
            raise InputError(f"LipConv2d takes ({self.in_channels}, height, width), got {tuple(input_shape)}")
        bound = Operator(self.weight, Geometry.of_module(self), tuple(input_shape[1:])).norm
        return Bound.deterministic(bound, "norm of the convolution", "lipcert.norms.conv_norm")


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
