"""A denoiser in front of a network that was not trained under noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipcert.errors import InputError, first_line
from lipcert.model import Model, evaluated


class Denoised(Model):
    """A model with a denoiser in front: ``model(denoiser(images))``.

    The smoothed classifier is that of the composition, so any denoiser is safe; a good one gives large radii. Its
    weights belong to the model's weights, and so to the hash in results.

    Source: Salman, Sun, Yang, Kapoor and Kolter, "Denoised smoothing: a provable defense for pretrained classifiers",
    NeurIPS 2020.

    Args:
        model: the model; its weights are shared.
        denoiser: maps images in [0, 1] with noise to images of the same shape.
        name: the denoiser's name in the recipe.

    Raises:
        InputError: the denoiser does not return images of the model's shape.
    """

    def __init__(self, model: Model, denoiser: nn.Module, name: str | None = None):
        super().__init__(
            model.net,
            mean=model.mean.flatten().tolist(),
            std=model.std.flatten().tolist(),
            input_size=model.input_size,
            source=model.source,
            data_config=model.data_config,
            recipe=[*model.recipe, {"step": "denoise", "denoiser": name or type(denoiser).__name__}],
        )
        self.to(model.device)
        self.denoiser = evaluated(denoiser.to(model.device, model.dtype))
        grey = torch.full((1, *model.input_size), 0.5, device=model.device, dtype=model.dtype)
        try:
            with torch.no_grad():
                shape = tuple(self.denoiser(grey).shape)
        except Exception as error:  # a user's code may raise anything
            raise InputError(f"the denoiser fails on images of {model.input_size}: {first_line(error)}") from error
        if shape != tuple(grey.shape):
            raise InputError(
                f"the denoiser makes {shape} of images of shape {tuple(grey.shape)}; both must be the same"
            )

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the denoised images, shape (N, classes)."""
        return super().forward(self.denoiser(images))
