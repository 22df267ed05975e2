"""Pools of processes that never run the user's script again; they can start before torch is imported here."""

import contextlib
import math
import multiprocessing.context
import os
import pickle
import re
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from lipcert.errors import InputError

_STARTING = threading.Lock()

# Memory of a worker besides that of its images.
_OF_A_WORKER = 2**29


def main_memory_left() -> float:
    """Bytes of main memory available to this process; inf if unknown."""
    try:
        facts = Path("/proc/meminfo").read_text()
    except OSError:
        return math.inf
    available = re.search(r"MemAvailable:\s+(\d+) kB", facts)
    return min(1024.0 * int(available[1]) if available else math.inf, _left_in_container())


def _left_in_container() -> float:
    """Bytes below the limit of a container; what the kernel can drop, files in its cache, counts as free."""
    try:
        limit, used, facts = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current", "stat"))
        cached = re.search(r"inactive_file (\d+)", facts)
        return float(limit) - float(used) + float(cached[1] if cached else 0)  # without a limit the file holds "max"
    except (OSError, ValueError):
        return math.inf


def default_workers(need: float = 0.0) -> int:
    """One process for each core, this one among them, as far as each has the memory it needs; 0 for less than two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores, int(main_memory_left() / 2 / (need + _OF_A_WORKER)))
    return count if count > 1 and not _obstacle() else 0


def _obstacle() -> str:
    """Why no process can be started from this one; "" where it can."""
    if multiprocessing.current_process().daemon:
        return "this process is daemonic, as those of Celery are"
    try:
        multiprocessing.Lock()
    except (ImportError, OSError) as error:  # in AWS Lambda
        return f"the system has no semaphores: {error}"
    return ""


@contextlib.contextmanager
def workers_ahead(count: int) -> Iterator[list[ProcessPoolExecutor]]:
    """Workers that import torch at once, with a pool each, so that a task can be sent to a specific one."""
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(worker_pool(1)) for _ in range(count)]
        for pool in pools:
            pool.submit(exec, "import lipcert.results")
        yield pools


@contextlib.contextmanager
def worker_pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that share the cores, until the ``with`` block ends: tasks that are not finished then are dropped.

    Workers do not import the main module, so a script needs no ``if __name__ == "__main__"``, and what they are given
    must not be defined in it. If a worker dies, its future and those after it raise ``BrokenProcessPool``.

    Args:
        count: number of processes, at least 1.
    """
    if obstacle := _obstacle():
        raise InputError(f"workers cannot be started: {obstacle}; use --workers 0")
    threads = max(1, (os.cpu_count() or 1) // count)
    context, preparation = _Context(), pickle.dumps(_Call(_prepare, threads))
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=pickle.loads, initargs=(preparation,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in context.processes:
            if process.pid is not None:  # None where it has not started
                process.terminate()


class _Call:
    """A call that is made where this is unpickled."""

    def __init__(self, function: Callable[..., None], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class _Process(multiprocessing.context.SpawnProcess):
    """A process that names an empty main module, because ``spawn`` makes a child import the one that is named."""

    def __reduce__(self) -> Any:  # unpickled without this module, which imports torch
        return object.__new__, (multiprocessing.context.SpawnProcess,), self.__dict__

    def start(self) -> None:
        with _STARTING:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = main


class _Context(multiprocessing.context.SpawnContext):
    def __init__(self) -> None:
        super().__init__()
        self.processes: list[_Process] = []

    def Process(self, *args: Any, **options: Any) -> _Process:  # type: ignore[override]
        self.processes.append(_Process(*args, **options))
        return self.processes[-1]


def _prepare(threads: int) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # control-C on a terminal ends workers without a traceback
    warnings.simplefilter("ignore")  # the parent does the same work, and says what there is to say once
    import torch

    from lipcert.numerics import keep_freed

    torch.set_num_threads(threads)
    keep_freed()


def _end_with(parent: Any) -> None:
    """Ends this worker with its parent, also a killed one, after which the pool's pipe stays open: workers hold it."""
    parent.join()
    os._exit(1)
