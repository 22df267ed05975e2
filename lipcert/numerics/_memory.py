"""Available memory, and recognition of out-of-memory errors."""

from __future__ import annotations

import ctypes
import math
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# Messages of torch's allocators, which raise RuntimeError on a CPU.
_MESSAGES = re.compile(r"not enough memory|can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.I)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory was exhausted."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))
    )


def memory_left(device: torch.device) -> float:
    """Bytes available on a device; inf if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        facts = Path("/proc/meminfo").read_text()
    except OSError:
        return math.inf
    available = re.search(r"MemAvailable:\s+(\d+) kB", facts)
    return min(1024.0 * int(available[1]) if available else math.inf, _left_in_container())


def _left_in_container() -> float:
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current"))
        return float(limit) - float(used)  # without a limit the file holds "max"
    except (OSError, ValueError):
        return math.inf


def give_back() -> None:
    """Returns free memory to the system. glibc keeps it, and matrices of many sizes fragment it."""
    trim = _trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _trim() -> Any:
    """glibc's malloc_trim; None for other C libraries."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
