"""The certified network: it takes pixels in [0, 1], normalises them and applies the timm model."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pickle import PickleError
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from lipcert.errors import InputError, first_line
from lipcert.numerics import RealArithmetic


def unusable(net: nn.Module) -> str | None:
    """The reason why no bound can hold for a network's weights, such as ``"head.weight holds NaN"``; None if none.

    Reasons are formats of 8 bits, in which torch does not compute, NaN in any tensor, and infinity in a parameter or in
    batch norm statistics. Other buffers may be infinite: masks and limits use infinity for "no limit".
    """
    parameters = {name for name, _ in net.named_parameters()}
    for name, value in (*net.named_parameters(), *net.named_buffers()):
        if value.is_floating_point() and value.dtype.itemsize == 1:
            return f"{name} is in {str(value.dtype)[6:]}, a format for storage; call .float() on the network first"
        if not value.is_floating_point() or bool(value.sum().isfinite()):
            continue  # a sum is NaN or infinite if an entry is; it may also overflow
        if bool(value.isnan().any()):
            return f"{name} holds NaN"
        weighs = name in parameters or name.rpartition(".")[2].startswith("running_")
        if weighs and bool(value.isinf().any()):
            return f"{name} holds infinity"
    return None


_MOST_PIXELS = 2**26
# Values that are farther outside [0, 1] are no rounding errors.
_ROUNDED = 1e-6

Function = TypeVar("Function", bound=Callable[..., Any])
_LOADERS: list[Callable[..., Model]] = []


def uncompiled(model: Any) -> Any:
    """A module without the wrapper of ``torch.compile``, unless that has hooks, which may change its results."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds
    if compiler is None or type(model) is not compiler.OptimizedModule:
        return model
    return model if model._forward_hooks or model._forward_pre_hooks else model._orig_mod


def network_of(model: Any) -> Any:
    """The network of a smoothed classifier; any other module itself, without a ``torch.compile`` wrapper."""
    model = uncompiled(model)
    forward = inspect.getattr_static(type(model), "forward", None)  # that of TorchScript is a descriptor
    return model.network if str(getattr(forward, "__module__", "")).startswith("lipcert.smoothing.") else model


def checked(model: object, **pixels: Any) -> Model:
    """The given model, without a ``torch.compile`` wrapper; a module of timm, or one with ``pixels``, is wrapped."""
    model = network_of(model)
    if isinstance(model, Model) and not pixels:
        return model
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; make one: lipcert.load('vit_tiny_patch16_224')")
    if pixels:
        return _LOADERS[0](model, **pixels)
    if getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None):
        loaded = _LOADERS[0](model)
        mean, std = (", ".join(f"{x:.4g}" for x in value.flatten().tolist()) for value in (loaded.mean, loaded.std))
        warnings.warn(
            f"a timm network without its normalisation: mean {mean} and std {std} of its configuration are used; give "
            "others by lipcert.load(module, mean=..., std=...)",
            stacklevel=4,
        )
        return loaded
    raise InputError(
        "model is a plain module; wrap it first: model = lipcert.load(module, mean=..., std=..., input_size=...)"
    )


def check_eps(eps: float, model: Model) -> None:
    """Refuses an ε that is larger than the distance of any two images."""
    largest = math.sqrt(math.prod(model.input_size))
    if eps > largest:
        typed = f"{eps:g}"
        raise InputError(
            f"eps {typed} is more than the distance of any two images of {model.input_size}, {largest:.4g}: pixels are "
            f"in [0, 1], so a number of steps of 255 is written {typed}/255"
        )


def loads_modules(load: Function) -> Function:
    """Registers the function that wraps a module as a model; this module cannot import it."""
    _LOADERS[:] = [load]
    return load


def evaluated(net: nn.Module) -> nn.Module:
    """A module in evaluation mode; warns if it was in training mode and that makes a difference."""
    for path, part in net.named_modules():
        drops = getattr(part, "p", 0) if isinstance(part, _DropoutNd) else getattr(part, "drop_prob", 0)
        if part.training and (drops or (isinstance(part, _NormBase) and part.track_running_stats)):
            part_in_training = f"{path or 'it'} is a {type(part).__name__}"
            warnings.warn(
                f"the module was in training mode, and {part_in_training}; model.eval() was called", stacklevel=4
            )
            break
    try:
        return net.eval()
    except NotImplementedError as error:
        raise InputError("the module is an exported program; give the module that it was exported from") from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode during the block, and restores the mode of every module afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


_ALONE = threading.RLock()
# What torch says of compiled parts, which run uncompiled, and of backward hooks, which no bound depends on.
_REMARKS = "Using `torch.compile|For backward hooks to be called"


class _Direct:
    """In place of torch's reentrant checkpoints, which ``torch.autograd.grad`` refuses: calls the function."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserves_random_states: bool, *args: Any) -> Any:
        return function(*args)


@contextmanager
def _without_others() -> Iterator[None]:
    """One thread runs in torch's default modes, its networks uncompiled and without reentrant checkpoints."""
    there = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    stance, anomalies = torch.compiler.set_stance, torch.autograd.set_detect_anomaly
    with _ALONE, stance("force_eager"), anomalies(False), there, warnings.catch_warnings():
        warnings.filterwarnings("ignore", _REMARKS, UserWarning)
        before = torch.utils.checkpoint.CheckpointFunction
        setattr(torch.utils.checkpoint, "CheckpointFunction", _Direct)  # noqa: B010
        try:
            yield
        finally:
            setattr(torch.utils.checkpoint, "CheckpointFunction", before)  # noqa: B010


def alone(function: Function) -> Function:
    """A decorator that lets one thread run at a time: lipcert changes settings of torch, which are global."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_others():
            return function(*args, **kwargs)

    return cast(Function, run)


def outside_inference_mode(function: Function) -> Function:
    """:func:`alone`, outside of ``torch.inference_mode()``, which prevents differentiation."""
    return alone(torch.inference_mode(False)(function))


class Model(nn.Module):
    """A classifier on pixels: ``model(images)`` with images in [0, 1], shape (N, C, H, W), gives logits (N, classes).

    Radii are measured in this pixel space. Without the normalisation they would be too large by the inverse of its
    standard deviations, about 4.4 times for the usual ImageNet constants.

    Attributes:
        net: the network after the normalisation, usually a timm model.
        mean, std: per-channel normalisation, tensors of shape (C, 1, 1).
        input_size: (C, H, W) of one image.
        source: the name and arguments that rebuild ``net``: ``{"name": timm name, "arguments": {...}}``, or {} for a
            module of the caller.
        data_config: timm's data configuration (interpolation, crop_pct, ...), for reading images.
        class_names: names of the classes by number; () where they are not known.
        recipe: the surgery so far, one dict per step, in order.
        sigma: standard deviation of the noise, where the model is that of a smoothed classifier; else None.
        conversion: the report of the last :func:`lipcert.convert`, or None.
        constraint: the report of the last :func:`lipcert.constrain`, or None.
        presumed: whether ``source`` was inferred from a module and must be checked before use.
        real: whether casts between floating-point types inside the network are the identity, as in real arithmetic.
            True for a certifier's copy in float64; False for a network that runs unchanged.
    """

    sigma: float | None = None
    conversion: Any = None
    constraint: Any = None
    real = False
    presumed = False
    mean: Tensor
    std: Tensor
    pair: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        input_size: Sequence[int],
        source: dict[str, Any] | None = None,
        data_config: dict[str, Any] | None = None,
        recipe: Sequence[dict[str, Any]] = (),
        class_names: Sequence[str] = (),
    ):
        super().__init__()
        if len(input_size) != 3 or min(input_size) < 1:
            raise InputError(f"input_size must be (channels, height, width), got {tuple(input_size)}")
        if math.prod(input_size) > _MOST_PIXELS:
            raise InputError(f"input_size {tuple(input_size)} is more than any network takes")
        channels = int(input_size[0])
        mean, std = ([*values] * (channels if len(values) == 1 else 1) for values in (mean, std))
        if len(mean) != channels or len(std) != channels:
            raise InputError(
                f"mean and std need one number for each of the {channels} channels, got {len(mean)} and {len(std)}"
            )
        if not all(s > 0 for s in std):
            raise InputError(f"std must be positive in every channel, got {tuple(std)}")
        self.net = net
        self.input_size = tuple(int(n) for n in input_size)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1), persistent=False)
        self.register_buffer("pair", torch.tensor([[0.0], [1.0]]), persistent=False)  # z ↦ [0, z]
        self.source = dict(source or {})
        self.data_config = dict(data_config or {})
        self.recipe = [dict(step) for step in recipe]
        self.class_names = tuple(class_names)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images in [0, 1].

        Args:
            images: shape (N, C, H, W), with (C, H, W) the model's ``input_size``.

        Returns:
            Logits, shape (N, classes). One logit z of the network counts as the two logits [0, z], whose softmax is the
            sigmoid of z: class 1 for z > 0 and class 0 otherwise.
        """
        with RealArithmetic() if self.real else nullcontext():
            logits: Tensor = self.net((images - self.mean) / self.std)
            if isinstance(logits, Mapping) or not hasattr(logits, "shape"):
                kind = type(logits).__name__
                raise InputError(f"the network returns a {kind}; give a module whose forward returns its logits alone")
            if tuple(logits.shape[1:]) != (1,):
                return logits
            return F.linear(logits, self.pair.to(logits.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the weights, in which ``model(images)`` runs."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), self.mean.dtype)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next((p.device for p in self.parameters()), self.mean.device)

    def check_images(self, images: Tensor) -> Tensor:
        """The images; refuses those of a wrong shape or type, with NaN, or with values outside [0, 1].

        Values outside by up to 1e-6, as resizing, denoising and attacks leave them, are clipped with a warning.

        Raises:
            InputError: the images are not valid; the message says what to do.
        """
        if not isinstance(images, Tensor):
            raise InputError(f"images must be a tensor, got a {type(images).__name__}; torch.as_tensor takes arrays")
        check_dense(images, "images")
        if images.dim() != 4 or tuple(images.shape[1:]) != self.input_size:
            expected, shape = ", ".join(str(n) for n in self.input_size), tuple(images.shape)
            hint = "resize them to the model's input"
            if shape == self.input_size:
                hint = "give a batch: images[None]"
            elif len(shape) == 4 and (shape[3], *shape[1:3]) == self.input_size:
                hint = "channels come first: images.permute(0, 3, 1, 2), or images.transpose(0, 3, 1, 2) of NumPy"
            elif len(shape) == 5 and shape[2:] == self.input_size:
                hint = "crops are images of their own: images.flatten(0, 1), with each label as often"
            elif self.input_size[1:] in (shape[1:3], shape[-2:]):
                hint = "the number of channels differs: repeat that of greyscale images, and drop an alpha channel"
                if self.input_size[0] == 1:
                    hint = (
                        "the number of channels differs: convert to greyscale, and add the channel by images[:, None]"
                    )
            raise InputError(f"images must have shape (N, {expected}), got {shape}; {hint}")
        if not images.is_floating_point():
            raise InputError(f"images must be floating point in [0, 1], got {images.dtype}; divide 8-bit pixels by 255")
        if not images.numel() or (images.amin() >= 0 and images.amax() <= 1):
            return images
        if not (images.amin() >= -_ROUNDED and images.amax() <= 1 + _ROUNDED):
            hint = "pass pixels before normalisation; timm's create_loader gives them for mean=(0, 0, 0), std=(1, 1, 1)"
            if images.isnan().any():
                hint = "leave out the images with NaN, or repair them"
            elif images.amin() >= 0 and 2 < images.amax() <= 255:
                hint = "divide pixels from 0 to 255 by 255"
            raise InputError(
                f"images must lie in [0, 1] and hold no NaN, got values from {images.amin():.4g} to "
                f"{images.amax():.4g}; {hint}"
            )
        warnings.warn("values outside [0, 1] by up to 1e-6 are clipped, as rounding errors", stacklevel=3)
        return images.clamp(0, 1)


M = TypeVar("M", bound=nn.Module)


def copy_of(module: M) -> M:
    """A copy of a module with tensors of its own, in the same modes; refused where Python cannot make one."""
    try:
        copied = copy.deepcopy(module)
    except (RuntimeError, TypeError, PickleError) as error:
        raise InputError(
            f"the network cannot be copied: {first_line(error)}; load its state_dict() into a new one"
        ) from error
    for one, other in zip(copied.modules(), module.modules(), strict=False):
        one.training = other.training  # layers of einops are made anew, in training mode
    return copied


def check_dense(tensor: Tensor, what: str) -> None:
    """Refuses sparse and nested tensors."""
    if tensor.layout != torch.strided or tensor.is_nested:
        raise InputError(f"{what} must be a dense tensor, got a {'nested' if tensor.is_nested else 'sparse'} one")


def check_labels(labels: Any, count: int, classes: int | None = None) -> Tensor:
    """The labels, one whole number for each image, below the number of classes if it is given.

    Raises:
        InputError: they are not.
    """
    if not isinstance(labels, Tensor) or labels.shape != (count,) or labels.is_floating_point():
        kind = f"{labels.dtype} of {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"labels must be whole numbers of shape ({count},), got {kind}")
    if classes is not None and count and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(f"labels must be from 0 to {classes - 1}, got {int(labels.min())} to {int(labels.max())}")
    return labels
