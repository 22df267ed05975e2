"""Calls of single operations with odd arguments, drawn from seeds, and how their bounds are attacked.

For each operation with a rule a function here draws the arguments that torch documents, at their odd values too: sizes
0 and 1, negative dimensions, keepdim, groups, dilation, ceil_mode, corrections that leave nothing to divide by, alpha
of both signs, masks that hide whole rows or everything, eps 0, negative slopes. Half of the calls name all arguments,
in the reverse order.
"""

from __future__ import annotations

import functools
import math
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipcert.bounds import Analysis, Value, analyze, key_of
from lipcert.bounds.rules.activation import ACTIVATIONS
from lipcert.bounds.testing import check_rule
from lipcert.errors import LipcertError
from lipcert.graph import evaluate
from tests.rule_attacks import applied

Draw = Callable[[random.Random], tuple[Callable[..., Any], dict[str, Any]]]

# Larger operands take long: their Jacobians are written out.
_MOST = 72
_POINTS = 4
_SLACK = 1e-9


@dataclass(frozen=True)
class Operand:
    """An argument that depends on the image: scale · pixels + shift, of a shape without the batch."""

    shape: tuple[int, ...]
    scale: float
    shift: float


@dataclass(frozen=True)
class Setting:
    """One call: an operation and its arguments, by name or by place."""

    operation: str
    function: Callable[..., Any]
    given: Mapping[str, Any]
    named: bool

    @property
    def size(self) -> int:
        """The number of pixels: one for each entry of an operand."""
        return sum(math.prod(one.shape) for one in _leaves(self.given) if isinstance(one, Operand))

    def __call__(self, x: Tensor) -> Tensor:
        """The result for an image of shape (1, 1, size), with the batch in front."""
        flat, start = x.flatten(1), 0

        def filled(tree: Any) -> Any:
            nonlocal start
            if isinstance(tree, Operand):
                entries = math.prod(tree.shape)
                part = flat[:, start : start + entries].reshape(1, *tree.shape)
                start += entries
                return part * tree.scale + tree.shift
            if isinstance(tree, (list, tuple)):
                return type(tree)(filled(item) for item in tree)
            return tree

        given = {name: filled(value) for name, value in self.given.items()}
        if self.named:
            return self.function(**dict(reversed(given.items())))
        return self.function(*given.values())

    def __str__(self) -> str:
        given = ", ".join(f"{name}={_shown(value)}" for name, value in self.given.items())
        return f"{self.operation}({given}){' by name' if self.named else ''}"


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    return [leaf for item in tree for leaf in _leaves(item)] if isinstance(tree, (list, tuple)) else [tree]


def _shown(value: Any) -> str:
    if isinstance(value, Operand):
        return f"{value.scale:g}·x{list(value.shape)}{value.shift:+g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return f"tensor{value.tolist()}" if isinstance(value, Tensor) else str(value)


def operand(r: random.Random, *shape: int) -> Operand:
    """Values around 0, positive ones, small ones above 1, and ones that reach 0."""
    scale, shift = r.choice([(2.0, -1.0), (1.0, 0.0), (1.0, 0.1), (1e-6, 1.0), (-1.0, 0.0), (1e-3, 0.0), (3.0, 0.5)])
    return Operand(shape, scale, shift)


def sizes(r: random.Random, dims: int, most: int = 3) -> tuple[int, ...]:
    """Mostly 2 and 3, sometimes 1, rarely 0."""
    return tuple(
        r.choice([0, 1, 1, *range(2, most + 1), *range(2, most + 1), *range(2, most + 1)]) for _ in range(dims)
    )


def constant(r: random.Random, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(r.getrandbits(31))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def either(r: random.Random, *shape: int) -> Any:
    """An operand without its batch, or a constant with it."""
    return operand(r, *shape) if r.random() < 0.6 else constant(r, 1, *shape)


def dims(r: random.Random, count: int, *, several: bool = True) -> Any:
    """A dimension, negative ones too, or some of them, but not the batch."""
    one = r.choice([r.randrange(1, count), -r.randrange(1, count)]) if count > 1 else 0
    if several and count > 2 and r.random() < 0.3:
        return tuple(r.sample(range(1, count), r.randrange(1, count)))
    return one


def _entrywise(function: Callable[..., Any], **choices: list[Any]) -> Draw:
    def draw(r: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
        given = {name: r.choice(values) for name, values in choices.items()}
        return function, {"input": operand(r, *sizes(r, r.randrange(1, 4)))} | given

    return draw


def _paired(function: Callable[..., Any], **choices: list[Any]) -> Draw:
    def draw(r: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
        shape = sizes(r, 2)
        other = tuple(r.choice([size, 1]) for size in shape)
        first, second = operand(r, *shape), either(r, *other)
        if r.random() < 0.5:
            first, second = second, first
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            first = operand(r, *shape)
        if r.random() < 0.2 and isinstance(first, Operand):
            second = r.choice([-2.0, 0.5, 3.0])
        return function, {"input": first, "other": second} | {n: r.choice(v) for n, v in choices.items()}

    return draw


def _power(r: random.Random) -> Any:
    exponent = r.choice([-2, -1.5, -1, -0.5, 0, 0.3, 0.5, 1, 1.5, 2, 2.5, 3, 3.7, 4])
    return torch.pow, {"input": operand(r, *sizes(r, 2)), "exponent": exponent}


def _addcmul(r: random.Random) -> Any:
    shape = sizes(r, 2)
    given = {"input": either(r, *shape), "tensor1": operand(r, *shape), "tensor2": either(r, *shape)}
    return torch.addcmul, given


def _reduced(function: Callable[..., Any], *, several: bool = True, **choices: list[Any]) -> Draw:
    def draw(r: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
        count = r.randrange(2, 4)
        given = {"input": operand(r, *sizes(r, count)), "dim": dims(r, count + 1, several=several)}
        given |= {name: r.choice(values) for name, values in choices.items()}
        return function, given

    return draw


def _variance(r: random.Random) -> Any:
    count = r.randrange(2, 4)
    given = {"input": operand(r, *sizes(r, count)), "dim": dims(r, count + 1)}
    correction, keepdim = r.choice([0, 1, 2, 5, -1, 0.5, None]), r.choice([True, False])
    return lambda input, dim: torch.var(input, dim, correction=correction, keepdim=keepdim), given


def _norm(r: random.Random) -> Any:
    count = r.randrange(2, 4)
    given = {"input": operand(r, *sizes(r, count)), "p": r.choice(["fro", 2, 1])}
    return torch.norm, {**given, "dim": dims(r, count + 1), "keepdim": r.choice([True, False])}


def _linear(r: random.Random) -> Any:
    width, out = sizes(r, 2)
    bias = r.choice([None, constant(r, out)])
    return F.linear, {"input": operand(r, *sizes(r, 1), width), "weight": constant(r, out, width), "bias": bias}


def _matmul(r: random.Random) -> Any:
    n, k, m = sizes(r, 3)
    batch = sizes(r, r.randrange(2))
    first: Any = operand(r, *batch, n, k)
    second = r.choice([operand(r, *batch, k, m), constant(r, k, m), constant(r, *([1] * len(batch)), 1, k, m)])
    if r.random() < 0.3 and isinstance(second, Operand):
        first = constant(r, n, k)
    return torch.matmul, {"input": first, "other": second}


def _einsum(r: random.Random) -> Any:
    a, b, c = sizes(r, 3)
    equation, first, second = r.choice([
        ("zij,zjk->zik", (a, b), (b, c)), ("zij,zkj->zki", (a, b), (c, b)), ("zij,zij->zi", (a, b), (a, b)),
        ("zij,zij->zij", (a, b), (a, b)), ("zij,zj->zi", (a, b), (b,)), ("zij,zjk->zik", (a, 1), (b, c)),
    ])  # fmt: skip
    return (lambda input, other: torch.einsum(equation, input, other)), {
        "input": operand(r, *first), "other": either(r, *second)
    }  # fmt: skip


def _attention(r: random.Random) -> Any:
    heads, n, m, width = r.choice([1, 2]), r.choice([1, 2, 3]), r.choice([0, 1, 2, 3, 3]), r.choice([1, 2])
    shape = (heads,) if r.random() < 0.5 else ()
    form = r.choice([(n, m), (n, 1), (1, m)])
    hidden = torch.rand(form, generator=torch.Generator().manual_seed(r.getrandbits(31))) < r.choice([0.3, 0.7, 1.0])
    masks = [None, ~hidden, torch.zeros(form).double().masked_fill(hidden, -math.inf), constant(r, *form)]
    mask = r.choice([*masks, operand(r, *([1] * len(shape)), n, m)])
    causal = mask is None and r.random() < 0.5
    scale = r.choice([None, None, 0.5, 0.0, -1.0])
    given = {"query": operand(r, *shape, n, width), "key": either(r, *shape, m, width)}
    given |= {"value": either(r, *shape, m, r.choice([1, 2])), "attn_mask": mask, "dropout_p": 0.0, "is_causal": causal}
    return functools.partial(F.scaled_dot_product_attention, scale=scale), given


def _convolution(count: int, transposed: bool) -> Draw:
    def draw(r: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
        groups, inner, outer = r.choice([1, 1, 2]), r.choice([1, 2]), r.choice([1, 2])
        channels, kernel = groups * inner, tuple(r.choice([1, 2, 3]) for _ in range(count))
        x = operand(r, channels, *(r.choice([1, 2, 3, 4]) for _ in range(count)))
        shape = (channels, outer, *kernel) if transposed else (groups * outer, inner, *kernel)
        weight: Any = constant(r, *shape)
        bias = r.choice([None, constant(r, groups * outer)])
        stride, padding = r.choice([1, 1, 2, 3]), r.choice([0, 0, 1, 2])
        given = {"input": x, "weight": weight, "bias": bias, "stride": stride}
        if transposed:
            more = {"output_padding": r.choice([0, 0, 1]), "groups": groups, "dilation": r.choice([1, 2])}
            return getattr(F, f"conv_transpose{count}d"), given | {"padding": padding} | more
        place = r.choice([padding, padding, "valid", *(["same"] if stride == 1 else [])])
        return getattr(F, f"conv{count}d"), given | {
            "padding": place,
            "dilation": r.choice([1, 1, 2]),
            "groups": groups,
        }

    return draw


def _batch_norm(r: random.Random) -> Any:
    channels = r.choice([1, 2, 3])
    given = {"input": operand(r, channels, *sizes(r, r.randrange(3))), "running_mean": constant(r, channels)}
    given |= {"running_var": constant(r, channels).abs(), "weight": r.choice([None, constant(r, channels)])}
    given |= {"bias": r.choice([None, constant(r, channels)]), "training": False, "momentum": 0.1}
    return F.batch_norm, given | {"eps": r.choice([0.0, 1e-5, 0.5])}


def _layer_norm(r: random.Random) -> Any:
    shape = sizes(r, 3)
    last = shape[-r.choice([1, 1, 2]) :]
    given = {"input": operand(r, *shape), "normalized_shape": last, "weight": r.choice([None, constant(r, *last)])}
    return F.layer_norm, given | {"bias": r.choice([None, constant(r, *last)]), "eps": r.choice([0.0, 1e-5, 0.1])}


def _rms_norm(r: random.Random) -> Any:
    shape = sizes(r, 2)
    given = {
        "input": operand(r, *shape),
        "normalized_shape": shape[-1:],
        "weight": r.choice([None, constant(r, shape[-1])]),
    }
    return F.rms_norm, given | {"eps": r.choice([None, 0.0, 1e-5, 0.1])}


def _group_norm(r: random.Random) -> Any:
    groups, each = r.choice([1, 2]), r.choice([1, 2])
    channels = groups * each
    given = {"input": operand(r, channels, *sizes(r, r.randrange(1, 3))), "num_groups": groups}
    given |= {"weight": r.choice([None, constant(r, channels)]), "bias": r.choice([None, constant(r, channels)])}
    return F.group_norm, given | {"eps": r.choice([0.0, 1e-5, 0.1])}


def _normalize(r: random.Random) -> Any:
    given = {"input": operand(r, *sizes(r, 2)), "p": r.choice([2.0, 2.0, 1.0]), "dim": r.choice([1, 2, -1])}
    return F.normalize, given | {"eps": r.choice([0.0, 1e-12, 0.1])}


def _pool(count: int, largest: bool) -> Draw:
    def draw(r: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
        x = operand(r, r.choice([1, 2]), *(r.choice([1, 2, 3, 4][: 5 - max(count - 1, 1)]) for _ in range(count)))
        kernel = r.choice([1, 2, 3, tuple(r.choice([1, 2, 3]) for _ in range(count))])
        given = {"input": x, "kernel_size": kernel, "stride": r.choice([None, 1, 2, 3]), "padding": r.choice([0, 0, 1])}
        ceil = r.choice([True, False])
        if largest:
            more = {"dilation": r.choice([1, 1, 2]), "ceil_mode": ceil, "return_indices": False}
            return getattr(F, f"max_pool{count}d"), given | more
        given |= {"ceil_mode": ceil, "count_include_pad": r.choice([True, False])}
        if count > 1:
            given["divisor_override"] = r.choice([None, None, 1, 3, -2])
        return getattr(F, f"avg_pool{count}d"), given

    return draw


def _adaptive(count: int, largest: bool) -> Draw:
    def draw(r: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
        x = operand(r, r.choice([1, 2]), *(r.choice([1, 2, 3, 5]) for _ in range(count)))
        size = r.choice([1, 2, 3, tuple(r.choice([1, 2, 3]) for _ in range(count))])
        return getattr(F, f"adaptive_{'max' if largest else 'avg'}_pool{count}d"), {"input": x, "output_size": size}

    return draw


def _padded(r: random.Random) -> Any:
    mode = r.choice(["constant", "constant", "reflect", "replicate", "circular"])
    pad = tuple(r.choice([-1, 0, 0, 1, 2]) for _ in range(r.choice([2, 4])))
    given = {"input": operand(r, *sizes(r, 3)), "pad": pad, "mode": mode}
    return F.pad, given | ({"value": r.choice([0.0, -1.0, 2.5])} if mode == "constant" else {})


def _joined(function: Callable[..., Any]) -> Draw:
    def draw(r: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
        shape = list(sizes(r, 2))
        place = r.choice([1, 2, -1])
        parts: list[Any] = []
        for _ in range(r.choice([1, 2, 3])):
            own = list(shape)
            if function is torch.cat:
                own[place - 1 if place > 0 else place] = sizes(r, 1)[0]
            parts.append(either(r, *own))
        parts[0] = operand(r, *shape)
        return function, {"tensors": parts, "dim": place}

    return draw


def _moved(function: Callable[..., Any], given: Callable[[random.Random, int], dict[str, Any]]) -> Draw:
    def draw(r: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
        count = r.choice([2, 3])
        return function, {"input": operand(r, *sizes(r, count))} | given(r, count + 1)

    return draw


def _pieces(function: Callable[..., Any], given: Callable[[random.Random], dict[str, Any]]) -> Draw:
    def draw(r: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
        place = r.choice([0, -1])

        def picked(*placed: Any, **named: Any) -> Any:
            return function(*placed, **named)[place]

        name = "tensor" if function is torch.split else "input"
        return picked, {name: operand(r, *sizes(r, 2))} | given(r) | {"dim": r.choice([1, 2, -1])}

    return draw


def _indexed(r: random.Random) -> Any:
    index = r.choice([
        (slice(None), 0), (..., slice(None, None, 2)), (slice(None), slice(0, 0)), (slice(None), [0, 0, -1]),
        (slice(None), torch.tensor([0, 0])), (slice(None), None), (0,), (..., -1), (slice(None), slice(1, None)),
        (slice(None), torch.tensor([], dtype=torch.long)),
    ])  # fmt: skip
    return (lambda input: input[index]), {"input": operand(r, *sizes(r, 2))}


def _written(r: random.Random) -> Any:
    index = r.choice([(slice(None), 0), (..., slice(0, 1)), (slice(None), slice(0, 0)), (slice(None), [0, -1])])
    value = r.choice([0.5, operand(r, 1), operand(r)])

    def function(input: Any, value: Any) -> Any:
        copy = input.clone()
        copy[index] = value
        return copy

    return function, {"input": operand(r, *sizes(r, 2)), "value": value}


def _interpolated(r: random.Random) -> Any:
    mode = r.choice(["nearest", "bilinear", "bicubic", "area", "nearest-exact"])
    x = operand(r, 1, r.choice([1, 2, 3]), r.choice([1, 2, 4]))
    given: dict[str, Any] = {"input": x, "size": r.choice([1, 2, 5, (3, 2)])}
    smooth = mode in ("bilinear", "bicubic")
    align = r.choice([None, True, False]) if smooth else None
    antialias = smooth and r.random() < 0.3
    return (lambda input, size: F.interpolate(
        input, size, mode=mode, align_corners=align, antialias=antialias)), given  # fmt: skip


def _unfolded(r: random.Random) -> Any:
    given = {"input": operand(r, 1, r.choice([2, 3]), r.choice([2, 3])), "kernel_size": r.choice([1, 2, (2, 1)])}
    more = {"dilation": r.choice([1, 2]), "padding": r.choice([0, 1]), "stride": r.choice([1, 2])}
    return F.unfold, given | more


def _folded(r: random.Random) -> Any:
    kernel, stride, padding = r.choice([1, 2]), r.choice([1, 2]), r.choice([0, 1])
    windows = (3 + 2 * padding - kernel) // stride + 1
    given = {"input": operand(r, kernel**2, windows**2), "output_size": 3, "kernel_size": kernel, "dilation": 1}
    return F.fold, given | {"padding": padding, "stride": stride}


def _lstm(r: random.Random) -> Any:
    width, hidden, ways, biased = r.choice([1, 2]), r.choice([1, 2]), r.choice([1, 2]), r.choice([True, False])
    shapes = [(4 * hidden, width), (4 * hidden, hidden), *([(4 * hidden,)] * 2 if biased else [])]
    parts = [constant(r, *shape) for _ in range(ways) for shape in shapes]
    state = tuple(constant(r, ways, 1, hidden) for _ in range(2))
    steps, result = r.choice([1, 2, 3]), r.randrange(3)

    def function(*placed: Any, **named: Any) -> Any:
        return torch.lstm(*placed, **named)[result]

    given = {"input": operand(r, steps, width), "hx": state, "params": parts, "has_biases": biased, "num_layers": 1}
    return function, given | {"dropout": 0.0, "train": False, "bidirectional": ways == 2, "batch_first": True}


def _gelu(r: random.Random) -> Any:
    form = r.choice(["none", "tanh"])
    return (lambda input: F.gelu(input, approximate=form)), {"input": operand(r, *sizes(r, 2))}


def _clamp(r: random.Random) -> Any:
    shape = sizes(r, 2)
    limits: list[Any] = [None, -0.5, 0.0, 0.3, 2.0, constant(r, 1, *shape), constant(r, 1, *shape[:1], 1)]
    low, high = r.choice(limits), r.choice(limits)
    if isinstance(low, Tensor) is not isinstance(high, Tensor):
        low, high = (low, None) if isinstance(low, Tensor) else (None, high)
    return torch.clamp, {"input": operand(r, *shape), "min": low, "max": high}


def _parametric(r: random.Random) -> Any:
    shape = sizes(r, r.choice([1, 2, 3]))
    weight = r.choice([1.0, -1.0, 0.3]) * constant(r, r.choice([1, shape[0]]))
    return torch.prelu, {"input": operand(r, *shape), "weight": weight}


def _chosen(r: random.Random) -> Any:
    shape = sizes(r, 2)
    return torch.where, {
        "condition": constant(r, 1, *shape) > 0,
        "input": operand(r, *shape),
        "other": either(r, *shape),
    }


def _filled(r: random.Random) -> Any:
    shape = sizes(r, 2)
    mask = constant(r, 1, *shape) > r.choice([-9.0, 0.0, 0.7])
    return torch.masked_fill, {"input": operand(r, *shape), "mask": mask, "value": r.choice([0.0, -1.0, -math.inf])}


_ENTRYWISE: dict[str, Callable[..., Any]] = {
    **{str(key_of(function)): function for function in ACTIVATIONS if not isinstance(function, str)},
    "abs": torch.abs, "neg": torch.neg, "square": torch.square, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "identity": torch.clone,
}  # fmt: skip
_FLAGS = [True, False]
# By operation: what draws a function and its arguments in torch's order, under torch's names.
DRAWS: dict[str, Draw] = {
    **{name: _entrywise(function) for name, function in _ENTRYWISE.items()},
    "gelu": _gelu,
    "leaky_relu": _entrywise(F.leaky_relu, negative_slope=[-1.5, -0.2, 0.0, 0.01, 1.0, 2.0]),
    "hardtanh": _entrywise(F.hardtanh, min_val=[-1.0, 0.0, 0.2], max_val=[0.2, 1.0, 3.0]),
    "clamp": _clamp,
    "dropout": _entrywise(F.dropout, p=[0.0, 0.5, 1.0], training=[False, False, True]),
    "add": _paired(lambda input, other, alpha: torch.add(input, other, alpha=alpha), alpha=[-2, 0, 0.5, 1]),
    "sub": _paired(lambda input, other, alpha: torch.sub(input, other, alpha=alpha), alpha=[-2, 0, 0.5, 1]),
    "rsub": _paired(torch.rsub),
    "mul": _paired(torch.mul),
    "div": _paired(torch.div),
    **{name: _paired(getattr(torch, name)) for name in ("max", "min", "maximum", "minimum")},
    "pow": _power,
    "addcmul": _addcmul,
    "sum": _reduced(torch.sum, keepdim=_FLAGS),
    "mean": _reduced(torch.mean, keepdim=_FLAGS),
    "amax": _reduced(torch.amax, keepdim=_FLAGS),
    "amin": _reduced(torch.amin, keepdim=_FLAGS),
    "softmax": _reduced(torch.softmax, several=False),
    "var": _variance,
    "norm": _norm,
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    **{f"conv{n}d": _convolution(n, False) for n in (1, 2, 3)},
    "conv_transpose2d": _convolution(2, True),
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "normalize": _normalize,
    **{f"avg_pool{n}d": _pool(n, False) for n in (1, 2)},
    "max_pool2d": _pool(2, True),
    "adaptive_avg_pool2d": _adaptive(2, False),
    "adaptive_max_pool2d": _adaptive(2, True),
    "pad": _padded,
    "cat": _joined(torch.cat),
    "stack": _joined(torch.stack),
    "reshape": _moved(torch.flatten, lambda r, n: {"start_dim": r.randrange(1, n), "end_dim": -1}),
    "squeeze": _moved(torch.squeeze, lambda r, n: {"dim": dims(r, n, several=False)}),
    "unsqueeze": _moved(torch.unsqueeze, lambda r, n: {"dim": r.choice([1, n, -1])}),
    "permute": _moved(torch.permute, lambda r, n: {"dims": (0, *r.sample(range(1, n), n - 1))}),
    "movedim": _moved(torch.movedim, lambda r, n: {"source": dims(r, n, several=False), "destination": 1}),
    "transpose": _moved(torch.transpose, lambda r, n: {"dim0": dims(r, n, several=False), "dim1": -1}),
    "swapaxes": _moved(torch.swapaxes, lambda r, n: {"axis0": dims(r, n, several=False), "axis1": 1}),
    "flip": _moved(torch.flip, lambda r, n: {"dims": (dims(r, n, several=False),)}),
    "roll": _moved(torch.roll, lambda r, n: {"shifts": r.choice([-1, 0, 2]), "dims": dims(r, n, several=False)}),
    "expand": _moved(torch.broadcast_to, lambda r, n: {"size": (r.choice([1, 2]), *[-1] * n)}),
    "tile": _moved(torch.tile, lambda r, n: {"dims": tuple(r.choice([1, 2]) for _ in range(n - 1))}),
    "repeat": _moved(
        lambda input, dims: input.repeat(dims), lambda r, n: {"dims": (1, *[r.choice([0, 1, 2])] * (n - 1))}
    ),
    "repeat_interleave": _moved(
        torch.repeat_interleave, lambda r, n: {"repeats": r.choice([0, 1, 2]), "dim": dims(r, n, several=False)}
    ),
    "getitem": _indexed,
    "select": _moved(torch.select, lambda r, n: {"dim": dims(r, n, several=False), "index": r.choice([0, -1])}),
    "narrow": _moved(
        torch.narrow, lambda r, n: {"dim": dims(r, n, several=False), "start": 0, "length": r.choice([0, 1, 2])}
    ),
    "index_select": _moved(
        torch.index_select,
        lambda r, n: {"dim": dims(r, n, several=False), "index": torch.tensor(r.choice([[], [0], [0, 0]])).long()},
    ),
    "setitem": _written,
    "split": _pieces(torch.split, lambda r: {"split_size_or_sections": r.choice([1, 2, 3])}),
    "chunk": _pieces(torch.chunk, lambda r: {"chunks": r.choice([1, 2, 3])}),
    "unbind": _pieces(torch.unbind, lambda r: {}),
    "interpolate": _interpolated,
    "unfold": _unfolded,
    "fold": _folded,
    "unfold_axis": _moved(
        lambda input, dimension, size, step: input.unfold(dimension, size, step),
        lambda r, n: {"dimension": dims(r, n, several=False), "size": r.choice([0, 1, 2]), "step": r.choice([1, 2])},
    ),
    "lstm": _lstm,
    "prelu": _parametric,
    "where": _chosen,
    "masked_fill": _filled,
}  # fmt: skip


def draw(seed: int) -> Setting | None:
    """The call of a seed; None where torch refuses it, or its operands are too large."""
    operation = list(DRAWS)[seed % len(DRAWS)]
    r = random.Random(seed)
    try:
        function, given = DRAWS[operation](r)
        setting = Setting(operation, function, given, r.random() < 0.5)
        if not 0 < setting.size <= _MOST:
            return None
        result = setting(torch.full((1, 1, setting.size), 0.37, dtype=torch.float64))
        return setting if result.is_floating_point() and 0 < result.numel() <= 4 * _MOST else None
    except Exception:
        return None


def look(seed: int) -> dict[str, Any]:
    """A row for one seed: every bound of the call's rules is compared with what is measured.

    Constants, boxes, remainders, Jacobians and rounding errors are
    those of :func:`lipcert.bounds.testing.check_rule`.
    """
    setting = draw(seed)
    row: dict[str, Any] = {"seed": seed, "kind": "argument", "by": {}, "defects": []}
    if setting is None:
        return row | {"outcome": "not run"}
    row |= {"family": setting.operation, "setting": str(setting)[:400]}
    try:
        row["outcome"] = _examined(setting, seed)
    except LipcertError as error:
        row |= {"outcome": "refused", "why": f"{type(error).__name__}: {str(error)[:160]}"}
    except AssertionError as error:
        row |= {"outcome": "false", "defects": [{"key": str(setting)[:200], "raised": str(error)[:200]}]}
    except Exception as error:
        row |= {"outcome": "traceback", "defects": [{"key": str(setting)[:200], "raised": raised(error)}]}
    return row


def _examined(setting: Setting, seed: int) -> str:
    """``held``, or ``zero`` where the constant is infinite."""
    size = (1, setting.size)
    module = applied(setting)
    analysis = analyze(module, size)
    _check_facts(module, analysis, seed)
    if analysis.output.lip.finite:
        check_rule(setting, size, points=_POINTS, seed=seed)
        return "held"
    return "zero"


def _check_facts(module: torch.nn.Module, analysis: Analysis, seed: int) -> None:
    """Compares what is claimed of the entries of every value with values at samples.

    Raises:
        AssertionError: a claim is false; names the operation and the claim.
    """
    generator = torch.Generator().manual_seed(seed)
    graph = analysis.graph
    for point in range(2 * _POINTS):
        x = torch.rand(1, *graph.input.shape[1:], generator=generator, dtype=torch.float64)
        x = (x, x.round(), x * 0, x * 2.0**-point)[point % 4]
        with torch.no_grad():
            known = evaluate(graph.nodes, {graph.input: x})
        for node, value in analysis.values.items():
            if isinstance(value, Value) and node.shape and bool(known[node].isfinite().all()):
                for name, holds in _facts(value, known[node]).items():
                    assert holds, f"{node.name}: its {name} is claimed and does not hold"


def _facts(value: Value, entries: Tensor) -> dict[str, bool]:
    """Which claims about the entries hold at a sample, by name."""
    if not entries.numel():
        return {}
    slack = _SLACK * (1 + float(entries.abs().amax()))
    facts = {
        "floor": bool((entries >= value.floor - slack).all()),
        "largest entry": float(entries.abs().amax()) <= float(value.magnitude) + slack,
        "norm": float(entries.norm()) <= float(value.total_norm()) * (1 + _SLACK) + slack,
        "mass": float(entries.sum(-1).amin()) >= value.mass - slack,
    }
    for axis in range(entries.dim()):
        length = float(entries.norm(dim=axis).amax())
        facts[f"length along axis {axis}"] = length <= float(value.row_norm(axis)) * (1 + _SLACK) + slack
    if value.stochastic:
        sums = entries.sum(-1)
        facts["stochastic rows"] = bool((entries >= 0).all()) and bool(((sums - 1).abs() <= slack).all())
    if entries.dim() > 1:
        spectral = float(torch.linalg.matrix_norm(entries, 2).amax())
        facts["norm of its matrices"] = spectral <= float(value.matrix_norm()) * (1 + _SLACK) + slack
    return facts


def raised(error: BaseException) -> str:
    """Where in lipcert an unexpected error was raised, in a line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "lipcert" in Path(frame.filename).parts]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__} in {where}: {lines[0][:160] if lines else ''}"
