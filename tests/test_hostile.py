"""Hostile and broken files: nothing in them runs, nothing is lost, and each ends in one clear line."""

import functools
import io
import json
import os
import pickle
import struct
import subprocess
import tarfile
import types
import zipfile
import zlib
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from lipcert.errors import InputError, LipcertError
from lipcert.inputs import artifact
from lipcert.inputs.artifact import is_artifact, load_artifact, read_metadata, save
from lipcert.inputs.data import open_images
from lipcert.inputs.loading import load
from lipcert.inputs.matching import check_finite, load_weights
from lipcert.inputs.sources import BUNDLED, Source
from lipcert.inputs.weights import read_checkpoint
from lipcert.report import read_runs
from lipcert.results import ResultFile, read_rows

FUZZ = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused(call, *arguments) -> str:
    """The one line that a call ends in."""
    with pytest.raises(LipcertError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message.isprintable()
    assert 10 < len(message) < 2000
    return message


def refused_or_taken(call, *arguments) -> None:
    """A random change may do no harm; if it does, one line says so."""
    try:
        call(*arguments)
    except LipcertError as error:
        line = str(error)
    else:
        return
    assert line.isprintable()


def change(content: bytes, data: st.DataObject) -> bytes:
    """A few bytes changed, taken out or put in, or the end cut off."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, max(0, len(changed) - 1)))
        stop = start + data.draw(st.sampled_from([0, 1, 1, 4, 40, len(changed)]))
        changed[start:stop] = data.draw(st.sampled_from([b"", b"\0", b"\xff" * 8, b"9" * 30, b"[" * 9, b"\n", b"null"]))
    return bytes(changed)


@pytest.fixture
def marker(tmp_path):
    """A folder that hostile files try to make."""
    path = tmp_path / "executed"
    yield path
    assert not path.exists()


# Checkpoints.


def read(path) -> None:
    """All that is done with a checkpoint: its tensors go into a network whose numbers are checked."""
    state = read_checkpoint(path).state
    net = nn.Linear(3, 2)
    load_weights(net, state, file=path, name="the network")
    check_finite(net, str(path))


def described(**changes) -> dict:
    tensors = {
        "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "bias": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]},
    }
    return {**tensors, **changes}


def of_header(header: object, data: bytes = bytes(32), length: int | None = None) -> bytes:
    """A safetensors file with this header, as JSON or as bytes."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def weight(**changes) -> dict:
    return described(weight={**described()["weight"], **changes})


SAFETENSORS = {
    "nothing": b"",
    "half a length": b"\x08\0\0",
    "a length alone": struct.pack("<Q", 8),
    "a length of 0": of_header({}, length=0),
    "a length beyond the file": of_header(described(), length=10**6),
    "a length of 100 MB": of_header(described(), length=100_000_001),
    "a length of 2^63": of_header(described(), length=2**63),
    "a length of 2^64 - 1": of_header(described(), length=2**64 - 1),
    "a length too short": of_header(described(), length=20),
    "no JSON": of_header(b"hello, world"),
    "a list": of_header([]),
    "null": of_header(None),
    "a number": of_header(3),
    "a text": of_header("x"),
    "no UTF-8": of_header(b'{"\xff\xfe": 1}'),
    "half a JSON": of_header(b'{"weight": {"dtype": "F32"'),
    "100000 brackets": of_header(b"[" * 100_000),
    "100000 nested objects": of_header(b'{"a":' * 100_000),
    "no tensors": of_header({}, b""),
    "metadata alone": of_header({"__metadata__": {"a": "b"}}, b""),
    "metadata that are a list": of_header(described(__metadata__=[])),
    "metadata that are numbers": of_header(described(__metadata__={"a": 1})),
    "tensors that are numbers": of_header({"weight": 1, "bias": 2}),
    "no dtype": of_header(described(bias={"shape": [2], "data_offsets": [24, 32]})),
    "an unknown dtype": of_header(weight(dtype="F7")),
    "a dtype that is a number": of_header(weight(dtype=7)),
    "a dtype of 4 bits": of_header(described(weight={"dtype": "F4", "shape": [2, 24], "data_offsets": [0, 24]})),
    "a dtype of 6 bits": of_header(described(weight={"dtype": "F6_E2M3", "shape": [4, 8], "data_offsets": [0, 24]})),
    "a negative shape": of_header(weight(shape=[-2, -3])),
    "a shape of fractions": of_header(weight(shape=[1.5, 4])),
    "a shape of texts": of_header(weight(shape=["2", "3"])),
    "a shape that overflows": of_header(weight(shape=[2**63, 2**63])),
    "a shape whose product overflows": of_header(weight(shape=[2**32, 2**32, 6])),
    "a shape larger than the bytes": of_header(weight(shape=[2000, 3000])),
    "a shape smaller than the bytes": of_header(weight(shape=[1])),
    "offsets past the end": of_header(weight(data_offsets=[1000, 1024])),
    "offsets that are reversed": of_header(weight(data_offsets=[24, 0])),
    "offsets that overlap": of_header(weight(data_offsets=[8, 32])),
    "offsets with a gap": of_header(described(bias={**described()["bias"], "data_offsets": [28, 36]}), bytes(36)),
    "offsets of 2^64": of_header(weight(data_offsets=[0, 2**64])),
    "negative offsets": of_header(weight(data_offsets=[-24, 0])),
    "one offset": of_header(weight(data_offsets=[24])),
    "no offsets": of_header(described(bias={"dtype": "F32", "shape": [2]})),
    "data cut off": of_header(described(), bytes(20)),
    "no data": of_header(described(), b""),
    "data too long": of_header(described(), bytes(100)),
    "a zip archive": b"PK\x03\x04" + bytes(60),
    "a pickle": pickle.dumps({"weight": 1}),
    "a page of a server": b"<!DOCTYPE html>\n<html><body>404: not found</body></html>",
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}

NAN, INF = float("nan"), float("inf")
WEIGHTS = {
    "NaN": {"weight": torch.full((2, 3), NAN)},
    "one NaN": {"bias": torch.tensor([0.0, NAN])},
    "infinity": {"weight": torch.full((2, 3), INF)},
    "minus infinity": {"bias": torch.tensor([-INF, 0.0])},
    "more than float32 holds": {"bias": torch.tensor([1e300, 0.0], dtype=torch.float64)},
    "whole numbers": {"weight": torch.zeros(2, 3, dtype=torch.int64)},
    "bytes": {"weight": torch.zeros(2, 3, dtype=torch.uint8)},
    "truth values": {"bias": torch.zeros(2, dtype=torch.bool)},
    "complex numbers": {"weight": torch.zeros(2, 3, dtype=torch.complex64)},
    "another shape": {"weight": torch.zeros(3, 2)},
    "no shape": {"bias": torch.tensor(0.0)},
    "nothing in it": {"bias": torch.zeros(0)},
    "one more dimension": {"bias": torch.zeros(2, 1)},
    "one tensor too many": {"extra": torch.zeros(1)},
    "a name of control characters": {"a\nb\x1b[2J\r\x07": torch.zeros(1)},
    "a name of 100000 characters": {"x" * 100_000: torch.zeros(1)},
    "a name that is empty": {"": torch.zeros(1)},
    "1000 tensors too many": {f"t{i}": torch.zeros(1) for i in range(1000)},
}


@pytest.mark.parametrize("what", SAFETENSORS)
def test_safetensors_that_lie(tmp_path, what):
    path = tmp_path / "w.safetensors"
    path.write_bytes(SAFETENSORS[what])
    assert "w.safetensors" in refused(read, path)
    refused(read_metadata, path)
    assert not is_artifact(path)
    assert path.read_bytes() == SAFETENSORS[what]


def test_the_same_file_without_lies_is_taken(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(of_header(described()))
    read(path)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("what", WEIGHTS)
def test_weights_that_do_not_fit(tmp_path, what, name):
    path = tmp_path / name
    state = {**nn.Linear(3, 2).state_dict(), **WEIGHTS[what]}
    (torch.save if path.suffix == ".pth" else safetensors.torch.save_file)(state, path)
    assert name in refused(read, path)


def test_a_missing_tensor_and_a_missing_file(tmp_path):
    safetensors.torch.save_file({"bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    assert "missing (weight)" in refused(read, tmp_path / "w.safetensors")
    state = read_checkpoint(tmp_path / "w.safetensors").state
    (tmp_path / "w.safetensors").unlink()
    refused(state.__getitem__, "bias")
    refused(read, tmp_path / "w.safetensors")
    refused(read, tmp_path)


class Reduced:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


CODE = {
    "os.mkdir": lambda where: Reduced(os.mkdir, where),
    "os.system": lambda where: Reduced(os.system, f"mkdir {where}"),
    "subprocess": lambda where: Reduced(subprocess.Popen, ["mkdir", where]),
    "eval": lambda where: Reduced(eval, f"__import__('os').mkdir({where!r})"),
    "exec": lambda where: Reduced(exec, f"import os; os.mkdir({where!r})"),
    "a partial function": lambda where: Reduced(functools.partial(os.mkdir, where)),
    "a function in a namespace": lambda where: Namespace(lr=Reduced(os.mkdir, where)),
    "a namespace of types": lambda where: types.SimpleNamespace(lr=Reduced(os.mkdir, where)),
    "getattr": lambda where: Reduced(getattr, Reduced(os.getcwd), where),
    "an argument": lambda where: {"state_dict": {"weight": Reduced(os.mkdir, where)}},
    "a key": lambda where: {Reduced(os.mkdir, where): torch.zeros(1)},
    "torch.load": lambda where: Reduced(torch.load, where),
    "a path": lambda where: Path(where),
    "a module": lambda where: nn.Linear(3, 2),
    "an array of objects": lambda where: np.array([Reduced(os.mkdir, where)], dtype=object),
}
# What a pickle calls is given by name; these opcodes call posix.mkdir in other ways than pickle.dumps does.
OPCODES = {
    "GLOBAL and REDUCE": b"\x80\x02cposix\nmkdir\nX%s\x85R.",
    "INST": b"(X%siposix\nmkdir\n.",
    "OBJ": b"(cposix\nmkdir\nX%so.",
    "NEWOBJ": b"\x80\x02cposix\nmkdir\nX%s\x85\x81.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93X%s\x85R.",
    "a name with dots": b"\x80\x04\x8c\x13torch.serialization\x8c\x08os.mkdir\x93X%s\x85R.",
    "BUILD": b"\x80\x02ccollections\nOrderedDict\n)R}X\x01\0\0\0acposix\nmkdir\nX%s\x85Rsb.",
}


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("what", CODE)
def test_code_in_checkpoints_never_runs(tmp_path, marker, what, archive):
    path = tmp_path / "w.pth"
    content = CODE[what](str(marker))
    if archive:
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    assert "w.pth" in refused(read, path)
    path.rename(tmp_path / "w.safetensors")
    refused(load_artifact, tmp_path / "w.safetensors")
    refused(load, tmp_path / "w.safetensors")


@pytest.mark.parametrize("what", OPCODES)
def test_code_called_by_other_opcodes_never_runs(tmp_path, marker, what):
    argument = str(marker).encode()
    path = tmp_path / "w.pth"
    path.write_bytes(OPCODES[what].replace(b"%s", struct.pack("<I", len(argument)) + argument))
    refused(read, path)


def nested(depth: int) -> list:
    inner: list = []
    for _ in range(depth):
        inner = [inner]
    return inner


CONTENTS = {
    "a list": lambda: [torch.zeros(1)],
    "a tensor": lambda: torch.zeros(1),
    "a number": lambda: 3,
    "no tensors": lambda: {"epoch": 3},
    "an empty state": lambda: {"state_dict": {}},
    "names that are numbers": lambda: {0: torch.zeros(1), 1: torch.zeros(1)},
    "a name that is none": lambda: {"weight": torch.zeros(2, 3), None: torch.zeros(2)},
    "tensors within tensors": lambda: {"weight": {"bias": torch.zeros(2)}},
    "nothing for a tensor": lambda: {"weight": None, "bias": torch.zeros(2)},
    "a sparse tensor": lambda: {"weight": torch.zeros(2, 3).to_sparse(), "bias": torch.zeros(2)},
    "a tensor without storage": lambda: {"weight": torch.zeros(2, 3, device="meta"), "bias": torch.zeros(2)},
    "a quantised tensor": lambda: {
        "weight": torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 0, torch.qint8),
        "bias": torch.zeros(2),
    },
    "a tensor of 10^12 numbers": lambda: {"weight": torch.zeros(1).expand(10**6, 10**6), "bias": torch.zeros(2)},
    "a state in itself": lambda: (lambda state: state.update(state_dict=state) or state)({}),
    "100 lists in each other": lambda: {"state_dict": nested(100)},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("what", CONTENTS)
def test_checkpoints_that_hold_something_else(tmp_path, what, old):
    path = tmp_path / "w.pth"
    torch.save(CONTENTS[what](), path, _use_new_zipfile_serialization=not old)
    assert "w.pth" in refused(read, path)


def saved_state(path: Path) -> bytes:
    torch.save(nn.Linear(3, 2).state_dict(), path)
    return path.read_bytes()


def repacked(path: Path, edit) -> None:
    """Writes the members of an archive again, as ``edit(archive, name, content)`` wants it."""
    saved_state(path)
    with zipfile.ZipFile(path) as old:
        members = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members:
            edit(new, name, content)


def compressed(archive, name, content):
    blown_up = content + bytes(30_000_000) if name.endswith("data.pkl") else content
    archive.writestr(name, blown_up, zipfile.ZIP_DEFLATED)


ARCHIVES = {
    "a compressed bomb": compressed,
    "no pickle": lambda archive, name, content: name.endswith("data.pkl") or archive.writestr(name, content),
    "an empty pickle": lambda archive, name, content: archive.writestr(name, b"" if "pkl" in name else content),
    "no tensors": lambda archive, name, content: "/data/" in name or archive.writestr(name, content),
    "tensors cut off": lambda archive, name, content: archive.writestr(
        name, content[:3] if "/data/" in name else content
    ),
    "another version": lambda archive, name, content: archive.writestr(name, b"999" if "version" in name else content),
    "names that lead away": lambda archive, name, content: archive.writestr(f"../../{name}", content),
    "a script": lambda archive, name, content: archive.writestr(name.replace("data.pkl", "constants.pkl"), content),
}


def test_a_byte_that_changed_on_the_way(tmp_path):
    """torch itself does not look at the checksums of a file that it maps."""
    path = tmp_path / "w.pth"
    torch.save({"weight": torch.full((2, 3), 0.5), "bias": torch.zeros(2)}, path)
    content = path.read_bytes()
    path.write_bytes(content.replace(struct.pack("<f", 0.5), struct.pack("<f", 0.75), 1))
    assert "checksum" in refused(read, path)


@pytest.mark.parametrize("content", [b"]" * 100_000 + b"a" * 99_999 + b".", b"(" * 100_000, b"\x80\x02" + b"}" * 10**6])
def test_pickles_that_go_deep(tmp_path, content):
    (tmp_path / "w.pth").write_bytes(content)
    refused(read, tmp_path / "w.pth")


@pytest.mark.parametrize("what", ARCHIVES)
def test_archives_that_are_not_what_torch_writes(tmp_path, what):
    path = tmp_path / "w.pth"
    repacked(path, ARCHIVES[what])
    before = sorted(tmp_path.iterdir())
    if what in ("names that lead away", "another version", "tensors cut off"):  # torch may not care
        refused_or_taken(read, path)
    else:
        refused(read, path)
    assert sorted(tmp_path.iterdir()) == before


@FUZZ
@given(data=st.data())
@pytest.mark.parametrize("name", ["w.safetensors", "new.pth", "old.pth"])
def test_changed_checkpoints(tmp_path, name, data):
    path = tmp_path / name
    state = nn.Linear(3, 2).state_dict()
    if name == "w.safetensors":
        content = safetensors.torch.save(state, {"architecture": "test_vit"})
    else:
        torch.save(state, path, _use_new_zipfile_serialization=name.startswith("new"))
        content = path.read_bytes()
    path.write_bytes(change(content, data))
    refused_or_taken(read, path)


# Artifacts, with a checksum that is right.

TINY = {"img_size": 16, "patch_size": 8, "num_classes": 3, "depth": 1, "embed_dim": 12, "num_heads": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "a.safetensors"
    save(load("vit_tiny_patch16_224", pretrained=False, **TINY), path)
    return path


def source(**changes):
    return lambda content: {**content, "source": {**content["source"], **changes}}


def put(field, value):
    return lambda content: {**content, field: value}


METADATA = {
    **{f"format {value!r}": put("format", value) for value in (None, "1", 10**9, [], 1.5)},
    **{f"mean {v!r}": put("mean", v) for v in ([], [0.1], ["a", "b", "c"], [None] * 3, [[0.1]] * 3, [NAN] * 3, 0.5)},
    **{f"std {v!r}": put("std", v) for v in ([], [0.0] * 3, [-1.0] * 3, [INF] * 3, ["a"] * 3, {"a": 1})},
    **{
        f"input size {v!r}": put("input_size", v)
        for v in (
            [3, 10**9, 10**9],
            [3, 2**40, 1],
            [],
            [3],
            [3, 16],
            [0, 0, 0],
            [-3, 16, 16],
            ["3", "x", "y"],
            [None] * 3,
            [[3], 16, 16],
            "3",
        )
    },
    **{
        f"recipe {v!r}": put("recipe", v)
        for v in (
            [1],
            ["convert"],
            [{}],
            [{"step": "convert"}],
            [{"step": "convert", "attention": "evil", "norm": "keep"}],
            [{"step": "convert", "attention": "l2", "norm": ["keep"]}],
            [{"step": "convert", "attention": "l2", "norm": "project"}],
            {"step": "convert"},
        )
    },
    **{f"name {v!r}": source(name=v) for v in (None, 3, "", "no_such_net", "hf-hub:a/b", "local-dir:/", "../../x")},
    **{
        f"arguments {v!r}": source(arguments=v)
        for v in (
            None,
            [],
            "depth=1",
            {"no_such_argument": 1},
            {"depth": "x"},
            {"embed_dim": -1},
            {"embed_dim": 0},
            {"num_heads": 0},
            {"patch_size": 0},
            {"img_size": [16, 16, 16]},
            {**TINY, "depth": 2},
            {**TINY, "num_classes": 4},
            {**TINY, "depth": 10**9},
            {**TINY, "depth": 10**6},
            {**TINY, "depth": True},
            {**TINY, "embed_dim": 10**7},
            {**TINY, "embed_dim": 10**6, "depth": 1000},
            {**TINY, "num_classes": 2**70},
            {**TINY, "img_size": 10**6},
            {**TINY, "mlp_ratio": 1e9},
            {**TINY, "mlp_ratio": 999.0, "embed_dim": 10**5},
            {**TINY, "drop_rate": 10**400},
            {**TINY, "weight_init": [[[10**6]] * 100] * 100},
            {**TINY, "norm_layer": "os.system"},
            {**TINY, "checkpoint_path": "evil.pth"},
            {**TINY, "pretrained_cfg": {"file": "evil.pth"}},
            {**TINY, "pretrained_cfg_overlay": {"file": "evil.pth"}},
            {**TINY, "pretrained": True},
            {**TINY, "cache_dir": "evil"},
        )
    },
    "a source that is text": put("source", "vit_tiny_patch16_224"),
    "a data configuration that is a list": put("data_config", []),
    "facts that are a list": put("facts", []),
    "another hash": put("weights_hash", "0" * 64),
    "a hash that is a number": put("weights_hash", 0),
}


def with_metadata(saved, path, entry: str):
    safetensors.torch.save_file(safetensors.torch.load_file(saved), path, metadata={"lipcert": entry})
    return path


@pytest.mark.parametrize("what", METADATA)
def test_artifacts_that_describe_something_else(saved, tmp_path, what):
    content = METADATA[what](read_metadata(saved))
    try:
        content["checksum"] = artifact._checksum(content)
    except ValueError:  # NaN and infinity, which json.dumps writes all the same
        content["checksum"] = "0" * 64
    path = with_metadata(saved, tmp_path / "a.safetensors", json.dumps(content))
    assert "a.safetensors" in refused(load_artifact, path)


@pytest.mark.parametrize(
    "entry", ["", "{", "null", "3", "[" * 100_000, '{"a":' * 100_000, '{"format": 1}', "\0", "9" * 5000]
)
def test_artifacts_whose_metadata_are_no_json(saved, tmp_path, entry):
    path = with_metadata(saved, tmp_path / "a.safetensors", entry)
    assert "a.safetensors" in refused(read_metadata, path)


@pytest.mark.parametrize(
    "config", [{"crop_pct": "x"}, {"crop_pct": 1e-6}, {"interpolation": "evil"}, {"interpolation": []}]
)
def test_artifacts_whose_images_cannot_be_cut(saved, tmp_path, config):
    content = read_metadata(saved)
    content["data_config"] |= config
    entry = json.dumps({**content, "checksum": artifact._checksum(content)})
    model = load_artifact(with_metadata(saved, tmp_path / "a.safetensors", entry))
    (tmp_path / "images").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "images" / "0.png")
    refused(lambda: open_images(tmp_path / "images", model)[0])


# Images and archives of images.


@pytest.mark.parametrize("target", [".", "..", "../..", "/"])
def test_links_to_folders_above_them(tmp_path, target):
    """The same images over and over, or the whole disk."""

    def check():
        opened = open_images(images, classifier())
        assert (len(opened), opened.notes) == (2, ["1 file of other formats left out: 1 link to a folder around it"])

    images = tmp_path / "images"
    for name in "ab":
        (images / name).mkdir(parents=True)
        noise().save(images / name / "0.png")
    (images / "b" / "c").mkdir()
    (images / "b" / "c" / "d").symlink_to("..", target_is_directory=True)
    check()
    (images / "b" / "c" / "d").unlink()
    link = images / "a" / "link"
    link.symlink_to(target, target_is_directory=True)
    check()
    link.unlink()
    (tmp_path / "other").mkdir()
    noise().save(tmp_path / "other" / "0.png")
    link.symlink_to(tmp_path / "other", target_is_directory=True)  # a link to elsewhere is as good as a folder
    assert len(open_images(images, classifier())) == 3


def test_a_pipe_among_images_and_as_a_model(tmp_path):
    os.mkfifo(tmp_path / "0.png")
    assert "holds no images" in refused(open_images, tmp_path, classifier())
    os.mkfifo(tmp_path / "w.safetensors")
    refused(load, tmp_path / "w.safetensors")
    assert Source.of(None).word == BUNDLED


@pytest.mark.parametrize("name", ["a" * 5000, "a" * 300 + "/b", "\0"])
def test_names_that_no_file_has(name):
    refused(load, name)


def classifier(size=(3, 8, 8)):
    net = nn.Sequential(nn.Flatten(), nn.Linear(size[0] * 64, 2))
    model = load(net, mean=(0.5,) * size[0], std=(0.5,) * size[0], input_size=size)
    model.data_config = {"crop_pct": 1.0, "interpolation": "bilinear", "crop_mode": "center"}
    return model


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(mode="RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG file whose header says any size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checked = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checked

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def tiff(bits: int, black: int) -> bytes:
    """An 8×8 TIFF of grey values, all bits set, in which ``black`` (1 or 0) is what 0 stands for."""
    tags = {256: 8, 257: 8, 258: bits, 259: 1, 262: black, 273: 122, 277: 1, 278: 8, 279: 8 * bits}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + b"\xff" * 8 * bits


KINDS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
IMAGES = {
    "nothing": b"",
    "text": b"not an image",
    "HTML": b"<html></html>",
    "zeros": bytes(1000),
    **{f"the first bytes of {kind}": encoded(noise(), kind)[:12] for kind in KINDS},
    **{f"half of {kind}": encoded(noise(), kind)[: len(encoded(noise(), kind)) // 2] for kind in KINDS},
    "a bomb": png(20_000, 20_000),
    "a bomb of 2^62 pixels": png(2**31 - 1, 2**31 - 1),
    "a large image": png(12_000, 9_000),
    "no width": png(0, 10),
    "no pixels": png(10, 10),
    "a strip": encoded(Image.new("L", (4000, 2)), "PNG"),
    "a post": encoded(Image.new("L", (1, 5000)), "PNG"),
    "grey values without a range": encoded(Image.new("F", (8, 8)), "TIFF"),
    "grey values of 32 bits": encoded(Image.new("I", (8, 8)), "TIFF"),
    "grey values of 12 bits": tiff(12, 1),
    "grey values from white": tiff(16, 0),
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>',
    "PDF": b"%PDF-1.4\n%%EOF\n",
    "a pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("tar", [False, True])
@pytest.mark.parametrize("what", IMAGES)
def test_images_that_cannot_be_read(tmp_path, what, tar, recwarn):
    write_images(tmp_path, {"a/0.png": IMAGES[what]}, tar)
    images = open_images(tmp_path / ("x.tar" if tar else "x"), classifier())
    assert "a/0.png" in refused(images.__getitem__, 0)
    assert not [warning for warning in recwarn if issubclass(warning.category, Image.DecompressionBombWarning)]


def write_images(root: Path, files: dict[str, bytes], tar: bool) -> None:
    if tar:
        with tarfile.open(root / "x.tar", "w") as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return
    for name, content in files.items():
        (root / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "x" / name).write_bytes(content)


def sixteen(value: int) -> Image.Image:
    return Image.fromarray(np.full((8, 8), value, dtype=np.uint16))


COLOURS = {
    "CMYK": (encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100), (1.0, 0.0, 0.0)),
    "palette": (encoded(Image.new("RGB", (8, 8), (51, 102, 153)).quantize(4), "PNG"), (0.2, 0.4, 0.6)),
    "16 bits": (encoded(sixteen(0x8080), "PNG"), (128 / 255,) * 3),
    "16 bits, dark": (encoded(sixteen(300), "PNG"), (1 / 255,) * 3),
    "16 bits in a TIFF": (encoded(sixteen(65535), "TIFF"), (1.0,) * 3),
    "16 bits in a PGM": (b"P5 8 8 65535\n" + b"\x80\x80" * 64, (128 / 255,) * 3),
    "16 bits in a TIFF by hand": (tiff(16, 1), (1.0,) * 3),
    "8 bits from white": (tiff(8, 0), (0.0,) * 3),
    "12 bits in a PGM": (b"P5 8 8 4095\n" + b"\x08\x08" * 64, (128 / 255,) * 3),
    "1 bit": (encoded(Image.new("1", (8, 8), 1), "PNG"), (1.0,) * 3),
    "grey with alpha": (encoded(Image.new("LA", (8, 8), (51, 0)), "PNG"), (0.2,) * 3),
    "animated": (
        encoded(Image.new("L", (8, 8), 51), "GIF", save_all=True, append_images=[Image.new("L", (8, 8), 200)] * 3),
        (0.2,) * 3,
    ),
    "a GIF in an APNG's clothes": (
        encoded(Image.new("L", (8, 8), 51), "PNG", save_all=True, append_images=[Image.new("L", (8, 8), 200)]),
        (0.2,) * 3,
    ),
}


@pytest.mark.parametrize("what", COLOURS)
def test_images_of_other_kinds_keep_their_colours(tmp_path, what):
    """The first picture of those that move; 16 bits are not cut off at 255."""
    content, colour = COLOURS[what]
    write_images(tmp_path, {"0.png": content}, tar=False)
    image = open_images(tmp_path / "x", classifier())[0][0]
    torch.testing.assert_close(image[:, 3, 3], torch.tensor(colour), atol=0.012, rtol=0)


PICTURE = encoded(Image.new("RGB", (8, 8)), "PNG")


def member(name: str, content: bytes = PICTURE, **fields):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


TARS = {
    "a path that leads away": [member("../../away.png")],
    "an absolute path": [member("/tmp/lipcert_away.png")],
    "a symbolic link": [member("a.png", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "a hard link": [member("a.png", b"", type=tarfile.LNKTYPE, linkname="/etc/passwd")],
    "a link to itself": [member("a.png", b"", type=tarfile.SYMTYPE, linkname="a.png")],
    "two links to each other": [
        member("a.png", b"", type=tarfile.SYMTYPE, linkname="b.png"),
        member("b.png", b"", type=tarfile.SYMTYPE, linkname="a.png"),
    ],
    "a device": [member("a.png", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=5)],
    "a pipe": [member("a.png", b"", type=tarfile.FIFOTYPE)],
    "a folder with an image's name": [member("a.png", b"", type=tarfile.DIRTYPE)],
    "a size beyond the file": [member("a.png", size=10**12)],
    "a name of control characters": [member("a\n\x1b[2J.png", b"")],
    "a name of 5000 characters": [member("x" * 5000 + ".png", b"")],
}


@pytest.mark.parametrize("what", TARS)
def test_archives_of_images_write_nothing(tmp_path, what):
    """Members are read where they are; what is no file is no image."""
    inner = tmp_path / "deep" / "down"
    inner.mkdir(parents=True)
    path = inner / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in TARS[what]:
            stated, info.size = info.size, len(content)
            archive.addfile(info, io.BytesIO(content))
            info.size = stated
    if "beyond" in what:
        lying = TARS[what][0][0].tobuf(tarfile.GNU_FORMAT)
        path.write_bytes(lying + PICTURE)
    before = sorted(tmp_path.rglob("*"))
    refused_or_taken(lambda: open_images(path, classifier())[0])
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/tmp/lipcert_away.png").exists()


def test_a_pickle_beside_a_large_archive_is_not_read(tmp_path, marker, monkeypatch):
    """timm keeps what large archives hold in a pickle beside them."""
    write_images(tmp_path, {"a/0.png": PICTURE, "b/0.png": PICTURE}, tar=True)
    (tmp_path / "_x_tarinfos.pickle").write_bytes(pickle.dumps(Reduced(os.mkdir, str(marker))))
    getsize = os.path.getsize
    monkeypatch.setattr(os.path, "getsize", lambda path: getsize(path) + 11 * 1024**3)
    before = sorted(tmp_path.iterdir())
    assert len(open_images(tmp_path / "x.tar", classifier())) == 2
    assert sorted(tmp_path.iterdir()) == before


@FUZZ
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_changed_images(tmp_path, kind, data):
    write_images(tmp_path, {"0.png": change(encoded(noise(), kind), data)}, tar=False)
    refused_or_taken(open_images(tmp_path / "x", classifier()).__getitem__, 0)


@FUZZ
@given(data=st.data())
def test_changed_archives_of_images(tmp_path, data):
    write_images(tmp_path, {"a/0.png": PICTURE, "b/0.png": PICTURE}, tar=True)
    path = tmp_path / "x.tar"
    path.write_bytes(change(path.read_bytes(), data))
    refused_or_taken(lambda: list(open_images(path, classifier()).batches(2)))


# Result files.

RUN = {
    "model": {"source": {"name": "x", "arguments": {}}, "recipe": [], "weights_hash": "0" * 64},
    "eps": 0.1,
    "method": "gloro",
    "attack": None,
    "dtype": "float64",
    "data": {"spec": "x", "images": 6, "labelled": True},
    "lipcert": "1",
    "eps_typed": "0.1",
}


def row(index: int, /, **changes) -> dict:
    known = {"index": index, "label": 1, "predicted": 1, "correct": True, "margin": 0.5, "radius": 0.1 * index}
    known |= {"certified": index > 1, "method": "gloro", "rigor": "deterministic", "attacked": None}
    return {**known, "attack_distance": None, "seconds": 0.5, **changes}


@pytest.fixture
def results(tmp_path):
    with ResultFile(tmp_path / "r.jsonl", RUN) as file:
        for index in range(3):
            file.append(row(index))
    return tmp_path / "r.jsonl"


def without(key: str) -> str:
    return json.dumps({k: v for k, v in row(5).items() if k != key})


ROWS = {
    **{f"no {key}": without(key) for key in ("index", "radius", "certified", "method", "rigor")},
    "a row twice": json.dumps(row(1)),
    "text": "hello",
    "nothing": "",
    "a number": "3",
    "a list": "[]",
    "null": "null",
    "half a row": json.dumps(row(5))[:40],
    "two rows in a line": json.dumps(row(5)) + json.dumps(row(6)),
    "100000 brackets": "[" * 100_000,
    "100000 objects": '{"a":' * 100_000,
    "an index that is text": json.dumps(row(5, index="5")),
    "an index that is a list": json.dumps(row(5, index=[5])),
    "a radius that is text": json.dumps(row(5, radius="0.5")),
    "a radius of NaN": json.dumps(row(5, radius=NAN)),
    "an infinite radius": json.dumps(row(5, radius=INF)),
    "a radius beyond float64": json.dumps(row(5)).replace("0.5,", "1e999,"),
    "a negative radius": json.dumps(row(5, radius=-1.0, certified=False)),
    "a number of 5000 digits": json.dumps(row(5)).replace('"index": 5', '"index": ' + "9" * 5000),
    "certified that is a number": json.dumps(row(5, certified=5)),
    "certified that is text": json.dumps(row(5, certified="yes")),
    "certified below the radius": json.dumps(row(0, index=5, certified=True)),
    "not certified above it": json.dumps(row(5, certified=False)),
    "an estimate": json.dumps(row(5, rigor="estimate")),
    "a rigor that is none": json.dumps(row(5, rigor=None)),
    "a method that is a list": json.dumps(row(5, method=[])),
    "correct that is text": json.dumps(row(5, correct="yes")),
    "an attack inside the radius": json.dumps(row(5, attacked=True, attack_distance=0.01)),
    "an index below 0": json.dumps(row(5, index=-1)),
    "an index that is true": json.dumps(row(5, index=True)),
    "a prediction that is text": json.dumps(row(5, predicted="1")),
    "a label of 400 digits": json.dumps(row(5, label=10**400)),
    "a method that steers a terminal": json.dumps(row(5, method="a\x1b[31m\nb")),
    "a zero byte": "\0",
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_are_none(results, what):
    with results.open("a") as file:
        file.write(ROWS[what] + "\n")
    before = results.read_bytes()
    summary = results.with_suffix(".summary.json").read_bytes()
    assert "r.jsonl" in refused(read_runs, [results])
    refused(ResultFile, results, RUN)
    refused(read_rows, results, RUN)
    assert results.read_bytes() == before
    assert results.with_suffix(".summary.json").read_bytes() == summary


SUMMARIES = [
    "",
    "{",
    "null",
    "3",
    "[]",
    "{}",
    "[" * 100_000,
    '{"eps": NaN}',
    '{"eps": "x"}',
    '{"eps": 0.1}',
    "\xff",
    "\0",
]


@pytest.mark.parametrize("content", SUMMARIES)
def test_summaries_that_are_none(results, content):
    summary = results.with_suffix(".summary.json")
    summary.write_bytes(content.encode("latin-1"))
    before = results.read_bytes()
    refused(read_runs, [results])
    refused(ResultFile, results, RUN)
    assert results.read_bytes() == before
    assert summary.read_bytes() == content.encode("latin-1")


@FUZZ
@given(data=st.data())
def test_changed_results(results, data):
    """Whole rows that were there are still there, whatever became of the others."""
    summary = results.with_suffix(".summary.json")
    rows_before, summary_before = results.read_bytes(), summary.read_bytes()
    which = data.draw(st.sampled_from([results, summary]))
    which.write_bytes(change(which.read_bytes(), data))
    changed = results.read_bytes()
    refused_or_taken(read_runs, [results])
    refused_or_taken(lambda: ResultFile(results, RUN).__exit__(None))
    whole = changed[: changed.rfind(b"\n") + 1]
    assert results.read_bytes() in (changed, whole)
    results.write_bytes(rows_before)
    summary.write_bytes(summary_before)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(row(1))), inner, max_size=4),
    max_leaves=6,
)


@FUZZ
@given(changes=st.dictionaries(st.sampled_from(sorted(row(1))), JSON, min_size=1, max_size=3))
def test_rows_with_any_values(results, changes):
    before = results.read_bytes()
    with results.open("a") as file:
        file.write(json.dumps(row(5, **changes)) + "\n")
    refused_or_taken(read_runs, [results])
    refused_or_taken(read_rows, results, RUN)
    results.write_bytes(before)


def test_how_many_malformed_files_there_are():
    checkpoints = [*SAFETENSORS, *WEIGHTS, *CODE, *OPCODES, *CONTENTS, *ARCHIVES, *METADATA]
    assert len(checkpoints) + len(IMAGES) + len(TARS) + len(ROWS) + len(SUMMARIES) >= 200


def test_an_error_stays_on_its_line():
    assert str(InputError("a\nb\x1b[2Jc\u2028d ε 36/255…")) == "a\\nb\\x1b[2Jc\\u2028d ε 36/255…"
