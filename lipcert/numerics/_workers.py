"""A pool of processes that never runs the user's script again."""

import contextlib
import multiprocessing.context
import os
import pickle
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from lipcert.numerics._memory import keep_freed

_STARTING = threading.Lock()


@contextlib.contextmanager
def worker_pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that share the cores, until the ``with`` block ends: tasks that are not finished then are dropped.

    Workers do not import the main module, so a script needs no ``if __name__ == "__main__"``, and what they are given
    must not be defined in it. If a worker dies, its future and those after it raise ``BrokenProcessPool``.

    Args:
        count: number of processes, at least 1.
    """
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
    """A process that is told of an empty main module: ``spawn`` makes a child import the one that it is told of."""

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
    torch.set_num_threads(threads)
    keep_freed()


def _end_with(parent: Any) -> None:
    """Ends this worker with its parent, also a killed one, after which the pool's pipe stays open: workers hold it."""
    parent.join()
    os._exit(1)
