"""Certificates: which predictions no ℓ2 perturbation of the pixels up to a radius can change.

``certify`` does it for a batch of images; a :class:`Certifier` computes the bounds of a model once and then certifies
batch after batch.
"""

from lipcert._settings import METHODS, CertifySettings
from lipcert.certifier._certificates import Certificates
from lipcert.certifier._certifier import Certifier
from lipcert.certifier._certify import certifier_for, certify
from lipcert.certifier._margins import MarginBounds, bottom_logit

__all__ = [
    "METHODS",
    "Certificates",
    "Certifier",
    "CertifySettings",
    "MarginBounds",
    "bottom_logit",
    "certifier_for",
    "certify",
]
