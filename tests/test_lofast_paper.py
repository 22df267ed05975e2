"""LoFAST as published: its constants, radii under attack, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from commands import read_rows, run
from torch import nn

import lipcert
from benchmarks.papers import lofast
from benchmarks.papers.attention import AttentionLayer
from lipcert.attacks import PGD
from lipcert.certifier._lofast_paper import _obstacles, block_bounds
from lipcert.errors import UnsupportedOperation

SIZE = {
    "img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "class_token": False,
    "global_pool": "avg", "final_norm": False, "qkv_bias": False, "num_classes": 3,
}  # fmt: skip


def vit(seed: int = 0, norm: str = "lofast", **more: object) -> lipcert.Model:
    torch.manual_seed(seed)
    model = lipcert.load("vit_tiny_patch16_224", pretrained=False, mean=(0.5,) * 3, std=(0.4,) * 3, **{**SIZE, **more})
    lipcert.convert(model, attention="keep", norm=norm)
    with torch.no_grad():
        for parameter in model.net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for block in model.net.blocks:
            if block.attn.qkv.bias is not None:
                block.attn.qkv.bias.zero_()
    return model


def layer_of(block: nn.Module) -> AttentionLayer:
    wq, wk, wv = block.attn.qkv.weight.detach().double().T.chunk(3, dim=1)
    return AttentionLayer(wq, wk, wv, block.attn.proj.weight.detach().double().T, heads=block.attn.num_heads)


def test_the_constants_are_those_of_theorem_1() -> None:
    """For one block, by the formulas that the benchmarks hold beside brute force; upper bounds, and hardly above."""
    model = vit().double()
    block = model.net.blocks[0]
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        found = block_bounds(block, x)
        tokens = block.norm1(x)
    for eps in (0.01, 0.3):
        rho = torch.full((3,), eps / found.scale, dtype=torch.float64)
        attention = found.after(rho) / found.dense
        for i in range(3):
            theorem = lofast.theorem_1(tokens[i], layer_of(block), eps, residual=False)
            expected = theorem.change + eps / found.scale
            assert expected <= float(attention[i]) <= expected * (1 + 1e-4)
            assert theorem.zeta <= float(found.zeta[i]) <= theorem.zeta * (1 + 1e-4)


def test_wide_tokens_take_the_bounds_that_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equations 12 and 28 in place of 15 and 27, which are larger."""
    model = vit().double()
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        exact = block_bounds(model.net.blocks[0], x)
        monkeypatch.setattr("lipcert.certifier._lofast_paper._EXPLICIT", 0)
        quick = block_bounds(model.net.blocks[0], x)
        tokens = model.net.blocks[0].norm1(x)
    theorem = lofast.theorem_1(tokens[0], layer_of(model.net.blocks[0]), 0.1, residual=False)
    assert theorem.naive <= float(quick.zeta) <= theorem.naive * (1 + 1e-4)
    assert bool((quick.scores >= exact.scores).all())
    assert float(quick.zeta) > float(exact.zeta)


@pytest.mark.parametrize("norm", ["lofast", "smooth"])
def test_no_attack_succeeds_inside_a_radius(norm: str) -> None:
    model = vit(1, norm)
    images = 0.2 + 0.6 * torch.rand(12, 3, 8, 8)
    result = lipcert.certify(model, images, eps=0.01, method="lofast-paper")
    radius = torch.as_tensor(result.radius)
    assert (radius > 0).all()
    assert set(result.method) == {"lofast-paper"}
    assert set(result.rigor) == {"deterministic"}
    labels = torch.as_tensor(result.predicted)
    sharper = lipcert.certify(model, images, eps=0.01, method="lofast")
    assert (torch.as_tensor(sharper.radius) > radius).all()
    assert not PGD()(model, images, labels, 0.999 * radius).broken.any()


def test_rounding_takes_little_and_the_class_token_is_read() -> None:
    model = vit(2, class_token=True, global_pool="token")
    images = torch.rand(4, 3, 8, 8)
    found = lipcert.certify(model, images, eps=0.01, method="lofast-paper")
    assert (torch.as_tensor(found.radius) > 0).all()
    double = model.double()
    with torch.no_grad():
        x = double.net._pos_embed(double.net.patch_embed((images.double() - double.mean) / double.std))
        bounds = block_bounds(double.net.blocks[0], x)
    assert max(float(part.max()) for part in bounds.rounding) < 1e-9


def test_what_theorem_1_does_not_cover_is_refused() -> None:
    biased = vit()
    biased.net.blocks[1].attn.qkv.bias = nn.Parameter(torch.ones(24))
    kept = vit(norm="keep")
    for model, message in (
        (biased, "build it with qkv_bias=False"),
        (kept, "convert it with --norm lofast"),
        (vit(final_norm=True), "a RmsLayerProject"),
        (lipcert.load(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), mean=(0.5,) * 3, std=(0.5,) * 3,
                      input_size=(3, 8, 8)), "timm's VisionTransformer is needed"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedOperation, match=message):
            lipcert.certify(model, torch.rand(1, 3, 8, 8), eps=0.01, method="lofast-paper")


def test_patches_of_dilated_kernels_overlap() -> None:
    net = vit().net
    net.patch_embed.proj.dilation = (2, 2)
    assert [path for path, _ in _obstacles(net)] == ["patch_embed"]


def test_a_negative_scale_of_the_scores_counts_with_its_size() -> None:
    block = vit().double().net.blocks[0]
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        positive = block_bounds(block, x)
        block.attn.scale *= -1
        negative = block_bounds(block, x)
    assert bool((negative.bilinear > 0).all())
    torch.testing.assert_close(negative.bilinear, positive.bilinear)
    torch.testing.assert_close(negative.scores, positive.scores)


class Fivefold(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 5 * super().forward(x)


def test_code_that_is_not_timms_is_refused() -> None:
    """The method reads weights; what a subclass, a hook or a replaced method does with values would be left out."""
    subclass, hooked, replaced = vit(), vit(), vit()
    subclass.net.head.__class__ = Fivefold
    hooked.net.blocks[0].register_forward_hook(lambda module, args, output: 20 * output)
    embedded = replaced.net._pos_embed
    replaced.net._pos_embed = lambda x: 20 * embedded(x)
    for model, message in ((subclass, "a Fivefold"), (hooked, "a hook"), (replaced, "in place of the method")):
        with pytest.raises(UnsupportedOperation, match=message):
            lipcert.certifier.Certifier(model, 0.01, "lofast-paper")


def test_the_command_says_which() -> None:
    lipcert.save(vit(), "vit.safetensors")
    words = ("certify", "vit.safetensors", "--eps", "0.001", "--method", "lofast-paper", "--out", "r.jsonl", "--limit")
    assert "lofast-paper (" in run(*words, 3).output
    run(*words, 4)
    assert [row["method"] for row in read_rows()] == ["lofast-paper"] * 4
    run("verify", "vit.safetensors", "r.jsonl")
