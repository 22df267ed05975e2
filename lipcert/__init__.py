"""lipcert certifies pretrained timm image classifiers against ℓ2 perturbations.

>>> import lipcert
>>> model = lipcert.load("vit_tiny_patch16_224", pretrained=False)
>>> lipcert.convert(model, attention="l2", norm="smooth")
>>> result = lipcert.certify(model, images, labels, eps=36 / 255)
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipcert import attacks, bounds, errors, report, surgery
    from lipcert.bounds import lipschitz
    from lipcert.certvit import constrain
    from lipcert.inputs.artifact import save
    from lipcert.inputs.loading import load
    from lipcert.model import Model
    from lipcert.results import CertifiedAccuracy, certify
    from lipcert.smoothing import SmoothedClassifier
    from lipcert.surgery import convert
    from lipcert.training import finetune

    __version__: str

__all__ = [
    "CertifiedAccuracy",
    "Model",
    "SmoothedClassifier",
    "__version__",
    "attacks",
    "bounds",
    "certify",
    "constrain",
    "convert",
    "errors",
    "finetune",
    "lipschitz",
    "load",
    "report",
    "save",
    "surgery",
]

# The modules from which names are imported at first use, so that ``lipcert --help`` does not import torch and timm.
_HOMES = {
    "CertifiedAccuracy": "lipcert.results",
    "Model": "lipcert.model",
    "SmoothedClassifier": "lipcert.smoothing",
    "certify": "lipcert.results",
    "constrain": "lipcert.certvit",
    "convert": "lipcert.surgery",
    "finetune": "lipcert.training",
    "lipschitz": "lipcert.bounds",
    "load": "lipcert.smoothing",
    "save": "lipcert.inputs.artifact",
}


if not TYPE_CHECKING:  # type checkers use the imports above instead

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value: Any = importlib.import_module("lipcert.settings").version()
        elif name in _HOMES:
            importlib.import_module("lipcert.inputs.loading")  # makes models of timm's modules
            value = getattr(importlib.import_module(_HOMES[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"lipcert.{name}"):
            value = importlib.import_module(f"lipcert.{name}")
        else:
            raise AttributeError(f"module 'lipcert' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
