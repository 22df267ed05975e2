"""Reads the arguments of torch operations by name, for all rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lipcert.bounds._registry import NoAnswer
from lipcert.graph import Node, map_nodes

Known = TypeVar("Known")

# Positional arguments in order; after * the keyword-only ones. Operations on one line share the signature.
# tests/test_arguments.py compares this table with torch's own signatures.
_SIGNATURES = """
abs neg relu relu6 silu mish sigmoid tanh hardsigmoid hardswish softsign log_sigmoid square sqrt rsqrt: input inplace
add sub rsub: input other * alpha
mul matmul max min maximum minimum: input other
div: input other * rounding_mode
pow: input exponent
addcmul: input tensor1 tensor2 * value
sum mean: input dim keepdim * dtype
amax amin argmax argmin: input dim keepdim
var: input dim unbiased keepdim * correction
norm: input p dim keepdim out dtype
linalg_vector_norm: input ord dim keepdim * dtype
softmax: input dim * dtype _stacklevel
logsumexp: input dim keepdim
linear: input weight bias
conv1d conv2d conv3d: input weight bias stride padding dilation groups
conv_transpose1d conv_transpose2d conv_transpose3d: input weight bias stride padding output_padding groups dilation
batch_norm: input running_mean running_var weight bias training momentum eps
layer_norm: input normalized_shape weight bias eps cudnn_enable
group_norm: input num_groups weight bias eps cudnn_enabled
rms_norm: input normalized_shape weight eps
normalize: input p dim eps out
avg_pool1d: input kernel_size stride padding ceil_mode count_include_pad
avg_pool2d avg_pool3d: input kernel_size stride padding ceil_mode count_include_pad divisor_override
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d: input output_size
max_pool1d max_pool2d max_pool3d: input kernel_size stride padding dilation ceil_mode return_indices
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d: input output_size return_indices
clamp: input min max
hardtanh: input min_val max_val inplace
leaky_relu: input negative_slope inplace
elu: input alpha inplace
softplus: input beta threshold
gelu: input * approximate
dropout: input p training inplace
pad: input pad mode value
constant_pad_nd: input pad value
cat stack: tensors dim
lstm lstm_last_hidden lstm_last_cell: input hx params has_biases num_layers dropout train bidirectional batch_first
setitem: input index value
"""

# Other names that torch accepts for the same arguments.
SYNONYMS = {
    "axis": "dim",
    "keepdims": "keepdim",
    "self": "input",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
    "mat2": "other",
}


def _signatures() -> dict[str, tuple[tuple[str, ...], frozenset[str]]]:
    found = {}
    for line in _SIGNATURES.strip().splitlines():
        operations, _, names = line.partition(":")
        positional, _, named = names.partition("*")
        known = tuple(positional.split())
        found.update(dict.fromkeys(operations.split(), (known, frozenset((*known, *named.split())))))
    return found


# For each operation: the names of its positional arguments in order, and all names.
SIGNATURES = _signatures()


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operation by name.

    Raises:
        NoAnswer: an argument is not in the signature, or is given twice.
    """
    positional, known = SIGNATURES[str(node.op)]
    given = dict(zip(positional, node.args, strict=False))
    if len(node.args) > len(positional):
        raise NoAnswer(f"{len(node.args)} positional arguments")
    for name, argument in named(node.kwargs).items():
        if name in given or name not in known:
            raise NoAnswer(f"the argument {name}")
        given[name] = argument
    return given


def named(given: Any) -> dict[str, Any]:
    """Keyword arguments under their canonical names.

    Raises:
        NoAnswer: two names for the same argument.
    """
    found = {SYNONYMS.get(name, name): argument for name, argument in given.items()}
    if len(found) != len(given):
        raise NoAnswer("two names for one argument")
    return found


def by_operand(node: Node, known: Sequence[Known]) -> Callable[[Node], Known]:
    """A function from operand to its entry of ``known``, which is in the order of ``node.operands``.

    Call it once for each argument, in any order. For an operand that is passed twice, each call returns one of its
    entries.
    """
    left = list(zip(node.operands, known, strict=True))
    return lambda operand: left.pop([u for u, _ in left].index(operand))[1]


def replayed(node: Node, *tensors: Tensor) -> Tensor:
    """Evaluates the operation at other values of its operands, image by image.

    Args:
        node: the operation.
        tensors: one for each distinct operand, in the order of ``node.operands``; shape (N, *shape).
    """
    operands = list(dict.fromkeys(node.operands))

    def one(*given: Tensor) -> Tensor:
        known = dict(zip(operands, given, strict=True))
        args, kwargs = map_nodes(known.__getitem__, (node.args, dict(node.kwargs)))
        return node.function(*args, **kwargs)

    return torch.vmap(one)(*tensors)


def per_axis(value: Any, dims: int) -> tuple[int, ...]:
    """A window argument as one number per axis."""
    return (value,) * dims if isinstance(value, int) else tuple(value if len(value) == dims else value * dims)
