"""``lipcert predict``: the class, the share of draws and the radius of each image by a smoothed classifier."""

import os
import sys
from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any

import typer

from lipcert.errors import InputError
from lipcert.inputs.files import printable
from lipcert.inputs.sources import Source
from lipcert.settings import shown

from ._options import MODEL_HELP, AsJson, Denoiser, Limit, ModelOptions, options_of
from ._print import percent, print_json, print_table, progress, say, start


@options_of(source=ModelOptions)
def predict(
    source: Callable[..., ModelOptions],
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP.partition(";")[0] + ".")],
    images: Annotated[list[str], typer.Argument(metavar="IMAGES...", help="Images, and folders or .tar of images.")],
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation of the noise, if the file of the model does not state it.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Noise draws per image, besides up to 100 that select the class.")] = 200,
    alpha: Annotated[float, typer.Option(help="Failure probability per image.")] = 1e-3,
    limit: Limit = None,
    denoiser: Denoiser = None,
    as_json: AsJson = False,
) -> None:
    """Predict with the smoothed classifier: class, share of the noise draws, and certified radius of each image."""
    asked, named = source(), Source.of(model)
    start(*asked.files, data=images)
    from lipcert.inputs.data import open_images
    from lipcert.smoothing import SmoothedClassifier

    from ._loading import load_model, show_preprocessing

    loaded = load_model(named, asked, denoiser=denoiser)
    sigma = loaded.sigma if sigma is None else sigma
    if sigma is None:
        raise InputError(f"{named.word} is not a smoothed classifier: give the noise with --sigma, such as 0.25")
    smoothed = SmoothedClassifier(loaded, sigma)
    opened = [open_images(path, loaded, limit=limit, purpose="predict") for path in images]
    show_preprocessing(opened[0], loaded)
    total = min(sum(map(len, opened)), limit or sys.maxsize)
    every = ((printable(path), batch) for path, one in zip(images, opened, strict=True) for batch in one.batches(1))
    rows: list[dict[str, Any]] = []
    with progress("predicting", total) as update:
        for path, batch in islice(every, total):
            file = (batch.files and batch.files[0]) or str(batch.indices[0])
            found = smoothed.certify(batch.images, samples=samples, alpha=alpha)
            abstained, predicted = bool(found.abstained), int(found.predicted)
            rows.append(
                {
                    "file": file if len(images) == 1 else path if path.endswith(file) else os.path.join(path, file),
                    "class": None if abstained else predicted,
                    "name": None if abstained else opened[0].class_names.get(predicted),
                    "share": int(found.count) / int(found.samples),
                    "radius": float(found.radius),
                }
            )
            update(len(rows), total)
    if as_json:
        print_json(rows)
        return
    print_table(
        ("image", "class", "share", "radius"),
        [
            (
                str(row["file"]),
                "abstains" if row["class"] is None else str(row["name"] or row["class"]),
                percent(row["share"]),
                shown(row["radius"]),
            )
            for row in rows
        ],
    )
    say(f"of the smoothed classifier, σ = {sigma:g}: each radius is false with probability at most {alpha:g}")
