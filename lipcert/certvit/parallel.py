"""Solves independent layers in parallel, on worker processes, devices and machines.

A layer that fails, or whose worker dies, becomes a :class:`Failure` and does not affect the others. With a resume
folder every finished layer is one safetensors file, and an interrupted run continues with the missing layers.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lipcert.certvit.moments import Moments
from lipcert.certvit.solve import Solution, constrain_layer
from lipcert.errors import InputError
from lipcert.inputs.processes import Processes


@dataclass
class Task:
    """One layer to solve.

    Attributes:
        name: the module path, unique among the tasks of a run.
        weight: the weight of the layer.
        data: the second argument of ``solver``: moments, or those of mini-batches for the faithful engine.
        options: keyword arguments for ``solver``.
        solver: a module-level function, called as ``solver(weight, data, **options)``.
    """

    name: str
    weight: Tensor
    data: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    solver: Callable[..., dict[str, Solution]] = constrain_layer


@dataclass
class Failure:
    """A layer that was not solved, and the reason in one line."""

    name: str
    message: str


Outcome = dict[str, Solution] | Failure


def solve_layers(
    tasks: Iterable[Task],
    workers: int | None = None,
    resume_dir: str | os.PathLike[str] | None = None,
    progress: Callable[[str, Outcome], object] | None = None,
    *,
    devices: Sequence[str] = ("cpu",),
    max_bytes: int = 2 << 30,
) -> dict[str, Outcome]:
    """Solves every task.

    Workers start at once and solve what was handed out while the iterable makes further tasks; so a generator can
    collect moments, and do other work after its last task. Workers are started with ``spawn``, so a script that calls
    this function needs ``if __name__ == "__main__"``. Each gets an equal number of threads. If one dies, the layers
    that are not finished are solved one at a time. With torch.distributed initialised, every process must pass the same
    tasks in the same order; each solves its share, and all receive all outcomes.
    """
    processes = Processes.connected()
    with processes.together():
        for device in devices:
            _require(device)
        folder = None if resume_dir is None else _folder(Path(resume_dir))
    order: list[str] = []
    outcomes: dict[str, Outcome] = {}
    waiting: dict[Future[Outcome], Task] = {}

    def path_of(task: Task) -> Path | None:
        return None if folder is None else folder / f"{quote(task.name, safe='')}.safetensors"

    def finish(task: Task, outcome: Outcome, *, stored: bool = False) -> None:
        path = path_of(task)
        if path is not None and not stored and not isinstance(outcome, Failure):
            _save(path, task, outcome)
        outcomes[task.name] = outcome
        if progress is not None:
            progress(task.name, outcome)

    def collect(most: int) -> None:
        """Waits until the tasks that are not finished hold at most so many bytes."""
        while sum(_bytes(task) for task in waiting.values()) > most:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                outcome = future.result()  # raises if a worker died
                finish(waiting.pop(future), outcome)

    with _workers(os.cpu_count() or 1 if workers is None else workers) as pool:
        for task in _share_of_process(tasks, processes, order):
            path, device = path_of(task), devices[(len(order) - 1) % len(devices)]
            earlier = None if path is None else _load(path, task)
            if earlier is not None:
                finish(task, earlier, stored=True)
            elif pool is None:
                finish(task, _solve(task, device))
            else:
                try:
                    waiting[pool.submit(_solve, task, device)] = task
                    collect(max_bytes)
                except BrokenProcessPool:
                    waiting.setdefault(Future(), task)
        try:
            collect(0)
        except BrokenProcessPool:
            for task in waiting.values():
                finish(task, _alone(task, devices[0]))
    everything = {name: outcome for share in processes.gather(outcomes) for name, outcome in share.items()}
    return {name: everything[name] for name in order}


def _require(device: str) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"there is no device {device!r}; use cpu, or one that torch lists") from error


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot use {path} to keep finished layers: {error.strerror}") from error
    return path


def _share_of_process(tasks: Iterable[Task], processes: Processes, order: list[str]) -> Iterator[Task]:
    """The tasks of this process; appends the names of all tasks to ``order``."""
    for index, task in enumerate(tasks):
        if task.name in order:
            raise InputError(f"two layers are called {task.name}; names must be unique")
        order.append(task.name)
        if index % processes.count == processes.rank:
            yield task


@contextmanager
def _workers(count: int) -> Iterator[ProcessPoolExecutor | None]:
    """A pool of workers that import torch at once; None for no workers. At the end, tasks not begun are dropped."""
    if not count:
        yield None
        return
    threads = max(1, (os.cpu_count() or 1) // count)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_prepare, initargs=(threads,))
    try:
        for _ in range(count):
            pool.submit(_prepare, threads)
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _prepare(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # control-C on a terminal ends workers without a traceback
    torch.set_num_threads(threads)


def _solve(task: Task, device: str) -> Outcome:
    try:
        solutions = task.solver(task.weight.detach().to(device), task.data, **task.options)
    except Exception as error:
        return Failure(task.name, " ".join(f"{error}".split()) or type(error).__name__)
    for solution in solutions.values():
        solution.weight = solution.weight.cpu()
    return solutions


def _alone(task: Task, device: str) -> Outcome:
    """The outcome from a worker of its own, as this task may be the one that ended the others."""
    with _workers(1) as pool:
        assert pool is not None
        try:
            return pool.submit(_solve, task, device).result()
        except BrokenProcessPool:
            why = "it may have run out of memory; use fewer workers"
            return Failure(task.name, f"the worker process ended early: {why}")


def _parts(task: Task) -> list[Any]:
    return list(task.data) if isinstance(task.data, (list, tuple)) else [task.data]


def _bytes(task: Task) -> int:
    """The size of the moments of a task, at least 1."""
    return 1 + sum(part.second.nbytes for part in _parts(task) if isinstance(part, Moments))


def _fingerprint(task: Task) -> str:
    """A hash of the weight, the options and the moments: their rows, and six digits of traces and of quadratic forms.

    The last digits of moments depend on the number of threads. Data with the same trace, such as images whose pixels
    change places, differ in the quadratic forms of random vectors.
    """
    digest = hashlib.sha256(task.weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    facts = [(part.rows, *_digits(part.second)) for part in _parts(task)]
    described = [task.solver.__module__, task.solver.__qualname__, sorted(task.options.items()), facts]
    digest.update(repr(described).encode())
    return digest.hexdigest()


def _digits(second: Tensor) -> list[str]:
    drawn = torch.randn(second.shape[-1], 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vectors = drawn.to(second)
    forms = (vectors * (second @ vectors)).sum(-2).flatten()
    return [f"{number:.6e}" for number in (second.diagonal(dim1=-2, dim2=-1).sum().item(), *forms.tolist())]


def _save(path: Path, task: Task, solutions: Mapping[str, Solution]) -> None:
    facts = {
        measure: {key: value for key, value in vars(solution).items() if key != "weight"}
        for measure, solution in solutions.items()
    }
    metadata = {"solutions": json.dumps(facts), "fingerprint": _fingerprint(task)}
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    os.close(handle)
    weights = {measure: solution.weight.contiguous() for measure, solution in solutions.items()}
    save_file(weights, partial, metadata=metadata)
    os.replace(partial, path)


def _load(path: Path, task: Task) -> dict[str, Solution] | None:
    """The finished layer in the file; None if the file is missing, damaged or belongs to another task."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("fingerprint") != _fingerprint(task):
                return None
            solutions = json.loads(metadata["solutions"])
            return {name: Solution(weight=file.get_tensor(name), **facts) for name, facts in solutions.items()}
    except (SafetensorError, KeyError, TypeError, ValueError):
        return None
