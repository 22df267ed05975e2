"""Linear layers and matrix products of two values.

Their norms come from lipcert.norms; a preceding scale is multiplied into the weights first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds._arguments import arguments, by_operand
from lipcert.bounds._box import operator
from lipcert.bounds._jacobian import Bounds, bilinear, evenly, lengths
from lipcert.bounds._registry import (
    Call,
    NoAnswer,
    Schur,
    Tag,
    box,
    in_one_operand,
    in_two_operands,
    jacobian,
    rounding,
    rule,
)
from lipcert.bounds._remainder import Against, Bilinear, Contracted, Form, per_image, remainder
from lipcert.bounds._rounding import Operand
from lipcert.bounds._value import Scale, Value, largest, largest_row_norm, largest_row_sum, vector_norm
from lipcert.graph import Node
from lipcert.norms import Operator, verified_norms
from lipcert.numerics import REAL, Format, Upper, at_most, detached, l2_norm

# Sums over the last axis of the first factor.
_MATRIX = Schur(magnitudes=True, terms=evenly(lambda node: arguments(node)["input"].shape[-1]))


@rule("linear", linear=in_one_operand, schur=_MATRIX, tags=Tag.DENSE)
def dense(call: Call, x: Value, weight: Tensor, bias: Tensor | None = None) -> Value:
    """x ↦ Wx + b along the last axis: constant ‖W‖₂; an entry of Wx is at most ‖w_o‖₁ max|x| and ‖w_o‖₂ ‖x‖₂."""
    if weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        raise NoAnswer("a weight that is no matrix, or a bias that is no vector")
    shift = largest(bias) if bias is not None else Upper(0)
    magnitude = min(largest_row_sum(weight) * x.magnitude, largest_row_norm(weight) * x.row_norm(-1)) + shift
    inner, matrix, offset, error = x, Operator(weight), None, Upper(0)
    if isinstance(x.map, Scale) and x.base is not None and (folded := matrix.after(x.map.along(-1))) is not None:
        inner, matrix = x.base, folded
        if x.offset is not None:
            offset, error = constant_part(detached(weight), x.offset.to(weight.device), x.offset_error)
    else:
        offset = weight.new_zeros(weight.shape[0]).double()
    if offset is not None and bias is not None:
        offset = offset + detached(bias).double()
        error = error + (vector_norm(offset) + vector_norm(bias)) * 2.0**-52
    return Value(call.shape, magnitude=magnitude, base=inner, map=matrix, offset=offset, offset_error=error)


def constant_part(weight: Tensor, offset: Tensor, error: Upper) -> tuple[Tensor, Upper]:
    """W·offset, and a bound on the norm of its error, from rounding and from the error of the offset.

    Inner products of length n have an error of at most (n + 1) 2⁻⁵³ |W||offset|, in whichever order they are summed.
    """
    exact = weight.double()
    rounding = vector_norm(exact.abs() @ offset.abs()) * ((weight.shape[1] + 4) * 2.0**-52)
    return exact @ offset, rounding + error * vector_norm(weight)


box("linear", "matmul")(operator)


def matrix_rounding(
    node: Node,
    x: Operand,
    weight: Tensor,
    bias: Tensor | None,
    terms: int,
    apply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    rows: Callable[[Tensor, Callable[..., Tensor]], Tensor],
    fmt: Format,
) -> Tensor:
    """The error of Ŵx̂ + b̂ with sums of n terms: :meth:`Format.sum`, plus |Ŵ − W||x̂| + |b̂ − b| for the cast
    constants.

    Kernels add the bias inside the sum, or to a product that they have rounded: the sum of this and the bias is rounded
    again, and may be far smaller. For row i, |W||x̂| ≤ |W||x| + ‖w_i‖ρ and |Wx̂| ≤ |Wx| + ‖w_i‖ρ by the Cauchy–Schwarz
    inequality. |W| times bounds on the entries of |x̂| is a bound too. For float64, whose errors are tiny,
    |W||x̂| ≤ ‖w_i‖₁ max|x̂| is enough, and takes no further product.

    This assumes that no part of the sum is rounded to the format: no split sums with reduced precision.
    """
    weight = weight.detach().double()
    bias = None if bias is None else bias.detach().double()
    reach = x.over(x.rho)
    largest = F.pad(x.most.reshape(len(x.nominal), -1), (0, 1)).amax(1).reshape(reach.shape)  # 0 without entries

    def sizes(weight: Tensor, bias: Tensor | None) -> Tensor:
        """|W||x̂| + |b|."""
        if fmt == REAL:
            sums = rows(weight, torch.sum)
            shift = 0.0 if bias is None else bias.reshape(-1, *[1] * (sums.dim() - 1))
            return at_most((sums * largest + shift).expand(len(x.nominal), *node.shape))
        near = at_most(apply(x.size, weight, bias) + rows(weight, l2_norm) * reach)
        return torch.minimum(near, at_most(apply(x.most, weight, bias)))

    size = sizes(weight.abs(), None if bias is None else bias.abs())
    cast = sizes(fmt.cast(weight), None if bias is None else fmt.cast(bias))
    stored = None
    if fmt != REAL:
        product = apply(x.nominal, weight, None)
        result = product if bias is None else apply(x.nominal, weight, bias)
        stored = torch.maximum(product.abs(), result.abs()) + rows(weight, l2_norm) * reach + cast
    return fmt.safe(fmt.sum(size + cast, terms, stored) + cast, torch.maximum(size, largest))


def constant_arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operation whose weight and bias are constants."""
    args = arguments(node)
    if isinstance(args["weight"], Node) or isinstance(args.get("bias"), Node):
        raise NoAnswer("weights that depend on the image")
    return args


@rounding("linear")
def linear_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """:func:`matrix_rounding`, sums of ``in_features`` products."""
    args = constant_arguments(node)
    return matrix_rounding(
        node, operands[0], args["weight"], args.get("bias"), args["weight"].shape[-1], F.linear,
        lambda weight, norm: norm(weight, -1), fmt,
    )  # fmt: skip


@rule("matmul", linear=in_one_operand, schur=_MATRIX, tags=Tag.MATRIX_PRODUCT)
def matmul(call: Call, x: Any, y: Any) -> Value:
    """δ(XY) = δX Y + X' δY, so ‖δ(XY)‖_F ≤ ‖δX‖_F ‖Y‖₂ + ‖X‖₂ ‖δY‖_F.

    If X = softmax(A), a row of the first term is Σ_j P_ij (δA_ij − δĀ_i) v_j, the covariance under P of δA_i and v.
    That is at most std_P(δA_i) · max_j ‖v_j‖ ≤ √½ ‖δA_i‖ max_j ‖v_j‖, because diag(p) − ppᵀ ⪯ ½. The constant of X is
    half of that of A, so this is √2 max_j ‖v_j‖ times the constant of X, without the factor √n in ‖V‖₂.
    """
    if len(x.shape) < 2 or len(y.shape) < 2:
        raise NoAnswer("vectors")
    if not isinstance(x, Value):  # it multiplies every column
        norm = Operator(x.reshape(-1, *x.shape[-2:])).norm
        return Value(call.shape, y.lip * norm * _copies_matmul(call, y), magnitude=y.row_norm(-2) * norm)
    if not isinstance(y, Value):
        if y.dim() == 2:
            return dense(call, x, y.mT)
        # Operator takes a stack of matrices and bounds the largest of their norms.
        norm = Operator(y.reshape(-1, *y.shape[-2:])).norm
        size = x.row_norm(-1) * norm
        return Value(call.shape, x.lip * norm * _copies_matmul(call, x), magnitude=size, rows=(-1, size))
    right = y.matrix_norm()
    if x.stochastic:
        right = min(right, y.row_norm(-1) * Upper(2).sqrt())
    lip = x.lip * right * _copies_matmul(call, x) + x.matrix_norm() * y.lip * _copies_matmul(call, y)
    entry = x.row_norm(-1) * y.row_norm(-2)
    if x.stochastic:
        return Value(call.shape, lip, magnitude=y.magnitude, rows=(-1, y.row_norm(-1)), floor=y.lowest)
    result = Value(call.shape, lip, magnitude=entry, rows=(-1, x.row_norm(-1) * y.matrix_norm()))
    if x.lowest >= 0:  # a column of the product is made of one column of y
        result.floor = torch.where(y.floor >= 0, 0.0, -math.inf).double()
    return result


def _copies_matmul(call: Call, x: Value) -> Upper:
    return Upper(math.prod(call.shape[:-2]) // max(1, math.prod(x.shape[:-2]))).sqrt()


@remainder("matmul")
class MatrixProduct(Bilinear):
    """XY: R = δX δY. ‖R‖_F ≤ ‖δX‖_F ‖δY‖_F over all matrices of the batch, and |⟨G, δX δY⟩| ≤ max‖G‖₂ ‖δX‖_F ‖δY‖_F.

    The deviation of an operand whose matrices are broadcast m times is √m times as large.

    Contracted: ⟨G, δX δY⟩ = ⟨G δYᵀ, δX⟩, at most ‖G δYᵀ‖_F ‖δX‖_F.
    """

    def __init__(self, node: Node, operands: Sequence[Tensor], result: Tensor):
        if len(operands) != 2:
            raise NoAnswer("three operands")
        first, second = node.operands
        if min(len(first.shape), len(second.shape)) < 2:
            raise NoAnswer("vectors")
        batch = math.prod(node.shape[:-2])
        self.used = [math.sqrt(batch / math.prod(x.shape[:-2])) for x in (first, second)]
        self.factor = math.prod(self.used)
        self.aligned = len(first.shape) == len(second.shape)

    @staticmethod
    def _spectral(direction: Tensor) -> Tensor:
        """An upper bound on the largest spectral norm among the matrices of each image, shape (N,)."""
        matrices = direction.reshape(len(direction), -1, *direction.shape[-2:])
        size = l2_norm(per_image(direction), 1)
        scaled = matrices / torch.where(size > 0, size, 1.0)[:, None, None, None]
        gram = scaled @ scaled.mT if matrices.shape[-2] <= matrices.shape[-1] else scaled.mT @ scaled
        # Eigenvalues have an error of a small multiple of 2⁻⁵³, which the lower limit makes relative.
        return size * torch.linalg.eigvalsh(gram)[..., -1].amax(1).clamp_min(1e-12).sqrt() * (1 + 1e-8)

    def against(self, direction: Tensor) -> Against:
        largest = self._spectral(direction) * self.factor
        return lambda rho: largest * rho[0] * rho[1]

    def contracted(self, direction: Tensor, rho: Sequence[Tensor], likely: Tensor | None = None) -> Contracted | None:
        if not self.aligned:
            return None
        size, norm = per_image(l2_norm(direction, (-2, -1))).amax(1), self._spectral(direction)
        x, y = self.used
        form = Form(lambda moved, g: g @ moved.mT, (direction,), norm * y, size * y, operand=1)
        return Contracted((form,), lambda rho, sizes: sizes[0] * x * rho[0])


def matmul_norm(node: Node, place: int, values: Mapping[Node, Tensor]) -> Tensor | float:
    """The largest norm of the other factor's matrices, times √m if this factor is broadcast m times."""
    operand, other = node.operands[place], values[node.operands[1 - place]]
    if other.dim() < 3 or not bool(other.isfinite().all()):
        return matmul_jacobian(node, place, values)[0]
    matrices = other.reshape(-1, *other.shape[-2:])
    batch = math.prod(node.shape[:-2]) / max(1, math.prod(operand.shape[:-2]))
    return verified_norms(matrices).reshape(len(other), -1).amax(1) * math.sqrt(max(1.0, batch))


@jacobian("matmul", covers=in_two_operands, norm=matmul_norm)
def matmul_jacobian(node: Node, place: int, values: Mapping[Node, Tensor]) -> Bounds:
    """The Frobenius norm of the other factor (Cauchy–Schwarz), times √m if this factor is broadcast m times."""
    operand, other = node.operands[place], node.operands[1 - place]
    batch = math.prod(node.shape[:-2]) / max(1, math.prod(operand.shape[:-2]))
    return bilinear(lengths(values[other]) * math.sqrt(max(1.0, batch)), sum(operand.shape) + sum(node.shape))


@rounding("matmul")
def matmul_rounding(node: Node, operands: Sequence[Operand], fmt: Format) -> Tensor:
    """XY with |X̂||Ŷ| ≤ (|X| + |δX|)(|Y| + |δY|), bounded by norms of rows of X and columns of Y, ‖δX‖ and ‖δY‖.

    If both depend on the image, the errors are relative to |X̂||Ŷ|: fused attention with the scale s may round √s q and
    √s k before their product. Their underflow meets the other factor; divided by s, because the product is multiplied
    by s later, it is at most 16 times as large for s ≥ 2⁻⁸.
    """
    args, operand_of = arguments(node), by_operand(node, operands)
    parts: list[tuple[Operand, Tensor]] = []
    for argument in (args["input"], args["other"]):
        if isinstance(argument, Node):
            operand = operand_of(argument)
            parts.append((operand, torch.zeros((), dtype=torch.float64, device=operand.nominal.device)))
        else:
            constant = argument.detach().double()
            fixed = Operand(constant[None], constant.new_zeros(1), constant.abs().amax()[None])
            parts.append((fixed, fmt.cast(constant)[None]))
    (x, dx), (y, dy) = parts
    dims = {part.nominal.dim() for part, _ in parts}
    if len(dims) != 1 and (len(operands) == 2 or operands[0].nominal.dim() < max(dims)) or min(dims) < 3:
        raise NoAnswer("operands of different form")
    terms = x.nominal.shape[-1]
    rho_x, rho_y = x.over(x.rho), y.over(y.rho)
    moved = l2_norm(x.nominal, -1, keepdim=True) * rho_y + rho_x * l2_norm(y.nominal, -2, keepdim=True) + rho_x * rho_y
    size = torch.minimum(at_most(x.size @ y.size + moved), at_most(x.most @ y.most))
    # Only a constant factor is cast; its error meets the other factor's largest entries.
    cast = torch.zeros_like(size)
    if len(operands) == 1:
        cast = at_most(dx @ y.most if dx.dim() else x.most @ dy)
    largest = torch.maximum(*(part.most.reshape(len(part.nominal), -1).amax(1) for part in (x, y)))
    if len(operands) == 2:
        error = fmt.sum(size, terms) + 16 * fmt.smallest * (x.most.sum(-1, keepdim=True) + y.most.sum(-2, keepdim=True))
    else:
        error = fmt.sum(size + cast, terms, (x.nominal @ y.nominal).abs() + moved + cast) + cast
    return fmt.safe(error, torch.maximum(size, operands[0].over(largest.expand(len(size)))))
