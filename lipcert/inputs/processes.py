"""The processes of a run, such as those of ``torchrun``, and their communication."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lipcert.errors import InputError

# Processes wait for each other at the start and at the end, and their running times may differ widely.
_PATIENCE = timedelta(days=365)


@dataclass(frozen=True)
class Processes:
    """This process among those of a run; the one of rank 0 prints and merges."""

    rank: int = 0
    count: int = 1

    @staticmethod
    def of_torchrun() -> Processes:
        """Reads torchrun's environment variables; a process not started by torchrun is alone."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return Processes()
        return Processes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    @staticmethod
    def connected() -> Processes:
        """The processes of torch.distributed if it is initialised; otherwise this process is alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return Processes()
        return Processes(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this process prints and merges for all."""
        return self.rank == 0

    def connect(self) -> None:
        """Initialises torch.distributed. Call it before any other communication."""
        if self.count > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_PATIENCE)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes, by rank, to each of them; waits until all have called it."""
        if self.count == 1:
            return [value]
        gathered: list[Any] = [None] * self.count
        dist.all_gather_object(gathered, value)
        return gathered

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sums the tensor over all processes, in place; waits until all have called it."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that all processes run. If one of them raises, all raise at its end, so that none waits forever."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = any(self.gather(failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise InputError("another process of this run failed; its message says why")

    def close(self) -> None:
        """Ends the connection to the others, if there was one."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()
