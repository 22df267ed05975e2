"""Reads weights from untrusted files, without running code from them."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
from timm.models import clean_state_dict
from torch import Tensor

from lipcert.errors import LoadError, first_line, shortened
from lipcert.inputs import formats
from lipcert.inputs.files import WEIGHTS, listing, no_file, reading
from lipcert.inputs.recorded import NESTED, WRAPPERS, Omitted, is_architecture, normalisation, numbers_of, of_training

# Modules around a part of a network, of torch.compile, of activation checkpoints and of sharding, in names of tensors.
_WRAPPED = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
V = TypeVar("V")
_PROTOCOL = 2  # of pickle, which torch.save writes unless told otherwise


@dataclass
class StoredWeights:
    """The content of a checkpoint file: tensors on the CPU, and the timm name of the architecture, if the file has one.

    ``arguments`` and ``pixels`` are what the training script recorded: arguments of ``timm.create_model``, and
    ``mean``, ``std``, ``size``, ``crop_pct`` and ``interpolation``.
    """

    state: Mapping[str, Tensor]
    name: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    pixels: dict[str, Any] = field(default_factory=dict)


def read_checkpoint(path: str | os.PathLike[str]) -> StoredWeights:
    """Reads a checkpoint, or the parts that an index lists; without ``module.`` and ``_orig_mod.`` prefixes.

    The path is a ``.safetensors`` file, a file that ``torch.load(weights_only=True)`` reads, whose objects other than
    tensors are left out and never made, or an index of several such files, or their folder.
    """
    path = Path(path)
    index = _index_of(path)
    content = _read_file(path) if index is None else _read_parts(index)
    if formats.configuration_beside(index or path):
        of_name = "mean, std and classes are those of the timm name or those that you give"
        warnings.warn(f"{path}: the config.json beside it is not read: {of_name}", stacklevel=4)
    return content


def _read_file(path: Path) -> StoredWeights:
    if path.is_dir():
        raise formats.of_folder(path, WEIGHTS)
    if not path.is_file():
        raise no_file(path)
    with reading(path):
        reader = formats.reader_of(path)
        content = None if reader == "safetensors" else _torch_load(path, reader == "zip")
    if reader == "safetensors":
        keys, metadata = keys_of(path)
        if not keys:
            raise LoadError(f"{path} holds no state dict: it has no tensors")
        name = metadata.get("architecture")
        shared = {alias: key for alias, key in metadata.items() if key in keys and alias not in keys}  # by save_model
        state = _Lazy(dict.fromkeys([*keys, *shared], path), shared)
        return StoredWeights(state, name if is_architecture(name) else None)
    recorded = content if isinstance(content, Mapping) else {}
    name, arguments, pixels = of_training(recorded)
    return StoredWeights(_tensors(content, path), name, arguments, {**normalisation(recorded, path), **pixels})


def _index_of(path: Path) -> Path | None:
    """The index of a checkpoint of several files, where the path is it, their folder, or one of them."""
    if path.name.endswith(".index.json"):
        return path
    part = re.fullmatch(r"(.+)-\d+-of-\d+(\.\w+)", path.name)
    if part is not None:
        index = path.with_name(f"{part[1]}{part[2]}.index.json")
        if not index.is_file():
            raise LoadError(f"{path} is one of several parts (…-of-…); put them and {index.name} into one folder")
        return index
    found = sorted(path.glob("*.index.json")) if path.is_dir() else []
    if len(found) > 1:
        others = ", ".join(other.name for other in found[1:])
        warnings.warn(f"{path} holds several checkpoints: {found[0].name} is used, and not {others}", stacklevel=4)
    return found[0] if found else None


def _read_parts(index: Path) -> StoredWeights:
    try:
        places = json.loads(index.read_text())["weight_map"]
        files = {key: index.with_name(os.path.basename(name)) for key, name in places.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise LoadError(f"{index} is no index of the parts of a checkpoint: {first_line(error)}") from error
    if missing := next((file for file in files.values() if not file.is_file()), None):
        raise LoadError(f"{index} lists {missing.name}, which is not in its folder; download all parts")
    parts = sorted({*files.values()})
    if all(part.suffix == ".safetensors" for part in parts):
        held = {part: {*keys_of(part)[0]} for part in parts}
        if any(key not in held[file] for key, file in files.items()):
            raise LoadError(f"{index} lists tensors that its parts do not hold; download them again")
        return StoredWeights(_Lazy(files))
    return StoredWeights({key: value for part in parts for key, value in _read_file(part).state.items()})


def keys_of(path: Path) -> tuple[list[str], dict[str, str]]:
    """The names and the metadata of a safetensors file."""
    with _opened(path) as file:
        return list(file.keys()), file.metadata() or {}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open safetensors file; what fails within the block is a LoadError."""
    try:
        with reading(path), safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (safetensors.SafetensorError, ValueError, AttributeError) as error:  # types that torch lacks
        if "expected a string" in (reason := first_line(error)):
            raise formats.refusal(path, formats.METADATA) from error
        raise LoadError(f"{path} is not a safetensors file, or is damaged: {reason}; download it again") from error


def _cleaned(state: Mapping[str, V], *paths: Path) -> dict[str, V]:
    """A state dict without the prefixes of torch's wrappers."""
    plain = {key: next(iter(clean_state_dict({_WRAPPED.sub("", key): 0}))) for key in state}
    cleaned = {plain[key]: value for key, value in state.items()}
    if len(cleaned) < len(state):
        times = Counter(plain.values())
        both = next(key for key in state if times[plain[key]] > 1 and plain[key] != key)
        raise LoadError(f"{paths[0]} holds {both} with and without its prefix; save the state_dict of one network")
    return cleaned


class _Lazy(Mapping[str, Tensor]):
    """The tensors of safetensors files. Each is read, and its memory mapped, only while it is in use.

    ``names`` are the names under which tensors with several names are stored.
    """

    def __init__(self, files: Mapping[str, Path], names: Mapping[str, str] = {}):
        self.stored = _cleaned({key: (names.get(key, key), path) for key, path in files.items()}, *{*files.values()})

    def __getitem__(self, key: str) -> Tensor:
        stored, path = self.stored[key]
        with _opened(path) as file:
            tensor: Tensor = file.get_tensor(stored)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


# Numbers of NumPy, such as an accuracy, which training scripts store beside the weights.
_NUMPY = ("multiarray.scalar", "multiarray._reconstruct")
_HARMLESS = (*(f"numpy.{core}.{name}" for core in ("core", "_core") for name in _NUMPY), "numpy.dtype", "numpy.ndarray")


def _torch_load(path: Path, archive: bool) -> Any:
    try:
        try:
            return _tensors_of(path, archive, _HARMLESS)
        except pickle.UnpicklingError:
            if not archive:
                raise
            listed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            return _tensors_of(path, archive, (*_HARMLESS, *listed))
    except pickle.UnpicklingError as error:
        protocol = _protocol(path, archive)
        if protocol > _PROTOCOL:
            what = f"was saved with pickle protocol {protocol}, and torch's safe loader reads {_PROTOCOL}"
            raise formats.refusal(path, what + formats.RESAVE) from error
        raise formats.refusal(path, "holds Python objects besides tensors, never run" + formats.STATE) from error
    except OSError:
        raise
    except Exception as error:
        raise LoadError(f"{path} cannot be read: {first_line(error)}; if it is damaged, download it again") from error


def _protocol(path: Path, archive: bool) -> int:
    """The pickle protocol of a file of torch.save."""
    if not archive:
        return path.read_bytes()[1]
    with zipfile.ZipFile(path) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("/data.pkl")))[1]


def _tensors_of(path: Path, archive: bool, omitted: Sequence[str]) -> Any:
    """The content of a file, with :class:`Omitted` in place of objects of these names."""
    # timm's training script stores its options as an argparse.Namespace, which holds plain values only.
    stand_ins: list[Any] = [argparse.Namespace, *((Omitted, name) for name in dict.fromkeys(omitted))]
    with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings about pickle protocols; unreadable files raise
        # A mapped file is read when a tensor is used. Only torch's newer format, a zip archive, can be mapped.
        with suppress(RuntimeError):  # of file systems that do not map
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
        return torch.load(path, map_location="cpu", weights_only=True)


def _tensors(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict in a checkpoint; a warning names others in the file, which are not used."""
    state: Mapping[Any, Any] = content if isinstance(content, Mapping) else {}
    for _ in range(NESTED):
        inner = {key: value for key, value in state.items() if isinstance(value, Mapping) and value}
        swapped = bool({"meta", "message_hub"} & inner.keys()) and {"state_dict", "ema_state_dict"} <= inner.keys()
        keys = [key for key in WRAPPERS if key in inner]  # of which some may hold settings, or tensors without names
        held = {key: any(one.dim() for _, one in _within(inner[key])) for key in keys}
        wrapper = "state_dict" if swapped else max(keys, key=lambda key: held[key], default=None)
        if wrapper is None:
            break
        state = inner.pop(wrapper)
        others = [str(key) for key, value in inner.items() if 2 * _count(value) >= max(1, _count(state))]
        if others:
            averaged = ", the averaged ones in mmengine's files" if swapped else ""
            used = f"those under {wrapper}{averaged} are used, and not those under {listing(others)}"
            warnings.warn(f"{path} holds several sets of weights: {used}; save others alone to use them", stacklevel=5)
    weights = {key: value for key, value in state.items() if isinstance(key, str) and key != "_metadata"}
    divided = isinstance(content, Mapping) and {"ds_version", "param_shapes"} & content.keys()
    if divided and any(isinstance(value, Tensor) and not value.numel() for value in weights.values()):
        raise formats.refusal(path, formats.ZERO)
    others = [key for key, value in weights.items() if not isinstance(value, (Tensor, Mapping))]
    tensors = {key: value for key, value in weights.items() if key not in others}
    if tensors and all(map(_is_plain, tensors.values())):
        if others:
            warnings.warn(f"{path}: left out, because they are not tensors: {listing(others)}", stacklevel=5)
        return _cleaned(tensors, path)
    if any("_packed_params" in key or getattr(value, "is_quantized", False) for key, value in weights.items()):
        raise LoadError(f"{path} holds quantised weights (int8), and not real numbers; give those it was made of")
    for key, value in weights.items():
        if isinstance(value, Tensor) and not _is_plain(value):
            raise LoadError(f"{path}: {shortened(key)} is no dense tensor of real numbers; store it as one")
    if isinstance(content, Omitted):
        raise formats.refusal(path, "holds a module, or another Python object, which is never run" + formats.STATE)
    omitted = [key for key, value in weights.items() if isinstance(value, Omitted)] if not _count(weights) else []
    if objects := [key for key in omitted if not numbers_of(weights[key])]:
        key = next((key for key in objects if key in WRAPPERS), objects[0])
        text = f"holds no tensors, but under {key!r} a module, or another Python object, which is never run"
        raise formats.refusal(path, text + formats.STATE.replace("False)", f"False)[{key!r}]"))
    if omitted:
        raise formats.refusal(path, "holds arrays of NumPy, and no tensors" + formats.ARRAYS)
    part = formats.OF_KEY if isinstance(content, Mapping) else formats.OF_ENTRY
    raise formats.refusal(path, f"holds no state dict, but {_seen(content)}" + part)


def _count(value: Mapping[Any, Any]) -> int:
    """The number of tensors that a mapping holds directly, or in lists."""
    lists = (one if isinstance(one, list) else [one] for one in value.values())
    return sum(isinstance(one, Tensor) for entries in lists for one in entries)


def _seen(content: Any) -> str:
    """What a checkpoint holds in which no weights were found: its keys, and its largest tensors by name."""
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    largest = sorted(_within(content), key=lambda found: -found[1].numel())[:3]
    listed = ", ".join(f"{shortened(name)} {tuple(value.shape)}" for name, value in largest)
    keys = listing([*map(str, content)]) or "none"
    return f"the keys {keys}" + (f", and as its largest tensors {listed}" if listed else ", and no tensors")


def _within(value: Any, place: str = "", depth: int = NESTED) -> Iterator[tuple[str, Tensor]]:
    """The tensors in mappings in mappings, with the keys where they are."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping) and depth >= 0:
        for key, one in value.items():
            yield from _within(one, f"{place}.{key}".strip("."), depth - 1)


def _is_plain(value: Any) -> bool:
    """Whether a value is a dense, real CPU tensor without quantisation."""
    if not isinstance(value, Tensor) or value.is_nested or value.is_quantized or value.is_complex():
        return False
    return value.layout == torch.strided and value.device.type == "cpu"
