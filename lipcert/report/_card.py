"""A model card: Markdown with the metadata that model hubs read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from lipcert.errors import InputError
from lipcert.report._build import Eps, facts, radii_of_interest, sentence
from lipcert.report._document import Block, Code, Heading, Items, Table, Text, to_markdown
from lipcert.report._words import promises
from lipcert.results import Run

_TASK = {"task_type": "image-classification", "task_name": "Image classification"}


def model_card(runs: Sequence[Run], named: Eps = ()) -> ModelCard:
    """The card of one model.

    Args:
        runs: results of the same weights, on one or several sets of images or by several methods.
        named: ε at which the card gives figures; by default those of the runs.

    Returns:
        The card; ``str(card)`` is the file.

    Raises:
        InputError: the results are of more than one model.
    """
    if len({run.weights_hash for run in runs}) > 1:
        names = ", ".join(run.name for run in runs)
        raise InputError(f"a card describes one model, and these results are of different weights: {names}")
    eps = radii_of_interest(runs, named)
    data = ModelCardData(
        library_name="lipcert",
        pipeline_tag="image-classification",
        tags=["timm", "image-classification", "adversarial-robustness", "certified-robustness", "lipschitz"],
        model_name=runs[0].name,
        eval_results=[result for run in runs for result in _results(run, eps)],
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{to_markdown(_body(runs, eps))}")


def _body(runs: Sequence[Run], eps: Eps) -> list[Block]:
    blocks: list[Block] = [Heading(1, runs[0].name)]
    blocks.append(Text(f"An image classifier, {runs[0].architecture}, with certificates against ℓ2 perturbations."))
    for run in runs:
        blocks += [Heading(2, f"Certificates{f': {run.name}' if len(runs) > 1 else ''}"), Text(sentence(run, eps))]
        about = [("data", _dataset(run)["dataset_name"]), ("preprocessing", run.preprocessing)]
        blocks.append(Table(("", ""), [*about, *facts(run, eps)], numbers=False))
    blocks += [Heading(2, "What these figures promise"), Items(promises(runs)), Heading(2, "Certify it again")]
    use = "import lipcert\n\nmodel = lipcert.load('model.safetensors')\n"
    smoothing = "".join(f", {key}={value}" for key, value in runs[0].noise.items())
    method = f', method="smoothing"{smoothing}' if runs[0].smoothed else ""
    use += f"result = lipcert.certify(model, images, labels, eps={runs[0].eps_typed}{method})  # images in [0, 1]"
    return [*blocks, Code(use)]


def _results(run: Run, eps: Eps) -> list[EvalResult]:
    common: dict[str, Any] = {**_TASK, **_dataset(run)}
    known = {"images": len(run), "dtype": str(run.summary.get("dtype", "unknown")), "holds_for": run.holds_for}
    found = []

    def add(kind: str, name: str, part: int, **arguments: Any) -> None:
        value = round(part / len(run), 6)
        arguments = {**known, **arguments}
        found.append(
            EvalResult(**common, metric_type=kind, metric_name=name, metric_value=value, metric_args=arguments)
        )

    if run.labelled:
        add("accuracy", "Share whose most drawn class is right" if run.smoothed else "Clean accuracy", run.correct)
    of = ", of the smoothed classifier" if run.smoothed else ""
    for value, typed in eps:
        ball = {"norm": "l2", "eps": value}
        if run.attacked:
            add(
                "adversarial_accuracy",
                f"{run.attack_name} accuracy at ε = {typed}",
                run.surviving_at(value),
                **ball,
                rigor="estimate",
                attack=run.attack,
            )
        add(
            "certified_accuracy" if run.labelled else "certified_share",
            f"Certified {'accuracy' if run.labelled else 'share'} at ε = {typed}{of}",
            run.certified_at(value),
            **ball,
            rigor="probabilistic" if run.delta else "deterministic",
            **({"delta": run.delta} if run.delta else {}),
            method=str(run.summary.get("method", "unknown")),
        )
    return found


def _dataset(run: Run) -> dict[str, str]:
    """The data set as hubs name it; of a path on this machine only the last part."""
    spec = str(run.summary.get("data", {}).get("spec", "unknown"))
    if spec == "bundled":
        return {"dataset_type": "digits", "dataset_name": "Digits 8×8, the images bundled with lipcert"}
    if os.path.isabs(spec):
        name = os.path.basename(spec.rstrip(os.sep))
        return {"dataset_type": name, "dataset_name": name}
    place, _, split = spec.partition(":")
    name = place.partition("/")[2] or place
    return {"dataset_type": name, "dataset_name": name, **({"dataset_split": split} if split else {})}
