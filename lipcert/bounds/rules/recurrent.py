"""Recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lipcert._upper import Upper, root_sum_squares
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._value import Value, largest
from lipcert.norms import dense_norm


@rule("lstm", "lstm_last_hidden")
def lstm(call: Call, x: Value, *args: object, **kwargs: object) -> Value:
    """The results of one layer of LSTM cells, in one or both directions, from a constant start |c| ≤ c₀; or the last.

    With a = W x_t + U h_{t−1} and gates i, f, o in [0, 1], c_t = f c_{t−1} + i tanh(a_g), h_t = o tanh(c_t). So |c_t| ≤
    c₀ + t, and for finite differences, entry by entry, with ¼ for the sigmoid and c̄ = c₀ + T for all t,

        |δc_t| ≤ |δc_{t−1}| + ¼ c̄ |δa_f| + ¼|δa_i| + |δa_g|,    |δh_t| ≤ |δc_t| + ¼|δa_o|.

    By Cauchy–Schwarz over the gates ‖δc_t‖ ≤ ‖δc_{t−1}‖ + κ‖δa_t‖ with κ² = c̄²/16 + 1/16 + 1, and ‖δa_t‖ ≤
    ‖W‖‖δx_t‖ + ‖U‖‖δh_{t−1}‖. This is a linear recurrence with coefficients ≥ 0 that do not depend on t: ‖δh_t‖ is at
    most a convolution of the ‖δx_t‖ with its response r to a unit impulse, so by Young's inequality the whole
    sequence has constant Σ_t r_t. Sequences of a batch share no entry, and h and c at the end are among the
    sequences. Both directions together: the root of the sum of squares.
    """
    answers, _ = _layer(x, *args, **kwargs)  # type: ignore[arg-type]
    return Value(call.shape, x.lip * root_sum_squares(*(through_h for through_h, _ in answers)), magnitude=1)


@rule("lstm_last_cell")
def lstm_cell(call: Call, x: Value, *args: object, **kwargs: object) -> Value:
    """The last cells, which the proof above bounds too."""
    answers, magnitude = _layer(x, *args, **kwargs)  # type: ignore[arg-type]
    return Value(call.shape, x.lip * root_sum_squares(*(through_c for _, through_c in answers)), magnitude=magnitude)


def _layer(
    x: Value,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[list[tuple[Upper, Upper]], Upper]:
    """The constants of the results and of the cells in each direction, and the largest entry of a cell."""
    if training and dropout:
        raise NoAnswer("it is random, training=True")
    steps = x.shape[1] if batch_first else x.shape[0]
    start = max((largest(tensor) for tensor in state), default=Upper(0))
    ways = ways_of(x.shape, weights, biased, layers, bidirectional)
    return [_responses(dense_norm(way[0]), dense_norm(way[1]), start, steps) for way in ways], start + steps


def ways_of(
    shape: tuple[int, ...], weights: Sequence[Tensor], biased: bool, layers: int, bidirectional: bool
) -> list[Sequence[Tensor]]:
    """The weights of each direction.

    Raises:
        NoAnswer: anything but one layer, without projections, on a batch.
    """
    each, ways = 4 if biased else 2, 2 if bidirectional else 1
    if layers != 1 or len(shape) != 3:
        raise NoAnswer("more than one layer, or no batch axis")
    if len(weights) != each * ways:
        raise NoAnswer("projections")
    return [weights[first : first + each] for first in range(0, len(weights), each)]


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
