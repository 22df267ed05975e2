"""Layer-wise adaptation: attention by distance learns what the attention in its place did, on images without labels.

Every swapped attention is trained by itself. It gets the inputs that the attention at its path has in the pretrained
network and is fitted to that attention's outputs, in mean square; everything else is frozen. So errors of earlier
layers do not enter, layers do not wait for each other, and no labels are needed. This is the L2 adaptation of CertViT
(arXiv 2302.10287), for the form of attention by distance that is Lipschitz.

Nothing gets worse on images that took no part in the fit: a layer keeps its first weights where its error on them did
not fall, and all layers do where the network's logits on them moved further.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lipcert.errors import InputError
from lipcert.model import Model
from lipcert.surgery._attention import L2Attention

_BATCH = 8
_STEPS = 200
_RATE = 1e-3
_HELD_OUT = 4  # one of so many images is held out


@dataclass(frozen=True)
class AdaptedLayer:
    """One attention.

    Attributes:
        path: where it stands in the network.
        error_before: ‖its outputs − those of the pretrained attention‖ / ‖those‖ on the held-out images, both for the
            inputs that the pretrained network has there.
        error_after: the same after the fit; ``error_before`` where the first weights were kept.
        adapted: whether it has new weights.
    """

    path: str
    error_before: float
    error_after: float
    adapted: bool


@dataclass(frozen=True)
class Adaptation:
    """What :func:`adapt` did. All figures are from the held-out images.

    Attributes:
        images: number of images that the weights were fitted on.
        held_out: number of images held out from the fit.
        layers: the attentions, in the order of the network.
        logits_before: median over the images of ‖logits − those of the pretrained network‖ / ‖those‖ before the fit.
        logits_after: the same after it.
    """

    images: int
    held_out: int
    layers: tuple[AdaptedLayer, ...]
    logits_before: float
    logits_after: float


@dataclass(frozen=True)
class _Call:
    """One call of the pretrained attention: its arguments and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


class _Reached(Exception):
    """The pretrained network has come to the attention in question; the rest of it is of no interest."""


def adapt(
    model: Model, pretrained: Model, images: Tensor, progress: Callable[[int, int], None] | None = None
) -> Adaptation:
    """Fits each attention by distance of a converted model to the attention that it replaced, in place.

    Queries, values and the output projection are trained, by Adam on the mean square error, a fixed number of steps.
    Position biases stay, and so does a weight that stands in several places of the network.

    Args:
        model: a converted model.
        pretrained: the model before its conversion; it may share weights with ``model`` and stays as it is.
        images: unlabeled images in [0, 1], shape (N, C, H, W), at least 2. The last quarter is held out from the fit.
        progress: called as ``progress(done, total)`` after each attention.

    Returns:
        What was done.

    Raises:
        InputError: on unusable images, or models that do not fit together.
    """
    model.check_images(images)
    if len(images) < 2:
        raise InputError(f"adaptation needs 2 images or more, one of them to be held out, got {len(images)}")
    fit, held = parted(images)
    pairs = _pairs(model, pretrained)
    places = Counter(id(parameter) for _, parameter in model.net.named_parameters(remove_duplicate=False))
    layers: list[AdaptedLayer] = []
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []
    with _evaluating(model), _evaluating(pretrained):
        wanted = _logits(pretrained, held)
        before = _moved(_logits(model, held), wanted)
        try:
            for path, new, old in pairs:
                own = {name: w.detach().clone() for name, w in _trained(new).items() if places[id(w)] == 1}
                calls = [_calls(pretrained, old, part) for part in (fit, held)]
                layer, weights = _fit(path, new, own, *calls)
                layers.append(layer)
                for name, weight in weights.items():
                    owner, attribute = _place(new, name)
                    originals.append((owner, attribute, getattr(owner, attribute)))
                    setattr(owner, attribute, nn.Parameter(weight, getattr(owner, attribute).requires_grad))
                if progress is not None:
                    progress(len(layers), len(pairs))
            after = _moved(_logits(model, held), wanted)
        except BaseException:
            _restore(originals)
            raise
    if not after <= before:
        _restore(originals)
        layers = [AdaptedLayer(layer.path, layer.error_before, layer.error_before, False) for layer in layers]
        after = before
    return Adaptation(len(fit), len(held), tuple(layers), before, after)


def parted(images: Tensor) -> tuple[Tensor, Tensor]:
    """The images to fit on, and those held out."""
    count = len(images) - max(1, len(images) // _HELD_OUT)
    return images[:count], images[count:]


def _pairs(model: Model, pretrained: Model) -> list[tuple[str, L2Attention, nn.Module]]:
    old = dict(pretrained.net.named_modules())
    new = [(path, module) for path, module in model.net.named_modules() if isinstance(module, L2Attention)]
    foreign = [path for path, _ in new if path not in old]
    if foreign:
        raise InputError(f"the pretrained model has no module {foreign[0]}; pass the model as it was before convert")
    return [(path, module, old[path]) for path, module in new if not isinstance(old[path], L2Attention)]


def _calls(pretrained: Model, attention: nn.Module, images: Tensor) -> list[_Call]:
    """What goes into an attention of the pretrained network and comes out, one call a batch of images."""
    found: list[_Call] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, Tensor):
            found.append(_Call(args, kwargs, output))
        raise _Reached

    handle = attention.register_forward_hook(keep, with_kwargs=True)
    try:
        for batch in images.split(_BATCH):
            try:
                _logits(pretrained, batch)
            except _Reached:
                continue
    finally:
        handle.remove()
    return found


def _fit(
    path: str, new: L2Attention, weights: dict[str, Tensor], fit: list[_Call], held: list[_Call]
) -> tuple[AdaptedLayer, dict[str, Tensor]]:
    """The layer's line of the report and its new weights by name: none where the held-out error did not fall."""
    before = _error(new, weights, held)
    if not (weights and fit and math.isfinite(before)):
        return AdaptedLayer(path, before, before, False), {}
    energy = torch.stack([call.output.float().square().mean() for call in fit]).mean().clamp(min=1e-30)
    with torch.enable_grad():
        leaves = [weight.requires_grad_() for weight in weights.values()]
        optimizer = torch.optim.Adam(leaves, lr=_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        for step in range(_STEPS):
            call = fit[step % len(fit)]
            optimizer.zero_grad()
            loss = (functional_call(new, weights, call.args, call.kwargs) - call.output).square().mean() / energy
            loss.backward()
            optimizer.step()
            schedule.step()
    weights = {name: weight.detach() for name, weight in weights.items()}
    after = _error(new, weights, held)
    if not after < before:
        return AdaptedLayer(path, before, before, False), {}
    return AdaptedLayer(path, before, after, True), weights


@torch.no_grad()
def _error(new: L2Attention, weights: dict[str, Tensor], calls: list[_Call]) -> float:
    """The relative error of its outputs over all calls; NaN without any."""
    away = whole = 0.0
    for call in calls:
        out = functional_call(new, weights, call.args, call.kwargs)
        away += float((out - call.output).double().square().sum())
        whole += float(call.output.double().square().sum())
    return math.sqrt(away / whole) if whole else math.nan


def _trained(new: L2Attention) -> dict[str, nn.Parameter]:
    """The weights of queries, values and the output projection."""
    names = ("q.weight", "v_weight", "v_bias", "proj.weight", "proj.bias")
    return {name: parameter for name, parameter in new.named_parameters() if name in names}


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, attribute = name.rpartition(".")
    return module.get_submodule(owner), attribute


def _restore(originals: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    for owner, attribute, parameter in originals:
        setattr(owner, attribute, parameter)


@torch.no_grad()
def _logits(model: Model, images: Tensor) -> Tensor:
    """Shape (N, classes), float64."""
    return torch.cat([model(part.to(model.device, model.dtype)).double() for part in images.split(_BATCH)])


def _moved(logits: Tensor, wanted: Tensor) -> float:
    lengths = torch.linalg.vector_norm(wanted, dim=1).clamp(min=1e-30)
    return float((torch.linalg.vector_norm(logits - wanted, dim=1) / lengths).median())


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
