"""Norms of a convolution together with the padding before it that repeats entries: circular, reflected or replicated.

The padding P alone has norm √m if an entry is used m times, 2 per convolution of an image with circular padding, though
W∗P may be orthogonal. The smallest of these bounds counts:

* **Product**: ‖W‖ on the padded image times √m.
* **Circular**: let P be circular in one dimension of n entries, with a entries on the left. Then
  y[p] = Σ_s W_s x[(σp + δs − a) mod n]. If the stride σ divides n, write δs − a = σe_s + r_s with 0 ≤ r_s < σ and
  X_r[v] = x[(σv + r) mod n] for v in ℤ_N, N = n/σ, which is a bijection x ↦ X. So y[p] = Σ_e V_e X[p + e], with V_e
  as in :mod:`._conv`: the m outputs are those of the cyclic convolution on ℤ_N, each at most ⌈m/N⌉ times, so the norm
  is at most √⌈m/N⌉ max_j ‖V̂(2πj/N)‖. Where m = N that is the norm itself. If σ does not divide n, the outputs are
  some of those with stride 1. In several dimensions the factors multiply.
* **Border**: W∗P = W∗Z + W∗B, with zeros Z around the image and the repeated entries B alone. A tap t of the kernel
  reads each output's entry from one place, so its part of W∗B has norm at most ‖W_t‖√m_t, if it reads m_t repeated
  copies of one entry at most.
* **Dense**: the matrix of W∗P, where it is small. An entry of it is a sum of at most K weights for a kernel of K taps,
  so its rounding error is at most Ku times the sum of their absolute values.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.norms._conv import _Axis, _polyphase, _torus_norm, conv_norm
from lipcert.norms._dense import dense_norm
from lipcert.norms._scale import as_float64, normalise
from lipcert.numerics import Estimator, Upper, l2_norm, or_estimated

_DENSE_SIDE = 512
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True)
class Border:
    """A padding that repeats entries.

    Attributes:
        mode: ``"circular"``, ``"reflect"`` or ``"replicate"``.
        pads: (left, right) of each dimension.
        size: of the image before it is padded.
    """

    mode: str
    pads: tuple[tuple[int, int], ...]
    size: tuple[int, ...]

    def apply(self, images: Tensor) -> Tensor:
        """Pads the last dimensions of images, shape (N, C, *size)."""
        return F.pad(images, [side for pair in reversed(self.pads) for side in pair], self.mode)

    @property
    def padded(self) -> tuple[int, ...]:
        """The size after padding."""
        return tuple(n + left + right for n, (left, right) in zip(self.size, self.pads, strict=True))

    def places(self) -> Tensor:
        """The entry of the image at each position of the padded one, shape ``padded``."""
        numbers = torch.arange(math.prod(self.size), dtype=torch.float64).reshape(1, 1, *self.size)
        return self.apply(numbers)[0, 0].long()

    def uses(self) -> int:
        """m, how often an entry is used at most."""
        return int(torch.bincount(self.places().flatten()).max())


def _estimate(estimator: Estimator, weight: Tensor, border: Border, **geometry: Any) -> Upper:
    convolution = _CONVOLUTIONS[len(border.size) - 1]

    def apply(v: Tensor, w: Tensor) -> Tensor:
        return convolution(border.apply(v.flatten(0, 1)), w, None, **geometry).unflatten(0, v.shape[:2])

    channels = weight.shape[1] * geometry.get("groups", 1)
    return estimator.norm(apply, weight, (1, channels, *border.size))


@or_estimated(_estimate)
def padded_conv_norm(
    weight: Tensor, border: Border, *, stride: tuple[int, ...], dilation: tuple[int, ...], groups: int = 1
) -> Upper:
    """An upper bound on the norm of a convolution without padding of its own, after a border; proofs in the module."""
    if not weight.numel():
        return Upper(0)
    geometry = {"stride": stride, "dilation": dilation, "groups": groups}
    best = conv_norm(weight, border.padded, **geometry) * Upper(border.uses()).sqrt()
    if border.mode == "circular":
        best = min(best, _cyclic(weight, border, stride, dilation, groups))
    else:
        whole = conv_norm(weight, border.size, padding=border.pads, **geometry)
        best = min(best, whole + _of_border(weight, border, stride, dilation, groups))
    inputs = weight.shape[1] * groups * math.prod(border.size)
    if inputs <= _DENSE_SIDE and weight.shape[0] * math.prod(border.padded) <= 4 * _DENSE_SIDE:
        best = min(best, _dense(weight, border, geometry, inputs))
    return best


def _dense(weight: Tensor, border: Border, geometry: dict[str, Any], inputs: int) -> Upper:
    units = torch.eye(inputs, dtype=torch.float64, device=weight.device).reshape(inputs, -1, *border.size)
    convolution = _CONVOLUTIONS[len(border.size) - 1]
    scaled, scale = normalise(as_float64(weight))
    matrix, size = (convolution(border.apply(units), w, None, **geometry).flatten(1) for w in (scaled, scaled.abs()))
    error = math.prod(weight.shape[2:]) * 2.0**-50
    return (dense_norm(matrix) + Upper(float(l2_norm(size))) * error) * scale


class _Cycle(_Axis):
    """One dimension on ℤ_N, N = ``reach``, in polyphase form."""

    @property
    def steps(self) -> tuple[int, ...]:
        """e − e_min for the distinct e, which are not divided by what they share: N is exact."""
        return tuple(e - self.exponents[0] for e in self.exponents)

    @property
    def torus(self) -> int:
        """N."""
        return self.reach


def _cyclic(weight: Tensor, border: Border, stride: Any, dilation: Any, groups: int) -> Upper:
    """The circular bound of the module's docstring."""
    axes: list[_Axis] = []
    copies = 1
    for n, padded, (left, _), k, d, s in zip(
        border.size, border.padded, border.pads, weight.shape[2:], dilation, stride, strict=True
    ):
        outputs = (padded - d * (k - 1) - 1) // s + 1
        if n % s:
            outputs, s = (outputs - 1) * s + 1, 1
        copies *= -(-outputs * s // n)
        taps = tuple((t, (d * t - left) // s, (d * t - left) % s) for t in range(k))
        exponents, phases = (tuple(sorted({tap[i] for tap in taps})) for i in (1, 2))
        axes.append(_Cycle(n, outputs, s, 0, n // s, taps, exponents, phases))
    matrices = as_float64(weight).unflatten(0, (groups, -1))
    scaled, scale = normalise(_polyphase(matrices, axes).flatten(0, len(axes) - 1))
    return _torus_norm(scaled, axes, False) * scale * Upper(copies).sqrt() if scale else Upper(0)


def _of_border(weight: Tensor, border: Border, stride: Any, dilation: Any, groups: int) -> Upper:
    """Σ_t ‖W_t‖√m_t of the module's docstring."""
    places = border.places()
    inside = torch.zeros(border.padded, dtype=torch.bool)
    inside[tuple(slice(left, left + n) for (left, _), n in zip(border.pads, border.size, strict=True))] = True
    places = torch.where(inside, -1, places)
    matrices = as_float64(weight).unflatten(0, (groups, -1))
    total = Upper(0)
    for tap in itertools.product(*(range(k) for k in weight.shape[2:])):
        first = [t * d for t, d in zip(tap, dilation, strict=True)]
        ends = [
            f + padded - d * (k - 1)
            for f, padded, d, k in zip(first, border.padded, dilation, weight.shape[2:], strict=True)
        ]
        entries = places[tuple(slice(f, end, s) for f, end, s in zip(first, ends, stride, strict=True))].flatten()
        entries = entries[entries >= 0]
        if entries.numel():
            matrix = matrices[(slice(None),) * 3 + tap]
            total = total + dense_norm(matrix) * Upper(int(torch.bincount(entries).max())).sqrt()
    return total
