"""The architectures that lipcert adds to timm's registry."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F

import lipcert
from lipcert.bounds import MarginBounds, analyze
from lipcert.errors import LoadError
from lipcert.networks._parts import NormalizedLinear
from lipcert.networks.lip_convnet import LipConvNet
from lipcert.surgery import ClippedMaxMin, ClippedReLU, MaxMin, Orthogonal

SMALL = {
    "liresnet_l6w64": {"width": 8, "depth": 2, "neck": 8, "num_features": 16},
    "lipnext_l8w128": {"depth": 2, "width": 16},
    "lip_convnet_4c3f": {},
    "lip_convnet_6c2f": {"act_layer": "clipped-maxmin"},
    "lip_convnet_8c2f": {"act_layer": "relu", "img_size": 32},
    "certvit_mnist": {"depth": 1},
    "liresnet_vit_dot": {"depth": 1},
    "liresnet_vit_l2": {"depth": 1, "residual_depth": 1, "width": 8, "radius": 8.0, "start": 0.1, "neck": 16},
    "cifar_vit_stem": {"stem": (8, 8), "patch_size": 2, "embed_dim": 32, "depth": 1},
}


@pytest.mark.parametrize("name", SMALL)
def test_every_family_is_built_bounded_and_saved(name: str, tmp_path) -> None:
    model = lipcert.load(name, pretrained=False, num_classes=5, **SMALL[name])
    assert lipcert.lipschitz(model).finite
    image = torch.rand(1, *model.input_size)
    lipcert.save(model, tmp_path / "a.safetensors")
    assert torch.equal(lipcert.load(tmp_path / "a.safetensors")(image), model(image))
    model.net.reset_classifier(3)
    assert model(image).shape == (1, 3)


def test_sizes_are_those_of_the_paper() -> None:
    """Table 1 of the LiResNet paper: 5 and 49 million parameters."""
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in timm.create_model(name).parameters())
            for name in ("liresnet_l6w128", "liresnet_l12w512")
        ]
    assert [round(size / 1e6) for size in sizes] == [5, 49]


@pytest.mark.parametrize(
    ("name", "arguments", "parameters"),
    [
        ("lip_convnet_4c3f", {"in_chans": 1, "img_size": 28, "act_layer": "relu"}, 1_973_536),
        ("lip_convnet_4c3f", {}, 2_528_096),
        ("lip_convnet_6c2f", {}, 2_360_672),
        ("lip_convnet_8c2f", {"img_size": 32, "num_classes": 100}, 2_436_864),
        ("lip_convnet_8c2f", {}, 5_257_984),
    ],
)
def test_sizes_of_plain_networks_are_those_of_certvit(name, arguments, parameters) -> None:
    """Its table 1 has a threshold of each unit, but for MNIST, and no biases."""
    with torch.device("meta"):
        net = timm.create_model(name, bias=False, **arguments)
        shared = timm.create_model(name, bias=False, thresholds="layer", **arguments)
        biased = timm.create_model(name, **arguments)
    clipped = [m for m in net.modules() if isinstance(m, ClippedReLU)]
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert sum(p.numel() for p in shared.parameters()) == parameters - sum(m.threshold.numel() - 1 for m in clipped)
    assert sum(p.numel() for p in biased.parameters()) > parameters
    net.reset_classifier(3)
    assert net.head.bias is None


@pytest.mark.parametrize("activation", ["clipped-relu", "clipped-maxmin"])
def test_thresholds_of_each_unit_are_certified_truthfully(activation: str) -> None:
    """Radii by boxes and by the global bound, in float32 too, and steepest steps within them."""
    net = LipConvNet(((4, 3, 1, 1), (4, 4, 2, 1)), (8,), activation, num_classes=3, img_size=8)
    clips = [m for m in net.modules() if isinstance(m, (ClippedReLU, ClippedMaxMin))]
    for module in clips:
        for threshold in module.parameters():
            assert threshold.numel() > 1
            threshold.data = 0.3 * torch.randn_like(threshold)
    model = lipcert.load(net.eval(), mean=(0.5,) * 3, std=(0.25,) * 3, input_size=(3, 8, 8))
    images = 0.2 + 0.6 * torch.rand(6, 3, 8, 8)
    for options in ({"method": "local"}, {"method": "gloro"}, {"method": "local", "dtype": "float32"}):
        result = lipcert.certify(model, images, eps=0.01, **options)
        assert (result.radius > 0).any()
        far = images.clone().requires_grad_()
        margins = model(far).topk(2).values
        (slope,) = torch.autograd.grad((margins[:, 0] - margins[:, 1]).sum(), far)
        step = slope / slope.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
        for share in (0.3, 0.999):
            moved = images - share * torch.as_tensor(result.radius).float().view(-1, 1, 1, 1) * step
            assert torch.equal(model(moved).argmax(1), torch.as_tensor(result.predicted))


def test_unknown_thresholds_are_refused() -> None:
    with pytest.raises(LoadError, match="there are no thresholds 'channel'; choose one of neuron, layer"):
        lipcert.load("lip_convnet_4c3f", pretrained=False, thresholds="channel")


def test_residual_blocks_are_bounded_as_one_operator() -> None:
    """log ∏‖I + βW/√L‖ by the matrices of the convolutions, which is far below ∏(1 + ‖βW‖/√L)."""
    model = lipcert.load(
        "liresnet_l6w64", pretrained=False, img_size=8, width=4, depth=3, neck=4, num_features=8
    ).double()
    bound = lipcert.lipschitz(model)
    found = [layer.log10_gain for layer in bound.layers if layer.path.startswith("net.blocks")]
    truth = []
    for index in range(0, 6, 2):
        block = model.net.blocks[index]
        jacobian = torch.autograd.functional.jacobian(block, torch.zeros(1, 4, 4, 4).double()).reshape(64, 64)
        truth.append(torch.linalg.matrix_norm(jacobian, 2).log10().item())
    assert len(found) == 3
    for gain, exact in zip(found, truth, strict=True):
        assert exact <= gain + 1e-9 <= exact + 0.06


@pytest.mark.parametrize("block", ["residual", "conv"])
def test_other_blocks_are_built_and_bounded(block: str) -> None:
    sizes = {"img_size": 8, "width": 4, "depth": 2, "neck": 4, "num_features": 8}
    model = lipcert.load("liresnet_l6w64", pretrained=False, block=block, **sizes)
    if block == "residual":
        for module in model.net.blocks[::2]:
            torch.nn.init.normal_(module.beta)
    images = torch.rand(8, 3, 8, 8)
    moved = images + 0.01 * torch.randn_like(images)
    change = (model(moved) - model(images)).norm(dim=1) / (moved - images).flatten(1).norm(dim=1)
    assert change.max() <= 10 ** lipcert.lipschitz(model).log10
    with pytest.raises(LoadError, match="there is no block 'plain'"):
        lipcert.load("liresnet_l6w64", pretrained=False, block="plain", **sizes)


def test_a_deep_chain_of_convolutions_starts_as_an_isometry() -> None:
    """Without it EMMA makes all logits equal within an epoch."""
    sizes = {"img_size": 8, "width": 4, "depth": 12, "neck": 4, "num_features": 8}
    blocks = lipcert.load("liresnet_l6w64", pretrained=False, block="conv", **sizes).net.blocks.double()
    for module in blocks[::2]:
        torch.nn.init.zeros_(module.bias)
    x = torch.randn(3, 4, 6, 6, dtype=torch.double)
    torch.testing.assert_close(blocks(x).norm(), x.norm(), rtol=1e-4, atol=0)


def test_the_heads_rows_have_norm_one() -> None:
    head = NormalizedLinear(6, 4).double()
    x = torch.randn(3, 6).double()
    rows = head.weight / head.weight.norm(dim=1, keepdim=True)
    assert torch.allclose(head(x), F.linear(x, rows, head.bias))
    model = lipcert.load("liresnet_l6w64", pretrained=False, width=4, depth=1, neck=4, num_features=8)
    weight = MarginBounds(analyze(model)).weight
    assert weight is not None
    assert torch.allclose(weight.norm(dim=1), torch.ones(10).double())


@pytest.mark.parametrize(
    ("name", "sizes"), [("liresnet_l6w64", SMALL["liresnet_l6w64"]), ("liresnet_vit_l2", SMALL["liresnet_vit_l2"])]
)
def test_the_average_with_the_mirror_image_keeps_the_bound(name: str, sizes: dict) -> None:
    plain = lipcert.load(name, pretrained=False, **sizes)
    mirrored = lipcert.load(name, pretrained=False, mirror=True, **sizes)
    mirrored.net.load_state_dict(plain.net.state_dict())
    x = torch.rand(3, 3, 32, 32)
    assert torch.allclose(mirrored(x), (plain(x) + plain(x.flip(3))) / 2, atol=1e-5)
    assert torch.allclose(mirrored(x), mirrored(x.flip(3)), atol=1e-5)
    assert not torch.allclose(plain(x), plain(x.flip(3)), atol=1e-5)
    bounds = [MarginBounds(analyze(model)) for model in (plain, mirrored)]
    assert bounds[1].features == pytest.approx(bounds[0].features, rel=0.2)  # random starts
    assert bounds[1].weight is not None


@pytest.mark.parametrize("name", ["liresnet_l6w64", "liresnet_vit_l2"])
def test_a_head_added_later_has_rows_of_norm_one_too(name: str) -> None:
    net = lipcert.load(name, pretrained=False, **SMALL[name]).net
    net.reset_classifier(0)
    assert isinstance(net.get_classifier(), torch.nn.Identity)
    net.reset_classifier(7)
    assert isinstance(net.get_classifier(), NormalizedLinear)
    assert net.get_classifier().out_features == 7


def test_maxmin_with_a_gradient_is_maxmin() -> None:
    """Its form for training has the same values up to roundings, and the same gradient."""
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    plain, trained = x.clone(), x.clone().requires_grad_()
    a, b = trained.chunk(2, 1)
    truth = torch.cat((torch.maximum(a, b), torch.minimum(a, b)), 1)
    weights = torch.randn_like(x)
    (wanted,) = torch.autograd.grad((truth * weights).sum(), trained)
    (found,) = torch.autograd.grad((MaxMin()(trained) * weights).sum(), trained)
    assert torch.allclose(MaxMin()(trained), truth, atol=1e-14)
    assert torch.equal(MaxMin()(plain), truth)
    assert torch.allclose(found, wanted, atol=1e-12)


def test_every_layer_of_lipnext_is_an_isometry_or_1_lipschitz() -> None:
    """The bound from the patches to the pooled features, and the ratio of their changes by gradient ascent."""
    model = lipcert.load("lipnext_l8w128", pretrained=False, depth=3, width=16, img_size=8).double()
    patches = torch.rand(1, 3, 8, 8, dtype=torch.float64) * 2 - 1
    analysis = analyze(model)
    (pooled,) = (node for node in analysis.graph.nodes if node.shape == (1, 16))
    bound = float(analysis.values[pooled].lip) / 4  # pixels are divided by 0.25
    assert bound == pytest.approx(1, abs=1e-3)
    net = model.net
    shift = net.blocks[0].shift
    moved = shift(torch.arange(16 * 16).double().view(1, 16, 4, 4))
    assert (moved.flatten().sort().values == torch.arange(256)).all()
    assert [(moved[0, c] - 16 * c)[1, 1].item() for c in (0, 2, 4, 6, 8)] == [1, 9, 4, 6, 5]
    change = torch.randn_like(patches).requires_grad_()
    for _ in range(100):
        ratio = (net.forward_features(patches + change) - net.forward_features(patches)).norm() / change.norm()
        (ahead,) = torch.autograd.grad(ratio, change)
        change = (change + 0.3 * change.norm() * ahead / ahead.norm()).detach().requires_grad_()
    assert 0.7 < ratio <= bound


def test_training_keeps_orthogonal_matrices_on_their_manifold() -> None:
    model = lipcert.load("lipnext_l8w128", pretrained=False, depth=1, width=16, img_size=8, num_classes=3)
    before = [module.weight.clone() for module in model.modules() if isinstance(module, Orthogonal)]
    batches = [(torch.rand(8, 3, 8, 8), torch.arange(8) % 3)] * 5
    lipcert.finetune(model, batches, eps=0.1, loss="emma", epochs=1, optimizer="muon", lr=0.01)
    after = [module.weight for module in model.modules() if isinstance(module, Orthogonal)]
    assert len(after) == 3
    for old, new in zip(before, after, strict=True):
        matrix = new.flatten(1).double()
        assert (old - new).norm() > 0.01
        assert torch.linalg.svdvals(matrix).sub(1).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("liresnet_l6w64", {"act_layer": "gelu"}, "there is no activation 'gelu'"),
        ("liresnet_l6w64", {"width": 7}, "7 is odd"),
        ("liresnet_l6w64", {"img_size": 4}, "4×4 positions"),
        ("lip_convnet_8c2f", {"img_size": 8}, "too small"),
        ("lipnext_l8w128", {"img_size": 31}, "patches that cover the image"),
        ("lipnext_l8w128", {"beta": 2.0}, "beta=2.0"),
        ("liresnet_vit_l2", {"attention": "local"}, "there is no attention 'local'"),
    ],
)
def test_what_cannot_be_built_is_said(name: str, arguments: dict, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        lipcert.load(name, pretrained=False, **arguments)


def test_the_stem_takes_the_channels_of_the_images() -> None:
    model = lipcert.load("cifar_vit_stem", pretrained=False, in_chans=1)
    assert model(torch.rand(2, 1, 32, 32)).shape == (2, 10)


def test_a_small_start_makes_the_constant_of_a_hybrid_small() -> None:
    found = []
    for start in (1.0, 0.1):
        torch.manual_seed(0)
        found.append(lipcert.lipschitz(lipcert.load("liresnet_vit_l2", pretrained=False, depth=1, start=start)).value)
    assert found[1] < found[0] / 2
