"""Average pooling, which is linear with non-negative weights, and maxima."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds._arguments import arguments, per_axis, replayed
from lipcert.bounds._box import Propagation, State, extended, monotone, nonnegative
from lipcert.bounds._jacobian import selecting
from lipcert.bounds._piecewise import PiecewiseLinear
from lipcert.bounds._registry import Call, NoAnswer, Schur, Tag, box, jacobian, rounding, rule, tag
from lipcert.bounds._remainder import Against, remainder
from lipcert.bounds._rounding import Operand, exact
from lipcert.bounds._value import Value, lowest
from lipcert.bounds.rules.arithmetic import _copies
from lipcert.graph import Node
from lipcert.numerics import INFLATE, Format, Upper, root_sum, root_sum_squares


def schur_norms(operation: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> tuple[Upper, Upper]:
    """The largest row sum of a linear map A with entries ≥ 0, and a bound on ‖A‖: √(max row sum · max column sum).

    This is Schur's test. The row sums are A·1, the column sums Aᵀ·1 by autograd.
    """
    ones = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        rows = operation(ones)
        (columns,) = torch.autograd.grad(rows.sum(), ones)
    if not bool((rows >= 0).all()) or not bool((columns >= 0).all()):
        raise NoAnswer("weights of both signs")
    # In a sum of non-negative terms each of the n additions has a relative error of at most 2⁻⁵³.
    slack = 1 + ones.numel() * 2.0**-51
    largest_row, largest_column = (Upper(sums.max().item()) * slack for sums in (rows, columns))
    return largest_row, (largest_row * largest_column).sqrt()


def _dims(op: Any) -> int:
    """The number of axes that a pooling, named such as ``max_pool2d``, runs over."""
    return int(str(op)[-2])


def _window(node: Node, operand: Node) -> float:
    """The size of a window; an entry lies in at most as many."""
    return 2 * math.prod(per_axis(arguments(node)["kernel_size"], _dims(node.op)))


def _adaptive_window(node: Node, operand: Node) -> float:
    """The size of windows of n/m entries or more, possibly overlapping, from n entries to m along each axis."""
    dims = _dims(node.op)
    return math.prod(n / m + m / n + 2 for n, m in zip(operand.shape[-dims:], node.shape[-dims:], strict=True))


_AVERAGES = ("avg_pool1d", "avg_pool2d")


@rule(*_AVERAGES, linear=True, schur=Schur(terms=_window), tags=Tag.SUMS)
@rule("adaptive_avg_pool2d", linear=True, schur=Schur(terms=_adaptive_window), tags=Tag.SUMS)
def averaged(call: Call, x: Value, *args: object, **kwargs: object) -> Value:
    """Weights ≥ 0: Schur's test on one channel. Entries, and vectors of channels, grow by the largest row sum."""
    dims, operation = _dims(call.op), getattr(F, call.op)
    shape = (1, 1, *x.shape[-dims:])
    rows_norm, norm = schur_norms(lambda ones: operation(ones, *args, **kwargs), shape)
    rows = None
    if x.rows is not None and x.rows[0] == len(x.shape) - dims - 1:
        rows = (x.rows[0], x.rows[1] * rows_norm)
    floor = 0.0 if x.lowest >= 0 else -math.inf
    return Value(call.shape, x.lip * norm, magnitude=x.magnitude * rows_norm, rows=rows, floor=floor)


box(*_AVERAGES, "adaptive_avg_pool2d")(nonnegative)


@rounding(*_AVERAGES, "adaptive_avg_pool2d")
def average_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Means over windows: :meth:`Format.sum` with at most as many terms as the kernel, or the operand, has positions.

    The divisor is a number of positions, or ``divisor_override``.
    """
    dims = _dims(node.op)
    args = arguments(node)
    positions = math.prod(
        per_axis(args["kernel_size"], dims) if "kernel_size" in args else node.operands[0].shape[-dims:]
    )
    size = replayed(node, operands[0].most).abs()
    total = size * max(positions, abs(args.get("divisor_override") or 0))
    return fmt.safe(fmt.sum(size, positions, size), total)


@rule("max_pool2d")
def largest_of_windows(
    call: Call,
    x: Value,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Value:
    """|max a − max b| ≤ max|a − b| ≤ ‖a − b‖ per window, and an entry lies in at most m windows: constant √m.

    Along one axis an entry at p lies in the windows o with o·s + d·t = p for 0 ≤ t < k, at most ⌈k gcd(s, d)/s⌉.
    """
    if return_indices:
        raise NoAnswer("indices of the maxima")
    dims = _dims(call.op)
    kernel, step, around, gap = (per_axis(v, dims) for v in (kernel_size, stride or kernel_size, padding, dilation))
    places = covered(call.shape[-dims:], kernel, step, around, gap)
    if any(not bool(((p >= 0) & (p < n)).any(1).all()) for p, n in zip(places, x.shape[-dims:], strict=True)):
        raise NoAnswer("a window that contains only padding, so its largest entry is −∞")
    windows = math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in zip(kernel, step, gap, strict=True))
    return Value(call.shape, x.lip * Upper(windows).sqrt(), magnitude=x.magnitude, floor=x.lowest)


def covered(
    results: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[Tensor]:
    """The positions that each window covers, for every axis: o·s + t·d − p with 0 ≤ t < k, shape (windows, entries)."""
    axes = zip(results, kernel, stride, padding, dilation, strict=True)
    return [torch.arange(m)[:, None] * s + torch.arange(k) * d - p for m, k, s, p, d in axes]


@rule("adaptive_max_pool2d")
def largest_adaptively(call: Call, x: Value, output_size: object, return_indices: bool = False) -> Value:
    """As max pooling, with at most 2 windows per entry and axis if n ≥ m.

    Window i ends at ⌈(i+1)n/m⌉ ≤ ⌊(i+2)n/m⌋, the start of window i + 2.
    """
    if len(call.shape) != len(x.shape):
        raise NoAnswer("indices of the maxima")
    dims = _dims(call.op)
    sizes = list(zip(x.shape[-dims:], call.shape[-dims:], strict=True))
    if return_indices or any(n < m for n, m in sizes):
        raise NoAnswer("more results than entries, or their indices")
    shared = math.prod(1 if n % m == 0 else 2 for n, m in sizes)
    return Value(call.shape, x.lip * Upper(shared).sqrt(), magnitude=x.magnitude, floor=x.lowest)


@box("max_pool2d", inactive=True)
def max_pool_box(propagation: Propagation, node: Node, x: State) -> State:
    """An entry that cannot be the largest of a window in the ball does not count for that window.

    |max a − max b| ≤ max|a_j − b_j| over the entries j that can be the largest of the window. Let n_j be the number of
    windows with a variable result in which j can be the largest. Then ‖δv‖² ≤ Σ_w Σ_{j ∈ w} δ_j² = Σ_j n_j δ_j².
    """
    up, down, low, high = monotone(propagation, node, x)
    if arguments(node).get("ceil_mode") or len(node.shape) != 4:
        return propagation.result(node, up, down, (x,))
    size, stride, padding, dilation = _geometry(node)
    image = tuple(x.value.shape[-2:])
    padded = (image[0] + 2 * padding[0], image[1] + 2 * padding[1])
    entries = x.high.reshape(-1, 1, *image)
    frame = F.pad(entries, (padding[1],) * 2 + (padding[0],) * 2, value=-1e300)
    windows = F.unfold(frame, size, dilation=dilation, stride=stride)
    counts = (windows >= low.reshape(len(entries), 1, -1)) & (high > low).reshape(len(entries), 1, -1)
    # Folding adds up over the windows, which gives n_j for each entry.
    total = F.fold(counts.double(), padded, size, dilation=dilation, stride=stride)
    total = total[..., padding[0] : padded[0] - padding[0], padding[1] : padded[1] - padding[1]]
    weight = (total.sqrt() * INFLATE).reshape(x.value.shape)
    return propagation.result(node, up, down, factors=extended(x, weight, local=True), open=False)


def _geometry(node: Node) -> list[tuple[int, ...]]:
    """Kernel, stride, padding and dilation of max pooling, each with one number for an axis."""
    args, dims = arguments(node), _dims(node.op)
    stride = args.get("stride") or args["kernel_size"]
    return [per_axis(x, dims) for x in (args["kernel_size"], stride, args.get("padding", 0), args.get("dilation", 1))]


class _Windows(PiecewiseLinear):
    """The maximum over windows: with k the largest minus the second entry, |R| ≤ (|δ_j| + |δ_top| − k)₊ for some j.

    |δ_j| + |δ_top| ≤ √2 ‖δ_window‖, and an entry lies in at most m windows, so Σ (√2 ‖δ_window‖)² ≤ 2 m ρ².
    """

    def __init__(self, x: Tensor, windows: Sequence[Tensor]):
        images, dims = len(x), len(windows)
        x = x.reshape(-1, *x.shape[-dims:])
        shared = 1
        for axis, places in reversed(list(enumerate(windows, 1))):
            size = x.shape[axis]
            # Index ``size`` is the −∞ that is appended below.
            places = torch.where((places >= 0) & (places < size), places, size)
            # The largest number of windows that share an entry along this axis; padding does not count.
            shared *= int(places.flatten().bincount(minlength=size + 1)[:size].max())
            padding = x.new_full((*x.shape[:axis], 1, *x.shape[axis + 1 :]), -math.inf)
            x = torch.cat([x, padding], axis).index_select(axis, places.flatten().to(x.device))
            x = x.unflatten(axis, places.shape)
        # (images, windows, entries, windows, entries, …) with one pair per axis becomes (images, *windows, entries).
        entries = x.permute(0, *range(1, 2 * dims, 2), *range(2, 2 * dims + 1, 2)).flatten(dims + 1)
        # A window of one entry has −∞ as its second, so it has no breakpoint.
        top = torch.nn.functional.pad(entries, (0, 1), value=-math.inf).topk(2).values
        super().__init__((top[..., 0] - top[..., 1]).reshape(images, -1))
        self.spread = math.sqrt(2 * shared)


@remainder("max_pool2d")
class MaxPool(_Windows):
    """Max pooling, with the windows of :func:`covered`."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        super().__init__(operands[0], covered(result.shape[-_dims(node.op) :], *_geometry(node)))


@remainder("adaptive_max_pool2d")
class AdaptiveMaxPool(_Windows):
    """Window i of an axis of n entries covers the positions p with ⌊in/m⌋ ≤ p < ⌈(i + 1)n/m⌉."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        dims = _dims(node.op)
        windows = []
        for n, m in zip(operands[0].shape[-dims:], result.shape[-dims:], strict=True):
            # ⌈(i + 1)n/m⌉ = −⌊−(i + 1)n/m⌋; position n counts as padding.
            first, end = torch.arange(m) * n // m, -(-(torch.arange(m) + 1) * n // m)
            places = first[:, None] + torch.arange(int((end - first).max()))
            windows.append(torch.where(places < end[:, None], places, n))
        super().__init__(operands[0], windows)


jacobian(
    "max_pool2d", "adaptive_max_pool2d", "amax", "amin", "max", "min", "maximum", "minimum", absolute=0.0,
)(selecting)  # fmt: skip


tag(Tag.POSITIONS, "argmax", "argmin")


@rule("amax", "amin")
def extreme(call: Call, x: Value, *args: object, **kwargs: object) -> Value:
    """|max a − max b| ≤ ‖a − b‖; different results share no entry."""
    return Value(call.shape, x.lip, magnitude=x.magnitude, floor=x.lowest)


@box("adaptive_max_pool2d", "amax", "amin")
def ordered_box(propagation: Propagation, node: Node, x: State) -> State:
    """The largest entry is non-decreasing in every entry, so its bounds are its values at the ends of the box."""
    up, down, _, _ = monotone(propagation, node, x)
    return propagation.result(node, up, down, (x,))


@remainder("amax", "amin")
class Extreme(PiecewiseLinear):
    """The largest entry of each group: with k its distance to the second, |R| ≤ (|δ_j| + |δ_top| − k)₊ for some j.

    That is at most (√2‖δ_group‖ − k)₊. For a tie, autograd divides the gradient evenly. Then k = 0, and
    |δ_j − Σ w_i δ_i| ≤ √2‖δ_group‖ for weights w ≥ 0 with sum 1.
    """

    spread = math.sqrt(2)

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        args = arguments(node)
        if not node.shape:
            raise NoAnswer("the largest or smallest of all entries")
        dim = args.get("dim")
        shape = node.operands[0].shape
        dims = range(len(shape)) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
        inside = sorted({d % len(shape) + 1 for d in dims})
        outside = [d for d in range(len(shape) + 1) if d not in inside]
        groups = operands[0].permute(*outside, *inside).flatten(len(outside))
        ordered = groups.sort(dim=-1).values
        if ordered.shape[-1] == 1:
            gap = torch.full_like(ordered[..., 0], math.inf)
        elif node.op == "amin":
            gap = ordered[..., 1] - ordered[..., 0]
        else:
            gap = ordered[..., -1] - ordered[..., -2]
        self.convexity = -1 if node.op == "amin" else 1
        super().__init__(gap)


rounding("max_pool2d", "adaptive_max_pool2d", "amax", "amin")(exact)


@rule("max", "maximum", "min", "minimum")
def larger(call: Call, x: Any, other: Any) -> Value:
    """For two values |δ max(x, y)| ≤ max(|δx|, |δy|), entry by entry."""
    pair, pick = (x, other), max if call.op in ("max", "maximum") else min
    values = [v if isinstance(v, Value) else Value.constant(torch.as_tensor(v, dtype=torch.float64)) for v in pair]
    lip = root_sum_squares(*(v.lip * _copies(call, v) for v in values))
    floor = pick(map(lowest, pair))
    return Value(call.shape, lip, magnitude=max(v.magnitude for v in values), floor=floor)


@rounding("max", "min", "maximum", "minimum")
def larger_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """The larger or smaller of two values is one of them, so there is no rounding error; constants would be cast."""
    if len(node.operands) != 2:
        raise NoAnswer("a constant")
    return exact(node, operands, fmt)


@remainder("max", "min", "maximum", "minimum")
class Larger(PiecewiseLinear):
    """max(a, b) entry by entry: R ≤ (|δa − δb| − |a − b|)₊, and |δa − δb| ≤ √2 ‖(δa, δb)‖; b may be constant."""

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        args = arguments(node)
        pair = [args.get("input"), args.get("other")]
        values = iter(operands)
        sides = [next(values) if isinstance(item, Node) else torch.as_tensor(item).detach().double() for item in pair]
        if any(operand.shape != node.shape for operand in node.operands):
            raise NoAnswer("an operand that is repeated")
        self.spread = math.sqrt(len(node.operands))
        self.convexity = 1 if node.op in ("max", "maximum") else -1
        super().__init__((sides[0] - sides[1]).abs())

    def norm(self, rho: Sequence[Tensor]) -> Tensor:
        return super().norm([root_sum(*rho)])

    def against(self, direction: Tensor) -> Against:
        piecewise = super().against(direction)
        return lambda rho: piecewise([root_sum(*rho)])
