"""An optimizer that gives matrices orthogonal updates."""

from __future__ import annotations

from typing import Any

import torch
from timm.optim.muon import zeropower_via_newtonschulz
from torch import Tensor, nn

from lipcert.training._matrices import Matrix

_MOMENTUM = 0.95
_RMS = 0.2
# Five steps of the quintic iteration of Jordan et al.
_ORTHOGONAL: dict[str, Any] = {"steps": 5, "coefficients": [(3.4445, -4.7750, 2.0315)]}


class Muon(torch.optim.AdamW):
    """Muon for matrices, AdamW for all other parameters.

    The momentum G = U S Vᵀ of a matrix is replaced by U Vᵀ, so that an update changes all its singular values equally.
    With a limit on the norm, all directions then use it. Queries, keys and values are separate matrices, and a
    convolution is its flattened kernel; the classes of torch and timm know whole parameters alone. Updates have the
    size of those of AdamW, so both use the same learning rate.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), with the factor of Liu et
    al., "Muon is scalable for LLM training" (arXiv 2502.16982), equation 4.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        matrices: list[Matrix],
        lr: float,
        weight_decay: float = 0.5,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(parameters, lr=lr, weight_decay=0.0)
        self.decay = weight_decay
        self.dtype = dtype
        trained = {id(p) for p in parameters}
        self.matrices = [m for m in matrices if id(m.parameter) in trained]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update by the gradients in the parameters; the gradients of matrices are cleared."""
        group = self.param_groups[0]
        ahead: dict[nn.Parameter, Tensor] = {}
        for matrix in self.matrices:
            p = matrix.parameter
            if p.grad is None:
                continue
            if p not in ahead:
                if not self.state[p]:
                    self.state[p].update(step=torch.zeros(()), momentum=torch.zeros_like(p))  # AdamW counts steps, too
                momentum = self.state[p]["momentum"].lerp_(p.grad, 1 - _MOMENTUM)
                ahead[p] = torch.empty_like(p).copy_(p.grad.lerp(momentum, _MOMENTUM))
                p.mul_(1 - group["lr"] * self.decay)
            dtype = self.dtype or p.dtype
            tiny = torch.finfo(dtype).tiny  # so that small gradients count as much as large ones
            update = zeropower_via_newtonschulz(matrix.part_of(ahead[p]), dtype=dtype, eps=tiny, **_ORTHOGONAL)
            update = update.to(p.dtype)
            matrix.value().sub_(update, alpha=group["lr"] * _RMS * max(update.shape[1:]) ** 0.5)
        for p in ahead:
            p.grad = None
        super().step()
