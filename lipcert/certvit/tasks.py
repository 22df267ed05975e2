"""Independent layers, solved here or by worker processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lipcert.certvit.moments import Moments
from lipcert.certvit.solve import Solution, constrain_layer
from lipcert.errors import InputError
from lipcert.inputs.processes import Processes
from lipcert.workers import worker_pool


@dataclass
class Task:
    """A layer to solve by ``solver(weight, data, **options)``, begun before ``until``, as ``time.time()``."""

    name: str
    weight: Tensor
    data: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    solver: Callable[..., dict[str, Solution]] = constrain_layer
    until: float = math.inf


@dataclass
class Failure:
    """A layer that was not solved, and the reason in one line."""

    message: str


Outcome = dict[str, Solution] | Failure


def solve_layers(
    tasks: Iterable[Task],
    workers: int = 0,
    solved: Callable[[str], object] = lambda name: None,
    *,
    device: str | torch.device = "cpu",
    max_bytes: int = 2 << 30,
) -> dict[str, Outcome]:
    """Solves every task; a layer that fails becomes a :class:`Failure` and does not affect the others.

    Workers solve what was handed out while the iterable makes further tasks, which wait for them once they hold
    ``max_bytes``. With torch.distributed initialised, every process passes the same tasks in the same order, solves its
    share, and receives all outcomes.
    """
    processes = Processes.connected()
    order: list[str] = []
    mine = _share(tasks, processes, order)
    found = _on_workers(mine, workers, device, max_bytes) if workers else ((t, _solve(t, device)) for t in mine)
    outcomes: dict[str, Outcome] = {}
    for task, outcome in found:
        outcomes[task.name] = outcome
        solved(task.name)
    everything = {name: outcome for share in processes.gather(outcomes) for name, outcome in share.items()}
    return {name: everything[name] for name in order}


def _share(tasks: Iterable[Task], processes: Processes, order: list[str]) -> Iterator[Task]:
    """The tasks of this process; appends the names of all tasks to ``order``."""
    for index, task in enumerate(tasks):
        order.append(task.name)
        if index % processes.count == processes.rank:
            yield task


def _on_workers(
    tasks: Iterable[Task], workers: int, device: str | torch.device, max_bytes: int
) -> Iterator[tuple[Task, Outcome]]:
    waiting: dict[Future[Outcome], Task] = {}

    def finished(most: int) -> Iterator[tuple[Task, Outcome]]:
        """Waits until the tasks that are not finished hold at most so many bytes."""
        while sum(_bytes(task) for task in waiting.values()) > most:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()

    try:
        with worker_pool(workers) as pool:
            for task in tasks:
                waiting[pool.submit(_solve, task, device)] = task
                yield from finished(max_bytes)
            yield from finished(0)
    except RuntimeError as error:
        if isinstance(error, BrokenProcessPool):
            why = "a worker ended early; it may have run out of memory"
        elif "shared memory" in str(error):
            why = "there is too little shared memory, of which containers have little"
        else:
            raise
        raise InputError(f"{why}: use fewer --workers, or 0") from error


def _solve(task: Task, device: str | torch.device) -> Outcome:
    if time.time() > task.until:
        return Failure("no time was left")
    try:
        solutions = task.solver(task.weight.detach().to(device), task.data, **task.options)
    except Exception as error:
        return Failure(" ".join(f"{error}".split()) or type(error).__name__)
    return {measure: replace(solution, weight=solution.weight.cpu()) for measure, solution in solutions.items()}


def _bytes(task: Task) -> int:
    """The size of the moments of a task, at least 1."""
    parts = task.data if isinstance(task.data, (list, tuple)) else [task.data]
    return 1 + sum(part.second.nbytes for part in parts if isinstance(part, Moments))
