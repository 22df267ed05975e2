"""CertViT on a whole network: collects moments, solves every layer, replaces the weights, and reports the figures.

This is algorithm 3 of Gupta and Verma 2023 (arXiv 2302.10287) without its last step, which is :func:`lipcert.finetune`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipcert.bounds import lipschitz
from lipcert.certvit.blockwise import constrain_blockwise
from lipcert.certvit.layers import Layer, choose
from lipcert.certvit.moments import Moments, grouping, pooled, stream
from lipcert.certvit.report import ConstraintReport, LayerConstraint, LayerFigures, NetworkFigures, log10_norms
from lipcert.certvit.solve import Solution, constrain_layer
from lipcert.certvit.tasks import Failure, Outcome, Task, solve_layers
from lipcert.errors import InputError, UnsupportedOperation
from lipcert.inputs.batches import EVERY, Loader, Share, shares
from lipcert.inputs.loading import number_of_classes
from lipcert.inputs.processes import Processes
from lipcert.model import Model, checked, evaluating, outside_inference_mode
from lipcert.settings import ConstrainSettings, settings_of, takes
from lipcert.surgery import L2Attention

BASELINES = ("rescale", "clip")
LayerProgress = Callable[[str, float, float | None], None]
Weights = dict[str, Tensor]

_MINI_BATCHES = 4  # of the faithful engine, unless the settings say otherwise; each is a constraint
_GAP_TO_REPORT = 0.01  # a larger one is reported
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
    until: float = math.inf,
    **settings: Any,
) -> Model:
    """Lowers the norms of the Linear and Conv2d layers of a model, and keeps their outputs on images.

    The weight of each layer is replaced by the weight with the smallest ``measure`` whose outputs, for the inputs of
    the layer in the original network, have a relative error of at most ``error``; see
    :func:`lipcert.certvit.constrain_layer`. A convolution is the matrix that multiplies its patches. The errors of the
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
        until: the time, as ``time.time()``, after which no layer is begun; those that are left stay unchanged.
        **settings: the other fields of :class:`lipcert.certvit.ConstrainSettings`.

    Returns:
        The model.

    Raises:
        InputError: an option, a layer name, a device, images or labels are not valid; activations are NaN; or no
            layer could be solved.
    """
    started = time.perf_counter()
    asked, model = settings_of(ConstrainSettings, error, **settings), checked(model)
    report = progress or (lambda what, done, total: None)
    return _Run(model, asked, loader, held_out, report, until).finish(started, origin or {})


class _Run:
    """One call of :func:`constrain`."""

    def __init__(
        self,
        model: Model,
        asked: ConstrainSettings,
        loader: Loader,
        held_out: Loader | None,
        report: LayerProgress,
        until: float,
    ):
        self.model, self.asked, self.report, self.until = model, asked, report, until
        self.faithful = asked.engine == "faithful"
        self.calibration, self.held_out = shares(model, loader, held_out, number_of_classes(model))
        self.chosen, self.untouched = choose(model, asked.layers)
        self.norms = {path: layer.shape.norm for path, layer in self.chosen.items()}
        with Processes.connected().together():  # so that no image stops the run after the layers are solved
            images = sum(len(batch) for batch in self.held_out)
        if held_out is not None and not _sums([images])[0]:
            raise InputError("there are no images in held_out; give at least one batch, or leave it out")
        self.notes: list[str] = []
        self.facts: dict[str, _Facts] = {}
        self.bound_before: float | None = None

    def finish(self, started: float, origin: Mapping[str, Any]) -> Model:
        """Solves the layers, compares the networks, and gives the model its new weights and the report."""
        model, asked, chosen = self.model, self.asked, self.chosen
        outcomes = self._solve()
        before = {path: layer.weight.detach().clone() for path, layer in chosen.items()}
        methods = tuple(dict.fromkeys((asked.lowered, *BASELINES)))
        variants: dict[str, Weights] = {method: dict(before) for method in methods}
        for path, outcome in outcomes.items():
            for method, solution in {} if isinstance(outcome, Failure) else outcome.items():
                variants[method][path] = solution.weight.to(before[path])
        after = variants[asked.lowered]
        errors = self._held_out_errors(before, after)
        entries = [self._entry(path, outcomes[path], before[path], errors.get(path)) for path in chosen]
        if all(entry.status == "failed" for entry in entries):
            raise InputError(f"none of {len(entries)} layers could be constrained; {entries[0].shortfalls[0]}")
        try:
            accuracy, agreement = self._compare({"before": before, **variants})
            _put(chosen, after)
            bound_after = self._log10_bound("after", [])
        except BaseException:
            _put(chosen, before)
            raise

        def figures(name: str, norms: Mapping[str, float], bound: float | None = None) -> NetworkFigures:
            return NetworkFigures(log10_norms(norms), bound, accuracy.get(name), agreement.get(name))

        images, held_out = _sums([self.calibration.count, self.held_out.count])
        norms = {name: {entry.path: entry.baselines[name] for entry in entries} for name in BASELINES}
        model.constraint = ConstraintReport(
            measure=asked.lowered,
            engine=asked.engine,
            error=asked.error if asked.eta is None else max(entry.error_asked for entry in entries),
            eta=asked.eta,
            images=images,
            held_out=held_out,
            layers=tuple(entries),
            before=figures("before", {entry.path: entry.norm_before for entry in entries}, self.bound_before),
            after=figures(asked.lowered, {entry.path: entry.norm_after for entry in entries}, bound_after),
            baselines={name: figures(name, norms[name]) for name in BASELINES},
            untouched=tuple(self.untouched),
            notes=(*self.notes, *_notes(model, chosen, entries, held_out)),
            seconds=time.perf_counter() - started,
        )
        step = {"step": "constrain", **asked.described(), "layers": sorted(chosen)}
        model.recipe.append({**step, "images": images, "held_out": held_out, **origin})
        return model

    def _solve(self) -> dict[str, Outcome]:
        costs, finished = {path: _cost(layer) for path, layer in self.chosen.items()}, list[str]()

        def solved(path: str) -> None:
            finished.append(path)
            done = math.fsum(costs[name] for name in finished) / math.fsum(costs.values())
            done = len(costs) * done if len(finished) < len(costs) else len(costs)
            self.report("solving layers", done, len(costs))

        memory = self.asked.max_bytes
        return solve_layers(self._tasks(), self.asked.workers, solved, device=self.model.device, max_bytes=memory)

    def _tasks(self) -> Iterator[Task]:
        asked, methods = self.asked, tuple(dict.fromkeys((self.asked.lowered, *BASELINES)))
        for group in self._moments((asked.mini_batches or _MINI_BATCHES) if self.faithful else 1):
            for path in list(group):
                parts, layer = group.pop(path), self.chosen[path]
                self.facts[path] = facts = _facts(parts, layer, asked)
                options: dict[str, Any] = {"error": facts.error, "norm": self.norms[path], **asked.solver_options()}
                weight = layer.weight.detach().cpu()
                if self.faithful:
                    yield Task(path, weight, parts, options, _constrain_faithfully, self.until)
                else:
                    yield Task(path, weight, parts[0], {**options, "measures": methods}, until=self.until)
                del parts
        self.bound_before = self._log10_bound("before", self.notes)

    def _moments(self, count: int) -> Iterator[dict[str, list[Moments]]]:
        """For each group of layers, the moments on the calibration images, divided into ``count`` parts."""
        modules = {path: layer.module for path, layer in self.chosen.items()}
        total = self.held_out.left_out  # 0 if it is unknown before the first pass

        def count_images(number: int, passes: int, images: int) -> None:
            what = f"calibration images, pass {number} of {passes}" if passes > 1 else "calibration images"
            self.report(what, images, total or self.calibration.count or None)

        parts = [_EveryNth(self.calibration, first, count) for first in range(count)]
        room = self.asked.max_bytes // count
        streams = [stream(self.model, images, modules, max_bytes=room, progress=count_images) for images in parts]
        for groups in zip(*streams, strict=True):
            yield {path: [group[path] for group in groups] for path in groups[0]}

    def _log10_bound(self, when: str, notes: list[str]) -> float | None:
        try:
            with evaluating(self.model):
                return lipschitz(self.model, progress=lambda *step: self.report(f"{step[2]} {when}", *step[:2])).log10
        except UnsupportedOperation as error:
            notes.append(f"no bound of the whole network: {error}")
            return None

    def _entry(self, path: str, outcome: Outcome, before: Tensor, held_out: float | None) -> LayerConstraint:
        """The figures of a layer, with its error on held-out images."""
        facts, found = self.facts[path], dict[str, Any]()
        if isinstance(outcome, Failure):
            norm = self.norms[path](before)
            found |= {"norm_before": norm, "norm_after": norm, "error_reached": None, "status": "failed"}
            found |= {"sparsity": float((before == 0).double().mean()), "rank": facts.width}
            baselines = dict.fromkeys(BASELINES, norm)
        else:
            solved = outcome[self.asked.lowered]
            found |= {name: getattr(solved, name) for name in LayerFigures.__dataclass_fields__}
            found |= {"error_reached": solved.error_reached if before.any() else None, "error_held_out": held_out}
            baselines = {name: outcome[name].norm_after for name in BASELINES}
        found |= {"path": path, "rows": facts.rows, "width": facts.width, "error_asked": facts.error}
        entry = LayerConstraint(**found, baselines=baselines)
        return replace(entry, shortfalls=tuple(self._shortfalls(entry, outcome, before.dtype)))

    def _shortfalls(self, entry: LayerConstraint, outcome: Outcome, dtype: torch.dtype) -> Iterator[str]:
        path, error = entry.path, entry.error_asked
        if isinstance(outcome, Failure):
            yield f"{path}: unchanged ({self.asked.lowered}): {outcome.message}"
        elif entry.status == "rounding":
            yield f"{path}: unchanged: its dtype {dtype} cannot express an error of {error:g}; allow a larger one"
        elif entry.status == "iteration limit" and self.faithful:
            yield f"{path}: stopped at the number of iterations of the authors' code"
        elif entry.status == "iteration limit" and (entry.gap is None or entry.gap > _GAP_TO_REPORT):
            yield f"{path}: stopped at the iteration limit, at most {entry.gap or 1:.1%} above the smallest norm"
        if entry.error_reached is not None and entry.error_reached > error * (1 + 1e-9):
            why = "after an inexact projection" if self.faithful else f"rounded to {dtype}"
            yield f"{path}: {why} its error is {entry.error_reached:.3g}, above {error:g}"
        if entry.norm_after > entry.norm_before * (1 + 1e-4):
            yield f"{path}: its norm rose from {entry.norm_before:.4g} to {entry.norm_after:.4g}"

    def _held_out_errors(self, before: Weights, after: Weights) -> dict[str, float]:
        """The relative output errors of the layers on held-out images, in the original network."""
        errors: dict[str, float] = {}
        modules = {path: layer.module for path, layer in self.chosen.items()}
        if not _sums([self.held_out.count])[0]:
            return errors

        def count(number: int, passes: int, images: int) -> None:
            self.report("errors on held-out images", images, self.held_out.count or None)

        for group in stream(self.model, self.held_out, modules, max_bytes=self.asked.max_bytes, progress=count):
            for path, moments in group.items():
                old, change = before[path].flatten(1), (after[path] - before[path]).flatten(1)
                if outputs := moments.energy(old):
                    errors[path] = math.sqrt(moments.energy(change) / outputs)
        return errors

    def _compare(self, variants: Mapping[str, Weights]) -> tuple[dict[str, float], dict[str, float]]:
        """Accuracy and agreement with the first variant on held-out images; the last variant stays in the model."""
        right, same = dict.fromkeys(variants, 0), dict.fromkeys(variants, 0)
        images = labelled = 0
        with Processes.connected().together(), evaluating(self.model), torch.no_grad():
            for batch, labels in self.held_out.pairs():
                top: dict[str, Tensor] = {}
                for name, weights in variants.items():
                    _put(self.chosen, weights)
                    top[name] = _top(self.model(batch), name)
                first = next(iter(top.values()))
                for name, classes in top.items():
                    same[name] += int((classes == first).sum())
                    right[name] += 0 if labels is None else int((classes == labels).sum())
                images += len(batch)
                labelled += 0 if labels is None else len(batch)
                self.report("comparing on held-out images", images, self.held_out.count or None)
        images, labelled, *counts = _sums([images, labelled, *right.values(), *same.values()])
        if not images:
            return {}, {}
        shares = [count / images for count in counts]
        agreement = dict(zip(variants, shares[len(variants) :], strict=True))
        return dict(zip(variants, shares, strict=False)) if labelled == images else {}, agreement


@dataclass(frozen=True)
class _EveryNth:
    """Every ``count``-th image of each batch, from index ``first`` on."""

    images: Share
    first: int
    count: int

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.images:
            if len(batch) > self.first:
                yield batch[self.first :: self.count]


class _Facts(NamedTuple):
    """Figures of the inputs of a layer for the report, and its allowed relative error."""

    rows: int
    width: int
    error: float


def _facts(parts: Sequence[Moments], layer: Layer, asked: ConstrainSettings) -> _Facts:
    """With η the error is that of Σ_t ‖W x_t − y_t‖² = T η over T rows."""
    rows, error = sum(part.rows for part in parts), asked.error
    if asked.eta is not None and (energy := sum(part.energy(layer.weight.detach().flatten(1)) for part in parts)):
        error = math.sqrt(asked.eta * rows / energy)
    width = layer.module.head_dim if isinstance(layer.module, L2Attention) else parts[0].width
    return _Facts(rows, width, error)


def _constrain_faithfully(
    weight: Tensor, parts: list[Moments], *, error: float, norm: Callable[[Tensor], float], **options: Any
) -> dict[str, Solution]:
    """The solution of the faithful engine, and the baselines."""
    solutions = constrain_layer(weight, pooled(parts), error, BASELINES, norm=norm)
    solution = constrain_blockwise(weight, parts, error, **options)
    baseline = solutions[BASELINES[0]]
    norms = {"norm_before": baseline.norm_before, "norm_after": norm(solution.weight), "rank": baseline.rank}
    return {"l1": replace(solution, **norms), **solutions}  # type: ignore[arg-type]


def _cost(layer: Layer) -> float:
    """The expected time of a layer in any unit: some 40 iterations, and the eigenvectors of its moments."""
    groups, width = grouping(layer.module)
    outputs = layer.weight.shape[0] // groups
    smaller = min(outputs, width)
    return groups * (40 * (4 * outputs * width * smaller + 12 * smaller**3) + 20 * width**3)


def _put(chosen: Mapping[str, Layer], weights: Weights) -> None:
    with torch.no_grad():
        for path, weight in weights.items():
            chosen[path].weight.copy_(weight)


def _top(logits: Tensor, name: str) -> Tensor:
    if not torch.isfinite(logits).all():
        raise InputError(f"the logits are NaN or infinite with the weights of {name}; check the model and the images")
    return logits.argmax(1).cpu()


def _sums(numbers: list[int]) -> list[int]:
    """The sums over all processes."""
    return [sum(parts) for parts in zip(*Processes.connected().gather(numbers), strict=True)]


def _notes(
    model: Model, chosen: Mapping[str, Layer], entries: Sequence[LayerConstraint], held_out: int
) -> Iterator[str]:
    if not held_out:
        yield f"no held-out images, so the errors on other images are unknown; give at least {EVERY} images"
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
            f"the images leave directions of the inputs of {len(flat)} of {len(entries)} layers unused, {least.path} "
            f"uses {least.rank} of {least.width}; weights may change freely there: check the errors on held-out images"
        )
    larger = [(entry.error_held_out or 0.0, entry) for entry in entries]
    larger = [(error, entry) for error, entry in larger if error > _GENERALISES * entry.error_asked]
    if larger:
        error, most = max(larger, key=lambda pair: pair[0])
        yield (
            f"{len(larger)} of {len(entries)} layers have larger errors on held-out images than allowed, {most.path} "
            f"the largest: {error:.3g}, above {most.error_asked:g}; use more images"
        )
    queries = [f"{path}.q".lstrip(".") for path, m in model.net.named_modules() if isinstance(m, L2Attention)]
    if any(path in chosen for path in queries):
        yield (
            "the weight of q in L2 attention also forms its values, and its change there is not part of its output "
            "error: check the agreement"
        )
