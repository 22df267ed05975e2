"""Recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lipcert._upper import Upper, root_sum_squares
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import Value
from lipcert.norms import dense_norm


@rule("lstm")
def lstm(
    call: Call,
    x: Value,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Value, Value, Value]:
    """One layer of LSTM cells, in one or both directions, from a constant start of at most |c| ≤ c₀ an entry.

    With a = W x_t + U h_{t−1} and gates i, f, o in [0, 1], c_t = f c_{t−1} + i tanh(a_g), h_t = o tanh(c_t). So |c_t| ≤
    c₀ + t, and for finite differences, entry by entry, with ¼ for the sigmoid and c̄ = c₀ + T for all t,

        |δc_t| ≤ |δc_{t−1}| + ¼ c̄ |δa_f| + ¼|δa_i| + |δa_g|,    |δh_t| ≤ |δc_t| + ¼|δa_o|.

    By Cauchy–Schwarz over the gates ‖δc_t‖ ≤ ‖δc_{t−1}‖ + κ‖δa_t‖ with κ² = c̄²/16 + 1/16 + 1, and ‖δa_t‖ ≤
    ‖W‖‖δx_t‖ + ‖U‖‖δh_{t−1}‖. This is a linear recurrence with coefficients ≥ 0 that do not depend on t: ‖δh_t‖ is at
    most a convolution of the ‖δx_t‖ with its response r to a unit impulse, so by Young's inequality the whole
    sequence has constant Σ_t r_t. Sequences of a batch share no entry, and h and c at the end are among the
    sequences. Both directions together: the root of the sum of squares.
    """
    if layers != 1 or len(x.shape) != 3:
        raise NoAnswer("more than one layer, or no batch axis")
    if training and dropout:
        raise NoAnswer("it is random, training=True")
    count = (4 if biased else 2) * (2 if bidirectional else 1)
    if len(weights) != count:
        raise NoAnswer("projections")
    steps = x.shape[1] if batch_first else x.shape[0]
    start = max((Upper(t.detach().double().abs().max().item()) for t in state), default=Upper(0))
    outer, cells = [], []
    for first in range(0, count, 4 if biased else 2):
        through_h, through_c = _responses(dense_norm(weights[first]), dense_norm(weights[first + 1]), start, steps)
        outer.append(through_h)
        cells.append(through_c)
    hidden = weights[1].shape[1]
    batch = x.shape[0] if batch_first else x.shape[1]
    ends = (len(cells), batch, hidden)
    shape = (*x.shape[:2], hidden * len(cells))
    lip = x.lip * root_sum_squares(*outer)
    return (
        Value(shape, lip, magnitude=1),
        Value(ends, lip, magnitude=1),
        Value(ends, x.lip * root_sum_squares(*cells), magnitude=start + steps),
    )


def _responses(w: Upper, u: Upper, start: Upper, steps: int) -> tuple[Upper, Upper]:
    """Σ_t of the recurrence's answers h_t and c_t to a unit impulse at t = 0."""
    kappa = root_sum_squares((start + steps) / 4, 0.25, 1)
    h, c, sum_h, sum_c = Upper(0), Upper(0), Upper(0), Upper(0)
    for t in range(steps):
        a = u * h + (w if t == 0 else 0)
        c = c + kappa * a
        h = c + a / 4
        sum_h, sum_c = sum_h + h, sum_c + c
    return sum_h, sum_c
