"""Losses of the logits in the worst case over perturbations of norm ε."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipcert.errors import InputError
from lipcert.training._local import local_loss


def twice_differentiable() -> contextlib.AbstractContextManager[None]:
    """A context in which attention is computed without fused kernels, which have no second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def cut_loss(
    model: Callable[[Tensor], Tensor],
    cut: nn.Module,
    images: Tensor,
    labels: Tensor,
    constant: Tensor,
    eps: float,
    temperature: float = 1.0,
    loss: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`emma_loss` with K‖∇_c(f_y − f_j)‖ in place of K_yj, j the runner-up, c the output of a module.

    ``loss`` may be another one of the same arguments. To first order, this is the margin that the anchored certificate
    after c needs, with the Lipschitz constant K of the layers up to c. The gradient is differentiated again, through
    the layers after c only.
    """
    outputs: list[Tensor] = []

    def see(module: nn.Module, inputs: object, output: Tensor) -> None:
        if not isinstance(output, Tensor):
            raise InputError("the module before the cut must return one tensor")
        if not output.requires_grad:  # the layers before are frozen
            output.requires_grad_()
        outputs.append(output)

    with cut.register_forward_hook(see):
        logits = model(images)
    (gradient,) = torch.autograd.grad(_margins(logits, labels).sum(), outputs[-1:], create_graph=True)
    # With mirror images, the batch holds several values for each image.
    rows = gradient.to(logits.dtype).flatten(1).unflatten(0, (-1, len(images))).transpose(0, 1)
    slope = rows.flatten(1).norm(dim=1, keepdim=True)
    constants = (constant.to(logits) * slope / temperature).expand_as(logits).scatter(1, labels[:, None], 0.0)
    return (loss or emma_loss)(logits / temperature, labels, constants, eps), logits


def _margins(logits: Tensor, labels: Tensor) -> Tensor:
    """f_y − f_j with the runner-up j, shape (N, 1)."""
    others = logits.detach().scatter(1, labels[:, None], -math.inf)
    return logits.gather(1, labels[:, None]) - logits.gather(1, others.argmax(1, keepdim=True))


def adversarial_loss(
    model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, eps: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropy at x − ε∇(f_y − f_j)/‖∇(f_y − f_j)‖, j the runner-up: where the margin is smallest to first order.

    The margin there is f_y − f_j − ε‖∇(f_y − f_j)‖ up to curvature, which is what the anchored certificate needs to
    first order. The moved image is a constant for the gradient, so there is no second derivative.

    Source: the fast gradient method of Goodfellow, Shlens and Szegedy, "Explaining and harnessing adversarial
    examples", ICLR 2015, section 4, with the ℓ2 norm, and with the margin in place of the cross-entropy.

    Args:
        model: maps pixels to logits, each image independently.
        images: shape (N, C, H, W).
        labels: the classes y, shape (N,).
        eps: ε in ℓ2 on pixels.
        temperature: divides the logits.

    Returns:
        The loss, and the logits of the images as they are, shape (N, classes).
    """
    images = images.detach().requires_grad_()
    logits = model(images)
    (gradient,) = torch.autograd.grad(_margins(logits, labels).sum(), images)
    moved = images.detach() - eps * F.normalize(gradient.flatten(1)).view_as(images)
    return F.cross_entropy(model(moved) / temperature, labels), logits.detach()


def noise_loss(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    sigma: float,
    consistency: float = 0.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the logits of noisy images, for the certificates of the smoothed classifier.

    With ``consistency`` λ > 0 every image gets two draws of the noise, with predictions p_i and their mean p̄. Then λ
    times the mean divergence KL(p̄ ‖ p_i) and half the entropy of p̄ are added.

    Source: Cohen, Rosenfeld and Kolter, "Certified adversarial robustness via randomized smoothing", ICML 2019, section
    3.3; Jeong and Shin, "Consistency regularization for certified robustness of smoothed classifiers", NeurIPS 2020,
    equation 10 with η = ½.
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


def teacher_loss(logits: Tensor, of_teacher: Tensor) -> Tensor:
    """The mean Kullback-Leibler divergence KL(q ‖ p) of a student's probabilities p from those of its teacher, q.

    Source: Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network" (arXiv 1503.02531), section 2.

    Args:
        logits: those of the student, divided by its temperature, shape (N, classes).
        of_teacher: those of the teacher, of the same shape.
    """
    return F.kl_div(logits.log_softmax(1), of_teacher.log_softmax(1), reduction="batchmean", log_target=True)


def emma_loss(logits: Tensor, labels: Tensor, constants: Tensor, eps: float) -> Tensor:
    """Cross-entropy of f_j + ε_j K_yj, where ε_j ≤ ε is the distance (f_y − f_j)/K_yj at which class j can win.

    ε_j is 0 if j wins already, and is a constant for the gradient.

    Source: Hu et al., "Unlocking deterministic robustness certification on ImageNet", NeurIPS 2023 (arXiv 2301.12549),
    equation 2 and definition 3.

    Args:
        logits: f, shape (N, classes).
        labels: the classes y, shape (N,).
        constants: K_yj, Lipschitz constants of f_y − f_j, shape (N, classes), 0 where j = y.
        eps: ε in ℓ2 on pixels.
    """
    return F.cross_entropy(_levelled(logits, labels, constants, eps), labels)


def _levelled(logits: Tensor, labels: Tensor, constants: Tensor, eps: float) -> Tensor:
    """The logits f_j + ε_j K_yj of :func:`emma_loss`."""
    margins = logits.gather(1, labels[:, None]) - logits
    reach = eps * constants
    share = (margins / reach.clamp_min(torch.finfo(reach.dtype).tiny)).clamp(0, 1).detach()
    return logits + share * reach


def annealed_loss(
    logits: Tensor,
    labels: Tensor,
    constants: Tensor,
    eps: float,
    *,
    offset: float = 2.0,
    temperature: float = 0.75,
    exponent: float = 5.0,
) -> Tensor:
    """Logit annealing: −T (1 − p)^γ log p, p the probability of the label for (z − ξ e_y)/T.

    z are the logits f_j + ε_j K_yj of :func:`emma_loss`. The offset ξ asks for a margin, and images that have it count
    ever less, which leaves the capacity of the network to others.

    Source: Lai, Huang, Kung and Chen, "Enhancing certified robustness via block reflector orthogonal layers and logit
    annealing loss", ICML 2025 (arXiv 2505.15174), section 5.

    ``offset`` is ξ, ``temperature`` T and ``exponent`` γ; the other arguments are those of :func:`emma_loss`.
    """
    moved = _levelled(logits, labels, constants, eps)
    offsets = torch.zeros_like(moved).scatter(1, labels[:, None], offset)
    entropy = F.cross_entropy((moved - offsets) / temperature, labels, reduction="none")
    return temperature * ((1 - (-entropy).exp()) ** exponent * entropy).mean()


def fixed_loss(logits: Tensor, labels: Tensor, constants: Tensor, eps: float) -> Tensor:
    """Cross-entropy of f_j + ε K_yj, with the full ε for every image, whether its prediction is right or wrong.

    With K_yj = √2 K, K the constant of the logits, this is Lipschitz margin training: Tsuzuku, Sato and Sugiyama,
    NeurIPS 2018 (arXiv 1802.04034), section 4. With the rows of the head it is the fixed margin of Hu et al. 2023
    (arXiv 2301.12549), appendix A. The arguments are those of :func:`emma_loss`.
    """
    return F.cross_entropy(logits + eps * constants, labels)


def bottom(logits: Tensor, constants: Tensor, eps: float) -> Tensor:
    """The logit f_⊥ of GloRo, the maximum over j ≠ ŷ of f_j + ε K_ŷj for the predicted class ŷ, shape (N,).

    Source: Leino et al. 2021, equation 2; Hu et al. 2023 (arXiv 2301.12549), equation 1.
    """
    predicted = logits.argmax(1, keepdim=True)
    return (logits + eps * constants).scatter(1, predicted, -math.inf).amax(1)


def gloro_loss(logits: Tensor, labels: Tensor, constants: Tensor, eps: float) -> Tensor:
    """Cross-entropy of (f, f_⊥), where the class ⊥ is never the right one.

    The arguments are those of :func:`emma_loss`, but ``constants`` are K_ŷj for the predicted classes ŷ.

    Source: Leino, Wang, Fredrikson, "Globally-robust neural networks", ICML 2021 (arXiv 2102.08452), section 3.
    """
    return F.cross_entropy(torch.cat([logits, bottom(logits, constants, eps)[:, None]], 1), labels)


def trades_loss(logits: Tensor, labels: Tensor, constants: Tensor, eps: float, weight: float = 1.0) -> Tensor:
    """Cross-entropy plus the Kullback-Leibler divergence between the predictions without and with the ⊥ logit of GloRo.

    With p the probabilities of f and p⊥ those of (f, f_⊥), f_⊥ = max_{j ≠ ŷ} f_j + ε K_ŷj for the predicted class ŷ,
    log p_j − log p⊥_j is the same for all j, so KL(p ‖ p⊥) = log Σ exp(f, f_⊥) − log Σ exp(f).

    Source: Leino, Wang, Fredrikson, "Globally-robust neural networks", ICML 2021, with the loss of Zhang et al.,
    "Theoretically principled trade-off between robustness and accuracy", ICML 2019.

    ``weight`` is the factor of the divergence; the other arguments are those of :func:`gloro_loss`.
    """
    clean = logits.logsumexp(1)
    divergence = torch.logaddexp(clean, bottom(logits, constants, eps)) - clean
    return F.cross_entropy(logits, labels) + weight * divergence.mean()


def _by_bound(loss: Callable[..., Tensor], of_predicted: bool = False) -> Loss:
    """A loss of the logits and the constants of pairs of classes, which for f/T are K/T."""

    def of_batch(run: Any, images: Tensor, labels: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        logits = run.logits(images)
        classes = logits.argmax(1) if of_predicted else labels
        constants = run.bound.margins(classes, logits.shape[1]).to(logits.dtype) / run.temperature
        more = {"weight": run.asked.weight} if loss is trades_loss else {}
        return loss(logits / run.temperature, labels, constants, eps, **more), logits

    return of_batch


def _cut(loss: Callable[..., Tensor]) -> Loss:
    """A loss with the slopes of margins at the end of the Lipschitz prefix."""
    return lambda run, x, y, eps: cut_loss(run.logits, run.cut, x, y, run.bound.features, eps, run.temperature, loss)


def _local(run: Any, images: Tensor, labels: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    asked = run.asked
    weights = {"sparsity": asked.sparsity, "upper_weight": asked.upper_weight}
    return local_loss(run.local, images, labels, eps, run.mixture, bottom=asked.loss == "local-g", **weights)


def _cross_entropy(run: Any, images: Tensor, labels: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    logits = run.logits(images)
    return F.cross_entropy(logits / run.temperature, labels), logits


# By the names in ``lipcert.settings.LOSSES``: the loss of a batch, and the logits of its images, in a training run.
Loss = Callable[[Any, Tensor, Tensor, float], tuple[Tensor, Tensor]]
BY_NAME: dict[str, Loss] = {
    "adversarial": lambda run, x, y, eps: adversarial_loss(run.logits, x, y, eps, run.temperature),
    "cut": _cut(emma_loss),
    "cut-annealed": _cut(annealed_loss),
    "emma": _by_bound(emma_loss),
    "annealed": _by_bound(annealed_loss),
    "gloro": _by_bound(gloro_loss, of_predicted=True),
    "trades": _by_bound(trades_loss, of_predicted=True),
    "fixed": _by_bound(fixed_loss),
    "lmt": _by_bound(fixed_loss),
    "local-b": _local,
    "local-g": _local,
    "noise": lambda run, x, y, eps: noise_loss(
        run.denoised, x, y, run.asked.sigma, run.asked.consistency, run.temperature
    ),
    "ce": _cross_entropy,
}
