"""lipcert certifies pretrained timm image classifiers against ℓ2 perturbations.

>>> import lipcert
>>> model = lipcert.load("vit_tiny_patch16_224", pretrained=False)
>>> lipcert.convert(model, attention="l2", norm="smooth")
>>> result = lipcert.certify(model, images, labels, eps=36 / 255)
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipcert import attacks, bounds, errors, report, surgery
    from lipcert.artifact import save
    from lipcert.bounds import lipschitz
    from lipcert.certvit import constrain
    from lipcert.loading import load
    from lipcert.model import Model
    from lipcert.results import certify
    from lipcert.surgery import convert
    from lipcert.training import finetune

    __version__: str

__all__ = [
    "Model",
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
    "Model": "lipcert.model",
    "certify": "lipcert.results",
    "constrain": "lipcert.certvit",
    "convert": "lipcert.surgery",
    "finetune": "lipcert.training",
    "lipschitz": "lipcert.bounds",
    "load": "lipcert.loading",
    "save": "lipcert.artifact",
}


if not TYPE_CHECKING:  # type checkers use the imports above instead

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            found: Any = importlib.import_module("lipcert._version").version()
        elif name in _HOMES:
            importlib.import_module("lipcert.loading")  # makes models of timm's modules
            found = getattr(importlib.import_module(_HOMES[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"lipcert.{name}"):
            found = importlib.import_module(f"lipcert.{name}")
        else:
            raise AttributeError(f"module 'lipcert' has no attribute {name!r}")
        globals()[name] = found
        return found


class _AfterTimm:
    """Adds the architectures of ``lipcert.networks`` to timm's registry as soon as timm is imported by any code."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "timm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        run = loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            importlib.import_module("lipcert.networks")

        loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


if "timm" in sys.modules:
    importlib.import_module("lipcert.networks")
else:
    sys.meta_path.insert(0, _AfterTimm())


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
