"""What rules a certificate out before anything costly is computed, and what the command says of it."""

import ast
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from click import Context
from commands import run
from modules import Function
from torch import nn
from typer.main import get_command

import lipcert
from lipcert.certifier import METHODS, Certifier, triage
from lipcert.certifier._triage import Screening, first_order_limit, too_loose
from lipcert.cli import app
from lipcert.cli._advice import Status, advise
from lipcert.cli._certifying import _triage as show_triage
from lipcert.cli._certifying import _why_not
from lipcert.cli._loading import untrained
from lipcert.cli._print import words_of
from lipcert.inputs.data import SAMPLES, open_images, sample_images
from lipcert.settings import LOOSE, CertifySettings, unreached

SIZE = (3, 4, 4)


def model_of(net: nn.Module, size: tuple[int, int, int] = SIZE) -> lipcert.Model:
    return lipcert.load(net.eval(), mean=(0.0,) * size[0], std=(1.0,) * size[0], input_size=size).double()


def curved(depth: int = 1) -> lipcert.Model:
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(48, 48), nn.GELU())]
    return model_of(nn.Sequential(nn.Flatten(), *hidden, nn.Linear(48, 5)))


def loose() -> lipcert.Model:
    """Layers that undo each other: the product of their norms is 10^30, and the network is the identity and a head."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), *[nn.Linear(48, 48, bias=False) for _ in range(6)], nn.GELU(), nn.Linear(48, 5))
    scale = torch.cat([torch.full((24,), 1e5), torch.full((24,), 1e-5)])
    with torch.no_grad():
        for place, layer in enumerate(net[1:7]):
            layer.weight.copy_(torch.diag(scale if place % 2 else 1 / scale))
    return model_of(net)


def images(count: int = 6) -> torch.Tensor:
    return torch.rand(count, *SIZE, generator=torch.Generator().manual_seed(1))


def test_the_limit_of_a_linear_network_is_its_distance_to_the_next_class():
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    model, pixels = model_of(net), images().double()
    logits = model(pixels)
    predicted = logits.argmax(1)
    weight = net[1].weight.detach().double()
    for limit, row, y in zip(first_order_limit(model, pixels, predicted), logits, predicted.tolist(), strict=True):
        exact = min((row[y] - row[j]) / (weight[y] - weight[j]).norm() for j in range(3) if j != y)
        assert limit.item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize("steps", [torch.detach, lambda x: 0 * x], ids=["detached", "zero"])
def test_a_network_without_a_gradient_has_no_limit(steps):
    net = Function(lambda x: steps(x).flatten(1)[:, :2])
    assert first_order_limit(model_of(net), images().double(), torch.zeros(6, dtype=torch.long)).isinf().all()


@pytest.mark.parametrize("method", [name for name in METHODS if name != "staged"])
def test_no_method_certifies_beyond_the_first_order_limit(method):
    model, pixels = curved(2), images()
    result = Certifier(model, 0.01, method).run(pixels)
    limit = first_order_limit(model, pixels.double(), result.predicted)
    assert (result.radius > 0).any()
    assert (result.radius <= limit * (1 + 1e-9)).all()


def test_an_image_beyond_its_limit_gets_the_cheap_methods_and_the_reason():
    model, pixels = curved(), images()
    limits = Certifier(model, 1e-6).run(pixels).limit.sort().values
    eps = (limits[2] * limits[3]).sqrt().item()
    result = Certifier(model, eps).run(pixels)
    beyond = result.limit <= eps
    assert beyond.sum() == 3
    assert {name for name, there in zip(result.method, beyond.tolist(), strict=True) if there} <= {"global", "gloro"}
    assert all((reason == "first-order limit") == there for reason, there in zip(result.reason, beyond, strict=True))
    assert all((reason == "") == sure for reason, sure in zip(result.reason, result.certified.tolist(), strict=True))


def test_reasons_are_in_the_rows(tmp_path):
    result = lipcert.certify(curved(), images(), eps=6.0)
    row = json.loads(result.save(tmp_path / "r.jsonl").read_text().splitlines()[0])
    assert row["reason"] == "first-order limit"
    assert row["limit"] == result.limit[0].item() < 6.0


@pytest.mark.parametrize(
    ("tried", "known"),
    [(True, "neither a certificate nor an adversarial example within 0.5"), (False, "no certificate at 0.5")],
)
def test_methods_that_were_skipped_are_named_beside_what_was_tried(tried, known):
    rows = [
        {"reason": reason, "certified": not reason, "correct": False}
        for reason in ("skipped: local", "", "attacked", "misclassified")
    ]
    assert _why_not(SimpleNamespace(rows=rows, labelled=True, attacked=tried), "0.5") == [
        ("certified, misclassified", "1"),
        (
            "not certified",
            f"1: {known} (not tried: local)",
        ),
        ("not certified", "1: adversarial example found within 0.5"),
        ("not certified", "1: misclassified, so only the global methods were tried"),
    ]


def test_attacked_images_have_that_reason():
    broken, beyond = torch.tensor([True, False, False, False]), torch.tensor([False, False, True, False])
    screening = Screening(None, broken, beyond, torch.zeros(4, dtype=torch.bool))
    assert screening.ruled_out.tolist() == [True, False, True, False]
    reasons = screening.reasons(torch.tensor([False, False, False, True]), {"local": "too slow"})
    assert reasons == ("attacked", "skipped: local", "first-order limit", "")


def test_misclassified_images_get_the_cheap_methods_and_the_reason():
    model, pixels = curved(), images()
    known = Certifier(model, 1e-6).run(pixels)
    anchored = Certifier(model, 1e-6, "anchored").run(pixels)
    cheap = Certifier(model, 1e-6, "gloro").run(pixels)
    eps = (anchored.radius * cheap.radius).sqrt().max().item()
    at_eps = Certifier(model, eps)
    sure = at_eps.run(pixels).certified
    assert sure.any()
    labels = known.predicted.clone()
    wrong = int(sure.nonzero()[0, 0])
    labels[wrong] = (labels[wrong] + 1) % 5
    result = at_eps.run(pixels, labels)
    assert result.method[wrong] in ("global", "gloro")
    assert result.reason[wrong] == "misclassified"
    others = labels == known.predicted
    assert torch.equal(result.certified[others], sure[others])
    assert torch.equal(result.radius[wrong], cheap.radius[wrong])
    assert Certifier(model, eps, "anchored").run(pixels, labels).radius[wrong] > cheap.radius[wrong]


def test_a_network_whose_bound_is_too_loose_is_left_to_the_cheap_methods():
    model = loose()
    log10 = lipcert.lipschitz(model).log10
    assert log10 > LOOSE
    assert "10^" in too_loose(model, log10, 0.1)
    assert not too_loose(model, log10, 1e-4), "tiny ε may be reached"
    assert unreached(LOOSE) == math.inf > unreached(LOOSE + 0.1) > unreached(30.0) > 1e-4
    assert not too_loose(curved(), lipcert.lipschitz(curved()).log10, 0.1)
    staged = Certifier(model, 0.01)
    assert "loose" in staged.skipped["anchored"]
    assert set(staged.methods) == {"global", "gloro"}
    result = staged.run(images())
    assert (result.radius == 0).all(), "what is negligible is not examined for rounding"
    assert result.limit is None, "the global bound decides, so gradients are not asked for"
    assert result.reason == (f"skipped: {', '.join(staged.skipped)}",) * 6
    alone, seen = Certifier(model, 0.01, "gloro", dtype="float32"), []
    sound = alone.nominal.sound
    alone.nominal.sound = lambda some, *rest: (seen.append(len(some)), sound(some, *rest))[1]
    assert (alone.run(images()).radius == 0).all()
    assert seen == [0]
    assert "anchored" in Certifier(model, 0.01, "anchored").methods, "a method that is asked for is run"


def test_scaled_logits_do_not_make_a_network_loose():
    model = curved()
    with torch.no_grad():
        model.net[-1].weight.mul_(1e13)
        model.net[-1].bias.mul_(1e13)
    assert not too_loose(model, lipcert.lipschitz(model).log10, 0.1)


def test_methods_beyond_the_time_are_skipped_with_an_estimate():
    model = model_of(nn.Sequential(nn.Flatten(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5)))
    assert not Certifier(model, 0.01).skipped
    reason = Certifier(model, 0.01, time=1e-9).skipped["local"]
    assert reason.startswith("it would take about")


@pytest.mark.parametrize("time", [0, -1.0, math.inf, math.nan, "soon"])
def test_a_time_that_means_nothing(time):
    with pytest.raises(lipcert.errors.InputError, match="time must be a positive number"):
        Certifier(curved(), 0.01, time=time)


def test_triage_counts_what_it_says():
    model = lipcert.load("bundled")
    bundled = open_images(None, model)
    found = triage(model, bundled, 36 / 255)
    assert found.images == 8
    assert 0 <= found.correct <= 8
    assert found.limits == sorted(found.limits)
    assert found.reachable == sum(limit > 36 / 255 for limit in found.limits)


def test_the_screen_names_no_limit_where_there_is_none(capsys):
    model = curved()
    with torch.no_grad():
        model.net[-1].weight.zero_()
    show_triage(model, CertifySettings("1/255"), open_images(None, model))
    said = capsys.readouterr().err
    assert "no gradient, so no first-order limit" in said
    assert "nfinity" not in said


def test_sample_images_are_drawn_for_any_size():
    pixels = sample_images(3, 20, 31)
    assert pixels.shape == (SAMPLES, 3, 20, 31)
    assert pixels.dtype == torch.uint8
    assert torch.equal(pixels, sample_images(3, 20, 31))
    assert (pixels.double().flatten(1).std(1) > 20).all()
    drawn = open_images(None, curved())
    assert (drawn.labelled, drawn.total) == (False, SAMPLES)
    assert "sample images" in drawn.note


LISTS = words_of({"classes": None, "labels": "l.csv"})
KNOWN = {
    "a pretrained network": Status(["resnet18"], log10=40.0),
    "in front of a denoiser": Status(["resnet18", "--denoiser", "dct"], log10=40.0, denoised=True),
    "labels from a file": Status(["resnet18"], log10=40.0, data="d", lists=LISTS),
    "one channel": Status(["m.safetensors"], 1, log10=40.0),
    "surgery helped": Status(["m.safetensors"], log10=8.0, data="TEST", train="my images"),
    "another function": Status(["m.safetensors"], log10=8.0, data="my images", original=["deit3"]),
    "trained": Status(["m.safetensors"], log10=8.0, data="TEST", trained=True),
    "tight": Status(["digits-vit"], 1, log10=3.0),
    "converted": Status(["m.safetensors"], log10=40.0, data="d", original=["resnet18"]),
    "converted from a file": Status(["m.safetensors"], original=["vit", "--checkpoint", "w.pth"]),
    "no bound": Status(["m.safetensors"]),
    "certified": Status(["m.safetensors"], log10=3.0, images=8, finished=True, rows=Path("r.jsonl")),
    "nothing certified": Status(["m.safetensors"], log10=3.0, images=8, rows=Path("r.jsonl")),
}


SUGGESTED = {f"{name} {i}": (known, advice.command) for name, known in KNOWN.items()
             for i, advice in enumerate((advise(known), *advise(known).others))}  # fmt: skip


@pytest.mark.parametrize(("known", "command"), SUGGESTED.values(), ids=SUGGESTED)
def test_suggested_commands_can_be_typed(known, command):
    words = shlex.split(command)
    assert words[0] == "lipcert"
    group = get_command(app)
    group.get_command(Context(group), words[1]).make_context(words[1], words[2:])  # refuses what it does not know
    denoisers = words.count("--denoiser")
    assert denoisers == (1 if "smoothing" in words and known.channels == 3 else denoisers and 1)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext", "test_efficientnet"])
def test_weights_before_training_are_noticed(name):
    net = timm.create_model(name, num_classes=3)
    given = SimpleNamespace(no_pretrained=False, checkpoint="w.pt")
    assert untrained(net, given)
    for part in net.modules():
        for parameter in part.parameters(recurse=False) if "Norm" in type(part).__name__ else ():
            parameter.data.uniform_()
    assert not untrained(net, given)
    assert untrained(net, SimpleNamespace(no_pretrained=True, checkpoint=None))


# Of torchrun, of benchmarks.papers, of timm's scripts, whose names are refused with ours, and a property of CSS.
FOREIGN = {"--nproc-per-node", "--nnodes", "--rdzv-endpoint", "--paper", "--table", "--scale", "--num-classes",
           "--img-size", "--in-chans", "--pretrained", "--page", "--orphan"}  # fmt: skip


def test_every_option_that_a_message_or_a_page_names_exists():
    group = get_command(app)
    commands = [group, *(group.get_command(Context(group), name) for name in group.list_commands(Context(group)))]
    known = {name for one in commands for option in one.params for name in (*option.opts, *option.secondary_opts)}
    root = Path(__file__).parent.parent
    texts = [path.read_text() for path in (root / "README.md", *root.glob("docs/**/*.md"))]
    for path in (*root.glob("lipcert/**/*.py"), *root.glob("cli/*.py")):
        constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        texts += [value for value in constants if isinstance(value, str)]
    named = {name for text in texts for name in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)}
    assert named - FOREIGN <= known | {"--help"}


def test_advice_leads_to_a_certificate_and_not_in_a_circle():
    """From a loose bound to smoothing, from a medium one to training and then to certify, from certify to a report."""
    assert "--method smoothing" in advise(KNOWN["a pretrained network"]).command
    assert "--data d --labels l.csv --eps" in advise(KNOWN["labels from a file"]).command
    assert advise(KNOWN["surgery helped"]).command.startswith("lipcert finetune m.safetensors --data 'my images'")
    assert advise(KNOWN["trained"]).command.startswith("lipcert certify m.safetensors")
    assert all(command.count("--eps") <= 1 for _, command in SUGGESTED.values())
    assert advise(KNOWN["tight"]).command == "lipcert certify digits-vit --eps 36/255"
    assert advise(KNOWN["certified"]).command == "lipcert report r.jsonl --html r.html"
    assert advise(KNOWN["nothing certified"]).command == "lipcert report r.jsonl --html r.html"
    converted = advise(KNOWN["converted"])
    assert converted.command == "lipcert finetune m.safetensors --data TRAIN --eps 36/255 --teacher resnet18"
    assert (
        advise(KNOWN["another function"]).reason == "the new network is another function: train it before certifying it"
    )
    assert not advise(KNOWN["another function"]).others
    assert [one.command.split()[:3] for one in converted.others] == [["lipcert", "certify", "resnet18"]]
    assert "--teacher" not in advise(KNOWN["converted from a file"]).command
    assert "--teacher" not in advise(replace(KNOWN["another function"], original=[__file__])).command
    random = advise(replace(KNOWN["converted"], random=True)).facts
    assert [name for name, _ in random] == ["weights"]


@pytest.mark.parametrize(
    ("seconds", "limit", "time"), [(0.001, 100, "1 minute "), (0.05, 50, "10 min"), (0.2, 10, "8 min")]
)
def test_the_advised_images_fit_ten_minutes_of_this_machine(seconds, limit, time):
    asked: list[str | None] = []
    advice = advise(Status(["vit"], log10=40.0, draw=lambda denoiser: asked.append(denoiser) or seconds))
    assert f"--limit {limit} --time-budget 10m" in advice.command
    assert f"in about {time}" in advice.reason
    assert asked == ["natural"]


@pytest.mark.parametrize(
    ("total", "words"),
    [(8, "0.25 --limit 8"), (9, "auto --limit 1"), (50, "auto --limit 25"), (120, "auto --limit 72")],
)
def test_the_advised_images_leave_some_for_the_choice_of_sigma(total, words):
    assert f"--sigma {words} " in advise(Status(["vit"], log10=40.0, data="val", total=total)).command


@pytest.mark.parametrize("denoised", [[], ["--denoiser", "dct"]])
def test_a_network_to_be_taught_gets_the_classes_of_the_teacher_and_a_file_of_it(denoised):
    words = ["vit", "--checkpoint", "w.pth", *denoised]
    taught = advise(Status(words, classes=lambda: 7, log10=40.0, denoised=bool(denoised))).others[1]
    assert "--model-args num_classes=7 " in taught.command
    assert taught.reason.endswith("; lipcert convert vit --checkpoint w.pth --attention keep writes ARTIFACT")


def test_nothing_is_trained_on_the_images_that_were_certified():
    model = ["vit_base_patch16_224", "--checkpoint", "w.pth"]
    found = advise(Status(model, log10=40.0, data="val", lists=LISTS, images=8, rows=Path("r.jsonl")))
    assert "--data val --labels l.csv" in found.command
    assert [("--data TRAIN --eps" in other.command, "val" in other.command) for other in found.others] == [
        (True, False)
    ] * 2
    assert found.others[1].command.endswith("--teacher ARTIFACT")  # --teacher takes no --checkpoint


def test_certify_on_a_network_without_data_says_what_it_can():
    small = {"img_size": 32, "embed_dim": 24, "depth": 1, "num_classes": 4}
    lipcert.save(lipcert.load("vit_tiny_patch16_224", pretrained=False, **small), "net.safetensors")
    done = run("certify", "net.safetensors", "--eps", "36/255", "--limit", "2")
    assert "sample images" in done.stderr
    assert "first-order limit" in done.stderr
    assert "next\t" in done.stdout
