"""Norms of diag(outer)·A·diag(inner) for matrices and convolutions A, with diagonals that depend on the image.

Near one image many units are constant. Then the operator A can be replaced by diag(outer)·A·diag(inner), with zeros for
the constant units of its input and of the activation after it. Its norm is at most that of A (Huang et al. 2021,
arXiv 2111.01395, proposition 1 and equation 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import Tag, tagged
from lipcert.graph import Node
from lipcert.norms import Draw, lanczos_error, lanczos_norm, verified_norms
from lipcert.numerics import INFLATE, root_of_squares, without_cudnn

DENSE_SIDE = 256
_DENSE_ENTRIES = 2**20
_CHUNK = 2**25
_LANCZOS_STEPS = 48


class Core:
    """A matrix or a convolution of the captured network, on tensors with the image as their first axis."""

    def __init__(
        self,
        node: Node,
        weight: Tensor,
        bias: Tensor | None,
        operation: Callable[[Tensor, Tensor], Tensor],
        fan_in: int,
    ):
        self.weight = weight
        self.positive, self.negative = weight.clamp_min(0), (-weight).clamp_min(0)
        self.operation = operation
        self.fan_in = fan_in
        self.matrixlike = not tagged(node, Tag.CONVOLVES)
        self.input_shape, self.output_shape = node.operands[0].shape, node.shape
        channels = (1,) * (1 if self.matrixlike else len(node.shape) - 2)
        self.bias = 0.0 if bias is None else bias.abs().reshape(-1, *(() if self.matrixlike else channels))

    def interval(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """The largest increase and decrease of the result: W⁺up + W⁻down and W⁺down + W⁻up, rounded up."""
        increase = self.operation(up, self.positive) + self.operation(down, self.negative)
        decrease = self.operation(down, self.positive) + self.operation(up, self.negative)
        return increase * INFLATE, decrease * INFLATE

    def row_norms(self, inner: Tensor) -> Tensor:
        """Norms of the rows of A·diag(inner), in the shape of the result, rounded up."""
        return root_of_squares(self.operation, inner, self.weight) * INFLATE

    def rounding(self, operand: Tensor) -> Tensor:
        """A bound on the rounding error of each entry of the result: (n + 16) 2⁻⁵² (|W||h| + |b|).

        It holds for any order of the sums.
        """
        size = self.operation(operand.abs(), self.weight.abs()) + self.bias
        return size * ((self.fan_in + 16) * 2.0**-52)

    @cached_property
    def matrix(self) -> Tensor | None:
        """The operator as one matrix (out, in), for convolutions of small images; the weight itself for matrices."""
        if self.matrixlike:
            return self.weight
        rows, columns = math.prod(self.output_shape), math.prod(self.input_shape)
        if rows * columns > _DENSE_ENTRIES or min(rows, columns) > DENSE_SIDE:
            return None
        basis = torch.eye(columns, dtype=self.weight.dtype, device=self.weight.device)
        # The unit vectors are a batch, so row i of the result is column i of the matrix.
        return self.operation(basis.reshape(columns, *self.input_shape), self.weight).reshape(columns, rows).mT

    @property
    def exact(self) -> bool:
        """Whether norms are verified deterministically; otherwise they are probabilistic Lanczos bounds."""
        return self.matrix is not None and min(self.matrix.shape) <= DENSE_SIDE

    def norms(self, outer: Tensor, inner: Tensor, draw: Draw | None) -> Tensor:
        """Upper bounds on ‖diag(outer)·A·diag(inner)‖ for each image, for non-negative weights.

        A small matrix is bounded deterministically. Otherwise the bound is a probabilistic Lanczos bound, or without
        ``draw`` Schur's test on absolute values: ‖B‖ ≤ √(max row sum · max column sum).
        """
        if self.exact:
            assert self.matrix is not None
            rows, columns = self.matrix.shape
            # A linear layer acts on each token separately: one block for each, and the norm is the largest of a block.
            row_weights, column_weights = outer.reshape(len(outer), -1, rows), inner.reshape(len(inner), -1, columns)
            blocks = row_weights.shape[1]
            chunk = max(1, _CHUNK // (blocks * rows * columns))
            bounds = [
                verified_norms((a.unsqueeze(-1) * self.matrix * b.unsqueeze(-2)).reshape(-1, rows, columns))
                .reshape(-1, blocks)
                .amax(1)
                for a, b in zip(row_weights.split(chunk), column_weights.split(chunk), strict=True)
            ]
            return torch.cat(bounds) * INFLATE
        if draw is None:
            return self._schur(outer, inner)
        size = min(math.prod(self.input_shape), math.prod(self.output_shape))
        chunk = max(1, _CHUNK // (size * _LANCZOS_STEPS))
        pairs = zip(outer.split(chunk), inner.split(chunk), strict=True)
        return torch.cat([self._lanczos(a, b, draw) for a, b in pairs])

    def _pull(self, template: Tensor, weight: Tensor) -> Callable[[Tensor], Tensor]:
        # The operation is linear, so its vector-Jacobian product at any point is the adjoint.
        pull: Any = torch.func.vjp(lambda x: self.operation(x, weight), torch.zeros_like(template))[1]
        return lambda u: pull(u)[0]

    def _schur(self, outer: Tensor, inner: Tensor) -> Tensor:
        weight = self.weight.abs()
        rows = outer * self.operation(inner, weight)
        columns = inner * self._pull(inner, weight)(outer)
        product = rows.reshape(len(rows), -1).amax(1) * columns.reshape(len(columns), -1).amax(1)
        return product.sqrt() * INFLATE

    def _lanczos(self, outer: Tensor, inner: Tensor, draw: Draw) -> Tensor:
        pull = self._pull(inner, self.weight)

        def product(v: Tensor) -> Tensor:
            return (self.operation(v.reshape(inner.shape) * inner, self.weight) * outer).reshape(len(v), -1)

        def adjoint(u: Tensor) -> Tensor:
            return (pull(u.reshape(outer.shape) * outer) * inner).reshape(len(u), -1)

        columns, rows = inner[0].numel(), outer[0].numel()
        # ‖B‖ = ‖Bᵀ‖: Lanczos runs on the side with fewer entries.
        forth, back, size = (product, adjoint, columns) if columns <= rows else (adjoint, product, rows)
        norms = lanczos_norm(
            forth, back, len(inner), size, draw=draw, tolerance=0.02, steps=_LANCZOS_STEPS, device=inner.device
        )
        # As for `rounding`; a sum of the adjoint has at most as many terms as the weight has entries per input channel.
        terms = max(self.fan_in, self.weight.numel() // self.weight.shape[1])
        error = (terms + 16) * 2.0**-52 * self._schur(outer, inner)
        return (norms + lanczos_error(_LANCZOS_STEPS) * error) * INFLATE


def core_of(node: Node) -> Core | None:
    """The operator of a captured linear layer or convolution whose weights do not depend on the image, or None."""
    if not tagged(node, Tag.DENSE, Tag.MATRIX_PRODUCT, Tag.CONVOLVES):
        return None
    args = arguments(node)
    weight, bias = args.get("weight"), args.get("bias")
    if tagged(node, Tag.MATRIX_PRODUCT):
        right = args["other"]
        if not isinstance(right, Tensor) or right.dim() != 2 or len(node.operands[0].shape) < 2:
            return None
        return Core(node, right.detach().mT, None, F.linear, len(right))
    if not isinstance(weight, Tensor) or isinstance(bias, Node) or not isinstance(args["input"], Node):
        return None
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if tagged(node, Tag.DENSE):
        return Core(node, weight, bias, F.linear, weight.shape[1])
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    geometry = {key: args[key] for key in ("stride", "padding", "dilation", "groups") if key in args}

    def convolve(x: Tensor, kernel: Tensor) -> Tensor:
        with without_cudnn():
            return function(x.flatten(0, 1), kernel, None, **geometry).unflatten(0, x.shape[:2])

    return Core(node, weight, bias, convolve, math.prod(weight.shape[1:]))
