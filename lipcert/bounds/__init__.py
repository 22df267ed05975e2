"""Bounds on how far a network's output can move, and the rules they are made of.

``lipschitz`` answers the global question for a whole model; ``rule`` adds an operation to the table.
"""

from lipcert._bound import Bound, Estimate, LayerBound
from lipcert.bounds import remainders as _remainders  # noqa: F401  fills the tables
from lipcert.bounds import rules as _rules  # noqa: F401
from lipcert.bounds._arguments import arguments, by_operand
from lipcert.bounds._global import Analysis, analyze, check_weights, lipschitz
from lipcert.bounds._registry import Call, NoAnswer, kept_whole, key_of, rule, rule_for
from lipcert.bounds._remainder import REMAINDERS, Against, Remainder, per_image, quadratic, remainder_of, total
from lipcert.bounds._value import COMPOSED, Dense, Value

__all__ = [
    "COMPOSED", "REMAINDERS", "Against", "Analysis", "Bound", "Call", "Dense", "Estimate", "LayerBound",
    "NoAnswer", "Remainder", "Value", "analyze", "arguments", "by_operand", "check_weights", "kept_whole",
    "key_of", "lipschitz", "per_image", "quadratic", "remainder_of", "rule", "rule_for", "total",
]  # fmt: skip
