"""Surgery: modules with a Lipschitz constant, and what puts them into a network in place of others.

Each module answers ``lipschitz(input_shape)`` with a :class:`lipcert.bounds.Bound` for one sample's input shape.
"""

from lipcert.surgery._activations import ClippedMaxMin, ClippedReLU, MaxMin
from lipcert.surgery._attention import L2Attention, L2WindowAttention
from lipcert.surgery._convert import ConversionReport, convert
from lipcert.surgery._linear import LipConv2d, LipLinear
from lipcert.surgery._projections import LayerProject, SmoothProject
from lipcert.surgery._swap import Swapped, swap

__all__ = [
    "ClippedMaxMin",
    "ClippedReLU",
    "ConversionReport",
    "L2Attention",
    "L2WindowAttention",
    "LayerProject",
    "LipConv2d",
    "LipLinear",
    "MaxMin",
    "SmoothProject",
    "Swapped",
    "convert",
    "swap",
]
