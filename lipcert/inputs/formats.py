"""What a file or folder is that is given as weights: told by its content, not by its name, and without torch.

Two formats are read: safetensors, and what ``torch.save`` writes. Each other one has a sentence here, which says what
it is and how to get weights out of it; ``{path}`` in it is the file or folder, ``{folder}`` the folder of a file.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from lipcert.errors import LoadError, first_line, shortened

Reader = Literal["safetensors", "zip", "pickle"]

_HEAD = 512
# The first pickle of a file that torch.save wrote before torch 1.6: a number.
_LEGACY = bytes.fromhex("8a0a6cfc9c46f9206aa85019")
_PYTHON = "python -c \"import sys, torch; torch.save({}, 'weights.pth')\" {{path}}"
_TRUSTED = "; if you trust it, convert it by Python, which then runs what it holds: " + _PYTHON
RESAVE = _TRUSTED.format("torch.load(sys.argv[1], weights_only=False)")
STATE = _TRUSTED.format("torch.load(sys.argv[1], weights_only=False).state_dict()")
PART = "; if they are under one of its keys and you trust the file, save them alone: " + _PYTHON.format(
    "torch.load(sys.argv[1], weights_only=False)['KEY']"
)
_MADE_OF = "; give the PyTorch weights that it was made of"
_SCRIPT = (
    "is TorchScript, which hides its operations; give a timm name, and as its checkpoint the file that "
    "this writes: " + _PYTHON.format("torch.jit.load(sys.argv[1]).state_dict()")
)
_EXPORTED = (
    "is a program of torch.export; give the module that it was exported from, or a timm name, and as its "
    "checkpoint the file that this writes: " + _PYTHON.format("dict(torch.export.load(sys.argv[1]).state_dict)")
)
_ONNX = (
    "is an ONNX model; give the PyTorch weights that it was exported from, or in Python the module that "
    "onnx2torch.convert makes of it"
)
ZERO = (
    "belongs to a checkpoint of DeepSpeed ZeRO; gather its parts, beside its script: python zero_to_fp32.py . weights"
)

# By the first bytes of a file.
_FILES: tuple[tuple[bytes, str], ...] = (
    (rb"\0*$", "is empty, or holds zeros alone; download it again"),
    (rb"version https://git-lfs", "is a Git LFS pointer, not the file itself; get that by git lfs pull"),
    (rb"(\.\./|\./|/)?\S*annex/objects/", "is a git-annex pointer, not the file itself; get that by git annex get"),
    (rb"(outs|md5):\s", "is a DVC pointer, not the file itself; get that by dvc pull"),
    (rb"(?i)\s*(<!doctype html|<html|<head)", "is a web page, such as an error or a login; download the file again"),
    (rb"\s*<", "is XML, such as a server's error; download the file again"),
    (rb"\x1f\x8b", "is compressed by gzip; unpack it: gunzip {path} (of a .tar.gz: tar xf {path})"),
    (rb"BZh", "is compressed by bzip2; unpack it: bunzip2 {path} (of a .tar.bz2: tar xf {path})"),
    (rb"\xfd7zXZ", "is compressed by xz; unpack it: unxz {path} (of a .tar.xz: tar xf {path})"),
    (rb"\x28\xb5\x2f\xfd", "is compressed by Zstandard; unpack it: unzstd {path}"),
    (rb"\x04\x22\x4d\x18", "is compressed by LZ4; unpack it: unlz4 {path}"),
    (rb"7z\xbc\xaf\x27\x1c", "is a 7z archive; unpack it: 7z x {path}"),
    (rb"Rar!", "is a RAR archive; unpack it: unrar x {path}"),
    (rb"(?s).{257}ustar", "is a tar archive; unpack it: tar xf {path}"),
    (rb"\x08[\x02-\x7f][\x12\x1a\x22\x28\x32\x3a\x42]", _ONNX),
    (rb"\x08\x01\x12", "is a SavedModel of TensorFlow" + _MADE_OF),
    (rb"\x89HDF\r\n\x1a\n", "is HDF5, as Keras writes it, for networks that timm does not build" + _MADE_OF),
    (rb"GGUF|gg(ml|jt|la)|lmgg|tjgg", "is GGUF or GGML of llama.cpp, mostly quantised" + _MADE_OF),
    (rb"(?s).{4}TFL3", "is a TensorFlow Lite model" + _MADE_OF),
    (rb"(?s).{4}ET\d\d", "is an ExecuTorch program" + _MADE_OF),
    (rb"ftrt|ptrt", "is an engine of TensorRT" + _MADE_OF),
    (rb"\x93NUMPY", "is one array of NumPy; convert it to names and tensors, and save them by torch.save"),
    (rb"MATLAB", "is a file of MATLAB; convert it to names and tensors, and save them by torch.save"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF", "is an image; images are given with --data {path}"),
    (rb"\x7fELF|MZ|#!", "is a program, and no weights"),
    (rb"\x80[\x02-\x05]|\(dp0|\(lp0", "is a pickle that torch.save did not write, whose objects are never run"
     + _TRUSTED.format("pickle.load(open(sys.argv[1], 'rb'))").replace("import", "import pickle,")),
    (rb"[\x81-\x8f\xde\xdf][\xa0-\xbf\xd9\x00]", "is msgpack, as Flax writes it" + _MADE_OF),
    (rb"\s*[\[{]", "is JSON, a configuration or an error; give the file of the weights beside it"),
)  # fmt: skip
# By the names in a zip archive, a line each.
_ARCHIVES = (
    (r"/(constants\.pkl|code/)", _SCRIPT),
    (r"(^|/)(serialized_exported_program\.json|archive_format|models/\w+\.json)$", _EXPORTED),
    (r"\.weights\.h5$", "is a model of Keras, for networks that timm does not build" + _MADE_OF),
    (r"\.npy$", "is an archive of NumPy (.npz); convert it to names and tensors, and save them by torch.save"),
    (r"Manifest\.json$|\.mlmodel$", "is a Core ML model" + _MADE_OF),
)
# By the names in a folder, and by those of files that belong to it.
_PARTS = (
    (
        "*.distcp",
        "belongs to a checkpoint of torch.distributed.checkpoint; put its parts into one file: "
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pth",
    ),
    ("*_optim_states.pt", ZERO),
)
_FOLDERS = (
    *_PARTS,
    ("*/*.distcp", "has a checkpoint of torch.distributed.checkpoint in a folder; give that, to be told what to do"),
    ("*_model_states.pt", ZERO),
    ("global_step*", ZERO),
    ("zero_to_fp32.py", ZERO),
    ("adapter_config.json", "holds LoRA adapters; merge them first (peft: merge_and_unload()) and save the state_dict"),
    ("data.pkl", "is an archive of torch.save that was unpacked; pack it again: zip -0 -r weights.pth {path}"),
    ("saved_model.pb", "is a SavedModel of TensorFlow" + _MADE_OF),
    ("*.ckpt*.index", "is a checkpoint of TensorFlow" + _MADE_OF),
    ("_CHECKPOINT_METADATA", "is a checkpoint of Orbax (JAX)" + _MADE_OF),
    ("Manifest.json", "is a Core ML model" + _MADE_OF),
    ("snapshots", "is a folder of the hub's cache; give the model as hf-hub:OWNER/NAME"),
)


def refusal(path: Path, text: str) -> LoadError:
    """The error with a sentence of a table, whose commands name the file."""
    places = {"path": path, "folder": path if path.is_dir() else path.parent}
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", shlex.quote(os.fspath(place)))
    return LoadError(f"{path} {text}")


def reader_of(path: Path) -> Reader:
    """How the weights in a file are read; a LoadError says what any other file is, and what to do."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror or error}") from error
    for name, text in _PARTS:
        if fnmatch.fnmatch(path.name, name):
            raise refusal(path, text)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32:
        return "safetensors"
    reader: Reader | None = None
    if head.startswith(b"PK\x03\x04"):
        _check_archive(path)
        reader = "zip"
    elif head[:1] == b"\x80" and _LEGACY in head[:32]:
        reader = "pickle"
    if reader and path.suffix == ".safetensors":  # torch.load goes by the name
        raise refusal(path, "is a file of torch.save and not of safetensors; rename it: NAME.pth")
    if reader:
        return reader
    for start, text in _FILES:
        if re.match(start, head):
            raise refusal(path, text)
    raise LoadError(
        f"{path} is neither a safetensors file nor one of torch.save: its {path.stat().st_size} bytes begin with "
        f"{head[:12]!r}; save the state_dict as safetensors"
    )


def _check_archive(path: Path) -> None:
    """Refuses archives of another kind than ``torch.save`` writes, compressed ones, and wrong checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.namelist()
            names = "\n".join(listed)
            for pattern, text in _ARCHIVES:
                if re.search(pattern, names, re.MULTILINE):
                    raise refusal(path, text)
            if not re.search(r"/data\.pkl$", names, re.MULTILINE):
                raise refusal(path, f"is a zip archive that holds {_few(listed)}; unpack it: unzip {{path}}")
            if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
                raise ValueError("it is larger inside than outside, which torch does not write")
            damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {shortened(damaged)} is wrong")
    except LoadError:
        raise
    except Exception as error:  # of zipfile and zlib: there are many
        raise LoadError(f"{path} is a damaged or incomplete archive: {first_line(error)}; download it again") from error


def of_folder(path: Path, suffixes: Collection[str]) -> LoadError:
    """What a folder is that is given as weights; ``suffixes`` are those of files of weights."""
    for pattern, text in _FOLDERS:
        if any(path.glob(pattern)):
            return refusal(path, text)
    names = sorted(entry.name for entry in path.iterdir())
    if "config.json" in names and b'"architecture"' in (path / "config.json").read_bytes():
        return refusal(path, "is a folder of timm's; give it as the model, without a name: local-dir:{path}")
    found = [name for name in names if Path(name).suffix in suffixes]
    if found:
        return refusal(path, f"is a folder; give the file of the weights in it: {_few(found)}")
    return refusal(path, f"is a folder without weights; it holds {_few(names)}; images are given as --data {{path}}")


def _few(names: list[str]) -> str:
    """The first names."""
    return ", ".join(map(shortened, names[:3])) + (", …" if len(names) > 3 else "") or "nothing"
