"""Families of hostile modules: hooks, patches, tricks of Python, state, noise, types, and heads that others read."""

# ruff: noqa: E501
from __future__ import annotations

import copy
import random
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, parametrize, prune

from benchmarks._hostile import WIDTH, Base, Size, base, change, keep, on_tensors, parts
from lipcert.surgery import L2WindowAttention, LayerProject, SmoothProject

Family = Callable[[Any, random.Random, Size], "nn.Module | None"]


def _part(net: nn.Module, rng: random.Random) -> tuple[nn.Module, str, nn.Module]:
    return rng.choice(parts(net))


def _linears(net: nn.Module) -> list[nn.Module]:
    return [part for part in net.modules() if isinstance(part, (nn.Linear, nn.Conv2d))]


def _hooks(net: Any, rng: random.Random, size: Size) -> None:
    """Hooks on the network or a part of it, before, behind, with keywords, or only watching and changing in place."""
    where = net if rng.random() < 0.2 else _part(net, rng)[2]
    alter = change(rng)
    kind = rng.choice(("forward", "forward", "pre", "kwargs", "always", "prepend", "watch", "backward", "parameter"))
    if kind in ("forward", "prepend", "always"):
        flags = {} if kind == "forward" else {"prepend": True} if kind == "prepend" else {"always_call": True}
        where.register_forward_hook(lambda _part, _given, result: on_tensors(alter, result), **flags)
    elif kind == "kwargs":
        where.register_forward_hook(lambda _part, _given, _named, result: on_tensors(alter, result), with_kwargs=True)
    elif kind == "pre":
        where.register_forward_pre_hook(lambda _part, given: (alter(given[0]), *given[1:]))
    elif kind == "watch":
        where.register_forward_hook(lambda _part, _given, result: result.mul_(2) and None)
    elif kind == "backward":
        where.register_full_backward_hook(lambda _part, inward, _outward: tuple(map(torch.zeros_like, inward)))
    else:
        for value in where.parameters():
            value.requires_grad_().register_hook(lambda gradient: gradient * 0)


def _global_hooks(net: Any, rng: random.Random, size: Size) -> None:
    """Hooks on all modules of the process, that act on one of ours."""
    target = net if rng.random() < 0.2 else _part(net, rng)[2]
    target.marked = True
    alter = change(rng)

    def behind(part: Any, _given: Any, result: Any) -> Any:
        return alter(result) if hasattr(part, "marked") else None

    def before(part: Any, given: Any) -> Any:
        return (alter(given[0]),) if hasattr(part, "marked") else None

    register, hook = rng.choice(((register_module_forward_hook, behind), (register_module_forward_pre_hook, before)))
    keep(register(hook))


def _patched(net: Any, rng: random.Random, size: Size) -> None:
    """A method replaced on the instance."""
    alter = change(rng)
    part = _part(net, rng)[2] if rng.random() < 0.85 else net
    own = [name for name in dir(type(part)) if name not in dir(nn.Module) and callable(getattr(type(part), name, None))]
    own = [
        name
        for name in own
        if not name.startswith("__") and name not in ("reset_parameters", "extra_repr", "lipschitz")
    ]
    name = rng.choice(["forward", *own, "__call__", "_call_impl"])
    original = getattr(part, name)

    def replaced(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        return (
            on_tensors(alter, result)
            if isinstance(on_tensors(lambda t: t, result), Tensor) or name == "forward"
            else result
        )

    setattr(
        part, name, replaced if rng.random() < 0.5 else types.MethodType(lambda self, *a, **k: replaced(*a, **k), part)
    )


class _Apply(nn.Module):
    def __init__(self, alter: Callable[[Tensor], Tensor]):
        super().__init__()
        self.alter = alter

    def forward(self, x: Tensor) -> Tensor:
        return self.alter(x)


def _replaced(net: Any, rng: random.Random, size: Size) -> None:
    """A part replaced by another: a drop-out by a Linear, an identity by anything."""
    inert = [found for found in parts(net) if isinstance(found[2], (nn.Identity, nn.Dropout))]
    parent, name, part = rng.choice(inert) if inert and rng.random() < 0.7 else _part(net, rng)
    linear = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        linear.weight.mul_(rng.choice((4.0, 10.0)))
    new: nn.Module = rng.choice((linear, _Apply(change(rng)), nn.Softmax(-1)))
    if not inert or part is not parent.get_submodule(name) or not isinstance(part, (nn.Identity, nn.Dropout)):
        new = nn.Sequential(part, _Apply(change(rng)))
    setattr(parent, name, new)


def _subclass(net: Any, rng: random.Random, size: Size) -> None:
    """Another class of the same name, with another forward, call, weight or copy."""
    alter = change(rng)
    part = _part(net, rng)[2]
    kind = type(part)
    which = rng.choice(("forward", "forward", "call", "getattr", "deepcopy", "class", "isinstance"))
    body: dict[str, Any] = {}
    if which in ("forward", "class", "isinstance"):
        body["forward"] = lambda self, *given, **named: on_tensors(alter, kind.forward(self, *given, **named))
    if which == "call":
        body["__call__"] = lambda self, *given, **named: on_tensors(alter, kind.__call__(self, *given, **named))
    if which == "class":
        body["__class__"] = property(lambda self: kind)
    if which == "getattr":
        factor = rng.choice((2.0, -1.0))

        def attribute(self: Any, name: str) -> Any:
            found = kind.__getattr__(self, name)
            return found * factor if name == "weight" and isinstance(found, Tensor) else found

        body["__getattr__"] = attribute
    if which == "deepcopy":
        body["forward"] = lambda self, *given, **named: on_tensors(alter, kind.forward(self, *given, **named))

        def harmless(self: Any, memo: dict[int, Any]) -> Any:
            twin = kind.__new__(kind)
            twin.__dict__ = copy.deepcopy(self.__dict__, memo)
            return twin

        body["__deepcopy__"] = harmless
    part.__class__ = type(kind.__name__, (kind,), {**body, "__module__": kind.__module__})


class _Times(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        return self.factor * weight


class _Sorted(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.sort(0)[0] * 2


def _parametrised(net: Any, rng: random.Random, size: Size) -> None:
    """Weights that are computed from others at every call."""
    layer: Any = rng.choice(_linears(net))
    kind = rng.choice(
        (
            "times",
            "sorted",
            "weight_norm",
            "old weight_norm",
            "spectral",
            "old spectral",
            "orthogonal",
            "prune",
            "property",
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind in ("times", "sorted"):
            parametrize.register_parametrization(
                layer, "weight", _Times(rng.choice((-2.0, 5.0))) if kind == "times" else _Sorted()
            )
        elif kind == "weight_norm":
            parametrizations.weight_norm(layer)
        elif kind == "old weight_norm":
            nn.utils.weight_norm(layer)
        elif kind == "spectral":
            parametrizations.spectral_norm(layer)
        elif kind == "old spectral":
            nn.utils.spectral_norm(layer)
        elif kind == "orthogonal" and layer.weight.dim() == 2:
            parametrizations.orthogonal(layer)
        elif kind == "prune":
            prune.l1_unstructured(layer, "weight", 0.3)
        else:
            original, shift = type(layer), rng.choice((1.0, 4.0))
            body = {
                "weight": property(lambda self: self._parameters["weight"] * shift),
                "__module__": original.__module__,
            }
            layer.__class__ = type(original.__name__, (original,), body)


class _Stateful(nn.Module):
    """A part that remembers: counts calls, keeps results, or writes its statistics."""

    mean: Any
    count: Any
    kept: Any
    kept_mean: Any

    def __init__(self, inner: nn.Module, kind: str, number: int, width: int):
        super().__init__()
        self.inner, self.kind, self.number = inner, kind, number
        self.calls, self.kept = 0, None
        self.seen: dict[Any, Tensor] = {}
        self.register_buffer("mean", torch.zeros(width), persistent=kind != "hidden mean")
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.calls += 1
        if self.kind == "counter":
            return y if self.calls % self.number else -y
        if self.kind == "late":
            return y if self.calls < 40 * self.number else y.flip(-1)
        if self.kind == "first":
            self.kept = y if self.kept is None else self.kept
            return y + self.kept
        if self.kind == "last":
            before, self.kept = self.kept, y
            return y if before is None or before.shape != y.shape else (y + before) / 2
        if self.kind == "detached":
            before, self.kept = self.kept, y.detach().clone()
            return y if before is None or before.shape != y.shape else (y + before) / 2
        if self.kind in ("mean", "hidden mean"):
            self.mean.mul_(0.5).add_(0.5 * y.mean(0).flatten()[: len(self.mean)].detach())
            return y - self.mean.sum()
        if self.kind == "count":
            self.count += 1
            return y * (1 + (self.count % self.number == 0))
        if self.kind == "new buffer":
            self.register_buffer("kept_mean", y.mean())
            return y - self.kept_mean
        if self.kind == "by shape":
            return y + self.seen.setdefault(tuple(y.shape), y)
        if self.kind == "by sum":
            return self.seen.setdefault(round(float(y.sum()), 1), y)
        self.mean.data = y.flatten()[: len(self.mean)].clone()
        return y + self.mean.sum()


def _state(net: Any, rng: random.Random, size: Size) -> None:
    """Hidden state: counters, caches, statistics."""
    kinds = (
        "counter",
        "late",
        "first",
        "last",
        "detached",
        "mean",
        "hidden mean",
        "count",
        "new buffer",
        "by shape",
        "by sum",
        "data",
    )
    name = rng.choice(("block", "norm", "stem", "head"))
    if isinstance(net, Base):
        setattr(net, name, _Stateful(getattr(net, name), rng.choice(kinds), rng.choice((2, 3, 5)), WIDTH))


class _Writes(nn.Module):
    """A part that writes into its operand, its result, or into memory that others read."""

    def __init__(self, inner: nn.Module, kind: str, factor: float):
        super().__init__()
        self.inner, self.kind, self.factor = inner, kind, factor
        self.held = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        kind, factor = self.kind, self.factor
        if kind == "input":
            y = self.inner(x)
            x.mul_(factor)
            return y + x.mean()
        if kind == "before":
            return self.inner(x.mul_(factor))
        y = self.inner(x)
        if kind == "view":
            flat = y.view(-1)
            flat[::2] *= factor
        elif kind == "alias":
            same = y
            same += factor
            y = y * 2
        elif kind == "overlap":
            y = y.clone()
            y[..., 1:] = y[..., :-1]
        elif kind == "repeat":
            y = y.clone()
            y[..., [0, 0]] = y[..., 1:3]
        elif kind == "detach":
            y.detach().mul_(factor)
        elif kind == "data":
            y.data.add_(factor)
        elif kind == "set":
            y.data = y * factor
        elif kind == "parameter":
            self.held.data = y.flatten()[:1].detach() * factor
            y = y + self.held
        elif kind == "buffer":
            self.held.detach().copy_(y.flatten()[:1])
            y = y * self.held
        elif kind == "set_":
            other = torch.zeros_like(y)
            other.set_(y.detach())
            y = other * factor
        elif kind == "out":
            other = torch.empty_like(y)
            torch.mul(y, factor, out=other)
            y = other
        elif kind == "numpy":
            y.detach().numpy()[...] *= factor
        elif kind == "strided":
            y = y.contiguous()
            y.as_strided((2,), (1,)).add_(factor)
        elif kind == "expand":
            wide = y.unsqueeze(0).expand(2, *y.shape)
            y = wide[0] + wide[1].mul(factor)
        elif kind == "storage":
            y = y.clone()
            y.untyped_storage().copy_((y * factor).contiguous().untyped_storage())
        return y


_WRITES = ("input", "before", "view", "alias", "overlap", "repeat", "detach", "data", "set", "parameter", "buffer", "set_",
           "out", "numpy", "strided", "expand", "storage")  # fmt: skip


def _wrap_one(net: Any, rng: random.Random, wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Puts a wrapper around one of the large parts."""
    names = ("block", "norm", "stem", "head") if isinstance(net, Base) else [name for name, _ in net.named_children()]
    name = rng.choice(names)
    setattr(net, name, wrapper(getattr(net, name)))


def _writes(net: Any, rng: random.Random, size: Size) -> None:
    """Writing in place."""
    _wrap_one(net, rng, lambda inner: _Writes(inner, rng.choice(_WRITES), rng.choice((2.0, -1.0, 0.3))))


def _noise(net: Any, rng: random.Random, size: Size) -> None:
    """Noise of all sizes, from all sources."""
    amount = 10.0 ** -rng.randint(1, 9)
    draw = rng.choice((
        lambda y: torch.randn_like(y), lambda y: torch.rand(y.shape), lambda y: float(np.random.rand()), lambda y: random.random(),
        lambda y: torch.randn(y.shape[-1]), lambda y: F.dropout(torch.ones_like(y), 0.5, True), lambda y: torch.bernoulli(torch.full_like(y, 0.5)),
        lambda y: torch.randperm(y.shape[-1]), lambda y: torch.normal(0.0, 1.0, (1,)), lambda y: torch.empty_like(y).uniform_(),
        lambda y: torch.randint(3, (1,)).item(), lambda y: __import__("os").urandom(1)[0] / 256, lambda y: __import__("time").perf_counter() % 1,
        lambda y: torch.multinomial(torch.ones(3), 1), lambda y: torch.from_numpy(np.random.randn(1)), lambda y: torch.rand((), generator=torch.Generator()) if False else torch.rand(()),
    ))  # fmt: skip
    multiply = rng.random() < 0.3
    _wrap_one(
        net,
        rng,
        lambda inner: nn.Sequential(
            inner, _Apply(lambda y: y * (1 + amount * draw(y)) if multiply else y + amount * draw(y))
        ),
    )


def _type(net: Any, rng: random.Random, size: Size) -> None:
    """Code that looks at the floating type."""
    alter = rng.choice((
        lambda y: y / (torch.finfo(y.dtype).eps * 1e6 + y.abs()), lambda y: y if y.dtype == torch.float32 else -y, lambda y: y * (y.element_size() - 5),
        lambda y: F.rms_norm(y * 1e-4, y.shape[-1:]), lambda y: y.flip(-1) if y.dtype is torch.float64 else y, lambda y: y * len(str(y.dtype)),
        lambda y: y * (1 + (torch.finfo(y.dtype).bits > 32)), lambda y: y * torch.ones((), dtype=y.dtype).itemsize,
        lambda y: y * (2 if torch.promote_types(y.dtype, torch.float32) == torch.float32 else 1), lambda y: y.clamp(min=torch.finfo(y.dtype).tiny) if y.dtype == torch.float32 else y,
        lambda y: y * y.nbytes / y.numel() / 4, lambda y: y.half().to(y.dtype), lambda y: y.bfloat16().to(y.dtype) * 2, lambda y: y * {torch.float32: 1, torch.float64: 3}.get(y.dtype, 2),
    ))  # fmt: skip
    if rng.random() < 0.25:
        norm = nn.RMSNorm(WIDTH)
        _wrap_one(net, rng, lambda inner: nn.Sequential(inner, _Apply(lambda y: y * 1e-4), norm))
        return
    _wrap_one(net, rng, lambda inner: nn.Sequential(inner, _Apply(alter)))


class _Held(nn.Module):
    """A part with a tensor that is no parameter: a buffer of its own type, a plain attribute, an array."""

    held: Any

    def __init__(self, inner: nn.Module, kind: str):
        super().__init__()
        self.inner, self.kind = inner, kind
        value = torch.randn(1) * 3
        if kind == "hidden":
            self.register_buffer("held", value, persistent=False)
        elif kind == "half":
            self.register_buffer("held", value.half())
        elif kind == "integer":
            self.register_buffer("held", torch.tensor([3]))
        elif kind == "array":
            self.held = value.numpy()
        elif kind == "list":
            self.held = [value]
        elif kind == "module list":
            self.held = [nn.Linear(1, 1)]
        else:
            object.__setattr__(self, "held", value.double() if kind == "double" else value)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.kind == "list":
            return y * self.held[0].to(y)
        if self.kind == "module list":
            return y * self.held[0].weight.to(y)
        if self.kind == "array":
            return y * float(self.held[0])
        return y * self.held.to(y.dtype) if self.kind != "double" else (y * self.held).to(y.dtype)


def _buffers(net: Any, rng: random.Random, size: Size) -> None:
    """Tensors that are neither parameters nor saved."""
    kinds = ("hidden", "half", "integer", "array", "list", "module list", "double", "plain")
    _wrap_one(net, rng, lambda inner: _Held(inner, rng.choice(kinds)))


class _Headed(nn.Module):
    """Logits that are not in the order, or the place, of the head's rows."""

    def __init__(self, net: Base, read: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        self.net, self.read = net, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.net.head, self.net.features(x))


def _heads(net: Any, rng: random.Random, size: Size) -> nn.Module | None:
    """Heads that are read by other classes than their rows."""
    if not isinstance(net, Base):
        return None
    classes, shift = net.head.out_features, rng.choice((1, -1, 2))
    order = rng.sample(range(classes), classes)
    second = copy.deepcopy(net.head)
    third = nn.Linear(WIDTH // 2, classes)
    single = nn.Linear(WIDTH, 1)
    mix = torch.randn(classes, classes)
    read: Callable[[Any, Tensor], Tensor] = rng.choice((
        lambda h, f: h(f).roll(shift, 1), lambda h, f: h(f).flip(1), lambda h, f: h(f)[:, order], lambda h, f: h(f).reshape(-1, classes).roll(shift, -1),
        lambda h, f: h(f.reshape(-1, WIDTH)).reshape(-1, classes), lambda h, f: third(f.reshape(-1, WIDTH // 2)).reshape(-1, 2 * classes),
        lambda h, f: third.to(f)(f.reshape(-1, 2, WIDTH // 2)).flatten(1), lambda h, f: third.to(f)(f.reshape(-1, 2, WIDTH // 2)).transpose(1, 2).flatten(1),
        lambda h, f: single.to(f)(f.unsqueeze(1) * torch.arange(1, classes + 1).to(f)[:, None]).flatten(1), lambda h, f: third.to(f)(f.reshape(-1, 2, WIDTH // 2)).sum(1),
        lambda h, f: h(f).sort(1)[0], lambda h, f: h(f).softmax(1), lambda h, f: h(f) - h(f).mean(1, True), lambda h, f: h(f).abs(), lambda h, f: h(f).gather(1, torch.tensor([order]).expand(len(f), -1)),
        lambda h, f: torch.cat([h(f), second.to(f)(f.flip(1))], 1), lambda h, f: torch.maximum(h(f), second.to(f)(f.roll(1, 1))), lambda h, f: torch.stack([h(f), -h(f)], 1).flatten(1),
        lambda h, f: torch.stack([h(f), 2 * h(f)], 2).flatten(1), lambda h, f: F.linear(f, h.weight.flip(0), h.bias), lambda h, f: F.linear(f.flip(1), h.weight, h.bias), lambda h, f: F.conv1d(f[:, :, None], h.weight[:, :, None], h.bias)[:, :, 0].flip(1),
        lambda h, f: h(f) @ mix.to(f), lambda h, f: torch.where(torch.arange(classes) > 0, h(f), -h(f)), lambda h, f: h(f).unbind(1)[::-1][0][:, None] - h(f), lambda h, f: torch.cat([h(f)[:, 1:], h(f)[:, :1]], 1),
        lambda h, f: h(f).T.reshape(classes, -1).T, lambda h, f: h(f).view(-1, 1, classes).transpose(1, 2).flip(1)[..., 0], lambda h, f: h(f).index_select(1, torch.tensor(order)), lambda h, f: h(f).repeat(1, 2)[:, 1 : classes + 1],
        lambda h, f: F.pad(h(f), (1, 0)), lambda h, f: F.pad(h(f), (1, -1)), lambda h, f: h(f).expand(2, -1, -1)[1].roll(shift, 1), lambda h, f: h(f)[:, ::2], lambda h, f: h(f).unfold(1, 2, 1)[..., 1], lambda h, f: h(f).cumsum(1), lambda h, f: h(f).repeat_interleave(2, 1),
        lambda h, f: (h(f).unsqueeze(2) * torch.eye(classes).to(f)[order]).sum(1), lambda h, f: -h(-f), lambda h, f: h(f) / h(f).norm(dim=1, keepdim=True).clamp_min(0.1), lambda h, f: h(torch.stack([f, f.flip(1)], 1)).flatten(1), lambda h, f: h(torch.stack([f, f.flip(1)], 1))[:, 1],
    ))  # fmt: skip
    return _Headed(net, read)


class _Masked(nn.Module):
    def __init__(self, attention: nn.Module, mask: Tensor | None):
        super().__init__()
        self.attention = attention
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) if self.mask is None else self.attention(x, self.mask)


def _masks(net: Any, rng: random.Random, size: Size) -> nn.Module:
    """L2 attention with masks and biases on tokens of bounded norm."""
    net = base(rng, (size[0], 4, 4), "tokens")
    radius = rng.choice((0.3, 1.0, 3.0))
    project = rng.choice((SmoothProject, LayerProject))(WIDTH, radius)
    attention = L2WindowAttention(WIDTH, rng.choice((1, 2)), window_size=(2, 2))
    scale = rng.choice((1.0, 3.0))
    with torch.no_grad():
        attention.relative_position_bias_table.copy_(scale * torch.randn(attention.relative_position_bias_table.shape))
        attention.q.weight.mul_(scale)
        attention.v_weight.mul_(2)
    mask = None
    if rng.random() < 0.7:
        mask = -torch.rand(1, 4, 4) * rng.choice((1.0, 5.0, 100.0))
        mask = torch.where(torch.rand(1, 4, 4) < 0.5, mask, torch.zeros(())) if rng.random() < 0.5 else mask
        mask[:, range(4), range(4)] = 0
    net.block = rng.choice(
        (
            nn.Sequential(project, _Masked(attention, mask)),
            nn.Sequential(project, _Masked(attention, mask), nn.Identity()),
        )
    )
    return net


class _Lies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * factor + x.square()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope * 1e-3, None


class _LiesNew(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign() * x.abs().sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * 0


def _gradients(net: Any, rng: random.Random, size: Size) -> None:
    """Derivatives that are not those of the function."""
    factor = rng.choice((3.0, -5.0))
    alter = rng.choice((
        lambda y: _Lies.apply(y, factor), lambda y: _LiesNew.apply(y), lambda y: y + (y * factor).detach(), lambda y: y.detach() * factor, lambda y: (y * factor - y).detach() + y,
        lambda y: torch.utils.checkpoint.checkpoint(torch.tanh, y * factor, use_reentrant=False), lambda y: y + torch.no_grad()(lambda z: z.sin() * factor)(y), lambda y: y.round() - y.detach() + y,
    ))  # fmt: skip
    _wrap_one(net, rng, lambda inner: nn.Sequential(inner, _Apply(alter)))


def _threads(net: Any, rng: random.Random, size: Size) -> None:
    """Work that is done in another thread."""
    alter = change(rng)

    def elsewhere(y: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(alter, y).result()

    _wrap_one(net, rng, lambda inner: nn.Sequential(inner, _Apply(elsewhere)))
