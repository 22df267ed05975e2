"""What a user holds in Python goes in, and what comes out can be looked at and kept."""

import dataclasses
import html
import inspect
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
import typing
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lipcert
from lipcert.bounds import Bound, LayerBound
from lipcert.errors import InputError
from lipcert.inputs.batches import pair_of
from lipcert.inputs.data import open_images
from lipcert.numerics import watched
from lipcert.results import Result, SmoothedResult, read_run
from lipcert.settings import CertifyOptions, CertifySettings
from lipcert.settings import _certify as _settings

GLORO = {"eps": "36/255", "method": "gloro"}
SMOOTHED = {"gloro": {}, "smoothing": {"sigma": 0.1, "samples": 200}}


@pytest.fixture(scope="module")
def model():
    return lipcert.load()


@pytest.fixture(scope="module")
def images(model):
    return torch.stack([image for image, _ in (open_images(None, model)[i] for i in range(5))])


@pytest.fixture(scope="module")
def expected(model, images):
    return lipcert.certify(model, images, torch.arange(5), **GLORO)


class Series(list):
    """As of pandas, after a split: its numbers are those of an index, and not positions."""

    to_list = list.copy

    def __getitem__(self, key):
        raise KeyError(key)

    __iter__ = None


def test_images_and_labels_in_every_form(model, images, expected) -> None:
    labels = torch.arange(5)
    pairs = TensorDataset(images, labels)
    for these in [
        (images.numpy(), [0, 1, 2, 3, 4]),
        (images, Series([0, 1, 2, 3, 4])),
        (images.double(), labels.numpy()),
        (DataLoader(pairs, batch_size=2),),
        ([(images[:3], [0, 1, 2]), (images[3:], np.array([3, 4]))],),
        (list(images), None),
    ]:
        found = lipcert.certify(model, *these, **GLORO)
        torch.testing.assert_close(found.radius, expected.radius, rtol=1e-9, atol=0)  # batches differ in rounding
        assert found.labels is None or torch.equal(found.labels, labels)
    assert found.labels is None


def test_the_model_of_lipschitz_is_checked_as_that_of_certify() -> None:
    for wrong, message in (
        ("digits-vit", "model is a str; make one"),
        (nn.Linear(3, 2), "plain module; wrap it first"),
    ):
        with pytest.raises(InputError, match=message):
            lipcert.lipschitz(wrong)
    net = timm.create_model("test_vit", num_classes=3).eval()
    lipcert.convert(net, attention="l2", norm="project")
    with pytest.warns(UserWarning, match="without its normalisation"):
        assert lipcert.lipschitz(net).value > 0


def test_modes_of_torch_that_are_left_on(model, images, expected) -> None:
    torch.set_default_device("meta")  # as another device, whose tensors do not meet those of the CPU
    try:
        with torch.autograd.set_detect_anomaly(True):
            found = [lipcert.certify(model, images, eps=0.1, method=name).radius for name in ("gloro", "anchored")]
            lipcert.certify(model, images, eps=0.1, method="smoothing", sigma=0.25, samples=50)
            lipcert.SmoothedClassifier(model, 0.25, "dct").predict(images)
            lipcert.lipschitz(model)
            assert torch.is_anomaly_enabled()
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert torch.equal(found[0], expected.radius)


def test_models_in_every_form(model, images, expected) -> None:
    smoothed = lipcert.SmoothedClassifier(model, 0.25)
    for one in (torch.compile(model, backend="eager"), torch.compile(smoothed, backend="eager"), smoothed):
        assert torch.equal(lipcert.certify(one, images, **GLORO).radius, expected.radius)


def test_images_and_labels_in_lists_and_results_by_number(model, images) -> None:
    labels = [0, 1, 2, 3, 4][: len(images)]
    listed = lipcert.certify(model, list(images), labels, **GLORO)
    assert torch.equal(listed.correct, lipcert.certify(model, images, labels, **GLORO).correct)
    assert listed[np.int64(0)] == listed[torch.tensor(0)] == [*listed][0]
    with pytest.raises(InputError, match="different sizes"):
        lipcert.certify(model, [images[0], images[1, :, 1:]], [0, 1], **GLORO)
    for wrong in (slice(2), listed.correct, "0"):
        with pytest.raises(InputError, match="indexed by the number of one image"):
            listed[wrong]
    assert len(lipcert.report([listed, listed]).runs) == 2
    with torch.autocast("cpu", torch.bfloat16):
        under = lipcert.certify(model, images, eps=0.05, method="smoothing", **SMOOTHED["smoothing"])
    outside = lipcert.certify(model, images, eps=0.05, method="smoothing", **SMOOTHED["smoothing"])
    assert under.about["example_logits"] == outside.about["example_logits"]


class _Around(nn.Module):
    """Code of its own around a network, under the names that torch and lipcert use for wrappers."""

    def __init__(self, network):
        super().__init__()
        self._orig_mod = self.network = network
        self.sigma = network.sigma

    def forward(self, x):
        return -2 * self.network(x)


def test_what_looks_like_a_wrapper_is_not_taken_off(model, images, expected) -> None:
    for around in (_Around(model), _Around(lipcert.SmoothedClassifier(model, 0.25).network)):
        with pytest.raises(InputError, match="plain module"):
            lipcert.certify(around, images, **GLORO)
    pixels = {"mean": 0.0, "std": 1.0, "input_size": (3, 8, 8)}
    own = lipcert.certify(_Around(model).eval(), images, **GLORO, **pixels)
    assert not torch.equal(own.predicted, expected.predicted)
    hooked = torch.compile(model, backend="eager")
    hooked.register_forward_hook(lambda *_: _[-1].flip(1))
    with pytest.raises(InputError, match="plain module"):
        lipcert.certify(hooked, images, **GLORO)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["gloro", "smoothing"])
def test_compiled_parts_and_backward_hooks_change_nothing(images, method) -> None:
    """As they are left by a training script and by a library that explains predictions."""
    net, pixels = lipcert.load().net, {"mean": 0.3, "std": 0.4, "input_size": (3, 8, 8)}
    options = {"eps": 0.05, "method": method, **SMOOTHED[method]}
    expected = lipcert.certify(lipcert.load(net, **pixels), images, **options)
    net.blocks[0] = torch.compile(net.blocks[0], backend="eager")
    net.norm.compile(backend="eager")
    net.head.register_full_backward_hook(lambda _module, before, _after: (0 * before[0],))
    assert torch.equal(lipcert.certify(lipcert.load(net, **pixels), images, **options).radius, expected.radius)


def test_networks_are_loaded_in_inference_mode(images) -> None:
    def network() -> lipcert.Model:
        torch.manual_seed(0)
        sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "num_heads": 2, "depth": 1, "num_classes": 10}
        return lipcert.load("vit_tiny_patch16_224", pretrained=False, **sizes)

    with torch.inference_mode():
        inside = lipcert.certify(network(), images[:1] + 0, eps=np.float32(0.01))
    assert type(inside.eps) is float
    assert {*inside.method} == {"anchored"}
    assert torch.equal(inside.radius, lipcert.certify(network(), images[:1], eps=np.float32(0.01)).radius)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"labels": [0, 1, 2, 3, 10]}, "labels must be from 0 to 9, got 0 to 10"),
        ({"labels": [0, 1, 2, 3, -1]}, "got -1 to 3"),
        ({"labels": [0.0, 1, 2, 3, 4]}, "whole numbers"),
        ({"labels": "abcde"}, "whole numbers, got a str"),
        ({"labels": [0, 1]}, r"shape \(5,\)"),
        ({"images": "folder/"}, "images are a path; give tensors"),
        ({"images": TensorDataset(torch.zeros(1, 1, 8, 8))}, "of type TensorDataset; give .* or a DataLoader"),
        ({"images": []}, "there are no images"),
        (
            {"images": np.zeros((5, 8, 8))},
            "the number of channels differs: repeat that of greyscale images",
        ),  # as in MedMNIST
        ({"images": np.zeros((5, 8, 8, 1))}, "the number of channels differs"),
        ({"images": torch.zeros(5, 4, 8, 8)}, "the number of channels differs: .* drop an alpha channel"),
        ({"images": torch.zeros(5, 1, 8, 9)}, "resize them to the model's input"),
        ({"images": torch.zeros(5, 8, 8), "model": "grey"}, r"add the channel by images\[:, None\]"),
        ({"images": torch.zeros(5, 3, 8, 8), "model": "grey"}, "convert to greyscale"),
        ({"images": ["a", "b"]}, "images are a path"),
        ({"images": [torch.zeros(1, 1, 8, 8)], "labels": [0]}, "labels come with the batches"),
        ({"model": None}, "model is a NoneType; make one: lipcert.load"),
        ({"model": torch.nn.Flatten()}, r"lipcert.load\(module, mean=..., std=..., input_size=...\)"),
    ],
)
def test_what_cannot_be_used_is_said(model, images, what, message) -> None:
    given = {"model": model, "images": images, **what}
    if given["model"] == "grey":
        given["model"] = lipcert.load("test_resnet", pretrained=False, in_chans=1, num_classes=10, input_size=(1, 8, 8))
    with pytest.raises(InputError, match=message):
        lipcert.certify(**given, **GLORO)


def test_every_function_takes_a_module_of_timm(tmp_path) -> None:
    net = timm.create_model("test_vit", num_classes=3, img_size=32, patch_size=8)
    pixels = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0])
    lipcert.save(net, tmp_path / "a.safetensors")
    expected = lipcert.certify(lipcert.load(tmp_path / "a.safetensors"), pixels, **GLORO)
    assert torch.equal(lipcert.certify(net, pixels, **GLORO).radius, expected.radius)
    model = lipcert.convert(net, norm="smooth", images=pixels)
    assert isinstance(model, lipcert.Model)
    assert model.net is net
    assert model.recipe[0]["step"] == "convert"
    again = timm.create_model("test_vit", num_classes=3, img_size=32, patch_size=8)
    tuned = lipcert.finetune(again, [(pixels, labels)], loss="ce", epochs=1)
    assert lipcert.constrain(tuned.net, pixels, 0.1, layers="head").recipe[-1]["step"] == "constrain"


REGISTERED = "assert timm.is_model('liresnet_l6w128') and timm.is_model('certvit_cifar10')"
FIRST = (
    f"import timm, lipcert.networks; {REGISTERED}",
    f"import lipcert; lipcert.load; import timm; {REGISTERED}",
    "from lipcert.inputs.sources import architectures; assert 'lipnext_l8w128' in architectures()",
    "import lipcert, timm; assert type(lipcert.convert(timm.create_model('test_vit'))) is lipcert.Model",
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_it_does_not_matter_what_is_imported_first() -> None:
    """Each in a fork of a process that has imported torch and timm, which take seconds, and nothing of lipcert."""
    code = """
        import os, sys, torch, timm
        assert "lipcert" not in sys.modules
        for first in sys.argv[1:]:
            if not (child := os.fork()):
                exec(first)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, first
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), *FIRST], check=True)


def test_a_plain_module_is_named_by_every_function(images) -> None:
    net = torch.nn.Flatten()
    for function, more in (
        (lipcert.convert, ()),
        (lipcert.constrain, (images,)),
        (lipcert.finetune, ([],)),
        (lipcert.save, ("x.safetensors",)),
    ):
        with pytest.raises(InputError, match="model is a plain module; wrap it first"):
            function(net, *more)


def test_a_plain_module_is_certified_with_its_normalisation() -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)).eval()
    images, pixels = torch.rand(4, 3, 2, 2), {"mean": 0.5, "std": 0.25, "input_size": (3, 2, 2)}
    found = lipcert.certify(net, images, **pixels, **GLORO)
    assert torch.equal(found.radius, lipcert.certify(lipcert.load(net, **pixels), images, **GLORO).radius)
    assert found.radius.min() > 0
    with pytest.raises(InputError, match="loaded already"):
        lipcert.certify(lipcert.load(net, **pixels), images, **pixels, **GLORO)
    with pytest.raises(InputError, match="mean"):
        lipcert.certify(net, images, input_size=(3, 2, 2), **GLORO)
    with pytest.raises(InputError, match=r"images.transpose\(0, 3, 1, 2\) of NumPy"):
        lipcert.certify(net, np.zeros((4, 2, 2, 3), np.float32), **pixels, **GLORO)


def test_training_mode_is_named(images) -> None:
    with pytest.raises(InputError, match=r"training mode; call model.eval\(\)"):
        lipcert.certify(lipcert.load().train(), images, **GLORO)


@pytest.mark.parametrize(("module", "said"), [("resnet10t", "conv1.1"), ("test_vit", None)])
def test_a_module_that_differs_in_training_mode_is_put_into_evaluation_mode(module, said) -> None:
    """Not so a vision transformer without dropout, which timm.create_model returns in training mode too."""
    net = timm.create_model(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not lipcert.load(net).training
    lines = [str(one.message) for one in caught if "training mode" in str(one.message)]
    assert len(lines) == (said is not None)
    assert all(f"{said} is a BatchNorm" in line and "model.eval()" in line for line in lines)


def test_eps_may_stand_in_fourth_place(model, images, expected) -> None:
    found = lipcert.certify(model, images, None, "36/255", method="gloro")
    assert torch.equal(found.radius, expected.radius)
    assert "eps" in inspect.signature(lipcert.certify).parameters


def test_a_module_of_the_same_shapes_that_computes_something_else_is_not_saved(tmp_path) -> None:
    net = timm.create_model("test_vit", num_classes=3)
    net.blocks[0].norm1.eps = 0.5
    with pytest.raises(InputError, match="timm builds another network for test_vit"):
        lipcert.save(lipcert.load(net), tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_load_without_a_name_does_not_depend_on_the_folder(model) -> None:
    lipcert.save(lipcert.load("test_vit", pretrained=False), "m.safetensors")
    for found in (lipcert.load(), lipcert.load(None), lipcert.load("bundled")):
        assert found.source == model.source


def test_a_result_is_a_sequence_of_rows(expected) -> None:
    assert isinstance(expected, Result)
    assert len(expected) == 5
    assert [row["radius"] for row in expected] == expected.radius.tolist()
    assert expected[3]["label"] == 3
    assert expected[-1] == list(expected)[-1]
    assert f"certified at 36/255, certified accuracy {100 * expected.certified_accuracy:.1f} %" in repr(expected)
    assert len(repr(expected)) < 200
    shown = expected._repr_html_()
    assert shown.count("<tr>") == 6
    for row, cell in zip(expected, shown.split("<tr>")[2:], strict=True):
        radius = float(cell.split("<td>")[4].split("<")[0])
        assert 0 <= row["radius"] - radius <= 1e-2 * row["radius"]  # three digits


def test_a_result_is_saved_as_the_command_does(tmp_path, model, images, expected) -> None:
    path = expected.save(tmp_path / "new" / "r.jsonl")
    run = read_run(path)
    assert [row["radius"] for row in run.rows] == expected.radius.tolist()
    assert run.summary["counts"]["images"] == 5
    assert run.summary["data"]["labelled"]
    assert run.summary["complete"]
    assert expected.save(path) == path
    assert len(path.read_text().splitlines()) == 5
    with pytest.raises(InputError, match="another eps"):
        lipcert.certify(model, images, torch.arange(5), eps=0.2, method="gloro").save(path)


def test_pandas(expected) -> None:
    pandas = pytest.importorskip("pandas")
    table = expected.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert table["radius"].tolist() == expected.radius.tolist()


def test_a_report_of_results(tmp_path, model, images, expected) -> None:
    report = lipcert.report(expected, html=tmp_path / "r.html")
    assert report.written == [tmp_path / "r.html"]
    assert "certified accuracy at 36/255" in repr(report)
    frame = report._repr_html_()
    assert frame.startswith("<iframe")
    assert "<" not in frame[len("<iframe") : frame.rindex("</iframe>")]  # the page is in quotes
    assert html.unescape(frame).count("<html") == 1
    other = lipcert.certify(model, images, torch.arange(5), eps="36/255", method="global")
    assert "result-2" in repr(lipcert.report(expected, other))
    path = expected.save(tmp_path / "kept.jsonl")
    assert "kept" in repr(lipcert.report(path, other))


def test_a_smoothed_result(tmp_path, model, images) -> None:
    settings = {"eps": 0.1, "method": "smoothing", "sigma": 0.25, "samples": 100}
    found = lipcert.certify(model, DataLoader(images, batch_size=2), **settings)
    assert isinstance(found, SmoothedResult)
    whole = lipcert.certify(model, images, **settings)
    assert torch.equal(found.count, whole.count)
    assert torch.equal(found.radius, whole.radius)
    assert found[0]["holds_for"] == "smoothed(0.25)"
    assert read_run(found.save(tmp_path / "r.jsonl")).smoothed


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_batch_sizes_that_are_none_are_refused(model, images, size) -> None:
    with pytest.raises(InputError, match="batch_size is a number of images"):
        lipcert.certify(model, images, batch_size=size, **GLORO)


@pytest.mark.parametrize("source", ["", 3, True, b""])
def test_load_takes_nothing_else_for_a_name(source) -> None:
    with pytest.raises(InputError, match="a model is a name, a file or a module"):
        lipcert.load(source)


def test_eps_is_no_truth_value(model, images) -> None:
    with pytest.raises(InputError, match="eps must be a positive number"):
        lipcert.certify(model, images, eps=True, method="gloro")


def test_a_result_without_images_shows_itself(model, images) -> None:
    result = lipcert.certify(model, images[:0], torch.arange(0), **GLORO)
    assert repr(result) == "<Result: 0 of 0 certified at 36/255>"
    assert "<table>" in result._repr_html_()


def test_a_result_is_not_saved_in_place_of_a_folder(tmp_path, expected) -> None:
    for folder in (tmp_path, "."):
        with pytest.raises(InputError, match="is a folder; give a file in it"):
            expected.save(folder)


def test_a_bound_prints_itself_in_three_lines(model) -> None:
    bound = lipcert.lipschitz(model)
    lines = repr(bound).splitlines()
    assert len(lines) == 3
    assert float(lines[0].split("at most ")[1].split(",")[0]) >= bound.value
    assert f"{len(bound.layers)} operations in .layers" in lines[2]
    assert bound._repr_html_().count("<tr>") == 1 + len(bound.layers)
    huge = Bound(np.inf, "deterministic", "test", log10=400.123, layers=(LayerBound("a<b", "x", 400.1, 400.1, ""),))
    assert "at most 10^400.13" in repr(huge)
    assert "a&lt;b" in huge._repr_html_()


def test_editors_know_every_setting() -> None:
    known = typing.get_type_hints(CertifyOptions, None, {**vars(_settings), **vars(typing), "Attack": object})
    assert {"eps", *known} == {one.name for one in dataclasses.fields(CertifySettings) if one.init}
    for one in dataclasses.fields(CertifySettings):
        if choices := one.metadata.get("choices"):
            assert [*typing.get_args(known[one.name])] == [*choices]


def test_numbers_of_numpy_reach_the_recipe_as_plain_ones() -> None:
    model = lipcert.load()
    batch = (torch.rand(4, *model.input_size), torch.arange(4))
    lipcert.finetune(model, [batch], eps="36/255", epochs=1, lr=np.float32(1e-4), loss="ce")
    step = model.recipe[-1]
    assert json.loads(json.dumps(step)) == step
    assert step["eps"] >= 36 / 255


def test_threads_at_once_give_the_same_radii_and_leave_torch_as_it_was():
    """Settings of torch are those of the process, so one thread must not restore what another has changed."""
    model, images = lipcert.load(), torch.rand(2, 3, 8, 8)

    def state():
        switches = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
        return *switches, torch._C._get_mkldnn_enabled(), torch.get_num_threads(), torch.is_grad_enabled()

    before = state()
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: lipcert.certify(model, images, eps=1e-3, method="gloro").radius, range(8))]
    assert state() == before
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("method", ["gloro", "smoothing"])
def test_another_thread_may_draw_random_numbers(images, method) -> None:
    """As the other requests of a server do, or a training."""
    ended = threading.Event()

    def draw() -> None:
        while not ended.wait(0.02):
            torch.rand(3)
            random.random()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(draw)
        try:
            for _ in range(9):
                lipcert.certify(lipcert.load(), images, eps=0.05, method=method, **SMOOTHED[method])
        finally:
            ended.set()


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: nn.functional.dropout(torch.ones(9)), random.random])
@pytest.mark.parametrize("first", [0, 1])
def test_a_draw_in_some_passes_is_seen_beside_other_threads(draw, first) -> None:
    """Such as those that print the progress of a command."""
    passes, ended = count(first), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ended.wait)
        try:
            drawn = [watched(lambda: draw() if next(passes) % 2 else None)[1].anew for _ in range(4)]
        finally:
            ended.set()
    assert drawn == [bool((first + run) % 2) for run in range(4)]


ORDERS = st.permutations(range(4))
FLIPPED = st.tuples(*[st.sampled_from([1, -1])] * 4)


@given(
    order=ORDERS,
    flips=FLIPPED,
    kind=st.sampled_from(["<f4", ">f4", "<f8", ">f8", "<f2", ">f2"]),
    seed=st.integers(0, 9),
)
def test_an_array_is_its_numbers(order, flips, kind, seed) -> None:
    """Whatever its strides, their signs and its order of bytes; labels likewise, in a pair as alone."""
    stored = np.random.default_rng(0).random((2, 3, 2, 4)).astype(kind)
    array = stored.transpose(order)[tuple(slice(None, None, step) for step in flips)]
    labels = np.arange(len(array)).astype(f"{kind[0]}i4")[:: flips[0]]
    images, classes = pair_of((array, labels))
    assert images.tolist() == array.tolist() == pair_of(array)[0].tolist()
    assert classes.tolist() == labels.tolist()
    assert classes.dtype is torch.int64


def test_rounding_errors_outside_the_box_are_clipped(model):
    """Resizing, denoising and attacks leave values such as -3e-8; NaN, and more than that, are refused."""
    images = torch.rand(2, *model.input_size)
    images[0, 0, 0, :2] = torch.tensor([-2.98e-8, 1 + 1e-6])
    with pytest.warns(UserWarning, match="clipped"):
        result = lipcert.certify(model, images, eps=0.1, method="gloro")
    inside = lipcert.certify(model, images.clamp(0, 1), eps=0.1, method="gloro")
    assert result.radius.tolist() == inside.radius.tolist()
    assert result[0]["image"] == inside[0]["image"]
    for value in (-2e-6, 1 + 3e-6, float("nan")):
        images[0, 0, 0, 0] = value
        with pytest.raises(InputError, match="hold no NaN"):
            lipcert.certify(model, images, eps=0.1, method="gloro")


def test_certified_accuracy_counts_over_processes(model):
    """As torchmetrics adds up the states of all processes; here of two that have seen the same images."""
    pytest.importorskip("torchmetrics")
    images, labels = torch.rand(3, *model.input_size), torch.tensor([0, 1, 2])
    both = {"dist_sync_fn": lambda state, group: [state, state], "distributed_available_fn": lambda: True}
    metric = lipcert.CertifiedAccuracy("1e-9,0.5", **both)
    result = lipcert.certify(model, images, labels, eps="1e-9,0.5", method="gloro")
    metric.update(result)
    assert metric.compute()[0] == result.certified_accuracy
    with metric.sync_context(should_sync=True, distributed_available=lambda: True, dist_sync_fn=both["dist_sync_fn"]):
        assert int(metric.total) == 2 * len(images)
    assert int(metric.total) == len(images)
