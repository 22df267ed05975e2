"""Layer-wise adaptation: fits each L2 attention to the attention that it replaced, on unlabeled images.

Every swapped attention is trained separately. It gets the inputs of the original attention in the pretrained network
and is fitted to that attention's outputs, in mean square; everything else is frozen. So errors of earlier layers do not
accumulate, layers are independent, and no labels are needed. This is the L2 adaptation of CertViT (arXiv 2302.10287),
applied to the Lipschitz form of L2 attention.

Results on held-out images never get worse. A layer keeps its initial weights if its error on them does not decrease.
All layers keep them if the network's logits on them move further from those of the pretrained network.
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
_HELD_OUT = 4  # 1/_HELD_OUT of the images are held out


@dataclass(frozen=True)
class AdaptedLayer:
    """The adaptation of one attention.

    Attributes:
        path: its path in the network.
        error_before: relative error before the fit on the held-out images: ‖outputs − outputs of the pretrained
            attention‖ / ‖outputs of the pretrained attention‖, both for the inputs in the pretrained network.
        error_after: the same after the fit; ``error_before`` if the initial weights were kept.
        adapted: whether it has new weights.
    """

    path: str
    error_before: float
    error_after: float
    adapted: bool


@dataclass(frozen=True)
class Adaptation:
    """The result of :func:`adapt`. All errors refer to the held-out images.

    Attributes:
        images: number of images used for the fit.
        held_out: number of images held out from the fit.
        layers: the attentions, in the order of the network.
        logits_before: median over the images of the relative distance of the logits from those of the pretrained
            network, before the fit.
        logits_after: the same after the fit.
    """

    images: int
    held_out: int
    layers: tuple[AdaptedLayer, ...]
    logits_before: float
    logits_after: float


@dataclass(frozen=True)
class _Call:
    """One call of the pretrained attention: its arguments and its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


class _Reached(Exception):
    """Stops the forward pass of the pretrained network after the attention of interest."""


def adapt(
    model: Model, pretrained: Model, images: Tensor, progress: Callable[[int, int], None] | None = None
) -> Adaptation:
    """Fits each L2 attention of a converted model to the attention that it replaced, in place.

    Queries, values and the output projection are trained with Adam on the mean squared error, for a fixed number of
    steps. Position biases and weights shared between places of the network do not change.

    Args:
        model: a converted model.
        pretrained: the model before its conversion. It may share weights with ``model`` and does not change.
        images: unlabeled images in [0, 1], shape (N, C, H, W), at least 2. The last quarter is held out from the fit.
        progress: called as ``progress(done, total)`` after each attention.

    Returns:
        A report on the adaptation.

    Raises:
        InputError: the images are not valid, or the models do not match.
    """
    model.check_images(images)
    if len(images) < 2:
        raise InputError(f"adaptation needs at least 2 images, one of them held out, got {len(images)}")
    fit, held_out = parted(images)
    pairs = _pairs(model, pretrained)
    places = Counter(id(parameter) for _, parameter in model.net.named_parameters(remove_duplicate=False))
    layers: list[AdaptedLayer] = []
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []
    with _evaluating(model), _evaluating(pretrained):
        targets = _logits(pretrained, held_out)
        before = _moved(_logits(model, held_out), targets)
        try:
            for path, new, old in pairs:
                trainable = {name: w.detach().clone() for name, w in _trained(new).items() if places[id(w)] == 1}
                calls = [_calls(pretrained, old, part) for part in (fit, held_out)]
                layer, weights = _fit(path, new, trainable, *calls)
                layers.append(layer)
                for name, weight in weights.items():
                    owner, attribute = _place(new, name)
                    originals.append((owner, attribute, getattr(owner, attribute)))
                    setattr(owner, attribute, nn.Parameter(weight, getattr(owner, attribute).requires_grad))
                if progress is not None:
                    progress(len(layers), len(pairs))
            after = _moved(_logits(model, held_out), targets)
        except BaseException:
            _restore(originals)
            raise
    if not after <= before:
        _restore(originals)
        layers = [AdaptedLayer(layer.path, layer.error_before, layer.error_before, False) for layer in layers]
        after = before
    return Adaptation(len(fit), len(held_out), tuple(layers), before, after)


def parted(images: Tensor) -> tuple[Tensor, Tensor]:
    """Splits the images into those for the fit and those held out."""
    count = len(images) - max(1, len(images) // _HELD_OUT)
    return images[:count], images[count:]


def _pairs(model: Model, pretrained: Model) -> list[tuple[str, L2Attention, nn.Module]]:
    originals = dict(pretrained.net.named_modules())
    replacements = [(path, module) for path, module in model.net.named_modules() if isinstance(module, L2Attention)]
    foreign = [path for path, _ in replacements if path not in originals]
    if foreign:
        raise InputError(f"the pretrained model has no module {foreign[0]}; pass the model as it was before convert")
    return [
        (path, module, originals[path]) for path, module in replacements if not isinstance(originals[path], L2Attention)
    ]


def _calls(pretrained: Model, attention: nn.Module, images: Tensor) -> list[_Call]:
    """Records the inputs and outputs of an attention of the pretrained network, one call per batch of images."""
    calls: list[_Call] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, Tensor):
            calls.append(_Call(args, kwargs, output))
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
    return calls


def _fit(
    path: str, new: L2Attention, weights: dict[str, Tensor], fit: list[_Call], held_out: list[_Call]
) -> tuple[AdaptedLayer, dict[str, Tensor]]:
    """The layer's entry of the report and its new weights by name; none if the held-out error did not decrease."""
    before = _error(new, weights, held_out)
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
    after = _error(new, weights, held_out)
    if not after < before:
        return AdaptedLayer(path, before, before, False), {}
    return AdaptedLayer(path, before, after, True), weights


@torch.no_grad()
def _error(new: L2Attention, weights: dict[str, Tensor], calls: list[_Call]) -> float:
    """The relative error of the outputs over all calls; NaN without calls."""
    away = total = 0.0
    for call in calls:
        out = functional_call(new, weights, call.args, call.kwargs)
        away += float((out - call.output).double().square().sum())
        total += float(call.output.double().square().sum())
    return math.sqrt(away / total) if total else math.nan


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


def _moved(logits: Tensor, reference: Tensor) -> float:
    lengths = torch.linalg.vector_norm(reference, dim=1).clamp(min=1e-30)
    return float((torch.linalg.vector_norm(logits - reference, dim=1) / lengths).median())


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
