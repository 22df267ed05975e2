"""The processes that ``torchrun`` starts, and what they tell each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

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

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order, in each of them; waits until all have called it."""
        if self.count == 1:
            return [value]
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_PATIENCE)
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def close(self) -> None:
        """Ends the connection to the others, if there was one."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()
