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
from dataclasses import replace

import torch
from torch import Tensor

from lipcert.norms._conv import Axis, polyphase, torus_norm, zero_padded_norm
from lipcert.norms._dense import dense_norm
from lipcert.norms._geometry import Geometry
from lipcert.norms._scale import as_float64, normalise
from lipcert.numerics import Upper, l2_norm

_DENSE_SIDE = 512


def bordered_norm(weight: Tensor, size: tuple[int, ...], geometry: Geometry) -> Upper:
    """An upper bound on the norm of a convolution with a padding that repeats entries; proofs in the module."""
    if not weight.numel():
        return Upper(0)
    zeros = replace(geometry, mode="zeros")
    bare = replace(zeros, padding=((0, 0),) * len(size))
    best = zero_padded_norm(weight, geometry.padded(size), bare, 0.0) * Upper(geometry.uses(size)).sqrt()
    if geometry.mode == "circular":
        best = min(best, _cyclic(weight, size, geometry))
    else:
        best = min(best, zero_padded_norm(weight, size, zeros, 0.0) + _of_border(weight, size, geometry))
    inputs = weight.shape[1] * geometry.groups * math.prod(size)
    if inputs <= _DENSE_SIDE and weight.shape[0] * math.prod(geometry.padded(size)) <= 4 * _DENSE_SIDE:
        best = min(best, _dense(weight, size, geometry, inputs))
    return best


def _dense(weight: Tensor, size: tuple[int, ...], geometry: Geometry, inputs: int) -> Upper:
    units = torch.eye(inputs, dtype=torch.float64, device=weight.device).reshape(inputs, -1, *size)
    scaled, scale = normalise(as_float64(weight))
    matrix, sizes = (geometry.apply(units, w).flatten(1) for w in (scaled, scaled.abs()))
    error = math.prod(weight.shape[2:]) * 2.0**-50
    return (dense_norm(matrix) + Upper(float(l2_norm(sizes))) * error) * scale


class _Cycle(Axis):
    """One dimension on ℤ_N, N = ``reach``, in polyphase form."""

    @property
    def steps(self) -> tuple[int, ...]:
        """e − e_min for the distinct e, which are not divided by what they share: N is exact."""
        return tuple(e - self.exponents[0] for e in self.exponents)

    @property
    def torus(self) -> int:
        """N."""
        return self.reach


def _cyclic(weight: Tensor, size: tuple[int, ...], geometry: Geometry) -> Upper:
    """The circular bound of the module's docstring."""
    axes: list[Axis] = []
    copies = 1
    sides = zip(size, geometry.padding, weight.shape[2:], geometry.dilation, geometry.stride, strict=True)
    for n, (left, right), k, d, s in sides:
        outputs = (n + left + right - d * (k - 1) - 1) // s + 1
        if n % s:
            outputs, s = (outputs - 1) * s + 1, 1
        copies *= -(-outputs * s // n)
        taps = tuple((t, (d * t - left) // s, (d * t - left) % s) for t in range(k))
        exponents, phases = (tuple(sorted({tap[i] for tap in taps})) for i in (1, 2))
        axes.append(_Cycle(n, outputs, s, 0, n // s, taps, exponents, phases))
    matrices = as_float64(weight).unflatten(0, (geometry.groups, -1))
    scaled, scale = normalise(polyphase(matrices, axes).flatten(0, len(axes) - 1))
    return torus_norm(scaled, axes, False) * scale * Upper(copies).sqrt() if scale else Upper(0)


def _of_border(weight: Tensor, size: tuple[int, ...], geometry: Geometry) -> Upper:
    """Σ_t ‖W_t‖√m_t of the module's docstring."""
    places, padded, kernel = geometry.places(size), geometry.padded(size), weight.shape[2:]
    places[tuple(slice(left, left + n) for (left, _), n in zip(geometry.padding, size, strict=True))] = -1
    matrices = as_float64(weight).unflatten(0, (geometry.groups, -1))
    total = Upper(0)
    for tap in itertools.product(*(range(k) for k in kernel)):
        sides = zip(tap, geometry.dilation, geometry.stride, padded, kernel, strict=True)
        entries = places[tuple(slice(t * d, t * d + n - d * (k - 1), s) for t, d, s, n, k in sides)].flatten()
        entries = entries[entries >= 0]
        if entries.numel():
            matrix = matrices[(slice(None),) * 3 + tap]
            total = total + dense_norm(matrix) * Upper(int(torch.bincount(entries).max())).sqrt()
    return total
