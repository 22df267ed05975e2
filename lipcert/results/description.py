"""The description of a run: the part of its summary that is known before the first image."""

from __future__ import annotations

import math
import os
import platform
from typing import TYPE_CHECKING, Any

import timm
import torch

from lipcert.graph import ONE_LOGIT, identity_of_code
from lipcert.inputs.artifact import buffers_hash, weights_hash
from lipcert.inputs.preprocessing import preprocessing
from lipcert.model import Model
from lipcert.numerics import Bound, assumptions, environment_settings
from lipcert.results._rows import thinned
from lipcert.settings import SMOOTHING, version

if TYPE_CHECKING:
    from lipcert.certifier import Certifier
    from lipcert.inputs.data import Images
    from lipcert.smoothing import Smoothing


def describe(
    model: Model, images: Images, certifier: Certifier | Smoothing, command: str | None = None
) -> dict[str, Any]:
    """The description of a run: the part of its summary that is known before the first image."""
    spec, bound = images.spec, certifier.bound
    code_hash, logits = identity_of_code(model)
    return {
        "model": {
            "source": model.source,
            "recipe": model.recipe,
            "weights_hash": weights_hash(model),
            "buffers_hash": buffers_hash(model),
            "code_hash": code_hash,
            **({"logits": ONE_LOGIT} if certifier.notes.get("labels") == ONE_LOGIT else {}),
        },
        "example_logits": thinned(logits),
        "classes": len(logits[0]),
        **certifier.settings.described(),
        "data": {
            "spec": "bundled" if spec is None else os.path.abspath(spec) if os.path.exists(spec) else spec,
            "images": images.total,
            **({"removed": images.removed} if images.removed else {}),
            "labelled": images.labelled,
            "digest": images.digest,
            **({} if images.split is None else {"split": images.split}),
            **images.lists,
        },
        **({"class_names": {str(i): name for i, name in images.class_names.items()}} if images.class_names else {}),
        "preprocessing": preprocessing(model, files=not images.stored),
        "lipcert": version(),
        "limit": images.limit,
        "command": command,
        "bound": None if bound is None else _described(bound),
        "environment": {
            "torch": torch.__version__,
            "timm": timm.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": str(model.device),
            "settings": environment_settings(),
        },
        "assumptions": assumptions(SMOOTHING if certifier.settings.method == SMOOTHING else certifier.dtype),
    }


def _described(bound: Bound) -> dict[str, Any]:
    """A global bound with the gains of its layers."""
    return {
        "value": _finite(bound.value),
        "log10": _finite(bound.log10),
        "rigor": bound.rigor,
        "delta": bound.delta,
        "method": bound.method,
        "layers": [
            {"path": x.path, "operation": x.operation, "log10_gain": _finite(x.log10_gain)} for x in bound.layers
        ],
    }


def _finite(number: float) -> float | None:
    """The number; None for one that JSON does not have."""
    return number if math.isfinite(number) else None
