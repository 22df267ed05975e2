"""Tables of the replacements for classes of timm and torch, used by :func:`lipcert.convert` and ``lipcert models``.

Classes are given by name and not imported, so the tables work with every version of timm. An entry does not apply to
subclasses, which may override ``forward``. Modules in no table are kept, and the report lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lipcert.surgery._arranged import ContinuousBias, GivenBias, PairBias, TableBias

Refusal = Callable[[Any], str]


@dataclass(frozen=True)
class Replacement:
    """The replacement of a softmax attention class by L2 attention.

    Attributes:
        now: class of :mod:`lipcert.surgery` that replaces it.
        packing: layout of the module's queries, keys and values: a key of ``_heads.PACKINGS``.
        arrangement: arrangement of the tokens; see :class:`L2SetAttention`.
        first: whether only the first token has an output.
        bias: returns the module that computes the additive bias, or None.
        area: returns the number of tokens of a set, if the arrangement needs it.
        channel_last_heads: whether the head index varies fastest in the input of the output projection.
        refuse: returns the reason why an instance cannot be replaced; empty if it can.
    """

    now: str
    packing: str = "kinds first"
    arrangement: str = "tokens"
    first: bool = False
    bias: Callable[[Any], nn.Module | None] = lambda module: None
    area: Callable[[Any], int | None] = lambda module: None
    channel_last_heads: bool = False
    refuse: Refusal = lambda module: ""


def _plain(module: Any) -> str:
    if not isinstance(getattr(module, "norm", nn.Identity()), nn.Identity):
        return "its result is normalised before the output projection"
    if getattr(module, "gate", None) is not None:
        return "a gate computed from the tokens multiplies its result"
    if getattr(module, "num_kv_groups", 1) != 1:
        return "several heads share one key"
    return ""


def _rel_pos(module: Any) -> nn.Module | None:
    return None if module.rel_pos is None else GivenBias(module.rel_pos)


def _beit_bias(module: Any) -> nn.Module | None:
    if module.relative_position_bias_table is None:
        return None
    return TableBias(module.relative_position_bias_table, module.relative_position_index)


def _head_table(module: Any) -> nn.Module:
    return TableBias(nn.Parameter(module.attention_biases.detach().T.clone()), module.attention_bias_idxs)


def _swin_v2_bias(module: Any) -> nn.Module:
    area = module.window_size[0] * module.window_size[1]
    index = module.relative_position_index.view(area, area)
    return ContinuousBias(module.cpb_mlp, module.relative_coords_table.squeeze(0), index)


def _sequential(module: Any) -> str:
    return "its bias depends on the image" if getattr(module, "sequential_attn", False) else ""


def _sam(module: Any) -> str:
    if module.use_rel_pos:
        return "its position bias is multiplied by the queries, so it depends on the image"
    return "rotary embedding of its own" if module.rope is not None else ""


def _pooled(module: Any) -> str:
    strided = getattr(module, "q_stride", 1) not in (1, None) or getattr(module, "q_pool", None) is not None
    return "queries are pooled, so they belong to other tokens than the keys" if strided else ""


def _global_queries(module: Any) -> str:
    return "queries come from a summary of the whole image" if module.use_global else ""


_SET = "L2SetAttention"

ATTENTIONS: dict[str, Replacement] = {
    "timm.layers.attention.Attention": Replacement("L2Attention", refuse=_plain),
    "timm.models.vision_transformer.Attention": Replacement("L2Attention", refuse=_plain),
    "timm.models.convit.MHSA": Replacement("L2Attention"),
    "timm.models.swin_transformer.WindowAttention": Replacement("L2WindowAttention"),
    "timm.layers.attention.AttentionRope": Replacement("L2RotaryAttention", "fused or not", refuse=_plain),
    "timm.models.eva.EvaAttention": Replacement("L2RotaryAttention", "fused or not", refuse=_plain),
    "timm.models.beit.Attention": Replacement(_SET, bias=_beit_bias),
    "timm.models.cait.ClassAttn": Replacement(_SET, "q, k, v", first=True),
    "timm.models.crossvit.CrossAttention": Replacement(_SET, "wq, wk, wv", first=True),
    "timm.models.volo.ClassAttention": Replacement(_SET, "q, kv", first=True),
    "timm.models.volo.Attention": Replacement(_SET, arrangement="grid"),
    "timm.models.davit.WindowAttention": Replacement(_SET),
    "timm.models.maxxvit.Attention2d": Replacement(_SET, "either first", "channels", bias=_rel_pos),
    "timm.models.maxxvit.AttentionCl": Replacement(_SET, "either first", "grid", bias=_rel_pos),
    "timm.layers.attention2d.Attention2d": Replacement(_SET, "either first", "channels"),
    "timm.models.swin_transformer_v2.WindowAttention": Replacement(_SET, bias=_swin_v2_bias),
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": Replacement(
        _SET, bias=lambda module: PairBias(module.meta_mlp, module.relative_coordinates_log), refuse=_sequential
    ),
    "timm.models.vision_transformer_relpos.RelPosAttention": Replacement(_SET, bias=_rel_pos),
    "timm.models.gcvit.WindowAttentionGlobal": Replacement(_SET, bias=_rel_pos, refuse=_global_queries),
    "timm.models.hiera.MaskUnitAttention": Replacement(
        _SET,
        arrangement="units",
        area=lambda module: module.window_size if module.use_mask_unit_attn else None,
        refuse=_pooled,
    ),
    "timm.models.hieradet_sam2.MultiScaleAttention": Replacement(_SET, arrangement="grid", refuse=_pooled),
    "timm.models.vision_transformer_sam.Attention": Replacement(_SET, arrangement="grid", refuse=_sam),
    "timm.models.metaformer.Attention": Replacement(_SET),
    "timm.models.nest.Attention": Replacement(_SET, channel_last_heads=True),
    "timm.models.tnt.Attention": Replacement(_SET, "qk, v"),
    "timm.models.twins.LocallyGroupedAttn": Replacement(_SET, arrangement="windows", area=lambda module: module.ws**2),
    "timm.models.visformer.Attention": Replacement(_SET, arrangement="channels"),
    "timm.models.fastvit.Attention": Replacement(_SET, arrangement="channels"),
    "timm.models.efficientformer.Attention": Replacement(_SET, "heads first", bias=_head_table),
}

_CHANNELS = "attends among channels: there is no pair of tokens with a distance"
_OTHER_TOKENS = "keys come from pooled or convolved tokens, and a distance needs queries and keys from the same ones"
_LEARNED = "queries are learned and not tokens, and distances to fixed points have no Lipschitz constant"
_LINEAR = "linear attention: no softmax over pairs of tokens"
_GATE = "a gate, not attention among tokens"
_QUERY_BIAS = "its position bias is multiplied by the queries, so it depends on the image"
_TALKING = "mixes the logits of different heads (talking heads)"

KEPT: dict[str, str] = {
    "timm.models.cait.TalkingHeadAttn": _TALKING,
    "timm.models.efficientformer_v2.Attention2d": _TALKING,
    "timm.models.efficientformer_v2.Attention2dDownsample": _TALKING,
    "timm.models.xcit.XCA": _CHANNELS,
    "timm.models.edgenext.CrossCovarianceAttn": _CHANNELS,
    "timm.models.davit.ChannelAttention": _CHANNELS,
    "timm.models.davit.ChannelAttentionV2": _CHANNELS,
    "timm.models.pvt_v2.Attention": _OTHER_TOKENS,
    "timm.models.twins.GlobalSubSampleAttn": _OTHER_TOKENS,
    "timm.models.mvitv2.MultiScaleAttention": _OTHER_TOKENS,
    "timm.models.mvitv2.MultiScaleAttentionPoolFirst": _OTHER_TOKENS,
    "timm.models.nextvit.EfficientAttention": _OTHER_TOKENS,
    "timm.models.lowformer.ConvAttention": _OTHER_TOKENS,
    "timm.models.cpubone.ConvAttention": _OTHER_TOKENS,
    "timm.models.levit.AttentionDownsample": _OTHER_TOKENS,
    "timm.layers.attention2d.MultiQueryAttentionV2": _OTHER_TOKENS,
    "timm.layers.attention2d.MultiQueryAttention2d": _OTHER_TOKENS,
    "timm.models.convit.GPSA": "mixes its softmax with one of the positions, and divides by the sum",
    "timm.models.iformer.SHMA": "a gate computed from the tokens multiplies its result",
    "timm.models.shvit.SHSA": "answers for a part of the channels, and its maps end in batch norms",
    "timm.models.vision_transformer.ParallelScalingBlock": "one map makes queries, keys, values and the MLP's units",
    "timm.models.vision_transformer.DiffParallelScalingBlock": "the difference of two softmaxes",
    "timm.models.efficientvim.HSMSSD": "a state space, not attention among tokens",
    "timm.models.levit.Attention": "an activation stands before the output projection, and its maps end in batch norms",
    "timm.models.tiny_vit.Attention": "normalises its own input",
    "timm.models.efficientvit_msra.CascadedGroupAttention": "its heads run in turn, each on the last one's result",
    "timm.models.gemma4_vit.Gemma4Attention": "normalises its values",
    "timm.layers.diff_attention.DiffAttention": "the difference of two softmaxes",
    "timm.layers.attention_pool.AttentionPoolLatent": _LEARNED,
    "timm.layers.attention_pool.AttentionPoolPrr": _LEARNED,
    "timm.layers.attention_pool2d.AttentionPool2d": "the query is the mean of the tokens",
    "timm.layers.attention_pool2d.RotAttentionPool2d": "the query is the mean of the tokens",
    "timm.models.volo.OutlookAttention": "weights come from one token, not from pairs",
    "timm.models.nextvit.ConvAttention": "a convolution, not attention among tokens",
    "timm.models.mobilevit.LinearSelfAttention": _LINEAR,
    "timm.models.coat.FactorAttnConvRelPosEnc": _LINEAR,
    "timm.models.swiftformer.EfficientAdditiveAttention": _LINEAR,
    "timm.models.efficientvit_mit.LiteMLA": _LINEAR,
    "timm.layers.bottleneck_attn.BottleneckAttn": _QUERY_BIAS,
    "timm.layers.halo_attn.HaloAttn": _QUERY_BIAS,
    "timm.layers.non_local_attn.NonLocalAttn": "without a softmax over pairs of tokens, or with maps that end in norms",
    "timm.layers.non_local_attn.BatNonLocalAttn": "bilinear attention: products of two softmaxes",
    "timm.layers.non_local_attn.BilinearAttnTransform": "bilinear attention: products of two softmaxes",
    "timm.layers.lambda_layer.LambdaLayer": "keys are normalised over the tokens, and there is no pair of tokens",
    "timm.layers.cbam.ChannelAttn": _GATE,
    "timm.layers.cbam.LightChannelAttn": _GATE,
    "timm.layers.cbam.SpatialAttn": _GATE,
    "timm.layers.cbam.LightSpatialAttn": _GATE,
    "timm.layers.coord_attn.CoordAttn": _GATE,
    "timm.layers.coord_attn.SimpleCoordAttn": _GATE,
    "timm.layers.coord_attn.EfficientLocalAttn": _GATE,
    "timm.layers.coord_attn.StripAttn": _GATE,
    "timm.layers.split_attn.SplitAttn": _GATE,
    "timm.layers.selective_kernel.SelectiveKernelAttn": _GATE,
    "timm.layers.global_context.GlobalContext": _GATE,
    "timm.models.csatv2.SpatialAttention": _GATE,
    "timm.models._efficientnet_blocks.MobileAttention": "a block around attention with pooled keys",
    "torch.nn.modules.activation.MultiheadAttention": "queries, keys and values may be different tokens",
}

# Normalisations, with the axis and centring of the projection that replaces them. "rms" does not centre; "group"
# projects groups of channels. An activation that is part of the class runs after the projection.
NORMS: dict[str, str] = {
    "torch.nn.modules.normalization.LayerNorm": "tokens",
    "timm.layers.norm.LayerNorm": "tokens",
    "timm.layers.norm.LayerNormFp32": "tokens",
    "timm.layers.norm.LayerNorm2d": "channels",
    "timm.layers.norm.LayerNorm2dFp32": "channels",
    "timm.layers.norm.LayerNormExp2d": "channels",
    "torch.nn.modules.normalization.RMSNorm": "rms tokens",
    "timm.layers.norm.RmsNorm": "rms tokens",
    "timm.layers.norm.RmsNormFp32": "rms tokens",
    "timm.layers.norm.RmsNorm2d": "rms channels",
    "timm.layers.norm.RmsNorm2dFp32": "rms channels",
    "torch.nn.modules.normalization.GroupNorm": "group",
    "timm.layers.norm.GroupNorm": "group",
    "timm.layers.norm.GroupNorm1": "group",
    "timm.models.metaformer.LayerNormNoBias": "tokens",
    "timm.models.metaformer.LayerNorm2dNoBias": "channels",
    "timm.models.metaformer.GroupNorm1NoBias": "group",
    "timm.layers.norm_act.LayerNormAct": "tokens",
    "timm.layers.norm_act.LayerNormActFp32": "tokens",
    "timm.layers.norm_act.LayerNormAct2d": "channels",
    "timm.layers.norm_act.LayerNormAct2dFp32": "channels",
    "timm.layers.norm_act.RmsNormAct": "rms tokens",
    "timm.layers.norm_act.RmsNormActFp32": "rms tokens",
    "timm.layers.norm_act.RmsNormAct2d": "rms channels",
    "timm.layers.norm_act.RmsNormAct2dFp32": "rms channels",
    "timm.layers.norm_act.GroupNormAct": "group",
    "timm.layers.norm_act.GroupNorm1Act": "group",
}

_DEVIATION = "divides by the deviation from a mean that it does not subtract"
_EVOLVED = "a gate over a deviation, not a normalisation alone"
_EVO_NORMS = ("B0", "B1", "B2", "S0", "S0a", "S1", "S1a", "S2", "S2a")

KEPT_NORMS: dict[str, str] = {
    "timm.layers.grn.GlobalResponseNorm": "a gate: each channel is multiplied by its share of the image",
    "timm.layers.norm.SimpleNorm": _DEVIATION,
    "timm.layers.norm.SimpleNormFp32": _DEVIATION,
    "timm.layers.norm.SimpleNorm2d": _DEVIATION,
    "timm.layers.norm.SimpleNorm2dFp32": _DEVIATION,
    **{f"timm.layers.evo_norm.EvoNorm2d{kind}": _EVOLVED for kind in _EVO_NORMS},
    "timm.layers.filter_response_norm.FilterResponseNormTlu2d": "normalises every channel by itself, with no mean",
    "timm.layers.filter_response_norm.FilterResponseNormAct2d": "normalises every channel by itself, with no mean",
}

# These modules need no surgery because they are linear in evaluation mode: bounds fold them into the operator before.
LINEAR_NORMS = {
    "torch.nn.modules.batchnorm.BatchNorm1d",
    "torch.nn.modules.batchnorm.BatchNorm2d",
    "timm.layers.norm_act.BatchNormAct2d",
    "timm.layers.norm_act.FrozenBatchNormAct2d",
    "timm.layers.layer_scale.LayerScale",
    "timm.layers.layer_scale.LayerScale2d",
    "timm.models.vision_transformer.LayerScale",
}


def class_name(module: nn.Module) -> str:
    """The key of a module's class in these tables."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def attention_reason(module: nn.Module) -> str | None:
    """The reason why an attention module is kept; "" if it is replaced, None if it is not attention.

    A class is attention if it is in a table, or if its name says so and none of its submodules is in a table.
    """
    name = class_name(module)
    if name in ATTENTIONS:
        replacement = ATTENTIONS[name]
        return replacement.refuse(module) or _unreadable(module)
    if name in KEPT:
        return KEPT[name]
    parts = [part for part in module.modules() if part is not module]
    if _called_attention(module) and not any(class_name(part) in {**ATTENTIONS, **KEPT} for part in parts):
        return "no L2 form is known for this class"
    return None


def norm_reason(module: nn.Module) -> str | None:
    """The reason why a normalisation is kept; "" if a projection replaces it, None if it is linear or not a norm."""
    name = class_name(module)
    if name in NORMS:
        shape = getattr(module, "normalized_shape", (0,))
        return "" if len(tuple(shape)) == 1 else "it normalises over several dimensions"
    if name in KEPT_NORMS:
        return KEPT_NORMS[name]
    if name in LINEAR_NORMS or "norm" not in type(module).__name__.lower():
        return None
    inside = {*NORMS, *KEPT_NORMS, *LINEAR_NORMS}
    maps = (nn.Linear, nn.modules.conv._ConvNd)
    contains = any(isinstance(part, maps) or class_name(part) in inside for part in module.modules())
    return None if contains else "no projection is known for this class"


def _called_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return ("attention" in name or "attn" in name) and not type(module).__module__.startswith("lipcert.")


def _unreadable(module: Any) -> str:
    """The reason why a module's linear maps cannot be read; "" if they are plain linear layers or 1×1 convolutions."""
    layers = [getattr(module, name, None) for name in ("qkv", "q", "k", "v", "kv", "qk", "proj")]
    linear = (nn.Linear, nn.Conv2d)
    for layer in layers:
        if isinstance(layer, nn.Module) and (not isinstance(layer, linear) or not _pointwise(layer)):
            return f"its maps are {type(layer).__name__}s, not plain linear maps"
    return ""


def _pointwise(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) or (
        torch.Size(layer.kernel_size).numel() == 1 and layer.groups == 1 and set(layer.stride) == {1}
    )
