"""Available memory, and recognition of out-of-memory errors."""

from __future__ import annotations

import ctypes
import re
import sys
import time
from functools import lru_cache
from typing import Any

import torch

from lipcert.workers import main_memory_left

# Messages of torch's allocators, which raise RuntimeError on a CPU.
_MESSAGES = re.compile(r"not enough memory|can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.I)

# Options of glibc's mallopt, and the bytes at the end of the heap that it keeps.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _KEPT = -1, -4, 2**30

_given_back = 0.0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory was exhausted."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))
    )


def memory_left(device: torch.device) -> float:
    """Bytes available on a device; inf if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return main_memory_left()


def give_back(every: float = 0.0) -> None:
    """Returns free memory to the system, at most once in ``every`` seconds.

    glibc keeps it, and matrices of many sizes fragment it.
    """
    global _given_back
    if _glibc() is not None and time.monotonic() - _given_back >= every:
        _glibc().malloc_trim(0)
        _given_back = time.monotonic()


def keep_freed() -> None:
    """Makes glibc keep what this process frees, in place of mapping memory for each large tensor anew.

    A page that is mapped anew costs a fault, for large batches as much time as the arithmetic. :func:`give_back` still
    returns it.
    """
    if _glibc() is not None:
        _glibc().mallopt(_M_MMAP_MAX, 0)
        _glibc().mallopt(_M_TRIM_THRESHOLD, _KEPT)


@lru_cache(maxsize=1)
def _glibc() -> Any:
    """The C library if it is glibc, else None."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None
