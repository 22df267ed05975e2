"""Loads a :class:`lipcert.model.Model` from a name, a file or a module."""

from __future__ import annotations

import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import timm.data
import torch
from timm.layers import SpaceToDepth
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torchvision.transforms import Normalize
from torchvision.transforms.v2 import Normalize as Normalize2

from lipcert.errors import InputError, LipcertError, LoadError, as_given, shortened
from lipcert.graph import first_run, reason_of_failure
from lipcert.inputs.artifact import load_artifact
from lipcert.inputs.classes import recorded_names
from lipcert.inputs.files import File, listing
from lipcert.inputs.formats import ONNX
from lipcert.inputs.matching import check_finite, load_weights
from lipcert.inputs.preprocessing import check_scale
from lipcert.inputs.sources import BUNDLED, Source, is_artifact, similar
from lipcert.inputs.timm_networks import create_net, rebuild_recipe, takes_size
from lipcert.inputs.weights import read_checkpoint
from lipcert.model import Model, copy_of, evaluated, loads_modules, outside_inference_mode, uncompiled

Options = dict[str, Any]
_PIXELS = ("mean", "std", "input_size")
_OTHER_MODELS = {
    "ExportedProgram": "an exported program; give the module that it was exported from",
    **dict.fromkeys(("ModelProto", "ONNXProgram", "InferenceSession"), ONNX),
}
# What to do about a network that fails on an image, by its error.
_REMEDIES = (
    ("missing .* argument", "; give a module whose forward takes images alone"),
    ("(?i)cuda|nvidia|same device", "; take .cuda() and .to(device) out of its forward, and move the model by .to()"),
    (r"shape '\[\d+, ", "; take the size of a batch from its images: x.flatten(1), or x.shape[0]"),
    ("(?i)size|shape|height|width|channels|dimension", "; give input_size=, or img_size= where the timm model has it"),
)


@loads_modules
@outside_inference_mode
def load(
    source: File | nn.Module | Source | None = BUNDLED,
    *,
    pretrained: bool = True,
    checkpoint: File | None = None,
    mean: Sequence[float] | float | None = None,
    std: Sequence[float] | float | None = None,
    input_size: Sequence[int] | None = None,
    features: bool = False,
    new_head: bool = False,
    freeze: bool = False,
    **timm_arguments: Any,
) -> Model:
    """Loads a model for conversion and certification, in evaluation mode.

    A module in training mode is put into evaluation mode; a warning says so if dropout or batch normalisation makes the
    two differ.

    Args:
        source: a timm name, an ``hf-hub:`` id, a lipcert artifact, a checkpoint file that names its architecture, a
            module, or the name of a checkpoint that comes with lipcert, see :mod:`lipcert.inputs.checkpoints`; None
            stands for ``"digits-vit"``.
        pretrained: whether timm loads the weights of the name, from its cache or the hub.
        checkpoint: a file with weights for the name: ``.safetensors``, or a PyTorch checkpoint, from which only tensors
            are read.
        mean: mean of the normalisation, of each channel or of all; by default that of the checkpoint's configuration.
        std: standard deviation, likewise.
        input_size: (C, H, W) of one image, likewise.
        features: whether to accept a network without a classifier; its features then replace the logits. It can be
            inspected but not certified.
        new_head: whether the classifier of ``checkpoint`` may be for another number of classes than ``num_classes``;
            the model's is then zero, to be trained.
        freeze: whether to compute once what ``torch.nn.utils.parametrize`` computes at every call, and certify the
            network with these weights. Some of it, such as power iterations, gives another weight at every call. A
            module of yours is copied first.
        **timm_arguments: passed to ``timm.create_model``, such as ``num_classes``, ``img_size``, ``patch_size``.

    Returns:
        The model; ``model(images)`` takes pixels in [0, 1].

    Raises:
        LoadError: a name, file, download or weights are not valid; the message is one line.
        InputError: arguments contradict each other, the network has no logits, or it does not accept the images.
    """
    pixels = {key: value for key, value in zip(_PIXELS, (mean, std, input_size), strict=True) if value is not None}
    for key, value in pixels.items():
        kind, example = (None, "(3, 32, 32)") if key == "input_size" else (torch.float64, "(0.5, 0.5, 0.5)")
        try:
            pixels[key] = torch.as_tensor(value, dtype=kind).flatten().tolist()
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"{key} takes several numbers, such as {example}, got {value!r}") from error
    for key, flag in (("features", features), ("freeze", freeze)):
        if not isinstance(flag, bool):
            raise InputError(f"{key} is True or False, got {flag!r}; an argument of timm cannot have this name")
    options = {*pixels, *timm_arguments}
    if checkpoint is not None:
        options.add(as_given("checkpoint="))
    if "device" in timm_arguments:
        raise InputError("device is no argument of load; move the model afterwards: lipcert.load(...).to('cuda')")
    if "checkpoint_path" in timm_arguments:
        raise InputError(f"checkpoint_path is timm's way to load a file; give it as {as_given('checkpoint=')}")
    if isinstance(source, nn.Module):
        source = evaluated(uncompiled(source))
        _refuse(options - {*_PIXELS}, "a module that is already built")
        if isinstance(source, Model):
            raise InputError("the model is loaded already; use it as it is")
        net = _frozen(source) if freeze else source
        model = _wrap(net, "the module", pixels, {}, {}, features)
        model.source, model.presumed = _presumed(source), True
        return model
    if type(source).__name__ in _OTHER_MODELS:
        raise InputError(f"the model is {_OTHER_MODELS[type(source).__name__]}")
    is_name = isinstance(source, Source) or (isinstance(source, (str, os.PathLike)) and os.fspath(source))
    if source is not None and not is_name:
        remedy = "save weights to a file, and give lipcert.load(NAME, checkpoint=FILE)"
        remedy = remedy if isinstance(source, Mapping) else "the bundled one is lipcert.load()"
        raise InputError(f"a model is a name, a file or a module, got {type(source).__name__}; {remedy}")
    named = source if isinstance(source, Source) else Source.of(source or BUNDLED)
    name = named.name
    if named.file:
        if is_artifact(name):
            if not pretrained:
                options.add(as_given("pretrained=False", "--no-pretrained"))
            _refuse(options | ({"freeze"} if freeze else set()), f"the lipcert artifact {name}, which is complete")
            return load_artifact(name)
        if checkpoint is not None:
            raise InputError(f"{name} and {checkpoint} are two files; give a timm name with {as_given('checkpoint=')}")
        architecture, what = read_checkpoint(name).name or "", "does not say which architecture its weights belong to"
        if not timm.is_model(architecture):
            if architecture:
                close = similar(architecture, timm.list_models())
                what = f"says that its architecture is {shortened(architecture)}, which timm does not have{close}"
            raise LoadError(f"{name} {what}; give the timm name, and the file with {as_given('checkpoint=')}")
        checkpoint, name = name, architecture
    if not isinstance(checkpoint, (str, os.PathLike, NoneType)):
        remedy = "save a state_dict as one, or load it into a module, and give lipcert.load that"
        raise InputError(f"checkpoint is a file, got {type(checkpoint).__name__}; {remedy}")
    if checkpoint is not None and is_artifact(checkpoint):
        raise InputError(f"{checkpoint} is a lipcert artifact, which is complete: give it as the model, without a name")
    model = _from_name(name, pretrained, checkpoint, pixels, timm_arguments, features, new_head)
    model.net = _frozen(model.net) if freeze else model.net
    return model


@torch.no_grad()
def _frozen(net: nn.Module) -> nn.Module:
    """A copy of a network in which parametrised tensors are plain ones, with the values they have now."""
    net = copy_of(net)
    # remove_parametrizations would change the network that was copied too: the two share their classes.
    for module in [module for module in net.modules() if parametrize.is_parametrized(module)]:
        values = {name: getattr(module, name) for name in module.get_submodule("parametrizations")._modules}
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module._modules["parametrizations"]
        for name, value in values.items():
            module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return net


def number_of_classes(model: Model) -> int:
    """The number of the model's logits."""
    return _logits(model, "the model").shape[1]


def _from_name(
    name: str, pretrained: bool, checkpoint: File | None, pixels: Options, args: Options, features: bool, new_head: bool
) -> Model:
    count, arguments = args.get("num_classes"), args
    if isinstance(count, int) and count <= 0 and not features:
        raise InputError(f"{name} with num_classes={count} has no logits to certify; give the number of classes")
    if checkpoint is None:
        net = create_net(name, pretrained=pretrained, arguments=arguments)
        return _wrap(net, name, pixels, arguments, rebuild_recipe(name, arguments), features)
    content = read_checkpoint(checkpoint)
    recorded_name = content.name or ""
    if timm.is_model(recorded_name) and recorded_name.partition(".")[0] != name.partition(".")[0]:
        warnings.warn(f"{checkpoint} says that its weights are of {recorded_name}, and not of {name}", stacklevel=4)
        content.arguments = {key: value for key, value in content.arguments.items() if key == "num_classes"}
    arguments = {**content.arguments, **args}
    size = content.pixels.get("size")
    if size is not None and "img_size" not in arguments and takes_size(name):
        arguments["img_size"] = size[0] if size[0] == size[1] else size
    try:
        net = create_net(name, pretrained=False, arguments=arguments)
    except LoadError as error:  # a script may record the bn_eps of networks that have none
        if "bn_eps" not in content.arguments or "keyword argument 'bn_eps'" not in str(error):
            raise
        del content.arguments["bn_eps"], arguments["bn_eps"]
        net = create_net(name, pretrained=False, arguments=arguments)
    channels = 0 if {"mean", "std"} <= {*content.pixels, *pixels} else arguments.get("in_chans", 3)
    new_head = new_head and "num_classes" in args
    of_normaliser = load_weights(net, content.state, file=checkpoint, name=name, new_head=new_head, channels=channels)
    names, recorded_pixels = content.pixels.pop("class_names", []), {**content.pixels, **of_normaliser}
    if size is not None and "img_size" not in arguments:
        recorded_pixels["input_size"] = (arguments.get("in_chans", 3), *size)
    pixels = {key: value for key, value in (recorded_pixels | pixels).items() if key in _PIXELS}
    model = _wrap(net, name, pixels, arguments, rebuild_recipe(name, arguments), features, names)
    model.data_config |= {key: content.pixels[key] for key in ("crop_pct", "interpolation") if key in content.pixels}
    recorded = content.arguments | {key: value for key, value in content.pixels.items() if value}
    if model.class_names:
        recorded["classes"] = listing(model.class_names)
    elif names and not features:
        warnings.warn(f"{checkpoint} records names of other classes than the model's: they are left out", stacklevel=4)
    if recorded:
        what = ", ".join(
            f"{key} {' '.join(f'{x:.6g}' if isinstance(x, float) else str(x) for x in v) if isinstance(v, list) else v}"
            for key, v in recorded.items()
        )
        text = f"{checkpoint} records settings of its training, used unless you give others: {what}"
        warnings.warn(text, stacklevel=4)
    return model


def _wrap(
    net: nn.Module, label: str, pixels: Options, arguments: Options, source: Options, features: bool, names: Any = None
) -> Model:
    """Wraps a network, with preprocessing and class names as given or else as it is configured, and tries it once."""
    for path, part in net.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"{path} of {label}" if path else label
            raise InputError(f"{what} is TorchScript, which hides its operations; give the module it was made of")
        if getattr(part, "grad_checkpointing", False):  # it changes no value, and hides operations
            setattr(part, "grad_checkpointing", False)  # noqa: B010
    for path, tensor in (*net.named_parameters(), *net.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            remedy = "call the module once on images" if is_lazy(tensor) else "load its weights, off the device meta"
            raise InputError(f"{path} of {label} has no values yet; {remedy} first")
    net, pixels = _normalised(net, pixels)
    if any(tensor.is_inference() for tensor in (*net.parameters(), *net.buffers())):
        raise InputError(f"{label} was made in torch.inference_mode(), so it has no gradients; make it outside")
    check_finite(net, label)
    if getattr(net, "num_classes", None) == 0 and not features:
        raise InputError(f"{label} has no classifier (num_classes is 0), hence no logits to certify; give num_classes=")
    config = {**_data_config(net, arguments), **{key: tuple(value) for key, value in pixels.items()}}
    missing = [key for key in _PIXELS if key not in config]
    if missing:
        given = ", ".join(as_given(f"{key}=") for key in missing)
        raise InputError(f"{label} does not say its {', '.join(missing)}; give {given}")
    channels = next(iter(config["input_size"]), 1)
    for key in {"mean", "std"} - pixels.keys():
        if len(set(config[key])) == 1 or channels == 1:  # one value fits any number of channels; grey images their mean
            config[key] = (sum(config[key]) / len(config[key]),) * channels
    mean, std, input_size = (config.pop(key) for key in _PIXELS)
    check_scale(mean, std)
    model = Model(net, mean=mean, std=std, input_size=input_size, source=source, data_config=config)
    model.mean, model.std = model.mean.to(model.dtype), model.std.to(model.dtype)
    if not features:
        count = _logits(model, label).shape[1]
        names = [dict(getattr(net, "pretrained_cfg", None) or {}).get("label_names")] if names is None else names
        model.class_names = next(filter(None, (recorded_names(one, count) for one in names)), ())
    return model


class _Normalised(nn.Module):
    """The arithmetic of torchvision's ``Normalize``, which checks types and values that a certificate has none of."""

    mean: Tensor
    std: Tensor

    def __init__(self, layer: Normalize | Normalize2, like: Tensor):
        super().__init__()
        self.register_buffer("mean", like.new_tensor(layer.mean).view(-1, 1, 1))
        self.register_buffer("std", like.new_tensor(layer.std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def _normalised(net: nn.Module, pixels: Options) -> tuple[nn.Module, Options]:
    """A network with arithmetic in place of torchvision's ``Normalize``; after one in front, pixels need no other."""
    kinds = (Normalize, Normalize2)
    if type(net) is nn.Sequential and any(isinstance(part, kinds) for part in net):
        if isinstance(net[0], kinds):
            nothing = {"mean": (0.0,), "std": (1.0,)}
            if any(float(number) != nothing[key][0] for key in nothing for number in pixels.get(key, ())):
                raise InputError("the network begins with a normalisation: leave mean and std out, or remove it")
            pixels = {**nothing, **pixels}
        like, parts = next(net.parameters(), torch.empty(0)).detach(), net.named_children()
        net = nn.Sequential(OrderedDict((n, _Normalised(p, like) if isinstance(p, kinds) else p) for n, p in parts))
        net.eval()
    inner = next((path for path, part in net.named_modules() if isinstance(part, kinds)), None)
    if inner is not None:
        raise InputError(f"{inner} is torchvision's Normalize; remove it, and give its numbers as mean= and std=")
    return net, pixels


def _data_config(net: nn.Module, arguments: Options) -> Options:
    """timm's data configuration, with the network's actual image size; {} for a module without one."""
    configuration = getattr(net, "pretrained_cfg", None) or getattr(net, "default_cfg", None)
    if not configuration:
        return {}
    config = dict(timm.data.resolve_model_data_config(net, pretrained_cfg=dict(configuration)))
    channels, height, width = config["input_size"]
    size = arguments.get("img_size") or getattr(getattr(net, "patch_embed", None), "img_size", None) or (height, width)
    height, width = (size, size) if isinstance(size, int) else size
    weight = dict(net.named_parameters()).get(f"{configuration.get('first_conv')}.weight")
    channels = _channels_before(weight, net) or channels  # of a module that the caller created with timm
    config["input_size"] = (arguments.get("in_chans") or channels, height, width)
    return config


def _channels_before(weight: Tensor | None, net: nn.Module) -> int:
    """The channels of an image, by the weight of a first convolution, in TResNet after a SpaceToDepth; or 0."""
    block = next((part.bs for part in net.modules() if isinstance(part, SpaceToDepth)), 1)
    return weight.shape[1] // block**2 if weight is not None and weight.dim() == 4 else 0


def _logits(model: Model, label: str) -> Tensor:
    """The logits of one grey image, shape (1, classes)."""
    image = torch.full((1, *model.input_size), 0.5, dtype=model.dtype, device=model.device)
    try:
        logits = first_run(model, image)
    except LipcertError:
        raise
    except Exception as error:
        reason = reason_of_failure(model, image, error)
        remedy = next((text for pattern, text in _REMEDIES if re.search(pattern, reason)), "")
        raise InputError(f"{label} does not take images of shape {model.input_size}: {reason}{remedy}") from error
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        kind = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise InputError(f"{label} gives {kind} for one image; wrap it in a module that gives (1, classes) logits")
    return logits


def _presumed(net: nn.Module) -> Options:
    """The name and arguments with which timm probably built a network; {} if timm did not build it."""
    name = dict(getattr(net, "pretrained_cfg", None) or {}).get("architecture")
    if not isinstance(name, str) or not timm.is_model(name):
        return {}
    arguments: Options = {"num_classes": net.num_classes} if isinstance(getattr(net, "num_classes", 0.0), int) else {}
    first = next((p for p in net.parameters() if p.dim() == 4), None)
    if _channels_before(first, net) not in (0, 3):
        arguments["in_chans"] = _channels_before(first, net)
    embed = getattr(net, "patch_embed", None)
    for key in ("img_size", "patch_size"):
        size = getattr(embed, key, None)
        if size is not None and "patch_embed.proj.weight" in dict(net.named_parameters()):
            arguments[key] = list(size) if isinstance(size, (tuple, list)) else size
    return rebuild_recipe(name, arguments)


def _refuse(names: set[str], what: str) -> None:
    if names:
        raise InputError(f"{', '.join(sorted(names))} cannot be combined with {what}; leave it out")
