"""Loading: every source a user may name, and every way it may be wrong, in one line."""

import copy
import http.server
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub import constants as hub_constants
from modules import refusal
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torchvision import transforms
from torchvision.transforms import v2

import lipcert
from lipcert.errors import InputError, LipcertError, LoadError
from lipcert.inputs import timm_networks as _timm
from lipcert.inputs.artifact import save
from lipcert.inputs.loading import load, number_of_classes
from lipcert.inputs.sources import Source

TINY = {"img_size": 32, "patch_size": 8, "num_classes": 10, "depth": 1}


@pytest.fixture
def tiny_net():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **TINY)


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """The hub does not answer and its cache is empty."""
    monkeypatch.setattr(_timm, "hub_answers", lambda: False)
    return tmp_path / "cache"


def fails(error: type[LipcertError], *expected: str, **arguments) -> str:
    """Loads what must not load; returns the one line."""
    source = arguments.pop("source")
    with refusal(*expected, kind=error) as caught:
        load(source, **arguments)
    return str(caught.value)


def test_timm_name_with_arguments():
    model = load("vit_tiny_patch16_224", pretrained=False, **TINY)
    assert model.input_size == (3, 32, 32)
    assert number_of_classes(model) == 10
    assert model.mean.flatten().tolist() == [0.5] * 3
    assert model.source == {"name": "vit_tiny_patch16_224", "arguments": TINY}
    assert model.data_config["crop_pct"] == 0.9
    assert not any(module.training for module in model.modules())


def test_normalisation_is_stage_zero():
    model = load("test_resnet", pretrained=False)
    images = torch.rand(2, *model.input_size)
    mean, std = (torch.tensor(model.net.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(model(images), model.net((images - mean) / std))


def test_pixels_from_the_caller_override_the_configuration():
    pixels = {"mean": (0.0, 0.1, 0.2), "std": (1.0, 0.5, 0.25), "input_size": (3, 64, 64)}
    model = load("test_resnet", pretrained=False, **pixels)
    assert model.input_size == (3, 64, 64)
    torch.testing.assert_close(model.mean.flatten(), torch.tensor(pixels["mean"]))
    torch.testing.assert_close(model.std.flatten(), torch.tensor(pixels["std"]))


def test_one_channel_takes_a_normalisation_that_is_the_same_for_all():
    model = load("test_vit", pretrained=False, in_chans=1, img_size=32)
    assert model.input_size == (1, 32, 32)
    assert model.mean.flatten().tolist() == [0.5]


def test_file_that_names_its_architecture(tiny_net, tmp_path):
    state = tiny_net.state_dict()
    safetensors.torch.save_file(state, tmp_path / "w.safetensors", metadata={"architecture": "vit_tiny_patch16_224"})
    torch.save({"arch": "vit_tiny_patch16_224", "state_dict": state}, tmp_path / "w.pth")
    for file in ("w.safetensors", "w.pth"):
        assert_same_weights(load(tmp_path / file, **TINY).net, tiny_net)


def test_file_without_an_architecture_asks_for_the_name(tiny_net, tmp_path):
    torch.save(tiny_net.state_dict(), tmp_path / "w.pth")
    fails(LoadError, "w.pth", "checkpoint=", source=tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("recorded", "says"),
    [
        ({"arch": "ResNet18"}, "its architecture is ResNet18, which timm does not have (did you mean resnet18 or "),
        ({"args": {"model": "my_network"}}, "its architecture is my_network, which timm does not have; give the timm"),
        ({"hyper_parameters": {"model_name": ""}, "arch": 18}, "does not say which architecture"),
    ],
)
def test_file_that_names_an_architecture_of_another_library(tiny_net, tmp_path, recorded, says):
    torch.save({**recorded, "state_dict": tiny_net.state_dict()}, tmp_path / "w.pth")
    fails(LoadError, "w.pth", says, "checkpoint=", source=tmp_path / "w.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load("vit_tiny_patch16_224", checkpoint=tmp_path / "w.pth", **TINY)


def test_module_with_pixels():
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    model = load(net, mean=(0, 0, 0), std=(1, 1, 1), input_size=(3, 4, 4))
    assert model.net is net
    assert model.source == {}
    assert number_of_classes(model) == 5


def test_timm_module_brings_its_pixels(tiny_net):
    model = load(tiny_net)
    assert model.input_size == (3, 32, 32)
    assert model.std.flatten().tolist() == [0.5] * 3


def test_module_without_pixels_says_what_is_missing():
    fails(InputError, "mean=", "std=", "input_size=", source=nn.Linear(3, 2))
    fails(InputError, "std=", source=nn.Linear(3, 2), mean=(0,), input_size=(1, 1, 3))
    fails(InputError, "num_classes", source=nn.Linear(3, 2), num_classes=3)
    fails(InputError, "checkpoint is a file, got dict; save", source="test_vit", checkpoint={})


@pytest.mark.parametrize("wrong", [{"mean": "0.5"}, {"std": -1}, {"input_size": 32}, {"features": 128}])
def test_arguments_of_another_kind(wrong):
    fails(InputError, next(iter(wrong)), source="test_vit", pretrained=False, **wrong)


def test_one_mean_is_that_of_all_channels():
    model = load("test_vit", pretrained=False, mean=0.5, std=0.25)
    assert model.mean.flatten().tolist() == [0.5] * 3
    assert model.std.flatten().tolist() == [0.25] * 3


def test_means_in_every_form():
    for shape in ((3,), (3, 1, 1), (1, 3, 1, 1)):
        mean, std = torch.tensor([0.1, 0.2, 0.3]).view(shape), torch.full(shape, 0.25)
        for given in (
            {"mean": mean, "std": std},
            {"mean": mean.numpy(), "std": std.numpy()},
            {"mean": mean, "std": 0.25},
        ):
            model = load("test_vit", pretrained=False, input_size=torch.Size((3, 160, 160)), **given)
            assert model.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
            assert model.std.flatten().tolist() == [0.25] * 3


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".tar", ".ckpt"])
def test_pickle_is_never_executed(tmp_path, suffix):
    marker = tmp_path / "executed"

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    plain, archive = tmp_path / f"plain{suffix}", tmp_path / f"archive{suffix}"
    plain.write_bytes(pickle.dumps({"state_dict": Attack()}))
    torch.save({"state_dict": Attack()}, archive)
    for file in (plain, archive):
        fails(LoadError, file.name, "never run", source="test_vit", checkpoint=file)
        fails(LoadError, file.name, source=file)
    assert not marker.exists()


def test_weights_that_do_not_fit(tiny_net, tmp_path):
    state = tiny_net.state_dict()
    file = tmp_path / "w.pth"

    def message(changed, **arguments):
        torch.save(changed, file)
        return fails(LoadError, "w.pth", source="vit_tiny_patch16_224", checkpoint=file, **{**TINY, **arguments})

    without = {key: value for key, value in state.items() if key != "head.weight"}
    assert "1 tensor missing (head.weight)" in message(without)
    assert "1 tensor too many (extra)" in message({**state, "extra": torch.zeros(1)})
    assert "head.weight is (10, 192) in the file and (7, 192) in the model" in message(state, num_classes=7)
    assert "12 tensors missing" in message(state, depth=2)
    assert "torch.int64" in message({**state, "head.bias": torch.zeros(10, dtype=torch.int64)})


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_weights_that_are_not_finite(tiny_net, tmp_path, value, kind):
    with torch.no_grad():
        tiny_net.head.weight[3, 5] = value
    torch.save(tiny_net.state_dict(), tmp_path / "w.pth")
    fails(LoadError, "w.pth", kind, "head.weight", source="vit_tiny_patch16_224", checkpoint=tmp_path / "w.pth", **TINY)
    fails(LoadError, kind, "head.weight", source=tiny_net)


def test_unknown_names_suggest_close_ones(tmp_path, monkeypatch):
    (tmp_path / "mine.lipcert.safetensors").touch()
    fails(LoadError, "did you mean mine.lipcert.safetensors", source="mine", pretrained=False)
    fails(LoadError, "did you mean mine.lipcert.safetensors", source="mine.lipcert", pretrained=False)
    fails(LoadError, "vit_tiny_patch16_224", source="vit_tiny_patch16_22", pretrained=False)
    fails(LoadError, "'xyzzy'", source="xyzzy", pretrained=False)
    fails(LoadError, "resnet18.a1_in1k", source="resnet18.banana", pretrained=False)


def test_missing_files(tmp_path):
    fails(LoadError, "there is no file", source="w.safetensors")
    fails(LoadError, "there is no file", source=tmp_path / "sub" / "w")
    fails(LoadError, "there is no file", source="test_vit", checkpoint=tmp_path / "w.pth")
    fails(LoadError, "folder", source=tmp_path)


def test_arguments_that_timm_does_not_take():
    fails(LoadError, "; did you mean num_classes?", source="test_vit", pretrained=False, num_class=3)
    fails(LoadError, "bogus=3", source="test_vit", pretrained=False, bogus=3)
    fails(LoadError, "patch_size='x'", source="test_vit", pretrained=False, patch_size="x")
    fails(InputError, "checkpoint=", source="test_vit", pretrained=False, checkpoint_path="w.pth")


def test_networks_without_logits():
    fails(InputError, "num_classes", source="test_vit", pretrained=False, num_classes=0)
    fails(InputError, "num_classes=-1", source="test_vit", pretrained=False, num_classes=-1)
    fails(InputError, "num_classes", source=timm.create_model("test_resnet", num_classes=0))
    fails(InputError, "list", source="test_resnet", pretrained=False, features_only=True)
    conv = nn.Conv2d(3, 4, 3)
    fails(InputError, "(1, 4, 6, 6)", source=conv, mean=(0,) * 3, std=(1,) * 3, input_size=(3, 8, 8))


def test_images_that_the_network_does_not_take():
    fails(InputError, "(3, 50, 50)", "img_size", source="test_vit", pretrained=False, input_size=(3, 50, 50))


def test_no_network_is_one_line(no_hub, capfd):
    for name in ("test_vit", "test_resnet.r160_in1k"):
        message = fails(LoadError, "no network", "checkpoint=", source=name, cache_dir=str(no_hub))
        assert "pretrained=False" not in message  # there is nothing to certify in random weights
    message = fails(LoadError, "no network", source="hf-hub:nobody/nothing", cache_dir=str(no_hub))
    assert "pretrained=False" not in message
    assert "Retry" not in "".join(capfd.readouterr())


def test_certificates_that_are_not_there_are_named(monkeypatch, tmp_path):
    file, lost = (
        tmp_path / "corp.pem",
        FileNotFoundError(2, "No such file or directory"),
    )  # as ssl says it, without a name
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    assert f"SSL_CERT_FILE names {file}, which is not there" in _timm._explain("test_vit", {}, lost)
    assert "SSL_CERT_FILE" not in _timm._explain("test_vit", {}, FileNotFoundError(2, "No such file or directory", "w"))
    file.touch()
    assert "SSL_CERT_FILE" not in _timm._explain("test_vit", {}, lost)


@pytest.mark.parametrize("answers", [True, False])
def test_hub_client_is_offline_only_where_the_hub_does_not_answer(monkeypatch, answers):
    monkeypatch.setattr(_timm, "hub_answers", lambda: answers)
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    with _timm._hub():
        assert hub_constants.HF_HUB_OFFLINE is not answers
    assert hub_constants.HF_HUB_OFFLINE is False


def test_no_weights_for_a_name(no_hub):
    trained = {name.partition(".")[0] for name in timm.list_models(pretrained=True)}
    untrained = next(name for name in timm.list_models("resnet*") + timm.list_models("vit*") if name not in trained)
    fails(LoadError, "no pretrained weights", untrained, source=untrained)


def test_whether_thehub_answers(monkeypatch):
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(hub_constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert _timm.hub_answers()
        server.shutdown()
        thread.join()
    assert not _timm.hub_answers()


def hub_snapshot(folder: Path, net: nn.Module, **more) -> None:
    """A model as the hub stores it, with arguments that differ from the architecture's own."""
    folder.mkdir(parents=True)
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 10,
        "model_args": {"patch_size": 8, "depth": 1},
        "pretrained_cfg": {
            "num_classes": 10,
            "input_size": [3, 32, 32],
            "fixed_input_size": True,
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
            "crop_pct": 1.0,
            "interpolation": "bilinear",
            "classifier": "head",
            "first_conv": "patch_embed.proj",
        },
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(net.state_dict(), folder / "model.safetensors")


def test_hub_model_from_the_cache_without_network(no_hub, tiny_net, tmp_path):
    repository = no_hub / "models--someone--tiny"
    hub_snapshot(repository / "snapshots" / "0123", tiny_net)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    model = load("hf-hub:someone/tiny", cache_dir=str(no_hub))
    assert_same_weights(model.net, tiny_net)
    assert model.input_size == (3, 32, 32)
    torch.testing.assert_close(model.mean.flatten(), torch.tensor([0.1, 0.2, 0.3]))
    assert model.data_config["interpolation"] == "bilinear"
    save(model, tmp_path / "a.safetensors")
    assert_same_weights(load(tmp_path / "a.safetensors").net, tiny_net)


def test_folder_that_timm_saved(tiny_net, tmp_path):
    hub_snapshot(tmp_path / "saved", tiny_net)
    model = load(f"local-dir:{tmp_path / 'saved'}")
    assert_same_weights(model.net, tiny_net)
    assert model.source["name"] == "vit_tiny_patch16_224"
    assert model.class_names == ()


@pytest.mark.parametrize("kind", ["list", "mapping", "too few"])
def test_names_of_classes_are_those_of_a_hub_models_configuration(tiny_net, tmp_path, kind):
    """But not where other weights are given, which may be for other classes."""
    names = [*"jhgfedcbai"] if kind != "too few" else ["a", "b"]
    hub_snapshot(tmp_path / "saved", tiny_net, label_names=dict(enumerate(names)) if kind == "mapping" else names)
    name = f"local-dir:{tmp_path / 'saved'}"
    assert load(name).class_names == load(load(name).net).class_names == (() if kind == "too few" else tuple(names))
    torch.save(tiny_net.state_dict(), tmp_path / "w.pth")
    assert load(name, checkpoint=tmp_path / "w.pth").class_names == ()


def test_artifacts_are_complete(tmp_path):
    file = tmp_path / "a.safetensors"
    save(load("vit_tiny_patch16_224", pretrained=False, **TINY), file)
    fails(InputError, "pretrained=False", source=file, pretrained=False)
    fails(InputError, "checkpoint=", source=file, checkpoint="w.pth")
    fails(InputError, "num_classes", source=file, num_classes=3)
    fails(InputError, "mean", source=file, mean=(0, 0, 0))
    fails(InputError, "complete", source="vit_tiny_patch16_224", checkpoint=file)


def test_resolve_takes_the_newest_artifact():
    model = load("vit_tiny_patch16_224", pretrained=False, **TINY)
    for age, name in enumerate(["new.safetensors", "old.safetensors"]):
        save(model, name)
        os.utime(name, (1e9 - age, 1e9 - age))
    safetensors.torch.save_file({"x": torch.zeros(1)}, "foreign.safetensors")
    Path("damaged.safetensors").write_bytes(b"damaged")
    assert Source.of(None) == Source("new.safetensors", "new.safetensors", file=True, chosen=True)
    assert Source.of("resnet18") == Source("resnet18", "resnet18")
    assert Source.of("bundled") == Source.of("digits-vit")
    assert load(None).source != model.source


def test_resolve_falls_back_to_the_bundled_checkpoint(tmp_path, monkeypatch):
    bundled = tmp_path / "elsewhere" / "bundled.safetensors"
    monkeypatch.setattr("lipcert.inputs.sources.path_of", {"digits-vit": bundled}.get)
    with pytest.raises(LoadError, match="no model named"):
        Source.of(None)
    bundled.parent.mkdir()
    save(load("vit_tiny_patch16_224", pretrained=False, **TINY), bundled)
    assert Source.of(None).name == str(bundled)


def assert_same_weights(net: nn.Module, expected: nn.Module) -> None:
    state, wanted = net.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[key], wanted[key]) for key in state)


def test_grey_images_get_the_mean_over_the_channels():
    model = load("resnet10t", pretrained=False, in_chans=1, num_classes=3)
    assert model.mean.item() == pytest.approx((0.485 + 0.456 + 0.406) / 3)
    assert model.std.item() == pytest.approx((0.229 + 0.224 + 0.225) / 3)
    assert model.input_size[0] == 1


class _Rest(nn.Module):
    """A small classifier that ends in other code."""

    def __init__(self, rest):
        super().__init__()
        self.first, self.rest = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), rest

    def forward(self, x):
        return self.rest(self.first(x))


@torch.jit.script
def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (lambda x: x.view(8, -1), "take the size of a batch from its images"),
        (nn.LogSoftmax(1), "leave it out at the end of a network"),
        (_scripted, "torch.jit.script"),
    ],
)
def test_code_that_others_write_is_refused_with_what_to_do(rest, message):
    with pytest.raises(LipcertError, match=message):
        lipcert.lipschitz(load(_Rest(rest).eval(), mean=0.0, std=1.0, input_size=(3, 2, 2)))


def test_the_channels_of_an_image_are_not_those_behind_a_space_to_depth(tmp_path):
    small = {"num_classes": 2, "layers": (1, 1, 1, 1)}
    assert load("tresnet_m", pretrained=False, **small).input_size == (3, 224, 224)
    save(load(timm.create_model("tresnet_m", **small).eval()), tmp_path / "t.safetensors", arguments=small)
    assert load(tmp_path / "t.safetensors").input_size == (3, 224, 224)


def test_a_hub_id_without_its_prefix_is_recognised():
    with pytest.raises(LoadError, match="is given as hf-hub:timm/resnet18.a1_in1k"):
        load("timm/resnet18.a1_in1k")


class Iterated(nn.Module):
    """Divides a weight by an estimate of its norm that a power iteration improves at every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("start", torch.ones(12))

    def forward(self, weight):
        start = nn.functional.normalize(weight.T @ (weight @ self.start), dim=0)
        self.start.copy_(start.detach())
        return weight / (weight @ start).norm()


def test_weights_that_every_call_computes_anew_can_be_frozen():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
    parametrize.register_parametrization(net[1], "weight", Iterated())
    pixels = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "input_size": (3, 2, 2)}
    with pytest.raises(LipcertError, match="freeze=True"):
        lipcert.lipschitz(load(net, **pixels))
    before = net[1].parametrizations.weight[0].start.clone()
    model = load(net, freeze=True, **pixels)
    images = torch.rand(4, 3, 2, 2)
    assert type(model.net[1]) is nn.Linear
    assert torch.equal(model(images), model(images))
    norm = torch.linalg.matrix_norm(model.net[1].weight.double(), 2).item()
    assert norm <= lipcert.lipschitz(model).value <= norm * (1 + 1e-5)
    assert (lipcert.certify(model, images, eps=0.01).radius > 0).all()
    # the module of the caller is as it was, and still trains
    assert torch.equal(net[1].parametrizations.weight[0].start, before)
    assert torch.allclose(net[1].weight, model.net[1].weight, atol=0.1)
    assert net[1].weight.requires_grad
    fails(InputError, "freeze", "True or False", source=net, freeze="true", **pixels)


def test_modules_as_people_have_them():
    """What is left on, not filled, or in front: understood, or refused by name in one line."""
    size, pixels = (3, 32, 32), torch.rand(2, 3, 32, 32)
    torch.manual_seed(0)
    net = timm.create_model("test_vit", img_size=32, num_classes=3).eval()
    given = {"mean": (0,) * 3, "std": (1,) * 3, "input_size": size}
    for normalize in (transforms.Normalize, v2.Normalize):
        front = normalize((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
        model = load(nn.Sequential(front, net), input_size=size)
        torch.testing.assert_close(model(pixels), net(front(pixels)))
        assert torch.isfinite(lipcert.certify(model, pixels, eps=1e-6, method="gloro").radius).all()
        with pytest.raises(InputError, match="begins with a normalisation"):
            load(nn.Sequential(front, net), input_size=size, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
        with pytest.raises(InputError, match="0.0 is torchvision's Normalize; remove it"):
            load(nn.Sequential(nn.Sequential(front, net)), **given)
    net.set_grad_checkpointing()
    assert torch.isfinite(lipcert.certify(net, pixels, eps=1e-6, method="gloro").radius).all()

    class MadeAnew(nn.Flatten):
        """As layers of einops, of which a copy is a new one, in training mode."""

        def __getstate__(self):
            return {}

        def __setstate__(self, state):
            self.__init__()

    model = load(nn.Sequential(MadeAnew(), nn.Linear(3 * 32 * 32, 3)).eval(), **given)
    for dtype in ("real", "float32"):
        assert torch.isfinite(lipcert.certify(model, pixels, eps=1e-6, method="gloro", dtype=dtype).radius).all()

    class Output(nn.Module):
        def forward(self, x):
            return {"logits": x.mean((2, 3))}

    with torch.device("meta"):
        meta = timm.create_model("test_vit", img_size=32, num_classes=3)
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    for module, says in ((Output(), "returns a dict"), (meta, "off the device meta"), (lazy, "call the module once")):
        with pytest.raises(InputError, match=says):
            load(module, **given)
    for source in (net.state_dict(), {"state_dict": net.state_dict()}, [net], b"x"):
        with pytest.raises(InputError) as caught:
            load(source)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("vit_tiny_patch16_224", False),
        ("vit_tiny_patch16_224.augreg_in21k", False),
        ("hf-hub:timm/vit_tiny_patch16_224.augreg_in21k", False),
        ("vit_tiny_patch16_224.lipcert.safetensors", True),
        ("./vit_tiny_patch16_224.lipcert.safetensors", True),
        ("other/vit_tiny_patch16_224.pth", True),
        ("vit_tiny_patch16_224.mine", True),  # timm takes it for a tag
        ("resnet18", False),  # beside a folder of that name
        ("sharded", True),
    ],
)
def test_a_name_is_a_file_or_not_before_timm_sees_it(text, file):
    for folder in ("other", "resnet18", "sharded"):
        Path(folder).mkdir()
    for name in (
        "vit_tiny_patch16_224.lipcert.safetensors",
        "other/vit_tiny_patch16_224.pth",
        "vit_tiny_patch16_224.mine",
    ):
        Path(name).touch()
    assert Source.of(text) == Source(text, text, file=file)


def test_names_are_checked_without_torch():
    script = """
        import sys
        from lipcert.errors import LoadError
        from lipcert.inputs.sources import Source
        for name in ("resnet18", "vit_base_patch16_224_in21k", "liresnet_l6w64"):  # the second one is deprecated
            Source.of(name)
        try:
            Source.of("resnet8")
        except LoadError as error:
            print(error)
        assert not {"torch", "timm"} & {*sys.modules}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True)
    assert "timm has no model 'resnet8' (did you mean" in done.stdout


class Calls(nn.Module):
    """A network whose forward calls ``way(net, images)``."""

    def __init__(self, way, net=None):
        super().__init__()
        self.net, self.way = net or nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), way

    def forward(self, x):
        return self.way(self.net, x)


class Output(dict):
    """As outputs of transformers: a mapping with attributes."""

    __getattr__ = dict.get


@pytest.mark.parametrize(
    ("way", "says"),
    [
        (lambda net, x: Output(logits=net(x)), "returns a Output; give a module whose forward returns its logits"),
        (lambda net, x: net(x.to("cuda:7")), r"net \(Calls\) fails: .*; take .cuda\(\) and .to\(device\) out"),
        (lambda net, x: net(torch.cat([x, x], 3)), r"net\.net\.1 \(Linear\) fails: .*give input_size="),
        (lambda net, x: net(x, x), r"net\.net \(Sequential\) fails: .*positional arguments but"),
    ],
)
def test_a_network_that_fails_is_named_with_its_module(way, says):
    with pytest.raises(InputError, match=says):
        load(Calls(way), mean=0.0, std=1.0, input_size=(3, 2, 2))


@pytest.mark.filterwarnings("ignore")
def test_a_network_that_quantises_is_told_so():
    """Not that its types are wrong."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    dynamic = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    aware = copy.deepcopy(net).train()
    aware.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    aware = torch.ao.quantization.prepare_qat(aware)
    aware(torch.rand(2, 3, 2, 2))
    for quantised in (dynamic, aware.eval()):
        model = load(quantised, mean=0.0, std=1.0, input_size=(3, 2, 2))
        with pytest.raises(InputError, match=r"net\.1.* quantises, .*give the network before quantisation"):
            lipcert.certify(model, torch.rand(1, 3, 2, 2), eps=0.1, method="gloro")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kept", [True, False])
def test_reentrant_checkpoints_change_nothing(kept):
    """``torch.autograd.grad`` refuses them; of the user's own training they stay a part."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 3))
    within = Calls(lambda net, x: checkpoint(net, x, use_reentrant=kept), net)
    pixels, given = torch.rand(2, 3, 2, 2), {"mean": 0.5, "std": 0.5, "input_size": (3, 2, 2)}
    radii = [lipcert.certify(load(one, **given), pixels, eps=1e-3).radius for one in (net, within)]
    assert torch.equal(*radii)
    assert radii[0].min() > 0
    assert torch.utils.checkpoint.CheckpointFunction.__module__ == "torch.utils.checkpoint"
