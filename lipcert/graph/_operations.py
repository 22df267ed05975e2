"""The names of torch operations and of their arguments: the table that a capture reads."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

# Other names of an operation. Leading and trailing underscores (in place, dunder) are stripped before the look-up.
_NAMES = """
add: iadd
sub: isub subtract
mul: imul multiply
div: truediv idiv itruediv divide true_divide
pow: ipow
neg: negative
matmul: bmm
clamp: clip clamp_min
reshape: view view_as reshape_as unflatten flatten squeeze unsqueeze ravel
transpose: swapaxes swapdims mT t
cat: concat concatenate
expand: expand_as broadcast_to
identity: contiguous positive clone detach to float double half bfloat16 type type_as cpu cuda
dropout: dropout2d
getitem: select narrow
"""  # the limit is the second argument of clamp and clamp_min
_CANONICAL = {
    other: name for name, _, others in (line.partition(": ") for line in _NAMES.split("\n")) for other in others.split()
}
# What a capture itself has to recognise.
COPY, PART, PIECE = "identity", "part", "getitem"
# Operations whose ``eps``, if it is None, is the machine epsilon of the operand's type.
EPS_OF_TYPE = frozenset(("rms_norm",))
# Operations that only move or clip the entries of their operand, and those whose results are probabilities, of
# independent labels or of classes.
PASSING = frozenset(("identity", "dropout", "reshape", "permute", "flip", "roll", "getitem", "clamp"))
OF_LABELS = ("sigmoid", "special_expit", "hardsigmoid", "logsigmoid", "log_sigmoid")
OF_CLASSES = ("softmax", "log_softmax")
SQUASHING = frozenset((*OF_LABELS, *OF_CLASSES, "tanh"))
# Products with weights, as of a classifier.
PRODUCTS = ("linear", "addmm", "baddbmm", "bilinear", "einsum", "matmul", "conv1d", "conv2d", "conv3d")
# Modules whose functions work on lists of tensors, or in which users can register functions.
_ELSEWHERE = ("torch._ops", "torch.foreach")
# Functions whose arguments, or their order, differ from the function of the same name in torch.nn.functional.
_OF_ANOTHER_FORM = frozenset((torch.batch_norm,))

# Positional arguments in order; after * the keyword-only ones. Operations on one line share the signature.
# tests/test_arguments.py compares this table with torch's own signatures.
_SIGNATURES = """
abs neg relu silu sigmoid tanh hardsigmoid hardswish log_sigmoid square sqrt rsqrt: input inplace
exp: input
add sub rsub: input other * alpha
mul matmul max min maximum minimum: input other
div: input other * rounding_mode
pow: input exponent
addcmul: input tensor1 tensor2 * value
sum mean: input dim keepdim * dtype
amax amin argmax argmin: input dim keepdim
var: input dim unbiased keepdim * correction
norm: input p dim keepdim out dtype
softmax: input dim * dtype _stacklevel
prelu: input weight
linear: input weight bias
conv1d conv2d conv3d: input weight bias stride padding dilation groups
conv_transpose2d: input weight bias stride padding output_padding groups dilation
batch_norm: input running_mean running_var weight bias training momentum eps
layer_norm: input normalized_shape weight bias eps cudnn_enable
group_norm: input num_groups weight bias eps cudnn_enabled
rms_norm: input normalized_shape weight eps
normalize: input p dim eps out
avg_pool1d: input kernel_size stride padding ceil_mode count_include_pad
avg_pool2d: input kernel_size stride padding ceil_mode count_include_pad divisor_override
adaptive_avg_pool2d: input output_size
max_pool2d: input kernel_size stride padding dilation ceil_mode return_indices
adaptive_max_pool2d: input output_size return_indices
clamp: input min max
hardtanh: input min_val max_val inplace
leaky_relu: input negative_slope inplace
gelu: input * approximate
dropout: input p training inplace
pad: input pad mode value
cat stack: tensors dim
lstm lstm_last_hidden lstm_last_cell: input hx params has_biases num_layers dropout train bidirectional batch_first
setitem: input index value
"""
# The same for operations whose rules read their arguments by place.
_PLACED = """
ravel t detach contiguous clone: input
scaled_dot_product_attention: query key value attn_mask dropout_p is_causal
select: input dim index
narrow: input dim start length
index_select: input dim index
flatten: input start_dim end_dim
unflatten: input dim sizes
reshape view: input shape
squeeze unsqueeze unbind: input dim
permute tile flip: input dims
movedim: input source destination
transpose: input dim0 dim1
swapaxes: input axis0 axis1
swapdims: input dim0 dim1
roll: input shifts dims
split: input split_size_or_sections dim
chunk: input chunks dim
broadcast_to expand: input size
expand_as view_as reshape_as type_as: input other
repeat_interleave: input repeats dim
interpolate: input size scale_factor mode align_corners recompute_scale_factor antialias
unfold: input kernel_size dilation padding stride
unfold_axis: input dimension size step
fold: input output_size kernel_size dilation padding stride
einsum: equation
pixel_unshuffle: input downscale_factor
where: condition input other
masked_fill: input mask value
"""

# Other names that torch accepts for the same arguments.
SYNONYMS = {
    "axis": "dim",
    "keepdims": "keepdim",
    "self": "input",
    "tensor": "input",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
    "mat2": "other",
}


def _signatures(text: str) -> dict[str, tuple[tuple[str, ...], frozenset[str]]]:
    signatures = {}
    for line in text.strip().splitlines():
        operations, _, names = line.partition(":")
        positional, _, named = names.partition("*")
        places = tuple(positional.split())
        signatures.update(dict.fromkeys(operations.split(), (places, frozenset((*places, *named.split())))))
    return signatures


# For each operation: the names of its positional arguments in order, and all names.
SIGNATURES = _signatures(_SIGNATURES)
_PLACES = {name: places for name, (places, _) in {**SIGNATURES, **_signatures(_PLACED)}.items()}


def canonical(function: Callable[..., Any]) -> Any:
    """The canonical name of a torch operation, by which rules are found.

    ``torch.add``, ``Tensor.__iadd__`` and ``+`` are all "add". A function that is not torch's own, made overridable
    with ``torch.overrides`` or registered with ``torch.library``, is its own key. So it cannot be mistaken for a torch
    operation of the same name.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__name__", None)
    if module is None:
        ours = not isinstance(function, types.FunctionType)  # methods of Tensor have no module
    else:
        ours = module.split(".")[0] in ("torch", "_operator", "builtins") and not module.startswith(_ELSEWHERE)
    if name is None or not ours or function in _OF_ANOTHER_FORM:
        return function
    bare = name.strip("_")
    if bare == "unfold" and module is None:  # sliding windows along one axis, unlike torch.nn.functional.unfold
        return "unfold_axis"
    return _CANONICAL.get(bare, bare)


def placed(
    function: Callable[..., Any],
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operand: Callable[[Any], bool],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Passes a call's arguments by place, as far as they follow each other without a gap.

    ``torch.div(other=y, input=x)`` becomes ``torch.div(x, y)``. Arguments after a gap keep their names, in the order of
    the signature. So operands are in the same order however a network names them. Of functions and modules that are not
    torch's own only the arguments up to the last operand are placed, since rules of users may read the others by name.
    """
    if not kwargs:
        return args, kwargs
    ours = isinstance(op, str)
    places = _places(function, op)
    unplaced = {SYNONYMS.get(name, name) if name not in places else name: name for name in kwargs}
    if len(unplaced) != len(kwargs):
        return args, kwargs
    by_place = [*args]
    for name in places[len(args) :]:
        if name not in unplaced or not (ours or any(operand(kwargs[other]) for other in unplaced.values())):
            break
        by_place.append(kwargs[unplaced.pop(name)])
    order = sorted(unplaced, key=lambda name: places.index(name) if name in places else len(places))
    return tuple(by_place), {unplaced[name]: kwargs[unplaced[name]] for name in order}


def _places(function: Callable[..., Any], op: Any) -> tuple[str, ...]:
    """The names of a function's positional arguments in order; empty where they are not known."""
    if isinstance(op, str):
        bare = getattr(function, "__name__", op).strip("_")
        places = _PLACES.get(op if op == "unfold_axis" else bare, _PLACES.get(op))
        if places is not None:
            return places
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in function without a signature
        return ("input",) if isinstance(op, str) else ()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
