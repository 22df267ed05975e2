"""Certifies blocks of images on several cores: this process and its workers share them; results keep their order."""

from __future__ import annotations

import importlib
import pickle
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lipcert.bounds import RULES
from lipcert.certifier import CLASSES, Certifier, Method
from lipcert.errors import BrokenCertificate, InputError
from lipcert.graph import logits
from lipcert.inputs.data import Batch
from lipcert.norms import KNOWN_NORMS
from lipcert.numerics import Certificates
from lipcert.workers import default_workers, workers_ahead

if TYPE_CHECKING:
    from lipcert.smoothing import Smoothing


class Seconds(NamedTuple):
    """The time of a batch: by the clock, and summed over all cores."""

    wall: float
    cpu: float


Outcome = tuple[Certificates, Seconds]

# Workers are started if the images that remain take this process longer than so many seconds. A batch takes about as
# long as if it had so many more images.
_WORTH, _MORE = 15.0, 3
# They start before the first image if a method may take more seconds for all images; estimates are up to five times
# too high.
_LONG = 60.0


def workers_for(certifier: Certifier | Smoothing, asked: int | None) -> int:
    """The number of processes, each with one thread; 0 for this process with all its threads.

    By default there is one for each core where Python takes longer than the arithmetic, as with ``anchored`` on a CPU.
    """
    if not getattr(certifier, "costly", False):
        return 0
    methods: Mapping[str, Method] = getattr(certifier, "methods", {})
    if asked is not None or certifier.model.device.type != "cpu":
        return asked if asked and certifier.model.device.type == "cpu" else 0
    return default_workers(certifier.together * max(method.memory for method in methods.values()))


def certified(
    certifier: Any, batches: Iterator[Batch], workers: int, left: int, ahead: Sequence[ProcessPoolExecutor] = ()
) -> Iterator[tuple[Batch, Certificates, Seconds]]:
    """Certifies batches, in their order; yields each with its certificates and what it took.

    Workers are used after the first batches, if what is ``left`` takes long, or before; those that started ``ahead``
    from the start. Each makes the certifier anew from the network, its norms and the settings, and serves only if its
    bounds and the logits of one image are the same. A batch is certified as a whole and on one thread, so no radius
    depends on the number of workers, from 1 on.
    """
    slowest = max(method.seconds for method in certifier.methods.values()) if workers > 1 else 0.0
    long = left > 1 and left * slowest > _LONG
    while not long and not (workers > 1 and left > 1 and ahead):
        if (batch := next(batches, None)) is None:
            return
        outcome = _timed(certifier, batch, workers > 0)
        yield batch, *outcome
        left -= len(batch)
        long = workers > 1 and left * outcome[1].wall / (len(batch) + _MORE) > _WORTH
    try:
        given = pickle.dumps((_registering(), certifier.model, certifier.settings, KNOWN_NORMS))
    except Exception:  # code that only this process has, such as hooks
        for batch in batches:
            yield batch, *_timed(certifier, batch, True)
        return
    try:
        with workers_ahead(workers - 1 - len(ahead) if long else 0) as more:
            yield from _shared(certifier, batches, [*ahead, *more][: workers - 1], given)
    except BrokenProcessPool as error:
        raise InputError("a worker ended early; it may have run out of memory: use fewer --workers, or 0") from error


def _shared(
    certifier: Any, batches: Iterator[Batch], pools: Sequence[ProcessPoolExecutor], given: bytes
) -> Iterator[tuple[Batch, Certificates, Seconds]]:
    """A free process, this one or a worker, takes the next batch."""
    identity, lock = _identity(certifier), Lock()
    waiting: deque[Future[tuple[Batch, Certificates, Seconds]]] = deque()

    def begun() -> tuple[Batch, Future[Any]] | None:
        with lock:
            outcome: Future[Any] = Future()
            try:
                batch = next(batches, None)
            except Exception as error:
                outcome.set_exception(error)
                batch = None
            if batch is not None or outcome.done():
                waiting.append(outcome)
            return None if batch is None else (batch, outcome)

    # A thread of the pool calls these three; it would lose an error.
    def ready(pool: ProcessPoolExecutor, task: Future[Any]) -> None:
        if not task.cancelled() and task.exception() is None and task.result() == identity:
            serve(pool)

    def serve(pool: ProcessPoolExecutor) -> None:
        if (entry := begun()) is None:
            return
        try:
            task = pool.submit(_certify, pickle.dumps((entry[0].images, entry[0].labels)))  # by value
        except Exception as error:
            entry[1].set_exception(error)
        else:
            task.add_done_callback(partial(served, pool, *entry))

    def served(pool: ProcessPoolExecutor, batch: Batch, outcome: Future[Any], task: Future[bytes]) -> None:
        try:
            outcome.set_result((batch, *_received(task, batch)))
        except Exception as error:
            outcome.set_exception(error)
        else:
            serve(pool)

    for pool in pools:
        pool.submit(_make, given).add_done_callback(partial(ready, pool))
    while (entry := begun()) is not None:
        batch, outcome = entry
        outcome.set_result((batch, *_timed(certifier, batch, True)))
        while waiting and waiting[0].done():
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _timed(certifier: Any, batch: Batch, one_thread: bool) -> Outcome:
    since, threads = clocks(), torch.get_num_threads()
    try:
        torch.set_num_threads(1 if one_thread else threads)
        return certifier.run_batch(batch), clocks(since)
    except BrokenCertificate as error:
        raise _named(error, batch) from None
    finally:
        torch.set_num_threads(threads)


def clocks(since: Seconds | None = None) -> Seconds:
    """The time by the clock and of this process, since then."""
    before = since or Seconds(0.0, 0.0)
    return Seconds(time.perf_counter() - before.wall, time.process_time() - before.cpu)


def _received(future: Future[bytes], batch: Batch) -> Outcome:
    outcome: Outcome | dict[str, Any] = pickle.loads(future.result())
    if isinstance(outcome, dict):
        raise _named(BrokenCertificate(**outcome), batch)
    return outcome


def _named(error: BrokenCertificate, batch: Batch) -> BrokenCertificate:
    """The error with the image's index in the data set."""
    error.args = (f"image {batch.indices[error.position]} of the data: {error.contradiction}",)
    return error


def _registering() -> set[str]:
    """The modules, other than lipcert's own, that have registered rules or certificates."""
    answers = [answer for rule in RULES.values() for answer in (rule.lipschitz, rule.box, rule.remainder)]
    modules = {answer.__module__ for answer in (*answers, *CLASSES.values()) if answer is not None}
    return {name for name in modules if name.partition(".")[0] not in ("lipcert", "__main__")}


# The certifier of a worker.
_MADE: list[Any] = []


def _make(given: bytes) -> tuple[Any, ...]:
    modules, model, settings, norms = pickle.loads(given)
    for name in modules:
        importlib.import_module(name)
    KNOWN_NORMS.update(norms)
    torch.set_num_threads(1)
    _MADE[:] = [Certifier(model, settings)]
    return _identity()


def _identity(certifier: Any = None) -> tuple[Any, ...]:
    """Values that are equal for two certifiers of one network with the same settings, and logits of a grey image."""
    one, threads = _MADE[0] if certifier is None else certifier, torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        grey = torch.full((1, *one.model.input_size), 0.5, dtype=torch.float64, device=one.model.device)
        found = logits(one.analysis.graph, grey)
    finally:
        torch.set_num_threads(threads)
    return (
        found.tolist(),
        one.bound.log10,
        tuple(one.methods),
        tuple(one.skipped),
        tuple(method.work for method in one.methods.values()),
    )


def _certify(given: bytes) -> bytes:
    images, labels = pickle.loads(given)
    since = clocks()
    try:
        return pickle.dumps((_MADE[0].run(images, labels), clocks(since)))
    except BrokenCertificate as error:
        return pickle.dumps({name: getattr(error, name) for name in ("position", "distance", "radius", "method")})
