"""The faithful engine: CertViT as published, with misprints corrected (arXiv 2302.10287, Algorithms 1 to 3).

Each layer is solved separately. Soft thresholding with a fixed β is the proximal step. The projection iterates over the
mini-batches, each of which gives one quadratic constraint. Two misprints are corrected. The update of Douglas–Rachford
is Ŵ ← Ŵ + λ (W̃ − W). In Algorithm 2, with δ = c ∇c / ‖∇c‖² the step to the half-space that linearises the constraint
c ≤ 0, the first branch is W − δ and the second W₀ − (1 + π/ν) δ; so they agree with Haugazeau's projection onto two
half-spaces (Combettes 2000, "Strong convergence of block-iterative outer approximation
methods for convex optimization").

The iteration is transiently chaotic: two correct implementations agree over the first steps and at the limit, but not
in between. It serves for comparison; :func:`lipcert.certvit.solve.constrain_layer` solves the same problem exactly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lipcert.certvit._measures import soft_threshold
from lipcert.certvit.moments import Moments
from lipcert.certvit.solve import Solution
from lipcert.errors import InputError
from lipcert.norms import dense_norm


@dataclass(frozen=True)
class _Constraint:
    """c(V) = Σ_t ‖V x_t − y_t‖² − bound over one mini-batch, y_t = W_pre x_t, by its moments (M, M): equation 12."""

    second: Tensor
    bound: float

    def excess(self, change: Tensor) -> tuple[float, Tensor]:
        """c and ∇c = 2 Σ_t (V x_t − y_t) x_tᵀ (equation 13) at V = W_pre + change."""
        weighted = change @ self.second
        return float((weighted * change).sum()) - self.bound, 2 * weighted


def constrain_blockwise(
    weight: Tensor,
    blocks: Sequence[Moments],
    error: float = 1e-2,
    *,
    eta: float | None = None,
    beta: float | None = None,
    quantile: float = 0.1,
    relaxation: float = 1.2,
    iterations: int = 2,
    projection_epochs: int = 100,
    tolerance: float = 1e-4,
    projection_tolerance: float = 1e-7,
    point: Literal["projected", "sparse"] = "projected",
) -> Solution:
    """Lowers Σ |w| while the outputs of the layer on each mini-batch keep a relative error of at most ``error``.

    The defaults are those of the authors' scripts (github.com/sagarverma/transformer-lipschitz,
    liptrf/lip_relax/vit/lip_relax_vit_cifar10.py: lr 1.2, lipr_epochs 2, proj_epochs 100, lipr_prec 1e-4,
    proj_prec 1e-7, threshold at the quantile 0.1 of |W|); their scripts for other models and data sets have the same.
    These scripts recompute the threshold in each iteration; with the fixed β of the paper the iteration solves one
    convex problem. The bound of a mini-batch is error² · Σ_t ‖W_pre x_t‖² over its own rows, so the constraints of all
    mini-batches imply the pooled constraint.
    """
    started = time.perf_counter()
    pre = weight.detach().flatten(1).double()
    measured = [_constraint(pre, block, error, eta) for block in blocks]
    constraints = [constraint for constraint, _ in measured]
    bound = sum(constraint.bound for constraint in constraints)
    if bound == 0:
        raise InputError("the outputs of the layer are zero on all images; there is nothing to keep")
    magnitudes = pre[pre != 0].abs()
    step = float(magnitudes.sort().values[int(quantile * len(magnitudes))]) if beta is None else beta

    governing = pre
    status = "iteration limit"
    done = 0
    while done < iterations and status != "converged":
        done += 1
        sparse = soft_threshold(governing, step)
        projected = project_blockwise(
            2 * sparse - governing, pre, constraints, epochs=projection_epochs, tolerance=projection_tolerance
        )
        update = relaxation * (projected - sparse)
        governing = governing + update
        if float(update.norm()) <= tolerance * float(governing.norm()):
            status = "converged"

    chosen = projected if point == "projected" else sparse
    result = chosen.to(weight.dtype)
    squared = sum(constraint.excess(result.double() - pre)[0] + constraint.bound for constraint in constraints)
    if eta is not None:
        error = math.sqrt(bound / sum(energy for _, energy in measured))
    return Solution(
        weight=result.reshape(weight.shape),
        norm_before=float(dense_norm(pre)),
        norm_after=float(dense_norm(result)),
        error_asked=error,
        error_reached=error * math.sqrt(max(0.0, squared) / bound),
        sparsity=float((result == 0).double().mean()),
        iterations=done,
        gap=None,
        status=status,
        seconds=time.perf_counter() - started,
    )


def _constraint(pre: Tensor, block: Moments, error: float, eta: float | None) -> tuple[_Constraint, float]:
    """The constraint of a mini-batch, and Σ_t ‖W_pre x_t‖² over it."""
    if block.groups > 1 or block.width != pre.shape[1]:
        raise InputError(f"a mini-batch of {block.width} inputs does not fit a weight of {tuple(pre.shape)}")
    energy = block.energy(pre)
    bound = error * error * energy if eta is None else eta * block.rows * bool(energy)
    return _Constraint(block.second[0].to(pre), bound), energy


def project_blockwise(
    start: Tensor, pre: Tensor, constraints: Sequence[_Constraint], *, epochs: int, tolerance: float
) -> Tensor:
    """Approximates the projection of ``start`` onto all constraints, one mini-batch after the other."""
    current = start
    for _ in range(epochs):
        before = current
        for constraint in constraints:
            excess, gradient = constraint.excess(current - pre)
            if excess > 0:
                current = haugazeau(start, current, excess / float(gradient.square().sum()) * gradient)
        if float((current - before).norm()) <= tolerance * float(current.norm()):
            break
    return current


def haugazeau(start: Tensor, current: Tensor, delta: Tensor) -> Tensor:
    """The projection of W₀ onto {V : ⟨V − W, W₀ − W⟩ ≤ 0} ∩ {V : ⟨V − (W − δ), δ⟩ ≤ 0} (Algorithm 2).

    With π = ⟨W₀ − W, δ⟩, μ = ‖W₀ − W‖², ν = ‖δ‖² and χ = μν − π², which is zero when W₀ − W and δ are parallel. χ = 0
    with π < 0 would mean that the half-spaces have no common point, but W_pre is one.
    """
    back = start - current
    pi = float((back * delta).sum())
    mu = float(back.square().sum())
    nu = float(delta.square().sum())
    chi = mu * nu - pi * pi
    if chi <= 1e-14 * mu * nu:
        return current - delta
    if pi * nu >= chi:
        return start - (1 + pi / nu) * delta
    return current + nu / chi * (pi * back - mu * delta)
