"""Plans and makes the replacements of modules in a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lipcert.errors import InputError
from lipcert.graph import alterations
from lipcert.surgery._activations import ACTIVATIONS
from lipcert.surgery._arranged import L2SetAttention
from lipcert.surgery._attention import L2Attention
from lipcert.surgery._initial import heads_of, initialise_attention, sizes_of
from lipcert.surgery._linear import LipConv2d, LipLinear
from lipcert.surgery._projections import PROJECTIONS
from lipcert.surgery._table import ATTENTIONS, attention_reason, class_name, norm_kind, norm_reason

Attention = Literal["l2", "keep"]
Norm = Literal["keep", "project", "smooth", "lofast"]
Activation = Literal["keep", "clipped-relu", "clipped-maxmin", "maxmin"]

# Exact classes only: subclasses, such as timm's padded or standardised convolutions, may override ``forward``.
_LINEAR: dict[str, type[nn.Module]] = {
    "torch.nn.modules.linear.Linear": LipLinear,
    "timm.layers.linear.Linear": LipLinear,
    "torch.nn.modules.conv.Conv2d": LipConv2d,
}


@dataclass(frozen=True)
class Swapped:
    """A replaced module by its path in the network, with its class before and now."""

    path: str
    was: str
    now: str


@dataclass(frozen=True)
class Kept:
    """A module of a kind to be replaced that was kept, by its path in the network, and the reason."""

    path: str
    was: str
    reason: str


@dataclass
class Edit:
    """One planned replacement, which can be reverted."""

    path: str
    old: nn.Module
    new: nn.Module | None  # None for a linear map, which stays the same object and only changes its class
    places: Sequence[tuple[nn.Module, str]]  # every (parent, name) under which the module is registered
    after: Sequence[nn.Module] = ()  # parts of the old module that run after the new one, such as an activation

    def __post_init__(self) -> None:
        self.was = type(self.old)

    def apply(self) -> Swapped:
        if self.new is None:
            self.old.__class__ = _LINEAR[class_name(self.old)]
        now = self.new or self.old
        swapped = Swapped(self.path, self.was.__name__, type(now).__name__)
        if self.after:
            now = nn.Sequential(now, *self.after).train(self.old.training)
        for parent, name in self.places:
            setattr(parent, name, now)
        return swapped

    def initialise(self, tokens: Tensor | None = None) -> None:
        """Sets the initial weights of new attention, from its input tokens if they are known."""
        if isinstance(self.new, L2Attention):
            if tokens is not None and isinstance(self.new, L2SetAttention) and self.new.arrangement == "channels":
                tokens = tokens.movedim(1, -1)
            heads = heads_of(self.old, ATTENTIONS[class_name(self.old)].packing, tokens)
            initialise_attention(self.new, heads, tokens)

    def revert(self) -> None:
        self.old.__class__ = self.was
        for parent, name in self.places:
            setattr(parent, name, self.old)


def swap(
    net: nn.Module, *, attention: Attention, norm: Norm, activation: Activation = "keep", initialise: bool = True
) -> list[Swapped]:
    """Replaces modules of ``net`` in place, without data.

    Linear and Conv2d become :class:`LipLinear` and :class:`LipConv2d`; subclasses are kept. New attention is
    initialised from the old weights. Projections start with radius 1 and LayerNorm's weight and bias. A state dict or
    :func:`convert` must set the final values.
    """
    edits, _ = plan(net, attention=attention, norm=norm, activation=activation)
    if initialise:
        for edit in edits:
            edit.initialise()
    return [edit.apply() for edit in edits]


def plan(
    net: nn.Module, *, attention: Attention, norm: Norm, activation: Activation = "keep"
) -> tuple[list[Edit], list[Kept]]:
    """The replacements that :func:`swap` will make, and the modules of the requested kinds that are kept."""
    if attention not in ("l2", "keep"):
        raise InputError(f"attention must be 'l2' or 'keep', got {attention!r}")
    if norm not in ("keep", *PROJECTIONS):
        raise InputError(f"norm must be 'keep', {', '.join(map(repr, PROJECTIONS))}, got {norm!r}")
    if activation not in ("keep", *ACTIVATIONS):
        raise InputError(f"activation must be 'keep', {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in net.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    edits: list[Edit] = []
    kept: list[Kept] = []
    inside_new: set[nn.Module] = set()
    for path, module in net.named_modules():
        if module in inside_new:
            continue
        new: nn.Module | None = None
        after: list[nn.Module] = []
        reason = attention_reason(module) if attention == "l2" else None
        if reason is None and norm != "keep":
            reason = norm_reason(module)
            if reason == "" and norm_kind(module)[0] not in PROJECTIONS[norm]:
                reason = f"{norm} projects tokens, not groups of channels"
        if reason == "" and (altered := next(alterations(module), None)):
            reason = f"its code is not that of its class: {altered[0]}"
        if reason:
            kept.append(Kept(path, type(module).__name__, reason))
        if reason == "":
            if class_name(module) in ATTENTIONS:
                new = _distance_attention(module)
            else:
                new = _projection(module, norm, device)
                if norm == "lofast":
                    _of_lofast(new, any(_before_attention(*place) for place in places.get(module, ())))
                after = [part for part in module.children() if not isinstance(part, nn.Identity)]
            inside_new.update(module.modules())
        elif type(module) is nn.ReLU and activation != "keep":
            new = ACTIVATIONS[activation]().to(device).train(module.training)
        elif class_name(module) not in _LINEAR:
            continue
        if new is None or module in places:
            edits.append(Edit(path, module, new, places.get(module, ()), after))
    return edits, kept


def _distance_attention(old: Any) -> L2Attention:
    replacement = ATTENTIONS[class_name(old)]
    proj = old.proj
    heads, dim, width, value_width, value_bias = sizes_of(old, replacement.packing)
    arguments: dict[str, Any] = {
        "head_dim": width,
        "value_dim": value_width,
        "dim_out": proj.weight.shape[0],
        "value_bias": value_bias,
        "proj_bias": proj.bias is not None,
        "device": proj.weight.device,
        "dtype": proj.weight.dtype,
    }
    new = replacement.now(dim, heads, **replacement.own(old), **arguments)
    if replacement.channel_last_heads:
        new.proj.weight = nn.Parameter(proj.weight.detach().unflatten(1, (-1, heads)).transpose(1, 2).flatten(1))
    elif isinstance(proj, _ConvNd):
        new.proj.weight = nn.Parameter(proj.weight.detach().flatten(1))
    else:
        new.proj.weight = proj.weight
    new.proj.bias = proj.bias
    new.attn_drop, new.proj_drop = getattr(old, "attn_drop", nn.Identity()), getattr(old, "proj_drop", nn.Identity())
    return new.train(old.training)


def _projection(norm: Any, kind: Norm, device: torch.device) -> nn.Module:
    form, first = norm_kind(norm)
    weight, bias = norm.weight, getattr(norm, "bias", None)
    reference = weight if weight is not None else torch.empty(0, device=device)
    arguments: dict[str, Any] = {"bias": bias is not None, "device": reference.device, "dtype": reference.dtype}
    projection: Any = PROJECTIONS[kind][form]
    if form == "group":
        new = projection(norm.num_channels, groups=norm.num_groups, **arguments)
    else:
        new = projection(norm.normalized_shape[0], channels_first=first, **arguments)
    if weight is not None:
        new.weight.data.copy_(weight)
    if new.bias is not None:
        new.bias.data.copy_(norm.bias)
    return new.train(norm.training)


def _before_attention(parent: nn.Module, name: str) -> bool:
    """Whether the next child of the parent, but for identities, is attention."""
    names = list(parent._modules)
    later = (parent._modules[name_after] for name_after in names[names.index(name) + 1 :])
    following = next((child for child in later if child is not None and not isinstance(child, nn.Identity)), None)
    return following is not None and attention_reason(following) is not None


def _of_lofast(projection: Any, before_attention: bool) -> None:
    """Equation 29 of LoFAST: a radius of 1 before attention and of √d elsewhere, weight 1 that is not trained."""
    projection.bias = None
    projection.weight.data.fill_(1.0)
    projection.weight.requires_grad_(False)
    projection.radius.fill_(1.0 if before_attention else projection.dim**0.5)
