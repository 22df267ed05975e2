"""Further families: layers of torch, scripts, odd weights, odd methods, and tampered networks of timm."""

# ruff: noqa: E501
from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._hostile import WIDTH, Base, Size, change, on_tensors, parts
from benchmarks._tampering import (
    Family,
    _Apply,
    _buffers,
    _global_hooks,
    _gradients,
    _heads,
    _hooks,
    _linears,
    _masks,
    _noise,
    _parametrised,
    _patched,
    _replaced,
    _state,
    _subclass,
    _threads,
    _type,
    _wrap_one,
    _writes,
)


def _branching(x: Tensor) -> Tensor:
    if x.max() > 0.6:
        return x * 2
    return -x


def _doubled(x: Tensor) -> Tensor:
    return x * 2 + x.sin()


class _Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x
        while bool(y.abs().max() > 0.5):
            y = y * 0.7
        return y


def _scripts(net: Any, rng: random.Random, size: Size) -> nn.Module | None:
    """Scripted and traced parts, functions and networks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = rng.choice(
            ("part", "function", "branch", "loop", "trace", "attribute", "whole", "trace whole", "fx", "freeze")
        )
        image = torch.rand(1, *size)
        if kind == "whole":
            return torch.jit.script(net)
        if kind == "trace whole":
            return torch.jit.trace(net.eval(), image, check_trace=False)
        if kind == "fx":
            return torch.fx.symbolic_trace(net)
        if kind == "freeze":
            return torch.jit.freeze(torch.jit.script(net.eval()), preserved_attrs=["training"])
        if kind == "part":
            parent, name, part = rng.choice(parts(net))
            setattr(parent, name, torch.jit.script(part))
            return None
        added: nn.Module
        if kind == "loop":
            added = torch.jit.script(_Loop())
        elif kind == "trace":
            added = torch.jit.trace(_Apply(rng.choice((_branching, _doubled))), torch.rand(1, WIDTH), check_trace=False)
        else:
            added = _Apply(torch.jit.script(_branching if kind == "branch" else _doubled))
        _wrap_one(net, rng, lambda inner: nn.Sequential(inner, added))
    return None


class _Cell(nn.Module):
    """A recurrent or other layer of torch on the features, with its results added."""

    def __init__(self, layer: nn.Module, read: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.layer, self.read = layer, read

    def forward(self, x: Tensor) -> Tensor:
        return x + self.read(self.layer, x)


def _layers(net: Any, rng: random.Random, size: Size) -> None:
    """Layers of torch that are seldom met in classifiers."""
    d = WIDTH
    choices: tuple[tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]], ...] = (
        (lambda: nn.LSTMCell(d, d), lambda m, x: m(x)[0]), (lambda: nn.LSTMCell(d, d), lambda m, x: m(x, (x, x))[1]), (lambda: nn.GRUCell(d, d), lambda m, x: m(x, x)), (lambda: nn.RNNCell(d, d), lambda m, x: m(x)),
        (lambda: nn.LSTM(d, d, batch_first=True), lambda m, x: m(x[:, None])[0][:, 0]), (lambda: nn.LSTM(1, 2, 2, batch_first=True, bidirectional=True), lambda m, x: m(x[..., None])[0].sum(1)), (lambda: nn.LSTM(d, d, proj_size=2, batch_first=True), lambda m, x: m(x[:, None])[0].repeat(1, 2, 2)[:, 0]),
        (lambda: nn.GRU(d, d, batch_first=True), lambda m, x: m(x[:, None])[0][:, 0]), (lambda: nn.RNN(1, d, batch_first=True), lambda m, x: m(x[..., None])[1][0]), (lambda: nn.MultiheadAttention(d, 2, batch_first=True), lambda m, x: m(x[:, None], x[:, None], x[:, None])[0][:, 0]),
        (lambda: nn.MultiheadAttention(1, 1, batch_first=True), lambda m, x: m(x[..., None], x[..., None], x[..., None], need_weights=False)[0][..., 0]), (lambda: nn.TransformerEncoderLayer(d, 2, 8, batch_first=True), lambda m, x: m(x[:, None])[:, 0]), (lambda: nn.TransformerEncoderLayer(1, 1, 2, batch_first=True, norm_first=True), lambda m, x: m(x[..., None])[..., 0]),
        (lambda: nn.Embedding(4, d), lambda m, x: m((x.sigmoid() * 4).long().clamp(0, 3)).sum(1)), (lambda: nn.Embedding(4, d), lambda m, x: m(x.argmax(-1))), (lambda: nn.EmbeddingBag(4, d), lambda m, x: m(x.topk(2)[1])), (lambda: nn.Bilinear(d, d, d), lambda m, x: m(x, x.flip(-1))),
        (lambda: nn.BatchNorm1d(d, track_running_stats=False), lambda m, x: m(x) if len(x) > 1 else x), (lambda: nn.InstanceNorm1d(1), lambda m, x: m(x[:, None])[:, 0]), (lambda: nn.LocalResponseNorm(2), lambda m, x: m(x[:, :, None])[:, :, 0]), (lambda: nn.CosineSimilarity(-1), lambda m, x: m(x, x.flip(-1))[..., None] * x),
        (lambda: nn.PReLU(), lambda m, x: m(x)), (lambda: nn.RReLU(), lambda m, x: m(x)), (lambda: nn.Softmax2d(), lambda m, x: m(x[:, :, None, None])[..., 0, 0]), (lambda: nn.Softmin(-1), lambda m, x: m(x)), (lambda: nn.Threshold(0.3, 5.0), lambda m, x: m(x)), (lambda: nn.Hardshrink(0.3), lambda m, x: m(x)), (lambda: nn.GLU(), lambda m, x: m(torch.cat([x, x], -1))),
        (lambda: nn.PairwiseDistance(), lambda m, x: m(x, x.roll(1, -1))[..., None] * x), (lambda: nn.Fold((2, 2), 2), lambda m, x: m(x[..., None]).flatten(1)), (lambda: nn.Unfold(1), lambda m, x: m(x[:, :, None, None])[..., 0]), (lambda: nn.Upsample(scale_factor=2), lambda m, x: m(x[:, None])[:, 0, ::2]), (lambda: nn.MaxPool1d(2, 1, 1, 2), lambda m, x: F.pad(m(x), (0, 1))),
        (lambda: nn.Flatten(0), lambda m, x: m(x).reshape(x.shape)), (lambda: nn.AdaptiveMaxPool1d(2), lambda m, x: m(x).repeat(1, 2)), (lambda: nn.LPPool1d(2, 2, 1), lambda m, x: F.pad(m(x[:, None])[:, 0], (0, 1))), (lambda: nn.ReplicationPad1d(1), lambda m, x: m(x[:, None])[:, 0, 2:]), (lambda: nn.CircularPad1d(1), lambda m, x: m(x[:, None])[:, 0, :d]),
        (lambda: nn.ConvTranspose1d(1, 1, 3, padding=1), lambda m, x: m(x[:, None])[:, 0]), (lambda: nn.LayerNorm(d, elementwise_affine=False), lambda m, x: m(x)), (lambda: nn.GroupNorm(2, d), lambda m, x: m(x)), (lambda: nn.RMSNorm(d), lambda m, x: m(x)), (lambda: nn.CrossMapLRN2d(2), lambda m, x: m(x[:, :, None, None])[..., 0, 0]),
    )  # fmt: skip
    make, read = rng.choice(choices)
    layer = _Cell(make(), read)
    if not isinstance(net, Base):
        return
    where = rng.choice(("norm", "block")) if isinstance(net.stem, nn.Sequential) and len(net.block) == 3 else "norm"
    setattr(net, where, nn.Sequential(getattr(net, where), layer))


class _Odd(Tensor):
    """A weight that doubles every product it is in."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, kinds, args, kwargs or {})
        if function is F.linear and isinstance(result, Tensor):
            return result.as_subclass(Tensor) * 2
        return result


def _weights(net: Any, rng: random.Random, size: Size) -> None:
    """Weights that are shared, strided, overlapping, empty, of another class, or not finite."""
    layer: Any = rng.choice([found for found in _linears(net) if isinstance(found, nn.Linear)] or _linears(net))
    weight = layer.weight.detach()
    kind = rng.choice(("transposed", "expanded", "reversed", "shared", "overlapping", "subclass", "gradient", "nan", "inf", "frozen",
                       "huge", "tiny", "plain", "buffer", "inference", "sparse", "big bias", "non-leaf"))  # fmt: skip
    if kind == "transposed":
        layer.weight = nn.Parameter(weight.mT.contiguous().mT)
    elif kind == "expanded":
        layer.weight = nn.Parameter(weight[:1].expand_as(weight))
    elif kind == "reversed":
        layer.weight = nn.Parameter(weight.flip(0)[:, torch.arange(weight.shape[1] - 1, -1, -1)])
    elif kind == "shared" and isinstance(net, Base):
        net.other = nn.Linear(WIDTH, WIDTH)
        net.norm = nn.Sequential(net.norm, net.other, net.other)
    elif kind == "overlapping":
        layer.weight = nn.Parameter(
            torch.randn(weight.numel()).as_strided(weight.shape, (1, *[1] * (weight.dim() - 1)))
        )
    elif kind == "subclass":
        layer.weight = nn.Parameter(weight.as_subclass(_Odd)) if rng.random() < 0.5 else layer.weight
        if not isinstance(layer.weight, _Odd):
            layer._parameters["weight"] = weight.as_subclass(_Odd)
    elif kind == "gradient":
        layer.weight.requires_grad_()
        layer.weight.grad = torch.ones_like(weight)
    elif kind in ("nan", "inf"):
        layer.register_buffer("_unused", torch.tensor([float(kind)]))
    elif kind in ("huge", "tiny"):
        layer.weight = nn.Parameter(weight * (1e12 if kind == "huge" else 1e-12))
    elif kind in ("plain", "buffer"):
        del layer.weight
        if kind == "plain":
            object.__setattr__(layer, "weight", weight)
        else:
            layer.register_buffer("weight", weight, persistent=False)
    elif kind == "inference":
        with torch.inference_mode():
            fresh = weight.clone()
        layer.weight = nn.Parameter(fresh, requires_grad=False)
    elif kind == "sparse":
        layer.weight = nn.Parameter(weight.to_sparse(), requires_grad=False)
    elif kind == "big bias" and layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach() + 1e6)
    elif kind == "non-leaf":
        del layer.weight
        layer.weight = weight.clone().requires_grad_() * 2


def _methods(net: Any, rng: random.Random, size: Size) -> nn.Module | None:
    """Networks with their own eval, copy, type or list of parts, or other results than one tensor."""
    kind = type(net)
    alter = change(rng)
    which = rng.choice(("to", "named_modules", "parameters", "training", "state_dict", "getstate", "default", "kwargs", "list", "generator",
                        "getattribute", "eq", "repr", "apply", "batch", "first", "view", "grad", "names", "wrap", "parallel", "child in training",
                        "function", "closure", "global", "shape"))  # fmt: skip
    body: dict[str, Any] = {}
    calls = lambda self, *given: kind.forward(self, *given)  # noqa: E731
    if which == "to":
        body["double"] = lambda self: self
        body["to"] = lambda self, *given, **named: self
    elif which == "apply":
        body["_apply"] = lambda self, *given, **named: self
    elif which == "named_modules":
        body["named_modules"] = lambda self, *given, **named: iter([("", self)])
        body["forward"] = lambda self, x: on_tensors(alter, calls(self, x))
    elif which == "parameters":
        body["named_parameters"] = lambda self, *given, **named: iter(())
    elif which == "training":
        body["train"] = lambda self, mode=True: nn.Module.train(self, True) if rng.random() < 2 else self
    elif which == "state_dict":
        body["state_dict"] = lambda self, *given, **named: {}
    elif which == "getstate":
        body["__reduce_ex__"] = lambda self, protocol: (
            Base,
            (nn.Flatten(), nn.Linear(size[0] * 16, WIDTH), nn.Identity(), nn.Linear(WIDTH, 3)),
        )
    elif which == "default":
        body["forward"] = lambda self, x, factor=2.0: calls(self, x) * factor
    elif which == "kwargs":
        body["forward"] = lambda self, x=None, **named: calls(self, x)
    elif which == "list":
        body["forward"] = lambda self, x: [calls(self, x)]
    elif which == "generator":
        body["forward"] = lambda self, x: next(y for y in (calls(self, x) for _ in range(1)))
    elif which == "getattribute":
        body["__getattribute__"] = lambda self, name: object.__getattribute__(self, name)
        body["forward"] = lambda self, x: alter(calls(self, x))
    elif which == "eq":
        body["__eq__"] = lambda self, other: True
        body["__hash__"] = lambda self: 1
    elif which == "repr":
        body["__repr__"] = lambda self: "Linear()\n\x1b[2J"
    elif which == "batch":
        body["forward"] = lambda self, x: calls(self, x) - calls(self, x).mean(0, True) * (len(x) > 1)
    elif which == "first":
        body["forward"] = lambda self, x: calls(self, x[:1]).expand(len(x), -1) + calls(self, x)
    elif which == "view":
        body["forward"] = lambda self, x: calls(self, x)[:]
    elif which == "grad":
        body["forward"] = torch.enable_grad()(lambda self, x: calls(self, x).detach())
    elif which == "names":
        net.add_module("weird name \n; DROP", nn.Linear(1, 1))
    elif which == "wrap":
        return nn.Sequential(net, _Apply(alter))
    elif which == "parallel":
        return nn.DataParallel(net)
    elif which == "child in training":
        part = rng.choice(parts(net))[2]
        vars(part)["left_in_training"] = True
        part.train()
    elif which == "function":
        body["forward"] = lambda self, x: (
            torch.func.functional_call(self, {}, (x,))
            if False
            else torch.func.vmap(lambda image: calls(self, image[None])[0])(x)
        )
    elif which == "closure":
        seen = [0]

        def counted(self: Any, x: Tensor) -> Tensor:
            seen[0] += 1
            return calls(self, x) * (1 if seen[0] % 7 else -1)

        body["forward"] = counted
    elif which == "global":
        body["forward"] = lambda self, x: (
            calls(self, x) if torch.get_num_threads() > 0 and not torch.is_grad_enabled() else -calls(self, x)
        )
    elif which == "shape":
        body["forward"] = lambda self, x: calls(self, x) * (1 if x.shape[0] == 1 else -1)
    if body:
        net.__class__ = type(kind.__name__, (kind,), {**body, "__module__": kind.__module__})
    return None


def _timm(net: Any, rng: random.Random, size: Size) -> nn.Module | None:
    """A network of timm, tampered with in one of the ways above or in its own."""
    which = rng.choice(("hooks", "patched", "replaced", "subclass", "drop", "features", "head", "act", "none"))
    if which in ("hooks", "patched", "replaced", "subclass"):
        {"hooks": _hooks, "patched": _patched, "replaced": _replaced, "subclass": _subclass}[which](net, rng, size)
    elif which == "drop":
        named = [found for found in parts(net) if "drop" in found[1]]
        if named:
            parent, name, _ = rng.choice(named)
            setattr(parent, name, _Apply(change(rng)))
    elif which in ("features", "head"):
        name = f"forward_{which}"
        original, alter = getattr(net, name), change(rng)
        setattr(net, name, lambda *given, **named: alter(original(*given, **named)))
    elif which == "act":
        found = [part for part in parts(net) if isinstance(part[2], (nn.ReLU, nn.GELU))]
        for parent, name, _ in found:
            setattr(parent, name, _Apply(change(rng)))
    return None


FAMILIES: dict[str, Family] = {
    "hooks": _hooks,
    "global hooks": _global_hooks,
    "patched methods": _patched,
    "replaced parts": _replaced,
    "subclass": _subclass,
    "parametrised": _parametrised,
    "state": _state,
    "writes": _writes,
    "noise": _noise,
    "type": _type,
    "buffers": _buffers,
    "heads": _heads,
    "masks": _masks,
    "gradients": _gradients,
    "threads": _threads,
    "scripts": _scripts,
    "layers": _layers,
    "weights": _weights,
    "methods": _methods,
    "timm": _timm,
}
