"""Estimates of the largest eigenvalue of Hermitian matrices. They can be too small; :mod:`._verify` checks them."""

from __future__ import annotations

import torch
from torch import Tensor

CANDIDATES = 4
_DENSE_SIZE = 256
_MAX_STEPS = 160
_CHECK_EVERY = 8
_GAIN = 1e-6
_BREAKDOWN = 1e-9


def growths(gram: Tensor) -> Tensor:
    """Lower estimates of the largest eigenvalues of positive semidefinite matrices, by power steps."""
    image = gram @ (gram @ _start(gram).unsqueeze(-1))
    norms = torch.linalg.vector_norm(image, dim=(-2, -1)).clamp_min(torch.finfo(torch.float64).tiny)
    return torch.linalg.vector_norm(gram @ image, dim=(-2, -1)) / norms


def estimate_largest(gram: Tensor) -> float:
    """A lower estimate, up to rounding, of the largest eigenvalue of a batch of positive semidefinite matrices.

    Power steps rank the matrices. The eigenvalues of the first few follow from a decomposition, or to about six digits
    from Lanczos.
    """
    if len(gram) > CANDIDATES:
        gram = gram[growths(gram).topk(CANDIDATES).indices]
    if gram.shape[-1] <= _DENSE_SIZE:
        return float(torch.linalg.eigvalsh(gram).max())
    return float(estimates(gram, _MAX_STEPS).max())


def _start(gram: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(gram.shape[-1], generator=generator, dtype=torch.float64).to(gram)


def estimates(gram: Tensor, steps: int = 16) -> Tensor:
    """Lower estimates, up to rounding, of the largest eigenvalue of each matrix, from Lanczos, until all converge."""
    count, size = gram.shape[:2]
    steps = min(size, steps)
    basis, images = gram.new_zeros(count, size, steps), gram.new_zeros(count, size, steps)
    vector = _start(gram).expand(count, size)
    vector = vector / torch.linalg.vector_norm(vector, dim=1, keepdim=True)
    ritz = torch.zeros(count, dtype=torch.float64, device=gram.device)
    for step in range(steps):
        basis[:, :, step] = vector
        images[:, :, step] = image = (gram @ vector[:, :, None])[:, :, 0]
        previous, orthogonal = basis[:, :, : step + 1], image
        if step + 1 == steps or (step + 1) % _CHECK_EVERY == 0:
            projected = previous.mH @ images[:, :, : step + 1]
            before, ritz = ritz, torch.linalg.eigvalsh((projected + projected.mH) / 2)[:, -1].nan_to_num(nan=0.0)
            if bool((ritz <= before * (1 + _GAIN)).all()):
                break
        for _ in range(2):
            orthogonal = orthogonal - (previous @ (previous.mH @ orthogonal[:, :, None]))[:, :, 0]
        length = torch.linalg.vector_norm(orthogonal, dim=1, keepdim=True)
        # What is left of an exhausted space is noise, which is not orthogonal to it.
        exhausted = length <= _BREAKDOWN * torch.linalg.vector_norm(image, dim=1, keepdim=True)
        vector = torch.where(exhausted, 0.0, orthogonal / length.clamp_min(torch.finfo(torch.float64).tiny))
    return torch.maximum(ritz, gram.diagonal(dim1=1, dim2=2).real.amax(1))
