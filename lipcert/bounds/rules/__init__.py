"""All that is known of operations, one file a family. Importing a module here fills the registry."""

from lipcert.bounds.rules import (
    activation,
    arithmetic,
    attention,
    convolution,
    linear,
    normalization,
    pooling,
    powers,
    projections,
    recurrent,
    reductions,
    resampling,
    structure,
    surgery,
)

__all__ = [
    "activation",
    "arithmetic",
    "attention",
    "convolution",
    "linear",
    "normalization",
    "pooling",
    "powers",
    "projections",
    "recurrent",
    "reductions",
    "resampling",
    "structure",
    "surgery",
]
