"""Counts forward passes while a network is captured, for reports of progress."""

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
    """Reports one forward pass."""
    if (watch := _WATCH.get()) is not None:
        watch()
