"""Margin training against the first-order certificate, shared by the scripts that make checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from lipcert.surgery import LayerProject, SmoothProject


class NormHold:
    """Holds the weight matrices of a vision transformer at spectral norm ≤ 1; queries, keys and values each on their own.

    The norms are estimated by power iteration with a vector kept from call to call, one step a call.
    """

    def __init__(self, model: nn.Module):
        self.matrices: list[Tensor] = []
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "pos_embed" not in name and "token" not in name:
                self.matrices += parameter.data.chunk(3) if "qkv" in name else [parameter.data]
        self.vectors = [F.normalize(torch.randn(m.flatten(1).shape[1]), dim=0) for m in self.matrices]
        for _ in range(20):
            self()

    @torch.no_grad()
    def __call__(self) -> None:
        for weight, vector in zip(self.matrices, self.vectors, strict=True):
            matrix = weight.flatten(1)
            vector.copy_(F.normalize(matrix.T @ F.normalize(matrix @ vector, dim=0), dim=0))
            weight.div_((matrix @ vector).norm().clamp_min(1.0))


def hold_projections(model: nn.Module, radius: float) -> None:
    """Gives all projections one radius and a fixed scale of 1."""
    for module in model.modules():
        if isinstance(module, (SmoothProject, LayerProject)):
            module.radius.fill_(radius)
            module.weight.data.fill_(1.0)
            module.weight.requires_grad_(False)


def twice_differentiable(model: nn.Module) -> None:
    """Uses attention written out: the fused kernel has no second derivative."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.fused_attn = False


def gradient_loss(
    model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, eps: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the logits with ε‖∇(f_y − f_j)‖, j the runner-up, added to every wrong one.

    Args:
        model: pixels to logits.
        images: shape (N, C, H, W).
        labels: shape (N,).
        eps: ε in ℓ2 on pixels.
        temperature: divides the logits.

    Returns:
        The loss, and the plain logits, shape (N, classes).
    """
    images = images.requires_grad_()
    logits = model(images) / temperature
    own = F.one_hot(labels, logits.shape[1]).bool()
    runner_up = logits.detach().masked_fill(own, -math.inf).argmax(1, keepdim=True)
    margin = logits.gather(1, labels[:, None]) - logits.gather(1, runner_up)
    (gradient,) = torch.autograd.grad(margin.sum(), images, create_graph=True)
    reach = eps * gradient.flatten(1).norm(dim=1, keepdim=True)
    return F.cross_entropy(logits + reach * ~own, labels), logits
