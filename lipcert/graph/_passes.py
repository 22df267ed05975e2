"""Counting the passes through a network while it is read, for those who wait for a large one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WATCH: ContextVar[Callable[[], None] | None] = ContextVar("passes", default=None)


@contextmanager
def passes(watch: Callable[[], None]) -> Iterator[None]:
    """Calls ``watch`` after each pass while the block runs."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def passed() -> None:
    """Says that images have been sent through the network once."""
    if (watch := _WATCH.get()) is not None:
        watch()
