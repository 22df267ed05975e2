"""Bounds on how far a network's output can move, and the rules they are made of.

``lipschitz`` answers the global question for a whole model; ``rule`` adds an operation to the table.
"""

from lipcert._bound import Bound, Estimate, LayerBound
from lipcert.bounds import remainders as _remainders  # noqa: F401  fills the tables
from lipcert.bounds import rules as _rules  # noqa: F401
from lipcert.bounds._global import Analysis, analyze, check_weights, lipschitz
from lipcert.bounds._registry import Call, NoAnswer, kept_whole, rule, rule_for
from lipcert.bounds._value import Value

__all__ = [
    "Analysis", "Bound", "Call", "Estimate", "LayerBound", "NoAnswer", "Value",
    "analyze", "check_weights", "kept_whole", "lipschitz", "rule", "rule_for",
]  # fmt: skip
