"""Chooses the recipe of a network, and adapts it to its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

from lipcert.bounds import lipschitz
from lipcert.denoisers import Denoised
from lipcert.errors import UnsupportedOperation
from lipcert.model import Model
from lipcert.networks import lip_convnet
from lipcert.settings import LOOSE, RECIPES, FinetuneSettings, recipe_settings, settings_of
from lipcert.surgery import ClippedMaxMin, ClippedReLU, LayerProject, SmoothProject
from lipcert.training._matrices import matrices, projections


def denoised(model: Model, asked: FinetuneSettings) -> Model:
    """The model after the denoiser of its training, if there is one."""
    if asked.denoiser is None:
        return model
    smoothed = Denoised(model, asked.denoiser)
    smoothed.tell(cast(float, asked.sigma))
    return smoothed


def recipe_for(model: Model) -> tuple[str, str]:
    """The recipe that suits a network, and why."""
    kinds = {type(module) for module in model.modules()}
    if any(kind.__module__ == lip_convnet.__name__ for kind in kinds) or kinds & {ClippedReLU, ClippedMaxMin}:
        return "cnn", "a plain network with thresholds"
    try:
        log10 = lipschitz(model).log10
    except UnsupportedOperation:
        log10 = math.inf
    if any(issubclass(kind, (SmoothProject, LayerProject)) for kind in kinds):
        return "vit", "LayerNorm has been replaced by projections"
    if log10 > LOOSE:
        size = "infinite" if log10 == math.inf else f"about 10^{log10:.0f}"
        return "noise", f"its Lipschitz bound is {size}, too large to be trained down"
    return "liresnet", f"its Lipschitz bound of 10^{log10:.1f} can be trained down"


def settings_for(model: Model, recipe: str | None, asked: Mapping[str, Any]) -> FinetuneSettings:
    """The settings of a recipe, without limits on norms that match no layer; given settings replace them."""
    if recipe is None:
        return settings_of(FinetuneSettings, **asked)
    chosen = recipe_settings(recipe, asked)
    own = RECIPES[recipe].settings.get("max_norm")
    if own is not None and "max_norm" not in asked:
        paths = [matrix.path for matrix in matrices(model)] + [path for path, _ in projections(model)]
        chosen["max_norm"] = {
            pattern: norm for pattern, norm in own.items() if any(fnmatchcase(path, pattern) for path in paths)
        }
    return settings_of(FinetuneSettings, **chosen)
