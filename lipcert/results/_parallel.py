"""Certifies blocks of images on several cores: this process and its workers share them; results keep their order."""

from __future__ import annotations

import importlib
import os
import pickle
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
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
from lipcert.numerics import Certificates, memory_left, worker_pool
from lipcert.settings import DETERMINISTIC, SMOOTHING, CertifySettings

if TYPE_CHECKING:
    from lipcert.smoothing import Smoothing


class Seconds(NamedTuple):
    """What a batch takes: by the clock, and of all cores together."""

    wall: float
    cpu: float


Outcome = tuple[Certificates, Seconds]

# Workers are started if the images that remain take this process longer than so many seconds. A batch takes about as
# long as if it had so many more images.
_WORTH, _MORE = 15.0, 3
# They start before the first image if a method may take more seconds for all images; estimates are up to five times
# too high.
_LONG = 60.0
# Memory of a worker besides that of its images.
_OF_A_WORKER = 2**29
# While the certifier is made, at most one worker starts for so many images.
_MANY = 20


def workers_for(certifier: Certifier | Smoothing, asked: int | None) -> int:
    """The number of processes, each with one thread; 0 for this process with all its threads.

    By default there is one for each core where Python takes longer than the arithmetic, as with ``anchored`` on a CPU.
    """
    if not getattr(certifier, "costly", False):
        return 0
    methods: Mapping[str, Method] = getattr(certifier, "methods", {})
    need = certifier.together * max(method.memory for method in methods.values())
    return _processes(asked, certifier.model.device, need)


def _processes(asked: int | None, device: torch.device, need: float = 0.0) -> int:
    """As many as asked for; by default one for each core, as far as there is memory for what each of them needs."""
    if asked is not None or device.type != "cpu":
        return asked if asked and device.type == "cpu" else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores, int(memory_left(device) / 2 / (need + _OF_A_WORKER)))
    return count if count > 1 else 0


@contextmanager
def workers_ahead(
    settings: CertifySettings, device: torch.device, images: int, asked: int | None
) -> Iterator[list[ProcessPoolExecutor]]:
    """Workers that import torch while the certifier is made; fewer where there are few images for them."""
    quick = settings.method == SMOOTHING or settings.method in DETERMINISTIC
    count = 0 if quick else min(_processes(asked, device) - 1, images // _MANY)
    with _started(count) as pools:
        yield pools


@contextmanager
def _started(count: int) -> Iterator[list[ProcessPoolExecutor]]:
    """Workers with a pool each, so that a task can be given to a certain one."""
    with ExitStack() as stack:
        pools = [stack.enter_context(worker_pool(1)) for _ in range(count)]
        for pool in pools:
            pool.submit(_import)
        yield pools


def certified(
    certifier: Any, batches: Iterator[Batch], workers: int, left: int, ahead: Sequence[ProcessPoolExecutor] = ()
) -> Iterator[tuple[Batch, Certificates, Seconds]]:
    """Certifies batches, in their order; yields each with its certificates and what it took.

    Workers are used after the first batches, if what is ``left`` takes long, or before; those that started ``ahead``
    first. Each makes the certifier anew from the network, its norms and the settings, and serves only if its bounds and
    the logits of one image are the same. A batch is certified as a whole and on one thread, so no radius depends on the
    number of workers, from 1 on.
    """
    slowest = max(method.seconds for method in certifier.methods.values()) if workers > 1 else 0.0
    shared = left > 1 and left * slowest > _LONG
    while not shared:
        if (batch := next(batches, None)) is None:
            return
        outcome = _timed(certifier, batch, workers > 0)
        yield batch, *outcome
        left -= len(batch)
        shared = workers > 1 and left * outcome[1].wall / (len(batch) + _MORE) > _WORTH
    try:
        given = pickle.dumps((_registering(), certifier.model, certifier.settings, KNOWN_NORMS))
    except Exception:  # code that only this process has, such as hooks
        for batch in batches:
            yield batch, *_timed(certifier, batch, True)
        return
    try:
        with _started(workers - 1 - len(ahead)) as more:
            yield from _shared(certifier, batches, [*ahead, *more][: workers - 1], given)
    except BrokenProcessPool as error:
        raise InputError("a worker ended early; it may have run out of memory: use fewer --workers, or 0") from error


def _shared(
    certifier: Any, batches: Iterator[Batch], pools: Sequence[ProcessPoolExecutor], given: bytes
) -> Iterator[tuple[Batch, Certificates, Seconds]]:
    """Whoever is free, this process or a worker, takes the next batch."""
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


def _import() -> None:
    """Does nothing, but makes a worker import this module, and torch with it."""


def _make(given: bytes) -> tuple[Any, ...]:
    modules, model, settings, norms = pickle.loads(given)
    for name in modules:
        importlib.import_module(name)
    KNOWN_NORMS.update(norms)
    torch.set_num_threads(1)
    _MADE[:] = [Certifier(model, settings)]
    return _identity()


def _identity(certifier: Any = None) -> tuple[Any, ...]:
    """What two certifiers of one network and with the same settings have in common, the logits of a grey image too."""
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
