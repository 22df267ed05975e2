"""Fits the classifier of a network to the features of noisy images, which are computed once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipcert.model import Model
from lipcert.training._validation import Epoch

_DECAYS = (1e-4, 1e-3, 1e-2, 1e-1)  # weights of ‖W − W₀‖², of which held-out images choose one
_HELD_OUT = 5  # one image in so many
_STEPS = 200  # of L-BFGS
_LARGEST = 2**32  # bytes of features


def classifier(model: Model) -> nn.Linear | None:
    """The last linear layer of the network, by timm's ``get_classifier``; None if it is of another kind."""
    found = getattr(model.net, "get_classifier", lambda: None)()
    return found if isinstance(found, nn.Linear) else None


def fit_head(
    head: nn.Linear,
    loader: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    clean: Callable[[Tensor], Tensor],
    noisy: Callable[[Tensor], Tensor],
    draws: int,
) -> Epoch | None:
    """Logistic regression on the features of clean images and of ``draws`` noisy ones; None if features are too many.

    The loss is the cross-entropy plus λ‖W − W₀‖² with the weights W₀ before, so that a class without images keeps its
    row. λ is the one with the largest accuracy on a fifth of the images, which the fit that chooses it does not see.
    """
    started = time.perf_counter()
    seen: list[Tensor] = []
    features: list[Tensor] = []
    labels: list[Tensor] = []
    # Of the first pass, where an image has the same place in the clean and in the noisy batch.
    validation: list[Tensor] = []
    size = 0
    with torch.no_grad(), head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
        for draw in range(draws):
            for images, classes in loader():
                for forward in (clean, noisy) if draw == 0 else (noisy,):
                    seen.clear()
                    logits = forward(images)
                    if len(seen) != 1 or seen[0].dim() != 2 or size > _LARGEST:
                        return None
                    if not torch.allclose(F.linear(seen[0], head.weight, head.bias), logits, rtol=1e-3, atol=1e-3):
                        return None  # the logits are not those of this layer alone
                    features.append(seen[0].float())
                    labels.append(classes.to(logits.device))
                    size += 4 * seen[0].numel()
                    if draw == 0:
                        validation.append(torch.arange(len(images), device=logits.device) % _HELD_OUT == 0)
    if not features:
        return None
    every, wanted, part = torch.cat(features), torch.cat(labels), torch.cat(validation)
    first = every[: len(part)], wanted[: len(part)]
    scores = {}
    for decay in _DECAYS:
        weight, bias = _fitted(head, first[0][~part], first[1][~part], decay)
        scores[decay] = int((F.linear(first[0][part], weight, bias).argmax(1) == first[1][part]).sum())
    weight, bias = _fitted(head, every, wanted, max(_DECAYS, key=scores.__getitem__))
    logits = F.linear(every, weight, bias)
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None and bias is not None:
            head.bias.copy_(bias)
    right = (logits.argmax(1) == wanted).double().mean().item()
    loss = F.cross_entropy(logits, wanted).item()
    return Epoch(draws, draws, loss, right, 0.0, time.perf_counter() - started, fitted=True)


def _fitted(head: nn.Linear, features: Tensor, labels: Tensor, decay: float) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of the head that minimise the loss with this λ."""
    before = head.weight.detach().float()
    weight = before.clone().requires_grad_()
    bias = None if head.bias is None else head.bias.detach().float().clone().requires_grad_()
    parameters = [weight] if bias is None else [weight, bias]
    optimizer = torch.optim.LBFGS(parameters, max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(F.linear(features, weight, bias), labels) + decay * (weight - before).square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weight.detach(), None if bias is None else bias.detach()
