"""Reads weights from untrusted files, without running code from them."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import timm
import torch
from timm.models import clean_state_dict, remap_state_dict
from torch import Tensor, nn

from lipcert.errors import LoadError, first_line, shortened
from lipcert.inputs.preprocessing import INTERPOLATIONS
from lipcert.model import unusable

SUFFIXES = frozenset({".safetensors", ".pth", ".pt", ".bin", ".tar", ".ckpt", ".npz"})

# The keys under which training scripts store the weights in a checkpoint. Averaged weights come first, as in timm's
# loader.
_WRAPPERS = (
    "state_dict_ema", "model_ema", "ema", "ema_state_dict", "model_ema_state_dict", "params_ema", "shadow",
    "state_dict", "model_state_dict", "model_state", "model", "net", "network", "weights", "params", "module", "state",
)  # fmt: skip
_NESTED = 3  # wrappers in wrappers, as Composer's {"state": {"model": ...}}
# Tensors that tools add to a state dict and that no network reads.
_ADDED = ("total_ops", "total_params")
# Tensors from which a weight is computed.
_COMPUTED = re.compile(r"\.parametrizations\.|weight_(g|v|orig|mask)$")
# What modules that normalise pixels call their mean and their standard deviation.
_NORMALISERS = {"mean": "std", "_mean": "_std", "new_mean": "new_std", "mu": "sigma"}
# Kinds of files that are no checkpoints, by their first bytes or their suffix, and what to do.
_EXPORT = "export the state_dict of the network it was made of"
_FOREIGN = (
    (b"version ", ".lfs", "a pointer of Git LFS and not the file itself; run git lfs pull"),
    (b"<!DOCTYP", ".html", "a web page; download the file itself"),
    (b"<html", ".htm", "a web page; download the file itself"),
    (b"\x89HDF", ".h5", f"an HDF5 file of Keras; {_EXPORT}"),
    (b"GGUF", ".gguf", "a GGUF file of quantised weights; give those of the network it was made of"),
    (b"", ".onnx", f"an ONNX program and not weights; {_EXPORT}"),
    (b"", ".keras", f"a Keras model; {_EXPORT}"),
    (b"", ".tflite", f"a TensorFlow Lite program; {_EXPORT}"),
    (b"", ".pb", f"a TensorFlow graph; {_EXPORT}"),
    (b"", ".pt2", f"an exported program and not weights; {_EXPORT}"),
    (b"", ".msgpack", "a file of Flax; give weights of PyTorch"),
    (b"", ".pdparams", "a file of Paddle; give weights of PyTorch"),
)
FOREIGN_SUFFIXES = frozenset(suffix for _, suffix, _ in _FOREIGN)


@dataclass
class StoredWeights:
    """What a checkpoint file holds.

    Attributes:
        state: the tensors, on the CPU; read lazily if the format allows it.
        name: the timm name of the architecture, if the file has one.
        arguments: arguments of ``timm.create_model`` that the training script recorded.
        pixels: what it recorded of the preprocessing: ``mean``, ``std``, ``size``, ``crop_pct``, ``interpolation``.
    """

    state: Mapping[str, Tensor]
    name: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    pixels: dict[str, Any] = field(default_factory=dict)


def read_checkpoint(path: str | os.PathLike[str]) -> StoredWeights:
    """Reads a checkpoint file."""
    path = Path(path)
    if os.path.isdir(path):
        raise LoadError(
            f"{path} is a folder; give a checkpoint file, or local-dir:{path} if timm saved the model there; "
            f"images are given as --data {path}"
        )
    if not os.path.isfile(path):
        raise LoadError(f"there is no file {shortened(str(path))}")
    with path.open("rb") as file:
        start = file.read(8)
    for magic, suffix, what in _FOREIGN:
        if (magic and start.startswith(magic)) or path.suffix.lower() == suffix:
            raise LoadError(f"{path} is {what}")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    content = _torch_load(path)
    entries = content if isinstance(content, Mapping) else {}
    name = next(
        (entries[key] for key in ("arch", "architecture", "model_name") if _is_architecture(entries.get(key))), None
    )
    arguments, pixels, named = _of_training(entries)
    return StoredWeights(_tensors(content, path), name or named, arguments, pixels)


def _is_architecture(name: Any) -> bool:
    return isinstance(name, str) and timm.is_model(name)


def _of_training(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """What timm's ``train.py`` and Lightning record beside the weights: arguments, preprocessing, architecture."""
    args = content.get("args")
    options = dict(vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, Mapping) else {})
    hyper = content.get("hyper_parameters")
    named = {**(hyper if isinstance(hyper, Mapping) else {}), **options}
    name = next(
        (
            named[key]
            for key in ("model", "model_name", "arch", "architecture", "backbone")
            if _is_architecture(named.get(key))
        ),
        None,
    )
    size = options.get("input_size") or options.get("img_size")
    height_width = [size, size] if isinstance(size, int) else None
    if size is not None and _numbers(size):
        height_width = [int(n) for n in size][-2:]
    arguments = {key: options[key] for key in ("num_classes", "in_chans") if type(options.get(key)) is int}
    if type(named.get("num_classes")) is int:
        arguments["num_classes"] = named["num_classes"]
    if isinstance(options.get("gp"), str):
        arguments["global_pool"] = options["gp"]
    if isinstance(options.get("model_kwargs"), Mapping):
        arguments |= {key: value for key, value in options["model_kwargs"].items() if _is_simple(value)}
    pixels: dict[str, Any] = {
        key: [float(x) for x in options[key]] for key in ("mean", "std") if _numbers(options.get(key))
    }
    if height_width is not None:
        pixels["size"] = height_width
    if isinstance(options.get("crop_pct"), (int, float)) and not isinstance(options["crop_pct"], bool):
        pixels["crop_pct"] = float(options["crop_pct"])
    if options.get("interpolation") in INTERPOLATIONS:
        pixels["interpolation"] = options["interpolation"]
    return arguments, pixels, name


def _numbers(value: Any) -> bool:
    plain = isinstance(value, (list, tuple)) and len(value) > 0
    return plain and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in value)


def _is_simple(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_simple, value))
    return isinstance(value, (bool, int, float, str))


def load_weights(
    net: nn.Module, state: Mapping[str, Tensor], *, file: str | os.PathLike[str], name: str, new_head: bool = False
) -> dict[str, list[float]]:
    """Copies a state dict into a network. Names must match exactly, up to a prefix that they share; shapes exactly.

    With ``new_head`` a classifier for another number of classes is set to zero, and a warning says so. From zero, the
    first updates train it alone: a random one, with large gradients, destroys what the other layers have learned
    (Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, appendix B.1.1).

    A warning says so where a prefix was stripped that training wrappers do not write by themselves, where timm's own
    remapping of names was needed, and which tensors are outside the network.
    """
    tensors = net.state_dict()
    needed = [key for key in tensors if not key.endswith("num_batches_tracked")]
    prefix = _prefix(state, needed, file)
    inside = {key.removeprefix(prefix): key for key in state if key.startswith(prefix)}
    outside = [key for key in state if not key.startswith(prefix)]
    extra = [
        key for key in inside if key not in tensors and key.rpartition(".")[2] not in _ADDED and key != "n_averaged"
    ]
    if extra and not prefix and (remapped := _by_timm(net, state)) is not None:
        renamed, how = remapped
        warnings.warn(f"{file}: its names are not timm's; {how}", stacklevel=2)
        state, inside, extra = renamed, {key: key for key in renamed}, [key for key in renamed if key not in tensors]
    missing = [key for key in (needed if prefix or not extra else tensors) if key not in inside]
    heads = _other_heads(net, {key: state[inside[key]] for key in tensors if key in inside}) if new_head else {}
    shapes = [
        f"{key} is {tuple(state[inside[key]].shape)} in the file and {tuple(value.shape)} in the model"
        for key, value in tensors.items()
        if key in inside and key not in heads and state[inside[key]].shape != value.shape
    ]
    kinds = [
        f"{key} holds {state[inside[key]].dtype} and not numbers like the model's {value.dtype}"
        for key, value in tensors.items()
        if key in inside and state[inside[key]].is_floating_point() != value.is_floating_point()
    ]
    problems = [
        _listed("tensor missing", "tensors missing", missing),
        _listed("tensor too many", "tensors too many", extra),
        *shapes[:1],
        *kinds[:1],
    ]
    reasons = [problem for problem in problems if problem]
    if reasons:
        remedy = "give the timm name and arguments it was made with"
        classes = _other_heads(net, {key: state[inside[key]] for key in tensors if key in inside})
        if any(_COMPUTED.search(key) for key in extra):
            remedy = "store the computed weights: remove weight norm, spectral norm, pruning or the like before saving"
        elif shapes and len(shapes) == len(classes) and not (missing or extra or kinds):
            remedy = f"give num_classes={next(iter(classes.values()))[0]} (--model-args)"
        raise LoadError(f"{file} does not fit {name}: {'; '.join(reasons)}; {remedy}")
    with torch.no_grad():
        for key, value in tensors.items():  # one by one, so that not all tensors of the file are in memory at once
            if key in heads:
                value.zero_()
            elif key in inside:
                value.copy_(state[inside[key]])
    for key, (before, after) in heads.items():
        if key.endswith("weight"):
            warnings.warn(
                f"{file}: {key} is for {before} classes, and the model has {after}: it starts at zero", stacklevel=2
            )
    pixels, used = _normaliser(state, outside)
    unread = [key for key in outside if key not in used and key != "n_averaged"]
    if unread:
        warnings.warn(
            f"{file}: {_listed('tensor', 'tensors', unread)} outside {prefix or 'the network'} left out", stacklevel=2
        )
    if pixels:
        numbers = "; ".join(f"{key} {', '.join(f'{x:.6g}' for x in value)}" for key, value in pixels.items())
        warnings.warn(f"{file}: the normalisation is that of {' and '.join(used)} in it: {numbers}", stacklevel=2)
    return pixels


def _other_heads(net: nn.Module, state: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """The tensors of the network's classifier that differ in the number of classes alone: that of the file, and its."""
    named = getattr(net, "pretrained_cfg", {}).get("classifier") or ()
    places = tuple(f"{place}." for place in ([named] if isinstance(named, str) else named))
    return {
        key: (len(state[key]), len(value))
        for key, value in net.state_dict().items()
        if key.startswith(places) and key in state and state[key].shape != value.shape
        if state[key].shape[1:] == value.shape[1:]
    }


def _prefix(state: Mapping[str, Tensor], needed: list[str], file: str | os.PathLike[str]) -> str:
    """The prefix below which the file has all tensors of the network; "" where there is none."""
    if not needed or all(key in state for key in needed):
        return ""
    first = needed[0]
    prefixes = [key[: -len(first)] for key in state if key.endswith(f".{first}")]
    fitting = [prefix for prefix in prefixes if all(prefix + key in state for key in needed)]
    fitting.sort(key=len)
    for other in fitting[1:]:
        if any(not torch.equal(state[fitting[0] + key], state[other + key]) for key in needed):
            raise LoadError(
                f"{file} holds several networks, under {fitting[0]} and {other}; save the state_dict of one of them"
            )
    return fitting[0] if fitting else ""


def _by_timm(net: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str] | None:
    """The state dict under timm's names, and how it was found; None where timm finds none either.

    Only names may change: the file's numbers are those of the network, none is left over, resized or made up.
    """
    tensors, stored = net.state_dict(), dict(state)
    numbers = sorted(value.numel() for value in stored.values())
    rename = getattr(sys.modules.get(type(net).__module__), "checkpoint_filter_fn", None)
    if rename is not None:
        with contextlib.suppress(Exception):  # of another kind of checkpoint
            renamed = rename(dict(stored), net)
            if renamed.keys() <= tensors.keys() and sorted(value.numel() for value in renamed.values()) == numbers:
                return renamed, f"{rename.__module__.rpartition('.')[2]} of timm knows them"
    kinds = [name.rpartition(".")[2] for name in tensors] == [name.rpartition(".")[2] for name in stored]
    if kinds and [value.shape for value in tensors.values()] == [value.shape for value in stored.values()]:
        with contextlib.suppress(AssertionError):
            return remap_state_dict(
                stored, net, allow_reshape=False
            ), "they were matched in order, as timm's remapping does"
    return None


def _normaliser(state: Mapping[str, Tensor], outside: Sequence[str]) -> tuple[dict[str, list[float]], list[str]]:
    """Mean and standard deviation of a module that normalises pixels, and their names."""
    for key in outside:
        place, dot, last = key.rpartition(".")
        partner = _NORMALISERS.get(last)
        if partner is not None and (other := f"{place}{dot}{partner}") in outside:
            mean, std = state[key].flatten(), state[other].flatten()
            if mean.numel() == std.numel() in (1, 3):
                return {"mean": mean.tolist(), "std": std.tolist()}, [key, other]
    return {}, []


def load_npz(net: nn.Module, file: str | os.PathLike[str], name: str) -> None:
    """Loads weights that JAX's ``vision_transformer`` and its relatives wrote, through timm."""
    load = getattr(net, "load_pretrained", None)
    if load is None:
        raise LoadError(f"{file} is an archive of NumPy, which timm does not load for {name}; give weights of PyTorch")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(math.nan)
    try:
        load(os.fspath(file))
    except Exception as error:
        raise LoadError(
            f"{file} does not fit {name}: {first_line(error)}; give the timm name it was made for"
        ) from error
    unset = [key for key, parameter in net.named_parameters() if bool(parameter.isnan().any())]
    if unset:
        raise LoadError(f"{file} does not fit {name}: {_listed('tensor missing', 'tensors missing', unset)}")


def check_finite(net: nn.Module, origin: str) -> None:
    """Refuses weights that hold NaN or infinity."""
    problem = unusable(net)
    if problem is not None:
        raise LoadError(f"{origin}: {problem}; a model with such weights cannot be certified")


def _read_safetensors(path: Path) -> StoredWeights:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata, keys = file.metadata() or {}, list(file.keys())
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        reason = first_line(error)
        raise LoadError(f"{path} is not a safetensors file, or is damaged: {reason}; download it again") from error
    if not keys:
        raise LoadError(f"{path} holds no state dict; expected names and tensors")
    name = metadata.get("architecture")
    return StoredWeights(_Lazy(path, keys), name if name and timm.is_model(name) else None)


class _Lazy(Mapping[str, Tensor]):
    """The tensors of a safetensors file. Each is read, and its memory mapped, only while it is in use."""

    def __init__(self, path: Path, keys: list[str]):
        self.path = path
        stored = clean_state_dict({key: key for key in keys})
        self.stored = dict(stored)

    def __getitem__(self, key: str) -> Tensor:
        stored = self.stored[key]
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                return file.get_tensor(stored)
        except (safetensors.SafetensorError, OSError, ValueError, AttributeError) as error:  # types that torch lacks
            reason = f"{shortened(key)} cannot be read ({first_line(error)})"
            raise LoadError(f"{self.path} is damaged, or changed while it was read: {reason}; get it again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


class _Omitted(list[Any]):
    """Stands for an object that is left out; making one, or a list of that type, runs nothing of the file."""

    def __new__(cls, *args: Any) -> _Omitted:
        return list.__new__(cls)

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# Numbers of NumPy, such as an accuracy, which training scripts store beside the weights.
_NUMPY = ("multiarray.scalar", "multiarray._reconstruct")
_HARMLESS = (*(f"numpy.{core}.{name}" for core in ("core", "_core") for name in _NUMPY), "numpy.dtype", "numpy.ndarray")


def _torch_load(path: Path) -> Any:
    archive = zipfile.is_zipfile(path)
    try:
        if archive:
            _check_archive(path)
        try:
            return _tensors_of(path, archive, _HARMLESS)
        except pickle.UnpicklingError:
            listed = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
            if not archive or listed is None:
                raise
            return _tensors_of(path, archive, (*_HARMLESS, *listed(path)))
    except pickle.UnpicklingError as error:
        raise LoadError(
            f"{path} is not a PyTorch checkpoint, or holds Python objects besides tensors, which are never run; "
            "save the state_dict alone, best as safetensors"
        ) from error
    except LoadError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise LoadError(f"{path} is not a PyTorch checkpoint, or is damaged: {reason}; download it again") from error


def _tensors_of(path: Path, archive: bool, omitted: Sequence[str]) -> Any:
    """The content of a file, with :class:`_Omitted` in place of objects of these names."""
    # timm's training script stores its options as an argparse.Namespace, which holds plain values only.
    if hasattr(torch.serialization, "safe_globals"):
        stand_ins: list[Any] = [argparse.Namespace, *((_Omitted, name) for name in dict.fromkeys(omitted))]
        allowed: contextlib.AbstractContextManager[Any] = torch.serialization.safe_globals(stand_ins)
    else:
        allowed = contextlib.nullcontext()
    with allowed, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings about pickle protocols; unreadable files raise
        # A mapped file is read when a tensor is used. Only torch's newer format, a zip archive, can be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)


def _check_archive(path: Path) -> None:
    """Checks of a mapped file that torch omits."""
    with zipfile.ZipFile(path) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
        if "constants.pkl" in names or any(name.startswith("code/") for name in names):
            raise LoadError(f"{path} is TorchScript, a program and not weights; {_EXPORT}")
        if any(name.endswith(".npy") for name in archive.namelist()):
            raise LoadError(f"{path} is an archive of NumPy; name it .npz, which timm loads for some architectures")
        if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
            raise ValueError("it is an archive that is larger inside than outside, which torch does not write")
        damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {shortened(damaged)} is wrong")


def _tensors(content: Any, path: Path) -> dict[str, Tensor]:
    state = content
    for _ in range(_NESTED):
        if not isinstance(state, Mapping):
            break
        wrapper = next((key for key in _WRAPPERS if isinstance(state.get(key), Mapping) and state[key]), None)
        if wrapper is None:
            break
        state = state[wrapper]
    if isinstance(state, Mapping):
        weights = {key: value for key, value in state.items() if isinstance(key, str) and key != "_metadata"}
        if any("_packed_params" in key for key in weights) or any(
            isinstance(value, Tensor) and value.is_quantized for value in weights.values()
        ):
            raise LoadError(f"{path} holds quantised weights (int8), and not real numbers; give those it was made of")
        if weights and all(_is_plain(value) for value in weights.values()):
            return clean_state_dict(weights)
        odd = next((key for key, value in weights.items() if isinstance(value, Tensor) and not _is_plain(value)), None)
        if odd is not None:
            raise LoadError(f"{path}: {shortened(odd)} is no dense tensor of real numbers; store it as one")
    if isinstance(content, _Omitted):
        raise LoadError(f"{path} is a whole module saved as an object, which is never run; save its state_dict()")
    if isinstance(state, _Omitted) or (
        isinstance(state, Mapping) and any(isinstance(v, _Omitted) for v in state.values())
    ):
        raise LoadError(
            f"{path} holds no state dict but Python objects, which are never run; save the state_dict alone, best as "
            "safetensors"
        )
    listing = ", ".join(_WRAPPERS[:9])
    only = (
        f", only {', '.join(shortened(str(key)) for key in [*state][:4])}"
        if isinstance(state, Mapping) and state
        else ""
    )
    raise LoadError(f"{path} holds no state dict{only}; expected names and tensors, alone or under one of {listing}, …")


def _is_plain(value: Any) -> bool:
    """Whether a value is a dense, real CPU tensor without quantisation."""
    if not isinstance(value, Tensor) or value.is_nested or value.is_quantized or value.is_complex():
        return False
    return value.layout == torch.strided and value.device.type == "cpu"


def _listed(one: str, many: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} {one if len(names) == 1 else many} ({', '.join(map(shortened, names[:3]))}{more})"
