"""How far one operation of the deployed network is from the same operation in real arithmetic on the same operands.

A rule gets the node, its operands as :class:`Operand` (what is known of the deployed values), and the format, and
returns an upper bound on |f̂(â) − f(â)|, entry by entry, of shape (N, *node.shape); ∞ where it has no answer.
What is assumed of the machine is written at the head of :mod:`lipcert.roundoff`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert._numerics import at_most
from lipcert.bounds import NoAnswer, answer_of, arguments, by_operand, rounding
from lipcert.bounds.rules.pooling import per_axis
from lipcert.graph import Node, map_nodes
from lipcert.roundoff._format import EXTRA, OWN_ROUNDING, Format
from lipcert.surgery import (
    ClippedMaxMin,
    ClippedReLU,
    GroupLayerProject,
    GroupSmoothProject,
    LayerProject,
    MaxMin,
    RmsLayerProject,
    RmsSmoothProject,
    SmoothProject,
)


@dataclass(frozen=True)
class Operand:
    """A value of the deployed network, around the nominal one.

    Attributes:
        nominal: the value at the image in real arithmetic, shape (N, ...).
        rho: how far the deployed value can be from it in ℓ2, shape (N,).
        limit: a bound on its absolute entries that holds as well, shape (N,).
    """

    nominal: Tensor
    rho: Tensor
    limit: Tensor

    def over(self, numbers: Tensor) -> Tensor:
        """Numbers of shape (N,), to broadcast with the value."""
        return numbers.reshape(-1, *[1] * (self.nominal.dim() - 1))

    @property
    def size(self) -> Tensor:
        """Nominal absolute entries."""
        return self.nominal.abs()

    @property
    def most(self) -> Tensor:
        """Bounds on the absolute entries: none moves by more than ρ."""
        return torch.minimum(self.size + self.over(self.rho), self.over(self.limit))


def local_error(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Upper bound on the rounding error of one operation, shape (N, *node.shape).

    Args:
        node: the operation.
        operands: what is known of the deployed operands, in the order of ``node.operands``.
        fmt: the deployed format.

    Raises:
        NoAnswer: there is no rule, or it does not cover the arguments.
    """
    rule = answer_of(node.op, "rounding")
    try:
        error = rule(node, operands, fmt) * OWN_ROUNDING
    except KeyError as missing:
        raise NoAnswer(f"no argument {missing}") from None
    return at_most(error)


def _zeros(node: Node, operands: Sequence[Operand]) -> Tensor:
    return operands[0].nominal.new_zeros(len(operands[0].nominal), *node.shape)


def _replay(node: Node, values: Sequence[Tensor]) -> Tensor:
    """The operation on other operands, image by image."""

    def one(*images: Tensor) -> Tensor:
        left = iter(images)
        args, kwargs = map_nodes(lambda _: next(left), (node.args, dict(node.kwargs)))
        return node.function(*args, **kwargs)

    return torch.vmap(one)(*values)


def _aligned(tensor: Tensor, node: Node, images: bool) -> Tensor:
    """A tensor that broadcasts with (N, *node.shape) as the operation broadcasts it."""
    lead = tensor.shape[:1] if images else (1,)
    shape = tensor.shape[1:] if images else tensor.shape
    return tensor.reshape(*lead, *[1] * (len(node.shape) - len(shape)), *shape)


def _each(node: Node, operands: Sequence[Operand], fmt: Format, *given: Any) -> list[tuple[Tensor, Tensor]]:
    """For the arguments of an elementwise operation: bounds on the absolute entries, and |cast error| of constants."""
    known = by_operand(node, operands)
    found = []
    for argument in given:
        if isinstance(argument, Node):
            size = _aligned(known(argument).most, node, images=True)
            found.append((size, torch.zeros_like(size)))
        else:
            constant = torch.as_tensor(argument, dtype=torch.float64, device=operands[0].nominal.device).detach()
            found.append((_aligned(constant.abs(), node, False), _aligned(fmt.cast(constant), node, False)))
    return found


# Nothing is computed: entries are moved, compared, or have their sign changed.


@rounding(
    "reshape", "permute", "movedim", "transpose", "getitem", "index_select", "flip", "roll", "expand", "repeat",
    "tile", "repeat_interleave", "dropout", "neg", "abs", "relu", "relu6", "max_pool1d", "max_pool2d", "max_pool3d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "amax", "amin", "unfold", "unfold_axis",
    MaxMin,
)  # fmt: skip
def exact(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """No rounding. Numbers below the normal range may be flushed to zero, which the operation that made them counts."""
    return _zeros(node, operands)


@rounding("identity")
def identity(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """A copy, or a change of format that rounds once at most."""
    return fmt.rounded(operands[0].most)


@rounding("cat", "stack")
def side_by_side(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Moves entries; constants among them are those of the deployed format."""
    given = arguments(node)
    axis = given.get("dim", 0)
    device = operands[0].nominal.device
    parts = [
        torch.zeros(t.shape, dtype=torch.float64, device=device) if isinstance(t, Node) else fmt.cast(t)
        for t in given["tensors"]
    ]
    joined = torch.cat(parts, axis) if node.op == "cat" else torch.stack(parts, axis)
    return joined.expand(len(operands[0].nominal), *node.shape)


@rounding("pad", "constant_pad_nd")
def pad(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Moves entries; the constant is the deployed format's."""
    given = arguments(node)
    return _zeros(node, operands) + fmt.cast(float(given.get("value") or 0.0)).item()


@rounding("clamp", "hardtanh")
def clamp(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Comparisons with limits that are those of the deployed format."""
    given = arguments(node)
    if node.op == "clamp":
        limits = [given.get("min"), given.get("max")]
    else:
        limits = [given.get("min_val", -1.0), given.get("max_val", 1.0)]
    if any(isinstance(limit, Node) for limit in limits):
        raise NoAnswer("limits that depend on the image")
    error = _zeros(node, operands)
    for limit in limits:
        if limit is not None:
            error = torch.maximum(error, _aligned(fmt.cast(limit), node, images=False).to(error.device))
    return error


@rounding(ClippedReLU)
def clipped(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Comparisons with a threshold of the deployed format."""
    module: Any = node.function
    return _zeros(node, operands) + _aligned(fmt.cast(module.threshold), node, images=False)


@rounding(ClippedMaxMin)
def clipped_max_min(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Comparisons with thresholds of the deployed format."""
    module: Any = node.function
    axis = module.dim % len(node.shape)
    half = [n // 2 if i == axis else n for i, n in enumerate(node.shape)]
    limits = [fmt.cast(limit).expand(half) for limit in (module.upper, module.lower)]
    return torch.cat(limits, axis).expand(len(operands[0].nominal), *node.shape)


# Sums and products.


@rounding("add", "sub", "rsub")
def add(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """x ± αy: one rounding, three with α. Adding −∞, as masks do, is exact."""
    given = arguments(node)
    alpha = abs(float(given.get("alpha", 1)))
    first, second = (given["input"], given["other"]) if node.op != "rsub" else (given["other"], given["input"])
    (x, dx), (y, dy) = _each(node, operands, fmt, given["input"], given["other"])
    masked = torch.zeros_like(_zeros(node, operands), dtype=torch.bool)
    for constant in (first, second):
        if isinstance(constant, Tensor):
            masked = masked | _aligned(constant == -math.inf, node, images=False)
    if node.op == "rsub":
        x, dx, y, dy = y, dy, x, dx
    error = fmt.rounded(x + alpha * y, 1 if alpha == 1 else 4) + dx + alpha * dy
    return torch.where(masked, 0.0, error.expand(masked.shape))


@rounding("mul", "div")
def times(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """x·y and x/y, one of them constant or not, the second as a quotient or a product with 1/y.

    |ŷ| ≥ |y| − ρ for a denominator that depends on the image.
    """
    given = arguments(node)
    if node.op == "mul":
        (x, dx), (y, dy) = _each(node, operands, fmt, given["input"], given["other"])
        return fmt.rounded(x * y, 2) + (x * dy + dx * y + dx * dy) * (1 + 4 * fmt.unit) + _zeros(node, operands)
    if given.get("rounding_mode"):
        raise NoAnswer("a quotient that is rounded to a whole number")
    (x, dx), (c, dc) = _each(node, operands, fmt, given["input"], given["other"])
    x = x + dx
    low = c - dc
    if isinstance(given["other"], Node):
        denominator = operands[node.operands.index(given["other"])]
        low = _aligned((denominator.size - denominator.over(denominator.rho)).clamp_min(0), node, images=True)
    quotient = torch.where(low > 0, x / low, math.inf)
    # 1/c may be rounded by itself, and fall below the normal range.
    inverse = x * (4 * fmt.smallest)
    cast = (quotient * torch.where(c > 0, dc / c, 0.0) + torch.where(low > 0, dx / low, 0.0)) * (1 + 4 * fmt.unit)
    error = fmt.rounded(quotient, 4) + cast + inverse + _zeros(node, operands)
    return fmt.safe(error, torch.where(low > 0, 1 / low, math.inf).expand(error.shape))


@rounding("addcmul")
def addcmul(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """x + α·y·z: two products and a sum, with α rounded to the format.

    The first product may be of any two factors. Where it underflows, the third multiplies that; where it overflows,
    there is no answer, however small the result.
    """
    given = arguments(node)
    alpha = abs(float(given.get("value", 1)))
    (x, dx), (y, dy), (z, dz) = _each(node, operands, fmt, given["input"], given["tensor1"], given["tensor2"])
    cast = dx + alpha * (y * dz + dy * z + dy * dz) * (1 + 8 * fmt.unit)
    y, z = y + dy, z + dz
    underflow = 4 * fmt.smallest * (alpha + y + z)
    error = fmt.rounded(x + dx + alpha * y * z, 5) + cast + underflow + _zeros(node, operands)
    return fmt.safe(error, torch.maximum(y * z, alpha * torch.maximum(y, z)).expand(error.shape))


@rounding("square", "pow")
def power(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """xᵖ for whole p ≥ 1, by products or by a library's function."""
    p = 2.0 if node.op == "square" else arguments(node)["exponent"]
    if isinstance(p, (Node, Tensor)) or not 1 <= p < math.inf or p != int(p):
        raise NoAnswer("the exponent is not a whole number ≥ 1")
    size = operands[0].most ** int(p)
    return fmt.rounded(size, int(p)) + fmt.function(size)


@rounding("sum", "mean")
def sums(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """A sum of n terms in any order, and for a mean a division by n."""
    if any(isinstance(given, torch.dtype) for given in (*node.args, *node.kwargs.values())):
        raise NoAnswer("a sum in another format")
    x = operands[0]
    count = math.prod(x.nominal.shape[1:]) // max(1, math.prod(node.shape))
    size = _replay(node, [x.most])
    total = size * (count if node.op == "mean" else 1)
    return fmt.safe(fmt.sum(size, count, size), total)


@rounding("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def average(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """Means over windows, as :func:`sums`; a window has no more entries than its kernel, or the operand has positions.

    What is divided by is a number of positions, or is given.
    """
    dims = int(str(node.op)[-2])
    given = arguments(node)
    positions = math.prod(
        per_axis(given["kernel_size"], dims) if "kernel_size" in given else node.operands[0].shape[-dims:]
    )
    size = _replay(node, [operands[0].most]).abs()
    total = size * max(positions, abs(given.get("divisor_override") or 0))
    return fmt.safe(fmt.sum(size, positions, size), total)


def _matrix(
    x: Operand,
    weight: Tensor,
    bias: Tensor | None,
    terms: int,
    apply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    rows: Callable[[Tensor], Tensor],
    fmt: Format,
) -> Tensor:
    """Ŵx̂ + b̂ with n terms in a sum, Ŵ and b̂ the cast constants: :meth:`Format.sum`, and |Ŵ − W||x̂| + |b̂ − b|.

    |W||x̂| ≤ |W||x| + ‖w_i‖ρ and |Wx̂ + b| ≤ |Wx + b| + ‖w_i‖ρ row by row (Cauchy–Schwarz); or |W| times the largest
    entries of x̂.

    Args:
        x: the operand.
        weight: W.
        bias: b, or None.
        terms: n.
        apply: the operation for given operand, weight and bias.
        rows: the norms of the rows, to broadcast with the result.
        fmt: the deployed format.
    """
    weight = weight.detach().double()
    bias = None if bias is None else bias.detach().double()
    reach = x.over(x.rho)

    def sizes(weight: Tensor, bias: Tensor | None) -> Tensor:
        """|W||x̂| + |b|."""
        near = at_most(apply(x.size, weight, bias) + rows(weight) * reach)
        return torch.minimum(near, at_most(apply(x.most, weight, bias)))

    size = sizes(weight.abs(), None if bias is None else bias.abs())
    cast = sizes(fmt.cast(weight), None if bias is None else fmt.cast(bias))
    result = apply(x.nominal, weight, bias).abs() + rows(weight) * reach
    largest = x.most.reshape(len(x.nominal), -1).amax(1).reshape(reach.shape)
    return fmt.safe(fmt.sum(size + cast, terms, result + cast) + cast, torch.maximum(size, largest))


def _still(node: Node) -> dict[str, Any]:
    """The arguments of an operation whose weights must not depend on the image."""
    given = arguments(node)
    if isinstance(given["weight"], Node) or isinstance(given.get("bias"), Node):
        raise NoAnswer("weights that depend on the image")
    return given


@rounding("linear")
def linear(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`_matrix`, sums of ``in_features`` products."""
    given = _still(node)
    return _matrix(
        operands[0], given["weight"], given.get("bias"), given["weight"].shape[-1], F.linear,
        lambda weight: weight.norm(dim=-1), fmt,
    )  # fmt: skip


@rounding("conv1d", "conv2d", "conv3d")
def conv(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`_matrix`, sums over a kernel and its input channels."""
    given = _still(node)
    geometry: dict[str, Any] = {k: given[k] for k in ("stride", "padding", "dilation", "groups") if k in given}
    return _convolution(node, operands[0], given, geometry, fmt, given["weight"].flatten(1).shape[1])


@rounding("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`_matrix`; an entry is a sum over the input channels of its group and at most the whole kernel.

    Kernels add up overlapping results in the format itself, so no better sums are assumed.
    """
    fmt = replace(fmt, sums=fmt.dtype)
    given = _still(node)
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    geometry: dict[str, Any] = {k: given[k] for k in names if k in given}
    weight = given["weight"]
    terms = weight.shape[0] // int(given.get("groups", 1)) * math.prod(weight.shape[2:])
    return _convolution(node, operands[0], given, geometry, fmt, terms)


def _convolution(
    node: Node, x: Operand, given: dict[str, Any], geometry: dict[str, Any], fmt: Format, terms: int
) -> Tensor:
    transposed = "transpose" in str(node.op)
    function = getattr(F, str(node.op))
    dims = given["weight"].dim() - 2
    if x.nominal.dim() != dims + 3:
        raise NoAnswer("an input without batch axis")

    def apply(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return function(value.flatten(0, 1), weight, bias, **geometry).unflatten(0, value.shape[:2])

    def rows(weight: Tensor) -> Tensor:
        if transposed:
            groups = int(geometry.get("groups", 1))
            weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        return weight.flatten(1).norm(dim=1).reshape(-1, *[1] * dims)

    return _matrix(x, given["weight"], given.get("bias"), terms, apply, rows, fmt)


@rounding("matmul")
def matmul(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """XY with |X̂||Ŷ| ≤ (|X| + |δX|)(|Y| + |δY|): norms of rows and columns against ‖δY‖ and ‖δX‖.

    Where both depend on the image, the roundings to the format are relative to |X̂||Ŷ|, as fused attention may put the
    root of its scale on queries and keys before their product.
    """
    given, known = arguments(node), by_operand(node, operands)
    parts: list[tuple[Operand, Tensor]] = []
    for argument in (given["input"], given["other"]):
        if isinstance(argument, Node):
            operand = known(argument)
            parts.append((operand, torch.zeros((), dtype=torch.float64, device=operand.nominal.device)))
        else:
            constant = argument.detach().double()
            still = Operand(constant[None], constant.new_zeros(1), constant.abs().amax()[None])
            parts.append((still, fmt.cast(constant)[None]))
    (x, dx), (y, dy) = parts
    dims = {part.nominal.dim() for part, _ in parts}
    if len(dims) != 1 and (len(operands) == 2 or operands[0].nominal.dim() < max(dims)) or min(dims) < 3:
        raise NoAnswer("operands of different form")
    terms = x.nominal.shape[-1]
    rho_x, rho_y = x.over(x.rho), y.over(y.rho)
    moved = x.nominal.norm(dim=-1, keepdim=True) * rho_y + rho_x * y.nominal.norm(dim=-2, keepdim=True) + rho_x * rho_y
    size = torch.minimum(at_most(x.size @ y.size + moved), at_most(x.most @ y.most))
    cast = torch.zeros_like(size)
    if len(operands) == 1:
        cast = at_most(dx @ y.most if dx.dim() else x.most @ dy)
    result = size if len(operands) == 2 else (x.nominal @ y.nominal).abs() + moved
    largest = torch.maximum(*(part.most.reshape(len(part.nominal), -1).amax(1) for part in (x, y)))
    error = fmt.sum(size + cast, terms, result + cast) + cast
    return fmt.safe(error, torch.maximum(size, operands[0].over(largest.expand(len(size)))))


# Functions of a library: what is assumed of them stands in each docstring.


def _entrywise(*targets: Any, size: Callable[[Tensor], Tensor]) -> None:
    """Registers a function of a library whose implementation is off by at most 4 ulp of size(|x|) and an underflow."""

    def answer(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
        x = operands[0].most
        return fmt.safe(fmt.function(size(x)), x)

    rounding(*targets)(answer)


# x·½(1 + erf), x/(1 + e⁻ˣ), x·tanh(log(1 + eˣ)): a few ulp of |x|, as what is close to 0 or 1 is rounded absolutely.
_entrywise("gelu", "silu", "mish", "hardswish", size=lambda x: x)
_entrywise("sigmoid", "hardsigmoid", size=torch.ones_like)
_entrywise("tanh", size=lambda x: x.clamp_max(1))
_entrywise(F.logsigmoid, size=lambda x: x + 1)


@rounding("softsign")
def softsign(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """x/(1 + |x|) in two operations."""
    return fmt.safe(fmt.rounded(operands[0].most.clamp_max(1), 2), operands[0].most)


@rounding("leaky_relu")
def leaky_relu(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """One product with the slope, which is rounded to the format."""
    slope = abs(float(arguments(node).get("negative_slope", 0.01)))
    return fmt.rounded(operands[0].most * slope, 3) + operands[0].most * fmt.cast(slope).item()


@rounding("elu")
def elu(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """α(eˣ − 1) for x < 0, off by at most 4 ulp of α; x itself for x > 0."""
    alpha = abs(float(arguments(node).get("alpha", 1.0)))
    return fmt.safe(fmt.function(torch.full_like(operands[0].most, alpha)), operands[0].most)


@rounding("softplus")
def softplus(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """log(1 + e^βx)/β, off by at most 4 ulp of |x| + 1/β; where βx passes torch's threshold t it jumps by e⁻ᵗ/β."""
    given = arguments(node)
    beta, threshold = float(given.get("beta", 1.0)), float(given.get("threshold", 20.0))
    if not beta > 0:
        raise NoAnswer("a negative beta")
    return fmt.function(operands[0].most + 1 / beta) + math.exp(-threshold) / beta


@rounding("softmax")
def softmax(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """exp(a_i − m)/Σ_j exp(a_j − m) for any m between the entries' largest and what online softmax has seen of it.

    The exponent is off by at most 4u(|a_i| + max|a_j|), whether computed as a difference or, for exp2, as a fused
    product; it is split into at most n factors by online softmax, each off by 4 ulp. So exp(a_i − m) has a relative
    error of at most e^ℓ − 1 with ℓ = 8u max|a| + 9(n + 1)u, the sum of n positive terms one of e^ℓ(1 + γ_n) − 1, and
    p_i one of e^(2ℓ + 2γ_(2n + EXTRA) + γ_2) − 1, with u and the first γ those inside an operation and the second that
    of the format, to which P may be cast before its product with the values too. In the deviation of a row by w, p_i
    grows by at most exp(max w − min w) ≤ exp(√2 ρ). Masked entries, −∞, are 0 exactly.
    """
    given = arguments(node)
    if given.get("dim") is None or given.get("dtype") is not None:
        raise NoAnswer("softmax without dim, or in another format")
    axis = given["dim"] % len(node.shape) + 1
    x = operands[0]
    masked = x.nominal == -math.inf
    length = x.nominal.shape[axis]
    size = torch.where(masked, 0.0, x.most).amax(axis, keepdim=True)
    loss = 8 * fmt.sum_unit * size + 9 * (length + 1) * fmt.sum_unit
    relative = torch.expm1((2 * loss + 2 * fmt.sum_gamma(2 * length + EXTRA) + fmt.gamma(2)).clamp_max(700.0))
    grown = torch.softmax(x.nominal, axis) * torch.exp((math.sqrt(2) * x.over(x.rho)).clamp_max(700.0))
    error = grown.clamp_max(1.0) * relative + 4 * (length + EXTRA) * fmt.smallest
    return torch.where(masked, 0.0, fmt.safe(error, size.expand(error.shape)))


# Normalisations. Tokens are the last axis here.


@dataclass(frozen=True)
class _Centred:
    """Tokens, as a rule less their mean, in the deployed format.

    Attributes:
        size: bounds on the exact |c_i|, shape (N, ..., d).
        error: bounds on the errors of the c_i.
        low, high: bounds on the exact ‖c‖, shape (N, ..., 1).
        square: a bound on Σ z_i² of the deployed tokens.
    """

    size: Tensor
    error: Tensor
    low: Tensor
    high: Tensor
    square: Tensor

    @classmethod
    def without(cls, tokens: Tensor, rho: Tensor, most: Tensor) -> _Centred:
        """Tokens as they are, for projections that take no mean off; arguments as for :meth:`of`."""
        length = tokens.norm(dim=-1, keepdim=True)
        square = torch.minimum((length + rho).square(), most.square().sum(-1, keepdim=True))
        return cls(most, torch.zeros_like(most), (length - rho).clamp_min(0), square.sqrt(), square)

    @classmethod
    def of(cls, tokens: Tensor, rho: Tensor, most: Tensor, terms: int, fmt: Format) -> _Centred:
        """A mean is off by what :meth:`Format.sum` says.

        Args:
            tokens: nominal z, shape (N, ..., d).
            rho: how far z can move, to broadcast.
            most: bounds on |z_i|.
            terms: d for sums in any order; 4d where the mean may be made by updates (Welford).
            fmt: the deployed format.
        """
        d = tokens.shape[-1]
        centred = tokens - tokens.mean(-1, keepdim=True)
        length = centred.norm(dim=-1, keepdim=True)
        total = torch.minimum(tokens.abs().sum(-1, keepdim=True) + math.sqrt(d) * rho, most.sum(-1, keepdim=True))
        square = torch.minimum((tokens.norm(dim=-1, keepdim=True) + rho).square(), most.square().sum(-1, keepdim=True))
        size = torch.minimum(centred.abs() + rho, most + total / d)
        mean = tokens.mean(-1, keepdim=True).abs() + rho / math.sqrt(d)
        mean_error = fmt.sum(total / d, terms, mean)
        error = fmt.safe(mean_error * (1 + 2 * fmt.unit) + fmt.rounded(size), total.expand(size.shape))
        return cls(size, error, (length - rho).clamp_min(0), torch.minimum(length + rho, square.sqrt()), square)


def _affine(size: Tensor, error: Tensor, weight: Tensor | None, bias: Tensor | None, fmt: Format) -> Tensor:
    """The error of weight · ŷ + bias with |y| ≤ size, |ŷ − y| ≤ error."""
    if weight is not None:
        exact, cast = weight.detach().double().abs(), fmt.cast(weight)
        error = error * (exact + cast) + size * cast
        size = size * exact
        error = error + fmt.rounded(size + error)
    if bias is not None:
        exact, cast = bias.detach().double().abs(), fmt.cast(bias)
        error = error + cast
        error = error + fmt.rounded(size + error + exact)
    return error


def _lengths(x: Tensor, most: Tensor, rho: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """How short the vectors along an axis can be, and bounds on their squared lengths, both with that axis kept."""
    nominal = x.norm(dim=axis, keepdim=True)
    square = torch.minimum((nominal + rho).square(), most.square().sum(axis, keepdim=True))
    return (nominal - rho).clamp_min(0), square


def _inverse_root(off: Tensor, fmt: Format) -> Tensor:
    """The relative error of 1/√y, and of a product with it, where y has a relative error of at most ``off`` < ½.

    |(1 + τ)^(−½) − 1| ≤ |τ|/2 + τ² for |τ| ≤ ½, by its series; then the library's function and two roundings.
    """
    first = torch.where(off < 0.5, off / 2 + off.square(), math.inf)
    second = fmt.library + fmt.gamma(2)
    return first + second + first * second


def _standardized(tokens: Tensor, rho: Tensor, most: Tensor, eps: float, fmt: Format) -> tuple[Tensor, Tensor]:
    """Bounds on |x̂_i| and on its error, x̂ = c/s with s² = ‖c‖²/d + eps.

    A kernel may compute x/s − μ/s, or scale x and add one constant: these roundings are relative to |x| + |μ|.

    The variance, by two passes, by updates (Welford), or as E[z²] − E[z]², is off by at most
    2(γ_(4d + EXTRA) + γ_4) E[z²], the first γ that of the arithmetic inside an operation. Then :func:`_inverse_root`.
    """
    d = tokens.shape[-1]
    centred = _Centred.of(tokens, rho, most, 4 * d, fmt)
    mean = most.mean(-1, keepdim=True)
    shifted = fmt.sum_gamma(3) * (most + mean)
    least = centred.low.square() / d + eps
    off = 2 * (fmt.sum_gamma(4 * d + EXTRA) + fmt.gamma(4)) * centred.square / d
    t = _inverse_root((off + fmt.cast(eps).item() + 4 * (d + EXTRA) * fmt.smallest) / least + fmt.gamma(1), fmt)
    inverse = least.rsqrt()
    size = torch.minimum(centred.size * inverse, torch.full_like(inverse, math.sqrt(d)))
    error = ((centred.error + shifted) * (1 + t) + centred.size * t) * inverse
    error = error + fmt.rounded(size + error)
    return size, fmt.safe(error, centred.square.expand(error.shape))


@rounding("layer_norm")
def layer_norm(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`_standardized` over the normalised axes, then scale and bias."""
    given = arguments(node)
    dims = len(given["normalized_shape"])
    x = operands[0]
    tokens, most = x.nominal.flatten(-dims), x.most.flatten(-dims)
    rho = x.rho.reshape(-1, *[1] * (tokens.dim() - 1))
    size, error = _standardized(tokens, rho, most, float(given.get("eps", 1e-5)), fmt)
    weight, bias = (None if given.get(k) is None else given[k].flatten() for k in ("weight", "bias"))
    return _affine(size, error, weight, bias, fmt).reshape(x.nominal.shape)


@rounding("rms_norm")
def rms_norm(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """weight ∘ z/√(mean z² + eps). A mean of squares is off by a relative γ, as its terms have one sign."""
    given = arguments(node)
    if given.get("eps") is None:
        raise NoAnswer("an eps that depends on the format")
    dims, eps = len(given["normalized_shape"]), float(given["eps"])
    x = operands[0]
    tokens, most = x.nominal.flatten(-dims), x.most.flatten(-dims)
    d = tokens.shape[-1]
    low, square = _lengths(tokens, most, x.rho.reshape(-1, *[1] * (tokens.dim() - 1)), -1)
    least = low.square() / d + eps
    underflow = fmt.cast(eps).item() + 4 * (d + EXTRA) * fmt.smallest
    t = _inverse_root(fmt.sum_gamma(d + EXTRA) + fmt.gamma(4) + underflow / least, fmt)
    size = torch.minimum(most * least.rsqrt(), torch.full_like(least, math.sqrt(d)))
    error = fmt.safe(size * t + fmt.rounded(size * (1 + t), 2), square.expand(size.shape))
    weight = None if given.get("weight") is None else given["weight"].flatten()
    return _affine(size, error, weight, None, fmt).reshape(x.nominal.shape)


@rounding("normalize")
def normalize(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """x/max(‖x‖, eps). With n = ‖x‖ and a the underflow of the sum of squares, n² + a has a root within min(√a, a/n)
    of n; the γ of the sum, of which the root takes half, and the root's own error are relative to n."""
    given = arguments(node)
    eps = float(given.get("eps", 1e-12))
    if given.get("p", 2.0) != 2.0 or not isinstance(given.get("dim", 1), int):
        raise NoAnswer("another norm than that along one axis")
    x = operands[0]
    axis = given.get("dim", 1) % len(node.shape) + 1
    low, square = _lengths(x.nominal, x.most, x.over(x.rho), axis)
    least = low.clamp_min(eps)
    count = x.nominal.shape[axis] + EXTRA
    underflow = 4 * count * fmt.smallest
    lost = torch.minimum(torch.full_like(low, math.sqrt(underflow)), underflow / low) + fmt.cast(eps).item()
    off = fmt.sum_gamma(count) + fmt.library + fmt.gamma(2) + 2 * lost / least
    t = torch.where(off < 0.5, off / (1 - off), math.inf)
    size = torch.minimum(x.most / least, torch.ones_like(least))
    return fmt.safe(size * t + fmt.rounded(size * (1 + t), 2), torch.maximum(square.expand(size.shape), 1 / least))


@rounding("norm", "linalg_vector_norm")
def length(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """‖x‖ over some axes: a relative γ of the sum of squares and the root's own, and the root of what underflows."""
    given = arguments(node)
    if given.get("ord", given.get("p", 2)) not in ("fro", 2, None):
        raise NoAnswer("another norm than ‖·‖₂")
    x = operands[0]
    count = math.prod(x.nominal.shape[1:]) // max(1, math.prod(node.shape)) + EXTRA
    size = _replay(node, [x.most])
    size = torch.minimum(size, _replay(node, [x.nominal]) + x.rho.reshape(-1, *[1] * (size.dim() - 1)))
    error = size * (fmt.sum_gamma(count) + fmt.library) + math.sqrt(4 * count * fmt.smallest)
    return fmt.safe(error + fmt.rounded(size + error), size.square())


@rounding("rsqrt")
def inverse_root(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """1/√x for x in the format's normal range: off by at most 4 ulp, and torch rounds the root to the format first."""
    x = operands[0]
    low = x.nominal - x.over(x.rho)
    normal = low >= torch.finfo(fmt.dtype).smallest_normal
    size = low.clamp_min(fmt.smallest).rsqrt()
    return torch.where(normal, fmt.function(size) + fmt.rounded(size, 2), math.inf)


@rounding("group_norm")
def group_norm(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`_standardized` over the channels of a group and all positions, then scale and bias by channel."""
    given = arguments(node)
    x = operands[0]
    shape = (*x.nominal.shape[:2], given["num_groups"], -1)
    rho = x.rho.reshape(-1, 1, 1, 1)
    eps = float(given.get("eps", 1e-5))
    size, error = _standardized(x.nominal.reshape(shape), rho, x.most.reshape(shape), eps, fmt)
    form = (-1, *[1] * (x.nominal.dim() - 3))
    weight, bias = (None if given.get(k) is None else given[k].reshape(form) for k in ("weight", "bias"))
    return _affine(size.reshape(x.nominal.shape), error.reshape(x.nominal.shape), weight, bias, fmt)


@rounding("batch_norm")
def batch_norm(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """(x − μ)γ/√(var + eps) + β in this order, or as αx + (β − αμ) with α = γ/√(var + eps).

    Either way α is off by a relative 10u and what the casts of var, eps and γ do, and the sum by 4u of its terms.
    """
    given = arguments(node)
    x = operands[0]
    form = (-1, *[1] * (x.nominal.dim() - 3))

    def constant(name: str, default: float) -> tuple[Tensor, Tensor]:
        value = given.get(name)
        value = torch.full_like(given["running_var"], default) if value is None else value
        return value.detach().double().abs().reshape(form), fmt.cast(value).reshape(form)

    (mean, d_mean), (var, d_var) = constant("running_mean", 0.0), constant("running_var", 1.0)
    (gain, d_gain), (shift, d_shift) = constant("weight", 1.0), constant("bias", 0.0)
    eps = float(given.get("eps", 1e-5))
    t = (d_var + fmt.cast(eps).item() + 4 * fmt.smallest) / (var + eps)
    t = torch.where(t < 0.5, t, math.inf) + 16 * fmt.unit
    alpha = gain * (var + eps).rsqrt()
    d_alpha = (gain * t + d_gain * (1 + t)) * (var + eps).rsqrt() + 4 * fmt.smallest
    size = (alpha + d_alpha) * (x.most + mean + d_mean) + shift + d_shift
    error = d_alpha * (x.most + mean) + (alpha + d_alpha) * d_mean + d_shift + fmt.rounded(size, 8)
    return fmt.safe(error, torch.maximum(size, x.most))


@rounding(SmoothProject, LayerProject, RmsSmoothProject, RmsLayerProject, GroupSmoothProject, GroupLayerProject)
def projection(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """weight ∘ c·f + bias for centred tokens c, f = 1/√(1 + ‖c‖²/R²) or R/√max(‖c‖², R²) = 1/√max(‖c‖²/R², 1).

    Tokens are the vectors of channels; in place of GroupNorm, all entries of a group of channels; in place of RMSNorm
    they are not centred.

    Let ĉ be off by b in norm and Q = ‖c‖²/R². The error of Q̂ is at most (2‖c‖b + b²)/R² + γ‖ĉ‖²/R², with γ for a sum of
    d squares and 6 roundings to the format, so relative to max(Q, 1) at most 2b/R + b²/R² + γ(1 + b/R)², because
    ‖c‖/R ≤ max(1, Q). The radius has its own relative cast error, which enters Q twice, and f once more in
    LayerProject, with another product. Then :func:`_inverse_root`.
    """
    module: Any = node.function
    grouped = isinstance(module, (GroupSmoothProject, GroupLayerProject))
    axis = 2 if module.channels_first else -1
    x = operands[0]
    if grouped:
        shape = (*x.nominal.shape[:2], module.groups, -1)
        tokens, most, rho = x.nominal.reshape(shape), x.most.reshape(shape), x.rho.reshape(-1, 1, 1, 1)
    else:
        tokens, most, rho = x.nominal.movedim(axis, -1), x.most.movedim(axis, -1), x.over(x.rho)
    d, radius = tokens.shape[-1], float(module.radius)
    centred = _Centred.of(tokens, rho, most, d, fmt) if module.centred else _Centred.without(tokens, rho, most)
    away = centred.error.norm(dim=-1, keepdim=True) / radius
    gamma = fmt.sum_gamma(d + EXTRA) + fmt.gamma(6)
    off = 2 * away + away.square() + gamma * (1 + away).square()
    off = off + 6 * fmt.cast(radius).item() / radius + 4 * (d + EXTRA) * fmt.smallest * (1 + 1 / radius**2)
    t = _inverse_root(off, fmt)
    ratio = centred.low / radius
    if isinstance(module, SmoothProject):
        factor = (1 + ratio.square()).rsqrt()
    else:
        factor = ratio.clamp_min(1).reciprocal()
    size = torch.minimum(centred.size * factor, torch.full_like(factor, radius))
    error = (centred.error * (1 + t) + centred.size * t) * factor
    error = error + fmt.rounded(size + error)
    peak = (centred.high + centred.error.norm(dim=-1, keepdim=True)).square() * max(1.0, 1 / radius**2)
    peak = torch.maximum(peak, torch.full_like(peak, max(radius**2, radius**-2)))
    error = fmt.safe(error, peak.expand(error.shape))
    if grouped:
        form = (-1, *[1] * (x.nominal.dim() - 3))
        weight, bias = (None if part is None else part.reshape(form) for part in (module.weight, module.bias))
        return _affine(size.reshape(x.nominal.shape), error.reshape(x.nominal.shape), weight, bias, fmt)
    return _affine(size, error, module.weight, module.bias, fmt).movedim(-1, axis)
