"""Surgery on a loaded model: replaces modules, calibrates them on images, and reports."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipcert.errors import ConvertError, InputError
from lipcert.model import Model, checked, evaluating, outside_inference_mode
from lipcert.surgery._activations import ACTIVATIONS, calibrate_activation
from lipcert.surgery._attention import L2Attention
from lipcert.surgery._initial import calibrate_projection
from lipcert.surgery._swap import Activation, Attention, Edit, Kept, Norm, Swapped, plan

_RANDOM_IMAGES = 4
_CALIBRATION_IMAGES = 16
_BATCH = 8


@dataclass(frozen=True)
class ConversionReport:
    """The report of :func:`convert`.

    Attributes:
        parameters_before, parameters_after: number of parameters.
        swapped: the replaced modules.
        kept: attention and normalisation modules that could not be replaced, each with the reason.
        images: number of images from which the following numbers were computed.
        random: whether these images were random, because none were given.
        logits_moved: median over the images of ‖logits after − before‖ / ‖logits before‖.
        logits_moved_most: the maximum of the same.
        agreement: fraction of the images whose top class did not change.
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


@outside_inference_mode
def convert(
    model: Model | nn.Module,
    attention: Attention = "l2",
    norm: Norm = "keep",
    images: Tensor | None = None,
    *,
    activation: Activation = "keep",
    origin: Mapping[str, Any] | None = None,
) -> Model:
    """Replaces modules of a model, in place, by modules with a Lipschitz constant.

    The new weights are computed in closed form from the old ones and from the modules' inputs on the images, front to
    back in one pass: see :mod:`lipcert.surgery._initial`. ``model.recipe`` gains a step and ``model.conversion`` holds
    a :class:`ConversionReport`. If an error occurs, the model does not change.

    Args:
        model: from :func:`lipcert.load`, or a timm module.
        attention: ``"l2"`` replaces dot-product attention by L2 attention if the class has such a form
            (:mod:`lipcert.surgery._table`); the report lists attention without one. ``"keep"`` keeps all attention.
        norm: ``"project"`` or ``"smooth"`` replace LayerNorm, RMSNorm and GroupNorm by projections with radii and
            weights from the images. ``"lofast"`` replaces LayerNorm and RMSNorm by the projection of that paper,
            x·min(1, R/‖x‖) with R = 1 where the next module is attention and R = √d elsewhere, without centring, weight
            and bias (:class:`lipcert.surgery.RmsLayerProject`); the network must be trained again. ``"keep"`` keeps
            them.
        images: unlabeled images in [0, 1], shape (N, C, H, W). The first 16 are used for calibration. The default is
            random images, which say little about the model on real images.
        activation: ``"clipped-relu"``, ``"maxmin"`` or ``"clipped-maxmin"`` replace every ``nn.ReLU``. Each has one
            threshold, above all its inputs on the images, so clipped ReLU changes nothing there. MaxMin is another
            function, so the network must be trained again.
        origin: the origin of the images, as JSON values, for the recipe.

    Returns:
        The model.

    Raises:
        InputError: an option is unknown, the images are not valid, or MaxMin finds no pairs of channels.
        ConvertError: the model was converted before, or its logits are not finite.
    """
    model = checked(model)
    if any(step.get("step") == "convert" for step in model.recipe):
        raise ConvertError("the model was converted before; to convert it another way, start from the original")
    random = images is None
    if images is None:
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(_RANDOM_IMAGES, *model.input_size, generator=generator)
    images = model.check_images(images)
    if not len(images):
        raise InputError("no images to calibrate on; pass at least one, or none at all for random ones")
    edits, kept = plan(model.net, attention=attention, norm=norm, activation=activation)
    if activation != "keep" and not any(isinstance(edit.new, tuple(ACTIVATIONS.values())) for edit in edits):
        raise ConvertError(
            "the network has no ReLU module, so there is nothing for activation to replace; leave it out"
        )
    with _Functional(model.net) as functional:
        before = _logits(model, images)
    if activation != "keep" and functional.calls > 0:
        warnings.warn(
            f"{functional.calls} calls of relu as a function stay: activation replaces modules; make them nn.ReLU",
            stacklevel=2,
        )
    parameters = _count(model)
    applied: list[Edit] = []
    swapped: list[Swapped] = []
    try:
        for edit in edits:
            applied.append(edit)
            swapped.append(edit.apply())
        _calibrate(model, edits, images[:_CALIBRATION_IMAGES], norm)
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
    )
    replaced = any(isinstance(edit.new, L2Attention) for edit in edits)
    step: dict[str, Any] = {"step": "convert", "attention": attention if replaced else "keep", "norm": norm}
    if activation != "keep":
        step["activation"] = activation
    where = {"data": "random", "seed": 0} if random else dict(origin or {})
    model.recipe.append({**step, **where, "images": len(images)})
    return model


class _Functional(TorchFunctionMode):
    """Counts the calls of relu in a run of a network, without those of ``nn.ReLU``."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.calls = 0
        self.hooks = [part.register_forward_hook(self._called) for part in net.modules() if type(part) is nn.ReLU]

    def _called(self, *_: Any) -> None:
        self.calls -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += getattr(func, "__name__", "") in ("relu", "relu_")
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()


def _calibrate(model: Model, edits: list[Edit], images: Tensor, norm: Norm) -> None:
    """Runs the images through the model once; each new module is set from its input just before its first run."""
    waiting = {edit.new: edit for edit in edits if edit.new is not None}
    activations = tuple(ACTIVATIONS.values())

    def set_from_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        edit = waiting.pop(module, None)
        if isinstance(module, activations):
            calibrate_activation(module, inputs[0], first=edit is not None)
        elif edit is not None and isinstance(module, L2Attention):
            edit.initialise(inputs[0])
        elif edit is not None and norm != "lofast":
            calibrate_projection(module, edit.old, inputs[0])  # type: ignore[arg-type]

    with contextlib.ExitStack() as stack:
        for module in [*waiting]:
            stack.enter_context(module.register_forward_pre_hook(set_from_input))
        _logits(model, images, batch=len(images))
    for edit in waiting.values():  # modules that the forward pass does not use
        edit.initialise()


@torch.no_grad()
def _logits(model: Model, images: Tensor, batch: int = _BATCH) -> Tensor:
    """Logits in evaluation mode, float64, shape (N, classes)."""
    with evaluating(model):
        parts = [model(part.to(model.device, model.dtype)).double() for part in images.split(batch)]
    logits = torch.cat(parts)
    if not bool(logits.isfinite().all()):
        raise ConvertError("the model's logits are not finite on these images; check the weights")
    return logits


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
