"""Small pictures of certified images and of their attacked versions."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lipcert.errors import LipcertError
from lipcert.report._markdown import MARK
from lipcert.results import Run

if TYPE_CHECKING:
    from torch import Tensor

    from lipcert.model import Model

_SIDE = 96


@dataclass(frozen=True)
class Example:
    """One image as it was certified.

    Attributes:
        image: a PNG file.
        attacked: the attacked image, a PNG file; None if the attack did not change the prediction or the model is not
            available.
        distance: ℓ2 distance between the two.
        predicted: the predicted class of the attacked image.
    """

    image: bytes
    attacked: bytes | None = None
    distance: float = 0.0
    predicted: int = -1


def examples(run: Run, indices: Collection[int]) -> dict[int, Example]:
    """Pictures of the images that are available: the bundled ones, or those in a local folder or file.

    An image whose hash differs from the one in its row is left out. Attacked images are recomputed if the attack was
    PGD and the model is the bundled one or an artifact named in the run's command.
    """
    from lipcert.inputs.data import open_images

    spec = str(run.summary.get("data", {}).get("spec"))
    if not {"image"} <= run.rows[0].keys() or not (spec == "bundled" or os.path.exists(spec)):
        return {}
    rows = {row["index"]: row for row in run.rows if row["index"] in indices}
    opened: dict[int, tuple[Tensor, Example]] = {}
    try:
        images = open_images(None if spec == "bundled" else spec, _stand_in(run))
        for batch in images.batches(len(rows), only=rows.keys()):
            same = [i for i, index in enumerate(batch.indices) if batch.hashes[i] == rows[index]["image"]]
            opened |= {batch.indices[i]: (batch.images[i], Example(_png(batch.images[i]))) for i in same}
    except (LipcertError, LookupError, TypeError, ValueError):  # the images or the summary have changed since
        return {}
    broken = [index for index in opened if rows[index].get("attacked")]
    return {index: one for index, (_, one) in opened.items()} | dict(
        _attacked(run, {index: opened[index][0] for index in broken}, {i: rows[i]["predicted"] for i in broken})
    )


def _attacked(run: Run, images: dict[int, Tensor], predicted: dict[int, int]) -> Iterator[tuple[int, Example]]:
    """Recomputes the attacked images of a run."""
    import torch

    from lipcert.attacks import PGD, smallest
    from lipcert.results.verify import attack_of

    attack = attack_of(run)
    model = _model(run) if images and attack is not None else None
    if not isinstance(attack, PGD) or model is None:
        return
    stacked = torch.stack(list(images.values())).to(model.dtype)
    labels = torch.tensor(list(predicted.values()))
    nearest = smallest(attack, model, stacked, labels, attack(model, stacked, labels, run.eps), run.eps)
    classes = model(nearest.images).argmax(1)
    for i, index in enumerate(images):
        if nearest.broken[i]:
            yield (
                index,
                Example(_png(images[index]), _png(nearest.images[i]), float(nearest.distance[i]), int(classes[i])),
            )


def _model(run: Run) -> Model | None:
    """The model of a run, if its artifact is available; otherwise None."""
    from lipcert.inputs.loading import load
    from lipcert.report._artifact import artifact_of
    from lipcert.results.verify import check_model

    path = artifact_of(run)
    if path is None:
        return None
    try:
        model = load(path)
        check_model(run, model)
    except LipcertError:
        return None
    model.real = run.summary.get("dtype") == "real"
    return model.double() if model.real else model


def _stand_in(run: Run) -> Model:
    """A placeholder model with the preprocessing of the run's model and at least as many classes."""
    import torch

    from lipcert.model import Model

    class Classes(torch.nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.new_zeros(len(images), count)

    count = 1 + max(max(row["predicted"], row.get("label", 0)) for row in run.rows)
    config_of_run = run.summary["preprocessing"]
    config = {
        key: config_of_run[key] for key in ("interpolation", "crop_pct", "crop_mode") if config_of_run[key] is not None
    }
    return Model(
        Classes(),
        mean=config_of_run["mean"],
        std=config_of_run["std"],
        input_size=config_of_run["input_size"],
        data_config=config,
    )


def _png(image: Tensor) -> bytes:
    """A PNG file of at most ``_SIDE`` × ``_SIDE`` pixels; small images are enlarged by an integer factor."""
    from PIL import Image, PngImagePlugin

    pixels = (image.detach().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    times = _SIDE // max(picture.size)
    if times:
        picture = picture.resize((times * picture.width, times * picture.height), Image.Resampling.NEAREST)
    else:
        picture.thumbnail((_SIDE, _SIDE))
    file, marked = io.BytesIO(), PngImagePlugin.PngInfo()
    marked.add_text("Comment", MARK)
    picture.save(file, "png", optimize=True, pnginfo=marked)
    return file.getvalue()
