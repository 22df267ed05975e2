"""Recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace as Step

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._registry import Call, NoAnswer, rule
from lipcert.bounds._remainder import Against, Remainder, per_image, remainder
from lipcert.bounds._value import Value, largest
from lipcert.graph import Node
from lipcert.norms import dense_norm
from lipcert.numerics import Upper, l2_norm, root_sum_squares, sum_squares


@rule("lstm", "lstm_last_hidden")
def lstm(call: Call, x: Value, *args: object, **kwargs: object) -> Value:
    """All results, or the last one, of a layer of LSTM cells in one or both directions, from a constant |c| ≤ c₀.

    With a = W x_t + U h_{t−1} and gates i, f, o in [0, 1], c_t = f c_{t−1} + i tanh(a_g), h_t = o tanh(c_t). So |c_t| ≤
    c₀ + t, and for finite differences, entry by entry, with ¼ for the sigmoid and c̄ = c₀ + T for all t,

        |δc_t| ≤ |δc_{t−1}| + ¼ c̄ |δa_f| + ¼|δa_i| + |δa_g|,    |δh_t| ≤ |δc_t| + ¼|δa_o|.

    By Cauchy–Schwarz over the gates ‖δc_t‖ ≤ ‖δc_{t−1}‖ + κ‖δa_t‖ with κ² = c̄²/16 + 1/16 + 1, and ‖δa_t‖ ≤
    ‖W‖‖δx_t‖ + ‖U‖‖δh_{t−1}‖. This is a linear recurrence with coefficients ≥ 0 that do not depend on t: ‖δh_t‖ is at
    most a convolution of the ‖δx_t‖ with the response r to a unit impulse, so by Young's inequality the whole sequence
    has constant Σ_t r_t. Sequences of a batch share no entry. The last h and c are entries of the sequences. For both
    directions the constant is the root of the sum of squares.
    """
    answers, _ = _layer(x, *args, **kwargs)  # type: ignore[arg-type]
    return Value(call.shape, x.lip * root_sum_squares(*(of_h for of_h, _ in answers)), magnitude=1)


@rule("lstm_last_cell")
def lstm_cell(call: Call, x: Value, *args: object, **kwargs: object) -> Value:
    """The last cell states; see :func:`lstm` for the proof."""
    answers, magnitude = _layer(x, *args, **kwargs)  # type: ignore[arg-type]
    return Value(call.shape, x.lip * root_sum_squares(*(of_c for _, of_c in answers)), magnitude=magnitude)


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
    """The constants of h and c in each direction, and a bound on the entries of c."""
    if training and dropout:
        raise NoAnswer("it is random, training=True")
    steps = x.shape[1] if batch_first else x.shape[0]
    start = max((largest(tensor) for tensor in state), default=Upper(0))
    directions = directions_of(x.shape, weights, biased, layers, bidirectional)
    return [_responses(dense_norm(w), dense_norm(u), start, steps) for w, u, *_ in directions], start + steps


def directions_of(
    shape: tuple[int, ...], weights: Sequence[Tensor], biased: bool, layers: int, bidirectional: bool
) -> list[Sequence[Tensor]]:
    """The weights of each direction."""
    count, directions = 4 if biased else 2, 2 if bidirectional else 1
    if layers != 1 or len(shape) != 3:
        raise NoAnswer("more than one layer, or no batch axis")
    if len(weights) != count * directions:
        raise NoAnswer("projections")
    return [weights[first : first + count] for first in range(0, len(weights), count)]


def _responses(w: Upper, u: Upper, start: Upper, steps: int) -> tuple[Upper, Upper]:
    """The sums over t of the responses h_t and c_t of the recurrence to a unit impulse at t = 0."""
    kappa = root_sum_squares((start + steps) / 4, 0.25, 1)
    h, c, sum_h, sum_c = Upper(0), Upper(0), Upper(0), Upper(0)
    for t in range(steps):
        a = u * h + (w if t == 0 else 0)
        c = c + kappa * a
        h = c + a / 4
        sum_h, sum_c = sum_h + h, sum_c + c
    return sum_h, sum_c


_SIGMOID, _TANH = 0.096226, 0.769801  # sup |second derivative|, rounded up


# The largest entries of nominal values of one step, each of shape (N,): the gates i, f, o; |tanh a_g|, |c_{t−1}| and
# |tanh c_t| as g, c, tanh; the derivatives of the gates, of tanh at a_g, and of tanh at c_t as slope_i, slope_f,
# slope_o, slope_g, slope_c; kappa = √((c_{t−1} f')² + (i g')² + (g i')²), where primes denote these derivatives;
# result = o tanh'(c_t); gate = |tanh c_t| o'.
_NAMES = (
    "i", "f", "o", "g", "c", "tanh", "slope_i", "slope_f", "slope_o", "slope_g", "slope_c", "kappa", "result", "gate",
)  # fmt: skip


@remainder("lstm", "lstm_last_hidden", "lstm_last_cell")
class Recurrence(Remainder):
    """One layer of LSTM cells, as in :func:`lstm`: bounds on the second-order terms through the recurrence.

    Norms of step t are over all entries. σ₂ and τ₂ are the suprema of the second derivatives of sigmoid and tanh. A
    prime marks a perturbed value. First, the deviations: with ‖δa_t‖ ≤ ‖W‖‖δx_t‖ + ‖U‖‖δh_{t−1}‖,

        δc_t = f′ δc_{t−1} + c_{t−1} δf + i′ δg + g δi,    δh_t = o′ δ(tanh c_t) + tanh(c_t) δo,

    where p ≥ ‖δa_t‖ makes f′ ≤ min(1, f + p/4) and |δf| ≤ min(¼, σ'(a_f) + σ₂p)|δa_f|, and so on. Taking ‖δx_t‖ ≤ ρ at
    every t gives such p. The recurrence with these coefficients is linear. Its responses A_ts, C_ts to an impulse at s
    give ‖δa_t‖ ≤ ρ α_t with α_t² = Σ_s A_ts², and ‖δc_t‖ ≤ ρ γ_t likewise (Cauchy–Schwarz).

    Second, the remainders ε of the values. ε of a_t is Uε(h_{t−1}), and

        ε(c_t) = f ε(c_{t−1}) + c_{t−1}(σ' ε(a_f) + r_f) + i(τ' ε(a_g) + r_g) + g(σ' ε(a_i) + r_i)
                 + δf δc_{t−1} + δi δg,
        ε(h_t) = o(τ' ε(c_t) + r_c) + tanh(c_t)(σ' ε(a_o) + r_o) + δo δ(tanh c_t),

    with Taylor remainders |r_f| ≤ ½σ₂δa_f², |r_g| ≤ ½τ₂δa_g², .... As ‖u∘v‖ ≤ ‖u‖‖v‖ and the four gates share
    ‖δa_t‖², the terms without ε are in c_t at most (max(½σ₂|c_{t−1}|, max(½τ₂ i, ½σ₂|g|) + ⅛) α_t² + ¼ α_t γ_{t−1}) ρ²,
    and in h_t at most (½τ₂ o γ_t² + ½σ₂|tanh c_t| α_t² + ¼ α_t γ_t) ρ². Those with ε are a linear recurrence with
    nominal coefficients. ‖R‖² is the sum of ‖ε(h_t)‖² over t and both directions, and −⟨g, R⟩ ≤ ‖g‖‖R‖.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        args = arguments(node)
        if len(operands) != 1 or args["input"] is not node.operands[0]:
            raise NoAnswer("a state or weights that depend on the image")
        directions = directions_of(
            node.operands[0].shape, args["params"], args["has_biases"], args["num_layers"], args["bidirectional"]
        )
        x = operands[0].movedim(2, 0) if args["batch_first"] else operands[0].movedim(1, 0)  # (T, N, batch, channels)
        self.op = node.op
        self.norms = [tuple(float(dense_norm(weight)) for weight in direction[:2]) for direction in directions]
        self.steps = [
            _run(x.flip(0) if index else x, direction, args["hx"][0][index], args["hx"][1][index])
            for index, direction in enumerate(directions)
        ]

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        total = torch.zeros_like(rho[0])
        for (w, u), steps in zip(self.norms, self.steps, strict=True):
            peaks = _peaks(steps, w, u, rho[0])
            hidden, cell = _remainder_factors(steps, u, *_moved(steps, peaks, w, u))
            last = {"lstm_last_hidden": hidden[-1].square(), "lstm_last_cell": cell.square()}
            total = total + last.get(str(self.op), sum_squares(hidden, 0))
        return total.sqrt() * rho[0] ** 2

    def against(self, direction: Tensor) -> Against:
        size = l2_norm(per_image(direction), 1)
        return lambda rho: size * self.norm(rho)


def _run(x: Tensor, direction: Sequence[Tensor], h: Tensor, c: Tensor) -> list[Step]:
    """The steps of one direction at the nominal point."""
    weights = [tensor.detach().double() for tensor in direction]
    h, c = (tensor.detach().double().expand(x.shape[1], *tensor.shape) for tensor in (h, c))
    steps = []
    for entry in x.double():
        a = F.linear(entry, weights[0], *weights[2:3]) + F.linear(h, weights[1], *weights[3:4])
        i, f, g, o = a.chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        slope_i, slope_f, slope_o, slope_g = i * (1 - i), f * (1 - f), o * (1 - o), 1 - g**2
        before, c = c, f * c + i * g
        tanh = c.tanh()
        slope_c = 1 - tanh**2
        h = o * tanh
        kappa = l2_norm(torch.stack([before * slope_f, i * slope_g, g * slope_i]), 0)
        factors = (i, f, o, g, before, tanh, slope_i, slope_f, slope_o, slope_g, slope_c)
        sizes = (per_image(value).abs().amax(1) for value in (*factors, kappa, o * slope_c, tanh * slope_o))
        steps.append(Step(**dict(zip(_NAMES, sizes, strict=True))))
    return steps


def _advance(step: Step, alpha: Tensor, cell: Tensor, peak: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """‖δc_t‖, and ‖δh_t‖ given a bound on ‖δc_t‖, for ‖δa_t‖ ≤ alpha, ‖δc_{t−1}‖ ≤ cell and |δa_t| ≤ peak."""

    def reach(value: Tensor, curvature: float, most: float) -> Tensor:
        return (value + curvature * peak).clamp_max(most)

    slopes = [reach(getattr(step, f"slope_{gate}"), _SIGMOID, 0.25) for gate in "ifo"]
    coefficients = (
        step.c * slopes[1],
        reach(step.i, 0.25, 1.0) * reach(step.slope_g, _TANH, 1.0),
        step.g * slopes[0],
    )
    moved = reach(step.f, 0.25, 1.0) * cell + l2_norm(torch.stack(coefficients), 0) * alpha

    def hidden(cell_peak: Tensor) -> Tensor:
        slope = (step.slope_c + _TANH * cell_peak).clamp_max(1.0)
        return reach(step.o, 0.25, 1.0) * slope * moved + step.tanh * slopes[2] * alpha

    return moved, hidden


def _peaks(steps: list[Step], w: float, u: float, rho: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Bounds on ‖δa_t‖ and ‖δc_t‖ for each t, if every input deviates by ρ."""
    peaks = []
    cell = hidden = torch.zeros_like(rho)
    for step in steps:
        alpha = w * rho + u * hidden
        cell, result = _advance(step, alpha, cell, alpha)
        hidden = result(cell)
        peaks.append((alpha, cell))
    return peaks


def _moved(
    steps: list[Step], peaks: list[tuple[Tensor, Tensor]], w: float, u: float
) -> tuple[list[Tensor], list[Tensor]]:
    """The α_t and γ_t; the first axis holds the impulses at all times s."""
    alphas, gammas = [], []
    cell = hidden = peaks[0][0].new_zeros(len(steps), len(peaks[0][0]))
    for t, (step, (peak, cell_peak)) in enumerate(zip(steps, peaks, strict=True)):
        alpha = u * hidden
        # The impulse at time s = t enters through W.
        alpha[t] += w
        cell, result = _advance(step, alpha, cell, peak)
        hidden = result(cell_peak)
        alphas.append(l2_norm(alpha, 0))
        gammas.append(l2_norm(cell, 0))
    return alphas, gammas


def _remainder_factors(
    steps: list[Step], u: float, alphas: list[Tensor], gammas: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Bounds on ‖ε(h_t)‖/ρ² for all t, shape (T, N), and on ‖ε(c_T)‖/ρ², shape (N,)."""
    factors = []
    cell = hidden = before = torch.zeros_like(alphas[0])
    for step, alpha, gamma in zip(steps, alphas, gammas, strict=True):
        curved = torch.maximum(_SIGMOID / 2 * step.c, torch.maximum(_TANH / 2 * step.i, _SIGMOID / 2 * step.g) + 0.125)
        cell = step.f * cell + step.kappa * u * hidden + curved * alpha**2 + alpha * before / 4
        source = _TANH / 2 * step.o * gamma**2 + _SIGMOID / 2 * step.tanh * alpha**2 + alpha * gamma / 4
        hidden = step.result * cell + step.gate * u * hidden + source
        before = gamma
        factors.append(hidden)
    return torch.stack(factors), cell
