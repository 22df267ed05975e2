"""Artifacts: one file with a model's weights, architecture, surgery, preprocessing and bound.

The file is a ``.safetensors`` file with one metadata entry, ``lipcert``, that holds JSON. Loading builds the timm
network, repeats the surgery, copies the weights and compares their hash. Nothing in the file is ever run as code.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import timm
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._pytree import tree_leaves

from lipcert.denoisers import Denoised, is_named
from lipcert.errors import InputError, LipcertError, LoadError, as_given, first_line
from lipcert.inputs.files import File, no_file, replacing
from lipcert.inputs.matching import check_finite
from lipcert.inputs.sources import is_artifact
from lipcert.inputs.timm_networks import WEIGHT_ARGUMENTS, create_net
from lipcert.inputs.weights import keys_of
from lipcert.model import Model, alone, checked
from lipcert.numerics import RealArithmetic
from lipcert.settings import version
from lipcert.surgery import swap

FORMAT = 1
_HALVES = (torch.float16, torch.bfloat16)
_FAILURES = (SafetensorError, LipcertError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_WIDE = {"float32": torch.float32, "float64": torch.float64}

# Limits on the sum of a network's integer arguments (widths, depths) and on its largest float (ratios). With larger
# ones timm would build lists of that length before the first weight.
_WHOLE = 2**21
_RATIO = 1000.0
# The largest number of modules and parameters per tensor of the file.
_PARTS = 100
_FEW_TENSORS = 100
# Limits for buffers that files omit, such as position tables and window masks: entries, and entries per weight.
_BUFFERS = 2**27
_BUFFERS_A_WEIGHT = 64

# Before the names of a denoiser's tensors; those of the network have nothing before them.
_DENOISER = "denoiser."

_FIELDS: dict[str, type] = {
    **dict.fromkeys(("source", "data_config", "facts"), dict),
    **dict.fromkeys(("mean", "std", "input_size", "recipe"), list),
    "weights_hash": str,
}


@alone
def save(
    model: Model | nn.Module,
    path: File,
    facts: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model to one ``.safetensors`` file. If it fails, an existing file does not change.

    Weights in float32 or float64 that are all numbers of float16, or all of bfloat16, are stored as such and loaded in
    the type they had. So a model that was rounded, as by ``model.half().float()``, takes half the space, and what is
    certified is the rounded one.

    Args:
        model: a model whose network timm can rebuild: loaded by name, converted or not; or a smoothed classifier of
            one, whose σ and denoiser the file holds too.
        path: the file; a complete new file atomically replaces an artifact of the same architecture, unless that was
            constrained or fine-tuned and ``model`` was not.
        facts: further information about the model, such as its bound, as JSON values.
        force: whether to replace any other file too.
        arguments: those that ``timm.create_model`` built the network with, where the model was given as a module and
            they cannot be inferred from it.

    Raises:
        InputError: the network cannot be rebuilt from its name and recipe, the facts are not JSON values, another file
            exists, or the file cannot be written.
    """
    path, model = Path(path), checked(model)
    if arguments is not None:
        model.source = {**model.source, "arguments": {**model.source.get("arguments", {}), **arguments}}
    check_free(path, model, force)
    check_rebuilds(model)
    content = {
        "format": FORMAT,
        "lipcert": version(),
        "timm": timm.__version__,
        "source": model.source,
        "data_config": model.data_config,
        "mean": model.mean.flatten().tolist(),
        "std": model.std.flatten().tolist(),
        "input_size": list(model.input_size),
        "recipe": model.recipe,
        "facts": dict(facts or {}),
        "weights_hash": weights_hash(model),
        **({"classes": list(model.class_names)} if model.class_names else {}),
        **({"sigma": model.sigma} if model.sigma is not None else {}),
    }
    tensors = {name: value.detach().cpu().contiguous() for name, value in _state(model).items()}
    half = _half(tensors)
    content |= {"dtype": str(model.dtype).removeprefix("torch.")} if half else {}
    try:
        entry = json.dumps({**content, "checksum": _checksum(content)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"arguments and facts must be values that JSON can represent: {first_line(error)}") from error
    tensors = {name: (v.to(half) if half and v.is_floating_point() else v.clone()) for name, v in tensors.items()}
    try:
        with replacing(path) as partial:
            safetensors.torch.save_file(tensors, partial, metadata={"lipcert": entry})
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {path}: {first_line(error)}") from error


def _half(tensors: Mapping[str, Tensor]) -> torch.dtype | None:
    """The type of half precision in which all values of float32 or float64 exist."""
    floats = [value for value in tensors.values() if value.is_floating_point()]
    if {value.dtype for value in floats} not in [{wide} for wide in _WIDE.values()]:
        return None
    return next((half for half in _HALVES if all(torch.equal(v.to(half).to(v.dtype), v) for v in floats)), None)


def check_free(
    path: Path, model: Model, force: bool, step: str | None = None, settings: Mapping[str, Any] | None = None
) -> None:
    """Refuses to overwrite a file with other content, unless ``force``.

    Other content is a file that is not an artifact, another architecture, a model that was constrained or fine-tuned
    where the new one is not, and one that went through the step with other settings, or through others before it.
    """
    if path.suffix != ".safetensors":
        raise InputError(f"an artifact is a safetensors file, and {path} is none; call it {path.stem}.safetensors")
    if force or not os.path.exists(path):
        return
    way_out = f"give another name, or replace it with {as_given('force=True', '--force')}"
    if not is_artifact(path):
        raise InputError(f"{path} exists and is not a lipcert artifact; {way_out}")
    architecture, other, recipe = model.source.get("name"), None, []
    with contextlib.suppress(LoadError):
        content = read_metadata(path)
        other, recipe = content["source"].get("name"), content["recipe"]
    if other != architecture:
        raise InputError(f"{path} holds {other or 'a damaged artifact'}, not {architecture}; {way_out}")
    lost = {entry["step"] for entry in recipe} - {"convert", step, *(entry["step"] for entry in model.recipe)}
    if lost:
        raise InputError(f"{path} holds a model after {', '.join(sorted(lost))}, and the new one is not; {way_out}")
    last = recipe[-1] if recipe else {}
    differs = recipe[:-1] != model.recipe or any(last.get(key) != value for key, value in (settings or {}).items())
    if last.get("step") == step and settings is not None and differs:
        raise InputError(f"{path} holds the result of {step} with other settings, or of another model; {way_out}")


def load_artifact(path: File) -> Model:
    """Rebuilds the model that :func:`save` wrote."""
    path = Path(path)
    content = read_metadata(path)
    source = content["source"]
    name, arguments = source.get("name"), source.get("arguments")
    if not isinstance(name, str) or not timm.is_model(name):
        other = f"{name!r}, which timm {timm.__version__} does not have"
        raise LoadError(f"{path} names the architecture {other}; import the module that registers it: --import MODULE")
    if not isinstance(arguments, dict) or WEIGHT_ARGUMENTS & arguments.keys():
        raise LoadError(f"{path} is damaged: its model arguments are not those of a lipcert artifact; write it again")

    def build() -> nn.Module:
        return _built(name, arguments, content["recipe"])

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        before = tuple(_DENOISER for step in content["recipe"] if step["step"] == "denoise")
        _check_described(build, arguments, {key: shape for key, shape in shapes.items() if not key.startswith(before)})
        net = build()
        stored = {key: content[key] for key in ("mean", "std", "input_size", "source", "data_config")}
        model = Model(net, **stored)
        for step in content["recipe"]:
            if step["step"] == "denoise":
                model = Denoised(model, str(step["denoiser"]))
        model.recipe = [dict(step) for step in content["recipe"]]
        model.class_names = tuple(map(str, content.get("classes") or ()))
        model.sigma = float(content["sigma"]) if "sigma" in content else None
        _fill(model, path, shapes, _WIDE[content["dtype"]] if "dtype" in content else None)
    except _FAILURES as error:
        raise LoadError(f"{path} does not fit the network it describes: {first_line(error)}; write it again") from error
    model.mean, model.std = model.mean.to(model.dtype), model.std.to(model.dtype)
    if weights_hash(model) != content["weights_hash"]:
        raise LoadError(f"{path} is damaged: its weights are not those that were saved; copy it or write it again")
    check_finite(model if before else net, str(path))
    return model


def _fill(model: Model, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None) -> None:
    """Replaces the model's tensors by those of the file, in ``dtype``, one by one, so that none is in memory twice."""
    tensors = _state(model, keep_vars=True)
    if tensors.keys() != shapes.keys():
        raise ValueError("tensors are missing, or there are too many")
    for name, tensor in tensors.items():
        with safetensors.safe_open(path, framework="pt") as file:
            # Copy: tensors in the file's memory are unaligned, which changes the last bit of results.
            value = file.get_tensor(name).clone()
        if value.shape != tensor.shape or value.is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{name} is of another shape or kind")
        tensor.data = value if dtype is None or not value.is_floating_point() else value.to(dtype)


def read_metadata(path: File) -> dict[str, Any]:
    """Reads an artifact's metadata, without the weights, and checks them for completeness and changes."""
    path = Path(path)
    if not os.path.isfile(path):
        raise no_file(path)
    entry = keys_of(path)[1].get("lipcert")
    if entry is None:
        raise LoadError(f"{path} is not a lipcert artifact; give the timm name, and this as {as_given('checkpoint=')}")
    try:
        content = json.loads(entry)
        newer = content["format"] > FORMAT
        whole = newer or all(isinstance(content.get(field), kind) for field, kind in _FIELDS.items())
        changed = content.pop("checksum", None) != _checksum(content)  # fails on numbers that JSON cannot represent
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        whole = newer = changed = False
    if newer:
        raise LoadError(
            f"{path} has format {content['format']}, of a newer lipcert; this one reads {FORMAT}: update it"
        )
    if not whole:
        raise LoadError(f"{path} is damaged: its lipcert metadata cannot be read; copy it or write it again")
    if changed:
        raise LoadError(f"{path} is damaged: its lipcert metadata were changed after it was written; write it again")
    return content


def weights_hash(model: Model) -> str:
    """SHA-256 of the weights: names, types, shapes and bytes of all tensors that determine the logits."""
    state = sorted(model.state_dict().items())
    state = [(name.removeprefix("net."), value) for name, value in state]
    return _tensors_hash([*state, ("mean", model.mean), ("std", model.std)])


def _state(model: Model, keep_vars: bool = False) -> dict[str, Tensor]:
    """The tensors of the network by their names in it, and those of a denoiser after ``denoiser.``."""
    state = model.state_dict(keep_vars=keep_vars)
    return {name.removeprefix("net."): value for name, value in state.items()}


def buffers_hash(model: Model) -> str:
    """SHA-256, as :func:`weights_hash`, of the buffers that a state dict omits: masks, positions, tables."""
    stored = {*model.state_dict(), "mean", "std", "pair"}
    omitted = ((name.removeprefix("net."), value) for name, value in model.named_buffers() if name not in stored)
    return _tensors_hash(sorted(omitted))


def seed_of(model: Model, seed: int = 0) -> tuple[int, str]:
    """The seed of random vectors for a model's norms: it depends on the weights, so none fit given vectors."""
    return seed, weights_hash(model) + buffers_hash(model)


def _tensors_hash(tensors: Sequence[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, value in tensors:
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_rebuilds(model: Model) -> None:
    """Refuses a model that a file would rebuild as another network: the file's bound would not be valid for it."""
    if any(step["step"] == "denoise" for step in model.recipe) and not is_named(model):
        raise InputError(
            "the denoiser is code of your own, which a file does not hold; save the model without it, and give it "
            "again when you load it: lipcert.SmoothedClassifier(model, sigma, denoiser), or --denoiser"
        )
    if not model.source:
        raise InputError("no file rebuilds a module that timm did not make; load it by name, or save its state_dict()")
    net = _built(model.source["name"], model.source["arguments"], model.recipe)
    kinds, converted = dict(net.named_modules()), model.net.state_dict().keys() <= net.state_dict().keys()
    for path, part in model.net.named_modules() if model.presumed and converted else ():
        if path in kinds and type(part) is not type(kinds[path]):
            raise InputError(
                f"{path or 'the network'} is a {type(part).__name__}, timm builds a {type(kinds[path]).__name__}, and "
                f"no file rebuilds it; build {model.source['name']} anew, load_state_dict(..., strict=False), save it"
            )
    altered = model._forward_hooks or model._forward_pre_hooks or "forward" in vars(model)
    if _structure(net) == _structure(model.net) and _agrees(net, model) and not altered:
        return
    if model.presumed:
        others = ((path, part) for path, part in model.net.named_modules() if type(part) is not type(kinds.get(path)))
        other = next((f", in which {path or 'the network'} is no {type(part).__name__}" for path, part in others), "")
        raise InputError(
            f"timm builds another network for {model.source['name']} with the arguments that this module shows{other}; "
            "give those it was made with: lipcert.save(..., arguments={...}); undo first what timm did not build, such "
            "as adapters: merge_and_unload()"
        )
    raise InputError(
        f"the network is not {model.source['name']} with its recorded surgery, or computes something else, as after a "
        "change of its attributes, hooks or methods, which no file rebuilds; undo that, or save its state_dict()"
    )


@torch.no_grad()
def _agrees(net: nn.Module, model: Model) -> bool:
    """Whether a rebuilt network with the model's weights gives the network's logits, on random images in float64."""
    net.to(model.dtype).load_state_dict(model.net.state_dict())  # constants are rounded as the model's were
    pixels = torch.rand(2, *model.input_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = (pixels - model.mean.double().cpu()) / model.std.double().cpu()
    with RealArithmetic():
        try:
            rebuilt, actual = (one.to("cpu").double().eval()(inputs) for one in (net, copy.deepcopy(model.net)))
        except AssertionError:  # timm's, of a network for another size of images
            return False
    spread = (actual - actual.mean(1, keepdim=True)).abs().amax()  # logits may have a large common part
    if torch.equal(rebuilt.nan_to_num(), actual.nan_to_num()):  # weights may be infinite
        return True
    same = rebuilt.shape == actual.shape
    return same and bool((rebuilt - actual).abs().amax() <= 1e-9 * spread + 1e-12 * actual.abs().amax())


def _built(name: str, arguments: Mapping[str, Any], recipe: Sequence[Mapping[str, Any]]) -> nn.Module:
    """timm's network after the surgery of a recipe; steps that only changed weights need no repetition."""
    net = create_net(name, pretrained=False, arguments=arguments)
    for step in recipe:
        if step["step"] == "convert":
            kinds = {name: step[name] for name in ("attention", "norm")}
            swap(net, **kinds, activation=step.get("activation", "keep"), initialise=False)
    return net


def _structure(net: nn.Module) -> list[object]:
    modules: list[object] = [(name, type(module)) for name, module in net.named_modules()]
    return modules + [(name, value.shape) for name, value in net.state_dict().items()]


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _check_described(
    build: Callable[[], nn.Module], arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Builds a network without storage and compares it with the tensors of a file.

    The work is bounded by the size of the file: construction stops as soon as the network has many more parts than the
    file has tensors.
    """
    numbers = [value for value in tree_leaves(dict(arguments)) if isinstance(value, (int, float))]
    whole = sum(abs(number) for number in numbers if isinstance(number, int))
    if whole > _WHOLE or not all(abs(number) <= _RATIO for number in numbers if isinstance(number, float)):
        raise ValueError("its arguments ask for a network of absurd size")
    with _limited(_PARTS * (len(shapes) + _FEW_TENSORS)), torch.device("meta"):
        net = build()
    built = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    if built != shapes:
        name = next(name for name in (*built, *shapes) if built.get(name) != shapes.get(name))
        raise ValueError(f"{name} is {shapes.get(name, 'missing')} in the file and {built.get(name, 'missing')} in it")
    weights = sum(value.numel() for value in net.parameters())
    if sum(value.numel() for value in net.buffers()) > _BUFFERS + _BUFFERS_A_WEIGHT * weights:
        raise ValueError("its tables are far larger than its weights")


@contextlib.contextmanager
def _limited(parts: int) -> Iterator[None]:
    """Raises a ValueError when a network under construction has more modules and parameters than ``parts``."""
    registered = 0

    def count(_module: nn.Module, _name: str, _value: object) -> None:
        nonlocal registered
        registered += 1
        if registered > parts:
            raise ValueError("its arguments describe a larger network than its weights fill")

    with register_module_module_registration_hook(count), register_module_parameter_registration_hook(count):
        yield
