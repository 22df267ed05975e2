"""lipcert certifies pretrained timm image classifiers against ℓ2 perturbations.

>>> import lipcert
>>> model = lipcert.load("vit_tiny_patch16_224", pretrained=False)
>>> lipcert.convert(model, attention="l2", norm="smooth")
>>> result = lipcert.certify(model, images, labels, eps=36 / 255)
"""

from lipcert import attacks, bounds, errors, surgery
from lipcert._version import version
from lipcert.artifact import save
from lipcert.bounds import lipschitz
from lipcert.certifier import certify
from lipcert.certvit import constrain
from lipcert.loading import load
from lipcert.model import Model
from lipcert.surgery import convert
from lipcert.training import finetune

__version__ = version()
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
    "save",
    "surgery",
]
