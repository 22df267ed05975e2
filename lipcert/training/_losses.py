"""Losses on logits that a perturbation of norm ε may have moved."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def twice_differentiable() -> contextlib.AbstractContextManager[None]:
    """While it lasts, torch writes attention out: its fused kernels have no second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def anchored_loss(
    model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, eps: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the logits with ε‖∇(f_y − f_j)‖, j the runner-up, added to every wrong one.

    This asks for the margin that the anchored certificate needs to first order. It is differentiated through the
    gradient, so it wants :func:`twice_differentiable` around it and its backward pass.

    Args:
        model: pixels to logits, each image by itself.
        images: shape (N, C, H, W).
        labels: the classes y, shape (N,).
        eps: ε in ℓ2 on pixels.
        temperature: divides the logits.

    Returns:
        The loss, and the logits as the model gives them, shape (N, classes).
    """
    images = images.detach().requires_grad_()
    logits = model(images)
    scaled = logits / temperature
    own = F.one_hot(labels, logits.shape[1]).bool()
    runner_up = scaled.detach().masked_fill(own, -math.inf).argmax(1, keepdim=True)
    margin = scaled.gather(1, labels[:, None]) - scaled.gather(1, runner_up)
    (gradient,) = torch.autograd.grad(margin.sum(), images, create_graph=True)
    reach = eps * gradient.flatten(1).norm(dim=1, keepdim=True)
    return F.cross_entropy(scaled + reach * ~own, labels), logits


def noise_loss(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    sigma: float,
    consistency: float = 0.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the logits of noisy images, for the certificates of the smoothed classifier.

    With ``consistency`` λ > 0 each image is drawn twice, and λ times the mean divergence KL(p̄ ‖ p_i) of the two
    predictions from their mean p̄ is added, and half the entropy of p̄.

    Source: Cohen, Rosenfeld and Kolter, "Certified adversarial robustness via randomized smoothing", ICML 2019, section
    3.3; Jeong and Shin, "Consistency regularization for certified robustness of smoothed classifiers", NeurIPS 2020,
    equation 10 with η = ½.

    Args:
        model: pixels to logits.
        images: shape (N, C, H, W).
        labels: the classes, shape (N,).
        sigma: σ, the standard deviation of the noise at each pixel.
        consistency: λ.
        temperature: divides the logits.

    Returns:
        The loss, and the logits of the first noisy images, shape (N, classes).
    """
    copies = 2 if consistency else 1
    noisy = images.repeat(copies, 1, 1, 1)
    logits = model(noisy + sigma * torch.randn_like(noisy))
    scaled = logits / temperature
    loss = F.cross_entropy(scaled, labels.repeat(copies))
    if consistency:
        logs = scaled.log_softmax(1).view(copies, len(labels), -1)
        mean = logs.exp().mean(0)
        of_mean = mean.clamp_min(torch.finfo(mean.dtype).tiny).log()
        divergence = (mean * (of_mean - logs)).sum(2).mean()
        loss = loss + consistency * divergence - 0.5 * (mean * of_mean).sum(1).mean()
    return loss, logits[: len(labels)]


def emma_loss(logits: Tensor, labels: Tensor, constants: Tensor, eps: float) -> Tensor:
    """Cross-entropy of f_j + ε_j K_yj, where ε_j ≤ ε is how far a perturbation must go to make j win: (f_y − f_j)/K_yj.

    ε_j is 0 where j wins already, and is held constant for the gradient.

    Source: Hu et al., "Unlocking deterministic robustness certification on ImageNet", NeurIPS 2023 (arXiv 2301.12549),
    equation 2 and definition 3.

    Args:
        logits: f, shape (N, classes).
        labels: the classes y, shape (N,).
        constants: K_yj, Lipschitz constants of f_y − f_j, shape (N, classes), 0 where j = y.
        eps: ε in ℓ2 on pixels.

    Returns:
        The loss.
    """
    behind = logits.gather(1, labels[:, None]) - logits
    reach = eps * constants
    share = (behind / reach.clamp_min(torch.finfo(reach.dtype).tiny)).clamp(0, 1).detach()
    return F.cross_entropy(logits + share * reach, labels)


def fixed_loss(logits: Tensor, labels: Tensor, constants: Tensor, eps: float) -> Tensor:
    """Cross-entropy of f_j + ε K_yj: the margin is asked of every image, right or wrong.

    With K_yj = √2 K, K that of the logits, this is Lipschitz margin training: Tsuzuku, Sato and Sugiyama, NeurIPS 2018
    (arXiv 1802.04034), section 4. With constants by the rows of the head it is the fixed margin of Hu et al. 2023
    (arXiv 2301.12549), appendix A.

    Args:
        logits: f, shape (N, classes).
        labels: the classes y, shape (N,).
        constants: K_yj, shape (N, classes), 0 where j = y.
        eps: ε in ℓ2 on pixels.

    Returns:
        The loss.
    """
    return F.cross_entropy(logits + eps * constants, labels)


def bottom(logits: Tensor, constants: Tensor, eps: float) -> Tensor:
    """GloRo's logit f_⊥ = max over j ≠ ŷ of f_j + ε K_ŷj for the predicted class ŷ, shape (N,).

    Args:
        logits: f, shape (N, classes).
        constants: K_ŷj for the predicted classes ŷ, shape (N, classes).
        eps: ε in ℓ2 on pixels.
    """
    predicted = logits.argmax(1, keepdim=True)
    return (logits + eps * constants).scatter(1, predicted, -math.inf).amax(1)


def gloro_loss(logits: Tensor, labels: Tensor, constants: Tensor, eps: float) -> Tensor:
    """Cross-entropy of (f, f_⊥): the class ⊥ is never right.

    Source: Leino, Wang, Fredrikson, "Globally-robust neural networks", ICML 2021 (arXiv 2102.08452), section 3.

    Args:
        logits: f, shape (N, classes).
        labels: shape (N,).
        constants: K_ŷj for the predicted classes ŷ, shape (N, classes).
        eps: ε in ℓ2 on pixels.

    Returns:
        The loss.
    """
    return F.cross_entropy(torch.cat([logits, bottom(logits, constants, eps)[:, None]], 1), labels)


def trades_loss(logits: Tensor, labels: Tensor, constants: Tensor, eps: float, weight: float = 1.0) -> Tensor:
    """Cross-entropy, plus what the ⊥ logit of GloRo takes from the other classes, as a Kullback-Leibler divergence.

    With p the probabilities of f and p⊥ those of (f, f_⊥), f_⊥ = max_{j ≠ ŷ} f_j + ε K_ŷj for the predicted class ŷ,
    log p_j − log p⊥_j is the same for all j, so KL(p ‖ p⊥) = log Σ exp(f, f_⊥) − log Σ exp(f).

    Source: Leino, Wang, Fredrikson, "Globally-robust neural networks", ICML 2021, with the loss of Zhang et al.,
    "Theoretically principled trade-off between robustness and accuracy", ICML 2019.

    Args:
        logits: f, shape (N, classes).
        labels: shape (N,).
        constants: K_ŷj for the predicted classes ŷ, shape (N, classes).
        eps: ε in ℓ2 on pixels.
        weight: factor of the divergence.

    Returns:
        The loss.
    """
    clean = logits.logsumexp(1)
    gap = torch.logaddexp(clean, bottom(logits, constants, eps)) - clean
    return F.cross_entropy(logits, labels) + weight * gap.mean()
