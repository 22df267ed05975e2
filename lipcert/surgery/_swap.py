"""Which modules of a network are replaced, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import timm.layers
import torch
from timm.models import swin_transformer, vision_transformer
from torch import nn

from lipcert.errors import ConvertError, InputError
from lipcert.surgery._attention import L2Attention, L2WindowAttention
from lipcert.surgery._initial import initialise_attention
from lipcert.surgery._linear import LipConv2d, LipLinear
from lipcert.surgery._projections import LayerProject, SmoothProject

Attention = Literal["l2", "keep"]
Norm = Literal["keep", "project", "smooth"]

# Exact classes only: a subclass may have a forward of its own, such as timm's padded or standardised convolutions.
_LINEAR = {nn.Linear: LipLinear, timm.layers.Linear: LipLinear, nn.Conv2d: LipConv2d}
_ATTENTIONS = {vision_transformer.Attention, getattr(timm.layers, "Attention", vision_transformer.Attention)}
_CHANNELS_LAST = {nn.LayerNorm, timm.layers.LayerNorm}
_CHANNELS_FIRST = {timm.layers.LayerNorm2d}
_PROJECTIONS = {"project": LayerProject, "smooth": SmoothProject}


@dataclass(frozen=True)
class Swapped:
    """One module that was replaced.

    Attributes:
        path: where it stands in the network.
        was: class before.
        now: class after.
    """

    path: str
    was: str
    now: str


@dataclass
class Edit:
    """One planned replacement, which can be taken back.

    Attributes:
        path: where it stands.
        old: the module.
        new: what replaces it; None for a linear map, which stays the same object with its hooks and changes its class.
        places: every (parent, name) under which it is registered.
    """

    path: str
    old: nn.Module
    new: nn.Module | None
    places: Sequence[tuple[nn.Module, str]]

    def __post_init__(self) -> None:
        self.was = type(self.old)

    def apply(self) -> Swapped:
        if self.new is None:
            self.old.__class__ = _LINEAR[self.was]
        for parent, name in self.places:
            setattr(parent, name, self.new or self.old)
        return Swapped(self.path, self.was.__name__, type(self.new or self.old).__name__)

    def initialise(self) -> None:
        """First weights of new attention, without data."""
        if isinstance(self.new, L2Attention):
            initialise_attention(self.new, self.old.qkv)  # type: ignore[arg-type]

    def revert(self) -> None:
        self.old.__class__ = self.was
        for parent, name in self.places:
            setattr(parent, name, self.old)


def swap(net: nn.Module, *, attention: Attention, norm: Norm, initialise: bool = True) -> list[Swapped]:
    """Replaces modules of ``net`` in place, without looking at data.

    Linear and Conv2d become :class:`LipLinear` and :class:`LipConv2d`; subclasses with a forward of their own stay.
    New attention is initialised from the old weights, projections with radius 1 and LayerNorm's weight and bias: a
    state dict or :func:`convert` sets them right.

    Args:
        net: the network, for example a timm model.
        attention: ``"l2"`` replaces the attention of ViT, DeiT and Swin; ``"keep"`` leaves attention alone.
        norm: ``"project"`` or ``"smooth"`` replace LayerNorm and LayerNorm2d; ``"keep"`` leaves them.
        initialise: False saves the time for the weights of new attention, where a state dict follows.

    Returns:
        What was replaced, in the order of ``net.named_modules()``.

    Raises:
        InputError: on an unknown ``attention`` or ``norm``.
        ConvertError: with ``"l2"``, if some attention cannot be replaced; then nothing was.
    """
    edits = plan(net, attention=attention, norm=norm)
    if initialise:
        for edit in edits:
            edit.initialise()
    return [edit.apply() for edit in edits]


def plan(net: nn.Module, *, attention: Attention, norm: Norm) -> list[Edit]:
    """The replacements that :func:`swap` makes, before any is made."""
    if attention not in ("l2", "keep"):
        raise InputError(f"attention must be 'l2' or 'keep', got {attention!r}")
    if norm not in ("keep", *_PROJECTIONS):
        raise InputError(f"norm must be 'keep', 'project' or 'smooth', got {norm!r}")
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in net.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    edits: list[Edit] = []
    refused: list[str] = []
    inside_new: set[nn.Module] = set()
    for path, module in net.named_modules():
        if module in inside_new:
            continue
        new: nn.Module | None = None
        if attention == "l2" and _is_attention(module):
            reason = _obstacle(module)
            if reason:
                refused.append(f"{type(module).__name__} at {path or 'the top'} ({reason})")
                continue
            new = _distance_attention(module)
            inside_new.update(module.modules())
        elif norm != "keep" and is_layer_norm(module):
            new = _projection(module, norm)
        elif type(module) not in _LINEAR or getattr(module, "padding_mode", "zeros") != "zeros":
            continue
        if new is None or module in places:
            edits.append(Edit(path, module, new, places.get(module, ())))
    if refused:
        listed = "; ".join(refused[:3]) + (f"; and {len(refused) - 3} more" if len(refused) > 3 else "")
        raise ConvertError(f"no L2 form for {listed}: convert with attention='keep'")
    return edits


def is_layer_norm(module: nn.Module) -> bool:
    """Whether the module is a LayerNorm over one channel dimension, which a projection can replace."""
    return type(module) in _CHANNELS_LAST | _CHANNELS_FIRST and len(module.normalized_shape) == 1  # type: ignore[arg-type]


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    ours = isinstance(module, L2Attention)
    return ("attention" in name or "attn" in name) and not ours


def _obstacle(module: nn.Module) -> str:
    """Why an attention module cannot be replaced; empty if it can."""
    if type(module) is swin_transformer.WindowAttention:
        return ""
    if type(module) not in _ATTENTIONS:
        return "not the plain attention of ViT, DeiT or Swin"
    for part, meaning in (("q_norm", "query norm"), ("k_norm", "key norm"), ("norm", "output norm")):
        if not isinstance(getattr(module, part, nn.Identity()), nn.Identity):
            return f"it has a {meaning}"
    return "it has a gate" if getattr(module, "gate", None) is not None else ""


def _distance_attention(old: nn.Module) -> L2Attention:
    qkv, proj = old.qkv, old.proj
    assert isinstance(qkv, nn.Linear)
    assert isinstance(proj, nn.Linear)
    heads = int(old.num_heads)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {
        "head_dim": proj.in_features // heads,
        "dim_out": proj.out_features,
        "value_bias": qkv.bias is not None,
        "proj_bias": proj.bias is not None,
        "device": qkv.weight.device,
        "dtype": qkv.weight.dtype,
    }
    new: L2Attention
    if isinstance(old, swin_transformer.WindowAttention):
        new = L2WindowAttention(qkv.in_features, heads, window_size=old.window_size, **arguments)
        new.relative_position_bias_table = old.relative_position_bias_table
    else:
        new = L2Attention(qkv.in_features, heads, **arguments)
    new.proj.weight, new.proj.bias = proj.weight, proj.bias
    new.attn_drop, new.proj_drop = old.attn_drop, old.proj_drop  # type: ignore[assignment]
    return new.train(old.training)


def _projection(norm: nn.Module, kind: Norm) -> nn.Module:
    assert isinstance(norm, nn.LayerNorm)
    reference = norm.weight if norm.weight is not None else torch.empty(0)
    new = _PROJECTIONS[kind](
        norm.normalized_shape[0],
        bias=norm.bias is not None,
        channels_first=type(norm) in _CHANNELS_FIRST,
        device=reference.device,
        dtype=reference.dtype,
    )
    if norm.weight is not None:
        new.weight.data.copy_(norm.weight)
    if new.bias is not None:
        new.bias.data.copy_(norm.bias)
    return new.train(norm.training)
