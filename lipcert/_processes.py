"""The processes of a run, such as those that ``torchrun`` starts, and what they tell each other."""

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

# Processes wait for each other at the start and at the end, and one may take much longer than another.
_PATIENCE = timedelta(days=365)


@dataclass(frozen=True)
class Processes:
    """This process among those of a run.

    Attributes:
        rank: 0 for the process that speaks and merges.
        count: how many there are.
    """

    rank: int = 0
    count: int = 1

    @staticmethod
    def of_torchrun() -> Processes:
        """What torchrun says in the environment; a process that it did not start is alone."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return Processes()
        return Processes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    @staticmethod
    def connected() -> Processes:
        """Those of torch.distributed, whoever initialised it; else this process is alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return Processes()
        return Processes(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def connect(self) -> None:
        """Makes them known to torch.distributed; before anything else that they do in common."""
        if self.count > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_PATIENCE)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order, in each of them; waits until all have called it."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def add_up(self, tensor: Tensor) -> Tensor:
        """Puts the sum over all processes into each one's tensor; waits until all have called it."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that all processes go through; at its end all of them raise if one did, so that none waits in vain.

        Raises:
            InputError: another process failed.
        """
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
