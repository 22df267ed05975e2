"""The exact engine: lowers a measure of one weight matrix and keeps the outputs of the layer on the images.

    minimise ‖W‖   subject to   Σ_t ‖W x_t − y_t‖² ≤ error² · Σ_t ‖y_t‖²

This is problem 2 of Gupta and Verma 2023 (arXiv 2302.10287), equations 9 and 10, with one mini-batch and no activation.
W_pre satisfies it (equation 11). The images enter only through their moments (:mod:`lipcert.certvit.moments`), as one
ellipsoid around W_pre. Douglas–Rachford splitting (Lions and Mercier 1979, with conditions for convergence in
proposition 3) alternates the proximal operator of the norm with the exact projection onto the ellipsoid, and stops at a
small duality gap. The result is the projected point, which always satisfies the constraint. For ℓ1 it is a nearby such
point with the zeros of the proximal operator, see :func:`_with_zeros`.

Large layers are iterated in float32. The last projection, the gap, the check of the constraint on the raw moments and
the norms are computed in float64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lipcert.certvit._measures import MEASURES, Measure, Spectrum, clip_spectrum
from lipcert.certvit.moments import Moments, energy
from lipcert.certvit.report import LayerFigures
from lipcert.errors import InputError
from lipcert.norms import dense_norm

_RELAXATION = 1.6
_CHECK_EVERY = 10  # iterations between evaluations of the gap
_BALANCE_EVERY = 5  # iterations between changes of the step
_BALANCED = 0.63  # ‖W − W̃‖ over the change of W̃ in one iteration, where the step is right
_UNBALANCED = 1.0  # the same, above which the step falls
_STEP = 8.0  # the first step for the spectral norm, relative to the sum of singular values that clipping removes
_LARGE = 128  # layers with at least as many inputs and outputs are iterated in float32
ITERATIONS = 150
_DEARER = 0.01  # the largest relative increase of a norm for the sake of zeros
_ITERATIONS_OF_ZEROS = 200
_INSIDE = 1e-4  # the relative margin of the squared radius for rounding sparse weights
_STATUSES = ("rounding", "iteration limit", "converged", "zero weight")  # a layer has the first status of any group


@dataclass(frozen=True, kw_only=True)
class Solution(LayerFigures):
    """A constrained weight, in the shape, dtype and device of the original, and its figures."""

    weight: Tensor


@dataclass(frozen=True)
class _Problem:
    """One group: W_pre (O, M), the moments S (M, M) of its inputs, and the relative error that is allowed."""

    pre: Tensor
    second: Tensor
    error: float

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of S: many seconds for M = 4096 on one core, so they are kept."""
        return eigenbasis(self.second)

    @property
    def rank(self) -> int:
        """The number of eigenvalues above M · eps · the largest one."""
        computed = "spectrum" in vars(self)
        eigenvalues = self.spectrum[0] if computed else torch.linalg.eigvalsh(self.second).clamp_min(0)
        return int((eigenvalues > eigenvalues[-1] * len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps).sum())

    @cached_property
    def energy(self) -> float:
        """Σ_t ‖y_t‖²."""
        return energy(self.pre, self.second)

    def squared_error(self, weight: Tensor) -> float:
        """Σ_t ‖W x_t − y_t‖²."""
        return energy(weight - self.pre, self.second)

    @property
    def allowed(self) -> float:
        return self.error * self.error * self.energy


@dataclass(frozen=True)
class _Point:
    """A feasible weight."""

    weight: Tensor
    iterations: int = 0
    gap: float | None = None
    status: str = "converged"
    interior: Tensor | None = None  # a point further inside, towards which rounding moves it; None for the centre
    bounding: Tensor | None = None  # the point whose outward direction gave the best lower bound


def constrain_layer(
    weight: Tensor,
    moments: Moments,
    error: float,
    measures: Sequence[str],
    *,
    tolerance: float = 1e-3,
    iterations: int = ITERATIONS,
    norm: Callable[[Tensor], float] | None = None,
) -> dict[str, Solution]:
    """For each measure the weight with the smallest one whose outputs have a relative error of at most ``error``.

    ``error`` is a ratio of norms, ‖W X − Y‖_F / ‖Y‖_F over all rows x_t, not a ratio of squares: 1e-2 means that the
    squared error is 1e-4 of the squared norm. Biases are unchanged and do not enter. Each of G groups has its own
    constraint and its own smallest norm.

    ``clip`` and ``rescale`` are baselines in closed form. ``clip`` lowers the singular values of W_pre to the level at
    which the constraint holds with equality; ``rescale`` multiplies W_pre by 1 − error. The norm of ``clip`` is at most
    that of ``rescale``: at the level (1 − error) σ₁ every singular value falls by at most the fraction ``error``.
    ``spectral`` starts from the point of ``clip`` and keeps the best point, so its norm is at most that of ``clip``.
    Where ``norm`` is another and smaller for a baseline, that is the solution.
    """
    if not 0 < error < 1:
        raise InputError(f"the relative output error must be above 0 and below 1, got {error}")
    if not torch.isfinite(weight).all():
        raise InputError(f"the weight of layer {moments.name} has NaN or infinite entries; check the checkpoint")
    moments.require_rows()
    pre = weight.detach().double().reshape(moments.groups, -1, moments.width)
    second = moments.second.to(pre.device)
    problems = [_Problem(w, s, error) for w, s in zip(pre, second, strict=True)]
    dtype = weight.dtype if weight.dtype == torch.float64 else torch.float32
    bound = norm or (lambda new: float(dense_norm(new.reshape(pre.shape))))
    norm_before = bound(weight.detach())
    solutions = {}
    for measure in measures:
        started = time.perf_counter()
        if pre.any() and not any(problem.energy for problem in problems):
            raise InputError(
                f"the outputs of layer {moments.name} are zero on all images; use images with more than one colour"
            )
        points = [_solve(problem, measure, tolerance, iterations, dtype) for problem in problems]
        statuses = {point.status for point in points}
        blocks = torch.stack([point.weight for point in points]).to(weight.dtype)
        gaps = [point.gap for point in points if point.gap is not None]
        solutions[measure] = Solution(
            weight=blocks.reshape(weight.shape),
            norm_before=norm_before,
            norm_after=bound(blocks.reshape(weight.shape)),
            error_asked=error,
            error_reached=_total_error(problems, blocks.double()),
            sparsity=float((blocks == 0).double().mean()),
            iterations=max(point.iterations for point in points),
            gap=max(gaps) if gaps else None,
            status=next(status for status in _STATUSES if status in statuses),
            seconds=time.perf_counter() - started,
            rank=min(problem.rank for problem in problems),
        )
    # The norm of a convolution with overlapping patches is another than that of its matrix, which is minimised.
    name = min(solutions, key=lambda name: solutions[name].norm_after)
    asked = solutions.get("spectral")
    if asked and solutions[name].norm_after < asked.norm_after * (1 - 1e-4) and name in ("clip", "rescale"):
        closed = solutions[name]
        status = f"as {name}" if closed.status == "converged" else closed.status
        solutions["spectral"] = replace(closed, iterations=asked.iterations, seconds=asked.seconds, status=status)
    return solutions


def _solve(problem: _Problem, measure: str, tolerance: float, iterations: int, dtype: torch.dtype) -> _Point:
    if not problem.energy:
        return _Point(problem.pre.to(dtype), status="zero weight")
    radius = math.sqrt(problem.allowed)
    pre, second = problem.pre, problem.second
    if measure == "clip":
        point = _Point(_clip(pre, radius, lambda rows: ((rows @ second) * rows).sum(dim=1))[0])
    elif measure == "rescale":
        point = _Point(pre * (1 - problem.error))
    else:
        point = _minimise(problem, measure, tolerance, iterations)
    return _rounded(point, problem, dtype)


def _minimise(problem: _Problem, measure: str, tolerance: float, iterations: int) -> _Point:
    """Minimises rotation-invariant norms in the eigenbasis of S, where the projection is diagonal."""
    chosen, centre, radius = MEASURES[measure], problem.pre, math.sqrt(problem.allowed)
    eigenvalues, basis = problem.spectrum
    if not chosen.rotates:
        ellipsoid = Ellipsoid(centre, eigenvalues, basis, radius)
        return _douglas_rachford(
            ellipsoid, chosen, centre, tolerance, iterations, chosen.step(centre), zeros_in=problem.second
        )
    rotated = centre @ basis
    ellipsoid = Ellipsoid(rotated, eigenvalues, None, radius)
    if min(centre.shape) == 1:  # these norms then equal the Frobenius norm, which is smallest at the projection of zero
        return _Point(ellipsoid.project(torch.zeros_like(rotated)) @ basis.mT, gap=0.0)
    first, removed = rotated, 0.0
    if measure == "spectral":
        first, removed = _clip(rotated, radius, lambda rows: rows.square() @ eigenvalues)
    iterate = _douglas_rachford if min(centre.shape) < _LARGE else _in_float32
    step = _STEP * removed or chosen.step(centre)
    point = iterate(ellipsoid, chosen, first, tolerance, iterations, step)
    return replace(point, weight=point.weight @ basis.mT)


def _in_float32(
    ellipsoid: Ellipsoid, measure: Measure, first: Tensor, tolerance: float, iterations: int, step: float
) -> _Point:
    """Iterates in float32, then projects the result and computes its gap in float64."""
    point = _douglas_rachford(ellipsoid.to(torch.float32), measure, first.float(), tolerance, iterations, step)
    weight, value = first, measure.value(first)
    projected = ellipsoid.project(point.weight.double())
    if (reached := measure.value(projected)) < value:
        weight, value = projected, reached
    outward, highest = ellipsoid.normal(projected if point.bounding is None else point.bounding.double())
    gap = _gap(value, max(0.0, -highest / measure.dual(outward)))
    return replace(point, weight=weight, gap=gap, status="converged" if gap <= tolerance else "iteration limit")


def _clip(centre: Tensor, radius: float, row_energies: Callable[[Tensor], Tensor]) -> tuple[Tensor, float]:
    """The centre with its singular values clipped where the constraint is met with equality, and the sum removed.

    Clipping at s changes W = U σ Vᵀ by D = −U (σ − s)₊ Vᵀ, so tr(D S Dᵀ) = Σ_i ((σ_i − s)₊ / σ_i)² e_i with
    e_i = σ_i² v_iᵀ S v_i, which ``row_energies`` gives for the rows σ_i v_iᵀ. It falls as s grows; bisection finds s.
    """
    spectrum = Spectrum.of(centre)
    energies = row_energies(spectrum.right(centre)).clamp_min(0).cpu()
    values = spectrum.values.cpu()
    low, high = 0.0, float(values[0])
    for _ in range(100):
        middle = (low + high) / 2
        lost = (1 - middle / values.clamp_min(1e-300)).clamp_min(0).square() @ energies
        low, high = (low, middle) if float(lost) <= radius * radius else (middle, high)
    return clip_spectrum(centre, spectrum, high), float((values - high).clamp_min(0).sum())


def _with_zeros(sparse: Tensor, centre: Tensor, second: Tensor, radius: float) -> tuple[Tensor, Tensor] | None:
    """A member of the ellipsoid with the zeros of a matrix near it, and one further inside; None if none was found.

    Conjugate gradients minimise tr((V − centre) S (V − centre)ᵀ) over the matrices with these zeros, from ``sparse``
    on, and stop well inside. The member lies near the boundary, on the segment between the last two iterates: the first
    point that leaves room for rounding.
    """
    mask = sparse != 0

    def length(point: Tensor) -> float:
        return energy(point - centre, second)

    allowed = radius * radius * (1 - _INSIDE)
    current, before = sparse, sparse
    residual = (centre - current) @ second * mask
    direction, size = residual, float(residual.square().sum())
    for _ in range(_ITERATIONS_OF_ZEROS):
        if length(current) < (1 - 10 * _INSIDE) * radius * radius or not size:
            break
        turned = direction @ second * mask
        step = size / float((turned * direction).sum())
        before, current = current, current + step * direction
        residual = residual - step * turned
        size, old = float(residual.square().sum()), size
        direction = residual + size / old * direction
    if not length(current) < allowed:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if length(before + middle * (current - before)) <= allowed else (middle, high)
    return before + high * (current - before), current


def _douglas_rachford(
    ellipsoid: Ellipsoid,
    measure: Measure,
    feasible: Tensor,
    tolerance: float,
    iterations: int,
    step: float,
    zeros_in: Tensor | None = None,
) -> _Point:
    """Minimises ‖V‖ over the ellipsoid.

    W = prox(Ŵ), W̃ = projection(2W − Ŵ), Ŵ ← Ŵ + λ (W̃ − W); W and W̃ have the same limit, and W̃ is always feasible.

    The step β only changes the speed: Ŵ = W + β G with a subgradient G of the norm at W. For the spectral norm it
    starts large, and falls while W differs from W̃ by more than W̃ changes; Ŵ changes with it, so W and G remain.

    Lower bound: for every Y and every feasible V, ‖V‖ · ‖Y‖_dual ≥ ⟨−Y, V⟩ ≥ −max_V ⟨Y, V⟩. The outward direction
    Y = (W̃ − centre) S is used, because at the limit −Y is a multiple of a subgradient of the norm, and then both
    inequalities are equalities.
    """
    governing = ellipsoid.centre
    best, upper, lower = feasible, measure.value(feasible), 0.0
    bounding, gap, done = None, 1.0, False
    iteration = 0
    while iteration < iterations and not done:
        iteration += 1
        before = feasible
        relaxed = measure.prox(governing, step)
        feasible = ellipsoid.project(2 * relaxed - governing)
        apart = float((feasible - relaxed).norm())
        if iteration % _BALANCE_EVERY == 0 and measure.balances:
            ratio = apart / max(float((feasible - before).norm()), 1e-300)
            factor = max(0.2, _BALANCED / ratio) if ratio > _UNBALANCED else 1.0
            governing, step = relaxed + factor * (governing - relaxed), factor * step
        governing = governing + _RELAXATION * (feasible - relaxed)
        if iteration % _CHECK_EVERY and iteration < iterations:
            continue
        value = measure.value(feasible)
        if value < upper:
            best, upper = feasible, value
        outward, highest = ellipsoid.normal(feasible)
        # the nuclear norm from a Gram matrix in float32 is too large: small singular values are only rounding errors
        if highest < 0 and (bound := -highest / measure.dual(outward.double())) > lower:
            bounding, lower = feasible, bound
        gap = _gap(upper, lower)
        done = gap <= tolerance and (measure.rotates or apart <= tolerance * float(feasible.norm()))
    status = "converged" if done else "iteration limit"
    point = _Point(best, iteration, gap, status, bounding=bounding)
    bare = zeros_in is None or bool((relaxed != 0).all())
    sparse = None if zeros_in is None or bare else _with_zeros(relaxed, ellipsoid.centre, zeros_in, ellipsoid.radius)
    if sparse is None or (value := measure.value(sparse[0])) > (1 + _DEARER) * upper:
        return point
    return replace(point, weight=sparse[0], interior=sparse[1], gap=_gap(value, lower))


def _gap(value: float, lower: float) -> float:
    """The relative distance of a norm from its lower bound; a layer whose ReLUs are all inactive reaches 0."""
    return max(0.0, (value - lower) / value) if value else 0.0


def _rounded(point: _Point, problem: _Problem, dtype: torch.dtype) -> _Point:
    """The point in ``dtype``, moved towards the interior just enough for the constraint to hold after rounding."""
    unchanged = problem.pre.to(dtype)
    inside = problem.pre if point.interior is None else point.interior
    steps = range(12 if dtype == torch.float64 else 9, 0, -1)
    for slack in (0.0, *(10.0**-k for k in steps)):
        weight = (point.weight + slack * (inside - point.weight)).to(dtype)
        if problem.squared_error(weight.double()) <= problem.allowed and not torch.equal(weight, unchanged):
            return replace(point, weight=weight)
    return replace(point, weight=unchanged, status="rounding")


def _total_error(problems: Sequence[_Problem], blocks: Tensor) -> float:
    energy = sum(problem.energy for problem in problems)
    squared = sum(problem.squared_error(block) for problem, block in zip(problems, blocks, strict=True))
    return math.sqrt(squared / energy) if energy else 0.0


@dataclass(frozen=True)
class Ellipsoid:
    """{V : tr((V − centre) S (V − centre)ᵀ) ≤ radius²} with S = Q diag(λ) Qᵀ; centre is (O, M), Q is ``basis``, (M, M).

    Without ``basis``, matrices are given in this basis, as V Q. Inside an iteration the matrices may be float32.
    """

    centre: Tensor
    eigenvalues: Tensor
    basis: Tensor | None
    radius: float

    def to(self, dtype: torch.dtype) -> Ellipsoid:
        """A copy with its matrices in this dtype."""
        basis = None if self.basis is None else self.basis.to(dtype)
        return Ellipsoid(self.centre.to(dtype), self.eigenvalues.to(dtype), basis, self.radius)

    def project(self, point: Tensor) -> Tensor:
        """The nearest member in the Frobenius norm.

        With D = V − centre and a multiplier μ ≥ 0 the nearest member is centre + D (I + μ S)⁻¹. If V is a member, μ =
        0; otherwise μ solves Σ_j λ_j c_j / (1 + μ λ_j)² = radius² with c_j = ‖(D Q)_j‖², see :func:`multiplier`. A
        final scaling towards the centre removes the rounding error of μ, so the constraint is violated by at most a few
        units in the last place.
        """
        change = self._into(point - self.centre)
        mu = multiplier(change.square().sum(dim=0), self.eigenvalues, self.radius)
        if mu == 0:
            return point
        change = change / (1 + mu * self.eigenvalues)
        length = math.sqrt(float(change.square().sum(dim=0) @ self.eigenvalues))
        if length > self.radius:
            change = change * (self.radius / length)
        return self.centre + self._out_of(change)

    def normal(self, point: Tensor) -> tuple[Tensor, float]:
        """An outward direction Y and the largest ⟨Y, V⟩ over all members V.

        With D = point − centre and Y = D S the maximum is ⟨Y, centre⟩ + radius √tr(Y S⁻¹ Yᵀ). The root equals
        √tr(D S Dᵀ), so no inverse is needed, and S may be singular.
        """
        change = self._into(point - self.centre)
        weighted = change * self.eigenvalues
        length = math.sqrt(max(0.0, float((change * weighted).sum())))
        outward = self._out_of(weighted)
        return outward, float((outward * self.centre).sum()) + self.radius * length

    def _into(self, matrix: Tensor) -> Tensor:
        return matrix if self.basis is None else matrix @ self.basis

    def _out_of(self, matrix: Tensor) -> Tensor:
        return matrix if self.basis is None else matrix @ self.basis.mT


def multiplier(squares: Tensor, eigenvalues: Tensor, radius: float) -> float:
    """The root μ ≥ 0 of Σ_j λ_j c_j / (1 + μ λ_j)² = r², or 0 if the left side is at most r² at μ = 0.

    Newton's method solves φ(μ)^(−1/2) = 1/r, with φ the left side, as for trust regions (Moré and Sorensen 1983,
    "Computing a trust region step"). φ^(−1/2) is a weighted p-mean, p = −2, of the affine functions 1/λ_j + μ with the
    weights c_j / λ_j. For p ≤ 1 such means are concave (the reverse Minkowski inequality), and this one increases. The
    tangent of a concave function lies above it. So Newton's steps from μ = 0, left of the root, are positive and never
    pass the root: the iteration is monotone and needs no bracket. It ends when a step is below rounding errors.
    """
    squares, eigenvalues = squares.double().cpu(), eigenvalues.double().cpu()
    energies = squares * eigenvalues
    if float(energies.sum()) <= radius * radius:
        return 0.0
    mu = 0.0
    for _ in range(200):
        shrink = 1 + mu * eigenvalues
        terms = energies / shrink.square()
        value = float(terms.sum())
        slope = 2 * float((terms * eigenvalues / shrink).sum())
        step = 2 * value * (math.sqrt(value) / radius - 1) / slope
        mu += step
        if step <= 1e-15 * mu:
            break
    return mu


def eigenbasis(second: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending and at least 0, and eigenvectors of a moment matrix (M, M)."""
    eigenvalues, basis = torch.linalg.eigh(second)
    return eigenvalues.clamp_min(0), basis
