"""Surgery: modules with a Lipschitz constant, and functions that put them into a network in place of others.

Each module answers ``lipschitz(input_shape)`` with a :class:`lipcert.bounds.Bound` for one sample's input shape.
"""

from lipcert.surgery._activations import ClippedMaxMin, ClippedReLU, MaxMin, SmoothMaxMin
from lipcert.surgery._arranged import L2RotaryAttention, L2SetAttention, L2WindowAttention
from lipcert.surgery._attention import L2Attention
from lipcert.surgery._convert import ConversionReport, convert
from lipcert.surgery._linear import LipConv2d, LipLinear, Orthogonal
from lipcert.surgery._projections import (
    GroupLayerProject,
    GroupSmoothProject,
    LayerProject,
    RmsLayerProject,
    RmsSmoothProject,
    SmoothProject,
)
from lipcert.surgery._swap import Kept, Swapped, plan, swap

__all__ = [
    "ClippedMaxMin", "ClippedReLU", "ConversionReport", "GroupLayerProject",
    "GroupSmoothProject", "L2Attention", "L2RotaryAttention", "L2SetAttention", "L2WindowAttention", "LayerProject",
    "LipConv2d", "LipLinear", "MaxMin", "RmsLayerProject", "RmsSmoothProject", "SmoothMaxMin", "SmoothProject",
]  # fmt: skip
