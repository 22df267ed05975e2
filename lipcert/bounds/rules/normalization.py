"""Normalisations: by fixed statistics (linear), and by statistics of the value (slope at most 1/√eps)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._box import Propagation, State, scaled
from lipcert.bounds._jacobian import evenly
from lipcert.bounds._registry import Call, NoAnswer, Schur, box, rounding, rule
from lipcert.bounds._rounding import Operand, size_and_cast
from lipcert.bounds._tokens import Arrangement, Tokens, along, normalises, of_groups, over_last, tokens_of
from lipcert.bounds._value import Scale, Value, largest
from lipcert.bounds.rules.arithmetic import _shifted, _times
from lipcert.graph import Node
from lipcert.norms import COMPOSED
from lipcert.numerics import EXTRA, INFINITE, Format, Upper, detached, l2_norm, sum_squares


def _by_fixed_statistics(node: Node) -> bool:
    if arguments(node).get("training", False):
        raise NoAnswer("normalises by the image's own statistics")
    return True


@rule("batch_norm", linear=_by_fixed_statistics, schur=Schur(terms=evenly(lambda node: 1)))
def batch_norm(
    call: Call,
    x: Value,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Value:
    """In evaluation mode a scale γ/√(var + eps) per channel, folded into the convolution before it."""
    if training or running_mean is None or running_var is None:
        raise NoAnswer("batch statistics: one image's result would depend on the others")
    variance = running_var.detach().double() + eps
    if not bool((variance >= 0).all()):
        raise NoAnswer("a negative variance")
    scale = variance.rsqrt()
    if weight is not None:
        scale = scale * detached(weight).double()
    moved = running_mean.detach().double() * scale
    shift = moved.abs()
    if bias is not None:  # the two may cancel, so the rounding error is relative to their absolute values
        shift = (detached(bias).double() - moved).abs() + (detached(bias).double().abs() + shift) * 2.0**-49
    channels = (1, -1, *[1] * (len(x.shape) - 2))
    return _shifted(call, _times(call, x, scale.reshape(channels)), shift.reshape(channels) * COMPOSED)


@box("batch_norm")
def batch_norm_box(propagation: Propagation, node: Node, x: State) -> State:
    """In evaluation mode a scale per channel, with rounding errors relative to x·scale and to the shift."""
    args = arguments(node)
    scale = (args["running_var"].double() + args.get("eps", 1e-5)).rsqrt()
    if args.get("weight") is not None:
        scale = scale * args["weight"].detach().double()
    scale = scale.reshape(1, 1, -1, *[1] * (x.value.dim() - 3))
    shift = args["running_mean"].double().reshape(scale.shape) * scale
    state = scaled(propagation, node, x, scale)
    slack = shift.abs() * 2.0**-48
    return propagation.result(node, state.up, state.down, factors=state.factors, rounding=slack.expand_as(x.value))


@rounding("batch_norm")
def batch_norm_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`normalised_rounding` by constants, whose casts count; var + eps has a relative error of t before its root.

    A negative variance makes the sum with eps smaller than its terms.
    """
    args = arguments(node)
    x = operands[0]
    form = (-1, *[1] * (x.nominal.dim() - 3))
    mean, var = (args[name].detach().double().reshape(form) for name in ("running_mean", "running_var"))
    d_mean, d_var = (fmt.cast(args[name]).reshape(form) for name in ("running_mean", "running_var"))
    eps = float(args.get("eps", 1e-5))
    t = (d_var + fmt.cast(eps).item() + fmt.unit * (var.abs() + d_var) + 4 * fmt.smallest) / (var + eps)
    t = inverse_root_error(torch.where(var + eps > 0, t, math.inf) + fmt.gamma(1), fmt)
    affine = [size_and_cast(args.get(name), fmt, lambda each: each.reshape(form)) for name in ("weight", "bias")]
    mean = mean.abs()
    return normalised_rounding(x.most, mean, x.most + mean, d_mean, (var + eps).rsqrt(), t, affine, fmt)


def _standardized(x: Value, shape: tuple[int, ...], size: int, eps: float | None, axis: int | None) -> Value:
    """x̂ = (x − μ)/s with s² = ‖x − μ‖²/size + eps, or without μ, over groups of ``size`` entries.

    The Jacobian is (1/s)(C − x̂x̂ᵀ/size), with a projection C that keeps x̂, and ‖x̂‖² ≤ size. The bracket is symmetric
    and between 0 and C, so the norm is at most 1/s ≤ 1/√eps. Without eps there is no finite constant.
    """
    if eps is not None and not eps >= 0:
        raise NoAnswer(f"eps = {eps:g}")
    lip = x.lip * (Upper(1) / eps).sqrt() if eps else INFINITE if x.lip > 0 else Upper(0)
    root = Upper(size).sqrt()
    unbounded = "" if eps else "eps is 0, so that its slope is unbounded where a group is constant"
    return Value(shape, lip, magnitude=root, rows=(axis, root) if axis is not None else None, unbounded=unbounded)


def _affine(base: Value, weight: Tensor | None, bias: Tensor | None, axis: int, dims: int = 1) -> Value:
    """γ ∘ base + β, with γ and β along ``dims`` axes from ``axis`` on."""
    if weight is None and bias is None:
        return base
    form = [1] * len(base.shape)
    axis = axis % len(base.shape)
    form[axis : axis + dims] = base.shape[axis : axis + dims]
    magnitude = base.magnitude * (largest(weight) * COMPOSED if weight is not None else 1)
    if bias is not None:
        magnitude = magnitude + largest(bias)
    scale = torch.ones(form, dtype=torch.float64) if weight is None else detached(weight).double().reshape(form)
    last = dims == 1 and axis == len(base.shape) - 1
    offset = None
    if last:
        offset = scale.new_zeros(base.shape[-1]) if bias is None else detached(bias).double()
    return Value(base.shape, magnitude=magnitude, base=base, map=Scale(scale), offset=offset)


@dataclass(frozen=True)
class Centred:
    """Centred tokens c in the deployed format.

    Attributes:
        size: bounds on the exact |c_i|, shape (N, ..., d).
        error: bounds on the errors of the c_i.
        mean, away: bounds on the exact |mean| and on its error, shape (N, ..., 1).
        low, high: bounds on the exact ‖c‖, shape (N, ..., 1).
        square: a bound on Σ z_i² of the deployed tokens.
    """

    size: Tensor
    error: Tensor
    mean: Tensor
    away: Tensor
    low: Tensor
    high: Tensor
    square: Tensor

    @classmethod
    def without(cls, tokens: Tensor, rho: Tensor, most: Tensor) -> Centred:
        """Tokens that are not centred; arguments as for :meth:`of`."""
        low, square = _length_bounds(tokens, most, rho)
        none = torch.zeros_like(low)
        return cls(most, none.expand_as(most), none, none, low, square.sqrt(), square)

    @classmethod
    def of(cls, tokens: Tensor, rho: Tensor, most: Tensor, terms: int, fmt: Format) -> Centred:
        """Tokens minus their mean, whose error is that of :meth:`Format.sum`."""
        d = tokens.shape[-1]
        centred = tokens - tokens.mean(-1, keepdim=True)
        length = l2_norm(centred, -1, keepdim=True)
        total = torch.minimum(tokens.abs().sum(-1, keepdim=True) + math.sqrt(d) * rho, most.sum(-1, keepdim=True))
        square = torch.minimum((l2_norm(tokens, -1, keepdim=True) + rho).square(), sum_squares(most, -1, keepdim=True))
        size = torch.minimum(centred.abs() + rho, most + total / d)
        mean = tokens.mean(-1, keepdim=True).abs() + rho / math.sqrt(d)
        away = fmt.safe(fmt.sum(total / d, terms, mean), total)
        error = away * (1 + 2 * fmt.unit) + fmt.rounded(size)
        low, high = (length - rho).clamp_min(0), torch.minimum(length + rho, square.sqrt())
        return cls(size, error, mean, away, low, high, square)


def normalised_rounding(
    most: Tensor,
    mean: Tensor,
    size: Tensor,
    away: Tensor,
    inverse: Tensor,
    t: Tensor,
    affine: Sequence[tuple[Tensor, Tensor] | None],
    fmt: Format,
    limit: float = math.inf,
    roundings: int = 5,
) -> Tensor:
    """Bounds on the error of y = (z − m)rγ + β, however a kernel multiplies it out, as in zrγ + (β − mrγ).

    Given are |z| ≤ most, |m| ≤ mean, |z − m| ≤ size, r ≤ inverse, |z − m|r ≤ limit, errors of m of at most ``away``
    and of r of at most t r, and γ and β as absolute values with errors. If all later steps were exact, y would err by

        |z − m|rt|γ̂| + away (1 + t)r|γ̂| + |z − m|r|γ̂ − γ| + |β̂ − β|.

    A kernel rounds each of the terms zr̂γ̂, m̂r̂γ̂ and β̂ at most five times to the format: in a difference, in products
    with r̂ and γ̂, or with the rounded r̂γ̂, in a change of format between, and with β or β − m̂r̂γ̂. The terms may cancel,
    so these errors are relative to |z|r̂|γ̂| + |m̂|r̂|γ̂| + |β̂|. Here |z|r̂ is at most |z − m|r̂ + |m|r̂ too. Products that
    underflow are multiplied by γ̂, by r̂, or by z and m̂.
    """
    (gain, d_gain), (shift, d_shift) = (
        pair or (t.new_full((), default), t.new_zeros(())) for pair, default in zip(affine, (1.0, 0.0), strict=True)
    )
    factor, scale, centre = gain + d_gain, inverse * (1 + t), mean + away
    exact = torch.clamp_max(size * inverse, limit)
    error = (exact * t + away * scale) * factor + exact * d_gain + d_shift
    terms = torch.minimum(most * scale, exact * (1 + t) + centre * scale) + centre * scale
    underflow = 4 * fmt.smallest * (1 + factor) * (1 + scale) * (1 + most + centre)
    error = error + fmt.rounded(terms * factor + shift + d_shift, roundings) + underflow
    return fmt.safe(error, torch.maximum(most + centre + shift, (1 + scale) * (1 + factor)).expand_as(error))


def _length_bounds(x: Tensor, most: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Lower bounds on the lengths of the tokens, and upper bounds on their squares, shape (N, ..., 1)."""
    nominal = l2_norm(x, -1, keepdim=True)
    square = torch.minimum((nominal + rho).square(), sum_squares(most, -1, keepdim=True))
    return (nominal * (1 - 1e-9) - rho).clamp_min(0), square


def inverse_root_error(off: Tensor, fmt: Format) -> Tensor:
    """The relative error of 1/√y, and of a product with it, where y has a relative error of at most ``off`` < ½.

    |(1 + τ)^(−½) − 1| ≤ |τ|/2 + τ² for |τ| ≤ ½, by its series; then the error of the library function and of two more
    operations.
    """
    first = torch.where(off < 0.5, off / 2 + off.square(), math.inf)
    second = fmt.library + fmt.gamma(2)
    return first + second + first * second


@rounding("layer_norm", "group_norm")
def standardized_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`normalised_rounding` with 1/r² = ‖c‖²/d + eps for centred tokens c.

    The variance, whether by two passes, by updates (Welford), or as E[z²] − E[z]², has an error of at most
    2(γ_(4d + EXTRA) + γ_4) E[z²], where the first γ is that of the arithmetic inside an operation. Then
    :func:`inverse_root_error` applies.
    """
    tokens, eps = tokens_of(node), float(arguments(node).get("eps", 1e-5))
    rows, most, rho = arranged(tokens, operands[0])
    d = rows.shape[-1]
    centred = Centred.of(rows, rho, most, 4 * d, fmt)
    least = centred.low.square() / d + eps
    off = 2 * (fmt.sum_gamma(4 * d + EXTRA) + fmt.gamma(4)) * centred.square / d
    t = inverse_root_error((off + fmt.cast(eps).item() + 4 * (d + EXTRA) * fmt.smallest) / least + fmt.gamma(1), fmt)
    error = normalised_rounding(
        most, centred.mean, centred.size, centred.away, least.rsqrt(), t, affine(tokens, fmt), fmt, math.sqrt(d)
    )
    return tokens.back(fmt.safe(error, centred.square.expand_as(error)))


def arranged(tokens: Tokens, x: Operand) -> tuple[Tensor, Tensor, Tensor]:
    """Nominal tokens, bounds on their deployed entries, and on the distance between the two."""
    rows = tokens.rows(x.nominal)
    return rows, tokens.rows(x.most), x.rho.reshape(-1, *[1] * (rows.dim() - 1))


def affine(tokens: Tokens, fmt: Format) -> list[tuple[Tensor, Tensor] | None]:
    """Weight and bias as absolute values with errors."""
    return [size_and_cast(part, fmt, tokens.arranged) for part in (tokens.weight, tokens.bias)]


@rule("layer_norm")
def layer_norm(
    call: Call,
    x: Value,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Value:
    """γ ∘ (x − μ)/√(σ² + eps) + β: slope at most 1/√eps, ‖x̂‖ ≤ √d; γ is multiplied into the next matrix."""
    dims = len(normalized_shape)
    base = _standardized(x, call.shape, math.prod(normalized_shape), eps, -1 if dims == 1 else None)
    return _affine(base, weight, bias, -dims, dims)


@normalises("layer_norm")
def layer_norm_tokens(node: Node) -> Tokens:
    """Tokens over the normalised axes."""
    return _standardising(node, over_last(node.shape, len(arguments(node)["normalized_shape"])), 1e-5)


def _standardising(node: Node, arrangement: Arrangement, default: float) -> Tokens:
    """√n c/√(‖c‖² + n·eps) for the tokens of an arrangement."""
    args = arguments(node)
    eps = args.get("eps")
    eps = default if eps is None else float(eps)
    if not eps >= 0:
        raise NoAnswer(f"eps = {eps:g}")
    n = arrangement[0](torch.empty(1, *node.shape, device="meta")).shape[-1]
    weight, bias = args.get("weight"), args.get("bias")
    return Tokens(*arrangement, node.op != "rms_norm", math.sqrt(n * eps), math.sqrt(n), weight, bias)


@rule("rms_norm")
def rms_norm(
    call: Call, x: Value, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Value:
    """γ ∘ x/√(mean x² + eps); without eps torch uses the machine epsilon of the type of the input."""
    dims = len(normalized_shape)
    smallest = 2.0**-52 if eps is None else eps  # the smaller epsilon gives the larger, safe constant
    base = _standardized(x, call.shape, math.prod(normalized_shape), smallest, -1 if dims == 1 else None)
    return _affine(base, weight, None, -dims, dims)


@normalises("rms_norm")
def rms_norm_tokens(node: Node) -> Tokens:
    """Tokens over the normalised axes, not centred; without eps torch uses the machine epsilon."""
    return _standardising(node, over_last(node.shape, len(arguments(node)["normalized_shape"])), 2.0**-52)


@rounding("rms_norm")
def rms_norm_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`normalised_rounding` with m = 0 and 1/r² = mean z² + eps.

    A mean of squares has a relative error of γ, because its terms have one sign.
    """
    tokens, eps = tokens_of(node), arguments(node).get("eps")
    if eps is None:
        raise NoAnswer("an eps that depends on the format")
    rows, most, rho = arranged(tokens, operands[0])
    d = rows.shape[-1]
    low, square = _length_bounds(rows, most, rho)
    least = low.square() / d + eps
    underflow = fmt.cast(eps).item() + 4 * (d + EXTRA) * fmt.smallest
    t = inverse_root_error(fmt.sum_gamma(d + EXTRA) + fmt.gamma(4) + underflow / least, fmt)
    none = torch.zeros_like(least)
    error = normalised_rounding(most, none, most, none, least.rsqrt(), t, affine(tokens, fmt), fmt, math.sqrt(d))
    return tokens.back(fmt.safe(error, square.expand_as(error)))


@rule("group_norm")
def group_norm(
    call: Call, x: Value, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Value:
    """LayerNorm over the channels of a group and all positions, with γ and β per channel."""
    base = _standardized(x, call.shape, math.prod(x.shape[1:]) // num_groups, eps, None)
    return _affine(base, weight, bias, 1)


@normalises("group_norm")
def group_norm_tokens(node: Node) -> Tokens:
    """Groups of channels with all positions."""
    return _standardising(node, of_groups(node.shape, arguments(node)["num_groups"]), 1e-5)


@rule("normalize")
def normalize(call: Call, x: Value, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Value:
    """x/max(‖x‖, eps): x/eps inside the ball of radius eps, a projection onto the sphere outside; slope ≤ 1/eps."""
    if p != 2.0:
        raise NoAnswer(f"p = {p:g}")
    if not isinstance(dim, int):
        raise NoAnswer("several dimensions")
    if not eps > 0:
        return Value(call.shape, INFINITE, rows=(dim, 1), unbounded="eps is 0, so that its slope is unbounded near 0")
    return Value(call.shape, x.lip * (Upper(1) / eps), rows=(dim, 1))


@normalises("normalize", nonsmooth=True)
def normalize_tokens(node: Node) -> Tokens:
    """Vectors along one axis."""
    args = arguments(node)
    dim, eps = args.get("dim", 1), float(args.get("eps", 1e-12))
    if args.get("p", 2.0) != 2.0 or not isinstance(dim, int):
        raise NoAnswer("another norm than that along one axis")
    return Tokens(*along(dim % len(node.shape) + 1), False, eps, 1.0, nonsmooth=True)


@rounding("normalize")
def normalize_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """x/max(‖x‖, eps). Let n = ‖x‖, and let a bound the underflow of the sum of squares.

    The root of n² + a differs from n by at most min(√a, a/n). The error γ of the sum, which the root halves, and the
    error of the root are relative to n.
    """
    tokens = tokens_of(node)
    eps = tokens.radius
    rows, most, rho = arranged(tokens, operands[0])
    low, square = _length_bounds(rows, most, rho)
    least = low.clamp_min(eps)
    count = rows.shape[-1] + EXTRA
    underflow = 4 * count * fmt.smallest
    lost = torch.minimum(torch.full_like(low, math.sqrt(underflow)), underflow / low) + fmt.cast(eps).item()
    off = fmt.sum_gamma(count) + fmt.library + fmt.gamma(2) + 2 * lost / least
    t = torch.where(off < 0.5, off / (1 - off), math.inf)
    size = torch.minimum(most / least, torch.ones_like(least))
    error = size * t + fmt.rounded(size * (1 + t), 2)
    return tokens.back(fmt.safe(error, torch.maximum(square.expand(size.shape), 1 / least)))
