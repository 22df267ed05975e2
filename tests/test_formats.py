"""Files and folders that are no weights: each refusal says what it is, and what to do about it."""

import gzip
import io
import json
import pickle
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from modules import refusal
from torch import nn

from lipcert.errors import LoadError
from lipcert.inputs import formats
from lipcert.inputs.sources import Source
from lipcert.inputs.weights import read_checkpoint

STATE = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.zeros(2)}
OTHER = "is of another framework"
PROTOBUF = b"\x08\x08\x12\x07pytorch\x1a\x052.6.0:\x10\n\x01x"


def refused(path):
    with refusal(str(path), kind=LoadError) as caught:
        read_checkpoint(path)
    return str(caught.value)


def archive_of_numpy():
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


FILES = {
    "pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
    "pointer of git-annex": (b"/annex/objects/SHA256E-s9--00.pth\n", "git annex get"),
    "link of git-annex": (b"../.git/annex/objects/X/Y/SHA256E-s9--00.pth", "git annex get"),
    "pointer of DVC": (b"outs:\n- md5: 00\n  path: w.pth\n", "dvc pull"),
    "web page": (b"\n<!DOCTYPE html><html><title>Quota exceeded</title>", "web page"),
    "error of S3": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML"),
    "error of an API": (b'{"error": "Invalid username or password."}', "JSON"),
    "empty": (b"", "is empty"),
    "zeros": (bytes(4096), "zeros"),
    "gzip": (gzip.compress(b"x"), "gunzip < "),
    "bzip2": (b"BZh91AY&SY", "bunzip2 < "),
    "xz": (b"\xfd7zXZ\x00", "unxz < "),
    "zstd": (b"\x28\xb5\x2f\xfd\x04", "unzstd < "),
    "7z": (b"7z\xbc\xaf\x27\x1c\x00\x04", "7z x"),
    "ONNX": (PROTOBUF, "onnx2torch"),
    "SavedModel": (b"\x08\x01\x12\xc0\x01\n", OTHER),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(8), OTHER),
    "msgpack": (b"\x82\xa6params\x81", OTHER),
    "GGUF": (b"GGUF\x03\x00\x00\x00", OTHER),
    "TensorFlow Lite": (b"\x1c\x00\x00\x00TFL3", OTHER),
    "arrays": (archive_of_numpy(), "archive of NumPy"),
    "array": (b"\x93NUMPY\x01\x00", "array of NumPy"),
    "image": (b"\x89PNG\r\n\x1a\n", "--data"),
    "pickle": (pickle.dumps({"fc.weight": np.zeros(3)}), "never run"),
    "AppleDouble": (b"\0\x05\x16\x07\0\x02\0\0Mac OS X", "keeps beside a file"),
    "left by iCloud": (b"bplist00\xd3", "property list"),
    "Core ML": (b"\x08\x05\x12\xac\x02\n*\n\x05image", OTHER),
    "OpenVINO": (b'<?xml version="1.0"?>\n<net name="x" version="11">', OTHER),
    "frozen graph": (b"\n=\n\x05input\x12\x0bPlaceholder", OTHER),
    "index of TensorFlow": (b'model_checkpoint_path: "model.ckpt-10"\n', OTHER),
    "MXNet": (b"\x12\x01" + bytes(10), OTHER),
    "joblib": (b"x\x9c\xed\xbd", "zlib"),
    "Parquet": (b"PAR1\x15\x04", "export it as CSV"),
    "text": (b"404: Not Found", "14 bytes begin with b'404: Not Found'; download"),
    "other": (b"\x93\x01\x02 quota", "9 bytes begin with b'\\x93\\x01\\x02 quota'; save"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_a_file_is_told_by_its_content(tmp_path, kind, name):
    content, says = FILES[kind]
    (tmp_path / name).write_bytes(content)
    assert says in refused(tmp_path / name)


def test_names_do_not_decide(tmp_path):
    """As files that were renamed; torch's loader alone goes by the name."""
    torch.save(STATE, tmp_path / "w.safetensors")
    assert "rename it" in refused(tmp_path / "w.safetensors")
    safetensors.torch.save_file(STATE, tmp_path / "w.bin")
    assert torch.equal(read_checkpoint(tmp_path / "w.bin").state["fc.weight"], STATE["fc.weight"])
    torch.save(STATE, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(read_checkpoint(tmp_path / "old.bin").state["fc.weight"], STATE["fc.weight"])


def test_archives(tmp_path):
    def says(expected, **members):
        with zipfile.ZipFile(tmp_path / "w.pth", "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        assert expected in refused(tmp_path / "w.pth")

    says(OTHER, **{"config.json": "{}", "model.weights.h5": "x"})
    says(OTHER, **{"m/Manifest.json": "{}"})
    says("is of torch.package", **{"p/.data/extern_modules": "", "p/model/model.pkl": ""})
    says("holds model/w.pth; unpack it: unzip", **{"model/w.pth": "x"})
    torch.save(STATE, tmp_path / "whole.pth")
    (tmp_path / "w.pth").write_bytes((tmp_path / "whole.pth").read_bytes()[:-99])
    assert "incomplete" in refused(tmp_path / "w.pth")
    with tarfile.open(tmp_path / "w.tar", "w") as archive:
        archive.add(tmp_path / "whole.pth")
    assert "tar xf" in refused(tmp_path / "w.tar")


def converted(text, folder):
    """Runs the command of a message, and reads what it writes."""
    command = re.search(r"python (-c .*)", text)[1]
    done = subprocess.run([sys.executable, *shlex.split(command)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return read_checkpoint(folder / "weights.pth").state


@pytest.mark.thinned(4)
@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("archive", [True, False])
def test_newer_pickle_protocols_are_converted_by_the_command_that_is_named(tmp_path, protocol, archive):
    file = tmp_path / "my file.pth"
    torch.save(STATE, file, pickle_protocol=protocol, _use_new_zipfile_serialization=archive)
    text = refused(file)
    assert f"pickle protocol {protocol}" in text
    assert torch.equal(converted(text, tmp_path)["fc.weight"], STATE["fc.weight"])


@pytest.mark.slow
def test_what_holds_code_is_converted_by_the_command_that_is_named(tmp_path):
    file = tmp_path / "w.pth"
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    torch.save(net, file)
    assert torch.equal(converted(refused(file), tmp_path)["1.weight"], net[1].weight)
    torch.jit.save(torch.jit.trace(net, torch.zeros(1, 3)), file)
    assert torch.equal(converted(refused(file), tmp_path)["1.weight"], net[1].weight)
    torch.export.save(torch.export.export(net, (torch.zeros(1, 3),)), tmp_path / "w.pt2")
    assert torch.equal(converted(refused(tmp_path / "w.pt2"), tmp_path)["1.weight"], net[1].weight)
    for state in (STATE, {key: value.numpy() for key, value in STATE.items()}):
        file.write_bytes(pickle.dumps({**state, "author": "x"}))
        assert torch.equal(converted(refused(file), tmp_path)["fc.weight"], STATE["fc.weight"])
    torch.save(state, file)
    assert torch.equal(converted(refused(file), tmp_path)["fc.weight"], STATE["fc.weight"])
    np.savez(tmp_path / "w.npz", **state)
    assert torch.equal(converted(refused(tmp_path / "w.npz"), tmp_path)["fc.weight"], STATE["fc.weight"])
    with (tmp_path / "w.npz").open("rb") as images:
        assert formats.told(images, "w.npz") == formats.told(io.BytesIO(b"\x93NUMPY"), "w.npz")


@pytest.mark.parametrize("metadata", [{"epoch": 3, "format": "pt"}, {"training": {"lr": 0.1}}, {"done": True}])
def test_metadata_that_are_not_text_are_left_out_by_the_command_that_is_named(tmp_path, metadata):
    content = safetensors.torch.save(STATE, {"format": "pt"})
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps({**json.loads(content[8:end]), "__metadata__": metadata}).encode()
    file = tmp_path / "w.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    done = subprocess.run(shlex.split(re.search(r"python (-c .*)", refused(file))[0]), cwd=tmp_path)
    assert done.returncode == 0
    assert torch.equal(read_checkpoint(tmp_path / "weights.safetensors").state["fc.weight"], STATE["fc.weight"])


def test_where_no_weights_are_found_it_is_said_what_was_seen(tmp_path):
    file = tmp_path / "w.pth"
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), file)
    text = refused(file)
    assert "the keys state, param_groups" in text
    assert "state.0.exp_avg (2, 3)" in text
    torch.save({"generator": STATE, "epoch": 3}, file)
    text = refused(file)
    assert "generator.fc.weight (2, 3)" in text
    assert torch.equal(converted(text.replace("KEY", "generator"), tmp_path)["fc.bias"], STATE["fc.bias"])
    torch.save([1, 2], file)
    assert "a list" in refused(file)


def test_parts_of_distributed_training_name_the_tool_that_gathers_them(tmp_path):
    dcp.save({"model": STATE}, checkpoint_id=tmp_path / "dcp")
    for path in (tmp_path / "dcp", next((tmp_path / "dcp").glob("*.distcp"))):
        assert "format_utils dcp_to_torch" in refused(path)
    assert "dcp_to_torch" not in refused(tmp_path)
    assert "in a folder" in refused(tmp_path)
    empty = {key: torch.empty(0) for key in STATE}
    file = tmp_path / "global_step5" / "mp_rank_00_model_states.pt"
    file.parent.mkdir()
    torch.save({"module": empty, "param_shapes": [], "ds_version": "0.14"}, file)
    for path in (file, file.parent):
        assert "zero_to_fp32.py" in refused(path)
    torch.save({"module": STATE, "param_shapes": [], "ds_version": "0.14"}, file)  # of stages 1 and 2
    assert torch.equal(read_checkpoint(file).state["fc.weight"], STATE["fc.weight"])


def test_folders(tmp_path):
    def says(expected, **files):
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content.encode("latin-1"))
        assert expected in refused(folder)

    says("merge_and_unload", **{"adapter_config.json": "{}", "adapter_model.safetensors": ""})
    says("zip -0 -r", **{"data.pkl": "", "version": "3"})
    says(OTHER, **{"saved_model.pb": ""})
    says("local-dir:", **{"config.json": '{"architecture": "resnet18"}', "model.safetensors": ""})
    wrapped = '{"architecture": "resnet18", "model_type": "timm_wrapper"}'
    says("give resnet18, and", **{"config.json": wrapped, "model.safetensors": ""})
    says("model.safetensors", **{"config.json": '{"model_type": "vit"}', "model.safetensors": ""})
    says("it holds a.png", **{"a.png": ""})
    says("holds nothing")
    says(OTHER, **{"config.json": "{}", "flax_model.msgpack": "\x82\xa6params"})
    says(OTHER, **{"config.json": "{}", "tf_model.h5": "\x89HDF\r\n\x1a\n"})
    says(OTHER, **{"openvino_model.xml": "<net>", "openvino_model.bin": "x"})
    says(OTHER, **{"checkpoint": "", "model.ckpt-1.index": "", "model.ckpt-1.data-00000-of-00001": ""})
    says(OTHER, **{"_METADATA": "{}", "manifest.ocdbt": ""})
    (tmp_path / "models--timm--resnet18" / "snapshots").mkdir(parents=True)
    assert "hf-hub:" in refused(tmp_path / "models--timm--resnet18")


@pytest.mark.parametrize(
    ("content", "taken", "left"),
    [
        ({"state_dict": "a", "state_dict_ema": "b"}, "b", "not those under state_dict;"),
        ({"params": "a", "params_ema": "b"}, "b", "not those under params;"),
        ({"model": "a", "teacher": "b"}, "a", "not those under teacher;"),
        ({"state_dict": "a", "ema_state_dict": "b", "meta": {"epoch": 3}}, "a", "mmengine"),
        ({"state_dict": "a", "ema_state_dict": "b"}, "b", "not those under state_dict;"),
        ({"model": "a", "ema": {"decay": torch.tensor(0.9), "shadow_params": [*STATE.values()]}}, "a", "under ema;"),
    ],
)
def test_of_two_sets_of_weights_the_one_that_is_left_out_is_named(tmp_path, content, taken, left):
    sets = {"a": STATE, "b": {key: value + 1 for key, value in STATE.items()}}
    torch.save(
        {key: sets.get(value, value) if isinstance(value, str) else value for key, value in content.items()},
        tmp_path / "w.pth",
    )
    with pytest.warns(UserWarning, match=left):
        state = read_checkpoint(tmp_path / "w.pth").state
    assert torch.equal(state["fc.weight"], sets[taken]["fc.weight"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("settings", [{"depth": 1}, {"decay": 0.9, "backup": {}}, {"nested": {"lr": 0.1}}])
def test_settings_under_the_name_of_weights_are_not_taken_for_them(tmp_path, settings):
    torch.save({"model": settings, "ema": settings, "weights": STATE}, tmp_path / "w.pth")
    assert read_checkpoint(tmp_path / "w.pth").state.keys() == STATE.keys()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_tensor_with_and_without_a_prefix_is_refused(tmp_path, prefix):
    both = STATE | {prefix + key: value + 1 for key, value in STATE.items()}
    torch.save(both, tmp_path / "w.pth")
    safetensors.torch.save_file(both, tmp_path / "w.safetensors")
    for name in ("w.pth", "w.safetensors"):
        assert re.search(rf"{prefix}fc\.(weight|bias) with and without", refused(tmp_path / name))


def test_of_two_indexes_the_one_that_is_left_out_is_named(tmp_path):
    for number, name in enumerate(("a", "b")):
        safetensors.torch.save_file({"x": torch.full((1,), number)}, tmp_path / f"{name}.safetensors")
        index = json.dumps({"weight_map": {"x": f"{name}.safetensors"}})
        (tmp_path / f"{name}.safetensors.index.json").write_text(index)
    with pytest.warns(UserWarning, match=r"a\.safetensors\.index\.json is used, and not b\."):
        assert read_checkpoint(tmp_path).state["x"] == 0


@pytest.mark.parametrize("entry", [3, "text", None, io.BytesIO(b"x"), {1, 2}])
def test_entries_that_are_no_tensors_are_left_out(tmp_path, entry):
    torch.save({**STATE, "entry": entry}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="left out, because they are not tensors: entry"):
        assert read_checkpoint(tmp_path / "w.pth").state.keys() == STATE.keys()


def test_a_file_that_is_not_there(tmp_path):
    (tmp_path / "w.pth").symlink_to(tmp_path / "blob")
    assert "it is a link to" in refused(tmp_path / "w.pth")
    with pytest.raises(LoadError, match="no file https://example.org/w.pth; download it first"):
        read_checkpoint("https://example.org/w.pth")
    (tmp_path / "model.pth.crdownload").touch()
    with pytest.raises(LoadError, match=r"the folder has model\.pth\.crdownload"):
        read_checkpoint(tmp_path / "model.pth")
    with pytest.raises(LoadError, match="download it first"):
        Source.of("s3://bucket/w.pth")
