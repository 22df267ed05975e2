"""What training scripts record in a checkpoint besides the weights: architecture, arguments and preprocessing."""

from __future__ import annotations

import argparse
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

from lipcert.errors import as_given
from lipcert.inputs.preprocessing import INTERPOLATIONS

# The keys under which training scripts store the weights in a checkpoint. Averaged weights come first, as in timm's
# loader.
WRAPPERS = (
    "state_dict_ema", "model_ema", "ema", "ema_state_dict", "model_ema_state_dict", "params_ema", "shadow",
    "state_dict", "model_state_dict", "module_state_dict", "model_state",
    "model", "net", "network", "weights", "params", "module", "state",
)  # fmt: skip
NESTED = 3  # wrappers in wrappers, as Composer's {"state": {"model": ...}}
_NAMES = ("model", "model_name", "arch", "architecture", "backbone")
# Arguments of timm.create_model that change a network, and what timm's script calls them.
_KINDS = {"num_classes": int, "gp": str, "global_pool": str, "bn_eps": float}
_GIVEN = {"gp": "global_pool"}
_CLASSES = ("class_to_idx", "idx_to_class", "class_names", "label_names", "id2label", "label2id", "classes")
# What scripts, and modules that normalise pixels, call a mean, and what they call its standard deviation.
_MEAN = re.compile(r"((?:.*\.)?_?(?:(?:data|dataset|image|img|input|new|norm\w*|pixel|rgb)_)?)(means?|mu)")
_STD = {"mean": ("std", "sd", "stdev"), "means": ("stds", "sds"), "mu": ("sigma",)}
# Records in which mean and std are those of pixels, not of scores, noise or weights.
_HOLDS = re.compile(
    r"((model|train|norm|pretrained|default)_)?(args|cfg|config)|hparams|hyper_parameters|opts?|options|meta|info|params"
    r"|(data|image|img|input|pre_?process|normali[sz]|transform)\w*"
)


class _Blank(type):
    """Its classes are equal to dict, so that torch sets the items of their objects."""

    def __eq__(cls, other: object) -> bool:
        return other is dict or other is cls

    __hash__ = type.__hash__


class Omitted(list[Any], metaclass=_Blank):
    """Stands for an object that is left out; creating one, or a list or mapping of its type, runs no foreign code."""

    seen: tuple[Any, ...] = ()  # what it would be made of

    def __new__(cls, *args: Any) -> Omitted:
        return list.__new__(cls)

    def __init__(self, *args: Any):
        self.seen = args

    def __setstate__(self, state: Any) -> None:
        self.seen += state if isinstance(state, tuple) else ()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def is_architecture(name: Any) -> bool:
    return isinstance(name, str) and timm.is_model(name)


def of_training(content: Mapping[str, Any]) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """What training scripts record besides the weights: architecture, arguments, preprocessing with ``class_names``."""
    args, hyper = content.get("args"), content.get("hyper_parameters")
    options = dict(vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, Mapping) else {})
    named = {**content, **(hyper if isinstance(hyper, Mapping) else {}), **options}
    names = [one[key] for one in (content, named) for key in _NAMES if isinstance(one.get(key), str)]
    name = next(filter(is_architecture, names), next(iter(names), None))  # timm's first, then any other
    arguments = {_GIVEN.get(key, key): named[key] for key, kind in _KINDS.items() if type(named.get(key)) is kind}
    if type(options.get("in_chans")) is int:
        arguments["in_chans"] = options["in_chans"]
    if isinstance(named.get("model_kwargs"), Mapping):
        kept = {key: value for key, value in named["model_kwargs"].items() if key != "pretrained"}
        arguments |= {key: value for key, value in kept.items() if _is_simple(value)}
    pixels: dict[str, Any] = {}
    if size := numbers_of(options.get("input_size") or options.get("img_size")):
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


def normalisation(content: Mapping[str, Any], path: Path) -> dict[str, list[float]]:
    """Mean and standard deviation that are recorded with the weights; neither, if one of them is missing."""
    found = dict(_recorded(content)) if content.keys() & {*WRAPPERS} else {}
    if (names := pair_of(found)) is not None:
        return dict(zip(("mean", "std"), map(found.__getitem__, names), strict=True))
    if one := next((name for name in found if re.fullmatch(r"(.*\.)?(mean|std)", name)), ""):
        remedy = f"give {as_given('mean=')} and {as_given('std=')}"
        warnings.warn(f"{path} records {one}, and not both mean and std as numbers: not used; {remedy}", stacklevel=5)
    return {}


def _recorded(value: Any, name: str = "", depth: int = NESTED) -> Iterator[tuple[str, list[float]]]:
    """Numbers recorded with the weights under names of means and deviations, with their keys."""
    value = vars(value) if isinstance(value, argparse.Namespace) else value
    if isinstance(value, Mapping):
        held = depth and (not name or _HOLDS.fullmatch(name.rpartition(".")[2]))
        for key in () if not held else (key for key in value if key not in WRAPPERS):
            yield from _recorded(value[key], f"{name}.{key}".lstrip("."), depth - 1)
    elif re.search(r"(mean|std|sd)s?$|stdev$", name) and (numbers := numbers_of(value)):
        yield name, numbers


def pair_of(names: Collection[str]) -> tuple[str, str] | None:
    """The names of a mean and a standard deviation of pixels that belong together."""
    means = (found for name in names if (found := _MEAN.fullmatch(name)))
    pairs = ((found[0], found[1] + std) for found in means for std in _STD[found[2]])
    return next((pair for pair in pairs if pair[1] in names), None)


def numbers_of(value: Any) -> list[float]:
    """The finite numbers of a number, a text, a tensor, an array or a sequence; [] of anything else."""
    try:
        if isinstance(value, Omitted):  # of NumPy: the bytes of its numbers, and their type
            kind = next(part for part in value.seen if isinstance(part, Omitted))
            data = [part for part in value.seen if isinstance(part, bytes)][-1]
            value = np.frombuffer(data, np.dtype(kind.seen[0]).newbyteorder(kind.seen[4])).tolist()
        elif isinstance(value, (list, tuple)):
            value = [*map(numbers_of, value)]
        elif isinstance(value, str):
            value = [*map(float, re.findall(r"[^\s,()\[\]]+", value))]
        flat = torch.as_tensor(value, dtype=torch.float64).flatten().tolist()
    except (LookupError, RuntimeError, StopIteration, TypeError, ValueError):
        return []
    return [float(f"{x:.8g}") for x in flat] if not isinstance(value, bool) and all(map(math.isfinite, flat)) else []


def _is_simple(value: Any) -> bool:
    return all(map(_is_simple, value)) if isinstance(value, (list, tuple)) else isinstance(value, (int, float, str))
