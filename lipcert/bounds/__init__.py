"""Bounds on the change of a network's output, and the rules of single operations from which they are computed.

``lipschitz`` bounds the Lipschitz constant of a whole model; ``rule`` adds an operation to the registry.
"""

from lipcert.bounds import rules as _rules  # fills the registry
from lipcert.bounds._arguments import arguments, by_operand, replayed
from lipcert.bounds._box import Boxes, Nominal, Propagation, State
from lipcert.bounds._global import (
    Analysis,
    Progress,
    analyze,
    analyze_for_training,
    check_batch,
    check_weights,
    global_value,
    global_values,
    lipschitz,
)
from lipcert.bounds._jacobian import WINDOW, absolute_products, column_sums, gamma, jacobian_of, lengths, schur_bounds
from lipcert.bounds._margins import ROUND_DOWN, MarginBounds, margins, radii, row_distances
from lipcert.bounds._masked import Core
from lipcert.bounds._registry import (
    RULES,
    Call,
    Jacobian,
    NoAnswer,
    Rule,
    Schur,
    Tag,
    answer_of,
    box,
    coverage,
    jacobian,
    kept_whole,
    key_of,
    refusal,
    rounding,
    rule,
    tagged,
)
from lipcert.bounds._remainder import (
    Against,
    Contracted,
    Form,
    Remainder,
    each_entry,
    per_image,
    remainder,
    remainder_of,
)
from lipcert.bounds._rounding import Operand, local_error
from lipcert.bounds._tokens import normalising_norm
from lipcert.bounds._value import Value
from lipcert.bounds.rules.expansions import explicit_attention, explicit_maxima
from lipcert.bounds.rules.patterns import canonical_forms
from lipcert.numerics import Bound, Estimate, LayerBound

__all__ = [
    "Bound", "Call", "Estimate", "LayerBound", "Operand", "Remainder", "Rule", "State", "Value", "box", "coverage",
    "remainder", "rounding", "rule",
]  # fmt: skip
