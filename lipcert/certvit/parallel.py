"""Solves independent layers in parallel, on worker processes, devices and machines.

A layer that fails, or whose worker dies, becomes a :class:`Failure` and does not affect the others. With a resume
folder every finished layer is one safetensors file, and an interrupted run continues with the missing layers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lipcert.certvit.moments import Moments
from lipcert.certvit.solve import Solution, constrain_matrix
from lipcert.errors import InputError
from lipcert.inputs.files import replacing
from lipcert.inputs.processes import Processes


@dataclass
class Task:
    """One layer to solve.

    Attributes:
        name: the module path, unique among the tasks of a run.
        weight: the weight of the layer.
        data: the second argument of ``solver``: moments, or mini-batches for the faithful engine.
        options: keyword arguments for ``solver``.
        solver: a module-level function, called as ``solver(weight, data, **options)``.
    """

    name: str
    weight: Tensor
    data: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    solver: Callable[..., Solution] = constrain_matrix


@dataclass
class Failure:
    """A layer that was not solved, and the reason in one line."""

    name: str
    message: str


Outcome = Solution | Failure


def solve_layers(
    tasks: Iterable[Task],
    workers: int | None = None,
    resume_dir: str | os.PathLike[str] | None = None,
    progress: Callable[[str, Outcome], object] | None = None,
    *,
    devices: Sequence[str] = ("cpu",),
) -> dict[str, Outcome]:
    """Solves every task.

    The iterable is advanced when a worker becomes free, so a generator that collects moments group by group keeps few
    of them in memory. Workers are started with ``spawn``, so a script that calls this function needs ``if __name__ ==
    "__main__"``. Each worker gets an equal number of threads. With torch.distributed initialised, every process must
    pass the same tasks in the same order; each solves its share, and all receive all outcomes.

    Args:
        tasks: the layers.
        workers: the number of local worker processes; None starts one per core, 0 solves in this process.
        resume_dir: a folder for finished layers, created if missing. A file is used only if weight, moments and options
            are those of the task.
        progress: called as ``progress(name, outcome)`` when a layer is finished here or was read from a file.
        devices: worker k solves on ``devices[k % len(devices)]``, such as ("cuda:0", "cuda:1").

    Returns:
        Name → :class:`Solution`, on the CPU, or :class:`Failure`, in the order of the tasks.

    Raises:
        InputError: a device does not exist, the resume folder cannot be used, or two tasks have the same name.
    """
    processes = Processes.connected()
    with processes.together():
        for device in devices:
            _require(device)
        folder = None if resume_dir is None else _folder(Path(resume_dir))
    report = progress or (lambda name, outcome: None)
    order: list[str] = []
    outcomes: dict[str, Outcome] = {}

    def open_tasks() -> Iterator[tuple[Task, Path | None]]:
        for task in _own_share(tasks, processes, order):
            path = None if folder is None else folder / f"{quote(task.name, safe='')}.safetensors"
            known = None if path is None else _load(path, task)
            if known is None:
                yield task, path
            else:
                outcomes[task.name] = known
                report(task.name, known)

    count = os.cpu_count() or 1 if workers is None else workers
    for task, path, outcome in (_serially if count == 0 else _in_workers)(open_tasks(), count, devices):
        if path is not None and isinstance(outcome, Solution):
            _save(path, task, outcome)
        outcomes[task.name] = outcome
        report(task.name, outcome)
    everything = {name: outcome for share in processes.gather(outcomes) for name, outcome in share.items()}
    return {name: everything[name] for name in order}


Open = Iterator[tuple[Task, Path | None]]
Done = Iterator[tuple[Task, Path | None, Outcome]]


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


def _own_share(tasks: Iterable[Task], processes: Processes, order: list[str]) -> Iterator[Task]:
    """The tasks of this process; appends the names of all tasks to ``order``."""
    seen = set()
    for index, task in enumerate(tasks):
        if task.name in seen:
            raise InputError(f"two layers are called {task.name}; names must be unique")
        seen.add(task.name)
        order.append(task.name)
        if index % processes.count == processes.rank:
            yield task


def _solve(task: Task, device: str) -> Outcome:
    try:
        solution = task.solver(task.weight.detach().to(device), task.data, **task.options)
    except Exception as error:
        return Failure(task.name, " ".join(f"{error}".split()) or type(error).__name__)
    solution.weight = solution.weight.cpu()
    return solution


def _serially(tasks: Open, count: int, devices: Sequence[str]) -> Done:
    for task, path in tasks:
        yield task, path, _solve(task, devices[0])


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    device: str
    task: tuple[Task, Path | None] | None = None


def _in_workers(tasks: Open, count: int, devices: Sequence[str]) -> Done:
    """Gives each free worker the next task. If a worker dies, only its task fails, and a new worker replaces it."""
    threads = max(1, (os.cpu_count() or 1) // count)
    workers: list[_Worker] = []
    try:
        for task, path in tasks:
            if len(workers) < count:
                workers.append(_start(devices[len(workers) % len(devices)], threads))
                _hand(workers[-1], task, path)
                continue
            place, done = _next_done(workers)
            if not workers[place].process.is_alive():
                workers[place] = _start(workers[place].device, threads)
            _hand(workers[place], task, path)
            yield done
        while any(worker.task for worker in workers):
            yield _next_done(workers)[1]
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
            worker.process.join()


def _start(device: str, threads: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, device, threads), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here, device)


def _hand(worker: _Worker, task: Task, path: Path | None) -> None:
    worker.task = task, path
    message = pickle.dumps((task.name, task.weight, task.data, dict(task.options), task.solver))
    with contextlib.suppress(OSError):  # a dead worker is detected when its pipe is read
        worker.pipe.send_bytes(message)


def _next_done(workers: list[_Worker]) -> tuple[int, tuple[Task, Path | None, Outcome]]:
    busy = {worker.pipe: place for place, worker in enumerate(workers) if worker.task}
    place = busy[next(pipe for pipe in wait(list(busy)) if isinstance(pipe, Connection))]
    worker = workers[place]
    assert worker.task is not None
    task, path = worker.task
    worker.task = None
    try:
        return place, (task, path, pickle.loads(worker.pipe.recv_bytes()))
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode
        why = f"exit code {code}; it may have run out of memory, use fewer workers"
        return place, (task, path, Failure(task.name, f"the worker process ended early ({why})"))


def _work(pipe: Connection, device: str, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent terminates its workers
    torch.set_num_threads(threads)
    while True:
        try:
            name, weight, data, options, solver = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_solve(Task(name, weight, data, options, solver), device)))


def _fingerprint(task: Task) -> str:
    """A hash of the weight, the options and the data; of moments, of their rows and six digits of their traces."""
    digest = hashlib.sha256(task.weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    blocks = task.data if isinstance(task.data, (list, tuple)) else [task.data]
    facts = [
        (block.rows, f"{float(block.second.diagonal(dim1=-2, dim2=-1).sum()):.6e}")
        if isinstance(block, Moments)
        else (len(block), f"{float(block.double().square().sum()):.6e}")
        for block in blocks
    ]
    described = [task.solver.__module__, task.solver.__qualname__, sorted(task.options.items()), facts]
    digest.update(repr(described).encode())
    return digest.hexdigest()


def _save(path: Path, task: Task, solution: Solution) -> None:
    facts = {key: value for key, value in vars(solution).items() if key != "weight"}
    metadata = {"solution": json.dumps(facts), "fingerprint": _fingerprint(task)}
    with replacing(path) as partial:
        save_file({"weight": solution.weight.contiguous()}, partial, metadata=metadata)


def _load(path: Path, task: Task) -> Solution | None:
    """The finished layer in the file; None if the file is missing, damaged or belongs to another task."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("fingerprint") != _fingerprint(task):
                return None
            return Solution(weight=file.get_tensor("weight"), **json.loads(metadata["solution"]))
    except (SafetensorError, KeyError, TypeError, ValueError):
        return None
