"""Fine-tuning: the losses, the norms and bounds they use, the loop, and the command."""

import contextlib
import copy
import csv
import functools
import importlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
import torch
import torch.nn.functional as F
from commands import write_images
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import Function
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lipcert
from lipcert.bounds import MarginBounds, analyze
from lipcert.certifier import Certifier
from lipcert.cli import _finetuning
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.inputs.artifact import load_artifact, read_metadata, weights_hash
from lipcert.inputs.data import Batch, Images, open_images
from lipcert.inputs.files import reserve
from lipcert.inputs.processes import Processes
from lipcert.settings import GLOBAL, RECIPES, SCHEDULES, recipe_settings
from lipcert.training import (
    LOSSES,
    Augmentation,
    Batches,
    Epoch,
    FinetuneSettings,
    Log,
    Mixed,
    Muon,
    NormLimits,
    Validation,
    _checkpoint,
    _finetune,
    _losses,
    adversarial_loss,
    annealed_loss,
    emma_loss,
    fixed_loss,
    gloro_loss,
    recipe_for,
    settings_for,
    teacher_loss,
    trades_loss,
)
from lipcert.training._matrices import matrices, projections

ARGUMENTS = {
    "img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 2.0, "num_classes": 10,
    "class_token": False, "fc_norm": False, "global_pool": "avg",
}  # fmt: skip


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.from_numpy(data.images / 16).float()[:, None].expand(-1, 3, -1, -1).contiguous()
    return images[:256], torch.from_numpy(data.target)[:256].long()


@pytest.fixture(scope="module")
def loader(digits) -> list[tuple[Tensor, Tensor]]:
    return list(zip(digits[0].split(32), digits[1].split(32), strict=True))


def vit(attention: str = "l2", norm: str = "smooth", **arguments) -> lipcert.Model:
    torch.manual_seed(0)
    model = lipcert.load(
        "vit_tiny_patch16_224", pretrained=False, mean=(0.3,) * 3, std=(0.4,) * 3, input_size=(3, 8, 8),
        **(ARGUMENTS | arguments),
    )  # fmt: skip
    return lipcert.convert(model, attention=attention, norm=norm)


def same(left: nn.Module, right: nn.Module) -> bool:
    states = left.state_dict(), right.state_dict()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def first_order_radii(model: lipcert.Model, images: Tensor, labels: Tensor) -> Tensor:
    """Margin to the runner-up over the norm of its gradient."""
    images = images.clone().requires_grad_()
    logits = model(images)
    own = F.one_hot(labels, 10).bool()
    margin = logits.gather(1, labels[:, None])[:, 0] - logits.masked_fill(own, -math.inf).amax(1)
    (gradient,) = torch.autograd.grad(margin.sum(), images)
    return (margin / gradient.flatten(1).norm(dim=1)).detach()


# Losses


def test_adversarial_loss_of_a_linear_model_with_two_classes() -> None:
    """There the gradient of the margin is w_y − w_j, and the margin falls by ε times its norm."""
    weight = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    images, labels = torch.rand(5, 3, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 0])
    value, logits = adversarial_loss(lambda x: x.flatten(1) @ weight.T, images, labels, 0.7, 0.5)
    plain = images.flatten(1) @ weight.T
    reach = 0.7 * (weight[0] - weight[1]).norm()
    expected = F.cross_entropy((plain + reach * (1 - F.one_hot(labels, 2))) / 0.5, labels)
    torch.testing.assert_close(logits, plain.detach())
    torch.testing.assert_close(value, expected)
    # The direction of the move is a constant for the gradient, and it is the gradient's own: the envelope theorem.
    torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in (value, expected)))
    assert not images.requires_grad


def test_adversarial_loss_is_the_cross_entropy_where_the_margin_is_least_to_first_order(digits) -> None:
    model = vit(attention="keep")
    images, labels = digits[0][:8], digits[1][:8]
    own = F.one_hot(labels, 10).bool()

    def margins(pixels: Tensor) -> Tensor:
        """To the runner-up at the images."""
        rivals = model(images).masked_fill(own, -math.inf).argmax(1, keepdim=True)
        logits = model(pixels)
        return (logits.gather(1, labels[:, None]) - logits.gather(1, rivals))[:, 0]

    seen: list[Tensor] = []

    def watched(pixels: Tensor) -> Tensor:
        seen.append(pixels.detach())
        return model(pixels)

    eps = 0.05
    loss, _ = adversarial_loss(watched, images, labels, eps)
    moved = seen[-1]
    torch.testing.assert_close((moved - images).flatten(1).norm(dim=1), torch.full((8,), eps))
    torch.testing.assert_close(loss, F.cross_entropy(model(moved), labels))
    for seed in range(20):
        step = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
        elsewhere = images + eps * F.normalize(step.flatten(1)).view_as(images)
        assert (margins(moved) < margins(elsewhere)).all()


def test_emma_loss_by_hand() -> None:
    """Rivals beyond the reach of ε get the whole ε K, those within it are drawn level, those ahead get nothing."""
    logits = torch.tensor([[3.0, 1.0, 2.5, 4.0]], requires_grad=True)
    constants = torch.tensor([[0.0, 2.0, 5.0, 3.0]], requires_grad=True)
    eps = 0.5
    loss = emma_loss(logits, torch.tensor([0]), constants, eps)
    moved = [3.0, 1.0 + 0.5 * 2.0, 3.0, 4.0]
    assert loss.item() == pytest.approx(math.log(sum(map(math.exp, moved))) - 3.0, rel=1e-6)
    (slope,) = torch.autograd.grad(loss, constants)
    shares = [0.0, 1.0, 0.2, 0.0]
    total = sum(map(math.exp, moved))
    assert slope[0, 1:].tolist() == pytest.approx(
        [math.exp(m) / total * s * eps for m, s in list(zip(moved, shares, strict=True))[1:]], rel=1e-5
    )


def test_annealed_loss_by_hand() -> None:
    """The logits of emma, less an offset at the label, over T; images with a large probability hardly count."""
    logits = torch.tensor([[3.0, 1.0, 2.5, 4.0], [9.0, 0.0, 0.0, 0.0]])
    constants = torch.tensor([[0.0, 2.0, 5.0, 3.0], [0.0, 1.0, 1.0, 1.0]])
    moved = [[3.0 - 2.0, 1.0 + 0.5 * 2.0, 3.0, 4.0], [9.0 - 2.0, 0.5, 0.5, 0.5]]
    losses = []
    for row in moved:
        p = math.exp(row[0] / 0.75) / sum(math.exp(z / 0.75) for z in row)
        losses.append(-0.75 * (1 - p) ** 5 * math.log(p))
    labels = torch.tensor([0, 0])
    assert annealed_loss(logits, labels, constants, 0.5).item() == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert losses[1] < 1e-10 * losses[0]
    plain = annealed_loss(logits, labels, constants, 0.5, offset=0.0, temperature=1.0, exponent=0.0)
    torch.testing.assert_close(plain, emma_loss(logits, labels, constants, 0.5))


def test_annealed_loss_near_its_limits_has_a_finite_gradient() -> None:
    logits = torch.tensor([[60.0, 0.0, 0.0], [-60.0, 0.0, 0.0]], requires_grad=True)
    loss = annealed_loss(logits, torch.tensor([0, 0]), torch.ones(2, 3).scatter(1, torch.zeros(2, 1).long(), 0.0), 0.1)
    (slope,) = torch.autograd.grad(loss, logits)
    assert slope.isfinite().all()
    assert slope[1, 0] < -0.4


def test_trades_loss_is_cross_entropy_and_divergence() -> None:
    logits, constants = torch.randn(6, 5).double(), torch.rand(6, 5).double()
    labels = torch.randint(5, (6,))
    loss = trades_loss(logits, labels, constants, eps=0.8, weight=1.7)
    predicted = logits.argmax(1)
    rows = []
    for i in range(6):
        bottom = max(logits[i, j] + 0.8 * constants[i, j] for j in range(5) if j != predicted[i])
        rows.append(torch.cat([logits[i], bottom[None]]))
    bounded = torch.stack(rows).log_softmax(1)[:, :5]
    divergence = F.kl_div(bounded, logits.softmax(1), reduction="batchmean")
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels) + 1.7 * divergence)


def test_teacher_loss_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]), torch.tensor([[0.5, 0.5, 1e-6], [0.7, 0.2, 0.1]])
    expected = (q / q.sum(1, keepdim=True) * (q / q.sum(1, keepdim=True) / p).log()).sum(1).mean()
    torch.testing.assert_close(teacher_loss(p.log() + 3, q.log()), expected)
    assert teacher_loss(q.log(), q.log() - 2).item() == pytest.approx(0, abs=1e-6)


def test_gloro_fixed_and_lmt_losses_by_hand() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.5], [0.0, 2.0, 1.0]])
    labels = torch.tensor([0, 0])
    predicted = torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.0, 4.0]])  # K of the predicted classes 0 and 1
    bottoms = [max(1.0 + 0.5 * 2, 2.5 + 0.5 * 1), max(0.0 + 0.5 * 1, 1.0 + 0.5 * 4)]
    whole = [[*row, bottom] for row, bottom in zip(logits.tolist(), bottoms, strict=True)]
    wanted = sum(math.log(sum(map(math.exp, row))) - row[0] for row in whole) / 2
    assert gloro_loss(logits, labels, predicted, 0.5).item() == pytest.approx(wanted, rel=1e-6)
    own = torch.tensor([[0.0, 2.0, 1.0], [0.0, 3.0, 4.0]])
    moved = [[3.0, 2.0, 3.0], [0.0, 3.5, 3.0]]
    wanted = sum(math.log(sum(map(math.exp, row))) - row[0] for row in moved) / 2
    assert fixed_loss(logits, labels, own, 0.5).item() == pytest.approx(wanted, rel=1e-6)


def test_eps_goes_up_by_the_ramp() -> None:
    emma, gloro = FinetuneSettings(loss="emma", eps=0.2), FinetuneSettings(loss="gloro", eps=0.2)
    assert [emma.eps_at(done) for done in (0, 0.25, 0.5, 1)] == pytest.approx([0.02, 0.21, 0.4, 0.4])
    assert [gloro.eps_at(done) for done in (0, 1 / 6, 1 / 3, 1)] == pytest.approx([0, 0.1, 0.2, 0.2])
    own = FinetuneSettings(loss="emma", eps=0.2, ramp=(1, 1.5, 0))
    assert own.eps_at(0) == own.eps_at(1) == pytest.approx(0.3)


def test_learning_rates_follow_their_schedules() -> None:
    def rates(schedule: str, *done: float, **options: float) -> list[float]:
        asked = FinetuneSettings(loss="ce", lr=0.1, schedule=schedule, **options)
        return [asked.lr_at(share) / 0.1 for share in done]

    assert [rates(name, 0.05)[0] for name in SCHEDULES] == pytest.approx([0.52] * 3)
    assert rates("cosine", 0.5, 1) == pytest.approx([0.50005, 1e-4])
    assert rates("cosine", 1, last_lr=0.05) == pytest.approx([0.5])
    assert rates("multistep", 0.45, 0.5, 0.65, 0.9) == pytest.approx([1, 0.2, 0.04, 0.0016])
    assert rates("exponential", 0.4, 0.5, 0.75, 1) == pytest.approx([1, 1, 1e-3**0.5, 1e-3])
    # equation 27 of Huang et al. 2021 for T = 250, m = 150, and no warm-up
    table_3 = {"warmup": 0, "decay_from": 0.6, "last_lr": 2e-4}
    assert rates("exponential", 0, 0.6, 0.8, 1, **table_3) == pytest.approx([1, 1, 2e-3**0.5, 2e-3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 1.0}, "warmup must be a fraction of the run"),
        ({"power_iterations": 0}, "power_iterations must be at least 1"),
        ({"vectors": "kept"}, "is one of saved, random"),
        ({"schedule": "multistep", "last_lr": 1e-5}, "leave last_lr out"),
        ({"upper_weight": -1.0}, "upper_weight must be a number from 0"),
    ],
)
def test_settings_of_the_papers_are_checked(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FinetuneSettings(**options)


# Norms and bounds


def test_matrices_are_views_of_all_weights() -> None:
    for model, expected in ((vit(), 7), (vit(attention="keep"), 8)):
        found = list(matrices(model))
        assert len(found) == expected
        entries = sum(m.value().numel() for m in found)
        assert entries == sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "pos_embed" not in n)
        with torch.no_grad():
            for matrix in found:
                matrix.value().zero_()
        assert not any(p.any() for n, p in model.named_parameters() if p.dim() > 1 and "pos_embed" not in n)


@settings(max_examples=3)
@given(st.integers(0, 1000), st.sampled_from([0.5, 1.0, 3.0]))
def test_norms_are_held_part_by_part(seed: int, norm: float) -> None:
    torch.manual_seed(seed)
    network = nn.Module()
    network.qkv = nn.Linear(6, 18)
    network.conv = nn.Conv2d(4, 8, 3, groups=2)
    network.small = nn.Linear(5, 4)
    with torch.no_grad():
        network.qkv.weight[:6] *= 40
        network.qkv.weight[6:] *= 1e-3
        network.conv.weight[:4] *= 40
        network.conv.weight[4:] *= 1e-3
        network.small.weight *= 1e-3
    before = copy.deepcopy(network)
    hold = NormLimits(network, norm)
    for _ in range(600):
        hold()
    assert torch.linalg.matrix_norm(network.qkv.weight[:6], 2).item() == pytest.approx(norm, rel=1e-3)
    # 600 steps find the norm up to log(n)/1200 of it, however near the next singular value is.
    assert operator_norm(network.conv).item() == pytest.approx(norm, rel=5e-3)
    assert torch.equal(network.qkv.weight[6:], before.qkv.weight[6:])
    assert torch.equal(network.conv.weight[4:], before.conv.weight[4:])
    assert torch.equal(network.small.weight, before.small.weight)


def operator_norm(conv: nn.Conv2d) -> torch.Tensor:
    """Of a convolution with a kernel of 3 on images of 12 by 12, by its dense matrix."""
    basis = torch.eye(conv.in_channels * 144).view(-1, conv.in_channels, 12, 12)
    images = F.conv2d(basis, conv.weight.detach(), None, conv.stride, conv.padding, conv.dilation, conv.groups)
    return torch.linalg.matrix_norm(images.flatten(1), 2)


@pytest.mark.parametrize("arguments", [{}, {"stride": 2, "padding": 1}, {"padding": "same"}, {"dilation": 2}])
def test_overlapping_convolutions_are_held_as_operators(arguments: dict) -> None:
    """Not by their flattened kernel, which is below the norm by up to the square root of the overlap."""
    conv = nn.Conv2d(2, 4, 3, **arguments)
    with torch.no_grad():
        conv.weight.copy_(conv.weight.abs() * 10)
    hold = NormLimits(nn.Sequential(conv), 0.7)
    for _ in range(600):
        hold()
    assert operator_norm(conv).item() == pytest.approx(0.7, rel=1e-3)
    assert torch.linalg.matrix_norm(conv.weight.detach().flatten(1), 2) < 0.5


def test_a_matrix_that_begins_as_zeros_is_held_later() -> None:
    linear = nn.Linear(4, 4)
    nn.init.zeros_(linear.weight)
    hold = NormLimits(nn.Sequential(linear), 1.0)
    nn.init.constant_(linear.weight, 3.0)
    for _ in range(20):
        hold()
    assert torch.linalg.matrix_norm(linear.weight.detach(), 2).item() == pytest.approx(1.0, rel=1e-3)


def test_parametrised_weights_are_not_held_in_silence() -> None:
    net = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(192, 8)), nn.Linear(8, 4))
    model = lipcert.load(net, mean=(0,) * 3, std=(1,) * 3, input_size=(3, 8, 8))
    with pytest.raises(InputError, match="1 computes its weight from others"):
        NormLimits(model, 0.1)
    NormLimits(model, {"2": 0.1})
    assert torch.linalg.matrix_norm(net[2].weight, 2) <= 0.1001


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_channels_last_changes_nothing_but_the_order_of_memory(optimizer: str, loader) -> None:
    def trained(channels_last: bool) -> lipcert.Model:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 2, 2), nn.Flatten(), nn.Linear(32, 10))
        model = lipcert.load(net, mean=(0,) * 3, std=(1,) * 3, input_size=(3, 8, 8))
        ways = {"loss": "ce", "epochs": 1, "max_norm": 1.0, "optimizer": optimizer, "lr": 1e-2}
        return lipcert.finetune(model.double(), loader[:2], channels_last=channels_last, **ways)

    plain, last = trained(False), trained(True)
    assert last.net[0].weight.is_contiguous(memory_format=torch.channels_last)
    for left, right in zip(plain.parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-2)  # power iteration starts elsewhere


def test_accumulated_batches_are_one_batch(loader) -> None:
    """One update from two batches of 32 is that from their union, the bound's gradient included."""
    models = []
    for batches, accumulate in ((loader[:2], 2), ([tuple(map(torch.cat, zip(*loader[:2], strict=True)))], 1)):
        model = vit().double()
        lipcert.finetune(model, batches, loss="emma", epochs=1, accumulate=accumulate)
        models.append(model)
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(left, right)


def test_the_certified_bound_stands_beside_the_estimate(loader) -> None:
    seen: list[Epoch] = []
    model = lipcert.finetune(vit(), loader[:4], loss="emma", epochs=1, progress=seen.append)
    assert seen[0].bound == pytest.approx(MarginBounds(analyze(model)).features)
    assert 0 < seen[0].estimate < seen[0].bound * 1.1
    lipcert.finetune(vit(), loader[:1], loss="ce", epochs=1, progress=seen.append)
    assert seen[1].bound is seen[1].estimate is None


# The loop


@pytest.fixture(scope="module")
def plain(loader) -> lipcert.Model:
    """Trained for accuracy alone."""
    return lipcert.finetune(vit(), loader * 2, loss="ce", epochs=2, lr=5e-3)


def gloro_figures(model: lipcert.Model, digits) -> tuple[float, float]:
    """The certified accuracy at 0.02, and the Lipschitz bound."""
    certifier = Certifier(model, 0.02, "gloro")
    return certifier.run(digits[0][:64], digits[1][:64]).certified_accuracy, certifier.bound.value


@pytest.fixture(scope="module")
def plain_figures(digits, plain) -> tuple[float, float]:
    return gloro_figures(plain, digits)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("loss", GLOBAL)
def test_losses_with_the_bound_widen_gloro_radii(loss: str, digits, loader, plain_figures) -> None:
    model = lipcert.finetune(vit(), loader, eps=0.2, loss=loss, epochs=2, lr=1e-2)
    accuracy, bound = gloro_figures(model, digits)
    assert accuracy > plain_figures[0] + 0.1
    assert bound < plain_figures[1] / 2


@pytest.mark.parametrize("asked", [{}, {"amp": "bfloat16"}], ids=str)
def test_the_default_loss_widens_first_order_radii(asked, digits, loader, plain) -> None:
    seen: list[Epoch] = []
    model = vit()
    lipcert.finetune(model, loader, eps=0.5, epochs=4, lr=5e-3, temperature=0.25, progress=seen.append, **asked)
    radii = [first_order_radii(m, *digits).median().item() for m in (model, plain)]
    assert radii[0] > 1.3 * radii[1]
    assert [epoch.number for epoch in seen] == [1, 2, 3, 4]
    assert seen[-1].accuracy > 0.5 > seen[0].accuracy
    assert seen[-1].eps == 0.5 > seen[0].eps
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_norms_and_scales_are_held(digits, loader) -> None:
    model = vit(attention="keep")
    assert model.net.blocks[0].norm1.weight.abs().max() > 0.7
    lipcert.finetune(model, loader, eps=0.1, epochs=2, lr=1e-2, max_norm=0.7)
    for matrix in matrices(model):
        assert torch.linalg.matrix_norm(matrix.value(), 2).max() <= 0.7 * 1.05
    for _, projection in projections(model):
        assert projection.weight.abs().max() <= 0.7


def test_norms_are_held_by_patterns(loader) -> None:
    """The last pattern that matches counts; queries, keys and values have names of their own."""
    model = vit(attention="keep")
    norms = {"*": 0.7, "blocks.0.*": 0.4, "*.q": 0.2, "*.k": 0.3, "*.norm1": 0.5, "head": 0.1}
    lipcert.finetune(model, loader, eps=0.1, epochs=2, lr=1e-2, max_norm=norms)
    found = {matrix.path: torch.linalg.matrix_norm(matrix.value(), 2).max().item() for matrix in matrices(model)}
    held = {path: round(norm, 1) for path, norm in found.items() if path.startswith("blocks")}
    names = {f"blocks.0.{name}" for name in ("attn.q", "attn.k", "attn.v", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert held == {name: 0.4 for name in names} | {"blocks.0.attn.q": 0.2, "blocks.0.attn.k": 0.3}
    assert found["head"] == pytest.approx(0.1, rel=0.05)
    assert 0.4 < found["patch_embed.proj"] < 0.7 * 1.05
    scales = {path: projection.weight.abs().max().item() for path, projection in projections(model)}
    assert scales["blocks.0.norm1"] == pytest.approx(0.5)
    assert scales["blocks.0.norm2"] == pytest.approx(0.4)
    free = NormLimits(vit(attention="keep"), {"*.fc1": 0.1})
    assert [matrix.path for matrix in free.matrices] == ["blocks.0.mlp.fc1"]


def test_muon_moves_matrices_alike_and_the_rest_as_adamw() -> None:
    """Queries, keys and values each on their own, though the gradient of one is far larger than the others'."""
    network = nn.Module()
    network.qkv = nn.Linear(6, 18)
    network.conv = nn.Conv2d(3, 4, 2)
    before, twin = copy.deepcopy(network), copy.deepcopy(network)
    gradients = [torch.randn(p.shape) for p in network.parameters()]
    gradients[0][6:] *= 1e-4
    gradients[2] = gradients[2].to(memory_format=torch.channels_last)  # as convolutions may leave them
    optimizers = [
        Muon(list(network.parameters()), list(matrices(network)), lr=0.01, weight_decay=0.0),
        torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.0),
    ]
    for model, optimizer in zip((network, twin), optimizers, strict=True):
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(network.qkv.bias, twin.qkv.bias)
    assert torch.equal(network.conv.bias, twin.conv.bias)
    for matrix, old in zip(matrices(network), matrices(before), strict=True):
        moved = torch.linalg.svdvals((matrix.value() - old.value())[0].detach())
        size = 0.01 * 0.2 * max(matrix.value().shape[1:]) ** 0.5
        assert 0.5 * size < moved[-1] <= moved[0] < 1.25 * size


def test_muon_learns(digits, loader) -> None:
    seen: list[Epoch] = []
    settings: dict = {"loss": "ce", "epochs": 3, "temperature": 0.25, "max_norm": 1.0, "progress": seen.append}
    lipcert.finetune(vit(attention="keep"), loader, lr=0.02, optimizer="muon", **settings)
    assert seen[-1].accuracy > 0.6


def test_the_temperature_goes_from_one_to_the_other(loader, monkeypatch) -> None:
    used: list[float] = []

    def loss(model, images, labels, eps, temperature):
        used.append(temperature)
        return adversarial_loss(model, images, labels, eps, temperature)

    monkeypatch.setattr("lipcert.training._losses.adversarial_loss", loss)
    lipcert.finetune(vit(), loader[:5], epochs=2, temperature=(0.2, 0.02))
    expected = [0.2 * 0.1 ** min(1.0, step / 10 / 0.8) for step in range(10)]
    assert used == pytest.approx(expected)


def test_frozen_parameters_stay(loader) -> None:
    model = vit()
    model.net.head.weight.requires_grad_(False)
    before = copy.deepcopy(model)
    lipcert.finetune(model, loader[:2], epochs=1, loss="ce")
    assert torch.equal(model.net.head.weight, before.net.head.weight)
    assert not torch.equal(model.net.patch_embed.proj.weight, before.net.patch_embed.proj.weight)


def test_the_average_is_what_the_model_gets(loader) -> None:
    """With a decay near 1 the average warms up with timm's schedule and stays nearer to the start than the weights."""
    start, averaged, plain = vit(), vit(), vit()
    lipcert.finetune(averaged, loader, epochs=1, loss="ce", ema=0.9)
    lipcert.finetune(plain, loader, epochs=1, loss="ce")
    moved = [(m.net.head.weight - start.net.head.weight).norm().item() for m in (averaged, plain)]
    assert 0 < moved[0] < moved[1]


class Shuffled:
    """Batches in an order drawn from torch's generator."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter([self.loader[i] for i in torch.randperm(len(self.loader))])


@pytest.mark.parametrize(("loss", "optimizer"), [("adversarial", "adamw"), ("emma", "nadam"), ("ce", "muon")])
def test_an_interrupted_run_ends_as_if_it_had_not_been(loss: str, optimizer: str, loader, tmp_path) -> None:
    whole, stopped = vit(), vit()
    arguments = {"eps": 0.1, "loss": loss, "epochs": 2, "lr": 3e-3, "max_norm": 1.0, "ema": 0.9, "optimizer": optimizer}
    torch.manual_seed(5)
    lipcert.finetune(whole, Shuffled(loader[:3]), **arguments)

    def stop(epoch: Epoch) -> None:
        raise KeyboardInterrupt

    torch.manual_seed(5)
    with pytest.raises(KeyboardInterrupt):
        lipcert.finetune(stopped, Shuffled(loader[:3]), **arguments, checkpoint=tmp_path / "c", progress=stop)
    assert len(stopped.recipe) == 1
    torch.manual_seed(99)
    again, seen = vit(), []
    lipcert.finetune(again, Shuffled(loader[:3]), **arguments, checkpoint=tmp_path / "c", progress=seen.append)
    assert [epoch.number for epoch in seen] == [1, 2]  # the interruption came while the first was reported
    assert same(again, whole)
    assert again.recipe[-1] == {"step": "finetune", **FinetuneSettings(**arguments).described(), "seed": 5}
    assert again.recipe == whole.recipe


def test_a_run_goes_on_in_the_middle_of_an_epoch(loader, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("lipcert.training._finetune._PAUSE", 0.0)
    arguments = {"eps": 0.1, "loss": "noise", "sigma": 0.2, "epochs": 2, "lr": 3e-3, "temperature": "auto"}

    class Stopped(Shuffled):
        left = 5

        def __iter__(self):
            for batch in super().__iter__():
                if not self.left:
                    raise KeyboardInterrupt
                self.left -= 1
                yield batch

    whole, stopped, again = vit(), vit(), vit()
    torch.manual_seed(5)
    lipcert.finetune(whole, Shuffled(loader[:3]), **arguments)
    torch.manual_seed(5)
    with pytest.raises(KeyboardInterrupt):
        lipcert.finetune(stopped, Stopped(loader[:3]), **arguments, checkpoint=tmp_path / "c")
    state = torch.load(tmp_path / "c", weights_only=True)
    assert (state["finished"], state["sums"][3]) == (1, 2)
    torch.manual_seed(99)
    lipcert.finetune(again, Shuffled(loader[:3]), **arguments, checkpoint=tmp_path / "c")
    assert same(whole, again)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_defaults(recipe: str) -> None:
    found = FinetuneSettings(**recipe_settings(recipe, {"lr": 0.5, "eps": "0.5"}))
    assert found.lr == found.eps == 0.5
    assert found.loss == RECIPES[recipe].settings["loss"]
    assert found.sigma == (0.5 if recipe == "noise" else None)
    with pytest.raises(InputError, match=f"{recipe} is for the loss {found.loss}"):
        recipe_settings(recipe, {"loss": "ce"})


def test_recipes_by_the_network(loader) -> None:
    plain = lipcert.load("vit_tiny_patch16_224", pretrained=False, img_size=32, embed_dim=48, depth=4)
    assert recipe_for(plain)[0] == "noise"
    assert recipe_for(vit())[0] == "vit"
    residual = lipcert.load("liresnet_l6w64", pretrained=False, width=8, depth=1)
    assert recipe_for(residual)[0] == "liresnet"
    assert recipe_for(lipcert.load("lip_convnet_4c3f", pretrained=False))[0] == "cnn"
    chosen = settings_for(residual, "vit", {})
    assert chosen.max_norm == {"*": 1.0}  # the other patterns match none of its layers
    with pytest.raises(InputError, match="there is no recipe 'vitt'; did you mean vit?"):
        lipcert.finetune(vit(), loader, recipe="vitt")


def test_the_temperature_auto_is_relative_to_margins_within_the_norms(loader) -> None:
    model = vit()
    settings = FinetuneSettings(loss="ce", temperature="auto", max_norm=0.5)
    run = _finetune._Run(model, loader, Processes(0, 1), settings)
    images, labels = loader[0]
    run.done = 0.0
    run._gradient(iter([(images, labels)]), 0.1)
    best = model(images).topk(2, 1).values
    median = (best[:, 0] - best[:, 1]).median().item()
    assert run.temperature == pytest.approx(2 * median)
    run.done = 0.8
    assert run.temperature == pytest.approx(0.2 * median)


def test_a_head_alone_is_fitted_to_features_of_noisy_images(digits, loader) -> None:
    model = vit()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []
    lipcert.finetune(model, loader, loss="noise", sigma=0.3, only="head", epochs=2, progress=seen.append)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"net.head.weight", "net.head.bias"}
    assert [(one.fitted, one.number, one.epochs) for one in seen] == [(True, 2, 2)]
    assert model.recipe[-1]["fitted"] == "head"

    # The features of the noisy images are on the whole better separated than by the head of random weights before.
    images, labels = digits
    noise = 0.3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = (model(images + noise).argmax(1) == labels).double().mean().item()
    assert right > 0.5
    assert seen[0].accuracy > right - 0.1  # on the images of the fit


def test_a_fit_of_the_head_announces_no_epochs(folder, monkeypatch) -> None:
    said, shown = [], _finetuning.progress
    monkeypatch.setattr(_finetuning, "progress", lambda what, total=None: said.append(what) or shown(what, total))
    words = ("--data", "images", "--recipe", "noise", "--only", "head", "--sigma", 0.3, "--epochs", 3)
    told = run("small.lipcert.safetensors", *words).stderr
    assert "epochs" not in "".join(said)
    assert "recipe: noise (asked for); loss=noise\n" in told
    assert "head fitted to each image and 3 noisy draws of it: loss" in told
    assert "epoch 1" not in told


def test_only_takes_modules_and_names_the_nearest() -> None:
    model = vit()
    head = {id(p) for p in model.net.head.parameters()}
    for pattern in ("head", "head.*", "net.head"):
        if pattern == "net.head":
            with pytest.raises(InputError, match=r"no parameter or module matches it; there are head; head is"):
                _finetune._others(model, pattern)
        else:
            assert {id(p) for p in model.parameters()} - {id(p) for p in _finetune._others(model, pattern)} == head


def test_validation_ranks_by_accuracy_while_nothing_is_certified(tmp_path) -> None:
    """Of two epochs without certified images, the more accurate one counts."""
    first, second = (lipcert.load("liresnet_l6w64", pretrained=False, num_classes=10, width=8) for _ in range(2))
    images = torch.rand(16, *first.input_size)
    with torch.no_grad():
        labels = second(images).argmax(1)
        assert not torch.equal(first(images).argmax(1), labels)
    batch = Batch(tuple(range(16)), images, labels)
    validation = Validation(first, batch, FinetuneSettings(loss="emma", eps=5.0), tmp_path / "best")
    assert validation(1, True)["certified"] == 0
    first.load_state_dict(second.state_dict())
    assert validation(2, True) == {"clean": 1.0, "certified": 0.0}
    assert validation.epoch == 2
    assert Validation(first, batch, FinetuneSettings(loss="emma", eps=5.0), tmp_path / "best").best == [0.0, 1.0]


def test_a_log_replaces_a_file_of_another_kind(tmp_path) -> None:
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    Log(tmp_path / "log.csv")(Epoch(1, 2, 1.0, 0.5, 0.1, 1.0), {"clean": 0.1})
    (row,) = csv.DictReader((tmp_path / "log.csv").open())
    assert (row["number"], row["clean"]) == ("1", "0.1")


def test_a_log_keeps_its_rows_when_a_run_resumes(tmp_path) -> None:
    epochs = [Epoch(number, 3, 1.0 / number, 0.5, 0.1, 1.0) for number in (1, 2, 3)]
    log = Log(tmp_path / "log.csv")
    for epoch in epochs[:2]:
        log(epoch, {"clean": 0.1})
    log = Log(tmp_path / "log.csv")
    for epoch in epochs[1:]:
        log(epoch, {"clean": 0.2})
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [row["number"] for row in rows] == ["1", "2", "3"]
    assert [row["clean"] for row in rows] == ["0.1", "0.2", "0.2"]


@pytest.mark.parametrize("length", [True, False])
def test_a_single_epoch_goes_through_the_whole_schedule(length: bool, loader) -> None:
    """Also where the loader does not say how many batches it has: then in one step, at the middle."""

    class Stream:
        def __iter__(self):
            return iter(loader)

        def __len__(self):
            raise TypeError("a stream")

    epochs: list[Epoch] = []
    model, before = vit(), vit()
    lipcert.finetune(
        model, loader if length else Stream(), 0.3, epochs=1, lr=1e-2, loss="trades", progress=epochs.append
    )
    assert epochs[0].eps == 0.3
    moved = (model.net.head.weight - before.net.head.weight).abs().max().item()
    assert moved > 1e-2  # of eight steps, the first ones alone are far smaller


def test_a_checkpoint_of_another_run_is_refused(loader, tmp_path) -> None:
    lipcert.finetune(vit(), loader[:1], epochs=1, loss="ce", checkpoint=tmp_path / "c")
    with pytest.raises(InputError, match="another lr"):
        lipcert.finetune(vit(), loader[:1], epochs=1, loss="ce", lr=1e-2, checkpoint=tmp_path / "c")
    with pytest.raises(InputError, match="another model"):
        lipcert.finetune(vit(norm="project"), loader[:1], epochs=1, loss="ce", checkpoint=tmp_path / "c")
    (tmp_path / "c").write_bytes(b"something else")
    with pytest.raises(InputError, match="no checkpoint"):
        lipcert.finetune(vit(), loader[:1], epochs=1, loss="ce", checkpoint=tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == b"something else"
    with pytest.raises(InputError, match="cannot write"):
        lipcert.finetune(vit(), loader[:1], epochs=1, loss="ce", checkpoint=tmp_path / "none" / "c")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_checkpoint_on_a_full_disk(monkeypatch) -> None:
    monkeypatch.setattr(_checkpoint, "replacing", contextlib.nullcontext)
    with pytest.raises(InputError, match="cannot write the checkpoint /dev/full: .*No space left"):
        _checkpoint.write(Path("/dev/full"), {}, {"weights": torch.zeros(2**16)})


def test_a_checkpoint_remembers_where_the_images_are_from(loader, tmp_path) -> None:
    ways = {"epochs": 1, "loss": "ce", "checkpoint": tmp_path / "c"}
    lipcert.finetune(vit(), loader[:1], **ways, origin={"--data": "a", "--limit": None})
    with pytest.raises(InputError, match="another --limit;"):
        lipcert.finetune(vit(), loader[:1], **ways, origin={"--data": "a", "--limit": 5})
    lipcert.finetune(vit(), loader[:1], **ways, origin={"--data": "a", "--limit": None})


def disagreement(student: lipcert.Model, teacher: lipcert.Model, images: Tensor) -> float:
    """The divergence from the predictions of a teacher whose images are twice as large."""
    wanted = teacher(F.interpolate(images, scale_factor=2, mode="bicubic", antialias=True).clamp(0, 1))
    return teacher_loss(student(images), wanted).item()


@pytest.mark.parametrize("loss", ["ce", "adversarial", "noise", "emma"])
def test_a_teacher_of_another_size_is_learned_from(loss: str, loader) -> None:
    """Its predictions disagree with the labels, and the student's come close to it only if it is listened to."""
    torch.manual_seed(1)
    given = {"mean": (0.3,) * 3, "std": (0.4,) * 3, "input_size": (3, 16, 16)}
    teacher = lipcert.load("vit_tiny_patch16_224", pretrained=False, **given, **(ARGUMENTS | {"img_size": 16}))
    with torch.no_grad():
        teacher.net.head.bias += torch.linspace(0, 4, 10)
    before = copy.deepcopy(teacher)
    asked = {"loss": loss, "epochs": 3, "lr": 1e-2, "sigma": 0.1 if loss == "noise" else None}
    students = [
        lipcert.finetune(vit(), loader[:4], teacher=teacher, teacher_weight=weight, **asked) for weight in (0.0, 10.0)
    ]
    ignoring, listening = (disagreement(student, teacher, loader[5][0]) for student in students)
    assert listening < 0.5 * ignoring
    assert same(teacher, before)
    assert students[0].recipe[-1]["teacher"] == weights_hash(teacher)
    if loss != "noise":  # what the teacher draws nothing from is what training without it does
        assert same(students[0], lipcert.finetune(vit(), loader[:4], **asked))


def test_a_checkpoint_belongs_to_its_teacher(loader, tmp_path) -> None:
    ways = {"epochs": 1, "loss": "ce", "checkpoint": tmp_path / "c"}
    teacher = vit(norm="project")
    lipcert.finetune(vit(), loader[:1], teacher=teacher, **ways)
    for other in (None, vit("keep", "project")):
        with pytest.raises(InputError, match="another teacher;"):
            lipcert.finetune(vit(), loader[:1], teacher=other, **ways)
    lipcert.finetune(vit(), loader[:1], teacher=teacher, **ways)


def test_teachers_that_cannot_teach(loader) -> None:
    model = vit()
    of_one = {"in_chans": 1, "mean": (0.3,), "std": (0.4,), "input_size": (1, 8, 8)}
    grey = lipcert.load("vit_tiny_patch16_224", pretrained=False, **of_one, **ARGUMENTS)
    for teacher, message in (
        (model, "the model itself"),
        (vit(num_classes=3), "the teacher has 3 classes and the model 10"),
        (grey, "images of 1 channels and the model of 3"),
        ("vit", "model is a str"),
    ):
        with pytest.raises(InputError, match=message):
            lipcert.finetune(model, loader[:1], loss="ce", teacher=teacher)
    with pytest.raises(InputError, match="teacher_weight must be a number from 0"):
        lipcert.finetune(model, loader[:1], loss="ce", teacher=vit(norm="project"), teacher_weight=-1)


@pytest.mark.parametrize("loss", ["ce", "trades", "emma"])
def test_the_forward_pass_runs_in_bfloat16_and_nothing_else_does(loss: str, loader) -> None:
    model, exact = vit(), vit()
    seen = []
    model.net.blocks[0].mlp.fc1.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    lipcert.finetune(model, loader[:2], loss=loss, epochs=1, amp="bfloat16")
    lipcert.finetune(exact, loader[:2], loss=loss, epochs=1)
    assert torch.bfloat16 in seen
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not same(model, exact)
    for left, right in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=3e-3, rtol=0)
    assert model.recipe[-1]["amp"] == "bfloat16"
    assert model(loader[0][0]).dtype == torch.float32


def test_amp_is_refused_where_it_cannot_be(loader) -> None:
    with pytest.raises(InputError, match="there is no amp"):
        lipcert.finetune(vit(), loader, loss="ce", amp="float16")


@pytest.mark.parametrize("loss", ["ce", "adversarial"])
def test_a_loss_that_is_no_number_stops_and_keeps_the_last_epoch(loss: str, loader, tmp_path) -> None:
    """The labels of the second epoch come with a network that was broken in between."""
    model = vit()
    kept: list[lipcert.Model] = []

    def spoil(epoch: Epoch) -> None:
        kept.append(copy.deepcopy(model))
        with torch.no_grad():
            model.net.head.weight.fill_(math.nan)

    with pytest.raises(InputError, match="the loss is nan in epoch 2.*smaller learning rate"):
        lipcert.finetune(model, loader[:2], epochs=3, loss=loss, checkpoint=tmp_path / "c", progress=spoil)
    assert same(model, kept[0])
    assert torch.load(tmp_path / "c", weights_only=True)["finished"] == 1


def test_weights_that_are_lost_in_the_last_step_are_noticed(loader) -> None:
    model = vit()
    before = copy.deepcopy(model)
    model.net.head.weight.register_hook(lambda slope: slope * math.nan)
    with pytest.raises(InputError, match="a weight is not finite in epoch 1"):
        lipcert.finetune(model, loader[:1], epochs=1, loss="ce")
    assert same(model, before)


IMAGES, LABELS = torch.rand(2, 3, 8, 8), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("arguments", "batch", "message"),
    [
        ({"loss": "hinge"}, (IMAGES, LABELS), "no loss 'hinge'"),
        ({"eps": 0.0}, (IMAGES, LABELS), "eps must be"),
        ({"eps": math.nan}, (IMAGES, LABELS), "eps must be"),
        ({"lr": -1.0}, (IMAGES, LABELS), "lr must be"),
        ({"lr": 1e39}, (IMAGES, LABELS), "lr must be"),
        ({"temperature": 0.0}, (IMAGES, LABELS), "temperature must be"),
        ({"temperature": (0.2, 0.0)}, (IMAGES, LABELS), "temperature must be"),
        ({"temperature": (0.2, 0.1, 0.05)}, (IMAGES, LABELS), "temperature must be"),
        ({"max_norm": 0.0}, (IMAGES, LABELS), "max_norm must be"),
        ({"max_norm": {"*": 1.0, "*.fc1": -1.0}}, (IMAGES, LABELS), "max_norm must be"),
        (
            {"max_norm": {"*.fc3": 1.0}},
            (IMAGES, LABELS),
            r"'\*\.fc3', and no layer .* matches it; there are patch_embed",
        ),
        (
            {"optimizer": "lion"},
            (IMAGES, LABELS),
            "no optimizer 'lion'; the optimizer is one of adamw, adam, muon, nadam",
        ),
        ({"epochs": 0}, (IMAGES, LABELS), "epochs must be"),
        ({"accumulate": 0}, (IMAGES, LABELS), "accumulate must be"),
        (
            {"schedule": "linear"},
            (IMAGES, LABELS),
            "no schedule 'linear'; the schedule is one of cosine, multistep",
        ),
        ({"ramp": (0.1, 2)}, (IMAGES, LABELS), "ramp is three numbers"),
        ({"ramp": (0.1, 2, 1.5)}, (IMAGES, LABELS), "ramp is three numbers"),
        ({"weight": -1.0}, (IMAGES, LABELS), "weight must be"),
        ({"warm": 3}, (IMAGES, LABELS), "unexpected keyword argument 'warm'; "),
        ({"ema": 1.0}, (IMAGES, LABELS), "ema must be a fraction above 0"),
        ({}, (IMAGES * 2 + 1, LABELS), r"images must lie in \[0, 1\]"),
        ({}, (IMAGES * math.nan, LABELS), "no NaN"),
        ({}, (IMAGES[:, :1], LABELS), "shape"),
        ({}, (IMAGES, LABELS + 9), "labels must be from 0 to 9"),
        ({}, (IMAGES, LABELS[:1]), "labels must be whole"),
        ({}, (IMAGES, LABELS.float()), "labels must be whole"),
        ({}, (IMAGES, None), "pairs of tensors"),
        ({}, IMAGES, "pairs of tensors"),
    ],
)
def test_bad_input(arguments, batch, message: str) -> None:
    model = vit()
    before = copy.deepcopy(model)
    with pytest.raises(InputError, match=message):
        lipcert.finetune(model, [batch], **{"epochs": 1, **arguments})
    assert same(model, before)


def test_loaders_that_run_dry_and_models_that_cannot_be_trained(loader) -> None:
    with pytest.raises(InputError, match="no images in epoch 1"):
        lipcert.finetune(vit(), [], epochs=1)
    with pytest.raises(InputError, match="no images in epoch 2; .*several times"):
        lipcert.finetune(vit(), iter(loader[:1]), epochs=2, loss="ce")
    with pytest.raises(InputError, match=r"bfloat16; train them in float32"):
        lipcert.finetune(vit().bfloat16(), loader[:1])
    with pytest.raises(InputError, match="frozen"):
        lipcert.finetune(vit().requires_grad_(False), loader[:1])
    broken = vit()
    with torch.no_grad():
        broken.net.head.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="head.weight holds NaN"):
        lipcert.finetune(broken, loader[:1])
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 10), Function(torch.atan))
    with pytest.raises(UnsupportedOperation):
        lipcert.finetune(lipcert.load(net, mean=(0,) * 3, std=(1,) * 3, input_size=(3, 8, 8)), loader[:1], loss="emma")


def test_a_bound_that_is_too_large_for_a_loss_is_said(loader) -> None:
    model = vit(attention="keep", norm="keep", depth=4)
    with torch.no_grad():
        for matrix in matrices(model):
            matrix.value().mul_(1e4)
    with pytest.raises(InputError, match="too large to train on; limit the norms of the layers"):
        lipcert.finetune(model, loader[:1], loss="emma")


# The command


@pytest.fixture
def folder(tmp_path):
    """The working folder, with twelve images of ten classes in the folder images."""
    write_images("images", 12, 8, "0123456789")
    lipcert.save(vit(), tmp_path / "small.lipcert.safetensors")
    return tmp_path


run = functools.partial(commands.run, "finetune")
refused = functools.partial(commands.refused, "finetune", besides=())


SHORT = ("--data", "images", "--eps", "36/255", "--epochs", 2, "--batch-size", 5, "--device", "cpu")


def test_the_command_writes_an_artifact(folder) -> None:
    before = (folder / "small.lipcert.safetensors").read_bytes()
    settings = {"max_norm": ["*.fc1=0.5", "1"], "temperature": "0.25,0.1"}
    result = run("small.lipcert.safetensors", *SHORT, "--optimizer", "muon", **settings)
    assert "epoch 1 of 2: loss" in result.stderr
    facts = dict(line.split("\t") for line in result.stdout.splitlines())
    assert facts["images"] == "12 of images"
    assert {"clean accuracy, before", "clean accuracy, after"} <= set(facts)
    assert facts["next"].startswith("lipcert certify small.finetuned.lipcert.safetensors --eps 36/255 --data TEST")
    trained = load_artifact("small.finetuned.lipcert.safetensors")
    assert trained.recipe[-1]["step"] == "finetune"
    assert trained.recipe[-1]["eps"] >= 36 / 255
    assert trained.recipe[-1]["temperature"] == [0.25, 0.1]
    assert trained.recipe[-1]["max_norm"] == {"*": 1.0, "*.fc1": 0.5}
    assert trained.recipe[-1]["optimizer"] == "muon"
    assert read_metadata("small.finetuned.lipcert.safetensors")["facts"]["epochs"] == 2
    images = open_images("images", trained)
    right = sum(int((trained(b.images).argmax(1) == b.labels).sum()) for b in images.batches(12))
    assert facts["clean accuracy, after"] == f"{right} of 12 ({100 * right / 12:.1f} %), on training images"
    assert not same(trained, load_artifact("small.lipcert.safetensors"))
    assert (folder / "small.lipcert.safetensors").read_bytes() == before
    assert not list(folder.glob("*.checkpoint"))


def test_one_process_trains_to_a_file(folder) -> None:
    arguments = ("small.lipcert.safetensors", *SHORT, "--loss", "ce", "--out", "s.safetensors")
    with contextlib.ExitStack() as stack:
        reserve(folder / "s.safetensors.checkpoint", stack)
        assert "another process is writing" in refused(*arguments)
    run(*arguments)
    assert not list(folder.glob(".*.lock"))


def test_accuracies_before_and_after_are_of_the_same_images_of_all_classes(folder, monkeypatch) -> None:
    """Also where the time ends after the first batch of images, which folders hold class by class."""
    seen: list[set[int]] = []
    batches = Images.batches

    def watched(images: Images, size: int) -> Iterator[Batch]:
        seen.append(set())
        for batch in batches(images, size):
            seen[-1].update(zip(batch.indices, batch.labels.tolist(), strict=True))
            yield batch

    monkeypatch.setattr(Images, "batches", watched)
    monkeypatch.setattr(_finetuning, "_SECONDS", 0.0)
    monkeypatch.setattr(_finetuning, "_EVALUATED", 6)
    clock = iter(range(100, 1000))
    monkeypatch.setattr(_finetuning, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    facts = commands.facts(run("small.lipcert.safetensors", *SHORT).stdout)
    assert seen[0] == seen[-1]
    assert len({label for _, label in seen[0]}) > 4
    assert all(" of 6 (" in facts[f"clean accuracy, {when}"] for when in ("before", "after"))


@pytest.mark.parametrize("other", [("--limit", 10), ("--teacher", "small.lipcert.safetensors")])
def test_a_training_replaces_only_its_own_result(other, folder) -> None:
    arguments = ("small.lipcert.safetensors", *SHORT, "--loss", "ce")
    for _ in range(2):
        run(*arguments)
    assert [path.name for path in folder.glob("*finetuned*")] == ["small.finetuned.lipcert.safetensors"]
    before = Path("small.finetuned.lipcert.safetensors").read_bytes()
    run(*arguments, *other)
    assert Path("small.finetuned.lipcert.safetensors").read_bytes() == before
    assert Path("small.finetuned.2.lipcert.safetensors").exists()


def test_the_command_takes_a_teacher_and_weights_for_other_classes(folder) -> None:
    fresh = vit(norm="keep", attention="keep", num_classes=7)
    torch.save(fresh.net.state_dict(), "seven.pth")
    arguments = " ".join(f"{key}={value}" for key, value in ARGUMENTS.items())
    named = ("vit_tiny_patch16_224", "--checkpoint", "seven.pth", "--model-args", arguments, "--loss", "ce")
    taught = ("--lr", "1e-12", "--teacher", "small.lipcert.safetensors", "--out", "t.safetensors")
    with pytest.warns(UserWarning, match="head.weight is for 7 classes, and the model has 10: it starts at zero"):
        run(*named, *SHORT, *taught)
    trained = load_artifact("t.safetensors")
    assert trained.recipe[-1]["teacher"] == weights_hash(load_artifact("small.lipcert.safetensors"))
    torch.testing.assert_close(trained.net.blocks[0].mlp.fc1.weight, fresh.net.blocks[0].mlp.fc1.weight)
    assert trained.net.head.weight.shape == (10, 16)
    seven = arguments.replace("num_classes=10", "num_classes=7")
    wrong = (*named[:4], seven, *named[5:], *SHORT, "--teacher", "small.lipcert.safetensors", "--out", "w.safetensors")
    assert "the teacher has 10 classes and the model 7" in run(*wrong, code=2).stderr
    assert "there is no file none.safetensors" in run(*named, *SHORT, "--teacher", "none.safetensors", code=2).stderr
    unfit = run(*named, *SHORT, "--teacher", "seven.pth", code=2).stderr
    assert unfit.endswith("; --teacher takes a timm name, or a file that lipcert convert wrote\n")
    assert "--model-args" not in unfit


def test_a_stopped_command_goes_on(folder, monkeypatch) -> None:
    module = importlib.import_module("lipcert.cli._finetuning")
    say = module._say_epoch

    def stop(epoch: Epoch, figures: dict[str, float]) -> None:
        say(epoch, figures)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_say_epoch", stop)
    result = run("small.lipcert.safetensors", *SHORT, code=130)
    checkpoint = "small.finetuned.lipcert.safetensors.checkpoint"
    assert result.stderr.splitlines()[-1] == f"lipcert: interrupted; rerun to continue from {checkpoint}"
    assert (folder / checkpoint).exists()
    assert "another batch_size;" in refused("small.lipcert.safetensors", *SHORT[:6], "--batch-size", 3)
    first = next(folder.glob("images/*/*"))  # without it, other images would be held out
    first.rename(folder / "kept")
    assert "another image_list;" in refused("small.lipcert.safetensors", *SHORT)
    (folder / "kept").rename(first)
    assert not (folder / "small.finetuned.lipcert.safetensors").exists()
    monkeypatch.setattr(module, "_say_epoch", say)
    result = run("small.lipcert.safetensors", *SHORT)
    assert "epoch 2 of 2" in result.stderr
    assert result.stderr.count("epoch 1 of 2: ") == 1  # it may not have been reported before
    assert (folder / "small.finetuned.lipcert.safetensors").exists()


def test_what_the_command_refuses(folder) -> None:
    small = "small.lipcert.safetensors"
    (folder / "notes.safetensors").write_text("mine")
    (folder / "flat").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "flat" / "a.png")
    assert "file of the model itself" in refused(small, *SHORT, "--out", small)
    assert "not a lipcert artifact" in refused(small, *SHORT, "--out", "notes.safetensors")
    assert "the loss is one of adversarial" in refused(small, *SHORT, "--loss", "hinge")
    assert "flat has no labels" in refused(small, "--data", "flat", "--eps", "0.1")
    other = refused("lip_convnet_4c3f", "--no-pretrained", "--model-args", "num_classes=3", *SHORT)
    assert "FILE numbers them, and --model-args num_classes=10 makes a head" in other
    lipcert.save(vit(num_classes=3), "three.lipcert.safetensors")
    again = "and converting vit_tiny_patch16_224 again with --model-args num_classes=10 makes a head for them"
    assert again in refused("three.lipcert.safetensors", *SHORT)
    (folder / "three.lipcert.safetensors").unlink()
    assert "batch_size must be at least 1" in refused(small, *SHORT[:6], "--batch-size", 0)
    assert "below 1e+30, or the first and the last" in refused(small, *SHORT, temperature="hot")
    assert "'*.fc1=1.2', got '*.fc1'" in refused(small, *SHORT, max_norm=["*.fc1"])
    assert "no layer of the network matches" in refused(small, *SHORT, max_norm=["*.fc9=1"])
    assert "no device 'tpu9'" in refused(small, *SHORT[:8], "--device", "tpu9")
    assert "epochs must be at least 1" in refused(small, *SHORT[:4], "--epochs", 0)
    assert (
        "use a smaller learning rate"
        in run(small, *SHORT[:4], "--batch-size", 5, "--epochs", 1, "--lr", "1e29", code=2).stderr
    )
    assert (folder / "notes.safetensors").read_text() == "mine"
    assert sorted(p.name for p in folder.iterdir()) == ["flat", "images", "notes.safetensors", small]


@pytest.fixture
def pictures(folder) -> tuple[lipcert.Model, Images]:
    """The model of the folder, and its images."""
    model = load_artifact("small.lipcert.safetensors")
    return model, open_images("images", model)


def test_a_shift_moves_and_flips_and_brings_in_black(pictures) -> None:
    model, images = pictures
    torch.manual_seed(0)
    plain = next(iter(Batches(images, model, 12, augment=False)))
    torch.manual_seed(0)
    moved = next(iter(Batches(images, model, 12, Augmentation("shift"))))
    assert torch.equal(plain[1], moved[1])
    for before, after in zip(plain[0], moved[0], strict=True):
        padded = F.pad(before, (1,) * 4)  # an eighth of the side of 8
        options = [padded[:, down : down + 8, right : right + 8] for down in range(3) for right in range(3)]
        padded = padded.flip(2)
        options += [padded[:, down : down + 8, right : right + 8] for down in range(3) for right in range(3)]
        assert any(torch.equal(after, option) for option in options)
    assert not torch.equal(plain[0], moved[0])


def test_flips_alone_move_nothing(pictures) -> None:
    model, images = pictures
    torch.manual_seed(0)
    plain = next(iter(Batches(images, model, 12, augment=False)))[0]
    torch.manual_seed(0)
    flipped = next(iter(Batches(images, model, 12, Augmentation("flip"))))[0]
    assert all(torch.equal(b, a) or torch.equal(b, a.flip(2)) for a, b in zip(plain, flipped, strict=True))
    assert not torch.equal(plain, flipped)


def test_a_second_data_set_is_mixed_into_every_batch(folder) -> None:
    model = load_artifact("small.lipcert.safetensors")
    for i in range(10):
        path = folder / "made" / str(i) / f"{i}.png"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), (255, 255, 255)).save(path)
    made = open_images("made", model)
    counted: list[int] = []
    own = Batches(open_images("images", model), model, 5, False, counted.append)
    loader = Mixed(own, Batches(made, model, 4, False))
    found = list(loader)
    assert len(loader) == len(found) == 3
    assert counted == [5, 5, 2]
    white = [int((images == 1).flatten(1).all(1).sum()) for images, _ in found]
    assert white == [4, 4, 2]  # ten images in batches of four; then they would come again
    assert [len(labels) for _, labels in found] == [9, 9, 4]
    run("small.lipcert.safetensors", *SHORT, "--out", "mixed.safetensors", mix="made", mix_ratio=0.4)
    assert load_artifact("mixed.safetensors").recipe[-1]["step"] == "finetune"
    assert "above 0 and below 1" in refused("small.lipcert.safetensors", *SHORT, mix="made", mix_ratio=1)


def test_cutout_and_randaugment_are_timms(pictures) -> None:
    model, images = pictures
    (pixels, _), *_ = Batches(images, model, 12, Augmentation("none", cutout=1.0))
    assert all((image == 0).flatten(1).sum(1).min() > 0 for image in pixels)
    (pixels, _), *_ = Batches(images, model, 12, Augmentation("shift", randaugment="rand-m9-n2"))
    model.check_images(pixels)
    for wrong in ({"crop": "corner"}, {"cutout": 2.0}, {"randaugment": "strong"}):
        with pytest.raises(InputError):
            Augmentation(**wrong)


def test_batches_are_shuffled_augmented_and_in_range(pictures, monkeypatch) -> None:
    model, images = pictures
    plain = {tuple(image.flatten().tolist()): label for image, label in (images[i] for i in range(12))}
    counted: list[int] = []
    loader = Batches(images, model, 5, augment=False, seen=counted.append)
    torch.manual_seed(0)
    first, second = list(loader), list(loader)
    assert counted == [5, 5, 2] * 2
    assert len(loader) == 3
    assert {
        tuple(image.flatten().tolist()): int(label) for batch in first for image, label in zip(*batch, strict=True)
    } == plain
    assert not torch.equal(first[0][1], second[0][1])
    torch.manual_seed(0)
    with monkeypatch.context() as patched:
        patched.setattr(images, "_read", None)  # each is decoded once
        for (pixels, labels), (others, theirs) in zip(first, loader, strict=True):
            assert torch.equal(pixels, others)
            assert torch.equal(labels, theirs)
    torch.manual_seed(0)
    augmented = list(Batches(images, model, 5))
    torch.manual_seed(0)
    random.seed(7)
    again = list(Batches(images, model, 5))
    for (pixels, labels), (others, _) in zip(augmented, again, strict=True):
        model.check_images(pixels)
        assert torch.equal(pixels, others)
        assert not all(tuple(image.flatten().tolist()) in plain for image in pixels)
        assert labels.dtype == torch.int64


def test_the_command_lists_all_losses_and_training_has_them() -> None:
    assert set(LOSSES) == set(_losses.BY_NAME)
    assert all(loss in run("--help").stdout for loss in set(LOSSES) - {"fixed", "lmt", "local-b", "local-g"})


def test_a_time_budget_ends_training_and_the_same_command_continues(folder) -> None:
    """Within the first epoch, then after it; the weights of each time are written."""
    out, checkpoint = (folder / f"small.finetuned.lipcert.safetensors{end}" for end in ("", ".checkpoint"))
    result = run("small.lipcert.safetensors", *SHORT, "--time-budget", "0.001s")
    assert "time: stopped after 0 whole epochs of 2; rerun the command to continue" in result.stderr
    assert lipcert.load(out).recipe[-1]["stopped_after"] == 0
    assert checkpoint.exists()
    result = run("small.lipcert.safetensors", *SHORT, "--time-budget", "1h")
    assert "time:" not in result.stderr
    assert "stopped_after" not in lipcert.load(out).recipe[-1]
    assert not checkpoint.exists()


@pytest.mark.parametrize(
    ("held", "trained", "rises", "stops"),
    [(0.1, 0.1, False, True), (0.15, 0.3, False, False), (0.24, 0.1, False, False), (0.1, 0.1, True, False)],
)
def test_only_a_network_that_shows_no_sign_of_learning_is_stopped(held, trained, rises, stops, capsys):
    """By 60 held-out images of ten classes, where it began at 10 %; 24 % of them are better than that."""
    labels = torch.tensor([0] * 9 + [*range(1, 10)] * 6)[:60]
    check = functools.partial(
        _finetuning._check_learning, rises=rises, validation=SimpleNamespace(labels=labels), images=540, before=0.1
    )
    assert not check(Epoch(1, 4, 1.0, trained, 0.1, 1.0), {"clean": held})
    assert not capsys.readouterr().err
    assert ("by two standard errors" in check(Epoch(2, 4, 1.0, trained, 0.1, 1.0), {"clean": held})) == stops
    assert ("too early to tell" in capsys.readouterr().err) == (not stops)


@pytest.mark.parametrize("certified", [[0.0, 0.0], [0.0, 0.1]])
def test_a_training_that_ends_keeps_what_was_trained(folder, monkeypatch, certified) -> None:
    """It goes on while the certified share of held-out images rises."""
    shares = iter([*certified, 0.1, 0.1])
    monkeypatch.setattr(Validation, "__call__", lambda *_: {"clean": 0.0, "certified": next(shares)})
    monkeypatch.setattr(_finetuning, "_HELD_OUT", (1, 500))
    monkeypatch.setattr(_finetuning, "_check_learning", lambda e, f, rises, *_: "" if rises or e.number < 2 else "over")
    result = run("small.lipcert.safetensors", *SHORT[:4], "--epochs", 3, "--batch-size", 5, "--validate", 2)
    written = load_artifact("small.finetuned.lipcert.safetensors").recipe[-1]
    assert written.get("stopped_after") == (None if certified[1] else 2)
    assert ("note: over" in result.stderr) == (not certified[1])
    assert "time: " not in result.stderr
    assert not [*folder.glob("*.checkpoint"), *folder.glob("*.best")]
