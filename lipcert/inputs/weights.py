"""Reads weights from untrusted files, without running code from them."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import timm
import torch
from timm.models import clean_state_dict
from torch import Tensor, nn

from lipcert.errors import LoadError, first_line, shortened
from lipcert.model import unusable

SUFFIXES = frozenset({".safetensors", ".pth", ".pt", ".bin", ".tar", ".ckpt"})

# The keys under which training scripts store the weights in a checkpoint. Averaged weights come first, as in timm's
# loader.
_WRAPPERS = ("state_dict_ema", "model_ema", "ema", "state_dict", "model")


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[Mapping[str, Tensor], str | None]:
    """The tensors of a checkpoint file, on the CPU; read lazily if the format allows it.

    Args:
        path: a ``.safetensors`` file, or a file that ``torch.load(weights_only=True)`` reads.

    Returns:
        The state dict, without wrappers and without ``module.`` and ``_orig_mod.`` prefixes, and the timm name of the
        architecture if the file has one, or None.

    Raises:
        LoadError: the file is missing, damaged or not a checkpoint, or it holds Python objects besides tensors.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise LoadError(f"{path} is a folder; give a checkpoint file, or {path} as local-dir:{path} if timm saved it")
    if not os.path.isfile(path):
        raise LoadError(f"there is no file {shortened(str(path))}")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    content = _torch_load(path)
    name = content.get("arch") if isinstance(content, Mapping) else None
    return _tensors(content, path), name if isinstance(name, str) and timm.is_model(name) else None


def load_weights(net: nn.Module, state: Mapping[str, Tensor], *, file: str | os.PathLike[str], name: str) -> None:
    """Copies a state dict into a network. Names and shapes must match exactly.

    Raises:
        LoadError: tensors are missing, unexpected, or of another shape or type; names the first ones.
    """
    own = net.state_dict()
    shapes = [
        f"{key} is {tuple(state[key].shape)} in the file and {tuple(value.shape)} in the model"
        for key, value in own.items()
        if key in state and state[key].shape != value.shape
    ]
    kinds = [
        f"{key} holds {state[key].dtype} and not numbers like the model's {value.dtype}"
        for key, value in own.items()
        if key in state and state[key].is_floating_point() != value.is_floating_point()
    ]
    problems = [
        _listed("tensor missing", "tensors missing", [key for key in own if key not in state]),
        _listed("tensor too many", "tensors too many", [key for key in state if key not in own]),
        *shapes[:1],
        *kinds[:1],
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise LoadError(
            f"{file} does not fit {name}: {'; '.join(found)}; give the timm name and arguments it was made with"
        )
    with torch.no_grad():
        for key, value in own.items():  # one by one, so that not all tensors of the file are in memory at once
            value.copy_(state[key])


def check_finite(net: nn.Module, origin: str) -> None:
    """Refuses weights that hold NaN or infinity.

    Raises:
        LoadError: there are such weights; names the first tensor.
    """
    problem = unusable(net)
    if problem is not None:
        raise LoadError(f"{origin}: {problem}; a model with such weights cannot be certified")


def _read_safetensors(path: Path) -> tuple[Mapping[str, Tensor], str | None]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata, keys = file.metadata() or {}, list(file.keys())
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        reason = first_line(error)
        raise LoadError(f"{path} is not a safetensors file, or is damaged: {reason}; download it again") from error
    if not keys:
        raise LoadError(f"{path} holds no state dict; expected names and tensors")
    name = metadata.get("architecture")
    return _Lazy(path, keys), name if name and timm.is_model(name) else None


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


def _torch_load(path: Path) -> Any:
    # timm's training script stores its options as an argparse.Namespace, which holds plain values only.
    if hasattr(torch.serialization, "safe_globals"):
        allowed: contextlib.AbstractContextManager[Any] = torch.serialization.safe_globals([argparse.Namespace])
    else:
        allowed = contextlib.nullcontext()
    try:
        archive = zipfile.is_zipfile(path)
        if archive:
            _check_archive(path)
        with allowed, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignore warnings about pickle protocols; unreadable files raise
            # A mapped file is read when a tensor is used. Only torch's newer format, a zip archive, can be mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        raise LoadError(
            f"{path} is not a PyTorch checkpoint, or holds Python objects besides tensors, which are never run; "
            "save the state_dict alone, best as safetensors"
        ) from error
    except Exception as error:
        reason = first_line(error)
        raise LoadError(f"{path} is not a PyTorch checkpoint, or is damaged: {reason}; download it again") from error


def _check_archive(path: Path) -> None:
    """Checks of a mapped file that torch omits.

    Raises:
        ValueError: the archive is compressed, so that reading it could exhaust the memory, or a checksum is wrong.
    """
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
            raise ValueError("it is an archive that is larger inside than outside, which torch does not write")
        damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {shortened(damaged)} is wrong")


def _tensors(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        wrapper = next((key for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        state = dict(content if wrapper is None else content[wrapper])
        if state and all(isinstance(key, str) and _is_plain(value) for key, value in state.items()):
            return clean_state_dict(state)
    raise LoadError(f"{path} holds no state dict; expected names and tensors, alone or under {', '.join(_WRAPPERS)}")


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
