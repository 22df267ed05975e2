"""Preprocessing from image files to the network's input: settings, application and description."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lipcert.errors import InputError
from lipcert.settings import check, option

if TYPE_CHECKING:
    from lipcert.model import Model

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
# timm's defaults for resizing, used if a model's configuration lacks an entry.
RESIZING: dict[str, Any] = {"interpolation": "bilinear", "crop_pct": 0.875, "crop_mode": "center"}

_option = partial(option, group="Preprocessing; by default from the configuration of the model")
# No remark if at least this share of an image is kept; the rest is rounding of sizes.
_WHOLE = 0.999
# No mean and no standard deviation of pixels in [0, 1] is larger; somewhat more is left to odd networks.
_LARGEST_PIXEL = 2.0


@dataclass(frozen=True)
class Preprocessing:
    """Changes to a model's preprocessing configuration, as numbers or as texts with commas; None keeps an entry."""

    mean: Sequence[float] | str | None = _option("Mean of the normalisation: 0.5, or 0.485,0.456,0.406.", None)
    std: Sequence[float] | str | None = _option("Standard deviation of the normalisation, in the same form.", None)
    crop_pct: float | None = _option("Centre crop, as a fraction of the side of the resized image.", None, float | None)
    input_size: Sequence[int] | str | None = _option("Height and width of the network's input: 224, or 224,192.", None)
    interpolation: str | None = _option("Interpolation for resizing.", None, choices=INTERPOLATIONS, python=True)

    def __post_init__(self) -> None:
        check(self)
        for name, kind in (("mean", float), ("std", float), ("input_size", int)):
            value = getattr(self, name)
            if value is None:
                continue
            try:
                numbers = tuple(kind(part) for part in (value.split(",") if isinstance(value, str) else value))
            except (TypeError, ValueError):
                numbers = ()
            if not numbers or not all(math.isfinite(x) and (x > 0 or name == "mean") for x in numbers):
                kinds = "a number" if name == "mean" else "a positive number"
                raise InputError(f"{name} takes {kinds}, or several with commas between, got {value!r}")
            object.__setattr__(self, name, numbers)
        check_scale(self.mean, self.std)
        if self.input_size is not None and len(self.input_size) > 2:
            raise InputError(f"input_size is a height and a width, got {self.input_size}")
        if self.crop_pct is not None and not 0.1 <= self.crop_pct <= 1:
            raise InputError(f"crop_pct is a fraction from 0.1 to 1, such as 0.875, got {self.crop_pct}")

    @staticmethod
    def of_summary(entries: Mapping[str, Any]) -> Preprocessing:
        """The preprocessing recorded in a summary."""
        recorded = {name: entries.get(name) for name in ("mean", "std", "crop_pct", "interpolation")}
        size = entries.get("input_size")
        return Preprocessing(input_size=size[1:] if isinstance(size, list) else None, **recorded)

    def stated(self, channels: int) -> dict[str, Any]:
        """What is given of the mean, the standard deviation and the input size, as arguments of ``lipcert.load``."""
        size = None if self.input_size is None else (channels, int(self.input_size[0]), int(self.input_size[-1]))
        given = {"mean": self.mean, "std": self.std, "input_size": size}
        return {name: value for name, value in given.items() if value is not None}

    def apply(self, model: Model) -> None:
        """Changes a model's normalisation, input size and data configuration."""
        channels = model.input_size[0]
        given = self.stated(channels)
        size = given.pop("input_size", model.input_size)
        for name, numbers in given.items():
            if len(numbers) not in (1, channels):
                raise InputError(f"{name} needs one number for each of the {channels} channels, got {len(numbers)}")
            values = getattr(model, name)
            values.copy_(values.new_tensor(numbers).view(-1, 1, 1).expand_as(values))
        if size != model.input_size:
            from lipcert.inputs.loading import number_of_classes  # imports torch

            model.input_size = size
            number_of_classes(model)
        for name in ("crop_pct", "interpolation"):
            if getattr(self, name) is not None:
                model.data_config[name] = getattr(self, name)


def check_scale(mean: Any, std: Any) -> None:
    """Refuses the normalisation of pixels from 0 to 255: lipcert's are in [0, 1]."""
    for name, numbers, how_many in (("mean", mean, any), ("std", std, all)):
        if numbers is not None and how_many(abs(x) > _LARGEST_PIXEL for x in numbers):
            remedy = f"divide by 255, {name} {','.join(f'{x / 255:.6g}' for x in numbers)}"
            remedy = "decimals have a point, 0.5" if len(numbers) == 2 else remedy
            given = ", ".join(f"{x:.6g}" for x in numbers)
            raise InputError(f"{name} {given} is for pixels from 0 to 255, and these are in [0, 1]: {remedy}")


def preprocessing(model: Model, files: bool) -> dict[str, Any]:
    """The preprocessing for JSON: ``input_size, mean, std, interpolation, crop_pct, crop_mode``."""
    stated = {key: value for key, value in model.data_config.items() if key in RESIZING and value is not None}
    config = {**RESIZING, **stated} if files else dict.fromkeys(RESIZING)
    mean, std = (value.flatten().tolist() for value in (model.mean, model.std))
    return {"input_size": list(model.input_size), "mean": mean, "std": std, **config}


def in_words(config: Mapping[str, Any]) -> str:
    """One line: ``resize to 256 on the shorter side, crop 224×224, bicubic; mean 0.5; std 0.229, 0.224, 0.225``."""
    try:
        resized, size, mode = _sizes(config)
        several = {name: config[name] if len({*config[name]}) > 1 else config[name][:1] for name in ("mean", "std")}
        numbers = "; ".join(f"{name} {', '.join(f'{x:.4g}' for x in values)}" for name, values in several.items())
        if resized is None:
            return f"{_times(size)}, as stored; {numbers}"
        if mode == "squash":
            steps = f"to {_times(resized)}" + (f", crop {_times(size)}" if resized != size else "")
        elif mode == "border":
            steps = f"into {_times(resized)}, crop or pad to {_times(size)}"
        else:
            to = f"to {resized[0]} on the shorter side" if resized[0] == resized[1] else f"to cover {_times(resized)}"
            steps = f"{to}, crop {_times(size)}"
        return f"resize {steps}, {config['interpolation']}; {numbers}"
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return "not stated"


def remarks(config: Mapping[str, Any], sizes: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Remarks on images of some (width, height): how many are enlarged, and how much of them is cropped away."""
    resized, (rows, columns), mode = _sizes(config)
    if resized is None or not sizes:
        return
    scales = [(resized[0] / height, resized[1] / width) for width, height in sizes]
    if mode != "squash":
        scales = [((min if mode == "border" else max)(both),) * 2 for both in scales]
    enlarged = sum(max(both) > 1 for both in scales)
    if enlarged:
        which = "the images" if enlarged == len(sizes) else f"{100 * enlarged / len(sizes):.0f} % of the images"
        yield f"{which} are enlarged: ε and radii are measured on the resized images"
    kept = [
        min(1.0, rows / (down * height)) * min(1.0, columns / (across * width))
        for (down, across), (width, height) in zip(scales, sizes, strict=True)
    ]
    if min(kept) < _WHOLE:
        most, least = (f"{100 * (1 - share):.0f}" for share in (min(kept), max(kept)))
        yield f"centre crop discards {most if most == least else f'{least} to {most}'} % of the pixels"


def _sizes(config: Mapping[str, Any]) -> tuple[tuple[int, int] | None, tuple[int, int], str]:
    """(height, width) to which an image is resized, unless it is as stored, and cropped, and how, as timm calls it."""
    _, rows, columns = config["input_size"]
    if config["crop_pct"] is None:
        return None, (rows, columns), ""
    resized = math.floor(rows / config["crop_pct"]), math.floor(columns / config["crop_pct"])
    return resized, (rows, columns), config["crop_mode"]


def _times(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
