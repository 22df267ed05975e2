"""Every rule of the table against dense truth, and what rules must refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import setitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rule_attacks import answers, check_gains
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lipcert
from lipcert import surgery
from lipcert.bounds import Value, _global, analyze
from lipcert.bounds._registry import RULES, Rule, key_of
from lipcert.bounds.rules.activation import ACTIVATIONS
from lipcert.bounds.testing import check_rule
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph import capture, evaluate, needed
from lipcert.numerics import Upper

SIZE = (2, 3, 4)


def weights(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W44, W64, W245, G4, B4 = weights(4, 4), weights(4, 6), weights(5, 24), weights(4, seed=2), weights(4, seed=3)
CONV, CONV_B = weights(3, 2, 2, 2), weights(3, seed=4)
MEAN, VAR, GAMMA, BETA = weights(3, seed=5), weights(3, seed=6).square(), weights(3, seed=7), weights(3, seed=8)


def tokens(x: Tensor) -> Tensor:
    """(1, 6, 4): LayerNorm after a linear map; token norms and a pending scale."""
    return F.layer_norm(F.linear(x.reshape(1, 6, 4), W44, B4), (4,), G4, B4)


def square(x: Tensor) -> Tensor:
    """(1, 4, 4): as many tokens as channels, so that a mistaken axis goes unnoticed by its size."""
    return F.layer_norm(F.linear(x.reshape(1, 4, 6), W64), (4,), G4, None)


def heads(x: Tensor) -> Tensor:
    """(1, 2, 6, 2): tokens by head."""
    return F.linear(tokens(x), W44).reshape(1, 6, 2, 2).transpose(1, 2)


def image(x: Tensor) -> Tensor:
    """(1, 3, 3, 4): convolution and batch norm, one pending map."""
    hidden = F.conv2d(x, CONV, CONV_B, padding="same")
    return F.batch_norm(hidden, MEAN, VAR, GAMMA, BETA, eps=1e-2)


def scaled(x: Tensor) -> Tensor:
    """(1, 2, 3, 4): a pending scale by channel."""
    return x * weights(2, 1, 1)


def thin(x: Tensor) -> Tensor:
    """(1, 24, 1): rows along an axis of size 1."""
    return F.normalize(x.reshape(1, 24, 1) - 0.4, dim=-1, eps=0.5)


def vector(x: Tensor) -> Tensor:
    """(1, 5)."""
    return F.linear(x.flatten(1), W245)


def chances(x: Tensor) -> Tensor:
    """(1, 4, 4): softmax."""
    return square(x).softmax(-1)


def peaked(x: Tensor) -> Tensor:
    """(1, 4, 4): rows of norm close to their bound 1, columns of norm up to 2."""
    return (square(x) + torch.tensor([0.0, 9.0, 0.0, 0.0]).double()).softmax(-1)


def rows_first(x: Tensor) -> Tensor:
    """(1, 4, 4): row norms along axis 1, not the last."""
    return F.normalize(x.reshape(1, 4, 6)[:, :, :4] - 0.3, dim=1, eps=0.5)


def pixels(x: Tensor) -> Tensor:
    return x


Stem = Callable[[Tensor], Tensor]
LINEAR = 1 + 1e-8  # operations that move entries are known exactly

# (key, stem, operation) or (key, stem, operation, tightness)
CASES: list[tuple[Any, ...]] = [
    *[
        (function, stem, function)
        for function in ACTIVATIONS
        if not isinstance(function, str)
        for stem in (image, tokens)
    ],
    (F.relu, image, lambda h: F.relu(h, inplace=True) + h),
    (F.relu, image, lambda h: (F.relu(h, True), h)[1]),
    (F.silu, image, lambda h: F.silu(3 * h, True)),
    ("relu", image, lambda h: h.relu_()),
    ("abs", tokens, lambda h: h.abs()),
    ("neg", tokens, lambda h: -h),
    (F.gelu, tokens, F.gelu),
    (F.gelu, image, lambda h: F.gelu(h, approximate="tanh")),
    (F.leaky_relu, image, lambda h: F.leaky_relu(h, 3.0)),
    (F.leaky_relu, image, lambda h: (F.leaky_relu(h, 0.2, True), h)[1]),
    ("prelu", image, lambda h: F.prelu(h, torch.tensor([0.2, -0.7, 0.9]).double())),
    ("prelu", image, lambda h: F.prelu(h, torch.tensor([2.5, 0.1, -3.0]).double())),
    ("prelu", tokens, lambda h: F.prelu(h, torch.tensor([0.25]).double())),
    ("prelu", tokens, lambda h: torch.prelu(h, weights(6))),
    # functions that are recorded as their parts
    ("permute", pixels, lambda h: F.pixel_unshuffle(h.reshape(1, 1, 6, 4), 2), LINEAR),
    ("norm", tokens, lambda h: h.norm(4, -1)),
    ("scaled_dot_product_attention", tokens, lambda h: _attend(h)[0]),
    ("softmax", tokens, lambda h: _attend(h, need_weights=True)[0]),
    ("pad", image, lambda h: F.pad(h, (1, 1, 1, 1), "circular")),
    ("pad", pixels, lambda h: F.conv2d(F.pad(h, (1, 2, 0, 1), "replicate"), weights(3, 2, 2, 2), B4[:3], 2)),
    (F.hardtanh, image, F.hardtanh),
    (F.hardtanh, image, lambda h: F.hardtanh(h, -3.0, 0.5)),
    (F.hardtanh, image, lambda h: F.hardtanh(h, max_val=0.1, min_val=-0.2, inplace=True)),
    ("clamp", tokens, lambda h: h.clamp(min=0.2)),
    ("clamp", tokens, lambda h: h.clamp(-3, -2)),
    ("clamp", tokens, lambda h: torch.clip(h, max=torch.tensor(-5.0))),
    ("clamp", tokens, lambda h: h.clamp_(-B4.abs(), B4.abs())),
    # sums
    ("add", tokens, lambda h: h + B4),
    ("add", tokens, lambda h: torch.add(h, B4, alpha=-3)),
    ("add", tokens, lambda h: torch.add(B4.expand(3, 6, 4), h, alpha=-3)),
    ("add", tokens, lambda h: h + weights(6, 1)),
    ("add", tokens, lambda h: 2 + h),
    ("add", tokens, lambda h: h.add_(weights(1, 6, 4))),
    ("add", square, lambda h: h + h.mT),
    ("add", tokens, lambda h: h + h[:, :1]),
    ("add", tokens, lambda h: torch.add(h, F.relu(h), alpha=-2.5)),
    ("add", tokens, lambda h: h + F.linear(h, W44, B4)),
    ("add", tokens, lambda h: F.linear(h, W44, B4) + h),
    ("add", vector, lambda h: h + h[0]),
    ("add", vector, lambda h: h + h.reshape(5, 1)),
    ("add", image, lambda h: h + F.conv2d(h, weights(3, 1, 3, 3), padding=1, groups=3)),
    ("add", scaled, lambda h: h + h * weights(2, 1, 1, seed=3)),
    ("add", pixels, lambda h: h.sum() + 1),
    ("sub", tokens, lambda h: h - B4),
    ("sub", tokens, lambda h: B4 - h),
    ("sub", tokens, lambda h: 1 - h),
    ("sub", square, lambda h: torch.sub(h, h.mT, alpha=2)),
    ("sub", image, lambda h: h - F.avg_pool2d(h, 3, 1, 1, count_include_pad=False)),
    ("sub", tokens, lambda h: h - F.linear(h, W44)),
    # products
    ("mul", tokens, lambda h: h * G4),
    ("mul", tokens, lambda h: weights(3, 6, 1) * h),
    ("mul", pixels, lambda h: h * 0.7, LINEAR),
    ("mul", pixels, lambda h: h * weights(2, 1, 1), LINEAR),
    ("mul", pixels, lambda h: h * weights(7, 1, 1, 1).sign(), LINEAR),
    ("mul", pixels, lambda h: weights(3, 4) * (weights(2, 1, 1) * h), LINEAR),
    ("mul", tokens, lambda h: h.mul_(-0.3)),
    ("mul", tokens, lambda h: h * h),
    ("mul", square, lambda h: h * h.mT),
    ("mul", tokens, lambda h: h * h[:, :1].sigmoid()),
    ("mul", image, lambda h: h * h.mean((2, 3), keepdim=True)),
    ("mul", tokens, lambda h: h * False),
    ("div", pixels, lambda h: h / 0.3, LINEAR),
    ("div", tokens, lambda h: h / G4),
    ("div", tokens, lambda h: torch.true_divide(h, 3)),
    ("div", pixels, lambda h: (h - weights(2, 1, 1)) / weights(2, 1, 1), LINEAR),
    ("div", tokens, lambda h: h.div_(-2)),
    ("div", tokens, lambda h: 1 / (h + 30)),
    ("pow", tokens, lambda h: h**3),
    ("pow", tokens, lambda h: torch.pow(h, torch.tensor([[[[2.0]]]]))),
    ("pow", image, lambda h: (h.pow_(2), h)[1]),
    ("square", tokens, torch.square),
    ("mean", pixels, lambda h: h.mean(), LINEAR),
    ("mean", pixels, lambda h: h.mean((1, -1), keepdim=True), LINEAR),
    ("mean", square, lambda h: h.reshape(1, 2, 2, 4).mean(dim=(1, 3))),
    ("mean", heads, lambda h: h.mean((2, 3))),
    ("sum", pixels, lambda h: h.sum(axis=2), LINEAR),
    ("sum", square, lambda h: h.sum(-1, keepdim=True)),
    ("sum", square, lambda h: h.sum((1, 2))),
    ("sum", thin, lambda h: h.sum(1)),
    # matrices
    ("matmul", pixels, lambda h: h @ weights(4, 7), 1 + 2e-5),
    ("matmul", pixels, lambda h: h @ weights(2, 4, 7), 1 + 2e-5),
    ("matmul", pixels, lambda h: weights(7, 3) @ h, 1 + 2e-5),
    ("matmul", pixels, lambda h: weights(5, 1, 1, 3).expand(5, 2, 1, 3).sign() @ h),
    ("matmul", tokens, lambda h: h @ weights(3, 4, 2)),
    ("matmul", tokens, lambda h: weights(3, 2, 6) @ h),
    ("matmul", tokens, lambda h: torch.bmm(h, h.mT)),
    ("matmul", heads, lambda h: h @ h.transpose(-1, -2)),
    ("matmul", heads, lambda h: (h @ h.transpose(-1, -2)).softmax(-1) @ h),
    ("matmul", chances, lambda h: h @ h),
    ("matmul", chances, lambda h: h.reshape(1, 2, 2, 4) @ h),
    ("matmul", square, lambda h: (4 * h).softmax(-1) @ h[:, :, :1]),
    ("matmul", thin, lambda h: h @ h.mT),
    (F.linear, pixels, lambda h: F.linear(h, weights(5, 4), weights(5)), 1 + 2e-5),
    (F.linear, scaled, lambda h: F.linear(h, weights(5, 4))),
    (F.linear, pixels, lambda h: F.linear(h * G4, weights(5, 4)), 1 + 2e-5),
    (F.linear, tokens, lambda h: F.linear(h, weights(5, 4), bias=weights(5))),
    (F.linear, tokens, lambda h: F.linear(F.linear(h, W44, B4), W44, B4)),
    (F.linear, tokens, lambda h: F.linear(h + B4, W44, B4)),
    (F.linear, tokens, lambda h: F.linear((h - B4) * G4, W44)),
    (F.linear, square, lambda h: F.linear(h.reshape(1, 2, 2, 4) * G4, W44)),
    (F.linear, thin, lambda h: F.linear(h, weights(3, 1))),
    (F.linear, vector, lambda h: F.linear(h[0], weights(3, 5))),
    ("conv1d", pixels, lambda h: F.conv1d(h.reshape(1, 2, 12), weights(3, 2, 3), None, 2, 1)),
    ("conv2d", pixels, lambda h: F.conv2d(h, weights(3, 2, 2, 2), weights(3), padding="same"), 1.3),
    ("conv2d", pixels, lambda h: F.conv2d(h, weights(3, 2, 1, 2), stride=(1, 2)), 1 + 2e-5),
    ("conv2d", pixels, lambda h: F.conv2d(h, weights(4, 1, 3, 3), padding=(1, 2), dilation=(1, 2), groups=2)),
    ("conv2d", pixels, lambda h: F.conv2d(h, weights(3, 2, 3, 3), padding="valid")),
    ("conv2d", scaled, lambda h: F.conv2d(h, weights(4, 1, 2, 2), padding=[1], groups=2)),
    ("conv2d", image, lambda h: F.conv2d(h, weights(3, 1, 3, 3), padding=1, groups=3) * weights(3, 1, 1)),
    ("conv2d", image, lambda h: F.conv2d(F.pad(h, (1, 1, 1, 1), mode="reflect"), weights(2, 3, 3, 3))),
    ("conv2d", image, lambda h: F.conv2d(h * weights(1, 1, 1), weights(2, 3, 2, 2))),
    ("conv3d", pixels, lambda h: F.conv3d(h[:, None], weights(2, 1, 2, 2, 2), padding=(0, 1, 0))),
    ("conv_transpose2d", pixels, lambda h: F.conv_transpose2d(h, weights(2, 2, 2, 3), weights(4), 2, 1, 1, 2, 1)),
    # attention
    ("softmax", tokens, lambda h: h.softmax(-1)),
    ("softmax", square, lambda h: F.softmax(5 * h, dim=1)),
    ("softmax", tokens, lambda h: F.softmax(h + torch.tensor([0.0, -math.inf, 1.0, 0.0]).double(), -1)),
    ("softmax", thin, lambda h: torch.softmax(h, 1)),
    (F.scaled_dot_product_attention, heads, lambda h: F.scaled_dot_product_attention(h, h, h)),
    (F.scaled_dot_product_attention, heads, lambda h: F.scaled_dot_product_attention(3 * h, h, -h, is_causal=True)),
    (F.scaled_dot_product_attention, heads, lambda h: F.scaled_dot_product_attention(h, h, h, scale=0.0)),
    (F.scaled_dot_product_attention, heads, lambda h: F.scaled_dot_product_attention(h, h.flip(2), h, scale=-2.0)),
    (
        F.scaled_dot_product_attention,
        heads,
        lambda h: F.scaled_dot_product_attention(h[:, :, :1], 4 * h, h, torch.tensor([[True, False] * 3])),
    ),
    (
        F.scaled_dot_product_attention,
        heads,
        lambda h: F.scaled_dot_product_attention(weights(3, 2, 2, 2), h, h, attn_mask=weights(3, 1, 2, 6)),
    ),
    (
        F.scaled_dot_product_attention,
        heads,
        lambda h: F.scaled_dot_product_attention(h, weights(1, 1, 5, 2), weights(1, 1, 5, 3)),
    ),
    (F.scaled_dot_product_attention, square, lambda h: F.scaled_dot_product_attention(h, h, h[..., :1])),
    # normalisation
    (F.batch_norm, pixels, lambda h: F.batch_norm(h, MEAN[:2], VAR[:2]), LINEAR),
    (F.batch_norm, image, lambda h: F.batch_norm(h, MEAN, VAR, None, BETA)),
    (F.batch_norm, image, lambda h: F.batch_norm(F.conv2d(h, weights(3, 3, 1, 1)), MEAN, VAR, GAMMA, BETA, eps=0.1)),
    (F.batch_norm, vector, lambda h: F.batch_norm(h, weights(5), weights(5).square() + 0.1, weights(5))),
    (F.batch_norm, tokens, lambda h: F.batch_norm(h.mT, B4, B4.square(), G4).mT),
    (F.layer_norm, pixels, lambda h: F.layer_norm(h, (3, 4), weights(3, 4), weights(3, 4), 0.1)),
    (F.layer_norm, pixels, lambda h: F.layer_norm(h, (4,), eps=1e-3)),
    (F.layer_norm, pixels, lambda h: F.layer_norm(h, (4,), None, B4, eps=1e-2)),
    (F.layer_norm, image, lambda h: F.layer_norm(h.permute(0, 2, 3, 1), (3,), GAMMA, BETA, 1e-2).permute(0, 3, 1, 2)),
    (F.layer_norm, thin, lambda h: F.layer_norm(h, (1,), weights(1), weights(1))),
    ("rms_norm", pixels, lambda h: F.rms_norm(h - 0.3, (4,), G4, 1e-2)),
    ("rms_norm", pixels, lambda h: F.rms_norm(h + 0.1, (3, 4))),
    (F.group_norm, pixels, lambda h: F.group_norm(h, 2, weights(2), weights(2), 1e-2)),
    (F.group_norm, image, lambda h: F.group_norm(h, 1, eps=1e-2)),
    (F.group_norm, image, lambda h: F.conv2d(F.group_norm(h, 3, GAMMA, BETA, 0.1), weights(2, 3, 2, 2))),
    (F.normalize, tokens, lambda h: F.normalize(h, dim=-1, eps=0.3)),
    (F.normalize, square, lambda h: F.normalize(h, eps=2.0)),
    # pooling
    (F.avg_pool1d, pixels, lambda h: F.avg_pool1d(h.flatten(2), 3, 2, 1), 1.3),
    (F.avg_pool2d, pixels, lambda h: F.avg_pool2d(h, 2), LINEAR),
    (F.avg_pool2d, image, lambda h: F.avg_pool2d(h, (3, 2), 1, (1, 0), count_include_pad=False)),
    (F.avg_pool2d, image, lambda h: F.avg_pool2d(h, 2, ceil_mode=True)),
    (F.avg_pool2d, image, lambda h: F.avg_pool2d(h, 2, divisor_override=1) ** 2),
    (F.avg_pool2d, rows_first, lambda h: F.avg_pool2d(h, 2, 1, 1, divisor_override=1)),
    (F.avg_pool2d, rows_first, lambda h: F.avg_pool2d(h.reshape(1, 4, 2, 2), 2, 1, 1, divisor_override=1)),
    (F.adaptive_avg_pool2d, pixels, lambda h: F.adaptive_avg_pool2d(h, 1), LINEAR),
    (F.adaptive_avg_pool2d, pixels, lambda h: F.adaptive_avg_pool2d(h, (None, 7))),
    (F.adaptive_avg_pool2d, pixels, lambda h: F.adaptive_avg_pool2d(h[0], (2, 2))),
    ("max_pool2d", pixels, lambda h: F.max_pool2d(h, 3, 1, 1)),
    ("max_pool2d", pixels, lambda h: F.max_pool2d(h[0], 3, 1, 1)),
    ("max_pool2d", image, lambda h: F.max_pool2d(h, (2, 3), stride=2, padding=1, ceil_mode=True)),
    ("max_pool2d", image, lambda h: F.max_pool2d(h, 2, 1, dilation=(2, 3))),
    ("adaptive_max_pool2d", pixels, lambda h: F.adaptive_max_pool2d(h[0], 2)),
    ("adaptive_max_pool2d", pixels, lambda h: F.adaptive_max_pool2d(h, (2, 3))),
    ("amax", tokens, lambda h: h.amax(1)),
    ("amax", square, lambda h: torch.amax(h, dim=(1, 2), keepdim=True)),
    ("amin", square, lambda h: h.amin(-1)),
    # moving entries
    ("identity", image, lambda h: h.contiguous().to(torch.float64).clone().detach_().type(torch.DoubleTensor)),
    ("identity", tokens, lambda h: h.type_as(h).to(h)),
    ("dropout", tokens, lambda h: F.dropout(h, 0.5, False)),
    ("dropout", tokens, lambda h: F.dropout(F.dropout(h, training=False), p=0.0, training=True)),
    ("reshape", pixels, lambda h: h.flatten(1), LINEAR),
    ("reshape", tokens, lambda h: h.reshape(1, 3, 2, 4)),
    ("reshape", tokens, lambda h: h.view(1, 6, 2, 2)),
    ("reshape", tokens, lambda h: h.reshape(2, 12)),
    ("reshape", tokens, lambda h: h.reshape(1, 4, 6)),
    ("reshape", tokens, lambda h: h.unflatten(1, (2, 3)).squeeze(0).unsqueeze(-1)),
    ("reshape", chances, lambda h: h.reshape(1, 8, 2)),
    ("reshape", chances, lambda h: h.flatten()),
    ("reshape", chances, lambda h: h.reshape(1, 4, 1, 4).squeeze(2) @ h),
    ("reshape", thin, lambda h: h.squeeze(-1)),
    ("reshape", thin, lambda h: h.reshape(24)),
    ("reshape", thin, lambda h: h.reshape(1, 4, 1, 6)),
    ("reshape", thin, lambda h: h.reshape(1, 1, 24, 1, 1)),
    ("reshape", rows_first, lambda h: h.reshape(1, 2, 2, 4)),
    ("reshape", rows_first, lambda h: h.reshape(4, 4)),
    ("reshape", rows_first, lambda h: h.view(16)),
    ("reshape", scaled, lambda h: F.linear(h.reshape(1, 6, 4), W44)),
    ("reshape", scaled, lambda h: h.flatten(2).mT * weights(2, seed=9)),
    ("permute", pixels, lambda h: h.permute(3, 0, 2, 1), LINEAR),
    ("permute", square, lambda h: h.permute((0, 2, 1))),
    ("permute", square, lambda h: torch.permute(h, dims=(2, 0, -2))),
    ("permute", rows_first, lambda h: h.permute(2, 1, 0)),
    ("permute", heads, lambda h: h.permute(1, 3, 0, 2)),
    ("permute", square, lambda h: h.movedim(1, -1)),
    ("permute", rows_first, lambda h: torch.movedim(h, source=(0, 1), destination=(2, 0))),
    ("permute", square, lambda h: h[0].t()),
    ("permute", square, lambda h: h.swapaxes(0, 2)),
    ("permute", thin, lambda h: torch.transpose(h, dim0=1, dim1=2)),
    ("permute", thin, lambda h: h.transpose(0, 2)),
    ("permute", rows_first, lambda h: h.transpose(-1, -2)),
    ("getitem", pixels, lambda h: h[:, [0, 0, 1]], 1 + 1e-8),
    ("getitem", pixels, lambda h: h[:, torch.tensor([1, 1, 1])], LINEAR),
    ("getitem", pixels, lambda h: h[..., None, 1:], LINEAR),
    ("getitem", pixels, lambda h: h[:, :, torch.tensor([True, False, True])], LINEAR),
    ("getitem", square, lambda h: h[:, 0]),
    ("getitem", square, lambda h: h[..., 0]),
    ("getitem", square, lambda h: h[0, :, 1:3]),
    ("getitem", square, lambda h: h[:, torch.tensor([[0, 1], [1, 1]])]),
    ("getitem", square, lambda h: h[:, :, [3, 3, 3, 3]]),
    ("getitem", square, lambda h: h.select(-1, 0)),
    ("getitem", square, lambda h: h.select(dim=2, index=1)),
    ("getitem", square, lambda h: h.narrow(2, 1, 2)),
    ("getitem", square, lambda h: h.narrow(dim=-1, start=1, length=2)),
    ("index_select", pixels, lambda h: torch.index_select(h, dim=1, index=torch.tensor([0, 0, 0])), LINEAR),
    ("index_select", square, lambda h: h.index_select(2, torch.tensor([1, 1, 1, 1]))),
    ("flip", square, lambda h: h.flip(1, -1)),
    ("flip", square, lambda h: torch.flip(h, dims=[2])),
    ("roll", square, lambda h: torch.roll(h, shifts=(1, 2), dims=(1, 2))),
    ("roll", square, lambda h: h.roll(2, 1)),
    ("unbind", square, lambda h: h.unbind(-1)[0]),
    ("unbind", square, lambda h: torch.unbind(h, dim=1)[0]),
    ("unbind", square, lambda h: h.unbind()[0]),
    ("unbind", rows_first, lambda h: h.unbind(2)[1]),
    ("unbind", rows_first, lambda h: h.reshape(1, 4, 2, 2).unbind(-1)[1]),
    ("unbind", tokens, lambda h: torch.stack(list(h[0]))),
    ("split", square, lambda h: h.split([1, 3], dim=-1)[1]),
    ("split", square, lambda h: h.split(2, 1)[0] @ h),
    ("chunk", square, lambda h: (lambda a, b: a * b)(*h.chunk(2, -1))),
    ("chunk", rows_first, lambda h: h.chunk(2, 1)[0]),
    ("part", square, lambda h: h.unbind(1)[3]),
    ("cat", pixels, lambda h: torch.cat([h, 3 * h], 1), LINEAR),
    ("cat", tokens, lambda h: torch.cat([h, weights(1, 6, 2)], dim=-1)),
    ("cat", tokens, lambda h: torch.cat([weights(1, 1, 4).expand(1, 1, 4), h, h], 1)),
    ("cat", tokens, lambda h: torch.concatenate([h, h], axis=-1)),
    ("cat", tokens, lambda h: torch.cat([h, h], axis=2)),
    ("stack", square, lambda h: torch.stack([h, h.mT], 1)),
    ("stack", square, lambda h: torch.stack([h, h], dim=-1)),
    ("expand", pixels, lambda h: h.expand(3, 2, 3, 4), LINEAR),
    ("expand", thin, lambda h: h.expand(2, 24, 3)),
    ("expand", thin, lambda h: h.expand_as(torch.empty(1, 24, 5))),
    ("expand", tokens, lambda h: torch.broadcast_to(h, (2, 2, 6, 4))),
    ("add", tokens, lambda h: h + B4.expand_as(h)),
    ("repeat", square, lambda h: h.repeat(2, 1, 3)),
    ("repeat", square, lambda h: h.repeat(4, 1, 1, 1)),
    ("tile", square, lambda h: h.tile(2)),
    ("repeat_interleave", pixels, lambda h: h.repeat_interleave(torch.tensor([1, 7]), dim=1), LINEAR),
    ("repeat_interleave", pixels, lambda h: h.repeat_interleave(repeats=torch.tensor([0, 1]), dim=1), LINEAR),
    ("repeat_interleave", square, lambda h: torch.repeat_interleave(h, 2)),
    ("repeat_interleave", square, lambda h: h.repeat_interleave(3, dim=-1)),
    ("pad", tokens, lambda h: F.pad(h, (0, 0, 1, 2))),
    ("pad", tokens, lambda h: F.pad(h, (1, 0), value=-9.0)),
    ("pad", pixels, lambda h: F.pad(h, (-1, -2, 1, -1), "constant", 0.5)),
    ("pad", image, lambda h: F.pad(h, (2, 1, 1, 1), mode="reflect")),
    ("pad", pixels, lambda h: F.pad(h, (3, 0, 0, 2), mode="replicate"), 1.3),
    ("pad", pixels, lambda h: F.pad(h, [2, 2, 1, 0], mode="circular"), LINEAR),
    ("setitem", square, lambda h: _set(h, (0, 1), h[0, 0] * 2)),
    ("setitem", square, lambda h: _set(h, (slice(None), slice(0, 2)), h[:, :1] - 3)),
    ("setitem", pixels, lambda h: _set(h, (Ellipsis, [0, 2]), 5.0)),
    ("setitem", pixels, lambda h: _set(h, (Ellipsis, [0, 1]), h[..., 2:]), LINEAR),
    ("setitem", pixels, lambda h: _set(h, (0, slice(None), 1), 3 * h[0, 0, 0]), LINEAR * 1.3),
]


def _set(h: Tensor, index: Any, value: Any) -> Tensor:
    """h with new entries at some positions."""
    h = h.clone()
    setitem(h, index, value)
    return h


def positive(x: Tensor) -> Tensor:
    """(1, 6, 4), entries ≥ 0.1."""
    return tokens(x).abs() + 0.1


def rows_first_image(x: Tensor) -> Tensor:
    """(1, 4, 2, 2): channels of bounded norm."""
    return rows_first(x).reshape(1, 4, 2, 2)


def group_norm_by_hand(h: Tensor, eps: float = 0.05) -> Tensor:
    centred = h - h.mean((1, 2), keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean((1, 2), keepdim=True) + eps)


def response_norm(h: Tensor, threshold: Any) -> Tensor:
    """FilterResponseNorm as in timm."""
    h = h * h.square().mean(dim=(2, 3), keepdim=True).add(0.1).rsqrt().expand(h.shape)
    return torch.maximum(h * GAMMA.reshape(1, -1, 1, 1), threshold)


def evolved(h: Tensor, groups: int) -> Tensor:
    """EvoNorm S0 as in timm."""
    parts = h.reshape(1, groups, 3 // groups, *h.shape[2:])
    std = parts.var(dim=(2, 3, 4), unbiased=False, keepdim=True).add(0.2).sqrt().expand(parts.shape).reshape(h.shape)
    return h * (h * GAMMA.reshape(1, -1, 1, 1)).sigmoid() / std


def batch_evolved(h: Tensor) -> Tensor:
    """EvoNorm B0 as in timm."""
    right = h * GAMMA.reshape(1, -1, 1, 1) + h.var((2, 3), unbiased=False, keepdim=True).add(0.1).sqrt().expand(h.shape)
    return h / (VAR + 0.3).sqrt().reshape(1, -1, 1, 1).expand_as(h).max(right)


def response_of_all(h: Tensor) -> Tensor:
    """Global response normalisation as in timm, channels first."""
    length = h.norm(p=2, dim=(2, 3), keepdim=True)
    relative = length / (length.mean(dim=1, keepdim=True) + 0.3)
    return h + torch.addcmul(BETA.reshape(1, -1, 1, 1), GAMMA.reshape(1, -1, 1, 1), h * relative)


def linear_attention(h: Tensor) -> Tensor:
    """As in EfficientViT: weights ≥ 0, and their sums in an extra column of the values."""
    query, key = F.relu(h), F.relu(h.flip(1))
    value = F.pad(h, (0, 1), mode="constant", value=1.0)
    out = query @ (key.mT @ value)
    return out[..., :-1] / (out[..., -1:] + 0.4)


def renormalised(h: Tensor) -> Tensor:
    """As in ConViT: softmax and fixed positions mixed by a gate, then divided by their sums."""
    gate = torch.tensor([0.3, 0.8], dtype=torch.float64).reshape(2, 1, 1)
    attention = (1.0 - gate) * (h @ h.mT).softmax(-1) + gate * weights(2, 4, 4).softmax(-1)
    attention /= attention.sum(dim=-1).unsqueeze(-1)
    return attention


LSTM_W = [weights(12, 4), weights(12, 3), weights(12), weights(12)]
LSTM_BACK = [weights(12, 4, seed=7), weights(12, 3, seed=8) * 0.2, weights(12, seed=9), weights(12, seed=10)]


def shares(h: Tensor, dim: Any) -> Tensor:
    gates = h.sigmoid()
    return gates / gates.sum(dim, keepdim=True)


def recurrent(h: Tensor, both: bool = False, biased: bool = True, start: float = 0.0) -> Any:
    ways = 2 if both else 1
    state = tuple(torch.full((ways, 1, 3), start, dtype=torch.float64) for _ in range(2))
    given = [0.5 * w for w in (LSTM_W + LSTM_BACK if both else LSTM_W)]
    if not biased:
        given = given[:2]
    return torch.lstm(h, state, given, biased, 1, 0.0, False, both, True)


CASES += [
    ("mul", image, lambda h: evolved(h, 1)),
    (
        "conv2d",
        image,
        lambda h: F.conv2d(h, (h[:, :1].flatten()[:12].reshape(1, 12) @ weights(12, 54)).view(2, 3, 3, 3)),
    ),
    ("conv2d", image, lambda h: F.conv2d(h, weights(3, 1, 2, 2) * h[0, :, :1, :1, None], h[0, :, 0, 0], 2, 1, 1, 3)),
    ("conv2d", image, lambda h: F.conv2d(weights(1, 2, 5, 5), h[:, :2, :2, :2])),
    ("conv1d", tokens, lambda h: F.conv1d(h, weights(2, 6, 2), h[0, 0, :2])),
    # quotients, powers, roots
    ("div", positive, lambda h: 1 / h),
    ("div", tokens, lambda h: shares(9 * h, 1)),
    ("div", image, lambda h: shares(h, (2, 3))),
    ("div", positive, lambda h: h / (h + h.mT[:, :1, :1])),
    ("div", positive, lambda h: B4 / (h * h.flip(1) + 0.2)),
    ("div", tokens, lambda h: h[:, :2] / (h[:, 2:3].sigmoid() + 0.5)),
    ("div", tokens, lambda h: h / (h.square().mean(-1, keepdim=True) + 0.1).sqrt()),
    ("div", image, lambda h: evolved(h, 1)),
    ("div", image, lambda h: evolved(h, 3)),
    ("div", image, batch_evolved),
    ("div", image, response_of_all),
    ("div", square, linear_attention),
    ("div", square, renormalised),
    ("pow", tokens, lambda h: h.pow(2).mean(1, keepdim=True)),
    ("pow", tokens, lambda h: F.relu(h) ** 2),
    ("pow", positive, lambda h: h**1.5),
    ("pow", positive, lambda h: h**-1.5),
    ("pow", positive, lambda h: h**0.5),
    ("pow", tokens, lambda h: h**4),
    ("sqrt", positive, torch.sqrt),
    ("sqrt", tokens, lambda h: (h * h).sum(-1, keepdim=True).sqrt()),
    ("sqrt", tokens, lambda h: h.square().mean(1).sqrt()),
    ("sqrt", tokens, lambda h: h.var((1, 2)).sqrt()),
    ("rsqrt", positive, torch.rsqrt),
    ("rsqrt", tokens, lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 0.1)),
    ("rsqrt", tokens, lambda h: h * torch.rsqrt(torch.var(h, -1, keepdim=True) + 0.1)),
    ("rsqrt", tokens, lambda h: (h - h.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, keepdim=True) + 0.1)),
    ("rsqrt", tokens, lambda h: (h - h.mean(1, keepdim=True)) * torch.rsqrt(h.var(-1, keepdim=True) + 0.1)),
    ("rsqrt", square, lambda h: h.mT * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 0.1)),
    ("rsqrt", square, lambda h: h * torch.rsqrt(h.pow(2).mean(-1) + 0.1)),
    ("rsqrt", square, lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True).mT + 0.1)),
    ("rsqrt", square, lambda h: h * (torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 0.1) * 3)),
    ("rsqrt", square, lambda h: h * torch.rsqrt(3 * h.pow(2).mean(-1, keepdim=True) + 0.1)),
    ("rsqrt", tokens, group_norm_by_hand),
    ("var", tokens, lambda h: h.var(dim=-1)),
    ("var", tokens, lambda h: torch.var(h, (0, 2), False, True)),
    ("var", tokens, lambda h: h.var(1, correction=0)),
    ("norm", tokens, lambda h: h.norm(dim=-1)),
    ("norm", tokens, lambda h: torch.norm(h, 2, (1, 2), True)),
    ("norm", image, response_of_all),
    # extremes of two
    ("maximum", image, lambda h: response_norm(h, BETA.reshape(1, -1, 1, 1))),
    ("maximum", tokens, lambda h: torch.maximum(h, h[:, :1])),
    ("minimum", tokens, lambda h: torch.minimum(h, B4)),
    ("max", tokens, lambda h: B4.expand_as(h).max(h)),
    ("amax", tokens, lambda h: h.max()),
    ("amax", tokens, lambda h: h.max(1).values),
    ("amin", tokens, lambda h: torch.min(h, dim=-1, keepdim=True)[0]),
    ("min", tokens, lambda h: h.min(other=h.flip(1))),
    # resampling
    *[
        (F.interpolate, stem, operation)
        for stem in (pixels, image, rows_first_image)
        for operation in (
            lambda h: F.interpolate(h, scale_factor=2),
            lambda h: F.interpolate(h, (5, 7), mode="bilinear"),
            lambda h: F.interpolate(h, (2, 9), mode="bilinear", align_corners=True),
            lambda h: F.interpolate(h, scale_factor=(1.7, 0.6), mode="bilinear", align_corners=False),
            lambda h: F.interpolate(h, (7, 3), mode="bicubic"),
            lambda h: F.interpolate(h, (2, 2), mode="bicubic", antialias=True, align_corners=False),
            lambda h: F.interpolate(h, (2, 5), mode="area"),
            lambda h: F.interpolate(h, (4, 3), mode="nearest-exact"),
        )
    ],
    (F.interpolate, pixels, lambda h: F.interpolate(h.flatten(2), 17, mode="linear"), 1 + 2e-5),
    (F.interpolate, pixels, lambda h: F.interpolate(h, (5, 7), mode="bilinear"), 1 + 2e-5),
    (F.unfold, pixels, lambda h: F.unfold(h, 2), 1.5),
    (F.unfold, image, lambda h: F.unfold(h, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1))),
    (F.unfold, positive, lambda h: F.unfold(h[:, None], 3, padding=1)),
    (F.fold, pixels, lambda h: F.fold(h.reshape(1, 8, 3), (4, 2), 2, padding=(0, 0), stride=(1, 1)), 1.5),
    (F.fold, image, lambda h: F.fold(F.unfold(h, 3, padding=1), (3, 4), 3, padding=1)),
    ("unfold_axis", tokens, lambda h: h.unfold(1, 3, 2)),
    ("unfold_axis", square, lambda h: h.unfold(-1, 2, 1)),
    # attention with biases and groups
    (
        F.scaled_dot_product_attention,
        heads,
        lambda h: F.scaled_dot_product_attention(h, h, h, 3 * h @ h.mT + weights(6, 6)),
    ),
    (
        F.scaled_dot_product_attention,
        heads,
        lambda h: F.scaled_dot_product_attention(h, 0 * h, 5 * h, (9 * h[:, :1] @ h[:, 1:].mT)),
    ),
    (
        F.scaled_dot_product_attention,
        heads,
        lambda h: F.scaled_dot_product_attention(h.repeat(1, 2, 1, 1), h * 2, h.flip(2), enable_gqa=True),
    ),
    # recurrent layers
    ("lstm", tokens, lambda h: recurrent(h)[0]),
    ("lstm", tokens, lambda h: recurrent(h, both=True)[0]),
    ("lstm", tokens, lambda h: recurrent(h, biased=False, start=2.0)[0]),
    ("lstm", tokens, lambda h: nn_lstm(h.reshape(3, 2, 4))[0]),
    ("lstm_last_cell", tokens, lambda h: recurrent(h, both=True, start=-1.0)[2]),
    ("lstm_last_hidden", tokens, lambda h: recurrent(h)[1]),
]

# Operations for which a row must not be confused with a column.
CASES += [
    (key, peaked, operation)
    for key, operation in (
        ("getitem", lambda h: h.select(-1, 1)),
        ("getitem", lambda h: h.select(2, index=1)),
        ("getitem", lambda h: h.select(1, 2)),
        ("getitem", lambda h: h.narrow(-1, 1, 1)),
        ("getitem", lambda h: h.narrow(1, 1, 3)),
        ("getitem", lambda h: h[:, :, 1]),
        ("getitem", lambda h: h[..., 1]),
        ("getitem", lambda h: h[:, [0, 1, 2]]),
        ("getitem", lambda h: h[0, :, 1]),
        ("getitem", lambda h: h[0, 1:3]),
        ("getitem", lambda h: h[:, None, :, 1]),
        ("index_select", lambda h: h.index_select(-1, torch.tensor([1, 1]))),
        ("flip", lambda h: h.mT.flip(1)),
        ("roll", lambda h: h.roll(1)),
        ("roll", lambda h: h[:, :, :2].roll(1)),
        ("roll", lambda h: h.roll(2, -1)),
        ("unbind", lambda h: h.unbind(-1)[1]),
        ("unbind", lambda h: h.unbind(dim=2)[1]),
        ("unbind", lambda h: h.unbind(1)[1]),
        ("unbind", lambda h: h.mT.unbind(1)[1]),
        ("split", lambda h: h.split(2, -1)[0]),
        ("chunk", lambda h: h.mT.chunk(4, 1)[1]),
        ("permute", lambda h: h.mT),
        ("permute", lambda h: h.transpose(0, -1)),
        ("permute", lambda h: h.permute(0, 2, 1)),
        ("permute", lambda h: h[0].T),
        ("permute", lambda h: h[0].movedim(0, 1)),
        ("permute", lambda h: h.movedim(2, 0)),
        ("reshape", lambda h: h.reshape(1, 16)),
        ("reshape", lambda h: h.reshape(1, 2, 8)),
        ("reshape", lambda h: h.reshape(8, 2)),
        ("reshape", lambda h: h.mT.reshape(1, 2, 2, 4)),
        ("reshape", lambda h: h.mT.reshape(4, 4, 1)),
        ("reshape", lambda h: h[:, :, 1:2].reshape(1, 4)),
        ("mean", lambda h: h.mean(-1)),
        ("mean", lambda h: h.mean(1)),
        ("sum", lambda h: h.sum(1)),
        ("sum", lambda h: h.sum((0, 1))),
        ("cat", lambda h: torch.cat([h, h], -1)),
        ("cat", lambda h: torch.cat([h, h], axis=-1)),
        ("cat", lambda h: torch.cat([h.mT, h], 1)),
        ("stack", lambda h: torch.stack([h, h], -1)),
        ("expand", lambda h: h[:, :, 1:2].expand(1, 4, 4)),
        ("expand", lambda h: h.mT.expand(2, 4, 4)),
        ("repeat", lambda h: h.repeat(1, 1, 2)),
        ("tile", lambda h: h.mT.tile(2, 1)),
        ("repeat_interleave", lambda h: h.repeat_interleave(torch.tensor([1, 3, 1, 1]), dim=-1)),
        ("repeat_interleave", lambda h: h.repeat_interleave(torch.tensor([1, 3, 0, 1]), dim=1)),
        ("pad", lambda h: F.pad(h, (0, 0, 2, 0), mode="reflect")),
        ("pad", lambda h: F.pad(h, (2, 0), mode="replicate")),
        ("add", lambda h: h + h[:, :1]),
        ("add", lambda h: h + weights(4, 1)),
        ("add", lambda h: h.mT + h),
        ("sub", lambda h: torch.sub(h.mT, h, alpha=3)),
        ("mul", lambda h: h * weights(4)),
        ("mul", lambda h: h.mT * h),
        ("mul", lambda h: h[:, :, 1:2] * h),
        ("div", lambda h: h / weights(4, 1)),
        ("matmul", lambda h: h.mT @ h),
        ("matmul", lambda h: h @ h.mT),
        ("matmul", lambda h: h.reshape(1, 2, 2, 4) @ h.mT),
        ("softmax", lambda h: h.mT.softmax(-1)),
        ("neg", lambda h: -h.mT),
        ("scaled_dot_product_attention", lambda h: F.scaled_dot_product_attention(h.mT, h, h.mT)),
        ("dropout", lambda h: F.dropout(h.mT, training=False)),
        ("avg_pool1d", lambda h: F.avg_pool1d(h.mT, 2, 1, 1)),
        ("avg_pool2d", lambda h: F.avg_pool2d(h, 2)),
    )
]


def _module(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


CASES += [
    (surgery.LayerProject, tokens, _module(surgery.LayerProject(4, radius=0.7))),
    (surgery.LayerProject, image, _module(surgery.LayerProject(3, radius=2.0, channels_first=True, bias=False))),
    (surgery.SmoothProject, tokens, _module(surgery.SmoothProject(4, radius=0.7))),
    (surgery.SmoothProject, image, _module(surgery.SmoothProject(3, radius=2.0, channels_first=True))),
    (surgery.L2Attention, tokens, _module(surgery.L2Attention(4, 2))),
    (surgery.L2Attention, tokens, _module(surgery.L2Attention(4, 1, head_dim=3, dim_out=5, value_bias=False))),
    (surgery.L2Attention, lambda x: x.reshape(1, 6, 4), _module(surgery.L2Attention(4, 2))),
    (
        surgery.L2WindowAttention,
        lambda x: x.reshape(4, 6, 1) @ weights(1, 4),
        _module(surgery.L2WindowAttention(4, 2, window_size=(2, 3))),
    ),
    (surgery.ClippedReLU, image, _module(surgery.ClippedReLU(0.5))),
    (surgery.ClippedReLU, pixels, surgery.ClippedReLU(-3.0).double().eval()),
    (surgery.ClippedReLU, image, _module(surgery.ClippedReLU(torch.zeros(3, 1, 1)))),
    (surgery.MaxMin, tokens, surgery.MaxMin(-1).eval()),
    (surgery.SmoothMaxMin, tokens, surgery.SmoothMaxMin(0.3, -1).eval()),
    (surgery.ClippedMaxMin, tokens, surgery.ClippedMaxMin(0.5, -0.5, dim=-1).double().eval()),
    (surgery.L2SetAttention, tokens, _module(surgery.L2SetAttention(4, 2))),
    (surgery.L2SetAttention, tokens, _module(surgery.L2SetAttention(4, 2, first=True))),
    (surgery.L2SetAttention, image, _module(surgery.L2SetAttention(3, 1, arrangement="channels"))),
    (surgery.L2RotaryAttention, tokens, _module(surgery.L2RotaryAttention(4, 2))),
    (surgery.RmsLayerProject, tokens, _module(surgery.RmsLayerProject(4, radius=0.7))),
    (surgery.RmsLayerProject, tokens, surgery.RmsLayerProject(4, radius=1.0, bias=False).double().eval()),
    (surgery.RmsLayerProject, image, surgery.RmsLayerProject(3, 3**0.5, bias=False, channels_first=True).double()),
    (surgery.RmsSmoothProject, image, _module(surgery.RmsSmoothProject(3, radius=2.0, channels_first=True))),
    (surgery.GroupLayerProject, image, _module(surgery.GroupLayerProject(3, radius=0.7, groups=3))),
    (surgery.GroupSmoothProject, image, _module(surgery.GroupSmoothProject(3, radius=2.0))),
]


def _name(case: tuple[Any, ...]) -> str:
    key = key_of(case[0])
    return f"{key if isinstance(key, str) else key.__name__}-{case[1].__name__}"


def _ours(key: Any) -> bool:
    return isinstance(key, str) or key.__module__.startswith("lipcert.")


def test_every_rule_has_a_case() -> None:
    missing = {key for key in answers("lipschitz") if _ours(key)} - {key_of(case[0]) for case in CASES}
    assert not missing


def test_every_rule_states_its_source() -> None:
    for question in ("lipschitz", "box", "remainder", "rounding"):
        unsourced = {op for op, answer in answers(question).items() if _ours(op) and not (answer.__doc__ or "").strip()}
        assert not unsourced, question


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{_name(case)}" for i, case in enumerate(CASES)])
def test_contract(case: tuple[Any, ...], check_contract: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule by itself: what a case writes out is not put together."""
    monkeypatch.setattr(_global, "canonical_forms", lambda graph, question, images: needed(graph))
    target, stem, operation, *tight = case
    analysis = check_contract(lambda x: operation(stem(x)), SIZE, *tight)
    assert key_of(target) in {node.op for node in analysis.graph.nodes}, "the case does not reach its rule"
    check_ranges(analysis)


@pytest.mark.parametrize("case", {key_of(case[0]): case for case in reversed(CASES)}.values(), ids=_name)
def test_contract_for_all_questions(case: tuple[Any, ...]) -> None:
    """What users hold their rules to: a constant, boxes, remainders and rounding errors."""
    _, stem, operation = case[:3]
    found = check_rule(lambda x: operation(stem(x)), SIZE, points=3)
    assert found.get("box") != 0
    check_gains(lambda x: operation(stem(x)), weights(2, 1, *SIZE).sigmoid())


COMPOSED = {
    "pixel_unshuffle": lambda h: F.pixel_unshuffle(h[:, :, :2], 2),
    "rsub": lambda h: torch.rsub(h, B4, alpha=2) * torch.rsub(B4, h) + torch.rsub(h, 2),
    "addcmul": lambda h: (
        torch.addcmul(BETA[:2, None, None], GAMMA[:2, None, None], h) + torch.addcmul(h, h, h.sigmoid())
    ),
    "einsum": lambda h: torch.einsum("bchw,hkc->bhwk", h, weights(3, 5, 2)),
    "einsum, constant first": lambda h: torch.einsum("hkc,bchw->bhwk", weights(3, 5, 2), h),
    "einsum, one axis": lambda h: torch.einsum("bchw,wd->dbch", h, W44),
    "einsum, two values": lambda h: torch.einsum("bhnd,bhmd->bhnm", h, h.flip(2)),
    "einsum of a list": lambda h: torch.einsum("bhwc,wkc->bhwk", [h.mT, weights(4, 3, 3)]),
    "einsum, permuted": lambda h: torch.einsum("bij, bjk -> ikb", h[0], h[0].mT),
    "einsum, no sum": lambda h: torch.einsum("bij,bij->bij", h[0], h[0].flip(1)),
    "einsum, axes of size 1": lambda h: torch.einsum("bhnd,bhmd->bhnm", h[..., :1], h[:, :1]),
    "multi_head_attention": lambda h: _attend(h.reshape(1, 6, 4))[0],
}


@pytest.mark.parametrize("name", COMPOSED)
def test_functions_that_are_recorded_as_their_parts(name: str) -> None:
    """The bounds of the parts hold for torch's own kernel, roundings in three types included."""
    assert "rounding" in check_rule(lambda x: COMPOSED[name](2 * x - 1), SIZE, points=3)


def check_ranges(analysis: Any) -> None:
    """Floors, sums of rows and norms of whole values, against the values at points of the box."""
    generator = torch.Generator().manual_seed(9)
    points = [torch.rand(1, *SIZE, generator=generator, dtype=torch.float64) for _ in range(6)]
    points += [p.round() for p in points] + [torch.zeros(1, *SIZE).double(), torch.ones(1, *SIZE).double()]
    for point in points:
        for node, tensor in evaluate(analysis.graph.nodes, {analysis.graph.input: point}).items():
            value = analysis.values[node]
            if not isinstance(value, Value) or not tensor.isfinite().all():
                continue
            slack = 1e-9 * (1 + tensor.abs().max())
            assert bool((tensor >= value.floor - slack).all()), (node, value.floor)
            assert tensor.norm() <= float(value.total_norm()) * (1 + 1e-12), node
            if tensor.dim():
                assert tensor.sum(-1).min() >= value.mass - slack, node
            if value.lowest > 0:
                assert tensor.min() >= value.lowest * (1 - 1e-9), node


@pytest.mark.thinned(4)
@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{_name(case)}" for i, case in enumerate(CASES)])
def test_contract_with_a_matrix_behind(case: tuple[Any, ...], check_contract: Any) -> None:
    """What an operation says of rows, offsets and maps is used by the matrix and the softmax that follow."""
    _, stem, operation = case[:3]
    shape = operation(stem(torch.rand(1, *SIZE, dtype=torch.float64))).shape
    if not shape:
        pytest.skip("a number has no last axis")
    after = weights(3, shape[-1], seed=11)
    check_contract(lambda x: F.linear(operation(stem(x)), after, weights(3)).softmax(-1), SIZE, ascent=0)


def laid_out(x: Tensor, order: Sequence[int], step: int | None) -> Tensor:
    """The same values, with the axes in this order in memory; ``step`` is the stride of axes of size 1."""
    x = x.permute(*order).contiguous().permute(*(order.index(axis) for axis in range(x.dim())))
    sides = zip(x.shape, x.stride(), strict=True)
    return x.as_strided(x.shape, [known if step is None or size > 1 else step for size, known in sides])


@pytest.mark.thinned(4)
@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{_name(case)}" for i, case in enumerate(CASES)])
@sdpa_kernel(SDPBackend.MATH)  # the other forms of attention have no second derivative
def test_derivatives_in_a_replay_are_those_without_vmap(case: tuple[Any, ...], network: Any) -> None:
    """For one image and for two, however their values lie in memory, forwards and backwards."""
    _, stem, operation = case[:3]
    points = [stem(weights(1, *SIZE, seed=seed)).detach().contiguous() for seed in (10, 11)]
    graph = capture(network(lambda h: operation(h * 1.0)), points[0])
    truth, back = [], [weights(*graph.output.shape, seed=seed) for seed in (12, 13)]
    for h, u in zip(points, back, strict=True):
        leaf = h.clone().requires_grad_()
        result = operation(leaf * 1.0)
        result = result if result.requires_grad else graph.replay(leaf)  # such as detach_()
        truth.append(torch.autograd.grad(result, leaf, u)[0])
    for count in (1, 2):
        values, u, wanted = (torch.stack(some[:count]) for some in (points, back, truth))
        axes = list(range(values.dim()))
        orders = {tuple(axes), (0, 1, *reversed(axes[2:])), (0, 1, *axes[3:], 2)}
        for order, step in itertools.product(orders, (None, 1, values.shape[2])):
            x = laid_out(values, order, step).requires_grad_()
            (result,) = graph.forward(graph.input, x, [graph.output], {})
            for given in (u, torch.empty_like(result).copy_(u)):
                (found,) = torch.autograd.grad(result, x, given, retain_graph=True)
                torch.testing.assert_close(found, wanted)
            weight, v = torch.zeros_like(result, requires_grad=True), torch.ones_like(values)
            (pulled,) = torch.autograd.grad(result, x, weight, create_graph=True)
            if pulled.requires_grad:
                (pushed,) = torch.autograd.grad(pulled, weight, v)
                torch.testing.assert_close((pushed * u).sum(), (wanted * v).sum())


@pytest.mark.parametrize("stem", [tokens, square, heads, image, scaled, thin, vector, chances, peaked, rows_first])
def test_the_networks_before_the_operation(stem: Stem, check_contract: Any) -> None:
    check_contract(stem, SIZE)


REFUSED: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("exp", lambda x: x.exp()),
    ("root of a value that may be negative", lambda x: (x - 0.5).sqrt()),
    ("where", lambda x: torch.where(torch.tensor([True, False] * 2), x, -x)),
    ("gt", lambda x: (x > 0.5) * x),
    ("positions given by a mask", lambda x: _set(x, torch.ones(1, *SIZE, dtype=torch.bool), 0.0)),
    ("einsum", lambda x: torch.einsum("abcd->acbd", x)),
    (
        "einsum",
        lambda x: (
            torch.einsum("abcd,abcd->abc", x, x[:, :1, :1, :1].expand(1, 2, 3, 4))
            @ torch.einsum("ab,c->a", x[0, 0], B4)
        ),
    ),
    ("einsum", lambda x: torch.einsum("aabc,bc->a", x[:, :1], x[0, 0])),
    ("more than one layer", lambda x: nn_lstm(x.reshape(1, 6, 4), layers=2)[0]),
    ("variance of 1", lambda x: x.var(0)),
    ("p = 1", lambda x: x.norm(p=1)),
    ("the limits depend on the image", lambda x: torch.clamp(x, min=x.flip(1) * 50)),
    ("limits of a larger shape", lambda x: torch.clamp(x, max=torch.ones(9, 2, 3, 4))),
    ("rounding", lambda x: torch.div(x, 0.1, rounding_mode="floor")),
    ("floordiv", lambda x: x // 0.1),
    ("division by zero", lambda x: x / 0.0),
    ("exponent 0.5", lambda x: (x - 0.5) ** 0.5),
    ("exponent -1", lambda x: (x - 1) ** -1.0),
    ("exponent 0 ", lambda x: x**0),
    ("base must be one positive number", lambda x: (-2.0) ** x),
    ("torch.int64", lambda x: (100 * x).to(torch.int64)),
    ("torch.int64", lambda x: (100 * x).sum(1, dtype=torch.int64)),
    ("torch.bool", lambda x: x.to(torch.bool)),
    ("torch.complex", lambda x: (x * 1j).abs()),
    ("same bits", lambda x: x.view(torch.float32)),
    ("vectors", lambda x: x @ torch.ones(4).double()),
    ("vectors", lambda x: x[0, 0, 0] @ torch.ones(9, 4, 4).double()),
    ("vectors", lambda x: torch.ones(9, 3, 3).double() @ x[0, 0, :, 0]),
    ("without batch axis", lambda x: F.conv2d(x[0], weights(3, 2, 2, 2))),
    ("without batch axis", lambda x: F.conv_transpose2d(x[0], weights(2, 3, 2, 2))),
    ("weight depends on the image", lambda x: F.layer_norm(x, (4,), x[0, 0, 0])),
    ("weight depends on the image", lambda x: F.linear(x, x[0, 0])),
    ("x does not depend on the image", lambda x: F.linear(weights(2, 4), x[0, 0])),
    ("bias depends on the image", lambda x: F.linear(x, W44, x[0, 0, :, 0].repeat(2)[:4])),
    ("softmax without", lambda x: F.softmax(x, None, 0)),
    ("batch statistics", lambda x: F.batch_norm(x, None, None, training=True)),
    ("negative variance", lambda x: F.batch_norm(x, MEAN[:2], -1 - VAR[:2])),
    ("p = 1", lambda x: F.normalize(x, p=1.0)),
    ("several dimensions", lambda x: F.normalize(x, dim=(1, 2))),
    ("max_pool2d", lambda x: F.max_pool2d(x, 2, return_indices=True)[0]),
    ("more results than entries", lambda x: F.adaptive_max_pool2d(x, 9)),
    ("weights of both signs", lambda x: F.avg_pool2d(x, 2, divisor_override=-3)),
    ("random", lambda x: F.dropout(x * 0, 0.5, True)),
    ("random", lambda x: F.scaled_dot_product_attention(x, x, x * 0, dropout_p=0.5)),
    ("topk", lambda x: x.topk(2, sorted=False).values),
    ("addcmul", lambda x: torch.addcmul(x, x, x, value=-2)),
    ("gt", lambda x: torch.where(x > 0.1, x, 0.2 * x)),
    ("weight depends", lambda x: F.prelu(x, x[0, 0, 0, :1])),
    ("multi_margin", lambda x: F.multi_margin_loss(x.flatten(1), torch.tensor([0]))),
]


ATTENTION = _module(nn.MultiheadAttention(4, 2, batch_first=True))
RECURRENT = {n: _module(nn.LSTM(4, 3, n, batch_first=True, bidirectional=True)) for n in (1, 2)}


def nn_lstm(x: Any, layers: int = 1) -> Any:
    return RECURRENT[layers](x)


def _attend(x: Any, need_weights: bool = False) -> Any:
    return ATTENTION(x, x, x, need_weights=need_weights)


@pytest.mark.parametrize(("words", "forward"), REFUSED, ids=[f"{i}-{words}" for i, (words, _) in enumerate(REFUSED)])
def test_refused_with_the_reason(words: str, forward: Callable[[Tensor], Any], network: Any) -> None:
    with pytest.raises(UnsupportedOperation, match=words):
        analyze(network(forward), SIZE)


def test_a_constant_that_is_not_a_number(network: Any) -> None:
    for forward in (lambda x: x + math.nan, lambda x: x * torch.tensor(math.nan)):
        with pytest.raises(InputError, match="NaN"):
            analyze(network(forward), SIZE)


def test_no_constant_without_a_bound(network: Any) -> None:
    """Where nothing bounds the slope, the answer is infinity, not a number."""
    unbounded: list[Callable[[Tensor], Tensor]] = [
        lambda x: 1 / x,
        lambda x: x.sqrt(),
        lambda x: x.rsqrt(),
        lambda x: x**0.5,
        lambda x: x**-1.0,
        lambda x: F.layer_norm(x, (4,), eps=0.0),
        lambda x: F.logsigmoid(1 / x) * x,
    ]
    for forward in unbounded:
        assert not analyze(network(forward), SIZE).output.lip.finite


def test_constants_of_the_activations() -> None:
    """sup |φ'| on a dense grid, with φ' by autograd: at most the table's, and not far below."""
    grid = torch.linspace(-12, 12, 2_000_001, dtype=torch.float64)
    functions = {F.gelu: 1.128905, **{f: phi.lipschitz for f, phi in ACTIVATIONS.items() if not isinstance(f, str)}}
    del functions[F.hardsigmoid]  # torch's derivative of it uses ⅙ in float32
    for function, constant in functions.items():
        point = grid.clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(point).sum(), point)
        assert constant * (1 - 1e-5) <= slope.abs().max() <= constant, function
    point = grid.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.gelu(point, approximate="tanh").sum(), point)
    assert 1.128994 * (1 - 1e-5) <= slope.abs().max() <= 1.128994


def test_magnitudes_of_the_activations() -> None:
    grid = torch.cat([torch.linspace(-40, 40, 400_001, dtype=torch.float64), torch.tensor([-1e6, 1e6, 1e-9, -1e-9])])
    for function, phi in ACTIVATIONS.items():
        if isinstance(function, str):
            continue
        values = function(grid).abs()
        assert values.max() <= phi.largest
        if phi.shrinks:
            assert (values <= grid.abs() * (1 + 1e-15)).all(), function


def test_a_factor_is_relative_and_a_bound_is_the_results_own() -> None:
    x = Value((1, 4), 3, magnitude=2)
    assert float(x.scaled(1.5).lip) == 4.5
    assert not x.scaled(1.5).magnitude.finite
    assert float(x.scaled(1, magnitude=7).magnitude) == 7
    assert float(x.bounded(x.lip * 1.5).lip) == 4.5
    with pytest.raises(TypeError, match=r"x.lip \* 1.2"):
        x.bounded(1.2)
    with pytest.raises(TypeError, match="takes a number, not Tensor"):
        x.scaled(torch.tensor(1.2))  # type: ignore[arg-type]
    for factor in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="at least 0"):
            x.scaled(factor)


def test_value_without_facts_is_unbounded() -> None:
    value = Value((2, 3), 1)
    assert not value.magnitude.finite
    assert not value.row_norm(-1).finite
    assert not value.matrix_norm().finite


def test_row_norms_of_tiny_weights_do_not_underflow() -> None:
    """Squares of 1e-170 are zero in float64; a zero here would be a false range."""
    from lipcert.bounds._value import largest_row_norm, vector_norm

    for size in (1e-300, 1e-170, 1.0, 1e170, 1e300):
        weight = torch.full((2, 4), size, dtype=torch.float64)
        for norm in (largest_row_norm(weight), vector_norm(weight[0])):
            assert Upper(2 * size) <= norm <= Upper(2 * size) * (1 + 1e-12)


# Rules of users.


@pytest.fixture
def table() -> Any:
    """The rule table, restored afterwards."""
    before = dict(RULES)
    yield RULES
    RULES.clear()
    RULES.update(before)


def test_a_rule_for_a_function_of_torch(table: dict[Any, Rule], check_contract: Any, network: Any) -> None:
    with pytest.raises(UnsupportedOperation, match="softsign_of"):
        analyze(network(_softsign_of), SIZE)
    with pytest.raises(UnsupportedOperation, match="atan"):
        analyze(network(torch.atan), SIZE)

    @lipcert.bounds.rule(torch.atan)
    def atan(call: Any, x: Any) -> Value:
        "Slopes at most 1."
        return x.bounded(x.lip)

    check_contract(lambda x: torch.atan(image(x)), SIZE)
    check_contract(lambda x: torch.atan_(image(x)), SIZE)


def _softsign_of(x: Any) -> Any:
    """A function of a user's own that answers torch.overrides."""
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(_softsign_of, (x,), x)
    return x / (1 + x.abs())


_softsign_of.__name__ = "softsign_of"


def test_a_rule_for_a_function_of_ones_own(table: dict[Any, Rule], check_contract: Any) -> None:
    lipcert.bounds.rule(_softsign_of)(lambda call, x: x.bounded(x.lip, 1))
    check_contract(lambda x: _softsign_of(image(x)), SIZE)


def add(x: Any, y: Any) -> Any:
    """Not torch's."""
    if torch.overrides.has_torch_function((x, y)):
        return torch.overrides.handle_torch_function(add, (x, y), x, y)
    return x + 1000 * y


def test_a_function_of_ones_own_is_not_taken_for_torchs(table: dict[Any, Rule], network: Any) -> None:
    with pytest.raises(UnsupportedOperation, match="add"):
        analyze(network(lambda x: add(x, x)), SIZE)
    lipcert.bounds.rule(add)(lambda call, x, y: Value(call.shape, x.lip + y.lip * 1000))
    assert analyze(network(lambda x: add(x, x)), SIZE).output.lip == 1001
    assert float(analyze(network(lambda x: x + x), SIZE).output.lip) == pytest.approx(2)


def test_an_operator_of_a_library_is_not_taken_for_torchs(network: Any) -> None:
    library = torch.library.Library("lipcert_test", "DEF")
    library.define("relu(Tensor x) -> Tensor")
    library.impl("relu", lambda x: 100 * x, "CompositeExplicitAutograd")
    with pytest.raises(UnsupportedOperation, match="relu"):
        analyze(network(lambda x: torch.ops.lipcert_test.relu(x)), SIZE)


class Doubling(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.exp(x) * 0 + 2 * x


class Tripling(Doubling):
    def forward(self, x: Any) -> Any:
        return 3 * x


def test_a_rule_for_a_module(table: dict[Any, Rule], network: Any) -> None:
    with pytest.raises(UnsupportedOperation, match="exp"):
        analyze(network(Doubling().eval()), SIZE)

    @lipcert.bounds.rule(Doubling)
    def doubling(call: Any, module: Doubling, x: Any) -> Value:
        "2x."
        return Value(call.shape, x.lip * 2, magnitude=x.magnitude * 2)

    assert analyze(network(Doubling().eval()), SIZE).output.lip == 2
    tripled = analyze(network(Tripling().eval()), SIZE).output.lip
    assert float(tripled) == pytest.approx(3), "a subclass computes something else"
    hooked = Doubling().eval()
    hooked.register_forward_hook(lambda module, args, output: 5 * output)
    with pytest.raises(UnsupportedOperation, match="exp"):
        analyze(network(hooked), SIZE)
    patched = Doubling().eval()
    patched.forward = lambda x: 7 * x  # type: ignore[method-assign]
    assert float(analyze(network(patched), SIZE).output.lip) == pytest.approx(7)


def test_a_rule_is_asked_only_what_its_signature_allows(table: dict[Any, Rule], network: Any) -> None:
    @lipcert.bounds.rule("hypot")
    def hypot(call: Any, x: Value, y: Tensor) -> Value:
        "√(x² + y²) has slope at most 1 in x."
        return Value(call.shape, x.lip)

    assert analyze(network(lambda x: torch.hypot(x, W44[:3] * 0)), SIZE).output.lip == 1
    with pytest.raises(UnsupportedOperation, match="y depends on the image"):
        analyze(network(lambda x: torch.hypot(x, x)), SIZE)
    with pytest.raises(UnsupportedOperation, match="x does not depend on the image"):
        analyze(network(lambda x: torch.hypot(W44[:3], x)), SIZE)


def test_a_later_rule_replaces_the_earlier(table: dict[Any, Rule], network: Any) -> None:
    lipcert.bounds.rule(F.relu)(lambda call, x, inplace=False: Value(x.shape, x.lip * 17))
    assert analyze(network(F.relu), SIZE).output.lip == 17


# Folding.


def _gain(network: nn.Module, size: tuple[int, ...] = SIZE) -> float:
    return float(analyze(network, size).output.lip)


def _fold(
    whole: Callable[[Tensor], Tensor], parts: Sequence[Callable[[Tensor], Tensor]], network: Any, steepest: Any
) -> None:
    """The folded bound lies between the exact norm and the product of the parts' bounds."""
    product, value = 1.0, torch.rand(1, *SIZE, dtype=torch.float64)
    exact = steepest(whole, value, 0)
    for part in parts:
        product *= _gain(network(part), tuple(value.shape[1:]))
        value = part(value)
    folded = _gain(network(whole))
    assert exact <= folded * (1 + 1e-12)
    assert folded <= product * (1 + 1e-9)


def test_scale_convolution_and_batch_norm_fold(network: Any, steepest: Any) -> None:
    std, gain = torch.tensor([0.2, 0.9]).double().reshape(2, 1, 1), weights(3, seed=21)

    def normalise(x: Tensor) -> Tensor:
        return (x - 0.4) / std

    def convolve(x: Tensor) -> Tensor:
        return F.conv2d(x, CONV, CONV_B, stride=(1, 2), padding=1)

    def norm(x: Tensor) -> Tensor:
        return F.batch_norm(x, MEAN, VAR, gain, BETA)

    parts = [normalise, convolve, norm]
    _fold(lambda x: norm(convolve(normalise(x))), parts, network, steepest)
    grouped = weights(4, 1, 2, 2)
    _fold(
        lambda x: F.conv2d(normalise(x), grouped, groups=2),
        [normalise, lambda x: F.conv2d(x, grouped, groups=2)],
        network,
        steepest,
    )
    whole = _gain(network(lambda x: norm(convolve(normalise(x)))))
    product = _gain(network(normalise)) * _gain(network(convolve)) * _gain(network(norm), (3, 4, 3))
    assert whole < 0.9 * product, "nothing was folded"


def test_the_scale_of_a_layer_norm_folds_into_the_matrix(network: Any, steepest: Any) -> None:
    gain = torch.tensor([3.0, 0.1, 0.1, 0.1]).double()
    matrix = weights(5, 4) * torch.tensor([0.1, 3.0, 3.0, 3.0]).double()
    folded = _gain(network(lambda x: F.linear(F.layer_norm(x, (4,), gain, B4, 0.1), matrix, weights(5))))
    plain = _gain(network(lambda x: F.linear(F.layer_norm(x, (4,), None, None, 0.1) * 3.0, matrix)))
    exact = torch.linalg.matrix_norm(matrix * gain, 2).item() / math.sqrt(0.1)
    assert exact <= folded <= exact * (1 + 1e-4) < plain
    through_heads = network(lambda x: F.linear(F.layer_norm(x, (4,), gain, B4, 0.1).reshape(1, 6, 4), matrix))
    assert _gain(through_heads) <= exact * (1 + 1e-4)


@pytest.mark.parametrize("order", [lambda x, y: x + y, lambda x, y: y + x])
def test_linear_residuals_fold(order: Any, network: Any, steepest: Any) -> None:
    shrink = -0.5 * torch.eye(4, dtype=torch.float64) + 0.01 * W44

    def residual(x: Tensor) -> Tensor:
        return order(x, F.linear(x, shrink, B4))

    exact = torch.linalg.matrix_norm(torch.eye(4).double() + shrink, 2).item()
    assert exact <= _gain(network(residual)) <= exact * (1 + 1e-4) < 1
    kernel = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    kernel[:, :, 1, 1] = -0.5 * torch.eye(2)
    kernel += 0.01 * weights(2, 2, 3, 3)

    def block(x: Tensor) -> Tensor:
        return order(x, F.conv2d(x, kernel, padding=1))

    dense = steepest(block, torch.rand(1, *SIZE, dtype=torch.float64), 0)
    assert dense <= _gain(network(block)) <= 1.3 * dense
    assert _gain(network(block)) < 1


def test_what_must_not_fold(check_contract: Any, network: Any) -> None:
    """Other bases, other weights, broadcast branches, even kernels, and branches behind a nonlinearity."""
    even = weights(2, 2, 2, 2)
    forwards: list[Callable[[Tensor], Tensor]] = [
        lambda x: x + F.linear(x.flip(1), W44),
        lambda x: x - F.linear(x, W44),
        lambda x: x * 2 + F.linear(x, W44),
        lambda x: x + 0.5 * F.linear(x, W44),
        lambda x: x + F.linear(F.relu(x - 0.5), W44),
        lambda x: x + F.linear(x, W44)[:, :1],
        lambda x: x + F.conv2d(x, even, padding="same"),
        lambda x: x + F.conv2d(F.pad(x, (0, 2, 0, 2)), weights(2, 2, 3, 3)),
        lambda x: (x * G4) + F.linear(x * G4, W44),
        lambda x: x + (x + F.linear(x, W44)),
        lambda x: (x + F.linear(x, W44)) * G4,
        lambda x: x + x * -1.0,
    ]
    for forward in forwards:
        check_contract(forward, SIZE, ascent=0)


def test_cancelling_scales_keep_their_roundings(network: Any) -> None:
    """1 + s, where s = −1 + 1e-16 was itself rounded: the sum's relative error is not small."""
    nearly = torch.tensor([-1.0, -1.0 + 2.0**-52, 0.5, -1.0], dtype=torch.float64)
    third = torch.tensor([1 / 3] * 4, dtype=torch.float64)
    assert _gain(network(lambda x: x + x * nearly * third * 3)) >= 1.5


def test_a_rule_that_gives_a_number_is_named_itself(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the operation after it."""
    monkeypatch.setitem(RULES, "tanh", replace(RULES["tanh"], lipschitz=lambda call, x: 1.0))
    with pytest.raises(UnsupportedOperation, match=r"tanh \(its rule gives float, not a Value"):
        analyze(network(lambda x: F.relu(x.tanh())), SIZE)
