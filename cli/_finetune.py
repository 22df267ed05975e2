"""``lipcert finetune``: trains a model for larger certified radii and writes it to an artifact."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor

from lipcert._processes import Processes
from lipcert._settings import parse_eps
from lipcert.artifact import save
from lipcert.data import Images, open_images
from lipcert.errors import InputError, Interrupted
from lipcert.loading import resolve
from lipcert.model import Model
from lipcert.training import LOSSES, Augmentation, Batches, Epoch, FinetuneSettings, MaxNorm, Mixed
from lipcert.training import finetune as train

from ._errors import one_line_errors
from ._options import Checkpoint, Force, ModelArgs, ModelName, NoPretrained, load_model
from ._output import check_out, default_name, move_to
from ._print import busy, print_facts, progress, say, share
from ._torchrun import torchrun

_EVALUATED = 64
_SHOWN = 2000  # images on which the accuracy before and after is measured


@one_line_errors
def finetune(
    data: Annotated[
        str, typer.Option(help="A folder or .tar with class folders, or torch/NAME, hfds/NAME, wds/FOLDER [:SPLIT].")
    ],
    eps: Annotated[str, typer.Option(help="l2 radius on pixels in [0, 1]: 36/255, 0.5, 1e-3.")],
    model: ModelName = None,
    loss: Annotated[
        str,
        typer.Option(
            help="anchored: for the anchored certificate; emma, gloro, trades, fixed: for gloro; lmt: for global; "
            "local-b, local-g: for local; noise: for smoothing; ce: cross-entropy."
        ),
    ] = LOSSES[0],
    epochs: Annotated[int, typer.Option(help="How often the images are gone through.")] = 10,
    lr: Annotated[float, typer.Option(help="The largest learning rate.")] = 3e-4,
    batch_size: Annotated[int, typer.Option(help="Images a step.")] = 64,
    temperature: Annotated[
        str, typer.Option(help="Divides the logits in the loss; 0.1 to 0.25 for models of small norms; or FIRST,LAST.")
    ] = "1",
    max_norm: Annotated[
        list[str] | None,
        typer.Option(help="Hold each layer's spectral norm at this; or of some: '*.fc1=1.2'.", show_default=False),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(help="adamw; nadam, with Lookahead; or muon, which with --lr 0.01 is fast where norms are held."),
    ] = "adamw",
    schedule: Annotated[str, typer.Option(help="Of the learning rate: cosine, multistep or exponential.")] = "cosine",
    ramp: Annotated[
        str | None,
        typer.Option(
            help="A,B,S: eps in the loss goes from A to B times --eps over the share S of the run; "
            "0.1,2,0.5 for emma, 0,1.1,0.5 for local-b and -g, else 0,1,0.333.",
            show_default=False,
        ),
    ] = None,
    sigma: Annotated[
        float | None,
        typer.Option(help="Standard deviation of the noise in the loss noise: 0.25.", show_default=False),
    ] = None,
    consistency: Annotated[
        float, typer.Option(help="In the loss noise: weight of the agreement of two draws, such as 10.")
    ] = 0.0,
    weight: Annotated[float, typer.Option(help="Of the divergence in the loss trades.")] = 1.0,
    sparsity: Annotated[float, typer.Option(help="Of the sparsity loss in local-b and local-g.")] = 0.0,
    accumulate: Annotated[int, typer.Option(help="Batches an update.")] = 1,
    ema: Annotated[
        float | None, typer.Option(help="Average the weights with this decay, such as 0.999.", show_default=False)
    ] = None,
    amp: Annotated[
        str | None,
        typer.Option(help="bfloat16: run the network's products in it; not with anchored.", show_default=False),
    ] = None,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Keep kernels and images in this memory format.")
    ] = False,
    augment: Annotated[bool, typer.Option(help="Crop the images at random and flip them from left to right.")] = True,
    crop: Annotated[str, typer.Option(help="resized, or shift by up to an eighth of the side, or none.")] = "resized",
    randaugment: Annotated[
        str | None, typer.Option(help="timm's RandAugment, such as rand-m9-n2.", show_default=False)
    ] = None,
    cutout: Annotated[float, typer.Option(help="Blacken a rectangle in this share of the images.")] = 0.0,
    mix: Annotated[
        str | None,
        typer.Option(help="Images of a second data set, such as generated ones.", show_default=False),
    ] = None,
    mix_ratio: Annotated[float, typer.Option(help="Its share of a batch.")] = 0.7,
    limit: Annotated[
        int | None, typer.Option(help="Use so many images, from a fixed shuffle of all.", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to train: cpu, cuda, cuda:1; a GPU if there is one.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the model goes: <name>.finetuned.lipcert.safetensors.", show_default=False),
    ] = None,
    force: Force = False,
    checkpoint: Checkpoint = None,
    no_pretrained: NoPretrained = False,
    model_args: ModelArgs = None,
) -> None:
    """Train a model for larger certified radii; a stopped run goes on from a checkpoint beside the output."""
    if loss not in LOSSES:
        raise InputError(f"--loss takes {', '.join(LOSSES)}, got {loss!r}")
    asked = FinetuneSettings(
        loss=cast(Any, loss), eps=parse_eps(eps), epochs=epochs, lr=lr, temperature=_temperature(temperature),
        ramp=_ramp(ramp), weight=weight, sparsity=sparsity, sigma=sigma, consistency=consistency,
        max_norm=_norms(max_norm), optimizer=optimizer, schedule=schedule,
        accumulate=accumulate, ema=ema, amp=cast(Any, amp), channels_last=channels_last,
    )  # fmt: skip
    if not 0 < mix_ratio < 1:
        raise InputError(f"--mix-ratio is a share of a batch between 0 and 1, got {mix_ratio}")
    augmentation = Augmentation(crop, randaugment, cutout) if augment else Augmentation("none")
    with torchrun() as processes:
        source = resolve(model)
        loaded = load_model(model, checkpoint, no_pretrained, model_args)
        path = out or default_name(str(source), "finetuned")
        check_out(path, [Path(source), *([checkpoint] if checkpoint else [])], loaded, force)
        unfinished = path.with_name(f"{path.name}.checkpoint")
        asked.check(loaded)
        images = open_images(data, loaded, limit=limit)
        move_to(loaded, device)

        total = None if images.length is None else images.length * epochs
        with progress("training", total) as update:
            seen = 0

            def count_up(more: int) -> None:
                nonlocal seen
                seen += more
                update(seen, total)

            others = 0 if mix is None else round(batch_size * mix_ratio)
            own = Batches(images, loaded, batch_size - others, augmentation, count_up)
            batches: Batches | Mixed = own
            if mix is not None:
                batches = Mixed(own, Batches(open_images(mix, loaded), loaded, others, augmentation))
            shown = open_images(data, loaded, limit=min(limit or _SHOWN, _SHOWN))
            before = _accuracy(loaded, shown, processes)
            try:
                origin: dict[str, Any] = {"--data": data, "--limit": limit, "--batch-size": batch_size, "--mix": mix}
                origin |= {"--mix-ratio": mix_ratio if mix else None}
                origin |= {"--augment": augment, "--crop": crop, "--randaugment": randaugment, "--cutout": cutout}
                wanted = {field.name: getattr(asked, field.name) for field in fields(asked)}
                train(loaded, batches, origin=origin, checkpoint=unfinished, progress=_say_epoch, **wanted)
            except KeyboardInterrupt as error:
                kept = f"the same command goes on from {unfinished}" if unfinished.exists() else "no epoch was finished"
                raise Interrupted(f"interrupted; {kept}") from error
        after = _accuracy(loaded, shown, processes)
        count = seen // epochs if images.length is None else images.length
        if processes.first:
            with busy(f"writing {path}"):
                save(
                    loaded, path, facts={"loss": loss, "eps": asked.eps, "epochs": epochs, "images": count}, force=force
                )
            unfinished.unlink(missing_ok=True)
        method = f" --method smoothing --sigma {sigma:g}" if sigma else ""
        print_facts(
            [
                ("model", str(source)),
                ("images", f"{count} of {data}"),
                ("clean accuracy before", share(*before)),
                ("clean accuracy after", f"{share(*after)}, on images that it was trained on"),
                ("written", str(path)),
                ("certified", f"nothing yet; next: lipcert certify {path} --data ... --eps {eps}{method}"),
            ]
        )


def _temperature(text: str) -> float | tuple[float, float]:
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2:
        raise InputError(f"--temperature takes a number, or the first and the last such as 0.2,0.02, got {text!r}")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _ramp(text: str | None) -> tuple[float, float, float] | None:
    if text is None:
        return None
    try:
        first, last, share = (float(number) for number in text.split(","))
    except ValueError as error:
        raise InputError(f"--ramp takes three numbers such as 0.1,2,0.5, got {text!r}") from error
    return first, last, share


def _norms(texts: list[str] | None) -> MaxNorm | None:
    """One number for all layers, or numbers by patterns; a number alone is that of the layers without a pattern."""
    norms: dict[str, float] = {}
    for text in texts or []:
        pattern, _, number = text.rpartition("=")
        try:
            norms[pattern or "*"] = float(number)
        except ValueError as error:
            raise InputError(
                f"--max-norm takes a number, or PATTERN=number such as '*.fc1=1.2', got {text!r}"
            ) from error
    if "*" in norms:
        norms = {"*": norms["*"], **norms}
    return norms.get("*") if len(norms) <= 1 and "*" in norms else norms or None


def _accuracy(model: Model, images: Images, processes: Processes) -> tuple[int, int]:
    """How many images the model gets right, and how many there are."""
    part = slice(processes.rank, None, processes.count)
    right = seen = 0
    with processes.together(), torch.no_grad():
        for batch in images.batches(_EVALUATED * processes.count):
            predicted = model(batch.images[part].to(model.device, model.dtype)).argmax(1).cpu()
            right += int((predicted == cast(Tensor, batch.labels)[part]).sum())
            seen += len(batch)
    return sum(processes.gather(right)), seen


def _say_epoch(epoch: Epoch) -> None:
    line = f"epoch {epoch.number} of {epoch.epochs}: loss {epoch.loss:.4f}, accuracy {epoch.accuracy:.3f}"
    if epoch.bound is not None:
        line += f", Lipschitz bound {epoch.bound:.4g} certified, {epoch.estimate:.4g} estimated in training"
    say(f"{line}, {epoch.seconds:.1f} s")
