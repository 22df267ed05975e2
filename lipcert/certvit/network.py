"""CertViT on a whole network: collects moments, solves every layer, replaces the weights, and reports the figures.

This is algorithm 3 of Gupta and Verma 2023 (arXiv 2302.10287) without its last step, which is :func:`lipcert.finetune`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipcert.bounds import Progress, lipschitz
from lipcert.certvit.blockwise import FAITHFUL, constrain_blockwise
from lipcert.certvit.images import EVERY, CalibrationImages, Loader, part
from lipcert.certvit.layers import Layer, choose
from lipcert.certvit.moments import Moments, evaluating, pooled, stream
from lipcert.certvit.parallel import Failure, Outcome, Task, solve_layers
from lipcert.certvit.relu import relus
from lipcert.certvit.report import ConstraintReport, LayerConstraint, NetworkFigures, log10_norms
from lipcert.certvit.solve import Solution
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.inputs.processes import Processes
from lipcert.model import Model, checked, outside_inference_mode
from lipcert.settings import ConstrainSettings, settings_of, takes
from lipcert.surgery import L2Attention

BASELINES = ("rescale", "clip")
LayerProgress = Callable[[str, int, int | None], None]
Weights = dict[str, Tensor]

_BLOCKS = 4  # the number of mini-batches of the faithful engine; each is a constraint
_GENERALISES = 1.5  # held-out errors above this multiple of the allowed error are reported


@takes(ConstrainSettings)
@outside_inference_mode
def constrain(
    model: Model | nn.Module,
    loader: Loader,
    error: float = 1e-2,
    *,
    held_out: Loader | None = None,
    origin: Mapping[str, Any] | None = None,
    progress: LayerProgress | None = None,
    **settings: Any,
) -> Model:
    """Lowers the norms of the Linear and Conv2d layers of a model, and keeps their outputs on images.

    The weight of each layer is replaced by the weight with the smallest ``measure`` whose outputs, for the inputs of
    the layer in the original network, have a relative error of at most ``error``; see
    :func:`lipcert.certvit.constrain_matrix`. A convolution is the matrix that multiplies its patches. The errors of the
    layers add up in the network, so check accuracy and agreement. ``model.constraint`` holds a
    :class:`ConstraintReport`, and ``model.recipe`` gains a step. A layer that cannot be solved is reported and stays
    unchanged. After an error the whole model is unchanged.

    With torch.distributed initialised, each process passes its own share of the images, and all get the same weights.

    Args:
        model: from :func:`lipcert.load`, or a module built by timm.
        loader: images in [0, 1], with labels or without: a tensor (N, C, H, W), a pair of it and labels (N,), or an
            iterable of such batches that can be iterated several times, in the same order if ``held_out`` is None.
        error: the relative output error allowed in each layer, above 0 and below 1.
        held_out: images for errors, accuracy and agreement, as ``loader``; None holds out every fifth image.
        origin: a description of the images, as values for JSON; the recipe records it.
        progress: called as ``progress(what, done, total)``, with total None if unknown.
        **settings: the other fields of :class:`lipcert.certvit.ConstrainSettings`.

    Returns:
        The model.

    Raises:
        InputError: an option, a layer name, a device, images or labels are not valid; activations are NaN; all images
            have one colour; or no layer could be solved.
    """
    started = time.perf_counter()
    asked, model = settings_of(ConstrainSettings, error, **settings), checked(model)
    measure, engine, error = asked.measure, asked.engine, asked.error
    report = progress or (lambda what, done, total: None)
    calibration, held = part(model, loader, held_out)
    chosen, untouched = choose(model, asked.layers)
    if asked.keep == "activations":
        behind = relus(model, {p: x.module for p, x in chosen.items() if not isinstance(x.module, L2Attention)})
        for path, relu in behind.items():
            chosen[path].relu = relu
    notes: list[str] = []
    bound_before = _log10_bound(model, lambda *step: report(f"{step[2]} before", *step[:2]), notes)

    solve = {"workers": asked.workers, "devices": asked.devices, "resume_dir": asked.resume_dir}
    entries: list[LayerConstraint] = []
    variants: dict[str, Weights] = {}
    count = _BLOCKS if engine == "faithful" else 1
    for blocks, held_moments in _moments(model, chosen, calibration, held, asked.max_bytes, count, report):
        outcomes = _outcomes(chosen, blocks, asked, solve, report)
        for path, parts in blocks.items():
            results = {method: outcomes[_task_name(path, method)] for method in (measure, *BASELINES)}
            held_part = held_moments.get(path)
            entry, weights = _entry(path, chosen[path], pooled(parts), held_part, results, asked)
            entries.append(entry)
            for method, weight in weights.items():
                variants.setdefault(method, {})[path] = weight
    _require_success(entries)

    before = {path: layer.weight.detach().clone() for path, layer in chosen.items()}
    try:
        accuracy, agreement = _compare(model, held, chosen, {"before": before, **variants}, report)
        _put(chosen, variants[measure])
        bound_after = _log10_bound(model, lambda *step: report(f"{step[2]} after", *step[:2]), [])
    except BaseException:
        _put(chosen, before)
        raise

    def figures(name: str, norms: Mapping[str, float], bound: float | None = None) -> NetworkFigures:
        return NetworkFigures(log10_norms(norms), bound, accuracy.get(name), agreement.get(name))

    counts = _sums([calibration.count, held.count])
    model.constraint = ConstraintReport(
        measure=measure,
        engine=engine,
        error=error,
        keep=asked.keep,
        images=counts[0],
        held_out=counts[1],
        layers=tuple(entries),
        before=figures("before", {entry.path: entry.norm_before for entry in entries}, bound_before),
        after=figures(measure, {entry.path: entry.norm_after for entry in entries}, bound_after),
        baselines={name: figures(name, {entry.path: entry.baselines[name] for entry in entries}) for name in BASELINES},
        untouched=tuple(untouched),
        notes=(*notes, *_notes(model, chosen, entries, counts[1], asked.keep)),
        seconds=time.perf_counter() - started,
    )
    step = {"step": "constrain", **asked.described(), "layers": sorted(chosen)}
    model.recipe.append({**step, "images": counts[0], "held_out": counts[1], **(origin or {})})
    return model


def _log10_bound(model: Model, progress: Progress, notes: list[str]) -> float | None:
    try:
        with evaluating(model):
            return lipschitz(model, progress=progress).log10
    except UnsupportedOperation as error:
        notes.append(f"no bound of the whole network: {error}")
        return None


def _moments(
    model: Model,
    chosen: Mapping[str, Layer],
    calibration: CalibrationImages,
    held: CalibrationImages,
    max_bytes: int,
    count: int,
    report: LayerProgress,
) -> Iterator[tuple[dict[str, list[Moments]], dict[str, Moments]]]:
    """For each group of layers, the moments on calibration images and on held-out images, if there are any.

    The calibration images are divided into ``count`` parts, each with its own moments.
    """
    modules = {path: layer.module for path, layer in chosen.items()}
    sampled = [path for path, layer in chosen.items() if layer.relu is not None]

    def collect(images: Iterable[Tensor], what: str) -> Iterator[dict[str, Moments]]:
        def seen(number: int, passes: int, count: int) -> None:
            report(f"{what}, pass {number} of {passes}" if passes > 1 else what, count, None)

        return stream(model, images, modules, max_bytes=max_bytes // count, progress=seen, sampled=sampled)

    held_groups: Iterator[dict[str, Moments]] | None = None
    dealt = [_Dealt(calibration, first, count) for first in range(count)]
    for groups in zip(*(collect(images, "calibration images") for images in dealt), strict=True):
        if held_groups is None:
            empty = held.share == "held-out" and not _sums([calibration.left_out])[0]
            held_groups = itertools.repeat({}) if empty else collect(held, "held-out images")
        yield {path: [group[path] for group in groups] for path in groups[0]}, next(held_groups)


@dataclass(frozen=True)
class _Dealt:
    """Every ``count``-th image of each batch, from index ``first`` on."""

    images: CalibrationImages
    first: int
    count: int

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.images:
            if len(batch) > self.first:
                yield batch[self.first :: self.count]


def _task_name(path: str, method: str) -> str:
    return f"{path} {method}"


def _outcomes(
    chosen: Mapping[str, Layer],
    blocks: Mapping[str, list[Moments]],
    asked: ConstrainSettings,
    solve: Mapping[str, object],
    report: LayerProgress,
) -> dict[str, Outcome]:
    methods = tuple(dict.fromkeys((asked.measure, *BASELINES)))
    finished = itertools.count(1)

    def task(path: str, parts: list[Moments], method: str) -> Task:
        name, weight, own = _task_name(path, method), chosen[path].weight.detach().cpu(), method == asked.measure
        relu = chosen[path].relu if own else None
        kept = parts if relu is not None else [replace(part, sample=None) for part in parts]
        options: dict[str, Any] = {} if relu is None else {"relu": relu}
        options |= {"error": _error(asked, pooled(kept), weight), **(asked.solver_options() if own else {})}
        if asked.engine == "faithful" and own:
            return Task(name, weight, kept, options, constrain_blockwise)
        return Task(name, weight, pooled(kept), {**options, "measure": method})

    return solve_layers(
        (task(path, parts, method) for path, parts in blocks.items() for method in methods),
        progress=lambda name, outcome: report("solving layers", next(finished), len(methods) * len(blocks)),
        **solve,  # type: ignore[arg-type]
    )


def _error(asked: ConstrainSettings, moments: Moments, weight: Tensor) -> float:
    """The allowed relative error of a layer; with η it is that of Σ_t ‖W x_t − y_t‖² = T η over its T rows."""
    energy = moments.energy(weight)
    if asked.eta is None or not energy:
        return asked.error
    return math.sqrt(asked.eta * moments.rows / energy)


def _entry(
    path: str,
    layer: Layer,
    moments: Moments,
    held: Moments | None,
    results: Mapping[str, Outcome],
    asked: ConstrainSettings,
) -> tuple[LayerConstraint, Weights]:
    """The figures of a layer, and its weight by each method; the original weight if the method failed."""
    before = layer.weight.detach().clone()
    weights = {
        method: result.weight.to(before) if isinstance(result, Solution) else before
        for method, result in results.items()
    }
    norm_before = layer.norm(before)
    norms = {method: norm_before if weight is before else layer.norm(weight) for method, weight in weights.items()}
    chosen, weight = results[asked.measure], weights[asked.measure]

    def away(of: Moments | None) -> float | None:
        if of is None or isinstance(chosen, Failure):
            return None
        new, old = weight.cpu(), before.cpu()
        if layer.relu is not None and of.sample is not None:
            return layer.relu.relative_error(new, old, of.sample)
        return of.relative_error(new, old)

    entry = LayerConstraint(
        path=path,
        norm_before=norm_before,
        norm_after=norms[asked.measure],
        baselines={name: norms[name] for name in BASELINES},
        error_asked=_error(asked, moments, before.cpu()),
        error_reached=_number(away(moments)),
        error_held_out=_number(away(held)),
        sparsity=float((weight == 0).double().mean()),
        iterations=chosen.iterations if isinstance(chosen, Solution) else 0,
        gap=chosen.gap if isinstance(chosen, Solution) else None,
        seconds=chosen.seconds if isinstance(chosen, Solution) else 0.0,
        rows=moments.rows if layer.relu is None or moments.sample is None else moments.sample.shape[1],
        width=layer.module.head_dim if isinstance(layer.module, L2Attention) else moments.width,
        rank=moments.rank,
        status=chosen.status if isinstance(chosen, Solution) else "failed",
        shortfalls=(),
        behind=None if layer.relu is None else "relu",
    )
    return replace(entry, shortfalls=tuple(_shortfalls(entry, results, before.dtype))), weights


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _shortfalls(entry: LayerConstraint, results: Mapping[str, Outcome], dtype: torch.dtype) -> Iterator[str]:
    path, asked = entry.path, entry.error_asked
    faithful = any(isinstance(result, Solution) and result.measure == FAITHFUL for result in results.values())
    for method, result in results.items():
        if isinstance(result, Failure):
            yield f"{path}: unchanged ({method}): {result.message}"
    if entry.status == "rounding":
        yield f"{path}: unchanged: its dtype {dtype} cannot express an error of {asked:g}; allow a larger one"
    elif entry.status == "iteration limit" and faithful:
        yield f"{path}: stopped at the number of iterations of the authors' code"
    elif entry.status == "iteration limit":
        yield f"{path}: stopped at the iteration limit, at most {entry.gap or 1:.1%} above the smallest possible norm"
    if entry.error_reached is not None and entry.error_reached > asked * (1 + 1e-9):
        why = "after an inexact projection" if faithful else f"rounded to {dtype}"
        yield f"{path}: {why} its error is {entry.error_reached:.3g}, above {asked:g}"
    if entry.error_held_out is not None and entry.error_held_out > _GENERALISES * asked:
        yield f"{path}: its error on held-out images is {entry.error_held_out:.3g}, above {asked:g}; use more images"
    if entry.norm_after > entry.norm_before * (1 + 1e-4):
        yield f"{path}: its norm rose from {entry.norm_before:.4g} to {entry.norm_after:.4g}"


def _require_success(entries: Sequence[LayerConstraint]) -> None:
    if all(entry.status == "failed" for entry in entries):
        raise InputError(f"none of {len(entries)} layers could be constrained; {entries[0].shortfalls[0]}")


def _put(chosen: Mapping[str, Layer], weights: Weights) -> None:
    with torch.no_grad():
        for path, weight in weights.items():
            chosen[path].weight.copy_(weight)


def _compare(
    model: Model,
    held: CalibrationImages,
    chosen: Mapping[str, Layer],
    variants: Mapping[str, Weights],
    report: LayerProgress,
) -> tuple[dict[str, float], dict[str, float]]:
    """Accuracy and agreement with the first variant on held-out images, by variant; the last stays in the model."""
    right, kept = dict.fromkeys(variants, 0), dict.fromkeys(variants, 0)
    images = labelled = 0
    with Processes.connected().together(), evaluating(model), torch.no_grad():
        for batch, labels in held.pairs():
            top: dict[str, Tensor] = {}
            for name, weights in variants.items():
                _put(chosen, weights)
                top[name] = _top(model(batch), name, labels)
            first = next(iter(top.values()))
            for name, found in top.items():
                kept[name] += int((found == first).sum())
                right[name] += 0 if labels is None else int((found == labels).sum())
            images += len(batch)
            labelled += 0 if labels is None else len(batch)
            report("comparing on held-out images", images, None)
    images, labelled, *counts = _sums([images, labelled, *right.values(), *kept.values()])
    if not images:
        return {}, {}
    shares = [count / images for count in counts]
    agreement = dict(zip(variants, shares[len(variants) :], strict=True))
    return dict(zip(variants, shares, strict=False)) if labelled == images else {}, agreement


def _top(logits: Tensor, name: str, labels: Tensor | None) -> Tensor:
    if not torch.isfinite(logits).all():
        raise InputError(f"the logits are NaN or infinite with the weights of {name}; check the model and the images")
    strange = [] if labels is None else labels[(labels < 0) | (labels >= logits.shape[1])].tolist()
    if strange:
        raise InputError(f"there is a label {strange[0]}, and the model has the classes 0 to {logits.shape[1] - 1}")
    return logits.argmax(1).cpu()


def _sums(numbers: list[int]) -> list[int]:
    """The sums over all processes."""
    return [sum(parts) for parts in zip(*Processes.connected().gather(numbers), strict=True)]


def _notes(
    model: Model, chosen: Mapping[str, Layer], entries: Sequence[LayerConstraint], held_out: int, keep: str
) -> Iterator[str]:
    if not held_out:
        yield (
            f"no held-out images, so the errors on other images are unknown; pass at least {EVERY} images, or held_out="
        )
    few = [entry for entry in entries if entry.rows < entry.width]
    if few:
        least = min(few, key=lambda entry: entry.rows / entry.width)
        yield (
            f"{len(few)} of {len(entries)} layers had too few inputs, {least.path} the fewest: {least.rows} of "
            f"{least.width} entries each; use more images"
        )
    flat = [entry for entry in entries if entry.rank < entry.width]
    if flat:
        least = min(flat, key=lambda entry: entry.rank / entry.width)
        yield (
            f"the inputs of {len(flat)} of {len(entries)} layers do not span all dimensions, those of {least.path} "
            f"{least.rank} of {least.width}; weights may change freely in the others: check held-out errors"
        )
    if any(layer.relu is not None for layer in chosen.values()):
        behind = sum(layer.relu is not None for layer in chosen.values())
        yield (
            f"{behind} of {len(entries)} layers have a ReLU after them; their errors are those after the ReLU, but the "
            "errors of the baselines are not"
        )
    elif keep == "activations":
        yield "no layer has a ReLU directly after it, so keeping activations is keeping outputs"
    queries = [f"{path}.q".lstrip(".") for path, m in model.net.named_modules() if isinstance(m, L2Attention)]
    if any(path in chosen for path in queries):
        yield (
            "the weight of q in L2 attention also forms its values, and its change there is not part of its output "
            "error: check the agreement"
        )
    flattened = [path for path, layer in chosen.items() if getattr(layer.module, "padding_mode", "zeros") != "zeros"]
    if flattened:
        yield f"norms of {', '.join(flattened)} are those of the flattened kernel, because their padding is not zeros"
