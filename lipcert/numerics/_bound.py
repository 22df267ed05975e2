"""Results about a Lipschitz constant: a :class:`Bound` is certified, an :class:`Estimate` may be too small.

They are different types on purpose. Nothing that prints the word "certified" accepts an :class:`Estimate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from html import escape
from typing import Literal, cast

from lipcert.numerics._upper import Upper

Rigor = Literal["deterministic", "probabilistic"]


@dataclass(frozen=True)
class LayerBound:
    """One line of the Lipschitz budget.

    Attributes:
        path: dotted module path ("" for the model itself).
        operation: the operation's name, such as ``linear`` or ``L2Attention``; ``conv2d + batch_norm`` for operations
            that are bounded as one.
        log10_gain: log10 of the largest factor by which the operation can enlarge a perturbation of its input; -inf for
            a constant.
        log10_reach: log10 of the largest factor by which a perturbation of the pixels can have grown at its output.
        method: how the gain was computed.
    """

    path: str
    operation: str
    log10_gain: float
    log10_reach: float
    method: str


@dataclass(frozen=True, repr=False)
class Bound:
    """An upper bound on a Lipschitz constant in ℓ2, rounding included.

    A Lipschitz constant of f is an L with ‖f(x + z) − f(x)‖ ≤ L ‖z‖ for all x and z (Gupta and Verma 2023, equation 1
    and definition 1; Hu et al. 2023, definition 2; Huang et al. 2021, definition 1).

    Attributes:
        value: the bound, rounded up to float64; ``inf`` if it overflows float64 (see ``log10``).
        rigor: ``deterministic``, or ``probabilistic`` with failure probability ``delta``.
        method: how it was computed.
        reference: paper and theorem, or the place of the proof.
        delta: probability that the bound is too small, over lipcert's own random start vectors; 0 if deterministic.
        log10: decimal logarithm of the bound, also if ``value`` overflows.
        layers: for bounds of whole models, the operations on the path from pixels to logits that determines the bound,
            in order; their gains multiply to the bound.
    """

    value: float
    rigor: Rigor
    method: str
    reference: str = ""
    delta: float = 0.0
    log10: float = field(default=math.nan)
    layers: tuple[LayerBound, ...] = ()

    def __post_init__(self) -> None:
        if math.isnan(self.value) or self.value < 0:
            raise ValueError(f"a bound must be a number ≥ 0, got {self.value}")
        if (self.rigor == "deterministic") != (self.delta == 0.0):
            raise ValueError("a probabilistic bound states delta > 0, a deterministic one has delta = 0")
        if math.isnan(self.log10):
            object.__setattr__(self, "log10", math.log10(self.value) if self.value > 0 else -math.inf)

    def __repr__(self) -> str:
        """Three lines: the number, the method, and the layers with the largest gains; ``layers`` has the rest."""
        if self.log10 < 6:
            value = f"{Context(prec=6, rounding=ROUND_CEILING).create_decimal(Decimal(self.value)):g}"
        else:
            value = f"10^{math.ceil(100 * self.log10) / 100:.2f}" if self.finite else "infinity"
        delta = f" with failure probability {self.delta:g}" if self.delta else ""
        lines = [f"Bound: Lipschitz constant at most {value}, {self.rigor}{delta}", f"  by {self.method}"]
        if self.layers:
            worst = sorted(self.layers, key=lambda layer: -layer.log10_gain)[:3]
            named = ", ".join(f"{layer.path} (10^{layer.log10_gain:.2f})" for layer in worst)
            lines.append(f"  most by {named}; {len(self.layers)} operations in .layers")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The bound for notebooks, with a table of the gains."""
        rows = "".join(
            f"<tr><td>{escape(layer.path)}</td><td>{escape(layer.operation)}</td><td>10^{layer.log10_gain:.3f}</td></tr>"
            for layer in self.layers
        )
        head = "<tr><th>module</th><th>operation</th><th>gain</th></tr>"
        return f"<pre>{escape(repr(self))}</pre>" + (f"<table>{head}{rows}</table>" if rows else "")

    @classmethod
    def deterministic(
        cls, value: Upper | float, method: str, reference: str = "", layers: tuple[LayerBound, ...] = ()
    ) -> Bound:
        """A deterministic bound; ``value`` is rounded up to float64.

        In training, where ``value`` is an estimate, the result is an :class:`Estimate` with its gradient.
        """
        upper = Upper(value)
        if type(upper) is not Upper:
            return cast(Bound, Estimate(cast(float, upper), method))
        return cls(float(upper), "deterministic", method, reference, log10=upper.log10, layers=layers)

    @property
    def finite(self) -> bool:
        """Whether the bound is finite, even if it overflows float64."""
        return self.log10 < math.inf


@dataclass(frozen=True)
class Estimate:
    """A number that approximates a Lipschitz constant and may lie below it. Never certified.

    Attributes:
        value: the estimate.
        method: how it was computed, such as ``power iteration, 20 steps``.
    """

    value: float
    method: str
    rigor: Literal["estimate"] = "estimate"
