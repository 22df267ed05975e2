"""Model cards: Markdown with the metadata that model hubs read."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from lipcert.denoisers import NAMES
from lipcert.errors import InputError
from lipcert.inputs.preprocessing import Preprocessing
from lipcert.report._artifact import added, artifact_of, by_model, command_of, shipped, title
from lipcert.report._build import Eps, facts, radii_of_interest, sentence
from lipcert.report._markdown import MARK, code, escaped, heading, items, table
from lipcert.report._words import listed, promises, right
from lipcert.results import Run
from lipcert.settings import CertifySettings

_TASK = {"task_type": "image-classification", "task_name": "Image classification"}


def model_card(
    runs: Sequence[Run], named: Eps = (), *, license: str | None = None, base_model: str | None = None
) -> ModelCard:
    """The card of one model.

    Args:
        runs: results of the same weights, on one or several data sets or with several methods.
        named: ε at which the card shows results; by default those of the runs.
        license: the model's licence: an identifier that hubs know, such as ``apache-2.0``.
        base_model: hub id of the original model; by default the hub model that was loaded, if any.

    Returns:
        The card; ``str(card)`` is the file.

    Raises:
        InputError: the results belong to more than one model, or are not about perturbations of the pixels.
    """
    if len(by_model(runs)) > 1:
        names = ", ".join(run.name for run in runs)
        raise InputError(f"a card describes one model, but these results are of different ones: {names}")
    for run in runs:
        if run.inside:
            raise InputError(
                f"a card is about perturbations of the pixels, and {run.name} is about {run.perturbed}: "
                "certify without at=, or report without --card"
            )
    eps = radii_of_interest(runs, named)
    network, artifact = runs[0].network, artifact_of(runs[0])
    hub, _, hub_id = network.partition(":")
    data = ModelCardData(
        library_name="lipcert",
        pipeline_tag="image-classification",
        license="-".join((license or "").lower().split()) or ("apache-2.0" if artifact in shipped() else None),
        base_model=base_model or (hub_id if hub == "hf-hub" else None),
        datasets=_hub_data(runs[0]) or None,
        tags=["timm", "image-classification", "adversarial-robustness", "certified-robustness", "lipschitz"],
        model_name=title(runs[0]),
        eval_results=[result for run in runs if run.complete for result in _results(run, eps)] or None,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_body(runs, eps, data, artifact)}\n")


def _hub_data(run: Run) -> list[str]:
    """Hub names of the data sets used for surgery, training and certification."""
    steps = [step.get("data") for step in run.summary["model"]["recipe"]]
    specs = [str(spec).partition(":")[0] for spec in (*steps, run.summary.get("data", {}).get("spec"))]
    ids = (_HUB_IDS.get(spec) or (spec.partition("/")[2] if spec.startswith("hfds/") else "") for spec in specs)
    return list(dict.fromkeys(filter(None, ids)))


def _body(runs: Sequence[Run], eps: Eps, data: ModelCardData, artifact: Path | None) -> str:
    first = runs[0]
    parts = [heading(1, title(first))]
    steps = f" after {listed([name for name, _ in first.steps])}" if first.steps else ""
    parts.append(escaped(f"An image classifier, {first.network}{steps}, with certificates against ℓ2 perturbations."))
    for run in runs:
        parts += [heading(2, f"Certificates{f': {run.name}' if len(runs) > 1 else ''}"), escaped(sentence(run, eps))]
        about_data = [("data", _dataset(run)["dataset_name"]), ("preprocessing", run.preprocessing)]
        parts.append(table(("", ""), [*about_data, *facts(run, eps)], numbers=False))
    origin = [
        ("weights", f"{f'{artifact.name}; ' if artifact else ''}SHA-256 of the tensors: {first.weights_hash or '–'}"),
        ("architecture", first.architecture.partition(" → ")[0]),
        ("base model", str(data.base_model or "not recorded")),
        *first.steps,
        ("licence", str(data.license or "not stated")),
    ]
    parts += [heading(2, "The model"), table(("", ""), origin, numbers=False)]
    parts += [heading(2, "Use it"), code(_use(first, artifact))] if first.smoothed else []
    parts += [heading(2, "What these figures mean"), items(promises(runs)), heading(2, "Reproduce")]
    again = _command(first) if artifact is None or _in_python(first) else _snippet(first, artifact)
    return "\n\n".join([*parts, code(again), MARK])


def _in_python(run: Run) -> bool:
    return command_of(run) in ([], ["lipcert.certify"])


def _command(run: Run) -> str:
    """The command of a run, without folders of absolute paths, and with its σ; for a run in Python, the call."""
    if _in_python(run):
        return f"lipcert.certify(model, images, labels, {_settings(run)})  # the weights have the SHA-256 above"
    words = (re.sub(r"^(.*=|\w+/)?/(?:[^/]*/)*([^/]*)$", r"\1path/to/\2", word) for word in command_of(run))
    return re.sub(r"(--sigma[ =])auto\b", rf"\g<1>{run.summary.get('sigma')}", shlex.join(words))


def _use(run: Run, artifact: Path | None) -> str:
    """Python code that loads a smoothed classifier and predicts."""
    return "\n".join(
        [
            *_loading(run, artifact),
            "classes = smoothed.predict(images)  # of pixels in [0, 1], shape (N, C, H, W); -1 where it abstains",
            'lipcert.save(smoothed, "smoothed.safetensors")  # which lipcert predict and lipcert certify take',
        ]
    )


def _snippet(run: Run, artifact: Path) -> str:
    """Python code that loads the model and certifies some images again."""
    spec = str(run.summary.get("data", {}).get("spec"))
    images = None if spec == "bundled" else f"path/to/{os.path.basename(spec)}" if os.path.isabs(spec) else spec
    certified, few = "smoothed" if run.smoothed else "model", min(8, len(run))
    lines = _loading(run, artifact, "from lipcert.inputs.data import open_images")
    lines += [f"batch = next(open_images({images!r}, model, limit={few}).batches({few}))"]
    lines += [f"result = lipcert.certify({certified}, batch.images, batch.labels, {_settings(run)})", "print(result)"]
    return "\n".join(lines)


def _loading(run: Run, artifact: Path | None, *imports: str) -> list[str]:
    """Python code that loads the certified model; names in capitals are the user's."""
    recorded, about = run.summary.get("preprocessing") or {}, run.summary["model"]
    preprocessing, denoiser = Preprocessing.of_summary(recorded), run.denoiser
    pixels = {name: value for name, value in vars(preprocessing).items() if value is not None}
    arguments: dict[str, Any] = {}
    if artifact is not None:
        name, (denoiser, pixels) = repr(shipped().get(artifact, artifact.name)), added(run, artifact)
    elif any(step["step"] != "denoise" for step in about["recipe"]):
        name = "'ARTIFACT'"
    else:
        source, stated = about.get("source"), preprocessing.stated((recorded.get("input_size") or [3])[0])
        name = repr(run.network) if source else "MODULE"
        arguments = {**({"checkpoint": "WEIGHTS", **source.get("arguments", {})} if source else {}), **stated}
        pixels = {key: value for key, value in pixels.items() if key not in stated}
    lines = [f"model = lipcert.load({', '.join([name, *_typed(arguments)])})"]
    if pixels:
        imports += ("from lipcert.inputs.preprocessing import Preprocessing",)
        lines.append(f"Preprocessing({', '.join(_typed(pixels))}).apply(model)")
    if run.smoothed:
        front = "" if denoiser is None else f", denoiser={repr(denoiser) if denoiser in NAMES else 'DENOISER'}"
        lines.append(f"smoothed = lipcert.SmoothedClassifier(model, sigma={run.noise['sigma']!r}{front})")
    return ["import lipcert", *imports, "", *lines]


def _typed(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of a call, with the numbers of float32 as they are written, not as float64 shows them."""

    def short(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(short, value))
        single = np.float32(value) if isinstance(value, float) else value
        return float(str(single)) if single == value and isinstance(value, float) else value

    return [f"{name}={short(value)!r}" for name, value in arguments.items()]


def _settings(run: Run) -> str:
    """The arguments of ``lipcert.certify`` after images and labels."""
    smoothing = "".join(f", {key}={value!r}" for key, value in run.noise.items())
    eps = ",".join(typed for _, typed in run.every_eps)
    return f'eps="{eps}"' + (f', method="smoothing"{smoothing}' if run.smoothed else _options(run))


def _options(run: Run) -> str:
    """The options of a certificate of the network itself that differ from the defaults."""
    standard = CertifySettings(1.0).described()
    named = ("method", "dtype", "rigor", "time", "delta", "seed")
    chosen = {key: run.summary[key] for key in named if run.summary.get(key, standard[key]) != standard[key]}
    return "".join(f", {key}={value!r}" for key, value in chosen.items())


def _results(run: Run, eps: Eps) -> list[EvalResult]:
    """The metrics of a finished run; for a sample, their names state the number of images and the interval."""
    details = {"images": len(run), "dtype": str(run.summary.get("dtype", "unknown")), "holds_for": run.holds_for}
    total = run.summary["data"].get("images", len(run)) - len(run.summary["data"].get("removed") or ())
    about: dict[str, Any] = {"rigor": "probabilistic", "delta": run.delta} if run.delta else {"rigor": "deterministic"}
    about |= {"method": str(run.summary.get("method", "unknown")), **run.words}
    common: dict[str, Any] = {**_TASK, **_dataset(run)}
    kind, word = ("certified_accuracy", "accuracy") if run.labelled else ("certified_share", "share")
    of = ", of the smoothed classifier" if run.smoothed else ""
    of_some = f", {{}} of {len(run)} images of {total:,}, 95 % CI {{}}"
    found: list[tuple[str, str, int, dict[str, Any]]] = []
    if run.labelled:
        found.append(("accuracy", right(run).capitalize(), run.correct, {}))
    for value, typed in eps:
        ball = {"norm": "l2", "eps": value}
        if run.attacked:
            attack = {**ball, "rigor": "estimate", "attack": run.attack}
            name = f"{run.attack_name} accuracy at ε = {typed}"
            found.append(("adversarial_accuracy", name, run.surviving_at(value), attack))
        found.append((kind, f"Certified {word} at ε = {typed}{of}", run.certified_at(value), {**ball, **about}))
    return [
        EvalResult(
            **common,
            metric_type=kind,
            metric_name=name + (of_some.format(part, run.interval(part)) if len(run) < total else ""),
            metric_value=round(part / len(run), 6),
            metric_args={**details, **more},
        )
        for kind, name, part, more in found
    ]


# Hub ids of the data sets that torchvision has; a folder of one of these names is a split.
_HUB_IDS = {
    "torch/cifar10": "uoft-cs/cifar10",
    "torch/cifar100": "uoft-cs/cifar100",
    "torch/mnist": "ylecun/mnist",
    "torch/svhn": "ufldl-stanford/svhn",
}
_SPLITS = ("train", "val", "validation", "test")


def _dataset(run: Run) -> dict[str, str]:
    """The data set's hub id; for a local path its last part, and for a split the folder above it as the user typed it.

    Folders of an absolute path may be private, and cards are published.
    """
    spec = str(run.summary.get("data", {}).get("spec", "unknown"))
    if spec == "bundled":
        return {"dataset_type": "digits", "dataset_name": "Digits 8×8, the images bundled with lipcert"}
    if os.path.isabs(spec):
        words = command_of(run)
        typed = Path(words[words.index("--data") + 1]) if "--data" in words[:-1] else Path(spec)
        name, split = Path(spec).name.removesuffix(".tar"), str(run.summary["data"].get("split") or "")
        if typed.stem.lower() in _SPLITS and not typed.is_absolute() and typed.parent.name not in ("", ".."):
            name, split = typed.parent.name, typed.stem
    else:
        place, _, split = spec.partition(":")
        name = _HUB_IDS.get(place) or place.partition("/")[2] or place
    return {"dataset_type": name, "dataset_name": name, **({"dataset_split": split} if split else {})}
