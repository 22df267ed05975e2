"""Kernels of torch against the rounding rules: operation, format, memory layout, batch, library and operands by seed.

Each setting draws an operation with its sizes, runs the kernel that torch picks for it, and compares every entry with
float64 and with the bound of :func:`lipcert.bounds.local_error`. Operands are made to cancel: images that are nearly
flat, mirrored or far from zero, and biases that are minus one of the results. Without oneDNN torch takes other kernels.
Attention, whose bound comes from several rules, is compared in norm.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lipcert
from lipcert.bounds import NoAnswer, Operand, key_of, local_error
from lipcert.bounds.rules.activation import ACTIVATIONS
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph import capture
from lipcert.numerics import as_assumed
from lipcert.roundoff import DTYPES, Format, Roundoff
from lipcert.roundoff._roundoff import _has_rounding_rule
from lipcert.surgery import LayerProject, SmoothProject
from lipcert.surgery._projections import GroupLayerProject, GroupSmoothProject, RmsLayerProject, RmsSmoothProject

# An operation as a module, and the shape of its input without the batch.
Drawn = tuple[nn.Module, tuple[int, ...]]

LAYOUTS = ("contiguous", "channels_last", "turned", "strided")
PATTERNS = ("normal", "flat", "mirrored", "shifted", "sparse")
BATCHES = (1, 1, 2, 3, 5, 16, 33)
WIDTHS = (1, 2, 3, 5, 8, 16, 31, 64, 130, 300)


class Function(nn.Module):
    """An operation with weights of its own."""

    def __init__(self, operation: Callable[..., Tensor], *weights: Tensor):
        super().__init__()
        self.operation = operation
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x, *self.weights)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _linear(r: random.Random) -> Drawn:
    n, m, positions = r.choice(WIDTHS), r.choice(WIDTHS), (r.randint(1, 4), r.randint(1, 4))
    layer = nn.Linear(n, m, bias=r.random() < 0.8)
    form = r.choice(("rows", "tokens", "channels", "image"))
    if form in ("rows", "tokens"):
        return layer, (n,) if form == "rows" else (r.choice((1, 2, 7, 50)), n)
    if form == "channels":
        return nn.Sequential(Function(lambda x: x.flatten(2).transpose(1, 2)), layer), (n, *positions)
    return nn.Sequential(Function(lambda x: x.permute(0, 2, 3, 1)), layer), (n, *positions)


def _conv(dims: int, transposed: bool, r: random.Random) -> Drawn:
    groups = r.choice((1, 1, 2, 4))
    n, m = (groups * r.choice((1, 2, 4, 9)) for _ in range(2))
    if r.random() < 0.2:
        groups, m = n, n
    kind: Any = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    kernel, size = r.choice((1, 2, 3, 5)), r.choice((5, 6, 9, 14 if dims < 3 else 5))
    options = {"stride": r.choice((1, 1, 2)), "padding": r.choice((0, kernel // 2)), "dilation": r.choice((1, 1, 2))}
    layer = kind(n, m, kernel, groups=groups, bias=r.random() < 0.8, **options)
    return layer, (n, *(max(size, 2 * kernel - 1) for _ in range(dims)))


def _product(r: random.Random) -> Drawn:
    n, m, k = r.choice(WIDTHS), r.choice((1, 2, 5, 16)), r.choice((1, 2, 5, 16))
    form = r.choice(("two", "two", "left", "right"))
    if form == "left":
        return Function(lambda x, w: w @ x, _normal(k, n)), (n, m) if r.random() < 0.5 else (2, n, m)
    if form == "right":
        return Function(torch.matmul, _normal(n, k)), (2, m, n)
    heads = r.choice((1, 3))
    return Function(lambda x: torch.matmul(x[:, :heads], x[:, heads:].mT)), (2 * heads, m, n)


def _normalisation(kind: str, r: random.Random) -> Drawn:
    eps, affine = r.choice((1e-6, 1e-5, 1e-3, 1.0)), r.random() < 0.8
    groups = r.choice((1, 2, 4))
    channels = groups * r.choice((1, 2, 6))
    if kind in ("layer_norm", "rms_norm"):
        width = r.choice(WIDTHS[1:])
        layer: Any = nn.LayerNorm if kind == "layer_norm" else nn.RMSNorm
        return layer(width, eps=eps, elementwise_affine=affine), (r.choice((1, 3, 17)), width)
    dims = r.choice((1, 2, 2, 3))
    shape = (channels, *(r.randint(2, 7) for _ in range(dims)))
    if kind == "group_norm":
        if channels // groups == 1 or r.random() < 0.3:
            shape = (max(channels, 2 * groups), *(1,) * dims) if r.random() < 0.5 else shape
        return nn.GroupNorm(groups, shape[0], eps=eps, affine=affine), shape
    layer = getattr(nn, f"BatchNorm{dims}d")
    return layer(channels, eps=eps, affine=affine), shape


def _pool(adaptive: bool, r: random.Random) -> Drawn:
    dims = 2 if adaptive else r.choice((1, 2, 2))
    shape = (r.choice((1, 3, 16)), *(r.randint(4, 15) for _ in range(dims)))
    if adaptive:
        return nn.AdaptiveAvgPool2d(r.choice((1, 2, 3))), shape
    kernel = r.choice((2, 3, 4))
    options = {"stride": r.choice((1, 2)), "padding": r.choice((0, kernel // 2)), "ceil_mode": r.random() < 0.3}
    return getattr(nn, f"AvgPool{dims}d")(kernel, count_include_pad=r.random() < 0.5, **options), shape


def _reduced(name: str, r: random.Random) -> Drawn:
    shape = (r.choice((1, 3, 16)), r.choice((2, 7, 33)), r.choice((2, 6, 32)))
    dims, kept = r.choice((1, 2, 3, (1, 2), (2, 3), (1, 3), (1, 2, 3))), r.random() < 0.5
    reduce: Any = getattr(torch, name)
    return Function(lambda x: reduce(x, dim=dims, keepdim=kept)), shape


def _softmax(name: str, r: random.Random) -> Drawn:
    shape = (r.choice((1, 3, 16)), r.choice((2, 7, 33)), r.choice((1, 2, 9, 64, 130)))
    dim = r.choice((1, 2, 3))
    return Function(lambda x: getattr(F, name)(x, dim=dim)), shape


def _fold(r: random.Random) -> Drawn:
    kernel, stride, windows = r.choice((1, 2, 3)), r.choice((1, 2)), (r.randint(1, 7), r.randint(1, 7))
    height, width = (kernel + stride * (count - 1) for count in windows)
    shape = (r.choice((1, 3)) * kernel**2, math.prod(windows))
    return Function(lambda x: F.fold(x, (height, width), kernel, stride=stride)), shape


def _interpolate(r: random.Random) -> Drawn:
    mode = r.choice(("linear", "bilinear", "bilinear", "bicubic", "trilinear"))
    dims = {"linear": 1, "trilinear": 3}.get(mode, 2)
    size, shape = ([r.choice((1, 2, 3, 5, 8, 13, 33 if dims < 3 else 9)) for _ in range(dims)] for _ in range(2))
    corners = r.random() < 0.4
    return Function(lambda x: F.interpolate(x, size, mode=mode, align_corners=corners)), (r.choice((1, 3, 16)), *shape)


def _entrywise(operation: Callable[[Tensor], Tensor], r: random.Random) -> Drawn:
    return Function(operation), (r.choice((1, 3, 16)), r.choice((1, 7, 33)), r.choice((1, 9, 64)))


def _pair(operation: Callable[[Tensor, Tensor], Tensor], r: random.Random) -> Drawn:
    shape = (2 * r.choice((1, 3, 8)), r.choice((1, 7, 33)), r.choice((1, 9, 64)))
    return Function(lambda x: operation(*x.chunk(2, 1))), shape


def _projection(kind: Any, r: random.Random) -> Drawn:
    if kind in (GroupLayerProject, GroupSmoothProject):
        return kind(4, r.choice((0.7, 3.0)), groups=r.choice((1, 2))), (4, r.randint(1, 7), r.randint(1, 7))
    width = r.choice(WIDTHS[1:])
    return kind(width, r.choice((0.7, 3.0))), (r.choice((1, 3, 17)), width)


OPERATIONS: dict[str, Callable[[random.Random], Drawn]] = {
    "linear": _linear,
    "matmul": _product,
    **{f"conv{d}d": partial(_conv, d, False) for d in (1, 2, 3)},
    "conv_transpose2d": partial(_conv, 2, True),
    **{kind: partial(_normalisation, kind) for kind in ("layer_norm", "rms_norm", "group_norm", "batch_norm")},
    "fold": _fold,
    "interpolate": _interpolate,
    "avg_pool": partial(_pool, False),
    "adaptive_avg_pool": partial(_pool, True),
    **{name: partial(_reduced, name) for name in ("sum", "mean", "norm")},
    **{name: partial(_softmax, name) for name in ("softmax", "normalize")},
    **{
        str(key_of(function)): partial(_entrywise, function)
        for function in (*(f for f in ACTIVATIONS if not isinstance(f, str)), F.gelu, torch.square)
    },
    "gelu, tanh": lambda r: _entrywise(lambda x: F.gelu(x, approximate="tanh"), r),
    "leaky_relu": lambda r: _entrywise(lambda x: F.leaky_relu(x, 0.3), r),
    "exp": lambda r: _entrywise(torch.exp, r),
    "sqrt": lambda r: _entrywise(lambda x: x.abs().sqrt(), r),
    "rsqrt": lambda r: _entrywise(lambda x: x.abs().rsqrt(), r),
    "div": lambda r: _pair(lambda x, y: x / y.abs(), r),
    "pow": lambda r: _entrywise(lambda x: x**3, r),
    "scale": lambda r: _entrywise(lambda x: x * 0.3, r),
    "quotient": lambda r: _entrywise(lambda x: x / 0.7, r),
    "add": lambda r: _pair(torch.add, r),
    "sub": lambda r: _pair(torch.sub, r),
    "add, alpha": lambda r: _pair(lambda x, y: torch.add(x, y, alpha=0.3), r),
    "mul": lambda r: _pair(torch.mul, r),
    "addcmul": lambda r: _pair(lambda x, y: torch.addcmul(x, y, x), r),
    **{
        kind.__name__: partial(_projection, kind)
        for kind in (LayerProject, SmoothProject, RmsLayerProject, RmsSmoothProject, GroupLayerProject)
    },
    "GroupSmoothProject": lambda r: _projection(GroupSmoothProject, r),
}


def _images(shape: tuple[int, ...], batch: int, pattern: str, scale: float, r: random.Random) -> Tensor:
    """Values that cancel in the sums of an operation in different ways."""
    x = _normal(batch, *shape)
    tiny = 2.0 ** -r.randint(6, 22)
    if pattern == "flat":  # nearly the same at all positions, and in all images
        base = _normal(1, shape[0], *(1,) * (len(shape) - 1)) if r.random() < 0.7 else _normal(1, *shape)
        x = base * (1 + tiny * x)
    elif pattern == "mirrored":
        axis = r.randint(1, len(shape))
        half = x.shape[axis] // 2
        mirror = -x.narrow(axis, 0, half) * (1 + tiny * x.narrow(axis, half, half))
        x = torch.cat((x.narrow(axis, 0, half), mirror, x.narrow(axis, 2 * half, x.shape[axis] - 2 * half)), axis)
    elif pattern == "shifted":
        x = 1 + 2.0 ** -r.randint(0, 12) * x
    elif pattern == "sparse":
        x = torch.where(torch.rand_like(x) < 0.1, x, tiny * x)
    return x * scale


def _arranged(x: Tensor, layout: str) -> Tensor:
    """The tensor with its numbers in another order in memory."""
    if layout == "channels_last" and x.dim() in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "turned" and x.dim() > 2:
        return x.transpose(1, -1).contiguous().transpose(1, -1)
    if layout == "strided":
        wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


def _prepare(module: nn.Module, images: Tensor, scale: float, held: torch.dtype | None, r: random.Random) -> None:
    """Random weights and statistics; a bias that is minus the result at one position, or nearly."""
    biases = []
    for part in module.modules():
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            if tensor.dim() and tensor.is_floating_point():
                drawn = _normal(*tensor.shape)
                drawn = drawn.abs() + 0.1 if "var" in name else drawn / math.sqrt(max(1, tensor[0].numel()))
                tensor.data.copy_(drawn * (scale if "mean" in name else 1))
            if name == "bias":
                biases.append((part, tensor))
    for part, bias in biases:
        if r.random() < 0.7:
            bias.data.zero_()
            result = module(images)
            result = result if isinstance(part, (nn.Linear, nn.LayerNorm, LayerProject)) else result.movedim(1, -1)
            rows = result.reshape(-1, result.shape[-1]) if result.shape[-1] == len(bias) else None
            if rows is not None and len(rows):
                bias.data.copy_(-rows[r.randrange(len(rows))] * (1 + r.choice((0.0, 2.0**-9, 2.0**-20))))
    if held is not None:
        module.to(held).double()


def look(seed: int) -> dict[str, Any]:
    """The largest share of the bound that an entry of one kernel's result uses, as a row of ``benchmarks.fuzz``.

    Where there is a GPU, it runs every second kernel.
    """
    r, device = random.Random(seed), "cuda" if torch.cuda.is_available() and seed % 2 else "cpu"
    torch.manual_seed(seed)
    operation = "attention" if r.random() < 0.05 else r.choice(tuple(OPERATIONS))
    name, layout, batch, pattern = r.choice(tuple(DTYPES)), r.choice(LAYOUTS), r.choice(BATCHES), r.choice(PATTERNS)
    library, scale = r.random() < 0.7, 2.0 ** r.choice((-16, -6, -2, 0, 0, 0, 2, 4))
    row = {"kind": "kernel", "seed": seed, "operation": operation, "dtype": name, "layout": layout, "batch": batch}
    row |= {"pattern": pattern, "onednn": library, "by": {}, "defects": [], "share": 0.0, "device": device}
    without = contextlib.nullcontext() if library else _without_onednn()
    try:
        with torch.no_grad(), without, as_assumed(torch.device(device), name):
            if operation == "attention":
                share = _attention(r, name, batch, device)
            else:
                share = _single(OPERATIONS[operation], r, name, layout, batch, pattern, scale, device)
    except (NoAnswer, UnsupportedOperation) as reason:
        return {**row, "outcome": "refused", "why": str(reason)}
    except (InputError, NotImplementedError, RuntimeError) as reason:  # torch has no such kernel, or no such call
        return {**row, "outcome": "not run", "why": str(reason)[:100]}
    if share is None:
        return {**row, "outcome": "zero"}
    row["share"] = share
    if not share <= 1:
        return {**row, "outcome": "false", "defects": [{"share": share}]}
    return {**row, "outcome": "held"}


@contextlib.contextmanager
def _without_onednn() -> Any:
    """torch's own kernels; without NNPACK, whose convolutions are transforms."""
    before = torch.backends.nnpack.set_flags(False)
    try:
        with torch.backends.mkldnn.flags(enabled=False):
            yield
    finally:
        torch.backends.nnpack.set_flags(*before)


def _single(
    draw: Callable[[random.Random], Drawn],
    r: random.Random,
    name: str,
    layout: str,
    batch: int,
    pattern: str,
    scale: float,
    device: str,
) -> float | None:
    """The largest share over the entries; None if no entry has a bound."""
    dtype, fmt = DTYPES[name], Format.of(name)
    module, shape = draw(r)
    module = module.double().eval()
    images = _images(shape, batch, pattern, scale, r).to(dtype).double()
    _prepare(module, images, scale, dtype if r.random() < 0.5 else None, r)
    nominal = images + (2.0 ** -r.randint(2, 20) * scale * _normal(*images.shape) if r.random() < 0.25 else 0.0)
    graph = capture(module, images[:1], whole=_has_rounding_rule)
    node = graph.output
    at, exact = graph.values(nominal[:, None]), graph.values(images[:, None])
    operands = []
    for u in node.operands:
        away = (at[u] - exact[u]).flatten(1).norm(dim=1) * (1 + 1e-9)
        operands.append(Operand(at[u], away, torch.full_like(away, math.inf)))
    bound = local_error(node, operands, fmt)[:, 0]
    deployed = copy.deepcopy(module).to(device, dtype)
    if layout == "channels_last" and images.dim() == 4 and r.random() < 0.5:
        deployed = deployed.to(memory_format=torch.channels_last)
    result = deployed(_arranged(images.to(device, dtype), layout)).cpu().double()
    return _share((result - module(images)).abs(), bound)


def _share(error: Tensor, bound: Tensor) -> float | None:
    known = bound.isfinite()
    if not bool(known.any()):
        return None
    error, bound = error[known], bound[known]
    return float(torch.where(error > 0, error / bound, 0.0).nan_to_num(math.inf, posinf=math.inf).max())


def _attention(r: random.Random, name: str, batch: int, device: str) -> float | None:
    """Kernels for attention against the bound on the norm of the result's error."""
    heads, tokens, width = r.choice((1, 2)), r.choice((2, 5, 16)), r.choice((2, 8, 16))
    scale, causal = 2.0 ** r.randint(-3, 2), r.random() < 0.3
    masks = [_normal(tokens, tokens)] if not causal and r.random() < 0.4 else []

    def attend(x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = ((x - 0.5) * scale).chunk(3, 1)
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)

    size = (3 * heads, tokens, width)
    net = nn.Sequential(Function(attend, *masks), nn.Flatten())
    model = lipcert.load(net.eval(), mean=(0.0,) * size[0], std=(1.0,) * size[0], input_size=size).double()
    rounding = Roundoff(model, name)
    images = torch.rand(min(batch, 5), *size, dtype=torch.float64).to(DTYPES[name]).double()
    bound = rounding.values(images)
    deployed = copy.deepcopy(model).to(device, DTYPES[name])
    kernels = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    if device == "cuda" and name != "float32":
        kernels.append(SDPBackend.EFFICIENT_ATTENTION)
    with sdpa_kernel(r.choice(kernels)):
        result = deployed(images.to(device, DTYPES[name])).cpu().double()
    return _share((result - model(images)).flatten(1).norm(dim=1), bound)
