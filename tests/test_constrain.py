"""Constraining a whole network: the report against plain recomputation, atomicity, bad input, and the command."""

import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
import safetensors.torch
import torch
from commands import facts, run, write_images
from moments import from_rows
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lipcert
from lipcert.certvit import MEASURE_NAMES, constrain_blockwise, network
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.inputs.artifact import load_artifact, read_metadata, save
from lipcert.inputs.data import open_images

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
ARGUMENTS = " ".join(f"{key}={value}" for key, value in TINY.items())
BLOCK = ("blocks.0.attn.proj", "blocks.0.mlp.fc1")


def vit():
    torch.manual_seed(0)
    return lipcert.load("vit_tiny_patch16_224", pretrained=False, **TINY)


def pictures(count=20, size=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, size, size, generator=generator)


def shares(images):
    """Calibration and held-out images: every fifth is held out."""
    held = torch.arange(len(images)) % 5 == 4
    return images[~held], images[held]


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model, before):
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def wrap(net, size=8):
    return lipcert.load(net, mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, size, size))


class Wired(nn.Module):
    """A network of a few layers, put together by the test."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.wiring = forward

    def forward(self, x):
        return self.wiring(self, x)


def mlp(**more):
    torch.manual_seed(0)
    return Wired(
        lambda net, x: net.head(net.body(x.flatten(1)).relu()), body=nn.Linear(192, 12), head=nn.Linear(12, 3), **more
    )


def inputs_of(model, paths, images):
    """The rows that each layer sees, (T, M) in float64."""
    seen = {}
    handles = [
        model.net.get_submodule(path).register_forward_pre_hook(lambda _, x, path=path: seen.update({path: x[0]}))
        for path in paths
    ]
    with torch.no_grad():
        model(images.to(model.dtype))
    for handle in handles:
        handle.remove()
    return {path: x.double().reshape(-1, x.shape[-1]) for path, x in seen.items()}


def relative_error(rows, after, before):
    return float((rows @ (after - before).double().T).norm() / (rows @ before.double().T).norm())


def test_a_depthwise_convolution_gets_no_larger_norm_than_by_the_baselines():
    """Its kernels have the smallest Frobenius norm after the solver, which is not the norm of the convolution."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 24, 3, padding=1, groups=3, bias=False)
    model = Wired(lambda net, x: net.head(net.body(x).relu().mean((2, 3))), body=conv, head=nn.Linear(24, 3))
    model = lipcert.load(model, mean=0.5, std=0.5, input_size=(3, 8, 8))
    model.net.body.weight.data[::8] = 1.0
    lipcert.constrain(model, pictures(20, 8), 0.1, layers="body")
    (layer,) = model.constraint.layers
    assert layer.norm_after <= min(layer.baselines.values()) * (1 + 1e-4)
    assert layer.status in ("as clip", "as rescale")
    assert layer.error_reached <= 0.1


def test_the_report_is_what_a_plain_computation_finds():
    model, images = vit(), pictures(25)
    labels = torch.arange(25) % 3
    before, original = weights(model), vit()
    model.net.blocks[0].train()
    seen = []
    error = 0.1
    result = lipcert.constrain(model, (images, labels), error, progress=lambda *step: seen.append(step))
    report = model.constraint
    assert result is model
    assert model.net.blocks[0].training
    assert not model.net.blocks[1].training
    model.eval()
    assert model.recipe[0]["step"] == "constrain"
    assert (model.recipe[0]["error"], model.recipe[0]["images"]) == (error, report.images)
    linear = [name for name, module in model.net.named_modules() if isinstance(module, nn.Linear)]
    assert [layer.path for layer in report.layers] == ["patch_embed.proj", *linear]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"net.{layer.path}.weight" for layer in report.layers}

    calibration, held = shares(images)
    assert (report.images, report.held_out) == (len(calibration), len(held)) == (20, 5)
    rows, held_rows = (inputs_of(original, linear, part) for part in (calibration, held))
    for layer in report.layers:
        after = model.net.get_submodule(layer.path).weight.detach()
        pre = original.net.get_submodule(layer.path).weight.detach()
        for weight, norm in ((after, layer.norm_after), (pre, layer.norm_before)):
            exact = float(torch.linalg.matrix_norm(weight.double().flatten(1), 2))  # patches do not overlap
            assert exact <= norm <= exact * (1 + 1e-4)
        assert layer.norm_after <= layer.baselines["clip"] * (1 + 1e-4)
        assert layer.baselines["clip"] <= layer.baselines["rescale"] * (1 + 1e-4)
        assert layer.baselines["rescale"] == pytest.approx((1 - error) * layer.norm_before, rel=1e-4)
        assert layer.error_asked == error
        assert layer.error_reached <= error
        assert layer.status == "converged"
        assert layer.seconds > 0
        if layer.path in linear:
            assert layer.error_reached == pytest.approx(relative_error(rows[layer.path], after, pre), rel=1e-3)
            assert layer.error_held_out == pytest.approx(relative_error(held_rows[layer.path], after, pre), rel=1e-3)

    for model_of, figures, norm in (
        (original, report.before, lambda layer: layer.norm_before),
        (model, report.after, lambda layer: layer.norm_after),
    ):
        assert figures.log10_norms == pytest.approx(sum(math.log10(norm(layer)) for layer in report.layers))
        assert figures.log10_bound == pytest.approx(lipcert.lipschitz(model_of).log10)
        top = model_of(held).argmax(1)
        assert figures.accuracy == pytest.approx(float((top == labels[4::5]).double().mean()))
        assert figures.agreement == pytest.approx(float((top == original(held).argmax(1)).double().mean()))
    for name, figures in report.baselines.items():
        logs = [math.log10(layer.baselines[name]) for layer in report.layers]
        assert figures.log10_norms == pytest.approx(sum(logs))
        assert figures.accuracy is not None
    assert report.after.log10_bound < report.before.log10_bound
    assert [total for what, _, total in seen if what == "solving layers"] == [10] * 10
    assert {"calibration images", "comparing on held-out images"} <= {what for what, *_ in seen}


def test_baselines_are_measured_with_their_own_weights():
    images = pictures(40, 8)
    found = {}
    for measure in ("spectral", "clip", "rescale"):
        model = wrap(mlp())
        lipcert.constrain(model, images, 0.8, measure=measure)
        found[measure] = model.constraint
    for measure in ("clip", "rescale"):
        alone = found[measure]
        for report in found.values():
            beside = report.baselines[measure]
            assert alone.after.agreement == beside.agreement < 1
            assert alone.after.log10_norms == beside.log10_norms
            assert report.before == found["spectral"].before
            assert beside.accuracy is beside.log10_bound is None
    torch.testing.assert_close(model.net.head.weight, 0.2 * mlp().head.weight)


@pytest.mark.parametrize("measure", MEASURE_NAMES)
def test_every_measure(measure):
    model, before = vit(), vit()
    lipcert.constrain(model, pictures(), 0.05, measure=measure, layers=BLOCK)
    assert [layer.path for layer in model.constraint.layers] == list(BLOCK)
    assert model.constraint.measure == measure
    assert all(layer.error_reached <= 0.05 for layer in model.constraint.layers)
    for path in BLOCK:
        after = value_of(measure, model.net.get_submodule(path).weight)
        assert after < 0.99 * value_of(measure, before.net.get_submodule(path).weight)
    assert torch.equal(model.net.head.weight, before.net.head.weight)


def value_of(measure, weight):
    if measure == "l1":
        return float(weight.detach().abs().sum())
    return float(torch.linalg.matrix_norm(weight.detach(), "nuc" if measure == "nuclear" else 2))


def test_loaders_of_all_kinds_give_the_same():
    images, labels = pictures(13, 8), torch.arange(13) % 3
    loaders = [
        (images, labels),
        DataLoader(TensorDataset(images, labels), batch_size=4),
        [(images[:6], labels[:6]), [images[6:], labels[6:]]],
        images,
        DataLoader(TensorDataset(images), batch_size=5),
        [images[:2], images[2:2], images[2:]],
        [images[:6], images[6:]],
    ]
    found = []
    for loader in loaders:
        model = wrap(mlp())
        lipcert.constrain(model, loader, 0.1, layers=["head"])
        found.append((model.constraint, model.net.head.weight))
    for report, weight in found:
        torch.testing.assert_close(weight, found[0][1], rtol=0, atol=2e-4 * float(weight.detach().abs().max()))
        assert (report.images, report.held_out) == (11, 2)
        assert report.after.agreement is not None
    assert [report.after.accuracy is not None for report, _ in found] == [True] * 3 + [False] * 4


def test_held_out_images_of_their_own():
    images, other = pictures(8), pictures(3, seed=5)
    model, original = vit(), vit()
    shuffled = DataLoader(TensorDataset(images), batch_size=3, shuffle=True)
    lipcert.constrain(model, shuffled, 0.1, layers=BLOCK, held_out=other)
    assert (model.constraint.images, model.constraint.held_out) == (8, 3)
    rows = inputs_of(original, BLOCK, other)
    for layer in model.constraint.layers:
        after = model.net.get_submodule(layer.path).weight.detach()
        pre = original.net.get_submodule(layer.path).weight.detach()
        assert layer.error_held_out == pytest.approx(relative_error(rows[layer.path], after, pre), rel=1e-3)


def test_few_images_are_said():
    model = vit()
    lipcert.constrain(model, pictures(4), 0.1, layers=["head"])
    report = model.constraint
    assert report.held_out == 0
    assert report.layers[0].error_held_out is None
    assert report.after.agreement is None
    assert any("no held-out images" in remark for remark in report.remarks)
    assert any("1 of 1 layers had too few inputs, head the fewest: 4 of 32" in remark for remark in report.remarks)
    assert any("of 1 of 1 layers unused, head uses 4 of 32" in line for line in report.remarks)
    lipcert.constrain(model, pictures(6), 0.01, layers=BLOCK)
    (line,) = [
        line for line in model.constraint.remarks if "on held-out images than allowed" in line
    ]  # not one a layer
    errors = {layer.path: layer.error_held_out for layer in model.constraint.layers}
    worst = max(errors, key=errors.__getitem__)
    assert sum(error > 0.015 for error in errors.values()) > 1
    assert f"{worst} the largest: {errors[worst]:.3g}, above 0.01" in line


def test_groups_of_layers_change_nothing():
    whole, parts = vit(), vit()
    images = pictures()
    layers = ("patch_embed.proj", *BLOCK)
    lipcert.constrain(whole, images, 0.1, layers=layers)
    seen: list[str] = []
    limit = 8 * 192**2  # the patch embedding's moments fill it
    options = {"layers": layers, "max_bytes": limit}
    lipcert.constrain(parts, images, 0.1, **options, progress=lambda what, *_: seen.append(what))
    assert "calibration images, pass 1 of 2" in seen
    assert "calibration images, pass 2 of 2" in seen
    assert same(parts, weights(whole))
    assert [a.path for a in parts.constraint.layers] == [a.path for a in whole.constraint.layers]


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["lipschitz", "_top", "solve_layers"])
def test_on_any_error_the_model_is_as_it_was(monkeypatch, where, stop):
    model = vit()
    before = weights(model)
    calls = []
    known = getattr(network, where)

    def fails(*arguments, **options):
        calls.append(0)
        if where == "lipschitz" and len(calls) == 1 or where == "_top" and len(calls) == 2:
            return known(*arguments, **options)
        raise stop

    monkeypatch.setattr(network, where, fails)
    with pytest.raises(stop):
        lipcert.constrain(model, pictures(5), 0.5, layers=BLOCK)
    assert calls
    assert same(model, before)
    assert model.constraint is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_layer_that_fails_is_reported_and_left_alone():
    net = Wired(
        lambda net, x: net.head(x.flatten(1)) + net.dead(0 * x.flatten(1)),
        head=nn.Linear(192, 3, bias=False),
        dead=nn.Linear(192, 3),
    )
    model = wrap(net)
    before = net.dead.weight.clone()
    lipcert.constrain(model, pictures(10, 8), 0.2)
    head, dead = model.constraint.layers
    assert (head.status, dead.status) == ("converged", "failed")
    assert model.constraint.failed == (dead,)
    assert torch.equal(net.dead.weight, before)
    assert dead.norm_after == dead.norm_before == dead.baselines["clip"]
    assert dead.error_reached is dead.error_held_out is None
    assert any("dead: unchanged (spectral)" in line and "are zero" in line for line in dead.shortfalls)
    with pytest.raises(InputError, match="none of 1 layers could be constrained; dead: unchanged"):
        lipcert.constrain(model, pictures(10, 8), 0.2, layers=["dead"])


def test_no_layer_is_begun_after_the_time(monkeypatch, folder):
    clock = itertools.count()
    monkeypatch.setattr("lipcert.certvit.tasks.time", SimpleNamespace(time=lambda: next(clock)))
    model = lipcert.constrain(vit(), torch.rand(10, 3, 32, 32), 0.1, until=1.5)
    statuses = [layer.status for layer in model.constraint.layers]
    assert statuses.count("failed") == len(statuses) - 2
    assert any("unchanged (spectral): no time was left" in remark for remark in model.constraint.remarks)
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    message = refused("model.lipcert.safetensors", "--data", "images", "--time-budget", "0.001s")
    assert message.startswith("lipcert: none of ")
    assert message.endswith("no time was left")


def test_a_weight_of_zeros_and_an_error_below_the_precision():
    model = wrap(mlp())
    with torch.no_grad():
        model.net.head.weight.zero_()
    lipcert.constrain(model, pictures(10, 8), 1e-12)
    body, head = model.constraint.layers
    assert (body.status, head.status) == ("rounding", "zero weight")
    assert model.constraint.after.log10_norms == pytest.approx(math.log10(body.norm_after))
    assert any("cannot express" in line for line in body.shortfalls)


def test_norms_of_convolutions_are_those_of_the_operators():
    net = Wired(
        lambda net, x: net.head(net.second(net.first(x).relu()).relu().mean((2, 3))),
        first=nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        second=nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False),
        head=nn.Linear(4, 3),
    )
    model = wrap(net)
    lipcert.constrain(model, pictures(20, 8), 0.1)
    for layer, module, shape in zip(
        model.constraint.layers, (net.first, net.second), ((3, 8, 8), (4, 4, 4)), strict=False
    ):
        basis = torch.eye(math.prod(shape)).reshape(-1, *shape)
        exact = float(torch.linalg.matrix_norm(module(basis).detach().flatten(1).double(), 2))
        assert exact <= layer.norm_after * (1 + 1e-6)
        assert layer.norm_after <= 1.35 * exact
        assert layer.error_reached <= 0.1


def test_norms_are_those_with_the_padding_that_repeats_pixels():
    net = Wired(
        lambda net, x: net.head(net.first(x).mean((2, 3))),
        first=nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        head=nn.Linear(4, 3),
    )
    model = wrap(net)
    lipcert.constrain(model, pictures(10, 8), 0.1)
    basis = torch.eye(3 * 64).reshape(-1, 3, 8, 8)
    matrix = (net.first(basis) - net.first.bias.view(1, -1, 1, 1)).detach().flatten(1).double()
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    assert exact <= model.constraint.layers[0].norm_after <= 2 * exact


def test_a_network_without_a_bound_says_so():
    model = wrap(mlp())
    model.net.wiring = lambda net, x: net.head(torch.special.bessel_j0(net.body(x.flatten(1))))
    with pytest.raises(UnsupportedOperation):
        lipcert.lipschitz(model)
    lipcert.constrain(model, pictures(10, 8), 0.1)
    assert model.constraint.before.log10_bound is model.constraint.after.log10_bound is None
    assert "no bound of the whole network" in model.constraint.notes[0]


def test_half_precision_is_measured_as_it_is_stored():
    model = vit().to(torch.bfloat16)
    original = vit().to(torch.bfloat16)
    images = pictures()
    lipcert.constrain(model, images, 0.01, layers=BLOCK)
    rows = inputs_of(original, BLOCK, shares(images)[0])
    for layer in model.constraint.layers:
        weight = model.net.get_submodule(layer.path).weight.detach()
        assert weight.dtype == torch.bfloat16
        pre = original.net.get_submodule(layer.path).weight.detach()
        assert layer.error_reached == pytest.approx(relative_error(rows[layer.path], weight, pre), rel=0.02)
        assert layer.norm_after >= float(torch.linalg.matrix_norm(weight.double(), 2))
        assert any("rounded to torch.bfloat16" in line for line in layer.shortfalls) == (layer.error_reached > 0.01)


def test_weights_that_cannot_be_constrained_are_left_and_said():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(2 * x)

    layers = {"unused": nn.Linear(2, 2), "scaled": Scaled(3, 3), "tied": nn.Linear(12, 3), "patched": nn.Linear(3, 3)}
    net = mlp(**layers, mixed=nn.Bilinear(3, 3, 3))
    net.tied.weight = net.head.weight
    net.patched.forward = lambda x: x
    net.wiring = lambda net, x: net.patched(
        net.scaled(net.tied(net.body(x.flatten(1))) + net.head(net.body(x.flatten(1))))
    )
    model = wrap(net)
    lipcert.constrain(model, pictures(10, 8), 0.1)
    assert [layer.path for layer in model.constraint.layers] == ["body"]
    reasons = dict(model.constraint.untouched)
    assert "shares its weight with tied" in reasons["head"]
    assert "shares its weight with head" in reasons["tied"]
    assert "never calls" in reasons["unused"]
    assert "Scaled does more" in reasons["scaled"]
    assert "Linear does more" in reasons["patched"]
    assert "part of a Bilinear" in reasons["mixed.weight"]
    for name in ("head", "unused", "scaled"):
        with pytest.raises(InputError, match=f"layer {name} cannot be constrained"):
            lipcert.constrain(model, pictures(10, 8), 0.1, layers=[name])


def test_the_parts_of_attention_by_distance_are_constrained():
    model = lipcert.convert(vit(), images=pictures(4))
    before = weights(model)
    lipcert.constrain(model, pictures(), 0.05)
    paths = {"blocks.0.attn.q", "blocks.0.attn.v", "blocks.0.attn.proj"}
    assert {layer.path for layer in model.constraint.layers} >= paths
    assert not torch.equal(model.net.blocks[0].attn.v_weight, before["net.blocks.0.attn.v_weight"])
    assert any("also forms its values" in note for note in model.constraint.notes)
    assert [step["step"] for step in model.recipe] == ["convert", "constrain"]


def flat(count):
    return torch.rand(count, 3, 1, 1).expand(count, 3, 32, 32)


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([], {}, "no images"),
        (torch.zeros(0, 3, 32, 32), {}, "no images"),
        (torch.full((10, 3, 32, 32), math.nan), {}, "hold no NaN"),
        (2 + pictures(5), {}, r"must lie in \[0, 1\]"),
        (pictures(5, 16), {}, "must have shape"),
        ((pictures(10), torch.arange(9)), {}, r"of shape \(10,\)"),
        ((pictures(10), torch.arange(10.0)), {}, "whole numbers"),
        ((pictures(10), torch.full((10,), 3)), {}, "from 0 to 2, got 3"),
        ((pictures(10), torch.full((10,), -1)), {}, "from 0 to 2, got -1"),
        (iter([pictures(5)]), {}, "only once"),
        (DataLoader(TensorDataset(pictures(30)), batch_size=5, shuffle=True), {}, "another order"),
        (["a"], {}, "images are a path; give tensors"),
        (3, {}, "got a int"),
        (pictures(5), {"held_out": []}, "no images"),
        (pictures(5), {"layers": ["blocks.0.mlp.fc"]}, "did you mean blocks.0.mlp.fc"),
        (pictures(5), {"layers": ["banana"]}, "no layer 'banana'; its layers are named like patch_embed.proj"),
        (pictures(5), {"layers": ["norm"]}, "norm is of class LayerNorm"),
        (pictures(5), {"layers": []}, "no Linear or Conv2d layer"),
        (pictures(5), {"measure": "banana"}, " one of spectral"),
        (pictures(5), {"workers": -1}, "workers must be 0"),
        (pictures(5), {"max_bytes": 100}, "raise max_bytes"),
        *((pictures(5), {"error": error}, "above 0 and below 1") for error in (0.0, -1.0, 1.0, 1.5, math.nan)),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(loader, options, message):
    model = vit()
    before = weights(model)
    with pytest.raises(InputError, match=message) as raised:
        lipcert.constrain(model, loader, **{"layers": ["head"], **options})
    assert "\n" not in str(raised.value)
    assert same(model, before)
    assert model.constraint is None


def test_activations_that_overflow_name_the_layer():
    model = wrap(mlp())
    with torch.no_grad():
        model.net.body.weight.fill_(3e38)
    with pytest.raises(InputError, match="layer body computes NaN or infinity|layer head are NaN or infinite"):
        lipcert.constrain(model, 0.5 + pictures(10, 8) / 2, 0.1)


def test_logits_that_are_not_finite_are_refused():
    model = wrap(mlp())
    model.net.wiring = lambda net, x: net.head(net.body(x.flatten(1)).relu()).div(0)
    before = weights(model)
    with pytest.raises(InputError, match="NaN or infinite with the weights of before"):
        lipcert.constrain(model, pictures(10, 8), 0.1)
    assert same(model, before)


def refused(*arguments):
    return commands.refused("constrain", *arguments, besides=("images: ", "labels: ", "note: "))


@pytest.fixture
def folder(tmp_path):
    """The working folder, with a model, and twelve images of three classes in the folder images."""
    write_images("images", 12, 32)
    save(vit(), "model.lipcert.safetensors")
    return tmp_path


def test_command_prints_and_writes(folder):
    source = Path("model.lipcert.safetensors")
    before = source.read_bytes()
    result = run("constrain", "--data", "images", "--error", "0.1")
    assert source.read_bytes() == before
    assert "model.lipcert.safetensors, the newest artifact" in result.stderr
    written = Path("model.constrained.lipcert.safetensors")
    model, expected = load_artifact(written), load_artifact(source)
    (batch,) = open_images("images", expected).batches(32)
    lipcert.constrain(expected, (batch.images, batch.labels), 0.1)
    assert same(model, weights(expected))
    report = expected.constraint

    table = [line.split("\t") for line in result.stdout.splitlines() if line.count("\t") == 10]
    assert table[0] == [
        "layer",
        "before",
        "if rescaled",
        "if clipped",
        "after",
        "error",
        "held out",
        "zeros",
        "steps",
        "s",
        "status",
    ]
    assert [row[0] for row in table[1:]] == [layer.path for layer in report.layers]
    for row, layer in zip(table[1:], report.layers, strict=True):
        assert float(row[4]) == pytest.approx(layer.norm_after, rel=0.02)
        assert float(row[5]) == pytest.approx(layer.error_reached, rel=0.01)
    totals = {row[0]: row[1:] for line in result.stdout.splitlines() if len(row := line.split("\t")) == 5}
    assert list(totals) == ["network", "before", "baseline rescale", "baseline clip", "after, spectral"]
    assert float(totals["after, spectral"][0]) == pytest.approx(report.after.log10_norms, abs=1e-3)
    assert totals["before"][2:] == [f"{100 * report.before.accuracy:.1f} %", "100.0 %"]
    assert totals["baseline clip"][1] == "-"
    printed = facts(result.stdout)
    assert printed["layers"] == "10 of 10 constrained to a relative error of 0.1"
    assert printed["images"].startswith("10, and 2 held out")
    assert printed["written"] == str(written)
    assert all(f"note: {remark}" in result.stderr for remark in report.remarks)

    recorded = read_metadata(written)
    (step,) = recorded["recipe"]
    assert (step["step"], step["data"], step["limit"], step["images"]) == ("constrain", "images", None, 10)
    assert recorded["facts"]["log10_bound"] == pytest.approx(report.after.log10_bound)
    assert recorded["facts"]["constraint"]["error"] == 0.1
    assert json.dumps(recorded["facts"])


@pytest.mark.parametrize("scale", [0.1, 1e3])
def test_the_images_are_advised_for_training_and_not_for_certificates(folder, scale):
    model = vit()
    for parameter in model.parameters():
        parameter.data = scale * (parameter.data + 0.1 * torch.randn_like(parameter))
    save(model, "m.safetensors")
    result = run("constrain", "m.safetensors", "--data", "images", "--layers", "head")
    advised = re.findall(r"^(?:next|or)\tlipcert (\w+) .*--data (\w+)", result.stdout, re.MULTILINE)
    assert advised
    assert {*advised} <= {("certify", "TEST"), ("finetune", "images")}


def test_command_with_limit_layers_and_without_labels(folder):
    for path in list(Path("images").glob("*/*.png")):
        path.rename(path.parent.parent / path.name)
    options = ["--data", "images", "--limit", "6", "--measure", "clip", "--layers", "head, blocks.0.mlp.fc1"]
    result = run("constrain", "model.lipcert.safetensors", *options, "--out", "c.safetensors")
    rows = [line.split("\t") for line in result.stdout.splitlines() if line.count("\t") == 10]
    assert [row[0] for row in rows[1:]] == ["blocks.0.mlp.fc1", "head"]
    assert facts(result.stdout)["images"].startswith("5, and 1 held out")
    after = [line.split("\t") for line in result.stdout.splitlines() if line.startswith("after, clip")]
    assert after[0][3] == "-"


def test_command_on_the_bundled_model_and_images(folder, monkeypatch):
    Path("model.lipcert.safetensors").rename(folder / "images" / "bundled.safetensors")
    data = {"images": (255 * pictures(10)).byte(), "labels": torch.arange(10) % 3}
    safetensors.torch.save_file(data, folder / "images" / "data.safetensors")
    monkeypatch.setattr("lipcert.inputs.sources.path_of", {"digits-vit": folder / "images" / "bundled.safetensors"}.get)
    monkeypatch.setattr("lipcert.inputs.data.BUNDLED", folder / "images" / "data.safetensors")
    result = run("constrain")
    assert "model: digits-vit, bundled" in result.stderr
    written = Path("digits-vit.constrained.lipcert.safetensors")
    before = load_artifact(written).recipe
    assert "accuracy" in result.stdout
    run("constrain", "digits-vit", "--limit", "5")
    assert load_artifact(written).recipe == before, "hours of work are not replaced by a trial"
    assert load_artifact("digits-vit.constrained.2.lipcert.safetensors").recipe != before


def test_command_refuses_bad_input(folder):
    model = "model.lipcert.safetensors"
    command = [model, "--data", "images"]
    for error in ("0", "-1", "1.5", "nan"):
        assert "above 0 and below 1" in refused(*command, "--error", error)
    assert " one of spectral" in refused(*command, "--measure", "banana")
    assert "did you mean head" in refused(*command, "--layers", "heads")
    assert "no device" in refused(*command, "--device", "banana")
    assert "at least 1" in refused(*command, "--limit", "0")
    assert "there is no image, folder" in refused(model, "--data", "none")
    Path("empty").mkdir()
    assert "holds no images" in refused(model, "--data", "empty")
    Path("notes.safetensors").write_text("mine")
    assert "not a lipcert artifact" in refused(*command, "--out", "notes.safetensors")
    assert "file of the model itself" in refused(*command, "--out", model)
    assert sorted(path.name for path in Path().iterdir()) == ["empty", "images", model, "notes.safetensors"]


def test_a_stopped_command_writes_nothing(folder, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(network, "solve_layers", stopped)
    result = run("constrain", "model.lipcert.safetensors", "--data", "images", code=130)
    assert result.stderr.endswith("\nlipcert: interrupted; nothing was written\n")
    assert not Path("model.constrained.lipcert.safetensors").exists()


def test_faithful_engine_is_the_blockwise_algorithm():
    model = vit()
    before = model.net.get_submodule(BLOCK[0]).weight.detach().clone()
    images = pictures(40)
    calibration, _ = shares(images)
    rows = []
    handle = model.net.get_submodule(BLOCK[0]).register_forward_hook(lambda m, args, out: rows.append(args[0]))
    with torch.no_grad():
        for batch in (calibration[:26], calibration[26:]):  # 32 images a batch, every fifth of them held out
            model(batch)
    handle.remove()
    blocks = [torch.cat([part[first::4] for part in rows]).flatten(0, 1).double() for first in range(4)]
    expected = constrain_blockwise(before, list(map(from_rows, blocks)), 0.1)
    lipcert.constrain(model, images, 0.1, measure="l1", engine="faithful", layers=BLOCK[:1])
    assert torch.allclose(model.net.get_submodule(BLOCK[0]).weight, expected.weight, atol=1e-5)
    report = model.constraint
    (layer,) = report.layers
    assert (report.measure, report.engine) == ("l1", "faithful")
    assert report.method == "l1, faithful (block-iterative)"
    assert layer.iterations == expected.iterations
    assert layer.error_reached == pytest.approx(expected.error_reached, rel=1e-3)
    assert layer.norm_after == pytest.approx(expected.norm_after, rel=1e-4)
    assert layer.baselines["rescale"] < layer.norm_before


def test_faithful_engine_refuses_other_measures():
    model = vit()
    for options, said in (
        ({"engine": "faithful", "measure": "nuclear"}, "lowers l1"),
        ({"engine": "best"}, "exact, faithful"),
    ):
        with pytest.raises(InputError, match=said):
            lipcert.constrain(model, pictures(), **options)


def test_command_marks_the_faithful_engine(folder):
    options = ["--data", "images", "--error", "0.1", "--layers", BLOCK[0], "--out", "f.safetensors"]
    result = run("constrain", "model.lipcert.safetensors", *options, engine="faithful")
    assert "after, l1, faithful (block-iterative)\t" in result.stdout
    assert read_metadata("f.safetensors")["facts"]["constraint"]["engine"] == "faithful"
