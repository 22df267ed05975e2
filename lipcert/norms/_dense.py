"""Spectral norms of matrices, from above."""

from __future__ import annotations

import torch
from torch import Tensor

from lipcert._upper import Upper
from lipcert.errors import InputError
from lipcert.norms._scale import as_float64, normalise
from lipcert.norms._verify import UNIT, largest_norm

CHUNK_BYTES = 2**28


@torch.no_grad()
def dense_norm(weight: Tensor, *, identity: float = 0.0) -> Upper:
    """An upper bound on ‖weight + identity·I‖₂, rounding included; 5e-6 above the exact value as a rule.

    The Gram matrix of the smaller side is formed in float64, its largest eigenvalue estimated by Lanczos, and a number just
    above the estimate verified through a Cholesky factor and its residual. The proof stands in :mod:`lipcert.norms._verify`.
    Adding identity·I rounds each diagonal entry once, which moves the norm by at most u times the largest of them.

    Args:
        weight: shape (..., out, in), real or complex, any floating-point dtype. A leading batch shape gives the maximum.
        identity: factor c of the added identity, for a folded linear residual c·x + W·x; square matrices only.

    Returns:
        The bound; 0 for a zero or empty weight.

    Raises:
        InputError: if the weight has fewer than two dimensions, is not floating-point, or holds NaN or an infinity; if an
            identity is asked for and the matrices are not square.
    """
    if weight.dim() < 2:
        raise InputError(f"a matrix norm needs shape (..., out, in), got {tuple(weight.shape)}")
    matrices = as_float64(weight)
    rounding = 0.0
    if identity:
        if weight.shape[-2] != weight.shape[-1]:
            raise InputError(f"identity needs square matrices, got shape {tuple(weight.shape)}")
        matrices = matrices + identity * torch.eye(weight.shape[-1]).to(matrices)
    scaled, scale = normalise(matrices.reshape(-1, *weight.shape[-2:]))
    if scale == 0:
        return Upper(0)
    if identity:
        rounding = 2 * UNIT * float(scaled.diagonal(dim1=-2, dim2=-1).abs().max())
    chunk = max(1, CHUNK_BYTES // work_bytes(*weight.shape[-2:]))
    return (largest_norm(scaled.split(chunk)) + rounding) * scale


def work_bytes(rows: int, columns: int) -> int:
    """Memory that verifying one rows × columns matrix takes."""
    return 16 * (2 * rows * columns + 5 * min(rows, columns) ** 2)
