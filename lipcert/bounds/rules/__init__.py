"""The rules, by kind of operation. Importing a module here fills the table."""

from lipcert.bounds.rules import (
    activation,
    arithmetic,
    attention,
    contraction,
    linear,
    normalization,
    pooling,
    powers,
    recurrent,
    resampling,
    structure,
    surgery,
)

__all__ = [
    "activation", "arithmetic", "attention", "contraction", "linear", "normalization", "pooling", "powers",
    "recurrent", "resampling", "structure", "surgery",
]  # fmt: skip
