"""Captures a network as a list of operations on values that depend on the image.

``capture`` runs the module's own forward code once, on a value that is not a ``Tensor`` but implements
``__torch_function__``. It records every operation that reads a value that depends on the image. This package contains
no bounds.
"""

from lipcert.graph._capture import capture, unchecked
from lipcert.graph._constants import MADE, UNKNOWN
from lipcert.graph._graph import Emit, Graph, Node, applied, evaluate, evaluate_each, rewritten
from lipcert.graph._intact import alterations, check_torch
from lipcert.graph._operations import SIGNATURES, SYNONYMS, canonical
from lipcert.graph._stages import cuts, logits, needed, segment
from lipcert.graph._trace import ONE_LOGIT, identity_of_code, outputs_of
from lipcert.graph._witness import (
    close,
    confirm,
    examine,
    examples,
    first_run,
    reason_of_failure,
    same_logits,
    same_operations,
    without_fused_kernels,
)
