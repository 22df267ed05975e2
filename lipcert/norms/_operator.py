"""Linear maps by their weights: a matrix along the last axis, or a convolution, with the factors multiplied into it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.norms._conv import zero_padded_norm
from lipcert.norms._dense import dense_norm
from lipcert.norms._geometry import Geometry, Padding, Size, per_dimension
from lipcert.numerics import Estimator, Upper, computed_l2_norm, detached, estimated, give_back, l2_norm, or_estimated

# Factors that a network multiplies are multiplied here in float64, and each product rounds. A sum with 1 enlarges a
# relative error at most 2¹⁰ times. With that included, 1000 successive roundings change an entry by less than this
# factor.
COMPOSED = 1 + 2**-33
_LARGE = 2**18


class Operator:
    """rows · W · columns + identity · I for a matrix W, or for a convolution W ∗ with channels along axis 1.

    The factors are multiplied out only while a norm is computed, so a network's maps take no extra memory.

    Args:
        weight: shape (out, in), or (out, in / groups, *kernel).
        geometry: that of a convolution.
        size: that of its images, without channels.
        identity: the factor of I.
        rows: the factors of the outputs, in a shape that broadcasts with the weight.
        columns: those of the inputs, likewise.
    """

    def __init__(
        self,
        weight: Tensor,
        geometry: Geometry | None = None,
        size: tuple[int, ...] = (),
        *,
        identity: float = 0.0,
        rows: Tensor | None = None,
        columns: Tensor | None = None,
    ):
        self.weight = detached(weight)
        self.geometry, self.size, self.identity, self.rows, self.columns = geometry, size, identity, rows, columns

    @property
    def axis(self) -> int:
        """The axis of the inputs and outputs of the matrix, or of the channels."""
        return -1 if self.geometry is None else 1

    @property
    def composed(self) -> bool:
        """Whether the norm needs products of the factors, which round."""
        return self.rows is not None or self.columns is not None

    def folded(self) -> Tensor:
        """The weight without the identity; float64 if it is composed."""
        if not self.composed:
            return self.weight
        product = self.weight.to(torch.float64, copy=True)
        for factor in (self.columns, self.rows):
            if factor is not None:
                product *= factor.to(product.device)
        return product

    @cached_property
    def norm(self) -> Upper:
        """An upper bound on the operator norm.

        Rounding changes a composed weight W by E with |E| ≤ c|W|, c = ``COMPOSED`` − 1, and ‖E‖ is at most Σ_taps
        ‖E_tap‖_F ≤ √(taps) c‖W‖_F ≤ taps · c‖W‖_F, times the norm √m of a padding that uses entries m times.
        """
        weight = self.folded()
        if self.geometry is None:
            norm = dense_norm(weight, identity=self.identity)
        else:
            norm = conv_norm(weight, self.size, identity=self.identity, **vars(self.geometry))
        if self.composed:
            entries = weight.reshape(1, -1)
            size = estimated(entries, lambda w: computed_l2_norm(w, 1).amax()) or Upper(
                float(l2_norm(entries.detach(), 1))
            )
            rounding = size * (math.prod(weight.shape[2:]) * (COMPOSED - 1))
            copies = 1 if self.geometry is None else self.geometry.uses(self.size)
            norm = norm + (rounding if copies == 1 else rounding * Upper(copies).sqrt())
        del weight
        if self.weight.numel() >= _LARGE and not self.weight.requires_grad:  # which they do in training only
            give_back()
        return norm

    def scaled(self, scale: Tensor) -> Operator | None:
        """diag(scale) ∘ self, for a scale that broadcasts with the output; None if it varies along other axes."""
        if self.identity or scale.dim() <= max(self.axis, 0) or scale.numel() not in (1, self.weight.shape[0]):
            return None
        if scale.numel() != scale.shape[self.axis]:
            return None
        rows = scale.reshape(-1, *[1] * (self.weight.dim() - 1))
        return self._with(rows if self.rows is None else self.rows * rows.to(self.rows.device), self.columns)

    def after(self, channels: Tensor | None) -> Operator | None:
        """self ∘ diag(channels); None if there is no factor for each channel, or if a factor of the inputs is known."""
        groups = 1 if self.geometry is None else self.geometry.groups
        out, inputs, *kernel = self.weight.shape
        if self.identity or self.columns is not None or channels is None or channels.numel() != inputs * groups:
            return None
        # All outputs of a group read the same input channels.
        per_group = channels.reshape(groups, 1, -1).expand(groups, out // groups, -1)
        return self._with(self.rows, per_group.reshape(out, inputs, *[1] * len(kernel)))

    def plus_identity(self) -> Operator | None:
        """I + self; None if they are not of one form.

        With d(k − 1)/2 zeros on both sides the middle tap meets the pixel itself, and x + Wx adds 1 to that tap.
        """
        geometry, (out, inputs, *kernel) = self.geometry, self.weight.shape
        groups = 1 if geometry is None else geometry.groups
        if self.identity or out != inputs * groups or (geometry is not None and geometry != _centred(geometry, kernel)):
            return None
        return self._with(self.rows, self.columns, 1.0)

    def _with(self, rows: Tensor | None, columns: Tensor | None, identity: float = 0.0) -> Operator:
        return Operator(self.weight, self.geometry, self.size, identity=identity, rows=rows, columns=columns)


def _centred(geometry: Geometry, kernel: list[int]) -> Geometry | None:
    """The geometry that maps each pixel's own entry by the middle tap; None if there is no middle."""
    if not all(k % 2 for k in kernel):
        return None
    sides = tuple(d * (k - 1) // 2 for d, k in zip(geometry.dilation, kernel, strict=True))
    return Geometry((1,) * len(kernel), tuple((side, side) for side in sides), geometry.dilation, geometry.groups)


def _estimate(
    estimator: Estimator, weight: Tensor, input_size: tuple[int, ...], *, identity: float = 0.0, **geometry: Any
) -> Upper:
    convolve = Geometry.of(tuple(weight.shape[2:]), **geometry)

    def apply(v: Tensor, w: Tensor) -> Tensor:
        result = convolve.apply(v.flatten(0, 1), w).unflatten(0, v.shape[:2])
        return result + identity * v if identity else result

    return estimator.norm(apply, weight, (1, weight.shape[1] * convolve.groups, *input_size))


@or_estimated(_estimate)
def conv_norm(
    weight: Tensor,
    input_size: tuple[int, ...],
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    mode: str = "zeros",
    identity: float = 0.0,
) -> Upper:
    """An upper bound on the ℓ2 → ℓ2 norm of a convolution, rounding included.

    The bound is the maximum over the frequencies of the smallest torus that contains the image, or over those halfway
    between them. Strides are handled by the polyphase form, groups by their maximum. If the torus is expensive, a
    coarser grid with a rigorous correction of at most half a percent per dimension replaces it. Proofs:
    :mod:`lipcert.norms._conv` and :mod:`lipcert.norms._verify`. A padding that repeats entries, each at most m times,
    has norm √m, which multiplies the norm of the convolution of the padded image.

    With zero padding, the bound is usually 1 to 15 % above the exact norm and approaches it as the image grows. It is
    looser only on images hardly larger than the kernel. It is within 1e-5 for non-overlapping patches and for kernels
    of size 1.

    Args:
        weight: shape (out, in/groups, *kernel), 1 to 3 spatial dimensions, real, any floating-point dtype.
        input_size: spatial size of the input, without channels and padding.
        stride: one number, or one per dimension.
        padding: one number, one per dimension, one (left, right) pair per dimension, ``"same"`` or ``"valid"``.
        dilation: one number, or one per dimension.
        groups: as in ``torch.nn.functional.conv2d``.
        mode: the entries of the padding: ``"zeros"``, ``"circular"``, ``"reflect"`` or ``"replicate"``.
        identity: factor c of an added identity, for the linear residual c·x + W∗x. It needs stride 1, zero padding and
            an output of the shape of the input.

    Returns:
        The bound; 0 for a zero or empty weight.

    Raises:
        InputError: if the arguments do not fit together, or the weight is not real or holds NaN or an infinity.
    """
    geometry = Geometry.of(_kernel(weight, input_size), stride, padding, dilation, groups, mode)
    if groups < 1 or weight.shape[0] % groups:
        raise InputError(f"{weight.shape[0]} output channels cannot be split into {groups} groups")
    if mode == "zeros":
        return zero_padded_norm(weight, input_size, geometry, identity)
    if identity:
        raise InputError("identity needs zero padding")
    bare = replace(geometry, mode="zeros", padding=((0, 0),) * len(input_size))
    border = Upper(geometry.uses(input_size)).sqrt()
    return zero_padded_norm(weight, geometry.padded(input_size), bare, 0.0) * border


def conv_transpose_norm(
    weight: Tensor,
    input_size: tuple[int, ...],
    *,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Upper:
    """An upper bound on the ℓ2 → ℓ2 norm of a transposed convolution, rounding included.

    A transposed convolution is the adjoint of the convolution with the same parameters on images of the transposed
    convolution's output size. If ``output_padding`` reaches the stride, it is the adjoint of a restriction to some of
    that convolution's outputs. So :func:`conv_norm` of that convolution is a bound.
    """
    kernel = _kernel(weight, input_size)
    number = partial(per_dimension, dimensions=len(kernel))
    strides, dilations = number(stride, name="stride"), number(dilation, name="dilation")
    pads = number(padding, name="padding", smallest=0)
    extras = number(output_padding, name="output_padding", smallest=0)
    output_size = tuple(
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, k, s, d, p, e in zip(input_size, kernel, strides, dilations, pads, extras, strict=True)
    )
    if min(output_size) < 1:
        raise InputError(f"the transposed convolution has an empty output, of size {output_size}; lower the padding")
    return conv_norm(weight, output_size, stride=strides, padding=pads, dilation=dilations, groups=groups)


def _kernel(weight: Tensor, input_size: tuple[int, ...]) -> tuple[int, ...]:
    kernel = tuple(weight.shape[2:])
    if weight.is_complex() or not 1 <= len(kernel) <= 3:
        raise InputError(
            f"a convolution needs a real weight of shape (out, in/groups, *kernel) with 1 to 3 spatial dimensions, "
            f"got {tuple(weight.shape)}, {weight.dtype}"
        )
    if len(input_size) != len(kernel) or min(input_size) < 1:
        raise InputError(f"a kernel of shape {kernel} needs {len(kernel)} input sizes ≥ 1, got {tuple(input_size)}")
    return kernel
