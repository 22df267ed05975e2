"""Excludes images before anything costly is computed for them.

**Misclassification.** A wrong prediction does not count towards certified accuracy.

**First-order limit.** No method that bounds the change of a margin by a Lipschitz constant or by a linearisation at the
image certifies beyond min_j m_j/‖∇_x m_j‖: a Lipschitz constant of the margin m_j on any ball around x is at least
‖∇_x m_j‖, and a linearisation subtracts ‖∇_x m_j‖ ε from m_j before any remainder. This is no bound on the network's
true radius, which may be larger. The limit is computed for the runners-up with the smallest margins, and may therefore
be smaller for another class.

**Attack.** A perturbation within ε that changes the prediction rules out every certificate at ε.

**Looseness.** K/‖∇m‖, the global bound over a slope of the network, measures how loose the product over layers is.
Where it is large, remainders are as loose, and methods have certified small ε only
(:func:`lipcert.settings.unreached`). This is experience and not a bound; a method that is chosen by name runs anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lipcert.inputs.data import Images
from lipcert.model import Model
from lipcert.numerics import l2_norm
from lipcert.settings import unreached

# The number of runners-up whose gradients are compared.
_RIVALS = 3
_LOOKED_AT = 2
# From these numbers of parameters on the triage looks at fewer images, so that it takes seconds.
_MEDIUM, _LARGE = 1e6, 10e6


def too_loose(model: Model, log10: float, eps: float) -> str:
    """Why, by experience, no method reaches ε on a network; empty if that is not the case."""
    if eps < unreached(log10) or not math.isfinite(log10):
        return ""
    images = torch.rand(_LOOKED_AT, *model.input_size, generator=torch.Generator().manual_seed(0)).to(model.device)
    pixels = images.to(model.dtype).requires_grad_()
    with torch.enable_grad():
        best, second = model(pixels).topk(2, dim=1).values.unbind(1)
        slope = _steepness(best - second, pixels).median().item()
    if not 0 < slope < math.inf or eps < (least := unreached(log10 - math.log10(slope))):
        return ""
    bound = math.ceil(10 * log10) / 10
    return (
        f"the global bound is 10^{bound:.1f} and gradient norms at the images are about {slope:.2g}; "
        f"no method has certified ε ≥ {least:g} for a network with so loose a bound"
    )


@torch.enable_grad()
def first_order_limit(model: Model, images: Tensor, predicted: Tensor) -> Tensor:
    """min_j m_j/‖∇_x m_j‖ over the classes j with the smallest margins m_j = f_y − f_j, at N images."""
    pixels = images.detach().clone().requires_grad_()
    logits = model(pixels)
    classes = predicted.to(logits.device)[:, None]
    margins = logits.gather(1, classes) - logits
    order = margins.detach().scatter(1, classes, math.inf).argsort(1)[:, : min(_RIVALS, logits.shape[1] - 1)]
    limit = torch.full((len(images),), math.inf, dtype=torch.float64)
    for rival in order.unbind(1):
        margin = margins.gather(1, rival[:, None])[:, 0]
        length = _steepness(margin, pixels)
        ratio = torch.where(length > 0, margin.detach().double() / length, math.inf)
        limit = torch.minimum(limit, ratio.nan_to_num(nan=math.inf, posinf=math.inf).cpu())
    return limit


def _steepness(values: Tensor, pixels: Tensor) -> Tensor:
    """The norm of the gradient of each image's value, float64, shape (N,); 0 where it does not depend on the pixels."""
    slopes = None
    if values.requires_grad:
        (slopes,) = torch.autograd.grad(values.sum(), pixels, retain_graph=True, allow_unused=True)
    return l2_norm((torch.zeros_like(pixels) if slopes is None else slopes).flatten(1).double(), 1)


@dataclass(frozen=True)
class Screening:
    """The reasons against certificates at ε for N images, none of them where only the global bound decides.

    Attributes:
        limit: first-order limits, shape (N,); None if they were not computed.
        broken: whether an attack changed the prediction within ε, bool, shape (N,).
        beyond: whether the limit is at most ε, bool, shape (N,).
        wrong: whether the prediction is not the label, bool, shape (N,).
    """

    limit: Tensor | None
    broken: Tensor
    beyond: Tensor
    wrong: Tensor

    @property
    def ruled_out(self) -> Tensor:
        """Images for which only the global methods are tried; bool, shape (N,)."""
        return self.broken | self.beyond | self.wrong

    def reasons(self, certified: Tensor, skipped: Mapping[str, str]) -> tuple[str, ...]:
        """Why each image has no certificate at ε, N texts; empty for certified images."""
        otherwise = f"skipped: {', '.join(skipped)}" if skipped else "bounds too loose"
        texts = ("", "misclassified", "attacked", "first-order limit", otherwise)
        apply = torch.stack((certified, self.wrong, self.broken, self.beyond, torch.ones_like(certified)))
        return tuple(texts[first] for first in apply.int().argmax(0).tolist())


@dataclass(frozen=True)
class Triage:
    """Figures of the first images of a data set, before bounds are computed.

    Attributes:
        images: their number.
        correct: how many are correctly classified; None without labels.
        limits: their first-order limits, in increasing order.
        reachable: for how many the limit is above ε.
    """

    images: int
    correct: int | None
    limits: list[float]
    reachable: int


def triage(model: Model, images: Images, eps: float) -> Triage | None:
    """Evaluates the first images with the unmodified model, for some seconds."""
    parameters = sum(p.numel() for p in model.parameters())
    count = 8 if parameters < _MEDIUM else 4 if parameters < _LARGE else 2
    batch = next(iter(images.batches(count)), None)
    if batch is None:
        return None
    pixels = batch.images.to(model.device, model.dtype)
    with torch.no_grad():
        logits = model(pixels)
    if logits.dim() != 2 or logits.shape[1] < 2:
        return None
    predicted = logits.argmax(1)
    limits = first_order_limit(model, pixels, predicted.cpu())
    correct = None if batch.labels is None else int((predicted.cpu() == batch.labels).sum())
    reachable = int((limits > eps).sum())
    return Triage(len(batch), correct, limits.sort().values.tolist(), reachable)
