"""A denoiser in front of a network that was not trained under noise."""

from __future__ import annotations

import difflib

import torch
from torch import Tensor, nn

from lipcert.denoisers._dct import DCT
from lipcert.denoisers._denoiser import Denoiser
from lipcert.denoisers._natural import Natural
from lipcert.errors import InputError, first_line
from lipcert.model import Model, evaluated

_NAMED: dict[str, type[DCT] | type[Natural]] = {kind.name: kind for kind in (DCT, Natural)}
NAMES = tuple(_NAMED)


def denoiser_named(name: str, input_size: tuple[int, ...]) -> Denoiser:
    """The denoiser ``dct`` or ``natural``, for images of a size (C, H, W)."""
    if name not in _NAMED:
        close = difflib.get_close_matches(name, NAMES, 1)
        hint = f"did you mean {close[0]}? There are" if close else "choose one of"
        raise InputError(f"there is no denoiser {name!r}; {hint} {', '.join(NAMES)}, or give MODULE:NAME of your own")
    return _NAMED[name](input_size)


class Denoised(Model):
    """A model with a denoiser in front: ``model(denoiser(images))``.

    The smoothed classifier is that of the composition, so any denoiser is safe; a good one gives large radii. Its
    weights belong to the model's weights, and so to the hash in results.

    Source: Salman, Sun, Yang, Kapoor and Kolter, "Denoised smoothing: a provable defense for pretrained classifiers",
    NeurIPS 2020.

    Args:
        model: the model; its weights are shared.
        denoiser: maps images in [0, 1] with noise to images of the same shape; or its name: ``"dct"``, which needs no
            weights, or ``"natural"``, a small network for natural images.
        name: the denoiser's name in the recipe.

    Raises:
        InputError: there is no denoiser of this name, it does not return images of the model's shape, or the model
            has one already.
    """

    def __init__(self, model: Model, denoiser: nn.Module | str, name: str | None = None):
        if isinstance(model, Denoised):
            raise InputError("the model has a denoiser in front already; leave out the second one")
        if isinstance(denoiser, str):
            name, denoiser = denoiser, denoiser_named(denoiser, model.input_size)
        super().__init__(
            model.net,
            mean=model.mean.flatten().tolist(),
            std=model.std.flatten().tolist(),
            input_size=model.input_size,
            source=model.source,
            data_config=model.data_config,
            class_names=model.class_names,
            recipe=[*model.recipe, {"step": "denoise", "denoiser": name or type(denoiser).__name__}],
        )
        self.to(model.device)
        self.sigma = model.sigma
        self.denoiser = evaluated(denoiser.to(model.device, model.dtype))
        if isinstance(denoiser, Denoiser):  # it has checked the size
            return
        grey = torch.full((1, *model.input_size), 0.5, device=model.device, dtype=model.dtype)
        try:
            with torch.no_grad():
                shape = tuple(self.denoiser(grey).shape)
        except Exception as error:  # a user's code may raise anything
            raise InputError(f"the denoiser fails on images of {model.input_size}: {first_line(error)}") from error
        if shape != tuple(grey.shape):
            raise InputError(
                f"the denoiser returns shape {shape} for images of shape {tuple(grey.shape)}; both must be the same"
            )

    def tell(self, sigma: float) -> None:
        """Tells the denoiser the standard deviation of the noise, if it is one that needs it."""
        if isinstance(self.denoiser, Denoiser):
            self.denoiser.sigma = sigma

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the denoised images, shape (N, classes)."""
        return super().forward(self.denoiser(images))


def check_noise(model: Model) -> None:
    """Refuses a denoiser that needs to know the noise where there is none."""
    if isinstance(model, Denoised) and isinstance(model.denoiser, Denoiser):
        raise InputError("this denoiser is for noise of a known sigma; use it with --method smoothing")


def is_named(model: Model) -> bool:
    """Whether a model's denoiser is one that comes with lipcert, which its name in the recipe rebuilds."""
    names = [step["denoiser"] for step in model.recipe if step["step"] == "denoise"]
    return isinstance(model, Denoised) and len(names) == 1 and type(model.denoiser) is _NAMED.get(names[0])
