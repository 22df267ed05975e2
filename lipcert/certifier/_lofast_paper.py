"""The method ``lofast-paper``: LoFAST as it was published, for vision transformers with projections.

Source: Havens, Araujo, Zhang and Hu, "Fine-grained local sensitivity analysis of standard dot-product self-attention",
ICML 2024. Letters are those of the paper; the method ``lofast`` has constants of its own.

**Theorem 1** with H = 0. For tokens X ∈ ℝ^(n×d), heads l, P_l = softmax(s X A_l Xᵀ), A_l = W_l^Q (W_l^K)ᵀ, W_l = W_l^V
W_l^O and ‖X' − X‖_F ≤ ε, attention without biases of queries and keys changes by at most ζ(X) ε + δ₂(X, ε) with

    ζ(X) = ‖Σ_l P_l ⊗ W_lᵀ‖,    δ₂(X, ε) = Σ_l s ε (‖M_l(X)‖ + ε ‖A_l‖)(‖X W_l‖ + ε ‖W_l‖).

Proof: the change is Σ_l P_l Γ W_l + Σ_l (P_l(X') − P_l) X' W_l with Γ = X' − X. The first sum is linear in Γ, of norm ζ
(Lemma 1). Softmax is 1-Lipschitz by rows, and the scores change by s (Γ A_l Xᵀ + X A_l Γᵀ + Γ A_l Γᵀ), of norm at most
s (‖M_l‖ ε + ‖A_l‖ ε²) (Lemma 2). ‖M_l‖ ≤ ξ_l = ‖A_l Xᵀ‖ + ‖X A_l‖ (equation 26). Matrices of more than 1024 columns are
not written out: ξ_l then takes the place of ‖M_l‖ (equation 28), and Σ_l ‖P_l‖ ‖W_l‖ that of ζ (equation 12).

**The network** (equation 9). A block maps x to y = x + Attn(P x), then to y + MLP(P y), with a projection P whose
Lipschitz constant is max|weight|. If the tokens differ from those that were computed by ρ, they do so by ρ + ζ p +
δ₂(p) after the attention, p = max|weight| ρ, and the MLP multiplies by 1 + max|weight| L ‖W_1‖ ‖W_2‖ with the slope L
of its activation. The first ρ is ε ‖W_embed‖ over the least standard deviation of the pixels. By Proposition 1 the
class stays if the margin is above √2 times the change of the logits.

**Rounding.** Every ρ starts from computed tokens, so rounding in the forward pass only adds to it: 32 γ (1 + σ) times
the norm of all terms of a block, with σ the largest score. For the error of a sum of m products is at most γ_m times
the sum of their sizes, and an entry of a softmax, which enters twice at most, has a relative error of at most 6 γ σ +
2 γ. Norms of computed products grow by the same bound; norms themselves are upper bounds
(:func:`lipcert.norms.dense_norm`).

**The network uses what is read.** Weights, scales and counts are read from timm's modules, whose code decides which of
them are used: with ``fused_attn``, ``Attention`` ignores its ``scale``. So this code must be as its source has it
(:func:`lipcert.graph.alterations`), and the sums above, written out from what is read, must be what the embedding, the
blocks and the head return, up to twice the bound on rounding: at every image, and for blocks at random tokens too,
since the tokens of an image may all be alike, and then no scale is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, DropPath, Mlp, PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from lipcert import roundoff
from lipcert.bounds import gamma
from lipcert.certifier._method import Method, NormsDone, Subject
from lipcert.certifier._search import search
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.graph import alterations
from lipcert.norms import Budget, Ledger, dense_norm
from lipcert.numerics import SAFETY, l2_norm
from lipcert.surgery import LayerProject, LipConv2d, LipLinear, RmsLayerProject, RmsSmoothProject, SmoothProject

_EXPLICIT = 1024  # columns
_SLOPES: dict[type[nn.Module], float] = {nn.GELU: 1.129, nn.ReLU: 1.0}  # 1.128905 rounded up, for the tanh form too
# Modules whose code the method knows: it reads their weights, and not the captured operations.
_KNOWN = {
    VisionTransformer, PatchEmbed, Block, Attention, Mlp, DropPath, LayerProject, SmoothProject, RmsLayerProject,
    RmsSmoothProject, LipConv2d, LipLinear, nn.Conv2d, nn.Linear, nn.Dropout, nn.Identity, nn.Sequential, *_SLOPES,
}  # fmt: skip


@dataclass(frozen=True)
class BlockBounds:
    """The terms of Theorem 1 for one block at N images.

    Attributes:
        zeta: ζ(X), shape (N,).
        scores: s ‖M_l(X)‖, shape (N, heads).
        bilinear: s ‖A_l‖, shape (heads,).
        values: ‖X W_l‖, shape (N, heads).
        mixed: ‖W_l‖, shape (heads,).
        scale: the Lipschitz constant of the projection in front of the attention.
        dense: 1 + that of the MLP with its projection.
        rounding: of attention and MLP, each of shape (N,).
        result: the output of the block, computed from the weights that were read, shape (N, n, d).
    """

    zeta: Tensor
    scores: Tensor
    bilinear: Tensor
    values: Tensor
    mixed: Tensor
    scale: float
    dense: float
    rounding: tuple[Tensor, Tensor]
    result: Tensor

    def after(self, rho: Tensor) -> Tensor:
        """The ρ after the block, shape (N,), given the ρ before it."""
        eps = (self.scale * rho + self.rounding[0])[:, None]
        second = eps * (self.scores + eps * self.bilinear) * (self.values + eps * self.mixed)
        attention = rho + self.zeta * eps[:, 0] + second.sum(1) + self.rounding[0]
        return (self.dense * attention + self.rounding[1]) * (1 + 1e-12)


class LoFASTPaper(Method):
    """Theorem 1 of LoFAST, block by block, for timm's vision transformers with projections in place of LayerNorm."""

    name = "lofast-paper"

    def __init__(self, subject: Subject, budget: Budget):
        super().__init__(subject, budget)
        obstacles = list(_obstacles(subject.model.net))
        if obstacles:
            raise UnsupportedOperation([(f"{why}, which Theorem 1 of LoFAST as published does not cover", path)
                                        for path, why in obstacles])  # fmt: skip
        self.work = 100 * subject.flops
        net: Any = subject.model.net
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for number, block in enumerate(net.blocks):
                tokens = torch.randn(1, 4, net.embed_dim, generator=generator, dtype=torch.float64)
                _bounds_of(block, tokens.to(subject.model.device), f"net.blocks.{number}")

    def radii(self, images: Tensor, predicted: Tensor, ledger: Ledger, progress: NormsDone) -> roundoff.Radii:
        net: Any = self.subject.model.net
        with torch.no_grad():
            pixels, embed = (images - self.subject.model.mean) / self.subject.model.std, net.patch_embed
            x, matrix = net._pos_embed(embed(pixels)), embed.proj.weight.flatten(1)
            moved = x - net._pos_embed(embed(torch.zeros_like(pixels)))
            patches = F.unfold(pixels, embed.proj.kernel_size, stride=embed.proj.stride).mT
            expected = F.pad(patches @ matrix.mT, (0, 0, net.num_prefix_tokens, 0))
            start = float(dense_norm(matrix)) / float(self.subject.model.std.min())
            size = float(l2_norm(matrix)) * l2_norm(pixels.flatten(1), 1) + l2_norm(x.flatten(1), 1)
            first = 32 * gamma(matrix.shape[1]) * (size + math.sqrt(x.shape[1]) * _bias(embed.proj))
            _compare(moved, expected, first, "net.patch_embed")
            blocks = []
            for number, block in enumerate(net.blocks):
                bounds, x = _bounds_of(block, x, f"net.blocks.{number}")
                blocks.append(bounds)
                progress(number + 1, len(net.blocks))
            read = x[:, net.num_prefix_tokens :] if net.global_pool == "avg" else x[:, :1]
            slope = math.sqrt(2 / read.shape[1]) * float(dense_norm(net.head.weight)) * (1 + 1e-12)
            logits = F.linear(read.mean(1), net.head.weight, net.head.bias)
            sizes = l2_norm(net.head.weight) * l2_norm(read.flatten(1), 1) + _bias(net.head)
            _compare(self.subject.model(images), logits, 32 * gamma(sum(x.shape[1:])) * sizes, "net.head")

        def changes(eps: Tensor) -> Tensor:
            rho = start * eps + first
            for bounds in blocks:
                rho = bounds.after(rho)
            return slope * rho

        def radius(margins: Tensor, call: int) -> Tensor:
            least = margins.to(images.device).amin(1)
            guess = (least / max(slope * start, 1e-300)).clamp_min(0)

            def excess(eps: Tensor) -> Tensor:
                return (least - changes(eps)).nan_to_num(nan=-math.inf, posinf=math.inf)

            return (search(excess, guess) * (1 - SAFETY)).to(margins.device)

        return radius


def _bounds_of(block: Any, x: Tensor, path: str) -> tuple[BlockBounds, Tensor]:
    """The norms of a block at tokens, and its output, which must equal that computed from the weights read."""
    bounds, result = block_bounds(block, x), block(x)
    _compare(result, bounds.result, bounds.dense * bounds.rounding[0] + bounds.rounding[1], path)
    return bounds, result


def _compare(result: Tensor, expected: Tensor, rounding: Tensor, path: str) -> None:
    """Refuses a part of a network whose result, shape (N, ...), differs from that computed from the weights read."""
    away = l2_norm((result - expected).flatten(1), 1) if result.shape == expected.shape else rounding + math.inf
    if not bool((away <= 2 * rounding).all()):
        raise InputError(
            f"lofast-paper computes its constants from the weights and attributes of {path}, which returns another "
            "result than these give; use another method"
        )


def block_bounds(block: Any, x: Tensor) -> BlockBounds:
    """The norms of one block at tokens x, float64, shape (N, n, d)."""
    attention, mlp = block.attn, block.mlp
    heads, width = attention.num_heads, attention.head_dim
    wq, wk, wv = (part.mT.unflatten(1, (heads, width)).movedim(1, 0) for part in attention.qkv.weight.chunk(3))
    wo = attention.proj.weight.mT.unflatten(0, (heads, width))  # (heads, width, d)
    tokens, scale = block.norm1(x), width**-0.5 if attention.fused_attn else attention.scale
    s = abs(scale)
    form, mix = wq @ wk.mT, wv @ wo
    counted = gamma(sum(x.shape[1:]) + 4 * heads * width + len(mlp.fc1.weight))
    queries, keys = (tokens[:, None] @ weight for weight in (wq, wk))
    scores = scale * queries @ keys.mT
    weights = scores.softmax(-1)
    sigma = float(s * l2_norm(queries, -1).amax() * l2_norm(keys, -1).amax())
    error = 32 * counted * (1 + sigma)

    def sizes(*factors: Tensor) -> Tensor:
        """Products of Frobenius norms of matrices, of which the rounding of their product is a small part."""
        return torch.stack([l2_norm(factor.flatten(-2), -1).expand(heads) for factor in factors]).prod(0)

    of_form, of_mix = sizes(wq, wk), sizes(wv, wo)
    bilinear = s * (_norms(form) + error * of_form)
    mixed = _norms(mix) + error * of_mix
    zeta, first, values = [], [], []
    for t, p in zip(tokens, weights, strict=True):
        size = float(l2_norm(t))
        first.append(s * (_scores(t, form) + error * size * of_form))
        values.append(_norms(t @ mix) + error * size * of_mix)
        of_p = l2_norm(p.flatten(1), 1)
        zeta.append(_zeta(p, mix, mixed) + error * float((of_p * of_mix).sum()))
    slope = _SLOPES[type(mlp.act)] * float(dense_norm(mlp.fc1.weight)) * float(dense_norm(mlp.fc2.weight))
    scales = [float(norm.weight.abs().max()) for norm in (block.norm1, block.norm2)]
    length, inner = l2_norm(x.flatten(1), 1), l2_norm(tokens.flatten(1), 1)
    count = math.sqrt(x.shape[1])
    outputs = count * float(of_mix.sum()) * inner + count * _bias(attention.proj)
    y = x + (weights @ (tokens[:, None] @ mix)).sum(1)
    y = y if attention.proj.bias is None else y + attention.proj.bias
    inside = block.norm2(y)
    active = mlp.act(F.linear(inside, mlp.fc1.weight, mlp.fc1.bias))
    hidden = float(l2_norm(mlp.fc1.weight)) * l2_norm(inside.flatten(1), 1) + count * _bias(mlp.fc1)
    dense = float(l2_norm(mlp.fc2.weight)) * hidden + count * _bias(mlp.fc2)
    return BlockBounds(
        torch.stack(zeta), torch.stack(first), bilinear, torch.stack(values), mixed, scales[0], 1 + scales[1] * slope,
        (error * (length + inner + outputs), error * (l2_norm(y.flatten(1), 1) + hidden + dense)),
        y + F.linear(active, mlp.fc2.weight, mlp.fc2.bias),
    )  # fmt: skip


def _bias(layer: Any) -> float:
    return 0.0 if layer.bias is None else float(l2_norm(layer.bias))


def _norms(matrices: Tensor) -> Tensor:
    return torch.tensor([float(dense_norm(matrix)) for matrix in matrices], dtype=torch.float64)


def _scores(x: Tensor, form: Tensor) -> Tensor:
    """‖M_l(X)‖ for each head, M_l as in appendix B.4, or ξ_l(X) for tokens of too many entries; shape (heads,)."""
    n, d = x.shape
    if n * d > _EXPLICIT:
        return _norms(form @ x.mT) + _norms(x @ form)
    norms = []
    for bilinear in form:
        second = torch.zeros(n, n, n, d, dtype=torch.float64)  # row (i, j), column of token j: x_iᵀ A
        second[:, range(n), range(n)] = (x @ bilinear)[:, None]
        first = torch.kron(torch.eye(n, dtype=torch.float64), x @ bilinear.mT)
        norms.append(float(dense_norm(first + second.reshape(n * n, n * d))))
    return torch.tensor(norms, dtype=torch.float64)


def _zeta(weights: Tensor, mix: Tensor, norms: Tensor) -> Tensor:
    """‖Σ_l P_l ⊗ W_lᵀ‖, or Σ_l ‖P_l‖ ‖W_l‖ for tokens of too many entries."""
    if weights.shape[-1] * mix.shape[-1] > _EXPLICIT:
        return (_norms(weights) * norms).sum()
    whole = sum(torch.kron(p, w.mT.contiguous()) for p, w in zip(weights, mix, strict=True))
    assert isinstance(whole, Tensor)
    return torch.tensor(float(dense_norm(whole)), dtype=torch.float64)


def _obstacles(net: Any) -> Iterator[tuple[str, str]]:
    """Paths and reasons why a network is not of the kind that Theorem 1 covers."""
    if type(net) is not VisionTransformer:
        yield "", f"a {type(net).__name__}, where timm's VisionTransformer is needed"
        return
    embed = net.patch_embed
    apart = embed.proj.kernel_size == embed.proj.stride and not any(embed.proj.padding)
    if type(embed) is not PatchEmbed or not apart or any(step != 1 for step in embed.proj.dilation):
        yield "patch_embed", "patches that overlap"
    if net.global_pool not in ("avg", "token") or net.attn_pool is not None or net.pool_include_prefix:
        yield "", f"pooling by {net.global_pool}"
    for name in ("norm_pre", "norm", "fc_norm", "patch_drop"):
        if not isinstance(getattr(net, name), nn.Identity):
            yield name, f"a {type(getattr(net, name)).__name__}"
    if not isinstance(net.head, nn.Linear) or not isinstance(embed.norm, nn.Identity):
        yield "", "a normalised head or embedding"
    for number, block in enumerate(net.blocks):
        path = f"blocks.{number}"
        if type(block) is not Block or type(block.attn) is not Attention or type(block.mlp) is not Mlp:
            yield path, f"a {type(block).__name__} of other parts than timm's Attention and Mlp"
            continue
        attention = block.attn
        plain = (block.ls1, block.ls2, attention.q_norm, attention.k_norm, attention.norm, block.mlp.norm)
        if not all(isinstance(module, nn.Identity) for module in plain) or attention.gate is not None:
            yield path, "a scale, a gate or a normalisation inside a branch"
        if attention.qkv.bias is not None and bool(attention.qkv.bias.any()):
            yield f"{path}.attn.qkv", "a bias of queries, keys and values (build it with qkv_bias=False)"
        if type(block.mlp.act) not in _SLOPES:
            yield f"{path}.mlp.act", f"the activation {type(block.mlp.act).__name__}"
        for name in ("norm1", "norm2"):
            if not isinstance(getattr(block, name), (LayerProject, SmoothProject)):
                yield f"{path}.{name}", f"a {type(getattr(block, name)).__name__}: convert it with --norm lofast"
    for path, module in net.named_modules():
        if type(module) not in _KNOWN:
            yield path, f"a {type(module).__name__}, whose code may do anything"
    yield from ((path, why) for why, path in alterations(net))
