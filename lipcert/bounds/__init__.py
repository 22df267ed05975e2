"""Bounds on the change of a network's output, and the rules of single operations from which they are computed.

``lipschitz`` bounds the Lipschitz constant of a whole model; ``rule`` adds an operation to the registry.
"""

from lipcert.bounds import rules as _rules  # noqa: F401  fills the registry
from lipcert.bounds._arguments import arguments, by_operand
from lipcert.bounds._box import Boxes, Nominal, State, Walk, flat
from lipcert.bounds._global import (
    Analysis,
    Progress,
    analyze,
    analyze_for_training,
    check_weights,
    global_value,
    global_values,
    lipschitz,
)
from lipcert.bounds._jacobian import WINDOW, gamma, lengths, schur_bounds
from lipcert.bounds._margins import ROUND_DOWN, MarginBounds, margins, radii, row_distances
from lipcert.bounds._masked import Core
from lipcert.bounds._registry import (
    RULES,
    Call,
    Jacobian,
    NoAnswer,
    Rule,
    Schur,
    answer_of,
    box,
    coverage,
    jacobian,
    kept_whole,
    key_of,
    refusal,
    rounding,
    rule,
    rule_for,
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
from lipcert.bounds._value import COMPOSED, Dense, Value
from lipcert.bounds.forms import canonical_forms
from lipcert.numerics import Bound, Estimate, LayerBound

__all__ = [
    "COMPOSED", "ROUND_DOWN", "RULES", "Against", "Analysis", "Bound", "Boxes", "Call", "Contracted", "Core", "Dense",
    "Estimate", "Form", "Jacobian", "LayerBound", "MarginBounds", "NoAnswer", "Nominal", "Operand", "Progress",
    "Remainder", "Rule", "Schur", "State", "Value", "WINDOW", "Walk", "analyze", "analyze_for_training", "answer_of",
    "arguments", "box", "by_operand", "canonical_forms", "check_weights", "coverage",
    "each_entry", "flat", "gamma", "global_value", "global_values", "jacobian", "kept_whole", "key_of", "lengths",
    "lipschitz", "local_error", "margins", "per_image", "radii", "refusal", "remainder", "remainder_of", "rounding",
    "row_distances", "rule", "rule_for", "schur_bounds",
]  # fmt: skip
