"""Upper bounds on the spectral norms of convolutions with zero padding.

**Polyphase form.** In one dimension a convolution with stride σ, dilation δ and left padding a computes y[p] = Σ_s W_s
x[σp + δs − a], p = 0 … m − 1. Write a padded input position as σv + r with 0 ≤ r < σ, and likewise δs = σe_s + r_s. The
positions with phase r form separate channels, X_r[v] = x[σv + r − a], and

    y[p] = Σ_e V_e X[p + e],    V_e = [W_s at phase r_s for the s with e_s = e, 0 elsewhere],

is a convolution with stride 1. X lives on v₀ ≤ v < v₀ + n′ with v₀ = ⌊a/σ⌋ and n′ = ⌊(n − 1 + a)/σ⌋ − v₀ + 1; positions
there outside the image hold zeros, and allowing other values cannot lower the norm. Taps e outside
[d_min, d_max] = [v₀ − m + 1, v₀ + n′ − 1] meet no input and are dropped. With several dimensions, the same holds in
each.

**Torus.** y is part of the cyclic convolution on ℤ_N in each dimension, applied to X extended by zeros, if the m
outputs and the n′ inputs have distinct residues, N ≥ max(m, n′), and if no tap e ≠ d is congruent to a difference
d = v − p of an input and an output position: N > e_max − d_min and N > d_max − e_min. The cyclic convolution is block
diagonal in the Fourier basis, so the norm is at most

    max over j ∈ ∏ ℤ_N of ‖V̂(2πj/N)‖,    V̂(ω) = Σ_e V_e e^{iω·e}.

If all e − e_min of a dimension are multiples of g, V̂ depends, up to a phase, on g·ω alone, and ⌈N/g⌉ points for the
taps (e − e_min)/g give the values on the torus of side g·⌈N/g⌉ ≥ N. A single tap needs a single point. Then the bound
is the norm of the flattened weight; it is exact if some output has all its taps inside the image, as in a patch
embedding.

**Twists.** The same holds for functions on ℤ with X[v + N] = e^{iφ} X[v], for any φ in each dimension: one period of X
is the input extended by zeros, the equations for y at the outputs contain no other period, and the convolution is block
diagonal in the basis e^{iωv} with ω = (2πj + φ)/N. So the norm is at most the maximum over these ω, too. If taps are
multiples of g apart, φ is that of the torus of side g·⌈N/g⌉. With φ = π the grid lies halfway between the points of the
one with φ = 0, and the smaller maximum counts. Each of them is a bound, so an estimate may say which is the smallest.
For W = (1, 1, 1) and n values it is 1 + 2cos(π/(n + 1)), which is the
norm, while φ = 0 gives 3.

**Coarse grids.** In one dimension let d = (e_max − e_min)/g, and M the supremum of ‖V̂‖² over ω, other dimensions
fixed, taken at ω* with right singular vector x. f(ω) = ‖V̂(ω)x‖² is a real trigonometric polynomial of degree ≤ d with
0 ≤ f ≤ M = f(ω*), so T = 2f/M − 1 has |T| ≤ 1 = T(ω*). By the inequality of Bernstein and Szegő, T′² + d²T² ≤ d²,
arccos T changes at rate ≤ d, hence T(ω* + θ) ≥ cos(dθ) and f(ω* + θ) ≥ M·cos²(dθ/2) for |θ| ≤ π/d. Some point of a grid
of N points is within π/N of ω*. Replacing one dimension after the other by its grid gives, for N > d,

    sup over all ω of ‖V̂‖ ≤ (max over the grid of ‖V̂‖) · ∏ 1/cos(πd/(2N)),

and the supremum bounds the convolution on images of every size. N = 16·d loosens the bound by half a percent per
dimension. (The scalar case: Ehlich and Zeller, "Schwankung von Polynomen zwischen Gitterpunkten", Math. Z. 86, 1964;
other constants for several variables: Pfister and Bresler, arXiv 1802.09588.)

**Rounding.** For a single row, V̂·V̂ᴴ is computed from V̂ itself; for other matrices, from

    V̂·V̂ᴴ = C_0 + Σ_{τ>0} (C_τ + C_τᵀ) cos ω·τ + i (C_τ − C_τᵀ) sin ω·τ,    C_τ = Σ_{e−e′=τ} V_e·V_{e′}ᵀ,

in float64. The arguments 2π Σ (τ_d k_d mod 2N_d)/(2N_d) with k = 2j + φ/π come from exact integers and are below 6π, so
cosines and sines err by less than 128u. With K taps, c columns and S = Σ_e |V_e|, there are at most 4K terms τ, inner
products of length ≤ Kc in C_τ, and Σ_τ |C_τ| ≤ S·Sᵀ in each entry; so each entry errs by less than
√2·(2Kc + 8K + 142)·u·S·Sᵀ, with single rows by less than (8.1·(K + 64) + 16·(c + 8))·u·S·Sᵀ, both below
dot_error(Kc + 56)·S·Sᵀ, and ‖S·Sᵀ‖_F ≤ ‖S‖_F².
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.norms._dense import matrices_norm
from lipcert.norms._estimate import CANDIDATES, estimate_largest, growths
from lipcert.norms._geometry import Geometry
from lipcert.norms._scale import as_float64, normalise, remembered
from lipcert.norms._verify import chunk_length, dot_error, largest_norm, sum_squares
from lipcert.numerics import UNIT, Upper

_COARSE = 16
_COARSE_GAIN = 4
_EXPENSIVE = 2e9
# Tori are twisted up to this multiple of (e_max − e_min)/g; beyond it that gains less than a third of a percent per
# dimension.
_SMALL = 20
# If frequencies are expensive, twists have to lower the square of the norm to this share.
_WORTHWHILE = 0.99
# A further grid has to lower the square of the norm to this share, or is given up.
_WORSE = 0.999


def zero_padded_norm(weight: Tensor, size: tuple[int, ...], geometry: Geometry, identity: float) -> Upper:
    """An upper bound on the norm of a convolution with zero padding, plus ``identity`` times its input."""
    matrices = as_float64(weight).unflatten(0, (geometry.groups, -1))
    if matrices.numel() == 0:
        return Upper(0)
    numbers = zip(size, weight.shape[2:], geometry.stride, geometry.dilation, geometry.padding, strict=True)
    axes = [_axis(*of_one) for of_one in numbers]
    if identity:
        same_size = all(axis.stride == 1 and axis.outputs == axis.inputs for axis in axes)
        if not same_size or matrices.shape[1] != matrices.shape[2]:
            raise InputError("identity needs stride 1 and an output of the same shape as the input")
        widened = any(axis.origin not in axis.exponents for axis in axes)
        axes = [axis.with_exponent(axis.origin) for axis in axes]
    taps = polyphase(matrices, axes)
    if identity:
        centre = taps[tuple(axis.exponents.index(axis.origin) for axis in axes)]
        centre.diagonal(dim1=-2, dim2=-1).add_(identity)
    scaled, scale = normalise(taps.flatten(0, len(axes) - 1))
    if scale == 0:
        return Upper(0)
    if not identity:
        return torus_norm(scaled, axes) * scale
    joint = (torus_norm(scaled, axes) + 4 * UNIT) * scale
    if not widened:  # then every V̂(ω) is smaller than the sum of the two norms
        return joint
    # On images hardly larger than the kernel a torus with room for the identity may give the larger bound.
    return min(joint, zero_padded_norm(weight, size, geometry, 0.0) + abs(identity))


@dataclass(frozen=True)
class Axis:
    """One dimension in polyphase form.

    Attributes:
        inputs: n.
        outputs: m.
        stride: σ.
        origin: v₀, the position of the image.
        reach: n′, the number of positions v that the image spans.
        taps: for every s that meets the image (s, e_s, r_s).
        exponents: the distinct e, ascending.
        phases: the distinct r, ascending.
    """

    inputs: int
    outputs: int
    stride: int
    origin: int
    reach: int
    taps: tuple[tuple[int, int, int], ...]
    exponents: tuple[int, ...]
    phases: tuple[int, ...]

    def with_exponent(self, exponent: int) -> Axis:
        return replace(
            self,
            exponents=tuple(sorted({*self.exponents, exponent})),
            phases=tuple(sorted({*self.phases, 0})),
        )

    @property
    def steps(self) -> tuple[int, ...]:
        """(e − e_min)/g for the distinct e."""
        differences = [e - self.exponents[0] for e in self.exponents]
        return tuple(difference // max(1, math.gcd(*differences)) for difference in differences)

    @property
    def torus(self) -> int:
        """The sufficient number of frequencies, ⌈N/g⌉; 1 for a single tap."""
        if len(self.exponents) == 1:
            return 1
        first, last = self.exponents[0], self.exponents[-1]
        nearest, farthest = self.origin - self.outputs + 1, self.origin + self.reach - 1
        side = max(self.outputs, self.reach, last - nearest + 1, farthest - first + 1)
        return -(-side // ((last - first) // self.steps[-1]))


def _axis(size: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int]) -> Axis:
    left, right = pads
    outputs = (size + left + right - dilation * (kernel - 1) - 1) // stride + 1
    if outputs < 1:
        raise InputError(
            f"a kernel of size {kernel} with dilation {dilation} does not fit an input of size {size} "
            f"with padding {left} and {right}"
        )
    origin = left // stride
    reach = (size - 1 + left) // stride - origin + 1
    taps = tuple(
        (s, dilation * s // stride, dilation * s % stride)
        for s in range(kernel)
        if origin - outputs < dilation * s // stride < origin + reach
    )
    exponents = tuple(sorted({e for _, e, _ in taps}))
    phases = tuple(sorted({r for _, _, r in taps}))
    return Axis(size, outputs, stride, origin, reach, taps, exponents, phases)


def polyphase(matrices: Tensor, axes: list[Axis]) -> Tensor:
    """The V_e of the polyphase form."""
    dimensions = len(axes)
    kernels = matrices.movedim(tuple(range(3, 3 + dimensions)), tuple(range(dimensions)))
    grid = [len(axis.exponents) for axis in axes] + [len(axis.phases) for axis in axes]
    result = matrices.new_zeros(*grid, *kernels.shape[dimensions:])
    for taps in itertools.product(*(axis.taps for axis in axes)):
        exponents = [axis.exponents.index(e) for axis, (_, e, _) in zip(axes, taps, strict=True)]
        phases = [axis.phases.index(r) for axis, (_, _, r) in zip(axes, taps, strict=True)]
        result[tuple(exponents + phases)] = kernels[tuple(s for s, _, _ in taps)]
    phase_axes = tuple(range(dimensions, 2 * dimensions))
    return result.movedim(phase_axes, tuple(axis + 2 for axis in phase_axes)).flatten(dimensions + 2)


@remembered
def torus_norm(taps: Tensor, axes: list[Axis]) -> Upper:
    """An upper bound on the maximum over ω of ‖Σ_e V_e e^{iω·e}‖."""
    if len(taps) == 1:
        return matrices_norm(taps[0])
    if taps.shape[2] > taps.shape[3]:
        taps = taps.mT
    count, groups, rows, columns = taps.shape
    grid, correction = _grid(axes, groups * rows**3)
    length = chunk_length(16 * (groups * (8 * rows**2 + columns) + 8 * count), taps.device)
    steps = torch.cartesian_prod(*(torch.tensor(axis.steps, device=taps.device) for axis in axes)).view(count, -1)
    error = 1.001 * dot_error(count * columns + 56) * float(sum_squares(taps.abs().sum(0)).max())
    at = _squared_rows(taps, steps, grid) if rows == 1 else _grams(taps, steps, grid)
    grids = [_half(grid, twists, taps.device) for twists in _twists(axes, grid)]
    estimates = _estimates(at, grids, grid, length) if rows > 1 else [0.0] * len(grids)
    order = sorted(range(len(grids)), key=estimates.__getitem__)
    if math.prod(grid) * groups * rows**3 >= _EXPENSIVE:
        least = estimates[order[0]]
        order = [i for i in order if i == 0 or (i == order[0] and least < _WORTHWHILE * estimates[0])]
    best = Upper(math.inf)
    for i in order:
        limit = float(best * best) * _WORSE
        if estimates[i] < limit:
            best = min(best, largest_norm(map(at, grids[i].split(length)), error, estimates[i], limit))
    return best * correction


def _estimates(at: Callable[[Tensor], Tensor], grids: list[Tensor], grid: list[int], length: int) -> list[float]:
    """Estimates of the largest ‖V̂‖² on grids of the same numbers N of points, ``grid``.

    The peaks of the last one are looked for among all its points, ``length`` at once, those of the others next to them.
    """
    *_, last = grids
    sizes = torch.cat([growths(at(some)).view(len(some), -1).amax(1) for some in last.split(length)])
    peaks = last[sizes.topk(min(len(last), CANDIDATES)).indices]
    sides, estimates = 2 * torch.tensor(grid, device=last.device), []
    for points in grids:
        apart = torch.stack([(points[:, None] - sign * peaks) % sides for sign in (1, -1)])
        steps = torch.minimum(apart, sides - apart).sum(-1).amin((0, 2))
        estimates.append(estimate_largest(at(points[steps == steps.min()][:length])))
    return estimates


def _twists(axes: list[Axis], grid: list[int]) -> Iterator[tuple[int, ...]]:
    """φ/π of each dimension, 0 or 1. Both are tried where the torus is small."""
    small = [1 < side == axis.torus < _SMALL * axis.steps[-1] for axis, side in zip(axes, grid, strict=True)]
    return itertools.product(*((0, 1) if one else (0,) for one in small))


def _squared_rows(taps: Tensor, steps: Tensor, grid: list[int]) -> Callable[[Tensor], Tensor]:
    """V̂·V̂ᴴ at points, for single rows, as in a depthwise convolution: shape (frequencies · groups, 1, 1)."""
    flat = taps.flatten(1)

    def at(points: Tensor) -> Tensor:
        cosines, sines = _waves(points, steps, grid)
        squares = (cosines @ flat).square() + (sines @ flat).square()
        return squares.view(-1, 1, taps.shape[-1]).sum(-1, keepdim=True)

    return at


def _grams(taps: Tensor, steps: Tensor, grid: list[int]) -> Callable[[Tensor], Tensor]:
    """V̂·V̂ᴴ = Σ_τ C_τ e^{iω·τ} at points, with C_{−τ} = C_τᵀ: shape (frequencies · groups, rows, rows)."""
    rows = taps.shape[2]
    differences = (steps[:, None] - steps[None, :]).flatten(0, 1)
    shifts, kinds = differences.unique(dim=0, return_inverse=True)
    even, odd = [], []
    middle = len(shifts) // 2  # sorted, so that shifts[i] = −shifts[-1 − i]
    for kind in range(middle, len(shifts)):
        first, second = (kinds.view(len(steps), -1) == kind).nonzero().unbind(1)
        product = torch.einsum("egij,egkj->gik", taps[first], taps[second])
        even.append(product + product.mT if kind > middle else product)
        odd.append(product - product.mT)
    real, imaginary = torch.stack(even).flatten(1), torch.stack(odd).flatten(1)

    def at(points: Tensor) -> Tensor:
        cosines, sines = _waves(points, shifts[middle:], grid)
        return torch.complex(cosines @ real, sines @ imaginary).view(-1, rows, rows)

    return at


def _waves(points: Tensor, steps: Tensor, grid: list[int]) -> tuple[Tensor, Tensor]:
    """cos and sin of 2π Σ_d k_d·e_d/(2N_d)."""
    sides = 2 * torch.tensor(grid, device=points.device)
    turns = (points[:, None] * steps % sides).double() / sides
    angles = 2 * math.pi * turns.sum(-1)
    return angles.cos(), angles.sin()


def _grid(axes: list[Axis], work: int) -> tuple[list[int], Upper]:
    """The number of frequencies in each dimension, and the correction factor of a coarse grid."""
    fine = [axis.torus for axis in axes]
    coarse = [min(side, max(1, _COARSE * axis.steps[-1])) for axis, side in zip(axes, fine, strict=True)]
    if math.prod(fine) * work < _EXPENSIVE or math.prod(fine) < _COARSE_GAIN * math.prod(coarse):
        return fine, Upper(1)
    correction = Upper(1)
    for axis, side, full in zip(axes, coarse, fine, strict=True):
        if side < full:
            correction = correction / (math.cos(math.pi * axis.steps[-1] / (2 * side)) * (1 - 16 * UNIT))
    return coarse, correction


def _half(grid: list[int], twists: tuple[int, ...], device: torch.device) -> Tensor:
    """The k = 2j + φ/π of the grid points, shape (points, dimensions): angles are 2πk/(2N).

    One of each pair k, −k suffices, because V is real, so that both have the same norm.
    """
    sides = 2 * torch.tensor(grid, device=device)
    ranges = (torch.arange(twist, 2 * side, 2, device=device) for side, twist in zip(grid, twists, strict=True))
    points = torch.cartesian_prod(*ranges).view(-1, len(grid))
    weights = torch.tensor([math.prod(2 * side for side in grid[i + 1 :]) for i in range(len(grid))], device=device)
    return points[(points * weights).sum(1) <= ((-points) % sides * weights).sum(1)]
