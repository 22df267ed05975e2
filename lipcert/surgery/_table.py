"""Tables of the replacements for classes of timm and torch, used by :func:`lipcert.convert`.

Classes are given by name and not imported, so the tables work with every version of timm. An entry does not apply to
subclasses, which may override ``forward``. Modules in no table are kept, and the report lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lipcert.surgery._arranged import (
    ContinuousBias,
    GivenBias,
    L2RotaryAttention,
    L2SetAttention,
    L2WindowAttention,
    PairBias,
    TableBias,
)
from lipcert.surgery._attention import L2Attention


@dataclass(frozen=True)
class Replacement:
    """The replacement of a softmax attention class by L2 attention."""

    now: type[L2Attention]
    packing: str = "qkv"  # the layers of its queries, keys and values, see lipcert.surgery._initial
    own: Callable[[Any], dict[str, Any]] = lambda module: {}  # the arguments that a module determines
    channel_last_heads: bool = False  # whether the head index varies fastest in the input of the output projection


def _named(classes: str) -> set[str]:
    """The full names of classes, given as "module: class class; module: class"."""
    modules = (part.split(": ") for part in classes.split("; "))
    return {f"{module}.{name}" for module, names in modules for name in names.split()}


def _set(
    packing: str = "qkv", bias: Callable[[Any], nn.Module | None] | None = None, last: bool = False, **fixed: Any
) -> Replacement:
    """A replacement by :class:`L2SetAttention`."""
    return Replacement(L2SetAttention, packing, lambda m: fixed if bias is None else {**fixed, "bias": bias(m)}, last)


def _rel_pos(module: Any) -> nn.Module | None:
    return None if module.rel_pos is None else GivenBias(module.rel_pos)


def _beit_bias(module: Any) -> nn.Module | None:
    if module.relative_position_bias_table is None:
        return None
    return TableBias(module.relative_position_bias_table, module.relative_position_index)


def _swin_v2_bias(module: Any) -> nn.Module:
    area = module.window_size[0] * module.window_size[1]
    index = module.relative_position_index.view(area, area)
    return ContinuousBias(module.cpb_mlp, module.relative_coords_table.squeeze(0), index)


def _units(module: Any) -> dict[str, Any]:
    within = module.use_mask_unit_attn
    return {"arrangement": "units", "area": module.window_size} if within else {"arrangement": "tokens"}


_ROTARY = Replacement(
    L2RotaryAttention,
    own=lambda m: {"prefix": m.num_prefix_tokens, "by_halves": getattr(m, "rotate_half", False)},
)

ATTENTIONS: dict[str, Replacement] = {
    "timm.layers.attention.Attention": Replacement(L2Attention),
    "timm.models.vision_transformer.Attention": Replacement(L2Attention),
    "timm.models.convit.MHSA": Replacement(L2Attention),
    "timm.models.swin_transformer.WindowAttention": Replacement(
        L2WindowAttention, own=lambda m: {"window_size": m.window_size, "table": m.relative_position_bias_table}
    ),
    "timm.layers.attention.AttentionRope": _ROTARY,
    "timm.models.eva.EvaAttention": _ROTARY,
    "timm.models.beit.Attention": _set(bias=_beit_bias),
    "timm.models.cait.ClassAttn": _set("q, k, v", first=True),
    "timm.models.crossvit.CrossAttention": _set("wq, wk, wv", first=True),
    "timm.models.volo.ClassAttention": _set("q, kv", first=True),
    "timm.models.volo.Attention": _set(arrangement="grid"),
    "timm.models.davit.WindowAttention": _set(),
    "timm.models.maxxvit.Attention2d": _set(arrangement="channels", bias=_rel_pos),
    "timm.models.maxxvit.AttentionCl": _set(arrangement="grid", bias=_rel_pos),
    "timm.layers.attention2d.Attention2d": _set(arrangement="channels"),
    "timm.models.swin_transformer_v2.WindowAttention": _set(bias=_swin_v2_bias),
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": _set(
        bias=lambda module: PairBias(module.meta_mlp, module.relative_coordinates_log)
    ),
    "timm.models.vision_transformer_relpos.RelPosAttention": _set(bias=_rel_pos),
    "timm.models.gcvit.WindowAttentionGlobal": _set(bias=_rel_pos),
    "timm.models.hiera.MaskUnitAttention": Replacement(L2SetAttention, own=_units),
    "timm.models.hieradet_sam2.MultiScaleAttention": _set(arrangement="grid"),
    "timm.models.vision_transformer_sam.Attention": _set(arrangement="grid"),
    "timm.models.metaformer.Attention": _set(),
    "timm.models.nest.Attention": _set(last=True),
    "timm.models.tnt.Attention": _set("qk, v"),
    "timm.models.twins.LocallyGroupedAttn": Replacement(
        L2SetAttention, own=lambda m: {"arrangement": "windows", "area": m.ws**2}
    ),
    "timm.models.visformer.Attention": _set(arrangement="channels"),
    "timm.models.fastvit.Attention": _set(arrangement="channels"),
    "timm.models.efficientformer.Attention": _set(
        "by head", lambda m: TableBias(nn.Parameter(m.attention_biases.detach().T.clone()), m.attention_bias_idxs)
    ),
}

_QUERY_BIAS = "its position bias is multiplied by the queries, so it depends on the image"
_POOLED = "queries are pooled, so they belong to other tokens than the keys"
# Attributes of a module of these classes that rule its replacement out, unless they have one of the values.
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "norm": ("its result is normalised before the output projection", (None, nn.Identity)),
    "gate": ("a gate computed from the tokens multiplies its result", (None,)),
    "num_kv_groups": ("several heads share one key", (1,)),
    "sequential_attn": ("its bias depends on the image", (False,)),
    "use_rel_pos": (_QUERY_BIAS, (False,)),
    "rope": ("rotary embedding of its own", (None,)),
    "q_stride": (_POOLED, (None, 1)),
    "q_pool": (_POOLED, (None,)),
    "use_global": ("queries come from a summary of the whole image", (False,)),
}

KEPT: dict[str, str] = {
    name: reason
    for reason, classes in {
        "queries and keys may be different tokens (pooled, convolved, learned), and a distance needs the same": (
            "timm.models.pvt_v2: Attention; timm.models.twins: GlobalSubSampleAttn; timm.models.mvitv2: "
            "MultiScaleAttention MultiScaleAttentionPoolFirst; timm.models.nextvit: EfficientAttention; "
            "timm.models.lowformer: ConvAttention; timm.models.cpubone: ConvAttention; timm.models.levit: "
            "AttentionDownsample; timm.layers.attention2d: MultiQueryAttentionV2 MultiQueryAttention2d; "
            "timm.layers.attention_pool: AttentionPoolLatent AttentionPoolPrr; timm.layers.attention_pool2d: "
            "AttentionPool2d RotAttentionPool2d; timm.models._efficientnet_blocks: MobileAttention; "
            "torch.nn.modules.activation: MultiheadAttention"
        ),
        "more than attention: mixed heads or softmaxes, heads in turn, or a gate, norm, activation or MLP inside": (
            "timm.models.cait: TalkingHeadAttn; timm.models.efficientformer_v2: Attention2d Attention2dDownsample; "
            "timm.models.convit: GPSA; timm.models.iformer: SHMA; timm.models.shvit: SHSA; timm.models.levit: "
            "Attention; timm.models.vision_transformer: ParallelScalingBlock DiffParallelScalingBlock; "
            "timm.layers.diff_attention: DiffAttention; timm.models.tiny_vit: Attention; "
            "timm.models.efficientvit_msra: CascadedGroupAttention; timm.models.gemma4_vit: Gemma4Attention; "
            "timm.layers.non_local_attn: NonLocalAttn"
        ),
        "no softmax over pairs of tokens: linear attention, or one among channels, or a gate or convolution": (
            "timm.models.xcit: XCA; timm.models.edgenext: CrossCovarianceAttn; timm.models.davit: ChannelAttention "
            "ChannelAttentionV2; timm.models.efficientvim: HSMSSD; timm.models.volo: OutlookAttention; "
            "timm.models.nextvit: ConvAttention; timm.models.mobilevit: LinearSelfAttention; timm.models.coat: "
            "FactorAttnConvRelPosEnc; timm.models.swiftformer: EfficientAdditiveAttention; "
            "timm.models.efficientvit_mit: LiteMLA; timm.layers.non_local_attn: BatNonLocalAttn "
            "BilinearAttnTransform; timm.layers.lambda_layer: LambdaLayer; timm.layers.cbam: ChannelAttn "
            "LightChannelAttn SpatialAttn LightSpatialAttn; timm.layers.coord_attn: CoordAttn SimpleCoordAttn "
            "EfficientLocalAttn StripAttn; timm.layers.split_attn: SplitAttn; timm.layers.selective_kernel: "
            "SelectiveKernelAttn; timm.layers.global_context: GlobalContext; timm.models.csatv2: SpatialAttention"
        ),
        _QUERY_BIAS: "timm.layers.bottleneck_attn: BottleneckAttn; timm.layers.halo_attn: HaloAttn",
    }.items()
    for name in _named(classes)
}

# Normalisations that a projection replaces; :func:`norm_kind` reads the kind off the name. An activation that is part
# of the class runs after the projection.
NORMS = _named(
    "torch.nn.modules.normalization: LayerNorm RMSNorm GroupNorm; timm.layers.norm: LayerNorm LayerNormFp32 "
    "LayerNorm2d LayerNorm2dFp32 LayerNormExp2d RmsNorm RmsNormFp32 RmsNorm2d RmsNorm2dFp32 GroupNorm "
    "GroupNorm1; timm.models.metaformer: LayerNormNoBias LayerNorm2dNoBias GroupNorm1NoBias; "
    "timm.layers.norm_act: LayerNormAct LayerNormActFp32 LayerNormAct2d LayerNormAct2dFp32 RmsNormAct "
    "RmsNormActFp32 RmsNormAct2d RmsNormAct2dFp32 GroupNormAct GroupNorm1Act"
)

# These modules need no surgery because they are linear in evaluation mode: bounds fold them into the operator before.
LINEAR_NORMS = _named(
    "timm.layers.layer_scale: LayerScale LayerScale2d; timm.layers.norm_act: BatchNormAct2d "
    "FrozenBatchNormAct2d; timm.models.vision_transformer: LayerScale; torch.nn.modules.batchnorm: BatchNorm1d "
    "BatchNorm2d"
)


def norm_kind(module: nn.Module) -> tuple[str, bool]:
    """The kind of projection that replaces a normalisation ("rms" does not centre), and whether channels come first."""
    name = type(module).__name__.lower()
    return "rms" if "rms" in name else "group" if "group" in name else "", "2d" in name


def class_name(module: nn.Module) -> str:
    """The key of a module's class in these tables."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def attention_reason(module: nn.Module) -> str | None:
    """The reason why an attention module is kept; "" if it is replaced, None if it is not attention."""
    name = class_name(module)
    if name in ATTENTIONS:
        return _refused(module) or _unreadable(module)
    if name in KEPT:
        return KEPT[name]
    kind = type(module)
    called = "attention" in kind.__name__.lower() or "attn" in kind.__name__.lower()
    if not called or kind.__module__.startswith("lipcert."):
        return None
    known = any(class_name(part) in {*ATTENTIONS, *KEPT} for part in module.modules())
    return None if known else "no L2 form is known for this class"


def norm_reason(module: nn.Module) -> str | None:
    """The reason why a normalisation is kept; "" if a projection replaces it, None if it is linear or not a norm."""
    name = class_name(module)
    if name in NORMS:
        shape = getattr(module, "normalized_shape", (0,))
        return "" if len(tuple(shape)) == 1 else "it normalises over several dimensions"
    if name in LINEAR_NORMS or "norm" not in type(module).__name__.lower():
        return None
    inside = {*NORMS, *LINEAR_NORMS}
    maps = (nn.Linear, nn.modules.conv._ConvNd)
    contains = any(isinstance(part, maps) or class_name(part) in inside for part in module.modules())
    return None if contains else "no projection is known for this class"


def _refused(module: nn.Module) -> str:
    """The reason in ``REFUSED`` why a module is kept; "" without one."""
    for name, (reason, allowed) in REFUSED.items():
        value = getattr(module, name, allowed[0])
        if value not in allowed and type(value) not in allowed:
            return reason
    return ""


def _unreadable(module: Any) -> str:
    """The reason why a module's linear maps cannot be read; "" if they are plain linear layers or 1×1 convolutions."""
    for name in ("qkv", "q", "k", "v", "kv", "qk", "proj"):
        layer: Any = getattr(module, name, None)
        plain = isinstance(layer, nn.Linear) or (
            isinstance(layer, nn.Conv2d) and {*layer.kernel_size, *layer.stride, layer.groups} == {1}
        )
        if isinstance(layer, nn.Module) and not plain:
            return f"its maps are {type(layer).__name__}s, not plain linear maps"
    return ""
