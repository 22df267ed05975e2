"""``lipcert certify``: a certificate for every image of a data set."""

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from lipcert.certifier import METHODS, Certifier
from lipcert.data import open_images
from lipcert.errors import InputError, Interrupted
from lipcert.results import ResultFile, Tally, describe, rows

from ._options import Checkpoint, Data, ModelArgs, ModelName, NoPretrained, load_model, one_line_errors, parse_eps
from ._print import lower, print_facts, progress, say, share, upper

# Images run together so long as that takes less than a minute: rows of slow certificates are written as they come.
FIRST, BATCH = 8, 64
SECONDS = 60.0


@one_line_errors
def certify(
    eps: Annotated[str, typer.Option(help="l2 radius on pixels in [0, 1]: 36/255, 0.5, 1e-3.")],
    model: ModelName = None,
    data: Data = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = METHODS[0],
    limit: Annotated[
        int | None, typer.Option(help="Certify so many images, from a fixed shuffle of all.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a JSON line an image; a stopped run goes on there.", show_default=False)
    ] = None,
    fail_under: Annotated[
        float | None,
        typer.Option(help="Exit with 1 if the certified accuracy is below this share.", show_default=False),
    ] = None,
    checkpoint: Checkpoint = None,
    no_pretrained: NoPretrained = False,
    model_args: ModelArgs = None,
) -> None:
    """Certify images: no perturbation of the pixels smaller than the radius changes the prediction."""
    radius = parse_eps(eps)
    if method not in METHODS:
        raise InputError(f"there is no method {method!r}; choose one of {', '.join(METHODS)}")
    if fail_under is not None and not 0 <= fail_under <= 1:
        raise InputError(f"--fail-under is a share between 0 and 1, got {fail_under}")
    loaded = load_model(model, checkpoint, no_pretrained, model_args)
    images = open_images(data, loaded, limit=limit)
    if images.note is not None:
        say(f"note: {images.note}")
    if fail_under is not None and not images.labelled:
        raise InputError("--fail-under needs labels, and these images have none that belong to the model's classes")
    with progress("bounding the network") as update:
        certifier = Certifier(loaded, radius, method, progress=update)
    for stage, reason in certifier.skipped.items():
        say(f"note: {stage} is left out: {reason}")

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(ResultFile(out, describe(loaded, images, certifier, eps))) if out else None
        tally = file.tally if file else Tally()
        write = file.append if file else tally.add
        earlier = tally.images
        if file and earlier:
            say(f"{file.path}: going on behind {earlier} images")
        update = stack.enter_context(progress("certifying", images.length))
        together = FIRST
        try:
            for rest in images.batches(BATCH, skip=file.done if file else ()):
                while len(rest):
                    batch, rest = rest.split(together)
                    started = time.perf_counter()
                    certificates = certifier.run(batch.images, batch.labels)
                    seconds = time.perf_counter() - started
                    for row in rows(batch, certificates, seconds):
                        write(row)
                    update(tally.images, images.length)
                    together = min(2 * together, BATCH) if 2 * seconds < SECONDS else max(together // 2, 1)
        except KeyboardInterrupt as error:
            kept = f"; {file.path} keeps {tally.images} rows, and the same command goes on from there" if file else ""
            raise Interrupted(f"interrupted after {tally.images - earlier} images{kept}") from error

    _print_tally(tally, certifier, eps)
    if file:
        print_facts([("rows", str(file.path)), ("summary", str(file.summary_path))])
    reached = tally.certified_accuracy
    if fail_under is not None and reached is not None and reached < fail_under:
        say(f"lipcert: the certified accuracy at {eps} is {reached:.4g}, below {fail_under:g}")
        raise typer.Exit(1)


def _print_tally(tally: Tally, certifier: Certifier, eps: str) -> None:
    facts = [("images", str(tally.images))]
    if tally.labelled:
        facts.append(("clean accuracy", share(tally.correct, tally.images)))
        facts.append((f"certified accuracy at {eps}", share(tally.certified_correct, tally.images)))
    else:
        facts.append((f"certified at {eps}", share(tally.certified, tally.images)))
    if tally.median_radius is not None:
        facts.append((f"median radius{' of those right' if tally.labelled else ''}", lower(tally.median_radius)))
    facts.append(("Lipschitz bound", upper(certifier.bound.log10)))
    facts.append(("rigor", ", ".join(tally.rigors)))
    facts.append(("decided by", ", ".join(f"{name} {count}" for name, count in tally.methods.most_common())))
    facts.append(("seconds", f"{tally.seconds:.1f} ({tally.seconds / tally.images:.3g} an image)"))
    print_facts(facts)
