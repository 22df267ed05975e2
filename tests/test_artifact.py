"""Artifacts: what is saved comes back bit by bit, and what was damaged is refused in one line."""

import copy
import errno
import json
import os
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import refusal
from torch import nn

from lipcert.errors import InputError, LoadError
from lipcert.inputs import artifact
from lipcert.inputs.artifact import FORMAT, check_free, is_artifact, load_artifact, read_metadata, save, weights_hash
from lipcert.inputs.loading import load
from lipcert.surgery import convert

TINY = {"img_size": 32, "patch_size": 8, "num_classes": 10, "depth": 1, "embed_dim": 48}
SWIN = {"img_size": 32, "window_size": 4, "patch_size": 2, "num_classes": 5, "depths": (1, 1, 1, 1), "embed_dim": 12}


def tiny():
    return load("vit_tiny_patch16_224", pretrained=False, **TINY)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "tiny.safetensors"
    save(tiny(), path, facts={"log10_bound": 3.5, "rigor": "deterministic"})
    return path


@pytest.fixture(scope="module")
def original(saved):
    return load_artifact(saved)


def rewrite(path: Path, to: Path, change) -> Path:
    """Writes an artifact again with changed tensors or metadata."""
    with safetensors.safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()["lipcert"])
    tensors = safetensors.torch.load_file(path)
    content = change(content, tensors) or content
    entry = content if isinstance(content, str) else json.dumps(content)
    safetensors.torch.save_file(tensors, to, metadata={"lipcert": entry})
    return to


def checked(content: dict) -> dict:
    """The content with a checksum that is right again, as a writer would leave it."""
    content.pop("checksum", None)
    return {**content, "checksum": artifact._checksum(content)}


def refused(path, *expected: str) -> None:
    with refusal(str(path), *expected, kind=LoadError):
        load_artifact(path)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("recipe", [None, ("keep", "keep"), ("l2", "keep"), ("l2", "project"), ("keep", "smooth")])
@pytest.mark.parametrize(
    ("name", "arguments"), [("vit_tiny_patch16_224", TINY), ("swin_tiny_patch4_window7_224", SWIN), ("test_resnet", {})]
)
def test_round_trip(tmp_path, name, arguments, recipe):
    model = load(name, pretrained=False, mean=(0.1, 0.2, 0.3), std=(0.7, 0.8, 0.9), **arguments)
    if recipe:
        convert(model, attention=recipe[0], norm=recipe[1])
    path = tmp_path / "a.safetensors"
    save(model, path)
    again = load_artifact(path)
    images = torch.rand(2, *model.input_size)
    assert torch.equal(again(images), model(images))
    assert weights_hash(again) == weights_hash(model)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert (again.input_size, again.recipe) == (model.input_size, model.recipe)
    assert json.dumps([again.source, again.data_config]) == json.dumps([model.source, model.data_config])
    assert not again.training


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_round_trip_keeps_the_type(tmp_path, dtype):
    model = tiny().to(dtype)
    save(model, tmp_path / "a.safetensors")
    again = load_artifact(tmp_path / "a.safetensors")
    assert again.dtype == dtype
    images = torch.rand(2, *model.input_size, dtype=dtype)
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_rounded_weights_take_half_the_space(tmp_path, half):
    model = tiny()
    save(model, tmp_path / "whole.safetensors")
    model.to(half).float()
    save(model, tmp_path / "rounded.safetensors")
    again = load_artifact(tmp_path / "rounded.safetensors")
    images = torch.rand(2, *model.input_size)
    assert again.dtype == torch.float32
    assert torch.equal(again(images), model(images))
    assert weights_hash(again) == weights_hash(model)
    whole, rounded = ((tmp_path / f"{name}.safetensors").stat().st_size for name in ("whole", "rounded"))
    assert rounded < whole - model_bytes(model) + 200


def model_bytes(model):
    """Bytes of the weights in half precision."""
    return 2 * sum(value.numel() for value in model.net.state_dict().values())


def test_metadata(saved):
    content = read_metadata(saved)
    assert content["format"] == FORMAT
    assert content["source"] == {"name": "vit_tiny_patch16_224", "arguments": TINY}
    assert content["facts"] == {"log10_bound": 3.5, "rigor": "deterministic"}
    assert content["mean"] == [0.5] * 3
    with safetensors.safe_open(saved, framework="pt") as file:
        assert list(file.metadata()) == ["lipcert"]


def test_hash_sees_every_part():
    model = tiny()
    own = weights_hash(model)
    changes = []
    with torch.no_grad():
        for change in (
            lambda m: m.net.head.weight[0, 0].add_(1e-6),
            lambda m: m.mean.add_(1e-6),
            lambda m: m.std.mul_(2),
            lambda m: m.net.head.register_buffer("extra", torch.zeros(1)),
            lambda m: m.double(),
        ):
            other = copy.deepcopy(model)
            assert weights_hash(other) == own
            change(other)
            changes.append(weights_hash(other))
    assert len({own, *changes}) == 6
    assert all(len(digest) == 64 for digest in changes)


def test_hash_does_not_depend_on_memory_layout():
    model = tiny()
    other = copy.deepcopy(model)
    weight = other.net.head.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    assert weights_hash(other) == weights_hash(model)


@settings(max_examples=40)
@given(data=st.data())
def test_a_changed_byte_is_never_taken(saved, original, tmp_path_factory, data):
    content = bytearray(saved.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("changed") / "a.safetensors"
    path.write_bytes(content)
    try:
        model = load_artifact(path)
    except LoadError:
        return
    # A byte that means nothing, such as white space in the header.
    assert weights_hash(model) == weights_hash(original)
    assert (model.source, model.recipe, model.input_size) == (original.source, original.recipe, original.input_size)


def test_foreign_files_are_refused(tmp_path):
    refused(tmp_path / "none.safetensors", "there is no file")
    refused(tmp_path, "there is no file")
    plain = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(2)}, plain, metadata={"format": "pt"})
    refused(plain, "not a lipcert artifact", "checkpoint=")
    assert not is_artifact(plain)
    assert not is_artifact(tmp_path / "none.safetensors")
    assert not is_artifact(tmp_path)


def test_edited_metadata_are_refused(saved, tmp_path):
    def edit(change, name="a.safetensors"):
        return rewrite(saved, tmp_path / name, change)

    assert load_artifact(edit(lambda content, _: checked(content)))
    refused(edit(lambda content, _: {**content, "mean": [0.0, 0.0, 0.0]}), "changed")
    refused(edit(lambda content, _: {**content, "facts": {"log10_bound": -9.0}}), "changed")
    refused(edit(lambda content, _: checked({**content, "format": FORMAT + 1})), "newer lipcert")
    for field in ("source", "recipe", "weights_hash", "mean"):
        without = lambda content, _: checked({k: v for k, v in content.items() if k != field})  # noqa: B023, E731
        refused(edit(without), "damaged")


def test_edited_weights_are_refused(saved, tmp_path):
    def change_weight(_, tensors):
        tensors["head.bias"] = tensors["head.bias"] + 1

    def drop(_, tensors):
        del tensors["head.bias"]

    def reshape(_, tensors):
        tensors["head.bias"] = torch.zeros(3)

    refused(rewrite(saved, tmp_path / "a.safetensors", change_weight), "weights are not those")
    refused(rewrite(saved, tmp_path / "b.safetensors", drop), "does not fit")
    refused(rewrite(saved, tmp_path / "c.safetensors", reshape), "does not fit")


def test_infinite_weights_are_refused(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.net.head.weight[0, 0] = torch.inf
    save(model, tmp_path / "a.safetensors")
    refused(tmp_path / "a.safetensors", "infinity", "head.weight")


def cannot_save(model, path, *expected: str, **options) -> None:
    with refusal(*expected):
        save(model, path, **options)
    assert not path.is_file()
    assert not list(path.parent.glob(".*"))


def test_what_cannot_be_rebuilt_is_not_saved(tmp_path):
    path = tmp_path / "a.safetensors"
    module = load(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), mean=(0,), std=(1,), input_size=(1, 1, 3))
    cannot_save(module, path, "timm did not make")
    changed = tiny()
    changed.net.blocks[0].mlp.act = nn.ReLU()
    cannot_save(changed, path, "the network is not vit_tiny_patch16_224 with its recorded surgery")
    grown = tiny()
    grown.net.head = nn.Linear(48, 11)
    cannot_save(grown, path, "the network is not vit_tiny_patch16_224 with its recorded surgery")


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    cannot_save(tiny(), tmp_path / "none" / "a.safetensors", "cannot write")
    cannot_save(tiny(), tmp_path / "a.safetensors", "JSON", facts={"bound": object()})
    cannot_save(tiny(), tmp_path / "a.safetensors", "JSON", facts={"bound": float("inf")})


@pytest.mark.parametrize(("module", "function"), [(safetensors.torch, "save_file"), (os, "replace")])
def test_a_failed_write_keeps_the_old_file(saved, tmp_path, monkeypatch, module, function):
    path = tmp_path / "a.safetensors"
    path.write_bytes(saved.read_bytes())

    def full_disk(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, function, full_disk)
    with pytest.raises(InputError, match="No space left"):
        save(tiny(), path)
    assert path.read_bytes() == saved.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_other_files_are_replaced_only_by_force(tmp_path):
    model = tiny()
    path = tmp_path / "a.safetensors"
    path.write_text("mine")
    with pytest.raises(InputError, match="is not a lipcert artifact.*force=True"):
        save(model, path)
    assert path.read_text() == "mine"
    save(model, path, force=True)
    save(model, path)  # the same architecture
    with pytest.raises(InputError, match="holds vit_tiny_patch16_224, not test_vit"):
        save(load("test_vit", pretrained=False), path)
    trained = tiny()
    trained.recipe.append({"step": "finetune", "loss": "ce"})
    check_free(path, model, False, "convert")
    save(trained, path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="holds a model after finetune.*force=True"):
        save(model, path)
    with pytest.raises(InputError, match="after finetune"):
        check_free(path, model, False, "convert")
    check_free(path, model, False, "finetune", {"loss": "ce"})
    with pytest.raises(InputError, match="result of finetune with other settings.*force=True"):
        check_free(path, model, False, "finetune", {"loss": "emma"})
    assert path.read_bytes() == before
    assert load_artifact(path).source == model.source
