"""Certificates: radii within which no ℓ2 perturbation of the pixels within [0, 1] changes a prediction.

A :class:`Certifier` computes the bounds of a model once and then certifies batch after batch. :func:`lipcert.certify`
creates one and applies it to images.
"""

from lipcert.bounds import MarginBounds
from lipcert.certifier._certifier import Certifier
from lipcert.certifier._local import Local
from lipcert.certifier._lofast import LoFAST
from lipcert.certifier._method import Method, Subject, duration
from lipcert.certifier._staged import CLASSES, certificate
from lipcert.certifier._triage import Triage, first_order_limit, triage
from lipcert.certifier.anchored import Anchored, DeployedAnchored
from lipcert.numerics import Certificates
from lipcert.settings import METHODS, CertifySettings, MethodFacts

__all__ = ["Certificates", "Certifier", "CertifySettings"]
