"""Zeros that stay, values of L2 attention, the faithful engine's tolerance and options."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import run, write_images
from moments import constrain_matrix, from_rows
from torch import nn

import lipcert
from lipcert.certvit import constrain_blockwise
from lipcert.errors import InputError
from lipcert.inputs.artifact import load_artifact, read_metadata, save
from lipcert.training import finetune

WIDTH = 24


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_eta_is_the_tolerance_of_equation_10():
    x = normal(100, WIDTH) * torch.arange(1, WIDTH + 1) ** -0.5
    weight = normal(WIDTH, WIDTH, seed=1) / WIDTH**0.5
    blocks = [x[:60], x[60:]]
    eta = 0.01 * float((x @ weight.mT).square().sum()) / len(x)
    found = constrain_blockwise(weight, list(map(from_rows, blocks)), eta=eta, iterations=50, projection_epochs=500)
    for block in blocks:
        assert float(((found.weight - weight) @ block.mT).square().sum()) <= len(block) * eta * 1.01
    assert found.error_asked == pytest.approx(0.1, rel=1e-9)


def wrap(net, size=8):
    return lipcert.load(net, mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, size, size))


def pictures(count=25, size=8, seed=1):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


# Zeros


def test_l1_has_zeros_and_the_constraint_holds():
    x, weight = normal(300, WIDTH) * torch.arange(1, WIDTH + 1) ** -1.0, normal(12, WIDTH, seed=3)
    for dtype in (torch.float32, torch.float64):
        found = constrain_matrix(weight.to(dtype), from_rows(x), 0.1, "l1")
        assert found.sparsity > 0.05
        assert found.sparsity == float((found.weight == 0).double().mean())
        away = (found.weight.double() - weight.to(dtype).double()) @ x.mT
        assert float(away.norm()) <= 0.1 * float((x @ weight.to(dtype).double().mT).norm()) * (1 + 1e-9)
        assert found.gap < 0.01


def digits_like():
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 3)))


def test_zeros_stay_through_fine_tuning():
    model = digits_like()
    lipcert.constrain(model, pictures(40), 0.2, measure="l1")
    zeros = {name: p == 0 for name, p in model.net.named_parameters() if p.dim() > 1}
    assert all(mask.any() for mask in zeros.values())
    labels = torch.arange(40) % 3
    options = {"loss": "ce", "epochs": 2, "max_norm": 1.0, "ema": 0.5}
    kept, lost = digits_like(), digits_like()
    for other in (kept, lost):
        other.load_state_dict(model.state_dict())
    finetune(kept, [(pictures(40), labels)], keep_zeros=True, **options)
    finetune(lost, [(pictures(40), labels)], **options)
    for name, mask in zeros.items():
        after = kept.net.get_parameter(name)
        assert torch.equal(after == 0, mask)
        assert not torch.equal(after, model.net.get_parameter(name))
        assert not torch.equal(lost.net.get_parameter(name) == 0, mask)


def test_only_some_parameters_are_trained(tmp_path):
    model, labels = digits_like(), torch.arange(40) % 3
    before = {name: p.detach().clone() for name, p in model.net.named_parameters()}
    run = {"loss": "ce", "epochs": 2, "only": "3.*, 1.bias", "checkpoint": tmp_path / "c"}
    finetune(model, [(pictures(40), labels)], **run)
    changed = {name for name, p in model.net.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"3.weight", "3.bias", "1.bias"}
    assert all(p.requires_grad for p in model.net.parameters())
    with pytest.raises(InputError, match=r"only has 'attn\.\*', and no parameter or module matches it"):
        finetune(digits_like(), [(pictures(40), labels)], loss="ce", only="attn.*")


# Values of L2 attention

TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 3}
SWIN = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 12, "depths": (2,), "num_heads": (2,)}


def attention(name="vit_tiny_patch16_224"):
    torch.manual_seed(0)
    swin = name.startswith("swin")
    model = lipcert.load(name, pretrained=False, **({**SWIN, "num_classes": 3} if swin else TINY))
    return lipcert.convert(model, images=pictures(4, 32 if swin else 16))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224"])
def test_values_of_attention_are_constrained(name):
    model, original = attention(name), attention(name)
    images = pictures(25, model.input_size[1])
    lipcert.constrain(model, images, 0.1)
    paths = [layer.path for layer in model.constraint.layers if layer.path.endswith(".v")]
    assert len(paths) == 2
    entries = {layer.path: layer for layer in model.constraint.layers}
    calibration = images[torch.arange(25) % 5 != 4]
    for path in paths:
        entry, old, new = entries[path], *(m.net.get_submodule(path[:-2]) for m in (original, model))
        assert entry.norm_after < 0.95 * entry.norm_before
        heads = [
            torch.linalg.matrix_norm(a.v_weight.detach().double().unflatten(0, (a.num_heads, -1)), 2)
            for a in (old, new)
        ]
        assert [float(h.max()) for h in heads] == pytest.approx([entry.norm_before, entry.norm_after], rel=1e-4)
        # The outputs of the heads for the inputs that the pretrained network has there, with the old and new values.
        seen = []
        old.proj.register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0].detach().double()))
        values = old.v_weight.detach().clone()
        with torch.no_grad():
            for weight in (values, new.v_weight, torch.zeros_like(values)):
                old.v_weight.copy_(weight)
                original(calibration)
                old.v_weight.copy_(values)
        away = float((seen[1] - seen[0]).norm() / (seen[0] - seen[2]).norm())
        assert away == pytest.approx(entry.error_reached, rel=1e-3)
        assert away <= 0.1 * (1 + 1e-4)


def test_constrained_values_lower_the_bound():
    with_values, without = attention(), attention()
    lipcert.constrain(with_values, pictures(25, 16), 0.1)
    others = [layer.path for layer in with_values.constraint.layers if not layer.path.endswith(".v")]
    lipcert.constrain(without, pictures(25, 16), 0.1, layers=others)
    assert with_values.constraint.after.log10_bound < without.constraint.after.log10_bound


# The command


@pytest.fixture
def constrain(tmp_path):
    """Runs the command on a small network and images of its size; it writes out.safetensors."""
    write_images("data", 21, 8)
    torch.manual_seed(0)
    model = lipcert.load("certvit_cifar10", pretrained=False, depth=1, embed_dim=12, img_size=8, num_classes=3)
    save(model, "model.safetensors")
    words = ("model.safetensors", "--data", "data", "--out", "out.safetensors", "--json", "--force")
    return partial(run, "constrain", *words)


def test_the_command_takes_the_hyper_parameters_of_the_faithful_engine(constrain):
    faithful = {"engine": "faithful", "quantile": 0.3, "relaxation": 1.1, "projection_epochs": 2, "eta": 0.01}
    result = constrain("--iterations", "3", **faithful, point="sparse", mini_batches=3)
    step = read_metadata("out.safetensors")["recipe"][-1]
    assert (step["eta"], step["quantile"], step["relaxation"]) == (0.01, 0.3, 1.1)
    assert (step["measure"], step["mini_batches"]) == ("l1", 3)
    assert (step["iterations"], step["projection_epochs"]) == (3, 2)
    assert json.loads(result.stdout)["layers"][1]["sparsity"] > 0.01
    assert load_artifact("out.safetensors").recipe


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.1}, "for the engine faithful only"),
        ({"point": "sparse"}, "for the engine faithful only"),
        ({"eta": 0}, "eta must be a positive number"),
        ({"mini_batches": 2}, "for the engine faithful only"),
        ({"engine": "faithful", "beta": 0.1, "quantile": 0.1}, "give one of them"),
        ({"eta": 1e9}, "none of"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(constrain, settings, message):
    assert message in " ".join(constrain(code=2, **settings).output.split())
    assert not Path("out.safetensors").exists()


def test_options_that_cannot_be_used_are_said(constrain):
    assert "iterations must be at least 1" in constrain("--iterations", "0", code=2).stderr
    both = constrain("--measure", "spectral", engine="faithful", code=2)
    assert "the faithful engine lowers l1 and not spectral" in both.stderr


def test_eta_becomes_the_error_of_each_layer():
    model = digits_like()
    lipcert.constrain(model, pictures(40), eta=0.001)
    rows = (2 * pictures(40)[torch.arange(40) % 5 != 4] - 1).flatten(1).double()
    change = rows @ (model.net[1].weight.detach() - digits_like().net[1].weight.detach()).double().mT
    assert float(change.square().sum()) == pytest.approx(0.001 * len(rows), rel=0.01)
    report = model.constraint
    assert report.eta == 0.001
    errors = [layer.error_asked for layer in report.layers]
    assert report.error == max(errors) > min(errors)
    assert report.allowed.startswith("a mean squared error of 0.001 a row (η), relative errors of ")


def test_beta_is_the_threshold_of_the_paper(monkeypatch):
    """And the mini-batches are as many as asked for, each with its share of the images."""
    seen = []

    def solver(weight, blocks, error, **options):
        seen.append((len(blocks), sum(block.rows for block in blocks), options["beta"]))
        return constrain_blockwise(weight, blocks, error, **options)

    monkeypatch.setattr("lipcert.certvit.network.constrain_blockwise", solver)
    lipcert.constrain(digits_like(), pictures(40), engine="faithful", beta=0.05, mini_batches=7)
    assert seen == [(7, 32, 0.05)] * 2
    x, weight = normal(60, WIDTH), normal(4, WIDTH, seed=1)
    found = constrain_blockwise(weight, [from_rows(x)], 0.1, beta=0.4, iterations=1, point="sparse")
    assert torch.equal(found.weight == 0, weight.abs() <= 0.4)
