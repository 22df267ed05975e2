"""A small cover of timm's zoo, chosen by operations: bounds are finite and hold, and certificates stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipcert
from lipcert.bounds import analyze
from lipcert.certifier import METHODS, Certifier
from lipcert.graph import needed, unchecked

# Architectures, shrunk where timm allows, that together use the operations below.
COVER: dict[str, dict[str, Any]] = {
    "test_vit": {"img_size": 32, "patch_size": 8},
    "test_resnet": {"input_size": (3, 32, 32)},
    "test_efficientnet": {"input_size": (3, 32, 32)},
    "starnet_s050": {"input_size": (3, 32, 32)},
    "mobilenetv3_small_050": {"input_size": (3, 32, 32)},
    "convit_tiny": {"img_size": 32, "depth": 2, "local_up_to_layer": 1, "embed_dim": 48},
    "xcit_nano_12_p8_224": {"img_size": 32, "depth": 2},
    "convnextv2_atto": {"input_size": (3, 32, 32), "depths": (1, 1, 1, 1)},
    "sequencer2d_s": {
        "img_size": 56,
        "layers": (1, 1, 1, 1),
        "embed_dims": (24, 48, 48, 48),
        "hidden_sizes": (6, 12, 12, 12),
    },
    "samvit_base_patch16_224": {
        "img_size": 64,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 2,
        "global_attn_indexes": (1,),
        "window_size": 2,
    },
    "resnetv2_50d_frn": {"input_size": (3, 32, 32), "layers": (1, 1, 1, 1), "channels": (16, 16, 16, 16)},
    "swinv2_cr_tiny_224": {"img_size": 64, "window_size": 2, "embed_dim": 12, "depths": (2, 1), "num_heads": (1, 2)},
    "vit_tiny_patch16_dinov3_qkvb": {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 2, "num_classes": 7},
    "levit_128s": {"img_size": 64, "embed_dim": (24, 24, 24), "num_heads": (2, 2, 2), "depth": (1, 1, 1)},
    "tnt_s_legacy_patch16_224": {"img_size": 32, "depth": 2},
}
LARGE: dict[str, dict[str, Any]] = {
    "efficientvit_b0": {"input_size": (3, 64, 64)},
    "mvitv2_tiny": {"img_size": 64},
    "crossvit_tiny_240": {},
    "tresnet_m": {"input_size": (3, 32, 32), "layers": (1, 1, 1, 1)},
    "csatv2": {"input_size": (3, 64, 64)},
    "lambda_resnet26t": {},
    "tf_efficientnet_cc_b0_4e": {"input_size": (3, 32, 32)},
    "volo_d1_224": {},
    "resnetv2_50d_evos": {},
    "ecaresnet26t": {"input_size": (3, 32, 32)},
    "halonet_h1": {},
}
# Small enough for every certificate, each with one block of its kind or little more.
CERTIFIED: dict[str, dict[str, Any]] = {
    "test_vit": {"img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 16, "num_heads": 2},
    "test_vit_relpos": {"img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 16, "num_heads": 2},
    "vit_tiny_patch16_dinov3_qkvb": {"img_size": 32, "depth": 1, "embed_dim": 16, "num_heads": 2},
    "beit_base_patch16_224": {"img_size": 32, "depth": 1, "embed_dim": 16, "num_heads": 2},
    "cait_xxs24_224": {
        "img_size": 32,
        "depth": 1,
        "depth_token_only": 1,
        "embed_dim": 16,
        "num_heads": 2,
        "init_values": 1.0,
    },
    "test_convnext": {"input_size": (3, 32, 32), "depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)},
    "fasternet_t0": {"input_size": (3, 32, 32), "embed_dim": 8, "depths": (1, 1, 1, 1)},
}
CERTIFIED_LARGE: dict[str, dict[str, Any]] = {
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "window_size": 4,
        "embed_dim": 8,
        "depths": (2,),
        "num_heads": (2,),
    },
    "test_mambaout": {"input_size": (3, 32, 32), "depths": (1, 1), "dims": (8, 16)},
    "test_resnet": {"input_size": (3, 32, 32)},
    "test_efficientnet": {"input_size": (3, 32, 32)},
    "test_coatnet": {"img_size": 32},
}
OPERATIONS = frozenset(
    """
    add adaptive_avg_pool2d avg_pool2d batch_norm cat conv2d div expand gelu getitem hardsigmoid
    hardswish hardtanh layer_norm linear lstm matmul max_pool2d maximum mean mul neg norm normalize pad permute relu
    reshape roll rsqrt scaled_dot_product_attention sigmoid silu softmax square sub sum unbind unfold
    """.split()  # noqa: SIM905
)


def load(name: str, arguments: dict[str, Any]) -> lipcert.Model:
    """The architecture with parameters that start at zero drawn anew, so that no branch is multiplied by zero."""
    torch.manual_seed(0)
    model = lipcert.load(name, pretrained=False, **arguments)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def steepest(model: nn.Module, size: tuple[int, ...], images: int = 2, steps: int = 4) -> float:
    """The largest ‖Jᵀu‖, ‖u‖ = 1, met on a way uphill: u follows J v, v = Jᵀ u, and the image moves along v."""
    generator = torch.Generator().manual_seed(0)
    best = 0.0
    for _ in range(images):
        image = torch.rand(1, *size, generator=generator, dtype=torch.float64)
        direction: Tensor | None = None
        for _ in range(steps):
            point = image.clone().requires_grad_()
            logits = model(point)
            if direction is None:
                direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
            (pulled,) = torch.autograd.grad((logits * direction / direction.norm()).sum(), point)
            best = max(best, pulled.norm().item())
            with torch.no_grad():
                direction = model(image + 1e-3 * pulled / pulled.norm()) - logits
                image = (image + 0.1 * pulled / pulled.norm()).clamp(0, 1)
    return best


@pytest.mark.parametrize(
    ("name", "arguments"),
    [*COVER.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in LARGE.items())],
    ids=[*COVER, *LARGE],
)
def test_the_bound_is_finite_and_above_every_slope_met(name: str, arguments: dict[str, Any]) -> None:
    model = load(name, arguments).double()
    analysis = analyze(model)
    assert analysis.obstacles() == []
    assert analysis.output.lip.finite
    found = steepest(model, model.input_size)
    assert found > 0
    assert analysis.output.lip >= found


def test_the_cover_uses_the_operations_of_the_zoo() -> None:
    used: set[str] = set()
    for name, arguments in COVER.items():
        model = lipcert.load(name, pretrained=False, **arguments).to("meta")
        with torch.device("meta"):
            graph = unchecked(model, torch.empty(1, *model.input_size), lambda module: False)
        used |= {node.name for node in needed(graph).nodes}
    assert used >= OPERATIONS, OPERATIONS - used


class Small(nn.Module):
    """A patch embedding, a layer of one kind, and a linear head."""

    def __init__(self, layer: Callable[[Tensor], Tensor]):
        super().__init__()
        self.embed = nn.Conv2d(3, 4, 4, 4)
        self.head = nn.Linear(4, 3)
        self.layer = layer
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).mean((2, 3)))


def response_normalised(h: Tensor) -> Tensor:
    length = h.norm(p=2, dim=(2, 3), keepdim=True)
    return h + h * (length / (length.mean(dim=1, keepdim=True) + 0.1))


def linear_attention(h: Tensor) -> Tensor:
    rows = h.flatten(2).mT
    query, value = rows.relu() + 0.05, nn.functional.pad(rows, (0, 1), value=1.0)
    out = query @ (query.mT @ value)
    return (out[..., :-1] / (out[..., -1:] + 0.1)).mT.reshape(h.shape)


def cosine_attention(h: Tensor) -> Tensor:
    rows = nn.functional.normalize(h.flatten(2).mT, dim=-1)
    return ((3 * rows @ rows.mT).softmax(-1) @ rows).mT.reshape(h.shape)


def dynamic_weights(h: Tensor) -> Tensor:
    """Each image has its own weight; as in timm, the images of a batch become groups."""
    count = len(h)
    weight = 3 * h.mean((2, 3)).repeat(1, 4).sigmoid().reshape(4 * count, 4, 1, 1)
    return nn.functional.conv2d(h.reshape(1, 4 * count, 2, 2), weight, groups=count).reshape(count, 4, 2, 2)


# What families of the zoo do in their layers, on networks small enough for the anchored certificate.
LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "hard activations": lambda h: (
        nn.functional.hardswish(3 * h) * nn.functional.hardsigmoid(h.mean((2, 3), keepdim=True))
    ),
    "clipping": lambda h: nn.functional.hardtanh(4 * h, 0.0, 6.0) + h.clamp(-0.2, 0.2) + nn.functional.hardtanh(3 * h),
    "group norm": lambda h: nn.functional.group_norm(h, 2, eps=1e-2),
    "rms norm": lambda h: h * torch.rsqrt(h.pow(2).mean(1, keepdim=True) + 0.05),
    "response norm": response_normalised,
    "instance statistics": lambda h: h * h.sigmoid() / h.var((2, 3), unbiased=False, keepdim=True).add(0.1).sqrt(),
    "linear attention": linear_attention,
    "cosine attention": cosine_attention,
    "upsampling": lambda h: nn.functional.interpolate(h, scale_factor=2, mode="bilinear").relu(),
    "patches": lambda h: nn.functional.fold(nn.functional.unfold(h, 2).square(), (2, 2), 2),
    "largest": lambda h: h + h.amax((2, 3), keepdim=True) + torch.maximum(h, h.flip(1)),
    "dynamic weights": dynamic_weights,
}


@pytest.mark.parametrize("name", LAYERS)
def test_no_attack_succeeds_inside_the_anchored_radius(name: str, attack: Callable[..., bool]) -> None:
    torch.manual_seed(3)
    model = lipcert.load(Small(LAYERS[name]), mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, 8, 8)).double()
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    radii = Certifier(model, 0.01, "anchored").run(images).radius
    assert bool((radii > 0).all())
    assert not attack(model, images.double(), radii * (1 - 1e-9))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [*CERTIFIED.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in CERTIFIED_LARGE.items())],
    ids=[*CERTIFIED, *CERTIFIED_LARGE],
)
def test_every_method_certifies(name: str, arguments: dict[str, Any], attack: Callable[..., bool]) -> None:
    model = load(name, {**arguments, "num_classes": 3}).double()
    image = torch.rand(1, *model.input_size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    with torch.no_grad():
        model.net.get_classifier().bias -= 0.999 * model(image)[0]  # another class is near
    # A radius far below ε counts as 0, and that of a deep network by a bound on the whole space is.
    eps = dict.fromkeys(METHODS[1:], 0.01) | {"global": 1e-100, "gloro": 1e-100}
    radii = {method: Certifier(model, at, method).run(image).radius.item() for method, at in eps.items()}
    assert 0 < radii["global"] <= radii["gloro"] * (1 + 1e-9)
    assert radii["gloro"] <= radii["local"] * (1 + 1e-9)
    assert 0 < radii["lofast"] <= radii["anchored"] * 1.1  # norms are within 5 % of each other, or so
    assert not attack(model, image, radii["anchored"] * (1 - 1e-9))
    assert any(attack(model, image, radii["anchored"] * 2**k) for k in range(11, 0, -1))
