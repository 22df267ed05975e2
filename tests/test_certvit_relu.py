"""CertViT with the ReLU behind the layer, zeros that stay, values of L2 attention, the paper's own tolerance."""

import json
import math

import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import lipcert
from lipcert.certvit import Moments, constrain_blockwise, constrain_matrix, network, solve
from lipcert.certvit._measures import MEASURES
from lipcert.certvit.relu import Relu, relus
from lipcert.cli import app
from lipcert.errors import InputError
from lipcert.inputs.artifact import load_artifact, read_metadata, save
from lipcert.training import finetune

WIDTH = 24


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(active, rows=400, outputs=WIDTH, seed=0):
    """A weight, rows, and the ReLU behind with a bias that lets through this share of the entries of every unit."""
    x = normal(rows, WIDTH, seed=seed) * torch.arange(1, WIDTH + 1) ** -0.5
    weight = normal(outputs, WIDTH, seed=seed + 1) / WIDTH**0.5
    bias = -(x @ weight.mT).quantile(1 - active, dim=0)
    return weight, x, Relu(torch.ones(outputs).double(), bias)


def moved(weight, pre, x, bias):
    """Σ_t d²_∂f(y_t)(W x_t − y_t) entry by entry, from the definition: the nearest t in ∂f(y) to W x + b − y."""
    squared = 0.0
    for new, old in zip((x @ weight.mT + bias).flatten().tolist(), (x @ pre.mT + bias).flatten().tolist(), strict=True):
        y = max(old, 0.0)
        z = new - y
        nearest = 0.0 if y > 0 else min(z, 0.0)  # the subdifferential is {0}, or (−∞, 0]
        squared += (z - nearest) ** 2
    return squared


def test_the_distance_is_that_of_the_paper():
    weight, x, relu = layer(0.3, rows=60)
    for seed in range(3):
        changed = weight + 0.2 * normal(*weight.shape, seed=10 + seed)
        found = relu.differences(x @ changed.mT, x @ weight.mT).square().sum()
        assert float(found) == pytest.approx(moved(changed, weight, x, relu.offset), rel=1e-12)
        assert found <= ((changed - weight) @ x.mT).square().sum()  # the plain set is a part of this one


@pytest.mark.parametrize("measure", sorted(MEASURES))
@pytest.mark.parametrize("active", [0.04, 0.5, 1.0])
def test_norms_behind_a_relu_are_lower_and_the_constraint_holds(measure, active):
    weight, x, relu = layer(active)
    moments, error = Moments.from_rows(x), 0.1
    plain = constrain_matrix(weight, moments, error, measure)
    behind = constrain_matrix(weight, moments, error, measure, relu=relu)
    allowed = error**2 * float((x @ weight.mT).square().sum())
    assert moved(behind.weight, weight, x, relu.offset) <= allowed * (1 + 1e-9)
    assert behind.error_reached <= error * (1 + 1e-9)
    value = MEASURES[measure].value
    if active < 1:
        assert value(behind.weight) < 0.97 * value(plain.weight)
        # what ReLU tells apart, the plain constraint would have refused
        assert moments.relative_error(behind.weight, weight) > error
    else:
        assert value(behind.weight) == pytest.approx(value(plain.weight), rel=0.02)


@pytest.mark.parametrize("active", [0.04, 0.3])
def test_no_member_of_the_set_has_a_lower_norm_than_the_gap_says(active):
    weight, x, relu = layer(active)
    solution = constrain_matrix(weight, Moments.from_rows(x), 0.1, relu=relu)
    allowed = 0.01 * float((x @ weight.mT).square().sum())
    least = torch.linalg.matrix_norm(solution.weight, 2) * (1 - solution.gap)
    assert solution.gap < 0.005
    # An attack: gradient descent on the norm of another parametrisation, pulled back into the set.
    point = solution.weight.clone().requires_grad_()
    optimizer = torch.optim.Adam([point], lr=3e-3)
    for _ in range(400):
        optimizer.zero_grad()
        away = relu.differences(x @ point.mT, x @ weight.mT).square().sum()
        (torch.linalg.matrix_norm(point, 2) + 10 * (away / allowed - 1).clamp_min(0)).backward()
        optimizer.step()
        low, high = 0.0, 1.0
        for _ in range(30):  # towards W_pre, until it is a member
            middle = (low + high) / 2
            tried = point.detach() + middle * (weight - point.detach())
            inside = relu.differences(x @ tried.mT, x @ weight.mT).square().sum() <= allowed
            low, high = (low, middle) if inside else (middle, high)
        member = point.detach() + high * (weight - point.detach())
        assert torch.linalg.matrix_norm(member, 2) >= least


def test_few_rows_of_a_wide_layer_take_few_columns(monkeypatch):
    """As in a dense layer behind many pixels: 12 images, 300 inputs."""
    x, weight = normal(12, 300), normal(8, 300, seed=1) / 300**0.5
    relu = Relu(torch.ones(8).double(), -(x @ weight.mT).quantile(0.7, dim=0))
    sizes, plain = [], solve.eigenbasis
    monkeypatch.setattr(solve, "eigenbasis", lambda second: sizes.append(len(second)) or plain(second))
    short = constrain_matrix(weight, Moments.from_rows(x), 0.1, relu=relu)
    assert sizes == [20]
    monkeypatch.setattr(solve, "_spanned", lambda problem: (problem, None))
    whole = constrain_matrix(weight, Moments.from_rows(x), 0.1, relu=relu)
    assert sizes == [20, 300]
    assert short.norm_after == pytest.approx(whole.norm_after, rel=1e-3)
    assert short.norm_after < 0.9 * short.norm_before
    away = relu.differences(x @ short.weight.mT, x @ weight.mT).square().sum()
    assert away <= 0.01 * (x @ weight.mT).square().sum() * (1 + 1e-9)


@pytest.mark.parametrize("measure", sorted(MEASURES))
@pytest.mark.parametrize("iterations", [1, 7, 60])
def test_the_limit_of_iterations_holds_for_all_ellipsoids_together(measure, iterations):
    weight, x, relu = layer(0.3)
    found = constrain_matrix(weight, Moments.from_rows(x), 0.1, measure, relu=relu, iterations=iterations)
    assert 1 <= found.iterations <= 2 * iterations
    assert found.error_reached <= 0.1 * (1 + 1e-9)
    value = MEASURES[measure].value
    assert value(found.weight) < value(weight)


@pytest.mark.parametrize("measure", sorted(MEASURES))
@pytest.mark.parametrize("groups", [1, 6])
def test_units_that_are_never_active_may_become_zero(measure, groups):
    x, weight = normal(groups, 50, 8), normal(6, 8, seed=1)
    offset = torch.full((6,), -100.0).double()
    found = constrain_matrix(weight, Moments.from_rows(x), 0.1, measure, relu=Relu(torch.ones(6).double(), offset))
    assert found.error_reached == 0
    assert found.norm_after < 1e-6
    assert math.isfinite(found.gap)


def test_the_faithful_engine_knows_the_relu():
    weight, x, relu = layer(0.1, rows=200)
    blocks = [x[k::4] for k in range(4)]
    start = {"iterations": 30, "projection_epochs": 200}
    plain = constrain_blockwise(weight, blocks, 0.1, **start)
    behind = constrain_blockwise(weight, blocks, 0.1, relu=relu, **start)
    from_moments = constrain_blockwise(weight, [Moments.from_rows(b) for b in blocks], 0.1, relu=relu, **start)
    assert torch.allclose(from_moments.weight, behind.weight, rtol=1e-9)
    assert behind.weight.abs().sum() < plain.weight.abs().sum()
    reached = math.sqrt(moved(behind.weight, weight, x, relu.offset) / float((x @ weight.mT).square().sum()))
    assert behind.error_reached == pytest.approx(reached, rel=1e-9)


def test_eta_is_the_tolerance_of_equation_10():
    weight, x, _ = layer(1.0, rows=100)
    blocks = [x[:60], x[60:]]
    eta = 0.01 * float((x @ weight.mT).square().sum()) / len(x)
    found = constrain_blockwise(weight, blocks, eta=eta, iterations=50, projection_epochs=500)
    for block in blocks:
        assert float(((found.weight - weight) @ block.mT).square().sum()) <= len(block) * eta * 1.01
    assert found.error_asked == pytest.approx(0.1, rel=1e-9)


def wrap(net, size=8):
    return lipcert.load(net, mean=(0.5,) * 3, std=(0.5,) * 3, input_size=(3, size, size))


def convolutions():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.ReLU(),
        nn.Conv2d(8, 8, 1), nn.GELU(), nn.Flatten(), nn.Linear(72, 20), nn.Dropout(), nn.ReLU(), nn.Linear(20, 3),
    )  # fmt: skip
    with torch.no_grad():
        net[1].running_mean.normal_()
        net[1].running_var.uniform_(0.5, 2)
        net[1].weight.copy_(torch.tensor([1.0, -1, 0.5, -2, 0, 1, 1, 1]))
        net[1].bias.normal_()
    return wrap(net)


def pictures(count=25, size=8, seed=1):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def test_relus_are_found_through_batch_normalisation():
    model = convolutions().eval()
    modules = {path: m for path, m in model.net.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    found = relus(model, modules)
    assert set(found) == {"0", "3", "8"}
    conv, normalisation = model.net[0], model.net[1]
    z = torch.randn(2, 8, 5, 5)
    sees = normalisation(z + conv.bias[:, None, None])
    scale, offset = (value.float()[:, None, None] for value in (found["0"].scale, found["0"].offset))
    assert torch.allclose(scale * z + offset, sees, atol=1e-5)
    assert torch.equal(found["8"].offset, modules["8"].bias.double())
    with torch.no_grad():  # what ReLU makes of a member's outputs is what it made of the old ones
        before = torch.randn(50, 8).double()
        free = before - torch.rand(50, 8).double() * found["0"].scale.sign()
        off = found["0"].scale * before + found["0"].offset <= 0
        after = torch.where(off, free, before)
        assert not found["0"].differences(after, before)[:, [0, 1, 2, 3, 5, 6, 7]].any()
        assert not found["0"].differences(before + 5, before)[:, 4].any()  # a scale of 0: any output will do


class Branches(nn.Module):
    """The outputs of ``read`` are read twice, those of ``called`` come from two calls."""

    def __init__(self):
        super().__init__()
        self.read, self.called, self.head = nn.Linear(192, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x):
        first = self.read(x.flatten(1))
        return self.head(self.called(self.called(first.relu()).relu()).relu() + first)


def test_a_relu_that_does_not_hide_the_outputs_does_not_count():
    torch.manual_seed(0)
    model = wrap(Branches()).eval()
    assert relus(model, {name: getattr(model.net, name) for name in ("read", "called", "head")}) == {}
    lipcert.constrain(model, pictures(), 0.1, keep="activations")
    assert any("no layer has a ReLU" in note for note in model.constraint.notes)


def test_a_network_keeps_what_its_relus_make_of_the_outputs():
    plain, behind = convolutions(), convolutions()
    original = convolutions()
    lipcert.constrain(plain, pictures(60), 0.1)
    lipcert.constrain(behind, pictures(60), 0.1, keep="activations")
    entries = {layer.path: layer for layer in behind.constraint.layers}
    assert {path for path, entry in entries.items() if entry.behind} == {"0", "3", "8"}
    assert behind.constraint.after.log10_norms < plain.constraint.after.log10_norms - 0.01
    assert behind.recipe[-1]["keep"] == "activations"
    assert "keep" not in plain.recipe[-1]
    # the error of the first layer, from the network's own tensors
    images = pictures(60)[torch.arange(60) % 5 != 4]
    with torch.no_grad():
        old, new = (model.net[0](2 * images - 1) for model in (original, behind))
        sees = [original.net[1](z) for z in (old, new)]
        scale = (original.net[1].weight / (original.net[1].running_var + 1e-5).sqrt())[:, None, None]
        away = torch.where(sees[0] > 0, new - old, sees[1].clamp_min(0) / scale)
        away[:, 4] = 0
        energy = (old - original.net[0].bias[:, None, None]).square().sum()
        assert float((away.square().sum() / energy).sqrt()) == pytest.approx(entries["0"].error_reached, rel=1e-3)
    assert entries["0"].error_reached <= 0.1 * (1 + 1e-6)


def test_samples_are_spread_over_all_rows(monkeypatch):
    """Over all positions of images of 8×8, in whichever batches they come."""
    monkeypatch.setattr("lipcert.certvit.moments.sample_size", lambda width: 1000)
    rows, samples = torch.arange(6400.0), []
    for size in (64, 640, 999, 6400):
        moments = Moments("layer", torch.zeros(1, 1, 1, dtype=torch.float64), sample=torch.zeros(1, 0, 1))
        for part in rows.split(size):
            moments.add(part.reshape(1, -1, 1))
        samples.append(moments.sample.flatten().long())
        assert moments.rows == 6400
    assert all(torch.equal(sample, samples[0]) for sample in samples)
    assert len(samples[0].unique()) == 1000
    positions, images = (samples[0] % 64).bincount(minlength=64), (samples[0] // 64).bincount(minlength=100)
    assert 4 <= positions.min() <= positions.max() <= 32  # 15.6 on average, give or take 3.6
    assert 1 <= images.min() <= images.max() <= 24  # 10 on average, give or take 3
    few = Moments.from_rows(rows[:300, None])
    assert torch.equal(few.sample.flatten(), rows[:300].double())


# Zeros


def test_l1_has_zeros_and_the_constraint_holds():
    x, weight = normal(300, WIDTH) * torch.arange(1, WIDTH + 1) ** -1.0, normal(12, WIDTH, seed=3)
    for dtype in (torch.float32, torch.float64):
        found = constrain_matrix(weight.to(dtype), Moments.from_rows(x), 0.1, "l1")
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
    with pytest.raises(InputError, match=r"only has 'attn\.\*', and no parameter matches it"):
        finetune(digits_like(), [(pictures(40), labels)], loss="ce", only="attn.*")


# Values of L2 attention

TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 3}
SWIN = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 12, "depths": (2,), "num_heads": (2,)}


def attention(name="vit_tiny_patch16_224"):
    torch.manual_seed(0)
    swin = name.startswith("swin")
    model = lipcert.load(name, pretrained=False, **({**SWIN, "num_classes": 3} if swin else TINY))
    return lipcert.convert(model, images=pictures(4, 32 if swin else 16))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
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
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for name in "abc":
        (tmp_path / "data" / name).mkdir(parents=True)
        for k in range(7):
            pixels = torch.randint(0, 256, (8, 8, 3), generator=generator, dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{k}.png")
    return tmp_path


def artifact(folder):
    torch.manual_seed(0)
    model = lipcert.load("certvit_cifar10", pretrained=False, depth=1, embed_dim=12, img_size=8, num_classes=3)
    save(model, folder / "model.safetensors")
    return str(folder / "model.safetensors")


def constrain(folder, *options):
    out = folder / "out.safetensors"
    arguments = ["constrain", artifact(folder), "--data", str(folder / "data"), "--out", str(out), *options]
    return CliRunner().invoke(app, [*arguments, "--json", "--force"]), out


def test_the_command_takes_the_hyper_parameters_of_the_faithful_engine(folder):
    faithful = ("--engine", "faithful", "--measure", "l1", "--beta", "0.3", "--relaxation", "1.1", "--iterations", "3")
    result, out = constrain(folder, *faithful, "--projection-epochs", "2", "--eta", "0.01", "--point", "sparse")
    assert result.exit_code == 0, result.output
    step = read_metadata(out)["recipe"][-1]
    assert (step["eta"], step["beta"], step["relaxation"]) == (0.01, 0.3, 1.1)
    assert (step["iterations"], step["projection_epochs"]) == (3, 2)
    assert json.loads(result.stdout)["layers"][1]["sparsity"] > 0.01
    assert load_artifact(out).recipe


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beta", "0.1"], "for the engine faithful only"),
        (["--point", "sparse"], "for the engine faithful only"),
        (["--eta", "0"], "eta must be above 0"),
        (["--iterations", "0"], "iterations must be at least 1"),
        (["--keep", "activation"], "did you mean activations"),
        (["--eta", "1e9"], "none of"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(folder, options, message):
    result, out = constrain(folder, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not out.exists()


def test_eta_becomes_the_error_of_each_layer():
    model = digits_like()
    lipcert.constrain(model, pictures(40), eta=0.001)
    rows = (2 * pictures(40)[torch.arange(40) % 5 != 4] - 1).flatten(1).double()
    change = rows @ (model.net[1].weight.detach() - digits_like().net[1].weight.detach()).double().mT
    assert float(change.square().sum()) == pytest.approx(0.001 * len(rows), rel=0.01)
    assert network._BLOCKS == 4
