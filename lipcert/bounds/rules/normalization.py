"""Normalisations: by fixed statistics (linear), and by statistics of the value (slope at most 1/√eps)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipcert.bounds._arguments import arguments
from lipcert.bounds._box import State, Walk, scaled
from lipcert.bounds._jacobian import Bounds, evenly, normalising, normalising_norm
from lipcert.bounds._kinks import RadialKink
from lipcert.bounds._registry import Call, NoAnswer, Schur, box, jacobian, rounding, rule
from lipcert.bounds._remainder import Radial, remainder
from lipcert.bounds._rounding import Operand, size_and_cast
from lipcert.bounds._value import Scale, Value, largest
from lipcert.bounds.rules.arithmetic import _shifted, _times
from lipcert.graph import Node
from lipcert.norms import COMPOSED
from lipcert.numerics import EXTRA, INFINITE, Format, Upper, held, l2_norm, sum_squares


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
        scale = scale * held(weight).double()
    moved = running_mean.detach().double() * scale
    shift = moved.abs()
    if bias is not None:  # the two may cancel, so the rounding error is relative to their absolute values
        shift = (held(bias).double() - moved).abs() + (held(bias).double().abs() + shift) * 2.0**-49
    channels = (1, -1, *[1] * (len(x.shape) - 2))
    return _shifted(call, _times(call, x, scale.reshape(channels)), shift.reshape(channels) * COMPOSED)


@box("batch_norm")
def batch_norm_box(walk: Walk, node: Node, x: State) -> State:
    """In evaluation mode a scale per channel, with rounding errors relative to x·scale and to the shift."""
    args = arguments(node)
    scale = (args["running_var"].double() + args.get("eps", 1e-5)).rsqrt()
    if args.get("weight") is not None:
        scale = scale * args["weight"].detach().double()
    scale = scale.reshape(1, 1, -1, *[1] * (x.value.dim() - 3))
    shift = args["running_mean"].double().reshape(scale.shape) * scale
    state = scaled(walk, node, x, scale)
    slack = shift.abs() * 2.0**-48
    return walk.result(node, state.up, state.down, way=state.way, rounding=slack.expand_as(x.value))


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
    scale = torch.ones(form, dtype=torch.float64) if weight is None else held(weight).double().reshape(form)
    last = dims == 1 and axis == len(base.shape) - 1
    offset = None
    if last:
        offset = scale.new_zeros(base.shape[-1]) if bias is None else held(bias).double()
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
        low, square = _length_bounds(tokens, most, rho, -1)
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
    and of r of at most t r, and γ and β as absolute values with errors. As if what follows were exact, y errs by

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


def _length_bounds(x: Tensor, most: Tensor, rho: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Lower bounds on the lengths of the vectors along an axis, and upper bounds on their squares; the axis is kept."""
    nominal = l2_norm(x, axis, keepdim=True)
    square = torch.minimum((nominal + rho).square(), sum_squares(most, axis, keepdim=True))
    return (nominal * (1 - 1e-9) - rho).clamp_min(0), square


def inverse_root_error(off: Tensor, fmt: Format) -> Tensor:
    """The relative error of 1/√y, and of a product with it, where y has a relative error of at most ``off`` < ½.

    |(1 + τ)^(−½) − 1| ≤ |τ|/2 + τ² for |τ| ≤ ½, by its series; then the error of the library function and of two more
    operations.
    """
    first = torch.where(off < 0.5, off / 2 + off.square(), math.inf)
    second = fmt.library + fmt.gamma(2)
    return first + second + first * second


def _standardized_rounding(
    tokens: Tensor, rho: Tensor, most: Tensor, eps: float, affine: Sequence[tuple[Tensor, Tensor] | None], fmt: Format
) -> Tensor:
    """:func:`normalised_rounding` with 1/r² = ‖c‖²/d + eps for centred tokens c.

    The variance, whether by two passes, by updates (Welford), or as E[z²] − E[z]², has an error of at most
    2(γ_(4d + EXTRA) + γ_4) E[z²], where the first γ is that of the arithmetic inside an operation. Then
    :func:`inverse_root_error` applies.
    """
    d = tokens.shape[-1]
    centred = Centred.of(tokens, rho, most, 4 * d, fmt)
    least = centred.low.square() / d + eps
    off = 2 * (fmt.sum_gamma(4 * d + EXTRA) + fmt.gamma(4)) * centred.square / d
    t = inverse_root_error((off + fmt.cast(eps).item() + 4 * (d + EXTRA) * fmt.smallest) / least + fmt.gamma(1), fmt)
    error = normalised_rounding(
        most, centred.mean, centred.size, centred.away, least.rsqrt(), t, affine, fmt, math.sqrt(d)
    )
    return fmt.safe(error, centred.square.expand_as(error))


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


@remainder("layer_norm")
class LayerNorm(Radial):
    """The case R = √(d·eps), gain √d/R of :class:`Radial`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        args = arguments(node)
        if len(args["normalized_shape"]) != 1:
            raise NoAnswer("several normalised dimensions")
        size, eps = args["normalized_shape"][0], args.get("eps", 1e-5)
        if not eps > 0:
            raise NoAnswer("eps = 0")
        h = operands[0]
        radius = math.sqrt(size * eps)
        super().__init__(h, radius, math.sqrt(size) / radius, args.get("weight"), -1, centred=True)


@rounding("layer_norm")
def layer_norm_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`_standardized_rounding` over the normalised axes."""
    args = arguments(node)
    dims = len(args["normalized_shape"])
    x = operands[0]
    tokens, most = x.nominal.flatten(-dims), x.most.flatten(-dims)
    rho = x.rho.reshape(-1, *[1] * (tokens.dim() - 1))
    affine = [size_and_cast(args.get(name), fmt, torch.flatten) for name in ("weight", "bias")]
    eps = float(args.get("eps", 1e-5))
    return _standardized_rounding(tokens, rho, most, eps, affine, fmt).reshape(x.nominal.shape)


@rule("rms_norm")
def rms_norm(
    call: Call, x: Value, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Value:
    """γ ∘ x/√(mean x² + eps); without eps torch uses the machine epsilon of the type of the input."""
    dims = len(normalized_shape)
    smallest = 2.0**-52 if eps is None else eps  # the smaller epsilon gives the larger, safe constant
    base = _standardized(x, call.shape, math.prod(normalized_shape), smallest, -1 if dims == 1 else None)
    return _affine(base, weight, None, -dims, dims)


@remainder("rms_norm")
class RootMeanSquare(Radial):
    """√d h/√(‖h‖² + d·eps): LayerNorm without centring; see :class:`Radial`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        args = arguments(node)
        if len(args["normalized_shape"]) != 1:
            raise NoAnswer("several normalised dimensions")
        size, eps = args["normalized_shape"][0], args.get("eps")
        if eps is None:
            eps = torch.finfo(operands[0].dtype).eps
        if not eps > 0:
            raise NoAnswer("eps = 0")
        radius = math.sqrt(size * eps)
        super().__init__(operands[0], radius, math.sqrt(size) / radius, args.get("weight"), -1)


@rounding("rms_norm")
def rms_norm_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`normalised_rounding` with m = 0 and 1/r² = mean z² + eps.

    A mean of squares has a relative error of γ, because its terms have one sign.
    """
    args = arguments(node)
    if args.get("eps") is None:
        raise NoAnswer("an eps that depends on the format")
    dims, eps = len(args["normalized_shape"]), float(args["eps"])
    x = operands[0]
    tokens, most = x.nominal.flatten(-dims), x.most.flatten(-dims)
    d = tokens.shape[-1]
    low, square = _length_bounds(tokens, most, x.rho.reshape(-1, *[1] * (tokens.dim() - 1)), -1)
    least = low.square() / d + eps
    underflow = fmt.cast(eps).item() + 4 * (d + EXTRA) * fmt.smallest
    t = inverse_root_error(fmt.sum_gamma(d + EXTRA) + fmt.gamma(4) + underflow / least, fmt)
    affine, none = (size_and_cast(args.get("weight"), fmt, torch.flatten), None), torch.zeros_like(least)
    error = normalised_rounding(most, none, most, none, least.rsqrt(), t, affine, fmt, math.sqrt(d))
    return fmt.safe(error, square.expand_as(error)).reshape(x.nominal.shape)


@rule("group_norm")
def group_norm(
    call: Call, x: Value, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Value:
    """LayerNorm over the channels of a group and all positions, with γ and β per channel."""
    base = _standardized(x, call.shape, math.prod(x.shape[1:]) // num_groups, eps, None)
    return _affine(base, weight, bias, 1)


class ByGroup:
    """Makes :class:`Radial` use groups of channels with all positions as tokens, and a weight per channel."""

    groups: int
    weight: Tensor | None

    def rows(self, tensor: Tensor) -> Tensor:
        """(N, batch, channels, ...) as (N, batch · groups, entries)."""
        return tensor.reshape(len(tensor), tensor.shape[1] * self.groups, -1)

    def _against(self, direction: Tensor) -> Tensor:
        if self.weight is not None:
            direction = direction * self.weight.double().reshape(-1, *[1] * (direction.dim() - 3))
        return self.rows(direction)


@remainder("group_norm")
class GroupNorm(ByGroup, Radial):
    """LayerNorm of every group; see :class:`Radial`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        args = arguments(node)
        self.groups = args["num_groups"]
        eps = args.get("eps", 1e-5)
        if not eps > 0:
            raise NoAnswer("eps = 0")
        size = math.prod(operands[0].shape[2:]) // self.groups
        radius = math.sqrt(size * eps)
        super().__init__(operands[0], radius, math.sqrt(size) / radius, args.get("weight"), 2, centred=True)


def _tokens(node: Node, values: Mapping[Node, Tensor]) -> tuple[Tensor, bool, float, float, Tensor | None]:
    """How LayerNorm, RMSNorm and GroupNorm normalise, as the arguments of :func:`normalising`.

    A token c of n entries is multiplied by √n and divided by the length of (c, √(n eps)). GroupNorm does that to each
    group.
    """
    args, x = arguments(node), values[node.operands[0]]
    centred = node.op != "rms_norm"
    if node.op == "group_norm":
        tokens = x.reshape(*x.shape[:2], args["num_groups"], -1)
    else:
        tokens = x.flatten(-len(args["normalized_shape"]))
    eps = args.get("eps", 1e-5 if centred else None)
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    count = tokens.shape[-1]
    return tokens, centred, math.sqrt(count * eps), math.sqrt(count), args.get("weight")


def layer_norm_norm(node: Node, place: int, values: Mapping[Node, Tensor]) -> Tensor | float:
    """:func:`normalising_norm` of its tokens."""
    return normalising_norm(*_tokens(node, values))


@jacobian("layer_norm", "rms_norm", "group_norm", norm=layer_norm_norm)
def layer_norm_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """:func:`normalising` its tokens."""
    return normalising(*_tokens(node, values))


@rounding("group_norm")
def group_norm_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`_standardized_rounding` over the channels of a group and all positions."""
    args = arguments(node)
    x = operands[0]
    grouped = (*x.nominal.shape[:2], args["num_groups"], -1)
    tokens, most = x.nominal.reshape(grouped), x.most.reshape(grouped)
    affine = [
        size_and_cast(args.get(name), fmt, partial(by_group, node.shape, grouped[2])) for name in ("weight", "bias")
    ]
    eps = float(args.get("eps", 1e-5))
    rho = x.rho.reshape(-1, 1, 1, 1)
    return _standardized_rounding(tokens, rho, most, eps, affine, fmt).reshape(x.nominal.shape)


def by_group(shape: tuple[int, ...], groups: int, constant: Tensor) -> Tensor:
    """Constants of channels once for each position, with groups of channels as tokens."""
    channels = constant.reshape(1, -1, *[1] * (len(shape) - 2))
    return channels.expand(1, *shape[1:]).reshape(groups, -1)


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


@remainder("normalize")
class Normalized(RadialKink):
    """h/max(‖h‖, eps) is 1/eps times the projection onto the ball of radius eps; see :class:`RadialKink`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        args = arguments(node)
        dim, eps = args.get("dim", 1), args.get("eps", 1e-12)
        if args.get("p", 2.0) != 2.0 or not isinstance(dim, int) or not eps > 0:
            raise NoAnswer("p is not 2, several dimensions, or eps = 0")
        axis = dim % len(node.shape) + 1
        super().__init__(operands[0], eps, None, axis, gain=1 / eps)


@jacobian("normalize")
def normalize_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """Tokens along one axis, divided by their length."""
    args = arguments(node)
    axis = args.get("dim", 1)
    if not isinstance(axis, int) or args.get("p", 2.0) != 2:
        raise NoAnswer("another norm than that along one axis")
    tokens = values[node.operands[0]].movedim(axis + 1 if axis >= 0 else axis, -1)
    return normalising(tokens, False, float(args.get("eps", 1e-12)), 1.0, None)


@rounding("normalize")
def normalize_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """x/max(‖x‖, eps). Let n = ‖x‖, and let a bound the underflow of the sum of squares.

    The root of n² + a differs from n by at most min(√a, a/n). The error γ of the sum, which the root halves, and the
    error of the root are relative to n.
    """
    args = arguments(node)
    eps = float(args.get("eps", 1e-12))
    if args.get("p", 2.0) != 2.0 or not isinstance(args.get("dim", 1), int):
        raise NoAnswer("another norm than that along one axis")
    x = operands[0]
    axis = args.get("dim", 1) % len(node.shape) + 1
    low, square = _length_bounds(x.nominal, x.most, x.over(x.rho), axis)
    least = low.clamp_min(eps)
    count = x.nominal.shape[axis] + EXTRA
    underflow = 4 * count * fmt.smallest
    lost = torch.minimum(torch.full_like(low, math.sqrt(underflow)), underflow / low) + fmt.cast(eps).item()
    off = fmt.sum_gamma(count) + fmt.library + fmt.gamma(2) + 2 * lost / least
    t = torch.where(off < 0.5, off / (1 - off), math.inf)
    size = torch.minimum(x.most / least, torch.ones_like(least))
    return fmt.safe(size * t + fmt.rounded(size * (1 + t), 2), torch.maximum(square.expand(size.shape), 1 / least))
