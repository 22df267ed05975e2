"""The rules of all operations, one file per family. Importing a module registers its rules."""

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
