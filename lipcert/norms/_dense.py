"""Upper bounds on the spectral norms of matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lipcert.errors import InputError
from lipcert.norms._scale import as_float64, normalise, remembered
from lipcert.norms._verify import chunk_length, dot_error, largest_norm, sum_squares
from lipcert.numerics import UNIT, Estimator, Upper, or_estimated

_PANEL = 128


def _estimate(estimator: Estimator, weight: Tensor, *, identity: float = 0.0) -> Upper:
    matrices = weight.reshape(-1, *weight.shape[-2:])

    def apply(v: Tensor, w: Tensor) -> Tensor:
        result = (w @ v.permute(1, 2, 0)).permute(2, 0, 1)  # one product for all vectors, without copies of w
        return result + identity * v if identity else result

    return estimator.norm(apply, matrices, (len(matrices), weight.shape[-1]))


@or_estimated(_estimate)
def dense_norm(weight: Tensor, *, identity: float = 0.0) -> Upper:
    """An upper bound on ‖weight + identity·I‖₂, rounding included; usually 0.5e-5 to 1e-5 above the exact value.

    The Gram matrix of the smaller side is formed in float64. Lanczos estimates its largest eigenvalue, and a Cholesky
    factor and its residual verify a number just above the estimate; proof in :mod:`lipcert.norms._verify`. Forming the
    Gram matrix of an n × m matrix moves it by at most dot_error(m)·‖W‖_F². Adding identity·I rounds each diagonal entry
    once, which moves the norm by at most u times the largest of them.

    Args:
        weight: shape (..., out, in), real or complex, any floating-point dtype; the bound is the maximum over a batch.
        identity: factor c of an added identity, for the linear residual c·x + W·x; square matrices only.

    Returns:
        The bound; 0 for a zero or empty weight.

    Raises:
        InputError: if the weight has fewer than two dimensions, is not floating-point, or holds NaN or an infinity; if
            ``identity`` is not 0 and the matrices are not square.
    """
    if weight.dim() < 2:
        raise InputError(f"a matrix norm needs shape (..., out, in), got {tuple(weight.shape)}")
    matrices = as_float64(weight)
    if identity:
        if weight.shape[-2] != weight.shape[-1]:
            raise InputError(f"identity needs square matrices, got shape {tuple(weight.shape)}")
        matrices = matrices + identity * torch.eye(weight.shape[-1]).to(matrices)
    if matrices.numel() == 0:
        return Upper(0)
    scaled, scale = normalise(matrices.reshape(-1, *weight.shape[-2:]))
    if scale == 0:
        return Upper(0)
    rounding = 2 * UNIT * float(scaled.diagonal(dim1=-2, dim2=-1).abs().max()) if identity else 0.0
    return (matrices_norm(scaled) + rounding) * scale


@remembered
def matrices_norm(matrices: Tensor) -> Upper:
    """An upper bound on the largest spectral norm."""
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mH
    rows, columns = matrices.shape[-2:]

    def grams() -> Iterator[Tensor]:
        for chunk in matrices.split(chunk_length(16 * (rows * columns + 6 * rows**2), matrices.device)):
            yield _gram(chunk)

    squares = sum_squares(matrices).max()
    return largest_norm(grams(), 1.001 * dot_error(columns) * float(squares))


def _gram(matrices: Tensor) -> Tensor:
    """M·Mᴴ for matrices of shape (B, n, m). The upper triangle is computed and the lower one copied from it."""
    size = matrices.shape[-2]
    gram = matrices.new_empty(len(matrices), size, size)
    for start in range(0, size, _PANEL):
        stop = min(start + _PANEL, size)
        gram[:, start:stop, start:] = matrices[:, start:stop] @ matrices[:, start:].mH
        gram[:, stop:, start:stop] = gram[:, start:stop, stop:].mH
    return gram
