"""Recognises files and folders of other formats than a reader takes, by content and not by name, without torch.

Weights are read from two formats: safetensors, and what ``torch.save`` writes. Each other one has a sentence here that
says what it is and how to get weights out of it; ``{path}`` in it is the file or folder, ``{folder}`` the folder of a
file. The sentences of ``_ANY`` are for images and lists, too.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import zipfile
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, Literal

from lipcert.errors import LoadError, first_line, shortened
from lipcert.inputs.files import listing

Reader = Literal["safetensors", "zip", "pickle"]

_HEAD = 512
# The first pickle of a file that torch.save wrote before torch 1.6: a number.
_LEGACY = bytes.fromhex("8a0a6cfc9c46f9206aa85019")
_PYTHON = "python -c \"import sys, torch; torch.save({}, 'weights.pth')\" {{path}}"
_TRUSTED = "; if you trust it, convert it by Python, which then runs what it holds: " + _PYTHON
_LOADED = "torch.load(sys.argv[1], weights_only=False)"
RESAVE = _TRUSTED.format(_LOADED)
STATE = _TRUSTED.format(_LOADED + ".state_dict()")
_ALONE = "; if weights are {} and you trust the file, save them alone: "
OF_KEY = _ALONE.format("under one of its keys") + _PYTHON.format(_LOADED + "['KEY']")
OF_ENTRY = _ALONE.format("one of its entries") + _PYTHON.format(_LOADED + "[NUMBER]")
_TENSORS = "torch.utils._pytree.tree_map(lambda x: torch.tensor(x) if hasattr(x, 'dtype') else x, {})"
ARRAYS = _TRUSTED.format(_TENSORS.format(_LOADED))
_NUMPY = _PYTHON.format(_TENSORS.format("dict(numpy.load(sys.argv[1]))")).replace("import", "import numpy,")
_OF_JAX = _PYTHON.format("net.state_dict()").replace(
    "torch;", "timm, torch; net = timm.create_model('NAME', num_classes=N); net.load_pretrained(sys.argv[1]);"
)
_OTHER = (
    "is of another framework (TensorFlow, TensorFlow Lite, Keras in HDF5, Core ML, OpenVINO, TensorRT, MXNet, Caffe, "
    "ExecuTorch, GGUF or GGML, Flax in msgpack, Orbax); give the PyTorch weights that it was made of"
)
_SCRIPT = (
    "is TorchScript, which hides its operations; give a timm name, and as its checkpoint the file that "
    "this writes: " + _PYTHON.format("torch.jit.load(sys.argv[1]).state_dict()")
)
_EXPORTED = (
    "is a program of torch.export; give the module that it was exported from, or a timm name, and as its "
    "checkpoint the file that this writes: " + _PYTHON.format("dict(torch.export.load(sys.argv[1]).state_dict)")
)
ONNX = (
    "an ONNX model; give the module that it was exported from, or its weights, or what onnx2torch.convert makes of it"
)
ZERO = "belongs to a checkpoint of DeepSpeed ZeRO; gather its parts, in its folder: python zero_to_fp32.py . weights"

METADATA = (
    'has metadata that are not text, which safetensors does not allow; write the file without them: python -c "import '
    "json, sys; b = open(sys.argv[1], 'rb').read(); n = 8 + int.from_bytes(b[:8], 'little'); h = json.loads(b[8:n]); "
    "del h['__metadata__']; h = json.dumps(h).encode(); "
    "open('weights.safetensors', 'wb').write(len(h).to_bytes(8, 'little') + h + b[n:])\" {path}"
)

_ARRAYS = "holds arrays, or objects of Python; give images and labels to lipcert.certify in Python"
# By the first bytes of any file.
_ANY: tuple[tuple[bytes, str], ...] = (
    (rb"\0*$", "is empty, or holds zeros alone; download it again"),
    (rb"\0\x05\x16\x07", "is what macOS keeps beside a file; give the file itself, whose name has no ._ in front"),
    (rb"bplist00", "is a property list of macOS, as iCloud leaves it in place of a file; download the file itself"),
    (rb"version https://git-lfs", "is a Git LFS pointer, not the file itself; get that by git lfs pull"),
    (rb"(\.\./|\./|/)?\S*annex/objects/", "is a git-annex pointer, not the file itself; get that by git annex get"),
    (rb"(outs|md5):\s", "is a DVC pointer, not the file itself; get that by dvc pull"),
    (rb"(?s)\s*(<\?xml[^>]*>\s*)?<net ", _OTHER),
    (
        rb"(?s)\s*(<(\?xml|!--|!DOCTYPE svg).*)?<svg|.{4}(ftyp|JXL |jP  )|\xff(\x0a|\x4f\xff\x51)|.{128}DICM|8BPS",
        "is of a kind that is not read (SVG, HEIC, AVIF, JPEG XL, JPEG 2000, DICOM, PSD, video); convert it to PNG",
    ),
    (rb"\s*<", "is a web page or XML, such as an error or a login; download the file again"),
    (rb"\x1f\x8b", "is compressed by gzip; unpack it: gunzip < {path} > unpacked (of a .tar.gz: tar xf {path})"),
    (rb"BZh", "is compressed by bzip2; unpack it: bunzip2 < {path} > unpacked (of a .tar.bz2: tar xf {path})"),
    (rb"\xfd7zXZ", "is compressed by xz; unpack it: unxz < {path} > unpacked (of a .tar.xz: tar xf {path})"),
    (rb"\x28\xb5\x2f\xfd", "is compressed by Zstandard; unpack it: unzstd < {path} > unpacked"),
    (rb"\x04\x22\x4d\x18", "is compressed by LZ4; unpack it: unlz4 < {path} > unpacked"),
    (rb"x[\x01\x5e\x9c\xda]", "is compressed by zlib, as joblib writes; save the state_dict by torch.save"),
    (rb"7z\xbc\xaf\x27\x1c", "is a 7z archive; unpack it: 7z x {path}"),
    (rb"Rar!", "is a RAR archive; unpack it: unrar x {path}"),
    (rb"(?s).{257}ustar", "is a tar archive; unpack it: tar xf {path}"),
    (rb"(?s)PK\x03\x04.{26}[\w./-]+(\.npy|/data\.pkl)", _ARRAYS),
    (rb"PK\x03\x04", "is a zip archive, as workbooks of Excel are; unpack it, or save the workbook as CSV (UTF-8)"),
    (rb"\xd0\xcf\x11\xe0", "is a document of an older Office; save it as CSV (UTF-8)"),
    (rb"PAR1|ARROW1|SQLite", "is a table of Parquet, Arrow or SQLite; export it as CSV, or its images as files"),
    (rb"%PDF|\x7fELF|MZ|#!", "is a PDF or a program; give the file itself"),
)
# By the first bytes of a file of images or a list.
_OF_ARRAYS = ((rb"\x93NUMPY|\x89HDF|MATLAB|\x80[\x02-\x05]|\0\0[\x08\x09\x0b-\x0e][\x01-\x04]", _ARRAYS),)
# By the first bytes of a file of weights.
_MODELS: tuple[tuple[bytes, str], ...] = (
    (
        rb"\x08(\x01\x12|[\x01-\x0f]\x12[^\n]{1,3}\n)|\n[^\n]{1,2}\n|\x12\x01\0{6}|\x89HDF\r\n\x1a\n|(?s:.{4}(TFL3|ET\d\d))|"
        rb"[fp]trt|GGUF|gg(ml|jt|la)|lmgg|tjgg|model_checkpoint_path:|[\x81-\x8f\xde\xdf][\xa0-\xbf\xd9\x00]",
        _OTHER,
    ),
    (rb"\x08[\x02-\x7f][\x12\x1a\x22\x28\x32\x3a\x42]", "is " + ONNX),
    (rb"\x93NUMPY", "is one array of NumPy, without the names of tensors; give a file of all weights with their names"),
    (rb"MATLAB", "is a file of MATLAB; convert it to names and tensors, and save them by torch.save"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF", "is an image; images are given with --data {path}"),
    (rb"\x80[\x02-\x05]|\(dp0|\(lp0", "is a pickle that torch.save did not write, whose objects are never run"
     + _TRUSTED.format(_TENSORS.format("pickle.load(open(sys.argv[1], 'rb'))")).replace("import", "import pickle,")),
    (rb"\s*[\[{]", "is JSON, a configuration or an error; give the file of the weights"),
)  # fmt: skip
# By the names in a zip archive, a line each.
_ARCHIVES = (
    (r"/(constants\.pkl|code/)", _SCRIPT),
    (r"(^|/)(serialized_exported_program\.json|archive_format|models/\w+\.json)$", _EXPORTED),
    (r"\.weights\.h5$|Manifest\.json$|\.mlmodel$", _OTHER),
    (r"^Transformer/.*\.npy$", "holds weights of JAX, which timm converts: " + _OF_JAX),
    (r"/\.data/extern_modules$", "is of torch.package; load the module from it in Python, and give lipcert.load that"),
    (r"\.npy$", "is an archive of NumPy (.npz); if its names are those of the network, convert it: " + _NUMPY),
)
# By the names in a folder, and by those of files that belong to it.
_PARTS = (
    (
        "*.distcp",
        "belongs to a checkpoint of torch.distributed.checkpoint; put its parts into one file: "
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pth",
    ),
    ("*_optim_states.pt", ZERO),
    *((f"*.ckpt*.{end}", _OTHER) for end in ("index", "meta", "data-*-of-*")),
    *((name, _OTHER) for name in ("saved_model.pb", "Manifest.json", "openvino_model.*", "*.ocdbt", "*_METADATA")),
)
_FOLDERS = (
    *_PARTS,
    ("*/*.distcp", "has a checkpoint of torch.distributed.checkpoint in a folder; give that, to be told what to do"),
    *((name, ZERO) for name in ("*_model_states.pt", "global_step*", "zero_to_fp32.py")),
    ("adapter_config.json", "holds LoRA adapters; merge them first by merge_and_unload() of peft, and save that"),
    ("data.pkl", "is an archive of torch.save that was unpacked; pack it again: zip -0 -r weights.pth {path}"),
    ("snapshots", "is a folder of the hub's cache; give the model as hf-hub:OWNER/NAME"),
)


def refusal(path: Path, text: str) -> LoadError:
    """The error with a sentence of a table, whose commands name the file."""
    return LoadError(_said(path, text.replace("{folder}", shlex.quote(str(path if path.is_dir() else path.parent)))))


def _said(name: object, text: str) -> str:
    return f"{name} {text.replace('{path}', shlex.quote(str(name)))}"


def _known(head: bytes, kinds: Collection[tuple[bytes, str]]) -> str | None:
    return next((text for start, text in kinds if re.match(start, head)), None)


def told(file: BinaryIO | Path, name: object) -> str | None:
    """The format of a file that is neither an image nor a list, and what to do; None if it is unknown."""
    with file.open("rb") if isinstance(file, Path) else nullcontext(file) as opened:
        text = _known(opened.read(_HEAD), (*_ANY, *_OF_ARRAYS))
    return text and _said(name, text)


def reader_of(path: Path) -> Reader:
    """The reader of the weights in a file; a LoadError names the format of any other file, and what to do."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    for name, text in _PARTS:
        if fnmatch.fnmatch(path.name, name):
            raise refusal(path, text)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32:
        return "safetensors"
    is_zip = head.startswith(b"PK\x03\x04")
    if is_zip:
        _check_archive(path)
    if is_zip or (head[:1] == b"\x80" and _LEGACY in head[:32]):
        if path.suffix == ".safetensors":  # torch.load goes by the name
            raise refusal(path, "is a file of torch.save and not of safetensors; rename it: NAME.pth")
        return "zip" if is_zip else "pickle"
    if known := _known(head, (*_ANY, *_MODELS)):
        raise refusal(path, known)
    is_text = re.fullmatch(rb"[\t\r\n -~]+", head)
    remedy = "download the file again, or give that of the weights" if is_text else "save the state_dict as safetensors"
    raise LoadError(
        f"{path} is {'text, and ' if is_text else ''}neither a safetensors file nor one of torch.save: its "
        f"{path.stat().st_size} bytes begin with {head[:24]!r}; {remedy}"
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
                raise refusal(path, f"is a zip archive that holds {listing(listed)}; unpack it: unzip {{path}}")
            if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
                raise ValueError("it is larger inside than outside, which torch does not write")
            damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {shortened(damaged)} is wrong")
    except (LoadError, OSError):
        raise
    except Exception as error:  # of zipfile and zlib: there are many
        raise LoadError(f"{path} is a damaged or incomplete archive: {first_line(error)}; download it again") from error


def of_folder(path: Path, suffixes: Collection[str]) -> LoadError:
    """The kind of a folder that is given as weights; ``suffixes`` are those of files of weights."""
    for pattern, text in _FOLDERS:
        if any(path.glob(pattern)):
            return refusal(path, text)
    names = sorted(entry.name for entry in path.iterdir())
    if named := configuration_beside(path / "weights"):
        if "timm_wrapper" in named.string:  # of transformers, which timm does not read
            text = f"is a folder of transformers; give {named[1]}, and --checkpoint {{path}}/model.safetensors"
            return refusal(path, text)
        return refusal(path, "is a folder of timm's; give it as the model, without a name: local-dir:{path}")
    found = [name for name in names if Path(name).suffix in suffixes]
    if found:
        return refusal(path, f"is a folder; give the file of the weights in it: {listing(found)}")
    for file in filter(Path.is_file, map(path.joinpath, names)):
        with file.open("rb") as opened:
            if (known := _known(opened.read(_HEAD), _MODELS)) and "JSON" not in known:
                return refusal(file, known)
    held = listing(names) or "nothing"
    return refusal(path, f"is a folder without weights; it holds {held}; images are given as --data {{path}}")


def configuration_beside(path: Path) -> re.Match[str] | None:
    """The name of the architecture in a ``config.json`` of timm's or transformers' beside a file of weights."""
    config = path.with_name("config.json")
    return re.search(r'"architecture": *"([\w.]+)"', config.read_text(errors="replace") if config.is_file() else "")
