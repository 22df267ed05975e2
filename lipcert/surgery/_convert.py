"""Surgery on a loaded model: swap, calibrate on images, report."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.errors import ConvertError, InputError
from lipcert.model import Model, checked, outside_inference_mode
from lipcert.surgery._activations import ACTIVATIONS, calibrate_activation
from lipcert.surgery._adapt import Adaptation, adapt, parted
from lipcert.surgery._attention import L2Attention
from lipcert.surgery._initial import calibrate_projection
from lipcert.surgery._swap import Activation, Attention, Edit, Kept, Norm, Swapped, plan

_RANDOM_IMAGES = 4
_CALIBRATION_IMAGES = 16
_BATCH = 8


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did.

    Attributes:
        parameters_before, parameters_after: number of parameters.
        swapped: the modules that were replaced.
        kept: the attention and the normalisations that stayed although they were to be replaced, each with the reason.
        images: number of images that the figures below are from.
        random: whether these were random, for lack of given ones.
        logits_moved: median over the images of ‖logits after − before‖ / ‖logits before‖.
        logits_moved_most: its maximum.
        agreement: fraction of the images whose top class stayed.
        adaptation: what the adaptation of the attention did; None without one.
    """

    parameters_before: int
    parameters_after: int
    swapped: tuple[Swapped, ...]
    kept: tuple[Kept, ...]
    images: int
    random: bool
    logits_moved: float
    logits_moved_most: float
    agreement: float
    adaptation: Adaptation | None = None


@outside_inference_mode
def convert(
    model: Model | nn.Module,
    attention: Attention = "l2",
    norm: Norm = "keep",
    images: Tensor | None = None,
    *,
    activation: Activation = "keep",
    adaptation: bool = False,
    origin: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Puts modules with a Lipschitz constant into a model, in place.

    New weights come in closed form from the old ones and from what the modules see on the images, front to back in
    one pass: see :mod:`lipcert.surgery._initial`. ``model.recipe`` gains a step and ``model.conversion`` holds a
    :class:`ConversionReport`. On any error the model is as it was.

    Args:
        model: from :func:`lipcert.load`, or a module that timm made.
        attention: ``"l2"`` replaces dot-product attention by attention by distance, where the class has such a form
            (:mod:`lipcert.surgery._table`); what has none stays and is named in the report. ``"keep"`` keeps it all.
        norm: ``"project"`` or ``"smooth"`` replace LayerNorm, RMSNorm and GroupNorm by projections; ``"keep"`` keeps
            them.
        images: unlabeled images in [0, 1], shape (N, C, H, W). The first 16 calibrate. Random ones by default, which
            say little about the model on real images.
        activation: ``"clipped-relu"``, ``"maxmin"`` or ``"clipped-maxmin"`` replace every ``nn.ReLU``, with one
            threshold each, above all that it sees on the images: so clipped ReLU changes nothing there. MaxMin is
            another function, and the network has to be trained again.
        adaptation: train the new attention on the images too, see :func:`lipcert.surgery.adapt`. The last quarter of
            them is then held out from calibration and training.
        origin: where the images are from, by name, as values that JSON can hold; the recipe states it.
        progress: called as ``progress(done, total)`` after each attention that was trained.

    Returns:
        The model.

    Raises:
        InputError: on an unknown option or unusable images, or where MaxMin finds no pairs of channels.
        ConvertError: if the model was converted before, or gives logits that are not finite.
    """
    model = checked(model)
    if any(step.get("step") == "convert" for step in model.recipe):
        raise ConvertError("the model was converted before; load it afresh to convert it another way")
    random = images is None
    if images is None:
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(_RANDOM_IMAGES, *model.input_size, generator=generator)
    model.check_images(images)
    if not len(images):
        raise InputError("no images to calibrate on; pass at least one, or none at all for random ones")
    if adaptation and (random or len(images) < 2):
        raise InputError("adaptation needs 2 images of yours or more; pass images, or leave it out")
    pretrained = _sharing_weights(model) if adaptation else None
    fit = parted(images)[0] if adaptation else images
    edits, kept = plan(model.net, attention=attention, norm=norm, activation=activation)
    if activation != "keep" and not any(isinstance(edit.new, tuple(ACTIVATIONS.values())) for edit in edits):
        raise ConvertError("the network has no ReLU module, so there is nothing for activation to replace")
    before = _logits(model, images)
    parameters = _count(model)
    applied: list[Edit] = []
    swapped: list[Swapped] = []
    try:
        for edit in edits:
            applied.append(edit)
            swapped.append(edit.apply())
        _calibrate(model, edits, fit[:_CALIBRATION_IMAGES])
        adapted = None if pretrained is None else adapt(model, pretrained, images, progress)
        after = _logits(model, images)
    except BaseException:
        for edit in reversed(applied):
            edit.revert()
        raise
    moved = torch.linalg.vector_norm(after - before, dim=1) / torch.linalg.vector_norm(before, dim=1).clamp(min=1e-30)
    model.conversion = ConversionReport(
        parameters_before=parameters,
        parameters_after=_count(model),
        swapped=tuple(swapped),
        kept=tuple(kept),
        images=len(images),
        random=random,
        logits_moved=float(moved.median()),
        logits_moved_most=float(moved.max()),
        agreement=float((after.argmax(1) == before.argmax(1)).double().mean()),
        adaptation=adapted,
    )
    step: dict[str, Any] = {"step": "convert", "attention": attention, "norm": norm}
    if activation != "keep":
        step["activation"] = activation
    where = {"data": "random", "seed": 0} if random else dict(origin or {})
    model.recipe.append({**step, **where, "images": len(images), "adaptation": adaptation})
    return model


def _calibrate(model: Model, edits: list[Edit], images: Tensor) -> None:
    """Runs the images through once; each new module is set from its input just before it runs for the first time."""
    waiting = {edit.new: edit for edit in edits if edit.new is not None}

    activations = tuple(ACTIVATIONS.values())

    def set_from_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        edit = waiting.pop(module, None)
        if isinstance(module, activations):
            calibrate_activation(module, inputs[0], first=edit is not None)
        elif edit is not None and isinstance(module, L2Attention):
            edit.initialise(inputs[0])
        elif edit is not None:
            calibrate_projection(module, edit.old, inputs[0])  # type: ignore[arg-type]

    handles = [module.register_forward_pre_hook(set_from_input) for module in list(waiting)]
    try:
        _logits(model, images, batch=len(images))
    finally:
        for handle in handles:
            handle.remove()
    for edit in waiting.values():  # part of the network, but not of its forward pass
        edit.initialise()


def _sharing_weights(model: Model) -> Model:
    """The model once more, whose modules can be replaced apart from the first one's; it holds the same tensors."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


@torch.no_grad()
def _logits(model: Model, images: Tensor, batch: int = _BATCH) -> Tensor:
    """Logits in evaluation mode, float64, shape (N, classes)."""
    training = model.training
    model.eval()
    try:
        parts = [model(part.to(model.device, model.dtype)).double() for part in images.split(batch)]
    finally:
        model.train(training)
    logits = torch.cat(parts)
    if not bool(logits.isfinite().all()):
        raise ConvertError("the model's logits are not finite on these images; check the weights")
    return logits


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
