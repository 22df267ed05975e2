"""Randomized smoothing: certificates for the classifier obtained from any network by Gaussian noise.

The certified function is g(x) = the class that the network gives most often at x + N(0, σ²I), not the network itself. A
certificate is wrong with probability at most α for each image, over the draws of the noise.
"""

from lipcert.denoisers import Denoised
from lipcert.smoothing._binomial import clopper_pearson, robbins
from lipcert.smoothing._certificates import SmoothedCertificates
from lipcert.smoothing._choice import CHOOSING, DRAWS, LEAST, SigmaChoice, choose_sigma
from lipcert.smoothing._classifier import SmoothedClassifier, load
from lipcert.smoothing._lattice import from_lattice, to_lattice
from lipcert.smoothing._noise import noise
from lipcert.smoothing._normal import quantile, radius
from lipcert.smoothing._smoothing import Smoothing
from lipcert.smoothing._votes import SELECTION

__all__ = [
    "SigmaChoice",
    "SmoothedCertificates",
    "Smoothing",
    "choose_sigma",
    "clopper_pearson",
    "from_lattice",
    "noise",
    "robbins",
    "to_lattice",
]
