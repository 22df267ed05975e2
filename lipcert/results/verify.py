"""Verifies a result file by recomputing it from the model and the images."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lipcert.attacks import PGD, Attack
from lipcert.certifier import Certifier
from lipcert.errors import InputError, counted, shortened
from lipcert.graph import identity_of_code
from lipcert.inputs.artifact import buffers_hash, weights_hash
from lipcert.inputs.data import Batch, Images, order_of
from lipcert.model import Model
from lipcert.norms import Rigor
from lipcert.numerics import EVIDENCE, WORDS
from lipcert.results._certify import certifier_for
from lipcert.results._reading import Run
from lipcert.results._rows import contradiction, rows, same, same_examples
from lipcert.results.description import describe
from lipcert.results.progress import blocks_of
from lipcert.smoothing import CHOOSING, Denoised, Smoothing

# Rounding depends on the machine and the batch. It changes a number by far less than this.
TOLERANCE = 1e-6
# Gradient ascent amplifies rounding. The distances that an attack finds may differ by this fraction.
_ATTACK_TOLERANCE = 1e-3
# The fraction of noise draws whose class may change by rounding on another machine. Such draws refute nothing, and they
# confirm nothing either: what a machine confirms follows from its own count.
_ROUNDED_DRAWS = 1e-3
# The recomputed entries of a summary. Its name, times, the command, versions and the machine are not checked.
_DESCRIBED = ("model", "preprocessing", "data", "bound")
_ONCE_COMPLETE = "a run is confirmed once it is complete"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one row, or on the file as a whole, whose index is None; without objection, it is confirmed."""

    index: int | None
    objection: str | None
    unsettled: bool = False


def check_model(run: Run, model: Model) -> None:
    """Refuses a model other than the certified one."""
    claimed = run.summary["model"]
    actual = {
        "weights_hash": ("weights", weights_hash(model)),
        "recipe": ("surgery", json.loads(json.dumps(model.recipe))),
        "buffers_hash": ("buffers", buffers_hash(model)),
        "code_hash": ("code", identity_of_code(model)[0]),
    }
    if run.denoiser and not isinstance(model, Denoised):
        raise InputError(
            f"{run.path} holds rows about a model with a denoiser in front; give --denoiser {run.denoiser} too"
        )
    for key, (what, found) in actual.items():
        if claimed.get(key) != found:
            same = "the model that was certified"
            arguments = (claimed.get("source") or {}).get("arguments") or {}
            if what == "weights" and arguments != json.loads(json.dumps(model.source.get("arguments") or {})):
                listed = " ".join(f"{name}={value}" for name, value in arguments.items()) or "no arguments"
                same += f", which was made with {shortened(listed, 300)}"
            raise InputError(f"{run.path} holds rows about other {what}; give {same}")


def sample(run: Run, count: int | None) -> list[Mapping[str, Any]]:
    """``count`` rows, drawn by the system's generator, as nobody may know them before; all rows for None."""
    if count is None or count >= len(run):
        return list(run.rows)
    return [run.rows[i] for i in sorted(random.SystemRandom().sample(range(len(run)), count))]


def _numbers(run: Run, images: Any) -> list[int]:
    """Images that a summary names, in ascending order: those that were removed, or on which σ was chosen."""
    if not (isinstance(images or [], list) and all(type(i) is int and i >= 0 for i in images or [])):
        raise InputError(f"{run.path} is damaged: its removed images are no numbers; certify the images again")
    return sorted({*(images or [])})


def attack_of(run: Run) -> Attack | None:
    """The attack of a run if its result can be recomputed; otherwise None."""
    attack = run.summary.get("attack") or {}
    if (attack.get("name"), attack.get("version")) != (PGD.name, PGD.version):
        return None
    try:
        return PGD(**attack["settings"])
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{run.path} names settings that {PGD.name} does not have; verify it with the lipcert that wrote it"
        ) from error


def verify(
    run: Run,
    model: Model,
    images: Images,
    count: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Iterator[Verdict]:
    """Recomputes a result file and compares it with its content.

    A row is confirmed if its image is the certified one, its radius is at most the one that follows from what is
    measured here, and its other entries equal the recomputed ones. A few draws of noise may fall into another class by
    the rounding of another machine; a row that needs them is unsettled. PGD is repeated; the results of other attacks
    are not checked.
    """
    check_model(run, model)
    summary = run.summary
    images.leave_out(_numbers(run, run.summary.get("data", {}).get("removed")))
    chosen_on = _numbers(run, (run.summary.get("sigma_choice") or {}).get("indices"))
    images.keep_out(chosen_on)
    selected = {row["index"]: row for row in sample(run, count)}
    attack = attack_of(run)
    settings = run.settings(attack)
    certifier = certifier_for(model, settings)
    claims = describe(model, images, certifier)
    if images.removed and summary.get("limit") is not None:
        yield Verdict(None, "some images are said to be gone, so nothing shows that the others were not selected")
    smoothed = isinstance(certifier, Smoothing) and len(chosen_on) <= CHOOSING
    if chosen_on and not (smoothed and images.may_be_others(chosen_on)):
        yield Verdict(None, "the run leaves out images, and not as sigma is chosen on them")
    yield from (Verdict(None, reason) for reason in _against_the_file(run, json.loads(json.dumps(claims)), images))
    for row in run.rows:
        if row["index"] not in selected and (reason := contradiction(row, run.eps, summary.get("method"))):
            yield Verdict(None, f"image {row['index']}: {reason}")
    others: dict[str, Certifier] = {}
    done = 0
    for batch in _batches(run, certifier, images, selected.keys()):
        if isinstance(certifier, Certifier):
            certificates = certifier.run(batch.images, batch.labels)
        else:
            drawn = [(selected[index]["predicted"], selected[index].get("samples", 0)) for index in batch.indices]
            certificates = certifier.again(batch, drawn)
        for i, recomputed in enumerate(rows(batch, certificates, 0.0)):
            if recomputed["index"] not in selected:
                continue
            claimed = selected[recomputed["index"]]
            method = claimed["method"]
            if isinstance(certifier, Certifier) and method != recomputed["method"] and method in certifier.budgets:
                # the run skipped the stronger methods because of its attack
                if method not in others:
                    share = certifier.budgets[method].delta or settings.delta
                    one_method = replace(settings, method=method, delta=share, attack=None)
                    others[method] = Certifier(model, one_method)
                one = batch.split(i)[1].split(1)[0]
                (other,) = rows(one, others[method].run(one.images, one.labels), 0.0)
                recomputed |= {key: other[key] for key in ("radius", "method", "rigor", *EVIDENCE)}
            done += 1
            reason = contradiction(claimed, run.eps, summary.get("method"))
            reason = reason or _objection(claimed, recomputed, attack is not None)
            if reason:
                yield Verdict(recomputed["index"], reason)
            elif isinstance(certifier, Smoothing):
                yield _verdict_on_draws(claimed, recomputed, certifier)
            else:
                yield _verdict_on_radius(claimed, recomputed, run)
        if progress is not None:
            progress(done, len(selected))
    if done < len(selected):
        raise InputError(
            f"{run.path} has {counted(len(selected), 'row')} to verify, and the data images for {done} of "
            "them; give the same data"
        )


def _batches(run: Run, certifier: Certifier | Smoothing, images: Images, selected: Collection[int]) -> Iterator[Batch]:
    """The blocks of the run that contain selected images: searches depend on the whole batch."""
    if not isinstance(certifier, Certifier):
        yield from images.batches(certifier.together, only=selected)
        return
    limit = run.summary.get("limit")
    every = order_of(images.total, limit if type(limit) is int and limit > 0 else None, images.kept_out)
    order = [index for index in every if index not in images.removed]
    blocks = [block for block in blocks_of(order, certifier) if not {*block}.isdisjoint(selected)]
    for block in [*blocks, *([index] for index in {*selected} - {*order})]:
        yield from images.batches(len(block), only=frozenset(block))


def _against_the_file(run: Run, recomputed: Mapping[str, Any], images: Images) -> Iterator[str]:
    """Yields the contradictions of the summary with itself, the rows, the model and the images."""
    yield from run.contradictions()
    if not same_examples(run.summary.get("example_logits"), recomputed["example_logits"]):
        yield "the summary's logits on the example images are not what the model gives"
    if "counts" not in run.summary or not run.summary.get("complete"):
        yield from run.miscounted()
    claimed = dict(run.summary)
    # The data may have been moved, and its split named.
    moved = ("spec", "split", "classes", "labels")
    claimed["data"] = {key: value for key, value in claimed.get("data", {}).items() if key not in moved}
    claimed["data"] |= {key: recomputed["data"][key] for key in moved if key in recomputed["data"]}
    for key in _DESCRIBED:
        if not same(claimed.get(key), recomputed[key], TOLERANCE, TOLERANCE):
            difference = _first_difference(claimed.get(key), recomputed[key])
            yield f"the summary's {key} differs from what is recomputed{difference}"
    if re.search(r"\.shard-\d+-of-\d+$", run.path.stem):
        yield f"{run.path} is one part of a run; put the parts together, and verify the whole"
        return
    limit = run.summary.get("limit")
    if limit is not None and not (type(limit) is int and limit > 0):
        yield f"the summary says that the limit was {limit!r}, which is no number of images"
        return
    indices = {row["index"] for row in run.rows}
    expected = {*order_of(images.total, limit, images.kept_out)} - {*images.removed}
    if beyond := indices - {*range(images.total)}:
        raise InputError(
            f"{run.path} has a row for image {min(beyond)}, and the data has {images.total} images; give the same data"
        )
    if indices != expected:
        missing, others = len(expected - indices), len(indices - expected)
        rest = f", and {counted(others, 'row')} about others" if others else ""
        yield f"the run is about {counted(len(expected), 'image')}: {missing} without a row{rest}; {_ONCE_COMPLETE}"
    elif not run.summary.get("complete"):
        yield f"the summary says that the run did not finish; {_ONCE_COMPLETE}"


def _first_difference(claimed: Any, recomputed: Any) -> str:
    """A short description of the first difference between two JSON values."""
    if isinstance(claimed, dict) and isinstance(recomputed, dict):
        for key in dict.fromkeys((*recomputed, *claimed)):
            if not same(claimed.get(key), recomputed.get(key), TOLERANCE, TOLERANCE):
                return f", {key}{_first_difference(claimed.get(key), recomputed.get(key))}"
    if isinstance(recomputed, (dict, list)) or isinstance(claimed, (dict, list)):
        return ""
    return f": {claimed!r} is claimed and {recomputed!r} found"


def _objection(claimed: Mapping[str, Any], recomputed: Mapping[str, Any], attacked: bool) -> str | None:
    if claimed.get("image") != recomputed["image"]:
        return "it is another image than the one that was certified"
    for name in ("file", "label", *(() if "samples" in recomputed else ("predicted",)), "method"):
        if claimed.get(name) != recomputed.get(name):
            return f"{name} {claimed.get(name)} is claimed and {recomputed.get(name)} found"
    if not same(claimed.get("margin"), recomputed["margin"], TOLERANCE, 1e-9):
        return f"margin {claimed.get('margin')} is claimed and {recomputed['margin']} found"
    if "samples" not in recomputed and claimed["radius"] > recomputed["radius"] * (1 + TOLERANCE):
        return f"radius {claimed['radius']:.9g} is claimed and only {recomputed['radius']:.9g} found"
    stated, spent = ((Rigor.parse(row["rigor"]) or Rigor(0.0)).delta for row in (claimed, recomputed))
    if stated < spent or bool(stated) is not bool(spent):
        return f"{claimed['rigor']} is claimed and {recomputed['rigor']} found"
    for name in EVIDENCE:
        weaker = WORDS[WORDS.index(claimed[name]) + 1 :] if claimed.get(name) else WORDS
        if recomputed.get(name) in weaker:
            return f"{name} {claimed.get(name) or 'not stated'} is claimed and {recomputed[name]} found"
    for name in ("attacked", "attack_distance") if attacked else ():
        if not same(claimed.get(name), recomputed[name], _ATTACK_TOLERANCE):
            return f"{name} = {claimed.get(name)} is claimed and {recomputed[name]} found"
    return None


def _verdict_on_radius(claimed: Mapping[str, Any], recomputed: Mapping[str, Any], run: Run) -> Verdict:
    """The verdict on a row whose radius may exceed the recomputed one by rounding, but not decide an ε by that."""
    index, radius = recomputed["index"], recomputed["radius"]
    between = [typed for eps, typed in run.every_eps if claimed["radius"] >= eps > radius]
    if between:
        return Verdict(index, f"certified at {between[0]} is claimed, and radius {radius:.9g} found", unsettled=True)
    return Verdict(index, None)


def _verdict_on_draws(claimed: Mapping[str, Any], recomputed: Mapping[str, Any], smoothing: Smoothing) -> Verdict:
    """The verdict on a row of a smoothed classifier, by the draws that were counted again and the radius they give."""
    index = recomputed["index"]
    for name in ("holds_for", "seed", "samples"):
        if claimed.get(name) != recomputed[name]:
            return Verdict(index, f"{name} = {claimed.get(name)} is claimed and {recomputed[name]} found")
    samples = claimed["samples"]
    limit = smoothing.plan.at(recomputed.get("distance", 0.0)).radius(claimed["count"], samples)
    if claimed["radius"] > limit * (1 + TOLERANCE):
        return Verdict(index, f"radius {claimed['radius']:.9g} is claimed, and the claimed draws give {limit:.9g}")
    counted = f"{claimed['count']} of {samples} draws are claimed and {recomputed['count']} found"
    if abs(claimed["count"] - recomputed["count"]) > 1 + _ROUNDED_DRAWS * samples:
        return Verdict(index, counted)
    if claimed["predicted"] != recomputed["predicted"]:
        selected = f"class {claimed['predicted']} is claimed, and here the draws select class {recomputed['predicted']}"
        return Verdict(index, selected, unsettled=True)
    if claimed["radius"] > recomputed["radius"] * (1 + TOLERANCE):
        radius = f"radius {claimed['radius']:.9g} is claimed, and here the draws give {recomputed['radius']:.9g}"
        return Verdict(index, f"{radius}: {counted}", unsettled=True)
    return Verdict(index, None)
