"""The layers of a network that can be constrained, the sizes of their inputs, and their norms."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lipcert.certvit.moments import Holder
from lipcert.errors import InputError
from lipcert.graph import alterations
from lipcert.model import Model, evaluating
from lipcert.norms import Geometry, Operator, dense_norm
from lipcert.surgery import L2Attention

Untouched = tuple[str, str]


@dataclass(frozen=True)
class Shape:
    """What the norm of a layer depends on besides its weight; worker processes get it."""

    heads: int = 1
    sizes: tuple[tuple[int, ...], ...] = ()
    geometry: Geometry | None = None

    def norm(self, weight: Tensor) -> float:
        """An upper bound on the ℓ2 norm of the layer with this weight."""
        if self.geometry is None:
            return float(dense_norm(weight.unflatten(0, (self.heads, -1))))
        return float(max(Operator(weight, self.geometry, size).norm for size in self.sizes))


@dataclass
class Layer:
    """A Linear or Conv2d layer of the network, or the values of an L2 attention, and the name of its weight."""

    module: Holder
    name: str = "weight"
    sizes: set[tuple[int, ...]] = field(default_factory=set)
    called: bool = False

    @property
    def weight(self) -> Tensor:
        """The constrained parameter; the weight of values has a group of rows for each head."""
        weight: Tensor = getattr(self.module, self.name)
        return weight

    @property
    def shape(self) -> Shape:
        """How the layer applies its weight."""
        if isinstance(self.module, L2Attention):
            return Shape(self.module.num_heads)
        if isinstance(self.module, nn.Conv2d):
            return Shape(sizes=tuple(sorted(self.sizes)), geometry=Geometry.of_module(self.module))
        return Shape()


def choose(model: Model, names: Iterable[str] | None) -> tuple[dict[str, Layer], list[Untouched]]:
    """The layers to constrain, in the order of the network, and the other weights, with the reason."""
    layers: dict[str, Layer] = {}
    owners: dict[int, list[str]] = {}  # the paths at which each parameter is registered, by its id
    for path, module in model.net.named_modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(path)
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            layers[path] = Layer(module)
        elif isinstance(module, L2Attention):
            layers[f"{path}.v".lstrip(".")] = Layer(module, "v_weight")
    _watch(model, layers)
    obstacles = {path: _obstacle(path, layer, owners) for path, layer in layers.items()}
    if names is None:
        chosen = {path: layer for path, layer in layers.items() if not obstacles[path]}
        untouched = [(path, reason) for path, reason in obstacles.items() if reason]
    else:
        requested = list(names)
        for name in requested:
            if name not in layers:
                raise InputError(_unknown(name, model.net, layers))
            if obstacles[name]:
                raise InputError(f"layer {name} cannot be constrained: {obstacles[name]}; leave it out")
        chosen = {path: layer for path, layer in layers.items() if path in requested}
        untouched = []
    if not chosen:
        raise InputError("no Linear or Conv2d layer to constrain; name one, or convert the network first")
    return chosen, untouched + _other_weights(model.net)


def _watch(model: Model, layers: Mapping[str, Layer]) -> None:
    def note(layer: Layer, images: Tensor) -> None:
        layer.called = True
        if isinstance(layer.module, nn.Conv2d):
            layer.sizes.add(tuple(images.shape[-2:]))

    with contextlib.ExitStack() as stack, evaluating(model), torch.no_grad():
        for layer in layers.values():
            hook = layer.module.register_forward_pre_hook(lambda _, inputs, layer=layer: note(layer, inputs[0]))
            stack.enter_context(hook)
        model(torch.full((1, *model.input_size), 0.5, dtype=model.dtype, device=model.device))


def _obstacle(path: str, layer: Layer, owners: Mapping[int, list[str]]) -> str:
    """The reason why a layer cannot be constrained; empty if it can."""
    weight = layer.module._parameters.get(layer.name)
    if weight is None:
        return "its weight is computed from other parameters"
    owner_path = path if layer.name == "weight" else path.removesuffix("v").removesuffix(".")
    shared = [owner for owner in owners[id(weight)] if owner != owner_path]
    if shared:
        return f"it shares its weight with {', '.join(shared)}"
    if not layer.called:
        return "the network never calls it: it is unused, or another module reads its weight"
    if not _is_plain(layer.module):
        return f"a {type(layer.module).__name__} does more than multiply by its weight"
    return ""


def _is_plain(module: Holder) -> bool:
    """Whether a layer only multiplies its inputs by the weight; a subclass may pad them first."""
    kind = type(module)
    if next(alterations(module), None):
        return False
    if isinstance(module, L2Attention):
        return True
    if isinstance(module, nn.Linear):
        from timm.layers import Linear  # not above: worker processes need no timm, which takes seconds to import

        return kind.forward in (nn.Linear.forward, Linear.forward)
    return kind.forward is nn.Conv2d.forward and kind._conv_forward is nn.Conv2d._conv_forward


def _unknown(name: str, net: nn.Module, layers: Mapping[str, Layer]) -> str:
    if name and name in dict(net.named_modules()):
        return f"{name} is of class {type(net.get_submodule(name)).__name__}; only Linear and Conv2d can be constrained"
    close = difflib.get_close_matches(name, layers, n=1)
    return f"the network has no layer {name!r}; " + (
        f"did you mean {close[0]}?" if close else f"its layers are named like {next(iter(layers), 'none')}"
    )


def _other_weights(net: nn.Module) -> list[Untouched]:
    """Weight matrices that belong to no layer, with the reason why they are not constrained."""
    return [
        (f"{path}.{name}".lstrip("."), f"it is no Linear or Conv2d layer but part of a {type(module).__name__}")
        for path, module in net.named_modules()
        if not isinstance(module, (nn.Linear, nn.Conv2d, L2Attention))
        for name, parameter in module._parameters.items()
        if parameter is not None and "weight" in name and parameter.dim() >= 2
    ]
