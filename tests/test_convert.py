"""Swapping modules inside timm models, and the weights that they start from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import lipcert
from lipcert.errors import ConvertError, InputError
from lipcert.model import Model
from lipcert.surgery import (
    GroupSmoothProject,
    L2Attention,
    L2WindowAttention,
    LayerProject,
    LipConv2d,
    LipLinear,
    RmsLayerProject,
    SmoothProject,
    convert,
    swap,
)
from lipcert.surgery._initial import heads_of, initialise_attention
from lipcert.surgery._swap import plan

SMALL_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
SMALL_SWIN = {
    "img_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 12,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "num_classes": 5,
}
CERTVIT = [
    ("vit_tiny_patch16_224", 12, 192),
    ("vit_small_patch16_224", 12, 384),
    ("vit_base_patch16_224", 12, 768),
    ("vit_large_patch16_224", 24, 1024),
    ("vit_small_patch32_224", 12, 384),
    ("vit_base_patch32_224", 12, 768),
    ("vit_base_patch8_224", 12, 768),
    ("deit_tiny_patch16_224", 12, 192),
    ("deit_small_patch16_224", 12, 384),
    ("deit_base_patch16_224", 12, 768),
]
SWINS = [
    ("swin_tiny_patch4_window7_224", (2, 2, 6, 2), 96),
    ("swin_small_patch4_window7_224", (2, 2, 18, 2), 96),
    ("swin_base_patch4_window7_224", (2, 2, 18, 2), 128),
    ("swin_large_patch4_window7_224", (2, 2, 18, 2), 192),
]


def small(name: str = "vit_tiny_patch16_224", **arguments: Any) -> Any:
    torch.manual_seed(0)
    defaults: dict[str, Any] = (
        SMALL_SWIN if name.startswith("swin") else SMALL_VIT if name.startswith(("vit", "deit")) else {}
    )
    net = timm.create_model(name, **{**defaults, **arguments})
    size = defaults.get("img_size", 64)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return Model(net, mean=(0.5,) * 3, std=(0.25,) * 3, input_size=(3, size, size))


def images(model: Model, count: int = 4) -> Tensor:
    return torch.rand(count, *model.input_size, generator=torch.Generator().manual_seed(1))


def state(model: Model) -> tuple[list[tuple[str, type]], dict[str, Tensor]]:
    kinds = [(path, type(module)) for path, module in model.named_modules()]
    return kinds, {name: value.clone() for name, value in model.state_dict().items()}


def assert_unchanged(model: Model, before: tuple[list[tuple[str, type]], dict[str, Tensor]]) -> None:
    after = state(model)
    assert after[0] == before[0]
    assert after[1].keys() == before[1].keys()
    assert all(torch.equal(after[1][name], before[1][name]) for name in before[1])
    assert model.recipe == []


def whole_model(name: str) -> Model:
    torch.manual_seed(0)
    net: Any = timm.create_model(name)
    return Model(net, mean=(0.5,) * 3, std=(0.5,) * 3, input_size=net.default_cfg["input_size"])


def quick(cases: list[Any]) -> list[Any]:
    """All cases; those of networks that are not tiny are slow."""
    return [pytest.param(*case, marks=[] if "_tiny_" in case[0] else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("name", "depth", "width"), quick(CERTVIT))
def test_vits(name: str, depth: int, width: int) -> None:
    model: Any = convert(whole_model(name), images=torch.rand(1, 3, 224, 224))
    report = model.conversion
    assert report.parameters_before - report.parameters_after == depth * (width**2 + 2 * width)
    assert sum(isinstance(module, L2Attention) for module in model.modules()) == depth
    tokens = model.net.patch_embed.num_patches + 1
    assert all(m.lipschitz((tokens, width)).finite for m in model.modules() if isinstance(m, L2Attention))


@pytest.mark.parametrize(("name", "depths", "width"), quick(SWINS))
def test_swins(name: str, depths: tuple[int, ...], width: int) -> None:
    model: Any = convert(whole_model(name), images=torch.rand(1, 3, 224, 224))
    report = model.conversion
    widths = [width * 2**stage for stage, depth in enumerate(depths) for _ in range(depth)]
    assert report.parameters_before - report.parameters_after == sum(d**2 + 2 * d for d in widths)
    assert sum(isinstance(module, L2WindowAttention) for module in model.modules()) == sum(depths)
    first = next(m for m in model.modules() if isinstance(m, L2WindowAttention))
    assert first.lipschitz((49, width)).finite


def test_linear_maps_only_leave_the_output_as_it_is() -> None:
    for name in ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "resnet18", "convnext_atto", "mixer_s32_224"):
        model = small(name, **({"img_size": 64} if name.startswith("mixer") else {}))
        before = copy.deepcopy(model)
        x = images(model, 2)
        convert(model, attention="keep", images=x)
        assert torch.equal(model(x), before(x))
        assert model.state_dict().keys() == before.state_dict().keys()
        assert not any(type(module) in (nn.Linear, nn.Conv2d) for module in model.modules())
        assert model.conversion.logits_moved == 0
        assert model.conversion.agreement == 1


def test_keys_of_vit() -> None:
    model = small()
    before = set(model.net.state_dict())
    convert(model, attention="l2", norm="smooth")
    after = set(model.net.state_dict())
    attention = {f"blocks.{i}.attn." for i in range(2)}
    assert before - after == {a + key for a in attention for key in ("qkv.weight", "qkv.bias")}
    norms = {"norm.", *(f"blocks.{i}.norm{j}." for i in range(2) for j in (1, 2))}
    new = {a + key for a in attention for key in ("q.weight", "v_weight", "v_bias")} | {n + "radius" for n in norms}
    assert after - before == new


def test_keys_of_swin_keep_the_bias_table() -> None:
    model = small("swin_tiny_patch4_window7_224")
    tables = {k: v.clone() for k, v in model.state_dict().items() if k.endswith("relative_position_bias_table")}
    convert(model)
    assert len(tables) == 4
    assert all(torch.equal(model.state_dict()[key], table) for key, table in tables.items())


def test_the_position_bias_is_timms() -> None:
    model = small("swin_tiny_patch4_window7_224")
    before = [m._get_rel_pos_bias()[0] for m in model.modules() if type(m).__name__ == "WindowAttention"]
    convert(model)
    after = [m.position_bias() for m in model.modules() if isinstance(m, L2WindowAttention)]
    assert len(before) == len(after) == 4
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto"])
@pytest.mark.parametrize("norm", ["keep", "project", "smooth", "lofast"])
def test_swap_then_state_dict_rebuilds_the_model(name: str, norm: Any) -> None:
    model = small(name)
    attention: Any = "keep" if name.startswith("convnext") else "l2"
    convert(model, attention=attention, norm=norm)
    again = small(name)
    swapped = swap(again.net, attention=attention, norm=norm, initialise=False)
    again.net.load_state_dict(model.net.state_dict())
    x = images(model)
    assert torch.equal(again(x), model(x))
    assert [(path, type(m)) for path, m in again.named_modules()] == [(p, type(m)) for p, m in model.named_modules()]
    assert tuple(swapped) == model.conversion.swapped


def test_report_and_recipe() -> None:
    model = small()
    before = copy.deepcopy(model)
    x = images(model, 6)
    returned = convert(model, attention="l2", norm="project", images=x)
    assert id(returned) == id(model)
    report = model.conversion
    step = {"step": "convert", "attention": "l2", "norm": "project", "images": 6}
    assert model.recipe == [step]
    assert report.parameters_before == sum(p.numel() for p in before.parameters())
    assert report.parameters_after == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        a, b = before(x).double(), model(x).double()
    moved = (b - a).norm(dim=1) / a.norm(dim=1)
    assert report.logits_moved == pytest.approx(float(moved.median()), rel=1e-4)
    assert report.logits_moved_most == pytest.approx(float(moved.max()), rel=1e-4)
    assert report.agreement == pytest.approx(float((a.argmax(1) == b.argmax(1)).double().mean()))
    assert (report.images, report.random) == (6, False)
    kinds = {swapped.path: (swapped.was, swapped.now) for swapped in report.swapped}
    assert kinds["blocks.0.attn"] == ("Attention", "L2Attention")
    assert kinds["blocks.0.norm1"] == ("LayerNorm", "LayerProject")
    assert kinds["patch_embed.proj"] == ("Conv2d", "LipConv2d")
    assert kinds["head"] == ("Linear", "LipLinear")
    model = small()
    convert(model)
    assert model.conversion.random
    assert convert(small("resnet18")).recipe[0]["attention"] == "keep"


def test_attention_that_is_already_by_distance_is_reproduced() -> None:
    """Equal queries and keys of constant length make dot products a distance; full heads lose no value direction."""
    attention = timm.layers.Attention(4, num_heads=1, qkv_bias=True)
    with torch.no_grad():
        attention.qkv.weight[4:8] = attention.qkv.weight[:4] = torch.linalg.qr(torch.randn(4, 4))[0]
        attention.qkv.bias[:8] = 0
    x = nn.functional.normalize(torch.randn(300, 5, 4), dim=-1)
    expected = attention(x)
    net = nn.Sequential(attention)
    swap(net, attention="l2", norm="keep")
    blind = (net(x) - expected).norm() / expected.norm()
    assert blind < 0.02


def test_calibration_helps() -> None:
    """On data with few strong directions, weights fitted to them move the output less than weights that ignore them."""
    old = timm.layers.Attention(16, num_heads=4, qkv_bias=True)
    x = torch.randn(50, 9, 16) * torch.logspace(0.5, -2, 16) + torch.randn(16)
    new = L2Attention(16, 4)
    new.proj.load_state_dict(old.proj.state_dict())

    def error(tokens: Tensor | None) -> float:
        initialise_attention(new, heads_of(old, "qkv", tokens), tokens)
        return float((new(x) - old(x)).norm() / old(x).norm())

    assert error(x) < 0.5 * error(None)


@pytest.mark.parametrize(
    ("name", "attention"), [("vit_tiny_patch16_224", "keep"), ("swin_tiny_patch4_window7_224", "l2")]
)
def test_projections_of_lofast_have_radius_1_before_attention(name: str, attention: Any) -> None:
    model = convert(small(name), attention=attention, norm="lofast")
    found = {path: m for path, m in model.named_modules() if isinstance(m, RmsLayerProject)}
    first = [path for path in found if path.endswith(".norm1")]
    assert len(first) >= 2
    for path, module in found.items():
        assert float(module.radius) == pytest.approx(1.0 if path in first else module.dim**0.5), path
        assert module.bias is None
        x = 3 * torch.randn(5, module.dim)
        expected = x * (module.radius / x.norm(dim=1, keepdim=True)).clamp_max(1)
        assert torch.allclose(module(x), expected, atol=1e-6)
    before = {path: module.weight.clone() for path, module in found.items()}
    labels = torch.zeros(4, dtype=torch.long)
    lipcert.finetune(model, [(images(model), labels)], loss="ce", epochs=2)
    assert all(torch.equal(module.weight, before[path]) for path, module in found.items())
    if attention == "l2":
        assert lipcert.lipschitz(model).finite


def test_the_paper_on_lofast_has_no_projection_of_groups() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 3)
    )
    model = convert(Model(net, mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 8, 8)), norm="lofast")
    (kept,) = model.conversion.kept
    assert (kept.path.split(".")[-1], kept.reason) == ("1", "lofast projects tokens, not groups of channels")
    assert isinstance(model.net[4], RmsLayerProject)


@pytest.mark.parametrize("norm", ["project", "smooth"])
def test_projections_give_typical_tokens_the_scale_of_layer_norm(norm: Any) -> None:
    model = small()
    original = copy.deepcopy(model.net.norm)
    seen: list[Tensor] = []
    convert(model, attention="keep", norm=norm, images=images(model))
    module = model.net.norm
    module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(images(model))
    tokens = seen[0] - seen[0].mean(-1, keepdim=True)
    assert float(module.radius) == pytest.approx(float(tokens.norm(dim=-1).median()), rel=1e-3)
    typical = nn.functional.normalize(tokens, dim=-1) * module.radius
    assert torch.allclose(module(typical), original(typical), rtol=1e-3, atol=1e-4)
    assert torch.equal(module.bias, original.bias)


def test_layer_norm_2d_and_other_norms() -> None:
    model: Any = convert(small("convnext_atto"), attention="keep", norm="smooth")
    modules = dict(model.net.named_modules())
    assert isinstance(modules["stem.1"], SmoothProject)
    assert modules["stem.1"].channels_first
    assert model.conversion.kept == ()
    resnet: Any = convert(small("resnet18"), norm="project")
    assert resnet.conversion.kept == ()  # batch norm is linear and folded into the convolution before it
    assert not any(isinstance(module, LayerProject) for module in resnet.modules())


@pytest.mark.parametrize(("name", "now"), [("gn", GroupSmoothProject), ("ln", SmoothProject)])
def test_norms_with_an_activation_keep_it(name: str, now: type[nn.Module], tmp_path: Path) -> None:
    model: Any = lipcert.load(f"test_efficientnet_{name}", pretrained=False, input_size=(3, 32, 32))
    before, pixels = lipcert.lipschitz(model).log10, torch.rand(2, 3, 32, 32)
    convert(model, norm="smooth")
    assert model.conversion.kept == ()
    assert [type(part) for part in model.net.bn1] == [now, nn.SiLU]
    assert lipcert.lipschitz(model).log10 < before - 10
    lipcert.save(model, tmp_path / "a.safetensors")
    assert torch.equal(lipcert.load(tmp_path / "a.safetensors")(pixels), model(pixels))


def test_norm_without_weight_and_bias() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(12, elementwise_affine=False)
            self.head = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x.flatten(1)))

    model: Any = convert(Model(Net(), mean=(0,) * 3, std=(1,) * 3, input_size=(3, 2, 2)), norm="smooth")
    assert model.net.norm.bias is None
    assert bool((model.net.norm.weight > 0).all())


def test_modules_with_a_forward_of_their_own_stay() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    same = timm.layers.Conv2dSame(3, 4, 3, stride=2)
    standard = timm.layers.StdConv2d(3, 4, 3)
    net = nn.ModuleList([Doubled(2, 2), same, standard, timm.layers.Linear(2, 2)])
    assert [(s.path, s.now) for s in swap(net, attention="l2", norm="smooth")] == [("3", "LipLinear")]
    assert [type(m) for m in net] == [Doubled, timm.layers.Conv2dSame, timm.layers.StdConv2d, LipLinear]


def test_shared_modules_stay_shared() -> None:
    norm, linear = nn.LayerNorm(4), nn.Linear(4, 4)
    net: Any = nn.Sequential(norm, linear, nn.Sequential(norm, linear))
    swap(net, attention="keep", norm="project")
    assert net[0] is net[2][0]
    assert isinstance(net[0], LayerProject)
    assert net[1] is net[2][1] is linear


def test_bare_linear_map() -> None:
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), mean=(0,) * 3, std=(1,) * 3, input_size=(3, 2, 2))
    assert isinstance(convert(model).get_submodule("net.1"), LipLinear)
    conv = nn.Conv2d(3, 2, 2)
    swap(conv, attention="keep", norm="keep")
    assert isinstance(conv, LipConv2d)


def test_attention_without_an_l2_form_is_named_and_the_rest_is_converted() -> None:
    model = small("coat_lite_tiny", img_size=64)
    convert(model, norm="smooth")
    kept = {k.path: (k.was, k.reason) for k in model.conversion.kept}
    was, reason = kept["serial_blocks1.0.factoratt_crpe"]
    assert was == "FactorAttnConvRelPosEnc"
    assert "linear attention" in reason
    assert any(s.now == "SmoothProject" for s in model.conversion.swapped)
    assert isinstance(model.net.serial_blocks1[0].factoratt_crpe.qkv, LipLinear)


@pytest.mark.parametrize(
    ("arguments", "reason"), [({"scale_attn_norm": True}, "normalised"), ({"attn_layer": "diff"}, "softmaxes")]
)
def test_variants_of_plain_attention_that_stay(arguments: dict[str, Any], reason: str) -> None:
    model = small(**arguments)
    convert(model)
    assert len(model.conversion.kept) == 2
    assert all(reason in kept.reason for kept in model.conversion.kept)
    assert not any(isinstance(module, L2Attention) for module in model.modules())


def test_attention_of_an_unknown_class_is_named() -> None:
    class OddAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1)

    net = nn.ModuleDict({"odd": OddAttention(), "torch": nn.MultiheadAttention(8, 2), "outer": nn.Module()})
    net["outer"].attention_block = OddAttention()
    _, kept = plan(net, attention="l2", norm="keep")
    reasons = {k.path: k.reason for k in kept}
    assert reasons.keys() == {"odd", "torch", "outer.attention_block"}
    assert "no L2 form is known" in reasons["odd"]
    assert "different tokens" in reasons["torch"]


def test_query_norms_become_part_of_the_weights() -> None:
    """Normalised queries and keys of dot products are scaled ones where their lengths are all the same."""
    plain = timm.layers.Attention(8, num_heads=2, qkv_bias=False)
    normed = timm.layers.Attention(8, num_heads=2, qkv_bias=False, qk_norm=True, norm_layer=timm.layers.RmsNorm)
    normed.qkv.load_state_dict(plain.qkv.state_dict())
    tokens = torch.randn(4, 100, 8)
    new = heads_of(normed, "qkv", tokens)
    old = heads_of(plain, "qkv", tokens)
    factor = new.queries.norm(dim=1) / old.queries.norm(dim=1)
    lengths = (tokens @ old.queries.float().permute(1, 0, 2).flatten(1)).unflatten(-1, (2, 4)).square().mean(-1).sqrt()
    assert float((factor.mean() * lengths.mean() - 1).abs()) < 0.3
    assert torch.equal(new.values, old.values)


def test_twice() -> None:
    model: Any = convert(small(), attention="keep")
    before = state(model)
    with pytest.raises(ConvertError, match="converted before"):
        convert(model)
    assert state(model)[0] == before[0]


@pytest.mark.parametrize("arguments", [{"attention": "none"}, {"norm": "layer"}])
def test_unknown_options(arguments: dict[str, Any]) -> None:
    model = small()
    before = state(model)
    with pytest.raises(InputError, match="must be"):
        convert(model, **arguments)
    assert_unchanged(model, before)


@pytest.mark.parametrize("bad", [torch.zeros(2, 3, 8, 8), torch.full((2, 3, 16, 16), 2.0), torch.zeros(0, 3, 16, 16)])
def test_unusable_images(bad: Tensor) -> None:
    model = small()
    before = state(model)
    with pytest.raises(InputError, match="images"):
        convert(model, images=bad)
    assert_unchanged(model, before)


def test_weights_that_are_not_finite() -> None:
    model = small()
    with torch.no_grad():
        model.net.head.weight[0, 0] = float("nan")
    before = [type(module) for module in model.modules()]
    with pytest.raises(ConvertError, match="not finite"):
        convert(model, norm="smooth")
    assert [type(module) for module in model.modules()] == before


def test_a_failure_half_way_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    before = state(model)
    expected = model(images(model))

    def fail(*_: Any) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr("lipcert.surgery._convert.calibrate_projection", fail)
    with pytest.raises(RuntimeError, match="memory"):
        convert(model, norm="smooth")
    assert_unchanged(model, before)
    assert torch.equal(model(images(model)), expected)


def test_training_mode_and_dtype_survive() -> None:
    model = small().double().train()
    convert(model, norm="smooth")
    assert model.training
    assert model.net.blocks[0].attn.training
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model.net.norm.radius.dtype == torch.float64


def test_modules_that_the_forward_pass_skips_are_swapped_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(12, 3)
            self.unused = timm.layers.Attention(8, num_heads=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.flatten(1))

    net = Net()
    expected: Any = copy.deepcopy(net)
    swap(expected, attention="l2", norm="keep")
    model = convert(Model(net, mean=(0,) * 3, std=(1,) * 3, input_size=(3, 2, 2)))
    unused = model.get_submodule("net.unused")
    assert isinstance(unused, L2Attention)
    assert torch.equal(unused.q.weight, expected.unused.q.weight)


@pytest.mark.parametrize("activation", ["clipped-relu", "maxmin", "clipped-maxmin"])
def test_relu_is_replaced_and_the_file_rebuilds_it(activation: str, tmp_path) -> None:
    model = lipcert.load("resnet18", pretrained=False, num_classes=4, input_size=(3, 32, 32))
    images = torch.rand(4, 3, 32, 32)
    before = model(images)
    lipcert.convert(model, attention="keep", images=images, activation=activation)
    assert not any(isinstance(module, nn.ReLU) for module in model.modules())
    if activation == "clipped-relu":
        assert torch.allclose(model(images), before, atol=1e-5)
    assert lipcert.lipschitz(model).finite
    lipcert.save(model, tmp_path / "a.safetensors")
    assert torch.equal(lipcert.load(tmp_path / "a.safetensors")(images), model(images))


def test_activations_that_cannot_be_replaced_are_said() -> None:
    vit = lipcert.load("vit_tiny_patch16_224", pretrained=False, img_size=32, embed_dim=12, depth=1, num_heads=2)
    with pytest.raises(ConvertError, match="no ReLU module"):
        lipcert.convert(vit, attention="keep", activation="maxmin")
    odd = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    model = lipcert.load(odd, mean=(0,) * 3, std=(1,) * 3, input_size=(3, 4, 4))
    with pytest.raises(InputError, match=r"values of shape \(4, 3, 4, 4\); choose clipped-relu"):
        lipcert.convert(model, activation="maxmin")
    assert isinstance(model.net[1], nn.ReLU)
    with pytest.raises(InputError, match="activation must be"):
        lipcert.convert(model, activation="swish")


def test_relu_as_a_function_stays_and_it_is_said() -> None:
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Linear(4, 3)

        def forward(self, x):
            return self.b(torch.relu(self.act(self.act(self.a(x)))).mean((2, 3)))

    model = lipcert.load(Both(), mean=0.5, std=0.5, input_size=(3, 8, 8))
    with pytest.warns(UserWarning, match="^1 calls of relu as a function stay"):
        lipcert.convert(model, activation="clipped-relu", attention="keep")
