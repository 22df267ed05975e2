"""Reads weights from untrusted files, without running code from them."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import pickle
import re
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors
import timm
import torch
from timm.models import clean_state_dict
from torch import Tensor, nn

from lipcert.errors import LoadError, as_given, first_line, shortened
from lipcert.inputs import formats
from lipcert.inputs.files import WEIGHTS, listing, no_file
from lipcert.inputs.preprocessing import INTERPOLATIONS
from lipcert.model import unusable

# The keys under which training scripts store the weights in a checkpoint. Averaged weights come first, as in timm's
# loader.
_WRAPPERS = (
    "state_dict_ema", "model_ema", "ema", "ema_state_dict", "model_ema_state_dict", "params_ema", "shadow",
    "state_dict", "model_state_dict", "model_state", "model", "net", "network", "weights", "params", "module", "state",
)  # fmt: skip
_NESTED = 3  # wrappers in wrappers, as Composer's {"state": {"model": ...}}
_NAMES = ("model", "model_name", "arch", "architecture", "backbone")
_CLASSES = ("class_to_idx", "idx_to_class", "class_names", "label_names", "id2label", "label2id", "classes")
# Tensors that tools add to a state dict and that no network reads.
_ADDED = ("total_ops", "total_params", "n_averaged", "_extra_state")
# Names that tell that the stored weights are not those of the network, and what to do.
_DERIVED = (
    (
        r"lora_|\.base_layer\.",
        "holds LoRA adapters; merge them first (peft: merge_and_unload()) and save the state_dict",
    ),
    (
        r"_packed_params|zero_point|absmax|quant_map|(weight|input)_scale|scale_(weight|input)|\.q(weight|zeros)|"
        r"weight\._(data|scale)|\.SCB$|\.W_q$",
        "holds quantised weights with their scales; give those that they were made of",
    ),
)
# Names of tensors that timm's networks do not have, and what to do.
_FOREIGN = (
    (
        r"\.parametrizations\.|weight_(g|v|orig|mask)$",
        "store the computed weights: remove weight norm, spectral norm, pruning or the like before saving",
    ),
    (r"(^|[._])reparam", "its branches were fused, as by reparameterize_model; give the weights from before that"),
)
_FILTERS = ("checkpoint_filter_fn", "_filter_fn", "_filter_torchvision_pretrained")  # of timm, for names of others
_POSITIONS = ("pos_embed", "rel_pos", "relative_position")  # what timm resizes to another size of images
# What scripts, and modules that normalise pixels, call a mean, and what they call its standard deviation.
_MEAN = re.compile(r"((?:.*\.)?_?(?:(?:data|dataset|image|img|input|new|norm\w*|pixel|rgb)_)?)(means?|mu)")
_STD = {"mean": ("std", "sd", "stdev"), "means": ("stds", "sds"), "mu": ("sigma",)}
# Records in which mean and std are those of pixels, not of scores, noise or weights.
_HOLDS = re.compile(
    r"((model|train|norm|pretrained|default)_)?(args|cfg|config)|hparams|hyper_parameters|opts?|options|meta|info|params"
    r"|(data|image|img|input|pre_?process|normali[sz]|transform)\w*"
)
# What has as many entries as an image has channels, and is not in front of a network.
_BESIDE = re.compile(
    r"(?:^|[._])(?:criterion|loss|metrics?|acc|accuracy|confmat|queue|temperature|class_weights?|teacher|momentum|ema"
    r"|target)(?:[._]|$)"
)
# Modules around a part of a network, of torch.compile, of activation checkpoints and of sharding, in names of tensors.
_WRAPPED = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_REALS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))  # of 8 bits are scaled elsewhere
File = str | os.PathLike[str]
V = TypeVar("V")
_PROTOCOL = 2  # of pickle, which torch.save writes unless told otherwise


@dataclass
class StoredWeights:
    """What a checkpoint file holds: tensors on the CPU, and the timm name of the architecture, if the file has one.

    ``arguments`` and ``pixels`` are what the training script recorded: arguments of ``timm.create_model``, and
    ``mean``, ``std``, ``size``, ``crop_pct`` and ``interpolation``.
    """

    state: Mapping[str, Tensor]
    name: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    pixels: dict[str, Any] = field(default_factory=dict)


def read_checkpoint(path: File) -> StoredWeights:
    """Reads a checkpoint, or the parts that an index lists; without ``module.`` and ``_orig_mod.`` prefixes.

    The path is a ``.safetensors`` file, a file that ``torch.load(weights_only=True)`` reads, whose objects other than
    tensors are left out and never made, or an index of several such files, or their folder.
    """
    path = Path(path)
    index = _index_of(path)
    if index is not None:
        return _read_parts(index)
    if path.is_dir():
        raise formats.of_folder(path, WEIGHTS)
    if not path.is_file():
        raise no_file(path)
    return _read_file(path)


def _read_file(path: Path) -> StoredWeights:
    reader = formats.reader_of(path)
    if reader == "safetensors":
        keys, metadata = keys_of(path)
        if not keys:
            raise LoadError(f"{path} holds no state dict: it has no tensors")
        name = metadata.get("architecture")
        return StoredWeights(_Lazy(dict.fromkeys(keys, path)), name if _is_architecture(name) else None)
    content = _torch_load(path, reader == "zip")
    recorded = content if isinstance(content, Mapping) else {}
    name, arguments, pixels = _of_training(recorded)
    return StoredWeights(_tensors(content, path), name, arguments, {**_normalisation(recorded, path), **pixels})


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
        warnings.warn(f"{path} holds several checkpoints: taken is {found[0].name}, and not {others}", stacklevel=4)
    return found[0] if found else None


def _read_parts(index: Path) -> StoredWeights:
    try:
        places = json.loads(index.read_text())["weight_map"]
        files = {key: index.with_name(os.path.basename(name)) for key, name in places.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise LoadError(f"{index} is no index of the parts of a checkpoint: {first_line(error)}") from error
    if missing := next((file for file in files.values() if not file.is_file()), None):
        raise LoadError(f"{index} lists {missing.name}, which is not beside it; download all parts")
    parts = sorted({*files.values()})
    if all(part.suffix == ".safetensors" for part in parts):
        held = {part: {*keys_of(part)[0]} for part in parts}
        if any(key not in held[file] for key, file in files.items()):
            raise LoadError(f"{index} lists tensors that its parts do not hold; download them again")
        return StoredWeights(_Lazy(files))
    return StoredWeights({key: value for part in parts for key, value in _read_file(part).state.items()})


def _is_architecture(name: Any) -> bool:
    return isinstance(name, str) and timm.is_model(name)


def _of_training(content: Mapping[str, Any]) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """What training scripts record beside the weights: architecture, arguments, preprocessing with ``class_names``."""
    args, hyper = content.get("args"), content.get("hyper_parameters")
    options = dict(vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, Mapping) else {})
    named = {**(hyper if isinstance(hyper, Mapping) else {}), **options}
    names = [one[key] for one in (content, named) for key in _NAMES if isinstance(one.get(key), str)]
    name = next(filter(_is_architecture, names), next(iter(names), None))  # timm's first, then any other
    whole = (("num_classes", named), ("in_chans", options))
    arguments = {key: place[key] for key, place in whole if type(place.get(key)) is int}
    if isinstance(options.get("gp"), str):
        arguments["global_pool"] = options["gp"]
    if isinstance(options.get("model_kwargs"), Mapping):
        arguments |= {key: value for key, value in options["model_kwargs"].items() if _is_simple(value)}
    pixels: dict[str, Any] = {}
    if size := _numbers(options.get("input_size") or options.get("img_size")):
        pixels["size"] = [int(n) for n in (size * 2)[-2:]]
    if isinstance(options.get("crop_pct"), (int, float)) and not isinstance(options["crop_pct"], bool):
        pixels["crop_pct"] = float(options["crop_pct"])
    if options.get("interpolation") in INTERPOLATIONS:
        pixels["interpolation"] = options["interpolation"]
    tables = (content, named, *(one for one in content.values() if isinstance(one, Mapping)))
    pixels["class_names"] = [
        one[key] for key in _CLASSES for one in tables if isinstance(one.get(key), (Mapping, list, tuple))
    ]
    return name, arguments, pixels


def _normalisation(content: Mapping[str, Any], path: Path) -> dict[str, list[float]]:
    """Mean and standard deviation that are recorded beside the weights; neither, if one of them is missing."""
    found = dict(_recorded(content)) if content.keys() & {*_WRAPPERS} else {}
    if (names := _pair(found)) is not None:
        return dict(zip(("mean", "std"), map(found.__getitem__, names), strict=True))
    if one := next((name for name in found if re.fullmatch(r"(.*\.)?(mean|std)", name)), ""):
        remedy = f"give {as_given('mean=')} and {as_given('std=')}"
        warnings.warn(f"{path} records {one}, and not both mean and std as numbers: not used; {remedy}", stacklevel=5)
    return {}


def _recorded(value: Any, name: str = "", depth: int = _NESTED) -> Iterator[tuple[str, list[float]]]:
    """Numbers that are called means and deviations beside the weights, with the keys where they are."""
    value = vars(value) if isinstance(value, argparse.Namespace) else value
    if isinstance(value, Mapping):
        held = depth and (not name or _HOLDS.fullmatch(name.rpartition(".")[2]))
        for key in () if not held else (key for key in value if key not in _WRAPPERS):
            yield from _recorded(value[key], f"{name}.{key}".lstrip("."), depth - 1)
    elif re.search(r"(mean|std|sd)s?$|stdev$", name) and (numbers := _numbers(value)):
        yield name, numbers


def _pair(names: Collection[str]) -> tuple[str, str] | None:
    """The names of a mean and a standard deviation of pixels that belong together."""
    means = (found for name in names if (found := _MEAN.fullmatch(name)))
    pairs = ((found[0], found[1] + std) for found in means for std in _STD[found[2]])
    return next((pair for pair in pairs if pair[1] in names), None)


def _numbers(value: Any) -> list[float]:
    """The finite numbers of a number, a text, a tensor, an array or a sequence; [] of anything else."""
    try:
        if isinstance(value, _Omitted):  # of NumPy: the bytes of its numbers, and their type
            kind = next(part for part in value.seen if isinstance(part, _Omitted))
            data = [part for part in value.seen if isinstance(part, bytes)][-1]
            value = np.frombuffer(data, np.dtype(kind.seen[0]).newbyteorder(kind.seen[4])).tolist()
        elif isinstance(value, (list, tuple)):
            value = [*map(_numbers, value)]
        elif isinstance(value, str):
            value = [*map(float, re.findall(r"[^\s,()\[\]]+", value))]
        flat = torch.as_tensor(value, dtype=torch.float64).flatten().tolist()
    except (LookupError, RuntimeError, StopIteration, TypeError, ValueError):
        return []
    return [float(f"{x:.8g}") for x in flat] if not isinstance(value, bool) and all(map(math.isfinite, flat)) else []


def _is_simple(value: Any) -> bool:
    return all(map(_is_simple, value)) if isinstance(value, (list, tuple)) else isinstance(value, (int, float, str))


def load_weights(
    net: nn.Module, state: Mapping[str, Tensor], *, file: File, name: str, new_head: bool = False, channels: int = 0
) -> dict[str, list[float]]:
    """Copies a state dict into a network, by names, up to a prefix that they share; else as timm's own filter says.

    With ``new_head`` a classifier that is missing, or for another number of classes, is set to zero, and a warning says
    so. From zero, the first updates train it alone: a random one, with large gradients, destroys what the other layers
    have learned (Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, appendix B.1.1). Returned are ``mean``
    and ``std``, if a normaliser beside the network holds them. With ``channels``, the number of those of an image,
    other tensors beside it are refused that may change pixels first.
    """
    tensors = net.state_dict()
    plain = {key.replace(".module.", "."): key for key in state}  # without DataParallel around parts
    if len(plain) == len(state) and plain.keys() != state.keys() and not any(".module." in key for key in tensors):
        state = {key: state[stored] for key, stored in plain.items()}
    for pattern, problem in _DERIVED:
        if any(re.search(pattern, key) for key in state if key not in tensors):
            raise LoadError(f"{file} {problem}")
    heads_at = getattr(net, "pretrained_cfg", {}).get("classifier") or ()
    places = tuple(f"{place}." for place in ([heads_at] if isinstance(heads_at, str) else heads_at))
    counted = [key for key in tensors if not key.endswith("num_batches_tracked")]  # that one is not used
    needed = [key for key in counted if not key.startswith(places)]
    prefix = _prefix(state, needed, file)
    found = {key.removeprefix(prefix): key for key in state if key.startswith(prefix)}
    outside = [key for key in state if not key.startswith(prefix)]
    if not _fits(found, state, tensors):
        renamed = _by_timm(net, {key: state[place] for key, place in found.items()})
        if renamed is not None:
            filtered, how = renamed
            warnings.warn(f"{file}: {how}", stacklevel=2)
            pixels_of = {key: state[key] for key in outside}
            state, found = {**filtered, **pixels_of}, {key: key for key in filtered}
    extra = [key for key in found if key not in tensors and key.rpartition(".")[2] not in _ADDED]
    missing = [key for key in counted if key not in found]
    shapes = {key: (tuple(state[found[key]].shape), tuple(tensors[key].shape)) for key in tensors if key in found}
    other = {key: f"{key} is {a} in the file and {b} in the model" for key, (a, b) in shapes.items() if a != b}
    kinds = [
        f"{key} holds {state[found[key]].dtype} and not numbers like the model's {tensors[key].dtype}"
        for key in counted
        if key in shapes and (state[found[key]].dtype in _REALS) != tensors[key].is_floating_point()
    ]
    heads = {key for key in other if key.startswith(places) and shapes[key][0][1:] == shapes[key][1][1:]}
    heads |= {key for key in missing if key.startswith(places)}
    first = [*other.values()][:1] + kinds[:1]
    reasons = [*filter(None, (_listed("missing", missing), _listed("too many", extra), *first))]
    if outside and reasons:
        reasons.append(_listed(f"outside {prefix}", outside))
    only_heads = bool(heads) and heads == {*other, *missing} and not (extra or kinds)
    if reasons and not (only_heads and new_head):
        remedy = "give the timm name and arguments it was made with"
        foreign = next((text for names, text in _FOREIGN if any(re.search(names, key) for key in extra)), None)
        classifier = [key for key in extra or heads if key.startswith(places) and key in found]
        built_without = extra == classifier and not any(key.startswith(places) for key in tensors)
        if classifier and (built_without or (only_heads and not missing)):
            count = len(state[found[classifier[0]]])
            remedy = "give " + as_given(f"num_classes={count}", f"--model-args num_classes={count}")
        elif only_heads and not Counter(tensors[k].shape for k in heads) - Counter(state[k].shape for k in outside):
            remedy = "its classifier has another name than the model's: rename it"
        elif only_heads:
            remedy = "it is a backbone without a classifier; train one by finetune, with "
            remedy += as_given("num_classes=N", "--model-args num_classes=N")
        elif foreign is not None:
            remedy = foreign
        elif 4 * len(found.keys() & tensors.keys()) < len(tensors):
            remedy = "its names are those of another network or library; give its timm name, or lipcert.load its module"
        elif classifier and {*missing} <= heads:
            remedy = "its classifier has other layers than the model's: build the network with them in Python, and "
            remedy += "give lipcert.load the module"
        elif missing and {*missing} <= heads:
            remedy = "it has no classifier; save it without those that are too many, and train one by finetune"
        elif kinds:
            remedy = "quantised weights are not read; give those that they were made of"
        raise LoadError(f"{file} does not fit {name}: {'; '.join(reasons)}; {remedy}")
    with torch.no_grad():
        for key, value in tensors.items():  # one by one, so that not all tensors of the file are in memory at once
            if key in heads:
                value.zero_()
            elif key in found:
                value.copy_(state[found[key]])
    for key in sorted(key for key in heads if key.endswith("weight")):
        what = f"is for {shapes[key][0][0]} classes" if key in shapes else "is missing"
        warnings.warn(f"{file}: {key} {what}, and the model has {len(tensors[key])}: it starts at zero", stacklevel=2)
    return _normaliser(state, outside, prefix, file, channels)


def _fits(found: Mapping[str, str], state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> bool:
    """Whether all tensors have names of the network, and positions their size."""
    known = all(key in tensors or key.rpartition(".")[2] in _ADDED for key in found)
    positions = [key for key in tensors if key in found and any(word in key for word in _POSITIONS)]
    return known and all(state[found[key]].shape == tensors[key].shape for key in positions)


def _prefix(state: Mapping[str, Tensor], needed: list[str], file: File) -> str:
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
    """The state dict by timm's filter, of the same numbers but for resized positions, and what it did; or None."""
    module = sys.modules[type(net).__module__]
    rename = next((value for name in _FILTERS if (value := getattr(module, name, None)) is not None), None)
    if rename is None:
        return None
    more = [net][: len(inspect.signature(rename).parameters) - 1]
    try:
        renamed = rename(dict(state), *more)
        turned = rename(dict(reversed([*state.items()])), *more)  # some filters go by the order, which may be another
    except Exception:  # of another kind of checkpoint
        return None
    if renamed.keys() != turned.keys() or not renamed or not renamed.keys() <= net.state_dict().keys():
        return None
    if not all(torch.equal(value, turned[key]) for key, value in renamed.items()):
        return None

    def numbers(tensors: Mapping[str, Tensor], positions: bool) -> Counter[int]:
        named = ((any(word in key for word in _POSITIONS), value) for key, value in tensors.items())
        return Counter(value.numel() for is_position, value in named if is_position == positions)

    if numbers(renamed, False) - numbers(state, False):
        return None
    did = [] if renamed.keys() <= state.keys() else ["its names are not timm's, and timm's filter knows them"]
    if numbers(renamed, True) != numbers(state, True):
        did.append("timm's filter resized its position embeddings to the model's size of images")
    if len(renamed) < len(state):
        did.append(f"{len(state) - len(renamed)} tensors are left out")
    return renamed, "; ".join(did)


def _normaliser(
    state: Mapping[str, Tensor], outside: Sequence[str], prefix: str, file: File, channels: int
) -> dict[str, list[float]]:
    """Mean and standard deviation of a module that normalises pixels; says which tensors outside are left out."""
    pixels: dict[str, list[float]] = {}
    used = _pair([key for key in outside if state[key].numel() in (1, 3)]) or ()
    if used:
        pixels = {name: state[key].flatten().tolist() for name, key in zip(("mean", "std"), used, strict=True)}
        numbers = "; ".join(f"{key} {', '.join(f'{x:.6g}' for x in value)}" for key, value in pixels.items())
        warnings.warn(f"{file}: the normalisation is that of {' and '.join(used)} in it: {numbers}", stacklevel=3)
    unread = [key for key in outside if key not in used and key.rpartition(".")[2] not in _ADDED]
    inside = {key.removeprefix(prefix) for key in state if key.startswith(prefix)} - {"weight", "bias"}
    for key in unread if channels and not used else ():
        if any(key.endswith(f".{name}") for name in inside):
            continue  # of another such network, as a teacher
        weight = re.sub("bias$", "weight", key)  # a bias is told by its weight
        value = state[weight if weight in state else key]
        from_pixels = value.numel() == channels or (value.dim() > 1 and value.shape[1] == channels)
        if from_pixels and value.is_floating_point() and not _BESIDE.search(key):
            raise LoadError(
                f"{file}: {key}, outside {prefix}, may change pixels before the network; give the normalisation that "
                f"was used, {as_given('mean=')} and {as_given('std=')}, or the whole network as a module in Python"
            )
    if unread:
        warnings.warn(f"{file}: {_listed(f'outside {prefix} left out', unread)}", stacklevel=3)
    return pixels


def check_finite(net: nn.Module, origin: str) -> None:
    """Refuses weights that hold NaN or infinity; names the first tensor."""
    if (problem := unusable(net)) is not None:
        raise LoadError(f"{origin}: {problem}; a model with such weights cannot be certified")


def keys_of(path: Path) -> tuple[list[str], dict[str, str]]:
    """The names and the metadata of a safetensors file."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return list(file.keys()), file.metadata() or {}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
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
    """The tensors of safetensors files. Each is read, and its memory mapped, only while it is in use."""

    def __init__(self, files: Mapping[str, Path]):
        self.stored = _cleaned({key: (key, path) for key, path in files.items()}, *{*files.values()})

    def __getitem__(self, key: str) -> Tensor:
        stored, path = self.stored[key]
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(stored)
                return tensor
        except (safetensors.SafetensorError, OSError, ValueError, AttributeError) as error:  # types that torch lacks
            reason = f"{shortened(key)} cannot be read ({first_line(error)})"
            raise LoadError(f"{path} is damaged, or changed while it was read: {reason}; get it again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


class _Blank(type):
    """Its classes are equal to dict, so that torch sets the items of their objects."""

    def __eq__(cls, other: object) -> bool:
        return other is dict or other is cls

    __hash__ = type.__hash__


class _Omitted(list[Any], metaclass=_Blank):
    """Stands for an object that is left out; making one, or a list or mapping of its type, runs nothing of the file."""

    seen: tuple[Any, ...] = ()  # what it would be made of

    def __new__(cls, *args: Any) -> _Omitted:
        return list.__new__(cls)

    def __init__(self, *args: Any):
        self.seen = args

    def __setstate__(self, state: Any) -> None:
        self.seen += state if isinstance(state, tuple) else ()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


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
    except Exception as error:
        raise LoadError(f"{path} is damaged: {first_line(error)}; download it again") from error


def _protocol(path: Path, archive: bool) -> int:
    """The pickle protocol of a file of torch.save."""
    if not archive:
        return path.read_bytes()[1]
    with zipfile.ZipFile(path) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("/data.pkl")))[1]


def _tensors_of(path: Path, archive: bool, omitted: Sequence[str]) -> Any:
    """The content of a file, with :class:`_Omitted` in place of objects of these names."""
    # timm's training script stores its options as an argparse.Namespace, which holds plain values only.
    stand_ins: list[Any] = [argparse.Namespace, *((_Omitted, name) for name in dict.fromkeys(omitted))]
    with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings about pickle protocols; unreadable files raise
        # A mapped file is read when a tensor is used. Only torch's newer format, a zip archive, can be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)


def _tensors(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict in a checkpoint; a warning names others beside it, which are not taken."""
    state: Mapping[Any, Any] = content if isinstance(content, Mapping) else {}
    for _ in range(_NESTED):
        inner = {key: value for key, value in state.items() if isinstance(value, Mapping) and value}
        swapped = bool({"meta", "message_hub"} & inner.keys()) and {"state_dict", "ema_state_dict"} <= inner.keys()
        keys = [key for key in _WRAPPERS if key in inner]  # of which some may hold settings, or tensors without names
        wrapper = "state_dict" if swapped else max(keys, key=lambda key: _holds(inner[key]), default=None)
        if wrapper is None:
            break
        state = inner.pop(wrapper)
        others = [str(key) for key, value in inner.items() if 2 * _count(value) >= max(1, _count(state))]
        if others:
            averaged = ", the averaged ones in mmengine's files" if swapped else ""
            warnings.warn(
                f"{path} holds several sets of weights: taken are those under {wrapper}{averaged}, and not those under "
                f"{listing(others)}; to have others, save them alone",
                stacklevel=5,
            )
    weights = {key: value for key, value in state.items() if isinstance(key, str) and key != "_metadata"}
    divided = isinstance(content, Mapping) and {"ds_version", "param_shapes"} & content.keys()
    if divided and any(isinstance(value, Tensor) and not value.numel() for value in weights.values()):
        raise formats.refusal(path, formats.ZERO)
    others = [key for key, value in weights.items() if not isinstance(value, (Tensor, Mapping))]
    tensors = {key: value for key, value in weights.items() if key not in others}
    if tensors and all(map(_is_plain, tensors.values())):
        if others:
            warnings.warn(f"{path}: left out, as no tensors: {listing(others)}", stacklevel=5)
        return _cleaned(tensors, path)
    if any("_packed_params" in key or getattr(value, "is_quantized", False) for key, value in weights.items()):
        raise LoadError(f"{path} holds quantised weights (int8), and not real numbers; give those it was made of")
    odd = next((key for key, value in weights.items() if isinstance(value, Tensor) and not _is_plain(value)), None)
    if odd is not None:
        raise LoadError(f"{path}: {shortened(odd)} is no dense tensor of real numbers; store it as one")
    if isinstance(content, _Omitted):
        raise formats.refusal(path, "holds a module, or another Python object, which is never run" + formats.STATE)
    if any(isinstance(value, _Omitted) for value in weights.values()) and not _count(weights):
        raise formats.refusal(path, "holds arrays of NumPy, or other objects, and no tensors" + formats.ARRAYS)
    part = formats.OF_KEY if isinstance(content, Mapping) else formats.OF_ENTRY
    raise formats.refusal(path, f"holds no state dict, but {_seen(content)}" + part)


def _count(value: Mapping[Any, Any]) -> int:
    """The number of tensors that a mapping holds directly, or in lists."""
    lists = (one if isinstance(one, list) else [one] for one in value.values())
    return sum(isinstance(one, Tensor) for entries in lists for one in entries)


def _holds(value: Mapping[Any, Any], depth: int = _NESTED) -> bool:
    """Whether a mapping, or one in it, holds tensors that are no single numbers."""
    return any(
        _holds(one, depth - 1) if isinstance(one, Mapping) and depth else isinstance(one, Tensor) and one.dim() > 0
        for one in value.values()
    )


def _seen(content: Any) -> str:
    """What a checkpoint holds in which no weights were found: its keys, and its largest tensors by name."""
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    found: dict[str, Tensor] = {}
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, Tensor):
            found[place] = value
        elif isinstance(value, Mapping) and place.count(".") <= _NESTED:
            waiting += [(f"{place}.{key}".strip("."), one) for key, one in value.items()]
    largest = sorted(found, key=lambda name: -found[name].numel())[:3]
    listed = ", ".join(f"{shortened(name)} {tuple(found[name].shape)}" for name in largest)
    keys = listing([*map(str, content)]) or "none"
    return f"the keys {keys}" + (f", and as its largest tensors {listed}" if listed else ", and no tensors")


def _is_plain(value: Any) -> bool:
    """Whether a value is a dense, real CPU tensor without quantisation."""
    if not isinstance(value, Tensor) or value.is_nested or value.is_quantized or value.is_complex():
        return False
    return value.layout == torch.strided and value.device.type == "cpu"


def _listed(what: str, names: list[str]) -> str:
    """How many tensors are missing, for example, and the first ones; "" without any."""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} {what} ({listing(names)})" if names else ""
